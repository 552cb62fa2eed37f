"""The registry of the paper's experiments, and what is changed in one."""

import collections

import pytest
from experiment_cases import TABLE_3, tables_in

from keras_freeze.paper.experiments import EXPERIMENTS
from keras_freeze.paper.runs import Results
from keras_freeze.paper.training import LEARNING_RATES
from keras_freeze.paper.views.reports import markdown

pytestmark = pytest.mark.cases(2)

ALL = sorted(EXPERIMENTS)

# Of the paper's figures and tables, those that hold data.
SOURCES = [
    *(
        f"Figure {n}, {side}"
        for n in ("2", "3", "4", "S2", "S3", "S4", "S5")
        for side in ("left", "right")
    ),
    *("Figure S1", "Figure S6", "Figure S7", "Figure S8"),
    *("Table 1", "Table 2", "Table 3", "Table 4"),
]

BEYOND = [
    f"{model}_{name}"
    for model in ("lenet300", "lenet5")
    for name in (
        "distributions_and_criteria",
        "shuffled_masks",
        "moving_masks",
        "methods",
        "seeds",
    )
]

# Table 2 as printed: SNIP, FreezeNet.
TABLE_2 = {
    0.9: (99.24, 99.37),
    0.99: (98.80, 98.94),
    0.995: (98.02, 98.55),
    0.999: (20.57, 95.61),
}


# ---------------------------------------------------------------- registry


def test_registry_holds_each_figure_and_table_with_data_once():
    of_paper = [e.source for e in EXPERIMENTS.values() if e.is_of_paper]
    assert sorted(of_paper) == sorted(SOURCES)


def test_registry_holds_what_the_paper_does_not_have():
    assert [e.name for e in EXPERIMENTS.values() if not e.is_of_paper] == BEYOND


def test_names_headings_and_series_tell_experiments_apart():
    assert [e.name for e in EXPERIMENTS.values()] == list(EXPERIMENTS)
    headings = [e.heading for e in EXPERIMENTS.values()]
    assert len(set(headings)) == len(headings)
    for experiment in EXPERIMENTS.values():
        assert experiment.statement.endswith(".")
        labels = [s.label for s in experiment.series]
        assert len(set(labels)) == len(labels)


def test_each_label_says_which_run_it_is():
    runs = {run for experiment in EXPERIMENTS.values() for run in experiment.runs}
    assert len({run.label for run in runs}) == len(runs)


@pytest.mark.parametrize(
    ("name", "series", "rates", "seeds"),
    [
        ("lenet5_extreme_rates", 2, 10, 5),
        ("lenet5_best_learning_rates", 9, 9, 3),
        ("resnet34_tiny_imagenet", 3, 6, 3),
        ("vgg16_gradient_flow", 3, 7, 10),
        ("lenet5_pruning_methods", 2 + 9 * 3, 1, 5),
        ("lenet300_distributions_and_criteria", 4 * 3, 3, 3),
        ("lenet5_shuffled_masks", 7, 3, 3),
        ("lenet300_moving_masks", 5, 2, 3),
        ("lenet300_methods", 4, 5, 5),
        ("lenet300_seeds", 2, 1, 10),
    ],
)
def test_grids_have_their_seeds(name, series, rates, seeds):
    with_baseline = any(s.label == "baseline" for s in EXPERIMENTS[name].series)
    runs = EXPERIMENTS[name].runs
    assert len(runs) == seeds * (series * rates + with_baseline)
    assert {run.seed for run in runs} == set(range(seeds))


def test_the_first_runs_are_a_whole_figure_of_one_seed():
    runs = EXPERIMENTS["lenet5_extreme_rates"].runs
    assert {run.seed for run in runs[:21]} == {0}


def test_grasp_is_searched_as_in_the_supplement():
    grasp = [r for r in EXPERIMENTS["lenet5_pruning_methods"].runs if r.method == "grasp"]
    combinations = collections.Counter((r.learning_rate, r.validation_fraction) for r in grasp)
    rates = [0.1 / 16, 0.1 / 8, 0.1 / 4, 0.1 / 2, 0.1, 0.2, 0.4, 0.8, 1.6]
    splits = [1 / 10, 1 / 20, 1 / 4]  # 9/1, 19/1, 3/1
    assert combinations == {(rate, split): 5 for rate in rates for split in splits}
    assert list(LEARNING_RATES) == rates


@pytest.mark.parametrize("name", BEYOND)
def test_beyond_the_paper_there_is_a_question_and_no_number_of_the_paper(name):
    experiment = EXPERIMENTS[name]
    text = markdown(experiment, Results("no results"))
    assert text.startswith(f"## Beyond the paper: {experiment.title} (LeNet-")
    assert f"The question: {experiment.statement}\n" in text
    assert "The paper's statement" not in text
    assert experiment.paper == {}


def test_moving_masks_are_each_schedule_beside_the_mask_that_stays():
    runs = EXPERIMENTS["lenet300_moving_masks"].runs
    assert {(run.method, run.schedule, run.distribution) for run in runs} == {
        ("freezenet", None, "global"),
        ("freezenet", "gradual", "global"),
        ("freezenet", "rigl", "global"),
        ("freezenet", "set", "global"),
        ("random", "rigl", "erk"),
    }


