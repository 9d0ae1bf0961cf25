"""Open vision-language models as captioners: Qwen2.5-VL, Qwen3-VL, SmolVLM, Idefics3, InternVL, LLaVA-OneVision and Gemma 3.

A question about two images goes through the model's own processor and chat template; the model's answer is the caption. `encode` computes
the keys and values of the prompt once, and `step` adds one token, as for the other captioners.

Letters: B pairs, L tokens of the prompt with its images, T tokens of a caption, N tokens of an image, V tokens of the vocabulary.
"""

import re
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffcap.checkpoints import base_models
from diffcap.methods.vlm import parts
from diffcap.models.captioner import AttentionMaps, Batch, Captioner, constructor_arguments, patch_attention
from diffcap.models.decoder import flat_indices, take_flat
from diffcap.models.layers import use_fast_linear_
from diffcap.text.hub import HubVocabulary, import_transformers, load_processor, read_chat_template
from diffcap.utils.errors import DiffcapError, wrap_errors

PROMPT = (
    "These are two pictures of the same scene, before and after. Say in one short sentence what changed. If only the camera or the "
    "light changed, say: nothing has changed."
)
# Options that cut an image into tiles. They are off by default: with SmolVLM, 64 tokens of an image would become 1,088.
TILING_OPTIONS = ("do_image_splitting", "crop_to_patches", "do_pan_and_scan")
# Patterns of layers that are not rounded to 4 bits, because they have few weights, and rounding them would do the most harm.
KEPT_IN_DTYPE = ["lm_head", r"model\.(visual|vision_model|vision_tower|connector|multi_modal_projector)"]
MAX_PROMPT_LENGTH = 10_000  # characters of the prompt of a checkpoint
# Inputs that transformers reads on the host.
HOST_INPUTS = ("image_grid_thw", "image_cu_seqlens", "image_cu_window_seqlens", "image_sizes", "batch_num_images")
TOKEN_INPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")  # inputs of shape (B, L)


