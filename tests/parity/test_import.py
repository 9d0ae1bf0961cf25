"""Import, load, caption: files as the authors write them, through the real command, give the fixtures' own words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.loading import Fixture, assert_close, load
from tests.parity.test_pcl import maps
from torch import Tensor

from diffcap.checkpoints.loading import Checkpoint
from diffcap.checkpoints.loading import load as load_trained
from diffcap.cli import main
from diffcap.methods.clip4idc.model import CLIP4IDC
from diffcap.models.generation import greedy

pytestmark = pytest.mark.slow  # whole released checkpoints

RCC = ["<NULL>", "<UNK>", "<START>", "<END>"]


class AttrDict(dict):
    """In the form of the class `model_cfg` of the released files, which has items and a separate state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["__immutable__"] = True


def imported(folder: Path, method: str, content: Any, *options: str, words: dict[str, int] | None = None) -> Checkpoint:
    """The official file through `diffcap import`, and read again."""
    torch.save(content, folder / "official.pt")
    if words is not None:
        (folder / "words.json").write_text(json.dumps(words))
        options = (*options, "--vocabulary", str(folder / "words.json"))
    main(["import", method, str(folder / "official.pt"), "--out", str(folder / "ours"), *options])
    return load_trained(folder / "ours")


def vocabulary(size: int, specials: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate([*specials, *(f"w{n}" for n in range(size - len(specials)))])}


def grouped(official: Fixture) -> dict[str, Any]:
    """The pickled dict of SCORER's and DIRL's files, with a computed table among the weights."""
    groups: dict[str, Any] = {"change_detector_state": {}, "speaker_state": {}}
    for name, value in official.weights().items():
        group, _, rest = name.partition(".")
        if group in groups:  # CBR is in no checkpoint
            groups[group][rest] = value
    groups["speaker_state"]["core.position_enc.pe"] = torch.zeros(
        1, official.hyperparameters["max_length"], official.hyperparameters["word_width"]
    )
    return {**groups, "model_cfg": AttrDict(speaker=AttrDict(word_dim=300), depth=2)}


def check_words(trained: Checkpoint, before: Tensor, after: Tensor, official: Tensor) -> None:
    """The authors write zeros for END and after it, or run on after it."""
    end = trained.captioner.eos_id
    tokens = greedy(trained.captioner, trained.captioner.encode(before, after), official.shape[1])
    for ours, theirs in zip(tokens.tolist(), official.tolist()):
        output = ours[: ours.index(end)] if end in ours else ours
        theirs = theirs[: theirs.index(end)] if end in theirs else theirs
        assert output == theirs[: len(output)] and not any(theirs[len(output) :])
        assert trained.vocabulary.decode(ours) == " ".join(f"w{n - len_of(trained)}" for n in output[1:])


def len_of(trained: Checkpoint) -> int:
    return len(trained.vocabulary) - len(trained.vocabulary.words)


@pytest.mark.parametrize("expectation", [True, False])
def test_scorer_and_dirl(views_fixture: Path, tmp_path: Path, expectation: bool) -> None:
    official = load(views_fixture)
    metadata = official.hyperparameters
    if not expectation and (metadata["feature_channels"] % 4 or metadata["heads"] != 8):
        pytest.skip("a fixture of sizes that no released file has must be told")
    told = f"--heads={metadata['heads']}", f"--options.coordinates={str(metadata['coordinates']).lower()}"
    words = vocabulary(metadata["vocabulary"], RCC)
    trained = imported(tmp_path, official.method, grouped(official), *(told if expectation else ()), words=words)
    assert trained.max_length == metadata["max_length"]  # by the table beside the weights
    assert trained.features["shape"] == [metadata["feature_channels"], *metadata["grid"]]
    assert trained.features["preprocessing"]["std"] == [0.229, 0.224, 0.224]  # of the authors' features
    check_words(trained, official.arrays["before"], official.arrays["after"], official.arrays["greedy_tokens"])


