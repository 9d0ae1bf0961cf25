"""diffcap: say in a sentence what changed between two similar images."""

__version__ = "0.1.0"
