import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.datasets.layouts import write_image

from diffcap.datasets import images
from diffcap.datasets.images import check_images, with_ranges
from diffcap.records import ChangePair


def test_missing_and_broken_images_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("a.png", "b.jpg", "c.png", "d.png", "e.jpg", "f.png"):
        write_image(tmp_path / name, size=(64, 48))
    for name, keep in (("c.png", 0.5), ("e.jpg", 0.7)):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: int(len(data) * keep)])
    (tmp_path / "d.png").write_bytes((tmp_path / "d.png").read_bytes()[:-12])  # all its pixels, not its end
    (tmp_path / "f.png").write_text("no picture")
    (tmp_path / "g.png").mkdir()
    names = ["a.png", "b.jpg", "c.png", "d.png", "e.jpg", "f.png", "g.png", "h/i.png"]
    found, _ = check_images(tmp_path, names)
    assert list(found) == names[2:]
    assert all(found[name].startswith("broken: ") for name in names[2:6])
    assert found["f.png"] == "broken: a text file, not an image; put an image in its place"
    assert found["g.png"] == found["h/i.png"] == "missing"
    assert check_images(tmp_path, names, "exists")[0] == {"g.png": "missing", "h/i.png": "missing"}
    names = ["x" * 300 + ".png", "null\0.png", "a.png"]  # paths that no file system accepts
    for check in ("decode", "exists"):
        found, _ = check_images(tmp_path, names, check)  # type: ignore[arg-type]
        assert list(found) == names[:2] and "File name too long" in found[names[0]]
        assert all(reason.startswith("broken: ") for reason in found.values())


def test_good_images_are_remembered_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, names = tmp_path / "cache.json", ["a.png", "b.png", "c.png"]
    for name in names:
        write_image(tmp_path / name)
    (tmp_path / "c.png").write_text("no picture")
    opened: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: opened.append(path.name) or real(path))
    monkeypatch.setattr(images, "BATCH_SIZE", 2)

    def looked_at(root: Path = tmp_path) -> list[str]:
        opened.clear()
        check_images(root, names, cache_file=cache)
        return sorted(opened)

    assert looked_at() == names
    assert sorted(json.loads(cache.read_text())["images"]) == ["a.png", "b.png"]
    assert looked_at() == ["c.png"]  # what was broken is looked at again
    os.utime(tmp_path / "a.png", ns=(0, time.time_ns() + 1))
    assert looked_at() == ["a.png", "c.png"]
    (tmp_path / "b.png").unlink()
    assert check_images(tmp_path, names, cache_file=cache)[0]["b.png"] == "missing"
    cache.write_text("{")  # killed by a full disk, or not ours
    write_image(tmp_path / "b.png")
    assert looked_at() == names
    (tmp_path / "other").symlink_to(tmp_path)
    assert looked_at(tmp_path / "other") == names  # another folder's images are not those


def test_a_killed_check_goes_on_from_its_last_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, names = tmp_path / "cache.json", [f"{number}.png" for number in range(6)]
    for name in names:
        write_image(tmp_path / name)
    monkeypatch.setattr(images, "BATCH_SIZE", 2)
    monkeypatch.setattr(images, "write_text", _killed_after(2, images.write_text))
    with pytest.raises(KeyboardInterrupt):
        check_images(tmp_path, names, cache_file=cache)
    assert sorted(json.loads(cache.read_text())["images"]) == names[:4]


def test_images_that_are_connected_by_pairs_have_one_range(tmp_path: Path) -> None:
    largest = {"a": 100, "b": 3000, "c": 50_000, "d": 7, "e": 9}
    for name, value in largest.items():
        Image.fromarray(np.full((4, 5), value, np.uint16)).save(tmp_path / name, "PNG")
    Image.fromarray(np.full((4, 5), 0.5, np.float32)).save(tmp_path / "f", "TIFF")
    write_image(tmp_path / "g.png")
    names, cache = [*"abcdef", "g.png"], tmp_path / "cache.json"
    for _ in range(2):  # the second time from the cache
        problems, ranges = check_images(tmp_path, names, cache_file=cache)
        assert problems == {}
        assert ranges == {**{name: (value, value) for name, value in largest.items()}, "f": (0.5, 0.5)}
        assert {type(low) for low, _ in (ranges["a"], ranges["f"])} == {int, float}
    pairs = [
        ChangePair(f"{one}{two}", one, two, [], "test")
        for one, two in ("ab", "bc", "de", ("f", "d"), ("g.png", "g.png"))
    ]
    all_ranges = {**dict.fromkeys("abc", (100, 50_000)), **dict.fromkeys("de", (7, 9)), "f": (0.5, 0.5)}
    for pair in with_ranges(pairs, ranges):
        assert pair.ranges == {image: all_ranges[image] for image in pair.images if image != "g.png"}
    assert with_ranges(pairs, {}) is pairs


def test_the_cache_of_an_older_version_is_not_used(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 5), 3000, np.uint16)).save(tmp_path / "a.png")
    found = (tmp_path / "a.png").stat()
    stamps = {"root": str(tmp_path), "images": {"a.png": [found.st_size, found.st_mtime_ns]}}
    (tmp_path / "cache.json").write_text(json.dumps(stamps))
    assert check_images(tmp_path, ["a.png"], cache_file=tmp_path / "cache.json") == ({}, {"a.png": (3000, 3000)})


def _killed_after(calls: int, remember):  # type: ignore[no-untyped-def]
    done = []

    def wrapped(*arguments: object) -> None:
        if len(done) == calls:
            raise KeyboardInterrupt
        done.append(remember(*arguments))

    return wrapped
