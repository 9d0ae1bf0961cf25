"""Fine-grained losses against naive loops; test_gather.py has two ranks."""

import pytest
import torch

from diffcap.methods.pcl.losses import class_contrastive_loss


@pytest.mark.parametrize("margin", [0.4, 0.1])
def test_class_contrast(margin: float) -> None:
    torch.manual_seed(0)
    images, classes = torch.randn(7, 3), torch.tensor([0, 1, 0, 2, 2, 2, 1])
    expected = torch.zeros(7)
    pushed = 0
    for i in range(7):
        for j in range(7):
            a, b = images[i], images[j]
            cosine = sum(x * y for x, y in zip(a, b)) / (sum(x * x for x in a) * sum(x * x for x in b)).sqrt()
            if classes[i] == classes[j]:
                expected[i] += (1 - cosine) / 7
            elif cosine > margin:
                expected[i] += (cosine - margin) / 7
                pushed += 1
    assert 0 < pushed < 30  # both sides of the margin
    torch.testing.assert_close(class_contrastive_loss(images, classes, margin), expected)


def test_images_alike_by_class_and_opposite_otherwise_cost_nothing() -> None:
    images = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
    torch.testing.assert_close(class_contrastive_loss(images, torch.tensor([3, 3, 5])), torch.zeros(3))
    wrong = class_contrastive_loss(images, torch.tensor([3, 5, 3]))
    torch.testing.assert_close(wrong, torch.tensor([0.6 + 2, 0.6, 2.0]) / 3)


def test_images_and_classes_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="got 3 feature vectors and 2 classes"):
        class_contrastive_loss(torch.zeros(3, 2), torch.zeros(2))
