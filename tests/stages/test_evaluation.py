"""The evaluation by its real command: captions, scores and their files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.commands import in_process, run
from tests.stages.small_runs import evaluation

from diffcap.evaluation.captions import score_captions
from diffcap.evaluation.coco import read_predictions, read_references
from diffcap.evaluation.slots import reversibility
from diffcap.records import read_dataset, write_dataset
from diffcap.report.comparison import read_evaluation
from diffcap.utils.errors import DiffcapError


def test_pairs_without_references_are_captioned_and_not_scored(
    blocks: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, folder = read_dataset(blocks), tmp_path / "data"
    test = [pair.id for pair in dataset.pairs if pair.split == "test"]
    for silent in (test[:2], test):
        pairs = [replace(pair, captions=[]) if pair.id in silent else pair for pair in dataset.pairs]
        write_dataset(folder, "blocks", dataset.root, pairs, {})
        if not (folder / "features").exists():
            (folder / "features").symlink_to(blocks / "features")
        status = in_process([*evaluation(folder, undisturbed), f"--out={tmp_path / 'eval'}"])
        output = json.loads((tmp_path / "eval/predictions-unscored.json").read_text())
        assert [row["image_id"] for row in output] == silent
        if silent == test:
            assert isinstance(status, str) and f"none of its {len(test)} test pairs has a reference caption" in status
        else:
            assert status is None and f"2 of {len(test)} pairs have no reference caption" in capsys.readouterr().out
            files = [tmp_path / "eval" / name for name in ("predictions.json", "references.json")]
            again = score_captions(read_predictions(files[0]), read_references(files[1]), metrics=["CIDEr-D"])
            metrics = json.loads((tmp_path / "eval/metrics.json").read_text())
            assert again["CIDEr-D"] == metrics["groups"]["total"]["CIDEr-D"]
            assert metrics["protocol"]["pairs"]["total"] == len(test) - 2


def test_two_processes_write_the_captions_of_one(blocks: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = f"--out={tmp_path / 'two'}", "--limit=9"  # of which one process gets five and the other four, and one again
    done = run(evaluation(blocks, undisturbed, *out, "--devices=2", "--accelerator=cpu", "--batch_size=2"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert in_process(evaluation(blocks, undisturbed, f"--out={tmp_path / 'one'}", "--limit=9")) is None
    for name in ("predictions.json", "references.json", "metrics.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    assert len(json.loads((tmp_path / "one/predictions.json").read_text())) == 9


def test_a_file_that_the_training_did_not_write_is_not_evaluated(
    blocks: Path, undisturbed: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(undisturbed / "finetune", runs / "finetune")
    shutil.copyfile(runs / "finetune/last.ckpt", runs / "finetune/best.ckpt")
    output = f"{runs / 'finetune'}: best.ckpt is not what the finished training wrote; run `make finetune`"
    assert output in str(in_process(evaluation(blocks, runs)))
    (runs / "finetune/finished.json").write_text("")
    assert "finished.json is damaged" in str(in_process(evaluation(blocks, runs)))
    assert not (runs / "eval").exists()


def test_an_interrupted_evaluation_leaves_no_scores_of_earlier_captions(
    blocks: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "eval"
    words = [*evaluation(blocks, undisturbed, "--tokenizer=raw", "--metrics=[CIDEr-D]"), f"--out={out}"]
    assert in_process([*words, "--limit=6"]) is None
    read_evaluation(out)
    assert len(list(out.glob("metrics*.json"))) == 2
    with monkeypatch.context() as patch:
        patch.setattr("diffcap.evaluation.protocols.evaluate", interrupted)
        assert "interrupted" in str(in_process([*words, "--limit=7"]))
    assert len(read_predictions(out / "predictions.json")) == 7 and not list(out.glob("metrics*.json"))
    with pytest.raises(DiffcapError, match="file not found"):
        read_evaluation(out)


def test_swap_also_captions_the_pairs_in_reverse_order_and_raw_tokens_have_scores_of_ptb_tokens_beside_them(
    blocks: Path, undisturbed: Path, tmp_path: Path
) -> None:
    dataset, data = read_dataset(blocks), tmp_path / "data"
    pairs = [replace(pair, before=str(pair.after), after=pair.before) for pair in dataset.pairs]
    write_dataset(data, "blocks", dataset.root, pairs, {})
    (data / "features").symlink_to(blocks / "features")
    captions = {}
    for name, folder, *options in (("plain", blocks), ("reverse", data), ("both", blocks, "--task=swap")):
        out = tmp_path / name
        tokenizer = "raw" if name == "both" else "ptb"
        words = [*evaluation(folder, undisturbed, "--limit=9", *options), f"--out={out}", f"--tokenizer={tokenizer}"]
        assert in_process(words) is None
        captions[name] = read_predictions(out / "predictions.json")
    assert captions["both"] == captions["plain"]
    assert read_predictions(out / "predictions-swapped.json") == captions["reverse"]
    groups = json.loads((out / "groups.json").read_text())
    raw, beside, ptb = (
        json.loads((tmp_path / name).read_text())
        for name in ("both/metrics.json", "both/metrics-ptb.json", "plain/metrics.json")
    )
    expected = reversibility(captions["plain"], captions["reverse"], groups)
    assert raw["reversibility"] == beside.pop("reversibility") == expected
    assert beside == ptb and not (tmp_path / "plain/metrics-ptb.json").exists()
    assert raw["protocol"] == {**ptb["protocol"], "tokenizer": "raw"}
    write_dataset(data, "blocks", dataset.root, [replace(pair, captions=["make it red"]) for pair in pairs], {})
    status = in_process([*evaluation(data, undisturbed, "--task=swap"), f"--out={out}"])
    assert isinstance(status, str) and "leave out EVAL=swap" in status
