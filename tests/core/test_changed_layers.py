"""Layers that are quantized, given LoRA or made untrainable after their model was frozen."""

import axes
import keras
import numpy as np
import pytest
from helpers import blobs, compiled, fit, is_weight, same_bits, sgd, value_of
from keras import layers as kl

import keras_freeze as kf

LAYERS = {
    "Dense": lambda: kl.Dense(8, name="body"),
    "EinsumDense": lambda: kl.EinsumDense("ab,bc->ac", 8, bias_axes="c", name="body"),
    "Embedding": lambda: kl.Embedding(9, 4, name="body"),
}
CHANGES = {
    "int8": lambda model: model.layers[0].quantize("int8"),
    "int4": lambda model: model.layers[0].quantize("int4"),
    "float8": lambda model: model.layers[0].quantize("float8"),
    "all int8": lambda model: model.quantize("int8"),
    "lora": lambda model: model.layers[0].enable_lora(2),
    "untrainable": lambda model: setattr(model.layers[0], "trainable", False),
    "all untrainable": lambda model: setattr(model, "trainable", False),
}
REPLACED = ("int8", "int4", "all int8")  # kernels by integers
CASES = [
    (layer, change)
    for layer in LAYERS
    for change in CHANGES
    if (layer, change) != ("Embedding", "float8")  # which Keras does not have
    and not (axes.BACKEND == "torch" and change == "float8")
]


def trained(layer, way="freeze", inner=None):
    keras.utils.set_random_seed(0)
    x, y = blobs()
    if layer == "Embedding":
        x = np.abs(x).astype("int32") % 9
    model = keras.Sequential(
        [keras.Input((6,)), LAYERS[layer](), kl.Flatten(), kl.Dense(3, name="head")]
    )
    compiled(model, kf.FreezeOptimizer(inner or keras.optimizers.Adam(), 0.75))
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y)
    return model, x, y


def entry_of(mask, name):
    return next((e for e in mask.entries if name in e.path), None)


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.filterwarnings("ignore:Layer .* does not have")
@pytest.mark.parametrize("way", axes.WAYS)
@pytest.mark.parametrize(("layer", "change"), CASES)
def test_a_changed_model_loads_with_a_warning_and_keeps_what_mask_it_can(
    layer, change, way, tmp_path
):
    model, x, y = trained(layer, way)
    mask = kf.get_mask(model)
    CHANGES[change](model)
    model.save(tmp_path / "changed.keras")
    with pytest.warns(UserWarning, match="The model's trainable variables are not those"):
        loaded = keras.models.load_model(tmp_path / "changed.keras")
    outputs = [value_of(m(x)) for m in (loaded, model)]
    np.testing.assert_allclose(*outputs, rtol=1e-4, atol=1e-5)
    kept = kf.get_mask(loaded)
    is_whole = {"head": change.startswith("all"), "body": change != "float8"}
    for name, is_gone in is_whole.items():
        entry = entry_of(kept, name)
        assert (entry is None) == is_gone
        if entry is not None:
            assert np.array_equal(entry.trained, entry_of(mask, name).trained)
    before = [value_of(v) for v in loaded.variables]
    if not loaded.trainable_variables:
        return
    fit(loaded, x, y)
    for variable, old in zip(loaded.variables, before, strict=True):
        entry = next((e for e in kept.entries if e.path == variable.path), None)
        if entry is not None:
            assert same_bits(value_of(variable)[~entry.trained], old[~entry.trained])
    assert any((value_of(v) != old).any() for v, old in zip(loaded.variables, before, strict=True))


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.filterwarnings("ignore:Layer .* does not have")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("change", REPLACED)
def test_what_speaks_of_frozen_weights_says_that_they_were_quantized(layer, change):
    model, x, y = trained(layer)
    CHANGES[change](model)
    before = [value_of(v) for v in model.variables]
    asked = (kf.report, kf.prune, lambda m: kf.check_pruning(m, x, y))
    for ask in asked:
        with pytest.raises(ValueError, match=r"been quantized since .*'body': 'int"):
            ask(model)
    for variable, old in zip(model.variables, before, strict=True):
        assert np.array_equal(value_of(variable), old)


@pytest.mark.cases(2, tensorflow=0, jax=0)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("change", ["float8", "lora", "untrainable", "all untrainable"])
def test_counts_and_pruning_are_right_where_kernels_stay(layer, change):
    if (layer, change) not in CASES:
        pytest.skip("which Keras does not have")
    model, x, y = trained(layer, inner=sgd(0.01))
    mask = kf.get_mask(model)
    CHANGES[change](model)
    of_head = entry_of(mask, "head").trained
    of_all = [e.trained for e in mask.entries]
    expected = {"float8": of_all, "all untrainable": []}.get(change, [of_head])
    report = kf.report(model)
    assert report.num_weights == sum(array.size for array in expected)
    assert report.num_trained_weights == sum(int(array.sum()) for array in expected)
    frozen = [
        np.abs(value_of(v))[~mask[v]].max()
        for v in model.variables
        if is_weight(v) and v.path in mask.paths
    ]
    assert kf.check_pruning(model, x, y).largest_frozen_weight == pytest.approx(max(frozen))
    kf.prune(model)
    for variable in model.variables:
        if is_weight(variable) and variable.path in mask.paths:
            assert not value_of(variable)[~mask[variable]].any()


def test_an_optimizer_from_another_networks_configuration_does_not_step():
    model, _, _ = trained("Dense")
    optimizer = kf.FreezeOptimizer.from_config(model.optimizer.get_config())
    other = keras.Sequential([keras.Input((6,)), kl.Dense(3)])
    compiled(other, optimizer)
    before = [value_of(v) for v in other.variables]
    with pytest.raises(ValueError, match="configuration of another network"):
        fit(other, *blobs())
    if axes.BACKEND != "jax":  # where Keras loses a model's weights after an error
        assert all(map(same_bits, [value_of(v) for v in other.variables], before))
