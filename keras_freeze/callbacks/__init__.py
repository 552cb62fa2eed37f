"""Keras callbacks that watch, publish or change a network while `fit` trains it."""

from keras_freeze.callbacks.freeze_board import FreezeBoard
from keras_freeze.callbacks.gradient_flow_history import GradientFlowHistory
from keras_freeze.callbacks.gradual_freezing import GradualFreezing
from keras_freeze.callbacks.publish_deltas import PublishDeltas
from keras_freeze.callbacks.regrow_trained import RegrowTrained

__all__ = [
    "FreezeBoard",
    "GradientFlowHistory",
    "GradualFreezing",
    "PublishDeltas",
    "RegrowTrained",
]
