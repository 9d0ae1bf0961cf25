"""Models without code of their family, in this process and behind `transformers serve`; the stage zeroshot of a served model."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import urlopen

import pytest
from PIL import Image
from tests.commands import environment

pytest.importorskip("transformers")
pytest.importorskip("openai")

from tests.test_answering import ERROR, EXAMPLES, Server, run, server
from tests.tiny_vlms import build

from diffcap import load_captioner
from diffcap.methods.vlm import forms, generic
from diffcap.methods.vlm.model import PROMPT
from diffcap.records import read_dataset
from diffcap.utils.errors import DiffcapError

__all__ = ["server"]  # a fixture
METRICS = "--metrics=[BLEU-4]"


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llava", tmp_path_factory.mktemp("models") / "tiny-llava")


@pytest.fixture(scope="module")
def served(llava: Path) -> Iterator[str]:
    """The model behind `transformers serve`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code = "from transformers.cli.transformers import main; main()"
    words = [sys.executable, "-c", code, "serve", str(llava), "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    process = subprocess.Popen(words, env=environment(HF_HUB_OFFLINE="1"), stderr=subprocess.DEVNULL)
    try:
        for _ in range(240):
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None
                time.sleep(0.5)
        yield f"openai:{llava}@http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of at most 12 tokens, because tiny models do not end theirs."""
    monkeypatch.setattr(forms, "MAX_LENGTH", 12)
    monkeypatch.setattr(forms, "SERVED_MAX_LENGTH", 12)


def pictures(*colors: str) -> list[Image.Image]:
    return [Image.new("RGB", (90 + 20 * number, 70), color) for number, color in enumerate(colors)]


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_any_family_captions(family: str, llava: Path, tmp_path: Path) -> None:
    """As `generate` of transformers does, in a batch with other pairs, too."""
    import transformers

    folder = llava if family == "llava" else build(family, tmp_path / family)
    captioner = load_captioner(folder, "cpu")
    pairs: Any = [EXAMPLES, pictures("red", "blue"), pictures("blue", "red")]
    answers = [caption.answer for caption in captioner.batch(pairs)]
    assert [answer.text for answer in answers] == [captioner(*pair).answer.text for pair in pairs]
    assert all(answer.prompt_tokens > 64 and 0 < answer.answer_tokens <= 12 for answer in answers)
    images = [Image.open(path).convert("RGB") for path in EXAMPLES]
    processor = transformers.AutoProcessor.from_pretrained(folder)
    text = "<image><image>" + PROMPT
    if family == "llava":
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": PROMPT}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[text], images=[images], return_tensors="pt")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[:, inputs["input_ids"].shape[1] :]
    assert answers[0].text == processor.batch_decode(ids, skip_special_tokens=True)[0]


def test_what_cannot_compare_two_images_is_refused(llava: Path, tmp_path: Path) -> None:
    folder = build("blip-2", tmp_path / "blip2")
    with pytest.raises(DiffcapError, match=r"has no chat template.*types qwen2_5_vl"):
        load_captioner(folder, "cpu")
    with mock.patch.dict(generic.PLACES, {"blip-2": ""}), pytest.raises(DiffcapError, match="depend on the second"):
        load_captioner(folder, "cpu")
    assert "has no probabilities, beam search" in str(run("caption", *EXAMPLES, "--checkpoint", llava, "--beam", 2))
    assert "no special token in --prompt" in str(run("caption", *EXAMPLES, "--checkpoint", llava, "--prompt=<image>?"))
    config = json.loads((llava / "config.json").read_text())
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    with pytest.raises(DiffcapError, match="type 'bert', which is not supported"):
        load_captioner(tmp_path / "bert", "cpu")


@pytest.mark.usefixtures("short")
def test_a_real_server_gives_the_local_captions(served: str, llava: Path) -> None:
    pairs: Any = [EXAMPLES, pictures("red", "blue"), EXAMPLES[::-1], pictures("blue", "red")]
    local, there = ([*load_captioner(source, "cpu").batch(pairs)] for source in (str(llava), served))
    for one, other in zip(local, there):
        assert one.text == other.text and one.answer[1:3] == other.answer[1:3]  # also the numbers of tokens
    # The pair whose image this server cannot read fails alone, although the server closes the connection after it.
    with mock.patch("diffcap.models.answering.base64.b64encode", side_effect=[b"AAAA", b"AAAA"]):
        (caption,) = load_captioner(served, "cpu").batch([EXAMPLES], errors="return")
    assert isinstance(caption, DiffcapError) and "no answer (500" in str(caption)
    assert load_captioner(served, "cpu")(*EXAMPLES).text == local[0].text
    unknown = served.replace("tiny-llava", "other")
    (caption,) = load_captioner(unknown, "cpu").batch([EXAMPLES], errors="return")
    assert "Server is pinned to" in str(caption)


@pytest.mark.usefixtures("short")
def test_zero_shot_scores_of_a_real_server_are_the_local_ones(
    served: str, llava: Path, pixels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "zeroshot", "--dataset", "blocks", "--folder", pixels, "--vlm"
    for source in (served, str(llava)):
        assert run(*words, source, "--", METRICS, "--max_length=12") is None
    folders = sorted(tmp_path.glob("runs/blocks/vlm-*/zeroshot-eval"))  # vlm-openai-..., vlm-tiny-llava
    there, local = (json.loads((folder / "metrics.json").read_text()) for folder in folders)
    assert (folders[0] / "predictions.json").read_text() == (folders[1] / "predictions.json").read_text()
    assert there["usage"]["prompt_tokens"] == local["usage"]["prompt_tokens"] > 0 < there["usage"]["seconds"]
    assert there["provenance"]["checkpoints"][0]["base"] == f"openai:{llava}"


def test_no_pair_is_asked_about_twice(
    server: Server, pixels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    num_pairs = sum(pair.split == "test" for pair in read_dataset(pixels).pairs)
    words = "zeroshot", "--dataset", "blocks", "--folder", pixels, "--vlm"
    server.script = [(400, ERROR, {})] * 2
    assert f"2 of {num_pairs} pairs have no answer" in str(run(*words, server.source, "--", METRICS))
    (answers,) = tmp_path.glob("runs/blocks/vlm-openai-some-model-7b-??????/zeroshot-eval/answers-*.jsonl")
    answers.write_text(answers.read_text()[:-20])  # as after a kill: the last line is cut
    server.requests.clear()
    assert run(*words, server.source, "--", METRICS) is None and len(server.requests) == 3
    metrics = json.loads(answers.with_name("metrics.json").read_text())
    assert metrics["usage"]["answer_tokens"] == 9 * num_pairs and metrics["unfinished"] == 0
    server.requests.clear()
    assert run(*words, server.source.replace("127.0.0.1", "localhost"), "--", METRICS) is None and not server.requests
    assert run(*words, server.source, "--", METRICS, "--prompt=What?") is None and len(server.requests) == num_pairs
    assert not any(b"secret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert run(*words, server.source.replace("some/", "some-"), "--eval", "swap", "--", METRICS) is None
    (swapped,) = tmp_path.glob("runs/blocks/vlm-openai-some-model-7b-*/zeroshot-eval/predictions-swapped.json")
    assert (
        len(json.loads(swapped.read_text())) == num_pairs and swapped.parent != answers.parent
    )  # two models, two folders
    refused = str(run("finetune", "--method", "vlm", *words[1:], server.source))
    assert "openai:some/model:7b: only answers with text" in refused and "qwen2_5_vl" in refused
    assert "--devices is 2" in str(run(*words, server.source, "--devices", 2, "--run", "two", "--", METRICS))
