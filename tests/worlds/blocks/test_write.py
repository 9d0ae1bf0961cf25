import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffcap.datasets import read_pairs
from diffcap.evaluation.slots import slot_accuracy
from diffcap.worlds.blocks.captions import NO_CHANGE
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples
from diffcap.worlds.blocks.write import oracle_captions, write_blocks

OFFICIAL = {"change_captions.json", "no_change_captions.json", "splits.json", "type_mapping.json"}
FOLDERS = {"images": "default", "sc_images": "semantic", "nsc_images": "nonsemantic"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "official"
    write_blocks(path, pairs=80, seed=5, workers=1)
    return path


def test_layout_is_the_official_one(folder):
    assert {path.name for path in folder.iterdir()} == OFFICIAL | {"scenes.json", "blocks.json"} | set(FOLDERS)
    for where, name in FOLDERS.items():
        assert sorted(path.name for path in (folder / where).iterdir()) == [
            f"CLEVR_{name}_{k:06d}.png" for k in range(40)
        ]
    for name in ("change_captions.json", "no_change_captions.json"):
        captions = _json(folder / name)
        assert list(captions) == [f"CLEVR_default_{k:06d}.png" for k in range(40)]
        assert all(5 <= len(sentences) <= 7 for sentences in captions.values())
    kinds = _json(folder / "type_mapping.json")
    assert list(kinds) == ["color", "material", "add", "drop", "move"]
    assert sorted(file for files in kinds.values() for file in files) == [f"{k:06d}.png" for k in range(40)]


def test_the_oracle_names_the_change_in_words_of_its_own(folder, tmp_path):
    pairs = read_pairs("blocks", folder)[7:]
    sentences = oracle_captions(folder, pairs)
    assert list(sentences) == [pair.id for pair in pairs] and min(map(len, sentences.values())) >= 30
    captions = {id: texts[0] for id, texts in sentences.items()}
    right = slot_accuracy(captions, pairs)
    assert right["type"] == right["to"] == 1 and right["object"] > 0.6  # the others name color and shape only
    changed = [pair for pair in pairs if not pair.is_distractor]
    assert sum(captions[pair.id] in pair.captions for pair in changed) < len(changed) / 2
    unchanged = {captions[pair.id] for pair in pairs if pair.is_distractor}
    assert unchanged <= set(NO_CHANGE) and len(unchanged) > 4
    settings = _json(folder / "blocks.json")
    (tmp_path / "blocks.json").write_text(json.dumps({**settings, "look": settings["look"] + 1}))
    assert oracle_captions(tmp_path, pairs) == oracle_captions(tmp_path / "none", pairs) == {}


@pytest.mark.slow
def test_every_split_has_every_change_equally_often(tmp_path, monkeypatch):
    from diffcap.worlds.blocks import write

    blank = torch.zeros(1, 3, 48, 64, dtype=torch.uint8), torch.full((1, 48, 64), -1)  # the pictures do not matter here
    monkeypatch.setattr(
        write, "render", lambda scenes, size: [part.expand(len(scenes), *part.shape[1:]) for part in blank]
    )
    write_blocks(tmp_path / "b", pairs=1000, seed=1, workers=1)
    splits, kinds = _json(tmp_path / "b/splits.json"), _json(tmp_path / "b/type_mapping.json")
    assert sorted(number for numbers in splits.values() for number in numbers) == list(range(500))
    kind_of = {int(file[:6]): kind for kind, files in kinds.items() for file in files}
    for split, share in (("train", 85), ("val", 5), ("test", 10)):
        assert Counter(kind_of[number] for number in splits[split]) == dict.fromkeys(CHANGES, share)
    write_blocks(tmp_path / "c", pairs=1000, seed=2, workers=1)
    assert _json(tmp_path / "c/splits.json") != splits


def test_it_is_read_and_a_triple_is_the_same_in_a_larger_dataset(folder, tmp_path):
    pairs = read_pairs("blocks", folder)
    assert len(pairs) == 80
    for pair in pairs:
        assert (folder / pair.before).is_file() and 0 < pair.extra["viewpoint_iou"] <= 1
        assert ("boxes" in pair.extra) != pair.is_distractor
    assert Counter(pair.change_type for pair in pairs) == {**dict.fromkeys(CHANGES, 8), None: 40}
    write_blocks(tmp_path / "more", pairs=110, seed=5, workers=1)
    for path in folder.rglob("*.png"):
        assert path.read_bytes() == (tmp_path / "more" / path.relative_to(folder)).read_bytes()
    captions = _json(folder / "change_captions.json")
    assert captions.items() <= _json(tmp_path / "more/change_captions.json").items()
    write_blocks(tmp_path / "other", pairs=30, seed=6, size=(96, 64), jitter=0.0, workers=1)
    with Image.open(tmp_path / "other/images/CLEVR_default_000000.png") as image:
        assert image.size == (96, 64)
    assert all(scene["viewpoint_iou"] == 1 for scene in _json(tmp_path / "other/scenes.json").values())
    assert _json(tmp_path / "other/change_captions.json") != captions


def test_images_are_the_rendered_ones(folder):
    triples = sample_triples(range(40), seed=5)
    images, _ = render(triples.scenes())
    for view, (where, name) in enumerate(FOLDERS.items()):
        for row in range(40):
            with Image.open(folder / where / f"CLEVR_{name}_{row:06d}.png") as image:
                image.load()
                assert image.mode == "RGB" and image.size == (128, 96)
                assert np.array_equal(np.asarray(image), images[view * 40 + row].permute(1, 2, 0).numpy())


def test_boxes_hold_the_pixels_of_the_changed_object_and_scenes_say_what_it_was(folder):
    triples = sample_triples(range(40), seed=5)
    scenes = _json(folder / "scenes.json")
    assert list(scenes) == [f"{k:06d}.png" for k in range(40)]
    absent = {"before": "add", "after": "drop"}
    for when in ("before", "after"):
        _, index = render(getattr(triples, when))
        for row in range(40):
            slot, box = int(triples.changed[row]), scenes[f"{row:06d}.png"]["boxes"][when]
            assert (box is None) == (CHANGES[triples.change[row]] == absent[when])
            if box is not None:
                y, x = np.nonzero(index[row].numpy() == slot)
                assert box == [x.min(), y.min(), x.max() + 1, y.max() + 1]
    for row in range(40):
        entry, kind = scenes[f"{row:06d}.png"]["changed"], CHANGES[triples.change[row]]
        slot = int(triples.changed[row])
        assert entry["shape"] == ("cube", "sphere", "cylinder")[triples.before.shape[row, slot]]
        if kind == "material":
            assert entry["to"] == ("rubber", "metal")[triples.after.material[row, slot]] != entry["material"]
        elif kind != "color":
            assert entry["to"] is None
    change, distractor = triples.viewpoint_iou()
    for name, values in (("viewpoint_iou", change), ("viewpoint_iou_distractor", distractor)):
        assert [scene[name] for scene in scenes.values()] == pytest.approx(values.tolist(), abs=6e-5)


def _json(path: Path):
    return json.loads(path.read_text())
