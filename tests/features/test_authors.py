import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.layouts import write_clevr_dc, write_pcl_lines

from diffcap.datasets import read_pairs
from diffcap.features.authors import fill_store
from diffcap.features.images import unique_images
from diffcap.features.store import FeatureStore
from diffcap.records import ChangePair, Dataset
from diffcap.utils.errors import DiffcapError

SHAPE = (4, 3, 3)


def feature(path: str) -> np.ndarray:
    return np.random.default_rng(sum(path.encode())).standard_normal(SHAPE).astype(np.float32)


@pytest.fixture
def clevr(tmp_path: Path) -> Dataset:
    """IDC-PCL's lines, without any image."""
    folder = write_pcl_lines(tmp_path / "pcl", [3, 12], [5], [1])
    return Dataset("clevr_change", folder, read_pairs("clevr_change", folder), {})


def write_npy(folder: Path, paths: list[str]) -> None:
    for path in paths:
        role, name = path.split("/")
        target = folder / role.replace("images", "features") / f"{name}.npy"
        target.parent.mkdir(parents=True, exist_ok=True)
        np.save(target, feature(path)[None] if role == "nsc_images" else feature(path))


def write_pickles(folder: Path, paths: list[str], protocol: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for role in ("", "sc_", "nsc_"):
        mine = {Path(path).stem: feature(path) for path in paths if path.startswith(f"{role}images/")}
        (folder / f"{role}img.pkl").write_bytes(pickle.dumps(mine, protocol))


def check(dataset: Dataset, store: Path) -> None:
    found = FeatureStore.open(store)
    paths = unique_images(dataset.pairs)
    assert found.shape == SHAPE and len(found) == len(paths)
    expected = np.stack([feature(path) for path in paths]).astype(np.float16)
    np.testing.assert_array_equal(found.read(found.rows(paths)), expected)


def refusal(dataset: Dataset, source: Path, store: Path) -> str:
    with pytest.raises(DiffcapError) as caught:
        fill_store(dataset, source, store)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_array_an_image(clevr: Dataset, tmp_path: Path) -> None:
    paths = unique_images(clevr.pairs)
    write_npy(tmp_path / "theirs", paths)
    assert fill_store(clevr, tmp_path / "theirs", tmp_path / "store") == len(paths) == 12
    check(clevr, tmp_path / "store")
    note = json.loads((tmp_path / "store/source.json").read_text())
    assert note["folder"] == str(tmp_path / "theirs") and note["form"] == "npy" and note["images"] == 12
    assert fill_store(clevr, tmp_path / "theirs", tmp_path / "store") == 0  # nothing twice


@pytest.mark.parametrize(("place", "protocol"), [("full", 2), ("", 4)])
def test_pickles(clevr: Dataset, tmp_path: Path, place: str, protocol: int) -> None:
    write_pickles(tmp_path / "theirs" / place, unique_images(clevr.pairs), protocol)
    assert fill_store(clevr, tmp_path / "theirs", tmp_path / "store") == 12
    check(clevr, tmp_path / "store")
    note = json.loads((tmp_path / "store/source.json").read_text())
    assert [file["name"].split("/")[-1] for file in note["files"]] == ["img.pkl", "nsc_img.pkl", "sc_img.pkl"]
    assert all(len(file["sha256"]) == 64 for file in note["files"])
    assert fill_store(clevr, tmp_path / "theirs", tmp_path / "store") == 0


def test_the_only_pickle_of_birds_whatever_its_name(tmp_path: Path) -> None:
    """CUB's images are in folders by class; IDC-PCL has the maps of birds flattened."""
    paths = ["images/001.Gull/Gull_1.jpg", "images/002.Tern/Tern_2.jpg"]
    birds = Dataset("cub", tmp_path, [ChangePair(path, path, None, ["a"], "train") for path in paths], {})
    (tmp_path / "theirs").mkdir()
    flat = {"Gull_1": feature(paths[0]).reshape(4, 9), "002.Tern/Tern_2": feature(paths[1]).reshape(4, 9)}
    (tmp_path / "theirs/cub_feat.pkl").write_bytes(pickle.dumps(flat, 2))
    assert fill_store(birds, tmp_path / "theirs", tmp_path / "store") == 2
    check(birds, tmp_path / "store")
    (tmp_path / "theirs/other.pkl").write_bytes(pickle.dumps(flat, 2))
    assert "no single pickle there" in refusal(birds, tmp_path / "theirs", tmp_path / "again")


def test_same_names_in_two_folders(tmp_path: Path) -> None:
    """CLEVR-DC's before and after have one name; DIRL's features are of the renamed files."""
    folder = write_clevr_dc(tmp_path / "dc", {"train": [0, 1], "val": [2], "test": [3]})
    dataset = Dataset("clevr_dc", folder, read_pairs("clevr_dc", folder), {})
    for role, theirs in (("bef", "features"), ("aft", "sc_features")):
        (tmp_path / "theirs" / theirs).mkdir(parents=True)
        for number in range(4):
            np.save(tmp_path / f"theirs/{theirs}/{number:06d}.png.npy", feature(f"{role}/{number}.png"))
    fill_store(dataset, tmp_path / "theirs", tmp_path / "store")
    check(dataset, tmp_path / "store")


def test_a_pickle_that_asks_for_more_is_not_run(clevr: Dataset, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "ran",)

    write_pickles(tmp_path / "theirs", unique_images(clevr.pairs))
    (tmp_path / "theirs/sc_img.pkl").write_bytes(pickle.dumps({"CLEVR_semantic_000003": Bomb()}))
    assert "without running its code" in refusal(clevr, tmp_path / "theirs", tmp_path / "store")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "store/complete").exists()
    again = {Path(path).stem: feature(path) for path in unique_images(clevr.pairs) if path.startswith("sc_")}
    (tmp_path / "theirs/sc_img.pkl").write_bytes(pickle.dumps(again))
    assert 0 < fill_store(clevr, tmp_path / "theirs", tmp_path / "store") < 12  # the other files' were kept
    check(clevr, tmp_path / "store")


