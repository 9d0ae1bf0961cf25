"""CLIP's own weights into CLIP4IDC: by name, positions interpolated, word vectors picked out, FT1's decoder filled."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.models.test_clip4idc import CAPTIONER, NETWORK, captions, pixels

from diffcap.methods.clip4idc.model import CLIP4IDC, CLIP4IDCAdaptation
from diffcap.methods.clip4idc.weights import load_clip
from diffcap.models.clip import Clip, build_clip
from diffcap.text.vocabularies import ClipVocabulary
from diffcap.utils.errors import DiffcapError

WHOLE = 49408
# All of CLIP's tokens, so that those of a vocabulary can be picked out.
FULL: dict[str, Any] = {**NETWORK, "text_cfg": {**NETWORK["text_cfg"], "vocab_size": WHOLE}}


@pytest.fixture(scope="module")
def clip() -> Clip:
    torch.manual_seed(3)
    return build_clip(FULL).eval()


@pytest.fixture(scope="module")
def file(clip: Clip, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "clip.safetensors"
    safetensors.torch.save_file({name: value.contiguous() for name, value in clip.state_dict().items()}, path)
    return path


@torch.no_grad()
def test_the_towers_are_clips(clip: Clip, file: Path) -> None:
    model = CLIP4IDCAdaptation(FULL, max_length=14).eval()
    marks = model.images.before_mark.clone()
    load_clip(model, str(file), ClipVocabulary())
    assert torch.equal(model.images.before_mark, marks)  # what the pair adds stays as it was drawn
    tokens = torch.zeros(2, NETWORK["text_cfg"]["context_length"], dtype=torch.long)
    tokens[:, :5] = torch.tensor([WHOLE - 2, 320, 1000, 7, WHOLE - 1])
    torch.testing.assert_close(model.words(tokens), clip.encode_text(tokens))
    for name, value in clip.visual.state_dict().items():
        assert torch.equal(model.images.visual.state_dict()[name], value), name
    assert torch.equal(model.logit_scale, clip.logit_scale)


@torch.no_grad()
def test_word_vectors_of_a_cut_down_vocabulary(clip: Clip, file: Path) -> None:
    vocabulary = ClipVocabulary(["a</w>", "the</w>", "cube</w>"], "clip_used")
    model = CLIP4IDCAdaptation(FULL, vocabulary_size=len(vocabulary), max_length=14).eval()
    load_clip(model, str(file), vocabulary)
    ours = torch.tensor([vocabulary.encode("the cube", 10)])
    theirs = ClipVocabulary().encode("the cube", 10)
    padded = torch.zeros(1, NETWORK["text_cfg"]["context_length"], dtype=torch.long)
    padded[0, : len(theirs)] = torch.tensor(theirs)
    torch.testing.assert_close(model.words(ours), clip.encode_text(padded))


@torch.no_grad()
def test_another_image_size_interpolates_the_positions(clip: Clip, file: Path) -> None:
    model = CLIP4IDCAdaptation(FULL, (8, 24), max_length=14)
    load_clip(model, str(file), ClipVocabulary())
    found, source = model.images.visual.positional_embedding, clip.visual.positional_embedding
    assert found.shape == (1 + 2 * 6, 16) and torch.equal(found[0], source[0])
    grid = source[1:].T.reshape(1, 16, 4, 4)
    expected = torch.nn.functional.interpolate(grid, (2, 6), mode="bicubic", antialias=True, align_corners=False)
    torch.testing.assert_close(found[1:].T.reshape(1, 16, 2, 6), expected)


@torch.no_grad()
def test_ft1s_decoder_begins_as_clips_text_tower(clip: Clip, file: Path) -> None:
    options = {**CAPTIONER, "images": "apart", "decoder": "clip_text", "max_length": 10}
    model = CLIP4IDC(WHOLE, FULL, **options).eval()
    load_clip(model, str(file), ClipVocabulary())
    tokens = captions([5, 3], 9).clamp(max=22)
    hidden = model.decode(tokens, model.encode(pixels(2, (16, 16)), pixels(2, (16, 16), 1))).last_block.hidden
    x = clip.token_embedding(tokens) + clip.positional_embedding[:9]
    expected = clip.ln_final(clip.transformer(x, attn_mask=clip.attn_mask[:9, :9]))
    real = torch.arange(9) < torch.tensor([[7], [5]])
    torch.testing.assert_close(model.head_norm(hidden)[real], expected[real])


def test_what_does_not_fit_is_named(file: Path, tmp_path: Path) -> None:
    state = safetensors.torch.load_file(file)
    positions = state["visual.positional_embedding"]
    odd = {**state, "visual.positional_embedding": positions[:12].contiguous()}
    safetensors.torch.save_file(odd, tmp_path / "odd.safetensors")
    with pytest.raises(DiffcapError, match="11 patch positions are neither the network's grid nor a square"):
        load_clip(CLIP4IDCAdaptation(FULL, max_length=14), str(tmp_path / "odd.safetensors"), ClipVocabulary())
    del state["visual.proj"], state["ln_final.weight"]
    safetensors.torch.save_file(state, tmp_path / "part.safetensors")
    model = CLIP4IDCAdaptation(FULL, max_length=14)
    with pytest.raises(DiffcapError, match=r"2 of CLIP's parameters .*images\.visual\.proj") as error:
        load_clip(model, str(tmp_path / "part.safetensors"), ClipVocabulary())
    assert "\n" not in str(error.value) and "this network" in str(error.value)
    other = {**FULL, "vision_cfg": {**FULL["vision_cfg"], "width": 24}}
    with pytest.raises(DiffcapError, match=r"images\.visual\.\S+ \(16,\) for \(24,\)"):
        load_clip(CLIP4IDCAdaptation(other, max_length=14), str(file), ClipVocabulary())
    with pytest.raises(DiffcapError, match="the network has no name; give a file, or random"):
        load_clip(model, "default", ClipVocabulary())


def test_what_begins_with_the_difference_is_not_clips(clip: Clip, file: Path) -> None:
    for init in ("clip", "difference"):
        model = CLIP4IDCAdaptation(FULL, intra_layers=2, max_length=14, pair_init=init)  # type: ignore[arg-type]
        with torch.no_grad():
            for part in model.images.visual.transformer.resblocks[2].attn.parameters():
                part.add_(0.125)  # biases that are not nothing
        drawn = {name: value.clone() for name, value in model.images.visual.state_dict().items()}
        load_clip(model, str(file), ClipVocabulary())
        kept = {name for name, value in model.images.visual.state_dict().items() if torch.equal(value, drawn[name])}
        names = dict(clip.visual.transformer.resblocks[2].attn.named_parameters())
        attention = {f"transformer.resblocks.2.attn.{name}" for name in names}
        assert len(attention) == 4 and kept & attention == (attention if init == "difference" else set())
