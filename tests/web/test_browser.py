"""The page in a real browser; `make test-web`, since an ordinary machine has none.

Screenshots go to pytest's temporary folder, which --basetemp names.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys
from tests.browser import SIZES, Browser, windows
from tests.odd_images import encoded
from tests.web.site import SHIPPED, served

from diffcap.pair_captioner import load_captioner
from diffcap.web.captioners import Captioners, Choice
from diffcap.web.middleware import MAX_FILE_BYTES
from diffcap.web.result import render_examples


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    choices = [SHIPPED, Choice("SCORER · blocks · the same again", None)]
    with served(tmp_path_factory.mktemp("uploads"), Captioners(choices, "cpu")) as found:
        yield found


class Page(Browser):
    """A window on the page."""

    def is_ready(self) -> bool:
        return bool(self.all(".dc-example") and self.all("#ask"))

    def words(self) -> list[str]:
        """The words of the answer, once all have come."""
        self.wait(lambda: self.all(".dc-word") and not self.all(".dc-coming"))
        return [word.get_attribute("aria-label").rpartition(",")[0] for word in self.all(".dc-word")]

    def lit(self) -> list[str]:
        """The numbers of the words whose heat is to be seen."""
        return [layer.get_attribute("data-word") for layer in self.all(".dc-heat.dc-on")]

    def example(self, number: int) -> None:
        """Press an example, once gradio's veil of a page that still loads is gone."""
        self.wait(
            lambda: not [veil for veil in self.all("#examples [data-testid=status-tracker]") if veil.is_displayed()]
        )
        self.all(".dc-example")[number].click()

    def put(self, zone: str, path: Path) -> None:
        self.all(f"#zone-{zone} input[type=file]")[0].send_keys(str(path))

    def output(self, place: str) -> str:
        return self.wait(lambda: " ".join(one.text for one in self.all(f"{place} .dc-message")))


@pytest.fixture
def browse(request: pytest.FixtureRequest, address: str) -> Iterator[Callable[..., Page]]:
    with windows(Page, request, address) as browse:
        yield browse


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dark", [False, True])
def test_an_example_is_captioned_word_by_word(browse: Any, address: str, size: str, dark: bool, tmp_path: Path) -> None:
    browser = browse(size, dark)
    example = render_examples()[0]
    browser.example(0)
    caption = load_captioner(device="cpu")(example.before, example.after, 5)
    assert browser.words() == [word.text for word in caption.words]
    assert len(browser.all(".dc-beams tbody tr")) == 1 + len(caption.alternatives)
    picture = browser.shoot(tmp_path / f"page_{size}_{'dark' if dark else 'light'}.png")
    assert picture.width == SIZES[size][0]
    assert browser.js("return document.documentElement.scrollWidth") <= picture.width  # nothing sticks out
    corner = np.asarray(picture.convert("L"))[-40:, :8].mean()
    assert (corner < 60) if dark else (corner > 200)
    asked = browser.requests()
    assert len(asked) > 10 and {urlsplit(url).netloc for url in asked} == {urlsplit(address).netloc}
    assert not browser.faults()


def test_pointing_at_a_word_shows_its_heat_and_pressing_holds_it(browse: Any) -> None:
    browser = browse()
    browser.example(1)
    browser.words()
    words = browser.all(".dc-word")
    browser.wait(lambda: browser.lit())
    for number in (0, 3):
        browser.point_at(words[number])
        browser.wait(lambda number=number: browser.lit() == [str(number)] * 2)  # one on each picture
    heat, photo = browser.all('.dc-heat[data-word="3"]')[0], browser.all(".dc-photo")[0]
    assert heat.rect == photo.rect and heat.rect["width"] > 200
    assert photo.value_of_css_property("filter") == "none"  # the image keeps its colours under the map
    browser.wait(lambda: heat.value_of_css_property("opacity") == "1")
    words[3].click()
    browser.point_at(browser.all("h1")[0])
    browser.wait(lambda: browser.lit() == ["3", "3"])
    assert words[3].get_attribute("aria-pressed") == "true"
    words[3].click()
    browser.point_at(browser.all("h1")[0])
    browser.wait(lambda: browser.lit() == [])
    words[3].send_keys(Keys.ARROW_RIGHT)
    browser.wait(lambda: browser.lit() == ["4", "4"])
    browser.all(".dc-play")[0].click()
    browser.wait(lambda: browser.all(".dc-coming"))
    browser.words()


def test_ones_own_pictures_and_another_captioner(browse: Any, tmp_path: Path) -> None:
    browser = browse()
    example = render_examples()[3]
    for side, image in (("before", example.before), ("after", example.after)):
        (tmp_path / f"{side}.tif").write_bytes(encoded(image, "TIFF"))
        browser.put(side, tmp_path / f"{side}.tif")
        shown = browser.wait(lambda side=side: browser.all(f"#zone-{side} img"))
        # A browser cannot show TIFF: the server gave it something that it can.
        browser.wait(lambda shown=shown: browser.js("return arguments[0].naturalWidth", shown[0]) == 256)
    caption = load_captioner(device="cpu")(example.before, example.after, 5)
    assert browser.words() == [word.text for word in caption.words]  # without a press of the button
    assert "ships with diffcap" in browser.all(".dc-metadata")[0].text
    browser.all("#captioner input")[0].click()
    browser.wait(lambda: browser.all("[role=option]"))[1].click()
    browser.all("#ask")[0].click()
    browser.wait(lambda: "the same again" in browser.all(".dc-metadata")[0].text)
    assert browser.words() == [word.text for word in caption.words]


def test_what_is_no_picture_and_what_is_too_large_is_a_sentence(browse: Any, tmp_path: Path) -> None:
    browser = browse()
    browser.all("#ask")[0].click()
    assert browser.output("#answer") == "Give both pictures first: drop it above, or try an example."
    (tmp_path / "notes.png").write_bytes(b"dear diary\n")
    browser.put("before", tmp_path / "notes.png")
    assert "(notes.png): a text file, not an image" in browser.output("#message-before")
    assert not browser.all("#zone-before img")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    browser.put("after", tmp_path / "large.png")
    browser.wait(lambda: "maximum allowed size" in browser.all("body")[0].text)
