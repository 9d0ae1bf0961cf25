from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.datasets import layouts

from diffcap.commands.data import prepare
from diffcap.datasets import describe, read_pairs
from diffcap.evaluation.protocols import groups_of
from diffcap.features.images import unique_images
from diffcap.records import ChangePair, read_dataset
from diffcap.utils.errors import DiffcapError
from diffcap.utils.image_io import read_image

NUMBERS = {"train": [2, 7590, 5], "val": [1, 4], "test": [2135, 8]}  # with gaps, as in the released file


def change_rows(path: Path, edit: Any) -> None:
    layouts.change(path, lambda value: edit(value["images"]))


def test_levir_cc(tmp_path: Path) -> None:
    pairs = read_pairs("levir_cc", layouts.write_levir(tmp_path, NUMBERS))
    ids = {split: [pair.id for pair in pairs if pair.split == split] for split in NUMBERS}
    assert ids == {split: [f"{split}_{number:06d}" for number in numbers] for split, numbers in NUMBERS.items()}
    assert pairs[0] == ChangePair(
        "train_000002",
        "images/train/A/train_000002.png",
        "images/train/B/train_000002.png",
        ["a road is built 2", "houses appear 2", "road's end 2", "a villa 2", "a villa 2"],
        "train",
        extra={"changeflag": 1},
    )
    assert pairs[2].captions == [*layouts.NO_CHANGE_FIVE]
    assert pairs[2].is_distractor and pairs[2].extra == {"changeflag": 0}
    assert all((tmp_path / path).is_file() for pair in pairs for path in pair.images)
    changed = ["train_000002", "train_007590"]
    assert groups_of(pairs[:3]) == {
        "total": [*changed, "train_000005"], "change": changed, "no_change": ["train_000005"],
    }  # fmt: skip


def test_the_first_release_has_no_flags(tmp_path: Path) -> None:
    with_flags = read_pairs("levir_cc", layouts.write_levir(tmp_path / "new", NUMBERS))
    derived = read_pairs("levir_cc", layouts.write_levir(tmp_path / "old", NUMBERS, flags=False))
    assert [pair.is_distractor for pair in derived] == [pair.is_distractor for pair in with_flags]
    assert all(pair.extra["changeflag_derived"] for pair in derived)
    assert groups_of(derived) == groups_of(with_flags)
    (note,) = describe("levir_cc", derived, tmp_path)["notes"]
    assert note == "7 pairs have no changeflag; it is derived from their captions"
    assert describe("levir_cc", with_flags, tmp_path)["notes"] == []
    path = tmp_path / "old/LevirCCcaptions.json"
    change_rows(path, lambda rows: rows[2]["sentences"][3].update(tokens=["a", "road", "appears"]))
    assert not read_pairs("levir_cc", path.parent)[2].is_distractor  # one sentence of no change among others is no flag


def test_a_caption_is_its_tokens_or_its_text(tmp_path: Path) -> None:
    path = layouts.write_levir(tmp_path, NUMBERS) / "LevirCCcaptions.json"
    odd = [{"tokens": ["a\\almost", "along1side", "t-junction"], "raw": "x"}, {"raw": "  A road, e.g. a lane .  "}]
    change_rows(path, lambda rows: rows[0].update(sentences=[*odd, {"raw": "no stop", "tokens": None}, odd[0]]))
    pairs = read_pairs("levir_cc", tmp_path)
    again = "a\\almost along1side t-junction"
    assert pairs[0].captions == [again, "A road, e.g. a lane", "no stop", again]
    assert describe("levir_cc", pairs[:1], tmp_path)["repetitions"]["repeated_captions"] == 1


