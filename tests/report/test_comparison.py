"""`diffcap compare` on two evaluated runs, and the table of `make accuracy`: scores, wins, gains and bad input."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from tests.toy import captions, pairs, write_toy

from diffcap.cli import main
from diffcap.evaluation.captions import score_captions
from diffcap.evaluation.coco import write_predictions, write_references
from diffcap.evaluation.protocols import evaluate, groups_of
from diffcap.records import file_hash, read_dataset, write_json
from diffcap.report.comparison import accuracy_table, gain_table, read_evaluation
from diffcap.report.rows import read_run
from diffcap.utils.errors import DiffcapError

METRICS = ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr-D")
PAIRS = pairs(12)


def write_run(run: Path, predictions: dict[str, str], **changes: list[str]) -> Path:
    """What an evaluation leaves in RUN/eval."""
    references = {pair.id: changes.get(pair.id, pair.captions) for pair in PAIRS}
    result = evaluate(predictions, PAIRS, "raw", METRICS, protocol={"dataset": "toy", "split": "test"})
    write_json(run / "eval/metrics.json", result)
    write_predictions(run / "eval/predictions.json", predictions)
    write_references(run / "eval/references.json", references)
    write_json(run / "eval/groups.json", groups_of(PAIRS))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """The second run is right about distractors, where the first is not; both are wrong about changes, one apart."""
    wrong = {pair.id: captions(30, False)[0] for pair in PAIRS}
    better = {pair.id: pair.captions[0] if pair.is_distractor else wrong[pair.id] for pair in PAIRS}
    return write_run(tmp_path / "a", {**wrong, "3.png": PAIRS[6].captions[0]}), write_run(tmp_path / "b", better)


def change(path: Path, **sections: dict[str, Any]) -> None:
    """Update sections of a metrics.json."""
    metrics = json.loads(path.read_text())
    write_json(path, metrics | {name: metrics.get(name, {}) | section for name, section in sections.items()})


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    main(["compare", *map(str, arguments)])
    return capsys.readouterr().out


def refused(*arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *map(str, arguments)])
    assert isinstance(stop.value.code, str) and "\n" not in stop.value.code
    return stop.value.code


def test_scores_wins_and_pairs(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(printed(capsys, *runs, "--json", "--samples=40", "--pairs=3"))
    scored = [json.loads((run / "eval/metrics.json").read_text())["groups"] for run in runs]
    assert list(found["groups"]) == ["total", "semantic", "distractor", "move"] == list(scored[0])
    for group, metrics in found["groups"].items():
        assert list(metrics) == list(METRICS)
        for metric, row in metrics.items():
            assert row["a"] == pytest.approx(scored[0][group][metric], abs=1e-9)
            assert row["b"] == pytest.approx(scored[1][group][metric], abs=1e-9)
            assert row["difference"] == pytest.approx(row["b"] - row["a"])
            assert row["interval"][0] <= row["difference"] <= row["interval"][1]
    assert found["wins"]["distractor"] == {"b": 12, "a": 0, "tie": 0}
    assert found["wins"]["move"] == {"b": 0, "a": 1, "tie": 11}
    assert len(found["largest"]) == 3 and found["protocol"]["samples"] == 40
    widest = [abs(row["b_score"] - row["a_score"]) for row in found["largest"]]
    assert widest == sorted(widest, reverse=True) and found["largest"][0]["references"]
    assert printed(capsys, *runs, "--json", "--samples=40", "--pairs=3") == json.dumps(found, indent=2) + "\n"


def test_the_table_and_the_files(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = {"model": "a judge", "notes": [], "groups": {"total": {"correct": [0.5, 0.4, 0.6]}}}
    change(runs[0] / "eval/metrics.json", further={"judge": verdicts})
    shown = printed(capsys, runs[0] / "eval", runs[1], "--samples=40", f"--out={tmp_path / 'c.md'}")
    texts = "ahead", "distractor", "middle 95 % of 40 draws", "reference", "judge, a judge", "50.00 [40.00, 60.00]"
    assert all(text in " ".join(shown.split()) for text in texts)
    text = (tmp_path / "c.md").read_text()
    assert "| distractor | BLEU-1 |" in text and "| 12 | 0 | 0 |" in text


def test_a_difference_that_is_printed_as_zero_is_not_significant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "a", {pair.id: "xx" for pair in PAIRS})
    other = write_run(tmp_path / "b", {pair.id: "vv ww xx yy zz" for pair in PAIRS})
    out = tmp_path / "c.md"
    found = json.loads(printed(capsys, one, other, "--samples=40", "--json"))["groups"]["total"]["BLEU-4"]
    assert 0 < abs(found["difference"]) < 1e-6 and found["interval"][1] < 0  # lower in every draw, by nothing
    printed(capsys, one, other, "--samples=40", f"--out={out}")
    bleu = next(line for line in out.read_text().splitlines() if line.startswith("|  | BLEU-4"))
    assert "*" not in bleu and bleu.endswith("| 0.00 | [0.00, 0.00] | - |")


def test_settings_that_differ_are_named(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert "Settings that differ" not in printed(capsys, *runs, "--samples=2")
    for run, beams, seed in zip(runs, (1, 5), (1, 2)):
        origin = {"seed": seed, "method": "pcl", **({"step": 9} if seed == 2 else {})}
        change(run / "eval/metrics.json", protocol={"beams": beams, "length_penalty": 0.0}, provenance=origin)
    shown = " ".join(printed(capsys, *runs, "--samples=2").split())
    assert "Settings that differ, A / B: beams 1 / 5, seed 1 / 2, step None / 9." in shown
    for run, rate in zip(runs, (0.001, 0.002)):
        (run / "finetune").mkdir()
        settings = f"model: {{captioner: {{init_args: {{width: 8}}}}, lr: {rate}}}\nrun: {{out: {run}}}\n"
        (run / "finetune/config.yaml").write_text(settings)
    found = json.loads(printed(capsys, *runs, "--samples=2", "--json"))
    assert {name: values for name, values in found["settings"].items() if "." in name} == {"model.lr": [0.001, 0.002]}
    captions = runs[1] / "eval/predictions.json"  # of a file, nothing is known
    assert json.loads(printed(capsys, runs[0], captions, "--samples=2", "--json"))["settings"] == {}


def test_the_groups_may_be_those_of_a_dataset(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(runs[0] / "eval/groups.json", {"total": [pair.id for pair in PAIRS]})
    assert list(json.loads(printed(capsys, *runs, "--json", "--samples=2"))["groups"]) == ["total"]
    folder = write_toy(tmp_path / "toy", scenes=12)
    found = json.loads(printed(capsys, *runs, "--json", "--samples=2", f"--folder={folder}"))
    assert list(found["groups"]) == ["total", "semantic", "distractor", "move"]
    small = write_toy(tmp_path / "small", scenes=4)
    assert "lacks 16 of the runs' pairs (first '4.png')" in refused(*runs, f"--folder={small}")


def test_what_cannot_be_compared_is_one_sentence(runs: tuple[Path, Path], tmp_path: Path) -> None:
    captioned = {pair.id: "x" for pair in PAIRS}
    other = write_run(tmp_path / "other", captioned, **{"2.png": ["the red cube moved"]})
    assert "have different references (first at '2.png'); evaluate both on the same manifest" in refused(runs[0], other)
    references = json.loads((other / "eval/references.json").read_text())
    references["annotations"] = [row for row in references["annotations"] if row["image_id"] != "5.png"]
    write_json(other / "eval/references.json", references)
    assert "lacks 1 of the pairs of" in refused(runs[0], other)
    assert "file not found; give the folder of an evaluated run" in refused(runs[0], tmp_path / "nothing")
    for option, reason in {
        "--samples=0": "--samples is 0; give 1 to 100,000.",
        "--samples=1000000000": "--samples is 1000000000; give 1 to 100,000.",
        "--seed=-1": "--seed is -1; it must be at least 0.",
        "--pairs=-1": "--pairs is -1; it must be at least 0.",
        "--level=1": "--level is 1.0; give a number between 0 and 1",
        f"--out={tmp_path}": f"{tmp_path}: Is a directory",
        "--out=": "Is a directory",
    }.items():
        assert reason in refused(*runs, option)
    change(runs[1] / "eval/metrics.json", protocol={"metrics": ["BLEU-2"]})
    assert "have no metric in common; evaluate both with the same --metrics" in refused(*runs)
    change(runs[1] / "eval/metrics.json", protocol={"tokenizer": "ptb"})
    assert "was scored with the tokenizer raw" in refused(*runs)


def test_text_of_the_files_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = dict.fromkeys((pair.id for pair in PAIRS), "[red]the\x1b[31m cube\u202e\nmoved\x7f")
    one = write_run(tmp_path / "a\x1b]0;title[bold]", texts)
    other = write_run(tmp_path / "b", {pair.id: pair.captions[0] for pair in PAIRS})
    shown = printed(capsys, one, other, "--samples=2")
    assert "[red]the\\x1b[31m cube\\u202e\\nmoved\\x7f\n" in shown and "\\x1b]0;title[bold]" in shown
    text = printed(capsys, one, other, "--samples=2", "--json")
    assert json.loads(text)["largest"][0]["a"] in texts.values()
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown + text)


@pytest.mark.parametrize("name", ["predictions.json", "references.json", "groups.json"])
def test_files_of_two_evaluations_are_refused(runs: tuple[Path, Path], name: str) -> None:
    """`make eval` that was killed between two files leaves old scores with new captions."""
    folder = runs[1] / "eval"
    change(folder / "metrics.json", provenance={"files": {name: file_hash(folder / name)}})
    assert read_evaluation(runs[1]).metrics == read_run(runs[1]).metrics
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    assert f"{folder / name}: not the file that metrics.json was computed from; run `make eval` again" in refused(*runs)
    with pytest.raises(DiffcapError, match=name):
        read_run(runs[1])


def test_captions_of_another_system_are_compared(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--json", "--samples=20", "--pairs=2")
    expected = json.loads(printed(capsys, *runs, *options))
    captions = read_evaluation(runs[1]).predictions
    file = tmp_path / "api.jsonl"
    file.write_text("".join(json.dumps({"id": id, "caption": text}) + "\n" for id, text in captions.items()))
    for b, name in ((f"an API, zero-shot={file}", "an API, zero-shot"), (str(file), str(file))):
        found = json.loads(printed(capsys, runs[0], b, *options))
        assert found["runs"] == {"a": str(runs[0] / "eval"), "b": name}
        assert all(found[key] == expected[key] for key in ("protocol", "groups", "wins", "largest"))
    assert found["provenance"]["runs"][1] == {"file": str(file), "sha256": file_hash(file)}
    shown = printed(capsys, f"X={file}", runs[0], "--samples=2")
    assert "A: X " in shown and f"B: {runs[0]}" in shown


@pytest.mark.slow  # METEOR
@pytest.mark.thorough
def test_two_files_are_compared_on_the_test_split(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_toy(tmp_path / "toy", scenes=12)
    test = [pair for pair in read_dataset(folder).pairs if pair.split == "test"]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    files[0].write_text(json.dumps({pair.id: "x" for pair in test}))
    files[1].write_text(json.dumps({pair.id: pair.captions[0] for pair in test}))
    found = json.loads(printed(capsys, *files, f"--folder={folder}", "--tokenizer=raw", "--json", "--samples=2"))
    assert found["protocol"]["pairs"]["total"] == found["wins"]["total"]["b"] == len(test)
    assert found["groups"]["total"]["METEOR"]["a"] < found["groups"]["total"]["METEOR"]["b"] == pytest.approx(1)
    assert f"{files[0]} and {files[1]} are two files of captions; give --folder" in refused(*files)


def test_captions_of_other_pairs_are_one_sentence(runs: tuple[Path, Path], tmp_path: Path) -> None:
    captions = {**read_evaluation(runs[1]).predictions, "99.png": "x"}
    file = tmp_path / "api.json"
    file.write_text(json.dumps(captions))
    assert "1 of 25 ids are not in the evaluation" in refused(runs[0], f"X={file}")
    assert "nowhere.json: no predictions file there" in refused(runs[0], "X=nowhere.json")
    write_json(runs[0] / "eval/predictions-unscored.json", [{"image_id": "99.png", "caption": "y"}])
    main(["compare", str(runs[0]), str(file), "--samples=2"])


def predictions(right: int) -> dict[str, str]:
    """The first `right` pairs are told as a reference does, the others as another pair's."""
    wrong = captions(30, False)[0]
    return {pair.id: pair.captions[0] if number < right else wrong for number, pair in enumerate(PAIRS)}


