"""Small floats, constraints, NaN, ties and other numbers that go wrong quietly."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    bits,
    blobs,
    compiled,
    crossentropy,
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
from oracle import brute_force_mask

import keras_freeze as kf
from keras_freeze.masks.mask import MaskEntry

pytestmark = pytest.mark.cases(1)

each_way = pytest.mark.parametrize("way", ["freeze", "first_batch"])


def quarter(variables):
    """A mask by path that trains every fourth entry of each weight."""
    return {
        v.path: (np.arange(v.value.shape.num_elements()) % 4 == 0).reshape(v.shape)
        for v in variables
        if is_weight(v)
    }


def step_of(optimizer, variables, mode="eager"):
    """A function that applies gradients eagerly, in a graph, or in one that XLA compiles."""

    def step(grads):
        optimizer.apply(grads, variables)

    return step if mode == "eager" else tf.function(step, jit_compile=mode == "jit")


def random_gradients(variables, seed=0):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=v.shape), v.dtype) for v in variables]


# Precision


@each_way
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_small_floats_freeze_the_least_salient_in_float32(dtype, way):
    x, y = blobs()
    model = compiled(dense_model(dtype=dtype))
    scaled = isinstance(model.optimizer, ko.LossScaleOptimizer)
    assert scaled == (dtype == "mixed_float16")
    start = values_of(model.trainable_variables)
    gradients = gradients_by_autodiff(model, x, y)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=48, epochs=3)

    mask, variables = kf.get_mask(model), model.trainable_variables
    assert_frozen_bits_kept(variables, mask, start)
    assert_trained_moved(variables, mask, start)
    assert int(model.optimizer.iterations) == 3
    for v, old in zip(variables, start, strict=True):
        assert value_of(v).dtype == old.dtype
    # In few bits, neighbours in the order of saliency may change places.
    weights = [i for i, v in enumerate(variables) if is_weight(v)]
    assert mask.num_trained == 72 // 4
    scores = [np.abs(start[i].astype("f") * gradients[i].astype("f")).ravel() for i in weights]
    scores = np.concatenate(scores)
    trained = np.concatenate([mask[variables[i]].ravel() for i in weights])
    assert scores[trained].min() > 0.9 * scores[~trained].max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_saliency_of_small_floats_does_not_underflow(dtype):
    """Products below what float16 holds still have an order."""
    model = keras.Sequential([keras.Input((4,)), kl.Dense(1, use_bias=False, dtype=dtype)])
    kernel = model.trainable_variables[0]
    kernel.assign(np.array([[1e-3], [2e-3], [3e-3], [4e-3]]))
    optimizer = kf.FreezeOptimizer(sgd(0.0), freeze_rate=0.5)
    step_of(optimizer, [kernel])([tf.constant([[2e-5], [4e-5], [1e-5], [1e-5]], kernel.dtype)])
    np.testing.assert_array_equal(optimizer.mask[kernel].ravel(), [False, True, False, True])
    scores = kf.compute_saliency(compiled(model, loss="mse"), np.ones((2, 4)), np.ones((2, 1)))
    assert all(s.dtype == np.float32 for s in scores.values())


@each_way
def test_loss_scale_of_the_inner_optimizer_does_not_change_the_result(way):
    x, y = blobs()
    trained = []
    for factor in (None, 64.0):
        inner = sgd(momentum=0.9, loss_scale_factor=factor)
        model = compiled(dense_model(), kf.FreezeOptimizer(inner, 0.75, l2=0.1), run_eagerly=True)
        if way == "freeze":
            kf.freeze(model, x, y)
        fit(model, x, y, batch_size=16)
        trained.append((kf.get_mask(model), values_of(model.trainable_variables)))
    assert trained[0][0] == trained[1][0]
    for a, b in zip(trained[0][1], trained[1][1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["freeze", "first_batch", "first_batch_scaled_outside"])
def test_a_criterion_of_ones_own_sees_gradients_without_the_loss_scale(way):
    """Gradients scaled up would outweigh the weights in this one, and change the mask."""
    x, y = blobs()
    inner = sgd(loss_scale_factor=None if way == "first_batch_scaled_outside" else 1024.0)
    optimizer = kf.FreezeOptimizer(
        inner, freeze_rate=0.75, criterion=lambda w, g: keras.ops.abs(g) + keras.ops.abs(w)
    )
    scaled = ko.LossScaleOptimizer(optimizer) if "outside" in way else optimizer
    model = compiled(dense_model(), scaled, run_eagerly=True)
    weights = [i for i, v in enumerate(model.trainable_variables) if is_weight(v)]
    start, gradients = values_of(model.trainable_variables), gradients_by_autodiff(model, x, y)
    scores = [np.abs(start[i]) + np.abs(gradients[i]) for i in weights]
    by_hand = mask_by_hand(scores, [np.ones_like(s) for s in scores], 0.75)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=48)
    for i, expected in zip(weights, by_hand, strict=True):
        assert np.array_equal(kf.get_mask(model)[model.trainable_variables[i]], expected)


@each_way
def test_a_step_that_overflows_in_float16_is_left_out_and_decides_nothing(way):
    """The loss scale is halved instead; the mask comes from the first step that is finite."""
    model = dense_model(dtype="mixed_float16")
    variables = model.trainable_variables
    inner = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    optimizer = ko.LossScaleOptimizer(inner, initial_scale=4.0)
    if way == "freeze":
        kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    before = values_of(variables)
    step = step_of(optimizer, variables, "graph")
    gradients = random_gradients(variables)
    step([gradients[0] * np.inf, *gradients[1:]])
    assert all(same_bits(value_of(v), b) for v, b in zip(variables, before, strict=True))
    assert (inner.mask is None) == (way == "first_batch")
    assert int(optimizer.iterations) == 0
    step(gradients)
    assert float(optimizer.dynamic_scale) == 2.0
    assert int(optimizer.iterations) == 1
    assert_frozen_bits_kept(variables, inner.mask, before)
    for v, old, gradient in zip(variables, before, gradients, strict=True):
        trained = inner.mask[v] if is_weight(v) else np.ones(v.shape, bool)
        expected = old - 0.1 * gradient.numpy() / 2.0
        np.testing.assert_allclose(value_of(v)[trained], expected[trained], rtol=1e-5, atol=1e-6)


def test_mixed_precision_with_moving_averages_trains_two_epochs():
    """keras#17225, keras#20878."""
    x, y = blobs()
    inner = ko.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    model = compiled(dense_model(dtype="mixed_float16"), kf.FreezeOptimizer(inner, 0.75))
    start = values_of(model.trainable_variables)
    fit(model, x, y, batch_size=16, epochs=2)
    assert int(model.optimizer.iterations) == 6
    mask = kf.get_mask(model)
    assert_frozen_bits_kept(model.trainable_variables, mask, start)
    assert_trained_moved(model.trainable_variables, mask, start)


