"""What holds for every inner optimizer: ten steps with the same gradients for all contestants."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    compiled,
    dense_model,
    equals_by_hand,
    fit,
    gradients_by_autodiff,
    is_weight,
    mask_by_hand,
    same_bits,
    sgd,
    value_of,
    values_of,
)
from keras import layers as kl
from keras import optimizers as ko
from oracle import AdamByHand

import keras_freeze as kf
from keras_freeze.optimizer.strategy import COORDINATE_WISE

pytestmark = pytest.mark.cases(1)

STEPS, FREEZE_RATE = 10, 0.75


def multi_optimizer():
    adam = ko.Adam(0.01, weight_decay=0.01)
    return ko.MultiOptimizer(ko.OptimizerMap(sgd(momentum=0.9), {".*head/.*": adam}))


SCHEDULE = ko.schedules.ExponentialDecay(0.1, 3, 0.5)

INNER = {
    "sgd": sgd,
    "momentum": lambda: sgd(momentum=0.9),
    "nesterov": lambda: sgd(momentum=0.9, nesterov=True),
    "sgd_weight_decay": lambda: sgd(momentum=0.9, weight_decay=0.01),
    "sgd_schedule": lambda: ko.SGD(SCHEDULE, momentum=0.9),
    "sgd_clipnorm": lambda: sgd(clipnorm=0.5),
    "sgd_clipvalue": lambda: sgd(clipvalue=0.2),
    "sgd_global_clipnorm": lambda: sgd(momentum=0.9, global_clipnorm=1.0),
    "sgd_accumulation": lambda: sgd(momentum=0.9, gradient_accumulation_steps=3),
    "sgd_ema": lambda: sgd(use_ema=True, ema_momentum=0.8),
    "sgd_ema_overwrite": lambda: sgd(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "sgd_loss_scale": lambda: sgd(momentum=0.9, loss_scale_factor=8.0),
    "adam": lambda: ko.Adam(0.01),
    "amsgrad": lambda: ko.Adam(0.01, amsgrad=True),
    "adam_global_clipnorm": lambda: ko.Adam(0.01, global_clipnorm=1.0),
    "adam_accumulation": lambda: ko.Adam(
        0.01, weight_decay=0.1, gradient_accumulation_steps=2, clipnorm=0.5
    ),
    "adam_ema_overwrite": lambda: ko.Adam(
        0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=1
    ),
    "adamw": lambda: ko.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: ko.RMSprop(0.01, weight_decay=0.1),
    "rmsprop_centered": lambda: ko.RMSprop(0.01, momentum=0.9, centered=True),
    "adagrad": lambda: ko.Adagrad(0.1, weight_decay=0.1),
    "adadelta": lambda: ko.Adadelta(1.0, weight_decay=0.1),
    "adamax": lambda: ko.Adamax(0.01, weight_decay=0.1),
    "nadam": lambda: ko.Nadam(0.01, weight_decay=0.1),
    "ftrl": lambda: ko.Ftrl(
        0.1,
        l1_regularization_strength=0.01,
        l2_regularization_strength=0.01,
        weight_decay=0.1,
    ),
    "lion": lambda: ko.Lion(0.01, weight_decay=0.1),
    "schedule_free": lambda: ko.ScheduleFreeAdamW(0.05, weight_decay=0.1),
    "lamb": lambda: ko.Lamb(0.01, weight_decay=0.1),
    "adafactor": lambda: ko.Adafactor(0.01, weight_decay=0.1),
    "muon": lambda: ko.Muon(0.01, weight_decay=0.1),
    "muon_ema": lambda: ko.Muon(0.01, use_ema=True, ema_overwrite_frequency=2),
    "multi": multi_optimizer,
}
MIXING = {"lamb", "adafactor", "muon", "muon_ema"}
each_inner = pytest.mark.parametrize("inner", INNER)
each_way = pytest.mark.parametrize("way", ["freeze", "first_batch"])


@functools.cache
def gradients():
    rng = np.random.default_rng(1)
    shapes = [v.shape for v in dense_model().trainable_variables]
    return [[rng.normal(size=s).astype("float32") for s in shapes] for _ in range(STEPS)]


def scaled(arrays, optimizer):
    factor = getattr(optimizer, "loss_scale_factor", None) or 1.0
    return [tf.constant(a * np.float32(factor)) for a in arrays]


def expected_masks(variables):
    """By position, from the first gradients."""
    chosen = [i for i, v in enumerate(variables) if is_weight(v)]
    weights = [value_of(variables[i]) for i in chosen]
    found = mask_by_hand(weights, [gradients()[0][i] for i in chosen], FREEZE_RATE)
    assert all(m.any() and not m.all() for m in found)
    return dict(zip(chosen, found, strict=True))


@functools.cache
def run(inner, way, l2=0.0):
    """Values of all variables at the start and after each step, the optimizer and the model."""
    model = dense_model()
    variables = model.trainable_variables
    masks = expected_masks(variables)
    optimizer = kf.FreezeOptimizer(INNER[inner](), freeze_rate=FREEZE_RATE, l2=l2)
    if way == "freeze":
        by_path = {variables[i].path: m for i, m in masks.items()}
        kf.freeze(model, mask=by_path, optimizer=optimizer)
    history = [values_of(variables)]
    for step in gradients():
        optimizer.apply(scaled(step, optimizer), variables)
        history.append(values_of(variables))
    for i, expected in masks.items():
        assert np.array_equal(optimizer.mask[variables[i]], expected)
    return history, optimizer, model


@functools.cache
def run_reference(inner, l2=0.0):
    """The bare optimizer on masked gradients, frozen entries put back after each step."""
    variables = dense_model().trainable_variables
    masks = expected_masks(variables)
    optimizer = INNER[inner]()
    history = [values_of(variables)]
    for step in gradients():
        before = values_of(variables)
        step = [g + np.float32(l2) * w for g, w in zip(step, before, strict=True)]
        step = [np.where(masks.get(i, True), g, np.float32(0)) for i, g in enumerate(step)]
        optimizer.apply(scaled(step, optimizer), variables)
        for i, mask in masks.items():
            variables[i].assign(np.where(mask, value_of(variables[i]), before[i]))
        history.append(values_of(variables))
    return history


@each_way
@each_inner
def test_frozen_weights_keep_their_bits_and_the_rest_is_trained(inner, way):
    history, optimizer, model = run(inner, way)
    variables = model.trainable_variables
    for values in history[1:]:
        for i, mask in expected_masks(dense_model().trainable_variables).items():
            assert same_bits(values[i][~mask], history[0][i][~mask])
    for v, new, old in zip(variables, history[-1], history[0], strict=True):
        trained = optimizer.mask[v] if is_weight(v) else np.ones(v.shape, bool)
        assert (new != old)[trained].mean() > 0.5


@each_way
@pytest.mark.parametrize("inner", [name for name in INNER if name not in MIXING])
def test_trained_weights_equal_a_dense_masked_reference(inner, way):
    for ours, theirs in zip(run(inner, way)[0], run_reference(inner), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)


@each_inner
def test_both_ways_give_the_same_weights(inner):
    for compact, full in zip(run(inner, "freeze")[0], run(inner, "first_batch")[0], strict=True):
        for a, b in zip(compact, full, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)


@each_way
@pytest.mark.parametrize("inner", ["momentum", "sgd_loss_scale", "adamw", "sgd_accumulation"])
def test_coupled_decay_reaches_what_is_trained_and_nothing_else(inner, way):
    ours, theirs = run(inner, way, l2=0.05)[0], run_reference(inner, l2=0.05)
    assert not np.allclose(theirs[-1][0], run_reference(inner)[-1][0], atol=1e-4)
    for a, b in zip(ours[-1], theirs[-1], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)
    for i, mask in expected_masks(dense_model().trainable_variables).items():
        assert same_bits(ours[-1][i][~mask], ours[0][i][~mask])


@each_way
def test_adam_equals_the_recurrence_by_hand(way):
    history = run("adam", way)[0]
    masks = expected_masks(dense_model().trainable_variables)
    for i, start in enumerate(history[0]):
        w, recurrence = start.astype("float64"), AdamByHand()
        for step in gradients():
            w = w + np.where(masks.get(i, True), recurrence.change(step[i], 0.01), 0.0)
        np.testing.assert_allclose(history[-1][i], w, rtol=1e-5, atol=1e-6)


@each_way
def test_global_norm_counts_trained_entries_only(way):
    """One step by hand: the norm over the masked gradients of all variables together."""
    history = run("sgd_global_clipnorm", way)[0]
    masks = expected_masks(dense_model().trainable_variables)
    masked = [np.where(masks.get(i, True), g, 0.0) for i, g in enumerate(gradients()[0])]
    norm = np.sqrt(sum((g**2).sum() for g in masked))
    assert norm > 1.0
    for new, old, g in zip(history[1], history[0], masked, strict=True):
        np.testing.assert_allclose(new, old - 0.1 * g / norm, rtol=1e-5, atol=1e-6)


@each_inner
def test_the_inner_optimizer_sees_kernels_whole_only_where_it_must(inner):
    """State of the compact way costs what is trained: no slot has a frozen kernel's shape."""
    _, optimizer, model = run(inner, "freeze")
    kernels = [tuple(v.shape) for v in model.trainable_variables if is_weight(v)]
    whole = {tuple(v.shape) for v in optimizer.inner_optimizer.variables} & set(kernels)
    compact = type(INNER[inner]()) in COORDINATE_WISE and "ema" not in inner
    assert not whole if compact else whole or inner == "adafactor"


