"""`diffcap caption` as a user runs it: one pair, folders, tables, odd files; sentences, JSON and pictures."""

import csv
import errno
import io
import itertools
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.hub_server import Hub
from tests.test_pair_captioner import make, make_coarse, noise, reweighted

from diffcap.cli import main
from diffcap.commands.caption_file import exclusive_lock
from diffcap.evaluation.coco import read_predictions
from diffcap.pair_captioner import DEFAULT_CAPTIONER, PairCaptioner

ONE = ["before/1.png", "after/1.png"]


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
    assert caption(*ONE, "--checkpoint", checkpoint, "--beam", "3", "--heatmap", "out/attention.png") is None
    expectation = capsys.readouterr()
    text, score, *others = expectation.out.splitlines()
    assert text and score.startswith("log-probability of the sentence: -") and "%" not in score
    assert others and all(line.startswith("or (log-probability -") for line in others)
    assert expectation.err == ""
    with Image.open(here / "out" / "attention.png") as picture:
        assert picture.width == 900 and picture.height > 300
    assert caption(*ONE, "--checkpoint", checkpoint, "--json", "--beam=3") is None
    value = json.loads(capsys.readouterr().out)
    assert value["text"] == text and len(value["alternatives"]) == len(others) and value["nothing_changed"] is None
    assert f"{value['log_probability']:.3f}" in score


def test_a_captioner_of_blocks_says_that_it_knows_no_other_images(
    here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "was trained on rendered `blocks` scenes only; its captions of other images"
    default = "no --checkpoint: the captioner `blocks`, which ships with diffcap, is used."
    (here / "blocks").mkdir()  # not the captioner of this name
    shipped = str(DEFAULT_CAPTIONER)
    for options, notes in (([], (True, True)), ([shipped], (False, True)), ([checkpoint], (False, False))):
        assert caption(*ONE, *(["--checkpoint", *options] if options else [])) is None
        output = capsys.readouterr()
        assert output.out and (default in output.err, note in output.err) == notes


def test_many_pairs_go_on_past_a_bad_one(here: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "after" / "1.png").write_text("not a picture")
    failure = "error: 1 of 2 pairs could not be captioned, see above; the others are done."
    assert caption(".", "--checkpoint", checkpoint, "--json", "--heatmap", "maps") == failure
    expectation = capsys.readouterr()
    first, second = map(json.loads, expectation.out.splitlines())
    assert first["id"] == "1" and "a text file" in first["error"] and "a text file" in expectation.err
    assert second["id"] == "2" and second["text"] and [path.name for path in (here / "maps").iterdir()] == ["2.png"]
    (here / "pairs.csv").write_text(f"before,after\n{300 * 'x'}.png,after/1.png\nbefore/2.png,after/2.png\n")
    assert "1 of 2 pairs could not be captioned" in str(caption("pairs.csv", "--checkpoint", checkpoint))
    expectation = capsys.readouterr()
    assert expectation.out.startswith("2\t") and "x.png: cannot be read (File name too long)" in expectation.err


def test_missing_images_are_found_before_the_hub_is_asked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    (here / "pairs.csv").write_text("before,after\nbefore/8.png,after/1.png\nbefore/9.png,after/2.png\n")
    for words, missing in ((("before/1.png", "after/8.png"), "after/8.png"), (("pairs.csv",), "before/8.png")):
        message = str(caption(*words, "--checkpoint", "user/name"))
        assert message == f"error: {missing}: file not found; give the path of an image file." and not hub.asked
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    message = str(caption("before/1.png", "after/1.png", "--checkpoint", "user/name"))
    assert message.startswith("error: user/name: 127.0.0.1 cannot be reached (Connection refused), and the model is")
    assert "\n" not in message and message.endswith("or `tiles` of this package, which describe rendered images only.")


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


@pytest.mark.parametrize(("encoding", "plain"), [("utf-8", "é\\udcff"), ("ascii", "\\xe9\\udcff")])
def test_letters_that_the_output_does_not_have_are_escaped(
    here: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch, encoding: str, plain: str
) -> None:
    (here / "odd").mkdir()
    for side in ("before", "after"):
        (here / side / "1.png").rename(here / "odd" / (os.fsdecode(b"\xc3\xa9\xff_") + f"{side}.png"))

    def output(*options: str) -> str:
        stdout = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert caption("odd", "--checkpoint", checkpoint, *options) is None
        stdout.flush()
        return stdout.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]

    assert output().startswith(f"{plain}\t")
    assert json.loads(output("--json"))["id"] == "é\udcff"


