"""The methods, each a file or a folder: model, losses, training, and the import of the authors' checkpoints."""
