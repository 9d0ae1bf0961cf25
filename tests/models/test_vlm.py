"""Vision-language models as captioners, against the `generate` of transformers, on tiny random models of every family."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file
from tests.tiny_vlms import CAPTIONS, FAMILIES, build

from diffcap.methods.vlm.model import KEPT_IN_DTYPE, VLM, _check_loaded
from diffcap.models.captioner import Captioner
from diffcap.models.generation import beam_search, greedy, token_log_probabilities
from diffcap.text.hub import HubVocabulary, clean_answer, import_transformers
from diffcap.utils.errors import DiffcapError

Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    place = tmp_path_factory.mktemp("vlms")
    return lambda family: str(place / family if (place / family).is_dir() else build(family, place / family))


def talkative(vlm: VLM) -> VLM:
    """Random models repeat their last word; larger weights and an output layer of its own make them say different ones."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in vlm.core.parameters():
            if parameter.ndim > 1:
                parameter.mul_(1.5)
        head = vlm.core.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight) * 0.4, requires_grad=False)
        vlm.core.get_input_embeddings().weight.normal_(std=0.1)
    return vlm.eval()


def pairs(count: int, height: int = 64, width: int = 96, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    before, after = torch.randint(0, 256, (2, count, 3, height, width), dtype=torch.uint8, generator=generator)
    return before, after


def ends(vlm: VLM) -> list[int]:
    return [vlm.eos_id, *([] if vlm.extra_eos_id is None else [vlm.extra_eos_id])]


def generated(vlm: VLM, before: Any, after: Any, length: int, **options: Any) -> list[list[int]]:
    """The words that transformers generates itself."""
    inputs = vlm.prepare_inputs(before, after)
    vlm._forget_positions()
    found = vlm.core.generate(
        **inputs, max_new_tokens=length - 1, do_sample=False, eos_token_id=ends(vlm), pad_token_id=vlm.eos_id, **options
    )
    vlm._forget_positions()
    return found[:, inputs["input_ids"].shape[1] :].tolist()


def without_end(vlm: VLM) -> Captioner:
    """The same captioner, which never ends a caption."""
    step, stop = vlm.step, torch.tensor(ends(vlm))

    def endless(*args: Any) -> tuple[Tensor, Any]:
        logits, cache = step(*args)
        return logits.index_fill(-1, stop, float("-inf")), cache

    vlm.step = endless  # type: ignore[method-assign]
    return vlm


def padded(vocabulary: HubVocabulary, captions: list[str], length: int = 24) -> Tensor:
    rows = [torch.tensor(vocabulary.encode(caption, length)) for caption in captions]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=vocabulary.pad)


