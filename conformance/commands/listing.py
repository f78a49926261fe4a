"""`mha-conformance list` and `schema`: what there is, and what commands print for programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from conformance.commands.formats import OUTPUTS, print_json, schema
from conformance.commands.shared import Commands, add_format
from conformance.errors import ConformanceError, ExitCode
from conformance.text import printable


def add_parser(commands: Commands) -> None:
    """Add the parsers of these commands to `commands`."""
    listing = commands.add_parser(
        "list", help="list implementations, cases, experiments or requirements"
    )
    known = ("implementations", "cases", "experiments", "requirements")
    listing.add_argument("what", choices=known)
    add_format(listing, "list")
    listing.set_defaults(action=_list)

    schemas = commands.add_parser(
        "schema", help="print the JSON schema of records and of what commands print"
    )
    schemas.add_argument(
        "output", choices=OUTPUTS, metavar="OUTPUT", help=f"one of {', '.join(OUTPUTS)}"
    )
    schemas.set_defaults(action=_schema)


class ListedImplementation(msgspec.Struct, frozen=True):
    """An implementation that can be named without a path.

    Attributes:
        name: what to give to `run`.
        title: what it is called by its authors.
        framework: what it runs in.
        installed: whether that is installed here.
        documentation: a link, or "".
        adapter: where its adapter is, "module:NAME".
    """

    name: str
    title: str
    framework: str
    installed: bool
    documentation: str
    adapter: str


class ListedCase(msgspec.Struct, frozen=True):
    """A case of the catalogue.

    Attributes:
        id: what to give to `--case`.
        chapter: the first word of the id.
        family: its shape.
        why: what it does and what it catches.
        defined: False where the field has no agreed answer.
        serves: the requirements that look at it.
    """

    id: str
    chapter: str
    family: str
    why: str
    defined: bool
    serves: list[str]


class ListedExperiment(msgspec.Struct, frozen=True):
    """An experiment; `id` without "probe/" is what to give to `probe --experiment`."""

    id: str
    title: str
    question: str


class ListedRequirement(msgspec.Struct, frozen=True):
    """A requirement; `cases` is how many look at it."""

    id: str
    level: str
    sentence: str
    why: str
    cases: int


class Implementations(msgspec.Struct, frozen=True, tag_field="kind", tag="implementations"):
    """`list implementations`."""

    entries: list[ListedImplementation]


class Cases(msgspec.Struct, frozen=True, tag_field="kind", tag="cases"):
    """`list cases`."""

    entries: list[ListedCase]


class Experiments(msgspec.Struct, frozen=True, tag_field="kind", tag="experiments"):
    """`list experiments`."""

    entries: list[ListedExperiment]


class Requirements(msgspec.Struct, frozen=True, tag_field="kind", tag="requirements"):
    """`list requirements`."""

    entries: list[ListedRequirement]


Listing: TypeAlias = Implementations | Cases | Experiments | Requirements


def listing(what: str) -> Listing:
    """Return everything of one kind, in the order of reports."""
    from conformance.adapter.loading import registered
    from conformance.cases.catalogue import catalogue
    from conformance.requirements import REQUIREMENTS

    if what == "implementations":
        return Implementations(
            [_implementation(name, point.value) for name, point in registered().items()]
        )
    if what == "cases":
        return Cases(
            [
                ListedCase(
                    id=case.id,
                    chapter=case.chapter,
                    family=case.family,
                    why=case.why,
                    defined=case.defined,
                    serves=[item.id for item in REQUIREMENTS if item.serves(case)],
                )
                for case in catalogue()
            ]
        )
    if what == "experiments":
        from conformance.experiments import TOPICS

        return Experiments(
            [ListedExperiment(topic.id, topic.title, topic.question) for topic in TOPICS]
        )
    cases = catalogue()
    return Requirements(
        [
            ListedRequirement(
                item.id, item.level, item.sentence, item.why, sum(map(item.serves, cases))
            )
            for item in REQUIREMENTS
        ]
    )


def _list(options: argparse.Namespace) -> int:
    found = listing(options.what)
    if options.format == "json":
        print_json(found)
    elif isinstance(found, Implementations):
        rows = (
            (item.name, item.title, item.framework + ("" if item.installed else " (not installed)"))
            for item in found.entries
        )
        _print("name title framework", rows)
    elif isinstance(found, Cases):
        _print("case does", ((item.id, item.why) for item in found.entries))
    elif isinstance(found, Experiments):
        _print("experiment asks", ((item.id, item.question) for item in found.entries))
    else:
        _print(
            "requirement level sentence",
            ((item.id, item.level, item.sentence) for item in found.entries),
        )
    return ExitCode.OK


def _implementation(name: str, place: str) -> ListedImplementation:
    """Return an implementation as its adapter describes it, or why it fails to import."""
    import importlib.util

    from conformance.adapter.loading import load

    try:
        adapter = load(name)
    except ConformanceError as error:
        return ListedImplementation(name, str(error), "unknown", False, "", place)
    installed = importlib.util.find_spec(adapter.framework) is not None
    return ListedImplementation(
        name, adapter.title, adapter.framework, installed, adapter.documentation, place
    )


def _print(head: str, rows: Iterable[tuple[str, ...]]) -> None:
    """Return a table for people; for programs, one line each with tabs, and nothing cut off."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    told = [tuple(printable(" ".join(cell.split())) for cell in row) for row in rows]
    if not console.is_terminal:
        for row in told:
            print("\t".join(row))
        return
    first, *others = head.split()
    widest = max((len(row[0]) for row in told), default=0)
    if widest > console.width // 2:
        # Beside names as long as these there is no room for a sentence.
        for name, *rest in told:
            console.print(f"[bold]{escape(name)}[/]", soft_wrap=True)
            console.print(_indented(" · ".join(rest), console.width))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column)
    for row in told:
        table.add_row(*map(escape, row))
    console.print(table)


def _indented(text: str, width: int) -> str:
    import textwrap

    from rich.markup import escape

    return escape(textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    "))


def _schema(options: argparse.Namespace) -> int:
    print_json(schema(options.output))
    return ExitCode.OK
