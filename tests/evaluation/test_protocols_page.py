"""Tables of the documentation: the worked figure and the ranks of docs/protocols.md, and the means of published scores."""

from pathlib import Path

import pytest
import torch

from diffcap.evaluation.captions import score_tokens
from diffcap.evaluation.retrieval import PairRetrieval

PAGE = Path(__file__).parents[2] / "docs/protocols.md"
LEVIR_CC = PAGE.with_name("datasets") / "levir_cc.md"


def rows(heading: str, page: Path = PAGE) -> list[list[str]]:
    """The cells of the Markdown table that begins with a heading."""
    text = page.read_text().split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_total_is_no_average() -> None:
    pairs = rows("pair")
    predictions = {name: captioned for name, _, captioned, _ in pairs}
    references = {name: [reference] for name, _, _, reference in pairs}
    groups = {
        kind: [name for name, group, *_ in pairs if kind in (group, "total")]
        for kind in ("semantic", "distractor", "total")
    }
    scores = score_tokens(predictions, references, groups, ["ROUGE-L", "CIDEr-D"])
    printed = {group: (float(rouge), float(cider)) for group, rouge, cider in rows("group | ROUGE-L | CIDEr-D")}
    assert printed.keys() == scores.keys() == groups.keys()
    for group, (rouge, cider) in printed.items():
        assert 100 * scores[group]["ROUGE-L"] == pytest.approx(rouge, abs=0.005)
        assert 100 * scores[group]["CIDEr-D"] == pytest.approx(cider, abs=0.005)
    semantic, distractor, total = (scores[group] for group in ("semantic", "distractor", "total"))
    assert total["ROUGE-L"] == pytest.approx((semantic["ROUGE-L"] + distractor["ROUGE-L"]) / 2)
    assert total["CIDEr-D"] > max(semantic["CIDEr-D"], distractor["CIDEr-D"])


def test_equal_similarities_have_the_rank_that_the_page_says() -> None:
    table = rows("| ranked | equal similarities")
    assert len(table) == 3
    alike, numbers = torch.tensor([1.0, 0.0]).repeat(20, 1), torch.arange(20)
    for direction, _, rank in table:
        metric = PairRetrieval("captions" if "pair_to_text=captions" in direction else "pairs")
        metric.update(alike, numbers, alike, numbers, own_pair_numbers=numbers)
        found = metric.compute()["t2p_mean_rank" if "t2p" in direction else "p2t_mean_rank"]
        assert found == {"the worst rank": 20, "the best rank": 1}[rank], direction


def test_published_remote_sensing_scores_have_the_mean_that_is_printed() -> None:
    table = rows("system | BLEU-1 | BLEU-2 | BLEU-3 | BLEU-4 | METEOR | ROUGE-L | CIDEr-D | S*m | source", LEVIR_CC)
    assert len(table) == 18
    for name, *_, bleu, meteor, rouge, cider, mean, _ in table:
        printed = mean.split("mean ")[-1].rstrip(")")  # in brackets after the misprint
        assert sum(map(float, (bleu, meteor, rouge, cider))) / 4 == pytest.approx(float(printed), abs=0.0101), name
