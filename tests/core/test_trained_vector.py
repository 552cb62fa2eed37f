"""What is trained as one vector: its order, its bits, and who refuses which vector."""

import concurrent.futures
import hashlib
import importlib.util

import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    blobs,
    compiled,
    dense_model,
    fit,
    is_weight,
    same_bits,
    sgd,
    two_dense_layers,
    value_of,
    values_of,
)
from hypothesis import given
from hypothesis import strategies as st
from processes import run_python

import keras_freeze as kf
from keras_freeze.storage.patches import Patch

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


BACKEND = keras.backend.backend()
STRATEGIES = ["freeze", "first batch"]
X, Y = blobs()
SIZE = 18 + 27  # a quarter of two kernels; biases and normalization


def trained(model=None, strategy="freeze", inner=None, **arguments):
    """A network after an epoch."""
    settings = {"freeze_rate": 0.75, **arguments}
    inner = sgd(momentum=0.9) if inner is None else inner
    model = compiled(
        dense_model() if model is None else model, kf.FreezeOptimizer(inner, **settings)
    )
    if strategy == "freeze":
        kf.freeze(model, X, Y)
    fit(model, X, Y, batch_size=8)
    return model


def by_hand(model):
    """The values in the documented order, one after the other, in double precision."""
    mask, found = kf.get_mask(model), []
    for variable in model.trainable_variables:
        is_masked = any(variable.path == path for path in mask)
        for place, value in np.ndenumerate(value_of(variable).astype("float64")):
            if not is_masked or mask[variable.path][place]:
                found.append(value)
    return np.array(found)


def bits_in(model):
    return b"".join(value.tobytes() for value in values_of(model.variables))


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_order_is_that_of_the_variables_and_their_rows(strategy):
    model = trained(strategy=strategy)
    vector = kf.get_trained(model)
    assert vector.dtype == np.float32
    assert same_bits(vector, by_hand(model).astype("float32"))
    assert vector.size == kf.report(model).num_trained_parameters
    assert 3 < vector.size < sum(value.size for value in values_of(model.trainable_variables))


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_vector_sets_what_is_trained_and_nothing_else(strategy):
    model = trained(strategy=strategy, inner=sgd(1e-3))
    mask, before = kf.get_mask(model), values_of(model.variables)
    given_values = np.random.default_rng(5).normal(size=kf.get_trained(model).size)
    kf.set_trained(model, given_values)
    assert same_bits(kf.get_trained(model), given_values.astype("float32"))
    assert same_bits(by_hand(model).astype("float32"), given_values.astype("float32"))
    assert_frozen_bits_kept(model.variables, mask, before)
    for variable, old in zip(model.variables, before, strict=True):
        if not variable.trainable:
            assert same_bits(value_of(variable), old), variable.path
    fit(model, X, Y, batch_size=8)  # goes on from there
    assert_frozen_bits_kept(model.variables, mask, before)
    assert 0 < np.abs(kf.get_trained(model) - given_values).max() < 0.1


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("float64", "float64"),
        ("bfloat16", "float32"),
        ("float16", "float32"),
        ("mixed_float16", "float32"),
        ("mixed_bfloat16", "float32"),
    ],
)
def test_values_of_every_dtype_come_back_bit_for_bit(policy, dtype):
    model = trained(dense_model(dtype=policy))
    tiny = np.finfo("float32").smallest_subnormal
    model.layers[0].bias.assign(np.array([-0.0, 0.0, tiny, -tiny, 1e-7, 1.5, -3.0, 1e4]))
    before, vector = values_of(model.variables), kf.get_trained(model)
    assert vector.dtype == ("float32" if BACKEND == "jax" else dtype)
    assert np.array_equal(vector, by_hand(model))
    kf.set_trained(model, np.zeros(vector.size, vector.dtype))
    assert not kf.get_trained(model).any()
    kf.set_trained(model, vector)
    assert all(map(same_bits, values_of(model.variables), before))


@pytest.mark.same_on_all
def test_models_of_several_dtypes_have_a_vector_that_holds_all_values():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, dtype="float64"),
            keras.layers.Dense(3, dtype="bfloat16"),
        ]
    )
    compiled(model)
    kf.freeze(model, mask=lambda v: value_of(v).astype("float32") > 0)
    before, vector = values_of(model.variables), kf.get_trained(model)
    assert np.array_equal(vector, by_hand(model))
    kf.set_trained(model, np.zeros(vector.size))
    kf.set_trained(model, vector)
    assert all(map(same_bits, values_of(model.variables), before))


