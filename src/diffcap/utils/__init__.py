"""Utilities of all packages: errors, files, the command line, images."""
