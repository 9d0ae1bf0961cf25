"""Run one training stage in its folder, such as runs/blocks/pcl/finetune: command line, resuming, checkpoints, logs, record."""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from diffcap import record
from diffcap.checkpoints.base_models import describe_origin, find_base
from diffcap.checkpoints.reading import read_checkpoint, weights_hash
from diffcap.data.workers import explain_lost_workers
from diffcap.features.store import CHECKSUM_FILE
from diffcap.lit.callbacks import AtomicCheckpointIO, DelayedModelCheckpoint, PeriodicCheckpoint, StopEarly
from diffcap.lit.launch import compare_processes, find_launch
from diffcap.lit.schedules import in_steps
from diffcap.lit.stage_cli import StageCLI
from diffcap.lit.training import MatmulPrecision, set_precision
from diffcap.records import JsonDict, write_json, write_text
from diffcap.registry import Pretraining, import_object, methods
from diffcap.run_folder import (
    BEST,
    CONFIGURATION,
    FINETUNE,
    FINISHED,
    IDENTITY,
    INIT_FROM_SHA256,
    LAST,
    LOGS,
    PRETRAIN,
    REINFORCE,
    RUNNING,
    TRIAL_VARIABLE,
    WANDB_SWEEP,
    checkpoint_metadata,
    find_fault,
    initial_stage_folder,
    is_finished,
    is_main_process,
    read_object,
    stage_lock,
    stage_of,
)
from diffcap.stages import Request
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write
from diffcap.utils.provenance import provenance
from diffcap.utils.settings import get_config_value, own_configs, read_settings

# Options that do not change the result, so a run can be resumed with other values of these options.
_NOT_COMPARED = {
    "trainer": ("devices", "accelerator", "strategy", "num_nodes", "enable_progress_bar"),
    "data": ("num_workers",),
    "run": ("logger", "project", "keep_last_k", "keep", "force_bf16", "out", "dataset", "method", "ablation", "preset"),
}
# Stage -> LightningModule and LightningDataModule. Those of the pre-training depend on the method, see `Pretraining`.
_MODULES = {
    FINETUNE: ("diffcap.lit.finetuning:Captioning", "diffcap.data.datamodules:CaptionData"),
    REINFORCE: ("diffcap.lit.reinforcement:Reinforcement", "diffcap.data.datamodules:ReinforceData"),
}
# Options of the model in earlier versions, and the options that replace them.
_FORMER_OPTIONS = {
    "clip_weights": "model.initial_weights",
    "resnet_weights": "model.initial_weights",
    "half_precision_clip": "model.optimizer",
    "decoder_clip_value": "trainer.callbacks",
    "decoder_plateau_factor": "trainer.callbacks",
}


def train(request: Request) -> None:
    """Run a training stage, or resume an interrupted one. The main process locks the stage's folder until the end."""
    stage = request.stage if request.stage in _MODULES else PRETRAIN
    pretraining = _find_pretraining(request) if stage == PRETRAIN else None
    module, data = (pretraining.module, pretraining.data) if pretraining else _MODULES[stage]
    with ExitStack() as lock:
        cli = TrainingCLI(module, data, request, lock)
        compare_processes(f"starts from step {cli.resume_step}")
        trainer, out, fault, backup = cli.trainer, cli.out, cli.fault, None
        if is_main_process():
            if fault:
                numbered = (out.with_name(f"{out.name}.{number}") for number in range(1, 10_000))
                backup = next(path for path in numbered if not path.exists())
                out.rename(backup)
                print(f"{out}: {fault}; the folder is renamed to {backup}, and the training starts from the beginning")
            write_json(out / RUNNING, cli.record)
            (out / IDENTITY).unlink(missing_ok=True)  # diffcap 0.1 wrote this file
            config_file = out / CONFIGURATION
            cli.parser.save(cli.config, config_file, overwrite=True, skip_validation=True)
            header = "".join(f"# settings: {source}\n" for source in request.sources)
            write_text(config_file, header + config_file.read_text(encoding="utf-8"))
        try:
            with explain_lost_workers():
                trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.resume_from, weights_only=True)
        except SystemExit:  # Ctrl-C or SIGTERM: Lightning exits without a message and with status 0
            if trainer.is_global_zero:
                step = cli.periodic.saved_step
                sys.exit(
                    f"error: interrupted at step {trainer.global_step}; run the same command again to "
                    + (f"resume at step {step}." if step else "start from step 0, since there is no checkpoint yet.")
                )
            # A process that Lightning started must exit with status 0, or Lightning would kill the main process. A process that
            # torchrun or srun started exits with status 1.
            sys.exit(1 if find_launch() else 0)
        except DiffcapError:
            if backup and not (out / LAST).is_file():  # no step was trained: restore the earlier run
                shutil.rmtree(out)
                backup.rename(out)
                print(f"{out}: the earlier run is restored")
            raise
        trainer.save_checkpoint(out / LAST)
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            cli.write_result(stage)


