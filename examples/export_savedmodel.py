"""Export a trained network as a SavedModel, which needs neither keras_freeze nor Keras.

    python examples/export_savedmodel.py --model_file=runs/train/model.keras

Without a file it trains a small network for a few seconds first. A new process then loads the
SavedModel with TensorFlow alone, and must give the same outputs. Keras 3.15 exports one from
TensorFlow and JAX, not from PyTorch.
"""

import subprocess
import sys
from pathlib import Path

import command_line
import keras
import numpy as np
from absl import flags

import keras_freeze as kf

_MODEL_FILE = flags.DEFINE_string("model_file", None, "A .keras file that was saved before.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/export", "The folder to write to.")

_LOAD_AND_SERVE = """
import sys
import numpy as np
import tensorflow as tf

folder = sys.argv[1]
network = tf.saved_model.load(folder + "/saved_model")
outputs = network.serve(tf.constant(np.load(folder + "/inputs.npy")))
assert "keras_freeze" not in sys.modules
np.save(folder + "/outputs.npy", outputs.numpy())
"""


def main() -> None:
    command_line.require_backend("tensorflow", "jax")
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    network = _network()
    inputs = np.random.default_rng(0).normal(size=(32, *network.input_shape[1:]))
    inputs = inputs.astype(np.float32)
    np.save(folder / "inputs.npy", inputs)
    network.export(folder / "saved_model", verbose=False)
    child = subprocess.run(
        [sys.executable, "-c", _LOAD_AND_SERVE, str(folder)], stderr=subprocess.PIPE, text=True
    )
    if child.returncode:
        raise ValueError(f"The new process could not use the SavedModel: {child.stderr}")
    expected = keras.ops.convert_to_numpy(network(inputs, training=False))
    difference = float(np.abs(np.load(folder / "outputs.npy") - expected).max())
    print(f"SavedModel in {folder / 'saved_model'}, loaded without keras_freeze.")
    print(f"Largest difference of {expected.size} outputs: {difference:g}")
    if not difference <= 1e-6 * max(1.0, float(np.abs(expected).max())):
        raise ValueError("The outputs are not those of the network that was exported.")


def _network() -> keras.Model:
    if _MODEL_FILE.value is not None:
        return keras.models.load_model(_MODEL_FILE.value)
    return kf.training.train("mnist_5k", "lenet_300_100", "freezenet", 0.99, epochs=5).model


if __name__ == "__main__":
    command_line.run(main)
