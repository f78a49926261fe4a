"""Lengths: padding on the right as one number for each sequence, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import CausalFlag, MaskArgument
from conformance.adapters.lengths import LengthTable, right_padding
from conformance.cases.catalogue import find_cases

BIAS = MaskArgument("bias", "batch heads query key", number="added")
FLAG = CausalFlag("causal", alignment="top-left")


def table(**declared):
    return LengthTable((BIAS,), FLAG, lengths="lengths", **declared)


def spelled(case, **declared):
    (found,) = find_cases(case)
    problem = found.problem("float32")
    return problem, list(table(**declared).spellings(problem))


def test_padding_on_the_right_is_counted():
    problem, spellings = spelled("mask/key-padding/cross", first=True)
    assert [spelling.label for spelling in spellings] == [
        "lengths=int[batch]",
        "bias=float[batch heads query key]",
    ]
    counts = spellings[0].arguments["lengths"]
    assert counts.dtype == np.int32
    assert np.array_equal(counts, problem.mask.sum(axis=-1).reshape(-1))


def test_a_count_may_be_one_less_and_stand_behind():
    problem, spellings = spelled("mask/key-padding/cross", less=1)
    assert [spelling.label for spelling in spellings][-1] == "lengths=int[batch]"
    counts = spellings[-1].arguments["lengths"]
    assert np.array_equal(counts + 1, problem.mask.sum(axis=-1).reshape(-1))


def test_a_bias_or_a_flag_stays_beside_lengths():
    _, spellings = spelled("causal/with-left-aligned-padding/self", first=True)
    assert spellings[0].label == "lengths=int[batch], causal"
    _, spellings = spelled("bias/high-on-padding/cross", first=True)
    assert spellings[0].label == "lengths=int[batch], bias=float[batch heads query key]"


@pytest.mark.parametrize("case", ["mask/left-padding/self", "mask/per-batch/self"])
def test_other_masks_have_no_lengths(case):
    _, spellings = spelled(case, first=True)
    assert all("lengths" not in spelling.arguments for spelling in spellings)


def test_no_mask_has_no_lengths():
    _, spellings = spelled("plain/no-mask/self", first=True)
    assert [spelling.label for spelling in spellings] == ["no mask"]


@pytest.mark.parametrize(
    ("visible", "counts"),
    [
        ([[1, 1, 0], [1, 1, 1]], [2, 3]),
        ([[0, 1, 1], [1, 1, 1]], None),
        ([[1, 0, 1], [1, 1, 1]], None),
        ([[0, 0, 0], [1, 1, 1]], None),  # a length of 0 would be a fully masked row
    ],
)
def test_right_padding(visible, counts):
    found = right_padding(np.array(visible, bool)[:, None, None])
    assert (None if found is None else found.tolist()) == counts
    assert right_padding(np.array([[[[1, 1, 0], [1, 1, 1]]]], bool)) is None
