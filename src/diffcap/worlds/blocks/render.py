"""Render batches of `blocks` scenes by ray casting.

One ray is cast through the centre of each pixel. A pixel at the edge of a face is rendered again with four rays, through its subpixels.
Solids, and the shadows that the key light (the warm light of a scene) casts, are only computed in their bounding rectangles.

In this module, a "pair" is an image and one of its objects, a "slot" is the index of an object in its scene, a "sample" is a pixel or a
subpixel, and the origin of "local" coordinates is the centre of an object. Letters in shapes: B images, H rows, W columns, P pairs, n rays.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from diffcap.worlds.blocks import solids
from diffcap.worlds.blocks.geometry import CUBE, MATERIALS, Scenes, camera_axes, to_camera, view_boxes, view_tangents
from diffcap.worlds.blocks.solids import OBJECT_COLORS, key_visibility

SUBPIXEL_OFFSETS = ((-0.125, -0.375), (0.375, -0.125), (0.125, 0.375), (-0.375, 0.125))  # x, y from a pixel's centre


def render(scenes: Scenes, image_size: tuple[int, int] = (128, 96)) -> tuple[Tensor, Tensor]:
    """Render B scenes at a size (width, height).

    Returns:
        Images (B, 3, H, W) uint8, and slots (B, H, W) int64 of the objects at the centres of the pixels, -1 for the ground.
    """
    width, height = image_size
    batch = _prepare_batch(scenes, image_size)
    num_pixels = len(scenes) * height * width
    center_hits = _find_hits(batch, _make_rays(batch), num_pixels)
    face_ids = torch.full((num_pixels,), -1, dtype=torch.int32)
    face_ids[center_hits.sample] = center_hits.pair.int() * 4 + center_hits.face_index
    face_ids = face_ids.view(-1, height, width)
    # A pixel is at an edge if a horizontal or vertical neighbour shows another face.
    is_edge = torch.zeros_like(face_ids, dtype=torch.bool)
    for axis in (1, 2):
        differs = face_ids.diff(dim=axis) != 0
        for start in (0, 1):
            is_edge.narrow(axis, start, differs.shape[axis]).logical_or_(differs)
    is_edge = is_edge.flatten()
    colors = torch.stack([channel.flatten() for channel in _ground_colors(batch)])  # (3, pixels)
    is_inner = (~_take(is_edge, center_hits.sample)).nonzero().flatten()
    inner_hits = _Hits(*(_take(value, is_inner) for value in vars(center_hits).values()))
    colors[:, inner_hits.sample] = _hit_colors(batch, inner_hits)
    edge_rays = _make_rays(batch, is_edge)
    if len(edge_rays.pair):
        edge_pixels, subpixel_rays = _split_edge_rays(batch, edge_rays, is_edge)
        subpixel_colors = _take(colors, edge_pixels).repeat_interleave(len(SUBPIXEL_OFFSETS), 1)
        subpixel_hits = _find_hits(batch, subpixel_rays, subpixel_colors.shape[1])
        subpixel_colors[:, subpixel_hits.sample] = _hit_colors(batch, subpixel_hits)
        a, b, c, d = subpixel_colors.view(3, -1, len(SUBPIXEL_OFFSETS)).unbind(2)
        colors[:, edge_pixels] = 0.25 * (a + b + c + d)
    pixel_values = (colors.clamp(0, 1) * 255 + 0.5).to(torch.uint8)
    images = pixel_values.view(3, -1, height, width).transpose(0, 1).contiguous()
    slot_map = torch.full((num_pixels,), -1)
    slot_map[center_hits.sample] = _take(batch.slot, center_hits.pair)
    return images, slot_map.view(-1, height, width)


def _take(values: Tensor, positions: Tensor) -> Tensor:
    """Return `values[..., positions]`, ten times faster on a CPU than with this indexing."""
    return values.index_select(-1, positions)


@dataclass
class _RayBatch:
    """B scenes, and the P pairs of image and object, sorted by shape: cubes, spheres, cylinders."""

    scenes: Scenes
    image_size: tuple[int, int]
    axes: tuple[Tensor, Tensor, Tensor]  # forward, right, up, (B, 3) each
    image: Tensor  # (P,) index of the image
    slot: Tensor  # (P,) slot of the object
    shape_starts: list[int]  # indices of the first cube, the first sphere and the first cylinder, and P
    properties: Tensor  # (6, P): x, y, radius, half of the height, cosine and sine of the yaw (1 and 0 if round)
    local_camera: Tensor  # (12, P): position of the camera and its axes forward, right and up, in local coordinates

    def ranges_by_shape(self, pair: Tensor) -> list[tuple[int, int, int]]:
        """Return (shape, start, end) for each shape. Of n rays with sorted pairs (n,), rays `start` to `end` - 1 are for this shape."""
        bounds = torch.searchsorted(pair, torch.tensor(self.shape_starts)).tolist()
        return list(zip(range(3), bounds, bounds[1:]))


@dataclass
class _Rays:
    """n rays, each of which may hit the object of its pair. They are sorted by pair."""

    pair: Tensor  # (n,)
    sample: Tensor  # (n,) index of the ray's pixel or subpixel
    tangent_x: Tensor  # (n,) tangent of the horizontal angle, positive to the right
    tangent_y: Tensor  # (n,) tangent of the vertical angle, positive upwards


@dataclass
class _Hits:
    """n rays that hit the object of their pair before any other object. They are sorted by pair."""

    pair: Tensor
    sample: Tensor
    face_index: Tensor  # (n,) index of the face that the ray hits, from `solids.surface`
    local_point: Tensor  # (3, n) where the ray hits
    local_normal: Tensor  # (3, n)
    local_ray: Tensor  # (3, n) direction, not a unit vector


def _prepare_batch(scenes: Scenes, image_size: tuple[int, int]) -> _RayBatch:
    image, slot = scenes.valid.nonzero(as_tuple=True)
    shape = scenes.shape[image, slot]
    pair_order = shape.argsort(stable=True)
    image, slot, shape = image[pair_order], slot[pair_order], shape[pair_order]
    axes = camera_axes(scenes)
    x, y = scenes.position[image, slot].unbind(-1)
    radius, half_height, yaw = (values[image, slot] for values in (scenes.radius, scenes.half_height, scenes.yaw))
    is_cube = shape == CUBE
    cosine, sine = torch.where(is_cube, yaw.cos(), 1.0), torch.where(is_cube, yaw.sin(), 0.0)
    local_camera = []
    for vector_index, vectors in enumerate((scenes.eye, *axes)):
        x_part, y_part, z_part = vectors[image].unbind(-1)
        if vector_index == 0:
            x_part, y_part, z_part = x_part - x, y_part - y, z_part - half_height
        local_camera += [*_rotate(x_part, y_part, cosine, sine), z_part]
    shape_starts = [0, *torch.bincount(shape, minlength=3).cumsum(0).tolist()]
    properties = torch.stack([x, y, radius, half_height, cosine, sine])
    return _RayBatch(scenes, image_size, axes, image, slot, shape_starts, properties, torch.stack(local_camera))


def _make_rays(batch: _RayBatch, is_wanted: Tensor | None = None) -> _Rays:
    """Return rays through the centres of the pixels in the objects' boxes. `is_wanted` (pixels,) is False for pixels without rays."""
    pair, column, row, sample = _pixels_of_boxes(batch, view_boxes(batch.scenes)[batch.image, batch.slot])
    if is_wanted is not None:
        wanted = _take(is_wanted, sample).nonzero().flatten()
        pair, column, row, sample = (_take(values, wanted) for values in (pair, column, row, sample))
    tangent_x, tangent_y = _pixel_tangents(batch.image_size, column.float() + 0.5, row.float() + 0.5)
    return _Rays(pair, sample, tangent_x, tangent_y)