def test_the_split_and_the_folder_of_an_entry(tmp_path: Path) -> None:
    path = layouts.write_levir(tmp_path, NUMBERS) / "LevirCCcaptions.json"
    change_rows(path, lambda rows: (rows[0].pop("split"), rows[1].update(split="restval"), rows[3].pop("filepath")))
    pairs = read_pairs("levir_cc", tmp_path)
    assert [pair.split for pair in pairs[:4]] == ["train", "train", "train", "val"]
    assert pairs[1].before == "images/train/A/train_007590.png" and pairs[3].before == "images/val/A/val_000001.png"


def test_masks(tmp_path: Path) -> None:
    layouts.write_levir(tmp_path, NUMBERS, masks=True)
    pairs = read_pairs("levir_mci", tmp_path)
    assert pairs[0].extra["mask"] == "images/train/label/train_000002.png"
    assert all((tmp_path / pair.extra["mask"]).is_file() for pair in pairs)
    assert describe("levir_mci", pairs, tmp_path)["notes"] == ["7 pairs have a mask of the change"]
    assert read_pairs("levir_cc", tmp_path) == pairs  # the same pairs
    (tmp_path / "images/test/label/test_000008.png").unlink()
    for dataset in ("levir_cc", "desk"):  # where masks are no part of the dataset, a pair may have none
        pairs = read_pairs(dataset, tmp_path)
        assert describe(dataset, pairs, tmp_path)["notes"] == ["6 of 7 pairs have a mask of the change"]
    (tmp_path / "images/val/label").rename(tmp_path / "away")
    assert "the val images have no folder label" in layouts.refusal("levir_mci", tmp_path)
    unmasked = [pair.id for pair in read_pairs("levir_cc", tmp_path) if "mask" not in pair.extra]
    assert unmasked == ["val_000001", "val_000004", "test_000008"]


@pytest.mark.parametrize("fault", ["missing", "broken"])
def test_a_lost_mask_of_levir_mci_is_treated_like_a_lost_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    source, out = layouts.write_levir(tmp_path / "files", NUMBERS, masks=True), tmp_path / "out"
    path = source / "images/test/label/test_000008.png"
    path.unlink() if fault == "missing" else path.write_bytes(path.read_bytes()[:40])
    sentence = rf"of 21 images and masks 1 {fault} \(first images/test/label/test_000008.png\), so 1 of 7 pairs"
    with pytest.raises(DiffcapError, match=sentence) as caught:
        prepare("levir_mci", str(source), str(out))
    assert "\n" not in str(caught.value)
    prepare("levir_mci", str(source), str(out), missing="skip")
    dataset = read_dataset(out)
    pairs = read_pairs("levir_mci", source)
    assert dataset.pairs == pairs[:-1]  # the flag and the mask are in the manifest
    assert not any("label" in path for path in unique_images(pairs))
    assert dataset.info["official"]["splits"]["train"] == [3, 6815] and dataset.info["official"]["state"] == "part"
    prepare("second_cc", str(layouts.write_second_cc(tmp_path / "second")), str(tmp_path / "views"), augmented=True)
    info = read_dataset(tmp_path / "views").info
    assert info["settings"]["augmented"] is True and info["pairs"] == 5
    assert dataset.info["skipped"] == {"pairs": 1, "images": 1}
    output = capsys.readouterr().out
    assert "6 pairs have a mask of the change" in output and {"no", "change"} <= set(output.split())  # a heading


def test_whu_cdc(tmp_path: Path) -> None:
    layouts.write_levir(tmp_path, {"train": [4], "val": [3], "test": [24]}, masks=True, name="whuCCcaptions.json")
    pairs = read_pairs("whu_cdc", tmp_path)
    assert [pair.id for pair in pairs] == ["train_000004", "val_000003", "test_000024"]
    assert [pair.is_distractor for pair in pairs] == [False, True, False]
    assert pairs[2].after == "images/test/B/test_000024.png"
    assert pairs[2].extra["mask"] == "images/test/label/test_000024.png"