@pytest.mark.same_on_all
@given(data=st.data())
def test_any_mask_gives_the_vector_by_hand_and_takes_it_back(data):
    model = compiled(two_dense_layers())
    chosen = {}
    for variable in model.trainable_variables:
        if is_weight(variable) or data.draw(st.booleans()):
            size = value_of(variable).size
            drawn = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
            chosen[variable.path] = np.array(drawn).reshape(tuple(variable.shape))
    kf.freeze(model, mask=chosen)
    before, vector = values_of(model.variables), kf.get_trained(model)
    assert same_bits(vector, by_hand(model).astype("float32"))
    kf.set_trained(model, vector + np.float32(1))
    assert same_bits(kf.get_trained(model), vector + np.float32(1))
    for variable, old in zip(model.variables, before, strict=True):
        frozen = ~chosen.get(variable.path, np.ones(old.shape, bool))
        assert same_bits(value_of(variable)[frozen], old[frozen])
    kf.set_trained(model, vector)
    assert all(map(same_bits, values_of(model.variables), before))


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_all_weights_or_none_may_be_trained(rate):
    model = trained(freeze_rate=rate)
    vector = kf.get_trained(model)
    chosen = [v for v in model.trainable_variables if rate == 0.0 or not is_weight(v)]
    assert same_bits(vector, np.concatenate([value.reshape(-1) for value in values_of(chosen)]))
    kf.set_trained(model, 2 * vector)
    assert same_bits(kf.get_trained(model), 2 * vector)


@pytest.mark.same_on_all
def test_the_average_of_two_clients_is_that_of_numpy():
    clients = [trained() for _ in range(3)]
    fit(clients[1], X[:24], Y[:24], batch_size=8)
    first, second = (kf.get_trained(client) for client in clients[:2])
    assert (first != second).any()
    server = clients[2]
    fingerprint = kf.get_mask(clients[0]).fingerprint
    kf.set_trained(
        server, np.average([first, second], axis=0, weights=[1, 3]), fingerprint=fingerprint
    )
    expected = (0.25 * first.astype("float64") + 0.75 * second).astype("float32")
    assert np.allclose(kf.get_trained(server), expected, rtol=1e-6, atol=0)
    both = [by_hand(client) for client in clients[:2]]
    assert np.allclose(by_hand(server), 0.25 * both[0] + 0.75 * both[1], rtol=1e-6, atol=0)


@pytest.mark.cases(None, tensorflow=0)
def test_tensors_and_lists_are_vectors_too():
    model = trained()
    vector = 2 * kf.get_trained(model)
    for given_vector in (
        keras.ops.convert_to_tensor(vector),
        vector.tolist(),
        vector.astype(">f4"),
    ):
        kf.set_trained(model, np.zeros(vector.size))
        kf.set_trained(model, given_vector)
        assert same_bits(kf.get_trained(model), vector)


def with_a_shared_layer():
    inputs, dense = keras.Input((6,)), keras.layers.Dense(6, activation="tanh")
    return keras.Model(inputs, keras.layers.Dense(3)(dense(dense(inputs))))


@pytest.mark.same_on_all
def test_a_shared_layer_is_in_the_vector_once():
    model = trained(with_a_shared_layer())
    vector = kf.get_trained(model)
    assert same_bits(vector, by_hand(model).astype("float32"))
    assert vector.size == kf.report(model).num_trained_parameters


def with_two_optimizers():
    optimizers = keras.optimizers.OptimizerMap(
        kf.FreezeOptimizer(sgd(), 0.5), {".*head/.*": kf.FreezeOptimizer(sgd(), 0.5)}
    )
    return compiled(dense_model(), keras.optimizers.MultiOptimizer(optimizers))


@pytest.mark.same_on_all
def test_several_optimizers_train_one_vector():
    model = with_two_optimizers()
    fit(model, X, Y)  # the first batch decides
    vector, mask = kf.get_trained(model), kf.get_mask(model)
    assert vector.size == mask.num_trained + 27 == 36 + 27
    assert same_bits(vector, by_hand(model).astype("float32"))
    kf.set_trained(model, 3 * vector, fingerprint=mask.fingerprint)
    assert same_bits(kf.get_trained(model), 3 * vector)


