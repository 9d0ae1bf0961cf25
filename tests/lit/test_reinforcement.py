"""The self-critical step: its rewards are pycocoevalcap's, its gradient that of a loop over words; what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pycocoevalcap.cider.cider_scorer import CiderScorer
from tests.toy import SHAPE, write_toy
from tests.toy_checkpoints import write_checkpoint

from diffcap.data.datamodules import ReinforceData
from diffcap.lit.reinforcement import Reinforcement
from diffcap.methods.scorer.model import SCORER
from diffcap.models.decoder import END, NULL, START
from diffcap.utils.errors import DiffcapError

SIZES: dict[str, Any] = {"width": 16, "heads": 2, "word_width": 12, "dropout": 0.3, "max_length": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"), scenes=8)


def data_of(folder: Path, **settings: Any) -> ReinforceData:
    options = {"batch_size": 3, "max_length": 12, "vocabulary_layout": "rcc", "seed": 5, "draws": 2, **settings}
    data = ReinforceData(str(folder), "toy", **options)
    data.setup("fit")
    return data


def model_of(data: ReinforceData, seed: int) -> SCORER:
    torch.manual_seed(seed)
    model = SCORER(data.vocabulary_size, data.feature_channels, grid=SHAPE[1:], decoder_std=0.5, **SIZES)
    with torch.no_grad():
        model.decoder.logit.bias[END] += 1.5  # captions of several lengths
    return model


def module_of(data: ReinforceData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Reinforcement:
    path = write_checkpoint(
        tmp_path / "best.ckpt", model_of(data, 1), "finetune", data.words, method="scorer", vocabulary_layout="rcc"
    )
    module = Reinforcement(model_of(data, 2), init_from=str(path), tokenizer="raw", **options)
    monkeypatch.setattr(Reinforcement, "feature_data", property(lambda self: data))
    monkeypatch.setattr(Reinforcement, "log_losses", lambda self, parts, size: logged.update(parts))
    logged.clear()
    module.setup("fit")
    return module


logged: dict[str, torch.Tensor] = {}


def stock_reward(data: ReinforceData, pair: int, words: list[int], end_counts: bool) -> float:
    """pycocoevalcap's CIDEr-D of one caption, all training references around it."""
    end = " <end>" if end_counts else ""
    closed = END in words or NULL in words
    scorer = CiderScorer(n=4, sigma=6.0)
    table = data.train_table
    for number in range(len(table.ids)):
        first = table.first_caption[number]
        captions = table.captions[first : first + table.caption_counts[number]]
        output = data.vocabulary.decode(words) + (end if closed else "")
        scorer += (output if number == pair else "", [caption + end for caption in captions])
    return float(scorer.compute_score()[1][pair])


def naive(model: SCORER, data: ReinforceData, batch: dict[str, Any], baseline: str, end_counts: bool) -> torch.Tensor:
    """The loss by a loop over pairs, draws and words, with gradients through `step`."""
    losses = []
    for row, pair in enumerate(batch["pair"].tolist()):
        memory = model.encode(batch["before"][row : row + 1], batch["after"][row : row + 1])

        def caption(draws: torch.Tensor | None, memory: Any = memory) -> tuple[list[int], torch.Tensor]:
            words, total, cache, word = [], torch.zeros(()), None, START
            for position in range(11):
                logits, cache = model.step(torch.tensor([word]), memory, cache)
                chances = logits[0].log_softmax(0)
                if draws is None:
                    word = int(chances.argmax())
                else:
                    word = int((chances.exp().cumsum(0) <= draws[position]).sum())
                words.append(word)
                total = total + chances[word]
                if word in (END, NULL):
                    break
            return words, total

        drawn = [caption(draws) for draws in batch["draws"][row]]
        rewards = [stock_reward(data, pair, words, end_counts) for words, _ in drawn]
        for number, (_, likelihood) in enumerate(drawn):
            if baseline == "greedy":
                compared = stock_reward(data, pair, caption(None)[0], end_counts)
            else:
                compared = (sum(rewards) - rewards[number]) / (len(rewards) - 1)
            losses.append(-(rewards[number] - compared) * likelihood)
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("baseline", "end_counts"), [("greedy", True), ("mean", False)])
def test_loss_and_gradient_are_those_of_a_loop_over_words(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, baseline: str, end_counts: bool
) -> None:
    data = data_of(folder, draws=3)
    module = module_of(data, tmp_path, monkeypatch, baseline=baseline, end_counts=end_counts)
    model: Any = module.captioner
    batch = data.on_after_batch_transfer(data.make_batch(4), 0)
    loss = module.training_step(batch, 4)
    expected = naive(model, data, batch, baseline, end_counts)
    assert abs(expected.item()) > 1e-3 and logged["reward"] > 0
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-4)
    learned = [part for part in model.parameters() if part.requires_grad]
    ours, theirs = torch.autograd.grad(loss, learned), torch.autograd.grad(expected, learned)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
    assert max(part.abs().max() for part in ours) > 1e-2
    frozen = {name.partition(".")[0] for name, part in model.named_parameters() if not part.requires_grad}
    assert frozen == {"cbr", "logit_scale"}


def test_what_it_needs_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = data_of(folder, draws=1)
    with pytest.raises(DiffcapError, match="draws is 1; draw at least 2"):
        module_of(data, tmp_path, monkeypatch, baseline="mean")
    with pytest.raises(DiffcapError, match=r"init_from is not set; give best\.ckpt of the fine-tuning"):
        Reinforcement(model_of(data, 1)).setup("fit")
    with pytest.raises(DiffcapError, match="draws is 0; it must be at least 1"):
        data_of(folder, draws=0)
