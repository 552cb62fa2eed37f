"""Models and FreezeOptimizers through files, copies and configurations."""

import copy
import pickle
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_freeze as kf
from keras_freeze.optimizer import saving

pytestmark = [pytest.mark.cases(1), pytest.mark.slow]


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(96, 12)).astype("float32")
    return x, (x @ rng.normal(size=(12, 3))).argmax(1)


def build_model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )


def compile_model(model, **arguments):
    inner = arguments.pop("inner", None) or keras.optimizers.SGD(0.1, momentum=0.9)
    arguments = {"freeze_rate": 0.8, "l2": 1e-3, **arguments}
    model.compile(
        optimizer=kf.FreezeOptimizer(inner, **arguments),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def train(model, epochs=1):
    model.fit(*make_data(), batch_size=32, epochs=epochs, shuffle=False, verbose=0)


def weights_equal(first, second):
    pairs = zip(first.get_weights(), second.get_weights(), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)


def start(way, **arguments):
    """A model that has been trained for three steps in one of the two ways."""
    model = compile_model(build_model(), **arguments)
    if way == "compact":
        kf.freeze(model, *(a[:32] for a in make_data()))
    train(model)
    return model


WAYS = pytest.mark.parametrize("way", ["compact", "full shape"])
TREATMENTS = pytest.mark.parametrize("frozen_weights", ["keep", "zero", "decay"])


@WAYS
@TREATMENTS
def test_training_goes_on_identically_after_saving_and_loading(tmp_path, way, frozen_weights):
    model = start(way, frozen_weights=frozen_weights)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert weights_equal(loaded, model)
    for a, b in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    train(model, 2)
    train(loaded, 2)
    assert weights_equal(loaded, model)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations)


@WAYS
@pytest.mark.parametrize(
    "inner",
    [
        lambda: keras.optimizers.Adam(0.01),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
        lambda: keras.optimizers.SGD(0.1, use_ema=True),
        lambda: keras.optimizers.ScheduleFreeAdamW(0.01),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    ],
    ids=["adam", "accumulation", "ema", "schedule free", "schedule"],
)
def test_other_inner_optimizers_go_on_identically_too(tmp_path, way, inner):
    model = start(way, inner=inner())
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    train(model, 2)
    train(loaded, 2)
    assert weights_equal(loaded, model)
    assert kf.get_mask(loaded) == kf.get_mask(model)


@pytest.mark.exhaustive
@WAYS
def test_training_goes_on_identically_in_a_fresh_process(tmp_path, way):
    model = start(way)
    x, y = make_data()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    model.save(tmp_path / "model.keras")
    script = """
        import sys, keras, numpy as np, keras_freeze as kf
        keras.utils.set_random_seed(99)
        folder = sys.argv[1]
        data = np.load(folder + "/data.npz")
        model = keras.models.load_model(folder + "/model.keras")
        model.fit(data["x"], data["y"], batch_size=32, epochs=2, shuffle=False, verbose=0)
        kf.get_mask(model).save(folder + "/trained.mask")
        np.savez(folder + "/weights.npz", *model.get_weights())
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    train(model, 2)
    with np.load(tmp_path / "weights.npz") as weights:
        for name, expected in zip(weights.files, model.get_weights(), strict=True):
            assert weights[name].tobytes() == expected.tobytes()
    assert kf.FreezeMask.load(tmp_path / "trained.mask") == kf.get_mask(model)


@pytest.mark.exhaustive
def test_model_loads_without_this_package_when_not_compiled(tmp_path):
    model = start("compact")
    x, _ = make_data()
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", x)
    script = """
        import sys, keras, numpy as np
        folder = sys.argv[1]
        model = keras.models.load_model(folder + "/model.keras", compile=False)
        np.save(folder + "/y.npy", model.predict(np.load(folder + "/x.npy"), verbose=0))
        assert "keras_freeze" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), model.predict(x, verbose=0))