@each_way
def test_decay_follows_its_recurrence_over_many_steps(way):
    """One step shrinks by little; hundreds of roundings must not add up."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(
        sgd(0.1), freeze_rate=0.75, l2=5e-3, frozen_weights="decay", criterion="magnitude"
    )
    if way == "freeze":
        compiled(model, optimizer)
        kf.freeze(model, *blobs())
    start = values_of(variables)
    step = step_of(optimizer, variables, "graph")
    for _ in range(300):
        step([tf.zeros(v.shape) for v in variables])
    for v, old in zip(variables, start, strict=True):
        if is_weight(v):
            expected = (1 - 0.1 * 5e-3) ** 300 * old.astype("float64")
            np.testing.assert_allclose(value_of(v), expected, rtol=1e-4)


@each_way
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decay_is_refused_where_floats_are_too_short_for_it(dtype, way):
    """1 - 5e-5 is 1 in float16: frozen weights would not decay, or by what rounding makes of it."""
    model = dense_model(dtype=dtype)
    optimizer = kf.FreezeOptimizer(sgd(0.1), 0.75, l2=5e-4, frozen_weights="decay")
    compiled(model, optimizer, run_eagerly=True)
    with pytest.raises(ValueError, match="float32"):
        kf.freeze(model, *blobs()) if way == "freeze" else fit(model, *blobs())


# Frozen entries


SPECIAL_BITS = {
    # -0.0, three NaNs with a payload, one of them signalling, two denormals, two infinities
    np.dtype("float32"): "80000000 7fc12345 ffc00001 7f800001 00000001 807fffff 7f800000 ff800000",
    np.dtype("float16"): "8000 7e55 fe01 7c01 0001 83ff 7c00 fc00",
    np.dtype(ml_dtypes.bfloat16): "8000 7fc5 ffc1 7f81 0001 807f 7f80 ff80",
}


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
@pytest.mark.parametrize("use_ema", [False, True], ids=["compact", "full_shape"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_unusual_bits_of_frozen_weights_survive(dtype, use_ema, mode):
    kernel = keras.Variable(np.ones((8, 2)), dtype=dtype, name="kernel")
    words = [int(word, 16) for word in SPECIAL_BITS[value_of(kernel).dtype].split()]
    start = value_of(kernel)
    bits(start)[:, 0] = words
    kernel.assign(start)
    assert same_bits(value_of(kernel), start)
    optimizer = kf.FreezeOptimizer(sgd(use_ema=use_ema), l2=0.1)
    trained = np.array([[False, True]] * 8)
    optimizer.set_mask(kf.FreezeMask([MaskEntry(0, "kernel", trained)], [kernel]), [kernel])
    step = step_of(optimizer, [kernel], mode)
    for _ in range(2):
        step([tf.ones((8, 2), dtype)])
    assert same_bits(value_of(kernel)[:, 0], start[:, 0])
    assert (value_of(kernel)[:, 1] < 1.0).all()


@each_way
def test_nan_in_a_gradient_stays_where_something_is_trained(way):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(ko.Adam(0.1, global_clipnorm=1.0), freeze_rate=0.75)
    gradients = random_gradients(variables)
    if way == "freeze":
        kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    else:
        optimizer.apply(gradients, variables)
    mask, before = optimizer.mask, values_of(variables)
    only_frozen = [
        tf.where(mask[v], g, np.nan) if is_weight(v) else g
        for v, g in zip(variables, gradients, strict=True)
    ]
    optimizer.apply(only_frozen, variables)
    assert all(np.isfinite(value_of(v)).all() for v in variables)
    assert_frozen_bits_kept(variables, mask, before)
    assert_trained_moved(variables, mask, before)
    optimizer.apply([g * np.nan for g in gradients], variables)
    assert_frozen_bits_kept(variables, mask, before)
    assert np.isnan(value_of(variables[0])[mask[variables[0]]]).all()


def constrained_model(constraint):
    keras.utils.set_random_seed(0)
    first = kl.Dense(8, kernel_constraint=constraint, bias_constraint="non_neg")
    return keras.Sequential([keras.Input((6,)), first, kl.Dense(3)])


CONSTRAINTS = {
    "max_norm": keras.constraints.MaxNorm(0.7),
    "non_neg": keras.constraints.NonNeg(),
    "unit_norm": keras.constraints.UnitNorm(),
}
CONSTRAINED_INNER = {
    "momentum": lambda: sgd(0.3, momentum=0.9),
    "adamw": lambda: ko.AdamW(0.1, weight_decay=0.5),
    "ftrl": lambda: ko.Ftrl(0.3),
}


@pytest.mark.parametrize("inner", CONSTRAINED_INNER)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_constraints_see_the_whole_kernel_and_move_only_what_is_trained(constraint, inner):
    """Ours against the bare optimizer on vectors by hand: constrain the kernel, keep the frozen."""
    function = CONSTRAINTS[constraint]
    weights = [value_of(v) for v in constrained_model(None).trainable_variables]
    gradients = random_gradients(constrained_model(None).trainable_variables)
    chosen = mask_by_hand(weights[::2], [g.numpy() for g in gradients[::2]], 0.75)[0]

    vector = keras.Variable(weights[0][chosen])
    bare = CONSTRAINED_INNER[inner]()
    expected = weights[0].copy()
    for _ in range(4):
        vector.assign(expected[chosen])
        bare.apply([tf.boolean_mask(gradients[0], chosen)], [vector])
        expected[chosen] = value_of(vector)
        expected = np.where(chosen, np.array(function(tf.constant(expected))), expected)

    for way in ("freeze", "first_batch"):
        model = constrained_model(function)
        variables = model.trainable_variables
        optimizer = kf.FreezeOptimizer(CONSTRAINED_INNER[inner](), freeze_rate=0.75)
        if way == "freeze":
            masks = mask_by_hand(weights[::2], [g.numpy() for g in gradients[::2]], 0.75)
            paths = [v.path for v in variables[::2]]
            kf.freeze(model, mask=dict(zip(paths, masks, strict=True)), optimizer=optimizer)
        for _ in range(4):
            optimizer.apply(gradients, variables)
        assert np.array_equal(optimizer.mask[variables[0]], chosen)
        found = value_of(variables[0])
        assert same_bits(found[~chosen], weights[0][~chosen])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=way)
        assert (value_of(variables[1]) >= 0).all()


# Scores


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_saliency_that_is_not_finite_is_refused_by_freeze(value):
    x, y = blobs()
    model = compiled(dense_model(), run_eagerly=True)
    kernel = value_of(model.layers[0].kernel)
    kernel[0, 0] = value
    model.layers[0].kernel.assign(kernel)
    before = [value_of(v) for v in model.variables]
    with pytest.raises(ValueError, match=r"NaN|finite"):
        kf.freeze(model, x, y)
    with pytest.raises(ValueError, match="body/kernel"):
        fit(model, x, y)
    assert kf.get_mask(model) is None
    assert all(
        same_bits(value_of(v), old)
        for v, old in zip(model.variables, before, strict=True)
        if v.dtype == "float32" and "moving" not in v.path
    )


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
@pytest.mark.parametrize("frozen_weights", ["keep", "zero"])
def test_nan_in_the_first_gradient_leaves_weights_and_optimizer_alone(mode, frozen_weights):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75, frozen_weights=frozen_weights)
    optimizer.build(variables)
    before = values_of(variables)
    gradients = random_gradients(variables)
    step = step_of(optimizer, variables, mode)
    wrong = [*gradients[:4], gradients[4] + np.nan, gradients[5]]
    if mode == "jit":  # XLA has no way to raise
        step(wrong)
    else:
        with pytest.raises(
            ValueError if mode == "eager" else tf.errors.InvalidArgumentError, match="head/kernel"
        ):
            step(wrong)
    assert all(same_bits(value_of(v), old) for v, old in zip(variables, before, strict=True))
    assert optimizer.mask is None
    assert int(optimizer.iterations) == 0
    step(gradients)
    assert optimizer.mask.num_trained == 18


SCORES = {
    "all_equal": lambda w, g: keras.ops.ones_like(w),
    "zeros_of_both_signs": lambda w, g: 0.0 * keras.ops.sign(w),
    "equal_and_negative": lambda w, g: -keras.ops.ones_like(w),
    "few_values": lambda w, g: keras.ops.round(2.0 * w),
}


@pytest.mark.parametrize("mode", ["freeze", "eager", "graph", "jit"])
@pytest.mark.parametrize("scores", SCORES)
def test_ties_are_broken_by_position_everywhere(scores, mode):
    model = dense_model()
    variables = model.trainable_variables
    start = [value_of(v) for v in variables if is_weight(v)]
    optimizer = kf.FreezeOptimizer(sgd(0.0), freeze_rate=0.25, criterion=SCORES[scores])
    if mode == "freeze":
        kf.freeze(model, *blobs(), loss=crossentropy(), optimizer=optimizer)
    else:
        step_of(optimizer, variables, mode)(random_gradients(variables))
    values = [np.array(SCORES[scores](w, w)) for w in start]
    expected = brute_force_mask(values, sum(v.size for v in values) * 3 // 4)
    for entry, trained in zip(optimizer.mask.entries, expected, strict=True):
        assert np.array_equal(entry.trained, trained)


@each_way
@pytest.mark.parametrize("jit_compile", [False, True])
def test_inputs_that_are_always_zero_do_not_take_all_the_weights(way, jit_compile):
    """Their scores are exactly 0, like a border pixel's; k is kept all the same."""
    x, y = blobs()
    x[:, :5] = 0.0
    model = compiled(dense_model(), kf.FreezeOptimizer(sgd(), 0.25), jit_compile=jit_compile)
    start = values_of(model.trainable_variables)
    weights = [i for i, v in enumerate(model.trainable_variables) if is_weight(v)]
    gradients = gradients_by_autodiff(model, x, y)
    by_hand = mask_by_hand([start[i] for i in weights], [gradients[i] for i in weights], 0.25)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=48)
    mask = kf.get_mask(model)
    assert mask.num_trained == 54
    assert (gradients[0][:5] == 0).all()
    for i, expected in zip(weights, by_hand, strict=True):
        assert equals_by_hand(mask[model.trainable_variables[i]], expected)


