"""`diffcap caption BEFORE AFTER --out changes.geojson`: the changes of a whole scene."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffcap.scenes.tiling import OVERLAP, TILE
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
_OVERVIEW = 2048  # pixels of the longer side, of which percentiles are computed


@dataclass(frozen=True)
class SceneOptions:
    """The options of `diffcap caption` for whole scenes; None is a default. See `commands.caption.caption`."""

    out: Sequence[str] | None = None
    tile: int | None = None
    overlap: int | None = None
    bands: str | None = None
    stretch: str | None = None
    threshold: float | None = None
    align: bool = False

    @property
    def given(self) -> list[str]:
        """Names of the options that have a value."""
        return [f"--{name}" for name, value in vars(self).items() if value is not None and value is not False]


def run(
    before: str,
    after: str | None,
    options: SceneOptions,
    checkpoint: Sequence[str] | None,
    beam: int,
    length_penalty: float,
    batch_size: int,
    device: str,
    backbone_weights: str | None,
    base: str | None,
    prompt: str | None,
) -> None:
    """Caption the tiles of a scene and write the changes.

    Raises:
        DiffcapError: an option or a raster cannot be used.
    """
    outputs = _outputs(options.out)
    bands, percentiles, threshold = _checked(options, batch_size)
    if after is None:
        raise DiffcapError(
            f"{before}: the raster after the change is missing; give both: diffcap caption BEFORE AFTER --out {outputs[0]}."
        )
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # see `commands.caption.caption_pairs`
    from diffcap.models.generation import check_search
    from diffcap.scenes.raster import FULL, TILES, fit_stretch, open_scene
    from diffcap.scenes.tiling import Tiling
    from diffcap.scenes.writing import check_position, merge

    check_search(beam, length_penalty, "--beam")
    with ExitStack() as stack:
        scene = stack.enter_context(open_scene(before, after, bands, options.align))
        size = TILE if options.tile is None else options.tile
        overlap = min(OVERLAP, size // 4) if options.overlap is None else options.overlap
        tiling = Tiling(scene.width, scene.height, size, overlap)
        check_position(scene)
        overview = scene.overview(_OVERVIEW)
        if not (overview.before_valid & overview.after_valid).any():
            raise DiffcapError(
                f"{before} and {after} have no pixel with data at the same place; check their coordinate reference systems, transforms "
                "and nodata values."
            )
        shipped = list(checkpoint or [SHIPPED]) == [SHIPPED]
        stretch = fit_stretch(overview, percentiles, TILES if shipped and percentiles is None else FULL)

        # torch is imported after all options have been checked.
        from diffcap.pair_captioner import load_captioner
        from diffcap.scenes.captioning import caption_tiles
        from diffcap.scenes.partial import SUFFIX, PartialResults
        from diffcap.utils.progress import progress_bar

        captioner = load_captioner(checkpoint or SHIPPED, device, backbone_weights, base, prompt)
        settings = {
            "tile": size,
            "overlap": overlap,
            "bands": scene.bands,
            "stretch": None if stretch is None else [list(map(float, values)) for values in stretch],
            "align": options.align,
            "beam": beam,
            "length_penalty": length_penalty,
            "prompt": prompt,
            "checkpoint": captioner.weights_sha256(),
        }
        header = {"format": 1, "before": _identity(before), "after": _identity(after), **settings}
        partial = stack.enter_context(PartialResults(outputs[0].with_name(outputs[0].name + SUFFIX), header))
        done = sum(map(len, partial.batches))
        _print_notes(checkpoint, captioner, scene, done, len(tiling))
        if shipped and stretch is not None:
            echo(f"note: {_OWN_CONTRAST if percentiles is None else _OTHER_CONTRAST}", err=True)
        advance = stack.enter_context(progress_bar("captioning tiles", len(tiling), done))
        found = caption_tiles(scene, tiling, stretch, captioner, partial, beam, length_penalty, batch_size, advance)
        changed = [each for each in found.captions if each.no_change < threshold]
        changes = merge(changed)
        counts = _counts(len(tiling), len(changed), found)
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
            _write(path, changes, scene, overview, stretch, metadata)
    partial.path.unlink()
    left_out = ", ".join(f"{counts[name]:,} {text}" for name, text in _LEFT_OUT.items())
    what = f"{len(changes):,} change{'' if len(changes) == 1 else 's'}"
    written = ", ".join(map(str, outputs))
    echo(f"{what} in {counts['changed']:,} of {counts['all']:,} tiles ({left_out}); written to {written}")


def _checked(options: SceneOptions, batch_size: int) -> tuple[list[int] | None, tuple[float, float] | None, float]:
    """The bands, percentiles and threshold of the options.

    Raises:
        DiffcapError: one of them is out of range.
    """
    if batch_size < 1:
        raise DiffcapError(f"--batch_size is {batch_size}; it must be at least 1.")
    bands = _numbers(options.bands, "--bands", "one band or three, such as 4,3,2", (1, 3), int)
    percentiles = _numbers(options.stretch, "--stretch", "two percentiles, such as 2,98", (2,), float)
    if percentiles and not 0 <= percentiles[0] < percentiles[1] <= 100:
        raise DiffcapError(f"--stretch is {options.stretch}; give two percentiles from 0 to 100, such as 2,98.")
    threshold = THRESHOLD if options.threshold is None else options.threshold
    if not 0 < threshold <= 1:
        raise DiffcapError(f"--threshold is {threshold}; give a probability above 0, at most 1.")
    return bands, tuple(percentiles) if percentiles else None, threshold


def _print_notes(checkpoint: Sequence[str] | None, captioner: Any, scene: Any, done: int, tiles: int) -> None:
    if checkpoint is None:
        echo(f"note: no --checkpoint: the captioner `{SHIPPED}`, which ships with diffcap, is used.", err=True)
    if captioner.domain_note is not None:
        echo(f"note: {captioner.domain_note}", err=True)
    if scene.crs is None:
        echo("note: the rasters have no georeference; coordinates are pixels.", err=True)
    if done:
        echo(f"note: {done:,} of {tiles:,} tiles are done already.", err=True)


def _counts(tiles: int, changed: int, found: Any) -> dict[str, int]:
    """Numbers of tiles by what became of them."""
    from diffcap.scenes.captioning import IDENTICAL, NO_DATA

    return {
        "all": tiles,
        "changed": changed,
        "unchanged": len(found.captions) - changed,
        "identical": found.not_captioned[IDENTICAL],
        "no_data": found.not_captioned[NO_DATA],
    }


def _outputs(names: Sequence[str] | None) -> list[Path]:
    """The output files.

    Raises:
        DiffcapError: there is none, or one has an unknown suffix.
    """
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


def _numbers(text: str | None, option: str, form: str, counts: tuple[int, ...], kind: Any) -> Any:
    """Numbers separated by commas, or None."""
    if text is None:
        return None
    try:
        numbers = [kind(part) for part in text.strip("[]() ").split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in counts:
        raise DiffcapError(f"{option} is {text}; give {form}.")
    return numbers


def _identity(path: str) -> list[Any]:
    """Name, size and time of a file, which tell whether it was replaced."""
    found = Path(path).stat()
    return [Path(path).name, found.st_size, found.st_mtime_ns]


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
