"""Tests of examples/mails.py: what becomes of a mail, however it is written."""

import sys

import numpy as np
import pytest
from example_scripts import ROOT


@pytest.fixture(scope="module")
def mails():
    """The module of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
        import mails
    return mails


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"Subject: Hello\nX-Spam: yes\n\nHow are\n\tyou?\n", "Hello. How are you?"),
        (b"From: a@b\n\nNo subject", ". No subject"),
        (b"Subject: =?iso-8859-1?q?Caf=E9?=\n\n", "Café."),
        (b"Subject: =?none-such?q?x?=\n\n1", "=?none-such?q?x?=. 1"),
        (b"Content-Type: text/plain; charset=none-such\n\n\xe9", ". é"),
        (b"Content-Type: text/plain; charset=utf-8\n\n\xc3\xa9\xff", ". é\ufffd"),
        (b"Content-Transfer-Encoding: base64\n\naGVsbG8=\n", ". hello"),
        (
            b"Content-Type: text/html\n\n<style>p {}</style><p>1 &lt; <b>2</b><!-- 3 --></p>",
            ". 1 < 2",
        ),
        (
            b'Content-Type: multipart/alternative; boundary="-"\n\n---\nContent-Type: text/html\n\n'
            b"<p>HTML</p>\n---\n\nplain\n-----\n",
            ". plain",
        ),
        (b"Content-Type: image/png\n\n\x00\x01", "."),
    ],
)
def test_a_mail_becomes_its_subject_and_its_text(mails, data, text):
    assert mails.as_text(data) == text


def test_mails_are_read_in_order_and_once(mails, tmp_path):
    for number, folder in enumerate(mails.FOLDERS):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.txt").write_bytes(b"Subject: %d\n\n" % number)
        (tmp_path / folder / "2.txt").write_bytes(b"Subject: the same\n\n")
    texts, labels = mails.read(tmp_path)
    assert texts == ["0.", "the same.", "1.", "2.", "3.", "4."]
    np.testing.assert_array_equal(labels, [0, 0, 0, 0, 1, 1])


def test_a_missing_folder_is_named(mails, tmp_path):
    with pytest.raises(ValueError, match="data_dir must have mails in easy-ham-1: run `npm pack"):
        mails.read(tmp_path)
