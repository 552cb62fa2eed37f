"""Losses that a model has, computes itself or lacks, and models that a step has yet to build."""

import keras
import pytest
from helpers import blobs, crossentropy
from keras import ops
from own_step_cases import assert_mask_by_hand, compiled, dense, freezing, made
from own_steps import BACKEND, OwnStep, gradients_by_hand

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=0)


def test_grasp_needs_a_loss():
    model, _, arguments = made("flow", freezing(criterion="grasp"))
    with pytest.raises(ValueError, match="give `freeze` a `loss`"):
        kf.freeze(model, *arguments)


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


@pytest.mark.cases(1)
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
