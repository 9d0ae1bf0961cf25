"""Retrieval of image pairs by captions and the reverse, as in CLIP4IDC. Letters: P pairs, C captions, E embedding width."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

RECALL_KS = (1, 5, 10)
PairToText = Literal["captions", "pairs"]


class PairRetrieval(Metric):
    """R@1, R@5, R@10 and mean rank in both directions, by cosine similarity.

    "t2p" (text to pair) ranks each caption's pair among all pairs: behind pairs of equal similarity, and last if its similarity is NaN.

    Args:
        pair_to_text: candidates that "p2t" (pair to text) ranks for each pair.
            "captions": all captions. The rank is that of the most similar caption of the pair, behind other captions of equal similarity.
            "pairs": all pairs, each by its most similar caption. The rank is that of the pair itself, before other pairs of equal
            similarity, because several pairs may share a caption (authors' code of CLIP4IDC).

    Example:
        >>> metric = PairRetrieval()
        >>> pairs, captions = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.9, 0.1], [0.8, 0.6]])
        >>> metric.update(pairs, torch.tensor([0, 1]), captions, torch.tensor([0, 1]), torch.tensor([0, 1]))
        >>> scores = metric.compute()
        >>> scores["t2p_R@1"].item(), scores["t2p_mean_rank"].item(), scores["p2t_R@1"].item()
        (0.5, 1.5, 1.0)
    """

    full_state_update = False
    higher_is_better = None
    pairs: list[Tensor]  # embeddings
    pair_numbers: list[Tensor]  # numbers in the dataset, to recognise repeated pairs
    captions: list[Tensor]  # embeddings
    caption_numbers: list[Tensor]
    own_pair_numbers: list[Tensor]  # number of each caption's pair

    def __init__(self, pair_to_text: PairToText = "captions", **options: Any) -> None:
        super().__init__(**options)
        self.pair_to_text = pair_to_text
        for name in ("pairs", "pair_numbers", "captions", "caption_numbers", "own_pair_numbers"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(
        self, pairs: Tensor, pair_numbers: Tensor, captions: Tensor, caption_numbers: Tensor, own_pair_numbers: Tensor
    ) -> None:
        """Add embeddings of pairs (P, E) and captions (C, E), their numbers in the dataset, and the number of each caption's pair."""
        self.pairs.append(F.normalize(pairs.float(), dim=-1))
        self.pair_numbers.append(pair_numbers)
        self.captions.append(F.normalize(captions.float(), dim=-1))
        self.caption_numbers.append(caption_numbers)
        self.own_pair_numbers.append(own_pair_numbers)

    def compute(self) -> dict[str, Tensor]:
        """Return `t2p_R@1`, `t2p_R@5`, `t2p_R@10` (fractions), `t2p_mean_rank` (1 is best), and the same for `p2t`.

        Lightning repeats pairs so that all processes have the same number of pairs. Here, each pair and each caption counts once.
        """
        pair_rows, pair_numbers = _first_occurrences(dim_zero_cat(self.pair_numbers))
        caption_rows, _ = _first_occurrences(dim_zero_cat(self.caption_numbers))
        pairs = dim_zero_cat(self.pairs)[pair_rows]
        captions = dim_zero_cat(self.captions)[caption_rows]
        own_pair_numbers = dim_zero_cat(self.own_pair_numbers)[caption_rows]
        similarity = captions @ pairs.T  # (C, P)
        is_match = own_pair_numbers[:, None] == pair_numbers  # (C, P)
        ranks = {"t2p": _rank_of_match(similarity, is_match)}
        if self.pair_to_text == "pairs":
            # Rank each pair among all pairs by their best captions; ties get the best rank, NaN the last rank.
            num_pairs = similarity.shape[1]
            pair_of_caption = is_match.int().argmax(1)  # (C,)
            best = similarity.new_full((num_pairs, num_pairs), float("-inf"))
            index = pair_of_caption[:, None].expand_as(similarity)
            # best[i, j]: the greatest similarity of a caption of pair i with pair j.
            best = best.scatter_reduce(0, index, similarity, "amax")
            own_best = best.diagonal()
            ranks["p2t"] = torch.where(own_best.isnan(), num_pairs, 1 + (best > own_best).sum(0))
        else:
            ranks["p2t"] = _rank_of_match(similarity.T, is_match.T)
        scores: dict[str, Tensor] = {}
        for direction, rank in ranks.items():
            scores |= {f"{direction}_R@{k}": (rank <= k).float().mean() for k in RECALL_KS}
            scores[f"{direction}_mean_rank"] = rank.float().mean()
        return scores


def _rank_of_match(similarity: Tensor, is_match: Tensor) -> Tensor:
    """Return the rank of the best match of each query (row) among the candidates (columns) that do not match; ties and NaN rank last."""
    best_match = similarity.masked_fill(~is_match, float("-inf")).amax(1, keepdim=True)
    is_less_similar = similarity < best_match
    return 1 + (~is_less_similar & ~is_match).sum(1)


def _first_occurrences(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first occurrence of each distinct number, and the distinct numbers."""
    unique, inverse = numbers.unique(return_inverse=True)
    first_indices = torch.full((len(unique),), len(numbers), device=numbers.device)
    indices = torch.arange(len(numbers), device=numbers.device)
    return first_indices.scatter_reduce(0, inverse, indices, "amin"), unique
