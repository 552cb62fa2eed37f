"""What a model has to do with freezing: its optimizers, its mask, whether it is built."""

import functools
import weakref
from typing import Any

import keras
from keras import tree

from keras_freeze import _keras_private, backend
from keras_freeze._utils.validation import check_instance
from keras_freeze.gradients.data import Batches
from keras_freeze.gradients.loss import data_errors
from keras_freeze.gradients.preserve import held_by, layers_kept_if_it_fails, values_kept
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.inner_optimizer import walk
from keras_freeze.optimizer.state import relabel
from keras_freeze.parameters import classify, path_of, shorten

# The optimizers of models that are trained in custom training loops, as `freeze` was given them.
_loop_optimizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def get_mask(model: keras.Model) -> FreezeMask | None:
    """Return the mask of a model's weights, or None if the model is not frozen.

    A mask belongs to the variables: a model that was trained as a part of another one has its part
    of the mask, and for a model with several FreezeOptimizers one mask covers all of them.

    Args:
        model: a model.

    Returns:
        The mask, True where a weight is trained.

    Raises:
        ValueError: if the FreezeOptimizer trains another model, or has read the mask of one.
        TypeError: if `model` is not a `keras.Model`.

    Example:

    ```python
    keras_freeze.get_mask(model)["fc1/kernel"].sum()
    ```
    """
    check_model(model)
    optimizers = ModelOptimizers(model).all
    for optimizer in optimizers:
        check_trains(optimizer, model)
    if not optimizers and _is_trained_by_plain_optimizer(model):
        return None
    if len(optimizers) == 1 and not frozen_variables.is_superseded(optimizers[0]):
        mask = optimizers[0].mask
        if mask is not None and not optimizers[0].built:  # just read from a file
            return relabel(mask, classify(model.trainable_variables))
        # Its positions are those of the optimizer, also where a layer is no longer trainable.
        num_registered = frozen_variables.num_registered(model.trainable_variables)
        if mask is not None and len(mask) >= num_registered:
            return mask
    # All variables, the trainable ones first: a layer may have been trainable before.
    variables = {id(v): v for v in [*model.trainable_variables, *model.variables]}
    return frozen_variables.mask_of(list(variables.values()))


def _is_trained_by_plain_optimizer(model: keras.Model) -> bool:
    """Return whether an optimizer without a FreezeOptimizer has trained the model."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not optimizer.built:
        return False
    return int(backend.to_numpy(optimizer.iterations)) > 0


class ModelOptimizers:
    """The optimizers of a model, looked up once.

    Args:
        optimizer: the optimizer of a custom training loop. None: the one that the model is compiled
            with, or that an earlier call of `freeze` was given.

    Attributes:
        outer: the optimizer that gets the model's gradients; None if there is none.
        inside: the FreezeOptimizers that `outer` is or contains.
    """

    def __init__(self, model: keras.Model, optimizer: Any = None) -> None:
        compiled = getattr(model, "optimizer", None)
        has_own = bool(freeze_optimizers_in(compiled))
        own = compiled if has_own else _loop_optimizers.get(model, compiled)
        self.outer: Any = own if optimizer is None else optimizer
        self.inside = freeze_optimizers_in(self.outer)
        self._model, self._own = model, own

    @functools.cached_property
    def all(self) -> list[FreezeOptimizer]:
        """All FreezeOptimizers of the model, attributes such as `d_optimizer` included."""
        held = [one for one in held_by(self._model) if isinstance(one, FreezeOptimizer)]
        return list(dict.fromkeys([*self.inside, *freeze_optimizers_in(self._own), *held]))

    @property
    def outside(self) -> list[FreezeOptimizer]:
        """The FreezeOptimizers of the model that are not in `outer`."""
        return [one for one in self.all if one not in self.inside]

    @property
    def in_force(self) -> list[FreezeOptimizer]:
        """All FreezeOptimizers of the model whose masks no other one has replaced."""
        return [one for one in self.all if not frozen_variables.is_superseded(one)]

    @property
    def single(self) -> FreezeOptimizer | None:
        """The FreezeOptimizer in `outer`; None if there is none.

        Raises:
            ValueError: if there are several.
        """
        return self.required() if self.inside else None

    def required(self) -> FreezeOptimizer:
        """Return the one FreezeOptimizer in `outer`.

        Raises:
            ValueError: if there is none, or if there are several.
        """
        if self.outer is None:
            raise ValueError(
                "The model is not compiled: call model.compile(optimizer=FreezeOptimizer(...), "
                "loss=...) first, or give `freeze` an `optimizer` and a `loss`."
            )
        if len(self.inside) != 1:
            raise ValueError(
                "The model must be compiled with one FreezeOptimizer, such as "
                "FreezeOptimizer(keras.optimizers.SGD(0.1)). Received: "
                f"{type(self.outer).__name__} with {len(self.inside)} FreezeOptimizers in it."
            )
        return self.inside[0]


def remember_loop_optimizer(model: keras.Model, optimizer: Any) -> None:
    """Remember that this optimizer trains a model in a custom training loop."""
    _loop_optimizers[model] = optimizer


def optimizer_in_training(model: keras.Model) -> FreezeOptimizer | None:
    """Return the FreezeOptimizer that gets a model's gradients in `fit` or in a custom loop.

    None where there is none, or several, or where the model is compiled with a plain optimizer.
    """
    inside = freeze_optimizers_in(outer_optimizer_in_training(model))
    return inside[0] if len(inside) == 1 else None


def outer_optimizer_in_training(model: keras.Model) -> Any:
    """Return the optimizer that gets a model's gradients, around a FreezeOptimizer or not."""
    compiled = getattr(model, "optimizer", None)
    return _loop_optimizers.get(model) if compiled is None else compiled


