"""A conformance run in a pytest session: it examines items and writes a record at the end.

Results are attached to pytest's test reports. With xdist, this is how they reach the controller,
the only process that writes the record.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import shlex
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec
import pytest

from conformance.adapter.base import Adapter
from conformance.adapter.loading import load, registered
from conformance.cases.casefile import load_case
from conformance.errors import PYTEST_CODES, ConformanceError, ExitCode
from conformance.records.findings import CaseResult, without_outcome
from conformance.records.header import Header, Implementation
from conformance.records.numbers import Array
from conformance.records.record import (
    Journal,
    Record,
    check_writable,
    decode_line,
    encode_line,
    finish,
    journal_path,
    narrowed_path,
    with_inputs,
)
from conformance.running import WHOLE, inputs, is_isolated, level_of, observing
from conformance.running.examine import (
    Outcome,
    counted,
    everything,
    exit_code,
    failure,
    heading,
    is_must,
    worst,
)
from conformance.running.merging import Earlier, Lock, as_measured, earlier
from conformance.running.provenance import describe, header_of, remember
from conformance.running.selection import (
    Selection,
    check_distinct,
    parse_shard,
    part,
    telling,
)
from conformance.running.session import (
    Examiner,
    Inquiry,
    Item,
    Row,
    conforms_alone,
    kept,
    places,
)
from conformance.text import plural, printable

if TYPE_CHECKING:
    from conformance.running.isolation import ProcessLimits, Supervisor
    from conformance.running.known import Gated

Phase = Literal["setup", "call", "teardown"]

ENDED = "the run ended before this item"
"""The reason recorded for items that were not examined because the run was interrupted."""

KNOWN = "known: "
"""The beginning of the xfail reason of an item whose deviations are all in the baseline."""

SKIPPED = ("unsupported", "unavailable", "not-run")
FAILED = ("deviates", "error", "crashed", "timed-out")

FIXTURES = {"conformance_item", "conformance_run", "request"}
"""The fixtures that the test of an item may use without needing pytest's setup."""
SETUP_PLUGINS = {f"_pytest.{name}" for name in ("runner", "capture", "skipping", "unittest")}
"""The plugins whose setup hooks do nothing for a test with only `FIXTURES`."""
SETUP_OPTIONS = ("usepdb", "trace", "setupshow", "setuponly", "setupplan", "durations")
"""The options with which setup hooks of `SETUP_PLUGINS` do something even for such a test."""
REPORT_PLUGINS = {"_pytest.main", "_pytest.terminal", "conformance.commands.terminal", __name__}
"""The plugins that use only the report of a test's call, not those of setup and teardown."""

ASKS_LESS = {
    "first": "a few cases; --level default asks all of them",
    "core": "some cases in some dtypes and modes; --level default asks all cases",
    "default": "each case in some dtypes and modes; --level full asks for all",
}
"""What a level leaves out, for those that do."""

GPUS = "CUDA_VISIBLE_DEVICES"

GARBAGE = 10_000
"""The number of new objects after which a run collects garbage."""


