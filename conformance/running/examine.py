"""Examine an implementation with a function call, and report results as objects, text and data."""

from __future__ import annotations

import importlib
import io
import math
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from conformance.adapter.base import Adapter
from conformance.adapter.loading import adapted, load, registered
from conformance.definition.dtypes import Array
from conformance.errors import ConformanceError, ExitCode, UnknownName
from conformance.records.findings import (
    INFINITE,
    NOT_VERIFIED,
    WRONG,
    CaseResult,
    Finding,
    count,
    gravity,
    verified,
)
from conformance.records.header import RequirementInfo
from conformance.records.record import Record, check_writable, write
from conformance.reports import wording
from conformance.reports.tables import reasons as reasons_of
from conformance.running import level_of
from conformance.running.merging import Lock
from conformance.running.provenance import describe, environment, header_of, requirements
from conformance.running.selection import Selection
from conformance.running.session import Examiner, Inquiry, Session, kept, places
from conformance.text import plural, printable, progress, relative
from conformance.words import say

if TYPE_CHECKING:
    from rich.console import Group

Implementation: TypeAlias = Adapter | type[Adapter] | str
"""An adapter class or instance, a decorated function, or a name as on the command line."""


def examine(
    attention: Implementation,
    *,
    cases: str | Iterable[str] = (),
    dtypes: str | Iterable[str] = (),
    modes: str | Iterable[str] = (),
    level: str | None = None,
    device: str = "cpu",
) -> Outcome:
    """Examine an implementation in this process, like `mha-conformance run --no-isolate`.

    Only experiments that may end the process are run in a separate one.

        outcome = examine("torch-mha", cases="mask", dtypes="float32")
        outcome.counts    # {'conforms': 31, 'unsupported': 5}

    A deviation is a finding, not an exception; use `assert_conforms` to raise one.

    Args:
        attention: an adapter class or instance, a function decorated with `attention_function`,
            or an argument of `mha-conformance run`: a name, file or module.
        cases: parts of case ids, beginnings of experiment ids, or wildcard patterns for either, to
            restrict the run to them; empty for all cases and experiments of the level.
        dtypes: the dtypes to use; empty for all of the level.
        modes: the names of the modes to use; empty for all.
        level: "first" for at most 40 items, on which most mistakes show; "core" for the cases
            marked `core`, in float32 and bfloat16; "default" for all cases and most experiments,
            each case in a few dtypes and modes; "full" for everything; or "large" for the cases
            marked `core` or `large`, at the sizes for which kernels are written. None stands for
            "full" if the run is restricted to cases, dtypes or modes, and else for "default".
        device: "cpu" or "gpu".

    Returns:
        An object with counts, findings and conventions, which can be saved as a record.

    Raises:
        NotAnAdapter: `attention` is not an implementation, or fails on import.
        UnknownName: an implementation, case, dtype, mode, level or device does not exist.
        ConformanceError: the selection is empty, or the implementation cannot be loaded.
    """
    environment()
    restrictions = several(cases), several(dtypes), several(modes)
    selection = Selection(*restrictions, level_of(level, *restrictions))
    adapter, spec = resolve(attention)
    rows = selection.rows([adapter], device)
    if not rows:
        raise ConformanceError(f"{adapter.name}: nothing to examine: no item matches {selection}")
    header = header_of(
        [adapter],
        describe([(adapter, spec)], device),
        rows,
        device,
        str(selection),
        level=selection.level,
        command=f"conformance.examine({spec or adapter.name!r})",
    )
    placed = places(rows)
    results: list[CaseResult] = []
    arrays: dict[str, Array] = {}
    with progress(adapter.name, len(rows)) as advance, ExitStack() as stack:
        session = Session()
        if any(isinstance(row, Inquiry) and row.asked.apart for row in rows):
            from conformance.running.isolation import asking

            session.apart = stack.enter_context(asking(spec))
        examiner = Examiner(placed, session)
        for row in rows:
            advance(row.id, 0)
            result, measured = examiner.examine(row)
            results.append(result)
            arrays |= {f"{row.id}|{name}": array for name, array in measured.items()}
            advance()
    keep = kept(results, placed)
    arrays = {name: array for name, array in arrays.items() if keep(name)}
    return Outcome(Record(header, True, results), arrays)


