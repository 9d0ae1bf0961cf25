"""The stages' command line: misspelt options and bad values are one sentence; help costs no heavy import."""

import subprocess
import sys

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import RichProgressBar

from diffcap.lit.stage_cli import StageCLI
from diffcap.utils.console import shorten_error


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


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--model.lrr=1", "unknown option --model.lrr, did you mean --model.lr;"),
        ("--modle.lr=1", "unknown option --modle.lr, did you mean --model.lr;"),
        ("--model.lr=high", "model.lr"),
        ("--config=nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_bad_options_are_one_line_and_status_2(monkeypatch, capsys, option: str, sentence: str) -> None:
    with pytest.raises(SystemExit) as stop:
        cli(monkeypatch, option)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and sentence in error and error.startswith("error: ") and error.count("\n") == 1


def test_an_unknown_key_in_a_file_is_named(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("model: {lrr: 0.5}\n")
    with pytest.raises(SystemExit):
        cli(monkeypatch, "--config", str(tmp_path / "a.yaml"))
    error = capsys.readouterr().err
    assert "lrr" in error and error.count("\n") == 1


def test_long_errors_are_cut() -> None:
    assert len(shorten_error("word " * 500, [])) <= 300


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['stage.py', '--help']\n"
        "import diffcap.lit.stage_cli\n"
        "print([name for name in ('torchvision', 'scipy', 'torch._dynamo') if hasattr(sys.modules.get(name), '__file__')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_quiet_silences_what_lightning_says_of_itself_and_keeps_other_warnings() -> None:
    code = (
        "import warnings, torch\n"
        "from diffcap.lit.stage_cli import LightningModule, Trainer, quiet\n"
        "class Silent(LightningModule):\n"
        "    def predict_step(self, batch): warnings.warn('of use') if batch == 2 else None\n"
        "quiet()\n"
        "options = {'logger': False, 'enable_checkpointing': False, 'enable_progress_bar': False}\n"
        "Trainer(accelerator='cpu', **options).predict(Silent(), torch.utils.data.DataLoader([1, 2, 3]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and next(filter(None, done.stderr.splitlines())).endswith("of use")
    assert "predict returned" not in done.stderr and "GPU available" not in done.stderr
