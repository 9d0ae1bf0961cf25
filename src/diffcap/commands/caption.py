"""`diffcap caption`: sentences, their probabilities and pictures of where each word looked, for one pair or many."""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcap.commands.pairs import PicturePair, find_pairs
from diffcap.console import echo, print_json
from diffcap.errors import DiffcapError

_SHIPPED = (
    "no --checkpoint: this is the small captioner of rendered `blocks` scenes that ships with diffcap; of other pictures "
    "its sentences tell little."
)
_LONGEST = 60  # letters of an id in a file's name, which may take 4 bytes each of a file system's 255


def run(
    before: str,
    after: str | None,
    checkpoint: Sequence[str] | None,
    beam: int,
    length_penalty: float,
    heatmap: str | None,
    as_json: bool,
    batch_size: int,
    device: str,
    backbone_weights: str | None,
) -> None:
    """Caption, print, draw; see `cli.caption` for the arguments.

    Raises:
        DiffcapError: nothing could be captioned, or some of many pairs could not, or not be drawn, which stderr names.
    """
    if batch_size < 1:
        raise DiffcapError(f"--batch_size is {batch_size}; it must be at least 1.")
    pairs, notes = find_pairs(before, after)
    for note in notes:
        echo(f"note: {note}", err=True)
    alone = after is not None and not Path(before).is_dir()
    target = _target(heatmap, alone)
    # Threads that wait in a loop for the next small operation use more CPU time than the operations. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from diffcap.captioner import load_captioner
    from diffcap.models.generation import check_search

    check_search(beam, length_penalty, "--beam")
    captioner = load_captioner(checkpoint, device, backbone_weights)
    if checkpoint is None:
        echo(f"note: {_SHIPPED}", err=True)
    found = captioner.batch(
        ((pair.before, pair.after) for pair in pairs), beam, length_penalty, batch_size, "raise" if alone else "return"
    )
    failed, undrawn, files = 0, 0, _file_names([pair.id for pair in pairs])
    for pair, caption in zip(pairs, _watched(found, len(pairs))):
        _tell(pair, caption, as_json, alone)
        if isinstance(caption, DiffcapError):
            failed += 1
        elif target is not None and alone:
            _draw(captioner, pair, caption, target)
        elif target is not None:
            undrawn += not _is_drawn(captioner, pair, caption, target / files[pair.id])
    if failed or undrawn:
        counts = {"captioned": failed, "drawn": undrawn}
        ends = [f"{count} of {len(pairs)} pairs could not be {what}" for what, count in counts.items() if count]
        rest = "" if failed + undrawn == len(pairs) else "; the others are done"
        raise DiffcapError(f"{' and '.join(ends)}, see above{rest}.")


def _target(heatmap: str | None, alone: bool) -> Path | None:
    if heatmap is None:
        return None
    path = Path(heatmap)
    if alone and path.suffix.lower() != ".png":
        raise DiffcapError(f"--heatmap {heatmap}: the picture is a PNG; give a name that ends in .png.")
    if not alone and path.is_file():
        raise DiffcapError(f"--heatmap {heatmap}: a file; for many pairs give a folder, which gets a picture a pair.")
    return path


def _names(pair: PicturePair) -> dict[str, str]:
    return {"id": pair.id, "before": str(pair.before), "after": str(pair.after)}


def _file_names(ids: Sequence[str]) -> dict[str, str]:
    """A file for each id, no two alike where small and large letters are one, too."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for id in ids:
        plain = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in id).lstrip(".")
        plain = plain[:_LONGEST] or "pair"
        tries = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(2)))
        names[id] = next(f"{name}.png" for name in tries if name.casefold() not in taken)
        taken.add(names[id].removesuffix(".png").casefold())
    return names


def _tell(pair: PicturePair, caption: Any, as_json: bool, alone: bool) -> None:
    """Print what was said of a pair, or why nothing was."""
    if isinstance(caption, DiffcapError):
        echo(f"error: {pair.id}: {caption}", err=True)
        if as_json:
            print_json({**_names(pair), "error": str(caption)}, None)
        return
    for note in caption.notes:
        echo(f"note: {note}.", err=True)
    if as_json:
        print_json(caption.as_dict() if alone else {**_names(pair), **caption.as_dict()}, 2 if alone else None)
    elif alone:
        _print(caption)
    else:
        echo(f"{pair.id}\t{caption.text}")


def _print(caption: Any) -> None:
    from diffcap.report.heatmap import percent

    echo(caption.text)
    echo(f"log-probability {caption.log_probability:.3f} ({percent(caption.log_probability)})")
    if caption.nothing_changed is not None:
        echo(f"probability that nothing changed {caption.nothing_changed:.3f}")
    for other in caption.alternatives:
        echo(f"or ({other.log_probability:.3f}): {other.text}")


def _draw(captioner: Any, pair: PicturePair, caption: Any, path: Path) -> None:
    from diffcap.pictures import read_picture
    from diffcap.report.drawing import write_png
    from diffcap.report.heatmap import draw_caption

    look = captioner.look(pair.before, pair.after, caption)
    write_png(path, draw_caption(read_picture(pair.before).image, read_picture(pair.after).image, caption, look))


def _is_drawn(captioner: Any, pair: PicturePair, caption: Any, path: Path) -> bool:
    """Draw one of many pairs; where that cannot be, a note, and the captions go on."""
    try:
        _draw(captioner, pair, caption, path)
    except DiffcapError as error:
        echo(f"note: {pair.id}: not drawn: {error}", err=True)
        return False
    return True


def _watched(found: Iterator[Any], count: int) -> Iterator[Any]:
    """The captions, with a progress bar where there are many and a terminal."""
    from diffcap.progress import count_bar

    with count_bar("captioning", count, hidden=count == 1) as advance:
        for one in found:
            yield one
            advance(1)
