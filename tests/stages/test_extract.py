"""`stages/extract.py` by its real command: kills, two processes, broken input."""

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

from diffcap.records import ChangePair, write_dataset

ROOT = Path(__file__).parents[2]
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
        *(
            sys.executable,
            str(ROOT / "stages" / "extract.py"),
            "--config",
            str(ROOT / "configs/backbone/resnet101_layer4.yaml"),
        ),
        *("--model.name=small", "--model.network=resnet34", f"--model.weights={folder / 'weights.pth'}"),
        *(f"--data.folder={folder}", "--data.batch_size=2", "--trainer.accelerator=cpu", *options),
    ]


# One thread everywhere: the last bits of a convolution may depend on their number, which two processes would halve.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, *options), capture_output=True, text=True, cwd=folder, env=ENVIRONMENT, timeout=300
    )


@pytest.fixture(scope="module")
def undisturbed(dataset: Path) -> dict[str, bytes]:
    done = run(dataset)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"small: complete, {IMAGES} images extracted.\n")
    files = {name: (dataset / "features" / "small" / name).read_bytes() for name in FILES}
    again = run(dataset)
    assert again.returncode == 0 and again.stdout.strip().endswith("small: already complete.")
    shutil.rmtree(dataset / "features")
    assert len(files["features.f16"]) == IMAGES * 512 * 7 * 7 * 2
    return files


@pytest.mark.thorough
def test_killed_and_run_again_gives_the_same_bytes(dataset: Path, undisturbed: dict[str, bytes]) -> None:
    store = dataset / "features" / "small"
    process = subprocess.Popen(
        command(dataset, "--data.num_workers=0"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    while not (store / "done.u8").exists() or not any((store / "done.u8").read_bytes()):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 0 < sum((store / "done.u8").read_bytes()) < IMAGES and not (store / "complete").exists()
    assert run(dataset).returncode == 0
    assert {name: (store / name).read_bytes() for name in FILES} == undisturbed
    shutil.rmtree(dataset / "features")


@pytest.mark.thorough
def test_two_processes_fill_one_store_and_name_a_broken_image(dataset: Path, undisturbed: dict[str, bytes]) -> None:
    store, broken = dataset / "features" / "small", dataset / f"{IMAGES - 2}.png"
    assert json.loads(undisturbed["index.json"])["paths"][-1] == broken.name  # alone in its batch
    whole, times = broken.read_bytes(), broken.stat()
    broken.write_bytes(whole[:-500])
    done = run(dataset, "--trainer.devices=2", "--trainer.strategy=ddp")
    assert done.returncode != 0 and "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"error: {broken}: truncated or broken image" in errors[0]
    assert sum((store / "done.u8").read_bytes()) == IMAGES - 1
    broken.write_bytes(whole)
    os.utime(broken, ns=(times.st_atime_ns, times.st_mtime_ns))
    done = run(dataset)
    assert done.returncode == 0, done.stderr
    assert {name: (store / name).read_bytes() for name in FILES} == undisturbed
    shutil.rmtree(dataset / "features")
