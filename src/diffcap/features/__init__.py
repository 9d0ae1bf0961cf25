"""Frozen backbones and the memory-mapped store of what they give."""
