"""Sweeps over runs and searches for hyperparameters (`kf.tuning`).

Both need KerasTuner, which the extra `tune` installs.
"""

from keras_freeze.paper.hypermodel import FreezeHyperModel, LogRange, check_trials
from keras_freeze.paper.sweep import CallbacksOf, is_worker, sweep

__all__ = ["CallbacksOf", "FreezeHyperModel", "LogRange", "check_trials", "is_worker", "sweep"]
