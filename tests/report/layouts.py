"""A small rendered dataset with features, and run folders as the stages leave them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from diffcap.checkpoints.reading import FORMAT
from diffcap.datasets import read_pairs
from diffcap.evaluation.coco import write_predictions
from diffcap.evaluation.protocols import evaluate
from diffcap.evaluation.remote_sensing import WordIdScoring
from diffcap.features.writer import StoreWriter
from diffcap.methods.scorer.model import SCORER
from diffcap.models.captioner import Captioner
from diffcap.records import ChangePair, Dataset, write_dataset, write_json
from diffcap.worlds.blocks.write import write_blocks
from diffcap.worlds.tiles.write import write_tiles

METRICS = ("BLEU-4", "ROUGE-L", "CIDEr-D")


def make_dataset(folder: Path, pairs: int = 30) -> Dataset:
    official = folder / "official"
    write_blocks(official, pairs, seed=3, size=(64, 48), workers=1)
    return write_dataset(folder, "blocks", official, read_pairs("blocks", official), {"captions_only": False})


def make_tiles(folder: Path, pairs: int = 48) -> Dataset:
    """`tiles` with features by chance, of the images' order."""
    official = folder / "official"
    write_tiles(official, pairs, seed=3, workers=1)
    dataset = write_dataset(folder, "tiles", official, read_pairs("tiles", official), {"captions_only": False})
    make_store(folder, dataset.pairs, (5, 4, 4))
    return dataset


def make_store(folder: Path, pairs: Sequence[ChangePair], shape: tuple[int, int, int] = (5, 2, 3)) -> Path:
    """Features by chance."""
    paths = sorted({path for pair in pairs for path in pair.images})
    return write_store(folder / "features/toy", paths, np.random.default_rng(0).normal(size=(len(paths), *shape)))


def write_store(folder: Path, paths: Sequence[str], maps: np.ndarray) -> Path:
    writer = StoreWriter(folder, paths, maps.shape[1:], {"backbone": "toy"})
    writer.write(np.arange(len(paths)), maps)
    writer.finish()
    return folder


def make_run(
    folder: Path,
    dataset: Dataset,
    predictions: Mapping[str, str],
    seconds: Mapping[str, float],
    seed: int = 1,
    tokenizer: str = "raw",
    manifest: str | None = None,
    id_scoring: WordIdScoring | None = None,
) -> Path:
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    protocol = {"dataset": dataset.name, "split": "test", "beams": 1, "limit": None}
    notes = {"seed": seed, "method": "pcl", "manifest_sha256": manifest or dataset.info["manifest_sha256"]}
    result = evaluate(predictions, test, "raw", METRICS, protocol=protocol, provenance=notes, id_scoring=id_scoring)
    result["protocol"]["tokenizer"] = tokenizer
    result["change_probability"] = {"AUC": 0.75, "accuracy": 0.5}
    write_predictions(folder / "eval" / "predictions.json", predictions)
    write_json(folder / "eval" / "metrics.json", result)
    for stage, time in seconds.items():
        write_json(folder / stage / "finished.json", {"stage": stage, "steps": 100 * len(stage), "train_seconds": time})
    return folder


def captions_of(dataset: Dataset, wrong: int = 0) -> dict[str, str]:
    """Each test pair's last reference, but for the first `wrong` pairs a sentence about something else."""
    test = [pair for pair in dataset.pairs if pair.split == "test"]
    captioned = {pair.id: pair.captions[-1] for pair in test}
    return {**captioned, **{pair.id: "the large pink cone vanished" for pair in test[:wrong]}}


def write_checkpoint(
    path: Path, method: str, captioner: Captioner, words: Sequence[str], shape: tuple[int, int, int]
) -> Path:
    """A fine-tuning checkpoint as `diffcap.checkpoints.loading.load` reads it, of features called toy."""
    metadata = {"format": FORMAT, "version": "0", "stage": "finetune", "method": method, "dataset": "blocks", "seed": 1}
    features = {"name": "toy", "backbone": "toy", "shape": list(shape), "dtype": "float16"}
    metadata |= {"words": list(words), "vocabulary_layout": "pcl" if method == "pcl" else "rcc", "max_length": 24}
    metadata |= {"features": features, "hyperparameters": captioner.hyperparameters, "tokenizer": "ptb"}
    weights = {f"captioner.{name}": value for name, value in captioner.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"diffcap": metadata, "state_dict": weights, "global_step": 1}, path)
    return path


def make_scorer(path: Path, words: Sequence[str], shape: tuple[int, int, int] = (5, 2, 3), scale: float = 1.0) -> Path:
    """The checkpoint of a small SCORER that has learnt nothing; the larger `scale`, the less uniform is its attention."""
    torch.manual_seed(0)
    captioner = SCORER(len(words) + 4, shape[0], grid=shape[1:], max_length=24, width=16, heads=2, word_width=8)
    captioner.load_state_dict({name: scale * value for name, value in captioner.state_dict().items()})
    return write_checkpoint(path, "scorer", captioner, words, shape)
