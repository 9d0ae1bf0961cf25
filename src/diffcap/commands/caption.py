"""`diffcap caption`: captions, their probabilities and heat maps of each word's attention, for one pair or many."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from diffcap.checkpoints.hub_access import check_connection
from diffcap.commands.caption_file import CAPTION_FILE_SUFFIXES, CaptionFile, exclusive_lock
from diffcap.commands.pairs import TABLE_SUFFIXES, find_pairs, is_parquet, parquet_advice, table_paths
from diffcap.commands.scene import DEFAULT_MIN_CHANGED, caption_scene
from diffcap.utils.console import echo, print_json
from diffcap.utils.cores import MAX_THREADS, available_cores
from diffcap.utils.errors import DiffcapError

_MAX_NAME_LENGTH = 60  # characters of a file name, which take up to 4 bytes each; file systems allow 255 bytes


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
    fit: Literal["stretch", "pad", "crop", "register"] = "stretch",
    strict: bool = False,
    out: list[str] | None = None,
    tile: int | None = None,
    overlap: int | None = None,
    bands: str | None = None,
    stretch: str | None = None,
    sort: Literal["changed"] | None = None,
    min_changed: float | None = None,
    threshold: float | None = None,
    align: bool = False,
    engine: Literal["ray"] | None = None,
    shard: str | None = None,
    part: int | None = None,
) -> None:
    """Describe the change between two images (diffcap caption BEFORE AFTER), in each of many pairs, or in a whole scene (--out).

    Many pairs are given as a folder, two folders or a table of pairs. A whole scene is given as two rasters, such as GeoTIFF files, and
    needs diffcap[geo].

    Args:
        before: The image before the change, in any format that Pillow reads; or a folder with pairs.csv, with the folders
            before and after (or A and B), or with images X_before and X_after; or a .csv, .tsv or .jsonl file with the columns
            before, after and, optionally, id; or a .parquet file, or a folder or URL (s3://...) of such files, for millions of pairs.
        after: The image after the change; also accepted as the second argument. Two folders: images with the same name are pairs.
        checkpoint: best.ckpt of a captioner, a folder of `diffcap export` or `diffcap import`, or user/name on the Hugging
            Face Hub; also a vision-language model, such as HuggingFaceTB/SmolVLM-500M-Instruct, or its folder; or
            openai:MODEL@http://HOST/v1, a model of a server with OpenAI's chat API. By default a small captioner that ships with
            diffcap: `blocks` (rendered solids), or `tiles` (overhead images) for a whole scene. If the option is given several
            times, the captioners are an ensemble and need the same vocabulary.
        beam: Beam size, 1 to 100; 1 is greedy decoding. With a larger beam, the other hypotheses and the greedy caption are listed.
        length_penalty: The log-probability of a hypothesis is divided by its number of words to the power of this exponent.
        heatmap: PNG file to write with both images and the attention of each word; a folder for many pairs.
        json: Print JSON; for many pairs one line per pair.
        batch_size: Number of pairs that are captioned at once; of a served model, the number of requests at a time.
        device: cpu, cuda, mps (Apple) or auto, which is cuda if there is one, else cpu.
        backbone_weights: File of the backbone's weights, if they cannot be downloaded.
        base: Folder of the vision-language model that was fine-tuned for a checkpoint, if the checkpoint names another place.
        prompt: Question to a vision-language model that was not fine-tuned.
        fit: What to do with images that do not fit each other: `stretch` resizes each of them; `pad` puts both on a gray canvas, `crop`
            cuts their middle out, if their sizes differ; `register` undoes a movement of the camera, and needs diffcap[register].
        strict: With --fit register: refuse images that cannot be registered. Otherwise they are used as they are, with a note.
        out: For many pairs, a .jsonl or .csv file that gets a row for each pair. For a whole scene (two rasters), a file for the
            changes: .geojson, .csv or .html (a map). The option may then be given several times. For a Parquet table, a folder or
            URL for Parquet files. If the command is interrupted, the same command continues where it stopped.
        tile: Whole scenes: side of the square tiles that are captioned, in pixels; 256 by default.
        overlap: Whole scenes: pixels that neighbouring tiles have in common; 64 by default, at most a quarter of a tile.
        bands: Whole scenes: the bands for red, green and blue, such as 4,3,2, or one band; 1,2,3 by default.
        stretch: Whole scenes: percentiles of the pixel values of both rasters that become black and white; 2,98 by default, except for
            8-bit pixels. For the default captioner, the default is the contrast of its training images.
        sort: Many pairs: `changed` prints the pairs with the highest probability of a change first, when all are captioned.
        min_changed: Many pairs: print only pairs whose probability of a change is at least this; a file of --out has all pairs.
            Whole scenes: leave out other tiles; 0.5 by default.
        threshold: Replaced by --min_changed.
        align: Whole scenes: warp the second raster to the pixel grid of the first one.
        engine: Parquet tables: `ray` captions on all GPUs, or else CPU cores, of the Ray cluster at RAY_ADDRESS, or else of this machine.
        shard: Parquet tables: 3/16 captions the share of the fourth of 16 jobs; 0/16 is the first.
        part: Parquet tables: number of pairs per file; by default 1,000 (model that only answers: --batch_size), at least a ten-thousandth.
    """
    for path in filter(None, (before, after)):
        if path.endswith(".ckpt") or (Path(path) / "config.json").is_file():
            raise DiffcapError(f"{path}: a checkpoint, not images; give each one as --checkpoint {path}, images first.")
    # By default, OpenMP's idle threads keep the cores busy. OpenMP reads this variable when torch is imported, which happens later.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if batch_size < 1:
        raise DiffcapError(f"--batch_size is {batch_size}; it must be at least 1.")
    if threshold is not None:
        advice = f"; give {max(1 - threshold, 0.0001):g}" if 0 <= threshold <= 1 else ""
        raise DiffcapError(f"--threshold is now --min_changed, the probability of a change{advice}.")
    if min_changed is not None and not 0 < min_changed <= 1:
        raise DiffcapError(f"--min_changed is {min_changed}; give a probability above 0, at most 1.")
    model_options: dict[str, Any] = {
        "checkpoint": checkpoint,
        "device": device,
        "backbone_weights": backbone_weights,
        "base": base,
        "prompt": prompt,
    }
    decoding_options: dict[str, Any] = {"beam": beam, "length_penalty": length_penalty, "batch_size": batch_size}
    if strict and fit != "register":
        raise DiffcapError("--strict is for --fit register; add it, or remove --strict.")
    fit_options: dict[str, Any] = {} if fit == "stretch" else {"fit": fit, "strict": strict}
    if fit == "register":
        from diffcap.utils.fitting import load_opencv

        load_opencv()  # raises the error before images are read
    scene_options: dict[str, Any] = {
        "tile": tile,
        "overlap": overlap,
        "bands": bands,
        "stretch": stretch,
        "align": align or None,
    }
    pair_options = {"heatmap": heatmap, "json": json or None, "sort": sort, **fit_options}
    table_options = {"engine": engine, "shard": shard, "part": part}
    if after is None and is_parquet(before):
        for name, value in {**pair_options, **scene_options, "min_changed": min_changed}.items():
            if value is not None:
                raise DiffcapError(f"--{name} has no effect on a Parquet table; remove it.")
        try:
            from diffcap.commands.caption_table import caption_table
        except ModuleNotFoundError as error:
            raise DiffcapError(f"{before}: needs {error.name}; run: pip install 'diffcap[table]'.") from None
        caption_table(before, out, engine, shard, part, model_options, **decoding_options)
        return
    if given := [f"--{name}" for name, value in table_options.items() if value is not None]:
        raise DiffcapError(f"{given[0]} is for a Parquet table of pairs, not for {before}; {parquet_advice(before)}.")
    set_options = [f"--{name}" for name, value in {"out": out, **scene_options}.items() if value is not None]
    if Path(before).is_dir() or (after is None and Path(before).suffix.lower() in TABLE_SUFFIXES):
        if unused := [name for name in set_options if name != "--out"]:
            raise DiffcapError(f"{unused[0]} is for a whole scene, two rasters; remove it for the pairs of {before}.")
    elif set_options:
        if unused := [f"--{name}" for name, value in pair_options.items() if value is not None]:
            raise DiffcapError(f"{unused[0]} is for pairs of images; remove it for a whole scene ({set_options[0]}).")
        scene_options["min_changed"] = min_changed or DEFAULT_MIN_CHANGED
        caption_scene(before, after, out, model_options, **scene_options, **decoding_options)
        return
    elif sort or min_changed:
        raise DiffcapError("--sort and --min_changed are for many pairs; --min_changed is also for a scene with --out.")
    model_options |= fit_options
    caption_pairs(before, after, out, heatmap, json, model_options, sort, min_changed, **decoding_options)


def caption_pairs(
    before: str,
    after: str | None,
    out: Sequence[str] | None,
    heatmap: str | None,
    as_json: bool,
    model_options: Mapping[str, Any],
    sort: str | None,
    min_changed: float | None,
    beam: int,
    length_penalty: float,
    batch_size: int,
) -> None:
    """Caption pairs with the arguments of `caption`, and print or write the captions.

    `model_options` has the values of --checkpoint, --device, --backbone_weights, --base, --prompt, --fit and --strict.
    """
    pairs, notes = find_pairs(before, after)
    echo(*(f"note: {note}" for note in notes), err=True)
    is_single_pair = after is not None and not Path(before).is_dir()
    heatmap_path = Path(heatmap) if heatmap is not None else None
    if heatmap_path and is_single_pair and heatmap_path.suffix.lower() != ".png":
        raise DiffcapError(f"--heatmap {heatmap}: the heat map is a PNG file; give a name that ends in .png.")
    if heatmap_path and not is_single_pair and heatmap_path.is_file():
        raise DiffcapError(f"--heatmap {heatmap}: is a file; for many pairs give a folder, for a PNG file per pair.")
    if out and not Path(out[0]).suffix and Path(before).is_file():
        raise DiffcapError(f"--out {out[0]}: only a Parquet table has a folder of captions; {parquet_advice(before)}.")
    out_path = Path(out[0]) if out else None
    if out and (len(out) > 1 or Path(out[0]).suffix.lower() not in CAPTION_FILE_SUFFIXES):
        raise DiffcapError(
            f"--out {' --out '.join(out)}: for many pairs give one file that ends in .jsonl or .csv; the others are for a whole scene."
        )
    if out_path and as_json:
        raise DiffcapError(f"--json has no effect with --out {out_path}; remove it. A .jsonl file has the same lines.")
    if out_path and after is None and os.path.realpath(out_path) in map(os.path.realpath, table_paths(Path(before))):
        raise DiffcapError(f"--out {out_path}: the pairs of {before} are read from this file; give another name.")
    from diffcap.change import change_probability, scored_sentences
    from diffcap.commands.model import load_model
    from diffcap.report.drawing import write_png
    from diffcap.report.heatmaps import confidence_lines, draw_caption
    from diffcap.utils.image_io import read_pair
    from diffcap.utils.progress import progress_bar

    # If no pair has both images, end before the model is loaded, which may need a download.
    if not any(os.path.isfile(pair.before) and os.path.isfile(pair.after) for pair in pairs):  # noqa: PTH113 - no error for long names
        read_pair(pairs[0].before, pairs[0].after)  # raises the error
    # With `shipped`, the error suggests the captioners that ship with diffcap.
    check_connection([*(model_options["checkpoint"] or []), model_options["base"]], shipped=True)
    captioner = load_model("blocks", model_options, beam, length_penalty)
    captioner.check_options(beam, length_penalty, heatmap is not None)
    rows: list[dict[str, Any]] = []  # of --sort and --min_changed, which are printed at the end
    num_failed, num_undrawn = 0, 0
    heatmaps: dict[str, Path] = {}  # by pair; the names are unique even on case-insensitive file systems
    taken_names: set[str] = set()
    for pair in pairs:
        base_name = re.sub(r"[^\w.-]", "_", pair.id).lstrip(".")[:_MAX_NAME_LENGTH] or "pair"
        candidates = itertools.chain([base_name], (f"{base_name}-{number}" for number in itertools.count(2)))
        name = next(name for name in candidates if name.casefold() not in taken_names)
        taken_names.add(name.casefold())
        if heatmap_path:
            heatmaps[pair.id] = heatmap_path if is_single_pair else heatmap_path / f"{name}.png"
    with ExitStack() as stack:
        caption_file, pending_pairs = None, pairs
        if out_path:
            settings = {"checkpoint": captioner.weights_sha256(), "beam": beam, "length_penalty": length_penalty}
            settings |= {"prompt": model_options["prompt"], "fit": model_options.get("fit")}
            stack.enter_context(exclusive_lock(out_path))
            ids_without_map = {id for id, path in heatmaps.items() if not path.is_file()}
            repeated = 1 if captioner.only_answers else batch_size  # answers have no digits that depend on the batch
            options = settings, repeated, ids_without_map, bool(sort or min_changed)
            caption_file = stack.enter_context(CaptionFile(out_path, pairs, *options))
            pending_pairs = caption_file.pending_pairs
        images = ((pair.before, pair.after) for pair in pending_pairs)
        on_error: Literal["raise", "return"] = "raise" if is_single_pair else "return"  # "return": yield errors, too
        threads = 0 if is_single_pair else min(MAX_THREADS, available_cores())
        sentences = scored_sentences(captioner)
        locate = as_json or (out_path is not None and out_path.suffix.lower() == ".jsonl")
        captions: Any = captioner.batch(images, beam, length_penalty, batch_size, on_error, sentences, threads, locate)
        num_earlier = len(pairs) - len(pending_pairs)
        advance = stack.enter_context(progress_bar("captioning", len(pairs), num_earlier, hidden=len(pairs) == 1))
        try:
            for pair, caption in zip(pending_pairs, captions):
                values: dict[str, Any] = {"error": str(caption)}
                if isinstance(caption, DiffcapError):
                    echo(f"error: {pair.id}: {caption}", err=True)
                    num_failed += 1
                else:
                    values = {**caption.as_dict(), "changed": change_probability(caption)}
                    echo(*(f"note: {note}." for note in caption.notes), err=True)
                    try:  # before the row is written, because a pair that has a row is not captioned again
                        if pair.id in heatmaps:
                            attention = captioner.attention(pair.before, pair.after, caption)
                            both = read_pair(pair.before, pair.after, fit=captioner.fit, strict=captioner.strict)
                            sheet = draw_caption(both.before.image, both.after.image, caption, attention)
                            write_png(heatmaps[pair.id], sheet.save)
                    except DiffcapError as error:
                        echo(f"note: {pair.id}: not drawn: {error}", err=True)
                        num_undrawn += 1
                row = {**pair.as_dict(), **values}
                if caption_file:
                    caption_file.append(row)
                elif (sort or min_changed) and "error" not in row:
                    rows.append(row)
                elif as_json:
                    print_json(values if is_single_pair else row, 2 if is_single_pair else None)
                elif is_single_pair:
                    hypotheses = [(one.log_probability, one.text) for one in caption.alternatives]
                    others = [f"or (log-probability {score:.3f}): {text}" for score, text in hypotheses]
                    echo(caption.text, *confidence_lines(caption), *others)
                elif "error" not in row:
                    echo(f"{pair.id}\t{caption.text}")
                advance(1)
        except KeyboardInterrupt:
            if is_single_pair:
                raise
            advice = "the captions are not saved; --out captions.jsonl saves them, and the same command then continues"
            if caption_file:
                advice = f"the captions so far are in {caption_file.path}; run the same command again to continue"
            raise DiffcapError(f"interrupted; {advice}.") from None
    if sort or min_changed:
        rows = caption_file.rows() if caption_file else rows
        selected = [row for row in rows if float(row["changed"]) >= (min_changed or 0)]
        if sort:
            selected.sort(key=lambda row: float(row["changed"]), reverse=True)
        for row in selected:
            if as_json:
                print_json(row, None)
            else:
                echo(f"{float(row['changed']):.4f}\t{row['id']}\t{row.get('caption', row.get('text'))}")
    if caption_file:
        earlier = f", {num_earlier:,} of them earlier" if num_earlier else ""
        echo(
            f"{len(pairs) - num_failed:,} of {len(pairs):,} pairs are captioned{earlier}; written to {caption_file.path}"
        )
    if num_failed or num_undrawn:
        counts = {"captioned": num_failed, "drawn": num_undrawn}
        failures = [f"{count} of {len(pairs)} pairs could not be {verb}" for verb, count in counts.items() if count]
        rest = "" if num_failed + num_undrawn == len(pairs) else "; the others are done"
        raise DiffcapError(f"{' and '.join(failures)}, see above{rest}.")
