"""Hard negatives for every training caption: retrieved, replaced, confused, with what stands in where one fails.

No negative equals, after tokenisation, a reference of its pair or another negative of its caption, and a distractor pair
gets no caption that says that nothing changed. Where a recipe gives too little, others stand in, in this order:

* retrieve: any caption of another change pair; on a distractor pair, whose caption is like no change caption, the
  retrieved ones are drawn from the most alike at random;
* replace: another caption of the same pair with its words replaced; then as the last resort;
* confuse: on a change pair, a caption that says that nothing changed (without it such a caption would always be right,
  and distractors could be told without a look at the images), a comparison turned, two words exchanged, words replaced;
  on a distractor pair, a caption of the change pair with the same "before" image; then as the last resort;
* the last resort: a random caption of another change pair; then the words of the caption in another order.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from random import Random
from typing import Any

from diffcap.errors import DiffcapError
from diffcap.negatives.confuse import confuse
from diffcap.negatives.corpus import Sentence, WordPool, inverse_frequencies, read_sentence, says_the_same, tokenised
from diffcap.negatives.file import KINDS, CaptionNegatives, Negative
from diffcap.negatives.replace import replace_words
from diffcap.negatives.retrieve import most_similar, tfidf
from diffcap.records import ChangePair

CANDIDATES = 64  # alike captions looked at for each; those that say nothing but what the references say are left out
_LESSER = ("turn_comparison", "exchange_words")  # they stand in for a swap or a reversal
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Recipe:
    """How many negatives of each kind, and for whom.

    Attributes:
        retrieve, replace, confuse: negatives a caption.
        scope: "caption" (its own negatives for each caption), or "pair" (the released form: the same for all captions
            of a pair, made from one of them drawn by seed).
        seed: of all draws.
    """

    retrieve: int = 2
    replace: int = 2
    confuse: int = 2
    scope: str = "caption"
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.retrieve, self.replace, self.confuse) < 0 or self.retrieve + self.replace + self.confuse < 1:
            raise DiffcapError("retrieve, replace and confuse must be 0 or more, and not all 0; change the recipe.")
        if self.scope not in ("caption", "pair"):
            raise DiffcapError(f"scope must be caption or pair, found {self.scope!r}; change the recipe.")

    def settings(self) -> dict[str, Any]:
        """The values as a JSON object."""
        return asdict(self)


class Builder:
    """Everything that is known of all captions together; gives the negatives of one pair at a time.

    Args:
        pairs: the pairs of one split, each with at least one caption.
        tags: the tags of every sentence of their tokenised captions.
        recipe: what to make.
        progress: called while the alike captions are looked up, with (done, in all).

    Attributes:
        used: how many negatives each way of each kind gave, ("confuse", "swap_animals") and the like.
    """

    def __init__(
        self,
        pairs: Sequence[ChangePair],
        tags: Mapping[str, list[str]],
        recipe: Recipe,
        progress: Progress | None = None,
    ) -> None:
        self.pairs, self.recipe = pairs, recipe
        self.used: Counter[tuple[str, str]] = Counter()
        self._texts = {caption: tokenised(caption) for pair in pairs for caption in pair.captions}
        self._sentences = {text: read_sentence(text, tags) for text in sorted(set(self._texts.values()))}
        self._idf = inverse_frequencies(self._sentences.values())
        self._pool = WordPool(self._sentences.values())
        self._unchanged = sorted({self._texts[c] for pair in pairs if pair.is_distractor for c in pair.captions})
        self._no_change = frozenset(self._unchanged)
        changed = {self._texts[c] for pair in pairs if not pair.is_distractor for c in pair.captions} - self._no_change
        self._changed = sorted(changed)
        self._of_before: dict[str, list[str]] = {}
        for pair in pairs:
            if not pair.is_distractor:
                self._of_before.setdefault(pair.before, []).extend(self._texts[c] for c in pair.captions)
        self._look_up(progress)

    def _look_up(self, progress: Progress | None) -> None:
        """Find the alike change captions. Captions of the same content count as one: they would all be as alike."""
        groups: dict[tuple[str, ...], list[Sentence]] = {}
        for text in self._changed:
            groups.setdefault(self._sentences[text].content, []).append(self._sentences[text])
        self._groups = list(groups.values())
        self._group_sets = [frozenset(content) for content in groups]
        queries = list({sentence.content: None for sentence in self._sentences.values()})
        self._query = {content: row for row, content in enumerate(queries)}
        if self.recipe.retrieve and self._groups:
            documents = tfidf(list(groups), self._idf)
            self._alike, self._scores = most_similar(tfidf(queries, self._idf), documents, CANDIDATES, progress)

    def of_pair(self, pair: ChangePair) -> list[CaptionNegatives]:
        """The negatives of every caption of a pair, in the order of its captions."""
        sentences = [self._sentences[self._texts[caption]] for caption in pair.captions]
        job = _Pair(
            pair,
            sentences,
            frozenset(sentence.text for sentence in sentences),
            frozenset(term for sentence in sentences for term in sentence.content),
            any(map(says_the_same, sentences)),
        )
        if self.recipe.scope == "pair":
            random = Random(f"{self.recipe.seed} {pair.id}")
            shared = self._of_caption(job, random.choice(sentences), random)
            return [CaptionNegatives(pair.id, caption, shared) for caption in pair.captions]
        return [
            CaptionNegatives(
                pair.id, caption, self._of_caption(job, sentence, Random(f"{self.recipe.seed} {pair.id} {place}"))
            )
            for place, (caption, sentence) in enumerate(zip(pair.captions, sentences))
        ]

    def _of_caption(self, job: "_Pair", sentence: Sentence, random: Random) -> list[Negative]:
        recipes = {"retrieve": self._retrieve, "replace": self._replace, "confuse": self._confuse}
        negatives: list[Negative] = []
        taken = set(job.references)
        for kind in KINDS:
            wanted: int = getattr(self.recipe, kind)
            if not wanted:
                continue
            for way, text in chain(recipes[kind](job, sentence, random), self._last_resort(job, sentence, random)):
                if text in taken or (job.pair.is_distractor and text in self._no_change):
                    continue
                taken.add(text)
                negatives.append(Negative(kind, text))
                self.used[kind, way] += 1
                wanted -= 1
                if not wanted:
                    break
            if wanted:
                raise DiffcapError(
                    f"pair {job.pair.id!r}: there are too few other captions to make negatives for {sentence.text!r}; "
                    "give a dataset with more pairs, or fewer negatives a caption."
                )
        return negatives

    def _retrieve(self, job: "_Pair", sentence: Sentence, random: Random) -> Iterator[tuple[str, str]]:
        if not self._groups:
            return
        row = self._query[sentence.content]
        alike = [int(group) for group, score in zip(self._alike[row], self._scores[row]) if score > 0]
        if job.pair.is_distractor:
            random.shuffle(alike)
        for group in alike:
            if not self._group_sets[group] <= job.said and not (job.alike and says_the_same(self._groups[group][0])):
                yield "alike", random.choice(self._groups[group]).text

    def _replace(self, job: "_Pair", sentence: Sentence, random: Random) -> Iterator[tuple[str, str]]:
        if job.pair.is_distractor:
            return  # "no change was made": whatever is replaced, it stays true or says nothing
        sources = [each for each in job.sentences if not says_the_same(each)]
        for way, source in (
            ("words replaced", [each for each in sources if each is sentence]),
            ("of another caption", sources),
        ):
            for _ in range(8 if source else 0):
                text = replace_words(random.choice(source), self._idf, self._pool, job.said, random)
                if text is not None:
                    yield way, text

    def _confuse(self, job: "_Pair", sentence: Sentence, random: Random) -> Iterator[tuple[str, str]]:
        found = list(confuse(sentence, random))
        if job.pair.is_distractor:  # the other ways would still say that nothing changed
            yield from ((way, text) for way, text in found if way == "reverse_change")
            change = self._of_before.get(job.pair.before, [])
            yield from (("the change that did not happen", text) for text in random.sample(change, len(change)))
            return
        yield from ((way, text) for way, text in found if way not in _LESSER)
        if self._unchanged:
            yield "no change", random.choice(self._unchanged)
        yield from ((way, text) for way, text in found if way in _LESSER)
        yield from ((f"{way} instead", text) for way, text in self._replace(job, sentence, random))

    def _last_resort(self, job: "_Pair", sentence: Sentence, random: Random) -> Iterator[tuple[str, str]]:
        for _ in range(50 if self._changed else 0):
            text = random.choice(self._changed)
            other = self._sentences[text]
            if not frozenset(other.content) <= job.said and not (job.alike and says_the_same(other)):
                yield "any other change caption", text
        for _ in range(20):
            yield "words shuffled", " ".join(random.sample(sentence.words, len(sentence.words)))


@dataclass(frozen=True)
class _Pair:
    pair: ChangePair
    sentences: list[Sentence]
    references: frozenset[str]
    said: frozenset[str]  # meanings of the content words of all its references
    alike: bool  # a reference says that the two look alike; so do many captions in words of their own