def take_gpu(worker: str) -> None:
    """Restrict an xdist worker ("gw1") and the processes that it starts to one of the GPUs.

    The GPUs in `CUDA_VISIBLE_DEVICES`, or else all GPUs, are assigned to the workers in turn. If
    there are no GPUs, nothing changes. A framework reads this variable when it first uses a GPU, so
    this function must be called before adapters are loaded.
    """
    given = os.environ.get(GPUS)
    there = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    gpus = sorted(there, key=int) if given is None else list(filter(None, given.split(",")))
    if gpus:
        os.environ[GPUS] = gpus[int(worker.removeprefix("gw")) % len(gpus)].strip()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Suspend garbage collection in a `with` body that creates many objects and keeps all."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class RunPlugin:
    """A pytest plugin that plans, examines and records the items of a session."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._guard = ExitStack()
        if not self._is_worker:
            self._guard.enter_context(exit_raises())
        option = config.getoption
        if not option("--implementation"):
            every = ", ".join(registered())
            raise ConformanceError(f"which implementation? say --implementation NAME ({every})")
        self.survey: bool = option("--survey")
        self.device: str = option("--device")
        record = option("--record")
        self._given = None if record is None else Path(record).absolute()
        if self._is_worker and self.device == "gpu":
            take_gpu(config.workerinput["workerid"])  # type: ignore[attr-defined]
        files = {case.id: case for case in map(load_case, map(Path, option("--case-file")))}
        cases, dtypes, modes, level = map(option, ("--case", "--dtype", "--mode", "--level"))
        keyword = [option("keyword", "")] if option("keyword", "") else []
        chosen = option("--conformance-chosen").split()
        keys = {"case": cases, "dtype": dtypes, "mode": modes}
        rest = {f"{name}s": [] if name in chosen else value for name, value in keys.items()}
        level = level_of(level, *rest.values(), keyword)
        self.selection = Selection(cases, dtypes, modes, level, files)
        whole = WHOLE[0] if "level" in chosen else level
        self._restriction = str(dataclasses.replace(self.selection, **rest, level=whole))
        asked = {f"{name}s": value for name, value in keys.items() if name in chosen}
        self._chosen = str(Selection(**asked, level=level if "level" in chosen else whole))
        self.supervisors: dict[str, Supervisor] = {}
        self._told: set[str] = set()
        if self._given is not None:
            observing.observe()
        self._declared: dict[str, bytes] = {}
        self.adapters: list[tuple[Adapter, str]] = [
            (self._adapter(spec), spec) for spec in option("--implementation")
        ]
        adapters = [adapter for adapter, _ in self.adapters]
        check_distinct((adapter.name, spec) for adapter, spec in self.adapters)
        if self._given is not None and not self._is_worker:
            check_writable(self._given)
        with _no_garbage():
            rows = self.selection.rows(adapters, self.device)
        self.shard = parse_shard(option("--shard"))
        self.planned = part(rows, *self.shard)
        # The ids of the items that are selected after -k and similar options.
        self.chosen = [row.id for row in self.planned]
        self._places = places(self.planned)
        self._examiner = Examiner(self._places)
        self.results: dict[str, CaseResult] = {}
        self._lines: dict[str, bytes] = {}
        self._examined = 0
        self._thresholds = gc.get_threshold()
        # The phases of tests to run here; () to let pytest run them.
        self._phases: tuple[Phase, ...] = ()
        self._located: tuple[Any, tuple[str, int | None, str]] = (None, ("", None, ""))
        self._journal: Journal | None = None
        self.written: Path | None = None
        self.exit_status: int | None = None
        self._session: pytest.Session | None = None
        # Why the record cannot be written, such as a full disk.
        self._declared_there: Sequence[Implementation] = ()
        self._unwritten = ""
        self._gated: Gated | None = None
        if self._given is not None and not self._is_worker and not config.option.collectonly:
            self._guard.enter_context(Lock(self._given))
        self._earlier = self._read_earlier()
        baseline = option("--conformance-baseline")
        if baseline is not None and not config.option.collectonly:
            from conformance.running.known import Gated

            self._gated = Gated(
                Path(baseline),
                config.invocation_params.dir,
                self._header(),
                verbose=option("--conformance-verbose"),
            )

    @property
    def ordered(self) -> list[Row]:
        """The planned rows in the order in which they are examined, the most telling ones first."""
        return sorted(self.planned, key=telling)

    @cached_property
    def narrowing(self) -> str:
        """The options that restrict or extend the run, as text, or "" if there are none."""
        words = [self._restriction] if self._restriction else []
        words += [f"--shard {self.shard[0]}/{self.shard[1]}"] if self.shard[1] > 1 else []
        keyword = self.config.getoption("keyword", "")
        words += [f"-k {keyword!r}"] if keyword else []
        words += [f"--deselect {node}" for node in self.config.getoption("deselect", None) or ()]
        return " ".join(words)

    @property
    def reused(self) -> Collection[str]:
        """The ids of the items whose results are taken from an earlier run."""
        return self._earlier.lines.keys()

    # Examining

    def examine(self, row: Row) -> None:
        """Examine a row; pass, fail, xfail or skip the current test accordingly."""
        result, self._lines[row.id] = self._examine(row)
        self._examined += 1
        verdict = result.verdict
        decisive = [finding for finding in result.findings if finding.verdict == verdict]
        if verdict in FAILED:
            if self.survey:
                _expect(self._failure(row, result).splitlines()[0])
            if self._gated is not None:
                if excuse := self._gated.excuse(result):
                    _expect(printable(f"{KNOWN}{excuse}"))
                result = self._gated.unknown(result)
            elif verdict == "deviates" and not any(map(is_must, decisive)):
                return
            message = self._failure(row, result, alone=self._conforms_alone(row))
            pytest.fail(message, pytrace=False)
        elif verdict in SKIPPED:
            pytest.skip(printable(decisive[0].detail) if decisive else "no requirement applies")

    def _failure(self, row: Row, result: CaseResult, *, alone: bool = False) -> str:
        stored = self.selection.files.get(result.case)
        file = stored.path if stored else ""
        return failure(result, self._spec(row.adapter), file, alone=alone)

    def _spec(self, adapter: Adapter) -> str:
        return next(spec for own, spec in self.adapters if own is adapter)

    def _conforms_alone(self, row: Row) -> bool:
        """Return whether a new instance of the implementation conforms on this row alone.

        Return False if the row is the first that was examined, if the implementation is isolated,
        or if `conforms_alone` does not make a new instance.
        """
        isolated = row.adapter.name in self.supervisors
        return not isolated and self._examined > 1 and conforms_alone(row)

    def _examine(self, row: Row) -> tuple[CaseResult, bytes]:
        """Return the result of a row, measured now or in an earlier run, and its journal line."""
        line = self._earlier.lines.get(row.id)
        if line is None:
            supervisor = self.supervisors.get(row.adapter.name)
            if supervisor is None and isinstance(row, Inquiry) and row.asked.apart:
                # It must not be run in this process.
                supervisor = self._supervise(self._spec(row.adapter))
            if supervisor is None:
                process = os.getpid()
                result, arrays = self._examiner.examine(row)
                if os.getpid() != process:
                    # The implementation has forked, and both processes returned here.
                    os._exit(0)
                return result, self._line(result, arrays)
            line = supervisor.examine(row, self._places.get(row.id, -1))
        return decode_line(line)[0], line

    def _line(self, result: CaseResult, arrays: Mapping[str, Array]) -> bytes:
        """Return the journal line of an item of this process, with what the process has read."""
        first = result.implementation not in self._told
        self._told.add(result.implementation)
        read = observing.news()
        return encode_line(result, arrays, read, shared=first or bool(read))

    # Implementations in separate processes

    def _adapter(self, spec: str) -> Adapter:
        """Return the adapter, or a proxy if the implementation is isolated."""
        option = self.config.getoption
        debugging = option("usepdb", False) or option("trace", False)
        if not is_isolated(spec, option("--isolate"), debugging=debugging):
            return load(spec)
        from conformance.running.isolation import StandIn
        from conformance.running.isolation_child import Declared, decode, encode

        supervisor = self._supervise(spec)
        if self._is_worker:
            # Reuse the controller's declaration, so that all workers have the same plan.
            declared = decode(self._from_controller["declared"][spec], Declared)
            supervisor.adopt(declared)
        else:
            selection = self.selection
            declared = supervisor.declare(selection.find_cases(), selection.dtype_names)
            self._declared[spec] = encode(declared)
            if option("dist", "no") != "no":
                # With xdist only workers examine items.
                supervisor.close()
        self.supervisors[declared.implementation.name] = supervisor
        return StandIn(declared)

    def _supervise(self, spec: str) -> Supervisor:
        """Return the supervisor of an implementation, which is closed at the end of the session."""
        from conformance.running.isolation import supervise

        supervisor = supervise(spec, self.device, limits_of(self.config.getoption))
        self._guard.callback(supervisor.close)
        return supervisor

    @property
    def _is_worker(self) -> bool:
        return hasattr(self.config, "workerinput")

    @property
    def _from_controller(self) -> dict[str, Any]:
        return self.config.workerinput["conformance"]  # type: ignore[attr-defined]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Send an xdist worker the declarations of isolated implementations, and the header.

        The worker needs the header to select results of earlier runs; if there are no such results,
        the header is "".
        """
        header = msgspec.json.encode(self._header()).decode() if self._earlier.lines else ""
        node.workerinput["conformance"] = {"declared": self._declared, "header": header}

    def pytest_unconfigure(self) -> None:
        """Close supervisors, release the lock and save caches at the end of the session."""
        self._guard.close()
        remember()
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)

    @cached_property
    def _unimported(self) -> dict[str, str]:
        """Why the process of an implementation could not import it, by the implementation."""
        declared = {
            adapter.name: adapter.declared.ended  # type: ignore[attr-defined]
            for adapter, _ in self.adapters
            if adapter.name in self.supervisors
        }
        return {name: ended.reason for name, ended in declared.items() if ended is not None}

    # The record

    @property
    def _record(self) -> Path | None:
        """The file of the record to write, or None without --record.

        A shard or a restricted run gets a separate file, so that a complete record is not lost.
        """
        given = self._given
        if given is not None and self.shard[1] > 1:
            return given.with_suffix(f".shard-{self.shard[0]}-of-{self.shard[1]}.json")
        narrowed = self.narrowing or len(self.chosen) < len(self.planned)
        return narrowed_path(given) if given is not None and narrowed else given

    @cached_property
    def _planned_header(self) -> Header:
        described = [
            adapter.declared.implementation  # type: ignore[attr-defined]
            if adapter.name in self.supervisors
            else describe([(adapter, spec)], self.device)[0]
            for adapter, spec in self.adapters
        ]
        return header_of(
            [adapter for adapter, _ in self.adapters],
            described,
            self.planned,
            self.device,
            self.narrowing,
            chosen=self._chosen,
            level=self.selection.level,
            command=_command(),
            name=self._given.stem if self._given is not None else "",
            folder=self._given.parent if self._given is not None else None,
        )

    def _header(self) -> Header:
        """Return the header, with the selection and the baseline that are known so far."""
        return msgspec.structs.replace(
            self._planned_header,
            planned=len(self.chosen),
            deselected=len(self.planned) - len(self.chosen),
            known=self._gated.known if self._gated is not None else [],
        )

    def _read_earlier(self) -> Earlier:
        """Return the valid results of earlier records and of journals of interrupted runs.

        There are none without --record, with --fresh, or if tests are only collected.
        """
        option = self.config.getoption
        if self._given is None or option("--fresh") or self.config.option.collectonly:
            return Earlier()
        if self._is_worker:
            encoded = self._from_controller["header"]
            if not encoded:
                return Earlier()
            header = msgspec.json.decode(encoded, type=Header)
        else:
            header = self._header()
        # A restricted run can reuse results of a complete record too.
        records = dict.fromkeys([self._record or self._given, self._given])
        files = [file for record in records for file in (journal_path(record), record)]
        there = [file for file in files if file.exists()]
        return earlier(there, header, self.planned, self._places)

    def _open_journal(self) -> Journal | None:
        """Return the journal, which the first call creates with the reused results.

        Return None if no record is written.
        """
        if self._journal is None and self._record is not None:
            chosen = {*self.chosen}
            lines = [line for name, line in self._earlier.lines.items() if name in chosen]
            header = with_inputs(self._header(), self._earlier.inputs)
            self._journal = Journal(self._record, header, lines)
        return self._journal

    # What pytest does around an item

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Store the session, so that it can be stopped."""
        self._session = session

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Collect tests without garbage collection."""
        with _no_garbage():
            yield

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Determine whether setup and teardown can be skipped for the tests of this session.

        Also exempt the objects that exist now from garbage collection during the tests.
        """

        def plugins(*names: str) -> set[str]:
            hooks = [getattr(self.config.hook, f"pytest_runtest_{name}") for name in names]
            return {it.function.__module__ for hook in hooks for it in hook.get_hookimpls()}

        if (
            plugins("setup", "teardown") <= SETUP_PLUGINS
            and not any(getattr(self.config.option, name, False) for name in SETUP_OPTIONS)
            and all(
                _row(item) is not None
                and FIXTURES.issuperset(getattr(item, "fixturenames", ()))
                and all(mark.name == "parametrize" for mark in item.iter_markers())
                for item in session.items
            )
        ):
            only = plugins("logreport") <= REPORT_PLUGINS
            self._phases = ("call",) if only else ("setup", "call", "teardown")
        # Exclude the objects of imported modules from garbage collection during the tests, and
        # collect more rarely: an item leaves few cycles behind.
        gc.freeze()
        gc.set_threshold(GARBAGE, *self._thresholds[1:])

    def pytest_runtest_protocol(self, item: pytest.Function) -> bool | None:
        """Run a test without setup and teardown and return True, if these would do nothing.

        If setup and teardown may do something, return None, so that pytest runs the test. Skipping
        them saves as much time as examining an item takes. Their reports are still made if another
        plugin, such as the JUnit writer, may use them.
        """
        if not self._phases:
            return None
        hook = item.ihook
        if item.function is not self._located[0]:
            self._located = item.function, item.location
        # Cache the location, which pytest would determine again for each item.
        item.__dict__["location"] = (*self._located[1][:2], item.name)
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        examined = item.callspec.params["conformance_item"]
        item.funcargs = {"conformance_item": examined, "conformance_run": self}
        stops = (pytest.exit.Exception, KeyboardInterrupt)
        for when in self._phases:
            action = hook.pytest_runtest_call if when == "call" else lambda item: None
            call = pytest.CallInfo.from_call(partial(action, item=item), when, stops)
            report = hook.pytest_runtest_makereport(item=item, call=call)
            hook.pytest_runtest_logreport(report=report)
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    # From worker to controller

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Attach the journal line of an item to the report of its test."""
        outcome: Any = yield
        report = outcome.get_result()
        if report.when == "call" and (row := _row(item)) is not None:
            line = self._lines.pop(row.id, None)
            if line is not None:
                report.conformance = line.decode()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Store the ids of the collected items."""
        self.chosen = [row.id for item in items if (row := _row(item)) is not None]

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Remove deselected items (by -k, for example) from the collected ones."""
        gone = {row.id for item in items if (row := _row(item)) is not None}
        self.chosen = [name for name in self.chosen if name not in gone]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Store the ids of the collected items, which are the same in every xdist worker."""
        planned = {row.id for row in self.planned}
        self.chosen = [name for name in map(_parameter, ids) if name in planned]

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """Record an item as crashed if an xdist worker died while examining it."""
        name = _parameter(crashitem)
        if name in {row.id for row in self.planned}:
            crashed = without_outcome(name, "crashed", "the process died at this item")
            report.conformance = encode_line(crashed, {}).decode()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store an item's result and write it to the journal, except in xdist workers.

        If the journal cannot be written, stop the session.
        """
        line = getattr(report, "conformance", None)
        if line is None or self._is_worker:
            return
        result = _decoded(line)
        self.results[result.id] = result
        with self._writing():
            journal = None if self._unwritten else self._open_journal()
            if journal is not None and result.id not in self._earlier.lines:
                journal.add(line.encode())
        if self._unwritten and self._session is not None:
            self._session.shouldstop = "the record cannot be written"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """If the `with` body raises `OSError`, remember the reason and close the journal.

        The exception is not raised again. The last line of the journal may be incomplete, so
        nothing more may be written to the journal.
        """
        try:
            yield
        except OSError as error:
            self._unwritten = error.strerror or str(error)
            if self._journal is not None:
                with suppress(OSError):
                    self._journal.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Any:
        """Return the verdict as category, letter and word for pytest's progress and totals.

        Return None to leave a report to pytest.
        """
        status = self._status(report)
        if status is None or self.config.option.verbose < 2 or hasattr(report, "node"):
            return status
        category, letter, word = status
        # pytest truncates the reason at the terminal's width: put it on a separate line.
        name, *markup = word if isinstance(word, tuple) else (word,)
        return category, letter, (f"{name}\n ", *(markup or [{"yellow": True}]))

    def _status(self, report: pytest.TestReport) -> Any:
        line = getattr(report, "conformance", None)
        if line is None:
            return None
        result = _decoded(line)
        verdict = result.verdict
        skipped = getattr(report, "wasxfail", None) is not None or verdict in SKIPPED
        if skipped and result.implementation in self._unimported:
            # Its items are as many as if everything were asked of it, so they are not counted.
            return "", "n", verdict.upper()
        if verdict in SKIPPED:
            return verdict, verdict[0] if verdict == "unsupported" else "n", verdict.upper()
        if getattr(report, "wasxfail", "").removeprefix("reason: ").startswith(KNOWN):
            return "known", "k", ("KNOWN", {"yellow": True})
        if report.outcome == "skipped" or (verdict == "deviates" and report.outcome == "passed"):
            # pytest would print a traceback for each report in its category "error".
            category = "in error" if verdict == "error" else verdict
            return category, verdict[0].upper(), (verdict.upper(), {"yellow": True})
        return None

    # At the end

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the record, if there is one to write, and set the exit code of the session."""
        if self._is_silent(exitstatus):
            return
        planned = self.chosen
        for name in planned:
            # An interrupted run may not have reached items with reusable results.
            if name in self._earlier.lines and name not in self.results:
                self.results[name] = decode_line(self._earlier.lines[name])[0]
        missing = [name for name in planned if name not in self.results]
        unanswered = [without_outcome(name, "not-run", ENDED) for name in missing]
        with self._writing():
            journal = self._open_journal() if planned and not self._unwritten else None
            if journal is not None:
                journal.close()
                assert self._record is not None
                # Keep the attention weights of the worst items only, over all processes.
                keep = kept(self.results.values(), self._places)
                order = [row.id for row in self.planned]
                record = finish(self._record, unanswered, order, keep)
                self.written, self._declared_there = self._record, record.header.implementations
        fine = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self._gated is not None:
            results = [self.results[name] for name in planned if name in self.results]
            code = self._gated.judge(self._header(), results, unanswered)
            # In a survey, a test fails only because of a bug in the suite, so an item is missing.
            if fine or (self.survey and exitstatus == pytest.ExitCode.TESTS_FAILED):
                session.exitstatus = code
        elif fine:
            worth = exit_code(self.results.values(), complete=not missing)
            if worth != ExitCode.OK:
                session.exitstatus = PYTEST_CODES[worth]
        if self._unwritten:
            session.exitstatus = PYTEST_CODES[ExitCode.INCOMPLETE]
        self.exit_status = session.exitstatus

    def _is_silent(self, exitstatus: int) -> bool:
        """Return whether this process must not print or write anything at the end."""
        usage_error = exitstatus == pytest.ExitCode.USAGE_ERROR
        return self._is_worker or self.config.option.collectonly or usage_error

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        """Print the counts of each implementation or, with a baseline, the judgement.

        In a survey without a baseline, also print the worst deviation of each implementation in
        full.
        """
        if self._is_silent(exitstatus) or self.config.option.no_summary:
            return

        def write(line: str) -> None:
            terminalreporter.write_line(printable(line))

        terminalreporter.section("conformance")
        if self._gated is not None:
            self._gated.summary(terminalreporter, self.written)
        else:
            reasons = self.config.option.verbose > 0
            for adapter, spec in self.adapters:
                if why := self._unimported.get(adapter.name):
                    write(f"not verified: {spec}: {why.removeprefix(f'{spec}: ')}")
                    continue
                results = self._results_of(adapter)
                for line in counted(adapter.name, results, reasons=reasons):
                    write(line)
            missing = sum(name not in self.results for name in self.chosen)
            if missing:
                write(f"not run: {missing} of {len(self.chosen)} planned items")
        for line in self._not_isolated():
            terminalreporter.write_line(printable(line), light=True)
        for line in self._about_record():
            write(line)
        if self.survey and self._gated is None:
            for line in self._worst():
                write(line)

    def _not_isolated(self) -> Iterator[str]:
        """Yield a line about the experiments that `--no-isolate` or a debugger leaves out."""
        here = [
            adapter
            for adapter, spec in self.adapters
            if adapter.name not in self.supervisors and is_isolated(spec, None, debugging=False)
        ]
        left_out = self.selection.only_isolated(here, self.device)
        if left_out:
            names = ", ".join(dict.fromkeys(row.asked.id for row in left_out))
            yield (
                f"not asked, {plural(len(left_out), 'item')}: {names} needs a process of its own, "
                "which --isolate or --level full starts"
            )

    def _about_record(self) -> Iterator[str]:
        """Yield lines about unusable files, reused results, and the record or why there is none."""
        for problem in self._earlier.problems:
            yield f"measured again: {problem}"
        if self._earlier.lines:
            days = [self._earlier.days[n] for n in self.chosen if n in self._earlier.days]
            yield f"{as_measured(days, len(self.chosen))}; --fresh measures all again"
        for one in self._declared_there:
            if reasons := inputs.unseen(one.inputs):
                told = "; ".join(reasons)
                yield f"{one.name} is measured anew in every run: {told}, which cannot be observed"
        if self._unwritten and self._record is not None:
            journal = journal_path(self._record)
            kept_there = f"; what was measured is kept in {journal}" if journal.exists() else ""
            yield f"{self._record}: cannot be written ({self._unwritten}){kept_there}"
        if self.selection.level in ASKS_LESS:
            yield f"level {self.selection.level}: {ASKS_LESS[self.selection.level]}"
        if self.written is not None and self.written != self._given and self.shard[1] == 1:
            yield f"{self._given} is left for a run that nothing restricts"
        if self.written is not None:
            yield f"record: {self.written}"

    def _worst(self) -> Iterator[str]:
        """Yield lines with the worst deviation of each implementation, for `--survey`.

        If an implementation has several deviations, the last line says how to show all of them.
        """
        most = 0
        for adapter, _ in self.adapters:
            result, of = worst(self._results_of(adapter))
            if result is None:
                continue
            most = max(most, of)
            row = next(row for row in self.planned if row.id == result.id)
            yield ""
            yield heading(adapter.name, of)
            yield from self._failure(row, result, alone=self._conforms_alone(row)).splitlines()
        if most > 1:
            yield ""
            yield everything(str(self.written or ""))

    def _results_of(self, adapter: Adapter) -> list[CaseResult]:
        """Return the results of one implementation, in the order of the plan."""
        ids = [row.id for row in self.planned if row.adapter is adapter]
        return [self.results[name] for name in ids if name in self.results]

    @property
    def outcome(self) -> Outcome:
        """The results at the end of the run, without the arrays that the record has."""
        chosen = {*self.chosen} & self.results.keys()
        results = [self.results[row.id] for row in self.planned if row.id in chosen]
        complete = len(results) == len(self.chosen)
        return Outcome(Record(self._header(), complete, results), path=self.written)


@contextmanager
def exit_raises() -> Iterator[None]:
    """Make `os._exit` raise `SystemExit` inside the context, in the main thread of this process.

    Otherwise, an implementation that calls `os._exit` could end the run as if all items had been
    examined. In other threads, `os._exit` ends the process, but with an exit code other than 0. In
    a forked child process, it works as usual.
    """
    leave, process = os._exit, os.getpid()

    def raise_instead(status: int) -> NoReturn:
        if os.getpid() != process:
            leave(status)
        if threading.current_thread() is not threading.main_thread():
            leave(status or ExitCode.INCOMPLETE)
        raise SystemExit(status)

    os._exit = raise_instead
    try:
        yield
    finally:
        os._exit = leave


def limits_of(option: Callable[[str], float]) -> ProcessLimits:
    """Return the limits of isolated processes; `option` returns the value of a named option."""
    from conformance.running.isolation import ProcessLimits

    return ProcessLimits(
        option("--item-timeout"), option("--start-timeout"), option("--memory-limit")
    )


def _expect(reason: str) -> NoReturn:
    """End the test as an expected failure, without the traceback that `pytest.xfail` formats.

    Formatting it would take longer than examining an item.
    """
    raise pytest.xfail.Exception(reason, pytrace=False)


def _row(item: pytest.Item) -> Row | None:
    """Return the row that a pytest item examines, or None if it examines none."""
    call = getattr(item, "callspec", None)
    row = call.params.get("conformance_item") if call is not None else None
    return row if isinstance(row, Item | Inquiry) else None


@lru_cache(maxsize=1)
def _decoded(line: str) -> CaseResult:
    """Return the result in a journal line; cached, because several hooks need it."""
    return decode_line(line)[0]


def _parameter(node: str) -> str:
    """Return the parameter in brackets at the end of a test's node id."""
    return node.partition("[")[2].rstrip("]")


def _command() -> str:
    program = Path(sys.argv[0])
    module = program.name == "__main__.py"
    name = f"python -m {program.parent.name}" if module else program.name
    return shlex.join([*name.split(), *sys.argv[1:]])
