"""The page, served in this process, and a visitor who talks to it over HTTP as a browser does."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import uvicorn
from tests.odd_images import encoded

from diffcap.web.captioners import Captioners, Choice
from diffcap.web.result import render_examples
from diffcap.web.server import build_app, listen

SHIPPED = Choice("SCORER · blocks · ships with diffcap", None)


@contextmanager
def served(folder: Path, captioners: Captioners | None = None, **options: Any) -> Iterator[str]:
    """The page's address; `folder` takes the uploaded files. Options as `build_app`'s."""
    folder.mkdir(exist_ok=True)
    # The folder for uploads is an environment variable; another server of this process gets its own back.
    with listen("127.0.0.1", 0) as listener, mock.patch.dict(os.environ):
        app = build_app(captioners or Captioners([SHIPPED], "cpu"), folder, **options)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        end = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < end and thread.is_alive()
            time.sleep(0.05)
        port = listener.getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(20)


@contextmanager
def trap() -> Iterator[tuple[str, list[str]]]:
    """The address of a picture on another server, and the paths that it is asked for."""
    asked: list[str] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/a.png", asked
        server.shutdown()


@cache
def pair(number: int = 0) -> list[bytes]:
    """The two images of an example as PNG files."""
    example = render_examples()[number]
    return [encoded(image, "PNG") for image in (example.before, example.after)]


class Visitor:
    """Uploads pictures and asks for captions."""

    def __init__(self, address: str) -> None:
        self.http = httpx.Client(base_url=address, timeout=120, trust_env=False)

    def upload(self, name: str, data: bytes) -> dict[str, Any]:
        """A file as the page's components refer to it."""
        answer = self.http.post("/gradio_api/upload", files={"files": (name, data, "application/octet-stream")})
        answer.raise_for_status()
        return self.file(answer.json()[0], name)

    @staticmethod
    def file(path: str, name: str = "picture.png") -> dict[str, Any]:
        """A reference to a file of the server."""
        return {"path": path, "orig_name": name, "meta": {"_type": "gradio.FileData"}}

    def ask(self, name: str, *values: Any) -> list[Any]:
        """Call an event of the page and wait for its outputs; an error is `RuntimeError` with its sentence."""
        begun = self.http.post(f"/gradio_api/call/{name}", json={"data": list(values)})
        begun.raise_for_status()
        with self.http.stream("GET", f"/gradio_api/call/{name}/{begun.json()['event_id']}") as answer:
            event = ""
            for line in answer.iter_lines():
                kind, _, text = line.partition(": ")
                if kind == "event":
                    event = text
                elif kind == "data" and event in ("complete", "error"):
                    if event == "error":
                        raise RuntimeError(text)
                    return json.loads(text)
        raise RuntimeError("the stream ended without an answer")

    def caption(self, before: Any, after: Any, choice: str = "0", beams: int = 1) -> str:
        """The HTML of the answer."""
        return self.ask("answer", before, after, choice, beams)[0]


@contextmanager
def visited(folder: Path, captioners: Captioners | None = None, **options: Any) -> Iterator[Visitor]:
    """A visitor of a server, see `served`."""
    with served(folder, captioners, **options) as address:
        visitor = Visitor(address)
        with visitor.http:
            yield visitor
