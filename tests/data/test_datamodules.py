"""The DataModules: what a step's batch holds, on one rank and on several, swapped or not, from the start or later on."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.toy import NEGATIVES, SHAPE, batches_of_ranks, pairs, toy_trainer, write_toy

from diffcap.data.datamodules import AdaptData, CaptionData, FeatureData
from diffcap.data.masking import IGNORED
from diffcap.datasets.registry import WordIdProtocol
from diffcap.evaluation.remote_sensing import word_id_scoring
from diffcap.features.store import FeatureStore
from diffcap.methods.pcl.data import PretrainData
from diffcap.models.change_head import UNKNOWN_TYPE
from diffcap.negatives.file import iter_negatives
from diffcap.records import read_dataset, write_dataset
from diffcap.text.vocabulary import LayoutName
from diffcap.utils.errors import DiffcapError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


def captioning(folder: Path, **options: Any) -> CaptionData:
    data = CaptionData(str(folder), "toy", **{"batch_size": 6, "max_length": 20, **options})
    data.setup("fit")
    return data


def pretraining(folder: Path, **options: Any) -> PretrainData:
    data = PretrainData(str(folder), "toy", **{"batch_size": 8, "max_length": 20, **options})
    data.setup("fit")
    return data


def images(data: FeatureData, batch: dict) -> list[tuple[str, str]]:
    """Paths of a batch's images, from what the features say."""
    paths = {row: path for path, row in FeatureStore.open(data.store.folder)._row_of.items()}
    names = [[paths[round(image[0, 0, 0].item() * 16)] for image in batch[side]] for side in ("before", "after")]
    return list(zip(*names))


def sentences(data: FeatureData, tokens: torch.Tensor) -> list[str]:
    return [data.vocabulary.decode(row) for row in tokens]


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


