"""Quantized models: on a grid, saved without loss, and as good as the tolerance says."""

import itertools
import re

import keras
import numpy as np
import pytest
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
    value_of,
    values_of,
)
from hypothesis import example, given
from hypothesis import strategies as st

import keras_freeze as kf
from keras_freeze import quantization
from keras_freeze.storage.container import read_container

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


def trained(model=None, distribution="xavier_normal", steps=3, **arguments):
    """A network after some epochs, and what its variables were at the start."""
    model = dense_model() if model is None else model
    if distribution is not None:
        kf.reinitialize(model, distribution, seed=7)
    inner = sgd(momentum=0.9)
    compiled(model, kf.FreezeOptimizer(inner, **{"freeze_rate": 0.75, **arguments}))
    start = values_of(model.variables)
    kf.freeze(model, *blobs())
    fit(model, *blobs(), epochs=steps, batch_size=8)
    return model, start


def rounded_by_hand(value, start, step):
    """The nearest point of the grid, in double precision, rounded once."""
    wide, wide_start = value.astype("float64"), start.astype("float64")
    number = np.rint((wide - wide_start) / step)
    return (wide_start + number * step).astype("float32").astype(value.dtype)


def assert_saved_without_loss(model, path, **arguments):
    kf.save(model, path, **arguments)
    loaded = kf.load(path, base=arguments.get("base"))
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path
    return loaded


def size_of(model, path, **arguments):
    kf.save(model, path, **arguments)
    return path.stat().st_size


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("step", [0.3, 1.25e-3])
def test_trained_values_are_the_nearest_points_and_all_others_what_they_were(step, tmp_path):
    model, start = trained()
    before, mask = values_of(model.variables), kf.get_mask(model)
    report = kf.quantize(model, step=step)
    assert_frozen_bits_kept(model.variables, mask, before)
    for variable, old, first in zip(model.variables, before, start, strict=True):
        expected = old
        if variable.trainable:
            moved = mask[variable] if is_weight(variable) else np.ones(old.shape, bool)
            expected = np.where(moved, rounded_by_hand(old, first, step), old)
        assert same_bits(value_of(variable), expected), variable.path
    assert {row.step for row in report.rows} == {step}
    assert report.num_values == kf.report(model).num_trained_parameters
    assert_saved_without_loss(model, tmp_path / "model.freeze")


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("tolerance", [1e-5, 0.01, 0.5])
@pytest.mark.parametrize("data", ["new", "wrong labels"])
def test_the_loss_changes_by_the_tolerance_at_most(data, tolerance, tmp_path):
    model, _ = trained(steps=20)
    x, y = blobs(seed=1)
    if data == "wrong labels":  # on which the loss is the lower, the less the network has learned
        y = (y + 1) % 3
    loss = model.evaluate(x, y, verbose=0)
    report = kf.quantize(model, x, y, tolerance=tolerance)
    assert np.isclose(report.before["loss"], loss)
    assert np.isclose(report.after["loss"], model.evaluate(x, y, verbose=0))
    assert abs(report.after["loss"] - report.before["loss"]) <= tolerance * abs(loss)
    assert_saved_without_loss(model, tmp_path / "model.freeze")


@pytest.mark.same_on_all
def test_more_tolerance_takes_fewer_bits_and_the_file_shrinks(tmp_path):
    sizes, bits = [], []
    for tolerance in (None, 1e-4, 1e-2, 1.0):
        model, _ = trained()
        if tolerance is not None:
            report = kf.quantize(model, *blobs(), tolerance=tolerance)
            bits.append(report.bits_per_value)
            assert f"{report.bits_per_value:.2f} bits" in str(report)
        sizes.append(size_of(model, tmp_path / "model.freeze"))
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < bits[0] < 32
    assert sizes[0] > sizes[-1]


@pytest.mark.same_on_all
def test_a_quantized_model_is_on_its_grid_already():
    model, _ = trained()
    kf.quantize(model, step=0.05)
    before = values_of(model.variables)
    kf.quantize(model, step=0.05)
    assert all(map(same_bits, before, values_of(model.variables)))


@pytest.mark.same_on_all
def test_what_was_loaded_is_saved_on_its_grid_again(tmp_path):
    model, _ = trained()
    kf.quantize(model, step=0.05)
    loaded = assert_saved_without_loss(model, tmp_path / "a.freeze")
    assert_saved_without_loss(loaded, tmp_path / "b.freeze")
    first, second = (kf.storage.inspect(tmp_path / f"{name}.freeze") for name in "ab")
    assert first.num_bytes["exponents"] == second.num_bytes["exponents"]
    assert [row.source for row in first.rows] == [row.source for row in second.rows]
    assert "on a grid of 0.05" in str(second)


