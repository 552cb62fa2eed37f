"""Where the freezing rate applies: the same masks by `freeze` and by the first batch, and files."""

import json

import keras
import numpy as np
import pytest
from file_layout import sealed
from format_reader import read, settings_of
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    compiled,
    crossentropy,
    fit,
    gradients_by_autodiff,
    is_weight,
    same_bits,
    sgd,
    value_of,
    values_of,
)

import keras_freeze as kf
from keras_freeze import backend
from keras_freeze.masks.selection import rescue_index
from keras_freeze.optimizer.processes import check_agreement
from keras_freeze.parameters import classify
from keras_freeze.storage.container import read_container

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)

X, Y = blobs()
RATE = 0.87
DISTRIBUTIONS = {
    "uniform": "uniform",
    "erk": "erk",
    "patterns": {"conv*": 0.5, "fc2": 0.875, "head/kernel": 0.25},
}
# By hand. The kernels have 30, 160, 240 and 90 weights, of which floor(0.13 * 520) = 67 are
# trained. Their dimensions sum up to 14, 28, 38 and 33, so that the scale of ERK is 67.6 / 113.
COUNTS = {
    "uniform": [4, 21, 31, 11],  # 3.9, 20.8, 31.2, 11.7
    "erk": [8, 17, 22, 20],  # 8.38, 16.75, 22.73, 19.74
    "patterns": [15, 20, 30, 67],  # 15, 20.8 at q, 30, 67.5
}


