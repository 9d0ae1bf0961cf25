"""The server of the page: where it listens, what it lets in, and that a browser on it asks nobody else for anything."""

import contextlib
import importlib.util
import ipaddress
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcap.errors import DiffcapError

MOST_BYTES = 32 * 2**20  # of an uploaded picture
_MOST_WORDS = 2**20  # bytes of any other request
_FORM = 2**16  # that a form may have round its file
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
            app = build_app(captioners, Path(folder))
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
        print(_welcome(listener, host, len(captioners.choices)), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])


def build_app(captioners: Any, folder: Path) -> Any:
    """The whole application, ASGI.

    Args:
        captioners: a `Captioners`. folder: for uploaded files; nobody else's.
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
    return _Guard(app)


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
    except OSError as error:
        if listener is not None:
            listener.close()
        raise DiffcapError(
            f"no listening at {host}, port {port} ({error.strerror}); choose another --port, 0 for any that is free, or --host."
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


class _Guard:
    """Refuses requests that are too large before they are read, and forbids browsers to ask other hosts for anything."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        refusal = _refusal(scope)
        if refusal is None:
            await self._app(scope, receive, sent)
            return
        status, text = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await sent({"type": "http.response.start", "status": status, "headers": headers})
        await sent({"type": "http.response.body", "body": text.encode()})


def _refusal(scope: Any) -> tuple[int, str] | None:
    if scope["method"] not in ("POST", "PUT", "PATCH"):
        return None
    length = dict(scope["headers"]).get(b"content-length", b"")
    if not length.isdigit():
        return 411, "The request does not say how long it is."
    uploads = scope["path"].rstrip("/").endswith("/upload")
    most = MOST_BYTES + _FORM if uploads else _MOST_WORDS
    if int(length) > most:
        return 413, f"Too large: at most {most // 2**20} MB are taken; shrink the picture first."
    return None