@pytest.mark.same_on_all
def test_training_that_goes_on_is_saved_as_it_is(tmp_path):
    model, _ = trained()
    quantized = size_of(model, tmp_path / "model.freeze", values=kf.storage.Grid(0.1))
    kf.quantize(model, step=0.1)
    fit(model, *blobs(), batch_size=8)
    assert_saved_without_loss(model, tmp_path / "model.freeze")
    assert (tmp_path / "model.freeze").stat().st_size > quantized


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("step", [0.125, 0.0625])
def test_a_step_is_the_same_in_quantize_and_in_save(step, tmp_path):
    model, _ = trained()
    kf.save(model, tmp_path / "model.freeze", values=kf.storage.Grid(step))
    kf.quantize(model, step=step)
    loaded = kf.load(tmp_path / "model.freeze")
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_file_does_not_grow_by_a_very_fine_grid(dtype, tmp_path):
    model, _ = trained(dense_model(dtype=dtype))
    before = size_of(model, tmp_path / "model.freeze")
    kf.quantize(model, step=1e-7)
    assert_saved_without_loss(model, tmp_path / "model.freeze")
    assert (tmp_path / "model.freeze").stat().st_size <= before + 16


@pytest.mark.same_on_all
def test_frozen_weights_that_decay_keep_their_bits():
    model, _ = trained(**TREATMENTS["decay"])
    before, mask = values_of(model.variables), kf.get_mask(model)
    kf.quantize(model, step=0.05)
    assert_frozen_bits_kept(model.variables, mask, before)


@pytest.mark.same_on_all
def test_a_grid_rounds_what_is_saved_and_not_the_model(tmp_path):
    model, _ = trained()
    before = values_of(model.variables)
    kf.save(model, tmp_path / "model.freeze", values=kf.storage.Grid(0.1))
    assert all(map(same_bits, before, values_of(model.variables)))
    kf.quantize(model, step=0.1)
    loaded = kf.load(tmp_path / "model.freeze")
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("per_value", [1.5, 3, 6])
def test_a_size_chooses_the_finest_step_that_fits_into_it(per_value, tmp_path):
    layers = [keras.Input((6,)), keras.layers.Dense(300, "relu"), keras.layers.Dense(3)]
    model, _ = trained(keras.Sequential(layers))
    path, num_values = tmp_path / "model.freeze", kf.report(model).num_trained_parameters
    kf.save(model, path, values=kf.storage.Bits(per_value))
    size = 8 * kf.storage.inspect(path).num_bytes["exponents"]
    (step,) = {entry["grid"] for entry in read_container(path).header["variables"]}
    assert size <= per_value * num_values + 64  # the coder writes whole words
    kf.save(model, path, values=kf.storage.Grid(step / 2**0.5))
    assert 8 * kf.storage.inspect(path).num_bytes["exponents"] > per_value * num_values


@pytest.mark.same_on_all
def test_a_size_that_is_too_small_takes_the_coarsest_step(tmp_path):
    model, _ = trained()
    kf.save(model, tmp_path / "model.freeze", values=kf.storage.Bits(0.001))
    start = kf.get_mask(model)
    loaded = kf.load(tmp_path / "model.freeze")
    assert kf.get_mask(loaded) == start


TREATMENTS = {
    "keep": {},
    "zero": {"frozen_weights": "zero"},
    "decay": {"frozen_weights": "decay", "l2": 1e-2},
    "all trained": {"freeze_rate": 0.0},
}


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("name", TREATMENTS)
def test_every_treatment_is_saved_without_loss(name, tmp_path):
    model = dense_model()
    kf.reinitialize(model, "xavier_normal", seed=7)
    optimizer = kf.FreezeOptimizer(sgd(), **{"freeze_rate": 0.75, **TREATMENTS[name]})
    compiled(model, optimizer)
    kf.freeze(model, *blobs())
    fit(model, *blobs(), batch_size=8)
    before = size_of(model, tmp_path / "model.freeze")
    kf.quantize(model, step=0.02)
    assert_saved_without_loss(model, tmp_path / "model.freeze")
    assert (tmp_path / "model.freeze").stat().st_size < before


NOT_HELD = ["float64"] if keras.backend.backend() == "jax" else []


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "bfloat16", "mixed_float16", "mixed_bfloat16"]
)
def test_every_precision_is_saved_without_loss(dtype, tmp_path):
    model, _ = trained(dense_model(dtype=dtype))
    if dtype not in NOT_HELD:
        kf.quantize(model, step=0.05)
    assert_saved_without_loss(model, tmp_path / "model.freeze")
    found = str(kf.storage.inspect(tmp_path / "model.freeze"))
    assert found.count("on a grid of 0.05") == (0 if dtype in NOT_HELD else 6)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="others have 64 bits at any time")
