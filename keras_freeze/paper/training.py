"""Training as in the paper: one call for all of it (`kf.training`)."""

import os
from collections.abc import Sequence
from typing import Any

import keras

from keras_freeze.paper.preparation import Setup, prepare_run
from keras_freeze.paper.recipes import LEARNING_RATES, METHODS, Method, Recipe, recipe_for
from keras_freeze.paper.run import Run
from keras_freeze.paper.training_result import TrainingResult, versions

__all__ = [
    "LEARNING_RATES",
    "METHODS",
    "Method",
    "Recipe",
    "Setup",
    "TrainingResult",
    "prepare",
    "recipe_for",
    "train",
    "versions",
]


def train(
    dataset: str,
    model: str,
    method: str,
    freeze_rate: float,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: bool = True,
    **settings: Any,
) -> TrainingResult:
    """Train one of the paper's networks by one of its methods, and test it once.

    The network is built from the seed and frozen by its saliency on the first batch of training
    data ("grasp": on the first ten images of each class). The weights of the epoch with the best
    validation accuracy are kept (early stopping as in section 4), and these are evaluated on the
    test set. The same seed gives the same result on the same machine.

    Args:
        dataset: a name of `keras_freeze.datasets.NAMES`. "mnist_5k" needs no download.
        model: a name of `keras_freeze.models.MODELS`.
        method: a name of `METHODS`.
        freeze_rate: the freezing rate q, from 0 to 1. "baseline" trains everything whatever it is.
        data_dir: where TFDS keeps prepared data sets. None: its default.
        callbacks: more Keras callbacks for `fit`; what they log joins the history.
        verbose: whether to show progress on standard error.
        **settings: the other settings of `keras_freeze.runs.Run`: `seed` (defaults to 0),
            `epochs`, `learning_rate`, `l2`, `initializer` and `validation_fraction` (default to
            the data set's recipe), `criterion` (defaults to the method's), `distribution` and
            `mask` (default to "global" and "computed"), `schedule`, `reinitializer` and
            `steps_per_epoch` (default to None).

    Returns:
        A `TrainingResult`, with the trained network as `.model`. If the loss became NaN or
        infinite, training stopped there: its `diverged_epoch` says so, and a RuntimeWarning.

    Raises:
        ValueError, TypeError: for an unknown name, a number out of range, a network that does not
            fit the images, or a criterion that is not finite.
        FileNotFoundError, ConnectionError, ImportError: where the data cannot be loaded; see
            `keras_freeze.datasets.load`.

    Example:

    ```python
    result = train("mnist_5k", "lenet_5_caffe", "freezenet", 0.999, epochs=10)
    result.test_accuracy, result.best_epoch
    ```
    """
    setup = prepare(dataset, model, method, freeze_rate, data_dir=data_dir, **settings)
    return setup.fit(callbacks, verbose=verbose)


def prepare(
    dataset: str,
    model: str,
    method: str,
    freeze_rate: float,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Setup:
    """Build, compile and freeze a network and load its data: all of `train` but the training.

    Args:
        dataset, model, method, freeze_rate, data_dir, **settings: as in `train`.

    Returns:
        A `Setup`, whose `fit` trains.

    Raises:
        ValueError, TypeError, FileNotFoundError, ConnectionError, ImportError: as in `train`.

    Example:

    ```python
    setup = prepare("mnist_5k", "lenet_300_100", "freezenet", 0.99)
    report(setup.network), setup.fit().test_accuracy
    ```
    """
    return prepare_run(Run(dataset, model, method, freeze_rate, **settings), data_dir)
