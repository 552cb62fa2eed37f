"""Tutorials as Python files: convert them to Markdown and to notebooks.

python tools/tutobooks.py docs/tutorials/first_network.py first_network.ipynb
python tools/tutobooks.py docs/tutorials/first_network.py first_network.md

A tutorial has the form of the examples on keras.io ("tutobooks"): the docstring at the top has
lines `Title: ...` and the like, every other string at the module's own level is a cell of text in
Markdown, and what is between them are cells of code.
"""

import ast
import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cell:
    """A piece of a tutorial.

    Attributes:
        is_code: whether it is Python; Markdown otherwise.
        source: its text, without empty lines around it.
    """

    is_code: bool
    source: str


@dataclass(frozen=True)
class Tutorial:
    """A tutorial.

    Attributes:
        fields: what the top says: "Title", "Description", ...
        cells: text and code in order.
    """

    fields: dict[str, str]
    cells: tuple[Cell, ...]


def read(path: Path) -> Tutorial:
    """Read a tutorial.

    Args:
        path: the Python file.

    Returns:
        Its fields and cells.

    Raises:
        ValueError: if the file does not begin with a docstring that has a title.
    """
    source = path.read_text(encoding="utf-8")
    body = ast.parse(source).body
    if not body or not _is_text(body[0]):
        raise ValueError(f"A tutorial must begin with a docstring. Received: {path}")
    fields = _fields(body[0].value.value)
    if "Title" not in fields:
        raise ValueError(f"A tutorial's first docstring must have a `Title:`. Received: {path}")
    lines = source.splitlines()
    cells = []
    code_start = body[0].end_lineno
    for statement in body[1:]:
        if _is_text(statement):
            cells.append(_code(lines[code_start : statement.lineno - 1]))
            cells.append(Cell(False, statement.value.value.strip()))
            code_start = statement.end_lineno
    cells.append(_code(lines[code_start:]))
    return Tutorial(fields, tuple(cell for cell in cells if cell.source))


def to_markdown(tutorial: Tutorial) -> str:
    """Return a page: the title as heading, the description, then text and fenced code."""
    blocks = [f"# {tutorial.fields['Title']}"]
    if "Description" in tutorial.fields:
        blocks.append(f"*{tutorial.fields['Description']}*")
    blocks += [
        f"```python\n{cell.source}\n```" if cell.is_code else cell.source for cell in tutorial.cells
    ]
    return "\n\n".join(blocks) + "\n"


def to_notebook(tutorial: Tutorial) -> dict[str, object]:
    """Return a Jupyter notebook (nbformat 4.5) without outputs, as a dictionary for JSON."""
    title = f"# {tutorial.fields['Title']}"
    if "Description" in tutorial.fields:
        title += f"\n\n*{tutorial.fields['Description']}*"
    cells = [Cell(False, title), *tutorial.cells]
    return {
        "cells": [_notebook_cell(number, cell) for number, cell in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _notebook_cell(number: int, cell: Cell) -> dict[str, object]:
    common = {
        "id": f"cell-{number}",
        "metadata": {},
        "source": cell.source.splitlines(keepends=True),
    }
    if cell.is_code:
        return {"cell_type": "code", "execution_count": None, "outputs": [], **common}
    return {"cell_type": "markdown", **common}


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _fields(docstring: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in docstring.strip().splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _code(lines: list[str]) -> Cell:
    return Cell(True, "\n".join(lines).strip())


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    tutorial = read(source)
    if target.suffix == ".ipynb":
        text = json.dumps(to_notebook(tutorial), indent=1) + "\n"
    else:
        text = to_markdown(tutorial)
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
