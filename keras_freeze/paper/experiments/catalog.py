"""Every figure and table of the paper that holds data, and what goes beyond it, by name.

Where the paper gives its freezing rates or seeds, they are these; where it only draws them, rates
of the same range.
"""

from collections.abc import Mapping
from dataclasses import replace

from keras_freeze.paper.experiments import beyond
from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.recipes import LEARNING_RATES

_EXTREME_RATES = tuple(number / 1000 for number in range(990, 1000))
_BROAD_RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.995, 0.999)

_BASELINE = Series("baseline", {"method": "baseline"}, rates=(0.0,))
_FREEZENET = Series("FreezeNet", {"method": "freezenet"})
_SNIP = Series("SNIP", {"method": "snip"})
_FREEZENET_WD = Series("FreezeNet-WD", {"method": "freezenet-wd"})

_LETTERS = {"X": "xavier_normal", "K": "kaiming_uniform"}


def _freezenet(label: str, initializer: str, reinitializer: str | None = None) -> Series:
    """Return a series of FreezeNet; a reinitializer draws other weights than the mask's."""
    settings = {"method": "freezenet", "initializer": initializer, "reinitializer": reinitializer}
    return Series(label, settings)


def _initialized(letter: str) -> Series:
    return _freezenet(f"FreezeNet-{letter}", _LETTERS[letter])


def _reinitialized(first: str, second: str) -> Series:
    return _freezenet(f"FreezeNet-{first}-{second}", _LETTERS[first], _LETTERS[second])


def _at_rates(learning_rates: tuple[float, ...]) -> tuple[Series, ...]:
    return tuple(
        Series(f"{rate:g}", {"method": "freezenet", "learning_rate": rate})
        for rate in learning_rates
    )


def _measured(series: Series, measure: str) -> Series:
    return replace(series, settings={**series.settings, "measure": measure})


def _on(dataset: str, series: Series) -> Series:
    name = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[dataset]
    settings = {**series.settings, "dataset": dataset}
    return replace(series, label=f"{series.label}, {name}", settings=settings)


def _grasp_search() -> tuple[Series, ...]:
    splits = (("9/1", 0.1), ("19/1", 0.05), ("3/1", 0.25))
    return tuple(
        Series(
            f"GraSP, {split}, learning rate {rate:g}",
            {"method": "grasp", "validation_fraction": fraction, "learning_rate": rate},
        )
        for split, fraction in splits
        for rate in LEARNING_RATES
    )


def _lenet5(name: str, source: str, title: str, statement: str, **others: object) -> Experiment:
    values = {"dataset": "mnist", "model": "lenet_5_caffe", "rates": _BROAD_RATES, **others}
    return Experiment(name, source, title, statement, **values)  # type: ignore[arg-type]


_TABLE_2 = {
    ("baseline", 0.0): (99.36, None),
    ("SNIP", 0.9): (99.24, None),
    ("SNIP", 0.99): (98.80, None),
    ("SNIP", 0.995): (98.02, None),
    ("SNIP", 0.999): (20.57, None),
    ("FreezeNet", 0.9): (99.37, None),
    ("FreezeNet", 0.99): (98.94, None),
    ("FreezeNet", 0.995): (98.55, None),
    ("FreezeNet", 0.999): (95.61, None),
}

