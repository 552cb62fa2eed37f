"""What users bring along: weights of their own names, sparse data, frozen biases, loaded masks."""

import warnings

import keras
import numpy as np
import pytest
import scipy.sparse
from helpers import (
    blobs,
    compiled,
    crossentropy,
    fit,
    same_bits,
    sgd,
    two_dense_layers,
    value_of,
    values_of,
)

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=0, jax=0)


@keras.saving.register_keras_serializable(package="tests")
class Own(keras.layers.Layer):
    """A layer whose weights have names of its own."""

    def build(self, input_shape):
        self.w = self.add_weight(shape=(input_shape[-1], 8), name="w")
        self.b = self.add_weight(shape=(8,), name="b", initializer="zeros")

    def call(self, inputs):
        return keras.ops.tanh(inputs @ self.w + self.b)


def own_network(**arguments):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((6,)), Own(name="own"), keras.layers.Dense(3, name="head")]
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.5, **arguments)
    return compiled(keras.Sequential(layers, name="net"), optimizer)


def checkerboard(shape):
    return np.indices(shape).sum(axis=0) % 2 == 0


def assert_frozen_entries_stay(model, mask_of):
    """Trains, and compares what `mask_of` freezes, by variable, bit for bit."""
    before = values_of(model.trainable_variables)
    fit(model, *blobs(), epochs=2)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        trained = mask_of.get(variable.name, np.ones(old.shape, bool))
        new = value_of(variable)
        assert same_bits(new[~trained], old[~trained])
        assert (new[trained] != old[trained]).any()


def test_a_function_is_asked_for_weights_and_for_variables_of_unknown_names():
    model, asked = own_network(), []

    def choose(variable):
        asked.append(variable.name)
        return checkerboard(variable.shape) if variable.name == "w" else None

    mask = kf.freeze(model, mask=choose)
    assert asked == ["w", "b", "kernel"]
    assert np.array_equal(mask[model.layers[0].w], checkerboard((6, 8)))
    assert model.layers[0].b.path not in [entry.path for entry in mask.entries]
    assert_frozen_entries_stay(model, {"w": checkerboard((6, 8))})


def test_a_function_that_trains_all_of_an_unknown_variable_leaves_it_out():
    mask = kf.freeze(own_network(), mask=lambda variable: np.ones(variable.shape, bool))
    assert [entry.path.split("/")[-1] for entry in mask.entries] == ["kernel"]


def test_a_function_is_not_asked_for_what_is_excluded_or_no_weight():
    model, asked = own_network(exclude="own/w"), []
    model.layers[1].enable_lora(2)
    kf.freeze(model, mask=lambda variable: asked.append(variable.name))
    assert set(asked) == {"b"}


def test_a_path_may_name_any_variable_and_the_report_says_what_is_frozen():
    model = own_network()
    chosen = {
        "own/w": checkerboard((6, 8)),
        "own/b": np.arange(8) < 3,
        "head/bias": np.eye(3)[0] > 0,
    }
    kf.freeze(model, mask=chosen)
    report = kf.report(model)
    assert {row.path: row.num_trained for row in report.rows} == {
        "net/own/w": 24,
        "net/own/b": 3,
        "net/head/kernel": 24,
        "net/head/bias": 1,
    }
    assert report.unknown_paths == ()
    assert "always trained" not in str(report)
    names = {path.split("/")[-1]: trained for path, trained in chosen.items()}
    assert_frozen_entries_stay(model, names)


def test_what_a_mask_leaves_of_unknown_names_is_still_listed():
    model = own_network()
    kf.freeze(model, mask={"own/w": checkerboard((6, 8))})
    assert kf.report(model).unknown_paths == ("net/own/b",)


def test_unknown_variables_with_a_mask_are_saved_and_loaded(tmp_path):
    model = own_network()
    mask = kf.freeze(model, mask={"own/w": checkerboard((6, 8))})
    fit(model, *blobs())
    kf.save(model, tmp_path / "own.freeze", include_frozen=True)
    loaded = kf.load(tmp_path / "own.freeze")
    assert kf.get_mask(loaded) == mask
    for new, old in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert same_bits(new, old)


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if "no layer of Keras" in str(w.message)]


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_a_rate_on_a_part_of_the_network_is_a_warning(way):
    model, (x, y) = own_network(), blobs()
    call = (lambda: kf.freeze(model, x, y)) if way == "freeze" else (lambda: fit(model, x, y))
    (message,) = warnings_of(call)
    assert "'net/own/w'" in message
    assert "own/b" not in message
    for remedy in ('"kernel"', "`mask`", "`exclude`"):
        assert remedy in message


@pytest.mark.parametrize("case", ["own mask", "rate of 0", "excluded", "small", "LoRA"])
def test_no_warning_where_the_rate_is_of_all_that_matters(case):
    model, arguments, (x, y) = own_network(), {}, blobs()
    if case == "own mask":
        arguments["mask"] = {"own/w": checkerboard((6, 8))}
    if case == "rate of 0":
        compiled(model, kf.FreezeOptimizer(sgd(), freeze_rate=0))
    if case == "excluded":
        model = own_network(exclude="own")
    if case == "small":
        wide = [keras.Input((6,)), keras.layers.Dense(1_000), keras.layers.Dense(6), Own()]
        model = compiled(keras.Sequential(wide))
    if case == "LoRA":
        model = two_dense_layers()
        model.layers[0].enable_lora(2)
        compiled(model)
    assert warnings_of(lambda: kf.freeze(model, x, y, **arguments)) == []


