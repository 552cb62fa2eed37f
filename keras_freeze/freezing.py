"""What is done to a model: freeze it, look at its mask, prune it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_freeze import backend, criteria
from keras_freeze._utils.threads import check_not_trained_elsewhere
from keras_freeze._utils.validation import check_bool
from keras_freeze.criteria.scoring import _random_scores, _scores
from keras_freeze.gradients.data import Batches
from keras_freeze.gradients.loss import (
    loss_scale,
)
from keras_freeze.gradients.recording import Record
from keras_freeze.gradients.train_step import has_own_train_step, recorded_gradients
from keras_freeze.initializers.of_layers import starts_of
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.model_state import (
    build_model,
    check_model,
    check_trains,
    freeze_optimizer_in,
    freeze_optimizers_in,
    freeze_optimizers_of,
    get_mask,
    is_built,
    optimizer_of,
    remember_loop,
    required_optimizer,
    trace_again,
)
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.inner_optimizer import is_one_of_several
from keras_freeze.parameters import (
    Parameter,
    classify,
    frozen_candidates,
    shorten,
    warn_of_unknown,
)
from keras_freeze.restricted.restriction import restrict_where_trained
from keras_freeze.user_masks import MaskLike, mask_from


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
    freeze_rate: float | None = None,
) -> FreezeMask:
    """Decides which weights of a model are trained, and hands this mask to its FreezeOptimizer.

    One forward and backward pass, in training mode, of the loss that `fit` minimises gives the
    saliency of each weight (equation 1, algorithm 1). The model is left as it was, moving
    statistics and random state included; with `frozen_weights="zero"` its frozen weights become
    zero. An optimizer that has run before starts anew but for its iterations and learning rate.

    A model with a `train_step` of its own runs this step, and the gradients that it hands to its
    FreezeOptimizers decide; everything is then put back. Several FreezeOptimizers get a mask each.

    `model.summary()` goes on to count all weights as trainable: `report` counts what is trained.

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
            variables, biases too, or the names of layers with one weight, to boolean arrays; or a
            function that is given each weight variable, and each one of a name that no layer of
            Keras uses, and returns a boolean array, or None to train all of it. What a mask leaves
            out is trained. `x` is then only used to build a model that is not built yet.
        overwrite: replaces a mask that exists already.
        loss, optimizer: for a model that is not compiled: one loss (a Keras loss, its name, or a
            function of `y_true` and `y_pred`), and the FreezeOptimizer or an optimizer around it.
            The model's own losses, such as regularisers, are added.
        freeze_rate: another rate for the model's FreezeOptimizers, from now on. None: theirs.

    Returns:
        The mask; of several FreezeOptimizers all their masks in one, as of `get_mask`.

    Raises:
        ValueError: without a FreezeOptimizer; with a mask already and no `overwrite`; for data
            that are empty, of a wrong shape, or whose loss or gradients are not finite; for a mask
            with wrong paths, shapes or dtypes; for data where several processes train together,
            each of which would choose other weights. The model and its optimizer are then
            unchanged.
        TypeError: for arguments of a wrong type.
        RuntimeError: while another thread trains the model; it is then unchanged, too.

    Warns where a criterion decides and much of the model has names that no layer of Keras gives to
    weights: all of that is trained.

    Example:

    ```python
    mask = keras_freeze.freeze(model, x[:100], y[:100])
    keras_freeze.freeze(model, mask={"fc1/kernel": np.tri(784, 300, dtype=bool)}, overwrite=True)
    ```
    """
    check_model(model)
    check_bool("overwrite", overwrite)
    check_not_trained_elsewhere(model)
    batches = None if x is None else Batches(x, y, sample_weight, steps, batch_size)
    if mask is None:
        criteria.check_one_process()
    with contextlib.ExitStack() as scopes:
        if overwrite:
            scopes.enter_context(frozen_variables.overwriting())
        if freeze_rate is not None:
            scopes.enter_context(_at_rate(model, optimizer, mask, freeze_rate))
        if mask is None and loss is None and has_own_train_step(model):
            return _freeze_by_train_step(model, batches, optimizer)
        optimizers = [] if optimizer is not None else freeze_optimizers_of(model)
        own_names = [o for o in optimizers if o not in freeze_optimizers_in(optimizer_of(model))]
        if mask is not None and own_names:
            return _freeze_by_parts(model, optimizers, mask)
        return _freeze(model, batches, mask, loss, optimizer)


def unfreeze(model: keras.Model) -> None:
    """Trains all weights of a model from now on; they keep the values that they have.

    The FreezeOptimizer stays, with a mask that trains everything and with fresh moments. What was
    frozen can be frozen again by `freeze(model, ..., overwrite=True)`, and starts from what it has
    become until then.

    Args:
        model: a frozen model.

    Raises:
        ValueError: if it is not frozen, or has no FreezeOptimizer of its own.
        RuntimeError: while another thread trains the model.

    Example:

    ```python
    keras_freeze.unfreeze(model)
    model.fit(x, y)
    ```
    """
    check_model(model)
    check_not_trained_elsewhere(model)
    if get_mask(model) is None:
        raise ValueError(f"The model is not frozen. Received: model={model!r}")
    freeze(model, mask=lambda variable: None, overwrite=True)


@contextlib.contextmanager
def _at_rate(
    model: keras.Model, optimizer: Any, mask: MaskLike | None, freeze_rate: float
) -> Iterator[None]:
    """Gives a model's FreezeOptimizers another rate, which they keep unless freezing fails."""
    rate = check_freeze_rate(freeze_rate)
    if mask is not None:
        raise ValueError(
            "Arguments `freeze_rate` and `mask` exclude each other: a mask has its own rate. "
            f"Received: freeze_rate={freeze_rate!r} and a mask"
        )
    optimizers = [*freeze_optimizers_of(model), *freeze_optimizers_in(optimizer)]
    before = [(one, one.freeze_rate) for one in optimizers]
    try:
        for one in optimizers:
            one.__dict__["freeze_rate"] = rate  # past the check that refuses to change it
        yield
    except BaseException:
        for one, rate_before in before:
            one.__dict__["freeze_rate"] = rate_before
        raise