@pytest.fixture
def table(here: Path) -> Path:
    """A table of five pairs in the current folder."""
    lines = [f"é {number},before/{1 + number % 2}.png,after/{1 + number // 2 % 2}.png" for number in range(5)]
    (here / "pairs.csv").write_text("\n".join(["id,before,after", *lines]))
    return here


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["before/1.png"], "the image after the change is missing"),
        (["nowhere"], "file not found"),
        (["https://x.org/a.csv"], "error: https://x.org/a.csv: a URL; download the images, then: diffcap caption"),
        (["http://x.org/a.png", "after/1.png"], "error: http://x.org/a.png: a URL, not a file; download the image"),
        (["pairs.json"], "pairs.json: a .json file; give a table of pairs as .csv, .tsv or .jsonl"),
        (["pairs.zip"], "pairs.zip: an archive; extract it, and give its folder of pairs"),
        (["before/1.png", "after/none.png"], "file not found"),
        (["before/1.png", "after"], "one is a folder and one is not"),
        ([*ONE, "--heatmap", "x.jpg"], "ends in .png"),
        ([*ONE, "--beam", "1000000000"], "--beam is 1000000000; give 1 to 100."),
        ([*ONE, "--length_penalty", "1e999"], "the length penalty is inf; give a finite number"),
        ([*ONE, "--batch_size", "0"], "--batch_size is 0; it must be at least 1."),
        ([*ONE, "--device", "cuda:99"], "no such device; choose one of auto, cpu"),
        ([*ONE, "--checkpoint", "none.ckpt"], "no checkpoint there"),
        ([*ONE, "--checkpoint", "before"], "config.json is missing"),
        ([*ONE, "--checkpoint", "https://hf.co/u/n"], "error: https://hf.co/u/n: a URL, not a checkpoint"),
        (["empty.csv"], "it contains no pair"),
        (["odd.csv"], "must name the columns"),
        (["pairs.csv", "--out", "changes.geojson"], "changes.geojson: for many pairs give one file that ends in .jsonl or .csv; "),
        (["before", "after", "--out", "a.csv", "--out", "b.csv"], "for many pairs give one file"),
        (["pairs.csv", "--out", "a.csv", "--json"], "--json has no effect with --out a.csv; remove it"),
        (["before/1.png", "after/1.png", "--out", "a.jsonl"], "give a name that ends in .geojson, .csv or .html; .jsonl is for a f"),
        (["pairs.csv", "--align"], "--align is for a whole scene, two rasters; remove it for the pairs of pairs.csv."),
        (["before/1.png", "after/1.png", "--sort", "changed"], "--sort and --min_changed are for many pairs"),
        (["pairs.csv", "--out", "../{folder}/pairs.csv"], "pairs.csv: the pairs of pairs.csv are read from this file; give another"),
        ([".", "--out", "pairs.jsonl"], "--out pairs.jsonl: the pairs of . are read from this file; give another name."),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(table: Path, checkpoint: str, words: list[str], reason: str) -> None:
    (table / "empty.csv").write_text("before,after\n")
    (table / "odd.csv").write_text("a,b\n1,2\n")
    for name in ("pairs.json", "pairs.zip"):
        (table / name).write_bytes(b"")
    options = [] if "--checkpoint" in words else ["--checkpoint", checkpoint]
    output = str(caption(*(word.format(folder=table.name) for word in words), *options))
    assert output.startswith("error: ") and reason in output and "\n" not in output


def rows_of(path: Path) -> list[dict[str, str]]:
    lines = path.read_text("utf-8").splitlines()
    return [*map(json.loads, lines)] if path.suffix == ".jsonl" else [*csv.DictReader(lines)]


