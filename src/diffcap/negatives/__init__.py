"""Hard negative captions for IDC-PCL's fine-grained difference aligning: retrieved, replaced and confused."""

from diffcap.negatives.build import Builder, Recipe
from diffcap.negatives.file import KINDS, CaptionNegatives, Negative, read_negatives, write_negatives

__all__ = ["KINDS", "Builder", "CaptionNegatives", "Negative", "Recipe", "read_negatives", "write_negatives"]
