"""Readers of CLEVR-Change and CLEVR-DC. The rendered dataset `blocks` has the same files as CLEVR-Change.

A distractor is a pair without a change; its after image shows the same scene from another viewpoint.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from diffcap.datasets.checks import check_sentences, find_file, read_object
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.utils.errors import DiffcapError

_REMEDY = "extract the whole dataset into this folder"


def read_clevr_change(folder: Path) -> list[ChangePair]:
    """Read CLEVR-Change (Park et al., ICCV 2019) from its authors' files below, or from the files that `_read_json_lines` describes.

        images/CLEVR_default_000123.png       before
        sc_images/CLEVR_semantic_000123.png   after a change
        nsc_images/CLEVR_nonsemantic_000123.png  after without a change: the same scene from another viewpoint
        change_captions.json, no_change_captions.json   "CLEVR_default_000123.png" -> list of sentences
        splits.json                           {"train": [123, ...], "val": [...], "test": [...]}
        type_mapping.json                     {"color": ["000123.png", ...], ...}, optional
        scenes.json                           optional, only in a rendered dataset: boxes, viewpoints and changed objects

    All files of a scene have the number of the scene. The authors' dataset has 39,803 scenes; some numbers below 40,000 are not used. Each
    scene gives two pairs: the change "000123.png" and the distractor "000123.png_n". Pairs are sorted by split, then by number.
    """
    # Change type of each image ("000123.png" -> "color"); empty if the file does not exist.
    types_file = folder / "type_mapping.json"
    change_types: dict[str, str] = {}
    for type_name, images in (read_object(types_file, "change types") if types_file.is_file() else {}).items():
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            raise DiffcapError(f'{types_file}: "{type_name}" must be a list of file names; fetch the file again.')
        if repeated := change_types.keys() & images:
            raise DiffcapError(f"{types_file}: {min(repeated)!r} is listed under two types; keep one.")
        change_types |= dict.fromkeys(images, type_name)
    if (folder / "train.json").is_file() and not (folder / "change_captions.json").is_file():
        return _read_json_lines(folder, change_types)
    splits = _read_splits(folder / "splits.json")
    image_names = [f"CLEVR_default_{number:06d}.png" for numbers in splits.values() for number in numbers]
    captions_of_files: list[dict[str, list[str]]] = []
    for path in (folder / "change_captions.json", folder / "no_change_captions.json"):
        content = read_object(path, "captions", _REMEDY)
        uncaptioned = [name for name in image_names if name not in content]
        if uncaptioned:
            raise DiffcapError(
                f"{path}: no captions for {len(uncaptioned)} of the {len(image_names)} numbers in splits.json (first "
                f"{', '.join(uncaptioned[:3])}); fetch both files from the same release."
            )
        captions_of_files.append({key: check_sentences(value, str(path), key) for key, value in content.items()})
    change_captions, no_change_captions = captions_of_files
    scenes_file = folder / "scenes.json"
    extras = {}  # "000123.png" -> (`ChangePair.extra` of the change pair, `ChangePair.extra` of the distractor)
    for image, scene in (read_object(scenes_file, "scenes") if scenes_file.is_file() else {}).items():
        change_extra = {key: scene[key] for key in ("boxes", "viewpoint_iou", "changed") if key in scene}
        iou_key = "viewpoint_iou_distractor"  # overlap (IoU) of the views of both images, 1 if they are equal
        extras[image] = change_extra, ({"viewpoint_iou": scene[iou_key]} if iou_key in scene else {})
    pairs = []
    for split, numbers in splits.items():
        for number in sorted(numbers):
            file = f"{number:06d}.png"
            before, key = f"images/CLEVR_default_{file}", f"CLEVR_default_{file}"
            change_extra, distractor_extra = extras.get(file, ({}, {}))
            after, change_type = f"sc_images/CLEVR_semantic_{file}", change_types.get(file)
            change_pair = ChangePair(file, before, after, change_captions[key], split, change_type, extra=change_extra)
            after = f"nsc_images/CLEVR_nonsemantic_{file}"
            distractor_pair = ChangePair(
                f"{file}_n", before, after, no_change_captions[key], split, is_distractor=True, extra=distractor_extra
            )
            pairs += [change_pair, distractor_pair]
    return pairs


def _read_splits(file: Path) -> dict[str, list[int]]:
    """Return the numbers of each split's images, in the order of the file: {"train": [123, ...], "val": [...], "test": [...]}."""
    splits = read_object(file, "splits", _REMEDY)
    for split in SPLITS:
        numbers = splits.get(split)
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            raise DiffcapError(
                f'{file}: "{split}" must be a list of image numbers, found {numbers!r:.60}; fetch the file again.'
            )
    return {split: splits[split] for split in SPLITS}


