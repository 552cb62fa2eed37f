"""What is done to a model: freeze it, look at its mask, prune it."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_freeze import backend, saliency, sparse_gradients
from keras_freeze.batches import Batch, Batches
from keras_freeze.kept_state import held_by, layers_kept_if_it_fails, values_kept
from keras_freeze.layer_initializers import starts_of
from keras_freeze.loss import (
    check_takes_logits,
    data_errors,
    hessian_gradient_products,
    loss_gradients,
    loss_scale,
)
from keras_freeze.mask import FreezeMask, MaskEntry
from keras_freeze.optimizer import FreezeOptimizer
from keras_freeze.parameters import WEIGHT, Parameter, classify, frozen_candidates, shorten
from keras_freeze.recording import Record
from keras_freeze.train_step import has_own_train_step, recorded_gradients

# The optimizers of models that are trained in a loop of the user's own, so that these models can be
# asked for their masks, too.
_loop_optimizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

MaskLike = FreezeMask | Mapping[str, Any] | Callable[[Any], Any]


def freeze(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    sample_weight: Any = None,
    steps: int = 1,
    batch_size: int | None = None,
    mask: MaskLike | None = None,
    overwrite: bool = False,
    loss: Any = None,
    optimizer: Any = None,
) -> FreezeMask:
    """Decides which weights of a model are trained, and hands this mask to its FreezeOptimizer.

    One forward and backward pass, in training mode, of the loss that `fit` minimises gives the
    saliency of each weight (equation 1, algorithm 1). The model is left as it was, moving
    statistics and random state included; with `frozen_weights="zero"` its frozen weights become
    zero. An optimizer that has run before starts anew but for its iterations and learning rate.

    A model with a `train_step` of its own runs this step, and the gradients that it hands to its
    FreezeOptimizers decide; everything is then put back. Several FreezeOptimizers get a mask each.

    Args:
        model: a compiled model whose optimizer is, or contains, one FreezeOptimizer.
        x, y, sample_weight: arrays, or a structure of arrays, that make up one batch; or `x` is a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or another iterable of the batches that
            `fit` takes, of which the first `steps` are used. `fit`'s `class_weight` is not known
            here: put it into `sample_weight`. A `train_step` gets a batch as `fit` hands it over.
        steps: how many batches of a dataset to use; their gradients are summed. Defaults to 1.
        batch_size: splits arrays into pieces of this size to save memory; the gradient is still
            that of one batch (but each piece has its own statistics in BatchNormalization).
        mask: a mask of one's own, where True is trained: a FreezeMask; a mapping from the paths of
            variables, biases too, to boolean arrays; or a function that is given each weight
            variable and returns a boolean array, or None to train all of it. What a mask leaves
            out is trained. `x` is then only used to build a model that is not built yet.
        overwrite: replaces a mask that exists already.
        loss, optimizer: for a model that is not compiled: one loss (a Keras loss, its name, or a
            function of `y_true` and `y_pred`), and the FreezeOptimizer or an optimizer around it.
            The model's own losses, such as regularisers, are added.

    Returns:
        The mask; of several FreezeOptimizers that of `model.optimizer`, or else of the first one.

    Raises:
        ValueError: without a FreezeOptimizer; with a mask already and no `overwrite`; for data
            that are empty, of a wrong shape, or whose loss or gradients are not finite; for a mask
            with wrong paths, shapes or dtypes. The model and its optimizer are then unchanged.
        TypeError: for arguments of a wrong type.

    Example:

    ```python
    mask = keras_freeze.freeze(model, x[:100], y[:100])
    keras_freeze.freeze(model, mask={"fc1/kernel": np.tri(784, 300, dtype=bool)}, overwrite=True)
    ```
    """
    _check_model(model)
    if mask is None and loss is None and has_own_train_step(model):
        batches = None if x is None else Batches(x, y, sample_weight, steps, batch_size)
        return _freeze_by_train_step(model, batches, optimizer, overwrite)
    outer = _required_optimizer(model, optimizer)
    if hasattr(outer, "optimizers") and not _freeze_optimizers(outer) and model.built:
        _build_optimizer(model, outer)  # a MultiOptimizer may know its parts only then
    freeze_optimizer = _freeze_optimizer_in(outer)
    _check_not_frozen([freeze_optimizer], overwrite)
    batches = None if x is None else Batches(x, y, sample_weight, steps, batch_size)
    _build_model(model, batches)
    variables = _variables_of(model, outer, freeze_optimizer)
    parameters = classify(variables, freeze_optimizer.exclude)
    if mask is None:
        batches = _required_batches(batches)
        scale = loss_scale(outer)
        with backend.outside_strategy():
            new_mask = _computed_mask(model, parameters, batches, freeze_optimizer, loss, scale)
    else:
        new_mask = _given_mask(mask, parameters)
    _set_mask(model, freeze_optimizer, new_mask, variables)
    _build_optimizer(model, outer)
    if optimizer is not None:
        _loop_optimizers[model] = optimizer
    _restrict_gradients(model)
    _trace_again(model)
    return new_mask


def _set_mask(
    model: keras.Model, optimizer: FreezeOptimizer, mask: FreezeMask, variables: list[Any]
) -> None:
    """Hands over a mask, with what its variables were drawn from."""
    parameters = classify(variables, optimizer.exclude)
    masked = [parameters[entry.position] for entry in mask.entries]
    optimizer.set_mask(mask, variables, starts_of(model, masked, optimizer.starts))


def _freeze_by_train_step(
    model: keras.Model, batches: Batches | None, optimizer: Any, overwrite: bool
) -> FreezeMask:
    """`freeze` for a model with a `train_step` of its own: each FreezeOptimizer gets a mask."""
    _check_not_frozen(_freeze_optimizers_held_by(model, optimizer), overwrite)
    outer = optimizer_of(model) if optimizer is None else optimizer
    if isinstance(outer, keras.optimizers.MultiOptimizer):
        _build_optimizer(model, outer)  # only its build says who updates what
    records = recorded_gradients(model, _required_batches(batches))
    masks = []
    for record in records:
        variables = _variables_of_record(model, outer, record)
        masks.append((record, variables, _recorded_mask(record, variables)))
    for record, variables, mask in masks:
        _set_mask(model, record.optimizer, mask, variables)
    if any(record.optimizer in _freeze_optimizers(outer) for record in records):
        _build_optimizer(model, outer)
    if optimizer is not None:
        _loop_optimizers[model] = optimizer
    _restrict_gradients(model)
    _trace_again(model)
    of_outer = [m for record, _, m in masks if record.optimizer in _freeze_optimizers(outer)]
    return (of_outer or [mask for _, _, mask in masks])[0]


def _freeze_optimizers_held_by(model: keras.Model, optimizer: Any) -> list[FreezeOptimizer]:
    """Every FreezeOptimizer that a training step of the model may use."""
    found = [one for one in held_by(model) if isinstance(one, FreezeOptimizer)]
    found += [one for one in _freeze_optimizers(optimizer) if one not in found]
    if not found:
        raise ValueError(
            "The model has no FreezeOptimizer, such as "
            "FreezeOptimizer(keras.optimizers.SGD(0.1)): compile it with one, or give it one as "
            f"an attribute. Received: model={model!r}"
        )
    return found


def _variables_of_record(model: keras.Model, outer: Any, record: Record) -> list[Any]:
    """What a FreezeOptimizer is built for: as Keras builds it, or else what it was handed."""
    if record.optimizer.built:
        return list(record.optimizer._trainable_variables)
    whole = model.trainable_variables
    is_of_model = record.optimizer in _freeze_optimizers(outer)
    if is_of_model and record.variables.keys() <= {id(v) for v in whole}:
        return list(whole)
    return list(record.variables.values())


def _recorded_mask(record: Record, variables: list[Any]) -> FreezeMask:
    optimizer = record.optimizer
    parameters = classify(variables, optimizer.exclude)
    handed = [p for p in parameters if id(p.variable) in record.gradients]
    candidates = frozen_candidates(handed)
    if saliency.as_grasp(optimizer.criterion) is not None:
        raise ValueError(
            'The criterion "grasp" needs the Hessian of the loss, which a model\'s own '
            "`train_step` does not tell: give `freeze` a `loss`, or use another criterion."
        )
    if optimizer.criterion == saliency.RANDOM:
        scores = _random_scores(candidates, optimizer.seed)
    else:
        scores = [
            backend.to_numpy(
                saliency.score(
                    optimizer.criterion, p.variable, record.gradients[id(p.variable)], p.path
                )
            )
            for p in candidates
        ]
    return _mask_of_scores(candidates, scores, optimizer)


def restrict_gradients(model: keras.Model) -> list[str]:
    """Computes weight gradients only where weights are trained, in layers where that is faster.

    `freeze` and `keras_freeze.load` do this. It is left to do where a frozen model came from
    somewhere else, such as `keras.models.load_model`, whose layers know nothing of the mask.

    While the model is trained with its FreezeOptimizer, kernels of Dense, EinsumDense, Conv1D,
    Conv2D and Conv3D then get `tf.IndexedSlices` with the gradient of the trained entries. All
    else is as before, the layers' outputs and what is saved or exported included.

    Args:
        model: a model with a FreezeOptimizer. Without a mask, or where the optimizer updates whole
            variables, gradients stay as they are.

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
    _freeze_optimizer_in(_required_optimizer(model))
    names = _restrict_gradients(model)
    _trace_again(model)
    return names