def test_an_epoch_has_every_caption_of_every_training_pair_once_beside_its_images(folder: Path) -> None:
    data = captioning(folder, batch_size=5)
    train = [pair for pair in read_dataset(folder).pairs if pair.split == "train"]
    wanted = sorted(
        (pair.before, pair.after, caption, int(not pair.is_distractor)) for pair in train for caption in pair.captions
    )
    found = []
    for step in range(-(-2 * len(wanted) // 5)):
        batch = data.make_batch(step)
        assert batch["before"].shape == (5, *SHAPE) and batch["before"].dtype == torch.float16
        text = sentences(data, batch["tokens"])
        found += [(*paths, *rest) for paths, *rest in zip(images(data, batch), text, batch["is_change"].tolist())]
    assert sorted(found[: len(wanted)]) == wanted
    assert sorted(found[len(wanted) : 2 * len(wanted)]) == wanted
    assert found[: len(wanted)] != found[len(wanted) : 2 * len(wanted)]


@pytest.mark.parametrize("swap", [False, True])
def test_shares_of_the_ranks_make_the_batch_of_one(folder: Path, swap: bool) -> None:
    for make in (captioning, pretraining):
        data = make(folder, swap=swap, trim=True)
        for step in range(12):
            whole = data.make_batch(step)
            for rank, share in enumerate(batches_of_ranks(data, step)):
                expected = {key: value if key == "task" else value[rank::3] for key, value in whole.items()}
                assert equal(share, expected), (step, rank)


def test_swap_exchanges_the_default_and_the_distractor_image(folder: Path) -> None:
    plain, swapping = captioning(folder, batch_size=20), captioning(folder, batch_size=20, swap=True)
    swapped = 0
    for step in range(10):
        a, b = plain.make_batch(step), swapping.make_batch(step)
        assert torch.equal(a["mlm_tokens"], b["mlm_tokens"]) and torch.equal(a["is_change"], b["is_change"])
        for (before, after), (new_before, new_after), change in zip(
            images(plain, a), images(swapping, b), a["is_change"]
        ):
            scene = before.split("/")[1]
            assert before == f"default/{scene}"
            assert after == (f"semantic/{scene}" if change else f"nonsemantic/{scene}")
            if (before, after) != (new_before, new_after):
                swapped += 1
                assert new_before == f"nonsemantic/{scene}"
                assert new_after == (f"semantic/{scene}" if change else f"default/{scene}")
    assert swapped / 200 == pytest.approx(0.5, abs=0.12)


def test_aligning_has_the_caption_first_and_then_its_own_negatives(folder: Path) -> None:
    data = pretraining(folder, tasks={"fda": 1}, min_count=1, trim=True, batch_size=13)
    known = {
        row.caption: [negative.text for negative in row.negatives] for row in iter_negatives(folder / "negatives.jsonl")
    }
    owner = {caption: pair for pair in read_dataset(folder).pairs for caption in pair.captions}
    seen = []
    for step in range(40):
        batch = data.make_batch(step)
        assert batch["task"] == "fda" and batch["fda_captions"].shape[:2] == (13 // (1 + NEGATIVES), 1 + NEGATIVES)
        for paths, choices in zip(images(data, batch), batch["fda_captions"]):
            caption, *wrong = sentences(data, choices)
            assert wrong == [in_words_of(data, text) for text in known[caption]]
            assert paths == (owner[caption].before, owner[caption].after)
            seen.append(caption)
    assert sorted(seen[: len(known)]) == sorted(known)  # an epoch


def in_words_of(data: FeatureData, text: str) -> str:
    return data.vocabulary.decode(data.vocabulary.encode(text, data.max_length))


def test_the_other_tasks_hide_words_or_patches(folder: Path) -> None:
    data = pretraining(folder, mask_ratio=0.4)
    for step in range(20):
        batch = data.make_batch(step)
        if batch["task"] == "mlm":
            chosen = batch["mlm_labels"] != IGNORED
            assert chosen.any(1).all() and torch.equal(batch["mlm_labels"][chosen], batch["tokens"][chosen])
        if batch["task"] == "mvcl":
            assert set(batch) == {"task", "before", "after", "tokens", "visual_mask"}
            assert batch["visual_mask"].shape == (8, 2 * 6) and batch["visual_mask"].any(1).all()
            assert not (batch["tokens"] == data.vocabulary.mask).any()  # its text is whole


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_goes_on_with_the_batch_of_its_step(folder: Path, workers: int) -> None:
    for make in (captioning, pretraining):
        data = make(folder, swap=True, num_workers=workers)
        undisturbed = [data.make_batch(number) for number in range(21, 26)]
        data.trainer = toy_trainer(step=7, accumulate=3)
        again = list(islice(data.train_dataloader(), 5))
        assert all(equal(a, b) for a, b in zip(undisturbed, again))


def test_fewer_samples_than_processes_are_refused(folder: Path) -> None:
    for make in (captioning, pretraining):
        data = make(folder, batch_size=2)
        data.trainer = toy_trainer(ranks=2)
        data.train_dataloader()
        data.trainer = toy_trainer(ranks=3)
        with pytest.raises(DiffcapError, match=r"batch_size is 2, which gives 2 samples per step for 3 processes"):
            data.train_dataloader()
    data = pretraining(folder, batch_size=5, samples="scenes")
    data.trainer = toy_trainer(ranks=3)
    with pytest.raises(DiffcapError, match=r"batch_size is 5, which gives 2 samples per step for 3 processes"):
        data.train_dataloader()


def test_trimming_cuts_padding_and_nothing_else(folder: Path) -> None:
    for make in (captioning, pretraining):
        plain, trimmed = make(folder), make(folder, trim=True)
        cut = 0
        for step in range(12):
            a, b = plain.make_batch(step), trimmed.make_batch(step)
            for key in a:
                if key in ("tokens", "mlm_tokens", "mlm_labels", "fda_captions"):
                    used = b[key].shape[-1]
                    padding = IGNORED if key == "mlm_labels" else plain.vocabulary.pad
                    assert torch.equal(a[key][..., :used], b[key]) and (a[key][..., used:] == padding).all()
                    assert key == "mlm_labels" or (b[key][..., -1] != plain.vocabulary.pad).any()
                    cut += a[key].shape[-1] - used
                elif key != "task":
                    assert torch.equal(a[key], b[key])
        assert cut > 12


def test_validation_has_every_pair_once_in_order_with_its_first_caption(folder: Path) -> None:
    data = captioning(folder, eval_batch_size=3, trim=True)
    wanted = [pair for pair in read_dataset(folder).pairs if pair.split == "val"]
    batches = list(data.val_dataloader())
    assert [len(batch["id"]) for batch in batches] == [3, 3, 2]
    assert [id for batch in batches for id in batch["id"]] == [pair.id for pair in wanted]
    assert [path for batch in batches for path in images(data, batch)] == [(pair.before, pair.after) for pair in wanted]
    # A validation scene's number is a word that no training caption has.
    text = [line for batch in batches for line in sentences(data, batch["tokens"])]
    assert text == [in_words_of(data, pair.captions[0]) for pair in wanted] and all("<UNK>" in line for line in text)
    again = list(captioning(folder, eval_batch_size=3, trim=True, num_workers=2).val_dataloader())
    assert all(equal(a, b) for a, b in zip(batches, again))
    few = captioning(folder, val_limit=4)
    assert sum(len(batch["id"]) for batch in few.val_dataloader()) == 4 == len(few.val_references)


def test_pairs_without_captions_are_not_validated_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = read_dataset(folder)
    last = [pair for pair in dataset.pairs if pair.split == "val"][-1]
    bare = [replace(pair, captions=[]) if pair == last else pair for pair in dataset.pairs]
    write_dataset(tmp_path, "toy", dataset.root, bare, {})
    (tmp_path / "features").symlink_to(folder / "features")
    data = captioning(tmp_path)
    assert capsys.readouterr().out == f"toy: 1 val pairs (first {last.id}) have no caption and are left out\n"
    seen = [name for batch in data.val_dataloader() for name in batch["id"]]
    assert last.id not in seen and seen == list(data.val_references) and len(seen) > 1


@pytest.mark.parametrize("layout", ["rsicc", "chg2cap"])
def test_the_words_of_all_splits_are_counted_on_request(folder: Path, layout: LayoutName) -> None:
    """The vocabulary of the released programs is that of their evaluators, in the same order."""
    everywhere = " ".join(caption for pair in pairs(24) for caption in pair.captions).split()
    data = captioning(folder, vocabulary_splits="all", vocabulary_layout=layout, min_count=3)
    assert set(data.words) == {word for word in everywhere if everywhere.count(word) >= 3}
    assert len(data.words) > len(captioning(folder, vocabulary_layout=layout, min_count=3).words)
    evaluators = word_id_scoring(WordIdProtocol(min_count=3, layout=layout), data.dataset.pairs).vocabulary
    assert evaluators is not None and evaluators.tokens == data.vocabulary.tokens


def test_bad_input_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match=r"'nab'; the tasks are mlm, mvcl, fda, single_mlm, .* and fgvc"):
        pretraining(folder, tasks={"nab": 3})
    with pytest.raises(DiffcapError, match=r"nowhere\.jsonl: no negatives there; build it with `make negatives"):
        pretraining(folder, negatives=str(tmp_path / "nowhere.jsonl"))
    pretraining(folder, negatives=str(tmp_path / "nowhere.jsonl"), tasks={"mlm": 1})  # not needed, not read
    others = tmp_path / "others.jsonl"
    others.write_text('{"id": "99.png", "caption": "x", "negatives": [{"kind": "retrieve", "text": "y"}]}\n')
    with pytest.raises(DiffcapError, match="has no training pair; write the file again"):
        pretraining(folder, negatives=str(others))
    with pytest.raises(DiffcapError, match="no dataset there"):
        CaptionData(str(tmp_path / "nothing"), "toy")
    with pytest.raises(DiffcapError, match="no feature store there"):
        CaptionData(str(folder), "resnet")
    write_dataset(tmp_path, "toy", folder, [pair for pair in pairs(24) if pair.split != "val"], {})
    (tmp_path / "features").symlink_to(folder / "features")
    with pytest.raises(DiffcapError, match="its manifest has no val pairs"):
        CaptionData(str(tmp_path), "toy")
    write_dataset(tmp_path, "toy", folder, [pair for pair in pairs(30) if not pair.is_distractor], {})
    with pytest.raises(DiffcapError, match=r"images have no features there, the first is default/24\.png"):
        captioning(tmp_path)
    write_dataset(tmp_path, "toy", folder, [pair for pair in pairs(24) if not pair.is_distractor], {})
    with pytest.raises(DiffcapError, match="no training scene has a change pair and a distractor pair"):
        captioning(tmp_path, samples="scenes")
    with pytest.raises(DiffcapError, match="the stage has no epochs"):
        assert pretraining(folder).batches_per_epoch


@pytest.mark.parametrize("layout", ["pcl", "rcc", "chg2cap", "clip", "clip_used"])
def test_captions_that_are_cut_are_counted_with_the_length_that_keeps_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: Any
) -> None:
    toy = read_dataset(folder)
    short, long = "the cup is gone !", "the red cup near the small box is gone now , and a large box is there !"
    changed = [
        replace(pair, captions=[short, long] if number % 2 else [short]) for number, pair in enumerate(toy.pairs)
    ]
    write_dataset(tmp_path, "toy", toy.root, changed, {})
    (tmp_path / "features").symlink_to(folder / "features")
    trained = [pair for pair in changed if pair.split == "train"]
    longs, every = sum(len(pair.captions) - 1 for pair in trained), sum(len(pair.captions) for pair in trained)

    def texts_and_warning(length: int) -> tuple[list[str], str]:
        data = captioning(tmp_path, max_length=length, vocabulary_layout=layout)
        return sentences(data, torch.from_numpy(data.train_table.tokens)), capsys.readouterr().out

    warning = texts_and_warning(12)[1]
    assert f"warning: {longs} of {every} training captions of toy are longer than data.max_length=12 allows" in warning
    needed = int(warning.partition("--data.max_length=")[2].split()[0])
    assert texts_and_warning(needed) == (texts_and_warning(60)[0], "")
    texts, warning = texts_and_warning(needed - 1)
    assert texts != texts_and_warning(60)[0] and f"warning: {longs} of {every} training captions" in warning


def test_pairs_come_once_an_epoch_with_one_of_their_captions(folder: Path) -> None:
    data = captioning(folder, batch_size=5, samples="pairs", vocabulary_layout="rcc")
    train = {(pair.before, pair.after): pair for pair in read_dataset(folder).pairs if pair.split == "train"}
    found: list[tuple[str, str]] = []
    output: dict[tuple[str, str], set[str]] = {paths: set() for paths in train}
    for step in range(20 * len(train) // 5):
        batch = data.make_batch(step)
        assert batch.keys() == {"before", "after", "tokens", "is_change", "change_type"}
        for paths, text, change in zip(images(data, batch), sentences(data, batch["tokens"]), batch["is_change"]):
            found.append(paths)
            output[paths].add(text)
            assert change == (not train[paths].is_distractor)
    assert sorted(found[: len(train)]) == sorted(train) and sorted(found[len(train) : 2 * len(train)]) == sorted(train)
    assert output == {paths: set(pair.captions) for paths, pair in train.items()}


@pytest.mark.parametrize("swap", [False, True])
def test_scenes_bring_their_change_and_their_distractor_pair(folder: Path, swap: bool) -> None:
    data = captioning(folder, batch_size=5, samples="scenes", vocabulary_layout="rcc", swap=swap)
    captions = {pair.id: pair.captions for pair in read_dataset(folder).pairs}
    scenes, views = [], set()
    for step in range(6):
        batch = data.make_batch(step)
        assert len(batch["before"]) == 5 and len(batch["after"]) == len(batch["tokens"]) == 10
        assert batch["is_change"].tolist() == [1] * 5 + [0] * 5
        assert batch["change_type"].tolist() == [0] * 5 + [UNKNOWN_TYPE] * 5
        both = {**batch, "before": torch.cat([batch["before"]] * 2)}
        text = sentences(data, batch["tokens"])
        for number, (before, after) in enumerate(images(data, both)):
            kind, scene = before.split("/")
            change = number < 5
            other = "nonsemantic" if kind == "default" else "default"
            assert after == (f"semantic/{scene}" if change else f"{other}/{scene}")
            assert text[number] in captions[scene if change else f"{scene}_n"]
            views.add(kind)
            if change:
                scenes.append(scene)
    assert views == ({"default", "nonsemantic"} if swap else {"default"})
    train = {pair.id for pair in read_dataset(folder).pairs if pair.split == "train" and not pair.is_distractor}
    assert sorted(scenes[: len(train)]) == sorted(train)


def test_ranks_share_scenes_out_whole(folder: Path) -> None:
    data = captioning(folder, batch_size=7, samples="scenes", swap=True, trim=True)
    for step in range(4):
        whole = data.make_batch(step)
        for rank, share in enumerate(batches_of_ranks(data, step)):
            assert torch.equal(share["before"], whole["before"][rank::3])
            for key in whole.keys() - {"before"}:
                halves = [half[rank::3] for half in whole[key].chunk(2)]
                assert torch.equal(share[key], torch.cat(halves)), key


@pytest.mark.parametrize("samples", ["captions", "pairs", "scenes"])
@pytest.mark.parametrize("batch_size", [3, 7, 1000])
def test_an_epoch_has_the_steps_that_its_samples_need(folder: Path, samples: str, batch_size: int) -> None:
    data = captioning(folder, samples=samples, batch_size=batch_size)
    steps = data.batches_per_epoch  # before the stage is set up
    data.setup("fit")
    assert steps == -(-len(data.sample_pairs) // batch_size)


def test_an_epoch_of_the_adaptation_leaves_out_an_incomplete_batch(folder: Path) -> None:
    for batch_size in (3, 7, 1000):
        data = AdaptData(str(folder), "toy", batch_size=batch_size)
        steps = data.batches_per_epoch
        data.setup("fit")
        assert steps == max(1, len(data.sample_captions) // batch_size)
