"""Draw the weights of a model anew, from portable seeds (the paper's algorithm S1)."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend, initializers
from keras_freeze._utils.threads import check_not_trained_elsewhere
from keras_freeze.initializers.of_layers import (
    attribute_of,
    initializer_in,
    initializers_of,
    kernel_axes,
    source_of,
    starts_of,
)
from keras_freeze.initializers.portable import VarianceScaling, portable_version
from keras_freeze.model_state import (
    check_model,
    freeze_optimizers_of,
    optimizer_of,
    optimizers_in_force,
    trace_again,
)
from keras_freeze.optimizer.arguments import check_seed
from keras_freeze.parameters import WEIGHT, classify, kind_of, path_of, shorten
from keras_freeze.restricted import layers as sparse_gradients
from keras_freeze.restricted.restriction import restrict_where_trained

# Other parameters than weights, a random bias for instance, have streams from here on.
_OTHER_STREAMS = 1 << 31

_Value = tuple[Any, Any]
"""A variable, and what it is about to be set to."""


def reinitialize(model: keras.Model, initializer: Any = None, seed: int = 0) -> None:
    """Draws all weights of a model's trainable layers anew and keeps its mask (algorithm S1).

    Trained weights are drawn anew, too; biases and normalisation, moving statistics included, go
    back to the values they start from, and the FreezeOptimizer starts anew. Before `freeze`, this
    gives any model weights that one portable seed reproduces.

    Warns where values are lost that were trained or loaded, and where something cannot be drawn
    from a portable seed.

    Args:
        model: a built model.
        initializer: None draws each weight from its layer's own distribution. Otherwise one for all
            weights: "xavier_normal", "kaiming_uniform" or "pm_sigma", which scale the variance;
            "standard_normal" for N(0, 1), "constant_sigma" for the layer's sigma everywhere, or
            "ones", with which the paper's networks do not train; a name that Keras has, such as
            "he_normal", in its portable version; or a Keras initializer as it is.
        seed: one 32-bit number for the whole model; each weight has its own stream of it.

    Raises:
        ValueError: for a model that is not built, an initializer or seed that do not exist, or
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
    check_seed(seed)
    weights = [v for v in model.trainable_variables if kind_of(v) == WEIGHT]
    if not weights:
        raise ValueError("Argument `model` has no trainable weights; is it built?")
    holders = initializers_of(model)
    if initializer is None:
        drawn = _own_initializers(weights, holders, seed)
    else:
        drawn = [_chosen(initializer, seed, stream) for stream in range(len(weights))]
    values = [
        (v, draw(tuple(v.shape), dtype=v.dtype)) for v, draw in zip(weights, drawn, strict=True)
    ]
    values += _other_values(model, seed if initializer is None else None)
    _warn_of_loss(model, weights)
    was_restricted = any(map(sparse_gradients.is_restricted, _keras_private.all_layers(model)))
    for variable, value in values:
        variable.assign(value)
    for variable, draw in zip(weights, drawn, strict=True):
        if id(variable) in holders:
            setattr(*holders[id(variable)], draw)  # `save` looks there for the seed
    _start_optimizers_anew(model)
    if was_restricted:
        restrict_where_trained(model)
    if freeze_optimizers_of(model):
        trace_again(model)


def _start_optimizers_anew(model: keras.Model) -> None:
    for freeze_optimizer in optimizers_in_force(model):
        freeze_optimizer.reset()
        freeze_optimizer.remember_starts(model)
        if freeze_optimizer.frozen_weights == "zero" and freeze_optimizer.mask is not None:
            freeze_optimizer.zero_frozen_weights()


def _chosen(initializer: Any, seed: int, stream: int) -> Any:
    """One initializer for all weights, by name or as it is."""
    if isinstance(initializer, str) and initializer not in initializers.INITIALIZERS:
        try:
            of_keras = keras.initializers.get(initializer)
        except ValueError:
            of_keras = None  # `get` lists the names that there are
        if of_keras is not None:
            return portable_version(of_keras, seed, stream) or of_keras
    return initializers.get(initializer, seed, stream)