def _restrict_gradients(model: keras.Model) -> list[str]:
    freeze_optimizer = _optimizer_in_training(model)
    if freeze_optimizer is not None:
        return sparse_gradients.install(model, freeze_optimizer, _optimizer_in_training)
    sparse_gradients.restore(model)  # it is compiled with an optimizer that freezes nothing
    return []


def restore_gradients(model: keras.Model) -> None:
    """Takes away the restricted weight gradients of `freeze`; the model trains as before.

    For passes of one's own that differentiate a frozen model in training mode and need the
    gradients of frozen weights.

    Args:
        model: any model; nothing happens to one without restricted gradients.

    Raises:
        TypeError: if it is no model.

    Example:

    ```python
    keras_freeze.restore_gradients(model)
    ```
    """
    _check_model(model)
    sparse_gradients.restore(model, _optimizer_in_training(model))
    _trace_again(model)


def get_mask(model: keras.Model) -> FreezeMask | None:
    """The mask of a model's FreezeOptimizer, wherever it sits; None if there is none yet.

    Raises:
        ValueError: if there are several FreezeOptimizers.
        TypeError: if `model` is no model.

    Example:

    ```python
    keras_freeze.get_mask(model)["fc1/kernel"].sum()
    ```
    """
    _check_model(model)
    freeze_optimizer = freeze_optimizer_of(model)
    return None if freeze_optimizer is None else freeze_optimizer.mask


