"""Every input of every case matters: leave it out, negate it or permute it, and the answer moves.

A case whose inputs do not bind passes implementations that ignore them: a mask that blocks
nothing, a bias that is constant, a cotangent of ones. So each input of each case is spoilt, one at
a time, and the reference has to move by many times the noise that the suite forgives. What cannot
move it is declared (`Case.idle`) or a symmetry, named below with its reason.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np
import pytest
from problems import make

from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue, every_case
from conformance.definition.dtypes import DTYPES
from conformance.definition.expectation import Expectation, expect, solve
from conformance.definition.features import FEATURES
from conformance.definition.geometry import Grid
from conformance.definition.problem import Positions, Problem
from conformance.definition.rotary import RotaryAxes, RotaryScaling, length_of
from conformance.records.numbers import LIMIT

BINDS = {"float64": 100.0, "float32": 100.0, "float16": 100.0, "bfloat16": 3 * LIMIT}
"""How far the answer has to move, in σ of the least accurate class.

An answer is forgiven 8σ, so the right and the spoilt one are told apart beyond 16σ. In bfloat16
the whole answer is only some 100σ large: what adds a part to it cannot move it by more.
"""

SYMMETRIC = {
    ("causal/bottom-right/decoding", "causal", "left out"): "aligned at the end, the flag hides "
    "nothing from a single query; that it hides nothing else is what the case is for",
    ("causal/beside-a-cache/decoding", "causal", "left out"): "the same, beside a mask",
    **dict.fromkeys(
        [
            (f"feature/{name}-causal/decoding", "causal", "left out")
            for name in ("soft-cap", "sinks", "key-lengths")
        ],
        "the same, beside features that do not count positions",
    ),
    **dict.fromkeys(
        [
            (f"feature/spans-{name}", "spans", "for all")
            for name in (
                "after-history/gqa",
                "after-history/separate",
                "adjacent/gqa",
                "with-window/gqa",
                "with-chunk/self",
                "packed/self",
            )
        ],
        "a query in no span sees no later key that is in none; in the other cases it does",
    ),
    (
        "feature/spans-with-chunk/self",
        "spans",
        "one more",
    ): "the key after the spans is the only one of its block",
    ("feature/covering-16/narrow", "window before", "one less"): "the mask and the segments hide "
    "the keys at this edge; at the others they do not",
    **dict.fromkeys(
        [
            (f"feature/window-beyond-causal/{family}", "window after", how)
            for family in ("self", "separate")
            for how in ("left out", "one more", "one less")
        ]
        + [
            ("feature/window-of-one-causal/exact.d16t16x16", "window after", how)
            for how in ("left out", "one more", "one less")
        ],
        "the flag hides all keys after the own one; that the window shows none is what the case is "
        "for",
    ),
    ("scale/zero/cross", "scale", "negated"): "-0 is 0",
    ("plain/no-mask/one-key", "cotangent", "rolled along axis 1"): "with one key, all queries of "
    "an entry have the same context, so it does not matter which of them a cotangent belongs to",
}

BLURRED = dict.fromkeys(
    (
        ("logits/large/cross", "scale", "left out", "bfloat16"),
        ("logits/large-with-mask/cross", "scale", "left out", "bfloat16"),
        ("logits/large-with-mask/cross", "scale", "left out", "float16"),
    ),
    "weights near 0 and 1 hardly change when logits of some ten double, and in half precision "
    "such logits are uncertain to a tenth",
)

FINE = frozenset(
    {"rotary base", "rotary size", "norm epsilon"}
    | {f"rotary {field.name}" for field in dataclasses.fields(RotaryScaling)}
)
"""What turns or scales a few components by a little: half precision hardly tells it."""

BITS = 64
"""Mask bits tried where queries or keys are above 100 (`long`, `tiles`, `longer`); else all."""

CASES = [case for case in catalogue() if case.defined]
TILED = [
    case.on(Grid(head_size=16, tiles=(16, 16), layer=False))
    for case in every_case()
    if case.tiled and case.features
]
"""Cases for kernels with tiles only, at small ones."""
MASKED = [case for case in CASES if case.mask is not None and case.regime is None]

Spoilt = tuple[str, str, Problem]


def array_variants(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield "left out", np.zeros_like(array)
    yield "negated", -array
    yield from rolls(array)


def rolls(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for axis, size in enumerate(array.shape):
        if size > 1:
            yield f"rolled along axis {axis}", np.roll(array, 1, axis)


def spoilt(problem: Problem) -> Iterator[Spoilt]:
    """Name of the input, what was done to it, and the problem with it."""
    for name in problem.shape.distinct_inputs():
        for how, array in array_variants(getattr(problem, name)):
            yield name, how, problem.with_inputs(**{name: array})
    for name, weight in problem.weights.named().items():
        for how, array in array_variants(weight):
            yield f"weights.{name}", how, problem.with_weights(**{name: array})
    for name in ("cotangent", "attn_bias"):
        given = getattr(problem, name)
        for how, array in () if given is None else array_variants(given):
            yield name, how, problem.replace(**{name: array})
    if problem.mask is not None:
        yield "mask", "left out", problem.replace(mask=None)
        yield "mask", "negated", problem.replace(mask=~problem.mask)
        for how, array in rolls(problem.mask):
            yield "mask", how, problem.replace(mask=array)
    if problem.causal is not None:
        yield "causal", "left out", problem.replace(causal=None)
        other = {"top-left": "bottom-right", "bottom-right": "top-left"}[problem.causal]
        if problem.shape.query_length != problem.shape.key_length:
            yield "causal", other, problem.replace(causal=other)
    yield from spoilt_features(problem)
    if problem.scale is not None:
        yield "scale", "left out", problem.replace(scale=None)
    elif problem.shape.default_scale != 1.0:
        yield "scale", "left out", problem.replace(scale=1.0)
    yield "scale", "negated", problem.replace(scale=-problem.logit_scale)


def spoilt_features(problem: Problem) -> Iterator[Spoilt]:
    """The same for each feature: left out, and with each number replaced by one that is near."""
    for name in ("sinks", "slopes"):
        given = getattr(problem, name)
        if given is not None:
            yield name, "missing", problem.replace(**{name: None})
            for how, array in array_variants(given):
                yield name, how, problem.replace(**{name: array})
    for side, count in enumerate(problem.window):
        if count is not None:
            name = f"window {('before', 'after')[side]}"
            step = problem.dilation or 1
            for how, other in (
                ("left out", None),
                ("one more", count + step),
                ("one less", count - 1),
            ):
                if other != -1:
                    window = (other, problem.window[1]) if side == 0 else (problem.window[0], other)
                    yield name, how, problem.replace(window=window)
    if problem.chunk is not None:
        for how, size in (
            ("left out", None),
            ("one more", problem.chunk + 1),
            ("one less", problem.chunk - 1),
        ):
            yield "chunk", how, problem.replace(chunk=size)
    if problem.dilation is not None:
        for how, dilation in (
            ("left out", None),
            ("one more", problem.dilation + 1),
            ("one less", problem.dilation - 1),
        ):
            yield "dilation", how, problem.replace(dilation=dilation)
    if problem.global_tokens is not None:
        tokens = problem.global_tokens
        yield "global tokens", "left out", problem.replace(global_tokens=None)
        for how, other in (
            ("one less", np.where(tokens.cumsum(axis=1) > 1, 0, tokens)),
            ("for all", np.ones_like(tokens)),
            *rolls(tokens),
        ):
            if not np.array_equal(other, tokens):
                yield "global tokens", how, problem.replace(global_tokens=other)
    if problem.spans is not None:
        yield from spoilt_spans(problem, problem.spans)
    if problem.tree is not None:
        tree, tokens = problem.tree, np.arange(problem.shape.query_length)
        others = {
            "a chain": np.broadcast_to(tokens - 1, tree.shape),
            "all roots": np.full_like(tree, -1),
            "of the next parents": np.minimum(tree + 1, tokens - 1),
            "of earlier parents": np.maximum(tree - 1, -1),
            **{how: np.minimum(rolled, tokens - 1) for how, rolled in rolls(tree)},
        }
        yield "tree", "left out", problem.replace(tree=None)
        for how, other in others.items():
            yield "tree", how, problem.replace(tree=other)
    if problem.soft_cap is not None:
        yield "soft_cap", "left out", problem.replace(soft_cap=None)
        yield "soft_cap", "twice", problem.replace(soft_cap=2.0 * problem.soft_cap)
    if problem.rotary is not None:
        rotary = problem.rotary
        other = {"halves": "interleaved", "interleaved": "halves"}[rotary.pairs]
        yield "rotary", "left out", problem.replace(rotary=None)
        changes = {"base": 100.0 * rotary.base, "size": rotary.size - 2, "pairs": other}
        for name, value in changes.items():
            # A single pair has no other size, no base and one order.
            scaling = problem.rotary_scaling
            if rotary.size > 2 and (name != "size" or scaling is None or scaling.fits(value)):
                changed = dataclasses.replace(rotary, **{name: value})
                yield f"rotary {name}", "replaced", problem.replace(rotary=changed)
    if problem.rotary is not None and problem.rotary_scaling is not None:
        yield from spoilt_scaling(problem, problem.rotary_scaling)
    if problem.axes is not None:
        yield from spoilt_axes(problem, problem.axes, problem.rotary_scaling)
    if problem.norm is not None:
        norm = problem.norm
        yield "norm", "left out", problem.replace(norm=None)
        usual = dataclasses.replace(norm, epsilon=1e-6)
        yield "norm epsilon", "as usual", problem.replace(norm=usual)
        for name in ("query", "key"):
            for how, array in array_variants(getattr(norm, name)):
                changed = dataclasses.replace(norm, **{name: array})
                yield f"norm {name}", how, problem.replace(norm=changed)
    for name in ("query_lengths", "key_lengths"):
        given = getattr(problem, name)
        if given is not None:
            yield name, "left out", problem.replace(**{name: None})
            if len(given) > 1:
                yield name, "rolled along axis 0", problem.replace(**{name: np.roll(given, 1)})
            yield name, "one less", problem.replace(**{name: np.maximum(given - 1, 0)})
    if problem.segments is not None:
        segments = problem.segments
        yield "segments", "left out", problem.replace(segments=None)
        for how, key in rolls(segments.key):
            yield "segments", how, problem.replace(segments=dataclasses.replace(segments, key=key))
    if problem.positions is not None:
        positions = problem.positions
        yield "positions", "left out", problem.replace(positions=None)
        nearer = dataclasses.replace(positions, query=positions.query - 1)
        yield "positions", "one less", problem.replace(positions=nearer)
        if problem.rotary is not None:
            others = {side: np.roll(getattr(positions, side), 1, 0) for side in ("query", "key")}
            yield "positions", "of another entry", problem.replace(positions=Positions(**others))


def spoilt_spans(problem: Problem, spans: np.ndarray) -> Iterator[Spoilt]:
    """The same for spans: other ends, other ids, and ids of other keys."""
    after, before = np.roll(spans, -1, axis=1), np.roll(spans, 1, axis=1)
    after[:, -1] = before[:, 0] = 0
    others = {
        "one less": np.where(after == spans, spans, 0),
        "one more": np.where(spans == 0, before, spans),
        "of one id": np.minimum(spans, 1),
        "for all": spans + 1,
        **dict(rolls(spans)),
    }
    yield "spans", "left out", problem.replace(spans=None)
    for how, changed in others.items():
        if not np.array_equal(changed, spans):
            yield "spans", how, problem.replace(spans=changed)


def spoilt_axes(problem: Problem, axes: RotaryAxes, scaling: RotaryScaling) -> Iterator[Spoilt]:
    """The same for positions on several axes, and for the sections of pairs that turn by each."""
    far = dataclasses.replace(axes, query=axes.query + 1)
    yield "position axes", "of queries one more", problem.replace(axes=far)
    if (np.ptp(axes.key, axis=-1) == 0).all():
        return  # All pairs of a text turn alike, whatever their sections are.
    plain = scaled_alone(scaling)
    yield "position axes", "left out", problem.replace(axes=None, rotary_scaling=plain)
    read = set(scaling.axis_of_pairs().tolist())
    for axis in sorted(read):
        order = [it if it != axis else (axis + 1) % 3 for it in range(3)]
        other = RotaryAxes(query=axes.query[..., order], key=axes.key[..., order])
        yield "position axes", f"number {axis} as the next", problem.replace(axes=other)
    for order in itertools.permutations(range(3)):
        counts = tuple(scaling.mrope_section[it] for it in order)
        other = dataclasses.replace(scaling, mrope_section=counts)
        if counts != scaling.mrope_section and other.fits(problem.rotary.size):
            yield "sections", f"{counts}", problem.replace(rotary_scaling=other)
    other = dataclasses.replace(scaling, mrope_interleaved=not scaling.mrope_interleaved)
    fits = other.fits(problem.rotary.size)
    if fits and not np.array_equal(other.axis_of_pairs(), scaling.axis_of_pairs()):
        yield "sections", "the other way", problem.replace(rotary_scaling=other)


def scaled_alone(scaling: RotaryScaling) -> RotaryScaling | None:
    """A scaling without sections; None if nothing else is scaled."""
    if scaling.rope_type == "default":
        return None
    return dataclasses.replace(scaling, mrope_section=None, mrope_interleaved=None)


def spoilt_scaling(problem: Problem, scaling: RotaryScaling) -> Iterator[Spoilt]:
    """The same for what scales rotary frequencies: each number that matters twice as large."""
    kind, length = scaling.rope_type, length_of(problem)
    short = length <= (scaling.original_max_position_embeddings or length)
    sections = {n: getattr(scaling, n) for n in ("mrope_section", "mrope_interleaved")}
    if kind != "default" and (kind != "dynamic" or not short):
        bare = RotaryScaling(rope_type="default", **sections) if problem.axes else None
        yield "rotary scaling", "left out", problem.replace(rotary_scaling=bare)
    # What is of the other side of the original length does not matter on this one.
    idle = {"dynamic": ("factor",) if short else (), "longrope": ()}.get(kind, ())
    if kind == "longrope":
        idle = ("long_factor" if short else "short_factor",)
        idle += ("factor",) if scaling.attention_factor else ()
    for name, value in scaling.parameters().items():
        other = value[::-1] if isinstance(value, list) else not value
        if isinstance(value, float):
            other = 2 * value
        elif name == "original_max_position_embeddings":
            moves = kind in ("dynamic", "longrope")
            other = length - short if moves else 2 * value
        if name not in ("rope_type", *sections, *idle):
            given = tuple(other) if isinstance(other, list) else other
            changed = dataclasses.replace(scaling, **{name: given})
            yield f"rotary {name}", "replaced", problem.replace(rotary_scaling=changed)


def test_every_feature_has_a_case():
    posed = {name for case in CASES for name in case.problem("float32").features}
    assert {entry.name for entry in FEATURES} == posed


@pytest.mark.parametrize("entry", FEATURES, ids=lambda entry: entry.name)
def test_every_feature_is_spoilt(entry):
    """A feature that `spoilt_features` does not know would bind without being looked at."""
    problem = next(
        case.problem("float32") for case in CASES if entry.name in case.problem("float32").features
    )
    spoilt_fields = {
        name
        for _, _, wrong in spoilt_features(problem)
        for name in entry.fields(problem)
        if getattr(wrong, name) is not getattr(problem, name)
    }
    assert spoilt_fields == entry.fields(problem).keys()


def movement(expectation: Expectation, problem: Problem) -> dict[str, float]:
    """How far each array of the answer lies from the expected one."""
    return far_from(expectation.arrays, expectation, solve(problem).arrays())


def far_from(
    exact: Mapping[str, np.ndarray], noise: Expectation, arrays: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """How far each array lies from the exact one: the largest |Δ| / (σ + floor)."""
    return {
        name: float(np.max(np.abs(array - exact[name]) / (noise.sigma[name] + noise.underflow)))
        for name, array in arrays.items()
    }


Movements = dict[str, list[tuple[str, str, dict[str, float]]]]
"""By dtype: the name of an input, what was done to it, and how far that moves each array."""


@lru_cache(maxsize=1)
def movements(case: Case) -> Movements:
    """What every spoilt input does to the answer of the case; in float64, only every idle one.

    What moves an answer by 100σ in float32 does so in float64, where the noise is smaller. The
    answers are those to the numbers of float32: only σ differs between the dtypes by much.
    """
    problem = case.problem("float32")
    exact = solve(problem).arrays()
    posed = [name for name in DTYPES if case.posed_in(name)]
    dtypes = [name for name in posed if name != "float64" or case.idle]
    noise = {dtype: expect(case.problem(dtype)) for dtype in dtypes}
    found: Movements = {dtype: [] for dtype in dtypes}
    with np.errstate(over="ignore"):  # an element that must be 0 and is not
        for name, how, wrong in spoilt(problem):
            arrays = solve(wrong).arrays()
            for dtype in dtypes:
                if dtype != "float64" or name in case.idle:
                    found[dtype].append((name, how, far_from(exact, noise[dtype], arrays)))
    return found


def blind_to_key_order(problem: Problem) -> bool:
    """Without anything that is laid out along the keys, their order is a symmetry."""
    laid_out = problem.attn_bias is not None or not problem.allowed_in_full().all()
    return problem.shape.sharing == "memory" and not laid_out


@pytest.mark.sample(20)
@pytest.mark.parametrize("case", [*CASES, *TILED], ids=lambda case: case.id)
def test_every_input_binds(case):
    loose = [
        f"{name} {how}: {max(moved.values()):.3g}σ in {dtype}"
        for dtype, found in movements(case).items()
        for name, how, moved in found
        if name not in case.idle
        and (case.id, name, how) not in SYMMETRIC
        and (case.id, name, how, dtype) not in BLURRED
        and not (name in FINE and dtype in ("float16", "bfloat16"))
        and max(moved.values()) < BINDS[dtype]
    ]
    assert loose == []

    moving = [
        f"{name} {how} moves {array} by {far:.3g}σ in {dtype}"
        for dtype, found in movements(case).items()
        for name, how, moved in found
        if name in case.idle
        for array, far in moved.items()
        if far > LIMIT
    ]
    assert moving == [], "declared idle"

    # For implementations that return neither weights nor gradients.
    problem = case.problem("float32")
    loose = [
        f"{name} {how}: {moved['output']:.3g}σ"
        for name, how, moved in movements(case)["float32"]
        if name not in {*case.idle, "cotangent"}
        and (case.id, name, how) not in SYMMETRIC
        and not ((name, how) == ("key", "rolled along axis 1") and blind_to_key_order(problem))
        and moved["output"] < BINDS["float32"]
    ]
    assert loose == [], "in the output alone"


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.id)
def test_every_bit_of_a_mask_binds(case):
    """One key more or less for one query shows in the output or a gradient, without the weights."""
    problem = case.problem("float32")
    expectation = expect(problem)
    bits = list(np.ndindex(problem.mask.shape))
    if max(problem.shape.query_length, problem.shape.key_length) > 100:
        bits = [bits[i] for i in case.random("bits").permutation(len(bits))[:BITS]]
    tried, loose = 0, []
    for index in bits:
        mask = problem.mask.copy()
        mask[index] = not mask[index]
        flipped = problem.replace(mask=mask)
        if np.array_equal(flipped.allowed, problem.allowed):
            continue  # the causal flag blocks it anyway
        tried += 1
        moved = movement(expectation, flipped)
        far = max(size for name, size in moved.items() if name != "weights")
        if far < 100:
            loose.append(f"bit {index}: {far:.3g}σ")
    assert tried >= len(bits) / 4
    assert loose == []


def test_named_exceptions_are_all_needed():
    """A symmetry or a blur that is none any more is to be taken off the list."""
    by_id = {case.id: case for case in (*CASES, *TILED)}
    found = {}
    for case_id, name, how, dtype in [*((*key, "float32") for key in SYMMETRIC), *BLURRED]:
        for one, other, moved in movements(by_id[case_id])[dtype]:
            if (one, other) == (name, how):
                found[case_id, name, how, dtype] = max(moved.values()) < BINDS[dtype]
    assert len(found) == len(SYMMETRIC) + len(BLURRED)
    assert all(found.values()), found


# These tests can fail.


def loose_inputs(problem: Problem) -> set[tuple[str, str]]:
    expectation = expect(problem)
    with np.errstate(over="ignore"):
        return {
            (name, how)
            for name, how, wrong in spoilt(problem)
            if max(movement(expectation, wrong).values()) < BINDS[problem.dtype]
        }


def test_a_mask_that_blocks_nothing_does_not_bind():
    problem = make(dtype="float32", mask=np.ones((2, 1, 1, 5), dtype=bool))
    assert ("mask", "left out") in loose_inputs(problem)


def test_a_mask_that_is_the_same_for_all_entries_does_not_bind_along_the_batch():
    mask = np.broadcast_to(np.arange(5) < 3, (2, 1, 1, 5))
    loose = loose_inputs(make(dtype="float32", mask=mask))
    assert ("mask", "rolled along axis 0") in loose
    assert ("mask", "left out") not in loose


def test_a_constant_bias_does_not_bind():
    problem = make(dtype="float32", attn_bias=np.ones((2, 4, 3, 5)))
    assert ("attn_bias", "negated") in loose_inputs(problem)


def test_a_cotangent_of_ones_does_not_bind_along_any_axis():
    problem = make(dtype="float32")
    loose = loose_inputs(problem.replace(cotangent=np.ones_like(problem.cotangent)))
    assert {("cotangent", f"rolled along axis {axis}") for axis in range(3)} <= loose


def test_equal_heads_do_not_bind():
    problem = make(dtype="float32")
    weights = {
        name: np.repeat(weight[:, :1], 4, axis=1)
        for name, weight in problem.weights.named().items()
        if name in ("query", "key", "value")
    }
    biases = {
        name: np.zeros_like(weight)
        for name, weight in problem.weights.named().items()
        if name in ("query_bias", "key_bias", "value_bias")
    }
    loose = loose_inputs(problem.with_weights(**weights, **biases))
    assert ("weights.query", "rolled along axis 1") in loose
    assert ("weights.output", "rolled along axis 0") not in loose


def test_a_causal_flag_for_one_query_and_one_key_does_not_bind():
    problem = make(dtype="float32", query_length=1, key_length=1, causal="top-left")
    assert ("causal", "left out") in loose_inputs(problem)
