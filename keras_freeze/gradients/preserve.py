"""Restoring a model: everything that it holds, and random state, bit for bit."""

import collections
import contextlib
import random
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend

# Of Keras's own classes, those that hold state. Objects of other classes are looked into where
# they are custom ones.
_KERAS_HOLDERS = (
    keras.Layer,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.losses.Loss,
    keras.random.SeedGenerator,
)
_CONTAINERS = (list, tuple, set, dict, collections.deque)
_LIBRARIES = {"jax", "jaxlib", "keras", "keras_freeze", "numpy", "tensorflow", "torch"}
_NO_CODE = (lambda: None).__code__
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, weakref.ref)


def held_by(model: Any) -> list[Any]:
    """Return a model and all that can be reached from its attributes.

    Layers, metrics, optimizers, losses, variables, random generators and objects of custom
    classes, also inside lists and dicts.
    """
    found: dict[int, Any] = {}
    seen = set()
    waiting = [model]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, _CONTAINERS):
            waiting.extend(one.values() if isinstance(one, dict) else one)
        elif _is_variable(one) or _is_array(one) or _generator_state(one) is not None:
            found[id(one)] = one
        elif _is_holder(one):
            found[id(one)] = one
            waiting.extend(vars(one).values())
    return list(found.values())


def _is_holder(one: Any) -> bool:
    if isinstance(one, _KERAS_HOLDERS):
        return True
    if not hasattr(one, "__dict__") or isinstance(one, _OPAQUE) or keras.ops.is_tensor(one):
        return False
    library = type(one).__module__.split(".")[0]
    return library not in _LIBRARIES and library not in sys.stdlib_module_names - {"__main__"}


def _is_variable(one: Any) -> bool:
    return isinstance(one, keras.Variable) or backend.is_plain_variable(one)


def variables_among(objects: Iterable[Any]) -> list[Any]:
    """Return the variables, Keras's and the backend's, among the objects of `held_by`."""
    return [one for one in objects if _is_variable(one)]


def _is_array(one: Any) -> bool:
    """Return whether it is an array that a step may change in place."""
    if isinstance(one, np.ndarray):
        return bool(one.flags.writeable)
    return backend.is_mutable_tensor(one)


class KeptArrays:
    """What arrays contain that belong to no variable, such as buffers on PyTorch."""

    def __init__(self, objects: Iterable[Any]) -> None:
        arrays = [one for one in objects if _is_array(one)]
        self._contents = [
            (a, a.copy() if isinstance(a, np.ndarray) else backend.read(a)) for a in arrays
        ]

    def put_back(self) -> None:
        for array, content in self._contents:
            if isinstance(array, np.ndarray):
                np.copyto(array, content)
            else:
                backend.refill(array, content)


class KeptValues:
    """The values that variables have now, and their gradients on PyTorch."""

    def __init__(self, variables: Iterable[Any]) -> None:
        self._values = [(v, backend.read(v)) for v in variables]
        self._gradients = backend.keep_gradients([v for v, _ in self._values])

    def put_back(self) -> None:
        for variable, value in self._values:
            variable.assign(value)
        backend.put_back_gradients(self._gradients)


class KeptRandomState:
    """The state of Python's, NumPy's, Keras's and the backend's random numbers."""

    def __init__(self, objects: Iterable[Any]) -> None:
        generator = _keras_private.global_seed_generator()
        self._seed = None if generator is None else (generator, backend.read(generator.state))
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._backend = backend.random_state()
        states = [(one, _generator_state(one)) for one in objects]
        self._generators = [(one, state) for one, state in states if state is not None]

    def put_back(self) -> None:
        if self._seed is None:
            _keras_private.set_global_seed_generator(None)
        else:
            generator, value = self._seed
            generator.state.assign(value)
            _keras_private.set_global_seed_generator(generator)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        backend.set_random_state(self._backend)
        for generator, state in self._generators:
            _set_generator_state(generator, state)


def _generator_state(one: Any) -> Any:
    """Return the state of a random generator of Python or NumPy; None for anything else."""
    if isinstance(one, random.Random):
        return one.getstate()
    if isinstance(one, np.random.RandomState):
        return one.get_state()
    return one.bit_generator.state if isinstance(one, np.random.Generator) else None


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


