"""The training stages: pre-training, fine-tuning, self-critical training. Each resumes an interrupted run."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from diffcap.methods import Method, import_object, methods
from diffcap.run_folder import FINETUNE, PRETRAIN, REINFORCE
from diffcap.utils.settings import get_config_value


def pretrain(arguments: Sequence[str]) -> None:
    """Pre-train the model of a method; the result is in <run>/pretrain/."""
    pretraining = _method(arguments).pretraining
    assert pretraining is not None
    _train(PRETRAIN, pretraining.module, pretraining.data, arguments)


def finetune(arguments: Sequence[str]) -> None:
    """Train a captioner on captions; the result is <run>/finetune/best.ckpt."""
    _train(FINETUNE, "diffcap.lit.finetuning:Captioning", "diffcap.data.datamodules:CaptionData", arguments)


def reinforce(arguments: Sequence[str]) -> None:
    """Train a fine-tuned captioner further, with the CIDEr-D of its captions as reward; the result is <run>/reinforce/best.ckpt."""
    _train(REINFORCE, "diffcap.lit.reinforcement:Reinforcement", "diffcap.data.datamodules:ReinforceData", arguments)


def _train(stage: str, module: str, data: str, arguments: Sequence[str]) -> None:
    from diffcap.lit.run import TrainingCLI

    TrainingCLI(import_object(module), import_object(data), save_config_callback=None, args=list(arguments)).train(
        stage
    )


def _method(arguments: Sequence[str]) -> Method:
    """The method whose pre-training the settings describe, found by its name or else by the class of its model."""
    from diffcap.pipeline import own_configs

    known = [method for method in methods().values() if method.pretraining]
    # os.path: a section of CONFIG, in JSON, may be too long for Path.is_file
    files = [Path(path) for path in own_configs(arguments) if os.path.isfile(path)]  # noqa: PTH113
    named = next((value for word, value in itertools.pairwise(arguments) if word == "--run.method"), None)
    named = named or get_config_value(files, "run", "method")
    model = get_config_value(files, "model", "captioner", "class_path")
    for method in known:
        assert method.pretraining is not None
        if method.name == named or (not named and method.pretraining.captioner.replace(":", ".") == model):
            return method
    return known[0]
