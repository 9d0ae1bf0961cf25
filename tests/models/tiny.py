"""Small models and batches that the tests of this folder share."""

from typing import Any

import torch
from torch import Tensor

from diffcap.methods.pcl.model import BOS, EOS, PAD, PCL
from diffcap.methods.pcl.pretraining_model import PCLPretraining

WORDS = 23
SIZES: dict[str, Any] = {
    "vocabulary_size": WORDS,
    "feature_channels": 5,
    "width": 16,
    "heads": 2,
    "ffn": 24,
    "cross_layers": 2,
    "dropout": 0.2,  # off in eval mode; the tests that train set it to 0
    "positions": 40,
}


def captioner(seed: int = 0, **options: Any) -> PCL:
    torch.manual_seed(seed)
    return PCL(**{**SIZES, **options}).eval()


def pretraining(seed: int = 0, **options: Any) -> PCLPretraining:
    torch.manual_seed(seed)
    return PCLPretraining(**{**SIZES, **options}).eval()


def maps(pairs: int, grid: tuple[int, int] = (2, 3), channels: int = 5, seed: int = 1) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    before, after = (torch.randn(pairs, channels, *grid, generator=draws) for _ in range(2))
    return before, after


def captions(
    lengths: list[int],
    padded: int,
    seed: int = 2,
    ids: tuple[int, int, int] = (BOS, EOS, PAD),
    words: range = range(6, WORDS),
) -> Tensor:
    """(B, padded): beginning, as many words as `lengths` say, end, padding; `ids` are those of these three."""
    draws, (begin, end, pad) = torch.Generator().manual_seed(seed), ids
    text = torch.full((len(lengths), padded), pad)
    for row, count in zip(text, lengths):
        row[0], row[count + 1] = begin, end
        row[1 : count + 1] = torch.randint(words.start, words.stop, (count,), generator=draws)
    return text
