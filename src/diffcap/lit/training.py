"""What the training stages' LightningModules share: optimiser, per-step seeds, and what a checkpoint says of itself."""

import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

import diffcap
from diffcap.checkpoints.reading import FORMAT, read_checkpoint, weights_of
from diffcap.data.captioning import FeatureData
from diffcap.errors import DiffcapError
from diffcap.lit.schedules import Schedule, make_lr_lambda
from diffcap.losses.gather import detached_sum_over_ranks


def adamw(
    module: nn.Module,
    trained: Iterable[nn.Parameter],
    lr: float,
    trained_lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> torch.optim.AdamW:
    """AdamW at two rates, for what came trained into a stage and for what is new; only two dimensions or more decay.

    For CLIP4IDC's BertAdam (authors' code), which lets the marks of the images, the scale of the cosines and CLIP's own
    scales of layer norms decay, too, corrects no bias of the moments, and clips the gradient of each tensor once more.

    Args:
        trained: parameters that learn at `trained_lr`; all others of the module learn at `lr`; frozen ones are left out.
        betas: of the moments; eps is 1e-6 (authors' code).
    """
    old, learning = {id(part) for part in trained}, [part for part in module.parameters() if part.requires_grad]
    groups = [
        {
            "params": [part for part in learning if (id(part) in old) == came and (part.ndim >= 2) == wide],
            "lr": trained_lr if came else lr,
            "weight_decay": weight_decay * wide,
        }
        for came in (False, True)
        for wide in (True, False)
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, eps=1e-6)


class TrainingModule(pl.LightningModule):
    """Adam with a schedule by step, the same random numbers at a step whether or not the run was interrupted.

    Args:
        captioner: what is trained; its parameters are the checkpoint's "captioner.*".
        lr, weight_decay: of Adam; the decay is L2 in the gradient, as in the authors' code.
        schedule, warmup, milestones: see `schedules.make_lr_lambda`; the cosine ends at the trainer's `max_steps`.
    """

    stage: ClassVar[str]

    def __init__(
        self,
        captioner: nn.Module,
        lr: float,
        weight_decay: float,
        schedule: Schedule,
        warmup: int | float,
        milestones: list[float] | None,
    ) -> None:
        super().__init__()
        self.captioner = captioner
        self.lr, self.weight_decay, self.schedule = lr, weight_decay, schedule
        self.warmup, self.milestones = warmup, milestones if milestones is not None else [10_000, 20_000]
        self.train_seconds = 0.0  # of all sessions together; a resumed run goes on counting
        self._clock = 0.0
        self._unlogged: dict[str, Tensor] = {}  # the last values of the training losses since they were logged
        self._sums: dict[str, Tensor] = {}  # of the validation losses: sum and number of values, (2,)

    @property
    def feature_data(self) -> FeatureData:
        """The stage's DataModule."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, FeatureData)
        return data

    def optimizer(self) -> torch.optim.Optimizer:
        """Adam over all parameters at one rate."""
        fused = self.trainer.gradient_clip_val is None  # Lightning clips no gradient of a fused one in mixed precision
        return torch.optim.Adam(self.parameters(), self.lr, weight_decay=self.weight_decay, fused=fused)

    def configure_optimizers(self) -> Any:
        """The optimiser, and the schedule stepped after every one of its steps."""
        optimizer = self.optimizer()
        lr_lambda = make_lr_lambda(
            self.schedule, warmup=self.warmup, milestones=self.milestones, total=int(self.trainer.max_steps)
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed dropout by batch and rank, so that a resumed run draws what an undisturbed one draws."""
        torch.manual_seed((self.feature_data.seed * 1_000_003 + batch_idx) * 4099 + self.global_rank)
        self._clock = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count the time spent training; validation and set-up are not in it."""
        self.train_seconds += time.perf_counter() - self._clock

    def log_losses(self, parts: dict[str, Tensor], batch_size: int) -> None:
        """Log training losses as `train/name`: the mean over the ranks, computed only for the steps that the logger keeps.

        Args:
            parts: this rank's share of each loss, see `global_mean`, so that the mean over the ranks is the global batch's.
        """
        self._unlogged |= {f"train/{name}": value.detach() for name, value in parts.items()}
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.trainer.world_size == 1 or (every and (self.trainer.global_step + 1) % every == 0):
            self.log_dict(self._unlogged, prog_bar=True, batch_size=batch_size, sync_dist=True)
            self._unlogged = {}

    def add_validation_losses(self, batch: dict[str, Any], losses_of: Callable[[Any], dict[str, Tensor]]) -> None:
        """Add the losses of a validation batch to the sums that `log_validation_losses` logs.

        Lightning's sampler gives pair `n` to rank `n % world_size`, and then repeats the first pairs until all ranks have
        equally many. A repeated pair is left out here.

        Args:
            batch: with "number" (B,), each pair's index in the split. losses_of: losses of a batch by name, (n,) each.
        """
        own = batch["number"] % self.trainer.world_size == self.global_rank
        some, every = bool(own.any()), bool(own.all())
        rows = own if some and not every else slice(None)  # if no pair counts, the names of the losses are still needed
        losses = losses_of({key: value[rows] for key, value in batch.items() if isinstance(value, Tensor)})
        for name, values in losses.items():
            values = values.float() if some else values[:0].float()
            self._sums[name] = self._sums.get(name, 0) + torch.stack([values.sum(), values.new_tensor(len(values))])

    def log_validation_losses(self) -> None:
        """Log the mean of each validation loss over all values of all ranks, as `val/name`."""
        for name, sums in self._sums.items():
            value, count = detached_sum_over_ranks(sums)
            self.log(f"val/{name}", value / count, prog_bar=True)
        self._sums = {}

    def facts(self) -> dict[str, Any]:
        """What the stage adds to its checkpoints' "diffcap" entry."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what the file is, so that it can be used without any other."""
        data = self.feature_data
        checkpoint["diffcap"] = {
            "format": FORMAT,
            "version": diffcap.__version__,
            "stage": self.stage,
            "dataset": data.dataset.name,
            "manifest_sha256": data.dataset.info.get("manifest_sha256"),
            "seed": data.seed,
            "words": data.words,
            "vocabulary_layout": data.vocabulary.layout,
            "max_length": data.max_length,
            "features": {**data.store.meta, "name": data.store_name},
            "train_seconds": self.train_seconds,
            "changes": data.changes,
            **self.facts(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on counting where the interrupted session stopped."""
        self.train_seconds = checkpoint["diffcap"]["train_seconds"]


# What changes what a method's weights mean, but neither their names nor their shapes.
_MEANING = ("network", "intra_layers", "image_size")


def _same_meaning(theirs: dict[str, Any] | None, ours: dict[str, Any], path: str) -> None:
    for key in _MEANING:
        if theirs is not None and key in theirs and key in ours and theirs[key] != ours[key]:
            raise DiffcapError(
                f"{path}: it was trained with {key} {theirs[key]}, this stage has {ours[key]}; give both the same "
                f"model.captioner.init_args.{key}."
            )


def init_from(
    module: nn.Module, path: str, words: list[str], may_miss: tuple[str, ...], may_drop: tuple[str, ...]
) -> None:
    """Take the weights of another stage's checkpoint by name.

    Args:
        module: the captioner that receives them. path: the other stage's checkpoint. words: this stage's vocabulary.
        may_miss: beginnings of names that only the receiver has; may_drop: that only the file has.

    Raises:
        DiffcapError: other words, or names or shapes that do not fit; each is listed.
    """
    state = read_checkpoint(path)
    _same_meaning(state["diffcap"].get("hyperparameters"), getattr(module, "hyperparameters", {}), path)
    theirs = state["diffcap"]["words"]
    if theirs != words:
        different = ", ".join(sorted(set(theirs) ^ set(words))[:3]) or "the same ones in another order"
        raise DiffcapError(
            f"{path}: its vocabulary has {len(theirs)} words, this stage's {len(words)} (not in both: {different}); "
            "use the dataset, min_count, manifest and data.vocabulary_with that it was trained with."
        )
    weights = weights_of(state)
    own = module.state_dict()
    wrong = [name for name in own if name not in weights and not name.startswith(may_miss)]
    wrong += [name for name in weights if name not in own and not name.startswith(may_drop)]
    wrong += [
        f"{name} {tuple(value.shape)} for {tuple(own[name].shape)}"
        for name, value in weights.items()
        if name in own and own[name].shape != value.shape
    ]
    if wrong:
        raise DiffcapError(
            f"{path}: {len(wrong)} parameters do not fit ({', '.join(wrong[:4])}{', ...' if len(wrong) > 4 else ''}); "
            "give both stages the same width, layers and features."
        )
    module.load_state_dict({name: value for name, value in weights.items() if name in own}, strict=False)
