"""One training stage from its command line to its run folder: resume, checkpoints, logs, and the mark that it is finished.

The folder holds `config.yaml` (resolved), `last.ckpt` (to resume from), `best.ckpt` (best on val; stages that select),
`logs/` (CSV), and at the end `finished.json`, which Make looks for and which has the size and hash of the resulting checkpoint.
"""

import hashlib
import io
import json
import math
import os
import shlex
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO

from diffcap.checkpoints.reading import read_checkpoint, weights_hash
from diffcap.evaluation.tables import validation_line
from diffcap.features.store import SUMS
from diffcap.lit.stage_cli import StageCLI
from diffcap.records import file_hash, write_json
from diffcap.run_folder import (
    BEST,
    CONFIGURATION,
    FINISHED,
    IDENTITY,
    KEPT,
    LAST,
    LOGS,
    START_SHA256,
    checkpoint_entries,
    checkpoint_sha256,
    fault_of,
    identity_of,
    is_finished,
    main_process,
    stage_lock,
    stage_of,
    start_folder,
)
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write
from diffcap.utils.provenance import provenance

# A run that differs from an earlier one only here continues it.
_SAME_RUN = (
    "trainer.devices", "trainer.accelerator", "trainer.strategy", "trainer.num_nodes", "trainer.enable_progress_bar",
    "data.num_workers", "run.logger", "run.project", "run.keep", "run.dataset", "run.method", "run.ablation", "run.preset",
    "config",
)  # fmt: skip


@dataclass
class RunSettings:
    """Where a training stage writes, and what it selects by.

    Args:
        out: the run's folder, e.g. runs/blocks/pcl/finetune.
        monitor: logged value that chooses `best.ckpt`, e.g. val/CIDEr-D; null: the last checkpoint is the result.
        mode: whether larger or smaller is better.
        select_after: steps before which nothing is selected (IDC-PCL on the birds: 2,000).
        patience: number of validations without improvement after which training stops; null: never.
        checkpoint_every: steps between two `last.ckpt`.
        keep: number of periodic checkpoints to keep (step-000200.ckpt, ...), for weight averaging; 0 keeps only last.ckpt.
        logger: "wandb" logs to Weights & Biases (offline without an account) beside the CSV file, "tensorboard" to TensorBoard
            files in logs/; "none" to CSV only.
        project: of Weights & Biases.
        dataset: variable DATASET of the experiment, recorded for `make ... CONFIG=config.yaml`.
        method: variable METHOD, recorded too.
        ablation: variable ABLATION, recorded too.
        preset: variable TRAINER, recorded too.
    """

    out: str
    monitor: str | None = None
    mode: Literal["max", "min"] = "max"
    select_after: int = 0
    patience: int | None = None
    checkpoint_every: int = 200
    keep: int = 0
    logger: Literal["wandb", "tensorboard", "none"] = "none"
    project: str = "diffcap"
    dataset: str | None = None
    method: str | None = None
    ablation: str | None = None
    preset: str | None = None


class SaveLast(Callback):
    """Writes `last.ckpt` between two steps, after whatever validation belongs to the step before.

    Args:
        path: of `last.ckpt`. every: steps between two. keep: how many of them stay beside it, by their steps.
    """

    def __init__(self, path: Path, every: int, keep: int = 0) -> None:
        self.path, self.every, self.keep = path, every, keep

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, number: int) -> None:
        """Save at every `every`-th step, before the first of the batches whose gradients it accumulates."""
        first_of_step = number % trainer.accumulate_grad_batches == 0
        if first_of_step and trainer.global_step and trainer.global_step % self.every == 0:
            trainer.save_checkpoint(self.path)
            if self.keep and trainer.is_global_zero:
                self._keep(trainer.global_step)

    def _keep(self, step: int) -> None:
        """One file more, and one less where there are too many; of those of later steps, which a kill has undone, none."""
        kept = self.path.with_name(f"step-{step:06d}.ckpt")
        with atomic_write(kept, per_process=False) as temporary:
            shutil.copyfile(self.path, temporary)
        found = sorted(self.path.parent.glob(KEPT))
        for old in [*found[: found.index(kept) + 1][: -self.keep], *found[found.index(kept) + 1 :]]:
            old.unlink()


