"""`mha-conformance probe`: conventions by experiment."""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from conformance.commands.shared import (
    Commands,
    add_device,
    add_format,
    add_implementation,
    add_quiet,
    add_repeatable,
)
from conformance.errors import ConformanceError, ExitCode, UnknownName
from conformance.records.findings import CaseResult, Entry
from conformance.records.phrase import Phrase
from conformance.text import paragraph, printable, stdout_to_stderr
from conformance.words import Worded, say, worded

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from conformance.adapter.base import Adapter
    from conformance.running.session import Inquiry, Session


class Seen(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the card; `declared` is null if the adapter says nothing of it."""

    subject: Worded
    value: Worded
    evidence: str = ""
    declared: Worded | None = None
    agrees: bool = True
    code: str = ""


class Decided(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the entries say about a requirement."""

    requirement: str
    verdict: str
    detail: str = ""
    value: Worded | None = None
    cause: Worded | None = None


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one experiment showed, in one mode."""

    implementation: str
    case: str
    dtype: str
    device: str
    mode: str
    findings: list[Decided]
    entries: list[Seen] = []


Results: TypeAlias = list[Result]
"""What is printed as JSON."""

WIDTH = 100

WORTH_IT = 6
"""Fewer experiments than these are over before other processes have imported anything."""

REVERSED = (
    "Where 0 and −inf attend, −inf counts as True because it is not 0, and 0 as False: a mask that "
    "is meant to be added (0 visible, −inf hidden) shows exactly what it was to hide."
)


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    probe = commands.add_parser(
        "probe",
        help="find an implementation's conventions by experiment and print its card",
        description="Find the conventions of implementations by experiment: what each mask "
        "argument does, what a fully masked row gets, where the causal flag is aligned, what "
        "dropout drops. Nothing that the adapter declares is believed.",
    )
    add_implementation(probe, several=True)
    add_repeatable(
        probe,
        experiment="only this experiment, such as masks or masked-rows",
        argument="only this mask argument",
        mode="only this mode",
    )
    add_device(probe)
    probe.add_argument("--evidence", action="store_true", help="print what was fed and seen")
    probe.add_argument("--code", action="store_true", help="print lines that show it")
    add_format(probe, "probe")
    add_quiet(probe)
    probe.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if an adapter declares something else than was seen",
    )
    probe.set_defaults(action=_probe)


def _probe(options: argparse.Namespace) -> int:
    """Run the experiments and print a card per implementation; all names are checked first."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rich.console import Console

    from conformance.adapter.loading import load
    from conformance.commands.formats import print_json

    adapters = [load(spec) for spec in options.implementation]
    _check(adapters, options)
    every: list[CaseResult] = []
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for spec, adapter in zip(options.implementation, adapters, strict=True):
        with stdout_to_stderr():
            results = _asked(adapter, spec, options)
        every += results
        if options.format != "json":
            _print(console, adapter, results, evidence=options.evidence, code=options.code)
    if options.format == "json":
        print_json([_result(result) for result in every])
    return _worth(every, strict=options.strict)


def _result(result: CaseResult) -> Result:
    return Result(
        result.implementation,
        result.case,
        result.dtype,
        result.device,
        result.mode,
        [
            Decided(
                item.requirement, item.verdict, item.detail, worded(item.value), worded(item.cause)
            )
            for item in result.findings
        ],
        [
            Seen(
                Worded(item.subject.id, say(item.subject), item.subject.arguments),
                Worded(item.value.id, say(item.value), item.value.arguments),
                item.evidence,
                worded(item.declared),
                item.agrees,
                item.code,
            )
            for item in result.entries
        ],
    )


def _check(adapters: Sequence[Adapter], options: argparse.Namespace) -> None:
    from conformance.experiments import experiment

    for name in options.experiment:
        experiment(name)
    arguments = [
        item.name
        for adapter in adapters
        for item in (*adapter.mask_arguments, *adapter.implicit_masks)
    ]
    modes = [mode.name for adapter in adapters for mode in adapter.modes]
    for kind, names, known in (
        ("mask argument", options.argument, arguments),
        ("mode", options.mode, modes),
    ):
        for name in names:
            if name not in known:
                raise UnknownName(kind, name, known)


def _asked(adapter: Adapter, spec: str, options: argparse.Namespace) -> list[CaseResult]:
    from conformance.experiments import EXPERIMENTS, experiment
    from conformance.progress import progress
    from conformance.running.session import Session, inquiries

    experiments = [experiment(name) for name in options.experiment] or list(EXPERIMENTS)
    asked = [
        inquiry
        for inquiry in inquiries([adapter], experiments, options.device)
        if not options.mode or inquiry.mode.name in options.mode
    ]
    only = tuple(options.argument)
    with progress(adapter.name, len(asked)) as advance:
        # Most of the time goes into compiling, which is done by one core at a time.
        if adapter.compiles and options.device == "cpu" and len(asked) >= WORTH_IT:
            return in_two_processes(spec, asked, only, advance)
        session, found = Session(only=only), []
        for inquiry in asked:
            advance(f"{adapter.name}: {inquiry.experiment.name}", 0)
            found.append(session.inquire(inquiry)[0])
            advance()
        return found


# Experiments in two processes, for frameworks that compile for most of the time


def in_two_processes(
    spec: str, asked: Sequence[Inquiry], only: tuple[str, ...], advance: Callable[[], None]
) -> list[CaseResult]:
    """Return the results in the order of `asked`; `advance` is called after each.

    Each process compiles for itself, so more than two of them help little.

    Raises:
        ConformanceError: a process died; `mha-conformance run` turns that into a verdict.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    results: dict[int, CaseResult] = {}
    workers = min(2, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), _print_to_stderr) as pool:
        places = {
            pool.submit(_inquire, spec, only, row.experiment.name, row.mode.name, row.device): place
            for place, row in enumerate(asked)
        }
        try:
            for future in as_completed(places):
                results[places[future]] = future.result()
                advance()
        except BrokenProcessPool as error:
            raise ConformanceError(
                f"{spec} ended its process; mha-conformance run {spec} --isolate says where"
            ) from error
    return [results[place] for place in range(len(asked))]


def _print_to_stderr() -> None:
    os.dup2(2, 1)


def _inquire(spec: str, only: tuple[str, ...], name: str, mode: str, device: str) -> CaseResult:
    from conformance.experiments import experiment
    from conformance.running.session import inquiries

    adapter, session = _of_this_process(spec, only)
    rows = inquiries([adapter], [experiment(name)], device)
    return session.inquire(next(row for row in rows if row.mode.name == mode))[0]


@lru_cache(maxsize=1)
def _of_this_process(spec: str, only: tuple[str, ...]) -> tuple[Adapter, Session]:
    """Keep what was compiled for the next experiment."""
    from conformance.adapter.loading import load
    from conformance.running.session import Session

    return load(spec), Session(only=only)


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
    from rich.markup import escape

    from conformance.experiments import EXPERIMENTS

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
    from rich.markup import escape
    from rich.text import Text

    entries = {e.code: e for result in results for e in result.entries if e.code}.values()
    if not entries:
        console.print("\n  no code for this experiment")
    for entry in entries:
        told = escape(printable(f"{say(entry.subject)}: {say(entry.value)}"))
        console.print(f"\n  [bold]{told}[/bold]")
        console.print(Text(printable(entry.code)), soft_wrap=True)


def _print_notes(console: Console, results: Sequence[CaseResult]) -> None:
    """Print notes on values that readers may misunderstand."""
    entries = [entry for result in results for entry in result.entries]
    if any(
        entry.subject.part("form").id == "form.zero-infinite" and entry.value.id == "mask.attends"
        for entry in entries
    ):
        console.print()
        paragraph(console, REVERSED)


def _print_modes(console: Console, adapter: Adapter, results: Sequence[CaseResult]) -> None:
    """Print a description of each mode that the tables name, that is, where results differ."""
    values: dict[tuple[str, Phrase], dict[Phrase, set[str]]] = defaultdict(lambda: defaultdict(set))
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
    """Return a table with a row for each subject and value, and the modes where they differ."""
    from rich.table import Table
    from rich.text import Text

    seen: dict[Phrase, dict[Phrase, list[tuple[str, Entry]]]]
    seen = defaultdict(lambda: defaultdict(list))
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
            told = Text(printable(say(value)), style="" if entry.agrees else "bold red")
            if len(values) > 1:
                told.append(f"  ({', '.join(mode for mode, _ in where)})", style="dim")
            beside = "" if entry.agrees else f"✗ declared {say(entry.declared)}"
            if evidence:
                beside = f"{beside}  {entry.evidence}".strip()
            first = printable(say(subject)) if index == 0 else ""
            cells = [Text(first), told, Text(printable(beside))]
            table.add_row(*cells[: len(table.columns)])
    return table
