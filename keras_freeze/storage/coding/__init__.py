"""Entropy coding of masks and trained values."""
