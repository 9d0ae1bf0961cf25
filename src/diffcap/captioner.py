"""A checkpoint alone can caption: the model, its words, and how its features are made, out of one file."""

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffcap.errors import DiffcapError
from diffcap.models.captioner import Captioner
from diffcap.models.dirl import DIRL
from diffcap.models.pcl import PCL
from diffcap.models.scorer import SCORER
from diffcap.text.vocabulary import Vocabulary

METHODS: dict[str, type[Captioner]] = {"pcl": PCL, "scorer": SCORER, "dirl": DIRL}
FORMAT = 1  # of the "diffcap" entry; raised when an older file could no longer be read


class Checkpoint(NamedTuple):
    """What a fine-tuning checkpoint holds.

    Attributes:
        captioner: in eval mode, on the CPU. vocabulary: its words. max_length: positions of a caption.
        features: meta of the feature store it was trained on (backbone, weights, preprocessing, name).
        facts: method, dataset, step, provenance.
    """

    captioner: Captioner
    vocabulary: Vocabulary
    max_length: int
    features: dict[str, Any]
    facts: dict[str, Any]


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


def load(path: str | Path) -> Checkpoint:
    """Build the captioner of a fine-tuning checkpoint.

    Raises:
        DiffcapError: as `read_checkpoint`, or it is of a pre-training stage.
    """
    state = read_checkpoint(path)
    facts = dict(state["diffcap"])
    if facts["stage"] != "finetune":
        raise DiffcapError(
            f"{path}: a checkpoint of the {facts['stage']} stage cannot caption; fine-tune from it first."
        )
    if facts["method"] not in METHODS:
        raise DiffcapError(
            f"{path}: its method is {facts['method']!r}, this diffcap knows {', '.join(METHODS)}; "
            f"use diffcap {facts['version']}, which wrote it."
        )
    try:
        captioner = METHODS[facts["method"]](**facts.pop("hyperparameters"))
    except TypeError as error:
        raise DiffcapError(
            f"{path}: its settings are of another diffcap ({error}); use diffcap {facts['version']}, which wrote it."
        ) from None
    prefix = "captioner."
    weights = {
        name.removeprefix(prefix): value for name, value in state["state_dict"].items() if name.startswith(prefix)
    }
    try:
        captioner.load_state_dict(weights)
    except RuntimeError as error:
        fault = " ".join(str(error).split())[:200]
        raise DiffcapError(f"{path}: its weights do not fit its own settings ({fault}); train it again.") from None
    facts["step"] = state["global_step"]
    vocabulary = Vocabulary(facts.pop("words"), facts.pop("vocabulary_layout", "pcl"))
    max_length, features = facts.pop("max_length"), facts.pop("features")
    return Checkpoint(captioner.eval(), vocabulary, max_length, features, facts)
