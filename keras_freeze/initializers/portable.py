"""Keras's random initializers, with values that a seed determines bit for bit everywhere.

Each class draws from exactly the distribution of the Keras initializer of the same name, and its
numbers come from the generator of `keras_freeze.initializers`: the same on every machine, backend
and version. `HeNormal`, `GlorotUniform` and so on are `VarianceScaling`, as they are in Keras.
`portable_version` gives the one that stands for an initializer of Keras.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze._utils.validation import check_number, check_one_of, type_error
from keras_freeze.initializers.generator import upper_quantile
from keras_freeze.initializers.seeded import (
    DISTRIBUTIONS,
    SeededInitializer,
    Transform,
    check_shape,
    compute_fans,
)

_TAIL = 0.022750131948179208  # of N(0, 1) beyond two standard deviations, on one side
_TRUNCATED_STDDEV = 0.87962566103423978  # of N(0, 1) cut at two standard deviations, as in Keras

_LARGEST = float(np.finfo(np.float32).max)
_MODES = ("fan_in", "fan_out", "fan_avg")
_SHAPES = ("truncated_normal", "untruncated_normal", "uniform")

# Orthogonal: normal numbers are rounded to multiples of 2^-16. With up to 2^19 rows, sums of
# products of two of them are integers below 2^53 (times 2^-32).
_FRACTION_BITS = 16
_MOST_ROWS = 1 << 19


class ParameterizedInitializer(SeededInitializer):
    """Base of the seeded initializers that have parameters besides seed and stream.

    `parameter_names` are the names of these parameters, here and in the initializer of Keras.
    """

    parameter_names: tuple[str, ...]

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {**self.parameters, **super().get_config()}

    @property
    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments besides seed and stream, which JSON can hold."""
        values = {name: getattr(self, name) for name in self.parameter_names}
        return {name: value for name, value in values.items() if value is not None}


@keras.saving.register_keras_serializable(package="keras_freeze")
class RandomUniform(ParameterizedInitializer):
    """Draw from the uniform distribution on [minval, maxval), as Keras's `RandomUniform`.

    Args:
        minval: the lower bound.
        maxval: the upper bound, which is not among the values unless it is the lower one, too.
        seed, stream: as in `SeededInitializer`.

    Example:
        >>> layer = keras.layers.Embedding(100, 8, embeddings_initializer=RandomUniform(-0.1, 0.1))
    """

    parameter_names = ("minval", "maxval")

    def __init__(
        self, minval: float = -0.05, maxval: float = 0.05, seed: int = 0, stream: int = 0
    ) -> None:
        super().__init__(seed, stream)
        self.minval = _check_number("minval", minval)
        self.maxval = _check_number("maxval", maxval)

    def _transform(self, shape: tuple[int, ...]) -> Transform:
        center = 0.5 * self.minval + 0.5 * self.maxval
        half = 0.5 * self.maxval - 0.5 * self.minval
        lowest = _float32_at_least(min(self.minval, self.maxval))
        highest = max(_float32_below(max(self.minval, self.maxval)), lowest)
        return lambda signs, fractions: np.clip(signs * fractions * half + center, lowest, highest)


@keras.saving.register_keras_serializable(package="keras_freeze")
class RandomNormal(ParameterizedInitializer):
    """Draw from N(mean, stddev^2), as Keras's `RandomNormal`.

    Args:
        mean: the mean.
        stddev: the standard deviation.
        seed, stream: as in `SeededInitializer`.

    Example:
        >>> layer = keras.layers.Dense(8, kernel_initializer=RandomNormal(stddev=0.02, seed=1))
    """

    parameter_names = ("mean", "stddev")

    def __init__(
        self, mean: float = 0.0, stddev: float = 0.05, seed: int = 0, stream: int = 0
    ) -> None:
        super().__init__(seed, stream)
        self.mean = _check_number("mean", mean)
        self.stddev = _check_number("stddev", stddev)

    def _transform(self, shape: tuple[int, ...]) -> Transform:
        def transform(signs: np.ndarray, fractions: np.ndarray) -> np.ndarray:
            return signs * upper_quantile(fractions * 0.5) * self.stddev + self.mean

        return transform


