"""A web server on this machine that can be told to behave badly and remembers what it was asked; the folder of a test."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml
from tests.commands import ROOT, in_process


@dataclass
class Page:
    """What stands at one path, and the faults of its next answers, one each ("" for none)."""

    body: bytes = b""
    kind: str = "application/octet-stream"
    etag: str = ""
    modified: str = ""
    ranges: bool = True
    length: bool = True
    chunked: bool = False
    faults: list[str] = field(default_factory=list)
    always: str = ""
    pace: float = 0.0  # seconds a kilobyte
    terse: bool = False  # no Last-Modified in a response with status 206


@dataclass(frozen=True)
class Asked:
    """One request."""

    path: str
    range: str
    if_range: str
    agent: str


class Site:
    """Pages by path; `asked` are the requests so far."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.asked: list[Asked] = []
        self.sent = 0
        self.address = ""
        self.over = threading.Event()
        self.lock = threading.Lock()

    def url(self, path: str) -> str:
        return self.address + path

    def put(self, path: str, body: bytes = b"", **more: object) -> str:
        """Put a page there; gives its address."""
        self.pages[path] = Page(body, **more)  # type: ignore[arg-type]
        return self.url(path)

    def times(self, path: str) -> int:
        return sum(asked.path == path for asked in self.asked)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        site, headers = self.site, self.headers
        with site.lock:
            site.asked.append(
                Asked(self.path, *(headers.get(name, "") for name in ("Range", "If-Range", "User-Agent")))
            )
        try:
            self._answer(site.pages.get(self.path))
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self, page: Page | None) -> None:
        if page is None:
            return self._plain(404, {})
        fault = page.faults.pop(0) if page.faults else page.always
        word, _, given = fault.partition(" ")
        if word == "status":  # "status 429 Retry-After=1"
            status, _, header = given.partition(" ")
            return self._plain(int(status), dict([header.split("=", 1)]) if header else {})
        if word == "to":
            return self._plain(302, {"Location": given})
        if word == "hang":  # before the first byte
            self.site.over.wait(30)
            self.close_connection = True
            return None
        if word == "drop":
            self.close_connection = True
            return None
        body, start, status = page.body, 0, 200
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        fits = self.headers.get("If-Range", page.etag or page.modified) in (page.etag, page.modified)
        if asked and page.ranges and (fits or word == "careless"):
            start, status = int(asked[1]), 206
            if start >= len(body):
                return self._plain(416, {"Content-Range": f"bytes */{len(body)}"})
        return self._send(page, status, start, body[start:], word, given)

    def _send(self, page: Page, status: int, start: int, body: bytes, word: str, given: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", page.kind)
        # RFC 9110 leaves Last-Modified out of the response to If-Range.
        modified = "" if status == 206 and page.terse else page.modified
        for name, value in {"ETag": page.etag, "Last-Modified": modified}.items():
            if value:
                self.send_header(name, value)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(page.body) - 1}/{len(page.body)}")
        if page.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif page.length:
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if word in ("cut", "stall"):  # after so many bytes of this answer
            self._pour(page, body[: int(given)])
            if word == "stall":
                self.site.over.wait(30)
            self.close_connection = True
            return
        self._pour(page, body)
        if page.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _pour(self, page: Page, body: bytes) -> None:
        size = 1024 if page.pace else max(1, len(body))
        for n in range(0, len(body), size):
            piece = body[n : n + size]
            with self.site.lock:  # counted first: the client may look at it as soon as it has the bytes
                self.site.sent += len(piece)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if page.chunked else piece)
            self.wfile.flush()
            if page.pace and self.site.over.wait(page.pace):
                return

    def _plain(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def served() -> Iterator[Site]:
    """A site on a free port of this machine, until the block ends."""
    site = Site()
    handler = type("Handler", (_Handler,), {"site": site})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    site.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.over.set()
        server.shutdown()
        server.server_close()


STAGE = str(ROOT / "stages/data.py")
QUICK = ("--fetch.timeout=1", "--fetch.backoff=0.01", "--fetch.retries=2")
TOP = {"name": "Desk", "page": "https://desk.invalid", "licence": "CC BY 4.0", "citation": "A. Author. Desks. 2020."}


class Folder:
    """Where one test fetches to."""

    def __init__(self, path: Path, site: Site):
        self.path, self.site, self.dataset = path, site, "clevr_change"

    @property
    def out(self) -> Path:
        return self.path / "data"

    def words(self, *options: str) -> list[str]:
        named = f"--dataset={self.dataset}", f"--out={self.out}", f"--fetch.sources={self.path / 'sources.yaml'}"
        return [sys.executable, STAGE, *named, *QUICK, *options]

    def sources(self, **more: object) -> None:
        (self.path / "sources.yaml").write_text(yaml.safe_dump({**TOP, **more}))

    def fetch(self, *options: str) -> str:
        """Run the stage in this process; the sentence with which it stopped, "" where it went well."""
        return str(in_process(self.words(*options)) or "")

    def json(self, name: str) -> dict:
        return json.loads((self.out / name).read_text())

    def asked(self) -> list[str]:
        """The paths that were asked for since the last call."""
        paths = [asked.path for asked in self.site.asked]
        self.site.asked.clear()
        return sorted(paths)
