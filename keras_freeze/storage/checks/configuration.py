"""Check what the configuration of a model in a `.freeze` file names before Keras reads it.

Keras turns every dictionary with a `class_name` into an object, wherever it is: a file could name
any class or function that Keras exports, and have it called. Here each one must be on a list
(`names`), or registered, or passed as a custom object, and of a kind that its place takes.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from keras_freeze._utils.bits import WIDTHS
from keras_freeze.storage.checks.kinds import (
    ANY,
    KERAS_FUNCTIONS,
    Kind,
    keras_kinds,
    kinds_of,
    place_of,
)
from keras_freeze.storage.errors import FreezeFileError

_OBJECT_KEYS = {
    *("module", "class_name", "config", "registered_name", "shared_object_id"),
    *("build_config", "compile_config", "name", "inbound_nodes"),
}
_FILE_KEYS = {"vocabulary", "idf_weights"}  # strings under these are paths for Keras
_LABELS = {"name", "class_name", "module", "registered_name", "keras_history"}

_MOST_LAYERS = 5_000
_MOST_CALLS = 20_000
_DEEPEST = 200
_LARGEST_WHOLE = 1 << 53
# Metrics of Keras create lists of these lengths; the largest sum of all such lengths.
_LIST_LENGTHS = ("num_thresholds", "num_classes")
_LONGEST_LISTS = 1 << 20


def dictionaries_in(config: Any) -> Iterator[dict[Any, Any]]:
    """Iterate over all dictionaries in a configuration, outer ones first."""
    pending = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending.extend(reversed(list(value.values())))
        elif isinstance(value, (list, tuple)):
            pending.extend(reversed(value))


def check_configuration(config: Any, custom_objects: Mapping[str, Any] | None = None) -> None:
    """Refuse the configuration of a model that names what a `.freeze` file may not name.

    Args:
        config: The model as `keras.saving.serialize_keras_object` describes it.
        custom_objects: Classes and functions by name, in addition to those that are registered.

    Raises:
        FreezeFileError: If it does; the message says what it names, and where.
    """
    _Check(custom_objects).visit(config, Kind.LAYER, "model", 0)


def check_initializer(config: Any) -> None:
    """Refuse the configuration of an initializer as `check_configuration` does."""
    _Check(None).visit(config, Kind.INITIALIZER, "initializer", 0)


class _Check:
    """A walk over a configuration by the rules by which Keras looks up objects."""

    def __init__(self, custom_objects: Mapping[str, Any] | None) -> None:
        self._custom_objects = dict(custom_objects or {})
        self._shared: dict[int, tuple[Any, ...]] = {}
        self._num_layers = self._num_calls = self._num_listed = 0

    def visit(
        self, value: Any, place: Kind, where: str, depth: int, is_label: bool = False
    ) -> None:
        """Check a value of any type, and everything inside it."""
        if depth > _DEEPEST:
            raise _limit(f"is nested more than {_DEEPEST} levels deep")
        if isinstance(value, str):
            if not is_label:
                self._check_text(value, place, where)
        elif isinstance(value, dict):
            if "class_name" in value:
                self._check_object(value, place, where, depth)
                return
            for key, inner in value.items():
                self.visit(inner, place, _inside(where, key), depth + 1)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                self.visit(inner, place, f"{where}[{index}]", depth + 1)
        elif isinstance(value, int) and abs(value) > _LARGEST_WHOLE and Kind.SEED not in place:
            raise _refusal(f"the number {value}", where)

    def _registered(self, name: Any) -> Any:
        """Return what is registered or passed under a name, in the order in which Keras looks."""
        if not isinstance(name, str):
            return None
        return keras.saving.get_registered_object(name, custom_objects=self._custom_objects)

    def _check_text(self, text: str, place: Kind, where: str) -> None:
        """Refuse a string that is the registered name of an object of another kind.

        Keras looks up its own names only among the objects of the kind that the place takes; a name
        that it does not know stays a string, or is an error.
        """
        found = self._registered(text)
        if found is not None and not kinds_of(found) & place:
            what = "class" if inspect.isclass(found) else "function"
            raise _refusal(f"{text!r}, which is registered as a {what},", where)

    def _check_object(self, value: dict[Any, Any], place: Kind, where: str, depth: int) -> None:
        name = value["class_name"]
        if not isinstance(name, str) or "config" not in value:
            raise _refusal(f"an object without name or configuration ({name!r:.100})", where)
        if name.startswith("__"):
            self._check_special(name, value, place, where, depth)
            return
        if not set(value) <= _OBJECT_KEYS or not {"module", "registered_name"} <= set(value):
            raise _refusal(f"{name[:100]!r} in a format that is not that of Keras 3", where)
        if name == "function":
            self._check_function(value, place, where)
            return
        found = self._registered(value["registered_name"])
        module = value["module"]
        if found is None:
            kinds = keras_kinds(module, name)
        else:
            kinds = kinds_of(found) if inspect.isclass(found) else Kind.NONE
        if not kinds & place:
            label = value["registered_name"] if found is not None else f"{module}.{name}"
            raise _refusal(f"{str(label)[:200]!r}", where)
        self._check_shared(value, where)
        if Kind.LAYER in kinds or Kind.OPERATION in kinds:
            self._num_layers += 1
            if self._num_layers > _MOST_LAYERS:
                raise _limit(f"has more than {_MOST_LAYERS:,} layers")
        self._check_contents(value, found is not None, where, depth)
        if Kind.METRIC in kinds:
            self._check_lists(value["config"] or {})

    def _check_lists(self, config: Mapping[str, Any]) -> None:
        lengths = [config.get(key) for key in _LIST_LENGTHS]
        self._num_listed += sum(max(n, 0) for n in lengths if isinstance(n, int))
        if self._num_listed > _LONGEST_LISTS:
            raise _limit(f"has metrics with more than {_LONGEST_LISTS:,} thresholds and classes")

    def _check_shared(self, value: dict[Any, Any], where: str) -> None:
        """Refuse different classes under one number: Keras creates only the first object."""
        if "shared_object_id" not in value:
            return
        number = value["shared_object_id"]
        described = (value["module"], value["class_name"], value["registered_name"])
        if type(number) is not int or self._shared.setdefault(number, described) != described:
            raise _refusal("two different objects with one `shared_object_id`", where)

    def _check_contents(
        self, value: dict[Any, Any], is_custom: bool, where: str, depth: int
    ) -> None:
        config = value["config"]
        if not isinstance(config, dict) and config is not None:
            raise _refusal(f"an object with the configuration {config!r:.100}", where)
        for part in ("config", "build_config", "compile_config"):
            contents = value.get(part) or {}
            if not isinstance(contents, dict):
                raise _refusal(f"`{part}` {contents!r:.100}", where)
            for key, inner in contents.items():
                if key in _FILE_KEYS and isinstance(inner, str) and not is_custom:
                    raise _refusal(f"the path of a file ({inner[:100]!r})", _inside(where, key))
                place = place_of(key, is_custom)
                if part == "build_config":
                    place = ANY if is_custom else Kind.NONE
                self.visit(inner, place, _inside(where, key), depth + 2, key in _LABELS)
        nodes = value.get("inbound_nodes")
        if nodes is not None and not isinstance(nodes, (list, tuple)):
            raise _refusal(f"`inbound_nodes` {nodes!r:.100}", where)
        for index, node in enumerate(nodes or ()):
            self._check_call(node, f"{where}.inbound_nodes[{index}]", depth + 2)

    def _check_call(self, node: Any, where: str, depth: int) -> None:
        """Check a call of a layer: without a symbolic tensor, Keras would compute something."""
        self._num_calls += 1
        if self._num_calls > _MOST_CALLS:
            raise _limit(f"has more than {_MOST_CALLS:,} calls of layers")
        if not isinstance(node, dict) or set(node) != {"args", "kwargs"}:
            raise _refusal("a call in a format that is not that of Keras 3", where)
        if not any(d.get("class_name") == "__keras_tensor__" for d in dictionaries_in(node)):
            raise _refusal("a call without a tensor", where)
        for key, inner in node.items():
            self.visit(inner, Kind.ARRAY | Kind.TENSOR, f"{where}.{key}", depth)

    def _check_function(self, value: dict[Any, Any], place: Kind, where: str) -> None:
        name, module = value["config"], value["module"]
        if not isinstance(name, str):
            raise _refusal(f"a function with the name {name!r:.100}", where)
        found = self._registered(name)
        if found is not None:
            if inspect.isclass(found) or not kinds_of(found) & place:
                raise _refusal(f"the function {name[:100]!r}", where)
            return
        for kind, (modules, known) in KERAS_FUNCTIONS.items():
            is_known = name in known and module in ("builtins", *modules)
            # Where a place takes a function of Keras, Keras looks it up by either of its names.
            if kind in place and is_known and value["registered_name"] in (None, "function", name):
                return
        raise _refusal(f"the function {f'{module}.{name}'[:200]!r}", where)

    def _check_special(
        self, name: str, value: dict[Any, Any], place: Kind, where: str, depth: int
    ) -> None:
        config = value["config"]
        is_described = isinstance(config, dict) and set(value) <= {"class_name", "config"}
        if name in ("__numpy__", "__tensor__") and Kind.ARRAY in place and is_described:
            if set(config) == {"value", "dtype"} and config["dtype"] in WIDTHS:
                self.visit(config["value"], Kind.NONE, where, depth + 1)
                return
        elif name == "__ellipsis__" and Kind.TENSOR in place and config == {}:
            return
        elif name == "__slice__" and Kind.TENSOR in place and is_described:
            if set(config) == {"start", "stop", "step"}:
                self.visit(list(config.values()), place, where, depth + 1)
                return
        elif name == "__keras_tensor__" and Kind.TENSOR in place and _is_tensor(config):
            self.visit(config["shape"], Kind.NONE, where, depth + 1)
            return
        raise _refusal(f"{name[:100]!r}", where)


def _is_tensor(config: Any) -> bool:
    """Return whether a configuration describes a symbolic tensor that a layer returned."""
    if not isinstance(config, dict) or set(config) != {"shape", "dtype", "keras_history"}:
        return False
    history = config["keras_history"]
    return (
        isinstance(config["dtype"], str)
        and isinstance(history, (list, tuple))
        and len(history) == 3
        and isinstance(history[0], str)
        and all(type(index) is int and 0 <= index <= _MOST_CALLS for index in history[1:])
    )


def _inside(where: str, key: Any) -> str:
    return f"{where}.{str(key)[:50]}" if len(where) < 300 else where


def _limit(what: str) -> FreezeFileError:
    return FreezeFileError(f"The configuration of the model {what}.")


def _refusal(what: str, where: str) -> FreezeFileError:
    return FreezeFileError(
        f"The configuration of the model has {what} at {where}, where a `.freeze` file may not "
        "have it. If it is a custom class or function, import the module that registers it "
        "(`keras.saving.register_keras_serializable`), or pass it in `custom_objects`."
    )
