"""The captioners as plain `nn.Module`s: no Lightning, no files, no device names."""