def test_state_of_trained_entries_goes_by_the_path_of_their_kernel():
    _, optimizer, model = run("adam", "freeze")
    paths = [v.path for v in model.trainable_variables]
    slots = [v.path.split("/")[-1] for v in optimizer.inner_optimizer.variables[2:]]
    expected = [f"{p.replace('/', '_')}_{slot}" for p in paths for slot in ("momentum", "velocity")]
    assert slots == expected


@pytest.mark.parametrize("optimizer", COORDINATE_WISE, ids=lambda optimizer: optimizer.__name__)
def test_state_costs_what_the_trained_parameters_cost(optimizer):
    def state_bytes(inner):
        arrays = [value_of(v) for v in inner.variables]
        return sum(array.nbytes for array in arrays if array.size > 1)

    arguments = {"momentum": 0.9} if optimizer is ko.SGD else {}
    dense, sparse = optimizer(0.01, **arguments), optimizer(0.01, **arguments)
    model = kf.models.lenet_300_100()
    dense.build(model.trainable_variables)
    model.compile(kf.FreezeOptimizer(sparse, 0.99), "mse")
    kf.freeze(model, mask=lambda v: np.random.default_rng(v.shape[0]).random(v.shape) < 0.01)
    trained = kf.get_mask(model).num_trained + 410
    share = state_bytes(sparse) / state_bytes(dense)
    assert share == pytest.approx(trained / 266_610, rel=0.05)


