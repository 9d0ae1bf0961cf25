"""report.html from the disk in a real browser; `make test-web`, since an ordinary machine has none."""

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from tests.browser import SIZES, Browser, windows
from tests.report.layouts import captions_of, make_dataset, make_run, make_scorer, make_store
from tests.report.test_page import blocks_of
from tests.stages.test_report import report

from diffcap.records import ChangePair
from diffcap.report.drawing import Thumbnail, is_correct
from diffcap.report.page import Page, System, render

MANY = 8_000
TYPES = ("add", "drop", "move", "color", "texture")
AT = 6  # of the 12 pixels of a canvas along a place of the map


class Report(Browser):
    """A window on a report."""

    def is_ready(self) -> bool:
        return bool(self.count())

    def count(self) -> str:
        return self.all("#count")[0].text

    def scroll_to(self, element: Any) -> None:
        self.js("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element)

    def choose(self, id: str, value: str) -> None:
        Select(self.all(f"#{id}")[0]).select_by_visible_text(value)

    def write(self, text: str) -> None:
        field = self.all("#search")[0]
        field.clear()
        field.send_keys(text or " ")  # an emptied field says nothing of it

    def press_type(self, name: str) -> None:
        chip = next(chip for chip in self.all(".chip") if chip.text.startswith(name))
        self.scroll_to(chip)
        chip.click()

    def listed(self) -> list[str]:
        """Ids of the pairs that pass the filters, in their order; "show more" is pressed until all are shown."""
        while self.all("#more")[0].is_displayed():
            self.show_more()
        return self.filled()

    def show_more(self) -> None:
        self.scroll_to(self.all("#more")[0])
        self.all("#more")[0].click()

    def filled(self) -> list[str]:
        """Ids of the pairs whose cards are shown."""
        return self.js("return [...document.querySelectorAll('#list .id')].map((one) => one.textContent)")

    def opacities(self, card: Any, grid: Sequence[int]) -> np.ndarray:
        """What covers the two pictures of a card in the middle of each place, (2, h, w), from 0 to 1."""
        script = """return [...arguments[0].querySelectorAll("canvas")].map((canvas) => {
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            return [canvas.width, canvas.height, [...data].filter((_, at) => at % 4 === 3)];
        });"""
        sides = []
        for width, height, alpha in self.js(script, card):
            assert [height, width] == [12 * cells for cells in grid]
            sides.append(np.array(alpha).reshape(height, width)[AT::12, AT::12] / 255)
        return np.stack(sides)

    def covers(self, card: Any) -> set[str]:
        """How much the heat of a word is to be seen on a card's pictures: {"0"} not at all, {"1"} wholly."""
        return {canvas.value_of_css_property("opacity") for canvas in card.find_elements("css selector", "canvas")}


class Made(NamedTuple):
    """A report, and what it was made from."""

    address: str
    index: dict[str, Any]
    attention: list[Any]
    pairs: list[ChangePair]
    predictions: dict[str, dict[str, str]]

    def expected(self, wanted: Callable[[ChangePair], Any]) -> list[str]:
        return [pair.id for pair in self.pairs if wanted(pair)]

    def is_correct(self, name: str, pair: ChangePair) -> bool:
        return bool(is_correct(self.predictions[name][pair.id], pair))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("report")
    dataset = make_dataset(folder / "data", 60)
    make_store(folder / "data", dataset.pairs)
    predictions = {"PCL": captions_of(dataset), "scratch": captions_of(dataset, wrong=7)}
    for name, captions in predictions.items():
        make_run(folder / "runs" / name, dataset, captions, {"finetune": 60.0})
    words = sorted({word for pair in dataset.pairs for caption in pair.captions for word in caption.split()})
    make_scorer(folder / "runs/PCL/finetune/best.ckpt", words, scale=4)
    runs = '{"PCL": "runs/PCL", "scratch": "runs/scratch"}'
    done = report(folder, runs, "--pictures=0", "--attention=0", "--bins=0")
    assert done.returncode == 0, done.stderr
    page = folder / "report" / "report.html"
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    attentions = [entry for number in range(len(blocks)) for entry in blocks.get(f"attention-{number}", [])]
    return Made(page.as_uri(), blocks["index"], attentions, test, predictions)


@pytest.fixture
def browse(request: pytest.FixtureRequest, made: Made) -> Iterator[Callable[..., Report]]:
    with windows(Report, request, made.address) as browse:
        yield browse


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dark", [False, True])
def test_all_is_there_and_nothing_is_fetched(browse: Any, made: Made, size: str, dark: bool, tmp_path: Path) -> None:
    browser = browse(size, dark)
    count = len(made.pairs)
    assert browser.count() == f"{count} of {count} pairs" and len(browser.listed()) == count
    for image in browser.all("#list img"):
        browser.wait(lambda image=image: browser.js("return arguments[0].naturalWidth", image) == 64)
    picture = browser.shoot(tmp_path / f"report_{size}_{'dark' if dark else 'light'}.png")
    assert browser.js("return document.documentElement.scrollWidth") <= picture.width  # nothing sticks out
    corner = np.asarray(picture.convert("L"))[-40:, :8].mean()
    assert (corner < 60) if dark else (corner > 200)
    assert browser.requests() == [made.address] and not browser.faults()


@pytest.mark.parametrize("size", SIZES)
def test_the_menu_the_main_scores_and_the_charts_are_visible(browse: Any, made: Made, size: str) -> None:
    browser = browse(size)
    width = browser.js("return innerWidth")
    links = browser.all(".links a")
    assert {"#scores", "#pairs", "#provenance"} <= {link.get_dom_attribute("href") for link in links}
    assert all(link.rect["x"] >= 0 and link.rect["x"] + link.rect["width"] <= width for link in links)
    table = browser.all("#scores .scroll")[0]
    names = table.find_elements("css selector", "thead th")
    cider = next(name for name in names if name.text == "CIDEr-D")
    assert cider.rect["x"] + cider.rect["width"] <= table.rect["x"] + table.rect["width"] <= width
    legend = browser.all("#symbols")[0].text
    assert all(symbol in legend for symbol in "✓✗▸⇄") and "box of the changed object" in legend


def test_pointing_at_a_word_shows_its_heat_and_arrows_go_on(browse: Any, made: Made) -> None:
    browser = browse()
    browser.choose("sort", "as in the dataset")
    card = browser.wait(lambda: browser.all("#list .card"))[0]
    browser.scroll_to(card)
    attention_map = made.attention[made.index["pairs"][0]["l"]][0]
    words = card.find_elements("css selector", ".word")
    assert [word.text for word in words] == attention_map["w"] == made.predictions["PCL"][made.pairs[0].id].split()
    maps = np.stack([np.frombuffer(base64.b64decode(attention_map[side]), np.uint8) for side in "ba"]) / 255
    maps = maps.reshape(2, len(words), *attention_map["g"])
    expected = 0.85 * np.minimum(1, 1.5 * maps)
    assert expected.max() > 0.2 and browser.covers(card) == {"0"}

    def shown() -> list[str]:
        return [word.text for word in card.find_elements("css selector", ".word.shown")]

    for number in (2, 0):
        browser.point_at(words[number])
        browser.wait(lambda number=number: browser.covers(card) == {"1"} and shown() == [words[number].text])
        assert browser.opacities(card, attention_map["g"]) == pytest.approx(expected[:, number], abs=0.06)
    browser.point_at(browser.all("#count")[0])
    browser.wait(lambda: browser.covers(card) == {"0"} and not shown())
    words[0].send_keys(Keys.ARROW_RIGHT)
    browser.wait(lambda: browser.covers(card) == {"1"} and shown() == [words[1].text])
    browser.driver.switch_to.active_element.send_keys(Keys.END)
    browser.wait(lambda: shown() == [words[-1].text])
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    browser.wait(lambda: shown() == [words[-2].text])
    words[1].click()  # holds it
    browser.point_at(browser.all("#count")[0])
    browser.js("document.activeElement.blur()")
    browser.wait(lambda: shown() == [words[1].text] and words[1].get_attribute("aria-pressed") == "true")


def test_filters_leave_the_pairs_that_are_asked_for(browse: Any, made: Made) -> None:
    browser = browse()
    browser.choose("sort", "as in the dataset")
    assert browser.listed() == made.expected(lambda pair: True)
    kind = made.index["types"][0]
    browser.press_type(kind)
    alone = made.expected(lambda pair: pair.change_type == kind)
    assert 0 < len(alone) < len(made.pairs) and browser.listed() == alone
    browser.press_type(kind)
    browser.choose("by", "scratch")
    for verdict, wanted in {
        "wrong": lambda pair: not made.is_correct("scratch", pair),
        "right": lambda pair: made.is_correct("scratch", pair),
        "where systems differ": lambda pair: made.is_correct("scratch", pair) != made.is_correct("PCL", pair),
    }.items():
        browser.choose("verdict", verdict)
        found = made.expected(wanted)
        assert 0 < len(found) < len(made.pairs) and browser.listed() == found
        assert browser.count() == f"{len(found)} of {len(made.pairs)} pairs"
    browser.choose("verdict", "all")

    def has(pair: ChangePair, word: str) -> bool:
        texts = [pair.id, *pair.captions, *(predictions[pair.id] for predictions in made.predictions.values())]
        return any(word in text.lower() for text in texts)

    for word in ("cone", made.pairs[3].id):
        found = made.expected(lambda pair, word=word: has(pair, word))
        assert 0 < len(found) < len(made.pairs)
        browser.write(word.upper())
        browser.wait(lambda found=found: browser.count() == f"{len(found)} of {len(made.pairs)} pairs")
        assert browser.listed() == found
    browser.write("no such word")
    browser.wait(lambda: browser.count() == "no pair passes the filters; remove one")


def many_pairs() -> Page:
    """A page of so many pairs without attention."""
    pairs, predictions, scores = [], {}, {}
    for number in range(MANY):
        color = ("red", "green", "blue")[number % 3]
        changed = {"size": "small", "color": color, "material": "metal", "shape": "cube"}
        id, kind = f"{number:05}.png", TYPES[number % len(TYPES)]
        pairs.append(ChangePair(id, f"b{number}", "a", ["it moved"], "test", kind, False, {"changed": changed}))
        predictions[id] = f"the small {color} metal cube moved"
        scores[id] = (7 * number % MANY) / 1000
    file = io.BytesIO()
    Image.new("RGB", (144, 108), "red").save(file, "WEBP")
    thumbnail = Thumbnail(480, 360, base64.b64encode(file.getvalue()).decode())
    pictures = {path: thumbnail for pair in pairs for path in pair.images}
    protocol = {"dataset": "blocks", "split": "test", "pairs": {"total": MANY}, "tokenizer": "raw", "beams": 1}
    rows = {"one": {"total": {"CIDEr-D": 1.25}, "seconds": 60.0}}
    return Page(protocol, rows, {"one": System(predictions, scores)}, pairs, pictures)


def test_8000_pairs_are_listed_filtered_and_sorted(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path, page = tmp_path / "report.html", many_pairs()
    path.write_text(render(page), encoding="utf-8")
    with windows(Report, request, path.as_uri()) as browse:
        browser = browse()
        assert browser.count() == "8,000 of 8,000 pairs"
        cards = browser.wait(lambda: browser.all("#list .card"))
        assert len(cards) == 60 and browser.js("return document.documentElement.scrollHeight") < 40_000
        browser.show_more()
        assert len(browser.all("#list .card")) == 120 and "120 of 8,000 shown" in browser.all("#more")[0].text
        browser.wait(lambda: browser.js("return arguments[0].querySelector('img').naturalWidth", cards[0]) == 144)
        moved = [pair for pair in page.pairs if pair.change_type == "move"]
        browser.press_type("move")
        browser.write("blue")
        blue = [pair.id for pair in moved if pair.extra["changed"]["color"] == "blue"]
        browser.wait(lambda: browser.count() == f"{len(blue)} of 8,000 pairs")
        scores = page.systems["one"].scores
        for order, sign in (("best first", -1), ("worst first", 1)):
            browser.choose("sort", order)
            assert browser.filled() == sorted(blue, key=lambda id: sign * round(100 * scores[id], 1))[:60]
        browser.choose("sort", "as in the dataset")
        browser.show_more()
        assert browser.filled() == blue[:120]
        assert browser.requests() == [path.as_uri()] and not browser.faults()
