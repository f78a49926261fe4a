"""The catalogue as a document: ids that last, numbers that are exact, shapes that tell axes apart.

What the numbers prove is in `test_cases_bind.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from pathlib import Path

import covering
import numpy as np
import pytest
from _pytest.mark.expression import Expression
from looped import for_each

from conformance.cases import patterns
from conformance.cases.case import FAMILIES, Case
from conformance.cases.catalogue import (
    TABLES,
    catalogue,
    catalogue_hash,
    every_case,
    find_cases,
)
from conformance.definition.dtypes import DTYPES, FLOAT16
from conformance.definition.expectation import solve
from conformance.definition.geometry import Grid
from conformance.definition.problem import Problem
from conformance.errors import UnknownName
from conformance.requirements import REQUIREMENTS, probed

CASES = catalogue()
COMMITTED = Path(__file__).with_name("case_ids.txt")
REGENERATE = "python tests/test_cases.py > tests/case_ids.txt"
CHAPTERS = {
    "plain",
    "mask",
    "causal",
    "bias",
    "scale",
    "logits",
    "values",
    "transformer",
    "feature",
    "edge",
}

each = for_each(case=CASES)
each_dtype = for_each(dtype=DTYPES)


def numbers(problem: Problem):
    """Every array of the problem that holds numbers, by name."""
    for name in ("query", "key", "value", "cotangent", "attn_bias"):
        if getattr(problem, name) is not None:
            yield name, getattr(problem, name)
    for name, array in problem.weights.named().items():
        yield f"weights.{name}", array


def movable(case: Case) -> set[str]:
    """Names of everything that a case gives."""
    problem = case.problem("float64")
    given = {*problem.shape.distinct_inputs(), "cotangent", "scale"}
    given |= {f"weights.{name}" for name in problem.weights.named()}
    optional = {"mask": case.mask, "attn_bias": case.bias, "causal": case.causal}
    return given | {name for name, value in optional.items() if value is not None}


# Ids.


def test_ids_are_the_committed_ones():
    """Ids are an interface: records, baselines and people's notes refer to them."""
    now, then = {case.id for case in CASES}, set(COMMITTED.read_text().split())
    gone, new = sorted(then - now), sorted(now - then)
    assert now == then, (
        f"the catalogue's ids have changed: gone {gone}, new {new}. "
        f"If that is on purpose: {REGENERATE}"
    )


def test_the_committed_ids_are_sorted_and_unique():
    lines = COMMITTED.read_text().splitlines()
    assert lines == sorted(set(lines))


def test_ids_are_unique():
    counts = Counter(case.id for case in CASES)
    assert [name for name, count in counts.items() if count > 1] == []


@each
def test_id_can_be_typed_after_pytest_k(case):
    assert re.fullmatch(r"[\w:+\-.\[\]\\/]+", case.id)
    assert Expression.compile(case.id).evaluate(lambda name, **_: name == case.id)


@each
def test_id_is_chapter_what_and_family(case):
    chapter, _, family = case.id.split("/")
    assert chapter in CHAPTERS
    assert (chapter, family) == (case.chapter, case.family)


def test_the_catalogue_is_large_and_its_families_are_few():
    assert len(CASES) >= 80
    assert len({case.family for case in CASES}) <= 25
    assert {case.family for case in every_case()} == set(FAMILIES)


def test_cases_of_one_family_stand_together():
    """A compiling framework keeps one program at a time."""
    families = {case.family for case in CASES}
    assert len(list(itertools.groupby(CASES, key=lambda case: case.family))) == len(families)


@each
def test_case_says_in_prose_why_it_is_there(case):
    assert len(case.why.split()) >= 5
    assert case.why[0].isupper()
    assert case.why.endswith(".")


