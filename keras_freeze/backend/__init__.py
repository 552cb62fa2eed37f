"""The few operations that differ between Keras's backends: one module each, the same functions.

`defaults` has what a backend does unless its own module says otherwise.
"""

# ruff: noqa: F403 - the modules are alike, which a test checks
import keras

from keras_freeze.backend.defaults import *

if keras.backend.backend() == "tensorflow":
    from keras_freeze.backend.tensorflow import *
elif keras.backend.backend() == "jax":
    from keras_freeze.backend.jax import *
elif keras.backend.backend() == "torch":
    from keras_freeze.backend.torch import *  # type: ignore[assignment]
else:
    raise ImportError(
        "keras_freeze runs on Keras's TensorFlow, JAX and PyTorch backends. "
        f"Received: KERAS_BACKEND={keras.backend.backend()}"
    )
