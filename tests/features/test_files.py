"""Image files as a feature store: the values of the store of pixels, without an array."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.odd_images import scene

from diffcap.features.backbones import build_backbone
from diffcap.features.images import file_stamps, unique_images
from diffcap.features.preprocessing import load_image
from diffcap.features.store import CHECKSUM_FILE, FeatureStore
from diffcap.features.writer import StoreWriter, write_file_store
from diffcap.record import describe_files, result_id
from diffcap.records import ChangePair, read_dataset, write_dataset
from diffcap.utils.errors import DiffcapError

SIZE = (20, 30)
# Of the size of the store and of others, and of modes that are converted.
FILES = {
    "a.png": scene("RGB", (30, 20), 1),
    "b.png": scene("RGBA", (64, 48), 2),
    "c.jpg": scene("L", (31, 77), 3),
    "d.png": scene("I;16", (12, 9), 4),
    "e.gif": scene("P", (30, 40), 5),
    "f.jpg": scene("RGB", (30, 20), 6),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset with its images inside the folder, and both stores."""
    home = tmp_path / "data"
    (home / "images").mkdir(parents=True)
    for name, image in FILES.items():
        exif = Image.Exif()
        exif[0x0112] = 6  # the last one is turned
        image.save(home / "images" / name, **({"exif": exif} if name == "f.jpg" else {}))
    names = list(FILES)
    splits = ["train", "train", "train", "val", "test"]
    pairs = [ChangePair(str(n), names[n], names[n + 1], [f"the {n} moved"], split) for n, split in enumerate(splits)]
    write_dataset(home, "toy", home / "images", pairs, {})
    write_pixels(home)
    write_files(home)
    return home


def ranges(home: Path) -> dict[Path, tuple[int, int]]:
    return {home / "images" / "d.png": (0, 65_535)}


def files_of(home: Path) -> tuple[list[str], list[Path], list[str]]:
    """The path, the file and the stamp of each image."""
    paths = unique_images(read_dataset(home).pairs)
    files = [home / "images" / path for path in paths]
    return paths, files, file_stamps(files, ranges(home))


def write_pixels(home: Path, size: tuple[int, int] = SIZE, name: str = "pixels") -> None:
    backbone, (paths, files, stamps) = build_backbone("pixels", image_size=size), files_of(home)
    writer = StoreWriter(home / "features" / name, paths, backbone.shape(), backbone.describe(), stamps)
    images = [backbone.preprocess(load_image(file, value_range=ranges(home).get(file))) for file in files]
    writer.write(writer.missing_rows(), np.stack(images))
    writer.finish()


def write_files(home: Path, size: tuple[int, int] = SIZE, name: str = "files") -> int:
    backbone = build_backbone("pixels", image_size=size)
    return write_file_store(home / "features" / name, *files_of(home), backbone.shape(), backbone.describe())


def sums(home: Path) -> list[int]:
    return np.fromfile(home / "features/files" / CHECKSUM_FILE, "<u4").tolist()


def training_hash(home: Path) -> str:
    store = home / "features" / "files"
    return result_id({}, describe_files([home / "manifest.jsonl", store / "meta.json", store / CHECKSUM_FILE], {}))


def test_the_values_are_those_of_the_store_of_pixels(folder: Path) -> None:
    pixels, files = (FeatureStore.open(folder / "features" / name) for name in ("pixels", "files"))
    assert files.shape == pixels.shape == (3, *SIZE) and len(files) == len(pixels) == len(FILES)
    paths = ["f.jpg", "a.png", "c.jpg", "a.png", "b.png", "e.gif", "d.png"]
    found, expected = (store.read(store.rows(paths)) for store in (files, pixels))
    assert found.dtype == expected.dtype == np.uint8 and found.std() > 30
    np.testing.assert_array_equal(found, expected)
    names = {path.name for path in files.folder.iterdir()}
    assert names == {".lock", "complete", "index.json", "meta.json", CHECKSUM_FILE}
    with pytest.raises(DiffcapError, match=r"1 of 2 images have no features there, the first is nope\.png"):
        files.rows(["a.png", "nope.png"])


def test_a_captioner_of_one_kind_reads_the_other_and_no_other_size(folder: Path) -> None:
    pixels, files = (FeatureStore.open(folder / "features" / name).meta for name in ("pixels", "files"))
    FeatureStore.open(folder / "features/files", {**pixels, "name": "pixels"})
    FeatureStore.open(folder / "features/pixels", {**files, "name": "files"})
    write_files(folder, (10, 30), "small")
    with pytest.raises(DiffcapError, match=r"its features have shape .*, the captioner was trained on"):
        FeatureStore.open(folder / "features/small", pixels)


