"""Where words looked, for the page: which pairs to ask, the maps in few bytes, and how often a word found the changed object."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diffcap.captioner import AttentionMaps
from diffcap.evaluation.localisation import Looked, box_in_parts, localisation
from diffcap.evaluation.slots import WORD_KINDS, word_kinds
from diffcap.records import ChangePair
from diffcap.report.attention import PairAttention, iter_attention, matches
from diffcap.report.overlay import scale_attention

Size = tuple[int, int]
Localised = dict[str, dict[str, dict[str, float]]]

_ENDS = 20  # the best, the worst and the most disputed pairs that can be looked into, of each
_COMMON = 24  # words that are listed by themselves


def extreme_pairs(scores: Mapping[str, Mapping[str, float]], count: int = _ENDS) -> list[str]:
    """Ids of the pairs that come first when the page sorts by each system's scores, either way, or by disagreement."""
    first: list[str] = []
    for of in scores.values():
        order = sorted(of, key=of.__getitem__)
        first += order[:count] + order[-count:]
    if len(scores) > 1:
        spread = {id: _range([of[id] for of in scores.values()]) for id in next(iter(scores.values()))}
        first += sorted(spread, key=spread.__getitem__)[-count:]
    return list(dict.fromkeys(first))


def _range(values: Sequence[float]) -> float:
    return max(values) - min(values)


def pack(one: AttentionMaps) -> dict[str, Any]:
    """A look in few bytes, for JSON.

    Returns:
        {"w": T words, "g": [h, w], "b", "a": T x h x w strengths as bytes in base64, 255 where it looked most (as in
        attention.png), "m": the sure matches as [x, y, x, y, weight, alike] in thousandths, or None without alignment}.
    """
    height, width = one.before.shape[1:]
    strengths = [scale_attention(before, after) for before, after in zip(one.before, one.after)]
    before, after = (
        base64.b64encode(b"".join(np.round(255 * pair[side]).astype(np.uint8).tobytes() for pair in strengths)).decode()
        for side in (0, 1)
    )
    found = None
    if one.alignment is not None:
        found = [
            [*(round(1000 * value) for value in (*match.start, *match.end, match.weight)), int(match.alike)]
            for match in matches(one.alignment, (height, width))
        ]
    return {"w": one.words, "g": [height, width], "b": before, "a": after, "m": found}


def localised_words(one: PairAttention, sizes: Mapping[str, Size]) -> Iterable[tuple[str, Looked]]:
    """(word's kind, `Looked` under the word) for each word and each image in which the changed object stands.

    Args:
        sizes: image path -> (width, height) in the boxes' pixels; images without a size are passed over.
    """
    boxes = one.pair.extra.get("boxes") or {}
    for side, maps in (("before", one.before), ("after", one.after)):
        path = getattr(one.pair, side)
        if not boxes.get(side) or path not in sizes:
            continue
        box = box_in_parts(boxes[side], sizes[path])
        for word, kind, map in zip(one.words, word_kinds(one.words), maps):
            yield kind, Looked(word, map, box)


def collect(
    checkpoints: Sequence[Path],
    folder: Path,
    pairs: Sequence[ChangePair],
    captions: Mapping[str, str],
    measured: Sequence[str],
    sizes: Mapping[str, Size],
) -> tuple[dict[str, dict[str, Any]], Localised] | str:
    """Ask a run's checkpoint where it looked at pairs.

    Args:
        checkpoints, folder, captions: as in `attention.iter_attention`.
        pairs: all whose looks are kept. measured: ids of those that localisation is measured on, drawn without regard to how
            well they were captioned. sizes: as in `localised_words`.

    Returns:
        id -> packed look, and {"kinds", "words"} -> name -> scores as `localisation` has them (empty where no pair has a
        box); or, where there is nothing to see, one sentence why.
    """
    found = iter_attention(checkpoints, folder, pairs, captions)
    if isinstance(found, str):
        return found
    packed, kinds, words, chosen = {}, [], [], set(measured)
    for one in found:  # one at a time: an alignment of 14 x 14 places alone is 150 kB
        packed[one.pair.id] = pack(one)
        if one.pair.id in chosen:
            for kind, looked in localised_words(one, sizes):
                kinds.append(looked._replace(name=kind))
                words.append(looked)
    by_word, by_kind = localisation(words), localisation(kinds)
    common = sorted(by_word, key=lambda word: (-by_word[word]["looks"], word))[:_COMMON]
    ordered = {kind: by_kind[kind] for kind in WORD_KINDS if kind in by_kind}
    return packed, {"kinds": ordered, "words": {word: by_word[word] for word in common}}