def test_the_methods_side_by_side_share_the_runs_of_the_papers_figure():
    methods, figure = (EXPERIMENTS[name] for name in ("lenet300_methods", "lenet300_rates"))
    shared = set(methods.runs) & set(figure.runs)
    assert {run.method for run in shared} == {"baseline", "freezenet", "snip"}
    assert {run.freeze_rate for run in shared} == {0.0, *methods.rates}


def test_capacity_is_trained_without_weight_decay_and_shows_the_last_epoch():
    experiment = EXPERIMENTS["lenet5_capacity"]
    assert {run.l2 for run in experiment.runs} == {0.0}
    assert experiment.quantity == "training_accuracy"


def test_table_2_is_in_the_registry_as_printed():
    expected = {("baseline", 0.0): (99.36, None)}
    for rate, values in TABLE_2.items():
        for label, value in zip(("SNIP", "FreezeNet"), values, strict=True):
            expected[label, rate] = (value, None)
    assert EXPERIMENTS["lenet5_sizes"].paper == expected
    assert EXPERIMENTS["lenet5_rates"].paper == expected
    extreme = {key: value for key, value in expected.items() if key[1] != 0.9}
    assert EXPERIMENTS["lenet5_extreme_rates"].paper == extreme


def test_table_3_is_in_the_registry_as_printed():
    expected = {}
    for method, by_rate in TABLE_3.items():
        for rate, values in by_rate.items():
            expected[f"{method}, CIFAR-10", rate] = values[:2]
            expected[f"{method}, CIFAR-100", rate] = values[2:]
    assert EXPERIMENTS["vgg16_cifar"].paper == expected


def test_other_numbers_of_the_text_and_table_4():
    assert EXPERIMENTS["lenet300_rates"].paper == {("baseline", 0.0): (98.57, None)}
    assert EXPERIMENTS["lenet5_best_run"].paper == {("FreezeNet, 19/1", 0.99): (99.1, None)}
    table = tables_in(markdown(EXPERIMENTS["lenet5_pruning_methods"], Results("no results")))[0]
    assert table[0][1:4] == [
        "sparse gradients in training",
        "additional hyperparameters",
        "trained weights (%)",
    ]
    assert [(row[0].split(" (")[0], *row[1:4], row[5]) for row in table[1:]] == [
        ("baseline", "-", "-", "", "99.4"),
        ("FreezeNet, 19/1", "✓", "✗", "", "99.1"),
        ("SNIP, 19/1", "✓", "✗", "", "98.9"),
        ("GraSP", "✓", "✗", "", "98.9"),
        ("Connection-Learning", "✗", "✗", "8.3", "99.2"),
        ("Dynamic-Network-Surgery", "✗", "✗", "0.9", "99.1"),
        ("Learning-Compression", "✗", "✓", "1.0", "98.9"),
        ("Sparse-Momentum", "✗", "✓", "1.0", "99.2"),
    ]


@pytest.mark.parametrize("name", ALL)
def test_every_number_of_the_paper_belongs_to_a_point(name):
    experiment = EXPERIMENTS[name]
    points = {(s.label, rate) for s in experiment.series for rate in experiment.rates_of(s)}
    assert set(experiment.paper) <= points


# ---------------------------------------------------------------- changes


def test_what_is_changed_is_said():
    experiment = EXPERIMENTS["lenet5_extreme_rates"]
    changed = experiment.changed(
        dataset="mnist_5k",
        model="lenet_300_100",
        epochs=5,
        seeds=2,
        rates=[0.999, 0.99],
        steps_per_epoch=3,
    )
    assert changed.changes == (
        "5,000 digits of MNIST instead of MNIST",
        "LeNet-300-100 instead of LeNet-5-Caffe",
        "5 of 40 epochs, the schedule shortened in proportion",
        "only the first 3 batches of training, validation and test images",
        "2 of 5 seeds",
        "rates 0.99, 0.999",
    )
    assert changed.paper == {}
    assert "Changed here: 5,000 digits of MNIST instead of MNIST; LeNet-300-100" in markdown(
        changed, Results("no results")
    )


def test_the_experiments_own_values_are_no_change():
    experiment = EXPERIMENTS["lenet5_extreme_rates"]
    same = experiment.changed(
        dataset="mnist", model="lenet_5_caffe", epochs=250, seeds=5, rates=experiment.rates
    )
    assert same.changes == ()
    assert same.runs == experiment.runs
    assert "Changed here: nothing." in markdown(same, Results("no results"))


def test_shortened_runs_keep_the_papers_numbers_beside_them():
    changed = EXPERIMENTS["lenet5_sizes"].changed(epochs=5, rates=[0.99])
    assert changed.changes == (
        "5 of 250 epochs, the schedule shortened in proportion",
        "rates 0.99",
    )
    assert changed.paper == EXPERIMENTS["lenet5_sizes"].paper


def test_another_data_set_is_refused_where_data_sets_are_compared():
    with pytest.raises(ValueError, match=r"vgg16_cifar, which compares data sets.*dataset='mnist'"):
        EXPERIMENTS["vgg16_cifar"].changed(dataset="mnist")