def _freeze(
    model: keras.Model,
    batches: Batches | None,
    mask: MaskLike | None,
    loss: Any,
    optimizer: Any,
) -> FreezeMask:
    """`freeze` for a model with one FreezeOptimizer, by the loss that it is compiled with."""
    outer = required_optimizer(model, optimizer)
    if hasattr(outer, "optimizers") and not freeze_optimizers_in(outer) and is_built(model):
        _build_optimizer(model, outer)  # a MultiOptimizer may know its parts only then
    freeze_optimizer = freeze_optimizer_in(outer)
    _check_not_frozen(model, [freeze_optimizer], model.trainable_variables, mask)
    build_model(model, batches)
    variables = _variables_of(model, outer, freeze_optimizer)
    parameters = classify(variables, freeze_optimizer.exclude)
    if mask is None:
        batches = _required_batches(batches)
        scale = loss_scale(outer)
        with backend.outside_strategy():
            new_mask = _computed_mask(model, parameters, batches, freeze_optimizer, loss, scale)
    else:
        new_mask = mask_from(mask, parameters)
    _set_mask(model, freeze_optimizer, new_mask, variables)
    _build_optimizer(model, outer)
    if optimizer is not None:
        remember_loop(model, optimizer)
    restrict_where_trained(model)
    trace_again(model)
    return new_mask


def _set_mask(
    model: keras.Model, optimizer: FreezeOptimizer, mask: FreezeMask, variables: list[Any]
) -> None:
    """Hands over a mask, with what its variables were drawn from."""
    check_not_trained_elsewhere(model)  # again: the passes over the data may have taken long
    parameters = classify(variables, optimizer.exclude)
    masked = [parameters[entry.position] for entry in mask.entries]
    frozen_variables.remember_model(optimizer, model)
    optimizer.set_mask(mask, variables, starts_of(model, masked, optimizer.starts))


