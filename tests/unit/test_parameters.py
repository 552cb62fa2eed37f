import ast
import inspect
import textwrap

import keras
import numpy as np
import pytest
from keras import layers

from keras_freeze import parameters
from keras_freeze.parameters import (
    BIAS,
    NORMALIZATION,
    UNKNOWN,
    WEIGHT,
    classify,
    kind_of,
    normalize_exclude,
    path_of,
)

SEQUENCE = np.ones((2, 8, 4), "float32")
IMAGE = np.ones((2, 8, 8, 4), "float32")
VOLUME = np.ones((2, 4, 4, 4, 3), "float32")
TOKENS = np.ones((2, 5), "int32")

KERNEL = {"kernel": WEIGHT, "bias": BIAS}
RECURRENT = {"kernel": WEIGHT, "recurrent_kernel": WEIGHT, "bias": BIAS}
SEPARABLE = {"depthwise_kernel": WEIGHT, "pointwise_kernel": WEIGHT, "bias": BIAS}
GAMMA_BETA = {"gamma": NORMALIZATION, "beta": NORMALIZATION}

# Each layer of Keras that can have trainable variables, and what these are.
EXAMPLES = [
    (lambda: layers.Dense(3), SEQUENCE, KERNEL),
    (lambda: layers.EinsumDense("abc,cd->abd", (None, 3), bias_axes="d"), SEQUENCE, KERNEL),
    (lambda: layers.Conv1D(3, 3), SEQUENCE, KERNEL),
    (lambda: layers.Conv2D(3, 3), IMAGE, KERNEL),
    (lambda: layers.Conv3D(3, 3), VOLUME, KERNEL),
    (lambda: layers.Conv1DTranspose(3, 3), SEQUENCE, KERNEL),
    (lambda: layers.Conv2DTranspose(3, 3), IMAGE, KERNEL),
    (lambda: layers.Conv3DTranspose(3, 3), VOLUME, KERNEL),
    (lambda: layers.DepthwiseConv1D(3), SEQUENCE, KERNEL),
    (lambda: layers.DepthwiseConv2D(3), IMAGE, KERNEL),
    (lambda: layers.SeparableConv1D(3, 3), SEQUENCE, SEPARABLE),
    (lambda: layers.SeparableConv2D(3, 3), IMAGE, SEPARABLE),
    (lambda: layers.SimpleRNN(3), SEQUENCE, RECURRENT),
    (lambda: layers.SimpleRNNCell(3), None, RECURRENT),
    (lambda: layers.LSTM(3), SEQUENCE, RECURRENT),
    (lambda: layers.LSTMCell(3), None, RECURRENT),
    (lambda: layers.GRU(3), SEQUENCE, RECURRENT),
    (lambda: layers.GRUCell(3), None, RECURRENT),
    (lambda: layers.ConvLSTM1D(3, 3), np.ones((2, 3, 8, 4), "float32"), RECURRENT),
    (lambda: layers.ConvLSTM2D(3, 3), np.ones((2, 3, 8, 8, 2), "float32"), RECURRENT),
    (lambda: layers.ConvLSTM3D(3, 3), np.ones((2, 2, 4, 4, 4, 2), "float32"), RECURRENT),
    (lambda: layers.RNN(layers.GRUCell(3)), SEQUENCE, RECURRENT),
    (
        lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(2)])),
        SEQUENCE,
        RECURRENT,
    ),
    (lambda: layers.Bidirectional(layers.LSTM(3)), SEQUENCE, RECURRENT),
    (lambda: layers.TimeDistributed(layers.Dense(3)), SEQUENCE, KERNEL),
    (lambda: layers.SpectralNormalization(layers.Conv2D(3, 3)), IMAGE, KERNEL),
    (lambda: layers.MultiHeadAttention(2, 3), (SEQUENCE, SEQUENCE), KERNEL),
    (lambda: layers.GroupQueryAttention(3, 4, 2), (SEQUENCE, SEQUENCE), KERNEL),
    (
        lambda: layers.Attention(use_scale=True, score_mode="concat"),
        ([SEQUENCE, SEQUENCE],),
        {"scale": NORMALIZATION, "concat_score_weight": NORMALIZATION},
    ),
    (lambda: layers.AdditiveAttention(), ([SEQUENCE, SEQUENCE],), {"scale": NORMALIZATION}),
    (lambda: layers.Embedding(7, 3), TOKENS, {"embeddings": WEIGHT}),
    (
        lambda: layers.ReversibleEmbedding(7, 3, tie_weights=False),
        TOKENS,
        {"embeddings": WEIGHT, "reverse_embeddings": WEIGHT},
    ),
    (
        lambda: layers.STFTSpectrogram(frame_length=16, frame_step=8),
        np.ones((2, 64, 1), "float32"),
        {"real_kernel": WEIGHT, "imag_kernel": WEIGHT},
    ),
    (lambda: layers.BatchNormalization(), IMAGE, GAMMA_BETA),
    (lambda: layers.BatchNormalization(renorm=True), IMAGE, GAMMA_BETA),
    (lambda: layers.LayerNormalization(), SEQUENCE, GAMMA_BETA),
    (lambda: layers.GroupNormalization(2), IMAGE, GAMMA_BETA),
    (lambda: layers.RMSNormalization(), SEQUENCE, {"scale": NORMALIZATION}),
    (lambda: layers.PReLU(), IMAGE, {"alpha": NORMALIZATION}),
]

