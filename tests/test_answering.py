"""Captions of a served model, from a server that answers with faults."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.commands import ROOT

pytest.importorskip("openai")
pytest.importorskip("transformers")

from PIL import Image

from diffcap import load_captioner
from diffcap.change import Caption
from diffcap.cli import main
from diffcap.models import answering
from diffcap.models.answering import Unreachable
from diffcap.utils.errors import DiffcapError
from diffcap.web.captioners import Captioners, find_choices
from diffcap.web.page import _answer

EXAMPLES = str(ROOT / "examples/before.png"), str(ROOT / "examples/after.png")
AT_ONCE = {"retry-after-ms": "1"}
ERROR = {"error": {"message": "no"}}


def completion(text: object = "The cube is gone. It was red.", reason: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 70, "completion_tokens": 9, "total_tokens": 79}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


class Server(ThreadingHTTPServer):
    """Gives the answers in `script`, (status, body, headers) each, then good ones. `requests` has the bodies and `keys` the keys."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[tuple[int, Any, dict[str, str]]] = []
        self.requests: list[Any] = []
        self.keys: set[str | None] = set()
        self.source = f"openai:some/model:7b@http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.add(self.headers["Authorization"])
        status, body, headers = self.server.script.pop(0) if self.server.script else (200, completion(), {})
        if not status:  # drop the connection
            self.close_connection = True
            return
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(answering, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\n")
    with Server() as server:
        yield server
        server.shutdown()


def run(*words: object) -> str | int | None:
    """Run a command and return its exit status or error; None if all went well."""
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code
    return None


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A list of five pairs."""
    for number in range(5):
        Image.new("RGB", (32, 24), (40 * number, 90, 90)).save(tmp_path / f"{number}.png")
    rows = [json.dumps({"id": str(n), "before": f"{n}.png", "after": f"{(n + 1) % 5}.png"}) for n in range(5)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    return tmp_path / "pairs.jsonl"


HTML = (200, "<html>Log in</html>", {"Content-Type": "text/html"})
REFUSED = (401, {"error": {"message": "bad key sk-secret"}}, {})
BROKEN = (500, "Internal Server Error", AT_ONCE)


@pytest.mark.parametrize(
    ("script", "num_requests", "error"),  # None: the pair gets a caption in the end
    [
        ([(429, ERROR, AT_ONCE)] * 4, 5, None),
        ([BROKEN] * 2, 3, None),
        ([(0, "", {})], 2, None),
        ([(200, json.dumps(completion())[:60], {})] * 2, 3, None),
        ([(200, {**completion(), "usage": None}, {})], 1, None),
        ([(200, completion("<think>Is it?</think>\nThe cube is gone."), {})], 1, None),
        ([(400, {"error": {"message": "use max_completion_tokens"}}, {})], 2, None),
        ([(400, {"error": {"message": "temperature is not supported"}}, {})], 2, None),
        ([BROKEN] * 9, 3, r"no answer \(500: Internal Server Error\); see"),
        ([(400, ERROR, {})], 1, "no answer .400"),
        ([(200, {"hello": 1}, {})], 1, "not a chat completion"),
        ([(200, [], {})], 1, "not a chat completion"),
        ([(200, {**completion(), "choices": []}, {})], 1, "not a chat completion"),
        ([(200, completion(["a"]), {})], 1, "not a chat completion"),
        ([(200, completion(None), {})], 1, "the answer is empty; use another"),
        ([(200, completion("..."), {})], 1, "the answer is empty; use another"),
        ([(200, completion("<think>Is it", "length"), {})], 1, "all its tokens were reasoning"),
        # All requests would fail, so the command ends.
        ([REFUSED], 1, r"refused \(401: .*bad key \*\*\*.*set OPENAI_API_KEY"),
        ([(404, ERROR, {})], 1, "correct the model's name or the address"),
        ([HTML], 1, "not OpenAI's chat API; correct the address"),
        ([(0, "", {})] * 3, 3, "cannot be reached"),
    ],
)
def test_faults_of_a_server(server: Server, script: list[Any], num_requests: int, error: str | None) -> None:
    server.script = list(script)
    captions = load_captioner(server.source, "cpu").batch([EXAMPLES], errors="return")
    if error and re.search("401|address|reached", error):
        with pytest.raises(Unreachable, match=error):
            next(captions)
    elif error:
        assert re.search(error, str(next(captions)))
    else:
        (caption,) = captions
        assert isinstance(caption, Caption) and caption.log_probability is None and caption.text == "The cube is gone"
    assert len(server.requests) == num_requests and server.keys == {"Bearer sk-secret"}
    request = server.requests[-1]
    assert request["model"] == "some/model:7b" and {"max_tokens", "max_completion_tokens"} & set(request)


def test_a_folder_is_continued_by_row(server: Server, pairs: Path) -> None:
    out = pairs.with_name("captions.jsonl")
    words = "caption", pairs, "--out", out, "--batch_size", 1, "--checkpoint"
    server.script = [(200, completion(), {})] * 2 + [(400, ERROR, {}), (200, completion(), {})] + [(404, ERROR, {})] * 9
    assert "the address" in str(run(*words, server.source))
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in found if "error" in row] == ["2"] and len(found) >= 3
    server.script, server.requests = [], []
    elsewhere = server.source.replace("127.0.0.1", "localhost")  # the address is not a part of the model's identity
    assert run(*words, elsewhere) is None
    assert len(server.requests) == 5 - sum("error" not in row for row in found)
    assert out.read_text().count('"caption": "The cube is gone"') == 5
    assert not any(b"secret" in path.read_bytes() for path in pairs.parent.iterdir())
    assert "were made with another" in str(run(*words, server.source, "--prompt", "What?"))


def test_all_commands_take_a_served_model(server: Server, pairs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tests.scenes.rasters import write_scene

    folder = pairs.parent
    given = "--checkpoint", server.source
    assert run("caption", *EXAMPLES, *given) is None
    assert capsys.readouterr().out == "The cube is gone\n"
    rows = pa.Table.from_pylist([{"before": EXAMPLES[0], "after": EXAMPLES[1]}] * 17)
    pq.write_table(rows, folder / "pairs.parquet")
    assert run("caption", folder / "pairs.parquet", "--out", folder / "table", *given) is None
    (row,) = pq.read_table(folder / "table/part-00000001.parquet").to_pylist()  # a part has a batch of 16 pairs
    assert (row["caption"], row["log_probability"], row["words"]) == ("The cube is gone", None, [])
    outputs = "--out", folder / "changes.geojson", "--out", folder / "changes.csv", "--out", folder / "changes.html"
    assert run("caption", *write_scene(folder), *outputs, *given) is None
    (change, *_) = json.loads((folder / "changes.geojson").read_text())["features"]
    assert (change["properties"]["caption"], change["properties"]["log_probability"]) == ("The cube is gone", None)
    scene = "caption", *write_scene(folder), "--tile", 64, "--out", folder / "failed.csv", *given
    server.script = [(200, completion(None), {})]
    assert " tiles failed, see above; the same command repeats them." in str(run(*scene))
    num_asked = len(server.requests)
    assert run(*scene) is None and len(server.requests) == num_asked + 1
    assert run("check", *EXAMPLES, *given) == 1 and "The cube is gone" in capsys.readouterr().out
    choices = find_choices([server.source], folder)
    assert choices[0].label == "VLM · on a server · model:7b"
    page = _answer(Captioners(choices, "cpu"), *EXAMPLES, "0", 5)
    assert "The cube is gone" in page and "log-probability" not in page and "only answers with text" in page


def test_what_is_refused(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "caption", *EXAMPLES, "--checkpoint", server.source
    for more in (("--beam", 3), ("--heatmap", tmp_path / "a.png"), ("--checkpoint", "tiles"), ("--length_penalty", 1)):
        sentence = str(run(*words, *more))
        assert "some/model:7b: only answers with text" in sentence and "qwen2_5_vl" in sentence, more
    for more in (("export", server.source), ("push", server.source, "user/name"), ("average", server.source, "a.ckpt")):
        assert "openai:some/model:7b: a model behind a server" in str(run(*more)), more
    assert not server.requests
    monkeypatch.setenv("OPENAI_API_KEY", "sk-sécret")
    assert "set OPENAI_API_KEY to it (ASCII only)" in str(run(*words)) and "cret" not in str(run(*words))
    monkeypatch.delenv("OPENAI_API_KEY")
    assert load_captioner(server.source, "cpu")(*EXAMPLES).text and server.keys == {"Bearer none"}
    for source, error in (
        ("openai:m@https://api.example.org/v1", "needs a key; set OPENAI_API_KEY"),
        ("openai:gpt", "not a served model .*; write openai:MODEL@http"),
        ("openai:@http://localhost/v1", "not a served model"),
        ("openai:m@http://localhost:x/v1", "not a served model"),
    ):
        with pytest.raises(DiffcapError, match=error):
            load_captioner(source, "cpu")
