"""The options of fetching, and `configs/sources/<dataset>.yaml`, which lists the files of a dataset.

    name: CLEVR-Change
    page: https://...                  the dataset's own page
    licence: one sentence
    citation: one sentence
    files:                             downloaded over HTTP
      - url: https://.../captions.json
        to: annotations                subfolder of the dataset's files; default: none
        sha256: ...                    or md5, and size in bytes, if the publisher gives them
    by_hand:                           behind a sign-in, a form or a web page
      - file: images.tar.gz            its name, or a pattern ("*.zip")
        page: https://...
        how: what to do on the page
        unpack: true
        to: images
        gives: [images]                paths that exist when the files are complete
    photos: {mirrors: [https://...]}   photos by URL; mirrors have them under the same paths

An entry with `unpack: true` is an archive: it goes to `downloads/` and is extracted into `to`; `strip: folder` removes that
leading folder from the names of its members. `images: true` marks files that are not needed for the captions alone.

This module imports no slow packages, because `--help` imports it.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.settings import read_settings


@dataclass(frozen=True)
class FetchSettings:
    """Options for fetching the files of a dataset whose folder is not given.

    Attributes:
        sources: YAML file that lists the dataset's files; configs/sources/<dataset>.yaml by default.
        jobs: number of simultaneous downloads.
        retries: how many times to try again, with growing pauses, while a download makes no progress.
        timeout: seconds without a byte after which a connection counts as dead.
        backoff: the n-th retry waits about backoff * 2^(n - 1) seconds, at most 30.
        patience: longest pause in seconds that a server may request (Retry-After); the file fails if it requests more.
    """

    sources: str | None = None
    jobs: int = 4
    retries: int = 5
    timeout: float = 60.0
    backoff: float = 1.0
    patience: float = 300.0


@dataclass(frozen=True)
class Entry:
    """One file of a dataset, see the module's docstring for its keys; `url` is empty if the file must be downloaded by hand."""

    file: str
    url: str = ""
    page: str = ""
    how: str = ""
    to: str = ""
    strip: str = ""
    sha256: str = ""
    md5: str = ""
    size: int | None = None
    unpack: bool = False
    images: bool = False
    gives: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sources:
    """Content of one YAML file; `photos`: the mirrors of photos that have URLs, None for a dataset without such photos."""

    name: str
    page: str
    licence: str
    citation: str
    files: tuple[Entry, ...]
    by_hand: tuple[Entry, ...]
    photos: tuple[str, ...] | None


def read_sources(path: Path) -> Sources:
    """Read and check a file of sources."""
    if not path.is_file():
        raise DiffcapError(f"{path}: file not found; it must list the dataset's files.")
    with wrap_errors(path, "not a list of sources as those in configs/sources", "fix it"):
        top = dict(read_settings(path))
        photos = tuple(top.pop("photos").get("mirrors", [])) if "photos" in top else None
        for mirror in photos or ():
            _check_url(mirror)
        files = tuple(_entry(row, ("url",)) for row in top.pop("files", []))
        by_hand = tuple(_entry(row, ("file", "page", "how", "gives")) for row in top.pop("by_hand", []))
        texts = {key: " ".join(text.split()) for key, text in top.items()}
        return Sources(**texts, files=files, by_hand=by_hand, photos=photos)


def is_web_address(url: str) -> bool:
    """Return whether a URL has a host and the scheme http or https."""
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _entry(row: dict[str, Any], needed: tuple[str, ...]) -> Entry:
    if missing := [key for key in needed if not row.get(key)]:
        raise ValueError(f"the entry {row} lacks {', '.join(missing)}")
    if "url" in row:
        _check_url(row["url"])
    name = row.get("file") or unquote(PurePosixPath(urlsplit(row["url"]).path).name)
    how = " ".join(row.get("how", "").split())
    gives = tuple(row.get("gives", ()))
    entry = Entry(**{**row, "file": name, "how": how, "gives": gives})
    if not name or "/" in name:
        raise ValueError(f"file must be the name of a file, found {name!r}")
    for path in (entry.file, entry.to, entry.strip, *entry.gives):
        if path.startswith("/") or ".." in PurePosixPath(path).parts or "\\" in path:
            raise ValueError(f"{path!r:.100} must be a path inside the dataset's folder")
    return entry


def _check_url(url: str) -> None:
    if not is_web_address(url):
        raise ValueError(f"{url!r:.100} is not an http or https address")
