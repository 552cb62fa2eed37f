"""Figures of training runs and masks, and what all figures are drawn with."""
