"""Functions that stand for a method on one instance, and can be told from those of a user."""

from collections.abc import Callable
from typing import Any

_MARK = "is_override_of_keras_freeze"


def override(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let a function stand for a method of this instance alone."""
    # Itself, since a function that someone wraps around it gets its attributes.
    setattr(function, _MARK, function)
    vars(owner)[name] = function


def is_override(function: Any) -> bool:
    """Return whether `override` has set a function, and nobody has wrapped another around it."""
    return function is not None and getattr(function, _MARK, None) is function


def remove_overrides(owner: Any) -> None:
    """Give an instance the methods of its class again."""
    for name in [name for name, value in vars(owner).items() if is_override(value)]:
        del vars(owner)[name]