# These hold code of other frameworks, whose names say nothing here: their variables are unknown.
FOREIGN = {"TFSMLayer", "JaxLayer", "FlaxLayer", "TorchModuleWrapper"}

# Variables of Keras's layers that are never trainable, and trainable ones that are left unknown.
NOT_TRAINABLE = {
    *("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev"),
    *("mean", "variance", "count", "vector_u"),
    *("kernel_scale", "kernel_zero", "zero_point", "g_idx", "awq_scales"),
    *("embeddings_scale", "embeddings_zero"),
    *("reverse_embeddings_scale", "reverse_embeddings_zero"),
}
LEFT_UNKNOWN = {
    *("lora_kernel_a", "lora_kernel_b", "lora_embeddings_a", "lora_embeddings_b"),
    *("inputs_scale", "inputs_amax_history", "kernel_amax_history"),
    *("outputs_grad_scale", "outputs_grad_amax_history"),
}


def called(make_layer, inputs):
    keras.utils.set_random_seed(0)
    layer = make_layer()
    if inputs is None:
        layer.build((2, 4))
    elif isinstance(inputs, tuple):
        layer(*inputs)
    else:
        layer(inputs)
    return layer


def example_id(example):
    return type(example[0]()).__name__


def layer_classes():
    found = {value for value in vars(layers).values() if inspect.isclass(value)}
    return sorted(
        (c for c in found if issubclass(c, layers.Layer) and c.__name__ not in FOREIGN),
        key=lambda c: c.__name__,
    )


def own_bases(layer_class):
    return [c for c in layer_class.__mro__ if issubclass(c, layers.Layer) and c != layers.Layer]


def names_given_to_add_weight(source):
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_weight":
            name = next((k.value for k in node.keywords if k.arg == "name"), None)
            name = name or (node.args[1] if len(node.args) > 1 else None)
            assert isinstance(name, ast.Constant), f"no literal name in {ast.unparse(node)}"
            yield name.value


@pytest.mark.parametrize("example", EXAMPLES, ids=example_id)
def test_every_trainable_variable_of_keras_has_the_right_kind(example):
    make_layer, inputs, kinds = example
    variables = called(make_layer, inputs).trainable_variables
    found = {variable.name: kind_of(variable) for variable in variables}
    assert found == kinds


@pytest.mark.parametrize("example", EXAMPLES, ids=example_id)
def test_weights_are_those_that_do_not_start_at_a_constant(example):
    make_layer, inputs, _ = example
    layer = called(make_layer, inputs)
    if isinstance(layer, layers.AdditiveAttention):
        pytest.skip("its scale is drawn at random, though it has one value for a channel")
    for variable in layer.trainable_variables:
        starts_at_constants = np.isin(variable.numpy(), [0.0, 1.0]).all()
        assert (kind_of(variable) == WEIGHT) != starts_at_constants, variable.path


