"""`diffcap caption`: captions, their probabilities and heat maps of each word's attention, for one pair or many."""

import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from diffcap.checkpoints.hub_access import check_connection
from diffcap.commands.caption_file import SUFFIXES, CaptionFile, exclusive_lock
from diffcap.commands.pairs import ImagePair, find_pairs, names_many, table_paths
from diffcap.commands.scene import SHIPPED, caption_scene
from diffcap.utils.console import echo, print_json
from diffcap.utils.errors import DiffcapError

if TYPE_CHECKING:
    from diffcap.pair_captioner import PairCaptioner

_MAX_NAME = 60  # characters of an id in a file name; they take up to 4 bytes each, and file systems allow 255


def caption(
    before: str,
    after: str | None = None,
    checkpoint: list[str] | None = None,
    beam: int = 1,
    length_penalty: float = 0.0,
    heatmap: str | None = None,
    json: bool = False,
    batch_size: int = 16,
    device: str = "auto",
    backbone_weights: str | None = None,
    base: str | None = None,
    prompt: str | None = None,
    out: list[str] | None = None,
    tile: int | None = None,
    overlap: int | None = None,
    bands: str | None = None,
    stretch: str | None = None,
    threshold: float | None = None,
    align: bool = False,
) -> None:
    """Describe the change between two images (diffcap caption BEFORE AFTER), of many pairs, or in a whole scene (--out).

    Many pairs are a folder, two folders or a table of pairs. A whole scene is two rasters, such as GeoTIFF files; it needs diffcap[geo].

    Args:
        before: The image before the change, in any format that Pillow reads; or a folder with pairs.csv, with the folders
            before and after (or A and B), or with images X_before and X_after; or a .csv, .tsv or .jsonl file with the columns
            before, after and, optionally, id.
        after: The image after the change; also accepted as the second argument. Two folders: images with the same name are pairs.
        checkpoint: best.ckpt of a captioner, a folder of `diffcap export` or `diffcap import`, or user/name on the Hugging
            Face Hub; also a vision-language model, such as HuggingFaceTB/SmolVLM-500M-Instruct, or its folder. By default the
            small captioner of rendered blocks scenes that ships with diffcap. If it is given several times, the captioners are
            an ensemble and need the same vocabulary.
        beam: Beam size, 1 to 100; 1 is greedy decoding. With more, the other hypotheses and the greedy caption are listed.
        length_penalty: Exponent of the caption's length by which the log-probability of a hypothesis is divided.
        heatmap: PNG file to write with both images and the attention of each word; a folder for many pairs.
        json: Print JSON; for many pairs one line per pair.
        batch_size: Number of pairs that are captioned at once.
        device: cpu, cuda or auto.
        backbone_weights: File of the backbone's weights, if they cannot be downloaded.
        base: Folder of the base model of a checkpoint of METHOD=vlm, if it is not where the checkpoint says.
        prompt: Question to a vision-language model that was not fine-tuned.
        out: For many pairs, a .jsonl or .csv file that gets a row for each pair. For a whole scene (two rasters), a file for the
            changes: .geojson, .csv or .html (a map); may be given several times; the rasters are read and captioned in tiles. The
            same command continues an interrupted one where it stopped.
        tile: Whole scenes: side of a tile in pixels; 256 by default.
        overlap: Whole scenes: pixels that neighbouring tiles have in common; 64 by default, at most a quarter of a tile.
        bands: Whole scenes: the bands for red, green and blue, such as 4,3,2, or one band; 1,2,3 by default.
        stretch: Whole scenes: percentiles of both dates that become black and white; 2,98 by default, but not for 8-bit pixels. Without
            it, the captioner that ships gets the contrast of its training images.
        threshold: Whole scenes: tiles whose probability of no change is at least this are left out; 0.5 by default.
        align: Whole scenes: warp the second raster to the grid of the first one while it is read.
    """
    for path in filter(None, (before, after)):
        if path.endswith(".ckpt") or (Path(path) / "config.json").is_file():
            raise DiffcapError(
                f"{path}: a checkpoint, not images; give each one as --checkpoint {path}, and the images first."
            )
    # By default, idle threads keep a core busy, which costs more CPU time than the operations of a small captioner. OpenMP reads the
    # setting when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if batch_size < 1:
        raise DiffcapError(f"--batch_size is {batch_size}; it must be at least 1.")
    model: dict[str, Any] = {
        "checkpoint": checkpoint,
        "device": device,
        "backbone_weights": backbone_weights,
        "base": base,
        "prompt": prompt,
    }
    decoding: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "batch_size": batch_size}
    scene: dict[str, Any] = {
        "tile": tile,
        "overlap": overlap,
        "bands": bands,
        "stretch": stretch,
        "threshold": threshold,
        "align": align or None,
    }
    set_options = [f"--{name}" for name, value in {"out": out, **scene}.items() if value is not None]
    if names_many(before, after):
        if unused := [name for name in set_options if name != "--out"]:
            raise DiffcapError(f"{unused[0]} is for a whole scene, two rasters; remove it for the pairs of {before}.")
    elif set_options:
        if unused := [name for name, value in (("--heatmap", heatmap), ("--json", json)) if value]:
            raise DiffcapError(f"{unused[0]} is for pairs of images; remove it for a whole scene ({set_options[0]}).")
        caption_scene(before, after, out, model, partial(load_model, SHIPPED, model), **scene, **decoding)
        return
    caption_pairs(before, after, out, heatmap, json, model, **decoding)


