"""Training as in the paper: its hyperparameters, its methods by name, and one call for it all."""

import csv
import functools
import itertools
import json
import math
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import keras
import numpy as np

from keras_freeze import backend, initializers
from keras_freeze._utils.files import replacing
from keras_freeze._version import __version__
from keras_freeze.criteria.criteria import Criterion, check_criterion
from keras_freeze.criteria.grasp import GraSP, as_grasp
from keras_freeze.freezing import freeze
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.paper import datasets, models
from keras_freeze.paper.datasets.sources import import_tensorflow
from keras_freeze.pruning import PruningCheck, check_pruning
from keras_freeze.reinitialization import reinitialize
from keras_freeze.reporting import Report, report

if TYPE_CHECKING:
    import tensorflow as tf

T = TypeVar("T")

# Up to this size Python costs more than arithmetic. LeNet-300-100 on two cores, ms a step: 2.6 with
# one step an execution, 1.4 with 100.
_SMALL_NETWORK = 1_000_000
_STEPS_PER_EXECUTION = 100
_STEPS_WORTH_XLA = 10_000

_EVALUATION_BATCH = 500

# Far from the seeds that people number their runs with.
_OTHER_SEED = 2**31


class Method(NamedTuple):
    """What one of the paper's names stands for.

    Attributes:
        criterion: which weights are trained; see `FreezeOptimizer`.
        frozen_weights: what becomes of the others; see `FreezeOptimizer`.
        freeze_rate: the only rate the method has; None where it is a choice.
    """

    criterion: str | Criterion
    frozen_weights: str
    freeze_rate: float | None = None


LEARNING_RATES = tuple(0.1 * 2.0**n for n in range(-4, 5))
"""The paper's grid of learning rates (supplement, "Learning Rate Experiments")."""

