"""Reader of JSON files in the form of Karpathy's splits, in which datasets of remote-sensing change captioning are published.

    {"images": [{"filepath": "train", "filename": "train_000001.png", "split": "train", "changeflag": 1,
                 "sentences": [{"tokens": ["a", "road", "is", "built"], "raw": " a road is built ."}, ...]}, ...]}

* `split`: "train", "val" or "test"; "restval" counts as train. If an entry has no `split`, its `filepath` is the split.
* `filepath`: the folder of the images, which `ImageLayout` calls {folder}. If an entry has no `filepath`, its split is the folder.
* `sentences`: a caption is its `tokens` joined by spaces. If a sentence has no `tokens`, the caption is its `raw` text without the spaces
  at both ends and the final full stop.
* `changeflag`: 1 if something has changed, 0 if not. If an entry has no `changeflag`, `diffcap.datasets.no_change` derives the flag from
  the captions, and `ChangePair.extra` has `changeflag_derived`.

Other keys are not read. A pair without change has `is_distractor=True`. The id of a pair is the file name of its before image without
suffix; if these names are not distinct, `make_default_ids` makes other ids. Pairs are in the order of the file.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.datasets.checks import find_file, get_text, make_default_ids
from diffcap.datasets.no_change import is_no_change
from diffcap.records import SPLITS, ChangePair, read_json
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import existing_path

_CHANGE_FLAGS = {0: 0, 1: 1, "0": 0, "1": 1}  # valid value of "changeflag" -> flag
_FORM_HINT = 'the form is {"images": [{"filename", "split", "sentences"}, ...]}'


@dataclass(frozen=True)
class ImageLayout:
    """Patterns of image paths, relative to the dataset's folder. {folder} is the `filepath` of an entry, {name} the `filename`."""

    before: str
    after: str
    mask: str = ""  # an image in which 0 means "not changed"; "" if the dataset has no masks


LEVIR_LAYOUT = ImageLayout("images/{folder}/A/{name}", "images/{folder}/B/{name}", "images/{folder}/label/{name}")


def read_levir_cc(folder: Path, all_masks: bool = False) -> list[ChangePair]:
    """Read LEVIR-CC (Liu et al., TGRS 2022), which has Google Earth images, 0.5 m per pixel, and five captions for each pair.

        LevirCCcaptions.json                  captions; the numbers in the names of the images have gaps
        images/train/A/train_000001.png       before image; the after image is in B; val and test have the same folders

    Older copies of the captions have no `changeflag`. But all pairs without change have the same five sentences, so the flag that is
    derived from them is always right. `read_files` explains `all_masks`.
    """
    captions_file = find_file(folder, "LevirCCcaptions.json", "LevirCCcaptions_v1.json")
    return read_files(folder, {captions_file: ""}, LEVIR_LAYOUT, all_masks=all_masks)


def read_levir_mci(folder: Path) -> list[ChangePair]:
    """Read LEVIR-MCI (Liu et al., TGRS 2024), which has the files of LEVIR-CC, and a mask of the change for each pair (`extra["mask"]`).

        images/train/label/train_000001.png   mask; a changed pixel is 128 for a road or 255 for a building, others are 0

    A mask may disagree with `changeflag`, which describes the captions. `diffcap audit` lists such pairs.
    """
    pairs = read_levir_cc(folder, all_masks=True)
    if unmasked_pair := next((pair for pair in pairs if "mask" not in pair.extra), None):
        raise DiffcapError(
            f"{folder}: the {unmasked_pair.split} images have no folder label, which holds the masks of LEVIR-MCI; fetch it, or read the "
            "folder as DATASET=levir_cc."
        )
    return pairs


