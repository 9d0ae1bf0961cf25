"""PairCaptioner: captions of two images, their probabilities and attention maps."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.toy_checkpoints import write_checkpoint
from torch import nn

import diffcap.pair_captioner
from diffcap import load_captioner
from diffcap.checkpoints.loading import load
from diffcap.features.backbones import build_backbone, rebuild_backbone
from diffcap.methods.clip4idc.model import CLIP4IDC
from diffcap.methods.pcl.model import PCL
from diffcap.methods.scorer.model import SCORER
from diffcap.pair_captioner import Caption, PairCaptioner
from diffcap.text.vocabularies import build_clip_vocabulary
from diffcap.utils.errors import DiffcapError

PAGE = Path(__file__).parents[1] / "docs/caption.md"
WORDS = ["a", "cube", "gone", "is", "red", "the", "was"]
PIXELS = (32, 48)


def meta(library: Any = "blocks", shape: tuple[int, int, int] = (107, 4, 6), **options: Any) -> dict[str, Any]:
    described = json.loads(json.dumps(build_backbone(library, **options).describe()))
    return {**described, "name": library, "shape": list(shape), "dtype": described.get("dtype", "float16")}


def lively(model: nn.Module) -> nn.Module:
    """Weights that make different words of different pictures."""
    torch.manual_seed(3)
    for part in model.parameters():
        if part.ndim > 1:
            nn.init.normal_(part, std=2.0 / math.sqrt(part.shape[1]))
    for layer, few in (("trunk.output_layer", 6), ("decoder.logit", 4)):  # specials are said seldom, the end sometimes
        if layer in dict(model.named_modules()):
            with torch.no_grad():
                bias = model.get_parameter(f"{layer}.bias")
                bias[:few] = -20.0
                bias[model.eos_id] = -8.0  # type: ignore[index]
    return model.eval()


SENTENCES = "the red cube vanished", "a rhombicuboctahedron moved"


def make(path: Path, method: str, sentences: Sequence[str] = SENTENCES) -> Path:
    torch.manual_seed(0)
    meta_values: dict[str, Any] = {"method": method}
    if method == "clip4idc":
        vocabulary = build_clip_vocabulary(sentences, "clip_used")
        network = {
            "embed_dim": 16,
            "quick_gelu": True,
            "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "head_width": 16, "layers": 2},
            "text_cfg": {"context_length": 12, "vocab_size": len(vocabulary), "width": 16, "heads": 2, "layers": 2},
        }
        sizes: dict[str, Any] = {"width": 16, "heads": 2, "ffn": 16, "encoder_layers": 1, "decoder_layers": 1}
        model: Any = CLIP4IDC(len(vocabulary), network, PIXELS, intra_layers=1, max_length=12, **sizes)
        meta_values |= {"features": meta("pixels", (3, *PIXELS), image_size=PIXELS), "vocabulary_layout": "clip_used"}
        return write_checkpoint(path, lively(model), "finetune", words=vocabulary.words, **meta_values)
    meta_values["features"] = meta()
    if method == "pcl":
        model = PCL(6 + len(WORDS), 107, width=16, heads=2, ffn=16, cross_layers=2)
        return write_checkpoint(path, lively(model), "finetune", words=WORDS, **meta_values)
    model = SCORER(4 + len(WORDS), 107, (4, 6), 12, width=16, heads=2, word_width=8)
    return write_checkpoint(path, lively(model), "finetune", words=WORDS, vocabulary_layout="rcc", **meta_values)


@pytest.fixture(scope="module", params=["scorer", "pcl", "clip4idc"])
def captioner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairCaptioner:
    return load_captioner(make(tmp_path_factory.mktemp("trained") / "best.ckpt", request.param), device="cpu")


def noise(seed: int, size: tuple[int, int] = (128, 96)) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    return Image.fromarray(values).resize(size)


def test_the_sentence_is_as_likely_as_its_words(captioner: PairCaptioner) -> None:
    caption = captioner(noise(1), noise(2))
    assert caption.text == " ".join(word.text for word in caption.words) and caption.words
    total = sum(word.log_probability for word in caption.words)
    assert all(word.log_probability <= 0 for word in caption.words)
    assert caption.log_probability <= total + 1e-6  # the end's is in it, too
    if caption.tokens[-1] == captioner._captioner.eos_id and len(caption.tokens) < captioner.max_length:
        assert caption.log_probability < total
    judged = captioner.metadata["method"] == "pcl"
    assert (caption.nothing_changed is not None) == judged
    assert not judged or 0 < float(caption.nothing_changed or 0) < 1
    assert set(caption.as_dict()) == {
        "text", "log_probability", "words", "nothing_changed", "alternatives", "notes", "box", "fit"
    }  # fmt: skip
    json.dumps(caption.as_dict())


def test_log_probabilities_are_those_of_one_naive_pass(captioner: PairCaptioner) -> None:
    """Of a caption and of a given sentence, recomputed without a cache: each word from a run over all before it."""
    before, after = noise(1), noise(2)
    (caption,) = captioner.batch([(before, after)], sentences=("the red cube", "a zebra"))
    assert isinstance(caption, Caption)
    model = captioner._captioner
    memory = model.encode(*captioner._compute_features([captioner._preprocess(before, after)]))

    @torch.no_grad()
    def naive(tokens: Sequence[int]) -> float:
        total = 0.0
        for place in range(1, min(len(tokens), captioner.max_length)):
            cache: Any = None
            for token in tokens[:place]:
                logits, cache = model.step(torch.tensor([token]), memory, cache)
            total += float(logits.log_softmax(-1)[0, tokens[place]])
        return total

    assert caption.log_probability == pytest.approx(naive(caption.tokens), abs=1e-4)
    expected = naive(captioner.vocabulary.encode("the red cube", captioner.max_length))
    assert caption.scored[0] == pytest.approx(expected, abs=1e-4)
    assert captioner.vocabulary.unk is None or caption.scored[1] == -math.inf  # CLIP's has all words


def test_batches_say_what_pairs_alone_say(captioner: PairCaptioner) -> None:
    pairs = [(noise(2 * n, (100 + n, 80)), noise(2 * n + 1)) for n in range(5)]
    together = list(captioner.batch(pairs, batch_size=3))
    for pair, caption in zip(pairs, together):
        alone = captioner(*pair)
        assert isinstance(caption, Caption) and caption.tokens == alone.tokens
        assert caption.log_probability == pytest.approx(alone.log_probability, abs=1e-3)
    assert len({caption.text for caption in together if isinstance(caption, Caption)}) > 1


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("ab", "str of length 2"),
        ((np.zeros((9, 9, 3)),) * 3, "tuple of length 3"),
        ({"before": "a.png", "after": "b.png"}, "dict of length 2"),
        (None, "NoneType"),
    ],
)
def test_an_element_that_is_no_pair_is_named(wrong: Any, found: str) -> None:
    image, captioner = Image.new("RGB", (8, 8)), load_captioner(device="cpu")
    with pytest.raises(ValueError, match=rf"^pairs\[1\] must be a pair \(before, after\) of images, found {found}$"):
        list(captioner.batch([(image, image), wrong], errors="return"))


def test_beams_are_ranked_and_the_first_is_no_worse_than_greedy(captioner: PairCaptioner) -> None:
    wide, narrow = captioner(noise(5), noise(6), beams=4), captioner(noise(5), noise(6))
    scores = [wide.log_probability, *(other.log_probability for other in wide.alternatives)]
    assert wide.alternatives and scores == sorted(scores, reverse=True)
    assert len({wide.text, *(other.text for other in wide.alternatives)}) == len(scores)
    assert wide.log_probability >= narrow.log_probability - 1e-4
    with pytest.raises(DiffcapError, match=r"^beams is 0; give 1 to 100\.$"):
        captioner(noise(5), noise(6), beams=0)


def test_the_greedy_caption_that_beam_search_misses_is_offered() -> None:
    x, y = np.meshgrid(np.linspace(0, 200, 640), np.linspace(60, 180, 480))
    before = np.stack([x, y, x], 2) + np.random.default_rng(0).normal(0, 4, (480, 640, 1))
    after = before.copy()
    after[160:240, 213:320] = (220, 30, 30)
    pair = [image.clip(0, 255).astype(np.uint8) for image in (before, after)]
    captioner = load_captioner(device="cpu")
    greedy = captioner(*pair)
    for beams, penalty in ((3, 0.0), (3, -1.0), (5, 0.0)):
        found = captioner(*pair, beams, penalty)
        hypotheses = [(one.log_probability, one.text) for one in (found, *found.alternatives)]
        assert (pytest.approx(greedy.log_probability, abs=1e-4), greedy.text) in hypotheses
        scores = [score / (1 + len(text.split())) ** penalty for score, text in hypotheses]
        assert scores == sorted(scores, reverse=True)


def test_every_word_has_a_look(captioner: PairCaptioner) -> None:
    caption = captioner(noise(1), noise(2))
    maps = captioner.attention(noise(1), noise(2), caption)
    assert maps.words == [word.text for word in caption.words]
    assert maps.before.shape == maps.after.shape and len(maps.before) == len(maps.words)
    np.testing.assert_allclose(maps.before.sum((1, 2)) + maps.after.sum((1, 2)), 2, atol=1e-4)
    assert (maps.alignment is not None) == (captioner.metadata["method"] == "scorer")


def test_any_kind_of_source_gives_the_same(captioner: PairCaptioner, tmp_path: Path) -> None:
    noise(1).save(tmp_path / "a.png")
    noise(2).save(tmp_path / "b.png")
    expected = captioner(noise(1), noise(2)).tokens
    assert captioner(str(tmp_path / "a.png"), tmp_path / "b.png").tokens == expected
    assert captioner((tmp_path / "a.png").read_bytes(), np.asarray(noise(2))).tokens == expected
    with pytest.raises(DiffcapError, match="the image after: a text file"):
        captioner(noise(1), b"hello")
    pairs = [(tmp_path / "a.png", tmp_path / "b.png"), (tmp_path / "none.png", tmp_path / "b.png")]
    first, second = captioner.batch(pairs, errors="return")
    assert isinstance(first, Caption) and isinstance(second, DiffcapError)
    with pytest.raises(DiffcapError, match=r"none\.png: file not found"):
        list(captioner.batch(pairs))


def test_an_exported_folder_says_the_same(tmp_path: Path) -> None:
    from diffcap.checkpoints.reading import read_checkpoint, write_folder

    path = make(tmp_path / "best.ckpt", "scorer")
    write_folder(tmp_path / "exported", read_checkpoint(path))
    one, two = load_captioner(path)(noise(1), noise(2)), load_captioner(tmp_path / "exported")(noise(1), noise(2))
    assert one == two
    assert load(tmp_path / "exported" / "model.safetensors").metadata == load(path).metadata
    (tmp_path / "exported" / "model.safetensors").write_bytes(b"x" * 50)
    with pytest.raises(DiffcapError, match=r"model\.safetensors: its SHA-256 is not the safetensors_sha256 in config"):
        load_captioner(tmp_path / "exported")
    (tmp_path / "exported" / "model.safetensors").unlink()
    with pytest.raises(DiffcapError, match=r"model\.safetensors is missing"):
        load_captioner(tmp_path / "exported")


def test_features_of_other_weights_are_refused() -> None:
    with pytest.raises(DiffcapError, match=r"features of blocks with other weights.*--backbone-weights FILE"):
        rebuild_backbone({**meta(), "weights_sha256": "0" * 64})
    assert rebuild_backbone({**meta(), "weights_sha256": None})  # imported: nobody knows
    for library in ("authors", "unknown", None):
        with pytest.raises(DiffcapError, match=f"were computed by {library!r}, not by a backbone of diffcap"):
            rebuild_backbone({"name": "toy", "shape": [5, 2, 3], "library": library})


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the module's docstring and of docs/caption.md; tests/web/test_page.py runs the one that needs a server."""
    page = PAGE.read_text(encoding="utf-8").partition("### From a script")[0]
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    blocks += re.findall(r"```\n(.*?)```", diffcap.pair_captioner.__doc__ or "", re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    noise(1).save("before.png")
    noise(2).save("after.png")
    for name in ("before.jpg", "after.jpg"):
        noise(3).save(name)
    Path("runs/desk/scorer/finetune").mkdir(parents=True)
    make(Path("runs/desk/scorer/finetune/best.ckpt"), "scorer")
    for block in blocks:
        exec(block, {"load_captioner": load_captioner})
        assert capsys.readouterr().out


def reweighted(checkpoint: Path, path: Path, **meta_values: Any) -> Path:
    """Another checkpoint of the same model: every weight moved a little."""
    torch.manual_seed(8)
    state = torch.load(checkpoint, weights_only=True)
    for value in state["state_dict"].values():
        if value.ndim > 1:
            value += 0.3 * value.std() * torch.randn_like(value)
    state["diffcap"] |= meta_values
    torch.save(state, path)
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    one = make(tmp_path_factory.mktemp("members") / "one.ckpt", "scorer")
    return one, reweighted(one, one.with_name("other.ckpt"))


def test_several_caption_by_the_mean_of_their_probabilities(two: tuple[Path, Path]) -> None:
    before, after = noise(1), noise(2)
    alone = [load_captioner(path, device="cpu") for path in two]
    both = load_captioner(two, device="cpu")
    assert both.metadata["ensemble"] == ["scorer", "scorer"] and len(both._backbones) == 1
    caption, chances = both(before, after), []
    for member in alone:
        memory = member._captioner.encode(*member._compute_features([member._preprocess(before, after)]))
        logits = member._captioner.teacher_forced_logits(torch.tensor([caption.tokens]), memory)[0]
        chances.append(logits.softmax(-1).gather(1, torch.tensor(caption.tokens)[1:, None]))
    expected = ((chances[0] + chances[1]) / 2).log().sum().item()
    assert caption.log_probability == pytest.approx(expected, abs=1e-4)
    mean, first, second = (captioner.attention(before, after, caption) for captioner in (both, *alone))
    assert np.abs(first.before - second.before).max() > 1e-3
    np.testing.assert_allclose(mean.before, (first.before + second.before) / 2, atol=1e-6)
    np.testing.assert_allclose(mean.alignment, (first.alignment + second.alignment) / 2, atol=1e-6)


def make_coarse(path: Path) -> Path:
    """The checkpoint of a SCORER with the words of `make`'s and a grid of its own."""
    torch.manual_seed(1)
    coarse = SCORER(4 + len(WORDS), 107, (2, 3), 9, width=16, heads=2, word_width=8)
    meta_values: dict[str, Any] = {"features": meta(shape=(107, 2, 3), pool_size=(2, 3)), "max_length": 9}
    meta_values |= {"method": "scorer", "vocabulary_layout": "rcc"}
    return write_checkpoint(path, lively(coarse), "finetune", WORDS, **meta_values)


def test_members_may_read_different_features(two: tuple[Path, Path], tmp_path: Path) -> None:
    both = load_captioner([two[0], make_coarse(tmp_path / "coarse.ckpt")], device="cpu")
    assert len(both._backbones) == 2 and both.max_length == 9
    pairs = [(noise(1), noise(2)), (noise(3), noise(4))]
    found = list(both.batch(pairs))
    assert [caption.text for caption in found] == [both(*pair).text for pair in pairs]
    with pytest.raises(DiffcapError, match="no attention maps: the attention maps of the members have"):
        both.attention(*pairs[0], found[0])


def test_members_of_different_words_and_an_empty_list_are_refused(two: tuple[Path, Path], tmp_path: Path) -> None:
    other = reweighted(two[0], tmp_path / "other.ckpt", words=[*WORDS[:-1], "were"])
    with pytest.raises(DiffcapError, match="word 7 is 'were', not 'was'"):
        load_captioner([two[0], other])
    with pytest.raises(DiffcapError, match="the list of checkpoints is empty"):
        load_captioner([])


def test_a_device_of_apple_is_accepted_where_torch_has_it(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: torch.device("mps"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setattr(nn.Module, "to", lambda self, device: self)  # the weights stay here
    assert load_captioner(two[0], device="mps").device == torch.device("mps")
    with pytest.raises(DiffcapError, match="this machine has no such device; choose one of auto, cpu, mps, mps:0"):
        load_captioner(two[0], device="cuda")
