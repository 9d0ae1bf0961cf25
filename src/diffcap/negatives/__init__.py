"""Hard negative captions for IDC-PCL's fine-grained difference aligning: retrieved, replaced and confused."""

from diffcap.negatives.build import Builder, Recipe
from diffcap.negatives.file import KINDS, CaptionNegatives, Negative, iter_negatives, read_negatives, write_negatives

__all__ = [
    "KINDS",
    "Builder",
    "CaptionNegatives",
    "Negative",
    "Recipe",
    "iter_negatives",
    "read_negatives",
    "write_negatives",
]