@keras.saving.register_keras_serializable(package="keras_freeze")
class TruncatedNormal(RandomNormal):
    """Draw from N(mean, stddev^2) within two standard deviations, as Keras's `TruncatedNormal`.

    Args:
        mean: the mean.
        stddev: the standard deviation before truncation.
        seed, stream: as in `SeededInitializer`.

    Example:
        >>> float(abs(TruncatedNormal(stddev=1.0).values((1000,))).max()) <= 2.0
        True
    """

    def _transform(self, shape: tuple[int, ...]) -> Transform:
        reach = 2.0 * abs(self.stddev)
        lowest = _float32_at_least(self.mean - reach)
        highest = max(_float32_at_most(self.mean + reach), lowest)

        def transform(signs: np.ndarray, fractions: np.ndarray) -> np.ndarray:
            magnitudes = upper_quantile(_TAIL + fractions * (0.5 - _TAIL))
            return np.clip(signs * magnitudes * self.stddev + self.mean, lowest, highest)

        return transform


@keras.saving.register_keras_serializable(package="keras_freeze")
class VarianceScaling(ParameterizedInitializer):
    """Draw with a variance that depends on the shape, as Keras's `VarianceScaling`.

    The variance is `scale / n`, with n the fan in, the fan out, or their mean. Glorot, He and LeCun
    initializers are this one with other arguments.

    Args:
        scale: a positive number.
        mode: "fan_in", "fan_out" or "fan_avg".
        distribution: "truncated_normal" (at two standard deviations), "untruncated_normal" or
            "uniform".
        input_axes, output_axes: the axes whose lengths multiply to the fan in and the fan out; by
            default those of `keras_freeze.initializers.compute_fans`.
        seed, stream: as in `SeededInitializer`.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a value that is not possible.

    Example:
        >>> he_normal = VarianceScaling(2.0, "fan_in", "truncated_normal", seed=3)
    """

    parameter_names = ("scale", "mode", "distribution", "input_axes", "output_axes")

    def __init__(
        self,
        scale: float = 1.0,
        mode: str = "fan_in",
        distribution: str = "truncated_normal",
        input_axes: Sequence[int] | None = None,
        output_axes: Sequence[int] | None = None,
        seed: int = 0,
        stream: int = 0,
    ) -> None:
        super().__init__(seed, stream)
        self.scale = check_number("scale", scale, maximum=_LARGEST, positive=True)
        self.mode = check_one_of("mode", mode, _MODES)
        self.distribution = check_one_of("distribution", distribution, _SHAPES)
        self.input_axes = _check_axes("input_axes", input_axes)
        self.output_axes = _check_axes("output_axes", output_axes)

    def _transform(self, shape: tuple[int, ...]) -> Transform:
        variance = self.scale / max(1.0, self._fan(shape))
        if self.distribution == "uniform":
            limit = math.sqrt(3.0 * variance)
            return RandomUniform(-limit, limit)._transform(shape)
        if self.distribution == "truncated_normal":
            return TruncatedNormal(0.0, math.sqrt(variance) / _TRUNCATED_STDDEV)._transform(shape)
        return RandomNormal(0.0, math.sqrt(variance))._transform(shape)

    def _fan(self, shape: tuple[int, ...]) -> float:
        if self.input_axes is None or self.output_axes is None:
            fan_in, fan_out = compute_fans(shape)
        else:
            fan_in, fan_out = (_length(shape, a) for a in (self.input_axes, self.output_axes))
        if self.mode == "fan_avg":
            return (fan_in + fan_out) / 2.0
        return float(fan_in if self.mode == "fan_in" else fan_out)


