"""Judge one candidate or many, given as files, in sandboxes that import frameworks only once."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import os
import re
import secrets
import time
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from conformance.cases.catalogue import every_case
from conformance.definition.dtypes import dtype_of
from conformance.errors import ConformanceError, NotAnAdapter, UnknownName
from conformance.judging.candidate import candidate
from conformance.judging.judge import LEVELS, REQUIRABLE, Judging, Task
from conformance.judging.sandbox import CandidateLimits, Lost, Sandbox, Worker, check, lacks
from conformance.judging.verdict import Isolation, Trick, Verdict
from conformance.records.record import size_of
from conformance.requirements.examination import ResultMemory
from conformance.running.isolation import SLOWEST
from conformance.text import message

_IMPORTS = re.compile(r"^\s*(?:import|from)\s+(torch|jax)\b", re.MULTILINE)
MOST_SOURCE = 2**20
"""The maximum size in bytes of a candidate's file."""

_TOKEN = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True)
class Options:
    """Options for judging candidates.

    Attributes:
        task: which problems to pose.
        token: the seed of the problems; "" to draw one.
        own_work: whether a candidate that calls an existing attention function is a cheat.
        blind: whether to withhold hints that a search could exploit to fit candidates.
        hints: the maximum number of causes in a verdict.
        isolation: "bubblewrap" or "limits".
        framework: the framework of candidates that do not declare it; "" if all do.
        limits: the resources that each candidate may use.
    """

    task: Task = field(default_factory=Task)
    token: str = ""
    own_work: bool = False
    blind: bool = False
    hints: int = 5
    isolation: str = "bubblewrap"
    framework: str = ""
    limits: CandidateLimits = field(default_factory=CandidateLimits)

    def checked(self) -> Options:
        """Return these options; raise `ConformanceError` if their task or token is not valid."""
        if self.task.level not in LEVELS:
            raise UnknownName("level", self.task.level, LEVELS)
        for name in self.task.dtypes:
            dtype_of(name)
        chapters = sorted({case.chapter for case in every_case()})
        for name in self.task.chapters:
            if name not in chapters:
                raise UnknownName("chapter", name, chapters)
        for name in self.task.require:
            if name not in REQUIRABLE:
                raise UnknownName("requirement of support", name, REQUIRABLE)
        if not any(self.task.takes(case) for case in every_case()):
            raise ConformanceError("the task has no case: another --level, --chapter or --case")
        if self.token and not _TOKEN.fullmatch(self.token):
            raise ConformanceError(
                f"the token is {self.token!r}; a verdict tells one, of 8 to 64 digits 0-9a-f"
            )
        return self

    def with_token(self) -> Options:
        """Return the options with a token, which is drawn at random if they have none."""
        return dataclasses.replace(self, token=self.token or secrets.token_hex(16))

    def failed(self, candidate: str, why: str = "") -> Verdict:
        """Return the verdict "failed" on a candidate; `why` is the reason."""
        return Verdict(
            candidate=candidate,
            verdict="failed",
            score=0.0,
            level=self.task.level,
            token=self.token,
            isolation=Isolation(self.isolation, lacks(self.isolation)),
            why=why,
        )


