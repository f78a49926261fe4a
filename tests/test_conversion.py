"""Weights between implementations: bit for bit, natively equal, all that is wrong told at once."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.adapter.loading import load, registered
from conformance.adapter.native import Layer
from conformance.adapters.transformers_models import ADAPTERS as MODELS
from conformance.cases.case import FAMILIES
from conformance.cases.casefile import EXPONENT, WIDTH, Tensor, look, write
from conformance.cases.catalogue import find_cases
from conformance.cli import main
from conformance.definition.comparison import compare
from conformance.definition.expectation import expect, solve
from conformance.definition.problem import WEIGHT_AXES, Norm, Rotary, Weights
from conformance.errors import (
    ConformanceError,
    ExitCode,
    UnknownName,
    Unsupported,
    Untranslatable,
    WrongDeclaration,
    WrongShape,
    WrongTensors,
)
from conformance.porting import conversion
from conformance.porting.checkpoints import Meaning
from conformance.porting.conversion import (
    NOTE,
    _only_texts,
    _turns,
    convert,
    convert_file,
    native_shape,
)

MEANS_NOTHING = Meaning()
NORMS = tuple(f"layers.0.self_attn.{side}_norm.weight" for side in "qk")
BITS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def layers() -> dict[str, Layer]:
    found = {}
    for name in registered():
        try:
            adapter = load(name)
        except ConformanceError:
            continue
        if isinstance(adapter, Layer):
            found[name] = adapter
    return found


LAYERS = layers()


@cache
def native_shapes(name, family):
    """Shapes of the native parameters, or None where the layer cannot have the family's shape."""
    adapter, shape = LAYERS[name], FAMILIES[family]
    if shape.score not in adapter.scores:
        return None
    try:
        adapter.check_shape(shape)
        table = adapter.table(shape)
    except (Unsupported, WrongDeclaration):
        return None
    empty = {key: np.zeros(size) for key, size in shape.weight_shapes().items()}
    return {key: array.shape for key, array in table.load(Weights(**empty)).items()}


def bits(dtype, shapes, seed=0):
    """Tensors of any finite bits: subnormals, negative zeros and all."""
    random, drawn = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        kind = np.dtype(f"u{WIDTH[dtype]}")
        found = random.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
        lowest = EXPONENT[dtype] & -EXPONENT[dtype]
        drawn[name] = Tensor(dtype, found & ~kind.type(lowest))
    return drawn


def through(tensors, source, target, meaning=MEANS_NOTHING, **counts):
    """As `convert`, for tensors in any dtype."""
    return dict(
        conversion._converted(tensors, LAYERS[source], LAYERS[target], counts, meaning).made
    )


ALWAYS = {*MODELS, "llama-eager", "llama-sdpa"} - {"bloom", "falcon-eager", "falcon-sdpa"}
"""Layers that rotate whatever they are given."""
PAIRS = {
    "ours": "",
    "x-transformers": "interleaved",
    "falcon-eager": "halves",
    "falcon-sdpa": "halves",
    **dict.fromkeys(ALWAYS, "halves"),
}
"""What layers turn together if they turn at all; "" where an argument says so."""
UNLIKE = ("qwen3", "bloom")
"""Layers with a feature that they cannot leave out: others cannot have their weights."""


def turning(source, target, meaning):
    """The pairs of the source and of the target where they differ, else None."""
    if meaning.rotary_size == 0 or not {source, target} <= PAIRS.keys():
        return None
    before = PAIRS[source] or meaning.rotary_pairs
    after = PAIRS[target] or before
    return None if before == after else (before, after)


def paired_anew(weights, pairs):
    """Weights whose heads of queries and keys are paired in the target as in the source."""
    named = dict(weights.named())
    for name in {"query", "key", "query_bias", "key_bias"} & {*named}:
        old, new = named[name], np.empty_like(named[name])
        half = old.shape[-1] // 2
        if pairs == ("halves", "interleaved"):
            new[..., ::2], new[..., 1::2] = old[..., :half], old[..., half:]
        else:
            new[..., :half], new[..., half:] = old[..., ::2], old[..., 1::2]
        named[name] = new
    return Weights(**named)


def said_of(source, target, shape):
    """What has to be said of the weights to convert them; None where that is refused."""
    if any(source.startswith(name) != target.startswith(name) for name in UNLIKE):
        return None
    if source.startswith("qwen3"):
        return None
    both = {source, target} <= PAIRS.keys()
    size = pairs = None
    if both and not PAIRS[source] and PAIRS[target]:
        pairs = "halves"
    if not both and (source in PAIRS or target in ALWAYS):
        size = 0
    if both and target in ALWAYS and source not in ALWAYS:
        size = 0 if shape.head_size % 2 else shape.head_size
    meaning = Meaning(rotary_size=size, rotary_pairs=pairs)
    if turning(source, target, meaning) and shape.head_size % 2:
        meaning = dataclasses.replace(meaning, rotary_size=0)
    return meaning


