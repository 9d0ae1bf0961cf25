"""Checkpoints as the stages write them, without training."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import diffcap
from diffcap.checkpoints.reading import FORMAT

WORDS = ["cube", "moved", "red", "the"]


def write_checkpoint(path: Path, model: nn.Module, stage: str, words: list[str] = WORDS, **metadata: Any) -> Path:
    """A file of `stage` ("pretrain" or "finetune") around a model's weights."""
    state = {f"captioner.{name}": value for name, value in model.state_dict().items()}
    entry = {"format": FORMAT, "version": diffcap.__version__, "stage": stage, "words": words, "max_length": 12}
    entry |= {
        "features": {"name": "toy", "shape": [5, 2, 3], "dtype": "float16"},
        "dataset": "toy",
        "seed": 1,
        "train_seconds": 0.0,
    }
    if stage == "finetune":
        entry |= {
            "method": "pcl",
            "hyperparameters": model.hyperparameters,
            "tokenizer": "raw",
            "vocabulary_layout": "pcl",
        }
    torch.save({"state_dict": state, "global_step": 7, "diffcap": {**entry, **metadata}}, path)
    return path
