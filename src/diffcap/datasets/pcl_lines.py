"""CLEVR-Change as IDC-PCL's authors preprocessed it: JSON lines, one per pair, and a dictionary.

    train.json, val.json, test.json   {"img1": "CLEVR_default_000123", "img2": "CLEVR_semantic_000123", "sentences": [...]}
    dict.json                         {"the": 17, ...}, optional
    full/img.pkl, sc_img.pkl, nsc_img.pkl   features, see `diffcap.features.authors`

The image names may have an extension. The second part of `img2` tells whether the pair is a change ("semantic") or a distractor
("nonsemantic"). Ids and image paths are converted to the official ones, so that scores and features fit both formats.
"""

import re
from pathlib import Path

from diffcap.datasets.checks import note_once, read_object, sentences
from diffcap.records import SPLITS, ChangePair, read_json_lines
from diffcap.text.vocabulary import SPECIALS, build_vocabulary
from diffcap.utils.console import echo
from diffcap.utils.errors import DiffcapError

_NAME = re.compile(r"CLEVR_(default|semantic|nonsemantic)_(\d{1,9})(?:\.png)?")
_FOLDERS = {"semantic": "sc_images", "nonsemantic": "nsc_images"}


def has_layout(folder: Path) -> bool:
    """Whether a folder contains these files and not the official ones."""
    return (folder / "train.json").is_file() and not (folder / "change_captions.json").is_file()


def read(folder: Path, change_types: dict[str, str]) -> list[ChangePair]:
    """Read the pairs, sorted by split, then in the order of the lines.

    Args:
        change_types: file name ("000123.png") -> change type, from `type_mapping.json`; may be empty.
    """
    pairs: list[ChangePair] = []
    seen: dict[str, str] = {}
    for split in SPLITS:
        for where, row in read_json_lines(folder / f"{split}.json", "annotations", "put IDC-PCL's three files here"):
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
            after = f"{_FOLDERS[kind]}/CLEVR_{kind}_{file}"
            change = None if distractor else change_types.get(file)
            before = f"images/CLEVR_default_{file}"
            pairs.append(ChangePair(name, before, after, captions, split, change, distractor))
    _check_dictionary(folder / "dict.json", pairs)
    return pairs


def _check_dictionary(path: Path, pairs: list[ChangePair]) -> None:
    """Print the difference between the authors' dictionary and the words of the training captions, if there is one."""
    if not path.is_file():
        return
    words = read_object(path, "dictionary", "fetch it again, or delete it")
    in_captions = set(
        build_vocabulary(caption for pair in pairs if pair.split == "train" for caption in pair.captions).words
    )
    in_dictionary = set(words) - set(SPECIALS)
    if in_captions != in_dictionary:
        examples = ", ".join(sorted(in_captions ^ in_dictionary)[:3])
        echo(
            f"{path}: has {len(in_dictionary):,} words, the training captions {len(in_captions):,} (not in both: {examples})"
        )