@keras.saving.register_keras_serializable(package="keras_freeze")
class Orthogonal(ParameterizedInitializer):
    """Draw a random matrix with orthonormal columns or rows, as Keras's `Orthogonal`.

    The last axis gives the columns, all others together the rows. The distribution is that of the
    orthogonal factor of a matrix of normal numbers, the sign chosen so that the triangular factor
    has a positive diagonal: no direction is preferred (Haar measure).

    Args:
        gain: what the matrix is multiplied by.
        seed, stream: as in `SeededInitializer`.

    Example:
        >>> q = Orthogonal(seed=2).values((4, 4))
        >>> bool(abs(q.T @ q - np.eye(4)).max() < 1e-6)
        True
    """

    parameter_names = ("gain",)

    def __init__(self, gain: float = 1.0, seed: int = 0, stream: int = 0) -> None:
        super().__init__(seed, stream)
        self.gain = _check_number("gain", gain)

    def values(self, shape: Sequence[int]) -> np.ndarray:
        """Draw the values as a NumPy array of dtype float32.

        Args:
            shape: the weight's dimensions, two or more.

        Raises:
            ValueError: there are fewer dimensions, or more than 2^19 rows and columns.
        """
        shape = check_shape(shape)
        if len(shape) < 2:
            raise ValueError(
                f"Orthogonal needs a shape of two dimensions or more. Received: shape={shape!r}"
            )
        num_rows, num_columns = math.prod(shape[:-1]), shape[-1]
        longer, shorter = max(num_rows, num_columns), min(num_rows, num_columns)
        if longer > _MOST_ROWS:
            raise ValueError(
                f"Orthogonal makes matrices of at most {_MOST_ROWS} rows and columns. "
                f"Received: shape={shape!r}"
            )
        if shorter == 0:
            return np.zeros(shape, np.float32)
        normal = self._drawn((longer, shorter), RandomNormal(0.0, 1.0)._transform(()), np.float64)
        matrix = _orthonormal_columns(normal)
        matrix = matrix if num_rows >= num_columns else matrix.T
        # In C order, which PyTorch keeps, and with it the order of its sums.
        return np.ascontiguousarray(matrix * self.gain, np.float32).reshape(shape)


PORTABLE: dict[str, type[ParameterizedInitializer]] = {
    "uniform": RandomUniform,
    "normal": RandomNormal,
    "truncated_normal": TruncatedNormal,
    "variance_scaling": VarianceScaling,
    "orthogonal": Orthogonal,
}
"""The initializers of this module by the names that `.freeze` files use."""

SEEDED: dict[str, type[SeededInitializer]] = {**DISTRIBUTIONS, **PORTABLE}
"""All that is drawn from a portable seed, by the names that `.freeze` files use."""

_PORTABLE_VERSIONS: dict[type, type[ParameterizedInitializer]] = {
    **{getattr(keras.initializers, version.__name__): version for version in PORTABLE.values()},
    keras.initializers.GlorotUniform: VarianceScaling,
    keras.initializers.GlorotNormal: VarianceScaling,
    keras.initializers.HeUniform: VarianceScaling,
    keras.initializers.HeNormal: VarianceScaling,
    keras.initializers.LecunUniform: VarianceScaling,
    keras.initializers.LecunNormal: VarianceScaling,
}


def portable_version(initializer: Any, seed: int, stream: int) -> SeededInitializer | None:
    """Return the portable initializer with the distribution of another one, or None.

    Args:
        initializer: one of Keras's random initializers, or a seeded one of this package. A subclass
            may do anything, so it has none.
        seed, stream: of the portable initializer.

    Example:
        >>> portable_version(keras.initializers.HeNormal(), seed=1, stream=2).get_config()["scale"]
        2.0
    """
    if isinstance(initializer, SeededInitializer):
        arguments = {**initializer.get_config(), "seed": seed, "stream": stream}
        return type(initializer).from_config(arguments)
    version = _PORTABLE_VERSIONS.get(type(initializer))
    if version is None:
        return None
    arguments = {name: getattr(initializer, name) for name in version.parameter_names}
    return version(**arguments, seed=seed, stream=stream)


