"""Pre-training on single images, on several datasets in one schedule, and on pairs of labelled images."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.test_datamodules import pretraining as on
from tests.toy import NEGATIVES, SHAPE, batches_of_ranks, write_toy, write_toy_labelled, write_toy_singles

from diffcap.data.datamodules import AdaptData, CaptionData
from diffcap.data.pair_table import PairDataset
from diffcap.methods.pcl.data import LabelledPairs, PretrainData
from diffcap.records import read_dataset, write_dataset
from diffcap.utils.errors import DiffcapError

TASKS = {"mlm": 2, "mvcl": 2, "fda": 2, "single_mlm": 2, "single_mvcl": 2, "single_fda": 2, "fgvc": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "pairs": write_toy(tmp_path_factory.mktemp("pairs")),
        "singles": write_toy_singles(tmp_path_factory.mktemp("singles")),
        "labelled": write_toy_labelled(tmp_path_factory.mktemp("labelled")),
    }


def mixed(folders: dict[str, Path], **options: Any) -> PretrainData:
    extra = {"singles": str(folders["singles"]), "labelled": str(folders["labelled"])}
    words = {"vocabulary_with": [str(folders["singles"])]}
    return on(folders["pairs"], **{"tasks": TASKS, **extra, **words, **options})


def rows(maps: torch.Tensor) -> list[int]:
    """Numbers of the images in their store, which their features tell."""
    return [round(value * 16) for value in maps[:, 0, 0, 0].tolist()]


def test_captioned_single_images_alone(folders: dict[str, Path]) -> None:
    data = on(folders["singles"], tasks={"mlm": 1, "mvcl": 1, "fda": 1})
    images = [image for image in read_dataset(folders["singles"]).pairs if image.split == "train"]
    seen: Counter[str] = Counter()
    for step in range(40):
        batch = data.make_batch(step)
        assert "after" not in batch and batch["before"].shape[1:] == SHAPE
        tokens = batch["fda_captions"][:, 0] if batch["task"] == "fda" else batch["tokens"]
        for number, text in zip(rows(batch["before"]), tokens):
            (image,) = [image for image in images if image.before == f"single/{number}.png"]
            assert data.vocabulary.decode(text) in image.captions
        if batch["task"] == "mvcl":
            assert batch["visual_mask"].shape == (8, SHAPE[1] * SHAPE[2]) and batch["visual_mask"].any(1).all()
        seen[batch["task"]] += 1
    assert min(seen.values()) > 5 and len(seen) == 3
    for batch in data.val_dataloader():
        assert "after" not in batch and rows(batch["before"]) == [4, 9, 14, 19]


def test_all_datasets_in_one_schedule(folders: dict[str, Path]) -> None:
    data = mixed(folders)
    labels = [image.extra["class"] for image in read_dataset(folders["labelled"]).pairs]
    drawn = [data.make_batch(step) for step in range(150)]
    shares = Counter(batch["task"] for batch in drawn)
    assert shares.keys() == TASKS.keys() and all(
        shares[task] / 150 == pytest.approx(TASKS[task] / 15, abs=0.1) for task in TASKS
    )
    same = 0
    for batch in drawn:
        assert ("after" in batch) != batch["task"].startswith("single_")
        if batch["task"] == "fgvc":
            assert set(batch) == {"task", "before", "after", "class_before", "class_after"}
            for side in ("before", "after"):
                assert [labels[number] for number in rows(batch[side])] == batch[f"class_{side}"].tolist()
                assert batch[side].shape == (8, *SHAPE) and batch[side].dtype == torch.float16
            same += int((batch["class_before"] == batch["class_after"]).sum())
    assert same / (8 * shares["fgvc"]) == pytest.approx(0.5, abs=0.12)
    singles = next(batch for batch in drawn if batch["task"] == "single_fda")
    assert singles["fda_captions"].shape[:2] == (8 // (1 + NEGATIVES), 1 + NEGATIVES)
    assert data.classes == 3 and on(folders["pairs"]).classes == 0


def test_shares_of_the_ranks_make_the_batch_of_one(folders: dict[str, Path]) -> None:
    data = mixed(folders)
    seen = set()
    for step in range(40):
        whole = data.make_batch(step)
        seen.add(whole["task"])
        for rank, share in enumerate(batches_of_ranks(data, step)):
            assert share.keys() == whole.keys() and share["task"] == whole["task"]
            assert all(torch.equal(share[key], value[rank::3]) for key, value in whole.items() if key != "task")
    assert seen == TASKS.keys()


def test_two_datasets_share_a_vocabulary_whichever_comes_first(folders: dict[str, Path]) -> None:
    one = on(folders["pairs"], vocabulary_with=[str(folders["singles"])], min_count=2)
    other = on(folders["singles"], vocabulary_with=[str(folders["pairs"])], min_count=2, tasks={"mlm": 1})
    later = CaptionData(str(folders["pairs"]), "toy", vocabulary_with=[str(folders["singles"])], min_count=2)
    assert one.words == other.words == later.words
    alone = on(folders["pairs"], min_count=2).words
    assert "bird" in one.words and "bird" not in alone and set(alone) < set(one.words)


def test_bad_input_is_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    singles, labelled = str(folders["singles"]), str(folders["labelled"])
    with pytest.raises(DiffcapError, match=r"has 'fgvc', but data\.labelled is not set; give its folder"):
        on(folders["pairs"], tasks={"fgvc": 1})
    with pytest.raises(DiffcapError, match=r"has 'single_fda', but data\.singles is not set"):
        on(folders["pairs"], tasks={"mlm": 1, "single_fda": 1})
    with pytest.raises(DiffcapError, match="toy_singles: has images of fewer than two classes"):
        on(folders["pairs"], tasks={"fgvc": 1}, labelled=singles)
    with pytest.raises(DiffcapError, match="toy_labelled: has no single training image with captions"):
        on(folders["pairs"], tasks={"single_mlm": 1}, singles=labelled, vocabulary_with=[labelled])
    with pytest.raises(DiffcapError, match=r"data\.vocabulary_with does not have this folder; add it"):
        mixed(folders, vocabulary_with=[str(folders["labelled"])])
    roundabout = folders["singles"] / ".." / folders["singles"].name
    assert "bird" in mixed(folders, vocabulary_with=[str(roundabout)]).words
    with pytest.raises(DiffcapError, match="toy_labelled: its images have classes and no captions, so it can only"):
        on(folders["labelled"])
    for kind in (CaptionData, AdaptData):
        with pytest.raises(DiffcapError, match="toy_singles: has single images, which only pre-training can use"):
            kind(singles, "toy")
    with pytest.raises(DiffcapError, match="the dataset has single images, which cannot be captioned"):
        PairDataset(on(folders["singles"], tasks={"mlm": 1}).table("val"))
    other = write_toy_labelled(tmp_path / "other", meta="another")
    with pytest.raises(DiffcapError, match=r"those of toy have different values of backbone; extract both with"):
        on(folders["pairs"], tasks={"fgvc": 1}, labelled=str(other))
    both = [*read_dataset(folders["pairs"]).pairs, *read_dataset(folders["singles"]).pairs]
    write_dataset(tmp_path / "both", "both", folders["pairs"], both, {})
    (tmp_path / "both/features").symlink_to(folders["pairs"] / "features")
    with pytest.raises(DiffcapError, match="has both pairs and single images"):
        on(tmp_path / "both", tasks={"mlm": 1})


CLASSES = np.array([2, 0, 1, 0, 2, 2, 0, 1, 2])  # sizes 3, 2, 4


def test_an_epoch_has_every_image_first_in_four_pairs_half_of_one_class() -> None:
    pairs = LabelledPairs(CLASSES, seed=0)
    first, second = pairs.take(0, 4 * len(CLASSES))
    assert np.array_equal(np.bincount(first), np.full(len(CLASSES), 4))
    assert (first != second).all()
    same = CLASSES[first] == CLASSES[second]
    assert all(same[first == image].sum() == 2 for image in range(len(CLASSES)))


def test_partners_are_drawn_evenly_and_anew_each_epoch() -> None:
    pairs, size = LabelledPairs(CLASSES, seed=0), 4 * len(CLASSES)
    first, second = pairs.take(0, 600 * size)
    counts = np.zeros((len(CLASSES), len(CLASSES)))
    np.add.at(counts, (first, second), 1)
    for one in range(len(CLASSES)):
        alike = (CLASSES[one] == CLASSES) & (np.arange(len(CLASSES)) != one)
        assert counts[one, alike] == pytest.approx(1200 / alike.sum(), rel=0.2)
        others = CLASSES[one] != CLASSES
        assert counts[one, others] == pytest.approx(1200 / others.sum(), rel=0.2)
        assert counts[one, one] == 0
    epochs = {tuple(sorted(zip(*pairs.take(epoch * size, size)))) for epoch in range(5)}
    assert len(epochs) == 5
