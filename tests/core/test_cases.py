"""What people do with a model, an optimizer and their data, on each backend.

Further such cases, which only TensorFlow has or which were there first, are in the tests beside
this folder.
"""

import copy
import functools
import math
import pickle

import axes
import keras
import loops
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
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
HALF = 0.5


def model_and_data():
    return axes.build("dense", "float32")


def freezing(rate=HALF, inner=None, **arguments):
    if inner is None:
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
    return kf.FreezeOptimizer(inner, rate, **arguments)


def frozen_model(way="freeze", **arguments):
    """A model, compiled, with a mask by `freeze`, or one that its first batch will find."""
    model, x, y = model_and_data()
    model.compile(freezing(**arguments), crossentropy())
    if way == "freeze":
        kf.freeze(model, x[: loops.BATCH], y[: loops.BATCH])
    return model, x, y


def fit(model, x, y=None, **arguments):
    arguments = {"batch_size": loops.BATCH if y is not None else None, **arguments}
    return model.fit(x, y, shuffle=False, verbose=0, **arguments)


def check_training(model, before):
    mask = kf.get_mask(model)
    assert_frozen_bits_kept(model.trainable_variables, mask, before)
    assert_trained_moved(model.trainable_variables, mask, before)
    return mask


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


@pytest.mark.cases(2, tensorflow=1, jax=1)
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


@pytest.mark.cases(2, tensorflow=2, jax=1)
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


@pytest.mark.cases(2, tensorflow=1, jax=1)
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


@pytest.mark.cases(2, tensorflow=2, jax=1)
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


@pytest.mark.cases(2, tensorflow=2, jax=1)
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


# Changing the model


def test_loaded_weights_are_where_the_next_step_starts():
    model, x, y = frozen_model(inner=keras.optimizers.Adam(0.001))
    fit(model, x, y)
    mask = kf.get_mask(model)
    weights = [np.full_like(w, 0.25) for w in model.get_weights()]
    for change in (model.set_weights, lambda w: model.layers[0].set_weights(w[:2])):
        change(weights)
        loaded = values_of(model.trainable_variables)
        fit(model, x, y)
        assert_frozen_bits_kept(model.trainable_variables, mask, loaded)
        moved = value_of(model.trainable_variables[0])[mask[model.trainable_variables[0]]]
        assert (np.abs(moved - 0.25) < 0.02).all()


def test_compiling_anew_keeps_the_mask_whether_it_is_handed_on_or_not():
    model, x, y = frozen_model()
    mask = kf.get_mask(model)
    model.compile(freezing(), crossentropy())
    assert kf.get_mask(model) == mask
    kf.freeze(model, mask=mask)
    before = values_of(model.trainable_variables)
    fit(model, x, y)
    assert check_training(model, before) == mask


def outcome_with_two_models(optimizer):
    for number in range(2):
        model, x, y = model_and_data()
        model.compile(optimizer, crossentropy())
        try:
            fit(model, x, y)
        except Exception as error:
            return number, type(error)
    return None


def test_an_optimizer_of_another_model_is_refused_where_keras_refuses_it():
    plain = outcome_with_two_models(keras.optimizers.SGD(0.05, momentum=0.9))
    assert outcome_with_two_models(freezing()) == plain
    assert (plain is None) == (axes.BACKEND == "jax")


def test_layers_made_untrainable_keep_all_their_weights():
    model, x, y = frozen_model("first_batch")
    fit(model, x, y)
    model.layers[0].trainable = False
    model.compile(freezing(), crossentropy())
    before = values_of(model.layers[0].weights)
    fit(model, x, y)
    for old, new in zip(before, values_of(model.layers[0].weights), strict=True):
        assert same_bits(old, new)
    assert kf.get_mask(model).num_weights == model.get_layer("head").kernel.shape[0] * 3


def test_criterion_grasp_needs_a_call_to_freeze():
    model, x, y = frozen_model("first_batch", criterion="grasp")
    with pytest.raises(ValueError, match=r"keras_freeze\.freeze"):
        fit(model, x, y)


# Copies and files


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@each_way
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copies_train_alike_and_apart(duplicate, way):
    model, x, y = frozen_model(way)
    fit(model, x, y)
    other = duplicate(model)
    before = values_of(model.variables)
    fit(other, x, y)
    for old, new in zip(before, values_of(model.variables), strict=True):
        assert same_bits(old, new)
    fit(model, x, y)
    assert kf.get_mask(other) == kf.get_mask(model)
    for ours, theirs in zip(values_of(other.variables), values_of(model.variables), strict=True):
        assert same_bits(ours, theirs)


