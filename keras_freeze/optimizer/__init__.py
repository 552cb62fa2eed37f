"""FreezeOptimizer, the two updates that it chooses from, and what it writes to checkpoints."""
