"""Run one training stage in its run directory: command line, resuming, checkpoints, logs, finished.json.

The directory contains `config.yaml` (resolved), `identity.json` (hash of the configuration), `last.ckpt` (to resume from),
`best.ckpt` (best on val, for stages with `run.monitor`) and `logs/` (CSV). A finished training adds `finished.json`, with the
size and hash of the resulting checkpoint; Make checks that this file exists.
"""

import argparse
import io
import json
import math
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from diffcap.checkpoints.base_models import find_base
from diffcap.checkpoints.reading import read_checkpoint
from diffcap.data.workers import explain_lost_workers
from diffcap.evaluation.tables import validation_line
from diffcap.lit.config_hash import check_init_from, hash_config
from diffcap.lit.launch import find_launch
from diffcap.lit.precision import MatmulPrecision, note_precision, set_precision
from diffcap.lit.schedules import in_steps
from diffcap.lit.stage_cli import StageCLI
from diffcap.records import write_json
from diffcap.run_folder import (
    BEST,
    CONFIGURATION,
    FINISHED,
    IDENTITY,
    INIT_FROM_SHA256,
    LAST,
    LOGS,
    STEP_CHECKPOINT_GLOB,
    checkpoint_metadata,
    checkpoint_sha256,
    find_fault,
    init_stage_dir,
    is_finished,
    main_process,
    read_config_hash,
    stage_lock,
)
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write
from diffcap.utils.provenance import provenance
from diffcap.utils.settings import get_config_value


@dataclass
class RunSettings:
    """Output folder, checkpoint selection and logging of a training stage.

    Args:
        out: the run's folder, e.g. runs/blocks/pcl/finetune.
        monitor: logged value that selects `best.ckpt`, e.g. val/CIDEr-D; null: the last checkpoint is the result.
        mode: whether larger ("max") or smaller ("min") values of `monitor` are better.
        select_after: first step at which `best.ckpt` can be saved (IDC-PCL on Birds-to-Words: 2,000). Earlier validations do not
            count for `patience` either.
        patience: number of validations without improvement after which training stops; null: never.
        checkpoint_every: number of steps between two saves of `last.ckpt`.
        keep_last_k: number of periodic checkpoints to keep (step-000200.ckpt, ...), for weight averaging; 0 keeps only last.ckpt.
        logger: additional logger: "wandb" (Weights & Biases, offline without an account) or "tensorboard" (files in logs/);
            "none" writes the CSV file only.
        project: name of the Weights & Biases project.
        matmul_precision: of float32 matrix products, see torch.set_float32_matmul_precision: "highest" (float32, as in the papers'
            released code), "high" (TF32 on CUDA) or "medium"; null: high on CUDA, highest elsewhere. config.yaml has the one
            in effect as a comment, finished.json as a value.
        force_bf16: allow a trainer.precision of bf16 on a CPU without instructions for bfloat16.
        dataset: variable DATASET of the experiment, recorded for `make ... CONFIG=config.yaml`.
        method: variable METHOD of the experiment, also recorded.
        ablation: variable ABLATION of the experiment, also recorded.
        preset: variable TRAINER of the experiment, also recorded.
    """

    out: str
    monitor: str | None = None
    mode: Literal["max", "min"] = "max"
    select_after: int = 0
    patience: int | None = None
    checkpoint_every: int = 200
    keep_last_k: int = 0
    logger: Literal["wandb", "tensorboard", "none"] = "none"
    project: str = "diffcap"
    matmul_precision: MatmulPrecision | None = None
    force_bf16: bool = False
    dataset: str | None = None
    method: str | None = None
    ablation: str | None = None
    preset: str | None = None


