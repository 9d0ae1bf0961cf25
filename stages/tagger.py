"""Train a part-of-speech tagger with Stanza: from the captions of blocks or tiles, or from any CoNLL-U file."""

import random
from typing import Literal

from diffcap.utils.console import run
from diffcap.utils.errors import DiffcapError


def make_tagger(
    out: str = "runs/tagger",
    conllu: str | None = None,
    held_out: str | None = None,
    dataset: Literal["blocks", "tiles"] = "blocks",
    scenes: int = 500,
    share: float = 0.1,
    steps: int = 400,
    width: int = 32,
    batch_size: int = 64,
    learning_rate: float = 0.01,
    word_cutoff: int = 2,
    seed: int = 0,
) -> None:
    """Train a tagger and print its accuracy on held-out sentences.

    The negatives stage reads the output folder (--tagger). The taggers that ship with the package were trained with the
    defaults, and with `--dataset tiles --scenes 1500`.

    Args:
        out: Output folder for tagger.pt, resources.json and metrics.json.
        conllu: CoNLL-U file with training sentences; by default captions of a rendered dataset, whose grammar has the tag of
            every word.
        held_out: CoNLL-U file with test sentences; by default a share of the sentences is held out.
        dataset: Rendered dataset whose captions are used without a CoNLL-U file.
        scenes: Number of its scenes; no image is rendered.
        share: Fraction of the sentences that is held out without a held-out file.
        steps: Optimiser steps.
        width: Width of the network's layers.
        batch_size: Sentences per step.
        learning_rate: Initial learning rate.
        word_cutoff: Rarer words have no embedding; they are represented by their characters only.
        seed: Seed of the scenes, the split and the training.

    Raises:
        DiffcapError: a file is missing or malformed, or the training fails.
    """
    from diffcap.text.conllu import read_conllu
    from diffcap.worlds.training.tagger import split_held_out, train_tagger

    if not 0 < share < 1:
        raise DiffcapError(f"--share is {share}; give a fraction between 0 and 1 of the sentences to hold out.")
    sentences = read_conllu(conllu) if conllu is not None else _CAPTIONS[dataset](scenes, seed)
    if held_out is not None:
        train, test = sentences, read_conllu(held_out)
    else:
        train, test = split_held_out(sentences, share, seed)
    print(f"training on {len(train):,} sentences, measuring on {len(test):,}")
    metrics = train_tagger(
        out,
        train,
        test,
        steps=steps,
        width=width,
        batch_size=batch_size,
        learning_rate=learning_rate,
        word_cutoff=word_cutoff,
        seed=seed,
    )
    print(
        f"{out}: UPOS {metrics['upos_accuracy']:.2%}, noun or adjective {metrics['noun_or_adjective_accuracy']:.2%} "
        f"of {metrics['held_out_words']:,} held-out words"
    )


def _captions_of_blocks(scenes: int, seed: int) -> list[list[tuple[str, str]]]:
    from diffcap.worlds.blocks.captions import tag, write_captions
    from diffcap.worlds.blocks.scenes import sample_triples

    groups = write_captions(sample_triples(range(scenes), seed), seed)
    return [tag(caption) for group in groups for captions in group for caption in captions]


def _captions_of_tiles(pairs: int, seed: int) -> list[list[tuple[str, str]]]:
    from diffcap.worlds.tiles.captions import write_captions
    from diffcap.worlds.tiles.changes import sample_pair
    from diffcap.worlds.tiles.tags import tag

    changes = [sample_pair(number, seed).change for number in range(pairs)]
    groups = [write_captions(random.Random(f"{seed} {number}"), change) for number, change in enumerate(changes)]
    return [tag(caption) for caption in dict.fromkeys(caption for group in groups for caption in group)]


_CAPTIONS = {"blocks": _captions_of_blocks, "tiles": _captions_of_tiles}


if __name__ == "__main__":
    run(make_tagger)
