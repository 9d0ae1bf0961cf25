"""Rename official parameters by rules."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diffcap.utils.errors import DiffcapError

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
