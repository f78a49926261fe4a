"""Options and settings that several commands share."""

from __future__ import annotations

import argparse
import os
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

IMPLEMENTATION = "a built-in name, path/to/file.py:NAME or package.module:NAME"


def add_implementation(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the argument that names one implementation, or several."""
    nargs = {"nargs": "+"} if several else {}
    parser.add_argument("implementation", help=IMPLEMENTATION, **nargs)  # type: ignore[arg-type]


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="where to run (default: cpu)"
    )


def add_repeatable(parser: argparse.ArgumentParser, **helps: str) -> None:
    """Add options that may be repeated, by name and help."""
    for option, meaning in helps.items():
        parser.add_argument(
            f"--{option}",
            action="append",
            default=[],
            metavar=option.upper(),
            help=f"{meaning}; repeatable",
        )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add --quiet."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress, only what was found"
    )


def be_quiet_and_single_threaded() -> None:
    """Set variables of the environment; call it before a framework is imported.

    Arrays are tiny: several threads wait for each other, and take seven times as long on a busy
    machine.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


class _Schema(argparse.Action):
    """Print the schema and exit, even if required arguments are missing, as --help does."""

    def __call__(
        self, parser: argparse.ArgumentParser, *_: object, option_string: str | None = None
    ) -> None:
        from conformance.commands.formats import print_json, schema

        assert isinstance(self.const, str)
        print_json(schema(self.const))
        parser.exit()


def add_format(parser: argparse.ArgumentParser, output: str) -> None:
    """Add --format and --schema; `output` is a key of `conformance.commands.formats.OUTPUTS`."""
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="for people or for programs (default: text)",
    )
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", help="as --format json"
    )
    parser.add_argument(
        "--schema",
        action=_Schema,
        nargs=0,
        const=output,
        help="print the JSON schema of --format json, and nothing else",
    )
