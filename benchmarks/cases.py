"""One measurement of methods.py, alone in its process, whose peak memory is measured: a case as JSON to its times as JSON.

Letters: B pairs, T text positions, L positions of a caption, N visual tokens of one image, D width, V vocabulary.
"""

import inspect
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any
from unittest import mock

import torch
from forms import EveryLayerSCORER, TokensCLIP4IDC, dense_matching, uncached
from torch import Tensor

from diffcap.data.masking import IGNORED
from diffcap.methods.clip4idc.model import CLIP4IDCAdaptation
from diffcap.methods.pcl import model as pcl
from diffcap.methods.pcl.model import PCL
from diffcap.methods.pcl.pretraining_model import PCLPretraining
from diffcap.methods.scorer.losses import token_matching
from diffcap.models.captioner import Batch, Captioner
from diffcap.models.generation import greedy
from diffcap.registry import get_method, import_object
from diffcap.utils.linear import flop_counter

SEED = 0
WORD_MASKING = 0.15  # IDC-PCL, paper
CANDIDATES = 7  # IDC-PCL, paper: a caption and six negatives


@dataclass(frozen=True)
class Sizes:
    """The sizes of a method's data and model."""

    channels: int  # C
    grid: int  # rows and columns of a feature map, or of the pixels that CLIP4IDC reads
    width: int  # D
    length: int  # L
    vocabulary: int = 76  # V
    network: str | dict[str, Any] = ""  # CLIP4IDC's


PAPER = {
    "pcl": Sizes(2048, 7, 512, 40),
    "clip4idc": Sizes(3, 224, 512, 33, 49408, "ViT-B-32-quickgelu"),
}
FEATURES, PIXELS = Sizes(1024, 14, 512, 24), Sizes(3, 224, 512, 33)  # of any other method; SCORER's and DIRL's papers
TINY_CLIP = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "width": 32, "head_width": 16, "layers": 4},
    "text_cfg": {"context_length": 8, "vocab_size": 76, "width": 32, "heads": 2, "layers": 2},
}
SMALL = {"clip4idc": Sizes(3, 16, 32, 8, 76, TINY_CLIP)}
SMALL_FEATURES, SMALL_PIXELS = Sizes(16, 4, 32, 8), Sizes(3, 16, 32, 8)


def sizes_of(method: str, small: bool) -> Sizes:
    """The sizes of a method's paper, or tiny ones."""
    others = (SMALL_FEATURES, SMALL_PIXELS) if small else (FEATURES, PIXELS)
    return (SMALL if small else PAPER).get(method, others[get_method(method).reads_pixels])


def build(method: str, sizes: Sizes, form: str = "") -> Captioner:
    """A method's model with its papers' defaults; `form` "dense" is SCORER that matches in every layer, "recomputed" CLIP4IDC
    that computes its image tower's blocks again in the backward pass."""
    if method == "clip4idc":
        return TokensCLIP4IDC(
            sizes.vocabulary,
            sizes.network,
            checkpointing=form == "recomputed",
            max_length=sizes.length,
            width=sizes.width,
        )
    kind: Any = EveryLayerSCORER if form == "dense" else import_object(get_method(method).captioner)
    if method == "pcl":
        return kind(sizes.vocabulary, sizes.channels, width=sizes.width)
    given = {
        "vocabulary_size": sizes.vocabulary,
        "feature_channels": sizes.channels,
        "grid": (sizes.grid, sizes.grid),
        "image_size": sizes.grid,
        "max_length": sizes.length,
        "width": sizes.width,
    }
    return kind(**{name: given[name] for name in inspect.signature(kind).parameters if name in given})


def maps(batch: int, sizes: Sizes) -> Tensor:
    """Feature maps (B, C, h, w) as a ResNet's last ReLU leaves them: half zeros; or pixels (B, 3, h, w), uint8."""
    if sizes.channels == 3:
        return torch.randint(0, 256, (batch, sizes.channels, sizes.grid, sizes.grid), dtype=torch.uint8)
    return torch.randn(batch, sizes.channels, sizes.grid, sizes.grid).relu_()


