"""Keras callbacks that watch or publish a network while `fit` trains it."""

from keras_freeze.callbacks.freeze_board import FreezeBoard
from keras_freeze.callbacks.gradient_flow_history import GradientFlowHistory
from keras_freeze.callbacks.publish_deltas import PublishDeltas

__all__ = ["FreezeBoard", "GradientFlowHistory", "PublishDeltas"]