def caption_pairs(
    before: str,
    after: str | None,
    out: Sequence[str] | None,
    heatmap: str | None,
    as_json: bool,
    model: Mapping[str, Any],
    beam: int,
    length_penalty: float,
    batch_size: int,
) -> None:
    """Caption pairs, print or write the captions, draw heat maps; arguments as in `caption`, `model` has those of `load_captioner`."""
    pairs, notes = find_pairs(before, after)
    for note in notes:
        echo(f"note: {note}", err=True)
    single_pair = after is not None and not Path(before).is_dir()
    heatmap_path = _validate_heatmap_path(heatmap, single_pair)
    out_path = _validate_out(out, as_json)
    if out_path and after is None and os.path.realpath(out_path) in map(os.path.realpath, table_paths(Path(before))):
        raise DiffcapError(f"--out {out_path}: the pairs of {before} are read from this file; give another name.")
    _check_images(pairs)
    check_connection([*(model["checkpoint"] or []), model["base"]], shipped=True)
    from diffcap.models.generation import check_search
    from diffcap.utils.progress import progress_bar

    check_search(beam, length_penalty, "--beam")
    captioner = load_model("blocks", model)
    failed, undrawn, file_names = 0, 0, _file_names([pair.id for pair in pairs])
    with ExitStack() as stack:
        file, pending = None, pairs
        if out_path:
            weights, prompt = captioner.weights_sha256(), model["prompt"]
            settings = {"checkpoint": weights, "beam": beam, "length_penalty": length_penalty, "prompt": prompt}
            stack.enter_context(exclusive_lock(out_path))
            without_map = {
                id for id, name in file_names.items() if heatmap_path and not (heatmap_path / name).is_file()
            }
            file = stack.enter_context(CaptionFile(out_path, pairs, settings, batch_size, without_map))
            pending = file.pending
        images = ((pair.before, pair.after) for pair in pending)
        on_error: Literal["raise", "return"] = "raise" if single_pair else "return"
        captions = captioner.batch(images, beam, length_penalty, batch_size, on_error)
        earlier = len(pairs) - len(pending)
        advance = stack.enter_context(progress_bar("captioning", len(pairs), earlier, hidden=len(pairs) == 1))
        try:
            for pair, caption in zip(pending, captions):
                is_error = isinstance(caption, DiffcapError)
                failed += is_error
                if heatmap_path and not single_pair and not is_error:
                    try:  # before the row is written, because a pair with a row is not repeated
                        _draw(captioner, pair, caption, heatmap_path / file_names[pair.id])
                    except DiffcapError as error:
                        echo(f"note: {pair.id}: not drawn: {error}", err=True)
                        undrawn += 1
                _print_result(pair, caption, as_json, single_pair, file)
                if heatmap_path and single_pair:
                    _draw(captioner, pair, caption, heatmap_path)
                advance(1)
        except KeyboardInterrupt:
            if single_pair:
                raise
            kept = "the captions are not saved; --out captions.jsonl saves them, and the same command then goes on"
            if file:
                kept = f"what is done is in {file.path}, and the same command goes on there"
            raise DiffcapError(f"interrupted; {kept}.") from None
    if file:
        echo(
            f"{len(pairs) - failed:,} of {len(pairs):,} pairs are captioned{f', {earlier:,} of them earlier' if earlier else ''}; "
            f"written to {file.path}"
        )
    if failed or undrawn:
        counts = {"captioned": failed, "drawn": undrawn}
        failures = [f"{count} of {len(pairs)} pairs could not be {what}" for what, count in counts.items() if count]
        rest = "" if failed + undrawn == len(pairs) else "; the others are done"
        raise DiffcapError(f"{' and '.join(failures)}, see above{rest}.")


