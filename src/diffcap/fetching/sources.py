"""Where the files of a dataset are: `configs/sources/<dataset>.yaml`.

    name: CLEVR-Change
    page: https://...                  the dataset's own page
    licence: one sentence
    citation: one sentence
    files:                             fetched over HTTP
      - url: https://.../captions.json
        to: annotations                folder under the dataset's files; the top by default
        sha256: ...                    or md5, and size in bytes, where the publisher gives them
    by_hand:                           behind a sign-in, a form or a page made for people
      - file: images.tar.gz            its name; a pattern ("*.zip") where the page makes the name up
        page: https://...
        how: what to do there
        unpack: true
        to: images
        gives: [images]                paths that are there once it is done, by us or by hand
    photos: {mirrors: [https://...]}   one URL a photo, named by the annotations; the same paths on other hosts

An entry with `unpack: true` is an archive: it goes to `downloads/` and is taken apart into `to`; `strip: folder` takes that
leading folder off the names of its members. `images: true` marks what is not needed for captions alone.
"""

from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from diffcap.errors import DiffcapError
from diffcap.settings import read_settings

_ENTRY: dict[str, type] = {
    "url": str, "file": str, "page": str, "how": str, "to": str, "strip": str,
    "sha256": str, "md5": str, "size": int, "unpack": bool, "images": bool, "gives": list,
}  # fmt: skip
_TOP: dict[str, type] = {
    "name": str,
    "page": str,
    "licence": str,
    "citation": str,
    "files": list,
    "by_hand": list,
    "photos": dict,
}
_PHOTOS: dict[str, type] = {"mirrors": list}


@dataclass(frozen=True)
class Entry:
    """One file of a dataset; the keys of the module's docstring, `url` empty for what a person has to fetch."""

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
    """Everything that one YAML file says; `photos` is None where no photo has a URL of its own."""

    name: str
    page: str
    licence: str
    citation: str
    files: tuple[Entry, ...] = ()
    by_hand: tuple[Entry, ...] = ()
    photos: tuple[str, ...] | None = None
    path: Path = field(default=Path())


def read_sources(path: str | Path) -> Sources:
    """Read and check one file of sources.

    Raises:
        DiffcapError: the file is missing, not YAML, has an unknown or a missing key, or a path that leads out.
    """
    path = Path(path)
    try:
        top = read_settings(path)
    except FileNotFoundError:
        raise DiffcapError(f"{path}: no such file; it should say where the dataset's files are.") from None
    top = _checked(top, _TOP, str(path), needed=("name", "page", "licence", "citation"))
    photos = top.get("photos")
    if photos is not None:
        photos = _checked(photos, _PHOTOS, f"{path}, photos").get("mirrors", [])
        for mirror in photos:
            _check_url(mirror, f"{path}, photos")
    return Sources(
        **{key: " ".join(top[key].split()) for key in ("name", "page", "licence", "citation")},
        files=tuple(
            _entry(row, f"{path}, files, entry {n}", ("url",)) for n, row in enumerate(top.get("files", []), 1)
        ),
        by_hand=tuple(
            _entry(row, f"{path}, by_hand, entry {n}", ("file", "page", "how", "gives"))
            for n, row in enumerate(top.get("by_hand", []), 1)
        ),
        photos=None if photos is None else tuple(photos),
        path=path,
    )


def is_web_address(url: str) -> bool:
    """Whether a URL names a host that can be asked over HTTP."""
    try:
        return urlsplit(url).scheme in ("http", "https") and bool(urlsplit(url).hostname)
    except ValueError:
        return False


def _entry(row: Any, where: str, needed: tuple[str, ...]) -> Entry:
    row = _checked(row, _ENTRY, where, needed)
    if "url" in row:
        _check_url(row["url"], where)
        row.setdefault("file", unquote(PurePosixPath(urlsplit(row["url"]).path).name))
    for key in ("file", "to", "strip"):
        _check_path(row.get(key, ""), f"{where}, {key}")
    if not row["file"] or "/" in row["file"]:
        raise DiffcapError(f"{where}: file must be the name of a file, found {row['file']!r}; fix it.")
    for name in row.get("gives", []):
        _check_path(name, f"{where}, gives")
    how = " ".join(row.pop("how", "").split())
    return Entry(**{**row, "gives": tuple(row.get("gives", ())), "how": how})


def _checked(row: Any, known: dict[str, type], where: str, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DiffcapError(f"{where}: must be keys and values, found {row!r:.60}; fix it.")
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


def _check_path(name: Any, where: str) -> None:
    if not isinstance(name, str) or name.startswith("/") or ".." in PurePosixPath(name).parts or "\\" in name:
        raise DiffcapError(f"{where}: {name!r:.100} must be a path inside the dataset's folder; fix it.")
