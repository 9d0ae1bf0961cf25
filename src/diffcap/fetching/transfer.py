"""One file over HTTP, whole or not at all: `<name>.part` grows, is resumed, is checked, and only then gets its name.

Beside it `<name>.part.json` notes what the server called the content (ETag, date, length), so that the two halves of an
interrupted fetch are halves of the same file; where the server says nothing of the kind, and no checksum is known, the
file is begun anew. A part is never taken for whole by its existence: the length that the server announced, the checksum
and the content are looked at.
"""

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

import diffcap
from diffcap.errors import DiffcapError
from diffcap.fetching.hosts import Hosts, Stopped, host_of, retry_after
from diffcap.fetching.settings import FetchSettings
from diffcap.records import read_json, write_json

_REDIRECTS = 10
_PIECE = 1 << 16
_PROGRESS = 1 << 16  # bytes that make a broken connection one that got further
_SLOW = 1024  # bytes that have to come within one timeout
_GONE = {404: "not found", 410: "gone", 451: "withheld for legal reasons"}
_AGAIN = (408, 425, 429)


Shown = Callable[
    [int, int | None], None
]  # gets the bytes there are so far, and how many there will be if that is known


@dataclass(frozen=True)
class Wanted:
    """One file to fetch.

    Attributes:
        urls: where it is; the next one is asked only where the one before does not give it.
        target: where it goes.
        size: its length in bytes, if it is known.
        check: says what is wrong with a fetched file ("" for nothing); it gets the path.
        known: whether `check` compares a checksum, so that any two parts may be put together.
        vouched: whether `check` tells a whole file from a cut one.
    """

    urls: tuple[str, ...]
    target: Path
    size: int | None = None
    check: Callable[[Path], str] = lambda path: ""
    known: bool = False
    vouched: bool = False


class Refused(Exception):
    """The file will not come by asking again.

    Attributes:
        gone: there is none at the address (any more).
        forbidden: the server says 403, which may be about the file (some say so of one that was taken down) or about us.
    """

    def __init__(self, why: str, gone: bool = False, forbidden: bool = False):
        super().__init__(why)
        self.gone, self.forbidden = gone, forbidden


class Unreachable(Exception):
    """The file did not come now; it may another time."""


class _Broken(Exception):
    """A connection that ended too early, or did not begin; to be tried again."""


def transfer(wanted: Wanted, hosts: Hosts, settings: FetchSettings, shown: Shown) -> str:
    """Fetch one file; gives the URL that it came from. A file that is there already is the caller's to notice.

    Args:
        wanted: the file.
        hosts: shared by all transfers of a run.
        settings: retries and timeout.
        shown: called with every piece that comes.

    Raises:
        Refused: a clear no from every address, or a file that is not what it should be.
        Unreachable: the retries are used up at one address, and no other has it; what came so far stays for the next time.
        Stopped: everything ended meanwhile.
        DiffcapError, OSError: the disk is full or cannot be written.
    """
    wanted.target.parent.mkdir(parents=True, exist_ok=True)
    refusals, lost = [], []
    for url in wanted.urls:
        try:
            _persist(url, wanted, hosts, settings, shown)
            return url
        except Refused as error:
            hosts.delivered(url)
            refusals.append(error)
        except Unreachable as error:
            hosts.failed(url)
            lost.append(error)
    if lost:
        raise lost[0]
    first = refusals[0]
    # Of a mirror any refusal will do: some answer "forbidden" for what they never had.
    definite = all(error.gone or error.forbidden for error in refusals)
    raise Refused(str(first), gone=first.gone, forbidden=first.forbidden and definite)


def hands_out(url: str, hosts: Hosts, settings: FetchSettings) -> bool:
    """Whether a server gives what is at an address now; asked once, and nothing of it is kept."""
    try:
        with _ask(hosts.session(), url, {}, settings.timeout) as response:
            return response.status_code == 200 and not _is_page(response)
    except (Refused, requests.RequestException, urllib3.exceptions.HTTPError, ValueError):
        return False


