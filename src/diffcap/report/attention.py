"""Compute the attention maps of captions, encode them for report.html, and measure how well they localise the change.

The region of a change is the marked area of its mask image, or the box around the changed object.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffcap.change import AttentionMaps, attention_of
from diffcap.checkpoints.combining import as_ensemble, load_members
from diffcap.checkpoints.loading import MissingBaseModel
from diffcap.evaluation.localisation import WordAttention, box_coverage, localisation, mask_coverage
from diffcap.evaluation.slots import WORD_KINDS, word_kinds
from diffcap.features.store import FeatureStore
from diffcap.models.captioner import Captioner
from diffcap.records import ChangePair, JsonDict
from diffcap.report.drawing import ImageSizes, Masks, Pairs
from diffcap.report.heatmaps import Array, scale_attention, strongest_matches
from diffcap.report.table import ALL_WORDS
from diffcap.utils.errors import DiffcapError

Localisation = JsonDict  # scores; `collect_attention` describes the keys

_PAIRS_PER_READ = 16  # pairs whose features are in memory at once
_PAIRS_PER_END = 20  # number of pairs with the lowest scores, and with the highest, whose maps the page shows
_MAX_LISTED_WORDS = 24


class NoAttentionError(DiffcapError):
    """The error for a run without attention maps. The message is the reason."""


def iter_attention(
    checkpoints: Sequence[Path], dataset_folder: Path, pairs: Pairs, captions: Mapping[str, str]
) -> Iterator[tuple[ChangePair, AttentionMaps]]:
    """Yield each pair with the attention maps of its caption, or raise a `NoAttentionError` if the run has none.

    `checkpoints`: the files of the run, several for an ensemble. `captions`: id -> caption.
    """
    if not checkpoints:
        raise NoAttentionError(
            "it has no checkpoint, because it is a file with captions or a vision-language model without training; `diffcap caption "
            "--heatmap` draws the maps of such a model."
        )
    for path in checkpoints:
        if not path.exists():
            raise NoAttentionError(f"{path} is not there.")
    try:
        members = load_members(checkpoints)
    except MissingBaseModel as error:
        raise NoAttentionError(str(error)) from None
    for member in members:
        if type(member.captioner).attention is Captioner.attention:  # inherited from the base class, which has no maps
            raise NoAttentionError(f"{member.metadata['method']} has no attention maps.")
    if len({tuple(member.features["shape"][1:]) for member in members}) > 1:
        raise NoAttentionError("the members of the ensemble have attention maps of different sizes.")
    folder = dataset_folder / "features"  # `member.features` describes the features that a member reads
    stores = [FeatureStore.open(folder / member.features["name"], member.features) for member in members]
    model = members[0] if len(members) == 1 else as_ensemble(members)
    for start in range(0, len(pairs), _PAIRS_PER_READ):
        chunk = pairs[start : start + _PAIRS_PER_READ]
        image_paths = [path for pair in chunk for path in pair.images]  # before, after, before, ...
        store_features = [torch.from_numpy(store.read(store.rows(image_paths))) for store in stores]
        image_features = [features.float().split(1) for features in store_features]  # store -> image -> (1, C, H, W)
        for index, pair in enumerate(chunk):
            before: Any = [features[2 * index] for features in image_features]
            after: Any = [features[2 * index + 1] for features in image_features]
            if len(stores) == 1:
                before, after = before[0], after[0]
            caption = captions[pair.id]
            words = caption.split(" ") if caption else []  # not tokenised: a tokeniser could split a word again
            tokens = model.vocabulary.encode(words, model.max_length)
            yield pair, attention_of(model.captioner, model.vocabulary, before, after, tokens)


def extreme_pairs(scores: Mapping[str, Mapping[str, float]], count: int = _PAIRS_PER_END) -> list[str]:
    """Return ids of the pairs with the lowest, the highest and, between systems, the most different `scores` (system -> id -> score)."""
    selected_ids: list[str] = []
    for by_id in scores.values():
        sorted_ids = sorted(by_id, key=by_id.__getitem__)
        selected_ids += sorted_ids[:count] + sorted_ids[-count:]
    if len(scores) > 1:
        ids = next(iter(scores.values()))
        ranges = {id: np.ptp([by_id[id] for by_id in scores.values()]) for id in ids}
        selected_ids += sorted(ranges, key=ranges.__getitem__)[-count:]
    return list(dict.fromkeys(selected_ids))


def encode_attention(maps: AttentionMaps) -> JsonDict:
    """Encode attention maps compactly for JSON.

    Returns:
        {"w": T words, "g": [h, w], "b" and "a": maps of the before and the after image, T x h x w bytes in base64, "m": matches}.
        A byte is a weight scaled to 0 to 255. A match connects two positions, with x and y as fractions of the image: [1000 x_before,
        1000 y_before, 1000 x_after, 1000 y_after, 1000 weight, 1 if it is shifted like most matches, else 0]. "m" is None if the model does
        not align the positions of the images.
    """
    height, width = maps.before.shape[1:]
    scaled = [scale_attention(before, after) for before, after in zip(maps.before, maps.after)]
    encoded: JsonDict = {"w": maps.words, "g": [height, width]}
    for key, strengths in zip("ba", zip(*scaled) if scaled else ((), ())):
        content = b"".join(np.round(255 * word_map).astype(np.uint8).tobytes() for word_map in strengths)
        encoded[key] = base64.b64encode(content).decode()
    encoded["m"] = None
    if maps.alignment is not None:
        encoded["m"] = []
        for match in strongest_matches(maps.alignment, (height, width)):
            fractions = (*match.start, *match.end, match.weight)
            encoded["m"].append([*(round(1000 * fraction) for fraction in fractions), int(match.has_common_shift)])
    return encoded


def box_regions(pair: ChangePair, grid: tuple[int, int], sizes: ImageSizes) -> dict[str, Array]:
    """Return side ("before", "after") -> share of each cell (h, w) that the box covers, if the image has a box and a known size."""
    boxes = pair.extra.get("boxes") or {}
    regions = {}
    for side in ("before", "after"):
        path = getattr(pair, side)
        if boxes.get(side) and path in sizes:
            regions[side] = box_coverage(grid, boxes[side], sizes[path])
    return regions


def mask_regions(pair: ChangePair, grid: tuple[int, int], sizes: ImageSizes, masks: Masks) -> dict[str, Array]:
    """Return side ("before", "after") -> share of each cell (h, w) that the mask covers; {} if the mask is empty or cannot be used."""
    mask = masks.read(pair, sizes)
    if mask is None or not mask.any():
        return {}
    return dict.fromkeys(("before", "after"), mask_coverage(grid, mask))


def iter_word_attention(maps: AttentionMaps, regions: Mapping[str, Array]) -> Iterator[tuple[str, WordAttention]]:
    """Yield the kind ("color", "shape", "change", ...) and the attention of each word, for each image that has a region."""
    for side, region in regions.items():
        for word, kind, word_map in zip(maps.words, word_kinds(maps.words), getattr(maps, side)):
            yield kind, WordAttention(word, word_map, region)


def collect_attention(
    checkpoints: Sequence[Path],
    dataset_folder: Path,
    pairs: Pairs,
    captions: Mapping[str, str],
    localisation_ids: Sequence[str],
    sizes: ImageSizes,
    masks: Masks,
) -> tuple[dict[str, JsonDict], Localisation]:
    """Compute the attention maps of a run for some pairs, and how well they localise the change in the pairs of `localisation_ids`.

    These ids must be a random sample, because pairs chosen by score would give a biased result.

    Returns:
        id -> encoded maps; and the localisation {"region": "mask" or "box", "kinds": kind of word -> scores, "words": word -> scores},
        or {} if no pair has a region. "kinds" has the key `ALL_WORDS` and, if the dataset records the changed objects, keys of
        `WORD_KINDS`. If there are masks and boxes, "region" is "mask", and "boxes" has the "kinds" and "words" for the boxes.
    """
    encoded = {}
    ids_to_measure = set(localisation_ids)
    # region ("mask" or "box") -> (kind, attention) of each word
    words: dict[str, list[tuple[str, WordAttention]]] = {"mask": [], "box": []}
    # The maps of only one pair are in memory, because an alignment of 14 x 14 positions alone takes 150 kB.
    for pair, maps in iter_attention(checkpoints, dataset_folder, pairs, captions):
        encoded[pair.id] = encode_attention(maps)
        if pair.id in ids_to_measure:
            grid = maps.before.shape[1], maps.before.shape[2]
            words["mask"] += iter_word_attention(maps, mask_regions(pair, grid, sizes, masks))
            words["box"] += iter_word_attention(maps, box_regions(pair, grid, sizes))
    has_kinds = any("changed" in pair.extra for pair in pairs)
    scores: dict[str, Localisation] = {}
    for region, region_words in words.items():
        if region_words:
            by_word = localisation(attention for _, attention in region_words)
            kinds = localisation(attention._replace(name=kind) for kind, attention in region_words) if has_kinds else {}
            total = localisation(attention._replace(name=ALL_WORDS) for _, attention in region_words)
            common_words = sorted(by_word, key=lambda word: (-by_word[word]["count"], word))[:_MAX_LISTED_WORDS]
            by_kind = {**total, **{kind: kinds[kind] for kind in WORD_KINDS if kind in kinds}}
            scores[region] = {"kinds": by_kind, "words": {word: by_word[word] for word in common_words}}
    if not scores:
        return encoded, {}
    main_region = next(iter(scores))
    measured = {"region": main_region, **scores[main_region]}
    if len(scores) > 1:
        measured["boxes"] = scores["box"]
    return encoded, measured
