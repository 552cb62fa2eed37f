"""Keras callbacks that watch a network while `fit` trains it."""

from keras_freeze.callbacks.freeze_board import FreezeBoard
from keras_freeze.callbacks.gradient_flow_history import GradientFlowHistory

__all__ = ["FreezeBoard", "GradientFlowHistory"]
