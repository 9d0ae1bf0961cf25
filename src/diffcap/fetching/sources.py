"""The options of fetching, and `configs/sources/<dataset>.yaml`, which says where the files of a dataset are.

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
leading folder from the names of its members. `images: true` marks files that captions alone do not need.

Imports nothing heavy, because `--help` imports this module.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from diffcap.utils.errors import DiffcapError
from diffcap.utils.settings import read_settings

_ENTRY: dict[str, type] = {
    **dict.fromkeys(("url", "file", "page", "how", "to", "strip", "sha256", "md5"), str),
    **{"size": int, "unpack": bool, "images": bool, "gives": list},
}
_REQUIRED = ("name", "page", "licence", "citation")
_TOP: dict[str, type] = {**dict.fromkeys(_REQUIRED, str), "files": list, "by_hand": list, "photos": dict}


@dataclass(frozen=True)
class FetchSettings:
    """How files are fetched where a dataset's folder is not given.

    Attributes:
        sources: YAML file that says where the dataset's files are; configs/sources/<dataset>.yaml by default.
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
    """Content of one YAML file; `photos` has the mirrors, or is None if the photos have no URLs."""

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
    top = _check(read_settings(path), _TOP, str(path), _REQUIRED)
    photos = None
    if "photos" in top:
        photos = tuple(_check(top["photos"], {"mirrors": list}, f"{path}, photos").get("mirrors", []))
        for mirror in photos:
            _check_url(mirror, f"{path}, photos")
    files, by_hand = (
        tuple(_entry(row, f"{path}, {key}, entry {n}", needed) for n, row in enumerate(top.get(key, []), 1))
        for key, needed in (("files", ("url",)), ("by_hand", ("file", "page", "how", "gives")))
    )
    name, page, licence, citation = (" ".join(top[key].split()) for key in _REQUIRED)
    return Sources(name, page, licence, citation, files, by_hand, photos)


def is_web_address(url: str) -> bool:
    """Whether a URL has a host and the scheme http or https."""
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _entry(row: Any, where: str, needed: tuple[str, ...]) -> Entry:
    row = _check(row, _ENTRY, where, needed)
    if "url" in row:
        _check_url(row["url"], where)
        row.setdefault("file", unquote(PurePosixPath(urlsplit(row["url"]).path).name))
    if not row["file"] or "/" in row["file"]:
        raise DiffcapError(f"{where}: file must be the name of a file, found {row['file']!r}; fix it.")
    for name in (row["file"], row.get("to", ""), row.get("strip", ""), *row.get("gives", ())):
        if not isinstance(name, str) or name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name:
            raise DiffcapError(f"{where}: {name!r:.100} must be a path inside the dataset's folder; fix it.")
    how = " ".join(row.get("how", "").split())
    return Entry(**{**row, "gives": tuple(row.get("gives", ())), "how": how})


def _check(row: Any, known: dict[str, type], where: str, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DiffcapError(f"{where}: must be a mapping, found {row!r:.60}; fix it.")
    for key, value in row.items():
        if key not in known:
            raise DiffcapError(f"{where}: unknown key {key!r}; the keys are {', '.join(known)}.")
        if not isinstance(value, known[key]):
            raise DiffcapError(f"{where}: {key} must be a {known[key].__name__}, found {value!r:.60}; fix it.")
    missing = [key for key in needed if not row.get(key)]
    if missing:
        raise DiffcapError(f"{where}: lacks {', '.join(missing)}; add it.")
    return dict(row)


def _check_url(url: Any, where: str) -> None:
    if not isinstance(url, str) or not is_web_address(url):
        raise DiffcapError(f"{where}: {url!r:.100} is not an http or https address; fix it.")
