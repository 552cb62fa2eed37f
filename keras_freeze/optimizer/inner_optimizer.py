"""The optimizer inside a FreezeOptimizer: its parts, and how it is made again without its state."""

from typing import Any

import keras


def unbuild(optimizer: Any) -> None:
    """Makes a built optimizer ready to be built again, for other variables."""
    optimizer._trainable_variables_indices = {}
    optimizer.built = False


def renewals(inner: Any) -> list[tuple[Any, Any]]:
    """An optimizer's parts, each with a new one that it can become; nothing is changed yet.

    Raises:
        ValueError: for an optimizer that cannot be made again from its configuration.
    """
    # All the state of a MultiOptimizer is that of its parts.
    parts = [part for part in with_parts(inner) if not hasattr(part, "optimizers")]
    return [(part, _made_again(part)) for part in parts]


def renew(inner: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Unbuilds an optimizer and drops its state, but for its iterations and its rate.

    The objects stay. Variables cannot just be taken out of them: TensorFlow then refuses to export
    their model.
    """
    for old, fresh in pairs:
        vars(old).clear()
        vars(old).update(vars(fresh))
    unbuild(inner)


def _made_again(optimizer: Any) -> Any:
    rate = optimizer._learning_rate
    try:
        if not isinstance(rate, keras.Variable):
            vars(optimizer)["_learning_rate"] = None  # functions may have no configuration
        config = optimizer.get_config()
        if not isinstance(rate, keras.Variable):
            config["learning_rate"] = rate
        fresh = type(optimizer).from_config(config)
    except Exception as error:
        raise ValueError(
            f"To start anew, {type(optimizer).__name__} must be made again by its `get_config` and "
            f"`from_config`, which failed: {error}"
        ) from error
    finally:
        vars(optimizer)["_learning_rate"] = rate
    fresh._iterations.assign(optimizer._iterations)
    for name, value in vars(optimizer).items():
        # Settings, which a subclass may have left out of its configuration.
        is_setting = isinstance(value, (bool, int, float, str, type(None)))
        if is_setting and not name.startswith("_") and name != "built":
            setattr(fresh, name, value)
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(fresh, name, getattr(optimizer, name))
    return fresh


def with_parts(optimizer: Any) -> list[Any]:
    """An optimizer and, of a MultiOptimizer, those it is made of."""
    return [optimizer, *getattr(optimizer, "optimizers", [])]


def _with_averages(inner: Any) -> list[Any]:
    return [optimizer for optimizer in with_parts(inner) if optimizer.use_ema]
