"""PairCaptioner on image files gives the captions that the evaluation stage gives on the feature store."""

from pathlib import Path

import pytest
import torch
from tests.test_pair_captioner import lively
from tests.toy_checkpoints import write_checkpoint

from diffcap.change import Caption
from diffcap.checkpoints.loading import load
from diffcap.features.store import FeatureStore
from diffcap.lit.decoding import decode
from diffcap.methods.pcl.model import PCL
from diffcap.methods.scorer.model import SCORER
from diffcap.pair_captioner import load_captioner
from diffcap.records import read_dataset

WORDS = ["a", "blue", "cube", "gone", "is", "red", "the", "was"]


@pytest.mark.parametrize("method", ["scorer", "pcl"])
def test_captions_are_those_of_the_store(blocks: Path, tmp_path: Path, method: str) -> None:
    store = FeatureStore.open(blocks / "features" / "blocks")
    torch.manual_seed(0)
    model = (
        SCORER(4 + len(WORDS), 107, (4, 6), 12, width=16, heads=2, word_width=8)
        if method == "scorer"
        else PCL(6 + len(WORDS), 107, width=16, heads=2, ffn=16, cross_layers=2)
    )
    metadata = {"method": method, "vocabulary_layout": "rcc" if method == "scorer" else "pcl"}
    path = write_checkpoint(
        tmp_path / "best.ckpt",
        lively(model),
        "finetune",
        words=WORDS,
        features={**store.meta, "name": "blocks"},
        **metadata,
    )
    dataset = read_dataset(blocks)
    pairs = dataset.pairs[:40]
    captioner, greedy = load_captioner(path, "cpu"), ()
    for beams in (1, 3):
        expected = decode(load(path), pairs, blocks / "features" / "blocks", beams=beams, accelerator="cpu")
        files = ((dataset.root / pair.before, dataset.root / pair.after) for pair in pairs)
        found = [one.text for one in captioner.batch(files, beams=beams) if isinstance(one, Caption)]
        assert expected is not None and len(found) == len(pairs)
        texts = list(expected.captions.values())
        greedy = greedy or tuple(texts)
        # The evaluation's beam search can miss the greedy caption, which the captioner offers too.
        others = [number for number, text in enumerate(found) if text != texts[number]]
        assert [found[number] for number in others] == [greedy[number] for number in others] and len(others) < 4
        assert len(set(found)) > 3
