"""PyTorch's variants of `speed.py`, which `_torch_worker.py` runs in a process of its own."""

import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from _speed_variants import SGD, build


class TorchWorker:
    """A process that runs PyTorch's variants when it is asked to."""

    def __init__(self, case, variants, images, labels, mask):
        self._steps = case.steps
        script = Path(__file__).with_name("_torch_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        model = build(case)
        kernels = [model.trainable_variables[entry.position].numpy() for entry in mask.entries]
        task = {
            "variants": variants,
            "network": case.network,
            "images": images,
            "labels": labels,
            "batch_size": case.batch_size,
            "kernels": in_torch_layout(mask, kernels),
            "masks": in_torch_layout(mask, [entry.trained for entry in mask.entries]),
            **SGD,
        }
        self.version = self._ask(task)

    def _ask(self, message):
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def run(self, variant):
        seconds, cpu_seconds, loss = self._ask(variant)
        time.sleep(0.2)  # its threads wait busily for more work before they sleep
        return seconds / self._steps, cpu_seconds / self._steps, loss

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def in_torch_layout(mask, arrays):
    """Arrays of kernels' shapes by the name of the layer: outputs first, then inputs."""
    layouts, channels = {}, None
    for entry, array in zip(mask.entries, arrays, strict=True):
        if array.ndim == 4:
            channels = array.shape[-1]
            array = array.transpose(3, 2, 0, 1)
        else:
            if channels is not None:  # PyTorch flattens images with their channels first
                array = array.reshape(-1, channels, array.shape[1]).swapaxes(0, 1)
                array = array.reshape(-1, array.shape[-1])
            channels = None
            array = array.T
        layouts[entry.path.split("/")[-2]] = np.ascontiguousarray(array)
    return layouts
