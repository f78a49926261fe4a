"""What a mask means is found out by what it does: each double gives its own answer, and no other's.

The doubles compute in NumPy and differ in one line each.
"""

from __future__ import annotations

import numpy as np
import pytest
from mutants.fakes import attends, blocked, entries, fake, laboratory, usual, values
from mutants.miniatures import MASK, Correct, Inverted, Raises

from conformance import Answer, MaskArgument, Unsupported
from conformance.cases.catalogue import find_cases
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.comparison import against
from conformance.requirements.examination import Examination, Workbench
from conformance.requirements.laboratory import (
    OUTPUT_BIAS,
    NoAnswer,
    Refused,
    Sizes,
    numbers,
    pattern,
    readout,
    readout_shape,
)
from conformance.requirements.meaning import polarity
from conformance.words import say

# The readout


@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize("sharing", ["separate", "memory", "self"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_the_output_is_the_applied_weights_exactly(dtype, sharing, bias):
    sizes = Sizes(query=5) if sharing == "self" else Sizes()
    problem = readout(readout_shape(sizes, sharing, "scaled-dot", bias=bias), dtype)
    found = laboratory(Correct(), dtype=dtype).ask(problem)
    applied = pattern(problem, found.answer.output)
    assert np.array_equal(applied, found.answer.weights)
    assert np.allclose(applied.sum(axis=-1), 1, atol=1e-2)
    assert len(np.unique(applied.round(4))) > applied.size / 2, "every weight is one of its own"
    beside = np.delete(
        found.answer.output.reshape(*found.answer.output.shape[:2], sizes.heads, -1),
        np.arange(sizes.key),
        axis=-1,
    )
    assert (beside == (OUTPUT_BIAS if bias else 0)).all()


@pytest.mark.parametrize("sharing", ["separate", "memory", "self"])
def test_the_readout_holds_for_the_additive_score(sharing):
    sizes = Sizes(query=5) if sharing == "self" else Sizes()
    problem = readout(readout_shape(sizes, sharing, "additive"), "float64")
    found = forward(problem, Exact())
    assert np.array_equal(pattern(problem, found.output), found.weights)
    assert found.weights.std() > 0.05


@pytest.mark.parametrize("empty", ["batch", "query", "key"])
def test_a_readout_may_have_an_empty_axis(empty):
    problem = readout(readout_shape(Sizes(**{empty: 0}), "separate", "scaled-dot"), "float32")
    output = np.zeros(problem.cotangent.shape)
    assert pattern(problem, output).shape == problem.shape.logits


def test_inputs_are_as_different_as_the_implementation_allows():
    class OneMemory(Correct):
        def check_shape(self, shape):
            if shape.sharing == "separate":
                raise Unsupported("key and value are one")

    class OneInput(Correct):
        def check_shape(self, shape):
            if shape.sharing != "self" or shape.bias:
                raise Unsupported("self-attention without biases only")

    assert laboratory(Correct()).sharing == "separate"
    assert laboratory(OneMemory()).sharing == "memory"
    lab = laboratory(OneInput())
    assert (lab.sharing, lab.biased) == ("self", False)
    assert lab.sizes(key=3) == Sizes(query=3, key=3)
    assert values(OneInput(), "masks")["mask, bool"] == "attends"


# What a mask means

FORMS = ("bool", "uint8 0/1", "int32 0/1", "int64 0/1", "float32 0/1", "float32 0/¼/1")
FORMS += ("float32 0/1/2", "float32 0/−inf", "float32 0/−1e9")


def whole(logits, mask):
    """Integers as booleans, floats added."""
    return blocked(logits, mask != 0) if mask.dtype.kind != "f" else logits + mask


def whole_only(logits, mask):
    """Integers as booleans, floats ignored."""
    return blocked(logits, mask != 0) if mask.dtype.kind != "f" else logits


def transposed(logits, mask):
    """Numbers in the right order, axes not."""
    turned = mask.reshape(*mask.shape[:2], mask.shape[3], mask.shape[2]).swapaxes(2, 3)
    return blocked(logits, turned != 0)


def no_numbers(logits, mask):
    if mask.dtype != np.bool_:
        raise TypeError("a boolean mask, please")
    return blocked(logits, mask)


EVERY = len(FORMS)
ASKED = EVERY + 3
"""With the least number of float32, and in two other floating dtypes."""
WEVERYED = "multiplied into the weights"
LARGEST = "attends, equally, where the row's largest number is"
SCALE = (Sizes().key + 3) ** -0.5
"""Of the heads in which keys are counted."""
MEANINGS = {
    "attends": (fake(attends), ["attends"] * EVERY),
    "attends, at a scale of its own": (fake(attends, scale=0.7), ["attends"] * EVERY),
    "attends, by a large number": (
        fake(lambda logits, mask: np.where(mask != 0, logits, -1e9)),
        ["attends"] * EVERY,
    ),
    "blocks": (fake(lambda logits, mask: blocked(logits, mask == 0)), ["blocks"] * EVERY),
    "added": (fake(lambda logits, mask: logits + mask), ["added"] * EVERY),
    "added before the scale": (
        fake(lambda logits, mask: logits + mask * SCALE),
        ["added before the scale"] * EVERY,
    ),
    "added, times a large number": (
        fake(lambda logits, mask: (logits - (1 - mask) * 1e9).astype(np.float32)),
        [*["attends"] * 5, "attends above ½", *[LARGEST] * 3],
    ),
    "blocks everything, in tiles of 8 keys": (
        fake(None, lambda weights, mask: np.full_like(weights, 1 / 8)),
        ["blocks everything"] * EVERY,
    ),
    "usual": (fake(usual), ["attends", *["added"] * 8]),
    "multiplied into the logits": (
        fake(lambda logits, mask: logits * mask),
        [*["multiplied"] * 7, "blocks everything", "multiplied"],
    ),
    "multiplied into the weights": (
        fake(None, lambda weights, mask: weights * mask),
        [*[WEVERYED] * 7, "blocks everything", WEVERYED],
    ),
    "ignored": (fake(), ["ignored"] * EVERY),
    "above one half": (
        fake(lambda logits, mask: blocked(logits, mask > 0.5)),
        [*["attends"] * 5, "attends above ½", "attends", *["blocks everything"] * 2],
    ),
    "where 1": (
        fake(lambda logits, mask: blocked(logits, mask != 1)),
        [*["blocks"] * 5, *["blocks where 1"] * 2, "ignored", "ignored"],
    ),
    "only where 1": (
        fake(lambda logits, mask: blocked(logits, mask == 1)),
        [*["attends"] * 5, "attends above ½", "attends where 1", *["blocks everything"] * 2],
    ),
    "integers as booleans": (fake(whole), [*["attends"] * 4, *["added"] * 5]),
    "floats ignored": (fake(whole_only), [*["attends"] * 4, *["ignored"] * 5]),
    "numbers refused": (fake(no_numbers), ["attends", *["rejected"] * 8]),
    "refused": (Raises(), ["rejected"] * EVERY),
    "rolled by one key": (
        fake(lambda logits, mask: blocked(logits, np.roll(mask, 1, -1) != 0)),
        ["unexplained"] * EVERY,
    ),
    "rolled by one head": (
        fake(lambda logits, mask: blocked(logits, np.roll(mask, 1, 1) != 0)),
        ["unexplained"] * EVERY,
    ),
    "of the first entry": (
        fake(lambda logits, mask: blocked(logits, mask[:1] != 0)),
        ["unexplained"] * EVERY,
    ),
    "transposed": (fake(transposed), ["unexplained"] * EVERY),
    "softly": (
        fake(lambda logits, mask: np.where(mask != 0, logits, logits - 30)),
        ["unexplained"] * EVERY,
    ),
    "halved": (fake(lambda logits, mask: logits + mask / 2), ["unexplained"] * EVERY),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_a_mask_means_what_it_does(name):
    adapter, expected = MEANINGS[name]
    found = values(adapter, "masks")
    assert {form: found[f"mask, {form}"] for form in FORMS} == dict(
        zip(FORMS, expected, strict=True)
    )


def int32_only(logits, mask):
    if mask.dtype != np.int32:
        raise TypeError(f"a mask of int32, please, not {mask.dtype}")
    return blocked(logits, mask == 0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_argument_of_whole_numbers_is_given_them(dtype):
    meant = MaskArgument("mask", MASK.axes, number="blocks, 0 or 1 only", dtype="int32")
    adapter = fake(int32_only, masks=meant)
    (case,) = find_cases("mask/per-batch/cross")
    ex = Examination(adapter, case, dtype, "cpu", adapter.modes[0], Workbench())
    assert all(comparison.fits for comparison in against(ex.expectation, ex.answer.arrays()))
    assert polarity.check(ex).verdict == "conforms"
    found = values(adapter, "masks")
    assert found["mask, int32 0/1"] == "blocks"
    assert found["mask, float32 0/1"] == "rejected"
    hidden = [form for form, value in values(adapter, "leaks").items() if value == "hidden"]
    assert any("int32 0/1" in form for form in hidden), "it is by int32 that keys are blocked"


def test_a_mask_of_float64_stays_one():
    def picky(logits, mask):
        if mask.dtype == np.float64:
            raise TypeError("a mask of float32, please")
        return logits + mask

    added = fake(lambda logits, mask: logits + mask)
    assert values(added, "masks")["mask, float64 0/−inf"] == "added"
    found = entries(fake(picky), "masks")["mask, float64 0/−inf"]
    assert (say(found.value), found.agrees) == ("rejected", True)


@pytest.mark.parametrize(
    ("effect", "does", "value"),
    [
        ("none", lambda logits, mask: logits, "ignored"),
        ("none", usual, "attends"),
        ("refused", no_numbers, "attends"),
        ("refused", lambda logits, mask: logits / "0", "rejected"),
    ],
)
def test_an_argument_without_effect_is_asked_by_experiments_only(effect, does, value):
    argument = MaskArgument("mask", MASK.axes, true="attends", number="added", effect=effect)
    adapter = fake(does, masks=argument)
    (case,) = find_cases("mask/per-batch/cross")
    with pytest.raises(Unsupported, match="no mask arguments"):
        adapter.masks.spell(case.problem("float32"))
    found = entries(adapter, "masks")["mask, bool"]
    declared = "ignored" if effect == "none" else "rejected"
    assert (say(found.value), say(found.declared)) == (value, declared)
    assert found.agrees == (value == declared)


def test_half_a_number_added_to_minus_infinity_is_still_seen():
    halved = values(fake(lambda logits, mask: logits + mask / 2), "masks")
    assert halved["mask, float32 0/−inf"] == "unexplained", "the finite number beside it tells"


def test_what_is_not_explained_says_what_was_fed_and_seen():
    entry = entries(MEANINGS["rolled by one key"][0], "masks")["mask, bool"]
    fed, applied = entry.evidence.split("fed [")[1].split("], weights [")
    applied, plain = applied.split("], without it [")
    zeros = [number == "0" for number in applied.split()]
    rolled = np.roll([number == "0" for number in fed.split()], 1)
    assert zeros == rolled.tolist()
    assert "0" not in plain.rstrip("]").split()
    assert entry.evidence.startswith("entry 0, head 0, query 0: ")


def test_half_precision_is_asked_in_the_one_that_there_is():
    found = values(fake(usual), "masks")
    own = {subject: value for subject, value in found.items() if "(inputs float16)" in subject}
    assert own == {
        "mask, bool (inputs float16)": "attends",
        "mask, float16 0/1 (inputs float16)": "added",
        "mask, float16 0/−inf (inputs float16)": "added",
        "mask, float16 0/−1e4 (inputs float16)": "added",
        "mask, float32 0/1 (inputs float16)": "added",
        "mask, float32 0/−inf (inputs float16)": "added",
        "mask, float16 0/finfo.min (inputs float16)": "added",
    }
    assert len(found) == ASKED + len(own), "NumPy has no bfloat16, so that is not asked"
    assert len(values(fake(usual, dtypes=("float32", "float64")), "masks")) == ASKED


@pytest.mark.parametrize(("least", "value"), [(-64, "attends"), (-40, "unexplained")])
def test_a_softmax_that_never_reaches_zero_blocks_all_the_same(least, value):
    def clipped(logits, mask):
        highest = np.where(mask != 0, logits, -np.inf).max(axis=-1, keepdims=True)
        return np.maximum(blocked(logits, mask != 0), highest + least)

    assert values(fake(clipped), "masks")["mask, bool"] == value


def test_a_half_precision_that_cannot_be_had_here_is_not_asked():
    adapter = fake(usual)
    run = adapter.run

    def elsewhere(problem, call):
        if problem.dtype == "float16":
            raise Unsupported("not on this device")
        return run(problem, call)

    adapter.run = elsewhere
    assert len(values(adapter, "masks")) == ASKED


QUERIES = MaskArgument("mask", "batch query", true="attends")


@pytest.mark.parametrize(
    ("rows", "value"),
    [
        (lambda mask: mask != 0, "attends"),
        (lambda mask: mask == 0, "blocks"),
        (lambda mask: np.ones_like(mask, bool), "ignored"),
        (lambda mask: np.roll(mask, 1, 1) != 0, "unexplained"),
    ],
    ids=["attends", "blocks", "ignored", "unexplained"],
)
def test_a_mask_over_queries_is_seen_by_the_rows_that_change(rows, value):
    def logits(logits, mask):
        return blocked(logits, rows(mask)[:, None, :, None])

    assert values(fake(logits, masks=QUERIES), "masks")["mask, bool"] == value


def test_numbers_are_short_and_exact_zeros_are_zeros():
    row = np.array([0, 1, 0.25, -np.inf, np.inf, np.nan, 1e-9, -3])
    assert numbers(row) == "[0 1 0.25 −inf inf NaN 1e−09 −3]"
    assert numbers(np.zeros(9)) == "[0 0 0 0 0 0 0 0 …]"


# Where there is no answer to compare with


def test_who_cannot_answer_the_plain_problem_is_not_experimented_with():
    class Refuses(Correct):
        def attend(self, *inputs, **options):
            raise Unsupported("today I cannot")

    class Fails(Correct):
        def attend(self, *inputs, **options):
            raise ZeroDivisionError("of all things")

    with pytest.raises(Unsupported, match=r"^today I cannot$"):
        values(Refuses(), "masks")
    with pytest.raises(NoAnswer, match="without any mask: ZeroDivisionError: of all things"):
        values(Fails(), "degenerate-sizes")


def test_an_answer_of_the_wrong_shape_is_refused_in_one_line():
    class Short(Correct):
        def run(self, problem, call):
            answer = super().run(problem, call)
            return Answer(answer.output[:, 1:], None, {})

    lab = laboratory(Short())
    found = lab.ask(lab.problem())
    assert isinstance(found, Refused)
    assert found.told.startswith("WrongShape: ")
    assert "\n" not in found.told


def test_the_inverted_miniature_is_seen_through():
    entry = entries(Inverted(), "masks")["mask, bool"]
    assert (say(entry.value), say(entry.declared), entry.agrees) == ("blocks", "attends", False)
    assert MASK.true == "attends"
