"""The private names of Keras and TensorFlow that the package needs, one small function each.

No other module uses private names of these libraries, but for the hooks that a subclass overrides;
`tests/unit/test_keras_private.py` checks that, and each function. All were checked with Keras 3.15
and TensorFlow 2.21; a docstring ends with the names. Where a newer version of Keras breaks one of
them, this is the only file to change.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras.src.backend.common import dtypes, global_state, stateless_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.common.variables import Variable as _Variable
from keras.src.saving.serialization_lib import ObjectSharingScope
from keras.src.utils.tracking import Tracker

CHECKED_WITH = "3.15"
"""The version of Keras that everything here was checked with."""

# Models and layers


def all_layers(model: Any, include_self: bool = True) -> list[Any]:
    """Return a layer and all layers inside it, at any depth: `Layer._flatten_layers`."""
    layers: list[Any] = model._flatten_layers(include_self=include_self)
    return layers


def own_variables(layer: Any) -> list[Any]:
    """Return the variables of a layer without those of layers inside it.

    `Layer._trainable_variables`, `Layer._non_trainable_variables`; the public lists have both.
    """
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def has_added_losses(model: Any) -> bool:
    """Return whether a layer has called `add_loss` in its last call: `Layer._get_own_losses`.

    `Layer.losses` contains the losses of regularizers, too.
    """
    return any(layer._get_own_losses() for layer in all_layers(model))


def clear_losses(model: Any) -> None:
    """Forget the losses that layers have added: `Layer._clear_losses`."""
    model._clear_losses()


def build_symbolically(model: Any, data: Any) -> None:
    """Build a model, metrics, loss and optimizer as `fit` does: `Trainer._symbolic_build`."""
    model._symbolic_build(data_batch=data)


def has_unbuilt_metrics(model: Any) -> bool:
    """Return whether metrics from `compile` are not built: `Trainer._compile_metrics`."""
    metrics = model._compile_metrics
    return metrics is not None and not metrics.built


def compute_output_spec(function: Callable[[], Any]) -> Any:
    """Run a function with symbolic tensors: `keras.src.backend.compute_output_spec`."""
    return keras.src.backend.compute_output_spec(function)


def is_training_call_of(model: Any) -> bool:
    """Return whether the outermost layer call in progress is one of `model` with training=True.

    The global attribute `current_call_ctx`.
    """
    context = global_state.get_global_attribute("current_call_ctx")
    return (
        context is not None
        and context.entry_layer is model
        and context.get_value("training", False) is True
    )


def is_transformed_by_torch(tensor: Any) -> bool:
    """Return whether PyTorch will run a function again: by checkpointing, or by `torch.func`.

    `_top_saved_tensors_default_hooks` and `is_functorch_wrapped_tensor` of PyTorch 2.13.
    """
    import torch

    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def tensor_without_memory(kind: type, shape: Sequence[int], like: Any) -> Any:
    """Return a tensor of a subclass that says itself what its values are.

    `Tensor._make_wrapper_subclass` of PyTorch 2.13.
    """
    import torch

    options = {"dtype": like.dtype, "device": like.device}
    return torch.Tensor._make_wrapper_subclass(kind, tuple(shape), **options)


def call_as_plain_tensors(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Call a function of PyTorch whose result is not to become of a subclass of Tensor.

    `_disabled_torch_function_impl` of PyTorch 2.13.
    """
    import torch

    return torch._C._disabled_torch_function_impl(function, types, args, kwargs or {})


def num_changes(tensor: Any) -> int:
    """Return how often PyTorch has changed a tensor in place: `_version`."""
    return int(tensor._version)


def is_rematerialized(layer: Any) -> bool:
    """Return whether a `keras.RematScope` lets a layer compute its outputs again: `_remat_mode`."""
    mode = layer._remat_mode
    return mode is not None and mode.mode != "activations"


def creating_layer(tensor: Any) -> Any:
    """Return the layer that a symbolic tensor is an output of: `KerasTensor._keras_history`."""
    return tensor._keras_history.operation


def is_tracker(value: Any) -> bool:
    """Return whether a value is the record that layers keep of their parts: `Tracker`."""
    return isinstance(value, Tracker)


def object_sharing_scope() -> contextlib.AbstractContextManager[None]:
    """Return a scope in which objects that several configurations share are made once.

    `ObjectSharingScope`, as Keras's own saving uses it.
    """
    return ObjectSharingScope()


def state_of(model: Any, is_taken: bool) -> tuple[list[Any], ...]:
    """Return the values of a model's variables, for JAX; take them out as `fit` does, if asked.

    `JAXTrainer._get_jax_state`; `JAXTrainer._jax_state`, which `fit` puts back after an error.
    """
    names = ("trainable", "non_trainable", "optimizer", "metrics")
    parts = {f"{name}_variables": True for name in names}
    state: tuple[list[Any], ...] = model._get_jax_state(**parts, purge_model_variables=is_taken)
    if is_taken:
        model._jax_state = dict(zip(parts, state, strict=True))
    return state