@WAYS
def test_mask_survives_loading_weights_before_the_optimizer_is_built(tmp_path, way):
    model = start(way)
    model.save_weights(tmp_path / "m.weights.h5")
    other = compile_model(build_model(seed=1))
    other.load_weights(tmp_path / "m.weights.h5")
    assert kf.get_mask(other) == kf.get_mask(model)
    with pytest.raises(ValueError, match="frozen already"):
        kf.freeze(other, *make_data())
    before = other.get_weights()
    train(other)
    assert kf.get_mask(other) == kf.get_mask(model)
    kernel = other.layers[0].kernel
    trained = kf.get_mask(other)[kernel]
    assert (kernel.numpy()[~trained] == before[0][~trained]).all()
    assert (kernel.numpy()[trained] != before[0][trained]).any()


@WAYS
def test_checkpoint_replaces_the_mask_of_an_optimizer_that_is_built(tmp_path, way):
    model = start(way)
    model.save_weights(tmp_path / "m.weights.h5")
    other = compile_model(build_model(seed=1))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "m.weights.h5")
    train(model, 2)
    train(other, 2)
    assert kf.get_mask(other) == kf.get_mask(model)
    assert weights_equal(other, model)


def test_graph_traced_for_another_mask_fails_loudly_and_fit_traces_again(tmp_path):
    model = start("compact")
    model.save_weights(tmp_path / "m.weights.h5")
    other = compile_model(build_model(seed=1))
    kf.freeze(other, mask=lambda kernel: np.tri(*kernel.shape, dtype=bool))
    train(other)
    traced = tf.function(lambda: other.train_step(make_data()), autograph=False)
    traced()
    other.load_weights(tmp_path / "m.weights.h5")
    with pytest.raises(Exception, match="traced before the freezing mask was replaced"):
        traced()
    train(other)
    assert kf.get_mask(other) == kf.get_mask(model)


def test_another_network_refuses_the_state(tmp_path):
    model = start("compact")
    model.save_weights(tmp_path / "m.weights.h5")
    store = {}
    model.optimizer.save_own_variables(store)
    wider = keras.Sequential([keras.Input((12,)), keras.layers.Dense(5), keras.layers.Dense(3)])
    compile_model(wider)
    wider.optimizer.build(wider.trainable_variables)
    with pytest.raises(ValueError, match="another network"):
        wider.optimizer.load_own_variables(store)
    renamed = keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(16, name="encoder"), keras.layers.Dense(3)]
    )
    compile_model(renamed)
    renamed.optimizer.build(renamed.trainable_variables)
    with pytest.raises(ValueError, match="another network"):
        renamed.optimizer.load_own_variables(store)
    assert kf.get_mask(renamed) is None


def test_state_of_a_later_version_is_refused():
    store = saving.content_of(start("compact").optimizer)
    header = store["header"].tobytes().replace(b'"version": 1', b'"version": 2')
    store["header"] = np.frombuffer(header, np.uint8)
    with pytest.raises(ValueError, match="version"):
        compile_model(build_model()).optimizer.load_own_variables(store)


def test_dense_checkpoint_starts_a_mask_of_its_own(tmp_path):
    dense = build_model()
    dense.compile(optimizer="sgd", loss="sparse_categorical_crossentropy")
    train(dense)
    dense.save_weights(tmp_path / "dense.weights.h5")
    model = compile_model(build_model(seed=1))
    model.load_weights(tmp_path / "dense.weights.h5")
    assert kf.get_mask(model) is None
    assert kf.freeze(model, *make_data()).num_trained == 48


