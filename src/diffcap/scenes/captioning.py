"""Caption the tiles of a scene (two rasters of one place)."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from diffcap.change import no_change_probability, scored_sentences
from diffcap.pair_captioner import PairCaptioner
from diffcap.scenes.raster import Scene, Stretch, Tile, TileCaption, Tiling, to_rgb
from diffcap.utils.console import echo
from diffcap.utils.cores import map_ahead
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import add_filename

PARTIAL_SUFFIX = ".partial.jsonl"  # end of the name of a `PartialResults` file
MAX_UNSAVED_RESULTS = 256  # results after which a batch is saved, even if few of its tiles need a caption
NO_DATA, IDENTICAL = "no data", "identical"  # reasons why a tile is not captioned


class PartialResults(AbstractContextManager["PartialResults"]):
    """The results of an unfinished run as JSON Lines: first `header` (the settings that affect them), then a line per batch of tiles."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        values, num_bytes = _read_whole_lines(path)
        old_header, *batches = values or [None]
        if old_header not in (None, header):
            names = ", ".join(key for key in header if old_header.get(key) != header[key]) or "an option"
            raise DiffcapError(
                f"{path}: belongs to an unfinished run with another value of {names}; repeat that command, or delete the file to "
                "start from the first tile."
            )
        self.results: list[dict[str, Any]] = [*chain.from_iterable(batches)]  # of each tile, see `caption_tiles`
        self._file = path.open("ab")
        self._file.truncate(num_bytes)
        if old_header is None:
            self._write_line(dict(header))

    def append(self, batch: list[dict[str, Any]]) -> None:
        """Add a batch, and write it to the file before this method returns."""
        self._write_line(batch)
        self.results += batch

    def _write_line(self, content: Any) -> None:
        with add_filename(self.path):
            self._file.write(json.dumps(content).encode() + b"\n")
            self._file.flush()

    def __exit__(self, *_: object) -> None:
        with add_filename(self.path):
            self._file.close()


def _read_whole_lines(path: Path) -> tuple[list[Any], int]:
    """Return the header and the batches of a `PartialResults` file, and the number of bytes of their lines. A new file has neither.

    A damaged last line is left out, because a kill or a full disk may have cut it; its batch is captioned again.
    """
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    values: list[Any] = []
    num_bytes, tiles = 0, set[int]()  # of the lines so far
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
            if number == 1:
                is_whole = isinstance(value, dict)
            else:  # no tile is in two batches
                batch_tiles = [result["tile"] for result in value]
                is_whole = tiles.isdisjoint(batch_tiles)
                tiles.update(batch_tiles)
        except (ValueError, TypeError, KeyError):  # not JSON, or not a list of results
            is_whole = False
        if is_whole and line.endswith(b"\n"):
            values.append(value)
            num_bytes += len(line)
        elif number < len(lines):
            raise DiffcapError(
                f"{path}, line {number}: it is damaged; delete this line and all lines after it to keep the results before it, or "
                "delete the file to start from the first tile."
            )
    return values, num_bytes


def read_tile(scene: Scene, tile: Tile, size: int, stretch: Stretch | None) -> str | tuple[Image.Image, Image.Image]:
    """Read a tile of both dates as RGB images of `size` x `size` pixels, or return the reason why it needs no caption.

    `stretch` has the pixel values that become 0 and 255. A pixel without data at one date is black in both images. If the scene is
    smaller than `size`, its tile is padded with black.
    """
    sample = scene.read(tile)
    is_shown = sample.before_valid & sample.after_valid
    if not is_shown.any():
        return NO_DATA
    if np.array_equal(sample.before, sample.after):
        return IDENTICAL
    before, after = (to_rgb(pixels, is_shown, stretch) for pixels in (sample.before, sample.after))
    if np.array_equal(before, after):
        return IDENTICAL
    padding = ((0, size - tile.height), (0, size - tile.width), (0, 0))
    return Image.fromarray(np.pad(before, padding)), Image.fromarray(np.pad(after, padding))


def caption_tiles(
    scene: Scene,
    tiling: Tiling,
    stretch: Stretch | None,
    captioner: PairCaptioner,
    partial_results: PartialResults,
    beams: int = 1,
    length_penalty: float = 0.0,
    batch_size: int = 16,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[list[TileCaption], dict[str, int]]:
    """Caption the tiles of a scene that have no result in `partial_results`, and append the results to it.

    A result is {"tile": number, "caption": ..., "log_probability": ..., "no_change": ...} or {"tile": number, "not_captioned": reason}.
    A batch ends when it has `batch_size` tiles to caption, or `MAX_UNSAVED_RESULTS` results (`batch_size` if that is more). A continued run
    repeats the whole interrupted batch, so that the numbers in its results do not depend on the interruption. `advance` is
    called with the number of tiles that were finished since its last call. If a model that only answers with text fails on a tile, the
    error is printed, and the tile has no result.

    Returns the captions, and the number of tiles that were not captioned, by reason.
    """
    sentences = scored_sentences(captioner)
    on_error: Literal["raise", "return"] = "return" if captioner.only_answers else "raise"
    results: list[dict[str, Any]] = []  # of the tiles of a batch
    image_pairs: list[tuple[Image.Image, Image.Image]] = []  # of the tiles to caption

    def finish_batch() -> None:
        open_results = [result for result in results if "not_captioned" not in result]  # in the order of `image_pairs`
        captions: Any = captioner.batch(image_pairs, beams, length_penalty, batch_size, on_error, sentences=sentences)
        for result, caption in zip(open_results, captions):
            if isinstance(caption, DiffcapError):
                echo(f"error: tile {result['tile']}: {caption}", err=True)
                results.remove(result)
                continue
            result["caption"] = caption.text
            result["log_probability"] = caption.log_probability and round(caption.log_probability, 4)
            result["no_change"] = round(no_change_probability(caption), 4)
        partial_results.append(results)
        advance(len(image_pairs))
        results.clear()
        image_pairs.clear()

    done = {result["tile"] for result in partial_results.results}
    numbers = [number for number in range(len(tiling)) if number not in done]
    with ThreadPoolExecutor(1) as thread:  # reads tiles while others are captioned
        tiles = map(tiling.__getitem__, numbers)
        reads = map_ahead(thread, lambda tile: read_tile(scene, tile, tiling.size, stretch), tiles, 2 * batch_size)
        for number, images_or_reason in zip(numbers, reads):
            if isinstance(images_or_reason, str):
                results.append({"tile": number, "not_captioned": images_or_reason})
                advance(1)
            else:
                results.append({"tile": number})
                image_pairs.append(images_or_reason)
            if len(image_pairs) == batch_size or len(results) >= max(MAX_UNSAVED_RESULTS, batch_size):
                finish_batch()
    if results:
        finish_batch()
    captions = [
        TileCaption(tiling[result["tile"]], result["caption"], result["log_probability"], result["no_change"])
        for result in partial_results.results
        if "caption" in result
    ]
    reasons = [result.get("not_captioned") for result in partial_results.results]
    return captions, {"identical": reasons.count(IDENTICAL), "no_data": reasons.count(NO_DATA)}