def test_covering_cases_have_every_three_choices_that_go_together():
    """The table is as it was made, and may be made anew only with other ids."""
    rows, core = covering.covering()
    entries = [
        covering.entry(number, row, core=row in core) for number, row in enumerate(rows, start=1)
    ]
    table = TABLES[1].read_text("utf-8")
    assert table.split("\n\n", 1)[1] == "\n\n".join(entries) + "\n"
    assert covering.combinations(rows, 3) == covering.every_combination(3)
    assert covering.combinations(core, 2) == covering.every_combination(2)


# Numbers.


def is_bfloat16(array):
    """float32 with the lower half of its bits zero."""
    bits = array.astype(np.float32).view(np.uint32)
    return (array.astype(np.float32) == array) & (bits & 0xFFFF == 0)


REPRESENTABLE = {
    "float64": np.isfinite,
    "float32": lambda array: array.astype(np.float32) == array,
    "bfloat16": is_bfloat16,
    "float16": lambda array: array.astype(np.float16) == array,
}


@each_dtype
@each
def test_every_number_is_exact_in_the_dtype(case, dtype):
    for name, array in numbers(case.problem(dtype)):
        assert array.dtype == np.float64, name
        assert np.isfinite(array).all(), name
        assert REPRESENTABLE[dtype](array).all(), name
        if dtype != "float16":  # whose subnormals no hardware flushes
            assert (np.abs(array[array != 0]) >= 2.0**-126).all(), name


@each
def test_the_question_is_the_same_in_every_dtype(case):
    exact = case.problem("float64")
    for dtype in DTYPES.values():
        problem = case.problem(dtype.name)
        assert (problem.causal, problem.scale) == (exact.causal, exact.scale)
        assert (problem.mask is None) == (exact.mask is None)
        if problem.mask is not None:
            np.testing.assert_array_equal(problem.mask, exact.mask)
        for (name, array), (_, full) in zip(numbers(problem), numbers(exact), strict=True):
            error = np.abs(array - full)
            assert (error <= dtype.roundoff * np.abs(full) + dtype.underflow).all(), name


@each
def test_numbers_cannot_be_changed_by_an_adapter(case):
    for _, array in numbers(case.problem("float32")):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@each
def test_arrays_are_shared_as_the_family_says(case):
    problem = case.problem("float32")
    shared = {"self": 1, "memory": 2, "separate": 3}[problem.shape.sharing]
    assert len({id(problem.query), id(problem.key), id(problem.value)}) == shared


@each
def test_every_row_of_every_mask_keeps_a_key(case):
    """But for rows beyond a length or before the first key, which no loss depends on."""
    problem = case.problem("float64")
    rows = problem.allowed_in_full().any(axis=-1)
    more_queries = problem.shape.query_length > problem.shape.key_length
    before_keys = problem.causal == "bottom-right" and more_queries
    if ("lengths" in problem.features or before_keys) and not rows.all():
        assert rows.any()
        assert not problem.cotangent[~rows.all(axis=1)].any()
    else:
        assert rows.all() == case.defined


@each
def test_every_mask_blocks_something(case):
    problem = case.problem("float64")
    if problem.mask is not None:
        assert not problem.mask.all()
    if problem.causal is not None:
        # Aligned at the end, the flag hides nothing from a single query, and that is the point.
        hides = problem.causal == "top-left" or problem.shape.query_length > 1
        assert not problem.allowed_in_full().all() or not hides


@each
def test_queries_and_keys_give_logits_of_the_intended_width(case):
    """Not so narrow that attention is a mean, nor, but on purpose, so wide that it is a choice."""
    weights = solve(case.problem("float64")).weights
    allowed = case.problem("float64").allowed_in_full()
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(weights > 0, weights * np.log(weights), 0.0).sum(axis=-1)
        most = np.log(allowed.sum(axis=-1))
        relative = (entropy / most)[most > 0]
    if case.regime is None and relative.size:
        assert 0.2 < relative.mean() < 0.95