class SelectAfter(ModelCheckpoint):
    """`best.ckpt` by a monitored value, from a given step on."""

    def __init__(self, after: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.after = after

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare and save, unless it is too early."""
        if self.monitor not in trainer.callback_metrics and not trainer.sanity_checking:
            logged = ", ".join(sorted(name for name in trainer.callback_metrics if name.startswith("val/")))
            raise DiffcapError(f"run.monitor is {self.monitor!r}; what validation logs is {logged}.")
        if not trainer.global_step:
            self._last_global_step_saved = -1  # Lightning takes what a run begins with for saved already
        if trainer.global_step >= self.after:
            super().on_validation_end(trainer, pl_module)


class StopEarly(EarlyStopping):
    """Stops when validation gains no more; a run that had stopped so, and was killed before it said so, stops again."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look whether the checkpoint is of a run that is over."""
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints beside their place and renames them, so that a kill or a full disk leaves the last one whole.

    Lightning's own way goes through the system's temporary folder, and from there across file systems by copying.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one file."""
        content = io.BytesIO()  # torch.save itself would say "unexpected position" where the disk is full
        torch.save(checkpoint, content)
        with atomic_write(path, per_process=False) as temporary:
            temporary.write_bytes(content.getbuffer())


class PrintScores(Callback):
    """One line a validation, for logs where a progress bar cannot live."""

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print step and validation values."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            logged = trainer.callback_metrics.items()
            values = {name[4:]: float(value) for name, value in logged if name.startswith("val/")}
            print(f"step {trainer.global_step} of {trainer.max_steps}  val: {validation_line(values)}", flush=True)


def _logged_in() -> bool:
    """Whether Weights & Biases has an account to log to."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="ignore")


class TrainingCLI(StageCLI):
    """The command line of a training stage: `--model.*`, `--data.*`, `--trainer.*` and `--run.*`.

    The main process holds the lock of the stage's folder from here to the end of `train`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.lock = ExitStack()
        try:
            super().__init__(*args, **options)
        except BaseException:
            self.lock.close()
            raise

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add `--run.*`, and take the sizes that the data decide from the data."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(RunSettings, "run")
        # A method that does not take one of them leaves it.
        for size in ("vocabulary_size", "feature_channels", "grid", "image_size", "max_length", "classes"):
            parser.link_arguments(f"data.{size}", f"model.captioner.init_args.{size}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Decide between a fresh start, going on, and nothing to do; put another run's folder aside."""
        self.settings = RunSettings(**self.config.run.as_dict())
        if "WANDB_SWEEP_ID" in os.environ:  # every run of a sweep has a folder of its own
            self.settings.out = str(Path(self.settings.out) / os.environ.get("WANDB_RUN_ID", "run"))
        self.out = Path(self.settings.out)
        config = json.loads(self.parser.dump(self.config, format="json", skip_validation=True))
        self.identity = _identity(config)  # inputs are part of it: see there
        if main_process():
            self.lock.enter_context(stage_lock(self.out, self.config.data.seed))
        other = identity_of(self.out) not in (None, self.identity)
        fault = "it holds a run with other settings" if other else fault_of(self.out)
        if not fault and is_finished(self.out):  # every rank sees the same files, and leaves
            if main_process():
                print(f"{self.out}: finished already, with these settings")
            sys.exit(0)
        self.fault = fault  # why the folder will be put aside
        last = self.out / LAST
        self.resume_from = last if not fault and last.is_file() else None
        if self.resume_from:
            _check_resumable(last)
        if start := config["model"].get("init_from"):
            _check_start(Path(start))

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """A trainer with the run's callbacks and loggers."""
        settings = self.settings
        callbacks: list[Callback] = [
            SaveLast(self.out / LAST, settings.checkpoint_every, settings.keep),
            PrintScores(),
        ]
        if settings.monitor:
            callbacks.append(
                SelectAfter(
                    settings.select_after, dirpath=self.out, filename="best", monitor=settings.monitor,
                    mode=settings.mode, enable_version_counter=False, save_on_train_epoch_end=False,
                )
            )  # fmt: skip
            if settings.patience is not None:
                callbacks.append(
                    StopEarly(
                        settings.monitor, mode=settings.mode, patience=settings.patience, check_on_train_epoch_end=False
                    )
                )  # fmt: skip
        loggers: list[Logger] = [CSVLogger(self.out, name=LOGS)]
        if settings.logger == "wandb":
            loggers.append(
                WandbLogger(
                    name=None if "WANDB_SWEEP_ID" in os.environ else "/".join(self.out.parts[-3:]),
                    id=os.environ.get("WANDB_RUN_ID", self.identity),  # a resumed run goes on in its own curves
                    resume="allow",
                    project=settings.project,
                    save_dir=str(self.out),
                    offline=not _logged_in(),
                    log_model=False,
                )
            )
        if settings.logger == "tensorboard":
            try:
                loggers.append(TensorBoardLogger(self.out, name=LOGS, version="tensorboard"))
            except ModuleNotFoundError:
                raise DiffcapError(
                    "LOGGER=tensorboard needs the package tensorboard; run `pip install tensorboard`, or use LOGGER=none."
                ) from None
        callbacks.append(LearningRateMonitor("step"))
        trainer = super().instantiate_trainer(
            callbacks=callbacks, logger=loggers, enable_checkpointing=bool(settings.monitor),
            default_root_dir=str(self.out), **kwargs,
        )  # fmt: skip
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def train(self, stage: str) -> None:
        """Fit, from `last.ckpt` if there is one, and mark the run finished."""
        with self.lock:
            self._train(stage)

    def _train(self, stage: str) -> None:
        last = self.out / LAST
        resume_from = str(self.resume_from) if self.resume_from else None
        aside = self._open_folder() if main_process() else None
        try:
            self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=resume_from, weights_only=True)
        except SystemExit:  # Ctrl-C or SIGTERM, for which Lightning would leave without a word, and with status 0
            if self.trainer.is_global_zero:
                sys.exit(f"error: interrupted at step {self.trainer.global_step}; run the same command again to go on.")
            sys.exit(1)
        except DiffcapError:
            if aside and not last.is_file():  # it never began: the run that was there comes back
                shutil.rmtree(self.out)
                aside.rename(self.out)
                print(f"{self.out}: holds the earlier run again")
            raise
        self.trainer.save_checkpoint(last)
        self.trainer.strategy.barrier()
        if not self.trainer.is_global_zero:
            return
        best = self.out / BEST
        if self.settings.monitor and not best.is_file():
            with atomic_write(best, per_process=False) as temporary:
                shutil.copyfile(last, temporary)
        chosen = self.trainer.checkpoint_callback
        score = getattr(chosen, "best_model_score", None)
        start = self.config.model.get("init_from")
        write_json(
            self.out / FINISHED,
            {
                "stage": stage,
                START_SHA256: checkpoint_sha256(start_folder(Path(start))) if start else None,
                **checkpoint_entries(best if self.settings.monitor else last),
                "steps": self.trainer.global_step,
                "train_seconds": round(self.model.train_seconds, 1),
                "monitor": self.settings.monitor,
                "best": float(score) if score is not None and math.isfinite(score) else None,
                "identity": self.identity,
                "provenance": provenance(seed=self.datamodule.seed, dataset=self.datamodule.dataset.name),
            },
        )

    def _open_folder(self) -> Path | None:
        """Make the folder ready; returns the new path of the earlier run, if the folder held one that cannot be used."""
        aside = _put_aside(self.out, self.fault) if self.fault else None
        (self.out / FINISHED).unlink(missing_ok=True)  # a damaged one; Make only looks whether the file exists
        write_json(self.out / IDENTITY, {"identity": self.identity})
        self.parser.save(self.config, self.out / CONFIGURATION, overwrite=True, skip_validation=True)
        return aside


