"""Errors, files, the command line, images: what every package uses and no paper mentions."""
