"""KerasHub's models, small and without pretrained weights: freeze, train, deltas, LoRA."""

import re
import warnings
from dataclasses import dataclass

import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    compiled,
    equals_by_hand,
    fit,
    gradients_by_autodiff,
    mask_by_hand,
    same_bits,
    value_of,
    values_of,
)
from processes import ROOT

import keras_freeze as kf

hub = pytest.importorskip(
    "keras_hub",
    reason="needs KerasHub: pip install --no-deps keras-hub regex tokenizers",
    exc_type=ImportError,
)

pytestmark = pytest.mark.cases(None, tensorflow=0, jax=0)

BATCH, WORDS, LENGTH, CLASSES = 8, 40, 6, 3
SIZES = {"vocabulary_size": WORDS, "num_layers": 1, "hidden_dim": 16, "intermediate_dim": 24}


# ---------------------------------------------------------------- models and their data


def tokens(seed=0):
    ids = np.random.default_rng(seed).integers(1, WORDS, size=(BATCH, LENGTH)).astype("int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}


def images(seed=0):
    return np.random.default_rng(seed).normal(size=(BATCH, 16, 16, 3)).astype("float32")


def classes():
    return np.arange(BATCH) % CLASSES


def next_tokens(x):
    return np.roll(x["token_ids"], -1, axis=1)


def bert(preprocessor=None):
    backbone = hub.models.BertBackbone(
        **SIZES, num_heads=2, max_sequence_length=LENGTH, dropout=0.0
    )
    x = tokens()
    x["segment_ids"] = np.zeros_like(x["token_ids"])
    model = hub.models.BertTextClassifier(backbone, CLASSES, preprocessor, dropout=0.0)
    return model, x, classes()


def gpt2(**arguments):
    backbone = hub.models.GPT2Backbone(
        **SIZES, num_heads=2, max_sequence_length=LENGTH, dropout=0.0, **arguments
    )
    x = tokens()
    return hub.models.GPT2CausalLM(backbone), x, next_tokens(x)


def gemma(**arguments):
    backbone = hub.models.GemmaBackbone(
        **SIZES, num_query_heads=2, num_key_value_heads=1, head_dim=8, **arguments
    )
    x = tokens()
    return hub.models.GemmaCausalLM(backbone, preprocessor=None), x, next_tokens(x)


def llama(**arguments):
    backbone = hub.models.LlamaBackbone(
        **SIZES, num_query_heads=2, num_key_value_heads=1, **arguments
    )
    x = tokens()
    return hub.models.LlamaCausalLM(backbone, preprocessor=None), x, next_tokens(x)


def mixtral():
    """A mixture of experts, each of whose kernels is one array of all experts."""
    backbone = hub.models.MixtralBackbone(
        **SIZES,
        num_query_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        top_k=1,
        router_aux_loss_coef=0.0,
    )
    x = tokens()
    return hub.models.MixtralCausalLM(backbone, preprocessor=None), x, next_tokens(x)


def with_head(backbone):
    """A decoder's logits; the backbone stays one layer, whose inner layers Keras need not know."""
    hidden = backbone(backbone.input)["decoder_sequence_output"]
    return keras.Model(backbone.input, keras.layers.Dense(WORDS, name="head")(hidden))


def t5():
    x = tokens()
    inputs = {f"{part}_{name}": x[name] for part in ("encoder", "decoder") for name in x}
    return (
        with_head(hub.models.T5Backbone(**SIZES, num_heads=2, dropout=0.0)),
        inputs,
        next_tokens(x),
    )


def whisper():
    backbone = hub.models.WhisperBackbone(
        **SIZES,
        num_heads=2,
        num_mels=8,
        max_encoder_sequence_length=8,
        max_decoder_sequence_length=LENGTH,
        dropout=0.0,
    )
    x = tokens()
    inputs = {f"decoder_{name}": value for name, value in x.items()}
    sound = np.random.default_rng(1).normal(size=(BATCH, 8, 8))
    return (
        with_head(backbone),
        {**inputs, "encoder_features": sound.astype("float32")},
        next_tokens(x),
    )


def vit(preprocessor=None, **arguments):
    backbone = hub.models.ViTBackbone(
        image_shape=(16, 16, 3),
        patch_size=8,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=24,
        **arguments,
    )
    model = hub.models.ViTImageClassifier(backbone, CLASSES, preprocessor=preprocessor)
    return model, images(), classes()


def resnet(**arguments):
    backbone = hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(16, 16, 3),
        **arguments,
    )
    model = hub.models.ResNetImageClassifier(backbone, CLASSES, preprocessor=None)
    return model, images(), classes()