def asked_for(tensors, source, target, meaning, **counts):
    """Whether what has to be said is asked for where it is left out: nothing is guessed."""
    for field, option in (("rotary_size", "--rotary-size"), ("rotary_pairs", "--rotary-pairs")):
        left_out = dataclasses.replace(meaning, **{field: None})
        if left_out != meaning and not (field == "rotary_pairs" and meaning.rotary_size == 0):
            with pytest.raises(Untranslatable, match=option):
                through(tensors, source, target, left_out, **counts)


def counts_of(shape):
    return {"heads": shape.heads, "kv_heads": shape.kv_heads}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].bits.shape == tensor.bits.shape, name
        assert found[name].bits.tobytes() == tensor.bits.tobytes(), name


def torch_weights(width=15, bias=True, dtype="float64"):
    random = np.random.default_rng(1)
    shapes = {"in_proj_weight": (3 * width, width), "out_proj.weight": (width, width)}
    if bias:
        shapes |= {"in_proj_bias": (3 * width,), "out_proj.bias": (width,)}
    return {name: random.standard_normal(size).astype(dtype) for name, size in shapes.items()}


# Every pair


@pytest.mark.night
def test_there_and_back_gives_the_same_bits():
    """Of every pair in every family; the dtypes take turns."""
    covered = 0
    pairs = itertools.permutations(LAYERS, 2)
    for (source, target), family in itertools.product(pairs, FAMILIES):
        dtype = [*BITS][covered % len(BITS)]
        shapes = native_shapes(source, family)
        if shapes is None or native_shapes(target, family) is None:
            continue
        ways = [said_of(*way, FAMILIES[family]) for way in ((source, target), (target, source))]
        if None in ways:
            continue
        tensors = bits(dtype, shapes, seed=covered)
        counts = counts_of(FAMILIES[family])
        asked_for(tensors, source, target, ways[0], **counts)
        # Both ways the same components turn, in the same pairs.
        sizes = {it.rotary_size for it in ways}
        pairs = next((it.rotary_pairs for it in ways if it.rotary_pairs), None)
        there_and_back = [
            dataclasses.replace(
                it, rotary_size=0 if 0 in sizes else it.rotary_size, rotary_pairs=pairs
            )
            for it in ways
        ]
        there = through(tensors, source, target, there_and_back[0], **counts)
        assert {name: it.bits.shape for name, it in there.items()} == native_shapes(target, family)
        assert_same(through(there, target, source, there_and_back[1], **counts), tensors)
        covered += 1
    # 9 layers without the tutorials have 72 ordered pairs, in several families each.
    assert covered >= 300


@pytest.mark.sample(4)
@pytest.mark.parametrize("source", LAYERS)
def test_what_is_made_is_what_the_tables_make(source):
    """Not only a permutation that can be undone: each number is where its own table puts it.

    Each pair has three families, in turn.
    """
    for place, target in enumerate(LAYERS):
        both = [
            f for f in FAMILIES if None not in (native_shapes(source, f), native_shapes(target, f))
        ]
        turned = both[place % max(1, len(both)) :] + both
        for family in dict.fromkeys(turned[::7][:3]):
            made_as_the_tables_make(source, target, family)


def made_as_the_tables_make(source, target, family):
    shape, random = FAMILIES[family], np.random.default_rng(7)
    weights = Weights(
        **{name: random.standard_normal(s) for name, s in shape.weight_shapes().items()}
    )
    given = LAYERS[source].table(shape).load(weights)
    meaning = said_of(source, target, shape)
    if meaning is None:
        return
    if (pairs := turning(source, target, meaning)) is not None:
        weights = paired_anew(weights, pairs)
    wanted = LAYERS[target].table(shape).load(weights)
    told = {"rotary_size": meaning.rotary_size, "rotary_pairs": meaning.rotary_pairs}
    told["scale"] = shape.default_scale if source == "gemma2-eager" else None
    found = convert(given, source=source, target=target, **told, **counts_of(shape))
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_are_read_or_asked_for_and_never_guessed(name):
    read = asked = 0
    for family, shape in FAMILIES.items():
        shapes = native_shapes(name, family)
        if shapes is None:
            continue
        tensors = bits("F32", shapes)
        if name.startswith("qwen3"):
            tensors |= bits("F32", dict.fromkeys(NORMS, (shape.head_size,)))
        try:
            found = through(tensors, name, name)
        except Untranslatable as reason:
            assert "--heads" in str(reason) or "--kv-heads" in str(reason)  # noqa: PT017
            found, asked = through(tensors, name, name, **counts_of(shape)), asked + 1
        else:
            read += 1
        assert_same(found, tensors)
    assert read + asked
    if name.startswith(("flax", "keras")):
        assert not asked


@pytest.mark.parametrize("family", FAMILIES)
def test_axes_are_those_of_the_definition(family):
    shape = FAMILIES[family]
    for name, wanted in shape.weight_shapes().items():
        assert tuple(getattr(shape, field) for field in WEIGHT_AXES[name]) == wanted