def optimizer_of(model: keras.Model) -> Any:
    """The optimizer that a model is compiled with, or that `freeze` was given; None if none."""
    compiled = getattr(model, "optimizer", None)
    return compiled if _freeze_optimizers(compiled) else _loop_optimizers.get(model, compiled)


def freeze_optimizer_of(model: keras.Model) -> FreezeOptimizer | None:
    """The FreezeOptimizer of a model, wherever it sits; None if there is none.

    Raises:
        ValueError: if there are several.
    """
    optimizer = optimizer_of(model)
    return _freeze_optimizer_in(optimizer) if _freeze_optimizers(optimizer) else None


def _optimizer_in_training(model: keras.Model) -> FreezeOptimizer | None:
    """The FreezeOptimizer that gets a model's gradients: of `fit`, or of a loop of one's own."""
    compiled = getattr(model, "optimizer", None)
    found = _freeze_optimizers(_loop_optimizers.get(model) if compiled is None else compiled)
    return found[0] if len(found) == 1 else None


def compute_saliency(
    model: keras.Model,
    x: Any,
    y: Any = None,
    criterion: str | saliency.Criterion = "snip",
    *,
    loss: Any = None,
) -> dict[str, np.ndarray]:
    """The saliency scores of all weights of a model's trainable layers, to look at.

    Args:
        model: a built model; compiled, unless `loss` is given.
        x, y: one batch of arrays, or a dataset whose first batch is used.
        criterion: as in FreezeOptimizer.
        loss: one loss, as in `freeze`, instead of the compiled one.

    Returns:
        Scores in float32 by the path of the variable, of its shape. Equation 1's for "snip".

    Raises:
        ValueError: as in `freeze`; or if two variables have the same path.

    Example:

    ```python
    scores = keras_freeze.compute_saliency(model, x[:100], y[:100])
    ```
    """
    _check_model(model)
    criterion = saliency.check_criterion(criterion)
    batches = Batches(x, y, None, 1, None)
    _build_model(model, batches)
    parameters = [p for p in classify(model.trainable_variables) if p.kind == WEIGHT]
    paths = [p.path for p in parameters]
    if len(set(paths)) < len(paths):
        raise ValueError(f"Several weights share a path: {shorten(sorted(paths))}.")
    scale = loss_scale(optimizer_of(model))
    with backend.outside_strategy():
        scores = _scores(model, parameters, batches, criterion, 0, loss, scale)
    return dict(zip(paths, scores, strict=True))


def prune(model: keras.Model) -> None:
    """Sets the frozen weights of a model to zero; they stay frozen.

    Raises:
        ValueError: if the model is not frozen.
    """
    freeze_optimizer = _freeze_optimizer_in(_required_optimizer(model))
    freeze_optimizer.zero_frozen_weights()