@pytest.mark.same_on_all
def test_a_model_without_its_optimizer_takes_the_vector(tmp_path):
    model = trained()
    vector, fingerprint = kf.get_trained(model), kf.get_mask(model).fingerprint
    kf.save(model, tmp_path / "model.freeze", include_frozen=True)
    server = kf.load(tmp_path / "model.freeze", compile=False)
    assert same_bits(kf.get_trained(server), vector)
    kf.set_trained(server, 2 * vector, fingerprint=fingerprint)
    kf.set_trained(model, 2 * vector)
    for a, b in zip(model.variables, server.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


class Exchange(keras.callbacks.Callback):
    """After each step, sets half of what has been trained.

    It does not ask for `self.model`, which on JAX writes to the variables what `fit` has trained.
    """

    def __init__(self, model):
        super().__init__()
        self.trained, self.read, self.set = model, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.read.append(kf.get_trained(self.trained))
        self.set.append(self.read[-1] / 2)
        kf.set_trained(self.trained, self.set[-1])


@pytest.mark.cases(1, jax=0)
@pytest.mark.slow_on("tensorflow")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_in_fit_goes_on_from_what_a_callback_sets(strategy):
    # Without momentum, a step follows from the weights alone.
    model = trained(strategy=strategy, inner=sgd(0.5))
    by_steps = trained(strategy=strategy, inner=sgd(0.5))
    exchange = Exchange(model)
    fit(model, X, Y, batch_size=24, callbacks=[exchange])
    for first, (read, given_vector) in enumerate(zip(exchange.read, exchange.set, strict=True)):
        by_steps.train_on_batch(X[24 * first :][:24], Y[24 * first :][:24])
        assert np.allclose(kf.get_trained(by_steps), read, rtol=1e-5, atol=1e-6)
        kf.set_trained(by_steps, given_vector)
    assert len(exchange.read) == 2
    assert same_bits(kf.get_trained(model), exchange.set[-1])


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_on_a_grid_starts_at_the_values_given(strategy):
    step = 0.0625
    models = [trained(strategy=strategy, inner=sgd(1e-3), grid=step) for _ in range(2)]
    vector = kf.get_trained(models[0])
    kf.set_trained(models[0], vector)  # what it has: nothing changes, nor do precise values
    for model in models:
        fit(model, X, Y, epochs=20, batch_size=8)
    assert same_bits(kf.get_trained(models[0]), kf.get_trained(models[1]))
    given_vector = vector + np.float32(10.4 * step)
    kf.set_trained(models[0], given_vector)
    assert same_bits(kf.get_trained(models[0]), given_vector)  # not rounded before the next step
    models[0].train_on_batch(X, Y)
    moved = np.abs(kf.get_trained(models[0]) - given_vector)
    assert 0 < moved.max() < 0.6 * step


@pytest.mark.cases(None, tensorflow=0)
def test_an_error_while_values_are_written_takes_all_of_them_back(monkeypatch):
    model = trained()
    before, apply, calls = bits_in(model), Patch.apply, []

    def fail_late(patch, variables):
        calls.append(patch.index)
        apply(patch, variables)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Patch, "apply", fail_late)
    with pytest.raises(KeyboardInterrupt):
        kf.set_trained(model, 2 * kf.get_trained(model))
    assert len(calls) == 8  # four of the six variables, and back
    assert bits_in(model) == before


@pytest.fixture(scope="module")
def unchanged():
    """A network that no test changes."""
    return trained()


def with_value(value, place=-1):
    vector = np.ones(SIZE)
    vector[place] = value
    return vector


@pytest.mark.cases(11)
@pytest.mark.same_on_all
@pytest.mark.parametrize(
    ("vector", "error", "words"),
    [
        (np.ones(SIZE - 1), ValueError, [f"array of {SIZE} floating", f"shape ({SIZE - 1},)"]),
        (np.ones((SIZE, 1)), ValueError, [f"shape ({SIZE}, 1)"]),
        (1.0, ValueError, ["shape ()"]),
        (np.ones(SIZE, "int32"), TypeError, ["dtype int32"]),
        (np.ones(SIZE, bool), TypeError, ["dtype bool"]),
        (np.ones(SIZE, complex), TypeError, ["dtype complex128"]),
        (["1"] * SIZE, TypeError, ["'1'", "dtype <U1"]),
        ([[1.0], [1.0, 2.0]], TypeError, ["[[1.0], [1.0, 2.0]]"]),
        (None, TypeError, ["None"]),
        (with_value(np.nan), ValueError, ["1 of 3 values for", "head/bias", "nan"]),
        (with_value(-np.inf, place=0), ValueError, ["body/kernel", "-inf"]),
        (with_value(1e39), ValueError, ["too large for float32", "1e+39"]),
    ],
)
def test_a_vector_that_does_not_fit_is_named_and_changes_nothing(vector, error, words, unchanged):
    before = bits_in(unchanged)
    with pytest.raises(error, match="Argument `vector`") as caught:
        kf.set_trained(unchanged, vector)
    assert all(word in str(caught.value) for word in words)
    assert bits_in(unchanged) == before


