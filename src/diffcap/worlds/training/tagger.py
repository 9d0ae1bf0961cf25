"""Train a Stanza tagger from tagged sentences with Stanza's trainer, and measure its accuracy."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcap.records import write_json
from diffcap.text.conllu import TaggedSentence, write_conllu
from diffcap.text.stanza_tagger import find_tagger, load_pipeline, tag_batch
from diffcap.utils.errors import DiffcapError

_REPLACEABLE = frozenset(("NOUN", "ADJ"))  # the tags that matter to the replaced negatives


def split_held_out(
    sentences: Sequence[TaggedSentence], share: float, seed: int
) -> tuple[list[TaggedSentence], list[TaggedSentence]]:
    """Split sentences at random into a training set and a held-out set; duplicates of a sentence are in the same set.

    Args:
        share: fraction of the distinct sentences that is held out; at least one sentence is. seed: of the draw.

    Returns:
        The training sentences with duplicates, in their order, and the held-out sentences without duplicates.
    """
    distinct = sorted({tuple(sentence) for sentence in sentences})
    chosen = random.Random(seed).sample(distinct, max(1, round(share * len(distinct))))
    held_out = set(chosen)
    return [each for each in sentences if tuple(each) not in held_out], [list(each) for each in chosen]


def train_tagger(
    folder: str | Path,
    train: Sequence[TaggedSentence],
    held_out: Sequence[TaggedSentence],
    *,
    steps: int = 400,
    width: int = 32,
    batch_size: int = 64,
    learning_rate: float = 0.01,
    word_cutoff: int = 2,
    seed: int = 0,
) -> dict[str, Any]:
    """Train a tagger without pretrained word vectors and write it in the format of `find_tagger`.

    Args:
        folder: receives `tagger.pt`, `resources.json` and `metrics.json`, in this order, after a successful training.
        train: the training sentences.
        held_out: the sentences that select the best step and measure the accuracy.
        steps: optimiser steps.
        width: of the word embedding and of each direction of the word LSTM; the character LSTM has half of it.
        batch_size: Stanza's batch size.
        learning_rate: initial learning rate of Adam.
        word_cutoff: rarer words have no embedding; they are represented by their characters only.
        seed: of the initial weights and the order of the sentences.

    Returns:
        The content of `metrics.json`: "upos_accuracy" and "noun_or_adjective_accuracy" (fractions), "held_out_words", ...

    Raises:
        DiffcapError: one of the two sets is empty, or Stanza's trainer fails.
    """
    if not train or not held_out:
        raise DiffcapError(f"{len(train)} training sentences and {len(held_out)} held-out ones; give more sentences.")
    folder = Path(folder)
    work = folder / ".training"
    shutil.rmtree(work, ignore_errors=True)
    write_conllu(work / "train.conllu", train)
    write_conllu(work / "held_out.conllu", held_out)
    settings = {
        "train_file": work / "train.conllu", "eval_file": work / "held_out.conllu", "output_file": work / "out.conllu",
        "save_dir": work, "save_name": "tagger.pt", "lang": "en", "shorthand": "en_captions", "seed": seed,
        "hidden_dim": width, "deep_biaff_hidden_dim": width, "composite_deep_biaff_hidden_dim": 4,
        "word_emb_dim": width, "char_hidden_dim": width // 2, "char_emb_dim": 8, "transformed_dim": width // 2,
        "tag_emb_dim": 4, "num_layers": 1, "word_cutoff": word_cutoff, "rec_dropout": 0, "char_rec_dropout": 0,
        "dropout": 0.2, "lr": learning_rate, "batch_size": batch_size, "max_steps": steps,
        "eval_interval": max(1, min(100, steps)),
    }  # fmt: skip
    command = [sys.executable, "-m", "stanza.models.tagger", "--mode", "train", "--no_pretrain", "--cpu"]
    command += ["--fix_eval_interval", "--augment_nopunct", "0"]
    command += [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    _run(command, work / "log.txt")
    write_json(work / "resources.json", {"en": _RESOURCES})
    metrics = {**measure(work, held_out), "trained_on_sentences": len(train), "steps": steps, "seed": seed}
    write_json(work / "metrics.json", metrics)
    for name in ("tagger.pt", "resources.json", "metrics.json"):
        (work / name).replace(folder / name)
    shutil.rmtree(work)
    return metrics


_RESOURCES: dict[str, Any] = {
    "lang_name": "English",
    "default_processors": {},
    "default_dependencies": {},
    "packages": {},
}


def measure(folder: str | Path, gold: Sequence[TaggedSentence]) -> dict[str, Any]:
    """Measure a tagger on sentences with gold tags.

    Returns:
        "upos_accuracy": fraction of words with the right tag. "noun_or_adjective_accuracy": fraction of words for which the
        decision "noun or adjective" against "other" is right. "held_out_sentences", "held_out_words": counts.
    """
    pipeline = load_pipeline(find_tagger(str(folder)))
    found = tag_batch(pipeline, [" ".join(word for word, _ in sentence) for sentence in gold])
    pairs = [(tag, guess) for sentence, tags in zip(gold, found) for (_, tag), guess in zip(sentence, tags)]
    right = sum(tag == guess for tag, guess in pairs)
    right_group = sum((tag in _REPLACEABLE) == (guess in _REPLACEABLE) for tag, guess in pairs)
    return {
        "upos_accuracy": right / len(pairs),
        "noun_or_adjective_accuracy": right_group / len(pairs),
        "held_out_sentences": len(gold),
        "held_out_words": len(pairs),
    }


def _run(command: list[str], log: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # the layers are tiny
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode or not (log.parent / "tagger.pt").is_file():
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        raise DiffcapError(f"Stanza's trainer failed ({last[:200]}); read {log}, fix the cause and run it again.")