class PeriodicCheckpoint(Callback):
    """Save `last.ckpt` between two steps, after the validation of the previous step; on SIGINT or SIGTERM save it and stop.

    One process stops at the end of the step. Several agree to stop at the next multiple of `trainer.log_every_n_steps`. A
    second signal stops the training at once. In a job of SLURM the signals have no effect here, as the job is requeued.

    Args:
        path: path of `last.ckpt`. every_n_steps: number of steps between two saves. keep_last_k: number of copies to keep in
            the same folder, named by their steps (step-000200.ckpt, ...). saved_step: the step of `last.ckpt`; 0 without one.
    """

    def __init__(self, path: Path, every_n_steps: int, keep_last_k: int = 0, saved_step: int = 0) -> None:
        self.path, self.every_n_steps, self.keep_last_k = path, every_n_steps, keep_last_k
        self.saved_step = saved_step
        self._stop_note = ""
        self._interrupted = math.inf  # when

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the first step of all processes, before they wait for each other in different steps.

        Raises:
            DiffcapError: the steps differ.
        """
        if trainer.world_size > 1:
            steps = [0] * trainer.world_size
            dist.all_gather_object(steps, self.saved_step)
            if len(set(steps)) > 1:
                raise DiffcapError(
                    f"{self.path.parent}: the processes would start from the steps {', '.join(map(str, steps))}, because they "
                    "see different run folders; set RUN to a folder on a disk that all hosts share."
                )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the signal handlers, which Lightning resets after the training."""
        stop_every = self._stop_every(trainer)
        when = "this step" if stop_every == 1 else f"the next multiple of {stop_every} steps"
        if trainer.is_global_zero:
            self._stop_note = (
                f"interrupted: the training stops after {when} and saves {LAST}; a second signal ends it at once\n"
            )
        if "SLURM_JOB_ID" not in os.environ and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
                    signal.signal(number, self._on_signal)

    def _stop_every(self, trainer: pl.Trainer) -> int:
        every = trainer.log_every_n_steps or self.every_n_steps  # type: ignore[attr-defined]
        return 1 if trainer.world_size == 1 else int(every)

    def _on_signal(self, *_: Any) -> None:
        if self._interrupted == math.inf:
            self._interrupted = time.monotonic()
            os.write(2, self._stop_note.encode())  # print() must not be called while another print() is interrupted
        elif time.monotonic() > self._interrupted + 1:  # make and its process group get one signal twice
            raise KeyboardInterrupt

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save every `every_n_steps` steps and on a signal, before the first batch of the gradient accumulation.

        Raises:
            SIGTERMException: the process, or one of several, has got a signal.
        """
        step = trainer.global_step
        if batch_idx % trainer.accumulate_grad_batches:
            return
        stop = step % self._stop_every(trainer) == 0 and trainer.strategy.reduce_boolean_decision(
            self._interrupted < math.inf, all=False
        )
        periodic = step % self.every_n_steps == 0
        if step and (periodic or stop):
            self._save(trainer)
            if periodic and self.keep_last_k and trainer.is_global_zero:
                self._copy_checkpoint(step)
        if stop:
            raise SIGTERMException

    def _save(self, trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        # When Lightning loads a checkpoint whose next batch ends a step, it adds 1 to this counter, the step of the logs,
        # because its own checkpoints are saved before the counter grows.
        ahead = int(not loop._should_accumulate())
        loop._batches_that_stepped -= ahead
        trainer.save_checkpoint(self.path)
        loop._batches_that_stepped += ahead
        self.saved_step = trainer.global_step

    def _copy_checkpoint(self, step: int) -> None:
        """Add a checkpoint, keep the last k, and delete checkpoints of later steps left by a killed run."""
        copy = self.path.with_name(f"step-{step:06d}.ckpt")
        with atomic_write(copy, per_process=False) as temporary:
            shutil.copyfile(self.path, temporary)
        checkpoints = sorted(self.path.parent.glob(STEP_CHECKPOINT_GLOB))
        count = checkpoints.index(copy) + 1
        for path in checkpoints[: max(count - self.keep_last_k, 0)] + checkpoints[count:]:
            path.unlink()


class DelayedModelCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that saves nothing before the step `start_step`."""

    def __init__(self, start_step: int, **options: Any) -> None:
        super().__init__(**options)
        self.start_step = start_step

    @property
    def state_key(self) -> str:
        """Key of the state in a checkpoint, with this class's name in earlier versions."""
        return super().state_key.replace(type(self).__qualname__, "SelectAfter", 1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare and save, if the training has reached `start_step`."""
        if self.monitor not in trainer.callback_metrics and not trainer.sanity_checking:
            logged = ", ".join(sorted(name for name in trainer.callback_metrics if name.startswith("val/")))
            raise DiffcapError(
                f"run.monitor is {self.monitor!r}, but validation logs {logged}; set run.monitor to one of these names."
            )
        if not trainer.global_step:
            self._last_global_step_saved = -1  # Lightning treats the initial weights as saved
        if trainer.global_step >= self.start_step:
            super().on_validation_end(trainer, pl_module)


class StopEarly(EarlyStopping):
    """EarlyStopping that ignores validations before the step `start_step`, as `DelayedModelCheckpoint` does.

    It also stops a resumed run whose checkpoint has already reached the patience.
    """

    def __init__(self, start_step: int, **options: Any) -> None:
        super().__init__(**options)
        self.start_step = start_step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare, if the training has reached `start_step`."""
        if trainer.global_step >= self.start_step:
            super().on_validation_end(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop before the first step if the patience is reached."""
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write each checkpoint to a temporary file in the same folder and rename it.

    A killed process or a full disk leaves the previous checkpoint intact. Lightning writes to the system's temporary folder and
    copies the file if that is on another file system.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one checkpoint file."""
        content = io.BytesIO()  # torch.save to a full disk raises only "unexpected position"
        torch.save(checkpoint, content)
        with atomic_write(path, per_process=False) as temporary:
            temporary.write_bytes(content.getbuffer())


class PrintScores(Callback):
    """Print one line per validation, for logs without a progress bar."""

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Print the step and the validation metrics."""
        if trainer.is_global_zero and not trainer.sanity_checking:
            logged = trainer.callback_metrics.items()
            values = {name[4:]: float(value) for name, value in logged if name.startswith("val/")}
            print(f"step {trainer.global_step} of {trainer.max_steps}  val: {validation_line(values)}", flush=True)


def _logged_in() -> bool:
    """Return whether an account of Weights & Biases is configured."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"):
        return True
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="ignore")