def _trace_again(model: keras.Model) -> None:
    """Replaces a train function that was traced for another mask, also while `fit` runs."""
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"Argument `model` must be a keras.Model. Received: model={model!r}")


def _required_optimizer(model: keras.Model, optimizer: Any = None) -> Any:
    _check_model(model)
    if optimizer is None:
        optimizer = optimizer_of(model)
    if optimizer is None:
        raise ValueError(
            "The model is not compiled: call model.compile(optimizer=FreezeOptimizer(...), "
            "loss=...) first, or give `freeze` an `optimizer` and a `loss`."
        )
    return optimizer


def _required_batches(batches: Batches | None) -> Batches:
    if batches is None:
        raise ValueError(
            "Argument `x` must be a batch of inputs or a dataset, or `mask` a mask. "
            "Received: x=None, mask=None"
        )
    return batches


def _check_not_frozen(optimizers: list[FreezeOptimizer], overwrite: bool) -> None:
    if not overwrite and any(one.mask is not None for one in optimizers):
        raise ValueError(
            "This model is frozen already, and freezing it again would choose other weights from "
            "trained ones. Pass overwrite=True to do so."
        )


def _freeze_optimizers(optimizer: Any) -> list[FreezeOptimizer]:
    if isinstance(optimizer, FreezeOptimizer):
        return [optimizer]
    inner = getattr(optimizer, "inner_optimizer", None)
    inner = [inner] if inner is not None else getattr(optimizer, "optimizers", [])
    return [found for one in inner for found in _freeze_optimizers(one)]


def _freeze_optimizer_in(optimizer: Any) -> FreezeOptimizer:
    found = _freeze_optimizers(optimizer)
    if len(found) != 1:
        raise ValueError(
            "The model must be compiled with one FreezeOptimizer, such as "
            "FreezeOptimizer(keras.optimizers.SGD(0.1)). "
            f"Received: {type(optimizer).__name__} with {len(found)} FreezeOptimizers in it."
        )
    return found[0]


def _variables_of(model: keras.Model, outer: Any, freeze_optimizer: FreezeOptimizer) -> list[Any]:
    """The variables that the FreezeOptimizer updates."""
    if _has_multi_optimizer(outer):
        _build_optimizer(model, outer)  # only its build says who updates what
        return list(freeze_optimizer._trainable_variables)
    if not model.trainable_variables:
        raise ValueError("The model has no trainable variables, so that nothing can be frozen.")
    return list(model.trainable_variables)


def _build_optimizer(model: keras.Model, optimizer: Any) -> None:
    if not optimizer.built:
        with backend.strategy_scope(optimizer):
            optimizer.build(model.trainable_variables)


def _has_multi_optimizer(outer: Any) -> bool:
    if isinstance(outer, FreezeOptimizer):
        return False
    if isinstance(outer, keras.optimizers.MultiOptimizer):
        return True
    return _has_multi_optimizer(outer.inner_optimizer)


def _build_model(model: keras.Model, batches: Batches | None) -> None:
    if model.built:
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


def _computed_mask(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Batches,
    optimizer: FreezeOptimizer,
    loss: Any,
    scale: float,
) -> FreezeMask:
    candidates = frozen_candidates(parameters)
    scores = _scores(model, candidates, batches, optimizer.criterion, optimizer.seed, loss, scale)
    return _mask_of_scores(candidates, scores, optimizer)


def _mask_of_scores(
    candidates: list[Parameter], scores: list[np.ndarray], optimizer: FreezeOptimizer
) -> FreezeMask:
    if not any(array.any() for array in scores):
        saliency.warn_of_zero_scores(stacklevel=4)
    return FreezeMask.from_scores(
        scores,
        optimizer.freeze_rate,
        seed=optimizer.seed,
        positions=[p.position for p in candidates],
        paths=[p.path for p in candidates],
        variables=[p.variable for p in candidates],
    )


def _random_scores(parameters: list[Parameter], seed: int) -> list[np.ndarray]:
    return [saliency.random_scores(tuple(p.variable.shape), seed, p.position) for p in parameters]


def _scores(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Batches,
    criterion: str | saliency.Criterion,
    seed: int,
    loss: Any,
    scale: float,
) -> list[np.ndarray]:
    grasp = saliency.as_grasp(criterion)
    if grasp is not None:
        return _grasp_scores(model, parameters, batches, grasp, loss, scale)
    variables = [p.variable for p in parameters]
    gradients = loss_gradients(model, variables, batches, loss, scale)
    if criterion == saliency.RANDOM:
        return _random_scores(parameters, seed)
    gradients.reverse()  # so that each is let go once its scores are there
    return [
        backend.to_numpy(saliency.score(criterion, p.variable, gradients.pop(), p.path))
        for p in parameters
    ]


