"""`CaptionMetric`: caption metrics as a torchmetrics metric, for validation during training."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torchmetrics import Metric

from diffcap.evaluation.captions import FAST_METRICS, score_tokens, tokenize_references
from diffcap.evaluation.tokenize import Tokenizer, tokenize
from diffcap.utils.errors import DiffcapError


class CaptionMetric(Metric):
    """BLEU-1 to BLEU-4, ROUGE-L and CIDEr-D of the captions of a validation epoch.

    `compute` is a collective operation: all ranks must call it, and all get the scores of the captions of all ranks. The
    captions are exchanged with `all_gather_object`, because torchmetrics can gather tensors only. A pair counts once if
    several ranks have it (a distributed sampler repeats pairs to fill the last batch).

    Args:
        references: id -> one or more reference captions. Only the ids of `update` since the last `reset` are scored, and
            CIDEr-D's document frequencies are those of their references.
        tokenizer: "ptb" (needs Java) or "raw". The references are tokenised once, in the first `compute`.
        metrics: names from `captions.ALL_METRICS`.

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
        # The captions are no tensors, so torchmetrics cannot synchronise them.
        super().__init__(sync_on_compute=False)
        self.references = {id: list(captions) for id, captions in references.items()}
        self.tokenizer: Tokenizer = tokenizer
        self.metrics = tuple(metrics)
        self.captions: dict[str, str] = {}
        self._tokens: dict[str, list[str]] | None = None

    def update(self, ids: Sequence[str], captions: Sequence[str]) -> None:
        """Add the captions of a batch.

        Args:
            ids: B pair ids, each with a reference.
            captions: B captions in the same order; the caption of an id that was added before is replaced.

        Raises:
            ValueError: the numbers of ids and captions differ.
            DiffcapError: an id has no reference.
        """
        if len(ids) != len(captions):
            raise ValueError(f"got {len(ids)} ids and {len(captions)} captions")
        unknown = [id for id in ids if not self.references.get(id)]
        if unknown:
            raise DiffcapError(f"the pair {unknown[0]!r} has no reference caption; check the manifest of the split.")
        self.captions.update(zip(ids, captions))

    def compute(self) -> dict[str, float]:
        """Return the scores, equal on all ranks; fractions, CIDEr-D from 0 to 10; {} if no rank has a caption."""
        captions = self.gather_captions()
        if not captions:
            return {}
        if self._tokens is None:
            self._tokens = tokenize_references(self.references, self.tokenizer)
        ids = [id for id in self.references if id in captions]
        hypotheses = dict(zip(ids, tokenize([captions[id] for id in ids], self.tokenizer)))
        return score_tokens(hypotheses, self._tokens, {"total": ids}, self.metrics)["total"]

    def gather_captions(self) -> dict[str, str]:
        """Return the captions of all ranks, id -> caption; a collective operation, like `compute`."""
        if not (dist.is_available() and dist.is_initialized()):
            return dict(self.captions)
        parts: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(parts, self.captions, group=self.process_group)
        merged: dict[str, str] = {}
        for part in reversed(parts):  # if several ranks have an id, the caption of the lowest rank is used
            merged.update(part)
        return merged

    def reset(self) -> None:
        """Remove the captions, keep the references and their tokens."""
        super().reset()
        self.captions = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not supported, because the corpus score of a single batch is not meaningful."""
        raise NotImplementedError("call update() for each batch and compute() at the end of the epoch")
