"""Freezing masks: which weights are trained, how they are selected, and whose they are."""
