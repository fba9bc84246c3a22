"""A placed model at work: steps, metrics, data order, checkpoints, launch."""