@pytest.mark.parametrize("name", LAYERS)
def test_native_shapes_are_those_of_the_table(name):
    for family, shape in FAMILIES.items():
        wanted = native_shapes(name, family)
        if wanted is not None:
            sizes = dataclasses.asdict(shape)
            rows = LAYERS[name].table(shape).rows
            assert {row.native: tuple(native_shape(row, sizes)) for row in rows} == wanted


@settings(deadline=None, max_examples=40)
@given(heads=st.integers(1, 6), head=st.integers(1, 6), bias=st.booleans(), seed=st.integers(0, 99))
def test_any_size(heads, head, bias, seed):
    width = heads * head
    shapes = {name: array.shape for name, array in torch_weights(width, bias).items()}
    tensors = bits("BF16", shapes, seed)
    there = through(tensors, "torch-mha", "flax-nnx", heads=heads)
    assert there["query/kernel"].bits.shape == (width, heads, head)
    assert_same(through(there, "flax-nnx", "torch-mha"), tensors)


def test_heads_matter():
    """Another number of heads is another attention: so it is asked for."""
    tensors = torch_weights()
    found = [convert(tensors, source="torch-mha", target="flax-nnx", heads=n) for n in (3, 5)]
    assert found[0]["query/kernel"].shape != found[1]["query/kernel"].shape
    with pytest.raises(Untranslatable, match="heads, which divides 15; give --heads"):
        convert(tensors, source="torch-mha", target="flax-nnx")


STACKED = """
from conformance import Layer, Parameter

class Stacked(Layer):
    parameters = (
        Parameter("qkv", "query key value", "embed heads head -> (heads head) embed", stack=0),
        Parameter("out", "output", "heads head embed -> embed (heads head)"),
    )
    def build(self, *_): ...
    def call(self, *_): ...
"""


def test_heads_of_keys_and_values_are_asked_for(tmp_path):
    (tmp_path / "mine.py").write_text(STACKED)
    source, random = f"{tmp_path}/mine.py:Stacked", np.random.default_rng(0)
    # With 4 heads and values of 2: 1 shared head and keys of 4, or 2 shared heads and keys of 3.
    tensors = {"qkv": random.standard_normal((22, 8)), "out": random.standard_normal((8, 8))}
    with pytest.raises(
        Untranslatable, match=r"do not determine the number of kv_heads.*--kv-heads"
    ):
        convert(tensors, source=source, target="ours", heads=4)
    found = convert(tensors, source=source, target="ours", heads=4, kv_heads=1)
    assert np.array_equal(found["key_projection.weight"], tensors["qkv"][16:20])
    found = convert(tensors, source=source, target="ours", heads=4, kv_heads=2)
    assert np.array_equal(found["key_projection.weight"], tensors["qkv"][12:18])
    mixed = {name: array.astype("float32") for name, array in found.items()}
    mixed["key_projection.weight"] = found["key_projection.weight"]
    with pytest.raises(Untranslatable, match="one dtype in 'qkv'"):
        convert(mixed, source="ours", target=source, heads=4, rotary_size=0)


def test_each_tensor_keeps_its_dtype():
    tensors = torch_weights() | {"out_proj.bias": np.zeros(15, np.float16)}
    found = convert(tensors, source="torch-mha", target="flax-linen", heads=3)
    assert found["out/bias"].dtype == np.float16
    assert {array.dtype.name for name, array in found.items() if name != "out/bias"} == {"float64"}


def test_bfloat16_of_numpy_and_other_byte_orders():
    kind = pytest.importorskip("ml_dtypes").bfloat16
    tensors = torch_weights(dtype=kind)
    found = convert(tensors, source="torch-mha", target="flax-nnx", heads=3)
    assert found["query/kernel"].dtype == kind
    back = convert(found, source="flax-nnx", target="torch-mha")
    assert all(back[name].tobytes() == tensors[name].tobytes() for name in tensors)
    swapped = {name: array.astype(">f4") for name, array in torch_weights().items()}
    found = convert(swapped, source="torch-mha", target="flax-nnx", heads=3)
    assert np.array_equal(found["out/bias"], swapped["out_proj.bias"])


TURNING = """
from conformance import Layer, Parameter, RotaryBase

class Halves(Layer):
    parameters = (
        Parameter("q", "query", "embed heads head -> (heads head) embed"),
        Parameter("q_bias", "query_bias", "heads head -> (heads head)"),
        Parameter("k", "key", "embed heads head -> (heads head) embed"),
        Parameter("k_bias", "key_bias", "heads head -> (heads head)"),
        Parameter("v", "value", "embed heads head -> (heads head) embed"),
        Parameter("v_bias", "value_bias", "heads head -> (heads head)"),
        Parameter("out", "output", "heads head embed -> embed (heads head)"),
        Parameter("out_bias", "output_bias", "embed -> embed"),
    )
    features = (RotaryBase(10000.0, size="rotary_size"),)
    def build(self, *_): ...
    def call(self, *_): ...

class Neighbours(Halves):
    features = (RotaryBase(10000.0, size="rotary_size", pairs="interleaved"),)

class Unturned(Halves):
    features = ()
"""


