"""`diffcap caption` as a user runs it: one pair, folders, tables, odd files; sentences, JSON and pictures."""

import csv
import errno
import io
import itertools
import json
import os
import resource
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.commands import environment
from tests.hub_server import Hub
from tests.test_pair_captioner import make, make_coarse, noise, reweighted

from diffcap.cli import main
from diffcap.commands.caption_file import exclusive_lock
from diffcap.commands.pairs import ImagePair, find_pairs
from diffcap.evaluation.coco import read_predictions
from diffcap.pair_captioner import SHIPPED, PairCaptioner
from diffcap.report.heatmaps import percent
from diffcap.utils.errors import DiffcapError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make(tmp_path_factory.mktemp("trained") / "best.ckpt", "scorer"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with before/1.png, before/2.png and the same names in after."""
    for number, side in enumerate(("before", "after")):
        (tmp_path / side).mkdir()
        for name in (1, 2):
            noise(10 * number + name).save(tmp_path / side / f"{name}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def caption(*words: str) -> str | int | None:
    """The exit status of the command in this process; None where all went well."""
    try:
        main(["caption", *words])
    except SystemExit as stop:
        return stop.code
    return None


def test_one_pair(here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair = "before/1.png", "after/1.png"
    assert caption(*pair, "--checkpoint", checkpoint, "--beam", "3", "--heatmap", "out/attention.png") is None
    expectation = capsys.readouterr()
    text, score, *others = expectation.out.splitlines()
    assert text and score.startswith("log-probability of the sentence: -") and "%" not in score
    assert others and all(line.startswith("or (log-probability -") for line in others)
    assert expectation.err == ""
    with Image.open(here / "out" / "attention.png") as picture:
        assert picture.width == 900 and picture.height > 300
    assert caption(*pair, "--checkpoint", checkpoint, "--json", "--beam=3") is None
    value = json.loads(capsys.readouterr().out)
    assert value["text"] == text and len(value["alternatives"]) == len(others) and value["nothing_changed"] is None
    assert f"{value['log_probability']:.3f}" in score


def test_several_checkpoints_caption_together(here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    pair, other = ("before/1.png", "after/1.png"), str(reweighted(Path(checkpoint), here / "other.ckpt"))
    output = []
    for names in ([checkpoint], [other], [checkpoint, other], [other, checkpoint]):
        options = [word for name in names for word in ("--checkpoint", name)]
        assert caption(*options, *pair, "--json") is None
        output.append(json.loads(capsys.readouterr().out))
    assert output[2]["text"] == output[3]["text"] and output[2]["log_probability"] == pytest.approx(
        output[3]["log_probability"]
    )
    assert output[2]["log_probability"] not in (output[0]["log_probability"], output[1]["log_probability"])


def test_a_captioner_of_blocks_says_that_it_knows_no_other_images(
    here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, note = (
        ("before/1.png", "after/1.png"),
        "was trained on rendered `blocks` scenes only; its captions of other images",
    )
    assert caption(*pair) is None
    expectation = capsys.readouterr()
    assert (
        expectation.out
        and "no --checkpoint: the captioner `blocks`, which ships with diffcap, is used." in expectation.err
        and note in expectation.err
    )
    assert caption(*pair, "--checkpoint", str(SHIPPED)) is None
    expectation = capsys.readouterr().err
    assert expectation.startswith("note: ") and note in expectation and "no --checkpoint" not in expectation
    assert caption(*pair, "--checkpoint", checkpoint) is None
    assert note not in capsys.readouterr().err  # it was trained on something else


def test_the_probability_of_a_change_comes_first(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = str(make(here / "pcl.ckpt", "pcl"))
    assert caption("before/1.png", "after/1.png", "--checkpoint", made) is None
    _, change, score = capsys.readouterr().out.splitlines()
    assert caption("before/1.png", "after/1.png", "--checkpoint", made, "--json") is None
    value = json.loads(capsys.readouterr().out)
    assert change == f"probability that something changed: {percent(1 - value['nothing_changed'])}"
    assert score.startswith(f"log-probability of the sentence: {value['log_probability']:.3f}") and "%" not in score


def test_many_pairs_go_on_past_a_bad_one(here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "after" / "1.png").write_text("not a picture")
    assert caption(".", "--checkpoint", checkpoint, "--json", "--heatmap", "maps") == (
        "error: 1 of 2 pairs could not be captioned, see above; the others are done."
    )
    expectation = capsys.readouterr()
    first, second = map(json.loads, expectation.out.splitlines())
    assert first["id"] == "1" and "a text file" in first["error"] and "a text file" in expectation.err
    assert second["id"] == "2" and second["text"] and [path.name for path in (here / "maps").iterdir()] == ["2.png"]
    assert caption("before", "after", "--checkpoint", checkpoint) is not None
    assert capsys.readouterr().out.startswith("2\t")


def test_a_table_of_pairs(here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "pairs.csv").write_text("id,before,after\nx,before/1.png,after/1.png\ny,before/2.png,after/2.png\n")
    assert caption("pairs.csv", "--checkpoint", checkpoint) is None
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["x", "y"] and all(line.split("\t")[1] for line in lines)


def test_missing_images_are_found_before_the_hub_is_asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    (here / "pairs.csv").write_text("before,after\nbefore/8.png,after/1.png\nbefore/9.png,after/2.png\n")
    for words, missing in ((("before/1.png", "after/8.png"), "after/8.png"), (("pairs.csv",), "before/8.png")):
        message = str(caption(*words, "--checkpoint", "user/name"))
        assert message == f"error: {missing}: file not found; give the path of an image file." and not hub.asked
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    message = str(caption("before/1.png", "after/1.png", "--checkpoint", "user/name"))
    assert message.startswith(
        "error: user/name: 127.0.0.1 cannot be reached (Connection refused), and the model is not"
    )
    assert "\n" not in message and message.endswith(
        "or `tiles`, which ship with diffcap and know rendered images only."
    )


def test_a_name_that_no_disk_takes_is_the_fault_of_its_pair_alone(
    here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "pairs.csv").write_text(f"before,after\n{300 * 'x'}.png,after/1.png\nbefore/2.png,after/2.png\n")
    assert "1 of 2 pairs could not be captioned" in str(caption("pairs.csv", "--checkpoint", checkpoint))
    expectation = capsys.readouterr()
    assert expectation.out.startswith("2\t") and "x.png: cannot be read (File name too long)" in expectation.err


def test_pairs_that_cannot_be_drawn_are_captioned(
    here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--checkpoint", checkpoint, "--checkpoint", str(make_coarse(here / "coarse.ckpt")), "--heatmap", "maps"]
    assert caption(".", *options) == "error: 2 of 2 pairs could not be drawn, see above."
    expectation = capsys.readouterr()
    assert [line.partition("\t")[0] for line in expectation.out.splitlines()] == ["1", "2"]
    assert [line.split(": the ")[0] for line in expectation.err.splitlines()] == [
        f"note: {name}: not drawn: this captioner has no attention maps" for name in (1, 2)
    ]


@pytest.mark.parametrize(
    ("encoding", "errors", "plain"),
    [
        ("utf-8", "strict", "é\\udcff"),
        ("utf-8", "surrogateescape", "é\\udcff"),
        ("ascii", "strict", "\\xe9\\udcff"),
    ],
)
def test_letters_that_the_output_does_not_have_are_escaped(
    here: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str, plain: str
) -> None:
    for side in ("before", "after"):
        (here / "odd").mkdir(exist_ok=True)
        (here / "odd" / (os.fsdecode(b"\xc3\xa9\xff_") + f"{side}.png")).write_bytes(
            (here / side / "1.png").read_bytes()
        )

    def output(*options: str) -> str:
        stdout = io.TextIOWrapper(io.BytesIO(), encoding, errors=errors)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert caption("odd", "--checkpoint", checkpoint, *options) is None
        stdout.flush()
        return stdout.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]

    assert output().startswith(f"{plain}\t")
    assert json.loads(output("--json"))["id"] == "é\udcff"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["before/1.png"], "the image after the change is missing"),
        (["nowhere"], "file not found"),
        (
            ["http://example.org/a.png"],
            "error: http://example.org/a.png: a URL; download the images, then: diffcap caption",
        ),
        (["https://x.org/pairs.csv"], "error: https://x.org/pairs.csv: a URL; download the images"),
        (
            ["http://example.org/a.png", "after/1.png"],
            "error: http://example.org/a.png: a URL, not a file; download the image",
        ),
        (
            ["pairs.json"],
            "pairs.json: a table of pairs is a .csv, .tsv or .jsonl file, the last with one JSON object per line.",
        ),
        (["pairs.zip"], "pairs.zip: an archive; extract it, and give its folder of pairs"),
        (["before/1.png", "after/none.png"], "file not found"),
        (["before/1.png", "after"], "one is a folder and one is not"),
        (["before/1.png", "after/1.png", "--heatmap", "x.jpg"], "ends in .png"),
        (["before/1.png", "after/1.png", "--beam", "0"], "--beam is 0; give 1 to 100."),
        (["before/1.png", "after/1.png", "--beam", "1000000000"], "--beam is 1000000000; give 1 to 100."),
        (
            ["before/1.png", "after/1.png", "--length_penalty", "1e999"],
            "the length penalty is inf; give a finite number",
        ),
        (["before/1.png", "after/1.png", "--batch_size", "0"], "--batch_size is 0; it must be at least 1."),
        (["before/1.png", "after/1.png", "--device", "meta"], "no such device; choose one of auto, cpu"),
        (["before/1.png", "after/1.png", "--device", "cuda:99"], "no such device; choose one of auto, cpu"),
        (["before/1.png", "after/1.png", "--device", "privateuseone"], "no such device; choose one of auto, cpu"),
        (["before/1.png", "after/1.png", "--checkpoint", "none.ckpt"], "no checkpoint there"),
        (
            ["before/1.png", "after/1.png", "--checkpoint", "https://huggingface.co/user/name"],
            "error: https://huggingface.co/user/name: a URL, not a checkpoint; give the path of a file, or user/name",
        ),
        (["empty.csv"], "it contains no pair"),
        (["odd.csv"], "must name the columns"),
        (["half.csv"], 'line 2: "after" is missing'),
    ],
)
def test_what_cannot_be_is_one_sentence(here: Path, checkpoint: str, words: list[str], reason: str) -> None:
    (here / "empty.csv").write_text("before,after\n")
    (here / "odd.csv").write_text("a,b\n1,2\n")
    (here / "half.csv").write_text("before,after\na.png,\n")
    for name in ("pairs.json", "pairs.zip"):
        (here / name).write_bytes(b"")
    options = [] if "--checkpoint" in words else ["--checkpoint", checkpoint]
    output = str(caption(*words, *options))
    assert output.startswith("error: ") and reason in output and "\n" not in output


@pytest.mark.slow
def test_the_real_command_leaves_no_traceback(here: Path, checkpoint: str) -> None:
    command = [str(Path(sys.executable).with_name("diffcap")), "caption", "before/1.png", "after/1.png"]
    done = subprocess.run(
        [*command, "--checkpoint", checkpoint], capture_output=True, text=True, env=environment(), cwd=here, check=False
    )
    assert done.returncode == 0 and done.stdout and done.stderr == ""


# --------------------------------------------------------------------------------------------------- --out for many pairs


@pytest.fixture
def table(here: Path) -> Path:
    """A table of five pairs in the current folder."""
    lines = [f"é {number},before/{1 + number % 2}.png,after/{1 + number // 2 % 2}.png" for number in range(5)]
    (here / "pairs.csv").write_text("\n".join(["id,before,after", *lines]))
    return here


def rows_of(path: Path) -> list[dict[str, str]]:
    text = path.read_text("utf-8")
    return (
        [json.loads(line) for line in text.splitlines()]
        if path.suffix == ".jsonl"
        else [*csv.DictReader(text.splitlines())]
    )


def test_out_has_the_rows_of_json(table: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--checkpoint", checkpoint, "--beam", "2"
    assert caption("pairs.csv", *options, "--json") is None
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for name in ("out/captions.jsonl", "captions.csv"):
        assert caption("pairs.csv", *options, "--out", name) is None
        assert capsys.readouterr().out == f"5 of 5 pairs are captioned; written to {name}\n"
    assert rows_of(table / "out/captions.jsonl") == [{**row, "caption": row["text"]} for row in expected]
    assert [row["id"] for row in expected] == [*read_predictions(table / "out/captions.jsonl")]
    for row, values in zip(rows_of(table / "captions.csv"), expected, strict=True):
        assert (row["id"], row["after"], row["caption"]) == (values["id"], values["after"], values["text"])
        assert float(row["log_probability"]) == values["log_probability"] and not row["notes"] and not row["error"]


@pytest.mark.parametrize("name", ["captions.jsonl", "captions.csv"])
def test_an_interrupted_file_is_completed(
    table: Path, checkpoint: str, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (table / "after/2.png").write_text("not a picture")  # of the third and fourth pair
    words = "pairs.csv", "--checkpoint", checkpoint, "--batch_size", "2", "--out", name
    failure = "error: 2 of 5 pairs could not be captioned, see above; the others are done."
    assert caption(*words) == failure
    whole = (table / name).read_bytes()
    assert [bool(row.get("error")) for row in rows_of(table / name)] == [False, False, True, True, False]
    ends = [number for number, byte in enumerate(whole, 1) if byte == 10]
    for cut in (0, 3, ends[-5] - 1, ends[-5], ends[-4] + 7, ends[-2], len(whole) - 1):
        (table / name).write_bytes(whole[:cut])
        capsys.readouterr()
        assert caption(*words) == failure and (table / name).read_bytes() == whole, cut
        earlier = ", 2 of them earlier" if cut >= ends[-4] else ""
        assert f"3 of 5 pairs are captioned{earlier}; written to" in capsys.readouterr().out
    noise(12).save(table / "after/2.png")
    assert caption(*words) is None and ", 3 of them earlier" in capsys.readouterr().out
    assert [row["id"] for row in rows_of(table / name) if row["caption"]] == [f"é {number}" for number in range(5)]
    complete = (table / name).read_bytes()
    assert caption(*words) is None and "5 of 5 pairs are captioned, 5 of them earlier" in capsys.readouterr().out
    assert (table / name).read_bytes() == complete


def test_a_file_of_other_settings_is_left_alone(table: Path, checkpoint: str, tmp_path: Path) -> None:
    def outcome(*options: str, source: str = "pairs.csv", name: str = "a.csv") -> str:
        words = ("--checkpoint", checkpoint, "--out", name)
        return str(caption(source, *(words if "--checkpoint" not in options else words[2:]), *options))

    assert outcome() == "None"
    content = (table / "a.csv").read_bytes()
    other = str(reweighted(Path(checkpoint), table / "other.ckpt"))
    (table / "less.csv").write_text("id,before,after\né 0,before/1.png,after/1.png\n")
    for options, names in (
        (("--beam=3", "--length_penalty=1"), "--beam, --length_penalty"),
        (("--checkpoint", other), "--checkpoint"),
    ):
        assert outcome(*options) == (
            f"error: --out a.csv: its captions were made with another {names}; give another name, or delete the file to start again."
        )
    assert "were made with another list of pairs; give" in outcome(source="less.csv")
    assert "exists, and less.csv.settings.json does not, so it is not a file of this command" in outcome(
        name="less.csv"
    )
    assert (table / "pairs.csv").read_text().startswith("id,before") and (table / "a.csv").read_bytes() == content
    (table / "a.csv").write_bytes(content.replace(b"before/1", b'"', 1))
    assert "a.csv, line 2: not a row of this command; delete that line, or the file to start again." in outcome()
    (table / "a.csv").unlink()
    assert outcome("--beam=3") == "None"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["pairs.csv", "--out", "changes.geojson"], "changes.geojson: for many pairs give one file that ends in .jsonl or .csv; "),
        (["before", "after", "--out", "a.csv", "--out", "b.csv"], "for many pairs give one file"),
        (["pairs.csv", "--out", "a.csv", "--json"], "--json has no effect with --out a.csv; remove it"),
        (["before/1.png", "after/1.png", "--out", "a.jsonl"], "give a name that ends in .geojson, .csv or .html; .jsonl is for a f"),
        (["pairs.csv", "--threshold", "0.3"], "--threshold is for a whole scene, two rasters; remove it for the pairs of pairs.csv."),
        (["pairs.csv", "--out", "../{here}/pairs.csv"], "pairs.csv: the pairs of pairs.csv are read from this file; give another"),
        ([".", "--out", "pairs.jsonl"], "--out pairs.jsonl: the pairs of . are read from this file; give another name."),
        ([".", "--tile=64", "--out", "a.csv"], "--tile is for a whole scene, two rasters; remove it for the pairs of ."),
    ],
)  # fmt: skip
def test_files_of_pairs_and_of_scenes_are_told_apart(table: Path, words: list[str], sentence: str) -> None:
    assert sentence in str(caption(*(word.format(here=table.name) for word in words)))


def test_one_command_at_a_time_writes_a_file(
    table: Path, checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "pairs.csv", "--checkpoint", checkpoint, "--out", "out/a.csv"
    with exclusive_lock(table / "out/a.csv"):
        assert caption(*words) == (
            "error: --out out/a.csv: another command is writing this file; wait until it ends, or give another name."
        )
    assert not (table / "out/a.csv").exists()

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", unsupported)
    (table / "loop.png").symlink_to("loop.png")
    with (table / "pairs.csv").open("a") as file:
        file.write("\nloop,loop.png,loop.png\n")
    failure = "error: 1 of 6 pairs could not be captioned, see above; the others are done."
    assert caption(*words) == failure and len(rows_of(table / "out/a.csv")) == 6
    monkeypatch.chdir(table / "before")  # the same pairs
    assert caption("../pairs.csv", *words[1:3], "--out", "../out/a.csv") == failure
    assert "5 of them earlier" in capsys.readouterr().out


def test_missing_maps_of_captioned_pairs_are_drawn(
    table: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "pairs.csv", "--checkpoint", checkpoint, "--out", "a.csv"
    assert caption(*words) is None
    rows = (table / "a.csv").read_bytes()
    drawn: list[Path] = []
    monkeypatch.setattr("diffcap.report.drawing.write_png", lambda path, sheet: (drawn.append(path), path.touch()))
    (table / "maps").mkdir()
    (table / "maps/é_1.png").touch()
    for expected in (["0", "2", "3", "4"], []):
        drawn.clear()
        assert caption(*words, "--heatmap", "maps") is None
        assert drawn == [Path("maps", f"é_{number}.png") for number in expected]
        assert (table / "a.csv").read_bytes() == rows

    def stop(path: Path, sheet: Image.Image) -> None:
        assert not rows_of(table / "b.csv")  # a pair whose map is missing is not done
        raise KeyboardInterrupt

    monkeypatch.setattr("diffcap.report.drawing.write_png", stop)
    assert "interrupted" in str(caption(*words[:-1], "b.csv", "--heatmap", "other"))
    assert rows_of(table / "b.csv") == []


def test_rows_of_an_incomplete_batch_are_kept(table: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "pairs.csv", "--checkpoint", checkpoint, "--batch_size", "4", "--out", "a.jsonl"
    assert caption(*words) is None
    whole = (table / "a.jsonl").read_bytes()
    begun = b"".join(whole.splitlines(keepends=True)[:3])
    (table / "a.jsonl").write_bytes(begun)
    with monkeypatch.context() as patch:
        patch.setattr(PairCaptioner, "batch", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert "interrupted" in str(caption(*words))
    assert (table / "a.jsonl").read_bytes() == begun
    assert caption(*words) is None and (table / "a.jsonl").read_bytes() == whole


def test_ctrl_c_says_what_is_kept(table: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PairCaptioner.batch

    def stop(*args: Any, **options: Any) -> Iterator[Any]:
        yield from itertools.islice(batch(*args, **options), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(PairCaptioner, "batch", stop)
    words = "pairs.csv", "--checkpoint", checkpoint
    assert caption(*words) == (
        "error: interrupted; the captions are not saved; --out captions.jsonl saves them, and the same command then goes on."
    )
    assert caption(*words, "--out", "a.jsonl") == (
        "error: interrupted; what is done is in a.jsonl, and the same command goes on there."
    )
    assert len(rows_of(table / "a.jsonl")) == 2


@pytest.mark.slow
def test_a_full_disk_names_the_file(table: Path, checkpoint: str) -> None:
    def run(limit: int | None) -> subprocess.CompletedProcess[str]:
        size = None if limit is None else partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, limit))
        command = [
            sys.executable,
            "-m",
            "diffcap",
            "caption",
            "pairs.csv",
            "--checkpoint",
            checkpoint,
            "--out",
            "a.jsonl",
        ]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment(), cwd=table, preexec_fn=size, check=False
        )

    full = run(2000)
    assert full.stderr.startswith("error: a.jsonl: File too large; ") and full.returncode == 1
    assert not (table / "a.jsonl").read_bytes().endswith(b"\n")  # a part of a row
    done = run(None)
    assert done.returncode == 0 and len(rows_of(table / "a.jsonl")) == 5 and "earlier" not in done.stdout


def touched(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return str(folder)


def test_pairs_of_a_folder(tmp_path: Path) -> None:
    folder = touched(tmp_path, "a_before.png", "a_after.jpg", "b_before.png", "c.png", "c_2.png", "notes.txt")
    pairs, notes = find_pairs(folder)
    assert pairs == [ImagePair("a", tmp_path / "a_before.png", tmp_path / "a_after.jpg")]
    left = ", ".join(str(tmp_path / name) for name in ("b_before.png", "c.png", "c_2.png"))
    assert notes == [f"3 unpaired images were ignored: {left}."]
    touched(tmp_path, "a_after.png")
    with pytest.raises(DiffcapError, match=r"a_after\.jpg and a_after\.png: both belong to the pair a"):
        find_pairs(folder)
    (tmp_path / "a_before.png").unlink()
    assert find_pairs(folder)[0] == [ImagePair("c", tmp_path / "c.png", tmp_path / "c_2.png")]
    (tmp_path / "c.png").unlink()
    with pytest.raises(DiffcapError, match="no pairs found"):
        find_pairs(folder)
    (tmp_path / "pairs.tsv").write_text("after\tbefore\n2.png\t1.png\n")
    assert find_pairs(folder) == ([ImagePair("1", tmp_path / "1.png", tmp_path / "2.png")], [])


@pytest.mark.parametrize("sides", [("A", "B"), ("before", "after"), ("images", "sc_images")])
def test_folders_with_images_of_the_same_names_in_natural_order(tmp_path: Path, sides: tuple[str, str]) -> None:
    names = ["2", "10", "a1b", "a01b", "a2", "a10", "b"]
    folder = touched(tmp_path, *(f"{side}/{name}.png" for side in sides for name in names))
    for words in ((folder,), [str(tmp_path / side) for side in sides]):
        pairs, notes = find_pairs(*words)
        assert [pair.id for pair in pairs] == ["2", "10", "a01b", "a1b", "a2", "a10", "b"] and notes == []
        assert [pairs[0].before, pairs[0].after] == [tmp_path / side / "2.png" for side in sides]


def test_names_in_another_unicode_normal_form_match(tmp_path: Path) -> None:
    composed = "Stra\u00dfe M\u00fcnchen"
    decomposed = unicodedata.normalize("NFD", composed)
    folder = touched(tmp_path, f"before/{composed}.png", f"after/{decomposed}.png")
    files = [tmp_path / "before" / f"{composed}.png", tmp_path / "after" / f"{decomposed}.png"]
    assert find_pairs(folder) == ([ImagePair(composed, *files)], [])
    (tmp_path / "pairs.csv").write_text(f"before,after\nbefore/{decomposed}.png,after/{composed}.png\n", "utf-8")
    ((pair,), _) = find_pairs(folder)
    assert [pair.before, pair.after] == files


def test_notes_on_a_pair_are_printed_and_in_the_json(
    here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.linspace(0, 200, 48 * 64).reshape(48, 64).astype(np.float32)
    for side in ("before", "after"):
        Image.fromarray(pixels + 3000 * (side == "after") * (pixels > 199)).save(here / side / "1.tif")
        (here / side / "1.png").unlink()
    assert caption("before", "after", "--json", "--checkpoint", checkpoint) is None
    note = "before/1.tif and after/1.tif: their values, from 0 to 3,200, were stretched from black to white"
    output = capsys.readouterr()
    assert [json.loads(line)["notes"] for line in output.out.splitlines()] == [[note], []]
    assert output.err == f"note: {note}.\n"


@pytest.mark.parametrize("ids", [("0", "1"), ("0", "0.0", "false"), ("null", "2", '""')])
def test_tables_may_be_numbered_from_0(tmp_path: Path, ids: tuple[str, ...]) -> None:
    rows = [f'{{"id": {id}, "before": "a.png", "after": "b.png"}}\n' for id in ids]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    expected = {"null": "000001", '""': "000003", "false": "False"}
    assert [pair.id for pair in find_pairs(str(tmp_path))[0]] == [expected.get(id, id) for id in ids]


def test_unpaired_images_are_named(here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    touched(here, "after/9.png")
    assert caption("before", "after", "--checkpoint", checkpoint) is None
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 2
    assert output.err == f"note: 1 unpaired image was ignored: {Path('after/9.png')}.\n"
    touched(here, *(f"before/{number}.png" for number in range(10, 16)))
    named = ", ".join(str(Path(f"before/{number}.png")) for number in (10, 11, 12))
    assert find_pairs(".")[1] == [f"7 unpaired images were ignored: {named} and 4 more."]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.csv", "before,before,after\na,b,c\n", 'line 1: 2 columns are named "before"; keep one of them.'),
        ("a.csv", "before,after\na,b\nc, d,e.png\n", "line 3: 3 cells for 2 columns; put quotes around a path with a comma"),
        ("a.csv", "before,after\na\0,b\n", "contains a NUL character"),
        ("a.csv", 'before,after\n"a,b\nc,d\n', "not a CSV table (unexpected end of data)"),
        ("a.csv", "before,after\n\udce9,b\n", "not a table of UTF-8 text"),
        ("a.csv", 'before,after\n"a\nb",c\n\u200b,d\n', 'line 4: "before" is missing'),
        ("a.csv", "id,before,after\nx,a,b\ny,a,c\nx,c,d\n", 'line 4: the id "x" is duplicated; give each pair a unique "id"'),
        ("a.csv", "id,before,after\n2,a.png,b.png\n3,b.png,c.png\n,3.png,d.png\n", 'line 4: the id "3" is duplicated'),
        ("a.jsonl", '{"before": "a", "after": "b", "id": NaN}\n', "line 1: not usable JSON (it contains NaN"),
        ("a.jsonl", '\n{"before": "a", "after": "b", "id": ["x"]}\n', "line 2: \"id\" is ['x']; give a string or a number."),
        ("a.jsonl", '{"before": ["a"], "after": "b"}\n', 'line 1: "before" is missing'),
    ],
)  # fmt: skip
def test_a_malformed_table_is_one_sentence(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DiffcapError) as error:
        find_pairs(str(tmp_path / name))
    assert str(error.value).startswith(f"{tmp_path / name}") and reason in str(error.value)


def test_cells_of_a_table(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_bytes(
        b'\xef\xbb\xbfbefore,after,id,,\r"x\n1.png","2,3.png", \xe2\x80\x8b,,\r\r\n4.png,5\xc2\x85.png,y,,\n'
    )
    assert find_pairs(str(table))[0] == [
        ImagePair("x\n1", tmp_path / "x\n1.png", tmp_path / "2,3.png"),
        ImagePair("y", tmp_path / "4.png", tmp_path / "5\x85.png"),
    ]


def test_names_are_printed_without_what_terminals_obey(
    here: Path, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = tmp_path_factory.mktemp("words") / "best.ckpt"
    state = torch.load(make(words, "scorer"), weights_only=True)
    state["diffcap"]["words"] = [f"{word}\x1b[31m\u202e" for word in state["diffcap"]["words"]]
    torch.save(state, words)
    names = "\x1b[31mred", "two\nlines", "\u202egnp", "\x9b2J"
    (here / "odd").mkdir()
    for name in names:
        for side in ("before", "after"):
            (here / "odd" / f"{name}_{side}.png").write_bytes((here / side / "1.png").read_bytes())
    (here / "odd" / f"{names[0]}_after.png").write_bytes(b"")
    (here / "odd" / "\x1b[2Jalone.png").write_bytes(b"")
    shown = []
    for options in ([], ["--json"]):
        shown.append(str(caption("odd", "--checkpoint", str(words), *options)))
        shown += capsys.readouterr()
    assert all(letter.isprintable() or letter in "\n\t" for letter in "".join(shown))
    assert all(line.startswith(("note: ", "error: ")) for line in shown[2].splitlines()) and "\\x1b[2Jalone" in shown[2]


@pytest.mark.slow
def test_every_pair_has_a_picture_of_its_own(here: Path, checkpoint: str) -> None:
    names = ["a/b", "a_b", "A_b", "a_b-2", "x" * 300, "x" * 301, "..", "画像"]
    rows = [{"id": name, "before": "before/1.png", "after": "after/1.png"} for name in names]
    (here / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert caption("pairs.jsonl", "--checkpoint", checkpoint, "--heatmap", "maps") is None
    found = [path.name for path in (here / "maps").iterdir()]
    assert len({name.casefold() for name in found}) == len(names) and {"a_b.png", "pair.png", "画像.png"} <= set(found)
