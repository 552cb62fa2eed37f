"""Masks with a structure: the same by `freeze` and by the first batch, in files, while training."""

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
    fit,
    same_bits,
    sgd,
    value_of,
    values_of,
)
from structures import budget_of, mask_by_hand, units_of

import keras_freeze as kf
from keras_freeze import backend
from keras_freeze.masks import Structure
from keras_freeze.masks.selection import rescue_index
from keras_freeze.masks.structure import choose, select_units
from keras_freeze.storage.container import read_container

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)

X, Y = blobs()
RATE = 0.7
STRUCTURES = {
    "column": Structure("column"),
    "column by sum": Structure("column", score="sum"),
    "row": Structure("row"),
    "blocks": Structure((3, 4)),
    "2:4": Structure("2:4"),
}


def network(seed=3):
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
        name="conv_net",
    )
    kf.reinitialize(model, "kaiming_uniform", seed=seed)
    return model


SHAPES = [(3, 1, 10), (20, 8), (8, 30), (30, 3)]


def freezer(structure, rate=RATE, **arguments):
    return kf.FreezeOptimizer(sgd(), rate, structure=structure, **arguments)


def decided(way, structure, rate=RATE, compile_arguments=None, **arguments):
    """A network with the mask that these settings give, trained for a step by the first batch."""
    model = compiled(network(), freezer(structure, rate, **arguments), **compile_arguments or {})
    if way == "freeze":
        kf.freeze(model, X, Y)
    else:
        fit(model, X, Y, batch_size=len(X))
    return model


def masks_in(model):
    return [entry.trained for entry in kf.get_mask(model).entries]


