"""Rows of the table from run folders."""

import shutil
import statistics
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.report.layouts import captions_of, make_dataset, make_run

from diffcap.evaluation.slots import parse_caption
from diffcap.records import Dataset, read_json, write_json
from diffcap.report.rows import common_protocol, mean_row, read_run, run_row
from diffcap.run_folder import training_lineage
from diffcap.utils.errors import DiffcapError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("blocks"))


def test_a_row_holds_the_metrics_file_and_the_training(dataset: Dataset, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", dataset, captions_of(dataset, wrong=3), {"pretrain": 20.5, "finetune": 40})
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    row, metrics = run_row(read_run(folder), test), read_json(folder / "eval" / "metrics.json")
    assert {name: row[name] for name in metrics["groups"]} == metrics["groups"]
    assert row["slots"] == {name: metrics["slots"][name] for name in ("type", "object", "to")}
    assert row["seconds"] == 60.5 and row["steps"] == {"pretrain": 800, "finetune": 800}
    captioned = captions_of(dataset, wrong=3)
    for kind in ("color", "material", "add", "drop", "move"):
        ids = [pair.id for pair in test if pair.change_type == kind]
        share = sum(parse_caption(captioned[id]).change_type == kind for id in ids) / len(ids)
        assert row["type_accuracy"][kind] == share
    alone = make_run(tmp_path / "b", dataset, captions_of(dataset), {"finetune": 40})
    assert run_row(read_run(alone), test)["seconds"] == 40


def test_trainings_of_other_runs_that_one_began_with_count(dataset: Dataset, tmp_path: Path) -> None:
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    before = {"pretrain": 20.0, "pretrain-cub": 3.0, "finetune": 40}
    lent = make_run(tmp_path / "lent", dataset, captions_of(dataset), before)
    borrower = make_run(tmp_path / "borrower", dataset, captions_of(dataset), {"finetune": 500})

    def began(folder: Path, start: Path) -> None:
        (folder / "config.yaml").write_text(f"model:\n  init_from: {start / 'last.ckpt'}\n")

    began(borrower / "finetune", lent / "pretrain")
    assert run_row(read_run(borrower), test)["seconds"] == 520
    began(lent / "pretrain", lent / "pretrain-cub")
    assert run_row(read_run(borrower), test)["seconds"] == 523
    began(lent / "finetune", tmp_path / "moved away" / "pretrain")  # its own is what counts
    assert run_row(read_run(lent), test)["seconds"] == 63


def test_a_stage_counts_only_if_the_next_one_started_from_it(dataset: Dataset, tmp_path: Path) -> None:
    seconds = {"pretrain": 1.0, "finetune": 20.0, "reinforce": 300.0}
    first, second = (make_run(tmp_path / name, dataset, captions_of(dataset), seconds) for name in ("first", "second"))

    def finish(folder: Path, digest: str, start: Path | None, start_digest: str | None) -> None:
        (folder / "config.yaml").write_text(f"model: {{init_from: {start or 'null'}}}")
        record = read_json(folder / "finished.json")
        hashes = {"checkpoint_sha256": digest, "init_from_sha256": start_digest}
        write_json(folder / "finished.json", {**record, **hashes})

    def trainings(run: Path) -> list[str]:
        return [
            str(path.parent.relative_to(tmp_path))
            for path in training_lineage(run / "reinforce/best.ckpt").finished_markers()
        ]

    finish(first / "finetune", "a", None, None)  # did not start from first/pretrain
    finish(second / "pretrain", "p", None, None)
    finish(second / "finetune", "b", second / "pretrain/last.ckpt", "p")
    for start in (first / "finetune/best.ckpt", first / "averaged/best.ckpt", first / "finetune"):
        finish(second / "reinforce", "c", start, "a")
        assert trainings(second) == ["first/finetune", "second/reinforce"]
    finish(second / "reinforce", "c", first / "finetune/best.ckpt", "other")
    assert trainings(second) == ["second/reinforce"]
    finish(second / "reinforce", "c", tmp_path / "original/finetune/best.ckpt", "b")  # `second` is a copy
    assert trainings(second) == ["second/pretrain", "second/finetune", "second/reinforce"]


def test_several_seeds_give_mean_and_standard_deviation() -> None:
    rows = [{"total": {"x": value}, "only": {"y": 1.0}, "seconds": 10 * value} for value in (1.0, 2.0, 6.0)]
    del rows[1]["only"]
    row = mean_row(rows[:1] + rows[2:])
    assert row["total"]["x"] == 3.5 and row["only"] == {"y": 1.0}
    row = mean_row([rows[1], *rows])
    assert row["total"]["x"] == pytest.approx(11 / 4) and row["runs"] == 4 and "only" not in row
    assert row["std"]["total"]["x"] == pytest.approx(statistics.stdev([2, 1, 2, 6]))
    assert row["seconds"] == pytest.approx(110 / 4)
    assert mean_row(rows[:1]) is rows[0]


def test_what_cannot_be_compared_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    good = read_run(make_run(tmp_path / "good", dataset, captions_of(dataset), {"finetune": 1}))
    assert common_protocol([good], dataset, "test")["tokenizer"] == "raw"
    other = read_run(make_run(tmp_path / "ptb", dataset, captions_of(dataset), {"finetune": 1}, tokenizer="ptb"))
    with pytest.raises(DiffcapError, match=r"ptb.*tokenizer is 'ptb', that of .*good is 'raw'"):
        common_protocol([good, other], dataset, "test")
    old = read_run(make_run(tmp_path / "old", dataset, captions_of(dataset), {"finetune": 1}, manifest="0"))
    with pytest.raises(DiffcapError, match="another manifest"):
        common_protocol([old], dataset, "test")
    with pytest.raises(DiffcapError, match="--split val"):
        common_protocol([good], dataset, "val")
    with pytest.raises(DiffcapError, match="make eval"):
        read_run(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        ({"beams": 5}, {"beams": 5, "length_penalty": 0.7}, r"b/eval/metrics.json: its length_penalty is 0.7, that of .*a is 0.0"),
        ({"beams": 5}, {"beams": 5, "length_penalty": 0.0}, None),
        ({"beams": 1}, {"beams": 1, "length_penalty": 0.7}, None),  # greedy decoding has no length penalty
        ({"beams": 1}, {"beams": 5}, "its beams is 5, that of .*a is 1"),
    ],
)  # fmt: skip
def test_runs_with_other_decoding_are_refused(
    dataset: Dataset, tmp_path: Path, first: dict[str, float], second: dict[str, float], fault: str | None
) -> None:
    runs = [read_run(make_run(tmp_path / name, dataset, captions_of(dataset), {"finetune": 1})) for name in "ab"]
    for run, settings in zip(runs, (first, second)):
        run.metrics["protocol"] |= settings
    with pytest.raises(DiffcapError, match=fault) if fault else nullcontext():
        common_protocol(runs, dataset, "test")


