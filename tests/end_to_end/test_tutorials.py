"""The tutorials of the documentation run, each with less data and fewer epochs."""

import re
from pathlib import Path

import pytest

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.py"))
QUICK = {"EPOCHS": "1", "NUM_EXAMPLES": "1000", "RATES": "(0.9,)"}


def quick(source):
    """The program with its constants replaced by smaller ones."""
    for name, value in QUICK.items():
        source, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", source, flags=re.M)
        assert count == (name in source), name
    return source


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_tutorial_runs(path, capsys):
    code = compile(quick(path.read_text(encoding="utf-8")), str(path), "exec")
    exec(code, {"__name__": "__main__"})
    assert "%" in capsys.readouterr().out