def _find_pretraining(request: Request) -> Pretraining:
    """Return the pre-training of the method in `run.method`; if that is not set, of the captioner's class, else any pre-training."""
    by_method = {method.name: method.pretraining for method in methods().values() if method.pretraining}
    by_class = {pretraining.captioner.replace(":", "."): pretraining for pretraining in by_method.values()}
    settings: list[Path | JsonDict] = [request.settings, *map(Path, own_configs(request.words))]
    name = next((word.partition("=")[2] for word in request.words if word.startswith("--run.method=")), None)
    name = name or get_config_value(settings, "run", "method")
    class_path = get_config_value(settings, "model", "captioner", "class_path")
    pretraining = by_method.get(name) if name else by_class.get(class_path)
    return pretraining or next(iter(by_method.values()))


@dataclass
class RunSettings:
    """Output folder, checkpoint selection and logging of a training stage.

    Args:
        out: the run's folder, e.g. runs/blocks/pcl/finetune.
        monitor: logged value that selects `best.ckpt`, e.g. val/CIDEr-D; null makes the last checkpoint the result.
        mode: "max" if larger values of `monitor` are better, "min" if smaller values are.
        select_after: first step at which `best.ckpt` can be saved (IDC-PCL on Birds-to-Words: 2,000). Earlier validations do not
            count for `patience` either.
        patience: number of validations without improvement after which training stops; null for no limit.
        checkpoint_every: number of steps between two saves of `last.ckpt`.
        keep_last_k: number of periodic checkpoints to keep (step-000200.ckpt, ...), for weight averaging; 0 keeps only last.ckpt.
        logger: additional logger: "wandb" (Weights & Biases, offline without an account) or "tensorboard" (files in logs/);
            "none" writes the CSV file only.
        project: name of the Weights & Biases project.
        matmul_precision: precision of float32 matrix products, as in torch.set_float32_matmul_precision: "highest" (float32, as in the
            authors' code), "high" (TF32 on CUDA) or "medium"; null is high on CUDA and highest elsewhere. finished.json records the
            precision that was used.
        force_bf16: allow bf16 as trainer.precision on a CPU without instructions for bfloat16.
        dataset: variable DATASET of `make`, recorded so that `make ... CONFIG=config.yaml` can repeat the run.
        method: variable METHOD of `make`, also recorded.
        ablation: variable ABLATION of `make`, also recorded.
        preset: variable TRAINER of `make`, also recorded.
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


class TrainingCLI(StageCLI):
    """The command line of a training stage: `--model.*`, `--data.*`, `--trainer.*` and `--run.*`."""

    def __init__(self, module: str, data: str, request: Request, lock: ExitStack) -> None:
        self.lock, self.request = lock, request
        super().__init__(import_object(module), import_object(data), args=request)

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Add `--run.*`, and link the captioner's sizes to the data."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(RunSettings, "run")
        parser.add_argument("--run.keep", type=int | None, help=argparse.SUPPRESS)  # name of keep_last_k in diffcap 0.1
        for name in _FORMER_OPTIONS:
            parser.add_argument(f"--model.{name}", type=Any, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        # LightningCLI ignores a link if the captioner has no argument of this name.
        sizes = ("vocabulary_size", "feature_channels", "grid", "image_size", "max_length", "classes", "change_types")
        for size in sizes:
            parser.link_arguments(f"data.{size}", f"model.captioner.init_args.{size}", apply_on="instantiate")

    def before_instantiate_classes(self) -> None:
        """Decide whether the run starts, resumes, or is already finished."""
        keep = self.config.run.pop("keep", None)
        if keep is not None:
            self.config.run.keep_last_k = keep
        for former, name in _FORMER_OPTIONS.items():  # options of earlier versions; a renamed option keeps its value
            value = self.config.model.pop(former, None)
            if value and name == "model.initial_weights" and name in self.config:
                self.config[name] = value
            elif value:
                raise DiffcapError(
                    f"model.{former} is {value}, but that option was replaced by {name}; see `{former}` in CHANGELOG.md."
                )
        if self.is_check:
            sys.exit(0)
        self.settings = RunSettings(**self.config.run.as_dict())
        if {TRIAL_VARIABLE, WANDB_SWEEP} & set(os.environ):  # each trial of a sweep has its own folder
            name = os.environ.get(TRIAL_VARIABLE) or os.environ.get("WANDB_RUN_ID", "run")
            self.settings.out = str(Path(self.settings.out) / name)
        self.out = Path(self.settings.out)
        if self.config.get("model.captioner.init_args.base") is not None:
            # Fetch the base model of a vision-language captioner, and write its name and commit into the settings.
            arguments = self.config.model.captioner.init_args
            recorded = get_config_value([self.out / CONFIGURATION], "model", "captioner", "init_args") or {}
            # A resumed training uses the same commit again.
            if arguments.get("revision") is None and recorded.get("base") == arguments.base:
                arguments.revision = recorded.get("revision")
            found = find_base(arguments.base, arguments.get("revision"))
            arguments.revision = self.config.data.base_revision = found.revision
            arguments.base = self.config.data.base = found.name
            if is_main_process():
                print(f"base model {describe_origin(found.name, found.revision, found.licence)}")
        config = json.loads(self.parser.dump(self.config, format="json", skip_validation=True))
        if is_main_process():
            self.lock.enter_context(stage_lock(self.out, self.config.data.seed))
        old_record = record.read(self.out / FINISHED) or record.read(self.out / RUNNING)
        options = compared_options(config)
        # Files that identify the data: lists of pairs, features, and negatives (similar captions that are wrong). The options `singles`
        # and `labelled` are folders of additional datasets: single images with captions, and single images with classes.
        data, paths = config["data"], list[Path]()
        for folder in [Path(data[name]) for name in ("folder", "singles", "labelled") if data.get(name)]:
            feature_folder = folder / "features" / data["features"]
            paths += [folder / "manifest.jsonl", feature_folder / "meta.json", feature_folder / CHECKSUM_FILE]
        if "tasks" in data:  # a pre-training with hard negatives
            paths.append(Path(data.get("negatives") or Path(data["folder"]) / "negatives.jsonl"))
        if data.get("singles"):
            paths.append(Path(data["singles"]) / "negatives.jsonl")
        paths += [Path(other) / "manifest.jsonl" for other in data.get("vocabulary_with") or []]
        files = record.describe_files([*paths, *record.named_files(options)], old_record)
        init_from = config["model"].get("init_from")
        if init_from in old_record.get("files", {}):  # the file may be deleted after a training: use its recorded hash
            files.setdefault(init_from, old_record["files"][init_from])
        self.config_hash = record.result_id(options, files)
        # finished.json will have this record: the hashes of the command's options (`asked`), of the resolved options, and of the files.
        self.record = record.make(self.request.asked, self.config_hash, files, [])
        fault = find_fault(self.out)
        if not fault and old_record.get("id") != self.config_hash and (self.out / CONFIGURATION).is_file():
            fault = _find_changes(self.out, old_record, files, options)
        if not fault and is_finished(self.out):  # every rank reads the same files and exits
            if is_main_process():
                print(f"{self.out}: already finished with these settings")
                record.write(self.out / FINISHED, {**read_object(self.out / FINISHED), **self.record})
            sys.exit(0)
        self.fault = fault  # reason to rename the folder to a backup; None if there is no reason
        last = self.out / LAST
        self.resume_from = str(last) if not fault and last.is_file() else None
        self.resume_step = 0
        if self.resume_from:
            try:
                checkpoint = read_checkpoint(last)
                if any(state.get("best_model_score") is not None for state in checkpoint.get("callbacks", {}).values()):
                    read_checkpoint(self.out / BEST)
                self.resume_step = int(checkpoint["global_step"])
            except DiffcapError as error:
                reason = str(error).rpartition("; ")[0]  # without the remedy in that message
                raise DiffcapError(
                    f"{self.out}: the interrupted training cannot be resumed ({reason}); to train from the beginning, run "
                    f"`{shlex.join(['mv', str(self.out), f'{self.out}.damaged'])}` and then this command again."
                ) from None
        # If this training starts from another training's checkpoint, that training must be finished. The model checks the checkpoint file.
        initial_checkpoint = Path(init_from or "")
        parent = initial_checkpoint.parent
        is_stage_folder = any((parent / name).exists() for name in (RUNNING, FINISHED, IDENTITY))
        if initial_checkpoint.name in (BEST, LAST) and is_stage_folder:
            fault = find_fault(parent) or (None if is_finished(parent) else "its training is not finished")
            if fault:
                words = ["-m", "diffcap", stage_of(parent), "--config", str(parent / CONFIGURATION)]
                command = shlex.join([sys.executable, *words])
                raise DiffcapError(
                    f"{parent}: {fault}; train that stage with `{command}`, then run this command again."
                )

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Build the trainer with the run's callbacks and loggers."""
        settings = self.settings
        self.periodic = PeriodicCheckpoint(
            self.out / LAST, settings.checkpoint_every, settings.keep_last_k, self.resume_step
        )
        callbacks: list[Callback] = [self.periodic]
        if settings.monitor:
            criterion: dict[str, Any] = {"monitor": settings.monitor, "mode": settings.mode}
            place: dict[str, Any] = {"dirpath": self.out, "filename": "best", "enable_version_counter": False}
            callbacks.append(
                DelayedModelCheckpoint(settings.select_after, save_on_train_epoch_end=False, **place, **criterion)
            )
            if settings.patience is not None:
                criterion |= {"patience": settings.patience, "check_on_train_epoch_end": False}
                callbacks.append(StopEarly(settings.select_after, **criterion))
        loggers: list[Logger] = [CSVLogger(self.out, name=LOGS)]
        if settings.logger == "wandb":
            netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
            has_key = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE")
            has_account = has_key or (netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="ignore"))
            wandb_logger = WandbLogger(
                name=None if WANDB_SWEEP in os.environ else "/".join(self.out.parts[-3:]),
                id=os.environ.get("WANDB_RUN_ID", self.config_hash),  # a resumed run continues its curves
                resume="allow",
                project=settings.project,
                save_dir=str(self.out),
                offline=not has_account,
                log_model=False,
            )
            loggers.append(wandb_logger)
        if settings.logger == "tensorboard":
            loggers.append(TensorBoardLogger(self.out, name=LOGS, version="tensorboard"))
        callbacks.append(LearningRateMonitor("step"))
        for name in ("max_steps", "val_check_interval"):
            length = self.config.get(f"trainer.{name}")
            if isinstance(length, str):  # in epochs, such as "12ep"
                steps = in_steps(length, lambda: self.datamodule.batches_per_epoch, f"trainer.{name}")
                if name == "max_steps":  # in optimizer steps; val_check_interval is in batches
                    steps /= self.config.get("trainer.accumulate_grad_batches", 1)
                kwargs[name] = max(1, round(steps))
        trainer = super().instantiate_trainer(
            callbacks=callbacks,
            logger=loggers,
            enable_checkpointing=bool(settings.monitor),
            default_root_dir=str(self.out),
            **kwargs,
        )
        set_precision(trainer, settings.matmul_precision, settings.force_bf16)
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        return trainer

    def write_result(self, stage: str) -> None:
        """Write finished.json after the training. If no validation has selected best.ckpt, it becomes a copy of last.ckpt."""
        last, best = self.out / LAST, self.out / BEST
        if self.settings.monitor and not best.is_file():
            with atomic_write(best, per_process=False) as temporary:
                shutil.copyfile(last, temporary)
        score = getattr(self.trainer.checkpoint_callback, "best_model_score", None)
        init_from, result = self.config.model.get("init_from"), best if self.settings.monitor else last
        parent = read_object(initial_stage_folder(Path(init_from)) / FINISHED) if init_from else {}
        write_json(
            self.out / FINISHED,
            {
                "stage": stage,
                INIT_FROM_SHA256: parent.get("checkpoint_sha256"),
                **checkpoint_metadata(result),
                "weights_sha256": weights_hash(read_checkpoint(result)),
                "steps": self.trainer.global_step,
                "train_seconds": round(self.model.train_seconds, 1),
                "monitor": self.settings.monitor,
                "best": float(score) if score is not None and math.isfinite(score) else None,
                "matmul_precision": torch.get_float32_matmul_precision(),
                "provenance": provenance(seed=self.datamodule.seed, dataset=self.datamodule.dataset.name),
                **self.record,
            },
        )
        (self.out / RUNNING).unlink()


