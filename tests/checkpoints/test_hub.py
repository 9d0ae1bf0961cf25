"""Push and pull with the real commands against a mock of the Hub, and the model card."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from tests.checkpoints.test_base_models import hub
from tests.commands import run as run_command
from tests.hub_server import TOKEN, Hub
from tests.models.tiny import captioner, pretraining
from tests.toy_checkpoints import write_checkpoint

from diffcap.checkpoints.hub import Scores, export, find_scores, model_card, push
from diffcap.checkpoints.hub_access import offline_reason
from diffcap.checkpoints.loading import load, pull
from diffcap.checkpoints.reading import checkpoint_record, read_checkpoint
from diffcap.pair_captioner import DEFAULT_CAPTIONER
from diffcap.records import read_json, write_json
from diffcap.utils.errors import DiffcapError

__all__ = ["hub"]  # a fixture
METRICS: dict[str, Any] = {
    "protocol": {"dataset": "toy", "split": "test", "tokenizer": "ptb", "metrics": ["CIDEr-D"], "pairs": {"total": 8}},
    "groups": {"total": {"BLEU-4": 0.5, "CIDEr-D": 1.25}, "semantic": {"BLEU-4": 0.25, "CIDEr-D": 2.0}},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with a checkpoint, scores and an image, as the stages write them."""
    folder = tmp_path / "runs" / "toy" / "pcl"
    for name in ("finetune", "reinforce", "report"):
        (folder / name).mkdir(parents=True)
    for seed, stage in enumerate(("finetune", "reinforce")):
        write_checkpoint(folder / stage / "best.ckpt", captioner(seed, vocabulary_size=10), "finetune")
    evaluated(folder, "eval", "finetune", METRICS)
    Image.new("RGB", (4, 4)).save(folder / "report" / "pairs.png")
    return folder


def evaluated(run: Path, evaluation: str, stage: str, metrics: dict[str, Any]) -> Path:
    """Write the metrics.json of a stage's checkpoint, with only the necessary provenance."""
    path = run / evaluation / "metrics.json"
    notes = {"checkpoints": [checkpoint_record(run / stage / "best.ckpt", path.parent)]}
    write_json(path, {**metrics, "provenance": notes})
    return path