_IMAGE_NAMES = re.compile(r"CLEVR_default_(\d{1,9})(?:\.png)? CLEVR_(semantic|nonsemantic)_\1(?:\.png)?")
_FOLDER_OF_KIND = {"semantic": "sc_images", "nonsemantic": "nsc_images"}


def _read_json_lines(folder: Path, change_types: dict[str, str]) -> list[ChangePair]:
    """Read CLEVR-Change as IDC-PCL's authors preprocessed it: files of JSON lines, one line for each pair.

        train.json, val.json, test.json   {"img1": "CLEVR_default_000123", "img2": "CLEVR_semantic_000123", "sentences": [...]}
        full/img.pkl, sc_img.pkl, nsc_img.pkl   features, which `diffcap.features.authors` reads

    The image names may have an extension. The second part of `img2` tells whether the pair is a change ("semantic") or a distractor
    ("nonsemantic"). The pairs get the ids and image paths that they have in `read_clevr_change`, so that the features and captions of
    one form of the dataset can be used with the other form.
    """
    pairs: list[ChangePair] = []
    for split in SPLITS:
        lines_file = folder / f"{split}.json"
        for place, row in read_json_lines(lines_file, "annotations", "put train.json, val.json and test.json here"):
            names_match = _IMAGE_NAMES.fullmatch(f"{row.get('img1')} {row.get('img2')}")  # groups: number, kind
            if names_match is None:
                raise DiffcapError(
                    f'{place}: "img1" and "img2" must be CLEVR_default_N and CLEVR_semantic_N or CLEVR_nonsemantic_N, found '
                    f"{row.get('img1')!r:.40} and {row.get('img2')!r:.40}; fix that line."
                )
            captions = check_sentences(row.get("sentences"), place, "sentences")
            file, kind = f"{int(names_match[1]):06d}.png", names_match[2]
            is_distractor = kind == "nonsemantic"
            pair_id = f"{file}_n" if is_distractor else file
            before, after = f"images/CLEVR_default_{file}", f"{_FOLDER_OF_KIND[kind]}/CLEVR_{kind}_{file}"
            change_type = None if is_distractor else change_types.get(file)
            pairs.append(ChangePair(pair_id, before, after, captions, split, change_type, is_distractor))
    return pairs


# File of captions -> folders of the before and after images.
_DC_FOLDERS = {"captions.json": ("bef", "aft"), "change_captions.json": ("images", "sc_images")}
_DC_REMEDY = "put captions.json and split.json, or the authors' renamed files change_captions.json and splits.json, into this folder"

_COLORS = frozenset(("gray", "grey", "red", "blue", "green", "brown", "purple", "cyan", "yellow", "color", "colour"))
_MATERIALS = frozenset(("rubber", "matte", "metal", "metallic", "shiny", "material", "texture"))
# Phrases such as "the same size" compare two objects of one image, and do not describe a change.
_SAME_ATTRIBUTE = re.compile(r"\b(?:the )?same (?:size|shape|colou?r|material|texture)\b")
_POSITION_NOUN = "(?:position|location|place|spot)"
# (change type, pattern). The first pattern that matches a caption gives the type of the caption. So the order matters: "moved to a new
# position" is "move" and not "add", "no longer in its place" is "move" and not "drop", "no longer" is "drop" and not "none".
_TYPE_PATTERNS = (
    ("none", r"^(?!.*\b(?:except|but|other than|apart from)\b).*\b(?:nothing|nobody|no one|identical|unchanged)\b"),
    (
        "none",
        r"\b(?:no (?:change|difference|modification)s?|(?:not|n't) (?:been )?(?:chang|differ|modif|alter|mov)\w*)\b",
    ),
    ("move", rf"\b(?:no longer|not|n't) (?:in|at) (?:its|the|their)(?: \w+)? {_POSITION_NOUN}\b"),
    ("move", rf"\b(?:moved|moves|shifted|relocated|(?:new|different|another) {_POSITION_NOUN})\b"),
    ("move", rf"\bchang\w* (?:its |the |their )?{_POSITION_NOUN}\b"),
    ("drop", r"\b(?:no longer|removed|disappeared|missing|gone|vanished|taken away|lost|any ?more)\b"),
    ("color", r"\b(?:chang\w*|different|new|another) (?:its |the |their )?colou?r\b"),
    ("material", r"\b(?:chang\w*|different|new|another) (?:its |the |their )?(?:material|texture)\b"),
    ("color", r"\bcolou?r of .*\b(?:changed|different|altered)\b"),
    ("material", r"\b(?:material|texture) of .*\b(?:changed|different|altered)\b"),
    ("none", r"\b(?:no|same)\b"),
    ("add", r"\b(?:added|appeared|appears|new|newly|introduced)\b"),
    ("move", rf"\b{_POSITION_NOUN}\b"),
)
# In a caption with one of these verbs, the last word names the change: "turned red" is a change of color.
_CHANGE_VERBS = frozenset(("turned", "became", "changed", "becomes", "turns", "now"))


