"""Tiny vision-language models of all supported families with random weights, in the format of the Hugging Face Hub.

`python tests/tiny_vlms.py FAMILY FOLDER` writes one.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from diffcap.methods.vlm.model import PROMPT

CAPTIONS = [
    "the red cube is gone",
    "the blue ball has been added",
    "the small green thing moved",
    "nothing has changed",
    "the large metal cylinder turned yellow",
    "somebody changed its location",
]
END, PAD = "<|im_end|>", "<|endoftext|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOL_CHAT = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: "
    "{% endif %}{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}<image>{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
GEMMA_CHAT = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<start_of_image>{% else %}{{ c['text'] }}{% endif %}{% endfor %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


class Tokens:
    """A byte-pair tokenizer trained on `CAPTIONS`, and its ids by token."""

    def __init__(self, special: Sequence[str], size: int = 400, eos: str = END, pad: str = PAD, **named: str) -> None:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = [f"{caption}." for caption in CAPTIONS] + [f" {caption}" for caption in CAPTIONS]
        tokenizer.train_from_iterator([*texts, PROMPT, "user assistant User: Assistant: model\n"], trainer)
        self.tokenizer = hf.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=eos, pad_token=pad, extra_special_tokens=named or None
        )
        self.id = self.tokenizer.convert_tokens_to_ids

    def text(self, **more: Any) -> dict[str, Any]:
        """Settings of a language model of two layers."""
        return {
            "vocab_size": len(self.tokenizer),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "eos_token_id": self.tokenizer.eos_token_id,
            "pad_token_id": self.tokenizer.pad_token_id,
            **more,
        }


TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "image_size": 64, "patch_size": 8, "vision_use_head": False}
SIZE = {"height": 64, "width": 64}


def _qwen(three: bool) -> tuple[Any, Any]:
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokens = Tokens([PAD, "<|im_start|>", END, *names])
    common = {
        "image_token_id": tokens.id("<|image_pad|>"),
        "video_token_id": tokens.id("<|video_pad|>"),
        "vision_start_token_id": tokens.id("<|vision_start|>"),
        "vision_end_token_id": tokens.id("<|vision_end|>"),
        "tie_word_embeddings": True,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    patch = 16 if three else 14
    if three:
        text = tokens.text(head_dim=16, rope_parameters={**rope, "mrope_interleaved": True}, bos_token_id=None)
        tower |= {"patch_size": patch, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        model = hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(text_config=text, vision_config=tower, **common))
    else:
        text = tokens.text(rope_parameters=rope, bos_token_id=None)
        tower |= {"patch_size": patch, "window_size": 56, "fullatt_block_indexes": [1]}
        config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **common)
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
    pixels = (2 * patch) ** 2
    images = hf.Qwen2VLImageProcessor(patch_size=patch, min_pixels=pixels, max_pixels=64 * pixels)
    template = CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    processor = hf.Qwen3VLProcessor if three else hf.Qwen2_5_VLProcessor
    return model, processor(images, tokens.tokenizer, hf.Qwen2VLVideoProcessor(), chat_template=template)


def _smolvlm(idefics: bool) -> tuple[Any, Any]:
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    eos, fake = "<end_of_utterance>", "<fake_token_around_image>"
    tokens = Tokens(
        [PAD, "<|im_start|>", eos, fake, "<image>", "<global-img>", "<video>", *rows],
        430,
        eos,
        fake_image_token=fake,
        image_token="<image>",
        global_image_token="<global-img>",
        end_of_utterance_token=eos,
    )
    common = {
        "text_config": tokens.text(model_type="llama", bos_token_id=tokens.id("<|im_start|>")),
        "vision_config": {**TOWER, "image_size": 64, "patch_size": 8},
        "image_token_id": tokens.id("<image>"),
        "scale_factor": 2,
        "tie_word_embeddings": True,
        "pad_token_id": tokens.tokenizer.pad_token_id,
    }
    sizes = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    options = {"image_seq_len": 16, "chat_template": SMOL_CHAT}
    if idefics:
        model: Any = hf.Idefics3ForConditionalGeneration(hf.Idefics3Config(**common))
        return model, hf.Idefics3Processor(hf.Idefics3ImageProcessor(**sizes), tokens.tokenizer, **options)
    model = hf.SmolVLMForConditionalGeneration(hf.SmolVLMConfig(**common))
    video = hf.SmolVLMVideoProcessor(size={"longest_edge": 64})
    return model, hf.SmolVLMProcessor(hf.SmolVLMImageProcessor(**sizes), tokens.tokenizer, video, **options)


def _internvl() -> tuple[Any, Any]:
    image = "<IMG_CONTEXT>"
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": image}
    tokens = Tokens([PAD, "<|im_start|>", END, "<img>", "</img>", image, "<video>"], **named, video_token="<video>")
    config = hf.InternVLConfig(
        text_config=tokens.text(model_type="qwen2", bos_token_id=None),
        vision_config={**TOWER, "image_size": [64, 64], "patch_size": [8, 8]},
        image_token_id=tokens.id(image),
        image_seq_length=16,
        tie_word_embeddings=True,
    )
    video = hf.InternVLVideoProcessor(size=SIZE)
    images = hf.GotOcr2ImageProcessor(size=SIZE, crop_to_patches=False)
    template = CHAT.replace("IMAGE", f"{image}\n")
    return hf.InternVLForConditionalGeneration(config), hf.InternVLProcessor(
        images, tokens.tokenizer, video, image_seq_length=16, chat_template=template
    )


def _onevision() -> tuple[Any, Any]:
    tokens = Tokens([PAD, "<|im_start|>", END, "<image>", "<video>"])
    sizes = [[64, 64], [64, 128], [128, 64], [128, 128]]
    config = hf.LlavaOnevisionConfig(
        text_config=tokens.text(model_type="qwen2", bos_token_id=None),
        vision_config=SIGLIP,
        image_token_index=tokens.id("<image>"),
        video_token_index=tokens.id("<video>"),
        image_grid_pinpoints=sizes,
        tie_word_embeddings=True,
    )
    images = hf.LlavaOnevisionImageProcessor(size=SIZE, image_grid_pinpoints=sizes)
    return hf.LlavaOnevisionForConditionalGeneration(config), hf.LlavaOnevisionProcessor(
        images,
        tokens.tokenizer,
        hf.LlavaOnevisionVideoProcessor(size=SIZE),
        num_image_tokens=64,
        vision_feature_select_strategy="full",
        chat_template=CHAT.replace("IMAGE", "<image>"),
    )


def _gemma3() -> tuple[Any, Any]:
    start, end, image = "<start_of_image>", "<end_of_image>", "<image_soft_token>"
    turn = "<end_of_turn>"
    tokens = Tokens(
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", turn, start, end, image],
        eos=turn,
        pad="<pad>",
        boi_token=start,
        eoi_token=end,
        image_token=image,
    )
    text = tokens.text(
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=tokens.id("<bos>"),
    )
    config = hf.Gemma3Config(
        text_config=text,
        vision_config=SIGLIP,
        mm_tokens_per_image=16,
        boi_token_index=tokens.id(start),
        eoi_token_index=tokens.id(end),
        image_token_index=tokens.id(image),
        eos_token_id=[tokens.tokenizer.eos_token_id],
    )
    processor = hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size=SIZE), tokens.tokenizer, chat_template=GEMMA_CHAT, image_seq_length=16
    )
    return hf.Gemma3ForConditionalGeneration(config), processor


def _llava() -> tuple[Any, Any]:
    tokens = Tokens([PAD, "<|im_start|>", END, "<image>"], image_token="<image>")
    tower = {**TOWER, "model_type": "clip_vision_model", "image_size": 64, "patch_size": 8, "projection_dim": 32}
    config = hf.LlavaConfig(
        text_config=tokens.text(model_type="qwen2", bos_token_id=None),
        vision_config=tower,
        image_token_index=tokens.id("<image>"),
        tie_word_embeddings=True,
    )
    images = hf.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=SIZE)
    return hf.LlavaForConditionalGeneration(config), hf.LlavaProcessor(
        images,
        tokens.tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT.replace("IMAGE", "<image>"),
    )


def _paligemma() -> tuple[Any, Any]:
    tokens = Tokens([PAD, "<|im_start|>", END, "<image>"], image_token="<image>")
    tokens.tokenizer.bos_token = "<|im_start|>"
    images = hf.SiglipImageProcessor(size=SIZE)
    images.image_seq_length = 64
    processor = hf.PaliGemmaProcessor(images, tokens.tokenizer)  # adds tokens for places
    config = hf.PaliGemmaConfig(
        text_config=tokens.text(model_type="gemma", head_dim=16),
        vision_config={**SIGLIP, "num_image_tokens": 64, "projection_dim": 64},
        projection_dim=64,
        image_token_index=tokens.id("<image>"),
    )
    return hf.PaliGemmaForConditionalGeneration(config), processor


def _blip2() -> tuple[Any, Any]:
    tokens = Tokens([PAD, "<|im_start|>", END, "<image>"])
    processor = hf.Blip2Processor(hf.BlipImageProcessor(size=SIZE), tokens.tokenizer, num_query_tokens=4)
    size = len(tokens.tokenizer)
    text = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "word_embed_proj_dim": 64}
    config = hf.Blip2Config(
        text_config={**text, "vocab_size": size, "num_attention_heads": 4, "bos_token_id": 1, "pad_token_id": 0},
        vision_config={**TOWER, "image_size": 64, "patch_size": 16},
        qformer_config={**TOWER, "encoder_hidden_size": 32, "vocab_size": size},
        num_query_tokens=4,
        image_token_index=tokens.id("<image>"),
    )
    return hf.Blip2ForConditionalGeneration(config), processor


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen2_5_vl": lambda: _qwen(False),
    "qwen3_vl": lambda: _qwen(True),
    "smolvlm": lambda: _smolvlm(False),
    "idefics3": lambda: _smolvlm(True),
    "internvl": _internvl,
    "llava_onevision": _onevision,
    "gemma3": _gemma3,
}
OTHERS = {"llava": _llava, "paligemma": _paligemma, "blip-2": _blip2}  # families without code in diffcap


def build(family: str, folder: Path) -> Path:
    """Write a model of a family into a folder: 460 to 840 kB."""
    torch.manual_seed(0)
    model, processor = (FAMILIES | OTHERS)[family]()
    with torch.no_grad():
        # With the families' standard deviation of 0.02, attention and the tied output layer are so flat at these widths that
        # nothing is learned.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
        model.get_input_embeddings().weight.normal_(std=0.15)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    build(sys.argv[1], Path(sys.argv[2]))
