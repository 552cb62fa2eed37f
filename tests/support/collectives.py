"""What the devices of a compiled JAX function exchange, read from its HLO."""

import math
import re

_OPERATIONS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


def exchanged(text):
    """The shapes of all arrays that are exchanged, in the text of a compiled function."""
    found = []
    for results in re.findall(rf"= (.*?) (?:{_OPERATIONS})(?:-start)?\(", text):
        shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", results)
        found += [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]
    return found


def num_exchanged(text):
    """How many numbers are exchanged that are not scalars, such as the loss and metrics."""
    return sum(math.prod(shape) for shape in exchanged(text) if shape)
