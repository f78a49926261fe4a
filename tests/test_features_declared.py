"""Declared features: what a declaration says, and that every encoding means the problem."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_arguments import ATTENDS, FULL, ask, labels

from conformance import (
    Adapter,
    Alibi,
    Call,
    CausalFlag,
    Chunk,
    HeadNorm,
    Layer,
    Lengths,
    MaskArgument,
    Packed,
    Parameter,
    PositionIds,
    RotaryBase,
    RotaryConfig,
    RotaryTables,
    SegmentIds,
    Sinks,
    SoftCap,
    Spans,
    Tree,
    Window,
    attention_function,
    examine,
)
from conformance.adapter.arguments import MaskTable
from conformance.adapter.features import MASKABLE, parts_of
from conformance.cases.catalogue import case_of, catalogue, find_cases, posed
from conformance.definition.problem import Norm, Positions, Rotary, Segments
from conformance.definition.rotary import RotaryAxes, RotaryScaling
from conformance.errors import Unsupported, WrongDeclaration
from conformance.running.session import plan

torch = pytest.importorskip("torch")

BOTH = MaskArgument("mask", FULL, true="attends", number="added")


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: Window("w", form="left"), "w: form='left'; say one of 'left right', 'own and"),
        (lambda: Window("w", none=5), "w: none=5; say -1, 0 or None"),
        (lambda: Window("w", alignment="end"), "w: alignment='end'; say 'top-left' or"),
        (lambda: Window("w", counts="keys"), "w: counts='keys'; say one of 'positions', 'steps'"),
        (lambda: Window("w", dtype="float32"), "w: dtype='float32'; say one of 'int32', "),
        (
            lambda: MaskTable(features=(Window("w", dilation="d"), SoftCap("d"))),
            "two declarations have an argument 'd'",
        ),
        (lambda: Chunk("c", none=-1), "c: none=-1; say one of None, 0"),
        (lambda: Spans("s", "types"), "s: form='types'; say one of 'ids', 'runs', 'prefix'"),
        (lambda: Spans("s", none=1), "s: none=1; say one of 0, -1"),
        (lambda: Spans("s", "runs", none=-1), "s: none=-1; say one of 0"),
        (lambda: Spans("s", dtype="bool"), "s: dtype='bool'; say one of 'int32', "),
        (lambda: Spans("s", alignment="end"), "s: alignment='end'; say 'top-left' or"),
        (lambda: Tree("t", "mask"), "t: form='mask'; say one of 'parents', 'ancestors'"),
        (lambda: Tree("t", root=0), "t: root=0; say one of -1, 'own'"),
        (lambda: Tree("t", dtype="bool"), "t: dtype='bool'; say one of 'int32', "),
        (lambda: Sinks("s", units="bits"), "s: units='bits'; say one of 'natural', 'log2'"),
        (lambda: Sinks("s", per="row"), "s: per='row'; say one of 'head', 'layer'"),
        (lambda: Alibi("a", axes="heads batch"), "a: axes='heads batch'; say one of 'heads', "),
        (lambda: Alibi("a", dtype="int32"), "a: dtype='int32'; say one of '', 'float32'"),
        (lambda: Lengths("n", of="values"), "n: of='values'; say one of 'keys', 'queries'"),
        (lambda: Lengths("n", counts="end"), "n: counts='end'; say one of 'length', 'last index'"),
        (lambda: Lengths("n", dtype="float32"), "n: dtype='float32'; say one of 'int32', "),
        (lambda: SegmentIds("ids", dtype="bool"), "ids: dtype='bool'; say one of 'int32', "),
        (lambda: PositionIds("at", of=("cap",)), "at: of=('cap',); say some of 'rotary', "),
        (lambda: PositionIds("at", of=()), "at: of=(); say some of 'rotary', "),
        (lambda: RotaryTables(pairs="both"), "cos: pairs='both'; say one of 'halves', "),
        (lambda: RotaryBase(pairs="both"), "rotary: pairs='both'; say one of 'halves', "),
        (lambda: RotaryConfig("c", pairs="both"), "c: pairs='both'; say one of 'halves', "),
        (lambda: RotaryConfig("c", kinds=("su",)), "c: kinds=('su',); say some of 'default', "),
        (lambda: RotaryConfig("c", kinds=()), "c: kinds=(); say some of 'default', 'linear', "),
        (lambda: HeadNorm("g", "g"), "g: queries and keys have norms of their own"),
        (lambda: MaskTable(features=(SoftCap("a"), Sinks("a"))), "have an argument 'a'"),
        (lambda: MaskTable((ATTENDS,), features=(SoftCap("mask"),)), "have an argument 'mask'"),
        (
            lambda: MaskTable((), CausalFlag("is"), (SoftCap("is"),)),
            "two declarations have an argument 'is'",
        ),
        (lambda: MaskTable(features=("cap",)), "features: 'cap' declares no feature"),
    ],
)
def test_a_declaration_that_contradicts_itself(declare, told):
    with pytest.raises(WrongDeclaration, match=re.escape(told)) as caught:
        declare()
    assert "\n" not in str(caught.value)


def said(table, problem, name):
    """The values of an argument in all encodings; None where it is not passed."""
    return [spelling.arguments.get(name) for spelling in table.spellings(problem)]


SQUARE = (2, 3, 4, 4)


@pytest.mark.parametrize(
    ("declared", "window", "causal", "value"),
    [
        (Window("w"), (2, 1), None, (2, 1)),
        (Window("w"), (2, None), None, (2, -1)),
        (Window("w", none=None), (None, 1), None, (None, 1)),
        (Window("w", none=0), (2, None), None, (2, 0)),
        (Window("w", none=0), (2, 0), None, None),
        (Window("w", form="own and before"), (2, 0), None, 3),
        (Window("w", form="own and before"), (2, None), "top-left", 3),
        (Window("w", form="own and before"), (2, None), None, None),
        (Window("w", form="own and before"), (2, 1), None, None),
        (Window("w", form="before"), (2, 0), None, 2),
        (Window("w", form="before", none=0), (0, 0), None, None),
        (Window("w", form="each side"), (2, 2), None, 2),
        (Window("w", form="each side"), (2, None), None, None),
        (Window("w", form="each side"), (2, None), "top-left", 2),
        (Window("w", form="each side"), (None, 2), None, None),
        (Window("w", form="own and before", needs_causal=True), (2, None), "top-left", 3),
        (Window("w", form="own and before", needs_causal=True), (2, 0), None, None),
    ],
)
def test_a_window_in_each_form(declared, window, causal, value):
    problem = ask(SQUARE, causal=causal).replace(window=window)
    table = MaskTable((ATTENDS,), CausalFlag("causal"), (declared,))
    assert table.spell(problem).arguments.get("w") == value
    if value is None:
        assert labels(table, problem) == [f"mask=bool[{FULL}]"]
    else:
        assert "mask" not in table.spell(problem).arguments
        assert None in said(table, problem, "w")


def test_a_window_that_needs_the_flag_comes_with_it():
    declared = Window("w", form="own and before", needs_causal=True)
    table = MaskTable((ATTENDS,), CausalFlag("causal"), (declared,))
    problem = ask(SQUARE, causal="top-left").replace(window=(2, None))
    assert labels(table, problem) == [
        "causal, w=3",
        f"mask=bool[{FULL}], causal",
        f"mask=bool[{FULL}]",
    ]


def test_a_window_that_looks_ahead_by_nothing_is_causal():
    table = MaskTable((ATTENDS,), CausalFlag("causal"), (Window("w"),))
    problem = ask(SQUARE, causal="top-left").replace(window=(2, None))
    assert labels(table, problem)[:3] == [
        "causal, w=(2, -1)",
        f"mask=bool[{FULL}], causal",
        "w=(2, 0)",
    ]


DILATED = {"dilation": "d", "alignment": "top-left"}


@pytest.mark.parametrize(
    ("declared", "window", "dilation", "passed"),
    [
        (Window("w", **DILATED), (4, 2), 2, {"w": (4, 2), "d": 2}),
        (Window("w", **DILATED), (None, None), 2, {"w": (-1, -1), "d": 2}),
        (Window("w", **DILATED, counts="steps"), (4, 2), 2, {"w": (2, 1), "d": 2}),
        # One position more shows no key more.
        (Window("w", **DILATED, counts="steps"), (5, None), 2, {"w": (2, -1), "d": 2}),
        (Window("w", "each side", **DILATED, counts="steps"), (4, 4), 2, {"w": 2, "d": 2}),
        (Window("w", "each side", **DILATED, counts="steps"), (5, 4), 2, {"w": 2, "d": 2}),
        (Window("w", "each side", **DILATED), (5, 4), 2, None),
        (Window("w", "each side", **DILATED), (None, None), 2, None),
    ],
)
def test_a_window_beside_a_dilation(declared, window, dilation, passed):
    problem = ask(SQUARE).replace(window=window, dilation=dilation)
    table = MaskTable((ATTENDS,), features=(declared,))
    given = table.spell(problem).arguments
    assert given == passed if passed else given.keys() == {"mask"}
    # With the dilation in a mask, the window counts positions, whatever it does beside one.
    alone = MaskTable((ATTENDS,), features=(replace(declared, dilation=""),))
    if window != (None, None) and declared.form == "left right":
        wanted = tuple(-1 if side is None else side for side in window)
        assert alone.spell(problem).arguments["w"] == wanted


TOKENS = np.array([[0, 1, 0, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_global_tokens_come_with_the_window(dtype):
    problem = ask(SQUARE, causal="top-left").replace(window=(1, None), global_tokens=TOKENS)
    declared = Window("w", alignment="top-left", global_tokens="g", dtype=dtype)
    table = MaskTable((ATTENDS,), CausalFlag("causal"), (declared,))
    given = table.spell(problem).arguments
    assert given.keys() == {"w", "g", "causal"}
    assert given["g"].dtype == dtype
    assert given["g"].tolist() == TOKENS.astype(dtype).tolist()
    # A window that includes the causal mask would not hide later keys from global tokens.
    assert not any(
        spelling.arguments.get("w") == (1, 0) and "mask" not in spelling.arguments
        for spelling in table.spellings(problem)
    )


@pytest.mark.parametrize("limit", [{"window": (1, 1)}, {"chunk": 2}])
def test_what_would_hide_keys_from_global_tokens_is_not_passed_beside_them(limit):
    problem = ask(SQUARE).replace(**limit, global_tokens=TOKENS)
    limits = Window("w", dilation="d"), Chunk("c", alignment="top-left")
    assert MaskTable((ATTENDS,), features=limits).spell(problem).arguments.keys() == {"mask"}
    with pytest.raises(Unsupported, match=r"^no global tokens$"):
        MaskTable(features=limits).spell(problem)
    known = Window("w", dilation="d", global_tokens="g"), limits[1]
    given = MaskTable((ATTENDS,), features=known).spell(problem).arguments
    assert given.keys() == ({"w", "g"} if "window" in limit else {"w", "g", "c"})


def test_global_tokens_are_queries_at_the_indices_of_such_keys():
    """Positions that are told, or begin again in segments, are not where they are looked for."""
    at = np.array([[0, 1, 2, 3], [1, 0, 2, 3]])
    declared = Window("w", alignment="top-left", global_tokens="g")
    table = MaskTable((ATTENDS,), features=(declared, PositionIds("p", "r", of=("window",))))
    problem = ask(SQUARE).replace(window=(1, 1), global_tokens=np.array([[0, 1, 0, 0]] * 2))
    straight = problem.replace(positions=Positions(query=at[:1].repeat(2, 0), key=at))
    turned = problem.replace(positions=Positions(query=at, key=at))
    assert table.spell(turned).arguments.keys() == {"w", "g", "p", "r"}
    assert table.spell(straight).arguments.keys() == {"mask"}


def test_packed_tokens_are_not_passed_beside_global_ones():
    problem = ask((2, 3, 4, 4)).replace(window=(1, 1), global_tokens=TOKENS)
    packed = Packed("q_at", "k_at", only=True)
    declared = Window("w", alignment="top-left", global_tokens="g")
    with pytest.raises(Unsupported):
        MaskTable(features=(declared, packed)).spell(problem)


@pytest.mark.parametrize("declared", ["top-left", "bottom-right", None])
@pytest.mark.parametrize("wanted", ["top-left", "bottom-right"])
def test_where_a_window_stands_if_lengths_differ(declared, wanted):
    problem = ask((1, 1, 3, 5), causal=wanted).replace(window=(2, 0))
    table = MaskTable((ATTENDS,), CausalFlag("causal", wanted), (Window("w", alignment=declared),))
    assert ("w" in table.spell(problem).arguments) == (declared == wanted)


@pytest.mark.parametrize("aligns", [True, False])
def test_what_is_aligned_at_the_end_is_aligned_at_the_end_of_lengths(aligns):
    problem = ask((2, 1, 2, 5), causal="bottom-right").replace(key_lengths=np.array([5, 3]))
    flag = CausalFlag("causal", "bottom-right")
    table = MaskTable((ATTENDS,), flag, (Lengths("n", aligns=aligns),))
    first, second = labels(table, problem)[:2]
    if aligns:
        assert first == "causal, n=int32[2]"
        assert second == f"mask=bool[{FULL}]"
    else:
        assert first == f"mask=bool[{FULL}], n=int32[2]"
    equal = problem.replace(key_lengths=np.array([5, 5]))
    assert table.spell(equal).label == "causal, n=int32[2]"


def test_lengths_may_be_the_last_index():
    problem = ask(SQUARE).replace(key_lengths=np.array([4, 1]), query_lengths=np.array([2, 3]))
    features = (Lengths("k", counts="last index", dtype="int64"), Lengths("q", of="queries"))
    (spelling,) = MaskTable(features=features).spellings(problem)
    assert spelling.arguments["k"].tolist() == [3, 0]
    assert spelling.arguments["k"].dtype == np.int64
    assert spelling.arguments["q"].tolist() == [2, 3]
    empty = problem.replace(key_lengths=np.array([4, 0]))
    with pytest.raises(Unsupported, match="no such key lengths: k cannot"):
        MaskTable(features=features).spell(empty)


def test_segments_for_both_are_equal():
    ids = np.array([[0, 0, 1, 1], [0, 1, 1, 1]])
    other = np.array([[0, 1, 1, 1], [0, 1, 1, 1]])
    problem = ask(SQUARE).replace(segments=Segments(query=ids, key=ids))
    table = MaskTable((ATTENDS,), features=(SegmentIds("ids"),))
    assert np.array_equal(table.spell(problem).arguments["ids"], ids)
    problem = problem.replace(segments=Segments(query=ids, key=other))
    assert table.spell(problem).arguments.keys() == {"mask"}
    table = MaskTable((ATTENDS,), features=(SegmentIds("q", "k"),))
    assert np.array_equal(table.spell(problem).arguments["k"], other)


def test_positions_are_handed_over_where_something_counts_from_them():
    at = Positions(query=np.array([[5, 6, 8, 9]] * 2), key=np.array([[5, 6, 7, 8]] * 2))
    problem = ask(SQUARE, causal="top-left").replace(positions=at, slopes=np.full(3, 0.5))
    features = (Alibi("slopes"), PositionIds("p", "r", of=("alibi",)))
    table = MaskTable((BOTH,), CausalFlag("causal"), features)
    spelling = table.spell(problem)
    assert spelling.label == f"mask=bool[{FULL}], p=int32[2, 4], r=int32[2, 4], slopes=float[3]"
    assert f"mask=float[{FULL}]" in labels(table, problem)
    (one,) = MaskTable((BOTH,), features=features).spellings(ask(SQUARE).replace(soft_cap=None))
    assert one.label == "no mask"


def test_alibi_is_a_bias_only_if_it_is_exact():
    problem = ask(SQUARE).replace(slopes=np.array([0.5, 0.25, 0.125]))
    table = MaskTable((BOTH,), features=(Alibi("slopes", axes="batch heads", dtype="float32"),))
    first, second = table.spellings(problem)
    assert first.arguments["slopes"].shape == (2, 3)
    assert first.arguments["slopes"].dtype == np.float32
    distance = np.abs(np.arange(4)[:, None] - np.arange(4))
    assert np.array_equal(second.arguments["mask"][1, 0], -0.5 * distance)
    assert second.bias is None
    inexact = problem.replace(slopes=np.array([1 + 2**-7] * 3), dtype="bfloat16")
    assert labels(table, inexact) == ["slopes=float[2, 3]"]


def test_alibi_and_a_bias_in_one_argument():
    bias = np.random.default_rng(0).standard_normal((1, 3, 1, 4))
    problem = ask(SQUARE, bias=bias).replace(slopes=np.array([0.5, 0.25, 0.125]))
    table = MaskTable((BOTH,), features=(Alibi("slopes"),))
    apart, merged = table.spellings(problem)
    assert apart.arguments.keys() == {"mask", "slopes"}
    assert apart.gradients() == merged.gradients() == {"mask": "attn_bias"}
    gradient = np.random.default_rng(1).standard_normal((2, 3, 4, 4))
    expected = gradient.sum(axis=(0, 2), keepdims=True)
    assert np.array_equal(merged.bias_gradient(gradient, problem), expected)


@pytest.mark.parametrize(("units", "factor"), [("natural", 1.0), ("log2", math.log2(math.e))])
@pytest.mark.parametrize("parameter", [False, True])
def test_sinks_have_a_gradient(units, factor, parameter):
    problem = ask(SQUARE).replace(sinks=np.array([1.0, -2.0, 3.0]))
    table = MaskTable(features=(Sinks("s", units=units, parameter=parameter),))
    (spelling,) = table.spellings(problem)
    assert np.allclose(spelling.arguments["s"], factor * problem.sinks)
    assert spelling.gradients() == {"s": "sinks"}
    assert spelling.variables["sinks"].factor == factor
    assert spelling.parameters == ({"s"} if parameter else frozenset())
    narrow = table.spell(problem.replace(dtype="bfloat16")).arguments["s"]
    assert narrow.dtype == (np.float64 if units == "natural" else np.float32)


def test_one_sink_per_layer_is_not_one_per_head():
    table = MaskTable(features=(Sinks("s", per="layer"),))
    with pytest.raises(Unsupported, match="no such sinks: s cannot express it"):
        table.spell(ask(SQUARE).replace(sinks=np.zeros(3)))
    assert table.spell(ask((2, 1, 4, 4)).replace(sinks=np.ones(1))).arguments["s"].shape == ()


def wide(problem, size=4):
    """The problem with heads of another size, of which nothing else matters."""
    shape = replace(problem.shape, head_size=size)
    weights = {name: np.zeros(sizes) for name, sizes in shape.weight_shapes().items()}
    return problem.replace(shape=shape, weights=type(problem.weights)(**weights))


def test_tables_of_angles():
    problem = wide(ask((1, 2, 2, 5), causal="bottom-right")).replace(
        rotary=Rotary(size=2, base=100.0, pairs="interleaved")
    )
    table = MaskTable((ATTENDS,), features=(RotaryTables("c", "s", pairs="interleaved"),))
    with pytest.raises(
        Unsupported, match="no rotary with this alignment: c, s is declared for equal"
    ):
        table.spell(problem)
    declared = RotaryTables("c", "s", flag="pairs", alignment="bottom-right")
    spelling = MaskTable((ATTENDS,), features=(declared,)).spell(problem)
    assert np.array_equal(spelling.arguments["c"], np.cos(np.arange(5))[:, None])
    assert spelling.arguments["pairs"] is True
    square = wide(ask(SQUARE)).replace(rotary=Rotary(size=4, base=100.0))
    spelling = MaskTable(features=(RotaryTables("c", "s"),)).spell(square)
    assert np.allclose(spelling.arguments["s"][3], np.sin([3.0, 3.0 / 10]))
    # Positions that begin again are handed over as those that do not.
    of_tokens = np.array([[0, 0, 1, 1]] * 2)
    packed = square.replace(segments=Segments(query=of_tokens, key=of_tokens))
    assert packed.position_of_queries.max() == 1
    spelling = MaskTable((ATTENDS,), features=(RotaryTables("c", "s"),)).spell(packed)
    assert len(spelling.arguments["c"]) == len(spelling.arguments["s"]) == 4
    with pytest.raises(Unsupported, match="no such rotary"):
        MaskTable(features=(RotaryTables("c", "s", pairs="interleaved"),)).spell(square)


def test_a_base_of_angles():
    problem = wide(ask(SQUARE)).replace(rotary=Rotary(size=2, base=100.0))
    declared = RotaryBase("base", size="size")
    spelling = MaskTable(features=(declared,)).spell(problem)
    assert spelling.arguments == {"base": 100.0, "size": 2}
    for other in (
        RotaryBase("base"),
        RotaryBase(10000.0, size="size"),
        RotaryBase(pairs="interleaved", size="s"),
    ):
        with pytest.raises(Unsupported, match="no such rotary"):
            MaskTable(features=(other,)).spell(problem)


LINEAR = RotaryScaling(rope_type="linear", factor=4.0)
YARN = RotaryScaling(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=2, attention_factor=1.5
)


def test_a_configuration_of_angles():
    plain = wide(ask(SQUARE)).replace(rotary=Rotary(size=2, base=100.0))
    table = MaskTable(features=(RotaryConfig("config"),))
    told = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    assert table.spell(plain).arguments == {"config": told}
    scaled = plain.replace(rotary=Rotary(size=4, base=100.0), rotary_scaling=LINEAR)
    told = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
    assert table.spell(scaled).arguments == {"config": told}
    assert hash(table.spell(scaled).arguments["config"]) == hash(
        table.spell(scaled.replace()).arguments["config"]
    )
    for other, problem in (
        (RotaryConfig("config", kinds=("llama3",)), scaled),
        (RotaryConfig("config", kinds=("linear",)), plain),
        (RotaryConfig("config", partial=False), plain),
        (RotaryConfig("config", pairs="interleaved"), scaled),
    ):
        with pytest.raises(Unsupported, match=r"^no such rotary.*: config cannot express it$"):
            MaskTable(features=(other,)).spell(problem)


def test_scaled_angles_are_in_tables_and_not_said_by_a_base():
    plain = wide(ask(SQUARE)).replace(rotary=Rotary(size=4, base=100.0))
    scaled = plain.replace(rotary_scaling=LINEAR)
    spelling = MaskTable(features=(RotaryTables("c", "s"),)).spell(scaled)
    assert np.allclose(spelling.arguments["s"][3], np.sin([3.0 / 4, 3.0 / 40]))
    scaled = plain.replace(rotary_scaling=YARN)
    spelling = MaskTable(features=(RotaryTables("c", "s"),)).spell(scaled)
    assert np.allclose(spelling.arguments["c"][0], 1.5)
    both = MaskTable(features=(RotaryBase("base"), RotaryConfig("config")))
    assert both.spell(scaled).arguments.keys() == {"config"}
    assert both.spell(plain).arguments.keys() == {"base"}
    for declared in ((RotaryBase("base"),), ()):
        with pytest.raises(Unsupported, match=r"^no rotary scaling$"):
            MaskTable(features=declared).spell(scaled)


IN_TURN = RotaryScaling(rope_type="default", mrope_section=(1, 1, 0), mrope_interleaved=True)
SIDES = RotaryScaling(rope_type="default", mrope_section=(0, 1, 1))
BY_YARN = replace(YARN, mrope_section=(0, 1, 1))


def on_axes(problem, scaling, *, apart=False):
    """The problem with positions of time, height and width, others for keys if `apart`."""
    at = np.arange(problem.shape.query_length)[:, None] // [4, 2, 1] % [9, 2, 2]
    at = np.broadcast_to(at, (problem.shape.batch, *at.shape))
    key = np.resize(at, (problem.shape.batch, problem.shape.key_length, 3)) + apart
    return problem.replace(
        rotary=Rotary(size=4, base=100.0),
        rotary_scaling=scaling,
        axes=RotaryAxes(query=at, key=key),
    )


def test_positions_on_several_axes():
    plain = wide(ask(SQUARE))
    config = RotaryConfig("config", kinds=("yarn",), axes="at", dtype="int64")
    passed = MaskTable(features=(config,)).spell(on_axes(plain, SIDES)).arguments
    told = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [0, 1, 1]}
    assert passed.keys() == {"config", "at"}
    assert passed["config"] == told
    assert passed["at"].dtype == np.int64
    assert passed["at"].shape == (3, plain.shape.batch, plain.shape.query_length)
    assert passed["at"][1, 0].tolist() == [0, 0, 1, 1][: plain.shape.query_length]
    scaled = MaskTable(features=(config,)).spell(on_axes(plain, BY_YARN)).arguments["config"]
    assert (scaled["rope_type"], scaled["mrope_section"]) == ("yarn", [0, 1, 1])
    # With one array for both, queries and keys have the same positions.
    apart = on_axes(plain, SIDES, apart=True)
    both = RotaryConfig("config", axes="at", key_axes="keys_at")
    passed = MaskTable(features=(both,)).spell(apart).arguments
    assert np.array_equal(passed["keys_at"], passed["at"] + 1)
    interleaved = on_axes(plain, IN_TURN)
    passed = MaskTable(features=(both,)).spell(interleaved).arguments["config"]
    assert passed["mrope_interleaved"] is True
    for declared, problem in (
        (config, apart),
        (replace(config, sections=("side by side",)), interleaved),
        (replace(config, sections=("interleaved",)), on_axes(plain, SIDES)),
        (replace(config, partial=False, kinds=("linear",)), on_axes(plain, BY_YARN)),
    ):
        with pytest.raises(Unsupported, match=r"config, at cannot express it$|no such position"):
            MaskTable(features=(declared,)).spell(problem)
    # Neither tables nor a base nor positions of tokens tell them.
    others = (RotaryTables("c", "s"), RotaryConfig("config"), PositionIds("ids"))
    with pytest.raises(Unsupported, match=r"^no position axes$"):
        MaskTable(features=others).spell(on_axes(plain, SIDES))
    named = MaskTable(features=(both, others[0], others[2])).spell(apart)
    assert named.arguments.keys() == {"config", "at", "keys_at"}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"axes": "at", "sections": ()}, "say some of 'side by side', 'interleaved'"),
        ({"axes": "at", "sections": ("blocks",)}, "say some of 'side by side', 'interleaved'"),
        ({"key_axes": "at"}, "without axes; say the argument for queries as axes"),
        ({"axes": "at", "dtype": "float32"}, "dtype='float32'; say one of"),
    ],
)
def test_a_wrong_declaration_of_axes_is_told(wrong, why):
    with pytest.raises(WrongDeclaration, match=f"^rope_parameters: .*{why}"):
        RotaryConfig(**wrong)


def test_norms_of_heads():
    problem = ask(SQUARE).replace(norm=Norm(query=np.ones(1), key=np.full(1, 2.0), epsilon=1e-5))
    spelling = MaskTable(features=(HeadNorm("q", "k", epsilon="eps"),)).spell(problem)
    assert spelling.arguments["eps"] == 1e-5
    assert spelling.arguments["k"].tolist() == [2.0]
    assert spelling.gradients() == {"q": "norm.query", "k": "norm.key"}
    with pytest.raises(Unsupported, match="no such query/key norm: q, k cannot express it"):
        MaskTable(features=(HeadNorm("q", "k", epsilon=1e-6),)).spell(problem)


FEATURES = {
    "window": {"window": (1, 1)},
    "chunk": {"chunk": 3},
    "dilation": {"dilation": 2},
    "global tokens": {"global_tokens": np.array([[0, 1, 0, 0]] * 2), "window": (1, 1)},
    "spans": {"spans": np.array([[0, 2, 2, 0]] * 2), "causal": "top-left"},
    "tree": {"tree": np.array([[-1, 0, 0, 2]] * 2)},
    "soft cap": {"soft_cap": 5.0},
    "sinks": {"sinks": np.ones(3)},
    "alibi": {"slopes": np.ones(3)},
    "rotary": {"rotary": Rotary(size=2)},
    "query/key norm": {"norm": Norm(query=np.ones(4), key=np.ones(4))},
    "query lengths": {"query_lengths": np.array([4, 1])},
    "key lengths": {"key_lengths": np.array([4, 1])},
    "segments": {"segments": Segments(query=np.zeros((2, 4), int), key=np.zeros((2, 4), int))},
}


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_not_declared_is_named(name):
    problem = wide(ask(SQUARE)).replace(**FEATURES[name])
    with pytest.raises(Unsupported, match=f"^no {name}$"):
        MaskTable().spell(problem)
    masked = MaskTable((ATTENDS,))
    if name in MASKABLE and name != "alibi":
        assert masked.spell(problem).arguments.keys() == {"mask"}
        return
    with pytest.raises(Unsupported, match=f"^no {name}$"):
        masked.spell(problem)


@pytest.mark.parametrize("includes", [True, False])
@pytest.mark.parametrize("causal", ["top-left", None])
def test_chunks_that_include_the_causal_mask(causal, includes):
    problem = ask(SQUARE, causal=causal).replace(chunk=3)
    table = MaskTable(features=(Chunk("c", alignment="top-left", causal=includes),))
    if bool(causal) == includes:
        assert table.spell(problem).arguments == {"c": 3}
        return
    with pytest.raises(Unsupported):
        table.spell(problem)


def test_blocks_are_counted_from_the_first_key():
    """Not from the first of a segment, and not from a position, unless that is passed."""
    chunk = Chunk("c", alignment="top-left")
    ids = np.array([[0, 0, 1, 1]] * SQUARE[0])
    at = np.arange(4)[None] + np.full((SQUARE[0], 1), 2)
    packed = ask(SQUARE).replace(chunk=3, segments=Segments(query=ids, key=ids))
    later = ask(SQUARE).replace(chunk=3, positions=Positions(query=at, key=at))
    with pytest.raises(Unsupported):
        MaskTable(features=(chunk, SegmentIds("ids"))).spell(packed)
    with pytest.raises(Unsupported):
        MaskTable(features=(chunk,)).spell(later)
    placed = MaskTable(features=(chunk, PositionIds("at", of=("chunk",)))).spell(later)
    assert placed.arguments["c"] == 3
    assert placed.arguments["at"].tolist() == at.tolist()


SPANNED = np.array([[0, 4, 4, 0], [4, 4, 7, 7]])
FORMS_OF_SPANS = [
    ({}, SPANNED, [[0, 4, 4, 0], [4, 4, 7, 7]]),
    ({"none": -1}, SPANNED, [[-1, 4, 4, -1], [4, 4, 7, 7]]),
    ({"form": "runs"}, SPANNED, None),
    ({"form": "runs"}, np.array([[0, 4, 4, 0], [4, 0, 7, 7]]), [[0, 1, 1, 0], [1, 0, 1, 1]]),
    ({"form": "runs"}, np.array([[4, 0, 4, 4], [4, 4, 4, 4]]), None),
    ({"form": "prefix"}, SPANNED, None),
    ({"form": "prefix"}, np.array([[4, 4, 4, 0], [0, 0, 0, 0]]), [3, 0]),
    ({"form": "prefix"}, np.array([[0, 4, 4, 0], [4, 4, 4, 0]]), None),
]


@pytest.mark.parametrize(("form", "ids", "passed"), FORMS_OF_SPANS)
def test_what_is_passed_for_spans(form, ids, passed):
    problem = ask(SQUARE, causal="top-left").replace(spans=ids)
    table = MaskTable(features=(Spans("s", causal=True, **form),))
    if passed is None:
        with pytest.raises(Unsupported, match=r"^no such spans: s cannot express it$"):
            table.spell(problem)
        return
    assert table.spell(problem).arguments["s"].tolist() == passed


@pytest.mark.parametrize("includes", [True, False])
def test_spans_include_the_causal_mask_or_need_the_flag(includes):
    problem = ask(SQUARE, causal="top-left").replace(spans=SPANNED)
    spans, flag = Spans("s", causal=includes), CausalFlag("causal")
    table = MaskTable((ATTENDS,), flag, (spans,))
    every = [spelling.arguments.keys() for spelling in table.spellings(problem)]
    assert every[0] == ({"s"} if includes else {"s", "causal"})
    # The flag alone would hide what a span shows, so only a mask can stand for both.
    assert every[1] == {"mask"}
    assert all(("causal" in names) == ("s" in names and not includes) for names in every)
    assert not MaskTable(features=(spans,)).causal
    if not includes:
        with pytest.raises(Unsupported):
            MaskTable(features=(spans,)).spell(problem)


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right", None])
@pytest.mark.parametrize("causal", ["top-left", "bottom-right"])
def test_queries_are_in_spans_by_their_positions(causal, alignment):
    problem = ask((2, 3, 2, 4), causal=causal).replace(spans=SPANNED)
    table = MaskTable(features=(Spans("s", causal=True, alignment=alignment),))
    if causal == alignment:
        assert table.spell(problem).arguments["s"].shape == (2, 4)
        return
    with pytest.raises(Unsupported):
        table.spell(problem)


def test_beside_lengths_spans_are_aligned_as_these():
    problem = ask((2, 3, 2, 4), causal="bottom-right")
    problem = problem.replace(spans=SPANNED, key_lengths=np.array([3, 3]))
    spans = Spans("s", causal=True, alignment="bottom-right")
    assert MaskTable(features=(spans, Lengths("n"))).spell(problem)
    with pytest.raises(Unsupported):
        MaskTable(features=(spans, Lengths("n", aligns=False))).spell(problem)


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("limit", [{"window": (1, None)}, {"chunk": 2}])
def test_spans_beside_what_may_not_hold_inside_them(limit, limited):
    problem = ask(SQUARE, causal="top-left").replace(spans=SPANNED, **limit)
    features = Window("w"), Chunk("c"), Spans("s", causal=True, limited=limited)
    table = MaskTable(features=features)
    if limited:
        assert "s" in table.spell(problem).arguments
        return
    with pytest.raises(Unsupported):
        table.spell(problem)


@pytest.mark.parametrize(
    ("declared", "limit"),
    [
        (Window("w", "own and before"), {"window": (1, None)}),
        (Window("w", "before", needs_causal=True), {"window": (1, None)}),
        (Chunk("c", causal=True), {"chunk": 2}),
    ],
)
def test_what_hides_later_keys_is_not_passed_beside_spans(declared, limit):
    """In any other causal problem it means the same."""
    problem = ask(SQUARE, causal="top-left").replace(**limit)
    flag = CausalFlag("causal")
    table = MaskTable(causal=flag, features=(declared, Spans("s")))
    assert table.spell(problem)
    with pytest.raises(Unsupported):
        table.spell(problem.replace(spans=SPANNED))


TREE = np.array([[-1, 0, 0, 2], [-1, -1, 1, 0]])


def test_what_is_passed_for_a_tree():
    problem = ask((2, 3, 4, 6)).replace(tree=TREE)
    given = {
        form: MaskTable(features=(Tree("t", **form_of),)).spell(problem).arguments["t"].tolist()
        for form, form_of in (
            ("parents", {}),
            ("own", {"root": "own"}),
            ("ancestors", {"form": "ancestors"}),
        )
    }
    assert given["parents"] == TREE.tolist()
    assert given["own"] == [[0, 0, 0, 2], [0, 1, 1, 0]]
    assert given["ancestors"][0] == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]


def test_a_tree_ends_where_the_lengths_or_the_arrays_end():
    problem = ask((2, 3, 4, 6)).replace(tree=TREE)
    shorter = problem.replace(key_lengths=np.array([5, 6]))
    for aligns in (True, False):
        table = MaskTable(features=(Tree("t", aligns=aligns), Lengths("n")))
        assert "t" in table.spell(problem).arguments
        if aligns:
            assert "t" in table.spell(shorter).arguments
            continue
        with pytest.raises(Unsupported):
            table.spell(shorter)


def test_positions_beside_a_tree_are_depths():
    """What counts positions for itself does not find those of a tree; a chain has no others."""
    problem = ask((2, 3, 4, 6)).replace(tree=TREE, slopes=np.ones(3))
    tree, alibi = Tree("t"), Alibi("a", alignment="bottom-right")
    with pytest.raises(Unsupported):
        MaskTable(features=(tree, alibi)).spell(problem)
    placed = MaskTable(features=(tree, alibi, PositionIds("p", "r", of=("alibi",)))).spell(problem)
    assert placed.arguments["p"].tolist() == [[2, 3, 3, 4], [2, 2, 3, 3]]
    assert placed.arguments["r"].tolist() == [[0, 1, 2, 3, 3, 4], [0, 1, 2, 2, 3, 3]]
    chain = problem.replace(tree=np.tile(np.arange(-1, 3), (2, 1)))
    assert MaskTable(features=(tree, alibi)).spell(chain).arguments.keys() == {"t", "a"}


def test_spans_without_a_causal_mask_are_nothing_to_say():
    problem = ask(SQUARE).replace(spans=SPANNED)
    assert MaskTable(features=(Spans("s"),)).spell(problem).arguments == {}


# Every encoding of every problem, decoded by hand


@st.composite
def declarations(draw):
    """Some features in some of their forms; which means what, `decoded` says once more."""
    alignment = st.sampled_from(["top-left", "bottom-right", None])
    every = [
        Window(
            "w",
            draw(st.sampled_from(["left right", "own and before", "before", "each side"])),
            draw(st.sampled_from([-1, 0, None])),
            draw(alignment),
            draw(st.booleans()),
        ),
        Alibi("a", draw(st.sampled_from(["heads", "batch heads"])), draw(alignment)),
        Lengths("k", "keys", counts=draw(st.sampled_from(["length", "last index"])),
                aligns=draw(st.booleans())),
        Lengths("q", "queries", aligns=draw(st.booleans())),
        SegmentIds(*draw(st.sampled_from([("i",), ("i", "j")]))),
        PositionIds("p", "r", draw(st.sampled_from([("alibi",), ("window", "causal")]))),
    ]  # fmt: skip
    features = tuple(one for one in every if draw(st.booleans()))
    flag = CausalFlag("flag", draw(alignment)) if draw(st.booleans()) else None
    return MaskTable((BOTH,) if draw(st.booleans()) else (), flag, features)


@st.composite
def featured(draw):
    batch, heads, query, key = (draw(st.integers(1, most)) for most in (2, 2, 4, 4))
    causal = draw(st.sampled_from([None, "top-left", "bottom-right"]))
    limit = st.sampled_from([None, 0, 1, 2])
    random = np.random.default_rng(draw(st.integers(0, 99)))
    fields = {"window": (draw(limit), draw(limit))}
    if draw(st.booleans()):
        fields["slopes"] = 2.0 ** -np.arange(heads)
    if draw(st.booleans()):
        fields["key_lengths"] = random.integers(0, key + 1, batch)
    if draw(st.booleans()):
        fields["query_lengths"] = random.integers(0, query + 1, batch)
    if draw(st.booleans()):
        fields["segments"] = Segments(
            query=np.sort(random.integers(0, 2, (batch, query))),
            key=np.sort(random.integers(0, 2, (batch, key))),
        )
    if draw(st.booleans()):
        fields["positions"] = Positions(
            query=random.integers(0, 4, (batch, query)), key=random.integers(0, 4, (batch, key))
        )
    return ask((batch, heads, query, key), causal=causal).replace(**fields)


def decoded(table, spelling, problem):
    """(allowed, added) `[batch heads query key]`, as the declarations say, token by token."""
    queries, keys = problem.shape.logits[2:]
    declared = {name: one for one in table.features for name in one.names}
    given, flag = spelling.arguments, table.causal
    ids = declared.get("p") if "p" in given else None
    allowed, added = np.ones(problem.shape.logits, bool), np.zeros(problem.shape.logits)

    def number(name, entry):
        return int(given[name][entry]) + (declared[name].counts == "last index")

    def ahead(what, alignment, entry, i, j):
        if ids is not None and what in ids.of:
            return given["r"][entry, j] - given["p"][entry, i]
        end = {"k": keys, "q": queries}
        for name in end:
            if name in given and declared[name].aligns:
                end[name] = number(name, entry)
        assert alignment is not None or queries == keys
        return j - i - (end["k"] - end["q"] if alignment == "bottom-right" else 0)

    for at in np.ndindex(*problem.shape.logits):
        entry, head, i, j = at
        if "mask" in given:
            value = given["mask"][at]
            allowed[at] &= bool(value) if given["mask"].dtype == bool else value > -np.inf
            added[at] += value if given["mask"].dtype != bool and np.isfinite(value) else 0.0
        if flag is not None and flag.name in given:
            allowed[at] &= ahead("causal", flag.alignment, entry, i, j) <= 0
        if "w" in given:
            window, value = declared["w"], given["w"]
            assert not window.needs_causal or flag.name in given
            away = ahead("window", window.alignment, entry, i, j)
            if window.form == "left right":
                before, after = (math.inf if one == window.none else one for one in value)
            else:
                assert value != window.none
                before = value - (window.form == "own and before")
                after = value if window.form == "each side" else 0
            allowed[at] &= -before <= away <= after
        if "k" in given:
            allowed[at] &= j < number("k", entry)
        if "q" in given:
            allowed[at] &= i < number("q", entry)
        if "i" in given:
            allowed[at] &= given["i"][entry, i] == given["j" if "j" in given else "i"][entry, j]
        if "a" in given:
            slope = given["a"][entry, head] if given["a"].ndim == 2 else given["a"][head]
            added[at] -= slope * abs(ahead("alibi", declared["a"].alignment, entry, i, j))
    return allowed, added


@settings(deadline=None, max_examples=300)
@given(declarations(), featured())
def test_every_encoding_means_the_problem(table, problem):
    distances = np.abs(
        problem.position_of_queries[:, None, :, None] - problem.position_of_keys[:, None, None, :]
    )
    slopes = 0.0 if problem.slopes is None else problem.slopes[:, None, None]
    wanted = np.broadcast_to(-slopes * distances, problem.shape.logits)
    every = list(table.spellings(problem))
    assert len({spelling.label for spelling in every}) == len(every)
    for spelling in every:
        allowed, added = decoded(table, spelling, problem)
        assert np.array_equal(allowed, problem.allowed_in_full()), spelling.label
        assert np.array_equal(added[allowed], wanted[allowed]), spelling.label
    if table.arguments:
        assert every, "a mask can say all of this"


def test_what_says_most_comes_first_and_what_says_least_second():
    problem = ask(SQUARE, causal="top-left").replace(
        window=(2, 1), key_lengths=np.array([4, 2]), slopes=2.0 ** -np.arange(3)
    )
    table = MaskTable((BOTH,), features=(Window("w"), Lengths("k"), Alibi("a")))
    assert labels(table, problem)[:2] == [
        f"mask=bool[{FULL}], k=int32[2], w=(2, 1), a=float[3]",
        f"mask=float[{FULL}]",
    ]


# How a call hands them over


def passed(features, problem, call=None, **declaration):
    """What a function is given, the answer of a call to it, and its adapter."""
    seen = []

    @attention_function("torch", features=features, **declaration)
    def attend(query, key, value, **arguments):
        seen.append(arguments)
        logits = query @ key.mT
        for name in ("sinks", "q_gain", "k_gain"):
            logits = logits + arguments[name].sum() if name in arguments else logits
        return torch.tanh(logits) @ value

    answer = attend.run(problem, call or Call())
    return seen[-1], answer, attend


SELF = find_cases("plain/no-mask/self")[0].problem("float32")
SINKS = np.array([0.5, 1.0, -1.0, 0.25])
GAINS = Norm(query=np.full(6, 0.5), key=np.full(6, 2.0), epsilon=1e-5)
KNOWN = (
    Window("window"),
    SoftCap("cap"),
    Sinks("sinks"),
    HeadNorm("q_gain", "k_gain"),
    Lengths("lengths"),
)
LENGTHS = np.array([5, 7])


def test_arrays_are_native_and_plain_values_are_as_they_are():
    problem = SELF.replace(window=(2, None), soft_cap=20.0, key_lengths=LENGTHS, norm=GAINS)
    seen, answer, _ = passed(KNOWN, problem.replace(sinks=SINKS))
    assert seen["window"] == (2, -1)
    assert seen["cap"] == 20.0
    assert seen["epsilon"] == 1e-5
    assert seen["lengths"].dtype == torch.int32
    assert seen["sinks"].dtype == torch.float32
    assert {"sinks", "norm.query", "norm.key"} <= answer.gradients.keys()
    assert answer.gradients["norm.key"].shape == (6,)


def test_a_gradient_is_that_of_natural_units():
    problem = SELF.replace(sinks=SINKS)
    _, natural, _ = passed((Sinks("sinks"),), problem)
    seen, binary, _ = passed((Sinks("sinks", units="log2"),), problem)
    assert np.allclose(seen["sinks"].detach() * math.log(2), SINKS)
    assert not np.allclose(natural.gradients["sinks"], 0)
    # The factor is that of the argument; what the function does with it is not divided by it.
    assert binary.gradients["sinks"].shape == natural.gradients["sinks"].shape


@pytest.mark.parametrize("wanted", ["sinks", "norm.query", "query", "weights"])
def test_what_to_differentiate_by_may_be_named(wanted):
    call = Call(wanted=frozenset({wanted}))
    _, answer, _ = passed(KNOWN, SELF.replace(sinks=SINKS, norm=GAINS), call)
    assert {name.split("s.")[0] for name in answer.gradients} == {
        wanted.replace("weights", "weight")
    }


def test_plain_values_are_part_of_the_program():
    problems = [SELF.replace(soft_cap=cap) for cap in (20.0, 30.0)]
    _, _, adapter = passed(KNOWN, problems[0])
    programs = [adapter._prepare(problem, Call()).program for problem in problems]
    assert programs[0] != programs[1]
    with pytest.raises(Unsupported, match="its masks are spelled in two ways"):
        adapter.rewritten(*problems, Call())
    adapter.rewritten(problems[0], problems[0], Call())
    assert not adapter.side_effects(problems[0].replace(sinks=SINKS), Call()).changed


@pytest.mark.parametrize(
    "manner", [{"strided": "gaps"}, {"strided": "window"}, {"around": math.nan}]
)
def test_arrays_of_features_lie_as_masks_do(manner):
    problem = SELF.replace(sinks=SINKS, key_lengths=LENGTHS)
    seen, _, _ = passed(KNOWN, problem, Call(**manner))
    assert seen["lengths"].tolist() == LENGTHS.tolist()
    assert np.allclose(seen["sinks"].detach(), SINKS)
    assert seen["sinks"]._base is not None


class Configured(Layer):
    """A layer whose constructor takes a window and a cap, and which holds its sinks."""

    framework = "torch"
    features = (
        Window("sliding_window", "own and before", none=None),
        SoftCap("cap", none=None),
        Sinks("sinks", parameter=True),
    )
    causal_flag = CausalFlag("causal")
    built: ClassVar[list] = []
    parameters = (
        Parameter("query.weight", "query", "embed heads head -> (heads head) embed"),
        Parameter("key.weight", "key", "embed heads head -> (heads head) embed"),
        Parameter("value.weight", "value", "embed heads head -> (heads head) embed"),
        Parameter("output.weight", "output", "heads head embed -> embed (heads head)"),
        *(
            Parameter(f"{name}.bias", f"{name}_bias", "heads head -> (heads head)")
            for name in ("query", "key", "value")
        ),
        Parameter("output.bias", "output_bias", "embed -> embed"),
    )

    def build_with(self, shape, dtype, scale, mode, settings):
        self.built.append(settings)
        layer = torch.nn.Module()
        for name in ("query", "key", "value", "output"):
            setattr(layer, name, torch.nn.Linear(24, 24))
        if "sinks" in settings:
            layer.sinks = torch.nn.Parameter(torch.zeros(shape.heads))
        return layer

    def call(self, layer, query, key, value, masks, mode):
        assert masks == {"causal": True}
        summed = layer.query(query) + layer.key(key) + layer.value(value)
        return layer.output(summed) * (1 + layer.sinks.sum() if hasattr(layer, "sinks") else 1)


def test_a_layer_is_built_with_what_is_plain_and_loads_what_it_holds():
    problem = SELF.replace(causal="top-left", window=(2, None), soft_cap=5.0)
    adapter = Configured()
    adapter.built.clear()
    plain = adapter.run(problem, Call())
    sunk = adapter.run(problem.replace(sinks=SINKS), Call())
    adapter.run(problem.replace(sinks=SINKS + 1), Call())
    assert adapter.built == [
        {"sliding_window": 3, "cap": 5.0},
        {"sliding_window": 3, "cap": 5.0, "sinks": True},
    ]
    assert "sinks" not in plain.gradients
    assert sunk.gradients["sinks"].shape == (4,)
    assert np.allclose(sunk.output, (1 + SINKS.sum()) * plain.output, atol=1e-5)


class Anything(Adapter):
    """What translates problems itself."""

    features = (Window("window"), Lengths("lengths"))

    def run(self, problem, call):
        raise NotImplementedError


def test_an_adapter_that_translates_problems_itself_names_what_it_knows():
    adapter = Anything()
    adapter.check(SELF.replace(window=(1, 1), key_lengths=LENGTHS))
    with pytest.raises(Unsupported, match=r"^no soft cap$"):
        adapter.check(SELF.replace(soft_cap=1.0))


# Each form of a declaration is asked of what declares nothing else


ALIGNMENTS = (None, "top-left", "bottom-right")
PAIRS = ("halves", "interleaved")
BESIDE = {"dilation": "dilation"}
FORMS = {
    **{
        f"Window {form} {aligned} {'under a flag' if flag else ''}": (
            Window("window", form, alignment=aligned, needs_causal=flag),
        )
        for form in ("left right", "own and before", "before", "each side")
        for aligned in ALIGNMENTS
        for flag in (False, True)
    },
    **{
        f"Window dilated in {counts}, {tokens or 'no'} global tokens, {aligned}": (
            Window("window", "left right", alignment=aligned, counts=counts, **BESIDE | tokens),
        )
        for aligned in ALIGNMENTS
        for counts in ("positions", "steps")
        for tokens in ({}, {"global_tokens": "tokens"})
    },
    "SoftCap": (SoftCap("cap"),),
    **{
        f"Sinks {units} {per}": (Sinks("sinks", units, per),)
        for units in ("natural", "log2")
        for per in ("head", "layer")
    },
    **{
        f"Alibi {axes} {aligned}": (Alibi("slopes", axes, aligned),)
        for axes in ("heads", "batch heads")
        for aligned in ALIGNMENTS
    },
    **{
        f"Lengths {counts} {aligns} {flag} {len(of)}": tuple(
            Lengths(one, one, counts=counts, aligns=aligns, needs_causal=flag) for one in of
        )
        for of in (("keys",), ("keys", "queries"))
        for counts in ("length", "last index")
        for aligns in (True, False)
        for flag in (False, True)
    },
    **{
        f"Spans {form} {aligned} {'causal' if causal else 'under a flag'}": (
            Spans("spans", form, alignment=aligned, causal=causal),
        )
        for form in ("ids", "runs", "prefix")
        for aligned in ALIGNMENTS
        for causal in (True, False)
    },
    **{
        f"Tree {form} {root} {aligns}": (Tree("tree", form, root=root, aligns=aligns),)
        for form, root in (("parents", -1), ("parents", "own"), ("ancestors", -1))
        for aligns in (True, False)
    },
    "SegmentIds of both": (SegmentIds("segments", "segments"),),
    "SegmentIds of each": (SegmentIds("query_segments", "key_segments"),),
    "PositionIds causal": (PositionIds("at", "key_at", ("causal",)),),
    "PositionIds rotary": (
        PositionIds("at", "key_at"),
        RotaryTables("cos", "sin", alignment="bottom-right"),
    ),
    **{
        f"{type(rotary).__name__} {name} {pairs} {aligned}": (
            replace(rotary, pairs=pairs, alignment=aligned),
        )
        for pairs in PAIRS
        for aligned in ALIGNMENTS
        for name, rotary in {
            "of tables": RotaryTables("cos", "sin"),
            "of a base": RotaryBase("base"),
            "of a size": RotaryBase("base", "size"),
            "of a fixed base": RotaryBase(10000.0, flag="rotates"),
            "of a configuration": RotaryConfig("config"),
        }.items()
    },
    "HeadNorm": (HeadNorm("query_gain", "key_gain"),),
    "HeadNorm with a fixed epsilon": (HeadNorm("query_gain", "key_gain", epsilon=1e-6),),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_a_declaration_is_asked_at_core(form):
    """That the inputs of these cases bind is tested with all others."""
    features = FORMS[form]

    def nothing(query, key, value):
        raise NotImplementedError

    flag = CausalFlag("causal", alignment="bottom-right")
    adapter = attention_function("torch", causal_flag=flag, features=features)(nothing)
    said = {part for feature in features[:1] for part in feature.says}
    cases = [case for case in catalogue() if case.core]
    asked = {
        item.asked.id
        for item in plan([adapter], cases, ["float32"], "cpu")
        if not item.refused and said & {*parts_of(item.asked.problem("float32"))}
    }
    assert len(asked) >= 3, asked


@pytest.mark.parametrize(
    ("feature", "number", "name"),
    [
        (HeadNorm("q", "k", epsilon=1e-6), 1e-6, "feature/norm/self+epsilon-1e-06"),
        (RotaryBase(5e5, flag="neighbours"), 5e5, "feature/rotary/self+base-500000"),
    ],
)
def test_a_case_has_the_number_that_a_feature_fixes(feature, number, name):
    case = case_of(name)
    problem = case.problem("float32")
    assert number == (problem.norm.epsilon if problem.norm else problem.rotary.base)
    (posed_one,) = posed(case_of(name.partition("+")[0]), None, layer=True, numbers=feature.numbers)
    assert posed_one.id == case.id
    (plain,) = posed(case_of("plain/no-mask/self"), None, layer=True, numbers=feature.numbers)
    assert plain.id == "plain/no-mask/self"


@pytest.mark.parametrize("applied", [True, False])
def test_a_norm_with_a_fixed_epsilon_is_judged(applied, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        f"""
from conformance import HeadNorm, attention_function

def rms(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (gain if {applied} else 1)

@attention_function("torch", features=(HeadNorm("q", "k", epsilon=1e-6),))
def attend(query, key, value, q=None, k=None):
    if q is not None:
        query, key = rms(query, q), rms(key, k)
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value
"""
    )
    outcome = examine(f"{path}:attend", cases="feature/norm", dtypes="float32")
    assert outcome.counts["conforms" if applied else "deviates"] >= 3