def test_values_that_jax_would_round_are_left_alone():
    model, _ = trained(dense_model(dtype="float64"))
    with pytest.raises(ValueError, match="jax_enable_x64"):
        kf.quantize(model, step=0.05)


@pytest.mark.same_on_all
def test_initializers_of_keras_are_starts_as_well(tmp_path):
    model, start = trained(distribution=None)
    before, mask = values_of(model.variables), kf.get_mask(model)
    kf.quantize(model, step=0.05)
    kernel = model.layers[0].kernel
    expected = np.where(mask[kernel], rounded_by_hand(before[0], start[0], 0.05), before[0])
    assert same_bits(value_of(kernel), expected)
    with pytest.warns(UserWarning, match="initializers"):
        assert_saved_without_loss(model, tmp_path / "model.freeze")


@pytest.mark.same_on_all
def test_deltas_are_on_a_grid_of_differences_to_their_base(tmp_path):
    base, _ = trained()
    model = keras.models.clone_model(base)
    model.set_weights(base.get_weights())
    compiled(model, kf.FreezeOptimizer(sgd(), freeze_rate=0.75))
    x, y = blobs(seed=3)
    kf.freeze(model, x, y)
    fit(model, x, y, epochs=3, batch_size=8)
    exact = size_of(model, tmp_path / "delta", base=base)
    trained_on, mask = values_of(model.variables), kf.get_mask(model)
    kf.quantize(model, x, y, base=base, tolerance=0.05)
    head, start = model.layers[-1], base.layers[-1]
    on_grid = assert_saved_without_loss(model, tmp_path / "delta", base=base)
    assert (tmp_path / "delta").stat().st_size < exact
    moved = mask[head.kernel]
    differences = (value_of(head.kernel) - value_of(start.kernel))[moved]
    assert (
        0 < np.abs(differences).max() <= 2 * np.abs(trained_on[-2] - value_of(start.kernel)).max()
    )
    # It can be put on the base and taken off, and what was put on is on the grid still.
    before = values_of(base.variables)
    kf.apply_delta(base, tmp_path / "delta")
    for a, b in zip(base.variables, on_grid.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path
    kf.remove_delta(base, tmp_path / "delta")
    assert all(map(same_bits, before, values_of(base.variables)))


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("kind", ["all", "head", "LoRA"])
def test_a_model_that_was_trained_from_a_base_by_any_means_is_quantized(kind, tmp_path):
    base = compiled(dense_model(), sgd(momentum=0.9))
    fit(base, *blobs(), epochs=3, batch_size=8)
    base.save(tmp_path / "base.keras")
    model = keras.models.load_model(tmp_path / "base.keras")
    for layer in model.layers:
        if kind == "LoRA" and hasattr(layer, "enable_lora"):
            layer.enable_lora(2)
        elif kind == "head":
            layer.trainable = layer is model.layers[-1]
    compiled(model, sgd(0.05))
    fit(model, *blobs(), epochs=2, batch_size=8)
    exact, before = size_of(model, tmp_path / "exact.freeze", base=base), values_of(model.variables)
    kf.quantize(model, step=0.02, base=base)
    starts = {tuple(v.path.split("/")[-2:]): value_of(v) for v in base.variables}
    for variable, old in zip(model.variables, before, strict=True):
        start = starts.get(tuple(variable.path.split("/")[-2:]), np.zeros_like(old))
        is_trained = any(variable is v for v in model.trainable_variables)
        expected = rounded_by_hand(old, start, 0.02) if is_trained else old
        assert same_bits(value_of(variable), expected), variable.path
    assert_saved_without_loss(model, tmp_path / "a.freeze", base=base)
    assert (tmp_path / "a.freeze").stat().st_size < exact


@pytest.mark.same_on_all
def test_variables_with_a_constraint_are_left_alone(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, kernel_constraint=keras.constraints.NonNeg()),
            keras.layers.Dense(3),
        ]
    )
    model, _ = trained(model)
    before = value_of(model.layers[0].kernel)
    report = kf.quantize(model, step=0.2)
    assert same_bits(value_of(model.layers[0].kernel), before)
    assert len(report.rows) == 3
    assert_saved_without_loss(model, tmp_path / "model.freeze")