class KeptAttributes:
    """The attributes of objects, and what the lists, dicts and sets among them contain."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        for one in objects:
            if _is_holder(one):
                self._keep(one)

    def _keep(self, owner: Any) -> None:
        self._attributes.append((owner, dict(vars(owner))))
        for value in vars(owner).values():
            self._keep_content(value)

    def _keep_content(self, value: Any) -> None:
        value = getattr(value, "__wrapped__", value)  # of TensorFlow's dicts
        wrapped = _keras_private.wrapped_list(value)
        if wrapped is not None:  # besides the tracked list itself
            self._keep_content(wrapped)
        if id(value) in self._contents:
            return
        if _keras_private.is_tracker(value):
            self._contents[id(value)] = (value, None)
            self._keep(value)
        elif isinstance(value, tuple):
            for one in value:
                self._keep_content(one)
        elif isinstance(value, _CONTAINERS) and not isinstance(value, Mapping):
            self._contents[id(value)] = (value, list(value))
            for one in value:
                self._keep_content(one)
        elif isinstance(value, dict):
            self._contents[id(value)] = (value, dict(value))
            for one in value.values():
                self._keep_content(one)

    def put_back(self) -> None:
        for owner, attributes in self._attributes:
            vars(owner).clear()
            vars(owner).update(attributes)
        for container, content in self._contents.values():
            if content is not None:
                _refill(container, content)


def _refill(container: Any, content: Any) -> None:
    # Not by methods of a subclass: those of Keras and TensorFlow track what comes and goes.
    kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    kind.clear(container)
    if kind in (list, collections.deque):
        kind.extend(container, content)
    else:
        kind.update(container, content)


class KeptState:
    """All that a model holds: variables, optimizers, attributes of objects, random numbers."""

    def __init__(self, model: keras.Model) -> None:
        objects = held_by(model)
        self._attributes = KeptAttributes(objects)
        self._arrays = KeptArrays(objects)
        self._values = KeptValues(variables_among(objects))
        self._random_state = KeptRandomState(objects)

    def put_back(self) -> None:
        self._attributes.put_back()
        self._arrays.put_back()
        self._values.put_back()
        self._random_state.put_back()


@contextlib.contextmanager
def _put_back(kept: KeptState | KeptAttributes | KeptValues | KeptRandomState) -> Iterator[None]:
    try:
        yield
    finally:
        kept.put_back()


def everything_kept(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Restore all that a model holds."""
    return _put_back(KeptState(model))


@contextlib.contextmanager
def state_kept(model: keras.Model) -> Iterator[None]:
    """Restore what a forward pass changes: moving statistics, metrics, states, random state."""
    with _put_back(KeptRandomState(held_by(model))), values_kept(model):
        yield


def values_kept(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Restore moving statistics, seed generators, metrics and states, but not random state.

    Also the weights of layers that write them in a forward pass, such as SpectralNormalization.

    For a pass that builds the model: layers made in it draw the seeds of their initializers from
    Python's random numbers, and the next layers shall draw others.
    """
    objects = held_by(model)
    trained = {id(v) for v in trained_variables(model, objects)}
    for layer in filter(_writes_weights, objects):
        trained.difference_update(map(id, layer.trainable_variables))
    variables = [v for v in variables_among(objects) if id(v) not in trained]
    generator = _keras_private.global_seed_generator()
    if generator is not None:
        variables.append(generator.state)
    return _put_back(KeptValues(variables))


def variables_kept(variables: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Restore the values of variables."""
    return _put_back(KeptValues(variables))


def trained_variables(model: keras.Model, objects: Iterable[Any]) -> list[Any]:
    """Return what training steps change: trainable variables, and those of the optimizers."""
    of_optimizers = [
        variable
        for one in objects
        if isinstance(one, keras.optimizers.Optimizer)
        for variable in one.variables
    ]
    return [*model.trainable_variables, *of_optimizers]


def _writes_weights(one: Any) -> bool:
    """Return whether it is a layer that may assign to its weights when it is called."""
    if not isinstance(one, keras.Layer):
        return False
    if isinstance(one, keras.layers.SpectralNormalization):
        return True
    own = [kind for kind in type(one).__mro__ if kind.__module__.split(".")[0] not in _LIBRARIES]
    functions = (value for kind in own for value in vars(kind).values())
    names = {name for f in functions for name in getattr(f, "__code__", _NO_CODE).co_names}
    return not names.isdisjoint(("assign", "assign_add", "assign_sub"))


@contextlib.contextmanager
def layers_kept_if_it_fails(model: keras.Model) -> Iterator[None]:
    """Restore the attributes of a model's layers if something fails that may build them.

    Else a layer would be left built for wrong data, or without its variables.
    """
    attributes = KeptAttributes(one for one in held_by(model) if isinstance(one, keras.Layer))
    try:
        yield
    except BaseException:
        attributes.put_back()
        raise


def attributes_kept(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Restore the attributes of a model and of all that it holds, but no values of variables."""
    return _put_back(KeptAttributes(held_by(model)))


def others_kept(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Restore the attributes of what is not a layer, such as optimizers and metrics."""
    return _put_back(
        KeptAttributes(one for one in held_by(model) if not isinstance(one, keras.Layer))
    )
