"""What a backend does unless its own module says otherwise: mostly nothing."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_freeze import _keras_private
from keras_freeze._utils.typing import Method

# Whether functions that are traced keep a mask as a constant.
TRACES_MASKS = False

# Whether other optimizers, such as a LossScaleOptimizer, can compute with a compact gradient.
COMPACT_GRADIENTS_ARE_TENSORS = False

# What a restricted gradient costs for one example, in multiplications of the ordinary one: a
# multiplication, a number that is collected from inputs or outputs, and the rest, however small the
# product is. Measured by benchmarks/gradient_rule.py.
PRODUCT_COSTS = CONVOLUTION_COSTS = (1.0, 250.0, 60_000.0)

# Whether the gradient of a depthwise kernel costs as much as that of an ordinary convolution.
DEPTHWISE_GRADIENTS_ARE_DENSE = False

# Whether every training step runs operation by operation, so that none was traced earlier.
STEPS_ARE_EAGER = False

# Whether a variable gets the value that the first process gives it.
CREATES_VARIABLES_TOGETHER = False

# Whether a training step is given a model's state, which Keras asks of built models alone.
STEPS_ARE_STATELESS = False


def cause_of(error: Any) -> str:
    """Return what was wrong with the data, from one of `DATA_ERRORS`."""
    return str(error).strip()


def held_dtype(dtype: Any) -> Any:
    """Return `dtype`: it is the dtype of the values that a variable of this dtype holds."""
    return dtype


def assign(variable: Any, values: Any) -> None:
    """Assign a NumPy array of a variable's shape and dtype, outside compiled functions."""
    variable.assign(values)


# Graphs and functions that are traced


def not_converted(function: Method) -> Method:
    """Return the method itself: nothing rewrites functions that are traced."""
    return function


def eager_scope() -> contextlib.AbstractContextManager[None]:
    """Return a scope that does nothing: Keras builds optimizers before it traces."""
    return contextlib.nullcontext()


def zero_after(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
    """Return None: there is no need for an order."""
    return None


def after(operations: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a scope that does nothing: `operations` have run already."""
    return contextlib.nullcontext()


def is_traced() -> bool:
    """Return whether a graph is being built that may be executed when its variables are gone."""
    return False


def model_being_traced() -> Any:
    """Return None: no graph is built."""
    return None


def trace_markers(generation: int) -> list[Any]:
    """Return an empty list: no function has to be traced again because of a shape."""
    return []


def is_tracer(value: Any) -> bool:
    """Return whether a value is not computed yet: never, where recorded steps run eagerly."""
    return False


def eager_steps() -> contextlib.AbstractContextManager[Any]:
    """Return a scope for training steps; functions that these compile themselves are compiled."""
    return contextlib.nullcontext()


def without_gradients() -> contextlib.AbstractContextManager[None]:
    """Return a scope without gradients: none is needed where nothing records unless asked."""
    return contextlib.nullcontext()


def value_and_grad(
    function: Callable[..., Any],
    kernels: Callable[[], Mapping[int, tuple[Any, Any]]],
    has_aux: bool,
) -> Callable[..., Any]:
    """Do nothing but refuse: other backends do not differentiate functions."""
    raise ValueError(
        "`keras_freeze.value_and_grad` is for JAX. With TensorFlow and PyTorch, differentiate "
        f"as ever. Received: the backend {keras.backend.backend()!r}"
    )


def restrict_train_step(
    model: keras.Model, kernels: Callable[[], Mapping[int, tuple[Any, Any]]]
) -> None:
    """Do nothing: layers alone decide what is differentiated."""


def between_steps(
    model: keras.Model, arguments: Sequence[Any], function: Callable[[], None]
) -> Sequence[Any]:
    """Call `function`, which may change a model and its optimizer, between two steps of `fit`.

    Args:
        model: the model.
        arguments: what Keras hands to the train function.

    Returns:
        The arguments for the next step.
    """
    function()
    return arguments


def whole(values: Any) -> Any:
    """Return the values of variables as they are."""
    return values


def synchronize_variables(model: keras.Model) -> None:
    """Write to a model's variables what `fit` has trained so far: they are always up to date."""


def slots_of_zeros(optimizer: Any) -> contextlib.AbstractContextManager[None]:
    """Return a scope that does nothing: slots of another size cost nothing to create."""
    return contextlib.nullcontext()


def double_precision() -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which tensors may be of float64: they may be anywhere."""
    return contextlib.nullcontext()


# Several devices and processes


def check_strategy(variables: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Do nothing: `tf.distribute` and its strategies are TensorFlow's."""


def outside_strategy() -> contextlib.AbstractContextManager[None]:
    """Return a scope in which nothing is distributed over devices or processes."""
    return contextlib.nullcontext()


def prepare_for_fit() -> None:
    """Do nothing: `fit` works in several processes as it is."""


def strategy_scope(owner: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that creates variables under the strategy of a model or an optimizer."""
    return contextlib.nullcontext()


def replicas_of(model: keras.Model) -> int:
    """Return how many replicas a model is trained on."""
    return 1


def num_replicas() -> int:
    """Return how many replicas there are whose gradients an optimizer sums."""
    return 1


def sum_over_replicas(gradients: Sequence[Any]) -> Sequence[Any]:
    """Return the gradients themselves, which are those of the only replica."""
    return gradients


def across_processes(variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a scope that does nothing: the processes can communicate anywhere."""
    return contextlib.nullcontext()


def averages_gradients(variables: Sequence[Any]) -> bool:
    """Return whether an optimizer has to average the gradients of several processes."""
    return False


def are_shared(variables: Sequence[Any]) -> bool:
    """Return whether variables are on the devices of several processes: no, each has its own."""
    return False


def trains_alone(variables: Sequence[Any]) -> bool:
    """Return whether each of several processes computes gradients by its own batches alone."""
    return False


def own_values(variables: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a scope that does nothing: a process computes alone unless it is told otherwise."""
    return contextlib.nullcontext()


def reduces_gradients() -> bool:
    """Return whether compact gradients of layers save the exchange of dense ones: no."""
    return False


def mean_over_processes(tensors: Sequence[Any]) -> list[Any]:
    """Return the means of the processes' tensors: those of the only one."""
    return list(tensors)


# What a model holds


def is_plain_variable(value: Any) -> bool:
    """Return whether it is a variable of the backend that Keras does not know of."""
    return False


def is_mutable_tensor(value: Any) -> bool:
    """Return whether it is a tensor that can be changed in place: never on this backend."""
    return False


def refill(tensor: Any, content: Any) -> None:
    """Set the values of such a tensor."""
    raise NotImplementedError


def keep_gradients(variables: Sequence[Any]) -> list[Any]:
    """Return an empty list: variables store no gradients."""
    return []


def put_back_gradients(kept: list[Any]) -> None:
    """Do nothing."""


def random_state() -> Any:
    """Return an empty state: there is no global random state."""
    return ()


def set_random_state(state: Any) -> None:
    """Do nothing."""


def create_variables(model: keras.Model, data: Any) -> None:
    """Build what a model's training step uses, for a batch of data, as `fit` does."""
    _keras_private.build_symbolically(model, data)


def untrack_built_variables(optimizer: Any) -> None:
    """Do nothing: only TensorFlow's checkpoints contain the attributes of objects."""
