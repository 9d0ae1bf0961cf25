"""The interface of every captioner."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

Batch = dict[str, Any]


class AttentionMaps(NamedTuple):
    """Attention of each generated word to both images.

    Attributes:
        before, after: (B, T, h, w), for the word after each of T tokens. Each map sums to 1 over its positions; where the
            method has one distribution over both images, the two maps of a word sum to 2 together.
        alignment: (B, h w, h w): for each position of the before image, attention to the positions of the after image; None
            where the method aligns nothing.
    """

    before: Tensor
    after: Tensor
    alignment: Tensor | None


def patch_attention(before: Tensor, after: Tensor, grid: tuple[int, int]) -> AttentionMaps:
    """Attention to the patches of both images as maps; what other tokens receive is distributed proportionally.

    Args:
        before, after: (B, T, N) probabilities. grid: rows and columns of the N patches.
    """
    mean = (before.sum(2) + after.sum(2))[..., None, None] / 2
    return AttentionMaps(before.unflatten(2, grid) / mean, after.unflatten(2, grid) / mean, None)


class Captioner(nn.Module, ABC):
    """A model that turns two feature maps into a sentence; the same LightningModule and decoding functions serve all of them.

    Attributes:
        hyperparameters: the constructor's arguments (primitives), enough to build the same model again.
        bos_id, eos_id: ids of the tokens at the beginning and the end of a caption.
        vocabulary_layout: the vocabulary that these ids belong to, see `Vocabulary`.
        extra_eos_id: a second id that ends a caption when it is generated (padding, in some of the authors' code), or None.
        allowed_missing: prefixes of parameter names that a pre-training checkpoint of the method does not have.
        allowed_unexpected: prefixes of parameter names that only the pre-training checkpoint has.
    """

    allowed_missing: ClassVar[tuple[str, ...]] = ()
    allowed_unexpected: ClassVar[tuple[str, ...]] = ()
    hyperparameters: dict[str, Any]
    bos_id: int
    eos_id: int
    vocabulary_layout: str
    extra_eos_id: int | None = None

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Which ids end a caption: boolean, of the shape of `tokens`."""
        is_eos = tokens == self.eos_id
        return is_eos if self.extra_eos_id is None else is_eos | (tokens == self.extra_eos_id)

    def caption_mask(self, tokens: Tensor) -> Tensor:
        """Which ids after BOS belong to the caption: all up to the first id that ends it, and that id.

        Args:
            tokens: (B, T), beginning with BOS.

        Returns:
            (B, T - 1) boolean.
        """
        is_eos = self.is_eos(tokens[:, 1:]).long()
        return is_eos.cumsum(1) == is_eos

    @abstractmethod
    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars to log; the one named "loss" is minimised.

        A batch may hold twice as many "after" as "before" images: change pairs, then distractor pairs of the same scenes.
        """

    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """Losses of validation pairs by name, (n,) each: one value per word or per pair, in nats. None by default.

        Their means over the whole split are logged. Ranks must not communicate here, because some have fewer pairs.
        """
        return {}

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """Parameters that are pretrained before fine-tuning begins and may have their own learning rate."""
        return []

    @abstractmethod
    def encode(self, before: Tensor, after: Tensor) -> Any:
        """What decoding needs of a pair, computed once: a tree of tensors whose first dimension is B.

        Args:
            before, after: (B, C, h, w).
        """

    @abstractmethod
    def step(self, tokens: Tensor, memory: Any, cache: Any) -> tuple[Tensor, Any]:
        """Score the next word.

        Args:
            tokens: (B,) the ids at the current position. memory: from `encode`.
            cache: None at the first position, then the cache that the previous call returned; a tree of tensors whose first
                dimension is B.

        Returns:
            (B, V) logits of the next position, and the new cache.
        """

    @abstractmethod
    def teacher_forced_logits(self, tokens: Tensor, memory: Any) -> Tensor:
        """The logits of `step` at every position of given captions, in one pass and with gradients.

        Args:
            tokens: (B, T), beginning with BOS. memory: from `encode`.

        Returns:
            (B, T - 1, V) logits of positions 1 ... T - 1, equal to those of `step` up to the caption's end.
        """

    def nothing_changed(self, before: Tensor, after: Tensor) -> Tensor | None:
        """Probability that nothing changed but the viewpoint, (B,); None if the method does not estimate it.

        Args:
            before, after: (B, C, h, w).
        """
        return None

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """Attention maps of given captions, for figures.

        Args:
            before, after: (B, C, h, w). tokens: (B, T), beginning with BOS.

        Raises:
            NotImplementedError: the method has no such maps.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attention maps")
