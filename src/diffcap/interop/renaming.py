"""Official parameter names onto ours, by rules: what the importers of SCORER and DIRL share."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diffcap.utils.errors import DiffcapError

Rule = tuple[str, str | None]
PARTS = {"query": 0, "key": 1, "value": 2}

# The encoder's front and the word path, which both systems have from the code base that they grew out of.
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
    """Rename parameters; join separate query, key and value layers; 1 x 1 convolutions become matrices.

    Args:
        state: official parameters by name, with the checkpoint's group in front.
        rules: a pattern of the whole name without its last part, and our name; None drops it. `...:query`, `...:key` and
            `...:value` as our names are joined, in this order.
        system: for messages.

    Raises:
        DiffcapError: no rule knows a parameter, or a part of a joined one is missing.
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
                f"official {system} checkpoint: parameter {official!r} is unknown; is it of another system?"
            )
        match, new = found[0]
        if new is None:
            continue
        whole = match.group(0) == official  # a rule for this very parameter
        place, _, part = match.expand(new).partition(":")
        name = place if whole else f"{place}.{last}"
        value = value.flatten(1) if value.ndim == 4 and value.shape[2:] == (1, 1) else value
        if part:
            joined.setdefault(name, {})[PARTS[part]] = value
        else:
            ours[name] = value
    for name, parts in joined.items():
        if len(parts) != len(PARTS):
            raise DiffcapError(
                f"official {system} checkpoint: a query, key or value of {name!r} is missing; fetch the file again."
            )
        ours[name] = torch.cat([parts[number] for number in range(len(PARTS))])
    return ours
