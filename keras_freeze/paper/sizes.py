"""The network sizes of the paper's table 2, exactly and as the paper prints them."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from keras_freeze._utils.validation import check_int
from keras_freeze.masks.selection import check_freeze_rate, num_trained_weights

_FLOAT32_BYTES = 4
_TABLE_2_RATES = (0.0, 0.9, 0.99, 0.995, 0.999)


@dataclass(frozen=True)
class PaperSize:
    """One row of the paper's table 2, exactly and as printed there.

    Attributes:
        freeze_rate: The freezing rate q asked for.
        num_trained_weights: floor((1 - q) |W|).
        num_trained_parameters: The same and |B|.
        real_freeze_rate: q_beta.
        size_kib: The network size: `num_trained_parameters` as float32, in KiB.
        compression_factor: The dense size divided by it; None if nothing is trained.
        paper_size: The network size as the paper prints it, in its kB, to one decimal.
        paper_compression_factor: The factor as the paper prints it, to one decimal; None if its
            size is 0.0.
    """

    freeze_rate: float
    num_trained_weights: int
    num_trained_parameters: int
    real_freeze_rate: float
    size_kib: float
    compression_factor: float | None
    paper_size: float
    paper_compression_factor: float | None


def paper_sizes(
    num_weights: int, num_other: int, freeze_rates: Sequence[float] = _TABLE_2_RATES
) -> list[PaperSize]:
    """Compute the network sizes of the paper's table 2, exactly and as the paper prints them.

    Exactly, floor((1 - q) |W|) + |B| parameters are trained. The paper's printed sizes come out
    with (1 - q) (|W| + |B|) + |B| parameters instead: its rate is applied to the biases as well,
    which are then added. For q = 0.9, LeNet-5-Caffe (430,500 weights and 580 biases) has
    43,630 trained parameters or 170.4 KiB; the paper has 0.1 * 431,080 + 580 = 43,688 or 170.7.
    Its compression factors divide the rounded sizes, so that x157.8 becomes x157.4 and x426.8
    becomes x431.8. Weights of the at-least-one rule are in neither.

    Args:
        num_weights: |W|.
        num_other: |B|, all other trained parameters.
        freeze_rates: The freezing rates q, in [0, 1]; by default those of table 2.

    Returns:
        One `PaperSize` for each rate.

    Raises:
        TypeError: If a rate or a count is not a number.
        ValueError: If a rate is outside [0, 1] or a count negative.

    Example:
        >>> row = paper_sizes(430_500, 580, [0.995])[0]
        >>> round(row.compression_factor, 1), row.paper_compression_factor
        (157.8, 157.4)
    """
    check_int("num_other", num_other)
    return [_paper_size(num_weights, num_other, check_freeze_rate(rate)) for rate in freeze_rates]


def _paper_size(num_weights: int, num_other: int, freeze_rate: float) -> PaperSize:
    dense = num_weights + num_other
    trained_weights = num_trained_weights(freeze_rate, num_weights)
    trained = trained_weights + num_other
    paper_trained = Fraction(dense)
    if freeze_rate > 0:
        paper_trained = (1 - Fraction(str(freeze_rate))) * dense + num_other
    paper_size = round(float(paper_trained * _FLOAT32_BYTES / 1024), 1)
    paper_factor = _ratio(round(dense * _FLOAT32_BYTES / 1024, 1), paper_size)
    return PaperSize(
        freeze_rate=freeze_rate,
        num_trained_weights=trained_weights,
        num_trained_parameters=trained,
        real_freeze_rate=(dense - trained) / dense if dense else 0.0,
        size_kib=trained * _FLOAT32_BYTES / 1024,
        compression_factor=_ratio(dense, trained),
        paper_size=paper_size,
        paper_compression_factor=None if paper_factor is None else round(paper_factor, 1),
    )


def _ratio(dense: float, trained: float) -> float | None:
    return dense / trained if trained else None
