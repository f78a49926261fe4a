"""What several commands share: options, writing files, JSON output and the project's settings.

The settings are the table `[tool.mha-conformance]` in pyproject.toml, which has values for options
and arguments that are not given on the command line. The JSON output of a command is a msgspec
struct or a list of structs; its schema is derived from this type, so the two always agree.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from conformance.errors import ConformanceError, UnknownName, check_names
from conformance.records import LEVELS
from conformance.running import DEVICES

if TYPE_CHECKING:
    from conformance.cases.case import Case

T = TypeVar("T")
Struct = TypeVar("Struct", bound=msgspec.Struct)
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

IMPLEMENTATION = "a built-in name, path/to/file.py:NAME or package.module:NAME"

FILE = Path("pyproject.toml")
BASELINE = "conformance.toml"
"""The default file of known deviations."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"

OUTPUTS = {
    "record": ("conformance.records.record:Record", "everything that one run found"),
    "report": ("conformance.reports.model:Report", "records, joined into a report"),
    "list": ("conformance.commands.listing:Listing", "what mha-conformance list prints"),
    "explain": ("conformance.commands.explain:Explanation", "what mha-conformance explain prints"),
    "run": ("conformance.running.examine:Summary", "what mha-conformance run prints"),
    "probe": ("conformance.commands.probe:Results", "what mha-conformance probe prints"),
    "gate": ("conformance.reports.gate:Gate", "what mha-conformance gate prints"),
    "convert": ("conformance.commands.convert:Converted", "what mha-conformance convert prints"),
    "diagnose": (
        "conformance.arrays.diagnosis:Diagnosis",
        "what mha-conformance diagnose prints",
    ),
    "long": ("conformance.records.long:Climbs", "what mha-conformance long prints"),
    "explore": ("conformance.commands.explore:Searched", "what mha-conformance explore prints"),
    "reproduce": ("conformance.commands.explore:Searched", "what mha-conformance reproduce prints"),
    "compare": ("conformance.reports.changes:Changes", "what mha-conformance compare prints"),
}
"""The type of each JSON output, as "module:NAME", and a description, by the name of the output."""


# Options


def add_implementation(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the argument that names one implementation, or several."""
    parser.add_argument("implementation", help=IMPLEMENTATION, nargs="+" if several else None)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device, which takes "cpu" or "gpu"."""
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="where to run (default: cpu)"
    )


def add_repeatable(parser: argparse.ArgumentParser, **helps: str) -> None:
    """For each name in `helps`, add an option that may be repeated; the value is its help text."""
    for option, meaning in helps.items():
        parser.add_argument(
            f"--{option}",
            action="append",
            default=[],
            metavar=option.upper(),
            help=f"{meaning}; repeatable",
        )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add --quiet, which turns off the progress that a command shows."""
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress, only what was found"
    )


def add_files(parser: argparse._ActionsContainer, **helps: str) -> None:
    """For each name in `helps`, add an option that takes a file; the value is its help text."""
    for option, meaning in helps.items():
        parser.add_argument(f"--{option}", type=Path, metavar="FILE", help=meaning)


def add_records(parser: argparse.ArgumentParser, **helps: str) -> None:
    """For each name in `helps`, add an option that takes paths; the value is its help text."""
    for option, meaning in helps.items():
        parser.add_argument(
            f"--{option}", nargs="+", type=Path, default=[], metavar="RECORD", help=meaning
        )


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """Add --run-file, a file with the id of a run; records of other runs are then refused."""
    parser.add_argument(
        "--run-file",
        dest="run",
        type=Path,
        metavar="FILE",
        help="refuse records of other runs than the one named in this file",
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return a type of `add_argument` for whole numbers from `least` on."""

    def number(text: str) -> int:
        try:
            given = int(text)
        except ValueError:
            given = least - 1
        if given < least:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}; say a whole number from {least} on")
        return given

    return number


def positive(text: str) -> float:
    """Return the number that an option gives; a type of `add_argument` for finite ones above 0."""
    try:
        given = float(text)
    except ValueError:
        given = 0.0
    if not 0.0 < given < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}; say a number above 0")
    return given


def selected(struct: type[T], options: argparse.Namespace) -> T:
    """Return an instance of the dataclass `struct`; each field is the option of the same name."""
    names = struct.__dataclass_fields__  # type: ignore[attr-defined]
    return struct(**{name: getattr(options, name) for name in names})


