"""`CaptionMetric`: the fast caption metrics during training, over all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torchmetrics import Metric

from diffcap.errors import DiffcapError
from diffcap.evaluation.captions import FAST_METRICS, score_tokens, tokenize_references
from diffcap.evaluation.tokenize import Tokenizer, tokenize


class CaptionMetric(Metric):
    """BLEU-1..4, ROUGE-L and CIDEr-D of the captions of a validation epoch.

    `compute` is collective: every rank calls it, and every rank gets the scores of all ranks' captions. Captions
    travel with `all_gather_object`, because torchmetrics gathers tensors only. A distributed sampler pads the last batch
    with pairs that other ranks have too; each id counts once.

    Args:
        references: id -> one or more reference captions. The ids that were seen since the last `reset` are scored, so a
            part of a split can be (its document frequencies are then those of the part).
        tokenizer: "ptb" (needs Java) or "raw". The references are tokenised once, at the first `compute`.
        metrics: names out of `captions.ALL_METRICS`.
    """

    full_state_update = False

    def __init__(
        self,
        references: Mapping[str, Sequence[str]],
        tokenizer: Tokenizer = "ptb",
        metrics: Sequence[str] = FAST_METRICS,
    ) -> None:
        # The states are strings, so there is nothing that torchmetrics could gather.
        super().__init__(sync_on_compute=False)
        self.references = {id: list(captions) for id, captions in references.items()}
        self.tokenizer: Tokenizer = tokenizer
        self.metrics = tuple(metrics)
        self.captions: dict[str, str] = {}
        self._tokens: dict[str, list[str]] | None = None

    def update(self, ids: Sequence[str], captions: Sequence[str]) -> None:
        """Take the captions of one batch.

        Args:
            ids: B pair ids, each with a reference.
            captions: B sentences in the same order; a pair that comes again replaces its caption.

        Raises:
            ValueError: not as many ids as captions.
            DiffcapError: an id has no reference.
        """
        if len(ids) != len(captions):
            raise ValueError(f"got {len(ids)} ids and {len(captions)} captions")
        strangers = [id for id in ids if not self.references.get(id)]
        if strangers:
            raise DiffcapError(
                f"{strangers[0]!r} has no reference caption to be scored by; check the split's manifest."
            )
        self.captions.update(zip(ids, captions))

    def compute(self) -> dict[str, float]:
        """Scores as fractions, the same on every rank; empty when no rank has seen a caption."""
        captions = self.gathered()
        if not captions:
            return {}
        if self._tokens is None:
            self._tokens = tokenize_references(self.references, self.tokenizer)
        ids = [id for id in self.references if id in captions]
        hypotheses = dict(zip(ids, tokenize([captions[id] for id in ids], self.tokenizer)))
        return score_tokens(hypotheses, self._tokens, {"total": ids}, self.metrics)["total"]

    def gathered(self) -> dict[str, str]:
        """The captions of all ranks by id; collective, like `compute`."""
        if not (dist.is_available() and dist.is_initialized()):
            return dict(self.captions)
        parts: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(parts, self.captions, group=self.process_group)
        merged: dict[str, str] = {}
        for part in reversed(parts):  # the lowest rank's caption stays
            merged.update(part)
        return merged

    def reset(self) -> None:
        """Forget the captions, keep the references and their tokens."""
        super().reset()
        self.captions = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: a corpus score of one batch means nothing."""
        raise NotImplementedError("call update() for each batch and compute() at the end of the epoch")
