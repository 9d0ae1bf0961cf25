"""Training of the shipped `blocks` backbone on rendered scenes, and a linear probe of its features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.features.blocks_backbone import (
    CELL,
    COLORS,
    COLUMNS,
    GROUPS,
    HEIGHT,
    MARGIN,
    MATERIALS,
    PROBABILITIES,
    ROWS,
    SHAPES,
    SIZES,
    WIDTH,
    BlocksNetwork,
    blocks_preprocessing,
)
from diffcap.features.convolutions import fuse_batch_norms
from diffcap.worlds.training.shipped import HELD_OUT, RenderedScenes, rendered, warmed_cosine

if TYPE_CHECKING:
    from diffcap.worlds.blocks.geometry import Scenes

BLOCK = 8  # pixels of a block of the auxiliary dense prediction
DENSE = (COLORS + 1, SHAPES + 1, MATERIALS + 1, SIZES + 1)  # class 0 is the ground


@dataclass
class Targets:
    """Training targets of B images. Images have 4 x 6 cells; an object belongs to the cell of its centre.

    Attributes:
        probabilities: (B, 100, 4, 6) float in 0 ... 1; channels in the order of `blocks_backbone.GROUPS`.
        positions: (B, 16, 4, 6) float in -1 ... 1, x of the object of each color, then y, in image coordinates.
        dense: (B, 4, 12, 16) int64: color, shape, material and size, + 1, at the centre of every 8 x 8 pixels; 0 for ground.
        objects: (B, 4, 6) int64, number of objects in each cell.
    """

    probabilities: Tensor
    positions: Tensor
    dense: Tensor
    objects: Tensor


def targets_of(attributes: dict[str, Tensor], slots: Tensor) -> Targets:
    """Training targets from the renderer's output.

    Args:
        attributes: "color", "shape", "material", "size", (B, N) int64 each, for N object slots.
        slots: (B, 96, 128) int64, the slot of the object visible in each pixel, -1 for ground.
    """
    batch, slot_count = attributes["color"].shape
    masks = F.one_hot(slots + 1, slot_count + 1)[..., 1:].permute(0, 3, 1, 2).float()  # (B, N, 96, 128)
    pixels = masks.flatten(2).sum(2)  # (B, N)
    is_visible = pixels > 0
    x = (masks.sum(2) * (torch.arange(WIDTH) + 0.5)).sum(2) / pixels.clamp(min=1)  # (B, N), pixels
    y = (masks.sum(3) * (torch.arange(HEIGHT) + 0.5)).sum(2) / pixels.clamp(min=1)
    column, row = ((x + MARGIN) / CELL).long(), (y / CELL).long()

    color, shape, material, size = (attributes[name] for name in ("color", "shape", "material", "size"))
    ninth = ((y / CELL % 1) * 3).long() * 3 + (((x + MARGIN) / CELL % 1) * 3).long()
    classes = {
        "color": color,
        "shape": shape,
        "material": material,
        "size": size,
        "color_shape": color * SHAPES + shape,
        "color_material": color * MATERIALS + material,
        "color_size": color * SIZES + size,
        "solid": (shape * MATERIALS + material) * SIZES + size,
        "ninth": ninth,
    }
    image, slot = is_visible.nonzero(as_tuple=True)
    cell = (row * COLUMNS + column)[image, slot]
    groups = []
    for name, values in classes.items():
        group = torch.zeros(batch, GROUPS[name], ROWS * COLUMNS)
        group[image, values[image, slot], cell] = 1
        groups.append(group)
    padded = F.pad(masks, (MARGIN, MARGIN))
    area = F.avg_pool2d(padded, CELL).flatten(2)  # (B, N, 24), fraction of each cell that an object covers
    groups.append(torch.zeros(batch, COLORS, ROWS * COLUMNS).scatter_add_(1, color[..., None].expand_as(area), area))
    probabilities = torch.cat(groups, 1).view(batch, -1, ROWS, COLUMNS)

    # If a cell has two objects of one color, the position is that of the larger one, which is written last.
    order = pixels[image, slot].argsort(stable=True)
    positions = torch.zeros(batch, 2, COLORS, ROWS * COLUMNS)
    for axis, values in enumerate((x / WIDTH * 2 - 1, y / HEIGHT * 2 - 1)):
        for i, s, c in zip(image[order].tolist(), slot[order].tolist(), cell[order].tolist()):
            positions[i, axis, color[i, s], c] = values[i, s]
    objects = torch.zeros(batch, ROWS * COLUMNS, dtype=torch.int64)
    objects.index_put_((image, cell), torch.ones_like(cell), accumulate=True)

    centres = slots[:, BLOCK // 2 :: BLOCK, BLOCK // 2 :: BLOCK]  # (B, 12, 16)
    index = centres.clamp(min=0).flatten(1)
    dense = torch.stack(
        [(values.gather(1, index).view_as(centres) + 1) * (centres >= 0) for values in (color, shape, material, size)],
        1,
    )
    return Targets(probabilities, positions.view(batch, -1, ROWS, COLUMNS), dense, objects.view(batch, ROWS, COLUMNS))


def attributes_of(scenes: Scenes) -> dict[str, Tensor]:
    """The attributes that `targets_of` needs, (B, N) each."""
    return {name: getattr(scenes, name) for name in ("color", "shape", "material", "size")}


def scene_batch(first: int, count: int, seed: int, jitter: float) -> tuple[Tensor, Targets]:
    """Render the before images of the triples `first` ... `first + count - 1`.

    Returns:
        (count, 3, 96, 128) preprocessed images, and their targets.
    """
    images, slots, scenes = rendered(range(first, first + count), seed, jitter)
    return blocks_preprocessing().normalize(images.float()), targets_of(attributes_of(scenes), slots)


class RenderedObjects(RenderedScenes):
    """Scenes of `blocks` with `Targets`; options as `RenderedScenes`."""

    make = staticmethod(scene_batch)


class BackboneTraining(pl.LightningModule):
    """The shipped backbone: predicts the objects in each cell and their attributes, with a dense auxiliary task.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps, for the schedule.
        dense_weight: weight of the auxiliary prediction for every 8 x 8 pixels.
    """

    def __init__(self, lr: float = 3e-3, steps: int = 2000, dense_weight: float = 0.3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.steps, self.dense_weight = lr, steps, dense_weight
        self.network = BlocksNetwork(norm=True)
        # Most targets are 0, because about a fifth of the cells have an object; this bias saves the first training steps.
        assert self.network.head.bias is not None
        nn.init.constant_(self.network.head.bias[:PROBABILITIES], -3.5)
        self.dense_head = nn.Conv2d(64, sum(DENSE), 1)

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        """Sum of the cross-entropy of all attribute groups, the position error of objects, and the dense task."""
        images, targets = batch
        blocks = self.network.blocks(images)
        logits, positions = self.network.raw(blocks)
        presence = F.binary_cross_entropy_with_logits(logits, targets.probabilities, reduction="none").sum(1).mean()
        is_object = targets.probabilities[:, :COLORS].repeat(1, 2, 1, 1)
        errors = F.smooth_l1_loss(positions, targets.positions, beta=0.1, reduction="none") * is_object
        place = errors.sum() / is_object.sum().clamp(min=1)
        dense = dense_loss(self.dense_head(blocks), targets.dense)
        loss = presence + 2 * place + self.dense_weight * dense
        self.log_dict({"loss": loss, "presence": presence, "place": place, "dense": dense}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW with warm-up and cosine schedule."""
        return warmed_cosine(self.parameters(), self.lr, self.steps)


