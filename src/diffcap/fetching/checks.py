"""What a fetched file must be before it gets its name: its checksum, and a content that fits the name."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from diffcap.fetching.ledger import Ledger
from diffcap.fetching.sources import Entry
from diffcap.fetching.unpack import is_archive
from diffcap.records import file_hash


def entry_check(entry: Entry, name: str, ledger: Ledger) -> Callable[[Path], str]:
    """Says what is wrong with a file that should be `entry`'s, "" for nothing; `name` is its name in the ledger."""

    def check(path: Path) -> str:
        if entry.unpack and not is_archive(path):
            return "not an archive"
        if entry.file.endswith(".json"):
            try:
                json.loads(path.read_bytes())
            except (ValueError, RecursionError):
                return "not valid JSON"
        return sum_problem(path, ledger, name, entry.sha256, entry.md5)

    return check


def photo_check(name: str, ledger: Ledger) -> Callable[[Path], str]:
    """The same for a photo: it must decode to its last pixel."""
    from diffcap.datasets.images import image_problem

    return lambda path: image_problem(path) or sum_problem(path, ledger, name)


def sum_problem(path: Path, ledger: Ledger, name: str, sha256: str = "", md5: str = "") -> str:
    """How a file's checksums differ from the publisher's, and from what came at the first fetch."""
    if md5:
        with path.open("rb") as file:
            if (found := hashlib.file_digest(file, "md5").hexdigest()) != md5.lower():
                return f"MD5 {found}, the publisher's is {md5.lower()}"
    first = ledger.sha256(name)
    if not sha256 and not first:
        return ""
    found = file_hash(path)
    if sha256 and found != sha256.lower():
        return f"SHA-256 {found}, the publisher's is {sha256.lower()}"
    if first and found != first:
        return (
            f"SHA-256 {found}, at the first fetch it was {first}; where the new file is the right one, take the lines "
            f"of {name} out of {ledger.path}"
        )
    return ""
