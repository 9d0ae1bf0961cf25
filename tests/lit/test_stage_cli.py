"""The stages' command line: misspelt options and bad values are one sentence."""

import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import rich
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from torch.utils.data import DataLoader

from diffcap.lit.stage_cli import StageCLI, StageProgressBar
from diffcap.models.captioner import Captioner
from diffcap.utils.console import OneLineErrorParser, shorten_error


class Unfinished(Captioner):
    """A captioner without two of the functions that it must have."""

    def loss(self, batch: dict) -> dict[str, torch.Tensor]:
        """None."""
        return {}

    def encode(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """None."""
        return before


class Module(LightningModule):
    """A module with options.

    Args:
        lr: learning rate.
    """

    def __init__(self, lr: float = 0.1, names: list[str] | None = None) -> None:
        super().__init__()
        self.lr = lr


class Data(LightningDataModule):
    """Data with an option.

    Args:
        batch_size: pairs a batch.
    """

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size


def cli(monkeypatch: pytest.MonkeyPatch, *args: str) -> StageCLI:
    monkeypatch.setattr(sys, "argv", ["stage.py", *args])
    return StageCLI(Module, Data, trainer_defaults={"logger": False, "enable_checkpointing": False})


def test_options_reach_the_constructors_and_later_ones_win(monkeypatch, tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("model: {lr: 0.5}\ndata: {batch_size: 7}\n")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    stage = cli(monkeypatch, "--config", str(tmp_path / "a.yaml"), "--model.lr=1e-4", "--trainer.accelerator=cpu")
    assert (stage.model.lr, stage.datamodule.batch_size, stage.config.seed_everything) == (1e-4, 7, 1234)
    assert any(isinstance(callback, RichProgressBar) for callback in stage.trainer.callbacks)
    stage = cli(monkeypatch, "--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu")
    assert not any(isinstance(callback, RichProgressBar) for callback in stage.trainer.callbacks)


def test_the_missing_functions_of_a_captioner_are_named(capsys) -> None:
    parser = OneLineErrorParser()
    parser.add_subclass_arguments(Captioner, "captioner")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--captioner={__name__}.Unfinished"])
    error = capsys.readouterr().err
    assert f"{__name__}.Unfinished does not define step, teacher_forced_logits, which its base class requires" in error


def test_long_errors_are_cut() -> None:
    assert len(shorten_error("word " * 500, [])) <= 300


class Logged(LightningModule):
    """Logs as many values as a captioner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.layer(batch).sum()
        self.log_dict({"train/caption_loss": loss, "train/loss": 2.5}, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log_dict({f"val/{name}": 0.5 for name in ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr-D")}, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(("width", "shown"), [(80, "loss: 2.500"), (200, "val/ROUGE-L: 0.500")])
def test_logged_values_stay_on_the_line_of_the_progress_bar(tmp_path: Path, width: int, shown: str) -> None:
    terminal, loader = StringIO(), DataLoader(torch.ones(4, 1))
    bar = StageProgressBar(console_kwargs={"file": terminal, "width": width, "force_terminal": True})
    choice = ModelCheckpoint(tmp_path, monitor="val/CIDEr-D", mode="max")
    try:
        trainer = Trainer(accelerator="cpu", max_epochs=3, logger=False, callbacks=[bar, choice], log_every_n_steps=1)
        trainer.fit(Logged(), loader, loader)
    finally:
        rich.reconfigure()  # the bar has replaced rich's console
    lines = [line for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).splitlines() if "4/4" in line]
    assert any(shown in line and line.startswith("training") for line in lines), lines[-3:]
    assert ("BLEU" in lines[-1]) == (width == 200)


def test_the_progress_bar_is_not_on_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A command's output may be redirected to a file, with the bar on the terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "argv", ["stage.py", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"])
    defaults = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "log_every_n_steps": 1}
    try:
        stage = StageCLI(Logged, trainer_defaults=defaults)
        stage.trainer.fit(stage.model, DataLoader(torch.ones(4, 1)))
    finally:
        rich.reconfigure()
    output = capsys.readouterr()
    assert "training" not in output.out and "training" in output.err


@pytest.mark.thorough
def test_lightning_messages_are_hidden_and_other_warnings_are_shown() -> None:
    code = (
        "import warnings, torch\n"
        "from diffcap.lit.stage_cli import LightningModule, Trainer, hide_lightning_messages\n"
        "class Silent(LightningModule):\n"
        "    def predict_step(self, batch): warnings.warn('of use') if batch == 2 else None\n"
        "hide_lightning_messages()\n"
        "options = {'logger': False, 'enable_checkpointing': False, 'enable_progress_bar': False}\n"
        "Trainer(accelerator='cpu', **options).predict(Silent(), torch.utils.data.DataLoader([1, 2, 3]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and next(filter(None, done.stderr.splitlines())).endswith("of use")
    assert "predict returned" not in done.stderr and "GPU available" not in done.stderr
