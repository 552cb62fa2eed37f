"""What decides the mask: inputs and losses, rates, criteria, and what is not finite or equal."""

import functools
import math

import axes
import keras
import loops
import numpy as np
import pytest
from frozen_models import HALF, check_training, fit, freezing, frozen_model, model_and_data
from helpers import (
    assert_frozen_bits_kept,
    crossentropy,
    equals_by_hand,
    is_weight,
    mask_by_hand,
    same_bits,
    value_of,
    values_of,
)
from keras import layers as kl

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=1, jax=0)

each_way = pytest.mark.parametrize("way", axes.WAYS)


# Inputs and weights


class Sequence(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def _torch_loader(x, y):
    torch = pytest.importorskip("torch")
    tensors = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    return torch.utils.data.DataLoader(tensors, loops.BATCH)


def _tensorflow_dataset(x, y):
    data = pytest.importorskip("tensorflow").data
    return data.Dataset.from_tensor_slices((x, y)).batch(loops.BATCH)


INPUTS = {
    "generator": lambda x, y: (batch for batch in loops.batches(x, y)),
    "py_dataset": lambda x, y: Sequence(loops.batches(x, y)),
    "tensorflow_dataset": _tensorflow_dataset,
    "torch_loader": _torch_loader,
}


@functools.cache
def values_after_arrays(way):
    model, x, y = frozen_model(way)
    fit(model, x, y)
    return kf.get_mask(model), values_of(model.variables)


@pytest.mark.cases(1, tensorflow=0)
@each_way
@pytest.mark.parametrize("kind", INPUTS)
def test_every_input_of_fit_gives_what_arrays_give(kind, way):
    model, x, y = model_and_data()
    model.compile(freezing(), crossentropy())
    before = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, INPUTS[kind](x, y))
    fit(model, INPUTS[kind](x, y))
    mask, values = values_after_arrays(way)
    assert check_training(model, before) == mask
    for ours, theirs in zip(values_of(model.variables), values, strict=True):
        assert same_bits(ours, theirs)


def gradients_by_differences(model, x, y, weights):
    """Central differences of the weighted mean loss of a linear model, in float64."""

    def loss(kernel):
        logits = x.astype("float64") @ kernel
        losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
        return (weights * losses).mean()

    kernel = value_of(model.trainable_variables[0]).astype("float64")
    gradient = np.zeros_like(kernel)
    for index in np.ndindex(kernel.shape):
        step = np.zeros_like(kernel)
        step[index] = 1e-6
        gradient[index] = (loss(kernel + step) - loss(kernel - step)) / 2e-6
    return gradient


@pytest.mark.cases(1, jax=1)
@each_way
@pytest.mark.parametrize("kind", ["none", "sample_weight", "class_weight"])
def test_the_mask_is_equation_1_by_central_differences(kind, way):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), kl.Dense(axes.NUM_CLASSES, use_bias=False)])
    _, x, y = model_and_data()
    of_class = np.array([5.0, 0.25, 1.0])
    weights = np.ones(len(y)) if kind == "none" else of_class[y]
    model.compile(freezing(), crossentropy())
    given = {} if kind == "none" else {kind: weights}
    if kind == "class_weight":
        given = {kind: dict(enumerate(of_class))}
    kernel = value_of(model.trainable_variables[0])
    gradient = gradients_by_differences(model, x, y, weights)
    if way == "freeze":
        kf.freeze(model, x, y, sample_weight=None if kind == "none" else weights)
    fit(model, x, y, batch_size=len(x), **given)
    (expected,) = mask_by_hand([kernel], [gradient], HALF)
    assert np.array_equal(kf.get_mask(model)[model.trainable_variables[0]], expected)


@pytest.mark.cases(1, tensorflow=0)
@each_way
def test_several_losses_decide_together(way):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    body = kl.Dense(8, activation="tanh", name="body")(inputs)
    outputs = {name: kl.Dense(3, name=name)(body) for name in ("first", "second")}
    model = keras.Model(inputs, outputs)
    losses = dict.fromkeys(outputs, crossentropy())
    model.compile(freezing(), losses, loss_weights={"first": 1.0, "second": 0.0})
    _, x, y = model_and_data()
    targets = dict.fromkeys(outputs, y)
    if way == "freeze":
        kf.freeze(model, x[: loops.BATCH], {name: t[: loops.BATCH] for name, t in targets.items()})
    before = values_of(model.trainable_variables)
    fit(model, x, targets, batch_size=loops.BATCH)
    mask = check_training(model, before)
    assert mask["second/kernel"].sum() == 1  # the rule of at least one weight


# Rates


