"""Each public argument refuses what it cannot use, kindly: the error names the argument."""

import re

import keras
import numpy as np
import pytest

import keras_freeze as kf
from keras_freeze.masks import Structure

X, Y = np.ones((4, 3), "float32"), np.zeros(4, "int32")
OBJECTS = np.array([{}, None, "a", 1.5], dtype=object)


def compiled(frozen=False):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="fc")])
    model.compile(
        kf.FreezeOptimizer(keras.optimizers.SGD(0.1), 0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    if frozen:
        kf.freeze(model, X, Y)
    return model


def freeze(**given):
    kf.freeze(**{"model": compiled(), "x": X, "y": Y, **given})


def freeze_with_mask(**given):
    kf.freeze(**{"model": compiled(), **given})


def freeze_mask(**given):
    kf.FreezeMask(**{"entries": [], **given})


def from_scores(**given):
    kf.FreezeMask.from_scores(**{"scores": [np.ones(3)], "freeze_rate": 0.5, **given})


def compute_saliency(**given):
    kf.compute_saliency(**{"model": compiled(), "x": X, "y": Y, **given})


def gradient_flow(**given):
    kf.gradient_flow(**{"model": compiled(), "x": X, "y": Y, **given})


def check_pruning(**given):
    kf.check_pruning(**{"model": compiled(frozen=True), "x": X, "y": Y, **given})


def quantize(**given):
    kf.quantize(**{"model": compiled(frozen=True), "x": X, "y": Y, **given})


def quantize_by_step(**given):
    kf.quantize(**{"model": compiled(frozen=True), "step": 0.1, **given})


def set_trained(**given):
    kf.set_trained(**{"model": compiled(frozen=True), "vector": np.ones(5), **given})


def reinitialize(**given):
    kf.reinitialize(**{"model": compiled(), **given})


def optimizer(**given):
    kf.FreezeOptimizer(**{"inner_optimizer": keras.optimizers.SGD(), **given})


def history(**given):
    kf.callbacks.GradientFlowHistory(**{"x": X, "y": Y, **given})


def board(**given):
    kf.callbacks.FreezeBoard(**{"log_dir": "logs", "x": X, "y": Y, **given})


NOT_MODELS = ["model", None, keras.Model, keras.layers.Dense(2), OBJECTS]
NOT_DATA = ["data", dict, OBJECTS, 3.0, ["a", "b"], np.zeros((0, 3))]
NOT_TARGETS = ["labels", int, OBJECTS, np.zeros(5)]
NOT_COUNTS = [0, -1, 1.5, "2", True]
NOT_SEEDS = [-1, 2**32, 0.5, "0", None, True]
NOT_LOSSES = ["mse of course", keras.losses.MeanSquaredError, 3, {"fc": "mse"}]
NOT_CRITERIA = ["snipe", kf.criteria.GraSP, kf.criteria.FORCE, 3, None]
NOT_DISTRIBUTIONS = ["even", None, 0.5, {}, {"fc": 2}, {"fc": "0.5"}, {3: 0.5}, ["fc"], dict]
NOT_STRUCTURES = ["columns", "4:2", 3, 0.5, (4,), (0, 4), (4, 2.5), {"column"}, Structure]
NOT_INITIALIZERS = ["glorot", keras.initializers.HeNormal, 3, OBJECTS]

ARGUMENTS = [
    (freeze, "model", NOT_MODELS),
    (freeze, "x", NOT_DATA),
    (freeze, "y", NOT_TARGETS),
    (freeze, "sample_weight", ["weights", float, OBJECTS, np.zeros(5)]),
    (freeze, "steps", NOT_COUNTS),
    (freeze, "batch_size", NOT_COUNTS),
    (freeze, "overwrite", [1, "yes", None]),
    (freeze, "drawn", [1, "yes", None, np.True_]),
    (freeze, "loss", NOT_LOSSES),
    (freeze, "optimizer", ["sgd", kf.FreezeOptimizer, keras.optimizers.SGD, 3]),
    (freeze, "freeze_rate", [-0.1, 1.5, "0.9", True, float("nan"), np.array([0.9])]),
    (freeze_with_mask, "mask", ["mask", kf.FreezeMask, np.ones((3, 2), bool), 3, {}]),
    (
        freeze_with_mask,
        "mask",
        [{"fc/kernel": OBJECTS}, {"fc/kernel": "a"}, {"fc/kernel": [[1], []]}],
    ),
    (freeze_with_mask, "mask", [{"other": np.ones((3, 2), bool)}, {3: np.ones((3, 2), bool)}]),
    (kf.unfreeze, "model", NOT_MODELS),
    (kf.get_trained, "model", NOT_MODELS),
    (set_trained, "model", NOT_MODELS),
    (set_trained, "vector", [None, "vector", 3, [1, 2], np.ones(3), np.full(5, np.nan), OBJECTS]),
    (set_trained, "fingerprint", [3, b"digest", "digest", OBJECTS]),
    (kf.get_mask, "model", NOT_MODELS),
    (compute_saliency, "model", NOT_MODELS),
    (compute_saliency, "x", NOT_DATA),
    (compute_saliency, "y", NOT_TARGETS),
    (compute_saliency, "criterion", NOT_CRITERIA),
    (compute_saliency, "loss", NOT_LOSSES),
    (gradient_flow, "model", NOT_MODELS),
    (gradient_flow, "x", NOT_DATA),
    (gradient_flow, "y", NOT_TARGETS),
    (gradient_flow, "sample_weight", ["weights", float, OBJECTS, np.zeros(5)]),
    (gradient_flow, "steps", NOT_COUNTS),
    (gradient_flow, "batch_size", NOT_COUNTS),
    (gradient_flow, "reduce", ["sum", None, 3, ["norms"], np.array(["norms", "gradients"])]),
    (gradient_flow, "loss", NOT_LOSSES),
    (freeze_mask, "entries", ["entries", 3, None, [3], kf.FreezeMask, {0: np.ones(3, bool)}]),
    (kf.report, "model", NOT_MODELS),
    (kf.prune, "model", NOT_MODELS),
    (check_pruning, "model", NOT_MODELS),
    (check_pruning, "x", [*NOT_DATA, iter([X])]),
    (check_pruning, "y", NOT_TARGETS),
    (check_pruning, "batch_size", NOT_COUNTS),
    (quantize, "model", NOT_MODELS),
    (quantize, "x", [*NOT_DATA, iter([X])]),
    (quantize, "y", NOT_TARGETS),
    (quantize, "tolerance", [-0.1, "0.01", None, True, float("nan"), OBJECTS]),
    (quantize_by_step, "step", [0, -1.0, "0.01", True, float("inf"), np.array([0.1]), OBJECTS]),
    (quantize_by_step, "base", [3, ["x"], keras.Model, b"x", OBJECTS]),
    (kf.storage.Bits, "per_value", [0, -1.0, "3", None, True, float("inf"), OBJECTS]),
    (kf.storage.Grid, "step", [0, -1.0, "0.01", None, True, float("inf"), OBJECTS]),
    (reinitialize, "model", NOT_MODELS),
    (reinitialize, "initializer", NOT_INITIALIZERS),
    (reinitialize, "seed", NOT_SEEDS),
    (kf.restrict_gradients, "model", NOT_MODELS),
    (kf.restore_gradients, "model", NOT_MODELS),
    (optimizer, "inner_optimizer", ["sdg", keras.optimizers.SGD, None, 3]),
    (optimizer, "freeze_rate", [-0.1, 1.5, "0.9", None, float("nan"), np.array([0.9])]),
    (optimizer, "criterion", NOT_CRITERIA),
    (optimizer, "frozen_weights", ["frozen", None, 3, ["keep"]]),
    (optimizer, "l2", [-1.0, float("inf"), float("nan"), "0.1", None, True]),
    (optimizer, "exclude", [3, [3], keras.layers.Dense, "fc//kernel", ""]),
    (optimizer, "seed", NOT_SEEDS),
    (optimizer, "distribution", NOT_DISTRIBUTIONS),
    (from_scores, "distribution", [*NOT_DISTRIBUTIONS, {"fc": 0.5}]),
    (optimizer, "structure", NOT_STRUCTURES),
    (from_scores, "structure", NOT_STRUCTURES),
    (kf.criteria.GraSP, "temperature", [0, -1.0, float("inf"), "200", None, True]),
    (kf.criteria.GraSP, "samples_per_class", [0, -1, 1.5, "10", True]),
    (kf.criteria.IterativeCriterion, "steps", NOT_COUNTS),
    (kf.criteria.IterativeSNIP, "steps", NOT_COUNTS),
    (kf.criteria.FORCE, "steps", NOT_COUNTS),
    (kf.criteria.SynFlow, "steps", NOT_COUNTS),
    (history, "x", [*NOT_DATA, None, iter([X])]),
    (history, "y", NOT_TARGETS),
    (history, "sample_weight", ["weights", float, OBJECTS, np.zeros(5)]),
    (history, "steps", NOT_COUNTS),
    (history, "batch_size", NOT_COUNTS),
    (board, "log_dir", [3, None, b"logs", str]),
    (board, "x", [*NOT_DATA, iter([X])]),
    (board, "y", NOT_TARGETS),
    (board, "sample_weight", ["weights", float, OBJECTS, np.zeros(5)]),
    (board, "steps", NOT_COUNTS),
    (board, "batch_size", NOT_COUNTS),
]
CASES = [(call, name, value) for call, name, values in ARGUMENTS for value in values]


@pytest.mark.parametrize(("call", "name", "value"), CASES)
def test_a_bad_argument_is_named(call, name, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**{name: value})
    message = str(caught.value)
    assert re.search(rf"`{name}`", message), message
    assert "Received" in message or " must " in message, message
    assert len(message) < 2000