# What makes each model, and the dtype policy of its backbone.
CASES = [
    (bert, None),
    (gpt2, "mixed_bfloat16"),
    (gemma, "bfloat16"),
    (gemma, None),
    (llama, None),
    (mixtral, None),
    (t5, None),
    (whisper, None),
    (vit, None),
    (resnet, None),
]


def name_of(case):
    make, dtype = case
    return make.__name__ if dtype is None else f"{make.__name__}-{dtype}"


def start(make, dtype=None, seed=0, **settings):
    """A model with the weights of the seed, compiled with a FreezeOptimizer, and its data."""
    keras.utils.set_random_seed(seed)
    model, x, y = make() if dtype is None else make(dtype=dtype)
    inner = keras.optimizers.AdamW(0.02)
    if dtype == "bfloat16":  # with which Adam trains nothing, with or without frozen weights
        inner = keras.optimizers.SGD(2.0)
    return compiled(model, kf.FreezeOptimizer(inner, freeze_rate=0.75, **settings)), x, y


def weights(model):
    """The variables of a model but for random states, which belong to no delta."""
    return [v for v in model.variables if not v.path.endswith("seed_generator_state")]


def assert_same_weights(model, expected):
    for variable, value in zip(weights(model), expected, strict=True):
        assert same_bits(value_of(variable), value), variable.path


# ---------------------------------------------------------------- freeze, train, store


@dataclass
class Trained:
    name: str
    model: keras.Model
    x: object
    y: np.ndarray
    base: keras.Model
    before: list[np.ndarray]  # of what is trainable


@pytest.fixture(name="trained", scope="module", params=CASES, ids=name_of)
def trained_model(request):
    base, _, _ = start(*request.param)
    model, x, y = start(*request.param)
    before = values_of(model.trainable_variables)
    kf.freeze(model, x, y)
    fit(model, x, y, batch_size=4, epochs=2)
    return Trained(request.param[0].__name__, model, x, y, base, before)


@pytest.mark.cases(1)
def test_only_what_is_trained_moves(trained):
    mask = kf.get_mask(trained.model)
    assert mask.freeze_rate == pytest.approx(0.75, abs=0.01)
    moved = {True: 0, False: 0}  # of what the mask covers and of the others
    for variable, old in zip(trained.model.trainable_variables, trained.before, strict=True):
        entry, new = mask.find(variable), value_of(variable)
        chosen = np.ones(old.shape, bool) if entry is None else entry.trained
        assert same_bits(new[~chosen], old[~chosen]), variable.path
        moved[entry is not None] += np.count_nonzero((new != old)[chosen])
    assert all(moved.values())


def skip_where_keras_changes_what_is_trainable(trained):
    if (trained.name, keras.backend.backend()) == ("whisper", "jax"):
        pytest.skip("on JAX, Keras makes its position embedding trainable where it builds it again")


@pytest.mark.cases(1)
def test_a_delta_loads_on_its_base(trained, tmp_path):
    skip_where_keras_changes_what_is_trainable(trained)
    kf.save(trained.model, tmp_path / "delta.freeze", base=trained.base)
    loaded = kf.load(tmp_path / "delta.freeze", base=trained.base)
    assert type(loaded) is type(trained.model)
    assert kf.get_mask(loaded) == kf.get_mask(trained.model)
    assert_same_weights(loaded, values_of(weights(trained.model)))