@pytest.mark.parametrize("layer_class", layer_classes(), ids=lambda c: c.__name__)
def test_every_variable_name_of_keras_is_known(layer_class):
    sources = (inspect.getsource(base) for base in own_bases(layer_class))
    names = {name for source in sources for name in names_given_to_add_weight(source)}
    assert names <= set(parameters._KIND_BY_NAME) | NOT_TRAINABLE | LEFT_UNKNOWN


def test_every_layer_of_keras_with_variables_is_among_the_examples():
    with_variables = {
        c
        for c in layer_classes()
        if any("add_weight(" in inspect.getsource(base) for base in own_bases(c))
    }
    assert layers.Dense in with_variables
    tried = {type(make_layer()) for make_layer, _, _ in EXAMPLES}
    never_trainable = {layers.Normalization}  # holds statistics of the data
    assert with_variables - tried == never_trainable


def test_no_name_is_listed_twice():
    assert not (set(parameters._KIND_BY_NAME) & (NOT_TRAINABLE | LEFT_UNKNOWN))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("expert_feedforward_gate_dense", WEIGHT),
        ("expert_feedforward_intermediate_dense", WEIGHT),
        ("expert_feedforward_output_dense", WEIGHT),
        *((f"{name}_proj", WEIGHT) for name in ("gate", "up", "down", "gate_up")),
        *((f"{name}_proj_bias", BIAS) for name in ("down", "gate_up")),
        ("output_kernel", WEIGHT),
        ("output_bias", BIAS),
    ],
)
def test_names_of_keras_hub_are_known(name, kind):
    variable = keras.Variable(np.ones((2, 3, 4)), name=name)
    assert kind_of(variable) == kind


def test_biases_of_attention_are_biases_whatever_their_rank():
    layer = called(lambda: layers.MultiHeadAttention(2, 3), (SEQUENCE, SEQUENCE))
    biases = [v for v in layer.trainable_variables if kind_of(v) == BIAS]
    assert {len(v.shape) for v in biases} == {1, 2}


def test_lora_factors_stay_trained():
    layer = called(lambda: layers.Dense(3), SEQUENCE)
    layer.enable_lora(2)
    kinds = {v.name: kind_of(v) for v in layer.trainable_variables}
    assert kinds == {"bias": BIAS, "lora_kernel_a": UNKNOWN, "lora_kernel_b": UNKNOWN}


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_nothing_of_a_quantized_layer_is_taken_for_a_weight_but_its_kernel(mode):
    layer = called(lambda: layers.Dense(16), np.ones((2, 16), "float32"))
    layer.quantize(mode)
    layer(np.ones((2, 16), "float32"))
    weights = [v.name for v in layer.trainable_variables if kind_of(v) == WEIGHT]
    assert weights == (["kernel"] if mode == "float8" else [])


def test_variables_of_custom_layers_are_unknown():
    class Custom(layers.Layer):
        def build(self, input_shape):
            self.w = self.add_weight(shape=(input_shape[-1], 3), name="w")
            self.unnamed = self.add_weight(shape=(3,))
            self.kernels = self.add_weight(shape=(3,), name="kernels")

    layer = Custom()
    layer.build((2, 4))
    assert [kind_of(v) for v in layer.trainable_variables] == [UNKNOWN] * 3


def test_tensorflow_variables_are_named_without_their_output_number():
    import tensorflow as tf

    assert path_of(tf.Variable(tf.ones(3), name="dense/kernel")) == "dense/kernel"
    assert kind_of(tf.Variable(tf.ones(3), name="dense/kernel")) == WEIGHT
    assert kind_of(tf.Variable(tf.ones(3))) == UNKNOWN


@pytest.mark.parametrize("bad", [np.ones(3), None, 3])
def test_what_is_no_variable_is_refused(bad):
    with pytest.raises(TypeError, match=r"`variable` must be .*Received: variable="):
        path_of(bad)


# Leaving layers out


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, name="fc1"),
            layers.Dense(3, name="fc10"),
            layers.Dense(2, name="fc2"),
        ],
        name="net",
    )


def excluded_paths(variables, exclude):
    return [p.path for p in classify(variables, exclude) if p.excluded]


