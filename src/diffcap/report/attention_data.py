"""Attention maps for report.html: the pairs to compute them for, a compact encoding, and localisation of the changed object."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffcap.evaluation.localisation import WordAttention, localisation, relative_box
from diffcap.evaluation.slots import WORD_KINDS, word_kinds
from diffcap.pair_captioner import AttentionMaps
from diffcap.records import ChangePair
from diffcap.report.attention import PairAttention, iter_attention, matches
from diffcap.report.overlay import scale_attention

Size = tuple[int, int]
Localisation = dict[str, dict[str, dict[str, float]]]

_PAIRS_PER_END = 20  # pairs with attention maps at the top and at the bottom of each sort order of the page
_COMMON_WORDS = 24  # words that the page lists one by one


def extreme_pairs(scores: Mapping[str, Mapping[str, float]], count: int = _PAIRS_PER_END) -> list[str]:
    """Select the pairs with the lowest and highest scores of each system, and those that the systems disagree on most.

    Args:
        scores: system -> id -> score; all systems have the same ids. A system is a run that wrote captions.
        count: number of pairs from each end of each system's ranking, and with the largest max - min over the systems; at
            least 1.

    Returns:
        Ids, without duplicates.
    """
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

    Args:
        maps: `before` and `after` (T, h, w), one map per word; `alignment` (h w, h w) or None.

    Returns:
        {"w": T words, "g": [h, w], "b" and "a": maps of the before and the after image, T x h x w bytes in base64, "m": matches}.
        A byte is the attention weight as a fraction of the word's maximum over both images, times 255. A match is
        [x_before, y_before, x_after, y_after, weight, is_common]: positions as fractions of width and height and weight, all
        times 1000, and is_common, 1 where the model regards the content as unchanged. "m" is None for a model without alignment.
    """
    height, width = maps.before.shape[1:]
    scaled = [scale_attention(before, after) for before, after in zip(maps.before, maps.after)]
    before, after = (
        base64.b64encode(b"".join(np.round(255 * pair[side]).astype(np.uint8).tobytes() for pair in scaled)).decode()
        for side in (0, 1)
    )
    encoded_matches = None
    if maps.alignment is not None:
        encoded_matches = [
            [*(round(1000 * value) for value in (*match.start, *match.end, match.weight)), int(match.is_common)]
            for match in matches(maps.alignment, (height, width))
        ]
    return {"w": maps.words, "g": [height, width], "b": before, "a": after, "m": encoded_matches}


def iter_word_attention(maps: PairAttention, sizes: Mapping[str, Size]) -> Iterator[tuple[str, WordAttention]]:
    """Yield (kind of the word, its map and box) for each word of the caption and each image with a box of the changed object.

    Args:
        maps: of one pair.
        sizes: image path -> (width, height) in pixels, in the coordinates of the boxes; images without a size are skipped.

    Yields:
        The kind, see `WORD_KINDS`, and the map with the box as fractions of the image's size.
    """
    boxes = maps.pair.extra.get("boxes") or {}
    for side, word_maps in (("before", maps.before), ("after", maps.after)):
        path = getattr(maps.pair, side)
        if not boxes.get(side) or path not in sizes:
            continue
        box = relative_box(boxes[side], sizes[path])
        for word, kind, word_map in zip(maps.words, word_kinds(maps.words), word_maps):
            yield kind, WordAttention(word, word_map, box)


def collect_attention(
    checkpoints: Sequence[Path],
    folder: Path,
    pairs: Sequence[ChangePair],
    captions: Mapping[str, str],
    localisation_ids: Sequence[str],
    sizes: Mapping[str, Size],
) -> tuple[dict[str, dict[str, Any]], Localisation] | str:
    """Compute the attention maps of a run for some pairs, and how well these maps localise the changed object.

    Args:
        checkpoints: of the run; several are an ensemble, see `attention.iter_attention`.
        folder: the dataset's folder with manifest.jsonl.
        pairs: the pairs whose maps are computed.
        captions: id -> the run's caption.
        localisation_ids: ids of those pairs that localisation is measured on. They must be drawn at random: pairs chosen by
            score would give a biased result.
        sizes: see `iter_word_attention`.

    Returns:
        id -> encoded maps, and {"kinds", "words"} -> name -> scores as `localisation` returns them (empty if no pair has a
        box); or a sentence that explains why no maps can be computed.
    """
    all_maps = iter_attention(checkpoints, folder, pairs, captions)
    if isinstance(all_maps, str):
        return all_maps
    encoded, kinds, words, to_measure = {}, [], [], set(localisation_ids)
    for maps in all_maps:  # one at a time: an alignment of 14 x 14 positions alone is 150 kB
        encoded[maps.pair.id] = encode_attention(maps)
        if maps.pair.id in to_measure:
            for kind, attention in iter_word_attention(maps, sizes):
                kinds.append(attention._replace(name=kind))  # `localisation` averages by name
                words.append(attention)
    by_word, by_kind = localisation(words), localisation(kinds)
    common = sorted(by_word, key=lambda word: (-by_word[word]["count"], word))[:_COMMON_WORDS]
    ordered = {kind: by_kind[kind] for kind in WORD_KINDS if kind in by_kind}
    return encoded, {"kinds": ordered, "words": {word: by_word[word] for word in common}}
