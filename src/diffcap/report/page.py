"""`report.html`: results of runs in one file that needs no network.

Tables and charts are HTML and SVG, and need no script. The pairs are JSON: an index of all pairs, then images and attention maps
in blocks that the script parses when a pair is shown.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from diffcap.records import ChangePair
from diffcap.report.attention import Localisation
from diffcap.report.charts import Chart, Curve, curve_chart, system_colors, viewpoint_charts
from diffcap.report.drawing import Thumbnail, is_correct, kind_of
from diffcap.report.heatmaps import COLORMAP, color_table
from diffcap.report.table import (
    Rows,
    id_note,
    id_tabs,
    localisation_note,
    metric_table,
    notes_of,
    ordered_kinds,
    score_tabs,
    scoring_of,
    system_table,
    type_tabs,
)

_SCRIPTS = ("shared.js", "attention.js", "card.js", "page.js")
_PICTURES, _ATTENTION = 16, 8  # entries of a block
_FIRST_CURVES = ("val/CIDEr-D", "val/BLEU-4", "val/caption_loss", "val/mlm", "train/loss", "train/caption_loss")


@dataclass(frozen=True)
class System:
    """Content of the page about one run, or about several seeds."""

    captions: Mapping[str, str]  # id -> caption of the first seed
    scores: Mapping[str, float]  # id -> CIDEr-D of this caption
    attention: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # id -> encoded attention maps
    no_attention: str | None = None  # why there are none
    localisation: Localisation | None = None  # see `attention.collect_attention`
    curves: Sequence[Mapping[str, Mapping[str, Curve]]] = ()  # for every seed: stage -> name -> curve
    metadata: Sequence[tuple[str, str]] = ()  # (heading, text) for the section "Provenance"


@dataclass(frozen=True)
class Page:
    """Content of the page."""

    protocol: Mapping[str, Any]
    rows: Rows  # the results table, including baselines
    systems: Mapping[str, System]
    pairs: Sequence[ChangePair]  # the listed ones
    # Path -> thumbnail, None for an image that cannot be read; empty for no images.
    pictures: Mapping[str, Thumbnail | None]
    outlines: Mapping[str, Thumbnail] = field(default_factory=dict)  # path of a mask -> its outline
    masks: Mapping[str, float] | None = None  # `drawing.mask_counts` of the pairs that localisation is measured on
    viewpoint: Mapping[str, Any] | None = None  # result of `viewpoint_scores`
    second: Mapping[str, Rows] = field(default_factory=dict)  # tables by a second protocol: heading -> rows
    metadata: Sequence[tuple[str, str]] = ()  # see `System`


def render(page: Page) -> str:
    """Render the page as one HTML document.

    Text from data (captions, ids, names) is escaped. A content security policy allows only the page's own script and no requests.
    """
    script = "\n".join(resource(name) for name in _SCRIPTS)
    index, blocks = page_data(page)
    attention = [maps for system in page.systems.values() for maps in system.attention.values()]
    baselines = [name for name in page.rows if name not in page.systems]
    colors = system_colors(list(page.rows), baselines)
    second = [metric_table(rows, "total", heading) for heading, rows in page.second.items()]
    notes = notes_of(page.protocol, page.rows)
    notes += [id_note(page.protocol["id_tokens"])] if "id_tokens" in page.protocol else []
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(resource("page.html.j2")).render(
        page=page,
        caption=scoring_of(page.protocol, page.rows),
        notes=notes,
        tiles=_tiles(page),
        colors=colors,
        baselines=baselines,
        scores=[*score_tabs(page.rows), *second, *id_tabs(page.rows)],
        by_type=type_tabs(page.rows),
        viewpoint=viewpoint_charts(page.viewpoint, colors) if page.viewpoint else [],
        curves=_curve_charts(page.systems, colors),
        localisation={name: system.localisation for name, system in page.systems.items() if system.localisation},
        localisation_note=localisation_note(page.masks),
        has_boxes_too=any("boxes" in (system.localisation or {}) for system in page.systems.values()),
        judged=index["judged"],
        has_boxes=any(entry.get("x") for entry in index["pairs"]),
        has_attention=bool(attention),
        has_alignment=any(maps["m"] for maps in attention),
        scale=", ".join(f"rgb({red:g}, {green:g}, {blue:g})" for red, green, blue in COLORMAP),
        spread=any("std" in row for row in page.rows.values()),
        style=Markup(resource("page.css")),
        script=Markup(script),
        policy=security_policy(script),
        index=as_json(index),
        blocks={name: as_json(block) for name, block in blocks.items()},
    )


def resource(name: str, package: str = "diffcap.report") -> str:
    """The text of a file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def security_policy(script: str) -> str:
    """A content security policy that allows this script and embedded images, and no requests."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def as_json(value: Any) -> Markup:
    """JSON for a script element: text in it can neither end the element nor open a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _tiles(page: Page) -> list[dict[str, str]]:
    """The best run and its score for each of the main metrics."""
    tiles = []
    overview = system_table({name: page.rows[name] for name in page.systems})
    for heading in ("CIDEr-D", "BLEU-4", "METEOR", "S*m", "type right", "object right"):
        if heading in overview.columns:
            place = overview.columns.index(heading)
            known = [(cells[place], name) for (name,), cells in overview.rows if cells[place].text]
            best, name = max(known, key=lambda entry: entry[0].fraction)
            tiles.append({"heading": heading, "text": best.text, "std": best.std, "system": name})
    return tiles[:4]