# Parts of a network


def test_gradients_without_variables_reach_the_weights():
    """keras#21706."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    optimizer.build(variables)
    before = values_of(variables)
    optimizer.apply([tf.ones(v.shape) for v in variables])
    assert_frozen_bits_kept(variables, optimizer.mask, before)
    for v, old in zip(variables, before, strict=True):
        trained = optimizer.mask[v] if is_weight(v) else np.ones(v.shape, bool)
        np.testing.assert_allclose(value_of(v)[trained], old[trained] - 0.1, rtol=1e-5, atol=1e-7)


def test_gradients_without_variables_need_an_optimizer_that_is_built():
    with pytest.raises(ValueError, match="build"):
        kf.FreezeOptimizer(sgd()).apply([tf.ones((2, 2))])


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("decided", ["by_freeze", "by_the_first_batch"])
def test_a_step_may_update_some_of_the_variables(decided, mode):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.75)
    if decided == "by_freeze":
        kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    else:
        optimizer.apply([tf.ones(v.shape) for v in variables], variables)
    before = values_of(variables)
    step_of(optimizer, variables[:2], mode)([tf.ones(v.shape) for v in variables[:2]])
    assert_frozen_bits_kept(variables, optimizer.mask, before)
    moved = [(value_of(v) != old).any() for v, old in zip(variables, before, strict=True)]
    assert moved == [True, True, False, False, False, False]


def test_the_first_batch_must_bring_all_weights():
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="head/kernel"):
        optimizer.apply([tf.ones(v.shape) for v in variables[:2]], variables[:2])
    assert optimizer.mask is None


@pytest.mark.parametrize("frequency", [None, 1, 2])
def test_averages_stay_exact_when_a_step_updates_some_of_the_variables(frequency):
    """Keras averages, and overwrites, all variables whatever the step was given."""
    model = dense_model()
    variables = model.trainable_variables
    inner = sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=frequency)
    optimizer = kf.FreezeOptimizer(inner, freeze_rate=0.75)
    kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    before = values_of(variables)
    for _ in range(5):
        optimizer.apply([tf.ones(v.shape) for v in variables[:2]], variables[:2])
        assert_frozen_bits_kept(variables, optimizer.mask, before)
    optimizer.finalize_variable_values(variables)
    assert_frozen_bits_kept(variables, optimizer.mask, before)


def test_decay_of_a_step_on_some_of_the_variables_keeps_one_factor_for_all():
    """save relies on w = a * w_0 with one a: such a step is refused, or reaches every weight."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75, l2=0.5, frozen_weights="decay")
    kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    before = values_of(variables)
    try:
        optimizer.apply([tf.ones(v.shape) for v in variables[:2]], variables[:2])
        factor = 1 - 0.1 * 0.5
    except ValueError:
        factor = 1.0
    for v, old in zip(variables, before, strict=True):
        if is_weight(v):
            frozen = ~optimizer.mask[v]
            np.testing.assert_allclose(value_of(v)[frozen], factor * old[frozen], rtol=1e-6)


