"""Caption two images with a trained checkpoint.

```
caption = load_captioner("runs/desk/scorer/finetune/best.ckpt")("before.jpg", "after.jpg")
print(caption.text, caption.log_probability)
```
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map

from diffcap.change import Alternative, AttentionMaps, Caption, Word, attention_of, word_spans
from diffcap.checkpoints.base_models import ZERO_SHOT, describe_origin, text_only_error
from diffcap.checkpoints.combining import as_ensemble, load_members
from diffcap.checkpoints.loading import Checkpoint
from diffcap.checkpoints.reading import weights_hash
from diffcap.datasets.no_change import is_no_change
from diffcap.models.answering import AnsweringModel, Unreachable
from diffcap.models.generation import (
    NAN_PROBABILITIES,
    beam_search,
    check_search,
    greedy,
    rank_beams,
    token_log_probabilities,
)
from diffcap.text.characters import join_characters
from diffcap.text.hub import clean_answer
from diffcap.utils.cores import map_ahead
from diffcap.utils.errors import DiffcapError
from diffcap.utils.fitting import Fit
from diffcap.utils.host_copy import HostCopy
from diffcap.utils.image_io import Source, read_pair
from diffcap.utils.pixels import find_difference, relative_box

# Name of a dataset that diffcap renders -> folder of the captioner that was trained on it and ships with the package.
SHIPPED_CAPTIONERS = {name: Path(__file__).parent / "models" / "captioners" / name for name in ("blocks", "tiles")}
DEFAULT_CAPTIONER = SHIPPED_CAPTIONERS["blocks"]
RENDERED_DOMAINS = {"blocks": "`blocks` scenes", "tiles": "overhead images (`tiles`)"}
# If the box around the pixels that differ covers a larger share of the image, the attention locates the change.
_LARGE_DIFFERENCE = 0.5
MAX_ASPECT = 50  # largest ratio of an image's sides for vision-language models; Qwen refuses ratios of 200


class _ModelInput(NamedTuple):
    """The images of a pair, one tensor (2, 3, H, W) for each backbone, and notes on their conversion."""

    images: list[Tensor]
    notes: tuple[str, ...]
    fit: dict[str, Any] | None
    frame: tuple[float, ...]  # see `InputPair`
    difference: tuple[float, ...] | None  # of `find_difference`; None if the change is not located


class PairCaptioner:
    """Captions the change between two images, which are paths, the bytes of a file, PIL images or arrays.

    Args:
        checkpoint: the trained captioner; several captioners with the same vocabulary are an ensemble.
        device: "auto" (CUDA if available), "cpu", or torch's name of this machine's accelerator ("cuda", "cuda:1").
        backbone_weights: file of the backbone's weights, if its library cannot download them.
        fit, strict: how the images of each pair are fitted to each other, see `diffcap.utils.fitting.fit_pair`.

    Attributes:
        metadata: entries of the checkpoint (method, dataset, step, version, ...). An ensemble has the entries of its first member,
            and the entry "ensemble" with the methods of all members.
        domain_note: warning that the captions can be unreliable, for captioners trained on rendered images and for vision-language
            models without training; otherwise None.
        only_answers: True for a model that answers with text only, without probabilities. It accepts only greedy decoding.

    Raises:
        DiffcapError: the backbone is not available or not the one used in training, or the device does not exist.

    Example:
        >>> from diffcap.checkpoints.loading import load
        >>> captioner = PairCaptioner(load(DEFAULT_CAPTIONER), "cpu")
        >>> caption = captioner("examples/before.png", "examples/after.png", beams=3)
        >>> maps = captioner.attention("examples/before.png", "examples/after.png", caption)
        >>> len(maps.words), maps.before.shape  # (W, h, w)
        (7, (7, 4, 6))
    """

    def __init__(
        self,
        checkpoint: Checkpoint | Sequence[Checkpoint],
        device: str = "auto",
        backbone_weights: str | None = None,
        fit: Fit = "stretch",
        strict: bool = False,
    ) -> None:
        from diffcap.features.backbones import rebuild_backbone

        members = [checkpoint] if isinstance(checkpoint, Checkpoint) else list(checkpoint)
        first = members[0] if len(members) == 1 else as_ensemble(members)
        self.fit, self.strict = fit, strict
        self.vocabulary = first.vocabulary
        self.max_length = first.max_length
        self.metadata = first.metadata
        self.domain_note = _domain_note(members)
        names = ["auto", "cpu"]  # values of `device` that this machine has
        if accelerator := torch.accelerator.current_accelerator(check_available=True):
            kind = accelerator.type
            names += [kind, *(f"{kind}:{index}" for index in range(torch.accelerator.device_count()))]
        if device not in (*names, "cpu:0"):
            raise DiffcapError(f"--device {device}: this machine has no such device; choose one of {', '.join(names)}.")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self._feature_metadata: list[dict[str, Any]] = []  # how features are computed, for each distinct backbone
        for member in members:
            if member.features not in self._feature_metadata:
                self._feature_metadata.append(member.features)
        self._feature_index = [self._feature_metadata.index(member.features) for member in members]
        # "shape" is the shape of an image's features. It is None for a vision-language model, which reads images of any size.
        self._has_fixed_sizes = all(metadata["shape"] is not None for metadata in self._feature_metadata)
        backbones = [rebuild_backbone(metadata, backbone_weights) for metadata in self._feature_metadata]
        self._backbones = [backbone.to(self.device) for backbone in backbones]
        self._captioner = first.captioner.eval().to(self.device)
        self.only_answers = isinstance(self._captioner, AnsweringModel)
        if isinstance(self._captioner, AnsweringModel):
            self._captioner.check()

    def __call__(self, before: Source, after: Source, beams: int = 1, length_penalty: float = 0.0) -> Caption:
        """Caption one pair.

        Args:
            beams: beam size; 1 is greedy decoding. If it is larger, the greedy caption is also a candidate, because beam search can
                miss it.
            length_penalty: exponent p: hypotheses are ranked by their log-probability, divided by (number of tokens) ** p.

        Raises:
            DiffcapError: an image cannot be read, or the decoding arguments are out of range.
        """
        self.check_options(beams, length_penalty)
        return self._generate([self._preprocess(before, after)], beams, length_penalty)[0]

    def batch(
        self,
        pairs: Iterable[tuple[Source, Source]],
        beams: int = 1,
        length_penalty: float = 0.0,
        batch_size: int = 16,
        errors: Literal["raise", "return"] = "raise",
        sentences: Sequence[str] = (),
        threads: int = 0,
        locate: bool = False,
    ) -> Iterator[Caption | DiffcapError]:
        """Caption many pairs in batches, in their order.

        Args:
            pairs: images of each pair, which are read batch by batch. beams, length_penalty: see `__call__`.
            errors: "return" yields the error in place of the caption if a pair cannot be read, and continues.
            sentences: sentences whose probabilities are computed for each pair, for `Caption.scored`.
            threads: number of threads that read the next batch's images while a batch is captioned; 0: no images are read in advance.
                A server is asked about `batch_size` pairs at a time.
            locate: also find `Caption.box`.

        Raises:
            DiffcapError: an image cannot be read and `errors` is "raise", a server cannot be reached, or the decoding arguments are out
                of range.
            ValueError: an element of `pairs` is not a pair.
        """
        self.check_options(beams, length_penalty)
        encoded = [self.vocabulary.encode(sentence, self.max_length) for sentence in sentences if not self.only_answers]
        # None for a sentence with a word that is not in the vocabulary
        sentence_ids = [
            None if self.vocabulary.unk in ids else torch.tensor(ids, device=self.device) for ids in encoded
        ]
        calls_server = isinstance(self._captioner, AnsweringModel) and self._captioner.calls_server

        def preprocess(pair: tuple[Source, Source]) -> _ModelInput | Caption | DiffcapError:
            try:
                model_input = self._preprocess(*pair, locate)
                return self._generate([model_input], 1, 0.0)[0] if calls_server else model_input
            except DiffcapError as error:
                if errors == "raise" or isinstance(error, Unreachable):
                    raise
                return error

        batch_size = max(1, batch_size)
        threads = batch_size if calls_server else threads
        valid_pairs = _check_pairs(pairs)
        with ThreadPoolExecutor(max(1, threads)) as pool:
            inputs = map_ahead(pool, preprocess, valid_pairs, batch_size) if threads else map(preprocess, valid_pairs)
            # A server's answers are yielded one by one, so that those before an error are not lost.
            while chunk := list(islice(inputs, 1 if calls_server else batch_size)):
                valid = [model_input for model_input in chunk if isinstance(model_input, _ModelInput)]
                captions = iter(self._generate(valid, beams, length_penalty, sentence_ids) if valid else [])
                for model_input in chunk:
                    yield next(captions) if isinstance(model_input, _ModelInput) else model_input

    def check_options(self, beams: int, length_penalty: float, attention: bool = False) -> None:
        """Raise a DiffcapError if the options are out of range, or if a model that only answers with text does not have them."""
        check_search(beams, length_penalty)
        if self.only_answers and (beams > 1 or length_penalty or attention):
            raise text_only_error(self.metadata["base"])

    def attention(self, before: Source, after: Source, caption: Caption) -> AttentionMaps:
        """Return attention maps for each word of a caption that this captioner generated.

        Raises:
            DiffcapError: the method has no attention maps.
        """
        self.check_options(1, 0.0, attention=True)
        before_features, after_features = self._compute_features([self._preprocess(before, after)])
        try:
            return attention_of(self._captioner, self.vocabulary, before_features, after_features, caption.tokens)
        except NotImplementedError as error:
            raise DiffcapError(f"this captioner has no attention maps: {error}.") from None

    def _preprocess(self, before: Source, after: Source, locate: bool = False) -> _ModelInput:
        pair = read_pair(before, after, fit=self.fit, strict=self.strict)
        images = [pair.before.image, pair.after.image]
        if not self._has_fixed_sizes:
            for image, name in zip(images, (pair.before.name, pair.after.name)):
                if max(image.size) > MAX_ASPECT * min(image.size):
                    raise DiffcapError(
                        f"{name} is {image.width} x {image.height} pixels, but for a vision-language model the ratio of the sides "
                        f"must be at most {MAX_ASPECT}. Crop the image."
                    )
            images[1] = images[1].resize(images[0].size)  # both images must have the same grid of tokens
        difference = find_difference(pair.before.image, pair.after.image) if locate else None
        model_images = [torch.stack([backbone.preprocess(image) for image in images]) for backbone in self._backbones]
        return _ModelInput(model_images, pair.notes, pair.fit, pair.frame, difference)

    def _compute_features(self, inputs: list[_ModelInput]) -> tuple[Any, Any]:
        """Compute features of the before and after images, (B, C, h, w) each; for an ensemble lists with those of each member."""
        from diffcap.features.backbones import compute_features

        features: list[Any] = []  # before and after, of each backbone
        backbone_images = zip(*(model_input.images for model_input in inputs))
        for backbone, metadata, pairs in zip(self._backbones, self._feature_metadata, backbone_images):
            if metadata["shape"] is None:
                device_pairs = (pair.to(self.device, torch.uint8) for pair in pairs)
                features.append([list(side) for side in zip(*device_pairs)])
                continue
            images = torch.stack(pairs, 1).to(self.device)  # (2, B, 3, H, W)
            features.append(compute_features(backbone, images.flatten(0, 1), metadata).chunk(2))
        before, after = zip(*(features[index] for index in self._feature_index))
        return (before[0], after[0]) if len(before) == 1 else (list(before), list(after))

    @torch.no_grad()
    def _generate(
        self, inputs: list[_ModelInput], beams: int, length_penalty: float, sentence_ids: Sequence[Tensor | None] = ()
    ) -> list[Caption]:
        """Caption pairs. Each entry of `sentence_ids` is (T,) or None. Except in the decoding, the host waits once for the device."""
        if isinstance(self._captioner, AnsweringModel):
            pixels = (model_input.images[0].byte().permute(0, 2, 3, 1).numpy() for model_input in inputs)
            answers = self._captioner.answer([(Image.fromarray(one), Image.fromarray(two)) for one, two in pixels])
            texts = [clean_answer(answer.text, self._captioner.hyperparameters["sentences"]) for answer in answers]
            captions = []
            for text, one, answer in zip(texts, inputs, answers):
                box = self._find_box(text, one, None, None, 0, [])
                captions.append(Caption(text, None, (), notes=one.notes, box=box, fit=one.fit, answer=answer))
            return captions
        before, after = self._compute_features(inputs)
        memory = self._captioner.encode(before, after)
        sentence_scores = []  # (B,) each
        for ids in sentence_ids:
            score = torch.full((len(inputs),), -math.inf, device=self.device)
            if ids is not None:
                score = token_log_probabilities(self._captioner, memory, ids.expand(len(inputs), -1)).sum(1)
            sentence_scores.append(score)
        hypotheses = greedy(self._captioner, memory, self.max_length)[:, None]
        if beams > 1:  # beam search can miss the greedy caption even if that caption has a higher score
            beam_ids = beam_search(self._captioner, memory, self.max_length, beams, length_penalty)
            length = max(beam_ids.shape[2], hypotheses.shape[2])
            eos_id = self._captioner.eos_id
            padded = [pad(ids, (0, length - ids.shape[2]), value=eos_id) for ids in (beam_ids, hypotheses)]
            hypotheses = torch.cat(padded, 1)  # (B, beams + 1, T)
        memory = tree_map(lambda leaf: leaf.repeat_interleave(hypotheses.shape[1], 0).contiguous(), memory)
        tokens = hypotheses.flatten(0, 1)
        scores = token_log_probabilities(self._captioner, memory, tokens).unflatten(0, hypotheses.shape[:2])
        no_change_probabilities = self._captioner.nothing_changed(before, after)
        token_counts = self._captioner.caption_mask(tokens).sum(1).view(hypotheses.shape[:2])  # with EOS, without BOS
        order = rank_beams(scores.sum(2), token_counts, length_penalty)
        estimates = [] if no_change_probabilities is None else [no_change_probabilities]
        copied = HostCopy(scores, hypotheses, token_counts, order, *sentence_scores, *estimates).wait()
        if copied[0].isnan().any():
            raise DiffcapError(NAN_PROBABILITIES)
        all_scores, all_ids, all_counts, all_ranks, *per_pair = [part.tolist() for part in copied]
        captions = []
        for row, model_input in enumerate(inputs):
            ranks = all_ranks[row]  # numbers of the hypotheses, best first
            sequences = [all_ids[row][number][: 1 + all_counts[row][number]] for number in ranks]  # with BOS
            texts = [join_characters(self.vocabulary.decode(ids)) for ids in sequences]
            best_scores, *other_scores = [all_scores[row][number] for number in ranks]  # of each token
            alternatives: dict[str, float] = {}  # several sequences may decode to one text; the best comes first
            for text, token_scores in zip(texts[1:], other_scores):
                if text != texts[0]:
                    alternatives.setdefault(text, sum(token_scores))
            spans = word_spans(self.vocabulary, sequences[0])
            words = [Word(word, sum(best_scores[index] for index in indices)) for word, indices in spans]
            captions.append(
                Caption(
                    texts[0],
                    sum(best_scores),
                    tuple(words),
                    per_pair[-1][row] if estimates else None,
                    tuple(Alternative(text, score) for text, score in alternatives.items()),
                    model_input.notes,
                    tuple(sequences[0]),
                    tuple(pair_scores[row] for pair_scores in per_pair[: len(sentence_scores)]),
                    self._find_box(texts[0], model_input, before, after, row, sequences[0]),
                    model_input.fit,
                )
            )
        return captions

    def _find_box(self, text: str, pair: _ModelInput, before: Any, after: Any, row: int, tokens: list[int]) -> Any:
        """Return `Caption.box` of the pair in this row of the features `before` and `after`, whose caption has the ids `tokens`."""
        if pair.difference is None or is_no_change(text):
            return None
        left, top, right, bottom = pair.difference
        if self._has_fixed_sizes and (right - left) * (bottom - top) > _LARGE_DIFFERENCE:
            before, after = tree_map(lambda maps: maps[row : row + 1], (before, after))
            with suppress(NotImplementedError):  # a method without attention maps
                maps = attention_of(self._captioner, self.vocabulary, before, after, tokens)
                weights = maps.after.sum(0)
                left, top, right, bottom = relative_box(weights >= weights.max() / 2) or pair.difference
        x, y, width, height = pair.frame
        upper_left = x + left * width, y + top * height
        lower_right = x + right * width, y + bottom * height
        return tuple(map(round, (*upper_left, *lower_right)))

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the weights in hexadecimal; for a vision-language model, "-" and the base model's hash follow.

        For a model that only answers, return the base model's hash; for a served one, that of its name and prompt.
        """
        if isinstance(self._captioner, AnsweringModel):
            return str(self._captioner.hyperparameters["base_sha256"])
        state = {f"captioner.{name}": value.cpu() for name, value in self._captioner.state_dict().items()}
        base_hash = getattr(self._captioner, "hyperparameters", {}).get("base_sha256")
        return weights_hash({"state_dict": state}) + (f"-{base_hash}" if base_hash else "")


