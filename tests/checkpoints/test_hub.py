"""Push and pull by the real commands, against a stand-in for the hub; and the card that goes with a captioner."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tests.commands import environment
from tests.hub_server import TOKEN, Hub
from tests.models.tiny import captioner, pretraining
from tests.toy_checkpoints import write_checkpoint

from diffcap.checkpoints.exporting import Scores, export, scores_of
from diffcap.checkpoints.hub import fetch, model_card, push
from diffcap.checkpoints.loading import load
from diffcap.checkpoints.reading import described, read_checkpoint
from diffcap.pair_captioner import SHIPPED
from diffcap.records import read_json, write_json
from diffcap.utils.errors import DiffcapError

METRICS: dict[str, Any] = {
    "protocol": {"dataset": "toy", "split": "test", "tokenizer": "ptb", "metrics": ["CIDEr-D"], "pairs": {"total": 8}},
    "groups": {"total": {"BLEU-4": 0.5, "CIDEr-D": 1.25}, "semantic": {"BLEU-4": 0.25, "CIDEr-D": 2.0}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint, scores and a picture, as the stages leave them."""
    folder = tmp_path / "runs" / "toy" / "pcl"
    for name in ("finetune", "reinforce", "report"):
        (folder / name).mkdir(parents=True)
    for seed, stage in enumerate(("finetune", "reinforce")):
        write_checkpoint(folder / stage / "best.ckpt", captioner(seed, vocabulary_size=10), "finetune")
    evaluated(folder, "eval", "finetune", METRICS)
    Image.new("RGB", (4, 4)).save(folder / "report" / "pairs.png")
    return folder


def evaluated(run: Path, evaluation: str, stage: str, metrics: dict[str, Any]) -> Path:
    """What an evaluation writes of a stage's checkpoint, with other provenance left out."""
    path = run / evaluation / "metrics.json"
    notes = {"checkpoints": [described(run / stage / "best.ckpt", path.parent)]}
    write_json(path, {**metrics, "provenance": notes})
    return path


def diffcap(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("diffcap")), *words]
    hub_only = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(**hub_only), check=False
    )


