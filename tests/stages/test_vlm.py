"""METHOD=vlm by the real commands on tiny random models: training, two processes, zero-shot, exports, bad input."""

import html
import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.commands import ROOT, config_words, in_process, one_sentence, part, run, same_logs, weights

from diffcap.registry import get_method

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.hub_server import TOKEN, Hub
from tests.tiny_vlms import build

from diffcap import load_captioner
from diffcap.checkpoints.hub import Scores, model_card
from diffcap.checkpoints.loading import load
from diffcap.checkpoints.reading import read_checkpoint, write_folder
from diffcap.methods.vlm.model import PROMPT, VLM
from diffcap.records import read_dataset
from diffcap.report.attention import iter_attention
from diffcap.report.table import ZERO_SHOT_NOTE
from diffcap.utils.errors import DiffcapError
from diffcap.web.captioners import Captioners, find_choices

SMALL = (
    *("--data.batch_size=2", "--data.features=blocks_pixels", "--trainer.accelerator=cpu", "--data.val_limit=6"),
    *("--trainer.max_steps=8", "--trainer.val_check_interval=4", "--trainer.log_every_n_steps=1"),
    *("--run.checkpoint_every=2", "--model.lr=1e-2", "--model.captioner.init_args.lora_dropout=0.1"),
)
QUICK = "--metrics=[BLEU-1, BLEU-4, ROUGE-L, CIDEr-D]"  # METEOR starts Java
EXAMPLES = ROOT / "examples/before.png", ROOT / "examples/after.png"


def finetune(
    base: Path, folder: Path, out: Path, *options: str, stage: str = "finetune", ablation: str | None = None
) -> list[str]:
    named = config_words(
        "configs/trainer/default.yaml",
        part("vlm", "finetune"),
        "configs/dataset/blocks.yaml",
        part("vlm", "finetune", "blocks"),
        *([part("vlm", "finetune", ablation=ablation)] if ablation else []),
        *(["configs/reinforce/base.yaml", "configs/reinforce/blocks.yaml"] if stage == "reinforce" else []),
    )
    given = f"--model.captioner.init_args.base={base}", f"--data.folder={folder}", f"--run.out={out}"
    return [sys.executable, str(ROOT / "stages" / f"{stage}.py"), *named, *SMALL, *given, *options]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen2_5_vl", tmp_path_factory.mktemp("base") / "tiny-qwen")