def captioned(vlm: VLM, count: int) -> dict[str, Tensor]:
    """A batch of pairs with captions."""
    before, after = pairs(count, 56, 84)
    return {"before": before, "after": after, "tokens": padded(vlm.vocabulary, CAPTIONS[:count])}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_equals_that_of_transformers(family: str, folder: Folder) -> None:
    vlm = talkative(VLM(folder(family), train="nothing"))
    before, after = pairs(4)
    memory = vlm.encode(before, after)
    tokens = greedy(vlm, memory, 12)
    expected = generated(vlm, before, after, 12)
    assert tokens[:, 1:].tolist() == [row[: tokens.shape[1] - 1] for row in expected]
    assert len(set(tokens.flatten().tolist())) > 4  # the models say different words
    cache, steps = None, []
    for position in range(tokens.shape[1] - 1):
        logits, cache = vlm.step(tokens[:, position], memory, cache)
        steps.append(logits)
    assert torch.allclose(torch.stack(steps, 1), vlm.teacher_forced_logits(tokens, memory), atol=1e-4)
    scores = token_log_probabilities(vlm, memory, tokens)
    batch = {"before": before, "after": after, "tokens": tokens}
    assert torch.allclose(vlm.loss(batch)["loss"], -scores.sum() / vlm.caption_mask(tokens).sum(), atol=1e-4)
    assert torch.allclose(vlm.validation_losses(batch)["caption_loss"].sum(), -scores.sum(), atol=1e-3)
    maps = vlm.attention(before, after, tokens[:, :-1])
    assert torch.allclose(maps.before.sum((2, 3)) + maps.after.sum((2, 3)), torch.tensor(2.0), atol=1e-5)
    assert vlm.core.config._attn_implementation == "sdpa"
    beams = beam_search(without_end(vlm), memory, 8, 3)[:, 0, 1:]
    options = {"num_beams": 3, "length_penalty": 0.0, "suppress_tokens": ends(vlm)}
    assert beams.tolist() == generated(vlm, before, after, 8, **options)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_pair_among_pairs_of_other_sizes_gets_the_caption_that_it_gets_alone(family: str, folder: Folder) -> None:
    vlm = talkative(VLM(folder(family), train="nothing"))
    sizes = (((64, 96), (64, 96)), ((96, 64), (64, 96)), ((112, 112), (64, 64)))
    generator = torch.Generator().manual_seed(2)
    before, after = (
        [torch.randint(0, 256, (3, *size[side]), dtype=torch.uint8, generator=generator) for size in sizes]
        for side in (0, 1)
    )
    together = greedy(vlm, vlm.encode(before, after), 10)
    for number in range(len(sizes)):
        alone = greedy(vlm, vlm.encode(before[number : number + 1], after[number : number + 1]), 10)[0]
        assert together[number, : len(alone)].tolist() == alone.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_ids_around_an_answer(family: str, folder: Folder) -> None:
    vlm = VLM(folder(family), train="nothing")
    vocabulary = vlm.vocabulary
    ids = vocabulary.encode("the red cube is gone", 24)
    assert int(vlm.prepare_inputs(*pairs(1))["input_ids"][0, -1]) == vlm.bos_id == ids[0] and ids[-1] == vlm.eos_id
    assert vocabulary.decode(torch.tensor([*ids, vocabulary.pad])) == "the red cube is gone"
    assert vocabulary.encode("the red cube is gone", 4) == [*ids[:3], vlm.eos_id]
    user = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "what"}]}]
    answer = [{"role": "assistant", "content": [{"type": "text", "text": "the red cube is gone"}]}]
    dialogue = vlm.processor.apply_chat_template(user + answer, tokenize=False)
    trained = vlm.processor.tokenizer(dialogue, add_special_tokens=False)["input_ids"]
    assert any(trained[start : start + len(ids)] == ids for start in range(len(trained)))


def test_gradients_with_a_cache_equal_those_of_the_loss(folder: Folder) -> None:
    """Self-critical training differentiates `teacher_forced_logits`; also while activations are checkpointed."""
    found = []
    assert VLM(folder("qwen2_5_vl")).core.training  # in evaluation mode, nothing is checkpointed
    for use_cache, checkpointing in ((False, False), (True, False), (True, True), (False, True)):
        torch.manual_seed(0)
        vlm = VLM(folder("qwen2_5_vl"), lora_dropout=0.0, checkpointing=checkpointing).train()
        torch.manual_seed(1)
        for name, parameter in vlm.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        batch = captioned(vlm, 3)
        tokens = batch["tokens"]
        if use_cache:
            logits = vlm.teacher_forced_logits(tokens, vlm.encode(batch["before"], batch["after"]))
            said = vlm.caption_mask(tokens)
            loss = torch.nn.functional.cross_entropy(logits[said], tokens[:, 1:][said])
        else:
            loss = vlm.loss(batch)["loss"]
        loss.backward()
        gradients = [parameter.grad.flatten() for parameter in vlm.parameters() if parameter.requires_grad]
        found.append((loss.detach(), torch.cat(gradients)))
    for loss, gradient in found[1:]:
        assert torch.allclose(loss, found[0][0], atol=1e-5)
        assert torch.allclose(gradient, found[0][1], atol=1e-5)


def test_checkpointing_does_not_keep_the_activations_of_a_frozen_tower(folder: Folder) -> None:
    vlm = VLM(folder("qwen2_5_vl"), checkpointing=True).train()
    seen: list[bool] = []
    vlm.core.model.visual.register_forward_hook(lambda _, inputs, out: seen.append(out.pooler_output.requires_grad))
    vlm.loss(captioned(vlm, 2))
    assert seen == [False]


def test_adapters_are_trained_in_float32_beside_bfloat16(folder: Folder) -> None:
    vlm = VLM(folder("qwen2_5_vl"), dtype="bfloat16", lora_dropout=0.0)
    exact = VLM(folder("qwen2_5_vl"), lora_dropout=0.0)
    exact.load_state_dict(vlm.state_dict())
    batch = captioned(vlm, 3)
    assert {parameter.dtype for parameter in vlm.parameters() if parameter.requires_grad} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        loss = vlm.loss(batch)["loss"]
    loss.backward()
    assert all(value.grad.isfinite().all() for value in vlm.parameters() if value.requires_grad)
    assert torch.allclose(loss, exact.loss(batch)["loss"], atol=0.05)
    assert greedy(vlm.eval(), vlm.encode(batch["before"], batch["after"]), 6).shape == (3, 6)  # without autocast


