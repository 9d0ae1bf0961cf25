"""CUB-200-2011 (Wah et al., 2011) with the captions of Reed et al. (CVPR 2016): single images with ten sentences each.

    images.txt                       "1 001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg", a line an image
    images/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.jpg
    text_c10/001.Black_footed_Albatross/Black_Footed_Albatross_0046_18.txt   ten sentences, a line each
    testclasses.txt                  the 50 classes that are held out, "004.Groove_billed_Ani", a line each

`images.txt` and `images/` are the images' archive, `CUB_200_2011/`; `text_c10/` and `testclasses.txt` come with the
captions, `cvpr2016_cub/`. Both archives may be unpacked into the folder as they are, or their contents put there. The
split is by class, 150 for "train" and the 50 held-out ones for "val" (8,855 and 2,933 images): L2C's, and IDC-PCL's.
"""

from pathlib import Path

from diffcap.errors import DiffcapError
from diffcap.records import ChangePair

CAPTIONS = ("text_c10", "cvpr2016_cub/text_c10", "CUB_200_2011/text_c10")
HELD_OUT = ("testclasses.txt", "cvpr2016_cub/testclasses.txt", "CUB_200_2011/testclasses.txt")
_IMAGES = "unpack CUB_200_2011.tgz into this folder"
_TEXTS = "unpack the captions of Reed et al. (cvpr2016_cub) into this folder"


def read(folder: Path) -> list[ChangePair]:
    """An image a record, without a second one; by split, then in the order of `images.txt`.

    Raises:
        DiffcapError: a list is missing or malformed, or an image has no sentence.
    """
    home = folder / "CUB_200_2011" if (folder / "CUB_200_2011/images.txt").is_file() else folder
    texts = _first(folder, CAPTIONS, "captions", _TEXTS)
    held_out = {line for _, line in numbered_lines(_first(folder, HELD_OUT, "list of held-out classes", _TEXTS))}
    pairs, bare, classes = [], [], set()
    for where, line in numbered_lines(home / "images.txt", _IMAGES):
        number, _, path = line.partition(" ")
        species, _, name = path.partition("/")
        if not number.isdigit() or not name.endswith(".jpg") or not species:
            raise DiffcapError(f'{where}: expected "<number> <class>/<image>.jpg", found {line!r:.80}; mend that line.')
        classes.add(species)
        image = (home / "images" / path).relative_to(folder).as_posix()
        file = (texts / path).with_suffix(".txt")
        captions = _sentences(file) if file.is_file() else []
        if not captions:
            bare.append(file)
        split = "val" if species in held_out else "train"
        pairs.append(ChangePair(path.removesuffix(".jpg"), image, None, captions, split, extra={"species": species}))
    if bare:
        raise DiffcapError(f"{bare[0]}: no sentences there, as for {len(bare)} of {len(pairs)} images; {_TEXTS} again.")
    if pairs and not classes & held_out:
        raise DiffcapError(
            f"{_first(folder, HELD_OUT, '', '')}: none of its classes is in images.txt, so nothing would be validated "
            "on; fetch both again."
        )
    return sorted(pairs, key=lambda pair: pair.split)


def numbered_lines(path: Path, remedy: str = "fetch it again") -> list[tuple[str, str]]:
    """("<path>, line <number>", its text without blanks around it) for every line that is not blank.

    Raises:
        DiffcapError: no such file, or no text.
    """
    if not path.is_file():
        raise DiffcapError(f"{path}: no such list; {remedy}.")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DiffcapError(f"{path}: not UTF-8 text (byte {error.start}); fetch it again.") from None
    return [(f"{path}, line {number}", line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _first(folder: Path, names: tuple[str, ...], what: str, remedy: str) -> Path:
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise DiffcapError(f"{folder}: no {what} there ({names[0]}); {remedy}.")
    return found


def _sentences(file: Path) -> list[str]:
    """A few files hold bytes that are no letters; each stands where a blank should."""
    text = file.read_text(encoding="utf-8", errors="replace").replace("\ufffd", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]