@pytest.fixture(scope="module")
def trained(base: Path, pixels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished fine-tuning of 8 steps."""
    out = tmp_path_factory.mktemp("vlm") / "finetune"
    assert in_process(finetune(base, pixels, out)) is None
    return out


@pytest.mark.thorough
def test_two_processes_train_to_the_weights_of_one(base: Path, pixels: Path, tmp_path: Path) -> None:
    still = "--model.captioner.init_args.lora_dropout=0", "--trainer.max_steps=4", "--trainer.val_check_interval=2"
    still += "--model.lr=1e-3", "--data.val_limit=3"
    assert in_process(finetune(base, pixels, tmp_path / "one", *still)) is None
    ddp = "--trainer.devices=2", "--trainer.strategy=ddp"
    done = run(finetune(base, pixels, tmp_path / "two", *still, *ddp), tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = weights(tmp_path / "one/last.ckpt"), weights(tmp_path / "two/last.ckpt")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], atol=2e-5, rtol=0)
    assert {"train/loss", "val/caption_loss", "val/CIDEr-D"} <= same_logs(tmp_path / "one", tmp_path / "two", rel=1e-4)


def test_evaluation_and_captioning_of_a_trained_model(trained: Path, pixels: Path, tmp_path: Path) -> None:
    state = read_checkpoint(trained / "best.ckpt")
    assert state["state_dict"] and all("lora_" in name for name in state["state_dict"])
    assert state["diffcap"]["words"] == [] and state["diffcap"]["vocabulary_layout"] == "hub"
    words = [sys.executable, str(ROOT / "stages/evaluate.py"), f"--checkpoint={trained / 'best.ckpt'}", QUICK]
    assert in_process([*words, f"--out={tmp_path / 'eval'}", f"--folder={pixels}", "--beams=2"]) is None
    metrics = json.loads((tmp_path / "eval/metrics.json").read_text())
    assert metrics["provenance"]["method"] == "vlm" and metrics["provenance"]["checkpoints"][0]["step"] in (4, 8)
    captioner = load_captioner(trained / "best.ckpt", "cpu")
    caption = captioner(*EXAMPLES, beams=3)
    assert captioner.domain_note is not None and "blocks" in captioner.domain_note
    total = sum(word.log_probability for word in caption.words)
    assert caption.log_probability <= total + 1e-4
    maps = captioner.attention(*EXAMPLES, caption)
    assert maps.before.shape[1:] == maps.after.shape[1:] and len(maps.words) == len(caption.words)


def test_a_base_model_in_another_place_is_given_and_checked(
    trained: Path, base: Path, pixels: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(base, tmp_path / "moved")
    state = read_checkpoint(trained / "best.ckpt")
    state["diffcap"]["hyperparameters"]["base"] = str(tmp_path / "gone" / "away")
    write_folder(tmp_path / "exported", state)
    with pytest.raises(DiffcapError, match="is not on this machine; give its folder as --base"):
        load_captioner(tmp_path / "exported", "cpu")
    captions = [
        load_captioner(path, "cpu", base=folder)(*EXAMPLES)
        for path, folder in ((tmp_path / "exported", moved), (trained / "best.ckpt", None))
    ]
    with Captioners(find_choices([str(tmp_path / "exported")], tmp_path, base=str(moved)), "cpu").use(0) as served:
        captions.append(served(*EXAMPLES))
    assert captions[0] == captions[1] == captions[2]
    other = build("smolvlm", tmp_path / "other")
    with pytest.raises(DiffcapError, match="not the base model"):
        load_captioner(tmp_path / "exported", "cpu", base=other)
    with pytest.raises(DiffcapError, match="is a base model itself; remove --base"):
        load_captioner(str(other), "cpu", base=moved)
    with pytest.raises(DiffcapError, match="is not on this machine"):
        next(iter_attention([tmp_path / "exported"], pixels, read_dataset(pixels).pairs[:1], {}))


@pytest.mark.parametrize(
    ("odd", "weights", "sentence"),
    [
        ({"base_sha256": None}, {}, "its base_sha256 is None, so the base model cannot be checked"),
        ({"prompt": "x" * 20_000}, {}, "its prompt has 20,000 characters"),
        ({"train": "nothing"}, {}, "weights of the base model, which was not trained: net.*lora_A"),
        ({"train": "projector"}, {}, "weights of the base model, which was not trained: net.*lora_A"),
        ({}, {"net.base_model.model.lm_head.weight": 3}, "base model, which was not trained: net.*lm_head"),
        ({"image_kwargs": {"size": {"longest_edge": 10**10}}}, {}, "size.longest_edge is 10000000000, and its limit"),
    ],
)
def test_odd_checkpoints_of_strangers_are_refused(
    odd: dict[str, Any], weights: dict[str, int], sentence: str, trained: Path, base: Path, tmp_path: Path
) -> None:
    """Before the base model's weights are read."""
    state = read_checkpoint(trained / "best.ckpt")
    state["diffcap"]["hyperparameters"] |= odd
    state["state_dict"] |= {f"captioner.{name}": torch.zeros(size, size) for name, size in weights.items()}
    write_folder(tmp_path / "odd", state)
    unread = mock.patch("diffcap.methods.vlm.model.load_model", side_effect=AssertionError)
    with unread, pytest.raises(DiffcapError, match=sentence) as error:
        load(tmp_path / "odd", base)
    assert "\n" not in str(error.value)


def test_the_exported_forms_give_the_same_captions(trained: Path, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    for form in ("peft", "merged"):
        words = [sys.executable, "-m", "diffcap", "export", str(trained / "last.ckpt"), "--form", form]
        assert in_process([*words, "--out", str(tmp_path / form)]) is None
    ours: Any = load(trained / "last.ckpt").captioner
    assert isinstance(ours, VLM)
    images = torch.randint(0, 256, (2, 3, 96, 128), dtype=torch.uint8)
    inputs = ours.prepare_inputs(images[:1], images[1:])
    adapted = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), tmp_path / "peft").eval()
    merged: Any = load_captioner(tmp_path / "merged", "cpu")._captioner
    untrained = AutoModelForImageTextToText.from_pretrained(base).eval()
    with torch.no_grad():
        expected = ours.core(**inputs).logits
        assert not torch.allclose(untrained(**inputs).logits, expected, atol=1e-2)
        assert torch.allclose(adapted(**inputs).logits, expected, atol=1e-5)
        assert torch.allclose(merged.core(**inputs).logits, expected, atol=1e-3)
    assert "contains files; give a new folder" in str(in_process([*words, "--out", str(base)]))
    settings = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    with pytest.raises(DiffcapError, match="an adapter of PEFT, which diffcap does not read; give best"):
        load_captioner(tmp_path / "peft", "cpu")
    card = (tmp_path / "merged/README.md").read_text()
    assert f'"{PROMPT}"' in card and "# tiny-qwen, fine-tuned" in card and str(base.parent) not in card
    assert "license: other" in card and "Licence of the base model: not stated" in card


