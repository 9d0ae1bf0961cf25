"""Parts of the vision-language captioner: the key-value cache, the choice of trained weights, and the difference module."""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_leaves_with_path

from diffcap.models.decoder import flat_indices
from diffcap.models.layers import Linear  # nn.Linear, faster on some CPUs
from diffcap.utils.errors import DiffcapError

KeyValues = tuple[Tensor, Tensor]  # keys and values of one layer, (B, heads, tokens, channels) each
Trained = Literal["nothing", "lora", "projector", "all"]  # the parts of the model that are trained, see `VLM`
LoraTargets = Literal["language", "all"]  # the parts of the model whose linear layers get LoRA's matrices
# Names of the language model's linear layers in all supported families; "..._proj" alone would also match image towers.
LANGUAGE_LAYERS = r".*\.(language_model|text_model)\.layers\..*_proj"
# Limits of the options of image processors: pixels of a side, pixels of an image, and number of tiles of an image.
MAX_SIZE = 4096
MAX_PIXELS = 4096**2
MAX_TILES = 64
# Names of the modules between image tower and language model.
PROJECTORS = re.compile(r"(^|\.)(merger|deepstack_merger_list|connector|multi_modal_projector)\.")


def prompt_cache(prompts: Sequence[KeyValues | None], words: list[KeyValues] | None = None) -> Any:
    """Return a cache of transformers that keeps each layer's keys and values of the prompt (`prompts`) and of the words (`words`) apart.

    Beam search reorders the words' tensors only, because all beams of a pair have the same prompt. While the prompt is being computed,
    `prompts` has None for each layer. A layer's attribute `added` begins as its entry of `words`; each call of the model appends to it.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    class PromptLayer(DynamicLayer):
        def __init__(self, prompt: KeyValues | None, added: KeyValues | None) -> None:
            super().__init__()
            self.prompt = prompt
            self.added = added
            self.is_initialized = True

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            self.added = _join(self.added, (key_states, value_states))
            return _join(self.prompt, self.added)

        def get_seq_length(self) -> int:
            return sum(part[0].shape[-2] for part in (self.prompt, self.added) if part is not None)

    added: Sequence[KeyValues | None] = [None] * len(prompts) if words is None else words
    return Cache(layers=[PromptLayer(*key_values) for key_values in zip(prompts, added)])


def _join(first: KeyValues | None, second: KeyValues) -> KeyValues:
    if first is None:
        return second
    keys = torch.cat([first[0], second[0]], -2)
    values = torch.cat([first[1], second[1]], -2)
    return keys, values


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switch off activation checkpointing, because checkpointed layers return no keys and values in training mode."""
    parts: list[Any] = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    for part in parts:
        part.gradient_checkpointing = False
    try:
        yield
    finally:
        for part in parts:
            part.gradient_checkpointing = True


def choose_trained(model: Any, trained: Trained, rank: int, alpha: int, dropout: float, targets: LoraTargets) -> Any:
    """Freeze the parameters of a model of transformers that are not trained. Return the model; for LoRA, PEFT's wrapper of it.

    The arguments are those of `VLM`, without the prefix "lora_".
    """
    if trained == "all":
        return model
    model.requires_grad_(False)
    if trained == "projector":
        modules = [(name, part) for name, part in model.named_modules() if not isinstance(part, nn.ModuleList)]
        names = [name for name, _ in modules if PROJECTORS.search(f"{name}.")]
        outermost_names = [name for name in names if not any(name.startswith(f"{parent}.") for parent in names)]
        if not outermost_names:
            raise DiffcapError(f"{type(model).__name__}: no projector was found; use train: lora.")
        for name in outermost_names:
            # In float32, small updates are not lost. Convert the inputs and the output of the module.
            part = model.get_submodule(name)
            part.requires_grad_(True)
            dtype = next(part.parameters()).dtype
            if dtype == torch.float32:
                continue
            part.float()
            part.register_forward_pre_hook(lambda _, inputs: tuple(value.float() for value in inputs))
            part.register_forward_hook(lambda _, inputs, output, dtype=dtype: output.to(dtype))
    if trained != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    layers = LANGUAGE_LAYERS if targets == "language" else "all-linear"
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=layers, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an attribute that transformers has renamed
        return get_peft_model(model, config)


