"""Published predictions must get their published scores; collected with `--oracle-dir DIR` only.

DIR holds the rerun predictions of DDLA on Spot-the-Diff and their references, as released with pycocoevalcap-scored
figures: `ddla_rerun_predfile.json` and `ddla_rerun_gtfile.json`.
"""

from pathlib import Path

import pytest

from diffcap.evaluation.captions import score_captions
from diffcap.evaluation.coco import read_predictions, read_references

PUBLISHED = {
    "BLEU-1": 0.29630,
    "BLEU-2": 0.18695,
    "BLEU-3": 0.11757,
    "BLEU-4": 0.07570,
    "METEOR": 0.10907,
    "ROUGE-L": 0.27967,
    "CIDEr-D": 0.35062,
}


def test_published_predictions_get_their_published_scores(pytestconfig: pytest.Config) -> None:
    folder = Path(pytestconfig.getoption("--oracle-dir"))
    scores = score_captions(
        read_predictions(folder / "ddla_rerun_predfile.json"), read_references(folder / "ddla_rerun_gtfile.json")
    )
    assert {name: scores[name] for name in PUBLISHED} == pytest.approx(PUBLISHED, abs=1e-5)