def test_checkpoints_are_combined_and_continued(trained: Path, base: Path, pixels: Path, tmp_path: Path) -> None:
    twice = load_captioner([trained / "last.ckpt", trained / "last.ckpt"], "cpu")(*EXAMPLES, beams=2)
    once = load_captioner(trained / "last.ckpt", "cpu")(*EXAMPLES, beams=2)
    assert twice.text == once.text and twice.log_probability == pytest.approx(once.log_probability, abs=1e-3)
    first = f"--model.init_from={trained / 'last.ckpt'}", "--model.lr=0"
    first += "--trainer.max_steps=1", "--trainer.val_check_interval=1"
    assert in_process(finetune(base, pixels, tmp_path / "next", *first)) is None
    expected = weights(trained / "last.ckpt")
    for name, value in weights(tmp_path / "next/last.ckpt").items():
        assert torch.equal(value, expected[name])


def test_self_critical_training_changes_the_adapters(trained: Path, base: Path, pixels: Path, tmp_path: Path) -> None:
    options = f"--model.init_from={trained / 'last.ckpt'}", "--trainer.max_steps=2", "--trainer.val_check_interval=2"
    assert in_process(finetune(base, pixels, tmp_path / "reinforce", *options, stage="reinforce")) is None
    before, after = weights(trained / "last.ckpt"), weights(tmp_path / "reinforce/last.ckpt")
    assert before.keys() == after.keys() and any(not torch.equal(value, after[name]) for name, value in before.items())
    assert load(tmp_path / "reinforce/last.ckpt").metadata["stage"] == "reinforce"


@pytest.mark.parametrize("ablation", [name for name in get_method("vlm").ablation_names if name != "qlora"])
def test_every_row_of_the_ablation_trains_its_own_weights(
    ablation: str, base: Path, pixels: Path, tmp_path: Path
) -> None:
    short = "--trainer.max_steps=1", "--trainer.val_check_interval=1", "--data.val_limit=1"
    assert in_process(finetune(base, pixels, tmp_path / "run", *short, ablation=ablation)) is None
    names = set(weights(tmp_path / "run/last.ckpt"))
    kinds = {"lora": "lora_", "projector": "merger", "all_weights": "", "difference": ""}
    assert names and all(kinds[ablation] in name for name in names)
    assert any("difference.mix" in name for name in names) == (ablation == "difference")
    assert any("embed_tokens" in name for name in names) == (ablation == "all_weights")
    train = {"projector": "projector", "all_weights": "all"}.get(ablation, "lora")
    assert load(tmp_path / "run/last.ckpt").captioner.hyperparameters["train"] == train