def test_a_cloned_model_has_an_optimizer_without_a_mask_that_will_not_train():
    model, x, y = frozen_model()
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    clone.optimizer.build(clone.trainable_variables)
    with pytest.raises(ValueError, match="says how many weights are trained but not which"):
        clone.optimizer.apply([keras.ops.ones(v.shape) for v in clone.trainable_variables])
    kf.freeze(clone, mask=kf.get_mask(model))
    before = values_of(clone.trainable_variables)
    fit(clone, x, y)
    check_training(clone, before)


@pytest.mark.cases(2, tensorflow=1, jax=1)
@each_way
def test_saved_and_loaded_models_train_on_identically(way, tmp_path):
    model, x, y = frozen_model(way)
    fit(model, x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert kf.get_mask(loaded) == kf.get_mask(model)
    for one in (model, loaded):
        fit(one, x, y)
    for ours, theirs in zip(values_of(loaded.variables), values_of(model.variables), strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.cases(2, tensorflow=2, jax=1)
def test_a_freeze_file_brings_weights_and_mask_back(tmp_path):
    model, x, y = model_and_data()
    kf.reinitialize(model, seed=5)
    model.compile(freezing(), crossentropy())
    kf.freeze(model, x, y)
    fit(model, x, y)
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze")
    assert kf.get_mask(loaded) == kf.get_mask(model)
    for ours, theirs in zip(values_of(loaded.variables), values_of(model.variables), strict=True):
        assert same_bits(ours, theirs)


@each_way
@pytest.mark.parametrize("make", [freezing, keras.optimizers.SGD], ids=["freezing", "plain"])
def test_models_from_legacy_h5_files_train_with_no_optimizer(make, way, tmp_path):
    model, x, y = model_and_data()
    model.compile(make(), crossentropy())
    if way == "freeze" and make is freezing:
        kf.freeze(model, x, y)
    fit(model, x, y)
    model.save(tmp_path / "model.h5")
    assert keras.models.load_model(tmp_path / "model.h5", compile=False).built
    loaded = keras.models.load_model(tmp_path / "model.h5")
    with pytest.raises((KeyError, ValueError), match=r"Unknown variable|corresponding 1:1"):
        fit(loaded, x, y)


def test_a_step_that_was_compiled_for_an_earlier_mask_moves_nothing_that_is_frozen():
    if axes.BACKEND != "jax":
        pytest.skip("the functions of the other backends have tests of their own, or none to keep")
    import jax

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), kl.Dense(4, use_bias=False, name="a")])
    model.add(kl.Dense(4, use_bias=False, name="b"))
    optimizer = freezing(inner=keras.optimizers.SGD(0.1))
    chosen = np.arange(16).reshape(4, 4) < 5
    variables = model.trainable_variables
    step = jax.jit(
        lambda state, gradients, values: optimizer.stateless_apply(state, gradients, values)
    )
    for name in ("a", "b"):  # as many entries of another kernel: every shape is the same
        mask = {f"{name}/kernel": chosen}
        kf.freeze(model, mask=mask, overwrite=True, loss="mse", optimizer=optimizer)
        before = values_of(variables)
        values, _ = step(
            [v.value for v in optimizer.variables],
            [keras.ops.ones(v.shape) for v in variables],
            [v.value for v in variables],
        )
        position = "ab".index(name)
        moved = np.asarray(values[position]) != before[position]
        assert np.array_equal(moved, chosen)


def test_an_optimizers_weights_can_be_set_after_its_mask_was_replaced():
    model, x, y = frozen_model()
    optimizer = model.optimizer
    kept = values_of(optimizer.variables)
    kf.freeze(model, mask=kf.get_mask(model), overwrite=True)
    fit(model, x, y)
    optimizer.set_weights(kept)
    for old, variable in zip(kept, optimizer.variables, strict=True):
        if old.size:
            assert same_bits(old, value_of(variable))


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


def test_weights_of_a_frozen_model_load_into_one_with_a_bare_optimizer(tmp_path):
    model, x, y = frozen_model()
    fit(model, x, y)
    model.save_weights(tmp_path / "frozen.weights.h5")
    plain, _, _ = model_and_data()
    plain.compile(keras.optimizers.Adam(0.01), crossentropy())
    plain.load_weights(tmp_path / "frozen.weights.h5")
    for ours, theirs in zip(values_of(plain.weights), values_of(model.weights), strict=True):
        assert same_bits(ours, theirs)
    fit(plain, x, y)


