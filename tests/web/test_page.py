"""The page over HTTP: what visitors are told, what they cannot do, and that many can come at once."""

import base64
import io
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradio_client import handle_file
from gradio_client.exceptions import AppError
from PIL import Image
from tests.commands import ROOT
from tests.odd_images import encoded
from tests.test_pair_captioner import make, noise
from tests.web.site import SHIPPED, Visitor, pair, trap, visited

from diffcap.change import change_probability, scored_sentences
from diffcap.pair_captioner import load_captioner
from diffcap.report.heatmaps import percent
from diffcap.utils.errors import DiffcapError
from diffcap.web.captioners import Captioners, Choice
from diffcap.web.page import _answer
from diffcap.web.result import render_examples


def text_of(page: str) -> str:
    """The words of a page in which every tag that is opened is closed."""
    tags = re.findall(r"<(/?)(\w+)", page)
    assert all(tags.count(("", name)) == tags.count(("/", name)) for _, name in tags if name != "img")
    return " ".join(unescape(re.sub("<[^>]*>", " ", page)).split())


def sentence(page: str) -> str:
    """What a refusal says, and nothing else."""
    (output,) = re.findall(r'<div class="dc-message dc-error" role="alert">([^<]*)</div>', page)
    assert page.count("<") == 2 and "Traceback" not in page and 15 < len(output) < 400 and output.endswith(".")
    return unescape(output)


def test_a_visitor_gets_the_caption_that_the_captioner_writes(visitor: Visitor) -> None:
    pictures = pair()
    page = visitor.caption(visitor.upload("a.png", pictures[0]), visitor.upload("b.png", pictures[1]), beams=5)
    caption = load_captioner(device="cpu")(*pictures, 5)
    assert re.findall(r'data-word="\d+" style="[^"]*" aria-label="([^,]*), ', page) == [
        one.text for one in caption.words
    ]
    assert len(caption.words) > 3 and page.count('class="dc-heat"') == 2 * len(caption.words)
    text = text_of(page)
    assert caption.alternatives and all(other.text in text for other in caption.alternatives)
    assert f"{caption.alternatives[0].log_probability:.2f}" in text and SHIPPED.label in text
    assert "was trained on rendered `blocks` scenes only; its captions of other images" in text


def test_a_look_at_an_upload_shows_what_browsers_cannot_and_names_what_was_done(visitor: Visitor) -> None:
    frames = [Image.new("RGB", (30, 20), color) for color in ("red", "blue")]
    moving = encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:])
    shown, expected = visitor.ask("look_before", visitor.upload("two.tif", moving))
    assert "Has several frames, the first was used." in expected
    with Image.open(io.BytesIO(visitor.http.get(shown["url"]).content)) as image:
        assert image.format == "PNG" and image.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    shown, expected = visitor.ask("look_after", visitor.upload("one.png", encoded(frames[0], "PNG")))
    assert expected == "" and shown.get("__type__") == "update"  # stays as it is
    shown, expected = visitor.ask("look_after", visitor.upload("<b>{x}.png", b"dear diary"))
    assert shown is None and "The picture after (" in sentence(expected) and "a text file, not an image" in expected
    assert "<b>" not in expected and "{x}" not in expected


def test_notes_on_a_pair_are_in_the_answer(visitor: Visitor) -> None:
    images = [Image.new("L", (60, 40), 99), Image.new("RGB", (60, 40), (200, 20, 20))]
    page = visitor.caption(*(visitor.upload(f"{n}.png", encoded(image, "PNG")) for n, image in enumerate(images)))
    names = "The picture before (0.png) and the picture after (1.png): "
    assert f"{names}the first is in gray and the second in color, which the caption may take for a change." in page


def test_no_pictures_or_one_is_a_sentence(visitor: Visitor) -> None:
    one = visitor.upload("a.png", pair()[0])
    for before, after, found in ((None, None, "both pictures"), (one, None, "the picture after")):
        assert f"Give {found} first" in sentence(visitor.caption(before, after))


def test_the_probability_of_a_change_and_its_box_are_shown(tmp_path: Path) -> None:
    made = make(tmp_path / "best.ckpt", "pcl")
    paths = [str(tmp_path / f"{number}.png") for number in (1, 2)]
    picture = Image.new("RGB", (100, 50))
    for path in paths:
        picture.save(path)
        picture.paste((200, 20, 20), (20, 10, 50, 25))
    page = _answer(Captioners([Choice("mine", made)], "cpu"), *paths, "0", 1)
    assert page.count("left: 20.00%; top: 20.00%; width: 30.00%; height: 30.00%") == 1
    text = text_of(page)
    caption = load_captioner(made, device="cpu")(*paths)
    assert caption.nothing_changed is not None
    shown = f"probability that something changed {percent(1 - caption.nothing_changed)} log-probability of the"
    assert shown in text and "blocks" not in text


