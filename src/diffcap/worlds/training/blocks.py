"""Training of the backbone and the CLIP that ship for `blocks`."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.features import blocks_backbone as backbone
from diffcap.features.blocks_backbone import CELL, COLORS, COLUMNS, HEIGHT, MATERIALS, ROWS, SHAPES, SIZES, WIDTH
from diffcap.features.weights import fuse_batch_norms
from diffcap.models.clip import networks_folder
from diffcap.worlds.blocks.captions import LEXICON, describe
from diffcap.worlds.blocks.geometry import Scenes
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import sample_triples
from diffcap.worlds.training.shipped import HELD_OUT, Batch, ClipTraining, ShippedTraining, backbone_state, standardise_

BLOCK = 8  # width and height in pixels of a block of the auxiliary dense prediction
DENSE = (COLORS + 1, SHAPES + 1, MATERIALS + 1, SIZES + 1)  # class 0 is the ground
MIN_PIXELS = 12  # visible pixels of an object that a sentence may mention


@dataclass
class Targets:
    """Training targets of B images. Images have 4 x 6 cells; an object belongs to the cell of its centre."""

    probabilities: Tensor  # (B, 100, 4, 6) in 0 ... 1; channels in the order of `blocks_backbone.GROUP_SIZES`
    positions: Tensor  # (B, 16, 4, 6) in -1 ... 1, x of the object of each color, then y, in image coordinates
    dense: Tensor  # (B, 4, 12, 16) int64: color, shape, material, size, + 1, at the centre of every 8 x 8 pixels; 0 for ground
    objects: Tensor  # (B, 4, 6) int64, number of objects in each cell


def make_targets(scenes: Scenes, slots: Tensor) -> Targets:
    """Return the targets of B scenes; `slots`, (B, 96, 128): the slot of the object visible in each pixel, -1 for ground."""
    batch, slot_count = scenes.color.shape
    masks = F.one_hot(slots + 1, slot_count + 1)[..., 1:].permute(0, 3, 1, 2).float()  # (B, N, 96, 128)
    pixels = masks.flatten(2).sum(2)  # (B, N)
    is_visible = pixels > 0
    x = (masks.sum(2) * (torch.arange(WIDTH) + 0.5)).sum(2) / pixels.clamp(min=1)  # (B, N), pixels
    y = (masks.sum(3) * (torch.arange(HEIGHT) + 0.5)).sum(2) / pixels.clamp(min=1)
    column, row = ((x + backbone.MARGIN) / CELL).long(), (y / CELL).long()

    ninth_row = ((y / CELL % 1) * 3).long()  # third of the cell's height in which the object's centre lies
    ninth_column = (((x + backbone.MARGIN) / CELL % 1) * 3).long()
    color, shape, material, size = scenes.color, scenes.shape, scenes.material, scenes.size
    classes = {
        "color": color,
        "shape": shape,
        "material": material,
        "size": size,
        "color_shape": color * SHAPES + shape,
        "color_material": color * MATERIALS + material,
        "color_size": color * SIZES + size,
        "solid": (shape * MATERIALS + material) * SIZES + size,
        "ninth": ninth_row * 3 + ninth_column,
    }
    image, slot = is_visible.nonzero(as_tuple=True)
    cell = (row * COLUMNS + column)[image, slot]
    groups = []
    for name, values in classes.items():
        group = torch.zeros(batch, backbone.GROUP_SIZES[name], ROWS * COLUMNS)
        group[image, values[image, slot], cell] = 1
        groups.append(group)
    padded = F.pad(masks, (backbone.MARGIN, backbone.MARGIN))
    area = F.avg_pool2d(padded, CELL).flatten(2)  # (B, N, 24), fraction of each cell that an object covers
    color_area = torch.zeros(batch, COLORS, ROWS * COLUMNS)
    groups.append(color_area.scatter_add_(1, color[..., None].expand_as(area), area))
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
    centre_classes = [values.gather(1, index).view_as(centres) + 1 for values in (color, shape, material, size)]
    dense = torch.stack(centre_classes, 1) * (centres >= 0)[:, None]
    return Targets(probabilities, positions.view(batch, -1, ROWS, COLUMNS), dense, objects.view(batch, ROWS, COLUMNS))


class BlocksBackbone(ShippedTraining):
    """The backbone predicts the objects in each cell and their attributes, with a dense auxiliary task.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps, for the schedule.
        dense_weight: weight of the auxiliary prediction for every 8 x 8 pixels.
    """

    path = backbone.SHIPPED_FILE

    def __init__(self, lr: float = 3e-3, steps: int = 2000, dense_weight: float = 0.3) -> None:
        super().__init__(lr, steps)
        self.dense_weight = dense_weight
        self.network = backbone.BlocksNetwork(norm=True)
        # Most targets are 0, because about a fifth of the cells have an object; this bias saves the first training steps.
        assert self.network.head.bias is not None
        nn.init.constant_(self.network.head.bias[: backbone.NUM_PROBABILITIES], -3.5)
        self.dense_head = nn.Conv2d(64, sum(DENSE), 1)

    @staticmethod
    def make(first: int, count: int, seed: int, jitter: float) -> tuple[Tensor, Targets]:
        """(count, 3, 96, 128) preprocessed before images, and their targets."""
        scenes = sample_triples(range(first, first + count), seed, jitter).before
        images, slots = render(scenes, (WIDTH, HEIGHT))
        return backbone.PREPROCESSING.normalize(images.float()), make_targets(scenes, slots)

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        """Sum of the cross-entropy of all attribute groups, the position error of objects, and the dense task."""
        images, targets = batch
        hidden = self.network.hidden_features(images)
        logits, positions = self.network.predict(hidden)
        presence = F.binary_cross_entropy_with_logits(logits, targets.probabilities, reduction="none").sum(1).mean()
        is_object = targets.probabilities[:, :COLORS].repeat(1, 2, 1, 1)
        errors = F.smooth_l1_loss(positions, targets.positions, beta=0.1, reduction="none") * is_object
        place = errors.sum() / is_object.sum().clamp(min=1)
        dense = dense_loss(self.dense_head(hidden), targets.dense)
        loss = presence + 2 * place + self.dense_weight * dense
        self.log_dict({"loss": loss, "presence": presence, "place": place, "dense": dense}, prog_bar=True)
        return loss

    def finish(self, images: int, seed: int, jitter: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Score: of the cells with one object, the share whose color, shape, material and size are all predicted right."""
        network = fuse_batch_norms(self.network)
        count = min(2000, images)
        scaled = self.held_out(count, seed, jitter, HELD_OUT - count)  # other scenes than those of the score
        predictions = (network.predict(network.hidden_features(batch)) for batch, _ in scaled)
        standardise_(network, [network.compute_channels(*prediction) for prediction in predictions])
        is_right, group_sizes = [], list(backbone.GROUP_SIZES.values())
        for batch, targets in self.held_out(images, seed, jitter):
            predicted, _ = network.predict(network.hidden_features(batch))
            groups = zip(predicted.split(group_sizes, 1), targets.probabilities.split(group_sizes, 1))
            right = torch.stack([logits.argmax(1) == truth.argmax(1) for logits, truth in groups])
            is_right.append(right[:4].all(0)[targets.objects == 1])
        return backbone_state(network), {"all four": round(torch.cat(is_right).double().mean().item(), 4)}


