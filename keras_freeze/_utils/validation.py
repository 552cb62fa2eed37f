"""Checks of arguments: each returns its argument in its final form, or raises an error that says
what the argument must be and what was received. Needs neither Keras nor a backend.
"""

import numbers
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")

_LONGEST = 200  # characters of a value in a message


def received(name: str, value: Any) -> str:
    """Return the end of an error message: "Received: x=... (of type ...)"."""
    if isinstance(value, type):
        return f"Received: {name}={value.__name__}, a class; pass an instance of it"
    text = " ".join(repr(value).split())
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return f"Received: {name}={text} (of type {type(value).__name__})"


def type_error(name: str, value: Any, accepted: str) -> TypeError:
    """Return the error about an argument of a wrong type."""
    return TypeError(f"Argument `{name}` must be {accepted}. {received(name, value)}")


def value_error(name: str, value: Any, accepted: str) -> ValueError:
    """Return the error about an argument of the right type with a value that is not accepted."""
    return ValueError(f"Argument `{name}` must be {accepted}. {received(name, value)}")


def check_int(name: str, value: Any, minimum: int = 0, end: int | None = None) -> int:
    """Return an integer of at least `minimum` and less than `end` as a Python int.

    Raises:
        TypeError: for anything but an integer; booleans are not integers here.
        ValueError: for one out of range.
    """
    if end is not None:
        accepted = f"an int in [{minimum}, {_power_of_two(end)})"
    else:
        accepted = "a positive int" if minimum == 1 else f"an int of at least {minimum}"
    if isinstance(value, bool):
        raise type_error(name, value, accepted)
    try:
        number = operator.index(value)
    except TypeError:
        raise type_error(name, value, accepted) from None
    if number < minimum or (end is not None and number >= end):
        raise value_error(name, value, accepted)
    return number


def check_json_int(name: str, value: Any, end: int) -> int:
    """Return an integer from 0 to `end - 1`; raise ValueError for anything else in JSON."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{name} is {value!r:.100}, not an integer in [0, {end})")
    return value


def check_number(
    name: str,
    value: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    positive: bool = False,
) -> float:
    """Return a finite real number in [minimum, maximum] as a Python float.

    Args:
        name: the argument's name.
        value: what was passed for it; NumPy's numbers are accepted, too.
        minimum, maximum: the bounds. None: none.
        positive: whether 0 and what is below are refused.

    Raises:
        TypeError: for anything but a real number; booleans are not numbers here.
        ValueError: for one that is out of range, infinite or NaN.
    """
    accepted = "a positive number" if positive else "a finite number"
    if minimum is not None:
        accepted = f"a number of at least {minimum:g}"
        if maximum is not None:
            accepted = f"a number in [{minimum:g}, {maximum:g}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise type_error(name, value, accepted)
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction
        number = float("inf")
    lowest = float("-inf") if minimum is None else minimum
    highest = float("inf") if maximum is None else maximum
    in_range = lowest <= number <= highest and abs(number) < float("inf")  # false of NaN
    if not in_range or (positive and number <= 0.0):
        raise value_error(name, value, accepted)
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return True or False; raise TypeError for anything else."""
    if not isinstance(value, bool):
        raise type_error(name, value, "True or False")
    return value


def check_one_of(name: str, value: Any, accepted: Iterable[str]) -> str:
    """Return one of several strings; raise ValueError for anything else."""
    names = list(accepted)
    if not isinstance(value, str) or value not in names:
        raise value_error(name, value, f"one of {', '.join(map(repr, names))}")
    return value


def check_instance(name: str, value: Any, kind: type[_T], accepted: str) -> _T:
    """Return an instance of a class, `accepted` in words; raise TypeError for anything else."""
    if not isinstance(value, kind):
        raise type_error(name, value, accepted)
    return value


def _power_of_two(number: int) -> str:
    exponent = number.bit_length() - 1
    return f"2**{exponent}" if exponent >= 16 and number == 1 << exponent else str(number)
