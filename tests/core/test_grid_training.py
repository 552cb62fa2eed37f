"""Training on a grid: the model has points of it, and the optimizer has precise values."""

import keras
import numpy as np
import pytest
from axes import OPTIMIZERS
from helpers import (
    assert_frozen_bits_kept,
    blobs,
    compiled,
    crossentropy,
    dense_model,
    fit,
    is_weight,
    same_bits,
    sgd,
    two_dense_layers,
    value_of,
    values_of,
)
from oracle import DenseByHand, SGDByHand

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)

STEP = 0.0625  # exact in a few bits
STRATEGIES = ["freeze", "first batch"]


def on_grid(model=None, strategy="freeze", inner=None, grid=STEP, x=None, y=None, **arguments):
    """A network that is about to be trained on a grid, and its values at the start."""
    model = dense_model() if model is None else model
    inner = sgd(momentum=0.9) if inner is None else inner
    settings = {"freeze_rate": 0.75, "grid": grid}
    settings.update({k: arguments.pop(k) for k in ("l2", "frozen_weights") if k in arguments})
    compiled(model, kf.FreezeOptimizer(inner, **settings), **arguments)
    if strategy == "freeze":
        x, y = blobs() if x is None else (x, y)
        kf.freeze(model, x, y)
    return model, values_of(model.variables)


def points_by_hand(values, start, step):
    """The nearest points in double precision, rounded once to the variable's precision."""
    wide = start.astype("float64")
    number = np.rint((values.astype("float64") - wide) / step)
    return (wide + number * step).astype("float32").astype(start.dtype)


def assert_on_grid(model, start, step=STEP):
    for variable, first in zip(model.variables, start, strict=True):
        if variable.trainable:
            value = value_of(variable)
            assert same_bits(value, points_by_hand(value, first, step)), variable.path


def seeded(model, distribution="xavier_normal"):
    kf.reinitialize(model, distribution, seed=7)
    return model


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("l2", [0.0, 0.01])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_follow_the_arithmetic_by_hand(strategy, l2):
    x, y = blobs()
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]
    )
    seeded(model)
    model, start = on_grid(model, strategy, sgd(0.5, momentum=0.9), l2=l2)
    first = DenseByHand(start)
    first.freeze(x, y, 0.75)
    precise = [value.astype("float64") for value in start]
    recurrences = [SGDByHand(0.9) for _ in start]
    for _ in range(4):
        points = [
            np.where(mask, points_by_hand(v, s, STEP), s)
            for v, s, mask in zip(precise, start, first.masks, strict=True)
        ]
        gradients = DenseByHand(points).gradients(x, y)
        model.train_on_batch(x, y)
        for i, gradient in enumerate(gradients):
            change = recurrences[i].change(gradient + l2 * precise[i], 0.5)
            precise[i] = precise[i] + np.where(first.masks[i], change, 0.0)
        # None of these values is so close to the middle of two points that rounding decides.
        for variable, value, s in zip(model.variables, precise, start, strict=True):
            assert same_bits(value_of(variable), points_by_hand(value, s, STEP))
    assert any((value_of(v) != s).any() for v, s in zip(model.variables, start, strict=True))


