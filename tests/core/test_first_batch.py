"""What `fit` does once the first batch has decided which weights are trained."""

import keras
import numpy as np
import pytest
from restricted import every_layer, restricted_layers

import keras_freeze as kf
from keras_freeze import _keras_private as private
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.first_batch import TrainFunction

BACKEND = keras.backend.backend()
STEPS, INPUTS, UNITS = 5, 12, 6

INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda: keras.optimizers.SGD(0.1),
    "adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=0.5),
    "accumulated": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.InverseTimeDecay(0.1, decay_steps=1, decay_rate=0.5)
    ),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "adamax": lambda: keras.optimizers.Adamax(0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "lion": lambda: keras.optimizers.Lion(0.1),
    "schedule-free": lambda: keras.optimizers.ScheduleFreeAdamW(0.1),
}
some = pytest.mark.cases(None, tensorflow=3, jax=3)


def data(seed=0, steps=STEPS):
    x = np.random.default_rng(seed).normal(size=(steps, INPUTS)).astype("float32")
    return x, np.zeros((steps, 1), "float32")


def linear_model(optimizer, **compile_arguments):
    """A model whose gradients are its inputs, one example a batch."""
    layer = keras.layers.Dense(UNITS, name="fc")
    model = keras.Sequential([keras.Input((INPUTS,)), layer])
    start = np.random.default_rng(7).normal(size=(INPUTS, UNITS)).astype("float32")
    layer.kernel.assign(start)
    model.compile(optimizer, loss=lambda y, outputs: outputs, **compile_arguments)
    return model, start


def fit(model, x, y, **arguments):
    return model.fit(x, y, batch_size=1, shuffle=False, verbose=0, **arguments)


def values(model):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]


def trained_by_plain_optimizer(inner, start, trained, x):
    """The same steps by the inner optimizer alone, with the gradients of trained weights."""
    kernel, bias = keras.Variable(start, name="kernel"), keras.Variable(np.zeros(UNITS, "float32"))
    inner.build([kernel, bias])
    for row in x:
        by_hand = np.repeat(row[:, None], UNITS, axis=1) / UNITS * trained
        gradients = [by_hand, np.full(UNITS, 1.0 / UNITS, "float32")]
        tensors = [keras.ops.convert_to_tensor(g.astype("float32")) for g in gradients]
        inner.apply(tensors, [kernel, bias])
        kernel.assign(np.where(trained, keras.ops.convert_to_numpy(kernel), start))
    return keras.ops.convert_to_numpy(kernel), keras.ops.convert_to_numpy(bias)


def state_size(optimizer):
    return sum(int(np.prod(v.shape)) for v in optimizer.inner_optimizer.variables)


@some
@pytest.mark.parametrize("name", INNER)
def test_slots_keep_their_values_when_the_update_becomes_compact(name):
    optimizer = kf.FreezeOptimizer(INNER[name](), freeze_rate=0.8)
    model, start = linear_model(optimizer)
    x, y = data()
    fit(model, x, y)
    scores = np.abs(np.repeat(x[0][:, None], UNITS, axis=1) * start)
    trained = scores >= np.sort(scores, axis=None)[-round(0.2 * start.size)]
    (entry,) = optimizer.mask.entries
    np.testing.assert_array_equal(entry.trained, trained)
    kernel, bias = trained_by_plain_optimizer(INNER[name](), start, trained, x)
    found = values(model)
    assert (found[0].view("uint32")[~trained] == start.view("uint32")[~trained]).all()
    assert (found[0][trained] != start[trained]).all()
    np.testing.assert_allclose(found[0], kernel, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(found[1], bias, rtol=2e-5, atol=2e-6)
    assert isinstance(optimizer.update, CompactUpdate)
    dense = INNER[name]()
    dense.build(model.trainable_variables)
    assert state_size(optimizer) < sum(int(np.prod(v.shape)) for v in dense.variables) or (
        name == "plain sgd"
    )


def deep_model(optimizer, **compile_arguments):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(32, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((16,)), *hidden, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, **compile_arguments)
    return model


def deep_data(steps=4, batch=32):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(steps * batch, 16)).astype("float32")
    return x, rng.integers(0, 3, len(x))


