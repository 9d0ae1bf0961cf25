"""`diffcap serve` as a user starts it: where it listens, what it offers, what it leaves behind."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.commands import environment
from tests.models.tiny import captioner, pretraining
from tests.odd_images import encoded, scene
from tests.toy_checkpoints import write_checkpoint
from tests.web.site import Visitor

from diffcap.pair_captioner import DEFAULT_CAPTIONER as SHIPPED
from diffcap.utils.errors import DiffcapError
from diffcap.web import captioners as shelf
from diffcap.web.captioners import Captioners, Choice, find_choices
from diffcap.web.server import listen, serve


@pytest.mark.slow
def test_the_command_serves_on_this_machine_alone_and_leaves_nothing(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "runs" / "mine")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "diffcap", "serve", "--port", "0", "--checkpoint", str(SHIPPED)]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(TMPDIR=str(temporary), PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            line = server.stdout.readline()
            found = re.fullmatch(r"diffcap is at (http://127\.0\.0\.1:(\d+)) with 4 captioners; Ctrl-C ends .*\n", line)
            assert found, line
            visitor = Visitor(found[1])
            with visitor.http:
                assert "What changed?" in visitor.http.get("/config").text
                assert visitor.http.get("/config", headers={"host": "evil.example"}).status_code == 400
                picture = visitor.upload("a.png", encoded(scene("RGB"), "PNG"))
                assert Path(picture["path"]).is_relative_to(temporary)
                assert 'class="dc-word"' in visitor.caption(picture, picture, "3")
                assert "blocks · mine" in visitor.caption(picture, picture, "3")
            other = next((one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)), "")
            if other and not other.startswith("127."):
                with pytest.raises(OSError):
                    socket.create_connection((other, int(found[2])), 2).close()
            server.send_signal(signal.SIGINT)
            assert server.wait(30) in (0, -signal.SIGINT)
            assert "Traceback" not in server.stderr.read()
        finally:
            server.kill()
    assert not [path for path in temporary.rglob("diffcap-web-*")]


def test_ports_and_hosts_that_cannot_be_had_are_one_sentence() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DiffcapError, match=rf"port {port} \(Address already in use\); choose another --port"):
            listen("127.0.0.1", port)
    with pytest.raises(DiffcapError, match=r"--port 70000: give a port from 1 to 65535"):
        listen("127.0.0.1", 70_000)
    with pytest.raises(DiffcapError, match=r"cannot listen on 203\.0\.113\.7"):
        listen("203.0.113.7", 0)
    with pytest.raises(DiffcapError, match=r"cannot listen on \.\., port 0 .*; choose another --port"):
        listen("..", 0)


def test_without_gradio_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DiffcapError, match=r"needs gradio.*pip install 'diffcap\[web\]'"):
        serve([])


def test_what_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    for number, name in enumerate(("desk", "toys")):
        trained = captioner(vocabulary_size=10, text_cls=True)
        new = write_checkpoint(folder(runs / name / "pcl/finetune") / "best.ckpt", trained, "finetune")
        os.utime(new, (number, number))
    write_checkpoint(folder(runs / "desk/pcl/pretrain") / "best.ckpt", pretraining(), "pretrain")
    write_checkpoint(folder(runs / "odd/finetune") / "best.ckpt", captioner(), "finetune", method="duda")
    (folder(runs / "cut/pcl/finetune") / "best.ckpt").write_bytes(new.read_bytes()[:500])
    (folder(runs / "other") / "config.json").write_text("[]")
    (runs / "other" / "model.safetensors").write_bytes(b"")
    (folder(runs / "unknown") / "config.json").write_text('{"stage": "finetune", "method": [1]}')
    (runs / "unknown" / "model.safetensors").write_bytes(b"")
    shutil.copytree(SHIPPED, runs / "exported")
    named = find_choices([str(SHIPPED)], runs)
    assert [choice.label for choice in named][1:] == [
        "SCORER+CBR · blocks · ships with diffcap",
        "SCORER+CBR · tiles · ships with diffcap",
        "SCORER+CBR · blocks · exported",
        "IDC-PCL · toy · toys/pcl",
        "IDC-PCL · toy · desk/pcl",
    ]
    assert named[0].label == f"SCORER+CBR · blocks · {SHIPPED.name}"
    twice = find_choices([str(SHIPPED), str(SHIPPED)], Path("nowhere"))
    assert twice[0] == twice[1] == named[0]  # nothing tells a checkpoint from itself
    notes = capfd.readouterr().err.splitlines()
    assert len(notes) == 1 and notes[0].startswith("note: left out: runs/cut/pcl/finetune/best.ckpt: not a readable")
    with pytest.raises(DiffcapError, match="no checkpoint there"):
        find_choices(["nowhere.ckpt"], runs)
    assert len(find_choices([], Path("nowhere"))) == 2


def folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_few_captioners_are_kept_and_each_is_used_by_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, using, most = [], [0], [0]

    def load(source: str, *rest: object) -> str:
        loaded.append(source)
        if source == "gone" and loaded.count(source) == 1:
            raise DiffcapError("no checkpoint there")
        return source.upper()

    monkeypatch.setattr(shelf, "load_captioner", load)
    captioners = Captioners([Choice(name, name) for name in ("a", "b", "c", "gone")], max_loaded=2)
    for number in (0, 1, 0, 2, 0, 1):  # c takes b's place, then b takes c's
        with captioners.use(number) as found:
            assert found == "ABC"[number]
    assert loaded == ["a", "b", "c", "b"]
    with pytest.raises(DiffcapError, match="no checkpoint there"), captioners.use(3):
        pass

    def use(_: int) -> None:
        with captioners.use(3):
            using[0] += 1
            most[0] = max(most[0], using[0])
            time.sleep(0.01)
            using[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))
    assert most == [1] and loaded == ["a", "b", "c", "b", "gone", "gone"]
