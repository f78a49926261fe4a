"""A window or a cap for one argument, handed to another: executed, and equal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from conformance.adapter.loading import load
from conformance.errors import Untranslatable
from conformance.porting.masks import translate

KERNELS = """
import numpy as np
from conformance import MaskArgument, SoftCap, Window, attention_function

def attend(query, key, value, seen=True, cap=0):
    logits = np.einsum("bhqd,bhkd->bhqk", query, key) / np.sqrt(query.shape[-1])
    logits = cap * np.tanh(logits / cap) if cap else logits
    powers = np.exp(np.where(seen, logits, -np.inf))
    return np.einsum("bhqk,bhkd->bhqd", powers / powers.sum(-1, keepdims=True), value)

def ahead(query, key, end=False):
    offset = key.shape[2] - query.shape[2] if end else 0
    return np.arange(key.shape[2]) - np.arange(query.shape[2])[:, None] - offset

END = "bottom-right"

@attention_function("numpy", features=(Window("window", alignment=END), SoftCap("softcap")))
def pair(query, key, value, window=(-1, -1), softcap=0.0):
    far = ahead(query, key, True)
    left, right = window
    seen = (far >= (-left if left >= 0 else -99)) & (far <= (right if right >= 0 else 99))
    return attend(query, key, value, seen, softcap)

@attention_function(
    "numpy", features=(Window("w", "own and before", none=None, alignment=END), SoftCap("c", None))
)
def counted(query, key, value, w=None, c=None):
    far = ahead(query, key, True)
    return attend(query, key, value, True if w is None else (far > -w) & (far <= 0), c or 0)

@attention_function("numpy", features=(Window("past", "before", none=-1, alignment=END),))
def before(query, key, value, past=-1):
    far = ahead(query, key, True)
    return attend(query, key, value, True if past < 0 else (far >= -past) & (far <= 0))

@attention_function("numpy", features=(Window("reach", "each side", none=0, alignment=END),))
def sides(query, key, value, reach=0):
    return attend(query, key, value, np.abs(ahead(query, key, True)) <= (reach or 99))

@attention_function("numpy", features=(Window("window", none=None),))
def start(query, key, value, window=(None, None)):
    far, (left, right) = ahead(query, key), window
    seen = (far >= (-99 if left is None else -left)) & (far <= (99 if right is None else right))
    return attend(query, key, value, seen)

@attention_function("numpy", MaskArgument("mask", "query key", true="blocks", number="added"))
def masked(query, key, value, mask=None):
    return attend(query, key, value, True if mask is None else ~mask)
"""
WINDOWS = {"pair": "window", "counted": "w", "before": "past", "sides": "reach"}
GIVEN = {
    "pair": [(2, 0), (1, 1), (0, 0), (-1, 0), (-1, -1), (3, -1)],
    "counted": [1, 3, None],
    "before": [0, 2, -1],
    "sides": [1, 3, 0],
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS, encoding="utf-8")
    return path


def called(kernels, name, queries=4, keys=6, **arguments):
    random = np.random.default_rng(0)
    inputs = [random.standard_normal((1, 2, length, 3)) for length in (queries, keys, keys)]
    return load(f"{kernels}:{name}")(*inputs, **arguments)


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(WINDOWS, 2)])
def test_a_window_shows_the_same_keys_elsewhere_or_is_refused(kernels, one, other):
    said = 0
    for value in GIVEN[one]:
        spec = f"{kernels}:{other}:{WINDOWS[other]}"
        try:
            found = translate(value, source=f"{kernels}:{one}:{WINDOWS[one]}", target=spec)
        except Untranslatable:
            continue
        said += 1
        want = called(kernels, one, **{WINDOWS[one]: value})
        assert np.array_equal(want, called(kernels, other, **{WINDOWS[other]: found}))
    assert said


def test_what_counts_the_own_key_is_one_more(kernels):
    source, target = f"{kernels}:before:past", f"{kernels}:counted:w"
    assert translate(2, source=source, target=target) == 3
    assert translate(3, source=target, target=source) == 2
    assert translate(3, source=target, target=f"{kernels}:pair:window") == (2, 0)
    assert translate((2, -1), source=f"{kernels}:pair:window", target=target, causal=True) == 3
    with pytest.raises(Untranslatable, match="cannot say a window of 2 before and no limit after"):
        translate((2, -1), source=f"{kernels}:pair:window", target=target)
    for value in (0, (3, 0), "3", 2.5, True):
        with pytest.raises(Untranslatable, match="has no meaning that is declared"):
            translate(value, source=target, target=source)
    for value in (3, (2, "1"), (2.5, 0)):
        with pytest.raises(Untranslatable, match="has no meaning that is declared"):
            translate(value, source=f"{kernels}:pair:window", target=target)


def test_windows_from_two_ends_are_the_same_for_equal_lengths_only(kernels):
    source, target = f"{kernels}:pair:window", f"{kernels}:start:window"
    with pytest.raises(Untranslatable, match=r"is aligned bottom-right and .* for equal lengths"):
        translate((2, 0), source=source, target=target, query=4, key=6)
    assert translate((2, -1), source=source, target=target, query=6, key=6) == (2, None)
    square = {"queries": 6, "keys": 6}
    one = called(kernels, "pair", window=(2, -1), **square)
    assert np.array_equal(one, called(kernels, "start", window=(2, None), **square))


@pytest.mark.parametrize("window", GIVEN["pair"])
def test_a_window_is_a_mask_where_there_is_no_argument_for_it(kernels, window):
    spec = {"source": f"{kernels}:pair:window", "target": f"{kernels}:masked:mask"}
    mask = translate(window, **spec, query=4, key=6)
    assert mask.dtype == bool
    want = called(kernels, "pair", window=window)
    assert np.array_equal(want, called(kernels, "masked", mask=mask))
    with pytest.raises(Untranslatable, match="give query and key"):
        translate(window, **spec)


def test_a_cap_keeps_its_number_but_for_none(kernels):
    source, target = f"{kernels}:pair:softcap", f"{kernels}:counted:c"
    for cap, wanted in ((1.5, 1.5), (0.0, None)):
        assert translate(cap, source=source, target=target) == wanted
        want = called(kernels, "pair", softcap=cap)
        assert np.array_equal(want, called(kernels, "counted", c=wanted))
    with pytest.raises(Untranslatable, match="a mask cannot be one"):
        translate(1.5, source=source, target=f"{kernels}:masked:mask")
