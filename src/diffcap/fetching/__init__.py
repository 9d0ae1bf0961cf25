"""Fetch the official files of a dataset: download the public files, and tell the user how to get the other files by hand."""
