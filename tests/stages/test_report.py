"""`stages/report.py` by its real command, on a rendered dataset and run folders of known captions."""

import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocoevalcap.rouge.rouge import Rouge
from tests.commands import in_process, one_sentence, run
from tests.report.layouts import (
    METRICS,
    captions_of,
    make_dataset,
    make_run,
    make_scorer,
    make_store,
    make_tiles,
)
from tests.report.test_page import blocks_of

from diffcap.datasets.registry import WordIdProtocol
from diffcap.evaluation.protocols import evaluate
from diffcap.evaluation.remote_sensing import word_id_scoring
from diffcap.records import ChangePair, Dataset, file_hash, read_json, write_dataset, write_json
from diffcap.report.table import CEILINGS, LEFT_OUT, ORACLE, TYPICAL
from diffcap.worlds.blocks.write import oracle_captions

SCRIPT = str(Path(__file__).parents[2] / "stages" / "report.py")


def report(folder: Path, runs: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["--folder", "data", "--features", "toy", "--runs", runs, "--out", "report"]
    return run([sys.executable, SCRIPT, *words, *options], folder)


def most_common(dataset: Dataset) -> str:
    counts = Counter(caption for pair in dataset.pairs if pair.split == "train" for caption in pair.captions)
    return counts.most_common(1)[0][0]


def test_the_report_of_two_systems(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    make_store(tmp_path / "data", dataset.pairs)
    for seed, wrong in ((1, 0), (2, 4)):
        seconds = {"pretrain": 30.0, "finetune": 60.0 * seed}
        make_run(tmp_path / f"runs/pcl{seed}", dataset, captions_of(dataset, wrong), seconds, seed)
    make_run(tmp_path / "runs/scratch", dataset, captions_of(dataset, 7), {"finetune": 120.0})
    words = sorted({word for pair in dataset.pairs for caption in pair.captions for word in caption.split()})
    make_scorer(tmp_path / "runs/pcl1/finetune/best.ckpt", words)
    (tmp_path / "runs/pcl1/finetune/logs/version_0").mkdir(parents=True)
    (tmp_path / "runs/pcl1/finetune/logs/version_0/metrics.csv").write_text("step,val/CIDEr-D\n9,0.5\n19,0.75\n")
    done = report(
        tmp_path,
        '{"PCL": ["runs/pcl1", "runs/pcl2"], "PCL, no pre-training": "runs/scratch"}',
        "--pictures=6",
        "--attention=2",
        "--bins=3",
    )
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stdout.splitlines() if len(line.rstrip()) > 120]
    assert "by change type" in done.stdout and "standard deviation over 2 runs" in " ".join(done.stdout.split())
    table = read_json(tmp_path / "report/table.json")
    rows = table["rows"]
    baselines, ceilings = ["most common training caption", "nearest neighbour's caption"], [*CEILINGS]
    assert list(rows) == [*baselines, "PCL", "PCL, no pre-training", *ceilings]

    scratch = read_json(tmp_path / "runs/scratch/eval/metrics.json")
    for name, scores in scratch["groups"].items():
        assert rows["PCL, no pre-training"][name] == scores
    assert rows["PCL, no pre-training"]["slots"]["object"] == scratch["slots"]["object"]
    assert rows["PCL, no pre-training"]["seconds"] == 120
    both = [read_json(tmp_path / f"runs/pcl{seed}/eval/metrics.json")["groups"] for seed in (1, 2)]
    for name in both[0]:
        values = [groups[name]["CIDEr-D"] for groups in both]
        assert rows["PCL"][name]["CIDEr-D"] == pytest.approx(statistics.mean(values))
        assert rows["PCL"]["std"][name]["CIDEr-D"] == pytest.approx(statistics.stdev(values))
    assert rows["PCL"]["seconds"] == 120 and rows["PCL"]["runs"] == 2
    each = table["runs"]["PCL"]
    assert [(run["run"], run["seed"], run["seconds"]) for run in each] == [("runs/pcl1", 1, 90), ("runs/pcl2", 2, 150)]
    assert [{name: run[name] for name in groups} for run, groups in zip(each, both)] == both

    # the baselines, scored here on their own
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    common = dict.fromkeys((pair.id for pair in test), most_common(dataset))
    expected, baseline = evaluate(common, test, "raw", METRICS), rows["most common training caption"]
    assert {group: baseline[group] for group in expected["groups"]} == expected["groups"]
    assert baseline["slots"]["type"] == expected["slots"]["type"] and baseline["seconds"] is None
    knowing = {id: sentences[0] for id, sentences in oracle_captions(dataset.root, test).items()}
    groups = evaluate(knowing, test, "raw", METRICS)["groups"]
    assert {group: rows[ORACLE][group] for group in groups} == groups
    assert rows[TYPICAL]["total"]["CIDEr-D"] > rows[ORACLE]["total"]["CIDEr-D"]
    rouge = [
        Rouge().calc_score([text], [other for k, other in enumerate(pair.captions) if k != n])
        for pair in test
        for n, text in enumerate(pair.captions)
    ]
    assert rows[LEFT_OUT]["total"]["ROUGE-L"] == pytest.approx(statistics.mean(rouge))
    assert all(rows[name]["slots"]["type"] == 1 for name in CEILINGS)
    assert "with one reference fewer" in (tmp_path / "report/table.md").read_text()

    assert table["protocol"]["tokenizer"] == "raw" and table["protocol"]["pairs"]["total"] == len(test)
    notes = table["provenance"]
    assert notes["manifest_sha256"] == dataset.info["manifest_sha256"] and "torch" in notes["versions"]
    assert [run["seed"] for run in notes["runs"]["PCL"]] == [1, 2]
    score = f"{100 * rows['PCL']['total']['CIDEr-D']:.2f}"
    assert f"| {score} ± " in (tmp_path / "report/table.md").read_text()
    assert f"{score} $\\pm$ " in (tmp_path / "report/table.tex").read_text()
    for name, height in (("pairs.png", 6 * 192), ("attention.png", 2 * (192 + 2 * 88))):
        with Image.open(tmp_path / "report" / name) as sheet:
            assert sheet.width == 900 and sheet.height > height
    assert "attention.png does not show PCL, no pre-training: runs/scratch/finetune/best.ckpt is not" in done.stdout
    curves = read_json(tmp_path / "report/curves.json")
    assert curves["systems"] == {"PCL": [[[9, 0.5], [19, 0.75]]], "PCL, no pre-training": []}
    by_viewpoint = read_json(tmp_path / "report/viewpoint.json")
    assert sum(part["pairs"]["total"] for part in by_viewpoint["bins"]) == len(test)
    assert all("std" in row for row in by_viewpoint["systems"]["PCL"])
    names = "attention.png curves.json curves.png localisation.json pairs.png report.done.json report.html table.json table.md table.tex"
    names += " viewpoint.json viewpoint.png"
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == names.split()

    html = (tmp_path / "report/report.html").read_text()
    index = blocks_of(html)["index"]
    assert [pair["id"] for pair in index["pairs"]] == [pair.id for pair in test]
    mean = statistics.mean(pair["c"][1] for pair in index["pairs"])
    assert mean == pytest.approx(100 * rows["PCL, no pre-training"]["total"]["CIDEr-D"], abs=0.06)
    assert all("l" in pair for pair in index["pairs"])
    assert "PCL, no pre-training: runs/scratch/finetune/best.ckpt is not there" in html.split('id="pairs"')[1]
    measured = read_json(tmp_path / "report/localisation.json")["systems"]
    attended = sum(bool(pair["x"].get(side)) for pair in index["pairs"] for side in "ba")
    assert list(measured) == ["PCL"] and max(row["count"] for row in measured["PCL"]["kinds"].values()) >= attended > 0

    for pair in test:
        (dataset.root / pair.before).unlink(missing_ok=True)
    options = "--pictures=0 --attention=0 --bins=0 --curves=false --page=2 --localisation_pairs=0 --out=few"
    few = report(tmp_path, '{"PCL": "runs/pcl1"}', *options.split())
    assert few.returncode == 0, few.stderr
    index = blocks_of((tmp_path / "few/report.html").read_text())["index"]
    assert "images, which cannot be read" in few.stdout
    assert len(index["pairs"]) == 2 and not any("l" in pair for pair in index["pairs"])
    assert not (tmp_path / "few/localisation.json").exists()

    for runs, option, error in (
        ("runs/pcl1", "--localisation_pairs=-1", "--localisation_pairs is -1; it must be at least 0."),
        ("runs/nowhere", "--page=0", "runs/nowhere/eval/metrics.json: file not found"),
    ):
        failed = report(tmp_path, json.dumps({"PCL": runs}), option, "--out=bare")
        assert failed.returncode == 1 and failed.stderr.startswith(f"error: {error}") and failed.stderr.count("\n") == 1


def test_the_report_of_a_dataset_with_masks_and_word_ids(tmp_path: Path) -> None:
    dataset = make_tiles(tmp_path / "data")
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    changed = [pair for pair in test if not pair.is_distractor]
    id_scoring = word_id_scoring(WordIdProtocol(), dataset.pairs)
    captions = captions_of(dataset)
    make_run(tmp_path / "runs/scorer", dataset, captions, {"finetune": 60.0}, id_scoring=id_scoring)
    words = sorted({word for pair in dataset.pairs for caption in pair.captions for word in caption.split()})
    make_scorer(tmp_path / "runs/scorer/finetune/best.ckpt", words, (5, 4, 4), scale=4)
    missing, broken, *measured = changed
    (dataset.root / missing.extra["mask"]).unlink()
    (dataset.root / broken.extra["mask"]).write_text("a mask")
    done = report(tmp_path, '{"SCORER": "runs/scorer"}', "--pictures=9", "--attention=2")
    assert done.returncode == 0, done.stderr
    folder = (dataset.root / missing.extra["mask"]).parent.relative_to(tmp_path)
    assert f"2 masks are left out; the first: {folder}/test_" in " ".join(done.stdout.split())

    table = read_json(tmp_path / "report/table.json")
    metrics = read_json(tmp_path / "runs/scorer/eval/metrics.json")
    assert table["rows"]["SCORER"]["id_tokens"] == metrics["id_tokens"]["groups"]
    common = dict.fromkeys((pair.id for pair in test), most_common(dataset))
    expected = evaluate(common, test, "raw", METRICS, id_scoring=id_scoring)
    assert table["rows"]["most common training caption"]["id_tokens"] == expected["id_tokens"]["groups"]
    assert table["protocol"]["id_tokens"]["SCORER"] == metrics["id_tokens"]["protocol"]

    found = read_json(tmp_path / "report/localisation.json")
    masks = {pair.id: np.asarray(Image.open(dataset.root / pair.extra["mask"])) > 0 for pair in measured}
    share = statistics.mean(mask.mean() for mask in masks.values())
    assert found["masks"] == {
        "pairs": len(measured), "empty": len(test) - len(changed), "unreadable": 2, "share": pytest.approx(share)
    }  # fmt: skip
    assert found["systems"]["SCORER"]["region"] == "mask"
    row = found["systems"]["SCORER"]["kinds"]["all words"]
    lengths = {pair.id: len(captions[pair.id].split()) for pair in measured}
    assert row["count"] == 2 * sum(lengths.values())  # a map of each word on both images
    uniform = sum(lengths[id] * mask.mean() for id, mask in masks.items()) / sum(lengths.values())
    assert row["mass_chance"] == pytest.approx(uniform)

    text = (tmp_path / "report/table.md").read_text()
    assert f"| SCORER | mask | {row['count']} |" in text and "Protocol levir_cc: scores of word ids." in text
    index = blocks_of((tmp_path / "report/report.html").read_text())["index"]
    assert [pair["id"] for pair in index["pairs"] if "m" in pair] == [pair.id for pair in measured]


def written(path: Path, captions: dict[str, str]) -> str:
    path.write_text(json.dumps(captions))
    return path.name


def test_two_own_pairs_with_viewpoints_and_features_of_the_network_for_rendered_scenes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        ChangePair(str(n), f"{n}a.png", f"{n}b.png", [f"cup {n} is gone"], split, extra={"viewpoint_iou": n / 10})
        for n, split in enumerate(["train"] * 3 + ["test"] * 2)
    ]
    dataset = write_dataset(tmp_path / "data", "desk", tmp_path, rows, {"captions_only": True})
    run_folder = make_run(tmp_path / "run", dataset, captions_of(dataset), {"finetune": 60.0})
    metrics = read_json(run_folder / "eval/metrics.json")
    metrics["provenance"]["features"] = "blocks"
    write_json(run_folder / "eval/metrics.json", metrics)
    monkeypatch.chdir(tmp_path)
    assert in_process([sys.executable, SCRIPT, "--folder=data", "--out=report", '--runs={"ours": "run"}']) is None
    bins = read_json(tmp_path / "report/viewpoint.json")["bins"]
    assert [(part["low"], part["high"], part["pairs"]["total"]) for part in bins] == [(0.3, 0.3, 1), (0.4, 0.4, 1)]
    note = "ours: the features of desk are of blocks, a small network that was trained on rendered scenes"
    assert all(note in (tmp_path / "report" / name).read_text() for name in ("table.md", "report.html"))


