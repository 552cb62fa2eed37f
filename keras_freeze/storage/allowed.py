"""What a configuration in a `.freeze` file may name, and where: checked before Keras sees it.

Keras turns every dictionary with a `class_name` into an object, wherever it stands: a file could
name any class or function that Keras exports, and have it called. Here each one must be on a list
(`allowed_names`), or registered, or passed as a custom object, and of a kind that its place takes.
"""

import enum
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_freeze.storage import allowed_names as names
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze._utils.bits import WIDTHS


class Kind(enum.Flag):
    """Kinds of objects; a place takes a union of them, or none, where only plain data may be."""

    NONE = 0
    LAYER = enum.auto()
    OPERATION = enum.auto()
    INITIALIZER = enum.auto()
    REGULARIZER = enum.auto()
    CONSTRAINT = enum.auto()
    ACTIVATION = enum.auto()
    LOSS = enum.auto()
    METRIC = enum.auto()
    OPTIMIZER = enum.auto()
    OPTIMIZER_MAP = enum.auto()
    SCHEDULE = enum.auto()
    POLICY = enum.auto()
    QUANTIZATION = enum.auto()
    SEED = enum.auto()
    TEXT = enum.auto()  # functions of a TextVectorization
    CRITERION = enum.auto()  # functions of a FreezeOptimizer
    ARRAY = enum.auto()
    TENSOR = enum.auto()  # a symbolic tensor, or a slice of one: arguments of a call


_FUNCTIONS = (
    Kind.INITIALIZER
    | Kind.REGULARIZER
    | Kind.CONSTRAINT
    | Kind.ACTIVATION
    | Kind.LOSS
    | Kind.METRIC
    | Kind.SCHEDULE
    | Kind.TEXT
    | Kind.CRITERION
)
"""Where functions may be: Keras expects one there."""

_ANY = ~Kind.OPERATION & ~Kind.OPTIMIZER_MAP & ~Kind.TENSOR
"""What a class of the user's may have in its configuration under a name that says nothing."""

_PLACES = {
    "layer": Kind.LAYER,
    "backward_layer": Kind.LAYER,
    "cell": Kind.LAYER,
    "cells": Kind.LAYER,
    "layers": Kind.LAYER | Kind.OPERATION,
    "dtype": Kind.POLICY,
    "policy_map": Kind.POLICY,
    "default_policy": Kind.POLICY,
    "quantization_config": Kind.QUANTIZATION,
    "weight_quantizer": Kind.QUANTIZATION,
    "activation_quantizer": Kind.QUANTIZATION,
    "learning_rate": Kind.SCHEDULE,
    "optimizer_map": Kind.OPTIMIZER | Kind.OPTIMIZER_MAP,
    "loss": Kind.LOSS,
    "metrics": Kind.METRIC | Kind.LOSS,
    "weighted_metrics": Kind.METRIC | Kind.LOSS,
    "fn": Kind.METRIC | Kind.LOSS,
    "seed": Kind.SEED,
    "standardize": Kind.TEXT,
    "split": Kind.TEXT,
    "criterion": Kind.CRITERION,
    **dict.fromkeys(("value", "scale", "offset", "mask_value"), Kind.ARRAY),
}
"""What a configuration of Keras's own classes may have under which name."""

_ENDINGS = {
    "initializer": Kind.INITIALIZER,
    "regularizer": Kind.REGULARIZER,
    "constraint": Kind.CONSTRAINT,
    "activation": Kind.ACTIVATION | Kind.LAYER,
    "optimizer": Kind.OPTIMIZER,
}
"""The same, by the last word of a name; these hold for classes of the user's too."""

_BASES: dict[Kind, type] = {
    Kind.LAYER: keras.Layer,
    Kind.INITIALIZER: keras.initializers.Initializer,
    Kind.REGULARIZER: keras.regularizers.Regularizer,
    Kind.CONSTRAINT: keras.constraints.Constraint,
    Kind.LOSS: keras.losses.Loss,
    Kind.METRIC: keras.metrics.Metric,
    Kind.OPTIMIZER: keras.optimizers.Optimizer,
    Kind.SCHEDULE: keras.optimizers.schedules.LearningRateSchedule,
    Kind.POLICY: keras.DTypePolicy,
    Kind.OPERATION: keras.Operation,
}