@pytest.mark.same_on_all
@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [name for name in OPTIMIZERS if name != "averaging"])
def test_every_optimizer_trains_on_the_grid_and_keeps_frozen_bits(kind, strategy, tmp_path):
    x, y = blobs()
    model, start = on_grid(seeded(dense_model()), strategy, OPTIMIZERS[kind](), x=x, y=y)
    before = values_of(model.trainable_variables)
    fit(model, x, y, epochs=3, batch_size=12)
    assert_on_grid(model, start)
    assert_frozen_bits_kept(model.trainable_variables, kf.get_mask(model), before)
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze")
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_small_gradients_add_up_although_each_is_less_than_a_step(strategy):
    x, y = blobs()
    model, start = on_grid(strategy=strategy, inner=sgd(0.01), grid=0.5)
    fit(model, x, y, epochs=1)
    assert all(same_bits(value_of(v), s) for v, s in zip(model.variables[:2], start, strict=False))
    fit(model, x, y, epochs=300, batch_size=48)
    assert_on_grid(model, start, 0.5)
    moved = [v for v, s in zip(model.variables, start, strict=True) if (value_of(v) != s).any()]
    assert {v.path.split("/")[-1] for v in moved} >= {"kernel"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_that_is_resumed_goes_on_bit_for_bit(strategy, tmp_path):
    x, y = blobs()

    def new():
        return on_grid(seeded(dense_model()), strategy, keras.optimizers.Adam(0.02))[0]

    whole = new()
    fit(whole, x, y, epochs=4, batch_size=16)
    half = new()
    fit(half, x, y, epochs=2, batch_size=16)
    half.save(tmp_path / "half.keras")
    half.save_weights(tmp_path / "half.weights.h5")
    loaded = keras.models.load_model(tmp_path / "half.keras")
    resumed_models = [loaded, half]
    if strategy == "freeze":  # Keras does not load the state of an optimizer that is not built
        resumed_models.append(new())
        resumed_models[-1].load_weights(tmp_path / "half.weights.h5")
    for resumed in resumed_models:
        fit(resumed, x, y, epochs=2, batch_size=16)
        for a, b in zip(whole.variables, resumed.variables, strict=True):
            assert same_bits(value_of(a), value_of(b)), a.path
    assert loaded.optimizer.grid == STEP


@pytest.mark.same_on_all
def test_what_someone_assigns_in_between_is_trained_on():
    x, y = blobs()
    model, start = on_grid(seeded(two_dense_layers()), inner=sgd(0.0))
    fit(model, x, y)
    mask = kf.get_mask(model)["body/kernel"]
    kernel = model.layers[0].kernel
    kernel.assign(value_of(kernel) + np.float32(0.1) * mask)
    fit(model, x, y)
    assert same_bits(value_of(kernel)[mask], points_by_hand(start[0] + 0.1, start[0], STEP)[mask])
    assert (value_of(kernel)[mask] != start[0][mask]).all()


@pytest.mark.same_on_all
@pytest.mark.parametrize("jit_compile", [False, True])
def test_xla_and_several_steps_per_execution_change_nothing(jit_compile):
    if keras.backend.backend() == "torch":
        pytest.skip("Keras on PyTorch has neither")
    x, y = blobs()
    found = []
    for steps in (1, 3):
        model, start = on_grid(
            seeded(two_dense_layers()), jit_compile=jit_compile, steps_per_execution=steps
        )
        fit(model, x, y, epochs=3, batch_size=16)
        assert_on_grid(model, start)
        found.append(values_of(model.variables))
    for a, b in zip(*found, strict=True):
        assert same_bits(a, b)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16", "float16"])
def test_every_precision_is_saved_without_loss(dtype, tmp_path):
    x, y = blobs()
    model, start = on_grid(seeded(dense_model(dtype=dtype), None), inner=sgd(0.05))
    fit(model, x, y, epochs=3, batch_size=16)
    assert_on_grid(model, start)
    kf.save(model, tmp_path / "grid.freeze")
    loaded = kf.load(tmp_path / "grid.freeze")
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


def wide(grid, path, base=None, again=None):
    """The size of the file of a network with 16 x 64 weights, some of them trained."""
    x, y = blobs(features=16)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(64, "relu", name="body"),
            keras.layers.Dense(3, name="head"),
        ]
    )
    seeded(model)
    pretrained = None
    if base is not None:
        compiled(model, keras.optimizers.Adam(0.01))
        fit(model, x, y, epochs=2)
        pretrained = keras.models.clone_model(model)
        pretrained.set_weights(model.get_weights())
    if again is not None:
        on_grid(model, grid=again[0], x=x, y=y)
        fit(model, x, y, epochs=3, batch_size=16)
        compiled(model, kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.75, grid=grid))
    else:
        on_grid(model, grid=grid, x=x, y=y)
    fit(model, x, y, epochs=3, batch_size=16)
    kf.save(model, path, base=pretrained, include_compile=False)
    loaded = kf.load(path, base=pretrained)
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path
    return path.stat().st_size


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("base", [None, "pretrained"])
def test_the_file_holds_integers(base, tmp_path):
    precise = wide(None, tmp_path / "precise.freeze", base)
    rounded = wide(0.02, tmp_path / "rounded.freeze", base)
    # About 370 trained values, of 24 bits each or more.
    assert rounded < precise - 600


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("before", [None, 0.03])
def test_the_grid_may_begin_in_the_midst_of_training(before, tmp_path):
    """With another FreezeOptimizer, which inherits the mask; and with a grid before, or none."""
    at_once = wide(0.02, tmp_path / "at_once.freeze")
    later = wide(0.02, tmp_path / "later.freeze", again=[before])
    assert later < at_once + 100


