"""Several processes or threads: what would tear a mask apart is refused, all else works."""

import threading

import keras
import pytest
from helpers import blobs, compiled, fit, same_bits, sgd, two_dense_layers, values_of

import keras_freeze as kf
from keras_freeze import backend

BACKEND = keras.backend.backend()


@pytest.fixture
def four_processes(monkeypatch):
    if backend.SUMS_OVER_PROCESSES:
        pytest.skip("processes decide together")
    monkeypatch.setattr(backend, "num_processes", lambda: 4)


def mask_from_one_process(path=None):
    """A mask that is decided before there are several processes."""
    model = compiled(two_dense_layers(seed=1))
    mask = kf.freeze(model, *blobs())
    if path is not None:
        mask.save(path)
    return mask


def full_shape(criterion="snip"):
    """An optimizer that updates whole variables."""
    inner = sgd(use_ema=True)
    return kf.FreezeOptimizer(inner, freeze_rate=0.75, criterion=criterion)


@pytest.mark.parametrize("criterion", ["snip", "magnitude", "random", "grasp"])
def test_one_of_several_processes_does_not_freeze_by_its_own_batch(four_processes, criterion):
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75, criterion=criterion)
    model = compiled(two_dense_layers(), optimizer)
    before = values_of(model.variables)
    with pytest.raises(ValueError, match=r"FreezeMask\.load.* Received: 4 processes"):
        kf.freeze(model, *blobs())
    assert kf.get_mask(model) is None
    assert not optimizer.built
    assert all(map(same_bits, before, values_of(model.variables)))


def test_a_train_step_of_its_own_does_not_decide_in_several_processes(four_processes):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = two_dense_layers()

        def call(self, x):
            return self.net(x)

        def train_step(self, *arguments):
            raise AssertionError("it is asked for nothing")

    with pytest.raises(ValueError, match="Received: 4 processes"):
        kf.freeze(compiled(Model()), *blobs())


def test_the_first_batch_of_one_of_several_processes_does_not_decide(four_processes):
    model = compiled(two_dense_layers())
    with pytest.raises(ValueError, match="Received: 4 processes"):
        fit(model, *blobs())
    if BACKEND != "jax":  # whose `fit` takes variables away where a step fails
        assert model.optimizer.mask is None


@pytest.mark.parametrize("make_optimizer", [full_shape, lambda: None])
def test_a_mask_from_elsewhere_is_trained_with_in_several_processes(
    monkeypatch, tmp_path, make_optimizer
):
    mask = mask_from_one_process(tmp_path / "chosen.mask")
    monkeypatch.setattr(backend, "num_processes", lambda: 4)
    model = compiled(two_dense_layers(), make_optimizer())
    assert kf.freeze(model, mask=kf.FreezeMask.load(tmp_path / "chosen.mask")) == mask
    before = values_of(model.trainable_variables)
    fit(model, *blobs())
    assert_frozen_weights_kept(model, mask, before)
    compiled(model, make_optimizer())  # a new optimizer takes the mask over
    fit(model, *blobs())
    assert kf.get_mask(model) == mask
    assert_frozen_weights_kept(model, mask, before)


def test_the_mask_of_a_file_is_trained_with_in_several_processes(monkeypatch, tmp_path):
    model = compiled(two_dense_layers())
    fit(model, *blobs())  # its first batch decides
    mask = kf.get_mask(model)
    model.save(tmp_path / "model.keras")
    monkeypatch.setattr(backend, "num_processes", lambda: 4)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    before = values_of(loaded.trainable_variables)
    fit(loaded, *blobs(seed=1))
    assert kf.get_mask(loaded) == mask
    assert_frozen_weights_kept(loaded, mask, before)


def test_what_freezes_nothing_trains_in_several_processes(four_processes):
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), freeze_rate=0.0))
    fit(model, *blobs())


def assert_frozen_weights_kept(model, mask, before):
    """Whether nothing but the trained entries of the mask has moved, and those have."""
    for entry in mask.entries:
        old, new = before[entry.position], values_of(model.trainable_variables)[entry.position]
        assert same_bits(old[~entry.trained], new[~entry.trained])
        assert not same_bits(old[entry.trained], new[entry.trained])


