"""Training steps of one's own that only TensorFlow has: traced ones, and its random numbers."""

import keras
import numpy as np
import tensorflow as tf
from helpers import assert_frozen_bits_kept, blobs, value_of, values_of

import keras_freeze as kf


@keras.saving.register_keras_serializable(package="test_own_train_step")
class Distiller(keras.Model):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.teacher = keras.Sequential([keras.Input((6,)), keras.layers.Dense(20)])
        self.student = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(20)]
        )

    def call(self, x):
        return self.student(x)

    @tf.function
    def train_step(self, x):
        noise = tf.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.student(x + 0.01 * noise) - self.teacher(x)) ** 2)
        variables = self.student.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def test_a_traced_step_is_recorded_and_trains_after_it(tmp_path):
    model = Distiller()
    model.compile(kf.FreezeOptimizer("adam", 0.75))
    x, _ = blobs()
    mask = kf.freeze(model, x)
    assert mask.num_weights == 6 * 8 + 8 * 20
    variables = model.student.trainable_variables
    before = values_of(variables)
    model(x)
    model.fit(x, verbose=0)
    assert_frozen_bits_kept(variables, mask, before)
    assert (value_of(variables[0]) != before[0]).any()
    model.save(tmp_path / "model.keras")
    assert kf.get_mask(keras.models.load_model(tmp_path / "model.keras")) == mask


def test_random_numbers_of_tensorflow_are_those_of_a_program_without_freeze():
    keras.utils.set_random_seed(1)
    expected = tf.random.normal((3,)).numpy(), np.random.random()
    model = Distiller()
    model.compile(kf.FreezeOptimizer("adam", 0.75))
    keras.utils.set_random_seed(1)
    kf.freeze(model, blobs()[0])
    assert np.array_equal(tf.random.normal((3,)).numpy(), expected[0])
    assert np.random.random() == expected[1]