def test_any_evaluation_of_a_run_is_a_row(dataset: Dataset, tmp_path: Path) -> None:
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    seconds = {"pretrain": 1.0, "finetune": 20.0, "reinforce": 300.0}
    for number, wrong in (("1", 0), ("2", 3)):
        make_run(tmp_path / number, dataset, captions_of(dataset, wrong), seconds)
    critical, averaged = tmp_path / "1/reinforce-eval", tmp_path / "1/averaged-eval"
    for other in (critical, averaged, tmp_path / "both", tmp_path / "alone"):
        shutil.copytree(tmp_path / "2/eval", other)
    for other, files in (
        (tmp_path / "both", ["../1/reinforce/best.ckpt", "../2/finetune/best.ckpt"]),
        (tmp_path / "alone", ["../elsewhere/exported"]),
    ):
        metrics = read_json(other / "metrics.json")
        metrics["provenance"]["checkpoints"] = [{"file": file} for file in files]
        write_json(other / "metrics.json", metrics)
    run = read_run(critical)
    assert run.predictions == read_run(tmp_path / "2").predictions != read_run(tmp_path / "1").predictions
    assert run.checkpoints == [tmp_path / "1/reinforce/best.ckpt"]
    assert run.lineages == [(tmp_path / "1", ("pretrain", "finetune", "reinforce"))]
    rows = {folder: run_row(read_run(folder), test) for folder in (critical, averaged, tmp_path / "both")}
    assert [row["seconds"] for row in rows.values()] == [321, 21, 321 + 21]
    assert rows[critical]["steps"] == {"pretrain": 800, "finetune": 800, "reinforce": 900}
    assert rows[tmp_path / "both"]["steps"] == {"pretrain": 1600, "finetune": 1600, "reinforce": 900}
    unknown = run_row(read_run(tmp_path / "alone"), test)
    assert "seconds" not in unknown and "seconds" not in mean_row([unknown, rows[critical]])
    (tmp_path / "1/eval/metrics.json").unlink()
    with pytest.raises(
        DiffcapError,
        match=r"1: the run has no folder eval, but averaged-eval, reinforce-eval; give one of them, such as .*1/averaged-eval",
    ):
        read_run(tmp_path / "1")