@WAYS
def test_loaded_model_of_a_named_submodel_keeps_what_is_excluded(tmp_path, way):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(name="net")
    model.add(keras.layers.Dense(16, activation="relu", name="body"))
    model.add(keras.layers.Dense(3, name="head"))
    compile_model(model, exclude=["net/head/kernel"])
    if way == "compact":
        kf.freeze(model, *(a[:32] for a in make_data()))
    train(model)
    assert len(kf.get_mask(model)) == 1
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    train(model)
    train(loaded)
    assert weights_equal(loaded, model)
    assert kf.get_mask(loaded) == kf.get_mask(model)


def test_configuration_round_trip_keeps_every_argument():
    optimizer = kf.FreezeOptimizer(
        keras.optimizers.AdamW(0.02, weight_decay=0.1),
        freeze_rate=0.97,
        criterion="magnitude",
        frozen_weights="zero",
        l2=1e-4,
        exclude=["head"],
        seed=7,
        name="frozen",
    )
    config = optimizer.get_config()
    again = copy.deepcopy(config)
    other = kf.FreezeOptimizer.from_config(config)
    assert config == again
    assert other.get_config() == again
    assert isinstance(other.inner_optimizer, keras.optimizers.AdamW)


@keras.saving.register_keras_serializable(package="tests")
def largest_gradient(weights, gradients):
    return keras.ops.abs(gradients)


@WAYS
def test_criterion_of_ones_own_is_saved(tmp_path, way):
    model = start(way, criterion=largest_gradient)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.criterion is largest_gradient
    assert kf.get_mask(loaded) == kf.get_mask(model)


def test_counts_without_a_mask_refuse_to_train():
    config = start("compact").optimizer.get_config()
    model = build_model(seed=1)
    model.compile(kf.FreezeOptimizer.from_config(config), "sparse_categorical_crossentropy")
    before = model.get_weights()
    with pytest.raises(ValueError, match="not which"):
        train(model)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
    assert kf.get_mask(model) is None
    kf.freeze(model, *make_data())
    train(model)
    assert kf.get_mask(model).num_trained == 48


def test_configuration_of_another_network_is_refused():
    config = start("compact").optimizer.get_config()
    optimizer = kf.FreezeOptimizer.from_config(config)
    variables = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).weights
    optimizer.build(variables)  # as `load_model` does before it hands over the state
    with pytest.raises(ValueError, match="another network"):
        optimizer.apply([np.ones(v.shape, "float32") for v in variables], variables)


@WAYS
def test_set_weights_restores_the_whole_state(way):
    model = start(way)
    weights, state = model.get_weights(), [v.numpy() for v in model.optimizer.variables]
    train(model)
    after = model.get_weights()
    model.set_weights(weights)
    model.optimizer.set_weights(state)
    train(model)
    assert all((a == b).all() for a, b in zip(after, model.get_weights(), strict=True))
    with pytest.raises(ValueError, match="weights"):
        model.optimizer.set_weights(state[:-1])
    with pytest.raises(ValueError, match="shape"):
        model.optimizer.set_weights([np.zeros(99)] * len(state))


@WAYS
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_model_train_alike_and_apart(way, duplicate):
    model = start(way)
    other = duplicate(model)
    assert kf.get_mask(other) == kf.get_mask(model)
    train(model)
    assert not weights_equal(other, model)
    train(other)
    assert weights_equal(other, model)


def test_checkpoints_of_the_best_epoch_hold_the_mask(tmp_path):
    model = start("compact")
    path = tmp_path / "best.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True)
    x, y = make_data()
    model.fit(x, y, epochs=2, verbose=0, callbacks=[checkpoint])
    assert kf.get_mask(keras.models.load_model(path)) == kf.get_mask(model)


def test_loss_scaling_outside_is_saved_with_the_mask(tmp_path):
    inner = kf.FreezeOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), 0.8)
    model = build_model()
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "sparse_categorical_crossentropy")
    kf.freeze(model, *make_data())
    train(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    train(model)
    train(loaded)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert weights_equal(loaded, model)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["overwrite", "overwrite first batch", "reinitialize"])
