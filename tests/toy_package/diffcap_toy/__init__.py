"""A package that adds a method and a dataset to diffcap, as docs/adding.md describes it."""

from diffcap.datasets.registry import DatasetSpec

DATASET = DatasetSpec(
    name="shapes",
    title="Shapes",
    reader="diffcap_toy.shapes:read",
    backbone="blocks",
    configs="diffcap_toy:.",
)
