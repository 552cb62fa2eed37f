"""Distillation: a student learns from a teacher that stays as it is, by `compute_loss`."""

import keras
import numpy as np
from keras import layers, ops

import keras_freeze as kf

FEATURES, CLASSES = 12, 4


def make_data(num=128, seed=0):
    """Clusters, some of which belong to the same class."""
    rng = np.random.default_rng(seed)
    cluster = rng.integers(0, 3 * CLASSES, num)
    centers = np.random.default_rng(7).normal(0, 2, (3 * CLASSES, FEATURES))
    x = centers[cluster] + rng.normal(size=(num, FEATURES))
    return x.astype("float32"), (cluster % CLASSES).astype("int32")


def make_network(units, name):
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(units, activation="relu"),
            layers.Dropout(0.1),
            layers.Dense(units, activation="relu"),
            layers.Dense(CLASSES),
        ],
        name=name,
    )


def make_teacher():
    teacher = make_network(128, "teacher")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss)
    teacher.fit(*make_data(), epochs=2, verbose=0)
    return teacher


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3
    ):
        """Also takes the two losses and how they are weighed."""
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False, training=True
    ):
        soft_labels = ops.softmax(self.teacher(x, training=False) / self.temperature)
        distillation_loss = self.distillation_loss_fn(
            soft_labels, ops.softmax(y_pred / self.temperature)
        )
        student_loss = self.student_loss_fn(y, y_pred)
        return (
            self.alpha * student_loss + (1 - self.alpha) * distillation_loss * self.temperature**2
        )

    def call(self, x, training=False):
        return self.student(x, training=training)


def make_model():
    return Distiller(make_network(64, "student"), make_teacher())


def compile_model(distiller):
    distiller.compile(
        optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.01), freeze_rate=0.95),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.2,
        temperature=4,
    )


def freeze_model(distiller):
    kf.freeze(distiller, *make_data())


def train(distiller):
    history = distiller.fit(*make_data(), epochs=3, batch_size=32, verbose=0)
    return history.history["loss"]


def networks(distiller):
    """Those whose weights are trained, with their optimizer."""
    return [(distiller.student, distiller.optimizer)]


def keep(distiller):
    """What one keeps of the training, and an input for it."""
    return distiller.student, make_data(5)[0]
