"""IDC-PCL against the authors' implementation: the fixtures' arrays, of pairs and of single images; test_import.py has the captions."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.parity.loading import Fixture, assert_close, load
from torch import Tensor

from diffcap.data.masking import IGNORED
from diffcap.methods.pcl.model import BOS, CLS, EOS, MASK, PAD, PCL, UNK
from diffcap.methods.pcl.official import from_official
from diffcap.methods.pcl.pretraining_model import PCLPretraining


@pytest.fixture
def official(pcl_fixture: Path) -> Fixture:
    return load(pcl_fixture)


def sizes(official: Fixture) -> dict:
    metadata = official.hyperparameters
    assert metadata["special"] == {"PAD": PAD, "BOS": BOS, "EOS": EOS, "UNK": UNK, "CLS": CLS, "MASK": MASK}
    return {
        "vocabulary_size": metadata["vocabulary"],
        "feature_channels": metadata["feature_width"],
        "width": metadata["width"],
        "heads": metadata["heads"],
        "ffn": metadata["ffn"],
        "cross_layers": metadata["cross_layers"],
    }


def pretraining(official: Fixture, fine_grained: bool = False) -> PCLPretraining:
    metadata = official.hyperparameters
    classes = metadata["classes"] if fine_grained else 0
    model = PCLPretraining(**sizes(official), temperature=metadata["temperature"], classes=classes)
    weights = official.weights("pretrain_fgvc" if fine_grained else "pretrain")
    heads = {"classifier": "classifier.0", "matcher": "aligner.0"} if fine_grained else {}
    head_weights = {
        f"{ours}.{part}": weights[f"{name}.{part}"] for ours, name in heads.items() for part in ("weight", "bias")
    }
    model.load_state_dict({**from_official(weights, "pretrain"), **head_weights})
    return model.eval()


def captioner(official: Fixture) -> PCL:
    model = PCL(**sizes(official))
    model.load_state_dict(from_official(official.weights("finetune"), "finetune"))
    return model.eval()


def maps(features: Tensor) -> Tensor:
    return features.transpose(1, 2).unsqueeze(-1)  # (B, patches, C) to (B, C, patches, 1)


def batch_of(official: Fixture, suffix: str = "") -> dict[str, Tensor]:
    arrays = official.arrays
    return {**arrays, "before": maps(arrays["before" + suffix]), "after": maps(arrays["after" + suffix])}


@torch.no_grad()
def test_mlm(official: Fixture) -> None:
    model, batch = pretraining(official), batch_of(official)
    assert_close(model.mlm_logits(batch), official.arrays["mlm_logits"])
    assert_close(model.mlm(batch), official.arrays["mlm_loss_per_token"])


@torch.no_grad()
def test_mvcl_hides_the_patches_itself(official: Fixture) -> None:
    batch = batch_of(official)
    hidden = official.arrays["visual_mask"].chunk(2, 1)
    for name, mask in zip(("before", "after"), hidden):
        expected = official.arrays[f"{name}_masked"]
        assert torch.equal(official.arrays[name].masked_fill(mask[..., None], 0.0), expected)
    losses = pretraining(official).mvcl(batch)
    assert_close(losses, official.arrays["mvcl_loss_per_feature"])


@torch.no_grad()
def test_fda(official: Fixture) -> None:
    model, batch = pretraining(official), batch_of(official)
    similarity = model.fda_similarity(batch)
    assert_close(similarity[:, 0].mean(), official.arrays["fda_positive_similarity"])
    assert_close(similarity[:, 1:].mean(), official.arrays["fda_negative_similarity"])
    assert_close(model.loss("fda", batch)["loss"], official.arrays["fda_loss"])


@torch.no_grad()
def test_fine_grained_classification(official: Fixture) -> None:
    arrays = official.arrays
    classes = {f"class_{name}": arrays[f"class_{name}"][:, 0] for name in ("before", "after")}
    assert torch.equal(classes["class_before"] == classes["class_after"], arrays["same_class"][:, 0].bool())
    model, batch = pretraining(official, fine_grained=True), {**batch_of(official), **classes}
    parts = model.loss("fgvc", batch)
    assert_close(parts["loss"], arrays["fgvc_loss"])
    assert_close(parts["contrast"], arrays["fgvc_contrastive_loss"])


@torch.no_grad()
def test_single_images(pcl_single_fixture: Path) -> None:
    """The second image absent, as released."""
    single = load(pcl_single_fixture)
    arrays, model = single.arrays, pretraining(single)
    batch = {**arrays, "before": maps(arrays["image"])}
    assert_close(model.mlm_logits(batch), arrays["mlm_logits"])
    assert_close(model.mlm(batch), arrays["mlm_loss_per_token"])
    assert torch.equal(arrays["image"].masked_fill(arrays["visual_mask"][..., None], 0.0), arrays["image_masked"])
    assert_close(model.mvcl(batch), arrays["mvcl_loss_per_feature"])
    assert_close(model.loss("fda", batch)["loss"], arrays["fda_loss"])


@torch.no_grad()
def test_finetuning(official: Fixture) -> None:
    model, batch = captioner(official), batch_of(official)
    memory = model.encode(batch["before"], batch["after"])
    logits = model.masked_logits(memory, batch)
    labels = batch["mlm_labels"]
    assert_close(logits, official.arrays["finetune_logits"])
    words = F.cross_entropy(logits, labels[labels != IGNORED], reduction="none")
    assert_close(words, official.arrays["finetune_loss_per_token"])


@torch.no_grad()
def test_distractor_judging(official: Fixture) -> None:
    model, batch = captioner(official), batch_of(official)
    logits = model.distractor_head(model.encode_pair(batch["before"], batch["after"])[1].flatten(1))
    assert_close(logits, official.arrays["distractor_logits"])
    losses = F.cross_entropy(logits, official.arrays["distractor_labels"][:, 0], reduction="none")
    assert_close(losses, official.arrays["distractor_loss"])
    total = model.loss({**batch, "is_change": official.arrays["distractor_labels"][:, 0]})["loss"]
    summed = official.arrays["finetune_loss_per_token"].sum() + official.arrays["distractor_loss"].sum()
    assert_close(total, summed)
