"""The probability of no change, and the tiles that are captioned."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.scenes.rasters import example, write

from diffcap.pair_captioner import Caption, load_captioner
from diffcap.scenes.captioning import IDENTICAL, NO_CHANGE, NO_DATA, caption_tiles, in_background, no_change_probability
from diffcap.scenes.partial import PartialResults
from diffcap.scenes.raster import open_scene
from diffcap.scenes.tiling import Tiling


class Mean:
    """A captioner that says the mean color of each image; records its batches."""

    vocabulary = SimpleNamespace()

    def __init__(self) -> None:
        self.batches: list[int] = []

    def batch(self, pairs: Any, *_: Any, sentences: Any) -> Iterator[Caption]:
        self.batches.append(len(pairs))
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
    found, captioner = captions(tmp_path, before, after, 20, nodata=0)
    assert found.not_captioned == {IDENTICAL: 0, NO_DATA: 1}
    said = [(each.tile.x, each.caption, each.no_change) for each in found.captions]
    assert said == [(0, "50 to 50", 0.25), (40, "45 to 25", 0.25)]
    assert captioner.batches == [2]
    (tmp_path / "same").mkdir()
    assert captions(tmp_path / "same", after, after, 20)[0].not_captioned == {IDENTICAL: 3, NO_DATA: 0}


def test_a_scene_that_is_smaller_than_a_tile_is_padded(tmp_path: Path) -> None:
    before, after = np.full((3, 8, 4), 64, np.uint8), np.full((3, 8, 4), 128, np.uint8)
    found, _ = captions(tmp_path, before, after, 16)
    ((tile, caption, *_),) = found.captions
    assert tile == (0, 0, 4, 8) and caption == "8 to 16"  # an eighth of the padded image


def test_a_run_that_goes_on_captions_the_batches_of_an_undisturbed_run(tmp_path: Path) -> None:
    before = np.arange(3 * 20 * 200, dtype=np.uint8).reshape(3, 20, 200)
    whole, captioner = captions(tmp_path, before, before + 1, 20, batch_size=3)
    assert captioner.batches == [3, 3, 3, 1]
    lines = (tmp_path / "p.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "p.jsonl").write_bytes(b"".join(lines[:3]))
    again, captioner = captions(tmp_path, before, before + 1, 20, batch_size=3)
    assert captioner.batches == [3, 1] and again == whole and (tmp_path / "p.jsonl").read_bytes() == b"".join(lines)


def test_skipped_tiles_are_saved_in_batches_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffcap.scenes.captioning.SAVED", 5)
    before = np.full((3, 20, 18 * 20), 50, np.uint8)
    after = before.copy()
    after[:, :, 7 * 20 : 9 * 20] = 80  # tiles 7 and 8 of 18
    whole, captioner = captions(tmp_path, before, after, 20)
    assert captioner.batches == [2] and whole.not_captioned == {IDENTICAL: 16, NO_DATA: 0}
    lines = (tmp_path / "p.jsonl").read_bytes().splitlines(keepends=True)
    assert [line.count(b"tile") for line in lines] == [0, 5, 5, 5, 3]
    for kept, batches in ((2, [2]), (3, [])):
        (tmp_path / "p.jsonl").write_bytes(b"".join(lines[:kept]))
        again, captioner = captions(tmp_path, before, after, 20)
        assert captioner.batches == batches and again == whole
        assert (tmp_path / "p.jsonl").read_bytes() == b"".join(lines)


def test_an_interruption_among_identical_tiles_keeps_the_earlier_ones(tmp_path: Path) -> None:
    pixels = np.full((3, 20, 600 * 20), 50, np.uint8)
    path = write(tmp_path / "a.tif", pixels)

    def stop(_: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    left = 551
    with open_scene(path, path) as scene, PartialResults(tmp_path / "p.jsonl", {}) as partial:
        tiling = Tiling(scene.width, scene.height, 20, 0)
        with pytest.raises(KeyboardInterrupt):
            caption_tiles(scene, tiling, None, Mean(), partial, advance=stop)  # type: ignore[arg-type]
    with PartialResults(tmp_path / "p.jsonl", {}) as partial:
        assert sum(map(len, partial.batches)) == 512


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


@pytest.mark.slow
def test_the_shipped_captioners_probability_is_that_of_its_sentences() -> None:
    """Compared with the product of the words' probabilities, decoded step by step."""
    captioner = load_captioner(device="cpu")
    before, after = (example(name).transpose(1, 2, 0) for name in ("before", "after"))
    same, changed = captioner.batch([(before, before), (before, after)], sentences=NO_CHANGE)
    assert isinstance(same, Caption) and isinstance(changed, Caption)
    assert sum(map(math.exp, same.scored)) > 0.9 and no_change_probability(changed) < 0.1
    first, second = captioner._features([captioner._preprocess(before, after)])
    model, vocabulary = captioner._captioner, captioner.vocabulary
    for sentence, score in zip(NO_CHANGE, changed.scored):
        ids = vocabulary.encode(sentence, 30)
        if vocabulary.unk in ids:
            assert score == -math.inf
            continue
        memory, cache, total = model.encode(first, second), None, 0.0
        for token, following in pairwise(ids):
            with torch.no_grad():
                logits, cache = model.step(torch.tensor([token]), memory, cache)
            total += float(logits.log_softmax(-1)[0, following])
        assert score == pytest.approx(total, abs=1e-3)
    assert sum(score > -math.inf for score in changed.scored) >= 9


def test_errors_of_the_reading_thread_reach_the_caller() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    found = in_background(items(), 3)
    assert next(found) == 1
    with pytest.raises(ValueError, match="broken"):
        next(found)