METHODS: Mapping[str, Method] = {
    "baseline": Method("snip", "keep", freeze_rate=0.0),
    "freezenet": Method("snip", "keep"),
    "freezenet-wd": Method("snip", "decay"),
    "snip": Method("snip", "zero"),
    "random": Method("random", "keep"),
    # As in the published code, whose score the paper uses.
    "grasp": Method(GraSP(samples_per_class=10), "zero"),
}
"""The paper's methods by name."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of SGD with momentum and a rate that is divided by ten in steps.

    Attributes:
        epochs: how many times the training images are seen.
        batch_size: images a step.
        learning_rate: the rate of the first steps.
        drop_every: divide the rate by ten each time after so many steps; None for never.
        drop_after: divide it by ten after each of these epochs, which may be fractions.
        momentum: of SGD.
        l2: coefficient of the coupled weight decay; see `FreezeOptimizer`.
        initializer: name of the kernels' initialiser; see `keras_freeze.initializers.get`.
        validation_fraction: share of the training set that is held out to choose the best epoch.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    drop_every: int | None = None
    drop_after: tuple[float, ...] = ()
    momentum: float = 0.9
    l2: float = 5e-4
    initializer: str = "xavier_normal"
    validation_fraction: float = 0.1

    def shortened(self, epochs: int) -> "Recipe":
        """The same schedule in another number of epochs, its drops moved in proportion."""
        scale = epochs / self.epochs
        every = None if self.drop_every is None else max(1, round(self.drop_every * scale))
        after = tuple(epoch * scale for epoch in self.drop_after)
        return replace(self, epochs=epochs, drop_every=every, drop_after=after)

    def drop_steps(self, steps_per_epoch: int) -> list[int]:
        """The numbers of steps after each of which the rate is divided by ten.

        Example:
            >>> recipe_for("cifar10").drop_steps(352)
            [30000, 60000]
        """
        total = self.epochs * steps_per_epoch
        steps = {round(epoch * steps_per_epoch) for epoch in self.drop_after}
        if self.drop_every is not None:
            steps.update(range(self.drop_every, total, self.drop_every))
        return sorted(step for step in steps if 0 < step < total)

    def schedule(self, steps_per_epoch: int) -> Any:
        """The learning rate as a Keras schedule, or as a number if it never drops."""
        drops = self.drop_steps(steps_per_epoch)
        if not drops:
            return self.learning_rate
        # Keras keeps a value up to and with the boundary, and counts steps from 0.
        return keras.optimizers.schedules.PiecewiseConstantDecay(
            [step - 1 for step in drops],
            [self.learning_rate / 10**number for number in range(len(drops) + 1)],
        )


_RECIPES = {
    # MNIST's recipe for 4,000 images: smaller batches, for as many steps as a minute has. At
    # MNIST's rate of 0.1 a dense LeNet-5-Caffe sometimes never recovers from its first steps.
    "mnist_5k": Recipe(
        40,
        50,
        0.05,
        drop_after=(20, 30),
        validation_fraction=datasets.info("mnist_5k").validation_fraction,
    ),
    "mnist": Recipe(250, 100, 0.1, drop_every=25_000),
    "cifar10": Recipe(250, 128, 0.1, drop_every=30_000),
    "cifar100": Recipe(250, 128, 0.1, drop_every=30_000, initializer="kaiming_uniform"),
    "tiny_imagenet": Recipe(100, 128, 0.01, drop_after=(30, 60, 80), initializer="kaiming_uniform"),
}


def recipe_for(
    dataset: str,
    *,
    epochs: int | None = None,
    learning_rate: float | None = None,
    l2: float | None = None,
    initializer: str | None = None,
    validation_fraction: float | None = None,
) -> Recipe:
    """The paper's hyperparameters for a data set, or the same with some of them replaced.

    They are those of the supplement, "Training Hyperparameters" and "Tiny ImageNet Experiment".
    "mnist_5k" has a recipe of its own, made from MNIST's, that takes about a minute.

    Args:
        dataset: a name of `keras_freeze.datasets.NAMES`.
        epochs: shortens the schedule in proportion: 25 epochs instead of MNIST's 250 divide the
            rate by ten every 2,500 steps instead of every 25,000. None: the full schedule.
        learning_rate: the rate of the first steps. None: the recipe's.
        l2: the coefficient of the coupled weight decay. None: the recipe's.
        initializer: the name of the kernels' initialiser. None: the recipe's.
        validation_fraction: the share of the training set held out. None: the recipe's.

    Returns:
        A `Recipe`.

    Raises:
        ValueError: for an unknown name or a number out of range.
        TypeError: for a number of another type.

    Example:
        >>> recipe_for("mnist", epochs=25).drop_every
        2500
    """
    recipe = check_choice("dataset", dataset, _RECIPES)
    if epochs is not None:
        if isinstance(epochs, bool) or not isinstance(epochs, Integral):
            raise TypeError(f"epochs must be an integer. Received: epochs={epochs!r}")
        if epochs < 1:
            raise ValueError(f"epochs must be at least 1. Received: epochs={epochs!r}")
        recipe = recipe.shortened(int(epochs))
    if learning_rate is not None:
        rate = _check_real("learning_rate", learning_rate)
        if not 0 < rate < math.inf:
            raise ValueError(
                f"learning_rate must be finite and above 0. Received: learning_rate={rate}"
            )
        recipe = replace(recipe, learning_rate=rate)
    if l2 is not None:
        decay = _check_real("l2", l2)
        if not 0 <= decay < math.inf:
            raise ValueError(f"l2 must be finite and at least 0. Received: l2={decay}")
        recipe = replace(recipe, l2=decay)
    if initializer is not None:
        check_choice("initializer", initializer, initializers.INITIALIZERS)
        recipe = replace(recipe, initializer=initializer)
    if validation_fraction is not None:
        fraction = _check_real("validation_fraction", validation_fraction)
        if not 0 < fraction < 1:
            raise ValueError(
                "validation_fraction must lie between 0 and 1, both excluded. "
                f"Received: validation_fraction={fraction}"
            )
        recipe = replace(recipe, validation_fraction=fraction)
    return recipe


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What came out of one training run.

    Attributes:
        dataset, model_name, method: names, as `train` took them.
        criterion, frozen_weights: what the method stands for, or the criterion asked for instead.
        freeze_rate: the freezing rate q that was asked for; `report` has the exact one.
        seed: of the weights, the validation split, the order of the data and the mask.
        recipe: the hyperparameters.
        reinitializer: name of the initialiser of algorithm S1, or None.
        report: counts, freezing rates and sizes.
        history: "loss", "accuracy", "val_loss" and "val_accuracy" after each epoch, and what
            callbacks logged.
        best_epoch: the epoch with the best validation accuracy, from 1; the first of several. 0 if
            no epoch had a finite validation loss: the weights are then those of the start.
        validation_accuracy, validation_loss: of that epoch; None if it is 0.
        test_accuracy, test_loss: of its weights on the test set, which decided nothing.
        pruning: for FreezeNet-WD, the test set's metrics before and after its frozen weights are
            set to zero, and the largest of these; None for other methods.
        diverged_epoch: the epoch whose loss was no longer finite, after which training stopped;
            None if all went well.
        seconds: wall time of the epochs, validation included.
        versions: of Python and the packages that matter.
        model: the network, with the weights and the optimizer state of the best epoch.
    """

    dataset: str
    model_name: str
    method: str
    criterion: str
    frozen_weights: str
    freeze_rate: float
    seed: int
    recipe: Recipe
    reinitializer: str | None
    report: Report
    history: dict[str, list[float]]
    best_epoch: int
    validation_accuracy: float | None
    validation_loss: float | None
    test_accuracy: float
    test_loss: float
    pruning: PruningCheck | None
    diverged_epoch: int | None
    seconds: float
    versions: dict[str, str]
    model: keras.Model = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the network, for JSON; a number that is not finite becomes None."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        del values["model"]
        values["model"] = values.pop("model_name")
        values["recipe"] = asdict(self.recipe)
        values["report"] = self.report.to_dict()
        values["pruning"] = None if self.pruning is None else asdict(self.pruning)
        return jsonable(values)

    def summary(self) -> str:
        """The accuracies and how they came about, in a line or two."""
        lines = [
            f"Test accuracy {self.test_accuracy:.2%} with the weights of "
            + (
                f"epoch {self.best_epoch}, the best in validation "
                f"({self.validation_accuracy:.2%}); {duration(self.seconds)} of training"
                if self.best_epoch
                else "the start, since no epoch had a finite loss"
            )
        ]
        if self.diverged_epoch is not None:
            lines.append(
                f"Training stopped in epoch {self.diverged_epoch}: the loss was no longer finite. "
                f"A lower learning rate than {self.recipe.learning_rate:g} may help."
            )
        if self.pruning is not None:
            lines.append(
                f"With the frozen weights set to zero, of which the largest is "
                f"{self.pruning.largest_frozen_weight:.2g}: {self.pruning.after['accuracy']:.2%}"
            )
        return "\n".join(lines)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes result.json, history.csv and model.keras into a folder, which is created.

        A file that is there already is replaced, as a whole or not at all.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "result.json") as path:
            path.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")
        with replacing(folder / "history.csv") as path, path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", *self.history])
            writer.writerows(
                [epoch, *values]
                for epoch, values in enumerate(zip(*self.history.values(), strict=True), start=1)
            )
        with replacing(folder / "model.keras") as path:
            self.model.save(path)