@dataclass
class Candidates:
    """A judge of candidates, one after another, that keeps a sandbox for each set of frameworks.

    Attributes:
        options: how to judge. If they have no token, one is drawn, which all candidates share.
        expectations: a cache of expected values.
        sandboxes: the running sandboxes, by the names of the frameworks that they have imported.
    """

    options: Options
    expectations: ResultMemory = field(default_factory=lambda: ResultMemory(2048))
    sandboxes: dict[tuple[str, ...], Sandbox] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.options = self.options.with_token()

    def __enter__(self) -> Candidates:
        return self

    def __exit__(self, *_: object) -> None:
        for sandbox in self.sandboxes.values():
            sandbox.close()

    def judge(self, spec: str) -> Verdict:
        """Return the verdict on the candidate given as FILE or FILE:NAME.

        Raises:
            NotAnAdapter: the file cannot be read, as for the function `read`.
            ConformanceError: this machine cannot isolate candidates as requested.
        """
        return self.judge_source(*read(spec))

    def judge_source(self, file: str, source: str, name: str) -> Verdict:
        """Return the verdict on a function in a file that need not be on this machine.

        Args:
            file: the name of the file, for messages.
            source: its content.
            name: the name of the function; "" if only one function in the file can be meant.

        Raises:
            ConformanceError: this machine cannot isolate candidates as requested.
        """
        options = self.options
        warm = tuple(sorted({*_IMPORTS.findall(source), options.framework} - {""}))
        if warm not in self.sandboxes:
            check(options.isolation)
            self.sandboxes[warm] = Sandbox(options.isolation, options.limits, warm or ("numpy",))
        started = time.monotonic()
        try:
            verdict = self._judged(self.sandboxes[warm], file, source, name)
        except Exception as error:
            # Nothing that a candidate sends may prevent other candidates from being judged.
            why = f"it cannot be judged: {type(error).__name__}: {message(error)[:200]}"
            verdict = options.failed(f"{file}:{name}" if name else file, why)
        verdict = replace(verdict, seconds=round(time.monotonic() - started, 3))
        return verdict.blind() if options.blind else verdict

    def _judged(self, sandbox: Sandbox, file: str, source: str, name: str) -> Verdict:
        options = self.options
        verdict = options.failed(f"{file}:{name}" if name else file)
        workers: list[Worker] = []

        def begin() -> dict[str, Any]:
            if workers:
                workers[-1].close()
            workers.append(Worker(sandbox))
            return workers[-1].load(
                source, file, name, options.framework, profiled=options.own_work
            )

        def restart() -> None:
            begin()
            adapter.worker = workers[-1]

        begun, cpu = time.monotonic(), time.thread_time()

        def is_over() -> bool:
            own = sum(worker.clock.seconds for worker in workers) + time.thread_time() - cpu
            elapsed = time.monotonic() - begun
            return max(own, elapsed / SLOWEST) > sandbox.limits.seconds

        try:
            try:
                adapter = candidate(begin(), dtypes=options.task.dtypes)
            except Lost as error:
                return replace(verdict, why=f"while it was imported, {error}")
            except ConformanceError as error:
                return replace(verdict, why=str(error))
            verdict = replace(verdict, candidate=f"{file}:{adapter.title}")
            adapter.worker, adapter.profiled = workers[-1], options.own_work
            judging = Judging(
                adapter, options.task, options.token, self.expectations, restart, is_over
            )
            try:
                judging.run()
            except ConformanceError as error:
                return replace(verdict, why=str(error))
            return self._concluded(judging, workers, verdict)
        finally:
            if workers:
                workers[-1].close()

    def _concluded(self, judging: Judging, workers: Sequence[Worker], verdict: Verdict) -> Verdict:
        """Return `verdict`, so far "failed", updated with the results of the judging."""
        options = self.options
        calls = sorted({call for worker in workers for call in worker.calls})
        tricks = dict(judging.violations)
        for worker in workers:
            tricks |= worker.violations
        if options.own_work and calls:
            tricks["not its own work", f"calls {', '.join(calls)}"] = None
        verdict = replace(
            verdict,
            asked=len(judging.found),
            supports=judging.supports(),
            chapters=judging.chapters(),
            accuracy=judging.accuracy(),
            tricks=[Trick(*one) for one in tricks],
            calls=calls,
        )
        if tricks:
            why = "; ".join(f"{kind}: {detail}" for kind, detail in tricks)
            return replace(verdict, verdict="cheat", why=why)
        hints = 0 if options.blind or judging.lost else options.hints
        causes = judging.causes(hints, verdict.candidate)
        why = judging.lost[0] if judging.lost else ""
        wrong = bool(judging.wrong() or judging.lost)
        score = judging.score()
        if not wrong and not judging.right():
            return replace(verdict, why="it supports no problem of the task")
        if not wrong and not score:
            why = "it supports too little of the chapter plain to be an attention"
            return replace(verdict, why=why)
        if not wrong and (lacking := judging.lacking()):
            why = f"it does not support all of what is required: {', '.join(lacking)}"
            return replace(verdict, why=why)
        ruling = "wrong" if wrong else "right"
        return replace(verdict, verdict=ruling, why=why, score=score, causes=causes)


def divided(spec: str) -> tuple[str, str]:
    """Split a candidate's FILE or FILE:NAME into the file and the name; "" stands for no name.

    A colon separates a name only after ".py".
    """
    file, colon, name = spec.rpartition(":")
    if colon and file.endswith(".py"):
        return file, name
    return spec, ""


def _shown(place: str) -> str:
    """Return a path as text that can be encoded in UTF-8; bytes that are not UTF-8 are escaped."""
    return os.fsencode(place).decode("utf-8", "backslashreplace")


def read(spec: str) -> tuple[str, str, str]:
    """Read the file of a candidate given as FILE or FILE:NAME; return path, text and name.

    The name is "" if `spec` has none. Bytes of the path that are not UTF-8 are escaped.

    Raises:
        NotAnAdapter: the file cannot be read, is too large, or cannot be decoded as text.
    """
    file, name = divided(spec)
    shown = _shown(file)
    try:
        if size_of(Path(file)) > MOST_SOURCE:
            raise NotAnAdapter(f"{shown}: cannot be read: more than {MOST_SOURCE} bytes")
        # As Python reads it: a file may say its encoding.
        with tokenize.open(file) as text:
            return shown, text.read(), name
    except (OSError, SyntaxError, ValueError) as error:
        raise NotAnAdapter(f"{shown}: cannot be read: {message(error)}") from error


def found(places: Iterable[str]) -> list[str]:
    """Return `places` (FILE, FILE:NAME or folder), each folder replaced by the .py files in it.

    Files in subfolders are not included.

    Raises:
        NotAnAdapter: a place does not exist, or a folder contains no Python file.
    """
    every: list[str] = []
    for place in places:
        if Path(place).is_dir():
            files = sorted(str(file) for file in Path(place).glob("*.py"))
            if not files:
                raise NotAnAdapter(f"{place}: holds no Python file")
            every += files
        elif Path(divided(place)[0]).is_file():
            every.append(place)
        else:
            raise NotAnAdapter(f"{place}: there is no such file or folder")
    return every


