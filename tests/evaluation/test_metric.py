"""`CaptionMetric` on one rank and on two."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.losses.ranks import on_two_ranks

from diffcap.evaluation import metric as module
from diffcap.evaluation.captions import FAST_METRICS, score_captions
from diffcap.evaluation.metric import CaptionMetric
from diffcap.losses.gather import rank
from diffcap.utils.errors import DiffcapError

REFERENCES = {str(n): [f"the cube number {n} has moved", f"cube {n} is elsewhere now"] for n in range(7)}
PREDICTIONS = {str(n): f"the cube number {n % 4} is elsewhere" for n in range(7)}


def test_one_rank_gives_the_functions_scores() -> None:
    metric = CaptionMetric(REFERENCES, tokenizer="raw")
    for start in (0, 4):
        ids = list(PREDICTIONS)[start : start + 4]
        metric.update(ids, [PREDICTIONS[id] for id in ids])
    metric.update(["0"], [PREDICTIONS["0"]])  # a pair that padding repeated
    assert metric.compute() == score_captions(PREDICTIONS, REFERENCES, "raw", FAST_METRICS)
    metric.reset()
    metric.update(["1", "3"], [PREDICTIONS["1"], PREDICTIONS["3"]])
    part = {id: REFERENCES[id] for id in ("1", "3")}
    assert metric.compute() == score_captions({id: PREDICTIONS[id] for id in part}, part, "raw", FAST_METRICS)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_reset_forgets_captions_and_keeps_the_references_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(wraps=module.tokenize_together)
    monkeypatch.setattr(module, "tokenize_together", counted)
    metric = CaptionMetric(REFERENCES, tokenizer="ptb", metrics=["BLEU-1"])
    for caption in ("The cube number 1 has moved!", "something else"):
        metric.update(["1"], [caption])
        score = metric.compute()["BLEU-1"]
        assert score == pytest.approx(1.0 if "cube" in caption else 0.0, abs=1e-6)
        metric.reset()
    assert metric.compute() == {} and counted.call_count == 1
    with pytest.raises(DiffcapError, match="'99' has no reference"):
        metric.update(["99"], ["x"])


def share(predictions: dict[str, str]) -> dict[str, Any]:
    """What a rank has, with the pairs shared out as a distributed sampler does, which repeats the first ones."""
    ids = list(predictions)
    mine = [*ids, *ids[: -len(ids) % 2]][rank() :: 2]
    metric = CaptionMetric(REFERENCES, tokenizer="raw")
    for start in range(0, len(mine), 3):
        batch = mine[start : start + 3]
        metric.update(batch, [predictions[id] for id in batch])
    return {"seen": len(mine), "scores": metric.compute()}


@pytest.mark.slow
def test_two_ranks_with_padding_give_the_value_of_one(tmp_path: Path) -> None:
    expected = score_captions(PREDICTIONS, REFERENCES, "raw", FAST_METRICS)
    for result in on_two_ranks(share, PREDICTIONS, tmp_path):
        assert result == {"seen": 4, "scores": expected}  # 8 in all, one of them twice
