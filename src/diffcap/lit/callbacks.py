"""Callbacks and checkpoint files of a training stage: periodic and best checkpoints, early stopping, a line for each validation."""

import io
import math
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from diffcap.run_folder import LAST, STEP_CHECKPOINT_GLOB
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import atomic_write


class PartCallback(Callback):
    """Base class of callbacks that change the learning rate of one part of the captioner. The part is a parameter group of Adam."""

    part: str  # name of the part in the captioner, and of the parameter group


class PeriodicCheckpoint(Callback):
    """Save `last.ckpt` right before a step, so that the validation of the previous step is done. On SIGINT or SIGTERM, save it and stop.

    One process stops at the end of the step. Several processes stop at the next multiple of `trainer.log_every_n_steps`. A second
    signal stops the training at once. In a SLURM job, Lightning handles the signals and stops without saving.

    Args:
        path: path of `last.ckpt`. every_n_steps: number of steps between two saves. keep_last_k: number of copies to keep in
            the same folder, named by their steps (step-000200.ckpt, ...). saved_step: the step of `last.ckpt`; 0 if there is none.
    """

    def __init__(self, path: Path, every_n_steps: int, keep_last_k: int = 0, saved_step: int = 0) -> None:
        self.path = path
        self.every_n_steps = every_n_steps
        self.keep_last_k = keep_last_k
        self.saved_step = saved_step
        self._stop_note = ""
        self._interrupted_at = math.inf  # time.monotonic() of the first signal

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the signal handlers, which Lightning resets after the training."""
        stop_every = self._stop_every(trainer)
        stop_point = "this step" if stop_every == 1 else f"the next multiple of {stop_every} steps"
        if trainer.is_global_zero:
            self._stop_note = f"interrupted: the training stops after {stop_point} and saves {LAST}; a second signal ends it at once\n"
        if "SLURM_JOB_ID" not in os.environ and threading.current_thread() is threading.main_thread():
            for signal_number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signal_number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
                    signal.signal(signal_number, self._on_signal)

    def _stop_every(self, trainer: pl.Trainer) -> int:
        """Return N: the training can stop at each N-th step. Several processes compare signals only at these steps, to save time."""
        every = trainer.log_every_n_steps or self.every_n_steps  # type: ignore[attr-defined]
        return 1 if trainer.world_size == 1 else int(every)

    def _on_signal(self, *_: Any) -> None:
        if self._interrupted_at == math.inf:
            self._interrupted_at = time.monotonic()
            os.write(2, self._stop_note.encode())  # print() must not be called while another print() is interrupted
        elif time.monotonic() > self._interrupted_at + 1:  # make sends the same signal twice within a second
            raise KeyboardInterrupt

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Save before the first batch of a step, every `every_n_steps` steps and after a signal; after a signal, also stop."""
        step = trainer.global_step
        if batch_idx % trainer.accumulate_grad_batches:
            return
        is_interrupted = self._interrupted_at < math.inf
        reduce = trainer.strategy.reduce_boolean_decision
        must_stop = step % self._stop_every(trainer) == 0 and reduce(is_interrupted, all=False)  # any rank
        is_periodic = step % self.every_n_steps == 0
        if step and (is_periodic or must_stop):
            loop = trainer.fit_loop.epoch_loop
            # `_batches_that_stepped` is the step number in the logs. Lightning saves checkpoints before it increments this counter. So it
            # adds 1 when it loads a checkpoint whose next batch ends a step. This callback saves after the increment: subtract the 1.
            added_at_load = int(not loop._should_accumulate())
            loop._batches_that_stepped -= added_at_load
            trainer.save_checkpoint(self.path)
            loop._batches_that_stepped += added_at_load
            self.saved_step = step
            if is_periodic and self.keep_last_k and trainer.is_global_zero:
                copy = self.path.with_name(f"step-{step:06d}.ckpt")
                with atomic_write(copy, per_process=False) as temporary:
                    shutil.copyfile(self.path, temporary)
                # Keep the last `keep_last_k` copies. Also delete copies of later steps, which a killed session has left.
                checkpoints = sorted(self.path.parent.glob(STEP_CHECKPOINT_GLOB))
                kept = [checkpoint for checkpoint in checkpoints if checkpoint <= copy][-self.keep_last_k :]
                for checkpoint in set(checkpoints) - set(kept):
                    checkpoint.unlink()
        if must_stop:
            raise SIGTERMException  # Lightning ends the training


class DelayedModelCheckpoint(ModelCheckpoint):
    """ModelCheckpoint that saves nothing before the step `start_step`."""

    def __init__(self, start_step: int, **options: Any) -> None:
        super().__init__(**options)
        self.start_step = start_step

    @property
    def state_key(self) -> str:
        """Return the key of this callback's state in a checkpoint. It has the former class name, so that old checkpoints can be resumed."""
        return super().state_key.replace(type(self).__qualname__, "SelectAfter", 1)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """If the training has reached `start_step`, compare the score with the best score, and save if it is better."""
        if self.monitor not in trainer.callback_metrics and not trainer.sanity_checking:
            logged = ", ".join(sorted(name for name in trainer.callback_metrics if name.startswith("val/")))
            raise DiffcapError(
                f"run.monitor is {self.monitor!r}, but validation logs {logged}; set it to one of these."
            )
        if not trainer.global_step:
            self._last_global_step_saved = -1  # else Lightning would treat the weights of step 0 as saved
        if trainer.global_step >= self.start_step:
            super().on_validation_end(trainer, pl_module)


class StopEarly(EarlyStopping):
    """EarlyStopping from the step `start_step` on. It also stops a resumed run whose checkpoint has already reached the patience."""

    def __init__(self, start_step: int, **options: Any) -> None:
        super().__init__(**options)
        self.start_step = start_step

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """If the training has reached `start_step`, compare the score with the best score, and stop if the patience is reached."""
        if trainer.global_step >= self.start_step:
            super().on_validation_end(trainer, pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop before the first step if the resumed checkpoint has reached the patience."""
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write each checkpoint to a temporary file in its folder, then rename it. Until the renaming, the old checkpoint stays intact."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one checkpoint file."""
        content = io.BytesIO()  # torch.save would report a full disk only as "unexpected position"
        torch.save(checkpoint, content)
        with atomic_write(path, per_process=False) as temporary:
            temporary.write_bytes(content.getbuffer())
