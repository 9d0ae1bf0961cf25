"""Download one file over HTTP, completely or not at all.

The content goes to `<name>.part`, is verified, and only then gets its name. `<name>.part.json` identifies the content (URL,
ETag or Last-Modified, length), so that an interrupted download is resumed only while the server has the same content.

One loop tries again after every kind of interruption: urllib3's own retries end with the headers of a response, and their pauses
do not end at Ctrl-C.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

import diffcap
from diffcap.fetching.settings import FetchSettings
from diffcap.records import read_json, write_json
from diffcap.utils.errors import DiffcapError

_CHUNK = 1 << 16
_MAX_BACKOFF = 30.0  # seconds
_MAX_HOST_FAILURES = 4  # failed files in a row, each after all its retries, until a host counts as down
_GONE = (404, 410, 451)
_TEMPORARY = (408, 425, 429, *range(500, 600))


class Cancelled(Exception):
    """All downloads were cancelled."""


class TransientError(Exception):
    """The download failed now; it may succeed at another time.

    Attributes:
        pause: seconds that the server wants to be left alone, if it says so.
    """

    def __init__(self, reason: str, pause: float | None = None):
        super().__init__(reason)
        self.pause = pause


class PermanentError(Exception):
    """Another attempt would fail, too.

    Attributes:
        gone: the server does not have the file (any more).
        forbidden: status 403, which may concern the file (some servers answer so for deleted files) or the client.
    """

    def __init__(self, reason: str, gone: bool = False, forbidden: bool = False):
        super().__init__(reason)
        self.gone, self.forbidden = gone, forbidden


@dataclass(frozen=True)
class Target:
    """A file to download.

    Attributes:
        path: where it goes.
        verify: returns what is wrong with the downloaded file at the given path, "" for nothing.
        has_checksum: `verify` compares a checksum, so that contents without ETag and Last-Modified can be resumed.
        progress: gets the bytes so far, and the total if it is known.
    """

    path: Path
    verify: Callable[[Path], str] = lambda path: ""
    has_checksum: bool = False
    progress: Callable[[int, int | None], None] = lambda size, total: None

    @property
    def part(self) -> Path:
        """The unfinished download."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def note(self) -> Path:
        """The file that identifies the content of the part."""
        return self.path.with_name(self.path.name + ".part.json")

    def size(self) -> int:
        """Bytes of the unfinished download."""
        return self.part.stat().st_size if self.part.is_file() else 0

    def metadata(self) -> dict[str, Any]:
        """What the note says; nothing if it is missing or damaged."""
        try:
            return dict(read_json(self.note))
        except (DiffcapError, TypeError, ValueError):
            return {}

    def delete_part(self) -> None:
        """Begin anew."""
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)


class Client:
    """HTTP connections, shared by all threads of a run.

    Attributes:
        cancelled: set it to end all downloads.
        failures: files in a row that a host has failed to deliver.
    """

    def __init__(self, settings: FetchSettings):
        self.settings, self.cancelled = settings, threading.Event()
        self.failures: Counter[str] = Counter()
        self._session = requests.Session()
        agent = f"diffcap/{diffcap.__version__} (fetches datasets)"
        self._session.headers.update({"User-Agent": agent, "Accept-Encoding": "identity"})
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=settings.jobs))

    def get(self, url: str, headers: dict[str, str] | None = None) -> requests.Response:
        """Request a URL once; the response has status 200, 206 or 416, and its content is not read yet.

        Raises:
            PermanentError: the URL is invalid, or the server refuses it or sends a web page (often one to log in).
            TransientError: no answer, or one that asks to come back later.
        """
        try:
            response = self._session.get(url, headers=headers, stream=True, timeout=self.settings.timeout)
        except (requests.TooManyRedirects, ValueError) as error:  # invalid URLs are ValueErrors
            raise PermanentError(f"the URL cannot be requested: {error}") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise TransientError(_reason(error)) from None
        refusal = _refusal(url, response)
        if refusal:
            response.close()
            raise refusal
        return response

    def delivers(self, url: str) -> bool:
        """Whether the server sends a file for a URL at the moment; the file is not read."""
        try:
            self.get(url).close()
        except (PermanentError, TransientError):
            return False
        return True


def _refusal(url: str, response: requests.Response) -> PermanentError | TransientError | None:
    """Why a response does not bring the file."""
    status, kind = response.status_code, response.headers.get("Content-Type", "")
    reason = f"the server answers {status} {response.reason or ''}".rstrip()
    if url.startswith("https:") and any(hop.url.startswith("http:") for hop in (*response.history, response)):
        return PermanentError(f"the server redirects to {response.url:.100}, which is not encrypted")
    if status in _TEMPORARY:
        pause = None
        with suppress(urllib3.exceptions.InvalidHeader):
            pause = urllib3.Retry().get_retry_after(response.raw)
        return TransientError(reason, pause)
    if status not in (200, 206, 416):
        return PermanentError(reason, gone=status in _GONE, forbidden=status == 403)
    if kind.lower().startswith("text/html"):
        return PermanentError("the server sends a web page instead of the file")
    return None


