"""Build hard negatives, which are wrong but similar captions, for the training captions (IDC-PCL, section 3.2).

The kind "retrieve" takes captions of other pairs, "replace" replaces words, and "confuse" exchanges the roles of words. A kind has several
strategies, such as "swap_animals" of "confuse". Texts are tokenised captions, whose words are joined with spaces. A negative never equals
a reference of its pair or another negative of its caption. If a pair is a distractor, or if a reference states that both images look
alike, no negative states that they look alike. Captions of other pairs are skipped if all their content words (nouns, verbs, adjectives,
numbers) occur in the references, because such captions could be true. If the paper's strategies give too few negatives, fallbacks are
tried in this order:

* "replace": other captions of the same pair with replaced words.
* "confuse" for a change pair: captions with an inverted comparison, two swapped words, or replaced words. With `Recipe.replacement`
  "matched", captions that state no change come first; without them, a model could accept each such caption without looking at the images.
* "confuse" for a distractor pair: captions of the change pair with the same before image.
* All kinds: random captions of other change pairs, and at last the words of the caption in random order.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Literal

from diffcap.datasets.no_change import describes_similarity
from diffcap.negatives.confuse import confuse
from diffcap.negatives.file import KINDS, CaptionNegatives, Negative
from diffcap.negatives.replace import WordPool, replace_words
from diffcap.negatives.retrieve import inverse_document_frequencies, most_similar, tfidf
from diffcap.negatives.words import TaggedCaption, make_tagged_caption, normalize_caption
from diffcap.records import ChangePair
from diffcap.utils.errors import DiffcapError

NUM_CANDIDATES = 64  # groups of captions with equal content words that are retrieved for each caption
_REPLACE_ATTEMPTS, _OTHER_CAPTION_ATTEMPTS, _SHUFFLE_ATTEMPTS = 8, 50, 20  # number of random texts
# Strategies of `confuse` that are tried last: after the others and, with replacement "matched", after a caption that states no change.
_FALLBACK_STRATEGIES = ("turn_comparison", "exchange_words")


@dataclass(frozen=True)
class Recipe:
    """How many negatives of each kind each caption gets, and how they are sampled."""

    retrieve: int = 2
    replace: int = 2
    confuse: int = 2
    # "pair": one caption of a pair, chosen at random, gets negatives, and all its captions share them (as in the authors' files).
    # "caption": each caption has its own negatives (not in the paper).
    scope: Literal["pair", "caption"] = "pair"
    seed: int = 0  # of all random choices
    # How new words are drawn. "uniform": from all words of the same part of speech, each with the same probability (paper). "matched",
    # not in the paper: from words of the same inflection, in proportion to their frequency, but no synonyms of a reference's words.
    replacement: Literal["uniform", "matched"] = "uniform"

    def __post_init__(self) -> None:
        counts = (self.retrieve, self.replace, self.confuse)
        if min(counts) < 0 or sum(counts) < 1:
            raise DiffcapError("retrieve, replace and confuse must be 0 or more, and not all 0; change the recipe.")


@dataclass(frozen=True)
class _PairContext:
    """A pair and the content of its references."""

    pair: ChangePair
    references: list[TaggedCaption]
    reference_content: frozenset[str]  # all content words of the references
    can_look_alike: bool  # True for a distractor pair, or if a reference states that the two images look alike

    def is_surely_wrong(self, caption: TaggedCaption) -> bool:
        """Return True if a caption of another pair has a content word that no reference has."""
        if self.can_look_alike and describes_similarity(caption.text):  # the caption could be true of this pair, too
            return False
        return not frozenset(caption.content) <= self.reference_content


class Builder:
    """Builds the negatives of one pair at a time, from the captions of all pairs of a split.

    Args:
        pairs: each with at least one caption.
        tags: sentence -> part of speech of each word (UPOS tags), for every sentence of the tokenised captions.
        progress: called with the computed and the total number of scores during the search for similar captions.
    """

    def __init__(
        self,
        pairs: Sequence[ChangePair],
        tags: Mapping[str, list[str]],
        recipe: Recipe,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.pairs, self.recipe = pairs, recipe
        self.counts: Counter[tuple[str, str]] = Counter()  # (kind, strategy) -> number of negatives built so far
        self._text_of = {caption: normalize_caption(caption) for pair in pairs for caption in pair.captions}
        distinct_texts = sorted(set(self._text_of.values()))
        self._tagged_by_text = {text: make_tagged_caption(text, tags) for text in distinct_texts}
        self._idf = inverse_document_frequencies(self._tagged_by_text.values())
        self._word_pool = WordPool(self._tagged_by_text.values())
        self._no_change_texts: set[str] = set()
        self._change_texts_by_before: dict[str, list[str]] = {}
        for pair in pairs:
            texts = [self._text_of[caption] for caption in pair.captions]
            if pair.is_distractor:
                self._no_change_texts.update(texts)
            else:
                self._change_texts_by_before.setdefault(pair.before, []).extend(texts)
        self._sorted_no_change_texts = sorted(self._no_change_texts)
        self._sorted_change_texts = sorted(set(chain(*self._change_texts_by_before.values())) - self._no_change_texts)
        # Content words -> the captions of changes with exactly these words, which are all equally similar to another caption.
        groups: dict[tuple[str, ...], list[TaggedCaption]] = {}
        for text in self._sorted_change_texts:
            groups.setdefault(self._tagged_by_text[text].content, []).append(self._tagged_by_text[text])
        self._content_groups = list(groups.values())
        if self.recipe.retrieve and self._content_groups:
            captions: Iterable[TaggedCaption] = self._tagged_by_text.values()
            if self.recipe.scope == "pair":
                captions = (self._choose_caption(pair)[0] for pair in self.pairs)
            queries = list(dict.fromkeys(caption.content for caption in captions))
            self._row_of_content = {content: row for row, content in enumerate(queries)}
            query_vectors = tfidf(queries, self._idf)
            document_vectors = tfidf(list(groups), self._idf)
            self._similar_group_indices, self._similar_scores = most_similar(
                query_vectors, document_vectors, NUM_CANDIDATES, progress
            )

    def _choose_caption(self, pair: ChangePair) -> tuple[TaggedCaption, Random]:
        """Choose the caption whose negatives all captions of a pair share; also return the random generator for further choices."""
        rng = Random(f"{self.recipe.seed} {pair.id}")
        return self._tagged_by_text[self._text_of[rng.choice(pair.captions)]], rng

    def build(self, pair: ChangePair) -> list[CaptionNegatives]:
        """Return the negatives of every caption of a pair, in the order of its captions."""
        references = [self._tagged_by_text[self._text_of[caption]] for caption in pair.captions]
        context = _PairContext(
            pair,
            references,
            frozenset(chain.from_iterable(reference.content for reference in references)),
            pair.is_distractor or any(describes_similarity(reference.text) for reference in references),
        )
        if self.recipe.scope == "pair":
            shared = self._build_for_caption(context, *self._choose_caption(pair))
            return [CaptionNegatives(pair.id, caption, shared) for caption in pair.captions]
        rows = []
        for index, (caption, tagged) in enumerate(zip(pair.captions, references)):
            rng = Random(f"{self.recipe.seed} {pair.id} {index}")
            rows.append(CaptionNegatives(pair.id, caption, self._build_for_caption(context, tagged, rng)))
        return rows

    def _build_for_caption(self, context: _PairContext, caption: TaggedCaption, rng: Random) -> list[Negative]:
        make_candidates = {"retrieve": self._retrieve, "replace": self._replace, "confuse": self._confuse}
        negatives: list[Negative] = []
        excluded = {reference.text for reference in context.references}
        for kind in KINDS:
            num_remaining: int = getattr(self.recipe, kind)
            if not num_remaining:
                continue
            candidates = make_candidates[kind](context, caption, rng)  # (strategy, text), best first
            for strategy, text in chain(candidates, self._last_resort(context, caption, rng)):
                could_be_true = context.pair.is_distractor and text in self._no_change_texts
                could_be_true |= context.can_look_alike and describes_similarity(text)
                if text in excluded or could_be_true:
                    continue
                excluded.add(text)
                negatives.append(Negative(kind, text))
                self.counts[kind, strategy] += 1
                num_remaining -= 1
                if not num_remaining:
                    break
            if num_remaining:
                raise DiffcapError(
                    f"pair {context.pair.id!r}: there are too few other captions to make negatives for {caption.text!r}; "
                    "use a dataset with more pairs, or fewer negatives per caption."
                )
        return negatives

    def _retrieve(self, context: _PairContext, caption: TaggedCaption, rng: Random) -> Iterator[tuple[str, str]]:
        if not self._content_groups:
            return
        row = self._row_of_content[caption.content]
        group_indices = self._similar_group_indices[row][self._similar_scores[row] > 0].tolist()
        if context.pair.is_distractor:  # no caption of a change is really similar to the caption of a distractor
            rng.shuffle(group_indices)
        for group in (self._content_groups[index] for index in group_indices):
            if context.is_surely_wrong(group[0]):
                yield "alike", rng.choice(group).text

    def _replace(self, context: _PairContext, caption: TaggedCaption, rng: Random) -> Iterator[tuple[str, str]]:
        if context.pair.is_distractor:
            return  # "no change was made" with a replaced word is still true, or has no meaning
        sources = [reference for reference in context.references if not describes_similarity(reference.text)]
        reference_content = context.reference_content if self.recipe.replacement == "matched" else None
        own_sources = [source for source in sources if source is caption]
        for strategy, strategy_sources in (("words replaced", own_sources), ("of another caption", sources)):
            for _ in range(_REPLACE_ATTEMPTS if strategy_sources else 0):
                text = replace_words(rng.choice(strategy_sources), self._idf, self._word_pool, reference_content, rng)
                if text is not None:
                    yield strategy, text

    def _confuse(self, context: _PairContext, caption: TaggedCaption, rng: Random) -> Iterator[tuple[str, str]]:
        confused = dict(confuse(caption, rng))  # strategy -> text
        if context.pair.is_distractor:
            # With the other strategies, the caption would still say that nothing changed.
            if "reverse_change" in confused:
                yield "reverse_change", confused["reverse_change"]
            change_captions = self._change_texts_by_before.get(context.pair.before, [])
            for text in rng.sample(change_captions, len(change_captions)):
                yield "the change that did not happen", text
            return
        yield from ((strategy, text) for strategy, text in confused.items() if strategy not in _FALLBACK_STRATEGIES)
        if self._sorted_no_change_texts and self.recipe.replacement == "matched":
            yield "no change", rng.choice(self._sorted_no_change_texts)
        if describes_similarity(caption.text):  # exchanged words would not change its meaning
            confused.pop("exchange_words", None)
        yield from ((strategy, text) for strategy, text in confused.items() if strategy in _FALLBACK_STRATEGIES)
        for strategy, text in self._replace(context, caption, rng):
            yield f"{strategy} instead", text

    def _last_resort(self, context: _PairContext, caption: TaggedCaption, rng: Random) -> Iterator[tuple[str, str]]:
        for _ in range(_OTHER_CAPTION_ATTEMPTS if self._sorted_change_texts else 0):
            text = rng.choice(self._sorted_change_texts)
            if context.is_surely_wrong(self._tagged_by_text[text]):
                yield "any other change caption", text
        for _ in range(_SHUFFLE_ATTEMPTS):
            yield "words shuffled", " ".join(rng.sample(caption.words, len(caption.words)))
