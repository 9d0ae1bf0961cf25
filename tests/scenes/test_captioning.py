"""The tiles that are captioned, the probability of no change, the file of an unfinished run, and changes of several tiles."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rasterio.features import rasterize
from scipy import ndimage
from tests.scenes.rasters import write

from diffcap.change import NO_CHANGE_SENTENCES, Caption, no_change_probability, scored_sentences
from diffcap.scenes.captioning import PartialResults, caption_tiles
from diffcap.scenes.raster import Scene, TileCaption, Tiling, open_scene
from diffcap.scenes.writing import merge_tiles
from diffcap.text.hub import ChatTemplate, HubVocabulary
from diffcap.utils.errors import DiffcapError


class Mean:
    """A captioner that says the mean color of each image; records its batches."""

    vocabulary: Any = SimpleNamespace()
    only_answers = False

    def __init__(self) -> None:
        self.batches: list[int] = []

    def batch(self, pairs: Any, *_: Any, sentences: Any) -> Iterator[Caption]:
        self.batches.append(len(pairs))
        assert sentences == NO_CHANGE_SENTENCES
        for before, after in pairs:
            assert before.mode == "RGB" and before.size == after.size
            means = [int(np.asarray(image).mean()) for image in (before, after)]
            yield Caption(f"{means[0]} to {means[1]}", -0.5, (), scored=(math.log(0.25),))


def captions(folder: Path, before: Any, after: Any, size: int, batch_size: int = 4, **options: Any) -> tuple[Any, Mean]:
    paths = write(folder / "a.tif", before, **options), write(folder / "b.tif", after, **options)
    captioner = Mean()
    with open_scene(*paths) as scene, PartialResults(folder / "p.jsonl", {}) as partial:
        tiling = Tiling(scene.width, scene.height, size, 0)
        found = caption_tiles(scene, tiling, None, captioner, partial, batch_size=batch_size)  # type: ignore[arg-type]
    return found, captioner


def test_identical_tiles_and_tiles_without_data_are_not_captioned(tmp_path: Path) -> None:
    before, after = np.full((3, 20, 60), 50, np.uint8), np.full((3, 20, 60), 50, np.uint8)
    after[:, 3, 3] = 200  # tile 0
    before[:, :, 20:40] = 0  # tile 1
    before[:, :10, 40:], after[:, 10:, 40:] = 90, 0  # tile 2: below, only the first date has data
    (found, not_captioned), captioner = captions(tmp_path, before, after, 20, nodata=0)
    assert not_captioned == {"identical": 0, "no_data": 1}
    said = [(each.tile.x, each.caption, each.no_change) for each in found]
    assert said == [(0, "50 to 50", 0.25), (40, "45 to 25", 0.25)]
    assert captioner.batches == [2] and '"not_captioned": "no data"' in (tmp_path / "p.jsonl").read_text()
    (tmp_path / "same").mkdir()
    assert captions(tmp_path / "same", after, after, 20)[0] == ([], {"identical": 3, "no_data": 0})


def test_a_scene_that_is_smaller_than_a_tile_is_padded(tmp_path: Path) -> None:
    before, after = np.full((3, 8, 4), 64, np.uint8), np.full((3, 8, 4), 128, np.uint8)
    found, _ = captions(tmp_path, before, after, 16)
    ((tile, caption, *_),), _ = found
    assert tile == (0, 0, 4, 8) and caption == "8 to 16"  # an eighth of the padded image


def test_skipped_tiles_are_saved_in_batches_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffcap.scenes.captioning.MAX_UNSAVED_RESULTS", 5)
    before = np.full((3, 20, 18 * 20), 50, np.uint8)
    after = before.copy()
    after[:, :, 7 * 20 : 9 * 20] = 80  # tiles 7 and 8 of 18
    whole, captioner = captions(tmp_path, before, after, 20)
    assert captioner.batches == [2] and whole[1] == {"identical": 16, "no_data": 0}
    lines = (tmp_path / "p.jsonl").read_bytes().splitlines(keepends=True)
    assert [line.count(b"tile") for line in lines] == [0, 5, 5, 5, 3]
    for kept, batches in ((2, [2]), (3, [])):
        (tmp_path / "p.jsonl").write_bytes(b"".join(lines[:kept]))
        again, captioner = captions(tmp_path, before, after, 20)
        assert captioner.batches == batches and again == whole
        assert (tmp_path / "p.jsonl").read_bytes() == b"".join(lines)


def test_the_sentences_of_no_change_have_no_probability_for_a_model_of_free_text() -> None:
    tokenizer = SimpleNamespace(get_vocab=dict, pad_token_id=0)
    for num_sentences, sentences in ((None, NO_CHANGE_SENTENCES), (1, ())):
        vocabulary = HubVocabulary(tokenizer, ChatTemplate("", 1, 2, ""), num_sentences)
        assert scored_sentences(SimpleNamespace(vocabulary=vocabulary)) == sentences


@pytest.mark.parametrize(
    ("text", "own", "scored", "probability"),
    [
        ("a road is built", None, (0.2, 0.25, 0.0), 0.45),
        ("a road is built", 0.7, (0.2, 0.25), 0.7),  # IDC-PCL's own estimate
        ("There is no difference.", 0.1, (0.2, 0.25), 1),
        ("a road is built", None, (), 0),  # a vision-language model without training
    ],
)
def test_the_probability_of_no_change(
    text: str, own: float | None, scored: tuple[float, ...], probability: float
) -> None:
    logarithms = tuple(math.log(value) if value else -math.inf for value in scored)
    assert no_change_probability(Caption(text, -1.0, (), own, scored=logarithms)) == pytest.approx(probability)


def test_an_error_of_the_reading_thread_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DiffcapError("cannot read the pixels")

    monkeypatch.setattr(Scene, "read", fail)
    with pytest.raises(DiffcapError, match="cannot read the pixels"):
        captions(tmp_path, *np.zeros((2, 3, 16, 16), np.uint8), size=8)


HEADER = {"tile": 256, "before": ["a.tif", 10]}
BATCHES = [[{"tile": 0}], [{"tile": 1, "caption": "é"}, {"tile": 2}]]


def write_batches(path: Path) -> None:
    path.write_text('{"tile": 256, "bef')  # a run that was killed in its first line
    with PartialResults(path, HEADER) as partial:
        assert partial.results == []
        for batch in BATCHES:
            partial.append(batch)


@pytest.mark.parametrize(
    "end", ['[{"tile": 3', '[{"tile": 3\n', '[{"tile": 3}]', '[{"tile": 2}]\n', "\0\0\0", "5\n", "[7]\n"]
)
def test_batches_come_back_without_the_last_line_if_it_is_damaged(end: str, tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    write_batches(path)
    with path.open("a") as file:
        file.write(end)
    for _ in range(2):
        with PartialResults(path, HEADER) as partial:
            assert partial.results == [*BATCHES[0], *BATCHES[1]]
    with PartialResults(path, HEADER) as partial:
        partial.append([])
    assert list(map(json.loads, path.read_text().splitlines())) == [HEADER, *BATCHES, []]


@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize("garbage", [b'{"tile": 256, "befo', b"\xff\0", b"5", b"[{}]", b""])
def test_a_damaged_line_before_whole_ones_is_one_sentence(line: int, garbage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    write_batches(path)
    lines = path.read_bytes().splitlines()
    lines[line - 1] = garbage
    path.write_bytes(b"\n".join(lines) + b"\n")
    content = path.read_bytes()
    with pytest.raises(DiffcapError, match=rf"x\.partial\.jsonl, line {line}: it is damaged; delete this line and all"):
        PartialResults(path, HEADER)
    assert path.read_bytes() == content


def test_results_of_another_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.partial.jsonl"
    PartialResults(path, HEADER).append([{"tile": 0}])
    content = path.read_bytes()
    with pytest.raises(DiffcapError, match="another value of tile; repeat that command, or delete"):
        PartialResults(path, {**HEADER, "tile": 128})
    assert path.read_bytes() == content


@pytest.mark.parametrize("overlap", [0, 4])
@pytest.mark.parametrize("seed", range(4))
def test_changes_are_the_connected_regions_of_pixels(overlap: int, seed: int) -> None:
    rng, tiling = random.Random(seed), Tiling(70, 50, 16, overlap)
    sentences = ["a road is built", "the trees are gone", None]
    captions = [
        TileCaption(tiling[number], sentence, -rng.random(), rng.random())
        for number in range(len(tiling))
        if (sentence := rng.choice(sentences)) is not None
    ]
    changes = merge_tiles(captions)
    assert sum(change.num_tiles for change in changes) == len(captions) and merge_tiles([]) == []
    assert changes == sorted(changes, key=lambda change: (change.window[1], change.window[0], change.caption))
    for sentence in sentences[:2]:
        mask = np.zeros((50, 70), bool)
        for each in captions:
            x, y, width, height = each.tile
            mask[y : y + height, x : x + width] |= each.caption == sentence
        found = []
        for change in changes:
            if change.caption == sentence:
                area = rasterize([change.polygon], (50, 70)).astype(bool)
                found.append(np.argwhere(area).tolist())
                inside = [each for each in captions if each.caption == sentence and area[each.tile.y, each.tile.x]]
                assert change.num_tiles == len(inside)
                assert change.no_change == min(each.no_change for each in inside)
                assert change.log_probability == max(each.log_probability for each in inside)
        labels, count = ndimage.label(mask)  # pixels that share an edge are connected
        assert sorted(found) == sorted(np.argwhere(labels == label).tolist() for label in range(1, count + 1))
