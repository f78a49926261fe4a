"""`mha-conformance completion`: what a shell needs to complete commands, options and names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from conformance.commands.shared import Commands
from conformance.errors import ConformanceError, ExitCode

SHELLS = ("bash", "zsh", "fish")
COMPLETED = ("implementation", "case", "dtype", "experiment", "name")
"""Destinations of the options and arguments that are completed."""

MISSING = "completion needs argcomplete; pip install argcomplete"


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    completion = commands.add_parser(
        "completion",
        help="print what a shell needs to complete commands, options and names",
        description='Put this into ~/.bashrc: eval "$(mha-conformance completion bash)". Into '
        '~/.zshrc, after compinit: eval "$(mha-conformance completion zsh)". For fish: '
        "mha-conformance completion fish > ~/.config/fish/completions/mha-conformance.fish",
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(action=_completion)


def _completion(options: argparse.Namespace) -> int:
    try:
        import argcomplete
    except ImportError as error:
        raise ConformanceError(MISSING) from error
    print(argcomplete.shellcode(["mha-conformance"], shell=options.shell).rstrip())
    return ExitCode.OK


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell, and end; does nothing where argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        return
    for action in _actions(parser):
        if action.dest in COMPLETED and not action.choices:
            action.completer = partial(_known, action.dest)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of the parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action


def _known(dest: str, prefix: str, **_: object) -> list[str]:
    """Return the possible values; for an implementation, also paths if no name fits."""
    from conformance.cases.catalogue import catalogue
    from conformance.experiments import TOPICS

    if dest == "implementation":
        from argcomplete.completers import FilesCompleter

        from conformance.adapter.loading import registered

        return [*registered(), *FilesCompleter(("py",))(prefix)]
    if dest == "dtype":
        from conformance.definition.dtypes import DTYPES

        return list(DTYPES)
    if dest == "experiment":
        return [topic.name for topic in TOPICS]
    cases = [case.id for case in catalogue()]
    if dest == "case":
        return cases
    from conformance.requirements import REQUIREMENTS

    return [*(item.id for item in REQUIREMENTS), *(topic.id for topic in TOPICS), *cases]