def read_tiles(folder: Path) -> list[ChangePair]:
    """Read the rendered dataset `tiles`: files as in LEVIR-MCI, and `facts.json`.

    `facts.json` has for each pair its change type, the boxes of what changed, and the facts that its captions state.
    """
    facts_file = folder / "facts.json"
    facts = read_json(facts_file, "facts")
    pairs = []
    for pair in read_levir_cc(folder, all_masks=True):
        entry = facts.get(pair.id) if isinstance(facts, dict) else None
        if not isinstance(entry, dict):
            raise DiffcapError(f"{facts_file}: has no object for the pair {pair.id!r}; render the folder again.")
        extra = {key: entry[key] for key in ("boxes", "facts") if key in entry}
        pairs.append(replace(pair, change_type=entry.get("change_type"), extra={**pair.extra, **extra}))
    return pairs


def read_whu_cdc(folder: Path) -> list[ChangePair]:
    """Read WHU-CDC, which has aerial images of Christchurch, the masks of WHU-CD, and five captions for each pair.

        whuCCcaptions.json                    captions; the numbers in the names of the images continue from split to split
        images/train/A/train_000004.png       before image; B has the after image, label the mask

    The folders `images/val` and `images/test` have the same subfolders.
    """
    return read_files(folder, {folder / "whuCCcaptions.json": ""}, LEVIR_LAYOUT)


def read_second_cc(folder: Path, augmented: bool = False) -> list[ChangePair]:
    """Read SECOND-CC (Karaca et al., JSTARS 2025), which has images of 0.3 to 3 m per pixel, and five captions for each pair.

        SECOND-CC-AUG.json                    the 6,041 pairs, and augmented pairs, whose names contain `_random_augment`
        train/rgb/A, train/rgb/B              before and after images; val and test have the same folders
        train/sem/A, train/sem/B              semantic maps as colour images, which are not read

    Args:
        augmented: also return the augmented pairs of train, with `extra["augmented"]`. Those of val and test are never returned.
    """
    pairs = []
    layout = ImageLayout("{folder}/rgb/A/{name}", "{folder}/rgb/B/{name}")
    for pair in read_files(folder, {folder / "SECOND-CC-AUG.json": ""}, layout):
        if "_random_augment" not in PurePosixPath(pair.before).name:
            pairs.append(pair)
        elif augmented and pair.split == "train":
            pair.extra["augmented"] = True
            pairs.append(pair)
    return pairs


def read_dubai_cc(folder: Path) -> list[ChangePair]:
    """Read Dubai-CC (Hoxha et al., TGRS 2022), which has Landsat images of Dubai, 50 x 50 pixels, and five captions for each pair.

        description_jsontr_te_val/Train_Dubai_CC.json, Validation_Dubai_CC.json, Test_Dubai_CC.json    or in captions/
        imgs_tiles/RGB/500_2000/<filename>    before image, a .tif file; the after image is in 500_2010

    These are the files in the authors' folder `datasetDubaiCCPublic`. The sentences keep their capital first letters. The files have no
    `changeflag`, so a pair counts as unchanged if any of its captions states that nothing has changed.
    """
    captions_file = find_file(folder, "description_jsontr_te_val/Train_Dubai_CC.json", "captions/Train_Dubai_CC.json")
    names = [f"{name}_Dubai_CC.json" for name in ("Train", "Validation", "Test")]
    split_of_file = {captions_file.with_name(name): split for name, split in zip(names, SPLITS)}
    layout = ImageLayout("imgs_tiles/RGB/500_2000/{name}", "imgs_tiles/RGB/500_2010/{name}")
    return read_files(folder, split_of_file, layout, unchanged_if=any)


# A pair without id and paths, with its place (the file and the number of its entry, for messages) and the values of {folder} and {name}.
_Entry = tuple[str, dict[str, str], ChangePair]