def with_rescued(masks, structure, seed):
    """What the at-least-one rule makes of masks, and how many weights it adds."""
    added = 0
    for position, mask in zip((0, 2, 4, 6), masks, strict=True):
        if mask.any():
            continue
        units = sorted(units_of(mask.shape, structure.units).items())
        for index in units[rescue_index(seed, position, len(units))][1]:
            mask[index] = True
            added += 1
    return added


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["freeze", "first batch", "first batch, compiled by XLA"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_masks_are_those_of_brute_force(name, way):
    structure, model = STRUCTURES[name], compiled(network(), freezer(None))
    scores = list(kf.compute_saliency(model, X, Y).values())
    expected = mask_by_hand(scores, budget_of(RATE, SHAPES), structure.units, structure.score)
    added = 0 if name == "2:4" else with_rescued(expected, structure, 0)
    xla = {"jit_compile": way.endswith("XLA") and keras.backend.backend() != "torch"}
    model = decided(way, structure, compile_arguments=xla)
    for one, other in zip(masks_in(model), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert kf.get_mask(model).num_rescued == kf.report(model).num_rescued == added


def compile_function(function):
    """A function as the first batch runs it, compiled where that is possible."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    return function


@pytest.mark.cases(4, tensorflow=0)
@pytest.mark.parametrize("name", STRUCTURES)
def test_equal_scores_give_equal_masks_both_ways(name):
    structure, shapes = STRUCTURES[name], [(5, 5, 7, 64), (1000, 33), (257,), (2, 3)]
    rng = np.random.default_rng(0)
    scores = [np.abs(rng.normal(size=s)).astype("float32") for s in shapes]
    scores[1][:, ::2] = scores[1][:, 1:2]  # ties of units
    size = sum(array.size for array in scores)

    def in_graph(*arrays):
        top = backend.top_k_mask
        return [
            choose(structure, arrays, shapes, budget, keras.ops, top)
            for budget in (0, 1000, size // 3, size)
        ]

    flat = [keras.ops.convert_to_tensor(array.reshape(-1)) for array in scores]
    found = compile_function(in_graph)(*flat)
    for masks, budget in zip(found, (0, 1000, size // 3, size), strict=True):
        expected = select_units(structure, scores, budget)
        for one, other in zip(masks, expected, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), other)


@pytest.mark.cases(1, jax=0)
@pytest.mark.parametrize("criterion", ["magnitude", "random", lambda w, g: g * w])
@pytest.mark.parametrize("name", STRUCTURES)
def test_other_criteria_train_the_same_both_ways(name, criterion):
    one, other = (
        decided(way, STRUCTURES[name], criterion=criterion) for way in ("freeze", "first batch")
    )
    assert kf.get_mask(one) == kf.get_mask(other)
    assert kf.get_mask(one).num_rescued == kf.get_mask(other).num_rescued


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_layers_that_nothing_fits_into_train_one_unit(name, way):
    structure, model = STRUCTURES[name], decided(way, STRUCTURES[name], rate=0.9999, seed=5)
    expected = [np.zeros(shape, bool) for shape in SHAPES]
    if name == "2:4":
        for position, mask in zip((0, 2, 4, 6), expected, strict=True):
            mask.reshape(-1)[rescue_index(5, position, mask.size)] = True
        added = 4
    else:
        added = with_rescued(expected, structure, 5)
    for one, other in zip(masks_in(model), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert kf.get_mask(model).num_rescued == kf.report(model).num_rescued == added
    assert (f"{added} of them" in str(kf.report(model))) == (added > 0)


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_a_pattern_freezes_weights_at_a_rate_of_zero(way):
    model = network()
    start = values_of(model.trainable_variables)
    model = decided(way, "1:4", rate=0)
    # Of 1, 5, 2 and 8 groups along the input axis, since the convolution has three positions.
    assert [int(m.sum()) for m in masks_in(model)] == [30, 40, 60, 24]
    fit(model, X, Y, batch_size=8)
    assert_frozen_bits_kept(model.trainable_variables, kf.get_mask(model), start)
    assert kf.get_mask(decided(way, "column", rate=0)).freeze_rate == 0


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("distribution", ["uniform", "erk", {"conv*": 0.5, "head": 0.25}])
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_structures_apply_to_the_groups_of_a_distribution(way, distribution):
    scores = list(kf.compute_saliency(compiled(network(), freezer(None)), X, Y).values())
    paths = ["conv1/kernel", "fc1/kernel", "fc2/kernel", "head/kernel"]
    expected = kf.FreezeMask.from_scores(
        scores,
        RATE,
        positions=[0, 2, 4, 6],
        paths=paths,
        distribution=distribution,
        structure="column",
    )
    found = kf.get_mask(decided(way, "column", distribution=distribution))
    assert found == expected
    assert found.num_rescued == expected.num_rescued


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("frozen_weights", ["keep", "zero"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_network_trains_on_with_what_was_frozen_kept(name, frozen_weights):
    model = network()
    start = values_of(model.trainable_variables)
    model = decided("first batch", STRUCTURES[name], frozen_weights=frozen_weights)
    mask = kf.get_mask(model)
    fit(model, X, Y, batch_size=16, epochs=2)
    assert kf.get_mask(model) == mask
    if frozen_weights == "zero":
        start = [np.zeros_like(value) for value in start]
    assert_frozen_bits_kept(model.trainable_variables, mask, start)
    assert_trained_moved(model.trainable_variables, mask, start)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("criterion", ["synflow", kf.criteria.IterativeSNIP(4)])
def test_criteria_in_steps_prune_whole_units(name, criterion):
    structure = STRUCTURES[name]
    model = compiled(network(), freezer(structure, 0.5, criterion=criterion, frozen_weights="zero"))
    mask = kf.freeze(model, X, Y)
    if name == "2:4":
        assert mask.num_trained == 260
        return
    assert mask.num_trained - mask.num_rescued <= 260
    for entry in mask.entries:
        for indices in units_of(entry.trained.shape, structure.units).values():
            assert len({bool(entry.trained[index]) for index in indices}) == 1


@pytest.mark.same_on_all
def test_a_pattern_is_approached_in_steps():
    seen = []

    class Spy(kf.criteria.IterativeCriterion):
        def score(self, weights, gradients, mask):
            seen.append(keras.ops.convert_to_numpy(mask))
            return keras.ops.where(mask, keras.ops.abs(weights), -1.0)

    model = compiled(network(), freezer("1:4", 0, criterion=Spy(2), frozen_weights="zero"))
    mask = kf.freeze(model, X, Y)
    assert [int(m.sum()) for m in seen[4:]] == [30, 80, 120, 48]  # 2 of each 4
    assert [int(e.trained.sum()) for e in mask.entries] == [30, 40, 60, 24]


def test_drawn_masks_have_no_structure():
    model = compiled(network(), freezer("column"))
    with pytest.raises(ValueError, match=r"`drawn` must be False .*structure='column'"):
        kf.freeze(model, X, Y, drawn=True)
    assert kf.get_mask(model) is None


@pytest.mark.cases(None, tensorflow=0)
def test_a_mask_of_the_user_may_have_any_form():
    model = compiled(network(), freezer("column"))
    own = np.eye(20, 8, dtype=bool)
    mask = kf.freeze(model, mask={"fc1/kernel": own})
    np.testing.assert_array_equal(mask["fc1/kernel"], own)


@pytest.mark.cases(1)
@pytest.mark.parametrize("structure", ["column", "row", (3, 4)])
def test_a_mask_with_parts_of_units_does_not_move(structure):
    """As many units would join as leave, and whole ones have more weights."""
    model = compiled(network(), freezer(structure))
    mask = kf.freeze(model, mask={"fc1/kernel": np.eye(20, 8, dtype=bool)})
    regrow = kf.callbacks.RegrowTrained(0.5, frequency=1, criterion="random")
    with pytest.raises(ValueError, match="a mask with parts of them in 'conv_net/fc1/kernel'"):
        fit(model, X, Y, callbacks=[regrow])
    assert kf.get_mask(model) == mask


# Settings


@pytest.mark.same_on_all
def test_another_optimizer_inherits_the_mask_with_the_same_structure_only():
    model = decided("freeze", "column")
    mask = kf.get_mask(model)
    compiled(model, freezer("column"))
    fit(model, X, Y)
    assert kf.get_mask(model) == mask
    for other in (None, "row", (4, 4), Structure("column", "sum")):
        compiled(model, freezer(other))
        with pytest.raises(ValueError, match=r"already frozen with .*structure='column'"):
            fit(model, X, Y)


@pytest.mark.cases(None, tensorflow=0)
def test_the_at_least_one_rule_is_known_of_inherited_masks():
    model = decided("freeze", "column", rate=0.9999)
    before = kf.get_mask(model).num_rescued
    compiled(model, freezer("column", rate=0.9999))
    fit(model, X, Y)
    assert kf.get_mask(model).num_rescued == before == 3 + 20 + 8 + 30


def test_the_configuration_names_a_structure():
    for structure, stored in [("row", ["row", "mean"]), ((4, 8), [[4, 8], "mean"])]:
        optimizer = freezer(structure)
        assert optimizer.get_config()["structure"] == stored
        again = kf.FreezeOptimizer.from_config(json.loads(json.dumps(optimizer.get_config())))
        assert again.settings == optimizer.settings
    assert "structure" not in freezer(None).get_config()


# Files


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_keras_files_keep_the_structure(name, way, tmp_path):
    model = decided(way, STRUCTURES[name])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.settings == model.optimizer.settings
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert kf.get_mask(loaded).num_rescued == kf.get_mask(model).num_rescued
    for one in (model, loaded):
        fit(one, X, Y, batch_size=16)
    pairs = zip(model.get_weights(), loaded.get_weights(), strict=True)
    assert all(same_bits(one, other) for one, other in pairs)
    assert kf.freeze(loaded, X, Y, overwrite=True) == kf.freeze(model, X, Y, overwrite=True)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("inner", [keras.optimizers.SGD, keras.optimizers.Lamb])
def test_an_undecided_optimizer_is_saved_with_its_structure(inner, tmp_path):
    model = compiled(network(), kf.FreezeOptimizer(inner(0.1), RATE, structure="column"))
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        fit(one, X, Y, batch_size=len(X))
    assert kf.get_mask(loaded) == kf.get_mask(model)
    loaded.save(tmp_path / "decided.keras")  # the dense update stays with Lamb
    again = keras.models.load_model(tmp_path / "decided.keras")
    assert kf.get_mask(again) == kf.get_mask(model)
    assert kf.get_mask(again).num_rescued == kf.get_mask(model).num_rescued


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("criterion", ["snip", "random", "magnitude"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_files_keep_the_structure(name, criterion, tmp_path):
    structure = STRUCTURES[name]
    model = decided("freeze", structure, criterion=criterion)
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
    assert path.read_bytes()[8] == 2
    found = read(path)
    for (_, mask), expected in zip(sorted(found.masks.items()), masks_in(model), strict=True):
        np.testing.assert_array_equal(mask, expected)
    assert bool(found.reads["tiles"]) == (name == "blocks")
    shown = list(structure.units) if name == "blocks" else structure.units
    described = [shown, structure.score]
    assert settings_of(found.header) == [(RATE, criterion, "keep", 0, "global", described)]


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize(
    "rest",
    [
        ["global", None],
        ["global", ["columns", "mean"]],
        ["global", ["column", "max"]],
        ["global", [[0, 4], "mean"]],
        ["global", [[4, 1e9], "mean"]],
        ["global", [[4, 10**30], "mean"]],
        ["global", ["4:2", "mean"]],
        ["global", ["2:4", "sum"]],
        ["global", {"units": "column"}],
        ["global", 3],
        [None, ["column", "mean"]],
        ["global", ["column", "mean"], 0],
    ],
)
def test_files_with_another_structure_are_refused(rest, tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(decided("freeze", "column"), path)
    container = read_container(path)
    container.header["settings"] = [[RATE, "snip", "keep", 0, *rest]]
    sections = container.mask, container.exponents, container.mantissas
    path.write_bytes(sealed(json.dumps(container.header).encode(), *sections, version=2))
    with pytest.raises(kf.FreezeFileError, match="header of the file is not valid"):
        kf.load(path)
