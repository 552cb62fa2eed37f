"""Training that is killed, saved, loaded and carried on, here and on another backend."""

import copy
import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback

import keras
import numpy as np
import pytest
from axes import WAYS

import keras_freeze as kf
from keras_freeze.optimizer import saving

pytestmark = pytest.mark.cases(2, tensorflow=1, jax=0)

BACKEND = keras.backend.backend()
OTHER_BACKENDS = [name for name in ("tensorflow", "jax", "torch") if name != BACKEND]
each_way = pytest.mark.parametrize("way", WAYS)
BATCH, NUM_BATCHES, EPOCHS = 12, 3, 4


def data():
    rng = np.random.default_rng(0)
    y = np.arange(BATCH * NUM_BATCHES) % 3
    x = rng.normal(size=(len(y), 6)) + 2.0 * rng.normal(size=(3, 6))[y]
    return x.astype("float32"), y


def network(seed=0, names=("body", "middle", "head")):
    model = keras.Sequential([keras.Input((6,))])
    model.add(keras.layers.Dense(6, activation="tanh", name=names[0]))
    model.add(keras.layers.BatchNormalization(name="norm"))
    model.add(keras.layers.Dense(6, activation="tanh", name=names[1]))
    model.add(keras.layers.Dense(3, name=names[2]))
    kf.reinitialize(model, seed=seed)  # the same numbers on each backend
    return model