def _domain_note(members: Sequence[Checkpoint]) -> str | None:
    datasets = {member.metadata["dataset"] for member in members}
    if len(datasets) == 1 and (domain := RENDERED_DOMAINS.get(datasets.pop())):
        return (
            f"this captioner was trained on rendered {domain} only; its captions of other images, such as photographs, are unreliable, "
            "even where it gives its words a probability of 100 %."
        )
    first = next((member.metadata for member in members if member.metadata["stage"] == ZERO_SHOT), None)
    if first is None:
        return None
    model = describe_origin(first["base"], first["revision"], first["licence"])
    if isinstance(members[0].captioner, AnsweringModel):
        return f"{model}. Its captions may describe changes that are not there."
    return (
        f"{model}. It was not trained to compare images: its captions may describe changes that are not there, and its "
        "probabilities say little about that."
    )


def load_captioner(
    source: str | Path | Sequence[str | Path] | None = None,
    device: str = "auto",
    backbone_weights: str | None = None,
    base: str | Path | None = None,
    prompt: str | None = None,
    fit: Fit = "stretch",
    strict: bool = False,
) -> PairCaptioner:
    """Load a captioner.

    Args:
        source: a checkpoint's file; a folder that `diffcap export` or `diffcap import` wrote; `user/name` on the Hugging Face Hub; or
            the folder or name of a vision-language model, which is used without training (`Qwen/Qwen2.5-VL-3B-Instruct`), also behind a
            server with OpenAI's chat API (`openai:MODEL@http://127.0.0.1:8000/v1`). "blocks" or
            None is the small captioner of rendered `blocks` scenes that ships with the package. "tiles" is that of rendered overhead
            images. A list is an ensemble, which uses the mean of its members' probabilities; all members need the same token ids.
        device, backbone_weights, fit, strict: see `PairCaptioner`.
        base: folder or name of the base model of a fine-tuned vision-language model. None: the one that the checkpoint names.
        prompt: question to a vision-language model that is used without training; None for `diffcap.methods.vlm.model.PROMPT`.

    Raises:
        DiffcapError: a checkpoint is missing, unreadable or cannot caption, or members have different vocabularies.

    Example:
        >>> load_captioner(device="cpu")("examples/before.png", "examples/after.png").text
        'the tiny yellow metal cylinder has appeared'
    """
    source = DEFAULT_CAPTIONER if source is None else source
    sources = [source] if isinstance(source, str | Path) else source
    if not sources:
        raise DiffcapError(
            "the list of checkpoints is empty; name one, or omit the list for the captioner that ships with diffcap."
        )
    # A path that exists is preferred to the name of a shipped captioner.
    checkpoints = [path if Path(path).exists() else SHIPPED_CAPTIONERS.get(str(path), path) for path in sources]
    return PairCaptioner(load_members(checkpoints, base, prompt), device, backbone_weights, fit, strict)


def _check_pairs(pairs: Iterable[tuple[Source, Source]]) -> Iterator[tuple[Source, Source]]:
    for index, pair in enumerate(pairs):
        length = len(pair) if hasattr(pair, "__len__") else None
        if length != 2 or isinstance(pair, str | bytes | Mapping | Set):
            found = type(pair).__name__ + ("" if length is None else f" of length {length}")
            raise ValueError(f"pairs[{index}] must be a pair (before, after) of images, found {found}")
        yield pair
