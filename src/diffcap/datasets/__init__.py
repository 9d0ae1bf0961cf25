"""Readers: official files in, manifest records out; one file a dataset."""