def _freeze_by_train_step(
    model: keras.Model, batches: Batches | None, optimizer: Any
) -> FreezeMask:
    """`freeze` for a model with a `train_step` of its own: each FreezeOptimizer gets a mask."""
    outer = optimizer_of(model) if optimizer is None else optimizer
    optimizers = [*freeze_optimizers_of(model), *freeze_optimizers_in(optimizer)]
    if not optimizers:
        raise ValueError(
            "The model has no FreezeOptimizer, such as "
            "FreezeOptimizer(keras.optimizers.SGD(0.1)): compile it with one, or give it one as "
            f"an attribute. Received: model={model!r}"
        )
    _check_not_frozen(model, optimizers, (), None)
    if isinstance(outer, keras.optimizers.MultiOptimizer):
        _build_optimizer(model, outer)  # only its build says who updates what
    masks = []
    for record in recorded_gradients(model, _required_batches(batches)):
        _check_not_frozen(model, [record.optimizer], list(record.variables.values()), None)
        variables = _variables_of_record(model, outer, record)
        masks.append((record.optimizer, variables, _recorded_mask(record, variables)))
    for freeze_optimizer, variables, mask in masks:
        _set_mask(model, freeze_optimizer, mask, variables)
    if any(freeze_optimizer in freeze_optimizers_in(outer) for freeze_optimizer, _, _ in masks):
        _build_optimizer(model, outer)
    if optimizer is not None:
        remember_loop(model, optimizer)
    restrict_where_trained(model)
    trace_again(model)
    whole = get_mask(model)
    return masks[0][2] if whole is None else whole


def _variables_of_record(model: keras.Model, outer: Any, record: Record) -> list[Any]:
    """What a FreezeOptimizer is built for: as Keras builds it, or else what it was handed."""
    if record.optimizer.built:
        return list(record.optimizer.built_variables)
    whole = model.trainable_variables
    is_of_model = record.optimizer in freeze_optimizers_in(outer)
    if is_of_model and record.variables.keys() <= {id(v) for v in whole}:
        return list(whole)
    return list(record.variables.values())


def _recorded_mask(record: Record, variables: list[Any]) -> FreezeMask:
    optimizer = record.optimizer
    parameters = classify(variables, optimizer.exclude)
    handed = [p for p in parameters if id(p.variable) in record.gradients]
    candidates = frozen_candidates(handed)
    _warn_of_unknown(handed, optimizer)
    if criteria.as_grasp(optimizer.criterion) is not None:
        raise ValueError(
            'The criterion "grasp" needs the Hessian of the loss, which a model\'s own '
            "`train_step` does not tell: give `freeze` a `loss`, or use another criterion."
        )
    if optimizer.criterion == criteria.RANDOM:
        scores = _random_scores(candidates, optimizer.seed)
    else:
        scores = [
            backend.to_numpy(
                criteria.score(
                    optimizer.criterion, p.variable, record.gradients[id(p.variable)], p.path
                )
            )
            for p in candidates
        ]
    return _mask_of_scores(candidates, scores, optimizer)


def _freeze_by_parts(
    model: keras.Model, optimizers: list[FreezeOptimizer], mask: MaskLike
) -> FreezeMask:
    """Hands each of a model's FreezeOptimizers the part of a mask that is about its variables."""
    for optimizer in optimizers:
        if not optimizer.built:
            raise ValueError(
                "The model has FreezeOptimizers under names of its own, and which variables each "
                "of them trains is known only once it is built: call its `build(variables)` first. "
                f"Received: {optimizer.name!r}, which is not built"
            )
    _check_not_frozen(model, optimizers, model.trainable_variables, mask)
    whole = mask_from(mask, classify(model.trainable_variables))
    _check_all_in_training(whole, model, optimizers)
    masks = [(optimizer, _part_of(whole, optimizer)) for optimizer in optimizers]
    for optimizer, part in masks:  # which all are right
        _set_mask(model, optimizer, part, list(optimizer.built_variables))
    trace_again(model)
    return whole


