"""What can be measured of a run, by name."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze.callbacks.gradient_flow_history import GradientFlowHistory
from keras_freeze.gradients.flow import gradient_flow
from keras_freeze.paper.preparation import prepare_run
from keras_freeze.parameters import WEIGHT, kind_of
from keras_freeze.reporting import report
from keras_freeze.storage import save

if TYPE_CHECKING:
    from keras_freeze.paper.run import Run


def _training(
    run: "Run",
    data_dir: Any,
    callbacks: Sequence[keras.callbacks.Callback],
    verbose: bool,
    backup: Any,
) -> dict[str, Any]:
    """Train and test: `TrainingResult.to_dict`."""
    return prepare_run(run, data_dir).fit(callbacks, verbose=verbose, backup=backup).to_dict()


def _gradient_flow(run: "Run", data_dir: Any, **_: Any) -> dict[str, Any]:
    """Measure the gradient flow over the training data before training."""
    setup = prepare_run(run, data_dir)
    flow = gradient_flow(setup.network, setup.batches())
    return {"gradient_flow": flow, "report": report(setup.network).to_dict()}


def _gradient_flow_in_training(
    run: "Run",
    data_dir: Any,
    callbacks: Sequence[keras.callbacks.Callback],
    verbose: bool,
    **_: Any,
) -> dict[str, Any]:
    """Train and test; "flow" is what `GradientFlowHistory` recorded.

    Unlike the history, it has the flow before training, too.
    """
    setup = prepare_run(run, data_dir)
    flow = GradientFlowHistory(setup.batches())
    result = setup.fit([flow, *callbacks], verbose=verbose)
    return {**result.to_dict(), "flow": flow.history}


def _costs(run: "Run", data_dir: Any, **_: Any) -> dict[str, Any]:
    """Count what table 1 states: in the network, in a file, and in one training step."""
    setup = prepare_run(run, data_dir)
    network = setup.network
    weights = [v for v in network.trainable_variables if kind_of(v) == WEIGHT]
    before = [backend.to_numpy(v) for v in weights]
    flow = gradient_flow(network, setup.batches())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.freeze"
        save(network, path)
        file_bytes = path.stat().st_size
    network.fit(setup.batches().take(1), shuffle=False, verbose=0)
    moved = [
        np.count_nonzero(backend.to_numpy(v) != b) for v, b in zip(weights, before, strict=True)
    ]
    counts = report(network)
    return {
        "total_weights": int(sum(np.count_nonzero(b) for b in before)),
        "stored_weights": counts.num_trained_weights,
        "file_bytes": file_bytes,
        "moved_weights": int(sum(moved)),
        "gradient_flow": flow,
        "report": counts.to_dict(),
    }


MEASURES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "training": _training,
    "gradient_flow": _gradient_flow,
    "gradient_flow_in_training": _gradient_flow_in_training,
    "costs": _costs,
}
"""What a run can measure: functions of a run and of `Run.execute`'s arguments."""
