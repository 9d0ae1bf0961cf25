"""`diffcap caption`: captions, their probabilities and heat maps of each word's attention, for one pair or many."""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffcap.checkpoints.hub_access import check_connection
from diffcap.commands.pairs import ImagePair, find_pairs
from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError

_MAX_NAME = 60  # characters of an id in a file name; they take up to 4 bytes each, and file systems allow 255


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
    base: str | None = None,
    prompt: str | None = None,
) -> None:
    """Caption, print and draw; see `cli.caption` for the arguments.

    Raises:
        DiffcapError: nothing could be captioned, or some of many pairs could not be captioned or drawn, which stderr names.
    """
    if batch_size < 1:
        raise DiffcapError(f"--batch_size is {batch_size}; it must be at least 1.")
    pairs, notes = find_pairs(before, after)
    for note in notes:
        echo(f"note: {note}", err=True)
    single_pair = after is not None and not Path(before).is_dir()
    heatmap_path = _validate_heatmap_path(heatmap, single_pair)
    _check_images(pairs)
    check_connection([*(checkpoint or []), base], shipped=True)
    # By default a thread that waits for the next operation spins, which uses more CPU time than the operations of a small
    # captioner. OpenMP reads the setting when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from diffcap.models.generation import check_search
    from diffcap.pair_captioner import load_captioner

    check_search(beam, length_penalty, "--beam")
    captioner = load_captioner(checkpoint, device, backbone_weights, base, prompt)
    if checkpoint is None:
        echo("note: no --checkpoint: the captioner `blocks`, which ships with diffcap, is used.", err=True)
    if captioner.domain_note is not None:
        echo(f"note: {captioner.domain_note}", err=True)
    captions = captioner.batch(
        ((pair.before, pair.after) for pair in pairs),
        beam,
        length_penalty,
        batch_size,
        "raise" if single_pair else "return",
    )
    failed, undrawn, file_names = 0, 0, _file_names([pair.id for pair in pairs])
    for pair, caption in zip(pairs, _with_progress(captions, len(pairs))):
        _print_result(pair, caption, as_json, single_pair)
        if isinstance(caption, DiffcapError):
            failed += 1
        elif heatmap_path is not None and single_pair:
            _draw(captioner, pair, caption, heatmap_path)
        elif heatmap_path is not None:
            undrawn += not _try_draw(captioner, pair, caption, heatmap_path / file_names[pair.id])
    if failed or undrawn:
        counts = {"captioned": failed, "drawn": undrawn}
        failures = [f"{count} of {len(pairs)} pairs could not be {what}" for what, count in counts.items() if count]
        rest = "" if failed + undrawn == len(pairs) else "; the others are done"
        raise DiffcapError(f"{' and '.join(failures)}, see above{rest}.")


def _validate_heatmap_path(heatmap: str | None, single_pair: bool) -> Path | None:
    if heatmap is None:
        return None
    path = Path(heatmap)
    if single_pair and path.suffix.lower() != ".png":
        raise DiffcapError(f"--heatmap {heatmap}: the heat map is a PNG file; give a name that ends in .png.")
    if not single_pair and path.is_file():
        raise DiffcapError(
            f"--heatmap {heatmap}: is a file; for many pairs give a folder, which gets a PNG file per pair."
        )
    return path


def _check_images(pairs: Sequence[ImagePair]) -> None:
    """Find missing images before a model is loaded, which may take a download.

    Raises:
        DiffcapError: there is no pair of which both images exist.
    """
    from diffcap.utils.image_io import read_image

    if any(os.path.isfile(pair.before) and os.path.isfile(pair.after) for pair in pairs):  # noqa: PTH113 - takes any name
        return
    for path in pairs[0][1:]:
        read_image(path)  # its error says what is wrong


def _pair_paths(pair: ImagePair) -> dict[str, str]:
    return {"id": pair.id, "before": str(pair.before), "after": str(pair.after)}


def _file_names(ids: Sequence[str]) -> dict[str, str]:
    """A file name for each id, unique even on case-insensitive file systems."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for id in ids:
        plain = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in id).lstrip(".")
        plain = plain[:_MAX_NAME] or "pair"
        candidates = itertools.chain([plain], (f"{plain}-{number}" for number in itertools.count(2)))
        name = next(name for name in candidates if name.casefold() not in taken)
        names[id] = f"{name}.png"
        taken.add(name.casefold())
    return names


def _print_result(pair: ImagePair, caption: Any, as_json: bool, single_pair: bool) -> None:
    """Print the caption of a pair, or the error in its place."""
    if isinstance(caption, DiffcapError):
        echo(f"error: {pair.id}: {caption}", err=True)
        if as_json:
            print_json({**_pair_paths(pair), "error": str(caption)}, None)
        return
    for note in caption.notes:
        echo(f"note: {note}.", err=True)
    if as_json and single_pair:
        print_json(caption.as_dict(), 2)
    elif as_json:
        print_json({**_pair_paths(pair), **caption.as_dict()}, None)
    elif single_pair:
        _print_details(caption)
    else:
        echo(f"{pair.id}\t{caption.text}")


def _print_details(caption: Any) -> None:
    from diffcap.report.heatmap import confidence_lines

    echo(caption.text)
    for line in confidence_lines(caption):
        echo(line)
    for alternative in caption.alternatives:
        echo(f"or (log-probability {alternative.log_probability:.3f}): {alternative.text}")


def _draw(captioner: Any, pair: ImagePair, caption: Any, path: Path) -> None:
    from diffcap.report.drawing import write_png
    from diffcap.report.heatmap import draw_caption
    from diffcap.utils.image_io import read_image

    attention = captioner.attention(pair.before, pair.after, caption)
    write_png(path, draw_caption(read_image(pair.before).image, read_image(pair.after).image, caption, attention))


def _try_draw(captioner: Any, pair: ImagePair, caption: Any, path: Path) -> bool:
    """Draw one of many pairs. On failure, print a note and return False."""
    try:
        _draw(captioner, pair, caption, path)
    except DiffcapError as error:
        echo(f"note: {pair.id}: not drawn: {error}", err=True)
        return False
    return True


def _with_progress(captions: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield the captions; on a terminal, show a progress bar for more than one."""
    from diffcap.utils.progress import progress_bar

    with progress_bar("captioning", count, hidden=count == 1) as advance:
        for caption in captions:
            yield caption
            advance(1)
