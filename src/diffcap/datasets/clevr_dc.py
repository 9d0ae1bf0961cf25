"""CLEVR-DC (Kim et al., ICCV 2021): CLEVR scenes with strong camera movement, with or without a change.

The folder holds one of two formats:

* the authors': `captions.json` {"123": [sentences]}, `split.json` {"train": [123, ...], "val", "test"}, images in `bef/` and `aft/`;
* DIRL's: `change_captions.json` {"000123.png": [sentences]}, `splits.json` (or `split.json`), images in `images/` and `sc_images/`.

The authors do not document the names of the image files. Here an image is found by the number at the end of its name, so
`123.png`, `000123.png` and `CLEVR_123.png` are all valid. If a folder does not exist, the names are assumed to be `000123.png`.
The id of a pair is "000123.png", as in DIRL's evaluation.

A sixth of the pairs shows no change; they are trained and scored together with the others. The files mark neither these pairs
nor the change types. Both are derived from the captions of a pair by majority vote. A pair whose captions disagree, or name no
change, has no type (`notes` counts these pairs).
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from diffcap.datasets.checks import first_file, read_object, sentences
from diffcap.datasets.clevr_change import read_splits
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

NOTES = {"change_types": "derived from the captions"}  # printed with every score by change type
FORMS = {"captions.json": ("bef", "aft"), "change_captions.json": ("images", "sc_images")}
_REMEDY = "put captions.json and split.json, or the authors' renamed files change_captions.json and splits.json, into this folder"

_COLORS = frozenset(("gray", "grey", "red", "blue", "green", "brown", "purple", "cyan", "yellow", "color", "colour"))
_MATERIALS = frozenset(("rubber", "matte", "metal", "metallic", "shiny", "material", "texture"))
# Describes an object by another one, not a change.
_LIKE = re.compile(r"\b(?:the )?same (?:size|shape|colou?r|material|texture)\b")
_PLACE = "(?:position|location|place|spot)"
# (change type, pattern); the first pattern that matches counts. The order matters: "moved to a new position" is not "add",
# "no longer in its place" is not "drop", "no longer" is not "none".
_PATTERNS = (
    ("none", r"^(?!.*\b(?:except|but|other than|apart from)\b).*\b(?:nothing|nobody|no one|identical|unchanged)\b"),
    (
        "none",
        r"\b(?:no (?:change|difference|modification)s?|(?:not|n't) (?:been )?(?:chang|differ|modif|alter|mov)\w*)\b",
    ),
    ("move", rf"\b(?:no longer|not|n't) (?:in|at) (?:its|the|their)(?: \w+)? {_PLACE}\b"),
    ("move", rf"\b(?:moved|moves|shifted|relocated|(?:new|different|another) {_PLACE})\b"),
    ("move", rf"\bchang\w* (?:its |the |their )?{_PLACE}\b"),
    ("drop", r"\b(?:no longer|removed|disappeared|missing|gone|vanished|taken away|lost|any ?more)\b"),
    ("color", r"\b(?:chang\w*|different|new|another) (?:its |the |their )?colou?r\b"),
    ("material", r"\b(?:chang\w*|different|new|another) (?:its |the |their )?(?:material|texture)\b"),
    ("color", r"\bcolou?r of .*\b(?:changed|different|altered)\b"),
    ("material", r"\b(?:material|texture) of .*\b(?:changed|different|altered)\b"),
    ("none", r"\b(?:no|same)\b"),
    ("add", r"\b(?:added|appeared|appears|new|newly|introduced)\b"),
    ("move", rf"\b{_PLACE}\b"),
)
_BLOCK = 8000  # in the released dataset, each block of 8,000 consecutive ids has one change type
_MIN_BLOCK_PAIRS = 50  # a block with fewer pairs is too small to determine its type
_TURN = frozenset(("turned", "became", "changed", "becomes", "turns", "now"))  # verbs of a change of color or material


def read(folder: Path) -> list[ChangePair]:
    """Read one pair per id, sorted by split, then by number."""
    found = [name for name in FORMS if (folder / name).is_file()]
    if len(found) != 1:
        fault = "has both captions.json and change_captions.json" if found else "no captions.json there"
        raise DiffcapError(f"{folder}: {fault}; {_REMEDY}.")
    path, folders = folder / found[0], FORMS[found[0]]
    captions = _captions(path)
    splits = first_file(folder, "split.json", "splits.json")
    before, after = (_images(folder, name) for name in folders)
    pairs = []
    for split, numbers in read_splits(splits).items():
        for number in sorted(numbers):
            if number not in captions:
                raise DiffcapError(f"{path}: no captions for the id {number} of {splits.name}; fetch both files again.")
            name = f"{number:06d}.png"
            images = before.get(number, f"{folders[0]}/{name}"), after.get(number, f"{folders[1]}/{name}")
            kind = change_type(captions[number])
            is_distractor = kind == "none"
            pairs.append(
                ChangePair(name, *images, captions[number], split, None if is_distractor else kind, is_distractor)
            )
    return pairs


def change_type(captions: Sequence[str]) -> str | None:
    """The change type that most captions name.

    "color", "material", "add", "drop", "move", or "none" for no change. None if no caption names a type, or two types have
    equally many captions.
    """
    votes = Counter(kind for kind in map(_type_of_sentence, captions) if kind)
    ranked = votes.most_common(2)
    return ranked[0][0] if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]) else None


def _type_of_sentence(sentence: str) -> str | None:
    text = _LIKE.sub("", sentence.lower())
    for kind, pattern in _PATTERNS:
        if re.search(pattern, text):
            return kind
    tokens = re.findall("[a-z]+", text)
    if not _TURN.intersection(tokens):
        return None
    return "color" if tokens[-1] in _COLORS else "material" if tokens[-1] in _MATERIALS else None


def _captions(path: Path) -> dict[int, list[str]]:
    captions: dict[int, list[str]] = {}
    for key, sentences_of_pair in read_object(path, "captions", _REMEDY).items():
        number = re.fullmatch(r"(\d{1,9})(?:\.png)?", key)
        if number is None or int(number.group(1)) in captions:
            raise DiffcapError(
                f'{path}: the key "{key:.60}" is not the number of a pair, or is duplicated; fetch it again.'
            )
        captions[int(number.group(1))] = sentences(sentences_of_pair, str(path), key)
    return captions


def _images(folder: Path, name: str) -> dict[int, str]:
    """Number -> path relative to `folder`, of the images that exist."""
    found: dict[int, str] = {}
    for path in sorted((folder / name).iterdir()) if (folder / name).is_dir() else ():
        number = re.fullmatch(r"(?:.*\D)?(\d+)\.(?:png|jpe?g)", path.name, re.IGNORECASE)
        if number is None:
            continue
        other = found.setdefault(int(number.group(1)), f"{name}/{path.name}")
        if other != f"{name}/{path.name}":
            raise DiffcapError(
                f"{folder / other}: {path.name} in the same folder has the same number; keep one of the two."
            )
    return found


def notes(pairs: list[ChangePair]) -> list[str]:
    """Remarks on the files, which the data stage prints and stores."""
    without_type = [pair.id for pair in pairs if pair.change_type is None and not pair.is_distractor]
    remarks = ["change types and distractors are derived from the captions; the files do not have them"]
    if without_type:
        remarks.append(
            f"{len(without_type):,} pairs (first {without_type[0]}) have no change type, because their captions name none or disagree"
        )
    blocks: dict[int, Counter[str]] = {}
    for pair in pairs:
        kind = "none" if pair.is_distractor else pair.change_type or "unknown"
        blocks.setdefault(int(pair.id.removesuffix(".png")) // _BLOCK, Counter())[kind] += 1
    if all(count.total() >= _MIN_BLOCK_PAIRS for count in blocks.values()):
        agree = sum(count.most_common(1)[0][1] for count in blocks.values())
        remarks.append(
            f"{agree:,} of {len(pairs):,} pairs have the most frequent type of their block of {_BLOCK:,} ids; in the released "
            "dataset, each block has one type"
        )
    return remarks
