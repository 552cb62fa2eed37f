"""Figures of training runs, masks and experiments (`kf.plots`).

The functions return matplotlib figures and change no global state; a figure is saved by itself:
`plot_mask(mask).savefig("mask.png")`. They need matplotlib, which the extra `plot` installs.
"""

from keras_freeze.paper.figures.masks import cell_shares, plot_mask
from keras_freeze.paper.figures.training import plot_comparison, plot_history
from keras_freeze.paper.views.figure import plot_experiment

__all__ = ["cell_shares", "plot_comparison", "plot_experiment", "plot_history", "plot_mask"]
