"""`diffcap caption BEFORE AFTER --out changes.geojson`: the changes of a whole scene, two rasters that are captioned tile by tile."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError

SCENE_SUFFIXES = (".geojson", ".csv", ".html")
DEFAULT_MIN_CHANGED = 0.5
DEFAULT_CAPTIONER = "tiles"  # ships with diffcap, for overhead images
_SCALED_CONTRAST_NOTE = (
    f"the pixels do not have 8 bits; their contrast is scaled to that of the images that `{DEFAULT_CAPTIONER}` was trained on. "
    "With a checkpoint of your own (--checkpoint), the percentiles 2 and 98 become black and white."
)
_STRETCHED_CONTRAST_NOTE = (
    f"`{DEFAULT_CAPTIONER}` has not seen stretched contrast and may report changes in unchanged tiles; omit --stretch, or give a "
    "checkpoint of your own (--checkpoint)."
)
_OVERVIEW_SIDE = 2048  # longer side in pixels of the reduced scene, from which --stretch takes its percentiles


def caption_scene(
    before: str,
    after: str | None,
    out: Sequence[str] | None,
    model_options: Mapping[str, Any],
    tile: int | None,
    overlap: int | None,
    bands: str | None,
    stretch: str | None,
    min_changed: float,
    align: bool | None,
    beam: int,
    length_penalty: float,
    batch_size: int,
) -> None:
    """Caption the tiles of a scene and write the changes, with the arguments of `caption`.

    `model_options` has the values of --checkpoint, --device, --backbone_weights, --base and --prompt.
    """
    if not out:
        raise DiffcapError("the options for whole scenes need an output file; add, for example, --out changes.geojson.")
    for name in out:
        if (suffix := Path(name).suffix.lower()) not in SCENE_SUFFIXES:
            hint = "; .jsonl is for a folder or a table of pairs" if suffix == ".jsonl" else ""
            raise DiffcapError(f"--out {name}: give a name that ends in .geojson, .csv or .html{hint}.")
        if Path(name).is_dir():
            raise DiffcapError(f"--out {name}: this is a folder; give the name of a file.")
    out_files = [Path(name) for name in out]
    chosen_bands = _parse_numbers(bands, "--bands", "one band or three, such as 4,3,2", (1, 3), int)
    percentiles = _parse_numbers(stretch, "--stretch", "two percentiles, such as 2,98", (2,), float)
    if percentiles and not 0 <= percentiles[0] < percentiles[1] <= 100:
        raise DiffcapError(f"--stretch is {stretch}; give two percentiles from 0 to 100, such as 2,98.")
    if after is None:
        raise DiffcapError(
            f"{before}: the raster after the change is missing; give both: diffcap caption BEFORE AFTER --out {out_files[0]}."
        )
    from diffcap.commands.model import load_model
    from diffcap.scenes import raster
    from diffcap.scenes.captioning import PARTIAL_SUFFIX, PartialResults, caption_tiles
    from diffcap.scenes.map import write_map
    from diffcap.scenes.writing import check_georeference, merge_tiles, write_csv, write_geojson
    from diffcap.utils.progress import progress_bar

    with ExitStack() as stack:
        scene = stack.enter_context(raster.open_scene(before, after, chosen_bands, bool(align)))
        tile_size = raster.TILE_SIZE if tile is None else tile
        overlap = min(raster.TILE_OVERLAP, tile_size // 4) if overlap is None else overlap
        tiling = raster.Tiling(scene.width, scene.height, tile_size, overlap)
        check_georeference(scene)
        overview = scene.overview(_OVERVIEW_SIDE)
        if not (overview.before_valid & overview.after_valid).any():
            raise DiffcapError(
                f"{before} and {after} have no pixel with data at the same place; check their coordinate reference systems, transforms "
                "and nodata values."
            )
        is_default = list(model_options["checkpoint"] or [DEFAULT_CAPTIONER]) == [DEFAULT_CAPTIONER]
        # The percentiles become the dark and bright colors of the images that `tiles` was trained on, or black and white.
        color_range = raster.TILES_RANGE if is_default and percentiles is None else raster.FULL_RANGE
        band_range = raster.fit_stretch(overview, percentiles, color_range)  # None if the pixels keep their 8 bits
        captioner = load_model(DEFAULT_CAPTIONER, model_options, beam, length_penalty)
        settings = {
            "tile": tile_size,
            "overlap": overlap,
            "bands": scene.bands,
            "stretch": None if band_range is None else [list(map(float, values)) for values in band_range],
            "align": bool(align),
            "beam": beam,
            "length_penalty": length_penalty,
            "prompt": model_options["prompt"],
            "checkpoint": captioner.weights_sha256(),
        }
        header = {"format": 1, "before": _file_identity(before), "after": _file_identity(after), **settings}
        partial_file = out_files[0].with_name(out_files[0].name + PARTIAL_SUFFIX)  # kept if the command is interrupted
        partial = stack.enter_context(PartialResults(partial_file, header))
        num_done = len(partial.results)  # of an interrupted command
        if scene.crs is None:
            echo("note: the rasters have no georeference; coordinates are pixels.", err=True)
        if num_done:
            echo(f"note: {num_done:,} of {len(tiling):,} tiles are done already.", err=True)
        if is_default and band_range is not None:
            echo(f"note: {_SCALED_CONTRAST_NOTE if percentiles is None else _STRETCHED_CONTRAST_NOTE}", err=True)
        advance = stack.enter_context(progress_bar("captioning tiles", len(tiling), num_done))
        options = beam, length_penalty, batch_size, advance
        captions, not_captioned = caption_tiles(scene, tiling, band_range, captioner, partial, *options)
        changed = [caption for caption in captions if round(1 - caption.no_change, 4) >= min_changed]
        changes = merge_tiles(changed)
        num_unchanged = len(captions) - len(changed)
        counts = {"all": len(tiling), "changed": len(changed), "unchanged": num_unchanged, **not_captioned}
        metadata = {
            **settings,
            "before": Path(before).name,
            "after": Path(after).name,
            "min_changed": min_changed,
            "size": [scene.width, scene.height],
            "source_crs": scene.crs,
            "tiles": counts,
            "note": captioner.domain_note,  # warning about images unlike those of the training
        }
        for path in out_files:
            if path.suffix.lower() == ".geojson":
                write_geojson(path, changes, scene, metadata)
            elif path.suffix.lower() == ".csv":
                write_csv(path, changes, scene, metadata["note"])
            else:
                write_map(path, changes, scene, overview, band_range, metadata)
    if not (num_failed := len(tiling) - len(partial.results)):
        partial_file.unlink()
    if captions and not changes:
        num_tiles = f"{len(captions):,} of {len(tiling):,} tiles"
        echo(f"note: {num_tiles} differ, and no caption is a change with --min_changed {min_changed}.", err=True)
    echo(
        f"{len(changes):,} change{'' if len(changes) == 1 else 's'} in {len(changed):,} of {len(tiling):,} tiles "
        f"({counts['unchanged']:,} unchanged, {counts['identical']:,} identical, {counts['no_data']:,} without data); "
        f"written to {', '.join(map(str, out_files))}"
    )
    if num_failed:
        raise DiffcapError(f"{num_failed:,} of {len(tiling):,} tiles failed, see above; the same command repeats them.")


def _parse_numbers(text: str | None, option: str, form: str, counts: tuple[int, ...], number_type: Any) -> Any:
    """Return the numbers of an option such as "4,3,2", or None if it is not set. `counts` has the allowed lengths of the list."""
    if text is None:
        return None
    try:
        numbers = [number_type(part) for part in text.strip("[]() ").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in counts:
        raise DiffcapError(f"{option} is {text}; give {form}.")
    return numbers


def _file_identity(path: str) -> list[Any]:
    """Return name, size and modification time of a file. They differ if the file has been replaced."""
    status = Path(path).stat()
    return [Path(path).name, status.st_size, status.st_mtime_ns]
