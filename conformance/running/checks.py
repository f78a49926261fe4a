"""The suite inside somebody's own tests: `parametrize_with_checks` and `assert_conforms`.

A check is one case in one dtype and mode. What an implementation says it cannot express is not
collected; what turns out so when it runs is skipped, with the reason. A skip is no pass: one check
of each implementation fails if nothing of it could be verified.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.adapter.base import Adapter
from conformance.adapter.loading import adapted, load, registered
from conformance.cases.catalogue import matches
from conformance.definition.dtypes import dtype_of
from conformance.errors import ConformanceError, UnknownName
from conformance.experiments import EXPERIMENTS
from conformance.records.findings import VERIFIED, CaseResult, count
from conformance.requirements import find_requirement
from conformance.running import LEVELS
from conformance.running.examiner import conforms_alone
from conformance.running.levels import can, cases_of, dtypes_of
from conformance.running.message import failure
from conformance.running.session import Inquiry, Item, Session, inquiries, plan
from conformance.text import printable, relative
from conformance.words import say

if TYPE_CHECKING:
    import pytest

Implementation = Adapter | type[Adapter] | str
Row = Item | Inquiry

MOST_TOLD = 2
"""Failures that `assert_conforms` tells in full."""


@dataclass(frozen=True, eq=False)
class Bench:
    """What the checks of one implementation share."""

    adapter: Adapter
    spec: str
    device: str
    session: Session = field(default_factory=Session)
    results: dict[str, CaseResult] = field(default_factory=dict)

    def examine(self, row: Row) -> CaseResult:
        """All findings of one item, remembered."""
        if row.id not in self.results:
            self.results[row.id] = _examine(self.session, row)
        return self.results[row.id]


def _examine(session: Session, row: Row) -> CaseResult:
    return session.inquire(row)[0] if isinstance(row, Inquiry) else session.examine(row)


@dataclass(frozen=True, eq=False)
class Check:
    """One check: call it. It raises `AssertionError` with a message that stands on its own."""

    id: str
    run: Callable[[], None]

    def __call__(self) -> None:
        """Passes, fails, or skips with the reason."""
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
        known: part of a check's id, or a pattern, to the reason why it is known to deviate. It is
            run, and must deviate: `xfail`, strictly.

    Raises:
        ConformanceError: for what is no implementation, an unknown name, or nothing to check.
    """
    import pytest

    every: list[Check] = []
    reasons = dict(known or {})
    for bench, rows in _planned(implementations, level, cases, dtypes, device):
        every += [_check(bench, row, _reason(row, reasons)) for row in rows]
        every.append(Check(f"{bench.adapter.name}:verified", _verified(bench, rows)))
    ids = [check.id for check in every]
    _check_known(reasons, ids)
    return pytest.mark.parametrize("check", every, ids=ids)


def assert_conforms(
    implementation: Implementation,
    *,
    level: str = "core",
    cases: str | Iterable[str] = (),
    dtypes: str | Iterable[str] = (),
    device: str = "cpu",
    known: Mapping[str, str] | None = None,
) -> None:
    """Run all checks of one implementation; raises `AssertionError` if one fails.

    The arguments are those of `parametrize_with_checks`.

    Raises:
        AssertionError: it deviates, or nothing at all could be verified.
        ConformanceError: for what is no implementation, an unknown name, or nothing to check.
    """
    __tracebackhide__ = True
    reasons = dict(known or {})
    ((bench, rows),) = _planned(implementation, level, cases, dtypes, device)
    _check_known(reasons, [_id(row) for row in rows])
    failed: list[tuple[Row, CaseResult, str]] = []
    for row in rows:
        result, reason = bench.examine(row), _reason(row, reasons)
        if _fails(result) != bool(reason):
            failed.append((row, result, reason))
    if failed:
        raise AssertionError(_all_failures(bench, failed, len(rows)))
    _verified(bench, rows)()


def _all_failures(bench: Bench, failed: Sequence[tuple[Row, CaseResult, str]], total: int) -> str:
    """How many, by cause; the first in full, of the others the names."""
    causes = Counter(
        next((say(f.cause) for f in result.findings if f.cause), "no known cause")
        for _, result, reason in failed
        if not reason
    )
    first = f"{bench.adapter.name}: {len(failed)} of {total} checks fail"
    told = ["\n".join([first, *(f"  {times}: {why}" for why, times in causes.most_common())])]
    for row, result, reason in failed[:MOST_TOLD]:
        command = _command(bench, row)
        told.append(_mended(row, reason) if reason else _message(bench, row, result, command))
    if failed[MOST_TOLD:]:
        others = [f"  {_id(row)}" for row, _, _ in failed[MOST_TOLD:]]
        told.append("\n".join([f"and {len(others)} more:", *others]))
    return printable("\n\n".join(told))


# Planning