def test_gradients_are_restricted_from_the_second_step():
    x, y = deep_data()
    by_first_batch, frozen = (
        deep_model(kf.FreezeOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 0.9))
        for _ in range(2)
    )
    with every_layer():
        by_first_batch.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        kf.freeze(frozen, x[:32], y[:32])
    frozen.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    assert kf.get_mask(by_first_batch) == kf.get_mask(frozen)
    assert len(restricted_layers(by_first_batch)) == 3
    for one, other in zip(values(by_first_batch), values(frozen), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("frozen_weights", ["keep", "zero", "decay"])
def test_training_goes_on_alike_however_it_is_divided(frozen_weights):
    x, y = data(steps=6)
    results = []
    for parts in ([6], [1, 5], [3, 1, 2]):
        l2 = 0.1 if frozen_weights == "decay" else 0.0
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        model, _ = linear_model(
            kf.FreezeOptimizer(inner, 0.8, frozen_weights=frozen_weights, l2=l2)
        )
        for end, size in zip(np.cumsum(parts), parts, strict=True):
            fit(model, x[end - size : end], y[end - size : end])
        results.append(values(model))
        assert isinstance(model.optimizer.update, CompactUpdate)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one.view("uint32"), two.view("uint32"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("saved_after", [1, 3])
def test_resumed_training_has_the_same_bits(saved_after, tmp_path):
    x, y = data(steps=6)

    def make():
        model = linear_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8))[0]
        model.compile(model.optimizer, loss="mean_squared_error")
        return model

    whole, stopped = make(), make()
    fit(whole, x, y)
    fit(stopped, x[:saved_after], y[:saved_after])
    stopped.save(tmp_path / "model.keras")
    resumed = keras.models.load_model(tmp_path / "model.keras")
    fit(resumed, x[saved_after:], y[saved_after:])
    assert isinstance(resumed.optimizer.update, CompactUpdate)
    for one, two in zip(values(whole), values(resumed), strict=True):
        np.testing.assert_array_equal(one.view("uint32"), two.view("uint32"))


@pytest.mark.same_on_all
def test_train_on_batch_becomes_compact():
    x, y = data()
    model, _ = linear_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8))
    other, _ = linear_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8))
    for row in range(STEPS):
        model.train_on_batch(x[row : row + 1], y[row : row + 1])
    fit(other, x, y)
    assert isinstance(model.optimizer.update, CompactUpdate)
    for one, two in zip(values(model), values(other), strict=True):
        np.testing.assert_array_equal(one.view("uint32"), two.view("uint32"))


def test_a_batch_that_is_not_finite_decides_nothing_and_the_next_one_does():
    if BACKEND != "jax":
        pytest.skip("the other backends raise an error")
    x, y = data(steps=6)
    x[0, 3] = np.nan
    model, start = linear_model(kf.FreezeOptimizer(keras.optimizers.SGD(0.1), 0.8))
    with pytest.warns(RuntimeWarning, match="not finite"):
        fit(model, x, y)
    expected, _ = linear_model(kf.FreezeOptimizer(keras.optimizers.SGD(0.1), 0.8))
    fit(expected, x[1:], y[1:])
    assert model.optimizer.mask == expected.optimizer.mask
    for one, two in zip(values(model), values(expected), strict=True):
        np.testing.assert_array_equal(one.view("uint32"), two.view("uint32"))
    assert not np.array_equal(values(model)[0], start)


@pytest.mark.cases(1, jax=0)
@pytest.mark.parametrize("criterion", ["gradient", "fisher", "snip"])
def test_batches_of_any_size_decide_as_freeze_does(criterion):
    x = np.random.default_rng(0).normal(size=(8, 6, 5)).astype("float32")
    y = np.arange(8) % 4

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, number):
            return x, y

    masks = []
    for decides in ("freeze", "first batch"):
        # Of a kernel of Dense with inputs of rank 3, TensorFlow does not know the gradient's shape.
        dense = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(4)]
        pooling = keras.layers.GlobalAveragePooling1D()
        model = keras.Sequential([keras.Input((6, 5)), dense[0], pooling, dense[1]])
        kf.reinitialize(model, seed=0)
        model.compile(
            kf.FreezeOptimizer(keras.optimizers.SGD(0.1), 0.8, criterion=criterion),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        if decides == "freeze":
            kf.freeze(model, x, y)
        model.fit(Batches(), verbose=0)
        masks.append(kf.get_mask(model))
    assert masks[0] == masks[1]


@pytest.mark.same_on_all
def test_optimizers_that_mix_entries_stay_dense():
    model, _ = linear_model(kf.FreezeOptimizer(keras.optimizers.Lamb(0.1), 0.8))
    fit(model, *data())
    assert not isinstance(model.optimizer.update, CompactUpdate)
    assert not isinstance(model.train_function, TrainFunction)


@pytest.mark.same_on_all
def test_eager_steps_and_loss_scaling_become_compact():
    inner = kf.FreezeOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 0.8)
    outer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    model, start = linear_model(outer, run_eagerly=True)
    plain, _ = linear_model(kf.FreezeOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 0.8))
    x, y = data()
    fit(model, x, y)
    fit(plain, x, y)
    assert isinstance(inner.update, CompactUpdate)
    for one, two in zip(values(model), values(plain), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)
    frozen = ~inner.mask.entries[0].trained
    assert (values(model)[0][frozen] == start[frozen]).all()