@pytest.mark.parametrize("inner", [name for name in INNER if "ema" in name])
def test_final_averages_keep_frozen_bits(inner):
    for way in ("freeze", "first_batch"):
        history, optimizer, model = run.__wrapped__(inner, way)
        last = values_of(model.trainable_variables)
        optimizer.finalize_variable_values(model.trainable_variables)
        assert_frozen_bits_kept(model.trainable_variables, optimizer.mask, history[0])
        if optimizer.inner_optimizer.ema_overwrite_frequency is None:
            final = values_of(model.trainable_variables)
            assert any(not np.allclose(a, b) for a, b in zip(final, last, strict=True))


@each_inner
def test_nothing_frozen_is_the_bare_inner_optimizer_bit_for_bit(inner):
    ours, bare = dense_model().trainable_variables, dense_model().trainable_variables
    wrapped, inner_optimizer = kf.FreezeOptimizer(INNER[inner](), freeze_rate=0), INNER[inner]()
    for step in gradients()[:4]:
        wrapped.apply(scaled(step, inner_optimizer), ours)
        inner_optimizer.apply(scaled(step, inner_optimizer), bare)
        assert all(same_bits(value_of(a), value_of(b)) for a, b in zip(ours, bare, strict=True))
    wrapped.finalize_variable_values(ours)
    inner_optimizer.finalize_variable_values(bare)
    assert all(same_bits(value_of(a), value_of(b)) for a, b in zip(ours, bare, strict=True))
    pairs = zip(wrapped.inner_optimizer.variables, inner_optimizer.variables, strict=True)
    assert all(np.array_equal(value_of(a), value_of(b)) for a, b in pairs)