@pytest.mark.cases(1)
def test_a_delta_is_put_on_a_file_of_the_base_and_taken_off(trained, tmp_path):
    skip_where_keras_changes_what_is_trainable(trained)
    trained.base.save(tmp_path / "base.keras")
    kf.save(trained.model, tmp_path / "delta.freeze", base=tmp_path / "base.keras")
    device = keras.models.load_model(tmp_path / "base.keras", compile=False)
    before = values_of(weights(trained.base))
    kf.apply_delta(device, tmp_path / "delta.freeze")
    assert_same_weights(device, values_of(weights(trained.model)))
    kf.remove_delta(device, tmp_path / "delta.freeze")
    assert_same_weights(device, before)


def reloaded(model, path):
    """The model from a `.keras` file; Keras does not compile the tasks of KerasHub."""
    if not isinstance(model, hub.models.Task):
        model.save(path)
        return keras.models.load_model(path)
    with pytest.warns(UserWarning, match="custom `compile`"):
        model.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = keras.models.load_model(path)
    optimizer = type(model.optimizer).from_config(model.optimizer.get_config())
    compiled(loaded, optimizer)
    loaded.load_weights(path)
    return loaded


@pytest.mark.cases(1)
def test_a_keras_file_brings_the_mask(trained, tmp_path):
    skip_where_keras_changes_what_is_trainable(trained)
    loaded = reloaded(trained.model, tmp_path / "model.keras")
    assert kf.get_mask(loaded) == kf.get_mask(trained.model)
    assert_same_weights(loaded, values_of(weights(trained.model)))
    before = values_of(loaded.trainable_variables)
    fit(loaded, trained.x, trained.y)
    assert_frozen_bits_kept(loaded.trainable_variables, kf.get_mask(loaded), before)
    assert_trained_moved(loaded.trainable_variables, kf.get_mask(loaded), before)


# ---------------------------------------------------------------- what is chosen


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", [c for c in CASES if c[1] is None], ids=name_of)
def test_the_largest_products_of_weight_and_gradient_are_trained(case):
    """Those of an array that a model uses twice included, with the sum of both gradients."""
    model, x, y = start(*case)
    gradients = gradients_by_autodiff(model, x, y)
    mask = kf.freeze(model, x, y)
    pairs = [
        (v, g)
        for v, g in zip(model.trainable_variables, gradients, strict=True)
        if mask.find(v) is not None
    ]
    expected = mask_by_hand([value_of(v) for v, _ in pairs], [g for _, g in pairs], 0.75)
    for (variable, _), chosen in zip(pairs, expected, strict=True):
        assert equals_by_hand(mask[variable], chosen), variable.path


def tied_network():
    """Words to the logits of the next word by one array, used forward and in reverse."""
    embedding = hub.layers.ReversibleEmbedding(WORDS, 5, tie_weights=True, name="tied")
    ids = keras.Input((LENGTH,), dtype="int32")
    return compiled(keras.Model(ids, embedding(embedding(ids), reverse=True)))


def gradient_of_tied(embeddings, ids, targets):
    hidden = embeddings[ids]
    odds = np.exp(hidden @ embeddings.T)
    of_logits = odds / odds.sum(-1, keepdims=True) - np.eye(WORDS)[targets]
    of_logits = of_logits.reshape(-1, WORDS) / targets.size
    gradient = of_logits.T @ hidden.reshape(targets.size, -1)  # in reverse
    np.add.at(gradient, ids.ravel(), of_logits @ embeddings)  # forward
    return gradient


def test_saliency_of_tied_embeddings_is_of_the_sum_of_both_gradients():
    model, ids = tied_network(), tokens()["token_ids"]
    targets = np.roll(ids, -1, axis=1)
    (embeddings,) = values_of(model.trainable_variables)
    (scores,) = kf.compute_saliency(model, ids, targets).values()
    embeddings = embeddings.astype("float64")
    expected = np.abs(embeddings * gradient_of_tied(embeddings, ids, targets))
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-9)


