"""The options for fetching a dataset, and the reader of `configs/sources/<dataset>.yaml`, which lists the dataset's files.

    name: CLEVR-Change
    page: https://...                  page of the dataset
    licence: one sentence
    citation: one sentence
    files:                             downloaded over HTTP
      - url: https://.../captions.json
        to: annotations                subfolder of the dataset's folder for this file; default: the folder itself
        sha256: ...                    or md5; also size (in bytes); only if the publisher gives them
    by_hand:                           files that need a sign-in, a form or a web page
      - file: images.tar.gz            name of the file, or a pattern ("*.zip")
        page: https://...
        how: one sentence for the user, what to do on the page
        unpack: true
        to: images
        gives: [images]                paths that exist when the files are complete
    photos: {mirrors: [https://...]}   photos whose URLs are in the files above; mirrors have the same paths

An entry with `unpack: true` is an archive. It is saved in `downloads/` and extracted into `to`. `strip: data` removes the leading
folder `data` from the names of the archive's members. `images: true` marks files that are only needed for the images, not for the captions.

This module imports no slow packages, because commands import it even for `--help`.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from diffcap.utils.errors import DiffcapError, wrap_errors
from diffcap.utils.settings import read_settings


@dataclass(frozen=True)
class FetchSettings:
    """Options for fetching the files of a dataset, if the user gives no folder with the files.

    Attributes:
        sources: YAML file that lists the dataset's files; configs/sources/<dataset>.yaml by default.
        jobs: number of simultaneous downloads.
        retries: how many times to try again, with growing pauses, while a download makes no progress.
        timeout: seconds without a byte after which a connection counts as dead.
        backoff: the n-th retry waits about backoff * 2^(n - 1) seconds, at most 30.
        patience: longest pause in seconds that a server may request (Retry-After); a longer pause makes the download fail.
    """

    sources: str | None = None
    jobs: int = 4
    retries: int = 5
    timeout: float = 60.0
    backoff: float = 1.0
    patience: float = 300.0


@dataclass(frozen=True)
class Entry:
    """One file of a dataset, with the keys at the top of this module; `url` is "" if the file must be downloaded by hand."""

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
    """Content of a file `configs/sources/<dataset>.yaml`."""

    name: str
    page: str
    licence: str
    citation: str
    files: tuple[Entry, ...]
    by_hand: tuple[Entry, ...]
    photo_mirrors: tuple[str, ...] | None  # None: the dataset has no key `photos`


def read_sources(path: Path) -> Sources:
    """Read and check `configs/sources/<dataset>.yaml`, or another file of this form."""
    if not path.is_file():
        raise DiffcapError(f"{path}: file not found; it must list the dataset's files.")
    with wrap_errors(path, "not a list of sources as those in configs/sources", "fix it"):
        content = dict(read_settings(path))
        mirrors = tuple(content.pop("photos").get("mirrors", [])) if "photos" in content else None
        for mirror in mirrors or ():
            _check_url(mirror)
        files = tuple(_make_entry(values, ("url",)) for values in content.pop("files", []))
        by_hand = tuple(_make_entry(values, ("file", "page", "how", "gives")) for values in content.pop("by_hand", []))
        texts = {key: " ".join(text.split()) for key, text in content.items()}
        return Sources(**texts, files=files, by_hand=by_hand, photo_mirrors=mirrors)


def is_web_address(url: str) -> bool:
    """Return True if a URL has a host and the scheme http or https."""
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _make_entry(values: dict[str, Any], required_keys: tuple[str, ...]) -> Entry:
    if missing_keys := [key for key in required_keys if not values.get(key)]:
        raise ValueError(f"the entry {values} lacks {', '.join(missing_keys)}")
    if "url" in values:
        _check_url(values["url"])
    name = values.get("file") or unquote(PurePosixPath(urlsplit(values["url"]).path).name)
    how = " ".join(values.get("how", "").split())
    gives = tuple(values.get("gives", ()))
    entry = Entry(**{**values, "file": name, "how": how, "gives": gives})
    if not name or "/" in name:
        raise ValueError(f"file must be the name of a file, found {name!r}")
    for path in (entry.file, entry.to, entry.strip, *entry.gives):
        if path.startswith("/") or ".." in PurePosixPath(path).parts or "\\" in path:
            raise ValueError(f"{path!r:.100} must be a path inside the dataset's folder")
    return entry


def _check_url(url: str) -> None:
    if not is_web_address(url):
        raise ValueError(f"{url!r:.100} is not an http or https address")
