"""Frozen backbones, and the memory-mapped store of their features."""
