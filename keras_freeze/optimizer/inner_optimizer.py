"""The optimizers inside an optimizer: how to find them, and how to reset them."""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import keras

from keras_freeze import _keras_private
from keras_freeze._utils.typing import Optimizer


def walk(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and all optimizers inside it, outer ones first; nothing for None.

    An optimizer holds others as its `inner_optimizer` (LossScaleOptimizer, FreezeOptimizer) or as
    its `optimizers` (MultiOptimizer).
    """
    if optimizer is None:
        return
    yield optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    for part in getattr(optimizer, "optimizers", []) if inner is None else [inner]:
        yield from walk(part)


def is_one_of_several(optimizer: Optimizer, outer: Any) -> bool:
    """Return whether `optimizer` is a part of a MultiOptimizer that is `outer` or inside it."""
    around = itertools.takewhile(lambda one: one is not optimizer, walk(outer))
    return any(isinstance(one, keras.optimizers.MultiOptimizer) for one in around)


def unbuild(optimizer: Any) -> None:
    """Prepare a built optimizer for being built again, for other variables."""
    _keras_private.forget_built_variables(optimizer)
    optimizer.built = False


def fresh_copies(inner: Any) -> list[tuple[Any, Any]]:
    """Pair each optimizer that has a state of its own with a new copy.

    The copy has its iterations and learning rate, but none of its other state.

    Raises:
        ValueError: if an optimizer cannot be copied by its configuration.
    """
    # All the state of a MultiOptimizer is that of its parts.
    return [(one, _fresh_copy(one)) for one in walk(inner) if not hasattr(one, "optimizers")]


def reset_to(inner: Any, copies: list[tuple[Any, Any]]) -> None:
    """Unbuild an optimizer and give it the state of its `fresh_copies`.

    The objects stay the same, and so do the variables of the iterations and the learning rate,
    which callbacks may hold, and functions that someone has set in place of methods. It is not
    enough to take the other variables out: TensorFlow would then refuse to export their model.
    """
    for old, fresh in copies:
        before = dict(vars(old))
        vars(old).clear()
        vars(old).update(vars(fresh))
        _keras_private.keep_counters(old, before)
        for name, value in before.items():
            if inspect.isroutine(value) and name not in vars(old):
                vars(old)[name] = value
    unbuild(inner)


def _fresh_copy(optimizer: Any) -> Any:
    with _keras_private.without_learning_rate_function(optimizer) as rate:
        try:
            config = optimizer.get_config()
            if not isinstance(rate, keras.Variable):
                config["learning_rate"] = rate
            fresh = type(optimizer).from_config(config)
        except Exception as error:
            raise ValueError(
                f"To reset {type(optimizer).__name__}, its `get_config` and `from_config` must "
                f"give an equal optimizer, and they failed: {error}"
            ) from error
    count = _keras_private.iterations_variable(optimizer)
    _keras_private.iterations_variable(fresh).assign(count)
    for name, value in vars(optimizer).items():
        # Settings, which a subclass may have left out of its configuration.
        is_setting = isinstance(value, (bool, int, float, str, type(None)))
        if is_setting and not name.startswith("_") and name != "built":
            setattr(fresh, name, value)
    _keras_private.copy_decay_exclusions(optimizer, fresh)
    return fresh


def averaging_optimizers(inner: Any) -> list[Any]:
    """Return the optimizers in `inner`, itself included, that keep moving averages (`use_ema`)."""
    return [optimizer for optimizer in walk(inner) if optimizer.use_ema]


def slots_of(inner: Any) -> dict[str, Any] | None:
    """Return the state of an optimizer by attribute; None if it has variables elsewhere.

    An attribute has a variable, or a list of one for each that the optimizer was built with (None
    where there is none).
    """
    built = _keras_private.built_variables(inner)
    iterations = _keras_private.iterations_variable(inner)
    state = {id(v) for v in inner.variables}
    slots: dict[str, Any] = {}
    for name, value in vars(inner).items():
        if id(value) in state:
            slots[name] = value
        elif isinstance(value, list) and len(value) == len(built):
            found = [id(v) for v in value if v is not None]
            if id(iterations) not in found and state.issuperset(found):
                slots[name] = list(value)
    lists = [value if isinstance(value, list) else [value] for value in slots.values()]
    return slots if state <= {id(v) for values in lists for v in values} else None
