"""How well probabilities of a change tell pairs with a change from pairs without one."""

from collections.abc import Mapping, Sequence

import torch
from torchmetrics.functional.classification import binary_accuracy, binary_auroc

from diffcap.records import ChangePair


def change_scores(probabilities: Mapping[str, float], pairs: Sequence[ChangePair]) -> dict[str, float]:
    """Return how well probabilities of a change (id -> value) tell pairs with a change from others; {} if all are of one kind.

    "AUC" is the probability that a pair with a change has a higher value than a pair without one, where equal values count half.
    "accuracy" is the share of the pairs whose value is above 0.5 if there is a change, and at most 0.5 if there is none.
    """
    values = torch.tensor([probabilities[pair.id] for pair in pairs])
    labels = torch.tensor([not pair.is_distractor for pair in pairs]).long()
    if len(labels.unique()) < 2:
        return {}
    return {
        "AUC": float(binary_auroc(values, labels)),
        "accuracy": float(binary_accuracy(values, labels)),
    }
