"""Checkpoints of ours: reading, combining, exporting them, to and from the Hugging Face hub."""