def dense_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Sum of the cross-entropies of color, shape, material and size at the centre of every 8 x 8 pixels.

    Args:
        logits: (B, sum of `DENSE`, 12, 16). classes: `Targets.dense`.
    """
    # Objects cover about a tenth of the blocks, so ground has a tenth of their weight.
    losses = [
        F.cross_entropy(part, classes[:, task], part.new_tensor([0.1] + [1.0] * (part.shape[1] - 1)))
        for task, part in enumerate(logits.split(DENSE, dim=1))
    ]
    return torch.stack(losses).sum()


@torch.no_grad()
def standardise_(network: BlocksNetwork, images: int, seed: int, jitter: float) -> None:
    """Set the network's output scaling so that every channel has zero mean and unit variance over scenes and cells.

    Args:
        network: without batch norm; changed in place.
        images: number of scenes for the statistics.
        seed, jitter: of the scenes, held out from training.
    """
    network.mean.zero_()
    network.scale.fill_(1)
    features, _ = _features(network, HELD_OUT - images, images, seed, jitter)
    values = features.transpose(0, 1).flatten(1).double()
    network.mean.copy_(values.mean(1))
    network.scale.copy_(values.std(1).clamp(min=1e-3))


@torch.no_grad()
def _features(network: BlocksNetwork, first: int, images: int, seed: int, jitter: float) -> tuple[Tensor, Targets]:
    features, targets = [], []
    for start in range(0, images, 100):
        batch, batch_targets = scene_batch(first + start, min(100, images - start), seed, jitter)
        features.append(network(batch))
        targets.append(batch_targets)
    columns = zip(*(vars(batch_targets).values() for batch_targets in targets))
    return torch.cat(features), Targets(*(torch.cat(list(column)) for column in columns))


@torch.no_grad()
def linear_probe(network: BlocksNetwork, images: int, seed: int, jitter: float) -> dict[str, float]:
    """Accuracy of linear models of one cell's channels on held-out scenes; two thirds are for fitting, one third for testing.

    Args:
        network: without batch norm, standardised.
        images: number of scenes.
        seed, jitter: of the scenes.

    Returns:
        Accuracies of color, shape, material, size, and of all four together, in cells with exactly one object; the accuracy of
        the number of objects (0, 1, more) in all cells; and the mean error of the object's position, in pixels.
    """
    features, targets = _features(network, HELD_OUT, images, seed, jitter)
    cells = features.flatten(2).transpose(1, 2).half().double()  # (B, 24, C), as the store rounds them
    cells = torch.cat([cells, torch.ones(*cells.shape[:2], 1, dtype=torch.float64)], 2)
    truth = targets.probabilities.flatten(2).transpose(1, 2)  # (B, 24, 100)
    objects = targets.objects.flatten(1)
    cut = images * 2 // 3
    one, one_test = objects[:cut] == 1, objects[cut:] == 1

    def fit(inputs: Tensor, outputs: Tensor) -> Tensor:
        gram = inputs.T @ inputs + 1e-3 * len(inputs) * torch.eye(inputs.shape[1], dtype=torch.float64)
        return torch.linalg.solve(gram, inputs.T @ outputs.double())

    scores: dict[str, float] = {}
    all_correct = torch.ones(int(one_test.sum()), dtype=torch.bool)
    start = 0
    for name in ("color", "shape", "material", "size"):
        labels = truth[..., start : start + GROUPS[name]]
        start += GROUPS[name]
        predicted = (cells[cut:][one_test] @ fit(cells[:cut][one], labels[:cut][one])).argmax(1)
        correct = predicted == labels[cut:][one_test].argmax(1)
        all_correct &= correct
        scores[name] = correct.double().mean().item()
    scores["all four"] = all_correct.double().mean().item()
    count = F.one_hot(objects.clamp(max=2), 3)
    guess = (cells[cut:].flatten(0, 1) @ fit(cells[:cut].flatten(0, 1), count[:cut].flatten(0, 1))).argmax(1)
    scores["objects"] = (guess == count[cut:].flatten(0, 1).argmax(1)).double().mean().item()
    where = targets.positions.flatten(2).transpose(1, 2).unflatten(2, (2, COLORS)).sum(3)  # (B, 24, 2)
    where = where - network.centers[::COLORS].flatten(1).T  # from the cell's middle
    miss = cells[cut:][one_test] @ fit(cells[:cut][one], where[:cut][one]) - where[cut:][one_test]
    scores["place error, pixels"] = (miss * torch.tensor([WIDTH / 2, HEIGHT / 2])).norm(dim=1).mean().item()
    return {name: round(value, 4) for name, value in scores.items()}


def finish(
    training: BackboneTraining, scenes: RenderedScenes, probe_images: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """See `shipped.train_and_ship`: weights in float16, the scaling in float32; scores are `linear_probe`'s."""
    network = fuse_batch_norms(training.network)
    standardise_(network, min(2000, probe_images), scenes.seed, scenes.jitter)
    scores = linear_probe(network, probe_images, scenes.seed, scenes.jitter)
    state = {name: value if name in ("mean", "scale") else value.half() for name, value in network.state_dict().items()}
    return state, scores