def test_out_has_the_rows_of_json(table: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--checkpoint", checkpoint, "--beam", "2"
    assert caption("pairs.csv", *options, "--json") is None
    expected = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for name in ("out/captions.jsonl", "captions.csv"):
        assert caption("pairs.csv", *options, "--out", name) is None
        assert capsys.readouterr().out == f"5 of 5 pairs are captioned; written to {name}\n"
    path = table / "out/captions.jsonl"
    rows = rows_of(path)
    assert rows == [{**row, "caption": row["text"]} for row in expected]
    assert [row["id"] for row in expected] == [*read_predictions(path)]
    assert all(0 < row.pop("changed") <= 1 for row in rows_of(path))  # from the probabilities of sentences
    older = [{key: value for key, value in row.items() if key != "changed"} for row in rows]  # of an older version
    path.write_text("".join(json.dumps(row) + "\n" for row in older))
    lines = [line.split(",") for line in (table / "captions.csv").read_text("utf-8").splitlines()]
    (table / "captions.csv").write_text("".join(",".join(cells[:6] + cells[7:]) + "\n" for cells in lines[:-1]))
    for file in (path, table / "captions.csv"):
        older_text, newer = file.read_text("utf-8"), ("pairs.csv", *options, "--out", str(file))
        assert caption(*newer) is None and file.read_text("utf-8").startswith(older_text) and len(rows_of(file)) == 5
        assert "again" not in capsys.readouterr().err
        assert caption(*newer, "--sort", "changed") is None and "5 rows of an earlier" in capsys.readouterr().err
    assert rows_of(path) == rows
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


@pytest.mark.parametrize("name", ["captions.jsonl", "captions.csv"])
def test_the_pairs_that_changed_are_printed_first(
    table: Path, checkpoint: str, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words = "pairs.csv", "--checkpoint", str(make(table / "pcl.ckpt", "pcl"))
    assert caption(*words, "--json") is None
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["changed"] == round(1 - row["nothing_changed"], 4) for row in rows)
    assert len({row["changed"] for row in rows}) > 2
    ordered = sorted(rows, key=lambda row: -row["changed"])
    least = ordered[2]["changed"]
    selected = [row for row in ordered if row["changed"] >= least]
    lines = [f"{row['changed']:.4f}\t{row['id']}\t{row['text']}" for row in selected]
    options = "--sort", "changed", "--min_changed", str(least)
    assert caption(*words, *options) is None and capsys.readouterr().out.splitlines() == lines
    assert caption(*words, *options, "--json") is None
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == selected
    for earlier in ("", ", 5 of them earlier"):  # the file has all pairs, so the same command goes on
        assert caption(*words, *options, "--out", name) is None
        written = f"5 of 5 pairs are captioned{earlier}; written to {name}"
        assert capsys.readouterr().out.splitlines() == [*lines, written]
    assert [row["id"] for row in rows_of(table / name)] == [row["id"] for row in rows]
    assert [float(row["changed"]) for row in rows_of(table / name)] == [row["changed"] for row in rows]


def test_a_file_of_other_settings_is_left_alone(table: Path, checkpoint: str, tmp_path: Path) -> None:
    def outcome(*options: str, source: str = "pairs.csv", name: str = "a.csv") -> str:
        words = ("--checkpoint", checkpoint, "--out", name)
        return str(caption(source, *(words if "--checkpoint" not in options else words[2:]), *options))

    assert outcome() == "None"
    content = (table / "a.csv").read_bytes()
    other = str(reweighted(Path(checkpoint), table / "other.ckpt"))
    (table / "less.csv").write_text("id,before,after\né 0,before/1.png,after/1.png\n")
    for found, names in (
        (outcome("--beam=3", "--length_penalty=1"), "--beam, --length_penalty"),
        (outcome("--checkpoint", other), "--checkpoint"),
        (outcome(source="less.csv"), "list of pairs"),
    ):
        assert found.startswith(f"error: --out a.csv: its captions were made with another {names}; give another name")
    assert "exists, and less.csv.settings.json does not, so it is not a file of this" in outcome(name="less.csv")
    assert (table / "pairs.csv").read_text().startswith("id,before") and (table / "a.csv").read_bytes() == content
    (table / "a.csv").write_bytes(content.replace(b"before/1", b'"', 1))
    assert "a.csv, line 2: not a row of this command; delete that line, or the file to start again." in outcome()
    (table / "a.csv").unlink()
    assert outcome("--beam=3") == "None"


def test_one_command_at_a_time_writes_a_file(
    table: Path, checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "pairs.csv", "--checkpoint", checkpoint, "--out", "out/a.csv"
    with exclusive_lock(table / "out/a.csv"):
        assert "out/a.csv: another command is writing this file; wait until it ends, or give" in str(caption(*words))
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


def test_ctrl_c_says_what_is_kept(table: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PairCaptioner.batch

    def stop(*args: Any, **options: Any) -> Iterator[Any]:
        yield from itertools.islice(batch(*args, **options), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(PairCaptioner, "batch", stop)
    words = "pairs.csv", "--checkpoint", checkpoint
    assert str(caption(*words)).startswith("error: interrupted; the captions are not saved; --out captions.jsonl")
    assert "the captions so far are in a.jsonl; run the same command again" in str(caption(*words, "--out", "a.jsonl"))
    assert len(rows_of(table / "a.jsonl")) == 2
    monkeypatch.setattr(PairCaptioner, "batch", batch)
    assert caption(*words, "--out", "a.jsonl") is None
    whole = (table / "a.jsonl").read_bytes()
    begun = b"".join(whole.splitlines(keepends=True)[:3])
    (table / "a.jsonl").write_bytes(begun)
    monkeypatch.setattr(PairCaptioner, "batch", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert "interrupted" in str(caption(*words, "--out", "a.jsonl"))
    assert (table / "a.jsonl").read_bytes() == begun  # rows of an incomplete batch are kept


def test_a_full_disk_names_the_file(table: Path, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "pairs.csv", "--checkpoint", checkpoint, "--out", "a.jsonl"
    limit, largest = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, largest))
    try:
        assert str(caption(*words)).startswith("error: a.jsonl: File too large; ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, largest))
    assert not (table / "a.jsonl").read_bytes().endswith(b"\n")  # a part of a row
    assert caption(*words) is None and len(rows_of(table / "a.jsonl")) == 5
    assert "earlier" not in capsys.readouterr().out


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
    for name in (f"{names[0]}_after", "\x1b[2Jalone"):
        (here / "odd" / f"{name}.png").write_bytes(b"")
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
