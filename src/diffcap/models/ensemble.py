"""An ensemble of captioners, which averages the probabilities of its members at every word."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffcap.models.captioner import AttentionMaps, Batch, Captioner


class Ensemble(Captioner):
    """Captioners of any method with the same vocabulary; for decoding only.

    Args:
        members: at least one; all have the same ids for the same words.

    Example:
        >>> import torch
        >>> from diffcap.models.generation import greedy_from
        >>> from diffcap.methods.pcl.model import PCL
        >>> _ = torch.manual_seed(0)
        >>> model = Ensemble([PCL(10, 8, width=16, heads=2, ffn=24) for _ in range(2)]).eval()
        >>> before, after = torch.randn(3, 8, 2, 2), torch.randn(3, 8, 2, 2)
        >>> memory = model.encode([before] * 2, [after] * 2)  # the maps of each member
        >>> tokens = greedy_from(model, memory, 5)
        >>> probabilities = model.teacher_forced_logits(tokens, memory).exp()  # (B, T - 1, V)
        >>> torch.allclose(probabilities.sum(-1), torch.tensor(1.0))
        True
    """

    def __init__(self, members: Sequence[Captioner]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        first = members[0]
        self.bos_id, self.eos_id, self.extra_eos_id = first.bos_id, first.eos_id, first.extra_eos_id
        self.vocabulary_layout = first.vocabulary_layout

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Not supported: the members are trained one by one."""
        raise NotImplementedError("an ensemble cannot be trained; train its members one by one")

    def encode(self, before: Any, after: Any) -> list[Any]:
        """Each member's memory of its own feature maps; `before` and `after` are lists of (B, C, h, w), one per member."""
        return [member.encode(*maps) for member, *maps in zip(self.members, before, after)]  # type: ignore[operator]

    def step(self, tokens: Tensor, memory: list[Any], cache: list[Any] | None) -> tuple[Tensor, list[Any]]:
        """See `Captioner.step`: the logits are the logarithm of the mean probability of every word."""
        caches = [None] * len(self.members) if cache is None else cache
        steps = [
            member.step(tokens, member_memory, member_cache)  # type: ignore[operator]
            for member, member_memory, member_cache in zip(self.members, memory, caches)
        ]
        return self._mean_log_probabilities([logits for logits, _ in steps]), [cache for _, cache in steps]

    def teacher_forced_logits(self, tokens: Tensor, memory: list[Any]) -> Tensor:
        """See `Captioner.teacher_forced_logits`."""
        return self._mean_log_probabilities(
            [
                member.teacher_forced_logits(tokens, member_memory)  # type: ignore[operator]
                for member, member_memory in zip(self.members, memory)
            ]
        )

    def nothing_changed(self, before: Any, after: Any) -> Tensor | None:
        """The mean of the members that estimate it."""
        estimates = [member.nothing_changed(*maps) for member, *maps in zip(self.members, before, after)]  # type: ignore[operator]
        available = [estimate for estimate in estimates if estimate is not None]
        return torch.stack(available).mean(0) if available else None

    def attention(self, before: Any, after: Any, tokens: Tensor) -> AttentionMaps:
        """The mean of the members' maps."""
        maps_of_members = [member.attention(*maps, tokens) for member, *maps in zip(self.members, before, after)]  # type: ignore[operator]
        if len({maps.before.shape for maps in maps_of_members}) > 1:
            raise NotImplementedError("the attention maps of the members have different sizes")
        alignments = [maps.alignment for maps in maps_of_members if maps.alignment is not None]
        return AttentionMaps(
            torch.stack([maps.before for maps in maps_of_members]).mean(0),
            torch.stack([maps.after for maps in maps_of_members]).mean(0),
            torch.stack(alignments).mean(0) if len(alignments) == len(maps_of_members) else None,
        )

    @staticmethod
    def _mean_log_probabilities(logits: list[Tensor]) -> Tensor:
        log_probabilities = torch.stack([member.float().log_softmax(-1) for member in logits])
        return log_probabilities.logsumexp(0) - math.log(len(logits))