@pytest.mark.same_on_all
def test_frozen_weights_that_decay_or_are_zero_stay_so():
    x, y = blobs()
    model, start = on_grid(inner=sgd(), frozen_weights="zero")
    fit(model, x, y, epochs=2)
    kernel, mask = model.layers[0].kernel, kf.get_mask(model)["body/kernel"]
    assert not value_of(kernel)[~mask].any()
    model, start = on_grid(inner=sgd(), frozen_weights="decay", l2=0.01)
    fit(model, x, y, epochs=2)
    kernel, mask = model.layers[0].kernel, kf.get_mask(model)["body/kernel"]
    assert (np.abs(value_of(kernel)) < np.abs(start[0]))[~mask].all()
    assert same_bits(value_of(kernel)[mask], points_by_hand(value_of(kernel), start[0], STEP)[mask])


@pytest.mark.same_on_all
def test_parameters_with_a_constraint_are_not_rounded():
    x, y = blobs()
    model = two_dense_layers()
    head = keras.layers.Dense(3, kernel_constraint="non_neg", name="head")
    model = keras.Sequential([keras.Input((6,)), model.layers[0], head])
    with pytest.warns(UserWarning, match="Constraints cannot hold"):
        model, start = on_grid(model)
    fit(model, x, y, epochs=2, batch_size=16)
    value, mask = value_of(head.kernel), kf.get_mask(model)["head/kernel"]
    assert (value != points_by_hand(value, start[2], STEP))[mask].any()
    assert (value >= 0)[mask].all()
    assert not [v for v in model.variables if is_weight(v) and not np.isfinite(value_of(v)).all()]


@pytest.mark.same_on_all
def test_the_step_is_rounded_to_ten_bits_and_kept_in_the_configuration():
    optimizer = kf.FreezeOptimizer("sgd", grid=0.06)
    assert optimizer.grid == np.rint(0.06 * 2**14) / 2**14
    again = kf.FreezeOptimizer.from_config(optimizer.get_config())
    assert again.grid == optimizer.grid
    assert "grid" not in kf.FreezeOptimizer("sgd").get_config()


@pytest.mark.same_on_all
@pytest.mark.parametrize("grid", [0, -0.1, float("nan"), float("inf"), "0.1", True])
def test_steps_that_are_none_are_refused(grid):
    with pytest.raises((TypeError, ValueError), match="grid"):
        kf.FreezeOptimizer("sgd", grid=grid)


@pytest.mark.same_on_all
def test_averages_and_changes_after_the_build_are_refused():
    with pytest.raises(ValueError, match="use_ema"):
        kf.FreezeOptimizer(keras.optimizers.SGD(use_ema=True), grid=0.1)
    model, _ = on_grid()
    with pytest.raises(ValueError, match="cannot be changed"):
        model.optimizer.grid = 0.2


@pytest.mark.same_on_all
def test_a_loss_is_what_the_rounded_model_has():
    x, y = blobs()
    model, _ = on_grid(seeded(two_dense_layers()), grid=0.5, metrics=["accuracy"])
    fit(model, x, y, epochs=4, batch_size=16)
    found = keras.ops.convert_to_numpy(crossentropy()(y, model(x)))
    assert model.evaluate(x, y, batch_size=48, verbose=0)[0] == pytest.approx(found, rel=1e-5)