def download(urls: tuple[str, ...], target: Target, client: Client) -> str:
    """Download one file; returns the URL that delivered it. The next URL is asked only if the previous one fails.

    Raises:
        PermanentError: every URL refuses the file, or its content is wrong.
        TransientError: the retries are used up at one URL, and no other has the file; the next call resumes the download.
        Cancelled: `client.cancelled` was set.
        OSError: the disk is full or not writable.
    """
    target.path.parent.mkdir(parents=True, exist_ok=True)
    refusals, failures = [], []
    for url in urls:
        host = host_of(url)
        try:
            if client.failures[host] >= _MAX_HOST_FAILURES:
                raise TransientError(f"{host} does not answer")
            _download_from(url, target, client)
            client.failures[host] = 0
            return url
        except PermanentError as error:
            client.failures[host] = 0
            refusals.append(error)
        except TransientError as error:
            client.failures[host] += 1
            failures.append(error)
    if failures:
        raise failures[0]
    first = refusals[0]
    # Mirrors may answer 403 for a file that they never had, but not, for example, 401.
    all_definite = all(error.gone or error.forbidden for error in refusals)
    raise PermanentError(str(first), gone=first.gone, forbidden=first.forbidden and all_definite)


def _download_from(url: str, target: Target, client: Client) -> None:
    settings = client.settings
    furthest, failures = target.size(), 0  # failures since the last progress
    while not client.cancelled.is_set():
        try:
            in_one_response = _receive(url, target, client)
            problem = target.verify(target.part)
            if not problem:
                target.part.replace(target.path)
                target.note.unlink(missing_ok=True)
                return
            target.delete_part()
            if in_one_response:
                raise PermanentError(problem, gone=not target.has_checksum)
            raise TransientError(problem)  # the parts may belong to different contents
        except TransientError as error:
            size = target.size()
            failures = 1 if size > furthest else failures + 1
            furthest = max(furthest, size)
            if error.pause is not None and error.pause > settings.patience:
                raise TransientError(f"{error}, try again in {error.pause:,.0f} seconds") from None
            if failures > settings.retries:
                raise TransientError(f"{error} ({failures} times)") from None
            backoff = min(_MAX_BACKOFF, settings.backoff * 2 ** (failures - 1))
            client.cancelled.wait(backoff if error.pause is None else error.pause)
    raise Cancelled


def _receive(url: str, target: Target, client: Client) -> bool:
    """Complete the part; returns whether one response brought all of it."""
    start, metadata, headers = target.size(), target.metadata(), dict[str, str]()
    validator = metadata.get("validator")
    if metadata.get("url") != url or not (validator or target.has_checksum):
        start = 0
    if start:
        if start == metadata.get("size"):
            return False  # the process was killed before the file was verified
        headers = {"Range": f"bytes={start}-", **({"If-Range": validator} if validator else {})}
    with client.get(url, headers) as response:
        if response.status_code == 200:
            start = 0
        elif not _continues(response, start, metadata):
            target.delete_part()
            raise TransientError("the file changed on the server")
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdigit() else metadata.get("size") if start else None
        if total is None and "chunked" not in response.headers.get("Transfer-Encoding", "").lower():
            raise PermanentError("the server does not send the file's length, so truncation could not be detected")
        if not start:
            target.delete_part()
            write_json(target.note, {"url": url, "validator": _validator(response), "size": total})
        size = start
        try:  # without a buffer, so that a killed process loses nothing it received
            with target.part.open("ab" if start else "wb", buffering=0) as output:
                while chunk := response.raw.read1(_CHUNK, decode_content=False):
                    output.write(chunk)
                    size += len(chunk)
                    target.progress(size, total)
                    if client.cancelled.is_set():
                        raise Cancelled
        except urllib3.exceptions.HTTPError as error:
            raise TransientError(_reason(error)) from None
        except OSError as error:  # of the disk; name the file
            raise OSError(error.errno, error.strerror, str(target.part)) from None
    if total is not None and size != total:
        raise TransientError(f"truncated at {size:,} of {total:,} bytes")
    return start == 0


def _continues(response: requests.Response, start: int, metadata: dict[str, Any]) -> bool:
    """Whether a response continues the part that has `start` bytes of the content that `metadata` describes."""
    extent, size = response.headers.get("Content-Range", ""), metadata.get("size")
    return (
        response.status_code == 206
        and extent.startswith(f"bytes {start}-")
        and (size is None or extent.endswith((f"/{size}", "/*")))
        and _validator(response) == metadata.get("validator")
    )


def host_of(url: str) -> str:
    """The host of a URL."""
    return urlsplit(url).netloc


def _validator(response: requests.Response) -> str:
    """The header that identifies a content for If-Range, which accepts no weak ETag; "" if there is none."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified", "")


def _reason(error: Exception) -> str:
    """The cause of a network error, which several libraries have wrapped."""
    text = str(error)
    if "timed out" in text:
        return "no answer in time"
    if "IncompleteRead" in text or "InvalidChunkLength" in text:
        return "the connection was closed early"
    if found := re.findall(r"\[Errno -?\d+\] ([\w ,'-]+)", text):
        return str(found[-1]).strip()
    return " ".join(text.split())[:120] or type(error).__name__
