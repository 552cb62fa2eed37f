"""The operations that differ between Keras's backends; here for PyTorch."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from keras_freeze.backend._passes import all_gradients
from keras_freeze.backend._torch_gradients import *  # noqa: F403
from keras_freeze.backend._torch_gradients import CompactGradient, Indices, entries_of
from keras_freeze.backend._torch_processes import *  # noqa: F403

VERSION = torch.__version__

# The dtypes that NumPy does not know, and those of their bit patterns.
_BITS_OF_UNKNOWN = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}

# Whether every training step runs operation by operation, so that none was traced earlier.
STEPS_ARE_EAGER = True

# What PyTorch raises where data do not suit a model.
DATA_ERRORS: tuple[Any, ...] = (RuntimeError, IndexError)


def is_out_of_memory(error: Any) -> bool:
    """Return whether one of `DATA_ERRORS` is about memory or the program, not the data."""
    return isinstance(error, (torch.OutOfMemoryError, NotImplementedError, RecursionError))


def run_if(condition: Any, function: Callable[[list[Any]], None], tensors: list[Any]) -> None:
    """Call `function(tensors)` if `condition` holds."""
    if bool(_tensor(condition)):
        function(tensors)


def gradients(
    loss: Callable[[], Any], variables: Sequence[Any], scale: float = 1.0
) -> tuple[Any, list[Any]]:
    """Return `loss()` and the dense gradients of `scale * loss()`, None where unconnected."""
    value, grads = _differentiate(loss, variables, scale)
    return value.detach(), [None if g is None else to_dense(g) for g in grads]


def _differentiate(
    loss: Callable[[], Any], variables: Sequence[Any], scale: float, twice: bool = False
) -> tuple[Any, Sequence[Any]]:
    with all_gradients(), torch.enable_grad():
        value = loss()
        scaled = value * scale
        return value, _gradients(scaled, variables, twice)


def _gradients(scalar: Any, variables: Sequence[Any], twice: bool = False) -> Sequence[Any]:
    if not scalar.requires_grad:
        return [None] * len(variables)
    tensors = [v.value for v in variables]
    return torch.autograd.grad(scalar, tensors, create_graph=twice, allow_unused=True)


def hessian_products(
    loss: Callable[[], Any], variables: Sequence[Any], vectors: Sequence[Any], scale: float = 1.0
) -> tuple[Any, list[Any]]:
    """Return `loss()`, and the product of the Hessian of `scale * loss()` with a vector.

    The vector has one constant tensor for each variable; None means zero. The product has dense
    parts, None where one is zero by construction.

    Raises:
        LookupError: where PyTorch has no second derivative of an operation.
    """
    # The fused kernels of attention have no second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        value, grads = _differentiate(loss, variables, scale, twice=True)
    # The sum itself is of no interest: a cast rounds it, not its derivative.
    projection = torch.zeros((), device=value.device)
    for gradient, vector in zip(grads, vectors, strict=True):
        if gradient is not None and vector is not None:
            projection = projection + (gradient.to(vector.dtype) * vector.detach()).sum()
    try:
        products = _gradients(projection, variables)
    except RuntimeError as error:
        if "not implemented" not in str(error) and "not twice differentiable" not in str(error):
            raise
        raise LookupError(str(error)) from error
    return value.detach(), [None if p is None else to_dense(p) for p in products]


def gather_gradient(gradient: Any, variable: Any, indices: Any) -> Any:
    """Return a variable's gradient at flat, sorted `indices`."""
    entries = entries_of(gradient, _tensor(indices))
    if entries is not None:
        return entries
    gradient = to_dense(gradient)
    if tuple(gradient.shape) != tuple(variable.shape):
        raise ValueError(
            f"The gradient of a variable of shape {tuple(variable.shape)} must have that "
            f"shape. Received: a gradient of shape {tuple(gradient.shape)}"
        )
    return gather(gradient, indices)


def to_dense(gradient: Any) -> Any:
    """Return a gradient as a dense tensor."""
    if isinstance(gradient, CompactGradient):
        return gradient.to_dense()
    gradient = keras.ops.convert_to_tensor(_tensor(gradient)).detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _tensor(value: Any) -> Any:
    return value.value if isinstance(value, (keras.Variable, Indices)) else value


def is_mutable_tensor(value: Any) -> bool:
    """Return whether it is a tensor that can be changed in place and is not a variable."""
    return isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)


def refill(tensor: Any, content: Any) -> None:
    """Set the values of such a tensor."""
    with torch.no_grad():
        tensor.copy_(content)


def read(variable: Any) -> Any:
    """Return the variable's value now, which later assignments do not change."""
    return _tensor(variable).detach().clone()