@pytest.mark.cases(1, jax=1)
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adam", "averaging", "muon"])
def test_a_rate_of_zero_is_the_bare_optimizer_bit_for_bit(name):
    values = []
    for wrap in (lambda inner: inner, lambda inner: kf.FreezeOptimizer(inner, 0.0)):
        model, x, y = model_and_data()
        model.compile(wrap(axes.OPTIMIZERS[name]()), crossentropy())
        fit(model, x, y)
        values.append(values_of(model.variables))
    for ours, theirs in zip(*values, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.cases(2, tensorflow=0, jax=1)
@each_way
def test_at_a_rate_of_one_only_biases_and_normalisation_train(way):
    model, x, y = frozen_model(way, rate=1)  # an int will do
    before = values_of(model.trainable_variables)
    fit(model, x, y)
    assert kf.get_mask(model).num_trained == 0
    for variable, old in zip(model.trainable_variables, before, strict=True):
        assert same_bits(value_of(variable), old) == is_weight(variable)


# What is not finite, and ties


@pytest.mark.cases(2, tensorflow=2, jax=1)
def test_a_gradient_with_nan_moves_no_frozen_weight():
    model, x, y = frozen_model()
    before = values_of(model.trainable_variables)
    x[-1] = np.nan
    fit(model, x, y)
    mask = kf.get_mask(model)
    assert_frozen_bits_kept(model.trainable_variables, mask, before)
    assert np.isnan(value_of(model.trainable_variables[0])).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_freeze_refuses_data_that_are_not_finite_and_changes_nothing(value):
    model, x, y = model_and_data()
    model.compile(freezing(), crossentropy())
    before = values_of(model.variables)
    x[0, 0] = value
    with pytest.raises(ValueError, match=r"is nan|is inf|not finite"):
        kf.freeze(model, x, y)
    for old, new in zip(before, values_of(model.variables), strict=True):
        assert same_bits(old, new)
    assert kf.get_mask(model) is None


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_first_batch_that_is_not_finite_trains_nothing(value, run_eagerly):
    model, x, y = model_and_data()
    model.compile(freezing(), crossentropy(), run_eagerly=run_eagerly)
    before = values_of(model.trainable_variables)
    x[0, 0] = value
    message = "not finite in the first batch"
    if axes.BACKEND == "jax":  # where an error in `fit` would lose the weights
        with pytest.warns(RuntimeWarning, match=message):
            fit(model, x, y, batch_size=len(x))
    else:
        with pytest.raises(Exception, match=message):
            fit(model, x, y, batch_size=len(x))
    for old, new in zip(before, values_of(model.trainable_variables), strict=True):
        assert same_bits(old, new)
    assert kf.get_mask(model) is None


@pytest.mark.filterwarnings("ignore:The saliency")
def test_training_without_a_finite_batch_warns_at_its_end():
    model = model_and_data()[0]
    model.compile(freezing(), crossentropy())
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    with pytest.warns(RuntimeWarning, match="nothing was trained"):
        optimizer.finalize_variable_values(model.trainable_variables)


@pytest.mark.cases(1, tensorflow=0)
@each_way
def test_equal_scores_go_to_the_first_weights(way):
    model, x, y = model_and_data()
    model.compile(freezing(criterion=lambda w, g: keras.ops.ones_like(w)), crossentropy())
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y)
    mask = kf.get_mask(model)
    weights = [v for v in model.trainable_variables if is_weight(v)]
    flat = np.concatenate([mask[v].ravel() for v in weights])
    first = np.arange(flat.size) < math.floor(HALF * flat.size)
    rescued = flat & ~first
    assert flat[first].all()
    assert rescued.sum() == mask.num_rescued <= len(weights)


# Criteria


@pytest.mark.same_on_all
def test_criterion_grasp_needs_a_call_to_freeze():
    model, x, y = frozen_model("first_batch", criterion="grasp")
    with pytest.raises(ValueError, match=r"keras_freeze\.freeze"):
        fit(model, x, y)


def test_a_criterion_is_given_tensors_without_a_history():
    model, x, y = model_and_data()
    seen = []

    def criterion(weights, gradients):
        seen.append((weights, gradients))
        return keras.ops.abs(weights)

    model.compile(freezing(criterion=criterion), crossentropy())
    kf.freeze(model, x, y)
    for weights, gradients in seen:
        for tensor in (weights, gradients):
            assert not getattr(tensor, "requires_grad", False)
            assert keras.backend.standardize_dtype(tensor.dtype) == "float32"


@pytest.mark.cases(2, tensorflow=2, jax=1)
def test_the_mask_is_the_same_in_both_ways_and_by_hand():
    masks = []
    for way in axes.WAYS:
        model, x, y = frozen_model(way)
        weights = [v for v in model.trainable_variables if is_weight(v)]
        starts = values_of(weights)
        fit(model, x, y)
        masks.append(kf.get_mask(model))
    assert masks[0] == masks[1]
    copied, _, _ = model_and_data()
    copied.compile(keras.optimizers.SGD(1.0), crossentropy())
    copied.train_on_batch(x[: loops.BATCH], y[: loops.BATCH])
    after = values_of([v for v in copied.trainable_variables if is_weight(v)])
    gradients = [old - new for old, new in zip(starts, after, strict=True)]
    for variable, expected in zip(weights, mask_by_hand(starts, gradients, HALF), strict=True):
        assert equals_by_hand(masks[1][variable], expected)