def train(
    dataset: str,
    model: str,
    method: str,
    freeze_rate: float,
    *,
    criterion: str | Criterion | None = None,
    epochs: int | None = None,
    seed: int = 0,
    learning_rate: float | None = None,
    l2: float | None = None,
    initializer: str | None = None,
    reinitializer: str | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    validation_fraction: float | None = None,
    steps_per_epoch: int | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: bool = True,
) -> TrainingResult:
    """Trains one of the paper's networks by one of its methods, and tests it once.

    The network is built from the seed and frozen by its saliency on the first batch of training
    data ("grasp": on the first ten images of each class). The weights of the epoch with the best
    validation accuracy are kept (early stopping as in section 4), and these are evaluated on the
    test set. The same seed gives the same result on the same machine.

    Args:
        dataset: a name of `keras_freeze.datasets.NAMES`. "mnist_5k" needs no download.
        model: a name of `keras_freeze.models.MODELS`.
        method: a name of `METHODS`.
        freeze_rate: the freezing rate q, from 0 to 1. "baseline" trains everything whatever it is.
        criterion: chooses the trained weights instead of the method's own criterion; see
            `FreezeOptimizer`.
        epochs: shortens the recipe's schedule in proportion; see `recipe_for`.
        seed: of the weights, the validation split, the order of the data, the augmentation and the
            mask; an integer in [0, 2**32).
        learning_rate: the rate of the first steps, instead of the recipe's.
        l2: coefficient of the coupled weight decay, instead of the recipe's.
        initializer: name of the kernels' initialiser, instead of the recipe's.
        reinitializer: name of an initialiser from which all weights are drawn anew, with another
            seed, once the mask is found (algorithm S1). None: they stay.
        data_dir: where TFDS keeps prepared data sets; None for its default.
        validation_fraction: share of the training set for validation, instead of the recipe's.
        steps_per_epoch: uses the first so many batches only of each pass over the training,
            validation and test images, for a quick look. None: all.
        callbacks: more Keras callbacks for `fit`; what they log joins the history.
        verbose: whether to show progress on standard error.

    Returns:
        A `TrainingResult`, with the trained network as `.model`. If the loss became NaN or
        infinite, training stopped there: its `diverged_epoch` says so, and a RuntimeWarning.

    Raises:
        ValueError, TypeError: for an unknown name, a number out of range, a network that does not
            fit the images, or a criterion that is not finite.
        FileNotFoundError, ConnectionError, ImportError: where the data cannot be had; see
            `keras_freeze.datasets.load`.

    Example:

    ```python
    result = train("mnist_5k", "lenet_5_caffe", "freezenet", 0.999)
    result.test_accuracy, result.best_epoch
    ```
    """
    setup = prepare(
        dataset,
        model,
        method,
        freeze_rate,
        criterion=criterion,
        epochs=epochs,
        seed=seed,
        learning_rate=learning_rate,
        l2=l2,
        initializer=initializer,
        reinitializer=reinitializer,
        data_dir=data_dir,
        validation_fraction=validation_fraction,
        steps_per_epoch=steps_per_epoch,
    )
    return setup.fit(callbacks, verbose=verbose)


