"""`diffcap audit` on small prepared datasets."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.datasets.layouts import (
    levir_entries,
    write_clevr_change,
    write_dubai_cc,
    write_image,
    write_json,
    write_levir,
    write_mask,
    write_spot_the_diff,
)

from diffcap.cli import main
from diffcap.commands.audit import ALL_CAPTIONS, CHANGE_CAPTION, EMPTY_MASK, EQUAL_IMAGES, FILLED_MASK, SOME_CAPTIONS
from diffcap.commands.data import prepare

NUMBERS = {"train": [2, 4, 5, 6], "val": [8, 7], "test": [10, 11]}  # even: change


def audited(dataset: str, source: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, list[str]], str]:
    """Prepare and audit; returns id -> reasons, and what was printed."""
    folder = source.with_name("prepared")
    prepare(dataset, str(source), str(folder))
    capsys.readouterr()
    main(["audit", "--dataset", dataset, "--folder", str(folder)])
    output = capsys.readouterr().out
    rows = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    for row in rows:
        assert f"{row['split']} {row['id']}: {'; '.join(row['reasons'])}" in output
    return {row["id"]: row["reasons"] for row in rows}, output


def test_every_contradiction_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_levir(tmp_path / "files", NUMBERS, masks=True)
    entries: list[dict[str, Any]] = levir_entries(NUMBERS)
    unchanged = entries[2]["sentences"]
    entries[0]["sentences"] = unchanged  # train 2
    entries[1]["sentences"][3] = unchanged[1]  # train 4
    entries[5]["sentences"] = [*unchanged[:4], entries[3]["sentences"][0]]  # val 7
    write_json(files / "LevirCCcaptions.json", {"images": entries})
    write_mask(files / "images/train/label/train_000004.png", 0)
    write_mask(files / "images/test/label/test_000011.png", 128)
    write_image(files / "images/val/B/val_000008.png", 8)  # as A
    write_image(files / "images/val/B/val_000007.png", 7)  # no change: may be equal
    found, output = audited("levir_mci", files, capsys)
    assert found == {
        "train_000002": [ALL_CAPTIONS],
        "train_000004": [SOME_CAPTIONS, EMPTY_MASK],
        "val_000008": [EQUAL_IMAGES],
        "val_000007": [CHANGE_CAPTION],
        "test_000011": [FILLED_MASK],
    }
    shown = " ".join(output.split())
    assert f"{SOME_CAPTIONS} 1 0 0 1" in shown and f"{FILLED_MASK} 0 0 1 1" in shown  # train, val, test, total
    row = json.loads((tmp_path / "prepared/audit.jsonl").read_text().splitlines()[1])
    assert row == {
        "id": "train_000004",
        "split": "train",
        "changeflag": 1,
        "reasons": [SOME_CAPTIONS, EMPTY_MASK],
        "captions": ["the two scenes seem identical"],
        "before": "images/train/A/train_000004.png",
        "after": "images/train/B/train_000004.png",
        "mask": "images/train/label/train_000004.png",
    }
    assert "5 of 8 pairs have a contradiction" in output and str(tmp_path / "prepared/audit.jsonl") in output


def test_what_could_not_be_checked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_levir(tmp_path / "a/files", NUMBERS, flags=False, masks=True)
    (files / "images/train/label/train_000004.png").unlink()
    found, output = audited("levir_cc", files, capsys)
    assert found == {} and "not checked: 1 of 8 pairs without a mask" in output
    (files / "images/train/label/train_000006.png").write_bytes(b"no image")  # after the data stage
    main(["audit", "--folder", str(files.parent / "prepared")])
    output = capsys.readouterr().out
    assert "1 of 8 pairs without a readable mask" in output
    assert "not checked: 8 of 8 pairs without a flag in the dataset's files; it is derived" in output

    found, output = audited("dubai_cc", write_dubai_cc(tmp_path / "b/files"), capsys)
    assert found == {"50_50": [CHANGE_CAPTION]} and "5 of 5 pairs without a mask" in output
    assert EMPTY_MASK not in output


def test_distractors_of_other_datasets_are_pairs_without_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = write_clevr_change(tmp_path / "files", [1, 2], [3], [4])
    captions = json.loads((files / "no_change_captions.json").read_text())
    captions["CLEVR_default_000003.png"] = ["nothing has changed", "the cube moved"]
    write_json(files / "no_change_captions.json", captions)
    shutil.copy(files / "images/CLEVR_default_000004.png", files / "sc_images/CLEVR_semantic_000004.png")
    found, _ = audited("clevr_change", files, capsys)
    assert found == {"000003.png_n": [CHANGE_CAPTION], "000004.png": [EQUAL_IMAGES]}


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    prepare("levir_cc", str(write_levir(tmp_path / "files", NUMBERS)), str(tmp_path / "prepared"))
    spot = tmp_path / "spot"
    prepare("spot_the_diff", str(write_spot_the_diff(tmp_path / "spot_files")), str(spot))
    for words, output in (
        (["--folder", str(spot)], "does not mark the pairs without change"),
        ([], "--dataset is missing; give its name"),
        (["--dataset", "whu_cdc", "--folder", str(tmp_path / "prepared")], "holds levir_cc, not whu_cdc"),
        (["--folder", str(tmp_path / "nowhere")], "no dataset there"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(["audit", *words])
        assert output in str(caught.value) and "\n" not in str(caught.value)