# Several optimizers


def multi(make):
    """One optimizer for each layer, as a function says."""
    optimizers = {name: make() for name in ("body", "head")}
    return keras.optimizers.MultiOptimizer(
        lambda variable: optimizers["head" if "head" in variable.path else "body"]
    )


def test_freeze_finds_its_optimizer_where_a_function_chooses():
    model, x, y = model_and_data()
    optimizers = iter([freezing(), keras.optimizers.SGD(0.1)])
    model.compile(multi(lambda: next(optimizers)), crossentropy())
    mask = kf.freeze(model, x, y)
    before = values_of(model.trainable_variables)
    fit(model, x, y)
    kernel = model.trainable_variables[0]
    assert same_bits(before[0][~mask[kernel]], value_of(kernel)[~mask[kernel]])


def test_several_freeze_optimizers_decide_in_the_first_batch_but_not_in_freeze():
    model, x, y = model_and_data()
    model.compile(multi(freezing), crossentropy())
    model.optimizer.build(model.trainable_variables)
    for ask in (lambda m: kf.freeze(m, x, y), kf.prune):
        with pytest.raises(ValueError, match="with 2 FreezeOptimizers in it"):
            ask(model)
    assert kf.get_mask(model) is None
    before = values_of(model.trainable_variables)
    fit(model, x, y)
    mask = kf.get_mask(model)
    assert kf.report(model).num_trained_weights == mask.num_trained
    assert_frozen_bits_kept(model.trainable_variables, mask, before)


# What is done to a frozen model


@pytest.mark.parametrize("look", ["freeze", "flow", "saliency"])
@pytest.mark.skipif(axes.BACKEND == "torch", reason="where Keras cannot train stateful RNNs")
def test_states_of_recurrent_layers_are_left_as_they_were(look):
    keras.utils.set_random_seed(0)
    layer = kl.LSTM(4, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(8, 4, 2)), layer, kl.Dense(3)])
    model.compile(freezing(), crossentropy())
    x = np.random.default_rng(0).normal(size=(8, 4, 2)).astype("float32")
    y = np.arange(8) % 3
    before = values_of(layer.states)
    looks = {
        "freeze": kf.freeze,
        "flow": kf.gradient_flow,
        "saliency": kf.compute_saliency,
    }
    looks[look](model, x, y)
    for old, new in zip(before, values_of(layer.states), strict=True):
        assert same_bits(old, new)


@each_way
def test_prune_reinitialize_report_and_gradient_flow(way):
    model, x, y = frozen_model(way)
    fit(model, x, y)
    mask = kf.get_mask(model)
    flow = kf.gradient_flow(model, x, y, reduce="norms", batch_size=loops.BATCH)
    assert flow == pytest.approx(flow_by_hand(model, x, y, mask), rel=1e-4)
    assert kf.report(model).num_trained_weights == mask.num_trained
    kf.prune(model)
    for variable in model.trainable_variables:
        if is_weight(variable):
            assert not value_of(variable)[~mask[variable]].any()
    fit(model, x, y)
    kf.reinitialize(model, seed=3)
    drawn = values_of(model.trainable_variables)
    assert kf.get_mask(model) == mask
    kf.reinitialize(model, seed=3)
    for old, new in zip(drawn, values_of(model.trainable_variables), strict=True):
        assert same_bits(old, new)
    fit(model, x, y)
    assert check_training(model, drawn) == mask


def flow_by_hand(model, x, y, mask):
    """By how a step of plain SGD moves a copy of the model: w - w_0 = -rate * gradient."""
    flows = []
    for batch in loops.batches(x, y):
        copied = keras.models.clone_model(model)
        copied.set_weights(model.get_weights())
        copied.compile(keras.optimizers.SGD(1.0), crossentropy())
        before = values_of(copied.trainable_variables)
        copied.train_on_batch(*batch)
        gradients = [
            np.abs(old - value_of(variable))[mask[original] if is_weight(original) else ...]
            for old, variable, original in zip(
                before, copied.trainable_variables, model.trainable_variables, strict=True
            )
        ]
        flows.append(sum(g.sum() for g in gradients) / sum(g.size for g in gradients))
    return np.mean(flows)


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