_CLASSES: Sequence[tuple[str, frozenset[str], Kind]] = (
    ("keras", frozenset({"Sequential", "Model"}), Kind.LAYER),
    ("keras.src.models.functional", frozenset({"Functional"}), Kind.LAYER),
    ("keras.layers", names.LAYERS, Kind.LAYER),
    ("keras.initializers", names.INITIALIZERS, Kind.INITIALIZER),
    ("keras.regularizers", names.REGULARIZERS, Kind.REGULARIZER),
    ("keras.constraints", names.CONSTRAINTS, Kind.CONSTRAINT),
    ("keras.losses", names.LOSSES, Kind.LOSS),
    ("keras.metrics", names.METRICS, Kind.METRIC),
    ("keras.optimizers", names.OPTIMIZERS, Kind.OPTIMIZER),
    ("keras.optimizers", frozenset({"OptimizerMap"}), Kind.OPTIMIZER_MAP),
    ("keras.optimizers.schedules", names.SCHEDULES, Kind.SCHEDULE),
    ("keras", frozenset({"DTypePolicy", "FloatDTypePolicy"}), Kind.POLICY),
    ("keras.dtype_policies", names.POLICIES, Kind.POLICY),
    ("keras.quantizers", names.QUANTIZATION, Kind.QUANTIZATION),
    ("keras.random", frozenset({"SeedGenerator"}), Kind.SEED),
    *((module, known, Kind.OPERATION) for module, known in names.OPERATIONS.items()),
)

_KERAS_FUNCTIONS: Mapping[Kind, tuple[frozenset[str], frozenset[str]]] = {
    Kind.ACTIVATION: (frozenset({"keras.activations"}), names.ACTIVATION_FUNCTIONS),
    Kind.LOSS: (frozenset({"keras.losses", "keras.metrics"}), names.LOSS_FUNCTIONS),
    Kind.METRIC: (frozenset({"keras.losses", "keras.metrics"}), names.METRIC_FUNCTIONS),
}

_OBJECT_KEYS = {
    *("module", "class_name", "config", "registered_name", "shared_object_id"),
    *("build_config", "compile_config", "name", "inbound_nodes"),
}
_FILE_KEYS = {"vocabulary", "idf_weights"}  # which Keras takes to be files if they are strings
_LABELS = {"name", "class_name", "module", "registered_name", "keras_history"}

_MOST_LAYERS = 5_000
_MOST_CALLS = 20_000
_DEEPEST = 200
_LARGEST_WHOLE = 1 << 53
# For which metrics of Keras make a list as soon as they are made, and the sum of all such lengths.
_LIST_LENGTHS = ("num_thresholds", "num_classes")
_LONGEST_LISTS = 1 << 20


def check_configuration(config: Any, custom_objects: Mapping[str, Any] | None = None) -> None:
    """Refuses the configuration of a model that names what a `.freeze` file may not.

    Args:
        config: as `keras.saving.serialize_keras_object` describes a model.
        custom_objects: classes and functions by name, beside those that are registered.

    Raises:
        FreezeFileError: that says what it names, and where.
    """
    _Check(custom_objects).visit(config, Kind.LAYER, "model", 0)


def check_initializer(config: Any) -> None:
    """Refuses the configuration of an initializer that names what a `.freeze` file may not.

    Raises:
        FreezeFileError: that says what it names.
    """
    _Check(None).visit(config, Kind.INITIALIZER, "initializer", 0)


