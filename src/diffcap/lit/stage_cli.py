"""The command line of every stage that runs a Lightning trainer."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import diffcap.lit.light_help  # noqa: F401  before Lightning, see there

# isort: split
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from diffcap.utils.console import OneLineErrorMixin
from diffcap.utils.errors import DiffcapError


class StageParser(OneLineErrorMixin, LightningArgumentParser):
    """Lightning's parser with errors of one sentence; half an option's name is a typo."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})


class StageProgressBar(RichProgressBar):
    """Lightning's bar without what means nothing here: the one endless epoch, and the number of the log folder."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """The logged values beside the bar."""
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}


class StageCLI(LightningCLI):
    """LightningCLI with a stage's own module and data fixed: `--model.lr=1e-4 --data.batch_size=64 --trainer.devices=2`.

    Without subcommands unless `run=True` is given; a seed by default; a run into the same folder replaces its config; a
    rich progress bar on a terminal, unless `--trainer.enable_progress_bar=false`.

    Args:
        model_class: the stage's LightningModule.
        datamodule_class: the stage's LightningDataModule.
        options: anything else that LightningCLI takes.
    """

    def __init__(
        self,
        model_class: type[LightningModule],
        datamodule_class: type[LightningDataModule] | None = None,
        **options: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "run": False,
            "parser_class": StageParser,
            "seed_everything_default": 1234,
            "save_config_kwargs": {"overwrite": True},
            "auto_configure_optimizers": False,
        }
        quiet()
        super().__init__(model_class, datamodule_class, **{**settings, **options})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Read the options; a seed that NumPy or PyTorch would refuse is one sentence."""
        super().parse_arguments(parser, args)
        for name in ("seed_everything", "data.seed"):
            seed = self.config.get(name)
            if seed is not None and not 0 <= int(seed) < 2**32:
                raise DiffcapError(f"--{name} is {seed}; give a seed from 0 to {2**32 - 1} (with make: SEED=1234).")

    def instantiate_classes(self) -> None:
        """Build module, data and trainer."""
        with plain_settings():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer; a rich progress bar where there is a terminal, unless the configuration brings its own or none."""
        config = self._get(self.config_init, "trainer", default={})
        callbacks = config.get("callbacks") or []
        callbacks = [*(callbacks if isinstance(callbacks, list) else [callbacks]), *kwargs.pop("callbacks", [])]
        if not any(isinstance(callback, ProgressBar) for callback in callbacks):
            if not sys.stderr.isatty():
                kwargs["enable_progress_bar"] = False
            elif config.get("enable_progress_bar") is not False:
                callbacks.append(StageProgressBar())
        with plain_settings(TypeError):
            return super().instantiate_trainer(callbacks=callbacks, **kwargs)


@contextmanager
def plain_settings(*more: type[Exception]) -> Iterator[None]:
    """Wrap the building of module, data and trainer: values that do not go together are one sentence.

    Args:
        more: what else a wrong value raises there; Lightning's trainer says TypeError of devices that are no number.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, MisconfigurationException, *more)
    try:
        yield
    except kinds as error:
        raise DiffcapError(f"the settings do not go together: {' '.join(str(error).split())[:300]}") from error


# Advice about Lightning's own internals, or about what our stages do on purpose.
_CHATTER = (
    ".*LeafSpec",
    "predict returned None",  # the captions are kept by the module, the features by the store
    "Checkpoint directory .* exists",  # a run's folder has its config and identity before its first checkpoint
    "Couldn't infer the batch indices",  # extraction's batches carry the rows they belong to
    "It is recommended to use .self.log",  # values are reduced over the ranks before they are logged
    "LightningCLI's args parameter",  # the pipeline resolves the command line
    "The '\\w+' does not have many workers",  # features are read from a memory map, workers cost more than they bring
)


def quiet() -> None:
    """Keep Lightning's notes and advertisements out of a stage's output; its other warnings and its errors stay."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in _CHATTER:
        warnings.filterwarnings("ignore", message=message)
