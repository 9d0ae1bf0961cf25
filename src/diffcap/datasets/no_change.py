"""Captions that say that nothing has changed."""

import re

_THERE = r"(?:there (?:is|are|was|were) )?"
_PLACE = r"(?: in (?:this|the) (?:area|scene|image))?"
_SENTENCES = (
    rf"{_THERE}no (?:changes?|differences?)(?: was made| were made| (?:has |have |is )?occurred| to mention| can be seen)?{_PLACE}",
    rf"(?:almost )?nothing (?:has |was |is )?(?:changed|modified|different){_PLACE}",
    r"(?:all|everything|the (?:scene|area)) (?:is|was|remains|remained|stays|stayed|appears|looks|seems) (?:the same|unchanged)"
    r"(?: as before)?",
    r"the two (?:scenes|images|pictures) (?:seem|look|are|appear) (?:identical|the same)",
    r"no object is different|everything is still in its place",
)
_PATTERN = re.compile("|".join(_SENTENCES))

# All sentences of the pairs without change, in the order of the files. SECOND-CC and Dubai-CC: the lists of the authors' code.
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


def plain(caption: str) -> str:
    """A caption in lower case, with single blanks and without final full stops.

    Example:
        >>> plain(" Nothing has  changed .")
        'nothing has changed'
    """
    return " ".join(caption.lower().split()).rstrip(" .")


def is_no_change(caption: str) -> bool:
    """Whether a caption is one of the sentences with which the known datasets say that nothing has changed.

    These are the five sentences of LEVIR-CC and WHU-CDC, the variants of SECOND-CC and Dubai-CC, and those of CLEVR-Change and
    `blocks`. The whole caption must be such a sentence. Letter case, repeated blanks and final full stops do not count.

    Example:
        >>> is_no_change("Nothing has changed in this area.")
        True
        >>> is_no_change("nothing has changed except for a new road")
        False
    """
    return _PATTERN.fullmatch(plain(caption)) is not None
