"""The protocol `levir_cc` of remote-sensing change captioning: metrics of word ids, accuracies by group, and S*m.

S*m is the mean of BLEU-4, METEOR, ROUGE-L and CIDEr-D. The evaluators that the authors of RSICCformer, Chg2Cap, Change-Agent,
RSCaMa and SEN published do not score text, but the ids of words in a vocabulary ("12 7 40"). The ids of start, end and padding are
removed. All rare words of the references and all unknown words of a hypothesis have the same id, so that they match each other. METEOR
cannot match stems or synonyms of ids, but its table of paraphrases contains several hundred pairs of numbers, such as "110" and "111".
Therefore METEOR depends on the ids, which must be those of the published code. All other steps are as for text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diffcap.datasets.no_change import plain_caption
from diffcap.datasets.registry import OWN_READER, WordIdProtocol, get_dataset
from diffcap.evaluation.captions import Groups
from diffcap.records import ChangePair
from diffcap.text.vocabulary import LAYOUTS, Vocabulary, build_vocabulary, tokenize_rcc_words

# A layout is the order of the special words in a vocabulary. If the vocabulary of a captioner has the layout of a published
# evaluator, the captioner is scored with the ids of this vocabulary.
RELEASED_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if layout.scores_ids)
S_M_METRICS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr-D")


@dataclass(frozen=True)
class WordIdScoring:
    """The scores to compute in addition to those of the text, and the data that they need."""

    no_change_sentences: tuple[str, ...]  # captions that say that nothing has changed
    vocabulary: Vocabulary | None = None  # gives the ids; None leaves the metrics of ids out
    vocabulary_rule: str = ""  # how the vocabulary was made, for `metrics.json`
    accuracy_only: bool = False  # add the accuracy, but neither S*m nor metrics of ids


def word_id_protocol(dataset: str, pairs: Sequence[ChangePair]) -> WordIdProtocol | None:
    """Return the settings of the protocol for a dataset with these pairs; None if the dataset is not scored with the protocol.

    If a user's dataset is in Karpathy's form (a JSON file of all images with "changeflag"), the protocol scores it. If it is in diffcap's
    form and has pairs without change, only the accuracy is added. The captions of pairs without change are the no-change sentences.
    """
    spec = get_dataset(dataset)
    if spec.protocol or spec.reader != OWN_READER:  # OWN_READER reads a user's dataset
        return spec.protocol
    has_flag = any("changeflag" in pair.extra for pair in pairs)  # only in Karpathy's form
    distractors = [pair for pair in pairs if pair.is_distractor]
    if not has_flag and not distractors:
        return None
    captions = (plain_caption(caption) for pair in distractors for caption in pair.captions)
    sentences = tuple(dict.fromkeys(captions))
    return WordIdProtocol(sentences or WordIdProtocol.no_change, accuracy_only=not has_flag)


def word_id_scoring(
    protocol: WordIdProtocol, pairs: Iterable[ChangePair], captioner_vocabulary: object = None
) -> WordIdScoring:
    """Return which additional scores to compute for a dataset with these pairs of all splits.

    The vocabulary of the captioner that wrote the captions gives the ids if its layout is one of `RELEASED_LAYOUTS`. Otherwise a vocabulary
    is built of the words that occur at least `protocol.min_count` times in all splits, as in the published evaluators.
    """
    if protocol.accuracy_only:
        return WordIdScoring(protocol.no_change, accuracy_only=True)
    if isinstance(captioner_vocabulary, Vocabulary) and captioner_vocabulary.layout in RELEASED_LAYOUTS:
        return WordIdScoring(protocol.no_change, captioner_vocabulary, "the captioner's own")
    captions = (tokenize_rcc_words(caption) for pair in pairs for caption in pair.captions)
    vocabulary = build_vocabulary(captions, protocol.min_count, protocol.layout)
    occurrence = f"at least {protocol.min_count} times in the captions of all splits"
    rule = f"words that occur {occurrence}, layout {protocol.layout}"
    return WordIdScoring(protocol.no_change, vocabulary, rule)


def id_text(caption: str, vocabulary: Vocabulary) -> str:
    """Return the ids of a caption's words, joined by spaces.

    As in Chg2Cap's code, full stops and question marks are left out, and words that differ in letter case have different ids. A special
    token in a caption is an unknown word.
    """
    specials = {vocabulary.pad, vocabulary.bos, vocabulary.eos}
    words = tokenize_rcc_words(caption)
    # The second argument is the maximal length, which must be at least 3. `encode` does not pad; [1:-1] removes bos and eos.
    word_ids = vocabulary.encode(words, len(words) + 3)[1:-1]
    return " ".join(str(vocabulary.unk if word_id in specials else word_id) for word_id in word_ids)


def accuracies(
    captions: Mapping[str, str], pairs: Sequence[ChangePair], groups: Groups, no_change_sentences: Sequence[str]
) -> dict[str, float]:
    """Return the fraction of right captions in each group that is not empty.

    A caption says "no change" if it is one of `no_change_sentences`; letter case and final full stops do not matter. A caption is right
    if it says "no change" for a pair without change, or anything else for a pair with a change.
    """
    sentences = set(map(plain_caption, no_change_sentences))
    is_right = {pair.id: (plain_caption(captions[pair.id]) in sentences) == pair.is_distractor for pair in pairs}
    return {group: sum(is_right[id] for id in ids) / len(ids) for group, ids in groups.items() if ids}