FORMATS = ["csr_matrix", "csc_matrix", "coo_matrix", "lil_matrix", "dok_matrix", "csr_array"]


def sparse_and_dense(kind="csr_matrix"):
    x, y = blobs()
    x = x.astype("float64") * (np.random.default_rng(0).random(x.shape) < 0.5)
    x[7] = 0.0  # a row that is empty
    return getattr(scipy.sparse, kind)(x), x, y


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", FORMATS)
def test_sparse_matrices_of_scipy_give_the_mask_of_dense_ones(kind):
    sparse, x, y = sparse_and_dense(kind)
    expected = kf.freeze(compiled(two_dense_layers()), x, y)
    assert kf.freeze(compiled(two_dense_layers()), sparse, y) == expected


def test_sparse_matrices_are_cut_and_come_in_batches():
    sparse, x, y = sparse_and_dense()
    cut = kf.freeze(compiled(two_dense_layers()), sparse, y, batch_size=20)
    assert cut == kf.freeze(compiled(two_dense_layers()), x, y, batch_size=20)
    halves = [slice(0, 24), slice(24, 48)]
    batches = [[(data[rows], y[rows]) for rows in halves] for data in (sparse, x)]
    masks = [kf.freeze(compiled(two_dense_layers()), iter(b), steps=2) for b in batches]
    assert masks[0] == masks[1]


def test_everything_that_reads_data_takes_sparse_matrices():
    sparse, x, y = sparse_and_dense()
    model = compiled(two_dense_layers())
    scores = [kf.compute_saliency(model, data, y) for data in (sparse, x)]
    for path, found in scores[0].items():
        np.testing.assert_allclose(found, scores[1][path], rtol=1e-5, atol=1e-7)
    kf.freeze(model, sparse, y)
    fit(model, sparse, y)
    flows = [kf.gradient_flow(model, data, y, batch_size=20) for data in (sparse, x)]
    assert flows[0] == pytest.approx(flows[1], rel=1e-5)
    checks = [kf.check_pruning(model, data, y) for data in (sparse, x)]
    assert checks[0].after["loss"] == pytest.approx(checks[1].after["loss"], rel=1e-5)


def test_sparse_arrays_of_one_dimension_are_refused():
    _, x, y = sparse_and_dense()
    with pytest.raises(ValueError, match=r"`y` must be arrays; a sparse array.*Received: y=.*48"):
        kf.freeze(compiled(two_dense_layers()), x, scipy.sparse.coo_array(y))


@pytest.mark.cases(1)
@pytest.mark.parametrize("first", ["as Keras draws", "reinitialized", "trained"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_frozen_biases_of_recurrent_layers_are_saved(tmp_path, cell, first):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4, 3)), getattr(keras.layers, cell)(5), keras.layers.Dense(3)]
    model = compiled(keras.Sequential(layers))
    x, y = np.random.default_rng(0).random((20, 4, 3)).astype("float32"), np.arange(20) % 3
    if first == "reinitialized":
        kf.reinitialize(model, seed=0)
    if first == "trained":
        model.compile(sgd(), "mse")
        fit(model, x, np.eye(3)[y])
        compiled(model)
    bias = model.layers[0].cell.bias
    trained = checkerboard(bias.shape)
    mask = kf.freeze(model, mask={bias.path: trained})
    start = value_of(bias)
    fit(model, x, y)
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze")
    assert kf.get_mask(loaded) == mask
    assert same_bits(value_of(loaded.layers[0].cell.bias)[~trained], start[~trained])
    for new, old in zip(loaded.get_weights(), model.get_weights(), strict=True):
        assert same_bits(new, old)


def test_frozen_weights_of_no_known_start_are_still_refused(tmp_path):
    model = compiled(two_dense_layers())
    model.compile(sgd(), crossentropy())
    fit(model, *blobs())
    compiled(model)
    kf.freeze(model, *blobs())
    with pytest.raises(ValueError, match="come neither from a known seed"):
        kf.save(model, tmp_path / "model.freeze")


def test_a_mask_that_came_with_weights_is_found_before_it_is_chosen_again(tmp_path):
    """As Hyperband resumes a trial: build the model, load weights, call `fit` of the hypermodel."""

    def fit_trial(model):
        if kf.get_mask(model) is None:
            kf.freeze(model, x, y)
        return fit(model, x, y)

    x, y = blobs()
    model = compiled(two_dense_layers())
    fit_trial(model)
    mask = kf.get_mask(model)
    model.save_weights(tmp_path / "trial.weights.h5")
    resumed = compiled(two_dense_layers(seed=1))
    resumed.load_weights(tmp_path / "trial.weights.h5")
    frozen = [value_of(layer.kernel)[~mask[layer.kernel]] for layer in model.layers]
    with pytest.raises(ValueError, match=r"Hyperband resumes.*`keras_freeze.get_mask\(model\) is"):
        kf.freeze(resumed, x, y)
    fit_trial(resumed)
    assert kf.get_mask(resumed) == mask
    for layer, old in zip(resumed.layers, frozen, strict=True):
        assert same_bits(value_of(layer.kernel)[~kf.get_mask(resumed)[layer.kernel]], old)