def test_a_folder_of_another_size_or_kind_is_refused(folder: Path) -> None:
    for write, size, name, key in (
        (write_files, (10, 30), "files", "preprocessing"),
        (write_files, SIZE, "pixels", "from_files"),
        (write_pixels, SIZE, "files", "from_files"),
    ):
        with pytest.raises(DiffcapError, match=rf"holds features of another kind \({key} there is .* use the same"):
            write(folder, size, name)
    paths = list(FILES)
    for name in ("files", "pixels"):  # both are as they were
        store = FeatureStore.open(folder / "features" / name)
        assert len(store.read(store.rows(paths))) == len(paths)


def test_only_new_and_changed_files_are_read_again(folder: Path) -> None:
    before, identity = sums(folder), training_hash(folder)
    times = {file: file.stat().st_mtime_ns for file in (folder / "features/files").glob("[!.]*")}
    assert write_files(folder) == 0 and sums(folder) == before
    assert times == {file: file.stat().st_mtime_ns for file in times}  # or trainings would be out of date
    os.utime(folder / "images/b.png", ns=(1, 1))  # the same content at another time
    store = FeatureStore.open(folder / "features/files")
    assert len(store.read(store.rows(["b.png"])))
    assert write_files(folder) == 1 and sums(folder) == before and training_hash(folder) == identity
    scene("RGB", (30, 20), 9).save(folder / "images/d.png")
    assert write_files(folder) == 1
    assert [n for n, (old, new) in enumerate(zip(before, sums(folder))) if old != new] == [3]
    assert training_hash(folder) != identity
    scene("RGB", (30, 20), 10).save(folder / "images/g.png")
    pairs = [*read_dataset(folder).pairs, ChangePair("5", "g.png", "a.png", ["x"], "train")]
    write_dataset(folder, "toy", folder / "images", pairs, {})
    assert write_files(folder) == 1 and len(FeatureStore.open(folder / "features/files")) == 7


def test_a_changed_image_is_refused_until_the_command_has_run(folder: Path) -> None:
    store = FeatureStore.open(folder / "features/files")
    file = folder / "images/c.jpg"
    stamp = file.stat()
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # the size and the time do not show it
    command = f'make extract FOLDER={folder} BACKBONE=files ARGS="--model.image_size=[20,30]"'
    assert len(store.read(store.rows(["a.png"])))
    with pytest.raises(DiffcapError) as caught:
        store.read(store.rows(["a.png", "c.jpg"]))
    assert str(caught.value).startswith(f"{file}: the image has changed since `make extract`")
    assert f"run `{command}`" in str(caught.value)
    with pytest.raises(DiffcapError) as caught:  # so that a training that is started again does not read on
        FeatureStore.open(folder / "features/files")
    assert command in str(caught.value)
    write_files(folder)
    store = FeatureStore.open(folder / "features/files")
    assert len(store.read(store.rows(["a.png", "c.jpg"])))


def test_broken_and_missing_images_are_named(folder: Path) -> None:
    (folder / "images/a.png").write_bytes((folder / "images/a.png").read_bytes()[:300])
    write_files(folder)
    store = FeatureStore.open(folder / "features/files")
    with pytest.raises(DiffcapError, match=r"images/a\.png: truncated or broken image .*; fetch the file again\.$"):
        store.read(store.rows(["b.png", "a.png"]))
    for name in ("b.png", "d.png"):
        (folder / "images" / name).rename(folder / f"lost-{name}")
    with pytest.raises(DiffcapError, match=r"images/b\.png: cannot be read \(No such file or directory\); fetch"):
        store.read(store.rows(["c.jpg", "b.png"]))
    with pytest.raises(DiffcapError) as caught:
        write_files(folder)
    assert str(caught.value).startswith(f"{folder / 'images/b.png'}: cannot be read")
    assert "(2 image files of 6 cannot be read; `make data` lists" in str(caught.value)
    with pytest.raises(DiffcapError, match="the image files have changed, or were not all read; run `make extract"):
        FeatureStore.open(folder / "features/files")
    for name in ("b.png", "d.png"):
        (folder / f"lost-{name}").rename(folder / "images" / name)
    write_files(folder)
    assert len(FeatureStore.open(folder / "features/files")) == 6


def test_a_damaged_file_of_checksums_is_refused_and_written_again(folder: Path) -> None:
    before = sums(folder)
    os.truncate(folder / "features/files" / CHECKSUM_FILE, 7)
    with pytest.raises(DiffcapError, match=r"sums\.u32: damaged, it must have 4 bytes per image; run `make extract"):
        FeatureStore.open(folder / "features/files")
    assert write_files(folder) == 6 and sums(folder) == before
