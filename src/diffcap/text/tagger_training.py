"""Train a Stanza tagger from tagged sentences, through Stanza's own trainer, and say how good it is."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffcap.errors import DiffcapError
from diffcap.records import write_json
from diffcap.text.conllu import TaggedSentence, write_conllu
from diffcap.text.stanza_tagger import find_tagger, load_pipeline, tag_batch

_DESCRIBED = frozenset(("NOUN", "ADJ"))  # what the replaced negatives ask a tagger


def split_held_out(
    sentences: Sequence[TaggedSentence], share: float, seed: int
) -> tuple[list[TaggedSentence], list[TaggedSentence]]:
    """Draw a held-out share by seed; a sentence that stands several times is wholly on one side."""
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
    """Train a tagger without pretrained vectors and write it as `find_tagger` reads it.

    Args:
        folder: gets `tagger.pt`, `resources.json` and `metrics.json`, in this order and only when all went well.
        train: the sentences to learn from.
        held_out: the sentences that choose the best step and that the accuracy is measured on.
        steps: updates.
        width: of the word embedding and of the LSTM over words, each way; the one over letters has half of it.
        batch_size: sentences an update.
        learning_rate: of Adam, at the start.
        word_cutoff: words rarer than this are known by their letters only.
        seed: of the initial weights and the order of the sentences.

    Returns:
        `{"upos_accuracy", "noun_or_adjective_accuracy", "held_out_words", ...}`, fractions, also in `metrics.json`.

    Raises:
        DiffcapError: there is nothing to train on or to measure with, or Stanza's trainer fails.
    """
    if not train or not held_out:
        raise DiffcapError(f"{len(train)} sentences to train on and {len(held_out)} held out; give more sentences.")
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
    """Accuracy of a tagger on gold sentences: of its UPOS tags, and of the decision whether a word is noun or adjective."""
    pipeline = load_pipeline(find_tagger(str(folder)))
    found = tag_batch(pipeline, [" ".join(word for word, _ in sentence) for sentence in gold])
    pairs = [(tag, guess) for sentence, tags in zip(gold, found) for (_, tag), guess in zip(sentence, tags)]
    return {
        "upos_accuracy": sum(tag == guess for tag, guess in pairs) / len(pairs),
        "noun_or_adjective_accuracy": sum((tag in _DESCRIBED) == (guess in _DESCRIBED) for tag, guess in pairs)
        / len(pairs),
        "held_out_sentences": len(gold),
        "held_out_words": len(pairs),
    }


def _run(command: list[str], log: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # tiny layers: one is best
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode or not (log.parent / "tagger.pt").is_file():
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        raise DiffcapError(f"Stanza's trainer failed ({last[:200]}); the whole of what it said is in {log}.")
