"""`freeze` decides which weights of a model are trained; `unfreeze` trains all of them again."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from keras_freeze import backend, criteria
from keras_freeze._utils.threads import check_not_trained_elsewhere
from keras_freeze._utils.validation import check_bool, check_instance
from keras_freeze.computed_masks import mask_of_loss, mask_of_recorded
from keras_freeze.gradients.data import Batches, preprocessed
from keras_freeze.gradients.processes import failing_together
from keras_freeze.gradients.recording import RecordedGradients
from keras_freeze.gradients.train_step import has_own_train_step, recorded_gradients
from keras_freeze.initializers.of_layers import starts_of
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.drawn import Draw, fit_draw, remember_draw
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.model_state import (
    ModelOptimizers,
    build_model,
    check_model,
    check_trains,
    get_mask,
    is_built,
    remember_loop_optimizer,
)
from keras_freeze.optimizer.first_batch import make_train_function_again
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.inner_optimizer import is_one_of_several, walk
from keras_freeze.parameters import classify
from keras_freeze.restricted.layers import restrict_where_trained
from keras_freeze.user_masks import MaskLike, mask_from, parts_for


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
    drawn: bool = False,
) -> FreezeMask:
    """Decide which weights of a model are trained, and pass this mask to its FreezeOptimizer.

    One forward and backward pass, in training mode, of the loss that `fit` minimizes gives the
    saliency of each weight (equation 1, algorithm 1). The model is left as it was, moving
    statistics and random state included; with `frozen_weights="zero"` its frozen weights become
    zero. An optimizer that has run before is reset, except its iterations and learning rate.

    Criteria in steps, such as "synflow", take several passes where `frozen_weights="zero"`: see
    `keras_freeze.criteria.IterativeCriterion`.

    For a model with its own `train_step`, this step is run, and the gradients that it passes to
    FreezeOptimizers decide; everything is then restored. Several FreezeOptimizers get a mask each.

    Of several processes that train a model together, all must call this, each with its own data:
    the gradients are summed over all of them, so that they get the same mask.

    `model.summary()` goes on to count all weights as trainable: `report` counts what is trained.

    Args:
        model: a compiled model whose optimizer is, or contains, one FreezeOptimizer.
        x, y, sample_weight: arrays, or nested structures of arrays, that make up one batch; or `x`
            is a `tf.data.Dataset`, a `keras.utils.PyDataset` or another iterable of the batches
            that `fit` takes, of which the first `steps` are used. `fit`'s `class_weight` is not
            known here: put it into `sample_weight`. A `train_step` gets a batch as in `fit`. The
            criteria "random", "magnitude" and "smallest_magnitude" need no data if the model is
            built; nor does "synflow" if it also tells its input shape.
        steps: how many batches of a dataset to use; their gradients are summed, for "fisher" their
            squares. Defaults to 1.
        batch_size: splits arrays into pieces of this size to save memory; the gradient is still
            that of one batch where the loss is a mean over examples (but each piece has its own
            statistics in BatchNormalization). Pieces weigh by their numbers of examples, also where
            some have more masked steps than others, or with the loss's `reduction="sum"`.
        mask: a mask to use instead, where True is trained: a FreezeMask; a mapping from the paths
            of variables, biases too, or the names of layers with one weight, to boolean arrays; or
            a function that is called with each weight variable, and each variable of a name that
            no layer of Keras uses, and returns a boolean array, or None to train all of it. What a
            mask leaves out is trained. `x` then only serves to build a model that is not built.
        overwrite: whether to replace a mask that exists already. Defaults to False.
        loss, optimizer: for a model that is not compiled: one loss (a Keras loss, its name, or a
            function of `y_true` and `y_pred`), and the FreezeOptimizer or an optimizer around it.
            The model's own losses, such as regularizers, are added.
        freeze_rate: a new rate for the model's FreezeOptimizers. None: keep theirs.
        drawn: whether the mask is drawn: in each weight, the criterion chooses how many entries are
            trained and at which rates in each row and column (and position of a convolution),
            powers of two; which ones is drawn from the FreezeOptimizer's `seed`. A `.freeze` file
            then holds the rates and the seed, a fifth or less of the mask. Not with a `structure`.
            Defaults to False.

    Returns:
        The mask; for several FreezeOptimizers one that covers all of them, as `get_mask` returns.

    Raises:
        ValueError: without a FreezeOptimizer; with a mask already and no `overwrite`; for data
            that are empty, of a wrong shape, or whose loss or gradients are not finite; for a mask
            with wrong paths, shapes or dtypes; in all of several processes that train together,
            if they differ in settings, variables or weights. The model and its optimizer are then
            unchanged.
        TypeError: for arguments of a wrong type.
        RuntimeError: while another thread trains the model; it is then unchanged, too.

    Warns if a criterion decides and a large part of the model has names that no layer of Keras
    gives to weights: all of that is trained.

    Example:

    ```python
    mask = keras_freeze.freeze(model, x[:100], y[:100])
    keras_freeze.freeze(model, mask={"fc1/kernel": np.tri(784, 300, dtype=bool)}, overwrite=True)
    ```
    """
    check_model(model)
    check_bool("overwrite", overwrite)
    if optimizer is not None:
        accepted = "a FreezeOptimizer or an optimizer around one"
        check_instance("optimizer", optimizer, keras.optimizers.Optimizer, accepted)
    if mask is not None and freeze_rate is not None:
        raise ValueError(
            "Arguments `freeze_rate` and `mask` exclude each other: a mask has its own rate. "
            f"Received: freeze_rate={freeze_rate!r} and a mask"
        )
    check_bool("drawn", drawn)
    if mask is not None and drawn:
        raise ValueError(
            "Arguments `drawn` and `mask` exclude each other: a mask that is given is not drawn. "
            "Received: drawn=True and a mask"
        )
    check_not_trained_elsewhere(model)
    batches = None
    if x is not None:
        with contextlib.ExitStack() as scopes:
            if mask is None:
                scopes.enter_context(failing_together(model.trainable_variables))
            batches = Batches(*preprocessed(model, x, y, sample_weight), steps, batch_size)
    with contextlib.ExitStack() as scopes:
        if overwrite:
            scopes.enter_context(frozen_variables.overwriting())
        optimizers = _look_up_optimizers(model, optimizer)
        if drawn:
            _check_draws_single_weights(optimizers.all)
        if freeze_rate is not None:
            scopes.enter_context(_at_rate(optimizers.all, freeze_rate))
        whole = None
        if mask is None and loss is None and _decides_by_step(model, optimizers, batches):
            masks = _freeze_by_train_step(model, optimizers, batches)
        elif mask is not None and optimizer is None and optimizers.outside:
            masks, whole = _freeze_by_parts(model, optimizers.all, mask)
        else:
            masks = _freeze_by_loss(model, optimizers, batches, mask, loss)
        if drawn:
            masks = list(map(_drawn, masks))
        if whole is None and len(masks) == 1:
            whole = masks[0].mask
        _set_masks(model, optimizers, masks)
        if optimizer is not None:
            remember_loop_optimizer(model, optimizer)
        restrict_where_trained(model)
        make_train_function_again(model)
    if whole is None:
        whole = get_mask(model)
    return masks[0].mask if whole is None else whole


def unfreeze(model: keras.Model) -> None:
    """Train all weights of a model from now on; they keep their present values.

    The FreezeOptimizer stays, with a mask that trains everything and with fresh moments. The model
    can be frozen again by `freeze(model, ..., overwrite=True)`, at the values that its weights
    have by then.

    Args:
        model: a frozen model.

    Raises:
        ValueError: if it is not frozen, or has no FreezeOptimizer.
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


