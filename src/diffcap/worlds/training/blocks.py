"""Training of the two networks for the rendered dataset `blocks`: a backbone that predicts objects, and a small CLIP."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.features import blocks_backbone as backbone
from diffcap.features.blocks_backbone import CELL, COLORS, COLUMNS, HEIGHT, MATERIALS, ROWS, SHAPES, SIZES, WIDTH
from diffcap.features.weights import fuse_batch_norms
from diffcap.models.clip import NETWORKS_FOLDER
from diffcap.worlds.blocks.captions import LEXICON, describe
from diffcap.worlds.blocks.geometry import Scenes
from diffcap.worlds.blocks.render import render
from diffcap.worlds.blocks.scenes import sample_triples
from diffcap.worlds.training import shipped
from diffcap.worlds.training.shipped import ClipBatch, ClipTraining, ShippedTraining

BLOCK_SIZE = 8  # pixels on each side of a block, an area of an image; the auxiliary "dense" task classifies the centre of each block
DENSE_CLASSES = (COLORS + 1, SHAPES + 1, MATERIALS + 1, SIZES + 1)  # numbers of classes; class 0 is the ground


@dataclass
class Targets:
    """Training targets of B images. An image has 4 x 6 cells; an object belongs to the cell that contains its centre."""

    # (B, 100, 4, 6) in 0 ... 1; the channels are groups of classes, such as colors, in the order of `blocks_backbone.GROUP_SIZES`.
    probabilities: Tensor
    positions: Tensor  # (B, 16, 4, 6) image coordinates in -1 ... 1: x of the object of each of 8 colors, then y
    dense: Tensor  # (B, 4, 12, 16) int64: classes of color, shape, material and size at the centre of each block; 0: ground
    num_objects: Tensor  # (B, 4, 6) int64, number of objects in each cell


def make_targets(scenes: Scenes, slot_map: Tensor) -> Targets:
    """Return the targets of B scenes. `slot_map` (B, 96, 128) has the index of each pixel's object in `scenes`, or -1 for ground."""
    batch, slot_count = scenes.color.shape
    object_masks = F.one_hot(slot_map + 1, slot_count + 1)[..., 1:].permute(0, 3, 1, 2).float()  # (B, N, 96, 128)
    num_pixels = object_masks.flatten(2).sum(2)  # (B, N)
    is_visible = num_pixels > 0
    center_x = (object_masks.sum(2) * (torch.arange(WIDTH) + 0.5)).sum(2) / num_pixels.clamp(1)  # (B, N), pixels
    center_y = (object_masks.sum(3) * (torch.arange(HEIGHT) + 0.5)).sum(2) / num_pixels.clamp(1)
    column, row = ((center_x + backbone.MARGIN) / CELL).long(), (center_y / CELL).long()  # the grid has a left margin
    ninth_row = ((center_y / CELL % 1) * 3).long()  # third of the cell's height, 0 to 2, with the object's centre
    ninth_column = (((center_x + backbone.MARGIN) / CELL % 1) * 3).long()
    color, shape, material, size = scenes.color, scenes.shape, scenes.material, scenes.size
    classes_of_group = {
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
    image_index, slot_index = is_visible.nonzero(as_tuple=True)
    cell = (row * COLUMNS + column)[image_index, slot_index]
    probability_groups = []
    for name, values in classes_of_group.items():
        group = torch.zeros(batch, backbone.GROUP_SIZES[name], ROWS * COLUMNS)
        group[image_index, values[image_index, slot_index], cell] = 1
        probability_groups.append(group)
    padded_masks = F.pad(object_masks, (backbone.MARGIN, backbone.MARGIN))
    area = F.avg_pool2d(padded_masks, CELL).flatten(2)  # (B, N, 24), fraction of each cell that an object covers
    color_area = torch.zeros(batch, COLORS, ROWS * COLUMNS)
    probability_groups.append(color_area.scatter_add_(1, color[..., None].expand_as(area), area))
    probabilities = torch.cat(probability_groups, 1)
    # If a cell has two objects of one color, the position is that of the larger one, which is written last.
    order = num_pixels[image_index, slot_index].argsort(stable=True)
    positions = torch.zeros(batch, 2, COLORS, ROWS * COLUMNS)
    for axis, values in enumerate((center_x / WIDTH * 2 - 1, center_y / HEIGHT * 2 - 1)):
        for image, slot, index in torch.stack([image_index, slot_index, cell], 1)[order].tolist():
            positions[image, axis, color[image, slot], index] = values[image, slot]
    num_objects = torch.bincount(image_index * ROWS * COLUMNS + cell, minlength=batch * ROWS * COLUMNS)
    block_slots = slot_map[:, BLOCK_SIZE // 2 :: BLOCK_SIZE, BLOCK_SIZE // 2 :: BLOCK_SIZE]  # (B, 12, 16)
    slot_indices = block_slots.clamp(0).flatten(1)
    attributes = (color, shape, material, size)
    block_classes = [values.gather(1, slot_indices).view_as(block_slots) + 1 for values in attributes]
    dense = torch.stack(block_classes, 1) * (block_slots >= 0)[:, None]
    grid = (batch, -1, ROWS, COLUMNS)
    return Targets(probabilities.view(grid), positions.view(grid), dense, num_objects.view(batch, ROWS, COLUMNS))


class BlocksBackbone(ShippedTraining):
    """Training of the backbone, which predicts the objects in each cell and their attributes.

    Args:
        lr: AdamW's highest learning rate, reached after a tenth of the steps.
        steps: number of training steps; the learning rate depends on it.
        dense_weight: weight of the dense task, which predicts the attributes in each block.
    """

    weights_file = backbone.SHIPPED_FILE

    def __init__(self, lr: float = 3e-3, steps: int = 2000, dense_weight: float = 0.3) -> None:
        super().__init__(lr, steps)
        self.dense_weight = dense_weight
        self.network = backbone.BlocksNetwork(norm=True)
        # Only a fifth of the cells have an object, so most targets are 0. With this bias, the first predictions are near 0, too.
        assert self.network.head.bias is not None
        nn.init.constant_(self.network.head.bias[: backbone.NUM_PROBABILITIES], -3.5)
        self.dense_head = nn.Conv2d(64, sum(DENSE_CLASSES), 1)

    @staticmethod
    def render_batch(first_scene: int, num_scenes: int, seed: int, jitter: float) -> tuple[Tensor, Targets]:
        """Return (num_scenes, 3, 96, 128) preprocessed before images, and their targets. `jitter`: see `RenderedScenes`."""
        scenes = sample_triples(range(first_scene, first_scene + num_scenes), seed, jitter).before
        images, slot_map = render(scenes, (WIDTH, HEIGHT))
        return backbone.PREPROCESSING.normalize(images.float()), make_targets(scenes, slot_map)

    def training_step(self, batch: tuple[Tensor, Targets], batch_idx: int) -> Tensor:
        """Return the sum of the losses of the probabilities, of the positions of objects, and of the dense task."""
        images, targets = batch
        feature_map = self.network.hidden_features(images)
        logits, positions = self.network.predict(feature_map)
        presence = F.binary_cross_entropy_with_logits(logits, targets.probabilities, reduction="none").sum(1).mean()
        is_object = targets.probabilities[:, :COLORS].repeat(1, 2, 1, 1)
        errors = F.smooth_l1_loss(positions, targets.positions, beta=0.1, reduction="none") * is_object
        position = errors.sum() / is_object.sum().clamp(1)
        dense = dense_loss(self.dense_head(feature_map), targets.dense)
        loss = presence + 2 * position + self.dense_weight * dense
        self.log_dict({"loss": loss, "presence": presence, "place": position, "dense": dense}, prog_bar=True)
        return loss

    def finish(self, num_scenes: int, seed: int, jitter: float) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the weights and one score: of the cells with one object, the fraction whose four predicted attributes are all right."""
        network = fuse_batch_norms(self.network)
        num_scaled = min(2000, num_scenes)
        # The scaling of the features is computed on the last scenes before `HELD_OUT`, and the score on scenes from `HELD_OUT` on.
        batches = self.held_out_batches(num_scaled, seed, jitter, shipped.HELD_OUT - num_scaled)
        predictions = (network.predict(network.hidden_features(images)) for images, _ in batches)
        shipped.set_scaling_(network, [network.compute_channels(*prediction) for prediction in predictions])
        is_right_parts, group_sizes = [], list(backbone.GROUP_SIZES.values())
        for images, targets in self.held_out_batches(num_scenes, seed, jitter):
            predicted, _ = network.predict(network.hidden_features(images))
            groups = zip(predicted.split(group_sizes, 1), targets.probabilities.split(group_sizes, 1))
            is_right = torch.stack([logits.argmax(1) == truth.argmax(1) for logits, truth in groups])
            is_right_parts.append(is_right[:4].all(0)[targets.num_objects == 1])
        return shipped.backbone_state(network), {"all four": round(torch.cat(is_right_parts).double().mean().item(), 4)}


def dense_loss(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the loss of the dense task; logits (B, sum of `DENSE_CLASSES`, 12, 16), classes as in `Targets.dense`."""
    # Objects cover about a tenth of the blocks, so the class of the ground has a tenth of the weight.
    losses = []
    for task_index, task_logits in enumerate(logits.split(DENSE_CLASSES, dim=1)):
        class_weights = task_logits.new_tensor([0.1] + [1.0] * (task_logits.shape[1] - 1))
        losses.append(F.cross_entropy(task_logits, classes[:, task_index], class_weights))
    return torch.stack(losses).sum()


class BlocksClip(ClipTraining):
    """`ClipTraining` on `blocks`. The dense task predicts the color, shape, material and size in each block."""

    clip_name = "ViT-blocks-16"
    sentence_words = LEXICON
    num_dense_logits, cells_per_side = sum(DENSE_CLASSES), 2  # 2 x 2 blocks of 8 x 8 pixels in each patch of 16 x 16
    weights_file = NETWORKS_FOLDER / f"{clip_name}.safetensors"

    @staticmethod
    def render_batch(first_scene: int, num_scenes: int, seed: int, jitter: float) -> ClipBatch:
        """Return (num_scenes, 3, 96, 128) uint8 before images, one sentence for each, and `Targets.dense`."""
        indices = range(first_scene, first_scene + num_scenes)
        scenes = sample_triples(indices, seed, jitter).before
        images, slot_map = render(scenes, (WIDTH, HEIGHT))
        num_pixels = F.one_hot(slot_map + 1, scenes.size.shape[1] + 1)[..., 1:].sum((1, 2))
        sentences = describe(scenes, num_pixels >= 12, indices, seed)  # only objects that are visible enough
        return images, sentences, make_targets(scenes, slot_map).dense

    def dense_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the dense task from logits (B, sum of `DENSE_CLASSES`, 12, 16)."""
        return dense_loss(logits, targets)

    def count_dense_hits(self, logits: Tensor, targets: Tensor) -> tuple[int, int]:
        """Return how many blocks with an object have four right predictions, and how many blocks have an object."""
        predicted = torch.stack([task_logits.argmax(1) for task_logits in logits.split(DENSE_CLASSES, 1)], 1)
        is_object = targets[:, 0] > 0
        return int((predicted == targets).all(1)[is_object].sum()), int(is_object.sum())