def freeze_optimizers_in(optimizer: Any) -> list[FreezeOptimizer]:
    """Return the FreezeOptimizers that an optimizer is or contains."""
    return [one for one in walk(optimizer) if isinstance(one, FreezeOptimizer)]


def check_trains(optimizer: FreezeOptimizer, model: keras.Model) -> None:
    """Check that a FreezeOptimizer was not built for the variables of another model.

    Raises:
        ValueError: if it was.
    """
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
        f"its own FreezeOptimizer. Received: {optimizer.name!r} for the model {model.name!r}"
    )


def check_not_quantized(model: keras.Model) -> None:
    """Check that `model.quantize` has not replaced kernels that the mask covers.

    Raises:
        ValueError: if it has.
    """
    modes = {
        layer.name: layer.quantization_mode
        for layer in _keras_private.all_layers(model)
        if getattr(layer, "quantization_mode", None) is not None
    }
    if not modes:
        return
    present = {id(variable) for variable in model.variables}
    gone = [
        entry.path
        for optimizer in ModelOptimizers(model).all
        if optimizer.mask is not None and optimizer.built
        for entry in optimizer.mask.entries
        if id(optimizer.built_variables[entry.position]) not in present
    ]
    if gone:
        raise ValueError(
            "Layers have been quantized since the model was frozen: integers have replaced their "
            "kernels, and it is not known which of them were frozen. Call this before `quantize`. "
            f"Received: layers quantized to {modes}; missing are {shorten(gone)}"
        )


def check_model(model: Any) -> None:
    """Check that an argument is a model, and write to its variables what `fit` has trained so far.

    A callback may be given its model otherwise than by `self.model`, which does the latter.

    Raises:
        TypeError: if it is not.
    """
    check_instance("model", model, keras.Model, "a keras.Model")
    backend.synchronize_variables(model)


def is_built(model: keras.Model) -> bool:
    """Return whether all variables of a model exist, also if the model itself is never called."""
    layers = list(_keras_private.all_layers(model, include_self=False))
    return model.built or (bool(layers) and all(layer.built for layer in layers))


def build_model(model: keras.Model, batches: Batches | None) -> None:
    """Build a model with the first batch, if it is not built.

    Raises:
        ValueError: if there is no batch, or if it does not fit the model.
    """
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
        # Processes that share variables build them of other batches.
        if backend.STEPS_ARE_STATELESS and backend.num_processes() > 1:
            x = tree.map_structure(lambda part: keras.KerasTensor(part.shape, part.dtype), x)
        model(x)
