"""Command lines made from functions: the signature gives the options, the docstring the help."""

import difflib
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, auto_cli

from diffcap.utils.command_line import experiment_options
from diffcap.utils.errors import CONTROL, plain_errors, printable


def shorten_error(message: str, known: list[str]) -> str:
    """Shorten an error of jsonargparse to one line.

    Args:
        message: the error, several lines with nested reasons.
        known: names of all options, to suggest the one that resembles a misspelt one.
    """
    text = " ".join(message.split())
    if extra := re.search(r"[Uu]nrecognized arguments: ([^-\s]\S*)", text):
        return f"unexpected argument {extra[1]}"
    for module, name in reversed(re.findall(r"([\w.]+)\.(\w+)", text) if " is abstract" in text else []):
        if missing := getattr(getattr(sys.modules.get(module), name, None), "__abstractmethods__", None):
            functions = ", ".join(sorted(missing))
            return f"{module}.{name} does not define {functions}, which its base class requires; add that to the class"
    if nested := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", text):
        return _unknown_option(f"{nested[1]}.{nested[2]}", known)
    unknown = re.search(
        r"[Uu]nrecognized arguments: -*([\w.]+)|(?:[Kk]ey|[Oo]ption) ['\"]([\w.]+)['\"] is not (?:expected|accepted)",
        text,
    )
    name = next(filter(None, unknown.groups()), "") if unknown else ""
    # The message has only the last part of a class's argument (init_args).
    name = next((given for given in map(_option, sys.argv) if given.endswith(f".{name}")), name) if name else ""
    if not name:
        return text[:300].rstrip(".") if len(text) <= 300 else text[:297] + "..."
    return _unknown_option(name, known)


def _unknown_option(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, [*known, *experiment_options], n=1, cutoff=0.6)
    return f"unknown option --{name}" + (f", did you mean --{near[0]}" if near else "")


def _option(word: str) -> str:
    return word.removeprefix("--").partition("=")[0] if word.startswith("--") else ""


class OneLineErrorMixin:
    """Parser mixin: an error is printed as one line, without the usage of all options."""

    _actions: list[Any]
    help_option = "--help"  # lists every option

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the error and exit with status 2."""
        known = [option.removeprefix("--") for action in self._actions for option in action.option_strings]
        echo(f"error: {shorten_error(message, known)}; `{self.help_option}` lists every option.", err=True)
        sys.exit(2)


class OneLineErrorParser(OneLineErrorMixin, ArgumentParser):
    """jsonargparse's parser with one-line errors."""


def run(command: Callable[..., Any] | dict[str, Any], arguments: Sequence[str] | None = None, **options: Any) -> None:
    """Run a function, or the one that a subcommand names, with the process's arguments; errors are one line."""
    settings = {"as_positional": False, "allow_abbrev": False, "parser_class": OneLineErrorParser, **options}
    with plain_errors():
        auto_cli(command, args=None if arguments is None else list(arguments), **settings)


def echo(*lines: str, err: bool = False) -> None:
    """Print lines that may contain text from files, with control characters escaped (`printable`); to stderr if `err`."""
    print("\n".join(map(printable, lines)), file=sys.stderr if err else sys.stdout, flush=True)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print JSON without escaping letters.

    Control characters are escaped. If stdout cannot encode a letter (of a file name that is not UTF-8), all letters are escaped.
    """
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    text = "\n".join(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in text.split("\n"))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=indent)
    print(text, flush=True)
