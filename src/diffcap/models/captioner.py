"""The interface of every captioner."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from diffcap.losses.gather import global_mean
from diffcap.models.change_head import ChangeHead
from diffcap.models.decoder import flat_indices, pair_groups
from diffcap.utils.errors import DiffcapError

Batch = dict[str, Any]  # see `Captioner.loss`


class AttentionMaps(NamedTuple):
    """Attention of each generated word to the positions of both images.

    If a captioner attends to each image separately, each map sums to 1. If it has one distribution over both images, the sums of the
    two maps of a word add up to 2.
    """

    before: Tensor  # (B, T, h, w); entry t is the attention when the word after token t is predicted
    after: Tensor  # as `before`
    alignment: Tensor | None  # (B, h w, h w); row i: attention of position i of the before image to the after image


def patch_attention(before: Tensor, after: Tensor, grid: tuple[int, int]) -> AttentionMaps:
    """Arrange attention weights (B, T, N) to the N patches of each image as maps. The sums of the two maps of a word add up to 2.

    The weights are a part of one distribution over all tokens of both images. They do not sum to 1, because other tokens, such as
    class tokens, are left out. `grid`: rows and columns of the N patches.
    """
    half_sum = (before.sum(2) + after.sum(2))[..., None, None] / 2
    return AttentionMaps(before.unflatten(2, grid) / half_sum, after.unflatten(2, grid) / half_sum, None)


def constructor_arguments(constructor_locals: dict[str, Any]) -> dict[str, Any]:
    """Return a constructor's arguments as JSON values; raise a ValueError if one is not among the choices of its Literal type.

    `constructor_locals`: the constructor's `locals()`, which have the entry `__class__` because the constructor calls `super()`.
    """
    arguments = {name: value for name, value in constructor_locals.items() if name not in ("self", "__class__")}
    for name, annotation in get_type_hints(constructor_locals["__class__"].__init__).items():
        choices = get_args(annotation)
        if get_origin(annotation) is Literal and arguments[name] not in choices:
            raise ValueError(f"{name} is {arguments[name]!r}; it must be one of {', '.join(map(repr, choices))}")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}


class Captioner(nn.Module, ABC):
    """A model that describes in a sentence how two images differ. All captioners share a LightningModule and the decoding functions."""

    # Prefixes of the names of parameters that a pre-training checkpoint may lack, and of those that it may have in addition.
    allowed_missing: ClassVar[tuple[str, ...]] = ("change_head",)
    allowed_unexpected: ClassVar[tuple[str, ...]] = ("change_head",)
    # True if the state dict has only the weights that were trained on top of a base model, whose own weights are in other files.
    # Such a captioner has the constructor arguments `base` and `base_sha256`, which identify these files, and the attribute `vocabulary`.
    on_base_model: ClassVar[bool] = False
    # True: fine-tuning uses AdamW if its option `model.pretrained_lr` is set, else Adam. False: fine-tuning always uses Adam.
    uses_adamw: ClassVar[bool] = True
    hyperparameters: dict[str, Any]  # the constructor's arguments, from which the same model can be built again
    bos_id: int  # id of the token at the beginning of a caption
    eos_id: int  # id of the token at the end of a caption
    vocabulary_layout: str  # name of the order of special tokens that the data must have, such as "pcl"
    extra_eos_id: int | None = None  # a second id that ends a caption, such as padding; None: only `eos_id` ends it

    def __init__(self) -> None:
        super().__init__()
        self.change_head: ChangeHead | None = None  # a constructor with the argument `change_weight` sets it last

    @classmethod
    def check_state(cls, arguments: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Raise a ValueError if a checkpoint's constructor arguments are wrong, or do not suit its state dict."""

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Return which ids end a caption: boolean, of the shape of `tokens`."""
        ends_caption = tokens == self.eos_id
        return ends_caption if self.extra_eos_id is None else ends_caption | (tokens == self.extra_eos_id)

    def caption_mask(self, tokens: Tensor) -> Tensor:
        """Return a mask (B, T - 1) of the ids after BOS in `tokens` (B, T): True for a caption's words and its first end."""
        ends_caption = self.is_eos(tokens[:, 1:]).long()
        return ends_caption.cumsum(1) == ends_caption

    def word_mask(self, tokens: Tensor) -> Tensor:
        """Return a mask (B, T - 1) of the ids after BOS in `tokens` (B, T) that the training predicts."""
        return self.caption_mask(tokens)

    def find_words(self, batch: Batch) -> list[Tensor]:
        """Return for each of the batch's `pair_groups` the indices (n,) of its predicted words in the flattened (B, T - 1) `word_mask`."""
        if "words" in batch:
            return batch["words"]
        mask = self.word_mask(batch["tokens"])
        groups = pair_groups(batch["before"], batch["after"])
        return [flat_indices(mask[rows]) + rows.start * mask.shape[1] for rows in groups]

    def host_entries(self, batch: Batch) -> Batch:
        """Return more entries of a batch, which the data loader computes on the CPU: indices, whose number depends on the batch's values.

        If they were computed from tensors on a GPU, the host would wait for the GPU. `loss` and `validation_losses` compute the entries
        if the batch lacks them.
        """
        return {"words": self.find_words(batch)} if "tokens" in batch else {}

    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the training losses; by default, the mean of the "caption_loss" of `validation_losses` over the global batch.

        Args:
            batch: "before" (b, C, h, w), "after" (B, C, h, w), "tokens" (B, T) beginning with BOS, and other entries that the
                method needs. If B is 2 b, pair i < b is a change pair. Pair b + i has the same before image, but is a distractor pair, in
                which only the viewpoint changed. The labels "is_change" (B,) and "change_type" (B,) are those of `change_head`.

        Returns:
            Scalars by name, which are logged. Training minimises the scalar "loss".
        """
        losses = self.validation_losses(batch)
        if "caption_loss" not in losses:
            raise DiffcapError(
                f'{type(self).__name__} does not define loss, or validation_losses with "caption_loss"; add one of them.'
            )
        loss = global_mean(losses.pop("caption_loss"))
        return self.add_change_losses({"loss": loss, "caption_loss": loss.detach()}, losses)

    def change_losses(self, tokens: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the losses (B,) of `change_head` by name, from the `encode_tokens` of a batch; {} without the head."""
        if self.change_head is None:
            return {}
        return self.change_head.losses(tokens, batch["is_change"], batch["change_type"])

    def add_change_losses(self, losses: dict[str, Tensor], change_losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a step's `losses` with the means of the `change_losses` over the global batch, which are added to "loss", too."""
        if self.change_head is None:
            return losses
        total = dict(losses)
        for name, values in change_losses.items():
            mean = global_mean(values)
            total["loss"] = total["loss"] + self.change_head.weight * mean
            total[name] = mean.detach()
        return total

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return vectors of losses by name, in nats, with a value per word or pair. Their means over the validation split are logged.

        The batch is as in `loss`, with as many "before" as "after". This function must not call collective operations
        (`torch.distributed`), because some ranks have fewer batches.
        """
        return {}

    def check(self, data: Any) -> None:
        """Raise a DiffcapError if the training data, a `FeatureData`, do not suit the captioner."""
        if data.vocabulary.family != self.vocabulary_layout:
            raise DiffcapError(
                f"data.vocabulary_layout is {data.vocabulary.layout}; {type(self).__name__} needs {self.vocabulary_layout}."
            )

    def load_initial(self, weights: str | None, vocabulary: Any) -> None:
        """Load weights that another program trained. Fine-tuning calls this first if it does not start from a pre-training checkpoint.

        `weights`: the option `model.initial_weights`: "default", "random", a file, or None if it is not set.
        """
        if weights:
            raise DiffcapError(
                f"model.initial_weights is {weights}, but {type(self).__name__} has no weights of another program; remove the option."
            )

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters with pretrained weights; the option `model.pretrained_lr` is their learning rate."""
        return []

    @abstractmethod
    def encode(self, before: Tensor, after: Tensor) -> Any:
        """Encode feature maps (B, C, h, w) as the memory, which all steps use: nested tuples, lists or dicts of tensors with B rows."""

    @abstractmethod
    def step(self, tokens: Tensor, memory: Any, cache: Any) -> tuple[Tensor, Any]:
        """Score the next word: return the logits (B, V) of the next position, and the new cache.

        Args:
            tokens: (B,) the ids at the current position. memory: from `encode`.
            cache: None at the first position, then the cache that the previous call returned: nested tensors, like the memory.
        """

    @abstractmethod
    def teacher_forced_logits(self, tokens: Tensor, memory: Any) -> Tensor:
        """Score the words of given captions (B, T), beginning with BOS, in one pass: logits of positions 1 ... T - 1, (B, T - 1, V).

        Up to the end of a caption, the logits equal those of `step`.
        """

    def encode_tokens(self, before: Tensor, after: Tensor) -> Tensor:
        """Encode maps (B, C, h, w) as tokens (B, N, D) that represent the difference of each pair; `change_head` reads them."""
        raise NotImplementedError(f"{type(self).__name__} has no tokens for a change head")

    def nothing_changed(self, before: Tensor, after: Tensor) -> Tensor | None:
        """Estimate from maps (B, C, h, w) the probability (B,) that only the viewpoint changed; return None if the method cannot."""
        if self.change_head is None:
            return None
        change_logits, _ = self.change_head(self.encode_tokens(before, after))
        return (-change_logits.float()).sigmoid()

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """Compute the attention maps of captions (B, T), which begin with BOS; some methods raise a NotImplementedError instead."""
        raise NotImplementedError(f"{type(self).__name__} has no attention maps")
