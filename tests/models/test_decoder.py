"""The word decoder of SCORER and DIRL: the cache, the words that decoding says, the loss; small models for its users."""

import math
import zlib
from typing import Any

import pytest
import torch
from tests.models import tiny
from tests.models.tiny import maps
from torch import Tensor, nn

from diffcap.methods.dirl import DIRL
from diffcap.methods.scorer.model import SCORER
from diffcap.models.cross_image import roll_out
from diffcap.models.decoder import END, NULL, START, UNK, next_word_losses
from diffcap.models.generation import beam_search, greedy

WORDS, LENGTH = 17, 10
SIZES: dict[str, Any] = {
    "vocabulary_size": WORDS,
    "feature_channels": 5,
    "grid": (2, 3),
    "max_length": LENGTH,
    "width": 16,
    "heads": 2,
    "word_width": 12,
    "dropout": 0.0,
}
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


def build(kind: type[SCORER] | type[DIRL], **options: Any) -> Any:
    """A small model in evaluation mode; a parameter's values follow from its name and shape, whatever the other options."""
    sizes = SIZES if kind is SCORER else {**SIZES, "ffn": 24, "projector_width": 20}
    model = kind(**{**sizes, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            values = torch.randn(parameter.shape, generator=draws)
            if parameter.ndim >= 2:
                parameter.copy_(values * 1.5 / parameter.shape[1] ** 0.5)
            elif parameter.ndim == 1:
                parameter.copy_(values * 0.2 + ("norm" in name and name.endswith("weight")))
            else:
                parameter.fill_(-0.5)  # a logit scale
    return model.eval()


def captions(lengths: list[int], padded: int = LENGTH, seed: int = 2) -> Tensor:
    return tiny.captions(lengths, padded, seed, (START, END, NULL), range(4, WORDS))


def batch_of(lengths: list[int], padded: int = LENGTH, streams: int = 1) -> dict[str, Tensor]:
    """A training batch of as many pairs as `lengths` a stream; with two streams the captions of the second are others."""
    pairs = len(lengths)
    before, _ = maps(pairs)
    tokens = torch.cat([captions(lengths[::-1] if n else lengths, padded, 2 + n) for n in range(streams)])
    return {"before": before, "after": maps(pairs * streams, seed=3)[1], "tokens": tokens}


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of every parameter that has one."""
    model.zero_grad()
    loss.backward()
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def test_half_of_the_attention_moves_to_the_other_image() -> None:
    draws = torch.Generator().manual_seed(0)
    attended, to_before, to_after = (
        torch.randn(2, rows, 6, generator=draws).softmax(-1) for rows in (4, 6, 6)
    )  # to_before: rows are after's places
    moved = roll_out(attended, to_before, to_after, (2, 3))
    assert moved.alignment is to_after
    for found, attention in ((moved.before, to_before), (moved.after, to_after)):
        brought = sum(attended[:, :, own, None] * attention[:, None, own] for own in range(6))
        torch.testing.assert_close(found, ((attended + brought) / 2).view(2, 4, 2, 3))


def test_every_word_and_the_end_are_predicted_and_padding_is_not() -> None:
    logits = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[START, 5, 6, END, NULL, NULL], [START, UNK, 4, 4, 6, END]])
    expected = []
    for row, words in zip(logits, tokens.tolist()):
        for place in range(5):
            target = words[place + 1]
            if target != NULL:
                total = sum(math.exp(score) for score in row[place].tolist())
                expected.append(-math.log(math.exp(row[place, target]) / total))
    words = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9])  # in the flattened tokens after START
    torch.testing.assert_close(next_word_losses(logits, tokens, words), torch.tensor(expected), **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("kind", [SCORER, DIRL])
def test_an_unknown_word_is_never_said(kind: type[SCORER] | type[DIRL]) -> None:
    model, pair = build(kind), maps(6)
    expected = greedy(model, model.encode(*pair), LENGTH)
    model.decoder.logit.bias[UNK] += 1000  # by far the likeliest
    assert torch.equal(greedy(model, model.encode(*pair), LENGTH), expected)
    assert UNK not in beam_search(model, model.encode(*pair), LENGTH, beams=3)
    hidden = model.decoder(captions([3] * 6), model.encode(*pair)).last_block.hidden
    assert (model.decoder.compute_logits(hidden).argmax(-1) == UNK).all()  # the loss sees it


def test_a_caption_longer_than_the_decoder_says_which_option_to_raise() -> None:
    model = build(SCORER)
    with pytest.raises(ValueError, match="11 text positions, the decoder has 10: raise max_length"):
        model.decoder(captions([9], 11), model.encode(*maps(1)))
