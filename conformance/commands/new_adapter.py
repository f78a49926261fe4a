"""`mha-conformance new-adapter`: files to begin with."""

from __future__ import annotations

import argparse
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from conformance.commands.shared import Commands
from conformance.errors import ConformanceError, ExitCode

FRAMEWORKS = ("torch", "jax", "tensorflow", "numpy")
KINDS = ("function", "layer")


def add_parser(commands: Commands) -> None:
    """How it is called."""
    new = commands.add_parser(
        "new-adapter",
        help="write an adapter to begin with, its test and its build",
        description="Write a commented adapter around an attention that conforms, its test, and "
        "builds for GitHub Actions and GitLab. On a terminal, what is not said is asked. Nothing "
        "is overwritten.",
    )
    new.add_argument("name", nargs="?", help="such as MyAttention or my_kernel")
    new.add_argument("--framework", choices=FRAMEWORKS, help="what it runs in")
    new.add_argument(
        "--kind",
        choices=KINDS,
        help="a function of projected heads, or a layer with weights of its own",
    )
    new.add_argument(
        "-o", "--output", type=Path, default=Path(), help="a folder for the files (default: here)"
    )
    new.set_defaults(action=_new)


def _new(options: argparse.Namespace) -> int:
    from conformance.commands.newadapter.write import Wanted, write

    wanted = Wanted(
        options.name or _asked("name", "my_attention"),
        options.framework or _asked("framework", _installed(), FRAMEWORKS),
        options.kind or _asked("kind", KINDS[0], KINDS),
    )
    written = write(wanted, options.output)
    for path in written:
        print(path)
    there = written[0]
    print("\nIt conforms as it is. See for yourself, then put your own in its place:\n")
    print(f"  mha-conformance run {shlex.quote(f'{there}:{wanted.adapter}')}")
    print(f"  pytest {shlex.quote(str(written[1]))}")
    return ExitCode.OK


def _asked(what: str, default: str, choices: tuple[str, ...] | None = None) -> str:
    """What the user says, at a terminal; anywhere else it must have been said."""
    if not sys.stdin.isatty():
        told = f"--{what} {' or '.join(choices)}" if choices else f"a name, such as {default}"
        raise ConformanceError(f"new-adapter: which {what}? say {told}")
    from rich.prompt import Prompt

    try:
        return Prompt.ask(what, choices=list(choices) if choices else None, default=default)
    except EOFError as error:
        raise ConformanceError(f"new-adapter: which {what}?") from error


def _installed() -> str:
    return next((name for name in FRAMEWORKS if find_spec(name)), FRAMEWORKS[-1])
