"""What every captioner offers, whatever it is inside."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

Batch = dict[str, Any]


class WordMaps(NamedTuple):
    """Where each word looked.

    Attributes:
        before, after: (B, T, h, w), for the word after each of T tokens; they sum to 1 over the places, or, where a word shares
            its look out between the images, to 2 over the places of both.
        alignment: (B, h w, h w): for each place before the change, where the same thing stands after it; None where the
            method does not align.
    """

    before: Tensor
    after: Tensor
    alignment: Tensor | None


class Captioner(nn.Module, ABC):
    """A model that turns two feature maps into a sentence; one LightningModule trains and one function decodes them all.

    Attributes:
        hyperparameters: the constructor's arguments (primitives), enough to build the same model again.
        begin, end: token ids that open and close a caption. vocabulary_layout: whose ids they are, see `Vocabulary`.
        closing_pad: id that closes a caption as `end` does where it is said; None where none does.
        fresh_parts: beginnings of parameter names that the method's pre-training does not have. earlier_parts: of those
            that only it has.
    """

    fresh_parts: ClassVar[tuple[str, ...]] = ()
    earlier_parts: ClassVar[tuple[str, ...]] = ()
    hyperparameters: dict[str, Any]
    begin: int
    end: int
    vocabulary_layout: str
    closing_pad: int | None = None

    def closes(self, tokens: Tensor) -> Tensor:
        """Which ids close a caption where they are said: boolean, of the ids' shape."""
        closing = tokens == self.end
        return closing if self.closing_pad is None else closing | (tokens == self.closing_pad)

    def said(self, tokens: Tensor) -> Tensor:
        """Which of the ids after the opening one a caption consists of: all up to the first that closes it, and that.

        Args:
            tokens: (B, T), beginning with the opening token.

        Returns:
            (B, T - 1) boolean.
        """
        closing = self.closes(tokens[:, 1:]).long()
        return closing.cumsum(1) == closing

    @abstractmethod
    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars to log, of which "loss" is minimised.

        A batch may hold twice as many "after" as "before" images: change pairs, then distractor pairs of the same scenes.
        """

    def validate(self, batch: Batch) -> dict[str, Tensor]:
        """Losses of validation pairs: name to (n,), one value per word or per pair, in nats; none by default.

        Their means over the whole split are logged. Ranks must not communicate in here, as some have fewer pairs.
        """
        return {}

    def trained_parts(self) -> list[nn.Parameter]:
        """Parameters that come trained from elsewhere into the fine-tuning, to learn at a rate of their own."""
        return []

    @abstractmethod
    def encode(self, before: Tensor, after: Tensor) -> Any:
        """Whatever decoding needs of a pair, computed once: a tree of tensors whose first dimension is B."""

    @abstractmethod
    def step(self, tokens: Tensor, memory: Any, cache: Any) -> tuple[Tensor, Any]:
        """Score the next word.

        Args:
            tokens: (B,) the words at the current position. memory: from `encode`. cache: None at the first position,
                then what the last call gave; a tree of tensors whose first dimension is B.

        Returns:
            (B, V) logits of the next position, and the new cache.
        """

    @abstractmethod
    def next_logits(self, tokens: Tensor, memory: Any) -> Tensor:
        """What `step` gives at every position of a caption, in one pass and with gradients.

        Args:
            tokens: (B, T), beginning with the opening token. memory: from `encode`.

        Returns:
            (B, T - 1, V) logits of positions 1 ... T - 1, equal to those of `step` up to the caption's end.
        """

    def nothing_changed(self, before: Tensor, after: Tensor) -> Tensor | None:
        """The probability that nothing changed but the view, (B,), where the method judges that; else None.

        Args:
            before, after: (B, C, h, w).
        """
        return None

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> WordMaps:
        """Where each word looked, for pictures.

        Args:
            before, after: (B, C, h, w). tokens: (B, T), beginning with the opening token.

        Raises:
            NotImplementedError: the method has no such maps.
        """
        raise NotImplementedError(f"{type(self).__name__} has no attention maps")
