"""A head that estimates whether a pair of images shows a change, and the type of the change; and its two losses (ours).

It learns from the labels of the manifest, beside the captions. Letters: B pairs, N tokens of a pair, D width, K types of changes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.models.layers import Linear

UNKNOWN_TYPE = -1  # label of a pair without a change, or whose type is unknown


def change_loss(logits: Tensor, is_change: Tensor) -> Tensor:
    """Return the binary cross-entropies (B,), in nats, of the change logits (B,) with the labels (B,): 1 or True for a change.

    Example:
        >>> change_loss(torch.tensor([0.0, 2.0]), torch.tensor([1, 1]))
        tensor([0.6931, 0.1269])
    """
    return F.binary_cross_entropy_with_logits(logits.float(), is_change.float(), reduction="none")


def change_type_loss(logits: Tensor, types: Tensor) -> Tensor:
    """Return the cross-entropies (B,), in nats, of the type logits (B, K) with the types' indices (B,); 0 for `UNKNOWN_TYPE`.

    The sum with `change_loss` is -log of the probability of what is known about a pair: no change, a change, or a change of a type.

    Example:
        >>> change_type_loss(torch.tensor([[0.0, 0.0], [0.0, 9.0]]), torch.tensor([0, UNKNOWN_TYPE]))
        tensor([0.6931, 0.0000])
    """
    return F.cross_entropy(logits.float(), types, ignore_index=UNKNOWN_TYPE, reduction="none")


class ChangeHead(nn.Module):
    """Estimates the change from the tokens that a decoder attends to: their mean and their maximum, a hidden layer, the logits.

    The maximum finds a change that only a few tokens show.

    Args:
        width: D. types: names of the K types. weight: factor of the sum of both losses in the loss of the training.
    """

    def __init__(self, width: int, types: Sequence[str] | None, weight: float) -> None:
        super().__init__()
        self.types, self.weight = tuple(types or ()), weight
        self.hidden, self.logits = Linear(2 * width, width), Linear(width, 1 + len(self.types))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the logit (B,) of a change, and the logits (B, K) of its type, from the tokens (B, N, D) of each pair."""
        pooled = torch.cat([tokens.mean(1), tokens.amax(1)], 1)
        logits = self.logits(F.relu(self.hidden(pooled)))
        return logits[:, 0], logits[:, 1:]

    def losses(self, tokens: Tensor, is_change: Tensor, types: Tensor) -> dict[str, Tensor]:
        """Return both losses (B,) by name, without that of the types if K is 0, for tokens (B, N, D) and labels (B,).

        Their gradients do not reach the tokens: with them, the captions became worse.
        """
        change_logits, type_logits = self(tokens.detach())
        losses = {"change_loss": change_loss(change_logits, is_change)}
        if self.types:
            losses["change_type_loss"] = change_type_loss(type_logits, types)
        return losses