@pytest.mark.same_on_all
def test_a_callback_that_makes_the_train_function_again_is_respected():
    class Retrace(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.make_train_function(force=True)

    x, y = data()
    model, start = linear_model(kf.FreezeOptimizer(keras.optimizers.SGD(0.1), 0.8))
    fit(model, x, y, callbacks=[Retrace()])
    frozen = ~model.optimizer.mask.entries[0].trained
    assert (values(model)[0][frozen] == start[frozen]).all()
    assert int(model.optimizer.iterations) == STEPS


def test_weights_from_before_the_first_batch_let_the_next_batch_decide():
    if BACKEND != "torch":
        pytest.skip("steps of the other backends read whether the mask is decided")
    model, _ = linear_model(kf.FreezeOptimizer(keras.optimizers.Lamb(0.1), 0.8))
    optimizer, (x, y) = model.optimizer, data(steps=2)
    optimizer.build(model.trainable_variables)
    before = [keras.ops.convert_to_numpy(v) for v in optimizer.variables]
    fit(model, x[:1], y[:1])
    first = optimizer.mask
    optimizer.set_weights(before)
    assert optimizer.mask is None
    fit(model, x[1:], y[1:])
    assert optimizer.mask not in (None, first)


@pytest.mark.same_on_all
def test_a_failed_train_on_batch_leaves_the_model_as_it_was():
    x, y = data()
    model, _ = linear_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8))
    model.train_on_batch(x[:1], y[:1])
    before = values(model)
    with pytest.raises(Exception, match=r"shape|multipl|incompatible"):
        model.train_on_batch(x[:1, :3], y[:1])
    for one, two in zip(before, values(model), strict=True):
        np.testing.assert_array_equal(one, two)
    model.train_on_batch(x[1:2], y[1:2])
    expected, _ = linear_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8))
    fit(expected, x[:2], y[:2])
    for one, two in zip(values(expected), values(model), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.cases(1)
@pytest.mark.parametrize("what", ["own make_train_function", "wrapped train_function"])
def test_train_functions_of_the_user_are_used(what):
    calls = []

    class Own(keras.Sequential):
        def make_train_function(self):
            calls.append("made")
            super().make_train_function()

    class Wrap(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            function = self.model.train_function
            self.model.train_function = lambda *a: (calls.append("step"), function(*a))[1]

    x, y = data()
    model, start = linear_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8))
    if what == "own make_train_function":
        model = Own(model.layers)
        model.compile(
            kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8), loss=lambda y, outputs: outputs
        )
        fit(model, x, y)
        assert 1 <= calls.count("made") <= 3
    else:
        fit(model, x, y, callbacks=[Wrap()])
        assert calls == ["step"] * STEPS
    frozen = ~model.optimizer.mask.entries[0].trained
    assert (values(model)[0][frozen] == start[frozen]).all()


def test_a_learning_rate_that_a_callback_holds_stays_the_optimizers():
    if BACKEND == "jax":
        pytest.skip("assigning variables during `fit` has no effect on JAX")

    class Halve(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.rate, self.count = self.model.optimizer.learning_rate, []
            self.iterations = self.model.optimizer.iterations

        def on_train_batch_end(self, batch, logs=None):
            self.rate.assign(0.1 * 0.5 ** (batch + 1))
            self.count.append(int(self.iterations))

    x, y = data()
    halve = Halve()
    model, start = linear_model(kf.FreezeOptimizer(keras.optimizers.SGD(0.1), 0.8))
    fit(model, x, y, callbacks=[halve])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 * 0.5**STEPS)
    assert halve.count == list(range(1, STEPS + 1))
    trained = model.optimizer.mask.entries[0].trained
    by_hand = start.astype("float64")
    for step, row in enumerate(x):
        by_hand -= 0.1 * 0.5**step * np.repeat(row[:, None], UNITS, axis=1) / UNITS
    np.testing.assert_allclose(values(model)[0][trained], by_hand[trained], rtol=1e-5, atol=1e-6)


