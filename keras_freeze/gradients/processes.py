"""Gradients of several processes that train together."""

from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_freeze import backend


def with_gradient_anywhere(gradients: Sequence[Any]) -> list[bool]:
    """Return for each gradient whether it is not None in one of the processes at least."""
    everywhere = backend.gather_bytes(bytes(gradient is not None for gradient in gradients))
    return [any(flags) for flags in zip(*everywhere, strict=True)]


def sum_of_processes(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the sums of dense gradients over all processes, None where none has one."""
    with backend.across_processes(variables):
        if backend.num_processes() == 1 or not backend.SUMS_OVER_PROCESSES:
            return list(gradients)
        return [
            backend.sum_over_processes(ops.zeros(tuple(variable.shape)) if g is None else g)
            if is_expected
            else None
            for g, variable, is_expected in zip(
                gradients, variables, with_gradient_anywhere(gradients), strict=True
            )
        ]
