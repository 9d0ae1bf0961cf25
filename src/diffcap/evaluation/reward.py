"""CIDEr-D as the reward of drawn captions: thousands of them a second, so without Java in between."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from diffcap.evaluation.captions import tokenize_references
from diffcap.evaluation.cider import CiderD
from diffcap.evaluation.tokenize import Tokenizer, tokenize

END = "<end>"  # no tokeniser makes it


class CaptionReward:
    """CIDEr-D against training references, with the document frequencies of all of them.

    The references are tokenised as for the metric. A drawn caption is tokenised word by word, from a table: a word becomes what
    the tokeniser makes of it alone, and stays as it is where no reference has it.

    Args:
        references: id -> captions. words: all that captions of these references consist of, as the vocabulary writes them.
        tokenizer: "ptb" or "raw". end_counts: the end of a caption counts as a word more, on both sides (as in the code that
            most self-critical training derives from); without, captions learn to break off before a word that may be wrong.
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
        """Rewards of drawn captions.

        Args:
            ids: (B,) names out of the references'. captions: (B,) sentences. ended: (B,) whether each came to its end.

        Returns:
            (B,) float64, 0 to 10.
        """
        tokens = (" ".join(self._tokens.get(word, word) for word in caption.split(" ")) for caption in captions)
        return self._cider(ids, [text + (self.end if whole else "") for text, whole in zip(tokens, ended)])