def test_four_bits_of_the_base_are_not_in_the_state_dict(folder: Folder) -> None:
    pytest.importorskip("bitsandbytes")
    vlm = VLM(folder("qwen2_5_vl"), four_bit=True, checkpointing=True, lora_dropout=0.0)
    small = {name for name, part in vlm.core.named_modules() if type(part).__name__ == "Linear4bit"}
    assert small and not any("visual" in name or "lm_head" in name for name in small)
    batch = captioned(vlm, 3)
    vlm.loss(batch)["loss"].backward()
    assert all(value.grad is not None for value in vlm.parameters() if value.requires_grad)
    state = vlm.state_dict()
    assert state and all("lora_" in name for name in state)
    again = VLM(**vlm.hyperparameters)
    again.load_state_dict(state)
    assert torch.allclose(again.loss(batch)["loss"], vlm.loss(batch)["loss"])


@pytest.mark.parametrize("family", FAMILIES)
def test_four_bits_are_for_the_layers_of_the_language_model(family: str, folder: Folder) -> None:
    """The image tower, the projector and the output layer keep their type."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    net = VLM(folder(family), train="nothing").core
    layers = [name for name, part in net.named_modules() if isinstance(part, torch.nn.Linear)]
    converted = {name for name in layers if should_convert_module(name, KEPT_IN_DTYPE)}
    language = {name for name in layers if re.search(r"\.(language_model|text_model)\.layers\.", name)}
    assert converted == language != set()


@torch.no_grad()
def test_a_state_dict_has_only_what_is_trained_and_is_loaded_strictly(folder: Folder) -> None:
    torch.manual_seed(0)
    vlm = VLM(folder("qwen2_5_vl")).eval()
    for name, parameter in vlm.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1)
    batch = captioned(vlm, 2)
    state = vlm.state_dict()
    assert state and all("lora_" in name for name in state)

    def logits(model: VLM) -> Tensor:
        return model.teacher_forced_logits(batch["tokens"], model.encode(batch["before"], batch["after"]))

    again = VLM(**vlm.hyperparameters).eval()
    assert not torch.allclose(logits(again), logits(vlm))
    holder = torch.nn.Module()
    holder.captioner = again  # as in Lightning's module
    holder.load_state_dict({f"captioner.{name}": value for name, value in state.items()})
    assert torch.allclose(logits(again), logits(vlm), atol=1e-6)
    with pytest.raises(RuntimeError, match="Missing key"):
        holder.load_state_dict({f"captioner.{name}": value for name, value in list(state.items())[1:]})
    everything = VLM(folder("qwen2_5_vl"), train="all")
    assert len(everything.state_dict()) > 50 and not [name for name in everything.state_dict() if "lora" in name]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_the_difference_module_begins_as_the_base_and_is_trained(family: str, folder: Folder) -> None:
    torch.manual_seed(0)
    plain, changed = (VLM(folder(family), train="nothing", difference=flag) for flag in (False, True))
    batch = captioned(plain, 4)
    loss = changed.loss(batch)["loss"]
    assert torch.equal(loss, plain.loss(batch)["loss"])
    loss.backward()
    assert changed.difference is not None and float(changed.difference.mix[2].weight.grad.abs().sum()) > 0  # type: ignore
    assert set(changed.state_dict()) == {f"difference.{name}" for name in changed.difference.state_dict()}
    before, after = torch.randn(5, 64), torch.randn(5, 64)
    with torch.no_grad():
        changed.difference.mix[2].weight.normal_()
        first, _, second = changed.difference.mix
        hidden = torch.nn.functional.gelu(first(torch.cat([after, after - before], 1)))
        expected = after + hidden @ second.weight.T
        assert torch.allclose(changed.difference(before, after), expected)
        assert not torch.allclose(changed.loss(batch)["loss"], plain.loss(batch)["loss"])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_difference_module_compares_the_images_of_each_pair(family: str, folder: Folder) -> None:
    """A pair's losses are those that it has alone, and they depend on its own before image."""
    torch.manual_seed(0)
    vlm = VLM(folder(family), train="nothing", difference=True).eval()
    assert vlm.difference is not None
    vlm.difference.mix[2].weight.normal_()  # type: ignore[operator, union-attr]
    before, after = pairs(3)
    tokens = padded(vlm.vocabulary, ["the red cube is gone"] * 3)
    together = vlm.validation_losses({"before": before, "after": after, "tokens": tokens})["caption_loss"].chunk(3)
    for number in range(3):
        row = slice(number, number + 1)
        alone = vlm.validation_losses({"before": before[row], "after": after[row], "tokens": tokens[row]})
        assert torch.allclose(alone["caption_loss"], together[number], atol=1e-3)
    if family == "llava_onevision":  # its `get_image_features` has more arguments
        return
    inputs = vlm.prepare_inputs(before[:1], after[:1])
    images = {name: value for name, value in inputs.items() if "pixel" in name or "grid" in name}
    changed = list(vlm.core.model.get_image_features(**images).pooler_output)
    vlm.difference.mix[2].weight.zero_()  # type: ignore[operator, union-attr]
    plain = list(vlm.core.model.get_image_features(**images).pooler_output)
    assert torch.equal(changed[0], plain[0]) and not torch.allclose(changed[1], plain[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_projector_runs_with_and_without_autocast(family: str, folder: Folder) -> None:
    vlm = VLM(folder(family), train="projector", dtype="bfloat16")
    batch = captioned(vlm, 2)
    with torch.autocast("cpu", torch.bfloat16):
        vlm.loss(batch)["loss"].backward()
    trained = [parameter for parameter in vlm.parameters() if parameter.requires_grad]
    assert trained and all(parameter.dtype == torch.float32 and parameter.grad is not None for parameter in trained)
    assert greedy(vlm.eval(), vlm.encode(batch["before"], batch["after"]), 5).shape == (2, 5)


def test_every_id_that_ends_an_answer_ends_a_caption(tmp_path: Path) -> None:
    base = build("smolvlm", tmp_path / "several")
    settings = json.loads((base / "generation_config.json").read_text())
    eos = VLM(str(base), train="nothing").eos_id
    (base / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [eos, 7, 30]}))
    vlm = VLM(str(base), train="nothing")
    assert vlm.is_eos(torch.tensor([[eos, 7, 30, 8]])).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("smolvlm", {"train": "nothing", "image_kwargs": {"size": "large"}}, "image_kwargs: .* is not valid"),
        ("smolvlm", {"lora_rank": 0}, "lora_rank is 0"),
        ("idefics3", {"difference": True, "image_kwargs": {"do_image_splitting": True}}, "cuts tiles"),
        ("smolvlm", {"train": "all", "dtype": "bfloat16"}, "needs dtype: float32"),
        ("smolvlm", {"prompt": "What is <image> new?"}, "^the prompt has '<image>', which is a special token of the"),
        ("smolvlm", {"base_sha256": "0" * 64}, "not the base model that this captioner was trained on"),
        *(
            (family, {"image_kwargs": options}, r"^model\.captioner\.init_args\.image_kwargs: .*" + sentence)
            for family, options, sentence in (
                (
                    "idefics3",
                    {"size": {"longest_edge": 401408}},
                    r"size\.longest_edge is 401408, and its limit is 4,096",
                ),
                ("qwen2_5_vl", {"size": {"shortest_edge": 3136, "longest_edge": 10**9}}, "its limit is 16,777,216"),
                ("qwen2_5_vl", {"max_pixels": 10**12}, "max_pixels is 1000000000000, and its limit"),
                (
                    "internvl",
                    {"crop_to_patches": True, "max_patches": 4000},
                    "max_patches is 4000, and its limit is 64",
                ),
                ("smolvlm", {"max_pixels": 401408}, "no option 'max_pixels'; it has .*do_image_splitting"),
                ("smolvlm", {"max_image_size": {"longest_edge": -(10**7)}}, "is -10000000, and its limit"),
            )
        ),
    ],
)
def test_odd_options_are_one_sentence(family: str, options: dict[str, Any], sentence: str, folder: Folder) -> None:
    with pytest.raises(DiffcapError, match=sentence) as error:
        VLM(folder(family), **options)
    assert "\n" not in str(error.value)


