"""Caption metrics during training: `CaptionMetric` for validation, `CaptionReward` (CIDEr-D) for self-critical training."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torchmetrics import Metric

from diffcap.evaluation.captions import FAST_METRICS, Tokenizer, score_tokens, tokenize, tokenize_together
from diffcap.evaluation.ngrams import Array, CiderD
from diffcap.utils.errors import DiffcapError

END_TOKEN = "<end>"  # never the output of a tokeniser


class CaptionMetric(Metric):
    """BLEU-1 to BLEU-4, ROUGE-L and CIDEr-D of the captions of a validation epoch.

    `compute` is a collective operation: all ranks must call it, and each rank gets the scores of the captions of all ranks. A distributed
    sampler gives some pairs to two ranks, so that all ranks have the same number of pairs. Here, each pair counts once.

    Args:
        references: id -> one or more reference captions. Only the ids of `update` since the last `reset` are scored, and
            CIDEr-D's document frequencies are those of their references.
        tokenizer: "ptb" (Penn Treebank) or "raw" (split at white space). References are tokenised once, in the first `compute`.

    Example:
        >>> metric = CaptionMetric({"1": ["the cube moved"], "2": ["no change"]}, "raw", ["BLEU-1", "ROUGE-L"])
        >>> metric.update(["1", "2"], ["the cube moved", "a change"])
        >>> {name: round(score, 3) for name, score in metric.compute().items()}
        {'BLEU-1': 0.8, 'ROUGE-L': 0.75}
    """

    full_state_update = False

    def __init__(
        self,
        references: Mapping[str, Sequence[str]],
        tokenizer: Tokenizer = "ptb",
        metrics: Sequence[str] = FAST_METRICS,
    ) -> None:
        super().__init__(sync_on_compute=False)  # torchmetrics can gather tensors only
        self.references = {id: list(captions) for id, captions in references.items()}
        self.tokenizer: Tokenizer = tokenizer
        self.metrics = tuple(metrics)
        self.captions: dict[str, str] = {}
        self._tokens: dict[str, list[str]] | None = None  # id -> tokenised references; None before the first `compute`

    def update(self, ids: Sequence[str], captions: Sequence[str]) -> None:
        """Add the captions of a batch. They replace earlier captions of the same ids."""
        if unknown := [id for id in ids if not self.references.get(id)]:
            raise DiffcapError(f"the pair {unknown[0]!r} has no reference caption; check the manifest of the split.")
        self.captions.update(zip(ids, captions, strict=True))

    def compute(self) -> dict[str, float]:
        """Return the scores, which are equal on all ranks. CIDEr-D is from 0 to 10, others are fractions. {} if no rank has a caption."""
        rank_captions: list[Any] = [self.captions]
        if dist.is_available() and dist.is_initialized():
            rank_captions = [None] * dist.get_world_size(self.process_group)
            dist.all_gather_object(rank_captions, self.captions, group=self.process_group)
        captions: dict[str, str] = {}
        for by_id in reversed(rank_captions):  # if several ranks have an id, the caption of the lowest rank is used
            captions.update(by_id)
        if not captions:
            return {}
        if self._tokens is None:
            _, self._tokens = tokenize_together({}, self.references, self.tokenizer)
        ids = [id for id in self.references if id in captions]
        hypotheses = dict(zip(ids, tokenize([captions[id] for id in ids], self.tokenizer)))
        return score_tokens(hypotheses, self._tokens, {"total": ids}, self.metrics)["total"]

    def reset(self) -> None:
        """Remove the captions, but keep the references and their tokens."""
        super().reset()
        self.captions = {}


class CaptionReward:
    """CIDEr-D of sampled captions against training references, with the document frequencies of all references.

    Args:
        words: the captioner's vocabulary; each word is tokenised once, separately. Other words of captions are used as they are.
        end_counts: append `END_TOKEN` to references and to captions with an end token. Otherwise captioners learn to stop early.

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
        _, reference_tokens = tokenize_together({}, references, tokenizer)
        self.suffix = f" {END_TOKEN}" if end_counts else ""
        self._cider = CiderD({id: [text + self.suffix for text in texts] for id, texts in reference_tokens.items()})
        distinct_words = list(dict.fromkeys(words))
        self._tokens = dict(zip(distinct_words, tokenize(distinct_words, tokenizer)))  # word -> its tokens

    def __call__(self, ids: Sequence[str], captions: Sequence[str], ended: Sequence[bool]) -> Array:
        """Compute the rewards of B sampled captions (words joined with spaces): (B,) float64, from 0 to 10.

        `ended` is True for a caption that the captioner ended itself, and False if it was cut off at the maximum length.
        """
        texts = []
        for caption, has_end in zip(captions, ended):
            text = " ".join(self._tokens.get(word, word) for word in caption.split(" "))
            texts.append(text + self.suffix if has_end else text)
        return self._cider(ids, texts)
