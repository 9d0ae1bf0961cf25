"""A captioner with one recurrent layer: the mean of the features' difference is its first hidden state."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.captioner import Captioner


class GRU(Captioner):
    """Difference of the pooled features -> GRU -> words.

    Args:
        vocabulary_size: V. feature_channels: C. max_length: positions of a caption. width: D. after_only: leave out the first image.
    """

    vocabulary_layout = "rcc"
    bos_id, eos_id = 2, 3  # of this layout; 0 is padding

    def __init__(
        self,
        vocabulary_size: int,
        feature_channels: int,
        max_length: int = 20,
        width: int = 32,
        after_only: bool = False,
    ) -> None:
        super().__init__()
        self.hyperparameters = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.after_only = after_only
        self.project = nn.Linear(feature_channels, width)
        self.embed = nn.Embedding(vocabulary_size, width, padding_idx=0)
        self.cell = nn.GRUCell(width, width)
        self.output = nn.Linear(width, vocabulary_size)

    def encode(self, before: Tensor, after: Tensor) -> Tensor:
        """(B, D): the first hidden state."""
        maps = after if self.after_only else after - before
        return self.project(maps.float().mean((2, 3))).tanh()

    def step(self, tokens: Tensor, memory: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Logits of the next word (B, V), and the hidden state (B, D)."""
        hidden = self.cell(self.embed(tokens), memory if cache is None else cache)
        return self.output(hidden), hidden

    def teacher_forced_logits(self, tokens: Tensor, memory: Tensor) -> Tensor:
        """The logits of `step` at every position: (B, T - 1, V)."""
        position_logits, hidden = [], None
        for position in range(tokens.shape[1] - 1):
            logits, hidden = self.step(tokens[:, position], memory, hidden)
            position_logits.append(logits)
        return torch.stack(position_logits, 1)

    def loss(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Cross-entropy of the words, in nats."""
        logits = self.teacher_forced_logits(batch["tokens"], self.encode(batch["before"], batch["after"]))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), ignore_index=0)}
