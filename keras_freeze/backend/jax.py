"""The operations that differ between Keras's backends; here for JAX."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import sparse as jsparse

from keras_freeze import _keras_private
from keras_freeze._utils.aligned import with_entries
from keras_freeze._utils.overrides import override, remove_overrides
from keras_freeze.backend._jax_gradients import *  # noqa: F403
from keras_freeze.backend._jax_gradients import Constant, PartlyTrained
from keras_freeze.backend._jax_processes import *  # noqa: F403
from keras_freeze.backend._jax_processes import whole_array

VERSION = jax.__version__

# Whether a training step is given a model's state, which Keras asks of built models alone.
STEPS_ARE_STATELESS = True

# What JAX raises where data do not suit a model.
DATA_ERRORS: tuple[Any, ...] = (jax.errors.JaxRuntimeError,)


def is_out_of_memory(error: Any) -> bool:
    """Return whether one of `DATA_ERRORS` is about memory and not about the data."""
    return "RESOURCE_EXHAUSTED" in str(error)


class _Scope(keras.StatelessScope):
    """A StatelessScope within another, which knows which variables were assigned."""

    def __init__(self, state: Sequence[tuple[Any, Any]] = (), collect_losses: bool = False) -> None:
        super().__init__(state, collect_losses=collect_losses)
        self.assigned: dict[int, Any] = {}
        if _keras_private.in_stateless_scope():
            self.state_mapping: dict[int, Any] = {
                **_keras_private.stateless_values(),
                **self.state_mapping,
            }

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]

    def values(self) -> list[Any]:
        """Return the values of the variables that were assigned, in order."""
        return [self.get_current_value(variable) for variable in self.assigned.values()]


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def run_if(condition: Any, function: Callable[[list[Any]], None], tensors: list[Any]) -> None:
    """Call `function(tensors)` if `condition` holds."""
    if not isinstance(condition, jax.core.Tracer):
        if condition:
            function(tensors)
        return

    def run() -> _Scope:
        with _Scope() as scope:
            function(tensors)
        return scope

    found: list[Any] = []
    jax.eval_shape(lambda: found.extend(run().assigned.values()))  # traced only to see which
    values = jax.lax.cond(condition, lambda: run().values(), lambda: [v.value for v in found])
    _assign(found, values)


def _stateless(loss: Callable[[], Any], variables: Sequence[Any], scale: float) -> Any:
    """Return the scaled loss as a function of the variables' values, and what else comes of it."""
    assigned: list[Any] = []

    def function(values: list[Any]) -> tuple[Any, tuple[Any, list[Any]]]:
        state = list(zip(variables, values, strict=True))
        with _Scope(state, collect_losses=True) as scope:
            value = loss()
            scaled = value * jnp.asarray(scale, value.dtype)
        assigned[:] = scope.assigned.values()
        return scaled, (value, scope.values())

    return function, assigned


def gradients(
    loss: Callable[[], Any], variables: Sequence[Any], scale: float = 1.0
) -> tuple[Any, list[Any]]:
    """Return `loss()` and the dense gradients of `scale * loss()`."""
    function, assigned = _stateless(loss, variables, scale)
    grads, (value, state) = jax.grad(function, has_aux=True)([v.value for v in variables])
    _assign(assigned, state)
    return value, grads


def double_precision() -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which tensors may be of float64."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    return jax.experimental.enable_x64()  # type: ignore[attr-defined] # before JAX 0.8


def hessian_products(
    loss: Callable[[], Any], variables: Sequence[Any], vectors: Sequence[Any], scale: float = 1.0
) -> tuple[Any, list[Any]]:
    """Return `loss()`, and the product of the Hessian of `scale * loss()` with a vector.

    The vector has one constant tensor for each variable; None means zero. The product is dense.
    """
    function, assigned = _stateless(loss, variables, scale)

    def projection(values: list[Any]) -> tuple[Any, Any]:
        grads, rest = jax.grad(function, has_aux=True)(values)
        # The sum itself is of no interest: a cast rounds it, not its derivative.
        parts = [
            jnp.sum(gradient.astype(vector.dtype) * vector)
            for gradient, vector in zip(grads, vectors, strict=True)
            if vector is not None
        ]
        return sum(parts, start=jnp.zeros(())), rest

    products, (value, state) = jax.grad(projection, has_aux=True)([v.value for v in variables])
    _assign(assigned, state)
    return value, products


