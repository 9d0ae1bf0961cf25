"""Attention maps of the captions of runs: computing them, their encoding for report.html, and localisation of the change."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffcap.checkpoints.combining import as_ensemble, load_members
from diffcap.checkpoints.loading import MissingBaseModel
from diffcap.evaluation.localisation import (
    Array,
    WordAttention,
    box_coverage,
    localisation,
    mask_coverage,
    relative_box,
)
from diffcap.evaluation.slots import WORD_KINDS, word_kinds
from diffcap.features.store import FeatureStore
from diffcap.models.captioner import Captioner
from diffcap.pair_captioner import AttentionMaps, attention_of
from diffcap.records import ChangePair
from diffcap.report.drawing import Masks, Pairs, Sizes
from diffcap.report.heatmaps import matches, scale_attention
from diffcap.report.table import ALL_WORDS
from diffcap.utils.errors import DiffcapError

Localisation = dict[str, Any]

_PAIRS_PER_READ = 16
_PAIRS_PER_END = 20  # pairs with attention maps at the top and at the bottom of each sort order of the page
_COMMON_WORDS = 24  # words that the page lists one by one


class NoAttentionError(DiffcapError):
    """A sentence why there are no attention maps."""


def iter_attention(
    paths: Sequence[Path], folder: Path, pairs: Pairs, captions: Mapping[str, str]
) -> Iterator[tuple[ChangePair, AttentionMaps]]:
    """Attention maps of a checkpoint, or of an ensemble, for the captions (by id) of pairs; `folder` is the dataset's.

    Raises:
        NoAttentionError: there are no maps.
    """
    if not paths:
        raise NoAttentionError(
            "it has no checkpoint: a file with captions, or a vision-language model without training, whose maps `diffcap caption "
            "--heatmap` draws."
        )
    for path in paths:
        if not path.exists():
            raise NoAttentionError(f"{path} is not there (any more).")
    try:
        members = load_members(paths)
    except MissingBaseModel as error:
        raise NoAttentionError(str(error)) from None
    for member in members:
        if type(member.captioner).attention is Captioner.attention:
            raise NoAttentionError(f"{member.metadata['method']} has no attention maps.")
    if len({tuple(member.features["shape"][1:]) for member in members}) > 1:
        raise NoAttentionError("the members of the ensemble have attention maps of different sizes.")
    stores = [FeatureStore.open(folder / "features" / member.features["name"], member.features) for member in members]
    checkpoint = members[0] if len(members) == 1 else as_ensemble(members)
    for start in range(0, len(pairs), _PAIRS_PER_READ):
        chunk = pairs[start : start + _PAIRS_PER_READ]
        images = [image for pair in chunk for image in pair.images]  # before, after, before, ...
        maps_of_stores = [torch.from_numpy(store.read(store.rows(images))) for store in stores]
        features = [maps.float().split(1) for maps in maps_of_stores]
        for number, pair in enumerate(chunk):
            sides: list[Any] = [[maps[2 * number + side] for maps in features] for side in (0, 1)]
            before, after = sides if len(stores) > 1 else (side[0] for side in sides)
            caption = captions[pair.id]
            words = caption.split(" ") if caption else []  # the vocabulary's own words; tokenisation could split them
            tokens = checkpoint.vocabulary.encode(words, checkpoint.max_length)
            yield pair, attention_of(checkpoint.captioner, checkpoint.vocabulary, before, after, tokens)


def extreme_pairs(scores: Mapping[str, Mapping[str, float]], count: int = _PAIRS_PER_END) -> list[str]:
    """The ids of the pairs with the lowest and highest scores of each system, and with the largest max - min over the systems."""
    selected: list[str] = []
    for by_id in scores.values():
        order = sorted(by_id, key=by_id.__getitem__)
        selected += order[:count] + order[-count:]
    if len(scores) > 1:
        ids = next(iter(scores.values()))
        disagreement = {id: np.ptp([by_id[id] for by_id in scores.values()]) for id in ids}
        selected += sorted(disagreement, key=disagreement.__getitem__)[-count:]
    return list(dict.fromkeys(selected))


def encode_attention(maps: AttentionMaps) -> dict[str, Any]:
    """Encode attention maps compactly for JSON.

    Returns:
        {"w": T words, "g": [h, w], "b" and "a": maps of the before and the after image, T x h x w bytes in base64, "m": matches}.
        A byte is the attention weight as a fraction of the word's maximum over both images, times 255. A match is
        [x_before, y_before, x_after, y_after, weight, is_common]: positions as fractions of width and height and weight, all
        times 1000, and is_common, 1 where the model regards the content as unchanged. "m" is None for a model without alignment.
    """
    height, width = maps.before.shape[1:]
    scaled = [scale_attention(before, after) for before, after in zip(maps.before, maps.after)]
    encoded: dict[str, Any] = {"w": maps.words, "g": [height, width]}
    for number, side in enumerate("ba"):
        of_words = [np.round(255 * pair[number]).astype(np.uint8) for pair in scaled]
        encoded[side] = base64.b64encode(b"".join(map.tobytes() for map in of_words)).decode()
    encoded["m"] = None
    if maps.alignment is not None:
        encoded["m"] = []
        for match in matches(maps.alignment, (height, width)):
            numbers = (*match.start, *match.end, match.weight)
            encoded["m"].append([*(round(1000 * number) for number in numbers), int(match.is_common)])
    return encoded


def box_regions(pair: ChangePair, grid: tuple[int, int], sizes: Sizes) -> dict[str, Array]:
    """The boxes of the changed object: "before", "after" -> `box_coverage` (h, w), for the images that have one, and a size by path."""
    boxes = pair.extra.get("boxes") or {}
    sides = ((side, getattr(pair, side)) for side in ("before", "after"))
    return {
        side: box_coverage(grid, relative_box(boxes[side], sizes[path]))
        for side, path in sides
        if boxes.get(side) and path in sizes
    }


def mask_regions(pair: ChangePair, grid: tuple[int, int], sizes: Sizes, masks: Masks) -> dict[str, Array]:
    """The mask of a pair as `box_regions`: it has the changed area of both images. Empty for an empty mask."""
    mask = masks.read(pair, sizes)
    if mask is None or not mask.any():
        return {}
    return dict.fromkeys(("before", "after"), mask_coverage(grid, mask))


def iter_word_attention(maps: AttentionMaps, regions: Mapping[str, Array]) -> Iterator[tuple[str, WordAttention]]:
    """The kind of the word (see `WORD_KINDS`), and its map with the region, for each word and each image with a region."""
    for side, region in regions.items():
        for word, kind, word_map in zip(maps.words, word_kinds(maps.words), getattr(maps, side)):
            yield kind, WordAttention(word, word_map, region)


def collect_attention(
    checkpoints: Sequence[Path],
    folder: Path,
    pairs: Pairs,
    captions: Mapping[str, str],
    localisation_ids: Sequence[str],
    sizes: Sizes,
    masks: Masks,
) -> tuple[dict[str, dict[str, Any]], Localisation]:
    """Compute the attention maps of a run for some pairs, and how well they localise the change in the pairs of `localisation_ids`.

    These must be drawn at random: pairs chosen by score would give a biased result.

    Returns:
        id -> encoded maps, and the localisation, which is {"region": "mask" or "box", "kinds", "words"}, the last two name -> scores as
        `localisation` returns them. Masks are used where the pairs have any that are not empty; "boxes" then has "kinds" and "words"
        for boxes, if there are boxes, too. It is empty if no pair has a mask or a box. "kinds" has `ALL_WORDS`, and in datasets with
        the attributes of the changed object the kinds of `WORD_KINDS`.
    """
    encoded = {}
    to_measure = set(localisation_ids)
    found: dict[str, list[tuple[str, WordAttention]]] = {"mask": [], "box": []}
    # One at a time: an alignment of 14 x 14 positions alone is 150 kB.
    for pair, maps in iter_attention(checkpoints, folder, pairs, captions):
        encoded[pair.id] = encode_attention(maps)
        if pair.id in to_measure:
            grid = maps.before.shape[1], maps.before.shape[2]
            found["mask"] += iter_word_attention(maps, mask_regions(pair, grid, sizes, masks))
            found["box"] += iter_word_attention(maps, box_regions(pair, grid, sizes))
    with_kinds = any("changed" in pair.extra for pair in pairs)
    tables = {region: _tables(words, with_kinds) for region, words in found.items() if words}
    if not tables:
        return encoded, {}
    first = next(iter(tables))
    measured = {"region": first, **tables[first]}
    if len(tables) > 1:
        measured["boxes"] = tables["box"]
    return encoded, measured


def _tables(found: Sequence[tuple[str, WordAttention]], with_kinds: bool) -> Localisation:
    """{"kinds", "words"} -> name -> scores of (kind, attention of a word)."""
    by_word = localisation(attention for _, attention in found)
    by_kind = localisation(attention._replace(name=kind) for kind, attention in found) if with_kinds else {}
    total = localisation(attention._replace(name=ALL_WORDS) for _, attention in found)
    common = sorted(by_word, key=lambda word: (-by_word[word]["count"], word))[:_COMMON_WORDS]
    kinds = {kind: by_kind[kind] for kind in WORD_KINDS if kind in by_kind}
    return {"kinds": {**total, **kinds}, "words": {word: by_word[word] for word in common}}
