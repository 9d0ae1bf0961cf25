"""The base class of the training stages' LightningModules: optimizer, a seed for each step, metadata of checkpoints; and the precision."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

import diffcap
from diffcap.checkpoints.reading import FORMAT, read_checkpoint, weights_of
from diffcap.data.datamodules import FeatureData
from diffcap.lit.schedules import Schedule, in_steps, make_lr_lambda
from diffcap.losses.gather import detached_sum_over_ranks
from diffcap.models.captioner import Batch
from diffcap.records import JsonDict
from diffcap.utils.errors import DiffcapError

MatmulPrecision = Literal["highest", "high", "medium"]
CPUINFO_FILE = Path("/proc/cpuinfo")


class TrainingModule(pl.LightningModule):
    """Base class of the training stages. A subclass sets `stage` and defines `training_step` and `validation_step`.

    The base class uses Adam with a learning-rate schedule, and writes checkpoints that can be used without other files. It seeds every
    step, so that a resumed run uses the same random numbers as an uninterrupted one.

    The names of the captioner's parameters in a checkpoint begin with "captioner.". The other arguments are those of `Captioning`.
    """

    stage: ClassVar[str]  # name of the stage, such as "finetune"

    def __init__(
        self,
        captioner: nn.Module,
        lr: float,
        weight_decay: float,
        schedule: Schedule,
        warmup: int | float,
        milestones: list[float | str] | None,
    ) -> None:
        super().__init__()
        self.captioner = captioner
        self.lr = lr
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.warmup = warmup
        self.milestones = milestones if milestones is not None else [10_000, 20_000]
        self.train_seconds = 0.0  # duration of all steps, including those before the run was resumed
        self._batch_start = 0.0
        # The latest value of each training loss since the last logged step, because not every batch has every loss.
        self._unlogged_losses: dict[str, Tensor] = {}
        self.metric: Any = None  # metric of the validation, if a subclass sets it
        self._validation_sums: dict[str, Tensor] = {}  # name of a validation loss -> sum and number of its values, (2,)

    @property
    def feature_data(self) -> FeatureData:
        """The stage's DataModule."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, FeatureData)
        return data

    def optimizer(self) -> torch.optim.Optimizer:
        """Return Adam for all parameters; subclasses may override it."""
        fused = not self.changes_gradients
        return torch.optim.Adam(self.parameters(), self.lr, weight_decay=self.weight_decay, fused=fused)

    @property
    def changes_gradients(self) -> bool:
        """True if gradients are clipped or passed to a callback. Lightning allows neither with fused Adam in mixed precision."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        has_callback = any(is_overridden("on_before_optimizer_step", callback, pl.Callback) for callback in callbacks)
        return has_callback or self.trainer.gradient_clip_val is not None

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and a scheduler that is stepped after every optimizer step."""
        optimizer = self.optimizer()
        accumulated = self.trainer.accumulate_grad_batches
        milestones = [
            in_steps(milestone, lambda: self.feature_data.batches_per_epoch / accumulated, "model.milestones")
            for milestone in self.milestones
        ]
        max_steps = int(self.trainer.max_steps)
        lr_lambda = make_lr_lambda(self.schedule, warmup=self.warmup, milestones=milestones, total_steps=max_steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Update the weights, then free the gradients, so that they take no memory during the next forward pass."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    def gradient_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        """Return name -> group of parameters. The root mean square of each group's gradients is logged. Subclasses override this."""
        return {}

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
        """Clip the gradients, then log the root mean square of the clipped gradients of each of the `gradient_groups`."""
        super().configure_gradient_clipping(optimizer, *args, **options)
        if self._is_logged_step:
            for name, parameters in self.gradient_groups().items():
                gradient_rms = root_mean_square(parameter.grad for parameter in parameters)
                if gradient_rms is not None:
                    self.log(f"train/gradient_rms_{name}", gradient_rms)

    @property
    def _is_logged_step(self) -> bool:
        log_interval = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(log_interval) and (self.trainer.global_step + 1) % log_interval == 0

    def on_fit_start(self) -> None:
        """Let the data loader compute the captioner's `host_entries`."""
        self.feature_data.host_entries = getattr(self.captioner, "host_entries", self.feature_data.host_entries)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed dropout by batch and rank, so that a resumed run has the same dropout as an uninterrupted one."""
        # The seeds of up to 1,000,003 batches and 4,099 ranks are different. `batch_idx` counts all batches of a run.
        torch.manual_seed((self.feature_data.seed * 1_000_003 + batch_idx) * 4099 + self.global_rank)
        self._batch_start = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Add up the training time: the steps alone, without loading data, validation and setup."""
        self.train_seconds += time.perf_counter() - self._batch_start

    def log_losses(self, losses: dict[str, Tensor], batch_size: int) -> None:
        """Log training losses as `train/name`: the mean over the ranks, computed only at the steps that the logger stores.

        If the batch of a logged step lacks a loss, the latest value of this loss is logged. All ranks must log the same names in a step.
        `losses` are scalars, whose mean over the ranks is the loss of the global batch. `batch_size`: number of pairs of this rank.
        """
        self._unlogged_losses |= {f"train/{name}": loss.detach() for name, loss in losses.items()}
        if self._is_logged_step:
            # `prog_bar=True` would read the values again in every step, and each time the host would wait for the GPU.
            self.log_dict(self._unlogged_losses, batch_size=batch_size, sync_dist=True)
            means = self.trainer.callback_metrics
            self.trainer.progress_bar_metrics.update({name: float(means[name]) for name in self._unlogged_losses})
            self._unlogged_losses = {}

    def add_validation_losses(self, batch: Batch, compute_losses: Callable[[Any], dict[str, Tensor]]) -> None:
        """Add the losses of a validation batch to the sums whose means are logged after the validation. The host does not wait for a GPU.

        Lightning's distributed sampler gives pair `n` to rank `n % world_size`. At the end, it repeats the first pairs until all
        ranks have the same number. `compute_losses` gets the batch without the repeated pairs, and returns name -> values (n,).
        """
        world_size, rank = self.trainer.world_size, self.global_rank
        num_pairs = len(batch["number"])
        num_new = sum(number % world_size == rank for number in batch["number"])  # the repeated pairs are the last ones
        if 0 < num_new < num_pairs:
            # Only tensors have a row for each pair. Other entries, such as indices of words, describe the whole batch: leave them out.
            batch = {key: value[:num_new] for key, value in batch.items() if isinstance(value, Tensor)}
        for name, values in compute_losses(batch).items():
            # If all pairs are repeated, the losses are computed only for their names, and no value is added.
            values = values.float() if num_new else values[:0].float()
            sum_and_count = torch.stack([values.sum(), values.new_full((), len(values))])
            self._validation_sums[name] = self._validation_sums.get(name, 0) + sum_and_count

    def on_validation_epoch_end(self) -> None:
        """Log, over all ranks, the mean of each validation loss and the scores of `metric` as `val/name`."""
        for name, sum_and_count in self._validation_sums.items():
            total, count = detached_sum_over_ranks(sum_and_count)
            self.log(f"val/{name}", total / count)
        self._validation_sums = {}
        if self.metric is not None:
            scores = self.metric.compute()
            self.metric.reset()
            # The progress bar does not show the scores, because a line with the scores x 100 is printed after each validation.
            self.log_dict({f"val/{name}": float(value) for name, value in scores.items()}, rank_zero_only=False)

    def metadata(self) -> JsonDict:
        """Return extra items of the checkpoint's entry "diffcap"; subclasses override it."""
        return {}

    def on_save_checkpoint(self, checkpoint: JsonDict) -> None:
        """Add the entry "diffcap", which has what is needed besides the weights to use the checkpoint without other files."""
        data = self.feature_data
        checkpoint["diffcap"] = {
            "format": FORMAT,
            "version": diffcap.__version__,
            "stage": self.stage,
            "dataset": data.dataset.name,
            "manifest_sha256": data.dataset.info.get("manifest_sha256"),
            "seed": data.seed,
            "words": data.words,  # of the vocabulary, in the order of their ids
            "vocabulary_layout": data.vocabulary.layout,  # the ids of the special tokens
            "max_length": data.max_length,
            "features": {**data.store.meta, "name": data.store_name},
            "train_seconds": self.train_seconds,
            "changes": data.changes,  # how a pair with several changes was used: "single" or "multi"
            **self.metadata(),
        }

    def on_load_checkpoint(self, checkpoint: JsonDict) -> None:
        """Restore the training time."""
        self.train_seconds = checkpoint["diffcap"]["train_seconds"]


# A function with the parameters of `adamw`, which returns an optimizer.
OptimizerFunction = Callable[..., torch.optim.Optimizer]


def adamw(
    module: nn.Module,
    pretrained: Iterable[nn.Parameter],
    lr: float,
    pretrained_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> torch.optim.AdamW:
    """Return AdamW for the parameters that are not frozen. Parameters of fewer than two dimensions get no weight decay."""
    pretrained_ids = {id(parameter) for parameter in pretrained}
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [p for p in trainable if (id(p) in pretrained_ids) == is_pretrained and (p.ndim >= 2) == decays],
            "lr": pretrained_lr if is_pretrained else lr,
            "weight_decay": weight_decay * decays,
        }
        for is_pretrained in (False, True)
        for decays in (True, False)
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, eps=1e-6)


