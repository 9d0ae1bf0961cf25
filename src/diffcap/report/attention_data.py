"""Attention maps for report.html: the pairs to compute them for, a compact encoding, and localisation of the changed object."""

import base64
from collections.abc import Iterable, Mapping, Sequence
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

_EXTREMES = 20  # pairs with attention maps at each end of each order of the page
_COMMON_WORDS = 24  # words that the page lists one by one


def extreme_pairs(scores: Mapping[str, Mapping[str, float]], count: int = _EXTREMES) -> list[str]:
    """Ids of the pairs that come first when the page sorts by a system's scores, in both directions, or by disagreement.

    Args:
        scores: system -> id -> score. count: pairs of each order.
    """
    first: list[str] = []
    for by_id in scores.values():
        order = sorted(by_id, key=by_id.__getitem__)
        first += order[:count] + order[-count:]
    if len(scores) > 1:
        ids = next(iter(scores.values()))
        disagreement = {id: np.ptp([by_id[id] for by_id in scores.values()]) for id in ids}
        first += sorted(disagreement, key=disagreement.__getitem__)[-count:]
    return list(dict.fromkeys(first))


def encode_attention(maps: AttentionMaps) -> dict[str, Any]:
    """Encode attention maps compactly for JSON.

    Returns:
        {"w": T words, "g": [h, w], "b", "a": T x h x w strengths as bytes in base64, where 255 is the highest (as in
        attention.png), "m": the strongest matches as [x, y, x, y, weight, is_common] in thousandths, or None without
        alignment}.
    """
    height, width = maps.before.shape[1:]
    strengths = [scale_attention(before, after) for before, after in zip(maps.before, maps.after)]
    before, after = (
        base64.b64encode(b"".join(np.round(255 * pair[side]).astype(np.uint8).tobytes() for pair in strengths)).decode()
        for side in (0, 1)
    )
    encoded = None
    if maps.alignment is not None:
        encoded = [
            [*(round(1000 * value) for value in (*match.start, *match.end, match.weight)), int(match.is_common)]
            for match in matches(maps.alignment, (height, width))
        ]
    return {"w": maps.words, "g": [height, width], "b": before, "a": after, "m": encoded}


def localised_words(maps: PairAttention, sizes: Mapping[str, Size]) -> Iterable[tuple[str, WordAttention]]:
    """Pairs of a word's kind and its map with the object's box, for each word and each image that contains the changed object.

    Args:
        sizes: image path -> (width, height) in the pixels of the boxes; images without a size are skipped.
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
    measured: Sequence[str],
    sizes: Mapping[str, Size],
) -> tuple[dict[str, dict[str, Any]], Localisation] | str:
    """Compute the attention maps of a run's checkpoints for pairs, and how well they localise the changed object.

    Args:
        checkpoints, folder, captions: as in `attention.iter_attention`.
        pairs: all pairs whose maps are kept. measured: ids of the pairs that localisation is measured on, which must be drawn
            independently of their scores. sizes: as in `localised_words`.

    Returns:
        id -> encoded maps, and {"kinds", "words"} -> name -> scores as `localisation` returns them (empty if no pair has a
        box); or a sentence why there are no maps.
    """
    every = iter_attention(checkpoints, folder, pairs, captions)
    if isinstance(every, str):
        return every
    encoded, kinds, words, to_measure = {}, [], [], set(measured)
    for maps in every:  # one at a time: an alignment of 14 x 14 positions alone is 150 kB
        encoded[maps.pair.id] = encode_attention(maps)
        if maps.pair.id in to_measure:
            for kind, looked in localised_words(maps, sizes):
                kinds.append(looked._replace(name=kind))
                words.append(looked)
    by_word, by_kind = localisation(words), localisation(kinds)
    common = sorted(by_word, key=lambda word: (-by_word[word]["looks"], word))[:_COMMON_WORDS]
    ordered = {kind: by_kind[kind] for kind in WORD_KINDS if kind in by_kind}
    return encoded, {"kinds": ordered, "words": {word: by_word[word] for word in common}}
