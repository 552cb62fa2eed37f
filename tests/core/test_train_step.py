"""Models with a training step of their own: what it hands to the optimizer decides the mask."""

import random

import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    crossentropy,
    equals_by_hand,
    is_weight,
    mask_by_hand,
    same_bits,
    sgd,
    value_of,
    values_of,
)
from keras import ops
from own_steps import BACKEND, OwnStep, gradients_by_hand, make_step, step_of

import keras_freeze as kf
from keras_freeze.masks.drawn import draw_of

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=0)

RATE = 0.75


def freezing(**arguments):
    return kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=RATE, **arguments)


def dense(*units, inputs=6, name=None, **arguments):
    layers = [keras.layers.Dense(n, activation="tanh", **arguments) for n in units]
    return keras.Sequential([keras.Input((inputs,)), *layers], name=name)


class AutoEncoder(OwnStep):
    """A variational autoencoder as in Keras's guide: an outer model that is never called."""

    def __init__(self):
        super().__init__()
        self.encoder = dense(8, 4, name="encoder")
        self.decoder = dense(8, 6, inputs=2, name="decoder")
        self.seed_generator = keras.random.SeedGenerator(3)

    def loss_of(self, data):
        x = data[0] if isinstance(data, (tuple, list)) else data
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1.0
        return ops.mean(ops.square(decoded - x)) + 0.1 * ops.mean(divergence)


class Flow(OwnStep):
    """Like a normalizing flow: a loss in `train_step`, and kernel regularizers."""

    def __init__(self):
        super().__init__()
        self.scale = dense(8, 6, kernel_regularizer=keras.regularizers.L2(0.5))
        self.shift = dense(8, 6, kernel_regularizer=keras.regularizers.L2(0.5))

    def call(self, x):
        return x * ops.exp(self.scale(x)) + self.shift(x), self.scale(x)

    def loss_of(self, data):
        x = data[0] if isinstance(data, (tuple, list)) else data
        y, log_determinant = self(x)
        return ops.mean(ops.square(y)) - ops.mean(log_determinant)