_TABLE_3 = {
    ("baseline, CIFAR-10", 0.0): (93.0, 0.1),
    ("baseline, CIFAR-100", 0.0): (71.6, 0.6),
    ("SNIP, CIFAR-10", 0.9): (92.9, 0.1),
    ("SNIP, CIFAR-10", 0.95): (92.5, 0.1),
    ("SNIP, CIFAR-10", 0.99): (10.0, 0.0),
    ("SNIP, CIFAR-10", 0.995): (10.0, 0.0),
    ("SNIP, CIFAR-100", 0.9): (53.9, 1.7),
    ("SNIP, CIFAR-100", 0.95): (48.6, 6.6),
    ("SNIP, CIFAR-100", 0.99): (1.0, 0.0),
    ("SNIP, CIFAR-100", 0.995): (1.0, 0.0),
    ("FreezeNet, CIFAR-10", 0.9): (92.2, 0.1),
    ("FreezeNet, CIFAR-10", 0.95): (91.7, 0.1),
    ("FreezeNet, CIFAR-10", 0.99): (88.6, 0.1),
    ("FreezeNet, CIFAR-10", 0.995): (86.0, 0.1),
    ("FreezeNet, CIFAR-100", 0.9): (70.7, 0.3),
    ("FreezeNet, CIFAR-100", 0.95): (69.0, 0.2),
    ("FreezeNet, CIFAR-100", 0.99): (59.8, 0.3),
    ("FreezeNet, CIFAR-100", 0.995): (53.4, 0.1),
    ("FreezeNet-WD, CIFAR-10", 0.9): (93.2, 0.2),
    ("FreezeNet-WD, CIFAR-10", 0.95): (92.8, 0.2),
    ("FreezeNet-WD, CIFAR-10", 0.99): (76.1, 1.0),
    ("FreezeNet-WD, CIFAR-10", 0.995): (74.6, 1.1),
    ("FreezeNet-WD, CIFAR-100", 0.9): (53.1, 1.8),
    ("FreezeNet-WD, CIFAR-100", 0.95): (44.5, 5.4),
    ("FreezeNet-WD, CIFAR-100", 0.99): (13.1, 1.8),
    ("FreezeNet-WD, CIFAR-100", 0.995): (11.9, 1.4),
}

REPORTED = {
    "SNIP": (1.0, 98.9),
    "GraSP": (1.0, 98.9),
    "Connection-Learning": (8.3, 99.2),
    "Dynamic-Network-Surgery": (0.9, 99.1),
    "Learning-Compression": (1.0, 98.9),
    "Sparse-Momentum": (1.0, 99.2),
    "FreezeNet": (1.0, 99.1),
}
"""Table 4 as printed: per cent of the parameters that are trained, and test accuracy."""

