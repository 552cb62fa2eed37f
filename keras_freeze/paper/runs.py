"""Measurements as data (`kf.runs`): the settings of a run, what it measures, and its results."""

from keras_freeze.paper.measures import MEASURES
from keras_freeze.paper.results import Results
from keras_freeze.paper.run import Run

__all__ = ["MEASURES", "Results", "Run"]
