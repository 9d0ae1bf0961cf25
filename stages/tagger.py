"""Train a part-of-speech tagger with Stanza: from the captions of blocks, or from any CoNLL-U file."""

from diffcap.utils.console import run
from diffcap.utils.errors import DiffcapError


def make_tagger(
    out: str = "runs/tagger",
    conllu: str | None = None,
    held_out: str | None = None,
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

    The negatives stage reads the output folder (--tagger). The tagger that ships with the package was trained with the defaults.

    Args:
        out: Output folder for tagger.pt, resources.json and metrics.json.
        conllu: CoNLL-U file with training sentences; by default captions of blocks, whose grammar has the tag of every word.
        held_out: CoNLL-U file with test sentences; by default a share of the sentences is held out.
        scenes: Number of scene triples whose captions are used without a CoNLL-U file; no image is rendered.
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
    from diffcap.blocks_training.tagger import split_held_out, train_tagger
    from diffcap.text.conllu import read_conllu

    if not 0 < share < 1:
        raise DiffcapError(f"--share is {share}; give a fraction between 0 and 1 of the sentences to hold out.")
    sentences = read_conllu(conllu) if conllu is not None else _captions_of_blocks(scenes, seed)
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
    from diffcap.datasets.blocks.captions import tag, write_captions
    from diffcap.datasets.blocks.scenes import sample_triples

    groups = write_captions(sample_triples(range(scenes), seed), seed)
    return [tag(caption) for group in groups for captions in group for caption in captions]


if __name__ == "__main__":
    run(make_tagger)
