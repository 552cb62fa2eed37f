"""Patterns of paths and their rates, as a `distribution` has them. Neither Keras nor NumPy."""

import fnmatch
from collections.abc import Sequence

Patterns = tuple[tuple[str, float], ...]


def rates_of_paths(
    patterns: Patterns, paths: Sequence[str], must_match: bool = True
) -> dict[str, float]:
    """Return the rates of the paths that patterns match; the first one that matches counts.

    A pattern of `fnmatch` matches whole components of a path, wherever they are, as an entry of
    `exclude` does; its `*` may stand for several. The model's name, which is the first component of
    all paths or of none, is left out, unless a pattern then matches nothing.

    Args:
        patterns: pairs of pattern and rate.
        paths: the paths of weights.
        must_match: whether a pattern for which no path is left is an error. Otherwise the patterns
            are of a network that exists already, and one that begins with the name that the model
            had elsewhere matches what follows it.

    Raises:
        ValueError: If a pattern matches nothing, or only what an earlier one matches already, and
            `must_match` is true.

    Example:
        >>> rates_of_paths((("conv*", 0.5),), ["net/conv1/kernel", "net/fc1/kernel"])
        {'net/conv1/kernel': 0.5}
    """
    short = _without_model_name(paths)
    rates: dict[str, float] = {}
    for pattern, rate in patterns:
        found = _found(pattern, short)
        if not found and not must_match:
            found = [path for path in short if _matches_elsewhere(pattern, path, short[path])]
        new = [path for path in found if path not in rates]
        if not new and must_match:
            shown = ", ".join(map(repr, list(short.values())[:12])) or "none"
            more = f", ... ({len(short)} in all)" if len(short) > 12 else ""
            raise ValueError(
                "Every pattern of `distribution` must match the path of a weight that no earlier "
                f"pattern matches. The weights are {shown}{more}. "
                f"Received: distribution with the pattern {pattern!r}"
            )
        rates.update(dict.fromkeys(new, rate))
    return rates


def pattern_without_name(pattern: str, name: str, paths: Sequence[str]) -> str:
    """Return a pattern without the model's name, if it begins with it and matches the same then.

    Args:
        pattern: a pattern of `rates_of_paths`.
        name: the first component of all `paths`.
        paths: the paths of weights.

    Example:
        >>> paths = ["net/conv1/kernel", "net/fc1/kernel"]
        >>> pattern_without_name("net/conv1/kernel", "net", paths)
        'conv1/kernel'
    """
    first, _, rest = pattern.partition("/")
    short = _without_model_name(paths)
    matched = _found(pattern, short)
    return rest if first == name and matched and _found(rest, short) == matched else pattern


def model_name(paths: Sequence[str]) -> str:
    """Return the first component of paths, which is the model's name; empty if they differ in it.

    Example:
        >>> model_name(["net/conv1/kernel", "net/fc1/kernel"])
        'net'
    """
    firsts = {path.partition("/")[0] for path in paths}
    return firsts.pop() if len(firsts) == 1 else ""


def _without_model_name(paths: Sequence[str]) -> dict[str, str]:
    name = model_name(paths)
    return {path: path.partition("/")[2] if name else path for path in paths}


def _found(pattern: str, short: dict[str, str]) -> list[str]:
    """Return which paths a pattern matches; `short` has each one without the model's name."""
    found = [path for path in short if _matches(pattern, short[path])]
    return found or [path for path in short if _matches(pattern, path)]


def _matches_elsewhere(pattern: str, path: str, short: str) -> bool:
    """Return whether a pattern that begins with another name of the model matches a path."""
    rest = pattern.partition("/")[2]
    # In a path such as fc/kernel the first component is a layer that the pattern must name.
    candidates = [path, short] if "/" in short else [path]
    return any(_matches(rest, one, from_start=True) for one in candidates)


def _matches(pattern: str, path: str, from_start: bool = False) -> bool:
    """Return whether some components of a path, one after the other, match."""
    parts = path.split("/")
    starts = range(1 if from_start else len(parts))
    some = ("/".join(parts[i:j]) for i in starts for j in range(i + 1, len(parts) + 1))
    return any(fnmatch.fnmatchcase(part, pattern) for part in some)
