"""Averaged checkpoints, and ensembles whose members must number their words alike."""

import sys
from pathlib import Path

import pytest
import torch
from tests.commands import run
from tests.models.test_decoder import SIZES as WORD_SIZES
from tests.models.tiny import captioner
from tests.toy_checkpoints import WORDS, write_checkpoint

from diffcap.checkpoints.combining import average, expand_folders, load_members
from diffcap.checkpoints.loading import load
from diffcap.methods.dirl import DIRL
from diffcap.methods.pcl.model import PCL
from diffcap.methods.scorer.model import SCORER
from diffcap.utils.errors import DiffcapError

SIZE = 6 + len(WORDS)


def pcl(path: Path, seed: int, words: list[str] = WORDS, **options: int) -> Path:
    return write_checkpoint(path, captioner(seed, vocabulary_size=6 + len(words), **options), "finetune", words)


def of_words(path: Path, kind: type[SCORER] | type[DIRL], words: list[str] = WORDS, layout: str = "rcc") -> Path:
    model = kind(**{**WORD_SIZES, "vocabulary_size": 4 + len(words)})
    return write_checkpoint(
        path, model, "finetune", words, method=kind.__name__.lower(), vocabulary_layout=layout, max_length=10
    )


def test_the_mean_of_the_weights_is_a_checkpoint_that_captions(tmp_path: Path) -> None:
    files = [pcl(tmp_path / f"{seed}.ckpt", seed) for seed in range(3)]
    assert average(files, tmp_path / "mean" / "best.ckpt") == [7, 7, 7]
    found, models = load(tmp_path / "mean/best.ckpt"), [captioner(seed, vocabulary_size=SIZE) for seed in range(3)]
    for name, value in found.captioner.state_dict().items():
        parts = torch.stack([model.state_dict()[name] for model in models])
        torch.testing.assert_close(value, parts.mean(0))
    assert isinstance(found.captioner, PCL) and found.vocabulary.words == WORDS
    assert [source["file"] for source in found.metadata["averaged"]] == [file.name for file in files]
    assert not list((tmp_path / "mean").glob(".*"))


def test_a_run_stands_for_what_it_has_kept_and_its_last(tmp_path: Path) -> None:
    kept = [pcl(tmp_path / f"step-{step:06d}.ckpt", step) for step in (200, 100)]
    with pytest.raises(DiffcapError, match="no periodic checkpoints"):
        expand_folders([tmp_path / ".."])
    assert expand_folders([tmp_path]) == kept[::-1]
    (tmp_path / "last.ckpt").write_bytes(kept[0].read_bytes())  # of a run that was interrupted: the same as the newest
    assert expand_folders([tmp_path]) == kept[::-1]
    last = pcl(tmp_path / "last.ckpt", 3)
    assert expand_folders([tmp_path]) == [*kept[::-1], last]


def test_what_cannot_be_averaged_is_one_sentence(tmp_path: Path) -> None:
    one = pcl(tmp_path / "one.ckpt", 1)
    for other, output in (
        (pcl(tmp_path / "wide.ckpt", 1, width=24), "hyperparameters differs from"),
        (of_words(tmp_path / "scorer.ckpt", SCORER), "method differs from"),
        (pcl(tmp_path / "words.ckpt", 1, [*WORDS[:3], "they"]), "word 4 is 'they', not 'the'"),
    ):
        with pytest.raises(DiffcapError, match=output):
            average([one, other], tmp_path / "out.ckpt")
    with pytest.raises(DiffcapError, match="there is no other checkpoint to average with"):
        average([one], tmp_path / "out.ckpt")
    for out in (tmp_path, Path(), tmp_path / (300 * "x")):
        with pytest.raises(OSError) as refusal:  # the commands make one sentence of it
            average([one, one], out)
        assert refusal.value.filename == str(out)
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.slow
def test_the_command_averages(tmp_path: Path) -> None:
    files = [str(pcl(tmp_path / f"{seed}.ckpt", seed)) for seed in range(2)]
    done = run([sys.executable, "-m", "diffcap", "average", *files, "--out", "out.ckpt"], tmp_path)
    assert done.returncode == 0 and "the mean of 2 checkpoints, of steps 7, 7" in done.stdout, done.stderr
    assert load(tmp_path / "out.ckpt").metadata["step"] == 7


def test_members_of_an_ensemble_number_their_words_alike(tmp_path: Path) -> None:
    one, other = of_words(tmp_path / "scorer.ckpt", SCORER), of_words(tmp_path / "dirl.ckpt", DIRL)
    assert [member.metadata["method"] for member in load_members([one, other])] == ["scorer", "dirl"]
    for bad, output in (
        (of_words(tmp_path / "a.ckpt", DIRL, ["cube", "moved", "ruby", "the"]), "word 3 is 'ruby', not 'red'"),
        (of_words(tmp_path / "b.ckpt", DIRL, [*WORDS, "zebra"]), "word 5 is 'zebra', not missing"),
        (pcl(tmp_path / "c.ckpt", 1), "its vocabulary layout is pcl, that of .* is rcc"),
    ):
        with pytest.raises(DiffcapError, match=output) as error:
            load_members([one, bad])
        assert str(bad) in str(error.value) and "\n" not in str(error.value)
