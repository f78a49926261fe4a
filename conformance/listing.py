"""What there is: implementations, cases, requirements; and what each of them means."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.card import TOPICS
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue, find_cases
from conformance.errors import ExitCode, UnknownName
from conformance.interface.loading import registered
from conformance.requirements import REQUIREMENTS, find_requirement


def show(what: str) -> int:
    """List implementations, cases, experiments or requirements."""
    {
        "implementations": _implementations,
        "cases": _cases,
        "experiments": _experiments,
        "requirements": _requirements,
    }[what]()
    return ExitCode.OK


def explain(name: str) -> int:
    """Explain a requirement, or the cases or experiments that a name finds.

    Raises:
        UnknownName: nothing has this name.
    """
    console = Console(highlight=False)
    try:
        requirement = find_requirement(name)
    except UnknownName:
        topics = [topic for topic in TOPICS if topic.id.startswith(name)]
        for topic in topics:
            console.print(f"[bold]{topic.id}[/] {escape(topic.title)}")
            console.print(textwrap.fill(topic.question, 88), markup=False)
        if topics:
            return ExitCode.OK
        known = [item.id for item in REQUIREMENTS] + [case.id for case in catalogue()]
        known += [topic.id for topic in TOPICS]
        try:
            cases = find_cases(name)
        except UnknownName:
            raise UnknownName("case, experiment or requirement", name, known) from None
        for case in cases:
            _explain_case(console, case)
        return ExitCode.OK
    serving = [case.id for case in catalogue() if requirement.serves(case)]
    console.print(f"[bold]{requirement.id}[/] ({requirement.level})")
    console.print(textwrap.fill(requirement.sentence, 88), markup=False)
    console.print(textwrap.fill(f"Why: {requirement.why}", 88), markup=False)
    console.print(
        f"Served by {len(serving)} cases: {', '.join(serving[:8])}" + ", ..." * (len(serving) > 8)
    )
    return ExitCode.OK


def _explain_case(console: Console, case: Case) -> None:
    shape = case.shape
    console.print(f"[bold]{escape(case.id)}[/]")
    console.print(textwrap.fill(case.why, 88), markup=False)
    console.print(
        f"batch {shape.batch}, query {shape.query_length}, key {shape.key_length}, heads "
        f"{shape.heads} (key/value {shape.kv_heads}), head {shape.head_size} (value "
        f"{shape.value_head_size}), widths {shape.query_width}/{shape.key_width}/"
        f"{shape.value_width} to {shape.output_width}, {'biases' if shape.bias else 'no biases'}, "
        f"{shape.score}, inputs {shape.sharing}"
    )
    problem = case.problem("float64")
    told = []
    if problem.mask is not None:
        told.append(f"mask {list(problem.mask.shape)}")
    if problem.causal is not None:
        told.append(f"causal {problem.causal}")
    if problem.attn_bias is not None:
        told.append(f"bias {list(problem.attn_bias.shape)}")
    if problem.scale is not None:
        told.append(f"scale {problem.scale}")
    console.print("masks: " + (", ".join(told) or "none"), markup=False)
    allowed = problem.allowed
    if allowed is not None and allowed.shape[-1] <= 16 and allowed.shape[-2] <= 16:
        console.print("entry 0, head 0 (rows are queries; # may attend, . may not):")
        for row in problem.allowed_in_full()[0, 0]:
            console.print("  " + "".join("#" if seen else "." for seen in row), markup=False)
    if case.serves:
        console.print(f"serves, beyond the usual: {', '.join(sorted(case.serves))}")
    for name, reason in case.idle.items():
        console.print(f"{name} does not matter here: {reason}", markup=False)
    console.print()


def _implementations() -> None:
    _print("name adapter", ((name, point.value) for name, point in registered().items()))


def _cases() -> None:
    _print("case does", ((case.id, case.why) for case in catalogue()))


def _experiments() -> None:
    _print("experiment asks", ((topic.id, topic.question) for topic in TOPICS))


def _requirements() -> None:
    rows = ((item.id, item.level, item.sentence) for item in REQUIREMENTS)
    _print("requirement level sentence", rows)


def _print(head: str, rows: Iterable[tuple[str, ...]]) -> None:
    """A table for people; for programs, one line each with tabs, and nothing cut off."""
    console = Console(highlight=False)
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row))
        return
    table = Table(box=None, header_style="bold")
    first, *others = head.split()
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