class DictBatches(OwnStep):
    """Trains on dicts that only the step understands."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=1),
                keras.layers.Dense(3),
            ]
        )

    def call(self, x, training=False):
        return self.network(x, training=training)

    def loss_of(self, data):
        return crossentropy()(data["label"], self(data["image"], training=True))


class Distiller(OwnStep):
    def __init__(self):
        super().__init__()
        self.teacher = dense(20, 3, name="teacher")
        self.student = dense(8, 3, name="student")

    def trained_variables(self):
        return self.student.trainable_variables

    def loss_of(self, data):
        x, y = data
        target = ops.stop_gradient(self.teacher(x))
        return ops.mean(ops.square(self.student(x) - target)) + crossentropy()(y, self.student(x))


class Adversarial(keras.Model):
    """WGAN-like: two optimizers, and several steps of the critic for one of the generator."""

    n_critic = 2

    def __init__(self, d_optimizer, g_optimizer):
        super().__init__()
        self.generator = dense(8, 6, inputs=2, name="generator")
        self.critic = dense(10, 1, name="critic")
        self.noise = [np.full((48, 2), 0.1 * i, "float32") for i in range(self.n_critic + 1)]
        self.counter = 0
        super().compile(run_eagerly=True)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def critic_loss(self, x, i):
        return ops.mean(self.critic(self.generator(self.noise[i]))) - ops.mean(self.critic(x))

    def generator_loss(self):
        return -ops.mean(self.critic(self.generator(self.noise[-1])))

    def run(self, data):
        x = data[0] if isinstance(data, (tuple, list)) else data
        for i in range(self.n_critic):
            step_of(
                self.d_optimizer,
                lambda i=i: self.critic_loss(x, i),
                self.critic.trainable_variables,
            )
        step_of(self.g_optimizer, self.generator_loss, self.generator.trainable_variables)
        self.counter += 1

    train_step = make_step(run)


def assert_mask_by_hand(mask, variables, gradients, rate=RATE):
    """The mask is equation 1 over these variables, and over no others."""
    pairs = [(v, g) for v, g in zip(variables, gradients, strict=True) if is_weight(v)]
    expected = mask_by_hand([value_of(v) for v, _ in pairs], [g for _, g in pairs], rate)
    assert len(mask.entries) == len(pairs)
    for (variable, _), by_hand in zip(pairs, expected, strict=True):
        assert equals_by_hand(mask[variable], by_hand)


def expected_mask_holds(model, mask, data, rate=RATE):
    seeds = [(v, value_of(v)) for v in model.non_trainable_variables]
    variables = model.trained_variables()
    gradients = gradients_by_hand(lambda: model.loss_of(data), variables)
    for variable, value in seeds:
        variable.assign(value)
    assert_mask_by_hand(mask, variables, gradients, rate)


def tensors(data):
    return keras.tree.map_structure(ops.convert_to_tensor, data)


def compiled(make, optimizer=None):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(optimizer or freezing())
    return model


def every_value(model):
    return values_of([*model.trainable_variables, *model.non_trainable_variables])


def assert_same_values(first, second):
    assert len(first) == len(second)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


CASES = {
    "vae": (AutoEncoder, lambda x, y: x),
    "flow": (Flow, lambda x, y: (x, y)),
    "dict": (DictBatches, lambda x, y: {"image": x, "label": y}),
    "distiller": (Distiller, lambda x, y: (x, y)),
}


def teacher_is_fixed(model):
    """On JAX the gradients of a step are those of all trainable variables."""
    if isinstance(model, Distiller) and BACKEND == "jax":
        model.teacher.trainable = False
    return model


def made(case, optimizer=None):
    make, pack = CASES[case]
    model = teacher_is_fixed(compiled(make, optimizer))
    if BACKEND != "tensorflow":
        model.built = True  # else `fit` calls the outer model
    if not all(one.built for one in model._flatten_layers(include_self=False)):
        model(blobs()[0])
    data = pack(*blobs())
    arguments = data if isinstance(data, tuple) else (data,)
    return model, data, arguments


@pytest.mark.parametrize("case", CASES)
def test_the_mask_is_of_the_gradients_that_the_step_hands_to_the_optimizer(case):
    model, data, arguments = made(case)
    before = every_value(model)
    mask = kf.freeze(model, *arguments)
    assert_same_values(every_value(model), before)
    expected_mask_holds(model, mask, tensors(data))
    assert kf.get_mask(model) == mask


@pytest.mark.parametrize("case", CASES)
def test_training_on_keeps_what_is_frozen(case):
    model, _, arguments = made(case)
    mask = kf.freeze(model, *arguments)
    variables = model.trained_variables()
    before = values_of(variables)
    fit_arguments = {"epochs": 2, "shuffle": False, "verbose": 0, "batch_size": 16}
    model.fit(*arguments, **fit_arguments)
    assert_frozen_bits_kept(variables, mask, before)
    assert_trained_moved(variables, mask, before)
    assert kf.get_mask(model) == mask


def test_all_state_is_put_back_bit_for_bit():
    model, _, (data,) = made("dict")
    model.rng = np.random.default_rng(5)
    own_loss = model.loss_of
    tracker = keras.metrics.Mean()

    def loss_of(data):  # that draws from everything
        model.rng.normal(), random.random(), np.random.random()
        noise = keras.random.normal((6,))
        model.count = getattr(model, "count", 0) + 1
        return own_loss({**data, "image": data["image"] + 0.01 * noise})

    model.loss_of = loss_of
    model.tracker = tracker
    model.count = 7
    tracker.update_state(3.0)
    keras.random.normal((1,))  # so that Keras's generator exists
    states = model.rng.bit_generator.state, random.getstate(), np.random.get_state()[1].tobytes()
    before = [*every_value(model), *values_of(tracker.variables)]
    next_of_keras = peek(lambda: keras.random.normal((3,)))
    kf.freeze(model, data)
    after = model.rng.bit_generator.state, random.getstate(), np.random.get_state()[1].tobytes()
    assert after == states
    assert model.count == 7
    assert_same_values([*every_value(model), *values_of(tracker.variables)], before)
    assert same_bits(value_of(keras.random.normal((3,))), next_of_keras)


def peek(draw):
    """What is drawn next from Keras's own generator, which is put back."""
    from keras.src.backend.common.global_state import get_global_attribute

    state = get_global_attribute("global_seed_generator").state
    before = value_of(state)
    drawn = value_of(draw())
    state.assign(before)
    return drawn


