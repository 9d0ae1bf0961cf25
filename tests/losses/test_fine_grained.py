"""Fine-grained losses against naive loops, and the contrast over two ranks."""

from pathlib import Path

import pytest
import torch
from tests.losses.fine_grained_worker import contrast, gradients
from tests.losses.ranks import on_two_ranks

from diffcap.losses.pcl import class_contrastive_loss


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


@pytest.mark.slow
def test_two_ranks_give_the_loss_and_the_gradients_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rows = torch.nn.Linear(6, 6), torch.randn(10, 6)
    classes = torch.tensor([0, 1, 0, 2, 2, 2, 1, 0, 0, 3])
    loss = contrast(model, rows, classes)
    wanted = gradients(model, loss)
    data = {"model": model.state_dict(), "rows": rows, "classes": classes, "cuts": {"even": 5, "uneven": 7}}
    ranks = on_two_ranks(Path(__file__).with_name("fine_grained_worker.py"), data, tmp_path)
    for case in data["cuts"]:
        torch.testing.assert_close(sum(part[case][0] for part in ranks) / 2, loss.detach())
        for part in ranks:
            torch.testing.assert_close(part[case][1], wanted, atol=1e-6, rtol=1e-5)
    assert wanted.abs().max() > 1e-3
