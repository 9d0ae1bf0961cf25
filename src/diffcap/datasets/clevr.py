"""CLEVR-Change and CLEVR-DC, and datasets in CLEVR-Change's layout, as `diffcap.worlds.blocks` writes it."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcap.datasets.checks import first_file, note_once, read_object, sentences
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.utils.errors import DiffcapError

_REMEDY = "extract the whole dataset into this folder"


def read_clevr_change(folder: Path) -> list[ChangePair]:
    """CLEVR-Change (Park et al., ICCV 2019), in its official layout or as `_read_lines` describes.

        images/CLEVR_default_000123.png       before
        sc_images/CLEVR_semantic_000123.png   after a change
        nsc_images/CLEVR_nonsemantic_000123.png  distractor: the same scene from another viewpoint
        change_captions.json, no_change_captions.json   "CLEVR_default_000123.png" -> list of sentences
        splits.json                           {"train": [123, ...], "val": [...], "test": [...]}
        type_mapping.json                     {"color": ["000123.png", ...], ...}, optional
        scenes.json                           optional, see `diffcap.worlds.blocks.write`

    Files are matched by their number, not by their position in a listing: the released dataset has 39,803 of 40,000 numbers. Each scene
    gives two pairs: the change "000123.png" and the distractor "000123.png_n". They are sorted by split, then by number.
    """
    change_types = _change_types(folder / "type_mapping.json")
    if (folder / "train.json").is_file() and not (folder / "change_captions.json").is_file():
        return _read_lines(folder, change_types)
    captions: dict[str, dict[str, list[str]]] = {}
    for name in ("change_captions.json", "no_change_captions.json"):
        path = folder / name
        captions[name] = {
            key: sentences(value, str(path), key) for key, value in read_object(path, "captions", _REMEDY).items()
        }
    splits = _read_splits(folder / "splits.json")
    extras = _extras(folder / "scenes.json")
    names = [f"CLEVR_default_{number:06d}.png" for numbers in splits.values() for number in numbers]
    for file, known in captions.items():
        without = [name for name in names if name not in known]
        if without:
            raise DiffcapError(
                f"{folder / file}: no captions for {len(without)} of the {len(names)} numbers in splits.json (first "
                f"{', '.join(without[:3])}); fetch both files from the same release."
            )
    changed, unchanged = captions.values()
    pairs = []
    for split, numbers in splits.items():
        for number in sorted(numbers):
            file = f"{number:06d}.png"
            before, key = f"images/CLEVR_default_{file}", f"CLEVR_default_{file}"
            change_extra, distractor_extra = extras.get(file, ({}, {}))
            after, change_type = f"sc_images/CLEVR_semantic_{file}", change_types.get(file)
            change = ChangePair(file, before, after, changed[key], split, change_type, extra=change_extra)
            after = f"nsc_images/CLEVR_nonsemantic_{file}"
            distractor = ChangePair(
                f"{file}_n", before, after, unchanged[key], split, is_distractor=True, extra=distractor_extra
            )
            pairs += [change, distractor]
    return pairs


def _read_splits(path: Path) -> dict[str, list[int]]:
    """The numbers of each split's images, in the file's order: {"train": [123, ...], "val": [...], "test": [...]}."""
    splits = read_object(path, "splits", _REMEDY)
    split_of: dict[int, str] = {}
    for split in SPLITS:
        if not isinstance(splits.get(split), list):
            raise DiffcapError(f'{path}: "{split}" must be a list of numbers; fix or fetch the file again.')
        for number in splits[split]:
            if type(number) is not int or number < 0:
                raise DiffcapError(f'{path}: "{split}" holds {number!r:.60}, not the number of an image; fix it.')
            if number in split_of:
                raise DiffcapError(
                    f"{path}: {number} is duplicated (in {split_of[number]} and {split}); keep it in one split."
                )
            split_of[number] = split
    return {split: splits[split] for split in SPLITS}


def _change_types(path: Path) -> dict[str, str]:
    """The change type of each image ("000123.png" -> "color"); empty if `path` does not exist."""
    change_types: dict[str, str] = {}
    for change_type, files in (read_object(path, "change types") if path.is_file() else {}).items():
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise DiffcapError(f'{path}: "{change_type}" must be a list of file names; fix or fetch the file again.')
        for file in files:
            first = change_types.setdefault(file, change_type)
            if first != change_type:
                raise DiffcapError(f"{path}: {file!r} is listed under {first!r} and under {change_type!r}; keep one.")
    return change_types


def _extras(path: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """`ChangePair.extra` of the change pair and of the distractor pair of each image, from `scenes.json`; empty without the file."""
    extras = {}
    for file, scene in (read_object(path, "scenes") if path.is_file() else {}).items():
        change = {key: scene[key] for key in ("boxes", "viewpoint_iou", "changed") if key in scene}
        key = "viewpoint_iou_distractor"
        extras[file] = change, ({"viewpoint_iou": scene[key]} if key in scene else {})
    return extras


_NAME = re.compile(r"CLEVR_(default|semantic|nonsemantic)_(\d{1,9})(?:\.png)?")
_FOLDERS = {"semantic": "sc_images", "nonsemantic": "nsc_images"}


def _read_lines(folder: Path, change_types: dict[str, str]) -> list[ChangePair]:
    """CLEVR-Change as IDC-PCL's authors preprocessed it: JSON lines, one per pair.

        train.json, val.json, test.json   {"img1": "CLEVR_default_000123", "img2": "CLEVR_semantic_000123", "sentences": [...]}
        full/img.pkl, sc_img.pkl, nsc_img.pkl   features, see `diffcap.features.authors`

    The image names may have an extension. The second part of `img2` tells whether the pair is a change ("semantic") or a distractor
    ("nonsemantic"). Ids and image paths are converted to the official ones, so that scores and features fit both formats.
    """
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    for split in SPLITS:
        path = folder / f"{split}.json"
        for where, row in read_json_lines(path, "annotations", "put train.json, val.json and test.json here"):
            first, second = (_NAME.fullmatch(str(row.get(key))) for key in ("img1", "img2"))
            is_pair = first and second and first[1] == "default" != second[1] and int(first[2]) == int(second[2])
            if not first or not second or not is_pair:
                raise DiffcapError(
                    f'{where}: "img1" and "img2" must be CLEVR_default_N and CLEVR_semantic_N or CLEVR_nonsemantic_N, found '
                    f"{row.get('img1')!r:.40} and {row.get('img2')!r:.40}; fix that line."
                )
            captions = sentences(row.get("sentences"), where, "sentences")
            file, kind = f"{int(first[2]):06d}.png", second[1]
            distractor = kind == "nonsemantic"
            name = f"{file}_n" if distractor else file
            note_once(seen, name, where, "the pair")
            before, after = f"images/CLEVR_default_{file}", f"{_FOLDERS[kind]}/CLEVR_{kind}_{file}"
            change = None if distractor else change_types.get(file)
            pairs.append(ChangePair(name, before, after, captions, split, change, distractor))
    return pairs


# File of captions -> folders of the before and after images.
_DC_FOLDERS = {"captions.json": ("bef", "aft"), "change_captions.json": ("images", "sc_images")}
_DC_REMEDY = "put captions.json and split.json, or the authors' renamed files change_captions.json and splits.json, into this folder"

_COLORS = frozenset(("gray", "grey", "red", "blue", "green", "brown", "purple", "cyan", "yellow", "color", "colour"))
_MATERIALS = frozenset(("rubber", "matte", "metal", "metallic", "shiny", "material", "texture"))
# "the same size" and the like compare one object with another, and describe no change.
_SAME_ATTRIBUTE = re.compile(r"\b(?:the )?same (?:size|shape|colou?r|material|texture)\b")
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
_CHANGE_VERBS = frozenset(
    ("turned", "became", "changed", "becomes", "turns", "now")
)  # verbs of a change of color or material


def read_clevr_dc(folder: Path) -> list[ChangePair]:
    """CLEVR-DC (Kim et al., ICCV 2021): CLEVR scenes with strong camera movement, with or without a change.

        captions.json {"123": [sentences]}, split.json {"train": [123, ...], "val", "test"}, images in bef/ and aft/    the authors' format
        change_captions.json {"000123.png": [sentences]}, splits.json (or split.json), images/ and sc_images/          DIRL's format

    The authors do not document the names of the image files: an image is found by the number at the end of its name. If a folder does
    not exist, the names are assumed to be `000123.png`, the id of the pair in DIRL's evaluation. Pairs are sorted by split, then by number.

    The files mark neither the pairs without change, a sixth, nor the change types. Both are derived from the captions of a pair by
    majority vote. A pair whose captions disagree, or name no change, has no type.
    """
    found = [name for name in _DC_FOLDERS if (folder / name).is_file()]
    if len(found) != 1:
        fault = "has both captions.json and change_captions.json" if found else "no captions.json there"
        raise DiffcapError(f"{folder}: {fault}; {_DC_REMEDY}.")
    path, folders = folder / found[0], _DC_FOLDERS[found[0]]
    captions: dict[int, list[str]] = {}
    for key, value in read_object(path, "captions", _DC_REMEDY).items():
        digits = re.fullmatch(r"(\d{1,9})(?:\.png)?", key)
        if digits is None or int(digits[1]) in captions:
            raise DiffcapError(
                f'{path}: the key "{key:.60}" is not the number of a pair, or is duplicated; fetch it again.'
            )
        captions[int(digits[1])] = sentences(value, str(path), key)
    splits = first_file(folder, "split.json", "splits.json")
    before, after = (_images(folder, name) for name in folders)
    pairs = []
    for split, numbers in _read_splits(splits).items():
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
    """Return the change type that most captions name.

    "color", "material", "add", "drop", "move", or "none" for no change. None if no type has the most captions.
    """
    votes = Counter(kind for kind in map(_type_of_sentence, captions) if kind)
    ranked = votes.most_common(2)
    return ranked[0][0] if ranked and (len(ranked) == 1 or ranked[0][1] > ranked[1][1]) else None


def _type_of_sentence(sentence: str) -> str | None:
    text = _SAME_ATTRIBUTE.sub("", sentence.lower())
    for kind, pattern in _PATTERNS:
        if re.search(pattern, text):
            return kind
    tokens = re.findall("[a-z]+", text)
    if not _CHANGE_VERBS.intersection(tokens):
        return None
    return "color" if tokens[-1] in _COLORS else "material" if tokens[-1] in _MATERIALS else None


def _images(folder: Path, name: str) -> dict[int, str]:
    """Return number -> path relative to `folder`, of the images that exist."""
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


def clevr_dc_notes(pairs: list[ChangePair]) -> list[str]:
    """Return how the types were derived, and the number of pairs without one."""
    without_type = [pair.id for pair in pairs if pair.change_type is None and not pair.is_distractor]
    remarks = ["change types and distractors are derived from the captions; the files do not have them"]
    if without_type:
        remarks.append(
            f"{len(without_type):,} pairs (first {without_type[0]}) have no change type, because their captions name none or disagree"
        )
    return remarks
