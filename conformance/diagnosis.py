"""Name the mistake: which known defect gives exactly this wrong answer?

Most defects of an attention are a right answer to another problem: the mask inverted, the scale
forgotten, two weights swapped. So a hypothesis is a change to the problem, and the clean reference
computes what the defect would give. It is named only if it explains every element of the output, to
the noise, and nothing simpler does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from conformance.comparison import ratios
from conformance.dtypes import Array
from conformance.errors import Unsupported
from conformance.examination import Examination
from conformance.findings import Finding
from conformance.problem import Problem
from conformance.reference import LIMIT
from conformance.reference.arithmetic import Exact
from conformance.reference.attention import forward

ABOUT = ("output.", "gradient.", "weights.", "modes.", "mask.spellings")
"""Chapters of requirements for which the output is searched for a cause."""


NARROWER = {"float64": ("float32", "bfloat16"), "float32": ("bfloat16",)}
"""Dtypes whose noise an answer may show that was partly computed in them."""


def explain(finding: Finding, ex: Examination) -> Finding:
    """The finding, with the cause if one is known."""
    if not finding.requirement.startswith(ABOUT):
        return finding
    key = ("cause", id(ex.adapter), ex.case.id, ex.dtype, ex.device, ex.mode.name)
    cause = ex.bench.answers.get(key, lambda: diagnose(ex))
    return msgspec.structs.replace(finding, cause=cause) if cause else finding


def diagnose(ex: Examination) -> str:
    """The known defect whose output this is, or ""."""
    try:
        output = ex.answer.output
    except Exception:
        return ""
    if _equal(ex, output, ex.expectation.arrays["output"]):
        return ""
    for name, make in _hypotheses(ex.problem):
        try:
            wrong = make()
        except Unsupported:
            continue
        if _equal(ex, output, wrong):
            return f"equals the answer {name}"
    for narrower in NARROWER.get(ex.dtype, ()):
        problem = ex.problem.replace(dtype=narrower)
        coarse = ex.expected(narrower, lambda: problem).loosest["output"]  # noqa: B023
        ratio = ratios(output, ex.expectation.arrays["output"], coarse, ex.expectation.underflow)
        if (np.abs(ratio) <= LIMIT).all():
            return f"is only as accurate as {narrower}"
    return ""


def _hypotheses(problem: Problem) -> Iterator[tuple[str, Callable[[], Array]]]:
    """Names and outputs of known defects, the simplest first."""

    def of(**changes: object) -> Callable[[], Array]:
        return lambda: _output(problem.replace(**changes))

    def weights(**changes: Array | None) -> Callable[[], Array]:
        return lambda: _output(problem.with_weights(**changes))

    shape, own = problem.shape, problem.weights
    if problem.allowed is not None:
        allowed = problem.allowed
        yield "with the mask inverted", of(mask=~allowed, causal=None)
        yield "with the mask ignored", of(mask=None, causal=None)
        for sign, told in ((1.0, "where it may attend"), (-1.0, "where it may not")):
            plus = (allowed if sign > 0 else ~allowed).astype(np.float64)
            if problem.attn_bias is not None:
                plus = plus + problem.attn_bias
            yield (
                f"with the mask added to the logits as 1 {told}",
                of(mask=None, causal=None, attn_bias=plus),
            )
        full = problem.allowed_in_full()
        yield "with the first batch entry's mask for all", of(mask=full[:1], causal=None)
        yield "with the first head's mask for all", of(mask=full[:, :1], causal=None)
        if shape.query_length == shape.key_length:
            yield "with the mask transposed", of(mask=np.swapaxes(full, -1, -2), causal=None)
    if problem.causal is not None:
        yield "with the causal flag ignored", of(causal=None)
        other = "top-left" if problem.causal == "bottom-right" else "bottom-right"
        yield f"with the causal mask aligned {other}", of(causal=other)
        if problem.mask is not None:
            yield "with the mask ignored beside the causal flag", of(mask=None)
        for offset in (-1, 1):
            triangle = np.tri(shape.query_length, shape.key_length, offset, dtype=np.bool_)
            moved = triangle if problem.mask is None else problem.mask & triangle
            yield (
                f"with the causal mask off by one ({offset:+d})",
                of(causal=None, mask=np.broadcast_to(moved, shape.logits)),
            )
    if problem.attn_bias is not None:
        yield "with the additive bias ignored", of(attn_bias=None)
        yield "with the additive bias subtracted", of(attn_bias=-problem.attn_bias)
        yield (
            "with the scale applied to the bias too",
            of(attn_bias=problem.attn_bias * problem.logit_scale),
        )
    size = shape.head_size
    for told, scale in (
        ("without the scale", 1.0),
        ("with scale 1/d instead of 1/sqrt(d)", 1.0 / size),
        ("with scale 1/sqrt(d) instead of the one asked for", 1.0 / math.sqrt(size)),
        ("with scale 1/sqrt(width)", 1.0 / math.sqrt(max(1, shape.query_width))),
        ("with scale 1/width", 1.0 / max(1, shape.query_width)),
        ("with scale sqrt(d)", math.sqrt(size)),
        ("with uniform weights", 0.0),
    ):
        if not math.isclose(scale, problem.logit_scale):
            yield told, of(scale=scale)
    for name in ("query_bias", "value_bias", "output_bias"):
        bias = getattr(own, name)
        if bias is not None:
            yield f"with the {name.replace('_', ' ')} forgotten", weights(**{name: 0.0 * bias})
            yield f"with the {name.replace('_', ' ')} added twice", weights(**{name: 2.0 * bias})
    yield "with the softmax over the queries", lambda: _other_softmax(problem, axis=-2)
    yield "with the softmax over the heads", lambda: _other_softmax(problem, axis=-3)
    if own.query.shape == own.key.shape:
        biases = {"query_bias": own.key_bias, "key_bias": own.query_bias}
        yield "with query and key weights swapped", weights(query=own.key, key=own.query, **biases)
    if own.value.shape == own.key.shape:
        biases = {"value_bias": own.key_bias, "key_bias": own.value_bias}
        yield "with key and value weights swapped", weights(value=own.key, key=own.value, **biases)
    for name in ("query", "key", "value"):
        weight = getattr(own, name)
        width, heads, head = weight.shape
        if heads > 1:
            for mixed in (
                weight.reshape(width, head, heads).swapaxes(1, 2),
                weight.swapaxes(1, 2).reshape(width, heads, head),
            ):
                yield f"with heads interleaved in the {name} weight", weights(**{name: mixed})
        if width == heads * head:
            turned = weight.reshape(width, width).T.reshape(weight.shape)
            yield f"with the {name} weight transposed", weights(**{name: turned})
    if shape.group > 1 and shape.kv_heads > 1:
        yield "with key/value heads tiled instead of repeated", lambda: _tiled(problem)


def _output(problem: Problem) -> Array:
    """The output, NaN where a query may attend no key: there is no one answer there."""
    output = forward(problem, Exact()).output
    empty = ~np.any(problem.allowed_in_full(), axis=-1).all(axis=1)
    return np.where(empty[..., None], np.nan, output)


def _other_softmax(problem: Problem, axis: int) -> Array:
    """The output with the softmax taken over another axis; blocked logits are -inf."""
    found = forward(problem, Exact())
    logits = np.where(problem.allowed_in_full(), found.logits, -np.inf)
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=axis, keepdims=True))
        weights = powers / powers.sum(axis=axis, keepdims=True)
    output = np.einsum("bhqk,bhkd,hde->bqe", weights, found.v, problem.weights.output)
    bias = problem.weights.output_bias
    return output if bias is None else output + bias


def _tiled(problem: Problem) -> Array:
    """The output with query head h on key/value head h mod kv_heads."""
    shape, own = problem.shape, problem.weights
    order = np.arange(shape.heads).reshape(shape.group, shape.kv_heads).T.ravel()
    changes = {"query": own.query[:, order], "output": own.output[order]}
    if own.query_bias is not None:
        changes["query_bias"] = own.query_bias[order]
    changed = problem.with_weights(**changes)
    arrays = {name: getattr(problem, name) for name in ("mask", "attn_bias")}
    per_head = {
        name: array[:, order]
        for name, array in arrays.items()
        if array is not None and array.shape[1] > 1
    }
    return _output(changed.replace(**per_head))


def _equal(ex: Examination, got: Array, want: Array) -> bool:
    """Equal to the noise, with room: the hypothesis has noise of its own.

    Where the hypothesis has NaN, anything goes, unless it has nothing else.
    """
    noise = ex.expectation.loosest["output"]
    told = ~np.isnan(want)
    if not told.any():
        return bool(np.isnan(got).all())
    size = np.sqrt(np.mean(ex.expectation.arrays["output"] ** 2))
    gain = max(1.0, np.sqrt(np.mean(want[told] ** 2)) / size) if size > 0 else 1.0
    spread = gain * np.sqrt(np.mean(noise**2))
    ratio = ratios(got, want, noise + 2 * spread, ex.expectation.underflow)
    return bool((np.abs(ratio[told]) <= LIMIT).all())