def prepare(
    dataset: str,
    model: str,
    method: str,
    freeze_rate: float,
    *,
    criterion: str | Criterion | None = None,
    epochs: int | None = None,
    seed: int = 0,
    learning_rate: float | None = None,
    l2: float | None = None,
    initializer: str | None = None,
    reinitializer: str | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    validation_fraction: float | None = None,
    steps_per_epoch: int | None = None,
) -> "Setup":
    """Builds, compiles and freezes a network and loads its data: all of `train` but the training.

    Takes `train`'s arguments and raises its errors.

    Returns:
        A `Setup`, whose `fit` trains.

    Example:

    ```python
    setup = prepare("mnist_5k", "lenet_300_100", "freezenet", 0.99)
    report(setup.network), setup.fit().test_accuracy
    ```
    """
    recipe = recipe_for(
        dataset,
        epochs=epochs,
        learning_rate=learning_rate,
        l2=l2,
        initializer=initializer,
        validation_fraction=validation_fraction,
    )
    build = check_choice("model", model, models.MODELS)
    chosen = check_choice("method", method, METHODS)
    rate = check_freeze_rate(freeze_rate)
    if chosen.freeze_rate is not None:
        rate = chosen.freeze_rate
    criterion = check_criterion(chosen.criterion if criterion is None else criterion)
    if reinitializer is not None:
        check_choice("reinitializer", reinitializer, initializers.INITIALIZERS)
    check_steps(steps_per_epoch)
    facts = datasets.info(dataset)
    network = build(facts.num_classes, facts.image_shape, initializer=recipe.initializer, seed=seed)
    source: dict[str, Any] = {
        "seed": seed,
        "data_dir": data_dir,
        "validation_fraction": recipe.validation_fraction,
    }
    all_batches = _training_batches(dataset, recipe.batch_size, source)
    batches = all_batches
    if steps_per_epoch is not None:
        batches = functools.partial(_first_batches, all_batches, steps_per_epoch)
    validation, test = (
        datasets.load(dataset, split=split, batch_size=_EVALUATION_BATCH, **source)
        for split in ("validation", "test")
    )
    if steps_per_epoch is not None:
        validation, test = validation.take(steps_per_epoch), test.take(steps_per_epoch)
    steps = len(batches())
    optimizer = FreezeOptimizer(
        keras.optimizers.SGD(recipe.schedule(steps), momentum=recipe.momentum),
        freeze_rate=rate,
        criterion=criterion,
        frozen_weights=chosen.frozen_weights,
        l2=recipe.l2,
        seed=seed,
    )
    _compile(network, optimizer, steps, recipe.epochs)
    freeze(network, all_batches(), steps=_batches_to_score(criterion, facts, recipe, all_batches()))
    if keras.backend.backend() != "tensorflow":
        _build_metrics(network, all_batches())
    if reinitializer is not None:
        reinitialize(network, reinitializer, seed=(int(seed) + _OTHER_SEED) % 2**32)
    return Setup(
        dataset=dataset,
        model_name=model,
        method=method,
        criterion=_name_of(criterion),
        frozen_weights=chosen.frozen_weights,
        freeze_rate=rate,
        seed=int(seed),
        recipe=recipe,
        reinitializer=reinitializer,
        network=network,
        batches=batches,
        steps_per_epoch=steps,
        validation=validation,
        test=test,
    )