def test_batches_of_a_dataset_are_summed():
    model, _, _ = made("flow")
    x, y = blobs()
    batches = [(x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])]
    mask = kf.freeze(model, iter(batches), steps=2)

    def loss():
        return sum(model.loss_of(tensors(batch)) for batch in batches[:2])

    variables = model.trainable_variables
    assert_mask_by_hand(mask, variables, gradients_by_hand(loss, variables))


def test_batches_of_more_parts_than_keras_knows_go_to_the_step_as_they_are():
    class FourParts(Flow):
        def loss_of(self, data):
            x, _, z, weight = data
            return super().loss_of(x) + weight[0] * ops.mean(ops.square(self.scale(z))) * 5.0

    keras.utils.set_random_seed(0)
    model = compiled(FourParts)
    x, y = blobs()
    model(x)
    batch = (x, y, x[::-1].copy(), np.ones((48,), "float32"))
    mask = kf.freeze(model, iter([batch]))
    expected_mask_holds(model, mask, tensors(batch))


def test_a_model_of_built_layers_is_built_for_a_step_that_needs_its_state():
    """Of a siamese network: only JAX's `stateless_call` asks whether the outer model is built."""

    class Tower(OwnStep):
        def __init__(self):
            super().__init__()
            self.tower = dense(8, 4)

        def call(self, pair):
            return self.tower(pair[0]) - self.tower(pair[1])

        def loss_of(self, data):
            if BACKEND == "jax":
                self.stateless_call(self.trainable_variables, self.non_trainable_variables, data[0])
            return ops.mean(ops.square(self(data[0])))

    model = compiled(Tower)
    x, _ = blobs()
    assert not model.built
    assert kf.freeze(model, (x, x[::-1].copy())).num_weights == 6 * 8 + 8 * 4


def gan(d_optimizer=None, g_optimizer=None):
    keras.utils.set_random_seed(0)
    return Adversarial(d_optimizer or freezing(), g_optimizer or freezing())


def test_two_optimizers_get_a_mask_each():
    model = gan(g_optimizer=kf.FreezeOptimizer(sgd(), 0.5))
    x, _ = blobs()
    before = every_value(model)
    kf.freeze(model, x)
    assert_same_values(every_value(model), before)
    assert model.counter == 0
    critic, generator = model.critic.trainable_variables, model.generator.trainable_variables
    by_hand = gradients_by_hand(lambda: model.critic_loss(x, 0) + model.critic_loss(x, 1), critic)
    assert_mask_by_hand(model.d_optimizer.mask, critic, by_hand)
    by_hand = gradients_by_hand(model.generator_loss, generator)
    assert_mask_by_hand(model.g_optimizer.mask, generator, by_hand, rate=0.5)


def test_the_masks_of_two_optimizers_are_drawn():
    x, _ = blobs()
    counts = []
    for drawn in (False, True):
        model = gan()
        kf.freeze(model, x, drawn=drawn)
        masks = [model.d_optimizer.mask, model.g_optimizer.mask]
        counts.append([[int(e.trained.sum()) for e in mask.entries] for mask in masks])
    assert counts[0] == counts[1]
    drawn = [draw_of(v) for v in model.trainable_variables if is_weight(v)]
    entries = [entry for mask in masks[::-1] for entry in mask.entries]  # the generator comes first
    for draw, entry in zip(drawn, entries, strict=True):
        assert np.array_equal(draw.mask(entry.trained.shape), entry.trained)


def test_both_networks_of_a_gan_keep_what_is_frozen():
    model = gan()
    x, _ = blobs()
    kf.freeze(model, x)
    networks = [
        (model.critic.trainable_variables, model.d_optimizer.mask),
        (model.generator.trainable_variables, model.g_optimizer.mask),
    ]
    before = [values_of(variables) for variables, _ in networks]
    for _ in range(3):
        model.run(ops.convert_to_tensor(x))
    for (variables, mask), old in zip(networks, before, strict=True):
        assert_frozen_bits_kept(variables, mask, old)
        assert_trained_moved(variables, mask, old)