def diffcap(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    hub_only = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return run_command([sys.executable, "-m", "diffcap", *words], home.parent, **hub_only)


@pytest.mark.slow
def test_pull_returns_what_push_uploaded(run: Path, tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_push_deletes_scores_and_images_of_earlier_weights_and_keeps_a_secret(hub: Hub, run: Path) -> None:
    checkpoint = run / "finetune" / "best.ckpt"
    for _ in range(2):  # a new one, and one that is there and private
        push(checkpoint, "user/secret", private=True)
    assert hub.private == {"user/secret"} and "model.safetensors" in hub.repositories["user/secret"]
    push(checkpoint, "user/toy")
    with pytest.raises(DiffcapError, match=r"user/toy: the repository exists and is public, so nothing was uploaded"):
        push(run / "reinforce" / "best.ckpt", "user/toy", private=True)
    hub.repositories["user/toy"]["notes.txt"] = hub.repositories["user/toy"]["assets/logo.png"] = b"the owner's"
    assert {"metrics.json", "pairs.png"} < set(hub.repositories["user/toy"])
    push(run / "reinforce" / "best.ckpt", "user/toy")  # which has neither
    files = hub.repositories["user/toy"]
    assert set(files) == {"README.md", "config.json", "model.safetensors", "notes.txt", "assets/logo.png"}
    assert "No evaluation of these weights was found" in files["README.md"].decode()
    for _ in range(2):  # nothing that is uploaded is deleted
        push(checkpoint, "user/toy")
    assert {"metrics.json", "pairs.png", "notes.txt"} < set(hub.repositories["user/toy"])


def test_what_cannot_be_pushed_is_one_sentence(
    hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, other = run / "finetune" / "best.ckpt", run / "reinforce-eval/metrics.json"
    pretrained = write_checkpoint(tmp_path / "last.ckpt", pretraining(), "pretrain")
    evaluated(run, "reinforce-eval", "reinforce", METRICS)
    pictures = [tmp_path / "one" / "pairs.png", tmp_path / "two" / "pairs.png"]
    for path in (*pictures, tmp_path / "odd.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("[]")
    for source, name, options, sentence in (
        (pretrained, "user/toy", {}, "a checkpoint of the pretrain stage cannot caption; push"),
        (checkpoint, "user/toy", {"metrics_file": tmp_path / "none.json"}, r"none\.json: no metrics there"),
        (checkpoint, "user/toy", {"metrics_file": other}, r"belongs to other weights; evaluate .*best\.ckpt itself"),
        (checkpoint, "user/toy", {"metrics_file": tmp_path / "odd.json"}, '"groups" is missing'),
        (checkpoint, "user/toy", {"image_files": [tmp_path / "none.png"]}, r"none\.png: file not found"),
        (checkpoint, "user/toy", {"image_files": [tmp_path / "odd.json"]}, r"odd\.json: not a \.png file; give"),
        (checkpoint, "user/toy", {"image_files": pictures}, r"another file of --pictures is also named pairs\.png"),
        (checkpoint, "../x", {}, "not the name of a repository"),
        (checkpoint, "https://huggingface.co/a/b", {}, "not the name of a repository"),
    ):
        with pytest.raises(DiffcapError, match=sentence):
            push(source, name, **options)
    assert not hub.asked
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(DiffcapError, match=r"user/toy: the Hub refuses access \(401\); log in"):
        push(checkpoint, "user/toy")
    with pytest.raises(DiffcapError, match="user/nobody: the Hub has no repository of this name"):
        pull("user/nobody", tmp_path / "there")


def test_a_failed_request_is_one_whole_sentence(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(f"the connection broke {40 * 'again and '}\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(DiffcapError, match=r"the request to the Hub failed \(the .* (again|and) \.\.\.\); ch") as error:
        pull("user/name", tmp_path / "x")
    assert "\n" not in str(error.value)


@pytest.fixture
def hole() -> Iterator[tuple[str, int]]:
    """The address of a server that answers no attempt to connect, as behind a firewall."""
    with socket.socket() as server, ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):  # fill its queue
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


@pytest.mark.parametrize("how", ["refused", "silent server", "silent resolver", "no name", "refused by the proxy"])
def test_an_unreachable_hub_is_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hole: tuple[str, int], how: str
) -> None:
    urls = {"refused": "http://127.0.0.1:2", "silent server": f"http://127.0.0.1:{hole[1]}", "no name": "https://a..b"}
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", urls.get(how, f"https://hub-{hole[1]}.invalid"))
    monkeypatch.setattr("diffcap.checkpoints.hub_access.CONNECT_SECONDS", 0.5)
    if how == "silent resolver":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(20))
    if how == "refused by the proxy":
        monkeypatch.setenv("HTTPS_PROXY", "127.0.0.1:3")
    start = time.monotonic()
    with pytest.raises(DiffcapError, match=r"cannot be reached \(.+\), and the model .*. Without a network") as error:
        pull("user/name", tmp_path / "x")
    assert time.monotonic() - start < 3 and ("HF_HUB_ETAG_TIMEOUT=30" in str(error.value)) == ("silent" in how)


def test_one_address_that_answers_is_enough(hub: Hub, monkeypatch: pytest.MonkeyPatch, hole: tuple[str, int]) -> None:
    """IPv6 may be broken where IPv4 works."""
    resolve, port = socket.getaddrinfo, hub.server_address[1]
    info = resolve("127.0.0.1", port, type=socket.SOCK_STREAM)[0]
    both = [(*info[:4], hole), info]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: both if host == "hub" else resolve(host, *rest))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://hub:{port}")
    monkeypatch.setattr("diffcap.checkpoints.hub_access.CONNECT_SECONDS", 2)
    start = time.monotonic()
    assert offline_reason() is None and time.monotonic() - start < 1


def test_card_has_dataset_protocol_scores_and_licence(run: Path) -> None:
    state = read_checkpoint(run / "finetune" / "best.ckpt")
    card = model_card("user/toy", state, Scores(METRICS, None), ["pairs.png"], "mit")
    data = ModelCard(card).data
    fields = data.to_dict()
    assert (fields["license"], fields["library_name"], data.model_name) == ("mit", "diffcap", "toy") and "# toy" in card
    assert [(one.metric_name, one.metric_value, one.dataset_split) for one in data.eval_results] == [
        ("BLEU-4", 50.0, "test"),
        ("CIDEr-D", 125.0, "test"),
    ]
    assert "IDC-PCL, trained on `toy`" in card and "AAAI 2022" in card
    assert "* Stage: fine-tuned on captions." in card
    averaged = {**state, "diffcap": {**state["diffcap"], "stage": "reinforce", "averaged": [{}, {}]}}
    stage = "* Stage: fine-tuned, then self-critical training on CIDEr-D; the weights are the mean of 2 checkpoints."
    assert stage in model_card("user/toy", averaged, Scores(None, None, "why"), [], "mit")
    assert "Protocol: dataset toy, split test, tokenizer ptb." in card
    assert "| group | BLEU-4 | CIDEr-D |\n|---|---:|---:|\n| total | 50.00 | 125.00 |" in card
    assert 'load_captioner("user/toy")' in card
    state["diffcap"]["imported_from"] = "x.pt"
    bare = model_card("user/toy", state, Scores(None, None, "why"), [], "other")
    assert "No evaluation of these weights was found: why." in bare and "Examples" not in bare
    assert "imported from the authors' `x.pt`" in bare
    assert os.linesep * 3 not in card and os.linesep * 3 not in bare
    assert card.endswith("also limit the use of these weights.\nPlease cite the paper.\n") and "base model" not in card


def test_scores_are_those_of_the_same_weights(run: Path, tmp_path: Path) -> None:
    fine, reinforced = (run / stage / "best.ckpt" for stage in ("finetune", "reinforce"))
    found = find_scores(reinforced, read_checkpoint(reinforced))
    assert found.metrics is None and found.missing_reason == "eval/metrics.json belongs to other weights"
    better = {**METRICS, "groups": {"total": {"CIDEr-D": 1.5}}}
    evaluated(run, "reinforce-eval", "reinforce", better)
    for checkpoint, groups in ((fine, METRICS["groups"]), (reinforced, better["groups"])):
        assert export(checkpoint, tmp_path / "out").metrics["groups"] == groups
        assert read_json(tmp_path / "out/metrics.json")["groups"] == groups
        assert find_scores(tmp_path / "out", read_checkpoint(tmp_path / "out")).metrics["groups"] == groups
    state = torch.load(fine, weights_only=True)
    state["diffcap"]["train_seconds"] = 9.0  # an equal training, not the same file
    torch.save(state, fine)
    assert find_scores(fine, read_checkpoint(fine)).file == run / "eval/metrics.json"
    write_json(run / "eval/metrics.json", METRICS)  # of an earlier version
    path = evaluated(run, "eval-both", "finetune", METRICS)
    notes = read_json(path)["provenance"]["checkpoints"]
    write_json(path, {**METRICS, "provenance": {"checkpoints": 2 * notes}})
    missing = export(fine, tmp_path / "out")
    assert missing.metrics is None and not (tmp_path / "out/metrics.json").exists()
    reason = (
        "eval/metrics.json does not name the weights that it evaluated; eval-both/metrics.json belongs to an ensemble"
    )
    assert missing.missing_reason.startswith(f"{reason} of 2")


def test_the_scores_of_the_captioner_that_ships_are_of_its_weights() -> None:
    assert find_scores(DEFAULT_CAPTIONER, read_checkpoint(DEFAULT_CAPTIONER)).file == DEFAULT_CAPTIONER / "metrics.json"
