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


def test_a_mask_of_queries_and_keys_is_read_beside_lengths_and_windows():
    pytest.importorskip("onnx")
    from conformance.adapters import onnx_attention as onnx

    query, key = np.zeros((2, 3, 4, 8)), np.zeros((2, 3, 5, 8))
    empty, band = np.ones((4, 5), bool), np.tri(4, 5, dtype=bool)
    empty[1] = False
    for mask in (empty, empty[None, None]):
        inputs, attributes, rest = onnx._lengths(query, key, key, mask)
        assert (inputs["nonpad_kv_seqlen"] == 5).all()
        assert not attributes
        assert rest is mask
    for mask in (band, band[None, None]):
        _, attributes, rest = onnx._windows(query, key, key, mask)
        assert rest is None
        assert attributes == {"left_window_size": 3, "right_window_size": 0}


def test_a_mask_of_another_size_is_for_the_library_to_refuse():
    pytest.importorskip("onnx")
    from conformance.adapters import onnx_attention as onnx

    query, key = np.zeros((2, 3, 4, 8)), np.zeros((2, 3, 5, 8))
    for shape in ((3, 5), (4, 3), (2, 3, 3, 5), (3, 1, 1, 5)):
        mask = np.ones(shape, bool)
        for posed in (onnx._past, onnx._lengths, onnx._windows):
            assert posed(query, key, key, mask)[2] is mask
