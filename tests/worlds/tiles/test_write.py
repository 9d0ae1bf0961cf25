import json
from collections import Counter
from itertools import chain
from random import Random

import numpy as np
import pytest
from PIL import Image

from diffcap.datasets import describe, read_pairs
from diffcap.datasets.registry import get_dataset
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.tiles.captions import NO_CHANGE, write_captions
from diffcap.worlds.tiles.changes import CHANGES, sample_pair
from diffcap.worlds.tiles.write import oracle_captions, render_pair, write_tiles

KEYS = ["filepath", "filename", "imgid", "sentences", "split", "changeflag", "sentids"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiles") / "official"
    write_tiles(path, pairs=64, seed=5, workers=1)
    return path


def test_layout_is_the_official_one(folder):
    images = json.loads((folder / "LevirCCcaptions.json").read_text())["images"]
    assert [list(entry) for entry in images] == [KEYS] * 64
    assert [entry["imgid"] for entry in images] == list(range(64))
    assert [id for entry in images for id in entry["sentids"]] == list(range(320))
    order = ["train", "val", "test"]
    assert [entry["split"] for entry in images] == sorted((entry["split"] for entry in images), key=order.index)
    number = Counter()
    for entry in images:
        number[entry["split"]] += 1
        assert entry["filepath"] == entry["split"]
        assert entry["filename"] == f"{entry['split']}_{number[entry['split']]:06d}.png"
        for id, sentence in zip(entry["sentids"], entry["sentences"], strict=True):
            assert list(sentence) == ["tokens", "raw", "imgid", "sentid"]
            assert sentence["raw"] == f" {' '.join(sentence['tokens'])} ."
            assert (sentence["imgid"], sentence["sentid"]) == (entry["imgid"], id)
        if not entry["changeflag"]:
            assert tuple(" ".join(sentence["tokens"]) for sentence in entry["sentences"]) == NO_CHANGE
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"LevirCCcaptions.json", "facts.json", "tiles.json"} | {
        f"images/{entry['split']}/{kind}/{entry['filename']}" for entry in images for kind in ("A", "B", "label")
    }


def test_the_oracle_writes_a_sentence_of_the_grammar_about_the_change(folder):
    pairs = [pair for pair in read_pairs("tiles", folder) if pair.split == "train"]
    sentences = oracle_captions(folder, pairs)
    assert list(sentences) == [pair.id for pair in pairs] and {len(texts) for texts in sentences.values()} == {30}
    captions = {id: texts[0] for id, texts in sentences.items()}
    unchanged = {captions[pair.id] for pair in pairs if pair.is_distractor}
    assert unchanged <= set(NO_CHANGE) and len(unchanged) > 2
    references = {
        tuple(write_captions(Random(f"tiles captions 5 {n}"), sample_pair(n, 5).change)): n for n in range(64)
    }
    changed = [pair for pair in pairs if not pair.is_distractor]
    possible = []  # the words of many sentences about each change
    for pair in changed:
        change = sample_pair(references[tuple(pair.captions)], 5).change
        possible.append(set(" ".join(chain(*(write_captions(Random(n), change) for n in range(200)))).split()))
    words = [set(captions[pair.id].split()) for pair in changed]
    assert all(own <= known for own, known in zip(words, possible))
    assert sum(own <= known for own, known in zip(words, possible[1:])) < len(words) / 4  # the pairs have other changes
    assert sum(captions[pair.id] in pair.captions for pair in changed) < len(changed) / 4


def test_the_splits_have_all_changes_equally_often(folder):
    facts = json.loads((folder / "facts.json").read_text())
    for split, share in (("train", 2), ("val", 1), ("test", 1)):
        kinds = Counter(entry["change_type"] for name, entry in facts.items() if name.startswith(split))
        assert kinds == {**dict.fromkeys(CHANGES, share), None: 8 * share}


def test_it_is_read_with_change_types_boxes_and_masks(folder):
    pairs = read_pairs("tiles", folder)
    assert get_dataset("tiles").rendered and len(pairs) == 64
    assert describe("tiles", pairs, folder)["official"] is None
    for pair in pairs:
        assert pair.is_distractor == (pair.change_type is None) == (pair.extra["changeflag"] == 0)
        assert pair.group == ("no_change" if pair.is_distractor else "change")
        mask = np.array(Image.open(folder / pair.extra["mask"]))
        assert mask.shape == (256, 256) and set(np.unique(mask)) <= {0, 255}
        assert mask.any() != pair.is_distractor
        boxes = pair.extra["boxes"]
        assert sum(box is not None for box in boxes.values()) == (not pair.is_distractor)
        for box in filter(None, boxes.values()):
            assert 0 <= box[0] < box[2] <= 256 and 0 <= box[1] < box[3] <= 256


def test_a_missing_pair_in_the_facts_is_one_sentence(folder, tmp_path):
    (tmp_path / "LevirCCcaptions.json").write_bytes((folder / "LevirCCcaptions.json").read_bytes())
    (tmp_path / "facts.json").write_text("{}")
    with pytest.raises(DiffcapError, match="has no object for the pair 'train_000001'; render the folder again"):
        read_pairs("tiles", tmp_path)


def test_images_are_the_rendered_ones(folder):
    images = json.loads((folder / "LevirCCcaptions.json").read_text())["images"]
    found = {tuple(" ".join(s["tokens"]) for s in entry["sentences"]): entry for entry in images}
    for number in (0, 6, 10):
        wanted = render_pair(number, seed=5)
        entry = found[tuple(wanted.captions)]
        for kind, pixels in zip(("A", "B", "label"), (*wanted.images, wanted.mask)):
            path = folder / "images" / entry["split"] / kind / entry["filename"]
            assert np.array_equal(np.array(Image.open(path)), pixels)