def _identity(config: dict[str, Any]) -> str:
    """Hash of a resolved configuration, without what does not change the result, and of the files that go in."""
    kept = json.loads(json.dumps(config))
    for path in _SAME_RUN:
        *groups, key = path.split(".")
        place = kept
        for group in groups:
            place = place.get(group) or {}
        place.pop(key, None)
    kept["inputs"] = [file_hash(path) for path in _inputs(kept["data"]) if path.is_file()]
    if (clip := kept["model"].get("clip_weights")) and Path(clip).is_file():
        kept["inputs"].append(file_hash(Path(clip)))
    if start := kept["model"].get("init_from"):
        kept["inputs"].append(_start(Path(start)))
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _start(checkpoint: Path) -> str | None:
    """What a training begins with: the run whose checkpoint it is, or the weights' hash of one from elsewhere.

    Not the file's hash: a checkpoint tells how long its training took.
    """
    if checkpoint.name in (BEST, LAST) and checkpoint.with_name(IDENTITY).is_file():
        identity = identity_of(checkpoint.parent)
        if identity is None:
            _check_start(checkpoint)
        return identity
    return weights_hash(read_checkpoint(checkpoint)) if checkpoint.exists() else None


def _inputs(data: dict[str, Any]) -> list[Path]:
    """The files that decide what a stage reads: counts and features of its datasets, and their negatives."""

    def dataset(folder: Path) -> list[Path]:
        store = folder / "features" / data["features"]
        return [folder / "dataset.json", store / "meta.json", store / SUMS]

    folder = Path(data["folder"])
    inputs = dataset(folder)
    if "tasks" in data:
        inputs.append(Path(data.get("negatives") or folder / "negatives.jsonl"))
    for name in ("singles", "labelled"):
        inputs += dataset(Path(data[name])) if data.get(name) else []
    if data.get("singles"):
        inputs.append(Path(data["singles"]) / "negatives.jsonl")
    return inputs + [Path(other) / "dataset.json" for other in data.get("vocabulary_with") or []]


