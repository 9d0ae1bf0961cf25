"""The interface of every captioner."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.optim import Optimizer

from diffcap.utils.errors import DiffcapError

Batch = dict[str, Any]


class AttentionMaps(NamedTuple):
    """Attention of each generated word to both images.

    If the method attends to each image separately, each map sums to 1 over its positions. If it has one distribution over both
    images, the sums of the two maps of a word add up to 2.
    """

    before: Tensor  # (B, T, h, w); entry t is the attention when the word after token t is predicted
    after: Tensor  # as `before`
    alignment: Tensor | None  # (B, h w, h w), row i: from position i of the before image to the after image


def patch_attention(before: Tensor, after: Tensor, grid: tuple[int, int]) -> AttentionMaps:
    """Maps over the patches, of one distribution over the tokens of both images: (B, T, N) weights each, N = h w of the `grid`.

    The attention to other tokens, such as class tokens, is left out, and the rest is scaled up.
    """
    mean = (before.sum(2) + after.sum(2))[..., None, None] / 2
    return AttentionMaps(before.unflatten(2, grid) / mean, after.unflatten(2, grid) / mean, None)


def constructor_arguments(variables: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor that calls `super()`, from its `locals()`, as JSON values; checks those of type Literal."""
    arguments = {name: value for name, value in variables.items() if name not in ("self", "__class__")}
    for name, kind in get_type_hints(variables["__class__"].__init__).items():
        if get_origin(kind) is Literal and arguments[name] not in get_args(kind):
            raise ValueError(f"{name} is {arguments[name]!r}; it must be one of {', '.join(map(repr, get_args(kind)))}")
    return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}


class Captioner(nn.Module, ABC):
    """A model that turns two feature maps into a sentence; the same LightningModule and decoding functions serve all of them."""

    # Prefixes of parameter names that a pre-training checkpoint of the method does not have, and that only it has.
    allowed_missing: ClassVar[tuple[str, ...]] = ()
    allowed_unexpected: ClassVar[tuple[str, ...]] = ()
    # Whether the state dict has only what was trained on top of a base model, which has its own files; such a captioner has the
    # arguments `base` and `base_sha256`, and the attribute `vocabulary`.
    on_base_model: ClassVar[bool] = False
    # From lr, pretrained_lr and weight_decay, the authors' optimizer with weights in half precision; None if they have none.
    half_precision_optimizer: Callable[..., Optimizer] | None = None
    hyperparameters: dict[str, Any]  # the constructor's arguments, from which the same model can be built again
    bos_id: int  # of the token at the beginning of a caption
    eos_id: int  # of the token at its end
    vocabulary_layout: str  # `Vocabulary.family` whose special tokens have these ids: "pcl", "rcc", ...
    extra_eos_id: int | None = None  # a second id that ends a generated caption (padding, in some of the authors' code)

    @classmethod
    def check_state(cls, arguments: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Raise a ValueError if the arguments and the state dict of a checkpoint do not fit together (`on_base_model` only)."""

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Which ids end a caption: boolean, of the shape of `tokens`."""
        is_eos = tokens == self.eos_id
        return is_eos if self.extra_eos_id is None else is_eos | (tokens == self.extra_eos_id)

    def caption_mask(self, tokens: Tensor) -> Tensor:
        """Which ids after BOS belong to the caption (B, T): all up to and including the first `is_eos`; boolean (B, T - 1)."""
        is_eos = self.is_eos(tokens[:, 1:]).long()
        return is_eos.cumsum(1) == is_eos

    @abstractmethod
    def loss(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the training losses.

        Args:
            batch: "before" (b, C, h, w), "after" (B, C, h, w), "tokens" (B, T) beginning with BOS, and what else the method
                needs. B is b or 2 * b: with 2 * b, pair i < b is a change pair, and pair b + i is the distractor pair with
                the same before image.

        Returns:
            Scalars to log by name; the one named "loss" is minimised.
        """

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Losses of validation pairs by name, in nats, whose means over the whole split are logged: one value per word or pair.

        The batch is as in `loss`, with as many "before" as "after". Must not call collective operations (`torch.distributed`),
        because some ranks have fewer batches.
        """
        return {}

    def check(self, data: Any) -> None:
        """Raise a DiffcapError if the data of a training, a `FeatureData`, do not suit the method."""
        if data.vocabulary.family != self.vocabulary_layout:
            raise DiffcapError(
                f"data.vocabulary_layout is {data.vocabulary.layout}; {type(self).__name__} needs {self.vocabulary_layout}."
            )

    @property
    def initial_weights(self) -> str | None:
        """The option of fine-tuning with the weights of a part that is pretrained elsewhere, such as clip_weights; None without one."""
        return None

    def load_initial(self, weights: str, vocabulary: Any) -> None:
        """Load the weights of the part that is pretrained elsewhere ("default", "random" or a file), see `initial_weights`."""

    def backbone_parameters(self) -> list[nn.Parameter]:
        """The trained parameters of a network for images inside the captioner, which have a group of their own in Adam."""
        return []

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """Parameters that are pretrained before fine-tuning begins and may have their own learning rate."""
        return []

    @abstractmethod
    def encode(self, before: Tensor, after: Tensor) -> Any:
        """Feature maps (B, C, h, w) to what all decoding steps use: nested tuples, lists or dicts of tensors of B rows."""

    @abstractmethod
    def step(self, tokens: Tensor, memory: Any, cache: Any) -> tuple[Tensor, Any]:
        """Score the next word: (B, V) logits of the next position, and the new cache.

        Args:
            tokens: (B,) the ids at the current position. memory: from `encode`.
            cache: None at the first position, then the cache that the previous call returned, nested as the memory.
        """

    @abstractmethod
    def teacher_forced_logits(self, tokens: Tensor, memory: Any) -> Tensor:
        """The logits of `step` for given captions (B, T), beginning with BOS, in one pass and with gradients: (B, T - 1, V).

        They are those of positions 1 ... T - 1, equal to those of `step` up to the caption's end.
        """

    def nothing_changed(self, before: Tensor, after: Tensor) -> Tensor | None:
        """Probability that nothing changed but the viewpoint, (B,), of maps (B, C, h, w); None if the method has no estimate."""
        return None

    def attention(self, before: Tensor, after: Tensor, tokens: Tensor) -> AttentionMaps:
        """Attention maps of captions (B, T), beginning with BOS, for figures; NotImplementedError if the method has none."""
        raise NotImplementedError(f"{type(self).__name__} has no attention maps")