@each_way
@pytest.mark.parametrize("inner", ["momentum", "adamw", "ftrl", "muon", "multi", "sgd_ema"])
def test_everything_frozen_trains_biases_and_normalisation_only(inner, way):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(INNER[inner](), freeze_rate=1)
    if way == "freeze":
        nothing = {v.path: np.zeros(v.shape, bool) for v in variables if is_weight(v)}
        kf.freeze(model, mask=nothing, optimizer=optimizer)
    before = values_of(variables)
    for step in gradients()[:3]:
        optimizer.apply(scaled(step, optimizer), variables)
    assert optimizer.mask.num_trained == 0
    for v, old in zip(variables, before, strict=True):
        new = value_of(v)
        # Ftrl's l1 may hold some of the few at zero.
        assert same_bits(new, old) if is_weight(v) else (new != old).any()


@each_way
def test_everything_frozen_at_rate_1_by_freeze_and_by_the_first_batch(way):
    x, y = blobs()
    model = compiled(dense_model(), kf.FreezeOptimizer(sgd(), freeze_rate=1.0))
    before = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=16)
    assert model.optimizer.mask.num_trained == 0
    for v, old in zip(model.trainable_variables, before, strict=True):
        assert same_bits(value_of(v), old) == is_weight(v)


GRAPH = ["momentum", "adamw", "adam_accumulation", "sgd_ema_overwrite", "muon", "multi"]


@each_way
@pytest.mark.parametrize("inner", GRAPH)
def test_a_compiled_function_gives_what_eager_steps_give(inner, way):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(INNER[inner](), freeze_rate=FREEZE_RATE)
    if way == "freeze":
        masks = expected_masks(variables).items()
        kf.freeze(model, mask={variables[i].path: m for i, m in masks}, optimizer=optimizer)

    @tf.function(jit_compile=inner in ("adamw", "muon"))
    def step(grads):
        optimizer.apply(grads, variables)

    before = values_of(variables)
    for grads in gradients():
        step([tf.constant(g) for g in grads])
    assert_frozen_bits_kept(variables, optimizer.mask, before)
    for v, expected in zip(variables, run(inner, way)[0][-1], strict=True):
        np.testing.assert_allclose(value_of(v), expected, rtol=1e-4, atol=1e-5)


@each_way
def test_freeze_optimizer_as_one_of_several(way):
    """Inside a MultiOptimizer it masks the variables it is given; the others train whole."""
    x, y = blobs()
    model = dense_model()
    frozen = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    whole = ko.Adam(0.01)
    compiled(model, ko.MultiOptimizer(ko.OptimizerMap(frozen, {".*head/.*": whole})))
    before = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=48, epochs=3)
    mask = kf.get_mask(model)
    assert mask == frozen.mask
    assert [path.split("/")[-2] for path in mask.paths] == ["body"]
    assert mask.num_trained == 12
    for v, old in zip(model.trainable_variables, before, strict=True):
        new = value_of(v)
        if "body/kernel" in v.path:
            assert same_bits(new[~mask[v]], old[~mask[v]])
            assert (new != old)[mask[v]].all()
        else:
            assert (new != old).all()