def _planned(
    implementations: Implementation | Iterable[Implementation],
    level: str,
    cases: str | Iterable[str],
    dtypes: str | Iterable[str],
    device: str,
) -> Iterator[tuple[Bench, list[Row]]]:
    if level not in LEVELS:
        raise UnknownName("level", level, LEVELS)
    if isinstance(implementations, (Adapter, str, type)):
        implementations = [implementations]
    names: set[str] = set()
    for one in implementations:
        bench = _bench(one, device)
        if bench.adapter.name in names:
            raise ConformanceError(
                f"two implementations are called {bench.adapter.name!r}; rename one"
            )
        names.add(bench.adapter.name)
        yield bench, _rows(bench, level, _several(cases), _several(dtypes))


def _several(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _bench(given: Implementation, device: str) -> Bench:
    if isinstance(given, str):
        return Bench(load(given), given, device)
    adapter = adapted(given, getattr(given, "__name__", "") or _name_of(given))
    return Bench(adapter, _spec(given), device)


def _module_of(given: Any) -> tuple[Any, str]:
    """The module in which it has a name, and that name."""
    inner = getattr(given, "_function", given)
    module = sys.modules.get(getattr(inner, "__module__", ""))
    for name, value in vars(module).items() if module is not None else ():
        if value is given:
            return module, name
    return None, ""


def _name_of(given: Any) -> str:
    return _module_of(given)[1] or type(given).__name__


def _spec(given: Any) -> str:
    """What the command line would take for it, or ""."""
    module, name = _module_of(given)
    file = getattr(module, "__file__", None)
    if not name or file is None:
        return ""
    path = Path(file)
    for entry in registered().values():
        if entry.value == f"{module.__name__}:{name}":
            return entry.name
    return f"{relative(path)}:{name}"


def _rows(bench: Bench, level: str, patterns: list[str], dtypes: list[str]) -> list[Row]:
    adapter = bench.adapter
    wanted = [dtype_of(name).name for name in dtypes] or dtypes_of(adapter, level)
    rows: list[Row] = [
        item
        for item in plan([adapter], cases_of(level, patterns), wanted, bench.device)
        if can(adapter, item.case, item.dtype)
    ]
    if level == "full" and not patterns:
        rows += [
            row for row in inquiries([adapter], EXPERIMENTS, bench.device) if row.dtype in wanted
        ]
    if not rows:
        asked = f"cases {', '.join(patterns) or level} in {', '.join(wanted) or 'no dtype'}"
        raise ConformanceError(
            f"{adapter.name}: nothing to check: its adapter says that it cannot express {asked}"
        )
    return rows


# Checking


def _id(row: Row) -> str:
    """As an item's, without what says nothing: the CPU, and a mode that is the only one."""
    case = row.case.id if isinstance(row, Item) else row.experiment.id
    parts = [row.adapter.name, case, row.dtype]
    parts += [row.device] if row.device != "cpu" else []
    parts += [row.mode.name] if len(row.adapter.modes) > 1 else []
    return ":".join(parts)


def _reason(row: Row, known: Mapping[str, str]) -> str:
    return next((why for pattern, why in known.items() if matches(_id(row), pattern)), "")


def _check_known(known: Mapping[str, str], ids: Sequence[str]) -> None:
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
            pytest.fail(_mended(row, known), pytrace=False)
        if result.verdict not in VERIFIED:
            details = [finding.detail for finding in result.findings]
            told = f"{result.verdict}: {next((it for it in details if it), 'nothing applies')}"
            pytest.skip(printable(told))

    return Check(_id(row), run)


def _verified(bench: Bench, rows: Sequence[Row]) -> Callable[[], None]:
    """Fails unless a check says something about the implementation: the first one that does."""

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
        told = "\n".join(f"  {reason}" for reason in list(reasons)[:MOST_TOLD])
        raise AssertionError(
            printable(f"{bench.adapter.name}: nothing was verified ({counted})\n{told}")
        )

    return run


def _fails(result: CaseResult) -> bool:
    """As the suite's own tests: errors, and what deviates from a must."""
    if result.verdict in ("error", "crashed", "timed-out"):
        return True
    return any(
        finding.verdict == "deviates" and find_requirement(finding.requirement).level == "must"
        for finding in result.findings
    )


def _mended(row: Row, reason: str) -> str:
    return printable(
        f"{_id(row)} is known to deviate ({reason}), and does not: remove it from known="
    )


def _message(bench: Bench, row: Row, result: CaseResult, command: str) -> str:
    alone = len(bench.results) > 1 and conforms_alone(row)
    return failure(result, bench.spec, alone=alone, command=command)


def _command(bench: Bench, row: Row) -> str:
    """What asks this item again, for what has no name on the command line."""
    if bench.spec:
        return ""
    case = row.case.id if isinstance(row, Item) else row.experiment.id
    return f"assert_conforms({bench.adapter.name}, cases={case!r}, dtypes={row.dtype!r})"


def _node() -> str:
    """The test that pytest runs now, as a command."""
    node = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    return shlex.join(["pytest", node]) if node else ""
