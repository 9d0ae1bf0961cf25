"""The page: nothing on it comes from elsewhere, nothing of the data is taken for markup, and its data say what was measured."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from diffcap.records import ChangePair
from diffcap.report.drawing import Thumbnail
from diffcap.report.page import Page, System, as_json, page_data, render

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \u2028 \"'<!--"


class Elements(HTMLParser):
    """Every element with its attributes and the text from its beginning to the next element's."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":  # what follows is none of its text
            self.found.append(("", {}, []))

    def handle_data(self, data: str) -> None:
        if self.found:
            self.found[-1][2].append(data)

    def named(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.found if name == tag]


def blocks_of(html: str) -> dict[str, Any]:
    scripts = Elements(html).named("script")
    return {str(attributes["id"]): json.loads(text) for attributes, text in scripts if "id" in attributes}


def some_maps(words: list[str]) -> dict[str, Any]:
    map = base64.b64encode(bytes(6 * len(words))).decode()
    return {"w": words, "g": [2, 3], "b": map, "a": map, "m": None}


def a_page(name: str = "one", text: str = "the small red cube moved", has_object_labels: bool = True) -> Page:
    changed = {"size": "small", "color": "red", "material": "metal", "shape": "cube"}
    extra = {"changed": changed, "boxes": {"before": [10, 20, 30, 60], "after": None}} if has_object_labels else {}
    pairs = [
        ChangePair(f"{n} {text}", f"b{n}", f"a{n}", [text, "it moved"], "test", "move", False, dict(extra))
        for n in range(3)
    ]
    pairs.append(ChangePair("same", "b0", "n", ["nothing changed"], "test", None, True, {"viewpoint_iou": 0.5}))
    ids = [pair.id for pair in pairs]
    measured = dict.fromkeys(("pointing", "pointing_chance", "mass", "mass_chance"), 0.5) | {"count": 3}
    first = System(
        captions=dict(zip(ids, ["the small red cube moved", "the blue cube moved", text, "the scene is the same"])),
        scores=dict(zip(ids, [4.0, 1.0, 0.5, 2.0])),
        attention={ids[1]: some_maps(["the", text])},
        localisation={"region": "box", "kinds": {"all words": measured, text: measured}, "words": {}},
        curves=[{"finetune": {"val/CIDEr-D": [(10.0, 0.5), (20.0, 1.5)], f"train/{text}": [(10.0, 2.0)]}}],
        metadata=[(name, text)],
    )  # fmt: skip
    second = System(
        captions=dict.fromkeys(ids, "it moved"), scores=dict(zip(ids, [0.0, 3.0, 2.5, 0.1])), no_attention_reason=text
    )
    row = {"total": {"BLEU-4": 0.5, "CIDEr-D": 1.25}, text: {"CIDEr-D": 0.5}, "seconds": 60.0}
    better = {"total": {"BLEU-4": 0.75, "CIDEr-D": 1.5}, text: {"CIDEr-D": 0.75}, "seconds": 90.0}
    bins = [{"low": 0.1, "high": 0.5, "pairs": {"total": 4}}, {"low": 0.6, "high": 0.9, "pairs": {"total": 0}}]
    scored = [{"CIDEr-D": {"total": 0.5}}, {"CIDEr-D": {"total": 0.75}}]
    picture = Thumbnail(100, 80, base64.b64encode(b"picture").decode())
    return Page(
        protocol={"dataset": text, "split": "test", "pairs": {"total": 4}, "tokenizer": "raw", "beams": 1},
        rows={"baseline": row, name: better, "two": row},
        systems={name: first, "two": second},
        pairs=pairs,
        pictures={"b0": picture, "a0": None, "b1": picture, "a1": picture, "b2": picture, "a2": picture, "n": picture},
        viewpoint={"bins": bins, "systems": dict.fromkeys(("baseline", name, "two"), scored)},
        extra_rows={text: {name: better, "two": row}},
        metadata=[("commit", text)],
    )


