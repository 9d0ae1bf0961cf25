"""`diffcap caption BEFORE AFTER --out ...` as a user runs it."""

import csv
import html
import json
import re
import signal
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
import rasterio.warp
import shapely
from tests.commands import environment
from tests.scenes.rasters import UTM33, example, write, write_scene

from diffcap.cli import main
from diffcap.worlds.tiles.write import render_pair

SIZE = 600  # of the scene: 9 tiles
HEAD = [sys.executable, "-m", "diffcap", "caption"]
CAPTIONER = ["--checkpoint", "blocks"]  # knows the changes of `write_scene`


def run(*words: str) -> str | int | None:
    """The exit status of the command in this process, with the captioner of `example`'s images; None where all went well."""
    try:
        main(["caption", *words, *([] if "--overlap=0" in words else CAPTIONER)])
    except SystemExit as stop:
        return stop.code
    return None


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both dates and the three outputs."""
    folder = tmp_path_factory.mktemp("scene")
    write_scene(folder, SIZE)
    outputs = [word for suffix in ("geojson", "csv", "html") for word in ("--out", str(folder / f"changes.{suffix}"))]
    assert run(str(folder / "before.tif"), str(folder / "after.tif"), *outputs) is None
    return folder


def features(path: Path) -> list[Any]:
    return json.loads(path.read_text(encoding="utf-8"))["features"]


def change_at(found: list[Any], x: int, y: int) -> Any:
    """The properties of the first change whose window has the tile with this upper left corner."""
    for one in found:
        left, top, width, height = one["properties"]["pixel_window"]
        if left <= x <= left + width - 256 and top <= y <= top + height - 256:
            return one["properties"]
    raise AssertionError((x, y))


@pytest.mark.slow
def test_the_changes_are_found_where_they_are(scene: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.suffix for path in scene.iterdir()} == {".tif", ".csv", ".geojson", ".html"}
    content = json.loads((scene / "changes.geojson").read_text(encoding="utf-8"))
    assert content["type"] == "FeatureCollection" and content["diffcap"]["coordinates"].endswith("latitude (WGS84)")
    counts = content["diffcap"]["tiles"]
    assert counts["all"] == 9 == counts["changed"] + counts["unchanged"] + counts["identical"]
    for corner in ((0, 0), (344, 344)):
        found = change_at(content["features"], *corner)
        assert found["caption"].endswith("has appeared") and found["no_change"] < 0.1
    highest = max(1 - one["properties"]["no_change"] for one in content["features"])
    strict = str(scene.parent / "strict.geojson")
    words = str(scene / "before.tif"), str(scene / "after.tif"), "--out", strict, "--min_changed"
    assert run(*words, f"{highest:.4f}") is None and features(Path(strict))  # with just this probability
    assert run(*words, "1") is None
    note = f"note: {9 - counts['identical']} of 9 tiles differ, and no caption is a change with --min_changed 1.0."
    assert features(Path(strict)) == [] and note in capsys.readouterr().err


@pytest.mark.slow
def test_geojson_is_valid_and_its_coordinates_are_those_of_the_pixels(scene: Path) -> None:
    for feature in features(scene / "changes.geojson"):
        assert feature["type"] == "Feature" and feature["geometry"]["type"] == "Polygon"
        polygon = shapely.geometry.shape(feature["geometry"])
        assert polygon.is_valid and polygon.exterior.is_ccw and not any(ring.is_ccw for ring in polygon.interiors)
        assert feature["properties"]["source_crs"] == "EPSG:32633"
        x, y, width, height = feature["properties"]["pixel_window"]
        corners = [UTM33 @ point for point in ((x, y), (x + width, y), (x, y + height), (x + width, y + height))]
        longitudes, latitudes = rasterio.warp.transform("EPSG:32633", "EPSG:4326", *zip(*corners))
        if feature["properties"]["tiles"] == 1:
            for corner in zip(longitudes, latitudes):
                assert min(np.hypot(*np.subtract(corner, point)) for point in polygon.exterior.coords) < 1e-6
    first = shapely.geometry.shape(features(scene / "changes.geojson")[0]["geometry"])
    west, _, _, north = first.bounds
    assert west == pytest.approx(15, abs=1e-7)  # the left edge lies on the zone's central meridian
    assert north == pytest.approx(48.7530130, abs=1e-6)


@pytest.mark.slow
def test_csv_has_the_same_changes_and_every_output_the_note_about_the_captioner(scene: Path) -> None:
    rows = [*csv.DictReader((scene / "changes.csv").read_text(encoding="utf-8").splitlines())]
    found = features(scene / "changes.geojson")
    assert [row["caption"] for row in rows] == [one["properties"]["caption"] for one in found]
    note = json.loads((scene / "changes.geojson").read_text(encoding="utf-8"))["diffcap"]["note"]
    assert note.startswith("this captioner was trained on rendered `blocks` scenes only") and "photographs" in note
    assert note in html.unescape((scene / "changes.html").read_text(encoding="utf-8"))
    for row, one in zip(rows, found):
        assert row["note"] == one["properties"]["note"] == note
        assert [int(row[key]) for key in ("x", "y", "width", "height")] == one["properties"]["pixel_window"]
        point = shapely.Point(float(row["longitude"]), float(row["latitude"]))
        assert shapely.geometry.shape(one["geometry"]).contains(point)


@pytest.mark.slow
def test_the_map_needs_no_network_and_shows_every_change(scene: Path) -> None:
    page = (scene / "changes.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in html.unescape(page)
    text = re.sub(r"base64,[\w+/=]+|\"[\w+/=]{200,}\"", "", page)
    addresses = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"'<>]*""", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of SVG's elements, which is not fetched
    assert not re.search(r"<link|@import|url\(|<iframe|fetch\(|XMLHttpRequest|<script[^>]+src", page)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    found = features(scene / "changes.geojson")
    assert [change["caption"] for change in data["changes"]] == [one["properties"]["caption"] for one in found]
    assert all(len(change["pictures"]) == 2 for change in data["changes"])
    assert data["metres"] == pytest.approx(0.5, rel=0.01) and (data["width"], data["height"]) == (SIZE, SIZE)
    script = page.rpartition("<script>")[2]
    asked = set(re.findall(r"""(?:byId|getElementById)\("([a-z-]+)"\)""", script))
    assert asked <= set(re.findall(r'id="([a-z-]+)"', page)) and "slider" in asked