@pytest.mark.parametrize("size", [None, 4])
def test_pairs_of_rotary_embeddings_are_reordered(tmp_path, size):
    (tmp_path / "mine.py").write_text(TURNING)
    halves, neighbours, unturned = (
        f"{tmp_path}/mine.py:{name}" for name in ("Halves", "Neighbours", "Unturned")
    )
    problem = find_cases("plain/no-mask/self")[0].problem("float64")
    rotary = Rotary(size=size or problem.shape.head_size, pairs="halves")
    natives = conversion.ParameterTable(conversion.layer(halves).parameters, problem.shape)
    tensors = natives.load(problem.weights)
    told = {"heads": problem.shape.heads, "rotary_size": size}
    found = convert(tensors, source=halves, target=neighbours, **told)
    back = convert(found, source=neighbours, target=halves, **told)
    assert all(back[name].tobytes() == tensors[name].tobytes() for name in tensors)
    assert any(found[name].tobytes() != tensors[name].tobytes() for name in tensors)
    assert found["v"].tobytes() == tensors["v"].tobytes()
    with pytest.raises(Untranslatable, match=r"Unturned declares no rotary.*--rotary-size"):
        convert(tensors, source=halves, target=unturned, **told)
    kept = convert(tensors, source=halves, target=unturned, heads=told["heads"], rotary_size=0)
    assert all(kept[name].tobytes() == tensors[name].tobytes() for name in tensors)
    # The same pairs turn, so the answer is the same; without the new order it is another one.
    weights = natives.export(found, every=True)
    changed = {name.removeprefix("weights."): array for name, array in weights.items()}
    turned = problem.replace(rotary=rotary)
    expected = solve(turned).output
    other = turned.replace(rotary=dataclasses.replace(rotary, pairs="interleaved"))
    assert np.allclose(
        solve(other.with_weights(**changed)).output, expected, rtol=1e-12, atol=1e-12
    )
    assert not np.allclose(solve(other).output, expected, rtol=1e-3, atol=1e-3)
    # Where nothing turns, the new order changes nothing: it is that of queries and of keys.
    assert np.allclose(
        solve(problem.with_weights(**changed)).output, solve(problem).output, rtol=1e-12, atol=1e-12
    )


def test_pairs_need_an_even_number_of_components(tmp_path):
    (tmp_path / "mine.py").write_text(TURNING)
    halves, neighbours = (f"{tmp_path}/mine.py:{name}" for name in ("Halves", "Neighbours"))
    layer, shape = conversion.layer(halves), FAMILIES["self"]
    tensors = conversion.ParameterTable(layer.parameters, shape).load(
        find_cases("plain/no-mask/self")[0].problem("float64").weights
    )
    for size, told in ((3, "must be even"), (8, "at most 6"), (-2, "at most 6")):
        with pytest.raises(WrongShape, match=told):
            convert(tensors, source=halves, target=neighbours, heads=4, rotary_size=size)
    with pytest.raises(Untranslatable, match="rotary_size"):
        convert(tensors, source=halves, target=neighbours, heads=8)


WITH_FEATURES = (
    TURNING
    + """
from conformance import HeadNorm, Sinks

NORM = HeadNorm("q_norm", "k_norm", parameters=True)

class Full(Halves):
    features = (*Halves.features, NORM, Sinks("sinks", parameter=True))

class FullNeighbours(Halves):
    features = (
        *Neighbours.features,
        HeadNorm("query_norm", "key_norm", parameters=True),
        Sinks("attention_sinks", parameter=True),
    )

class OtherUnits(Halves):
    features = (*Halves.features, NORM, Sinks("sinks", parameter=True, units="log2"))
"""
)


