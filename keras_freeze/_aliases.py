"""Names under which modules can be imported besides their own: `import keras_freeze.models`."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

ALIASES = {
    "datasets": "paper.datasets",
    "experiments": "paper.experiments",
    "mask": "masks.mask",
    "models": "paper.models",
    "plots": "paper.plots",
    "runs": "paper.runs",
    "saliency": "criteria",
    "training": "paper.training",
    "tuning": "paper.tuning",
}
"""Where the public modules are that lie deeper in the package."""

_PACKAGE = __name__.partition(".")[0]


def target_of(name: str) -> str | None:
    """Return the full name of the module that an alias such as "keras_freeze.models" stands for."""
    package, _, rest = name.partition(".")
    first, dot, deeper = rest.partition(".")
    if package != _PACKAGE or first not in ALIASES:
        return None
    return f"{_PACKAGE}.{ALIASES[first]}{dot}{deeper}"


class _AliasImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if target_of(fullname) is None:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        name = target_of(spec.name)
        assert name is not None
        module = importlib.import_module(name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec again; it has run under its own name."""
        alias_spec = module.__spec__
        assert alias_spec is not None
        module.__spec__ = alias_spec.loader_state


def install() -> None:
    """Make the aliases importable."""
    if not any(isinstance(finder, _AliasImporter) for finder in sys.meta_path):
        # First: others would look for modules in an alias's folder, and run them a second time.
        sys.meta_path.insert(0, _AliasImporter())
