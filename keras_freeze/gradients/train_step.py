"""The gradients that a model's own `train_step` passes to FreezeOptimizers."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_freeze import _keras_private, backend
from keras_freeze._utils.overrides import is_override
from keras_freeze.gradients.data import Batches
from keras_freeze.gradients.loss import data_errors, loss_scale
from keras_freeze.gradients.preserve import (
    KeptState,
    KeptValues,
    everything_kept,
    held_by,
    layers_kept_if_it_fails,
    others_kept,
    trained_variables,
    variables_among,
)
from keras_freeze.gradients.processes import alone, failing_together
from keras_freeze.gradients.recording import (
    RecordedGradients,
    Recorder,
    TracedGradientError,
    recording,
)
from keras_freeze.parameters import path_of, shorten


def has_own_train_step(model: keras.Model) -> bool:
    """Return whether a model overrides the `train_step` of Keras, in its class or itself."""
    of_model = vars(model).get("train_step")
    is_own = of_model is not None and not is_override(of_model)
    return is_own or type(model).train_step is not keras.Model.train_step


def recorded_gradients(model: keras.Model, batches: Batches) -> list[RecordedGradients]:
    """Run a model's `train_step` and record the gradients that it passes to FreezeOptimizers.

    The model is left as it was, bit for bit: variables, optimizers, metrics, attributes of its
    objects, random state. Only layers that were not built are built. The gradients of all batches
    are summed, each from the same weights.

    Returns:
        The gradients for each FreezeOptimizer that was passed any, in the order of their first
        steps.

    Raises:
        ValueError: for a model that cannot be built; if no FreezeOptimizer was passed a gradient;
            for gradients that are not finite; or under a strategy of several replicas.
    """
    _check_one_replica(model)
    with layers_kept_if_it_fails(model), failing_together(model.variables):
        return _recorded_gradients(model, batches)


def _recorded_gradients(model: keras.Model, batches: Batches) -> list[RecordedGradients]:
    _build_layers(model, batches.items[0][0])
    try:
        records = _records_of(model, batches, backend.eager_steps())
    except TracedGradientError:
        records = []
    if not records:  # perhaps because a compiled function hides the step
        records = _records_of(model, batches, backend.uncompiled_steps())
    if not records:
        raise ValueError(
            "The model's `train_step` passed no gradient to a FreezeOptimizer, so that nothing can "
            "decide which weights are trained. Let it call the FreezeOptimizer's `apply` or "
            "`apply_gradients`, or on JAX its `stateless_apply`; or call `freeze` with `loss` or "
            f"`mask`. Received: model={model!r}"
        )
    _check_known(model, records)
    _check_finite(records)
    return records


def _records_of(
    model: keras.Model, batches: Batches, scope: contextlib.AbstractContextManager[Any]
) -> list[RecordedGradients]:
    with (
        alone(model),
        everything_kept(model),
        recording() as recorder,
        scope,
        backend.outside_strategy(),
    ):
        for number, (data, recorder.weight) in enumerate(batches.items):
            weights = KeptValues(trained_variables(model, held_by(model)))
            with data_errors(number):
                _run(model, data, recorder)
            weights.put_back()
    return [record for record in recorder.records.values() if record.gradients]


def _run(model: keras.Model, data: Any, recorder: Recorder) -> None:
    """Run one step; again with half the loss scale if gradients have overflowed with it."""
    scaled = [one for one in held_by(model) if isinstance(one, keras.optimizers.LossScaleOptimizer)]
    if not scaled:
        backend.run_train_step(model, data, recorder)
        return
    start = KeptState(model)
    records = {key: record.copy() for key, record in recorder.records.items()}
    scales = {id(one): loss_scale(one) for one in scaled}
    while True:
        with _traceless_loss_scaling(scaled) as overflowed:
            backend.run_train_step(model, data, recorder)
        if not overflowed:
            return
        start.put_back()
        recorder.records = {key: record.copy() for key, record in records.items()}
        for optimizer in {id(one): one for one in overflowed}.values():
            scales[id(optimizer)] /= 2.0
        if min(scales.values()) < 1.0:
            raise ValueError(
                "Gradients of the model's `train_step` are not finite: look for NaN or infinite "
                "values in the data, the loss and the weights."
            )
        for optimizer in scaled:
            _set_scale(optimizer, scales[id(optimizer)])


def _set_scale(optimizer: Any, scale: float) -> None:
    if optimizer.built:
        optimizer.dynamic_scale.assign(scale)
    else:
        vars(optimizer)["initial_scale"] = scale


@contextlib.contextmanager
def _traceless_loss_scaling(optimizers: Sequence[Any]) -> Iterator[list[Any]]:
    """Replace `cond`, which JAX traces, in LossScaleOptimizers; list those that overflowed."""
    overflowed: list[Any] = []

    def unscaled(optimizer: Any, grads: Any) -> list[Any] | None:
        grads = list(grads)
        if not bool(optimizer.check_finite(grads)):
            overflowed.append(optimizer)
            return None
        return [None if g is None else ops.divide(g, optimizer.dynamic_scale) for g in grads]

    def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
        if not optimizer.built:
            optimizer.build(trainable_variables)
        grads = unscaled(optimizer, grads)
        if grads is not None:
            optimizer.inner_optimizer.apply(grads, trainable_variables)

    def stateless_apply(optimizer: Any, own: Any, grads: Any, trainable_variables: Any) -> Any:
        grads = unscaled(optimizer, grads)
        if grads is None:
            return trainable_variables, own
        inner = optimizer.inner_optimizer
        trainable_variables, of_inner = inner.stateless_apply(
            own[-len(inner.variables) :], grads, trainable_variables
        )
        return trainable_variables, [*own[: -len(inner.variables)], *of_inner]

    for optimizer in optimizers:
        vars(optimizer)["apply"] = functools.partial(apply, optimizer)
        vars(optimizer)["stateless_apply"] = functools.partial(stateless_apply, optimizer)
    try:
        yield overflowed
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("apply", None)
            vars(optimizer).pop("stateless_apply", None)


def _build_layers(model: keras.Model, data: Any) -> None:
    """Build the layers of a model that its first step would build."""
    if not _unbuilt_layers(model):
        return
    with data_errors(0), others_kept(model), recording():
        try:
            backend.create_variables(model, data)
        except Exception as error:
            unbuilt = _unbuilt_layers(model)
            # A step may fail that has taken the list of its variables before its layers were built.
            if unbuilt and not isinstance(error, RuntimeError):
                raise
            if unbuilt:
                raise ValueError(
                    f"These layers are not built, and the model cannot build them by itself: "
                    f"{shorten(unbuilt)}. Build them before `freeze`: call each on a batch of its "
                    f"inputs, or give it an `Input`. {error}"
                ) from error
    _keras_private.clear_losses(model)  # of the trace


def _unbuilt_layers(model: keras.Model) -> list[str]:
    unbuilt = [
        one.name for one in _keras_private.all_layers(model, include_self=False) if not one.built
    ]
    if not model.built and _builds_itself(model):
        unbuilt.append(model.name)
    return unbuilt


def _builds_itself(model: keras.Model) -> bool:
    if type(model).build is not keras.Model.build:
        return True
    return backend.STEPS_ARE_STATELESS and type(model).call is not keras.Model.call


def _check_one_replica(model: keras.Model) -> None:
    replicas = backend.replicas_of(model)
    if replicas > 1:
        raise ValueError(
            "A model with its own `train_step` cannot be frozen on several devices: call `freeze` "
            "without a strategy and pass its mask as `mask`, or let the first batch "
            f"decide. Received: a strategy of {replicas} replicas."
        )


def _check_known(model: keras.Model, records: Sequence[RecordedGradients]) -> None:
    known = {id(v) for v in [*model.variables, *variables_among(held_by(model))]}
    missing = [
        path_of(variable)
        for record in records
        for variable in record.variables.values()
        if id(variable) not in known
    ]
    if missing:
        raise ValueError(
            "The model's `train_step` trains variables that the model does not have, because they "
            "are created in the step or belong to no attribute of the model: build its layers "
            f"before, and keep them as attributes. Received: {shorten(missing)}"
        )


def _check_finite(records: Sequence[RecordedGradients]) -> None:
    for record in records:
        for key, gradient in record.gradients.items():
            if not bool(ops.all(ops.isfinite(gradient))):
                raise ValueError(
                    f"The gradient of {path_of(record.variables[key])!r} in the model's "
                    "`train_step` is not finite: look for NaN or infinite values in the data, the "
                    "loss and the weights."
                )