def gather_gradient(gradient: Any, variable: Any, indices: Any) -> Any:
    """Return a variable's gradient at flat, sorted `indices`."""
    if isinstance(gradient, PartlyTrained):
        return gradient.vector + gather(gradient.kernel, indices)
    gradient = to_dense(gradient)
    if gradient.shape != tuple(variable.shape):
        raise ValueError(
            f"The gradient of a variable of shape {tuple(variable.shape)} must have that "
            f"shape. Received: a gradient of shape {tuple(gradient.shape)}"
        )
    return gather(gradient, indices)


def to_dense(gradient: Any) -> Any:
    """Return a gradient as a dense tensor."""
    return keras.ops.convert_to_tensor(gradient, sparse=False)


def _tensor(value: Any) -> Any:
    return value.value if isinstance(value, (keras.Variable, Constant)) else value


def read(variable: Any) -> Any:
    """Return the variable's value now, which later assignments do not change."""
    # A copy: `fit` hands the arrays of variables over to JAX, which may overwrite them.
    return jnp.array(_tensor(variable), copy=True)


def gather(variable: Any, indices: Any) -> Any:
    """Return the entries of a variable or tensor at flat `indices`."""
    flat, indices = jnp.reshape(_tensor(variable), -1), jnp.asarray(_tensor(indices))
    # Without the arithmetic for negative and missing indices: less to compile, for each kernel.
    # (XLA clamps those that are outside, which `CompactUpdate.disable` sets.)
    return flat.at[indices].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _as_bits(value: Any) -> Any:
    # Arithmetic on 16-bit floats goes through float32, which rewrites the bits of a NaN.
    is_short = value.dtype.itemsize == 2
    return jax.lax.bitcast_convert_type(value, jnp.int16) if is_short else value