class Pause(keras.callbacks.Callback):
    """Lets another thread act while `fit` is between two of its steps."""

    def __init__(self):
        super().__init__()
        self.is_training, self.may_go_on = threading.Event(), threading.Event()

    def on_train_batch_end(self, batch, logs=None):
        self.is_training.set()
        self.may_go_on.wait()


def beside_fit(model, actions, **arguments):
    """What each action raises while another thread trains the model, which then goes on."""
    pause, failures, raised = Pause(), [], []

    def train():
        try:
            fit(model, *blobs(), batch_size=12, callbacks=[pause], **arguments)
        except Exception as error:
            failures.append(error)
        finally:
            pause.is_training.set()

    thread = threading.Thread(target=train)
    thread.start()
    pause.is_training.wait()
    try:
        for action in actions:
            try:
                action()
            except Exception as error:
                raised.append(error)
    finally:
        pause.may_go_on.set()
        thread.join()
    assert not failures
    return raised


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_model_that_another_thread_trains_is_not_frozen_anew(run_eagerly):
    model = compiled(two_dense_layers(), run_eagerly=run_eagerly)
    mask = kf.freeze(model, *blobs())
    before = values_of(model.trainable_variables)
    part = keras.Model(model.inputs, model.layers[0].output)
    other = compiled(two_dense_layers(seed=3))
    actions = [
        lambda: kf.freeze(model, *blobs(seed=5), overwrite=True),
        lambda: kf.freeze(model, mask=mask, overwrite=True),
        lambda: kf.freeze(compiled(part, loss="mse"), *blobs(), overwrite=True),
        lambda: kf.reinitialize(model, seed=1),
        lambda: kf.prune(model),
        lambda: kf.unfreeze(model),
        lambda: kf.freeze(other, *blobs()),  # which shares nothing with it
    ]
    errors = beside_fit(model, actions)
    assert len(errors) == len(actions) - 1
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "is being trained in another thread" in str(error)
    assert kf.get_mask(model) == mask
    assert kf.get_mask(other) is not None
    assert_frozen_weights_kept(model, mask, before)
    new_mask = kf.freeze(model, *blobs(seed=5), overwrite=True)  # `fit` has ended
    before = values_of(model.trainable_variables)
    fit(model, *blobs())
    assert_frozen_weights_kept(model, new_mask, before)


def test_fit_that_starts_while_weights_are_scored_is_seen():
    model = compiled(two_dense_layers())
    mask = kf.freeze(model, *blobs())
    errors = []

    def data_of(batches):
        def data():
            yield next(batches)
            errors.extend(beside_fit(model, [lambda: kf.freeze(model, mask=mask, overwrite=True)]))
            yield next(batches)

        return data()

    kf.freeze(model, data_of(iter([blobs(), blobs(seed=1)])), steps=2, overwrite=True)
    assert len(errors) == 1


@pytest.mark.skipif(BACKEND == "jax", reason="a step of JAX has no state of its own")
def test_a_step_in_another_thread_waits_for_the_new_mask():
    waiting, failures = [], []

    class Inner(keras.optimizers.SGD):
        def build(self, variables):
            if self.name == "hooked" and optimizer.built is False and waiting:
                thread = waiting.pop()
                thread.start()
                thread.join(timeout=0.2)  # it comes to an end now only if it does not wait
            super().build(variables)

    model = two_dense_layers()
    optimizer = kf.FreezeOptimizer(Inner(0.1, name="hooked"), freeze_rate=0.75)
    compiled(model, optimizer)
    kf.freeze(model, *blobs())
    variables = model.trainable_variables

    def step():
        try:
            optimizer.apply([keras.ops.ones(v.shape) for v in variables], variables)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=step)
    waiting.append(thread)
    before = values_of(variables)
    mask = kf.freeze(model, *blobs(seed=5), overwrite=True)
    thread.join()
    assert not failures
    assert not waiting
    assert_frozen_weights_kept(model, mask, before)