class _Check:
    """One walk over a configuration, which follows the rules by which Keras finds objects."""

    def __init__(self, custom_objects: Mapping[str, Any] | None) -> None:
        self._custom_objects = dict(custom_objects or {})
        self._shared: dict[int, tuple[Any, ...]] = {}
        self._num_layers = self._num_calls = self._num_listed = 0

    def visit(
        self, value: Any, place: Kind, where: str, depth: int, is_label: bool = False
    ) -> None:
        """Checks a value of any kind, and all that is in it."""
        if depth > _DEEPEST:
            raise FreezeFileError(f"its configuration is nested more than {_DEEPEST} deep")
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
            raise FreezeFileError(f"its configuration has the number {value} at {where}")

    def _registered(self, name: Any) -> Any:
        """What is registered, or passed, under a name, in Keras's own order."""
        if not isinstance(name, str):
            return None
        return keras.saving.get_registered_object(name, custom_objects=self._custom_objects)

    def _check_text(self, text: str, place: Kind, where: str) -> None:
        """A string may be the name of an object: Keras's where it looks for its own, or the user's.

        Names of Keras's own are looked up among the objects of one kind only, which is that of the
        place; a name that it does not know stays a string, or is an error.
        """
        found = self._registered(text)
        if found is not None and not _kinds_of(found) & place:
            raise _refusal(f"{text!r}, which is registered as {_described(found)},", where)

    def _check_object(self, value: dict[Any, Any], place: Kind, where: str, depth: int) -> None:
        name = value["class_name"]
        if not isinstance(name, str) or "config" not in value:
            raise _refusal(f"an object without a name or a configuration ({name!r:.100})", where)
        if name.startswith("__"):
            self._check_special(name, value, place, where, depth)
            return
        if not set(value) <= _OBJECT_KEYS or not {"module", "registered_name"} <= set(value):
            raise _refusal(f"{name[:100]!r} in another format than Keras 3's", where)
        if name == "function":
            self._check_function(value, place, where)
            return
        found = self._registered(value["registered_name"])
        module = value["module"]
        kinds = _keras_kinds(module, name) if found is None else _class_kinds(found)
        if not kinds & place:
            label = value["registered_name"] if found is not None else f"{module}.{name}"
            raise _refusal(f"{str(label)[:200]!r}", where)
        self._check_shared(value, where)
        if Kind.LAYER in kinds or Kind.OPERATION in kinds:
            self._num_layers += 1
            if self._num_layers > _MOST_LAYERS:
                raise FreezeFileError(f"its configuration has more than {_MOST_LAYERS:,} layers")
        self._check_contents(value, found is not None, where, depth)
        if Kind.METRIC in kinds:
            self._check_lists(value["config"] or {})

    def _check_lists(self, config: Mapping[str, Any]) -> None:
        lengths = [config.get(key) for key in _LIST_LENGTHS]
        self._num_listed += sum(max(n, 0) for n in lengths if isinstance(n, int))
        if self._num_listed > _LONGEST_LISTS:
            raise FreezeFileError(
                f"its configuration has metrics of more than {_LONGEST_LISTS:,} thresholds and "
                "classes"
            )

    def _check_shared(self, value: dict[Any, Any], where: str) -> None:
        """Of objects with one number Keras makes the first only: they have to be of one class."""
        if "shared_object_id" not in value:
            return
        number = value["shared_object_id"]
        described = (value["module"], value["class_name"], value["registered_name"])
        if type(number) is not int or self._shared.setdefault(number, described) != described:
            raise _refusal("two objects that are said to be one", where)

    def _check_contents(
        self, value: dict[Any, Any], is_custom: bool, where: str, depth: int
    ) -> None:
        config = value["config"]
        if not isinstance(config, dict) and config is not None:
            raise _refusal(f"an object with the configuration {config!r:.100}", where)
        parts = (
            ("config", config or {}),
            ("build_config", value.get("build_config") or {}),
            ("compile_config", value.get("compile_config") or {}),
        )
        for part, contents in parts:
            if not isinstance(contents, dict):
                raise _refusal(f"a {part} that is {contents!r:.100}", where)
            for key, inner in contents.items():
                if key in _FILE_KEYS and isinstance(inner, str) and not is_custom:
                    raise _refusal(f"a file ({inner[:100]!r})", _inside(where, key))
                place = Kind.NONE if part == "build_config" else _place(key, is_custom)
                if part == "build_config" and is_custom:
                    place = _ANY
                self.visit(inner, place, _inside(where, key), depth + 2, key in _LABELS)
        for index, node in enumerate(_items(value.get("inbound_nodes"), where)):
            self._check_call(node, f"{where}.inbound_nodes[{index}]", depth + 2)

    def _check_call(self, node: Any, where: str, depth: int) -> None:
        """A call of a layer: with no symbolic tensor in it, Keras would compute something."""
        self._num_calls += 1
        if self._num_calls > _MOST_CALLS:
            raise FreezeFileError(
                f"its configuration has more than {_MOST_CALLS:,} calls of layers"
            )
        if not isinstance(node, dict) or set(node) != {"args", "kwargs"}:
            raise _refusal("a call in another format than Keras 3's", where)
        if not any(True for _ in _symbolic_tensors(node)):
            raise _refusal("a call without a tensor", where)
        for key, inner in node.items():
            self.visit(inner, Kind.ARRAY | Kind.TENSOR, f"{where}.{key}", depth)

    def _check_function(self, value: dict[Any, Any], place: Kind, where: str) -> None:
        name, module = value["config"], value["module"]
        if not isinstance(name, str):
            raise _refusal(f"a function with the name {name!r:.100}", where)
        found = self._registered(name)
        if found is not None:
            if inspect.isclass(found) or not _kinds_of(found) & place:
                raise _refusal(f"the function {name[:100]!r}", where)
            return
        for kind, (modules, known) in _KERAS_FUNCTIONS.items():
            is_known = name in known and module in ("builtins", *modules)
            # Where the place has a table of functions, Keras looks there for the one or the other.
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