class TrainingCLI(StageCLI):
    """The command line of a training stage: `--model.*`, `--data.*`, `--trainer.*` and `--run.*`.

    The main process locks the stage's folder from the constructor to the end of `train`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.lock = ExitStack()
        try:
            super().__init__(*args, **options)
        except BaseException:
            self.lock.close()
            raise

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add `--run.*`, and link the captioner's sizes to the data."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(RunSettings, "run")
        parser.add_argument("--run.keep", type=int | None, help=argparse.SUPPRESS)  # name of keep_last_k in diffcap 0.1
        # LightningCLI ignores a link if the captioner has no such argument.
        for size in ("vocabulary_size", "feature_channels", "grid", "image_size", "max_length", "classes"):
            parser.link_arguments(f"data.{size}", f"model.captioner.init_args.{size}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Decide whether the run starts, resumes, or is already finished."""
        keep = self.config.run.pop("keep", None)
        if keep is not None:
            self.config.run.keep_last_k = keep
        self.settings = RunSettings(**self.config.run.as_dict())
        if "WANDB_SWEEP_ID" in os.environ:  # each run of a sweep has its own folder
            self.settings.out = str(Path(self.settings.out) / os.environ.get("WANDB_RUN_ID", "run"))
        self.out = Path(self.settings.out)
        _pin_base_model(self.config, self.out)
        config = json.loads(self.parser.dump(self.config, format="json", skip_validation=True))
        self.config_hash = hash_config(config)
        if main_process():
            self.lock.enter_context(stage_lock(self.out, self.config.data.seed))
        other = read_config_hash(self.out) not in (None, self.config_hash)
        fault = "it holds a run with other settings" if other else find_fault(self.out)
        if not fault and is_finished(self.out):  # every rank reads the same files and exits
            if main_process():
                print(f"{self.out}: already finished with these settings")
            sys.exit(0)
        self.fault = fault  # reason to move the folder to a backup; None if there is none
        last = self.out / LAST
        self.resume_from = last if not fault and last.is_file() else None
        self.resume_step = _check_resumable(last) if self.resume_from else 0
        if start := config["model"].get("init_from"):
            check_init_from(Path(start))

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the trainer with the run's callbacks and loggers."""
        settings = self.settings
        self.periodic = PeriodicCheckpoint(
            self.out / LAST, settings.checkpoint_every, settings.keep_last_k, self.resume_step
        )
        callbacks: list[Callback] = [self.periodic, PrintScores()]
        if settings.monitor:
            callbacks.append(
                DelayedModelCheckpoint(
                    settings.select_after, dirpath=self.out, filename="best", monitor=settings.monitor,
                    mode=settings.mode, enable_version_counter=False, save_on_train_epoch_end=False,
                )
            )  # fmt: skip
            if settings.patience is not None:
                callbacks.append(
                    StopEarly(
                        settings.select_after, monitor=settings.monitor, mode=settings.mode, patience=settings.patience,
                        check_on_train_epoch_end=False,
                    )
                )  # fmt: skip
        loggers: list[Logger] = [CSVLogger(self.out, name=LOGS)]
        if settings.logger == "wandb":
            loggers.append(
                WandbLogger(
                    name=None if "WANDB_SWEEP_ID" in os.environ else "/".join(self.out.parts[-3:]),
                    id=os.environ.get("WANDB_RUN_ID", self.config_hash),  # a resumed run continues its curves
                    resume="allow",
                    project=settings.project,
                    save_dir=str(self.out),
                    offline=not _logged_in(),
                    log_model=False,
                )
            )
        if settings.logger == "tensorboard":
            loggers.append(TensorBoardLogger(self.out, name=LOGS, version="tensorboard"))
        callbacks.append(LearningRateMonitor("step"))
        kwargs |= self._lengths()
        trainer = super().instantiate_trainer(
            callbacks=callbacks, logger=loggers, enable_checkpointing=bool(settings.monitor),
            default_root_dir=str(self.out), **kwargs,
        )  # fmt: skip
        set_precision(trainer, settings.matmul_precision, settings.force_bf16)
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def _lengths(self) -> dict[str, int]:
        """The lengths of the trainer that are given in epochs, in steps."""
        lengths = {}
        for name in ("max_steps", "val_check_interval"):
            length = self.config.get(f"trainer.{name}")
            if isinstance(length, str):
                steps = in_steps(length, lambda: self.datamodule.batches_per_epoch, f"trainer.{name}")
                if name == "max_steps":  # in optimizer steps; val_check_interval is in batches
                    steps /= self.config.get("trainer.accumulate_grad_batches", 1)
                lengths[name] = max(1, round(steps))
        return lengths

    def train(self, stage: str) -> None:
        """Fit, from `last.ckpt` if it exists, and write finished.json."""
        with self.lock:
            self._train(stage)

    def _train(self, stage: str) -> None:
        last = self.out / LAST
        resume_from = str(self.resume_from) if self.resume_from else None
        backup = self._prepare_run_dir() if main_process() else None
        try:
            with explain_lost_workers():
                self.trainer.fit(self.model, datamodule=self.datamodule, ckpt_path=resume_from, weights_only=True)
        except SystemExit:  # Ctrl-C or SIGTERM: Lightning exits without a message and with status 0
            if self.trainer.is_global_zero:
                step = self.periodic.saved_step
                sys.exit(
                    f"error: interrupted at step {self.trainer.global_step}; run the same command again to "
                    + (f"resume at step {step}." if step else "start from step 0, since there is no checkpoint yet.")
                )
            # If a process that Lightning has started ends with another status, Lightning kills the main process.
            sys.exit(1 if find_launch() else 0)
        except DiffcapError:
            if backup and not last.is_file():  # no step was trained: restore the earlier run
                shutil.rmtree(self.out)
                backup.rename(self.out)
                print(f"{self.out}: the earlier run is restored")
            raise
        self.trainer.save_checkpoint(last)
        self.trainer.strategy.barrier()
        if not self.trainer.is_global_zero:
            return
        best = self.out / BEST
        if self.settings.monitor and not best.is_file():
            with atomic_write(best, per_process=False) as temporary:
                shutil.copyfile(last, temporary)
        score = getattr(self.trainer.checkpoint_callback, "best_model_score", None)
        start = self.config.model.get("init_from")
        write_json(
            self.out / FINISHED,
            {
                "stage": stage,
                INIT_FROM_SHA256: checkpoint_sha256(init_stage_dir(Path(start))) if start else None,
                **checkpoint_metadata(best if self.settings.monitor else last),
                "steps": self.trainer.global_step,
                "train_seconds": round(self.model.train_seconds, 1),
                "monitor": self.settings.monitor,
                "best": float(score) if score is not None and math.isfinite(score) else None,
                "identity": self.config_hash,
                "matmul_precision": torch.get_float32_matmul_precision(),
                "provenance": provenance(seed=self.datamodule.seed, dataset=self.datamodule.dataset.name),
            },
        )

    def _prepare_run_dir(self) -> Path | None:
        """Create the run directory; returns the path of the backup of a run with other settings, or None."""
        backup = _move_to_backup(self.out, self.fault) if self.fault else None
        (self.out / FINISHED).unlink(missing_ok=True)  # a damaged file; Make checks only that it exists
        write_json(self.out / IDENTITY, {"identity": self.config_hash})
        self.parser.save(self.config, self.out / CONFIGURATION, overwrite=True, skip_validation=True)
        note_precision(self.out / CONFIGURATION)
        return backup