def stored_as_they_are(model, path, **arguments):
    """How many bytes of values a file has that are not integers; after a look at what it loads."""
    kf.save(model, path, **arguments)
    loaded = kf.load(path, base=arguments.get("base"))
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path
    return kf.storage.inspect(path).num_bytes["mantissas"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.freeze"


@pytest.mark.same_on_all
def test_reinitialized_weights_start_anew(path):
    x, y = blobs()
    model, _ = on_grid(seeded(two_dense_layers()))
    fit(model, x, y, epochs=2, batch_size=16)
    kf.reinitialize(model, "kaiming_uniform", seed=5)
    start = values_of(model.variables)
    fit(model, x, y, epochs=2, batch_size=16)
    assert_on_grid(model, start)
    assert stored_as_they_are(model, path) == 0


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_freeze_file_with_the_optimizer_resumes_bit_for_bit(strategy, path):
    x, y = blobs()
    model, _ = on_grid(seeded(two_dense_layers()), strategy)
    fit(model, x, y, epochs=2, batch_size=16)
    kf.save(model, path, include_optimizer=True)
    loaded = kf.load(path)
    for each in (model, loaded):
        fit(each, x, y, epochs=2, batch_size=16)
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


@pytest.mark.same_on_all
def test_a_loaded_model_that_trains_on_is_saved_as_integers(path, tmp_path):
    x, y = blobs()
    model, start = on_grid(seeded(two_dense_layers()))
    fit(model, x, y, epochs=2, batch_size=16)
    model.save(tmp_path / "model.keras")
    kf.save(model, path)
    for loaded in (keras.models.load_model(tmp_path / "model.keras"), kf.load(path)):
        fit(loaded, x, y, batch_size=16)
        assert_on_grid(loaded, start)
        assert stored_as_they_are(loaded, path) == 0


@pytest.mark.same_on_all
def test_a_loaded_delta_that_trains_on_is_saved_as_integers(path, tmp_path):
    x, y = blobs()
    base = compiled(seeded(two_dense_layers()), keras.optimizers.Adam(0.01))
    fit(base, x, y, epochs=2)
    base.save(tmp_path / "base.keras")
    model = keras.models.load_model(tmp_path / "base.keras", compile=False)
    on_grid(model)
    fit(model, x, y, epochs=2, batch_size=16)
    assert stored_as_they_are(model, path, base=base) == 0
    loaded = kf.load(path, base=base)
    compiled(loaded, kf.FreezeOptimizer(sgd(momentum=0.9), 0.75, grid=0.03))
    fit(loaded, x, y, epochs=2, batch_size=16)
    assert_on_grid(loaded, values_of(base.variables), loaded.optimizer.grid)
    assert stored_as_they_are(loaded, path, base=base) == 0


@pytest.mark.same_on_all
@pytest.mark.filterwarnings("ignore:The model's trainable variables:UserWarning")
def test_a_layer_that_is_no_longer_trained_does_not_mix_up_the_others(tmp_path):
    layers = [keras.layers.Dense(6, "tanh", name=name) for name in ("first", "second", "third")]
    model = seeded(keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)]))
    x, y = blobs()
    on_grid(model, inner=sgd(0.3))
    fit(model, x, y, epochs=2, batch_size=16)
    layers[0].trainable = False
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.optimizer.learning_rate = 0.0
    before = values_of(loaded.variables)
    fit(loaded, x, y, batch_size=16)
    assert all(map(same_bits, before, values_of(loaded.variables)))


@pytest.mark.same_on_all
def test_values_that_were_assigned_before_training_are_the_start():
    """Also of what has no mask, and whatever its initializer says."""
    x, y = blobs()
    model = seeded(two_dense_layers())
    head = model.layers[-1]
    head.bias.assign([0.3, -0.2, 1.1])
    head.kernel.assign(np.full((8, 3), 0.4, "float32"))
    before = values_of(model.variables)
    compiled(model, kf.FreezeOptimizer(sgd(1e-9), 0.75, grid=1.0, exclude=["head"]))
    kf.freeze(model, x, y)
    fit(model, x, y)
    assert all(map(same_bits, before, values_of(model.variables)))


@pytest.mark.same_on_all
def test_the_grid_of_the_optimizer_holds_again_after_another_one(path):
    x, y = blobs()
    model, start = on_grid(seeded(two_dense_layers()))
    fit(model, x, y, epochs=2, batch_size=16)
    kf.quantize(model, step=0.07)
    assert stored_as_they_are(model, path) == 0
    fit(model, x, y, batch_size=16)
    assert_on_grid(model, start)
    assert stored_as_they_are(model, path) == 0


@pytest.mark.same_on_all
def test_a_variable_without_a_gradient_is_on_the_grid_as_well():
    x, y = blobs()
    model, start = on_grid(seeded(two_dense_layers()))
    fit(model, x, y)
    bias = model.layers[0].bias
    bias.assign(np.linspace(0, 1, 8))
    gradients = [None if v is bias else keras.ops.zeros(v.shape) for v in model.trainable_variables]
    model.optimizer.apply(gradients, model.trainable_variables)
    assert same_bits(value_of(bias), points_by_hand(np.linspace(0, 1, 8), start[1], STEP))