@dataclass(frozen=True)
class _NewMask:
    """A mask that a FreezeOptimizer is about to get, and the variables that it is built for."""

    optimizer: FreezeOptimizer
    variables: list[Any]
    mask: FreezeMask
    draws: Mapping[int, Draw] = field(default_factory=dict)  # by position


@contextlib.contextmanager
def _at_rate(optimizers: Sequence[FreezeOptimizer], freeze_rate: float) -> Iterator[None]:
    """Change the rate of FreezeOptimizers, which they keep unless freezing fails."""
    rate = check_freeze_rate(freeze_rate)
    before = [(optimizer, optimizer.freeze_rate) for optimizer in optimizers]
    try:
        for optimizer in optimizers:
            optimizer.__dict__["freeze_rate"] = rate  # past the check that refuses to change it
        yield
    except BaseException:
        for optimizer, rate_before in before:
            optimizer.__dict__["freeze_rate"] = rate_before
        raise


def _look_up_optimizers(model: keras.Model, optimizer: Any) -> ModelOptimizers:
    """Return the optimizers of a model, those that a MultiOptimizer gets in its build included."""
    optimizers = ModelOptimizers(model, optimizer)
    is_multi = any(isinstance(o, keras.optimizers.MultiOptimizer) for o in walk(optimizers.outer))
    if is_multi and not optimizers.inside and is_built(model):
        _build_optimizer(model, optimizers.outer)
        optimizers = ModelOptimizers(model, optimizer)
    return optimizers


