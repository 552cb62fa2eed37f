"""freeze and its kin: where masks come from, what is refused, and that nothing else changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import gradients_by_autodiff, same_bits, values_of
from keras import layers
from loops import loop
from oracle import brute_force_mask

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)
tensorflow_only = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="XLA's, tf.distribute's or tf.sparse's"
)


def make_data(size=64, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 10)).astype("float32")
    return x, (x @ rng.normal(size=(10, 4))).argmax(1)


def build_model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(12, activation="relu", name="fc1"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, name="dropout"),
            layers.Dense(4, name="fc2"),
        ]
    )


def compile_model(model, inner=None, **arguments):
    inner = inner or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        optimizer=kf.FreezeOptimizer(inner, **{"freeze_rate": 0.75, **arguments}),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def make_model(**arguments):
    return compile_model(build_model(), **arguments)


def everything(model):
    """Every number that a model and its optimizer hold, as bytes."""
    generator = keras.src.random.seed_generator.global_seed_generator()
    variables = [*model.variables, *model.metrics_variables, generator.state]
    return [v.numpy().tobytes() for v in variables]


# Where masks come from


def test_model_is_left_as_it_was():
    model = make_model()
    model.fit(*make_data(), verbose=0)  # moving statistics and seeds away from their start
    before = everything(model)
    kf.freeze(model, *make_data(seed=1), overwrite=True)
    kf.compute_saliency(model, *make_data(seed=1))
    assert everything(model) == before


class Halving(layers.Dense):
    """A layer that writes its own kernel when it is called."""

    def call(self, inputs, training=None):
        if training:
            self.kernel.assign(self.kernel / 2)
        return super().call(inputs)


@pytest.mark.parametrize("kind", [layers.SpectralNormalization, Halving, keras.Model], ids=str)
def test_weights_that_a_layer_writes_itself_are_left_as_they_were(kind):
    if kind is layers.SpectralNormalization:
        writing = kind(layers.Dense(8))
    elif kind is Halving:
        writing = Halving(8)
    else:
        inputs = keras.Input((10,))
        writing = keras.Model(inputs, Halving(8)(inputs))
    model = compile_model(keras.Sequential([keras.Input((10,)), writing, layers.Dense(4)]))
    before = values_of(model.variables)
    data = make_data()
    kf.compute_saliency(model, *data)
    kf.gradient_flow(model, *data)
    kf.freeze(model, *data)
    for value, found in zip(before, values_of(model.variables), strict=True):
        assert same_bits(value, found)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of Keras on JAX")
def test_a_loss_that_fit_alone_can_compute_is_refused():
    class Stateless(keras.Sequential):
        def stateless_compute_loss(self, *arguments, **keywords):
            return super().stateless_compute_loss(*arguments, **keywords)

    model = compile_model(Stateless([keras.Input((10,)), layers.Dense(4)]))
    with pytest.raises(ValueError, match="stateless_compute_loss"):
        kf.freeze(model, *make_data())
    model.fit(*make_data(), verbose=0)
    assert kf.get_mask(model).freeze_rate == 0.75


@pytest.mark.filterwarnings("error")
def test_an_error_in_fit_is_not_said_to_be_of_the_gradients():
    class Failing(keras.Sequential):
        def compute_loss(self, *arguments, **keywords):
            if self.optimizer.built:  # in a step, not while Keras looks at shapes
                raise ArithmeticError("of the user")
            return super().compute_loss(*arguments, **keywords)

    model = compile_model(Failing([keras.Input((10,)), layers.Dense(4)]))
    with pytest.raises(ArithmeticError, match="of the user"):
        model.fit(*make_data(), verbose=0)


def test_dropout_of_the_next_step_is_the_same_with_and_without_freezing():
    results = []
    for frozen in (False, True):
        model = make_model(freeze_rate=0.0)
        if frozen:
            kf.freeze(model, *make_data())
        model.fit(*make_data(), verbose=0, shuffle=False)
        results.append(model.get_weights())
    assert all((a == b).all() for a, b in zip(*results, strict=True))


def summed_gradients(model, batches):
    """The kernels, and the sums of their gradients by the backend itself, without Dropout."""
    of_kernels = [i for i, v in enumerate(model.trainable_variables) if v.name == "kernel"]
    total = [0.0, 0.0]
    for batch in batches:
        gradients = gradients_by_autodiff(model, *batch)
        total = [t + gradients[i] for t, i in zip(total, of_kernels, strict=True)]
    return [model.trainable_variables[i].numpy() for i in of_kernels], total


def masks_of(model):
    mask = kf.get_mask(model)
    return [mask[model.get_layer(name).kernel] for name in ("fc1", "fc2")]


@pytest.mark.cases(1, jax=0)
def test_gradients_of_several_batches_are_summed():
    x, y = make_data(96)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    model = make_model()
    model.get_layer("dropout").rate = 0.0
    weights, total = summed_gradients(model, [(x[i : i + 16], y[i : i + 16]) for i in (0, 16, 32)])
    kf.freeze(model, dataset, steps=3)
    expected = brute_force_mask([abs(g * w) for g, w in zip(total, weights, strict=True)], 42)
    assert all((a == b).all() for a, b in zip(masks_of(model), expected, strict=True))


def test_splitting_the_work_leaves_the_gradient():
    x, y = make_data(50)
    sample_weight = np.linspace(0.5, 2.0, 50).astype("float32")
    masks = []
    for batch_size in (None, 16):
        model = make_model()
        model.get_layer("dropout").rate = 0.0
        model.get_layer("norm").trainable = False  # statistics of a piece are those of the whole
        compile_model(model)
        masks.append(kf.freeze(model, x, y, sample_weight=sample_weight, batch_size=batch_size))
    assert masks[0] == masks[1]


def test_magnitude_keeps_the_largest_weights():
    model = make_model(criterion="magnitude")
    weights, _ = summed_gradients(model, [])
    kf.freeze(model, *make_data())
    expected = brute_force_mask([abs(w) for w in weights], 42)
    assert all((a == b).all() for a, b in zip(masks_of(model), expected, strict=True))


@pytest.mark.cases(1, jax=0)
def test_a_users_criterion_is_given_float32_weights_and_gradients():
    seen = []

    def criterion(weights, gradients):
        dtypes = map(keras.backend.standardize_dtype, (weights.dtype, gradients.dtype))
        seen.append((*dtypes, weights.shape == gradients.shape))
        return keras.ops.square(gradients)

    model = make_model(criterion=criterion)
    model.get_layer("dropout").rate = 0.0
    _, total = summed_gradients(model, [make_data()])
    kf.freeze(model, *make_data())
    expected = brute_force_mask([g**2 for g in total], 42)
    assert all((a == b).all() for a, b in zip(masks_of(model), expected, strict=True))
    assert seen == [("float32", "float32", True)] * 2


@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_random_mask_depends_on_the_seed_alone(way):
    def mask(seed, data):
        model = make_model(criterion="random", seed=seed)
        if way == "freeze":
            kf.freeze(model, *data)
        else:
            model.fit(*data, verbose=0)
        return kf.get_mask(model)

    first = mask(1, make_data())
    assert first == mask(1, make_data(seed=5))
    assert first != mask(2, make_data())
    assert first.num_trained == 42


def test_random_masks_are_the_same_in_both_ways():
    frozen, trained = (make_model(criterion="random", seed=3) for _ in range(2))
    kf.freeze(frozen, *make_data())
    trained.fit(*make_data(), verbose=0)
    assert kf.get_mask(frozen) == kf.get_mask(trained)


@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_layer_without_trained_weights_is_given_one(way):
    x, y = make_data()
    model = make_model(freeze_rate=0.99)
    model.get_layer("fc2").kernel.assign(np.zeros((12, 4)))  # all its scores are zero
    model.get_layer("fc1").kernel.assign(np.ones((10, 12)))
    # fc1 has no gradient while fc2 is zero: let magnitude decide.
    compile_model(model, freeze_rate=0.99, criterion="magnitude", seed=4)
    if way == "freeze":
        kf.freeze(model, x, y)
    else:
        model.fit(x, y, verbose=0)
    mask = kf.get_mask(model)
    fc1, fc2 = masks_of(model)
    assert (fc1.sum(), fc2.sum()) == (1, 1)
    assert (mask.num_trained, mask.num_rescued) == (2, 1)
    compile_model(model, freeze_rate=1.0, criterion="magnitude")
    assert kf.freeze(model, x, y, overwrite=True).num_trained == 0


def test_structured_inputs_and_several_outputs():
    keras.utils.set_random_seed(0)
    a, b = keras.Input((10,), name="a"), keras.Input((3,), name="b")
    hidden = layers.Dense(8, activation="relu")(layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, [layers.Dense(4)(hidden), layers.Dense(1)(hidden)])
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(32, 10)), "b": rng.normal(size=(32, 3))}
    y = [rng.integers(0, 4, 32), rng.normal(size=(32, 1))]

    def compiled():
        other = keras.models.clone_model(model)
        other.set_weights(model.get_weights())
        other.compile(
            kf.FreezeOptimizer("sgd", 0.8),
            [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"],
            loss_weights=[1.0, 0.3],
        )
        return other

    frozen, trained = compiled(), compiled()
    kf.freeze(frozen, x, y)
    trained.fit(x, y, batch_size=32, verbose=0, shuffle=False)
    assert kf.get_mask(frozen) == kf.get_mask(trained)


def test_subclassed_model_is_built_by_its_first_batch():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = layers.Dense(12, activation="relu"), layers.Dense(4)

        def call(self, x):
            return self.fc2(self.fc1(x))

    model = compile_model(Net())
    mask = kf.freeze(model, *make_data())
    assert mask.num_weights == 168
    model.fit(*make_data(), verbose=0)
    assert kf.get_mask(model) == mask


@pytest.mark.cases(1, jax=0)
def test_custom_loop_without_compile():
    model = build_model()
    optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.75)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = make_data()
    mask = kf.freeze(model, x, y, loss=loss, optimizer=optimizer)
    compiled = make_model()
    assert kf.freeze(compiled, x, y) == mask
    before = model.get_layer("fc1").kernel.numpy()
    _, train = loop("custom", optimizer)
    train(model, x, y)
    after, trained = model.get_layer("fc1").kernel.numpy(), mask["fc1/kernel"]
    assert (after[~trained] == before[~trained]).all()
    assert (after[trained] != before[trained]).any()


def test_layers_that_are_not_trainable_are_left_alone():
    model = build_model()
    model.get_layer("fc1").trainable = False
    mask = kf.freeze(compile_model(model), *make_data())
    assert list(mask) == [model.get_layer("fc2").kernel.path]
    assert (mask.num_weights, mask.num_trained) == (48, 12)


@pytest.mark.parametrize("exclude", ["fc2", ["fc2/kernel"], "layer"])
def test_excluded_layers_are_trained_whole(exclude):
    model = build_model()
    compile_model(model, exclude=model.get_layer("fc2") if exclude == "layer" else exclude)
    mask = kf.freeze(model, *make_data())
    assert mask.num_weights == 120
    before = model.get_layer("fc2").kernel.numpy()
    model.fit(*make_data(), verbose=0)
    assert (model.get_layer("fc2").kernel.numpy() != before).all()


def test_freezing_again_needs_overwrite_and_starts_afresh():
    model = make_model()
    kf.freeze(model, *make_data())
    model.fit(*make_data(), verbose=0, epochs=2)
    first, steps = kf.get_mask(model), int(model.optimizer.iterations)
    model.optimizer.learning_rate = 0.03
    with pytest.raises(ValueError, match="frozen already"):
        kf.freeze(model, *make_data(seed=9))
    assert kf.get_mask(model) == first
    second = kf.freeze(model, *make_data(seed=9), overwrite=True)
    assert second != first
    assert int(model.optimizer.iterations) == steps
    assert float(model.optimizer.learning_rate) == np.float32(0.03)
    assert all((m.numpy() == 0.0).all() for m in model.optimizer.inner_optimizer.momentums)
    before = model.get_layer("fc1").kernel.numpy()
    model.fit(*make_data(), verbose=0)
    moved = model.get_layer("fc1").kernel.numpy() != before
    assert moved.any()
    assert not (moved & ~masks_of(model)[0]).any()


def test_mask_of_the_first_batch_is_not_replaced_in_silence():
    model = make_model()
    model.fit(*make_data(), verbose=0)
    with pytest.raises(ValueError, match="frozen already"):
        kf.freeze(model, *make_data())


# Masks of one's own


def own_mask():
    return np.arange(120).reshape(10, 12) % 3 == 0


@pytest.mark.parametrize("kind", ["mapping", "function", "FreezeMask", "tensor", "short path"])
def test_mask_of_ones_own_decides(kind):
    model = make_model()
    kernel = model.get_layer("fc1").kernel
    masks = {
        "mapping": {kernel.path: own_mask()},
        "function": lambda v: own_mask() if v is kernel else None,
        "FreezeMask": kf.freeze(make_model(), mask={"fc1/kernel": own_mask()}),
        "tensor": {kernel.path: tf.constant(own_mask())},
        "short path": {"fc1/kernel": own_mask()},
    }
    mask = kf.freeze(model, mask=masks[kind])
    assert mask.num_trained == 40 + 48  # what is missing stays trained
    before = kernel.numpy()
    model.fit(*make_data(), verbose=0, epochs=2)
    moved = kernel.numpy() != before
    assert not (moved & ~own_mask()).any()
    assert moved.any()
    assert kf.get_mask(model) == mask


def test_biases_may_be_frozen_by_name_and_layers_whole():
    model = make_model()
    nothing = np.zeros((12, 4), bool)
    mask = {"fc1/bias": np.arange(12) < 5, "fc2/kernel": nothing}
    mask = kf.freeze(model, mask=mask)
    before = [v.numpy() for v in model.trainable_variables]
    model.fit(*make_data(), verbose=0)
    after = [v.numpy() for v in model.trainable_variables]
    bias = [v.path.endswith("fc1/bias") for v in model.trainable_variables].index(True)
    assert ((after[bias] != before[bias]) == (np.arange(12) < 5)).all()
    assert (model.get_layer("fc2").kernel.numpy() == before[-2]).all()
    # Biases are no weights: they are in no freezing rate.
    assert (mask.num_weights, mask.num_trained) == (168, 120)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"fc9/kernel": np.ones((10, 12), bool)}, "fc9/kernel.*names no trainable variable"),
        ({"fc1/kernel": np.ones((12, 10), bool)}, r"fc1/kernel.*\(10, 12\).*\(12, 10\)"),
        ({"fc1/kernel": np.ones((10, 12))}, "fc1/kernel.*boolean.*float64"),
        ({"kernel": np.ones((10, 12), bool)}, "'kernel' names several"),
        ({3: np.ones((10, 12), bool)}, "3 names no"),
        ({"fc1/kernel": own_mask(), "sequential/fc1/kernel": own_mask()}, "twice|names no"),
        (lambda v: np.ones(3, bool), "shape"),
        (kf.FreezeMask([]), None),
    ],
)
def test_wrong_masks_name_paths_shapes_and_dtypes(mask, message):
    model = make_model()
    if message is None:
        assert kf.freeze(model, mask=mask).freeze_rate == 0.0
        return
    with pytest.raises(ValueError, match=message):
        kf.freeze(model, mask=mask)
    assert kf.get_mask(model) is None


def test_mask_of_another_network_is_refused():
    other = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    mask = kf.freeze(compile_model(other), mask=lambda v: None)
    with pytest.raises(ValueError, match="shape"):
        kf.freeze(make_model(), mask=mask)


def test_mask_against_exclude_is_refused():
    model = make_model(exclude="fc2")
    with pytest.raises(ValueError, match="exclude"):
        kf.freeze(model, mask={"fc2/kernel": np.zeros((12, 4), bool)})
    with pytest.raises(TypeError, match="mask"):
        kf.freeze(model, mask=np.ones((10, 12), bool))


# Bad input


def labels_out_of_range():
    x, y = make_data()
    return {"x": x, "y": y + 4}


def with_nan(array="x"):
    x, y = make_data()
    x[3, 2] = np.nan
    return {"x": x, "y": y}


def wrong_shape():
    x, y = make_data()
    return {"x": x[:, :7], "y": y}


def unequal():
    x, y = make_data()
    return {"x": x, "y": y[:9]}


def empty_dataset():
    return {"x": tf.data.Dataset.from_tensor_slices(make_data()).take(0).batch(8)}


def short_dataset():
    return {"x": tf.data.Dataset.from_tensor_slices(make_data()).batch(32), "steps": 5}


def dataset_and_labels():
    x, y = make_data()
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(32), "y": y}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (labels_out_of_range, "labels"),
        (with_nan, "loss of batch 0 is nan"),
        (wrong_shape, "shape"),
        (unequal, "64"),
        (empty_dataset, "0 batches"),
        (short_dataset, "2 batches"),
        (dataset_and_labels, "y must be None"),
        (lambda: {"x": make_data()[0][:0], "y": make_data()[1][:0]}, "length"),
        (dict, "x=None"),
        (lambda: {"x": make_data()[0], "y": make_data()[1], "steps": 2}, "steps"),
        (lambda: {"x": make_data()[0], "y": make_data()[1], "steps": 0}, "steps"),
        (lambda: {"x": make_data()[0], "y": make_data()[1], "batch_size": 0}, "batch_size"),
        (lambda: {"x": make_data()[0]}, "targets"),
        (lambda: {"x": make_data()[0].tolist(), "y": make_data()[1].tolist()}, "np.asarray"),
        (lambda: {"x": np.full((4, 10), "a"), "y": np.zeros(4, int)}, "dtypes|string|of numbers"),
        (lambda: {**dict(zip("xy", make_data(), strict=True)), "loss": ["mse"]}, "one loss"),
    ],
)
def test_bad_data_are_named_and_change_nothing(arguments, message):
    if (arguments, keras.backend.backend()) == (labels_out_of_range, "jax"):
        pytest.skip("Keras gives labels that do not exist a loss of 0 on JAX, in `fit` as well")
    model = make_model(frozen_weights="zero")
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        kf.freeze(model, **arguments())
    assert everything(model) == before
    assert kf.get_mask(model) is None
    kf.freeze(model, *make_data())  # and it can be frozen still


def test_loss_that_is_nan_is_named():
    model = build_model()
    model.compile(kf.FreezeOptimizer("sgd"), lambda y, p: keras.ops.sum(p) * float("nan"))
    with pytest.raises(ValueError, match="nan"):
        kf.freeze(model, *make_data())


@pytest.mark.cases(1, jax=0)
def test_gradient_that_is_not_finite_names_the_layer():
    model = build_model()
    # sqrt has an infinite slope at 0, where the loss itself is finite.
    model.compile(kf.FreezeOptimizer("sgd"), lambda y, p: keras.ops.mean(keras.ops.sqrt(p * 0.0)))
    with pytest.raises(ValueError, match=r"fc./kernel"):
        kf.freeze(model, *make_data())


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_first_batch_with_nan_stops_and_changes_nothing(run_eagerly):
    model = make_model()
    model.run_eagerly = run_eagerly
    before = values_of(model.trainable_variables)
    # On JAX, a step cannot raise.
    raises = pytest.raises(Exception, match=r"fc1/kernel.*not finite")
    warns = pytest.warns(RuntimeWarning, match="No step has decided")
    with warns if keras.backend.backend() == "jax" else raises:
        model.fit(**with_nan(), batch_size=64, verbose=0)
    assert all(map(same_bits, before, values_of(model.trainable_variables)))
    assert kf.get_mask(model) is None


@pytest.mark.cases(1)
@tensorflow_only
def test_first_batch_with_nan_decides_nothing_under_xla():
    model = make_model()
    model.jit_compile = True
    before = [v.numpy() for v in model.trainable_variables]
    model.fit(**with_nan(), batch_size=64, verbose=0)
    assert all(
        (a == b.numpy()).all() for a, b in zip(before, model.trainable_variables, strict=True)
    )
    assert kf.get_mask(model) is None


def test_models_that_cannot_be_frozen_say_why():
    model = build_model()
    with pytest.raises(ValueError, match="not compiled"):
        kf.freeze(model, *make_data())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"FreezeOptimizer.*SGD"):
        kf.freeze(model, *make_data())
    with pytest.raises(ValueError, match="FreezeOptimizer"):
        kf.prune(model)
    assert kf.get_mask(model) is None
    for function in (kf.freeze, kf.compute_saliency):
        with pytest.raises(TypeError, match="model"):
            function("model", *make_data())
    with pytest.raises(TypeError, match="model"):
        kf.reinitialize("model")
    for x in (None, "digits"):
        with pytest.raises(TypeError, match=f"x={x!r}"):
            kf.compute_saliency(model, x)
    with pytest.raises(ValueError, match=r"criterion.*None"):
        kf.compute_saliency(make_model(), *make_data(), criterion=lambda w, g: None)
    without_weights = compile_model(keras.Sequential([keras.Input((10,)), layers.ReLU()]))
    with pytest.raises(ValueError, match="no trainable variables"):
        kf.freeze(without_weights, *make_data())
    without_kernels = compile_model(keras.Sequential([keras.Input((10,)), layers.PReLU()]))
    with pytest.raises(ValueError, match="no weights"):
        kf.freeze(without_kernels, *make_data())
    unbuilt = compile_model(keras.Sequential([layers.Dense(4)]))
    with pytest.raises(ValueError, match="not built"):
        kf.freeze(unbuilt, mask={})


@pytest.mark.parametrize(
    "scores", ["abc", np.ones((4, 3), "complex64"), [[1.0], [2.0, 3.0]]], ids=type
)
def test_scores_that_are_no_real_numbers_are_refused(scores):
    model, (x, y) = make_model(), make_data()
    path = next(iter(kf.compute_saliency(model, x, y)))
    with pytest.raises(TypeError, match=f"`criterion` must return a tensor.*{path}"):
        kf.compute_saliency(model, x, y, criterion=lambda w, g: scores)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"freeze_rate": -0.1}, ValueError, "freeze_rate=-0.1"),
        ({"freeze_rate": 1.5}, ValueError, "freeze_rate=1.5"),
        ({"freeze_rate": float("nan")}, ValueError, "freeze_rate=nan"),
        ({"freeze_rate": "0.9"}, TypeError, "freeze_rate='0.9'"),
        ({"freeze_rate": True}, TypeError, "freeze_rate=True"),
        ({"criterion": "snap"}, ValueError, "'snip'.*criterion='snap'"),
        ({"criterion": 3}, TypeError, "criterion=3"),
        ({"frozen_weights": "melt"}, ValueError, "'keep'.*'melt'"),
        ({"frozen_weights": "decay"}, ValueError, "l2 > 0"),
        ({"l2": -1e-4}, ValueError, "l2=-0.0001"),
        ({"l2": "x"}, TypeError, "l2='x'"),
        ({"l2": float("inf")}, ValueError, "l2=inf"),
        ({"exclude": 3}, TypeError, "exclude=3"),
        ({"exclude": {"fc1": 1}}, TypeError, "exclude={'fc1': 1}"),
        ({"exclude": ("fc1", 3)}, TypeError, r"exclude=\['fc1', 3\]"),
        ({"exclude": [""]}, ValueError, r"exclude=\[''\]"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": 0.5}, TypeError, "seed=0.5"),
        ({"weight_decay": 0.1}, ValueError, "weight_decay.*inner optimizer"),
        ({"clipnorm": 1.0}, ValueError, "clipnorm.*inner optimizer"),
    ],
)
def test_bad_arguments_of_the_optimizer_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        kf.FreezeOptimizer(keras.optimizers.SGD(), **arguments)


@pytest.mark.parametrize(
    ("inner", "error", "message"),
    [
        (lambda: 3, TypeError, "inner_optimizer=3"),
        (lambda: keras.optimizers.LossScaleOptimizer("sgd" and keras.optimizers.SGD()), ValueError,
         "LossScaleOptimizer\\(FreezeOptimizer"),
        (lambda: kf.FreezeOptimizer("sgd"), ValueError, "must not be a FreezeOptimizer"),
    ],
)  # fmt: skip
def test_inner_optimizers_that_cannot_work_are_refused(inner, error, message):
    with pytest.raises(error, match=message):
        kf.FreezeOptimizer(inner())


def test_inner_optimizer_in_use_is_refused():
    sgd = keras.optimizers.SGD()
    sgd.build(build_model().trainable_variables)
    with pytest.raises(ValueError, match="already built"):
        kf.FreezeOptimizer(sgd)


@pytest.mark.parametrize("argument", ["clipnorm", "clipvalue", "global_clipnorm", "weight_decay"])
def test_decay_refuses_what_breaks_its_recurrence(argument):
    with pytest.raises(ValueError, match=argument):
        kf.FreezeOptimizer(keras.optimizers.SGD(**{argument: 0.1}), frozen_weights="decay", l2=0.1)
    with pytest.raises(ValueError, match="Adam"):
        kf.FreezeOptimizer(keras.optimizers.Adam(), frozen_weights="decay", l2=0.1)


def test_exclude_that_names_nothing_is_an_error():
    model = make_model(exclude="fc7")
    with pytest.raises(ValueError, match="fc7"):
        kf.freeze(model, *make_data())
    with pytest.raises(ValueError, match="fc7"):
        model.fit(*make_data(), verbose=0)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="plain Keras takes it as well")
def test_optimizer_of_one_model_is_refused_by_another():
    model = make_model()
    kf.freeze(model, *make_data())
    other = build_model(seed=1)
    other.compile(model.optimizer, "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="Unknown variable"):
        other.fit(*make_data(), verbose=0)


@pytest.mark.cases(1)
@tensorflow_only
def test_refused_freeze_leaves_an_earlier_mask_and_its_optimizer_alone():
    model = make_model()
    kf.freeze(model, *make_data())
    model.fit(*make_data(), verbose=0)
    mask, before = kf.get_mask(model), [v.numpy() for v in model.optimizer.variables]
    with (
        tf.distribute.OneDeviceStrategy("cpu:0").scope(),
        pytest.raises(ValueError, match=r"tf\.distribute"),
    ):
        kf.freeze(model, *make_data(seed=3), overwrite=True)
    assert kf.get_mask(model) == mask
    after = [v.numpy() for v in model.optimizer.variables]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    model.fit(*make_data(), verbose=0)


def test_refused_freeze_leaves_no_mask_behind():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((10,)), layers.Dense(4, dtype="bfloat16")])
    compile_model(model, frozen_weights="decay", l2=0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match="float32"):
            kf.freeze(model, *make_data())
        assert kf.get_mask(model) is None


def test_function_as_mask_is_asked_for_weights_only():
    model = make_model()
    asked = []
    mask = kf.freeze(model, mask=lambda v: asked.append(v.path) or abs(v.numpy()) > 0.2)
    assert [path.split("/")[-1] for path in asked] == ["kernel", "kernel"]
    model.fit(*make_data(), verbose=0)
    assert (model.get_layer("fc1").bias.numpy() != 0.0).any()
    assert 0 < mask.num_trained < mask.num_weights


def test_model_of_a_custom_loop_can_be_asked_pruned_and_reinitialized():
    model = build_model()
    optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.75, frozen_weights="zero")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mask = kf.freeze(model, *make_data(), loss=loss, optimizer=optimizer)
    assert kf.get_mask(model) == mask
    assert kf.report(model).num_trained_weights == 42
    kf.reinitialize(model, seed=2)
    kernel = model.get_layer("fc1").kernel
    assert (kernel.numpy()[~mask[kernel]] == 0.0).all()
    assert (kernel.numpy()[mask[kernel]] != 0.0).all()
    kf.prune(model)
    compile_model(model)  # from now on the compiled optimizer is the one that counts
    assert kf.get_mask(model) == mask


def test_scores_that_are_all_zero_are_warned_of():
    x, y = make_data()
    with pytest.warns(UserWarning, match="All scores are zero"):
        kf.freeze(make_model(), x, y, sample_weight=np.zeros(64))


@pytest.mark.cases(1)
@tensorflow_only
def test_sparse_inputs_are_one_batch_too():
    dense, y = make_data()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((10,), sparse=True), layers.Dense(4, name="fc")])
    compile_model(model)
    mask = kf.freeze(model, tf.sparse.from_dense(dense), y)
    other = keras.Sequential([keras.Input((10,)), layers.Dense(4, name="fc")])
    other.set_weights(model.get_weights())
    assert kf.freeze(compile_model(other), dense, y) == mask


@pytest.mark.cases(1)
@tensorflow_only
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_strategies_that_were_not_tested_are_refused(way):
    with tf.distribute.experimental.CentralStorageStrategy().scope():
        model = make_model()
    with pytest.raises(ValueError, match=r"OneDeviceStrategy\. Received: Central"):
        kf.freeze(model, *make_data()) if way == "freeze" else model.fit(*make_data(), verbose=0)


@pytest.mark.cases(1, jax=0)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_constraints_wait_for_a_gradient_as_in_keras(way):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(4, kernel_constraint="non_neg", bias_constraint="non_neg"),
        ]
    )
    optimizer = compile_model(model).optimizer
    kernel, bias = model.trainable_variables
    if way == "freeze":
        kf.freeze(model, *make_data())
    else:
        model.fit(*make_data(), verbose=0)
    bias.assign(np.full(4, -1.0))
    ones = [keras.ops.ones((10, 4)), keras.ops.ones(4)]
    optimizer.apply([ones[0], None], [kernel, bias])
    assert (bias.numpy() == -1.0).all()
    optimizer.apply(ones, [kernel, bias])
    assert (bias.numpy() == 0.0).all()


# prune and reinitialize


@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_pruned_weights_are_zero_and_stay_zero(way):
    model = make_model(l2=1e-3)
    with pytest.raises(ValueError, match="frozen"):
        kf.prune(model)
    if way == "freeze":
        kf.freeze(model, *make_data())
    model.fit(*make_data(), verbose=0)
    before = model.get_layer("fc1").kernel.numpy()
    kf.prune(model)
    trained = masks_of(model)[0]
    assert (model.get_layer("fc1").kernel.numpy() == np.where(trained, before, 0.0)).all()
    model.fit(*make_data(), verbose=0)
    assert (model.get_layer("fc1").kernel.numpy()[~trained] == 0.0).all()
    assert (model.get_layer("fc2").kernel.numpy()[~masks_of(model)[1]] == 0.0).all()


@pytest.mark.parametrize("frozen_weights", ["keep", "zero", "decay"])
def test_reinitialized_network_keeps_its_mask_and_starts_afresh(frozen_weights):
    model = make_model(frozen_weights=frozen_weights, l2=1e-3)
    mask = kf.freeze(model, *make_data())
    model.fit(*make_data(), verbose=0, epochs=2)
    kf.reinitialize(model, "kaiming_uniform", seed=5)
    assert kf.get_mask(model) == mask
    assert int(model.optimizer.iterations) == 0
    assert all((m.numpy() == 0).all() for m in model.optimizer.inner_optimizer.momentums)
    for stream, (name, trained) in enumerate(zip(("fc1", "fc2"), masks_of(model), strict=True)):
        kernel = model.get_layer(name).kernel
        drawn = kf.initializers.KaimingUniform(seed=5, stream=stream)(kernel.shape)
        keep = trained if frozen_weights == "zero" else True
        np.testing.assert_array_equal(kernel.numpy(), np.where(keep, drawn, 0.0))
        assert (model.get_layer(name).bias.numpy() == 0.0).all()
    norm = model.get_layer("norm")
    assert [float(w.numpy().mean()) for w in norm.weights] == [1.0, 0.0, 0.0, 1.0]
    before = model.get_layer("fc1").kernel.numpy()
    model.fit(*make_data(), verbose=0)
    moved = model.get_layer("fc1").kernel.numpy() != before
    assert moved.any()
    if frozen_weights != "decay":
        assert not (moved & ~masks_of(model)[0]).any()


def test_reinitialize_resets_the_forget_bias_and_needs_no_mask():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(4), layers.Dense(2)])
    fresh = [v.numpy() for v in model.trainable_variables if v.name == "bias"]
    for variable in model.trainable_variables:
        variable.assign(np.full(variable.shape, 9.0))
    kf.reinitialize(model, seed=1)
    again = [v.numpy() for v in model.trainable_variables if v.name == "bias"]
    assert all((a == b).all() for a, b in zip(fresh, again, strict=True))
    kernels = [v.numpy() for v in model.trainable_variables if v.name != "bias"]
    assert all((k != 9.0).all() for k in kernels)
    kf.reinitialize(model, seed=1)
    kernels_again = [v.numpy() for v in model.trainable_variables if v.name != "bias"]
    assert all((a == b).all() for a, b in zip(kernels, kernels_again, strict=True))
    with pytest.raises(ValueError, match="seed"):
        kf.reinitialize(model, seed=-1)
    with pytest.raises(ValueError, match="xavier"):
        kf.reinitialize(model, "xavier")
