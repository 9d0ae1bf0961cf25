"""Several captioners as one: at every word the mean of their probabilities."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffcap.models.captioner import Batch, Captioner, WordMaps


class Ensemble(Captioner):
    """Captioners of one vocabulary, whatever each is inside; for decoding alone.

    Args:
        members: at least one; all number their words alike.
    """

    def __init__(self, members: Sequence[Captioner]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        first = members[0]
        self.begin, self.end, self.closing_pad = first.begin, first.end, first.closing_pad
        self.vocabulary_layout = first.vocabulary_layout

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Not offered.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("the members of an ensemble are trained one by one")

    def encode(self, before: Any, after: Any) -> list[Any]:
        """Each member's memory of its own maps: `before` and `after` are lists of (B, C, h, w), one a member."""
        return [member.encode(*maps) for member, *maps in zip(self.members, before, after)]  # type: ignore[operator]

    def step(self, tokens: Tensor, memory: list[Any], cache: list[Any] | None) -> tuple[Tensor, list[Any]]:
        """See `Captioner.step`: the logarithm of the mean probability of every word."""
        caches = [None] * len(self.members) if cache is None else cache
        steps = [
            member.step(tokens, own, past)  # type: ignore[operator]
            for member, own, past in zip(self.members, memory, caches)
        ]
        return self._mean([logits for logits, _ in steps]), [after for _, after in steps]

    def next_logits(self, tokens: Tensor, memory: list[Any]) -> Tensor:
        """See `Captioner.next_logits`."""
        return self._mean([member.next_logits(tokens, own) for member, own in zip(self.members, memory)])  # type: ignore[operator]

    def nothing_changed(self, before: Any, after: Any) -> Tensor | None:
        """The mean of those members that judge it."""
        judged = [member.nothing_changed(*maps) for member, *maps in zip(self.members, before, after)]  # type: ignore[operator]
        said = [one for one in judged if one is not None]
        return torch.stack(said).mean(0) if said else None

    def attention(self, before: Any, after: Any, tokens: Tensor) -> WordMaps:
        """The mean of the members' maps.

        Raises:
            NotImplementedError: a member has none, or they look at grids of different sizes.
        """
        looks = [member.attention(*maps, tokens) for member, *maps in zip(self.members, before, after)]  # type: ignore[operator]
        if len({one.before.shape for one in looks}) > 1:
            raise NotImplementedError("the members look at grids of different sizes")
        aligned = [one.alignment for one in looks if one.alignment is not None]
        return WordMaps(
            torch.stack([one.before for one in looks]).mean(0),
            torch.stack([one.after for one in looks]).mean(0),
            torch.stack(aligned).mean(0) if len(aligned) == len(looks) else None,
        )

    @staticmethod
    def _mean(logits: list[Tensor]) -> Tensor:
        said = torch.stack([part.float().log_softmax(-1) for part in logits])
        return said.logsumexp(0) - math.log(len(logits))