@pytest.mark.parametrize("inner", ["momentum", "adam", "muon", "multi", "schedule_free"])
def test_overwriting_a_mask_starts_moments_anew_and_keeps_iterations(inner):
    """From then on the optimizer is a new one that has counted the earlier steps."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(INNER[inner](), freeze_rate=FREEZE_RATE)
    for step in gradients()[:4]:
        optimizer.apply(scaled(step, optimizer), variables)
    masks = {v.path: value_of(v) > 0 for v in variables if is_weight(v)}
    kf.freeze(model, mask=masks, optimizer=optimizer, overwrite=True)
    assert int(optimizer.iterations) == 4
    before = values_of(variables)
    bare_variables = dense_model().trainable_variables
    bare = INNER[inner]()
    bare.build(bare_variables)
    for one in [bare, *getattr(bare, "optimizers", [])]:
        one._iterations.assign(4)
    for a, old in zip(bare_variables, before, strict=True):
        a.assign(old)
    if inner == "schedule_free":  # its averages start from the values it is built with
        for slot, old in zip(bare._momentums, before, strict=True):
            slot.assign(old)
    grads = gradients()[4]
    chosen = [masks.get(v.path, np.ones(v.shape, bool)) for v in variables]
    bare.apply(
        [tf.constant(np.where(m, g, 0).astype("f")) for m, g in zip(chosen, grads, strict=True)],
        bare_variables,
    )
    optimizer.apply(scaled(grads, optimizer), variables)
    for v, a, old, m in zip(variables, bare_variables, before, chosen, strict=True):
        np.testing.assert_allclose(value_of(v)[m], value_of(a)[m], rtol=1e-5, atol=1e-6)
        assert same_bits(value_of(v)[~m], old[~m])


@pytest.mark.parametrize("frequency", [None, 1])
def test_overwriting_a_mask_keeps_moving_averages_near_the_weights(frequency):
    """Averages that started from zero again would pull what is trained towards zero."""
    model = dense_model()
    variables = model.trainable_variables
    inner = sgd(0.01, use_ema=True, ema_momentum=0.99, ema_overwrite_frequency=frequency)
    optimizer = kf.FreezeOptimizer(inner, freeze_rate=0.5)
    optimizer.apply(scaled(gradients()[0], optimizer), variables)
    masks = {v.path: value_of(v) > 0 for v in variables if is_weight(v)}
    kf.freeze(model, mask=masks, optimizer=optimizer, overwrite=True)
    before = values_of(variables)
    optimizer.apply(scaled(gradients()[1], optimizer), variables)
    optimizer.finalize_variable_values(variables)
    for v, old in zip(variables, before, strict=True):
        np.testing.assert_allclose(value_of(v), old, atol=0.05)


def test_resetting_counts_from_zero_in_every_part_of_a_multi_optimizer():
    """`reinitialize` starts the optimizer anew, bias corrections included."""
    x, y = blobs()
    model = compiled(dense_model(), kf.FreezeOptimizer(multi_optimizer(), freeze_rate=0.5))
    fit(model, x, y, batch_size=16)
    kf.reinitialize(model)
    inner = model.optimizer.inner_optimizer
    assert [int(one.iterations) for one in [inner, *inner.optimizers]] == [0, 0, 0]


class CustomLayer(keras.layers.Layer):
    """Its variable's name says nothing."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 4), name="mixing", initializer="glorot_normal")

    def call(self, inputs):
        return keras.ops.matmul(inputs, self.w)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = kl.Dense(5, activation="tanh")
        self.second = kl.Dense(3)

    def call(self, inputs):
        return self.second(self.first(inputs))