def read_files(
    root: Path,
    split_of_file: Mapping[Path, str],
    *layouts: ImageLayout,
    unchanged_if: Callable[[Iterable[bool]], bool] = all,
    all_masks: bool = False,
) -> list[ChangePair]:
    """Read the pairs of a dataset from JSON files. If the mask of a pair exists, its path is in `extra["mask"]`.

    Args:
        root: the dataset's folder.
        split_of_file: JSON file -> split of its entries; "" if the entries name their splits.
        layouts: where the images may be. The first layout with an existing before image is used; without such a layout, `layouts[0]`.
        unchanged_if: `all` or `any`. An entry without `changeflag` is unchanged if all, or any, of its captions state that.
        all_masks: set `extra["mask"]` of all pairs if the folder of masks exists, so that the data stage reports missing masks.
    """
    entries: list[_Entry] = []
    for json_file, split in split_of_file.items():
        content = read_json(json_file, "captions", "fetch it again, or fix it")
        rows = content.get("images") if isinstance(content, dict) else None
        if not isinstance(rows, list):
            raise DiffcapError(f'{json_file}: "images" must be a list; {_FORM_HINT}.')
        for number, row in enumerate(rows, 1):
            entries.append(_read_entry(row, f"{json_file}, entry {number}", split, unchanged_if))
    paths = ((layout, root / layout.before.format(**names)) for layout in layouts for _, names, _ in entries)
    layout = next((layout for layout, path in paths if existing_path(path).is_file()), layouts[0])
    place_of_image: dict[str, str] = {}
    image_paths = [(layout.before.format(**names), layout.after.format(**names)) for _, names, _ in entries]
    pairs = []
    for (place, names, pair), (before, after), pair_id in zip(entries, image_paths, make_default_ids(image_paths)):
        if before in place_of_image:
            raise DiffcapError(
                f"{place}: the image {before!r} is already used in {place_of_image[before]}; keep one of the two."
            )
        place_of_image[before] = place
        mask = layout.mask.format(**names)
        # `existing_path` finds a file whose name has another Unicode normal form on the disk.
        if mask and (existing_path(root / mask).is_file() or (all_masks and (root / mask).parent.is_dir())):
            pair.extra["mask"] = mask
        pairs.append(replace(pair, id=pair_id, before=before, after=after))
    return pairs


def _read_entry(row: Any, place: str, split: str, unchanged_if: Callable[[Iterable[bool]], bool]) -> _Entry:
    if not isinstance(row, dict):
        raise DiffcapError(f"{place}: must be an object, found {row!r:.60}; {_FORM_HINT}.")
    file_name = get_text(row, "filename", place)
    raw_split = split or get_text(row, "split" if "split" in row or "filepath" not in row else "filepath", place)
    folder = get_text(row, "filepath", place) if "filepath" in row else raw_split
    split = "train" if raw_split == "restval" else raw_split
    if split not in SPLITS:
        raise DiffcapError(f"{place}: unknown split {raw_split!r:.60}; it must be one of {', '.join(SPLITS)}, restval.")
    sentences = row.get("sentences")
    if not isinstance(sentences, list):
        raise DiffcapError(f'{place}: "sentences" must be a list, found {sentences!r:.60}; {_FORM_HINT}.')
    captions = []
    for number, sentence in enumerate(sentences, 1):
        tokens, raw = (sentence.get(key) if isinstance(sentence, dict) else None for key in ("tokens", "raw"))
        if isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens):
            captions.append(" ".join(tokens))
        elif tokens is None and isinstance(raw, str):
            captions.append(raw.strip().removesuffix(".").rstrip())
        else:
            raise DiffcapError(
                f'{place}, sentence {number}: needs "tokens" (words) or "raw" (text), found {sentence!r:.60}; fix it.'
            )
    change_flag = row.get("changeflag")
    if change_flag is None:
        is_unchanged = bool(captions) and unchanged_if(map(is_no_change, captions))
        extra = {"changeflag": int(not is_unchanged), "changeflag_derived": True}
    elif isinstance(change_flag, int | str) and change_flag in _CHANGE_FLAGS:
        extra = {"changeflag": _CHANGE_FLAGS[change_flag]}
    else:
        raise DiffcapError(f'{place}: "changeflag" must be 0 or 1, found {change_flag!r:.60}; fix it.')
    pair = ChangePair("", "", "", captions, split, is_distractor=not extra["changeflag"], extra=extra)
    return place, {"folder": folder, "name": file_name}, pair