def test_zero_shot_is_a_row_of_a_report(trained: Path, base: Path, pixels: Path, tmp_path: Path) -> None:
    variables = ["--dataset", "blocks", "--vlm", str(base), "--folder", str(pixels), "--goals", "zeroshot"]
    command = [sys.executable, "-m", "diffcap", "zeroshot", *variables, "--", QUICK]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    evaluation = tmp_path / "runs/blocks/vlm-tiny-qwen/zeroshot-eval"
    metrics = json.loads((evaluation / "metrics.json").read_text())
    (entry,) = metrics["provenance"]["checkpoints"]
    assert entry["base"] == str(base) and entry["stage"] == "zero-shot"
    assert "pictures" in metrics["provenance"]["prompt"]
    assert "licence: not stated" in done.stdout
    assert "nothing to do" in run(command, tmp_path).stdout
    runs = json.dumps({"zero-shot": str(evaluation)})
    drawn = ["--pictures", "2", "--attention", "1", "--out", "report"]
    options = ["--folder", str(pixels), "--features", "blocks_pixels", *drawn]
    done = run([sys.executable, "-m", "diffcap", "report", *options, "--runs", runs], tmp_path)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "report/table.json").read_text())
    assert "seconds" not in table["rows"]["zero-shot"]
    named = {"base": str(base), "revision": None, "prompt": PROMPT}
    assert table["protocol"]["zero_shot"] == {"zero-shot": named}
    assert table["runs"]["zero-shot"][0].items() >= named.items()
    assert table["provenance"]["runs"]["zero-shot"][0].items() >= named.items()
    for file in ("report.html", "table.md"):
        text = html.unescape((tmp_path / "report" / file).read_text())
        assert f'zero-shot, without training: {base}, prompt "{PROMPT}".' in text and ZERO_SHOT_NOTE in text
    page = html.unescape((tmp_path / "report/report.html").read_text())
    assert f", without training: {base}, prompt" in page and "`diffcap caption --heatmap` draws the maps" in page


def test_the_page_offers_both_kinds(
    trained: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "runs/blocks/vlm/finetune")
    choices = find_choices([str(base)], tmp_path / "runs")
    assert choices[0].label == "VLM · without training · tiny-qwen"
    assert any("VLM · blocks" in choice.label for choice in choices[1:])
    assert capsys.readouterr().out == f"{base}, licence: not stated\n"
    captioners = Captioners(choices, "cpu")
    with captioners.use(0) as captioner:
        assert captioner(*EXAMPLES).text == load_captioner(str(base), "cpu")(*EXAMPLES).text


def test_pictures_of_any_size_are_captioned_without_training(base: Path, tmp_path: Path) -> None:
    from PIL import Image

    for name, size in (("a", (300, 90)), ("b", (200, 60)), ("c", (40, 1500)), ("d", (40, 1500)), ("strip", (900, 6))):
        Image.new("RGB", size, (len(name) * 80, size[0] % 255, 90)).save(tmp_path / f"{name}.png")
    captioner = load_captioner(str(base), "cpu", prompt="what is different?")
    pairs = [(tmp_path / "a.png", tmp_path / "b.png"), (tmp_path / "c.png", tmp_path / "d.png")]
    together = list(captioner.batch(pairs))
    for pair, caption in zip(pairs, together):
        assert not isinstance(caption, DiffcapError)
        alone = captioner(*pair)
        assert alone.text == caption.text and abs(alone.log_probability - caption.log_probability) < 1e-2
        rows, columns = captioner.attention(*pair, alone).before.shape[1:]
        assert (rows > columns) == (pair is pairs[1])
    strip = tmp_path / "strip.png"  # fails alone
    first, second = captioner.batch([(strip, strip), EXAMPLES], errors="return")
    assert isinstance(first, DiffcapError) and "ratio" in str(first) and not isinstance(second, DiffcapError)
    assert captioner.metadata["prompt"] == "what is different?" and "licence: not stated" in str(captioner.domain_note)


