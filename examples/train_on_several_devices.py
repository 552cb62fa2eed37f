"""Train one network on several devices at once; half a minute with the default flags.

    python examples/train_on_several_devices.py --logical_cpus=2
    python examples/train_on_several_devices.py --dataset=mnist --data_dir=/path/to/data

The first splits the CPU into two devices, so that it runs everywhere; without the flag all GPUs
take part. Each device has a copy of the network and trains it on its share of every batch. The
copies stay equal bit for bit, and with them the frozen weights, which keep their random start.
Needs Keras on TensorFlow.
"""

import command_line
import keras
import numpy as np
import tensorflow as tf
from absl import flags, logging

import keras_freeze as kf

_LOGICAL_CPUS = flags.DEFINE_integer(
    "logical_cpus", 0, "Devices to split the CPU into. Default: all GPUs instead.", lower_bound=0
)
_DATASET = flags.DEFINE_enum("dataset", "mnist_5k", list(kf.datasets.NAMES), "Which data.")
_MODEL = flags.DEFINE_enum("model", "lenet_300_100", list(kf.models.MODELS), "Which network.")
_FREEZE_RATE = flags.DEFINE_float("freeze_rate", 0.99, "Share of the weights that is frozen.")
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Passes over the training data.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 100, "Images in a batch, which the devices share.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, validation split, data order and mask.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")


def main() -> None:
    command_line.require_backend("tensorflow")
    logging.set_verbosity(logging.WARNING)  # TensorFlow logs every kind of reduction
    devices = _devices()
    if _BATCH_SIZE.value < len(devices):
        raise ValueError(
            f"batch_size must be at least the number of devices, {len(devices)}. "
            f"Received: --batch_size={_BATCH_SIZE.value}"
        )
    strategy = tf.distribute.MirroredStrategy(devices)
    source = {"seed": _SEED.value, "data_dir": _DATA_DIR.value}
    train = kf.datasets.load(_DATASET.value, batch_size=_BATCH_SIZE.value, **source)
    test = kf.datasets.load(_DATASET.value, split="test", batch_size=500, **source)
    facts = kf.datasets.info(_DATASET.value)
    with strategy.scope():
        network = kf.models.MODELS[_MODEL.value](
            facts.num_classes, facts.image_shape, seed=_SEED.value
        )
        network.compile(
            optimizer=kf.FreezeOptimizer(
                keras.optimizers.SGD(0.1, momentum=0.9), _FREEZE_RATE.value, l2=5e-4
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    mask = kf.freeze(network, train)
    start = network.get_weights()
    network.fit(train, epochs=_EPOCHS.value, shuffle=False, verbose=0)
    print(kf.report(network))
    print()
    kept = [
        np.array_equal(before[~mask[variable]], variable.numpy()[~mask[variable]])
        for before, variable in zip(start, network.weights, strict=True)
        if variable.path in mask
    ]
    accuracy = network.evaluate(test, return_dict=True, verbose=0)["accuracy"]
    print(f"Devices: {strategy.num_replicas_in_sync}")
    print(f"Copies of the network are equal: {_copies_are_equal(strategy, network)}")
    print(f"Frozen weights kept their start: {all(kept)}")
    print(f"Test accuracy {accuracy:.2%}")


def _devices() -> list[str]:
    """Return the names of the devices to train on; split the CPU if the flag says so."""
    number = _LOGICAL_CPUS.value
    if number:
        (cpu,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(number)]
        tf.config.set_logical_device_configuration(cpu, parts)
        return [f"CPU:{index}" for index in range(number)]
    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    if not gpus:
        raise ValueError("TensorFlow finds no GPU: try --logical_cpus=2.")
    return gpus


def _copies_are_equal(strategy: tf.distribute.Strategy, network: keras.Model) -> bool:
    copies = [strategy.experimental_local_results(v.value) for v in network.weights]
    return all(
        np.array_equal(first.numpy(), other.numpy())
        for first, *others in copies
        for other in others
    )


if __name__ == "__main__":
    command_line.run(main)
