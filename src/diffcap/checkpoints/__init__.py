"""Checkpoints of ours: reading, loading, combining, exporting them, to and from the Hugging Face hub."""