def test_parameters_of_norms_and_sinks_are_converted_too(tmp_path):
    """As of Qwen 3, whose factors of norms lie in halves, and of gpt-oss."""
    (tmp_path / "mine.py").write_text(WITH_FEATURES)
    full, neighbours, halves, units = (
        f"{tmp_path}/mine.py:{name}" for name in ("Full", "FullNeighbours", "Halves", "OtherUnits")
    )
    problem = find_cases("plain/no-mask/self")[0].problem("float64")
    random = np.random.default_rng(0)
    head, heads = problem.shape.head_size, problem.shape.heads
    own = {"q_norm": random.standard_normal(head), "k_norm": random.standard_normal(head)}
    own["sinks"] = random.standard_normal(heads)
    natives = conversion.ParameterTable(conversion.layer(full).parameters, problem.shape)
    tensors = natives.load(problem.weights) | own
    found = convert(tensors, source=full, target=neighbours, heads=heads)
    back = convert(found, source=neighbours, target=full, heads=heads)
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }

    def turned(pairs, norms, sinks, weights):
        features = {"rotary": Rotary(size=head, pairs=pairs), "sinks": sinks}
        posed = problem.replace(norm=Norm(query=norms[0], key=norms[1]), **features)
        return solve(posed.with_weights(**weights)).output

    exported = natives.export({n: found[n] for n in tensors if n in found}, every=True)
    weights = {name.removeprefix("weights."): array for name, array in exported.items()}
    norms = (found["query_norm"], found["key_norm"])
    expected = turned("halves", (own["q_norm"], own["k_norm"]), own["sinks"], {})
    answer = turned("interleaved", norms, found["attention_sinks"], weights)
    assert np.allclose(answer, expected, rtol=1e-12, atol=1e-12)
    unordered = turned("interleaved", (own["q_norm"], own["k_norm"]), own["sinks"], weights)
    assert not np.allclose(unordered, expected, rtol=1e-3, atol=1e-3)
    # Nothing is left out, and nothing is guessed.
    for target, told in ((halves, "no place for query/key norm"), (units, "no place for sinks")):
        with pytest.raises(Untranslatable, match=told):
            convert(tensors, source=full, target=target, heads=heads)
    for wrong, told in (
        ({"q_norm": own["q_norm"][1:]}, r"wrong shape of norm.query \[\d\], expected \[\d\]"),
        ({"q_norm": own["q_norm"] * np.nan}, "NaN or infinity in norm.query"),
    ):
        with pytest.raises(WrongTensors, match=told):
            convert(tensors | wrong, source=full, target=neighbours, heads=heads)
    left = {name: array for name, array in tensors.items() if name != "q_norm"}
    with pytest.raises(WrongTensors, match="only norm"):
        convert(left, source=full, target=neighbours, heads=heads)


@pytest.mark.parametrize(
    ("source", "target", "own", "becomes"),
    [
        ("qwen3-eager", "ours", "layers.0.self_attn.q_norm.weight", "query_norm.weight"),
        ("gpt-oss-eager", "ours", "layers.0.self_attn.sinks", "sinks"),
    ],
)
def test_layers_of_models_have_parameters_of_features(source, target, own, becomes):
    named = conversion._parameters_of_features(LAYERS[source])
    targets = conversion._parameters_of_features(LAYERS[target])
    assert named[own] == targets[becomes]
    assert own not in {row.native for table in conversion.tables(LAYERS[source]) for row in table}


# Refusals

