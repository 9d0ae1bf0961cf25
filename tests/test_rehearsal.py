"""What `make rehearsal` measures and how it calculates the real run from it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diffcap.data.sampler import TasksInTurn
from diffcap.experiment import Experiment
from diffcap.rehearsal import check_disk, least_steps, mean_of_steps, measure, read_rate, training_row
from diffcap.utils.errors import DiffcapError


def times(device: str = "cpu", **entries: object) -> dict:
    """A file of StepTimes: a first step of each task, which is slow, then two of each."""
    steps = [
        {"task": task, "seconds": seconds, "flops": flops, "maps": 8}
        for task, seconds, flops in [
            *[("mlm", 90.0, 1e9), ("mvcl", 50.0, 1e9), ("fda", 70.0, 1e9)],
            *[("mlm", 2.0, 1e12), ("mvcl", 3.0, 3e12), ("fda", 5.0, 2e12)],
            *[("mlm", 2.0, 1e12), ("mvcl", 5.0, 3e12), ("fda", 7.0, 2e12)],
        ]
    ]
    validation = {"seconds": 5.0, "flops": 3e12, "pairs": 10, "all_pairs": 40}
    values = {"device": device, "steps": steps, "validation": validation, "row_bytes": 1000, "gpu_bytes": None}
    return {**values, "batches_per_epoch": 7, **entries}


def test_a_step_is_weighted_by_its_task_and_the_warm_up_does_not_count() -> None:
    shares = {"mlm": 8, "mvcl": 1, "fda": 2}
    assert mean_of_steps(times()["steps"], shares) == pytest.approx((8 * 2 + 4 + 2 * 6) / 11)
    assert mean_of_steps([{"task": "", "seconds": s} for s in (9, 9, 1, 3)], {}) == 2
    assert mean_of_steps([{"task": "", "seconds": 4}], {}) == 4  # nothing else is there


def test_few_steps_measure_every_task() -> None:
    experiment = Experiment(dataset="clevr_change", method="pcl")
    steps = least_steps(experiment, "pretrain")
    schedule = TasksInTurn(["mlm", "mvcl", "fda"])
    tasks = [schedule.at(step) for step in range(steps)]
    assert len(set(tasks)) == steps == 9 and {task: [n for name, n in tasks if name == task] for task, _ in tasks} == {
        task: [0, 1, 2] for task in ("mlm", "mvcl", "fda")
    }
    assert least_steps(experiment, "finetune") == 1
    assert least_steps(Experiment(dataset="clevr_change", method="clip4idc"), "pretrain") == 1


def test_the_real_run_has_the_steps_and_validations_of_the_settings() -> None:
    experiment = Experiment(dataset="clevr_change", method="pcl")
    record = {"seconds": 120, "peak_bytes": 5}
    row = training_row(experiment, "pretrain", record, times(), rate=4000.0, tflops=10.0)
    assert (row["steps"], row["validations"]) == (250_000, 25)
    assert row["seconds_per_step_of_task"] == {"mlm": 2, "mvcl": 4, "fda": 6}
    assert row["here"].startswith("9 steps of batch 200, tasks in turn, ")
    assert row["hours"] == pytest.approx((250_000 * 32 / 11 + 25 * 4 * 5.0) / 3600)
    assert row["seconds_per_validation"] == 20 and row["minutes"] == 2
    flops = 250_000 * (8 * 1e12 + 3e12 + 2 * 2e12) / 11 + 25 * 4 * 3e12
    assert row["gpu_hours"] == pytest.approx(flops / 10e12 / 3600) and row["gpu_hours_are"] == "calculated"
    assert row["hours_of_cold_reading"] == pytest.approx(250_000 * 8 * 1000 / 4000 / 3600)
    captioning = [{**step, "task": ""} for step in times()["steps"]]
    row = training_row(experiment, "finetune", record, times(steps=captioning), rate=4000.0, tflops=10.0)
    assert (row["steps"], row["validations"], row["seconds_per_step_of_task"]) == (100_000, 250, {})


def test_lengths_in_epochs_and_the_hours_of_a_gpu_are_those_measured() -> None:
    experiment = Experiment(dataset="clevr_change", method="clip4idc")
    steps = [{"task": "", "seconds": 1.0, "flops": None, "maps": 8}] * 4
    row = training_row(
        experiment, "finetune", {"seconds": 1, "peak_bytes": 5}, times("cuda", steps=steps, gpu_bytes=7), 1.0, 10.0
    )
    assert (row["steps"], row["validations"]) == (50 * 7, 50)
    assert row["gpu_hours"] == row["hours"] == pytest.approx((350 + 50 * 20) / 3600)
    assert row["gpu_hours_are"] == "measured" and row["flops"] is None and row["gpu_bytes"] == 7


def test_a_stage_is_measured_once_and_again_with_other_settings(tmp_path: Path) -> None:
    output, runs = tmp_path / "out", []

    def run() -> None:
        assert not output.exists()
        output.mkdir()
        runs.append(1)

    first = measure(tmp_path / "record.json", {"steps": 1}, [output], run)
    assert measure(tmp_path / "record.json", {"steps": 1}, [output], run) == first and len(runs) == 1
    assert measure(tmp_path / "record.json", {"steps": 2}, [output], run)["settings"] == {"steps": 2} and len(runs) == 2


def test_an_interrupted_stage_is_measured_from_its_beginning(tmp_path: Path) -> None:
    output = tmp_path / "half"

    def fail() -> None:
        output.touch()
        raise DiffcapError("interrupted")

    with pytest.raises(DiffcapError, match="interrupted"):
        measure(tmp_path / "record.json", {}, [output], fail)
    measure(tmp_path / "record.json", {}, [output], lambda: output.touch(exist_ok=False))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="memory is measured on Linux only")
def test_the_memory_is_that_of_all_processes_together() -> None:
    each = "import time; data = bytearray(b'x' * 60_000_000); time.sleep(1.5)"
    code = f"import subprocess, sys; [p.wait() for p in [subprocess.Popen([sys.executable, '-c', {each!r}]) for _ in '12']]"
    script = (
        "import subprocess, sys; from diffcap.rehearsal import peak_memory; own = bytearray(b'x' * 200_000_000)\n"
        f"with peak_memory() as peak: subprocess.run([sys.executable, '-c', {code!r}], check=True)\n"
        "print(peak[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert 120_000_000 < int(done.stdout) < 200_000_000, "the two children, and not the process that measures"


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk(tmp_path / "a/b", needed_gb=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, 3 * 10**9))
    with pytest.raises(DiffcapError, match=r"a/b: the rehearsal needs 8 GB of disk space, 3.0 GB are free; .*FOLDER="):
        check_disk(tmp_path / "a/b")
    assert not (tmp_path / "a").exists()


def test_a_rate_of_reading_is_of_all_bytes_of_all_files(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"x" * 3_000_000)
    assert read_rate(files) > 1e6