def _curve_charts(
    systems: Mapping[str, System], colors: Mapping[str, str]
) -> list[tuple[str, list[Chart], list[Chart]]]:
    """For each stage its name, the main charts, and the charts of the other logged values."""
    stages: dict[str, dict[str, list[tuple[str, str, Curve]]]] = {}
    for name, system in systems.items():
        for seed in system.curves:
            for stage, curves in seed.items():
                for title, curve in curves.items():
                    stages.setdefault(stage, {}).setdefault(title, []).append((name, colors[name], curve))
    charts = []
    for stage, titles in stages.items():
        first = [title for title in _FIRST_CURVES if title in titles][:3] or sorted(titles)[:3]
        rest = [title for title in sorted(titles) if title not in first]
        drawn = {title: curve_chart(title, titles[title]) for title in (*first, *rest)}
        charts.append((stage, [drawn[title] for title in first], [drawn[title] for title in rest]))
    return charts


def page_data(page: Page) -> tuple[dict[str, Any], dict[str, Any]]:
    """The index of the pairs, and the blocks of images and attention maps by the id of their element.

    Returns:
        {"systems", "judged", "colors", "types", "texts", "pairs", "pictures", "attention", "featured"}; "colors" is the
        `color_table` in base64. A pair's captions are indices of "texts". Its keys are short because there are thousands: "t"
        type, "v" viewpoint IoU, "b" and "a" pictures, "r" references, "s" captions, "c" scores and "o" verdicts (1 right, 0 wrong,
        null open) by system, "x" boxes in parts of the pictures, "m" the picture with the mask's outline, which replaces the boxes,
        "l" the index among the pairs with maps.
    """
    texts: dict[str, int] = {}
    pictures = {path: number for number, path in enumerate(page.pictures)}
    outlines = {path: len(pictures) + number for number, path in enumerate(page.outlines)}
    systems = list(page.systems.values())
    verdict, judged = _judge(page)
    types = ordered_kinds({name for pair in page.pairs if (name := kind_of(pair)) is not None})
    entries: list[dict[str, Any]] = []
    attention: list[list[dict[str, Any] | None]] = []
    for pair in page.pairs:
        kind = kind_of(pair)
        entry: dict[str, Any] = {
            "id": pair.id,
            "t": -1 if kind is None else types.index(kind),
            "r": [texts.setdefault(text, len(texts)) for text in pair.captions],
            "s": [texts.setdefault(system.captions[pair.id], len(texts)) for system in systems],
            "c": [round(100 * system.scores[pair.id], 1) for system in systems],
            "o": [verdict(system, pair) for system in systems],
        }
        if pair.extra.get("viewpoint_iou") is not None:
            entry["v"] = pair.extra["viewpoint_iou"]
        if pictures:
            before, after = pair.images
            entry |= {"b": pictures[before], "a": pictures[after]}
            outline = outlines.get(pair.extra.get("mask", ""))
            entry |= {"x": _boxes(pair, page.pictures)} if outline is None else {"m": outline}
        if any(pair.id in system.attention for system in systems):
            entry["l"] = len(attention)
            attention.append([system.attention.get(pair.id) for system in systems])
        entries.append(entry)
    # At the top of the page: the first changed pair with attention maps that all systems have right, if there is one.
    changes = [number for number, entry in enumerate(entries) if entry.get("x") or "m" in entry]
    rank = {number: "l" in entry and 1 + all(entry["o"]) for number, entry in enumerate(entries)}
    images = [*page.pictures.values(), *page.outlines.values()]
    shown = [None if image is None else [image.width, image.height, image.data] for image in images]
    blocks: dict[str, Any] = {}
    for kind, content, size in (("pictures", shown, _PICTURES), ("attention", attention, _ATTENTION)):
        blocks |= {f"{kind}-{at // size}": content[at : at + size] for at in range(0, len(content), size)}
    index = {
        "systems": [{"name": name, "number": list(page.rows).index(name)} for name in page.systems],
        "judged": judged,
        "colors": base64.b64encode(color_table().tobytes()).decode(),
        "types": types,
        "texts": list(texts),
        "pairs": entries,
        "pictures": _PICTURES,
        "attention": _ATTENTION,
        "featured": max(changes or rank, key=rank.__getitem__, default=None),
    }
    return index, blocks


def _judge(page: Page) -> tuple[Callable[[System, ChangePair], int | None], dict[str, Any]]:
    """Right or wrong by the caption's words if the dataset has its objects' attributes, else by the higher and lower third of scores."""

    def by_words(system: System, pair: ChangePair) -> int | None:
        right = is_correct(system.captions[pair.id], pair)
        return None if right is None else int(right)

    if any("changed" in pair.extra for pair in page.pairs):
        return by_words, {"by": "words"}
    scores = sorted(system.scores[pair.id] for system in page.systems.values() for pair in page.pairs)
    low, high = (scores[len(scores) * third // 3] if scores else 0.0 for third in (1, 2))

    def by_score(system: System, pair: ChangePair) -> int | None:
        score = system.scores[pair.id]
        return 1 if score >= high > low else 0 if score <= low < high else None

    return by_score, {"by": "score", "low": round(100 * low, 1), "high": round(100 * high, 1)}


def _boxes(pair: ChangePair, pictures: Mapping[str, Thumbnail | None]) -> dict[str, list[float]]:
    """The changed object's boxes as left, top, width and height, as fractions of the image."""
    boxes = {}
    for side, box in (pair.extra.get("boxes") or {}).items():
        one = pictures.get(getattr(pair, side, ""))
        if box and one:
            left, right = box[0] / one.width, box[2] / one.width
            top, bottom = box[1] / one.height, box[3] / one.height
            parts = (left, top, right - left, bottom - top)
            boxes[side[0]] = [round(part, 4) for part in parts]
    return boxes