def test_the_catalogue_is_drawn_alike_every_time():
    before = catalogue_hash()
    catalogue_hash.cache_clear()
    assert catalogue_hash() == before
    one, other = CASES[0], CASES[1]
    assert one.random().random() == one.random().random()
    assert one.random().random() != other.random().random()
    assert one.random().random() != one.random("other purpose").random()


def test_huge_logits_overflow_an_exp_in_float32_that_does_not_subtract_the_maximum():
    for case in find_cases("logits/huge"):
        problem = case.problem("float32")
        q, k = (
            np.einsum("ble,ehd->bhld", getattr(problem, name), getattr(problem.weights, name))
            + getattr(problem.weights, f"{name}_bias")[:, None]
            for name in ("query", "key")
        )
        logits = problem.logit_scale * np.einsum("bhqd,bhkd->bhqk", q, k)
        assert logits.max() > np.log(np.finfo(np.float32).max)
        assert np.abs(logits[0]).max() < 20


# Shapes.


EQUAL_SIZES = {
    "longer": "one batch entry, one head: nothing but the number of positions is of interest",
    "full-tiles": "one batch entry, one head: nothing but the lengths is of interest",
    "square": "whatever is decided by a size is decided wrongly here",
    "size-one": "as many heads as tokens: a bias for heads must not be taken for one for tokens",
}


# The others are posed at the sizes of a geometry only.
SMALL_FAMILIES = {case.family for case in catalogue()}


@pytest.mark.parametrize("draw", range(0, 40, 4))
@pytest.mark.parametrize(
    "grid",
    [None, Grid(head_size=96, value_head_size=32, tiles=(32, 64))],
    ids=["small", "of tiles"],
)
def test_only_products_of_heads_are_beyond_float16(draw, grid):
    """What is stored, also of projected keys, is in its range: else a right kernel gives NaN."""
    (case,) = find_cases("logits/beyond-float16/separate")
    case = dataclasses.replace(case, name=f"{case.name}-{draw}") if draw else case
    problem = (case.on(grid) if grid else case).problem("float16")
    weights = problem.weights.named()
    heads = {
        name: np.einsum("ble,ehd->bhld", getattr(problem, name), weights[name])
        for name in ("query", "key", "value")
    }
    stored = [*heads.values(), problem.query, problem.key, problem.value]
    assert max(np.abs(array).max() for array in stored) < 0.95 * FLOAT16.largest
    products = heads["query"] @ heads["key"].swapaxes(-1, -2)
    assert np.abs(products).max() > FLOAT16.largest


@for_each(family=sorted(SMALL_FAMILIES - EQUAL_SIZES.keys()))
def test_sizes_of_a_family_are_pairwise_different(family):
    """A swapped axis then changes a shape or an answer instead of passing."""
    shape = FAMILIES[family]
    sizes = {
        "batch": shape.batch,
        "query": shape.query_length,
        "key": shape.key_length,
        "heads": shape.heads,
        "head": shape.head_size,
    }
    if shape.kv_heads != shape.heads:
        sizes["kv_heads"] = shape.kv_heads
    if shape.value_head_size != shape.head_size:
        sizes["value_head"] = shape.value_head_size
    if shape.sharing == "self":
        assert sizes.pop("key") == shape.query_length
    assert len(set(sizes.values())) == len(sizes), sizes


def test_families_cover_what_shapes_may_differ_in():
    shapes = FAMILIES.values()
    assert {shape.sharing for shape in shapes} == {"self", "memory", "separate"}
    assert {shape.score for shape in shapes} == {"scaled-dot", "additive"}
    assert {shape.bias for shape in shapes} == {True, False}
    assert any(1 < shape.kv_heads < shape.heads for shape in shapes), "grouped"
    assert any(1 == shape.kv_heads < shape.heads for shape in shapes), "one key/value head"
    assert any(shape.value_head_size != shape.head_size for shape in shapes)
    assert any(shape.query_width != shape.heads * shape.head_size for shape in shapes)
    assert any(shape.query_length > shape.key_length > 1 for shape in shapes)
    assert any(shape.query_length < shape.key_length for shape in shapes)
    assert {1} <= {shape.query_length for shape in shapes} & {s.key_length for s in shapes}
    assert any(shape.key_length > 128 for shape in shapes), "more than one tile of a kernel"


