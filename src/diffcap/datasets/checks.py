"""Checks that several readers use; each error message says where the problem is."""

from pathlib import Path
from typing import Any

from diffcap.utils.errors import DiffcapError
from diffcap.utils.files import url_of


def sentences(value: object, where: str, key: str) -> list[str]:
    """Check that a value is a list of sentences, and return it.

    Args:
        where: file, and line or entry, for the message. key: of the value, for the message.
    """
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise DiffcapError(f'{where}: "{key}" must be a list of sentences, found {value!r:.60}; fix it.')
    return value


def token_captions(value: object, where: str, key: str) -> list[str]:
    """Return captions from IDC-PCL's format: one caption as a list of words, or several as a list of such lists.

    Args:
        where, key: for the message, see `sentences`.

    Returns:
        The captions, words joined with spaces.
    """
    captions: list[Any] = value if isinstance(value, list) and value else [None]
    if isinstance(captions[0], str):
        captions = [captions]
    if not all(
        isinstance(tokens, list) and tokens and all(isinstance(token, str) for token in tokens) for tokens in captions
    ):
        raise DiffcapError(
            f'{where}: "{key}" must be a list of words or a list of such lists, none empty, found {value!r:.60}; fix that line.'
        )
    return [" ".join(tokens) for tokens in captions]


def note_once(seen: dict[str, str], name: str, where: str, what: str, remedy: str = "keep one of the two") -> None:
    """Add a name that must be unique to `seen`.

    Args:
        seen: name -> where it was found. where: of this name. what: the kind of name ("the uid"), for the message.
        remedy: what the user can do, for the message.
    """
    if name in seen:
        raise DiffcapError(f"{where}: {what} {name!r} is already used in {seen[name]}; {remedy}.")
    seen[name] = where


def check_inside(path: str, where: str) -> None:
    """Check that a relative path stays inside its folder."""
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
