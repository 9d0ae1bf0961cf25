"""Download one file over HTTP, completely or not at all.

The content is written to `<name>.part`, which is verified and then renamed to `<name>`. `<name>.part.json` identifies the content
(URL, ETag or Last-Modified, length), so that an interrupted download is resumed only if the server still has the same content.
The retries are a loop of our own: those of urllib3 do not cover a connection that breaks after the headers of a response.
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
from diffcap.fetching.sources import FetchSettings
from diffcap.records import read_json, write_json
from diffcap.utils.errors import DiffcapError

_CHUNK = 1 << 16
_MAX_BACKOFF = 30.0  # seconds
_MAX_HOST_FAILURES = 4  # files in a row, each with all its retries; after them, the host is skipped
_GONE = (404, 410, 451)
_TEMPORARY = (408, 425, 429, *range(500, 600))


class Cancelled(Exception):
    """All downloads were cancelled."""


class TransientError(Exception):
    """The download may succeed later; `retry_after` is the pause in seconds that the server requests."""

    def __init__(self, reason: str, retry_after: float | None = None):
        super().__init__(reason)
        self.retry_after = retry_after


class PermanentError(Exception):
    """Another attempt would also fail."""

    def __init__(self, reason: str, gone: bool = False, forbidden: bool = False):
        super().__init__(reason)
        self.gone = gone  # the server does not have the file (any more), or sends another (a placeholder image)
        self.forbidden = forbidden  # status 403; some servers answer so for deleted files, others refuse the client


@dataclass(frozen=True)
class Target:
    """A file to download."""

    path: Path  # of the complete file
    verify: Callable[[Path], str] = lambda path: ""  # returns what is wrong with the downloaded file, or ""
    # Whether `verify` compares a checksum. Then a download without ETag and Last-Modified can be resumed.
    has_checksum: bool = False
    # Called after each write with the number of bytes so far and the total number (None: unknown).
    progress: Callable[[int, int | None], None] = lambda size, total: None

    @property
    def part(self) -> Path:
        """Path of the unfinished download."""
        return self.path.with_name(f"{self.path.name}.part")

    @property
    def metadata_path(self) -> Path:
        """Path of the JSON file that identifies the content of the unfinished download: "url", "validator", "size"."""
        return self.path.with_name(f"{self.path.name}.part.json")

    def part_size(self, url: str) -> int:
        """Return the number of bytes of the unfinished download from a URL."""
        return self.part.stat().st_size if self.part.is_file() and self.metadata().get("url") == url else 0

    def metadata(self) -> dict[str, Any]:
        """Return the content of `metadata_path`; {} if the file is missing or damaged."""
        try:
            return dict(read_json(self.metadata_path))
        except (DiffcapError, TypeError, ValueError):
            return {}

    def delete_part(self) -> None:
        """Delete the unfinished download and its metadata."""
        self.part.unlink(missing_ok=True)
        self.metadata_path.unlink(missing_ok=True)


class Client:
    """HTTP connections, shared by all threads of a run."""

    def __init__(self, settings: FetchSettings):
        self.settings = settings
        self.cancelled = threading.Event()  # set it to end all downloads
        self.failures: Counter[str] = Counter()  # by host: files in a row whose download failed
        self._session = requests.Session()
        agent = f"diffcap/{diffcap.__version__} (fetches datasets)"
        self._session.headers.update({"User-Agent": agent, "Accept-Encoding": "identity"})
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, HTTPAdapter(pool_maxsize=settings.jobs))

    def get(self, url: str, headers: dict[str, str] | None = None) -> requests.Response:
        """Request a URL once; the response has status 200, 206 or 416, and its content is not read yet."""
        try:
            response = self._session.get(url, headers=headers, stream=True, timeout=self.settings.timeout)
        except (requests.TooManyRedirects, ValueError) as error:  # invalid URLs are ValueErrors
            raise PermanentError(f"the URL cannot be requested: {error}") from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise TransientError(_reason(error)) from None
        status = response.status_code
        refusal: PermanentError | TransientError | None = None
        reason = f"the server answers {status} {response.reason or ''}".rstrip()
        if url.startswith("https:") and any(hop.url.startswith("http:") for hop in (*response.history, response)):
            refusal = PermanentError(f"the server redirects to {response.url:.100}, which is not encrypted")
        elif status in _TEMPORARY:
            pause = None
            with suppress(urllib3.exceptions.InvalidHeader):
                pause = urllib3.Retry().get_retry_after(response.raw)
            refusal = TransientError(reason, pause)
        elif status not in (200, 206, 416):
            refusal = PermanentError(reason, gone=status in _GONE, forbidden=status == 403)
        elif response.headers.get("Content-Type", "").lower().startswith("text/html"):
            refusal = PermanentError("the server sends a web page instead of the file")
        if refusal:
            response.close()
            raise refusal
        return response

    def delivers(self, url: str) -> bool:
        """Return whether the server would send a file; requests the URL once, without reading the content."""
        try:
            self.get(url).close()
        except (PermanentError, TransientError):
            return False
        return True


def download(urls: tuple[str, ...], target: Target, client: Client) -> str:
    """Download one file from the first of several URLs that delivers it; returns this URL.

    Raises:
        PermanentError: the download from every URL failed permanently; the message is that of the first URL.
        TransientError: no URL delivered the file, and at least one failed temporarily; another call may resume the download.
        Cancelled: `client.cancelled` was set.
    """
    target.path.parent.mkdir(parents=True, exist_ok=True)
    permanent = []
    transient = []
    for url in urls:
        host = host_of(url)
        if (failures := client.failures[host]) >= _MAX_HOST_FAILURES:
            transient.append(TransientError(f"{host} is skipped, because the last {failures} downloads from it failed"))
            continue
        try:
            _download_from(url, target, client)
            client.failures[host] = 0
            return url
        except PermanentError as error:
            client.failures[host] = 0
            permanent.append(error)
        except TransientError as error:
            client.failures[host] += 1
            transient.append(error)
    if transient:
        raise transient[0]
    first_error = permanent[0]
    # A mirror that never had the file may answer 403; it would not answer 401, for example.
    none_has_it = all(error.gone or error.forbidden for error in permanent)
    raise PermanentError(str(first_error), gone=first_error.gone, forbidden=first_error.forbidden and none_has_it)


def _download_from(url: str, target: Target, client: Client) -> None:
    """Download from one URL; ends after `retries` further attempts in a row without new bytes."""
    settings = client.settings
    failures = 0
    max_size = target.part_size(url)
    while not client.cancelled.is_set():
        try:
            return _attempt(url, target, client)
        except TransientError as error:
            size = target.part_size(url)
            failures = 1 if size > max_size else failures + 1
            max_size = max(max_size, size)
            if error.retry_after is not None and error.retry_after > settings.patience:
                raise TransientError(f"{error}, try again in {error.retry_after:,.0f} seconds") from None
            if failures > settings.retries:
                raise TransientError(f"{error} ({failures} times)") from None
            backoff = min(_MAX_BACKOFF, settings.backoff * 2 ** (failures - 1))
            client.cancelled.wait(backoff if error.retry_after is None else error.retry_after)
    raise Cancelled


def _attempt(url: str, target: Target, client: Client) -> None:
    """Request the missing part of the download, verify the file and rename it."""
    start = target.part_size(url)
    metadata = target.metadata()
    validator = metadata.get("validator")
    if not (validator or target.has_checksum):
        start = 0  # no way to detect that the content on the server has changed
    if not start or start != metadata.get("size"):  # equal: the process was killed before the file was verified
        headers = {"Range": f"bytes={start}-", **({"If-Range": validator} if validator else {})} if start else {}
        with client.get(url, headers) as response:
            if response.status_code == 200:
                start = 0
            elif not _continues(response, start, metadata):
                target.delete_part()
                raise TransientError("the file changed on the server")
            _receive(url, response, start, target, client.cancelled)
    if problem := target.verify(target.part):
        target.delete_part()
        if start:
            raise TransientError(problem)  # the responses may belong to different contents
        # Without a checksum, `verify` rejects only files of another kind: the server does not have the file.
        raise PermanentError(problem, gone=not target.has_checksum)
    target.part.replace(target.path)
    target.metadata_path.unlink(missing_ok=True)


def _continues(response: requests.Response, start: int, metadata: dict[str, Any]) -> bool:
    """Return whether a response begins at byte `start` of the content that `metadata` describes."""
    content_range = response.headers.get("Content-Range", "")
    size = metadata.get("size")
    expected = metadata.get("validator") or ""
    response_validator = _validator(response)
    # A response to If-Range must repeat the ETag, but should leave out Last-Modified (RFC 9110, section 15.3.7).
    same_content = response_validator == expected or (not response_validator and not expected.startswith('"'))
    has_range = content_range.startswith(f"bytes {start}-")
    same_size = size is None or content_range.endswith((f"/{size}", "/*"))
    return response.status_code == 206 and has_range and same_size and same_content


def _receive(url: str, response: requests.Response, start: int, target: Target, cancelled: threading.Event) -> None:
    """Append a response to the first `start` bytes of the unfinished download."""
    length = response.headers.get("Content-Length", "")
    total = None
    if length.isdigit():
        total = start + int(length)
    elif "chunked" not in response.headers.get("Transfer-Encoding", "").lower():
        raise PermanentError("the server does not send the file's length, so truncation could not be detected")
    if not start:
        target.delete_part()
        write_json(target.metadata_path, {"url": url, "validator": _validator(response), "size": total})
    size = start
    try:
        with target.part.open("ab" if start else "wb") as output:
            while chunk := response.raw.read1(_CHUNK, decode_content=False):
                output.write(chunk)
                output.flush()  # so that a killed process keeps what it received, and a full disk raises an error here
                size += len(chunk)
                target.progress(size, total)
                if cancelled.is_set():
                    raise Cancelled
    except urllib3.exceptions.HTTPError as error:
        raise TransientError(_reason(error)) from None
    except OSError as error:  # from the disk; writing does not put the path into the error
        raise OSError(error.errno, error.strerror, str(target.part)) from None
    if total is not None and size != total:
        raise TransientError(f"truncated at {size:,} of {total:,} bytes")


def host_of(url: str) -> str:
    """Return the host of a URL, with its port if there is one."""
    return urlsplit(url).netloc


def _validator(response: requests.Response) -> str:
    """Return the value for If-Range: the ETag; Last-Modified if the ETag is missing or weak (not allowed there); else ""."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified", "")


def _reason(error: Exception) -> str:
    """Return the cause of a network error as a short phrase, without the texts of the errors that wrap it."""
    text = " ".join(str(error).split())
    if "timed out" in text:
        return "no answer in time"
    if "IncompleteRead" in text or "InvalidChunkLength" in text:
        return "the connection was closed early"
    causes = re.findall(r"\[Errno -?\d+\] ([\w ,'-]+)", text)
    return str(causes[-1]).strip() if causes else text[:120]
