"""The layout of the package: who imports whom, how long files are, what names lead to."""

import ast
import functools
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import keras_freeze as kf
from keras_freeze._aliases import ALIASES

PACKAGE = Path(kf.__file__).parent
MOST_LINES = 450
# Files that are still longer.
LONG_FILES = {
    "_keras_private.py",  # which is to stay one file
    "backend/tensorflow.py",
}


@functools.cache
def modules() -> dict[str, Path]:
    """The files of the package by the full names of their modules."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("keras_freeze", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def statements(tree, into_functions):
    """All statements of a module that run; those of functions only if asked for."""
    for node in tree:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef) and not into_functions:
            continue
        for name in ("body", "orelse", "handlers", "finalbody"):
            yield from statements(getattr(node, name, []), into_functions)


@functools.cache
def imports_of(module, into_functions=False) -> frozenset[str]:
    """The modules of the package that a module imports, at its top level or anywhere."""
    found = set()
    for node in statements(ast.parse(modules()[module].read_text()).body, into_functions):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                found.add(inner if inner in modules() else node.module)
    found = {name for name in found if name in modules()}
    # A package runs before its modules do, for those that import one from outside.
    for name in list(found):
        package = name.rpartition(".")[0]
        while package.count(".") and not module.startswith(package):
            found.add(package)
            package = package.rpartition(".")[0]
    return frozenset(found - {module})


def test_the_core_does_not_import_what_repeats_the_paper():
    behind_aliases = {
        f"keras_freeze.{name}" for name in ALIASES if ALIASES[name].startswith("paper")
    }
    for module in modules():
        if module.startswith("keras_freeze.paper"):
            continue
        wrong = {
            name
            for name in imports_of(module, into_functions=True)
            if name.startswith("keras_freeze.paper") or name in behind_aliases
        }
        assert not wrong, f"{module} imports {wrong}"


def test_no_modules_import_each_other_in_a_circle():
    done, path = set(), []

    def visit(module):
        assert module not in path, f"a circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module in done:
            return
        path.append(module)
        for name in sorted(imports_of(module)):
            visit(name)
        path.pop()
        done.add(module)

    for module in modules():
        visit(module)


# From the top to the bottom: a module imports others of its own layer or of those below.
LAYERS = [
    ["__main__", "command_line"],
    ["paper"],
    ["callbacks"],
    ["quantization", "trained_vector"],
    ["storage"],
    ["freezing", "pruning", "reinitialization", "reporting"],
    ["computed_masks", "user_masks", "restricted"],
    ["criteria.scoring", "criteria.iterative_scoring", "gradients.flow"],
    ["model_state"],
    ["optimizer"],
    ["criteria", "gradients", "initializers", "masks"],
    [
        "parameters",
        "placements",
        "grids",
        "starts",
        "backend",
        "_utils",
        "_keras_private",
        "_version",
        "_aliases",
    ],
]


def layer_of(module):
    name = module.removeprefix("keras_freeze.")
    depths = [
        depth
        for depth, layer in enumerate(LAYERS)
        if any(f"{name}.".startswith(f"{unit}.") for unit in layer)
    ]
    assert depths, f"{module} is in none of the layers"
    return min(depths)


@pytest.mark.parametrize("module", [name for name in modules() if name != "keras_freeze"])
def test_imports_go_one_way(module):
    upwards = {
        name for name in imports_of(module) - {"keras_freeze"} if layer_of(name) < layer_of(module)
    }
    if module == "keras_freeze.masks.mask":  # which reads and writes plain arrays there
        upwards -= {"keras_freeze.storage", "keras_freeze.storage.masks"}
    assert not upwards


def test_files_are_short():
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in modules().values()
    }
    assert {name for name, length in lengths.items() if length > MOST_LINES} <= LONG_FILES


def test_no_module_has_the_name_of_a_public_function():
    functions = {name for name in kf.__all__ if inspect.isroutine(getattr(kf, name))}
    assert {"freeze", "report", "gradient_flow"} <= functions
    assert not functions & {module.rpartition(".")[2] for module in modules()}


def run(program):
    """What a program prints in a new process, of which nothing has been imported."""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.slow
def test_importing_the_package_loads_nothing_that_is_optional():
    optional = ("tensorflow_datasets", "keras_tuner", "matplotlib", "tensorboard")
    program = (
        "import sys, keras; before = set(sys.modules); import keras_freeze; "
        f"print(*(set(sys.modules) - before) & set({optional!r}))"
    )
    assert run(program) == []


@pytest.mark.cases(8)
@pytest.mark.parametrize("alias", ALIASES)
def test_old_names_lead_to_the_same_modules(alias):
    module = importlib.import_module(f"keras_freeze.{alias}")
    assert module is importlib.import_module(f"keras_freeze.{ALIASES[alias]}")
    assert module is getattr(kf, alias)
    prefix = f"keras_freeze.{ALIASES[alias]}."
    for inner in (name.removeprefix(prefix) for name in modules() if name.startswith(prefix)):
        by_alias = importlib.import_module(f"keras_freeze.{alias}.{inner}")
        assert by_alias is importlib.import_module(prefix + inner)


def test_old_names_can_be_imported_from():
    from keras_freeze.datasets import load_arrays
    from keras_freeze.models import lenet_5_caffe
    from keras_freeze.saliency import snip as by_alias

    from keras_freeze.criteria import snip

    assert snip is by_alias
    assert callable(load_arrays)
    assert lenet_5_caffe is kf.models.lenet_5_caffe
