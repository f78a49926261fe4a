"""What a level of checks asks: "core" in some seconds, "full" everything."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.adapter.base import Adapter
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue, find_cases
from conformance.errors import Unsupported

SINGLE = ("float32", "float64")
HALVES = ("bfloat16", "float16")
CORE_DTYPES = (SINGLE[0], HALVES[0])
"""What a run asks on level "core"; `dtypes_of` looks for others if an adapter lacks them."""


def dtypes_of(adapter: Adapter, level: str) -> list[str]:
    """All of them, or single precision and one half."""
    if level == "full":
        return list(adapter.dtypes)
    found = []
    for choice in (SINGLE, HALVES):
        there = [name for name in choice if name in adapter.dtypes and _has(adapter, name)]
        found += there[:1]
    return found


def _has(adapter: Adapter, dtype: str) -> bool:
    """Some frameworks lack a dtype that an adapter of theirs does not mention."""
    core = [case for case in catalogue() if case.core]
    return any(can(adapter, case, dtype) for case in core)


def can(adapter: Adapter, case: Case, dtype: str) -> bool:
    """Whether the adapter says that it can be asked; its own mistakes are for the check to tell."""
    try:
        adapter.check(case.problem(dtype))
    except Unsupported:
        return False
    except Exception:
        return True
    return True


def cases_of(level: str, patterns: Sequence[str]) -> list[Case]:
    """Those that match a pattern; without one, those of the level."""
    if not patterns:
        return [case for case in catalogue() if level == "full" or case.core]
    chosen = {case.id for pattern in patterns for case in find_cases(pattern)}
    return [case for case in catalogue() if case.id in chosen]
