"""Parts of the vision-language captioner: the key-value cache, the choice of trained weights, and the difference module."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diffcap.utils.errors import DiffcapError

KeyValues = tuple[Tensor, Tensor]  # of one layer, (B, heads, T, D) each
Trained = Literal["nothing", "lora", "projector", "all"]
LoraTargets = Literal["language", "all"]
# Names of the linear layers of the language model in all supported families; the image towers have layers of the same names.
LANGUAGE_LAYERS = r".*\.(language_model|text_model)\.layers\..*_proj"
# Names of the modules between image tower and language model.
PROJECTORS = re.compile(r"(^|\.)(merger|deepstack_merger_list|connector|multi_modal_projector)\.")


def prompt_cache(prompts: Sequence[KeyValues | None], words: list[KeyValues] | None = None) -> Any:
    """A key-value cache of transformers whose layers keep the prompt and the words apart.

    Beam search reorders the words; the prompt is the same for all beams of a pair and is never copied.

    Args:
        prompts: keys and values of the prompt in each layer; None while the prompt itself is computed.
        words: of the words so far; None before the first.

    Returns:
        The cache; each layer has the attribute `new`, keys and values of all that is not the prompt.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class PromptLayer(DynamicLayer):
        def __init__(self, prompt: KeyValues | None, new: KeyValues | None) -> None:
            super().__init__()
            self.prompt, self.new, self.is_initialized = prompt, new, True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.new = _joined(self.new, (key_states, value_states))
            return _joined(self.prompt, self.new)

        def get_seq_length(self) -> int:
            return sum(part[0].shape[-2] for part in (self.prompt, self.new) if part is not None)

    past: Sequence[KeyValues | None] = [None] * len(prompts) if words is None else words
    return Cache(layers=[PromptLayer(prompt, new) for prompt, new in zip(prompts, past)])


def _joined(first: KeyValues | None, second: KeyValues) -> KeyValues:
    if first is None:
        return second
    return torch.cat([first[0], second[0]], -2), torch.cat([first[1], second[1]], -2)


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switch off activation checkpointing, with which layers in training mode return no keys and values."""
    parts: list[Any] = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    for part in parts:
        part.gradient_checkpointing = False
    try:
        yield
    finally:
        for part in parts:
            part.gradient_checkpointing = True


def choose_trained(model: Any, trained: Trained, rank: int, alpha: int, dropout: float, targets: LoraTargets) -> Any:
    """Freeze what is not trained, and add LoRA's matrices.

    Args:
        model: of transformers. trained: see `VLM`. rank, alpha, dropout: of LoRA. targets: see `VLM`.

    Returns:
        The model; with LoRA, PEFT's model around it.
    """
    if trained == "all":
        return model
    model.requires_grad_(False)
    if trained == "projector":
        for name, part in model.named_modules():
            if PROJECTORS.search(f"{name}."):
                part.requires_grad_(True)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise DiffcapError(f"{type(model).__name__}: no projector was found; train with trained: lora instead.")
        for part in model.modules():
            _compute_in_float32(part)
    if trained != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    names = LANGUAGE_LAYERS if targets == "language" else "all-linear"
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an attribute that transformers has renamed
        return get_peft_model(model, config)


def _compute_in_float32(part: nn.Module) -> None:
    """Keep a trained module's own parameters in float32, in which small updates are not lost, between layers of another type."""
    own = [parameter for parameter in part.parameters(recurse=False) if parameter.requires_grad]
    if not own or own[0].dtype == torch.float32:
        return
    dtype = own[0].dtype
    for parameter in own:
        parameter.data = parameter.data.float()
    part.register_forward_pre_hook(lambda _, inputs: tuple(value.float() for value in inputs))
    part.register_forward_hook(lambda _, inputs, output: output.to(dtype))


def frozen_names(model: nn.Module, prefix: str) -> set[str]:
    """Names of all frozen parameters, also of those with two names, and of all buffers: the state that the base model has."""
    frozen = {id(parameter) for parameter in model.parameters() if not parameter.requires_grad}
    every = model.named_parameters(remove_duplicate=False)
    return {f"{prefix}{name}" for name, parameter in every if id(parameter) in frozen} | {
        f"{prefix}{name}" for name, _ in model.named_buffers(remove_duplicate=False)
    }


class Difference(nn.Module):
    """Adds to the tokens of the after image what differs at the same position of the before image:

        after' = after + W2 GELU(W1 [after; after - before]),  W2 = 0 at first

    so that training begins at the base model's own function, as with LoRA. One scale; ours, after CCExpert (arXiv 2411.11360) and M3Diff
    (arXiv 2503.11093), which it does not reproduce.

    Args:
        width: of the tokens behind the projector.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width, bias=False))
        nn.init.zeros_(self.mix[2].weight)  # type: ignore[arg-type]

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Tokens (N, D) of both images to those of the after image."""
        own = next(self.parameters()).dtype
        return after + self.mix(torch.cat([after, after - before], -1).to(own)).to(after.dtype)

    def install(self, model: Any) -> None:
        """Apply the module to the output of a model's `get_image_features`, in which before and after images alternate."""
        image_features = model.get_image_features

        def with_difference(*args: Any, **kwargs: Any) -> Any:
            output = image_features(*args, **kwargs)
            images = list(output.pooler_output)  # (N, D) each
            for number in range(0, len(images) - 1, 2):
                if images[number].shape == images[number + 1].shape:
                    images[number + 1] = self(images[number], images[number + 1])
            is_stacked = isinstance(output.pooler_output, Tensor)
            output.pooler_output = torch.stack(images) if is_stacked else tuple(images)
            return output

        model.get_image_features = with_difference
