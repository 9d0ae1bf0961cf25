"""ROUGE-L (Lin, 2004), as pycocoevalcap computes it."""

from collections.abc import Mapping


def rouge_l(hypotheses: Mapping[str, str], references: Mapping[str, list[str]]) -> dict[str, float]:
    """Compute ROUGE-L of each pair; the score of a corpus is the mean.

    Args:
        hypotheses: id -> tokens joined by spaces. references: id -> at least one such string.

    Returns:
        id -> F score (beta = 1.2) of the longest common subsequence, a fraction.

    Example:
        >>> scores = rouge_l({"1": "the red cube moved"}, {"1": ["the cube moved", "nothing moved"]})
        >>> {id: round(score, 4) for id, score in scores.items()}
        {'1': 0.8798}
    """
    from pycocoevalcap.rouge.rouge import Rouge

    scorer = Rouge()
    return {id: float(scorer.calc_score([text], references[id])) for id, text in hypotheses.items()}
