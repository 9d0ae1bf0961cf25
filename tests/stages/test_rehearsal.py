"""`make rehearsal` by its real command, with few scenes."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from tests.commands import ROOT, one_sentence, run

from diffcap.records import read_dataset
from diffcap.utils.errors import DiffcapError

SCRIPT = str(ROOT / "stages/rehearsal.py")
SMALL = ("--scenes=60", "--rendered=15", "--steps=4", "--limit=4", "--backbone=blocks", "--trainer=smoke")
HOME = Path("data/rehearsal-clevr_change")
TASKS = {"mlm": 8, "mvcl": 1, "fda": 2}  # and their shares


def rehearse(folder: Path, method: str, *options: str) -> tuple[str, dict]:
    """Run it; what it printed, and the content of table.json."""
    done = run([sys.executable, SCRIPT, "--dataset", "clevr_change", "--method", method, *SMALL, *options], folder, 600)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / f"runs/rehearsal-clevr_change/{method}/table.json").read_text())


def test_the_table_of_a_method_and_a_second_call_reuses_everything(tmp_path: Path) -> None:
    _, table = rehearse(tmp_path, "scorer")
    rows = {row["stage"]: row for row in table["rows"]}
    assert list(rows) == ["data", "extract", "finetune", "eval"]
    assert rows["data"]["real"] == "120 pairs, 180 images, 744 captions"
    assert rows["extract"]["disk_bytes"] == 180 * 107 * 4 * 6 * 2 and rows["extract"]["here"] == "45 images"
    measured = tmp_path / "runs/rehearsal-clevr_change/scorer/measured"
    times = json.loads((measured / "finetune-times.json").read_text())
    assert len(times["steps"]) == 4 and times["validation"]["pairs"] == 4 and times["validation"]["all_pairs"] == 10
    assert (
        times["steps"][0]["maps"] == 3 * 16 and times["row_bytes"] == 107 * 4 * 6 * 2
    )  # scenes: one image is in both pairs
    step = (times["steps"][2]["seconds"] + times["steps"][3]["seconds"]) / 2
    seconds = 4 * step + 2 * times["validation"]["seconds"] * 10 / 4  # TRAINER=smoke: 4 steps, 2 validations
    row = rows["finetune"]
    assert row["seconds_per_step"] == pytest.approx(step) and row["hours"] == pytest.approx(seconds / 3600)
    assert row["gpu_hours_are"] == "calculated" and row["flops"] > 1e9 and row["peak_bytes"] > 1e8
    assert all(row["minutes"] > 0 and row["hours"] >= 0 for row in table["rows"])
    text = (tmp_path / "runs/rehearsal-clevr_change/scorer/table.md").read_text()
    assert "| finetune | 4 steps of batch 16, a validation of 4 pairs |" in text and "GPU hours are calculated" in text
    sample = read_dataset(tmp_path / HOME / "sample")
    assert len(sample.pairs) == 120 and len({path for pair in sample.pairs for path in pair.images}) == 45
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / HOME).rglob("*") if path.is_file()}
    again, second = rehearse(tmp_path, "scorer")
    assert again.count("measured already") == 4 and second["rows"][2] == row
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.thorough
def test_pre_training_reads_the_negatives_of_the_whole_dataset(tmp_path: Path) -> None:
    output, table = rehearse(tmp_path, "pcl")
    assert [row["stage"] for row in table["rows"]] == ["data", "negatives", "extract", "pretrain", "finetune", "eval"]
    assert table["rows"][1]["real"] == "negatives for 605 captions"
    measured = tmp_path / "runs/rehearsal-clevr_change/pcl/measured"
    steps = json.loads((measured / "pretrain-times.json").read_text())["steps"]
    assert [step["task"] for step in steps] == [
        "mlm",
        "mvcl",
        "fda",
    ] * 3  # more than --steps=4, so that each is measured
    seconds = {task: sum(step["seconds"] for step in steps[3:] if step["task"] == task) / 2 for task in TASKS}
    row = table["rows"][3]
    assert row["seconds_per_step_of_task"] == pytest.approx(seconds)
    assert row["seconds_per_step"] == pytest.approx(sum(TASKS[task] * seconds[task] for task in TASKS) / 11)
    assert "weighted by their shares" in " ".join(output.split())
    assert len(json.loads((measured / "finetune-times.json").read_text())["steps"]) == 4


@pytest.mark.thorough
def test_image_files_need_no_disk_space_and_are_read_at_each_step(tmp_path: Path) -> None:
    output, table = rehearse(tmp_path, "clip4idc", "--backbone=files", "--offline=yes", "--steps=1", "--limit=2")
    row = table["rows"][1]
    assert row["stage"] == "extract" and row["here"] == "45 images" and row["real"].startswith("180 image files")
    store = tmp_path / HOME / "sample/features/files"
    assert row["disk_bytes"] == 4 * sum(path.stat().st_size for path in store.iterdir()) < 50_000
    measured = tmp_path / "runs/rehearsal-clevr_change/clip4idc/measured"
    times = json.loads((measured / "finetune-times.json").read_text())
    sizes = [path.stat().st_size for path in (tmp_path / HOME / "official/rendered").rglob("*.png")]
    assert min(sizes) < times["row_bytes"] < max(sizes)
    rate = json.loads((tmp_path / HOME / "sample/measured/files.json").read_text())["read_rate"]
    assert row["hours"] == pytest.approx(180 * times["row_bytes"] / rate / 3600)
    on_cpu = not torch.cuda.is_available()  # there, the activations are computed again, and the table says so
    for trained in table["rows"][2:4]:
        assert trained["checkpointing"] is on_cpu
        config = (tmp_path / f"runs/rehearsal-clevr_change/clip4idc/{trained['stage']}/config.yaml").read_text()
        assert f"checkpointing: {str(on_cpu).lower()}" in config
    assert "measured with `checkpointing: true`" in " ".join(output.split()) or not on_cpu


@pytest.mark.parametrize(
    ("variables", "options", "fault"),
    [
        ({"dataset": "cub"}, {}, "DATASET=cub: there is no rehearsal of it; the rehearsal has clevr_change."),
        ({"run": "runs/mine"}, {}, "RUN= is not for the rehearsal; leave it out"),
        ({"method": "card"}, {}, "METHOD=card is unknown"),
        ({}, {"steps": 0}, "--steps is 0; it must be more than 0."),
    ],
)
def test_a_bad_value_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict, options: dict, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DiffcapError, match=fault):
        runpy.run_path(SCRIPT)["rehearsal"](variables, **options)
    assert list(tmp_path.iterdir()) == []


def test_the_refusal_is_one_sentence(tmp_path: Path) -> None:
    done = run([sys.executable, SCRIPT, "--dataset", "birds2words"], tmp_path)
    assert "there is no rehearsal of it" in one_sentence(done)
