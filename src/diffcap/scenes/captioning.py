"""Captions of the tiles of a scene, and the probability that nothing has changed in a tile."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from PIL import Image

from diffcap.datasets.no_change import ANNOTATED, is_no_change
from diffcap.pair_captioner import Caption, PairCaptioner
from diffcap.scenes.raster import Scene, Stretch, Tile, TileCaption, Tiling, to_rgb
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import add_filename
from diffcap.worlds.blocks.captions import NO_CHANGE as BLOCKS

NO_CHANGE = tuple(dict.fromkeys((*ANNOTATED, *BLOCKS)))
SUFFIX = ".partial.jsonl"
MAX_UNSAVED = (
    256  # results after which a batch is saved, so that an interruption loses few of them where few tiles are captioned
)
NO_DATA, IDENTICAL = "no data", "identical"  # reasons why a tile is not captioned
T = TypeVar("T")


class Captions(NamedTuple):
    """The captions of a scene's tiles, and the number of tiles that were not captioned, by reason."""

    captions: list[TileCaption]
    not_captioned: dict[str, int]


class PartialResults:
    """The results of an unfinished run, a JSON Lines file beside the output: a header, then a line for each batch of tiles.

    Args:
        header: what the results depend on (JSON values).
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes() if path.is_file() else b""
        complete, newline, _ = content.rpartition(b"\n")
        try:
            old_header, *batches = [json.loads(line) for line in complete.splitlines()] or [None]
        except ValueError:
            raise DiffcapError(
                f"{path}: a damaged file of an unfinished run; delete it to start from the first tile."
            ) from None
        if old_header not in (None, header):
            names = ", ".join(key for key in header if old_header.get(key) != header[key]) or "an option"
            raise DiffcapError(
                f"{path}: belongs to an unfinished run with another value of {names}; repeat that command, or delete the file to "
                "start from the first tile."
            )
        self.batches: list[Any] = batches
        self._file = path.open("ab")
        self._file.truncate(len(complete) + len(newline))  # the last line may have been cut by a kill or a full disk
        if old_header is None:
            self._write(dict(header))

    def append(self, batch: Any) -> None:
        """Add a batch, which reaches the file before the function returns."""
        self._write(batch)
        self.batches.append(batch)

    def _write(self, line: Any) -> None:
        with add_filename(self.path):
            self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with add_filename(self.path):
            self._file.close()


def no_change_probability(caption: Caption) -> float:
    """Return the captioner's probability that nothing has changed in a pair.

    * 1 if the caption says so (`is_no_change`);
    * else the method's own estimate, if it has one (IDC-PCL's distractor judging);
    * else the sum of the probabilities of the sentences `NO_CHANGE`, in `caption.scored`: how probable it is that a caption sampled
      from the captioner is one of them. A sentence with a word that is not in the vocabulary has probability 0.

    Vision-language models without training write free text, so that the sum is left out: 1 or 0.
    """
    if is_no_change(caption.text):
        return 1.0
    if caption.nothing_changed is not None:
        return caption.nothing_changed
    return min(1.0, math.fsum(map(math.exp, caption.scored)))


def prepare(scene: Scene, tile: Tile, size: int, stretch: Stretch | None) -> str | tuple[Image.Image, Image.Image]:
    """Read a tile of both dates as RGB images of `size` x `size` pixels, or return the reason why it needs no caption.

    A pixel that has no data at one date is black at both. A tile that is cut at the scene's border is padded with black.
    """
    sample = scene.read(tile)
    shown = sample.before_valid & sample.after_valid
    if not shown.any():
        return NO_DATA
    if np.array_equal(sample.before, sample.after):
        return IDENTICAL
    before, after = (to_rgb(pixels, shown, stretch) for pixels in (sample.before, sample.after))
    if np.array_equal(before, after):
        return IDENTICAL
    padding = ((0, size - tile.height), (0, size - tile.width), (0, 0))
    return Image.fromarray(np.pad(before, padding)), Image.fromarray(np.pad(after, padding))


def caption_tiles(
    scene: Scene,
    tiling: Tiling,
    stretch: Stretch | None,
    captioner: PairCaptioner,
    partial: PartialResults,
    beams: int = 1,
    length_penalty: float = 0.0,
    batch_size: int = 16,
    advance: Callable[[int], None] = lambda _: None,
) -> Captions:
    """Caption the tiles of a scene that are not in `partial` yet, and append them; `advance` is called with the number of new results.

    A batch ends when it has `batch_size` tiles to caption, or `MAX_UNSAVED` results (`batch_size` if that is more). A continued run
    repeats the interrupted batch as a whole, so that its numbers do not depend on the interruption.
    """
    free_text = getattr(captioner.vocabulary, "sentences", None) is not None
    sentences = () if free_text else NO_CHANGE
    results: list[dict[str, Any]] = []
    images: list[tuple[Image.Image, Image.Image]] = []
    uncaptioned: list[dict[str, Any]] = []  # the entries of `results` to which `images` belong

    def finish_batch() -> None:
        captions = captioner.batch(images, beams, length_penalty, batch_size, sentences=sentences) if images else ()
        for entry, caption in zip(uncaptioned, captions):
            assert isinstance(caption, Caption)
            entry["caption"] = caption.text
            entry["log_probability"] = round(caption.log_probability, 4)
            entry["no_change"] = round(no_change_probability(caption), 4)
        partial.append(list(results))
        advance(len(uncaptioned))
        for batch_list in (results, images, uncaptioned):
            batch_list.clear()

    first = sum(map(len, partial.batches))
    prepared = (prepare(scene, tiling[number], tiling.size, stretch) for number in range(first, len(tiling)))
    for number, tile in enumerate(in_background(prepared, 2 * batch_size), first):
        if isinstance(tile, str):
            results.append({"tile": number, "not_captioned": tile})
            advance(1)
        else:
            results.append({"tile": number})
            images.append(tile)
            uncaptioned.append(results[-1])
        if len(images) == batch_size or len(results) >= max(MAX_UNSAVED, batch_size):
            finish_batch()
    if results:
        finish_batch()
    captions = Captions([], {NO_DATA: 0, IDENTICAL: 0})
    for entry in chain.from_iterable(partial.batches):
        if "not_captioned" in entry:
            captions.not_captioned[entry["not_captioned"]] += 1
        else:
            values = (entry[key] for key in ("caption", "log_probability", "no_change"))
            captions.captions.append(TileCaption(tiling[entry["tile"]], *values))
    return captions


def in_background(items: Iterator[T], ahead: int) -> Iterator[T]:
    """Compute the items in a thread, at most `ahead` of them in advance."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        futures = deque(thread.submit(next, items, end) for _ in range(ahead))
        try:
            while (item := futures.popleft().result()) is not end:
                futures.append(thread.submit(next, items, end))
                yield item  # type: ignore[misc]
        finally:
            for future in futures:
                future.cancel()
