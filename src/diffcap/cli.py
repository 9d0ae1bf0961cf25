"""The console command `diffcap`. Each command is a public function: its signature gives the options, and its docstring the help."""

import difflib
import inspect
import json
import sys
from typing import Any

from diffcap import __version__
from diffcap.experiment import RUN_VARIABLES, Experiment, parse
from diffcap.lit.launch import end_together
from diffcap.pipeline import print_paths, run_stage
from diffcap.registry import import_object
from diffcap.stages import COMMANDS, STAGES  # COMMANDS: the stages without internal ones
from diffcap.utils.console import OneLineErrorParser, Syntax, normalize_arguments, run
from diffcap.utils.errors import DiffcapError, plain_errors

FUNCTIONS = {
    "caption": "diffcap.commands.caption:caption",
    "score": "diffcap.commands.score:score",
    "compare": "diffcap.report.comparison:compare",
    "check": "diffcap.commands.check:check",
    "audit": "diffcap.commands.audit:audit",
    "average": "diffcap.commands.interchange:average",
    "import": "diffcap.commands.interchange:import_",
    "export": "diffcap.commands.interchange:export",
    "push": "diffcap.commands.interchange:push",
    "pull": "diffcap.commands.interchange:pull",
    "serve": "diffcap.web.server:serve",
    "sweep": "diffcap.commands.sweep:sweep",
    "benchmark": "diffcap.commands.benchmark:benchmark",
}
# Forms of arguments that jsonargparse, the parser of command lines, does not accept.
SYNTAX = {
    "caption": Syntax(second="--after", list_options=("--checkpoint", "--out")),
    "score": Syntax(second="--references"),
    "check": Syntax(list_options=("--checkpoint",)),
    "average": Syntax(variadic=True),
    "push": Syntax(list_options=("--pictures",), several_values=True),
    "serve": Syntax(list_options=("--checkpoint",), several_values=True),
}


class CommandParser(OneLineErrorParser):
    """Parser whose help shows that `average` takes several checkpoints."""

    def format_help(self, *formatter: Any) -> str:
        """Return the help text."""
        for action in self._actions:
            if action.dest == "checkpoints":
                action.metavar = "CHECKPOINT [CHECKPOINT ...]"
        return super().format_help(*formatter)


def main(arguments: list[str] | None = None) -> None:
    """Run `diffcap COMMAND ...`; without `arguments`, the process's own arguments are used."""
    words = sys.argv[1:] if arguments is None else arguments
    with plain_errors():
        if words and words[0] in STAGES:
            with end_together(STAGES[words[0]].is_parallel):
                run_stage(words[0], words[1:])
            return
        if words[:1] == ["paths"]:  # only the Makefile uses this command, so it is in no list of commands
            print_paths(words[1:])
            return
        if words and not words[0].startswith("-") and words[0] not in FUNCTIONS:
            similar = difflib.get_close_matches(words[0], [*FUNCTIONS, *COMMANDS], n=1)
            raise DiffcapError(
                f"unknown command {words[0]}{f', did you mean {similar[0]}' if similar else ''}; the commands are {', '.join(FUNCTIONS)}, "
                f"and the stages {', '.join(COMMANDS)}."
            )
        if words[:1] == ["serve"]:
            # The variables of an experiment (--dataset, ...) are replaced by `--checkpoint` and the experiment's checkpoint, which
            # depends on `RUN_VARIABLES` only.
            variables, options = parse(words[1:])
            if unused := [name for name in variables if name not in RUN_VARIABLES]:
                raise DiffcapError(f"--{unused[0]} has no effect on the page; leave it out.")
            checkpoint = ["--checkpoint", str(Experiment(**variables).checkpoint)] if variables else []
            words = ["serve", *checkpoint, *options]
        if words[:1] == ["sweep"] and "--" in words:  # the words after the hyphens become the option `options`
            end = words.index("--")
            words = [*words[:end], f"--options={json.dumps(words[end + 1 :])}"]
        if words[:1] == ["benchmark"]:
            variables, options = parse(words[1:])  # the variables of an experiment are one argument of the command
            words = ["benchmark", *options, *([f"--variables={json.dumps(variables)}"] if variables else [])]
        names = words[:1] if words and words[0] in FUNCTIONS else list(FUNCTIONS)
        commands: dict[str, Any] = {name: import_object(FUNCTIONS[name]) for name in names}
    run(
        commands,
        normalize_arguments(words, SYNTAX, flag_options(commands)),
        as_positional=True,
        parser_class=CommandParser,
        prog="diffcap",
        version=__version__,
        description=f"Image difference captioning. The stages of an experiment are also commands: {', '.join(COMMANDS)}.",
    )


def flag_options(commands: dict[str, Any]) -> list[str]:
    """Return the options that may be written without a value, because their default is False."""
    parameters = [
        parameter for command in commands.values() for parameter in inspect.signature(command).parameters.values()
    ]
    return [f"--{parameter.name}" for parameter in parameters if parameter.default is False]
