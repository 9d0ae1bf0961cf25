"""Recall and rank against a loop over every sentence and every pair."""

import pytest
import torch
from torch import Tensor

from diffcap.evaluation.retrieval import PairRetrieval, PairToText


def naive(pairs: Tensor, texts: Tensor, owners: list[int], pair_to_text: PairToText = "captions") -> dict[str, float]:
    cosine = torch.nn.functional.normalize(texts, dim=1) @ torch.nn.functional.normalize(pairs, dim=1).T
    rows: list[list[float]] = cosine.tolist()
    places: dict[str, list[int]] = {"t2p": [], "p2t": []}
    for text, owner in enumerate(owners):
        places["t2p"].append(1 + sum(rows[text][pair] > rows[text][owner] for pair in range(len(pairs))))
    for number in range(len(pairs)):
        candidates = [row[number] for row in rows]
        own = [score for score, owner in zip(candidates, owners) if owner == number]
        if pair_to_text == "pairs":  # CLIP4IDC's code: a pair is as similar to another as to its most similar caption
            by_pair = [[score for score, owner in zip(candidates, owners) if owner == n] for n in range(len(pairs))]
            candidates = list(map(max, by_pair))
        places["p2t"].append(1 + sum(score > max(own) for score in candidates))
    scores = {}
    for way, ranks in places.items():
        scores |= {f"{way}_R@{cut}": sum(place <= cut for place in ranks) / len(ranks) for cut in (1, 5, 10)}
        scores[f"{way}_mean_rank"] = sum(ranks) / len(ranks)
    return scores


def draw() -> tuple[Tensor, Tensor, list[int]]:
    draws = torch.Generator().manual_seed(0)
    pairs, owners = torch.randn(15, 4, generator=draws), [number for number in range(15) for _ in range(1 + number % 3)]
    texts = pairs[owners] + 0.8 * torch.randn(len(owners), 4, generator=draws)
    return pairs, texts, owners


def test_scores_are_the_loops_in_any_batches_and_order() -> None:
    pairs, texts, owners = draw()
    expected = naive(pairs, texts, owners)
    assert 0.1 < expected["t2p_R@1"] < 0.9 and 0.1 < expected["p2t_R@1"] < 0.9
    for order in (range(15), [*range(7, 15), *range(7)]):
        metric = PairRetrieval()
        for number in order:
            mine = torch.tensor([place for place, owner in enumerate(owners) if owner == number])
            metric.update(pairs[[number]], torch.tensor([number]), texts[mine], mine, torch.tensor(owners)[mine])
        assert {name: value.item() for name, value in metric.compute().items()} == pytest.approx(expected)


def test_a_pair_added_twice_counts_once() -> None:
    pairs, texts, owners = draw()
    metric = PairRetrieval()
    numbers, places, owned = torch.arange(15), torch.arange(len(texts)), torch.tensor(owners)
    metric.update(pairs, numbers, texts, places, owned)
    metric.update(pairs[:2], numbers[:2], texts[:3], places[:3], owned[:3])
    assert {name: value.item() for name, value in metric.compute().items()} == pytest.approx(
        naive(pairs, texts, owners)
    )


@pytest.mark.parametrize(
    ("pair_to_text", "value"), [("captions", 1.0), ("captions", float("nan")), ("pairs", float("nan"))]
)
def test_vectors_that_are_all_alike_have_the_last_rank(pair_to_text: PairToText, value: float) -> None:
    metric, numbers, alike = PairRetrieval(pair_to_text), torch.arange(20), torch.full((20, 3), value)
    metric.update(alike, numbers, alike, numbers, numbers)
    scores = metric.compute()
    assert scores["t2p_R@10"] == 0 and scores["p2t_mean_rank"] == 20


def test_the_released_definition_ranks_pairs_and_counts_shared_captions_at_the_better_rank() -> None:
    pairs, texts, owners = draw()
    texts[owners.index(4)] = texts[owners.index(3)].clone()  # a caption that two pairs share
    shared = texts[owners.index(2)].clone()
    for number in (7, 8, 9):
        texts[[place for place, owner in enumerate(owners) if owner == number]] = shared
    metric = PairRetrieval("pairs")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1))
    metric.update(pairs, torch.arange(15), texts[order], order, torch.tensor(owners)[order])
    expected = naive(pairs, texts, owners, "pairs")
    assert 0.1 < expected["p2t_R@1"] < 0.9
    assert {name: value.item() for name, value in metric.compute().items()} == pytest.approx(expected)
    strict = PairRetrieval()
    strict.update(pairs, torch.arange(15), texts, torch.arange(len(texts)), torch.tensor(owners))
    # Among captions, the shared ones are competitors.
    assert strict.compute()["p2t_mean_rank"] > expected["p2t_mean_rank"]