def colorful(name: str) -> Any:
    """25 copies of an example image with different colors, which have different captions: (3, 1280, 1280)."""
    orders = list(permutations(range(3)))
    rows = [[example(name)[list(orders[(5 * row + 3 * column) % 6])] for column in range(5)] for row in range(5)]
    return np.block(rows)


@pytest.mark.slow
def test_a_killed_run_goes_on_and_writes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = (write(tmp_path / f"{name}.tif", colorful(name)) for name in ("before", "after"))
    words = [*HEAD, before, after, "--overlap", "128", "--batch_size", "2", "--device", "cpu", "--out"]
    partial = tmp_path / "killed.geojson.partial.jsonl"
    command = [*words, str(tmp_path / "killed.geojson"), "--out", str(tmp_path / "killed.csv")]
    process = subprocess.Popen([*command, *CAPTIONER], env=environment(), stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while not partial.is_file() or partial.read_bytes().count(b"\n") < 4:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "killed.geojson").exists()
    batches = partial.read_bytes().count(b"\n") - 1
    assert run(*command[len(HEAD) :]) is None
    assert f"{2 * batches} of 81 tiles are done already" in capsys.readouterr().err and not partial.exists()
    assert run(*words[len(HEAD) :], str(tmp_path / "whole.geojson"), "--out", str(tmp_path / "whole.csv")) is None
    for suffix in ("geojson", "csv"):
        content = (tmp_path / f"whole.{suffix}").read_bytes()
        assert (tmp_path / f"killed.{suffix}").read_bytes() == content and len(content) > 2000


