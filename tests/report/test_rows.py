"""Rows of the table from run folders, scores by viewpoint, and the captions of the baselines."""

import shutil
import statistics
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.report.layouts import captions_of, make_dataset, make_run, write_store

from diffcap.evaluation.protocols import evaluate
from diffcap.evaluation.slots import parse_caption
from diffcap.features.store import FeatureStore
from diffcap.records import ChangePair, Dataset, read_json, write_json
from diffcap.report.gather import MOST_COMMON, NEAREST, baseline_captions, vectors_of_pairs
from diffcap.report.rows import common_protocol, mean_row, quantile_bins, read_run, run_row, viewpoint_scores
from diffcap.run_folder import training_lineage
from diffcap.utils.errors import DiffcapError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("blocks"))


def test_a_row_holds_the_metrics_file_and_the_training(dataset: Dataset, tmp_path: Path) -> None:
    captioned = captions_of(dataset, wrong=3)
    folder = make_run(tmp_path / "a", dataset, captioned, {"pretrain": 20.5, "finetune": 40})
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    file = folder / "eval" / "metrics.json"
    write_json(file, {**read_json(file), "change_probability": {"AUC": 0.75, "accuracy": 0.5}})
    row, metrics = run_row(read_run(folder), test), read_json(file)
    assert {name: row[name] for name in metrics["groups"]} == metrics["groups"]
    assert row["slots"] == {name: metrics["slots"][name] for name in ("type", "object", "to")}
    assert row["seconds"] == 60.5 and row["steps"] == {"pretrain": 800, "finetune": 800}
    assert row["change_probability"] == metrics["change_probability"]
    for kind in ("color", "material", "add", "drop", "move"):
        ids = [pair.id for pair in test if pair.change_type == kind]
        share = sum(parse_caption(captioned[id]).change_type == kind for id in ids) / len(ids)
        assert row["type_accuracy"][kind] == share


def test_a_stage_counts_only_if_the_next_one_started_from_it(dataset: Dataset, tmp_path: Path) -> None:
    seconds = {"pretrain": 1.0, "finetune": 20.0, "reinforce": 300.0}
    first, second = (make_run(tmp_path / name, dataset, captions_of(dataset), seconds) for name in ("first", "second"))

    def finish(folder: Path, digest: str, start: Path | None, start_digest: str | None) -> None:
        (folder / "config.yaml").write_text(f"model: {{init_from: {start or 'null'}}}")
        record = read_json(folder / "finished.json")
        hashes = {"checkpoint_sha256": digest, "init_from_sha256": start_digest}
        write_json(folder / "finished.json", {**record, **hashes})

    def trainings(run: Path) -> list[str]:
        markers = training_lineage(run / "reinforce/best.ckpt").finished_files()
        return [str(path.parent.relative_to(tmp_path)) for path in markers]

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
    row = mean_row([rows[1], *rows])
    assert row["total"]["x"] == pytest.approx(11 / 4) and row["runs"] == 4 and "only" not in row
    assert row["std"]["total"]["x"] == pytest.approx(statistics.stdev([2, 1, 2, 6]))
    assert row["seconds"] == pytest.approx(110 / 4)
    assert mean_row(rows[:1]) is rows[0]


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        ({}, {"tokenizer": "ptb"}, "its tokenizer is 'ptb', that of .*a is 'raw'"),
        ({"beams": 5}, {"beams": 5, "length_penalty": 0.7}, r"b/eval/metrics.json: its length_penalty is 0.7, that of .*a is 0.0"),
        ({"beams": 5}, {"beams": 5, "length_penalty": 0.0}, None),
        ({"beams": 1}, {"beams": 1, "length_penalty": 0.7}, None),  # greedy decoding has no length penalty
        ({"beams": 1}, {"beams": 5}, "its beams is 5, that of .*a is 1"),
        ({"split": "val"}, {}, "--split test, or report with --split val"),
    ],
)  # fmt: skip
def test_runs_with_another_protocol_are_refused(
    dataset: Dataset, tmp_path: Path, first: dict[str, float], second: dict[str, float], fault: str | None
) -> None:
    runs = [read_run(make_run(tmp_path / name, dataset, captions_of(dataset), {"finetune": 1})) for name in "ab"]
    for run, settings in zip(runs, (first, second)):
        run.metrics["protocol"] |= settings
    with pytest.raises(DiffcapError, match=fault) if fault else nullcontext():
        common_protocol(runs, dataset, "test")
    runs[0].metrics["provenance"]["manifest_sha256"] = "0"
    with pytest.raises(DiffcapError, match="another manifest"):
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
    rows = {folder: run_row(read_run(folder), test) for folder in (critical, averaged, tmp_path / "both")}
    assert [row["seconds"] for row in rows.values()] == [321, 21, 321 + 21]
    assert rows[tmp_path / "both"]["steps"] == {"pretrain": 1600, "finetune": 1600, "reinforce": 900}
    unknown = run_row(read_run(tmp_path / "alone"), test)
    assert "seconds" not in unknown and "seconds" not in mean_row([unknown, rows[critical]])
    (tmp_path / "1/eval/metrics.json").unlink()
    with pytest.raises(DiffcapError, match=r"the run has no folder eval, but averaged-eval, reinforce-eval; give one"):
        read_run(tmp_path / "1")


CUBE = {"size": "large", "color": "gray", "material": "metal", "shape": "cube", "to": None}
SAID = ("the cube vanished", "the gray cube was moved", "there is no change", "the small ball appeared")


