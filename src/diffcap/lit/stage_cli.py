"""The command line of every stage (training, extraction) that runs a Lightning trainer."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import ProcessingSpeedColumn
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.progress import BarColumn

from diffcap.lit.launch import launcher_options
from diffcap.lit.progress import LogProgress
from diffcap.utils.console import OneLineErrorMixin
from diffcap.utils.errors import DiffcapError, lost_process, one_line

_WIDE_COLUMNS = 160  # a terminal with at least so many columns shows all logged values beside the progress bar


class StageParser(OneLineErrorMixin, LightningArgumentParser):
    """Lightning's parser; errors are printed as one line, and abbreviated option names are errors."""

    help_option = "--help all"  # an error message tells users to run the command with this option


class StageProgressBar(RichProgressBar):
    """Lightning's bar without the epoch number, since training is counted in steps, and without the number of the log folder."""

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return the columns; in a narrow terminal the bar is short and has no speed, so that the logged values fit in the line."""
        columns = super().configure_columns(trainer)
        if not self._is_narrow:
            return columns
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = 6
        return [column for column in columns if not isinstance(column, ProcessingSpeedColumn)]

    @property
    def _is_narrow(self) -> bool:
        return self._console is not None and self._console.width < _WIDE_COLUMNS

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the logged values shown beside the bar; in a narrow terminal only one: the total loss or the first loss."""
        values = {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}
        if not self._is_narrow:
            return values
        training_names = [name for name in values if name.startswith("train/")]
        shown = [name for name in training_names if name == "train/loss"] or training_names[:1]
        return {name.removeprefix("train/"): values[name] for name in shown}


class StageTrainer(Trainer):
    """Lightning's Trainer. Settings may give the two lengths below in epochs ("12ep"); `TrainingCLI` converts them.

    Args:
        max_steps: length of the training in optimizer steps; -1 for no limit.
        val_check_interval: training batches between two validations.
    """

    def __init__(
        self, *, max_steps: int | str = -1, val_check_interval: int | float | str | None = None, **options: Any
    ) -> None:
        super().__init__(max_steps=max_steps, val_check_interval=val_check_interval, **options)  # type: ignore[arg-type]


class StageCLI(LightningCLI):
    """LightningCLI for one stage, whose model and data classes are fixed: `--model.lr=1e-4 --data.batch_size=64 --trainer.devices=2`.

    If stderr is a terminal, a progress bar is shown there, unless `--trainer.enable_progress_bar=false`.
    """

    def __init__(self, *classes: Any, **options: Any) -> None:
        defaults: dict[str, Any] = {
            "run": False,
            "parser_class": StageParser,
            "parser_kwargs": {"allow_abbrev": False},
            "trainer_class": StageTrainer,
            "seed_everything_default": 1234,
            "save_config_callback": None,  # the stages write their settings themselves
            "auto_configure_optimizers": False,
        }
        hide_lightning_messages()
        with wrap_invalid_settings():
            super().__init__(*classes, **{**defaults, **options})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the options from words, or from a `Request` (words and an experiment's settings). Check that seeds have 32 bits."""
        words, settings = getattr(args, "words", args), getattr(args, "settings", None)
        self.is_check = getattr(args, "is_check", False)
        if settings:
            # `sources` is set on the parser class, because jsonargparse makes another parser for the arguments of a class.
            StageParser.sources = args.sources  # where the settings were written, for error messages
            self.config = parser.parse_args(words, namespace=parser.parse_object(settings))
        else:
            super().parse_arguments(parser, words)
        for name in ("seed_everything", "data.seed"):
            seed = self.config.get(name)
            if seed is not None and not 0 <= int(seed) < 2**32:
                raise DiffcapError(f"--{name} is {seed}; give a seed from 0 to {2**32 - 1} (with make: SEED=1234).")

    def before_instantiate_classes(self) -> None:
        """End the command if it only checks its options (`Request.is_check`)."""
        if self.is_check:
            sys.exit(0)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer with lines about the progress, and with a progress bar if stderr is a terminal and the settings allow it."""
        config = self._get(self.config_init, "trainer", default={})
        values = [config.get(name) or [] for name in ("callbacks", "plugins")]
        callbacks, plugins = (list(value) if isinstance(value, list) else [value] for value in values)
        callbacks += kwargs.pop("callbacks", [])
        if not any(isinstance(callback, ProgressBar) for callback in callbacks):
            if not sys.stderr.isatty():
                kwargs["enable_progress_bar"] = False
            elif config.get("enable_progress_bar") is not False:
                callbacks.append(StageProgressBar(console_kwargs={"stderr": True}))
        callbacks.append(LogProgress())
        options = launcher_options(config.get("devices", 1))  # for processes of torchrun or srun
        if launched_plugins := options.pop("plugins", []):
            kwargs["plugins"] = plugins + launched_plugins
        if config.get("strategy", "auto") != "auto":
            options.pop("strategy", None)
        kwargs |= options
        with wrap_invalid_settings(TypeError):  # raised if `devices` is not a number
            return super().instantiate_trainer(callbacks=callbacks, **kwargs)


@contextmanager
def wrap_invalid_settings(*more_types: type[Exception]) -> Iterator[None]:
    """Turn a ValueError, Lightning's MisconfigurationException or an error of one of `more_types` into a `DiffcapError`."""
    error_types: tuple[type[Exception], ...] = (ValueError, MisconfigurationException, *more_types)
    try:
        yield
    except error_types as error:
        reason = one_line(error, 300)
        raise DiffcapError(f"invalid settings: {reason}; change them and run the command again.") from error


# Patterns of warnings about Lightning's internals, or about what the stages do on purpose.
_IGNORED_WARNINGS = (
    ".*LeafSpec",  # a deprecated class of PyTorch that Lightning uses
    "predict returned None",  # captions are kept in the module, features are written to the feature store
    "Checkpoint directory .* exists",  # the config is written into the run's folder before the first checkpoint
    "Couldn't infer the batch indices",  # in extraction, each batch contains the row numbers of its images
    "It is recommended to use .self.log",  # values are reduced over the ranks before they are logged
    "LightningCLI's args parameter",  # the stages pass their arguments to LightningCLI instead of using sys.argv
    "The `srun` command is available",  # `lit.launch.find_launch` knows whether srun started this process
    "The '\\w+' does not have many workers",  # worker processes would read features from a memory map more slowly
)


def hide_lightning_messages() -> None:
    """Hide Lightning's information messages and the warnings in `_IGNORED_WARNINGS`; other warnings and errors are shown."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _IGNORED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    launcher_logger = logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script")
    launcher_logger.setLevel(logging.INFO)
    launcher_logger.addFilter(_explain_lost_process)


def _explain_lost_process(record: logging.LogRecord) -> bool:
    # This logger of Lightning has one message only: another process has failed, so that the main process is killed, too.
    record.msg = lost_process(record.getMessage().partition(". ")[0])
    return True
