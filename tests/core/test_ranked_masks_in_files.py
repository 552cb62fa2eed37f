"""Files of networks whose mask follows from a seed or from the start: they hold no mask."""

import json

import keras
import numpy as np
import pytest
from file_layout import sealed
from format_reader import read
from helpers import blobs, compiled, fit, same_bits, sgd, value_of

import keras_freeze as kf
from keras_freeze.storage.container import read_container

pytestmark = pytest.mark.same_on_all


def network(seed=3):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(40, "relu", name="body"),
            keras.layers.Dense(30, "relu", name="middle"),
            keras.layers.Dense(3, name="head"),
        ]
    )
    kf.reinitialize(model, "kaiming_uniform", seed=seed)
    return model


def frozen(model, criterion, rate=0.9, **arguments):
    optimizer = kf.FreezeOptimizer(sgd(), rate, criterion=criterion, **arguments)
    compiled(model, optimizer)
    kf.freeze(model, *blobs())
    fit(model, *blobs(), batch_size=16)
    return model


def mask_bytes(path):
    return kf.storage.inspect(path).num_bytes["mask"]


def assert_same_model(model, loaded):
    assert kf.get_mask(loaded) == kf.get_mask(model)
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


@pytest.mark.cases(1)
@pytest.mark.parametrize("frozen_weights", ["keep", "zero", "decay"])
@pytest.mark.parametrize("criterion", ["random", "magnitude", "snip"])
def test_a_mask_that_follows_from_the_start_takes_a_few_bytes(criterion, frozen_weights, tmp_path):
    path = tmp_path / "model.freeze"
    l2 = 0.01 if frozen_weights == "decay" else 0.0
    model = frozen(network(), criterion, frozen_weights=frozen_weights, l2=l2)
    kf.save(model, path)
    # A pruned network does not have its start any longer.
    follows = criterion == "random" or (criterion, frozen_weights) in {
        ("magnitude", "keep"),
        ("magnitude", "decay"),
    }
    assert (mask_bytes(path) <= 8) == follows
    assert_same_model(model, kf.load(path))
    found = read(path)
    masks = [mask for _, mask in sorted(found.masks.items())]
    entries = kf.get_mask(model).entries
    assert all(np.array_equal(m, e.trained) for m, e in zip(masks, entries, strict=True))
    assert (found.reads["ranked"] >= 2) == follows
    again = tmp_path / "again.freeze"
    kf.save(kf.load(path), again)
    assert mask_bytes(again) == mask_bytes(path)


@pytest.mark.cases(1)
@pytest.mark.parametrize("criterion", ["random", "magnitude"])
def test_the_mask_alone_is_read_where_it_follows_from_a_seed(criterion, tmp_path):
    path = tmp_path / "model.freeze"
    model = frozen(network(), criterion)
    kf.save(model, path)
    assert kf.FreezeMask.load(path) == kf.get_mask(model)
    assert kf.storage.inspect(path).freeze_rate == kf.report(model).freeze_rate


@pytest.mark.filterwarnings("ignore:The file stores the seeds of Keras:UserWarning")
def test_a_mask_of_weights_that_keras_drew_is_in_the_file(tmp_path):
    """Keras may draw other numbers one day, with which the mask should not be lost."""
    keras.utils.set_random_seed(0)
    head = keras.layers.Dense(9, kernel_initializer=keras.initializers.GlorotNormal(seed=3))
    model = frozen(keras.Sequential([keras.Input((6,)), head]), "magnitude", 0.5)
    kf.save(model, tmp_path / "model.freeze")
    assert mask_bytes(tmp_path / "model.freeze") > 8
    assert kf.FreezeMask.load(tmp_path / "model.freeze") == kf.get_mask(model)
    assert_same_model(model, kf.load(tmp_path / "model.freeze"))