WRONG = {
    "missing": (lambda t: t.pop("out_proj.bias"), "missing out_proj.bias"),
    "extra": (lambda t: t.update(bias_k=np.zeros(3)), "unexpected bias_k"),
    "misshapen": (
        lambda t: t.update(in_proj_weight=np.zeros((44, 15))),
        r"wrong shape of in_proj_weight \[44, 15\], expected \[45, 15\]",
    ),
    "too long": (
        lambda t: t.update(in_proj_weight=np.zeros((46, 15))),
        r"wrong shape of in_proj_weight \[46, 15\], expected \[45, 15\]",
    ),
    "another rank": (
        lambda t: t.update({"out_proj.weight": np.zeros((15, 3, 5))}),
        r"wrong shape of out_proj.weight \[15, 3, 5\], expected \[15, 15\]",
    ),
    "NaN": (lambda t: t["in_proj_bias"].put(3, np.nan), "NaN or infinity in in_proj_bias"),
    "inf": (lambda t: t["out_proj.bias"].put(0, -np.inf), "NaN or infinity in out_proj.bias"),
    "all at once": (
        lambda t: (
            t.update({"out_proj.weight": np.zeros((15, 14)), "x": np.zeros(2), "y": np.zeros(2)})
            or t["in_proj_weight"].put(0, np.inf)
            or t.pop("out_proj.bias")
        ),
        "missing out_proj.bias; unexpected x, y; wrong shape of out_proj.weight .*; "
        "NaN or infinity in in_proj_weight",
    ),
    "nothing": (lambda t: t.clear(), "missing in_proj_weight, out_proj.weight"),
    "no numbers": (lambda t: t.update(in_proj_bias=np.array(["x"] * 45)), "in_proj_bias is <U1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_tensors(name):
    change, match = WRONG[name]
    tensors = torch_weights()
    change(tensors)
    with pytest.raises(WrongTensors, match=match) as raised:
        convert(tensors, source="torch-mha", target="flax-nnx", heads=3)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("heads", [2, 4])
def test_tensors_that_contradict_each_other(heads):
    tensors = convert(torch_weights(), source="torch-mha", target="flax-linen", heads=3)
    tensors["out/kernel"] = np.zeros((heads, 5, 15))
    match = rf"wrong shape of out/kernel \[{heads}, 5, 15\], expected \[3, 5, 15\]$"
    with pytest.raises(WrongTensors, match=match):
        convert(tensors, source="flax-linen", target="torch-mha")


NUMBERS = {  # largest finite, infinity, a NaN, minus infinity
    "F64": (0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FF8000000000000, 0xFFF0000000000000),
    "F32": (0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0xFF800000),
    "F16": (0x7BFF, 0x7C00, 0x7E00, 0xFC00),
    "BF16": (0x7F7F, 0x7F80, 0x7FC0, 0xFF80),
    "F8_E5M2": (0x7B, 0x7C, 0x7E, 0xFC),
    "F8_E4M3": (0x7E, 0x7F, 0xFF, 0x7F),
}


@pytest.mark.parametrize("dtype", NUMBERS)
def test_nan_and_infinity_of_every_dtype(dtype):
    found = [
        Tensor(dtype, np.array([0, pattern], dtype=f"u{WIDTH[dtype]}")).finite
        for pattern in NUMBERS[dtype]
    ]
    assert found == [True, False, False, False]


GIVEN = {
    "heads that do not divide": (
        {"heads": 4}, WrongTensors,
        "cannot have weights of these shapes with heads=4: 15 is not divisible by 4; in_proj",
    ),
    "no heads": ({"heads": 0}, WrongShape, "heads is 0"),
    "fewer heads than there are": ({"heads": 3, "kv_heads": 1}, WrongTensors, "kv_heads=1"),
    "unknown source": ({"source": "torch-mah"}, UnknownName, "torch-mha"),
    "function": ({"target": "keras-jax-additive"}, Untranslatable, "no weights of its own"),
    "score": ({"target": "tutorial-5", "heads": 3}, Untranslatable, "no scaled-dot score"),
    "not everywhere": ({"target": "conformance.cli:main"}, ConformanceError, "no adapter"),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_wrong_with_the_question(name):
    changes, kind, match = GIVEN[name]
    asked = {"source": "torch-mha", "target": "flax-nnx", "heads": 3} | changes
    if asked["target"] not in registered() and ":" not in asked["target"]:
        pytest.skip("no such adapter is installed")
    with pytest.raises(kind, match=match):
        convert(torch_weights(), **asked)


NO_BIASES = STACKED.replace("Stacked", "Bare")


def test_biases_are_never_dropped(tmp_path):
    (tmp_path / "mine.py").write_text(NO_BIASES)
    tensors = torch_weights()
    tensors["in_proj_bias"][:] = tensors["out_proj.bias"][:] = 0.0
    with pytest.raises(Untranslatable, match=r"no place for query_bias.*not even zeros"):
        convert(tensors, source="torch-mha", target=f"{tmp_path}/mine.py:Bare", heads=3)


def test_a_layer_without_a_table(tmp_path):
    text = STACKED[: STACKED.index("    parameters")] + STACKED[STACKED.index("    def build") :]
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(Untranslatable, match="declares no parameter table"):
        convert({}, source=f"{tmp_path}/mine.py:Stacked", target="flax-nnx")


def test_who_cannot_express_it_says_why():
    shapes = native_shapes("ours", "gqa")
    tensors = {name: np.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(Untranslatable, match=r"torch-mha cannot have.*fewer key/value heads"):
        convert(tensors, source="ours", target="torch-mha", heads=6)
    shapes = native_shapes("ours", "narrow")
    tensors = {name: np.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(Untranslatable, match="heads x head size must be the query's width"):
        convert(tensors, source="ours", target="torch-mha", heads=3)


def test_titles_are_names():
    found = [
        convert(torch_weights(), source=source, target=target, heads=3)
        for source, target in (
            ("torch-mha", "keras-jax-mha"),
            ("torch.nn.MultiheadAttention", "keras.layers.MultiHeadAttention"),
        )
    ]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])


# Files


@pytest.fixture
def checkpoint(tmp_path):
    """An attention of bfloat16 among other tensors, as checkpoints have it."""
    shapes = {name: array.shape for name, array in torch_weights().items()}
    mine = bits("BF16", shapes)
    tensors = {f"layers.0.attn.{name}": tensor for name, tensor in mine.items()}
    tensors |= {f"layers.1.attn.{name}": tensor for name, tensor in bits("F32", shapes).items()}
    tensors["layers.0.norm"] = Tensor("F8_E4M3", np.full(3, 0x7F, np.uint8))
    file = tmp_path / "in.safetensors"
    write(file, tensors, {"format": "pt", "who": "ünïcode"})
    return file, mine


def own(file, prefix=""):
    seen = look(file)
    names = [name for name in seen.header if name.startswith(prefix)]
    return {name.removeprefix(prefix): seen.read(name) for name in names}


def test_a_file_there_and_back(checkpoint, tmp_path):
    file, mine = checkpoint
    there, back = tmp_path / "flax.safetensors", tmp_path / "torch.safetensors"
    command = ["convert", "--from", "torch-mha", "--to", "flax-nnx", "--heads", "3", str(file)]
    assert main([*command, str(there), "--prefix", "layers.0.attn.", "--out-prefix", "a/"]) == 0
    assert all(name.startswith("a/") for name in look(there).header)
    shape = convert_file(there, back, source="flax-nnx", target="torch-mha", prefix="a/").shape
    assert (shape.heads, shape.head_size) == (3, 5)
    assert_same(own(back), mine)
    notes = json.loads(look(back).metadata.pop(NOTE))
    assert [(note["from"], note["to"]) for note in notes] == [
        ("torch-mha", "flax-nnx"),
        ("flax-nnx", "torch-mha"),
    ]
    assert {k: v for k, v in look(back).metadata.items() if k != NOTE} == {
        "format": "pt",
        "who": "ünïcode",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "flax.safetensors", "in.safetensors", "torch.safetensors",
    ]  # fmt: skip


def test_others_read_what_is_written(checkpoint, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    file, mine = checkpoint
    read = load_file(file)
    for name, tensor in mine.items():
        found = read[f"layers.0.attn.{name}"]
        assert found.dtype == torch.bfloat16
        assert found.view(torch.int16).numpy().tobytes() == tensor.bits.tobytes()
    other = tmp_path / "theirs.safetensors"
    save_file(read, other, {"a": "b"})
    assert_same(own(other, "layers.0.attn."), mine)


def refused(capsys, *arguments):
    """What the command prints: one line, exit code 2."""
    code = main(["convert", "--from", "torch-mha", "--to", "flax-nnx", *map(str, arguments)])
    told = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert not told.out
    assert told.err.startswith("mha-conformance: ")
    assert told.err.count("\n") == 1
    return told.err


def test_refused_files(checkpoint, tmp_path, capsys):
    file, _ = checkpoint
    out = tmp_path / "out.safetensors"
    before = sorted(tmp_path.iterdir())
    assert "No such file" in refused(capsys, tmp_path / "none.safetensors", out)
    for text in (b"", b"x" * 7, b"{}" * 50, b"\xff" * 100, file.read_bytes()[:-1]):
        broken = tmp_path / "broken"
        broken.write_bytes(text)
        told = refused(capsys, broken, out)
        assert "is no safetensors file" in told
        assert "save tensors with safetensors.torch.save_file(state_dict, path)" in told
        broken.unlink()
    (tmp_path / "empty").mkdir()
    assert "not one file *.safetensors but none" in refused(capsys, tmp_path / "empty", out)
    (tmp_path / "empty").rmdir()
    told = refused(capsys, file, out, "--heads", 3)
    assert "missing in_proj_weight" in told
    assert "try --prefix layers.0.attn. or layers.1.attn." in told
    told = refused(capsys, file, out, "--prefix", "layers.2.")
    assert "begins with 'layers.2.'" in told
    assert "layers.0.attn." in told
    told = refused(capsys, file, out, "--prefix", "layers.0.attn.")
    assert "--heads" in told
    prefix = ("--prefix", "layers.0.attn.", "--heads", 3)
    assert "cannot be written" in refused(capsys, file, tmp_path / "none" / "out", *prefix)
    assert sorted(tmp_path.iterdir()) == before


def test_a_width_that_the_target_cannot_have_is_told_with_the_file(tmp_path, capsys):
    widths = {"q": 8, "k": 6, "v": 4}
    tensors = {f"{name}_proj_weight": np.ones((8, width)) for name, width in widths.items()}
    tensors["out_proj.weight"] = np.ones((8, 8))
    file = tmp_path / "in.safetensors"
    pytest.importorskip("safetensors.numpy").save_file(tensors, file)
    told = refused(capsys, file, tmp_path / "out", "--heads", 2)
    assert f"{file}: flax-nnx cannot have these weights of torch-mha: key and value" in told
    assert "(here: query 8, key 6, value 4, output 8)" in told


@pytest.mark.sample(3)
@pytest.mark.parametrize("target", ["flax-nnx", "keras-jax-mha", "torch-mha"])
def test_weights_without_biases_say_how_to_build_the_target(tmp_path, capsys, target):
    file, command = tmp_path / "in", ["convert", "--from", "torch-mha", "--to", target]
    save_file = pytest.importorskip("safetensors.numpy").save_file
    for bias in (False, True):
        save_file(torch_weights(bias=bias), file)
        out = tmp_path / f"out-{bias}"
        assert main([*command, "--heads", "3", str(file), str(out)]) == ExitCode.OK
        option = "bias=False" if target == "torch-mha" else "use_bias=False"
        told = f"no biases: build {target} with {option}\n"
        assert capsys.readouterr().out.endswith(told) is not bias


def test_a_file_that_is_there_needs_force(checkpoint, tmp_path, capsys):
    file, mine = checkpoint
    before = file.read_bytes()
    prefix = ("--prefix", "layers.0.attn.", "--heads", "3")
    assert "--force" in refused(capsys, file, file, *prefix)
    assert file.read_bytes() == before
    # Who has the old file open goes on reading the old file.
    (tmp_path / "old").hardlink_to(file)
    # Onto itself, which is safe because the file is replaced as a whole.
    command = ["convert", "--from", "torch-mha", "--to", "flax-nnx", *prefix, "--force"]
    assert main([*command, str(file), str(file)]) == 0
    assert "query/kernel" in look(file).header
    assert (tmp_path / "old").read_bytes() == before
    out = tmp_path / "back.safetensors"
    convert_file(file, out, source="flax-nnx", target="torch-mha")
    assert_same(own(out), mine)


def test_nothing_is_left_of_a_file_that_cannot_be_written(checkpoint, tmp_path, monkeypatch):
    file, _ = checkpoint
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"before")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    asked = {"source": "torch-mha", "target": "flax-nnx", "heads": 3, "prefix": "layers.0.attn."}
    with pytest.raises(WrongTensors, match="No space left on device"):
        convert_file(file, out, **asked, force=True)
    assert out.read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors"]


def test_a_dtype_without_whole_bytes_is_refused_only_where_it_is_asked_for(tmp_path):
    header = {
        "w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
    }
    encoded = json.dumps(header).encode()
    file = tmp_path / "f4.safetensors"
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"\0\0")
    with pytest.raises(WrongTensors, match="F4"):
        convert_file(file, tmp_path / "out", source="torch-mha", target="flax-nnx")


def test_no_framework_is_imported():
    program = (
        "import sys, numpy as np\n"
        "from conformance.porting.conversion import convert\n"
        "w = {'in_proj_weight': np.zeros((12, 4)), 'out_proj.weight': np.zeros((4, 4))}\n"
        "convert(w, source='torch-mha', target='keras.layers.MultiHeadAttention', heads=2)\n"
        "print({'torch', 'jax', 'flax', 'keras', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


# In the frameworks themselves


def in_torch(file, inputs, heads):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    layer = torch.nn.MultiheadAttention(inputs.shape[-1], heads, batch_first=True)
    layer.load_state_dict(load_file(file))
    x = torch.tensor(inputs)
    return layer(x, x, x, need_weights=False)[0].detach().numpy()


def in_flax(file, inputs, heads):
    linen = pytest.importorskip("flax.linen")
    from safetensors.numpy import load_file

    tree: dict[str, dict[str, np.ndarray]] = {}
    for name, array in load_file(file).items():
        module, leaf = name.split("/")
        tree.setdefault(module, {})[leaf] = array
    layer = linen.MultiHeadDotProductAttention(heads, deterministic=True)
    return np.asarray(layer.apply({"params": tree}, inputs))


def in_keras(file, inputs, heads):
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    keras = pytest.importorskip("keras")
    from safetensors.numpy import load_file

    layer = keras.layers.MultiHeadAttention(heads, inputs.shape[-1] // heads)
    layer.build(inputs.shape, inputs.shape, inputs.shape)
    tensors = load_file(file)
    layer.set_weights([tensors[variable.path.split("/", 1)[1]] for variable in layer.weights])
    return keras.ops.convert_to_numpy(layer(inputs, inputs))


@pytest.mark.night
def test_three_frameworks_and_back_natively(tmp_path):
    """Equal outputs at each stop, within the noise of the definition; equal bits at the end."""
    (case,) = find_cases("plain/no-mask/self")
    problem = case.problem("float32")
    shape, expectation = problem.shape, expect(problem)
    inputs = problem.query.astype(np.float32)
    first = LAYERS["torch-mha"].table(shape).load(problem.weights)
    tensors = {name: Tensor.of(name, a.astype(np.float32)) for name, a in first.items()}
    files = [tmp_path / f"{i}.safetensors" for i in range(5)]
    write(files[0], tensors, {})
    stops = (
        ("torch-mha", in_torch),
        ("flax-linen", in_flax),
        ("keras-tensorflow-mha", in_keras),
        ("torch-mha", in_torch),
    )

    def fits(output):
        array, noise = expectation.arrays["output"], expectation.sigma["output"]
        got = output.astype(np.float64)
        return compare("output", got, array, noise, expectation.underflow).fits

    for i, (name, call) in enumerate(stops):
        assert fits(call(files[i], inputs, shape.heads)), name
        if i < 3:
            convert_file(files[i], files[i + 1], source=name, target=stops[i + 1][0],
                         heads=shape.heads)  # fmt: skip
    assert_same(own(files[3]), tensors)
    # With the heads cut elsewhere the numbers are the same, and the attention is not.
    convert_file(files[0], files[4], source="torch-mha", target="flax-linen", heads=6)
    assert not fits(in_flax(files[4], inputs, 6))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("llama-model-eager", ["texts only: llama-model-eager takes no positions on several axes"]),
        (
            "qwen3-vl-sdpa",
            [
                "texts only: the sections of qwen2-5-vl-eager are side by side, those of "
                "qwen3-vl-sdpa interleaved"
            ],
        ),
        ("qwen2-5-vl-sdpa", []),
    ],
)
def test_it_is_told_where_images_are_turned_another_way(target, told):
    source, other = (load(name) for name in ("qwen2-5-vl-eager", target))
    assert [*_only_texts(source, other)] == told
    assert [*_only_texts(load("llama-model-eager"), other)] == []


def test_texts_only_is_among_the_notes():
    names = ("qwen2-5-vl-eager", "llama-model-eager")
    source, target = (load(name) for name in names)
    noted = _turns(source, target, 8, Meaning(), sure=False).notes
    assert noted[1:] == ("texts only: llama-model-eager takes no positions on several axes",)
