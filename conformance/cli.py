"""The command line. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from conformance.commands import (
    compare,
    completion,
    convert,
    explain,
    explore,
    gate,
    heads,
    listing,
    new_adapter,
    probe,
    publish,
    report,
    run,
)
from conformance.errors import ConformanceError, ExitCode
from conformance.text import printable

COMMANDS = (
    run,
    gate,
    probe,
    report,
    publish,
    compare,
    new_adapter,
    heads,
    convert,
    explore,
    listing,
    explain,
    completion,
)
"""In the order of --help."""

EXIT_CODES = {
    ExitCode.OK: "all that was to be verified was verified; deviations are findings, not failures",
    ExitCode.DEVIATES: "run --strict: a requirement of level must is not met; gate: worse than the "
    "baseline says, or the baseline is out of date; compare: worse than before; explore, "
    "reproduce: a deviation was found",
    ExitCode.USAGE: "wrong usage, an unknown name, a file that is no adapter or no record; "
    "convert: refused, and nothing is written",
    ExitCode.NOTHING_VERIFIED: "nothing was verified at all",
    ExitCode.INCOMPLETE: "incomplete: something that was to be verified was not; what was "
    "measured is kept",
    ExitCode.INTERRUPTED: "interrupted; what was measured is kept",
    ExitCode.CLOSED: "whoever read the output closed it",
}


def _epilog() -> str:
    import textwrap

    told = (
        textwrap.fill(told, 79, initial_indent=f"  {code:<4d} ", subsequent_indent=" " * 7)
        for code, told in EXIT_CODES.items()
    )
    return "exit codes:\n" + "\n".join(told)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            # Here, where a closed pipe is known for what it is, and not when the interpreter ends.
            sys.stdout.flush()
    except ConformanceError as error:
        print(f"mha-conformance: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read the output has enough; what Python still wants to flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.CLOSED
    except KeyboardInterrupt:
        print("mha-conformance: interrupted; what was measured is kept", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:
        # The shell asks what may come next; nothing else imports this.
        from conformance.commands.completion import complete

        complete(parser)
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "passes_on", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    if getattr(options, "quiet", False):
        from conformance.progress import silence

        silence()
    return options.action(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mha-conformance",
        description="Does this attention compute the same as that one, and where do they part?",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
