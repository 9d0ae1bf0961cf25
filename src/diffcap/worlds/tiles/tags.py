"""Part-of-speech tags of the words of `tiles` captions, to train the small tagger that ships for this dataset."""

from diffcap.utils.errors import DiffcapError

_TAGS = {
    "ADJ": "bare big blue brown cultivated dark dry existing gray identical large many new old paved red same several small white upper "
    "lower",
    "ADP": "across along as at before beside by from in into near of on through to with close next",
    "ADV": "almost down longer now out there up",
    "AUX": "are been has have is was were",
    "DET": "a an no some that the",
    "NOUN": "area block bottom building buildings center change corner difference dirt edge farmland fields forest grass grassland "
    "ground group house houses image lake land left middle part patch piece pond right river road roof row rows scene scenes side soil "
    "top trees vegetation water woodland woods",
    "NUM": "one two three four five six seven eight nine ten eleven twelve",
    "PRON": "nothing",
    "VERB": "appear appeared appears built changed cleared constructed created cut added demolished disappear disappeared disappears "
    "dried exposed formed gone grown joins meets occurred planted removed replaced seem torn turned vanished",
}
LEXICON: dict[str, str] = {word: tag for tag, words in _TAGS.items() for word in words.split()}


def tag(caption: str) -> list[tuple[str, str]]:
    """Return (word, UPOS tag) of each word; a word has the same tag in all captions of `tiles`.

    Raises:
        DiffcapError: a word does not occur in captions of `tiles`.
    """
    words = caption.split()
    for word in words:
        if word not in LEXICON:
            raise DiffcapError(f"{word!r} in {caption!r} is not a word of tiles captions; give captions of tiles only.")
    return [(word, LEXICON[word]) for word in words]