@each_way
def test_a_layer_that_the_loss_does_not_reach_scores_zero_and_stays(way):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    reached = kl.Dense(3, name="reached")(kl.Dense(5, activation="tanh", name="first")(inputs))
    apart = kl.Dense(2, name="apart")(inputs)
    model = keras.Model(inputs, [reached, apart])
    x, y = blobs()
    compiled(
        model,
        kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.5, l2=0.1),
        loss=[crossentropy(), None],
        run_eagerly=True,
    )
    start = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x, y)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        model.fit(x, y, batch_size=16, verbose=0)
    mask = kf.get_mask(model)
    assert mask["apart/kernel"].sum() == mask.num_rescued == 1
    for v, old in zip(model.trainable_variables, start, strict=True):
        assert same_bits(value_of(v), old) == ("apart" in v.path)
    assert_frozen_bits_kept(model.trainable_variables, mask, start)


@each_way
def test_excluded_variables_train_whole_and_leave_the_others_their_share(way):
    x, y = blobs()
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75, exclude="head")
    model = compiled(dense_model(), optimizer, run_eagerly=True)
    start = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y)
    mask = kf.get_mask(model)
    assert (mask.num_weights, mask.num_trained) == (48, 12)
    assert (value_of(model.layers[-1].kernel) != start[4]).all()


