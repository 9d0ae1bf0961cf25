"""Convert command lines as users write them to the form that jsonargparse reads."""

from collections import deque
from collections.abc import Mapping, Sequence
from json import dumps
from typing import NamedTuple

# Names that are suggested for a misspelt option, besides the options of the parser: `pipeline.run_stage` adds the variables of an
# experiment.
experiment_options: list[str] = []


class Syntax(NamedTuple):
    """What a command accepts in addition to jsonargparse's syntax."""

    second: str = (
        ""  # option that gets the second positional argument: `caption BEFORE AFTER` is `caption BEFORE --after=AFTER`
    )
    variadic: bool = False  # any number of positional arguments form one list, as in `average A B C`
    list_options: tuple[str, ...] = ()  # list options that may be given several times
    several_values: bool = False  # one list option may have several values, as in `serve --checkpoint A B`


def normalize_arguments(arguments: Sequence[str], syntax: Mapping[str, Syntax], flags: Sequence[str]) -> list[str]:
    """Add "true" to flags, replace hyphens in option names by underscores, and write lists as JSON.

    Args:
        arguments: the command and its arguments.
        syntax: additional syntax by command.
        flags: options that may be written without "true".
    """
    form = syntax.get(next((word for word in arguments if not word.startswith("-")), ""), Syntax())
    rest, words, positionals, lists = deque(arguments), list[str](), list[str](), dict[str, list[str]]()
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        name = f"--{name[2:].replace('-', '_')}"
        if not word.startswith("--"):
            is_positional = not word.startswith("-")
            positionals += [word] if is_positional else []
            if not (is_positional and form.variadic and len(positionals) > 1):
                is_second = is_positional and form.second and len(positionals) == 3  # the first is the command
                words.append(f"{form.second}={word}" if is_second else word)
        elif name in form.list_options:
            lists.setdefault(name, []).extend([value] if equals else _take_values(rest, form.several_values))
        elif name in flags and not equals and (not rest or rest[0] not in ("true", "false")):
            words.append(f"{name}=true")
        else:
            words += [name + equals + value, *([] if equals or name == "--help" or not rest else [rest.popleft()])]
    if form.variadic and positionals[1:]:
        words.insert(words.index(positionals[0]) + 1, dumps(positionals[1:]))
    # jsonargparse refuses an option without a value.
    words += [f"{name}={dumps(values)}" if values else name for name, values in lists.items()]
    return words


def _take_values(rest: deque[str], several: bool) -> list[str]:
    """Remove the next value from `rest`, or all values up to the next option."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (several or not values):
        values.append(rest.popleft())
    return values
