"""The JSON form of Karpathy's splits, and the datasets of remote-sensing change captioning, which have it.

    {"images": [{"filepath": "train", "filename": "train_000001.png", "split": "train", "changeflag": 1,
                 "sentences": [{"tokens": ["a", "road", "is", "built"], "raw": " a road is built ."}, ...]}, ...]}

* `split`: "train", "val" or "test"; "restval" counts as train. Without it, `filepath` is the split.
* `filepath`: the folder of the images, see `Layout`; by default the split.
* `sentences`: a caption is its `tokens` joined by spaces; without tokens, its `raw` text without spaces at both ends and
  without the final full stop.
* `changeflag`: 1 if something has changed, 0 if not. Without it, the flag is derived from the captions
  (`diffcap.datasets.no_change`), and the manifest has `changeflag_derived`.

Other keys are not read. A pair without change has `is_distractor`; the scores call the two groups "change" and "no_change". The id
of a pair is its file name without suffix, see `diffcap.datasets.checks.default_ids`. Pairs are in the order of the file.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from diffcap.datasets.checks import default_ids, first_file, note_once, text_of
from diffcap.datasets.no_change import is_no_change
from diffcap.records import SPLITS, ChangePair, is_blank, read_json
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import existing_path

_FLAGS = {0: 0, 1: 1, "0": 0, "1": 1}
_FORM = 'the form is {"images": [{"filename", "split", "sentences"}, ...]}'


@dataclass(frozen=True)
class Layout:
    """Where a dataset has its images: paths relative to its folder; {folder} is an entry's `filepath`, {name} its `filename`."""

    before: str
    after: str
    mask: str = ""  # of the change (0: nothing changed); "" if the dataset has none


LEVIR = Layout("images/{folder}/A/{name}", "images/{folder}/B/{name}", "images/{folder}/label/{name}")


def read_levir_cc(folder: Path, all_masks: bool = False) -> list[ChangePair]:
    """LEVIR-CC (Liu et al., TGRS 2022): Google Earth images, 0.5 m per pixel, five captions for each pair.

        LevirCCcaptions.json                  the numbers in the names have gaps
        images/train/A/train_000001.png       before; B: after; val and test likewise

    Two versions of the file exist; the first one has no `changeflag`. The five captions of every pair without change are the same five
    sentences, so that the derived flag is the released one.
    """
    path = first_file(folder, "LevirCCcaptions.json", "LevirCCcaptions_v1.json")
    return read_files(folder, {path: ""}, LEVIR, all_masks=all_masks)


def read_levir_mci(folder: Path) -> list[ChangePair]:
    """LEVIR-MCI (Liu et al., TGRS 2024): the files of LEVIR-CC, with a mask of the change for each pair (`extra["mask"]`).

        images/train/label/train_000001.png   mask; 0: nothing, 128: road, 255: building

    A mask may disagree with `changeflag`, which belongs to the captions; `diffcap audit` lists such pairs.
    """
    pairs = read_levir_cc(folder, all_masks=True)
    without = next((pair for pair in pairs if "mask" not in pair.extra), None)
    if without:
        raise DiffcapError(
            f"{folder}: the {without.split} images have no folder label, which holds the masks of LEVIR-MCI; fetch it, or read the "
            "folder as DATASET=levir_cc."
        )
    return pairs


def read_tiles(folder: Path) -> list[ChangePair]:
    """`tiles`: the files of LEVIR-MCI, and `facts.json` with change type, boxes and facts (`diffcap.worlds.tiles.write`)."""
    path = folder / "facts.json"
    facts = read_json(path, "facts")
    pairs = []
    for pair in read_levir_cc(folder, all_masks=True):
        entry = facts.get(pair.id) if isinstance(facts, dict) else None
        if not isinstance(entry, dict):
            raise DiffcapError(f"{path}: has no object for the pair {pair.id!r}; render the folder again.")
        extra = {key: entry[key] for key in ("boxes", "facts") if key in entry}
        pairs.append(replace(pair, change_type=entry.get("change_type"), extra={**pair.extra, **extra}))
    return pairs


def read_whu_cdc(folder: Path) -> list[ChangePair]:
    """WHU-CDC: aerial images of Christchurch with the masks of WHU-CD, five captions for each pair.

    whuCCcaptions.json                    one sequence of numbers runs over all splits
    images/train/A/train_000004.png       before; B: after; label: mask of the change; val and test likewise
    """
    return read_files(folder, {folder / "whuCCcaptions.json": ""}, LEVIR)


def read_second_cc(folder: Path, augmented: bool = False) -> list[ChangePair]:
    """SECOND-CC (Karaca et al., JSTARS 2025): images of 0.3 to 3 m per pixel, five captions for each pair.

        SECOND-CC-AUG.json                    the 6,041 pairs, and augmented training views: their names contain `_random_augment`
        train/rgb/A, train/rgb/B              before, after; val and test likewise
        train/sem/A, train/sem/B              semantic maps as colour images; not read

    Args:
        augmented: also give the augmented training views, which have `extra["augmented"]`; val and test never have them.
    """
    pairs = []
    layout = Layout("{folder}/rgb/A/{name}", "{folder}/rgb/B/{name}")
    for pair in read_files(folder, {folder / "SECOND-CC-AUG.json": ""}, layout):
        if "_random_augment" not in PurePosixPath(pair.before).name:
            pairs.append(pair)
        elif augmented and pair.split == "train":
            pair.extra["augmented"] = True
            pairs.append(pair)
    return pairs


