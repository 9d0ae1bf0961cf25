"""Functions that read and check the files of datasets. `place`, such as "train.json, line 3", tells error messages where a value is."""

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from diffcap.records import ChangePair, is_blank, read_json
from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.files import url_of

Row = dict[str, Any]
PlacedRow = tuple[str, Row]  # with its place


def find_file(folder: Path, *names: str) -> Path:
    """Return the path of the first file of `names` that exists in `folder`. If none exists, return the path of the first name."""
    files = [folder / name for name in names]
    return next(filter(Path.is_file, files), files[0])


def read_object(file: Path, content: str, remedy: str = "fetch it again") -> dict[str, Any]:
    """Read a JSON file that must be an object. Error messages name the expected `content`, such as "captions", and a `remedy`."""
    value = read_json(file, content, remedy)
    if not isinstance(value, dict):
        raise DiffcapError(f"{file}: expected a JSON object, found {type(value).__name__}; fetch it again.")
    return value


def read_entries(file: Path, content: str, remedy: str) -> Iterator[PlacedRow]:
    """Yield ("<path>, entry <number>", entry) for each entry of a JSON file, which must be a list of objects."""
    entries = read_json(file, content, remedy)
    if not isinstance(entries, list):
        raise DiffcapError(f"{file}: expected a list of {content}, found {type(entries).__name__}; fetch it again.")
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise DiffcapError(f"{file}, entry {number}: must be an object, found {entry!r:.60}; fix it.")
        yield f"{file}, entry {number}", entry


def make_default_ids(image_paths: Sequence[Sequence[str]]) -> list[str]:
    """Make ids for the pairs of a file that has no ids, from the paths (before, after) of their images.

    All pairs get ids of the same form, which is the first of these forms that gives distinct ids: the file name of the before image
    without suffix; the path of the before image without suffix; both file names without suffix, joined by "-"; the number of the pair,
    with six digits.

    Example:
        >>> make_default_ids([("1.jpg", "2.jpg"), ("1.jpg", "3.jpg")])
        ['1-2', '1-3']
    """
    paths = [[PurePosixPath(path) for path in pair] for pair in image_paths]
    possible_ids = (
        [before.stem for before, _ in paths],
        [str(before.parent / before.stem) for before, _ in paths],
        [f"{before.stem}-{after.stem}" for before, after in paths],
    )
    for ids in possible_ids:
        if len(set(ids)) == len(ids) and not any(map(is_blank, ids)):
            return ids
    return [f"{number:06d}" for number in range(1, len(paths) + 1)]


def get_text(entry: dict[str, Any], key: str, place: str) -> str:
    """Return the value of `key` in `entry`. Raise an error if it is missing, not a string, or a string without a visible character."""
    value = entry.get(key)
    if not isinstance(value, str) or is_blank(value):
        found = f"{value!r:.60}" if key in entry else "nothing"
        raise DiffcapError(f'{place}: "{key}" must be a string, found {found}; fix it.')
    return value


def check_sentences(value: object, place: str, key: str) -> list[str]:
    """Return `value` if it is a list of strings. Otherwise raise an error that names the `key` of the value."""
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise DiffcapError(f'{place}: "{key}" must be a list of sentences, found {value!r:.60}; fix it.')
    return value


def join_tokens(value: object, place: str, key: str) -> list[str]:
    """Return captions as strings. In IDC-PCL's files, `value` is one caption (a list of words) or a list of captions (a list of lists)."""
    token_lists: list[Any] = value if isinstance(value, list) and value else [None]
    if isinstance(token_lists[0], str):
        token_lists = [token_lists]
    for tokens in token_lists:
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
            raise DiffcapError(
                f'{place}: "{key}" must be a list of words or a list of such lists, none empty, found {value!r:.60}; fix that line.'
            )
    return [" ".join(tokens) for tokens in token_lists]


def check_split(pair: ChangePair, split: str, place: str) -> None:
    """Raise an error if `split` is not the split of `pair`; `split` is from a later entry for the same pair, or image."""
    if pair.split != split:
        raise DiffcapError(f"{place}: {pair.id} is in {split} here and in {pair.split} before; keep one.")


def check_relative_path(path: str, place: str) -> None:
    """Raise an error if a path is a URL, or leads out of the dataset's folder."""
    if url := url_of(path):
        raise DiffcapError(
            f"{place}: {url:.200} is a URL; download the image, and write its path relative to the dataset's folder."
        )
    if path.startswith("/") or ".." in path.split("/"):
        raise DiffcapError(
            f"{place}: the path {path!r:.60} leads out of the dataset's folder; write it relative to that folder, without '..'."
        )


def read_numbered_lines(file: Path, remedy: str = "fetch it again") -> list[tuple[str, str]]:
    """Return ("<path>, line <number>", stripped text) of every line that is not blank."""
    if not file.is_file():
        raise DiffcapError(f"{file}: no such list; {remedy}.")
    with wrap_errors(file, "not UTF-8 text", "fetch it again"):
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    return [(f"{file}, line {number}", line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