def _own_initializers(weights: Sequence[Any], holders: dict[int, Any], seed: int) -> list[Any]:
    """For each weight, an initializer with its layer's distribution."""
    found = [
        (None, None)
        if id(v) not in holders
        else (holders[id(v)][0], initializer_in(*holders[id(v)]))
        for v in weights
    ]
    unknown = [path_of(v) for v, (_, own) in zip(weights, found, strict=True) if own is None]
    if unknown:
        raise ValueError(
            f"It is not known what the weights {shorten(unknown)} are drawn from: their layers do "
            "not keep their initializers. Let a layer of your own keep that of a weight `kernel` "
            "as its attribute `kernel_initializer`, or name one distribution for all weights, such "
            "as reinitialize(model, 'glorot_uniform'). Received: initializer=None"
        )
    drawn, others = [], []
    for stream, (variable, (layer, own)) in enumerate(zip(weights, found, strict=True)):
        version = _with_seed(layer, own, seed, stream)
        drawn.append(version)
        if not _is_reproducible(version):
            others.append(path_of(variable))
    if others:
        warnings.warn(
            f"The weights {shorten(others)} have initializers of which keras_freeze has no "
            "portable version. They are drawn by them, and a `.freeze` file of the model will need "
            "include_frozen=True or a base.",
            stacklevel=3,
        )
    return drawn


def _with_seed(layer: Any, initializer: Any, seed: int, stream: int) -> Any:
    """An initializer with the same distribution that the seed determines, if there is one."""
    version = portable_version(initializer, seed, stream)
    axes = kernel_axes(layer, initializer)
    if axes and isinstance(version, VarianceScaling):
        return VarianceScaling.from_config({**version.get_config(), **axes})
    if version is not None:
        return version
    # One of the user's own: as it is, but with a seed of this model if it takes one.
    config = initializer.get_config() if hasattr(initializer, "get_config") else {}
    if "seed" not in config:
        return initializer
    own_seed = int(np.random.SeedSequence([seed, stream]).generate_state(1)[0] >> 1)
    return type(initializer).from_config({**config, "seed": own_seed})


def _is_reproducible(initializer: Any) -> bool:
    is_ours = isinstance(initializer, initializers.SeededInitializer)
    return is_ours or type(initializer) in _WITHOUT_CHANCE


_WITHOUT_CHANCE = (
    initializers.ConstantSigma,
    keras.initializers.Constant,
    keras.initializers.Identity,
    keras.initializers.Ones,
    keras.initializers.STFT,
    keras.initializers.Zeros,
)


def _other_values(model: keras.Model, seed: int | None) -> list[_Value]:
    """What biases and normalisation, and their statistics, start from.

    Args:
        model: the model.
        seed: what random ones are drawn from; None leaves that to their initializers.
    """
    values: list[_Value] = []
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
    """The bias of an LSTM, which starts with ones for the gate that forgets."""
    units = value.shape[0] // 4
    bias = np.array(backend.to_numpy(value))
    bias[units : 2 * units] = 1.0
    return bias


def _warn_of_loss(model: keras.Model, weights: Sequence[Any]) -> None:
    """Says so where values are about to be lost that nothing gives again."""
    optimizer = optimizer_of(model)
    steps = 0 if optimizer is None else int(backend.to_numpy(optimizer.iterations))
    if steps:
        what = f"This model has been trained for {steps} steps"
    elif any(one.mask is not None for one in freeze_optimizers_of(model)):
        return  # it was frozen a moment ago, perhaps with zeros in place of its start
    else:
        moved = _moved(model, weights)
        if not moved:
            return
        what = (
            f"The weights {shorten(moved)} do not have the values that their layers' initializers "
            "give: they were loaded, set or trained"
        )
    warnings.warn(
        f"{what}. `reinitialize` draws all weights anew, and what they were is lost; it belongs "
        "before `freeze` and training. To save a model that is trained already, use "
        "`keras_freeze.save(..., include_frozen=True)` or `base=` instead.",
        stacklevel=3,
    )


def _moved(model: keras.Model, weights: Sequence[Any]) -> list[str]:
    """The weights that their initializers are known to give other values than they have."""
    still = starts_of(model, classify(weights))
    holders = initializers_of(model)
    return [
        path_of(variable)
        for position, variable in enumerate(weights)
        if position not in still
        and id(variable) in holders
        and source_of(*holders[id(variable)]) is not None
        # A generator that several layers share gives each of them other numbers.
        and not isinstance(
            getattr(initializer_in(*holders[id(variable)]), "seed", None),
            keras.random.SeedGenerator,
        )
    ]
