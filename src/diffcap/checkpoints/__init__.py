"""diffcap's checkpoints: read, load, average, combine to an ensemble, export, push to and pull from the Hugging Face Hub."""