@dataclass(frozen=True, eq=False)
class Setup:
    """A network that is compiled and frozen, and the data to train it with.

    Attributes:
        dataset, model_name, method, criterion, frozen_weights, freeze_rate, seed, recipe,
            reinitializer: as in `TrainingResult`.
        network: the network.
        batches: a function whose every call gives the training batches, from the first pass on.
        steps_per_epoch: how many batches a pass has.
        validation, test: batches of these splits.
    """

    dataset: str
    model_name: str
    method: str
    criterion: str
    frozen_weights: str
    freeze_rate: float
    seed: int
    recipe: Recipe
    reinitializer: str | None
    network: keras.Model
    batches: "Callable[[], tf.data.Dataset]"
    steps_per_epoch: int
    validation: "tf.data.Dataset"
    test: "tf.data.Dataset"

    def fit(
        self, callbacks: Sequence[keras.callbacks.Callback] = (), *, verbose: bool = True
    ) -> TrainingResult:
        """Trains the network, puts back its best weights and tests them once; see `train`."""
        best = _KeepBest()
        divergence = _StopWhenNotFinite()
        progress = [_Progress(self.recipe.epochs, self.steps_per_epoch, best)] if verbose else []
        start = time.perf_counter()
        history = self.network.fit(
            self.batches(),
            validation_data=self.validation,
            epochs=self.recipe.epochs,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, best, divergence, *progress],
        ).history
        seconds = time.perf_counter() - start
        pruning = None
        if self.frozen_weights == "decay":
            pruning = check_pruning(self.network, self.test)
            tested = pruning.before  # the network as it is
        else:
            tested = self.network.evaluate(self.test, return_dict=True, verbose=0)
        of_best = {
            name: values[best.epoch - 1] if best.epoch else None for name, values in history.items()
        }
        result = TrainingResult(
            dataset=self.dataset,
            model_name=self.model_name,
            method=self.method,
            criterion=self.criterion,
            frozen_weights=self.frozen_weights,
            freeze_rate=self.freeze_rate,
            seed=self.seed,
            recipe=self.recipe,
            reinitializer=self.reinitializer,
            report=report(self.network),
            history=history,
            best_epoch=best.epoch,
            validation_accuracy=of_best["val_accuracy"],
            validation_loss=of_best["val_loss"],
            test_accuracy=tested["accuracy"],
            test_loss=tested["loss"],
            pruning=pruning,
            diverged_epoch=divergence.epoch,
            seconds=seconds,
            versions=versions(),
            model=self.network,
        )
        if result.diverged_epoch is not None:
            warnings.warn(result.summary(), RuntimeWarning, stacklevel=2)
        return result