def check_image_kwargs(options: dict[str, Any], known: Iterable[str], counts_pixels: bool) -> None:
    """Check the options of an image processor. Large values would exhaust the memory.

    `counts_pixels`: True if the options "shortest_edge" and "longest_edge" are numbers of pixels (Qwen), False if they are lengths.
    """
    for name in options:
        if name not in known:
            raise DiffcapError(
                f"model.captioner.init_args.image_kwargs: the image processor of this model has no option {name!r:.60}; it has "
                f"{', '.join(sorted(known))}."
            )
    for path, number in tree_leaves_with_path(options):
        keys = [str(part.key) for part in path if isinstance(part, MappingKey)]  # such as "size", "longest_edge"
        limit = MAX_SIZE
        if counts_pixels and ("pixels" in keys[-1] or keys[-1] in ("shortest_edge", "longest_edge")):
            limit = MAX_PIXELS
        elif "patches" in keys[-1] or "crops" in keys[-1]:
            limit = MAX_TILES
        if isinstance(number, int | float) and not -limit <= number <= limit:
            raise DiffcapError(
                f"model.captioner.init_args.image_kwargs: {'.'.join(keys)} is {number}, and its limit is {limit:,}; give a smaller number."
            )


def add_at_images(hidden_states: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """Add image features (n, D) to states (B, L, D) at `positions`: indices (n,) of the flattened (B, L), or a mask (B, L)."""
    if positions.dtype == torch.bool:
        positions = flat_indices(positions)
    return hidden_states.flatten(0, 1).index_add(0, positions, features.to(hidden_states)).view_as(hidden_states)


def use_whole_images(model: Any) -> None:
    """Replace `get_image_features` of SmolVLM or Idefics3, which finds padding on the host. Images without tiles have no padding."""
    from transformers import AttentionInterface

    # transformers makes a mask for the attention "sdpa", but none for an attention with a name that it does not know.
    AttentionInterface.register("sdpa_without_mask", AttentionInterface()["sdpa"])
    model.vision_model.set_attn_implementation("sdpa_without_mask")

    def get_image_features(pixel_values: Tensor, pixel_attention_mask: Any = None, **kwargs: Any) -> Any:
        output = model.vision_model(pixel_values=pixel_values.flatten(0, 1), **kwargs)  # (pairs, 2, 3, height, width)
        output.pooler_output = model.connector(output.last_hidden_state)
        return output

    model.get_image_features = get_image_features


class Difference(nn.Module):
    """Add to each token of the after image its difference from the before image's token at the same position:

        after' = after + W2 GELU(W1 [after; after - before]),  W2 = 0 at first

    At first, the model computes the same as the base model, as with LoRA. The module is ours, a small form of those of
    CCExpert (arXiv 2411.11360) and M3Diff (arXiv 2503.11093), which it does not reproduce. `width` is that of the projector's output.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(Linear(2 * width, width), nn.GELU(), Linear(width, width, bias=False))
        nn.init.zeros_(self.mix[2].weight)  # type: ignore[arg-type]
        self.num_pairs = 0  # in the current batch; `VLM.prepare_inputs` sets it

    def forward(self, before: Tensor, after: Tensor) -> Tensor:
        """Compute the new tokens (N, width) of the after image from the tokens (N, width) of both images."""
        dtype = next(self.parameters()).dtype
        inputs = torch.cat([after, after - before], -1)
        return after + self.mix(inputs.to(dtype)).to(after.dtype)

    def install(self, model: Any) -> None:
        """Apply the module to the output of a model's `get_image_features`, in which before and after images alternate."""
        get_image_features = model.get_image_features

        def with_difference(*args: Any, **kwargs: Any) -> Any:
            output = get_image_features(*args, **kwargs)
            groups = list(output.pooler_output)  # the tokens (N, width) of each image
            if len(groups) != 2 * self.num_pairs:
                raise DiffcapError(
                    f"the difference module needs one group of tokens per image, but {self.num_pairs} pairs have {len(groups)}; set "
                    "model.captioner.init_args.difference=false."
                )
            new_groups = []
            for before, after in zip(groups[::2], groups[1::2]):
                new_groups += [before, self(before, after)]
            is_tensor = isinstance(output.pooler_output, Tensor)
            output.pooler_output = torch.stack(new_groups) if is_tensor else tuple(new_groups)
            return output

        model.get_image_features = with_difference