def several(given: str | Iterable[str]) -> list[str]:
    """Return a list of the given strings; a single string becomes a list of one."""
    return [given] if isinstance(given, str) else list(given)


# Finding the adapter


def resolve(given: Implementation) -> tuple[Adapter, str]:
    """Return the adapter for an implementation, and its name on the command line.

    The name is "" if the command line cannot refer to the implementation.
    """
    if isinstance(given, str):
        return load(given), given
    module, name = _global_name(given)
    adapter = adapted(given, getattr(given, "__name__", "") or name or type(given).__name__)
    file = getattr(module, "__file__", None)
    if not name or file is None:
        return adapter, ""
    for entry in registered().values():
        if entry.value == f"{module.__name__}:{name}":
            return adapter, entry.name
    return adapter, f"{relative(Path(file))}:{name}"


def _global_name(given: Any) -> tuple[Any, str]:
    """Return the module that defines an object, and the name of its global variable for the object.

    Return None and "" if there is no such variable.
    """
    inner = getattr(given, "_function", given)
    module = sys.modules.get(getattr(inner, "__module__", ""))
    for name, value in vars(module).items() if module is not None else ():
        if value is given:
            return module, name
    return None, ""


# The outcome


@dataclass(frozen=True, eq=False, repr=False)
class Outcome:
    """The results of a run.

    Attributes:
        record: the results with their provenance.
        arrays: the arrays that are saved with the record, by "item id|array name".
        path: the file of the record, or None if it is not saved.
    """

    record: Record
    arrays: Mapping[str, Array] = field(default_factory=dict)
    path: Path | None = None

    @property
    def results(self) -> Sequence[CaseResult]:
        """The result of each item, with all its findings."""
        return self.record.results

    def results_of(self, implementation: str) -> list[CaseResult]:
        """Return the results of the implementation with this name."""
        return [result for result in self.results if result.implementation == implementation]

    @property
    def counts(self) -> dict[str, int]:
        """The number of items with each verdict, such as `{"conforms": 12}`."""
        return count(result.verdict for result in self.results)

    @property
    def findings(self) -> list[dict[str, Any]]:
        """A dictionary for each finding: what an item showed about one requirement.

        `max_ratio` is the largest error of `array` in units of its rounding noise σ, and `limit`
        its allowed maximum; both are None if nothing was measured. If an item has no outcome,
        `requirement` is "run", and `detail` says why.
        """
        return [_row(result, finding) for result in self.results for finding in result.findings]

    @property
    def worst(self) -> dict[str, Any] | None:
        """The worst finding, as a dictionary like those in `findings`.

        The value is None if no item has the verdict "deviates" or "error".
        """
        result, _ = worst(self.results)
        if result is None:
            return None
        wrong = [finding for finding in result.findings if finding.verdict in WRONG]
        return _row(result, max(wrong, key=lambda f: (is_must(f), gravity(f))))

    @property
    def card(self) -> list[dict[str, Any]]:
        """The observed conventions, one dictionary each; [] if no experiment was run."""
        return [
            {
                **_item(result),
                "experiment": result.case,
                "subject": say(entry.subject),
                "value_id": entry.value.id,
                "value": say(entry.value),
                "declared": say(entry.declared) if entry.declared else None,
                "agrees": entry.agrees,
            }
            for result in self.results
            for entry in result.entries
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the results as a dictionary of plain data.

        It contains the fields of the `Summary`, and `counts`, `findings` and `card`.
        """
        code = exit_code(self.results, complete=self.record.complete)
        data: dict[str, Any] = msgspec.to_builtins(summary(self, code))
        return data | {"counts": self.counts, "findings": self.findings, "card": self.card}

    def to_pandas(self) -> Any:
        """Return `findings` as a `pandas.DataFrame` with one row per finding.

        Raises:
            ConformanceError: pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ConformanceError(
                "to_pandas() needs pandas; install it, or use .findings"
            ) from error
        return pandas.DataFrame(self.findings)

    def save(self, path: str | Path) -> Path:
        """Save the results as a record, which the commands can read, and return its absolute path.

        Args:
            path: a file name that ends with .json. An existing file is replaced. Arrays are written
                to a second file beside it.

        Raises:
            ConformanceError: the name does not end with .json, the file cannot be written, or
                another run is writing it.
        """
        path = Path(path).absolute()
        check_writable(path)
        header = msgspec.structs.replace(self.record.header, name=path.stem)
        with Lock(path):
            write(path, msgspec.structs.replace(self.record, header=header), self.arrays)
        return path

    def __str__(self) -> str:
        """Return counts, unmet requirements and reasons as `mha-conformance run` prints them."""
        lines = [
            line
            for one in self.record.header.implementations
            for line in counted(one.name, self.results_of(one.name), reasons=False)
        ]
        return printable("\n".join(lines))

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.record.header.implementations)
        counts = ", ".join(f"{times} {verdict}" for verdict, times in self.counts.items())
        return f"<Outcome of {names}: {counts or 'nothing run'}>"

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        parts = [Text(str(self))]
        for one in self.record.header.implementations:
            result, of = worst(self.results_of(one.name))
            if result is not None:
                head = printable(heading(one.name, of))
                parts += [Text(f"\n{head}", style="bold"), Text(failure(result, one.spec))]
        return Group(*parts)

    def _repr_html_(self) -> str:
        from rich.console import Console

        console = Console(record=True, file=io.StringIO(), width=100)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _item(result: CaseResult) -> dict[str, Any]:
    names = ("implementation", "case", "dtype", "device", "mode")
    return {name: getattr(result, name) for name in names}


