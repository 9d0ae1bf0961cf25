"""A vision-language model of the Hub as a captioner without any training."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

import diffcap
from diffcap.checkpoints.base_models import base_kind, is_base_model, split_revision
from diffcap.checkpoints.hub_access import is_name
from diffcap.checkpoints.reading import FORMAT

if TYPE_CHECKING:
    from diffcap.checkpoints.loading import Checkpoint

STAGE = "zero-shot"
MAX_LENGTH = 64  # tokens; a longer answer is cut, and only its first sentence is used
# Longest side of an image in pixels. Qwen2.5-VL has 567 tokens for 768 x 576; its own limit is 16,384.
LONGEST_SIDE = 768


def names_base_model(source: str | Path) -> bool:
    """Whether this is a folder of a base model, or the name of one on the Hub, instead of a captioner of diffcap."""
    path = Path(source).expanduser()
    if path.exists():
        return path.is_dir() and is_base_model(path)
    if not isinstance(source, str) or path.suffix == ".ckpt":
        return False
    name, revision = split_revision(source)
    return is_name(name) and base_kind(name, revision) == "base"


def zero_shot(
    source: str | Path, prompt: str | None = None, sentences: int = 1, max_length: int = MAX_LENGTH
) -> "Checkpoint":
    """The captioner of a base model; on CUDA its weights are bfloat16, elsewhere float32.

    Args:
        source: folder, or user/name or user/name@revision on the Hub.
        prompt: question about the two images; None: `vlm.PROMPT`.
        sentences: number of sentences of an answer that are the caption. max_length: tokens of an answer.
    """
    from diffcap.checkpoints.loading import Checkpoint
    from diffcap.methods.vlm.model import PROMPT, VLM

    captioner = VLM(
        str(source),
        prompt=prompt or PROMPT,
        train="nothing",
        sentences=sentences,
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
    )
    features = {
        "name": None,  # any store of pixels
        "shape": None,
        "dtype": "uint8",
        "library": "pixels",
        "network": None,
        "stage": None,
        "preprocessing": {"longest_side": LONGEST_SIDE},
        "pool": None,
    }
    metadata = {
        "format": FORMAT,
        "version": diffcap.__version__,
        "stage": STAGE,
        "method": "vlm",
        "base": captioner.hyperparameters["base"],
        "revision": captioner.hyperparameters["revision"],
        "licence": captioner.licence,
        "prompt": captioner.hyperparameters["prompt"],
        "dataset": None,
        "seed": None,
        "tokenizer": "ptb",
        "step": 0,
    }
    return Checkpoint(captioner.eval(), captioner.vocabulary, max_length, features, metadata)


def base_record(checkpoint: "Checkpoint") -> dict[str, object]:
    """The entry of a vision-language model without training in metrics.json, instead of a checkpoint's."""
    entries = {name: checkpoint.metadata[name] for name in ("base", "revision", "licence", "stage", "step")}
    return {**entries, "weights_sha256": checkpoint.captioner.hyperparameters["base_sha256"]}
