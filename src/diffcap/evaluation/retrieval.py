"""Finding the pair of a sentence and the sentence of a pair: recall and rank, over all ranks (CLIP4IDC, README).

Letters: P pairs, C sentences, E width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

CUTS = (1, 5, 10)


class PairRetrieval(Metric):
    """R@1, R@5, R@10 and mean rank both ways, by cosine.

    "t2p": for each sentence the place of its pair among all pairs. "p2t": for each pair the place of its best sentence
    among all sentences. Of equals the worst place counts, so that vectors that are all alike, or no numbers,
    score nothing.
    """

    full_state_update = False
    higher_is_better = None
    pairs: list[Tensor]
    pair_numbers: list[Tensor]
    texts: list[Tensor]
    text_numbers: list[Tensor]
    owners: list[Tensor]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("pairs", "pair_numbers", "texts", "text_numbers", "owners"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, pairs: Tensor, numbers: Tensor, texts: Tensor, text_numbers: Tensor, owners: Tensor) -> None:
        """Add pairs and sentences.

        Args:
            pairs: (P, E). numbers: (P,) of the pairs. texts: (C, E). text_numbers: (C,) of the sentences. owners: (C,) the
                number of each sentence's pair.
        """
        self.pairs.append(F.normalize(pairs.float(), dim=-1))
        self.pair_numbers.append(numbers)
        self.texts.append(F.normalize(texts.float(), dim=-1))
        self.text_numbers.append(text_numbers)
        self.owners.append(owners)

    def compute(self) -> dict[str, Tensor]:
        """Fractions and mean ranks (1 is best): `t2p_R@1`, ..., `t2p_mean_rank`, and `p2t_...`.

        A pair or sentence that several ranks added (Lightning evens their shares out so) counts once.
        """
        first, numbers = _once(dim_zero_cat(self.pair_numbers))
        pairs = dim_zero_cat(self.pairs)[first]
        first, _ = _once(dim_zero_cat(self.text_numbers))
        texts, owners = dim_zero_cat(self.texts)[first], dim_zero_cat(self.owners)[first]
        similarity = texts @ pairs.T  # (C, P)
        own = owners[:, None] == numbers  # (C, P)
        found = {}
        of_text = similarity.masked_fill(~own, float("-inf")).amax(1)  # with its own pair
        found["t2p"] = 1 + (~(similarity < of_text[:, None]) & ~own).sum(1)
        of_pair = similarity.masked_fill(~own, float("-inf")).amax(0)  # with the best of its sentences
        found["p2t"] = 1 + (~(similarity < of_pair) & ~own).sum(0)
        scores: dict[str, Tensor] = {}
        for way, place in found.items():
            scores |= {f"{way}_R@{cut}": (place <= cut).float().mean() for cut in CUTS}
            scores[f"{way}_mean_rank"] = place.float().mean()
        return scores


def _once(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Where each number stands first, and the numbers."""
    unique, inverse = numbers.unique(return_inverse=True)
    first = torch.full((len(unique),), len(numbers), device=numbers.device)
    first = first.scatter_reduce(0, inverse, torch.arange(len(numbers), device=numbers.device), "amin")
    return first, unique
