"""Cases in words and pictures: whatever a record says of its mask is what the problem has."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from looped import for_each

from conformance.cases.case import MOST_ELEMENTS, MOST_PLANES, describe, planes
from conformance.cases.catalogue import catalogue, find_cases


def unpacked(runs: list[int], queries: int, keys: int) -> np.ndarray:
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return flat.reshape(queries, keys)


@for_each(case=catalogue())
def test_the_planes_are_the_mask(case):
    problem = case.problem("float64")
    drawn = planes(problem)
    allowed = problem.allowed_in_full()
    patterns = {own.tobytes() for entry in allowed for own in np.ascontiguousarray(entry)}
    if problem.allowed is None or not 0 < allowed[0, 0].size <= MOST_ELEMENTS:
        assert drawn == []
        return
    found = {unpacked(own.runs, own.queries, own.keys).tobytes() for own in drawn}
    assert found == patterns
    assert len(drawn) == len(patterns)
    info = describe(case)
    assert len(info.planes) == min(len(drawn), MOST_PLANES)
    assert len(info.planes) + info.more == len(drawn)


def test_a_mask_that_is_too_large_to_draw_is_not_no_mask():
    (case,) = find_cases("mask/shared/self")
    (whole,) = planes(case.problem("float64"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conformance.cases.case.MOST_ELEMENTS", 8)
        assert planes(case.problem("float64")) == [msgspec.structs.replace(whole, runs=[])]


def test_where_a_plane_holds_is_said():
    (shared,) = find_cases("mask/shared/self")
    assert [own.where for own in describe(shared).planes] == [""]
    (batch,) = find_cases("mask/per-batch/cross")
    assert [own.where for own in describe(batch).planes] == ["entry 0", "entry 1", "entry 2"]
    (head,) = find_cases("mask/per-head/cross")
    assert describe(head).planes[0].where == "entry 0, head 0"


def test_what_is_not_as_usual_is_said():
    (case,) = find_cases("mask/per-head/gqa")
    facts = describe(case).facts
    assert "6 heads on 2 key/value heads of size 8" in facts
    assert "mask of shape 4×6×5×7" in facts
    assert "5 queries, 7 keys" in facts
