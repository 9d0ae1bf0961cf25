"""Command lines made from functions: the signature gives the options, and the docstring the help. The syntax extends jsonargparse's."""

import difflib
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jsonargparse import ArgumentParser, auto_cli

from diffcap.utils.errors import CONTROL, DiffcapError, plain_errors, printable

# More names to suggest for a misspelt option: `pipeline.run_stage` adds the variables of an experiment, such as dataset and seed.
experiment_options: list[str] = []


def shorten_error(message: str, known_options: list[str]) -> str:
    """Return an error of jsonargparse as one short line. For a misspelt option, the line suggests one of `known_options`."""
    text = " ".join(message.split())
    if extra := re.search(r"[Uu]nrecognized arguments: ([^-\s]\S*)", text):
        return f"unexpected argument {extra[1]}"
    for module, name in reversed(re.findall(r"([\w.]+)\.(\w+)", text) if " is abstract" in text else []):
        if missing := getattr(getattr(sys.modules.get(module), name, None), "__abstractmethods__", None):
            functions = ", ".join(sorted(missing))
            return f"{module}.{name} does not define {functions}, which its base class requires; add that to the class"
    nested = re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text)
    unknown = re.search(
        r"[Uu]nrecognized arguments: -*([\w.]+)|(?:[Kk]ey|[Oo]ption) ['\"]([\w.]+)['\"] is not (?:expected|accepted)",
        text,
    )
    name = ".".join(nested.groups()) if nested else next(filter(None, unknown.groups()), "") if unknown else ""
    # If the option is a class's argument, such as --model.init_args.width, the message has only its last part, width.
    given_options = (word[2:].partition("=")[0] for word in sys.argv if word.startswith("--"))
    name = next((option for option in given_options if option.endswith(f".{name}")), name) if name else ""
    if not name:
        return text[:300].rstrip(".") if len(text) <= 300 else text[:297] + "..."
    near = difflib.get_close_matches(name, [*known_options, *experiment_options], n=1, cutoff=0.6)
    return f"unknown option --{name}" + (f", did you mean --{near[0]}" if near else "")


class Syntax(NamedTuple):
    """What a command accepts in addition to jsonargparse's syntax."""

    second: str = ""  # option for the second argument: `caption BEFORE AFTER` becomes `caption BEFORE --after=AFTER`
    variadic: bool = False  # any number of positional arguments form one list, as in `average A B C`
    list_options: tuple[str, ...] = ()  # list options that may be given several times
    several_values: bool = False  # a list option may have several values, as in `serve --checkpoint A B`


def normalize_arguments(arguments: Sequence[str], syntax: Mapping[str, Syntax], flags: Sequence[str]) -> list[str]:
    """Add "=true" to `flags`, replace hyphens in option names by underscores, and write lists as JSON. `syntax` has commands as keys."""
    own_syntax = syntax.get(next((word for word in arguments if not word.startswith("-")), ""), Syntax())
    rest = deque(arguments)
    words = list[str]()
    positionals = list[str]()
    lists = dict[str, list[str]]()
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        name = f"--{name[2:].replace('-', '_')}"
        if not word.startswith("--"):
            is_positional = not word.startswith("-")
            positionals += [word] if is_positional else []
            if not (is_positional and own_syntax.variadic and len(positionals) > 1):
                is_second = is_positional and own_syntax.second and len(positionals) == 3  # the first is the command
                words.append(f"{own_syntax.second}={word}" if is_second else word)
        elif name in own_syntax.list_options:
            lists.setdefault(name, []).extend([value] if equals else _take_values(rest, own_syntax.several_values))
        elif name in flags and not equals and (not rest or rest[0] not in ("true", "false")):
            words.append(f"{name}=true")
        else:
            words += [name + equals + value, *([] if equals or name == "--help" or not rest else [rest.popleft()])]
    if own_syntax.variadic and positionals[1:]:
        words.insert(words.index(positionals[0]) + 1, json.dumps(positionals[1:]))
    # An option without a value stays, so that jsonargparse refuses it.
    words += [f"{name}={json.dumps(values)}" if values else name for name, values in lists.items()]
    return words


def _take_values(rest: deque[str], several: bool) -> list[str]:
    """Remove the next value from `rest`, or all values up to the next option."""
    values: list[str] = []
    while rest and not rest[0].startswith("--") and (several or not values):
        values.append(rest.popleft())
    return values


def parse_shard(option: str, text: str) -> tuple[int, int]:
    """Return the number of a part and the number of parts in the value of an option: 3/16 is (3, 16)."""
    numbers = re.fullmatch("([0-9]+)/([0-9]+)", text)
    if not numbers or int(numbers[1]) >= int(numbers[2]):
        raise DiffcapError(f"{option}={text} is not a part; give one of N parts as 0/N to N-1/N, such as 15/16.")
    return int(numbers[1]), int(numbers[2])


class OneLineErrorMixin:
    """Parser mixin: an error is printed as one line, without the usage of all options."""

    _actions: list[Any]
    help_option = "--help"  # the option that lists all options; error messages name it
    sources: Sequence[str] = ()  # places of the settings that are not in the command line, each as "file: section"

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and exit with status 2. If the option is not in the command line, name the file of settings that has it."""
        known_options = [option.removeprefix("--") for action in self._actions for option in action.option_strings]
        text = shorten_error(message, known_options)
        option = re.search(r"(?:unknown option --|[Kk]ey [\"'])(?:\w+\.)*(\w+)", text)
        if option and not any(re.match(rf"--(\w+\.)*{option[1]}\b", word) for word in sys.argv):
            files = [Path(name) for name in dict.fromkeys(source.partition(": ")[0] for source in self.sources)]
            places = [str(file) for file in files if file.is_file() and option[1] in file.read_text("utf-8")]
            text += f" (in {' or '.join(places)})" if places else ""
        echo(f"error: {text}; `{self.help_option}` lists every option.", err=True)
        sys.exit(2)


class OneLineErrorParser(OneLineErrorMixin, ArgumentParser):
    """jsonargparse's parser with one-line errors."""


def run(command: Callable[..., Any] | dict[str, Any], arguments: Sequence[str] | None = None, **options: Any) -> None:
    """Run a function or a subcommand's function. `arguments` replace those of the process. `options` are for jsonargparse's `auto_cli`."""
    settings = {"as_positional": False, "allow_abbrev": False, "parser_class": OneLineErrorParser, **options}
    with plain_errors():
        auto_cli(command, args=None if arguments is None else list(arguments), **settings)


def echo(*lines: str, err: bool = False) -> None:
    """Print lines to stdout, or to stderr if `err` is true. Control characters are escaped, because lines may contain text from files."""
    if lines:
        print("\n".join(map(printable, lines)), file=sys.stderr if err else sys.stdout, flush=True)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print JSON; escape control characters, and all non-ASCII letters if stdout cannot encode one (a file name that is not UTF-8)."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    text = "\n".join(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in text.split("\n"))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=indent)
    print(text, flush=True)