def test_missing_packages_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user without the extra sees."""
    found, missing = importlib.util.find_spec, ("peft", "num2words")
    monkeypatch.setattr("diffcap.text.hub.find_spec", lambda name: None if name in missing else found(name))
    advice = r"install the packages with `pip install 'diffcap\[vlm\]'`\.$"
    with pytest.raises(DiffcapError, match=r"^vision-language models need peft, num2words; " + advice):
        import_transformers()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_without_all_its_weights_is_refused(family: str, folder: Folder, tmp_path: Path) -> None:
    """transformers would give random values to the weights that it does not find."""
    base = shutil.copytree(folder(family), tmp_path / family)
    weights = load_file(base / "model.safetensors")
    lost = next(name for name in weights if "k_proj.weight" in name or "qkv.weight" in name)
    for changed, count in (
        ({name: value for name, value in weights.items() if name != lost}, "1 of "),
        ({f"other.{name}": value for name, value in weights.items()}, ""),
        ({**weights, lost: weights[lost][:-1].clone()}, ""),
    ):
        save_file(changed, base / "model.safetensors", {"format": "pt"})
        sentence = rf"{family}: (its model cannot be loaded \(.*|{count}.* weights are not in its files \(first: .*\), so .*); download"
        with pytest.raises(DiffcapError, match=sentence) as error:
            VLM(str(base), train="nothing")
        assert "\n" not in str(error.value)


def test_a_tied_weight_needs_one_of_its_names() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight  # type: ignore[union-attr, assignment]
    _check_loaded("base", model, {"missing_keys": {"b.weight"}})
    with pytest.raises(DiffcapError, match="base: 2 of 2 weights are not in its files"):
        _check_loaded("base", model, {"missing_keys": {"a.weight", "b.weight"}})


def test_tiles_have_no_attention_maps(folder: Folder) -> None:
    vlm = VLM(folder("idefics3"), train="nothing", image_kwargs={"do_image_splitting": True})
    before, after = pairs(1)
    with pytest.raises(NotImplementedError, match="tiles"):
        vlm.attention(before, after, torch.tensor([[vlm.bos_id]]))
    plain = VLM(folder("idefics3"), train="nothing")
    tiled_ids, plain_ids = (model.prepare_inputs(before, after)["input_ids"] for model in (vlm, plain))
    assert tiled_ids.shape[1] > 2 * plain_ids.shape[1]


def test_a_template_that_adds_to_answers_is_refused(folder: Folder, tmp_path: Path) -> None:
    base = build("smolvlm", tmp_path / "thinking")
    template = base / "chat_template.jinja"
    place = "{% if m['content'][0]['type'] == 'image' %}"
    thought = "{% if m['role'] == 'assistant' %} think{% endif %}"
    template.write_text(template.read_text().replace(place, thought + place))
    with pytest.raises(DiffcapError, match="adds text to an answer"):
        VLM(str(base), train="nothing")
    template.unlink()
    config = json.loads((base / "processor_config.json").read_text())
    config.pop("chat_template", None)
    (base / "processor_config.json").write_text(json.dumps(config))
    for text in ("", "{{ raise_exception('only text') }}", "{% if"):
        if text:
            template.write_text(text)
        with pytest.raises(DiffcapError, match="no usable chat template"):
            VLM(str(base), train="nothing")


@pytest.mark.parametrize(
    ("answer", "caption"),
    [
        ("The red cube is gone.", "The red cube is gone"),
        ('**Answer:** "A car has left." It was white.', "A car has left"),
        ("Caption: the lamp is on\n\nExplanation: the light changed.", "the lamp is on"),
        ("\n- Nothing has changed.\n- The light differs.", "Nothing has changed"),
        ("the sign reads 4.5 m", "the sign reads 4.5 m"),
        ("1. The red cube moved.\n2. The light changed.", "The red cube moved"),
        ("### Change\nThe cube is gone", "The cube is gone"),
        ("Here is the caption:\nThe cube is gone.", "The cube is gone"),
        ("Mr. Smith left. He ran.", "Mr. Smith left"),
        ("image_1 shows a cube", "image_1 shows a cube"),
        ("### Only", "Only"),
        ("\u201cTwo people left.\u201d They walked.", "Two people left"),
        ("Certainly, the red cube is gone.", "the red cube is gone"),
        ("<think>\nThe cube. It was red.\n</think>\n\nThe red cube is gone.", "The red cube is gone"),
        ("<think>without an end", ""),
        ("No. Nothing has changed. The light differs.", "Nothing has changed"),
        ("No. The light differs.", "No. The light differs"),
        ("Yes. The red cube is gone. It was small.", "The red cube is gone"),
    ],
)
def test_a_free_answer_becomes_one_sentence(answer: str, caption: str) -> None:
    assert clean_answer(answer) == caption
    assert clean_answer("It is larger. Its beak is red. It flies.", 2) == "It is larger. Its beak is red"
