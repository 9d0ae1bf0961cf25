"""Training of the embedded `blocks` backbone on scenes rendered on the fly, and the proof of what its features tell."""

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
from diffcap.lit.shipped import HELD_OUT, RenderedScenes, rendered, warmed_cosine

if TYPE_CHECKING:
    from diffcap.datasets.blocks.geometry import Scenes

BLOCK = 8  # pixels of a block of the auxiliary dense prediction
DENSE = (COLORS + 1, SHAPES + 1, MATERIALS + 1, SIZES + 1)  # class 0 is the ground


@dataclass
class Targets:
    """What B pictures show.

    Attributes:
        probabilities: (B, 100, 4, 6) float, 0 or 1, or a share; the order of `blocks_backbone.GROUPS`.
        places: (B, 16, 4, 6) float, x then y of each color's object in the picture, -1...1.
        dense: (B, 4, 12, 16) int64, color, shape, material and size + 1 in the middle of every 8 x 8 pixels, 0 for ground.
        objects: (B, 4, 6) int64, how many objects have their middle in the cell.
    """

    probabilities: Tensor
    places: Tensor
    dense: Tensor
    objects: Tensor


def targets_of(attributes: dict[str, Tensor], slots: Tensor) -> Targets:
    """Targets from what the renderer knows.

    Args:
        attributes: "color", "shape", "material", "size", (B, N) int64 each.
        slots: (B, 96, 128) int64, the slot seen in every pixel, -1 for ground.
    """
    batch, slot_count = attributes["color"].shape
    masks = F.one_hot(slots + 1, slot_count + 1)[..., 1:].permute(0, 3, 1, 2).float()  # (B, N, 96, 128)
    pixels = masks.flatten(2).sum(2)  # (B, N)
    seen = pixels > 0
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
    picture, slot = seen.nonzero(as_tuple=True)
    cell = (row * COLUMNS + column)[picture, slot]
    groups = []
    for name, values in classes.items():
        group = torch.zeros(batch, GROUPS[name], ROWS * COLUMNS)
        group[picture, values[picture, slot], cell] = 1
        groups.append(group)
    padded = F.pad(masks, (MARGIN, MARGIN))
    share = F.avg_pool2d(padded, CELL).flatten(2)  # (B, N, 24)
    groups.append(torch.zeros(batch, COLORS, ROWS * COLUMNS).scatter_add_(1, color[..., None].expand_as(share), share))
    probabilities = torch.cat(groups, 1).view(batch, -1, ROWS, COLUMNS)

    # Where two objects of one color share a cell, the place is that of the larger one: it is written last.
    order = pixels[picture, slot].argsort(stable=True)
    places = torch.zeros(batch, 2, COLORS, ROWS * COLUMNS)
    for axis, values in enumerate((x / WIDTH * 2 - 1, y / HEIGHT * 2 - 1)):
        for p, s, c in zip(picture[order].tolist(), slot[order].tolist(), cell[order].tolist()):
            places[p, axis, color[p, s], c] = values[p, s]
    objects = torch.zeros(batch, ROWS * COLUMNS, dtype=torch.int64)
    objects.index_put_((picture, cell), torch.ones_like(cell), accumulate=True)

    middles = slots[:, BLOCK // 2 :: BLOCK, BLOCK // 2 :: BLOCK]  # (B, 12, 16)
    at = middles.clamp(min=0).flatten(1)
    dense = torch.stack(
        [(values.gather(1, at).view_as(middles) + 1) * (middles >= 0) for values in (color, shape, material, size)], 1
    )
    return Targets(probabilities, places.view(batch, -1, ROWS, COLUMNS), dense, objects.view(batch, ROWS, COLUMNS))


def attributes_of(scenes: Scenes) -> dict[str, Tensor]:
    """What `targets_of` reads: (B, N) each."""
    return {name: getattr(scenes, name) for name in ("color", "shape", "material", "size")}


def scene_batch(first: int, count: int, seed: int, jitter: float) -> tuple[Tensor, Targets]:
    """Render the before pictures of triples number `first` to `first + count`.

    Returns:
        (count, 3, 96, 128) preprocessed images, and what they show.
    """
    images, slots, scenes = rendered(range(first, first + count), seed, jitter)
    return blocks_preprocessing().normalize(images.float()), targets_of(attributes_of(scenes), slots)


class RenderedObjects(RenderedScenes):
    """Scenes of `blocks` and where their objects are; options as `RenderedScenes`."""

    make = staticmethod(scene_batch)


class BackboneTraining(pl.LightningModule):
    """The embedded backbone: presence of objects and their attributes in each cell, with a dense auxiliary task.

    Args:
        lr: AdamW's highest learning rate, after a tenth of the steps.
        steps: steps of training, for the schedule.
        dense_weight: weight of the auxiliary prediction for every 8 x 8 pixels.
    """

    def __init__(self, lr: float = 3e-3, steps: int = 2000, dense_weight: float = 0.3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.steps, self.dense_weight = lr, steps, dense_weight
        self.network = BlocksNetwork(norm=True)
        # The share of cells that hold an object at all is about a fifth; starting from there saves the first steps.
        assert self.network.head.bias is not None
        nn.init.constant_(self.network.head.bias[:PROBABILITIES], -3.5)
        self.dense_head = nn.Conv2d(64, sum(DENSE), 1)

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        """Loss of a batch: cross-entropy of all groups, places where an object is, and the dense task."""
        images, targets = batch
        blocks = self.network.blocks(images)
        logits, places = self.network.raw(blocks)
        presence = F.binary_cross_entropy_with_logits(logits, targets.probabilities, reduction="none").sum(1).mean()
        here = targets.probabilities[:, :COLORS].repeat(1, 2, 1, 1)
        place = (F.smooth_l1_loss(places, targets.places, beta=0.1, reduction="none") * here).sum() / here.sum().clamp(
            min=1
        )
        dense = dense_loss(self.dense_head(blocks), targets.dense)
        loss = presence + 2 * place + self.dense_weight * dense
        self.log_dict({"loss": loss, "presence": presence, "place": place, "dense": dense}, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, warmed up over a tenth of the steps, then down along a cosine."""
        return warmed_cosine(self.parameters(), self.lr, self.steps)


def dense_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of color, shape, material and size in the middle of every 8 x 8 pixels, added up.

    Args:
        logits: (B, sum of `DENSE`, 12, 16). classes: `Targets.dense`.
    """
    # Objects cover about a tenth of the blocks: they count ten times.
    losses = [
        F.cross_entropy(part, classes[:, task], part.new_tensor([0.1] + [1.0] * (part.shape[1] - 1)))
        for task, part in enumerate(logits.split(DENSE, dim=1))
    ]
    return torch.stack(losses).sum()


@torch.no_grad()
def standardise(network: BlocksNetwork, images: int, seed: int, jitter: float) -> None:
    """Set the scaling so that every channel has zero mean and unit variance over scenes and cells.

    Args:
        network: without batch norm; changed in place.
        images: how many scenes to measure on.
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
        pictures, shown = scene_batch(first + start, min(100, images - start), seed, jitter)
        features.append(network(pictures))
        targets.append(shown)
    columns = zip(*(vars(shown).values() for shown in targets))
    return torch.cat(features), Targets(*(torch.cat(list(column)) for column in columns))


@torch.no_grad()
def linear_probe(network: BlocksNetwork, images: int, seed: int, jitter: float) -> dict[str, float]:
    """What a linear map of one cell's channels tells, on held-out scenes: two thirds fit it, one third is scored.

    Args:
        network: without batch norm, standardised.
        images: how many scenes.
        seed, jitter: of the scenes.

    Returns:
        Shares of the cells with exactly one object where its color, shape, material, size, and all four are right; share
        of all cells where the number of objects (0, 1, more) is right; and the error of the object's place in the cell, in
        pixels.
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
    right = torch.ones(int(one_test.sum()), dtype=torch.bool)
    start = 0
    for name in ("color", "shape", "material", "size"):
        labels = truth[..., start : start + GROUPS[name]]
        start += GROUPS[name]
        guess = (cells[cut:][one_test] @ fit(cells[:cut][one], labels[:cut][one])).argmax(1)
        correct = guess == labels[cut:][one_test].argmax(1)
        right &= correct
        scores[name] = correct.double().mean().item()
    scores["all four"] = right.double().mean().item()
    count = F.one_hot(objects.clamp(max=2), 3)
    guess = (cells[cut:].flatten(0, 1) @ fit(cells[:cut].flatten(0, 1), count[:cut].flatten(0, 1))).argmax(1)
    scores["objects"] = (guess == count[cut:].flatten(0, 1).argmax(1)).double().mean().item()
    where = targets.places.flatten(2).transpose(1, 2).unflatten(2, (2, COLORS)).sum(3)  # (B, 24, 2)
    where = where - network.centers[::COLORS].flatten(1).T  # from the cell's middle
    miss = cells[cut:][one_test] @ fit(cells[:cut][one], where[:cut][one]) - where[cut:][one_test]
    scores["place error, pixels"] = (miss * torch.tensor([WIDTH / 2, HEIGHT / 2])).norm(dim=1).mean().item()
    return {name: round(value, 4) for name, value in scores.items()}


def finish(
    training: BackboneTraining, scenes: RenderedScenes, probe_images: int
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """See `shipped.train_and_ship`: weights in float16, the scaling in float32; scores are `linear_probe`'s."""
    network = training.network.fused()
    standardise(network, min(2000, probe_images), scenes.seed, scenes.jitter)
    scores = linear_probe(network, probe_images, scenes.seed, scenes.jitter)
    state = {name: value if name in ("mean", "scale") else value.half() for name, value in network.state_dict().items()}
    return state, scores
