"""What a FreezeOptimizer forwards to its inner optimizer."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_freeze import _keras_private


class DelegatingOptimizer(keras.optimizers.Optimizer):
    """Base class of an optimizer whose rate, count of steps and averages are its inner optimizer's.

    Attributes:
        inner_optimizer: a Keras optimizer.
    """

    inner_optimizer: Any

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Call `apply` with pairs of gradient and variable.

        Returns:
            The variable that counts steps, as Keras's optimizers do.
        """
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
        return _keras_private.iterations_variable(self.inner_optimizer)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate. It can be set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def optimizers(self) -> Any:
        """The parts of an inner `MultiOptimizer`, whose rates Keras's callbacks set.

        Raises:
            AttributeError: for another inner optimizer, which has no parts.
        """
        return self.inner_optimizer.optimizers

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of steps."""
        return self.inner_optimizer.iterations

    # Keras's constructor sets this and `use_ema` before there is an inner optimizer.
    @property
    def loss_scale_factor(self) -> Any:
        """The inner optimizer's loss scale, which `LossScaleOptimizer` sets to None."""
        inner = getattr(self, "inner_optimizer", None)
        return None if inner is None else inner.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        inner = getattr(self, "inner_optimizer", None)
        if inner is not None:
            inner.loss_scale_factor = value

    # Keras's SwapEMAWeights reads this and the averages of the optimizer that it finds inside
    # another. While it is being built the answer is False: the inner optimizer has the averages.
    @property
    def use_ema(self) -> bool:
        """Whether the inner optimizer keeps moving averages."""
        return self.built and self.inner_optimizer.use_ema

    @use_ema.setter
    def use_ema(self, value: bool) -> None:
        if value:
            raise ValueError(
                "Argument `use_ema` must be given to the inner optimizer. Received: use_ema=True"
            )

    @property
    def _model_variables_moving_average(self) -> Any:
        return self.inner_optimizer._model_variables_moving_average

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the inner optimizer's loss scale."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Let the inner optimizer set the final values of variables, such as moving averages."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Exclude variables from the inner optimizer's decoupled `weight_decay`, not from `l2`.

        Args:
            var_list: variables.
            var_names: parts of variables' names.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)