@keras.saving.register_keras_serializable("test_quantization")
class WithUnused(keras.layers.Dense):
    """Has a variable that no output depends on."""

    def build(self, input_shape):
        super().build(input_shape)
        self.unused = self.add_weight(name="unused", shape=(3,), initializer="zeros")


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("by_data", [True, False])
def test_values_that_are_not_finite_are_left_alone(by_data, tmp_path):
    model, _ = trained(keras.Sequential([keras.Input((6,)), WithUnused(3)]))
    layer = model.layers[0]
    layer.unused.assign([1.0, np.inf, np.nan])
    before = value_of(layer.unused)
    arguments = dict(zip("xy", blobs(), strict=True)) if by_data else {"step": 0.1}
    report = kf.quantize(model, **arguments)
    assert [row.path.split("/")[-1] for row in report.rows] == ["kernel", "bias"]
    assert same_bits(value_of(layer.unused), before)
    assert_saved_without_loss(model, tmp_path / "model.freeze")


@pytest.mark.same_on_all
def test_networks_with_layers_of_many_kinds_are_quantized(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.LSTM(5, return_sequences=True)(keras.layers.Embedding(9, 4)(inputs))
    x = keras.layers.MultiHeadAttention(2, 3)(x, x)
    x = keras.layers.SeparableConv1D(4, 3)(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(x)))
    kf.reinitialize(model, "xavier_normal", seed=0)
    compiled(model, kf.FreezeOptimizer(sgd(), freeze_rate=0.75))
    x, y = np.random.default_rng(0).integers(0, 9, (24, 6)), np.arange(24) % 3
    kf.freeze(model, x, y)
    fit(model, x, y, batch_size=8)
    kf.quantize(model, x, y, tolerance=0.02)
    assert_saved_without_loss(model, tmp_path / "model.freeze")


@pytest.mark.same_on_all
def test_data_may_be_a_dataset(tmp_path):
    class Blobs(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            x, y = blobs()
            return x[index::3], y[index::3]

    model, _ = trained()
    report = kf.quantize(model, Blobs())
    assert report.after["loss"] <= 1.01 * report.before["loss"]
    assert_saved_without_loss(model, tmp_path / "model.freeze")


def test_training_goes_on_as_if_quantize_had_only_rounded():
    """Optimizer, statistics, metrics and random state are left alone."""
    model, _ = trained()
    kf.quantize(model, *blobs(), tolerance=0.1)
    by_hand, _ = trained()
    for variable, quantized in zip(by_hand.variables, values_of(model.variables), strict=True):
        variable.assign(quantized)
    for one in (model, by_hand):
        fit(one, *blobs(), epochs=2, batch_size=8)
    pairs = zip(
        [*model.variables, *model.optimizer.variables],
        [*by_hand.variables, *by_hand.optimizer.variables],
        strict=True,
    )
    for a, b in pairs:
        assert 0 in a.shape or same_bits(value_of(a), value_of(b)), a.path


def frozen_with_nan():
    model, _ = trained()
    model.layers[-1].bias.assign([np.nan] * 3)
    return model


def unfrozen():
    return compiled(dense_model(), sgd())


def unbuilt():
    model = keras.Sequential([keras.layers.Dense(3)])
    return compiled(model)


def not_compiled():
    model, _ = trained()
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    compiled(copy)
    kf.freeze(copy, mask=kf.get_mask(model))
    copy.compiled = False  # as after `load(path, compile=False)`
    return copy


def from_elsewhere():
    model = dense_model()
    model.layers[0].kernel.assign(np.random.default_rng(5).normal(size=(6, 8)))
    return trained(model, distribution=None)[0]


X, Y = blobs()


@pytest.mark.cases(10)
@pytest.mark.same_on_all
@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (lambda: "model", {"step": 0.1}, TypeError, "Argument `model`"),
        (unbuilt, {"step": 0.1}, ValueError, "Argument `model` must be a built model"),
        (unfrozen, {"step": 0.1}, ValueError, "FreezeOptimizer"),
        (lambda: compiled(dense_model()), {"step": 0.1}, ValueError, "must be frozen"),
        (frozen_with_nan, {"x": X, "y": Y}, ValueError, "loss on `x` and `y` is nan"),
        (lambda: trained()[0], {}, ValueError, "either data .* or one `step`"),
        (lambda: trained()[0], {"x": X, "y": Y, "step": 1}, ValueError, "either data"),
        (lambda: trained()[0], {"x": iter([(X, Y)])}, ValueError, "Argument `x`"),
        (lambda: trained()[0], {"x": X, "y": Y[:5]}, ValueError, "length"),
        (lambda: trained()[0], {"y": Y, "step": 0.1}, ValueError, "Argument `y` must be None"),
        (lambda: trained()[0], {"step": 1e-12}, ValueError, "`step` must be .* be rounded"),
        (not_compiled, {"x": X, "y": Y}, ValueError, "must be compiled"),
        (from_elsewhere, {"step": 0.1}, ValueError, "`base`"),
        (lambda: trained()[0], {"step": 0.0}, ValueError, "Argument `step`"),
        (lambda: trained()[0], {"step": -1.0}, ValueError, "Argument `step`"),
        (lambda: trained()[0], {"step": float("nan")}, ValueError, "Argument `step`"),
        (lambda: trained()[0], {"step": "0.1"}, TypeError, "Argument `step`"),
        (lambda: trained()[0], {"x": X, "y": Y, "tolerance": -0.1}, ValueError, "`tolerance`"),
        (lambda: trained()[0], {"x": X, "y": Y, "tolerance": None}, TypeError, "`tolerance`"),
        (lambda: trained()[0], {"step": 0.1, "base": 3}, TypeError, "`base`"),
    ],
)
def test_what_cannot_be_quantized_is_named_and_left_alone(make, arguments, error, message):
    model = make()
    variables = getattr(model, "variables", [])
    before = values_of(variables)
    with pytest.raises(error, match=message):
        kf.quantize(model, **arguments)
    assert all(map(same_bits, before, values_of(variables)))


