"""Models whose loss is in a `train_step` of their own, on each backend."""

import keras
import numpy as np
from helpers import value_of

BACKEND = keras.backend.backend()


def gradients_of(loss, variables):
    """The gradients of `loss()` with respect to variables, None where there is none."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, [v.value for v in variables])
    if BACKEND == "torch":
        import torch

        return torch.autograd.grad(loss(), [v.value for v in variables], allow_unused=True)
    import jax

    def function(values):
        with keras.StatelessScope(list(zip(variables, values, strict=True))):
            return loss()

    return jax.grad(function)([v.value for v in variables])


def arrays_of(gradients):
    """Gradients as arrays."""
    return [np.array(keras.ops.convert_to_numpy(g)) for g in gradients]


def gradients_by_hand(loss, variables):
    """The arrays of the gradients of `loss()`."""
    return arrays_of(gradients_of(loss, variables))


class OwnStep(keras.Model):
    """Minimises `loss_of(data)`, which a subclass has, over all trainable variables.

    On JAX as a function of the state, as `fit` wants it there.
    """

    def trained_variables(self):
        return self.trainable_variables

    def loss_of(self, data):
        raise NotImplementedError

    if BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            variables = self.trained_variables()
            with tf.GradientTape() as tape:
                value = self.loss_of(data)
                scaled = self.optimizer.scale_loss(value)
            gradients = tape.gradient(scaled, [v.value for v in variables])
            self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": value}

    elif BACKEND == "torch":

        def train_step(self, data):
            import torch

            variables = self.trained_variables()
            self.zero_grad()
            value = self.loss_of(data)
            self.optimizer.scale_loss(value).backward()
            gradients = [v.value.grad for v in variables]
            with torch.no_grad():
                self.optimizer.apply(gradients, variables)
            return {"loss": value}

    else:

        def train_step(self, state, data):
            import jax

            trainable, non_trainable, of_optimizer, metrics = state

            def function(values):
                mapping = [
                    *zip(self.trainable_variables, values, strict=True),
                    *zip(self.non_trainable_variables, non_trainable, strict=True),
                ]
                with keras.StatelessScope(mapping) as scope:
                    value = self.loss_of(data)
                new = [scope.get_current_value(v) for v in self.non_trainable_variables]
                with keras.StatelessScope(
                    list(zip(self.optimizer.variables, of_optimizer, strict=True))
                ):
                    return self.optimizer.scale_loss(value), (value, new)

            (_, (value, non_trainable)), gradients = jax.value_and_grad(function, has_aux=True)(
                trainable
            )
            trainable, of_optimizer = self.optimizer.stateless_apply(
                of_optimizer, gradients, trainable
            )
            return {"loss": value}, (trainable, non_trainable, of_optimizer, metrics)


def make_step(function):
    """A `train_step` that changes variables in place, from a function of model and data.

    On JAX, such a step needs `run_eagerly=True`.
    """
    if BACKEND != "jax":
        return lambda self, data: function(self, data) or {}

    def train_step(self, state, data):
        function(self, data)
        return {}, state

    return train_step


def step_of(optimizer, loss, variables):
    """One step of an optimizer by the gradients of `loss()`."""
    gradients = gradients_of(loss, variables)
    if BACKEND == "torch":
        import torch

        with torch.no_grad():
            optimizer.apply(gradients, variables)
    else:
        optimizer.apply(gradients, variables)


def state_of(*variables):
    return [value_of(v) for v in variables]
