"""Train one network on several machines that exchange nothing but gradients of what is trained.

Start it on each machine with the same addresses and a rank of its own, counted from 0:

    python examples/train_on_several_machines.py --addresses=first:5000,second:5000 --rank=0
    python examples/train_on_several_machines.py --addresses=first:5000,second:5000 --rank=1

To try it on one machine, give addresses such as localhost:5000,localhost:5001 in two terminals.
Each process trains with its own share of the images. The mask is that of all of them together, and
the networks stay equal bit for bit: compare the fingerprints that are printed. The process of rank
0 writes the network to --output.

KERAS_BACKEND chooses TensorFlow (`MultiWorkerMirroredStrategy`), JAX (`keras.distribution`) or
PyTorch (`torch.distributed`). Half a minute with the default flags.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import keras
import numpy as np
from absl import flags, logging

import keras_freeze as kf

_ADDRESSES = flags.DEFINE_list(
    "addresses", None, "host:port of each process; the others must be able to reach the first."
)
_RANK = flags.DEFINE_integer("rank", None, "Which of the addresses is this one.", lower_bound=0)
_DATASET = flags.DEFINE_enum("dataset", "mnist_5k", list(kf.datasets.NAMES), "Which data.")
_MODEL = flags.DEFINE_enum("model", "lenet_300_100", list(kf.models.MODELS), "Which network.")
_FREEZE_RATE = flags.DEFINE_float("freeze_rate", 0.99, "Share of the weights that is frozen.")
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Passes over the training data.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 50, "Images of each process in a step.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, validation split and mask.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT = flags.DEFINE_string("output", "runs/several_machines.freeze", "The network's file.")


def main() -> None:
    addresses, rank = _ADDRESSES.value or [], _RANK.value
    if rank is None or rank >= len(addresses):
        raise ValueError(
            "Give the addresses of all processes, and the rank of this one among them. "
            f"Received: --addresses={','.join(addresses)}, --rank={rank}"
        )
    logging.set_verbosity(logging.WARNING)  # TensorFlow logs every kind of reduction
    scope = _join(addresses, rank)
    train = kf.datasets.load_arrays(
        _DATASET.value, "train", seed=_SEED.value, data_dir=_DATA_DIR.value
    )
    test = kf.datasets.load_arrays(_DATASET.value, "test", data_dir=_DATA_DIR.value)
    share = _share(train, rank, len(addresses))
    keras.utils.set_random_seed(_SEED.value)  # all processes must do the same
    with scope:
        network = _network()
    start = network.get_weights()
    mask = kf.freeze(network, *(array[: _BATCH_SIZE.value] for array in share))
    _fit(network, train, share, len(addresses))
    accuracy = network.evaluate(*test, batch_size=100, return_dict=True, verbose=0)["accuracy"]
    report = kf.report(network)
    kept = [
        np.array_equal(before[~mask[variable]], after[~mask[variable]])
        for before, after, variable in zip(
            start, network.get_weights(), network.weights, strict=True
        )
        if variable.path in mask
    ]
    print(f"Process {rank} of {len(addresses)}")
    print(f"Bytes of gradients in a step: {report.gradient_bytes:,} ", end="")
    print(f"instead of {report.dense_gradient_bytes:,}")
    print(f"Frozen weights kept their start: {all(kept)}")
    print(f"Fingerprint of the weights: {_fingerprint(network)}")
    print(f"Test accuracy: {accuracy:.2%}")
    if rank == 0:
        Path(_OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
        kf.save(network, _OUTPUT.value)
        print(f"Written: {_OUTPUT.value}")


def _join(addresses: Sequence[str], rank: int) -> contextlib.AbstractContextManager[Any]:
    """Connect with the other processes, and return the scope in which to build the network."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        task = {"type": "worker", "index": rank}
        config = {"cluster": {"worker": list(addresses)}, "task": task}
        os.environ["TF_CONFIG"] = json.dumps(config)
        return tf.distribute.MultiWorkerMirroredStrategy().scope()
    if keras.backend.backend() == "jax":
        keras.distribution.initialize(addresses[0], len(addresses), rank)
        parallel = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(parallel)
    else:
        import torch

        engine = "nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(
            engine, init_method=f"tcp://{addresses[0]}", world_size=len(addresses), rank=rank
        )
    return contextlib.nullcontext()


def _share(
    data: tuple[np.ndarray, np.ndarray], rank: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of one process: whole batches, as many for each."""
    num_steps = len(data[0]) // count // _BATCH_SIZE.value
    if not num_steps:
        raise ValueError(
            f"batch_size must be at most {len(data[0]) // count}, the images of a process. "
            f"Received: --batch_size={_BATCH_SIZE.value}"
        )
    images, labels = (array[rank::count][: num_steps * _BATCH_SIZE.value] for array in data)
    return images, labels


def _network() -> keras.Model:
    facts = kf.datasets.info(_DATASET.value)
    network = kf.models.MODELS[_MODEL.value](facts.num_classes, facts.image_shape, seed=_SEED.value)
    network.compile(
        optimizer=kf.FreezeOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), _FREEZE_RATE.value, l2=5e-4
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def _fit(
    network: keras.Model,
    train: tuple[np.ndarray, np.ndarray],
    share: tuple[np.ndarray, np.ndarray],
    count: int,
) -> None:
    batch_size = _BATCH_SIZE.value
    if keras.backend.backend() == "tensorflow":  # which gives each process its part itself
        share, batch_size = train, batch_size * count
    network.fit(*share, batch_size=batch_size, epochs=_EPOCHS.value, shuffle=False, verbose=0)


def _fingerprint(network: keras.Model) -> str:
    weights = (array.tobytes() for array in network.get_weights())
    return hashlib.sha256(b"".join(weights)).hexdigest()[:16]


if __name__ == "__main__":
    command_line.run(main)
