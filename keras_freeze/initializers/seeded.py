"""Initial weights that a seed determines bit for bit, on every machine and in every framework.

A FreezeNet is stored as a seed instead of its frozen weights, so the numbers drawn here are part
of the file format. They are always computed by NumPy, also inside a `tf.function` or under XLA, by
operations that IEEE 754 fixes to the last bit (`+ - * /` and the square root); logarithms, cosines
and the frameworks' own generators differ between processors and versions.
"""

import contextlib
import contextvars
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze._utils.portable import split_words
from keras_freeze._utils.validation import check_int, type_error, value_error
from keras_freeze.initializers.generator import upper_quantile

_CHUNK = 1 << 16  # values drawn at a time: what is in work then fits the processor's cache


Transform = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Turns signs and fractions into the values of a weight, all in float64."""

_blank = contextvars.ContextVar("blank", default=False)


@contextlib.contextmanager
def blank() -> Iterator[None]:
    """Make initializers return zeros in a scope: for a model whose weights are about to be set."""
    token = _blank.set(True)
    try:
        yield
    finally:
        _blank.reset(token)


def compute_fans(shape: Sequence[int]) -> tuple[int, int]:
    """Count the inputs and outputs that a weight of this shape connects, as Keras counts them.

    The last two axes are input and output channels, everything before them is the receptive field:
    a Dense kernel `(in, out)` has fans `(in, out)`, a convolution `(3, 3, in, out)` has
    `(9 * in, 9 * out)`. One axis serves as both fans, a scalar has `(1, 1)`. Only the shape is
    known here, so transposed convolutions `(3, 3, out, in)` and depthwise kernels
    `(3, 3, channels, multiplier)` are counted by the same rule, which is also Keras's.

    Args:
        shape: the weight's dimensions.

    Returns:
        `(fan_in, fan_out)`.

    Example:
        >>> compute_fans((5, 5, 20, 50))
        (500, 1250)
    """
    if len(shape) == 0:
        return 1, 1
    if len(shape) == 1:
        return shape[0], shape[0]
    receptive_field = math.prod(shape[:-2])
    return shape[-2] * receptive_field, shape[-1] * receptive_field


class SeededInitializer(keras.initializers.Initializer):
    """Base of the initializers whose values depend on seed, stream and shape alone.

    Subclasses say what is drawn: `_scale` is the factor that depends on the shape, `_magnitudes`
    turns fractions in (0, 1) into magnitudes. The sign is fair and independent of the magnitude.
    Those that are more than a product of the three override `_transform`.

    Args:
        seed: the model's seed, an integer in [0, 2**32).
        stream: which weight of the model this is, an integer in [0, 2**32). Weights of one shape
            and one seed are equal if their streams are equal: count `stream` up.

    Raises:
        TypeError: `seed` or `stream` is not an integer.
        ValueError: `seed` or `stream` is outside [0, 2**32).
    """

    def __init__(self, seed: int = 0, stream: int = 0) -> None:
        self.seed = check_int("seed", seed, end=2**32)
        self.stream = check_int("stream", stream, end=2**32)

    def values(self, shape: Sequence[int]) -> np.ndarray:
        """Draw the values as a NumPy array of dtype float32.

        Args:
            shape: the weight's dimensions, fully known; a dimension may be 0.

        Raises:
            ValueError: a dimension is unknown, negative or not an integer.

        Example:
            >>> XavierNormal(seed=3).values((784, 300)).shape
            (784, 300)
        """
        shape = check_shape(shape)
        return self._drawn(shape, self._transform(shape), np.float32)

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        """Draw the values as a tensor, as Keras layers call it.

        Args:
            shape: the weight's dimensions, fully known.
            dtype: a floating-point dtype; `keras.config.floatx()` by default. The values are those
                of float32, converted: float64 carries no more digits.

        Raises:
            ValueError: a dimension is unknown or negative, or `dtype` is not floating-point.
        """
        name = _check_float_dtype(self, dtype)
        if _blank.get():
            return keras.ops.zeros(check_shape(shape), name)
        return keras.ops.cast(keras.ops.convert_to_tensor(self.values(shape)), name)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, `seed` and `stream`."""
        return {"seed": self.seed, "stream": self.stream}

    def _drawn(self, shape: tuple[int, ...], transform: Transform, dtype: Any) -> np.ndarray:
        flat = np.empty(math.prod(shape), dtype)
        words = np.random.Philox(key=np.array([self.seed, self.stream], np.uint64))
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            chunk[:] = transform(*split_words(words.random_raw(chunk.size)))
        return flat.reshape(shape)

    def _transform(self, shape: tuple[int, ...]) -> Transform:
        scale = self._scale(*compute_fans(shape)) if math.prod(shape) else 0.0
        return lambda signs, fractions: signs * self._magnitudes(fractions) * scale

    def _scale(self, fan_in: int, fan_out: int) -> float:
        raise NotImplementedError

    def _magnitudes(self, fractions: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@keras.saving.register_keras_serializable(package="keras_freeze")
class XavierNormal(SeededInitializer):
    """Draw from N(0, 2 / (fan_in + fan_out)), the paper's standard initialization (section 4).

    Not truncated: `keras.initializers.GlorotNormal` cuts at two standard deviations, this does not.
    The tails reach 8.3 standard deviations; the quantile is exact to 4e-11, relatively.

    Args:
        seed, stream: as in `SeededInitializer`.

    Example:
        >>> layer = keras.layers.Dense(100, kernel_initializer=XavierNormal(seed=0, stream=1))
    """

    def _scale(self, fan_in: int, fan_out: int) -> float:
        return _xavier_sigma(fan_in, fan_out)

    def _magnitudes(self, fractions: np.ndarray) -> np.ndarray:
        return upper_quantile(fractions * 0.5)


@keras.saving.register_keras_serializable(package="keras_freeze")
class KaimingUniform(SeededInitializer):
    """Draw from U(-a, a) with a = sqrt(6 / fan_in), as PyTorch means Kaiming-uniform for ReLU.

    The paper starts CIFAR-100 and Tiny ImageNet from it.

    Args:
        seed, stream: as in `SeededInitializer`.

    Example:
        >>> layer = keras.layers.Conv2D(20, 5, kernel_initializer=KaimingUniform(seed=0))
    """

    def _scale(self, fan_in: int, fan_out: int) -> float:
        return math.sqrt(6.0 / fan_in)

    def _magnitudes(self, fractions: np.ndarray) -> np.ndarray:
        return fractions


@keras.saving.register_keras_serializable(package="keras_freeze")
class PlusMinusSigma(SeededInitializer):
    """Draw +sigma or -sigma, each with probability 1/2; sigma^2 = 2 / (fan_in + fan_out).

    The paper's pm_sigma (section 4.5): one random bit a weight, the variance of Xavier-normal.

    Args:
        seed, stream: as in `SeededInitializer`.

    Example:
        >>> sorted(set(PlusMinusSigma(seed=0).values((4, 4)).ravel().tolist()))
        [-0.5, 0.5]
    """

    def _scale(self, fan_in: int, fan_out: int) -> float:
        return _xavier_sigma(fan_in, fan_out)

    def _magnitudes(self, fractions: np.ndarray) -> np.ndarray:
        return np.ones_like(fractions)


@keras.saving.register_keras_serializable(package="keras_freeze")
class StandardNormal(SeededInitializer):
    """Draw from N(0, 1), whatever the shape.

    It does not scale the variance with the layer: networks that the paper re-initializes from it
    cannot be trained (supplement, "Reinitialization Tests", figure S3).

    Args:
        seed, stream: as in `SeededInitializer`.

    Example:
        >>> layer = keras.layers.Dense(100, kernel_initializer=StandardNormal(seed=0, stream=1))
    """

    def _scale(self, fan_in: int, fan_out: int) -> float:
        return 1.0

    def _magnitudes(self, fractions: np.ndarray) -> np.ndarray:
        return upper_quantile(fractions * 0.5)


@keras.saving.register_keras_serializable(package="keras_freeze")
class ConstantSigma(keras.initializers.Initializer):
    """Give every entry the value +sigma of pm_sigma; sigma^2 = 2 / (fan_in + fan_out).

    It breaks no symmetry: networks that the paper re-initializes from it cannot be trained
    (supplement, "Reinitialization Tests", figure S3).

    Example:
        >>> ConstantSigma()((4, 4)).numpy()[0].tolist()
        [0.5, 0.5, 0.5, 0.5]
    """

    def __call__(self, shape: Sequence[int], dtype: Any = None) -> Any:
        """Make the tensor, as Keras layers call it.

        Args:
            shape: the weight's dimensions, fully known.
            dtype: a floating-point dtype; `keras.config.floatx()` by default. The value is that of
                float32, converted.

        Raises:
            ValueError: a dimension is unknown or negative, or `dtype` is not floating-point.
        """
        name = _check_float_dtype(self, dtype)
        shape = check_shape(shape)
        sigma = np.float32(_xavier_sigma(*compute_fans(shape)) if math.prod(shape) else 0.0)
        return keras.ops.cast(keras.ops.full(shape, sigma, "float32"), name)


DISTRIBUTIONS: dict[str, type[SeededInitializer]] = {
    "xavier_normal": XavierNormal,
    "kaiming_uniform": KaimingUniform,
    "pm_sigma": PlusMinusSigma,
    "standard_normal": StandardNormal,
}
"""What is drawn from a seed, by the names that `.freeze` files use, too."""

CONSTANTS: dict[str, type[keras.initializers.Initializer]] = {
    "ones": keras.initializers.Ones,
    "constant_sigma": ConstantSigma,
}
"""What needs no seed, by name; a `.freeze` file has the value instead of a name."""

INITIALIZERS: dict[str, type[keras.initializers.Initializer]] = {**DISTRIBUTIONS, **CONSTANTS}
"""All initializers by the names that `get`, `keras_freeze.reinitialize` and the models take."""


def get(
    identifier: str | keras.initializers.Initializer, seed: int = 0, stream: int = 0
) -> keras.initializers.Initializer:
    """Make the initializer of one weight of a model.

    Args:
        identifier: a name in `INITIALIZERS`, or an initializer, which has its own seed: a seeded
            one of this module gets the stream given here; a random one of Keras with an integer
            seed gets that seed plus `stream`, so that weights of one shape do not start equal; any
            other is returned as it is.
        seed: the model's seed, an integer in [0, 2**32); used with a name in `DISTRIBUTIONS` only.
        stream: which weight of the model this is, an integer in [0, 2**32).

    Raises:
        TypeError: `identifier` is neither a name nor an initializer, or `seed` or `stream` is not
            an integer.
        ValueError: the name is unknown, or `seed` or `stream` is outside [0, 2**32).

    Example:
        >>> get("pm_sigma", seed=7, stream=2).get_config()
        {'seed': 7, 'stream': 2}
    """
    seed, stream = check_int("seed", seed, end=2**32), check_int("stream", stream, end=2**32)
    names = ", ".join(map(repr, sorted(INITIALIZERS)))
    accepted = f"one of {names}, or an instance of keras.initializers.Initializer"
    if isinstance(identifier, str):
        if identifier not in INITIALIZERS:
            raise value_error("initializer", identifier, accepted)
        if identifier in CONSTANTS:
            return CONSTANTS[identifier]()
        return DISTRIBUTIONS[identifier](seed=seed, stream=stream)
    if not isinstance(identifier, keras.initializers.Initializer):
        raise type_error("initializer", identifier, accepted)
    config = identifier.get_config()
    if isinstance(identifier, SeededInitializer):
        return type(identifier).from_config({**config, "stream": stream})
    # A Keras initializer made without a seed has drawn one, which its config leaves out.
    if "seed" in config and isinstance(getattr(identifier, "seed", None), int):
        return type(identifier).from_config({**config, "seed": identifier.seed + stream})
    return identifier


def _xavier_sigma(fan_in: int, fan_out: int) -> float:
    return math.sqrt(2.0 / (fan_in + fan_out))


def _check_float_dtype(initializer: keras.initializers.Initializer, dtype: Any) -> str:
    name: str = keras.backend.standardize_dtype(dtype)
    if not keras.backend.is_float_dtype(name):
        raise ValueError(
            f"{type(initializer).__name__} gives real numbers; dtype must be a floating-point "
            f"dtype such as 'float32'. Received: dtype={dtype!r}"
        )
    return name


def check_shape(shape: Any) -> tuple[int, ...]:
    accepted = "a sequence of known sizes, 0 or more"
    try:
        dimensions = tuple(operator.index(dimension) for dimension in shape)
    except TypeError:
        raise value_error("shape", shape, accepted) from None
    if min(dimensions, default=0) < 0:
        raise value_error("shape", shape, accepted)
    return dimensions
