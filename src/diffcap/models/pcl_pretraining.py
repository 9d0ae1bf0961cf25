"""IDC-PCL's pre-training: three self-supervised tasks on pairs or single images with captions, and the fine-grained
visual classification (FGVC) of pairs of single images with class labels (Yao, Wang and Jin, AAAI 2022).

Order of the file: the regression head of MVCL, then `PCLPretraining`, whose trunk is `pcl.PCLTrunk`.

Letters: B pairs, N patches of an image, T text positions, D width, C feature channels, V vocabulary.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from diffcap.losses.fda import difference_aligning
from diffcap.losses.fine_grained import class_contrast, classification, matching
from diffcap.losses.gather import global_mean
from diffcap.losses.mlm import IGNORED, masked_cross_entropy
from diffcap.losses.mvcl import masked_visual_nce
from diffcap.models.captioner import Batch
from diffcap.models.layers import UnbiasedLayerNorm
from diffcap.models.pcl import EMBEDDING_EPS, PCLTrunk


class RegressionHead(nn.Module):
    """Back from D to feature channels for MVCL: a layer, then the image projection's own weights turned round."""

    def __init__(self, width: int, feature_channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), UnbiasedLayerNorm(width, EMBEDDING_EPS))
        self.bias = nn.Parameter(torch.zeros(feature_channels))

    def forward(self, hidden: Tensor, projection: Tensor) -> Tensor:
        """(n, D) to (n, C); `projection` is the image projection's weight, (D, C), tied."""
        return self.inner(hidden) @ projection + self.bias


