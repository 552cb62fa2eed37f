"""Weight gradients only where a weight is trained.

"It is more efficient to not calculate the partial derivative for the weights with mask value 0 than
masking the gradient after its computation" (the paper, after algorithm 1). A kernel's gradient is
a product of what enters its layer and what comes back from the loss, so that the entries in some
rows (input channels) and columns (output channels) cost only the product of those.
`restrict_gradients` lets layers of a frozen model compute just the rows and columns that hold a
trained weight, where that is cheaper, and pass on the gradient at the trained entries alone. The
forward pass and the gradient of a layer's inputs stay what they are.

The layers stay plain Keras layers: the `call` that is set on an instance is not part of what
Keras saves, exports or clones, and `restore_gradients` removes it.
"""

import collections
import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from keras_freeze import _keras_private, backend
from keras_freeze._utils.overrides import is_override, override, remove_overrides
from keras_freeze._utils.validation import check_instance
from keras_freeze.gradients.train_step import has_own_train_step
from keras_freeze.model_state import (
    ModelOptimizers,
    check_model,
    optimizer_in_training,
    outer_optimizer_in_training,
)
from keras_freeze.optimizer import first_batch
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.restricted.block import Block
from keras_freeze.restricted.convolutions import Convolution, Depthwise, Pointwise
from keras_freeze.restricted.cost_model import cheapest_block
from keras_freeze.restricted.operations import MatrixProduct


