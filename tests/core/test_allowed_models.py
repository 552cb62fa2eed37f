"""Models of all kinds that a `.freeze` file holds: what is allowed in one is not too little."""

import keras
import numpy as np
import pytest
from helpers import same_bits, value_of
from keras import layers, ops

import keras_freeze as kf
from keras_freeze.storage.checks import names as allowed_names

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.cases(None, tensorflow=0, jax=0),
]


@keras.saving.register_keras_serializable(package="allowed_models")
def doubled(x):
    return 2.0 * ops.tanh(x)


@keras.saving.register_keras_serializable(package="allowed_models")
def absolute_error(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


@keras.saving.register_keras_serializable(package="allowed_models")
class Scaled(layers.Layer):
    """A layer with a layer, a function and an initializer in its configuration."""

    def __init__(self, inner, function=doubled, start="ones", **kwargs):
        super().__init__(**kwargs)
        self.inner, self.function = inner, function
        self.start = keras.initializers.get(start)

    def build(self, shape):
        self.factor = self.add_weight(shape=(shape[-1],), initializer=self.start, name="factor")
        if not self.inner.built:
            self.inner.build(shape)

    def call(self, x):
        return self.inner(self.function(x * self.factor))

    def compute_output_shape(self, shape):
        return self.inner.compute_output_shape(shape)

    def get_config(self):
        return {
            **super().get_config(),
            "inner": keras.saving.serialize_keras_object(self.inner),
            "function": keras.saving.serialize_keras_object(self.function),
            "start": keras.saving.serialize_keras_object(self.start),
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        for key in ("inner", "function", "start"):
            config[key] = keras.saving.deserialize_keras_object(config[key])
        return cls(**config)


@keras.saving.register_keras_serializable(package="allowed_models")
class Half(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return 0.5 * ops.mean(ops.square(y_true - y_pred), axis=-1)


@keras.saving.register_keras_serializable(package="allowed_models")
class Adversarial(keras.Model):
    """A model with two parts and two optimizers, and a `compile` of its own."""

    def __init__(self, first, second, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = first, second

    def call(self, x):
        return self.second(self.first(x))

    def compile(self, first_optimizer, second_optimizer, loss_fn):
        super().compile()
        self.first_optimizer, self.second_optimizer = first_optimizer, second_optimizer
        self.loss_fn = loss_fn

    def get_compile_config(self):
        names = ("first_optimizer", "second_optimizer", "loss_fn")
        return {n: keras.saving.serialize_keras_object(getattr(self, n)) for n in names}

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))

    def get_config(self):
        parts = {"first": self.first, "second": self.second}
        return {
            **super().get_config(),
            **{name: keras.saving.serialize_keras_object(p) for name, p in parts.items()},
        }

    @classmethod
    def from_config(cls, config):
        config = dict(config)
        for name in ("first", "second"):
            config[name] = keras.saving.deserialize_keras_object(config[name])
        return cls(**config)


def stack(shape, *between, dtype=None):
    return keras.Sequential([keras.Input(shape, dtype=dtype), *between])


def functional(shape, function, **arguments):
    inputs = keras.Input(shape, **arguments)
    return keras.Model(inputs, function(inputs))


def image():
    return stack(
        (16, 16, 3),
        layers.Rescaling(1 / 255, offset=-0.5),
        layers.Resizing(12, 12),
        layers.RandomFlip(),
        layers.RandomRotation(0.1),
        layers.RandomZoom(0.1),
        layers.RandomContrast(0.1),
        layers.RandomTranslation(0.1, 0.1),
        layers.RandomBrightness(0.1, value_range=(-1, 1)),
        layers.GaussianNoise(0.1),
        layers.Conv2D(4, 3, padding="same", activation=keras.activations.gelu),
        layers.GroupNormalization(2),
        layers.DepthwiseConv2D(3),
        layers.SeparableConv2D(6, 3, depthwise_regularizer="l2"),
        layers.SpatialDropout2D(0.1),
        layers.Conv2DTranspose(4, 3, kernel_constraint=keras.constraints.MaxNorm(2.0)),
        layers.UpSampling2D(2, interpolation="bilinear"),
        layers.MaxPooling2D(),
        layers.AveragePooling2D(1),
        layers.ZeroPadding2D(1),
        layers.Cropping2D(1),
        layers.PReLU(shared_axes=[1, 2]),
        layers.GlobalAveragePooling2D(),
        layers.Dense(2, activation=layers.LeakyReLU(0.2)),
    )


def augmented():
    is_traced = keras.backend.backend() != "jax"
    random_crop = [layers.RandomCrop(12, 12)] if is_traced else []
    return stack(
        (16, 16, 3),
        # Keras traces no RandomCrop on JAX: its slices are not static there.
        layers.Pipeline([*random_crop, layers.CenterCrop(10, 10)]),
        layers.RandAugment(value_range=(0, 1), num_ops=1),
        layers.RandomErasing(value_range=(0, 1)),
        layers.Flatten(),
        layers.Dense(2),
    )


def recurrent():
    return stack(
        (8, 5),
        layers.Masking(-1.0),
        layers.Bidirectional(layers.LSTM(4, return_sequences=True), merge_mode="sum"),
        layers.Bidirectional(
            layers.GRU(3, return_sequences=True),
            backward_layer=layers.SimpleRNN(3, go_backwards=True, return_sequences=True),
        ),
        layers.TimeDistributed(layers.Dense(4, activation="relu")),
        layers.RNN(
            layers.StackedRNNCells([layers.LSTMCell(4), layers.GRUCell(3)]), return_sequences=True
        ),
        layers.Conv1D(4, 3, padding="causal"),
        layers.SpatialDropout1D(0.1),
        layers.GlobalMaxPooling1D(),
        layers.Dense(2, kernel_initializer=keras.initializers.Orthogonal(0.5, seed=1)),
    )


def convolutional_lstm():
    return stack((4, 6, 6, 2), layers.ConvLSTM2D(3, 3), layers.Conv2D(2, 3), layers.Flatten())


def attention(inputs):
    x = layers.Embedding(30, 8, embeddings_initializer=keras.initializers.RandomNormal())(inputs)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)])
    x = layers.LayerNormalization()(x)
    x = layers.GroupQueryAttention(4, 4, 2)(x, x)
    x = layers.RMSNormalization()(x)
    x = layers.EinsumDense("abc,cd->abd", (None, 6), bias_axes="d", activation="silu")(x)
    x = layers.AdditiveAttention()([x, x])
    x = layers.Attention(use_scale=True)([x, x])
    return layers.Dense(2)(layers.GlobalAveragePooling1D()(x))


