"""The probability that a pair of images has changed."""

import math
from typing import TYPE_CHECKING, Any

from diffcap.datasets.no_change import ALL_NO_CHANGE, is_no_change
from diffcap.text.hub import HubVocabulary
from diffcap.worlds.blocks.captions import NO_CHANGE as BLOCKS_NO_CHANGE

if TYPE_CHECKING:
    from diffcap.pair_captioner import Caption

NO_CHANGE_SENTENCES = tuple(dict.fromkeys((*ALL_NO_CHANGE, *BLOCKS_NO_CHANGE)))  # of all datasets


def scored_sentences(captioner: Any) -> tuple[str, ...]:
    """Return the argument `sentences` of `captioner.batch` for `no_change_probability`; () for a captioner that writes free text."""
    vocabulary = captioner.vocabulary
    writes_free_text = isinstance(vocabulary, HubVocabulary) and vocabulary.num_sentences is not None  # not fine-tuned
    return () if writes_free_text else NO_CHANGE_SENTENCES


def no_change_probability(caption: "Caption") -> float:
    """Return the captioner's probability that nothing has changed in a pair.

    * 1 if the caption says so (`is_no_change`);
    * else the method's own estimate, if it has one (in IDC-PCL, "distractor judging" estimates it);
    * else the sum of the probabilities of `NO_CHANGE_SENTENCES`, which is the probability that a sampled caption is one of these
      sentences. `caption.scored` has the logarithms of the probabilities; it is empty for models that write free text.
    """
    if is_no_change(caption.text):
        return 1.0
    if caption.nothing_changed is not None:
        return caption.nothing_changed
    return min(1.0, math.fsum(map(math.exp, caption.scored)))


def change_probability(caption: "Caption") -> float:
    """Return the probability that something has changed, 1 - `no_change_probability`, with the four decimals that files have."""
    return round(1 - no_change_probability(caption), 4)