def _persist(url: str, wanted: Wanted, hosts: Hosts, settings: FetchSettings, shown: Shown) -> None:
    part = part_of(wanted.target)
    failures, furthest = 0, _length(part)
    while True:
        if hosts.down(url):
            raise Unreachable(f"{host_of(url)} does not answer")
        hosts.wait(url, failures)
        try:
            fresh, certain = _receive(url, wanted, part, hosts, settings, shown)
            problem = _problem(part, wanted, certain)
            if not problem:
                break
            forget(part)
            if fresh and certain:
                raise Refused(problem, gone=wanted.vouched and not wanted.known)
            raise _Broken(problem)  # two parts that do not fit, or a cut file: once more from the start
        except _Broken as error:
            if _length(part) >= furthest + _PROGRESS:
                failures = 0
            failures, furthest = failures + 1, max(furthest, _length(part))
            if failures > settings.retries:
                raise Unreachable(f"{error} ({failures} times)") from None
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(wanted.target)
    _note_of(part).unlink(missing_ok=True)
    hosts.delivered(url)


def _problem(part: Path, wanted: Wanted, certain: bool) -> str:
    if wanted.size is not None and _length(part) != wanted.size:
        return f"{_length(part):,} bytes long, not {wanted.size:,}"
    return wanted.check(part)


def _receive(
    url: str, wanted: Wanted, part: Path, hosts: Hosts, settings: FetchSettings, shown: Shown
) -> tuple[bool, bool]:
    """Bring the part to its end: did all of it come in one connection, and did the server say where the end is?"""
    note, have = _read_note(part), _length(part)
    headers: dict[str, str] = {}
    validator = note.get("etag") or note.get("modified") or ""
    if have and note.get("url") == url and (validator or wanted.known):
        if have == note.get("size"):
            return False, True  # killed between the last byte and the check
        headers = {"Range": f"bytes={have}-", **({"If-Range": validator} if validator else {})}
    else:
        have = 0
    try:
        with _ask(hosts.session(), url, headers, settings.timeout) as response:
            _look_at_status(response, url, hosts, settings)
            start, total = _extent(response, have, note)
            if start < 0:
                forget(part)
                raise _Broken("the file changed while it was fetched")
            if have and start == total:
                return False, True
            certain = total is not None or "chunked" in response.headers.get("Transfer-Encoding", "").lower()
            _look_at_headers(response, wanted, total, certain)
            if start == 0:
                forget(part)
                write_json(_note_of(part), {"url": url, **_validators(response), "size": total})
            _make_room(part, start, total)
            _pour(response, part, start, total, hosts, settings, shown)
    except requests.exceptions.InvalidProxyURL as error:
        raise Refused(f"the proxy of the environment cannot be used ({error})") from None
    except (requests.exceptions.InvalidSchema, ValueError) as error:
        raise Refused(f"not an address that can be asked ({error})") from None
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise _Broken(_said(error)) from None
    if total is not None and _length(part) != total:
        raise _Broken(f"cut off at {_length(part):,} of {total:,} bytes")
    return start == 0, certain


def _ask(session: requests.Session, url: str, headers: dict[str, str], timeout: float) -> requests.Response:
    """The response behind at most ten redirects, none of which leaves the web or gives up encryption."""
    agent = {"User-Agent": f"diffcap/{diffcap.__version__} (fetches datasets)", "Accept-Encoding": "identity"}
    for _ in range(_REDIRECTS + 1):
        response = session.get(url, headers={**agent, **headers}, stream=True, allow_redirects=False, timeout=timeout)
        if not response.is_redirect:
            return response
        response.close()
        before, url = urlsplit(url).scheme, urljoin(url, response.headers["Location"])
        scheme = urlsplit(url).scheme
        if scheme not in ("http", "https"):
            raise Refused(f"redirected to {url:.100}, which is not on the web")
        if before == "https" and scheme == "http":
            raise Refused(f"redirected to {url:.100}, which is not encrypted")
    raise Refused(f"more than {_REDIRECTS} redirects")


def _look_at_status(response: requests.Response, url: str, hosts: Hosts, settings: FetchSettings) -> None:
    status = response.status_code
    if status in (200, 206, 416):
        return
    why = f"the server says {status} {response.reason or _GONE.get(status, '')}".rstrip()
    if status in _GONE:
        raise Refused(why, gone=True)
    if status < 500 and status not in _AGAIN:
        raise Refused(why, forbidden=status == 403)
    asked = retry_after(response.headers.get("Retry-After"))
    if asked is not None:
        if asked > settings.patience:
            raise Unreachable(f"{why}, come back in {asked:,.0f} seconds")
        hosts.pause(url, asked)
    raise _Broken(why)