def operations(x):
    y = ops.reshape(ops.transpose(ops.abs(x) + 1.0, (0, 2, 1)), (-1, 8, 5))
    z = ops.concatenate([x, y, ops.log(y) * 0.5], axis=-1)
    z = ops.matmul(z, ops.swapaxes(z, 1, 2)) / ops.sqrt(ops.cast(15, "float32"))
    z = ops.softmax(z) @ x
    z = ops.where(z > 0.1, z, ops.zeros_like(z))
    z = ops.einsum("btf,btg->bfg", z, x) + np.arange(5, dtype="float32")
    z = z[:, 1:, ::2] - ops.mean(z, axis=[1, 2], keepdims=True)
    z = ops.stack([z[..., 0], z[..., 1]], axis=-1)
    z = ops.clip(ops.cast(ops.cast(z, "float16"), "float32"), -5, 5)
    z = ops.pad(ops.expand_dims(z, 1), [[0, 0], [1, 1], [0, 0], [0, 0]])
    z = ops.max(ops.take(z, 1, axis=1), axis=1, keepdims=False)
    return layers.Dense(2)(ops.relu(ops.maximum(z, -z) ** 2))


def shared_and_nested():
    shared = layers.Dense(5, activation="tanh", name="shared")
    inner = functional((5,), lambda x: layers.Dense(5)(shared(x)))
    deeper = keras.Sequential([inner, layers.BatchNormalization(), layers.Dropout(0.2, seed=3)])
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    both = [deeper(left), deeper(right)]
    merged = [
        layers.Concatenate()([left, *both]),
        layers.Dot(1)(both),
        layers.Multiply()(both),
        layers.Average()(both),
        layers.Subtract()(both),
        layers.Maximum()(both),
    ]
    merged[0] = layers.UnitNormalization()(merged[0])
    x = layers.Concatenate()(merged)
    outputs = {"a": layers.Dense(2, name="a")(x), "b": layers.Dense(1, name="b")(x)}
    return keras.Model({"left": left, "right": right}, outputs)


