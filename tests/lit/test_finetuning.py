"""Validation on the ids of words: what it scores, and what it refuses; which options decide whether an earlier run is taken over."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.toy import SHAPE, write_toy

from diffcap.data.datamodules import CaptionData
from diffcap.lit import finetuning
from diffcap.lit.finetuning import Captioning
from diffcap.lit.run import _find_changes
from diffcap.lit.training import TrainingModule
from diffcap.methods.pcl.model import PCL
from diffcap.methods.pcl.pretraining import Pretraining
from diffcap.methods.pcl.pretraining_model import PCLPretraining
from diffcap.methods.remote_sensing.chg2cap import Chg2Cap
from diffcap.methods.remote_sensing.rsiccformer import RSICCformer
from diffcap.methods.scorer.model import SCORER
from diffcap.utils.errors import DiffcapError

METHODS: dict[str, Any] = {"rsicc": RSICCformer, "chg2cap": Chg2Cap, "rcc": SCORER}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The number of each scene is a rare word."""
    return write_toy(tmp_path_factory.mktemp("toy"))


def module_of(folder: Path, layout: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Captioning:
    data = CaptionData(str(folder), "toy", batch_size=4, max_length=20, vocabulary_layout=layout, min_count=6)
    data.setup("fit")
    sizes: dict[str, Any] = {"width": 8, "heads": 2, "max_length": 20}
    sizes |= {"attention_width": 8, "ffn": 8, "table": (4, 4)} if layout == "chg2cap" else {}
    sizes |= {"word_width": 8} if layout == "rcc" else {}
    module = Captioning(METHODS[layout](data.vocabulary_size, SHAPE[0], grid=SHAPE[1:], **sizes), **options)
    monkeypatch.setattr(Captioning, "feature_data", property(lambda self: data))
    module.trainer = SimpleNamespace(world_size=1, global_rank=0)  # type: ignore[assignment]
    return module


def validation(module: Captioning, monkeypatch: pytest.MonkeyPatch, number: int) -> dict[str, float]:
    """Scores of a validation whose captions are one reference of each pair, as the captioner's vocabulary can write it."""
    data, rows = module.feature_data, list(module.feature_data.val_references.items())
    texts = [captions[number] for _, captions in rows]
    ids = [data.vocabulary.encode(text, data.max_length) for text in texts]
    tokens = torch.tensor([row + [data.vocabulary.eos] * (data.max_length - len(row)) for row in ids])
    monkeypatch.setattr(module.captioner, "encode", lambda *_: None)
    monkeypatch.setattr(finetuning, "greedy", lambda *_: tokens)
    monkeypatch.setattr(Captioning, "add_validation_losses", lambda *_: None)
    logged: dict[str, float] = {}
    monkeypatch.setattr(Captioning, "log_dict", lambda self, values, **_: logged.update(values))
    module.validation_step({"id": [id for id, _ in rows], "before": None, "after": None}, 0)
    module.on_validation_epoch_end()
    written = [data.vocabulary.decode(row) for row in tokens]
    assert all("<unk>" in text.lower() for text in written) and len(written) > 3
    return logged


@pytest.mark.parametrize("layout", ["rsicc", "chg2cap"])
def test_an_unknown_word_is_right_where_the_reference_has_a_rare_word(
    folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {}
    for tokenizer in ("ids", "raw"):
        module = module_of(folder, layout, monkeypatch, tokenizer=tokenizer)
        module.setup("fit")
        scores[tokenizer] = validation(module, monkeypatch, 1)
    assert scores["ids"]["val/BLEU-4"] == pytest.approx(1) and scores["ids"]["val/ROUGE-L"] == pytest.approx(1)
    assert scores["raw"]["val/BLEU-4"] < 0.9


def test_the_text_metrics_of_the_evaluation_have_a_tokenizer_of_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tokenizer, expected in {"ids": "ptb", "ptb": "ptb", "raw": "raw"}.items():
        assert module_of(folder, "rsicc", monkeypatch, tokenizer=tokenizer).metadata()["tokenizer"] == expected


def test_settings_that_do_not_fit_are_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = "model.tokenizer is ids, which needs data.vocabulary_layout rsicc or chg2cap, not rcc; set it to ptb"
    with pytest.raises(DiffcapError, match=output):
        module_of(folder, "rcc", monkeypatch, tokenizer="ids").setup("fit")
    output = r"model\.pretrained_lr is 1e-05, but this Chg2Cap trains no pretrained parameters; remove the option"
    with pytest.raises(DiffcapError, match=output):
        module_of(folder, "chg2cap", monkeypatch, pretrained_lr=1e-5).setup("fit")
    reasons = {"rcc": "SCORER has no weights of another program", "rsicc": "this RSICCformer has no ResNet"}
    for layout, reason in reasons.items():
        with pytest.raises(DiffcapError, match=f"model.initial_weights is default, but {reason}; remove the option"):
            module_of(folder, layout, monkeypatch, tokenizer="raw", initial_weights="default").setup("fit")


def test_a_training_with_options_of_an_earlier_version_is_compared_by_the_options_of_both(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {lr: 1.0e-4, half_precision_clip: false, decoder_clip_value: 5.0}\n")
    callbacks = [{"class_path": "ClipDecoderGradients", "init_args": {"value": 5.0}}]
    options = {"model.lr": 1e-4, "trainer.callbacks": callbacks}
    assert _find_changes(tmp_path, {"id": "1"}, {}, options) is None
    own_callbacks = tmp_path / "own"  # the user's callbacks, in a run of an earlier version
    own_callbacks.mkdir()
    text = f"model: {{half_precision_clip: false}}\ntrainer: {{callbacks: {callbacks}}}\n"
    (own_callbacks / "config.yaml").write_text(text)
    assert _find_changes(own_callbacks, {"id": "1"}, {}, options) is None
    changes = {"trainer.callbacks": None, "model.optimizer": "bert_adam", "model.initial_weights": "x.pt"}
    for name, value in changes.items():
        assert f"{name} [" in str(_find_changes(tmp_path, {"id": "1"}, {}, {**options, name: value}))
    assert "model.lr 0.0001, now 0.1" in str(_find_changes(tmp_path, {"id": "1"}, {}, {**options, "model.lr": 0.1}))


@pytest.mark.parametrize(
    "build", [lambda *sizes, **o: Captioning(PCL(*sizes, **o)), lambda *s, **o: Pretraining(PCLPretraining(*s, **o))]
)
def test_too_few_positions_for_the_captions_are_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, build: Any
) -> None:
    data = CaptionData(str(folder), "toy", max_length=20)
    monkeypatch.setattr(TrainingModule, "feature_data", property(lambda self: data))
    sizes: dict[str, Any] = {"width": 8, "heads": 2, "ffn": 8}
    with pytest.raises(DiffcapError, match=r"20 positions, but .*positions is 19; raise it, or lower data\.max_length"):
        build(data.vocabulary_size, SHAPE[0], positions=19, **sizes).setup("fit")
    build(data.vocabulary_size, SHAPE[0], positions=20, **sizes).setup("fit")


@pytest.mark.slow
def test_the_gradients_are_freed_after_the_step_and_kept_between_accumulated_batches(folder: Path) -> None:
    has_gradients: list[bool] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            has_gradients.append(any(parameter.grad is not None for parameter in module.parameters()))

    data = CaptionData(str(folder), "toy", batch_size=4, max_length=20, vocabulary_layout="rcc", num_workers=0)
    data.setup("fit")
    captioner = SCORER(data.vocabulary_size, SHAPE[0], grid=SHAPE[1:], width=8, heads=2, max_length=20, word_width=8)
    names = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    quiet = dict.fromkeys(names, False)
    length = {"max_steps": 2, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    trainer = pl.Trainer(accelerator="cpu", callbacks=[Watch()], **length, **quiet)  # type: ignore[arg-type]
    trainer.fit(Captioning(captioner), data)
    assert has_gradients == [True, False, True, False]