def is_train_function(function: Any) -> bool:
    """Return whether Keras has made a train function: it is defined in `keras.src`."""
    return str(getattr(function, "__globals__", {}).get("__name__")).startswith("keras.src.")


def model_being_traced() -> Any:
    """Return the model whose train function TensorFlow traces; None if it traces something else.

    The name `one_step_on_data` of the function in `TensorFlowTrainer._make_function`.
    """
    import tensorflow as tf

    name = "one_step_on_data"
    graph = tf.compat.v1.get_default_graph()
    frame = sys._getframe(1) if getattr(graph, "name", None) == name else None
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("self")


# Variables and global state


def set_path(variable: Any, path: str) -> None:
    """Set the path of a variable, whatever name scope it was created in: `Variable._path`."""
    variable._path = path


def stored_value(variable: Any) -> Any:
    """Return the value of a variable outside any stateless scope: `Variable._value`."""
    return variable._value


def stored_dtype(variable: Any) -> str:
    """Return the dtype of a variable outside any autocast scope: `Variable._dtype`."""
    dtype: str = variable._dtype
    return dtype


def has_shape(variable: Any) -> bool:
    """Return whether a variable that is being created has its shape: `Variable._shape`."""
    return variable._shape is not None


def shape_check() -> Callable[[Any, Any], Any]:
    """Return what Keras calls before it allocates a variable: `Variable._validate_shape`."""
    method: Callable[[Any, Any], Any] = _Variable._validate_shape
    return method


def set_shape_check(method: Callable[[Any, Any], Any]) -> None:
    """Replace the method that `shape_check` returns."""
    _Variable._validate_shape = method


def no_autocast() -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which variables keep their dtype inside layers: `AutocastScope`."""
    return AutocastScope(None)


@contextlib.contextmanager
def autocast_to_float64() -> Iterator[None]:
    """Let variables be float64, and operations on float64 give float64 on all backends.

    `AutocastScope`; `dtypes.BIT64_TO_BIT32_DTYPE`, the table by which they give float32 on JAX and
    PyTorch.
    """
    table = dtypes.BIT64_TO_BIT32_DTYPE
    before = table["float64"]
    table["float64"] = "float64"
    try:
        with AutocastScope("float64"):
            yield
    finally:
        table["float64"] = before


def set_dtype_policy(layer: Any, policy: Any) -> None:
    """Set the policy of one layer, past a map that others share: `Layer._dtype_policy`."""
    layer._dtype_policy = policy


def in_stateless_scope() -> bool:
    """Return whether a `keras.StatelessScope` is active."""
    return bool(stateless_scope.in_stateless_scope())


def stateless_values() -> dict[int, Any]:
    """Return the values of variables, by id, in the active `keras.StatelessScope`."""
    return dict(stateless_scope.get_stateless_scope().state_mapping)


def global_seed_generator() -> Any:
    """Return the generator for layers without a seed; None where it is not created yet.

    The global attribute `global_seed_generator`.
    """
    return global_state.get_global_attribute("global_seed_generator")


def set_global_seed_generator(generator: Any) -> None:
    """Set the generator for layers without a seed; None creates it when it is used."""
    global_state.set_global_attribute("global_seed_generator", generator)


# Optimizers


def built_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built with: `Optimizer._trainable_variables`."""
    return list(optimizer._trainable_variables)


def forget_built_variables(optimizer: Any) -> None:
    """Let an optimizer be built for other variables: `Optimizer._trainable_variables_indices`."""
    optimizer._trainable_variables_indices = {}


def iterations_variable(optimizer: Any) -> Any:
    """Return the variable that counts the calls of `apply`: `Optimizer._iterations`.

    `Optimizer.iterations` is a quotient of it where gradients are accumulated.
    """
    return optimizer._iterations


def keep_counters(optimizer: Any, attributes: Mapping[str, Any]) -> None:
    """Let the variables of iterations and learning rate among some attributes be an optimizer's.

    `Optimizer._iterations`, `Optimizer._learning_rate`, `Optimizer._tracker`.
    """
    for name in ("_iterations", "_learning_rate"):
        variable, new = attributes[name], vars(optimizer)[name]
        if not isinstance(variable, keras.Variable) or not isinstance(new, keras.Variable):
            continue
        if keras.backend.backend() == "tensorflow":  # which saves no list that has been changed
            vars(variable).update(vars(new))
            continue
        (_, known), ids = optimizer._tracker.config["variables"], optimizer._tracker.stored_ids
        known[[id(v) for v in known].index(id(new))] = variable
        ids["variables"].symmetric_difference_update((id(new), id(variable)))
        vars(optimizer)[name] = variable


@contextlib.contextmanager
def without_learning_rate_function(optimizer: Any) -> Iterator[Any]:
    """Take a schedule or function out of an optimizer, whose `get_config` may not support it.

    Yields the learning rate as the optimizer stores it: `Optimizer._learning_rate`, a variable, a
    schedule or a function; `Optimizer.learning_rate` evaluates it.
    """
    rate = optimizer._learning_rate
    try:
        if not isinstance(rate, keras.Variable):
            vars(optimizer)["_learning_rate"] = None
        yield rate
    finally:
        vars(optimizer)["_learning_rate"] = rate