class Once(argparse.Action):
    """An argparse action that stores a value, and refuses an option that is given twice."""

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
    """An argparse action that prints a JSON schema and exits.

    It works without required arguments, too. `const` is the name of an output in `OUTPUTS`.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, *_: object, option_string: str | None = None
    ) -> None:
        assert isinstance(self.const, str)
        print_json(schema(self.const))
        parser.exit()


def add_format(parser: argparse.ArgumentParser, output: str) -> None:
    """Add --format, --json and --schema; `output` is a key of `OUTPUTS`."""
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


# Inputs and outputs


def be_quiet_and_single_threaded() -> None:
    """Set environment variables that request one thread and few messages, unless they are set.

    Call this before a framework is imported. For tiny arrays, several threads would mostly wait for
    each other, and take seven times as long on a busy machine.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def one_case(pattern: str) -> Case:
    """Return the case with the id `pattern`, or the only case whose id contains or matches it.

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
    """Raise `ConformanceError` if a file could not be created at this path; call before long work.

    An existing file counts as writable if its folder is, because it would be replaced.
    """
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


def printed(struct: type[Struct], item: object, **others: object) -> Struct:
    """Return an instance of `struct` with the fields `others`, and the rest copied from `item`."""
    names = (name for name in struct.__struct_fields__ if name not in others)
    return struct(**{name: getattr(item, name) for name in names}, **others)


def schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of the output with this name in `OUTPUTS`."""
    place, description = OUTPUTS[name]
    output = msgspec.json.schema(pkgutil.resolve_name(place))
    about = {"title": f"mha-conformance {name}", "description": description}
    return {"$schema": DIALECT, **about, **output}


def print_json(output: object) -> None:
    """Print an output to stdout as indented JSON, in which unprintable characters are escaped."""
    encoded = msgspec.json.format(msgspec.json.encode(output), indent=1).decode()
    # JSON does not escape C1 control characters and bidirectional marks, which affect terminals.
    escaped = (
        char if char == "\n" or char.isprintable() else json.dumps(char)[1:-1] for char in encoded
    )
    print("".join(escaped))


# Settings


class Settings(msgspec.Struct, frozen=True):
    """The keys of the table `[tool.mha-conformance]`, or their defaults.

    Except for `resources`, each stands for the option or argument that has the same name, or the
    singular of it: `cases` stands for --case.

    Attributes:
        level: None for the default level.
        baseline: "" for the default file, `BASELINE`.
        record: the file to write results to; None for no record.
        resources: the resources that `matrix` reserves on a Ray cluster, by the name of the
            environment and then by the name of the resource.
    """

    implementations: list[str] = []
    cases: list[str] = []
    dtypes: list[str] = []
    modes: list[str] = []
    level: str | None = None
    device: str = "cpu"
    baseline: str = ""
    record: str | None = None
    resources: dict[str, dict[str, float]] = {}


def read_settings(path: Path = FILE) -> Settings:
    """Return the settings of this file, or the defaults if there is no such file or table.

    Raises:
        ConformanceError: if the file cannot be read or is not TOML, a key is unknown, or a value is
            wrong.
    """
    import tomllib

    from conformance.definition.dtypes import DTYPES

    try:
        # Some editors begin a file with a byte-order mark.
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError) as error:
        raise ConformanceError(f"{path}: cannot be read: {error}") from error
    tool = document.get("tool", {})
    table: Any = tool.get("mha-conformance", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise ConformanceError(
            f"{path}: tool.mha-conformance is no table; it begins with [tool.mha-conformance]"
        )
    try:
        check_names("key", table, Settings.__struct_fields__)
        settings = msgspec.convert(table, Settings)
        for key in ("implementations", "cases"):
            if not all(map(str.strip, getattr(settings, key))):
                raise msgspec.ValidationError(f"{key} has an empty text")
        check_names("dtype", settings.dtypes, DTYPES)
        check_names("level", [settings.level] if settings.level is not None else [], LEVELS)
        check_names("device", [settings.device], DEVICES)
    except (UnknownName, msgspec.ValidationError) as error:
        raise ConformanceError(f"{path}: [tool.mha-conformance]: {error}") from error
    return settings


def known_deviations() -> Path | None:
    """Return the path of the baseline that `gate` reads without --baseline.

    Return None if the settings name no baseline and the default file does not exist.
    """
    named = read_settings().baseline
    path = Path(named or BASELINE)
    return path if named or path.exists() else None