def _extent(response: requests.Response, have: int, note: dict[str, Any]) -> tuple[int, int | None]:
    """Where the body of a response begins and how long the whole file is; -1 where it does not continue the part."""
    given, length = response.headers.get("Content-Range", ""), response.headers.get("Content-Length", "")
    if response.status_code == 200:
        return 0, int(length) if length.isdigit() else None
    if response.status_code == 416:
        end = re.fullmatch(r"bytes \*/(\d+)", given)
        whole = have and end and int(end[1]) == have and note.get("size") in (None, have)
        return (have, have) if whole else (-1, None)
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", given)
    if not found or int(found[1]) != have:
        return -1, None
    total, expected = None if found[2] == "*" else int(found[2]), note.get("size")
    if total is None and length.isdigit():
        total = have + int(length)
    fresh = _validators(response)
    other = fresh.get("etag") != note.get("etag") or fresh.get("modified", note.get("modified")) != note.get("modified")
    return (-1, None) if other or (expected is not None and total not in (None, expected)) else (have, total)


def _look_at_headers(response: requests.Response, wanted: Wanted, total: int | None, certain: bool) -> None:
    if _is_page(response) and wanted.target.suffix.lower() not in (".html", ".htm"):
        raise Refused("a web page came in place of the file")  # to log in, as likely as to say that it is gone
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused("the server packs the file though it was asked not to, so its length cannot be checked")
    if wanted.size is not None and total not in (None, wanted.size):
        raise Refused(f"{total:,} bytes long, not {wanted.size:,}")
    if not certain and not wanted.vouched and wanted.size is None:
        raise Refused("the server does not say how long it is, so a cut file could not be told from a whole one")


def _is_page(response: requests.Response) -> bool:
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return kind in ("text/html", "application/xhtml+xml")


def _pour(
    response: requests.Response,
    part: Path,
    start: int,
    total: int | None,
    hosts: Hosts,
    settings: FetchSettings,
    shown: Shown,
) -> None:
    since, few, there = time.monotonic(), 0, start
    try:
        with part.open("ab" if start else "wb", buffering=0) as file:  # what came is on the disk when we are killed
            while piece := response.raw.read1(_PIECE, decode_content=False):
                file.write(piece)
                there += len(piece)
                shown(there, total)
                if hosts.stop.is_set():
                    raise Stopped
                few += len(piece)
                if few >= _SLOW:
                    since, few = time.monotonic(), 0
                elif time.monotonic() - since > settings.timeout:
                    raise _Broken(f"less than {_SLOW} bytes in {settings.timeout:g} seconds")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(part)) from None


def _make_room(part: Path, start: int, total: int | None) -> None:
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - start > free:
        raise DiffcapError(
            f"{part}: {(total - start) / 1e9:.1f} GB are still to come and {free / 1e9:.1f} GB are free; free some space "
            "and run the same command again, it goes on where it stopped."
        )


def part_of(target: Path) -> Path:
    """Where a file grows until it is whole."""
    return target.with_name(target.name + ".part")


def forget(part: Path) -> None:
    """Throw a part and its note away."""
    part.unlink(missing_ok=True)
    _note_of(part).unlink(missing_ok=True)


def _note_of(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _read_note(part: Path) -> dict[str, Any]:
    try:
        note = read_json(_note_of(part))
    except DiffcapError:
        return {}  # none yet, or cut off: the part is begun anew
    return note if isinstance(note, dict) else {}


def _validators(response: requests.Response) -> dict[str, str]:
    """What tells one content from another, of the kinds that If-Range takes: no weak ETag."""
    etag, modified = response.headers.get("ETag", ""), response.headers.get("Last-Modified", "")
    return {
        **({"etag": etag} if etag.startswith('"') else {}),
        **({"modified": modified} if modified else {}),
    }


def _length(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _said(error: Exception) -> str:
    """The heart of a network error, which libraries wrap several times."""
    text = str(error)
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError) or "timed out" in text:
        return "no answer in time"
    if "IncompleteRead" in text or "InvalidChunkLength" in text:
        return "cut off before its end"
    if found := re.findall(r"\[Errno -?\d+\] ([\w ,'-]+)", text):
        return str(found[-1]).strip()
    return " ".join(text.split())[:120] or type(error).__name__
