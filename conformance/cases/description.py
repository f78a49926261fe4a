"""Describe cases for the record: what a case tests, in words, and its mask as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from conformance.cases.case import Case, case_hash
from conformance.definition.dtypes import BoolArray
from conformance.definition.problem import Problem
from conformance.records.header import CaseInfo, Plane

MOST_PLANES = 4
MOST_ELEMENTS = 2**17
"""Larger planes are not drawn: they would show nothing, and make every record larger."""


def describe_all(cases: Iterable[Case]) -> dict[str, CaseInfo]:
    """Return the descriptions of cases by id."""
    return {case.id: describe(case) for case in dict.fromkeys(cases)}


def describe(case: Case) -> CaseInfo:
    """Return the description of one case."""
    problem = case.problem("float64")
    drawn = planes(problem)
    return CaseInfo(
        why=case.why,
        facts=facts(problem),
        planes=drawn[:MOST_PLANES],
        more=max(0, len(drawn) - MOST_PLANES),
        hash=case_hash(case),
    )


def facts(problem: Problem) -> list[str]:
    """Return the sizes of a problem, and everything else that is not as usual, a phrase each."""
    shape = problem.shape
    sharing = {
        "self": "query, key and value are one array",
        "memory": "key and value are one array",
        "separate": "query, key and value are three arrays",
    }
    heads = _plural(shape.heads, "head")
    if shape.kv_heads != shape.heads:
        heads += f" on {_plural(shape.kv_heads, 'key/value head')}"
    size = f"of size {shape.head_size}"
    if shape.value_head_size != shape.head_size:
        size += f", {shape.value_head_size} for values"
    widths = (shape.query_width, shape.key_width, shape.value_width, shape.output_width)
    every = [
        f"batch of {shape.batch}",
        f"{_plural(shape.query_length, 'query', 'queries')}, {_plural(shape.key_length, 'key')}",
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
    return every


def planes(problem: Problem) -> list[Plane]:
    """Return each distinct mask `Bool[query key]`, with the entries and heads that have it."""
    if problem.allowed is None or problem.allowed.shape[-1] * problem.allowed.shape[-2] == 0:
        return []
    allowed = problem.allowed_in_full()
    batch, heads, queries, keys = allowed.shape
    if queries * keys > MOST_ELEMENTS:
        # An empty list would mean that nothing is blocked.
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
    """Return lengths of runs, row by row; the first run, perhaps of length 0, is blocked."""
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
        listed = ", ".join(f"entry {entry} head {head}" for entry, head in places[:3])
        return listed + (f" and {len(places) - 3} more" if len(places) > 3 else "")
    parts = [] if len(entries) == batch else [_numbered("entry", "entries", entries)]
    parts += [] if len(of_heads) == heads else [_numbered("head", "heads", of_heads)]
    return ", ".join(parts)


def _numbered(one: str, many: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{one} {numbers[0]}"
    return f"{many} {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _plural(value: int, word: str, words: str = "") -> str:
    return f"{value} {word if value == 1 else words or word + 's'}"


def _shape(sizes: Sequence[int]) -> str:
    return "×".join(map(str, sizes))
