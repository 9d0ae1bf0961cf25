"""From what people write on a command line to the form that jsonargparse reads."""

from collections import deque
from collections.abc import Mapping, Sequence
from json import dumps
from typing import NamedTuple


class Form(NamedTuple):
    """What may be written of one command beyond jsonargparse's form.

    Attributes:
        second: option that the second bare word stands for, as in `caption BEFORE AFTER`.
        many: the bare words, any number, are one list, as in `average A B C`.
        repeated: option with a list, which may be given several times; `words`: with several words each time, too.
    """

    second: str = ""
    many: bool = False
    repeated: str = ""
    words: bool = False


def spelled_out(arguments: Sequence[str], forms: Mapping[str, Form], flags: Sequence[str]) -> list[str]:
    """Put into jsonargparse's form what people write: flags alone, option names joined with hyphens, lists without brackets.

    Args:
        arguments: the command and what stands behind it. forms: of the commands that have one. flags: options that may stand
            without their "true".
    """
    form = forms.get(next((word for word in arguments if not word.startswith("-")), ""), Form())
    rest, words, bare, listed = deque(arguments), list[str](), list[str](), list[str]()
    asked = False  # for the list
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        name = f"--{name[2:].replace('-', '_')}"
        if not word.startswith("--"):
            plain = not word.startswith("-")
            bare += [word] if plain else []
            if not (plain and form.many and len(bare) > 1):
                words.append(f"{form.second}={word}" if plain and form.second and len(bare) == 3 else word)
        elif name == form.repeated:
            asked = True
            listed += [value] if equals else _values(rest, form.words)
        elif name in flags and not equals and (not rest or rest[0] not in ("true", "false")):
            words.append(f"{name}=true")
        else:
            words += [name + equals + value, *([] if equals or name == "--help" or not rest else [rest.popleft()])]
    if form.many and bare[1:]:
        words.insert(words.index(bare[0]) + 1, dumps(bare[1:]))
    if asked:
        words.append(f"{form.repeated}={dumps(listed)}" if listed else form.repeated)  # without a value it is refused
    return words


def _values(rest: deque[str], several: bool) -> list[str]:
    """Take an option's value off the words, or all up to the next option."""
    taken: list[str] = []
    while rest and not rest[0].startswith("--") and (several or not taken):
        taken.append(rest.popleft())
    return taken