def test_rebuilt_optimizer_can_be_exported_and_checkpointed(tmp_path, what):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    inner = keras.optimizers.SGD(schedule, momentum=0.9)
    model = start("full shape" if "first" in what else "compact", inner=inner)
    if what == "reinitialize":
        kf.reinitialize(model, seed=1)
    else:
        kf.freeze(model, *make_data(), overwrite=True)
    assert model.optimizer.inner_optimizer is inner
    assert inner._learning_rate is schedule
    assert int(inner.iterations) == (0 if what == "reinitialize" else 3)
    train(model)
    x, _ = make_data()
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(x), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
    tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "exported"))
    assert len(converter.convert()) > 1000
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    train(model)
    train(loaded)
    assert weights_equal(loaded, model)


def test_a_training_step_can_be_exported(tmp_path):
    """A SavedModel that trains holds all that the step reads, the check for stale traces too."""
    model = start("compact")
    optimizer = model.optimizer
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = make_data()

    class Trainer(tf.Module):
        def __init__(self):
            super().__init__()
            self.model, self.optimizer = model, optimizer

        @tf.function(input_signature=[tf.TensorSpec(x.shape), tf.TensorSpec(y.shape, tf.int32)])
        def step(self, x, y):
            with tf.GradientTape() as tape:
                value = loss(y, self.model(x, training=True))
            variables = self.model.trainable_variables
            self.optimizer.apply(tape.gradient(value, variables), variables)
            return value

    trainer = Trainer()
    trainer.step(x, y)
    tf.saved_model.save(trainer, tmp_path / "trainer")
    loaded = tf.saved_model.load(tmp_path / "trainer")
    values = [float(each.step(x, y)) for _ in range(3) for each in (trainer, loaded)]
    np.testing.assert_allclose(values[::2], values[1::2], rtol=1e-5)


class Boosted(keras.optimizers.SGD):
    """A subclass as people write them, without a configuration of its own."""

    def __init__(self, boost=1.0, **arguments):
        super().__init__(**arguments)
        self.boost = boost


class Demanding(keras.optimizers.SGD):
    def __init__(self, boost, **arguments):
        super().__init__(**arguments)
        self.boost = boost


