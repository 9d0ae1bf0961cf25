"""Training of the small networks that the package contains for the rendered datasets `blocks` and `tiles`."""

import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diffcap.evaluation.retrieval import PairRetrieval
from diffcap.lit.schedules import make_lr_lambda
from diffcap.losses.pair_text import pair_text_contrastive_loss
from diffcap.models.clip import PairTower, TextTower, build_clip, clamp_logit_scale_
from diffcap.text.vocabularies import build_clip_vocabulary
from diffcap.utils.files import atomic_write

HELD_OUT = 1 << 40  # number of the first scene that training does not use
# (images (B, 3, h, w) uint8, a sentence for each image, targets of the dense task that `ClipTraining` describes)
ClipBatch = tuple[Tensor, list[str], Any]


class ShippedTraining(pl.LightningModule, ABC):
    """Base of the trainings, each of which trains one network on scenes that are rendered during the training."""

    weights_file: ClassVar[Path]  # path of the weights in the package

    def __init__(self, lr: float, steps: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.steps = lr, steps

    @staticmethod
    @abstractmethod
    def render_batch(first_scene: int, num_scenes: int, seed: int, jitter: float) -> Any:
        """Render the scenes `first_scene` to `first_scene + num_scenes - 1` as a batch."""

    @abstractmethod
    def finish(self, num_scenes: int, seed: int, jitter: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the state dict to write, and the network's scores on `num_scenes` scenes that training does not use."""

    def held_out_batches(self, num_scenes: int, seed: int, jitter: float, first_scene: int = HELD_OUT) -> Iterator[Any]:
        """Yield batches of up to 50 scenes that training does not use."""
        for start in range(0, num_scenes, 50):
            yield self.render_batch(first_scene + start, min(50, num_scenes - start), seed, jitter)

    def configure_optimizers(self) -> Any:
        """Return AdamW, and a schedule of the learning rate: a linear warm-up over a tenth of the steps, then a cosine."""
        optimizer = torch.optim.AdamW(self.parameters(), self.lr, weight_decay=0.01)
        lr_lambda = make_lr_lambda("cosine", warmup=max(1, self.steps // 10), total_steps=self.steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ClipTraining(ShippedTraining):
    """Training of a small CLIP. An auxiliary "dense" task predicts what each cell of an image shows; a CLIP patch has several cells.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps; the learning rate depends on it.
        dense_weight: weight of the dense task.
    """

    clip_name: ClassVar[str]  # name of the open_clip configuration
    sentence_words: ClassVar[Iterable[str]]  # all words that sentences can have
    num_dense_logits: ClassVar[int]  # C, logits of the dense task in each cell
    cells_per_side: ClassVar[int]  # number of cells along each side of a patch

    def __init__(self, lr: float = 1e-3, steps: int = 3500, dense_weight: float = 1.0) -> None:
        super().__init__(lr, steps)
        self.dense_weight = dense_weight
        self.vocabulary = build_clip_vocabulary([" ".join(self.sentence_words)], "clip_used")  # only tokens of these
        self.clip = build_clip(self.clip_name, vocabulary_size=len(self.vocabulary))
        # The two encoders use the modules of `self.clip`; joint=False encodes each image alone.
        self.images, self.words = PairTower(self.clip, joint=False), TextTower(self.clip)
        self.dense_head = nn.Linear(self.clip.visual.proj.shape[1], self.num_dense_logits * self.cells_per_side**2)
        self.unfold = nn.PixelShuffle(self.cells_per_side)

    @abstractmethod
    def dense_loss(self, logits: Tensor, targets: Any) -> Tensor:
        """Return the loss of the dense task from logits (B, C, rows, columns)."""

    @abstractmethod
    def count_dense_hits(self, logits: Tensor, targets: Any) -> tuple[int, int]:
        """Return the number of right predictions of the dense task, and the number of all predictions."""

    def encode_images(self, images: Tensor) -> Tensor:
        """Encode images (B, 3, h, w) uint8 as tokens (B, 1 + N, E); E is the width of CLIP's embeddings."""
        return self.images.project(self.images.encode_single(self.images.normalize(images)))

    def encode_sentences(self, sentences: list[str]) -> Tensor:
        """Encode B sentences as (B, E)."""
        length = len(self.words.positional_embedding)
        token_ids = [torch.tensor(self.vocabulary.encode(sentence, length)) for sentence in sentences]
        return self.words(nn.utils.rnn.pad_sequence(token_ids, True, self.vocabulary.pad).to(self.device))

    def dense_logits(self, tokens: Tensor) -> Tensor:
        """Compute the logits of the dense task, (B, C, rows, columns), from tokens (B, 1 + N, E)."""
        patches = self.dense_head(tokens[:, 1:]).transpose(1, 2)
        return self.unfold(patches.unflatten(2, self.images.grid))  # grid: rows and columns of patches

    def training_step(self, batch: ClipBatch, batch_idx: int) -> Tensor:
        """Return the sum of the contrastive loss and the weighted loss of the dense task."""
        images, sentences, targets = batch
        tokens = self.encode_images(images)
        text, scale = self.encode_sentences(sentences), self.clip.logit_scale.exp()
        contrastive_loss = pair_text_contrastive_loss(text, tokens[:, 0], scale).mean()
        dense_loss = self.dense_loss(self.dense_logits(tokens), targets)
        loss = contrastive_loss + self.dense_weight * dense_loss
        self.log_dict({"loss": loss, "contrast": contrastive_loss, "dense": dense_loss}, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Limit the factor of the cosine similarities (inverse temperature) to 100."""
        clamp_logit_scale_(self.clip.logit_scale)

    def measure(self, num_scenes: int, seed: int, jitter: float) -> dict[str, float]:
        """Measure recall at 1 (R@1) between sentences and images of held-out scenes, and the accuracy of the dense task."""
        metric = PairRetrieval()
        num_right = num_counted = num_seen = 0
        for images, sentences, targets in self.held_out_batches(num_scenes, seed, jitter):
            tokens, scene_ids = self.encode_images(images), torch.arange(num_seen, num_seen + len(images))
            # Sentence k describes image k, so all three arguments with ids are equal.
            metric.update(tokens[:, 0], scene_ids, self.encode_sentences(sentences), scene_ids, scene_ids)
            right, counted = self.count_dense_hits(self.dense_logits(tokens), targets)
            num_right += right
            num_counted += counted
            num_seen += len(images)
        scores = {name: float(value) for name, value in metric.compute().items() if name.endswith("R@1")}
        return {name: round(value, 4) for name, value in {**scores, "dense": num_right / max(1, num_counted)}.items()}

    def finish(self, num_scenes: int, seed: int, jitter: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the float16 weights, with open_clip's names, and the scores from `measure`. "token_ids" has CLIP's ids of the words."""
        state = {name: value.half() for name, value in self.clip.state_dict().items()}
        self.clip.load_state_dict({name: value.float() for name, value in state.items()})  # measure the rounded weights
        state["token_ids"] = torch.tensor(self.vocabulary.clip_ids)
        return state, self.measure(num_scenes, seed, jitter)


class RenderedScenes(pl.LightningDataModule):
    """The rendered scenes of a training. Each scene is used in one step only.

    Args:
        batch_size: images per step.
        batches: number of steps per epoch; an interrupted run continues from the last complete epoch.
        seed: seed of the scenes.
        jitter: strength of the random light and viewpoint of each image, as in `make data`; 0: none. Each scene has one image.
        num_workers: number of processes that render.
    """

    def __init__(
        self, batch_size: int = 64, batches: int = 100, seed: int = 90210, jitter: float = 1.0, num_workers: int = 1
    ) -> None:
        super().__init__()
        self.batch_size, self.batches, self.seed, self.jitter = batch_size, batches, seed, jitter
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the scenes of the current epoch; a resumed run gets the same scenes as an uninterrupted one."""
        assert self.trainer is not None
        training: Any = self.trainer.lightning_module
        num_scenes = self.batches * self.batch_size  # in an epoch
        start = self.trainer.current_epoch * num_scenes
        first_scenes: Any = range(start, start + num_scenes, self.batch_size)  # number of the first scene of each batch
        return DataLoader(
            first_scenes,
            batch_size=None,
            collate_fn=partial(training.render_batch, num_scenes=self.batch_size, seed=self.seed, jitter=self.jitter),
            num_workers=self.num_workers,
            prefetch_factor=4 if self.num_workers else None,
        )


def set_scaling_(network: nn.Module, values: list[Tensor]) -> None:
    """Set a backbone's buffers "mean" and "scale" to mean and standard deviation of each channel of batches of features (B, C, h, w)."""
    channels = torch.cat(values).transpose(0, 1).flatten(1).double()
    network.get_buffer("mean").copy_(channels.mean(1))
    network.get_buffer("scale").copy_(channels.std(1).clamp(1e-3))


def backbone_state(network: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a backbone with weights in float16, and "mean" and "scale" in float32."""
    return {name: value if name in ("mean", "scale") else value.half() for name, value in network.state_dict().items()}


def train_and_ship(name: str, model: type[ShippedTraining], command_options: list[str]) -> None:
    """Train a network, or resume its training, in runs/embedded/<name>. Evaluate it, and write its weights and how they were made."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from safetensors.torch import save_file

    from diffcap.lit.stage_cli import StageCLI

    class ShippedCLI(StageCLI):
        """Adds options for the path of the weights and the number of held-out scenes."""

        def add_arguments_to_parser(self, parser):  # type: ignore[no-untyped-def]
            default = str(model.weights_file)
            parser.add_argument("--output", type=str, default=default, help="weights to write, .safetensors")
            parser.add_argument("--probe_images", type=int, default=6000, help="held-out scenes for the evaluation")

    cli = ShippedCLI(
        model,
        RenderedScenes,
        args=command_options,
        trainer_defaults={
            "accelerator": "auto",
            "devices": 1,
            "logger": False,
            "default_root_dir": f"runs/embedded/{name}",
            "reload_dataloaders_every_n_epochs": 1,
            "enable_model_summary": False,
            "callbacks": [ModelCheckpoint(filename="last", enable_version_counter=False)],
        },
    )
    steps, data, num_held_out = cli.model.steps, cli.datamodule, cli.config.probe_images
    last_checkpoint = Path(cli.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
    cli.trainer.fit_loop.epoch_loop.max_steps = steps
    cli.trainer.fit(cli.model, datamodule=data, ckpt_path=str(last_checkpoint) if last_checkpoint.is_file() else None)
    if cli.trainer.global_step < steps:
        return  # stopped by the user; the same command resumes the training
    with torch.no_grad():
        state_dict, scores = cli.model.cpu().eval().finish(num_held_out, data.seed, data.jitter)
    options = {f"model.{key}": value for key, value in cli.model.hparams.items() if key[0] != "_"}
    options |= {f"data.{key}": getattr(data, key) for key in ("batch_size", "batches", "seed", "jitter")}
    arguments = " ".join(f"--{key}={value}" for key, value in options.items())
    provenance = {
        "date": datetime.date.today().isoformat(),
        "command": f"python stages/shipped.py {name} --seed_everything={cli.config.seed_everything} {arguments}",
        "seed": f"{cli.config.seed_everything} (weights), {data.seed} (scenes)",
        "steps": f"{steps} of {data.batch_size} images",
        "held_out": json.dumps({**scores, "images": num_held_out}),
    }
    weights_file = Path(cli.config.output)
    with atomic_write(weights_file, per_process=False) as temporary:  # only one process writes
        save_file({key: value.contiguous() for key, value in state_dict.items()}, temporary, provenance)
        temporary.chmod(0o644)  # safetensors creates a file that only its owner can read
    print(f"{weights_file}: {weights_file.stat().st_size / 1e6:.2f} MB; on held-out scenes: {scores}")