def test_second_cc_has_augmented_views_only_on_request(tmp_path: Path) -> None:
    layouts.write_second_cc(tmp_path)
    pairs = read_pairs("second_cc", tmp_path)
    assert [pair.id for pair in pairs] == ["00003", "00017", "00021", "00040"]
    assert [pair.is_distractor for pair in pairs] == [False, True, False, False]
    assert pairs[0].before == "train/rgb/A/00003.png" and pairs[0].extra == {"changeflag": 1}
    more = read_pairs("second_cc", tmp_path, augmented=True)
    assert [pair.id for pair in more] == ["00003", "00003_random_augment_1", "00017", "00021", "00040"]
    assert [pair.extra.get("augmented", False) for pair in more] == [False, True, False, False, False]
    assert describe("second_cc", more, tmp_path)["notes"] == ["1 augmented training views"]
    assert "levir_cc has no augmented views" in layouts.refusal("levir_cc", tmp_path, augmented=True)
    change_rows(tmp_path / "SECOND-CC-AUG.json", lambda rows: rows[3].update(filename="00021_random_augment.png"))
    assert [pair.split for pair in read_pairs("second_cc", tmp_path, augmented=True)] == ["train"] * 3 + ["test"]


def test_dubai_cc(tmp_path: Path) -> None:
    pairs = read_pairs("dubai_cc", layouts.write_dubai_cc(tmp_path))
    assert [(pair.id, pair.split, pair.is_distractor) for pair in pairs] == [
        ("0_0", "train", False), ("0_50", "train", True), ("50_0", "val", False), ("50_50", "test", True),
        ("50_100", "test", False),
    ]  # fmt: skip
    assert pairs[0].captions == ["A new road was built", "Houses appear in the desert"]
    assert (pairs[0].before, pairs[0].after) == ("imgs_tiles/RGB/500_2000/0_0.tif", "imgs_tiles/RGB/500_2010/0_0.tif")
    assert describe("dubai_cc", pairs, tmp_path)["change_types"] == "derived from the captions"
    tile = read_image(tmp_path / pairs[0].before)
    assert (tile.image.mode, tile.image.size, tile.notes) == ("RGB", (50, 50), ())
    with Image.open(tmp_path / pairs[0].before) as file:
        assert file.format == "TIFF" and file.tobytes() == tile.image.tobytes()
    (tmp_path / "description_jsontr_te_val").rename(tmp_path / "captions")
    assert read_pairs("dubai_cc", tmp_path) == pairs


@pytest.mark.parametrize("home", ["images/{}/", "{}/", "images/", ""])
def test_a_dataset_of_ones_own(tmp_path: Path, home: str) -> None:
    entries = [
        layouts.karpathy_entry("train", "1.jpg", ["A cup is gone"]),
        layouts.karpathy_entry("val", "2.jpg", ["Nothing has changed."], flag=1),
        layouts.karpathy_entry("test", "3.jpg", ["There is no difference"]),
    ]
    layouts.write_json(tmp_path / "desk.json", {"images": entries})
    layouts.write_json(tmp_path / "other.json", {"info": []})
    for entry in entries:
        layouts.write_image(tmp_path / home.format(entry["split"]) / "A" / entry["filename"])
        layouts.write_image(tmp_path / home.format(entry["split"]) / "B" / entry["filename"])
    pairs = read_pairs("desk", tmp_path)
    found = [(pair.id, pair.split, pair.is_distractor) for pair in pairs]
    assert found == [("1", "train", False), ("2", "val", False), ("3", "test", True)]
    assert all((tmp_path / path).is_file() for pair in pairs for path in pair.images)


