"""What several readers ask of their files, each refused in one sentence that says where it stands."""

from pathlib import Path
from typing import Any

from diffcap.errors import DiffcapError


def sentences(value: object, where: str, key: str) -> list[str]:
    """The value of a key that holds sentences.

    Args:
        where: the file, and the line or entry, for the complaint. key: what the value is called there.

    Raises:
        DiffcapError: it is no list of strings.
    """
    if not isinstance(value, list) or not all(isinstance(sentence, str) for sentence in value):
        raise DiffcapError(f'{where}: "{key}" must be a list of sentences, found {value!r:.60}; fix it.')
    return value


def token_captions(value: object, where: str, key: str) -> list[str]:
    """One caption as a list of words, or several as a list of such lists (IDC-PCL's form): joined with blanks.

    Raises:
        DiffcapError: it is neither, or a caption is empty.
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
    """Note in `seen` where a name stands.

    Raises:
        DiffcapError: it stands already; `what` says what the name is of ("the uid").
    """
    if name in seen:
        raise DiffcapError(f"{where}: {what} {name!r} is already used in {seen[name]}; {remedy}.")
    seen[name] = where


def check_inside(path: str, where: str) -> None:
    """Refuse a path that leads out of the folder that it is relative to.

    Raises:
        DiffcapError: it is absolute, or holds "..".
    """
    if path.startswith("/") or ".." in path.split("/"):
        raise DiffcapError(
            f"{where}: the path {path!r:.60} leads out of the dataset's folder; write it relative to that, without '..'."
        )


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
