"""The suite in a project's own tests: `parametrize_with_checks` and `assert_conforms`.

A check is one case in one dtype and mode. What an adapter declares as unsupported is not collected;
what turns out to be unsupported when it runs is skipped, with the reason. A skip is not a pass: one
check of each implementation fails if nothing of it could be verified.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conformance.adapter.base import Adapter
from conformance.cases.catalogue import matches
from conformance.errors import ConformanceError, UnknownName
from conformance.records.findings import VERIFIED, CaseResult, count
from conformance.running.ending import failure, is_must
from conformance.running.examine import Implementation, resolve, several
from conformance.running.examiner import Examiner, conforms_alone
from conformance.running.selection import Selection, can_express, dtypes_of
from conformance.running.session import Item, Row
from conformance.text import printable
from conformance.words import say

if TYPE_CHECKING:
    import pytest

SHOWN_IN_FULL = 2
"""Failures that `assert_conforms` shows in full."""


@dataclass(frozen=True, eq=False)
class Bench:
    """State shared by the checks of one implementation; `spec` is its name on the command line."""

    adapter: Adapter
    spec: str
    examiner: Examiner = field(default_factory=lambda: Examiner({}))
    results: dict[str, CaseResult] = field(default_factory=dict)

    def examine(self, row: Row) -> CaseResult:
        """Return all findings of a row, examined once."""
        if row.id not in self.results:
            self.results[row.id] = self.examiner.examine(row)[0]
        return self.results[row.id]


@dataclass(frozen=True, eq=False)
class Check:
    """A callable check; it raises `AssertionError` with a self-contained message."""

    id: str
    run: Callable[[], None]

    def __call__(self) -> None:
        """Pass, fail, or skip with the reason."""
        __tracebackhide__ = True
        self.run()

    def __repr__(self) -> str:
        return f"<check {self.id}>"


def parametrize_with_checks(
    implementations: Implementation | Iterable[Implementation],
    *,
    level: str = "core",
    cases: str | Iterable[str] = (),
    dtypes: str | Iterable[str] = (),
    device: str = "cpu",
    known: Mapping[str, str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test with `check`, for every implementation.

        @parametrize_with_checks([MyAttention], level="core")
        def test_conforms(check):
            check()

    Args:
        implementations: adapter classes, their instances, functions decorated with
            `attention_function`, or what `mha-conformance run` takes: names, files, modules.
        level: "core": some seconds, the cases marked `core` in float32 and one half precision;
            "full": the whole catalogue in every dtype, and the experiments with conventions.
        cases: instead of the level's, those with this in their id, or matching it as a pattern.
        dtypes: instead of the level's.
        device: "cpu" or "gpu".
        known: part of a check's id, or a pattern, to the reason why it is known to deviate. The
            check is run, and must deviate: `xfail`, strictly.

    Raises:
        ConformanceError: for what is not an implementation, an unknown name, or nothing to check.
    """
    import pytest

    checks: list[Check] = []
    reasons = dict(known or {})
    for bench, rows in _plan(implementations, level, cases, dtypes, device):
        checks += [_check(bench, row, _reason(row, reasons)) for row in rows]
        checks.append(Check(f"{bench.adapter.name}:verified", _verified(bench, rows)))
    ids = [check.id for check in checks]
    _validate(reasons, ids)
    return pytest.mark.parametrize("check", checks, ids=ids)


def assert_conforms(
    implementation: Implementation,
    *,
    level: str = "core",
    cases: str | Iterable[str] = (),
    dtypes: str | Iterable[str] = (),
    device: str = "cpu",
    known: Mapping[str, str] | None = None,
) -> None:
    """Run all checks of one implementation; raise `AssertionError` if one fails.

    The arguments are those of `parametrize_with_checks`.

    Raises:
        AssertionError: it deviates, or nothing at all could be verified.
        ConformanceError: for what is not an implementation, an unknown name, or nothing to check.
    """
    __tracebackhide__ = True
    reasons = dict(known or {})
    ((bench, rows),) = _plan(implementation, level, cases, dtypes, device)
    _validate(reasons, [_id(row) for row in rows])
    failed: list[tuple[Row, CaseResult, str]] = []
    for row in rows:
        result, reason = bench.examine(row), _reason(row, reasons)
        if _fails(result) != bool(reason):
            failed.append((row, result, reason))
    if failed:
        raise AssertionError(_all_failures(bench, failed, len(rows)))
    _verified(bench, rows)()


def _all_failures(bench: Bench, failed: Sequence[tuple[Row, CaseResult, str]], total: int) -> str:
    """Return the number of failures by cause, the first failures in full, and the other ids."""
    causes = Counter(
        next((say(f.cause) for f in result.findings if f.cause), "no known cause")
        for _, result, reason in failed
        if not reason
    )
    first = f"{bench.adapter.name}: {len(failed)} of {total} checks fail"
    parts = ["\n".join([first, *(f"  {times}: {why}" for why, times in causes.most_common())])]
    for row, result, reason in failed[:SHOWN_IN_FULL]:
        command = _command(bench, row)
        parts.append(_fixed(row, reason) if reason else _message(bench, row, result, command))
    if failed[SHOWN_IN_FULL:]:
        others = [f"  {_id(row)}" for row, _, _ in failed[SHOWN_IN_FULL:]]
        parts.append("\n".join([f"and {len(others)} more:", *others]))
    return printable("\n\n".join(parts))


