"""Weight gradients only where weights are trained: restrict_gradients and restore_gradients."""

import keras

from keras_freeze.model_state import (
    ModelOptimizers,
    check_model,
    optimizer_in_training,
    retrace,
)
from keras_freeze.restricted import layers as sparse_gradients


def restrict_gradients(model: keras.Model) -> list[str]:
    """Compute weight gradients only where weights are trained, in layers where that is faster.

    `freeze` and `keras_freeze.load` do this. Call it for a frozen model from elsewhere, such as
    `keras.models.load_model`, whose layers do not know the mask.

    While the model is trained with its FreezeOptimizer, kernels of Dense, EinsumDense, Conv1D,
    Conv2D and Conv3D then get `tf.IndexedSlices` with the gradient of the trained entries. All
    else is as before, the layers' outputs and what is saved or exported included.

    Args:
        model: a model with a FreezeOptimizer. Without a mask, or where the optimizer uses the
            dense strategy, gradients stay as they are.

    Returns:
        The names of the layers whose gradient is restricted.

    Raises:
        ValueError: without a FreezeOptimizer.

    Example:

    ```python
    model = keras.models.load_model("frozen.keras")
    keras_freeze.restrict_gradients(model)
    ```
    """
    check_model(model)
    ModelOptimizers(model).required()
    names = restrict_where_trained(model)
    retrace(model)
    return names


def restrict_where_trained(model: keras.Model) -> list[str]:
    """Restrict gradients, or restore them where the model is not trained by a FreezeOptimizer."""
    freeze_optimizer = optimizer_in_training(model)
    if freeze_optimizer is not None:
        return sparse_gradients.install(model, freeze_optimizer, optimizer_in_training)
    sparse_gradients.restore(model)  # it is compiled with an optimizer that freezes nothing
    return []


def restore_gradients(model: keras.Model) -> None:
    """Remove the restricted weight gradients of `freeze`; the model trains as before.

    For custom code that differentiates a frozen model in training mode and needs the gradients
    of frozen weights.

    Args:
        model: any model; nothing happens to one without restricted gradients.

    Raises:
        TypeError: if it is not a `keras.Model`.

    Example:

    ```python
    keras_freeze.restore_gradients(model)
    ```
    """
    check_model(model)
    sparse_gradients.restore(model, optimizer_in_training(model))
    retrace(model)