def root_mean_square(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Return the root mean square of all values of the gradients; None without gradients."""
    present_gradients = [gradient.float() for gradient in gradients if gradient is not None]
    if not present_gradients:
        return None
    return get_total_norm(present_gradients) / sum(gradient.numel() for gradient in present_gradients) ** 0.5


# Hyperparameters that must be equal in this stage and in the stage of the checkpoint. Weights can have the same names and shapes even
# if these hyperparameters differ.
_SHARED_HYPERPARAMETERS = ("network", "intra_layers", "image_size")


def init_from(
    module: nn.Module,
    checkpoint_file: str | None,
    words: list[str],
    allowed_missing: tuple[str, ...],
    allowed_unexpected: tuple[str, ...],
    without: Sequence[str] = (),
) -> None:
    """Load the weights of another stage's checkpoint by name; without a `checkpoint_file`, do nothing.

    Args:
        words: this stage's vocabulary, in the order of the ids.
        allowed_missing: prefixes of parameter names of the module that the checkpoint may lack.
        allowed_unexpected: prefixes of parameter names of the checkpoint that the module may lack.
        without: parts of the module ("trunk.pair_encoder") that keep their initial weights.
    """
    if without and not checkpoint_file:
        raise DiffcapError(
            f"model.init_without is {list(without)}, but model.init_from is not set, so no weights are loaded; remove model.init_without."
        )
    if not checkpoint_file:
        return
    content = read_checkpoint(checkpoint_file)
    theirs = content["diffcap"].get("hyperparameters") or {}
    ours = getattr(module, "hyperparameters", {})
    for key in _SHARED_HYPERPARAMETERS:
        if key in theirs and key in ours and theirs[key] != ours[key]:
            raise DiffcapError(
                f"{checkpoint_file}: the checkpoint has {key} {theirs[key]}, this stage has {ours[key]}; give both the same "
                f"model.captioner.init_args.{key}."
            )
    checkpoint_words = content["diffcap"]["words"]
    if checkpoint_words != words:
        different = ", ".join(sorted(set(checkpoint_words) ^ set(words))[:3]) or "none, their order differs"
        raise DiffcapError(
            f"{checkpoint_file}: its vocabulary has {len(checkpoint_words)} words, this stage's {len(words)} (words in only one of them: "
            f"{different}); use the dataset, manifest, data.min_count, data.vocabulary_splits and data.vocabulary_with of the "
            "checkpoint's training."
        )
    initial = module.state_dict()
    kept_prefixes = tuple(f"{part}." for part in without)  # of the names of parameters that keep their initial weights
    if unknown := [prefix for prefix in kept_prefixes if not any(name.startswith(prefix) for name in initial)]:
        raise DiffcapError(f"model.init_without has {unknown[0][:-1]!r}, but the model has no such part.")
    weights = {name: value for name, value in weights_of(content).items() if not name.startswith(kept_prefixes)}
    missing = [name for name in initial if name not in weights]
    unexpected = [name for name in weights if name not in initial]
    mismatches = [f"missing: {name}" for name in missing if not name.startswith((*allowed_missing, *kept_prefixes))]
    mismatches += [f"unexpected: {name}" for name in unexpected if not name.startswith(allowed_unexpected)]
    mismatches += [
        f"{name}: checkpoint {tuple(value.shape)}, model {tuple(initial[name].shape)}"
        for name, value in weights.items()
        if name in initial and initial[name].shape != value.shape
    ]
    if mismatches:
        listed = ", ".join(mismatches[:4]) + (", ..." if len(mismatches) > 4 else "")
        raise DiffcapError(
            f"{checkpoint_file}: {len(mismatches)} parameters do not fit ({listed}); give both stages the same width, layers and features."
        )
    module.load_state_dict({name: value for name, value in weights.items() if name in initial}, strict=False)


def set_precision(trainer: pl.Trainer, matmul_precision: MatmulPrecision | None, force_bf16: bool) -> None:
    """Set the precision of float32 matrix products, and check the trainer's precision.

    If `matmul_precision` is None, it is high (TF32) on CUDA and highest (float32, as in the papers' released code) elsewhere.
    `force_bf16` allows bfloat16 on a CPU without instructions for it.
    """
    if not force_bf16:
        refuse_slow_bf16(trainer, "remove the option, or add --run.force_bf16=true")
    default: MatmulPrecision = "high" if isinstance(trainer.accelerator, CUDAAccelerator) else "highest"
    torch.set_float32_matmul_precision(matmul_precision or default)


def refuse_slow_bf16(trainer: pl.Trainer, remedy: str = "remove the option") -> None:
    """Raise an error for bfloat16 on a CPU without instructions for it (AVX512-BF16, AMX or ARM BF16); it ends with `remedy`."""
    is_bf16_on_cpu = "bf16" in str(trainer.precision) and isinstance(trainer.accelerator, CPUAccelerator)
    if not is_bf16_on_cpu or not CPUINFO_FILE.is_file():  # other systems than Linux do not have the file
        return
    if {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(CPUINFO_FILE.read_text().split()):
        raise DiffcapError(
            f"trainer.precision is {trainer.precision}, but this processor has no instructions for bfloat16, so this would be many "
            f"times slower than in float32; {remedy}."
        )