def test_two_formats_or_two_files_of_ones_own_are_refused(tmp_path: Path) -> None:
    output = layouts.refusal("desk", tmp_path)
    assert "no pairs.jsonl there" in output and "clevr_change" in output
    entries = [layouts.karpathy_entry(split, "1.png", ["a cup is gone"]) for split in ("train", "val")]
    layouts.write_json(tmp_path / "b.json", {"images": entries})  # equal names in two splits get other ids
    assert [pair.id for pair in read_pairs("desk", tmp_path)] == ["images/train/A/1", "images/val/A/1"]
    layouts.write_json(tmp_path / "b.json", {"images": layouts.levir_entries(NUMBERS)})
    layouts.write_json(tmp_path / "dataset.json", {"images": 3})  # of the data stage
    assert len(read_pairs("desk", tmp_path)) == 7
    layouts.write_json(tmp_path / "a.json", {"images": []})
    assert "has several JSON files with images (a.json, b.json); keep one" in layouts.refusal("desk", tmp_path)
    (tmp_path / "a.json").unlink()
    pair = {"before": "a.png", "after": "b.png", "captions": ["x"], "split": "train"}
    layouts.write_lines(tmp_path / "pairs.jsonl", [pair])
    assert "has both pairs.jsonl and b.json; keep one" in layouts.refusal("desk", tmp_path)
    (tmp_path / "b.json").unlink()
    layouts.write_json(tmp_path / "coco.json", {"images": [], "annotations": []})
    assert len(read_pairs("desk", tmp_path)) == 1


@pytest.mark.parametrize(
    ("edit", "output"),
    [
        (lambda rows: rows[1].pop("filename"), 'entry 2: "filename" must be a string, found nothing'),
        (lambda rows: rows[1].update(filename=7), 'entry 2: "filename" must be a string, found 7'),
        (lambda rows: rows[1].update(filename="../x.png"), "leads out of the dataset's folder"),
        (lambda rows: rows[1].update(split="dev"), "entry 2: unknown split 'dev'; it must be one of train, val, test"),
        (lambda rows: rows[1].update(split=None), 'entry 2: "split" must be a string, found None'),
        (lambda rows: (rows[1].pop("split"), rows[1].pop("filepath")), 'entry 2: "split" must be a string, found noth'),
        (lambda rows: rows[1].pop("sentences"), 'entry 2: "sentences" must be a list, found None'),
        (lambda rows: rows[1].update(sentences=[]), "the training pair 'train_007590' has no caption"),
        (lambda rows: rows[1].update(sentences=[{"tokens": []}]), 'entry 2, sentence 1: needs "tokens" (words) or'),
        (lambda rows: rows[1].update(sentences=["a road"]), 'entry 2, sentence 1: needs "tokens" (words) or "raw"'),
        (lambda rows: rows[1].update(sentences=[{"raw": " . "}]), "the pair 'train_007590' has a blank caption"),
        (lambda rows: rows[1].update(changeflag=2), 'entry 2: "changeflag" must be 0 or 1, found 2'),
        (lambda rows: rows[1].update(changeflag=[1]), 'entry 2: "changeflag" must be 0 or 1, found [1]'),
        (lambda rows: rows.insert(1, "a.png"), "entry 2: must be an object, found 'a.png'"),
        (lambda rows: rows.append(rows[0]), "entry 8: the image 'images/train/A/train_000002.png' is already used in"),
        (lambda rows: rows.clear(), "name no pair"),
    ],
)
def test_a_malformed_entry_is_named_by_number(tmp_path: Path, edit: Any, output: str) -> None:
    path = layouts.write_levir(tmp_path, NUMBERS) / "LevirCCcaptions.json"
    change_rows(path, edit)
    for dataset in ("levir_cc", "desk"):
        assert str(tmp_path) in layouts.refusal(dataset, tmp_path) and output in layouts.refusal(dataset, tmp_path)
    for text, words in (('{"images": [', ": not valid JSON"), ('{"annotations": []}', ': "images" must be a list')):
        path.write_text(text)
        assert f"{path}{words}" in layouts.refusal("levir_cc", tmp_path)
    path.unlink()
    assert f"{path}: no captions there" in layouts.refusal("levir_cc", tmp_path)
