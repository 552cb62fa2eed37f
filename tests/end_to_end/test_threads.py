"""Several threads: what would tear a mask apart is refused, all else works."""

import threading

import keras
import pytest
from helpers import blobs, compiled, fit, same_bits, two_dense_layers, values_of

import keras_freeze as kf

BACKEND = keras.backend.backend()


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