def _pixel_tangents(image_size: tuple[int, int], column: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    max_x, max_y = view_tangents(image_size)
    return (column * (2 / image_size[0]) - 1) * max_x, (1 - row * (2 / image_size[1])) * max_y


def _pixels_of_boxes(batch: _RayBatch, boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return pair, column, row and sample, (n,) each, of all pixels in the pairs' boxes (P, 4); boxes are as in `view_boxes`."""
    (width, height), (max_x, max_y) = batch.image_size, view_tangents(batch.image_size)
    left, bottom, right, top = boxes.unbind(-1)
    left, right = (left / max_x + 1) * (width / 2), (right / max_x + 1) * (width / 2)
    top, bottom = (1 - top / max_y) * (height / 2), (1 - bottom / max_y) * (height / 2)
    left, top = left.floor().clamp(0, width), top.floor().clamp(0, height)
    right, bottom = right.ceil().clamp(0, width), bottom.ceil().clamp(0, height)
    box_width, box_height = (right - left).clamp(0), (bottom - top).clamp(0)
    pair, offset = _repeat_indices((box_width * box_height).long())
    row_width = _take(box_width, pair)
    position = offset.float()
    row = ((position + 0.5) / row_width).floor()  # exact: areas are far below 2 ** 24
    column, row = (position - row * row_width + _take(left, pair)).long(), (row + _take(top, pair)).long()
    return pair, column, row, (_take(batch.image, pair) * height + row) * width + column


def _repeat_indices(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return every index i, repeated `counts[i]` times, and the number of each repetition: 0, 1, ... `counts[i] - 1`."""
    indices = torch.arange(len(counts)).repeat_interleave(counts)
    return indices, torch.arange(len(indices)) - _take(counts.cumsum(0) - counts, indices)


def _split_edge_rays(batch: _RayBatch, rays: _Rays, is_edge: Tensor) -> tuple[Tensor, _Rays]:
    """Replace each ray by four. Return the indices of the edge pixels, and the rays, whose sample 4 i + k is subpixel k of edge pixel i."""
    edge_pixels = is_edge.nonzero().flatten()
    edge_rank = torch.empty_like(is_edge, dtype=torch.int64)
    edge_rank[edge_pixels] = torch.arange(len(edge_pixels))
    num_subpixels = len(SUBPIXEL_OFFSETS)
    offsets = torch.tensor(SUBPIXEL_OFFSETS)
    max_x, max_y = view_tangents(batch.image_size)
    tangent_x = rays.tangent_x[:, None] + offsets[:, 0] * (2 * max_x / batch.image_size[0])
    tangent_y = rays.tangent_y[:, None] - offsets[:, 1] * (2 * max_y / batch.image_size[1])
    sample = _take(edge_rank, rays.sample)[:, None] * num_subpixels + torch.arange(num_subpixels)
    pair = rays.pair.repeat_interleave(num_subpixels)
    return edge_pixels, _Rays(pair, sample.flatten(), tangent_x.flatten(), tangent_y.flatten())


def _find_hits(batch: _RayBatch, rays: _Rays, num_samples: int) -> _Hits:
    """Intersect each ray with the object of its pair. Return the nearest hit of each sample."""
    nearest = torch.full((num_samples,), torch.inf)
    ranges, rays_by_shape, depths_by_shape = batch.ranges_by_shape(rays.pair), [], []
    for shape, start, end in ranges:
        pair, u, v = rays.pair[start:end], rays.tangent_x[start:end], rays.tangent_y[start:end]
        properties, local_camera = _take(batch.properties[2:4], pair), _take(batch.local_camera, pair)
        ray = [forward + u * right + v * up for forward, right, up in zip(*local_camera[3:].split(3))]
        depth = solids.intersect(shape, local_camera[:3], ray, *properties)
        nearest.scatter_reduce_(0, rays.sample[start:end], depth, "amin")
        rays_by_shape.append(ray)
        depths_by_shape.append(depth)
    hits_by_shape = []
    for (shape, start, end), ray, depth in zip(ranges, rays_by_shape, depths_by_shape):
        sample = rays.sample[start:end]
        visible = ((depth == _take(nearest, sample)) & (depth < torch.inf)).nonzero().flatten()
        pair, depth = _take(rays.pair[start:end], visible), _take(depth, visible)
        local_camera, properties = _take(batch.local_camera[:3], pair), _take(batch.properties[2:4], pair)
        hit_ray = torch.stack([_take(axis, visible) for axis in ray])
        point = local_camera + depth * hit_ray
        normal, face = solids.surface(shape, point, *properties)
        hits_by_shape.append(_Hits(pair, _take(sample, visible), face, point, torch.stack(tuple(normal)), hit_ray))
    return _Hits(*(torch.cat(values, -1) for values in zip(*(vars(part).values() for part in hits_by_shape))))


def _ground_colors(batch: _RayBatch) -> list[Tensor]:
    """Return red, green and blue of the ground at every pixel, with shadows but without objects, (B, H, W) each."""
    scenes, (width, height) = batch.scenes, batch.image_size
    column, row = torch.arange(width) + 0.5, torch.arange(height) + 0.5
    tangent_x, tangent_y = _pixel_tangents(batch.image_size, column, row)
    forward, right, up = batch.axes
    # `right` is horizontal, so all rays of a pixel row hit the ground at the same depth.
    descent = (-(forward[:, 2, None] + tangent_y * up[:, 2, None])).clamp(0.02)  # loss of height per unit of depth
    depth = scenes.eye[:, 2, None] / descent  # (B, H)
    x, y = (
        (scenes.eye[:, axis, None] + depth * (forward[:, axis, None] + tangent_y * up[:, axis, None]))[..., None]
        + (depth * right[:, axis, None])[..., None] * tangent_x
        for axis in range(2)
    )  # (B, H, W)
    key_light, occlusion = torch.ones_like(x).flatten(), torch.zeros_like(x).flatten()
    pair, _, _, sample = _pixels_of_boxes(batch, _shadow_boxes(batch))
    for shape, start, end in batch.ranges_by_shape(pair):
        shape_pair, shape_sample = pair[start:end], sample[start:end]
        center_x, center_y, radius, half_height, cosine, sine = _take(batch.properties, shape_pair)
        dx = _take(x.flatten(), shape_sample) - center_x
        dy = _take(y.flatten(), shape_sample) - center_y
        local_x, local_y = _rotate(dx, dy, cosine, sine)
        point = (local_x, local_y, torch.zeros_like(local_x))
        visibility = key_visibility(shape, point, _local_light(batch, shape_pair), radius, half_height)
        key_light.scatter_reduce_(0, shape_sample, visibility, "amin")
        shape_occlusion = solids.sky_occlusion(shape, local_x, local_y, radius, half_height)
        occlusion.scatter_reduce_(0, shape_sample, shape_occlusion, "amax")
    key_light, sky = key_light.view_as(x), 1 - occlusion.view_as(x)
    return solids.shade_ground(x, y, scenes.light_centers, scenes.intensity, key_light, sky)


def _rotate(x: Tensor, y: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    return x * cosine + y * sine, y * cosine - x * sine


def _local_light(batch: _RayBatch, pair: Tensor) -> Tensor:
    """Return unit vectors to the key light in the coordinate system of each pair's object."""
    x, y, z = batch.scenes.light[batch.image].unbind(-1)
    x, y = _rotate(x, y, batch.properties[4], batch.properties[5])
    return _take(torch.stack([x, y, z]), pair)


def _shadow_boxes(batch: _RayBatch) -> Tensor:
    """Return bounding boxes (P, 4), as in `view_boxes`, of the ground on which an object casts a shadow or hides a part of the sky."""
    x, y, radius, half_height, *_ = batch.properties
    light = batch.scenes.light[batch.image]
    shadow_length = 2 * half_height / light[:, 2]
    foot_radius, tip_radius = radius + half_height, radius + 0.2 + 0.16 * shadow_length
    tip_x, tip_y = x - shadow_length * light[:, 0], y - shadow_length * light[:, 1]
    corners = [
        torch.stack([center_x + sign_x * extent, center_y + sign_y * extent, 0 * x], -1)
        for extent, center_x, center_y in ((foot_radius, x, y), (tip_radius, tip_x, tip_y))
        for sign_x, sign_y in ((-1, -1), (-1, 1), (1, -1), (1, 1))
    ]
    right, up, forward = to_camera(torch.stack(corners, 1), batch.scenes[batch.image])  # (P, 8) each
    tangents = torch.stack([right / forward, up / forward], -1)
    return torch.cat([tangents.amin(1), tangents.amax(1)], -1)


def _hit_colors(batch: _RayBatch, hits: _Hits) -> Tensor:
    """Return the (3, n) colors of the hit points."""
    scenes, pair = batch.scenes, hits.pair
    light = _local_light(batch, pair)
    x, y, z = hits.local_ray
    length = (x * x + y * y + z * z).sqrt()
    view = (-x / length, -y / length, -z / length)
    palette = torch.tensor(OBJECT_COLORS).T / 255
    color = _take(palette[:, scenes.color[batch.image, batch.slot]], pair)
    is_metal = _take(scenes.material[batch.image, batch.slot] == MATERIALS.index("metal"), pair)
    intensity = _take(scenes.intensity.T[:, batch.image], pair)
    height = hits.local_point[2] + _take(batch.properties[3], pair)
    visibility = _visible_key_light(batch, hits, height)
    channels = solids.shade_solids(hits.local_normal, view, light, intensity, color, is_metal, visibility, height)
    return torch.stack(channels)


def _visible_key_light(batch: _RayBatch, hits: _Hits, height: Tensor) -> Tensor:
    """Return the (n,) fractions of the key light that the other objects do not block."""
    visibility = torch.ones_like(height)
    x, y, radius, half_height, *_ = batch.properties
    light = batch.scenes.light[batch.image]
    shadow_length = 2 * half_height / light[:, 2]
    # Select the pairs of two objects for which the shadow of the first (caster) can reach the second (receiver).
    num_pairs = len(x)
    receiver, caster = (batch.image[:, None] == batch.image).nonzero(as_tuple=True)
    dx, dy = x[receiver] - x[caster], y[receiver] - y[caster]
    run_x, run_y = -shadow_length[caster] * light[caster, 0], -shadow_length[caster] * light[caster, 1]
    fraction = ((dx * run_x + dy * run_y) / (run_x * run_x + run_y * run_y)).clamp(0, 1)
    off_x, off_y = dx - fraction * run_x, dy - fraction * run_y
    max_distance = radius[receiver] + radius[caster] + 0.1 + 0.16 * shadow_length[caster]
    is_reached = (off_x * off_x + off_y * off_y < max_distance * max_distance) & (receiver != caster)
    receiver, caster = receiver[is_reached], caster[is_reached]
    counts = torch.bincount(hits.pair, minlength=num_pairs)
    first_hit = counts.cumsum(0) - counts
    for shape, start, end in zip(range(3), batch.shape_starts, batch.shape_starts[1:]):
        has_shape = (caster >= start) & (caster < end)
        index, hit_number = _repeat_indices(counts[receiver[has_shape]])
        hit_receiver, hit_caster = _take(receiver[has_shape], index), _take(caster[has_shape], index)
        hit = _take(first_hit, hit_receiver) + hit_number  # every hit of the receiver
        local_x, local_y = _take(hits.local_point[:2], hit)
        receiver_x, receiver_y, _, _, cosine, sine = _take(batch.properties, hit_receiver)
        caster_x, caster_y, caster_radius, caster_half, caster_cosine, caster_sine = _take(batch.properties, hit_caster)
        dx = local_x * cosine - local_y * sine + receiver_x - caster_x
        dy = local_x * sine + local_y * cosine + receiver_y - caster_y
        local_x, local_y = _rotate(dx, dy, caster_cosine, caster_sine)
        point = (local_x, local_y, _take(height, hit))
        hit_visibility = key_visibility(shape, point, _local_light(batch, hit_caster), caster_radius, caster_half)
        visibility.scatter_reduce_(0, hit, hit_visibility, "amin")
    return visibility
