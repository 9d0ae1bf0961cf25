"""CIDEr-D from cached counts equals pycocoevalcap's to the last digit, caption by caption."""

import random

import numpy as np
import pytest
from pycocoevalcap.cider.cider_scorer import CiderScorer
from tests.toy import pairs

from diffcap.evaluation.ngrams import MAX_WORDS, CiderD
from diffcap.utils.errors import DiffcapError

References = dict[str, list[str]]


def stock(references: References, hypotheses: dict[str, str]) -> np.ndarray:
    """pycocoevalcap's score of one hypothesis of every image."""
    scorer = CiderScorer(n=4, sigma=6.0)
    for image, captions in references.items():
        scorer += (hypotheses[image], captions)
    return scorer.compute_score()[1]


def agree(references: References, hypotheses: dict[str, str]) -> np.ndarray:
    found = CiderD(references)(list(references), [hypotheses[image] for image in references])
    np.testing.assert_array_equal(found, stock(references, hypotheses))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_random_captions_score_as_pycocoevalcap_has_it(seed: int) -> None:
    draws = random.Random(seed)
    words = [f"w{number}" for number in range(draws.choice([2, 5, 40]))]

    def caption(least: int = 0) -> str:
        return " ".join(draws.choices(words, k=draws.randint(least, 9)))

    images = [f"image {number}" for number in range(draws.randint(1, 9))]
    references = {image: [caption(1), *(caption() for _ in range(draws.randint(0, 4)))] for image in images}
    for captions in references.values():
        captions += captions[: draws.randint(0, 1)]  # a reference twice
    agree(
        references,
        {i: draws.choice([caption(), "", references[i][0], caption() + " new new words new"]) for i in images},
    )


def test_many_hypotheses_of_few_images_score_as_each_of_them_alone() -> None:
    draws = random.Random(1)
    references = {pair.id: pair.captions for pair in pairs(30)}
    all_captions = [caption for captions in references.values() for caption in captions]
    cider, images = CiderD(references), draws.choices(list(references)[:3], k=50)
    hypotheses = [draws.choice(["", draws.choice(all_captions), *references[image]]) for image in images]
    together = cider(images, hypotheses)
    alone = [cider([image], [text])[0] for image, text in zip(images, hypotheses)]
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-12)
    # The document frequencies are the corpus's, whichever images are scored.
    others = {image: "" for image in references}
    for image, text, score in list(zip(images, hypotheses, together))[:8]:
        whole = stock(references, {**others, image: text})
        assert score == pytest.approx(whole[list(references).index(image)], abs=1e-6)
    assert len(cider([], [])) == 0


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match="'b' has no reference"):
        CiderD({"a": ["x"], "b": []})
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        CiderD({"a": ["x"]})(["a", "a"], ["x"])
    with pytest.raises(KeyError):
        CiderD({"a": ["x"]})(["b"], ["x"])
    with pytest.raises(DiffcapError, match="different words"):
        CiderD({"a": [" ".join(map(str, range(MAX_WORDS + 1)))]})
    assert CiderD({"a": [""], "b": ["", ""]})(["b"], ["x y"]).tolist() == [0.0]
