"""The fine-tuning stage, which trains any captioner on captions. The scores of validation captions select the best checkpoint."""

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from diffcap.evaluation.captions import Tokenizer
from diffcap.evaluation.metric import CaptionMetric
from diffcap.evaluation.remote_sensing import RELEASED_LAYOUTS, id_text
from diffcap.lit.schedules import DecoderPlateau, Schedule
from diffcap.lit.training import TrainingModule, adamw, init_from
from diffcap.models.captioner import Captioner
from diffcap.models.generation import greedy
from diffcap.registry import method_of
from diffcap.text.vocabulary import Vocabulary
from diffcap.utils.errors import DiffcapError


class Captioning(TrainingModule):
    """Fine-tune a `Captioner`. Validation decodes greedily and computes the dataset's metrics.

    Args:
        captioner: the method.
        lr: Adam's learning rate before the schedule (IDC-PCL: 3e-5).
        weight_decay: L2 in the gradient (IDC-PCL: 0 on CLEVR-Change, 1e-4 on the birds); with `pretrained_lr` decoupled.
        schedule: piecewise (IDC-PCL, authors' code), step (SCORER, DIRL), linear (CLIP4IDC), noam, cosine or constant; see `schedules`.
        warmup: number of warm-up steps; below 1, a fraction of the trainer's `max_steps`.
        milestones: steps (5000) at which the learning rate falls (null: 10,000 and 20,000, IDC-PCL's authors' code); fractions
            of the trainer's `max_steps` (0.5); or epochs ("15ep").
        init_from: checkpoint of the pre-training stage.
        init_without: parts of the captioner ("trunk.pair_encoder") that keep their initial weights in spite of `init_from`.
        tokenizer: of the validation scores: "ptb"; "raw" as in IDC-PCL; or "ids" as in RSICCformer and Chg2Cap: the ids of words are
            scored, so that an unknown word matches each rare word, see `evaluation.remote_sensing`.
        pretrained_lr: learning rate of the captioner's pretrained parameters: CLIP in CLIP4IDC, the trained layers of the ResNet in
            RSICCformer and Chg2Cap; null for `lr`.
        clip_weights: weights of CLIP, for CLIP4IDC without an adaptation's checkpoint: default, random, or a file.
        resnet_weights: initial weights of the ResNet of RSICCformer and Chg2Cap with `backbone`: default, random, or a file.
        half_precision_clip: the optimizer of CLIP4IDC's released program, see `clip4idc.optimizers.bert_adam`; it needs `pretrained_lr`.
        decoder_clip_value: largest absolute value of a gradient in the captioner's `decoder` and the trained layers of its ResNet
            (RSICCformer: 5); null: no limit.
        decoder_plateau_factor: factor of the decoder's learning rate after every third validation in a row without a new best value
            of `run.monitor` (RSICCformer: 0.7); null: the rate has no such factor.
    """

    stage = "finetune"

    def __init__(
        self,
        captioner: Captioner,
        lr: float = 3e-5,
        weight_decay: float = 0.0,
        schedule: Schedule = "piecewise",
        warmup: int | float = 0,
        milestones: list[float | str] | None = None,
        init_from: str | None = None,
        tokenizer: Literal["ptb", "raw", "ids"] = "ptb",
        pretrained_lr: float | None = None,
        clip_weights: str | None = None,
        half_precision_clip: bool = False,
        resnet_weights: str | None = None,
        decoder_clip_value: float | None = None,
        decoder_plateau_factor: float | None = None,
        init_without: list[str] | None = None,
    ) -> None:
        super().__init__(captioner, lr, weight_decay, schedule, warmup, milestones)
        self.captioner: Captioner
        self.init_from, self.init_without, self.tokenizer = init_from, init_without or [], tokenizer
        self.pretrained_lr, self.clip_weights = pretrained_lr, clip_weights
        self.half_precision_clip, self.resnet_weights = half_precision_clip, resnet_weights
        self.decoder_clip_value, self.decoder_plateau_factor = decoder_clip_value, decoder_plateau_factor

    def configure_callbacks(self) -> list[pl.Callback]:
        """`DecoderPlateau`, if it is used."""
        return [] if self.decoder_plateau_factor is None else [DecoderPlateau(self.decoder_plateau_factor)]

    def optimizer(self) -> torch.optim.Optimizer:
        """Return Adam with the groups of `_adam_groups`; AdamW or BertAdam if `pretrained_lr` belongs to CLIP or a base model."""
        if self.pretrained_lr is None or self.captioner.backbone_parameters():
            groups = self._adam_groups()
            return torch.optim.Adam(groups, self.lr, weight_decay=self.weight_decay, fused=not self.clips_gradients)
        model = self.captioner
        rates = (self.lr, self.pretrained_lr, self.weight_decay)
        if self.half_precision_clip:
            assert model.half_precision_optimizer is not None
            return model.half_precision_optimizer(*rates)
        return adamw(model, model.pretrained_parameters(), *rates, betas=(0.9, 0.999))

    def _adam_groups(self) -> list[dict[str, Any]]:
        """Return the groups "captioner", "decoder" if it has plateaus, and "backbone" if it has `pretrained_lr`."""
        separate: list[dict[str, Any]] = []
        if self.decoder_plateau_factor is not None:
            separate.append({"params": list(self._decoder().parameters()), "name": "decoder"})
        if self.pretrained_lr is not None:
            backbone = self.captioner.backbone_parameters()
            separate.append({"params": backbone, "name": "backbone", "lr": self.pretrained_lr})
        if not separate:
            return [{"params": list(self.parameters())}]
        ids = {id(parameter) for group in separate for parameter in group["params"]}
        others = [parameter for parameter in self.parameters() if id(parameter) not in ids]
        return [{"params": others, "name": "captioner"}, *separate]

    @property
    def clips_gradients(self) -> bool:
        """See `TrainingModule.clips_gradients`."""
        return super().clips_gradients or self.decoder_clip_value is not None

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
        """Clip each value of the gradients of decoder and ResNet (`decoder_clip_value`), then clip as the trainer's options."""
        if self.decoder_clip_value is not None:
            clipped = [*self._decoder().parameters(), *self.captioner.backbone_parameters()]
            nn.utils.clip_grad_value_(clipped, self.decoder_clip_value)
        super().configure_gradient_clipping(optimizer, *args, **options)

    def _decoder(self) -> nn.Module:
        decoder = self.captioner.decoder
        assert isinstance(decoder, nn.Module)
        return decoder

    def gradient_groups(self) -> dict[str, list[nn.Parameter]]:
        """The pretrained parameters and the others, if there are pretrained ones."""
        pretrained = self.captioner.pretrained_parameters()
        ids = {id(parameter) for parameter in pretrained}
        others = [parameter for parameter in self.captioner.parameters() if id(parameter) not in ids]
        return {"pretrained": pretrained, "captioner": others} if pretrained else {}

    def setup(self, stage: str) -> None:
        """Load the weights of a pre-training, CLIP or a ResNet, and prepare the metric's references."""
        if stage != "fit":
            return
        self._check_data()
        allowed = self.captioner.allowed_missing, self.captioner.allowed_unexpected
        init_from(self.captioner, self.init_from, self.feature_data.words, *allowed, self.init_without)
        weights = self.clip_weights or self.resnet_weights
        if weights and not self.init_from:
            self.captioner.load_initial(weights, self.feature_data.vocabulary)
        self._make_metric()

    def _make_metric(self) -> None:
        """Prepare the metric of validation, whose texts are `scored_text`."""
        references = self.feature_data.val_references
        texts = {key: [self.scored_text(caption) for caption in captions] for key, captions in references.items()}
        self.metric = CaptionMetric(texts, tokenizer=self.metric_tokenizer)

    @property
    def metric_tokenizer(self) -> Tokenizer:
        """The tokenizer of the metric; a `scored_text` of ids is not tokenized further."""
        return "raw" if self.tokenizer == "ids" else self.tokenizer

    def scored_text(self, caption: str) -> str:
        """Return the text that is scored: the ids of a caption's words with the tokenizer "ids", else the caption."""
        if self.tokenizer != "ids":
            return caption
        vocabulary = self.feature_data.vocabulary
        assert isinstance(vocabulary, Vocabulary)  # see `_check_data`
        return id_text(caption, vocabulary)

    def _check_data(self) -> None:
        method_of(type(self.captioner))  # raises an error if checkpoints could not be saved
        data = self.feature_data
        captioner = self.captioner
        method = type(self.captioner).__name__
        captioner.check(data)
        needed = captioner.initial_weights
        has_rate = self.pretrained_lr is not None
        has_plateau = self.decoder_plateau_factor is not None
        checkpoint: Any = self.trainer.checkpoint_callback if has_plateau else None
        faults = (
            (
                self.tokenizer == "ids" and data.vocabulary.layout not in RELEASED_LAYOUTS,
                f"model.tokenizer is ids, which needs data.vocabulary_layout {' or '.join(RELEASED_LAYOUTS)}, not "
                f"{data.vocabulary.layout}; set it to ptb or raw",
            ),
            (
                self.clip_weights and not self.init_from and needed != "clip_weights",
                f"model.clip_weights is {self.clip_weights}, but {method} has no CLIP; remove the option",
            ),
            (
                self.resnet_weights and needed != "resnet_weights",
                f"model.resnet_weights is {self.resnet_weights}, but {method} has no ResNet; remove the option, or set "
                "model.captioner.init_args.backbone",
            ),
            (
                needed == "resnet_weights" and not (self.init_from or self.resnet_weights),
                "model.resnet_weights is not set; give default, random, or a file",
            ),
            (
                "backbone" in captioner.hyperparameters and has_rate and not captioner.backbone_parameters(),
                f"model.pretrained_lr is {self.pretrained_lr}, but this {method} has no ResNet with trained layers; remove the "
                "option, or set model.captioner.init_args.backbone and trained_layers",
            ),
            (
                has_plateau and not getattr(checkpoint, "monitor", None),
                "model.decoder_plateau_factor needs run.monitor; set it, for example to val/BLEU-4",
            ),
        )
        for applies, fault in faults:
            if applies:
                raise DiffcapError(f"{fault}.")

    def metadata(self) -> dict[str, Any]:
        """The method, its constructor arguments and the tokenizer of the text metrics, for the evaluation."""
        return {
            "method": method_of(type(self.captioner)),
            "hyperparameters": self.captioner.hyperparameters,
            "tokenizer": "ptb" if self.tokenizer == "ids" else self.tokenizer,
        }

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """The captioner's loss."""
        losses = self.captioner.loss(batch)
        self.log_losses(losses, len(batch["before"]))
        return losses["loss"]

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Caption the pairs, and compute the losses of each pair's first caption."""
        self.add_validation_losses(batch, self.captioner.validation_losses)
        tokens = greedy(self.captioner, batch["before"], batch["after"], self.feature_data.max_length)
        captions = [self.feature_data.vocabulary.decode(row) for row in tokens]
        self.metric.update(batch["id"], [self.scored_text(caption) for caption in captions])

    def on_validation_epoch_end(self) -> None:
        """Log the losses, and the scores of the captions of all ranks: `val/CIDEr-D` and the other fast metrics."""
        self.log_validation_losses()
        scores = self.metric.compute()
        self.metric.reset()
        # Not in the progress bar: the line that is printed after each validation has the scores x 100.
        self.log_dict({f"val/{name}": float(value) for name, value in scores.items()}, rank_zero_only=False)
