"""Everything that a run needs before its first step: data, network, optimizer and mask."""

import contextlib
import functools
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from keras_freeze.criteria.grasp_criterion import as_grasp
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.paper import datasets
from keras_freeze.paper.backup import Backup, Interrupted
from keras_freeze.paper.datasets.training_batches import training_batches
from keras_freeze.paper.masking import (
    GRADUAL,
    first_epoch_with_last_mask,
    freeze_network,
    schedule_callbacks,
    steps_between_changes,
)
from keras_freeze.paper.models import MODELS
from keras_freeze.paper.several_steps import several_steps, steps_together
from keras_freeze.paper.training_callbacks import KeepBest, Progress, StopWhenNotFinite
from keras_freeze.paper.training_result import TrainingResult, WithRun, versions
from keras_freeze.pruning import check_pruning
from keras_freeze.reinitialization import reinitialize
from keras_freeze.reporting import report

if TYPE_CHECKING:
    import tensorflow as tf

    from keras_freeze.paper.run import Run

# Up to this size Python costs more than arithmetic. LeNet-300-100 on two cores, ms per step: 2.6
# with one step per execution, 1.4 with 100.
_SMALL_NETWORK = 1_000_000
_STEPS_PER_EXECUTION = 100
_STEPS_WORTH_XLA = 10_000

_EVALUATION_BATCH = 500

# Far from the seeds that people number their runs with.
_OTHER_SEED = 2**31


