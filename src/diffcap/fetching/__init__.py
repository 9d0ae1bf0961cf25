"""Fetch the official files of a dataset: download what can be downloaded, say how to get the rest by hand.

`configs/sources/<dataset>.yaml` lists the files (read by `sources`). `download` gets one file over HTTP, `archive` extracts
it, `checksums` remembers SHA-256 sums, `photos` downloads images by URL, and `fetch` does all of it for one dataset.
"""
