"""Options and small functions that several commands share."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from conformance.errors import ConformanceError

if TYPE_CHECKING:
    from conformance.cases.case import Case

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

IMPLEMENTATION = "a built-in name, path/to/file.py:NAME or package.module:NAME"


def add_implementation(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the argument that names one implementation, or several."""
    parser.add_argument("implementation", help=IMPLEMENTATION, nargs="+" if several else None)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="where to run (default: cpu)"
    )


def add_repeatable(parser: argparse.ArgumentParser, **helps: str) -> None:
    """For each name in `helps`, add an option that may be repeated, with that help text."""
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


def add_files(parser: argparse._ActionsContainer, **helps: str) -> None:
    """For each name in `helps`, add an option that takes a file, with that help text."""
    for option, meaning in helps.items():
        parser.add_argument(f"--{option}", type=Path, metavar="FILE", help=meaning)


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """Add --run-file, for commands that read records."""
    parser.add_argument(
        "--run-file",
        dest="run",
        type=Path,
        metavar="FILE",
        help="refuse records of other runs than the one named in this file",
    )


Struct = TypeVar("Struct")


def selected(struct: type[Struct], options: argparse.Namespace) -> Struct:
    """Return an instance of a dataclass whose fields are the options with the same names."""
    names = struct.__dataclass_fields__  # type: ignore[attr-defined]
    return struct(**{name: getattr(options, name) for name in names})


def be_quiet_and_single_threaded() -> None:
    """Set environment variables that request one thread and few messages, unless they are set.

    Call this before a framework is imported. The arrays are tiny, so several threads would mostly
    wait for each other, and take seven times as long on a busy machine.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def one_case(pattern: str) -> Case:
    """Return the case with this id or, if there is none, the only case that matches the pattern.

    Raises:
        UnknownName: if no case matches.
        ConformanceError: if several cases match; the message lists them.
    """
    from conformance.cases.catalogue import find_cases
    from conformance.text import some

    cases = find_cases(pattern)
    if len(cases) > 1:
        names = some([case.id for case in cases], 12)
        raise ConformanceError(f"{pattern} finds {len(cases)} cases; say which: {names}")
    return cases[0]


def replace_file(path: Path, content: bytes) -> None:
    """Write the file completely or not at all; raise `ConformanceError` if it cannot be written."""
    from conformance.records import record

    try:
        record.replace_file(path, content)
    except OSError as error:
        raise _unwritable(path, error) from error


def check_writable(path: Path) -> None:
    """Raise `ConformanceError` unless the file can be written; call this before long work."""
    import tempfile

    if path.is_dir():
        raise ConformanceError(f"{path}: is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConformanceError(
            f"{path}: cannot be written, because there is no folder {path.parent}"
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConformanceError:
    return ConformanceError(f"{path}: cannot be written ({error.strerror}); name another place")


class Once(argparse.Action):
    """An action that stores a value, and refuses a second one instead of replacing the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Store the value, or exit with an error if the option was given before."""
        given = vars(namespace).setdefault("given", set())
        if self.dest in given:
            parser.error(f"{option_string} is given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Schema(argparse.Action):
    """An action that prints a JSON schema and exits, even if required arguments are missing."""

    def __call__(
        self, parser: argparse.ArgumentParser, *_: object, option_string: str | None = None
    ) -> None:
        from conformance.commands.formats import print_json, schema

        assert isinstance(self.const, str)
        print_json(schema(self.const))
        parser.exit()


def add_format(parser: argparse.ArgumentParser, output: str) -> None:
    """Add --format, --json and --schema; `output` is a key of `formats.OUTPUTS`."""
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