def _orthonormal_columns(normal: np.ndarray) -> np.ndarray:
    """Compute a matrix distributed as the orthogonal factor of a QR decomposition.

    A product of Householder reflections H_k = I - 2 v v' / (v' v), one for each column, that maps a
    vector of normal numbers onto the k-th axis. All vectors being known, the product is
    I - V U^-1 V', where V has the vectors as columns and U is the upper triangle of V'V with half
    its diagonal. The entries of V are rounded to integers (in units of 2^-16), which leaves every
    H_k exactly a reflection.

    The bits do not depend on the library that multiplies matrices: it is only given integers whose
    sums of products stay below 2^53, which are exact in any order and with or without fused
    operations. All else is elementwise.
    """
    num_columns = normal.shape[1]
    signs = np.where(np.diagonal(normal) < 0.0, -1.0, 1.0)
    vectors = np.tril(np.rint(normal * 2.0**_FRACTION_BITS))
    lengths = np.sqrt((vectors * vectors).sum(axis=0))
    diagonal = np.arange(num_columns)
    # At least 1: a last column of a single number may have been rounded to zero.
    vectors[diagonal, diagonal] += signs * np.maximum(np.rint(lengths), 1.0)
    products = vectors.T @ vectors
    upper = np.triu(products)
    upper[diagonal, diagonal] *= 0.5
    weights = _solve_upper(upper, vectors[:num_columns].T.copy())
    matrix = -_product(vectors, weights)
    matrix[diagonal, diagonal] += 1.0
    return matrix * -signs


def _solve_upper(upper: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve `upper` X = `right`, both upper triangular, by substitution in a fixed order."""
    for row in range(len(upper) - 1, -1, -1):
        right[row, row:] /= upper[row, row]
        right[:row, row:] -= upper[:row, row, None] * right[row, row:]
    return right


def _product(integers: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Multiply a matrix of integers by one of real numbers, split into two of integers."""
    _, exponent = np.frexp(np.abs(real).max())
    # Integers of up to 20 bits or little more, summed over the columns, leave so many of 53.
    bits = min(21, 31 - int(integers.shape[1]).bit_length())
    scaled = np.ldexp(real, bits - exponent)
    high = np.rint(scaled)
    low = np.rint(np.ldexp(scaled - high, bits))
    return np.ldexp(integers @ high, exponent - bits) + np.ldexp(
        integers @ low, exponent - 2 * bits
    )


def _float32_at_least(bound: float) -> float:
    """Return the lowest float32 that is not below a number; never -0.0."""
    nearest = np.float32(bound)
    if float(nearest) < bound:
        nearest = np.nextafter(nearest, np.float32(np.inf))
    return float(nearest) + 0.0


def _float32_at_most(bound: float) -> float:
    """Return the highest float32 that is not above a number."""
    return 0.0 - _float32_at_least(-bound)


def _float32_below(bound: float) -> float:
    """Return the highest float32 that is below a number."""
    nearest = np.float32(bound)
    if float(nearest) >= bound:
        nearest = np.nextafter(nearest, np.float32(-np.inf))
    return float(nearest) + 0.0


def _length(shape: tuple[int, ...], axes: Sequence[int]) -> int:
    is_short = len(axes) <= len(shape)  # before all are looked at: they may come from a file
    if not is_short or any(not -len(shape) <= axis < len(shape) for axis in axes):
        raise ValueError(f"The shape {shape} has no axes {list(axes)[:32]}.")
    return math.prod(shape[axis] for axis in axes)


def _check_number(name: str, value: Any) -> float:
    if getattr(value, "shape", None) == ():  # a tensor, which Keras's initializers accept, too
        value = float(value)
    return check_number(name, value, -_LARGEST, _LARGEST) + 0.0  # not -0.0


def _check_axes(name: str, value: Any) -> list[int] | None:
    if value is None:
        return None
    try:
        return [operator.index(axis) for axis in value]
    except TypeError:
        raise type_error(name, value, "None or a list of integers") from None