def network(seed=3, name="conv_net"):
    """Kernels of 3 x 1 x 10, 20 x 8, 8 x 30 and 30 x 3."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Reshape((6, 1)),
            keras.layers.Conv1D(10, 3, activation="tanh", name="conv1"),
            keras.layers.MaxPooling1D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(8, "tanh", name="fc1"),
            keras.layers.Dense(30, "tanh", name="fc2"),
            keras.layers.Dense(3, name="head"),
        ],
        name=name,
    )
    kf.reinitialize(model, "kaiming_uniform", seed=seed)
    return model


def freezer(distribution, rate=RATE, **arguments):
    return kf.FreezeOptimizer(sgd(), rate, distribution=distribution, **arguments)


def decided(way, distribution, rate=RATE, compile_arguments=None, **arguments):
    """A network with the mask that these settings give, trained for a step by the first batch."""
    model = compiled(network(), freezer(distribution, rate, **arguments), **compile_arguments or {})
    if way == "freeze":
        kf.freeze(model, X, Y)
    else:
        fit(model, X, Y, batch_size=len(X))
    return model


def counts(model):
    return [int(entry.trained.sum()) for entry in kf.get_mask(model).entries]


def weights_of(model):
    return [v for v in model.trainable_variables if is_weight(v)]


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("way", ["freeze", "first batch", "first batch, compiled by XLA"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_largest_scores_of_each_layer_are_trained(name, way):
    model = network()
    weights, gradients = weights_of(model), gradients_by_autodiff(model, X, Y)
    found = dict(zip([v.path for v in model.trainable_variables], gradients, strict=True))
    scores = [np.abs(value_of(v) * found[v.path]).reshape(-1) for v in weights]
    xla = {"jit_compile": way.endswith("XLA") and keras.backend.backend() != "torch"}
    mask = kf.get_mask(decided(way, DISTRIBUTIONS[name], compile_arguments=xla))
    for entry, score, count in zip(mask.entries, scores, COUNTS[name], strict=True):
        expected = np.sort(np.argsort(-score, kind="stable")[:count])
        assert np.flatnonzero(entry.trained).tolist() == expected.tolist()
    assert mask.num_rescued == 0


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("criterion", ["magnitude", "random"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_criteria_without_data_train_as_many_weights_both_ways(name, criterion):
    by_freeze, by_batch = (
        decided(way, DISTRIBUTIONS[name], criterion=criterion) for way in ("freeze", "first batch")
    )
    assert counts(by_freeze) == COUNTS[name]
    assert kf.get_mask(by_freeze) == kf.get_mask(by_batch)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("arguments", [{"criterion": "grasp"}, {"criterion": lambda w, g: g * w}])
def test_signed_scores_train_as_many_weights(arguments):
    for name, distribution in DISTRIBUTIONS.items():
        assert counts(decided("freeze", distribution, **arguments)) == COUNTS[name]


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
@pytest.mark.parametrize("distribution", ["uniform", "erk", {"*": 0.999}])
def test_layers_without_a_share_train_one_weight(distribution, way):
    model = decided(way, distribution, rate=0.999, seed=5)  # of 520 weights, none
    mask = kf.get_mask(model)
    for entry in mask.entries:
        index = rescue_index(5, entry.position, entry.trained.size)
        assert np.flatnonzero(entry.trained).tolist() == [index]
    assert mask.num_rescued == kf.report(model).num_rescued == 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_a_pattern_may_freeze_all_of_a_layer_or_nothing(way):
    model = decided(way, {"conv1": 1, "head": 0})
    assert counts(model)[0] == 0
    assert counts(model)[3] == 90
    assert sum(counts(model)[1:3]) == 52  # of 400 weights at q, by one threshold
    assert kf.get_mask(model).num_rescued == 0


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_a_rate_of_zero_leaves_the_rates_of_patterns(way):
    model = network()
    start = values_of(model.trainable_variables)
    model = decided(way, {"fc2": 0.5}, rate=0)
    assert counts(model) == [30, 160, 120, 90]
    assert len(model.optimizer.starts) == 4  # what the weights were drawn from
    fit(model, X, Y, batch_size=8)
    assert_frozen_bits_kept(model.trainable_variables, kf.get_mask(model), start)


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_network_trains_on_with_what_was_frozen_kept(name):
    model = network()
    start = values_of(model.trainable_variables)
    model = decided("first batch", DISTRIBUTIONS[name])
    mask = kf.get_mask(model)
    fit(model, X, Y, batch_size=16, epochs=2)
    assert kf.get_mask(model) == mask
    assert_frozen_bits_kept(model.trainable_variables, mask, start)
    assert_trained_moved(model.trainable_variables, mask, start)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_masks_are_drawn_with_the_same_numbers(name):
    model = compiled(network(), freezer(DISTRIBUTIONS[name]))
    kf.freeze(model, X, Y, drawn=True)
    assert counts(model) == COUNTS[name]


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_report_counts_what_is_trained(name):
    report = kf.report(decided("freeze", DISTRIBUTIONS[name]))
    trained, biases = sum(COUNTS[name]), 10 + 8 + 30 + 3
    assert [row.num_trained for row in report.rows if row.is_weight] == COUNTS[name]
    assert report.freeze_rate == pytest.approx(1 - trained / 520)
    assert report.real_freeze_rate == pytest.approx(1 - (trained + biases) / (520 + biases))


def test_what_is_excluded_has_no_share():
    model = decided("freeze", "uniform", exclude="fc2")
    assert counts(model) == [4, 21, 11]  # 3.9, 20.8 and 11.7 of floor(36.4)
    assert [entry.path.split("/")[1] for entry in kf.get_mask(model).entries] == [
        "conv1",
        "fc1",
        "head",
    ]


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
@pytest.mark.parametrize("pattern", ["fc3", "head", "fc1/bias"])
def test_a_pattern_that_matches_no_weight_is_named(pattern, way):
    with pytest.raises(ValueError, match=f"`distribution` .*'conv1/kernel'.*'{pattern}'"):
        decided(way, {"fc1/kernel": 0.5, pattern: 0.5}, exclude="head")


class WithAnUnusedWeight(keras.Model):
    """Passes the gradients of one of its two weights to the optimizer."""

    def __init__(self):
        super().__init__()
        self.used = keras.layers.Dense(3, name="used")
        self.unused = keras.layers.Dense(5, name="unused")

    def build(self, shape):
        self.used.build(shape)
        self.unused.build(shape)
        self.built = True

    def call(self, x):
        return self.used(x)


def test_a_pattern_may_match_a_weight_that_has_no_gradient_in_a_train_step():
    if keras.backend.backend() != "torch":
        pytest.skip("the train step is that of PyTorch")

    class Model(WithAnUnusedWeight):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            variables = [v for v in self.trainable_weights if v.value.grad is not None]
            self.optimizer.apply([v.value.grad for v in variables], variables)
            return {"loss": loss}

    model = compiled(Model(), freezer({"unused/kernel": 0.9}, rate=0.5))
    model.build((None, 6))
    kf.freeze(model, X, Y)
    assert counts(model) == [9]


# Settings


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("name", ["global", *DISTRIBUTIONS])
def test_another_optimizer_inherits_the_mask_with_the_same_distribution_only(name):
    distribution = DISTRIBUTIONS.get(name, "global")
    model = decided("freeze", distribution)
    mask = kf.get_mask(model)
    compiled(model, freezer(distribution))
    fit(model, X, Y)
    assert kf.get_mask(model) == model.optimizer.mask == mask
    others = [d for other, d in DISTRIBUTIONS.items() if other != name]
    for other in [*others, {"conv*": 0.5}, {"*": RATE}]:
        compiled(model, freezer(other))
        with pytest.raises(ValueError, match=r"already frozen with .*Received: .* distribution="):
            fit(model, X, Y)
        assert kf.get_mask(model) == mask
    compiled(model, freezer("global"))
    if name == "global":
        fit(model, X, Y)
    else:
        with pytest.raises(ValueError, match=r"already frozen with .* distribution="):
            fit(model, X, Y)


def test_the_configuration_names_other_distributions_than_global():
    patterns = {"conv*": 0.5, "a": 0.25}
    for distribution, stored in [("erk", "erk"), (patterns, [["conv*", 0.5], ["a", 0.25]])]:
        optimizer = freezer(distribution)
        assert optimizer.get_config()["distribution"] == stored
        again = kf.FreezeOptimizer.from_config(optimizer.get_config())
        assert again.distribution == optimizer.distribution
        assert again.settings == optimizer.settings
    assert "distribution" not in freezer("global").get_config()


def test_processes_must_have_the_same_distribution(monkeypatch):
    sent = []

    def gather(content):
        sent.append(content)
        return sent

    monkeypatch.setattr(backend, "num_processes", lambda: 2)
    monkeypatch.setattr(backend, "gather_bytes", gather)
    parameters = classify(network().trainable_variables)
    for name in ("erk", "erk"):
        check_agreement(freezer(name), parameters)
    with pytest.raises(ValueError, match=r"settings of the FreezeOptimizer .* 0, 1 / 2"):
        check_agreement(freezer("uniform"), parameters)


# Files


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_keras_files_keep_the_distribution(name, way, tmp_path):
    model = decided(way, DISTRIBUTIONS[name])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.settings == model.optimizer.settings
    assert kf.get_mask(loaded) == kf.get_mask(model)
    for one in (model, loaded):
        fit(one, X, Y, batch_size=16)
    pairs = zip(model.get_weights(), loaded.get_weights(), strict=True)
    assert all(same_bits(one, other) for one, other in pairs)
    mask = kf.get_mask(model)
    assert kf.freeze(loaded, X, Y, overwrite=True) == kf.freeze(model, X, Y, overwrite=True)
    assert counts(loaded) == COUNTS[name]
    assert kf.get_mask(model) != mask


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("inner", [keras.optimizers.SGD, keras.optimizers.Lamb])
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_a_layer_with_a_rate_of_its_own_may_become_untrainable(way, inner, tmp_path):
    distribution = {"fc2": 0.875, "conv*": 0.5}
    model = compiled(network(), kf.FreezeOptimizer(inner(0.1), RATE, distribution=distribution))
    if way == "freeze":
        kf.freeze(model, X, Y)
    fit(model, X, Y)
    mask = kf.get_mask(model)
    model.get_layer("fc2").trainable = False
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    compiled(model, freezer(distribution))
    for one in (model, loaded):
        fit(one, X, Y)
        for name in ("conv1/kernel", "fc1/kernel", "head/kernel"):
            assert np.array_equal(kf.get_mask(one)[name], mask[name])
    with pytest.raises(ValueError, match="'fc2'"):
        kf.freeze(model, X, Y, overwrite=True)


@pytest.mark.same_on_all
def test_weights_do_not_bring_a_mask_of_another_distribution(tmp_path):
    decided("freeze", "erk").save_weights(tmp_path / "model.weights.h5")
    model = compiled(network(), freezer("uniform"))
    with pytest.raises(ValueError, match=r"with .*distribution='erk'\. .*distribution='uniform'"):
        model.load_weights(tmp_path / "model.weights.h5")
    model = compiled(network(), freezer("erk"))
    model.load_weights(tmp_path / "model.weights.h5")
    assert counts(model) == COUNTS["erk"]


@pytest.mark.same_on_all
def test_patterns_with_the_name_of_the_model_are_kept_by_files(tmp_path):
    distribution = {"conv_net/conv1/kernel": 0.5}
    model = decided("freeze", distribution)
    expected = counts(model)
    assert expected[0] == 15
    model.save(tmp_path / "model.keras")
    kf.save(model, tmp_path / "model.freeze")
    for loaded in (
        keras.models.load_model(tmp_path / "model.keras"),
        kf.load(tmp_path / "model.freeze"),
    ):
        fit(loaded, X, Y)
        kf.freeze(loaded, X, Y, overwrite=True)
        assert counts(loaded)[0] == 15
        for same in ("conv1/kernel", "conv_net/conv1/kernel", "conv_net_1/conv1/kernel"):
            compiled(loaded, freezer({same: 0.5}))
            fit(loaded, X, Y)  # the mask is inherited
        for other in ("kernel", "conv_net/fc1/kernel", "conv2/kernel"):
            compiled(loaded, freezer({other: 0.5}))
            with pytest.raises(ValueError, match=r"already frozen with .*distribution="):
                fit(loaded, X, Y)


@pytest.mark.same_on_all
def test_a_model_of_another_name_loads_the_weights_of_the_same_distribution(tmp_path):
    model = decided("freeze", {"conv_net/conv1/kernel": 0.5})
    model.save_weights(tmp_path / "model.weights.h5")
    for distribution in ({"conv1/kernel": 0.5}, {"net/conv1/kernel": 0.5}):
        other = network(name="net")
        compiled(other, freezer(distribution)).load_weights(tmp_path / "model.weights.h5")
        assert kf.get_mask(other) == kf.get_mask(model)
    other = compiled(network(name="net"), freezer({"kernel": 0.5}))
    with pytest.raises(ValueError, match=r"decided with .*distribution="):
        other.load_weights(tmp_path / "model.weights.h5")


@pytest.mark.same_on_all
def test_a_layer_that_is_called_as_the_model_keeps_its_rate(tmp_path):
    layers = [keras.layers.Dense(5, name="net"), keras.layers.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="net")
    kf.freeze(compiled(model, freezer({"net/kernel": 0.5})), X, Y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        kf.freeze(one, X, Y, overwrite=True)
        assert counts(one) == [15, 1]


@pytest.mark.same_on_all
def test_excluded_layers_may_be_called_as_the_model(tmp_path):
    layers = [keras.layers.Dense(5, name="fc"), keras.layers.Dense(3, name="net")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="net")
    compiled(model, freezer("global", 0.5, exclude="net/kernel"))
    kf.freeze(model, X, Y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.exclude == ("net/kernel",)
    assert counts(loaded) == [15]


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("criterion", ["snip", "random", "magnitude"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_files_keep_the_distribution_and_derive_masks(name, criterion, tmp_path):
    model = decided("freeze", DISTRIBUTIONS[name], criterion=criterion)
    fit(model, X, Y, batch_size=16)
    path = tmp_path / "model.freeze"
    kf.save(model, path, include_optimizer=True)
    loaded = kf.load(path)
    assert loaded.optimizer.settings == model.optimizer.settings
    assert kf.get_mask(loaded) == kf.get_mask(model) == kf.FreezeMask.load(path)
    for one in (model, loaded):
        fit(one, X, Y, batch_size=16)
    for one, other in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(one), value_of(other))
    if criterion != "snip":
        assert kf.storage.inspect(path).num_bytes["mask"] <= 8
    assert path.read_bytes()[8] == 2
    found = read(path)
    assert [int(mask.sum()) for _, mask in sorted(found.masks.items())] == COUNTS[name]
    described = DISTRIBUTIONS[name]
    described = list(map(list, described.items())) if name == "patterns" else described
    assert settings_of(found.header) == [(RATE, criterion, "keep", 0, described, None)]
    compiled(loaded, freezer("global", criterion=criterion))
    with pytest.raises(ValueError, match=r"already frozen with .*distribution="):
        fit(loaded, X, Y)


@pytest.mark.same_on_all
def test_files_of_global_masks_do_not_name_the_distribution(tmp_path):
    model = decided("freeze", "global")
    kf.save(model, tmp_path / "model.freeze")
    header = read_container(tmp_path / "model.freeze").header
    assert header["settings"] == [[RATE, "snip", "keep", 0]]
    assert "distribution" not in header["model"]["compile_config"]["optimizer"]["config"]
    assert settings_of(header) == [(RATE, "snip", "keep", 0, "global", None)]
    assert (tmp_path / "model.freeze").read_bytes()[8] == 1


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize(
    "rest",
    [
        ["even"],
        [[]],
        [[["a", 2]]],
        [[["a", True]]],
        [[[1, 0.5]]],
        [3],
        [None],
        [[["a"]]],
        ["erk", 0],
    ],
)
def test_files_with_another_distribution_are_refused(rest, tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(decided("freeze", "erk"), path)
    container = read_container(path)
    container.header["settings"] = [[RATE, "snip", "keep", 0, *rest]]
    sections = container.mask, container.exponents, container.mantissas
    path.write_bytes(sealed(json.dumps(container.header).encode(), *sections, version=2))
    with pytest.raises(kf.FreezeFileError, match="header of the file is not valid"):
        kf.load(path)


def test_a_loop_of_ones_own_decides_by_its_first_step():
    model, optimizer = network(), freezer("erk")
    gradients = gradients_by_autodiff(model, X, Y, crossentropy())
    tensors = [keras.ops.convert_to_tensor(g) for g in gradients]
    optimizer.apply(tensors, model.trainable_variables)
    assert [int(e.trained.sum()) for e in optimizer.mask.entries] == COUNTS["erk"]