@pytest.mark.same_on_all
@pytest.mark.filterwarnings("ignore:The file stores the seeds of Keras:UserWarning")
def test_a_warning_names_what_cannot_be_stored_as_integers(path):
    x, y = blobs()
    model = two_dense_layers()
    compiled(model, kf.FreezeOptimizer(sgd(), 0.75, grid=0.02, exclude=["head"]))
    kf.freeze(model, x, y)
    fit(model, x, y, epochs=3, batch_size=16)
    with pytest.warns(UserWarning, match="head/kernel.* are on a grid, but"):
        assert stored_as_they_are(model, path) > 0


@pytest.mark.same_on_all
@pytest.mark.filterwarnings("error::UserWarning")
def test_values_that_take_fewer_bits_as_they_are_give_no_warning(path):
    x, y = blobs()
    layers = [keras.layers.Dense(4, name="body"), keras.layers.Dense(1, name="head")]
    model = seeded(keras.Sequential([keras.Input((6,)), *layers]))
    on_grid(model, grid=2.0**-24, loss="mse", inner=sgd(0.01), x=x, y=y)
    fit(model, x, y, epochs=2)
    kf.save(model, path)


@pytest.mark.same_on_all
def test_weights_that_are_assigned_before_the_first_batch_are_the_start():
    x, y = blobs()
    model, _ = on_grid(seeded(two_dense_layers()), "first batch", sgd(0.0), 0.1)
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=v.shape) for v in model.variables])
    before = values_of(model.variables)
    fit(model, x, y, epochs=2, batch_size=16)
    assert all(map(same_bits, before, values_of(model.variables)))


@pytest.mark.same_on_all
def test_a_checkpoint_may_be_loaded_into_another_precision(tmp_path):
    x, y = blobs()
    model, _ = on_grid(seeded(dense_model()))
    fit(model, x, y, batch_size=16)
    model.save_weights(tmp_path / "model.weights.h5")
    other, _ = on_grid(seeded(dense_model(dtype="float16")))
    other.load_weights(tmp_path / "model.weights.h5")
    assert kf.get_mask(other) == kf.get_mask(model)
    fit(other, x, y, batch_size=16)


@pytest.mark.same_on_all
@pytest.mark.parametrize("grid", [1e-46, 1e-40, 1e39])
def test_steps_that_float32_does_not_have_are_refused(grid):
    with pytest.raises(ValueError, match="`grid` must be a float32 number"):
        kf.FreezeOptimizer("sgd", grid=grid)


@pytest.mark.same_on_all
def test_averages_are_refused_where_the_grid_is_set_later():
    model = two_dense_layers()
    optimizer = kf.FreezeOptimizer(keras.optimizers.SGD(use_ema=True))
    optimizer.grid = 0.1
    compiled(model, optimizer)
    with pytest.raises(ValueError, match="use_ema"):
        kf.freeze(model, *blobs())
    assert not optimizer.built


@pytest.mark.same_on_all
def test_scales_of_float8_layers_are_measured_and_not_rounded():
    x, y = blobs()
    found = []
    for grid in (None, 1e-6):
        model = seeded(two_dense_layers())
        model.quantize("float8")
        on_grid(model, "first batch", sgd(1e-9), grid)  # in a tape of its own, Keras's layer fails
        fit(model, x, y, epochs=2)
        scales = [v for v in model.variables if getattr(v, "overwrite_with_gradient", False)]
        assert scales
        found.append(values_of(scales))
    for without, with_grid in zip(*found, strict=True):
        np.testing.assert_allclose(without, with_grid, rtol=1e-3)


@pytest.mark.same_on_all
def test_adafactor_warns_of_rows_and_columns_that_are_frozen():
    x, y = blobs()
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(40), keras.layers.Dense(3)])
    compiled(model, kf.FreezeOptimizer(keras.optimizers.Adafactor(0.01), 0.97))
    with pytest.warns(UserWarning, match="epsilon_1=1e-18"):
        kf.freeze(model, x, y)
    inner = keras.optimizers.Adafactor(0.01, epsilon_1=1e-18)
    compiled(model, kf.FreezeOptimizer(inner, 0.97))
    kf.freeze(model, x, y, overwrite=True)
    fit(model, x, y, epochs=3)
    assert all(np.isfinite(value).all() for value in values_of(model.variables))
