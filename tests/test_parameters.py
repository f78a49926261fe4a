"""Parameter tables: nothing is lost or rounded on the way to native parameters and back."""

from __future__ import annotations

import dataclasses
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.adapter.loading import load, registered
from conformance.adapter.native import Layer
from conformance.adapter.parameters import Parameter, ParameterTable
from conformance.cases.case import FAMILIES, draw
from conformance.definition.problem import Shape, Weights
from conformance.errors import Unavailable, Unsupported, WrongDeclaration

BIASES = (
    Parameter("query_bias", "query_bias", "heads head -> heads head"),
    Parameter("key_bias", "key_bias", "heads head -> heads head"),
    Parameter("value_bias", "value_bias", "heads head -> heads head"),
    Parameter("output_bias", "output_bias", "embed -> embed"),
)
SEPARATE = (
    Parameter("wq", "query", "embed heads head -> (heads head) embed"),
    Parameter("wk", "key", "embed heads head -> heads head embed"),
    Parameter("wv", "value", "embed heads head -> embed (head heads)"),
    Parameter("wo", "output", "heads head embed -> embed (heads head)"),
)
QKV = Parameter("qkv", "query key value", "embed heads head -> embed (heads head)", stack=1)
KV = Parameter("kv", "key value", "embed heads head -> heads head embed", stack=1)


def weights_of(shape):
    drawn = draw(shape, np.random.default_rng(0))
    named = {name: drawn[f"weights.{name}"] for name in shape.weight_shapes()}
    return Weights(**named)


def with_all_biases(family, **sizes):
    return dataclasses.replace(FAMILIES[family], bias=True, sharing="separate", **sizes)


def assert_round_trip(table, weights):
    """Bit for bit, and every weight once."""
    found = table.export(table.load(weights))
    named = weights.named()
    assert found.keys() == named.keys()
    for name, array in named.items():
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


# The tables of the adapters


def supported(adapter):
    """Families that the adapter supports, with the layer it builds for each."""
    for family, shape in FAMILIES.items():
        if shape.score in adapter.scores:
            try:
                adapter.check_shape(shape)
            except Unsupported:
                continue
            with adapter.bridge.session("float32", "cpu"):
                yield family, adapter.build(shape, "float32", None, adapter.modes[0])


