"""Render `report.html`, which shows the results of runs in one file and needs no network.

Tables and charts are HTML and SVG, and need no script. The pairs are JSON: an index of all pairs, and blocks of thumbnails and attention
maps. The script parses a block only when it shows one of the block's pairs.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from diffcap.records import ChangePair, JsonDict
from diffcap.report import table
from diffcap.report.attention import Localisation
from diffcap.report.charts import Chart, Curve, curve_chart, system_colors, viewpoint_charts
from diffcap.report.drawing import Thumbnail, is_correct, type_group
from diffcap.report.heatmaps import COLORMAP, color_table

_SCRIPT_NAMES = ("shared.js", "attention.js", "card.js", "page.js")
_PICTURES_PER_BLOCK, _PAIRS_WITH_MAPS_PER_BLOCK = 16, 8  # in the blocks of `page_data`
# Logged values whose charts come first; val/mlm is the loss of masked language modelling.
_MAIN_CURVE_TITLES = ("val/CIDEr-D", "val/BLEU-4", "val/caption_loss", "val/mlm", "train/loss", "train/caption_loss")


@dataclass(frozen=True)
class System:
    """Content of the page about one system: a run, or runs with several seeds."""

    captions: Mapping[str, str]  # id of a pair -> caption, of the run with the first seed
    scores: Mapping[str, float]  # id -> CIDEr-D of the caption in `captions`
    attention: Mapping[str, JsonDict] = field(default_factory=dict)  # id -> encoded attention maps
    no_attention_reason: str | None = None
    localisation: Localisation | None = None  # how well the attention maps show where the change is
    curves: Sequence[Mapping[str, Mapping[str, Curve]]] = ()  # for every seed: stage -> value ("val/mlm") -> curve
    metadata: Sequence[tuple[str, str]] = ()  # (heading, text) for the section "Provenance"


@dataclass(frozen=True)
class Page:
    """Content of the page."""

    protocol: JsonDict  # how the scores were computed: "dataset", "split", "tokenizer", ...
    rows: table.SystemRows  # system -> row of the results table, including baselines
    systems: Mapping[str, System]  # by name, without baselines
    pairs: Sequence[ChangePair]  # pairs in the list of the page
    pictures: Mapping[str, Thumbnail | None]  # path -> thumbnail; None for an image that cannot be read
    outlines: Mapping[str, Thumbnail] = field(default_factory=dict)  # path of a mask -> its outline
    mask_counts: dict[str, float] | None = None  # numbers of usable, empty and unreadable masks
    viewpoint: JsonDict | None = None  # scores by viewpoint IoU (1: equal camera positions)
    extra_rows: Mapping[str, table.SystemRows] = field(default_factory=dict)  # heading -> rows of a further table
    metadata: Sequence[tuple[str, str]] = ()  # (heading, text) for the section "Provenance"


def render(page: Page) -> str:
    """Render the page as one HTML document. Text from data is escaped; a security policy allows only the page's script and no requests."""
    script = "\n".join(read_resource(name) for name in _SCRIPT_NAMES)
    index, blocks = page_data(page)
    encoded_maps = [maps for system in page.systems.values() for maps in system.attention.values()]
    baselines = [name for name in page.rows if name not in page.systems]
    colors = system_colors(list(page.rows), baselines)
    extra_tables = [table.metric_table(rows, "total", heading) for heading, rows in page.extra_rows.items()]
    localisation = {name: system.localisation for name, system in page.systems.items() if system.localisation}
    notes = table.footnotes(page.protocol, page.rows)
    if "id_tokens" in page.protocol:  # there are scores of word ids, the indices of words in a vocabulary
        notes.append(table.word_id_note(page.protocol["id_tokens"]))
    tiles = []  # up to four boxes at the top of the page: a column of the overview, its best score, and the system
    overview = table.system_table({name: page.rows[name] for name in page.systems})
    for heading in ("CIDEr-D", "BLEU-4", "METEOR", "S*m", "type right", "object right"):  # S*m: mean of four scores
        if heading in overview.columns:
            column = overview.columns.index(heading)
            scores = [(cells[column], name) for (name,), cells in overview.rows if cells[column].text]
            best, name = max(scores, key=lambda score: score[0].fraction)  # the highest score has the largest fraction
            tiles.append({"heading": heading, "text": best.text, "std": best.std, "system": name})
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(read_resource("page.html.j2")).render(
        page=page,
        scoring_text=table.scoring_text(page.protocol, page.rows),
        notes=notes,
        tiles=tiles[:4],
        colors=colors,
        baselines=baselines,
        scores=[*table.score_tabs(page.rows), *extra_tables, *table.word_id_tabs(page.rows)],
        by_type=table.type_tabs(page.rows),
        viewpoint=viewpoint_charts(page.viewpoint, colors) if page.viewpoint else [],
        curves=_curve_charts(page.systems, colors),
        localisation=table.localisation_tabs(localisation),
        localisation_note=table.localisation_note(page.mask_counts),
        verdict_rule=index["judged"],
        has_drawn_boxes=any(entry.get("x") for entry in index["pairs"]),
        has_attention=bool(encoded_maps),
        has_alignment=any(maps["m"] for maps in encoded_maps),  # "m": matched positions of both images
        color_scale=", ".join(f"rgb({red:g}, {green:g}, {blue:g})" for red, green, blue in COLORMAP),
        has_std=any("std" in row for row in page.rows.values()),
        style=Markup(read_resource("page.css")),
        script=Markup(script),
        policy=security_policy(script),
        index=as_json(index),
        blocks={name: as_json(block) for name, block in blocks.items()},
    )


