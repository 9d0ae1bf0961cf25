"""The JSON form of Karpathy's splits, which the datasets of remote-sensing change captioning have.

    {"images": [{"filepath": "train", "filename": "train_000001.png", "split": "train", "changeflag": 1,
                 "sentences": [{"tokens": ["a", "road", "is", "built"], "raw": " a road is built ."}, ...]}, ...]}

* `split`: "train", "val" or "test"; "restval" counts as train. Without it, `filepath` is the split.
* `filepath`: the folder of the images, see `Layout`; by default the split.
* `sentences`: a caption is its `tokens` joined by blanks; without tokens, its `raw` text without blanks at both ends and
  without the final full stop.
* `changeflag`: 1 if something has changed, 0 if not. Without it, the flag is derived from the captions
  (`diffcap.datasets.no_change`), and the manifest has `changeflag_derived`.

Other keys are not read. A pair without change has `is_distractor`; the scores call the two groups "change" and "no_change". The id
of a pair is its file name without suffix, see `diffcap.datasets.pairs.default_ids`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diffcap.datasets.checks import note_once, text_of
from diffcap.datasets.no_change import is_no_change
from diffcap.datasets.pairs import default_ids
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
    """Read the pairs of a dataset, in the order of the files and of their entries.

    The path of a mask is in `extra["mask"]` if the file exists.

    Args:
        root: the dataset's folder.
        files: JSON file -> split of its entries; "" if the entries name their splits.
        layouts: where the images may be. Of several, the first one is used in which any image exists, or the first of all.
        unchanged_if: `all` or `any`: which captions of a pair without `changeflag` must be no-change sentences, so that the pair
            has no change.
        all_masks: whether each pair has a mask where the folder of the masks exists. The data stage then finds missing files.
    """
    entries = [
        _entry(row, f"{path}, entry {number}", split, unchanged_if)
        for path, split in files.items()
        for number, row in enumerate(_rows(path), 1)
    ]
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


def notes(pairs: list[ChangePair]) -> list[str]:
    """Remarks on the files, which the data stage prints and stores."""
    derived = sum("changeflag_derived" in pair.extra for pair in pairs)
    masks = sum("mask" in pair.extra for pair in pairs)
    remarks = [f"{derived:,} pairs have no changeflag; it is derived from their captions"] if derived else []
    counted = f"{masks:,}" if masks == len(pairs) else f"{masks:,} of {len(pairs):,}"
    return [*remarks, *([f"{counted} pairs have a mask of the change"] if masks else [])]


def _rows(path: Path) -> list[Any]:
    value = read_json(path, "captions", "fetch it again, or fix it")
    images = value.get("images") if isinstance(value, dict) else None
    if not isinstance(images, list):
        raise DiffcapError(f'{path}: "images" must be a list; {_FORM}.')
    return images


def _entry(row: Any, where: str, split: str, unchanged_if: Callable[[Iterable[bool]], bool]) -> _Entry:
    if not isinstance(row, dict):
        raise DiffcapError(f"{where}: must be an object, found {row!r:.60}; {_FORM}.")
    name = text_of(row, "filename", where)
    given = split or text_of(row, "split" if "split" in row or "filepath" not in row else "filepath", where)
    folder = text_of(row, "filepath", where) if "filepath" in row else given
    split = "train" if given == "restval" else given
    if split not in SPLITS:
        raise DiffcapError(f"{where}: unknown split {given!r:.60}; it must be one of {', '.join(SPLITS)}, restval.")
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
