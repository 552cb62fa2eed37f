"""Gradients of a model as it is trained: data, loss, training steps, and their side effects."""
