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

    The folder it writes is what the negatives stage takes as --tagger. The tagger that ships with the package was made
    by this stage with its defaults.

    Args:
        out: the folder; it gets tagger.pt, resources.json and metrics.json.
        conllu: sentences to learn from; without it, the captions of blocks, whose grammar knows the tag of every word.
        held_out: CoNLL-U sentences to measure on; without it, a share of the others.
        scenes: triples whose captions are learned, when no CoNLL-U file is given; no image is made.
        share: how much of the sentences is held out, when no file of held-out ones is given.
        steps: updates.
        width: of the network's layers.
        batch_size: sentences an update.
        learning_rate: at the start.
        word_cutoff: words rarer than this are known by their letters only.
        seed: of the scenes, the split and the training.

    Raises:
        DiffcapError: a file is missing or malformed, or the training fails.
    """
    from diffcap.blocks_training.tagger import split_held_out, train_tagger
    from diffcap.text.conllu import read_conllu

    if not 0 < share < 1:
        raise DiffcapError(f"share must lie between 0 and 1, found {share}; it is the part of the sentences held out.")
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
