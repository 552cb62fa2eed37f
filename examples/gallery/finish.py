"""What all programs of the gallery end with: save, load, compare, export."""

from pathlib import Path

import keras
import numpy as np
from absl import logging
from keras import ops

import keras_freeze as kf


def frozen_values(model: keras.Model, mask: kf.FreezeMask) -> list[np.ndarray]:
    """Return the frozen weights of each variable in the mask, to compare them before and after."""
    variables = model.trainable_variables
    return [ops.convert_to_numpy(variables[e.position])[~e.trained] for e in mask.entries]


def outputs_of(model: keras.Model, inputs: np.ndarray) -> np.ndarray:
    return ops.convert_to_numpy(model(inputs, training=False))


def save_load_export(
    model: keras.Model, frozen: list[np.ndarray], inputs: np.ndarray, folder: Path
) -> None:
    """Save a trained model as three formats, and check that each loads as the same model.

    Args:
        model: a frozen and trained model.
        frozen: its `frozen_values` from before training.
        inputs: a batch whose outputs are compared.
        folder: where `model.keras`, `model.freeze` and `saved_model` are written.

    Raises:
        ValueError: if outputs or frozen weights are not the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    print(kf.report(model))
    mask = kf.get_mask(model)
    outputs = outputs_of(model, inputs)
    model.save(folder / "model.keras")
    kf.save(model, folder / "model.freeze")
    loaders = {"model.keras": keras.models.load_model, "model.freeze": kf.load}
    for name, load in loaders.items():
        loaded = load(folder / name)
        if not np.array_equal(outputs_of(loaded, inputs), outputs):
            raise ValueError(f"{name} gives other outputs than the model that was saved.")
        after = frozen_values(loaded, mask)
        if not all(map(np.array_equal, frozen, after)):
            raise ValueError(f"Frozen weights in {name} are not what they were before training.")
        size = (folder / name).stat().st_size
        print(f"{name}: {size:,} bytes; loaded: same outputs, frozen weights as at the start")
    _export(model, inputs, outputs, folder / "saved_model")


def _export(model: keras.Model, inputs: np.ndarray, outputs: np.ndarray, folder: Path) -> None:
    logging.set_verbosity(logging.ERROR)  # TensorFlow logs every step of an export
    try:
        import tensorflow as tf

        # Keras exports augmentation layers as they are in training, unless told like this.
        served_inputs = keras.Input(batch_shape=model.input_shape, dtype=inputs.dtype.name)
        served_model = keras.Model(served_inputs, model(served_inputs, training=False))
        served_model.export(folder, verbose=False)
    except (ImportError, RuntimeError) as error:  # no TensorFlow; PyTorch
        print(f"saved_model: not exported: {str(error).splitlines()[0]}")
        return
    network = tf.saved_model.load(folder)
    served = network.serve(tf.constant(inputs)).numpy()
    if not np.allclose(served, outputs, rtol=1e-4, atol=1e-5):
        raise ValueError("saved_model gives other outputs than the model that was exported.")
    print(f"saved_model: served, largest difference {np.abs(served - outputs).max():.1g}")