def test_the_table_of_accuracy_has_the_gains_of_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, counts = write_toy(tmp_path / "toy", scenes=12), {"greedy": [8, 12], "reinforced": [10, 20], "both": [22]}
    homes = [tmp_path / "1", tmp_path / "2"]
    for number, home in enumerate(homes):
        write_json(home / "finetune/finished.json", {"stage": "finetune", "train_seconds": 100 + number, "steps": 9})
        write_json(home / "reinforce/finished.json", {"stage": "reinforce", "train_seconds": 7, "steps": 3})
    rows = {"greedy": [home / "eval" for home in homes], "reinforced": [home / "reinforce-eval" for home in homes]}
    rows["both"] = [tmp_path / "ensemble"]
    references = {pair.id: pair.captions for pair in PAIRS}
    scores: dict[str, list[float]] = {name: [] for name in rows}
    for name, paths in rows.items():
        for path, right in zip(paths, counts[name]):
            write_run(tmp_path / "made", predictions(right))
            (tmp_path / "made/eval").rename(path)
            scores[name].append(score_captions(predictions(right), references, "raw", METRICS)["CIDEr-D"])
    checkpoints = [{"file": f"../{number}/finetune/best.ckpt"} for number in (1, 2)]
    change(tmp_path / "ensemble/metrics.json", protocol={"ensemble": 2}, provenance={"checkpoints": checkpoints})
    accuracy_table(folder, rows, tmp_path / "report")
    table = json.loads((tmp_path / "report/table.json").read_text())
    for name, values in scores.items():
        assert table["rows"][name]["total"]["CIDEr-D"] == pytest.approx(statistics.fmean(values))
    assert table["rows"]["greedy"]["std"]["total"]["CIDEr-D"] == pytest.approx(statistics.stdev(scores["greedy"]))
    assert [table["rows"][name]["seconds"] for name in rows] == [100.5, 107.5, 201]
    gain = [after - before for after, before in zip(scores["reinforced"], scores["greedy"])]
    found, alone = (table["gains"][name]["CIDEr-D"] for name in ("reinforced", "both"))
    assert found["of"] == pytest.approx(gain) and found["std"] == pytest.approx(statistics.stdev(gain))
    assert alone["mean"] == pytest.approx(scores["both"][0] - statistics.fmean(scores["greedy"]))
    assert alone["std"] is None and table["protocol"]["decoding"]["both"]["ensemble"] == 2
    text = (tmp_path / "report/table.md").read_text()
    assert "| gained over greedy | BLEU-1 | BLEU-4 | ROUGE-L | CIDEr-D |" in text
    assert f"{100 * found['mean']:+.2f} ± {100 * found['std']:.2f} |" in text
    assert "standard deviation of 2 seeds" in text and "gained over the first row" in capsys.readouterr().out
    assert gain_table({"more": {"CIDEr-D": {"mean": -1e-9, "std": None}}}).lines()[1] == ["more", "+0.00"]
    change(rows["reinforced"][0] / "metrics.json", protocol={"tokenizer": "ptb"})
    with pytest.raises(DiffcapError, match=r"1/eval was scored with the tokenizer raw, .*reinforce-eval with ptb"):
        accuracy_table(folder, rows, tmp_path / "report")