@for_each(
    pattern=[
        patterns.key_padding,
        patterns.left_padding,
        patterns.shared,
        patterns.per_batch,
        patterns.per_head,
        patterns.block_diagonal,
        patterns.sliding_window,
        patterns.prefix_lm,
        patterns.one_allowed_key,
        patterns.heads_only,
        patterns.keys_per_head,
        patterns.padded_cache,
        patterns.shared_with_first_key,
    ]
)
@for_each(family=[name for name in FAMILIES if name != "one-key"])
def test_every_mask_pattern_suits_every_family(pattern, family):
    shape = FAMILIES[family]
    mask = pattern(shape, np.random.default_rng(0))
    assert mask.dtype == np.bool_
    assert all(got in (1, size) for got, size in zip(mask.shape, shape.logits, strict=True))
    assert mask.any(axis=-1).all()


@for_each(pattern=[patterns.shared, patterns.per_batch, patterns.per_head])
@for_each(family=[name for name in FAMILIES if name != "one-key"])
def test_an_arbitrary_mask_blocks_about_half_and_something_in_every_row(pattern, family):
    mask = pattern(FAMILIES[family], np.random.default_rng(0))
    assert not mask.all(axis=-1).any()
    assert 0.3 < mask.mean() < 0.85


def test_a_custom_scale_is_far_from_the_default():
    cases = find_cases("plain/custom-scale")
    assert len(cases) > 1
    for case in cases:
        assert not 0.6 < case.scale / case.shape.default_scale < 1.6


@pytest.mark.parametrize("pattern", [patterns.per_batch, patterns.per_head, patterns.key_padding])
def test_masks_differ_along_every_axis_that_they_have(pattern):
    mask = pattern(FAMILIES["cross"], np.random.default_rng(0))
    for axis in range(4):
        if mask.shape[axis] > 1:
            assert (np.roll(mask, 1, axis) != mask).any()


# What cases serve.


@each
def test_case_serves_requirements_that_exist(case):
    assert case.serves <= {requirement.id for requirement in REQUIREMENTS}


@for_each(requirement=REQUIREMENTS)
def test_every_requirement_is_served(requirement):
    # What is about the declaration, dropout or memory layouts is decided by experiments.
    by_case = any(requirement.serves(case) for case in CASES)
    by_experiment = requirement.check.__module__ == probed.__name__ and not requirement.every_case
    assert by_case != by_experiment


def test_no_case_names_what_every_case_serves():
    everywhere = {requirement.id for requirement in REQUIREMENTS if requirement.every_case}
    assert [case.id for case in CASES if case.serves & everywhere] == []


@each
def test_idle_inputs_exist_and_have_a_reason(case):
    assert set(case.idle) <= movable(case)
    assert all(len(reason.split()) >= 5 for reason in case.idle.values())


def test_undefined_cases_are_for_observation_only():
    observed = {item.id for item in REQUIREMENTS if item.level == "observed"}
    for case in CASES:
        if not case.defined:
            assert case.serves
            assert case.serves <= observed


# Finding cases.


def test_a_full_id_finds_that_case_alone():
    """Also where it is the beginning of another id."""
    for case in CASES:
        assert find_cases(case.id) == (case,)


def test_a_part_or_a_pattern_finds_every_case_that_fits():
    assert {case.name for case in find_cases("key-padding")} == {"mask/key-padding"}
    assert {case.family for case in find_cases("*/gqa")} == {"gqa"}


def test_an_id_that_does_not_exist_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="mask/key-padding/cross"):
        find_cases("mask/keypadding/cross")


if __name__ == "__main__":
    print(*sorted(case.id for case in CASES), sep="\n")