def test_a_damaged_row_is_taken_from_the_authors_files_again(clevr: Dataset, tmp_path: Path) -> None:
    theirs, store = tmp_path / "their files", tmp_path / "features" / "authors"
    write_npy(theirs, unique_images(clevr.pairs))
    fill_store(clevr, theirs, store)
    with (store / "features.f16").open("r+b") as file:
        file.write(bytes(8))
    with pytest.raises(DiffcapError) as caught:
        check(clevr, store)
    assert f"`make extract FOLDER={tmp_path} FEATURES=authors FEATURES_FROM='{theirs}'`" in str(caught.value)
    assert fill_store(clevr, theirs, store) == 1
    check(clevr, store)


def test_one_sentence_for_each_fault(clevr: Dataset, tmp_path: Path) -> None:
    paths, theirs, store = unique_images(clevr.pairs), tmp_path / "theirs", tmp_path / "store"
    assert "no such folder" in refusal(clevr, theirs, store)
    theirs.mkdir()
    assert "no .npy files, no img.pkl" in refusal(clevr, theirs, store)
    write_npy(theirs, paths[1:])
    assert "1 of 12 images have no features there (first images/CLEVR_default_000003.png)" in refusal(
        clevr, theirs, store
    )
    write_npy(theirs, paths)
    file = theirs / "features/CLEVR_default_000012.png.npy"
    np.save(file, np.zeros((4, 2, 2)))
    assert "features of (4, 2, 2), expected (4, 3, 3)" in refusal(clevr, theirs, store)
    np.save(file, np.zeros((4, 7)))
    assert "features of (4, 7), not (channels, rows, columns)" in refusal(clevr, theirs, store)
    np.save(file, np.zeros((0, 3, 3)))
    assert "features of (0, 3, 3), not (channels, rows, columns)" in refusal(clevr, theirs, store)
    for header in ("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000, 100, 100)}", "{'descr: (((("):
        file.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
        assert "not a complete .npy file of numbers" in refusal(clevr, theirs, store)
    np.save(file, np.array([{}]), allow_pickle=True)
    assert "not a complete .npy file of numbers" in refusal(clevr, theirs, store)
    write_npy(theirs, paths)
    write_npy(theirs / "copy", paths[:1])
    assert "2 files are named CLEVR_default_000003.png.npy" in refusal(clevr, theirs, store)
    write_pickles(theirs, paths)
    (theirs / "nsc_img.pkl").unlink()
    assert "nsc_img.pkl is missing; put it into the same folder as img.pkl" in refusal(clevr, theirs, store)