def build_optimizers(model):
    model.d_optimizer.build(model.critic.trainable_variables)
    model.g_optimizer.build(model.generator.trainable_variables)


def test_one_mask_for_two_optimizers_is_told_to_both():
    model = gan()
    build_optimizers(model)
    mask = kf.freeze(model, mask=lambda v: np.arange(v.shape[0] * v.shape[1]).reshape(v.shape) < 5)
    assert kf.get_mask(model) == mask
    variables = model.trainable_variables
    before = values_of(variables)
    model.run(ops.convert_to_tensor(blobs()[0]))
    assert_frozen_bits_kept(variables, mask, before)
    assert_trained_moved(variables, mask, before)


def test_a_mask_of_weights_that_another_optimizer_trains_is_an_error():
    model = gan(g_optimizer=keras.optimizers.SGD(0.1))
    build_optimizers(model)
    frozen = {
        v.path: np.zeros(v.shape, bool)
        for v in model.trainable_variables
        if is_weight(v)  # of both networks
    }
    with pytest.raises(ValueError, match=r"freezes.*generator.*no FreezeOptimizer"):
        kf.freeze(model, mask=frozen)
    assert kf.get_mask(model) is None
    of_critic = {path: array for path, array in frozen.items() if path.startswith("critic")}
    kf.freeze(model, mask=of_critic)
    assert model.d_optimizer.mask.num_trained == 0


@pytest.mark.parametrize("excluding", ["d_optimizer", "g_optimizer"])
def test_a_mask_that_one_of_two_optimizers_refuses_changes_neither(excluding):
    network = {"d_optimizer": "critic", "g_optimizer": "generator"}[excluding]
    model = gan(**{excluding: freezing(exclude=[network])})
    build_optimizers(model)
    with pytest.raises(ValueError, match="`exclude` says"):
        kf.freeze(model, mask=lambda v: np.zeros(v.shape, bool))
    assert model.d_optimizer.mask is None
    assert model.g_optimizer.mask is None


def test_a_plain_optimizer_beside_is_put_back_to_what_it_was():
    plain = keras.optimizers.Adam(0.1)
    model = gan(g_optimizer=plain)
    x, _ = blobs()
    generator = values_of(model.generator.trainable_variables)
    kf.freeze(model, x)
    assert_same_values(values_of(model.generator.trainable_variables), generator)
    assert not plain.built
    assert int(plain.iterations) == 0
    assert len(plain.variables) == 2
    model.run(ops.convert_to_tensor(x))
    assert plain.built
    assert int(plain.iterations) == 1
    state = values_of(plain.variables)
    kf.freeze(model, x, overwrite=True)
    assert_same_values(values_of(plain.variables), state)


def test_an_error_in_the_step_leaves_everything_as_it_was():
    plain = keras.optimizers.Adam(0.1)
    model = gan(d_optimizer=plain)
    x, _ = blobs()

    class BrokenError(Exception):
        pass

    def generator_loss():
        raise BrokenError

    own = model.generator_loss
    model.generator_loss = generator_loss
    before = every_value(model)
    with pytest.raises(BrokenError):
        kf.freeze(model, x)
    assert_same_values(every_value(model), before)
    assert not plain.built
    assert not model.g_optimizer.built
    assert model.g_optimizer.mask is None
    model.generator_loss = own
    kf.freeze(model, x)
    assert model.g_optimizer.mask is not None


def test_a_scale_that_is_too_large_is_halved_as_in_training():
    plain, _, arguments = made("flow")
    expected = kf.freeze(plain, *arguments)
    outer = keras.optimizers.LossScaleOptimizer(freezing(), initial_scale=2.0**127)
    model, _, arguments = made("flow", outer)
    assert kf.freeze(model, *arguments) == expected
    assert float(outer.dynamic_scale) == outer.initial_scale == 2.0**127