@pytest.mark.same_on_all
def test_a_value_too_large_for_one_variable_changes_none():
    model = trained(dense_model(dtype="float16"))
    before = bits_in(model)
    with pytest.raises(ValueError, match=r"head/bias.*too large for float16; the first is 70000"):
        kf.set_trained(model, with_value(70000.0))
    assert bits_in(model) == before


@pytest.mark.same_on_all
def test_the_vector_of_another_mask_is_refused(unchanged):
    model = unchanged
    before, mask = bits_in(model), kf.get_mask(model)
    turned = {path: np.flip(mask[path]) for path in mask}
    other = compiled(dense_model())
    kf.freeze(other, mask={path.split("/", 1)[-1]: turned[path] for path in turned})
    wrong = kf.get_mask(other).fingerprint
    assert kf.get_trained(other).size == SIZE
    with pytest.raises(ValueError, match=rf"`fingerprint`.*{mask.fingerprint}.*{wrong}"):
        kf.set_trained(model, kf.get_trained(other), fingerprint=wrong)
    with pytest.raises(TypeError, match="`fingerprint`"):
        kf.set_trained(model, kf.get_trained(other), fingerprint=3)
    assert bits_in(model) == before


def unbuilt():
    return compiled(keras.Sequential([keras.layers.Dense(3)]))


def decayed():
    return trained(frozen_weights="decay", l2=0.01)


def quantized():
    model = trained()
    model.quantize("int8")
    return model


@pytest.mark.cases(7)
@pytest.mark.same_on_all
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: "model", TypeError, "Argument `model`"),
        (unbuilt, ValueError, "Argument `model` must be a built model"),
        (dense_model, ValueError, "not compiled"),
        (lambda: compiled(dense_model(), sgd()), ValueError, "FreezeOptimizer"),
        (lambda: compiled(dense_model()), ValueError, "must be frozen"),
        (with_two_optimizers, ValueError, "must be frozen"),
        (decayed, ValueError, "decay"),
        (quantized, ValueError, "have been quantized"),
    ],
)
def test_a_model_that_has_no_such_vector_says_why(make, error, message):
    model = make()
    with pytest.raises(error, match=message):
        kf.get_trained(model)
    with pytest.raises(error, match=message):
        kf.set_trained(model, np.ones(SIZE))


@pytest.mark.same_on_all
def test_nothing_is_set_while_another_thread_trains():
    model, found = trained(), []

    class FromElsewhere(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(kf.get_trained, model).exception())
                found.append(pool.submit(kf.set_trained, model, np.ones(SIZE)).exception())

    fit(model, X, Y, callbacks=[FromElsewhere()])
    assert [type(error) for error in found] == [RuntimeError, RuntimeError]


CLIENT = """
import hashlib
import sys

import keras
import numpy as np

import keras_freeze as kf


def received(mask_file, vector_file, fingerprint):
    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])  # paths get numbers
    model = kf.models.lenet_300_100(seed=0)
    model.compile(kf.FreezeOptimizer("sgd", 0.99))
    kf.freeze(model, mask=kf.FreezeMask.load(mask_file))
    kf.set_trained(model, np.load(vector_file), fingerprint=fingerprint)
    digest = hashlib.sha256()
    for variable in model.variables:
        digest.update(keras.ops.convert_to_numpy(variable).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(received(*sys.argv[1:]))
"""


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_processes_of_any_backend_exchange_vectors(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    model = kf.models.lenet_300_100(seed=0)
    compiled(model, kf.FreezeOptimizer(sgd(), 0.99))
    images = np.random.default_rng(0).normal(size=(32, 28, 28, 1)).astype("float32")
    mask = kf.freeze(model, images, np.arange(32) % 10)
    fit(model, images, np.arange(32) % 10)
    mask.save(tmp_path / "mask.freeze")
    np.save(tmp_path / "vector.npy", kf.get_trained(model))
    arguments = (tmp_path / "mask.freeze", tmp_path / "vector.npy", mask.fingerprint)
    printed = run_python(CLIENT, *arguments, backend=backend)
    assert printed.split()[-1] == hashlib.sha256(bits_in(model)).hexdigest()