def _decides_by_step(
    model: keras.Model, optimizers: ModelOptimizers, batches: Batches | None
) -> bool:
    """Return whether the model's own `train_step` is to decide what is trained."""
    inside = optimizers.inside
    if len(inside) == 1 and not criteria.needs_data(inside[0].criterion):
        is_simple = criteria.as_iterative(inside[0].criterion) is None
        return is_simple and batches is not None and has_own_train_step(model)
    return has_own_train_step(model)


def _freeze_by_loss(
    model: keras.Model,
    optimizers: ModelOptimizers,
    batches: Batches | None,
    mask: MaskLike | None,
    loss: Any,
) -> list[_NewMask]:
    """Freeze a model with one FreezeOptimizer, by the user's mask or by the gradients of a loss."""
    optimizer = optimizers.required()
    _check_not_frozen(model, [optimizer], model.trainable_variables, mask)
    build_model(model, batches)
    variables = _variables_in_fit(model, optimizers.outer, optimizer)
    parameters = optimizer.classify(variables)
    if mask is None:
        if criteria.needs_data(optimizer.criterion):
            batches = _required_batches(batches)
        new_mask = mask_of_loss(model, parameters, batches, optimizer, loss, optimizers.outer)
    else:
        new_mask = mask_from(mask, parameters)
    return [_NewMask(optimizer, variables, new_mask)]


def _freeze_by_train_step(
    model: keras.Model, optimizers: ModelOptimizers, batches: Batches | None
) -> list[_NewMask]:
    """Freeze a model by the gradients that its own `train_step` passes to FreezeOptimizers."""
    if not optimizers.all:
        raise ValueError(
            "The model has no FreezeOptimizer, such as "
            "FreezeOptimizer(keras.optimizers.SGD(0.1)): compile it with one, or give it one as "
            f"an attribute. Received: model={model!r}"
        )
    _check_not_frozen(model, optimizers.all, (), None)
    if isinstance(optimizers.outer, keras.optimizers.MultiOptimizer):
        _build_optimizer(model, optimizers.outer)  # it assigns variables to its parts there
    masks = []
    batches = _required_batches(batches)
    for recorded in recorded_gradients(model, batches):
        optimizer = recorded.optimizer
        _check_not_frozen(model, [optimizer], list(recorded.variables.values()), None)
        variables = _variables_in_step(model, optimizers, recorded)
        new_mask = mask_of_recorded(recorded, variables, batches.num_wholes)
        masks.append(_NewMask(optimizer, variables, new_mask))
    return masks


