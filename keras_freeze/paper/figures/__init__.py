"""Pictures of training runs, masks and experiments, as matplotlib figures.

They touch no global state, and a figure saves itself: `plot_mask(mask).savefig("mask.png")`. Needs
matplotlib, which the extra `plot` brings.
"""

from keras_freeze.paper.figures.experiments import plot_experiment
from keras_freeze.paper.figures.masks import cell_shares, plot_mask
from keras_freeze.paper.figures.training import plot_comparison, plot_history

__all__ = ["cell_shares", "plot_comparison", "plot_experiment", "plot_history", "plot_mask"]