@pytest.mark.slow
def test_pixels_are_the_coordinates_without_georeference(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("before", "after"):
        paths.append(write(tmp_path / f"{name}.tif", example(name), crs=None, transform=rasterio.Affine.identity()))
    outputs = [word for suffix in ("geojson", "csv", "html") for word in ("--out", str(tmp_path / f"changes.{suffix}"))]
    assert run(*paths, *outputs) is None
    output = capfd.readouterr()
    assert "the rasters have no georeference; coordinates are pixels" in output.err and "Warning" not in output.err
    content = json.loads((tmp_path / "changes.geojson").read_text())
    assert content["diffcap"]["coordinates"].startswith("pixels, x to the right and y down")
    ((ring,),) = [one["geometry"]["coordinates"] for one in content["features"]]
    assert sorted(map(tuple, ring[:-1])) == [(0, 0), (0, 256), (256, 0), (256, 256)]
    assert '"metres":null' in (tmp_path / "changes.html").read_text()
    row = (tmp_path / "changes.csv").read_text().splitlines()[1]
    assert row.partition(',"this captioner')[0].endswith(",0,0,256,256,,,")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--tile", "256"], "the options for whole scenes need an output file; add, for example, --out"),
        (["--out", "changes.shp"], "--out changes.shp: give a name that ends in .geojson, .csv or .html."),
        (["--out", "x.csv", "--bands", "1,2"], "--bands is 1,2; give one band or three, such as 4,3,2."),
        (["--out", "x.csv", "--bands", "red"], "--bands is red"),
        (["--out", "x.csv", "--bands", "9,2,1"], "it has no band 9; choose from 1 to 3"),
        (["--out", "x.csv", "--stretch", "98,2"], "--stretch is 98,2; give two percentiles"),
        (["--out", "x.csv", "--threshold", "0.3"], "is now --min_changed, the probability of a change; give 0.7."),
        (["--out", "x.csv", "--threshold", "1"], "give 0.0001."),
        (["--out", "x.csv", "--min_changed", "0"], "--min_changed is 0.0; give a probability"),
        (["--out", "x.csv", "--sort", "changed"], "--sort is for pairs of images; remove it for a whole scene"),
        (["--out", "x.csv", "--tile", "0"], "--tile is 0; give 8 to"),
        (["--out", "x.csv", "--overlap", "256"], "--overlap is 256; give 0 to 255"),
        (["--out", "x.csv", "--batch_size", "0"], "--batch_size is 0"),
        (["--out", "x.csv", "--heatmap", "x.png"], "--heatmap is for pairs of images; remove it for a whole scene"),
    ],
)
def test_wrong_options_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("before", "after"):
        write(tmp_path / f"{name}.tif", example(name))
    status = str(run("before.tif", "after.tif", *words))
    assert status.startswith("error: ") and sentence in status and status.count("\n") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"before.tif", "after.tif"}


@pytest.mark.slow
def test_without_a_checkpoint_the_captioner_of_overhead_images_is_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tiles side by side: three new houses, and a pair that differs in season and light only; as pixels of 8 and of 16 bits."""
    pairs = [render_pair(number, 2026).images for number in (16, 13)]
    gains, offsets = (np.array(values).reshape(3, 1, 1) for values in ((20, 26, 34), (300, 600, 1200)))
    cases = [
        ("uint8", [], "the captioner `tiles`, which ships with diffcap, is used"),
        ("uint16", [], "contrast is scaled to that of the images that `tiles` was trained on"),
        ("uint16", ["--stretch=2,98"], "has not seen stretched contrast and may report changes in unchanged tiles"),
    ]
    for dtype, options, note in cases:
        for side, name in enumerate(("before", "after")):
            pixels = np.concatenate([images[side] for images in pairs], axis=1).transpose(2, 0, 1)
            write(tmp_path / f"{name}.tif", (pixels * gains + offsets).astype(dtype) if dtype == "uint16" else pixels)
        out = tmp_path / "x.geojson"
        words = [str(tmp_path / "before.tif"), str(tmp_path / "after.tif"), "--overlap=0", "--out", str(out)]
        assert run(*words, *options) is None and note in capsys.readouterr().err
        change = features(out)[0]["properties"]
        assert options or ("house" in change["caption"] and change["pixel_window"] == [0, 0, 256, 256]), dtype


def test_rasters_at_different_places_are_refused(tmp_path: Path) -> None:
    before = write(tmp_path / "before.tif", example("before"))
    after = write(tmp_path / "after.tif", example("after"), transform=UTM33 @ UTM33.translation(40_000, 0))
    status = str(run(before, after, "--align", "--out", str(tmp_path / "x.csv")))
    assert "have no pixel with data at the same place" in status and not (tmp_path / "x.csv").exists()
    assert "the raster after the change is missing" in str(run(before, "--out", str(tmp_path / "x.csv")))


@pytest.mark.parametrize("package", ["rasterio", "shapely"])
def test_a_missing_package_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(("diffcap.scenes", f"{package}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    status = run("a.tif", "b.tif", "--out", str(tmp_path / "x.csv"))
    assert status == "error: whole scenes need rasterio and shapely; run: pip install 'diffcap[geo]'"