def test_nothing_is_fetched_and_no_script_runs_but_its_own() -> None:
    html = render(a_page(HOSTILE, HOSTILE))
    page = Elements(html)
    scripts = page.named("script")
    own = [text for attributes, text in scripts if attributes.get("type") != "application/json"]
    assert len(own) == 1 and "INDEX" in own[0] and not any("src" in attributes for attributes, _ in scripts)
    digest = base64.b64encode(hashlib.sha256(own[0].encode()).digest()).decode()
    policy = next(attributes["content"] for attributes, _ in page.named("meta") if "http-equiv" in attributes)
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not page.named("img") and not page.named("link") and "<!--" not in html
    for tag, attributes, _ in page.found:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert (attributes.get("href") or "#").startswith("#") and "src" not in attributes
    style = "".join(text for _, text in page.named("style"))
    assert "url(" not in style and "@import" not in style and "</" not in own[0]
    assert set(re.findall(r"https?://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_hostile_text_is_there_as_text() -> None:
    page, html = a_page(HOSTILE, HOSTILE), render(a_page(HOSTILE, HOSTILE))
    index = blocks_of(html)["index"]
    assert HOSTILE in index["texts"] and index["systems"][0]["name"] == HOSTILE
    assert [pair["id"] for pair in index["pairs"]] == [pair.id for pair in page.pairs]
    assert blocks_of(html)["attention-0"][0][0]["w"] == ["the", HOSTILE]
    expected = Elements(html)
    for tag in ("th", "h3", "title", "figcaption", "dd", "h1", "p"):
        every = " ".join(text for _, text in expected.named(tag)) + " ".join(text for _, text in expected.named("i"))
        assert HOSTILE in every, tag
    assert as_json([HOSTILE]).count("<") == 0 and json.loads(as_json([HOSTILE])) == [HOSTILE]


def test_the_index_has_captions_scores_verdicts_and_boxes() -> None:
    page = a_page()
    index, blocks = page_data(page)
    assert index["judged"] == {"by": "words"} and index["types"] == ["move", "distractor"]
    for pair, entry in zip(page.pairs, index["pairs"]):
        assert [index["texts"][text] for text in entry["r"]] == pair.captions
        for number, system in enumerate(page.systems.values()):
            assert index["texts"][entry["s"][number]] == system.captions[pair.id]
            assert entry["c"][number] == 100 * system.scores[pair.id]
        before, after = (blocks["pictures-0"][entry[side]] for side in "ba")
        assert before[:2] == [100, 80] and (after is None if pair.after == "a0" else after[:2] == [100, 80])
    assert [entry["o"] for entry in index["pairs"]] == [[1, 0], [0, 0], [1, 0], [1, 0]]
    assert index["pairs"][1]["x"] == {"b": [0.1, 0.25, 0.2, 0.5]} and index["pairs"][3]["x"] == {}
    assert [entry.get("l") for entry in index["pairs"]] == [None, 0, None, None]
    assert index["pairs"][3]["v"] == 0.5 and index["featured"] == 1
    assert blocks["attention-0"] == [[page.systems["one"].attention[page.pairs[1].id], None]]


def test_an_outline_replaces_the_boxes_and_localisation_names_the_region() -> None:
    page = a_page()
    assert "mass in the box, %" in render(page) and "boxes, by word" not in render(page)
    assert "outline of the changed area" not in render(page)
    masked = replace(page.pairs[1], extra={**page.pairs[1].extra, "mask": "m1"})
    pairs = [page.pairs[0], masked, *page.pairs[2:]]
    one = page.systems["one"]
    assert one.localisation is not None
    tables = {key: one.localisation[key] for key in ("kinds", "words")}
    systems = {**page.systems, "one": replace(one, localisation={"region": "mask", **tables, "boxes": tables})}
    counts = {"pairs": 3, "empty": 4, "unreadable": 1, "share": 0.0625}
    page = replace(page, pairs=pairs, outlines={"m1": Thumbnail(100, 80, "line")}, systems=systems, mask_counts=counts)
    index, blocks = page_data(page)
    assert ["m" in entry for entry in index["pairs"]] == [False, True, False, False]
    assert "x" not in index["pairs"][1] and "x" in index["pairs"][0] and index["featured"] == 1
    block, place = divmod(index["pairs"][1]["m"], index["pictures"])
    assert blocks[f"pictures-{block}"][place] == [100, 80, "line"]
    html = render(page)
    assert all(f"mass in the {region}, %" in html for region in ("mask", "box")) and "boxes, by word" in html
    assert "outline of the changed area" in html and "they cover 6.2 % of the image" in html


def test_without_known_objects_the_thirds_of_the_scores_judge() -> None:
    index, _ = page_data(a_page(has_object_labels=False))
    scores = sorted([4.0, 1.0, 0.5, 2.0, 0.0, 3.0, 2.5, 0.1])
    low, high = scores[8 // 3], scores[16 // 3]
    assert index["judged"] == {"by": "score", "low": 100 * low, "high": 100 * high}
    for entry in index["pairs"]:
        for score, verdict in zip(entry["c"], entry["o"]):
            assert verdict == (1 if score >= 100 * high else 0 if score <= 100 * low else None)
    page = a_page(has_object_labels=False)
    flat = {name: replace(system, scores=dict.fromkeys(system.scores, 1.0)) for name, system in page.systems.items()}
    index, _ = page_data(replace(page, systems=flat))
    assert all(entry["o"] == [None, None] for entry in index["pairs"])


def test_pictures_and_looks_come_in_blocks_that_are_found_again() -> None:
    page = a_page()
    pairs = [replace(page.pairs[0], id=str(number), before=f"b{number}", after=f"a{number}") for number in range(40)]
    pictures = {path: Thumbnail(9, 9, path) for pair in pairs for path in (pair.before, pair.after)}
    system = System(dict.fromkeys(map(str, range(40)), "it moved"), dict.fromkeys(map(str, range(40)), 1.0))
    system = replace(system, attention={str(number): some_maps([str(number)]) for number in range(0, 40, 2)})
    index, blocks = page_data(replace(page, pairs=pairs, pictures=pictures, systems={"one": system}))
    for number, entry in enumerate(index["pairs"]):
        for side, path in (("b", f"b{number}"), ("a", f"a{number}")):
            block, place = divmod(entry[side], index["pictures"])
            assert blocks[f"pictures-{block}"][place] == [9, 9, path]
        if number % 2 == 0:
            block, place = divmod(entry["l"], index["attention"])
            assert blocks[f"attention-{block}"][place][0]["w"] == [str(number)]


def test_the_tables_mark_the_best_and_the_charts_have_labels() -> None:
    html = render(a_page())
    page = Elements(html)
    best = {text.strip() for _, text in page.named("b")}
    assert {"150.00", "75.00"} <= best and "125.00" not in best
    rows = [attributes.get("class") for attributes, _ in page.named("tr")]
    row = '<tr class="baseline" style="--c:#969696">\n<th scope="row"><i class="dot"></i>baseline'
    assert rows.count("baseline") == html.count(row)
    labels = [attributes["aria-label"] for attributes, _ in page.named("svg") if attributes.get("role") == "img"]
    assert "val/CIDEr-D by step: one ends at 150" in labels
    assert any("from different to similar viewpoints: baseline from 50.0 to 75.0" in str(label) for label in labels)


def test_every_section_is_in_the_menu() -> None:
    found = Elements(render(a_page()))
    elements = [attributes for tag in ("section", "footer") for attributes, _ in found.named(tag)]
    sections = {attributes["id"] for attributes in elements if "id" in attributes}
    links = {str(attributes.get("href")) for attributes, _ in found.named("a")}
    assert {"scores", "pairs", "provenance"} <= sections and {f"#{name}" for name in sections} <= links