def _freeze_by_parts(
    model: keras.Model, optimizers: Sequence[FreezeOptimizer], mask: MaskLike
) -> tuple[list[_NewMask], FreezeMask]:
    """Freeze a model with FreezeOptimizers as attributes by the user's mask: each gets its part."""
    for optimizer in optimizers:
        if not optimizer.built:
            raise ValueError(
                "The model has FreezeOptimizers as attributes, and which variables each of them "
                "trains is known only once it is built: call its `build(variables)` first. "
                f"Received: {optimizer.name!r}, which is not built"
            )
    _check_not_frozen(model, optimizers, model.trainable_variables, mask)
    whole = mask_from(mask, classify(model.trainable_variables))
    parts = parts_for(whole, model, optimizers)
    return [
        _NewMask(optimizer, list(optimizer.built_variables), part)
        for optimizer, part in zip(optimizers, parts, strict=True)
    ], whole


def _check_draws_single_weights(optimizers: Sequence[FreezeOptimizer]) -> None:
    found = [o.structure for o in optimizers if o.structure is not None]
    if found:
        raise ValueError(
            "Argument `drawn` must be False where a FreezeOptimizer has a `structure`: what is "
            "drawn are single weights. "
            f"Received: drawn=True and structure={found[0]}"
        )


def _drawn(new: _NewMask) -> _NewMask:
    """Return masks that are drawn, with as many trained entries in the same rows and columns."""
    draws, entries = {}, []
    for entry in new.mask.entries:
        if entry.trained.any() and not entry.trained.all():
            draw = fit_draw(entry.trained, new.optimizer.seed, entry.position)
            entry = replace(entry, trained=draw.mask(entry.trained.shape))
            draws[entry.position] = draw
        entries.append(entry)
    variables = [new.variables[entry.position] for entry in entries]
    return replace(new, mask=FreezeMask(entries, variables, new.mask.num_rescued), draws=draws)


def _set_masks(model: keras.Model, optimizers: ModelOptimizers, masks: list[_NewMask]) -> None:
    for new in masks:
        check_not_trained_elsewhere(model)  # again: the passes over the data may have taken long
        parameters = new.optimizer.classify(new.variables)
        masked = [parameters[entry.position] for entry in new.mask.entries]
        starts = starts_of(model, masked, new.optimizer.starts)
        frozen_variables.remember_model(new.optimizer, model)
        new.optimizer.set_mask(new.mask, new.variables, starts)
        for position, draw in new.draws.items():
            remember_draw(new.variables[position], draw)
    if any(new.optimizer in optimizers.inside for new in masks):
        _build_optimizer(model, optimizers.outer)


def _check_not_frozen(
    model: keras.Model,
    optimizers: Sequence[FreezeOptimizer],
    variables: Sequence[Any],
    mask: MaskLike | None,
) -> None:
    """Check that no other weights are chosen by mistake; the same mask once more is accepted."""
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


def _build_optimizer(model: keras.Model, optimizer: Any) -> None:
    if not optimizer.built:
        with backend.strategy_scope(optimizer):
            optimizer.build(model.trainable_variables)


def _variables_in_fit(model: keras.Model, outer: Any, optimizer: FreezeOptimizer) -> list[Any]:
    if is_one_of_several(optimizer, outer):
        _build_optimizer(model, outer)  # it assigns variables to its parts there
        return list(optimizer.built_variables)
    if not model.trainable_variables:
        raise ValueError("The model has no trainable variables, so that nothing can be frozen.")
    return list(model.trainable_variables)


def _variables_in_step(
    model: keras.Model, optimizers: ModelOptimizers, recorded: RecordedGradients
) -> list[Any]:
    """Return the variables that a FreezeOptimizer updates in a model's own `train_step`."""
    optimizer = recorded.optimizer
    if optimizer.built:
        return list(optimizer.built_variables)
    whole = model.trainable_variables
    if optimizer in optimizers.inside and recorded.variables.keys() <= {id(v) for v in whole}:
        return list(whole)  # as Keras builds it
    return list(recorded.variables.values())
