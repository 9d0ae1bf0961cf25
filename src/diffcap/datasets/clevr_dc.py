"""CLEVR-DC (Kim et al., ICCV 2021): CLEVR scenes whose camera moves far, with a change or none.

Two forms are read, whichever the folder holds:

* upstream's: `captions.json` {"123": [sentences]}, `split.json` {"train": [123, ...], "val", "test"}, images in `bef/` and `aft/`;
* DIRL's renaming of it: `change_captions.json` {"000123.png": [sentences]}, `splits.json` (or `split.json`), images in `images/` and
  `sc_images/`.

What upstream's images are called is said nowhere; DIRL's scripts take it that a name is the id and an extension. Here an image is
found by the number that its name ends with, so `123.png`, `000123.png` and `CLEVR_123.png` will do; where a folder is not there, the
names are taken to be `000123.png`. An id is "000123.png", as in DIRL's evaluation.

There is one stream: a sixth of the pairs show no change, and are trained and scored with the others. Neither they nor the change
types are marked in the files: both are read off the words of a pair's captions, by vote, and a pair whose captions disagree or say
nothing has no type (`notes` counts them).
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from diffcap.datasets.checks import sentences
from diffcap.datasets.clevr_change import read_splits
from diffcap.errors import DiffcapError
from diffcap.records import ChangePair, read_json

NOTES = {"change_types": "derived from the captions"}  # what every score by type has to say
FORMS = {"captions.json": ("bef", "aft"), "change_captions.json": ("images", "sc_images")}
_REMEDY = "put captions.json and split.json, or DIRL's change_captions.json and splits.json, into this folder"

_COLORS = frozenset(("gray", "grey", "red", "blue", "green", "brown", "purple", "cyan", "yellow", "color", "colour"))
_MATERIALS = frozenset(("rubber", "matte", "metal", "metallic", "shiny", "material", "texture"))
_LIKE = re.compile(
    r"\b(?:the )?same (?:size|shape|colou?r|material|texture)\b"
)  # tells one object by another, no change
_PLACE = "(?:position|location|place|spot)"
# The first that fits: "moved to a new position" adds nothing, "no longer in its place" removes nothing, "no longer" is not
# "no", and what only turns comes last.
_SAYINGS = (
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
_BLOCK, _ENOUGH = 8000, 50  # ids with one action; pairs of a block that can tell which
_TURN = frozenset(("turned", "became", "changed", "becomes", "turns", "now"))


def read(folder: Path) -> list[ChangePair]:
    """One pair an id, by split, then by number.

    Raises:
        DiffcapError: a file is missing or malformed, an id stands in two splits or has no captions, or two images of a folder
            have one number.
    """
    found = [name for name in FORMS if (folder / name).is_file()]
    if len(found) != 1:
        fault = "both captions.json and change_captions.json" if found else "no captions.json there"
        raise DiffcapError(f"{folder}: {fault}; {_REMEDY}.")
    path, folders = folder / found[0], FORMS[found[0]]
    captions = _captions(path)
    splits = next(
        (folder / name for name in ("split.json", "splits.json") if (folder / name).is_file()), folder / "split.json"
    )
    before, after = (_images(folder, name) for name in folders)
    pairs = []
    for split, numbers in read_splits(splits).items():
        for number in sorted(numbers):
            if number not in captions:
                raise DiffcapError(f"{path}: no captions for the id {number} of {splits.name}; fetch both files again.")
            name, told = f"{number:06d}.png", captions[number]
            images = before.get(number, f"{folders[0]}/{name}"), after.get(number, f"{folders[1]}/{name}")
            kind = change_type(told)
            pairs.append(ChangePair(name, *images, told, split, None if kind == "none" else kind, kind == "none"))
    return pairs


def change_type(captions: Sequence[str]) -> str | None:
    """What most of the captions say: color, material, add, drop, move, or none for no change; None where two are level."""
    votes = Counter(kind for kind in map(_saying, captions) if kind)
    ranked = votes.most_common(2)
    return ranked[0][0] if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]) else None


def _saying(sentence: str) -> str | None:
    text = _LIKE.sub("", sentence.lower())
    for kind, words in _SAYINGS:
        if re.search(words, text):
            return kind
    tokens = re.findall("[a-z]+", text)
    if not _TURN.intersection(tokens):
        return None
    return "color" if tokens[-1] in _COLORS else "material" if tokens[-1] in _MATERIALS else None


def _captions(path: Path) -> dict[int, list[str]]:
    value = read_json(path, "captions", _REMEDY)
    if not isinstance(value, dict):
        raise DiffcapError(f"{path}: expected a JSON object, found {type(value).__name__}; fetch it again.")
    captions: dict[int, list[str]] = {}
    for key, told in value.items():
        number = re.fullmatch(r"(\d{1,9})(?:\.png)?", key)
        if number is None or int(number.group(1)) in captions:
            raise DiffcapError(
                f'{path}: the key "{key:.60}" is not the number of a pair, or stands twice; fetch it again.'
            )
        captions[int(number.group(1))] = sentences(told, str(path), key)
    return captions


def _images(folder: Path, name: str) -> dict[int, str]:
    """Number -> path, for the images that are there."""
    found: dict[int, str] = {}
    for path in sorted((folder / name).iterdir()) if (folder / name).is_dir() else ():
        number = re.fullmatch(r"(?:.*\D)?(\d+)\.(?:png|jpe?g)", path.name, re.IGNORECASE)
        if number is None:
            continue
        other = found.setdefault(int(number.group(1)), f"{name}/{path.name}")
        if other != f"{name}/{path.name}":
            raise DiffcapError(f"{folder / other}: {path.name} beside it has the same number; keep one of the two.")
    return found


def notes(pairs: list[ChangePair]) -> list[str]:
    """What the data stage says of the files."""
    untold = [pair.id for pair in pairs if pair.change_type is None and not pair.is_distractor]
    said = ["change types and distractors are derived from the captions' words; the files do not hold them"]
    if untold:
        said.append(f"{len(untold):,} pairs (first {untold[0]}) have captions that tell no type, or two")
    blocks: dict[int, Counter[str]] = {}
    for pair in pairs:
        kind = "none" if pair.is_distractor else pair.change_type or "untold"
        blocks.setdefault(int(pair.id.removesuffix(".png")) // _BLOCK, Counter())[kind] += 1
    if all(count.total() >= _ENOUGH for count in blocks.values()):
        agree = sum(count.most_common(1)[0][1] for count in blocks.values())
        said.append(
            f"{agree:,} of {len(pairs):,} pairs are of the type that most of their {_BLOCK:,} ids have: each block of as many has "
            "one action in the released dataset"
        )
    return said
