"""Writing the words of a batch costs one wait for the device, beside those of the decoding; extraction writes a batch later."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.lit import test_finetuning as finetuning
from tests.models.test_contract import LENGTH, case
from tests.on_device import counted_waits, on_device

from diffcap.features.images import ImageBatch
from diffcap.features.store import FeatureStore
from diffcap.features.writer import StoreWriter
from diffcap.lit.decoding import Decoding
from diffcap.lit.extraction import StoreFiller
from diffcap.lit.finetuning import Captioning
from diffcap.models.generation import greedy
from diffcap.pair_captioner import load_captioner
from diffcap.text.vocabularies import restore_vocabulary

EXAMPLES = Path("examples")
folder = finetuning.folder


@pytest.mark.parametrize("layout", ["rcc", "rsicc", "chg2cap"])
def test_validation_writes_the_words_of_a_batch_at_once(
    folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = finetuning.module_of(folder, layout, monkeypatch)
    module.setup("fit")
    module.eval()
    monkeypatch.setattr(Captioning, "add_validation_losses", lambda *_: None)
    ids = list(module.feature_data.val_references)[:4]
    maps = on_device(torch.randn(len(ids), *finetuning.SHAPE))
    with torch.no_grad(), counted_waits() as waits:
        module.validation_step({"id": ids, "before": maps, "after": maps.flip(0)}, 0)
    assert waits == ["tolist"] * len(waits) and len(waits) <= 3 + 1  # 19 words, then the ids
    assert sorted(module.metric.captions) == sorted(ids)


@pytest.mark.parametrize(("beams", "name"), [(1, "scorer"), (3, "scorer"), (1, "pcl")])
def test_captioning_a_split_writes_the_words_of_a_batch_at_once(beams: int, name: str) -> None:
    model, pair, _ = case(name)
    vocabulary = restore_vocabulary([f"w{number}" for number in range(20)], model.vocabulary_layout)  # type: ignore[arg-type]
    module = Decoding(SimpleNamespace(captioner=model, vocabulary=vocabulary, max_length=LENGTH), beams)  # type: ignore[arg-type]
    ids = [str(number) for number in range(len(pair[0]))]
    with torch.no_grad(), counted_waits() as waits:
        module.predict_step({"id": ids, "before": on_device(pair[0]), "after": on_device(pair[1])}, 0)
    assert waits == ["tolist", "cpu"]
    if beams == 1:
        expected = [vocabulary.decode(row) for row in greedy(model, *pair, LENGTH).tolist()]
        assert module.captions == dict(zip(ids, expected))


@pytest.mark.parametrize("beams", [1, 3])
def test_captions_with_scores_and_sentences_are_copied_at_once(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    captioner = load_captioner(device="cpu")
    pairs = [(EXAMPLES / "before.png", EXAMPLES / "after.png"), (EXAMPLES / "after.png", EXAMPLES / "before.png")]
    sentences = ["nothing has changed", "an unknown wrod"]
    expected = list(captioner.batch(pairs, beams, sentences=sentences))
    compute = captioner._compute_features
    monkeypatch.setattr(captioner, "_compute_features", lambda inputs: tuple(map(on_device, compute(inputs))))
    inputs: Any = [captioner._preprocess(*pair) for pair in pairs]
    sentence_ids = [captioner._encode_sentence(sentence) for sentence in sentences]
    with counted_waits() as waits:
        found = captioner._generate(inputs, beams, 0.0, sentence_ids)
    max_waits = 1 if beams == 1 else 2  # of a decoding of 8 words or fewer; beam search also decodes greedily
    assert waits.count("HostCopy") == 1 and waits.count("tolist") == len(waits) - 1
    assert len(waits) - 1 <= max_waits * -(-(captioner.max_length - 1) // 8)
    assert found == expected


def test_features_are_written_one_batch_later(tmp_path: Path) -> None:
    paths = [f"{number}.png" for number in range(5)]
    writer = StoreWriter(tmp_path, paths, (2, 1, 1), {"library": "test"})
    filler = StoreFiller(writer, writer.missing_rows())
    features = torch.arange(10.0).view(5, 2, 1, 1)
    written: list[list[int]] = []
    write = writer.write

    def record(rows: Any, values: Any) -> None:
        written.append(rows.tolist())
        write(rows, values)

    writer.write = record  # type: ignore[method-assign]
    for rows in ([0, 1], [2, 3], [], [4]):
        batch = ImageBatch(torch.tensor(rows, dtype=torch.int64), torch.empty(0), [])
        prediction = features[rows] if rows else None
        filler.write_on_batch_end(None, None, prediction, None, batch)
    assert written == [[0, 1], [2, 3]]
    filler.on_predict_end(SimpleNamespace(global_rank=0, is_global_zero=True), None)  # type: ignore[arg-type]
    assert written == [[0, 1], [2, 3], [4]]
    np.testing.assert_array_equal(FeatureStore.open(tmp_path).read(np.arange(5)), features.numpy())
