"""Models whose `fit` preprocesses its data, as the tasks of KerasHub do."""

import keras
import numpy as np
import pytest
from helpers import blobs, compiled, fit, two_dense_layers

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=3, jax=3)


class Task(keras.Model):
    """What this package expects of a task of KerasHub, without its `fit`."""

    preprocessor = True

    def preprocess_samples(self, x, y=None, sample_weight=None):
        x = np.array([[float(number) for number in text.split()] for text in x], "float32")
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)


class Batches(keras.utils.PyDataset):
    """Three batches of 16."""

    def __init__(self, *arrays):
        super().__init__()
        self.arrays = arrays

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return tuple(array[16 * index : 16 * index + 16] for array in self.arrays)


def task_and_plain():
    """A task and its strings, and a network like it and the same numbers."""
    x, y = blobs()
    strings = np.array([" ".join(map(repr, row.tolist())) for row in x])
    network = two_dense_layers()
    task = compiled(Task(network.inputs, network.outputs))
    return (task, strings, y), (compiled(two_dense_layers()), x, y)


def generator(x, y):
    yield from (Batches(x, y)[i] for i in range(3))


FORMS = {
    "arrays": lambda x, y: {"x": x, "y": y},
    "list of strings": lambda x, y: {"x": x if x.ndim == 2 else x.tolist(), "y": y},
    "pieces": lambda x, y: {"x": x, "y": y, "batch_size": 20},
    "weighted": lambda x, y: {"x": x, "y": y, "sample_weight": np.arange(len(y))},
    "dataset": lambda x, y: {"x": Batches(x, y), "steps": 2},
    "weighted dataset": lambda x, y: {"x": Batches(x, y, np.arange(len(y))), "steps": 2},
    "generator": lambda x, y: {"x": generator(x, y), "steps": 3},
}


@pytest.mark.cases(None, tensorflow=1, jax=1)
@pytest.mark.parametrize("form", FORMS)
def test_freeze_chooses_by_what_fit_would_see(form):
    masks = [kf.freeze(model, **FORMS[form](x, y)) for model, x, y in task_and_plain()]
    assert masks[0] == masks[1]


@pytest.mark.cases(None, tensorflow=0)
def test_a_task_without_a_preprocessor_gets_its_data_as_they_are():
    (task, _, _), (plain, x, y) = task_and_plain()
    task.preprocessor = None
    assert kf.freeze(task, x, y) == kf.freeze(plain, x, y)


def test_whatever_reads_data_preprocesses_them():
    found = []
    for model, x, y in task_and_plain():
        kf.freeze(model, x, y)
        scores = kf.compute_saliency(model, x, y)
        flows = [kf.gradient_flow(model, x, y), kf.gradient_flow(model, Batches(x, y), steps=2)]
        found.append([*scores.values(), *flows])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_too_few_batches_are_told_of():
    (task, x, y), _ = task_and_plain()
    with pytest.raises(ValueError, match="a dataset of 3 batches"):
        kf.freeze(task, Batches(x, y), steps=4)


@pytest.mark.same_on_all
def test_a_callback_measures_what_fit_sees():
    """Of numbers: strings are refused where it is made, before it knows of the model."""

    class Halving(Task):
        def preprocess_samples(self, x, y=None, sample_weight=None):
            return keras.utils.pack_x_y_sample_weight(x / 2, y, sample_weight)

    x, y = blobs()
    found = []
    for task_class, data in ((Halving, x), (keras.Model, x / 2)):
        network = two_dense_layers()
        model = compiled(task_class(network.inputs, network.outputs))
        history = kf.callbacks.GradientFlowHistory(data, y)
        fit(model, x / 2, y, callbacks=[history])  # this `fit` is Keras's own
        found.append(history.history)
    assert found[0] == found[1]