def _row(result: CaseResult, finding: Finding) -> dict[str, Any]:
    figures = finding.figures
    ratio = figures.max_ratio if figures else None
    return {
        **_item(result),
        "requirement": finding.requirement,
        "verdict": finding.verdict,
        "array": figures.array if figures else None,
        "max_ratio": math.inf if ratio is not None and ratio >= INFINITE else ratio,
        "limit": figures.limit if figures else None,
        "value": say(finding.value) or None,
        "cause_id": finding.cause.id or None,
        "cause": say(finding.cause) or None,
        "detail": finding.detail,
    }


# A failure


@cache
def _requirements() -> dict[str, RequirementInfo]:
    return {item.id: item for item in requirements()}


class _Suite:
    """A lookup of requirements, and of the questions of cases and experiments, for messages."""

    def requirement(self, name: str) -> RequirementInfo | None:
        return _requirements().get(name)

    def question(self, case: str) -> str:
        from conformance.cases.catalogue import case_of
        from conformance.experiments import EXPERIMENTS

        questions = {item.id: item.topic.question for item in EXPERIMENTS}
        with suppress(UnknownName):
            return questions[case] if case in questions else case_of(case).why
        return ""


def failure(
    result: CaseResult, spec: str, file: str = "", *, alone: bool = False, command: str = ""
) -> str:
    """Return a message with all deviations of an item, and a command that runs the item again.

    Args:
        result: the result of the item.
        spec: the implementation's name on the command line.
        file: the case file of the item, or "" if the case is in the catalogue.
        alone: whether the item conforms if the implementation was not called before it.
        command: the command to show; by default, it is made from `spec`.
    """
    return wording.failure(result, spec, _Suite(), file, alone=alone, command=command)


def is_must(finding: Finding) -> bool:
    """Return whether a finding is about a requirement of level "must"."""
    requirement = _requirements().get(finding.requirement)
    return requirement is not None and requirement.level == "must"


# The end, as text