def volume():
    return stack(
        (6, 6, 6, 2),
        layers.Conv3D(3, 2),
        layers.MaxPooling3D(),
        layers.SpectralNormalization(layers.Conv3D(2, 2)),
        layers.Reshape((2,)),
        layers.RepeatVector(3),
        layers.Permute((2, 1)),
        layers.ActivityRegularization(0.1),
        layers.ELU(),
        layers.Softmax(),
        layers.ReLU(6.0),
        layers.Activation("mish"),
        layers.GaussianDropout(0.1),
        layers.AlphaDropout(0.1),
        layers.Identity(),
        layers.Flatten(),
        layers.Dense(2),
    )


def initialized():
    return stack(
        (4,),
        *(
            layers.Dense(
                4,
                kernel_initializer=start,
                bias_initializer=keras.initializers.Constant([0.1, 0.2, 0.3, 0.4]),
                kernel_regularizer=keras.regularizers.L1L2(0.1, 0.1),
                activity_regularizer="l1",
                kernel_constraint="non_neg",
            )
            for start in (
                keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal", seed=2),
                keras.initializers.Identity(),
                "he_normal",
                keras.initializers.RandomUniform(seed=keras.random.SeedGenerator(3)),
                kf.initializers.XavierNormal(1, 2),
            )
        ),
        layers.Dense(2, kernel_regularizer=keras.regularizers.OrthogonalRegularizer()),
    )


def custom():
    inner = layers.Dense(3, activation=doubled)
    return functional((4,), lambda x: layers.Dense(2)(Scaled(inner, start="he_normal")(x)))


def mixed():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    return stack(
        (4,), layers.Dense(3, dtype="mixed_float16"), layers.Dense(3, dtype=policies),
        layers.Dense(2, dtype="float64"),
    )  # fmt: skip


def adversarial():
    model = Adversarial(stack((4,), layers.Dense(3)), stack((3,), layers.Dense(2)))
    model(np.zeros((1, 4), "float32"))
    model.compile(keras.optimizers.Adam(), kf.FreezeOptimizer(keras.optimizers.SGD()), Half())
    return model


MODELS = {
    "image": image,
    "augmented": augmented,
    "recurrent": recurrent,
    "convolutional LSTM": convolutional_lstm,
    "attention": lambda: functional((7,), attention, dtype="int32"),
    "operations": lambda: functional((8, 5), operations),
    "shared and nested": shared_and_nested,
    "volume": volume,
    "initialized": initialized,
    "custom": custom,
    "mixed": mixed,
    "adversarial": adversarial,
}


def assert_the_same_comes_back(model, path, **arguments):
    kf.save(model, path)
    loaded = kf.load(path, **arguments)
    pairs = zip(model.variables, loaded.variables, strict=True)
    assert all(same_bits(value_of(a), value_of(b)) for a, b in pairs)
    return loaded


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_layers_come_back(name, tmp_path):
    model = MODELS[name]()
    loaded = assert_the_same_comes_back(model, tmp_path / "model.freeze")
    shapes = getattr(model, "input_shape", None)
    if isinstance(shapes, tuple):
        x = np.random.default_rng(0).integers(0, 30, (2, *shapes[1:])).astype("float32")
        assert same_bits(value_of(model(x)), value_of(loaded(x)))


def schedules():
    kinds = keras.optimizers.schedules
    return [
        kinds.CosineDecay(0.1, 10),
        kinds.CosineDecayRestarts(0.1, 10),
        kinds.ExponentialDecay(0.1, 10, 0.9),
        kinds.InverseTimeDecay(0.1, 10, 0.9),
        kinds.PiecewiseConstantDecay([5, 10], [0.1, 0.01, 0.001]),
        kinds.PolynomialDecay(0.1, 10),
    ]


def optimizers():
    plain = [
        getattr(keras.optimizers, name)()
        for name in sorted(allowed_names.OPTIMIZERS)
        if name not in ("LossScaleOptimizer", "MultiOptimizer")
    ]
    scaled = keras.optimizers.LossScaleOptimizer(kf.FreezeOptimizer(keras.optimizers.Adam()))
    with_schedules = [keras.optimizers.SGD(schedule) for schedule in schedules()]
    return [*plain, *with_schedules, scaled, kf.FreezeOptimizer(with_schedules[0])]


def losses_and_metrics():
    losses = [
        *("mse", "huber", absolute_error, Half(), keras.losses.BinaryFocalCrossentropy(gamma=1.5)),
        *(keras.losses.mean_absolute_error, keras.losses.CategoricalFocalCrossentropy()),
    ]
    metrics = [
        *("mae", "accuracy", keras.metrics.AUC(), keras.metrics.F1Score(), absolute_error),
        keras.metrics.MeanMetricWrapper(absolute_error, name="mine"),
        *(keras.metrics.mean_squared_error, keras.metrics.MeanIoU(3), keras.losses.LogCosh()),
        keras.metrics.MeanMetricWrapper(keras.losses.log_cosh, name="log_cosh"),
    ]
    return losses, metrics


