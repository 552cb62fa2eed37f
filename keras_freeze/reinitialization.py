"""Re-initialize the weights of a model from portable seeds (the paper's algorithm S1)."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend, initializers
from keras_freeze._utils.threads import check_not_trained_elsewhere
from keras_freeze._utils.validation import check_int
from keras_freeze.initializers.of_layers import (
    attribute_of,
    initializer_in,
    initializers_of,
    is_describable,
    kernel_axes,
    source_of,
    starts_of,
)
from keras_freeze.initializers.portable import VarianceScaling, portable_version
from keras_freeze.model_state import ModelOptimizers, check_model
from keras_freeze.optimizer.first_batch import make_train_function_again
from keras_freeze.parameters import WEIGHT, classify, kind_of, path_of, shorten
from keras_freeze.restricted.layers import is_restricted, restrict_where_trained

# Other parameters than weights, a random bias for instance, have streams from here on.
_OTHER_STREAMS = 1 << 31


def reinitialize(model: keras.Model, initializer: Any = None, seed: int = 0) -> None:
    """Re-initialize all weights of a model's trainable layers and keep its mask (algorithm S1).

    Trained weights are re-initialized, too; biases and normalization, moving statistics included,
    get their initial values again, and the FreezeOptimizer is reset. Called before `freeze`, this
    gives any model weights that one portable seed reproduces.

    Warns if trained or loaded values are lost, and if something cannot be drawn from a portable
    seed.

    Args:
        model: a built model.
        initializer: None draws each weight from its layer's own distribution. Otherwise one for all
            weights: "xavier_normal", "kaiming_uniform" or "pm_sigma", which scale the variance;
            "standard_normal" for N(0, 1), "constant_sigma" for the layer's sigma everywhere, or
            "ones", with which the paper's networks do not train; a name that Keras has, such as
            "he_normal", in its portable version; or a Keras initializer as it is.
        seed: one integer in [0, 2**32) for the whole model; each weight has its own stream of it.

    Raises:
        ValueError: for a model that is not built, an initializer or seed that does not exist, or
            weights of a layer that does not keep its initializer. The model is then unchanged.
        TypeError: for arguments of a wrong type.
        RuntimeError: while another thread trains the model.

    Example:

    ```python
    keras_freeze.reinitialize(model, seed=7)
    keras_freeze.reinitialize(model, "kaiming_uniform", seed=7)
    ```
    """
    check_model(model)
    check_not_trained_elsewhere(model)
    check_int("seed", seed, end=2**32)
    weights = [v for v in model.trainable_variables if kind_of(v) == WEIGHT]
    if not weights:
        raise ValueError(
            "Argument `model` must be built and have trainable weights. "
            f"Received: model={model!r} without trainable weights"
        )
    holders = initializers_of(model)
    if initializer is None:
        drawn = _own_initializers(weights, holders, seed)
    else:
        drawn = [_chosen(initializer, seed, stream) for stream in range(len(weights))]
    values = [
        (v, draw(tuple(v.shape), dtype=v.dtype)) for v, draw in zip(weights, drawn, strict=True)
    ]
    values += _other_values(model, seed if initializer is None else None)
    optimizers = ModelOptimizers(model)
    _warn_of_loss(model, weights, optimizers)
    was_restricted = any(map(is_restricted, _keras_private.all_layers(model)))
    for variable, value in values:
        variable.assign(value)
    for variable, draw in zip(weights, drawn, strict=True):
        if id(variable) in holders:
            setattr(*holders[id(variable)], draw)  # `save` looks there for the seed
    for optimizer in optimizers.in_force:
        optimizer.remember_starts(model)
        optimizer.reset()
        if optimizer.frozen_weights == "zero" and optimizer.mask is not None:
            optimizer.zero_frozen_weights()
    if was_restricted:
        restrict_where_trained(model)
    if optimizers.all:
        make_train_function_again(model)


def _chosen(initializer: Any, seed: int, stream: int) -> Any:
    """Return the initializer that the user has chosen, for the weight with this stream."""
    if isinstance(initializer, str) and initializer not in initializers.INITIALIZERS:
        try:
            of_keras = keras.initializers.get(initializer)
        except ValueError:
            of_keras = None  # `get` lists the names that there are
        if of_keras is not None:
            return portable_version(of_keras, seed, stream) or of_keras
    return initializers.get(initializer, seed, stream)


def _own_initializers(weights: Sequence[Any], holders: dict[int, Any], seed: int) -> list[Any]:
    """Return an initializer with its layer's distribution for each weight."""
    own = [initializer_in(*holders[id(v)]) if id(v) in holders else None for v in weights]
    unknown = [path_of(v) for v, one in zip(weights, own, strict=True) if one is None]
    if unknown:
        raise ValueError(
            f"It is not known what the weights {shorten(unknown)} are drawn from: their layers do "
            "not keep their initializers. Let a custom layer keep that of a weight `kernel` as its "
            "attribute `kernel_initializer`, or name one distribution for all weights, such as "
            "reinitialize(model, 'glorot_uniform'). Received: initializer=None"
        )
    seeded = [
        _with_seed(holders[id(v)][0], one, seed, stream)
        for stream, (v, one) in enumerate(zip(weights, own, strict=True))
    ]
    not_portable = [
        path_of(v) for v, one in zip(weights, seeded, strict=True) if not is_describable(one)
    ]
    if not_portable:
        warnings.warn(
            f"The weights {shorten(not_portable)} have initializers of which keras_freeze has no "
            "portable version. They are drawn by them, and a `.freeze` file of the model will need "
            "include_frozen=True or a base.",
            stacklevel=3,
        )
    return seeded