@pytest.mark.slow
def test_what_is_pushed_comes_back(run: Path, tmp_path: Path) -> None:
    hub, checkpoint = Hub(), run / "finetune" / "best.ckpt"
    done = diffcap(hub, tmp_path / "home", "push", str(checkpoint), "user/toy", "--license", "apache-2.0")
    assert done.returncode == 0, done.stderr
    files = hub.repositories["user/toy"]
    assert set(files) == {"README.md", "config.json", "model.safetensors", "metrics.json", "pairs.png"}
    assert files["pairs.png"] == (run / "report" / "pairs.png").read_bytes()
    card = files["README.md"].decode()
    assert "| total | 50.00 | 125.00 |" in card and "license: apache-2.0" in card and "![pairs](pairs.png)" in card
    pulled = diffcap(hub, tmp_path / "home", "pull", "user/toy", "--out", str(tmp_path / "here"))
    assert pulled.returncode == 0, pulled.stderr
    one, two = load(checkpoint), load(tmp_path / "here")
    assert one.metadata == two.metadata and one.vocabulary.words == two.vocabulary.words
    for name, value in one.captioner.state_dict().items():
        assert value.equal(two.captioner.state_dict()[name]), name
    again = diffcap(hub, tmp_path / "home", "push", str(tmp_path / "here"), "user/again")
    assert again.returncode == 0 and "note" not in again.stderr, again.stderr
    assert "| total | 50.00 | 125.00 |" in hub.repositories["user/again"]["README.md"].decode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A stand-in that this process takes for the hub."""
    from huggingface_hub import constants

    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.mark.slow
def test_what_should_be_private_goes_nowhere_else(hub: Hub, run: Path) -> None:
    checkpoint = run / "finetune" / "best.ckpt"
    for _ in range(2):  # a new one, and one that is there and private
        push(checkpoint, "user/secret", private=True)
    assert hub.private == {"user/secret"} and "model.safetensors" in hub.repositories["user/secret"]
    hub.repositories["user/open"] = {"README.md": b"mine"}
    with pytest.raises(
        DiffcapError, match=r"user/open: is there already and not private, so nothing was uploaded; make"
    ):
        push(checkpoint, "user/open", private=True)
    assert hub.repositories["user/open"] == {"README.md": b"mine"}
    push(checkpoint, "user/open")
    assert "model.safetensors" in hub.repositories["user/open"] and "user/open" not in hub.private


@pytest.mark.slow
def test_scores_and_pictures_of_other_weights_do_not_stay_on_the_hub(hub: Hub, run: Path) -> None:
    push(run / "finetune" / "best.ckpt", "user/toy")
    hub.repositories["user/toy"]["notes.txt"] = hub.repositories["user/toy"]["assets/logo.png"] = b"the owner's"
    assert {"metrics.json", "pairs.png"} < set(hub.repositories["user/toy"])
    push(run / "reinforce" / "best.ckpt", "user/toy")  # which has neither
    files = hub.repositories["user/toy"]
    assert set(files) == {"README.md", "config.json", "model.safetensors", "notes.txt", "assets/logo.png"}
    assert "None of these weights" in files["README.md"].decode()
    push(run / "finetune" / "best.ckpt", "user/toy")
    push(run / "finetune" / "best.ckpt", "user/toy")  # nothing that is uploaded is deleted
    assert {"metrics.json", "pairs.png", "notes.txt"} < set(hub.repositories["user/toy"])


def test_pictures_that_would_overwrite_something_are_refused(hub: Hub, run: Path, tmp_path: Path) -> None:
    checkpoint = run / "finetune" / "best.ckpt"
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (4, 4), "red" if folder == "one" else "blue").save(tmp_path / folder / "pairs.png")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        DiffcapError, match=r"one/pairs\.png: another of --pictures is called pairs\.png, too; rename one"
    ):
        push(checkpoint, "user/toy", pictures=[tmp_path / "one" / "pairs.png", tmp_path / "two" / "pairs.png"])
    with pytest.raises(DiffcapError, match=r"config\.json: not called \.png; give PNG files"):
        push(checkpoint, "user/toy", pictures=[tmp_path / "config.json"])
    assert not hub.asked


def test_what_the_hub_refuses_is_one_sentence(
    hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(DiffcapError, match=r"user/toy: the hub refuses \(401\); log in"):
        push(run / "finetune" / "best.ckpt", "user/toy")
    with pytest.raises(DiffcapError, match="user/nobody: nothing of that name on the hub"):
        fetch("user/nobody", tmp_path / "there")


def test_a_hub_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(*_: object, **__: object) -> None:
        raise OSError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DiffcapError, match=r"user/name: the hub cannot be used \(Name or service") as error:
        fetch("user/name", tmp_path / "x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["alone", "a/b/c", "../x", "user/", "user/na me", "https://huggingface.co/a/b"])
def test_names_of_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match="not the name of a repository"):
        fetch(name, tmp_path)
    with pytest.raises(DiffcapError, match="not the name of a repository"):
        push(tmp_path / "best.ckpt", name)


def test_only_captioners_are_pushed_and_what_is_asked_for_must_be_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DiffcapError, match="of the pretrain stage; push a captioner"):
        push(write_checkpoint(tmp_path / "last.ckpt", pretraining(), "pretrain"), "user/toy")
    checkpoint = run / "finetune" / "best.ckpt"
    with pytest.raises(DiffcapError, match=r"none\.json: no metrics there"):
        push(checkpoint, "user/toy", metrics=tmp_path / "none.json")
    with pytest.raises(DiffcapError, match=r"none\.png: no picture there"):
        push(checkpoint, "user/toy", pictures=[tmp_path / "none.png"])
    other = evaluated(run, "reinforce-eval", "reinforce", METRICS)
    with pytest.raises(
        DiffcapError, match=r"reinforce-eval/metrics\.json: is of other weights; evaluate .*best\.ckpt itself"
    ):
        push(checkpoint, "user/toy", metrics=other)
    (tmp_path / "odd.json").write_text("[]")
    with pytest.raises(DiffcapError, match=r'it has no "groups"'):
        push(checkpoint, "user/toy", metrics=tmp_path / "odd.json")


def test_the_card_tells_dataset_protocol_scores_and_licence(run: Path) -> None:
    state = read_checkpoint(run / "finetune" / "best.ckpt")
    card = model_card("user/toy", state, Scores(METRICS, None), ["pairs.png"], "mit")
    assert card.startswith("---\nlicense: mit\n") and "# toy" in card
    assert "IDC-PCL, trained on `toy`" in card and "AAAI 2022" in card
    assert "* Stage: fine-tuned on captions." in card
    averaged = {**state, "diffcap": {**state["diffcap"], "stage": "reinforce", "averaged": [{}, {}]}}
    told = "* Stage: fine-tuned, then self-critical training on CIDEr-D; the mean of the weights of 2 checkpoints."
    assert told in model_card("user/toy", averaged, Scores(None, None, "why"), [], "mit")
    assert "Protocol: dataset toy, split test, tokenizer ptb." in card
    assert "| group | BLEU-4 | CIDEr-D |\n|---|---:|---:|\n| total | 50.00 | 125.00 |" in card
    assert 'load_captioner("user/toy")' in card
    bare = model_card(
        "user/toy",
        {**state, "diffcap": {**state["diffcap"], "imported_from": "x.pt"}},
        Scores(None, None, "why"),
        [],
        "other",
    )
    assert (
        "None of these weights: why." in bare and "imported from the authors' `x.pt`" in bare and "Examples" not in bare
    )
    assert os.linesep * 3 not in card


def test_scores_are_those_of_the_same_weights(run: Path, tmp_path: Path) -> None:
    fine, reinforced = (run / stage / "best.ckpt" for stage in ("finetune", "reinforce"))
    found = scores_of(reinforced, read_checkpoint(reinforced))
    assert found.metrics is None and found.why == "eval/metrics.json is of other weights"
    better = {**METRICS, "groups": {"total": {"CIDEr-D": 1.5}}}
    evaluated(run, "reinforce-eval", "reinforce", better)
    for checkpoint, groups in ((fine, METRICS["groups"]), (reinforced, better["groups"])):
        assert export(checkpoint, tmp_path / "out").metrics["groups"] == groups
        assert read_json(tmp_path / "out/metrics.json")["groups"] == groups
        assert scores_of(tmp_path / "out", read_checkpoint(tmp_path / "out")).metrics["groups"] == groups
    state = torch.load(fine, weights_only=True)
    torch.save(
        {**state, "diffcap": {**state["diffcap"], "train_seconds": 9.0}}, fine
    )  # an equal training, not the same file
    assert scores_of(fine, read_checkpoint(fine)).file == run / "eval/metrics.json"
    write_json(run / "eval/metrics.json", METRICS)  # of an earlier version
    path = evaluated(run, "eval-both", "finetune", METRICS)
    notes = read_json(path)["provenance"]["checkpoints"]
    write_json(path, {**METRICS, "provenance": {"checkpoints": 2 * notes}})
    missing = export(fine, tmp_path / "out")
    assert missing.metrics is None and not (tmp_path / "out/metrics.json").exists()
    assert (
        "eval/metrics.json does not say which weights it is of; eval-both/metrics.json is of an ensemble of 2"
        in missing.why
    )


def test_the_scores_of_the_captioner_that_ships_are_of_its_weights() -> None:
    assert scores_of(SHIPPED, read_checkpoint(SHIPPED)).file == SHIPPED / "metrics.json"