def copy_decay_exclusions(optimizer: Any, other: Any) -> None:
    """Exclude the same variables from the decoupled weight decay of another optimizer.

    `Optimizer._exclude_from_weight_decay`, `Optimizer._exclude_from_weight_decay_pattern`.
    """
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(other, name, getattr(optimizer, name))


def exclude_from_decay_like(optimizer: Any, variable: Any, other: Any) -> None:
    """Exclude `other` from decoupled weight decay if `variable` is excluded.

    `Optimizer._exclude_from_weight_decay`, `Optimizer._var_key`.
    """
    excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    if optimizer._var_key(variable) in excluded:
        excluded.add(optimizer._var_key(other))


def moving_averages(optimizer: Any) -> list[tuple[Any, Any]]:
    """Pair the variables of an optimizer with `use_ema` with their moving averages.

    `Optimizer._model_variables_moving_average`.
    """
    averages = getattr(optimizer, "_model_variables_moving_average", [])
    pairs = zip(built_variables(optimizer), averages, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]


def is_torch_optimizer_module(module: str) -> bool:
    """Return whether it contains a class that replaces one of Keras's optimizers on PyTorch."""
    return module.startswith("keras.src.backend.torch.optimizers.")


def public_optimizer_class(optimizer: Any) -> type:
    """Return the class of an optimizer that `keras.optimizers` exports."""
    kinds = type(optimizer).__mro__
    if is_torch_optimizer_module(kinds[0].__module__):
        return next(kind for kind in kinds if kind.__module__.startswith("keras.src.optimizers."))
    return kinds[0]


# TensorFlow


def untrack_built_variables(optimizer: Any) -> None:
    """Keep `built_variables` out of checkpoints: `AutoTrackable._delete_tracking`."""
    optimizer._delete_tracking("_trainable_variables")


def wrapped_list(value: Any) -> list[Any] | None:
    """Return the list inside a list that TensorFlow tracks, else None: `ListWrapper._storage`."""
    return getattr(value, "_storage", None)


def variable_strategy(variable: Any) -> Any:
    """Return the strategy of `tf.distribute` that a `tf.Variable` was created under, or None.

    `ResourceVariable._distribute_strategy`.
    """
    return getattr(variable, "_distribute_strategy", None)


def optimizer_strategy(optimizer: Any) -> Any:
    """Return the strategy of `tf.distribute` that an optimizer was created under.

    `TFOptimizer._distribution_strategy`.
    """
    return optimizer._distribution_strategy


def supports_no_merge_call() -> bool:
    """Return whether the replicas of the active strategy cannot synchronize by a merge call.

    `tf.__internal__.distribute.strategy_supports_no_merge_call`.
    """
    import tensorflow as tf

    return bool(tf.__internal__.distribute.strategy_supports_no_merge_call())


def is_compiled_by_xla(graph: Any) -> bool:
    """Return whether XLA compiles a graph: `GraphOrParentsInXlaContext`."""
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def checkpoint_being_restored(trackable: Any) -> dict[str, Any] | None:
    """Return what a checkpoint has for an object, before its parts are restored; None elsewhere.

    To be called by the object's `_trackable_children`, which TensorFlow calls in
    `_queue_children_for_restoration`, where `checkpoint_position` is a variable.
    """
    frame = sys._getframe(2)
    position = frame.f_locals.get("checkpoint_position")
    if frame.f_code.co_name != "_queue_children_for_restoration" or position is None:
        return None
    if position.trackable is not trackable:
        return None
    import tensorflow as tf

    reader = tf.train.load_checkpoint(position.checkpoint.save_path_string)
    attributes = position.object_proto.attributes
    return {each.name: reader.get_tensor(each.checkpoint_key) for each in attributes}


def without_tracing_warning(function: Any) -> Any:
    """Let a `tf.function` be traced for many shapes: `_omit_frequent_tracing_warning`."""
    vars(function)["_omit_frequent_tracing_warning"] = True
    return function


def global_generator() -> Any:
    """Return `tf.random`'s global generator; None where it is not created yet.

    `stateful_random_ops.global_generator`; the public getter creates it.
    """
    from tensorflow.python.ops import stateful_random_ops

    return stateful_random_ops.global_generator


def set_global_generator(generator: Any) -> None:
    """Set what `global_generator` returns, None included."""
    from tensorflow.python.ops import stateful_random_ops

    stateful_random_ops.global_generator = generator


def operation_seeds() -> Any:
    """Return the state of the seeds of random operations; None before `tf.random.set_seed`.

    `Context._rng`.
    """
    from tensorflow.python.eager import context

    generator = getattr(context.context(), "_rng", None)
    return None if generator is None else generator.getstate()


def set_operation_seeds(state: Any) -> None:
    """Set what `operation_seeds` has returned."""
    from tensorflow.python.eager import context

    generator = getattr(context.context(), "_rng", None)
    if generator is not None and state is not None and generator.getstate() != state:
        generator.setstate(state)
        # An operation of the same seed would otherwise continue where it has stopped.
        context.context().clear_kernel_cache()
