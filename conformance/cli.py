"""The command line. Each command imports its dependencies when it runs, so that --help is fast."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from conformance.commands import (
    convert,
    diagnose,
    explain,
    explore,
    gate,
    gpu,
    heads,
    judge,
    listing,
    long,
    matrix,
    new_adapter,
    probe,
    report,
    run,
    watch,
)
from conformance.errors import ConformanceError, ExitCode
from conformance.text import printable, silence_progress

COMMANDS = (
    run,
    diagnose,
    gate,
    probe,
    report,
    matrix,
    gpu,
    new_adapter,
    heads,
    convert,
    explore,
    long,
    judge,
    explain,
    listing,
)
"""The modules of all commands, in the order in which --help lists them."""

EXIT_CODES = {
    ExitCode.OK: "everything requested was checked; deviations are findings, not failures",
    ExitCode.DEVIATES: "run --strict or -x: a requirement of level must is not met; "
    "long --strict: a problem deviates; gate: worse than the baseline says, or the baseline is out "
    "of date; compare: worse than before; probe --strict: the adapter declares something else; "
    "explore, reproduce: a deviation was found; "
    "judge: a candidate is not right; diagnose: the output deviates; convert: the two layers "
    "differ; join: two parts disagree; matrix: so do two parts, or a command in an environment "
    "ended so",
    ExitCode.USAGE: "wrong usage, an unknown name, a file that is no adapter or no record; "
    "convert: refused, and nothing is written",
    ExitCode.NOTHING_VERIFIED: "nothing was verified, for example because every call raises",
    ExitCode.INCOMPLETE: "incomplete: something requested was not checked; what was measured is "
    "kept",
    ExitCode.INTERRUPTED: "interrupted; a record keeps what was measured",
    ExitCode.CLOSED: "whoever read the output closed it",
}


_PLACES = (
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
)
"""The errors of the operating system that say that a file cannot be where the user wants it."""


def _epilog() -> str:
    meanings = (
        textwrap.fill(meaning, 79, initial_indent=f"  {code:<4d} ", subsequent_indent=" " * 7)
        for code, meaning in EXIT_CODES.items()
    )
    return "\n".join(["exit codes:", *meanings])


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the command and return its exit code.

    If `arguments` is None, they are taken from `sys.argv`, and a command that may call an
    implementation runs in a child process if the platform can fork. A `ConformanceError` is
    printed, and its exit code is returned.

    Raises:
        SystemExit: an argument is invalid, or only help or the version was requested.
    """
    called = arguments is None and "_ARGCOMPLETE" not in os.environ and sys.argv[1:2]
    if called and called[0] in watch.COMMANDS:
        return watch.watched(lambda: _main(None))
    return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    try:
        try:
            return _run(arguments)
        finally:
            # Flush here, where a closed pipe can be handled, not when the interpreter exits.
            sys.stdout.flush()
    except ConformanceError as error:
        print(f"mha-conformance: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe: discard what Python would flush on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.CLOSED
    except OSError as error:
        if error.errno in _PLACES and error.filename is not None:
            told = f"{error.filename}: {error.strerror}; name another place"
            print(f"mha-conformance: {printable(told)}", file=sys.stderr)
            return ExitCode.USAGE
        if error.errno == errno.ENOENT and error.filename is None:
            print(f"mha-conformance: {error.strerror}; free some space", file=sys.stderr)
            return ExitCode.INCOMPLETE
        if error.errno != errno.EBADF:
            raise
        # An implementation has closed stdout; give the interpreter something to flush to.
        print("mha-conformance: standard output is closed; nothing is certain", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return ExitCode.INCOMPLETE
    except KeyboardInterrupt:
        if arguments is None:
            # A second one often follows at once, from whoever passes signals on.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("mha-conformance: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        # The shell requests completions; in all other cases argcomplete is not imported.
        from conformance.commands.listing import complete

        complete(parser)
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if not given:
        parser.print_help(sys.stderr)
        return ExitCode.USAGE
    # argparse would parse what follows "--" as its own arguments.
    end = given.index("--") if given[0] == "matrix" and "--" in given else len(given)
    options, rest = parser.parse_known_args(given[:end])
    rest += given[end + 1 :]
    # Options may be pickled, which parsers cannot be.
    of_command = vars(options).pop("parser")
    if rest and not getattr(options, "passes_on", False):
        of_command.refuse(rest)
    options.rest = rest
    if getattr(options, "quiet", False):
        silence_progress()
    return options.action(options)


class _Version(argparse.Action):
    """The action of --version: look up the version of the suite, print it and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib import metadata

        print(f"mha-conformance {metadata.version('mha-conformance')}")
        parser.exit()


FEW_CHOICES = 6
"""Up to so many choices are all named where a value is none of them."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, like those of the suite."""

    def error(self, message: str) -> NoReturn:
        """Print a line that says what is wrong and where help is, and exit."""
        end = "" if message.endswith("?") else ";"
        told = f"{printable(message)}{end} {self.prog} --help says what there is"
        self.exit(ExitCode.USAGE, f"mha-conformance: {told}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise `argparse.ArgumentError` for a value that is no choice.

        It names a similar one if there are too many choices to read.
        """
        choices = [*map(str, action.choices or ())]
        if len(choices) > FEW_CHOICES and str(value) not in choices:
            import difflib

            near = difflib.get_close_matches(str(value), choices, n=1)
            if near:
                told = f"unknown: {str(value)[:40]!r}; did you mean {near[0]}?"
                raise argparse.ArgumentError(action, told)
        super()._check_value(action, value)

    # The types of the base class are overloads for namespaces of any class.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as `argparse` does, and store the parser of the command as `parser`."""
        options, rest = super().parse_known_args(args, namespace)
        # The parser of a subcommand is done before the one that it belongs to.
        if not hasattr(options, "parser"):
            options.parser = self
        return options, rest

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Print a line about arguments that are unknown, with a similar option, and exit."""
        import difflib

        unknown = next((one for one in rest if one.startswith("-")), rest[0])
        known = [*self._option_string_actions]
        near = difflib.get_close_matches(unknown.partition("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mha-conformance",
        description="Does this attention compute the same as that one, and where do they differ?",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
