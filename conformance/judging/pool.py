"""Judge one candidate or many, given as files, in sandboxes that import frameworks only once."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import os
import re
import secrets
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from conformance.cases.catalogue import every_case
from conformance.definition.dtypes import dtype_of
from conformance.errors import ConformanceError, NotAnAdapter, UnknownName
from conformance.judging.judge import LEVELS, Judge, Task, failed
from conformance.judging.sandbox import Limits, Sandbox, check
from conformance.judging.verdict import Verdict
from conformance.records.record import size_of
from conformance.text import message

_IMPORTS = re.compile(r"^\s*(?:import|from)\s+(torch|jax)\b", re.MULTILINE)
MOST_SOURCE = 2**20
"""The maximum size in bytes of a candidate's file."""

_TOKEN = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True)
class Options:
    """Options for judging candidates; `judge` and `Judge` explain them."""

    task: Task = field(default_factory=Task)
    token: str = ""
    own_work: bool = False
    blind: bool = False
    hints: int = 5
    isolation: str = "bubblewrap"
    framework: str = ""
    limits: Limits = field(default_factory=Limits)

    def checked(self) -> Options:
        """Return the options; raise `ConformanceError` if the task or the token is not valid."""
        if self.task.level not in LEVELS:
            raise UnknownName("level", self.task.level, LEVELS)
        for name in self.task.dtypes:
            dtype_of(name)
        chapters = sorted({case.chapter for case in every_case()})
        for name in self.task.chapters:
            if name not in chapters:
                raise UnknownName("chapter", name, chapters)
        if not any(self.task.takes(case) for case in every_case()):
            raise ConformanceError("the task has no case: another --level, --chapter or --case")
        if self.token and not _TOKEN.fullmatch(self.token):
            raise ConformanceError(
                f"the token is {self.token!r}; a verdict tells one, of 8 to 64 digits 0-9a-f"
            )
        return self


class Candidates:
    """A judge of candidates, one after another, with one running sandbox per set of frameworks."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._judges: dict[tuple[str, ...], Judge] = {}

    def __enter__(self) -> Candidates:
        return self

    def __exit__(self, *_: object) -> None:
        for judge in self._judges.values():
            judge.sandbox.close()

    def judge(self, spec: str) -> Verdict:
        """Return the verdict on the candidate given as FILE or FILE:NAME.

        Raises:
            NotAnAdapter: the file cannot be read.
            ConformanceError: this machine cannot isolate candidates as requested.
        """
        return self.judge_source(*read(spec))

    def judge_source(self, file: str, source: str, name: str) -> Verdict:
        """Return the verdict on a function in a file that need not be on this machine.

        Raises:
            ConformanceError: this machine cannot isolate candidates as requested.
        """
        warm = tuple(sorted({*_IMPORTS.findall(source), self.options.framework} - {""}))
        if warm not in self._judges:
            options = self.options
            check(options.isolation)
            self._judges[warm] = Judge(
                Sandbox(options.isolation, options.limits, warm or ("numpy",)),
                options.task,
                options.own_work,
                options.hints,
                options.blind,
                options.token,
                options.framework,
            )
        return self._judges[warm].judge(file, source, name)


def divided(spec: str) -> tuple[str, str]:
    """Split FILE or FILE:NAME into the file and the name, which is "" if there is none."""
    file, colon, name = spec.rpartition(":")
    if colon and file.endswith(".py"):
        return file, name
    return spec, ""


def _shown(place: str) -> str:
    """Return a path as text that can be encoded."""
    return os.fsencode(place).decode("utf-8", "backslashreplace")


def read(spec: str) -> tuple[str, str, str]:
    """Split FILE or FILE:NAME; return the file, its text, and the name, which may be "".

    Bytes of the file's name that are not UTF-8 are escaped.

    Raises:
        NotAnAdapter: the file cannot be read, is too large, or is no Python text.
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
    """Return the places, FILE or FILE:NAME, with each folder replaced by its Python files.

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

    All candidates get the same problems, so that their scores can be compared.

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
    options = options.checked()
    options = dataclasses.replace(options, token=options.token or secrets.token_hex(16))
    specs, sources = found(places), []
    for spec in specs:
        try:
            sources.append(read(spec))
        except NotAnAdapter as error:
            if len(specs) == 1:
                raise
            # It costs its neighbours nothing.
            verdict = failed(
                _shown(spec), str(error), options.task, options.token, options.isolation
            )
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
    """Yield verdicts from the nodes of a cluster, which judge one candidate per CPU at a time."""
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
    own_work: bool = False,
    blind: bool = False,
    token: str = "",
    isolation: str = "bubblewrap",
    framework: str = "",
    limits: Limits | None = None,
) -> Verdict:
    """Judge an untrusted kernel in a sandbox, on problems that nobody can foresee.

        verdict = judge("attempt.py:attention")
        verdict.verdict, verdict.score    # ('wrong', 0.61)

    Args:
        candidate: FILE, or FILE:NAME of a function in it.
        level: "core" for use in a loop that improves a kernel, "full" before it is merged.
        chapters: the chapters of cases to include; empty for all but "feature".
        dtypes: the dtypes to test; empty for float32 and both half precisions or, at level "full",
            for all.
        gradients: whether gradients count.
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
    task = Task(level, tuple(chapters), tuple(dtypes), gradients)
    options = Options(task, token, own_work, blind, 5, isolation, framework, limits or Limits())
    if Path(candidate).is_dir():
        raise ConformanceError(f"{candidate}: is a folder; name a file in it")
    (verdict,) = judged([str(candidate)], options)
    return verdict