def restrict_gradients(model: keras.Model) -> list[str]:
    """Compute weight gradients only where weights are trained, in layers where that is faster.

    `freeze` and `keras_freeze.load` do this, and so does `fit` for any other frozen model that has
    no `train_step` of its own. Call it where a model, from `keras.models.load_model` for example,
    is trained in another way.

    While the model is trained with its FreezeOptimizer, kernels of Dense, EinsumDense (those of
    attention layers included), Conv1D to Conv3D, DepthwiseConv and SeparableConv then get the
    gradient of the trained entries alone. All else is as before, the layers' outputs and what is
    saved or exported included. On JAX this is so in `fit` and
    `train_on_batch`; use `keras_freeze.value_and_grad` in training steps of your own. There, with
    `keras.distribution.DataParallel`, the devices then exchange these gradients alone, and all such
    layers have them, whether that is faster on one device or not.

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
    first_batch.make_train_function_again(model)
    return names


def restrict_where_trained(model: keras.Model) -> list[str]:
    """Restrict gradients, or restore them where the model is not trained by a FreezeOptimizer.

    Left alone are layers with a regularizer on a kernel, with LoRA or quantization, of other
    classes than Dense, EinsumDense, Conv1D to Conv3D, DepthwiseConv1D and 2D, SeparableConv1D and
    2D, and those where it would not be faster. Where devices exchange gradients, it always is.
    """
    optimizer = optimizer_in_training(model)
    _restore(model, optimizer)
    first_batch.gradients_are_chosen(model)
    update = None if optimizer is None else optimizer.compact_update
    if update is None:
        return []
    restricted = []
    with backend.strategy_scope(optimizer):
        for layer, operations in _operations(model):
            num_blocks = len(update.blocks)
            for kernel, operation in operations:
                position = update.position_of(kernel)
                if position is None or position not in update.indices:
                    continue
                trained = update.trained(position)
                places = operation.places(_input_shape(layer))
                way = cheapest_block(
                    operation.matrices(trained), places, operation.ways, operation.costs
                )
                if way is None and backend.reduces_gradients():
                    way = (False, False)
                if way is not None:
                    update.blocks[position] = Block(operation, kernel, trained, *way)
            if len(update.blocks) > num_blocks:
                override(layer, "call", _restricted_call(layer, operations, weakref.ref(model)))
                restricted.append(layer.name)
    if restricted:
        backend.restrict_train_step(model, functools.partial(_kernels_of, weakref.ref(model)))
    return restricted


def _restrict_in_fit(model: keras.Model) -> bool:
    """Restrict gradients of a model that `fit` trains, and return whether there are any.

    Not those that a `train_step` of the user's may look at.
    """
    return not has_own_train_step(model) and bool(restrict_where_trained(model))


first_batch.followers.append(_restrict_in_fit)


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
    _restore(model, optimizer_in_training(model))
    first_batch.gradients_are_chosen(model, for_good=True)
    first_batch.make_train_function_again(model)


def _restore(model: keras.Model, optimizer: FreezeOptimizer | None) -> None:
    """Remove restricted gradients, of which `optimizer`, if there is one, has the blocks."""
    for layer in _keras_private.all_layers(model):  # the model, too
        remove_overrides(layer)
    if optimizer is not None and optimizer.compact_update is not None:
        # Someone may have wrapped a layer's `call` since: without its block it is as before.
        optimizer.compact_update.drop_blocks()


def is_restricted(layer: Any) -> bool:
    """Return whether a layer restricts its weight gradient."""
    return is_override(vars(layer).get("call"))


def _operations(model: keras.Model) -> list[tuple[Any, list[tuple[Any, Any]]]]:
    """Return the layers whose gradient can be restricted, and what they compute."""
    found = [(layer, _operations_of(layer)) for layer in _keras_private.all_layers(model)]
    # Two layers with one kernel may compute different things with it.
    uses = collections.Counter(id(kernel) for _, operations in found for kernel, _ in operations)
    return [
        (layer, operations)
        for layer, operations in found
        if operations and all(uses[id(kernel)] == 1 for kernel, _ in operations)
    ]


def _operations_of(layer: Any) -> list[tuple[Any, Any]]:
    """Return a layer's kernels and what it computes with them, one after the other.

    The list is empty if its gradient cannot be restricted.
    """
    make = _OPERATIONS.get(type(layer))  # not of a subclass, which may compute anything
    if make is None or not layer.built or "call" in vars(layer) or not _is_plain(layer):
        return []
    # JAX would take the same `call` for the function that it has traced in an earlier step.
    if _keras_private.is_rematerialized(layer):
        return []
    if _input_shape(layer) is None:
        return []
    operations = make(layer)
    has_regularizer = any(kernel.regularizer is not None for kernel, _ in operations)
    return [] if has_regularizer else operations


def _dense(layer: Any) -> list[tuple[Any, Any]]:
    return [(layer.kernel, MatrixProduct("...x,xy->...y", ops.matmul))]


def _einsum_dense(layer: Any) -> list[tuple[Any, Any]]:
    try:
        operation = MatrixProduct(layer.equation, functools.partial(ops.einsum, layer.equation))
    except ValueError:
        return []
    return [(layer.kernel, operation)]


def _convolution(layer: Any) -> list[tuple[Any, Any]]:
    return [(layer.kernel, Convolution(layer))] if layer.groups == 1 else []


def _depthwise(layer: Any) -> list[tuple[Any, Any]]:
    return [(layer.kernel, Depthwise(layer))] if _can_be_padded(layer) else []


def _separable(layer: Any) -> list[tuple[Any, Any]]:
    if not _can_be_padded(layer):
        return []
    return [(layer.depthwise_kernel, Depthwise(layer)), (layer.pointwise_kernel, Pointwise(layer))]


def _can_be_padded(layer: Any) -> bool:
    """Return whether strides or dilations are 1; a Convolution cannot have both by itself."""
    return max(layer.strides) == 1 or max(layer.dilation_rate) == 1


_OPERATIONS = {
    keras.layers.Dense: _dense,
    keras.layers.EinsumDense: _einsum_dense,
    keras.layers.Conv1D: _convolution,
    keras.layers.Conv2D: _convolution,
    keras.layers.Conv3D: _convolution,
    keras.layers.DepthwiseConv1D: _depthwise,
    keras.layers.DepthwiseConv2D: _depthwise,
    keras.layers.SeparableConv1D: _separable,
    keras.layers.SeparableConv2D: _separable,
}


def _is_plain(layer: Any) -> bool:
    return not getattr(layer, "lora_enabled", False) and layer.quantization_mode is None


def _input_shape(layer: Any) -> tuple[int | None, ...] | None:
    """Return a layer's input shape; None if it was not built by Keras."""
    return (layer.get_build_config() or {}).get("input_shape")


def _restricted_call(
    layer: Any, operations: list[tuple[Any, Any]], model: Callable[[], keras.Model | None]
) -> Callable[..., Any]:
    """Return a `call` of a layer that restricts the gradient while its model is trained."""
    ordinary = layer.call

    @functools.wraps(ordinary)
    def call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        trained = model()
        is_training = trained is not None and backend.is_training(trained) and _is_plain(layer)
        optimizer = _optimizer_of(trained) if is_training else None
        blocks = [_block_of(*pair, optimizer) for pair in operations]
        if not any(blocks) or not _is_tensor(inputs, layer.compute_dtype):
            return ordinary(inputs, *args, **kwargs)
        outputs = inputs
        for (kernel, operation), block in zip(operations, blocks, strict=True):
            if block is None:
                outputs = operation.apply(outputs, ops.convert_to_tensor(kernel))
            else:
                outputs = backend.with_gradient(operation.apply, outputs, kernel, block.gradient)
        if layer.bias is not None:
            outputs = ops.add(outputs, _broadcast_bias(layer))
        return outputs if layer.activation is None else layer.activation(outputs)

    return call