@dataclass(frozen=True, eq=False)
class Setup(WithRun):
    """A network that is compiled and frozen, and the data to train it with.

    Attributes of the run can be read here, too, as in `TrainingResult`.

    Attributes:
        run: the settings, a `keras_freeze.runs.Run`.
        network: the network.
        batches: a function whose every call gives the training batches, from the first pass on.
        steps_per_epoch: number of batches of a pass.
        validation, test: batches of these splits.
        together: how many batches `fit` trains by in one call.
    """

    run: "Run"
    network: keras.Model
    batches: "Callable[[], tf.data.Dataset]"
    steps_per_epoch: int
    validation: "tf.data.Dataset"
    test: "tf.data.Dataset"
    together: int = 1

    def fit(
        self,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        *,
        verbose: bool = True,
        backup: str | os.PathLike[str] | None = None,
    ) -> TrainingResult:
        """Train the network, restore its best weights and test them once.

        Args:
            callbacks: more Keras callbacks; what they log joins the history.
            verbose: whether to show progress on standard error.
            backup: a file for the state of the training, as `keras_freeze.runs.Run.execute`
                takes it. None: there is none.
        """
        first = first_epoch_with_last_mask(self.run, self.steps_per_epoch)
        best, divergence = KeepBest(first), StopWhenNotFinite()
        schedule = schedule_callbacks(self.run, self.batches, self.steps_per_epoch)
        history, seconds = self._train(
            [*schedule, *callbacks, best, divergence], best, verbose, None if schedule else backup
        )
        pruning = None
        if self.run.frozen_weights == "decay":
            pruning = check_pruning(self.network, self.test)
            tested = pruning.before  # the network as it is
        else:
            tested = self.network.evaluate(self.test, return_dict=True, verbose=0)
        of_best = {
            name: values[best.epoch - 1] if best.epoch else None for name, values in history.items()
        }
        result = TrainingResult(
            run=self.run,
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

    def _train(
        self,
        callbacks: list[keras.callbacks.Callback],
        best: KeepBest,
        verbose: bool,
        backup: str | os.PathLike[str] | None,
    ) -> tuple[dict[str, list[float]], float]:
        """Train, from the backup on if there is one; return the logs and the seconds of all."""
        network, data = self.network, self.batches()
        before = Interrupted()
        if backup is not None:
            saving = Backup(backup, self.run, network, best)
            before = saving.restore()
            callbacks = [*callbacks, saving]
        for _ in range(before.epochs):
            next(iter(data))  # the order of the next pass is that of the next epoch
        epochs = self.run.recipe.epochs
        if verbose:
            calls = self.steps_per_epoch // self.together
            callbacks = [*callbacks, Progress(epochs, calls, best, before.epochs)]
        start = time.perf_counter()
        with contextlib.ExitStack() as training:
            if self.together > 1:
                data = data.batch(self.together)
                training.enter_context(several_steps(network))
            new = network.fit(
                data,
                validation_data=self.validation,
                epochs=epochs,
                initial_epoch=before.epochs,
                shuffle=False,
                verbose=0,
                callbacks=callbacks,
            ).history
        history = {name: [*before.history.get(name, ()), *values] for name, values in new.items()}
        return history, before.seconds + time.perf_counter() - start


def prepare_run(run: "Run", data_dir: str | os.PathLike[str] | None = None) -> Setup:
    """Load the data of a run; build, compile and freeze its network.

    Args:
        run: the settings.
        data_dir: where TFDS keeps prepared data sets. None: its default.

    Raises:
        ValueError: for a network that does not fit the images, or scores that are not finite.
        FileNotFoundError, ConnectionError, ImportError: where the data cannot be loaded; see
            `keras_freeze.datasets.load`.
    """
    recipe, facts = run.recipe, datasets.info(run.dataset)
    network = MODELS[run.model](
        facts.num_classes, facts.image_shape, initializer=recipe.initializer, seed=run.seed
    )
    source: dict[str, Any] = {
        "seed": run.seed,
        "data_dir": data_dir,
        "validation_fraction": recipe.validation_fraction,
    }
    all_batches = batches = training_batches(run.dataset, recipe.batch_size, **source)
    validation, test = (
        datasets.load(run.dataset, split=split, batch_size=_EVALUATION_BATCH, **source)
        for split in ("validation", "test")
    )
    if run.steps_per_epoch is not None:
        batches = functools.partial(_first_batches, all_batches, run.steps_per_epoch)
        validation, test = (data.take(run.steps_per_epoch) for data in (validation, test))
    steps = len(batches())
    optimizer = FreezeOptimizer(
        keras.optimizers.SGD(recipe.schedule(steps), momentum=recipe.momentum),
        freeze_rate=0.0 if run.schedule == GRADUAL else run.freeze_rate,
        criterion=run.chosen_criterion,
        frozen_weights=run.frozen_weights,
        l2=recipe.l2,
        seed=run.seed,
        distribution=run.distribution,
    )
    num_steps = steps * recipe.epochs
    most = min(steps, _STEPS_PER_EXECUTION)
    if run.schedule is not None:
        most = min(most, steps_between_changes(num_steps))
    _compile(network, optimizer, num_steps, most)
    freeze_network(run, network, all_batches(), _batches_to_score(run, all_batches()))
    if keras.backend.backend() != "tensorflow":
        _build_loss_and_metrics(network, all_batches())
    if run.reinitializer is not None:
        reinitialize(network, run.reinitializer, seed=(run.seed + _OTHER_SEED) % 2**32)
    together = _steps_in_one_call(run, network, steps, most)
    return Setup(run, network, batches, steps, validation, test, together)


def _steps_in_one_call(run: "Run", network: keras.Model, steps: int, most: int) -> int:
    """Return how many steps `several_steps` makes one: a divisor of an epoch's steps."""
    is_quicker = _is_small(network) and not _has_convolutions(network)
    # Changes of a mask make steps of their own; a distribution divides the first axis of the data.
    is_plain = run.schedule is None and keras.distribution.distribution() is None
    if keras.backend.backend() != "jax" or not is_quicker or not is_plain:
        return 1
    num_images = datasets.info(run.dataset).num_left(run.recipe.validation_fraction)
    is_last_batch_full = steps * run.recipe.batch_size <= num_images
    return steps_together(steps, most) if is_last_batch_full else 1


def _first_batches(make: "Callable[[], tf.data.Dataset]", steps: int) -> "tf.data.Dataset":
    return make().take(steps)


def _batches_to_score(run: "Run", data: "tf.data.Dataset") -> int:
    """Return how many batches to freeze with: enough for GraSP's examples of each class."""
    grasp = as_grasp(run.chosen_criterion)
    if grasp is None or grasp.samples_per_class is None:
        return 1
    wanted = grasp.samples_per_class * datasets.info(run.dataset).num_classes
    # Five times as many are certain to hold them, unless classes are rarer than in any of our sets.
    return min(len(data), -(-5 * wanted // run.recipe.batch_size))


def _compile(
    network: keras.Model, optimizer: FreezeOptimizer, num_steps: int, steps_per_execution: int
) -> None:
    is_merged = (
        _is_small(network) and keras.backend.backend() != "torch"
    )  # which runs one step at a time
    # On a CPU, XLA makes small steps of dense layers a tenth faster and convolutions several times
    # slower; compiling takes seconds.
    is_xla = num_steps >= _STEPS_WORTH_XLA and not _has_convolutions(network)
    network.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps_per_execution if is_merged else 1,
        jit_compile=True if is_merged and is_xla else "auto",
    )


def _is_small(network: keras.Model) -> bool:
    return network.count_params() < _SMALL_NETWORK


def _has_convolutions(network: keras.Model) -> bool:
    return any(len(variable.shape) > 2 for variable in network.trainable_variables)


def _build_loss_and_metrics(network: keras.Model, data: "tf.data.Dataset") -> None:
    """Build what `fit` on JAX and PyTorch would use up a pass of the data for."""
    x, y = next(data.as_numpy_iterator())
    outputs = network(x, training=False)
    network.compute_loss(x, y, outputs)
    network.compute_metrics(x, y, outputs)
    network.reset_metrics()
