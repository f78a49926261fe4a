"""A conformance run inside a pytest session: items in, findings out, one record at the end.

Findings travel on pytest's own test reports, so that they arrive at the controller under xdist too;
only the controller writes.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from conformance.adapter.base import Adapter, Mode
from conformance.adapter.loading import load, registered
from conformance.cases.case import Case
from conformance.cases.casefile import load_case
from conformance.cases.catalogue import catalogue, find_cases, matches
from conformance.cases.description import describe_all
from conformance.definition.dtypes import DTYPES, dtype_of
from conformance.errors import PYTEST_CODES, ConformanceError, ExitCode, UnknownName
from conformance.experiments import EXPERIMENTS, Experiment, find_experiments
from conformance.records.findings import (
    NOT_VERIFIED,
    VERIFIED,
    CaseResult,
    Finding,
    without_outcome,
)
from conformance.records.header import SCHEMA, Header, Implementation
from conformance.records.record import (
    Journal,
    check_writable,
    decode_line,
    encode_line,
    finish,
    journal_path,
)
from conformance.requirements import find_requirement
from conformance.running import digests, ending, gated
from conformance.running.earlier import Earlier, as_measured, earlier
from conformance.running.ending import Outcome
from conformance.running.examiner import Examiner, Worst, conforms_alone, kept, places
from conformance.running.gated import Gated
from conformance.running.levels import CORE_DTYPES
from conformance.running.message import failure
from conformance.running.parts import Lock, parse_shard, part
from conformance.running.provenance import (
    describe,
    new_run_id,
    provenance,
    requirements,
    run_id,
)
from conformance.running.session import Inquiry, Item, inquiries, modes_of, plan
from conformance.text import printable

if TYPE_CHECKING:
    from conformance.running.isolation import Supervisor

ENDED = "the run ended before this item"
"""Why an item has no outcome, in the record of an interrupted run."""

FIXTURES = {"conformance_item", "conformance_run", "request"}
"""The fixtures of an item's test."""
SETUP_PLUGINS = {f"_pytest.{name}" for name in ("runner", "capture", "skipping", "unittest")}
SETUP_OPTIONS = ("usepdb", "trace", "setupshow", "setuponly", "setupplan")
"""Plugins of pytest that do nothing to such a test in setup, and options that change this."""


