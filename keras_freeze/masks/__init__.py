"""Freezing masks: which weights are trained, how they are selected, and whose they are."""

from keras_freeze.masks.structure import Structure

__all__ = ["Structure"]
