"""Training of a part-of-speech tagger with Stanza's trainer, on captions of `blocks` or `tiles`, or on a CoNLL-U file."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

from diffcap.records import write_json
from diffcap.text.stanza_tagger import TaggedSentence, find_tagger, load_pipeline, read_conllu, tag_batch, write_conllu
from diffcap.utils.errors import DiffcapError
from diffcap.worlds.blocks import captions as blocks
from diffcap.worlds.blocks.scenes import sample_triples
from diffcap.worlds.tiles import captions as tiles
from diffcap.worlds.tiles.changes import sample_pair

_REPLACED_TAGS = ("NOUN", "ADJ")  # hard negatives (wrong captions) replace words with these tags


def train_tagger(
    out: Path = Path("runs/tagger"),
    conllu: str | None = None,
    dataset: Literal["blocks", "tiles"] = "blocks",
    scenes: int = 500,
    steps: int = 400,
    width: int = 32,
    seed: int = 0,
) -> None:
    """Train a part-of-speech tagger without pretrained word vectors, and print its accuracy on a tenth of the distinct sentences.

    The negatives stage reads the output folder (--tagger). The taggers that ship with the package were trained with the
    defaults, and with `--dataset tiles --scenes 1500`.

    Args:
        out: Output folder for tagger.pt, resources.json and metrics.json.
        conllu: CoNLL-U file with training sentences; by default captions of a rendered dataset with known tags.
        dataset: Rendered dataset whose captions are used without a CoNLL-U file.
        scenes: Number of scenes of that dataset; their images are not rendered.
        steps: Optimiser steps.
        width: Width of the word embedding and of each direction of the word LSTM; the character LSTM is half as wide.
        seed: Seed of the scenes, the split and the training.
    """
    sentences = read_conllu(conllu) if conllu is not None else tagged_captions(dataset, scenes, seed)
    train, test = split_held_out(sentences, seed)
    if not train:
        raise DiffcapError(f"{len(train)} training sentences and {len(test)} held-out ones; give more sentences.")
    print(f"training on {len(train):,} sentences, measuring on {len(test):,}")
    work = out / ".training"  # a folder; its results are moved to `out` at the end
    shutil.rmtree(work, ignore_errors=True)
    write_conllu(work / "train.conllu", train)
    write_conllu(work / "held_out.conllu", test)
    trainer_options = {
        "train_file": work / "train.conllu",
        "eval_file": work / "held_out.conllu",
        "output_file": work / "out.conllu",
        "save_dir": work,
        "save_name": "tagger.pt",
        "lang": "en",
        "shorthand": "en_captions",
        "seed": seed,
        **dict.fromkeys(("hidden_dim", "deep_biaff_hidden_dim", "word_emb_dim"), width),
        **dict.fromkeys(("char_hidden_dim", "transformed_dim"), width // 2),
        **dict.fromkeys(("composite_deep_biaff_hidden_dim", "tag_emb_dim"), 4),
        "char_emb_dim": 8,
        "num_layers": 1,
        "word_cutoff": 2,
        "dropout": 0.2,
        "lr": 0.01,
        "batch_size": 64,
        "max_steps": steps,
        "eval_interval": max(1, min(100, steps)),
    }
    command = [sys.executable, "-m", "stanza.models.tagger", "--no_pretrain", "--cpu"]
    command += ["--fix_eval_interval", "--augment_nopunct", "0"]
    command += [part for key, value in trainer_options.items() for part in (f"--{key}", str(value))]
    log = work / "log.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # the layers are tiny
    with log.open("w", encoding="utf-8") as output:
        result = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, check=False)
    if result.returncode or not (work / "tagger.pt").is_file():
        last_line = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        raise DiffcapError(f"Stanza's trainer failed ({last_line[:200]}); read {log}, fix the cause and run it again.")
    resources = {"lang_name": "English", "default_processors": {}, "default_dependencies": {}, "packages": {}}
    write_json(work / "resources.json", {"en": resources})
    metrics = {**measure(work, test), "trained_on_sentences": len(train), "steps": steps, "seed": seed}
    write_json(work / "metrics.json", metrics)
    for name in ("tagger.pt", "resources.json", "metrics.json"):
        (work / name).replace(out / name)
    shutil.rmtree(work)
    print(
        f"{out}: UPOS {metrics['upos_accuracy']:.2%}, noun or adjective {metrics['noun_or_adjective_accuracy']:.2%} "
        f"of {metrics['held_out_words']:,} held-out words"
    )


def tagged_captions(dataset: str, scenes: int, seed: int) -> list[TaggedSentence]:
    """Return the captions of a number of scenes of `blocks` or `tiles`, with the part-of-speech tag of each word."""
    if dataset == "blocks":
        change_captions, no_change_captions = blocks.write_captions(sample_triples(range(scenes), seed), seed)
        captions = [caption for texts in change_captions + no_change_captions for caption in texts]
        return [[(word, blocks.LEXICON[word]) for word in caption.split()] for caption in captions]
    sentences: dict[str, None] = {}  # an ordered set
    for number in range(scenes):
        change = sample_pair(number, seed).change
        sentences.update(dict.fromkeys(tiles.write_captions(Random(f"{seed} {number}"), change)))
    return [[(word, tiles.LEXICON[word]) for word in caption.split()] for caption in sentences]


def split_held_out(sentences: Sequence[TaggedSentence], seed: int) -> tuple[list[TaggedSentence], list[TaggedSentence]]:
    """Hold out a tenth of the distinct sentences, at least one. Return the other sentences with duplicates, and the held-out ones."""
    distinct = sorted({tuple(sentence) for sentence in sentences})
    chosen = Random(seed).sample(distinct, max(1, round(0.1 * len(distinct))))
    held_out = set(chosen)
    other_sentences = [sentence for sentence in sentences if tuple(sentence) not in held_out]
    return other_sentences, [list(sentence) for sentence in chosen]


def measure(folder: str | Path, gold: Sequence[TaggedSentence]) -> dict[str, Any]:
    """Return the accuracy of the tags of the words in `gold`, and the accuracy of telling `_REPLACED_TAGS` from other tags."""
    pipeline = load_pipeline(find_tagger(str(folder)))
    predicted_tags = tag_batch(pipeline, [" ".join(word for word, _ in sentence) for sentence in gold])
    true_tags = [tag for sentence in gold for _, tag in sentence]
    tag_pairs = list(zip(true_tags, (tag for tags in predicted_tags for tag in tags)))
    num_right = sum(true == predicted for true, predicted in tag_pairs)
    num_right_group = sum((true in _REPLACED_TAGS) == (predicted in _REPLACED_TAGS) for true, predicted in tag_pairs)
    return {
        "upos_accuracy": num_right / len(tag_pairs),
        "noun_or_adjective_accuracy": num_right_group / len(tag_pairs),
        "held_out_sentences": len(gold),
        "held_out_words": len(tag_pairs),
    }
