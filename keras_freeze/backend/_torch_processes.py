"""Processes that train together, for PyTorch: those of `torch.distributed`."""

import gc
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch


def num_processes() -> int:
    """Return how many processes train together, each with its own part of the data."""
    distributed = torch.distributed
    is_grouped = distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if is_grouped else 1


def averages_gradients(variables: Sequence[Any]) -> bool:
    """Return whether an optimizer still has to average the gradients of the processes.

    It does unless the model is in a `DistributedDataParallel`, which averages dense gradients.
    """
    if num_processes() == 1:
        return False
    tensors = {id(variable.value) for variable in variables}
    wrappers = [o for o in gc.get_objects() if type(o) is torch.nn.parallel.DistributedDataParallel]
    return not any(id(tensor) in tensors for one in wrappers for tensor in one.parameters())


def gather_bytes(content: bytes) -> list[bytes]:
    """Return what each process gives, in the order of their ranks; all give as many bytes."""
    count = num_processes()
    if count == 1:
        return [content]
    own = keras.ops.convert_to_tensor(np.frombuffer(content, "uint8").copy())
    found = [torch.empty_like(own) for _ in range(count)]
    torch.distributed.all_gather(found, own)
    return [tensor.cpu().numpy().tobytes() for tensor in found]


def sum_over_processes(tensor: Any) -> Any:
    """Return the sum of the processes' tensors, which have one shape."""
    total = tensor.detach().clone()
    torch.distributed.all_reduce(total)
    return total


def mean_over_processes(tensors: Sequence[Any]) -> list[Any]:
    """Return the means of the processes' tensors: one message for all of a dtype."""
    means = list(tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        # Divided before it is added up, so that float16 does not overflow.
        torch.distributed.all_reduce(flat.div_(num_processes()))
        parts = flat.split([tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            means[place] = part.reshape(tensors[place].shape)
    return means
