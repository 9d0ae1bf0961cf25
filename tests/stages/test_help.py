"""`--help` of the stages: the variables at once, and a word about every option of ours."""

import re
import subprocess
import sys

import pytest
from tests.commands import ROOT, environment


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["extract", "pretrain", "finetune", "reinforce", "evaluate"])
def test_help_explains_every_option(stage: str) -> None:
    script = str(ROOT / "stages" / f"{stage}.py")
    wide = environment(COLUMNS="400")
    done = subprocess.run(
        [sys.executable, script, "--help", "all"], capture_output=True, text=True, env=wide, check=False
    )
    assert done.returncode == 0 and done.stderr == ""
    ours = r"(?:model|data|run)\.[a-z_]+" if stage != "evaluate" else "[a-z_]+"
    options = re.findall(rf"^  --({ours})[ ,].*?(?=^  -|^\S|\Z)", done.stdout, re.M | re.S)
    texts = re.findall(rf"^  (--{ours}[ ,].*?)(?=^  -|^\S|\Z)", done.stdout, re.M | re.S)
    own = {"evaluate": {"checkpoint", "beams", "split"}, "extract": {"model.weights", "model.stage", "data.folder"}}
    wanted = own.get(stage, {"model.lr", "data.folder", "run.out"})
    assert wanted <= set(options) and len(options) >= 12
    silent = [text.split()[0] for text in texts if not re.search(r"\s{2,}[^\s(-][^\n]{8,}", text[2:])]
    assert silent == [], silent


@pytest.mark.parametrize(
    ("stage", "texts"),
    [
        *((stage, ["--offline", f"{stage} --help all"]) for stage in ("extract", "pretrain", "finetune", "reinforce")),
        ("score", ["COCO results file", "--judge", "--embedding"]),
        ("data", ["decode every image completely", "--captions_only", "Rendered datasets only: number of pairs"]),
        ("negatives", ["or the change is inverted", "uniform: any other word of the same part of"]),
        ("report", ["--runs", "--features", "--pictures", "--attention", "--bins", "--page", "--localisation_pairs"]),
    ],
)
def test_help_imports_no_large_package(stage: str, texts: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "diffcap", stage, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(COLUMNS="400"), check=False)
    assert done.returncode == 0 and all(text in " ".join(done.stdout.split()) for text in texts)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not {"torch", "PIL", "lightning"} & imported and ("numpy" not in imported or stage == "score")