_OF_THE_PAPER = (
    Experiment(
        "lenet300_rates",
        "Figure 2, left",
        "FreezeNet and SNIP on a dense network",
        "Below q = 0.95 both methods are as good as the dense network; above, FreezeNet makes up "
        "for the missing weights better than SNIP.",
        "mnist",
        "lenet_300_100",
        (_BASELINE, _FREEZENET, _SNIP),
        _BROAD_RATES,
        paper={("baseline", 0.0): (98.57, None)},
    ),
    _lenet5(
        "lenet5_extreme_rates",
        "Figure 2, right",
        "FreezeNet and SNIP at extreme rates",
        "Up to q = 0.994 both do almost equally well, FreezeNet slightly better; above, SNIP drops "
        "steeply and FreezeNet slowly.",
        series=(_BASELINE, _FREEZENET, _SNIP),
        rates=_EXTREME_RATES,
        paper={key: value for key, value in _TABLE_2.items() if key[1] != 0.9},
    ),
    _lenet5(
        "lenet5_capacity",
        "Figure 3, left",
        "Capacity: training accuracy of the last epoch, without weight decay",
        "Above q = 0.992 FreezeNet cannot memorize the training set any more; at the same high "
        "rate its capacity is above SNIP's.",
        series=tuple(Series(s.label, {**s.settings, "l2": 0.0}) for s in (_FREEZENET, _SNIP)),
        rates=tuple(sorted({*_BROAD_RATES, *_EXTREME_RATES})),
        quantity="training_accuracy",
    ),
    _lenet5(
        "lenet5_initializations",
        "Figure 3, right",
        "Initializations, and a random mask",
        "All three variance-scaling initializations do about equally well, Xavier-normal best over "
        "all rates; a saliency mask does better and is more stable than a random one.",
        series=(
            _freezenet("Xavier-normal", "xavier_normal"),
            _freezenet("Kaiming-uniform", "kaiming_uniform"),
            _freezenet("pm_sigma", "pm_sigma"),
            Series("random mask", {"method": "random", "initializer": "xavier_normal"}),
        ),
    ),
    Experiment(
        "vgg16_gradient_flow",
        "Figure 4, left",
        "Gradient flow before training, relative to the dense network",
        "At lower rates all three methods have a larger gradient than the dense network. From "
        "q = 0.95 on the gradient of pruned networks (SNIP and GraSP) shrinks and finally "
        "vanishes; FreezeNet's gradient per trained parameter grows with the rate.",
        "cifar10",
        "vgg16_d",
        tuple(
            _measured(series, "gradient_flow")
            for series in (_BASELINE, _FREEZENET, _SNIP, Series("GraSP", {"method": "grasp"}))
        ),
        (0.5, 0.7, 0.9, 0.95, 0.99, 0.995, 0.999),
        quantity="gradient_flow",
        view="relative",
        seeds=10,
    ),
    Experiment(
        "vgg16_gradient_flow_in_training",
        "Figure 4, right",
        "Gradient flow through training, q = 0.99",
        "FreezeNet's gradient flows throughout; SNIP's is zero all the time; FreezeNet-WD's is "
        "like FreezeNet's at first, peaks when its frozen weights come close to zero, and then "
        "vanishes.",
        "cifar10",
        "vgg16_d",
        tuple(
            _measured(series, "gradient_flow_in_training")
            for series in (_FREEZENET, _SNIP, _FREEZENET_WD)
        ),
        (0.99,),
        quantity="test_accuracy",
        view="flow_in_training",
        seeds=1,
    ),
    Experiment(
        "resnet34_tiny_imagenet",
        "Figure S1",
        "FreezeNet, FreezeNet-WD and SNIP on a residual network",
        "FreezeNet is as accurate as the dense network with 10 % of the weights trained; at all "
        "rates it is at least as good as SNIP and more stable; FreezeNet-WD is worse than SNIP at "
        "low rates.",
        "tiny_imagenet",
        "resnet34",
        (_BASELINE, _FREEZENET, _FREEZENET_WD, _SNIP),
        (0.5, 0.7, 0.9, 0.95, 0.99, 0.995),
        seeds=3,
    ),
    _lenet5(
        "reinitialization_to_xavier",
        "Figure S2, left",
        "Training from other Xavier-normal weights than the mask was computed with",
        "Drawing the weights again makes no difference, nor does the distribution that the mask "
        "was computed with.",
        series=(_BASELINE, _initialized("X"), _reinitialized("X", "X"), _reinitialized("K", "X")),
    ),
    _lenet5(
        "reinitialization_xavier_or_kaiming",
        "Figure S2, right",
        "Xavier-normal or Kaiming-uniform weights to train from",
        "Kaiming-uniform is slightly better at lower rates, Xavier-normal at higher ones.",
        series=(_reinitialized("X", "X"), _reinitialized("K", "K")),
    ),
    _lenet5(
        "reinitialization_to_kaiming",
        "Figure S3, left",
        "Training from other Kaiming-uniform weights than the mask was computed with",
        "Drawing the weights again makes no difference, nor does the distribution that the mask "
        "was computed with.",
        series=(_BASELINE, _initialized("K"), _reinitialized("K", "K"), _reinitialized("X", "K")),
    ),
    _lenet5(
        "reinitialization_distributions",
        "Figure S3, right",
        "Training from weights of other distributions",
        "Xavier-normal, Kaiming-uniform and pm_sigma lead to the same results; constants and "
        "N(0, 1), which do not scale the variance, cannot be trained at all.",
        series=(
            _initialized("X"),
            _freezenet("Xavier-normal", "xavier_normal", "xavier_normal"),
            _freezenet("Kaiming-uniform", "xavier_normal", "kaiming_uniform"),
            _freezenet("pm_sigma", "xavier_normal", "pm_sigma"),
            _freezenet("constant 1", "xavier_normal", "ones"),
            _freezenet("constant sigma", "xavier_normal", "constant_sigma"),
            _freezenet("N(0, 1)", "xavier_normal", "standard_normal"),
        ),
    ),
    _lenet5(
        "lenet5_best_learning_rates",
        "Figure S4, left",
        "The best learning rates",
        "0.1 is best at almost every freezing rate.",
        series=_at_rates(LEARNING_RATES),
        view="best_series",
        seeds=3,
    ),
    _lenet5(
        "lenet5_learning_curves",
        "Figure S4, right",
        "Validation accuracy over the first 100,000 steps",
        "At high freezing rates, higher learning rates can train better and faster.",
        series=_at_rates(LEARNING_RATES),
        rates=(0.99, 0.999),
        view="validation_curves",
        seeds=3,
    ),
    _lenet5(
        "lenet5_low_learning_rates",
        "Figure S5, left",
        "Learning rates up to 0.1",
        "0.1 is best at almost every freezing rate.",
        series=_at_rates(LEARNING_RATES[:5]),
        seeds=3,
    ),
    _lenet5(
        "lenet5_high_learning_rates",
        "Figure S5, right",
        "Learning rates from 0.1 on",
        "Higher learning rates need higher freezing rates to lead to good results.",
        series=_at_rates(LEARNING_RATES[4:]),
        quantity="validation_accuracy",
        seeds=3,
    ),
    Experiment(
        "vgg16_learning_rates",
        "Figure S6",
        "The best learning rates for a deep network",
        "0.1 is best at most freezing rates; at some, 0.05 or 0.2 is slightly better.",
        "cifar10",
        "vgg16_d",
        _at_rates(LEARNING_RATES),
        (0.5, 0.7, 0.9, 0.95, 0.99, 0.995),
        view="best_series",
        seeds=3,
    ),
    _lenet5(
        "lenet5_rates",
        "Figure S7",
        "FreezeNet and SNIP over a broad range of rates",
        "From q = 0.5 to 0.95 both are as good as the dense network.",
        series=(_BASELINE, _FREEZENET, _SNIP),
        paper=_TABLE_2,
    ),
    _lenet5(
        "lenet5_best_run",
        "Figure S8",
        "The best run at q = 0.99, its early stop marked",
        "The run with the best validation accuracy of five reaches a test accuracy of 99.1 % with "
        "the weights of its early stop.",
        series=(Series("FreezeNet, 19/1", {"method": "freezenet", "validation_fraction": 0.05}),),
        rates=(0.99,),
        view="best_run",
        paper={("FreezeNet, 19/1", 0.99): (99.1, None)},
    ),
    _lenet5(
        "method_costs",
        "Table 1",
        "What standard training, pruning and FreezeNet cost",
        "A pruned network and a FreezeNet both store the share 1 - q of the weights, with sparse "
        "gradients; only the pruned one computes with sparse tensors; only the FreezeNet keeps the "
        "gradient flowing.",
        series=tuple(_measured(s, "costs") for s in (_BASELINE, _SNIP, _FREEZENET)),
        rates=(0.9, 0.99, 0.999),
        quantity="gradient_flow",
        view="costs",
    ),
    _lenet5(
        "lenet5_sizes",
        "Table 2",
        "Sizes and accuracies",
        "FreezeNet reaches 99.2 % of the dense network's accuracy with a factor 157 less to store, "
        "and is better than SNIP at each of these rates.",
        series=(_BASELINE, _SNIP, _FREEZENET),
        rates=(0.9, 0.99, 0.995, 0.999),
        view="sizes",
        paper=_TABLE_2,
    ),
    Experiment(
        "vgg16_cifar",
        "Table 3",
        "FreezeNet, FreezeNet-WD and SNIP on two data sets",
        "On CIFAR-10, SNIP and FreezeNet-WD are better up to q = 0.95, where FreezeNet-WD can be "
        "pruned without loss; at 0.99 SNIP is at chance and FreezeNet still good. On CIFAR-100, "
        "FreezeNet is best at every rate.",
        "cifar10",
        "vgg16_d",
        tuple(
            _on(dataset, series)
            for dataset in ("cifar10", "cifar100")
            for series in (_BASELINE, _SNIP, _FREEZENET, _FREEZENET_WD)
        ),
        (0.9, 0.95, 0.99, 0.995),
        paper=_TABLE_3,
    ),
    _lenet5(
        "lenet5_pruning_methods",
        "Table 4",
        "FreezeNet beside pruning methods at q = 0.99",
        "FreezeNet's 99.1 % is next to the best pruning methods', which cost more, and above "
        "GraSP's and SNIP's.",
        series=(
            _BASELINE,
            Series("FreezeNet, 19/1", {"method": "freezenet", "validation_fraction": 0.05}),
            Series("SNIP, 19/1", {"method": "snip", "validation_fraction": 0.05}),
            *_grasp_search(),
        ),
        rates=(0.99,),
        view="pruning_methods",
        paper={
            ("baseline", 0.0): (99.4, None),
            ("FreezeNet, 19/1", 0.99): (99.1, None),
            ("SNIP, 19/1", 0.99): (98.9, None),
            ("GraSP, 19/1, learning rate 0.1", 0.99): (98.9, None),
        },
    ),
)

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment for experiment in (*_OF_THE_PAPER, *beyond.EXPERIMENTS)
}
"""The experiments by name."""
