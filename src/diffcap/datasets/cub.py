"""CUB-200-2011 (Wah et al., 2011) with the captions of Reed et al. (CVPR 2016): single images with ten sentences each.

    images.txt                       "1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg", one line per image
    images/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
    text_c10/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.txt   ten sentences, one per line
    testclasses.txt                  the 50 held-out classes, "004.Groove_billed_Ani", one per line

`images.txt` and `images/` are in the archive `CUB_200_2011/`, `text_c10/` and `testclasses.txt` in the archive
`cvpr2016_cub/`. The folder holds the two unpacked archives or their contents. The split is by class, as in L2C and IDC-PCL:
150 classes for "train" and the 50 held-out classes for "val" (8,855 and 2,933 images).

`images.txt` is optional if only the captions are needed. Without it, the images are those with captions, sorted by name.
"""

from pathlib import Path

from diffcap.datasets import pcl_single_images
from diffcap.datasets.checks import check_inside, numbered_lines
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

CAPTIONS = ("text_c10", "cvpr2016_cub/text_c10", "CUB_200_2011/text_c10")
HELD_OUT = ("testclasses.txt", "cvpr2016_cub/testclasses.txt", "CUB_200_2011/testclasses.txt")
_IMAGES = "unpack CUB_200_2011.tgz into this folder"
_TEXTS = "unpack the captions of Reed et al. (cvpr2016_cub) into this folder"


def read(folder: Path) -> list[ChangePair]:
    """Read one record per image (`after` is None), sorted by split, then in the order of the list.

    If the folder holds IDC-PCL's JSON lines and no captions of Reed et al., the JSON lines are read (`pcl_single_images`).
    """
    if pcl_single_images.has_train_file(folder) and not any((folder / name).exists() for name in CAPTIONS):
        return pcl_single_images.read_cub(folder)
    home = folder / "CUB_200_2011" if (folder / "CUB_200_2011/images.txt").is_file() else folder
    texts = _first(folder, CAPTIONS, "captions", _TEXTS)
    held_out = {line for _, line in numbered_lines(_first(folder, HELD_OUT, "list of held-out classes", _TEXTS))}
    pairs, bare, classes = [], [], set()
    if (home / "images.txt").is_file():
        listed = _listed(home / "images.txt")
    else:
        listed = sorted(file.relative_to(texts).with_suffix(".jpg").as_posix() for file in texts.glob("*/*.txt"))
    for path in listed:
        species = path.partition("/")[0]
        classes.add(species)
        image = (home / "images" / path).relative_to(folder).as_posix()
        file = (texts / path).with_suffix(".txt")
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        text = text.replace("\ufffd", " ")  # a few files have invalid bytes in place of spaces
        captions = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
        if not captions:
            bare.append(file)
        split = "val" if species in held_out else "train"
        pairs.append(ChangePair(path.removesuffix(".jpg"), image, None, captions, split, extra={"species": species}))
    if bare:
        raise DiffcapError(
            f"{bare[0]}: the file is missing or empty ({len(bare)} of {len(pairs)} images have no sentences); {_TEXTS} again."
        )
    if pairs and not classes & held_out:
        raise DiffcapError(
            f"{_first(folder, HELD_OUT, '', '')}: no image has one of these classes, so there is no validation split; "
            "fetch this file and the list of images again."
        )
    return sorted(pairs, key=lambda pair: pair.split)


def _listed(path: Path) -> list[str]:
    """Name "<class>/<image>.jpg" of every line."""
    found = []
    for where, line in numbered_lines(path, _IMAGES):
        number, _, name = line.partition(" ")
        species, _, image = name.partition("/")
        if not number.isdigit() or not image.endswith(".jpg") or not species:
            raise DiffcapError(f'{where}: expected "<number> <class>/<image>.jpg", found {line!r:.80}; fix that line.')
        check_inside(name, where)  # before the file of its sentences is opened
        found.append(name)
    return found


def _first(folder: Path, names: tuple[str, ...], what: str, remedy: str) -> Path:
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise DiffcapError(f"{folder}: no {what} there ({names[0]}); {remedy}.")
    return found