def test_pcl(pcl_fixture: Path, tmp_path: Path) -> None:
    official = load(pcl_fixture)
    metadata = official.hyperparameters
    options = f"--heads={metadata['heads']}", f"--max-length={metadata['max_length']}"
    words = vocabulary(metadata["vocabulary"], [f"<{name}>" for name in metadata["special"]])
    trained = imported(tmp_path, "pcl", official.weights("finetune"), *options, words=words)
    assert trained.max_length == metadata["max_length"]
    before, after = maps(official.arrays["before"]), maps(official.arrays["after"])
    tokens = greedy(trained.captioner, trained.captioner.encode(before, after), trained.max_length).tolist()
    end = trained.captioner.eos_id
    for rows in zip(tokens, official.arrays["greedy_tokens"].tolist()):
        ours, theirs = (row[: row.index(end)] if end in row else row for row in rows)
        assert ours == theirs
    unchanged = trained.captioner.nothing_changed(before, after)
    expected = official.arrays["distractor_logits"].softmax(-1)[:, 0]
    assert_close(unchanged, expected)


@torch.no_grad()
def test_pcl_with_its_special_tokens_in_another_order(pcl_fixture: Path, tmp_path: Path) -> None:
    """Only BOS and MASK are fixed in the authors' code; words keep their scores, whatever their number."""
    official = load(pcl_fixture)
    metadata, state = official.hyperparameters, official.weights("finetune")
    words = vocabulary(metadata["vocabulary"], [f"<{name}>" for name in metadata["special"]])
    order = [0, 1, 4, 2, 3, 5, *reversed(range(6, metadata["vocabulary"]))]  # what their id n is in the fixture
    moved = {name: value[torch.tensor(order)] if is_table(name) else value for name, value in state.items()}
    names = list(words)
    shuffled = {names[number]: place for place, number in enumerate(order)}
    (tmp_path / "other").mkdir()
    options = f"--heads={metadata['heads']}", f"--max-length={metadata['max_length']}"
    one = imported(tmp_path, "pcl", state, *options, words=words)
    two = imported(tmp_path / "other", "pcl", moved, *options, words=shuffled)
    before, after = maps(official.arrays["before"]), maps(official.arrays["after"])
    scores, captions = [], []
    for trained in (one, two):
        model, known, length = trained.captioner, trained.vocabulary, trained.max_length
        tokens = torch.tensor([known.encode("w3 w1 w0 w2 w1", length)] * len(before))
        specials = list(range(len_of(trained)))
        ids = [known.encode(f"w{number}", length)[1] for number in range(len(known.words))]
        scores.append(model.teacher_forced_logits(tokens, model.encode(before, after))[..., specials + ids])
        captions.append([known.decode(row) for row in greedy(model, model.encode(before, after), length)])
    assert_close(*scores)
    assert captions[0] == captions[1]


def is_table(name: str) -> bool:
    return name in ("word_embedding.weight", "output_layer.weight", "output_layer.bias")


@torch.no_grad()
@pytest.mark.parametrize("half", [False, True])
def test_clip4idc(clip4idc_fixture: Path, tmp_path: Path, half: bool) -> None:
    """The fixture holds the scores of given words; every next word must be the same, from files in half precision, too."""
    official = load(clip4idc_fixture)
    metadata, arrays = official.hyperparameters, official.arrays
    state = official.weights("caption")
    if half:
        state = {name: value.half() if name.startswith("clip.") else value for name, value in state.items()}
    options = f"--heads={metadata['captioner_heads']}", f"--options.intra_layers={metadata['intra_layers']}"
    trained = imported(tmp_path, "clip4idc", state, *options)
    model = trained.captioner
    assert isinstance(model, CLIP4IDC) and trained.features["shape"] == [3, *[metadata["image_size"]] * 2]
    model.images.mean.zero_()  # the fixture's pixels are normalised
    model.images.std.fill_(1 / 255)
    memory, cache, shown = model.encode(arrays["before"], arrays["after"]), None, arrays["decoder_input"]
    tolerance = {"atol": 0.03, "rtol": 0.01} if half else {}
    for position in range(shown.shape[1]):
        logits, cache = model.step(shown[:, position], memory, cache)
        real = shown[:, position] != model.pad
        expected = arrays["decoder_logits"][real, position]
        assert_close(logits[real], expected, **tolerance)
        sure = expected.topk(2).values.diff().abs()[:, 0] > 0.06  # where rounding weights cannot turn the order
        assert torch.equal(logits[real].argmax(-1)[sure], expected.argmax(-1)[sure])
    first = arrays["decoder_logits"][:, 0]
    tokens = greedy(model, model.encode(arrays["before"], arrays["after"]), trained.max_length)
    assert torch.equal(tokens[:, 0], shown[:, 0]) and (half or torch.equal(tokens[:, 1], first.argmax(-1)))
