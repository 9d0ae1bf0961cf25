"""IDC-PCL's pre-training (Yao, Wang and Jin, AAAI 2022). Three self-supervised tasks, on pairs or single images with captions: masked
language modelling (MLM), masked visual contrastive learning (MVCL) and fine-grained difference aligning (FDA). A fourth task is the
fine-grained visual classification (FGVC) of pairs of single images with class labels.

Letters: B pairs, N patches of an image, T text positions, K negatives of a caption, n masked words or patches of the batch, D width,
C feature channels, V vocabulary.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.losses.gather import global_mean
from diffcap.methods.pcl.losses import class_contrastive_loss, difference_aligning_loss, masked_visual_nce
from diffcap.methods.pcl.model import EMBEDDING_EPS, PCLTrunk, find_masked_words
from diffcap.models.captioner import Batch, constructor_arguments
from diffcap.models.decoder import flat_indices, take_flat
from diffcap.models.layers import Linear, UnbiasedLayerNorm
from diffcap.utils.linear import linear


class RegressionHead(nn.Module):
    """Predict features from hidden states for MVCL: linear layer, GELU, norm, transposed image projection (authors' code)."""

    def __init__(self, width: int, feature_channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(Linear(width, width), nn.GELU(), UnbiasedLayerNorm(width, EMBEDDING_EPS))
        self.bias = nn.Parameter(torch.zeros(feature_channels))

    def forward(self, hidden: Tensor, projection_weight: Tensor) -> Tensor:
        """Map hidden states (..., D) to features (..., C). `projection_weight` (D, C) is the weight of the image projection."""
        return linear(self.inner(hidden), projection_weight.T) + self.bias


class PCLPretraining(nn.Module):
    """The pre-training tasks of IDC-PCL with one trunk. Each batch contains the entries that its task needs.

    A batch without "after" consists of single images with captions (CUB): the second image has no patches, only its [CLS].

    Args:
        vocabulary_size, feature_channels, trunk: as in `PCLTrunk`.
        pad_mask: mask padding in attention (authors' code: False).
        mvcl_negatives: "predictions" at unmasked positions (authors' code) or the original "features" there (paper).
        temperature: tau of MVCL and FDA (paper and code: 1).
        single_image: replacement of the missing second image. "absent": only its [CLS], appended before the pair encoder (authors'
            code). "masked": its [CLS], after the single-image encoder, and patches that no token attends to (paper). These patches
            change nothing, so they are not computed.
        classes: number of image classes of the task "fgvc" (NABirds: 555); 0: no heads for that task.
        fgvc_losses: names of the losses that the task "fgvc" sums; None: all three (paper).
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
        fgvc_losses: list[Literal["classification", "matching", "contrast"]] | None = None,
        **trunk: Any,
    ) -> None:
        super().__init__()
        constructor_arguments(locals())  # checks the values of the Literals
        self.trunk = PCLTrunk(vocabulary_size, feature_channels, **trunk)
        width = self.trunk.width
        self.regress = RegressionHead(width, feature_channels)
        self.classifier = Linear(width, classes) if classes else None
        self.matcher = Linear(2 * width, 2) if classes else None
        self.pad_mask = pad_mask
        self.mvcl_negatives = mvcl_negatives
        self.temperature = temperature
        self.single_image = single_image
        self.fgvc_losses = fgvc_losses

    def loss(self, task: str, batch: Batch) -> dict[str, Tensor]:
        """Return the global batch's loss of a task, "mlm", "mvcl", "fda" or "fgvc". For "fgvc", also return its parts for the log."""
        if task != "fgvc":
            losses = {"mlm": self.mlm, "mvcl": self.mvcl, "fda": self.fda}[task](batch)
            return {"loss": global_mean(losses)}
        parts = {name: global_mean(losses) for name, losses in self.fgvc(batch).items()}
        loss = torch.stack([parts[name] for name in self.fgvc_losses or parts]).sum()
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}}

    def host_entries(self, batch: Batch) -> Batch:
        """Return indices of masked words or patches, which the loader adds to the batch on the CPU, see `Captioner.host_entries`."""
        if "mlm_labels" in batch:
            return {"masked_words": find_masked_words(batch)}
        return {"patches": _find_patches(batch)} if "visual_mask" in batch else {}

    def _encode_images(self, maps: list[Tensor]) -> Tensor:
        """Encode one or two feature maps (B, C, h, w) without text: (B, 2 + N, D) or (B, 2 + 2 N, D)."""
        if len(maps) == 1:
            return self.trunk.encode_one_image(maps[0], encode_cls=self.single_image == "masked")
        return self.trunk.encode_images(*maps)[1]

    def mlm_logits(self, batch: Batch) -> Tensor:
        """Compute word logits (n, V) at the n masked positions, caption by caption."""
        visual = self._encode_images(_image_maps(batch))
        masked_words = find_masked_words(batch)
        query_positions = visual.shape[1] + 1 + masked_words.positions  # after the visual tokens and the text's [CLS]
        hidden = self.trunk.encode_jointly(visual, batch["mlm_tokens"], self.pad_mask, query_positions)
        return self.trunk.output_layer(take_flat(hidden, masked_words.rows))

    def mlm(self, batch: Batch) -> Tensor:
        """Compute the loss (n,) of each masked word (MLM). `batch` has `mlm_tokens` and `mlm_labels`, (B, T) each."""
        return F.cross_entropy(self.mlm_logits(batch), find_masked_words(batch).ids, reduction="none")

    def mvcl(self, batch: Batch) -> Tensor:
        """Compute the loss (n,) of each masked patch (MVCL).

        `batch` has `tokens` (B, T) and `visual_mask`, (B, 2 N), or (B, N) for single images, which is True for masked patches.
        """
        maps = _image_maps(batch)
        features = torch.cat([image.flatten(2).transpose(1, 2) for image in maps], 1)  # (B, 2 N, C)
        is_masked = batch["visual_mask"]
        masked_maps = [
            image.masked_fill(mask.view(len(image), 1, *image.shape[2:]), 0.0)
            for image, mask in zip(maps, is_masked.chunk(len(maps), dim=1))
        ]  # the features are set to 0, not the embedded patches (authors' code)
        visual = self._encode_images(masked_maps)
        patches_per_image = features.shape[1] // len(maps)
        patches = torch.arange(features.shape[1], device=features.device)
        query_positions = patches + 1 + patches // patches_per_image  # each image's patches follow its [CLS]
        hidden = self.trunk.encode_jointly(visual, batch["tokens"], self.pad_mask, query_positions)
        predicted = self.regress(hidden, self.trunk.image_projection.weight)  # (B, 2 N, C)
        masked, others = _find_patches(batch)
        negatives = take_flat(predicted if self.mvcl_negatives == "predictions" else features, others)
        masked_vectors = take_flat(predicted, masked), take_flat(features, masked)
        return masked_visual_nce(*masked_vectors, negatives, self.temperature)

    def fda_similarity(self, batch: Batch) -> Tensor:
        """Compute the cosines (B, 1 + K) of each pair with its caption and with the caption's K negatives."""
        captions = batch["fda_captions"]  # (B, 1 + K, T)
        visual = self._encode_images(_image_maps(batch))
        text_cls = visual.shape[1]  # position of the text's [CLS]
        second_cls = text_cls // 2 if "after" in batch else text_cls - 1  # of a single image: the last visual token
        places = torch.arange(text_cls + 1, device=visual.device)
        cls_positions = torch.cat([places[:1], places[second_cls : second_cls + 1], places[text_cls:]])
        hidden = self.trunk.encode_jointly(visual, captions.flatten(0, 1), self.pad_mask, cls_positions)
        image_vectors = (hidden[:, 0] + hidden[:, 1]) / 2  # (B (1 + K), D)
        return torch.cosine_similarity(image_vectors, hidden[:, 2], dim=-1).view(captions.shape[:2])

    def fda(self, batch: Batch) -> Tensor:
        """Compute the loss (B,) of each pair (FDA). `batch` has `fda_captions` (B, 1 + K, T), each pair's correct caption first."""
        return difference_aligning_loss(self.fda_similarity(batch), self.temperature)

    def fgvc(self, batch: Batch) -> dict[str, Tensor]:
        """Compute the losses of pairs of images of the same or of different classes, without text (FGVC).

        `class_before` and `class_after` (B,) are in 0 ... classes - 1. The losses "classification" and "contrast" (2 B,) are per image,
        from the [CLS] of the single-image encoder. "matching" (B,) is per pair, from both [CLS] of the pair encoder.
        """
        assert self.classifier is not None and self.matcher is not None
        singles, visual = self.trunk.encode_images(batch["before"], batch["after"])
        image_cls = torch.cat([single[:, 0] for single in singles])  # (2 B, D)
        classes = torch.cat([batch["class_before"], batch["class_after"]])
        pair_cls = torch.cat([visual[:, 0], visual[:, visual.shape[1] // 2]], -1)  # (B, 2 D)
        is_same_class = (batch["class_before"] == batch["class_after"]).long()
        return {
            "classification": F.cross_entropy(self.classifier(image_cls), classes, reduction="none"),
            "matching": F.cross_entropy(self.matcher(pair_cls), is_same_class, reduction="none"),
            "contrast": class_contrastive_loss(image_cls, classes),
        }


def _find_patches(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the indices (n,) of the masked patches in the flattened `visual_mask`, and those (m,) of the other patches."""
    if "patches" in batch:
        return batch["patches"]
    return flat_indices(batch["visual_mask"]), flat_indices(~batch["visual_mask"])


def _image_maps(batch: Batch) -> list[Tensor]:
    """Return the feature maps of both images, or of a single image, (B, C, h, w) each."""
    return [batch[name] for name in ("before", "after") if name in batch]
