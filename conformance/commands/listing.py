"""`mha-conformance list`, `schema` and `completion`: print names, JSON schemas and shell code."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from conformance.commands.shared import (
    OUTPUTS,
    Commands,
    add_format,
    print_json,
    printed,
    schema,
)
from conformance.errors import ConformanceError, ExitCode
from conformance.text import printable

if TYPE_CHECKING:
    from conformance.adapter.base import Adapter
from functools import partial


def add_parser(commands: Commands) -> None:
    """Add the parsers of `list`, `schema` and `completion` to `commands`."""
    listing = commands.add_parser(
        "list", help="list implementations, cases, experiments or requirements"
    )
    kinds = ("implementations", "cases", "experiments", "requirements")
    listing.add_argument("what", choices=kinds)
    add_format(listing, "list")
    listing.set_defaults(action=_list)

    schemas = commands.add_parser(
        "schema", help="print the JSON schema of records and of what commands print"
    )
    schemas.add_argument(
        "output", choices=OUTPUTS, metavar="OUTPUT", help=f"one of {', '.join(OUTPUTS)}"
    )
    schemas.set_defaults(action=_schema)

    completion = commands.add_parser(
        "completion",
        help="print what a shell needs to complete commands, options and names",
        description='Put this into ~/.bashrc: eval "$(mha-conformance completion bash)". Into '
        '~/.zshrc, after compinit: eval "$(mha-conformance completion zsh)". For fish: '
        "mha-conformance completion fish > ~/.config/fish/completions/mha-conformance.fish",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(action=_completion)


class ListedImplementation(msgspec.Struct, frozen=True):
    """An implementation whose adapter is registered, so that it can be named without a path.

    Attributes:
        name: the name to give to `run`.
        title: the name shown in reports; if the adapter cannot be loaded, the reason for that.
        framework: the framework that it needs; "unknown" if the adapter cannot be loaded.
        installed: whether everything that the adapter needs is installed here: the framework and
            all other packages; false if the adapter cannot be loaded.
        documentation: a link to its documentation; "" if none is declared or the adapter cannot be
            loaded.
        adapter: the location of its adapter, "module:NAME".
        missing: the modules and packages that it needs but that are not installed here; [] if the
            adapter cannot be loaded.
    """

    name: str
    title: str
    framework: str
    installed: bool
    documentation: str
    adapter: str
    missing: list[str] = []


class ListedCase(msgspec.Struct, frozen=True):
    """A case of the catalogue.

    Attributes:
        id: the value for `--case`.
        chapter: the part of the id before the first "/".
        family: the name of its shape in `conformance.cases.case.FAMILIES`.
        why: what the case does and which mistakes it catches.
        defined: whether there is an agreed answer.
        serves: ids of the requirements that are checked on the case.
    """

    id: str
    chapter: str
    family: str
    why: str
    defined: bool
    serves: list[str]


class ListedExperiment(msgspec.Struct, frozen=True):
    """An experiment; `id` without "probe/" is the value for `probe --experiment`."""

    id: str
    title: str
    question: str


class ListedRequirement(msgspec.Struct, frozen=True):
    """A requirement; `cases` is the number of cases in the catalogue on which it is checked."""

    id: str
    level: str
    sentence: str
    why: str
    cases: int


class Implementations(msgspec.Struct, frozen=True, tag_field="kind", tag="implementations"):
    """The output of `list implementations --format json`."""

    entries: list[ListedImplementation]


class Cases(msgspec.Struct, frozen=True, tag_field="kind", tag="cases"):
    """The output of `list cases --format json`."""

    entries: list[ListedCase]


class Experiments(msgspec.Struct, frozen=True, tag_field="kind", tag="experiments"):
    """The output of `list experiments --format json`."""

    entries: list[ListedExperiment]


class Requirements(msgspec.Struct, frozen=True, tag_field="kind", tag="requirements"):
    """The output of `list requirements --format json`."""

    entries: list[ListedRequirement]


Listing: TypeAlias = Implementations | Cases | Experiments | Requirements


def listing(what: str) -> Listing:
    """Return all registered implementations, all cases, all experiments or all requirements.

    Args:
        what: which of the four to list: "implementations", "cases", "experiments" or
            "requirements".
    """
    from conformance.adapter.loading import registered
    from conformance.cases.catalogue import catalogue
    from conformance.experiments import TOPICS
    from conformance.requirements import REQUIREMENTS

    if what == "implementations":
        points = registered().items()
        return Implementations([_implementation(name, point.value) for name, point in points])
    if what == "experiments":
        return Experiments([printed(ListedExperiment, topic) for topic in TOPICS])
    cases = catalogue()
    if what == "requirements":
        return Requirements(
            [
                printed(ListedRequirement, item, cases=sum(map(item.serves, cases)))
                for item in REQUIREMENTS
            ]
        )
    serves = {case: [item.id for item in REQUIREMENTS if item.serves(case)] for case in cases}
    return Cases([printed(ListedCase, case, serves=serves[case]) for case in cases])


def _implementation(name: str, place: str) -> ListedImplementation:
    from conformance.adapter.loading import load

    try:
        adapter = load(name)
    except ConformanceError as error:
        return ListedImplementation(name, str(error), "unknown", False, "", place)
    lacking = missing(adapter)
    return printed(
        ListedImplementation,
        adapter,
        name=name,
        installed=not lacking,
        adapter=place,
        missing=lacking,
    )


def missing(adapter: Adapter) -> list[str]:
    """Return the modules and packages that an adapter needs but that are not installed.

    The missing modules come first. Nothing is imported. A missing package is not listed if it has
    the same name as a missing module, or the same except for "-" instead of "_".
    """
    from importlib.util import find_spec

    from conformance.frameworks.base import package_versions

    needed = (adapter.framework, *getattr(adapter, "imports", ()))
    modules = dict.fromkeys(name.partition(".")[0] for name in needed)
    absent = [name for name in modules if find_spec(name) is None]
    there = package_versions((*adapter.packages,))
    # A package may have the same name as its module, or nearly the same.
    known = {name.replace("_", "-") for name in absent}
    return absent + [name for name in adapter.packages if name not in there and name not in known]


def _lacking(implementation: ListedImplementation) -> str:
    if implementation.installed:
        return ""
    lacking = [name for name in implementation.missing if name != implementation.framework]
    return f" ({', '.join(lacking)} not installed)" if lacking else " (not installed)"


def _list(options: argparse.Namespace) -> int:
    entries = listing(options.what)
    if options.format == "json":
        print_json(entries)
    elif isinstance(entries, Implementations):
        rows = [(it.name, it.title, it.framework + _lacking(it)) for it in entries.entries]
        _print(("name", "title", "framework"), rows)
    elif isinstance(entries, Cases):
        _print(("case", "does"), [(it.id, it.why) for it in entries.entries])
    elif isinstance(entries, Experiments):
        _print(("experiment", "asks"), [(it.id, it.question) for it in entries.entries])
    else:
        columns = ("requirement", "level", "sentence")
        _print(columns, [(it.id, it.level, it.sentence) for it in entries.entries])
    return ExitCode.OK


def _print(columns: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows as a table on a terminal, or else with tabs between the cells and no header.

    On a terminal, if any first cell is longer than half the width, there is no header either, and
    the other cells of every row are printed on a line below its first cell.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    cells = [tuple(printable(" ".join(cell.split())) for cell in row) for row in rows]
    if not console.is_terminal:
        for row in cells:
            print("\t".join(row))
        return
    if max((len(row[0]) for row in cells), default=0) > console.width // 2:
        # A sentence does not fit beside such long names, so it is printed below.
        for name, *others in cells:
            console.print(Text(name, "bold"), soft_wrap=True)
            console.print(Padding(Text(" · ".join(others)), (0, 0, 0, 4)))
        return
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = True
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _schema(options: argparse.Namespace) -> int:
    print_json(schema(options.output))
    return ExitCode.OK


COMPLETED = ("implementation", "case", "dtype", "experiment", "name")
"""The argparse destinations of the options and arguments for which `_values` returns completions.

Options and arguments with `choices` are left out; argcomplete completes their choices.
"""


def _completion(options: argparse.Namespace) -> int:
    try:
        import argcomplete
    except ImportError as error:
        raise ConformanceError("completion needs argcomplete; pip install argcomplete") from error
    print(argcomplete.shellcode(["mha-conformance"], shell=options.shell).rstrip())
    return ExitCode.OK


def complete(parser: argparse.ArgumentParser) -> None:
    """Print completions and exit if a shell requests them; otherwise, print nothing and return.

    If argcomplete is not installed, do nothing.
    """
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
    """Return all known values of the argparse destination `dest`, one of `COMPLETED`.

    For implementations, also return the paths of folders and .py files that begin with `prefix`.
    """
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