def read_dubai_cc(folder: Path) -> list[ChangePair]:
    """Dubai-CC (Hoxha et al., TGRS 2022): Landsat 7 tiles of Dubai from 2000 and 2010, 50 x 50 pixels, five captions for each pair.

        description_jsontr_te_val/Train_Dubai_CC.json, Validation_Dubai_CC.json, Test_Dubai_CC.json    or in captions/
        imgs_tiles/RGB/500_2000/<filename>    before; 500_2010: after; both are .tif

    This is the content of `datasetDubaiCCPublic/`. The sentences have capital first letters, which are kept. The files have no
    `changeflag`: a pair has no change if any of its captions is a no-change sentence.
    """
    homes = [folder / "description_jsontr_te_val", folder / "captions"]
    home = next(filter(Path.is_dir, homes), homes[0])
    files = {home / f"{name}_Dubai_CC.json": split for name, split in zip(("Train", "Validation", "Test"), SPLITS)}
    layout = Layout("imgs_tiles/RGB/500_2000/{name}", "imgs_tiles/RGB/500_2010/{name}")
    return read_files(folder, files, layout, unchanged_if=any)


class _Entry(NamedTuple):
    """An entry of the file; `where` is the file and the number, for messages."""

    where: str
    folder: str
    name: str
    split: str
    captions: list[str]
    extra: dict[str, Any]

    def path(self, pattern: str) -> str:
        return pattern.format(folder=self.folder, name=self.name)


def read_files(
    root: Path,
    files: Mapping[Path, str],
    *layouts: Layout,
    unchanged_if: Callable[[Iterable[bool]], bool] = all,
    all_masks: bool = False,
) -> list[ChangePair]:
    """Read the pairs of a dataset; the path of a mask is in `extra["mask"]` if the file exists.

    Args:
        root: the dataset's folder.
        files: JSON file -> split of its entries; "" if the entries name their splits.
        layouts: where the images may be. Of several, the first one is used in which any image exists, or the first of all.
        unchanged_if: `all` or `any`: which captions of an unchanged pair without `changeflag` are no-change sentences.
        all_masks: whether each pair has a mask where the folder of the masks exists. The data stage then finds missing files.
    """
    entries: list[_Entry] = []
    for path, split in files.items():
        value = read_json(path, "captions", "fetch it again, or fix it")
        rows = value.get("images") if isinstance(value, dict) else None
        if not isinstance(rows, list):
            raise DiffcapError(f'{path}: "images" must be a list; {_FORM}.')
        entries += (_entry(row, f"{path}, entry {number}", split, unchanged_if) for number, row in enumerate(rows, 1))
    layout = layouts[0]
    if len(layouts) > 1:
        exists = (one for one in layouts for entry in entries if existing_path(root / entry.path(one.before)).is_file())
        layout = next(exists, layout)
    masked = {entry.folder for entry in entries if layout.mask}
    masked = {folder for folder in masked if (root / layout.mask.format(folder=folder, name="")).is_dir()}
    seen: dict[str, str] = {}
    images = [(entry.path(layout.before), entry.path(layout.after)) for entry in entries]
    for entry, (before, _) in zip(entries, images):
        note_once(seen, before, entry.where, "the image")
        if entry.folder in masked and (all_masks or existing_path(root / entry.path(layout.mask)).is_file()):
            entry.extra["mask"] = entry.path(layout.mask)
    return [
        ChangePair(
            id, *paths, entry.captions, entry.split, is_distractor=not entry.extra["changeflag"], extra=entry.extra
        )
        for id, entry, paths in zip(default_ids(images), entries, images)
    ]


def _entry(row: Any, where: str, split: str, unchanged_if: Callable[[Iterable[bool]], bool]) -> _Entry:
    if not isinstance(row, dict):
        raise DiffcapError(f"{where}: must be an object, found {row!r:.60}; {_FORM}.")
    name = text_of(row, "filename", where)
    split_name = split or text_of(row, "split" if "split" in row or "filepath" not in row else "filepath", where)
    folder = text_of(row, "filepath", where) if "filepath" in row else split_name
    split = "train" if split_name == "restval" else split_name
    if split not in SPLITS:
        raise DiffcapError(
            f"{where}: unknown split {split_name!r:.60}; it must be one of {', '.join(SPLITS)}, restval."
        )
    rows = row.get("sentences")
    if not isinstance(rows, list):
        raise DiffcapError(f'{where}: "sentences" must be a list, found {rows!r:.60}; {_FORM}.')
    captions = [_caption(sentence, f"{where}, sentence {number}") for number, sentence in enumerate(rows, 1)]
    flag = row.get("changeflag")
    if flag is None:
        unchanged = bool(captions) and unchanged_if(map(is_no_change, captions))
        extra = {"changeflag": int(not unchanged), "changeflag_derived": True}
    elif isinstance(flag, int | str) and flag in _FLAGS:
        extra = {"changeflag": _FLAGS[flag]}
    else:
        raise DiffcapError(f'{where}: "changeflag" must be 0 or 1, found {flag!r:.60}; fix it.')
    return _Entry(where, folder, name, split, captions, extra)


def _caption(sentence: Any, where: str) -> str:
    tokens, raw = (sentence.get(key) if isinstance(sentence, dict) else None for key in ("tokens", "raw"))
    if isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens):
        text = " ".join(tokens)
    elif tokens is None and isinstance(raw, str):
        text = raw.strip().removesuffix(".").rstrip()
    else:
        raise DiffcapError(f'{where}: needs "tokens" (words) or "raw" (text), found {sentence!r:.60}; fix it.')
    if is_blank(text):
        raise DiffcapError(f"{where}: is blank; fill it or delete it.")
    return text
