"""The benchmarks' smoke runs through the real commands: small folders in the official forms, the authors' kind of features."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.commands import ROOT, command, in_process, part
from tests.datasets.layouts import write_clevr_dc, write_image_editing_request, write_spot_the_diff

from diffcap.data.datamodules import CaptionData
from diffcap.evaluation.coco import read_predictions, read_references
from diffcap.features.images import unique_images
from diffcap.records import read_dataset, take_changes
from diffcap.utils.errors import DiffcapError

SMALL = {
    "scorer": ("width=16", "heads=2", "word_width=8"),
    "dirl": ("width=16", "heads=2", "ffn=16", "word_width=8", "projector_width=16"),
    "pcl": ("width=16", "heads=2", "ffn=16"),
}
WRITERS: dict[str, Callable[[Path], Path]] = {
    "clevr_dc": lambda folder: write_clevr_dc(
        folder, {"train": list(range(12)), "val": [20, 21], "test": [24, 25, 29]}
    ),
    "spot_the_diff": write_spot_the_diff,
    "image_editing_request": write_image_editing_request,
}


def stage(name: str, *options: str) -> None:
    assert in_process([sys.executable, str(ROOT / "stages" / f"{name}.py"), *options]) in (None, 0)


def prepare(dataset: str, home: Path, source: Path | None = None, negatives: bool = False) -> Path:
    """Manifest and features of a small folder in its official form."""
    folder, source = home / dataset, source or WRITERS[dataset](home / "official")
    stage("data", f"--dataset={dataset}", f"--source={source}", f"--out={folder}")
    for path in unique_images(read_dataset(folder).pairs):
        target = home / "theirs" / f"{path}.npy"
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, np.random.default_rng(len(path)).standard_normal((8, 3, 3)).astype(np.float32))
    stage("import_features", f"--folder={folder}", f"--source={home / 'theirs'}")
    if negatives:
        stage("negatives", f"--folder={folder}", "--tagger=blocks", "--workers=1")
    return folder


def train(script: str, method: str, dataset: str, folder: Path, *options: str) -> None:
    """One stage with its settings for the dataset, few steps and few channels."""
    own = part(method, script, dataset)
    configs = [f"configs/dataset/{dataset}.yaml", own, "configs/trainer/smoke.yaml"]
    small = [f"--model.captioner.init_args.{setting}" for setting in SMALL[method]]
    words = command(
        script, configs, *small, f"--data.folder={folder}", "--data.features=authors", f"--run.out={folder / script}",
        "--data.batch_size=4", "--trainer.accelerator=cpu", *options, method=method,
    )  # fmt: skip
    assert in_process(words) in (None, 0)
    assert (folder / script / "finished.json").is_file()


def evaluate(folder: Path, out: str, *options: str) -> dict:
    stage(
        "evaluate", f"--checkpoint={folder / 'finetune/best.ckpt'}", f"--folder={folder}", f"--out={folder / out}",
        "--accelerator=cpu", '--metrics=["BLEU-4", "CIDEr-D"]', *options,
    )  # fmt: skip
    return json.loads((folder / out / "metrics.json").read_text())


def test_clevr_dc_is_one_group_with_its_distractors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare("clevr_dc", tmp_path)
    info = read_dataset(folder).info
    assert info["official"]["state"] == "part" and "derived" in info["notes"][0]
    train("finetune", "dirl", "clevr_dc", folder)
    scores = evaluate(folder, "eval")
    assert scores["protocol"]["pairs"] == {"total": 3, "semantic": 2, "distractor": 1, "color": 1, "material": 1}
    assert list(read_predictions(folder / "eval/predictions.json")) == ["000024.png", "000025.png", "000029.png"]
    assert "changes" not in scores["protocol"]
    assert scores["protocol"]["official"] == "part"
    assert scores["protocol"]["change_types"] == "derived from the captions"
    output = " ".join(capsys.readouterr().out.split())
    assert "clevr_dc test, a part of the official dataset, change types derived from the captions, ptb tokens" in output
    stage(
        "report", f"--folder={folder}", "--features=authors", f"--runs={json.dumps({'DIRL': str(folder)})}",
        f"--out={folder / 'report'}", "--pictures=0", "--attention=0", "--page=2", "--localisation_pairs=0",
    )  # fmt: skip
    output = "a part of the official dataset, change types derived from the captions, "
    assert f"test split, {output}3 pairs" in (folder / "report/table.md").read_text()
    assert f"test split, {output}manifest" in (folder / "report/report.html").read_text()


def test_every_score_of_spot_the_diff_names_its_protocol(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare("spot_the_diff", tmp_path)
    train("finetune", "scorer", "spot_the_diff", folder)
    capsys.readouterr()
    scores = evaluate(folder, "eval")
    assert scores["protocol"]["changes"] == "single" and scores["protocol"]["pairs"] == {"total": 2}
    output = " ".join(capsys.readouterr().out.split())
    assert "scorer on spot_the_diff test, a part of the official dataset, single change, ptb tokens" in output
    single = read_references(folder / "eval/references.json")
    assert single == {"5.png": ["the van is gone", "two people left the lot"], "6.png": [""]}
    scores = evaluate(folder, "eval-multi", "--changes=multi")
    assert scores["protocol"]["changes"] == "multi" and "multi change" in " ".join(capsys.readouterr().out.split())
    assert read_references(folder / "eval-multi/references.json")["5.png"] == [
        "the van is gone. two people left the lot"
    ]


def test_the_protocol_is_chosen_in_the_configuration(tmp_path: Path) -> None:
    folder = prepare("spot_the_diff", tmp_path)
    single, multi = (
        CaptionData(str(folder), "authors", changes=changes, vocabulary_layout="rcc") for changes in (None, "multi")
    )
    assert single.changes == "single" and multi.changes == "multi"  # the dataset's own, and the configuration's
    assert single.val_references["4.png"] == ["the van is gone", "a person appeared"]
    assert multi.val_references["4.png"] == ["the van is gone. a person appeared"]
    assert single.words == multi.words
    lengths = {"max_length": 70, "min_count": 3}
    longer = CaptionData(str(folder), "authors", changes="multi", multi=lengths, vocabulary_layout="rcc")
    assert longer.max_length == 70 and len(longer.words) < len(multi.words)
    assert CaptionData(str(folder), "authors", multi=lengths, vocabulary_layout="rcc").max_length == multi.max_length
    with pytest.raises(DiffcapError, match=r"data\.multi has the unknown key 'length'"):
        CaptionData(str(folder), "authors", multi={"length": 70})


def test_multi_change_captions_have_their_own_length_and_negatives(tmp_path: Path) -> None:
    folder = prepare("spot_the_diff", tmp_path, negatives=True)
    multi, few = "--data.changes=multi", "--data.tasks={mlm: 1, fda: 1}"
    with pytest.raises(AssertionError, match="are not captions of the training pairs"):
        train("pretrain", "pcl", "spot_the_diff", folder, multi, few)
    stage("negatives", f"--folder={folder}", "--tagger=blocks", "--workers=1", "--changes=multi")
    lines = [json.loads(line) for line in (folder / "negatives.jsonl").read_text().splitlines()]
    pairs = take_changes(read_dataset(folder).pairs, "multi")
    expected = {pair.id: pair.captions for pair in pairs}
    assert len(lines) == len({line["id"] for line in lines}) and all(
        [line["caption"]] == expected[line["id"]] for line in lines
    )
    assert any(". " in line["caption"] for line in lines)
    train("pretrain", "pcl", "spot_the_diff", folder, multi, few)


def test_empty_captions_train_and_get_no_negatives(tmp_path: Path) -> None:
    source = write_spot_the_diff(tmp_path / "official")
    rows = json.loads((source / "annotations/train.json").read_text())
    (source / "annotations/train.json").write_text(json.dumps([*rows, {"img_id": "12", "sentences": [""]}]))
    folder = prepare("spot_the_diff", tmp_path, source, negatives=True)
    lines = [json.loads(line) for line in (folder / "negatives.jsonl").read_text().splitlines()]
    assert "12.png" in {line["id"] for line in lines} and all(line["caption"] for line in lines)
    train("pretrain", "pcl", "spot_the_diff", folder, "--data.tasks={mlm: 1, mvcl: 1, fda: 1}")