def read_clevr_dc(folder: Path) -> list[ChangePair]:
    """Read CLEVR-DC (Kim et al., ICCV 2021), which has CLEVR scenes with strong camera movement, with or without a change.

        captions.json {"123": [sentences]}, split.json {"train": [123, ...], "val", "test"}, images in bef/, aft/    the authors' format
        change_captions.json {"000123.png": [sentences]}, splits.json (or split.json), images/ and sc_images/    format of the method DIRL

    The authors do not document the names of the image files, so an image is found by the number at the end of its name. If the image
    folder does not exist, names like `000123.png` are assumed. DIRL's evaluation uses these names as ids. Pairs are sorted by split, then
    by number.

    The files do not state the change types, nor which pairs have no change (a sixth of the pairs). Both are derived from the captions of
    a pair: the type that most captions name counts. A pair has no change type if two types have the same number of captions, or if no
    caption names a type.
    """
    captions_file = find_file(folder, *_DC_FOLDERS)
    captions_of_number: dict[int, list[str]] = {}
    for key, value in read_object(captions_file, "captions", _DC_REMEDY).items():
        number_match = re.fullmatch(r"(\d{1,9})(?:\.png)?", key)
        if number_match is None or int(number_match[1]) in captions_of_number:
            raise DiffcapError(
                f'{captions_file}: the key "{key:.60}" is not the number of a pair, or is duplicated; fetch it again.'
            )
        captions_of_number[int(number_match[1])] = check_sentences(value, str(captions_file), key)
    splits_file = find_file(folder, "split.json", "splits.json")
    image_folders = _DC_FOLDERS[captions_file.name]
    before_images, after_images = (_find_images(folder, name) for name in image_folders)
    pairs = []
    for split, numbers in _read_splits(splits_file).items():
        for number in sorted(numbers):
            if number not in captions_of_number:
                raise DiffcapError(
                    f"{captions_file}: no captions for the id {number} of {splits_file.name}; fetch both files again."
                )
            name = f"{number:06d}.png"
            before = before_images.get(number, f"{image_folders[0]}/{name}")
            after = after_images.get(number, f"{image_folders[1]}/{name}")
            found_type = vote_change_type(captions_of_number[number])
            is_distractor = found_type == "none"
            known_type = None if is_distractor else found_type
            pairs.append(ChangePair(name, before, after, captions_of_number[number], split, known_type, is_distractor))
    return pairs


def vote_change_type(captions: Sequence[str]) -> str | None:
    """Return the change type ("color", "material", "add", "drop", "move", "none") that most captions name; None for a tie or no type."""
    num_votes = Counter(filter(None, map(_type_of_sentence, captions)))
    most_votes = max(num_votes.values(), default=0)
    winners = [change_type for change_type, votes in num_votes.items() if votes == most_votes]
    return winners[0] if len(winners) == 1 else None


def _type_of_sentence(sentence: str) -> str | None:
    text = _SAME_ATTRIBUTE.sub("", sentence.lower())
    for change_type, pattern in _TYPE_PATTERNS:
        if re.search(pattern, text):
            return change_type
    tokens = re.findall("[a-z]+", text)
    if not _CHANGE_VERBS.intersection(tokens):
        return None
    return "color" if tokens[-1] in _COLORS else "material" if tokens[-1] in _MATERIALS else None


def _find_images(folder: Path, subfolder: str) -> dict[int, str]:
    """Return number -> path relative to `folder` of each image in a subfolder. The number is at the end of the image's name."""
    path_of_number: dict[int, str] = {}
    for path in sorted((folder / subfolder).iterdir()) if (folder / subfolder).is_dir() else ():
        if number_match := re.fullmatch(r"(?:.*\D)?(\d+)\.(?:png|jpe?g)", path.name, re.IGNORECASE):
            first_path = path_of_number.setdefault(int(number_match[1]), f"{subfolder}/{path.name}")
            if first_path != f"{subfolder}/{path.name}":
                raise DiffcapError(f"{folder / first_path}: {path.name} has the same number; keep one of the two.")
    return path_of_number


def clevr_dc_notes(pairs: list[ChangePair]) -> list[str]:
    """Return remarks: how the change types were derived, and how many pairs have no type."""
    without_type = [pair.id for pair in pairs if pair.change_type is None and not pair.is_distractor]
    remarks = ["change types and distractors are derived from the captions; the files do not have them"]
    if without_type:
        remarks.append(
            f"{len(without_type):,} pairs (first {without_type[0]}) have no change type, because their captions name none or disagree"
        )
    return remarks