def counted(name: str, results: Sequence[CaseResult], *, reasons: bool) -> Iterator[str]:
    """Yield lines about an implementation: counts, unmet requirements, items not verified.

    If `reasons` is true, the lines include the reasons why items are unsupported. If more than a
    third of all items are, the most frequent reasons are always among the lines, with a hint at
    what to declare. The most frequent errors of calls are among them, too. If the call fails in
    every supported item, nothing else is. If it fails in more than half of them, and also without
    a mask, a hint at sizes follows.
    """
    counts = count(result.verdict for result in results)
    yield f"{name}: {wording.counts_text(counts) if counts else 'nothing run'}"
    refused = reasons_of(results, ("unsupported",)).most_common()
    if "error" in counts and not verified(counts):
        yield "  nothing was verified: no item conforms or deviates"
    many = counts.get("unsupported", 0) > len(results) / 3
    if many:
        for reason, times in refused if reasons else refused[:5]:
            yield f"  unsupported, {plural(times, 'item')}: {reason}"
        if not any("+" in result.case for result in results):
            yield DECLARE
    asked = [result for result in results if result.verdict != "unsupported"]
    failed = [it for it in asked if _call_failed(it)]
    for reason, times in reasons_of(failed, ("error",)).most_common(3):
        yield f"  error, {plural(times, 'item')}: {reason}"
    most = len(failed) > len(asked) / 2
    if most and any(result.case.startswith("plain/") for result in failed):
        yield SIZES
    if failed and len(failed) == len(asked):
        # The call itself fails, so a line for each requirement would say nothing.
        return
    for requirement, findings in unmet(results):
        cause, times, same = _cause(findings)
        share = f"{times} of them: " if times < len(findings) else ""
        if not same:
            share = f"{share.removesuffix(': ') or 'all'}, with other numbers: "
        verdicts = wording.counts_text(count(finding.verdict for finding in findings))
        yield f"  {requirement.id}: {verdicts}{f' ({share}{cause})' if cause else ''}"
    for reason, times in reasons_of(results, NOT_VERIFIED).items():
        yield f"  not verified, {plural(times, 'item')}: {reason}"
    if reasons and not many:
        for reason, times in refused:
            yield f"  unsupported, {plural(times, 'item')}: {reason}"


def _call_failed(result: CaseResult) -> bool:
    """Return whether the call itself failed: the item has an error, and nothing was measured.

    Unsupported findings are ignored. There may also be deviations without figures, because an
    experiment may observe that an argument is rejected.
    """
    answered = [one for one in result.findings if one.verdict != "unsupported"]
    return any(one.verdict == "error" for one in answered) and all(
        one.verdict in WRONG and one.figures is None for one in answered
    )


SIZES = "  If it takes some sizes only, its adapter declares them: docs/adapters.md, section Sizes."


DECLARE = (
    "  What it always does, and what it never has, its adapter declares as fixed: "
    "docs/adapters.md, section What is fixed."
)


def unmet(results: Iterable[CaseResult]) -> list[tuple[RequirementInfo, list[Finding]]]:
    """Return the requirements that are not met, each with its findings that deviate or are errors.

    The requirements are in the order of a report.
    """
    wrong: dict[str, list[Finding]] = defaultdict(list)
    for result in results:
        for finding in result.findings:
            if finding.verdict in WRONG:
                wrong[finding.requirement].append(finding)
    return [(item, wrong[name]) for name, item in _requirements().items() if name in wrong]


def _cause(findings: Sequence[Finding]) -> tuple[str, int, bool]:
    """Return the text of the most frequent cause, its findings, and whether all say the same.

    Causes that differ in their numbers only, such as the factor of a scale, are one. Without any
    cause, the text is "".
    """
    kinds = _kinds(findings)
    if not kinds:
        return "", 0, True
    ((kind, times),) = kinds.most_common(1)
    causes = Counter(finding.cause for finding in findings if finding.cause.id == kind)
    return say(max(causes, key=causes.__getitem__)), times, len(causes) == 1


def _kinds(findings: Iterable[Finding]) -> Counter[str]:
    return Counter(finding.cause.id for finding in findings if finding.cause)


