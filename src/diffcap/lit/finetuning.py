"""The fine-tuning stage, which trains any captioner on captions. The scores of validation captions select the best checkpoint."""

import itertools
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diffcap.evaluation.captions import Tokenizer
from diffcap.evaluation.metric import CaptionMetric
from diffcap.evaluation.remote_sensing import RELEASED_LAYOUTS, id_text
from diffcap.lit.callbacks import PartCallback
from diffcap.lit.schedules import Schedule
from diffcap.lit.training import OptimizerFunction, TrainingModule, adamw, init_from
from diffcap.models.captioner import Batch, Captioner
from diffcap.models.generation import greedy
from diffcap.registry import method_of
from diffcap.text.characters import split_characters, uses_characters
from diffcap.text.vocabulary import Vocabulary
from diffcap.utils.errors import DiffcapError


class Captioning(TrainingModule):
    """Fine-tune a `Captioner`. Validation decodes greedily and computes BLEU, ROUGE-L and CIDEr-D.

    Args:
        captioner: the model.
        lr: learning rate, which the schedule multiplies by a factor (IDC-PCL: 3e-5).
        weight_decay: Adam adds it to the gradient as an L2 term (IDC-PCL: 0 on CLEVR-Change, 1e-4 on the birds); AdamW
            (see `optimizer`) shrinks the weights themselves.
        schedule: piecewise (IDC-PCL, authors' code), step (SCORER, DIRL), linear (CLIP4IDC), noam, cosine or constant.
        warmup: number of warm-up steps; below 1, a fraction of the trainer's `max_steps`.
        milestones: steps (5000) at which the learning rate falls (null: 10,000 and 20,000, IDC-PCL's authors' code); fractions
            of the trainer's `max_steps` (0.5); or epochs ("15ep").
        init_from: checkpoint of the pre-training stage.
        init_without: parts of the captioner ("trunk.pair_encoder") whose weights are not loaded from `init_from`.
        tokenizer: what the validation scores compare: "ptb", Penn Treebank tokens; "raw", text split at spaces (IDC-PCL); or "ids", the
            ids of words (RSICCformer and Chg2Cap). All unknown and rare words have the same id.
        pretrained_lr: learning rate of the captioner's pretrained parameters, such as CLIP in CLIP4IDC and the trained layers of the ResNet
            in RSICCformer and Chg2Cap; null is `lr`.
        initial_weights: weights that another program trained, which are loaded if `init_from` is null: default, the path of a file, or
            random (none). Null for methods that have no weights of another program.
        optimizer: function that returns an optimizer to use instead of AdamW, with the parameters of `lit.training.adamw` (for example
            diffcap.methods.clip4idc.optimizers.bert_adam). It is used only if `pretrained_lr` is set and the captioner has no ResNet.
            Other trainings use Adam.
    """

    stage = "finetune"
    splits_characters = False  # True if the references are compared by characters

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
        initial_weights: str | None = None,
        optimizer: OptimizerFunction | None = None,
        init_without: list[str] | None = None,
    ) -> None:
        super().__init__(captioner, lr, weight_decay, schedule, warmup, milestones)
        self.captioner: Captioner
        self.init_from, self.init_without, self.tokenizer = init_from, init_without or [], tokenizer
        self.pretrained_lr, self.initial_weights = pretrained_lr, initial_weights
        self.optimizer_function = optimizer or adamw

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the option `optimizer` if `pretrained_lr` is set and the captioner has no ResNet, else Adam."""
        captioner = self.captioner
        if self.pretrained_lr is None or not captioner.uses_adamw:
            groups = self._adam_groups()
            return torch.optim.Adam(groups, self.lr, weight_decay=self.weight_decay, fused=not self.changes_gradients)
        rates = (self.lr, self.pretrained_lr, self.weight_decay)
        return self.optimizer_function(captioner, captioner.pretrained_parameters(), *rates, betas=(0.9, 0.999))

    def _adam_groups(self) -> list[dict[str, Any]]:
        """Return Adam's parameter groups.

        The first group, "captioner", has the parameters that no other group has. Then there is a group for each part whose learning rate a
        `PartCallback` changes and, if `pretrained_lr` is set, the group "backbone".
        """
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        part_names = [callback.part for callback in callbacks if isinstance(callback, PartCallback)]
        part_groups: list[dict[str, Any]] = [
            {"params": list(self.captioner.get_submodule(name).parameters()), "name": name} for name in part_names
        ]
        if self.pretrained_lr is not None:
            backbone = self._trained_backbone_parameters()
            part_groups.append({"params": backbone, "name": "backbone", "lr": self.pretrained_lr})
        if not part_groups:  # Adam has one group, without a name
            return [{"params": list(self.parameters())}]
        grouped_ids = {id(parameter) for group in part_groups for parameter in group["params"]}
        others = [parameter for parameter in self.parameters() if id(parameter) not in grouped_ids]
        return [{"params": others, "name": "captioner"}, *part_groups]

    def _trained_backbone_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.captioner.pretrained_parameters() if parameter.requires_grad]

    def gradient_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the pretrained and the other parameters, whose gradients are logged separately; {} without pretrained parameters."""
        pretrained = self.captioner.pretrained_parameters()
        pretrained_ids = {id(parameter) for parameter in pretrained}
        others = [parameter for parameter in self.captioner.parameters() if id(parameter) not in pretrained_ids]
        return {"pretrained": pretrained, "captioner": others} if pretrained else {}

    def setup(self, stage: str) -> None:
        """Load the weights of a pre-training or of another program, and prepare the metric with the references."""
        if stage != "fit":
            return
        self._check_settings()
        allowed_names = self.captioner.allowed_missing, self.captioner.allowed_unexpected
        init_from(self.captioner, self.init_from, self.feature_data.words, *allowed_names, self.init_without)
        if not self.init_from:
            self.captioner.load_initial(self.initial_weights, self.feature_data.vocabulary)
        self._make_metric()

    def _make_metric(self) -> None:
        """Prepare the metric of validation with the `scored_text` of each reference."""
        references = self.feature_data.val_references
        self.splits_characters = uses_characters(itertools.chain(*references.values()))
        scored_texts = {id: [self.scored_text(caption) for caption in captions] for id, captions in references.items()}
        self.metric = CaptionMetric(scored_texts, tokenizer=self.metric_tokenizer)

    @property
    def metric_tokenizer(self) -> Tokenizer:
        """The tokenizer of the metric; a `scored_text` of ids is not tokenized further."""
        return "raw" if self.tokenizer == "ids" else self.tokenizer

    def scored_text(self, caption: str) -> str:
        """Return the text that is scored: the ids of a caption's words with the tokenizer "ids", else the caption, split if necessary."""
        if self.tokenizer != "ids":
            return split_characters(caption) if self.splits_characters else caption
        vocabulary = self.feature_data.vocabulary
        assert isinstance(vocabulary, Vocabulary)  # `_check_settings` allows no other class
        return id_text(caption, vocabulary)

    def _check_settings(self) -> None:
        """Raise a DiffcapError if captioner, data and options do not fit together."""
        method_of(type(self.captioner))  # raises an error for an unknown class, whose checkpoints could not be saved
        data = self.feature_data
        self.captioner.check(data)
        # Scores of ids depend on the order of the ids. Only `RELEASED_LAYOUTS` have the orders of the published evaluators.
        if self.tokenizer == "ids" and data.vocabulary.layout not in RELEASED_LAYOUTS:
            raise DiffcapError(
                f"model.tokenizer is ids, which needs data.vocabulary_layout {' or '.join(RELEASED_LAYOUTS)}, not "
                f"{data.vocabulary.layout}; set it to ptb or raw."
            )
        has_backbone_rate = self.pretrained_lr is not None and not self.captioner.uses_adamw  # the rate of a ResNet
        if has_backbone_rate and not self._trained_backbone_parameters():
            raise DiffcapError(
                f"model.pretrained_lr is {self.pretrained_lr}, but this {type(self.captioner).__name__} trains no pretrained parameters; "
                "remove the option, or set model.captioner.init_args to train some."
            )

    def metadata(self) -> dict[str, Any]:
        """Return what the evaluation needs: the method, the captioner's constructor arguments, and the tokenizer of the text metrics."""
        return {
            "method": method_of(type(self.captioner)),
            "hyperparameters": self.captioner.hyperparameters,
            "tokenizer": "ptb" if self.tokenizer == "ids" else self.tokenizer,
        }

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute and log the captioner's losses, and return the total loss."""
        losses = self.captioner.loss(batch)
        self.log_losses(losses, len(batch["before"]))
        return losses["loss"]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Caption the pairs, and compute the losses of each pair's first reference."""
        self.add_validation_losses(batch, self.captioner.validation_losses)
        memory = self.captioner.encode(batch["before"], batch["after"])
        tokens = greedy(self.captioner, memory, self.feature_data.max_length)  # (B, T)
        captions = [self.feature_data.vocabulary.decode(ids) for ids in tokens.tolist()]
        self.metric.update(batch["id"], [self.scored_text(caption) for caption in captions])
