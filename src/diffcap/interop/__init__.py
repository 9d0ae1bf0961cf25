"""Official checkpoints in, ours out."""