def judged(
    places: Sequence[str], options: Options, jobs: int = 1, on: str = ""
) -> Iterator[Verdict]:
    """Yield the verdict on each candidate as soon as it is reached.

    All candidates get problems from the same token, so that their scores can be compared. A file
    that cannot be read gets the verdict "failed", unless it is the only one.

    Args:
        places: files, FILE:NAME, or folders.
        options: how to judge the candidates.
        jobs: how many candidates to judge at the same time on this machine.
        on: the address of a Ray cluster, as for `matrix --on`, on whose nodes this suite is
            installed; "" for this machine.

    Raises:
        NotAnAdapter: the only file cannot be read, a place does not exist, or a folder has no
            Python file.
        ConformanceError: an option is not valid, candidates cannot be isolated, or the cluster
            cannot be used.
    """
    options = options.checked().with_token()
    specs, sources = found(places), []
    for spec in specs:
        try:
            sources.append(read(spec))
        except NotAnAdapter as error:
            if len(specs) == 1:
                raise
            # It costs its neighbours nothing.
            verdict = options.failed(_shown(spec), str(error))
            yield verdict.blind() if options.blind else verdict
    if on:
        yield from _judged_on(on, sources, options)
        return
    check(options.isolation)
    jobs = max(1, min(jobs, len(sources)))
    if jobs == 1:
        with Candidates(options) as candidates:
            for source in sources:
                yield candidates.judge_source(*source)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _begin, (options,)) as pool:
        for done in as_completed([pool.submit(_one, *source) for source in sources]):
            yield done.result()


def _judged_on(
    address: str, sources: Sequence[tuple[str, str, str]], options: Options
) -> Iterator[Verdict]:
    """Yield the verdicts of a cluster, whose nodes judge one candidate per CPU at a time."""
    from conformance.running.matrix import connected

    with connected(address) as nodes:
        import ray
        from ray.util import ActorPool

        room = int(sum(own.get("CPU", 0) for own in nodes))
        if not room:
            raise ConformanceError(f"no node of the cluster at {address} has a CPU")
        # A candidate whose node dies is judged again on another one.
        begun = ray.remote(Candidates).options(
            num_cpus=1, max_restarts=-1, max_task_retries=3, scheduling_strategy="SPREAD"
        )
        pool = ActorPool([begun.remote(options) for _ in range(min(room, len(sources)))])
        try:
            yield from pool.map_unordered(
                lambda actor, source: actor.judge_source.remote(*source), sources
            )
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, ConformanceError) else error from None


_OWN: list[Candidates] = []
"""The `Candidates` with which a process of the pool judges; empty until `_begin` is called."""


def _begin(options: Options) -> None:
    _OWN.append(Candidates(options))
    # Sandboxes end with the thread that started them, so nothing is left behind.
    atexit.register(_OWN[0].__exit__)


def _one(file: str, source: str, name: str) -> Verdict:
    return _OWN[0].judge_source(file, source, name)


def judge(
    candidate: str | Path,
    *,
    level: str = "core",
    chapters: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    gradients: bool = True,
    require: Sequence[str] = (),
    own_work: bool = False,
    blind: bool = False,
    token: str = "",
    isolation: str = "bubblewrap",
    framework: str = "",
    limits: CandidateLimits | None = None,
) -> Verdict:
    """Judge an untrusted kernel in a sandbox, on problems drawn anew unless `token` is given.

        verdict = judge("attempt.py:attention")
        verdict.verdict, verdict.score    # ('wrong', 0.61)

    Args:
        candidate: FILE, or FILE:NAME of a function in it.
        level: "core" for use in a loop that improves a kernel, "full" before it is merged.
        chapters: the chapters of cases to include; empty for all but "feature".
        dtypes: the dtypes to test, as far as the candidate supports them; empty for float32 and
            both half precisions or, at level "full", for all.
        gradients: whether gradients count.
        require: names of chapters and features that a right candidate must support; their cases are
            added to those of `chapters`.
        own_work: whether a candidate that calls an existing attention function is a cheat.
        blind: whether to withhold hints that a search could exploit to fit candidates.
        token: the token of an earlier verdict, to pose the same problems again.
        isolation: "bubblewrap", or "limits" to accept less isolation where that is not available.
        framework: "numpy", "torch" or "jax", if the candidate does not declare it.
        limits: the resources that the candidate may use.

    Raises:
        NotAnAdapter: the file does not exist or cannot be read.
        ConformanceError: the candidate is a folder, an option is not valid, or this machine cannot
            isolate candidates as requested.
    """
    task = Task(level, tuple(chapters), tuple(dtypes), gradients, require=tuple(require))
    options = Options(
        task, token, own_work, blind, 5, isolation, framework, limits or CandidateLimits()
    )
    if Path(candidate).is_dir():
        raise ConformanceError(f"{candidate}: is a folder; name a file in it")
    (verdict,) = judged([str(candidate)], options)
    return verdict
