"""The feature store: what is written is read, by many processes, over kills, and nothing else passes for a store."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from diffcap.features.store import CHECKSUM_FILE, FeatureStore
from diffcap.features.writer import StoreWriter
from diffcap.utils.errors import DiffcapError

SHAPE = (3, 2, 4)
META = {"network": "toy", "weights_sha256": "ab", "pool": (4, 6)}
PATHS = [f"images/{n}.png" for n in range(10)]


def features(rows: np.ndarray) -> np.ndarray:
    """Values that name their own row."""
    return (np.asarray(rows)[:, None] * 100 + np.arange(24)).reshape(-1, *SHAPE).astype(np.float32)


def writer(folder: Path, paths: list[str] = PATHS, **options) -> StoreWriter:
    return StoreWriter(folder, paths, SHAPE, options.pop("meta", META), **options)


def fill(folder: Path, **options) -> FeatureStore:
    store = writer(folder, **options)
    store.write(store.missing_rows(), features(store.missing_rows()))
    store.finish()
    return FeatureStore.open(folder)


def test_written_rows_are_read_back(tmp_path: Path) -> None:
    store = fill(tmp_path / "s")
    assert store.shape == SHAPE and len(store) == 10
    rows = store.rows(["images/7.png", "images/0.png", "images/7.png"])
    assert rows.tolist() == [7, 0, 7] and rows.dtype == np.int64
    assert store.read(rows).dtype == np.float16
    np.testing.assert_array_equal(store.read(rows), features(rows))
    assert store.meta["network"] == "toy" and store.meta["pool"] == [4, 6]


def test_an_unfinished_store_is_refused_and_goes_on(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.write(np.array([0, 1, 2, 5]), features([0, 1, 2, 5]))
    first.flush()
    with pytest.raises(DiffcapError, match=r"not complete \(4 of 10 images done\)"):
        FeatureStore.open(tmp_path)
    second = writer(tmp_path)
    assert second.missing_rows().tolist() == [3, 4, 6, 7, 8, 9]
    with pytest.raises(DiffcapError, match=r"6 of 10 images are still missing, the first is images/3\.png"):
        second.finish()


def test_another_kind_of_store_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    with pytest.raises(DiffcapError, match=r'weights_sha256 there is "ab", now "cd".; use the same settings as before'):
        writer(tmp_path, meta={**META, "weights_sha256": "cd"})
    with pytest.raises(DiffcapError, match="shape"):
        StoreWriter(tmp_path, PATHS, (3, 2, 5), META)
    with pytest.raises(DiffcapError, match="quick_gelu"):
        writer(tmp_path, meta={**META, "quick_gelu": True})
    assert not len(writer(tmp_path, meta={**META, "tag": "openai"}).missing_rows())  # where the same weights come from


def test_new_images_are_added_and_the_old_ones_kept(tmp_path: Path) -> None:
    fill(tmp_path)
    more = writer(tmp_path, ["new.png", *PATHS[5:], "newer.png"])
    assert not (tmp_path / "complete").exists()
    assert more.missing_rows().tolist() == [10, 11] and more.image_paths[10:] == ["new.png", "newer.png"]
    more.write(np.array([10, 11]), features([10, 11]))
    more.finish()
    store = FeatureStore.open(tmp_path)
    np.testing.assert_array_equal(store.read(store.rows(["newer.png", "images/0.png"])), features([11, 0]))


def test_an_image_that_was_replaced_is_extracted_again(tmp_path: Path) -> None:
    fill(tmp_path, stamps=["7"] * 10)
    sums = (tmp_path / CHECKSUM_FILE).read_bytes()
    assert not len(writer(tmp_path, stamps=["7"] * 5 + [""] + ["7"] * 4).missing_rows())  # one is out of reach
    again = writer(tmp_path, stamps=["7"] * 4 + ["8"] + ["7"] * 5)
    assert again.missing_rows().tolist() == [4]
    with pytest.raises(DiffcapError, match="not complete"):
        FeatureStore.open(tmp_path)
    again.write(np.array([4]), features([4]))
    assert (tmp_path / CHECKSUM_FILE).read_bytes() == sums  # the same features: nobody has to train again
    again.write(np.array([4]), features([5]))
    changed = (tmp_path / CHECKSUM_FILE).read_bytes()
    assert [n for n in range(10) if changed[4 * n : 4 * n + 4] != sums[4 * n : 4 * n + 4]] == [4]


def test_a_captioner_reads_features_of_its_own_kind_only(tmp_path: Path) -> None:
    store = fill(tmp_path)
    FeatureStore.open(tmp_path, {**store.meta, "name": "another"})
    for key, other in {
        "weights_sha256": "cd",
        "pool": None,
        "network": "resnet",
        "shape": [3, 2, 5],
        "quick_gelu": True,
    }.items():
        with pytest.raises(DiffcapError, match=rf"its features have {key} .*, the captioner was trained on"):
            FeatureStore.open(tmp_path, {**store.meta, key: other})


def test_broken_stores_are_named(tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match="no feature store there"):
        FeatureStore.open(tmp_path / "nowhere")
    fill(tmp_path / "b")
    meta = json.loads((tmp_path / "b" / "meta.json").read_text())
    (tmp_path / "b" / "meta.json").write_text(json.dumps({**meta, "version": 7}))
    with pytest.raises(DiffcapError, match="version 7, but this program reads version 2"):
        FeatureStore.open(tmp_path / "b")


def test_values_beyond_float16_are_cut_off_and_no_number_is_refused(tmp_path: Path) -> None:
    store = writer(tmp_path)
    huge = features([0])
    huge[0, 0, 0, 0] = 1e6
    with pytest.warns(UserWarning, match="outside the range from -65504 to 65504"):
        store.write(np.array([0]), huge)
    huge[0, 0, 0, 0] = np.nan
    with pytest.raises(DiffcapError, match=r"images/1\.png: its features are infinite or not a number"):
        store.write(np.array([1]), huge)


def _every_second(folder: Path, start: int) -> None:
    store = writer(folder)
    for row in range(start, 10, 2):
        store.write(np.array([row]), features([row]))
    store.flush()


def test_two_processes_fill_one_store(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_every_second, args=(tmp_path, start)) for start in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    writer(tmp_path).finish()
    np.testing.assert_array_equal(FeatureStore.open(tmp_path).read(np.arange(10)), features(range(10)))


def _slowly(folder: Path) -> None:
    store = writer(folder)
    for row in store.missing_rows():
        store.write(np.array([row]), features([row]))
        store.flush()
        time.sleep(0.02)


def test_a_killed_process_loses_nothing_that_was_marked(tmp_path: Path) -> None:
    fill(tmp_path / "whole")
    process = multiprocessing.get_context("fork").Process(target=_slowly, args=(tmp_path / "killed",))
    process.start()
    while not (marks := tmp_path / "killed" / "done.u8").exists() or sum(marks.read_bytes()) < 3:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert 0 < len(writer(tmp_path / "killed").missing_rows()) <= 7
    fill(tmp_path / "killed")
    for name in ("features.f16", "index.json", "meta.json", "done.u8", "complete"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def flip(folder: Path, *rows: int, silently: bool = False) -> None:
    """Change the sign of all features of some rows; `silently`: size and time of the file stay, as on a failing disk."""
    data = folder / "features.f16"
    before = data.stat()
    values = np.memmap(data, np.float16, "r+", shape=(10, *SHAPE))
    values[list(rows)] *= -1
    values.flush()
    if silently:
        os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))


def repaired(folder: Path) -> list[int]:
    """Go on with a store as extraction does; gives the rows that it computes."""
    missing = writer(folder).missing_rows().tolist()
    np.testing.assert_array_equal(fill(folder).read(np.arange(10)), features(np.arange(10)))
    return missing


ROW = 3 * 2 * 4 * 2  # bytes


@pytest.mark.parametrize(
    ("name", "bytes_left", "lost"),
    [
        ("features.f16", 7 * ROW - 1, [6, 7, 8, 9]),
        ("features.f16", 0, list(range(10))),
        (CHECKSUM_FILE, 35, [8, 9]),
        (CHECKSUM_FILE, None, list(range(10))),
    ],
)
def test_rows_beyond_the_end_of_a_file_are_computed_again(
    tmp_path: Path, name: str, bytes_left: int | None, lost: list[int]
) -> None:
    fill(tmp_path)
    sums = (tmp_path / CHECKSUM_FILE).read_bytes()
    if bytes_left is None:
        (tmp_path / name).unlink()
    else:
        os.truncate(tmp_path / name, bytes_left)
    with pytest.raises(DiffcapError, match=rf"{name}: truncated, {bytes_left or 0} bytes, but"):
        FeatureStore.open(tmp_path)
    assert repaired(tmp_path) == lost
    assert (tmp_path / CHECKSUM_FILE).read_bytes() == sums


def test_a_damaged_row_is_named_when_it_is_read_and_all_damaged_rows_are_computed_again(tmp_path: Path) -> None:
    folder = tmp_path / "features" / "toy"
    fill(folder)
    flip(folder, 3, 7, silently=True)
    store = FeatureStore.open(folder)
    np.testing.assert_array_equal(store.read(np.array([4, 2])), features([4, 2]))
    command = f"make extract FOLDER={tmp_path} FEATURES=toy"
    with pytest.raises(DiffcapError) as caught:
        store.read(np.array([4, 7, 2, 7]))
    assert "the features of images/7.png are damaged" in str(caught.value) and command in str(caught.value)
    with pytest.raises(DiffcapError, match=r"not complete \(9 of 10 images done\)") as caught:
        FeatureStore.open(folder)
    assert command in str(caught.value)
    assert repaired(folder) == [3, 7]  # and 3, which nobody has read


def test_a_damaged_row_of_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    fill(tmp_path)
    flip(tmp_path, 0)
    store = FeatureStore.open(tmp_path)
    (tmp_path / "done.u8").unlink()
    (tmp_path / "done.u8").mkdir()  # cannot be opened for writing, not even by root
    with pytest.raises(DiffcapError, match=r"the features of images/0\.png are damaged"):
        store.read(np.array([0]))


def test_a_changed_file_is_checked_before_the_store_counts_as_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    sums = (tmp_path / CHECKSUM_FILE).read_bytes()
    capsys.readouterr()
    assert repaired(tmp_path) == [] and not capsys.readouterr().out  # nothing has changed: nothing is checked
    flip(tmp_path, 2, 9)
    assert repaired(tmp_path) == [2, 9]
    output = capsys.readouterr().out
    assert "the features of 2 images are damaged (first images/2.png)" in output
    with (tmp_path / CHECKSUM_FILE).open("r+b") as file:
        file.seek(4 * 5)
        file.write(b"\0\0\0\0")
    assert repaired(tmp_path) == [5]
    assert (tmp_path / CHECKSUM_FILE).read_bytes() == sums
