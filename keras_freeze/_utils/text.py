"""Text from files and errors made safe to print; times in words; values for JSON."""

import math
from collections.abc import Mapping
from typing import Any

_MOST_CHAINED = 20_000  # characters of an error that is shown beside another one


def printable(text: str, longest: int) -> str:
    """Escape, as `repr` does, all that does more than show a character.

    Those are control characters (a terminal takes them as commands), line ends, characters that
    turn the direction of writing or are not seen, and halves of surrogate pairs, which cannot be
    printed at all. Of more than `longest` characters, the beginning and the end are left.
    """
    if len(text) > longest:
        end = longest // 3
        text = f"{text[: longest - end - 3]}...{text[-end:]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_cause(error: BaseException) -> BaseException | None:
    """Return an error to show as the cause of another one.

    None if its text or that of its causes is not printable, or is very long.
    """
    cause: BaseException | None = error
    while cause is not None:
        lines = [*str(cause).split("\n"), *getattr(cause, "__notes__", ())]
        if not all(map(str.isprintable, lines)) or sum(map(len, lines)) > _MOST_CHAINED:
            return None
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return error


def duration(seconds: float) -> str:
    """Return a time in words, such as "2 min 05 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def jsonable(value: Any) -> Any:
    """Return a value as JSON can hold it: lists for tuples, None for numbers that are not finite.

    Args:
        value: mappings, lists and tuples, as deep as may be, of what `json` writes.
    """
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