def check_steps(steps: Any) -> None:
    """Refuses what cannot be a number of steps an epoch."""
    if steps is None:
        return
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise TypeError(f"steps_per_epoch must be an integer. Received: steps_per_epoch={steps!r}")
    if steps < 1:
        raise ValueError(f"steps_per_epoch must be at least 1. Received: steps_per_epoch={steps!r}")


def _first_batches(make: "Callable[[], tf.data.Dataset]", steps: int) -> "tf.data.Dataset":
    return make().take(steps)


def _batches_to_score(
    criterion: str | Criterion, facts: datasets.DatasetInfo, recipe: Recipe, data: "tf.data.Dataset"
) -> int:
    """How many batches to freeze with: enough to find GraSP's examples of each class in them."""
    grasp = as_grasp(criterion)
    if grasp is None or grasp.samples_per_class is None:
        return 1
    wanted = grasp.samples_per_class * facts.num_classes
    # Five times as many are certain to hold them, unless classes are rarer than in any of our sets.
    return min(len(data), -(-5 * wanted // recipe.batch_size))


def _training_batches(
    dataset: str, batch_size: int, source: dict[str, Any]
) -> "Callable[[], tf.data.Dataset]":
    """A function whose every call gives the same batches, from the first epoch on."""
    if datasets.info(dataset).augment:
        return functools.partial(datasets.load, dataset, batch_size=batch_size, **source)
    constant = import_tensorflow().constant
    images, labels = (constant(array) for array in datasets.load_arrays(dataset, **source))
    return functools.partial(_batches_in_memory, images, labels, batch_size, source["seed"])


def _batches_in_memory(
    images: "tf.Tensor", labels: "tf.Tensor", batch_size: int, seed: int
) -> "tf.data.Dataset":
    """Batches in a new order on each pass, which depends on the seed and the pass alone."""
    tf = import_tensorflow()
    count = len(labels)
    passes = itertools.count()

    def order() -> Iterator[np.ndarray]:
        yield np.random.default_rng([seed, next(passes)]).permutation(count)

    # Python runs once an epoch; a generator of batches took a fifth more time a step.
    indices = tf.data.Dataset.from_generator(
        order, output_signature=tf.TensorSpec((count,), tf.int64)
    )
    indices = indices.unbatch().batch(batch_size)
    indices = indices.apply(tf.data.experimental.assert_cardinality(-(-count // batch_size)))
    return indices.map(
        lambda chosen: (tf.gather(images, chosen), tf.gather(labels, chosen))
    ).prefetch(tf.data.AUTOTUNE)


def _compile(
    network: keras.Model, optimizer: FreezeOptimizer, steps_per_epoch: int, epochs: int
) -> None:
    is_small = network.count_params() < _SMALL_NETWORK
    is_merged = is_small and keras.backend.backend() != "torch"  # which runs one step at a time
    # On a CPU, XLA makes small steps of dense layers a tenth faster and convolutions several times
    # slower; compiling takes seconds.
    has_convolutions = any(len(variable.shape) > 2 for variable in network.trainable_variables)
    is_long = steps_per_epoch * epochs >= _STEPS_WORTH_XLA
    network.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=min(steps_per_epoch, _STEPS_PER_EXECUTION) if is_merged else 1,
        jit_compile=True if is_merged and is_long and not has_convolutions else "auto",
    )


def _build_metrics(network: keras.Model, data: "tf.data.Dataset") -> None:
    """Keeps `fit` on JAX and PyTorch from doing so, with a pass of the training data gone."""
    x, y = next(data.as_numpy_iterator())
    network.compute_metrics(x, y, network(x, training=False))
    network.reset_metrics()


def versions() -> dict[str, str]:
    """Of Python and the packages that results depend on."""
    return {
        "python": platform.python_version(),
        "keras_freeze": __version__,
        "keras": keras.__version__,
        keras.backend.backend(): backend.VERSION,
        "numpy": np.__version__,
    }


class _KeepBest(keras.callbacks.Callback):
    """Puts back the weights and the optimizer state of the first best validation epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.accuracy = -math.inf

    def on_train_begin(self, logs: Any = None) -> None:
        self._keep()  # in case no epoch has a finite loss

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if math.isfinite(logs["val_loss"]) and logs["val_accuracy"] > self.accuracy:
            self.epoch, self.accuracy = epoch + 1, logs["val_accuracy"]
            self._keep()

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights(self._weights)
        # FreezeNet-WD's frozen weights and the factor that they have shrunk by belong together.
        self.model.optimizer.set_weights(self._state)

    def _keep(self) -> None:
        self._weights = [backend.to_numpy(v) for v in self.model.weights]
        self._state = [backend.to_numpy(v) for v in self.model.optimizer.variables]


class _StopWhenNotFinite(keras.callbacks.Callback):
    """Ends training once the loss is NaN or infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch: int | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The loss so far in this epoch, which stays what it is once it is not finite.
        if not math.isfinite(logs["loss"]):
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not (math.isfinite(logs["loss"]) and math.isfinite(logs["val_loss"])):
            self.epoch = epoch + 1
            self.model.stop_training = True


_clock = time.monotonic  # a name of its own, which tests replace


class _Progress(keras.callbacks.Callback):
    """One line on standard error: kept up to date on a terminal, else one every 10 seconds."""

    _SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, epochs: int, steps: int, best: _KeepBest) -> None:
        super().__init__()
        self._epochs, self._steps, self._best = epochs, steps, best
        self._is_terminal = sys.stderr.isatty()
        self._epoch = 0
        self._numbers = ""

    def on_train_begin(self, logs: Any = None) -> None:
        self._start = self._last_line = _clock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_terminal:
            self._show(self._epoch + min(1.0, (batch + 1) / self._steps))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1
        self._numbers = (
            f": loss {logs['loss']:.4f}, accuracy {logs['accuracy']:.1%}, validation "
            f"{logs['val_accuracy']:.1%}"
        )
        if self._best.epoch:
            self._numbers += f", best {self._best.accuracy:.1%} in {self._best.epoch}"
        is_due = _clock() - self._last_line >= self._SECONDS_BETWEEN_LINES
        if self._is_terminal or is_due or self._epoch == self._epochs:
            self._show(self._epoch)
            self._last_line = _clock()

    def on_train_end(self, logs: Any = None) -> None:
        if self._is_terminal:
            print(file=sys.stderr)

    def _show(self, epochs_done: float) -> None:
        elapsed = _clock() - self._start
        left = elapsed * (self._epochs / epochs_done - 1)
        clock = f"{duration(left)} left" if left else f"took {duration(elapsed)}"
        line = f"epoch {math.ceil(epochs_done)}/{self._epochs}, {clock}{self._numbers}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time in words, such as "2 min 05 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def check_choice(kind: str, name: Any, table: Mapping[str, T]) -> T:
    if not isinstance(name, str) or name not in table:
        raise ValueError(
            f"{kind} must be one of {', '.join(map(repr, table))}. Received: {kind}={name!r}"
        )
    return table[name]


def _name_of(criterion: str | Criterion) -> str:
    if isinstance(criterion, (str, GraSP)):
        return str(criterion)
    return getattr(criterion, "__name__", type(criterion).__name__)


def _check_real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number. Received: {name}={value!r}")
    return float(value)


def jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