def _block_of(kernel: Any, operation: Any, optimizer: FreezeOptimizer | None) -> Block | None:
    """Return the block of a kernel, if it is of this operation, not of another layer's."""
    update = None if optimizer is None else optimizer.compact_update
    position = None if update is None else update.position_of(kernel)
    block = None if update is None or position is None else update.blocks.get(position)
    return None if block is None or block.operation is not operation else block


def _is_tensor(inputs: Any, dtype: str) -> bool:
    return backend.is_dense(inputs) and keras.backend.standardize_dtype(inputs.dtype) == dtype


def value_and_grad(
    function: Callable[..., Any], optimizer: FreezeOptimizer, has_aux: bool = False
) -> Callable[..., Any]:
    """Differentiate where weights are trained alone, in place of `jax.value_and_grad`.

    For training steps of your own on JAX: `jax.value_and_grad` computes all gradients, and the
    FreezeOptimizer takes those it needs, which is correct and slower. `fit` and `train_on_batch` do
    this by themselves, unless the model's class has a `train_step` of its own.

    The function must call a model that `freeze` has frozen for this optimizer, in training mode.

    Args:
        function: a function of the values of the variables that the optimizer was built with, in
            order, and of anything else. It returns the loss.
        optimizer: the FreezeOptimizer that gets the gradients, by its `stateless_apply`.
        has_aux: whether the function returns the loss and something else.

    Returns:
        A function of the same arguments that returns what `jax.value_and_grad` would. Gradients of
        kernels that are trained in part are objects of two arrays (a JAX pytree): a vector with
        the gradient of the trained entries, and the kernel's gradient through all that is not the
        layer's own product.

    Raises:
        TypeError: if `optimizer` is not a FreezeOptimizer.
        ValueError: if Keras runs on another backend.

    Example:

    ```python
    def compute_loss(trainable_variables, non_trainable_variables, x, y):
        outputs, non_trainable_variables = model.stateless_call(
            trainable_variables, non_trainable_variables, x, training=True
        )
        return loss(y, outputs), non_trainable_variables

    gradients_of = keras_freeze.value_and_grad(compute_loss, optimizer, has_aux=True)
    ```
    """
    check_instance("optimizer", optimizer, FreezeOptimizer, "a FreezeOptimizer")
    return backend.value_and_grad(function, lambda: _kernels_with_blocks(optimizer), has_aux)


def _optimizer_of(model: keras.Model) -> FreezeOptimizer | None:
    """Return the FreezeOptimizer that gets a model's gradients, if they may be compact."""
    optimizer = optimizer_in_training(model)
    outer = outer_optimizer_in_training(model)
    is_outer = outer is optimizer
    # For this one, the gradients become dense once they have been summed over the devices.
    is_scaled = backend.reduces_gradients() and isinstance(
        outer, keras.optimizers.LossScaleOptimizer
    )
    accepts = is_outer or backend.COMPACT_GRADIENTS_ARE_TENSORS or is_scaled
    return optimizer if accepts else None


def _kernels_of(model: Callable[[], keras.Model | None]) -> dict[int, tuple[Any, Any]]:
    """Return the kernels of a model whose gradients are restricted in its training step."""
    trained = model()
    optimizer = None if trained is None else _optimizer_of(trained)
    if trained is None or optimizer is None:
        return {}
    has_all = len(optimizer.built_variables) == len(trained.trainable_variables)
    return _kernels_with_blocks(optimizer) if has_all else {}


def _kernels_with_blocks(optimizer: FreezeOptimizer) -> dict[int, tuple[Any, Any]]:
    """Return the kernels with restricted gradients, by position, and their trained entries."""
    update = optimizer.compact_update
    blocks = {} if update is None else update.blocks
    return {p: (optimizer.built_variables[p], block.indices) for p, block in blocks.items()}


def _broadcast_bias(layer: Any) -> Any:
    if getattr(layer, "data_format", "channels_last") == "channels_last":
        return layer.bias
    return ops.reshape(layer.bias, (1, -1) + (1,) * layer.rank)