def _place(key: Any, is_custom: bool) -> Kind:
    """The kinds that may be under a name in the configuration of an object."""
    ending = str(key).rsplit("_", 1)[-1]
    if ending in _ENDINGS:
        return _ENDINGS[ending]
    if is_custom and key != "dtype":
        return _ANY | _PLACES.get(str(key), Kind.NONE)
    return _PLACES.get(str(key), Kind.NONE)


def _keras_kinds(module: Any, name: str) -> Kind:
    kinds = Kind.NONE
    for known_module, known, kind in _CLASSES:
        if module == known_module and name in known:
            kinds |= kind
    # For PyTorch, Keras has classes of its own for the same optimizers.
    own = f"keras.src.backend.torch.optimizers.torch_{name.lower()}"
    if keras.backend.backend() == "torch" and name in names.OPTIMIZERS and module == own:
        kinds |= Kind.OPTIMIZER
    return kinds


def _class_kinds(found: Any) -> Kind:
    """The kinds of the instances of a class that is registered or passed."""
    return _kinds_of(found) if inspect.isclass(found) else Kind.NONE


def _kinds_of(found: Any) -> Kind:
    """The places that take a registered class or its instances, or a registered function."""
    if not callable(found):
        return Kind.NONE
    if str(getattr(found, "__module__", "")).split(".")[0] == "keras":
        # Registered or not, what is Keras's own has to be on the list.
        module = "builtins" if not inspect.isclass(found) else _public_module(found)
        return _keras_kinds(module, found.__name__) if module != "builtins" else Kind.NONE
    if not inspect.isclass(found):
        return _FUNCTIONS
    kinds = Kind.NONE
    for kind, base in _BASES.items():
        if issubclass(found, base):
            kinds |= kind
    return kinds or _ANY


def _public_module(found: Any) -> str:
    for module, known, _ in _CLASSES:
        if found.__name__ in known:
            public: Any = keras
            for part in module.split(".")[1:]:
                public = getattr(public, part, None)
            if getattr(public, found.__name__, None) is found:
                return module
    return ""


def _items(value: Any, where: str) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise _refusal(f"calls that are {value!r:.100}", where)
    return value


def _symbolic_tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        if value.get("class_name") == "__keras_tensor__":
            yield value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _symbolic_tensors(inner)


def _is_tensor(config: Any) -> bool:
    """Whether it describes a symbolic tensor that a layer has given."""
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


def _described(found: Any) -> str:
    return f"a {'class' if inspect.isclass(found) else 'function'}"


def _refusal(what: str, where: str) -> FreezeFileError:
    return FreezeFileError(
        f"its configuration has {what} at {where}, where a `.freeze` file may not have it. "
        "Classes and functions of your own have to be imported, so that they are registered, or "
        "passed as `custom_objects`"
    )
