"""Run the suite in another project's tests: `parametrize_with_checks` and `assert_conforms`.

A check is one case or experiment in one dtype and mode. Cases that an adapter declares as
unsupported are left out. A check that verifies nothing when it is run, for example because the
implementation is unavailable, does not fail; pytest skips it, with the reason. For each
implementation, an additional check fails if none of its checks verified anything.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from conformance.adapter.base import Adapter
from conformance.cases.catalogue import matches
from conformance.errors import ConformanceError, UnknownName
from conformance.records.findings import VERIFIED, CaseResult, count
from conformance.running.examine import Implementation, failure, is_must, resolve, several
from conformance.running.selection import Selection, can_express, check_distinct, dtypes_of
from conformance.running.session import Examiner, Item, Row, conforms_alone
from conformance.text import printable
from conformance.words import say

if TYPE_CHECKING:
    import pytest

SHOWN_IN_FULL = 2
"""The maximum number of failures that `assert_conforms` shows in full, and of reasons that are
given if nothing was verified."""


@dataclass(frozen=True, eq=False)
class Bench:
    """The state that all checks of an implementation share.

    Attributes:
        adapter: the adapter of the implementation.
        spec: the implementation's name on the command line, or "" if it has none.
        examiner: the examiner of the implementation's rows.
        results: the results so far, by the id of the row.
    """

    adapter: Adapter
    spec: str
    examiner: Examiner = field(default_factory=lambda: Examiner({}))
    results: dict[str, CaseResult] = field(default_factory=dict)

    def examine(self, row: Row) -> CaseResult:
        """Return the result of a row, which is cached so that each row is examined once."""
        if row.id not in self.results:
            self.results[row.id] = self.examiner.examine(row)[0]
        return self.results[row.id]

    def message(self, row: Row, result: CaseResult, command: str) -> str:
        """Return a message with all deviations of a row and a command that reproduces them.

        If `command` is "", a command is generated.
        """
        if not command and not self.spec:
            name, case = self.adapter.name, row.asked.id
            command = f"assert_conforms({name}, cases={case!r}, dtypes={row.dtype!r})"
        alone = len(self.results) > 1 and conforms_alone(row)
        return failure(result, self.spec, alone=alone, command=command)


@dataclass(frozen=True, eq=False)
class Check:
    """A callable check, which `parametrize_with_checks` passes to a test."""

    id: str
    run: Callable[[], None]

    def __call__(self) -> None:
        """Run the check: pass, skip, xfail, or fail with a self-contained message."""
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
    """Parametrize a test with an argument `check`, for all checks of the implementations.

        @parametrize_with_checks([MyAttention], level="core")
        def test_conforms(check):
            check()

    Args:
        implementations: adapter classes or instances, functions decorated with
            `attention_function`, or arguments of `mha-conformance run`: names, files, modules.
        level: "core" for the cases marked `core`, normally in float32 and bfloat16, which takes
            some seconds; "full" for all cases in all dtypes of the adapter, and the experiments;
            "large" for the cases marked `core` or `large`, at the sizes for which kernels are
            written, normally in float32 and bfloat16.
        cases: parts of case ids, beginnings of experiment ids, or wildcard patterns for either. The
            cases and experiments that they select replace those of level "core" or "full"; at level
            "large", cases are selected from those of the level.
        dtypes: the dtypes to use instead of those of the level.
        device: "cpu" or "gpu".
        known: the reasons for known deviations, by parts or patterns of the ids of checks. Checks
            with matching ids are run as strict xfails: they fail if they are verified and do not
            deviate.

    Raises:
        ConformanceError: the arguments are invalid, or there is nothing to check.
    """
    import pytest

    checks: list[Check] = []
    reasons = dict(known or {})
    for bench, rows in _plan(implementations, level, cases, dtypes, device):
        for row in rows:
            checks.append(Check(_id(row), partial(_check, bench, row, _reason(row, reasons))))
        checks.append(Check(f"{bench.adapter.name}:verified", partial(_verify, bench, rows)))
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
    """Run all checks of one implementation; raise `AssertionError` if any of them fails.

    `level`, `cases`, `dtypes`, `device` and `known` are as for `parametrize_with_checks`.

    Raises:
        AssertionError: a check fails, a known deviation is gone, or nothing could be verified.
        ConformanceError: the arguments are invalid, or there is nothing to check.
    """
    __tracebackhide__ = True
    reasons = dict(known or {})
    ((bench, rows),) = _plan(implementation, level, cases, dtypes, device)
    _validate(reasons, [_id(row) for row in rows])
    failed: list[tuple[Row, CaseResult, str]] = []
    for row in rows:
        result, reason = bench.examine(row), _reason(row, reasons)
        fails = _fails(result)
        if fails != bool(reason) and (fails or result.verdict in VERIFIED):
            failed.append((row, result, reason))
    if failed:
        raise AssertionError(_all_failures(bench, failed, len(rows)))
    _verify(bench, rows)


def _all_failures(bench: Bench, failed: Sequence[tuple[Row, CaseResult, str]], total: int) -> str:
    """Return a message that counts the failures by cause and shows the first few in full."""
    causes = Counter(
        next((say(f.cause) for f in result.findings if f.cause), "no known cause")
        for _, result, reason in failed
        if not reason
    )
    first = f"{bench.adapter.name}: {len(failed)} of {total} checks fail"
    parts = ["\n".join([first, *(f"  {times}: {why}" for why, times in causes.most_common())])]
    for row, result, reason in failed[:SHOWN_IN_FULL]:
        parts.append(_fixed(row, reason) if reason else bench.message(row, result, ""))
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
    benches = [Bench(*resolve(one)) for one in implementations]
    check_distinct((bench.adapter.name, bench.spec) for bench in benches)
    for bench in benches:
        yield bench, _rows(bench.adapter, selection, device)


def _rows(adapter: Adapter, selection: Selection, device: str) -> list[Row]:
    dtypes = selection.dtypes or dtypes_of(adapter, selection.level)
    # If cases are given, they replace the default level.
    level = "full" if selection.cases and selection.level == "core" else selection.level
    rows = [
        row
        for row in Selection(selection.cases, dtypes, level=level).rows([adapter], device)
        if not isinstance(row, Item) or can_express(adapter, row.asked, row.dtype)
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
    """Return the id of a row's check.

    The device is left out if it is "cpu", and the mode if the adapter has only one.
    """
    parts = [row.adapter.name, row.asked.id, row.dtype]
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


def _check(bench: Bench, row: Row, known: str) -> None:
    """Examine a row in the current test, which passes, fails, is skipped or xfails accordingly.

    `known` is the reason why the row is known to deviate, or "" if it must not deviate.
    """
    __tracebackhide__ = True
    import pytest

    result = bench.examine(row)
    if _fails(result):
        if known:
            pytest.xfail(printable(f"known: {known}"))
        # Build a command that reruns the current test.
        node = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        command = shlex.join(["pytest", node]) if node else ""
        pytest.fail(bench.message(row, result, command), pytrace=False)
    if result.verdict not in VERIFIED:
        reason = next((f.detail for f in result.findings if f.detail), "nothing applies")
        pytest.skip(printable(f"{result.verdict}: {reason}"))
    if known:
        pytest.fail(_fixed(row, known), pytrace=False)


def _verify(bench: Bench, rows: Sequence[Row]) -> None:
    """Raise `AssertionError` if no row could be verified.

    The first unavailable row ends the search for a verified one.
    """
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


def _fails(result: CaseResult) -> bool:
    """Return whether a check with this result fails.

    It fails if there is an error, crash or timeout, or if a requirement of level "must" is not met.
    """
    return result.verdict in ("error", "crashed", "timed-out") or any(
        finding.verdict == "deviates" and is_must(finding) for finding in result.findings
    )


def _fixed(row: Row, reason: str) -> str:
    return printable(
        f"{_id(row)} is known to deviate ({reason}), and does not: remove it from known="
    )
