"""The three backends offer the same functions, so that the rest need not know which one it has."""

import ast
from pathlib import Path

import pytest

import keras_freeze

FOLDER = Path(keras_freeze.__file__).parent


def tree_of(path):
    return ast.parse(path.read_text())


def functions(name):
    """The public functions of a backend: their arguments, as written."""
    own = [path.stem for path in (FOLDER / "backend").glob(f"*{name}*.py")]
    parts = ["defaults", *own]
    return {
        node.name: ast.unparse(node.args)
        for part in parts
        for node in tree_of(FOLDER / "backend" / f"{part}.py").body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def names_used_of_backends():
    """What the rest of the package reads of `keras_freeze.backend`."""
    return {
        node.attr
        for path in FOLDER.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "backend"
    }


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["jax", "torch"])
def test_every_backend_has_the_same_functions_with_the_same_arguments(name):
    used = names_used_of_backends()
    expected = {key: arguments for key, arguments in functions("tensorflow").items() if key in used}
    found = {key: arguments for key, arguments in functions(name).items() if key in used}
    assert found == expected
    assert {"with_gradient", "scatter", "top_k_mask"} <= found.keys()


def test_frameworks_are_imported_in_the_backends_alone():
    importing = set()
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {name.split(".")[0] for name in names} & {"jax", "tensorflow", "torch"}:
                importing.add(path.relative_to(FOLDER))
    folders = {path.parts[0] for path in importing}
    assert folders == {"_keras_private.py", "backend", "paper"}  # `paper` for its data sets