def test_tied_embeddings_are_frozen_in_both_uses():
    model, ids = tied_network(), tokens()["token_ids"]
    before = values_of(model.trainable_variables)
    kf.freeze(model, ids, ids)
    fit(model, ids, ids, epochs=2)
    assert_frozen_bits_kept(model.trainable_variables, kf.get_mask(model), before)
    embeddings = value_of(model.trainable_variables[0])
    expected = embeddings[ids] @ embeddings.T
    np.testing.assert_allclose(value_of(model(ids)), expected, rtol=1e-4, atol=1e-6)


PARTS = {
    "logits": ("logits/kernel",),
    "transformer_layer_0/self_attention_layer": ("query", "key", "value", "attention_output"),
    "query": ("query/kernel",),
    ("logits", "pooled_dense"): ("logits/kernel", "pooled_dense/kernel"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("exclude", PARTS, ids=str)
def test_parts_of_paths_tell_what_is_always_trained(exclude):
    model, x, y = start(bert, exclude=exclude)
    mask = kf.freeze(model, x, y)
    excluded = {
        v.path
        for v in model.trainable_variables
        if v.path.endswith("kernel") and mask.find(v) is None
    }
    assert len(excluded) == len(PARTS[exclude])
    assert all(any(part in path for path in excluded) for part in PARTS[exclude])


def test_a_backbone_is_excluded_whole():
    model, x, y = start(vit)
    compiled(model, kf.FreezeOptimizer("adam", freeze_rate=0.5, exclude=model.backbone))
    mask = kf.freeze(model, x, y)
    assert [entry.path for entry in mask.entries] == ["predictions/kernel"]


# ---------------------------------------------------------------- what `fit` preprocesses


def pixels():
    return np.random.default_rng(2).integers(256, size=(BATCH, 16, 16, 3)).astype("float32")


def scaled_and_not():
    """A task that preprocesses images, one that gets them preprocessed, and their data."""
    x, y = pixels(), classes()
    raw, _, _ = start(lambda: vit(preprocessor=keras.layers.Rescaling(1 / 128, -1.0)))
    plain, _, _ = start(vit)
    return (raw, x, y), (plain, x / 128 - 1, y)


def test_the_first_batch_of_fit_chooses_what_freeze_chooses():
    (model, x, y), _ = scaled_and_not()
    expected = kf.freeze(model, x, y)
    (model, x, y), _ = scaled_and_not()
    fit(model, x, y)
    assert kf.get_mask(model) == expected


def test_whatever_reads_data_preprocesses_them():
    found = []
    for model, x, y in scaled_and_not():
        kf.freeze(model, x, y)
        history = kf.callbacks.GradientFlowHistory(x, y)
        fit(model, x, y, callbacks=[history])
        found.append(
            [
                history.history["gradient_flow"],
                kf.gradient_flow(model, x, y),
                *kf.compute_saliency(model, x, y).values(),
                kf.check_pruning(model, x, y).after["loss"],
                kf.quantize(model, x, y, tolerance=0.1).after["loss"],
            ]
        )
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


def words_of(texts):
    """A preprocessor that makes numbers of words."""
    ids = np.array([[len(word) for word in text.split()] for text in texts], "int32")
    return {
        "token_ids": ids,
        "padding_mask": np.ones_like(ids),
        "segment_ids": np.zeros_like(ids),
    }


def test_strings_become_tokens():
    texts = np.array(["one two three four five six", "a word or so it seems"] * 4)
    masks = []
    for preprocessor, x in ((words_of, texts), (None, words_of(texts))):
        model, _, y = start(lambda p=preprocessor: bert(preprocessor=p))
        masks.append(kf.freeze(model, x, y))
    assert masks[0] == masks[1]


# ---------------------------------------------------------------- LoRA


def with_lora(seed=0, **settings):
    """LoRA in queries and values, and everything trainable again, so that weights compete."""
    model, x, y = start(gemma, seed=seed, **settings)
    model.backbone.enable_lora(2)
    # Not by `backbone.trainable`, which Keras passes on to other layers on each backend.
    for weight in model.backbone.weights:
        weight.trainable = True
    return model, x, y


def lora_factors(model):
    return [v for v in model.trainable_variables if "lora" in v.path]


def test_lora_alone_leaves_nothing_to_freeze():
    model, x, y = start(gemma)
    model.backbone.enable_lora(2)
    with pytest.raises(ValueError, match="no weights that could be frozen"):
        kf.freeze(model, x, y)


def test_lora_leaves_the_head_to_freeze():
    model, x, y = start(vit)
    model.backbone.enable_lora(2, target_layer_names=["query", "value"])
    mask = kf.freeze(model, x, y)
    assert [entry.path for entry in mask.entries] == ["predictions/kernel"]


def test_lora_does_not_change_saliency():
    """Its factors have the product zero at first."""
    without, x, y = start(gemma)
    model, _, _ = with_lora()
    expected = kf.compute_saliency(without, x, y)
    found = kf.compute_saliency(model, x, y)
    assert found.keys() == expected.keys()
    for path, scores in found.items():
        np.testing.assert_allclose(scores, expected[path], rtol=1e-3, atol=1e-7, err_msg=path)


def test_lora_is_trained_whole_beside_frozen_weights():
    model, x, y = with_lora()
    kf.freeze(model, x, y)
    before = values_of(model.trainable_variables)
    factors = values_of(lora_factors(model))
    fit(model, x, y, epochs=3)
    assert_frozen_bits_kept(model.trainable_variables, kf.get_mask(model), before)
    assert_trained_moved(model.trainable_variables, kf.get_mask(model), before)
    assert len(factors) == 4
    for factor, old in zip(lora_factors(model), factors, strict=True):
        assert (value_of(factor) != old).mean() > 0.9, factor.path


def without_lora(model):
    """A copy that has what the model has besides LoRA."""
    copy, _, _ = start(gemma)
    others = [v for v in model.variables if "lora" not in v.path]
    for variable, other in zip(copy.variables, others, strict=True):
        assert variable.path == other.path
        variable.assign(other)
    return copy


def test_lora_and_a_delta_are_two_small_files(tmp_path):
    base, _, _ = start(gemma)
    model, x, y = with_lora()
    kf.freeze(model, x, y)
    fit(model, x, y, epochs=3)
    model.backbone.save_lora_weights(tmp_path / "own.lora.h5")
    kf.save(without_lora(model), tmp_path / "delta.freeze", base=base)
    kf.apply_delta(base, tmp_path / "delta.freeze")
    base.backbone.load_lora_weights(tmp_path / "own.lora.h5")
    assert same_bits(base.predict(x, verbose=0), model.predict(x, verbose=0))


def test_a_freeze_file_of_lora_in_a_backbone_is_refused(tmp_path):
    """Its configuration does not tell of LoRA, so that Keras could not build the model again."""
    base, _, _ = start(gemma)
    model, x, y = with_lora()
    kf.freeze(model, x, y)
    with pytest.raises(ValueError, match="could not be loaded"):
        kf.save(model, tmp_path / "delta.freeze", base=base)
    assert not (tmp_path / "delta.freeze").exists()


def test_experts_are_frozen_like_other_weights():
    model, x, y = start(mixtral)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mask = kf.freeze(model, x, y)
    assert sum("expert" in entry.path for entry in mask.entries) == 3


# ---------------------------------------------------------------- the documentation


def programs(page, heading):
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)


@pytest.mark.slow
def test_the_programs_of_the_page_run(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "guides" / "fine_tuning.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = {}
    for heading in ("A KerasHub model", "Together with LoRA"):
        for program in programs(page, heading):
            exec(compile(program, heading, "exec"), found)
    accuracy = re.search(r"Accuracy: ([\d.]+)%", capsys.readouterr().out)[1]
    assert float(accuracy) > 90
    outputs = [found[name].predict(found["x"], verbose=0) for name in ("device", "model")]
    assert same_bits(*outputs)
