"""`Importer`, the description of a method's official checkpoints for `diffcap import`, and the renaming of parameters by rules."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from diffcap.interop.sizes import Sizes, State
from diffcap.text.vocabularies import AnyLayout
from diffcap.utils.errors import DiffcapError

Stage = Literal["pretrain", "finetune"]
Rule = tuple[str, str | None]
GROUPS = ("change_detector_state", "speaker_state")  # of the official checkpoints of SCORER and DIRL
PARTS = {"query": 0, "key": 1, "value": 2}

# The image embedding and the word layers of SCORER and DIRL, which come from one code base.
SHARED: tuple[Rule, ...] = (
    (r"change_detector_state\.img\.0", "embedding.projection"),
    (r"change_detector_state\.w_embedding", "embedding.columns"),
    (r"change_detector_state\.h_embedding", "embedding.rows"),
    (r"speaker_state\.core\.embed", "decoder.embedding"),
    (r"speaker_state\.core\.fc\.(\d+)", r"decoder.lift.\1"),
    (r"speaker_state\.core\.layer\.(\d+)\.(norm\d)", r"decoder.blocks.\1.\2"),
    (r"speaker_state\.logit", "decoder.logit"),
)


@dataclass(frozen=True)
class Importer:
    """How to read the official checkpoints of a method."""

    # From the official parameters, the values of `ImportOptions` and the computed tables, the arguments of diffcap's model.
    sizes: Callable[[State, Mapping[str, Any], State], Sizes]
    # From the official parameters and the stage, the state dict of diffcap's model, for `load_state_dict` with strict=True.
    rename: Callable[[dict[str, Tensor], Stage], dict[str, Tensor]]
    vocabulary_layout: AnyLayout  # of diffcap's model
    vocabulary_file: (
        str | None
    )  # name of the authors' file that maps words to ids; None if the method uses CLIP's tokens
    # Keys of the file if it is a dict with one group of parameters per network (a state dict or a pickled module), and a pickled
    # configuration; their parameters get the key as prefix. Empty if the file is one state dict.
    groups: tuple[str, ...] = ()
    pickled_classes: tuple[str, ...] = ()  # that the file may use, besides those of tensors; see `load_tensors`
    is_pretraining: Callable[[State], bool] = lambda state: False  # whether official parameters are of that stage


def rename(state: Mapping[str, Tensor], rules: Sequence[Rule], system: str) -> dict[str, Tensor]:
    """Rename parameters, concatenate separate query, key and value layers, and reshape 1 x 1 convolutions to matrices.

    Args:
        state: official parameters by name, with their group as prefix.
        rules: pairs of a pattern of the name without ".weight" or ".bias", or of the full name, and the new name. None drops
            the parameter. The parameters of `name:query`, `name:key` and `name:value` are concatenated in this order.
        system: name of the method, for messages.
    """
    ours: dict[str, Tensor] = {}
    joined: dict[str, dict[int, Tensor]] = {}
    for official, value in state.items():
        module, _, last = official.rpartition(".")
        layer = module if last in ("weight", "bias") else ""
        found = [(match, new) for pattern, new in rules if (match := re.fullmatch(pattern, layer))]
        found += [(match, new) for pattern, new in rules if (match := re.fullmatch(pattern, official))]
        if not found:
            raise DiffcapError(
                f"official {system} checkpoint: parameter {official!r} is unknown; check that the checkpoint belongs to this method."
            )
        match, new = found[0]
        if new is None:
            continue
        is_full_name = match.group(0) == official
        prefix, _, part = match.expand(new).partition(":")
        name = prefix if is_full_name else f"{prefix}.{last}"
        value = value.flatten(1) if value.ndim == 4 and value.shape[2:] == (1, 1) else value
        if part:
            joined.setdefault(name, {})[PARTS[part]] = value
        else:
            ours[name] = value
    for name, parts in joined.items():
        if len(parts) != len(PARTS):
            raise DiffcapError(
                f"official {system} checkpoint: a query, key or value of {name!r} is missing; download the file again."
            )
        ours[name] = torch.cat([parts[number] for number in range(len(PARTS))])
    return ours
