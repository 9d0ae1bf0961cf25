"""The stand-ins of blocks for CUB and NABirds: official layouts, what the pictures show, the same bytes after a kill."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffcap.datasets import read_pairs
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks import singles
from diffcap.worlds.blocks.captions import WORDS, tag
from diffcap.worlds.blocks.geometry import COLORS, HALF_VIEW, view_boxes
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import sample_triples
from diffcap.worlds.blocks.singles import SPECIES, attributes, sample_portraits, write_cub, write_nabirds

WRITERS = {"cub": (write_cub, 70), "nabirds": (write_nabirds, 200)}


@pytest.fixture(scope="module", params=list(WRITERS))
def written(request, tmp_path_factory) -> tuple[str, Path]:
    write, images = WRITERS[request.param]
    folder = tmp_path_factory.mktemp("singles") / request.param
    write(folder, images=images, seed=3, jitter=0.5, workers=1)
    return request.param, folder


def hashes(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_readers_of_the_official_datasets_read_them(written) -> None:
    form, folder = written
    pairs = read_pairs(f"blocks_{form}", folder)
    assert len(pairs) == WRITERS[form][1] and pairs[0].after is None
    for pair in pairs:
        with Image.open(folder / pair.before) as image:
            image.load()
            assert image.size == (128, 96) and image.format == "JPEG"
    if form == "cub":
        assert all(len(pair.captions) == 10 for pair in pairs)
        assert {pair.split for pair in pairs} == {"train", "val"}
        for pair in pairs:
            for caption in pair.captions:
                tag(caption)  # every word is one that the shipped tagger knows
    else:
        assert Counter(pair.extra["class"] for pair in pairs).keys() == set(range(SPECIES))
        assert Counter(pair.split for pair in pairs) == {"train": 104, "test": 96}
        labels = {line.split()[1] for line in (folder / "image_class_labels.txt").read_text().splitlines()}
        assert min(map(int, labels)) == 24  # as in NABirds, the numbers of families are not those of images
    assert not (folder / ".parts").exists()


def test_sentences_are_true_of_their_scenes(tmp_path: Path) -> None:
    write_cub(tmp_path / "c", images=64, seed=1, workers=1)
    output = {pair.id: pair.captions for pair in read_pairs("blocks_cub", tmp_path / "c")}
    scenes = sample_triples([singles._CUB + number for number in range(64)], 1).before
    meaning = {word: value for value, words in WORDS.items() for word in words}
    for number in range(64):
        there = {
            (("small", "large")[a], COLORS[b], ("rubber", "metal")[c], ("cube", "sphere", "cylinder")[d])
            for a, b, c, d, valid in zip(
                *(getattr(scenes, name)[number].tolist() for name in ("size", "color", "material", "shape", "valid"))
            )
            if valid
        }
        (captions,) = [captions for name, captions in output.items() if name.endswith(f"{number:06d}")]
        for caption in captions:
            for phrase in caption.split(" and "):
                assert tuple(meaning.get(word, word) for word in phrase.split()[1:]) in there, caption


def test_a_species_is_its_four_attributes_and_neighbours_differ_in_one_or_two() -> None:
    kinds = [attributes(species) for species in range(SPECIES)]
    assert len(set(kinds)) == SPECIES == 96
    for first in range(0, SPECIES, 4):
        family = kinds[first : first + 4]
        assert len({(color, shape) for _, color, _, shape in family}) == 1
        assert {(size, material) for size, _, material, _ in family} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_portraits_show_one_whole_object_of_the_species() -> None:
    species = list(range(SPECIES))
    scenes = sample_portraits(species, species, seed=2, jitter=1.0)
    assert scenes.valid.shape == (SPECIES, 1) and scenes.valid.all()
    for number, row in enumerate(
        zip(*(getattr(scenes, name)[:, 0].tolist() for name in ("size", "color", "material", "shape")))
    ):
        assert row == attributes(number)
    boxes = view_boxes(scenes)[:, 0].abs()
    assert (boxes[:, 0::2] < HALF_VIEW[0]).all() and (boxes[:, 1::2] < HALF_VIEW[1]).all()
    _, index = render(scenes[torch.arange(0, SPECIES, 12)])
    assert ((index == 0).flatten(1).sum(1) > 30).all()
    again = sample_portraits(species[40:50], species[40:50], seed=2, jitter=1.0)
    assert torch.equal(again.position, scenes.position[40:50])  # whatever else is drawn with it
    assert len({tuple(spot) for spot in scenes.position[:, 0].tolist()}) > 90


def test_a_broken_off_run_goes_on_and_ends_with_the_same_bytes(written, tmp_path, monkeypatch) -> None:
    form, folder = written
    write, images = WRITERS[form]
    real, calls = singles.write_part, []

    def fail(*arguments) -> None:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(singles, "write_part", fail)
        write(tmp_path / "b", images=images, seed=3, jitter=0.5, workers=1)
    assert len(list((tmp_path / "b/.parts").glob("*.json"))) == 2
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "b").rglob("*.jpg")}
    assert 16 < len(kept) < images
    write(tmp_path / "b", images=images, seed=3, jitter=0.5, workers=1)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert hashes(tmp_path / "b") == hashes(folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    write(folder, images=images, seed=3, jitter=0.5)  # finished: left alone
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_no_scene_is_one_of_blocks() -> None:
    ours = sample_triples([singles._CUB + number for number in range(20)], 5).before.position
    theirs = sample_triples(range(20), 5).before.position
    assert not np.isin(ours.flatten().numpy(), theirs[theirs != 0].numpy()).any()


@pytest.mark.parametrize(
    ("form", "settings", "output"),
    [
        ("cub", {"images": 63}, "blocks_cub: images must be 64 or more, not 63"),
        ("nabirds", {"images": 191}, "blocks_nabirds: images must be 192 or more"),
        ("nabirds", {"images": 192, "jitter": 4}, "jitter must lie in 0 to 3"),
        ("cub", {"images": 70, "size": (32, 24)}, "64 x 48"),
    ],
)
def test_a_senseless_setting_is_one_sentence(tmp_path, form, settings, output) -> None:
    with pytest.raises(DiffcapError, match=output):
        WRITERS[form][0](tmp_path / "x", **settings)
    assert not (tmp_path / "x").exists()


def test_a_folder_of_other_settings_is_refused(written) -> None:
    form, folder = written
    with pytest.raises(DiffcapError, match=r"holds blocks with other settings \(seed\)"):
        WRITERS[form][0](folder, images=WRITERS[form][1], seed=4, jitter=0.5)
