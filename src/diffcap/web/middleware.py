"""A filter between the network and gradio: an allow-list of routes, and limits of size, time and disk space of requests.

gradio has many routes that the page does not need. With some of them, a visitor can make the server fetch any public address.
"""

import asyncio
import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from gradio.route_utils import FnIndexInferError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_FILE_BYTES = 32 * 2**20  # per uploaded image
_MAX_FORM_BYTES = MAX_FILE_BYTES + 2**16  # the file and the form around it
_MAX_JSON_BYTES = 2**20
_MAX_BODY_SECONDS = 300  # for a whole request body: 32 MB at 1 Mbit/s take about 270 seconds
_MAX_IDLE_SECONDS = 20  # between two parts of a request body
_BYTES_BETWEEN_CHECKS = 2**20  # received bytes after which the disk space is checked
_MIN_COUNTED_BYTES = 2**16  # a smaller file counts as so many bytes, which also limits the number of files

# Allowed routes of each HTTP method. The page needs most of them; config, info and call are for scripts that use gradio's client.
_UPLOAD_ROUTE = "/gradio_api/upload"
_GET_ROUTES = re.compile(
    r"/|/config|/theme\.css|/manifest\.json|/favicon\.ico|/(assets|static)/.+"
    r"|/gradio_api/(info|app_id|upload_progress|queue/data|call/\w+/\w+)"
)
_POST_ROUTES = re.compile(rf"{_UPLOAD_ROUTE}|/gradio_api/(queue/join|run/predict|call/\w+)")
_ROUTES = {"GET": _GET_ROUTES, "HEAD": _GET_ROUTES, "POST": _POST_ROUTES}

# This policy forbids resources from other hosts. It allows inline scripts and `eval`, because gradio needs them.
_CONTENT_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' data: blob:; worker-src 'self' blob:; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
_HEADERS = {
    "content-security-policy": _CONTENT_POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_log = logging.getLogger("uvicorn.error")


def answer_bad_request(request: Request, error: Exception) -> Response:
    """Answer 400 if gradio's code fails on a malformed request, and log one line instead of a traceback."""
    _log.warning("bad request: %s %.200r: %.200s", request.method, request.scope["path"], ascii(error)[:200])
    _log.debug("its traceback", exc_info=error)
    return PlainTextResponse("The server cannot process this request; reload the page and try again.", 400)


# gradio's routes raise these errors for unknown functions, missing fields, malformed forms, malformed Host headers and long paths.
EXCEPTION_HANDLERS = dict.fromkeys(
    (AttributeError, KeyError, TypeError, ValueError, OSError, FnIndexInferError, httpx.InvalidURL), answer_bad_request
)


class RequestFilter:
    """ASGI middleware: refuses requests that the page does not need, limits request bodies and adds security headers.

    It serves no files outside of `folder`. If the files in `folder` would exceed `max_bytes`, the oldest are removed. With
    `same_origin`, it refuses POST requests that a page of another site sends.
    """

    def __init__(self, app: ASGIApp, folder: Path, max_bytes: int, same_origin: bool) -> None:
        self._app, self._same_origin = app, same_origin
        self._folder, self._max_bytes = folder, max_bytes
        self._folder_lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; the arguments are those of every ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._make_room, is_complete=scope["method"] in ("GET", "HEAD"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if not body.is_complete:
                    headers["connection"] = "close"  # the rest of the body is not read
            await send(message)

        try:
            await (self._check_request(scope) or self._app)(scope, body.receive, send_with_headers)
        except RuntimeError as error:
            # For an unknown session, gradio starts the event stream, reports the error in it, and then raises 404. Starlette turns
            # the 404 into a RuntimeError, because the response has started. Here, an empty last part ends the stream.
            if not isinstance(error.__cause__, HTTPException):
                raise
            await send({"type": "http.response.body"})

    def _check_request(self, scope: Scope) -> Response | None:
        """Return the response that refuses a request; None if it is allowed."""
        method, path, headers = scope["method"], scope["path"], Headers(scope=scope)
        is_file = method in ("GET", "HEAD") and path.startswith(f"/gradio_api/file={self._folder}/")
        if not is_file and not (method in _ROUTES and _ROUTES[method].fullmatch(path)):
            return PlainTextResponse("Not found.", 404)
        if method != "POST":
            return None
        origin = headers.get("origin")
        if self._same_origin and origin and origin.partition("://")[2] != headers.get("host"):
            return PlainTextResponse("Requests from pages of other sites are refused.", 403)
        length = headers.get("content-length", "")
        if not length.isdecimal():
            return PlainTextResponse("The request has no Content-Length header.", 411)
        max_length = _MAX_FORM_BYTES if path == _UPLOAD_ROUTE else _MAX_JSON_BYTES
        if int(length) > max_length:
            return PlainTextResponse(f"Too large: the limit is {max_length // 2**20} MB; shrink the image first.", 413)
        return None

    def _make_room(self, num_bytes: int) -> None:
        """Remove the oldest files until `num_bytes` more bytes fit into the folder."""
        with self._folder_lock:
            files = []  # modification time, counted bytes, path
            for folder, _, names in os.walk(self._folder):
                for path in (Path(folder, name) for name in names):
                    with contextlib.suppress(OSError):  # gradio may have removed the file
                        status = path.stat()
                        files.append((status.st_mtime, max(status.st_size, _MIN_COUNTED_BYTES), path))
            excess_bytes = sum(counted_bytes for _, counted_bytes, _ in files) + num_bytes - self._max_bytes
            for _, counted_bytes, path in sorted(files):
                if excess_bytes <= 0:
                    break
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                    excess_bytes -= counted_bytes
                    if path.parent != self._folder:
                        path.parent.rmdir()  # gradio creates a folder per file


class _Body:
    """A request body that must arrive in time; `make_room` is called with the number of bytes received since its last call.

    A body that ends early raises `MultiPartException`, for which gradio removes the partial file and answers 400.
    """

    def __init__(self, receive: Receive, make_room: Callable[[int], None], is_complete: bool) -> None:
        self.is_complete = is_complete
        self._receive, self._make_room = receive, make_room
        self._deadline = time.monotonic() + _MAX_BODY_SECONDS
        self._unchecked_bytes = 0  # received since the last call of `make_room`

    async def receive(self) -> Message:
        if self.is_complete:  # only the message http.disconnect can follow, at any time
            return await self._receive()
        try:
            async with asyncio.timeout(min(_MAX_IDLE_SECONDS, self._deadline - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise MultiPartException("The request arrived too slowly; try again.") from None
        if message["type"] == "http.disconnect":
            raise MultiPartException("The connection was closed before the request was complete.")
        self.is_complete = not message.get("more_body", False)
        self._unchecked_bytes += len(message.get("body", b""))
        if self.is_complete or self._unchecked_bytes >= _BYTES_BETWEEN_CHECKS:
            await asyncio.to_thread(self._make_room, self._unchecked_bytes)
            self._unchecked_bytes = 0
        return message