def test_a_delta_on_a_base_holds_no_mask_of_magnitudes(tmp_path):
    base = network()
    compiled(base, keras.optimizers.Adam(0.01))
    fit(base, *blobs(), epochs=3)
    model = network()
    model.set_weights(base.get_weights())
    frozen(model, "magnitude")
    kf.save(model, tmp_path / "delta.freeze", base=base)
    assert mask_bytes(tmp_path / "delta.freeze") <= 8
    assert_same_model(model, kf.load(tmp_path / "delta.freeze", base=base))
    with pytest.raises(kf.FreezeFileError, match="load the model by"):
        kf.FreezeMask.load(tmp_path / "delta.freeze")
    kf.apply_delta(base, tmp_path / "delta.freeze")
    for a, b in zip(model.variables, base.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


def test_weights_that_were_trained_before_keep_their_mask_in_the_file(tmp_path):
    model = network()
    compiled(model, keras.optimizers.Adam(0.01))
    fit(model, *blobs(), epochs=3)
    frozen(model, "magnitude")
    kf.save(model, tmp_path / "model.freeze", include_frozen=True)
    assert mask_bytes(tmp_path / "model.freeze") > 8
    assert_same_model(model, kf.load(tmp_path / "model.freeze"))


def test_layers_that_were_given_one_weight_are_saved_as_they_are(tmp_path):
    for criterion in ("random", "magnitude"):
        model = frozen(network(), criterion, rate=0.999)
        assert kf.get_mask(model).num_rescued
        kf.save(model, tmp_path / "model.freeze")
        assert_same_model(model, kf.load(tmp_path / "model.freeze"))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "ranked", [7, [1], [1, 2, 3], [-1, 2], [True, 1], "magnitude", None, [2**64, 0]]
)
def test_files_with_a_wrong_ranking_are_refused(ranked, tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(frozen(network(), "random"), path)
    container = read_container(path)
    container.header["variables"][0]["ranked"] = ranked
    text = json.dumps(container.header).encode()
    sections = container.mask, container.exponents, container.mantissas
    path.write_bytes(sealed(text, *sections, version=2))
    with pytest.raises(kf.FreezeFileError):
        kf.load(path)


def changed(path, change):
    """Writes the file of a model again, with its header changed and all checksums right."""
    container = read_container(path)
    change(container.header)
    text = json.dumps(container.header).encode()
    sections = container.mask, container.exponents, container.mantissas
    path.write_bytes(sealed(text, *sections, version=2))


def test_a_mask_is_not_drawn_by_another_generator(tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(frozen(network(), "magnitude"), path)
    changed(path, lambda header: header.update(generator="another"))
    for read_file in (kf.load, kf.FreezeMask.load):
        with pytest.raises(kf.FreezeFileError, match="another"):
            read_file(path)


def test_axes_without_end_are_refused_at_once(tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(frozen(network(), "magnitude"), path)

    def change(header):
        parameters = {"scale": 1.0, "mode": "fan_in", "distribution": "uniform"}
        parameters.update(input_axes=[0] * 500_000, output_axes=[1])
        header["variables"][0]["source"] = ["seed", "variance_scaling", 0, 0, parameters]

    changed(path, change)
    for read_file in (kf.load, kf.FreezeMask.load):
        with pytest.raises(kf.FreezeFileError, match="has no axes"):
            read_file(path)


@pytest.mark.cases(3)
@pytest.mark.parametrize("change", ["constant", "nothing", "drawn", "no mask", "initializer"])
def test_rankings_without_starts_are_refused(change, tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(frozen(network(), "magnitude"), path)
    container = read_container(path)
    variable = container.header["variables"][0]
    if change == "constant":
        variable["source"] = ["constant", 0]
    elif change == "initializer":
        variable["source"] = ["initializer", {"class_name": "GlorotNormal", "config": {"seed": 1}}]
    elif change == "nothing":
        del variable["source"]
    elif change == "drawn":
        variable["drawn"] = [0, 0]
    else:
        del variable["mask"]
    text = json.dumps(container.header).encode()
    sections = container.mask, container.exponents, container.mantissas
    path.write_bytes(sealed(text, *sections, version=2))
    with pytest.raises(kf.FreezeFileError):
        kf.load(path)