def _from_bits(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype else jax.lax.bitcast_convert_type(value, dtype)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where `condition` holds, else `no`, bit for bit."""
    yes, no = jnp.asarray(_tensor(yes)), jnp.asarray(_tensor(no))
    return _from_bits(jnp.where(_tensor(condition), _as_bits(yes), _as_bits(no)), yes.dtype)


def scatter(variable: Any, indices: Any, values: Any) -> None:
    """Assign `values` to the entries of a variable at flat, sorted `indices`, and nothing else."""
    _assign_flat(variable, indices, values, variable.value)


def scale_and_scatter(variable: Any, indices: Any, values: Any, factor: Any) -> None:
    """Multiply a variable by `factor`, then assigns `values` at flat, sorted `indices`."""
    _assign_flat(variable, indices, values, variable.value * jnp.asarray(factor, variable.dtype))


def _assign_flat(variable: Any, indices: Any, values: Any, others: Any) -> None:
    indices, values = _tensor(indices), _as_bits(jnp.asarray(_tensor(values)))
    is_single = indices.shape[0] == 1
    if is_single:  # twice: for one entry alone, XLA copies the variable
        indices, values = jnp.repeat(indices, 2), jnp.repeat(values, 2)
    # Outside a compiled step, one program copies the variable once.
    replace = _replaced if any(map(is_tracer, (others, indices, values))) else _replaced_at_once
    variable.assign(replace(others, indices, values, not is_single))


def _replaced(array: Any, indices: Any, values: Any, unique: bool) -> Any:
    flat = jnp.reshape(_as_bits(array), -1)
    flat = flat.at[indices].set(
        values, indices_are_sorted=True, unique_indices=unique, wrap_negative_indices=False
    )
    return jnp.reshape(_from_bits(flat, array.dtype), array.shape)


_replaced_at_once = jax.jit(_replaced, static_argnums=3)


def top_k_mask(scores: Any, k: int) -> Any:
    """Return a mask of the `k` largest of a vector of scores; of equal scores, the earlier wins.

    The same rule as `masks.selection.select_top`, for use while a graph is traced.
    """
    _, indices = jax.lax.top_k(scores, k)
    return jnp.zeros(scores.shape, bool).at[indices].set(True)


def require(condition: Any, message: str) -> None:
    """Raise a ValueError with `message` unless the boolean `condition` holds.

    While Keras computes with state that it has taken out of the model, as in `fit`, an error would
    lose this state: there it is a RuntimeWarning, and the caller must not rely on an error.
    """

    def check(holds: Any) -> None:
        if not holds:
            warnings.warn(message, RuntimeWarning, stacklevel=2)

    if isinstance(condition, jax.core.Tracer):
        jax.debug.callback(check, condition)
    elif _keras_private.in_stateless_scope():
        check(condition)
    elif not condition:
        raise ValueError(message)


def call_if(condition: Any, function: Callable[[], None]) -> None:
    """Call `function()`, for what it tells the user, if the boolean `condition` holds."""

    def check(holds: Any) -> None:
        if holds:
            function()

    if isinstance(condition, jax.core.Tracer):
        jax.debug.callback(check, condition)
    else:
        check(condition)


class _Marker(keras.Variable):
    """A variable that stays as it is where another process had another shape."""

    def assign(self, value: Any) -> Any:
        # A LossScaleOptimizer stores and loads all variables of the optimizer that it wraps.
        return super().assign(value) if tuple(value.shape) == tuple(self.shape) else self.value


def trace_markers(generation: int) -> list[Any]:
    """Return variables that make JAX trace functions of an earlier mask again.

    They are part of the state that such a function is given, and their shape is another one for
    each mask.
    """
    return [_Marker(np.zeros((0, generation)), trainable=False, name="generation")]


def known_value(variable: Any) -> np.ndarray | None:
    """Return the value of a variable at present; None in the midst of a graph that computes it."""
    value = _keras_private.stored_value(variable)  # not that of the function being traced
    is_known = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return np.array(value) if is_known and not value.is_deleted() else None


def compiled(function: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
    """Return a function that is compiled for each structure and shapes of its arguments.

    It is of tensors, or structures of them, and reads or assigns variables of this model alone.
    """

    def stateless(values: list[Any], arguments: Any) -> tuple[Any, list[Any]]:
        with _Scope(list(zip(model.variables, values, strict=True))) as scope:
            results = function(*arguments)
        # None, not the same value again, which would be a copy.
        return results, [
            scope.get_current_value(v) if id(v) in scope.assigned else None for v in model.variables
        ]

    run = jax.jit(stateless) if model.jit_compile else stateless  # as `fit` does

    def call(*arguments: Any) -> Any:
        results, values = run([v.value for v in model.variables], arguments)
        for variable, value in zip(model.variables, values, strict=True):
            if value is not None:
                variable.assign(value)
        return results

    return call


def assign(variable: Any, values: Any) -> None:
    """Assign a NumPy array of a variable's shape and dtype, outside compiled functions."""
    variable.assign(jnp.asarray(values))  # in half the time that Keras takes to convert it


def assign_at(variable: Any, indices: np.ndarray, values: np.ndarray) -> None:
    """Assign NumPy values at flat indices, none of them twice, outside compiled functions."""
    # `scatter` is compiled for each number of indices.
    array = _tensor(variable)
    if [device.platform for device in array.devices()] != ["cpu"]:
        variable.assign(with_entries(whole_array(array), indices, values))
        return
    whole = with_entries(np.asarray(array), indices, values)
    # Not bound to its device unless it was before, so that nothing is compiled again.
    variable.assign(jax.device_put(whole, array.sharding if array.committed else None))


def values_at(variable: Any, indices: np.ndarray) -> np.ndarray:
    """Return the entries of a variable at flat indices, as a NumPy array."""
    array = _tensor(variable)
    if {device.platform for device in array.devices()} == {"cpu"} and array.is_fully_replicated:
        entries = np.asarray(array).reshape(-1).take(indices)  # of a view: only they are copied
    else:
        entries = whole_array(gather(variable, indices))
    return _as_declared(entries, variable)


def to_numpy(value: Any) -> np.ndarray:
    """Return a NumPy copy of a variable or eager tensor."""
    return _as_declared(whole_array(_tensor(value)), value)


def _as_declared(array: np.ndarray, value: Any) -> np.ndarray:
    """Return values that were read from a variable in its dtype; see `held_dtype`."""
    if isinstance(value, keras.Variable) and value.dtype in ("float64", "int64", "uint64"):
        return array.astype(value.dtype, copy=False)
    return array


def held_dtype(dtype: Any) -> Any:
    """Return the dtype of the values that a variable of NumPy's `dtype` holds.

    Of 64 bits, JAX holds 32 unless `jax_enable_x64` is set.
    """
    return jax.dtypes.canonicalize_dtype(dtype)


def sparse_tensor(matrix: Any) -> Any:
    """Return what `fit` makes of a sparse matrix of scipy, of its COO format with rows in order."""
    return jsparse.BCOO.from_scipy_sparse(matrix)


def rows(tensor: Any, part: slice) -> Any:
    """Return some rows of a tensor, dense or sparse."""
    return tensor[part]


def is_tracer(value: Any) -> bool:
    """Return whether a value is not computed yet because a function of JAX is being traced."""
    return isinstance(value, jax.core.Tracer)


def uncompiled_steps() -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which nothing is compiled, so that no tracer occurs; much slower."""
    return jax.disable_jit()


@contextlib.contextmanager
def slots_of_zeros(optimizer: Any) -> Iterator[None]:
    """Return a scope in which an optimizer is built without compiling how to make zeros.

    JAX compiles that for each size, which takes longer, and more than a megabyte of memory.
    """
    create = optimizer.add_variable_from_reference

    def zeros(shape: Sequence[int], dtype: Any) -> Any:
        return jax.device_put(np.zeros(shape, dtype))  # `jnp.asarray` would compile a copy

    def add(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        chosen = zeros if initializer == "zeros" else initializer
        return create(reference_variable, name=name, initializer=chosen)

    override(optimizer, "add_variable_from_reference", add)
    try:
        yield
    finally:
        remove_overrides(optimizer)


def synchronize_variables(model: keras.Model) -> None:
    """Write to a model's variables what `fit` has trained so far, which it does once an epoch."""
    if not _keras_private.in_stateless_scope():  # in a step that is being compiled they are known
        model.jax_state_sync()


def between_steps(
    model: keras.Model, arguments: Sequence[Any], function: Callable[[], None]
) -> Sequence[Any]:
    """Call `function`, which may change a model and its optimizer, between two steps of `fit`.

    Args:
        model: the model.
        arguments: the state that Keras has taken out of the model's variables, and the data.

    Returns:
        The arguments for the next step.
    """
    state, data = arguments
    is_taken = _keras_private.stored_value(model.optimizer.variables[0]) is None
    if is_taken:  # not so in `train_on_batch`
        parts = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
        for variables, values in zip(parts, state, strict=True):
            _assign(variables, values)
    function()
    return _keras_private.state_of(model, is_taken), data


def run_train_step(model: keras.Model, data: Any, recorder: Any) -> None:
    """Run a model's `train_step` once, as `fit` does; the state that it returns is let go."""
    if _keras_private.has_unbuilt_metrics(model):  # a stateless step cannot build them
        _keras_private.build_symbolically(model, data)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    parts = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer,
        model.metrics_variables,
    )
    state = tuple([read(v) for v in variables] for variables in parts)
    recorder.know_arrays(model.trainable_variables, state[0])
    model.train_step(state, data)
