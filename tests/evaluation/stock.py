"""Scores of pycocoevalcap's own classes, as the released evaluators call them."""

import os
from pathlib import Path

import pytest

from diffcap.evaluation.java import find_java


def stock_scores(captions: dict[str, str], references: dict[str, list[str]], meteor: bool = True) -> dict[str, float]:
    """The corpus scores of tokenised captions; METEOR needs seconds."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge

    arguments = references, {id: [caption] for id, caption in captions.items()}
    bleu = Bleu(4).compute_score(*arguments, verbose=0)[0]
    scores = {
        **{f"BLEU-{n}": value for n, value in enumerate(bleu, 1)},
        "ROUGE-L": float(Rouge().compute_score(*arguments)[0]),
        "CIDEr-D": float(Cider().compute_score(*arguments)[0]),
    }
    if meteor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{Path(find_java()).parent}{os.pathsep}{os.environ['PATH']}")
            program = Meteor()
        scores["METEOR"] = program.compute_score(*arguments)[0]
        for stream in (program.meteor_p.stdout, program.meteor_p.stderr):
            stream.close()
    return scores
