"""What is the smallest error that the suite notices?

    python benchmarks/sensitivity.py            prints the tables
    python benchmarks/sensitivity.py --write    writes them into docs/noise.md

A correct attention in NumPy (`tests/mutants/attention.py`) is given one error of a known size, or
one intermediate that it keeps in the dtype of the tensors, and examined on the cases of the level
core in all its modes. It is a function, so the suite supplies the projections; in half precision it
promises no accuracy, class A, or class A0, and is as accurate as it promises apart from its error.
What promises A0 is a layer, because a function is given heads that are rounded to the dtype.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

ROOT = Path(__file__).parents[1]
# ruff: noqa: E402 - the attention and its defects belong to the tests.
sys.path.insert(0, str(ROOT / "tests"))

from mutants.attention import Array, Attention
from mutants.contestant import Function
from mutants.run import deviations
from mutants.zoo import find_mutants

from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.requirements.examination import ResultMemory, Workbench
from conformance.running.session import Session, plan

PAGE = ROOT / "docs" / "noise.md"
Promise = Literal["", "A", "A0"]
PROMISES: tuple[tuple[str, Promise], ...] = (
    ("float64", ""),
    ("float32", ""),
    *((dtype, promise) for dtype in ("bfloat16", "float16") for promise in ("", "A", "A0")),
)
Stages = Mapping[str, Callable[..., Any]]


class Wide(Attention):
    """The attention with every intermediate in float32: class A0."""

    coarse = False

    def hold(self, values: Array) -> Array:
        """As it is, except inside of what is kept in the dtype by mistake."""
        return Attention.hold(self, values) if self.coarse else values

    def stored(self, values: Array) -> Array:
        """Rounded at the end, once."""
        self.coarse = True
        try:
            return Attention.stored(self, values)
        finally:
            self.coarse = False


def _coarsely(stage: Callable[..., Any]) -> Callable[..., Any]:
    def within(a: Wide, *operands: Any) -> Any:
        a.coarse = True
        try:
            return stage(a, *operands)
        finally:
            a.coarse = False

    return within


def attention(stages: Stages, promise: Promise) -> Function:
    """Return the attention with some stages replaced, as an implementation that promises this."""
    if promise == "A0":
        stages = {name: _coarsely(stage) for name, stage in stages.items()}
    kind = type("Erroneous", (Wide if promise == "A0" else Attention,), dict(stages))
    found = Function("erroneous", kind, promise)
    found.projections_supplied = promise != "A0"
    return found


def weights_too_large(error: float) -> Stages:
    """All weights, and with them the output, are too large by this part."""
    return {
        "normalised": lambda a, *of: Attention.normalised(a, *of) * a.wide(1 + error),
        "rescaled": lambda a, *of: Attention.rescaled(a, *of) * a.wide(1 + error),
    }


def one_output(error: float) -> Stages:
    """One element of the context is too large by this part."""

    def one(context: Array) -> Array:
        context = context.copy()
        flat = context.reshape(-1)
        flat[np.argmax(np.abs(flat))] *= context.dtype.type(1 + error)
        return context

    return {
        "mix": lambda a, *of: one(Attention.mix(a, *of)),
        "rescaled": lambda a, *of: one(Attention.rescaled(a, *of)),
    }


def scale_too_large(error: float) -> Stages:
    """The scale is too large by this part."""
    return {"scaled": lambda a, scores: Attention.scaled(a, scores) * a.wide(1 + error)}


ERRORS = {
    "all outputs": weights_too_large,
    "one output": one_output,
    "the scale": scale_too_large,
}


def _of(mutant: str) -> Stages:
    return find_mutants([], [mutant])[0].changes


def _held_context(a: Attention, weights: Array, v: Array) -> Array:
    """The sum over the keys, key after key."""
    context = a.wide(0)
    for key in range(weights.shape[-1]):
        context = a.hold(context + weights[..., key, None] * v[:, :, None, key])
    return context


def _held_shrink(a: Attention, before: Array, now: Array) -> Array:
    return a.hold(Attention.shrink(a, a.hold(before), a.hold(now)))


DEFECTS: dict[str, Stages] = {
    "logits": _of("logits-in-float16-storage"),
    "logits + bias": _of("biased-logits-in-float16-storage"),
    "logits − maximum": _of("exponents-in-bfloat16-storage"),
    "the maximum": {"peak": lambda a, x: a.hold(Attention.peak(a, x)), "shrink": _held_shrink},
    "the normaliser": {"total": lambda a, powers: a.hold(Attention.total(a, powers))},
    "the normaliser's running sum": _of("sum-of-powers-in-float16-storage"),
    "the log-normaliser": _of("log-normaliser-in-float16-storage"),
    "sums inside query · key": _of("sums-of-scores-in-float16-storage"),
    "sums inside weights · value": {"mix": _held_context},
    "the row term D": {"row": lambda a, *of: a.hold(Attention.row(a, *of))},
    "float16 through bfloat16": _of("float16-through-bfloat16"),
}
"""What is kept in the dtype of the tensors, by the stages that keep it so."""


@cache
def _memory() -> ResultMemory:
    return ResultMemory(1024)


@cache
def core() -> tuple[Case, ...]:
    """Return the cases of the level core."""
    return tuple(case for case in catalogue() if case.core)


def noticed(
    stages: Stages, dtype: str, promise: Promise, cases: Sequence[Case], *, first: bool = False
) -> int:
    """Return how many cases notice it; at most 1, if it is enough to know whether one does."""
    session = Session(Workbench(expectations=_memory()), explains=False)
    adapter = attention(stages, promise)
    by_case: set[str] = set()
    for row in plan([adapter], cases, [dtype], "cpu"):
        if row.asked.id not in by_case and deviations(session, row):
            by_case.add(row.asked.id)
            if first:
                break
    return len(by_case)


def smallest(
    error: Callable[[float], Stages], dtype: str, promise: Promise, cases: Sequence[Case]
) -> float:
    """Return the smallest error that a case notices, to a factor of √2."""
    low, high = -110, 4
    while high - low > 1:
        middle = (low + high) // 2
        if noticed(error(2.0 ** (middle / 2)), dtype, promise, cases, first=True):
            high = middle
        else:
            low = middle
    return 2.0 ** (high / 2)


def sizes(dtypes: Sequence[str], cases: Sequence[Case]) -> str:
    """Return the table of the smallest errors."""
    rows = [f"| dtype | promised | {' | '.join(ERRORS)} |"]
    rows.append(f"| --- | --- |{' ---: |' * len(ERRORS)}")
    for dtype, promise in PROMISES:
        if dtype in dtypes:
            found = [smallest(error, dtype, promise, cases) for error in ERRORS.values()]
            cells = " | ".join(f"{one:.1g}" for one in found)
            rows.append(f"| {dtype} | {promise or 'nothing'} | {cells} |")
    return "\n".join(rows)


def defects(dtypes: Sequence[str], cases: Sequence[Case]) -> str:
    """Return the table of how many cases notice what is kept in half precision."""
    half = [(d, p) for d, p in PROMISES if d in ("bfloat16", "float16") and d in dtypes]
    heads = [f"{dtype}{', ' if promise else ''}{promise}" for dtype, promise in half]
    rows = [f"| in the dtype | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(half)}"]
    for name, stages in {"nothing (correct)": {}, **DEFECTS}.items():
        cells = [
            "" if name.startswith("float16") and dtype != "float16"
            else str(noticed(stages, dtype, promise, cases))
            for dtype, promise in half
        ]  # fmt: skip
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def written(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with these tables between their markers."""
    for name, table in tables.items():
        before, start, rest = page.partition(f"<!-- table {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert end, f"no markers of {name}"
        page = f"{before}{start}{table}\n{end}{after}"
    return page


def main() -> int:
    """Measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/noise.md")
    parser.add_argument("--dtype", action="append", default=[])
    options = parser.parse_args()
    started = time.perf_counter()
    dtypes = options.dtype or [dtype for dtype, _ in PROMISES]
    tables = {"sizes": sizes(dtypes, core()), "defects": defects(dtypes, core())}
    for table in tables.values():
        print(table, end="\n\n")
    print(f"{len(core())} cases, {time.perf_counter() - started:.0f} s")
    if options.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