def load_model(shipped: str, model: Mapping[str, Any]) -> "PairCaptioner":
    """Load the captioner, by default the `shipped` one, and print notes about it; `model` has the arguments of `load_captioner`."""
    from diffcap.pair_captioner import SHIPPED_CAPTIONERS, load_captioner

    options = {name: value for name, value in model.items() if name != "checkpoint"}
    captioner = load_captioner(model["checkpoint"] or SHIPPED_CAPTIONERS[shipped], **options)
    if model["checkpoint"] is None:
        echo(f"note: no --checkpoint: the captioner `{shipped}`, which ships with diffcap, is used.", err=True)
    if captioner.domain_note is not None:
        echo(f"note: {captioner.domain_note}", err=True)
    return captioner


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


def _validate_out(out: Sequence[str] | None, as_json: bool) -> Path | None:
    if not out:
        return None
    path = Path(out[0])
    if len(out) > 1 or path.suffix.lower() not in SUFFIXES:
        raise DiffcapError(
            f"--out {' --out '.join(out)}: for many pairs give one file that ends in {' or '.join(SUFFIXES)}; the other formats are for a "
            "whole scene, two rasters."
        )
    if as_json:
        raise DiffcapError(f"--json has no effect with --out {path}; remove it. A .jsonl file has the same lines.")
    return path


def _check_images(pairs: Sequence[ImagePair]) -> None:
    """Raise an error if no pair has both images, before a model is loaded, which may need a download."""
    from diffcap.utils.image_io import read_image

    if any(os.path.isfile(pair.before) and os.path.isfile(pair.after) for pair in pairs):  # noqa: PTH113 - takes any name
        return
    for path in pairs[0][1:]:
        read_image(path)  # raises the error


def _file_names(ids: Sequence[str]) -> dict[str, str]:
    """Return a file name for each id, unique even on case-insensitive file systems."""
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


def _print_result(pair: ImagePair, caption: Any, as_json: bool, single_pair: bool, file: CaptionFile | None) -> None:
    """Write the caption of a pair, or its error, to the file; without a file, print it."""
    from diffcap.report.heatmaps import confidence_lines

    failed = isinstance(caption, DiffcapError)
    if failed:
        echo(f"error: {pair.id}: {caption}", err=True)
    for note in () if failed else caption.notes:
        echo(f"note: {note}.", err=True)
    if file is not None:
        file.append(pair, {"error": str(caption)} if failed else caption.as_dict())
    elif failed and as_json:
        print_json({**pair.as_dict(), "error": str(caption)}, None)
    elif failed:
        return
    elif as_json and single_pair:
        print_json(caption.as_dict(), 2)
    elif as_json:
        print_json({**pair.as_dict(), **caption.as_dict()}, None)
    elif single_pair:
        echo(caption.text, *confidence_lines(caption))
        for alternative in caption.alternatives:
            echo(f"or (log-probability {alternative.log_probability:.3f}): {alternative.text}")
    else:
        echo(f"{pair.id}\t{caption.text}")


def _draw(captioner: Any, pair: ImagePair, caption: Any, path: Path) -> None:
    from diffcap.report.drawing import write_png
    from diffcap.report.heatmaps import draw_caption
    from diffcap.utils.image_io import read_pair

    attention = captioner.attention(pair.before, pair.after, caption)
    images = read_pair(pair.before, pair.after)
    write_png(path, draw_caption(images.before.image, images.after.image, caption, attention))
