"""`mha-conformance probe`: find out an implementation's conventions by experiment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from conformance.commands.shared import (
    Commands,
    Struct,
    add_device,
    add_format,
    add_implementation,
    add_quiet,
    add_repeatable,
    print_json,
    printed,
)
from conformance.errors import ConformanceError, ExitCode, check_names
from conformance.records.findings import CaseResult, Entry, Phrase
from conformance.text import paragraph, printable, progress, stdout_to_stderr
from conformance.words import Worded, say, worded

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from conformance.adapter.base import Adapter
    from conformance.running.session import Inquiry, Session


class ObservedConvention(msgspec.Struct, frozen=True, omit_defaults=True):
    """An observed convention.

    Attributes:
        subject: what was examined.
        value: the observed convention.
        evidence: text that describes the inputs and the observation.
        declared: what the adapter declares about the subject; null if it declares nothing.
        agrees: whether `value` agrees with `declared`; true if nothing is declared.
        code: Python lines that show the convention without this suite; "" if there are none.
    """

    subject: Worded
    value: Worded
    evidence: str = ""
    declared: Worded | None = None
    agrees: bool = True
    code: str = ""


class Decided(msgspec.Struct, frozen=True, omit_defaults=True):
    """The verdict on a requirement, or why the experiment was not possible.

    Attributes:
        requirement: the id of the requirement.
        verdict: the verdict, such as "conforms", "deviates", "observed" or "unsupported".
        detail: a sentence that explains the verdict; "" if it needs none.
        value: the observed convention; null if there is none.
        cause: the supposed mistake that explains a deviation; null if unknown.
    """

    requirement: str
    verdict: str
    detail: str = ""
    value: Worded | None = None
    cause: Worded | None = None


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one experiment in one mode.

    Attributes:
        case: the id of the experiment, such as "probe/masks".
        findings: the verdicts that follow from the observed conventions, or why there are none.
        entries: the observed conventions; [] if the experiment was not possible.
    """

    implementation: str
    case: str
    dtype: str
    device: str
    mode: str
    findings: list[Decided]
    entries: list[ObservedConvention] = []


Results: TypeAlias = list[Result]
"""The output of `probe --format json`."""

Values: TypeAlias = dict[Phrase, dict[Phrase, dict[str, Entry]]]
"""Entries (observed conventions) by subject, then by value, then by the name of the mode."""

WIDTH = 100

WORTH_IT = 6
"""The least number of experiments, counted in each mode, for which two processes save time."""

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
        "dropout drops. The experiments do not rely on what the adapter declares.",
    )
    add_implementation(probe, several=True)
    add_repeatable(
        probe,
        experiment="only this experiment, such as masks or masked-rows",
        argument="only this mask argument",
        mode="only this mode",
    )
    add_device(probe)
    probe.add_argument("--evidence", action="store_true", help="print inputs and observed numbers")
    probe.add_argument("--code", action="store_true", help="print code that shows each convention")
    add_format(probe, "probe")
    add_quiet(probe)
    probe.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if an adapter declares something other than what was observed",
    )
    probe.set_defaults(action=_probe)


