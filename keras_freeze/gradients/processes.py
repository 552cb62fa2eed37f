"""Gradients of several processes that train together."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_freeze import _keras_private, backend
from keras_freeze.gradients.preserve import held_by, variables_among


def alone(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Return a scope in which each of several processes computes with a model by itself.

    Where the processes share the model's variables, what is assigned to them is forgotten.
    """
    if backend.num_processes() == 1:  # without looking for them
        return contextlib.nullcontext()
    variables = variables_among(held_by(model))
    generator = _keras_private.global_seed_generator()
    if generator is not None:
        variables.append(generator.state)
    return backend.own_values(variables)


@contextlib.contextmanager
def failing_together(variables: Sequence[Any]) -> Iterator[None]:
    """Return a scope whose errors reach all processes that train some variables.

    Raises:
        ValueError: in the processes without an error of their own, which would otherwise wait.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    with backend.across_processes(variables):
        if error is None and backend.num_processes() == 1:
            return
        everyone = backend.gather_bytes(bytes([error is not None]))
    if error is not None:
        raise error
    failed = [str(rank) for rank, flag in enumerate(everyone) if any(flag)]
    if failed:
        raise ValueError(
            "The gradients of another process cannot be computed, and so not their sum over all "
            f"processes: see its error. Received: an error in the processes {', '.join(failed)}"
        )


def check_alike(what: str, count: int, variables: Sequence[Any]) -> None:
    """Check that all processes that train some variables have the same count.

    Raises:
        ValueError: in all processes, if they do not.
    """
    with backend.across_processes(variables):
        everyone = [int(found) for found in backend.gather_bytes(b"%020d" % count)]
    if len(set(everyone)) > 1:
        raise ValueError(
            f"Processes that train a model together must have {what} in common. "
            f"Received: {', '.join(map(str, everyone))}"
        )


def with_gradient_anywhere(gradients: Sequence[Any]) -> list[bool]:
    """Return for each gradient whether it is not None in one of the processes at least."""
    everywhere = backend.gather_bytes(bytes(gradient is not None for gradient in gradients))
    return [any(flags) for flags in zip(*everywhere, strict=True)]


def sum_of_processes(gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Return the sums of dense gradients over all processes, None where none has one."""
    with backend.across_processes(variables):
        if backend.num_processes() == 1:
            return list(gradients)
        sums: list[Any] = []
        expected = with_gradient_anywhere(gradients)
        for gradient, variable, is_expected in zip(gradients, variables, expected, strict=True):
            if is_expected and gradient is None:
                gradient = ops.zeros(tuple(variable.shape), "float32")
            sums.append(backend.sum_over_processes(gradient) if is_expected else None)
        return sums