def worst(results: Iterable[CaseResult]) -> tuple[CaseResult | None, int]:
    """Return the result to show in full, and the number of results that deviate or are errors.

    The result to show is chosen by these criteria, in this order: a requirement of level "must", a
    case rather than an experiment, a known cause, which most findings have, and a large deviation.
    It is None if no result deviates or is an error.
    """
    wrong = [result for result in results if result.verdict in WRONG]
    kinds = _kinds(finding for result in wrong for finding in result.findings)

    def weight(result: CaseResult) -> tuple[bool, bool, int, tuple[float, float]]:
        return max(
            (is_must(finding), not result.entries, kinds[finding.cause.id], gravity(finding))
            for finding in result.findings
            if finding.verdict in WRONG
        )

    return max(wrong, key=weight, default=None), len(wrong)


def heading(name: str, of: int) -> str:
    """Return the heading of the item that is shown in full, the worst of `of` items."""
    return f"{name}, {f'the worst of {of} items' if of > 1 else 'the item'} in full:"


def everything(record: str) -> str:
    """Return a hint on how to show all deviations; `record` is the path of the record, or ""."""
    again = "the same with --strict"
    if record:
        return f"all of them: {shlex.join(['mha-conformance', 'report', record])}, or {again}"
    return f"all of them: {again}; or --record FILE.json, and mha-conformance report FILE.json"


def exit_code(results: Iterable[CaseResult], *, complete: bool) -> ExitCode:
    """Return the exit code of a run in which deviations are not failures.

    `complete` says whether every planned item has a result. Items that raise errors verify nothing.
    """
    verdicts = count(result.verdict for result in results)
    if not verified(verdicts):
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.OK if complete and not verdicts.keys() & NOT_VERIFIED else ExitCode.INCOMPLETE


# The end, as data


SCHEMA = "mha-conformance/summary/1"


class Missed(msgspec.Struct, frozen=True):
    """A requirement that an implementation does not meet.

    Attributes:
        requirement: the id of the requirement.
        level: the level of the requirement.
        findings: the number of findings that deviate or are errors, by verdict.
        cause: the text of the most frequent cause, or "" if none is known.
    """

    requirement: str
    level: str
    findings: dict[str, int]
    cause: str


class ImplementationSummary(msgspec.Struct, frozen=True):
    """The summary of the results of one implementation.

    Attributes:
        name: the name of the implementation.
        spec: its name on the command line.
        items: the number of its items, by verdict.
        missed: the requirements that it does not meet.
        not_verified: the number of items that crashed, timed out, were unavailable or were not run,
            by reason.
    """

    name: str
    spec: str
    items: dict[str, int]
    missed: list[Missed]
    not_verified: dict[str, int]


class Summary(msgspec.Struct, frozen=True):
    """The summary of a run, which `mha-conformance run --json` prints.

    Attributes:
        schema: `SCHEMA`.
        implementations: the summary of each implementation.
        planned: the number of planned items; `missing` of them were not examined.
        selection: the options that restricted or extended the run, or "".
        record: the path of the record, or "" if none was written.
        exit_code: the exit code of the command.
    """

    schema: str
    implementations: list[ImplementationSummary]
    planned: int
    missing: int
    selection: str
    record: str
    exit_code: int


def summary(outcome: Outcome, code: int) -> Summary:
    """Return the summary of a run; `code` is the exit code of the command."""
    header, results = outcome.record.header, outcome.results
    return Summary(
        schema=SCHEMA,
        implementations=[
            _examined(one.name, one.spec, outcome.results_of(one.name))
            for one in header.implementations
        ],
        planned=header.planned,
        missing=header.planned - len(results),
        selection=header.provenance.selection,
        record=str(outcome.path or ""),
        exit_code=code,
    )


def _examined(name: str, spec: str, results: Sequence[CaseResult]) -> ImplementationSummary:
    missed = [
        Missed(item.id, item.level, count(f.verdict for f in findings), _cause(findings)[0])
        for item, findings in unmet(results)
    ]
    reasons = reasons_of(results, NOT_VERIFIED)
    return ImplementationSummary(
        name, spec, count(r.verdict for r in results), missed, dict(reasons)
    )
