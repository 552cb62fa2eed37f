"""What a model has to do with freezing: its optimizers, its mask, its layers' initializers."""

import weakref
from typing import Any

import keras

from keras_freeze import _keras_private, backend
from keras_freeze._utils.validation import check_instance
from keras_freeze.gradients.data import Batches
from keras_freeze.gradients.loss import (
    data_errors,
)
from keras_freeze.gradients.preserve import held_by, layers_kept_if_it_fails, values_kept
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.optimizer.checkpoint import relabel
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.inner_optimizer import walk
from keras_freeze.parameters import (
    classify,
    path_of,
    shorten,
)

# The optimizers of models that are trained in a loop of the user's own, so that these models can be
# asked for their masks, too.
_loop_optimizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def get_mask(model: keras.Model) -> FreezeMask | None:
    """The mask of a model's weights, whichever FreezeOptimizer has frozen them; None if none has.

    A mask belongs to the variables: a model that was trained as a part of another one has its part
    of the mask, and a model with several FreezeOptimizers has all their masks in one.

    Raises:
        ValueError: if the FreezeOptimizer trains another model, or has read the mask of one.
        TypeError: if `model` is no model.

    Example:

    ```python
    keras_freeze.get_mask(model)["fc1/kernel"].sum()
    ```
    """
    check_model(model)
    optimizers = freeze_optimizers_of(model)
    for optimizer in optimizers:
        check_trains(optimizer, model)
    if not optimizers and _is_trained_whole(model):
        return None
    if len(optimizers) == 1 and not frozen_variables.is_superseded(optimizers[0]):
        mask = optimizers[0].mask
        if mask is not None and not optimizers[0].built:  # read from a file a moment ago
            return relabel(mask, classify(model.trainable_variables))
        # Its positions are those of the optimizer, also where a layer is no longer trainable.
        num_registered = frozen_variables.num_registered(model.trainable_variables)
        if mask is not None and len(mask) >= num_registered:
            return mask
    return frozen_variables.mask_of(_variables_of(model))


def _variables_of(model: keras.Model) -> list[Any]:
    """A model's trainable variables, then the others: a layer may have been trainable before."""
    return list({id(v): v for v in [*model.trainable_variables, *model.variables]}.values())


def _is_trained_whole(model: keras.Model) -> bool:
    """Whether a plain optimizer has trained all of the model, frozen weights included."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return False
    return int(backend.to_numpy(optimizer.iterations)) > 0


def optimizer_of(model: keras.Model) -> Any:
    """The optimizer that a model is compiled with, or that `freeze` was given; None if none."""
    compiled = getattr(model, "optimizer", None)
    return compiled if freeze_optimizers_in(compiled) else _loop_optimizers.get(model, compiled)


def remember_loop(model: keras.Model, optimizer: Any) -> None:
    """Keeps in mind that a model is trained by this optimizer in a loop of the user's own."""
    _loop_optimizers[model] = optimizer


def freeze_optimizer_of(model: keras.Model) -> FreezeOptimizer | None:
    """The FreezeOptimizer in `optimizer_of(model)`, wherever it sits; None if there is none.

    Raises:
        ValueError: if there are several.
    """
    optimizer = optimizer_of(model)
    return freeze_optimizer_in(optimizer) if freeze_optimizers_in(optimizer) else None


def freeze_optimizers_of(model: keras.Model) -> list[FreezeOptimizer]:
    """All FreezeOptimizers of a model, also those under names of its own (`d_optimizer`)."""
    found = freeze_optimizers_in(optimizer_of(model))
    found += [one for one in held_by(model) if isinstance(one, FreezeOptimizer)]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def check_not_quantized(model: keras.Model) -> None:
    """Checks that `model.quantize` has not taken away kernels that the mask is about.

    Raises:
        ValueError: if it has.
    """
    modes = {
        layer.name: layer.quantization_mode
        for layer in _keras_private.all_layers(model)
        if getattr(layer, "quantization_mode", None) is not None
    }
    present, gone = set(map(id, model.variables)), []
    for optimizer in freeze_optimizers_of(model) if modes else ():
        for entry in (
            () if optimizer.mask is None or not optimizer.built else optimizer.mask.entries
        ):
            if id(optimizer.built_variables[entry.position]) not in present:
                gone.append(entry.path)
    if gone:
        raise ValueError(
            "Layers have been quantized since the model was frozen: integers have replaced their "
            "kernels, and nothing tells which were frozen. Call this before `quantize`. "
            f"Received: layers quantized to {modes}; no longer there are {shorten(gone)}"
        )