def captions(batch: int, sizes: Sizes, bos_id: int, eos_id: int, first: int, beyond: int, pad: int = 0) -> Tensor:
    """Ids (B, L): an opening token, words from id `first` to `beyond`, a closing token, padding; from half of L to all of it."""
    tokens = torch.randint(first, beyond, (batch, sizes.length))
    last = torch.randint(sizes.length // 2, sizes.length, (batch, 1))
    place = torch.arange(sizes.length)
    tokens[:, 0] = bos_id
    return tokens.masked_fill(place == last, eos_id).masked_fill(place > last, pad)


def training_batch(model: Captioner, method: str, batch: int, streams: int, sizes: Sizes) -> Batch:
    """What `Captioner.loss` reads: `batch` before maps, `streams` times as many after maps and captions."""
    data: Batch = {"before": maps(batch, sizes), "after": maps(batch * streams, sizes)}
    beyond = sizes.vocabulary
    if method == "clip4idc":
        return {**data, "tokens": captions(batch * streams, sizes, beyond - 2, beyond - 1, 0, beyond - 2, beyond)}
    if method != "pcl":
        bos_id, eos_id = model.bos_id, model.eos_id
        first, beyond = (1, min(bos_id, eos_id)) if eos_id == beyond - 1 else (max(bos_id, eos_id) + 1, beyond)
        return {**data, "tokens": captions(batch * streams, sizes, bos_id, eos_id, first, beyond)}
    tokens = captions(batch, sizes, pcl.BOS, pcl.EOS, pcl.MASK + 1, beyond)
    return {**data, **masked(tokens), "is_change": torch.arange(batch) % 2}


def masked(tokens: Tensor) -> Batch:
    """IDC-PCL's entries for captions with masked words, at least one in each."""
    hide = (tokens > pcl.MASK) & (torch.rand(tokens.shape) < WORD_MASKING)
    hide[:, 1] = True
    return {"mlm_tokens": tokens.masked_fill(hide, pcl.MASK), "mlm_labels": tokens.masked_fill(~hide, IGNORED)}


def pretraining_batch(batch: int, sizes: Sizes) -> Batch:
    """What IDC-PCL's MLM and FDA read: maps, captions with masked words, and each pair's caption with six negatives."""
    tokens = captions(batch * CANDIDATES, sizes, pcl.BOS, pcl.EOS, pcl.MASK + 1, sizes.vocabulary)
    negatives = {"fda_captions": tokens.unflatten(0, (batch, CANDIDATES))}
    return {**masked(tokens[:batch]), "before": maps(batch, sizes), "after": maps(batch, sizes), **negatives}


def first_stage(kind: str, batch: int, sizes: Sizes, timed: "Timer") -> dict[str, Any]:
    """`timed_steps` of a task of IDC-PCL's pre-training, "MLM" or "FDA", or of CLIP4IDC's adaptation, "retrieval"."""
    model: Any
    if kind == "retrieval":
        model, beyond = CLIP4IDCAdaptation(sizes.network, max_length=min(32, sizes.length)).train(), sizes.vocabulary
        tokens = captions(batch, sizes, beyond - 2, beyond - 1, 0, beyond - 2, beyond)[:, :32]
        data: Batch = {"before": maps(batch, sizes), "after": maps(batch, sizes), "tokens": tokens}
    else:
        model = PCLPretraining(sizes.vocabulary, sizes.channels, width=sizes.width).train()
        data = pretraining_batch(batch, sizes)

    def loss() -> Tensor:
        return model.loss(data) if kind == "retrieval" else model.loss(kind.lower(), data)["loss"]

    check, seconds = timed_steps(model, loss, timed)
    return {"items_per_s": batch / seconds, "check": check}


def timed_steps(model: torch.nn.Module, loss_of: Callable[[], Tensor], timed: "Timer") -> tuple[list[float], float]:
    """Loss and gradient norm without dropout at the initial weights, and the seconds of a step: loss, backward and Adam."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=2e-4, fused=True)

    def backward() -> float:
        loss = loss_of()
        loss.backward()
        return loss.item()

    def step() -> None:
        backward()
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    loss = backward()
    norms = [weight.grad.norm() for weight in model.parameters() if weight.grad is not None]
    optimizer.zero_grad()
    model.train()
    return [loss, torch.linalg.vector_norm(torch.stack(norms)).item()], timed(step)


def training(
    method: str, form: str, batch: int, streams: int, precision: str, sizes: Sizes, timed: "Timer"
) -> dict[str, Any]:
    """`timed_steps` of fine-tuning; one item is one before map, with both its streams where there are two."""
    model = build(method, sizes, form)
    data = training_batch(model, method, batch, streams, sizes)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return model.loss(data)["loss"]

    matching = dense_matching if form == "dense" else token_matching
    by_mkl = mock.patch("diffcap.utils.linear.USE_ONEDNN", False)
    with (
        mock.patch("diffcap.methods.scorer.model.token_matching", matching),
        by_mkl if form == "MKL" else nullcontext(),
    ):
        check, seconds = timed_steps(model, loss, timed)
    return {"items_per_s": batch / seconds, "check": check}


def matching(form: str, batch: int, sizes: Sizes, timed: "Timer") -> dict[str, Any]:
    """Both passes of the matching of B images with B images; the loss keeps every image's match with its own."""
    query, key = (torch.randn(batch, sizes.grid**2, sizes.width, requires_grad=True) for _ in range(2))
    match = dense_matching if form == "dense" else token_matching
    norms: list[list[float]] = []

    def step() -> None:
        query.grad = key.grad = None
        score = match(query, key)
        (score.diagonal().sum() - score.logsumexp(1).sum()).backward()
        assert query.grad is not None and key.grad is not None
        norms.append([score.mean().item(), query.grad.norm().item(), key.grad.norm().item()])

    seconds = timed(step)
    return {"items_per_s": batch / seconds, "check": norms[0]}


def decoding(
    method: str, form: str, batch: int, sizes: Sizes, timed: "Timer", from_pixels: bool = True
) -> dict[str, Any]:
    """Feature maps to words, greedily; closing token and padding are forbidden, so that every caption has all L positions.

    CLIP4IDC: pixels to words, or from what its image tower made of them.
    """
    model = build(method, sizes).eval()
    before, after = maps(batch, sizes), maps(batch, sizes)
    with torch.no_grad():
        if isinstance(model, TokensCLIP4IDC):
            model.word_bias[model.eos_id] = float("-inf")
            if not from_pixels:
                before = after = model.encode_pixels(before, after)
        else:  # a captioner of another package may have no such layer; then its captions may end early
            decoder = model.trunk if isinstance(model, PCL) else getattr(model, "decoder", None)
            classifier: Any = getattr(decoder, "output_layer", None) or getattr(decoder, "logit", None)
            if classifier is not None:
                classifier.bias[[0, model.eos_id]] = float("-inf")
    token_ids: list[Tensor] = []
    with torch.no_grad():
        if form == "cached":
            seconds = timed(lambda: token_ids.append(greedy(model, model.encode(before, after), sizes.length)))
        else:
            seconds = timed(lambda: token_ids.append(uncached(model, before, after, sizes.length)))
    return {"items_per_s": batch / seconds, "words": token_ids[0].tolist()}


class Timer:
    """Seconds of a call: the median of `repeats`, after one whose matrix products are counted."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.seconds = repeats, [0.0]  # of every timed call
        self.gflop = 0.0  # of a call's matrix products and convolutions, a multiplication and an addition each

    def __call__(self, call: Callable[[], Any]) -> float:
        """Run and time it."""
        self.seconds = []
        with flop_counter() as counter:
            call()
        self.gflop = counter.get_total_flops() / 1e9
        for _ in range(self.repeats):
            start = time.perf_counter()
            call()
            self.seconds.append(time.perf_counter() - start)
        return median(self.seconds)


def peak_mb() -> float:
    """The most memory that this process has held so far, in MB (1e6 bytes)."""
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held / 1e6 if sys.platform == "darwin" else held * 1024 / 1e6  # bytes there, KiB here


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case of `methods.cases`.

    Returns items_per_s, seconds (of every repeat), peak_mb, libraries_mb (the peak before anything was made), gflop (see `Timer`),
    threads, sizes, and `check` or `words`, which do not depend on the form.
    """
    libraries = peak_mb()
    if case["threads"]:
        torch.set_num_threads(case["threads"])
    torch.manual_seed(SEED)
    method, form, batch = case["method"], case["form"], case["batch"]
    sizes, timed = sizes_of(method, case["small"]), Timer(case["repeats"])
    if case["kind"] in ("MLM", "FDA", "retrieval"):
        result = first_stage(case["kind"], batch, sizes, timed)
    elif case["kind"] == "training":
        result = training(method, form, batch, case["streams"], case["precision"], sizes, timed)
    elif case["kind"] == "matching":
        result = matching(form, batch, sizes, timed)
    else:
        result = decoding(method, form, batch, sizes, timed, case["kind"] == "captioning")
    return {
        **result,
        "seconds": timed.seconds,
        "peak_mb": peak_mb(),
        "libraries_mb": libraries,
        "gflop": timed.gflop,
        "threads": torch.get_num_threads(),
        "sizes": asdict(sizes),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
