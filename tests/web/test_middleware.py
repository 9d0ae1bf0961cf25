"""Which requests the server refuses, and that bad ones cost no other visitor anything and leave no traceback."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from tests.odd_images import png_header
from tests.web.site import Visitor, pair, served, trap, visited

from diffcap.web import middleware
from diffcap.web.middleware import MAX_FILE_BYTES

JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=b"}


def read(connection: socket.socket) -> bytes:
    """Everything that the server sends until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


def kept(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_too_large_uploads_and_requests_are_refused_before_they_are_read(visitor: Visitor, folder: Path) -> None:
    before = set(folder.rglob("*"))
    data = png_header(9, 9) + bytes(MAX_FILE_BYTES + 100_000)
    try:
        answer = visitor.http.post("/gradio_api/upload", files={"files": ("a.png", data)})
        assert answer.status_code == 413 and "Too large: the limit is 32 MB" in answer.text
    except httpx.WriteError:  # the server closed the connection before all was sent
        pass
    answer = visitor.http.post("/gradio_api/call/caption", content=b'{"data": ["' + b"x" * 2**21 + b'"]}')
    assert answer.status_code == 413
    answer = visitor.http.post("/gradio_api/upload", content=iter([b"some"]))  # chunked, without a length
    assert answer.status_code == 411
    assert set(folder.rglob("*")) == before


def test_the_page_finds_its_files_and_no_other_route_is_reachable(visitor: Visitor) -> None:
    page = visitor.http.get("/")
    assert page.headers["x-content-type-options"] == "nosniff" and visitor.http.head("/").status_code == 200
    local = {path.removeprefix(".") for path in re.findall(r'(?:src|href)="(\.?/[^"]+)"', page.text)}
    assert len(local) >= 3
    for path in [*local, "/config", "/theme.css", "/gradio_api/info", "/gradio_api/app_id"]:
        assert visitor.http.get(path).status_code == 200, path
    routes = {
        "GET": "/login_check /monitoring /docs /openapi.json /robots.txt /pwa_icon /gradio_api/user /gradio_api/token"
        " /gradio_api/dev/reload /gradio_api/runs /gradio_api/queue/status /gradio_api/openapi.json"
        " /gradio_api/heartbeat/s /gradio_api/file/etc/passwd /gradio_api/vibe-code //config /gradio_api/queue/join",
        "POST": "/login /gradio_api/process_recording /gradio_api/vibe-edit/ /gradio_api/component_server"
        " /gradio_api/reset /gradio_api/run/caption /gradio_api/api/caption /gradio_api/call/v2/caption /config"
        " /gradio_api/stream/x",
        "PUT": "/ /gradio_api/upload",
        "OPTIONS": "/gradio_api/upload",
    }
    for method, paths in routes.items():
        for path in paths.split():
            answer = visitor.http.request(method, visitor.http.base_url.copy_with(raw_path=path.encode()))
            assert (answer.status_code, answer.text) == (404, "Not found."), (method, path)


def test_the_server_fetches_no_address_for_a_visitor(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str) -> str:  # gradio's check that an address is public
        return "127.0.0.1"

    monkeypatch.setattr("safehttpx.async_validate_url", resolve)
    with trap() as (address, asked):
        escaped = address.replace(":", "%3A").replace("/", "%2F")
        for route in (f"file={address}", f"file={escaped}", f"file/{address}", f"proxy={address}", f"file=/{address}"):
            for method in ("GET", "HEAD"):
                assert visitor.http.request(method, f"/gradio_api/{route}").status_code == 404, route
    assert not asked


def test_only_files_of_the_upload_folder_are_served(visitor: Visitor, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(pair()[0])
    mine = visitor.upload("mine.png", pair()[0])["path"]
    assert visitor.http.get(f"/gradio_api/file={mine}").content == pair()[0]
    up = "%2e%2e/" * len(folder.parts)
    for path in (tmp_path / "secret.png", "/etc/passwd", Path("pyproject.toml").resolve(), f"{folder}/{up}etc/passwd"):
        for slash in ("", "/"):
            assert visitor.http.get(f"/gradio_api/file={slash}{path}").status_code in (403, 404), path


def post(http: httpx.Client, files: dict, **headers: str) -> httpx.Response:
    """Upload; again if the server refused before it had the body, and the answer was lost with the connection."""
    for _ in range(20):
        with suppress(httpx.ReadError, httpx.WriteError):
            return http.post("/gradio_api/upload", files=files, headers=headers)
    raise AssertionError("no answer")


def test_only_the_own_names_of_a_local_server_are_answered(tmp_path: Path) -> None:
    """A page of another site whose name leads to this machine (DNS rebinding) gets nothing."""
    with served(tmp_path / "uploads", hosts=("Desk.example",)) as address:
        port = address.rpartition(":")[2]
        files = {"files": ("a.png", pair()[0])}
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as http:
            own = f"localhost localhost:{port} 127.0.0.1:{port} [::1]:{port} desk.example:80 a.localhost"
            for host in own.split():
                assert http.get("/config", headers={"host": host}).status_code == 200, host
            odd = ["evil.example", f"evil.example:{port}", "localhost.evil.example", "192.0.2.7", "", "[::1"]
            for host in [*odd, "127.0.0.1.nip.io"]:
                assert http.get("/config", headers={"host": host}).status_code == 400, host
                assert post(http, files, host=host).status_code == 400
            for site in ("https://evil.example", f"http://localhost.evil.example:{port}", "null"):
                answer = post(http, files, origin=site)
                assert answer.status_code == 403 and "other sites" in answer.text, site
            assert not kept(tmp_path / "uploads")
            answer = http.post("/gradio_api/upload", files=files, headers={"origin": address})
            assert answer.status_code == 200 and kept(tmp_path / "uploads")


@pytest.mark.slow
def test_the_oldest_uploads_make_room_for_new_ones(tmp_path: Path) -> None:
    folder, most = tmp_path / "uploads", 1_000_000
    with visited(folder, max_bytes=most) as visitor:
        assert visitor.http.get("/config", headers={"host": "evil.example"}).status_code == 200  # hosts: any
        first = visitor.upload("first.png", pair()[0])
        for number in range(7):
            time.sleep(0.02)  # so that the files have different ages
            last = visitor.upload(f"{number}.png", pair()[1] + bytes([number]) * 200_000)
            assert sum(path.stat().st_size for path in kept(folder)) <= most
        assert not Path(first["path"]).exists() and len(kept(folder)) >= 3
        fine = visitor.upload("fine.png", pair()[0])
        assert 'class="dc-word"' in visitor.caption(last, fine)
        with pytest.raises(RuntimeError, match="no longer kept; upload it again"):
            visitor.caption(first, fine)
        for number in range(40):  # the number of tiny files is limited too
            visitor.upload(f"{number}.png", b"%d" % number)
        assert len(kept(folder)) <= most // 2**16 + 1 and not Path(last["path"]).exists()


@pytest.mark.slow
def test_half_open_uploads_are_cut_off_and_cost_nobody_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(middleware, "_MAX_IDLE_SECONDS", 0.5)
    monkeypatch.setattr(middleware, "_MAX_BODY_SECONDS", 1.5)
    folder = tmp_path / "uploads"
    head = f"POST /gradio_api/upload HTTP/1.1\r\nHost: a\r\nContent-Length: {MAX_FILE_BYTES}\r\n"
    head += f"Content-Type: {FORM['content-type']}\r\n\r\n"
    start = '--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\nsome bytes'
    with visited(folder, max_bytes=MAX_FILE_BYTES + 2**20) as visitor:

        def half_open(text: str) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", visitor.http.base_url.port), 60)
            connection.sendall((head + text).encode())
            return connection

        mine = Path(visitor.upload("mine.png", bytes(2**21))["path"])
        waiting = [half_open(text) for text in ["", start] * 10]
        half_open(start).close()
        late = Path(visitor.upload("late.png", b"late")["path"])
        for connection in waiting:
            answer = read(connection)
            assert answer.startswith(b"HTTP/1.1 400 ") and b"arrived too slowly" in answer
        slow, answer, sent = half_open(start), b"", 0
        slow.settimeout(0.1)
        while not answer:  # never idle for long, and never complete
            assert sent < 200
            try:
                answer = read(slow)
            except TimeoutError:
                slow.sendall(b"x")
                sent += 1
            except ConnectionError:  # a byte came after the answer, which is lost then
                slow = half_open(start)
                slow.settimeout(0.1)
        assert sent >= 5 and b"arrived too slowly" in answer
        for connection in (*waiting, slow):
            connection.close()
        assert sorted(kept(folder)) == sorted([mine, late])
    assert "Traceback" not in capfd.readouterr().err


def bad_requests(image: dict[str, object]) -> Iterator[tuple[str, str, bytes, dict[str, str]]]:
    """Method, path, body and headers of requests that the page never sends."""
    call, join, run, upload = (
        f"/gradio_api/{path}" for path in ("call/caption", "queue/join", "run/predict", "upload")
    )
    for path in (call, join, run):
        for body in (b"", b"{", b"[]", b"null", b"{}", b'{"data": 5}', b"\xff\xfe", b"[" * 9000, b'{"data": {}}'):
            yield "POST", path, body, JSON
        yield "POST", path, b"--b\r\n", FORM
    file = {"meta": {"_type": "gradio.FileData"}}
    paths = [[file | {"path": path}, image, "0", 5] for path in ("/etc/passwd", "a\0b")]
    choices = [["9", 5], [None, 5], [["0"], 5], ["0", None], ["0", "many"], ["0", {"a": 1}], ["0", 0]]
    choices += [["0", number] for number in (1e308, float("nan"), float("inf"))]
    asked = [[], [1, 2, 3, 4, 5, 6], [{}] * 4, [[]] * 4, ["x", "y", "0", 5], *paths]
    for values in [*asked, *([image, image, *choice] for choice in choices)]:
        yield "POST", call, json.dumps({"data": values}).encode(), JSON
    for name in ("nothing", "show_example"):
        yield "POST", f"/gradio_api/call/{name}", b'{"data": [1]}', JSON
    of_examples = {"data": [], "fn_index": 5}  # the function of the examples
    for body in (
        *({"fn_index": index} for index in (99, -1, "x")),
        {},
        {"fn_index": 4, "session_hash": None},
        {"fn_index": 4, "session_hash": ["s"]},
        {"data": [1], "fn_index": 0},
        *(of_examples | event for event in ({}, {"event_data": 5})),
        *(of_examples | {"event_data": {"index": index}} for index in ("x", float("inf"))),
    ):
        yield "POST", join, json.dumps({"data": [None] * 4, "session_hash": "s"} | body).encode(), JSON
    part = 'Content-Disposition: form-data; name="files"'
    for header in (part, f"X: {'y' * 20000}", "", part.replace("name", "filename"), f'{part}; filename=".."'):
        yield "POST", upload, f"--b\r\n{header}\r\n\r\nx\r\n--b--\r\n".encode(), FORM
    form = "multipart/form-data"
    for kind in ("", form, f"{form}; boundary=", f"{form}; boundary=b", "application/json", "/;="):
        yield "POST", upload, b"x", {"content-type": kind}
    events = "call/caption/nothing call/nothing/nothing queue/data queue/data?session_hash=unknown upload_progress"
    files = "file= file=%00 file=file:///etc/passwd %ff"
    odd = ("/assets/nothing.js", "/assets/%2e%2e%2froutes.py", "/static/..%2fx", "//", "/static/" + 5000 * "a")
    for path in (*(f"/gradio_api/{path}" for path in f"{events} {files}".split()), *odd):
        yield "GET", path, b"", {}
    for method in ("PUT", "TRACE", "BREW"):
        yield method, upload, b"x", FORM
    for name in ("host", "x-forwarded-host"):
        yield "GET", "/", b"", {name: "[::1"}


@pytest.mark.slow
def test_bad_requests_are_answered_with_an_error_and_leave_no_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with visited(tmp_path / "uploads") as visitor:
        http = visitor.http
        image = visitor.upload("a.png", pair()[0])
        requests = list(bad_requests(image))
        for method, path, body, headers in requests:
            url = http.base_url.copy_with(raw_path=path.encode())
            try:
                answer = http.request(method, url, content=body, headers=headers)
            except httpx.ReadError:  # the server has closed the connection after the answer to the request before
                answer = http.request(method, url, content=body, headers=headers)
            if method == "POST" and "event_id" in answer.text:  # queued: the error is in the event stream
                begun = answer.json()["event_id"]
                answer = http.get(f"{path}/{begun}" if "/call/" in path else "/gradio_api/queue/data?session_hash=s")
            is_event = answer.status_code == 200 and re.search(r'event: error|"success":false|_error"', answer.text)
            assert is_event or 400 <= answer.status_code < 500, (answer, method, path, body[:200])
            assert "Traceback" not in answer.text
        for raw in (b"?\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", http.base_url.port), 60) as connection:
                connection.sendall(raw)
                assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
        assert 'class="dc-word"' in visitor.caption(image, image)
    logged = capfd.readouterr().err.splitlines()
    assert len(requests) > 70 and any("bad request: GET '/'" in line for line in logged)
    assert len(logged) <= len(requests) + 3 and all(line.startswith("WARNING") for line in logged), logged