def _part_of(whole: FreezeMask, optimizer: FreezeOptimizer) -> FreezeMask:
    """What a mask says of the variables of a FreezeOptimizer, at their places in it."""
    variables = list(optimizer.built_variables)
    found = {position: whole.find(variable) for position, variable in enumerate(variables)}
    entries = {position: entry for position, entry in found.items() if entry is not None}
    own = [replace(entry, position=position) for position, entry in entries.items()]
    part = FreezeMask(own, [variables[position] for position in entries])
    return mask_from(part, classify(variables, optimizer.exclude))


def _check_all_in_training(
    mask: FreezeMask, model: keras.Model, optimizers: Sequence[FreezeOptimizer]
) -> None:
    """Refuses a mask that freezes what another optimizer would go on to train."""
    trained = {id(v) for optimizer in optimizers for v in optimizer.built_variables}
    loose = [
        entry.path
        for entry in mask.entries
        if not entry.trained.all() and id(model.trainable_variables[entry.position]) not in trained
    ]
    if loose:
        raise ValueError(
            f"Argument `mask` freezes entries of {shorten(loose)}, which no FreezeOptimizer of the "
            "model trains: another optimizer would go on to change them. Leave them out of the "
            "mask, or train them with a FreezeOptimizer."
        )


def _check_not_frozen(
    model: keras.Model,
    optimizers: Sequence[FreezeOptimizer],
    variables: Sequence[Any],
    mask: MaskLike | None,
) -> None:
    """Refuses to choose other weights, unless that is meant or it is the same mask once more."""
    for optimizer in optimizers:
        check_trains(optimizer, model)
    is_decided = any(optimizer.mask is not None for optimizer in optimizers)
    frozen = frozen_variables.mask_of(variables)
    if frozen_variables.is_overwriting() or (not is_decided and (frozen is None or frozen == mask)):
        return
    raise ValueError(
        "This model is frozen already, and freezing it again would choose other weights from "
        "trained ones. Pass overwrite=True to do so. Where the mask may have come with loaded "
        "weights, as in a trial that Hyperband resumes, call `freeze` only if "
        "`keras_freeze.get_mask(model) is None`."
    )


def _required_batches(batches: Batches | None) -> Batches:
    if batches is None:
        raise ValueError(
            "Argument `x` must be a batch of inputs or a dataset, or `mask` a mask. "
            "Received: x=None, mask=None"
        )
    return batches


def _variables_of(model: keras.Model, outer: Any, freeze_optimizer: FreezeOptimizer) -> list[Any]:
    """The variables that the FreezeOptimizer updates."""
    if is_one_of_several(freeze_optimizer, outer):
        _build_optimizer(model, outer)  # only its build says who updates what
        return list(freeze_optimizer.built_variables)
    if not model.trainable_variables:
        raise ValueError("The model has no trainable variables, so that nothing can be frozen.")
    return list(model.trainable_variables)


def _build_optimizer(model: keras.Model, optimizer: Any) -> None:
    if not optimizer.built:
        with backend.strategy_scope(optimizer):
            optimizer.build(model.trainable_variables)


def _computed_mask(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Batches,
    optimizer: FreezeOptimizer,
    loss: Any,
    scale: float,
) -> FreezeMask:
    candidates = frozen_candidates(parameters)
    _warn_of_unknown(parameters, optimizer)
    scores = _scores(model, candidates, batches, optimizer.criterion, optimizer.seed, loss, scale)
    return _mask_of_scores(candidates, scores, optimizer)


def _warn_of_unknown(parameters: list[Parameter], optimizer: FreezeOptimizer) -> None:
    if optimizer.freeze_rate > 0:
        warn_of_unknown(parameters, stacklevel=5)


def _mask_of_scores(
    candidates: list[Parameter], scores: list[np.ndarray], optimizer: FreezeOptimizer
) -> FreezeMask:
    if not any(array.any() for array in scores):
        criteria.warn_of_zero_scores(stacklevel=4)
    return FreezeMask.from_scores(
        scores,
        optimizer.freeze_rate,
        seed=optimizer.seed,
        positions=[p.position for p in candidates],
        paths=[p.path for p in candidates],
        variables=[p.variable for p in candidates],
    )
