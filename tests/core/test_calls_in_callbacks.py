"""Functions that callbacks call with a model that they were given otherwise than by Keras."""

import keras
import numpy as np
import pytest
from helpers import blobs, compiled, dense_model, fit, same_bits, values_of

import keras_freeze as kf

X, Y = blobs()
CALLS = {
    "get_mask": kf.get_mask,
    "report": lambda model: kf.report(model).num_trained_weights,
    "gradient_flow": lambda model: kf.gradient_flow(model, X, Y),
    "compute_saliency": lambda model: np.concatenate(
        [scores.reshape(-1) for scores in kf.compute_saliency(model, X, Y).values()]
    ),
    "check_pruning": lambda model: kf.check_pruning(model, X, Y),
    "get_trained": kf.get_trained,
    "restrict_gradients": kf.restrict_gradients,
    "restore_gradients": kf.restore_gradients,
    "reinitialize": lambda model: kf.reinitialize(model, "he_normal", seed=3),
    "prune": kf.prune,
}


def frozen():
    model = compiled(dense_model())
    kf.freeze(model, X, Y)
    return model


class AfterTheFirstStep(keras.callbacks.Callback):
    """Calls a function; without `by_keras` it does not ask for `self.model`."""

    def __init__(self, function, model, by_keras):
        super().__init__()
        self.function, self.given, self.by_keras, self.result = function, model, by_keras, None

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.result = self.function(self.model if self.by_keras else self.given)


@pytest.mark.cases(1, jax=None, tensorflow=0)
@pytest.mark.parametrize("name", CALLS)
def test_a_callback_may_hold_a_model_of_its_own(name):
    results, models = [], []
    for by_keras in (True, False):
        model = frozen()
        callback = AfterTheFirstStep(CALLS[name], model, by_keras)
        fit(model, X, Y, batch_size=16, callbacks=[callback])
        results.append(callback.result)
        models.append(model)
    is_array = isinstance(results[0], np.ndarray)
    assert same_bits(*results) if is_array else results[0] == results[1]
    assert all(map(same_bits, *(values_of(model.variables) for model in models)))


@pytest.mark.cases(1, jax=None, tensorflow=0)
@pytest.mark.parametrize("include_frozen", [False, True])
def test_a_callback_may_save_a_model_of_its_own(include_frozen, tmp_path):
    model, path = frozen(), tmp_path / "model.freeze"
    callback = AfterTheFirstStep(
        lambda one: kf.save(one, path, include_frozen=include_frozen), model, by_keras=False
    )
    fit(model, X[:16], Y[:16], batch_size=16, callbacks=[callback])
    loaded = kf.load(path)
    for ours, theirs in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(*values_of([ours, theirs])), ours.path
