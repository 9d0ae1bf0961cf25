"""Patterns that recognise captions which state that nothing has changed, and lists of such captions from several datasets."""

import re


def _any_words(words: str) -> str:  # returns a pattern that matches one or more of these words
    return rf"(?:(?:{'|'.join(words.split())})\b ?)+"


# The next patterns match parts of a statement that nothing has changed. `_THING_WORDS` matches the things that are compared, such as "both
# images": one or more of these words, in any order.
_THING_WORDS = r"\b" + _any_words(
    "[12ab] above after all and animals?[12]? area before birds? both either everything exposed given images? individuals it of parts re"
    r" photo(?:graph)?s? pictures? s scenes? shots? the these they this two visible (?:left|right|second)(?=\s(?:and|image|p|scene|shot))"
)
# `_SUBJECT` matches `_THING_WORDS` only as the whole subject of a sentence, not as a part of it as in "the cars in both images".
_SUBJECT = (
    r"(?:(?<!\w )|(?<!\bin )(?<!\bof )(?<!\bon )(?<!\bthe )"
    rf"(?=(?:animals?[12]?|both|everything|it|the|these|they|this|two)\b)){_THING_WORDS}"
)
# Verbs and adverbs before "the same". The word "s" is the end of "it's". "disappears to be" occurs in hard negatives, which are captions
# with replaced words.
_ARE = _any_words(
    "about almost (?:dis)?appears? are be been both clearly completely could essentially exactly from has have"
    " in\\s(?:essence|fact|variants) is just largely like look(?:s|ed)? may members might mostly much nearly of possibly practically pretty"
    " probably re remain(?:s|ed)? s seems? shows? stay(?:s|ed)? still to very virtually visually was well were"
)
# Matches "the same animal", "identical photos" and "the same", but not "the same color", because the rest may have changed.
_SAME = (
    r"(?:(?:the )*(?:exact )?same(?: exact| identical)?|alike|identical|indistinguishable|unchanged)"
    r"(?: (?:animals?|birds?|images?|one|photo(?:graph)?s?|pictures?|scenes?|species)\b"
    r"| (?:kind|type)\b(?= of (?:an? )?(?:animal|bird)| ?(?:[^\w ]|$))"
    r"|(?= ?(?:[^\w ]|$)"
    r"| (?:and|as|aside|but|exc?ept|from|given|however|in(?! (?:colou?r|shape|size))|just?|no"
    r"|other|outside|so|taken|the|they|though|to|with)\b))"
)
_CHANGE = r"(?:(?:apparent|discern[ai]ble|major|notable|noticea?ble|obvious|real|significant|visible|visual) )*(?:changes?|differe?nces?)\b"
_VERBS = r"(?:added|altered|changed|different|modified|moved|removed|replaced)\b"
_CHANGED = rf"(?:(?:has|have|is|are|was|were) )?(?:been )?{_VERBS}(?: ?,?(?: (?:and|nor|or))? {_VERBS})*"
_FOUND = (  # what may follow "no change", such as "has been made", "to mention" or "at all"
    r"(?: (?:(?:are|can|has|have|is|was|were) (?:be(?:en)? )?)?"
    r"(?:detected|exists?|found|made|noted|noticed|observed|occurr?ed|seen|spott?ed|visible)"
    r"| to (?:describe|mention|note|report|see|spot)| (?:that )?i can see| at all)?\b"
)
_WHERE = rf"(?: here| (?:about|between|from|in|of|to|within) {_THING_WORDS}| from the (?:left|right)\b){{0,2}}"