def _check_start(checkpoint: Path) -> None:
    """Check the stage that a training begins with; the next reader of the file itself is the model.

    Raises:
        DiffcapError: finished.json does not describe the checkpoint in the folder; the message has the command that trains
            the stage again.
    """
    out = checkpoint.parent
    if checkpoint.name not in (BEST, LAST) or not (out / IDENTITY).is_file():  # not of a run
        return
    fault = fault_of(out)
    if not fault and not is_finished(out):
        fault = f"{FINISHED} is damaged" if (out / FINISHED).exists() else "its training is not finished"
    if fault:
        again = shlex.join([sys.executable, "-m", "diffcap", stage_of(out), "--config", str(out / CONFIGURATION)])
        raise DiffcapError(f"{out}: {fault}; train that stage with `{again}`, then run this command again.")


def _check_resumable(last: Path) -> None:
    """Read what an interrupted training goes on from.

    Raises:
        DiffcapError: `last.ckpt`, or the `best.ckpt` that it has chosen before, is missing or damaged.
    """
    out = last.parent
    try:
        callbacks = read_checkpoint(last).get("callbacks", {}).values()
        if any(state.get("best_model_score") is not None for state in callbacks):
            read_checkpoint(out / BEST)
    except DiffcapError as error:
        reason = str(error).rpartition("; ")[0]  # without that message's own way out
        raise DiffcapError(
            f"{out}: the interrupted training cannot be resumed ({reason}); to train from the beginning, run "
            f"`{shlex.join(['mv', str(out), f'{out}.damaged'])}` and then this command again."
        ) from None


def _put_aside(out: Path, fault: str) -> Path:
    """Rename the folder of a run that cannot be used, so that it is not lost; returns the new path."""
    aside = next(path for n in range(1, 10_000) if not (path := out.with_name(f"{out.name}.{n}")).exists())
    out.rename(aside)
    print(f"{out}: {fault}; the folder is now {aside}, and the training starts from the beginning")
    return aside
