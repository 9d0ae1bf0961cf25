"""`stages/extract.py` by its real command: jobs with parts, one of them killed; two processes, broken input."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from tests.commands import ROOT, environment, in_process, run

from diffcap.experiment import Experiment
from diffcap.records import ChangePair, write_dataset
from diffcap.stages import is_made, record_path

IMAGES = 41  # in batches of two the last one is alone
FILES = ("features.f16", "sums.u32", "index.json", "meta.json", "done.u8", "complete")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    rng = np.random.default_rng(0)
    names = [f"{n}.png" for n in range(IMAGES)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(folder / name)
    pairs = [ChangePair(name, names[n - 1], name, ["x"], "train") for n, name in enumerate(names)]
    write_dataset(folder, "toy", folder, pairs, {})
    torch.manual_seed(1)
    torch.save(torchvision.models.resnet34(weights=None).state_dict(), folder / "weights.pth")
    return folder


def command(folder: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "stages/extract.py"), "--model.name=small"),
        *("--model.network=resnet34", "--model.stage=layer4", f"--model.weights={folder / 'weights.pth'}"),
        *(f"--data.folder={folder}", "--data.batch_size=2", "--trainer.accelerator=cpu", *options),
    ]


@pytest.fixture(scope="module")
def undisturbed(dataset: Path) -> dict[str, bytes]:
    done = run(command(dataset), dataset)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"small: complete, {IMAGES} images extracted.\n")
    files = {name: (dataset / "features" / "small" / name).read_bytes() for name in FILES}
    again = run(command(dataset), dataset)
    assert again.returncode == 0 and again.stdout.strip().endswith("small: already complete.")
    shutil.rmtree(dataset / "features")
    assert len(files["features.f16"]) == IMAGES * 512 * 7 * 7 * 2
    return files


@pytest.mark.thorough
def test_three_jobs_with_a_third_each_and_one_of_them_killed_give_the_same_bytes(
    dataset: Path, undisturbed: dict[str, bytes]
) -> None:
    store, pipe = dataset / "features" / "small", subprocess.PIPE
    shards = [command(dataset, "--data.num_workers=0", f"--data.shard={number}/3") for number in range(3)]
    jobs = [subprocess.Popen(words, env=environment(), stdout=pipe, stderr=pipe, text=True) for words in shards]
    while not (store / "done.u8").exists():
        time.sleep(0.01)
    jobs[1].kill()
    outputs = [job.communicate(timeout=300) for job in jobs]
    assert [job.returncode for job in jobs] == [0, -signal.SIGKILL, 0], outputs
    assert not (store / "complete").exists() and not (store / "extract.done.json").exists()
    assert "are left to the other shards." in outputs[0][0] and "are left to the other shards." in outputs[2][0]
    last = run(shards[1], dataset)
    assert last.returncode == 0 and last.stdout.endswith("images extracted.\n"), last
    assert {name: (store / name).read_bytes() for name in FILES} == undisturbed
    shutil.rmtree(dataset / "features")


def test_the_record_is_written_when_no_shard_is_missing(
    blocks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(blocks, tmp_path / "data", ignore=shutil.ignore_patterns("features"))
    variables = {"dataset": "blocks", "method": "scorer", "folder": str(tmp_path / "data")}
    words = [sys.executable, "-m", "diffcap", "extract", *(f"--{name}={value}" for name, value in variables.items())]
    experiment = Experiment(**variables)
    for shard, complete in (("1/2", False), ("1/2", False), ("0/2", True)):
        assert in_process([*words, "--data.num_workers=0", "--data.batch_size=8", f"--data.shard={shard}"]) is None
        assert is_made("extract", experiment) == record_path("extract", experiment).is_file() == complete
    for more in ([], ["--data.shard=1/2"]):
        capsys.readouterr()
        assert in_process([*words, "--data.num_workers=0", "--data.batch_size=8", *more]) is None
        assert "nothing to do, extract is complete" in capsys.readouterr().out
    message = in_process([*words, "--backbone", "files", "--model.image_size=[48,64]", "--data.shard=0/2"])
    assert message == "error: --data.shard=0/2: BACKBONE=files stores no features; leave out the shard."


@pytest.mark.thorough
def test_two_processes_fill_one_store_and_name_a_broken_image(dataset: Path, undisturbed: dict[str, bytes]) -> None:
    store, broken = dataset / "features" / "small", dataset / f"{IMAGES - 2}.png"
    assert json.loads(undisturbed["index.json"])["paths"][-1] == broken.name  # alone in its batch
    whole, times = broken.read_bytes(), broken.stat()
    broken.write_bytes(whole[:-500])
    done = run(command(dataset, "--trainer.devices=2", "--trainer.strategy=ddp"), dataset)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"error: {broken}: truncated or broken image" in errors[0]
    assert sum((store / "done.u8").read_bytes()) == IMAGES - 1
    broken.write_bytes(whole)
    os.utime(broken, ns=(times.st_atime_ns, times.st_mtime_ns))
    done = run(command(dataset), dataset)
    assert done.returncode == 0, done.stderr
    assert {name: (store / name).read_bytes() for name in FILES} == undisturbed
    shutil.rmtree(dataset / "features")