def test_parameters_come_in_order_and_know_what_may_be_frozen(model):
    found = classify(model.trainable_variables, "fc2")
    assert [p.position for p in found] == list(range(6))
    assert all(p.variable is v for p, v in zip(found, model.trainable_variables, strict=True))
    assert [p.path for p in found if p.is_frozen_candidate] == [
        "net/fc1/kernel",
        "net/fc10/kernel",
    ]


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ((), []),
        ("fc1", ["net/fc1/kernel", "net/fc1/bias"]),
        (["fc1/kernel"], ["net/fc1/kernel"]),
        ("net/fc1/kernel", ["net/fc1/kernel"]),
        (("fc1/bias", "fc2"), ["net/fc1/bias", "net/fc2/kernel", "net/fc2/bias"]),
        ("kernel", ["net/fc1/kernel", "net/fc10/kernel", "net/fc2/kernel"]),
    ],
)
def test_whole_path_components_are_matched(model, exclude, expected):
    assert excluded_paths(model.trainable_variables, exclude) == expected


@pytest.mark.parametrize("entry", ["fc", "c1/kernel", "fc1/k", "net/kernel", "other/fc1", "FC1"])
def test_an_entry_that_matches_nothing_is_named(model, entry):
    with pytest.raises(ValueError, match=rf"'net/fc1/kernel'.*Received: exclude entry '{entry}'"):
        classify(model.trainable_variables, ["fc2", entry])


def test_known_paths_are_shortened():
    variables = [keras.Variable(np.ones(1), name=f"v{i}") for i in range(40)]
    with pytest.raises(ValueError, match=r"\(40 in all\)") as error:
        classify(variables, "fc")
    assert len(str(error.value)) < 500


def test_layers_may_be_given(model):
    head = model.get_layer("fc2")
    assert normalize_exclude([head, "fc1", head]) == ("fc2", "fc1")
    assert excluded_paths(model.trainable_variables, head) == ["net/fc2/kernel", "net/fc2/bias"]


def test_a_layer_is_still_found_after_saving_and_loading(model, tmp_path):
    names = normalize_exclude(model.get_layer("fc2"))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(excluded_paths(loaded.trainable_variables, names)) == 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("functional", [True, False])
def test_submodels_stand_for_their_layers_before_and_after_loading(functional, tmp_path):
    def submodel(name, units):
        stack = [layers.Dense(units, name=f"{name}_fc"), layers.ReLU()]
        if not functional:
            return keras.Sequential([keras.Input((4,)), *stack], name=name)
        inputs = outputs = keras.Input((4,))
        for layer in stack:
            outputs = layer(outputs)
        return keras.Model(inputs, outputs, name=name)

    body, head = submodel("body", 4), submodel("head", 2)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, head(body(inputs)))
    names = normalize_exclude(head)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for variables in (model.trainable_variables, loaded.trainable_variables):
        found = classify(variables, names)
        assert [p.excluded for p in found] == [False, False, True, True]


def test_a_composite_layer_stands_for_itself():
    layer = called(lambda: layers.MultiHeadAttention(2, 3, name="mha"), (SEQUENCE, SEQUENCE))
    assert normalize_exclude(layer) == ("mha",)
    assert len(excluded_paths(layer.trainable_variables, layer)) == 8


def test_layers_without_trainable_variables_cannot_be_excluded(model):
    model.get_layer("fc1").trainable = False
    for exclude in (layers.Dropout(0.5), keras.Sequential([keras.Input((4,)), layers.ReLU()])):
        with pytest.raises(ValueError, match="exclude entry"):
            classify(model.trainable_variables, exclude)
    with pytest.raises(ValueError, match="exclude entry 'fc1'"):
        classify(model.trainable_variables, "fc1")


@pytest.mark.parametrize("bad", [None, 3, [None], ["fc1", 3], b"fc1", [["fc1"]]])
def test_exclude_of_another_type_is_refused(bad):
    with pytest.raises(TypeError, match=r"`exclude` must be .*Received: exclude="):
        normalize_exclude(bad)


@pytest.mark.parametrize("bad", ["", "/fc1", "fc1/", "fc1//kernel"])
def test_empty_path_components_are_refused(bad):
    with pytest.raises(ValueError, match=r"`exclude` must be .*Received"):
        normalize_exclude(bad)


def test_no_variables_are_no_parameters():
    assert classify([]) == []
