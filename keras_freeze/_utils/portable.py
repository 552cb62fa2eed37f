"""Functions of random words whose bits are the same on every machine; parts of the file format.

No operation here may be reordered, fused or replaced.
"""

import numpy as np

_LN_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
# ln(m) = -ln(2) / 2 + s * (polynomial in s^2), s = (m - h) / (m + h), h = sqrt(1/2), 1/2 <= m < 1.
_LOG_SERIES = (
    1.9999999999999993,
    0.6666666666680505,
    0.3999999995464538,
    0.28571433645630606,
    0.22222031288526592,
    0.18179712537940082,
    0.15655154720003522,
    0.09496189194396737,
)


def split_words(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Turn 64-bit words into signs (1.0 or -1.0) and fractions in (0, 1), both float64."""
    signs = 1.0 - 2.0 * (words >> np.uint64(63)).astype(np.float64)
    integers = (words >> np.uint64(11)) & np.uint64(2**52 - 1)
    return signs, (integers.astype(np.float64) + 0.5) * 2.0**-52


def natural_log(x: np.ndarray) -> np.ndarray:
    """Return the natural logarithm of numbers above 0."""
    mantissa, exponent = np.frexp(x)
    s = (mantissa - _SQRT_HALF) / (mantissa + _SQRT_HALF)
    return (exponent - 0.5) * _LN_2 + s * polynomial(_LOG_SERIES, s * s)


def polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    """Evaluate a polynomial by Horner's rule, every product rounded before the next sum."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result *= x
        result += coefficient
    return result