# Pattern that matches a whole statement that nothing has changed. Each element is one alternative.
_STATEMENTS = "|".join(
    (
        rf"(?:(?:there |{_THING_WORDS})?{_ARE}(?:absolutely )?|i (?:can )?see )?\bno (?:{_CHANGE}|differents?\b){_FOUND}{_WHERE}",
        rf"(?:i (?:honestly )?|there |{_THING_WORDS})?\b(?:can ?(?:no)?t|(?:(?:are|could|did|do(?:es)?|is)(?:n ?t| not)|not))"
        r"(?: (?:an?|any|appear|be|find|have|locate|notice|observe|really|recognize|see|seem|spot|tell|the|to|visible))+"
        rf" (?:{_CHANGE}|anything different){_FOUND}{_WHERE}",
        rf"(?:almost |there is )?\bnothing (?:in {_THING_WORDS})?(?:(?:appears|seems) to )?{_CHANGED}{_WHERE}",
        rf"\bno (?:object|thing)s? {_CHANGED}{_WHERE}",
        rf"(?:i (?:believe|think) )?(?:{_SUBJECT}(?:in {_THING_WORDS}|, (?:based|going|judging) [^,.]+, )?{_ARE}"
        rf"|(?<!\w )(?:images|photos|pictures) ){_SAME}(?: as before| to me)?",
        rf"\b(?:and {_ARE}|(?<!not )of )the (?:exact )?same (?:animal|bird|scene|species|(?:kind|type) of (?:an? )?(?:animal|bird))\b",
        r"\bthe same (?:animal|bird|scene) (?:is |was )?(?:photographed|pictured|shown)\b",
        r"\beverything is still in its place",
        rf"\bwithout (?:any )?{_CHANGE}",
    )
)
_KEYWORDS = r"no|n ?t\b|same|alike|identical|indistinguishable|unchanged|still|without"  # every statement has one: a fast first test

# For each dataset, all captions of pairs without change. SECOND-CC's and Dubai-CC's captions are in the order of the authors' code. Those
# of the other datasets are in the order in which they first occur in the file of captions.
LEVIR_CC = (
    "there is no difference",
    "the two scenes seem identical",
    "the scene is the same as before",
    "no change has occurred",
    "almost nothing has changed",
)
SECOND_CC = (*LEVIR_CC[:3], "no change is occurred", "almost nothing is changed")
DUBAI_CC = (
    "nothing has changed",
    "nothing has changed in this area",
    "there is no difference",
    "all remained the same",
    "everything remains the same",
    "nothing changed in this area",
    *(
        f"no {noun}{end}"
        for noun in ("change", "changes")
        for end in ("", " in this area", " was made", " occurred in this area", " to mention")
    ),
    "there is no change to mention",
    "no difference in this area",
    "the area appears the same",
)
CLEVR_CHANGE = (
    "the scene is the same as before",
    "there is no difference",
    "the two scenes seem identical",
    "the scene remains the same",
    "no change has occurred",
    "no change was made",
    "there is no change",
    "nothing has changed",
    "nothing was modified",
)
ALL_NO_CHANGE = tuple(dict.fromkeys((*LEVIR_CC, *SECOND_CC, *DUBAI_CC, *CLEVR_CHANGE)))  # without duplicates


def plain_caption(caption: str) -> str:
    """Return a caption in lower case, with single spaces and without final full stops."""
    return " ".join(caption.lower().split()).rstrip(" .")


def is_no_change(caption: str) -> bool:
    """Return True if a caption says that nothing has changed, and nothing else.

    The captions in `ALL_NO_CHANGE`, the captions of the rendered dataset `blocks`, and other common wordings are recognised.

    Example:
        >>> [is_no_change(text) for text in ("Nothing has changed in this area.", "nothing has changed except for a new road")]
        [True, False]
    """
    statements = rf"(?:{_STATEMENTS})(?:(?:[ .,;:]|\band\b|\bso\b)+(?:{_STATEMENTS}))*"
    return re.fullmatch(statements, _pattern_text(caption)) is not None


def describes_similarity(caption: str) -> bool:
    """Return True if a part of a caption states that nothing has changed, or that both images show the same thing.

    A statement about a part or a property, such as "the same color", does not count.

    Example:
        >>> [describes_similarity(text) for text in ("they look the same, but animal2 is darker", "the same size but a longer beak")]
        [True, False]
    """
    words = _pattern_text(caption)
    return re.search(_KEYWORDS, words) is not None and re.search(_STATEMENTS, words) is not None


def _pattern_text(caption: str) -> str:
    """Return a caption in the form that the patterns expect: "don't", "don ' t" and "don t" become equal."""
    return " ".join(re.sub("['\u2019]", " ", plain_caption(caption)).split())
