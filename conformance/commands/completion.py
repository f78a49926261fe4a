"""`mha-conformance completion`: print the shell code that completes commands, options and names."""

from __future__ import annotations

import argparse
from functools import partial

from conformance.commands.shared import Commands
from conformance.errors import ConformanceError, ExitCode

COMPLETED = ("implementation", "case", "dtype", "experiment", "name")
"""The argparse destinations of the options and arguments whose values are completed."""


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    completion = commands.add_parser(
        "completion",
        help="print what a shell needs to complete commands, options and names",
        description='Put this into ~/.bashrc: eval "$(mha-conformance completion bash)". Into '
        '~/.zshrc, after compinit: eval "$(mha-conformance completion zsh)". For fish: '
        "mha-conformance completion fish > ~/.config/fish/completions/mha-conformance.fish",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(action=_completion)


def _completion(options: argparse.Namespace) -> int:
    try:
        import argcomplete
    except ImportError as error:
        raise ConformanceError("completion needs argcomplete; pip install argcomplete") from error
    print(argcomplete.shellcode(["mha-conformance"], shell=options.shell).rstrip())
    return ExitCode.OK


def complete(parser: argparse.ArgumentParser) -> None:
    """Print completions and exit if a shell requests them; do nothing if argcomplete is missing."""
    try:
        import argcomplete
    except ImportError:
        return
    parsers = [parser]
    for each in parsers:
        for action in each._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.dest in COMPLETED and not action.choices:
                action.completer = partial(_values, action.dest)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _values(dest: str, prefix: str, **_: object) -> list[str]:
    """Return the known values of one of `COMPLETED`; for implementations, also paths of files."""
    from argcomplete.completers import FilesCompleter

    from conformance.adapter.loading import registered
    from conformance.cases.catalogue import catalogue
    from conformance.definition.dtypes import DTYPES
    from conformance.experiments import TOPICS
    from conformance.requirements import REQUIREMENTS

    cases = [case.id for case in catalogue()]
    return {
        "implementation": [*registered(), *FilesCompleter(("py",))(prefix)],
        "case": cases,
        "dtype": [*DTYPES],
        "experiment": [topic.name for topic in TOPICS],
        "name": [*(item.id for item in REQUIREMENTS), *(topic.id for topic in TOPICS), *cases],
    }[dest]
