"""The server of the page: where it listens, what it lets in, and that a browser on it asks nobody else for anything."""

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diffcap.errors import DiffcapError

MOST_BYTES = 32 * 2**20  # of an uploaded picture
MOST_KEPT = 2 * 2**30  # bytes of all visitors' files together
_LEAST_KEPT = 2**16  # bytes that a file counts for, however small: so there are never too many to look through
_MOST_WORDS = 2**20  # bytes of any other request
_FORM = 2**16  # that a form may have round its file
_SENDING = ("POST", "PUT", "PATCH")
# Nothing from other hosts; gradio needs inline scripts, and evaluates those of its components.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def serve(
    checkpoints: Sequence[str], runs: Path, host: str, port: int, device: str, backbone_weights: str | None
) -> None:
    """Serve the page until it is interrupted; see `cli.serve` for the arguments.

    Raises:
        DiffcapError: gradio is not installed, a checkpoint cannot caption, or there is no listening there.
    """
    if importlib.util.find_spec("gradio") is None:
        raise DiffcapError("the page needs gradio, which is not installed; run: pip install 'diffcap[web]'")
    with listen(host, port) as listener, tempfile.TemporaryDirectory(prefix="diffcap-web-") as folder:
        import uvicorn

        from diffcap.web.captioners import Captioners, find_choices

        captioners = Captioners(find_choices(checkpoints, runs, backbone_weights), device)
        with captioners.use(0):  # so that the first visitor does not wait
            loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
            app = build_app(captioners, Path(folder), (host,) if loopback else None)
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
        print(_welcome(listener, host, len(captioners.choices)), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])


def build_app(captioners: Any, folder: Path, hosts: Sequence[str] | None = None, most: int = MOST_KEPT) -> Any:
    """The whole application, ASGI.

    Args:
        captioners: a `Captioners`. folder: for uploaded files; nobody else's.
        hosts: names that a request may call the server by, beside localhost and addresses of the loopback; None: any. A
            server that only this machine reaches needs it against DNS rebinding: names of other sites that lead here.
        most: bytes of the files in the folder; the oldest make room for new ones.
    """
    import gradio
    from fastapi import FastAPI

    from diffcap.web.page import build_page, style

    page = build_page(captioners, folder)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    gradio.mount_gradio_app(
        app,
        page,
        path="/",
        show_error=False,
        max_file_size=MOST_BYTES,
        ssr_mode=False,
        mcp_server=False,
        run_history=False,
        enable_monitoring=False,
        pwa=False,
        **style(),
    )
    page.has_launched = True  # as launch() has it: only then gradio checks which files a request may name
    return _Guard(app, _Room(folder, most), hosts)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        DiffcapError: the address is not one of this machine, or the port is taken or not allowed.
    """
    if not 0 <= port <= 65_535:
        raise DiffcapError(f"--port {port}: ports go from 0, any that is free, to 65535.")
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except (OSError, UnicodeError) as error:  # UnicodeError: no host name
        if listener is not None:
            listener.close()
        reason = getattr(error, "strerror", error)
        raise DiffcapError(
            f"no listening at {host}, port {port} ({reason}); choose another --port, 0 for any that is free, or --host."
        ) from None
    return listener


def _welcome(listener: socket.socket, host: str, count: int) -> str:
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    lines = [
        f"diffcap is at http://{shown}:{port} with {count} captioner{'s' * (count > 1)}; Ctrl-C ends it.",
    ]
    if not ipaddress.ip_address(address).is_loopback:
        lines.append(f"note: --host {host} lets everybody who reaches this machine use it, without a password.")
    return "\n".join(lines)


class _Room:
    """Room on the disk for the files of visitors: the oldest are removed for new ones."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._coming, self._lock = 0, threading.Lock()

    def take(self, size: int) -> bool:
        """Make room for so many bytes more, until `give` says that they are here; False where others that come fill it."""
        with self._lock:
            if self._coming + size > self._most:
                return False
            self._coming += size
            kept = self._kept()
            excess = sum(counted for _, counted, _ in kept) + self._coming - self._most
            for _, counted, path in kept:
                if excess <= 0:
                    break
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    excess -= counted
                    if path.parent != self._folder:
                        path.parent.rmdir()  # gradio has a folder for every file
        return True

    def give(self, size: int) -> None:
        """What was to come is among the files now, or will not come."""
        with self._lock:
            self._coming -= size

    def _kept(self) -> list[tuple[float, int, Path]]:
        """The time of each file, the bytes that it counts for, and the file, oldest first."""
        found = []
        for folder, _, names in os.walk(self._folder):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(OSError):  # removed meanwhile
                    facts = path.stat()
                    found.append((facts.st_mtime, max(facts.st_size, _LEAST_KEPT), path))
        return sorted(found)


class _Guard:
    """Refuses requests that are too large before they are read, and forbids browsers to ask other hosts for anything."""

    def __init__(self, app: Any, room: _Room, hosts: Sequence[str] | None) -> None:
        self._app, self._room, self._hosts = app, room, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None and scope["method"] in _SENDING:
            size = _length(scope) if _uploads(scope) else 0  # what others bring is not kept, but makes files
            if await asyncio.to_thread(self._room.take, size):
                try:
                    await self._app(scope, receive, sent)
                finally:
                    self._room.give(size)
                return
            refusal = 503, "Too many pictures are coming at once; try again in a minute."
        if refusal is None:
            await self._app(scope, receive, sent)
            return
        status, text = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await sent({"type": "http.response.start", "status": status, "headers": headers})
        await sent({"type": "http.response.body", "body": text.encode()})

    def _refusal(self, scope: Any) -> tuple[int, str] | None:
        if self._hosts is not None and not _is_own(_header(scope, b"host"), self._hosts):
            return 403, "This page is for this machine alone; open it as http://localhost and its port."
        if scope["method"] not in _SENDING:
            return None
        origin = _header(scope, b"origin")  # of the page that sends: browsers say it, and other sites' may send, too
        if self._hosts is not None and origin and not _is_own(origin.partition("://")[2], self._hosts):
            return 403, "This page takes pictures from itself alone; open it as http://localhost and its port."
        if not _header(scope, b"content-length").isdecimal():
            return 411, "The request does not say how long it is."
        most = MOST_BYTES + _FORM if _uploads(scope) else _MOST_WORDS
        if _length(scope) > most:
            return 413, f"Too large: at most {most // 2**20} MB are taken; shrink the picture first."
        return None


def _header(scope: Any, name: bytes) -> str:
    return str(dict(scope["headers"]).get(name, b"").decode("latin-1"))


def _length(scope: Any) -> int:
    return int(_header(scope, b"content-length"))


def _uploads(scope: Any) -> bool:
    return bool(scope["path"].rstrip("/").endswith("/upload"))


def _is_own(host: str, names: Sequence[str]) -> bool:
    """Whether a Host header names this machine as its loopback does, or by one of the names."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or name in [known.lower() for known in names]:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