def test_an_example_with_a_mask_shows_its_outline_on_both_pictures_and_no_other_pair_does(tmp_path: Path) -> None:
    captioners = Captioners([SHIPPED], "cpu")
    masked = [example for example in render_examples() if example.mask is not None]
    assert masked and all(example.captioner == "tiles" for example in masked)

    def answer(before: Image.Image, after: Image.Image) -> str:
        for name, image in (("b", before), ("a", after)):
            image.save(tmp_path / f"{name}.png")
        return _answer(captioners, str(tmp_path / "b.png"), str(tmp_path / "a.png"), "0", 1)

    page = answer(masked[0].before, masked[0].after)
    lines = re.findall(r'class="dc-outline" alt="" src="data:image/webp;base64,([^"]*)"', page)
    assert len(lines) == 2 and "where the change is" in text_of(page)
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(lines[0]))))[..., 3] > 0
    y, x = np.nonzero(masked[0].mask)
    top, left = (np.flatnonzero(shown.any(axis)).min() for axis in (1, 0))
    assert 0 <= 2 * y.min() - top <= 3 and 0 <= 2 * x.min() - left <= 3  # the line is outside, in twice the size
    plain = next(example for example in render_examples() if example.mask is None)
    for pictures in ((plain.before, plain.after), (masked[0].after, masked[0].before), (noise(1), noise(2))):
        assert "dc-outline" not in answer(*pictures)


def test_uploads_are_captioned_once_both_are_there(tmp_path: Path) -> None:
    captioners, paths = Captioners([SHIPPED], "cpu"), []
    for number, data in enumerate(pair()):
        paths.append(str(tmp_path / f"{number}.png"))
        Path(paths[-1]).write_bytes(data)
    assert _answer(captioners, paths[0], None, "0", 1, is_upload=True) == ""
    assert _answer(captioners, None, paths[1], "0", 1, is_upload=True) == ""
    assert 'class="dc-word"' in _answer(captioners, *paths, "0", 1, is_upload=True)


def test_only_uploaded_files_can_be_named(visitor: Visitor, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(pair()[0])
    with trap() as (address, asked):
        fine = visitor.upload("fine.png", pair()[0])
        inside = str(Path(fine["path"]).parent / ".." / ".." / ".." / "secret.png")
        for path in (str(secret), address, "/etc/passwd", inside, "pyproject.toml"):
            for values in ((Visitor.file(path), fine, "0", 1), (fine, fine, Visitor.file(path), 1)):
                with pytest.raises(RuntimeError):
                    visitor.caption(*values)
        assert 'class="dc-word"' in visitor.caption({**fine, "url": address}, fine)
    assert not asked


def test_the_page_names_no_other_host_and_nothing_of_the_machine(visitor: Visitor) -> None:
    page = visitor.http.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy and "http" not in policy and "*" not in policy
    config = visitor.http.get("/config").text
    for text in (page.text, config):
        assert not re.findall(r'(?:src|href)="?(?:https?:)?//(?!127\.0\.0\.1)[^"]*', text)
        assert str(Path.cwd()) not in text and "site-packages" not in text


@pytest.mark.slow
def test_twenty_visitors_at_once(visitor: Visitor) -> None:
    examples = [pair(number) for number in range(5)]
    captioner = load_captioner(device="cpu")
    truth = [captioner(*pictures).text for pictures in examples]
    assert len(set(truth)) == 5

    def visit(number: int) -> str:
        another = Visitor(str(visitor.http.base_url))
        with another.http:
            page = another.caption(*(another.upload(f"{number}.png", data) for data in examples[number % 5]))
        return " ".join(re.findall(r'data-word="\d+" style="[^"]*" aria-label="([^,]*), ', page))

    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(visit, range(20))) == truth * 4


def test_scripts_get_the_caption_as_json(visitor: Visitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = Path("before.png"), Path("after.png")
    for file, content in zip(files, pair()):
        file.write_bytes(content)
    captioner = load_captioner(device="cpu")
    (caption,) = captioner.batch([files], 5, sentences=scored_sentences(captioner), locate=True)
    assert caption.box
    expected = json.loads(json.dumps({**caption.as_dict(), "changed": change_probability(caption)}))
    section = (ROOT / "docs/caption.md").read_text().partition("### From a script")[2]
    section = section.replace("http://127.0.0.1:7860", str(visitor.http.base_url))
    bash, python = (re.findall(rf"```{name}\n(.*?)```", section, re.DOTALL)[0] for name in ("bash", "python"))
    done = subprocess.run(["bash", "-euc", bash], capture_output=True, text=True)
    assert json.loads(done.stdout.rpartition("data: ")[2]) == [expected], done.stderr
    variables: dict[str, Any] = {}
    exec(python, variables)
    assert variables["answer"] == expected
    client = variables["client"]
    assert set(client.view_api(print_info=False, return_format="dict")["named_endpoints"]) == {"/caption"}
    with pytest.raises(AppError, match="Give both pictures"):
        client.predict(handle_file("before.png"), None, api_name="/caption")


@pytest.mark.slow
def test_a_fault_of_the_program_is_a_sentence_for_visitors_and_a_traceback_for_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(Captioners):
        def use(self, number: int):
            raise (ZeroDivisionError("a secret"), MemoryError(), DiffcapError("the checkpoint is gone."))[number]

    with visited(tmp_path / "uploads", Broken([SHIPPED] * 3)) as visitor:
        fine = visitor.upload("fine.png", pair()[0])
        with pytest.raises(RuntimeError, match=r"Something went wrong on the server") as error:
            visitor.caption(fine, fine)
        assert "secret" not in str(error.value)
        with pytest.raises(RuntimeError, match=r"Not enough memory"):
            visitor.caption(fine, fine, "1")
        assert sentence(visitor.caption(fine, fine, "2")) == "the checkpoint is gone."
    logged = capfd.readouterr().err
    assert logged.count("Traceback") == 1 and "ZeroDivisionError" in logged
