"""Speed of CIDEr-D with cached document frequencies against pycocoevalcap's, on captions of `blocks`' grammar, on one core."""

import random
import time
from collections.abc import Callable
from typing import Any

from diffcap.utils.console import run


def cider(
    pairs: int = 2400, references: int = 6, hypotheses: int = 160, repeats: int = 3, out: str | None = None
) -> None:
    """Score a whole split, and the draws of one self-critical step; check that both give the same numbers.

    pycocoevalcap takes its document frequencies from the captions that it scores; for the draws of a step it is given those of
    the corpus, whose counting is left out of both times.

    Args:
        pairs: of the corpus. references: of each pair. hypotheses: drawn captions of a step, five of each pair.
        repeats: timed runs, of which the fastest counts. out: a JSON file for the numbers, too.
    """
    import numpy as np
    from pycocoevalcap.cider.cider_scorer import CiderScorer, cook_test

    from diffcap.evaluation.cider import CiderD
    from diffcap.records import write_json

    draws = random.Random(0)
    references_of = {str(pair): [caption(draws) for _ in range(references)] for pair in range(pairs)}
    predictions = [draws.choice(references_of[draws.choice(list(references_of))]) for _ in references_of]
    few = [pair for pair in list(references_of)[: hypotheses // 5] for _ in range(5)]
    drawn = [draws.choice(predictions) for _ in few]

    def stock() -> Any:
        scorer = CiderScorer(n=4, sigma=6.0)
        for text, captions in zip(predictions, references_of.values()):
            scorer += (text, captions)
        return scorer.compute_score()[1]

    class OfCorpus(list):
        """References of some images that count as all: the scorer takes the number of images from its list."""

        def __len__(self) -> int:
            return len(references_of)

    full_scorer = CiderD(references_of)
    corpus = CiderScorer(n=4, sigma=6.0)
    for text, captions in zip(predictions, references_of.values()):
        corpus += (text, captions)
    corpus.compute_doc_freq()

    def stock_step() -> Any:
        scorer = CiderScorer(n=4, sigma=6.0)
        scorer.document_frequency = corpus.document_frequency
        scorer.crefs = OfCorpus([corpus.crefs[int(pair)] for pair in few])
        scorer.ctest = [cook_test(text) for text in drawn]
        return np.array(scorer.compute_cider())

    cases: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        f"{pairs:,} pairs, one hypothesis each, document frequencies counted": (
            stock,
            lambda: CiderD(references_of)(list(references_of), predictions),
        ),
        f"{len(few)} draws of {len(set(few))} pairs, document frequencies known": (
            stock_step,
            lambda: full_scorer(few, drawn),
        ),
    }
    rows = {}
    for name, (theirs, ours) in cases.items():
        np.testing.assert_allclose(ours(), theirs(), rtol=0, atol=1e-6)
        slow, fast = (fastest(form, repeats) for form in (theirs, ours))
        rows[name] = {"pycocoevalcap_s": slow, "cached_s": fast, "ratio": slow / fast}
        print(f"{name}: {slow:.4f} s against {fast:.4f} s, {slow / fast:.1f} x")
    if out:
        write_json(out, rows)


def fastest(form: Callable[[], Any], repeats: int) -> float:
    """Seconds on the processor of the fastest of some runs; the machine may be busy with others."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        form()
        times.append(time.process_time() - start)
    return min(times)


def caption(draws: random.Random) -> str:
    """A sentence of six to twelve words, as `blocks` has them."""
    size, color, stuff = (
        draws.choice(["large", "small"]),
        draws.choice(["red", "blue", "gray"]),
        draws.choice(["metal", "matte"]),
    )
    thing = f"{size} {color} {stuff} {draws.choice(['cube', 'sphere', 'cylinder'])}"
    return draws.choice(
        [
            f"the {thing} has disappeared",
            f"someone moved the {thing} to a different location",
            f"a {thing} has been added",
        ]
    )


if __name__ == "__main__":
    run(cider)
