"""The captioners that ship with the package, on pairs that they were not trained on."""

import pytest

from diffcap.datasets.no_change import LEVIR_CC
from diffcap.pair_captioner import SHIPPED_CAPTIONERS, load_captioner
from diffcap.web.result import render_examples

EXPECTED = {  # words, one of which a right caption of the example has
    "other colour": {"turned", "changed", "became", "purple"},
    "something new": {"added", "appeared", "new", "introduced"},
    "something gone": {"missing", "disappeared", "removed", "gone", "vanished", "there"},
    "new houses": {"houses"},
    "new road": {"road"},
    "new water": {"pond", "lake"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED_CAPTIONERS)
def test_the_examples_of_the_page_are_described(name: str) -> None:
    captioner = load_captioner(name, device="cpu")
    examples = [each for each in render_examples() if each.captioner == name]
    captions = {each.title: captioner(each.before, each.after).text for each in examples}
    right = {title: EXPECTED[title] & set(captions[title].split()) for title in captions if title in EXPECTED}
    assert len(right) == 3 and all(right.values()), captions
    if name == "tiles":
        assert captions["only the season"] in LEVIR_CC


def test_they_are_small() -> None:
    for folder in SHIPPED_CAPTIONERS.values():
        assert sum(path.stat().st_size for path in folder.iterdir()) < 4_000_000