def test_a_function_in_place_of_apply_stays():
    inner, calls = keras.optimizers.SGD(0.1), []
    original = inner.apply
    inner.apply = lambda *arguments: (calls.append(1), original(*arguments))[1]
    model, _ = linear_model(kf.FreezeOptimizer(inner, 0.8), run_eagerly=True)
    fit(model, *data())
    assert len(calls) >= STEPS


def test_optimizer_weights_from_before_the_first_batch_can_be_set():
    x, y = data()
    model, start = linear_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8))
    model.optimizer.build(model.trainable_variables)
    weights = model.get_weights()
    before = [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]
    fit(model, x, y)
    first, after = values(model), [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]
    with pytest.raises(ValueError, match="weights"):
        model.optimizer.set_weights(after[:-1])
    for variable, value in zip(model.optimizer.variables, after, strict=True):
        if value.size:  # what tells JAX to trace again has none
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
    model.optimizer.set_weights(before)
    model.set_weights(weights)
    assert model.optimizer.mask is None
    fit(model, x, y)
    for one, two in zip(first, values(model), strict=True):
        np.testing.assert_array_equal(one, two)
    assert isinstance(model.optimizer.update, CompactUpdate)
    assert (values(model)[0] == start).any()


@pytest.mark.same_on_all
def test_a_train_step_of_the_users_keeps_ordinary_gradients():
    class Own(keras.Sequential):
        def train_step(self, *arguments):
            return super().train_step(*arguments)

    x, y = deep_data()
    model = Own(deep_model("sgd").layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kf.FreezeOptimizer(keras.optimizers.SGD(0.1), 0.9), loss=loss)
    with every_layer():
        model.fit(x, y, batch_size=32, verbose=0)
    assert isinstance(model.optimizer.update, CompactUpdate)
    assert restricted_layers(model) == []


def test_a_loaded_model_restricts_gradients_in_fit_unless_they_are_restored(tmp_path):
    x, y = deep_data()
    model = deep_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.9))
    kf.freeze(model, x[:32], y[:32])
    model.save(tmp_path / "model.keras")
    for restores in (False, True):
        loaded = keras.models.load_model(tmp_path / "model.keras")
        if restores:
            kf.restore_gradients(loaded)
        with every_layer():
            loaded.fit(x, y, batch_size=32, verbose=0)
        assert len(restricted_layers(loaded)) == (0 if restores else 3)


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("saved_after", [1, 2])
@pytest.mark.parametrize("kind", ["model.keras", "model.freeze"])
def test_resumed_training_with_restricted_gradients_has_the_same_bits(saved_after, kind, tmp_path):
    x, y = deep_data()
    rows = 32 * saved_after

    def train(model, x, y):
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)

    with every_layer():
        whole, stopped = (
            deep_model(kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.9)) for _ in range(2)
        )
        train(whole, x, y)
        train(stopped, x[:rows], y[:rows])
        if kind == "model.keras":
            stopped.save(tmp_path / kind)
            resumed = keras.models.load_model(tmp_path / kind)
        else:
            kf.save(stopped, tmp_path / kind, include_optimizer=True)
            resumed = kf.load(tmp_path / kind)
        train(resumed, x[rows:], y[rows:])
    assert len(restricted_layers(resumed)) == 3
    for one, two in zip(values(whole), values(resumed), strict=True):
        np.testing.assert_array_equal(one.view("uint32"), two.view("uint32"))


@pytest.mark.cases(None, jax=0)
def test_a_kernel_without_entries_is_no_obstacle():
    if BACKEND == "tensorflow":
        pytest.skip("TensorFlow cannot multiply such a kernel")
    inputs = keras.Input((INPUTS,))
    nothing = keras.layers.Lambda(lambda t: t[:, :0], output_shape=(0,))(inputs)
    outputs = [keras.layers.Dense(4)(inputs), keras.layers.Dense(4)(nothing)]
    model = keras.Model(inputs, keras.layers.Add()(outputs))
    model.compile(kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.8), loss="mse")
    fit(model, *data())
    assert isinstance(model.optimizer.update, CompactUpdate)


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_the_state_of_a_model_is_taken_out_of_its_variables_if_asked():
    model, start = linear_model("sgd")
    kernel = model.trainable_variables[0]
    fit(model, *data())
    state = private.state_of(model, is_taken=False)
    assert len(state) == 4
    assert private.stored_value(kernel) is state[0][0]
    private.state_of(model, is_taken=True)
    assert private.stored_value(kernel) is None
    model._jax_state_synced = False
    model.jax_state_sync()
    assert values(model)[0].shape == start.shape