def test_optimizers_of_all_kinds_come_back(tmp_path):
    for optimizer in optimizers():
        model = stack((4,), layers.Dense(3), layers.Dense(2))
        model.compile(optimizer, "mse")
        loaded = assert_the_same_comes_back(model, tmp_path / "model.freeze")
        assert loaded.optimizer.get_config() == optimizer.get_config(), optimizer.name


def test_losses_and_metrics_of_all_kinds_come_back(tmp_path):
    losses, metrics = losses_and_metrics()
    for loss in losses:
        model = stack((4,), layers.Dense(3))
        model.compile("sgd", loss, metrics=metrics, weighted_metrics=[Half()])
        loaded = assert_the_same_comes_back(model, tmp_path / "model.freeze")
        y_true, y_pred = np.eye(4, 3, dtype="float32"), np.full((4, 3), 0.25, "float32")
        values = [keras.losses.get(m.loss)(y_true, y_pred) for m in (model, loaded)]
        assert same_bits(*map(value_of, values))
        assert len(loaded.get_compile_config()["metrics"]) == len(metrics)


def test_losses_and_metrics_by_output_come_back(tmp_path):
    model = shared_and_nested()
    model.compile(
        kf.FreezeOptimizer(keras.optimizers.Adam()),
        loss={"a": "mse", "b": absolute_error},
        loss_weights={"a": 1.0, "b": 0.5},
        metrics={"a": ["mae", keras.metrics.RootMeanSquaredError()], "b": absolute_error},
    )
    assert_the_same_comes_back(model, tmp_path / "model.freeze")


def test_classes_that_are_passed_are_allowed_where_they_belong(tmp_path):
    class Unregistered(layers.Dense):
        pass

    def squashed(x):
        return ops.tanh(x)

    objects = {"Unregistered": Unregistered, "squashed": squashed}
    model = stack((4,), Unregistered(3, activation=squashed))
    path = tmp_path / "model.freeze"
    with pytest.raises(ValueError, match=r"Unregistered.*layers"):
        kf.save(model, path)
    assert not path.exists()
    with keras.saving.custom_object_scope(objects):
        kf.save(model, path)
        assert isinstance(kf.load(path).layers[0], Unregistered)
    with pytest.raises(kf.FreezeFileError, match="custom_objects"):
        kf.load(path)
    loaded = kf.load(path, custom_objects=objects)
    assert isinstance(loaded.layers[0], Unregistered)
    assert loaded.layers[0].activation is squashed
    with pytest.raises(TypeError, match="custom_objects"):
        kf.load(path, custom_objects=[Unregistered])


@pytest.mark.parametrize("kind", ["Lambda", "TorchModuleWrapper"])
def test_saving_what_would_not_load_is_an_error_that_says_so(kind, tmp_path):
    if kind == "Lambda":
        layer = layers.Lambda(doubled)
    else:
        torch = pytest.importorskip("torch")
        if keras.backend.backend() != "torch":
            pytest.skip("a layer for PyTorch")
        layer = layers.TorchModuleWrapper(torch.nn.Linear(4, 4))
    model = stack((4,), layer, layers.Dense(2))
    with pytest.raises(ValueError, match=rf"could not be loaded.*keras\.layers\.{kind}"):
        kf.save(model, tmp_path / "model.freeze")
    assert not list(tmp_path.iterdir())


def test_the_lists_of_names_are_names_of_keras():
    spaces = {
        "layers": allowed_names.LAYERS,
        "initializers": allowed_names.INITIALIZERS,
        "regularizers": allowed_names.REGULARIZERS,
        "constraints": allowed_names.CONSTRAINTS,
        "losses": allowed_names.LOSSES | (allowed_names.LOSS_FUNCTIONS & set(dir(keras.losses))),
        "metrics": allowed_names.METRICS,
        "optimizers": allowed_names.OPTIMIZERS,
        "activations": allowed_names.ACTIVATION_FUNCTIONS,
        "dtype_policies": allowed_names.POLICIES,
        "quantizers": allowed_names.QUANTIZATION,
    }
    for space, known in spaces.items():
        assert known <= set(dir(getattr(keras, space))), space
    for module, known in allowed_names.OPERATIONS.items():
        assert known <= set(dir(__import__(module, fromlist=["_"]))), module
