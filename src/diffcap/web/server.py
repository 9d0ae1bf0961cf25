"""The web server: the address that it listens on, and the application with the page."""

import contextlib
import importlib.util
import ipaddress
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcap.checkpoints.hub_access import check_connection
from diffcap.utils.errors import DiffcapError

MAX_UPLOAD_BYTES = 2 * 2**30  # for the uploaded files of all visitors together
_LOCAL_HOSTS = ("localhost", "*.localhost", "127.0.0.1", "[::1]")  # names of this machine


def serve(
    checkpoint: list[str] | None = None,
    host: str = "127.0.0.1",
    port: int = 7860,
    runs: Path = Path("runs"),
    device: str = "auto",
    backbone_weights: str | None = None,
    base: str | None = None,
) -> None:
    """Serve a web page that captions two images and shows the attention of each word; needs diffcap[web].

    Args:
        checkpoint: Captioners at the top of the list (--checkpoint A B): checkpoint files, exported folders, or captioners and
            vision-language models on the Hugging Face Hub, as user/name.
        host: Address to listen on; the default allows connections from this machine only, 0.0.0.0 from all machines.
        port: Port to listen on; 0 chooses a free one.
        runs: Folder of training runs. Their captioners are listed after the captioners that ship with diffcap.
        device: cpu, cuda, mps (Apple) or auto, which is cuda if there is one, else cpu.
        backbone_weights: File of the backbone's weights for the captioners of --checkpoint, if they cannot be downloaded.
        base: Folder of the vision-language model that was fine-tuned for a --checkpoint, if it is not where the checkpoint says.
    """
    if importlib.util.find_spec("gradio") is None:
        raise DiffcapError("the page needs gradio, which is not installed; run: pip install 'diffcap[web]'")
    check_connection([*(checkpoint or []), base], shipped=True)  # if offline, the error suggests shipped captioners
    with listen(host, port) as listener, tempfile.TemporaryDirectory(prefix="diffcap-web-") as folder:
        import uvicorn

        from diffcap.web.captioners import Captioners, find_choices

        captioners = Captioners(find_choices(checkpoint or [], runs, backbone_weights, base), device)
        address, port = listener.getsockname()[:2]
        is_local = ipaddress.ip_address(address).is_loopback
        with captioners.use(0):  # loads the first captioner before the first visitor comes
            app = build_app(captioners, Path(folder), (host,) if is_local else None)
        settings = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=3)
        url_host = f"[{address}]" if ":" in address else address
        count = len(captioners.choices)
        print(f"diffcap is at http://{url_host}:{port} with {count} captioner{'s' * (count > 1)}; Ctrl-C ends it.")
        if not is_local:
            print(f"note: --host {host} lets everybody who reaches this machine use it, without a password.")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])


def build_app(
    captioners: Any, folder: Path, hosts: Sequence[str] | None = None, max_bytes: int = MAX_UPLOAD_BYTES
) -> Any:
    """Return the whole ASGI application; `folder` is only for uploaded files, at most `max_bytes` in all.

    Args:
        hosts: names that are accepted in the Host header, besides localhost. None accepts every name, and requests from pages of every
            site. On a server for this machine only, a list prevents DNS rebinding, in which a site's name resolves to this machine.
    """
    import gradio
    from fastapi import FastAPI
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from diffcap.report.page import read_resource
    from diffcap.web.middleware import EXCEPTION_HANDLERS, MAX_FILE_BYTES, RequestFilter
    from diffcap.web.page import build_page

    app = FastAPI(
        openapi_url=None,  # no pages of documentation
        middleware=[
            Middleware(TrustedHostMiddleware, None if hosts is None else [*_LOCAL_HOSTS, *hosts], www_redirect=False),
            Middleware(RequestFilter, folder.resolve(), max_bytes, same_origin=hosts is not None),
        ],
    )
    page = build_page(captioners, folder.resolve())
    theme = gradio.themes.Default(
        primary_hue="indigo",
        neutral_hue="slate",
        radius_size="lg",
        font=["system-ui", "sans-serif"],  # the system's fonts, so that no font is downloaded
        font_mono=["ui-monospace", "monospace"],
    )
    gradio.mount_gradio_app(
        app,
        page,
        path="/",
        show_error=False,
        max_file_size=MAX_FILE_BYTES,
        ssr_mode=False,
        mcp_server=False,
        run_history=False,
        enable_monitoring=False,
        pwa=False,
        app_kwargs={"exception_handlers": EXCEPTION_HANDLERS},
        theme=theme,
        css=read_resource("page.css", "diffcap.web"),
        footer_links=[],
    )
    page.has_launched = True  # `launch` would set this; otherwise gradio does not check the files that a request names
    return app


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address."""
    if not 0 <= port <= 65_535:
        raise DiffcapError(f"--port {port}: give a port from 1 to 65535, or 0 for any free port.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=128, dualstack_ipv6=family == socket.AF_INET6)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
        reason = str(getattr(error, "strerror", error)).partition(" (while")[0]  # without "(while attempting to bind"
        raise DiffcapError(
            f"cannot listen on {host}, port {port} ({reason}); choose another --port, 0 for any that is free, or --host."
        ) from None