def compared_options(config: JsonDict) -> JsonDict:
    """Return the options that decide if two trainings are equal. A class is compared by its name, because its module may change."""
    text = re.sub(r'"diffcap\.[\w.]+\.(\w+)"', r'"\1"', json.dumps(config, default=str))
    options = record.flat(json.loads(text))
    ignored = ("config.", *(f"{group}.{name}." for group, names in _NOT_COMPARED.items() for name in names))
    return {name: value for name, value in options.items() if not f"{name}.".startswith(ignored)}


def _find_changes(out: Path, old_record: JsonDict, files: JsonDict, options: JsonDict) -> str | None:
    """Return a sentence about the differences between this training and the training in a folder; None if they are equal."""
    old_options = compared_options(read_settings(out / CONFIGURATION))
    # Earlier versions had other options, and diffcap 0.1 wrote no id. For these, compare only options that both trainings have.
    is_of_earlier_version = not old_record.get("id") or any(f"model.{name}" in old_options for name in _FORMER_OPTIONS)
    common_names = [name for name in options if name in old_options]
    names = common_names if is_of_earlier_version else list({**options, **old_options})
    values = [(name, old_options.get(name), options.get(name)) for name in names]
    for new_name in sorted({*_FORMER_OPTIONS.values()} - {*old_options}) if is_of_earlier_version else ():
        former = [old_options.get(f"model.{name}") for name in _FORMER_OPTIONS if _FORMER_OPTIONS[name] == new_name]
        new = options.get(new_name)
        if isinstance(new, list):  # callbacks: former options are now arguments of callbacks
            new_values = [argument for callback in new for argument in (callback.get("init_args") or {}).values()]
        else:
            new_values = [True if new_name == "model.optimizer" and new else new]
        values.append((new_name, list(filter(None, former)), list(filter(None, new_values))))
    differences = [f"{name} {old_value}, now {value}" for name, old_value, value in values if old_value != value]
    # An entry of "files" is [size, time, hash].
    old_hashes = {path: entry[2] for path, entry in old_record.get("files", {}).items()}
    differences += [path for path, entry in files.items() if old_hashes and old_hashes.get(path) != entry[2]]
    return f"it holds a run with other settings ({'; '.join(differences[:3])})" if differences else None
