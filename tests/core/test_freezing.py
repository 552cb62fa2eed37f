"""freeze: where masks come from, and that nothing else changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from freezing_cases import build_model, compile_model, everything, make_data, make_model, masks_of
from helpers import gradients_by_autodiff, same_bits, values_of
from keras import layers
from loops import loop
from oracle import brute_force_mask

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)
tensorflow_only = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="XLA's, tf.distribute's or tf.sparse's"
)


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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1, tensorflow=1)
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1, tensorflow=1, jax=1)
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


@pytest.mark.cases(1, tensorflow=1)
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
