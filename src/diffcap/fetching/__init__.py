"""Fetch the official files of a dataset: download what can be downloaded, say how to get the rest by hand."""
