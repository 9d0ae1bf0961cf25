"""The protocol `levir_cc` of remote-sensing change captioning: metrics of word ids, accuracies by group, and S*m.

The released evaluators (RSICCformer, Chg2Cap, Change-Agent, RSCaMa, SEN) do not score text. Hypotheses and references are the ids of a
vocabulary, written as numbers: "12 7 40". Start, end and padding are removed, and there is no further tokenisation. All rare words of
the references and all unknown words of a hypothesis have the same id, so that they match each other. METEOR finds no stems and synonyms
of the words, but its table of paraphrases has some hundred pairs of numbers ("110" and "111"). So METEOR depends on the numbers of the
words, and these must be the released ones. Everything else is as in the text protocol.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diffcap.datasets.no_change import plain
from diffcap.datasets.registry import OWN_READER, LevirProtocol, get_dataset
from diffcap.evaluation.captions import Groups, Scores
from diffcap.records import ChangePair
from diffcap.text.vocabulary import LAYOUTS, Vocabulary, build_vocabulary, tokenize_rcc_words

# The system's own vocabulary is used if it is one of these, in which the released evaluators score.
OWN_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if layout.scored_as_ids)
AVERAGED = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D")


@dataclass(frozen=True)
class LevirScoring:
    """What pairs are scored with in addition to the text protocol."""

    no_change: tuple[str, ...]  # the dataset's sentences that say that nothing has changed
    vocabulary: Vocabulary | None = None  # of the ids; None leaves the metrics of ids out
    rule: str = ""  # how the vocabulary was made, for `metrics.json`
    accuracy_only: bool = False  # leave out S*m, too


def protocol_of(dataset: str, pairs: Sequence[ChangePair]) -> LevirProtocol | None:
    """Return what the protocol needs to know of a dataset with these pairs, or None if the dataset is not scored with it.

    Datasets of one's own in Karpathy's form are scored with it. Those in diffcap's own form get the accuracy only, if they have pairs
    without change. The captions of these pairs are the no-change sentences.
    """
    spec = get_dataset(dataset)
    has_flag = any("changeflag" in pair.extra for pair in pairs)
    if spec.protocol or spec.reader != OWN_READER or not (has_flag or any(pair.is_distractor for pair in pairs)):
        return spec.protocol
    unchanged = (plain(caption) for pair in pairs if pair.is_distractor for caption in pair.captions)
    return LevirProtocol(tuple(dict.fromkeys(unchanged)) or LevirProtocol.no_change, accuracy_only=not has_flag)


def levir_scoring(spec: LevirProtocol, pairs: Iterable[ChangePair], own: object = None) -> LevirScoring:
    """Return the scoring of a dataset with these pairs; the words of all splits are counted, as in the released evaluators.

    Args:
        own: vocabulary of the captioner that wrote the captions. It is used if it has a layout of `OWN_LAYOUTS`. For other
            captioners and for files of captions, the words that occur `spec.min_count` times have an id.
    """
    if spec.accuracy_only:
        return LevirScoring(spec.no_change, accuracy_only=True)
    if isinstance(own, Vocabulary) and own.layout in OWN_LAYOUTS:
        return LevirScoring(spec.no_change, own, "the captioner's own")
    captions = (tokenize_rcc_words(caption) for pair in pairs for caption in pair.captions)
    vocabulary = build_vocabulary(captions, spec.min_count, spec.layout)
    rule = f"words that occur at least {spec.min_count} times in the captions of all splits, layout {spec.layout}"
    return LevirScoring(spec.no_change, vocabulary, rule)


def id_text(caption: str, vocabulary: Vocabulary) -> str:
    """Return the ids of a caption's words, joined by blanks.

    Captions are split as Chg2Cap's code does, which leaves full stops and question marks out. Letter case counts. A special token in
    a caption is an unknown word.
    """
    specials = {vocabulary.pad, vocabulary.bos, vocabulary.eos}
    words = tokenize_rcc_words(caption)
    ids = vocabulary.encode(words, len(words) + 3)[1:-1]
    return " ".join(str(vocabulary.unk if id in specials else id) for id in ids)


def accuracies(
    captions: Mapping[str, str], pairs: Sequence[ChangePair], groups: Groups, no_change: Sequence[str]
) -> dict[str, float]:
    """Return the share of pairs in each group (except empty ones) whose caption says rightly whether something has changed.

    A caption says that nothing has changed if it is, word for word, one of the sentences `no_change`; letter case and final full
    stops do not count.
    """
    sentences = set(map(plain, no_change))
    right = {pair.id: (plain(captions[pair.id]) in sentences) == pair.is_distractor for pair in pairs}
    return {name: sum(right[id] for id in ids) / len(ids) for name, ids in groups.items() if ids}


def with_levir_columns(scores: Scores, accuracy: Mapping[str, float], accuracy_only: bool = False) -> Scores:
    """Add "S*m", the mean of BLEU-4, METEOR, ROUGE-L and CIDEr-D if all are there, and "accuracy" (if there is one) to each group."""
    rows = {}
    for group, row in scores.items():
        averaged = [row[name] for name in AVERAGED if name in row and not accuracy_only]
        mean = {"S*m": sum(averaged) / len(AVERAGED)} if len(averaged) == len(AVERAGED) else {}
        rows[group] = {**row, **mean, **({"accuracy": accuracy[group]} if accuracy else {})}
    return rows
