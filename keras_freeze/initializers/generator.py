"""The generator of random numbers, whose bits are part of the file format.

Step by step:

1. Word number i of the weight, in C order, is the i-th 64-bit output of Philox4x64-10 with the key
   (seed, stream). As in NumPy, the counter is raised before a block of four words is made, so the
   first block has counter 1.
2. Bit 63 is the sign (set: negative). Bits 62 to 11 are an integer m and give the fraction
   f = (m + 1/2) / 2^52, exactly. The other bits are not used.
3. A distribution turns f into a magnitude in float64, and the magnitude is multiplied by the sign
   and by a scale that depends on the shape, also in float64:
   Xavier-normal and standard normal: Q^-1(f / 2), with Q^-1 the upper-tail quantile of N(0, 1) as
   defined by `upper_quantile`; Kaiming-uniform: f; pm_sigma: 1.
4. The product is rounded to float32.

Anything that changes a bit needs a new generator name.
"""

import numpy as np

from keras_freeze._utils.portable import natural_log, polynomial

GENERATOR = "philox4x64-sign-fraction52-v1"
"""Name and version of the generator; whoever stores a seed stores this with it."""
# Q^-1(1/2 - q) / q as a polynomial in q^2, for tail probabilities from 1/8 to 1/2.
# tools/fit_inverse_normal.py made these constants; lowest power first.
_CENTER = (
    2.5066282746170607,
    2.624935029752419,
    5.7725157270284955,
    15.67081077484963,
    46.73739005321429,
    166.36441324695426,
    -91.99135190835148,
    15737.055696117528,
    -224453.7898338477,
    2627106.942583356,
    -19997812.160714827,
    101221590.82795665,
    -300648809.29873127,
    417952195.4029503,
)
_TAIL_BEGINS = 0.125
# ln(m) = -ln(2) / 2 + s * (polynomial in s^2), s = (m - h) / (m + h), h = sqrt(1/2), 1/2 <= m < 1.
# Q^-1(p) as a polynomial in x = A - B / (sqrt(-ln p) + 4), down to p = 2^-54, where x is 1.
_TAIL_A = 3.3276543708102597
_TAIL_B = 23.55121144186526
_TAIL = (
    3.7842343864015167,
    3.2560460317490905,
    0.8520327950458199,
    0.28654916767634686,
    0.07743957480735476,
    0.02582486508716629,
    0.006966640889856989,
    0.002348254901935576,
    0.0006229837901352244,
    0.00021611158919248352,
    5.23674981585438e-05,
    1.8775434260273204e-05,
    6.479589891179265e-06,
    2.6412464129472416e-06,
)


def upper_quantile(p: np.ndarray) -> np.ndarray:
    """Return the z that a standard normal variable exceeds with probability p.

    p is at least 2^-54 and less than 1/2.

    Its bits are part of the format: no operation here may be reordered, fused or replaced.
    """
    q = 0.5 - p
    z = q * polynomial(_CENTER, q * q)
    tail = np.flatnonzero(p < _TAIL_BEGINS)
    log_p = natural_log(p[tail])
    z[tail] = polynomial(_TAIL, _TAIL_A - _TAIL_B / (np.sqrt(-log_p) + 4.0))
    return z
