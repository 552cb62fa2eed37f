"""Training in several processes: that they agree, and the means of their gradients."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from keras import ops

from keras_freeze import backend
from keras_freeze.gradients.processes import with_gradient_anywhere
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.optimizer.inner_optimizer import walk
from keras_freeze.parameters import Parameter

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer

_DIGEST_SIZE = 16


class SharedGradients:
    """The means of gradients over the processes that train together.

    Which variables have gradients is agreed on in the first step, so that later ones exchange
    nothing but gradients.

    Args:
        parameters: the variables of an optimizer, classified, in order.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._is_needed: bool | None = None
        self._with_gradient: dict[tuple[int, ...], list[bool]] = {}

    def means(
        self, gradients: Sequence[Any], values: Sequence[Any], positions: Iterable[int]
    ) -> list[Any]:
        """Return the means of dense gradients, None where no process has one.

        Args:
            gradients: gradients, dense or compact, None where there is none.
            values: what they are the gradients of, of the same shapes.
            positions: the positions of their variables.

        Raises:
            ValueError: if a variable has a gradient that had none in the first step. Only in this
                process: the others wait for it, as for one that has ended.
        """
        if self._is_needed is None:
            self._is_needed = backend.averages_gradients([p.variable for p in self._parameters])
        if not self._is_needed:
            return list(gradients)
        key = tuple(positions)
        expected = self._with_gradient.get(key)
        if expected is None:
            expected = self._with_gradient[key] = with_gradient_anywhere(gradients)
        unexpected = [
            self._parameters[position].path
            for position, gradient, is_expected in zip(key, gradients, expected, strict=True)
            if gradient is not None and not is_expected
        ]
        if unexpected:
            raise ValueError(
                "In several processes, variables that have no gradient in the first step of all "
                f"of them must not get one later. Received: gradients of {', '.join(unexpected)}"
            )
        filled = [
            ops.zeros_like(value) if gradient is None else backend.to_dense(gradient)
            for gradient, value, is_expected in zip(gradients, values, expected, strict=True)
            if is_expected
        ]
        means = iter(backend.mean_over_processes(filled))
        return [next(means) if is_expected else None for is_expected in expected]


def check_agreement(
    optimizer: "MaskedOptimizer", parameters: Sequence[Parameter], mask: FreezeMask | None = None
) -> None:
    """Check that all processes have the same settings, variables, mask and weights.

    Args:
        optimizer: the FreezeOptimizer, which need not be built.
        parameters: its variables, classified.
        mask: the mask that it gets. None: it has it already, or there is none.

    Raises:
        ValueError: in all processes, if they do not.
    """
    with backend.across_processes([p.variable for p in parameters]):
        if backend.num_processes() == 1:
            return
        facts = _facts(optimizer, parameters, optimizer.mask if mask is None else mask)
        everyone = backend.gather_bytes(b"".join(facts.values()))
    for number, what in enumerate(facts):
        part = slice(_DIGEST_SIZE * number, _DIGEST_SIZE * (number + 1))
        groups: dict[bytes, list[int]] = {}
        for rank, content in enumerate(everyone):
            groups.setdefault(content[part], []).append(rank)
        if len(groups) > 1:
            ranks = " / ".join(", ".join(map(str, ranks)) for ranks in groups.values())
            raise ValueError(
                "Processes that train a model together must begin with the same settings of the "
                "FreezeOptimizer, the same mask and the same weights: build the model with a seed, "
                "or load one file in all processes, and call `keras_freeze.freeze` in all of them. "
                f"Received: {what} that differ between the processes {ranks}"
            )


def _facts(
    optimizer: "MaskedOptimizer", parameters: Sequence[Parameter], mask: FreezeMask | None
) -> dict[str, bytes]:
    """Return digests of what processes must agree on, by name."""
    variables = [
        (tuple(p.variable.shape), str(p.variable.dtype), p.kind, p.excluded) for p in parameters
    ]
    settings = (optimizer.settings, optimizer.l2, optimizer.grid)
    inner = [(type(one).__name__, _config_of(one)) for one in walk(optimizer.inner_optimizer)]
    return {
        "settings of the FreezeOptimizer": _digest([repr(settings).encode()]),
        "inner optimizers": _digest([repr(inner).encode()]),
        "variables": _digest([repr(variables).encode()]),
        "masks": _digest([b"" if mask is None else mask.fingerprint.encode()]),
        "weights": _digest(backend.to_numpy(p.variable).tobytes() for p in parameters),
    }


def _config_of(optimizer: Any) -> dict[str, Any]:
    """Return the settings of an optimizer, without names that a process makes up."""
    return {key: value for key, value in optimizer.get_config().items() if key != "name"}


def _digest(contents: Iterable[bytes]) -> bytes:
    found = hashlib.blake2b(digest_size=_DIGEST_SIZE)
    for content in contents:
        found.update(content)
    return found.digest()