def test_gradients_that_are_not_finite_are_an_error():
    model, _, (x, y) = made("flow")
    x[0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        kf.freeze(model, x, y)
    assert kf.get_mask(model) is None
    outer = keras.optimizers.LossScaleOptimizer(freezing(), initial_scale=4.0)
    model, _, _ = made("flow", outer)
    with pytest.raises(ValueError, match="not finite"):
        kf.freeze(model, x, y)
    assert not outer.built


def test_grasp_needs_a_loss():
    model, _, arguments = made("flow", freezing(criterion="grasp"))
    with pytest.raises(ValueError, match="give `freeze` a `loss`"):
        kf.freeze(model, *arguments)


@pytest.mark.parametrize("criterion", ["magnitude", "random", lambda w, g: ops.square(g)])
def test_other_criteria_decide_by_what_the_step_trains(criterion):
    model, _, arguments = made("distiller", freezing(criterion=criterion))
    mask = kf.freeze(model, *arguments)
    trained = model.student.trainable_variables
    assert mask.num_weights == sum(v.shape[0] * v.shape[1] for v in trained if is_weight(v))
    assert mask.num_trained == mask.num_weights // 4


def test_freezing_twice_needs_overwrite():
    model, _, arguments = made("flow")
    mask = kf.freeze(model, *arguments)
    with pytest.raises(ValueError, match="frozen already"):
        kf.freeze(model, *arguments)
    assert kf.freeze(model, *arguments, overwrite=True) == mask


def test_a_step_that_hands_nothing_to_a_freeze_optimizer_is_an_error():
    model = gan()
    model.run = None
    type_of_step = make_step(lambda self, data: None)
    model.train_step = type_of_step.__get__(model)
    with pytest.raises(ValueError, match="passed no gradient to a FreezeOptimizer"):
        kf.freeze(model, blobs()[0])


def test_a_model_without_freeze_optimizer_is_an_error():
    model = gan(keras.optimizers.SGD(), keras.optimizers.SGD())
    with pytest.raises(ValueError, match="has no FreezeOptimizer"):
        kf.freeze(model, blobs()[0])


class Subclassed(keras.Model):
    """A network in `call`, with nothing built before its first call."""

    def __init__(self, **arguments):
        super().__init__()
        self.first = keras.layers.Dense(8, activation="tanh", **arguments)
        self.norm = keras.layers.BatchNormalization()
        self.last = keras.layers.Dense(3, **arguments)
        self.fails = False

    def call(self, inputs, training=False):
        x = inputs["x"] if isinstance(inputs, dict) else inputs
        x = self.norm(self.first(x), training=training)
        if self.fails:
            raise ValueError("halfway")
        return self.last(x)


class SubclassedWithStep(Subclassed, OwnStep):
    def loss_of(self, data):
        x, y = data
        return crossentropy()(y, self(x, training=True))


@pytest.mark.parametrize("kind", [Subclassed, SubclassedWithStep])
def test_a_call_that_fails_leaves_the_model_ready_for_the_next_one(kind):
    model = kind()
    model.compile(freezing(), crossentropy() if kind is Subclassed else None)
    x, y = blobs()
    errors = (TypeError, ValueError, KeyError, RuntimeError)  # each backend has its own
    with pytest.raises(errors, match="x"):
        kf.freeze(model, {"wrong": x}, y)
    model.fails = True
    with pytest.raises(errors, match="halfway"):
        kf.freeze(model, x, y)
    model.fails = False
    assert not any(layer.built for layer in model._flatten_layers())
    assert not model.variables
    mask = kf.freeze(model, x, y)
    assert mask.num_weights == 6 * 8 + 8 * 3
    assert mask.num_trained == mask.num_weights // 4


def test_layers_that_only_the_step_can_build_are_built_or_named():
    class Unbuilt(OwnStep):
        def __init__(self):
            super().__init__()
            self.network = keras.Sequential([keras.layers.Dense(3)])

        def loss_of(self, data):
            return ops.mean(ops.square(self.network(data)))

    model = Unbuilt()
    model.compile(freezing())
    x, _ = blobs()
    if BACKEND == "tensorflow":
        assert kf.freeze(model, x).num_weights == 18
    else:
        with pytest.raises(ValueError, match="not built, and the model cannot build them"):
            kf.freeze(model, x)
        assert not model.network.built


def without_loss(**arguments):
    keras.utils.set_random_seed(0)
    model = dense(8, 3, **arguments)
    model.compile(freezing())
    return model


@pytest.mark.parametrize("regularizer", [None, "l2"])
def test_a_model_without_loss_is_an_error(regularizer):
    model = without_loss(kernel_regularizer=regularizer)
    with pytest.raises(ValueError, match="no loss that depends on the data"):
        kf.freeze(model, *blobs())
    with pytest.raises(ValueError, match="no loss that depends on the data"):
        kf.compute_saliency(model, *blobs())
    assert kf.get_mask(model) is None
    kf.freeze(model, *blobs(), loss=crossentropy())


def test_losses_of_the_data_beside_the_compiled_one_decide():
    model = without_loss(activity_regularizer="l2")
    x, _ = blobs()
    mask = kf.freeze(model, x)
    model.trained_variables = lambda: model.trainable_variables

    def loss():
        model(x)
        outputs, total = x, 0.0
        for layer in model.layers:
            outputs = layer(outputs)
            total = total + 0.01 * ops.sum(ops.square(outputs)) / len(x)
        return total

    variables = model.trainable_variables
    assert_mask_by_hand(mask, variables, gradients_by_hand(loss, variables))


def test_a_compute_loss_of_the_models_own_decides():
    class OwnLoss(Subclassed):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return ops.mean(ops.square(y_pred))

    model = compiled(OwnLoss)
    assert kf.freeze(model, blobs()[0]).num_weights == 72


@pytest.mark.parametrize("criterion", ["snip", "random"])
def test_a_first_batch_with_nothing_to_freeze_is_an_error(criterion):
    keras.utils.set_random_seed(0)
    model = dense(8, 3)
    names = [layer.name for layer in model.layers]
    model.compile(freezing(criterion=criterion, exclude=names), "mse")
    before = every_value(model)
    x = blobs()[0]
    with pytest.raises(ValueError, match="no weights that could be frozen"):
        model.fit(x, x[:, :3], verbose=0)
    if BACKEND == "jax":  # where Keras has taken the values out of the model when a step fails
        return
    assert_same_values(every_value(model), before)
    with pytest.raises(ValueError, match="no weights that could be frozen"):
        kf.freeze(model, x, x[:, :3])


def test_rate_zero_with_nothing_to_freeze_trains_everything():
    model = dense(8, 3)
    names = [layer.name for layer in model.layers]
    model.compile(kf.FreezeOptimizer(sgd(), 0.0, exclude=names), "mse")
    before = every_value(model)
    x = blobs()[0]
    model.fit(x, x[:, :3], verbose=0)
    assert not same_bits(every_value(model)[0], before[0])


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_first_batch_whose_scores_are_zero_warns(run_eagerly):
    keras.utils.set_random_seed(0)
    model = dense(8, 3)
    model.compile(freezing(), "mse", run_eagerly=run_eagerly, jit_compile=None)
    x = blobs()[0]
    with pytest.warns(UserWarning, match="All scores are zero"):
        model.fit(x, x[:, :3], sample_weight=np.zeros(len(x)), verbose=0)
    assert 18 <= kf.get_mask(model).num_trained <= 20  # with one in a layer left empty


class Remembers(keras.Model):
    """A model that keeps numbers of its own in arrays, which its step changes in place."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.dense.build((None, 6))
        self.counts = np.zeros(3)
        self.nested = {"seen": [np.zeros(2)]}
        if keras.backend.backend() == "torch":
            import torch

            self.register_buffer("total", torch.zeros(2))

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        self.counts += 1
        self.nested["seen"][0][:] = 7
        if keras.backend.backend() == "torch":
            self.total += 1
        return super().train_step(*args)


def test_arrays_that_a_step_changes_in_place_are_put_back():
    model = Remembers()
    model.compile(kf.FreezeOptimizer("sgd", 0.75), crossentropy())
    x, y = blobs()
    kf.freeze(model, x, y)
    assert not model.counts.any()
    assert not model.nested["seen"][0].any()
    if keras.backend.backend() == "torch":
        assert not model.total.any()