def test_a_model_of_the_hub_captions_and_is_known_by_its_commit(
    base: Path, trained: Path, pixels: Path, tmp_path: Path
) -> None:
    """Through a mock of the Hub; the second start has no network, and training records the commit."""
    hub = Hub()
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    commit = hub.commit("user/tiny", {**files, "README.md": b"---\nlicense: apache-2.0\n---\n", "old.bin": b"x"})
    online = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
    words = [sys.executable, "-m", "diffcap", "caption", *map(str, EXAMPLES), "--checkpoint", "user/tiny"]
    first = run(words, tmp_path, **online)
    assert first.returncode == 0, first.stderr
    assert f"user/tiny at commit {commit}, licence: apache-2.0" in first.stderr
    assert not any("old.bin" in line for line in hub.asked)
    push = [sys.executable, "-m", "diffcap", "push", str(trained / "best.ckpt"), "user/mine"]
    pushed = run(push, tmp_path, **online, HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")
    assert pushed.returncode == 0, pushed.stderr
    own = hub.repositories["user/mine"]
    assert str(base.parent) not in own["README.md"].decode() + own["config.json"].decode()
    adapters = own["model.safetensors"]
    assert len(adapters) < len(files["model.safetensors"])  # without the base model
    mine = run([*words[:-1], "user/mine", "--base", str(base)], tmp_path, **online)
    assert mine.returncode == 0, mine.stderr
    assert mine.stdout.startswith(load_captioner(trained / "best.ckpt", "cpu")(*EXAMPLES).text)
    hub.shutdown()
    hub.server_close()
    second = run(words, tmp_path, **online, HF_HUB_OFFLINE="1")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    local = run([*words[:-1], str(base)], tmp_path)
    assert local.stdout == first.stdout
    short = "--trainer.max_steps=1", "--trainer.val_check_interval=1", "--data.val_limit=1"
    command = finetune(Path("user/tiny"), pixels, tmp_path / "run", *short)
    done = run(command, tmp_path, **online, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    hyperparameters = read_checkpoint(tmp_path / "run/last.ckpt")["diffcap"]["hyperparameters"]
    assert (hyperparameters["base"], hyperparameters["revision"]) == ("user/tiny", commit)
    assert "already finished" in run(command, tmp_path, **online, HF_HUB_OFFLINE="1").stdout
    pinned = run([*words[:-1], f"user/tiny@{commit}"], tmp_path, **online, HF_HUB_OFFLINE="1")
    assert (pinned.returncode, pinned.stdout) == (0, first.stdout)
    unknown = run([*words[:-1], f"user/tiny@{'a' * 40}"], tmp_path, **online, HF_HUB_OFFLINE="1")
    assert one_sentence(unknown)


def test_the_card_names_the_base_model_and_how_to_give_it(trained: Path, base: Path) -> None:
    state = read_checkpoint(trained / "best.ckpt")
    arguments = state["diffcap"]["hyperparameters"]
    arguments["base"] = base.name
    local = model_card("user/mine", state, Scores(None, None, "-"), [], "mit", "apache-2.0")
    assert "base_model:" not in local
    assert "checkpoint user/mine --base FOLDER\n```" in local and 'load_captioner("user/mine", base="FOLDER")(' in local
    assert (
        f"* Base model: `tiny-qwen` (a local folder); licence: apache-2.0; diffcap checks its SHA-256, "
        f'{arguments["base_sha256"][:12]}...\n* Prompt: "{PROMPT}"\n* Dataset: `blocks`' in local
    )
    assert "* Vocabulary: all tokens of the base model." in local and "* Method: VLM, LoRA of rank 16.\n" in local
    assert "mit. The base model (apache-2.0) and the dataset" in local and "cite the paper" not in local
    assert "CLIP" not in local and "\n\n\n" not in local and "only the weights that were trained" in local
    state["diffcap"]["hyperparameters"] = {**arguments, "base": "user/tiny", "revision": "a" * 40, "train": "all"}
    remote = model_card("user/mine", state, Scores(None, None, "-"), [], "mit")
    assert "base_model: user/tiny" in remote and f"* Base model: `user/tiny`, commit {'a' * 40}; licence: see" in remote
    assert "--checkpoint user/mine\n```" in remote and "which diffcap downloads" in remote and "all weights" in remote


def test_what_does_not_fit_is_one_sentence(base: Path, trained: Path, pixels: Path, tmp_path: Path) -> None:
    both = " ".join(map(str, EXAMPLES))
    for words, message in (
        (f"zeroshot --dataset blocks --method scorer --folder {pixels}", "zeroshot is for METHOD=vlm"),
        (f"finetune --method dirl --vlm {base}", "VLM="),
        (f"finetune --method vlm --vlm {tmp_path / 'none'} --folder {pixels} --dataset blocks", "neither a local"),
        (f"caption {both} --checkpoint {trained / 'best.ckpt'} --prompt x", "trained with its own prompt"),
        (f"export {trained / 'best.ckpt'} --form merged --base {tmp_path}", "config.json"),
        (f"eval --checkpoint {base} --out {tmp_path / 'e'}", "give --folder and --features"),
        (f"eval --checkpoint {base} --out {tmp_path / 'e'} --folder {pixels} --features blocks", "no pixels"),
    ):
        assert message in one_sentence(run([sys.executable, "-m", "diffcap", *words.split()], tmp_path))