def compiled(inner=None, seed=0, **arguments):
    names = arguments.pop("names", ("body", "middle", "head"))
    model = network(seed, names)
    inner = keras.optimizers.Adam(0.01) if inner is None else inner
    model.compile(
        kf.FreezeOptimizer(inner, freeze_rate=0.75, **arguments),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def fit(model, epochs=1, callbacks=()):
    arguments = {"batch_size": BATCH, "epochs": epochs, "shuffle": False, "verbose": 0}
    model.fit(*data(), callbacks=list(callbacks), **arguments)


def freeze(model, first=0):
    kf.freeze(model, *(array[first : first + BATCH] for array in data()))


def prepared(way, inner=None, **arguments):
    """A model whose optimizer has all its variables, before the first step."""
    model = compiled(inner, **arguments)
    if way == "freeze":
        freeze(model)
    else:
        model.optimizer.build(model.trainable_variables)
    return model


def values(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def everything(model):
    """The values of a model and of its optimizer."""
    all_variables = [*model.variables, *model.optimizer.variables]
    # Without what holds nothing, and on JAX only marks functions that were traced earlier.
    return [value for value in values(all_variables) if value.size]


def assert_same_bits(first, second):
    for a, b in zip(first, second, strict=True):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


# Killed and resumed


class Kill(keras.callbacks.Callback):
    """Kills the process after so many batches, as the kernel does where memory runs out."""

    def __init__(self, num_batches):
        super().__init__()
        self.rest = num_batches

    def on_train_batch_end(self, batch, logs=None):
        self.rest -= 1
        if self.rest == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class KillWhileSaving(keras.callbacks.Callback):
    """Kills the process in the midst of so many saves, when the optimizer is to be written."""

    def __init__(self, num_saves):
        super().__init__()
        self.rest = num_saves

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        vars(optimizer)["save_own_variables"] = self.save_own_variables

    def save_own_variables(self, store):
        self.rest -= 1
        if self.rest == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        type(self.model.optimizer).save_own_variables(self.model.optimizer, store)


def moments(way):
    """Numbers of batches: one within the first epoch, where nothing is saved yet, two later."""
    rng = np.random.default_rng(WAYS.index(way))
    later = rng.choice(np.arange(NUM_BATCHES + 1, EPOCHS * NUM_BATCHES + 1), 2, replace=False)
    return [int(rng.integers(1, NUM_BATCHES + 1)), *sorted(map(int, later))]


CASES = [(way, moment) for way in WAYS for moment in moments(way)]


# Kills within a save: the way, which save, and whether Keras keeps the one before.
SAVES = [("freeze", 1, True), ("freeze", 3, False)]
SAVES += [(way, 2 + number, True) for number, way in enumerate(WAYS)]


def folder_of(root, *case):
    return os.path.join(root, "_".join(map(str, case)))


def run(way, callbacks=()):
    model = compiled()
    if way == "freeze":
        freeze(model)
    fit(model, EPOCHS, callbacks)
    return model


def backup(root, *case, **arguments):
    return keras.callbacks.BackupAndRestore(folder_of(root, *case), **arguments)


def train_until_killed(way, callbacks):
    """In a process of its own; returns the signal that ended it."""
    process = os.fork()
    if process == 0:
        try:
            run(way, callbacks)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(process, 0)
    return os.WTERMSIG(status)


@functools.cache
def never_killed(way):
    return run(way)


def in_python(task, *folders, backend=BACKEND):
    """Runs a function of this file in a new process."""
    path = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, __file__, task, *map(str, folders)],
        env={**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with what is left of processes that were killed while they trained."""
    root = tmp_path_factory.mktemp("killed")
    signals = in_python("kill", root).stdout.splitlines()[-1]
    assert json.loads(signals) == [signal.SIGKILL] * len([*CASES, *SAVES])
    return root


@pytest.mark.slow
@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize(("way", "moment"), CASES)
def test_killed_training_ends_bit_for_bit_like_one_that_was_never_killed(killed, way, moment):
    """keras#19389. The script of the new process is the one that was killed."""
    resume(way, backup(killed, way, moment), first_epoch=(moment - 1) // NUM_BATCHES)


@pytest.mark.slow
@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize(("way", "save"), [case[:2] for case in SAVES if case[1] > 1 and case[2]])
def test_so_does_training_that_was_killed_while_it_saved_where_the_save_before_is_kept(
    killed, way, save
):
    callback = backup(killed, way, save, True, double_checkpoint=True)
    resume(way, callback, first_epoch=save - 1)


@pytest.mark.slow
@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize(("way", "save", "double"), SAVES[:2])
def test_without_a_save_before_keras_cannot_resume_and_says_so(killed, way, save, double):
    """Of any optimizer; README.md and docs/reproducibility.md tell."""
    callback = backup(killed, way, save, double, double_checkpoint=double)
    with pytest.raises(OSError, match="open file"):
        run(way, [callback])


def resume(way, callback, first_epoch):
    epochs = []
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    resumed = run(way, [callback, watch])
    assert epochs == list(range(first_epoch, EPOCHS))
    assert kf.get_mask(resumed) == kf.get_mask(never_killed(way))
    assert_same_bits(everything(resumed), everything(never_killed(way)))


# The mask is the one that was saved


@dataclasses.dataclass
class Saved:
    """What a model was when it was saved, and its files."""

    folder: str
    mask: kf.FreezeMask
    model: list[np.ndarray]
    inner: list[np.ndarray]
    everything_after_another_epoch: list[np.ndarray]

    def path(self, name):
        return os.path.join(self.folder, name)


FORMATS = ("m.keras", "m.weights.h5", "m.freeze")


def save(way, folder):
    model = prepared(way)
    fit(model)
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    kf.save(model, folder / "m.freeze", include_optimizer=True)
    state = kf.get_mask(model), values(model.variables), values_inside(model)
    fit(model)
    return Saved(str(folder), *state, everything(model))


def values_inside(model):
    """Those of the inner optimizer."""
    return values(model.optimizer.inner_optimizer.variables)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model saved after an epoch, for each way."""
    return {way: save(way, tmp_path_factory.mktemp(way)) for way in WAYS}


def unbuilt():
    return compiled(seed=1)


def built():
    return prepared("first_batch", seed=1)


def frozen():
    model = compiled(seed=1)
    freeze(model, first=BATCH)
    return model


def trained():
    model = built()
    fit(model)
    return model


def frozen_with_other_weights_of_the_same_numbers():
    model, other = compiled(seed=1), prepared("freeze")
    mask = {
        model.get_layer(layer.name).kernel.path: np.flip(kf.get_mask(other)[layer.kernel])
        for layer in other.layers
        if hasattr(layer, "kernel")
    }
    kf.freeze(model, mask=mask)
    return model


@pytest.mark.cases(1, tensorflow=0)
@each_way
@pytest.mark.parametrize(
    "target",
    [unbuilt, built, frozen, trained, frozen_with_other_weights_of_the_same_numbers],
    ids=lambda function: function.__name__,
)
def test_loading_weights_brings_the_mask_whatever_state_the_optimizer_is_in(saved, way, target):
    model, expected = target(), saved[way]
    assert kf.get_mask(model) != expected.mask
    model.load_weights(expected.path("m.weights.h5"))
    assert kf.get_mask(model) == expected.mask
    assert_same_bits(values(model.variables), expected.model)
    model.make_train_function(force=True)
    fit(model)
    assert kf.get_mask(model) == expected.mask
    assert_frozen_as_before(model, expected.model)
    if target is not unbuilt:  # of which Keras leaves the moments out
        assert_same_bits(everything(model), expected.everything_after_another_epoch)


def assert_frozen_as_before(model, start):
    before = {id(v): old for v, old in zip(model.variables, start, strict=True)}
    mask = kf.get_mask(model)
    for layer in model.layers:
        if hasattr(layer, "kernel"):
            frozen, (kernel,) = ~mask[layer.kernel], values([layer.kernel])
            assert frozen.any()
            assert kernel[frozen].tobytes() == before[id(layer.kernel)][frozen].tobytes()


@pytest.mark.cases(1)
@each_way
def test_model_checkpoint_of_the_best_epoch_brings_the_mask(tmp_path, way):
    path = tmp_path / "best.weights.h5"
    arguments = {"monitor": "loss", "save_best_only": True, "save_weights_only": True}
    model = compiled()
    if way == "freeze":
        freeze(model)
    fit(model, 2, [keras.callbacks.ModelCheckpoint(path, **arguments)])
    best = unbuilt()
    best.load_weights(path)
    fit(best)
    assert kf.get_mask(best) == kf.get_mask(model)


@pytest.mark.cases(1, tensorflow=0)
@each_way
def test_a_whole_model_with_a_scaled_loss_goes_on_bit_for_bit(tmp_path, way):
    model = network()
    optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(0.01), freeze_rate=0.75)
    model.compile(
        keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    if way == "freeze":
        freeze(model)
    fit(model)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    for one in (model, loaded):
        fit(one)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert [v.tobytes() for v in values(loaded.variables)] == [
        v.tobytes() for v in values(model.variables)
    ]


@pytest.mark.cases(1, tensorflow=0)
@each_way
def test_mask_that_waits_for_the_optimizer_is_saved_again(tmp_path, saved, way):
    between = unbuilt()
    between.load_weights(saved[way].path("m.weights.h5"))
    between.save_weights(tmp_path / "m.weights.h5")
    last = unbuilt()
    last.load_weights(tmp_path / "m.weights.h5")
    fit(last)
    assert kf.get_mask(last) == saved[way].mask


@pytest.mark.cases(1, tensorflow=0)
@each_way
def test_a_model_whose_mask_waits_for_the_optimizer_is_copied_and_saved(tmp_path, saved, way):
    between = unbuilt()
    between.load_weights(saved[way].path("m.weights.h5"))
    between.save(tmp_path / "m.keras")
    for last in (keras.models.load_model(tmp_path / "m.keras"), copy.deepcopy(between)):
        fit(last)
        assert kf.get_mask(last) == saved[way].mask


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["keras", "copy", "weights"])
def test_a_mask_that_a_new_optimizer_will_take_over_is_saved(tmp_path, way):
    model = prepared("freeze")
    mask = kf.get_mask(model)
    model.compile(kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.75), model.loss)
    if way == "keras":
        model.save(tmp_path / "m.keras")
        last = keras.models.load_model(tmp_path / "m.keras")
    elif way == "copy":
        last = copy.deepcopy(model)
    else:
        model.save_weights(tmp_path / "m.weights.h5")
        last = unbuilt()
        last.load_weights(tmp_path / "m.weights.h5")
    fit(last)
    assert kf.get_mask(last) == mask
    for one in (model, last):
        fit(one)
    assert kf.get_mask(model) == mask


@pytest.mark.same_on_all
def test_a_model_whose_new_optimizer_has_other_settings_is_saved(tmp_path):
    model = prepared("freeze")
    model.compile(kf.FreezeOptimizer("adam", 0.123), model.loss)
    model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match="No mask was loaded"):
        loaded = keras.models.load_model(tmp_path / "m.keras")
    assert kf.get_mask(loaded) is None


def test_file_without_a_mask_where_it_is_looked_for_is_a_warning(saved):
    scaled = network(seed=1)
    scaled.compile(
        keras.optimizers.LossScaleOptimizer(kf.FreezeOptimizer(keras.optimizers.Adam(0.01))),
        "sparse_categorical_crossentropy",
    )
    with pytest.warns(UserWarning, match="No mask was loaded .* LossScaleOptimizer"):
        scaled.load_weights(saved["freeze"].path("m.weights.h5"))
    assert kf.get_mask(scaled) is None


# What Keras keeps by number alone


def momentum(**arguments):
    return keras.optimizers.SGD(0.1, momentum=0.9, **arguments)


LOOK_ALIKES = {
    "RMSprop-Adagrad": (keras.optimizers.RMSprop, keras.optimizers.Adagrad),
    "SGD-Adagrad": (momentum, keras.optimizers.Adagrad),
    "SGD-Lion": (momentum, keras.optimizers.Lion),
    "Adam-Adadelta": (keras.optimizers.Adam, keras.optimizers.Adadelta),
    "momentum-average": (momentum, lambda: keras.optimizers.SGD(0.1, use_ema=True)),
}


@pytest.mark.cases(1, tensorflow=0)
@each_way
@pytest.mark.parametrize("pair", LOOK_ALIKES)
def test_another_inner_optimizer_with_as_many_variables_is_refused(tmp_path, way, pair):
    saved, found = LOOK_ALIKES[pair]
    model = prepared(way, saved())
    model.save_weights(tmp_path / "m.weights.h5")
    other = compiled(found(), seed=1)
    other.optimizer.build(other.trainable_variables)
    before = kf.get_mask(other)
    with pytest.raises(ValueError, match="another inner optimizer") as error:
        other.load_weights(tmp_path / "m.weights.h5")
    assert kf.get_mask(other) == before
    first, second = (type(make()).__name__ for make in (saved, found))
    assert f"Saved: {first}, " in str(error.value)
    assert f"Received: {second}, " in str(error.value)


@pytest.mark.same_on_all
def test_mask_is_taken_over_by_another_inner_optimizer_that_is_not_built(saved):
    other = compiled(keras.optimizers.Lion(0.01), seed=1)
    other.load_weights(saved["freeze"].path("m.weights.h5"))
    fit(other)
    assert kf.get_mask(other) == saved["freeze"].mask
    assert float(other.optimizer.learning_rate) == np.float32(0.01)


def test_learning_rate_of_another_optimizer_is_refused(tmp_path):
    """Plain SGD has as many variables as any optimizer that is not built."""
    model = prepared("freeze", keras.optimizers.SGD(10.0))
    model.save_weights(tmp_path / "m.weights.h5")
    with pytest.raises(ValueError, match="another inner optimizer"):
        unbuilt().load_weights(tmp_path / "m.weights.h5")


@pytest.mark.cases(1)
@each_way
@pytest.mark.parametrize("exclude", [(), ("one", "two")], ids=["frozen", "excluded"])
def test_layers_in_another_order_are_refused(tmp_path, way, exclude):
    model = prepared(way, names=("one", "two", "head"), exclude=exclude)
    model.save_weights(tmp_path / "m.weights.h5")
    other = compiled(names=("two", "one", "head"), exclude=exclude)
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(ValueError, match="another order") as error:
        other.load_weights(tmp_path / "m.weights.h5")
    assert "one/kernel' of shape (6, 6) as variable 0" in str(error.value)
    assert "two/kernel' of shape (6, 6) there" in str(error.value)
    assert kf.get_mask(other) is None


def test_state_that_does_not_say_what_it_was_saved_with_is_loaded():
    """As files of the first versions."""
    model = prepared("freeze")
    store = saving.content_of(model.optimizer)
    header = json.loads(store["header"].tobytes())
    del header["variables"], header["inner"]
    store["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    other = built()
    other.optimizer.load_own_variables(store)
    assert kf.get_mask(other) == kf.get_mask(model)


# From one backend to another


def load(path):
    if path.endswith(".keras"):
        return keras.models.load_model(path)
    if path.endswith(".freeze"):
        return kf.load(path)
    model = built()
    model.load_weights(path)
    return model


def load_all(folder):
    """Writes down what is in each file; training on from it leaves what is frozen as it was."""
    for name in FORMATS:
        path = os.path.join(folder, name)
        try:
            model = load(path)
            start, inner, mask = values(model.variables), values_inside(model), kf.get_mask(model)
            if name == "m.keras":
                # JAX's default, which is in the file, is half a minute of `torch.compile` here.
                model.jit_compile = model.jit_compile and BACKEND != "torch"
                fit(model)
                assert kf.get_mask(model) == mask
                assert_frozen_as_before(model, start)
            mask.save(f"{path}.{BACKEND}.mask")
            np.savez(f"{path}.{BACKEND}.npz", *start, *inner)
        except Exception:
            traceback.print_exc()


@pytest.fixture(scope="module", params=OTHER_BACKENDS)
def loaded_elsewhere(request, saved):
    """The name of another backend that has loaded the files, and what it complained about."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folders = [saved[way].folder for way in WAYS]
    return request.param, in_python("load", *folders, backend=request.param).stderr


@pytest.mark.exhaustive
@each_way
@pytest.mark.parametrize("name", FORMATS)
def test_training_goes_on_from_a_file_on_another_backend(saved, loaded_elsewhere, way, name):
    backend, complaints = loaded_elsewhere
    path = f"{saved[way].path(name)}.{backend}"
    assert os.path.exists(f"{path}.npz"), complaints[-4000:]
    assert kf.FreezeMask.load(f"{path}.mask") == saved[way].mask
    with np.load(f"{path}.npz") as arrays:
        # Keras counts in 64 bits on TensorFlow, in 32 elsewhere.
        pairs = zip(arrays.values(), [*saved[way].model, *saved[way].inner], strict=True)
        assert all(np.array_equal(found, value) for found, value in pairs)


def kill_all(root):
    if importlib.util.find_spec("tensorflow"):  # `fit` imports it: once, not in each process
        importlib.import_module("tensorflow")
    signals = [train_until_killed(way, [backup(root, way, m), Kill(m)]) for way, m in CASES]
    for way, save, double in SAVES:
        callback = backup(root, way, save, double, double_checkpoint=double)
        signals.append(train_until_killed(way, [callback, KillWhileSaving(save)]))
    print(json.dumps(signals))


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        {"kill": kill_all, "load": load_all}[sys.argv[1]](argument)
