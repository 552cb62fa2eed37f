"""Every figure and table of the paper, and what goes beyond it, by name: runs and results."""

from keras_freeze.paper.experiments.catalog import EXPERIMENTS
from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.experiments.summary import QUANTITIES, Point, points_of

__all__ = [
    "EXPERIMENTS",
    "QUANTITIES",
    "Experiment",
    "Point",
    "Series",
    "points_of",
]