class Run:
    """What this pytest session examines. Registered as a plugin of its own."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        specs: list[str] = config.getoption("--implementation")
        if not specs:
            names = ", ".join(registered())
            raise ConformanceError(f"which implementation? say --implementation NAME ({names})")
        self.survey: bool = config.getoption("--survey")
        self.device: str = config.getoption("--device")
        files: list[str] = config.getoption("--case-file")
        # Read once, and early: the plan, the selection and a failure's message name them.
        self.files = {case.id: case for case in (load_case(Path(file)) for file in files)}
        self.supervisors: dict[str, Supervisor] = {}
        self._declared: dict[str, bytes] = {}
        self.adapters: list[tuple[Adapter, str]] = [(self._adapter(spec), spec) for spec in specs]
        _no_twins(self.adapters)
        if self._given is not None and not self._is_worker:
            check_writable(self._given)
        adapters = [adapter for adapter, _ in self.adapters]
        items = [
            item
            for item in plan(adapters, self._cases(), self._dtypes(), self.device, self._modes_of)
            if self._has_mode(item, adapters) and self._on_level(item)
        ]
        asked = [
            item
            for item in inquiries(adapters, self._experiments(), self.device)
            if item.dtype in self._dtypes()
            and self._has_mode(item, adapters)
            and self._on_level(item)
        ]
        self.shard = parse_shard(config.getoption("--shard"))
        self.planned: list[Item | Inquiry] = part(items, asked, *self.shard)
        self.items = [item for item in self.planned if isinstance(item, Item)]
        self.inquiries = [item for item in self.planned if isinstance(item, Inquiry)]
        self._places = places(self.items)
        self._examiner = Examiner(self._places)
        self.results: dict[str, CaseResult] = {}
        self._lines: dict[str, bytes] = {}
        self._asked = 0
        """Items that this process has examined."""
        self._collected: list[str] | None = None
        self._only_calls = False
        self._journal: Journal | None = None
        self.written: Path | None = None
        self._gated: Gated | None = None
        self._lock = self._locked()
        self._taken = self._take()
        self._done = self._taken.lines
        baseline = config.getoption("--conformance-baseline")
        if baseline is not None and not config.option.collectonly:
            self._gated = Gated(
                Path(baseline),
                config.invocation_params.dir,
                self._header(),
                verbose=config.getoption("--conformance-verbose"),
            )

    # What is examined

    def _cases(self) -> tuple[Case, ...]:
        patterns: list[str] = self.config.getoption("--case")
        every = (*catalogue(), *self.files.values())
        if not patterns:
            return every
        wanted: set[str] = set()
        for pattern in patterns:
            stored = {name for name in self.files if matches(name, pattern)}
            wanted |= stored
            try:
                wanted |= {case.id for case in find_cases(pattern)}
            except UnknownName:
                if not stored and not find_experiments(pattern):
                    raise
        return tuple(case for case in every if case.id in wanted)

    def _experiments(self) -> tuple[Experiment, ...]:
        patterns: list[str] = self.config.getoption("--case")
        if not patterns:
            return EXPERIMENTS
        wanted = {item.id for pattern in patterns for item in find_experiments(pattern)}
        return tuple(item for item in EXPERIMENTS if item.id in wanted)

    def _dtypes(self) -> list[str]:
        wanted: list[str] = self.config.getoption("--dtype")
        return [dtype_of(name).name for name in wanted] or list(DTYPES)

    def _has_mode(self, item: Item | Inquiry, adapters: list[Adapter]) -> bool:
        wanted: list[str] = self.config.getoption("--mode")
        known = [mode.name for adapter in adapters for mode in adapter.modes]
        for name in wanted:
            if name not in known:
                raise UnknownName("mode", name, known)
        return not wanted or item.mode.name in wanted

    def _on_level(self, item: Item | Inquiry) -> bool:
        """Whether the level has it; what is asked for by name is asked on every level."""
        if self.config.getoption("--level") != "core" or self.config.getoption("--case"):
            return True
        return isinstance(item, Item) and item.case.core and item.dtype in CORE_DTYPES

    @property
    def selection(self) -> str:
        """What narrowed the run or was added to it, or ""."""
        told = [
            f"{option} {value}"
            for option in ("--case", "--dtype", "--mode")
            for value in self.config.getoption(option)
        ]
        level = self.config.getoption("--level")
        told += [f"--level {level}"] if level == "core" else []
        # They add to the catalogue instead of taking away; a record must not hide them either way.
        told += [f"--case-file {case.path} ({case.id})" for case in self.files.values()]
        told += [f"--shard {self.shard[0]}/{self.shard[1]}"] if self.shard[1] > 1 else []
        keyword = self.config.getoption("keyword", "")
        return " ".join([*told, f"-k {keyword!r}"] if keyword else told)

    def examine(self, item: Item | Inquiry) -> None:
        """Examine one item, and tell pytest its outcome."""
        result, self._lines[item.id] = self._examine(item)
        self._asked += 1
        verdict = result.verdict
        gravest = [finding for finding in result.findings if finding.verdict == verdict]
        if verdict in ("deviates", "error", "crashed", "timed-out"):
            stored = self.files.get(result.case)
            place = (self._spec(item.adapter), stored.path if stored else "")
            if self.survey:
                pytest.xfail(failure(result, *place).splitlines()[0])
            if self._gated is not None:
                known = self._gated.excuse(result)
                if known:
                    pytest.xfail(known)
                result = self._gated.unknown(result)
            elif verdict == "deviates" and not any(_is_must(finding) for finding in gravest):
                return
            alone = self._only_after_others(item)
            pytest.fail(failure(result, *place, alone=alone), pytrace=False)
        elif verdict in ("unsupported", "unavailable", "not-run"):
            pytest.skip(printable(gravest[0].detail) if gravest else "no requirement applies")

    def _only_after_others(self, item: Item | Inquiry) -> bool:
        """Whether the item conforms if nothing was asked before it."""
        isolated = item.adapter.name in self.supervisors
        return not isolated and self._asked > 1 and conforms_alone(item)

    def _examine(self, item: Item | Inquiry) -> tuple[CaseResult, bytes]:
        """The result and its journal line: as it was measured earlier, or measured now."""
        line = self._done.get(item.id)
        if line is not None:
            return decode_line(line)[0], line
        supervisor = self.supervisors.get(item.adapter.name)
        if supervisor is None:
            return self._examiner.examine(item)
        line = supervisor.examine(item, self._places.get(item.id, -1))
        return decode_line(line)[0], line

    # Implementations in processes of their own

    def _adapter(self, spec: str) -> Adapter:
        """The adapter, or what stands for it here if it is isolated."""
        debugging = self.config.getoption("usepdb", False) or self.config.getoption("trace", False)
        if not isolated(spec, self.config.getoption("isolate"), debugging=debugging):
            return load(spec)
        from conformance.running.isolation import Limits, StandIn, supervise
        from conformance.running.isolation.messages import Declared, decode, encode

        option = self.config.getoption
        limits = Limits(
            option("--item-timeout"), option("--start-timeout"), option("--memory-limit")
        )
        supervisor = supervise(spec, self.device, limits)
        if self._is_worker:
            # All workers plan the same, and none of them waits for an import.
            declared = decode(self._from_controller["declared"][spec], Declared)
            supervisor.adopt(declared)
        else:
            declared = supervisor.declare(self._cases(), self._dtypes())
            self._declared[spec] = encode(declared)
        if self._is_distributed:
            # Workers ask; nobody is asked here.
            supervisor.close()
        self.supervisors[declared.implementation.name] = supervisor
        return StandIn(declared)

    def _modes_of(self, adapter: Adapter, case: Case, dtype: str) -> Sequence[Mode]:
        if adapter.name in self.supervisors:
            return adapter.modes_of(case, dtype)  # type: ignore[attr-defined]
        return modes_of(adapter, case, dtype)

    @property
    def _is_distributed(self) -> bool:
        return not self._is_worker and self.config.getoption("dist", "no") != "no"

    @property
    def _from_controller(self) -> dict[str, Any]:
        return self.config.workerinput["conformance"]  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Under xdist a worker knows what was declared, and what need not be examined again."""
        node.workerinput["conformance"] = {
            "declared": self._declared,
            "header": msgspec.json.encode(self._header()).decode() if self._done else "",
        }

    def pytest_unconfigure(self) -> None:
        """No process outlives the run."""
        for supervisor in self.supervisors.values():
            supervisor.close()
        if self._lock is not None:
            self._lock.release()
        digests.remember()

    # What was measured earlier

    def _locked(self) -> Lock | None:
        """Hold the record, which nobody else may write in the meantime."""
        if self._given is None or self._is_worker or self.config.option.collectonly:
            return None
        return Lock(self._given)

    def _take(self) -> Earlier:
        """What still holds of an earlier record, or of the journal of a run that was killed."""
        option = self.config.getoption
        if self._given is None or option("--fresh") or self.config.option.collectonly:
            return Earlier()
        header = None if self._is_worker else self._header()
        if header is None:
            encoded = self._from_controller["header"]
            if not encoded:
                return Earlier()
            header = msgspec.json.decode(encoded, type=Header)
        # A narrowed run looks into the whole record too.
        records = dict.fromkeys([self._record or self._given, self._given])
        files = [file for record in records for file in (journal_path(record), record)]
        there = [file for file in files if file.exists()]
        return earlier(there, header, self.planned, self._places)

    def _journal_of(self, record: Path) -> Journal:
        """Where findings go; it has what still holds before anything is added."""
        chosen = {*self.chosen}
        lines = [line for name, line in self._done.items() if name in chosen]
        return Journal(record, self._header(), lines)

    def _keep(self) -> Callable[[str], bool]:
        """Which arrays the record has: of attention weights only the worst of all processes."""
        worst = Worst(self._places)
        for result in self.results.values():
            worst.takes(result)
        return kept(worst.ids, self._places)

    def _spec(self, adapter: Adapter) -> str:
        return next(spec for found, spec in self.adapters if found is adapter)

    # What pytest does around an item

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """See whether setup and teardown have anything to do in this session."""
        hooks = (self.config.hook.pytest_runtest_setup, self.config.hook.pytest_runtest_teardown)
        plugins = {it.function.__module__ for hook in hooks for it in hook.get_hookimpls()}
        self._only_calls = (
            plugins <= SETUP_PLUGINS
            and not any(getattr(self.config.option, name, False) for name in SETUP_OPTIONS)
            and all(
                FIXTURES.issuperset(getattr(item, "fixturenames", [""]))
                and all(mark.name == "parametrize" for mark in item.iter_markers())
                for item in session.items
            )
        )

    def pytest_runtest_protocol(self, item: pytest.Function) -> bool | None:
        """Only call the test where pytest's way through setup and teardown would do nothing.

        That way costs as much as a small attention does. The reports of all three are made, because
        JUnit files and other plugins count on them.
        """
        if not self._only_calls:
            return None
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        examined = item.callspec.params["conformance_item"]
        item.funcargs = {"conformance_item": examined, "conformance_run": self}
        stops = (pytest.exit.Exception, KeyboardInterrupt)
        for when in ("setup", "call", "teardown"):
            if when == "call":
                call = pytest.CallInfo.from_call(
                    lambda: hook.pytest_runtest_call(item=item), when=when, reraise=stops
                )
                report = hook.pytest_runtest_makereport(item=item, call=call)
            else:
                nothing = pytest.CallInfo.from_call(lambda: None, when=when)
                report = pytest.TestReport.from_item_and_call(item, nothing)
            hook.pytest_runtest_logreport(report=report)
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    # From worker to controller

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Attach the findings to the report of the call."""
        outcome: Any = yield
        report = outcome.get_result()
        examined = getattr(item, "callspec", None)
        examined = examined.params.get("conformance_item") if examined else None
        if examined is not None and report.when == "call":
            line = self._lines.pop(examined.id, None)
            if line is not None:
                report.conformance = line.decode()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remember what is planned, as far as this process collects."""
        found = (getattr(item, "callspec", None) for item in items)
        examined = (call.params.get("conformance_item") for call in found if call is not None)
        # With nothing to examine, pytest makes one test with a parameter that is no Item.
        self._collected = [item.id for item in examined if isinstance(item, Item | Inquiry)]

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """-k and the like took these away."""
        gone = {getattr(item, "callspec", None) and item.callspec.id for item in items}  # type: ignore[attr-defined]
        if self._collected is not None:
            self._collected = [name for name in self._collected if name not in gone]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Under xdist the workers collect; all of them the same."""
        names = [name.partition("[")[2].rstrip("]") for name in ids]
        known = {item.id for item in self.planned}
        self._collected = [name for name in names if name in known]

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """Under xdist a process that dies takes one item with it; the others go on."""
        name = crashitem.partition("[")[2].rstrip("]")
        if name in {item.id for item in self.planned}:
            crashed = without_outcome(name, "crashed", "the process died at this item")
            report.conformance = encode_line(crashed, {}).decode()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the findings down, in the process that has them all."""
        line = getattr(report, "conformance", None)
        if line is None or self._is_worker:
            return
        result, _ = decode_line(line)
        self.results[result.id] = result
        if self._record is not None:
            if self._journal is None:
                self._journal = self._journal_of(self._record)
            if result.id not in self._done:
                self._journal.add(line.encode())

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        """Name outcomes by their verdicts in the progress line and the totals."""
        found = self._status(report)
        if found is None or self.config.option.verbose < 2 or hasattr(report, "node"):
            return found
        category, letter, word = found
        # pytest writes a reason behind it, and cuts off as much as the line is longer than the
        # terminal is wide, from the reason's beginning: it gets a line of its own.
        name, *markup = word if isinstance(word, tuple) else (word,)
        return category, letter, (f"{name}\n ", *(markup or [{"yellow": True}]))

    def _status(self, report: pytest.TestReport) -> Any:
        line = getattr(report, "conformance", None)
        if line is None:
            return None
        verdict = decode_line(line)[0].verdict
        if verdict in ("unsupported", "unavailable", "not-run"):
            return verdict, verdict[0] if verdict == "unsupported" else "n", verdict.upper()
        if gated.is_known(report):
            return "known", "k", ("KNOWN", {"yellow": True})
        if report.outcome == "skipped" or (verdict == "deviates" and report.outcome == "passed"):
            # pytest prints a traceback for each of its own category "error".
            category = "in error" if verdict == "error" else verdict
            return category, verdict[0].upper(), (verdict.upper(), {"yellow": True})
        return None

    # At the end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Make the record, and say with the exit code what the run was worth."""
        if self._is_worker or self.config.option.collectonly:
            return
        if exitstatus == pytest.ExitCode.USAGE_ERROR:
            return
        planned = self.chosen
        # Of a run that was stopped, what it had not come to.
        for name in planned:
            if name in self._done and name not in self.results:
                self.results[name] = decode_line(self._done[name])[0]
        missing = [name for name in planned if name not in self.results]
        unanswered = [without_outcome(name, "not-run", ENDED) for name in missing]
        if self._record is not None and planned:
            if self._journal is None:
                self._journal = self._journal_of(self._record)
            self._journal.close()
            finish(self._record, unanswered, [item.id for item in self.planned], self._keep())
            self.written = self._record
        fine = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._gated is not None:
            results = [self.results[name] for name in planned if name in self.results]
            code = self._gated.judge(self._header(), results, unanswered)
            # In a survey no test fails but by a fault of the suite, and then an item is missing.
            if fine or (self.survey and exitstatus == pytest.ExitCode.TESTS_FAILED):
                session.exitstatus = code
            return
        if not fine:
            return
        counts: Counter[str] = Counter(result.verdict for result in self.results.values())
        if not any(counts[verdict] for verdict in VERIFIED):
            session.exitstatus = PYTEST_CODES[ExitCode.NOTHING_VERIFIED]
        elif missing or any(counts[verdict] for verdict in NOT_VERIFIED):
            session.exitstatus = PYTEST_CODES[ExitCode.INCOMPLETE]

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        """Counts of each implementation, where the record is, and the gravest deviation in full."""
        if self._is_worker or self.config.option.collectonly or self.config.option.no_summary:
            return
        if exitstatus == pytest.ExitCode.USAGE_ERROR:
            return

        def write(line: str) -> None:
            terminalreporter.write_line(printable(line))

        terminalreporter.section("conformance")
        if self._gated is not None:
            self._gated.summary(terminalreporter, self.written)
            self._tell_taken(write)
            if self.written is not None:
                write(f"record: {self.written}")
            return
        for adapter, _ in self.adapters:
            for line in ending.counted(
                adapter.name, self._own(adapter), reasons=self.config.option.verbose > 0
            ):
                write(line)
        missing = sum(name not in self.results for name in self.chosen)
        if missing:
            write(f"not run: {missing} of {len(self.chosen)} planned items")
        self._tell_taken(write)
        if self.written is not None:
            write(f"record: {self.written}")
        if self.survey:
            for line in self._gravest():
                write(line)

    def _tell_taken(self, write: Callable[[str], None]) -> None:
        """How much was not asked again, and what could not be used."""
        for problem in self._taken.problems:
            write(f"asked again: {problem}")
        if self._done:
            told = as_measured(
                [self._taken.days[n] for n in self.chosen if n in self._done], len(self.chosen)
            )
            write(f"{told}; --fresh asks all")

    def _gravest(self) -> Iterator[str]:
        """The gravest deviation of each implementation in full; of a survey no test shows one."""
        left = False
        for adapter, spec in self.adapters:
            result, of = ending.gravest(self._own(adapter))
            if result is None:
                continue
            left = left or of > 1
            stored = self.files.get(result.case)
            item = next(item for item in self.planned if item.id == result.id)
            alone = self._only_after_others(item)
            yield ""
            yield ending.heading(adapter.name, of)
            place = (spec, stored.path if stored else "")
            yield from failure(result, *place, alone=alone).splitlines()
        if left:
            yield ""
            yield ending.everything(str(self.written or ""))

    def _own(self, adapter: Adapter) -> list[CaseResult]:
        """Results of one implementation, in the order of the plan."""
        found = (self.results.get(item.id) for item in self.planned if item.adapter is adapter)
        return [result for result in found if result is not None]

    @property
    def chosen(self) -> list[str]:
        """Ids of what is to be examined, after -k and the like."""
        if self._collected is not None:
            return self._collected
        return [item.id for item in self.planned]

    @property
    def outcome(self) -> Outcome:
        """What is known when the run has ended."""
        results = [self.results[name] for name in self.chosen if name in self.results]
        pairs = [(adapter.name, spec) for adapter, spec in self.adapters]
        return Outcome(pairs, results, len(self.chosen), self.selection, self.written)

    @property
    def _record(self) -> Path | None:
        """Where the record goes; a narrowed run never overwrites a whole one, nor does a shard."""
        given = self._given
        if given is not None and self.shard[1] > 1:
            given = given.with_suffix(f".shard-{self.shard[0]}-of-{self.shard[1]}.json")
            return given
        narrowed = self.selection or len(self.chosen) < len(self.planned)
        return given.with_suffix(".narrowed.json") if given is not None and narrowed else given

    @property
    def _given(self) -> Path | None:
        given = self.config.getoption("--record")
        return None if given is None else Path(given).absolute()

    @property
    def _is_worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    def _header(self) -> Header:
        adapters = [adapter for adapter, _ in self.adapters]
        run = run_id(self._record.parent) if self._record is not None else new_run_id()
        return Header(
            schema=SCHEMA,
            name=self._given.stem if self._given is not None else "",
            provenance=provenance(adapters, self.device, _command(), run, self.selection),
            implementations=[self._described(adapter, spec) for adapter, spec in self.adapters],
            planned=len(self.chosen),
            deselected=len(self.planned) - len(self.chosen),
            cases=describe_all(item.case for item in self.items),
            requirements=requirements(),
            topics=list(dict.fromkeys(item.experiment.topic for item in self.inquiries)),
            known=self._gated.known if self._gated is not None else [],
            revisions=digests.revisions(),
        )

    def _described(self, adapter: Adapter, spec: str) -> Implementation:
        if adapter.name in self.supervisors:
            return adapter.declared.implementation  # type: ignore[attr-defined]
        return describe([(adapter, spec)], self.device)[0]


def isolated(spec: str, wanted: bool | None, *, debugging: bool) -> bool:
    """Whether the implementation gets a process of its own.

    If nobody said so, what is given by path or module does, and what is installed as an entry point
    does not; nor does anything where somebody wants to look into it with a debugger.
    """
    if wanted is not None:
        return wanted
    return not debugging and (":" in spec or spec.endswith(".py")) and spec not in registered()


def _command() -> str:
    program = Path(sys.argv[0])
    module = program.name == "__main__.py"
    name = f"python -m {program.parent.name}" if module else program.name
    return shlex.join([*name.split(), *sys.argv[1:]])


def _is_must(finding: Finding) -> bool:
    return find_requirement(finding.requirement).level == "must"


def _no_twins(adapters: list[tuple[Adapter, str]]) -> None:
    names = Counter(adapter.name for adapter, _ in adapters)
    twice = [name for name, times in names.items() if times > 1]
    if twice:
        raise ConformanceError(f"two implementations are called {twice[0]!r}; rename one")
