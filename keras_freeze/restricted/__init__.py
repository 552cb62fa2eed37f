"""Weight gradients that are computed only where a weight is trained."""