def _pin_base_model(config: Any, out: Path) -> None:
    """Fetch the base model of a vision-language captioner, and set its commit and the source of the vocabulary in the settings.

    If the settings name no commit, it is that of the run in `out`, so that a resumed training has the same base model.
    """
    arguments = config.get("model.captioner.init_args")
    base = arguments.get("base") if arguments is not None else None
    if base is None:
        return
    revision = arguments.get("revision")
    recorded = get_config_value([out / CONFIGURATION], "model", "captioner", "init_args") or {}
    if revision is None and recorded.get("base") == base:
        revision = recorded.get("revision")
    found = find_base(base, revision)
    arguments.revision = config.data.base_revision = found.revision
    arguments.base = config.data.base = found.name
    if main_process():
        print(f"base model {found.origin}")


def _check_resumable(last: Path) -> int:
    """Check that the checkpoints of an interrupted training are readable; returns the step of `last.ckpt`.

    Raises:
        DiffcapError: `last.ckpt` is missing or damaged, or the `best.ckpt` that it refers to is.
    """
    out = last.parent
    try:
        checkpoint = read_checkpoint(last)
        if any(state.get("best_model_score") is not None for state in checkpoint.get("callbacks", {}).values()):
            read_checkpoint(out / BEST)
        return int(checkpoint["global_step"])
    except DiffcapError as error:
        reason = str(error).rpartition("; ")[0]  # without the remedy in that message
        raise DiffcapError(
            f"{out}: the interrupted training cannot be resumed ({reason}); to train from the beginning, run "
            f"`{shlex.join(['mv', str(out), f'{out}.damaged'])}` and then this command again."
        ) from None


def _move_to_backup(out: Path, fault: str) -> Path:
    """Rename the folder of a run that cannot be used; returns the new path."""
    backup = next(path for n in range(1, 10_000) if not (path := out.with_name(f"{out.name}.{n}")).exists())
    out.rename(backup)
    print(f"{out}: {fault}; the folder is renamed to {backup}, and the training starts from the beginning")
    return backup
