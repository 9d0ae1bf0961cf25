"""Reading a checkpoint of ours: what every stage after the first begins with."""

import pickle
from pathlib import Path
from typing import Any

import torch

from diffcap.errors import DiffcapError

FORMAT = 1  # of the "diffcap" entry; raised when an older file could no longer be read


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint of ours onto the CPU without running pickled code.

    Raises:
        DiffcapError: missing, damaged, from another program, or of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise DiffcapError(f"{path}: no checkpoint there; train one with `make pretrain finetune`, or check the path.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, LookupError, ValueError, TypeError, pickle.UnpicklingError) as error:
        # Text makes the unpickler stumble over its letters in any of these ways.
        reason = next(iter(str(error).splitlines()), "")[:120].rstrip(". ") or type(error).__name__
        raise DiffcapError(f"{path}: not a readable checkpoint ({reason}); train it again or copy it again.") from None
    facts = state.get("diffcap") if isinstance(state, dict) else None
    if not isinstance(facts, dict) or not {"format", "version"} <= facts.keys():
        raise DiffcapError(f"{path}: not a checkpoint of diffcap; official ones come in through diffcap.interop.")
    if state["diffcap"]["format"] != FORMAT:
        raise DiffcapError(
            f"{path}: checkpoint format {state['diffcap']['format']}, this diffcap reads {FORMAT}; "
            f"use diffcap {state['diffcap']['version']}, which wrote it, or train it again."
        )
    return state


def weights_of(state: dict[str, Any], prefix: str = "captioner.") -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint whose names begin so, without that beginning."""
    found = state["state_dict"].items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}