@pytest.fixture(scope="module", autouse=True)
def one_backend():
    """Keras runs on one backend per process; the tables are the same on all."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        yield


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", registered())
def test_load_and_export_of_every_adapter(name):
    adapter = load(name)
    if not isinstance(adapter, Layer):
        pytest.skip("a function has no parameters of its own")
    if name.startswith("keras-") and adapter.framework != "torch":
        pytest.skip("the table is that of Keras on torch")
    try:
        adapter.prepare()
    except Unavailable as reason:
        pytest.skip(str(reason))
    built = dict(supported(adapter))
    assert {"self", "additive-self"} & built.keys()
    for family, layer in built.items():
        shape, weights = FAMILIES[family], weights_of(FAMILIES[family])
        table = adapter.table(shape)
        assert_round_trip(table, weights)
        native = table.load(weights)
        total = sum(array.size for array in weights.named().values())
        assert sum(array.size for array in native.values()) == total
        if hasattr(layer, "named_parameters"):
            own = {name: tuple(array.shape) for name, array in layer.named_parameters()}
            assert {name: array.shape for name, array in native.items()} == own, family


def test_keras_has_one_table_on_all_backends():
    tables = {}
    for name in registered():
        if name.startswith("keras-"):
            try:
                adapter = load(name)
            except Unavailable as reason:
                pytest.skip(str(reason))
            if isinstance(adapter, Layer):
                tables.setdefault(name.rpartition("-")[2], set()).add(adapter.parameters)
    assert tables
    assert all(len(found) == 1 for found in tables.values())


def test_torch_stacks_query_key_and_value():
    shape = FAMILIES["self"]
    weights = weights_of(shape)
    native = load("torch-mha").table(shape).load(weights)
    width = shape.query_width
    assert native["in_proj_weight"].shape == (3 * width, width)
    for third, name in enumerate(("query", "key", "value")):
        for embed, head, at in np.ndindex(width, shape.heads, shape.head_size):
            row = third * width + head * shape.head_size + at
            canonical = weights.named()[name][embed, head, at]
            assert native["in_proj_weight"][row, embed] == canonical
            assert native["in_proj_bias"][row] == weights.named()[f"{name}_bias"][head, at]
    for head, at, embed in np.ndindex(shape.heads, shape.head_size, width):
        canonical = weights.output[head, at, embed]
        assert native["out_proj.weight"][embed, head * shape.head_size + at] == canonical


# Tables as others may write them


@pytest.mark.parametrize("family", FAMILIES)
def test_one_parameter_for_each_weight(family):
    shape = FAMILIES[family]
    rows = (*SEPARATE, *BIASES, Parameter("w", "score", "heads head -> head heads"))
    assert_round_trip(ParameterTable(rows, shape), weights_of(shape))


@pytest.mark.parametrize("family", FAMILIES)
def test_query_key_and_value_in_one_parameter(family):
    # With fewer key/value heads, and values of another size, the parts differ in length.
    shape = dataclasses.replace(FAMILIES[family], sharing="separate", score="scaled-dot")
    width = shape.query_width
    shape = dataclasses.replace(shape, key_width=width, value_width=width)
    weights = weights_of(shape)
    table = ParameterTable((QKV, SEPARATE[3], *BIASES), shape)
    assert_round_trip(table, weights)
    stacked = table.load(weights)["qkv"]
    cuts = np.cumsum([w.shape[1] * w.shape[2] for w in (weights.query, weights.key)])
    parts = np.split(stacked, cuts, axis=1)
    for part, weight in zip(parts, (weights.query, weights.key, weights.value), strict=True):
        assert np.array_equal(part, weight.reshape(width, -1))


def test_key_and_value_of_other_sizes_in_one_parameter():
    shape = with_all_biases("value-head", key_width=9, value_width=9)
    assert shape.value_head_size != shape.head_size
    rows = (SEPARATE[0], KV, SEPARATE[3], *BIASES[:1], BIASES[3])
    both = Parameter("kv_bias", "key_bias value_bias", "heads head -> heads head", stack=1)
    table = ParameterTable((*rows, both), shape)
    weights = weights_of(shape)
    assert_round_trip(table, weights)
    native = table.load(weights)
    assert native["kv"].shape == (shape.heads, shape.head_size + shape.value_head_size, 9)
    assert np.array_equal(native["kv_bias"][:, : shape.head_size], weights.key_bias)


def test_stacking_grouped_heads():
    shape = with_all_biases("gqa")
    rows = (SEPARATE[0], dataclasses.replace(KV, stack=0), SEPARATE[3], *BIASES)
    native = ParameterTable(rows, shape).load(weights_of(shape))
    assert native["kv"].shape == (2 * shape.kv_heads, shape.head_size, shape.key_width)
    assert_round_trip(ParameterTable(rows, shape), weights_of(shape))


def test_heads_that_share_a_key_stand_apart():
    shape = with_all_biases("gqa", kv_heads=2)
    rows = (
        Parameter("wq", "query", "embed heads head -> (heads head) embed", interleaved=True),
        Parameter(
            "kv",
            "key value",
            "embed heads head -> heads head embed",
            stack=1,
            interleaved=True,
        ),
        Parameter("wo", "output", "heads head embed -> embed heads head", interleaved=True),
        Parameter("bq", "query_bias", "heads head -> heads head", interleaved=True),
        *BIASES[1:],
    )
    table, weights = ParameterTable(rows, shape), weights_of(shape)
    assert_round_trip(table, weights)
    native = table.load(weights)
    for head in range(shape.heads):
        group, shared = divmod(head, shape.kv_heads)
        canonical = shared * shape.group + group
        assert canonical // shape.group == shared
        assert np.array_equal(native["wo"][:, head], weights.output[canonical].T)
        assert np.array_equal(native["bq"][head], weights.query_bias[canonical])
    assert np.array_equal(native["kv"][:, : shape.head_size], weights.key.transpose(1, 2, 0))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_each_key_head_lies_behind_its_query_heads(kv_heads):
    shape = with_all_biases("self", kv_heads=kv_heads)
    pattern = "embed heads head -> embed (heads head)"
    rows = (
        Parameter("qkv", "query key value", pattern, stack=1, grouped=True),
        SEPARATE[3],
        Parameter(
            "b",
            "query_bias key_bias value_bias",
            "heads head -> (heads head)",
            stack=0,
            grouped=True,
        ),
        BIASES[3],
    )
    table, weights = ParameterTable(rows, shape), weights_of(shape)
    assert_round_trip(table, weights)
    native = table.load(weights)
    # As Falcon takes them apart.
    size = (kv_heads, shape.group + 2, shape.head_size)
    fused, biases = native["qkv"].reshape(-1, *size), native["b"].reshape(size)
    for head in range(shape.heads):
        at = divmod(head, shape.group)
        assert np.array_equal(fused[:, *at], weights.query[:, head])
        assert np.array_equal(biases[at], weights.query_bias[head])
    assert np.array_equal(fused[:, :, -2], weights.key)
    assert np.array_equal(fused[:, :, -1], weights.value)
    assert np.array_equal(biases[:, -1], weights.value_bias)


def test_rows_without_biases_are_left_out():
    shape = dataclasses.replace(FAMILIES["cross"], bias=False)
    table = ParameterTable((*SEPARATE, *BIASES), shape)
    assert [row.native for row in table.rows] == ["wq", "wk", "wv", "wo"]
    assert_round_trip(table, weights_of(shape))


SIZES = st.integers(1, 4)
LEFT = "embed heads head"
NATIVE = st.sampled_from(
    ["embed heads head", "head embed heads", "(heads head) embed", "embed (head heads)",
     "(embed heads head)", "1 embed (heads head)", "heads (embed head)"]
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(SIZES, SIZES, SIZES, SIZES, SIZES, NATIVE, NATIVE, st.booleans())
def test_any_pattern_of_any_shape_is_inverted(group, kv, head, value, width, one, two, bias):
    shape = Shape(
        batch=1, query_length=1, key_length=1, heads=group * kv, kv_heads=kv, head_size=head,
        value_head_size=value, query_width=width, key_width=width + 1, value_width=width + 2,
        output_width=width + 3, bias=bias,
    )  # fmt: skip
    rows = [Parameter(n, n, f"{LEFT} -> {one}") for n in ("query", "key")]
    rows += [Parameter("value", "value", f"{LEFT} -> {two}")]
    mixed = two.replace("embed", "tmp").replace("heads", "embed").replace("tmp", "heads")
    rows += [Parameter("output", "output", f"{LEFT} -> {mixed}"), *BIASES]
    assert_round_trip(ParameterTable(rows, shape), weights_of(shape))


# Tables that are wrong


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: Parameter("w", "querry", "a -> a"), "['querry'] is no canonical weight; there"),
        (lambda: Parameter("w", "", "a -> a"), "nothing is no canonical weight"),
        (lambda: Parameter("w", "query key", "a -> a"), "several sources but no `stack`"),
        (lambda: Parameter("w", "query", "a b c"), "'a b c' is no pattern"),
        (lambda: Parameter("w", "query", "a -> b -> c"), "is no pattern"),
        (lambda: Parameter("w", "query", "a b c -> a b c", interleaved=True), "no axis heads"),
        (lambda: Parameter("w", "query", "a b c -> b a c", grouped=True), "does not begin with"),
        (
            lambda: Parameter("w", "query key", f"{LEFT} -> (head heads)", stack=0, grouped=True),
            "does not begin with heads",
        ),
    ],
)
def test_a_row_that_contradicts_itself(declare, told):
    with pytest.raises(WrongDeclaration, match=re.escape(told)):
        declare()


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ((*SEPARATE, *BIASES[:3]), "missing ['output_bias'], repeated [], rows only half there []"),
        ((*SEPARATE[1:], *BIASES), "missing ['query']"),
        ((*SEPARATE, *BIASES, KV), "repeated ['key', 'value']"),
        ((*SEPARATE, SEPARATE[0], *BIASES), "missing [], repeated ['query']"),
        ((), "missing ['key', 'key_bias', 'output', 'output_bias', 'query'"),
    ],
)
def test_a_table_must_hold_every_weight_once(rows, told):
    with pytest.raises(WrongDeclaration, match=re.escape(told)):
        ParameterTable(rows, FAMILIES["cross"])


def test_a_row_that_is_only_half_there():
    shape = dataclasses.replace(FAMILIES["cross"], bias=False)
    odd = Parameter("odd", "query query_bias", "embed heads head -> (heads head) embed", stack=0)
    with pytest.raises(WrongDeclaration, match=re.escape("rows only half there ['odd']")):
        ParameterTable((odd, *SEPARATE[1:], *BIASES), shape)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (Parameter("wq", "query", "embed head -> head embed"), "does not fit an array of shape"),
        (Parameter("wq", "query", "a b c -> a b"), "pattern 'a b c -> a b' does not fit"),
        (Parameter("wq", "query", "a b c -> a b c d"), "does not fit"),
        (Parameter("wq", "query", "a (b c -> a b c"), "does not fit"),
    ],
)
def test_a_pattern_that_does_not_fit(row, told):
    shape = FAMILIES["cross"]
    table = ParameterTable((row, *SEPARATE[1:], *BIASES), shape)
    with pytest.raises(WrongDeclaration, match=re.escape(told)) as caught:
        table.load(weights_of(shape))
    assert "'wq'" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(WrongDeclaration):
        table.export({row.native: weights_of(shape).query})


@pytest.mark.parametrize(("stack", "family"), [(0, "separate"), (5, "cross")])
def test_parts_that_cannot_be_stacked(stack, family):
    shape = FAMILIES[family]
    odd = Parameter("w", "query key value", "embed heads head -> embed heads head", stack=stack)
    if family == "separate":
        odd = dataclasses.replace(odd, stack=1)
    table = ParameterTable((odd, SEPARATE[3], *BIASES), shape)
    with pytest.raises(WrongDeclaration, match=r"'w'.* cannot lie one after another on axis"):
        table.load(weights_of(shape))


def test_a_native_parameter_that_is_missing_or_of_another_size():
    shape = FAMILIES["cross"]
    table = ParameterTable((*SEPARATE, *BIASES), shape)
    native = table.load(weights_of(shape))
    with pytest.raises(WrongDeclaration, match="the implementation has no parameter 'wv'"):
        table.export({name: array for name, array in native.items() if name != "wv"})
    gradients = table.export({n: a for n, a in native.items() if n != "wv"}, every=False)
    assert "value" not in gradients
    assert "key" in gradients
    with pytest.raises(WrongDeclaration, match="'wq'"):
        table.export(native | {"wq": native["wq"][1:]})
    stacked = ParameterTable((QKV, SEPARATE[3], *BIASES), shape)
    native = stacked.load(weights_of(shape))
    with pytest.raises(WrongDeclaration, match="'qkv'"):
        stacked.export(native | {"qkv": native["qkv"][:, :-1]})
