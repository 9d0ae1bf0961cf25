"""Weights pass from stage to stage by name; whatever does not fit is listed in one sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import captioner, pretraining
from tests.toy_checkpoints import WORDS, write_checkpoint

from diffcap.lit.training import init_from
from diffcap.utils.errors import DiffcapError

SIZE = 6 + len(WORDS)


def take_over(path: Path, words: list[str] = WORDS, **options: Any) -> Any:
    model = captioner(seed=5, vocabulary_size=SIZE, **options)
    init_from(model, str(path), words, ("distractor_head",), ("regress",))
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "last.ckpt", pretraining(vocabulary_size=SIZE), "pretrain")


def test_the_trunk_is_taken_over_and_the_new_head_stays(checkpoint: Path) -> None:
    theirs, fresh = pretraining(vocabulary_size=SIZE).state_dict(), captioner(seed=5, vocabulary_size=SIZE).state_dict()
    taken = take_over(checkpoint).state_dict()
    assert {name for name in taken if not name.startswith("distractor_head")} <= theirs.keys()
    for name, value in taken.items():
        assert torch.equal(value, (fresh if name.startswith("distractor_head") else theirs)[name]), name
    assert not torch.equal(theirs["trunk.word_embedding.weight"], fresh["trunk.word_embedding.weight"])


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"width": 24}, "trunk.word_embedding.weight: checkpoint (10, 16), model (10, 24)"),
        ({"feature_channels": 7}, "do not fit (trunk.image_projection.weight: checkpoint (16, 5), model (16, 7)"),
        ({"cross_layers": 3}, "trunk.cross_encoder.layers.2.attention_norm.weight"),
        ({"pair_layers": 0}, "trunk.pair_encoder.norm.weight"),
    ],
    ids=["width", "features", "more layers", "fewer layers"],
)
def test_what_does_not_fit_is_named(checkpoint: Path, options: dict[str, Any], names: str) -> None:
    with pytest.raises(DiffcapError) as error:
        take_over(checkpoint, **options)
    output = str(error.value)
    assert names in output and str(checkpoint) in output and "\n" not in output and len(output) < 500
    assert "give both stages the same width, layers and features" in output


@pytest.mark.parametrize("words", [[*WORDS[:3], "them"], [*WORDS, "zebra"], list(reversed(WORDS))])
def test_another_vocabulary_is_refused(checkpoint: Path, words: list[str]) -> None:
    with pytest.raises(DiffcapError) as error:
        take_over(checkpoint, words)
    output = str(error.value)
    assert ("zebra" in output) == ("zebra" in words) and ("their order differs" in output) == (words[0] == "the")
    assert f"has 4 words, this stage's {len(words)}" in output and "min_count" in output and "\n" not in output


def test_a_second_pre_training_wants_every_name(checkpoint: Path) -> None:
    model = pretraining(seed=5, vocabulary_size=SIZE)
    init_from(model, str(checkpoint), WORDS, (), ())
    assert torch.equal(model.regress.bias, pretraining(vocabulary_size=SIZE).regress.bias)
    finetuned = write_checkpoint(checkpoint.with_name("best.ckpt"), captioner(vocabulary_size=SIZE), "finetune")
    with pytest.raises(DiffcapError, match=r"7 parameters do not fit \(missing: regress\.bias"):
        init_from(model, str(finetuned), WORDS, (), ())


def test_parts_can_be_left_out_of_the_transfer(checkpoint: Path) -> None:
    model = pretraining(seed=5, vocabulary_size=SIZE)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    init_from(model, str(checkpoint), WORDS, (), (), without=["trunk.pair_encoder"])
    trained = pretraining(vocabulary_size=SIZE).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, (initial if name.startswith("trunk.pair_encoder.") else trained)[name]), name
    with pytest.raises(DiffcapError, match=r"init_without has 'pair_encoder', but the model has no such part"):
        init_from(model, str(checkpoint), WORDS, (), (), without=["pair_encoder"])


def test_parts_cannot_be_left_out_of_no_transfer() -> None:
    with pytest.raises(DiffcapError, match=r"model.init_without is \['trunk'\], but model.init_from is not set"):
        init_from(captioner(), None, WORDS, (), (), without=["trunk"])