def _with_seed(layer: Any, initializer: Any, seed: int, stream: int) -> Any:
    """Return an initializer with the same distribution that the seed determines, if possible."""
    version = portable_version(initializer, seed, stream)
    axes = kernel_axes(layer, initializer)
    if axes and isinstance(version, VarianceScaling):
        return VarianceScaling.from_config({**version.get_config(), **axes})
    if version is not None:
        return version
    # A custom one: as it is, but with a seed of this model if it takes one.
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if "seed" not in config:
        return initializer
    own_seed = int(np.random.SeedSequence([seed, stream]).generate_state(1)[0] >> 1)
    return type(initializer).from_config({**config, "seed": own_seed})


def _other_values(model: keras.Model, seed: int | None) -> list[tuple[Any, Any]]:
    """Return the initial values of biases and normalization, moving statistics included.

    Without a seed, initializers draw the random ones as they are.
    """
    values: list[tuple[Any, Any]] = []
    unknown = []
    for layer in _keras_private.all_layers(model):
        if not layer.trainable:
            continue
        for variable in _keras_private.own_variables(layer):
            if kind_of(variable) == WEIGHT:
                continue
            initializer = initializer_in(layer, attribute_of(layer, variable))
            if initializer is None:
                if variable.trainable:
                    unknown.append(path_of(variable))
                continue
            if seed is not None:
                stream = _OTHER_STREAMS + len(values)
                initializer = portable_version(initializer, seed, stream) or initializer
            value = initializer(tuple(variable.shape), dtype=variable.dtype)
            if path_of(variable).endswith("/bias") and getattr(layer, "unit_forget_bias", False):
                value = _with_forget_bias(value, layer)
            values.append((variable, value))
    if unknown:
        warnings.warn(
            f"The parameters {shorten(unknown)} keep their values: their layers do not keep the "
            "initializers that these were drawn from.",
            stacklevel=3,
        )
    return values


def _with_forget_bias(value: Any, layer: Any) -> Any:
    """Return the initial bias of an LSTM, with ones for the forget gate."""
    units = value.shape[0] // 4
    bias = np.array(backend.to_numpy(value))
    bias[units : 2 * units] = 1.0
    return bias


def _warn_of_loss(model: keras.Model, weights: Sequence[Any], optimizers: ModelOptimizers) -> None:
    """Warn if values are about to be lost that nothing reproduces."""
    steps = 0 if optimizers.outer is None else int(backend.to_numpy(optimizers.outer.iterations))
    if steps:
        what = f"This model has been trained for {steps} steps"
    elif any(one.mask is not None for one in optimizers.all):
        return  # it was just frozen, perhaps with zeros in place of its initial values
    else:
        moved = _moved(model, weights)
        if not moved:
            return
        what = (
            f"The weights {shorten(moved)} do not have the values that their layers' initializers "
            "give: they were loaded, set or trained"
        )
    warnings.warn(
        f"{what}. `reinitialize` replaces all weights, and their values are lost; it belongs "
        "before `freeze` and training. To save a model that is trained already, use "
        "`keras_freeze.save(..., include_frozen=True)` or `base=` instead.",
        stacklevel=3,
    )


def _moved(model: keras.Model, weights: Sequence[Any]) -> list[str]:
    """Return the weights whose values are known not to be those that their initializers draw."""
    still = starts_of(model, classify(weights))
    holders = initializers_of(model)
    return [
        path_of(variable)
        for position, variable in enumerate(weights)
        if position not in still and id(variable) in holders and _is_certain(*holders[id(variable)])
    ]


def _is_certain(layer: Any, attribute: str) -> bool:
    """Return whether it is known which values a layer's initializer has drawn."""
    seed = getattr(initializer_in(layer, attribute), "seed", None)
    # A generator that several layers share gives each of them other numbers.
    is_shared = isinstance(seed, keras.random.SeedGenerator)
    return not is_shared and source_of(layer, attribute) is not None
