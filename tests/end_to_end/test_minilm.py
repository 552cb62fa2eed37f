"""Tests of examples/minilm.py: it computes what PyTorch computes, from the same tokens."""

import sys

import keras
import numpy as np
import pytest
from example_scripts import ROOT

torch = pytest.importorskip("torch")

WIDTH, NUM_HEADS, NUM_LAYERS, NUM_TOKENS = 384, 12, 2, 50
TOKENS = np.array([[2, 7, 9, 11, 3, 0, 0], [2, 41, 42, 43, 44, 45, 3]], "int32")


@pytest.fixture(scope="module")
def minilm():
    """The module of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
        import minilm
    return minilm


def draw_state():
    """Random weights by PyTorch's names."""
    rng = np.random.default_rng(0)
    shapes = {
        "embeddings.word_embeddings.weight": (NUM_TOKENS, WIDTH),
        "embeddings.position_embeddings.weight": (512, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in (f"encoder.layer.{number}" for number in range(NUM_LAYERS)):
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
        square = (WIDTH, WIDTH)
        dense = {f"attention.self.{part}": square for part in ("query", "key", "value")}
        dense["attention.output.dense"] = square
        dense["intermediate.dense"] = (4 * WIDTH, WIDTH)
        dense["output.dense"] = (WIDTH, 4 * WIDTH)
        for place, shape in dense.items():
            shapes[f"{layer}.{place}.weight"] = shape
            shapes[f"{layer}.{place}.bias"] = shape[:1]
    state = {name: rng.normal(size=s, scale=0.1) for name, s in shapes.items()}
    for norm in norms:
        state[f"{norm}.weight"] = rng.uniform(0.5, 1.5, size=WIDTH)
        state[f"{norm}.bias"] = rng.normal(size=WIDTH)
    return {name: array.astype("float32") for name, array in state.items()}


def forward(tokens, state, num_layers=NUM_LAYERS):
    """The mean of BERT's outputs over what is not padding, as PyTorch computes it."""
    functional = torch.nn.functional
    state = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}

    def dense(x, name):
        return functional.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(x, name):
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        return functional.layer_norm(x, (WIDTH,), weight, bias, eps=1e-12)

    tokens = torch.from_numpy(tokens)
    mask = tokens != 0
    x = state["embeddings.word_embeddings.weight"][tokens.long()]
    x = x + state["embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = norm(x + state["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for name in (f"encoder.layer.{number}" for number in range(num_layers)):
        parts = [
            dense(x, f"{name}.attention.self.{part}").unflatten(2, (NUM_HEADS, -1)).transpose(1, 2)
            for part in ("query", "key", "value")
        ]
        found = functional.scaled_dot_product_attention(*parts, attn_mask=mask[:, None, None, :])
        found = dense(found.transpose(1, 2).flatten(2), f"{name}.attention.output.dense")
        x = norm(x + found, f"{name}.attention.output.LayerNorm")
        inner = functional.gelu(dense(x, f"{name}.intermediate.dense"))
        x = norm(x + dense(inner, f"{name}.output.dense"), f"{name}.output.LayerNorm")
    weights = mask[:, :, None].float()
    return ((x * weights).sum(1) / weights.sum(1)).numpy()


def pooled(model, tokens):
    body = keras.Model(model.inputs, model.get_layer("pool").output)
    return body.predict(tokens, verbose=0)


def test_means_are_those_of_the_forward_pass_in_pytorch(minilm):
    state = draw_state()
    model = minilm.minilm(2, vocabulary_size=NUM_TOKENS, num_layers=NUM_LAYERS)
    minilm.set_pytorch_weights(model, state)
    np.testing.assert_allclose(pooled(model, TOKENS), forward(TOKENS, state), atol=1e-5)


def test_more_padding_changes_nothing(minilm):
    model = minilm.minilm(2, vocabulary_size=NUM_TOKENS, num_layers=NUM_LAYERS)
    padded = np.pad(TOKENS, ((0, 0), (0, 4)))
    np.testing.assert_allclose(pooled(model, padded), pooled(model, TOKENS), atol=1e-5)


def test_a_missing_or_a_wrong_weight_is_named(minilm):
    model = minilm.minilm(2, vocabulary_size=NUM_TOKENS, num_layers=NUM_LAYERS)
    state = draw_state()
    state["embeddings.LayerNorm.bias"] = np.zeros(7, "float32")
    with pytest.raises(ValueError, match="embeddings_norm have another shape"):
        minilm.set_pytorch_weights(model, state)
    del state["embeddings.LayerNorm.bias"]
    with pytest.raises(ValueError, match=r"embeddings\.LayerNorm\.bias.*layer embeddings_norm"):
        minilm.set_pytorch_weights(model, state)


VOCABULARY = {
    token: number
    for number, token in enumerate(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "free", "##ze", "##r", "cafe", "$", "!", "中", "r"]
    )
}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("Freeze FREE", [4, 5, 4]),  # the longest part first
        ("freezer", [4, 5, 6]),
        ("freezes", [1]),  # a word with an unknown part is unknown
        ("free$!r", [4, 8, 9, 11]),  # each sign stands alone
        ("Café\u200b\n\tr\x00", [7, 11]),  # no accents and no control characters
        ("r中r", [11, 10, 11]),
        ("r" + 99 * "r", [11] + 99 * [6]),
        ("r" + 100 * "r", [1]),  # too long a word
    ],
)
def test_text_becomes_tokens(minilm, text, tokens):
    found = minilm.Tokenizer(VOCABULARY)([text], length=110)[0]
    assert found.tolist() == [2, *tokens, 3] + (108 - len(tokens)) * [0]


def test_long_texts_are_cut(minilm):
    found = minilm.Tokenizer(VOCABULARY)(["free freezer free", "free"], length=5)
    assert found.tolist() == [[2, 4, 4, 5, 3], [2, 4, 3, 0, 0]]


TEXTS = [
    "Guaranteed to lose 10-12 lbs in 30 days!! -- http://www.adclick.ws/p.cfm?o=315&s=pk007",
    "Señor Müller's e-mail: 50% off, only $9.99 (≈ 10 €)…",
    "free\u00a0money\u200b\ufffd \x1b[0m 東京タワー 한국어 unaffordableness xyzzyqqq",
    "",
]


def test_pretrained_means_and_tokens_are_those_of_other_libraries(minilm):
    pytest.importorskip("all_minilm_l6_v2", reason="no pretrained weights")
    tokenizers = pytest.importorskip("tokenizers", reason="no other tokenizer")
    other = tokenizers.Tokenizer.from_buffer(minilm._read("tokenizer.json"))
    other.enable_truncation(48)
    other.enable_padding(length=48)
    tokens = minilm.Tokenizer(minilm.read_vocabulary())(TEXTS, length=48)
    assert tokens.tolist() == [encoding.ids for encoding in other.encode_batch(TEXTS)]
    model = minilm.minilm(2)
    minilm.load_pretrained_weights(model)
    expected = forward(tokens, minilm.read_weights(), num_layers=6)
    np.testing.assert_allclose(pooled(model, tokens), expected, atol=1e-5)
