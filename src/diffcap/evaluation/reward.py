"""CIDEr-D as the reward of sampled captions, fast enough for training: the tokeniser's Java program is not needed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from diffcap.evaluation.captions import tokenize_references
from diffcap.evaluation.cider import CiderD
from diffcap.evaluation.tokenize import Tokenizer, tokenize

END = "<end>"  # never the output of a tokeniser


class CaptionReward:
    """CIDEr-D of sampled captions against training references, with the document frequencies of all references.

    The references are tokenised as for the metric. Sampled captions are tokenised with a table: each word of the vocabulary is
    tokenised once, separately.

    Args:
        references: id -> captions.
        words: the words of the vocabulary; other words in captions are not changed.
        tokenizer: "ptb" (needs Java) or "raw".
        end_counts: append an end token to captions and references (as in the code that most self-critical training is based
            on). Without it, models learn to stop before a word that could be wrong.

    Example:
        >>> references = {"1": ["the cube moved"], "2": ["nothing changed"]}
        >>> reward = CaptionReward(references, ["the", "cube", "moved", "nothing", "changed"], "raw")
        >>> reward(["1", "1"], ["the cube moved", "the cube"], ended=[True, False]).round(3)
        array([10.   ,  3.296])
    """

    def __init__(
        self,
        references: Mapping[str, Sequence[str]],
        words: Iterable[str],
        tokenizer: Tokenizer = "ptb",
        end_counts: bool = True,
    ) -> None:
        tokens = tokenize_references(references, tokenizer)
        self.end = f" {END}" if end_counts else ""
        self._cider = CiderD({id: [text + self.end for text in texts] for id, texts in tokens.items()})
        distinct = list(dict.fromkeys(words))
        self._tokens = dict(zip(distinct, tokenize(distinct, tokenizer)))

    def __call__(
        self, ids: Sequence[str], captions: Sequence[str], ended: Sequence[bool]
    ) -> "np.ndarray[Any, np.dtype[Any]]":
        """Compute the rewards of B sampled captions.

        Args:
            ids: (B,) ids of references; may have duplicates.
            captions: (B,) words joined with spaces.
            ended: (B,) whether the caption has an end token, in contrast to one that was cut at the maximum length.

        Returns:
            (B,) float64, from 0 to 10.
        """
        tokens = (" ".join(self._tokens.get(word, word) for word in caption.split(" ")) for caption in captions)
        return self._cider(ids, [text + (self.end if has_end else "") for text, has_end in zip(tokens, ended)])
