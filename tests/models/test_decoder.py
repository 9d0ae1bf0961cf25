"""The word decoder of SCORER and DIRL: the cache, the words that decoding says, the loss; small models for its users."""

import functools
import math
import zlib
from typing import Any

import pytest
import torch
from tests.models import tiny
from tests.models.tiny import teach
from torch import Tensor, nn

from diffcap.methods.dirl import DIRL
from diffcap.methods.scorer.model import SCORER
from diffcap.models.captioner import Captioner
from diffcap.models.decoder import END, NULL, START, UNK, mean, next_word_losses, pair_groups, roll_out
from diffcap.models.generation import beam_search, greedy
from diffcap.models.layers import sinusoidal_position_embedding

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
KINDS: dict[str, tuple[type[SCORER] | type[DIRL], dict[str, Any]]] = {
    "scorer": (SCORER, {}),
    "scorer, residual of the input, one block": (SCORER, {"decoder_ffn_residual": "input", "decoder_layers": 1}),
    "subtraction": (SCORER, {"difference": "subtraction", "cross_view_weight": 0.0}),
    "dirl": (DIRL, {}),
    "dirl, ln_xavier, three blocks": (DIRL, {"decoder_variant": "ln_xavier", "decoder_layers": 3}),
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


def maps(pairs: int, grid: tuple[int, int] = (2, 3), channels: int = 5, seed: int = 1) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    before, after = (torch.randn(pairs, channels, *grid, generator=draws) for _ in range(2))
    return before, after


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


def cut(row: Tensor) -> list[int]:
    words = row.tolist()[1:]
    return words[: words.index(END)] if END in words else words


@functools.cache
@torch.no_grad()
def taught(name: str) -> tuple[Captioner, Tensor, Tensor]:
    """A captioner that has memorised six captions of different lengths, and its maps; random captions would not end."""
    kind, options = KINDS[name]
    model = build(kind, **{**options, "width": 64})  # more channels than there are words to teach
    before, after = maps(6)
    tokens = captions([2, 7, 4, 8, 3, 5])
    hidden, following = model.decoder(tokens, model.encode(before, after)).last.hidden[:, :-1], tokens[:, 1:]
    teach(model.decoder.logit, hidden[following != NULL], following[following != NULL])
    return model, before, after


@torch.no_grad()
@pytest.mark.parametrize("name", ["scorer", "dirl"])
def test_an_unknown_word_is_never_said(name: str) -> None:
    model, before, after = taught(name)
    first = model.step(torch.full((6,), START), model.encode(before, after), None)[0]
    bias, output = model.decoder.logit.bias, [cut(row) for row in greedy(model, before, after, LENGTH)]
    old = bias[UNK].item()
    try:
        bias[UNK] += 1000  # by far the likeliest
        assert torch.equal(model.step(torch.full((6,), START), model.encode(before, after), None)[0], first)
        assert [cut(row) for row in greedy(model, before, after, LENGTH)] == output
        assert UNK not in beam_search(model, before, after, LENGTH, beams=3)
        logits = model.decoder.logit(model.decoder(captions([3]), model.encode(before[:1], after[:1])).last.hidden)
        assert (logits.argmax(-1) == UNK).all()  # the loss sees it
    finally:
        bias[UNK] = old


@torch.no_grad()
@pytest.mark.parametrize("name", ["scorer", "dirl"])
def test_a_word_sees_itself_and_the_words_before_it(name: str) -> None:
    model, tokens = build(*KINDS[name][:1]), captions([2, 6])
    seen = []
    handles = [
        block.register_forward_hook(lambda _, inputs, out: seen.append(inputs[2])) for block in model.decoder.blocks
    ]
    model.decoder(tokens, model.encode(*maps(2)))
    for handle in handles:
        handle.remove()
    assert len(seen) == 2
    for mask in seen:
        for pair in range(2):
            for place in range(LENGTH):
                for other in range(LENGTH):
                    allowed = other <= place and tokens[pair, other] != NULL
                    assert mask[pair, 0, place, other] == allowed, (pair, place, other)


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_where_the_last_block_looks(name: str) -> None:
    kind, options = KINDS[name]
    model, tokens = build(kind, **options), captions([8, 3])
    memory, kept = model.encode(*maps(2)), []
    block = model.decoder.blocks[-1]
    handle = block.register_forward_hook(lambda _, inputs, out: kept.append(out.after_self_attention))
    attended = model.decoder.attention(tokens, memory)
    handle.remove()
    query = nn.functional.linear(kept[0], block.cross.qkv.weight[:16], block.cross.qkv.bias[:16])
    assert attended.shape == (2, LENGTH, 6) and attended.std() > 0.02
    for pair in range(2):
        for place in range(LENGTH):
            heads = []
            for head in range(2):
                own = query[pair, place, 8 * head : 8 * head + 8]
                heads.append(torch.stack([own @ key / 8**0.5 for key in memory[-1][0][pair, head]]).softmax(0))
            torch.testing.assert_close(attended[pair, place], (heads[0] + heads[1]) / 2, **CLOSE)


def test_half_of_the_attention_moves_to_the_other_image() -> None:
    draws = torch.Generator().manual_seed(0)
    attended, to_before, to_after = (
        torch.randn(2, rows, 6, generator=draws).softmax(-1) for rows in (4, 6, 6)
    )  # to_before: rows are after's places
    moved = roll_out(attended, to_before, to_after, (2, 3))
    assert moved.alignment is to_after
    for found, attention in ((moved.before, to_before), (moved.after, to_after)):
        assert found.shape == (2, 4, 2, 3)
        for pair in range(2):
            for word in range(4):
                for place in range(6):
                    brought = sum(attended[pair, word, own] * attention[pair, own, place] for own in range(6))
                    expected = (attended[pair, word, place] + brought) / 2
                    assert found[pair, word, place // 3, place % 3].item() == pytest.approx(expected.item(), abs=1e-6)
    unmoved = roll_out(attended, None, None, (2, 3))
    assert unmoved.alignment is None
    assert torch.equal(unmoved.before, unmoved.after) and torch.equal(unmoved.before.flatten(2), attended)


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
    assert len(expected) == 3 + 5
    torch.testing.assert_close(next_word_losses(logits, tokens), torch.tensor(expected), **CLOSE)


def test_streams() -> None:
    before = torch.zeros(3, 1)
    assert pair_groups(before, torch.zeros(3, 1)) == [slice(0, 3)]
    assert pair_groups(before, torch.zeros(6, 1)) == [slice(0, 3), slice(3, 6)]
    with pytest.raises(ValueError, match="4 after images are not a multiple of 3 before images"):
        pair_groups(before, torch.zeros(4, 1))
    assert mean([torch.tensor(1.0), torch.tensor(4.0)]) == 2.5


@pytest.mark.parametrize("name", ["scorer", "dirl"])
def test_after_images_without_a_before_are_refused(name: str) -> None:
    model, batch = build(*KINDS[name][:1]), batch_of([3, 4, 5])
    with pytest.raises(ValueError, match="3 after images are not a multiple of 2 before images"):
        model.loss({**batch, "before": batch["before"][:2]})


@pytest.mark.parametrize("width", [12, 7])
def test_positions_are_the_loops(width: int) -> None:
    table = sinusoidal_position_embedding(40, width)
    assert table.shape == (40, width) and table.dtype == torch.float32
    for position in range(40):
        for channel in range(width):
            angle = position * math.exp(-(channel - channel % 2) * math.log(10000) / width)
            expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert table[position, channel].item() == pytest.approx(expected, abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["scorer", "dirl"])
def test_positions_are_added_before_the_words_are_lifted(name: str) -> None:
    model, tokens = build(*KINDS[name][:1]), captions([4])
    kept = []
    handle = model.decoder.input_projection[0].register_forward_hook(lambda _, inputs, out: kept.append(inputs[0]))
    memory = model.encode(*maps(1))
    model.decoder(tokens, memory)
    cache = None
    for place in range(3):
        cache = model.step(tokens[:, place], memory, cache)[1]
    handle.remove()
    expected = model.decoder.embedding.weight[tokens] + sinusoidal_position_embedding(LENGTH, 12)
    assert torch.equal(kept[0], expected)
    torch.testing.assert_close(torch.cat(kept[1:], 1), expected[:, :3])


@torch.no_grad()
@pytest.mark.parametrize("name", ["scorer", "dirl"])
def test_a_caption_longer_than_the_decoder_says_which_option_to_raise(name: str) -> None:
    model = build(*KINDS[name][:1])
    memory = model.encode(*maps(1))
    with pytest.raises(ValueError, match="11 text positions, the decoder has 10: raise max_length"):
        model.decoder(captions([9], 11), memory)
    cache = None
    for _ in range(LENGTH):
        cache = model.step(torch.tensor([5]), memory, cache)[1]
    with pytest.raises(ValueError, match="11 text positions, the decoder has 10: raise max_length"):
        model.step(torch.tensor([5]), memory, cache)
