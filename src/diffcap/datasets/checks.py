"""Reading and checks that several readers use."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.records import ChangePair, is_blank, read_json
from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import url_of


def first_file(folder: Path, *names: str) -> Path:
    """Return the first of these files that is in a folder, or the path of the first name if none is."""
    return next((folder / name for name in names if (folder / name).is_file()), folder / names[0])


def read_object(path: Path, what: str, remedy: str = "fetch it again") -> dict[str, Any]:
    """Read a JSON file that is an object; `what` (its content) and the remedy are for messages."""
    value = read_json(path, what, remedy)
    if not isinstance(value, dict):
        raise DiffcapError(f"{path}: expected a JSON object, found {type(value).__name__}; fetch it again.")
    return value


def read_entries(path: Path, what: str, remedy: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("<path>, entry <number>", entry) of a JSON file that is a list of objects."""
    rows = read_json(path, what, remedy)
    if not isinstance(rows, list):
        raise DiffcapError(f"{path}: expected a list of {what}, found {type(rows).__name__}; fetch it again.")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DiffcapError(f"{path}, entry {number}: must be an object, found {row!r:.60}; fix it.")
        yield f"{path}, entry {number}", row


def default_ids(images: Sequence[Sequence[str]]) -> list[str]:
    """Make the ids of the pairs of a file without ids, from the paths of both images.

    All ids have the same form, the first of these whose ids are distinct: the file name of the before image without suffix; its path
    without suffix; both file names without suffix, joined by "-"; the number of the pair, with six digits.

    Example:
        >>> default_ids([("1.jpg", "2.jpg"), ("1.jpg", "3.jpg")])
        ['1-2', '1-3']
    """
    paths = [[PurePosixPath(path) for path in pair] for pair in images]
    forms = (
        [before.stem for before, _ in paths],
        [str(before.parent / before.stem) for before, _ in paths],
        [f"{before.stem}-{after.stem}" for before, after in paths],
    )
    for ids in forms:
        if len(set(ids)) == len(ids) and not any(map(is_blank, ids)):
            return ids
    return [f"{number:06d}" for number in range(1, len(paths) + 1)]


def text_of(row: dict[str, Any], key: str, where: str) -> str:
    """Return the value of a key, which must be a string with a visible character."""
    value = row.get(key)
    if not isinstance(value, str) or is_blank(value):
        found = f"{value!r:.60}" if key in row else "nothing"
        raise DiffcapError(f'{where}: "{key}" must be a string, found {found}; fix it.')
    return value


def sentences(value: object, where: str, key: str) -> list[str]:
    """Return the value of a key, which must be a list of strings; `where` is the file, and the line or entry."""
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise DiffcapError(f'{where}: "{key}" must be a list of sentences, found {value!r:.60}; fix it.')
    return value


def token_captions(value: object, where: str, key: str) -> list[str]:
    """Return captions from IDC-PCL's format: one caption as a list of words, or several as a list of such lists."""
    captions: list[Any] = value if isinstance(value, list) and value else [None]
    if isinstance(captions[0], str):
        captions = [captions]
    for tokens in captions:
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise DiffcapError(
                f'{where}: "{key}" must be a list of words or a list of such lists, none empty, found {value!r:.60}; fix that line.'
            )
    return [" ".join(tokens) for tokens in captions]


def note_once(seen: dict[str, str], name: str, where: str, what: str, remedy: str = "keep one of the two") -> None:
    """Add a name that must be unique to `seen`, name -> where it was found; `what` ("the uid") and the remedy are for the message."""
    if name in seen:
        raise DiffcapError(f"{where}: {what} {name!r} is already used in {seen[name]}; {remedy}.")
    seen[name] = where


def check_split(pair: ChangePair, split: str, where: str) -> None:
    """Refuse a pair, or an image, that is in two splits."""
    if pair.split != split:
        raise DiffcapError(f"{where}: {pair.id} is in {split} here and in {pair.split} before; keep one.")


def check_inside(path: str, where: str) -> None:
    """Refuse a path that is a URL, or leads out of its folder."""
    if url := url_of(path):
        raise DiffcapError(
            f"{where}: {url:.200} is a URL; download the image, and write its path relative to the dataset's folder."
        )
    if path.startswith("/") or ".." in path.split("/"):
        raise DiffcapError(
            f"{where}: the path {path!r:.60} leads out of the dataset's folder; write it relative to that folder, without '..'."
        )


def numbered_lines(path: Path, remedy: str = "fetch it again") -> list[tuple[str, str]]:
    """Return ("<path>, line <number>", stripped text) of every line that is not blank."""
    if not path.is_file():
        raise DiffcapError(f"{path}: no such list; {remedy}.")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DiffcapError(f"{path}: not UTF-8 text (byte {error.start}); fetch it again.") from None
    return [(f"{path}, line {number}", line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
