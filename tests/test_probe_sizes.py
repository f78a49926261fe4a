"""The experiment on sizes: what a kernel takes, refuses, and answers wrongly."""

from __future__ import annotations

import numpy as np
import pytest
from mutants.fakes import values

from conformance import Geometry, attention_function
from conformance.requirements.laboratory import NoAnswer


def kernel(refuses=lambda query, key, value: False, wrong=lambda query, key: False, **declared):
    """An attention on heads `[batch heads length head]` that raises for some sizes."""

    @attention_function("numpy", **({"grouped": True, "dtypes": ("float32",)} | declared))
    def attend(query, key, value):
        if refuses(query, key, value):
            raise ValueError("not at these sizes")
        group = query.shape[1] // key.shape[1]
        key, value = np.repeat(key, group, axis=1), np.repeat(value, group, axis=1)
        if wrong(query, key):
            key = key[:, :, : key.shape[2] // 2]
            value = value[:, :, : key.shape[2]]
        logits = query @ key.swapaxes(2, 3) * np.float32(query.shape[3] ** -0.5)
        powers = np.exp(logits - logits.max(axis=3, keepdims=True))
        return (powers / powers.sum(axis=3, keepdims=True)) @ value

    attend.name = "kernel"
    return attend


def test_what_takes_everything_needs_no_geometry():
    found = values(kernel(), "sizes")
    assert found["sizes of heads"].startswith("all that were tried")
    assert found["lengths of queries and keys are multiples of"] == "1 and 1"
    assert found["greatest length"] == "none up to 1024"
    assert not {"to declare", "wrong answers instead of refusals"} & {*found}


def test_a_kernel_for_one_head_size_is_told_what_to_declare():
    """It takes none of the sizes at which the other experiments ask."""

    def refuses(query, key, value):
        lengths = query.shape[2] % 16 or key.shape[2] % 32 or key.shape[2] > 512
        return query.shape[3] != 128 or lengths or query.shape[1] % key.shape[1] or (
            query.shape[1] > 8 or value.shape[3] != 128
        )  # fmt: skip

    found = values(kernel(refuses), "sizes")
    assert found["sizes of heads"] == "128"
    assert found["other sizes of value heads"] == "none that was tried"
    assert found["lengths of queries and keys are multiples of"] == "16 and 32"
    line = found["to declare"]
    declared = eval(line, {"Geometry": Geometry})
    assert declared.head_sizes == (128,)
    assert declared.multiples == (16, 32)
    assert declared.greatest_length == 512
    assert declared.heads == (1, 3, 4, 6, 8)
    assert values(kernel(refuses, geometry=declared), "sizes")["to declare"] == line


def test_a_wrong_answer_is_not_taken_and_is_told():
    """A kernel that drops what it has no room for, and one that reads heads of 72 as of 64."""
    found = values(kernel(wrong=lambda query, key: key.shape[2] > 300), "sizes")
    assert found["greatest length"] == "128"
    assert "length" in found["wrong answers instead of refusals"]
    found = values(kernel(wrong=lambda query, key: query.shape[3] % 16), "sizes")
    assert found["wrong answers instead of refusals"].startswith("head size 72")
    assert "head_sizes=(64, 128, 16, 32, 80, 96, 256)" in found["to declare"]


def test_what_takes_no_size_gives_no_answer_as_in_other_experiments():
    with pytest.raises(NoAnswer, match="not at these sizes"):
        values(kernel(lambda query, key, value: True), "sizes")


def test_what_answers_no_size_rightly_is_told_so():
    found = values(kernel(wrong=lambda query, key: True), "sizes")
    assert found["sizes of heads"] == "none that was tried"
    assert found["wrong answers instead of refusals"].startswith("head size")
