"""`mha-conformance gpu`: examine everything that can use a GPU, within a limit of time.

A GPU may be there for a few minutes only. So the most telling stage comes first, for every
implementation, and the next stage follows when all have had their turn. Each implementation is
examined by a `mha-conformance run` or `long` in a process group of its own, several at a time. At
the end of its time it is interrupted, as with Ctrl-C, so that it writes down what it has measured;
the next call continues from there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.commands.shared import IMPLEMENTATION, Commands, add_repeatable, positive
from conformance.errors import ConformanceError, ExitCode, Unavailable, check_names
from conformance.running import DEVICES

if TYPE_CHECKING:
    from conformance.adapter.base import Adapter
    from conformance.records.findings import CaseResult

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes to examine by default."""

TELLING = (
    *("ours", "triton-flash", "torch-sdpa", "torch-sdpa-flash", "torch-sdpa-efficient"),
    *("torch-sdpa-cudnn", "torch-sdpa-math", "torch-mha", "torch-flex", "jax-sdpa"),
    *("jax-sdpa-cudnn", "flax-linen", "flax-nnx", "torch-varlen", "flash-attn", "flash-attn-4"),
    *("flashinfer-single", "flash-attn-varlen", "torch-encoder-layer", "equinox-mha"),
    *("pallas-gpu", "llama-sdpa", "bert-sdpa", "llama-eager", "bert-eager"),
)
"""The implementations to examine first, in this order; all others follow by name."""

NOT_FOR_GPUS = ("onnx", "onnxruntime", "openvino", "numpy")
"""The frameworks whose bridges know the CPU only."""

SEVERAL_DEVICES = ("-sharded", "-ring", "deepspeed-", "ring-attention-", "-dtensor")
"""Parts of the names of implementations that divide their work among several devices."""

ON_TPUS = ("pallas-tpu-",)

GRACE = 12.0
"""The seconds that an interrupted process has for writing its record, before it is killed."""

LEAST = 5.0
"""The least number of seconds left with which another process is started."""

LOOK = 0.05
"""The seconds between two looks at the running processes."""


@dataclass(frozen=True)
class Stage:
    """One of the stages, which every implementation passes before the next one begins.

    Attributes:
        name: what `--stage` calls it.
        arguments: the arguments of `mha-conformance`, without implementation, dtypes and device.
        folder: the folder of its records, inside that of the others.
        share: the part of all seconds that one implementation may take.
        joins: the folder of another stage, whose records get what this one finds; "" for none.
        functions: whether only functions of heads are examined.
        dtypes: those of the requested dtypes that are examined; () for all.
    """

    name: str
    arguments: tuple[str, ...]
    folder: str = ""
    joins: str = ""
    share: float = 1.0
    functions: bool = False
    dtypes: tuple[str, ...] = ()

    @property
    def climbs(self) -> bool:
        """Whether the command is `long`, which has another record than `run`."""
        return self.arguments[0] == "long"


STAGES = (
    Stage("core", ("run", "--level", "core", "--mode", "first"), share=0.3),
    Stage(
        "large",
        ("run", "--level", "large", "--case", "*.d64t64x64", "--mode", "first"),
        folder="large",
        share=0.3,
        dtypes=("float32", "bfloat16"),
    ),
    Stage("long", ("long", "--lengths", "4096:131072"), "long", share=0.25, functions=True),
    Stage(
        "million",
        ("long", "--lengths", "1048576:1048576"),
        folder="million",
        joins="long",
        share=0.25,
        functions=True,
    ),
    Stage("full", ("run",)),
)
"""The stages, the most telling first. One evaluation gives outputs and gradients, so "core" has
the gradients too; "full" continues its records with all cases, modes and experiments."""


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    gpu = commands.add_parser(
        "gpu",
        help="examine everything that can use a GPU, in a few minutes",
        description="Examine all installed implementations that can use a GPU, or those that are "
        "named. In stages, the most telling first: core (outputs and gradients), large (head size "
        "64, several tiles), long (4,096 to 131,072 tokens), million, full (all cases, modes and "
        "experiments). What was measured is kept, and the next call continues there.",
    )
    gpu.add_argument("implementation", nargs="*", help=f"{IMPLEMENTATION} (default: all)")
    gpu.add_argument(
        "--seconds", type=positive, default=420.0, metavar="N", help="for everything (default: 420)"
    )
    gpu.add_argument(
        "--device",
        choices=DEVICES,
        default="gpu",
        help="cpu rehearses the same on a CPU (default: gpu)",
    )
    gpu.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="so many implementations at once (default: half of the processors, at most 8)",
    )
    gpu.add_argument(
        "--record",
        type=Path,
        default=Path("reports/records/gpu"),
        metavar="FOLDER",
        help="the folder of the records (default: reports/records/gpu)",
    )
    stages = ", ".join(stage.name for stage in STAGES)
    add_repeatable(gpu, dtype=f"default: {', '.join(DTYPES)}", stage=f"default: {stages}")
    gpu.set_defaults(action=_gpu)


