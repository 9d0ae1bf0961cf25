"""BLEU-1 to BLEU-4 (Papineni et al., ACL 2002) and ROUGE-L (Lin, 2004), as pycocoevalcap computes them.

BLEU is computed from counts that can be added up over pairs; ROUGE-L of a corpus is the mean of its pairs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

BLEU = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")
_SMALL, _TINY = 1e-9, 1e-15  # pycocoevalcap's constants against division by 0 and scores of 0


def bleu_counts(hypotheses: Mapping[str, str], references: Mapping[str, list[str]]) -> Array:
    """Count what BLEU adds up over a corpus.

    Returns:
        (N, 10) for each of the N hypotheses: its number of words, the number of words of the reference with the closest
        length, its number of n-grams of each order (4), and how many of these occur in a reference (4).

    Example:
        >>> bleu_counts({"1": "the red cube moved"}, {"1": ["the cube moved", "nothing moved"]})
        array([[4., 3., 4., 3., 2., 1., 3., 1., 0., 0.]])
    """
    from pycocoevalcap.bleu.bleu_scorer import cook_refs, cook_test

    rows = []
    for id, text in hypotheses.items():
        cooked = cook_test(text, cook_refs(references[id]))
        closest = min((abs(length - cooked["testlen"]), length) for length in cooked["reflen"])[1]
        rows.append([cooked["testlen"], closest, *cooked["guess"], *cooked["correct"]])
    return np.array(rows, dtype=float)


def bleu_of_sums(sums: Array) -> Array:
    """Compute BLEU-1 to BLEU-4 of sums of `bleu_counts`: (S, 10) to (S, 4), fractions."""
    words, reference_words, guessed, correct = sums[:, 0], sums[:, 1], sums[:, 2:6], sums[:, 6:10]
    precisions = np.cumprod((correct + _TINY) / (guessed + _SMALL), axis=1) ** (1 / np.arange(1, 5))
    ratio = (words + _TINY) / (reference_words + _SMALL)
    brevity_penalty = np.where(ratio < 1, np.exp(1 - 1 / ratio), 1.0)
    return precisions * brevity_penalty[:, None]


def rouge_l(hypotheses: Mapping[str, str], references: Mapping[str, list[str]]) -> dict[str, float]:
    """Compute ROUGE-L of each pair: the F score (beta = 1.2) of the longest common subsequence, a fraction.

    Example:
        >>> round(rouge_l({"1": "the red cube moved"}, {"1": ["the cube moved", "nothing moved"]})["1"], 4)
        0.8798
    """
    from pycocoevalcap.rouge.rouge import Rouge

    scorer = Rouge()
    return {id: float(scorer.calc_score([text], references[id])) for id, text in hypotheses.items()}
