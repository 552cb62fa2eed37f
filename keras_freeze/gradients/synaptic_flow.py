"""The gradients of the sum R of a network's outputs that SynFlow needs: no data, no signs."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_freeze import _keras_private, backend
from keras_freeze.gradients.data import Batch
from keras_freeze.gradients.loss import data_errors, takes_training
from keras_freeze.gradients.preserve import state_kept, variables_kept
from keras_freeze.gradients.processes import failing_together, sum_of_processes
from keras_freeze.parameters import path_of

_LARGEST_EXPONENT = 60  # of R, for which the gradients are not scaled

_LEAST_FLOW = 1e-6  # through the weights, as a share of R; that of rounding errors is less

_TO_PROBABILITIES = (
    keras.activations.softmax,
    keras.activations.log_softmax,
    keras.activations.sigmoid,
    keras.activations.log_sigmoid,
    keras.activations.hard_sigmoid,
)

_NO_IDS = (
    'The criterion "synflow" takes an input of ones, and of token ids or categories that would '
    "score the rows of one of them alone: use another criterion; or pass images as floats. "
)


def synaptic_flow_gradients(
    model: keras.Model,
    variables: Sequence[Any],
    batches: Iterable[Batch] | None,
    is_whole: bool = True,
) -> list[Any]:
    """Compute the float32 gradients of R over variables, at the present values of the model.

    R is computed in double precision, and multiplied by one power of two where the gradients
    would not fit in float32. Where the last layer makes probabilities of logits, R is the sum of
    these. The model is left as it was. Several processes get the sum of what each computes, so that
    their scores have the same bits.

    Args:
        model: a built model. Its parameters and statistics count with their absolute values.
        variables: those whose gradients are wanted; None where R does not depend on one.
        batches: their first example gives shapes where the model does not tell them.
        is_whole: whether nothing has been pruned yet, so that R must depend on the variables.

    Raises:
        ValueError: for inputs whose shape is not known, or that are not real numbers; where R or a
            gradient is not finite; and where R does not depend on the variables, as for
            probabilities that the model computes in another way than by its last layer.
    """
    ones = ones_for(model, batches)
    arguments = {"training": False} if takes_training(model.call) else {}

    def total(of_output: Callable[[Any], Any]) -> Any:
        # Without the gradients, for which variables must not be cast.
        with _in_double_precision(model):
            outputs = [o for o in tree.flatten(model(ones, **arguments)) if _is_float(o)]
            return sum(ops.sum(of_output(ops.cast(output, "float64"))) for output in outputs)

    with failing_together(variables):
        with (
            state_kept(model),
            _without_signs(model),
            _without_probabilities(model),
            backend.double_precision(),
        ):
            with data_errors():
                size = float(backend.to_numpy(total(ops.abs)))
            _check_size(size)
            flow = functools.partial(total, ops.convert_to_tensor)
            _, gradients = backend.gradients(flow, variables, _scale(size))
        gradients = [None if g is None else ops.cast(g, "float32") for g in gradients]
        _check_gradients(gradients, variables)
        if is_whole:
            _check_flow(gradients, variables, size * _scale(size))
    return sum_of_processes(gradients, variables)


def _check_size(size: float) -> None:
    if not np.isfinite(size):
        raise ValueError(
            'The criterion "synflow" cannot score this model: the sum of its outputs for an input '
            f"of ones is {size}. It is beyond double precision, or beyond the precision of a layer "
            "that casts to another dtype; or weights are not finite."
        )


def _check_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    for variable, gradient in zip(variables, gradients, strict=True):
        if gradient is not None and not bool(ops.all(ops.isfinite(gradient))):
            raise ValueError(
                'The criterion "synflow" cannot score this model: gradients of the sum of its '
                f"outputs are not finite, or beyond float32, for {path_of(variable)!r}."
            )


def _check_flow(gradients: Sequence[Any], variables: Sequence[Any], size: float) -> None:
    """Check that R, of this size, depends on variables that are not zero."""
    values = [ops.cast(backend.read(v), "float32") for v in variables]
    if size == 0 or not any(bool(ops.any(value)) for value in values):
        return
    flows = [
        float(backend.to_numpy(ops.sum(ops.abs(ops.multiply(value, gradient)))))
        for value, gradient in zip(values, gradients, strict=True)
        if gradient is not None
    ]
    if max(flows, default=0.0) < _LEAST_FLOW * size:
        raise ValueError(
            'The criterion "synflow" sums the outputs of the model, and this sum does not depend '
            "on its weights, as that of probabilities, or of activations that are saturated. Let "
            "the model give logits and the loss take them (from_logits=True), or use another "
            f"criterion. Received: a model of which {max(flows, default=0.0):.3g} of {size:.3g} "
            "flows through the weights"
        )


def _scale(size: float) -> float:
    """Return the power of two that takes R to about 1, and 1 where it is near enough."""
    exponent = np.frexp(size)[1] if size else 0
    return 1.0 if abs(exponent) <= _LARGEST_EXPONENT else float(np.ldexp(1.0, -exponent))


@contextlib.contextmanager
def _in_double_precision(model: keras.Model) -> Iterator[None]:
    """Let layers compute in float64, whatever the dtypes of their variables.

    Quantized layers and those of integers and strings compute as ever.
    """
    layers = [
        layer
        for layer in _keras_private.all_layers(model)
        if layer.quantization_mode is None and keras.backend.is_float_dtype(layer.compute_dtype)
    ]
    policies = [layer.dtype_policy for layer in layers]
    try:
        for layer in layers:
            _keras_private.set_dtype_policy(layer, keras.DTypePolicy("float64"))
        with _keras_private.autocast_to_float64():
            yield
    finally:
        for layer, policy in zip(layers, policies, strict=True):
            _keras_private.set_dtype_policy(layer, policy)


def probability_layers(model: keras.Model) -> list[Any]:
    """Return for each declared output the layer that makes probabilities of logits; None: none."""
    outputs = getattr(model, "outputs", None) or []
    return [_probability_layer(output) for output in tree.flatten(outputs)]


def _probability_layer(output: Any) -> Any:
    layer = _keras_private.creating_layer(output)
    inner = layer.outputs if isinstance(layer, keras.Model) else []
    if len(inner) == 1:
        return _probability_layer(inner[0])
    activation = vars(layer).get("activation")
    is_one = any(activation is one for one in _TO_PROBABILITIES)
    return layer if is_one or isinstance(layer, keras.layers.Softmax) else None


@contextlib.contextmanager
def _without_probabilities(model: keras.Model) -> Iterator[None]:
    """Let layers at the end of a model that make probabilities of logits pass these on."""
    layers = {id(layer): layer for layer in probability_layers(model) if layer is not None}
    kept = []
    for layer in layers.values():
        name = "call" if isinstance(layer, keras.layers.Softmax) else "activation"
        kept.append((vars(layer), name, vars(layer).get(name)))
        vars(layer)[name] = _identity
    try:
        yield
    finally:
        for attributes, name, before in kept:
            if before is None:
                del attributes[name]
            else:
                attributes[name] = before


def _identity(inputs: Any, mask: Any = None) -> Any:
    return inputs


@contextlib.contextmanager
def _without_signs(model: keras.Model) -> Iterator[None]:
    """Replace all parameters and statistics of a model by their absolute values."""
    variables = [v for v in model.weights if _is_float(v)]
    with variables_kept(variables):
        for variable in variables:
            variable.assign(ops.abs(backend.read(variable)))
        yield


def _is_float(value: Any) -> bool:
    dtype = keras.backend.standardize_dtype(value.dtype)
    return bool(keras.backend.is_float_dtype(dtype))


def ones_for(model: keras.Model, batches: Iterable[Batch] | None) -> Any:
    """Return one example of ones for a model, in the structure that it is called with.

    Raises:
        ValueError: if neither the model nor data tell the shapes, or if inputs are token ids.
    """
    declared = tree.flatten(getattr(model, "inputs", None) or [])
    _check_no_ids(model, declared)
    if batches is not None:
        example = next(iter(batches))[0]
        if not declared:  # where inputs are declared as floats, integers are cast, as of images
            _check_floats(tree.flatten(example))
    elif declared:
        example = declared[0] if len(declared) == 1 else model.input
    else:
        raise ValueError(
            'The criterion "synflow" takes an input of ones, and this model does not tell the '
            f"shape of its inputs: pass one batch as `x`. Received: model={model!r}, x=None"
        )
    shapes = [tuple(one.shape)[1:] for one in tree.flatten(example)]
    if any(size is None for shape in shapes for size in shape):
        raise ValueError(
            'The criterion "synflow" takes an input of ones, and this model takes inputs of any '
            f"size: pass one batch as `x`. Received: inputs of the shapes {shapes}, x=None"
        )
    return tree.pack_sequence_as(example, [ops.ones((1, *shape)) for shape in shapes])


def _check_no_ids(model: keras.Model, declared: Sequence[Any]) -> None:
    """Check that no declared input is one of integers or goes into an Embedding."""
    _check_floats(declared)
    for layer in _keras_private.all_layers(model):
        if not isinstance(layer, keras.layers.Embedding):
            continue
        try:
            ids = layer.input
        except (AttributeError, ValueError):  # the layer is called in another way
            continue
        if any(ids is one for one in declared):
            raise ValueError(_NO_IDS + f"Received: inputs of the Embedding {layer.name!r}")


def _check_floats(inputs: Sequence[Any]) -> None:
    """Check that inputs are of float dtypes."""
    for one in inputs:
        if not _is_float(one):
            raise ValueError(_NO_IDS + f"Received: an input of dtype {one.dtype}")
