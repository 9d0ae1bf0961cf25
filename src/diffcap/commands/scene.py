"""`diffcap caption BEFORE AFTER --out changes.geojson`: the changes of a whole scene."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError

SUFFIXES = (".geojson", ".csv", ".html")
THRESHOLD = 0.5
_LEFT_OUT = {"unchanged": "unchanged", "identical": "identical", "no_data": "without data"}  # kinds of tiles
SHIPPED = "tiles"  # the captioner without --checkpoint: that of overhead images
_OWN_CONTRAST = (
    f"the pixels do not have 8 bits; their contrast is scaled to that of the images that `{SHIPPED}` was trained on. A checkpoint of your "
    "own (--checkpoint) gets the usual stretch."
)
_OTHER_CONTRAST = (
    f"`{SHIPPED}` has not seen stretched contrast and may report tiles without change; omit --stretch, or give a checkpoint of your own "
    "(--checkpoint)."
)
_OVERVIEW_SIDE = 2048  # pixels of the longer side of the overview, from which percentiles are computed


def caption_scene(
    before: str,
    after: str | None,
    out: Sequence[str] | None,
    model: Mapping[str, Any],
    load: Callable[[], Any],
    tile: int | None,
    overlap: int | None,
    bands: str | None,
    stretch: str | None,
    threshold: float | None,
    align: bool | None,
    beam: int,
    length_penalty: float,
    batch_size: int,
) -> None:
    """Caption the tiles of a scene and write the changes; arguments as in `caption`.

    `model` has the arguments of `load_captioner`, and `load` calls it.
    """
    outputs = _check_outputs(out)
    chosen_bands = _parse_numbers(bands, "--bands", "one band or three, such as 4,3,2", (1, 3), int)
    percentiles = _parse_numbers(stretch, "--stretch", "two percentiles, such as 2,98", (2,), float)
    if percentiles and not 0 <= percentiles[0] < percentiles[1] <= 100:
        raise DiffcapError(f"--stretch is {stretch}; give two percentiles from 0 to 100, such as 2,98.")
    threshold = THRESHOLD if threshold is None else threshold
    if not 0 < threshold <= 1:
        raise DiffcapError(f"--threshold is {threshold}; give a probability above 0, at most 1.")
    if after is None:
        raise DiffcapError(
            f"{before}: the raster after the change is missing; give both: diffcap caption BEFORE AFTER --out {outputs[0]}."
        )
    from diffcap.models.generation import check_search
    from diffcap.scenes.captioning import IDENTICAL, NO_DATA, SUFFIX, PartialResults, caption_tiles
    from diffcap.scenes.raster import FULL, OVERLAP, TILE, TILES, Tiling, fit_stretch, open_scene
    from diffcap.scenes.writing import check_position, merge
    from diffcap.utils.progress import progress_bar

    check_search(beam, length_penalty, "--beam")
    with ExitStack() as stack:
        scene = stack.enter_context(open_scene(before, after, chosen_bands, bool(align)))
        size = TILE if tile is None else tile
        overlap = min(OVERLAP, size // 4) if overlap is None else overlap
        tiling = Tiling(scene.width, scene.height, size, overlap)
        check_position(scene)
        overview = scene.overview(_OVERVIEW_SIDE)
        if not (overview.before_valid & overview.after_valid).any():
            raise DiffcapError(
                f"{before} and {after} have no pixel with data at the same place; check their coordinate reference systems, transforms "
                "and nodata values."
            )
        shipped = list(model["checkpoint"] or [SHIPPED]) == [SHIPPED]
        scaling = fit_stretch(overview, percentiles, TILES if shipped and percentiles is None else FULL)
        captioner = load()
        settings = {
            "tile": size,
            "overlap": overlap,
            "bands": scene.bands,
            "stretch": None if scaling is None else [list(map(float, values)) for values in scaling],
            "align": bool(align),
            "beam": beam,
            "length_penalty": length_penalty,
            "prompt": model["prompt"],
            "checkpoint": captioner.weights_sha256(),
        }
        header = {"format": 1, "before": _identity(before), "after": _identity(after), **settings}
        partial = stack.enter_context(PartialResults(outputs[0].with_name(outputs[0].name + SUFFIX), header))
        num_done = sum(map(len, partial.batches))
        if scene.crs is None:
            echo("note: the rasters have no georeference; coordinates are pixels.", err=True)
        if num_done:
            echo(f"note: {num_done:,} of {len(tiling):,} tiles are done already.", err=True)
        if shipped and scaling is not None:
            echo(f"note: {_OWN_CONTRAST if percentiles is None else _OTHER_CONTRAST}", err=True)
        advance = stack.enter_context(progress_bar("captioning tiles", len(tiling), num_done))
        result = caption_tiles(scene, tiling, scaling, captioner, partial, beam, length_penalty, batch_size, advance)
        changed = [caption for caption in result.captions if caption.no_change < threshold]
        changes = merge(changed)
        counts = {
            "all": len(tiling),
            "changed": len(changed),
            "unchanged": len(result.captions) - len(changed),
            "identical": result.not_captioned[IDENTICAL],
            "no_data": result.not_captioned[NO_DATA],
        }
        metadata = {
            **settings,
            "before": Path(before).name,
            "after": Path(after).name,
            "threshold": threshold,
            "size": [scene.width, scene.height],
            "source_crs": scene.crs,
            "tiles": counts,
            "note": captioner.domain_note,
        }
        for path in outputs:
            _write(path, changes, scene, overview, scaling, metadata)
    partial.path.unlink()
    left_out = ", ".join(f"{counts[name]:,} {text}" for name, text in _LEFT_OUT.items())
    what = f"{len(changes):,} change{'' if len(changes) == 1 else 's'}"
    written = ", ".join(map(str, outputs))
    echo(f"{what} in {counts['changed']:,} of {counts['all']:,} tiles ({left_out}); written to {written}")


def _check_outputs(names: Sequence[str] | None) -> list[Path]:
    if not names:
        raise DiffcapError("the options for whole scenes need an output file; add, for example, --out changes.geojson.")
    for name in names:
        if (suffix := Path(name).suffix.lower()) not in SUFFIXES:
            pairs = "; .jsonl is for a folder or a table of pairs" if suffix == ".jsonl" else ""
            raise DiffcapError(
                f"--out {name}: give a name that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}{pairs}."
            )
        if Path(name).is_dir():
            raise DiffcapError(f"--out {name}: this is a folder; give the name of a file.")
    return [Path(name) for name in names]


def _parse_numbers(text: str | None, option: str, form: str, counts: tuple[int, ...], number_type: Any) -> Any:
    """Return numbers separated by commas, of which there must be one of `counts`; None if the option is not set."""
    if text is None:
        return None
    try:
        numbers = [number_type(part) for part in text.strip("[]() ").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in counts:
        raise DiffcapError(f"{option} is {text}; give {form}.")
    return numbers


def _identity(path: str) -> list[Any]:
    """Return name, size and time of a file; they change if the file is replaced."""
    status = Path(path).stat()
    return [Path(path).name, status.st_size, status.st_mtime_ns]


def _write(path: Path, changes: Any, scene: Any, overview: Any, stretch: Any, metadata: dict[str, Any]) -> None:
    from diffcap.scenes.map import write_map
    from diffcap.scenes.writing import write_csv, write_geojson

    suffix = path.suffix.lower()
    if suffix == ".geojson":
        write_geojson(path, changes, scene, metadata)
    elif suffix == ".csv":
        write_csv(path, changes, scene, metadata["note"])
    else:
        write_map(path, changes, scene, overview, stretch, metadata)
