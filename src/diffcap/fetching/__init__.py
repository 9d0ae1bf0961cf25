"""Fetching the official files of a dataset: what may be fetched is, and what only a person can fetch is said precisely.

`configs/sources/<dataset>.yaml` says where the files are (`sources`), `transfer` brings one over HTTP, `unpack` takes an
archive apart, `ledger` remembers checksums, and `fetch` does all of it for one dataset.
"""