@pytest.mark.same_on_all
def test_a_tolerance_that_no_grid_meets_is_named_and_changes_nothing():
    model, _ = trained()
    before = values_of(model.variables)
    numbers = itertools.count()
    # The loss rises with each evaluation, whatever the weights are.
    model.compile(model.optimizer, crossentropy(), run_eagerly=True)
    model.compute_loss = lambda *_, **__: keras.ops.convert_to_tensor(float(next(numbers)))
    with pytest.raises(ValueError, match=r"`tolerance` must be larger.*goes from .* to "):
        kf.quantize(model, *blobs())
    assert all(map(same_bits, before, values_of(model.variables)))


@pytest.mark.same_on_all
@given(goods=st.lists(st.booleans(), min_size=96, max_size=96))
@example(goods=[False] * 96)
@example(goods=[True] * 96)
def test_the_grid_found_is_good_and_the_next_coarser_one_is_not(goods):
    found = quantization._coarsest(lambda number: number, lambda number: goods[number])
    if goods[found]:
        assert found == 0 or not goods[found - 1]
    else:
        assert not any(goods[36::4])
        assert not goods[95]


@pytest.mark.same_on_all
@given(first_good=st.integers(0, 95), by_chance=st.one_of(st.none(), st.integers(0, 2)))
@example(first_good=95, by_chance=None)
def test_the_coarsest_grid_is_found_and_not_one_that_is_good_by_chance(first_good, by_chance):
    tried = []

    def attempt(number):
        tried.append(number)
        return number

    found = quantization._coarsest(attempt, lambda n: n >= first_good or n == by_chance)
    assert found == first_good or (by_chance is not None and first_good <= 8)
    assert len(tried) <= 19


@pytest.mark.same_on_all
def test_a_loss_of_zero_is_named():
    model, _ = trained()
    before = values_of(model.variables)
    model.compile(model.optimizer, "mse")
    x, _ = blobs()
    with pytest.raises(ValueError, match=r"must not be 0.*a `step` instead"):
        kf.quantize(model, x, model.predict(x, verbose=0))
    assert all(map(same_bits, before, values_of(model.variables)))


@pytest.mark.same_on_all
def test_a_model_whose_evaluation_gives_no_loss_says_so(monkeypatch):
    model, _ = trained()
    # As with a `test_step` of its own.
    monkeypatch.setattr(model, "evaluate", lambda *_, **__: {"size": 1.0})
    with pytest.raises(ValueError, match=r"must have a loss.*\['size'\]"):
        kf.quantize(model, *blobs())


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("name", ["keep", "decay"])
def test_an_interrupted_search_leaves_the_model_as_it_was(name, monkeypatch):
    model, _ = trained(**TREATMENTS[name])
    before, calls = values_of(model.variables), itertools.count()
    evaluate = model.evaluate

    def interrupted(*arguments, **keywords):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return evaluate(*arguments, **keywords)

    monkeypatch.setattr(model, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kf.quantize(model, *blobs())
    assert all(map(same_bits, before, values_of(model.variables)))


@pytest.mark.same_on_all
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "0.1", None, True])
def test_a_step_is_a_number_above_zero(value):
    error = TypeError if isinstance(value, (str, bool)) or value is None else ValueError
    with pytest.raises(error, match=re.escape("Argument `step` must be")):
        kf.storage.Grid(value)