class Constant(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


@pytest.mark.parametrize(
    "inner",
    [
        lambda: Boosted(5.0, learning_rate=0.1),
        lambda: keras.optimizers.SGD(Constant()),
        lambda: keras.optimizers.SGD(lambda: 0.1),
    ],
    ids=["subclass", "schedule without config", "function"],
)
def test_settings_survive_a_replaced_mask(inner):
    inner = inner()
    inner.tag = "mine"
    model = start("compact", inner=inner)
    kf.freeze(model, *make_data(), overwrite=True)
    train(model)
    assert model.optimizer.inner_optimizer is inner
    assert (inner.tag, getattr(inner, "boost", 5.0)) == ("mine", 5.0)
    assert float(keras.ops.convert_to_tensor(inner.learning_rate)) == np.float32(0.1)


def test_optimizer_that_cannot_be_made_again_keeps_its_mask():
    model = start("compact", inner=Demanding(5.0, learning_rate=0.1))
    mask, before = kf.get_mask(model), [v.numpy() for v in model.optimizer.variables]
    with pytest.raises(ValueError, match="To reset Demanding"):
        kf.freeze(model, *make_data(), overwrite=True)
    assert kf.get_mask(model) == mask
    after = [v.numpy() for v in model.optimizer.variables]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    train(model)


def test_mask_can_be_replaced_while_fit_runs():
    model = start("compact")
    masks = [kf.get_mask(model)]

    class Refreeze(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            masks.append(kf.freeze(self.model, *make_data(seed=epoch + 7), overwrite=True))

    x, y = make_data()
    model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[Refreeze()])
    assert masks[1] != masks[0]
    assert kf.get_mask(model) == masks[-1]
    before = model.layers[0].kernel.numpy()
    train(model)
    moved = model.layers[0].kernel.numpy() != before
    assert moved.any()
    assert not (moved & ~kf.get_mask(model)[model.layers[0].kernel]).any()


def checkpoint_of(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


@WAYS
@TREATMENTS
def test_checkpoint_of_tensorflow_holds_the_mask(tmp_path, way, frozen_weights):
    model = start(way, frozen_weights=frozen_weights)
    path = checkpoint_of(model).save(tmp_path / "checkpoint")
    state = model.get_weights()
    other = compile_model(build_model(seed=1), frozen_weights=frozen_weights)
    checkpoint_of(other).restore(path)
    assert all((a == b).all() for a, b in zip(other.get_weights(), state, strict=True))
    assert kf.get_mask(other) == kf.get_mask(model)
    train(model, 2)
    train(other, 2)
    assert kf.get_mask(other) == kf.get_mask(model)
    assert weights_equal(other, model)
    for a, b in zip(other.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@WAYS
def test_checkpoint_of_tensorflow_is_restored_into_an_optimizer_built_alike(tmp_path, way):
    model = start(way)
    path = checkpoint_of(model).save(tmp_path / "checkpoint")
    other = compile_model(build_model(seed=1))
    if way == "compact":
        flipped = {e.path: np.flip(e.trained) for e in kf.get_mask(model).entries}
        names = [v.path for v in other.trainable_variables if v.path.endswith("kernel")]
        kf.freeze(other, mask=dict(zip(names, flipped.values(), strict=True)))
        assert kf.get_mask(other) != kf.get_mask(model)
    else:
        other.optimizer.build(other.trainable_variables)
    checkpoint_of(other).restore(path)
    train(model, 2)
    train(other, 2)
    assert kf.get_mask(other) == kf.get_mask(model)
    assert weights_equal(other, model)


@WAYS
def test_checkpoint_of_tensorflow_is_refused_by_an_optimizer_built_otherwise(tmp_path, way):
    path = checkpoint_of(start(way)).save(tmp_path / "checkpoint")
    other = compile_model(build_model(seed=1))
    if way == "compact":
        other.optimizer.build(other.trainable_variables)
    else:
        kf.freeze(other, *make_data())
    mask = kf.get_mask(other)
    with pytest.raises(ValueError, match="just been compiled"):
        checkpoint_of(other).restore(path)
    assert kf.get_mask(other) == mask


@pytest.mark.parametrize("is_built", [False, True])
def test_checkpoint_of_tensorflow_with_another_inner_optimizer_is_refused(tmp_path, is_built):
    model = start("full shape", inner=keras.optimizers.RMSprop(0.01))
    path = checkpoint_of(model).save(tmp_path / "checkpoint")
    other = compile_model(build_model(seed=1), inner=keras.optimizers.Adagrad(0.01))
    if is_built:
        other.optimizer.build(other.trainable_variables)
    with pytest.raises(ValueError, match=r"Saved: RMSprop.*Received: Adagrad"):
        checkpoint_of(other).restore(path)
    assert kf.get_mask(other) is None


def test_checkpoint_of_tensorflow_after_a_replaced_mask_trains_in_a_new_optimizer(tmp_path):
    model = start("compact")
    kf.freeze(model, *make_data(seed=1), overwrite=True)
    path = checkpoint_of(model).save(tmp_path / "checkpoint")
    other = compile_model(build_model(seed=1))
    checkpoint_of(other).restore(path)
    train(model)
    train(other)
    assert weights_equal(other, model)


@WAYS
def test_saved_model_of_tensorflow_can_be_made_of_a_model_in_training(tmp_path, way):
    model = start(way)
    tf.saved_model.save(model, tmp_path / "saved")
    x, _ = make_data()
    serve = tf.saved_model.load(tmp_path / "saved").signatures["serving_default"]
    (outputs,) = serve(tf.constant(x)).values()
    np.testing.assert_allclose(outputs, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)