class PCLPretraining(nn.Module):
    """The tasks of IDC-PCL over one trunk; a batch carries what its task needs.

    A batch without "after" is of single images with captions (CUB): the second image's patches are absent, its [CLS]
    stays.

    Args:
        vocabulary_size, feature_channels, trunk: as `PCLTrunk`.
        pad_mask: hide padding from attention (released code: False).
        mvcl_negatives: "predictions" at unmasked positions (released code) or their original "features" (paper).
        temperature: tau of MVCL and FDA (paper and code: 1).
        single_image: "absent": the second [CLS] of a single image joins before the pair encoder (released code). "masked":
            the second image is padding, hidden from attention in all encoders (paper). Its patches then weigh nothing
            in any sum, so they are left out of the computation; what remains of the padded side is its [CLS], which
            passes the single-image encoder seeing itself alone.
        classes: of the images of "fgvc" (NABirds: 555); 0: no heads for that task.
    """

    def __init__(
        self,
        vocabulary_size: int,
        feature_channels: int,
        pad_mask: bool = False,
        mvcl_negatives: Literal["predictions", "features"] = "predictions",
        temperature: float = 1.0,
        single_image: Literal["absent", "masked"] = "absent",
        classes: int = 0,
        **trunk: Any,
    ) -> None:
        super().__init__()
        self.trunk = PCLTrunk(vocabulary_size, feature_channels, **trunk)
        width = self.trunk.width
        self.regress = RegressionHead(width, feature_channels)
        self.classifier = nn.Linear(width, classes) if classes else None
        self.matcher = nn.Linear(2 * width, 2) if classes else None
        self.pad_mask, self.mvcl_negatives, self.temperature = pad_mask, mvcl_negatives, temperature
        self.single_image = single_image

    def loss(self, task: str, batch: Batch) -> dict[str, Tensor]:
        """The global batch's loss of one task, "mlm", "mvcl", "fda" or "fgvc", and the parts of a sum, to be logged."""
        if task != "fgvc":
            losses = {"mlm": self.mlm, "mvcl": self.mvcl, "fda": self.fda}[task](batch)
            return {"loss": global_mean(losses)}
        parts = {name: global_mean(losses) for name, losses in self.fgvc(batch).items()}
        return {
            "loss": torch.stack(list(parts.values())).sum(),
            **{name: part.detach() for name, part in parts.items()},
        }

    def _visual(self, images: list[Tensor]) -> Tensor:
        """One or two feature maps (B, C, h, w) before they meet the text: (B, 2 + N or 2 + 2 N, D)."""
        if len(images) == 1:
            return self.trunk.visual_of_one(images[0], encode_cls=self.single_image == "masked")
        return self.trunk.visual(*images)

    def mlm_logits(self, batch: Batch) -> Tensor:
        """Word scores at the hidden positions, row by row: (n, V)."""
        visual = self._visual(_maps(batch))
        hidden = self.trunk.joint(visual, batch["mlm_tokens"], self.pad_mask)
        text = hidden[:, visual.shape[1] + 1 :]
        return self.trunk.output_layer(text[batch["mlm_labels"] != IGNORED])

    def mlm(self, batch: Batch) -> Tensor:
        """Masked language modelling: (n,) losses, one a hidden word. Needs `mlm_tokens` and `mlm_labels`, (B, T)."""
        labels = batch["mlm_labels"]
        return masked_cross_entropy(self.mlm_logits(batch), labels[labels != IGNORED])

    def mvcl(self, batch: Batch) -> Tensor:
        """Masked visual contrastive learning: (n,) losses, one a hidden patch.

        Needs `tokens` (B, T) and `visual_mask`, boolean (B, 2 N), or (B, N) of a single image: which patches are hidden.
        """
        maps = _maps(batch)
        original = torch.cat([image.flatten(2).transpose(1, 2) for image in maps], 1)  # (B, 2 N, C)
        hide = batch["visual_mask"]
        shown = [
            image.masked_fill(part.view(len(image), 1, *image.shape[2:]), 0.0)
            for image, part in zip(maps, hide.chunk(len(maps), dim=1))
        ]  # raw features are zeroed before the projection (authors' code)
        visual = self._visual(shown)
        hidden = self.trunk.joint(visual, batch["tokens"], self.pad_mask)
        patches = original.shape[1] // len(maps)
        firsts = [1 + image * (1 + patches) for image in range(len(maps))]
        hidden = torch.cat([hidden[:, first : first + patches] for first in firsts], 1)
        regressed = self.regress(hidden, self.trunk.image_projection.weight)  # (B, 2 N, C)
        negatives = regressed[~hide] if self.mvcl_negatives == "predictions" else original[~hide]
        return masked_visual_nce(regressed[hide], original[hide], negatives, self.temperature)

    def fda_similarity(self, batch: Batch) -> Tensor:
        """Cosine of each pair with its caption and its negatives: (B, 1 + K)."""
        captions = batch["fda_captions"]  # (B, 1 + K, T)
        pairs, choices, length = captions.shape
        visual = self._visual(_maps(batch))
        tokens = visual.shape[1]
        second = tokens // 2 if "after" in batch else tokens - 1  # where the second image's [CLS] is
        hidden = self.trunk.joint(visual.repeat_interleave(choices, 0), captions.reshape(-1, length), self.pad_mask)
        images = (hidden[:, 0] + hidden[:, second]) / 2
        return torch.cosine_similarity(images, hidden[:, tokens], dim=-1).view(pairs, choices)

    def fda(self, batch: Batch) -> Tensor:
        """Fine-grained difference aligning: (B,) losses. Needs `fda_captions` (B, 1 + K, T), the true one first."""
        return difference_aligning(self.fda_similarity(batch), self.temperature)

    def fgvc(self, batch: Batch) -> dict[str, Tensor]:
        """Fine-grained visual classification of two images of one or of two classes; no text, no cross-modal encoder.

        Needs `class_before`, `class_after`, (B,) in 0 ... classes - 1.

        Returns:
            Losses, one an image or a pair: "classification" (2 B,) and "contrast" (2 B,) of the single-image encoder's
            [CLS], "matching" (B,) of the pair encoder's two.
        """
        assert self.classifier is not None and self.matcher is not None
        singles, visual = self.trunk.pair(batch["before"], batch["after"])
        images = torch.cat([single[:, 0] for single in singles])  # (2 B, D)
        labels = torch.cat([batch["class_before"], batch["class_after"]])
        pairs = torch.cat([visual[:, 0], visual[:, visual.shape[1] // 2]], -1)  # (B, 2 D)
        return {
            "classification": classification(self.classifier(images), labels),
            "matching": matching(self.matcher(pairs), batch["class_before"] == batch["class_after"]),
            "contrast": class_contrast(images, labels),
        }


def _maps(batch: Batch) -> list[Tensor]:
    return [batch[name] for name in ("before", "after") if name in batch]