# Planning


def _plan(
    implementations: Implementation | Iterable[Implementation],
    level: str,
    cases: str | Iterable[str],
    dtypes: str | Iterable[str],
    device: str,
) -> Iterator[tuple[Bench, list[Row]]]:
    if isinstance(implementations, (Adapter, str, type)):
        implementations = [implementations]
    selection = Selection(several(cases), several(dtypes), level=level)
    names: set[str] = set()
    for one in implementations:
        bench = Bench(*resolve(one))
        if bench.adapter.name in names:
            raise ConformanceError(
                f"two implementations are called {bench.adapter.name!r}; rename one"
            )
        names.add(bench.adapter.name)
        yield bench, _rows(bench.adapter, selection, device)


def _rows(adapter: Adapter, selection: Selection, device: str) -> list[Row]:
    dtypes = selection.dtypes or dtypes_of(adapter, selection.level)
    rows = [
        row
        for row in Selection(selection.cases, dtypes, level=selection.level).rows([adapter], device)
        if not isinstance(row, Item) or can_express(adapter, row.case, row.dtype)
    ]
    if not dtypes or not rows:
        cases = ", ".join(selection.cases) or selection.level
        raise ConformanceError(
            f"{adapter.name}: nothing to check: its adapter says that it cannot express cases "
            f"{cases} in {', '.join(dtypes) or 'no dtype'}"
        )
    return rows


# Checking


def _id(row: Row) -> str:
    """Return an item's id without what is not informative: the CPU, and the only mode."""
    parts = [row.adapter.name, row.case_id, row.dtype]
    parts += [row.device] if row.device != "cpu" else []
    parts += [row.mode.name] if len(row.adapter.modes) > 1 else []
    return ":".join(parts)


def _reason(row: Row, known: Mapping[str, str]) -> str:
    return next((why for pattern, why in known.items() if matches(_id(row), pattern)), "")


def _validate(known: Mapping[str, str], ids: Sequence[str]) -> None:
    for pattern, reason in known.items():
        if not reason.strip():
            raise ConformanceError(f"known: {pattern!r} has no reason; say why it deviates")
        if not any(matches(name, pattern) for name in ids):
            raise UnknownName("check in known=", pattern, ids)


def _check(bench: Bench, row: Row, known: str) -> Check:
    def run() -> None:
        __tracebackhide__ = True
        import pytest

        result = bench.examine(row)
        if _fails(result):
            if known:
                pytest.xfail(printable(f"known: {known}"))
            command = _node() or _command(bench, row)
            pytest.fail(_message(bench, row, result, command), pytrace=False)
        if known:
            pytest.fail(_fixed(row, known), pytrace=False)
        if result.verdict not in VERIFIED:
            details = [finding.detail for finding in result.findings]
            reason = next((detail for detail in details if detail), "nothing applies")
            pytest.skip(printable(f"{result.verdict}: {reason}"))

    return Check(_id(row), run)


def _verified(bench: Bench, rows: Sequence[Row]) -> Callable[[], None]:
    """Return a check that fails if no row says anything about the implementation."""

    def run() -> None:
        __tracebackhide__ = True
        verdicts: list[str] = []
        reasons: dict[str, None] = {}
        for row in rows:
            result = bench.examine(row)
            if result.verdict in VERIFIED:
                return
            verdicts.append(result.verdict)
            reasons |= dict.fromkeys(f"{f.verdict}: {f.detail}" for f in result.findings)
            if result.verdict == "unavailable":
                break
        counted = ", ".join(f"{n} {verdict}" for verdict, n in count(verdicts).items())
        lines = [f"{bench.adapter.name}: nothing was verified ({counted})"]
        lines += [f"  {reason}" for reason in list(reasons)[:SHOWN_IN_FULL]]
        raise AssertionError(printable("\n".join(lines)))

    return run


def _fails(result: CaseResult) -> bool:
    """Return whether a check fails: errors, and deviations from a must."""
    return result.verdict in ("error", "crashed", "timed-out") or any(
        finding.verdict == "deviates" and is_must(finding) for finding in result.findings
    )


def _fixed(row: Row, reason: str) -> str:
    return printable(
        f"{_id(row)} is known to deviate ({reason}), and does not: remove it from known="
    )


def _message(bench: Bench, row: Row, result: CaseResult, command: str) -> str:
    alone = len(bench.results) > 1 and conforms_alone(row)
    return failure(result, bench.spec, alone=alone, command=command)


def _command(bench: Bench, row: Row) -> str:
    """Return the call that runs this check again, if the command line cannot name it; else ""."""
    if bench.spec:
        return ""
    return f"assert_conforms({bench.adapter.name}, cases={row.case_id!r}, dtypes={row.dtype!r})"


def _node() -> str:
    """Return the command for the test that pytest runs now, or ""."""
    node = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    return shlex.join(["pytest", node]) if node else ""