def gather(variable: Any, indices: Any) -> Any:
    """Return the entries of a variable or tensor at flat `indices`."""
    flat = _tensor(variable).detach().reshape(-1)
    return flat.index_select(0, keras.ops.convert_to_tensor(_tensor(indices)))


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where `condition` holds, else `no`, bit for bit."""
    return torch.where(_tensor(condition), _tensor(yes).detach(), _tensor(no).detach())


def scatter(variable: Any, indices: Any, values: Any) -> None:
    """Assign `values` to the entries of a variable at flat, sorted `indices`, and nothing else."""
    tensor = variable.value.detach()
    flat = tensor.reshape(-1)
    flat.index_copy_(0, _tensor(indices).long(), _tensor(values).detach())
    if not tensor.is_contiguous():  # `flat` is a copy then
        tensor.copy_(flat.reshape(tensor.shape))


def scale_and_scatter(variable: Any, indices: Any, values: Any, factor: Any) -> None:
    """Multiply a variable by `factor`, then assigns `values` at flat, sorted `indices`."""
    variable.value.detach().mul_(_tensor(factor).detach().to(variable.value.dtype))
    scatter(variable, indices, values)


def top_k_mask(scores: Any, k: int) -> Any:
    """Return a mask of the `k` largest of a vector of scores; of equal scores, the earlier wins.

    The same rule as `masks.selection.select_top`.
    """
    _, order = torch.sort(scores, descending=True, stable=True)
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    mask[order[:k]] = True
    return mask


def require(condition: Any, message: str) -> None:
    """Raise a ValueError with `message` unless the boolean `condition` holds."""
    if not bool(condition):
        raise ValueError(message)


def call_if(condition: Any, function: Callable[[], None]) -> None:
    """Call `function()`, for what it tells the user, if the boolean `condition` holds."""
    if bool(condition):
        function()


def known_value(variable: Any) -> np.ndarray | None:
    """Return the value of a variable at present."""
    return to_numpy(variable)


def without_gradients() -> contextlib.AbstractContextManager[None]:
    """Return a scope in which nothing is recorded for gradients."""
    return torch.no_grad()


def compiled(function: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
    """Return the function itself: PyTorch runs it as it is."""
    return function


def sparse_tensor(matrix: Any) -> Any:
    """Return what `fit` makes of a sparse matrix of scipy, of its COO format with rows in order."""
    return keras.ops.convert_to_tensor(matrix.toarray())


def rows(tensor: Any, part: slice) -> Any:
    """Return some rows of a tensor."""
    return tensor[part]


def values_at(variable: Any, indices: np.ndarray) -> np.ndarray:
    """Return the entries of a variable at flat indices, as a NumPy array."""
    return to_numpy(gather(variable, indices))


def to_numpy(value: Any) -> np.ndarray:
    """Return a NumPy copy of a variable or eager tensor."""
    tensor = _tensor(value)
    if not isinstance(tensor, torch.Tensor):
        return np.array(tensor)
    tensor = tensor.detach().cpu()
    bits = _BITS_OF_UNKNOWN.get(tensor.dtype)
    if bits is None:
        return tensor.numpy().copy()
    dtype = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."))
    return tensor.view(bits).numpy().copy().view(dtype)


def assign(variable: Any, values: Any) -> None:
    """Assign a NumPy array of a variable's shape and dtype, also one of a dtype of `ml_dtypes`."""
    variable.assign(_from_unknown(values))


def assign_at(variable: Any, indices: np.ndarray, values: np.ndarray) -> None:
    """Assign NumPy values at flat indices, none of them twice, outside compiled functions."""
    device = variable.value.device
    tensors = [torch.as_tensor(array, device=device) for array in (indices, _from_unknown(values))]
    scatter(variable, *tensors)


def _from_unknown(values: np.ndarray) -> Any:
    """Return a tensor of values of a dtype that NumPy does not know, and others as they are."""
    dtype = getattr(torch, values.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or dtype not in _BITS_OF_UNKNOWN:
        return values
    patterns = values.view(str(_BITS_OF_UNKNOWN[dtype]).removeprefix("torch."))
    return torch.from_numpy(patterns.copy()).view(dtype)


def keep_gradients(variables: Sequence[Any]) -> list[Any]:
    """Return the `.grad` of variables, and a copy of each."""
    tensors = [v.value for v in variables]
    gradients = [(tensor, tensor.grad) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return [(t, g, None if g is None else g.detach().clone()) for t, g in gradients]


def put_back_gradients(kept: list[Any]) -> None:
    """Restore what `keep_gradients` returned."""
    for tensor, gradient, content in kept:
        if gradient is not None:
            gradient.detach().copy_(content)
        tensor.grad = gradient


def random_state() -> Any:
    """Return the state of PyTorch's random numbers."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), on_gpus


def set_random_state(state: Any) -> None:
    """Restore what `random_state` returned."""
    on_cpu, on_gpus = state
    torch.set_rng_state(on_cpu)
    if on_gpus is not None:
        torch.cuda.set_rng_state_all(on_gpus)


def eager_steps() -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which compiled functions run step by step."""
    return torch.compiler.set_stance("force_eager")


def uncompiled_steps() -> contextlib.AbstractContextManager[Any]:
    """Return the same: `eager_steps` compiles nothing."""
    return eager_steps()


def run_train_step(model: keras.Model, data: Any, recorder: Any) -> None:
    """Run a model's `train_step` once, as `fit` does."""
    with torch.enable_grad():
        model.train_step(data)