def _gpu(options: argparse.Namespace) -> int:
    """Examine the implementations stage by stage, print a table, and return the exit code.

    The code is `NOTHING_VERIFIED` if nothing could be examined, `INTERRUPTED` after Ctrl-C,
    `INCOMPLETE` if something was not reached or is unavailable although it was named, or else `OK`.

    Raises:
        Unavailable: no installed framework can use the device.
        ConformanceError: an option is invalid, or the folder cannot be written.
    """
    from conformance.adapter.loading import load
    from conformance.definition.dtypes import DTYPES as KNOWN
    from conformance.records.record import check_writable

    check_names("stage", options.stage, [stage.name for stage in STAGES])
    check_names("dtype", options.dtype, KNOWN)
    jobs = options.jobs or max(1, min(8, (os.cpu_count() or 1) // 2))
    if options.seconds <= GRACE or jobs < 1:
        raise ConformanceError(f"--seconds is more than {GRACE:g}, and --jobs at least 1")
    check_writable(options.record / "NAME.json")
    ends = time.monotonic() + options.seconds
    adapters = {spec: load(spec) for spec in options.implementation or _candidates()}
    models, missing, reasons = _usable(adapters, options.device)
    if not models:
        why = "; ".join(reasons.values() or missing.values()) or "no framework is installed"
        raise Unavailable(f"nothing here can use a {options.device}: {why}")
    for framework, model in sorted(models.items()):
        print(f"{framework}: {model}", flush=True)
    for framework, reason in sorted(reasons.items()):
        print(f"{framework} is left out: {reason}", flush=True)
    usable = {spec: adapter for spec, adapter in adapters.items() if spec not in missing}
    stages = [stage for stage in STAGES if stage.name in (options.stage or [stage.name])]
    planned = [job for stage in stages for job in _jobs(stage, usable, options)]
    line = JobLine(planned, ends=ends, most=jobs)
    interrupted = line.run()
    _print_table(line.ended)
    for spec, reason in missing.items() if options.implementation else ():
        print(f"unavailable: {spec}: {reason}")
    _print_unfinished("ended without a record", line.failed, planned)
    _print_unfinished("cut off", line.cut, planned)
    _print_unfinished("not reached", line.waiting, planned)
    print(f"records: {options.record}")
    if interrupted:
        return ExitCode.INTERRUPTED
    if not line.verified:
        return ExitCode.NOTHING_VERIFIED
    unfinished = line.waiting or line.cut or line.failed or (missing and options.implementation)
    return ExitCode.INCOMPLETE if unfinished else ExitCode.OK


# What there is


def _candidates() -> list[str]:
    """Return the built-in and installed implementations that one GPU may run, in order."""
    from conformance.adapter.loading import registered

    names = [
        name
        for name in registered()
        if not any(part in name for part in SEVERAL_DEVICES) and not name.startswith(ON_TPUS)
    ]
    order = {name: place for place, name in enumerate(TELLING)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def _usable(
    adapters: Mapping[str, Adapter], device: str
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the model of the device by framework, and what cannot be examined, and why.

    The second dictionary has a reason for each such implementation, the third one for each
    framework that is installed and cannot use the device.

    Each framework is asked in a process of its own, all at once: importing one takes seconds, and
    one that finds a driver that is too old may end its process.
    """
    from conformance.commands.listing import missing as lacking

    asked: dict[str, subprocess.Popen[str]] = {}
    missing: dict[str, str] = {}
    for spec, adapter in adapters.items():
        if absent := lacking(adapter):
            missing[spec] = f"{', '.join(absent)} not installed"
        elif device != "cpu" and adapter.framework in NOT_FOR_GPUS:
            missing[spec] = f"the suite runs {adapter.framework} on the CPU only"
        elif adapter.framework not in asked:
            asked[adapter.framework] = subprocess.Popen(
                [sys.executable, "-P", "-c", _ASK, adapter.framework],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=_environment(),
            )
    models: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for framework, process in asked.items():
        try:
            said, errors = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            said, errors = "", f"{framework} does not answer within 120 s"
        told = said.strip().rpartition("\n")[2]
        found = json.loads(told) if process.returncode == 0 and told else None
        if found is None:
            lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
            reasons[framework] = lines[-1][:300]
        elif device in found:
            models[framework] = found[device]
        else:
            reasons[framework] = f"{framework} sees no {device} (it has {', '.join(found)})"
    for spec, adapter in adapters.items():
        if adapter.framework in reasons:
            missing.setdefault(spec, reasons[adapter.framework])
    return models, missing, reasons


_ASK = """
import json, sys
from conformance.errors import ConformanceError
from conformance.frameworks import framework
try:
    models = framework(sys.argv[1]).devices()
except ConformanceError as error:
    sys.exit(str(error))
print()
print(json.dumps(models))
"""
"""A program that prints the devices of the framework that its argument names."""


def _environment() -> dict[str, str]:
    """Return the environment variables of the processes that examine implementations."""
    # JAX and TensorFlow would take most of the GPU's memory at once, from the processes beside it.
    shares = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    return {**shares, "PYTHONUNBUFFERED": "1", **os.environ}


# The line of processes


@dataclass(eq=False)
class Job:
    """The examination of one implementation in one stage, in a process of its own.

    Attributes:
        record: the file that the process writes; after its end, that of the stage that it joins.
        log: the file of what it prints.
        seconds: the most seconds that it may take.
    """

    stage: Stage
    name: str
    command: list[str]
    record: Path
    log: Path
    seconds: float
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0
    interrupted: float = 0.0
    code: int | None = None

    def start(self) -> None:
        """Start the process, which ends with this one."""
        from conformance.commands.watch import _end_with

        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                process_group=0,
                preexec_fn=partial(_end_with, os.getpid()) if os.name == "posix" else None,
            )

    def interrupt(self, now: float) -> None:
        """Ask the process to write down what it has; kill it if it was asked `GRACE` s ago."""
        assert self.process is not None
        late = self.interrupted and now - self.interrupted > GRACE
        if late or not self.interrupted:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL if late else signal.SIGINT)
            self.interrupted = self.interrupted or now

    def has_ended(self) -> bool:
        """Return whether the process has ended; if so, complete the record that it has left."""
        assert self.process is not None
        self.code = self.process.poll()
        if self.code is None:
            return False
        if not self.stage.climbs:
            _settle(self.record)
        elif self.stage.joins:
            joined = self.record.parent.parent / self.stage.joins / self.record.name
            self.record = _lengthened(joined, self.record)
        return True


def _jobs(
    stage: Stage, adapters: Mapping[str, Adapter], options: argparse.Namespace
) -> Iterator[Job]:
    """Yield the jobs of a stage, for implementations that have something to do in it."""
    for spec, adapter in adapters.items():
        if stage.functions and not adapter.projections_supplied:
            continue
        wanted = [name for name in options.dtype or DTYPES if name in adapter.dtypes]
        wanted = [name for name in wanted if not stage.dtypes or name in stage.dtypes]
        if not wanted:
            continue
        seconds = stage.share * options.seconds
        folder = options.record / stage.folder
        # -P: in a checkout, the folder `conformance` is no complete package.
        command = [sys.executable, "-P", "-m", "conformance", stage.arguments[0], spec]
        command += [*stage.arguments[1:], "--device", options.device, "--quiet"]
        command += [word for name in wanted for word in ("--dtype", name)]
        if stage.climbs:
            command += ["--record", str(folder), "--seconds", f"{seconds:.0f}"]
            record = folder / f"{adapter.name}.json"
        else:
            from conformance.records.record import narrowed_path

            given = folder / f"{adapter.name}.json"
            # A kernel that ends its process, or a device that does, costs one item.
            command += ["--record", str(given), "--isolate"]
            record = narrowed_path(given)
        log = options.record / "logs" / f"{stage.name}-{adapter.name}.txt"
        yield Job(stage, adapter.name, command, record, log, seconds)


def _settle(record: Path) -> None:
    """Make an incomplete record of the journal that a killed process has left, if there is one."""
    from conformance.errors import BrokenRecord
    from conformance.records.record import Record, journal_path, read_journal, write

    journal = journal_path(record)
    if journal.exists():
        with suppress(BrokenRecord):
            header, results, arrays = read_journal(journal)
            write(record, Record(header, False, results), arrays)


def _lengthened(record: Path, more: Path) -> Path:
    """Move what a record of `long` has into another one, replacing the same lengths there.

    Return the path of the record that there is then.
    """
    from msgspec.structs import replace

    from conformance.errors import BrokenRecord
    from conformance.records.long import read_climb
    from conformance.records.record import write_document

    try:
        found = read_climb(more)
        if record.exists():
            before = read_climb(record)
            kept = [step for step in before.steps if step.length not in found.lengths]
            found = replace(
                before,
                lengths=sorted({*before.lengths, *found.lengths}),
                steps=[*kept, *found.steps],
            )
        write_document(record, found)
    except BrokenRecord:
        return more
    more.unlink()
    return record


class JobLine:
    """The jobs that wait, run and have ended, within a limit of time.

    Args:
        jobs: all jobs, in the order in which to start them.
        ends: when all has to be over, on the clock of `time.monotonic`.
        most: how many may run at once.

    Attributes:
        ended: the jobs that have ended, in whatever way.
        cut: those that were ended before they were done.
        failed: those that have failed, and left no record.
        verified: how many jobs have checked something.
    """

    def __init__(self, jobs: Iterable[Job], *, ends: float, most: int) -> None:
        self.waiting = deque(jobs)
        self.ended: list[Job] = []
        self.cut: list[Job] = []
        self.failed: list[Job] = []
        self.verified = 0
        self._running: list[Job] = []
        self._ends, self._most = ends - GRACE, most

    def run(self) -> bool:
        """Run the jobs until all have ended or the time is over; return whether Ctrl-C ended it."""
        stopped = False
        while self._running or (self.waiting and not stopped and self._left() > LEAST):
            try:
                self._look(stopped)
                time.sleep(LOOK)
            except KeyboardInterrupt:
                stopped = True
        return stopped

    def _left(self) -> float:
        return self._ends - time.monotonic()

    def _look(self, stopped: bool) -> None:
        for job in [job for job in self._running if job.has_ended()]:
            self._running.remove(job)
            self._told(job)
        now = time.monotonic()
        for job in self._running:
            # A share is for the sake of those that wait for the same stage.
            others_wait = bool(self.waiting) and self.waiting[0].stage is job.stage
            its_time_is_over = others_wait and now > job.began + job.seconds
            if stopped or job.interrupted or its_time_is_over or now > self._ends:
                job.interrupt(now)
        while (
            self.waiting
            and not stopped
            and len(self._running) < self._most
            and self._left() > LEAST
        ):
            job = self.waiting.popleft()
            self._running.append(job)
            job.start()

    def _told(self, job: Job) -> None:
        """Print a line about a job that has ended, and remember how it ended."""
        from conformance.records.findings import verified

        self.ended.append(job)
        took = time.monotonic() - job.began
        counts = _counts(job)
        if job.interrupted:
            self.cut.append(job)
        elif job.code not in (ExitCode.OK, ExitCode.INCOMPLETE, ExitCode.NOTHING_VERIFIED):
            self.failed.append(job)
        self.verified += verified(counts) > 0
        said = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
        said = said or _last_words(job.log)
        end = ", cut off" if job.interrupted else ""
        left = max(0.0, self._left())
        print(
            f"{job.stage.name:8s}{job.name:24s}{took:5.0f} s  {said}{end}  ({left:.0f} s left)",
            flush=True,
        )


def _counts(job: Job) -> Counter[str]:
    """Return how many items have each verdict, of those in the record that a job has written."""
    results = _results(job.record, climbs=job.stage.climbs)
    return Counter(result.verdict for result in results)


def _last_words(log: Path) -> str:
    """Return the last line that a process printed."""
    from conformance.text import printable

    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return printable(lines[-1][:160]) if lines else "nothing was printed"


def _results(record: Path, *, climbs: bool) -> list[CaseResult]:
    """Return the results in a record, of `long` if `climbs` is set, that are more than "not-run".

    There are none if the record cannot be read.
    """
    from conformance.errors import BrokenRecord
    from conformance.records.long import as_record, read_climb
    from conformance.records.record import read

    with suppress(BrokenRecord):
        found = as_record(read_climb(record)) if climbs else read(record)
        return [result for result in found.results if result.verdict != "not-run"]
    return []


# The table


def _print_table(jobs: Iterable[Job]) -> None:
    """Print a row for each implementation and dtype that was examined, over all stages."""
    from conformance.records.findings import INFINITE

    rows: dict[tuple[str, str], list[CaseResult]] = {}
    # Two stages may share a record.
    for record, job in {job.record: job for job in jobs}.items():
        for result in _results(record, climbs=job.stage.climbs):
            rows.setdefault((result.implementation, result.dtype), []).append(result)
    lines: list[tuple[str, ...]] = [("implementation", "dtype", *SHOWN, "worst σ", "seconds")]
    for (name, dtype), results in rows.items():
        counts = Counter(LOST.get(result.verdict, result.verdict) for result in results)
        ratios = [
            finding.figures.max_ratio
            for result in results
            for finding in result.findings
            if finding.figures is not None
        ]
        worst = max(ratios, default=0.0)
        shown = [str(counts[verdict] or "") for verdict in SHOWN]
        sigma = "∞" if worst >= INFINITE else f"{worst:.3g}" if ratios else ""
        seconds = sum(result.seconds for result in results)
        lines.append((name, dtype, *shown, sigma, f"{seconds:.1f}" if seconds else ""))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for line in lines if rows else ():
        words = [word.ljust(width) for word, width in zip(line[:2], widths[:2], strict=True)]
        words += [word.rjust(width) for word, width in zip(line[2:], widths[2:], strict=True)]
        print("  ".join(words).rstrip())
    print()


SHOWN = ("conforms", "deviates", "error", "lost", "unsupported")
"""The columns of the table that count items."""

LOST = {"crashed": "lost", "timed-out": "lost"}
"""The column of the verdicts that have none of their own name."""


def _print_unfinished(how: str, jobs: Iterable[Job], planned: Iterable[Job]) -> None:
    """Print the implementations of the jobs in a line for each stage, or "all" if it is all.

    Args:
        how: the beginning of each line.
        jobs: the jobs to name.
        planned: all jobs.
    """
    every = Counter(job.stage.name for job in planned)
    by_stage: dict[str, list[str]] = {}
    for job in jobs:
        by_stage.setdefault(job.stage.name, []).append(job.name)
    for stage, names in by_stage.items():
        whole = len(names) == every[stage] > 1
        print(f"{how}: {stage}: {'all' if whole else ', '.join(names)}")
