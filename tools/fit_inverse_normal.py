"""Fit the constants of the inverse normal CDF in `keras_freeze.initializers`, and print them.

    python tools/fit_inverse_normal.py

The constants are part of the stored format: the ones in the package are final, and this script
only shows where they come from. Each polynomial interpolates at Chebyshev nodes, which is within a
small factor of the best approximation of that degree. The reference is SciPy's ndtri.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from scipy.special import ndtri

CENTER_ENDS_AT = 0.125  # tail probability where the two formulas meet
SMALLEST_TAIL = 2.0**-54
DEGREE = 13
LOG_TERMS = 8


def fit(function: Callable, low: float, high: float, degree: int) -> list[float]:
    """Coefficients in powers of the variable itself, lowest power first."""
    series = Chebyshev.interpolate(function, degree, domain=[low, high])
    return [float(c) for c in series.convert(kind=Polynomial).coef]


def center(q_squared: np.ndarray) -> np.ndarray:
    q = np.sqrt(np.maximum(q_squared, 1e-12))
    return ndtri(0.5 + q) / q


def atanh_ratio(s_squared: np.ndarray) -> np.ndarray:
    s = np.sqrt(np.maximum(s_squared, 1e-30))
    return 2.0 * np.arctanh(s) / s


def main() -> None:
    half = math.sqrt(0.5)
    largest_s = (1.0 - half) / (1.0 + half)
    log_series = fit(atanh_ratio, 0.0, largest_s**2, LOG_TERMS - 1)

    # x = A - B / (r + 4) maps r = sqrt(-ln p) onto [-1, 1]; 4 was found by trying.
    nearest = math.sqrt(-math.log(CENTER_ENDS_AT))
    farthest = math.sqrt(-math.log(SMALLEST_TAIL))
    slope = 2.0 / (1.0 / (nearest + 4.0) - 1.0 / (farthest + 4.0))
    offset = slope / (farthest + 4.0) + 1.0

    def tail(x: np.ndarray) -> np.ndarray:
        r = slope / (offset - x) - 4.0
        return -ndtri(np.exp(-r * r))

    print("center =", fit(center, 0.0, (0.5 - CENTER_ENDS_AT) ** 2, DEGREE))
    print("log =", log_series)
    print("A =", offset, "B =", slope)
    print("tail =", fit(tail, -1.0, 1.0, DEGREE))


if __name__ == "__main__":
    main()