def pairs_of(values: list[float | None], has_object_labels: bool = True) -> list[ChangePair]:
    pairs = []
    for number, value in enumerate(values):
        still = number % 3 == 0
        extra = {} if value is None else {"viewpoint_iou": value}
        if has_object_labels and not still:
            extra["changed"] = CUBE
        captions = ["no change was made", "there is no change"] if still else [f"the gray cube was moved {number}"]
        pairs.append(ChangePair(str(number), "b", "a", captions, "test", None if still else "move", still, extra))
    return pairs


def captions_for(pairs: list[ChangePair], seed: int = 0) -> dict[str, str]:
    random = np.random.default_rng(seed)
    return {pair.id: SAID[random.integers(4)] for pair in pairs}


def test_bins_have_all_pairs_with_a_viewpoint_and_equal_ones_together() -> None:
    values = np.random.default_rng(0).uniform(0.3, 0.9, 53).round(4).tolist()
    pairs = pairs_of([*values, None, None])
    bins = quantile_bins(pairs, 5)
    assert sorted(pair.id for part in bins for pair in part) == sorted(pair.id for pair in pairs[:53])
    assert {len(part) for part in bins} <= {10, 11} and len(bins) == 5
    inside = [[pair.extra["viewpoint_iou"] for pair in part] for part in bins]
    assert all(one == sorted(one) and one[-1] < two[0] for one, two in pairwise(inside))
    bins = quantile_bins(pairs_of([1.0] * 8 + [0.5, 0.6]), 5)
    assert [[pair.extra["viewpoint_iou"] for pair in part] for part in bins] == [[0.5, 0.6], [1.0] * 8]
    assert quantile_bins(pairs_of([1.0] * 8), 5) == [] == quantile_bins(pairs_of([None] * 4), 5)
    for count, expected in ((1, ["012"]), (2, ["01", "2"]), (9, ["0", "1", "2"])):  # fewer pairs than bins: fewer bins
        parts = quantile_bins(pairs_of([0.1, 0.2, 0.3]), count)
        assert ["".join(pair.id for pair in part) for part in parts] == expected


def test_each_bin_scores_as_a_split_of_its_own_and_seeds_give_means() -> None:
    pairs = pairs_of(np.random.default_rng(1).uniform(size=40).tolist())
    seeds = [captions_for(pairs, seed) for seed in (1, 2)]
    bins = quantile_bins(pairs, 4)
    scores = viewpoint_scores({"base": seeds[:1], "other": seeds[1:], "run": seeds}, bins, "raw")
    each = [scores["systems"]["base"], scores["systems"]["other"]]
    for part, row in zip(bins, each[0]):
        own = {pair.id: seeds[0][pair.id] for pair in part}
        alone = evaluate(own, part, "raw", ["CIDEr-D"])
        for group in ("total", "semantic", "distractor"):
            assert row["CIDEr-D"][group] == pytest.approx(alone["groups"][group]["CIDEr-D"])
        right = [parse_caption(own[pair.id]).change_type == (pair.change_type or "none") for pair in part]
        assert row["type_accuracy"]["total"] == sum(right) / len(right) == alone["slots"]["type"]
    plain = pairs_of([0.1, 0.5, 0.8, 0.9], has_object_labels=False)
    of_plain = viewpoint_scores({"base": [captions_for(plain)]}, quantile_bins(plain, 2), "raw")
    assert all(row.keys() == {"CIDEr-D"} for row in of_plain["systems"]["base"])
    assert [part["pairs"]["total"] for part in scores["bins"]] == [10] * 4
    assert [(part["low"], part["high"]) for part in of_plain["bins"]] == [(0.1, 0.5), (0.8, 0.9)]
    for number, row in enumerate(scores["systems"]["run"]):
        values = [rows[number]["CIDEr-D"]["total"] for rows in each]
        assert row["CIDEr-D"]["total"] == pytest.approx(statistics.mean(values))
        assert row["std"]["CIDEr-D"]["total"] == pytest.approx(statistics.stdev(values)) and row["runs"] == 2


def store_of(folder: Path, maps: np.ndarray) -> FeatureStore:
    return FeatureStore.open(write_store(folder, [f"{number}.png" for number in range(len(maps))], maps))


def pair_of(before: int, after: int, *captions: str) -> ChangePair:
    return ChangePair(f"{before}-{after}", f"{before}.png", f"{after}.png", list(captions), "train")


def test_pairs_are_described_by_the_averaged_map_and_its_difference(tmp_path: Path) -> None:
    maps = np.random.default_rng(0).normal(size=(5, 1200, 4, 4)).astype(np.float16)
    places = [(0, 1), (2, 3), (1, 1)]
    vectors = vectors_of_pairs(store_of(tmp_path / "store", maps), [pair_of(*place) for place in places], chunk_size=2)
    means = maps.astype(np.float64).mean(axis=(2, 3))  # 1200 x 4 x 4 is too large: one cell is left
    for vector, (before, after) in zip(vectors, places):
        first, second = means[before], means[after] - means[before]
        expected = [first / np.linalg.norm(first), second / (np.linalg.norm(second) or 1)]
        np.testing.assert_allclose(vector, np.concatenate(expected), atol=2e-4)
    assert vectors.dtype == np.float16


def test_captions_come_from_training_pairs(tmp_path: Path) -> None:
    maps = np.random.default_rng(1).normal(size=(8, 3, 2, 2)).astype(np.float16)
    maps[6], maps[7] = maps[2] * 1.01, maps[3] * 0.99
    train = [pair_of(0, 1, "a", "same"), pair_of(2, 3, "b", "same"), pair_of(4, 5)]
    predictions = baseline_captions(train, [pair_of(6, 7), pair_of(0, 1)], store_of(tmp_path / "store", maps))
    assert predictions == {MOST_COMMON: {"6-7": "same", "0-1": "same"}, NEAREST: {"6-7": "b", "0-1": "a"}}
