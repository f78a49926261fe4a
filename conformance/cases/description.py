"""Describe cases for the record, so that reports can show their facts and draw their masks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from conformance.cases.case import Case, case_hash
from conformance.definition.dtypes import BoolArray
from conformance.definition.features import NO_WINDOW
from conformance.definition.problem import Problem
from conformance.records.header import CaseInfo, Plane
from conformance.text import plural, some

MOST_PLANES = 4
MOST_ELEMENTS = 2**17
"""The most elements of a mask to draw: larger masks are unreadable and would inflate records."""


def describe_all(cases: Iterable[Case]) -> dict[str, CaseInfo]:
    """Return the descriptions of cases by case id."""
    return {case.id: describe(case) for case in dict.fromkeys(cases)}


def describe(case: Case) -> CaseInfo:
    """Return the description of one case: its purpose, facts, masks, hash and features."""
    problem = case.problem("float64")
    drawn = planes(problem)
    return CaseInfo(
        why=case.why,
        facts=facts(problem),
        planes=drawn[:MOST_PLANES],
        more=max(0, len(drawn) - MOST_PLANES),
        hash=case_hash(case),
        features=list(problem.features),
    )


def facts(problem: Problem) -> list[str]:
    """Return phrases for the sizes of a problem, its masks, bias, scale, score and features."""
    shape = problem.shape
    sharing = {
        "self": "query, key and value are one array",
        "memory": "key and value are one array",
        "separate": "query, key and value are three arrays",
    }
    heads = plural(shape.heads, "head")
    if shape.kv_heads != shape.heads:
        heads += f" on {plural(shape.kv_heads, 'key/value head')}"
    size = f"of size {shape.head_size}"
    if shape.value_head_size != shape.head_size:
        size += f", {shape.value_head_size} for values"
    widths = (shape.query_width, shape.key_width, shape.value_width, shape.output_width)
    every = [
        f"batch of {shape.batch}",
        f"{plural(shape.query_length, 'query', 'queries')}, {plural(shape.key_length, 'key')}",
        f"{heads} {size}",
        sharing[shape.sharing],
        f"widths {'/'.join(map(str, widths[:3]))} to {widths[3]}"
        if len(set(widths)) > 1
        else f"width {widths[0]}",
        "with biases" if shape.bias else "without biases",
    ]
    if shape.score != "scaled-dot":
        every.append(f"{shape.score} score")
    if problem.mask is not None:
        every.append(f"mask of shape {_shape(problem.mask.shape)}")
    if problem.causal is not None:
        every.append(f"causal, aligned {problem.causal}")
    if problem.attn_bias is not None:
        every.append(f"additive bias of shape {_shape(problem.attn_bias.shape)}")
    if problem.scale is not None:
        every.append(f"scale {problem.scale:g}")
    return every + list(_features(problem))


def _features(problem: Problem) -> Iterator[str]:
    """Yield a phrase for each feature of a problem."""
    if problem.norm is not None:
        yield f"RMS norm of query and key heads, epsilon {problem.norm.epsilon:g}"
    if problem.rotary is not None:
        rotary = problem.rotary
        yield f"rotary positions, {rotary.size} components, {rotary.pairs}, base {rotary.base:g}"
    if problem.soft_cap is not None:
        yield f"soft cap {problem.soft_cap:g}"
    if problem.slopes is not None:
        yield f"ALiBi slopes {_numbers(problem.slopes)}"
    if problem.window != NO_WINDOW:
        sides = zip(problem.window, ("before", "after"), strict=True)
        yield "window of " + ", ".join(f"{n} {side}" for n, side in sides if n is not None)
    if problem.query_lengths is not None:
        yield f"lengths of queries {_numbers(problem.query_lengths)}"
    if problem.key_lengths is not None:
        yield f"lengths of keys {_numbers(problem.key_lengths)}"
    if problem.segments is not None:
        yield f"packed, {plural(len(np.unique(problem.segments.query)), 'segment')}"
    if problem.positions is not None:
        yield "positions of their own"
    if problem.sinks is not None:
        yield f"sinks {_numbers(problem.sinks)}"


def _numbers(values: np.ndarray) -> str:
    return some([f"{value:.3g}" for value in values], 8)


def planes(problem: Problem) -> list[Plane]:
    """Return each distinct mask `[query key]`, with the batch entries and heads that use it.

    The list is empty if nothing is masked. If masks are too large to draw, it holds one plane
    without runs.
    """
    if problem.allowed is None or problem.allowed.shape[-1] * problem.allowed.shape[-2] == 0:
        return []
    allowed = problem.allowed_in_full()
    batch, heads, queries, keys = allowed.shape
    if queries * keys > MOST_ELEMENTS:
        # Return a plane without runs, because an empty list would mean that nothing is blocked.
        return [Plane("", queries, keys, [])]
    places: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for entry in range(batch):
        for head in range(heads):
            places[allowed[entry, head].tobytes()].append((entry, head))
    return [
        Plane(_where(same, batch, heads), queries, keys, runs(allowed[same[0]]))
        for same in places.values()
    ]


def runs(plane: BoolArray) -> list[int]:
    """Return the run lengths of a mask, row by row; the first run is blocked, and may be empty."""
    flat = plane.ravel()
    edges = np.flatnonzero(np.diff(flat)) + 1
    lengths = np.diff(np.concatenate(([0], edges, [flat.size])))
    return [*([0] if flat.size and flat[0] else []), *(int(length) for length in lengths)]


def _where(places: Sequence[tuple[int, int]], batch: int, heads: int) -> str:
    if len(places) == batch * heads:
        return ""
    entries = sorted({entry for entry, _ in places})
    of_heads = sorted({head for _, head in places})
    if len(places) != len(entries) * len(of_heads):
        return some([f"entry {entry} head {head}" for entry, head in places], 3)
    parts = [] if len(entries) == batch else [_numbered("entry", "entries", entries)]
    parts += [] if len(of_heads) == heads else [_numbered("head", "heads", of_heads)]
    return ", ".join(parts)


def _numbered(one: str, many: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    return f"{many} {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))