def read_resource(name: str, package: str = "diffcap.report") -> str:
    """Read a text file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def security_policy(script: str) -> str:
    """Return a content security policy that allows this script and embedded images, and no requests."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def as_json(value: Any) -> Markup:
    """Encode a value as JSON for a script element; escaped text cannot end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _curve_charts(
    systems: Mapping[str, System], colors: Mapping[str, str]
) -> list[tuple[str, list[Chart], list[Chart]]]:
    """Draw the charts of the logged values: for each stage its name, the main charts, and the other charts."""
    stages: dict[str, dict[str, list[tuple[str, str, Curve]]]] = {}  # stage -> title -> (system, its color, curve)
    for name, system in systems.items():
        for seed_curves in system.curves:
            for stage, curves in seed_curves.items():
                for title, curve in curves.items():
                    stages.setdefault(stage, {}).setdefault(title, []).append((name, colors[name], curve))
    charts = []
    for stage, by_title in stages.items():
        main_titles = [title for title in _MAIN_CURVE_TITLES if title in by_title][:3] or sorted(by_title)[:3]
        main_charts = [curve_chart(title, by_title[title]) for title in main_titles]
        other_charts = [curve_chart(title, by_title[title]) for title in sorted(by_title) if title not in main_titles]
        charts.append((stage, main_charts, other_charts))
    return charts


def page_data(page: Page) -> tuple[JsonDict, JsonDict]:
    """Return the index of the pairs, and the blocks of thumbnails and attention maps by the id of their HTML element.

    The index has "systems", "judged" (the rule that makes captions right or wrong), "colors" (of attention maps), "types", "texts",
    "pairs", "pictures" and "attention" (numbers of items in a block), and "featured" (index of the pair at the top of the page). There
    are thousands of pairs, so their keys are short. Indices: "t" of the type, "r" and "s" of the texts of references and captions, "b"
    and "a" of the thumbnails, "m" of the mask's outline, "l" of the attention maps. Other values: "v" viewpoint IoU, "x" boxes as
    fractions of the image (left out if there is a mask), "c" scores and "o" verdicts (1 right, 0 wrong, null unknown) by system.
    """
    texts: dict[str, int] = {}  # text -> its index
    picture_indices = {path: index for index, path in enumerate(page.pictures)}
    outline_indices = {path: len(picture_indices) + index for index, path in enumerate(page.outlines)}
    systems = list(page.systems.values())
    judge_caption, verdict_rule = _choose_judge(page)
    types = table.ordered_type_groups({group for pair in page.pairs if (group := type_group(pair)) is not None})
    entries: list[JsonDict] = []
    attention: list[list[JsonDict | None]] = []
    for pair in page.pairs:
        group = type_group(pair)
        entry: JsonDict = {
            "id": pair.id,
            "t": -1 if group is None else types.index(group),
            "r": [texts.setdefault(text, len(texts)) for text in pair.captions],
            "s": [texts.setdefault(system.captions[pair.id], len(texts)) for system in systems],
            "c": [round(100 * system.scores[pair.id], 1) for system in systems],
            "o": [judge_caption(system, pair) for system in systems],
        }
        if pair.extra.get("viewpoint_iou") is not None:
            entry["v"] = pair.extra["viewpoint_iou"]
        if picture_indices:
            before, after = pair.images
            entry |= {"b": picture_indices[before], "a": picture_indices[after]}
            outline = outline_indices.get(pair.extra.get("mask", ""))
            # Boxes of the changed object: "b" (before) or "a" (after) -> left, top, width, height, as fractions of the image.
            boxes = {}
            for side, box in (pair.extra.get("boxes") or {}).items():
                picture = page.pictures.get(getattr(pair, side, ""))
                if box and picture:
                    corners = np.reshape(box, (2, 2)) / (picture.width, picture.height)
                    corners[1] -= corners[0]  # width and height
                    boxes[side[0]] = corners.ravel().round(4).tolist()
            entry |= {"x": boxes} if outline is None else {"m": outline}
        if any(pair.id in system.attention for system in systems):
            entry["l"] = len(attention)
            attention.append([system.attention.get(pair.id) for system in systems])
        entries.append(entry)
    # The pair at the top of the page is the pair of highest rank among those with a box or a mask, or among all if there are none. The
    # rank is 0 without attention maps, 1 with them, and 2 if the captions of all systems are right as well.
    marked_indices = [index for index, entry in enumerate(entries) if entry.get("x") or "m" in entry]
    ranks = {index: "l" in entry and 1 + all(entry["o"]) for index, entry in enumerate(entries)}
    images = [*page.pictures.values(), *page.outlines.values()]
    pictures = [None if image is None else [image.width, image.height, image.data] for image in images]
    block_sizes = {"pictures": _PICTURES_PER_BLOCK, "attention": _PAIRS_WITH_MAPS_PER_BLOCK}
    blocks: JsonDict = {}
    for name, items in (("pictures", pictures), ("attention", attention)):
        size = block_sizes[name]
        blocks |= {f"{name}-{start // size}": items[start : start + size] for start in range(0, len(items), size)}
    index = {
        # "number" is the index of the system's colour.
        "systems": [{"name": name, "number": list(page.rows).index(name)} for name in page.systems],
        "judged": verdict_rule,
        "colors": base64.b64encode(color_table().tobytes()).decode(),
        "types": types,
        "texts": list(texts),
        "pairs": entries,
        **block_sizes,
        "featured": max(marked_indices or ranks, key=ranks.__getitem__, default=None),
    }
    return index, blocks


def _choose_judge(page: Page) -> tuple[Callable[[System, ChangePair], int | None], JsonDict]:
    """Return the function that judges a caption (1 right, 0 wrong, None unknown), and the rule that it follows.

    A caption is judged by its words if the dataset has the attributes of the changed objects. In other datasets, it is right if its
    CIDEr-D is in the highest third of all scores, and wrong if it is in the lowest third.
    """
    has_object_labels = any("changed" in pair.extra for pair in page.pairs)
    scores = sorted(system.scores[pair.id] for system in page.systems.values() for pair in page.pairs)
    low, high = (scores[len(scores) * third // 3] if scores else 0.0 for third in (1, 2))

    def judge(system: System, pair: ChangePair) -> int | None:
        if has_object_labels:
            correct = is_correct(system.captions[pair.id], pair)
            return None if correct is None else int(correct)
        score = system.scores[pair.id]
        if low == high:
            return None
        return 1 if score >= high else 0 if score <= low else None

    by_score = {"by": "score", "low": round(100 * low, 1), "high": round(100 * high, 1)}
    return judge, {"by": "words"} if has_object_labels else by_score
