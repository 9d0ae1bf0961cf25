"""Download one file over HTTP, completely or not at all.

The content is written to `<name>.part`, which is verified and then renamed to `<name>`. `<name>.part.json` identifies the content by
URL, length and validator (header ETag or Last-Modified). An interrupted download is resumed only if the server still has the same content.
The retries of urllib3 are not used, because they do not cover a connection that breaks after the headers of a response.
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

_TRANSIENT_CODES = (408, 425, 429, *range(500, 600))  # HTTP status codes: another attempt may succeed


class Cancelled(Exception):
    """All downloads were cancelled."""


class TransientError(Exception):
    """The download may succeed later; `retry_after` is the pause in seconds that the server requests, None if it requests none."""

    def __init__(self, reason: str, retry_after: float | None = None):
        super().__init__(reason)
        self.retry_after = retry_after


class PermanentError(Exception):
    """Another attempt would also fail."""

    def __init__(self, reason: str, gone: bool = False, forbidden: bool = False):
        super().__init__(reason)
        self.gone = gone  # the server has no such file (any more), or sends another file, such as a placeholder image
        self.forbidden = forbidden  # status 403: some servers send it for deleted files, others to blocked clients


@dataclass(frozen=True)
class Target:
    """A file to download."""

    path: Path  # where the complete file will be
    verify: Callable[[Path], str] = lambda path: ""  # returns what is wrong with the downloaded file, or ""
    has_checksum: bool = False  # True: `verify` compares a checksum, so a download can be resumed without a validator
    # Called after each write with the number of bytes so far and the total number (None: unknown).
    show_progress: Callable[[int, int | None], None] = lambda size, total: None

    @property
    def part_file(self) -> Path:
        """Path of the unfinished download."""
        return self.path.with_name(f"{self.path.name}.part")

    @property
    def metadata_file(self) -> Path:
        """Path of the JSON file that identifies the content of the unfinished download: "url", "validator", "size"."""
        return self.path.with_name(f"{self.path.name}.part.json")

    def part_size(self, url: str) -> int:
        """Return the number of bytes of the unfinished download from a URL."""
        return self.part_file.stat().st_size if self.part_file.is_file() and self.metadata().get("url") == url else 0

    def metadata(self) -> dict[str, Any]:
        """Return the content of `metadata_file`; {} if the file is missing or damaged."""
        try:
            return dict(read_json(self.metadata_file))
        except (DiffcapError, TypeError, ValueError):
            return {}

    def delete_part(self) -> None:
        """Delete the unfinished download and its metadata."""
        self.part_file.unlink(missing_ok=True)
        self.metadata_file.unlink(missing_ok=True)


class Client:
    """HTTP connections, shared by all threads of a run."""

    def __init__(self, settings: FetchSettings):
        self.settings = settings
        self.cancelled = threading.Event()  # setting this event ends all downloads
        self.num_failures: Counter[str] = Counter()  # host -> number of files in a row whose download failed
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
            raise TransientError(_short_reason(error)) from None
        status = response.status_code
        fault: PermanentError | TransientError | None = None
        reason = f"the server answers {status} {response.reason or ''}".rstrip()
        if url.startswith("https:") and any(hop.url.startswith("http:") for hop in (*response.history, response)):
            fault = PermanentError(f"the server redirects to {response.url:.100}, which is not encrypted")
        elif status in _TRANSIENT_CODES:
            retry_after = None
            with suppress(urllib3.exceptions.InvalidHeader):
                retry_after = urllib3.Retry().get_retry_after(response.raw)
            fault = TransientError(reason, retry_after)
        elif status not in (200, 206, 416):
            fault = PermanentError(reason, gone=status in (404, 410, 451), forbidden=status == 403)
        elif response.headers.get("Content-Type", "").lower().startswith("text/html"):
            fault = PermanentError("the server sends a web page instead of the file")
        if fault:
            response.close()
            raise fault
        return response

    def can_deliver(self, url: str) -> bool:
        """Request a URL once, without reading the content; return True if the server would send a file."""
        try:
            self.get(url).close()
        except (PermanentError, TransientError):
            return False
        return True


def download(urls: tuple[str, ...], target: Target, client: Client) -> str:
    """Download one file from the first of several URLs that delivers it. Return this URL.

    Raises:
        PermanentError: the download from every URL failed permanently; the message is that of the first URL.
        TransientError: no URL delivered the file, and at least one failed temporarily; another call may resume the download.
        Cancelled: `client.cancelled` was set.
    """
    target.path.parent.mkdir(parents=True, exist_ok=True)
    permanent_errors = []
    transient_errors = []
    for url in urls:
        host = urlsplit(url).netloc
        if (count := client.num_failures[host]) >= 4:  # files in a row that failed, each with all retries
            reason = f"{host} is skipped, because the last {count} downloads from it failed"
            transient_errors.append(TransientError(reason))
            continue
        try:
            _download_from(url, target, client)
            client.num_failures[host] = 0
            return url
        except PermanentError as error:
            client.num_failures[host] = 0
            permanent_errors.append(error)
        except TransientError as error:
            client.num_failures[host] += 1
            transient_errors.append(error)
    if transient_errors:
        raise transient_errors[0]
    first_error = permanent_errors[0]
    # Servers that lack the file answer with codes such as 404 or 403. A server that answers with another code, such as 401, may have it.
    no_server_has_it = all(error.gone or error.forbidden for error in permanent_errors)
    raise PermanentError(str(first_error), first_error.gone, forbidden=first_error.forbidden and no_server_has_it)


def _download_from(url: str, target: Target, client: Client) -> None:
    """Download from one URL. Fail after `retries` more attempts in a row without new bytes, or if the server wants a pause > `patience`."""
    settings = client.settings
    num_failures = 0
    max_size = target.part_size(url)
    while not client.cancelled.is_set():
        try:
            return _attempt(url, target, client)
        except TransientError as error:
            size = target.part_size(url)
            num_failures = 1 if size > max_size else num_failures + 1
            max_size = max(max_size, size)
            if error.retry_after is not None and error.retry_after > settings.patience:
                raise TransientError(f"{error}, try again in {error.retry_after:,.0f} seconds") from None
            if num_failures > settings.retries:
                raise TransientError(f"{error} ({num_failures} times)") from None
            backoff = min(
                30.0, settings.backoff * 2 ** (num_failures - 1)
            )  # the longest pause that no server requests is 30 s
            client.cancelled.wait(backoff if error.retry_after is None else error.retry_after)
    raise Cancelled


def _attempt(url: str, target: Target, client: Client) -> None:
    """Request the missing part of the download, verify the file and rename it."""
    start_byte = target.part_size(url)
    metadata = target.metadata()
    validator = metadata.get("validator")
    if not (validator or target.has_checksum):
        start_byte = 0  # begin again, because a change of the content on the server could not be detected
    size = metadata.get("size")
    if not start_byte or start_byte != size:  # equal if the process was killed after the last byte
        headers = {"Range": f"bytes={start_byte}-"} if start_byte else {}
        if start_byte and validator:
            headers["If-Range"] = validator
        with client.get(url, headers) as response:
            if response.status_code == 200:
                start_byte = 0
            elif not _is_continuation(response, start_byte, metadata):
                target.delete_part()
                raise TransientError("the file changed on the server")
            _receive(url, response, start_byte, target, client)
    if problem := target.verify(target.part_file):
        target.delete_part()
        if start_byte:
            raise TransientError(problem)  # the bytes before and after `start_byte` may belong to different contents
        # Without a checksum, `verify` rejects only files of another kind. So the server sent another file and lacks the wanted file.
        raise PermanentError(problem, gone=not target.has_checksum)
    target.part_file.replace(target.path)
    target.metadata_file.unlink(missing_ok=True)


def _is_continuation(response: requests.Response, start_byte: int, metadata: dict[str, Any]) -> bool:
    """Return True if a response begins at `start_byte` of the content that `metadata` describes."""
    content_range = response.headers.get("Content-Range", "")
    old_size = metadata.get("size")
    old_validator = metadata.get("validator") or ""
    validator = _validator_of(response)
    # A response to If-Range must repeat the ETag, but should leave out Last-Modified (RFC 9110, section 15.3.7).
    has_same_content = validator == old_validator or (not validator and not old_validator.startswith('"'))
    has_same_size = old_size is None or content_range.endswith((f"/{old_size}", "/*"))
    begins_right = content_range.startswith(f"bytes {start_byte}-")
    return response.status_code == 206 and begins_right and has_same_size and has_same_content


def _receive(url: str, response: requests.Response, start_byte: int, target: Target, client: Client) -> None:
    """Append a response to the first `start_byte` bytes of the unfinished download."""
    length = response.headers.get("Content-Length", "")
    total = None
    if length.isdigit():
        total = start_byte + int(length)
    elif "chunked" not in response.headers.get("Transfer-Encoding", "").lower():
        raise PermanentError("the server does not send the file's length, so truncation could not be detected")
    if not start_byte:
        target.delete_part()
        write_json(target.metadata_file, {"url": url, "validator": _validator_of(response), "size": total})
    size = start_byte
    try:
        with target.part_file.open("ab" if start_byte else "wb") as output:
            while chunk := response.raw.read1(1 << 16, decode_content=False):
                output.write(chunk)
                output.flush()  # so that the bytes stay if the process is killed, and a full disk raises an error here
                size += len(chunk)
                target.show_progress(size, total)
                if client.cancelled.is_set():
                    raise Cancelled
    except urllib3.exceptions.HTTPError as error:
        raise TransientError(_short_reason(error)) from None
    except OSError as error:  # an error of the disk, which names no file
        raise OSError(error.errno, error.strerror, str(target.part_file)) from None
    if total is not None and size != total:
        raise TransientError(f"truncated at {size:,} of {total:,} bytes")


def _validator_of(response: requests.Response) -> str:
    """Return the value for the header If-Range: the ETag, or Last-Modified if there is no ETag or a weak one (refused in If-Range)."""
    etag = response.headers.get("ETag", "")
    return etag if etag.startswith('"') else response.headers.get("Last-Modified", "")


def _short_reason(error: Exception) -> str:
    """Return the cause of a network error as a short phrase, without the texts of the errors that wrap it."""
    text = " ".join(str(error).split())
    if "timed out" in text:
        return "no answer in time"
    if "IncompleteRead" in text or "InvalidChunkLength" in text:
        return "the connection was closed early"
    causes = re.findall(r"\[Errno -?\d+\] ([\w ,'-]+)", text)
    return str(causes[-1]).strip() if causes else text[:120]