def optimizers_in_force(model: keras.Model) -> list[FreezeOptimizer]:
    """Those FreezeOptimizers of a model whose mask no other one has superseded."""
    return [o for o in freeze_optimizers_of(model) if not frozen_variables.is_superseded(o)]


def optimizer_in_training(model: keras.Model) -> FreezeOptimizer | None:
    """The FreezeOptimizer that gets a model's gradients: of `fit`, or of a loop of one's own."""
    compiled = getattr(model, "optimizer", None)
    found = freeze_optimizers_in(_loop_optimizers.get(model) if compiled is None else compiled)
    return found[0] if len(found) == 1 else None


def freeze_optimizers_in(optimizer: Any) -> list[FreezeOptimizer]:
    """The FreezeOptimizers in an optimizer; itself, if it is one."""
    return [one for one in walk(optimizer) if isinstance(one, FreezeOptimizer)]


def freeze_optimizer_in(optimizer: Any) -> FreezeOptimizer:
    """The one FreezeOptimizer in an optimizer.

    Raises:
        ValueError: if there is none, or if there are several.
    """
    found = freeze_optimizers_in(optimizer)
    if len(found) != 1:
        raise ValueError(
            "The model must be compiled with one FreezeOptimizer, such as "
            "FreezeOptimizer(keras.optimizers.SGD(0.1)). "
            f"Received: {type(optimizer).__name__} with {len(found)} FreezeOptimizers in it."
        )
    return found[0]


def required_optimizer(model: keras.Model, optimizer: Any = None) -> Any:
    """`optimizer`, or that of the model.

    Raises:
        ValueError: if there is none.
    """
    check_model(model)
    if optimizer is None:
        optimizer = optimizer_of(model)
    if optimizer is None:
        raise ValueError(
            "The model is not compiled: call model.compile(optimizer=FreezeOptimizer(...), "
            "loss=...) first, or give `freeze` an `optimizer` and a `loss`."
        )
    return optimizer


def check_trains(optimizer: FreezeOptimizer, model: keras.Model) -> None:
    """Refuses a FreezeOptimizer that was built for the variables of another model."""
    if not optimizer.built or not optimizer.built_variables:
        return
    own = {id(variable) for variable in model.variables}
    if not own or any(id(variable) in own for variable in optimizer.built_variables):
        return
    other = frozen_variables.model_of(optimizer)
    named = "another model" if other is None else f"the model {other.name!r}"
    paths = shorten([path_of(v) for v in optimizer.built_variables], limit=3)
    raise ValueError(
        f"This FreezeOptimizer trains {named}, with the variables {paths}. Compile each model with "
        f"a FreezeOptimizer of its own. Received: {optimizer.name!r} for the model {model.name!r}"
    )


def is_built(model: keras.Model) -> bool:
    """Whether all variables of a model exist, also of one that is never called itself."""
    layers = list(_keras_private.all_layers(model, include_self=False))
    return model.built or (bool(layers) and all(layer.built for layer in layers))


def check_model(model: Any) -> None:
    """Check that an argument is a model.

    Raises:
        TypeError: if it is not.
    """
    check_instance("model", model, keras.Model, "a keras.Model")


def trace_again(model: keras.Model) -> None:
    """Replaces a train function that was traced for another mask, also while `fit` runs."""
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)


def build_model(model: keras.Model, batches: Batches | None) -> None:
    if is_built(model):
        return
    if batches is None:
        raise ValueError("The model is not built: pass a batch of inputs as `x`.")
    x = next(iter(batches))[0]
    with (
        backend.strategy_scope(model),
        layers_kept_if_it_fails(model),
        values_kept(model),
        data_errors(0),
    ):
        model(x)