class VLM(Captioner):
    """A vision-language model that answers what changed between two images.

    Images are uint8 pixels (B, 3, height, width), or lists of B such images of different sizes.

    Args:
        base: the model: user/name on the Hugging Face Hub, or a folder; see `base_models.find_base`.
        revision: the model's commit on the Hub; None: the current commit, which is written to `hyperparameters`.
        prompt: question that follows the two images.
        train: what is trained: "lora" (matrices added to linear layers), "projector" (the layers between image tower and
            language model), "all", or "nothing" (zero-shot).
        lora_rank: rank of LoRA's matrices. lora_alpha: their scale is lora_alpha / lora_rank. lora_dropout: rate for their input.
        lora_targets: LoRA is added to the linear layers of the "language" model, or of "all" parts.
        dtype: type of the base model's frozen weights. Trained weights are float32.
        four_bit: load the base model in 4 bits (QLoRA: nf4 with double quantisation); needs bitsandbytes.
        checkpointing: compute activations a second time in the backward pass instead of storing them.
        image_kwargs: options of the image processor, such as {"do_image_splitting": true} or, for Qwen, with numbers of
            pixels, {"size": {"shortest_edge": 3136, "longest_edge": 200704}}.
        difference: after the projector, add to the after image's tokens their learned difference from the before image's tokens.
        sentences: number of sentences that are taken from an answer as the caption, if nothing is trained.
        base_sha256: hash of the base model (`base_models.base_sha256`). A base with another hash is refused. None accepts every base.
    """

    on_base_model = True
    vocabulary: HubVocabulary  # the base model's tokens

    def __init__(
        self,
        base: str,
        revision: str | None = None,
        prompt: str = PROMPT,
        train: parts.Trained = "lora",
        lora_rank: int = 16,
        lora_alpha: int = 32,
        lora_dropout: float = 0.05,
        lora_targets: parts.LoraTargets = "language",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        four_bit: bool = False,
        checkpointing: bool = False,
        image_kwargs: dict[str, Any] | None = None,
        difference: bool = False,
        sentences: int = 1,
        base_sha256: str | None = None,
    ) -> None:
        super().__init__()
        self.hyperparameters = constructor_arguments(locals())
        if train == "lora" and lora_rank < 1:
            raise DiffcapError(f"model.captioner.init_args.lora_rank is {lora_rank}; it must be at least 1.")
        if train == "all" and (dtype != "float32" or four_bit):
            raise DiffcapError(
                "train: all needs dtype: float32 and no four_bit, because small updates of other types are lost; set "
                "model.captioner.init_args.dtype=float32 (trainer.precision=bf16-mixed still computes in bfloat16)."
            )
        base_model = base_models.find_base(base, revision)
        sha256 = base_models.base_sha256(base_model.folder)
        if base_sha256 not in (None, sha256):
            raise DiffcapError(
                f"{base_model.name}: is not the base model that this captioner was trained on (its files differ); give the right one as "
                "--base FOLDER."
            )
        self.hyperparameters |= {"base": base_model.name, "revision": base_model.revision, "base_sha256": sha256}
        self.licence = base_model.licence
        self.processor = load_processor(base_model.folder)
        image_processor = self.processor.image_processor
        known_options = type(image_processor).valid_kwargs.__annotations__
        counts_pixels = hasattr(image_processor, "merge_size")  # Qwen: sizes are numbers of pixels, not lengths
        parts.check_image_kwargs(image_kwargs or {}, known_options, counts_pixels)
        self.net: Any = load_model(base_model.folder, dtype, four_bit)
        default_options = {name: False for name in TILING_OPTIONS if name in known_options}
        self.image_kwargs = default_options | (image_kwargs or {})
        if difference and any(self.image_kwargs.get(name) for name in TILING_OPTIONS):
            raise DiffcapError(
                "the difference module compares whole images; remove the option of image_kwargs that cuts tiles."
            )
        self.template = read_chat_template(self.processor, prompt)  # text and ids around an answer
        self.bos_id = self.template.bos_id
        self.eos_id = self.template.eos_id
        # Other ids that end an answer, from the model's generation settings (Qwen: <|endoftext|>; Gemma: <eos>).
        eos_ids = self.net.generation_config.eos_token_id
        eos_ids = eos_ids if isinstance(eos_ids, list) else [eos_ids]
        self._more_eos_ids = [eos_id for eos_id in eos_ids if eos_id not in (None, self.eos_id)]
        self.extra_eos_id = next(iter(self._more_eos_ids), None)
        self.vocabulary = HubVocabulary(
            self.processor.tokenizer, self.template, sentences if train == "nothing" else None
        )
        self.vocabulary_layout = self.vocabulary.family
        config = self.net.config
        # Whether some layers attend to the last tokens only, for which transformers has to make the mask.
        self._has_window = "sliding_attention" in (getattr(config.get_text_config(), "layer_types", None) or ())
        self.image_id: int = getattr(config, "image_token_id", None) or config.image_token_index
        if hasattr(self.net.model, "connector") and not any(map(self.image_kwargs.get, TILING_OPTIONS)):
            parts.use_whole_images(self.net.model)  # SmolVLM, Idefics3
        if hasattr(self.net.model, "language_model"):
            self.net.model.language_model._deepstack_process = parts.add_at_images  # Qwen3-VL
        self.net = parts.choose_trained(self.net, train, lora_rank, lora_alpha, lora_dropout, lora_targets)
        for adapter in getattr(self.net, "peft_config", {}).values():  # an export for PEFT contains these values
            adapter.base_model_name_or_path = base_model.name
            adapter.revision = base_model.revision
        self.difference = parts.Difference(config.get_text_config().hidden_size) if difference else None
        if self.difference is not None:
            self.difference.install(self.core.model)
        if checkpointing:
            self.core.activation_checkpointing_enable({"use_reentrant": False})
            # Remove the hooks that give the inputs gradients, because a frozen image tower would keep activations for these gradients.
            self.core.disable_input_require_grads()
        # Only these weights are saved in checkpoints.
        parameters = self.named_parameters(remove_duplicate=False)
        self._trained = tuple(name for name, parameter in parameters if parameter.requires_grad)
        self.register_state_dict_post_hook(_remove_base)
        self.register_load_state_dict_post_hook(_expect_no_base)
        small_images = torch.zeros(1, 3, 64, 64, dtype=torch.uint8)
        fault = f"{self.image_kwargs} is not valid for this model"
        with wrap_errors("model.captioner.init_args.image_kwargs", fault, "correct it"):
            self.prepare_inputs(small_images, small_images)
        self.train()  # transformers loads models in evaluation mode, in which layers are not checkpointed

    @classmethod
    def check_state(cls, arguments: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """Raise a ValueError if a checkpoint's arguments are wrong, or it has weights that were not trained."""
        sha256 = arguments.get("base_sha256")
        if not isinstance(sha256, str) or not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError(f"its base_sha256 is {sha256!r:.80}, so the base model cannot be checked")
        if len(arguments["prompt"]) > MAX_PROMPT_LENGTH:
            raise ValueError(f"its prompt has {len(arguments['prompt']):,} characters, more than {MAX_PROMPT_LENGTH:,}")
        patterns = {"lora": r"lora_", "projector": parts.PROJECTORS.pattern, "all": ""}
        trained = patterns.get(arguments["train"], r"(?!)")  # "nothing": matches no name
        frozen = [name for name in weights if not re.search(trained, name) and not name.startswith("difference.")]
        if frozen:
            raise ValueError(f"it has weights of the base model, which was not trained: {min(frozen):.80}")

    @property
    def core(self) -> Any:
        """Return the model of transformers, without PEFT's wrapper."""
        return self.net.get_base_model() if hasattr(self.net, "get_base_model") else self.net

    def is_eos(self, tokens: Tensor) -> Tensor:
        """Return a mask of `tokens`, True for ids that end an answer."""
        return torch.stack([tokens == eos_id for eos_id in (self.eos_id, *self._more_eos_ids)]).any(0)

    def prepare_inputs(self, before: Any, after: Any, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return the inputs of transformers on `device` (None: the model's): prompts, padded on the left, and pixels of each pair."""
        before, after = _to_bytes(before), _to_bytes(after)
        if len(before) != len(after):  # each before image is in a change pair and in a distractor pair
            before = before.repeat(len(after) // len(before), 1, 1, 1)
        if self.difference is not None:
            self.difference.num_pairs = len(after)
        inputs = self.processor(
            text=[self.template.prompt] * len(after),
            images=[[first, second] for first, second in zip(before, after)],
            return_tensors="pt",
            padding=True,
            images_kwargs=self.image_kwargs,
            # The template has written the special tokens already.
            text_kwargs={"add_special_tokens": False, "padding_side": "left"},
        )
        device = device or self.core.device
        dtype = self.core.dtype
        return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}

    def _without_bos(self, inputs: dict[str, Tensor], words: Tensor | None = None) -> dict[str, Tensor]:
        """Return the inputs without the prompt's last id, which is BOS, and with the ids (B, T) of `words` appended."""
        words = inputs["input_ids"][:, :0] if words is None else words
        word_inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
        new_inputs = dict(inputs)
        for name in TOKEN_INPUTS:
            if name in inputs:
                word_input = word_inputs.get(name, torch.zeros_like(words))
                new_inputs[name] = torch.cat([inputs[name][:, :-1], word_input], 1)
        return new_inputs

    def _forget_positions(self) -> None:
        """Delete the positions of the previous prompt, which Qwen keeps in the module."""
        if hasattr(self.core.model, "rope_deltas"):
            self.core.model.rope_deltas = None

    def encode(self, before: Any, after: Any) -> dict[str, Any]:
        """Compute the keys and values of the prompt without its last id, which is BOS.

        Returns:
            "key_values" of each layer, (B, heads, L, channels) each; "mask" (B, L), 0 at padding, if a prompt is padded;
            "bos_position" (B, 1); "is_image" (B, L), True at the tokens of both images.
        """
        prompt = self._without_bos(self.prepare_inputs(before, after))
        cache = parts.prompt_cache([None] * self.core.config.get_text_config().num_hidden_layers)
        self._forget_positions()
        with parts.without_checkpointing(self.core):
            self.core(**prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        mask = prompt["attention_mask"]
        bos_position = mask.sum(1, keepdim=True)
        rope_deltas = getattr(self.core.model, "rope_deltas", None)
        # In Qwen's positions, an image counts as its longer side; `rope_deltas`: the next position minus the number of unpadded tokens.
        if rope_deltas is not None:
            bos_position = bos_position + rope_deltas.view(-1, 1)
        self._forget_positions()
        return {
            "key_values": [layer.added for layer in cache.layers],
            # Without a mask, transformers does not read on the host, for every word, whether the mask has a 0.
            **({} if mask.all() else {"mask": mask}),
            "bos_position": bos_position.expand(len(mask), 1),
            "is_image": prompt["input_ids"] == self.image_id,
        }

    def _run_words(
        self, tokens: Tensor, memory: dict[str, Any], cache: list[parts.KeyValues] | None, **options: Any
    ) -> tuple[Any, list[parts.KeyValues]]:
        """Run ids (B, T) after the prompt and the words in `cache`. Return the output, and the keys and values of all words."""
        num_past_words = 0 if cache is None else cache[0][0].shape[-2]
        past_key_values = parts.prompt_cache(memory["key_values"], cache)
        positions = memory["bos_position"] + num_past_words + torch.arange(tokens.shape[1], device=tokens.device)
        if hasattr(self.core.model, "rope_deltas"):  # Qwen has three positions per token: time, height and width
            positions = positions.expand(3, -1, -1)
        mask = None
        if "mask" in memory:
            mask = F.pad(memory["mask"], (0, num_past_words + tokens.shape[1]), value=1)
            if tokens.shape[1] == 1 and not options and not self._has_window:
                mask = mask[:, None, None].bool()  # transformers does the same, but first reads the mask on the host
        options |= {"position_ids": positions, "past_key_values": past_key_values, "use_cache": True}
        with parts.without_checkpointing(self.core):
            output = self.core(input_ids=tokens, attention_mask=mask, **options)
        return output, [layer.added for layer in past_key_values.layers]

    def step(self, tokens: Tensor, memory: Any, cache: Any) -> tuple[Tensor, Any]:
        """Score the next word, see `Captioner.step`. The cache has the keys and values of the words only."""
        output, cache = self._run_words(tokens[:, None], memory, cache)
        return output.logits[:, -1], cache

    def teacher_forced_logits(self, tokens: Tensor, memory: Any) -> Tensor:
        """Score the words of given captions in one pass, see `Captioner.teacher_forced_logits`."""
        output, _ = self._run_words(tokens[:, :-1], memory, None)
        return output.logits

    def host_entries(self, batch: Batch) -> Batch:
        """Return more entries of a batch, see `Captioner.host_entries`. In training, the entry "inputs" has the images and prompts."""
        entries = super().host_entries(batch)
        if entries and "id" not in batch:  # only validation batches have "id"; their inputs would take much memory
            entries["inputs"] = self._loss_inputs(batch)
        return entries

    def _loss_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return pixels, prompts and captions of a batch, and what transformers would otherwise compute from values on the host.

        `HOST_INPUTS` are lists, because tensors and arrays would be sent to the GPU with the batch.
        """
        from transformers.exporters.utils import precompute_export_inputs

        tokens, model = batch["tokens"], self.core.model
        prompts = self.prepare_inputs(batch["before"], batch["after"], tokens.device)
        inputs: dict[str, Any] = self._without_bos(prompts, tokens[:, :-1])
        ids, mask = inputs["input_ids"], inputs.pop("attention_mask").bool()
        token_types = inputs.pop("mm_token_type_ids", None)
        if hasattr(model, "get_rope_index"):  # Qwen: positions of tokens, and of the image tower's patches and windows
            grid = {"grid_thw": inputs["image_grid_thw"]}
            inputs["position_ids"] = model.get_rope_index(ids, token_types, grid["grid_thw"], attention_mask=mask)[0]
            precompute_export_inputs(model.visual, grid)
            inputs |= {f"image_{name}": value for name, value in grid.items() if value is not None}
        if not mask.all():  # else attention is causal; images of one size, as in a feature store, need no padding
            inputs["attention_mask"] = mask
        is_image = ids == self.image_id
        # The embeddings of image tokens are replaced. In Gemma, the id of an image has no embedding.
        inputs |= {"input_ids": ids.masked_fill(is_image, 0), "image_positions": flat_indices(is_image)}
        return {name: value.tolist() if name in HOST_INPUTS else value for name, value in inputs.items()}

    def validation_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return the cross-entropy, in nats, of every token of the captions given the tokens before it, without a cache."""
        core, tokens = self.core, batch["tokens"]
        inputs = batch["inputs"] if "inputs" in batch else self._loss_inputs(batch)
        # transformers computes with an array of numpy as with a tensor.
        inputs = {name: np.array(value) if name in HOST_INPUTS else value for name, value in inputs.items()}
        positions = inputs.pop("image_positions")
        embeddings = core.get_input_embeddings()(inputs.pop("input_ids"))
        names = ("attention_mask", "position_ids", "token_type_ids")
        options = {name: inputs.pop(name) for name in names if name in inputs}
        if self.difference is not None:
            self.difference.num_pairs = len(embeddings)
        images = core.model.get_image_features(**inputs, return_dict=True)
        features = torch.cat(list(images.pooler_output)).to(embeddings.dtype)
        embeddings = embeddings.flatten(0, 1).index_copy(0, positions, features).view_as(embeddings)
        options |= {"inputs_embeds": embeddings, "use_cache": False}
        if not self.hyperparameters["checkpointing"]:
            # With an empty cache, transformers does not read from the positions whether a row has several texts.
            options["past_key_values"] = parts.prompt_cache([None] * core.config.get_text_config().num_hidden_layers)
        num_words = tokens.shape[1] - 1
        if hasattr(images, "deepstack_features"):  # Qwen3-VL, whose own forward would compute them from the images
            deepstack = [torch.cat(layer_features) for layer_features in images.deepstack_features]
            options |= {"visual_pos_masks": positions, "deepstack_visual_embeds": deepstack}
            logits = core.lm_head(core.model.language_model(**options).last_hidden_state[:, -num_words:])
        else:
            logits = core(**options, logits_to_keep=num_words).logits
        words = torch.cat(self.find_words(batch))
        logits, targets = take_flat(logits, words).float(), take_flat(tokens[:, 1:], words)
        return {"caption_loss": F.cross_entropy(logits, targets, reduction="none")}

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the base model that are trained, see `Captioner.pretrained_parameters`."""
        parameters = self.net.named_parameters()
        return [parameter for name, parameter in parameters if parameter.requires_grad and "lora_" not in name]

    @torch.no_grad()
    def attention(self, before: Any, after: Any, tokens: Tensor) -> AttentionMaps:
        """Compute maps of the attention to image tokens, averaged over the heads of the middle half of the layers."""
        if options := [name for name in TILING_OPTIONS if self.image_kwargs.get(name)]:
            raise NotImplementedError(f"{options[0]} cuts images into tiles, which have no common grid")
        memory = self.encode(before, after)
        core = self.core
        core.set_attn_implementation("eager")  # the other implementations compute no weights
        try:
            output, _ = self._run_words(tokens, memory, None, output_attentions=True)
        finally:
            core.set_attn_implementation("sdpa")
        num_layers = len(output.attentions)
        middle_layers = output.attentions[num_layers // 4 : num_layers - num_layers // 4]
        mean_weights = torch.stack(middle_layers).float().mean((0, 2))  # over layers and heads
        weights = mean_weights[..., : memory["is_image"].shape[1]]  # (B, T, L)
        is_image = memory["is_image"][:, None].expand_as(weights)
        before_weights, after_weights = weights[is_image].view(*tokens.shape, 2, -1).unbind(2)  # (B, T, N) each
        image_processor = self.processor.image_processor
        side = int(before_weights.shape[-1] ** 0.5)
        grid = (side, side)
        if hasattr(image_processor, "merge_size"):  # Qwen keeps the aspect ratio
            inputs = image_processor(images=[before[0]], return_tensors="pt", **self.image_kwargs)
            rows, columns = inputs["image_grid_thw"][0].tolist()[1:]
            grid = (rows // image_processor.merge_size, columns // image_processor.merge_size)
        num_patches = grid[0] * grid[1]  # LLaVA-OneVision has one token more, for the end of each image
        return patch_attention(before_weights[..., :num_patches], after_weights[..., :num_patches], grid)


def _to_bytes(images: Any) -> Any:
    return images.round().to(torch.uint8) if isinstance(images, Tensor) and images.is_floating_point() else images


def load_model(folder: Any, dtype: str, four_bit: bool = False, attention: str | None = "sdpa") -> Any:
    """Load a model of transformers from a base model's folder. `attention` is its implementation; None: the model's own choice."""
    transformers = import_transformers()
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    if four_bit:
        if find_spec("bitsandbytes") is None:
            raise DiffcapError(
                "model.captioner.init_args.four_bit needs bitsandbytes; install it with `pip install 'diffcap[quant]'`."
            )
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
            llm_int8_skip_modules=KEPT_IN_DTYPE,  # in spite of its name also used for 4 bits
        )
    with wrap_errors(folder, "its model cannot be loaded", "download the files again, or use another model"):
        model, loaded = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, trust_remote_code=False, use_safetensors=True, output_loading_info=True, **options
        )
    _check_loaded(folder, model, loaded)
    use_fast_linear_(model)
    return model


def _check_loaded(folder: Any, model: nn.Module, loaded: dict[str, Any]) -> None:
    """Raise a DiffcapError if `loaded` reports that a weight is not from the files, because transformers gave it random values."""
    missing = set(loaded["missing_keys"])
    named = dict(model.named_parameters(remove_duplicate=False))
    present = {id(value) for name, value in named.items() if name not in missing}
    # The second name of a tied weight need not be in the files.
    absent = sorted(name for name in missing if name not in named or id(named[name]) not in present)
    if absent:
        raise DiffcapError(
            f"{folder}: {len(absent):,} of {len(named):,} weights are not in its files (first: {absent[0]}), so they would be random; "
            "download the files again, or use a model that save_pretrained of transformers wrote."
        )


def _remove_base(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        if name.removeprefix(prefix) not in module._trained:
            del state[name]


def _expect_no_base(module: Any, keys: Any) -> None:
    """Remove the base model's weights from `missing_keys`, so that they are not reported as missing. Names may have a prefix there."""
    names = keys.missing_keys
    names[:] = [name for name in names if ".net." not in f".{name}" or name.endswith(module._trained)]
