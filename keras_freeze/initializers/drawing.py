"""Arrays of random numbers that a seed determines bit for bit."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_freeze._utils.validation import check_one_of, received
from keras_freeze.initializers.portable import SEEDED

# A parameter of the other one has the name of an argument: `VarianceScaling(...).values(shape)`.
_DISTRIBUTIONS = {name: kind for name, kind in SEEDED.items() if name != "variance_scaling"}


def draw(
    shape: Sequence[int],
    distribution: str = "standard_normal",
    *,
    seed: int,
    stream: int = 0,
    **parameters: Any,
) -> np.ndarray:
    """Draw an array of random numbers, the same bits on every machine, backend and version.

    Whoever has the few bytes of the arguments has the array: it need not be stored or sent. The
    generator is `GENERATOR`, "philox4x64-sign-fraction52-v1": Philox4x64-10 with the key (seed,
    stream), and arithmetic that IEEE 754 fixes to the last bit. docs/file_format.md describes it
    completely. A change of any bit would be a new generator under a new name.

    Args:
        shape: The lengths of the array's axes, 0 or more.
        distribution: What is drawn. Defaults to `"standard_normal"`.

            - `"standard_normal"`: N(0, 1), not truncated; the largest magnitude that can come is
              8.3.
            - `"normal"`: N(`mean`, `stddev`^2), by default N(0, 0.05^2).
            - `"truncated_normal"`: the same within two standard deviations.
            - `"uniform"`: from `minval` to `maxval`, which is left out; by default from -0.05 to
              0.05.
            - `"xavier_normal"`, `"kaiming_uniform"`, `"pm_sigma"`: with a scale that depends on the
              shape, as `XavierNormal`, `KaimingUniform` and `PlusMinusSigma` have it.
            - `"orthogonal"`: orthonormal columns or rows, times `gain`, as `Orthogonal`.
        seed: An integer in [0, 2**32).
        stream: An integer in [0, 2**32): arrays of one seed and different streams are independent.
            Defaults to `0`.
        **parameters: Parameters of the distribution: `mean` and `stddev`, `minval` and `maxval`, or
            `gain`.

    Returns:
        A NumPy array of dtype float32. For other dtypes, convert it with `astype`, which rounds to
        nearest and so gives the same bits everywhere, too. With the first four distributions, value
        number i in C order does not depend on the shape.

    Raises:
        TypeError: If `seed`, `stream` or a parameter has a wrong type, or if the distribution has
            no such parameter.
        ValueError: If the shape or the distribution is not possible, or if a number is out of
            range.

    Example:

    ```python
    draw = keras_freeze.initializers.draw
    projection = draw((784, 32), seed=7)
    mask = draw((784, 300), "uniform", seed=7, stream=1, minval=0.0, maxval=1.0) < 0.1
    ```
    """
    kind = _DISTRIBUTIONS[check_one_of("distribution", distribution, _DISTRIBUTIONS)]
    accepted = getattr(kind, "parameter_names", ())
    for name, value in parameters.items():
        if name not in accepted:
            known = ", ".join(f"`{one}`" for one in accepted) or "none"
            raise TypeError(
                f"Argument `{name}` is no parameter of the distribution {distribution!r}, which "
                f"has {known}. {received(name, value)}"
            )
    return kind(**parameters, seed=seed, stream=stream).values(shape)
