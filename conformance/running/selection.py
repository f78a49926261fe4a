"""Select the rows of a run by case patterns, dtypes, modes, level and shard."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from conformance.adapter.base import Adapter
from conformance.cases.case import Case, StoredCase
from conformance.cases.catalogue import (
    catalogue,
    every_case,
    find_cases,
    large_cases,
    matches,
    most_telling,
)
from conformance.definition.dtypes import DTYPES, dtype_of
from conformance.errors import ConformanceError, Unsupported, check_names
from conformance.experiments import EXPERIMENTS, Experiment, find_experiments
from conformance.records import LEVELS
from conformance.running import DEVICES, WHOLE
from conformance.running.session import Inquiry, Item, Planned, Row, inquiries, plan, posed_to

SINGLE = ("float32", "float64")
HALVES = ("bfloat16", "float16")
CORE_DTYPES = (SINGLE[0], HALVES[0])
"""The dtypes of levels "core" and "large"; `core_dtypes` replaces those that an adapter lacks."""

FIRST = "first"
"""The name that selects the first mode of every implementation."""

BY_MODE = ("probe/masked-rows",)
"""The experiments whose answers differ most often from mode to mode."""

FEW = ("first", "core")
"""The levels that have some of the cases and no experiments."""

SAMPLED = ("core", "default")
"""The levels at which each case is examined in some dtypes and modes only, as `sampled` chooses."""

LEAST_SAMPLE = 80
"""If an implementation accepts at most this many items, none of them is left out of a sample."""

IN_SINGLE, IN_HALF = 34, 6
"""The numbers of items of level "first" in single and in half precision."""


@dataclass(frozen=True)
class Selection:
    """The options that restrict a run.

    Attributes:
        cases: parts of case ids, beginnings of experiment ids, or wildcard patterns for either;
            empty for all cases and experiments of the level.
        dtypes: the dtypes of the cases; empty for all. An experiment, which has one dtype, is run
            if that dtype is included.
        modes: the names of modes, or `FIRST`; empty for all.
        level: "full" selects everything. "default" selects all cases, in dtypes and modes that
            `sampled` chooses, and all experiments but those that are costly or compare modes.
            "core" selects the cases marked `core` and those of "first" in the same way, and no
            experiments; if something is fixed in an implementation, also cases without a mask, in
            all dtypes.
            "first" selects the first items of `telling`. "large" selects `large_cases()`, and only
            those experiments that `cases` name. `cases` restrict every
            level; `find_cases` raises `ConformanceError` for a pattern that matches nothing in the
            level. Without `dtypes`, all dtypes are used, except that levels "first", "core" and,
            without `cases`, "large" use only `CORE_DTYPES`.
        files: cases from case files, by id; they belong to every level.

    Raises:
        UnknownName: the level or a dtype does not exist.
    """

    cases: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    modes: Sequence[str] = ()
    level: str = "full"
    files: Mapping[str, StoredCase] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names("level", [self.level], LEVELS)
        object.__setattr__(self, "dtypes", [dtype_of(name).name for name in self.dtypes])

    def __str__(self) -> str:
        """Return the options as text for the record, or "" if they leave out no case."""
        options = (("--case", self.cases), ("--dtype", self.dtypes), ("--mode", self.modes))
        words = [f"{option} {value}" for option, values in options for value in values]
        words += [f"--level {self.level}"] if self.level not in WHOLE else []
        words += [f"--case-file {case.path} ({case.id})" for case in self.files.values()]
        return " ".join(words)

    @property
    def dtype_names(self) -> Sequence[str]:
        """The dtypes in which cases are run."""
        if self.dtypes:
            return self.dtypes
        every = self.level in WHOLE or (self.level == "large" and self.cases)
        return list(DTYPES) if every else CORE_DTYPES

    def find_cases(self) -> list[Case]:
        """Return the selected cases.

        The cases are not yet adapted to the sizes that an implementation accepts; `rows` does this.

        Raises:
            UnknownName: a pattern matches neither cases nor experiments.
            ConformanceError: level "core" or "large" has none of the cases that a pattern matches.
        """
        pool = large_cases() if self.level == "large" else every_case()
        every = {case.id: case for case in (*pool, *self.files.values())}
        if not self.cases:
            return [case for case in every.values() if self._has(case)]
        found: dict[str, Case] = {}
        for pattern in self.cases:
            hits = [pattern] if pattern in every else [n for n in every if matches(n, pattern)]
            those = [every[name] for name in hits]
            experiments = find_experiments(pattern)
            if not hits and not experiments:
                those = [*find_cases(pattern)]
            chosen = [case for case in those if self._has(case)]
            absent = not chosen if self.level in FEW else not (hits or experiments)
            if absent and self.level not in WHOLE:
                name = those[0].id if those else experiments[0].id
                raise ConformanceError(
                    f"--case {pattern}: {name} is not in level {self.level}; without --level it is "
                    "run"
                )
            found |= {case.id: case for case in chosen}
        order = [*every, *found]
        return sorted(found.values(), key=lambda case: order.index(case.id))

    def _has(self, case: Case) -> bool:
        if isinstance(case, StoredCase) or self.level not in FEW:
            return True
        ranked = case.off_grid in most_telling()
        return ranked or case.is_bare or (case.core and self.level == "core")

    def _is_of_level(self, item: Item) -> bool:
        """Return whether an item that was planned belongs to the level.

        Levels "first" and "core" have more cases without a mask for those who can be asked little
        else.
        """
        case = item.asked
        more = self.level in FEW and case.is_bare and not (case.core and self.level == "core")
        ranked = case.off_grid in most_telling()
        return not more or ranked or item.adapter.fixed is not None

    def find_experiments(self) -> Sequence[Experiment]:
        """Return the selected experiments."""
        if not self.cases or self.level in FEW:
            return EXPERIMENTS if self.level in WHOLE else ()
        ids = {item.id for pattern in self.cases for item in find_experiments(pattern)}
        return [item for item in EXPERIMENTS if item.id in ids]

    def rows(self, adapters: Sequence[Adapter], device: str) -> list[Row]:
        """Return the rows to examine: first the cases, then the experiments.

        Raises:
            UnknownName: a case, experiment, mode or device does not exist.
            ConformanceError: level "core" or "large" has none of the cases that a pattern matches.
        """
        check_names("device", [device], DEVICES)
        modes = (mode.name for adapter in adapters for mode in adapter.modes)
        check_names("mode", self.modes, [FIRST, *modes])
        cases = self.find_cases()
        chosen = self.dtype_names
        by_dtypes: dict[tuple[str, ...], list[Adapter]] = defaultdict(list)
        for adapter in adapters:
            of_core = not self.dtypes and chosen == CORE_DTYPES
            by_dtypes[core_dtypes(adapter) if of_core else tuple(chosen)].append(adapter)
        planned = [
            item
            for dtypes, those in by_dtypes.items()
            for item in plan(those, cases, dtypes, device)
        ]
        if self.level == "core" and not self.dtypes:
            few = [adapter for adapter in adapters if adapter.fixed is not None]
            others = [dtype for dtype in DTYPES if dtype not in CORE_DTYPES]
            planned += plan(few, [case for case in cases if case.is_bare], others, device)
        items = [item for item in planned if self._has_mode(item) and self._is_of_level(item)]
        asked = self._inquiries(adapters, device)
        if self.level == "first":
            items = _first(items)
        elif self.level in SAMPLED:
            items = sampled(items)
            asked = [row for row in asked if _is_telling(row)]
        return [*items, *asked]

    def only_isolated(self, adapters: Sequence[Adapter], device: str) -> list[Inquiry]:
        """Return the experiments that the level has only for isolated implementations."""
        if self.level not in SAMPLED:
            return []
        asked = self._inquiries(adapters, device)
        return [row for row in asked if row.asked.apart and not _is_telling(row)]

    def _inquiries(self, adapters: Sequence[Adapter], device: str) -> list[Inquiry]:
        return [
            row
            for row in inquiries(adapters, self.find_experiments(), device)
            if row.dtype in self.dtype_names and self._has_mode(row)
        ]

    def _has_mode(self, row: Row) -> bool:
        first = FIRST in self.modes and row.mode.name == row.adapter.modes[0].name
        return not self.modes or first or row.mode.name in self.modes


# What is most telling


def telling(row: Row) -> tuple[int, int]:
    """Return the place of a row in the order in which a run examines its rows.

    First come the cases that notice most mistakes, in the first mode, and of each case float32. The
    others stay in their order, in which items that share a reference answer are adjacent.
    """
    rank = _rank(row)
    dtypes = (*SINGLE, *HALVES)
    return rank, dtypes.index(row.dtype) if rank < len(most_telling()) else 0


def _rank(row: Row) -> int:
    order = most_telling()
    if not isinstance(row, Item) or row.mode is not row.adapter.modes[0]:
        return len(order)
    return order.get(row.asked.off_grid, len(order))


def _first(items: Iterable[Item]) -> list[Item]:
    """Return the items of level "first": the most telling ones that an implementation accepts.

    If it accepts none, return the most telling items, which will say why.
    """
    chosen: set[str] = set()
    for own in _by_adapter(items):
        accepted = [item for item in own if not item.refused] or own
        ranked = sorted((item for item in accepted if _is_ranked(item)), key=telling)
        # What fits few of them has others, one of each shape before two of any.
        for item in sorted(accepted, key=lambda item: (item.dtype != SINGLE[0], item.id)):
            shapes = Counter(other.asked.family for other in ranked if other.dtype == item.dtype)
            if not _is_ranked(item) and shapes[item.asked.family] < 2:
                ranked.append(item)
        for dtypes, number in ((SINGLE, IN_SINGLE), (HALVES, IN_HALF)):
            those = [item for item in ranked if item.dtype in dtypes]
            chosen |= {item.id for item in those[:number]}
    return [item for item in items if item.id in chosen]


def _is_ranked(item: Item) -> bool:
    return _rank(item) < len(most_telling())


def sampled(items: Sequence[Item]) -> list[Item]:
    """Return a sample of items: each case in at least one dtype and mode.

    The first item of a case, in float32 and in the first mode if they are accepted, is in the
    sample. Cases about the range of numbers are in it in every dtype, and cases about the hygiene
    of a call in every mode. Other items are added until, for each implementation, all pairs of
    these five occur: the dtype, the mode, and the case's name, family and features. Thus the sample
    is a covering array of strength 2, apart from pairs of name, family and features, which the
    catalogue decides. Of an implementation that accepts few items, all are in the sample.
    """
    chosen: set[str] = set()
    for own in _by_adapter(items):
        chosen |= _covering(own)
        accepted = {item.id for item in own if not item.refused}
        chosen |= accepted if len(accepted) <= LEAST_SAMPLE else set()
    return [item for item in items if item.id in chosen]


def _by_adapter(items: Iterable[Item]) -> list[list[Item]]:
    owners: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        owners[item.adapter.name].append(item)
    return [*owners.values()]


def _covering(items: Sequence[Item]) -> set[str]:
    """Return the ids of a sample of the items of one implementation, as `sampled` describes it."""
    by_case: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        by_case[item.asked.id].append(item)
    first = items[0].adapter.modes[0] if items else None
    chosen: dict[str, Item] = {}
    left: dict[str, list[Item]] = {}
    for case, every in by_case.items():
        accepted = [item for item in every if not item.refused]
        order = [*SINGLE, *HALVES]
        base = min(
            accepted or every,
            key=lambda item: (item.mode is not first, order.index(item.dtype)),
        )
        for item in accepted or [base]:
            always = item is base
            always |= item.asked.regime is not None and item.mode is base.mode
            always |= "call.repeats" in item.asked.serves and item.dtype == base.dtype
            if always:
                chosen[item.id] = item
        left[case] = [item for item in accepted if item.id not in chosen]
    covered = {pair for item in chosen.values() for pair in _pairs(item)}
    # One after another, so that the pairs of a name are spread over its families.
    while left:
        for case, those in [*left.items()]:
            gains = [len(_pairs(item) - covered) for item in those]
            if not any(gains):
                del left[case]
                continue
            best = those.pop(gains.index(max(gains)))
            chosen[best.id] = best
            covered |= _pairs(best)
    return {*chosen}


def _pairs(item: Item) -> set[tuple[str, str]]:
    case, mode = item.asked, item.mode.name
    of_case = (case.name, case.family, *(part.__name__ for part in case.features))
    return {(item.dtype, mode), *((one, other) for one in of_case for other in (item.dtype, mode))}


def _is_telling(row: Inquiry) -> bool:
    """Return whether level "default" has an experiment in a mode.

    Experiments with many sizes are left out if no sizes are declared that they could refute. What
    is asked in another process is left out if that would have to be started for it alone. Other
    experiments are run in their first mode, except those in `BY_MODE`.
    """
    if row.asked.costly and row.adapter.geometry is None:
        return row.asked.apart and isinstance(row.adapter, Planned)
    return row.asked.id in BY_MODE or row.mode is row.asked.modes(row.adapter)[0]


# What an adapter supports


def core_dtypes(adapter: Adapter) -> tuple[str, ...]:
    """Return `CORE_DTYPES`, with the other dtype of a precision for one that an adapter lacks.

    If it declares no dtype of a precision, that precision is left out.
    """
    of_each = [[one for one in kind if one in adapter.dtypes][:1] for kind in (SINGLE, HALVES)]
    return tuple(itertools.chain(*of_each)) or CORE_DTYPES


def dtypes_of(adapter: Adapter, level: str) -> list[str]:
    """Return the dtypes in which to check an adapter.

    At level "full", these are all dtypes that the adapter declares. At other levels, they are the
    first dtype of `SINGLE` and the first of `HALVES` in which the adapter can express a core case,
    if there are any.
    """
    if level == "full":
        return list(adapter.dtypes)
    core = [one for case in catalogue() if case.core for one in posed_to(adapter, case)]
    found = []
    for choice in (SINGLE, HALVES):
        declared = [name for name in choice if name in adapter.dtypes]
        # A framework may lack a dtype that the adapter declares.
        usable = (n for n in declared if any(can_express(adapter, case, n) for case in core))
        found += [*islice(usable, 1)]
    return found


def can_express(adapter: Adapter, case: Case, dtype: str) -> bool:
    """Return False if the adapter raises `Unsupported` for the case, and True otherwise.

    The result is True even if the adapter raises another exception.
    """
    try:
        adapter.check(case.problem(dtype))
    except Exception as error:
        return not isinstance(error, Unsupported)
    return True


# Shards


MOST_SHARDS = 10_000
"""The maximum number of parts of a run."""


def parse_shard(text: str) -> tuple[int, int]:
    """Parse a shard such as "2/8" into (2, 8); raise `ConformanceError` if it is invalid."""
    # The number of digits is limited, because Python refuses to convert thousands of them.
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= of <= MOST_SHARDS:
        raise ConformanceError(
            f"--shard is {text[:40]!r}; say which of how many, such as 2/8, with at most "
            f"{MOST_SHARDS:,} parts"
        )
    return number, of


def part(rows: Iterable[Row], number: int, of: int) -> list[Row]:
    """Return part `number` of `of` parts of about equal size, in the order of the plan.

    Parts are counted from 1. Items that share a reference answer are in the same part. The division
    depends only on the plan, so machines with the same plan need not communicate.
    """
    rows = list(rows)
    if of == 1:
        return rows
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        group = row.dtype if isinstance(row, Item) else row.adapter.name
        groups[group, row.asked.id].append(row)
    # Distribute each dtype evenly: items in a dtype that is not supported take no time.
    ordered = sorted(groups.items(), key=lambda each: (-len(each[1]), each[0][0]))
    sizes = [0] * of
    chosen: set[str] = set()
    for _, members in ordered:
        smallest = sizes.index(min(sizes))
        sizes[smallest] += len(members)
        if smallest == number - 1:
            chosen |= {row.id for row in members}
    return [row for row in rows if row.id in chosen]


def certain_names(specs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the names that are known before anything is loaded, each with its spec.

    A spec that is given twice has one name. A function in a file is called as it is there, unless
    the file says `name =` somewhere; what a class is called, its bases may say.
    """
    for spec in specs:
        place, _, name = spec.partition(":")
        file = Path(place)
        if specs.count(spec) > 1:
            yield name or spec, spec
        elif name and place.endswith(".py") and file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            is_function = re.search(rf"^def {re.escape(name)}\b", text, re.MULTILINE)
            if is_function and not re.search(r"\bname\s*=", text):
                yield name, spec


def check_distinct(named: Iterable[tuple[str, str]]) -> None:
    """Raise `ConformanceError` if two implementations have the same name.

    Args:
        named: the name of each implementation, and its spec, such as "mine.py:f".
    """
    specs: dict[str, str] = {}
    for name, spec in named:
        if name not in specs:
            specs[name] = spec
            continue
        text = f"two implementations are called {name!r}"
        if (other := specs[name]) == spec:
            raise ConformanceError(f"{text}; rename one")
        raise ConformanceError(
            f"{text}: {other} and {spec}; rename one, or run them one by one with a --record each: "
            "a report keeps them apart"
        )