@pytest.mark.slow  # several commands
def test_captions_of_other_systems_are_rows(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    make_store(tmp_path / "data", dataset.pairs)
    own = captions_of(dataset, 3)
    make_run(tmp_path / "runs/pcl", dataset, own, {"finetune": 60.0})
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    ptb = {**evaluate(own, test, "ptb", METRICS), "provenance": {}}
    ptb["protocol"] |= {"dataset": "blocks", "split": "test"}
    write_json(tmp_path / "runs/pcl/eval/metrics-ptb.json", ptb)
    other = "an API, zero-shot"
    files = {
        other: "runs/pcl/eval/predictions.json",
        "three seeds": [written(tmp_path / f"{wrong}.json", captions_of(dataset, wrong)) for wrong in (0, 3, 6)],
    }
    options = ("--pictures=2", "--attention=1", "--bins=2", f"--predictions={json.dumps(files)}")
    done = report(tmp_path, '{"PCL": "runs/pcl"}', *options)
    assert done.returncode == 0, done.stderr
    assert f"attention.png does not show {other}: " in done.stdout
    table = read_json(tmp_path / "report/table.json")
    rows = table["rows"]
    assert list(rows)[2:] == ["PCL", other, "three seeds", *CEILINGS]
    no_file = "seconds", "steps", "change_probability"
    assert rows[other] == {key: value for key, value in rows["PCL"].items() if key not in no_file}
    assert rows["three seeds"]["runs"] == 3 and rows["three seeds"]["std"]["total"]["CIDEr-D"] > 0
    assert table["provenance"]["runs"][other] == [
        {"file": files[other], "sha256": file_hash(tmp_path / "runs/pcl/eval/predictions.json")}
    ]
    text = (tmp_path / "report/table.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"| {other} |"))
    assert line.endswith(" - |") and f"captions read from a file: {other} / three seeds; scores x 100" in text
    html = (tmp_path / "report/report.html").read_text()
    index = blocks_of(html)["index"]
    assert [system["name"] for system in index["systems"]] == ["PCL", other, "three seeds"]
    assert all(pair["s"][0] == pair["s"][1] and pair["c"][0] == pair["c"][1] for pair in index["pairs"])
    assert f"No attention maps of {other}: " in html and "total, PTB tokens" in html

    few = written(tmp_path / "few.json", dict(list(own.items())[:-1]))
    lacking = f"few.json: 1 of the {len(test)} pairs of the test split of blocks have no caption (first {test[-1].id!r}"
    for runs, words, sentence in (
        ("PCL", "--predictions.PCL=0.json", "--predictions.PCL: a run also has this name; give the file another one."),
        ("PCL", '--predictions={"A": []}', "--predictions has a name without a file; give --predictions.NAME=FILE."),
        ("PCL", "--predictions.A=none.json", "none.json: no predictions file there; give a .json file, or a .jsonl"),
        ("PCL", f"--predictions.A={few}", lacking),
        ("", "--page=0", "--runs names no folder"),
    ):
        failed = report(tmp_path, json.dumps(dict.fromkeys(runs.split(), "runs/pcl")), "--out=x", words)
        assert sentence in one_sentence(failed) and not (tmp_path / "x").exists()


@pytest.mark.slow  # METEOR
def test_captions_of_other_systems_need_neither_a_run_nor_features(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data")
    captions = captions_of(dataset, 3)
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    options = f"report --folder=data --out=report --page=0 --predictions.API={written(tmp_path / 'a.json', captions)}"
    done = run([sys.executable, "-m", "diffcap", *options.split()], tmp_path)
    assert done.returncode == 0, done.stderr
    table = read_json(tmp_path / "report/table.json")
    assert list(table["rows"]) == ["most common training caption", "API", *CEILINGS]
    assert table["protocol"]["tokenizer"] == "ptb" and table["protocol"]["pairs"]["total"] == len(test)
    expected = evaluate(captions, test, "ptb", METRICS)
    for group, scores in expected["groups"].items():
        assert {name: table["rows"]["API"][group][name] for name in METRICS} == scores
    assert "METEOR" in table["rows"]["API"]["total"] and not (tmp_path / "report/curves.json").exists()