@each_way
@pytest.mark.parametrize("by", ["var_list", "var_names"])
def test_what_is_excluded_from_weight_decay_is_not_decayed(by, way):
    """With zero gradients the decay is all that moves trained entries."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(
        ko.AdamW(0.1, weight_decay=0.5), freeze_rate=0.75, criterion="magnitude"
    )
    body, head = variables[0], variables[4]
    if by == "var_list":
        optimizer.exclude_from_weight_decay(var_list=[body])
    else:
        optimizer.exclude_from_weight_decay(var_names=["bias|gamma"])
    if way == "freeze":
        kf.freeze(model, *blobs(), loss=crossentropy(), optimizer=optimizer)
    before = values_of(variables)
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    for v, old in zip(variables, before, strict=True):
        excluded = v is body if by == "var_list" else v.name in ("bias", "gamma")
        trained = optimizer.mask[v] if is_weight(v) else np.ones(v.shape, bool)
        expected = old if excluded else np.where(trained, old * (1 - 0.05), old)
        np.testing.assert_allclose(value_of(v), expected, rtol=1e-6)
    assert head.name == "kernel"
    assert_frozen_bits_kept(variables, optimizer.mask, before)


@each_way
@pytest.mark.parametrize("use_bias", [False, True])
def test_steps_are_counted_even_where_nothing_is_trained(way, use_bias):
    """Schedules and callbacks go by the count."""
    model = keras.Sequential([keras.Input((6,)), kl.Dense(3, use_bias=use_bias)])
    compiled(model, kf.FreezeOptimizer(sgd(), freeze_rate=1.0), run_eagerly=True)
    x, y = blobs()
    before = value_of(model.trainable_variables[0])
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=16)
    assert same_bits(value_of(model.trainable_variables[0]), before)
    assert int(model.optimizer.iterations) == 3


# Moving averages


NESTINGS = {
    "alone": lambda inner: kf.FreezeOptimizer(inner, freeze_rate=0.75),
    "in_loss_scaling": lambda inner: ko.LossScaleOptimizer(kf.FreezeOptimizer(inner, 0.75)),
    "in_multi": lambda inner: ko.MultiOptimizer(
        ko.OptimizerMap(kf.FreezeOptimizer(inner, freeze_rate=0.75))
    ),
    "around_multi": lambda inner: kf.FreezeOptimizer(
        ko.MultiOptimizer(ko.OptimizerMap(inner)), freeze_rate=0.75
    ),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_swapped_averages_are_evaluated_and_leave_frozen_bits(nesting):
    """keras#22959: evaluation sees the averages of trained weights, training goes on without."""
    x, y = blobs()
    inner = sgd(0.5, use_ema=True, ema_momentum=0.5)
    model = compiled(dense_model(), NESTINGS[nesting](inner))
    start = values_of(model.trainable_variables)
    kf.freeze(model, x, y)
    variables, mask = model.trainable_variables, kf.get_mask(model)
    averages, raw, evaluated = [None], [], []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raw.append(values_of(variables))
            averages.append(
                raw[-1]
                if averages[-1] is None
                else [0.5 * a + 0.5 * b for a, b in zip(averages[-1], raw[-1], strict=True)]
            )

        def on_test_begin(self, logs=None):
            evaluated.append(values_of(variables))

    callbacks = [keras.callbacks.SwapEMAWeights(), Watch()]
    fit(model, x, y, batch_size=16, epochs=2, callbacks=callbacks, validation_data=(x, y))
    assert len(evaluated) == 2
    for found, step in zip(evaluated, (3, 6), strict=True):
        assert_frozen_bits_kept_in(found, variables, mask, start)
        for a, b, last in zip(found, averages[step], raw[step - 1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            assert not np.allclose(a, last, rtol=1e-4, atol=1e-5)
    assert_frozen_bits_kept(variables, mask, start)
    for v, average in zip(variables, averages[-1], strict=True):
        np.testing.assert_allclose(value_of(v), average, rtol=1e-4, atol=1e-5)


def assert_frozen_bits_kept_in(values, variables, mask, start):
    for value, v, old in zip(values, variables, start, strict=True):
        if is_weight(v):
            assert same_bits(value[~mask[v]], old[~mask[v]])


@pytest.mark.parametrize("do", ["prune", "zero"])
def test_pruned_weights_are_zero_in_the_averages_too(do):
    """Or the next swap, or the end of `fit`, would bring the old ones back."""
    x, y = blobs()
    optimizer = kf.FreezeOptimizer(
        sgd(use_ema=True), 0.75, frozen_weights="zero" if do == "zero" else "keep"
    )
    model = compiled(dense_model(), optimizer, run_eagerly=True)
    kf.freeze(model, x, y)
    if do == "prune":
        fit(model, x, y)
        kf.prune(model)
    variables, mask = model.trainable_variables, kf.get_mask(model)
    swap = keras.callbacks.SwapEMAWeights()
    seen = []
    watch = keras.callbacks.LambdaCallback()
    watch.on_test_begin = lambda logs=None: seen.append(values_of(variables))
    if do == "zero":
        fit(model, x, y)
    model.evaluate(x, y, verbose=0, callbacks=[swap, watch])
    optimizer.finalize_variable_values(variables)
    for values in (*seen, values_of(variables)):
        for v, value in zip(variables, values, strict=True):
            assert not is_weight(v) or (value[~mask[v]] == 0).all()
    assert len(seen) == 1