def _grasp_scores(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Iterable[Batch],
    grasp: saliency.GraSP,
    loss: Any,
    scale: float,
) -> list[np.ndarray]:
    if grasp.temperature != 1.0:
        check_takes_logits(model, loss, grasp.temperature)
    if grasp.samples_per_class is not None:
        width = _output_width(model, next(iter(batches))[0])
        batches = saliency.first_of_each_class(batches, grasp.samples_per_class, width)
    variables = [p.variable for p in parameters]
    products = hessian_gradient_products(model, variables, batches, loss, scale, grasp.temperature)
    return [
        backend.to_numpy(saliency.score(saliency.grasp, p.variable, product, p.path))
        for p, product in zip(parameters, products, strict=True)
    ]


def _output_width(model: keras.Model, x: Any) -> int | None:
    """The last dimension of a model's output; None of several outputs."""
    inputs = tree.map_structure(lambda part: keras.KerasTensor(part.shape, part.dtype), x)
    outputs = model.compute_output_spec(inputs)
    return None if tree.is_nested(outputs) else outputs.shape[-1]


def _given_mask(mask: Any, parameters: list[Parameter]) -> FreezeMask:
    """A FreezeMask over all weights, and what else was named, from a mask of the user's own."""
    if isinstance(mask, FreezeMask):
        chosen = {entry.position: (entry.path, entry.trained) for entry in mask.entries}
    elif isinstance(mask, Mapping):
        if not mask:
            raise ValueError(
                "Argument `mask` must name the variables that are trained in part. Received: an "
                "empty mapping; to train everything, use freeze_rate=0."
            )
        chosen = {_position_of(path, parameters): (path, array) for path, array in mask.items()}
        if len(chosen) < len(mask):
            raise ValueError(
                "Argument `mask` names a variable twice. "
                f"Received: mask with the paths {shorten([str(path) for path in mask])}"
            )
    elif callable(mask):
        candidates = [p for p in parameters if p.is_frozen_candidate]
        returned = {p.position: (p.path, mask(p.variable)) for p in candidates}
        chosen = {position: item for position, item in returned.items() if item[1] is not None}
    else:
        raise TypeError(
            "Argument `mask` must be a FreezeMask, a mapping from paths to boolean arrays, or a "
            f"function of a variable. Received: mask={mask!r} of type {type(mask)}"
        )
    entries = []
    for p in parameters:
        shape = tuple(p.variable.shape)
        if p.position in chosen:
            array = _check_array(*chosen.pop(p.position), p)
            entries.append(MaskEntry(p.position, p.path, array, p.is_frozen_candidate))
        elif p.is_frozen_candidate:
            entries.append(MaskEntry(p.position, p.path, np.ones(shape, bool)))
    if chosen:
        raise ValueError(
            "Argument `mask` covers variables that this model does not have: "
            f"{shorten([path for path, _ in chosen.values()])}. "
            f"Its trainable variables are {shorten([p.path for p in parameters])}."
        )
    return FreezeMask(entries, [parameters[e.position].variable for e in entries])


def _position_of(path: Any, parameters: list[Parameter]) -> int:
    found = [p.position for p in parameters if p.path == path]
    if not found and isinstance(path, str):
        found = [p.position for p in parameters if p.path.endswith("/" + path)]
    if len(found) != 1:
        problem = "names several variables" if found else "names no trainable variable"
        raise ValueError(
            f"Argument `mask`: the path {path!r} {problem}. The trainable variables are "
            f"{shorten([p.path for p in parameters], limit=40)}. Use a function of a variable "
            "where paths are ambiguous."
        )
    return found[0]


def _check_array(path: str, array: Any, parameter: Parameter) -> np.ndarray:
    array = backend.to_numpy(array) if keras.ops.is_tensor(array) else np.asarray(array)
    if array.dtype != bool:
        raise ValueError(
            f"Argument `mask`: the array for {path!r} must be boolean, True where an entry is "
            f"trained. Received: dtype {array.dtype}."
        )
    if array.shape != tuple(parameter.variable.shape):
        raise ValueError(
            f"Argument `mask`: the array for {path!r} must have the variable's shape "
            f"{tuple(parameter.variable.shape)}. Received: shape {array.shape}."
        )
    if parameter.excluded and not array.all():
        raise ValueError(
            f"Argument `mask` freezes entries of {path!r}, which the optimizer's `exclude` says "
            "are always trained."
        )
    return array