def _probe(options: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rich.console import Console

    from conformance.adapter.loading import load
    from conformance.experiments import experiment

    adapters = [load(spec) for spec in options.implementation]
    for name in options.experiment:
        experiment(name)
    arguments = (arg for it in adapters for arg in (*it.mask_arguments, *it.implicit_masks))
    check_names("mask argument", options.argument, (argument.name for argument in arguments))
    check_names("mode", options.mode, (mode.name for it in adapters for mode in it.modes))
    every: list[CaseResult] = []
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    for spec, adapter in zip(options.implementation, adapters, strict=True):
        with stdout_to_stderr():
            results = _run_experiments(adapter, spec, options)
        every += results
        if options.format != "json":
            _print(console, adapter, results, options)
    if options.format == "json":
        print_json(
            [
                printed(
                    Result,
                    result,
                    findings=[_worded(Decided, finding) for finding in result.findings],
                    entries=[_worded(ObservedConvention, entry) for entry in result.entries],
                )
                for result in every
            ]
        )
    verdicts = {finding.verdict for result in every for finding in result.findings}
    if not verdicts & {"conforms", "deviates", "observed"}:
        return ExitCode.NOTHING_VERIFIED
    if "unavailable" in verdicts:
        return ExitCode.INCOMPLETE
    return ExitCode.DEVIATES if options.strict and "deviates" in verdicts else ExitCode.OK


def _worded(struct: type[Struct], item: object) -> Struct:
    """Return an instance of `struct` with the fields of `item`, and with texts for its phrases.

    Each `Phrase`, an id with arguments, becomes a `Worded`, which also has the text; an empty
    phrase becomes None.
    """
    fields = {name: getattr(item, name) for name in struct.__struct_fields__}
    phrases = {name: worded(it) for name, it in fields.items() if isinstance(it, Phrase)}
    return struct(**fields | phrases)


def _run_experiments(adapter: Adapter, spec: str, options: argparse.Namespace) -> list[CaseResult]:
    from conformance.experiments import EXPERIMENTS, experiment
    from conformance.running.isolation import asking
    from conformance.running.session import Session, inquiries

    experiments = [experiment(name) for name in options.experiment] or EXPERIMENTS
    asked = [
        inquiry
        for inquiry in inquiries([adapter], experiments, options.device)
        if not options.mode or inquiry.mode.name in options.mode
    ]
    only = tuple(options.argument)
    with progress(adapter.name, len(asked)) as advance, asking(spec) as apart:
        results: dict[str, CaseResult] = {}
        # Most of the time is spent on compiling, which uses one core.
        if adapter.compiles and options.device == "cpu" and len(asked) >= WORTH_IT:
            rows = [inquiry for inquiry in asked if not inquiry.asked.apart]
            results = {found.id: found for found in in_two_processes(spec, rows, only, advance)}
        session = Session(only=only, apart=apart)
        for inquiry in asked:
            if inquiry.id not in results:
                advance(f"{adapter.name}: {inquiry.asked.name}", 0)
                results[inquiry.id] = session.inquire(inquiry)[0]
                advance()
        return [results[inquiry.id] for inquiry in asked]


# Experiments in two processes, for frameworks that spend most of the time on compiling


def in_two_processes(
    spec: str, asked: Sequence[Inquiry], only: tuple[str, ...], advance: Callable[[], None]
) -> list[CaseResult]:
    """Run experiments in up to two processes, and return their results in the same order.

    More than two processes would help little, because each process compiles everything again.

    Args:
        spec: the name or location of the adapter, which each process loads.
        asked: the experiments, each with its mode and device.
        only: the names of the mask arguments to examine; () for all.
        advance: a function to call after each experiment.

    Raises:
        ConformanceError: if a process died; the message suggests a command that shows where.
    """
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    names = [(row.asked.name, row.mode.name, row.device) for row in asked]
    results = []
    workers = min(2, os.cpu_count() or 1)
    # Redirect what implementations print to stderr.
    with ProcessPoolExecutor(workers, get_context("spawn"), os.dup2, (2, 1)) as pool:
        try:
            for result in pool.map(partial(_inquire, spec, only), *zip(*names, strict=True)):
                results.append(result)
                advance()
        except BrokenProcessPool as error:
            raise ConformanceError(
                f"{spec} ended its process; mha-conformance run {spec} --isolate says where"
            ) from error
    return results


def _inquire(spec: str, only: tuple[str, ...], name: str, mode: str, device: str) -> CaseResult:
    from conformance.experiments import experiment
    from conformance.running.session import inquiries

    adapter, session = _of_this_process(spec, only)
    rows = inquiries([adapter], [experiment(name)], device)
    return session.inquire(next(row for row in rows if row.mode.name == mode))[0]


@cache
def _of_this_process(spec: str, only: tuple[str, ...]) -> tuple[Adapter, Session]:
    """Return the adapter and a session for this process.

    They are cached, so that experiments in one process share compiled code.
    """
    from conformance.adapter.loading import load
    from conformance.running.session import Session

    return load(spec), Session(only=only)


# The card


def _print(
    console: Console, adapter: Adapter, results: Sequence[CaseResult], options: argparse.Namespace
) -> None:
    from rich.markup import escape

    from conformance.experiments import EXPERIMENTS

    title, name = (escape(printable(text)) for text in (adapter.title, adapter.name))
    console.rule(f"[bold]{title}[/bold]" + (f" ({name})" if name != title else ""), align="left")
    named: set[str] = set()
    for item in EXPERIMENTS:
        own = [result for result in results if result.case == item.id]
        if not own:
            continue
        console.print(f"\n[bold]{escape(item.topic.title)}[/bold]  {escape(item.topic.question)}")
        entries = [entry for result in own for entry in result.entries]
        if not entries:
            reasons = {finding.detail for result in own for finding in result.findings}
            text = printable("; ".join(sorted(reasons - {""})))
            console.print(
                f"  nothing to ask{f': {escape(text)}' if text else ' of what it declares'}"
            )
            continue
        values = _values(own)
        console.print(_table(values, entries, evidence=options.evidence))
        if any(map(_is_reversed, entries)):
            console.print()
            paragraph(console, REVERSED)
        if options.code:
            _print_code(console, entries)
        differing = (by_value for by_value in values.values() if len(by_value) > 1)
        named |= {mode for by_value in differing for seen in by_value.values() for mode in seen}
    about = [mode for mode in adapter.modes if mode.name in named and mode.about]
    if about:
        console.print("\n[bold]Modes[/bold]  How is it called where it differs?")
    for mode in about:
        paragraph(console, f"{mode.name}: {mode.about}")


def _values(results: Sequence[CaseResult]) -> Values:
    values: Values = {}
    for result in results:
        for entry in result.entries:
            by_value = values.setdefault(entry.subject, {})
            by_value.setdefault(entry.value, {}).setdefault(result.mode, entry)
    return values


def _is_reversed(entry: Entry) -> bool:
    """Return whether, according to `entry`, queries attend to the −inf in a mask of 0 and −inf.

    Such masks usually mean the opposite, because they are added to the logits.
    """
    form = entry.subject.part("form").id
    return form == "form.zero-infinite" and entry.value.id == "mask.attends"


def _table(values: Values, entries: Sequence[Entry], *, evidence: bool) -> Table:
    """Return a table with a row for each subject and value.

    If a subject has several values, each is followed by the modes in which it was observed. A last
    column has declarations that disagree and, with `evidence`, the evidence; it is left out if
    there is neither.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    table.add_column(ratio=5)
    table.add_column(ratio=5)
    # An empty third column is left out, so that the others have more room.
    if evidence or not all(entry.agrees for entry in entries):
        table.add_column(ratio=9 if evidence else 4)
    for subject, by_value in values.items():
        first = printable(say(subject))
        for value, seen in by_value.items():
            entry = next(iter(seen.values()))
            text = Text(printable(say(value)), style="" if entry.agrees else "bold red")
            if len(by_value) > 1:
                text.append(f"  ({', '.join(seen)})", style="dim")
            beside = "" if entry.agrees else f"✗ declared {say(entry.declared)}"
            if evidence:
                beside = f"{beside}  {entry.evidence}".strip()
            table.add_row(*[Text(first), text, Text(printable(beside))][: len(table.columns)])
            first = ""
    return table


def _print_code(console: Console, entries: Sequence[Entry]) -> None:
    from rich.markup import escape
    from rich.text import Text

    with_code = {entry.code: entry for entry in entries if entry.code}.values()
    if not with_code:
        console.print("\n  no code for this experiment")
    for entry in with_code:
        title = escape(printable(f"{say(entry.subject)}: {say(entry.value)}"))
        console.print(f"\n  [bold]{title}[/bold]")
        console.print(Text(printable(entry.code)), soft_wrap=True)
