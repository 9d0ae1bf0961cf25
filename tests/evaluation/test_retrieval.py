"""Recall and rank against a loop over every sentence and every pair."""

import pytest
import torch
from torch import Tensor

from diffcap.evaluation.retrieval import PairRetrieval, PairToText


def naive(pairs: Tensor, texts: Tensor, owners: list[int]) -> dict[str, float]:
    cosine = torch.nn.functional.normalize(texts, dim=1) @ torch.nn.functional.normalize(pairs, dim=1).T
    rows: list[list[float]] = cosine.tolist()
    places: dict[str, list[int]] = {"t2p": [], "p2t": []}
    for text, owner in enumerate(owners):
        places["t2p"].append(1 + sum(rows[text][pair] > rows[text][owner] for pair in range(len(pairs))))
    for number in range(len(pairs)):
        best = max(rows[text][number] for text, owner in enumerate(owners) if owner == number)
        others = [rows[text][number] for text, owner in enumerate(owners) if owner != number]
        places["p2t"].append(1 + sum(other > best for other in others))
    return {name: value for way, found in places.items() for name, value in scores_of(way, found).items()}


def scores_of(way: str, places: list[int]) -> dict[str, float]:
    scores = {f"{way}_R@{cut}": sum(place <= cut for place in places) / len(places) for cut in (1, 5, 10)}
    return {**scores, f"{way}_mean_rank": sum(places) / len(places)}


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


def naive_among_pairs(pairs: Tensor, texts: Tensor, owners: list[int]) -> dict[str, float]:
    """CLIP4IDC's released definition: a pair is as similar to another as to its most similar caption; equal ones do not count."""
    cosine = torch.nn.functional.normalize(texts, dim=1) @ torch.nn.functional.normalize(pairs, dim=1).T
    places = []
    for number in range(len(pairs)):
        best = [
            max(cosine[text, number].item() for text, owner in enumerate(owners) if owner == other)
            for other in range(len(pairs))
        ]
        places.append(1 + sum(score > best[number] for score in best))
    return scores_of("p2t", places)


def test_the_released_definition_ranks_pairs_and_counts_shared_captions_at_the_better_rank() -> None:
    pairs, texts, owners = draw()
    texts[owners.index(4)] = texts[owners.index(3)].clone()  # a caption that two pairs share
    shared = texts[owners.index(2)].clone()
    for number in (7, 8, 9):
        texts[[place for place, owner in enumerate(owners) if owner == number]] = shared
    metric = PairRetrieval("pairs")
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1))
    metric.update(pairs, torch.arange(15), texts[order], order, torch.tensor(owners)[order])
    found = {name: value.item() for name, value in metric.compute().items()}
    expected = naive_among_pairs(pairs, texts, owners)
    assert 0.1 < expected["p2t_R@1"] < 0.9
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    strict = PairRetrieval()
    strict.update(pairs, torch.arange(15), texts, torch.arange(len(texts)), torch.tensor(owners))
    other = {name: value.item() for name, value in strict.compute().items()}
    assert {name: found[name] for name in found if name.startswith("t2p")} == pytest.approx(
        {name: other[name] for name in other if name.startswith("t2p")}
    )
    assert other["p2t_mean_rank"] > found["p2t_mean_rank"]  # among captions, the shared ones are competitors
