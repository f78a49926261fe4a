"""The judging of one candidate: pose fresh problems, look for cheating, and score the results.

Fresh problems are cases of the catalogue with new numbers and sizes, which are drawn at random. The
seed of all of them is a text, the token. All cases of a family (a kind of shape) get the same
sizes, so that compiling implementations meet few shapes. What makes a family special, such as a
single key, is kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any, get_args

import numpy as np

from conformance.adapter.base import Adapter, Call
from conformance.adapter.features import Said, parts_of
from conformance.cases.case import FAMILIES, Case
from conformance.cases.catalogue import every_case, matches, posed
from conformance.definition.arithmetic import CLASSES
from conformance.definition.attention import heads_alone
from conformance.definition.comparison import against
from conformance.definition.dtypes import DTYPES
from conformance.definition.expectation import Expectation, expect
from conformance.definition.features import FEATURES as FEATURES_OF_PROBLEMS
from conformance.definition.problem import Causal, Problem, Shape
from conformance.errors import ConformanceError, Unsupported
from conformance.frameworks import LACKS as FRAMEWORK_LACKS
from conformance.judging.candidate import Candidate, CandidateError
from conformance.judging.verdict import Cause, ChapterCounts, Marks, marked, scored
from conformance.records.findings import CaseResult, Finding, gravity
from conformance.requirements.examination import ResultMemory, Workbench
from conformance.requirements.requirement import Requirement
from conformance.running.selection import HALVES, SINGLE
from conformance.running.session import Item, Session
from conformance.words import advice, say

SQUARE = ("square",)
"""Families whose sizes all coincide, however they are drawn."""
FIXED = ("size-one", "full-tiles", "one-head", "tiles", "longer", "long", "one-key")
"""Families in which only the batch size varies."""

_WIDTHS = ("query_width", "key_width", "value_width", "output_width")


@dataclass(frozen=True, kw_only=True, eq=False)
class Fresh(Case):
    """A case of the catalogue with numbers that a token determines.

    Attributes:
        token: the seed of the numbers; "" for the numbers and sizes of the catalogue, which are
            public.
        jittered: whether the token determines the sizes too, unless a grid (sizes that an
            implementation declares) gives them.
        heads: whether the inputs are already projected to heads, as functions take them.
    """

    token: str
    jittered: bool = True
    heads: bool = True

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def id(self) -> str:
        """The id of the case in the catalogue, with its grid if it has one.

        "@catalogue" is appended to the id of a case without a grid if the token determines its
        numbers but not its sizes.
        """
        fixed = bool(self.token) and not self.jittered and self.grid is None
        return f"{super().id}@catalogue" if fixed else super().id

    @property
    def shape(self) -> Shape:
        """The sizes of the case: drawn from the token if `jittered` is set and there is no grid.

        Otherwise, they are those of the catalogue's case. Widths are those before projection, also
        if `heads` is set and `problem` returns projected heads, whose widths are others.
        """
        # A grid has the sizes that an implementation declares; it may not support others.
        if self.jittered and self.token and self.grid is None:
            return _jittered(self.family, self.token)
        return super().shape

    def random(self, purpose: str = "") -> np.random.Generator:
        """Return a random generator seeded by the token, the id and the purpose.

        Without a token, return the generator of the catalogue's case.
        """
        if not self.token:
            return super().random(purpose)
        return _random(self.token, f"{self.id}:{purpose}")

    def problem(self, dtype: str) -> Problem:
        """Return the problem with all numbers rounded to `dtype`; the result is cached.

        If `heads` is set, its inputs are the projected heads, and its projections are identities.
        """
        return _problem(self, dtype)


@lru_cache(maxsize=256)
def _problem(case: Fresh, dtype: str) -> Problem:
    drawn = super(Fresh, case).problem(dtype)
    return heads_alone(drawn) if case.heads else drawn


def fresh(case: Case, token: str, *, heads: bool, jittered: bool = True) -> Fresh:
    """Return the case with numbers that a token determines; for "", with those of the catalogue.

    Args:
        case: a case of the catalogue.
        token: the seed of the numbers, or "".
        heads: whether the inputs are already projected to heads.
        jittered: whether the token also determines the sizes, unless a grid gives them.
    """
    fields: dict[str, Any] = {one.name: getattr(case, one.name) for one in dataclasses.fields(Case)}
    return Fresh(**fields, token=token, heads=heads, jittered=jittered)


def _random(token: str, purpose: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{token}:{purpose}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


def shuffled(token: str, purpose: str, count: int) -> list[int]:
    """Return the numbers from 0 to `count` - 1 in an order seeded by the token and the purpose."""
    return [int(place) for place in _random(token, purpose).permutation(count)]


@lru_cache(maxsize=512)
def _jittered(family: str, token: str) -> Shape:
    """Return the shape of a family with some sizes increased at random; the token is the seed.

    In the families `FIXED`, only the batch can grow; in those of `SQUARE`, all sizes grow alike.
    """
    shape, random = FAMILIES[family], _random(token, f"sizes of {family}")
    more = {
        name: int(random.integers(most))
        for name, most in (("batch", 3), ("query", 4), ("key", 4), ("heads", 2), ("size", 3))
    }
    batch = shape.batch + more["batch"]
    if family in FIXED:
        return dataclasses.replace(shape, batch=batch)
    if family in SQUARE:
        names = ("batch", "query_length", "key_length", "heads", "kv_heads", "head_size")
        square: dict[str, Any] = dict.fromkeys((*names, "value_head_size"), batch)
        square |= dict.fromkeys(_WIDTHS, batch * batch)
        return dataclasses.replace(shape, **square)
    # Cases with bottom-right alignment must keep at least as many keys as queries.
    query = shape.query_length + (more["query"] if shape.query_length > 1 else 0)
    key = shape.key_length + more["query"] + more["key"]
    kv_heads = shape.kv_heads + more["heads"]
    heads = kv_heads * shape.group
    # Rotary embeddings need an even size.
    head, value_head = shape.head_size + 2 * more["size"], shape.value_head_size + 2 * more["size"]
    sizes: dict[str, Any] = {
        "batch": batch,
        "query_length": query,
        "key_length": query if shape.sharing == "self" else key,
        "kv_heads": kv_heads,
        "heads": heads,
        "head_size": head,
        "value_head_size": value_head,
    }
    natural = shape.heads * shape.head_size
    sizes |= {name: heads * head for name in _WIDTHS if getattr(shape, name) == natural}
    if shape.sharing != "separate":
        sizes["value_width"] = sizes.get("key_width", shape.key_width)
        if shape.sharing == "self":
            sizes["query_width"] = sizes["value_width"]
    return dataclasses.replace(shape, **sizes)


LEVELS = ("core", "full")
NOT_ASKED = {"kernel.equals-definition", "gradient.parameters-equal-definition"}
"""The ids of requirements on projections, which a candidate does not have."""

FEATURES = "feature"
"""The chapter of windows, sinks and other features, for which most kernels have no arguments. It is
used only if it or its cases are named."""

NEEDS_NOTHING = {"plain", FEATURES}
"""Chapters that are not named by what their cases need."""
GROUPED = "grouped"
"""The name under which a task requires fewer key/value heads than query heads."""

MOST_WIDTH, MOST_LOGITS = 2**12, 2**25
"""The most components of all heads together and the most logits of a problem. The judge holds the
square of the former, and several arrays of the size of the latter, in float64."""

REPEATED = 5
"""The most items to repeat whose output was right, besides the very first item, and the most whose
output was wrong."""
REWRITTEN = 2
"""The most items to pose in arrays that held another problem, to find cached answers."""
SEEN_AGAIN = (
    *((0, "new"), (0, ""), (0, ""), (0, "seen"), (1, "new")),
    *((0, "seen"), (1, ""), (1, ""), (1, "seen"), (2, "new")),
)
"""Which of three problems to pose in which order, and whether the process has had its numbers, or
"" if what it executes is not compared."""
SECOND = 12
"""The most items to pose again, to a new process of the candidate."""
MOST_LOST = 3
"""The number of lost processes after which the remaining problems are not posed."""
ALSO = ("bias/per-head-with-mask/square",)
"""Further cases of level "core", which find deliberate mistakes that its other cases miss."""
VISIBLE = (
    "plain/no-mask/cross",
    "plain/no-mask/gqa",
    "plain/no-mask/self",
    "plain/no-mask/one-query",
)
"""Cases that are also posed with the numbers and sizes of the public catalogue, to find candidates
that recognise them."""


@dataclass(frozen=True)
class Task:
    """The problems that candidates get. The caller chooses them, as scores are relative to them.

    Attributes:
        level: "core" for use in a loop that improves a kernel, "full" before it is merged.
        chapters: chapters of the catalogue, such as "mask"; empty for all but "feature".
        dtypes: the dtypes to test, as far as the candidate supports them; empty for all at level
            "full", and otherwise for float32 (or float64 if it does not support float32) and both
            half precisions.
        gradients: whether gradients count.
        cases: parts of case ids, or wildcards that match them; if there are any, they select the
            cases instead of `level` and `chapters`.
        require: names of chapters and features (see `REQUIRABLE`). A candidate must support every
            case that needs nothing but these, and these cases belong to the task.
    """

    level: str = "core"
    chapters: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    gradients: bool = True
    cases: tuple[str, ...] = ()
    require: tuple[str, ...] = ()

    def takes(self, case: Case) -> bool:
        """Return whether a case of the catalogue belongs to the task."""
        if self.cases:
            return case.defined and any(matches(case.id, pattern) for pattern in self.cases)
        if not (case.defined and case.shape.score == "scaled-dot"):
            return False
        if self.level == "core" and not (case.core or case.id in ALSO):
            return False
        if self.require and needs_of(case) <= {*self.require}:
            return True
        return case.chapter in self.chapters if self.chapters else case.chapter != FEATURES

    def dtypes_of(self, adapter: Adapter) -> tuple[str, ...]:
        """Return the dtypes of the task that an implementation supports; there may be none."""
        if self.dtypes or self.level == "full":
            return tuple(name for name in adapter.dtypes if name in (self.dtypes or DTYPES))
        single = [name for name in SINGLE if name in adapter.dtypes][:1]
        # Some mistakes show in one of the half precisions only: they round and overflow elsewhere.
        return (*single, *(name for name in HALVES if name in adapter.dtypes))


REQUIRABLE = tuple(
    sorted(
        {case.chapter for case in every_case() if case.defined} - NEEDS_NOTHING
        | {feature.name.replace(" ", "-") for feature in FEATURES_OF_PROBLEMS}
        | {GROUPED, "rotary-scaling"}
    )
)
"""What a task can require: chapters, features by name, and fewer key/value heads than heads."""


@cache
def needs_of(case: Case) -> frozenset[str]:
    """Return the names in `REQUIRABLE` of what a case of the catalogue needs."""
    problem = case.problem(SINGLE[0])
    entries = problem.entries if case.features else ()
    # Whoever requires a feature means it with those without which it is nothing.
    implied = {name for entry in entries for name in entry.needs}
    features = [entry.name for entry in entries if entry.name not in implied]
    features += [part for part in ("rotary scaling",) if part in parts_of(problem)]
    grouped = {GROUPED} if case.shape.group > 1 else set()
    names = {case.chapter, *(name.replace(" ", "-") for name in features)}
    return frozenset((names | grouped) - NEEDS_NOTHING)


@cache
def conventions_of(case: Case) -> Mapping[str, str]:
    """Return the conventions of a case of which an implementation may have another one, by name."""
    problem = case.problem(SINGLE[0])
    found: dict[str, str] = {}
    for entry in problem.entries:
        found |= entry.conventions(problem)
    aligned = [entry.name for entry in problem.entries if entry.aligned]
    aligned += ["causal"] if problem.causal is not None else []
    agreeing = [
        alignment
        for alignment in get_args(Causal)
        if all(Said().agrees(problem, part, alignment) for part in aligned)
    ]
    return found | {"alignment": agreeing[0]} if len(agreeing) == 1 else found


@cache
def masking_of(case: Case) -> frozenset[str]:
    """Return which of "mask", "causal" and "bias" a case has, as chapters are named."""
    problem = case.problem(SINGLE[0])
    has = {"mask": problem.mask, "causal": problem.causal, "bias": problem.attn_bias}
    return frozenset(name for name, value in has.items() if value is not None)


class MandatoryItem(Item):
    """An item (a case in a dtype and a mode) that checks only mandatory requirements.

    If the inputs of the case are heads, requirements on projections are left out.
    """

    asked: Fresh

    @property
    def requirements(self) -> list[Requirement]:
        return [
            one
            for one in super().requirements
            if not (self.asked.heads and one.id in NOT_ASKED) and one.level == "must"
        ]


class Output(MandatoryItem):
    """An item that checks only whether the output equals the definition."""

    @property
    def requirements(self) -> list[Requirement]:
        return [one for one in super().requirements if one.id == "output.equals-definition"]


@dataclass
class Judging:
    """The judging of an implementation on a task, in this process or in a worker.

    Attributes:
        token: the seed of the problems and of their order.
        expectations: a cache of expected values, shared by candidates with the same token.
        restart: a function that starts a new process for a candidate; None for an implementation
            in this process.
        is_over: a function that tells whether the time for all items is over.
        found: the items so far in the order of `items`, each with its result.
        violations: pairs of a kind and a sentence, for behaviour that marks a cheat.
        lost: how each process of the candidate was lost; if the time is over or no process can be
            started, that reason is added `MOST_LOST` times.
        sessions: the session for each kind of repetition, by the argument `again` of `ask`.
    """

    adapter: Adapter
    task: Task
    token: str
    expectations: ResultMemory
    restart: Callable[[], None] | None = None
    is_over: Callable[[], bool] = lambda: False
    found: list[tuple[MandatoryItem, CaseResult]] = field(default_factory=list)
    violations: dict[tuple[str, str], None] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    sessions: dict[str, Session] = field(default_factory=dict)

    def items(self) -> list[MandatoryItem]:
        """Return the items to run, in an order that the token determines."""
        heads = isinstance(self.adapter, Candidate)
        # With the sizes of one token, some mistakes have no effect: a wrong split of the heads into
        # halves, for instance, if their number is odd. Those of the catalogue are known to bind.
        jitters = (True, False) if self.task.level == "full" else (True,)
        asked: dict[str, Fresh] = {}
        for case in every_case():
            if not self.task.takes(case):
                continue
            for one in posed(case, self.adapter.geometry, layer=not heads):
                if _is_easier(one.shape, case.shape):
                    continue
                if heads and one.grid is not None:
                    _check_size(one.shape)
                for jittered in jitters:
                    drawn = fresh(one, self.token, heads=heads, jittered=jittered)
                    asked.setdefault(drawn.id, drawn)
        device, modes = "cpu", self.adapter.modes
        rows = [
            MandatoryItem(self.adapter, case, dtype, device, mode)
            for case in asked.values()
            for dtype in self.task.dtypes_of(self.adapter)
            for place, mode in enumerate(modes)
            if place == 0 or mode.every_case
        ]
        return [rows[place] for place in shuffled(self.token, "order", len(rows))]

    def ask(self, item: MandatoryItem, again: str = "", *, explains: bool = False) -> CaseResult:
        """Return the result of an item.

        `again` names a kind of repetition, which calls the candidate anew; it is "" for the first
        result. `explains` tells whether to search for causes; its value in the first call with the
        same `again` holds for all later ones.
        """
        if again not in self.sessions:
            bench = Workbench(expect=expect, expectations=self.expectations)
            self.sessions[again] = Session(bench, explains=explains)
        with np.errstate(all="ignore"):
            result = self.sessions[again].examine(item)
        return result

    def run(self) -> None:
        """Run all items; then, for a candidate, look for answers that it did not really compute.

        Such answers change when a problem is posed again, repeat the answer to earlier numbers in
        the same memory, or are right only for the numbers or sizes of the catalogue. If a process
        was lost, this search is left out. Items that remain when the time is over, or after
        `MOST_LOST` lost processes, are recorded as not run.

        Raises:
            ConformanceError: the task has no problem for the candidate.
        """
        items = self.items()
        if not items:
            raise ConformanceError("the task has no problem for this candidate")
        remote = self.adapter if isinstance(self.adapter, Candidate) else None
        watched = {0, 1, len(items) // 2, len(items) - 1}
        for place, item in enumerate(items):
            if remote is not None:
                remote.watched = place in watched
            if len(self.lost) < MOST_LOST and self.is_over():
                self.lost += ["its CPU and sleeping time was over"] * MOST_LOST
            if len(self.lost) >= MOST_LOST:
                self.found.append((item, item.result([Finding("run", "not-run")])))
                continue
            self.found.append((item, self._asked(item)))
        if remote is None:
            return
        if not self.lost:
            for look in (self._repeat, self._rewrite, self._remember, self._recognise):
                self._guarded(look)
            if self.restart is not None:
                self.restart()
                self._guarded(self._second)

    def _guarded(self, look: Callable[[], None]) -> None:
        look()
        if why := self._worker_lost():
            self.violations["history", f"it ended where it had answered: {why}"] = None

    def _worker_lost(self) -> str:
        """Return how the candidate's current process was lost; "" if it was not lost.

        The result is also "" for an implementation in this process.
        """
        worker = getattr(self.adapter, "worker", None)
        return "" if worker is None else worker.lost

    def _asked(self, item: MandatoryItem) -> CaseResult:
        result, why = self.ask(item), self._worker_lost()
        if not why:
            return result
        self.lost.append(why)
        if self.restart is not None and len(self.lost) < MOST_LOST:
            try:
                self.restart()
            except ConformanceError as error:
                self.lost += [str(error)] * MOST_LOST
        return item.result([Finding("run", "crashed", why)])

    def right(self) -> list[MandatoryItem]:
        """Return the items whose output was right, in the order of `found`."""
        return [item for item, result in self.found if marked(result).output]

    # Behaviour that no kernel shows if it really computes its results

    def _repeat(self) -> None:
        """Repeat some items that were right and some that were wrong.

        Record a violation if an item that was right is now wrong, or the reverse.
        """
        first = [self.found[0][0]] if marked(self.found[0][1]).output else []
        for item in [*first, *self.right()[:REPEATED]]:
            if not marked(self.ask(item, "repeated")).output:
                self.violations["history", "a problem that was right is wrong later"] = None
        wrong = [item for item, result in self.found if _is_wrong(result)]
        for item in wrong[:REPEATED]:
            if marked(self.ask(item, "repeated")).output:
                self.violations["history", "a problem that was wrong is right later"] = None

    def _rewrite(self) -> None:
        """Pose problems in arrays that held other numbers; record a violation for a wrong answer.

        This finds candidates that store answers by memory address. Stop at the first item whose
        sizes a grid gives.
        """
        done = 0
        for item in self.right():
            if done >= REWRITTEN or item.asked.grid is not None:
                break
            earlier = _permuted(item.asked.problem(item.dtype))
            try:
                answer = self.adapter.rewritten(
                    item.asked.problem(item.dtype), earlier, Call(item.mode, item.device)
                )
            except (Unsupported, ConformanceError):
                continue
            done += 1
            expected = self.expectations.get(
                ("rewritten", item.asked.id, item.dtype, self.token),
                partial(expect, item.asked.problem(item.dtype), gradients=False),
            )
            (compared,) = against(expected, {"output": answer.output})
            if not compared.fits:
                self.violations[
                    "stale", "the same memory with other numbers gets the earlier answer"
                ] = None

    def _remember(self) -> None:
        """Pose new problems several times; the worker compares what it executes.

        The order is such that nothing that changes once, or by turns, looks as if it were due to
        the numbers. All have the shape of an item that was right.
        """
        adapter = self.adapter
        assert isinstance(adapter, Candidate)
        for item in self.right()[:1]:
            problem = item.asked.problem(item.dtype)
            try:
                for adapter.traced in (True, False):
                    new = [_permuted(problem, 3 * adapter.traced + one) for one in (1, 2, 3)]
                    for number, adapter.path in SEEN_AGAIN:
                        adapter.run(new[number], Call(item.mode, item.device))
            except (Unsupported, ConformanceError, CandidateError):
                continue
            finally:
                adapter.path, adapter.traced = "", False

    def _recognise(self) -> None:
        """Record a violation if answers are right only for the catalogue's numbers or sizes.

        The cases `VISIBLE` are posed as in the catalogue, with new numbers, and with new numbers
        and sizes.
        """
        known = {case.id: case for case in every_case()}
        dtype = self.task.dtypes_of(self.adapter)[0]
        public: list[bool] = []
        numbers: list[bool] = []
        sizes: list[bool] = []
        for name in VISIBLE:
            for kind, token, jittered in (
                (public, "", False),
                (numbers, f"{self.token}/numbers", False),
                (sizes, f"{self.token}/sizes", True),
            ):
                case = fresh(known[name], token, heads=True, jittered=jittered)
                item = Output(self.adapter, case, dtype, "cpu", self.adapter.modes[0])
                session = Session(Workbench(expect=_output_only), explains=False)
                with np.errstate(all="ignore"):
                    kind.append(marked(session.examine(item)).output)
        if sum(public) >= 3 and not any(numbers):
            self.violations["recognition", "only the numbers of the catalogue are right"] = None
        elif sum(numbers) >= 3 and not any(sizes):
            self.violations["recognition", "only the sizes of the catalogue are right"] = None

    def _second(self) -> None:
        """Repeat some items that were right, in a new process and in another order.

        Record a violation if one of them is now wrong.
        """
        right = self.right()
        for place in shuffled(self.token, "second", len(right))[:SECOND]:
            if not marked(self.ask(right[place], "second")).output:
                self.violations["history", "another order of problems gets other answers"] = None

    # The verdict

    def score(self) -> float:
        """Return the score of the results, from 0 to 1, relative to all problems of the task."""
        scale = self._scale()
        marks: dict[tuple[str, str, str], list[Marks]] = {
            (case.chapter, case.id, dtype): []
            for case in every_case()
            if self.task.takes(case) and not case.tiled
            for dtype in scale
        }
        tiled: dict[tuple[str, str, str], list[Marks]] = {}
        for item, result in self.found:
            dtype = item.dtype if item.dtype in scale else SINGLE[0]
            kind = tiled if item.asked.tiled else marks
            key = (item.asked.chapter, item.asked.off_grid, dtype)
            kind.setdefault(key, []).append(marked(result))
        # Only a candidate with a geometry gets tiled problems: they are no advantage to it.
        for key, each in tiled.items():
            if not all(one.output and (one.gradients or not self.task.gradients) for one in each):
                marks[key] = each
        return scored(marks or tiled, gradients=self.task.gradients)

    def _scale(self) -> tuple[str, ...]:
        """Return the dtypes that make up the score; `score` counts items in others as float32."""
        if self.task.dtypes:
            return self.task.dtypes
        if self.task.level == "full":
            return (*SINGLE, *HALVES)
        lacking = FRAMEWORK_LACKS.get(self.adapter.framework, ())
        return (SINGLE[0], *(name for name in HALVES if name not in lacking))

    def chapters(self) -> dict[str, ChapterCounts]:
        """Return for each chapter how many items were right, wrong and unsupported.

        If gradients count in the task, an item with a wrong gradient is wrong. An item that crashed
        or was not run is always wrong.
        """
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for item, result in self.found:
            marks = marked(result)
            wrong_gradient = any(_of_gradient(one) for one in self.deviations(result))
            kind = "right" if marks.output and (marks.gradients or not wrong_gradient) else "wrong"
            if _is_unsupported(result):
                kind = "unsupported"
            counts[item.asked.chapter][kind] += 1
        return {name: ChapterCounts(**count) for name, count in sorted(counts.items())}

    def supports(self) -> float:
        """Return the share of the items that are supported; 0 if there are none."""
        unsupported = sum(_is_unsupported(result) for _, result in self.found)
        return round(1 - unsupported / len(self.found), 6) if self.found else 0.0

    def lacking(self) -> list[str]:
        """Return what the task requires and the candidate does not support, or was not asked.

        This is a name of the task, or several that are not supported together. A candidate may have
        one convention only, such as one alignment of the causal mask, and no masks if none are
        required; cases that differ in this do not count against it.
        """
        known = {case.id: case for case in every_case()}
        required = frozenset(self.task.require)
        asked = [(known[item.asked.off_grid], result) for item, result in self.found]
        supported = [case for case, result in asked if not _is_unsupported(result)]
        masking = required.union(*map(masking_of, supported))
        known_as = {pair for case in supported for pair in conventions_of(case).items()}

        def has_another_convention(case: Case) -> bool:
            others = conventions_of(case).items() - known_as
            return any(name in dict(known_as) for name, _ in others)

        met: set[str] = set()
        lacks: set[frozenset[str]] = set()
        for case, result in asked:
            needs = needs_of(case)
            if not needs or not needs <= required:
                continue
            if not _is_unsupported(result):
                met |= needs
            elif masking_of(case) <= masking and not has_another_convention(case):
                lacks.add(needs | (masking_of(case) & required))
        least = {needs for needs in lacks if not any(other < needs for other in lacks)}
        least |= {frozenset({name}) for name in required - met - frozenset().union(*least)}
        return sorted(" with ".join(sorted(needs)) for needs in least)

    def wrong(self) -> list[tuple[MandatoryItem, Finding]]:
        """Return the items with deviations or errors, each with the worst; small problems first.

        The worst deviation or error is that of the output if there is one, and otherwise the one
        with the largest error relative to its limit.
        """
        found = []
        for item, result in self.found:
            if bad := self.deviations(result):
                found.append((item, max(bad, key=_importance)))
        return sorted(found, key=lambda pair: (math.prod(pair[0].asked.shape.logits), pair[0].id))

    def deviations(self, result: CaseResult) -> list[Finding]:
        """Return the deviations and errors in a result; those of gradients only if they count."""
        return [
            one
            for one in result.findings
            if one.verdict in ("deviates", "error")
            and (self.task.gradients or not _of_gradient(one))
        ]

    def accuracy(self) -> dict[str, str]:
        """Return, by dtype, the class of the least accurate output; "" if an output is wrong.

        Dtypes in which no output was compared are left out.
        """
        classes: dict[str, list[str]] = defaultdict(list)
        for item, result in self.found:
            for finding in result.findings:
                if finding.requirement == "output.equals-definition" and finding.figures:
                    right = finding.verdict == "conforms"
                    classes[item.dtype].append(finding.figures.accuracy if right else "")
        order = ["", *(one.name for one in reversed(CLASSES))]
        return {dtype: min(reached, key=order.index) for dtype, reached in sorted(classes.items())}

    def causes(self, most: int, spec: str) -> list[Cause]:
        """Return explanations of at most `most` deviations of different kinds, small ones first.

        Deviations from the same requirement with the same cause, or the same text if no cause is
        known, are of one kind. `spec` is the candidate as FILE:NAME, for the commands that pose the
        problems again.
        """
        causes: list[Cause] = []
        seen: set[tuple[str, str]] = set()
        for tried, (item, finding) in enumerate(self.wrong()):
            if len(causes) >= most or tried >= 4 * most:
                break
            result = self.ask(item, "explained", explains=True)
            same = (one for one in result.findings if one.requirement == finding.requirement)
            told = next(same, finding)
            kind = (told.requirement, say(told.cause) or told.detail)
            if kind in seen:
                continue
            seen.add(kind)
            causes.append(_cause(item, told, self, spec))
        return causes


def _is_unsupported(result: CaseResult) -> bool:
    return not marked(result).supported and result.verdict == "unsupported"


def _is_wrong(result: CaseResult) -> bool:
    marks = marked(result)
    return marks.supported and not marks.output


def _of_gradient(finding: Finding) -> bool:
    return finding.requirement.startswith("gradient.")


def _output_only(problem: Problem, *, gradients: bool = False, promised: str = "") -> Expectation:
    return expect(problem, gradients=False, promised=promised)


def _permuted(problem: Problem, seed: int = 0) -> Problem:
    """Return the problem with the numbers within each of query, key and value in another order."""
    random = np.random.default_rng((problem.query.size, seed))
    inputs = {name: getattr(problem, name) for name in ("query", "key", "value")}
    return problem.replace(
        **{n: random.permuted(a.reshape(-1)).reshape(a.shape) for n, a in inputs.items()}
    )


def _importance(finding: Finding) -> tuple[bool, tuple[float, float]]:
    return finding.requirement == "output.equals-definition", gravity(finding)


def _check_size(shape: Shape) -> None:
    """Raise `ConformanceError` if a problem would take too much memory of the judge."""
    width = shape.heads * max(shape.head_size, shape.value_head_size)
    if width > MOST_WIDTH:
        raise ConformanceError(
            f"its geometry asks for {shape.heads} heads of size "
            f"{max(shape.head_size, shape.value_head_size)}; declare at most {MOST_WIDTH} "
            "components in all heads together"
        )
    if math.prod(shape.logits) > MOST_LOGITS:
        raise ConformanceError(
            f"its geometry asks for {math.prod(shape.logits)} logits; declare smaller tiles or "
            f"fewer heads, for at most {MOST_LOGITS}"
        )


def _is_easier(shape: Shape, of: Shape) -> bool:
    """Return whether `shape` has one head, or one head per key/value head, where `of` has more.

    A candidate gets no points for problems that its geometry makes easier.
    """
    return shape.heads == 1 < of.heads or shape.group == 1 < of.group


def _cause(item: MandatoryItem, finding: Finding, judging: Judging, spec: str) -> Cause:
    worst, figures = finding.worst, finding.figures
    shape, case = item.asked.problem(item.dtype).shape, item.asked.off_grid
    element = ("array", "index", "got", "want")
    return Cause(
        requirement=finding.requirement,
        detail=finding.detail,
        case=case,
        dtype=item.dtype,
        sizes={
            "batch": shape.batch,
            "query": shape.query_length,
            "key": shape.key_length,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head": shape.head_size,
            "value_head": shape.value_head_size,
        },
        reproduce=f"mha-conformance judge {spec} --token {judging.token} --case {case} "
        f"--dtype {item.dtype} --level {judging.task.level}",
        cause=say(finding.cause),
        advice=advice(finding.cause) if finding.cause else "",
        where=say(finding.where),
        ratio=figures.max_ratio if figures else None,
        allowed=figures.limit if figures else None,
        **({name: getattr(worst, name) for name in element} if worst else {}),
    )