class Lora(kl.Dense):
    def build(self, shape):
        super().build(shape)
        self.enable_lora(2, b_initializer="glorot_normal")


class SelfAttention(kl.Layer):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def call(self, inputs):
        return self.attention(inputs, inputs)


def functional(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers, kl.Flatten(), kl.Dense(3, name="last")])


def shared_layer():
    inputs = keras.Input((6,))
    shared = kl.Dense(6, activation="tanh")
    return keras.Model(inputs, kl.Dense(3)(shared(shared(inputs))))


def nested_model():
    inner = keras.Sequential([keras.Input((6,)), kl.Dense(5, activation="tanh"), kl.Dense(4)])
    return functional((6,), inner)


CONV = {"kernel_size": 2, "activation": "tanh"}
LAYERS = {
    "dense": lambda: functional((6,), kl.Dense(5, activation="tanh")),
    "einsum_dense": lambda: functional((4, 3), kl.EinsumDense("abc,cd->abd", (4, 5))),
    "conv1d": lambda: functional((6, 2), kl.Conv1D(3, **CONV)),
    "conv2d": lambda: functional((5, 5, 2), kl.Conv2D(3, **CONV)),
    "conv3d": lambda: functional((3, 3, 3, 2), kl.Conv3D(3, **CONV)),
    "conv1d_transpose": lambda: functional((4, 2), kl.Conv1DTranspose(3, **CONV)),
    "conv2d_transpose": lambda: functional((3, 3, 2), kl.Conv2DTranspose(3, **CONV)),
    "conv3d_transpose": lambda: functional((2, 2, 2, 2), kl.Conv3DTranspose(3, **CONV)),
    "depthwise_conv1d": lambda: functional((6, 2), kl.DepthwiseConv1D(**CONV)),
    "depthwise_conv2d": lambda: functional((5, 5, 2), kl.DepthwiseConv2D(**CONV)),
    "separable_conv1d": lambda: functional((6, 2), kl.SeparableConv1D(3, **CONV)),
    "separable_conv2d": lambda: functional((5, 5, 2), kl.SeparableConv2D(3, **CONV)),
    "lstm": lambda: functional((4, 3), kl.LSTM(4)),
    "gru": lambda: functional((4, 3), kl.GRU(4, return_sequences=True)),
    "simple_rnn": lambda: functional((4, 3), kl.SimpleRNN(4)),
    "conv_lstm": lambda: functional((2, 3, 3, 1), kl.ConvLSTM2D(2, 2)),
    "bidirectional": lambda: functional((4, 3), kl.Bidirectional(kl.GRU(3))),
    "attention": lambda: functional((4, 6), SelfAttention(kl.MultiHeadAttention(2, 3))),
    "grouped_attention": lambda: functional((4, 6), SelfAttention(kl.GroupQueryAttention(3, 4, 2))),
    "embedding": lambda: functional((4,), kl.Embedding(7, 3)),
    "batch_norm": lambda: functional((6,), kl.Dense(5), kl.BatchNormalization()),
    "layer_norm": lambda: functional((6,), kl.Dense(5), kl.LayerNormalization()),
    "group_norm": lambda: functional((6,), kl.Dense(6), kl.GroupNormalization(2)),
    "rms_norm": lambda: functional((6,), kl.Dense(5), kl.RMSNormalization()),
    "prelu": lambda: functional((4, 6), kl.PReLU()),
    "lora": lambda: functional((6,), Lora(5)),
    "custom_layer": lambda: functional((6,), CustomLayer()),
    "shared_layer": shared_layer,
    "nested_model": nested_model,
    "subclassed": Subclassed,
    "unbuilt": lambda: keras.Sequential([kl.Dense(5, activation="tanh"), kl.Dense(3)]),
}


def data_for(name, model):
    rng = np.random.default_rng(0)
    shape = model.input_shape[1:] if model.built else (6,)
    y = np.arange(12) % 3
    if name == "embedding":
        return rng.integers(0, 6, (12, *shape)), y  # number 6 never occurs
    return rng.normal(size=(12, *shape)).astype("float32"), y


