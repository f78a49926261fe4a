"""Select what a run examines: everything, unless patterns, dtypes, modes or a shard narrow it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from conformance.adapter.base import Adapter, Mode
from conformance.cases.case import Case, StoredCase
from conformance.cases.catalogue import catalogue, find_cases, matches
from conformance.definition.dtypes import DTYPES, dtype_of
from conformance.errors import ConformanceError, UnknownName, Unsupported
from conformance.experiments import EXPERIMENTS, Experiment, find_experiments
from conformance.running import DEVICES, LEVELS
from conformance.running.session import Item, Row, inquiries, modes_of, plan

SINGLE = ("float32", "float64")
HALVES = ("bfloat16", "float16")
CORE_DTYPES = (SINGLE[0], HALVES[0])
"""Dtypes of level "core"; `dtypes_of` chooses others for an adapter that lacks them."""


@dataclass(frozen=True)
class Selection:
    """The options that narrow a run.

    Attributes:
        cases: parts of ids or patterns, of cases and experiments; all if empty.
        dtypes: dtypes of the cases; all if empty. Experiments are in one dtype, and run if it is
            among these.
        modes: names of modes; all if empty.
        level: "core" leaves out cases that are not marked `core`, other dtypes than `CORE_DTYPES`
            and the experiments; but not what `cases` and `dtypes` name.
        files: cases beside the catalogue, by id.

    Raises:
        UnknownName: for a level or dtype that does not exist.
    """

    cases: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    modes: Sequence[str] = ()
    level: str = "full"
    files: Mapping[str, StoredCase] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UnknownName("level", self.level, LEVELS)
        object.__setattr__(self, "dtypes", [dtype_of(name).name for name in self.dtypes])

    def __str__(self) -> str:
        """The options that narrow the run or add to it, as a record shows them, or ""."""
        options = (("--case", self.cases), ("--dtype", self.dtypes), ("--mode", self.modes))
        words = [f"{option} {value}" for option, values in options for value in values]
        words += ["--level core"] if self.level == "core" else []
        words += [f"--case-file {case.path} ({case.id})" for case in self.files.values()]
        return " ".join(words)

    @property
    def dtype_names(self) -> Sequence[str]:
        """Return the dtypes of cases."""
        if self.dtypes:
            return self.dtypes
        return CORE_DTYPES if self._is_core else list(DTYPES)

    @property
    def _is_core(self) -> bool:
        return self.level == "core" and not self.cases

    def find_cases(self) -> list[Case]:
        """Return the chosen cases; raises `UnknownName` for a pattern that nothing matches."""
        every = (*catalogue(), *self.files.values())
        if not self.cases:
            return [case for case in every if case.core or not self._is_core]
        ids: set[str] = set()
        for pattern in self.cases:
            stored = {name for name in self.files if matches(name, pattern)}
            ids |= stored
            try:
                ids |= {case.id for case in find_cases(pattern)}
            except UnknownName:
                if not stored and not find_experiments(pattern):
                    raise
        return [case for case in every if case.id in ids]

    def find_experiments(self) -> Sequence[Experiment]:
        """Return the chosen experiments."""
        if not self.cases:
            return () if self._is_core else EXPERIMENTS
        ids = {item.id for pattern in self.cases for item in find_experiments(pattern)}
        return [item for item in EXPERIMENTS if item.id in ids]

    def rows(
        self,
        adapters: Sequence[Adapter],
        device: str,
        modes: Callable[[Adapter, Case, str], Sequence[Mode]] = modes_of,
    ) -> list[Row]:
        """Return the rows to examine: first the cases, then the experiments.

        Args:
            adapters: the implementations.
            device: "cpu" or "gpu".
            modes: returns the modes in which an adapter is asked a case in a dtype.

        Raises:
            UnknownName: for a case, experiment, mode or device that does not exist.
        """
        if device not in DEVICES:
            raise UnknownName("device", device, DEVICES)
        known = [mode.name for adapter in adapters for mode in adapter.modes]
        for name in self.modes:
            if name not in known:
                raise UnknownName("mode", name, known)
        rows: list[Row] = [*plan(adapters, self.find_cases(), self.dtype_names, device, modes)]
        rows += [
            row
            for row in inquiries(adapters, self.find_experiments(), device)
            if row.dtype in self.dtype_names
        ]
        return [row for row in rows if not self.modes or row.mode.name in self.modes]


# What an adapter can be asked


def dtypes_of(adapter: Adapter, level: str) -> list[str]:
    """Return all dtypes of an adapter; on level "core", a single precision and a half precision."""
    if level == "full":
        return list(adapter.dtypes)
    core = [case for case in catalogue() if case.core]
    return [
        dtype
        for choice in (SINGLE, HALVES)
        for dtype in [
            # Some frameworks lack a dtype that an adapter of theirs declares.
            name
            for name in choice
            if name in adapter.dtypes and any(can_express(adapter, case, name) for case in core)
        ][:1]
    ]


def can_express(adapter: Adapter, case: Case, dtype: str) -> bool:
    """Return False if the adapter refuses the problem; its own errors are for the check to find."""
    try:
        adapter.check(case.problem(dtype))
    except Unsupported:
        return False
    except Exception:
        return True
    return True


# Shards


def parse_shard(text: str) -> tuple[int, int]:
    """Return "2/8" as (2, 8); raises `ConformanceError`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    number, of = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= number <= of:
        raise ConformanceError(f"--shard is {text!r}; say which of how many, such as 2/8")
    return number, of


def part(rows: Iterable[Row], number: int, of: int) -> list[Row]:
    """Return one of so many equal parts of a plan, in the plan's order.

    Items that share an expectation stay together. Nothing but the plan decides, so that machines
    that plan the same need not communicate.
    """
    rows = list(rows)
    if of == 1:
        return rows
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        group = row.dtype if isinstance(row, Item) else row.adapter.name
        groups[group, row.case_id].append(row)
    # By dtype before by case: an implementation that lacks a dtype answers at once there.
    ordered = sorted(groups.items(), key=lambda each: (-len(each[1]), each[0][0]))
    sizes = [0] * of
    chosen: set[str] = set()
    for _, members in ordered:
        smallest = sizes.index(min(sizes))
        sizes[smallest] += len(members)
        if smallest == number - 1:
            chosen |= {row.id for row in members}
    return [row for row in rows if row.id in chosen]
