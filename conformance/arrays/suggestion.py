"""Make problems that tell mistakes apart, and write one to be run in another language."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.arrays.files import grouped, option
from conformance.arrays.given import (
    LAYOUTS,
    Given,
    Numbers,
    given_layout,
    readings,
    separate,
)
from conformance.cases.casefile import Tensor, write
from conformance.causes.hypothesis import Hypothesis, Maker
from conformance.definition.dtypes import Array, dtype_of
from conformance.definition.expectation import solve
from conformance.definition.features import ARRAYS
from conformance.definition.problem import Norm, Problem, Shape, identities
from conformance.errors import BadArrays, ConformanceError
from conformance.records.findings import Phrase

SEED = 20_240_601

MORE_TOKENS = 160
"""How many more tokens a problem has in which tiles, blocks and windows show."""

MORE_KEYS = 5
"""How many more keys a problem has in which alignments show."""

CLOSE = 1e-9
"""The largest difference of two predictions in float64, relative to their rms, that are one."""

WAYS = ("tokens", "keys", "causal", "numbers", "heads", "mask")
"""The ways in which a problem is changed to tell mistakes apart; see `changed`."""


def apart(
    problem: Problem,
    causes: Sequence[Phrase],
    hypotheses: Callable[[Maker], Iterator[Hypothesis]],
) -> tuple[list[Phrase], list[Phrase]]:
    """Return those of several causes that are not one thing, and what would tell them apart.

    Causes that predict one answer to a problem with other numbers, masks and lengths, too, are one,
    so that only the first of them is returned. The others are told apart by the first of `WAYS`
    that does so for any two of them.

    Args:
        problem: the problem, on projected heads.
        causes: the causes that explain one answer to it.
        hypotheses: how to make the hypotheses about a problem.
    """
    kinds = {it.id for it in causes}

    def predicted(*ways: str) -> dict[Phrase, list[Array]]:
        found: dict[Phrase, list[Array]] = {}
        for it in hypotheses(Maker(changed(problem, *ways))):
            if it.cause.id in kinds and it.cause in causes:
                found.setdefault(it.cause, []).append(it.make().output)
        return found

    if not can_change(problem):
        return [*causes], []
    every = predicted(*WAYS)
    kept: list[Phrase] = []
    for cause in causes:
        known = [every[it] for it in kept if it in every]
        if cause not in every or not any(_are_one(every[cause], others) for others in known):
            kept.append(cause)
    telling = []
    for way in WAYS if len(kept) > 1 else ():
        answers = [it for cause, it in predicted(way).items() if cause in kept]
        if len(answers) > 1 and not all(_are_one(answers[0], it) for it in answers[1:]):
            telling.append(Phrase(f"apart.{way}"))
            break
    return kept, telling


def _are_one(one: Sequence[Array], other: Sequence[Array]) -> bool:
    """Return whether two causes, each with the answers that it may give, give one answer."""
    return any(
        a.shape == b.shape and np.allclose(a, b, CLOSE, CLOSE, equal_nan=True)
        for a in one
        for b in other
    )


def can_change(problem: Problem) -> bool:
    """Return whether `changed` can make another problem: not beside arrays that say of tokens."""
    of_tokens = {n for n, axes in ARRAYS.items() if {"query_length", "key_length"} & {*axes}}
    ragged = ("query_lengths", "key_lengths", "segments", "positions", "axes")
    return problem.heads_alone and all(
        getattr(problem, name, None) is None for name in (*of_tokens, *ragged)
    )


def changed(problem: Problem, *ways: str) -> Problem:
    """Return a problem with other queries, keys and values that differs in these `WAYS`.

    "tokens" are more queries and keys, "keys" are more keys than queries, "causal" is a causal
    mask, "numbers" are other ones of features and another scale, "heads" are twice as many, and
    "mask" is one that differs by head and query.
    """
    random = np.random.Generator(np.random.PCG64(SEED))
    old, times = problem.shape, 2 if "heads" in ways else 1
    more = MORE_TOKENS if "tokens" in ways else 0
    queries, keys = old.query_length + more, old.key_length + more
    keys += MORE_KEYS if "keys" in ways else 0
    shape = Shape.of_heads(
        (old.batch, times * old.heads, queries, old.head_size),
        (old.batch, times * old.kv_heads, keys, old.value_head_size),
    )
    fields: dict[str, Any] = {
        name: random.standard_normal(size) for name, size in shape.input_shapes().items()
    }
    for name in ("mask", "attn_bias"):
        array = getattr(problem, name)
        if array is None:
            continue
        whole = name == "mask" and "mask" in ways
        sizes = [
            size if whole or own > 1 else 1
            for size, own in zip(shape.logits, array.shape, strict=True)
        ]
        if name == "mask":
            fields[name] = random.random(sizes) < 0.7
            fields[name][..., 0] = True
        else:
            fields[name] = random.standard_normal(sizes)
    if "causal" in ways and problem.causal is None:
        fields["causal"] = "bottom-right"
    for name in ("sinks", "slopes"):
        if getattr(problem, name) is not None and ("numbers" in ways or times > 1):
            fields[name] = 0.1 + random.random(shape.heads)
    if "numbers" in ways:
        fields["scale"] = 1.3 * problem.logit_scale
        if problem.norm is not None:
            gains = 1 + 0.3 * random.standard_normal((2, shape.head_size))
            own = {"query": gains[0], "key": gains[1]}
            fields["norm"] = Norm(**own, epsilon=problem.norm.epsilon)
    output = random.standard_normal((shape.batch, shape.query_length, shape.output_width))
    return problem.replace(shape=shape, weights=identities(shape), cotangent=output, **fields)


def suggest(path: Path, arrays: Mapping[str, Numbers], told: Mapping[str, Any]) -> str:
    """Write query, key and value, other arrays that were told, and the output that is wanted.

    All sizes differ, keys outnumber queries, and logits are of ordinary size, so that no two axes,
    alignments or factors are mistaken for each other. Of a dump, its numbers of heads and its
    features are kept.

    Raises:
        ConformanceError: if the name does not end in .npz or .safetensors.
    """
    if path.suffix not in (".npz", ".safetensors"):
        raise BadArrays(f"{path}: the name says which format, .npz or .safetensors")
    random = np.random.Generator(np.random.PCG64(SEED))
    layout = told.get("layout") or LAYOUTS[4][0]
    dtype = told.get("dtype") or "float32"
    heads, kv_heads = told.get("heads") or 4, told.get("kv_heads") or 2
    if "query" in arrays and "key" in arrays and "value" in arrays:
        found = readings(
            Given(
                query=arrays["query"],
                key=arrays["key"],
                value=arrays["value"],
                output=None,
                layout=told.get("layout", ""),
                heads=told.get("heads"),
                kv_heads=told.get("kv_heads"),
            )
        )[0]
        heads, kv_heads = found.problem.shape.heads, found.problem.shape.kv_heads
        layout, dtype = found.layout, found.problem.dtype
    batch, queries, keys, size = 3, 5, 11, 8

    def drawn(count: int, length: int) -> np.ndarray:
        values = dtype_of(dtype).round(1.5 * random.standard_normal((batch, count, length, size)))
        return (
            given_layout(values, layout) if "batch" in layout else given_layout(values[:1], layout)
        )

    made: dict[str, np.ndarray] = {
        "query": drawn(heads, queries),
        "key": drawn(kv_heads, keys),
        "value": drawn(kv_heads, keys),
    }
    if "mask" in arrays:
        mask = random.random((batch, 1, queries, keys)) < 0.7
        mask[..., 0] = True
        made["mask"] = mask if "batch" in layout else mask[:1]
    if "bias" in arrays:
        made["bias"] = dtype_of(dtype).round(random.standard_normal((1, heads, queries, keys)))
    for name in (name for name, axes in ARRAYS.items() if name in arrays and axes == ("heads",)):
        made[name] = dtype_of(dtype).round(random.standard_normal(heads))
    kept = {
        name: option(name, str(value)) if name in ("causal", "window") else value
        for name, value in told.items()
        if "." not in name and name not in ("layout", "dtype", "accuracy", "mask_true")
    }
    kept |= grouped(told)
    if kept.get("causal") is True:
        kept["causal"] = "bottom-right"
    given = Given(
        **{
            **made,
            "output": None,
            "layout": layout,
            "dtype": dtype,
            "mask_true": ("attends"),
            **kept,
        }
    )
    reading = readings(given)[0]
    output = separate(solve(reading.problem, gradients=False).output, heads)
    made["wanted"] = given_layout(output, layout)
    stored = np.float64 if dtype == "float64" else np.float32
    final = {n: a if a.dtype == np.bool_ else a.astype(stored) for n, a in made.items()}
    try:
        if path.suffix == ".npz":
            np.savez(path, **final)  # type: ignore[arg-type]
        else:
            tensors = {
                name: Tensor.of(name, a.astype(np.uint8) if a.dtype == np.bool_ else a)
                for name, a in final.items()
            }
            write(path, tensors, {})
    except OSError as error:
        raise ConformanceError(f"{path} cannot be written: {error.strerror}") from error
    return f"{path}: {', '.join(final)}, axes {layout}; add your output to it, as output"