def build_layer_model(name, run_eagerly=True):
    keras.utils.set_random_seed(3)
    model = LAYERS[name]()
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    return compiled(model, optimizer, run_eagerly=run_eagerly)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_step_of_any_layer_is_the_masked_gradient_step(layer):
    """Masks by sorting and SGD by hand, from a tape's gradients; then both ways train on."""
    model = build_layer_model(layer)
    x, y = data_for(layer, model)
    mask = kf.freeze(model, x, y)
    variables = model.trainable_variables
    start = values_of(variables)
    gradients = gradients_by_autodiff(model, x, y)

    weights = [i for i, v in enumerate(variables) if is_weight(v)]
    assert list(mask.paths) == [variables[i].path for i in weights]
    by_hand = mask_by_hand([start[i] for i in weights], [gradients[i] for i in weights], 0.75)
    for i, expected in zip(weights, by_hand, strict=True):
        assert equals_by_hand(mask[variables[i]], expected)

    fit(model, x, y, batch_size=12)
    for v, old, gradient in zip(variables, start, gradients, strict=True):
        trained = mask[v] if is_weight(v) else np.ones(old.shape, bool)
        assert same_bits(value_of(v)[~trained], old[~trained])
        expected = old - np.float32(0.1) * gradient
        np.testing.assert_allclose(value_of(v)[trained], expected[trained], rtol=1e-4, atol=1e-6)
    fit(model, x, y, batch_size=12, epochs=2)
    assert_frozen_bits_kept(variables, mask, start)
    assert_trained_moved(variables, mask, start)

    first_batch = build_layer_model(layer)
    if not first_batch.built:
        first_batch(x)
        for v, old in zip(first_batch.trainable_variables, start, strict=True):
            v.assign(old)
    fit(first_batch, x, y, batch_size=12, epochs=3)
    assert kf.get_mask(first_batch) == mask
    for a, b in zip(first_batch.trainable_variables, variables, strict=True):
        np.testing.assert_allclose(value_of(a), value_of(b), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layer", ["embedding", "gru"])
def test_layers_train_in_a_graph_too(layer):
    trained = []
    for run_eagerly, frozen_before in ((True, True), (False, True), (False, False)):
        model = build_layer_model(layer, run_eagerly)
        x, y = data_for(layer, model)
        if frozen_before:
            kf.freeze(model, x, y)
        fit(model, x, y, batch_size=12, epochs=3)
        trained.append((kf.get_mask(model), values_of(model.trainable_variables)))
    for mask, values in trained[1:]:
        assert mask == trained[0][0]
        for a, b in zip(values, trained[0][1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_embedding_rows_that_do_not_occur_do_not_move_under_momentum():
    """Their gradient is zero, and so is their score: frozen or trained, they stay."""
    model = build_layer_model("embedding")
    x, y = data_for("embedding", model)
    before = value_of(model.trainable_variables[0])
    fit(model, x, y, batch_size=12, epochs=2)
    assert same_bits(value_of(model.trainable_variables[0])[6], before[6])


def test_quantized_model_has_no_weights_to_freeze():
    model = build_layer_model("dense")
    x, y = data_for("dense", model)
    model.quantize("int8")
    compiled(model, run_eagerly=True)
    with pytest.raises(ValueError, match="no weights"):
        kf.freeze(model, x, y)


def test_quantized_layer_beside_others_is_left_alone():
    model = build_layer_model("dense")
    x, y = data_for("dense", model)
    model.layers[0].quantize("int8")
    compiled(model, run_eagerly=True)
    before = value_of(model.layers[0]._kernel)
    mask = kf.freeze(model, x, y)
    assert [path.split("/")[-2] for path in mask.paths] == ["last"]
    fit(model, x, y)
    assert np.array_equal(value_of(model.layers[0]._kernel), before)