def dense_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Sum of the cross-entropies of color, shape, material and size; logits (B, sum of `DENSE`, 12, 16), classes `Targets.dense`."""
    # Objects cover about a tenth of the blocks, so ground has a tenth of their weight.
    losses = []
    for task_index, task_logits in enumerate(logits.split(DENSE, dim=1)):
        class_weights = task_logits.new_tensor([0.1] + [1.0] * (task_logits.shape[1] - 1))
        losses.append(F.cross_entropy(task_logits, classes[:, task_index], class_weights))
    return torch.stack(losses).sum()


class BlocksClip(ClipTraining):
    """`ClipTraining` on `blocks`. Dense task: color, shape, material and size for every 8 x 8 pixels."""

    network = "ViT-blocks-16"
    words_used = LEXICON
    dense_classes, dense_places = sum(DENSE), 2  # 8 x 8 pixels each
    path = networks_folder() / f"{network}.safetensors"

    @staticmethod
    def make(first: int, count: int, seed: int, jitter: float) -> Batch:
        """(count, 3, 96, 128) uint8 before images, one sentence for each, and `Targets.dense`."""
        scenes = sample_triples(range(first, first + count), seed, jitter).before
        images, slots = render(scenes, (WIDTH, HEIGHT))
        pixels = torch.stack([(slots == slot).flatten(1).sum(1) for slot in range(scenes.size.shape[1])], 1)
        sentences = describe(scenes, pixels >= MIN_PIXELS, range(first, first + count), seed)
        return images, sentences, make_targets(scenes, slots).dense

    def dense_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logits (B, sum of `DENSE`, 12, 16)."""
        return dense_loss(logits, targets)

    def dense_counts(self, logits: Tensor, targets: Tensor) -> tuple[int, int]:
        """Count the blocks of 8 x 8 pixels that show an object; a block is right if all four predictions are."""
        predicted = torch.stack([part.argmax(1) for part in logits.split(DENSE, 1)], 1)
        is_object = targets[:, 0] > 0
        return int((predicted == targets).all(1)[is_object].sum()), int(is_object.sum())
