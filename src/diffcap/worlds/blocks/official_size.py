"""Write the files of CLEVR-Change (see `diffcap.datasets.clevr_change`) with their official counts, for `make rehearsal`.

The numbers, the splits, the change types and the number of captions are those of the released dataset. The captions are those of
`blocks`. Few scenes are rendered, in `rendered/`; the other images are links to theirs.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from diffcap.datasets.official import OFFICIAL
from diffcap.records import SPLITS, write_json
from diffcap.utils.errors import DiffcapError
from diffcap.utils.progress import progress_bar
from diffcap.worlds.blocks.captions import NO_CHANGE, write_captions
from diffcap.worlds.blocks.scenes import CHANGES, sample_triples
from diffcap.worlds.blocks.write import RENDERER_VERSION, VIEWS, write_blocks
from diffcap.worlds.rendering import claim

SIZE = (480, 320)  # width and height of CLEVR-Change's images in pixels
CAPTIONS = 493_735  # of all pairs, counted in the released files
PER_TYPE = 8000  # numbers 0 ... 7999 are changes of color, 8000 ... 15999 of material, ...; some numbers do not exist
_OFFICIAL = OFFICIAL["clevr_change"]
_FILES = ("change_captions.json", "no_change_captions.json", "type_mapping.json", "splits.json")
_CHUNK = 512  # scenes that are drawn together
_DRAWS = 100  # draws of a change's captions, of which two or three are needed


@dataclass(frozen=True)
class Settings:
    """The settings that determine the content of all files; stored in `blocks.json`."""

    scenes: int
    rendered: int
    official_of: str = "clevr_change"
    look: int = RENDERER_VERSION


def write(folder: Path, scenes: int | None = None, rendered: int = 100) -> None:
    """Write the dataset, or the missing part of one that was interrupted.

    Args:
        scenes: number of scenes, at least 15; None: the official number.
        rendered: number of rendered scenes, with three images each; a multiple of 5, at least 15.
    """
    if rendered < 15 or rendered % 5:
        raise DiffcapError(f"--rendered is {rendered}; give a multiple of 5 from 15 on (3 scenes of each change type).")
    numbers = split_numbers(scenes)
    everything = sorted(number for split in numbers.values() for number in split)
    if claim(folder, Settings(len(everything), rendered), _FILES):
        return
    write_blocks(folder / "rendered", 2 * rendered, size=SIZE)
    for where, _ in VIEWS:
        (folder / where).mkdir(exist_ok=True)
    with progress_bar("linking images", len(everything)) as advance:
        for number in everything:
            for where, name in VIEWS:
                path = f"{where}/CLEVR_{name}_{number:06d}.png"
                _link(folder / rendered_image(path, rendered), folder / path)
            advance(1)
    captions = list(_captions(everything))
    for name, column in (("change_captions.json", 0), ("no_change_captions.json", 1)):
        write_json(
            folder / name,
            {f"CLEVR_default_{number:06d}.png": texts[column] for number, texts in zip(everything, captions)},
        )
    types = {
        change: [f"{number:06d}.png" for number in everything if number // PER_TYPE == index]
        for index, change in enumerate(CHANGES)
    }
    write_json(folder / "type_mapping.json", types)
    write_json(folder / "splits.json", numbers)  # last, see `claim`


def split_numbers(scenes: int | None = None) -> dict[str, list[int]]:
    """Draw the numbers of the scenes of each split; every split has equally many of each change type, up to one.

    Args:
        scenes: number of all scenes, at least 15; None: the official numbers of scenes, splits and change types.
    """
    most = sum(_OFFICIAL.splits.values())
    if scenes is not None and not 15 <= scenes <= most:
        raise DiffcapError(f"--scenes is {scenes}; give a number from 15 to {most:,}, the official one.")
    types = [_OFFICIAL.types[change] for change in CHANGES] if scenes is None else _shares(scenes)
    test = _shares(_OFFICIAL.splits["test"] if scenes is None else max(5, scenes // 10))
    val = _shares(_OFFICIAL.splits["val"] if scenes is None else max(5, scenes // 20))
    splits: dict[str, list[int]] = {split: [] for split in SPLITS}
    for index in range(len(CHANGES)):
        rng = random.Random(f"official splits {index}")
        drawn = rng.sample(range(index * PER_TYPE, (index + 1) * PER_TYPE), types[index])
        splits["test"] += drawn[: test[index]]
        splits["val"] += drawn[test[index] : test[index] + val[index]]
        splits["train"] += drawn[test[index] + val[index] :]
    return {split: sorted(numbers) for split, numbers in splits.items()}


def _shares(total: int) -> list[int]:
    """Distribute a number over the change types."""
    return [total // len(CHANGES) + (index < total % len(CHANGES)) for index in range(len(CHANGES))]


def caption_count(pair: int) -> int:
    """Number of captions of pair 0, 1, ...: 6 or 7, so that the official number of pairs has `CAPTIONS` captions."""
    pairs = 2 * sum(_OFFICIAL.splits.values())
    return (pair + 1) * CAPTIONS // pairs - pair * CAPTIONS // pairs


def rendered_image(path: str, rendered: int) -> str:
    """The rendered image that "sc_images/CLEVR_semantic_000123.png" is a link to; it has the same change type."""
    start, number = path[: -len("000123.png")], int(path[-len("000123.png") : -len(".png")])
    index, row = divmod(number, PER_TYPE)
    return f"rendered/{start}{row % (rendered // 5) * 5 + index:06d}.png"  # `blocks`: triple k has the change k % 5


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:  # of a run that was interrupted
        pass
    except OSError:
        try:
            target.symlink_to(source.absolute())
        except OSError as error:
            raise DiffcapError(
                f"{target}: the file system allows neither hard links nor symbolic links ({error.strerror}); give a folder on "
                "another one: DATA=<folder>."
            ) from None


def _captions(numbers: list[int]) -> Iterator[tuple[list[str], list[str]]]:
    """The captions of the change pair and of the distractor pair of each scene."""
    for start in range(0, len(numbers), _CHUNK):
        chunk = numbers[start : start + _CHUNK]
        triples = sample_triples([number % PER_TYPE * 5 + number // PER_TYPE for number in chunk])
        found: list[dict[str, None]] = [{} for _ in chunk]  # ordered sets
        for seed in range(_DRAWS):
            if all(len(texts) >= caption_count(0) + 1 for texts in found):
                break
            for texts, drawn in zip(found, write_captions(triples, seed)[0]):
                texts.update(dict.fromkeys(drawn))
        for pair, number, texts in zip(count(2 * start, 2), chunk, found):
            unchanged = random.Random(f"official captions {number}").sample(NO_CHANGE, caption_count(pair + 1))
            yield list(texts)[: caption_count(pair)], unchanged
