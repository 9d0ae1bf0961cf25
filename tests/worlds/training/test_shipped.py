"""Training of the networks that ship, by the real command; what it trains on is tested beside."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.commands import ROOT

from diffcap.features.backbones import build_backbone
from diffcap.methods.clip4idc.model import CLIP4IDCAdaptation
from diffcap.methods.clip4idc.weights import load_clip
from diffcap.text.vocabularies import build_clip_vocabulary

SCRIPT = str(ROOT / "stages" / "shipped.py")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["blocks_backbone", "blocks_clip", "tiles_backbone", "tiles_clip"])
def test_the_script_trains_resumes_and_writes_weights_that_load(name: str, tmp_path: Path) -> None:
    world, part = name.split("_")

    def train(steps: int, file: str) -> None:
        options = [f"--model.steps={steps}", "--data.batches=2", "--data.batch_size=4", "--data.num_workers=0"]
        options += [f"--output={file}", "--probe_images=60", "--trainer.default_root_dir=run"]
        done = subprocess.run([sys.executable, SCRIPT, name, *options], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0 and "on held-out scenes: {" in done.stdout, done.stderr

    train(2, "w.safetensors")
    train(2, "again.safetensors")  # nothing is left to train, the weights are the same
    weights, again = (load_file(tmp_path / file) for file in ("w.safetensors", "again.safetensors"))
    assert weights.keys() == again.keys() and all(torch.equal(weights[key], again[key]) for key in weights)
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        notes = file.metadata()
    assert notes["steps"] == "2 of 4 images" and notes["command"].startswith(f"python stages/shipped.py {name} ")
    assert "--model.steps=2" in notes["command"]
    if part == "backbone":
        size = (96, 128) if world == "blocks" else (256, 256)
        backbone = build_backbone(world, weights=str(tmp_path / "w.safetensors"))
        assert torch.isfinite(backbone(torch.randn(2, 3, *size))).all()
        return
    vocabulary = build_clip_vocabulary(["the small red cube moved"], "clip_used")
    model = CLIP4IDCAdaptation(f"ViT-{world}-16", vocabulary_size=len(vocabulary))
    load_clip(model, str(tmp_path / "w.safetensors"), vocabulary)
    row = weights["token_ids"].tolist().index(vocabulary.clip_ids[vocabulary.encode("red", 5)[1]])
    ours = model.words.token_embedding.weight[vocabulary.encode("red", 5)[1]]
    torch.testing.assert_close(ours, weights["token_embedding.weight"][row].float(), atol=0, rtol=0)


@pytest.mark.slow
def test_an_unknown_name_is_one_sentence() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "clip"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: NAME=clip is unknown; give one of blocks_backbone, ")
