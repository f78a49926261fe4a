"""`mha-conformance probe`: the convention card of an implementation, in the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from conformance.adapter.base import Adapter
from conformance.adapter.loading import load
from conformance.commands.formats import print_json
from conformance.errors import ExitCode, UnknownName
from conformance.experiments import EXPERIMENTS, experiment
from conformance.progress import progress
from conformance.records.card import Entry
from conformance.records.findings import CaseResult
from conformance.running.parallel import inquired_side_by_side
from conformance.running.session import Session, inquiries
from conformance.text import paragraph, printable, stdout_to_stderr

WIDTH = 100

WORTH_IT = 6
"""Fewer experiments than these are over before other processes have imported anything."""

REVERSED = (
    "Where 0 and −inf attend, −inf counts as True because it is not 0, and 0 as False: a mask that "
    "is meant to be added (0 visible, −inf hidden) shows exactly what it was to hide."
)

Results: TypeAlias = list[CaseResult]
"""What is printed as JSON."""


@dataclass(frozen=True)
class Wanted:
    """What to ask; empty for everything."""

    experiments: Sequence[str] = ()
    arguments: Sequence[str] = ()
    modes: Sequence[str] = ()
    device: str = "cpu"


def probe(
    specs: Sequence[str],
    wanted: Wanted,
    *,
    as_json: bool = False,
    evidence: bool = False,
    code: bool = False,
    strict: bool = False,
) -> int:
    """Ask, and print a card for each implementation.

    Raises:
        UnknownName: for an experiment, a mask argument or a mode that is not there; before
            anything is asked.
    """
    adapters = [load(spec) for spec in specs]
    _check(adapters, wanted)
    found: list[CaseResult] = []
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for spec, adapter in zip(specs, adapters, strict=True):
        with stdout_to_stderr():
            results = _asked(adapter, spec, wanted)
        found += results
        if not as_json:
            _print(console, adapter, results, evidence=evidence, code=code)
    if as_json:
        print_json(found)
    return _worth(found, strict=strict)


def _check(adapters: Sequence[Adapter], wanted: Wanted) -> None:
    for name in wanted.experiments:
        experiment(name)
    arguments = [
        item.name
        for adapter in adapters
        for item in (*adapter.mask_arguments, *adapter.implicit_masks)
    ]
    modes = [mode.name for adapter in adapters for mode in adapter.modes]
    for kind, names, known in (
        ("mask argument", wanted.arguments, arguments),
        ("mode", wanted.modes, modes),
    ):
        for name in names:
            if name not in known:
                raise UnknownName(kind, name, known)


def _asked(adapter: Adapter, spec: str, wanted: Wanted) -> list[CaseResult]:
    experiments = [experiment(name) for name in wanted.experiments] or list(EXPERIMENTS)
    asked = [
        inquiry
        for inquiry in inquiries([adapter], experiments, wanted.device)
        if not wanted.modes or inquiry.mode.name in wanted.modes
    ]
    only = tuple(wanted.arguments)
    with progress(adapter.name, len(asked)) as advance:
        # Most of the time goes into compiling, which is done by one core at a time.
        if adapter.compiles and wanted.device == "cpu" and len(asked) >= WORTH_IT:
            return inquired_side_by_side(spec, asked, only, advance)
        session, found = Session(only=only), []
        for inquiry in asked:
            advance(f"{adapter.name}: {inquiry.experiment.name}", 0)
            found.append(session.inquire(inquiry)[0])
            advance()
        return found


def _worth(found: Sequence[CaseResult], *, strict: bool) -> ExitCode:
    verdicts = {finding.verdict for result in found for finding in result.findings}
    if not verdicts & {"conforms", "deviates", "observed"}:
        return ExitCode.NOTHING_VERIFIED
    if "unavailable" in verdicts:
        return ExitCode.INCOMPLETE
    return ExitCode.DEVIATES if strict and "deviates" in verdicts else ExitCode.OK


def _print(
    console: Console,
    adapter: Adapter,
    results: Sequence[CaseResult],
    *,
    evidence: bool,
    code: bool,
) -> None:
    title, name = (escape(printable(text)) for text in (adapter.title, adapter.name))
    told = f"[bold]{title}[/bold]" + (f" ({name})" if name != title else "")
    console.rule(told, align="left")
    for item in EXPERIMENTS:
        own = [result for result in results if result.case == item.id]
        if not own:
            continue
        console.print(f"\n[bold]{escape(item.topic.title)}[/bold]  {escape(item.topic.question)}")
        if not any(result.entries for result in own):
            reasons = {finding.detail for result in own for finding in result.findings}
            told = printable("; ".join(sorted(reasons - {""})))
            console.print(f"  nothing to ask: {escape(told)}")
            continue
        console.print(_table(own, evidence=evidence))
        _print_notes(console, own)
        if code:
            _print_code(console, own)
    _print_modes(console, adapter, results)


def _print_code(console: Console, results: Sequence[CaseResult]) -> None:
    entries = {e.code: e for result in results for e in result.entries if e.code}.values()
    if not entries:
        console.print("\n  no code for this experiment")
    for entry in entries:
        told = escape(printable(f"{entry.subject}: {entry.value}"))
        console.print(f"\n  [bold]{told}[/bold]")
        console.print(Text(printable(entry.code)), soft_wrap=True)


def _print_notes(console: Console, results: Sequence[CaseResult]) -> None:
    """What a reader of a value may take for the opposite."""
    entries = [entry for result in results for entry in result.entries]
    if any("0/−inf" in entry.subject and entry.value == "attends" for entry in entries):
        console.print()
        paragraph(console, REVERSED)


def _print_modes(console: Console, adapter: Adapter, results: Sequence[CaseResult]) -> None:
    """What the modes are that the tables name: those in which something differs."""
    values: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for result in results:
        for entry in result.entries:
            values[result.case, entry.subject][entry.value].add(result.mode)
    named = {name for own in values.values() if len(own) > 1 for n in own.values() for name in n}
    told = [mode for mode in adapter.modes if mode.name in named and mode.about]
    if told:
        console.print("\n[bold]Modes[/bold]  How is it called where it differs?")
    for mode in told:
        paragraph(console, f"{mode.name}: {mode.about}")


def _table(results: Sequence[CaseResult], *, evidence: bool) -> Table:
    """A row for each subject and value; the modes where they differ."""
    seen: dict[str, dict[str, list[tuple[str, Entry]]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        for entry in result.entries:
            seen[entry.subject][entry.value].append((result.mode, entry))
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(ratio=5)
    table.add_column(ratio=5)
    entries = [entry for result in results for entry in result.entries]
    # Without anything to say there, the others have its room.
    if evidence or not all(entry.agrees for entry in entries):
        table.add_column(ratio=4 if not evidence else 9)
    for subject, values in seen.items():
        for index, (value, where) in enumerate(values.items()):
            entry = where[0][1]
            told = Text(printable(value), style="" if entry.agrees else "bold red")
            if len(values) > 1:
                told.append(f"  ({', '.join(mode for mode, _ in where)})", style="dim")
            beside = "" if entry.agrees else f"✗ declared {entry.declared}"
            if evidence:
                beside = f"{beside}  {entry.evidence}".strip()
            cells = [Text(printable(subject) if index == 0 else ""), told, Text(printable(beside))]
            table.add_row(*cells[: len(table.columns)])
    return table
