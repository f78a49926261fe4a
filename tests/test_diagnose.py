"""Arrays alone: what is noise, what is not, and which mistake explains it, told from files."""

from __future__ import annotations

import importlib
import json
import math
import re
import tracemalloc
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

import conformance
from conformance.arrays import (
    configuration,
    diagnosis,
    files,
    pairs,
    ports,
    recovery,
    search,
    tiles,
)
from conformance.arrays.between import against
from conformance.arrays.diagnosis import Diagnosis, diagnose
from conformance.arrays.given import (
    Given,
    given_layout,
    laid_out,
    merged,
    readings,
    separate,
)
from conformance.arrays.layers import diagnose_layer
from conformance.arrays.noise import of_statistic
from conformance.arrays.parts import every_hypothesis, joining_queries, numbered
from conformance.cases.casefile import Tensor, write
from conformance.causes.hypothesis import Maker
from conformance.cli import main
from conformance.definition.arithmetic import is_identity
from conformance.definition.dtypes import BFLOAT16, dtype_of
from conformance.definition.expectation import solve
from conformance.definition.problem import Norm, Rotary
from conformance.definition.rotary import RotaryScaling
from conformance.definition.statistics import LOG_SUM_EXP
from conformance.errors import (
    Ambiguous,
    BadArrays,
    ConformanceError,
    ExitCode,
    UnknownName,
    WrongShape,
    WrongTensors,
)
from conformance.records.findings import Phrase

# An attention that has nothing of the suite, in float32


@pytest.fixture
def one_mistake(monkeypatch):
    """Seek no two mistakes, which takes most of the time where nothing explains the output."""
    monkeypatch.setattr(diagnosis.Judged, "pairs", [])


@pytest.fixture(params=["one mistake", pytest.param("two mistakes", marks=pytest.mark.night)])
def sought(request):
    """Seek one mistake in the first tier, and two in the night's."""
    if request.param == "one mistake":
        request.getfixturevalue("one_mistake")


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=None,
    mask=None,
    bias=None,
    axis=-1,
    cap=None,
    cap_last=False,
    sinks=None,
    base_2=False,
):
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    logits = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1] ** -0.5 if scale is None else scale)
    if cap and not cap_last:
        logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
    if bias is not None:
        logits = logits + bias
    if causal is not None:
        mask = np.tri(*logits.shape[-2:], causal, dtype=bool)
    if mask is not None:
        logits = np.where(mask, logits, np.float32(-np.inf))
    if cap_last:
        logits = np.float32(cap) * np.tanh(logits / np.float32(cap))
    peak = logits.max(axis=axis, keepdims=True)
    if sinks is not None:
        peak = np.maximum(peak, sinks[None, :, None, None])
    with np.errstate(invalid="ignore"):
        powers = (np.exp2 if base_2 else np.exp)(logits - peak)
    total = powers.sum(axis=axis, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[None, :, None, None] - peak)
    return (powers / total) @ v


def drawn(batch=2, heads=4, kv_heads=None, queries=12, keys=None, size=8, seed=0):
    random = np.random.default_rng(seed)

    def one(count, length):
        return random.standard_normal((batch, count, length, size), dtype=np.float32)

    kv_heads = kv_heads or heads
    keys = keys or queries
    return one(heads, queries), one(kv_heads, keys), one(kv_heads, keys)


def rotated(x, *, base=10000.0, pairs="halves", start=0):
    size, length = x.shape[-1], x.shape[-2]
    angles = np.arange(start, start + length)[:, None] * base ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = slice(0, size, 2), slice(1, size, 2)
    if pairs == "halves":
        first, second = slice(size // 2), slice(size // 2, size)
    turned = x.copy()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned


def normed(x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + np.float32(1e-6))


def in_bfloat16(x):
    return BFLOAT16.round(x).astype(np.float32)


def in_float8(x, *, scaled=False):
    """Numbers of float8_e4m3fn, times a scale for each head of a batch entry if `scaled`."""
    unit = np.abs(x).max(axis=(2, 3), keepdims=True) / np.float32(448) if scaled else np.float32(1)
    spacing = np.float32(2) ** (np.maximum(np.floor(np.log2(np.abs(x / unit))), -6) - 3)
    return np.rint(x / unit / spacing) * spacing * unit


def softmax(x):
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


# Stories: what a file holds, and the mistake that it shows

Q, K, V = drawn()
QK = Q @ K.swapaxes(-1, -2) * np.float32(8**-0.5)
"""The logits of these heads."""
MASK = np.random.default_rng(1).random((2, 1, 1, 12)) < 0.7
MASK[..., 0] = True
SINKS = np.float32([0.5, -1.0, 2.0, 0.0])
GQ, GK, GV = drawn(kv_heads=2)
LQ, LK, LV = drawn(queries=5, keys=12)
WIDE = drawn(queries=20)
CORNERS = {"top-left": 0, "bottom-right": 7}
"""What `attention` takes as `causal` for LQ and LK, by the alignment."""
LARGE = 4 * Q
BIAS = np.random.default_rng(2).standard_normal((1, 4, 12, 12)).astype(np.float32)


def lse(q, k, scale=8**-0.5):
    logits = q.astype(np.float64) @ k.swapaxes(-1, -2) * scale
    return np.log(np.exp(logits).sum(axis=-1))


def largest(q, k, scale=8**-0.5, *, mask=True, bias=0.0):
    """The largest logit of each query, in float32."""
    logits = np.where(mask, np.float32(scale) * (q @ k.swapaxes(-1, -2)) + bias, -np.inf)
    return logits.max(axis=-1).astype(np.float32)


def stale(array, at):
    written = array.copy()
    written[:, :, at:] = 0
    return written


def of(q, k, v, output, **others):
    return {"query": q, "key": k, "value": v, "output": output, **others}


STORIES = {
    "scale of another head size": (
        of(Q, K, V, attention(Q, K, V, scale=1 / math.sqrt(10))),
        "scale.of-size",
        {"size": 10},
    ),
    "scale forgotten": (of(Q, K, V, attention(Q, K, V, scale=1.0)), "scale.missing", {}),
    "scale without a root": (
        of(Q, K, V, attention(Q, K, V, scale=1 / 8)),
        "scale.by-head-size",
        {},
    ),
    "mask inverted": (
        of(Q, K, V, attention(Q, K, V, mask=~MASK), mask=MASK, mask_true="attends"),
        "mask.inverted",
        {},
    ),
    "mask forgotten": (
        of(Q, K, V, attention(Q, K, V), mask=MASK, mask_true="attends"),
        "mask.not-applied",
        {},
    ),
    "causal mask at the wrong corner": (
        of(LQ, LK, LV, attention(LQ, LK, LV, causal=0), causal="bottom-right"),
        "causal.aligned",
        {"alignment": "top-left"},
    ),
    "causal mask sees the next": (
        of(Q, K, V, attention(Q, K, V, causal=1), causal="true"),
        "causal.sees-next-key",
        {},
    ),
    "causal mask that was not told": (
        of(Q, K, V, attention(Q, K, V, causal=0)),
        "untold.causal",
        {},
    ),
    "window one too short": (
        of(Q, K, V, attention(Q, K, V, mask=np.tri(12) - np.tri(12, k=-3) > 0), window=4),
        "window.one-fewer-before",
        {},
    ),
    "window of another convention": (
        of(Q, K, V, attention(Q, K, V, mask=np.tri(12) - np.tri(12, k=-5) > 0), window=4),
        "window.one-more-before",
        {},
    ),
    "softmax over queries": (
        of(Q, K, V, attention(Q, K, V, axis=-2)),
        "softmax.over-queries",
        {},
    ),
    "softmax over heads": (of(Q, K, V, attention(Q, K, V, axis=1)), "softmax.over-heads", {}),
    "softmax in base 2": (of(Q, K, V, attention(Q, K, V, base_2=True)), "softmax.base-2", {}),
    "heads in another order": (
        of(Q, K, V, attention(Q, K, V)[:, [1, 0, 3, 2]]),
        "output.permuted",
        {"axis": "heads", "order": [1, 0, 3, 2]},
    ),
    "heads merged by reshape": (
        of(Q, K, V, attention(Q, K, V).reshape(2, 12, 4, 8).transpose(0, 2, 1, 3)),
        "heads.merged-by-reshape",
        {},
    ),
    "key/value heads tiled": (
        of(
            GQ,
            GK,
            GV,
            attention(GQ, np.tile(GK, (1, 2, 1, 1)), np.tile(GV, (1, 2, 1, 1))),
        ),
        "heads.tiled",
        {},
    ),
    "first key/value head for all": (
        of(GQ, GK, GV, attention(GQ, GK[:, :1], GV[:, :1])),
        "heads.first-key-value-for-all",
        {},
    ),
    "cap after the mask": (
        of(
            LARGE,
            K,
            V,
            attention(LARGE, K, V, mask=MASK, cap=5, cap_last=True),
            mask=MASK,
            mask_true="attends",
            soft_cap=5.0,
        ),
        "soft-cap.after-mask",
        {},
    ),
    "cap forgotten": (
        of(LARGE, K, V, attention(LARGE, K, V), soft_cap=5.0),
        "soft-cap.not-applied",
        {},
    ),
    "sink forgotten": (
        of(Q, K, V, attention(Q, K, V), sinks=SINKS),
        "sinks.not-applied",
        {},
    ),
    "rotary pairs of Meta for those of Hugging Face": (
        of(
            Q,
            K,
            V,
            attention(rotated(Q, pairs="interleaved"), rotated(K, pairs="interleaved"), V),
            **{"rotary.pairs": "halves", "rotary.base": 10000.0},
        ),
        "rotary.pairs",
        {"pairs": "interleaved"},
    ),
    "rotary base of another model": (
        of(
            Q,
            K,
            V,
            attention(rotated(Q, base=500000.0), rotated(K, base=500000.0), V),
            **{"rotary.pairs": "halves", "rotary.base": 10000.0},
        ),
        "rotary.base",
        {"base": 500000.0},
    ),
    "rotary base of no known model": (
        of(
            Q,
            K,
            V,
            attention(rotated(Q, base=12345.0), rotated(K, base=12345.0), V),
            **{"rotary.pairs": "halves", "rotary.base": 10000.0},
        ),
        "rotary.base",
        {},
    ),
    "output written by the strides of another layout": (
        of(Q, K, V, attention(Q, K, V).transpose(2, 0, 1, 3).reshape(2, 12, 4, 8).swapaxes(1, 2)),
        "output.strides",
        {"layout": "length batch heads head"},
    ),
    "rotary embedding that was not told": (
        of(Q, K, V, attention(rotated(Q), rotated(K), V)),
        "untold.rotary",
        {"pairs": "halves", "base": 10000.0},
    ),
    "queries rotated from 0 beside a cache": (
        of(
            LQ,
            LK,
            LV,
            attention(rotated(LQ), rotated(LK), LV, causal=7),
            causal="bottom-right",
            **{"rotary.pairs": "halves", "rotary.base": 10000.0},
        ),
        "rotary.queries-from-0",
        {},
    ),
    "norm of queries and keys forgotten": (
        of(Q, K, V, attention(Q, K, V), **{"norm.epsilon": 1e-6}),
        "norm.not-applied",
        {},
    ),
    "norm that was not told": (
        of(Q, K, V, attention(normed(Q), normed(K), V)),
        "untold.norm",
        {},
    ),
    "cache read before it is written": (
        of(LQ, LK, LV, attention(LQ, stale(LK, 11), stale(LV, 11))),
        "cache.rows-not-written",
        {"of": ["key", "value"]},
    ),
    "last row of the cache is the one before": (
        of(
            LQ,
            LK,
            LV,
            attention(LQ, LK[:, :, [*range(11), 10]], LV[:, :, [*range(11), 10]]),
        ),
        "cache.last-row-repeats",
        {"of": ["key", "value"]},
    ),
    "cache of the neighbouring entry": (
        of(Q, K, V, attention(Q, K[::-1], V[::-1])),
        "cache.of-next-entry",
        {"of": ["key", "value"]},
    ),
    "keys reshaped, not transposed": (
        of(Q, K, V, attention(Q, K.reshape(2, 4, 8, 12).swapaxes(-1, -2), V)),
        "key.reshaped",
        {},
    ),
    "query and key exchanged": (
        of(Q, K, V, attention(K, Q, V)),
        "inputs.exchanged",
        {"one": "query", "other": "key"},
    ),
    "attention among heads": (
        of(
            Q,
            K,
            V,
            attention(*(x.transpose(0, 2, 1, 3) for x in (Q, K, V))).transpose(0, 2, 1, 3),
            layout="batch heads length head",
        ),
        "layout.heads-for-tokens",
        {},
    ),
    "bias forgotten": (of(Q, K, V, attention(Q, K, V), bias=BIAS), "bias.not-applied", {}),
    "log-sum-exp in base 2": (
        of(Q, K, V, attention(Q, K, V), log_sum_exp=lse(Q, K) / np.log(2)),
        "lse.base-2",
        {},
    ),
    "log-sum-exp without the scale": (
        of(Q, K, V, attention(Q, K, V), lse=lse(Q, K, 1.0)),
        "lse.without-scale",
        {},
    ),
    "largest logit over masked keys": (
        of(Q, K, V, attention(Q, K, V, mask=MASK), mask=MASK[:, 0, 0], max_logit=largest(Q, K)),
        "largest.without-mask",
        {},
    ),
    "largest logit without the scale": (
        of(Q, K, V, attention(Q, K, V), max_score=largest(Q, K, 1.0)),
        "largest.without-scale",
        {},
    ),
    "largest logit before the bias": (
        of(Q, K, V, attention(Q, K, V, bias=BIAS), bias=BIAS, max_logit=largest(Q, K)),
        "largest.without-bias",
        {},
    ),
    "largest logit in base 2": (
        of(Q, K, V, attention(Q, K, V), max_logits=largest(Q, K, 8**-0.5 / np.log(2))),
        "largest.base-2",
        {},
    ),
    "largest logit of the first keys": (
        of(Q, K, V, attention(Q, K, V), max_logit=largest(Q, K[:, :, :8])),
        "largest.of-first-keys",
        {"first": 8, "of": 12},
    ),
    "largest logit with a sink": (
        of(
            *(Q, K, V, attention(Q, K, V, sinks=SINKS)),
            sinks=SINKS,
            max_logit=np.maximum(largest(Q, K), SINKS[:, None]),
        ),
        "largest.with-sink",
        {},
    ),
    "largest logit that is never less than 0": (
        of(
            *(Q, K, V, attention(Q, K, V, causal=0)),
            causal=True,
            max_logit=np.maximum(largest(Q, K, mask=np.tri(12, dtype=bool)), 0),
        ),
        "largest.clamped",
        {},
    ),
    "largest logit of the previous query": (
        of(Q, K, V, attention(Q, K, V), max_logit=np.roll(largest(Q, K), 1, axis=-1)),
        "largest.of-previous-query",
        {},
    ),
    "one head twice as large": (
        of(Q, K, V, attention(Q, K, V) * np.float32([1, 1, 2, 1])[:, None, None]),
        "output.factor",
        {"factor": 2.0},
    ),
    "cache of keys and values in bfloat16": (
        of(Q, K, V, attention(Q, in_bfloat16(K), in_bfloat16(V))),
        "precision.stored-rounded",
        {"to": "bfloat16"},
    ),
    "cache of keys and values in float8": (
        of(Q, K, V, attention(Q, in_float8(K), in_float8(V))),
        "precision.stored-rounded",
        {"to": "float8_e4m3fn"},
    ),
    "cache of keys and values in float8 with scales": (
        of(Q, K, V, attention(Q, in_float8(K, scaled=True), in_float8(V, scaled=True))),
        "precision.stored-scaled",
        {"to": "float8_e4m3fn", "over": Phrase("scaled.head")},
    ),
    "softmax taken twice": (of(Q, K, V, softmax(softmax(QK)) @ V), "softmax.twice", {}),
    "exponentials that nothing divides": (
        of(Q, K, V, np.exp(QK) @ V),
        "softmax.not-divided",
        {},
    ),
    "output rounded to bfloat16 on the way": (
        of(Q, K, V, in_bfloat16(attention(Q, K, V)), dtype="float32"),
        "precision.rounded",
        {},
    ),
}


EXAMPLES = {
    "no-scale": "scale.missing",
    "tiled-heads": "heads.tiled",
    "softmax-over-queries": "softmax.over-queries",
    "causal-off-by-one": "causal.sees-next-key",
    "inverted-mask": "mask.inverted",
    "heads-in-another-order": "output.permuted",
    "right": "",
}
DUMPS = Path(__file__).parent.parent / "docs" / "examples" / "dumps"


@pytest.mark.parametrize("path", sorted(DUMPS.glob("*.npz")), ids=lambda path: path.stem)
def test_the_dumps_of_the_documentation_tell_their_mistakes(path):
    found = diagnose(**files.arguments(*files.read([path])))
    assert (found.cause.id if found.cause else "") == EXAMPLES[path.stem]


def stored(folder, content, how):
    """A dump of one of the kinds that are read."""
    path = folder / f"dump.{how}"
    if how == "npz":
        np.savez(path, **content)
        return path
    arrays = {n: a for n, a in content.items() if isinstance(a, np.ndarray)}
    texts = {n: a for n, a in content.items() if n not in arrays}
    if how == "safetensors":
        tensors = {
            n: Tensor.of(n, a.astype(np.uint8) if a.dtype == bool else a) for n, a in arrays.items()
        }
        write(path, tensors, {n: str(text) for n, text in texts.items()})
        return path
    path.mkdir()
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    (path / "options.json").write_text(json.dumps(texts))
    return path


@pytest.mark.sample(5)
@pytest.mark.parametrize(("number", "story"), [*enumerate(STORIES)], ids=[*STORIES])
def test_a_file_tells_its_mistake(tmp_path, number, story):
    content, cause, about = STORIES[story]
    path = stored(tmp_path, content, ("npz", "safetensors", "folder")[number % 3])
    found = diagnose(**files.arguments(*files.read([path])))
    assert found.verdict == "deviates"
    assert cause in [it.id for it in found.causes], str(found)
    named = next(it for it in found.causes if it.id == cause)
    assert about.items() <= named.arguments.items()
    assert len({it.id for it in found.causes}) <= 3, str(found)
    assert named.text in str(found)


LAYOUT = "batch length heads head"


def turned(*arrays):
    return [array.transpose(0, 2, 1, 3) for array in arrays]


# Public threads, with numbers of our own: each is answered as it was solved in the end


def answered(tmp_path, **content):
    path = stored(tmp_path, content, "npz")
    return diagnose(**files.arguments(*files.read([path])))


@pytest.mark.parametrize("window", [np.array([4, 0]), np.array(5), "4,0"])
def test_both_sides_of_a_window_are_in_a_file(tmp_path, window):
    seen = np.tri(12) - np.tri(12, k=-5) > 0
    found = answered(tmp_path, **of(Q, K, V, attention(Q, K, V, mask=seen), window=window))
    assert found.verdict == "noise"


def test_a_window_that_is_handed_to_flash_attention(tmp_path):
    """https://github.com/huggingface/transformers/issues/39408: `window_size` excludes the key."""
    seen = np.tri(12) - np.tri(12, k=-5) > 0
    found = answered(tmp_path, **of(Q, K, V, attention(Q, K, V, mask=seen), window=4))
    assert [it.id for it in found.causes] == ["window.one-more-before"]


def test_a_fallback_that_gets_no_scale(tmp_path):
    """https://github.com/mlc-ai/mlc-llm/pull/3426: `sm_scale` is 1 on one path."""
    found = answered(tmp_path, **of(Q, K, V, attention(Q, K, V, scale=1.0)))
    assert [it.id for it in found.causes] == ["scale.missing"]


def test_a_log_sum_exp_that_is_converted_twice(tmp_path):
    """https://github.com/pytorch/pytorch/issues/181645: one backend's is natural already."""
    once = lse(Q, K) * np.log(2)
    found = answered(tmp_path, **of(Q, K, V, attention(Q, K, V), lse=once.astype(np.float32)))
    assert [it.id for it in found.causes] == ["lse.natural-taken-for-base-2"]


def test_heads_where_tokens_are_expected(tmp_path):
    """https://github.com/nshepperd/flash_attn_jax/issues/3: [n h l d] for [n l h d]."""
    q, k, v = (np.float16(x).astype(np.float32) for x in (Q, K, V))
    swapped = attention(*turned(q, k, v), causal=0)
    output = np.float16(turned(swapped)[0])
    halves = map(np.float16, (q, k, v))
    layout = {"layout": "batch heads length head", "causal": "top-left"}
    found = answered(tmp_path, **of(*halves, output, **layout))
    assert "layout.heads-for-tokens" in [it.id for it in found.causes]


def test_a_causal_mask_from_the_other_corner(tmp_path):
    """https://github.com/pytorch/executorch/issues/22426: top-left was meant, not bottom-right."""
    q, k, v = drawn(batch=1, queries=1, keys=16)
    found = answered(tmp_path, **of(q, k, v, attention(q, k, v, causal=15), causal="top-left"))
    assert found.verdict == "deviates"
    assert "causal.aligned" in [it.id for it in found.causes]


def test_a_mask_that_is_tiled_over_heads(tmp_path):
    """https://github.com/line/lighthouse/pull/77: `repeat` for `repeat_interleave`."""
    full = np.random.default_rng(6).random((2, 12, 12)) < 0.7
    full[..., 0] = True
    tiled = np.tile(full, (4, 1, 1)).reshape(2, 4, 12, 12)
    output = attention(Q, K, V, mask=tiled)
    told = {"mask": full[:, None], "mask_true": "attends"}
    found = answered(tmp_path, **of(Q, K, V, output, **told))
    assert "mask.tiled-over-heads" in [it.id for it in found.causes], str(found)


def test_a_mask_of_future_tokens_for_past_ones(tmp_path):
    """https://github.com/rasbt/LLMs-from-scratch/issues/1061: True means "attends" there."""
    past = np.tri(12, dtype=bool)
    told = {"mask": past, "mask_true": "attends"}
    found = answered(tmp_path, **of(Q, K, V, attention(Q, K, V, mask=~past), **told))
    assert "mask.inverted" in [it.id for it in found.causes], str(found)


SPANS = np.array([[0, 1, 1, 1, 0, 0, 2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 0, 2, 2, 0, 3, 3, 0, 0]])
TREE = np.array([[-1, 0, 0, 1, 2], [-1, -1, 1, 0, 2]])


def in_spans(ids):
    """What a query sees: what is before it, and its own span."""
    same = (ids[:, :, None] == ids[:, None]) & (ids[:, None] > 0)
    return (np.tri(12, dtype=bool) | same)[:, None]


def in_tree(parents, generations=9):
    """What a drafted token sees: the cache, itself, and its ancestors."""
    seen = np.zeros((*parents.shape, 7 + parents.shape[1]), bool)
    seen[:, :, :7] = True
    for entry, token in np.ndindex(parents.shape):
        at, left = token, generations
        while at >= 0 and left >= 0:
            seen[entry, token, 7 + at] = True
            at, left = parents[entry, at], left - 1
    return seen[:, None]


def in_chunks(offset=0, queries=12):
    at, past = np.arange(queries)[:, None] + offset, np.arange(12)
    return (at // 5 == past // 5) & (past <= at)


def in_window(window, dilation=1, tokens=None, *, rows=True, columns=True, still=False):
    """What a query sees: keys in steps of a dilation, and to and from global tokens all of them."""
    far = np.arange(12) - np.arange(12)[:, None]
    seen = (abs(far) <= window) & (far % dilation == 0)
    if tokens is None:
        return seen
    of_global = (tokens[:, :, None] > 0) & rows | (tokens[:, None] > 0) & columns
    if still:
        of_global = of_global & (abs(far) <= window)
    return (seen | of_global)[:, None]


GLOBAL = np.zeros((2, 12), int)
GLOBAL[0, [0, 7]] = GLOBAL[1, 4] = 1

STRUCTURES = {
    "dilation": of(*(Q, K, V, attention(Q, K, V, mask=in_window(6, 3))), dilation=3, window=(6, 6)),
    "global_tokens": of(
        *(Q, K, V, attention(Q, K, V, mask=in_window(6, 3, GLOBAL))),
        dilation=3,
        window=(6, 6),
        global_tokens=GLOBAL,
    ),
    "chunk": of(Q, K, V, attention(Q, K, V, mask=in_chunks()), chunk=5, causal=True),
    "chunk of last queries": of(
        *(LQ, LK, LV, attention(LQ, LK, LV, mask=in_chunks(7, 5))),
        chunk=5,
        causal="bottom-right",
    ),
    "spans": of(Q, K, V, attention(Q, K, V, mask=in_spans(SPANS)), spans=SPANS, causal=True),
    "spans of all entries": of(
        *(Q, K, V, attention(Q, K, V, mask=in_spans(SPANS[:1]))), spans=SPANS[0], causal=True
    ),
    "tree": of(LQ, LK, LV, attention(LQ, LK, LV, mask=in_tree(TREE)), tree=TREE),
}
"""What is right with a mask that a structure tells."""

HONEST = {
    **STRUCTURES,
    "plain": of(Q, K, V, attention(Q, K, V)),
    "grouped": of(GQ, GK, GV, attention(GQ, GK, GV)),
    "causal": of(LQ, LK, LV, attention(LQ, LK, LV, causal=7), causal=True),
    "mask": of(Q, K, V, attention(Q, K, V, mask=MASK), mask=MASK[:, 0, 0]),
    "blocking mask": of(Q, K, V, attention(Q, K, V, mask=MASK), mask=~MASK),
    "mask of numbers": of(
        Q, K, V, attention(Q, K, V, mask=MASK), mask=np.where(MASK, 0, -1e9).astype(np.float32)
    ),
    "bias": of(Q, K, V, attention(Q, K, V, bias=BIAS), bias=BIAS),
    "cap": of(LARGE, K, V, attention(LARGE, K, V, cap=5), soft_cap=5.0),
    "sinks": of(Q, K, V, attention(Q, K, V, sinks=SINKS), sinks=SINKS),
    "window": of(Q, K, V, attention(Q, K, V, mask=np.tri(12) - np.tri(12, k=-4) > 0), window=4),
    "rotary": of(Q, K, V, attention(rotated(Q), rotated(K), V), rotary={"base": 10000.0}),
    "norm": of(Q, K, V, attention(normed(Q), normed(K), V), norm={"epsilon": 1e-6}),
    "log-sum-exp": of(Q, K, V, attention(Q, K, V), log_sum_exp=lse(Q, K)),
    "largest logit": of(Q, K, V, attention(Q, K, V), max_logit=largest(Q, K)),
    "both": of(
        Q, K, V, attention(Q, K, V), log_sum_exp=lse(Q, K), max_logit=largest(Q, K)[..., None]
    ),
    "largest logit of the keys that are seen": of(
        *(Q, K, V, attention(Q, K, V, mask=MASK)),
        mask=MASK[:, 0, 0],
        max_logit=largest(Q, K, mask=MASK).transpose(0, 2, 1),
    ),
    "largest logit beside a sink": of(
        Q, K, V, attention(Q, K, V, sinks=SINKS), sinks=SINKS, max_logit=largest(Q, K)
    ),
    "largest logit of grouped heads": of(
        *(GQ, GK, GV, attention(GQ, GK, GV)),
        max_logit=largest(GQ, np.repeat(GK, 2, axis=1)),
    ),
    "bfloat16": of(
        *map(in_bfloat16, (Q, K, V)), in_bfloat16(attention(*map(in_bfloat16, (Q, K, V))))
    ),
    "scale": of(Q, K, V, attention(Q, K, V, scale=0.2), scale=0.2),
}


@pytest.mark.parametrize("name", HONEST)
def test_what_is_right_is_noise_and_gets_no_cause(name):
    found = diagnose(**HONEST[name])
    assert found.verdict == "noise", str(found)
    assert not found.causes


WRONG_STRUCTURES = {
    "chunk.not-applied": ("chunk", attention(Q, K, V, causal=0)),
    "chunk.as-window": (
        "chunk",
        attention(Q, K, V, mask=np.tri(12, dtype=bool) & ~np.tri(12, k=-5, dtype=bool)),
    ),
    "chunk.from-first-query": (
        "chunk of last queries",
        attention(
            *(LQ, LK, LV),
            mask=(np.arange(5)[:, None] // 5 == np.arange(-7, 5) // 5) & np.tri(5, 12, 7, bool),
        ),
    ),
    "dilation.not-applied": ("dilation", attention(Q, K, V, mask=in_window(6))),
    "dilation.of": ("dilation", attention(Q, K, V, mask=in_window(6, 4))),
    "dilation.window-divided": ("dilation", attention(Q, K, V, mask=in_window(2, 3))),
    "dilation.from-block": (
        "dilation",
        attention(
            *(Q, K, V),
            mask=in_window(6) & ((np.arange(12) - np.arange(12)[:, None] // 4 * 4) % 3 == 0),
        ),
    ),
    "global.not-applied": ("global_tokens", attention(Q, K, V, mask=in_window(6, 3))),
    "global.rows-only": (
        "global_tokens",
        attention(Q, K, V, mask=in_window(6, 3, GLOBAL, columns=False)),
    ),
    "global.columns-only": (
        "global_tokens",
        attention(Q, K, V, mask=in_window(6, 3, GLOBAL, rows=False)),
    ),
    "global.limited-by-window": (
        "global_tokens",
        attention(Q, K, V, mask=in_window(6, 3, GLOBAL, still=True)),
    ),
    "global.of-first-entry": (
        "global_tokens",
        attention(Q, K, V, mask=in_window(6, 3, GLOBAL[:1])),
    ),
    "global.counted-twice": (
        "global_tokens",
        attention(
            *(Q, K, V),
            mask=in_window(6, 3, GLOBAL),
            bias=np.where(in_window(6, 3) & (GLOBAL == 0)[:, None, :, None], np.log(2), 0)
            * GLOBAL[:, None, None],
        ),
    ),
    "spans.not-applied": ("spans", attention(Q, K, V, causal=0)),
    "spans.of-any-id": ("spans", attention(Q, K, V, mask=in_spans(1 * (SPANS > 0)))),
    "spans.of-first-entry": ("spans", attention(Q, K, V, mask=in_spans(SPANS[:1]))),
    "tree.as-chain": ("tree", attention(LQ, LK, LV, causal=7)),
    "tree.generations": ("tree", attention(LQ, LK, LV, mask=in_tree(TREE, 1))),
    "tree.of-first-entry": ("tree", attention(LQ, LK, LV, mask=in_tree(TREE[:1]))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("cause", WRONG_STRUCTURES)
def test_a_structure_that_is_applied_wrongly_is_told(cause):
    right, output = WRONG_STRUCTURES[cause]
    found = diagnose(**{**STRUCTURES[right], "output": output})
    assert cause in [it.id for it in found.causes], str(found)


@pytest.mark.sample(4)
@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize(
    "cause",
    ["chunk.not-applied", "spans.not-applied", "dilation.not-applied", "global.columns-only"],
)
def test_a_structure_of_a_long_output_is_told(cause):
    right, output = WRONG_STRUCTURES[cause]
    told = {**STRUCTURES[right], "output": output, "layout": "batch heads length head"}
    found = diagnose(**told)
    assert found.verdict == "deviates"
    assert cause in [it.id for it in found.causes], str(found)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"spans": SPANS[:, :5]}, "spans has shape [2, 5], wanted [2, 12]"),
        ({"spans": -SPANS}, "ids are at least 0"),
        ({"tree": np.array([1, 0, 1, 2, 3])}, "tree has shape [5], wanted [2, 12]"),
        ({"tree": np.arange(12)}, "a parent that is no earlier query"),
        ({"chunk": 0}, "chunk is 0; it is at least 1"),
        ({"dilation": 0}, "dilation is 0; it is at least 1, and None means no dilation"),
        ({"global_tokens": 2 * GLOBAL}, "holds 2; 1 is a global token, and 0 is another one"),
        ({"global_tokens": GLOBAL[:, :5]}, "global_tokens has shape [2, 5], wanted [2, 12]"),
    ],
)
def test_a_structure_that_does_not_fit_is_an_error_of_one_line(told, message):
    with pytest.raises(ConformanceError, match=re.escape(message)):
        diagnose(**HONEST["plain"], **told)


def test_global_tokens_may_be_booleans():
    told = {**STRUCTURES["global_tokens"], "global_tokens": GLOBAL > 0}
    assert diagnose(**told).verdict == "noise"


def test_structures_are_read_from_files(tmp_path):
    for name, renamed in (
        ("spans", "span_ids"),
        ("tree", "parents"),
        ("chunk", "chunk"),
        ("dilation", "dilation"),
        ("global_tokens", "global_attention_mask"),
    ):
        content = dict(STRUCTURES[name])
        causal = content.pop("causal", None)
        content[renamed] = content.pop(name)
        if "window" in content:
            content["window"] = "6,6"
        found = answered(tmp_path, **content, **({"causal": "bottom-right"} if causal else {}))
        assert found.verdict == "noise", str(found)


@pytest.mark.usefixtures("one_mistake")
def test_a_dilation_is_told_on_the_command_line(tmp_path, capsys):
    dump = {name: STRUCTURES["dilation"][name] for name in ("query", "key", "value", "output")}
    np.savez(tmp_path / "dump.npz", **dump)
    layout = ["--layout", "batch heads length head"]
    told = ["diagnose", str(tmp_path / "dump.npz"), "--window", "6,6", *layout]
    assert main([*told, "--dilation", "3"]) == ExitCode.OK
    assert main(told) == ExitCode.DEVIATES
    assert main([*told, "--dilation", "0"]) == ExitCode.USAGE
    assert "dilation is 0; it is at least 1" in capsys.readouterr().err


def test_two_readings_of_a_mask_that_fit_are_told():
    found = diagnose(**HONEST["blocking mask"])
    assert "reading.mask-blocks" in [it.id for it in found.assumed]
    found = diagnose(**of(LQ, LK, LV, attention(LQ, LK, LV, causal=0), causal=True))
    assert "causal mask aligned top-left" in [it.text for it in found.assumed]


@pytest.mark.parametrize("every", [True, False])
def test_a_mask_is_not_read_as_one_that_blocks_all_keys(every):
    mask = np.full((12, 12), every)
    found = diagnose(Q, K, V, attention(Q, K, V, scale=1.0), mask=mask)
    assert (found.verdict, found.cause.id) == ("deviates", "scale.missing")
    assert diagnose(Q, K, V, attention(Q, K, V), mask=mask).verdict == "noise"


def test_a_mask_that_fits_in_no_way_gets_the_causes_of_both_readings():
    found = diagnose(**of(Q, K, V, attention(Q, K, V), mask=MASK))
    assert {"mask.not-applied"} <= {it.id for it in found.causes}


def test_the_layout_is_found_by_the_numbers():
    found = diagnose(*turned(Q, K, V, attention(Q, K, V)))
    assert found.verdict == "noise"
    assert found.layout == LAYOUT
    found = diagnose(*turned(Q, K, V, attention(Q, K, V, scale=1.0)), layout=LAYOUT)
    assert found.cause is not None
    assert found.cause.id == "scale.missing"


def test_an_output_may_have_another_layout_than_the_query():
    output = attention(Q, K, V)
    found = diagnose(Q, K, V, output.transpose(0, 2, 1, 3))
    assert "reading.output" in [it.id for it in found.assumed]
    found = diagnose(Q, K, V, merged(output))
    assert found.verdict == "noise"


@pytest.mark.usefixtures("sought")
def test_a_layout_that_nothing_decides_has_to_be_told():
    output = np.random.default_rng(3).standard_normal(Q.shape)
    with pytest.raises(Ambiguous, match="--layout"):
        diagnose(Q, K, V, output)
    found = diagnose(Q, K, V, output, layout="batch heads query head")
    assert found.verdict == "deviates"
    assert not found.causes


GROUPED = [(6, 3, 14), (8, 2, 16), (8, 2, 64), (4, 2, 10), (4, 1, 10)]
"""Query heads, key/value heads and tokens, of which the first two would also fit as lengths."""
BOTH_LAYOUTS = ("batch heads length head", "batch length heads head")


def largest_weights(count, weights=None, of=None):
    """The largest weights of each query, by `of`; the others are 0."""
    weights = softmax(QK) if weights is None else weights
    of = weights if of is None else of
    return np.where(of >= np.sort(of, axis=-1)[..., -count, None], weights, np.float32(0))


def of_sum(weights):
    return weights / weights.sum(axis=-1, keepdims=True)


SIGMOID, RELU = 1 / (1 + np.exp(-QK)), np.maximum(QK, np.float32(0))
OF_HEADS = np.float32([0.4, 0.3, 0.2, 0.1])[:, None, None]
OTHER_WEIGHTS = {
    "sigmoid, normalised": (of_sum(SIGMOID), "softmax.sigmoid-normalised", {}),
    "sigmoid, by the number of keys": (SIGMOID / np.float32(12), "", {}),
    "ReLU": (RELU, "softmax.relu", {}),
    "ReLU, normalised": (of_sum(RELU), "softmax.relu-normalised", {}),
    "ReLU, squared and normalised": (of_sum(RELU**2), "", {}),
    "ReLU, leaky": (of_sum(np.maximum(QK, QK / 100)), "", {}),
    "the largest weights": (largest_weights(3), "softmax.largest-only-not-divided", {"count": 3}),
    "the largest weights, divided": (
        of_sum(largest_weights(4)),
        "softmax.largest-only",
        {"count": 4},
    ),
    "the largest weight": (of_sum(largest_weights(1)), "softmax.largest-only", {"count": 1}),
    "the weights of the largest products": (of_sum(largest_weights(4, of=np.abs(QK))), "", {}),
    "the largest weights, by half": ((largest_weights(4) + softmax(QK)) / 2, "", {}),
    "weights of the first head": (
        softmax(QK)[:, :1],
        "heads.weights-of-one",
        {"head": Phrase("where.head.one", {"at": 0})},
    ),
    "weights of the first two heads": (softmax(QK)[:, [0, 1, 0, 1]], "", {}),
    "weights of the first head, nearly": (softmax(QK - 0.02 * QK**2)[:, :1], "", {}),
    "mean weights": (softmax(QK).mean(axis=1, keepdims=True), "heads.weights-averaged", {}),
    "a weighted mean": ((OF_HEADS * softmax(QK)).sum(axis=1, keepdims=True), "", {}),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OTHER_WEIGHTS)
def test_weights_that_are_others_are_told(name, one_mistake):
    """An empty name stands for what is not known, which is not taken for what is."""
    weights, cause, about = OTHER_WEIGHTS[name]
    found = diagnose(Q, K, V, np.float32(weights @ V), layout="batch heads length head")
    assert found.verdict == "deviates"
    assert [(it.id, it.arguments) for it in found.causes] == [(cause, about)] * bool(cause)


@pytest.mark.parametrize("factor", [1.005, 1.05])
@pytest.mark.parametrize("cause", ["heads.weights-of-one", "softmax.largest-only"])
def test_a_factor_beside_a_mistake_is_no_lesser_accuracy(cause, factor):
    for bend in (0.0, 0.02):
        weights = softmax(np.float32(factor) * QK - np.float32(bend) * QK**2)
        if cause == "heads.weights-of-one":
            weights = weights[:, :1]
        else:
            weights = of_sum(largest_weights(4, weights, of=QK))
        found = diagnose(Q, K, V, np.float32(weights @ V), layout="batch heads length head")
        # What is left by logits that are bent is no factor.
        assert ([it.id for it in found.causes] == ["mistakes.two"]) == (not bend), str(found)
        if not bend:
            first, second = found.causes[0].arguments["causes"]
            assert (first.id, second) == (cause, Phrase("scale.factor", {"factor": factor}))
            assert not found.notes


@pytest.mark.sample(3)
@pytest.mark.parametrize("heads", [[2, 2, 2, 2], [2, 2, 2, 0], [1, 1, 3, 3]])
def test_the_output_of_one_head_for_all_is_told(heads, one_mistake):
    output = attention(GQ, GK, GV)[:, heads]
    found = diagnose(GQ, GK, GV, output, layout="batch heads length head")
    told = [Phrase("heads.output-of-one", {"head": Phrase("where.head.one", {"at": 2})})]
    assert [Phrase(it.id, it.arguments) for it in found.causes] == told * (len({*heads}) == 1)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_that_is_on_is_named_from_the_rows_that_see_few_keys(rate):
    q, k, v = drawn(size=16, queries=24, keys=24)
    logits = np.where(np.tri(24, dtype=bool), q @ k.swapaxes(-1, -2) / np.float32(4), -np.inf)
    weights = softmax(logits) / np.float32(1 - rate)
    kept = np.random.default_rng(0).random(weights.shape) >= rate
    dropped = np.where(kept, weights, np.float32(0)) @ v
    found = diagnose(q, k, v, dropped, causal=True)
    assert found.cause is not None, str(found)
    assert found.cause.id == "softmax.dropout-on"
    assert found.cause.arguments["rate"] == pytest.approx(rate, rel=1e-3)
    assert "eval" in found.cause.advice


@pytest.mark.usefixtures("sought")
@pytest.mark.sample(3)
@pytest.mark.parametrize("factor", [1.0, 0.95, 1.3])
def test_weights_of_which_some_are_lost_otherwise_are_not_taken_for_dropout(factor):
    """Some are 0, and the others are not as much larger as the share of zeros says."""
    q, k, v = drawn(size=16, queries=24, keys=24)
    logits = np.where(np.tri(24, dtype=bool), q @ k.swapaxes(-1, -2) / np.float32(4), -np.inf)
    kept = np.random.default_rng(1).random(logits.shape) >= 0.1
    found = diagnose(q, k, v, (softmax(logits) * kept * np.float32(factor)) @ v, causal=True)
    assert found.verdict == "deviates"
    assert not found.causes, str(found)


@pytest.mark.night
def test_weights_are_not_recovered_if_a_mistake_is_known(monkeypatch):
    """Recovering them solves hundreds of systems, one for each row."""
    recovered = []
    monkeypatch.setattr(recovery, "dropped", lambda *told: recovered.append(told))
    assert diagnose(Q, K, V, attention(Q, K, V, scale=1.0)).cause.id == "scale.missing"
    assert not recovered
    diagnose(Q, K, V, V + 1.0, layout="batch heads length head")
    assert recovered


@pytest.mark.sample(2)
@pytest.mark.usefixtures("sought")
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_what_an_output_nearly_is_decides_the_layout_if_nothing_explains_it(layout):
    q, k, v = drawn(heads=4, queries=12, keys=12)
    right = attention(q, k, v, causal=0)
    spoilt = right + 0.2 * right.std() * np.random.default_rng(6).standard_normal(right.shape)
    found = diagnose(*in_layout(layout, q, k, v, spoilt), causal=True)
    assert (found.verdict, found.layout, found.causes) == ("deviates", layout, []), str(found)
    (note,) = (it for it in found.notes if it.id == "arrays.unexplained")
    assert 15 < note.arguments["percent"] < 25
    # Nothing but a half of it does not: what it is in the other layout is as unlike.
    spoilt = right + right.std() * np.random.default_rng(6).standard_normal(right.shape)
    with pytest.raises(Ambiguous, match="--layout"):
        diagnose(*in_layout(layout, q, k, v, spoilt), causal=True)


def spoilt_in_all_elements(q, k, v):
    return attention(q, k, v, causal=0) + np.random.default_rng(6).standard_normal(q.shape)


OF_GROUPED = {
    "scale.by-root-of-width": lambda q, k, v: attention(
        q, k, v, causal=0, scale=(q.shape[1] * q.shape[3]) ** -0.5
    ),
    "causal.sees-next-key": lambda q, k, v: attention(q, k, v, causal=1),
    "rotary.pairs": lambda q, k, v: attention(
        *(rotated(it, pairs="interleaved") for it in (q, k)), v, causal=0
    ),
}
"""Mistakes in causal attention, by the causes that they are told by."""


def of_grouped(sizes):
    heads, kv_heads, length = sizes
    return drawn(heads=heads, kv_heads=kv_heads, queries=length)


def in_layout(layout, *arrays):
    return tuple(arrays) if layout == BOTH_LAYOUTS[0] else turned(*arrays)


@pytest.mark.sample(35)
@pytest.mark.parametrize("cause", OF_GROUPED)
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("sizes", GROUPED)
def test_a_mistake_beside_grouped_heads_is_told_without_their_layout(sizes, layout, cause):
    q, k, v = of_grouped(sizes)
    options = {"causal": True}
    if cause == "rotary.pairs":
        options["rotary"] = {"base": 10000.0, "pairs": "halves"}
    arrays = in_layout(layout, q, k, v, OF_GROUPED[cause](q, k, v))
    found = diagnose(*arrays, **options)
    assert found.layout == layout, str(found)
    assert cause in [it.id for it in found.causes]
    assert [it.id for it in found.assumed] == ["reading.layout"]


@pytest.mark.sample(20)
@pytest.mark.usefixtures("sought")
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
@pytest.mark.parametrize("sizes", GROUPED)
def test_queries_are_not_read_as_more_than_the_keys_of_a_causal_mask(sizes, layout):
    q, k, v = of_grouped(sizes)
    arrays = in_layout(layout, q, k, v, spoilt_in_all_elements(q, k, v))
    found = diagnose(*arrays, causal=True)
    assert (found.layout, found.causes) == (layout, []), str(found)
    assert found.differences[0].wrong == q.size


@pytest.mark.sample(4)
@pytest.mark.usefixtures("sought")
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_more_queries_than_keys_are_read_so_where_that_explains_the_output(layout):
    q, k, v = drawn(heads=4, queries=12, keys=6)
    for causal in ("top-left", True):
        right = in_layout(layout, q, k, v, attention(q, k, v, causal=0))
        found = diagnose(*right, causal=causal)
        assert (found.verdict, found.layout) == ("noise", layout), str(found)
        wrong = in_layout(layout, q, k, v, attention(q, k, v, causal=0, scale=1.0))
        found = diagnose(*wrong, causal=causal)
        assert (found.cause.id, found.layout) == ("scale.missing", layout), str(found)
    # Where no query is without a key, such lengths are as plausible as heads in groups.
    spoilt = in_layout(layout, q, k, v, spoilt_in_all_elements(q, k, v))
    for causal in ("top-left", None):
        with pytest.raises(Ambiguous, match="--layout"):
            diagnose(*spoilt, causal=causal)
    # It is so for heads in groups, too, whose mistakes are told.
    q, k, v = of_grouped((6, 3, 14))
    output = OF_GROUPED["causal.sees-next-key"](q, k, v)
    found = diagnose(*in_layout(layout, q, k, v, output), causal="top-left")
    assert found.layout == layout, str(found)
    assert "causal.sees-next-key" in [it.id for it in found.causes]


def test_rows_that_see_no_key_do_not_count_as_right():
    q, k, v = of_grouped((6, 3, 14))
    given = Given(query=q, key=k, value=v, output=spoilt_in_all_elements(q, k, v), causal=True)
    shares = [diagnosis.Judged(one, given).right for one in readings(given)]
    assert len(shares) == 3
    assert max(shares) < 0.05


def laid_in(layout, function):
    """Return a function of heads as one of arrays in a layout."""
    return lambda *arrays: in_layout(layout, function(*in_layout(layout, *arrays)))[0]


@pytest.mark.sample(8)
@pytest.mark.usefixtures("sought")
@pytest.mark.parametrize("told", [{"causal": True}, {}], ids=["told", "open"])
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_two_callables_have_the_layout_in_which_one_is_right(layout, told):
    arrays = in_layout(layout, *of_grouped((4, 2, 10)))
    old = laid_in(layout, lambda *x: attention(*x, causal=0 if told else None))
    new = laid_in(layout, spoilt_in_all_elements)
    for mistake in (new, laid_in(layout, OF_GROUPED["causal.sees-next-key"])):
        found = conformance.compare(old, mistake, *arrays, **told)
        assert (found.verdict, found.layout) == ("deviates", layout), str(found)
        assert (found.wanted.verdict, found.wanted.layout) == ("noise", layout)
        assert "reading.layout" in [it.id for it in found.assumed]
        # It is the same for the other side.
        found = conformance.compare(mistake, old, *arrays, **told)
        assert (found.verdict, found.layout) == ("noise", layout), str(found)
        assert (found.wanted.verdict, found.wanted.layout) == ("deviates", layout)


@pytest.mark.night
@pytest.mark.usefixtures("sought")
@pytest.mark.parametrize("layout", BOTH_LAYOUTS)
def test_a_layout_that_a_mistake_of_one_output_tells_is_that_of_the_other(layout):
    q, k, v = of_grouped((4, 2, 10))
    outputs = attention(q, k, v, causal=0, scale=1.0), spoilt_in_all_elements(q, k, v)
    *heads, explained, spoilt = in_layout(layout, q, k, v, *outputs)
    for options in ({"causal": True}, {}):
        found = diagnose(*heads, spoilt, wanted=explained, **options)
        assert (found.layout, found.causes) == (layout, []), str(found)
        assert found.wanted.cause.id == "scale.missing"
        with pytest.raises(AssertionError, match="scale"):
            conformance.assert_within_noise(explained, *heads, wanted=spoilt, **options)


@pytest.mark.night
@pytest.mark.usefixtures("sought")
def test_a_layout_that_neither_of_two_outputs_decides_has_to_be_told():
    spoilt = spoilt_in_all_elements(Q, K, V)
    with pytest.raises(Ambiguous, match="--layout"):
        diagnose(Q, K, V, spoilt, wanted=spoilt + 0)


@pytest.mark.usefixtures("one_mistake")
def test_right_elements_decide_the_layout():
    output = attention(Q, K, V)
    output[0, 1, 2, 3] += 1
    found = diagnose(Q, K, V, output)
    assert found.layout == "batch heads length head"
    assert not found.causes
    (difference,) = found.differences
    assert (difference.wrong, difference.worst.index) == (1, (0, 1, 2, 3))
    assert difference.where.text == "batch entry 0, head 1, query 2"


def test_heads_side_by_side_need_their_number():
    wide = [merged(x) for x in (Q, K, V, attention(Q, K, V))]
    found = diagnose(*wide, heads=4)
    assert found.verdict == "noise"
    with pytest.raises(BadArrays, match="--heads"):
        diagnose(*wide, layout="batch length (heads head)")


@pytest.mark.parametrize(
    ("axes", "told", "message"),
    [
        (
            2,
            {"layout": "(batch length) (heads head)", "heads": 6, "kv_heads": 3},
            "layout '(batch length) (heads head)' needs the number of batch entries: batch= (--bat",
        ),
        (
            2,
            {"layout": "(heads length) head", "heads": 6, "kv_heads": 3},
            "layout '(heads length) head' joins heads and length, but only heads and head may be "
            "joined; reshape the arrays, so that heads and length are axes of their own",
        ),
        (3, {"heads": 7}, "query has an axis of 48, which is not 7 heads side by side; correct "),
        (
            3,
            {"heads": 6, "kv_heads": 5},
            "key has an axis of 24, which is not 5 heads side by side; correct heads= or kv_heads=",
        ),
        (2, {}, "side by side in the last axis, say how many: heads= and kv_heads= (--heads, --kv"),
        (3, {}, "side by side in the last axis, say how many: heads= and kv_heads= (--heads, --kv"),
        (2, {"heads": 6}, "keys have fewer heads than queries, say how many: kv_heads= (--kv-"),
        (3, {"heads": 6}, "keys have fewer heads than queries, say how many: kv_heads= (--kv-"),
        (3, {"heads": 16}, "keys have fewer heads than queries, say how many: kv_heads= (--kv-"),
    ],
)
def test_grouped_heads_side_by_side_need_both_numbers(axes, told, message):
    q, k, v = of_grouped((6, 3, 14))
    wide = [merged(x) for x in (q, k, v, attention(q, k, v))]
    if axes == 2:
        wide = [x[0] for x in wide]
    with pytest.raises(BadArrays, match=re.escape(message)) as raised:
        diagnose(*wide, **told)
    assert "\n" not in str(raised.value)
    if axes == 3:
        assert diagnose(*wide, heads=6, kv_heads=3).verdict == "noise"


def test_no_number_of_heads_is_asked_for_where_axes_are_apart():
    q, k, v = of_grouped((6, 3, 14))
    with pytest.raises(BadArrays) as raised:
        diagnose(q, k[..., :4], v, q)
    assert "heads=" not in str(raised.value)


def test_layouts_are_read_and_written():
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for layout in ("batch heads length head", "b n h d", "head heads batch query", "b q (h d)"):
        there = given_layout(array, layout)
        assert np.array_equal(laid_out("x", there, layout, 3), array)
    for wrong in ("batch heads", "batch heads length head head", "batch heads width head"):
        with pytest.raises(BadArrays):
            laid_out("x", array, wrong, None)


def test_a_mistake_in_a_part_is_told_with_the_part():
    output = attention(Q, K, V)
    output[1, :, 8:] = attention(Q, K, V, scale=1.0)[1, :, 8:]
    found = diagnose(Q, K, V, output)
    assert found.cause is not None
    assert found.cause.id == "scale.missing"
    assert found.cause.text.endswith("in batch entry 1 (the last), queries 8 and later only")


def mixed(q, k, v, scale):
    """An attention whose products are float32, and whose output is float64 like the scale."""
    logits = (q @ k.swapaxes(-1, -2)).astype(np.float64) * scale
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) @ v.astype(np.float64)


def test_an_output_computed_in_less_precision_is_no_more_accurate():
    found = diagnose(Q, K, V, mixed(Q, K, V, 8**-0.5), dtype="float64")
    assert (found.verdict, found.dtype) == ("deviates", "float64")
    assert [it.id for it in found.causes] == ["accuracy.float32"]
    assert "judge the answer in float32" in str(found)
    assert diagnose(Q, K, V, mixed(Q, K, V, 8**-0.5), dtype="float32").verdict == "noise"
    logits = in_bfloat16(Q @ K.swapaxes(-1, -2) * np.float32(8**-0.5))
    weights = in_bfloat16(np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True))
    assert [it.id for it in diagnose(Q, K, V, weights @ V).causes] == ["accuracy.bfloat16"]
    logits = (Q @ K.swapaxes(-1, -2) * np.float32(8**-0.5)).astype(np.float16)
    weights = (np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)).astype(np.float32)
    assert [it.id for it in diagnose(Q, K, V, weights @ V).causes] == ["accuracy.tf32"]


def rounded_attention(q, k, v, scale=8**-0.5):
    """A causal attention in bfloat16, but for its softmax."""
    k, v = (np.repeat(it, q.shape[1] // k.shape[1], axis=1) for it in (k, v))
    q, k, v = map(in_bfloat16, (q, k, v))
    logits = in_bfloat16(in_bfloat16(q @ k.swapaxes(-1, -2)) * np.float32(scale))
    logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return in_bfloat16(in_bfloat16(powers / powers.sum(axis=-1, keepdims=True)) @ v)


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [1, 6, 30])
def test_a_computation_in_bfloat16_is_named_whatever_its_logits(size):
    told = {"causal": True, "dtype": "float32", "layout": "batch heads length head"}
    q = np.float32(size) * Q
    found = diagnose(q, K, V, rounded_attention(q, K, V), **told)
    assert [it.id for it in found.causes] == ["accuracy.bfloat16"], str(found)
    found = diagnose(q, K, V, rounded_attention(q, K, V, scale=1.0), **told)
    assert [it.id for it in found.causes] == ["scale.missing"], str(found)
    assert "beside this mistake, the output is only as accurate as bfloat16" in str(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("epsilon", [1e-2, 3e-3])
def test_an_error_along_that_of_a_known_mistake_is_no_rounding(epsilon):
    q, k, v = drawn(kv_heads=2, queries=20, seed=3)

    def prepared(x, gain, added):
        size = np.sqrt((x.astype(np.float64) ** 2).mean(axis=-1, keepdims=True) + added)
        return (x / size * gain).astype(np.float32)

    gains = np.random.default_rng(7).standard_normal((2, 8)) * 0.2 + 1
    norm = {"query": gains[0], "key": gains[1], "epsilon": 1e-6}
    told = {"causal": True, "norm": norm, "layout": "batch heads length head"}
    of_query, of_key = prepared(q, gains[0], epsilon), prepared(k, gains[1], epsilon)
    found = diagnose(q, k, v, attention(of_query, of_key, v, causal=0), **told)
    assert [it.id for it in found.causes] == ["norm.epsilon"] * (epsilon == 1e-2), str(found)
    of_query, of_key = prepared(q, gains[0], 1e-6), prepared(k, gains[1], 1e-6)
    found = diagnose(q, k, v, rounded_attention(of_query, of_key, v), dtype="float32", **told)
    assert [it.id for it in found.causes] == ["accuracy.bfloat16"], str(found)


def test_slopes_that_are_halved_are_not_those_times_the_scale():
    q, k, v = drawn(heads=8, kv_heads=4, queries=14, seed=3)
    slopes = 2.0 ** -np.arange(1.0, 9.0)
    far = np.arange(14)[:, None] - np.arange(14)

    def output(of_slopes):
        bias = np.float32(-of_slopes[:, None, None] * far)
        return attention(q, k, v, bias=bias, causal=0)

    told = {"causal": True, "slopes": slopes, "layout": "batch heads length head"}
    assert diagnose(q, k, v, output(slopes), **told).verdict == "noise"
    found = diagnose(q, k, v, output(0.5 * slopes), **told)
    assert [(it.id, it.arguments) for it in found.causes] == [("alibi.factor", {"factor": 0.5})]
    found = diagnose(q, k, v, output(8**-0.5 * slopes), **told)
    assert [it.id for it in found.causes] == ["alibi.scaled"], str(found)
    assert not found.notes, str(found)


def test_a_reading_that_is_exact_comes_before_one_that_fits_roughly():
    q, k, v = drawn(kv_heads=2, queries=18, size=16, seed=5)
    image = np.arange(9)
    places = [np.r_[:4, 4 + of_image, 7:12] for of_image in (0 * image, image // 3, image % 3)]

    def turned(x, sections):
        axes = np.repeat([0, 1, 2], sections)
        angles = np.stack(places)[axes].T * 1e6 ** (-np.arange(8) / 8)
        cos, sin, first, last = np.cos(angles), np.sin(angles), x[..., :8], x[..., 8:]
        both = (first * cos - last * sin, last * cos + first * sin)
        return np.concatenate(both, axis=-1).astype(np.float32)

    def judged(sections):
        output = attention(turned(q, sections), turned(k, sections), v, causal=0)
        scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
        config = {"model_type": "qwen2_vl", "hidden_size": 64, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 2, "rope_theta": 1e6, "rope_scaling": scaling}
        positions = np.stack(places)[:, None].repeat(2, axis=1)
        return diagnose(q, k, v, output, causal=True, positions=positions, config=config)

    assert judged([2, 3, 3]).verdict == "noise"
    found = judged([3, 3, 2])
    assert [it.id for it in found.causes] == ["mrope.sections-exchanged"], str(found)
    assert "before their rotation" in str(found)
    assert "as accurate as" not in str(found)


@pytest.mark.night
def test_a_mistake_is_named_at_the_precision_of_the_computation():
    group = (GQ, *(np.tile(x, (1, 2, 1, 1)) for x in (GK, GV)))
    for q, k, v, output, cause, accuracy in (
        (Q, K, V, mixed(Q, K, V, 1.0), "scale.missing", "float32"),
        (Q, K, V, attention(*map(in_bfloat16, (Q, K, V)), scale=1.0), "scale.missing", "bfloat16"),
        (GQ, GK, GV, mixed(*group, 8**-0.5), "heads.tiled", "float32"),
    ):
        found = diagnose(q, k, v, output, dtype=output.dtype.name)
        assert [it.id for it in found.causes] == [cause], str(found)
        assert f"the output is only as accurate as {accuracy}" in str(found)


@pytest.mark.parametrize("noise", [1e-1, pytest.param(10, marks=pytest.mark.night)])
def test_what_no_mistake_explains_gets_none(noise):
    random = np.random.default_rng(5)
    output = attention(Q, K, V)
    spoilt = output + noise * random.standard_normal(output.shape).astype(np.float32)
    found = diagnose(Q, K, V, spoilt, layout="batch heads length head")
    assert found.verdict == "deviates"
    assert not found.causes, str(found)


def test_a_scale_in_half_precision_is_not_taken_for_something_else():
    q, k, v = map(in_bfloat16, drawn(queries=24, size=16))
    output = in_bfloat16(attention(q, k, v, scale=0.2))
    found = diagnose(q, k, v, output)
    assert found.dtype == "bfloat16"
    assert found.cause is not None
    assert found.cause.id == "scale.of-size"


@pytest.mark.parametrize("spoilt", ["noise", "NaN"])
def test_rows_that_a_mistake_loses_do_not_say_that_it_was_made(spoilt, monkeypatch, one_mistake):
    """A softmax over the heads has no numbers for queries that see fewer keys than others.

    Nor has a normaliser of the last keys, and its other numbers are so large that their noise would
    cover everything.
    """
    monkeypatch.setattr(tiles, "MOST_LOGITS", 2**16)
    q, k, v = map(in_bfloat16, drawn(batch=1, heads=2, queries=400, size=16))
    output = attention(q, k, v, causal=0)
    random = np.random.default_rng(5)
    off = 0.1 * random.standard_normal((100, 16)) if spoilt == "noise" else np.nan
    output[0, 1, 200:300] += off
    found = diagnose(q, k, v, in_bfloat16(output), causal=True, layout="batch heads length head")
    assert (found.verdict, found.dtype) == ("deviates", "bfloat16")
    assert not found.causes, str(found)


def test_a_causal_mask_is_not_assumed_for_rows_that_a_mistake_loses(monkeypatch, one_mistake):
    monkeypatch.setattr(tiles, "MOST_LOGITS", 2**16)
    q, k, v = (it.astype(np.float16) for it in drawn(batch=1, heads=2, queries=300, size=16))
    output = attention(*(it.astype(np.float32) for it in (q, k, v)))
    output[:, :, 100:200] += 0.1 * np.random.default_rng(5).standard_normal(16)
    found = diagnose(q, k, v, output.astype(np.float16), layout="batch heads length head")
    assert "causal" not in str(found)
    assert not found.causes, str(found)
    assert found.differences[0].where.text == "queries 100 to 199"


@pytest.mark.parametrize("told", [{}, {"causal": True}])
def test_what_a_mask_means_is_not_a_mistake_of_the_other_meaning(told, sought):
    """A mistake may leave more than noise, and so would the reading that is right but for a part.

    What remains is then unknown: no mask that is inverted, nor one that is nearly that.
    """
    random = np.random.default_rng(3)
    mask = random.random((1, 1, 24, 24)) < 0.7
    mask[..., 0] = True
    seen = mask & np.tri(24, dtype=bool) if told else mask
    q, k, v = map(in_bfloat16, drawn(batch=1, heads=4, queries=24, size=16))
    output = attention(q, k, v, mask=seen)
    spoilt = output.copy()
    spoilt[:, 2, :, 3:6] += 0.03 * random.standard_normal((24, 3))
    told = {**told, "mask": mask, "layout": "batch heads length head"}
    found = diagnose(q, k, v, in_bfloat16(spoilt), **told)
    assert (found.verdict, found.causes) == ("deviates", []), str(found)
    assert "True in the mask: the query attends to the key" in str(found)
    assert found.differences[0].where.text == "head 2"
    # If it is told, the other meaning is a mistake.
    found = diagnose(q, k, v, in_bfloat16(output), mask_true="blocks", **told)
    assert found.cause.id.startswith("mask.inverted"), str(found)


def test_where_a_causal_mask_is_aligned_is_not_a_mistake_of_the_other_alignment(one_mistake):
    q, k, v = map(in_bfloat16, drawn(batch=1, heads=4, queries=10, keys=24, size=16))
    output = attention(q, k, v, causal=14)
    output[:, 2, :, 3:6] += 0.03 * np.random.default_rng(3).standard_normal((10, 3))
    found = diagnose(q, k, v, in_bfloat16(output), causal=True, layout="batch heads length head")
    assert (found.verdict, found.causes) == ("deviates", []), str(found)
    assert "causal mask aligned bottom-right" in str(found)


BENT = {
    "tanh": np.tanh,
    "soft sign": lambda x: x / (1 + np.abs(x)),
    "inverse hyperbolic sine": np.arcsinh,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("sizes", [{"batch": 1, "heads": 2}, {"heads": 2, "queries": 48}])
@pytest.mark.parametrize("bent", BENT)
def test_bent_logits_get_no_name_in_half_precision(bent, sizes, one_mistake):
    for seed in range(2):
        sizes = {"queries": 24, "size": 16, "seed": seed, **sizes}
        q, k, v = map(in_bfloat16, drawn(**sizes))
        logits = BENT[bent](q @ k.swapaxes(-1, -2) / np.float32(4))
        output = in_bfloat16(softmax(logits) @ v)
        found = diagnose(q, k, v, output, layout="batch heads length head")
        assert (found.verdict, found.dtype) == ("deviates", "bfloat16")
        assert not found.causes, str(found)


@pytest.mark.parametrize("queries", [24, 48])
def test_a_mistake_is_named_in_half_precision_if_every_operation_rounds(queries):
    q, k, v = map(in_bfloat16, drawn(queries=queries, size=16))
    logits = in_bfloat16(in_bfloat16(q @ k.swapaxes(-1, -2)) / np.float32(4))
    powers = in_bfloat16(1 / (1 + np.exp(-logits)))
    weights = in_bfloat16(powers / in_bfloat16(powers.sum(axis=-1, keepdims=True)))
    found = diagnose(q, k, v, in_bfloat16(weights @ v), layout="batch heads length head")
    assert [it.id for it in found.causes] == ["softmax.sigmoid-normalised"], str(found)
    # Large logits have more noise with the mistake than without.
    found = diagnose(q, k, v, rounded_attention(q, k, v, scale=1.0), causal=True)
    assert [it.id for it in found.causes] == ["scale.missing"], str(found)
    # What is right in the other heads may be off by more than the mistake may leave in its own.
    rounded = in_bfloat16(attention(q, k, v)), in_bfloat16(attention(q, k, v, scale=1.0))
    mixed = np.concatenate([rounded[0][:, :3], rounded[1][:, 3:]], axis=1)
    found = diagnose(q, k, v, mixed, layout="batch heads length head")
    assert [it.id for it in found.causes] == ["scale.missing"], str(found)


def test_a_mistake_that_divides_by_zero_explains_no_numbers():
    # Were NaN to predict anything, a normaliser of the last keys would fit rows that see none.
    seen = np.tri(12, dtype=bool) & ~np.tri(12, k=-4, dtype=bool)
    output = attention(Q, K, V, mask=np.tri(12, dtype=bool) & ~np.tri(12, k=-3, dtype=bool))
    found = diagnose(Q, K, V, output, mask=seen, mask_true="attends")
    assert "softmax.normaliser-of-keys" not in [it.id for it in found.causes]
    assert "mask.window-without-first-key" in [it.id for it in found.causes]


@pytest.mark.usefixtures("one_mistake")
def test_a_mistake_that_gives_infinities_explains_no_numbers():
    # The normaliser of keys 8 to 11 is 0 for queries that see others only.
    blocks = np.arange(12)[:, None] // 8 == np.arange(12) // 8
    output = attention(Q, K, V, mask=blocks)
    output[:, :, :8] = 3 * np.random.default_rng(8).standard_normal((2, 4, 8, 8))
    found = diagnose(Q, K, V, output, mask=blocks, mask_true="attends")
    assert not found.causes, str(found)


def test_numbers_that_cannot_tell():
    found = diagnose(Q, K, np.ones_like(V), np.ones_like(V))
    assert found.verdict == "cannot-tell"
    found = diagnose(Q[:, :, :1], K[:, :, :1], V[:, :, :1], V[:, :, :1])
    assert found.verdict == "cannot-tell"


def test_what_would_not_show_is_said():
    # With a single query at the end, a causal mask blocks nothing.
    q = LQ[:, :, -1:]
    found = diagnose(q, LK, LV, attention(q, LK, LV), causal="bottom-right")
    assert found.verdict == "noise"
    assert "causal.not-applied" in [it.id for it in found.hidden]
    assert "would be the same" in str(found)


def test_the_other_output_is_judged_too():
    right, wrong = attention(Q, K, V), attention(Q, K, V, scale=1.0)
    found = diagnose(Q, K, V, right, wanted=wrong)
    assert found.verdict == "noise"
    assert found.wanted is not None
    assert found.wanted.cause is not None
    assert found.wanted.cause.id == "scale.missing"
    assert "compared to" in str(found)


ALIGNED = {name: attention(LQ, LK, LV, causal=offset) for name, offset in CORNERS.items()}
SQUARE = np.random.default_rng(3).random((12, 12)) < 0.5
SQUARE[np.arange(12), np.arange(12)] = True
SQUARE[np.arange(12), np.arange(12) - 1] = False
TURNED = {"model_type": "llama", "num_attention_heads": 4, "head_dim": 8, "rope_theta": 10000.0}
READ_IN_TWO_WAYS = {
    "alignment": (
        (LQ, LK, LV, ALIGNED["top-left"], ALIGNED["bottom-right"]),
        {"causal": True},
        "causal mask aligned top-left against causal mask aligned bottom-right",
    ),
    "meaning of a mask": (
        (Q, K, V, attention(Q, K, V, mask=SQUARE), attention(Q, K, V, mask=~SQUARE)),
        {"mask": SQUARE},
        "the query attends to the key against True in the mask: the key is blocked",
    ),
    "axes": (
        (Q, K, V, attention(Q, K, V), attention(*turned(Q, K, V)).swapaxes(1, 2)),
        {},
        "axes batch heads length head against axes batch length heads head",
    ),
    "rotation": (
        (Q, K, V, attention(Q, K, V, causal=0), attention(rotated(Q), rotated(K), V, causal=0)),
        {"config": TURNED},
        "after their rotation against query and key before their rotation",
    ),
}


@pytest.mark.parametrize("name", READ_IN_TWO_WAYS)
def test_outputs_that_are_right_in_different_readings_differ(name):
    (q, k, v, one, other), options, message = READ_IN_TWO_WAYS[name]
    found = diagnose(q, k, v, one, wanted=other, **options)
    assert found.verdict == "deviates", str(found)
    assert found.wanted is not None
    assert found.wanted.verdict == "noise"
    assert [it.id for it in found.causes] == ["outputs.read-differently"]
    assert message in found.cause.text
    # The numbers are those of the first output where the second one is right.
    assert found.differences[0].wrong > one.size / 2
    # Each output is what it is compared to, if it is the same.
    for same in (one, other):
        found = diagnose(q, k, v, same, wanted=same + 0, **options)
        assert (found.verdict, found.wanted.verdict) == ("noise", "noise"), str(found)
        assert found.assumed == found.wanted.assumed


@pytest.mark.usefixtures("short_is_long")
def test_long_outputs_that_are_right_in_different_readings_differ():
    outputs = ALIGNED["top-left"], ALIGNED["bottom-right"]
    found = diagnose(LQ, LK, LV, outputs[0], wanted=outputs[1], causal=True)
    assert (found.verdict, found.cause.id) == ("deviates", "outputs.read-differently")


def test_a_reading_that_fits_both_outputs_is_preferred():
    # In bfloat16, values that hardly differ hide the alignment, which float32 shows.
    v = 1 + 1e-4 * LV
    coarse, fine = in_bfloat16(attention(LQ, LK, v, causal=0)), attention(LQ, LK, v, causal=0)
    alone = diagnose(LQ, LK, v, coarse, causal=True)
    assert "causal mask aligned bottom-right" in [it.text for it in alone.assumed]
    found = diagnose(LQ, LK, v, coarse, wanted=fine, causal=True)
    assert "deviates" not in (found.verdict, found.wanted.verdict)
    assert found.assumed == found.wanted.assumed
    assert "causal mask aligned top-left" in [it.text for it in found.assumed]


def test_a_dump_is_passed_by_the_names_in_it():
    wrong, right = attention(Q, K, V, scale=1.0, mask=MASK), attention(Q, K, V, mask=MASK)
    dump = {**of(Q, K, V, wrong), "expected": right, "attn_mask": MASK}
    found = diagnose(**dump)
    assert found.wanted is not None
    assert (found.verdict, found.wanted.verdict) == ("deviates", "noise")
    ones = np.ones_like(Q)
    parts = {"dout": ones, "dv": gradients_of(Q, K, V, ones)[0]["value"]}
    found = diagnose(**of(Q, K, V, attention(Q, K, V)), **parts)
    assert [it.array for it in found.differences] == ["output", "gradient.value"]
    turned_pairs = {"rotary.base": 10000.0, "rotary_pairs": "halves"}
    output = attention(rotated(Q), rotated(K), V)
    assert diagnose(**of(Q, K, V, output), **turned_pairs).verdict == "noise"
    # Options are loaded as arrays without axes.
    loaded = {"causal": True, "window": 3, "layout": "batch heads length head", "dtype": "float32"}
    output = attention(Q, K, V, mask=np.tri(12, dtype=bool) & ~np.tri(12, k=-3, dtype=bool))
    found = diagnose(**of(Q, K, V, output), **{name: np.array(it) for name, it in loaded.items()})
    assert (found.verdict, found.assumed) == ("noise", [])
    for others, message in (
        ({"expcted": wrong}, "unknown argument of diagnose 'expcted'; did you mean expected"),
        ({"expected": wrong, "reference": wrong}, "reference is a second array for wanted"),
        ({"expected": wrong, "wanted": wrong}, "expected is a second array for wanted"),
        ({"out": wrong}, "out is a second array for output"),
        ({"rotary_base": 1.0, "rotary": {"base": 1.0}}, "rotary is passed as a whole and in part"),
        ({"hidden_states": wrong}, "unknown argument of diagnose 'hidden_states'"),
    ):
        with pytest.raises(ConformanceError, match=message) as raised:
            diagnose(**of(Q, K, V, wrong), **others)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("there", [True, False])
def test_the_file_that_is_missing_is_named(tmp_path, capsys, there):
    dump, gone = tmp_path / "dump.npz", tmp_path / "gone.npz"
    np.savez(dump, **of(Q, K, V, attention(Q, K, V)))
    line = [str(dump), "--against", str(gone)] if there else [str(gone), "--against", str(dump)]
    assert main(["diagnose", *line]) == ExitCode.USAGE
    assert f"{gone} cannot be read: No such file" in capsys.readouterr().err


def test_the_command_says_that_two_outputs_differ(tmp_path, capsys):
    both, one, other = (tmp_path / f"{name}.npz" for name in ("both", "one", "other"))
    first, second = ALIGNED.values()
    np.savez(both, **of(LQ, LK, LV, first), expected=second)
    np.savez(one, **of(LQ, LK, LV, first))
    np.savez(other, output=second)
    for files_named in ([both], [one, "--against", other]):
        line = ["diagnose", *map(str, files_named), "--causal"]
        assert main(line) == ExitCode.DEVIATES
        assert "the two outputs differ" in capsys.readouterr().out
    assert main(["diagnose", str(both), "--causal", "top-left"]) == ExitCode.OK
    assert main(["diagnose", str(one), "--against", str(one), "--causal"]) == ExitCode.OK


def gradients_of(q, k, v, d):
    """Gradients of q, k and v for the cotangent d, in float64."""
    q, k, v, d = (x.astype(np.float64) for x in (q, k, v, d))
    scale = q.shape[-1] ** -0.5
    logits = q @ k.swapaxes(-1, -2) * scale
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = d @ v.swapaxes(-1, -2)
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) * scale
    found = {"query": d_logits @ k, "key": d_logits.swapaxes(-1, -2) @ q}
    found["value"] = weights.swapaxes(-1, -2) @ d
    return {name: array.astype(np.float32) for name, array in found.items()}, weights


def test_weights_and_gradients_are_judged():
    cotangent = drawn(seed=9)[0]
    gradients, weights = gradients_of(Q, K, V, cotangent)
    output = attention(Q, K, V)
    given = {"output": cotangent, **gradients}
    right = diagnose(Q, K, V, output, weights=weights.astype(np.float32), gradients=given)
    assert right.verdict == "noise", str(right)
    assert len(right.differences) == 5
    reversed_heads = weights.astype(np.float32)[:, ::-1]
    found = diagnose(Q, K, V, output, weights=reversed_heads)
    assert [it.id for it in found.causes] == ["returned.heads-reversed"]
    scaled = {**given, "key": 2 * gradients["key"]}
    found = diagnose(Q, K, V, output, gradients=scaled)
    assert [it.id for it in found.causes] == ["gradient.doubled"], str(found)
    with pytest.raises(BadArrays, match=r"gradient\.output"):
        diagnose(Q, K, V, output, gradients=gradients)


def test_queries_that_see_no_key_are_not_judged():
    mask = MASK & (np.arange(12) != 3)[:, None]
    output = attention(Q, K, V, mask=mask)
    assert np.isnan(output).any()
    found = diagnose(Q, K, V, output, mask=mask, mask_true="attends")
    assert found.verdict == "noise"
    assert "arrays.masked-rows-not-judged" in [it.id for it in found.notes]


def test_a_mistake_is_named_beside_queries_that_see_no_key():
    seen = ~np.tri(12, dtype=bool)
    found = diagnose(Q, K, V, attention(Q, K, V, mask=~seen), mask=seen, mask_true="attends")
    assert [it.id for it in found.causes] == ["mask.inverted"]
    assert "part" not in found.causes[0].arguments


# Long outputs, in tiles


@pytest.fixture
def short_is_long(monkeypatch):
    monkeypatch.setattr(tiles, "MOST_LOGITS", 2**8)
    monkeypatch.setattr(tiles, "MOST_OF_TILE", 2**9)
    monkeypatch.setattr(tiles, "MOST_ELEMENTS", 2**9)


@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize(
    "name",
    ["plain", "grouped", "causal", "mask", "bias", "window", "rotary", *STRUCTURES],
)
def test_a_long_output_that_is_right_is_noise(name):
    found = diagnose(**HONEST[name], layout="batch heads length head")
    assert found.verdict == "noise", str(found)
    assert found.differences[0].size == HONEST[name]["output"].size
    assert "arrays.in-tiles" in [it.id for it in found.notes]


@pytest.mark.parametrize(
    ("error", "accuracy"), [(0.0, "A0"), (0.01, "B"), (0.02, "C"), (0.03, "C"), (0.1, "")]
)
@pytest.mark.parametrize("promised", ["", "A"])
def test_a_long_output_has_the_accuracy_class_of_a_short_one(
    error, accuracy, promised, request, one_mistake
):
    q, k, v = map(in_bfloat16, drawn(kv_heads=2, queries=40))
    right = attention(q, k, v)
    random = np.random.default_rng(1).standard_normal(right.shape, dtype=np.float32)
    dump = of(q, k, v, in_bfloat16(right * (1 + np.float32(error) * random)))
    told = {"dtype": "bfloat16", "accuracy": promised, "layout": "batch heads length head"}
    found = diagnose(**dump, **told)
    request.getfixturevalue("short_is_long")
    long = diagnose(**dump, **told)
    assert "arrays.in-tiles" in [it.id for it in long.notes]
    assert (long.verdict, long.accuracy) == (found.verdict, found.accuracy)
    assert found.accuracy == accuracy


def misread(array):
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(array.shape)


JOINING = {
    "softmax.over-queries": (),
    "heads.merged-by-reshape": (),
    "heads.split-by-reshape": ("query", "key", "value"),
    "layout.tokens-before-heads query": ("query",),
    "layout.tokens-before-heads value": ("value",),
    "layout.tokens-before-heads key value": ("key", "value"),
}
"""What joins queries: by what is misread, or otherwise."""


@pytest.mark.sample(2)
@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize("cause", JOINING)
def test_a_long_output_tells_a_mistake_that_joins_queries(cause, monkeypatch, one_mistake):
    q, k, v = drawn(queries=40)
    heads = zip(("query", "key", "value"), (q, k, v), strict=True)
    read = [misread(x) if name in JOINING[cause] else x for name, x in heads]
    output = attention(*read)
    if cause == "softmax.over-queries":
        output = attention(*read, axis=2)
    if cause == "heads.merged-by-reshape":
        output = np.ascontiguousarray(output).reshape(2, 40, 4, 8).swapaxes(1, 2)
    found = diagnose(q, k, v, output, layout="b h n d")
    name, *of = cause.split()
    assert [(it.id, it.arguments.get("of", [])) for it in found.causes] == [(name, of)], str(found)
    assert "arrays.in-tiles" in [it.id for it in found.notes]
    # Beyond what is computed as a whole, no name is better than a wrong one, and what joins no
    # more than the rows of misread heads keeps its name.
    monkeypatch.setattr(search, "MOST_LOGITS", 2**8)
    found = diagnose(q, k, v, output, layout="b h n d")
    assert bool(found.causes) == bool(JOINING[cause]), str(found)


@pytest.mark.usefixtures("short_is_long")
def test_a_long_output_tells_its_mistake():
    q, k, v = drawn(kv_heads=2, queries=40)
    group = (q, *(np.repeat(x, 2, axis=1) for x in (k, v)))
    tiled = (q, *(np.tile(x, (1, 2, 1, 1)) for x in (k, v)))
    seen = np.tri(40) - np.tri(40, k=-9) > 0
    for output, told, cause in (
        (attention(*group, scale=1.0), {}, "scale.missing"),
        (attention(*tiled), {}, "heads.tiled"),
        (attention(*group, mask=seen), {"window": 8}, "window.one-more-before"),
        (attention(*group), {"causal": True}, "causal.not-applied"),
    ):
        found = diagnose(q, k, v, output, layout="batch heads length head", **told)
        assert cause in [it.id for it in found.causes], str(found)
        assert found.differences[0].wrong >= output.size / 2


@pytest.mark.night
@pytest.mark.usefixtures("one_mistake")
@pytest.mark.usefixtures("short_is_long")
def test_the_gradients_of_a_long_output_are_judged(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(tiles, "MOST_LOGITS", 2**12)
    random = np.random.default_rng(3)
    q, k, v = drawn(kv_heads=2, queries=40)
    cotangent = random.standard_normal(q.shape).astype(np.float32)
    given = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    output = torch.nn.functional.scaled_dot_product_attention(
        *given, is_causal=True, enable_gqa=True
    )
    output.backward(torch.tensor(cotangent))
    right = {
        name: it.grad.numpy() for name, it in zip(("query", "key", "value"), given, strict=True)
    }
    told = {"layout": "batch heads length head", "causal": True}
    output = output.detach().numpy()
    found = diagnose(q, k, v, output, gradients={"output": cotangent, **right}, **told)
    assert (found.verdict, found.accuracy) == ("noise", "A0"), str(found)
    sizes = {"output": q.size, "gradient.query": q.size}
    sizes |= {f"gradient.{name}": k.size for name in ("key", "value")}
    assert {it.array: it.size for it in found.differences} == sizes
    wrong = {**right, "query": right["query"] * np.float32(8**0.5)}
    found = diagnose(q, k, v, output, gradients={"output": cotangent, **wrong}, **told)
    assert [it.array for it in found.differences if not it.fits] == ["gradient.query"]
    assert [it.id for it in found.causes] == ["gradient.without-scale"], str(found)
    spoilt = {**right, "key": right["key"].copy()}
    spoilt["key"][1, 1, 7] *= 2
    found = diagnose(q, k, v, output, gradients={"output": cotangent, **spoilt}, **told)
    assert found.verdict == "deviates"
    (one,) = (it for it in found.differences if not it.fits)
    assert one.array == "gradient.key"
    assert not found.causes
    (note,) = (it for it in found.notes if it.id == "arrays.gradients-sought-in")
    assert note.arguments == {"entry": 1, "head": 1}
    assert one.where.text == "batch entry 1 (the last), head 1 (the last), key 7"
    for name, cause in (("key", "gradient.without-scale"), ("value", "gradient.doubled")):
        factor = {"key": 8**0.5, "value": 2.0}[name]
        wrong = {**right, name: right[name] * np.float32(factor)}
        found = diagnose(q, k, v, output, gradients={"output": cotangent, **wrong}, **told)
        assert [it.id for it in found.causes] == [cause], str(found)
    monkeypatch.setattr(tiles, "MOST_LOGITS", 2**8)
    with pytest.raises(BadArrays, match="leave the gradients out"):
        diagnose(q, k, v, output, gradients={"output": cotangent, **right}, **told)


def seen_by(offset, queries, keys):
    return np.tri(queries, keys, offset) > 0


@pytest.mark.sample(4)
@pytest.mark.usefixtures("short_is_long")
@pytest.mark.parametrize(
    ("keys", "seen", "told", "cause"),
    [
        (40, seen_by(1, 40, 40), {"causal": True}, "causal.sees-next-key"),
        (40, seen_by(-1, 40, 40) | (np.arange(40) == 0), {"causal": True}, "causal.without-own"),
        (40, ~seen_by(-1, 40, 40), {"causal": True}, "causal.reversed"),
        (40, seen_by(0, 40, 40), {}, "untold.causal"),
        (52, seen_by(0, 40, 52), {"causal": "bottom-right"}, "causal.aligned"),
        (52, seen_by(12, 40, 52), {"causal": "top-left"}, "causal.aligned"),
        (52, seen_by(12, 40, 52), {}, "untold.causal-aligned"),
        (52, seen_by(13, 40, 52), {"causal": "bottom-right"}, "causal.sees-next-key"),
        (
            52,
            seen_by(12, 40, 52) & ~seen_by(4, 40, 52),
            {"causal": "bottom-right", "window": 7},
            "",
        ),
        (40, (np.arange(40) < 36), {}, "keys.ignored"),
    ],
)
def test_the_rows_of_a_long_output_are_those_of_the_whole(keys, seen, told, cause):
    q, k, v = drawn(queries=40, keys=keys)
    output = attention(q, k, v, mask=np.broadcast_to(seen, (40, keys)))
    found = diagnose(q, k, v, output, layout="batch heads length head", **told)
    assert any(it.id.startswith(cause or "window.") for it in found.causes), str(found)
    alignments = {it.arguments.get("alignment") for it in found.causes}
    assert keys == 40 or cause != "untold.causal-aligned" or alignments == {"bottom-right"}
    whole = [it for it in found.notes if it.id == "arrays.in-tiles"]
    assert whole


@pytest.mark.usefixtures("short_is_long")
def test_a_few_rows_of_a_long_output_are_found():
    q, k, v = drawn(queries=40)
    output = attention(q, k, v)
    output[1, 2, 33:35] = attention(q, k, v, scale=1.0)[1, 2, 33:35]
    found = diagnose(q, k, v, output, layout="batch heads length head")
    assert found.differences[0].where.text == "batch entry 1 (the last), head 2, queries 33 and 34"
    assert (found.map.entry, found.map.head) == (1, 2)
    assert [row for row, cells in enumerate(found.map.cells) if max(cells) > 8] == [33, 34]
    assert [it.id for it in found.causes] == ["scale.missing"], str(found)
    weights = np.zeros((2, 4, 40, 40), np.float32)
    with pytest.raises(BadArrays, match="leave them out"):
        diagnose(q, k, v, output, layout="batch heads length head", weights=weights)


@pytest.mark.usefixtures("short_is_long")
def test_rows_with_the_largest_errors_tell_similar_mistakes_apart():
    """Where noise hides most of the others: every fifth key was told as the last of each four."""
    q, k, v = drawn(queries=40)
    arrays = {"query": q, "key": k, "value": v, "output": attention(q, k, v)}
    given = Given(**arrays, layout="batch heads length head")
    (reading, *_) = readings(given)
    sizes = np.full(reading.problem.shape.logits[:3], 9.0)
    sizes[0, 1, 20:24] = 50.0
    sizes[..., 30:] = 1.0
    rows = tiles.chosen(reading, sizes)
    assert {20, 21, 22} <= {*rows.tolist()}
    assert (rows >= 30).any()
    assert ((rows < 20) | (rows > 23)).sum() >= len(rows) / 2


@pytest.mark.parametrize("name", sorted(HONEST))
def test_keys_that_no_query_of_a_tile_sees_are_left_out(name):
    given = Given(**{"layout": "batch heads length head", **HONEST[name]})
    for reading in readings(given):
        tile = ports.rows_of(ports.part(reading.problem, 0, 0), np.arange(1, 4))
        small = ports.of_seen_keys(tile)
        want, got = (solve(it, gradients=False).output for it in (tile, small))
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        if name in ("causal", "window"):
            assert small.shape.key_length < tile.shape.key_length


@pytest.mark.night
def test_a_mistake_that_explains_the_short_rows_only_has_no_name(monkeypatch):
    """The noise of row 3 would hide what the mistake leaves in the others."""
    length = 1024
    monkeypatch.setattr(tiles, "MOST_LOGITS", 2**16)
    rows = np.array([0, 2, 3, 700, 800, 900, 1000, 1023])
    monkeypatch.setattr(tiles, "chosen", lambda reading, sizes=None: rows)
    q, k, v = (
        BFLOAT16.round(it).astype(np.float32)
        for it in drawn(batch=1, heads=8, queries=length, size=128)
    )
    told = {"causal": True, "layout": "batch heads length head", "dtype": "bfloat16"}
    every_fifth = np.tri(length, dtype=bool) & (np.arange(length) % 5 != 3)
    for seen, named in (
        (every_fifth, False),
        (np.tri(length, k=-1, dtype=bool) | (np.arange(length) == 0), True),
    ):
        output = BFLOAT16.round(attention(q, k, v, mask=seen)).astype(np.float32)
        found = diagnose(q, k, v, output, **told)
        assert found.verdict == "deviates"
        assert bool(found.causes) == named, str(found)


@pytest.mark.night
@pytest.mark.usefixtures("short_is_long")
def test_the_log_sum_exp_of_a_long_output_is_judged():
    q, k, v = drawn(queries=40)
    output, sums = attention(q, k, v), lse(q, k)
    told = {"layout": "batch heads length head"}
    found = diagnose(q, k, v, output, log_sum_exp=sums, **told)
    assert found.verdict == "noise", str(found)
    assert [(it.array, it.size) for it in found.differences] == [
        ("output", output.size),
        ("log_sum_exp", sums.size),
    ]
    found = diagnose(q, k, v, output, log_sum_exp=sums / np.log(2), **told)
    assert [it.id for it in found.causes] == ["lse.base-2"], str(found)
    assert [it.fits for it in found.differences] == [True, False]
    spoilt = sums.copy()
    spoilt[1, 2, 33:35] *= 1.5
    found = diagnose(q, k, v, output, log_sum_exp=spoilt, **told)
    assert found.verdict == "deviates"
    assert found.differences[1].where.text == "batch entry 1 (the last), head 2, queries 33 and 34"
    assert found.differences[1].worst.index[:2] == (1, 2)
    logits = np.where(np.tri(40) > 0, q.astype(np.float64) @ k.swapaxes(-1, -2) / 8**0.5, -np.inf)
    sums = np.log(np.exp(logits).sum(axis=-1))
    output = attention(q, k, v, causal=0)
    found = diagnose(q, k, v, output, log_sum_exp=sums, causal=True, **told)
    assert found.verdict == "noise", str(found)


@pytest.mark.night
@pytest.mark.usefixtures("short_is_long")
def test_the_largest_logit_of_a_long_output_is_judged():
    q, k, v = drawn(queries=40)
    output, peaks, told = attention(q, k, v), largest(q, k), {"layout": "batch heads length head"}
    both = {"log_sum_exp": lse(q, k), "max_logit": peaks}
    found = diagnose(q, k, v, output, **both, **told)
    assert found.verdict == "noise", str(found)
    assert [it.array for it in found.differences] == ["output", "log_sum_exp", "max_logit"]
    found = diagnose(q, k, v, output, **{**both, "max_logit": peaks / np.log(2)}, **told)
    assert [it.id for it in found.causes] == ["largest.base-2"], str(found)
    assert [it.fits for it in found.differences] == [True, True, False]
    spoilt = peaks.copy()
    spoilt[1, 2, 33:35] += 1
    found = diagnose(q, k, v, output, max_logit=spoilt, **told)
    assert found.verdict == "deviates"
    assert found.differences[1].where.text == "batch entry 1 (the last), head 2, queries 33 and 34"


def test_a_mistake_that_blocks_everything_is_named_beside_queries_that_see_no_key(monkeypatch):
    # Of the second batch entry, queries 0 to 5 see no key; with the mistake, none does.
    seen = np.tri(12, dtype=bool) & ~np.tri(12, k=-4, dtype=bool)
    output = attention(Q, K, V, mask=seen)
    output[1] = 0
    told = {"causal": "bottom-right", "window": 4, "key_lengths": [12, 6], "layout": "b h n d"}
    found = diagnose(Q, K, V, output, **told)
    assert "window.aligned" in [it.id for it in found.causes], str(found)
    monkeypatch.setattr(search, "ELEMENTS", 2**6)
    found = diagnose(Q, K, V, output, **told)
    assert "window.aligned" in [it.id for it in found.causes], str(found)


# Without the suite's attention: two outputs


def test_two_outputs_alone():
    output = attention(Q, K, V)
    again = attention(Q.astype(np.float64), K, V).astype(np.float32)
    assert against(output, again).verdict == "noise"
    found = against(in_bfloat16(output), again)
    assert (found.verdict, found.dtype) == ("noise", "bfloat16")
    spoilt = output.copy()
    spoilt[:, 2] *= 1.01
    found = against(output, spoilt)
    assert found.verdict == "deviates"
    assert found.differences[0].where.text == "head 2"
    with pytest.raises(BadArrays, match="different shapes"):
        against(output, output[:1])


def in_order(array, *order):
    return np.ascontiguousarray(array.transpose(order))


RIGHT = attention(Q, K, V)
"""An output `[batch heads tokens head]`; with equal sizes, SQUARE has as many tokens as heads."""
SQUARE = attention(*drawn(queries=4))
MERGED = in_order(RIGHT, 0, 2, 1, 3).reshape(2, 12, 32)


def with_part(array, at, factor):
    found = array.copy()
    found[at] *= np.float32(factor)
    return found


OUTPUTS = {
    "factor": (RIGHT * np.float32(0.3), RIGHT, "outputs.factor", {"factor": 0.3}),
    "sign": (-RIGHT, RIGHT, "outputs.negated", {}),
    "sign of two heads": (
        with_part(RIGHT, np.s_[:, 1:3], -1),
        RIGHT,
        "outputs.negated",
        {},
    ),
    "zero": (0 * RIGHT, RIGHT, "outputs.zero", {}),
    "tiled heads": (
        RIGHT[:, [0, 2, 1, 3]],
        RIGHT,
        "outputs.grouped",
        {"of": "heads", "groups": 2, "each": 2},
    ),
    "heads in another order": (
        RIGHT[:, [0, 3, 1, 2]],
        RIGHT,
        "outputs.permuted",
        {"of": "heads", "order": [0, 3, 1, 2]},
    ),
    "heads in another order, side by side": (
        MERGED.reshape(2, 12, 4, 8)[:, :, [0, 2, 1, 3]].reshape(2, 12, 32),
        MERGED,
        "outputs.permuted",
        {"of": "components"},
    ),
    "components before heads": (
        MERGED.reshape(2, 12, 4, 8).swapaxes(2, 3).reshape(2, 12, 32),
        MERGED,
        "outputs.reshaped",
        {"order": [0, 1, 3, 2]},
    ),
    "reversed tokens": (RIGHT[:, :, ::-1], RIGHT, "outputs.reversed", {"of": "tokens"}),
    "rolled tokens": (np.roll(RIGHT, 1, 2), RIGHT, "outputs.rolled", {"count": 1}),
    "tokens rolled back": (np.roll(RIGHT, -2, 2), RIGHT, "outputs.rolled", {"count": -2}),
    "late tokens": (
        np.concatenate([RIGHT[:, :, :1] * 2, RIGHT[:, :, :-1]], 2),
        RIGHT,
        "outputs.late",
        {"count": 1},
    ),
    "early tokens": (
        np.concatenate([RIGHT[:, :, 1:], RIGHT[:, :, :1] * 2], 2),
        RIGHT,
        "outputs.early",
        {"count": 1},
    ),
    "factor of a head": (
        with_part(RIGHT, np.s_[:, 2], 1.5),
        RIGHT,
        "outputs.factor",
        {"factor": 1.5},
    ),
    "an entry of zeros": (with_part(RIGHT, 1, 0), RIGHT, "outputs.zero", {}),
    "transposed": (
        in_order(SQUARE, 0, 2, 1, 3),
        SQUARE,
        "outputs.transposed",
        {"order": [0, 2, 1, 3]},
    ),
    "reshaped": (
        in_order(RIGHT, 0, 2, 1, 3).reshape(RIGHT.shape),
        RIGHT,
        "outputs.reshaped",
        {"order": [0, 2, 1, 3]},
    ),
    "reshaped without a transposition": (
        RIGHT.reshape(2, 12, 32),
        RIGHT,
        "outputs.reshaped",
        {"order": [0, 1, 2, 3], "one": "this output"},
    ),
    "reshaped without a transposition, side by side": (
        RIGHT.reshape(2, 12, 32),
        MERGED,
        "outputs.reshaped",
        {"order": [0, 2, 1, 3]},
    ),
}
"""An output, the other one, and how the first comes from it."""


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_how_one_output_comes_from_another_is_told(name, dtype):
    one, other, cause, arguments = OUTPUTS[name]
    if dtype == "bfloat16":
        one = in_bfloat16(one)
    # One more rounding is no difference.
    found = against(one, (other * np.float64(1 + 1e-7)).astype(np.float32))
    assert found.verdict == "deviates"
    assert found.cause, str(found)
    assert found.cause.id == cause, str(found)
    assert arguments.items() <= found.cause.arguments.items(), str(found)
    assert len(found.causes) == 1, str(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [0.3, -2.5])
@pytest.mark.parametrize("order", ["heads", "tokens", "axes"])
def test_another_order_and_a_factor_are_told_together(order, factor, dtype):
    one, other, cause = {
        "heads": (RIGHT[:, [0, 3, 1, 2]], RIGHT, "outputs.permuted"),
        "tokens": (RIGHT[:, :, ::-1], RIGHT, "outputs.reversed"),
        "axes": (in_order(SQUARE, 0, 2, 1, 3), SQUARE, "outputs.transposed"),
    }[order]
    found = against((in_bfloat16 if dtype == "bfloat16" else np.float32)(one * factor), other)
    (both,) = found.causes
    assert both.id == "mistakes.two", str(found)
    assert [it.id for it in both.arguments["causes"]] == [cause, "outputs.factor"]
    assert both.arguments["causes"][1].arguments["factor"] == pytest.approx(factor, rel=1e-2)
    spoilt = one * np.float32(factor)
    spoilt[0, 1] *= np.float32(1.1)
    assert not against(spoilt, other).causes


def test_outputs_that_differ_in_any_other_way_get_no_cause():
    for other in (attention(Q, K, V, scale=1.0), with_part(RIGHT, np.s_[0, 1, 2, 3], 2)):
        found = against(other, RIGHT)
        assert (found.verdict, found.causes) == ("deviates", [])
        assert "outputs.apart" in [it.id for it in found.notes]


@pytest.mark.parametrize(
    "other",
    [
        in_order(RIGHT, 0, 2, 1, 3),
        MERGED,
        MERGED.reshape(24, 4, 8),
        RIGHT.reshape(8, 12, 8),
        in_order(RIGHT, 3, 1, 0, 2),
        RIGHT[None],
        RIGHT.ravel(),
    ],
)
def test_outputs_with_axes_in_another_order_are_read_so(other):
    for one, two in ((RIGHT, other), (other, RIGHT)):
        found = against(one, two)
        assert found.verdict == "noise", str(found)
        assert found.assumed[0].id == "reading.axes-of-other"
    spoilt = with_part(RIGHT, np.s_[:, 2], 1.01)
    found = against(spoilt, other)
    assert (found.verdict, found.cause.id) == ("deviates", "outputs.factor"), str(found)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 1, 1, 1), (2, 1, 2, 1, 3)])
def test_outputs_of_any_shape_are_compared(shape):
    one = np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)
    assert against(one, one).verdict == "noise"
    for of in (np.ravel(one), one[None]):
        assert against(2 * one, of).cause.text == "the output is 2 times the other one"
    assert against(one * np.float32(np.nan), one).causes == []


def test_an_output_that_is_the_other_one_rounded_is_said_to_be_so():
    for name in ("bfloat16", "float16"):
        narrow = dtype_of(name).round(RIGHT)
        found = against(narrow, RIGHT)
        assert (found.verdict, found.dtype) == ("noise", name)
        (note,) = [it for it in found.notes if it.id == "outputs.rounded"]
        assert note.text == f"this output is the other one rounded to {name}"
        (note,) = [it for it in against(RIGHT, narrow).notes if it.id == "outputs.rounded"]
        assert note.text == f"the other output is this one rounded to {name}"
    assert "outputs.rounded" not in [it.id for it in against(RIGHT, RIGHT).notes]


@pytest.mark.parametrize("suffix", ["npy", "npz", "safetensors", "pt"])
def test_two_files_of_one_array_are_two_outputs(tmp_path, capsys, suffix):
    paths = {name: tmp_path / f"{name}.{suffix}" for name in ("one", "two")}
    for path, array in zip(paths.values(), (RIGHT, RIGHT[:, [0, 2, 1, 3]]), strict=True):
        if suffix == "npy":
            np.save(path, array)
        elif suffix == "npz":
            np.savez(path, array)
        elif suffix == "pt":
            torch = pytest.importorskip("torch")
            torch.save(torch.from_numpy(array.copy()), path)
        else:
            write(path, {"mine": Tensor.of("mine", array)}, {})
    one, two = map(str, paths.values())
    assert main(["diagnose", one, "--against", one]) == ExitCode.OK
    capsys.readouterr()
    assert main(["diagnose", one, "--against", two]) == ExitCode.DEVIATES
    said = capsys.readouterr().out
    assert "tiled against grouped" in said
    assert "query=q" in said
    assert main(["diagnose", one]) == ExitCode.USAGE
    assert "--against" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_two_arrays_without_known_names_in_one_file_are_two_outputs(tmp_path, capsys, suffix):
    path = tmp_path / f"both.{suffix}"

    def stored(**arrays):
        if suffix == "npz":
            np.savez(path, **arrays)
        else:
            write(path, {name: Tensor.of(name, it) for name, it in arrays.items()}, {})

    stored(mine=np.float32(0.5) * RIGHT, yours=RIGHT)
    assert main(["diagnose", str(path)]) == ExitCode.DEVIATES
    assert "the output is 0.5 times the other one" in capsys.readouterr().out
    stored(mine=RIGHT, yours=RIGHT)
    assert main(["diagnose", str(path)]) == ExitCode.OK
    for others in ({"mine": RIGHT, "yours": RIGHT[:1]}, {"a": RIGHT, "b": RIGHT, "c": RIGHT}):
        stored(**others)
        capsys.readouterr()
        assert main(["diagnose", str(path)]) == ExitCode.USAGE
        assert "no array has a known name" in capsys.readouterr().err


def test_two_arrays_are_two_outputs(tmp_path, capsys):
    found = conformance.compare(RIGHT, 2 * RIGHT)
    assert (found.cause.id, found.cause.arguments) == ("outputs.factor", {"factor": 2.0})
    assert found.notes[-1].id == "outputs.alone"
    assert conformance.compare(RIGHT, MERGED).verdict == "noise"
    assert conformance.compare(MERGED, MERGED, heads=4, dtype="float32").layout.endswith("head)")
    with pytest.raises(BadArrays, match=r"the first of the two sides can not be called"):
        conformance.compare(RIGHT, attention, Q, K, V)
    with pytest.raises(
        BadArrays, match=r"value, output are missing; two outputs .*compare\(one, two"
    ):
        diagnose(RIGHT, RIGHT)
    with pytest.raises(BadArrays, match=r"different shapes.* no order of axes, joined"):
        conformance.compare(np.zeros((2, 9, 4)), np.zeros((3, 4, 6)))
    both = tmp_path / "both.npz"
    np.savez(both, output=RIGHT, wanted=-RIGHT)
    assert main(["diagnose", str(both)]) == ExitCode.DEVIATES
    assert "another sign" in capsys.readouterr().out


# Two callables


def test_two_callables_are_compared_by_name():
    found = conformance.compare(attention, lambda *x: attention(*x, scale=1.0), Q, K, V)
    assert found.cause is not None
    assert found.cause.id == "scale.missing"
    assert found.wanted is not None
    assert found.wanted.verdict == "noise"
    weight = np.eye(8, dtype=np.float32) / 2

    def layer(x):
        return attention(x @ weight, x, x), None

    assert conformance.compare(layer, layer, Q).verdict == "noise"
    assert conformance.compare(layer, lambda x: attention(x, x, x), Q).verdict == "deviates"


def test_callables_may_be_in_two_frameworks():
    torch = pytest.importorskip("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found = conformance.compare(attention, sdpa, Q, K, V, frameworks=("numpy", "torch"))
    assert found.verdict == "noise", str(found)
    assert len(found.differences) == 4
    doubled = conformance.compare(
        attention,
        lambda q, k, v: sdpa(q, 2 * k - k.detach(), v),
        Q,
        K,
        V,
        frameworks=("numpy", "torch"),
    )
    assert [it.id for it in doubled.causes] == ["gradient.doubled"]


# A model's configuration

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "rope_theta": 500000.0,
}


def test_a_configuration_says_what_arrays_do_not(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    q, k = rotated(GQ, base=500000.0), rotated(GK, base=500000.0)
    k, v = (np.repeat(x, 2, axis=1) for x in (k, GV))
    before = diagnose(GQ, GK, GV, attention(q, k, v, causal=0), config=path)
    assert before.verdict == "noise", str(before)
    assert "reading.not-rotated" in [it.id for it in before.assumed]
    after = diagnose(q, k[:, ::2], GV, attention(q, k, v, causal=0), config=LLAMA)
    assert after.verdict == "noise", str(after)
    assert "reading.rotated" in [it.id for it in after.assumed]
    merged_heads = [merged(x) for x in (GQ, GK, GV, attention(q, k, v, causal=0))]
    assert diagnose(*merged_heads, config=LLAMA).verdict == "noise"
    found = diagnose(GQ, GK, GV, attention(q, k, v, causal=0, scale=1.0), config=LLAMA)
    assert "scale.missing" in [it.id for it in found.causes], str(found)
    with pytest.raises(BadArrays, match="3 are told"):
        diagnose(Q, K, V, Q, config={**LLAMA, "num_attention_heads": 3})
    assert main(["diagnose", "--config", str(path)]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "4 query heads and 2 key/value heads of 8 components" in told
    assert "with the base 500,000" in told


SCALED_LLAMA = {
    **{name: value for name, value in LLAMA.items() if name != "rope_theta"},
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 50.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
}


@pytest.mark.night
def test_frequencies_that_a_configuration_scales(capsys):
    """They are named where they are not scaled, or scaled as if all were alike."""
    scaling = RotaryScaling.of(SCALED_LLAMA["rope_parameters"])
    right = scaling.scaled(8, 50.0, GQ.shape[2]).frequencies()
    plain = 50.0 ** (-np.arange(4) / 4)
    for rates, cause in ((right, ""), (plain, "scaling.not-applied"), (plain / 4, "scaling.as")):
        angles = np.arange(GQ.shape[2])[:, None] * rates
        cos, sin = np.cos(angles), np.sin(angles)
        q, k = (
            np.concatenate(
                [x[..., :4] * cos - x[..., 4:] * sin, x[..., 4:] * cos + x[..., :4] * sin], axis=-1
            ).astype(np.float32)
            for x in (GQ, GK)
        )
        k, v = (np.repeat(x, 2, axis=1) for x in (k, GV))
        found = diagnose(GQ, GK, GV, attention(q, k, v, causal=0), config=SCALED_LLAMA)
        assert (found.verdict == "noise") == (cause == ""), str(found)
        if cause:
            assert any(it.id.startswith(cause) for it in found.causes), str(found)
    turns = {"base": 50.0, "scaling": {"rope_type": "linear", "factor": 0.5}}
    with pytest.raises(WrongShape, match=r"^rotary_scaling\.factor is 0\.5; it is at least 1"):
        diagnose(GQ, GK, GV, GQ, rotary=turns)


def test_a_scale_that_cannot_be_told(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "model_type": "gemma2", "query_pre_attn_scalar": 0}))
    assert main(["diagnose", "--config", str(path)]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "does not tell the scale" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "layer", "wanted"),
    [
        (
            {
                "model_type": "gemma2",
                "num_attention_heads": 8,
                "head_dim": 256,
                "query_pre_attn_scalar": 224,
                "attn_logit_softcapping": 50.0,
                "sliding_window": 4096,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            0,
            {"scale": 224**-0.5, "soft_cap": 50.0, "window": 4096},
        ),
        (
            {"model_type": "gpt2", "n_head": 12, "n_embd": 768, "scale_attn_weights": False},
            3,
            {"heads": 12, "scale": 1.0},
        ),
        (
            {
                "model_type": "gpt_oss",
                "num_attention_heads": 64,
                "head_dim": 64,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000},
            },
            0,
            {"heads": 64, "window": 128},
        ),
        (
            {
                "model_type": "cohere",
                "num_attention_heads": 4,
                "hidden_size": 32,
                "rope_theta": 10000,
            },
            0,
            {"rotary": {"base": 10000.0, "pairs": "interleaved", "size": 8}},
        ),
        (
            {
                "model_type": "llama4_text",
                "num_attention_heads": 4,
                "hidden_size": 32,
                "attention_chunk_size": 8192,
                "layer_types": ["chunked_attention", "full_attention"],
            },
            0,
            {"chunk": 8192},
        ),
        (
            {
                "model_type": "qwen2_vl",
                "num_attention_heads": 4,
                "hidden_size": 64,
                "rope_theta": 10000.0,
                "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            },
            0,
            {"causal": True},
        ),
        (
            {
                "model_type": "longformer",
                "num_attention_heads": 12,
                "hidden_size": 768,
                "attention_window": [512, 256],
            },
            1,
            {"heads": 12, "window": (128, 128)},
        ),
        (
            {
                "model_type": "modernbert",
                "num_attention_heads": 12,
                "hidden_size": 768,
                "local_attention": 128,
                "global_attn_every_n_layers": 3,
                "global_rope_theta": 160000.0,
                "local_rope_theta": 10000.0,
            },
            1,
            {
                "window": (64, 64),
                "rotary": {"base": 10000.0, "pairs": "halves", "size": 64},
            },
        ),
        (
            {
                "model_type": "modernbert",
                "num_attention_heads": 12,
                "hidden_size": 768,
                "local_attention": 128,
                "global_rope_theta": 160000.0,
            },
            3,
            {"rotary": {"base": 160000.0, "pairs": "halves", "size": 64}},
        ),
    ],
)
def test_kinds_of_configurations(config, layer, wanted):
    options, said = configuration.told(config, layer)
    for name, value in wanted.items():
        assert options[name] == pytest.approx(value) if name == "scale" else value == options[name]
    assert ("window" in options) == ("window" in wanted)
    assert said[0].id == "config.heads"
    if config["model_type"] == "gpt_oss":
        assert {"config.frequencies", "config.sinks"} <= {it.id for it in said}
        assert "rotary" not in options


# Layers: input, weights under the names of a library, and output


def weights_of(kv_heads=2):
    random = np.random.default_rng(3)
    sizes = {"q": (32, 32), "k": (8 * kv_heads, 32), "v": (8 * kv_heads, 32), "o": (32, 32)}
    return {
        f"{name}_proj.weight": (random.standard_normal(size) / 6).astype(np.float32)
        for name, size in sizes.items()
    }


def layer_output(x, weights, *, tile=False, scale=None, turned=False):
    """A layer of Llama in float32, in which key/value heads may be tiled by mistake."""

    def heads(name):
        weight = weights[f"{name}_proj.weight"]
        projected = x @ (weight.T if not turned or name != "k" else weight.reshape(32, -1))
        return separate(projected + weights.get(f"{name}_proj.bias", 0), len(weight) // 8)

    q, k, v = (heads(name) for name in "qkv")
    q, k = rotated(q), rotated(k)
    k, v = (np.tile(a, (1, 2, 1, 1)) if tile else np.repeat(a, 2, axis=1) for a in (k, v))
    return merged(attention(q, k, v, causal=0, scale=scale)) @ weights["o_proj.weight"].T


X = np.random.default_rng(8).standard_normal((2, 10, 32)).astype(np.float32)
WEIGHTS = weights_of()
LAYER = {"config": LLAMA | {"rope_theta": 10000.0}}


def test_the_other_output_of_a_layer_is_judged_too(tmp_path, capsys):
    right, wrong = layer_output(X, WEIGHTS), layer_output(X, WEIGHTS, scale=1.0)
    found = diagnose_layer(X, WEIGHTS, right, wanted=wrong, **LAYER)
    assert (found.verdict, found.wanted.cause.id) == ("noise", "scale.missing")
    found = diagnose_layer(X, WEIGHTS, wrong, wanted=right, **LAYER)
    assert (found.verdict, found.wanted.verdict) == ("deviates", "noise")
    with pytest.raises(UnknownName, match="unknown argument of diagnose 'cuasal'; did you mean ca"):
        diagnose_layer(X, WEIGHTS, right, cuasal=True, **LAYER)
    dump, config = tmp_path / "layer.npz", tmp_path / "config.json"
    config.write_text(json.dumps(LAYER["config"]))
    np.savez(dump, x=X, output=right, expected=wrong, **WEIGHTS)
    assert main(["diagnose", str(dump), "--config", str(config)]) == ExitCode.OK
    assert "equals the answer without the scale" in capsys.readouterr().out


def test_a_layer_may_lack_the_bias_of_its_output():
    random = np.random.default_rng(4)
    sizes = {"q": 32, "k": 16, "v": 16}
    biases = {
        f"{n}_proj.bias": random.standard_normal(size).astype(np.float32)
        for n, size in sizes.items()
    }
    weights, config = WEIGHTS | biases, LAYER["config"] | {"model_type": "qwen2"}
    found = diagnose_layer(X, weights, layer_output(X, weights), config=config)
    assert found.verdict == "noise", str(found)
    found = diagnose_layer(X, weights, layer_output(X, weights, scale=1.0), config=config)
    assert "scale.missing" in [it.id for it in found.causes], str(found)


@pytest.mark.sample(3)
@pytest.mark.parametrize("forgotten", ["q", "k", "v", "qkv"])
def test_a_bias_that_a_layer_forgets_is_told(forgotten):
    random = np.random.default_rng(4)
    sizes, full = {"q": 32, "k": 16, "v": 16}, {"q": "query", "k": "key", "v": "value"}
    biases = {
        f"{n}_proj.bias": 0.15 * random.standard_normal(size).astype(np.float32)
        for n, size in sizes.items()
    }
    weights, config = WEIGHTS | biases, LAYER["config"] | {"model_type": "qwen2"}
    used = weights | {f"{n}_proj.bias": 0 * biases[f"{n}_proj.bias"] for n in forgotten}
    found = diagnose_layer(X, weights, layer_output(X, used), config=config)
    assert len(found.causes) == 1, str(found)
    assert not found.notes, str(found)
    if forgotten == "qkv":
        assert found.causes[0].id == "projection.all-biases-forgotten"
    else:
        assert found.causes[0].id == "projection.bias-forgotten"
        assert found.causes[0].arguments == {"of": full[forgotten]}


def test_a_layer_is_judged_by_its_weights():
    found = diagnose_layer(X, WEIGHTS, layer_output(X, WEIGHTS), **LAYER)
    assert found.verdict == "noise", str(found)
    for wrong, cause in (
        ({"tile": True}, "heads.tiled"),
        ({"scale": 1.0}, "scale.missing"),
        ({"scale": 0.2}, "scale.of-size"),
    ):
        found = diagnose_layer(X, WEIGHTS, layer_output(X, WEIGHTS, **wrong), **LAYER)
        assert cause in [it.id for it in found.causes], str(found)
    without = {n: it for n, it in LAYER["config"].items() if n != "rope_theta"}
    found = diagnose_layer(X, WEIGHTS, layer_output(X, WEIGHTS), config=without)
    assert found.verdict == "noise", "10,000 is what a Llama has if nothing is said"
    del without["model_type"]
    found = diagnose_layer(X, WEIGHTS, layer_output(X, WEIGHTS), of="llama", config=without)
    assert "untold.rotary" in [it.id for it in found.causes], str(found)
    with pytest.raises(BadArrays, match="weights of none of"):
        diagnose_layer(X, {"w": X[0]}, X)
    with pytest.raises(BadArrays, match="x has 16 components"):
        diagnose_layer(X[..., :16], WEIGHTS, X, **LAYER)
    with pytest.raises(BadArrays, match="output has shape"):
        diagnose_layer(X, WEIGHTS, X[:1], **LAYER)


@pytest.mark.parametrize("form", ["params", "flat", "model"])
def test_weights_are_named_as_their_libraries_hand_them_out(form):
    """As the tree of Flax, and with the name of the layer before them, as Keras does."""
    random = np.random.default_rng(3)
    tree = {name: {"kernel": random.standard_normal((32, 4, 8)) / 6} for name in ("query", "key")}
    tree["value"] = {"kernel": random.standard_normal((32, 4, 8)) / 6}
    tree["out"] = {"kernel": random.standard_normal((4, 8, 32)) / 6}
    q, k, v = (
        np.einsum("btw,whd->bhtd", X, tree[it]["kernel"]) for it in ("query", "key", "value")
    )
    output = np.einsum("bhtd,hdw->btw", attention(q, k, v), tree["out"]["kernel"])
    flat = {f"attention/{name}/kernel": leaf["kernel"] for name, leaf in tree.items()}
    given = {"params": {"params": tree}, "flat": flat, "model": {"layers": {"0": tree}}}[form]
    assert diagnose_layer(X, given, output, of="flax-linen", dtype="float32").verdict == "noise"
    two = {"one": tree, "two": tree}
    with pytest.raises(ConformanceError, match="unexpected one/"):
        diagnose_layer(X, two, output, of="flax-linen")


def test_a_layer_of_torch_is_told_from_a_file(tmp_path, capsys):
    random = np.random.default_rng(4)
    sizes = {"in_proj_weight": (96, 32), "out_proj.weight": (32, 32)}
    sizes |= {"in_proj_bias": (96,), "out_proj.bias": (32,)}
    weights = {n: (random.standard_normal(s) / 6).astype(np.float32) for n, s in sizes.items()}
    packed = X @ weights["in_proj_weight"].T + weights["in_proj_bias"]
    q, k, v = (separate(part, 4) for part in np.split(packed, 3, axis=-1))
    for scale, code in ((None, ExitCode.OK), (1.0, ExitCode.DEVIATES)):
        heads = merged(attention(q, k, v, scale=scale))
        output = heads @ weights["out_proj.weight"].T + weights["out_proj.bias"]
        np.savez(tmp_path / "layer.npz", x=X, output=output, **weights)
        arguments = ["diagnose", str(tmp_path / "layer.npz"), "--of", "torch-mha", "--heads", "4"]
        assert main(arguments) == code, capsys.readouterr()
    assert "equals the answer without the scale" in capsys.readouterr().out


def checkpoint_of(transformers, kind):
    """A small model of Hugging Face, and the attention and its output projection of layer 1."""
    import torch

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    grouped = {**sizes, "num_key_value_heads": 2}
    wide = {**grouped, "head_dim": 8}
    config, model, place = {
        "bert": (("BertConfig", sizes), "BertModel", "encoder.layer.1.attention"),
        "gpt2": (
            ("GPT2Config", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
            "GPT2LMHeadModel",
            "transformer.h.1.attn",
        ),
        "llama": (("LlamaConfig", grouped), "LlamaForCausalLM", "model.layers.1.self_attn"),
        "qwen2": (("Qwen2Config", grouped), "Qwen2ForCausalLM", "model.layers.1.self_attn"),
        "qwen3": (("Qwen3Config", wide), "Qwen3ForCausalLM", "model.layers.1.self_attn"),
        "gemma": (("GemmaConfig", wide), "GemmaForCausalLM", "model.layers.1.self_attn"),
        "gemma2": (
            ("Gemma2Config", {**wide, "query_pre_attn_scalar": 16}),
            "Gemma2ForCausalLM",
            "model.layers.1.self_attn",
        ),
        "gemma3_text": (
            ("Gemma3TextConfig", {**wide, "query_pre_attn_scalar": 16}),
            "Gemma3ForCausalLM",
            "model.layers.1.self_attn",
        ),
    }[kind]
    built = getattr(transformers, config[0])(**config[1], attn_implementation="eager")
    torch.manual_seed(0)
    found = getattr(transformers, model)(built).eval()
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.ndim > 1 else 0.5)
    attention = found.get_submodule(place)
    last = {"bert": "output.dense", "gpt2": "c_proj"}.get(kind, "o_proj")
    core = attention.self if kind == "bert" else attention
    return found, core, attention.get_submodule(last)


KINDS = ("bert", "gpt2", "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_a_checkpoint_is_told_from_its_files(tmp_path, capsys, kind):
    transformers = pytest.importorskip("transformers")
    import torch

    model, attention, last = checkpoint_of(transformers, kind)
    seen = {}

    def of_inputs(module, inputs, named):
        seen["x"] = (inputs[0] if inputs else named["hidden_states"]).numpy()

    attention.register_forward_pre_hook(of_inputs, with_kwargs=True)
    last.register_forward_hook(lambda module, inputs, output: seen.update(output=output.numpy()))
    model.save_pretrained(tmp_path)
    files = [str(tmp_path / name) for name in ("dump.npz", "model.safetensors")]
    told = ["--config", str(tmp_path / "config.json"), "--layer", "1"]
    for wrong, code in ((False, ExitCode.OK), (True, ExitCode.DEVIATES)):
        if wrong:
            attention.scaling = 1.0
            attention.scale_attn_weights = False
        with torch.no_grad():
            model(torch.arange(24).reshape(2, 12))
        np.savez(files[0], **seen)
        # The configuration says of which kind the model is.
        for named in (["--of", kind], []):
            capsys.readouterr()
            assert main(["diagnose", *files, *told, *named]) == code, capsys.readouterr()
    assert "equals the answer without the scale" in (said := capsys.readouterr().out)
    assert "component" in said
    assert " head " not in said
    if kind != "bert":
        assert "output: queries 1 and later" in said


def of_flax():
    """A layer of Flax and a wrong answer: x, weights, right and wrong output."""
    pytest.importorskip("flax")
    import flax
    import jax

    layer = flax.linen.MultiHeadDotProductAttention(4, qkv_features=32)
    started = layer.init(jax.random.PRNGKey(0), X, X)
    random = np.random.default_rng(0)
    tree = jax.tree.map(
        lambda it: it + np.float32(0.3) * random.standard_normal(it.shape, np.float32), started
    )
    flat = flax.traverse_util.flatten_dict(tree["params"], sep="/")

    def unscaled(query, key, value, **told):
        return flax.linen.dot_product_attention(query * 8**0.5, key, value)

    again = flax.linen.MultiHeadDotProductAttention(4, qkv_features=32, attention_fn=unscaled)
    outputs = (np.asarray(it.apply(tree, X, X)) for it in (layer, again))
    return {name: np.asarray(it) for name, it in flat.items()}, *outputs


def of_keras():
    """The same of Keras."""
    keras = pytest.importorskip("keras")
    layer = keras.layers.MultiHeadAttention(4, 8)
    layer(X, X)
    random = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(weight + 0.3 * random.standard_normal(weight.shape))
    numbers = keras.ops.convert_to_numpy
    weights = {it.path: numbers(it) for it in layer.weights}
    right = numbers(layer(X, X))
    layer._inverse_sqrt_key_dim = 1.0
    return weights, right, numbers(layer(X, X))


@pytest.mark.night
@pytest.mark.parametrize(
    ("of", "made", "separator"),
    [("flax-linen", of_flax, "/"), ("flax-linen", of_flax, "."), ("keras-jax-mha", of_keras, "/")],
)
def test_a_layer_of_a_tree_is_told_from_a_file(tmp_path, capsys, of, made, separator):
    weights, right, wrong = made()
    path = tmp_path / "layer.npz"
    for before in ("", "encoder/attention/"):
        named = {f"{before}{it}".replace("/", separator): weights[it] for it in weights}
        for output, code in ((right, ExitCode.OK), (wrong, ExitCode.DEVIATES)):
            capsys.readouterr()
            np.savez(path, x=X, output=output, **named)
            assert main(["diagnose", str(path), "--of", of]) == code, capsys.readouterr()
        assert "equals the answer without the scale" in capsys.readouterr().out
    two = {f"{before}/{name}": it for before in "ab" for name, it in weights.items()}
    np.savez(path, x=X, output=right, **two)
    assert main(["diagnose", str(path), "--of", of]) == ExitCode.USAGE
    assert "there are weights of 2 layers" in capsys.readouterr().err


def test_a_layer_of_cross_attention_is_judged_by_its_three_inputs():
    random = np.random.default_rng(0)
    query, memory = (random.standard_normal((2, n, 32)).astype(np.float32) for n in (5, 9))
    weights = {
        "in_proj_weight": random.standard_normal((96, 32)).astype(np.float32) / 6,
        "in_proj_bias": random.standard_normal(96).astype(np.float32),
        "out_proj.weight": random.standard_normal((32, 32)).astype(np.float32) / 6,
        "out_proj.bias": random.standard_normal(32).astype(np.float32),
    }
    sides = zip(
        (query, memory, memory),
        np.split(weights["in_proj_weight"], 3),
        np.split(weights["in_proj_bias"], 3),
        strict=True,
    )
    heads = [separate(x @ weight.T + bias, 4) for x, weight, bias in sides]
    told = {"of": "torch-mha", "heads": 4}
    for scale, causes in ((None, []), (1.0, ["scale.missing"])):
        output = merged(attention(*heads, scale=scale)) @ weights["out_proj.weight"].T
        output = output + weights["out_proj.bias"]
        found = diagnose_layer((query, memory, memory), weights, output, **told)
        assert [it.id for it in found.causes] == causes, str(found)
    with pytest.raises(BadArrays, match="tuple of 2"):
        diagnose_layer((query, memory), weights, output, **told)
    with pytest.raises(BadArrays, match="do not go together"):
        diagnose_layer((query, memory[:1], memory), weights, output, **told)


# Two models


def model_of(*, turn="halves", layers=3, wrong=-1):
    """A model of attentions with rotary embeddings, of which one may be wrong."""
    torch = pytest.importorskip("torch")

    class Attention(torch.nn.Module):
        def __init__(self, pairs):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                torch.nn.Linear(32, 32) for _ in range(4)
            )
            self.pairs = pairs

        def forward(self, x):
            def split(projected):
                return projected.view(*x.shape[:2], 4, 8).transpose(1, 2).detach().numpy()

            q, k, v = (split(it(x)) for it in (self.q_proj, self.k_proj, self.v_proj))
            q, k = (rotated(it, pairs=self.pairs) for it in (q, k))
            output = attention(q, k, v, causal=0)
            return self.o_proj(torch.from_numpy(merged(output))), None

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.layers = torch.nn.ModuleList(
                Attention(turn if layer == wrong else "halves") for layer in range(layers)
            )

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)[0]
            return x

    return Model()


def test_the_first_attention_that_differs_is_found():
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    told = {"heads": 4, "causal": True, "rotary": {"base": 10000.0, "pairs": "halves"}}
    found = conformance.compare_models(model_of(), model_of(), x, **told)
    assert found.verdict == "noise", str(found)
    assert "3 attentions are alike" in str(found)
    other = model_of(turn="interleaved", wrong=1)
    found = conformance.compare_models(model_of(), other, x, **told)
    assert [it.id for it in found.causes] == ["rotary.pairs"], str(found)
    assert str(found).startswith("layer 1, layers.1\n")
    untold = conformance.compare_models(model_of(), other, x, heads=4)
    assert (untold.verdict, untold.place) == ("deviates", "layer 1, layers.1")
    other = model_of()
    other.layers[2].k_proj.weight.data[3] += 0.01
    found = conformance.compare_models(model_of(), other, x, **told)
    assert found.causes[0].text == "the weights of the projections differ: key"
    with pytest.raises(BadArrays, match="3 attentions"):
        conformance.compare_models(model_of(), model_of(layers=2), x, **told)
    with pytest.raises(BadArrays, match="no module with projections"):
        conformance.compare_models(torch.nn.Linear(32, 32), other, x, **told)
    with pytest.raises(BadArrays, match="how many heads"):
        conformance.compare_models(model_of(), other, x)


def test_models_of_hugging_face_say_what_they_are():
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        architectures=["LlamaForCausalLM"],
    )
    models = []
    for scale in (8**-0.5, 1.0):
        torch.manual_seed(0)
        models.append(transformers.LlamaModel(config).eval())
        models[-1].layers[1].self_attn.scaling = scale
    tokens = torch.arange(20).reshape(2, 10)
    assert conformance.compare_models(models[0], models[0], tokens).verdict == "noise"
    found = conformance.compare_models(*models, {"input_ids": tokens})
    assert "scale.missing" in [it.id for it in found.causes], str(found)
    assert found.place == "layer 1, layers.1.self_attn"


def layers_of_torch(*, wrong=-1, first=True, causal=True, scale=None, off=0):
    """A model of `torch.nn.MultiheadAttention`, and a port, of which one layer may be wrong."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)

    class Port(torch.nn.Module):
        def __init__(self, layer, number):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                torch.nn.Linear(32, 32) for _ in range(4)
            )
            weights = [*layer.in_proj_weight.chunk(3), layer.out_proj.weight]
            biases = [*layer.in_proj_bias.chunk(3), layer.out_proj.bias]
            ours = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
            for mine, weight, bias in zip(ours, weights, biases, strict=True):
                mine.weight.data, mine.bias.data = weight.data.clone(), bias.data.clone()
            self.wrong = number == wrong

        def forward(self, x):
            def split(projected):
                return projected.view(*x.shape[:2], 4, 8).transpose(1, 2).detach().numpy()

            heads = [split(it(x)) for it in (self.q_proj, self.k_proj, self.v_proj)]
            told = {"scale": scale, "causal": off} if self.wrong else {"causal": 0}
            output = attention(*heads, **(told if causal else {**told, "causal": None}))
            return self.o_proj(torch.from_numpy(merged(output)))

    class Theirs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = torch.nn.MultiheadAttention(32, 4, batch_first=first)
            torch.nn.init.normal_(self.attn.in_proj_bias)
            torch.nn.init.normal_(self.attn.in_proj_weight, std=0.3)

        def forward(self, x):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            x = x if first else x.transpose(0, 1)
            y = self.attn(x, x, x, attn_mask=mask if causal else None)[0]
            return y if first else y.transpose(0, 1)

    theirs = [Theirs() for _ in range(3)]
    ports = [Port(it.attn, number) for number, it in enumerate(theirs)]
    return torch.nn.Sequential(*theirs).eval(), torch.nn.Sequential(*ports)


@pytest.mark.sample(2)
@pytest.mark.parametrize("first", [True, False])
def test_a_layer_of_torch_is_compared_with_its_port(first):
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    for causal in (True, False):
        found = conformance.compare_models(*layers_of_torch(first=first, causal=causal), x)
        assert found.verdict == "noise", str(found)
        assert "3 attentions are alike" in str(found)
    for told, cause in (({"scale": 1.0}, "scale.missing"), ({"off": 1}, "causal.sees-next-key")):
        found = conformance.compare_models(*layers_of_torch(wrong=1, first=first, **told), x)
        assert [it.id for it in found.causes] == [cause], str(found)
        assert (found.place, found.wanted.verdict) == ("layer 1, 1", "noise")
    theirs, ports = layers_of_torch(first=first)
    ports[2].v_proj.bias = None
    found = conformance.compare_models(theirs, ports, x)
    assert found.causes[0].text == "the weights of the projections differ: value"
    theirs, ports = layers_of_torch(wrong=1, first=first, scale=1.0)
    found = conformance.compare_models(ports, theirs, x)
    assert (found.verdict, found.place) == ("deviates", "layer 1, 1.attn")
    assert [it.id for it in found.wanted.causes] == ["scale.missing"], str(found)


def test_a_padded_encoder_of_torch_is_compared():
    torch = pytest.importorskip("torch")

    def encoder(forgets=False):
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 2).eval()
        for it in model.layers:
            torch.nn.init.normal_(it.self_attn.in_proj_weight, std=0.4)
        own = model.layers[1].self_attn
        if forgets:
            called = own.forward
            own.forward = lambda *x, **told: called(*x, **{**told, "key_padding_mask": None})
        return model

    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(10) >= torch.tensor([[10], [7]])
    batch = {"src": x, "src_key_padding_mask": padding}
    found = conformance.compare_models(encoder(), encoder(True), batch)
    assert "mask.not-applied" in [it.id for it in found.causes], str(found)
    assert found.place == "layer 1, layers.1.self_attn"
    with torch.no_grad():
        # torch then nests the entries, each of which has a length of its own.
        assert conformance.compare_models(encoder(), encoder(), batch).verdict == "noise"


def test_a_layer_of_torch_is_compared_with_a_function():
    torch = pytest.importorskip("torch")
    theirs, ports = layers_of_torch(wrong=0, causal=False, scale=1.0)
    layer, port, x = theirs[0].attn, ports[0], torch.randn(2, 10, 32)

    def function(query, key, value):
        return port(query)

    found = conformance.compare(layer, function, x, x, x)
    assert [it.id for it in found.causes] == ["scale.missing"], str(found)
    assert found.wanted.verdict == "noise"
    found = conformance.compare(lambda x: layer(x, x, x), port, x, heads=4)
    assert [it.id for it in found.causes] == ["scale.missing"], str(found)
    assert conformance.compare(layer, lambda *x: layer(*x), x, x, x).verdict == "noise"
    found = conformance.compare(*layers_of_torch(wrong=1, scale=1.0), x)
    assert (found.place, found.cause.id) == ("layer 1, 1", "scale.missing")
    found = conformance.compare(lambda x: layer(x, x, x), port, x)
    assert "say how many heads Port has" in str(found)


def gpt2(**told):
    """A small model of GPT-2, whose projections of query, key and value are packed."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "initializer_range": 0.2}
    config = transformers.GPT2Config(**sizes, architectures=["GPT2LMHeadModel"], **told)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.sample(3)
@pytest.mark.parametrize("order", ["sides", "heads", "heads of weights by sides"])
def test_packed_projections_are_compared(order):
    torch = pytest.importorskip("torch")

    class Packed(torch.nn.Module):
        def __init__(self, theirs, scale):
            super().__init__()
            self.qkv, self.proj = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
            rows = torch.arange(96)
            if order == "heads":
                rows = rows.view(3, 4, 8).transpose(0, 1).flatten()
            self.qkv.weight.data = theirs.c_attn.weight.data.T[rows].clone()
            self.qkv.bias.data = theirs.c_attn.bias.data[rows].clone()
            self.proj.weight.data = theirs.c_proj.weight.data.T.clone()
            self.proj.bias.data = theirs.c_proj.bias.data.clone()
            self.scale = scale

        def forward(self, x, *others, **told):
            packed = self.qkv(x).detach().numpy().reshape(*x.shape[:2], 96)
            if order == "sides":
                apart = packed.reshape(*x.shape[:2], 3, 4, 8).transpose(2, 0, 3, 1, 4)
            else:
                apart = packed.reshape(*x.shape[:2], 4, 3, 8).transpose(3, 0, 2, 1, 4)
            output = attention(*apart, causal=0, scale=self.scale)
            return self.proj(torch.from_numpy(merged(output))), None

    tokens = torch.arange(24).reshape(2, 12)
    for scale in (None, 1.0):
        ours = gpt2()
        for layer, block in enumerate(ours.transformer.h):
            block.attn = Packed(block.attn, scale if layer == 3 else None)
        found = conformance.compare_models(gpt2(), ours, tokens)
        if order == "heads of weights by sides":
            assert found.place == "layer 0, transformer.h.0.attn"
            assert [it.id for it in found.causes] == ["layers.packed-otherwise"], str(found)
            assert "the query, key and value of each head" in found.causes[0].text
        elif scale is None:
            assert found.verdict == "noise", str(found)
        else:
            assert [it.id for it in found.causes] == ["scale.missing"], str(found)
            assert found.place == "layer 3, transformer.h.3.attn"


def test_a_packed_projection_beside_a_layer_of_torch():
    torch = pytest.importorskip("torch")

    class Ours(torch.nn.Module):
        def __init__(self, theirs, beyond):
            super().__init__()
            self.attn = torch.nn.MultiheadAttention(32, 4, batch_first=True)
            self.attn.in_proj_weight.data = theirs.c_attn.weight.data.T.clone()
            self.attn.in_proj_bias.data = theirs.c_attn.bias.data.clone()
            self.attn.out_proj.weight.data = theirs.c_proj.weight.data.T.clone()
            self.attn.out_proj.bias.data = theirs.c_proj.bias.data.clone()
            self.beyond = beyond

        def forward(self, x, *others, **told):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1 + self.beyond)
            return self.attn(x, x, x, attn_mask=mask)

    tokens = torch.arange(24).reshape(2, 12)
    for wrong in (-1, 3):
        ours = gpt2()
        for layer, block in enumerate(ours.transformer.h):
            block.attn = Ours(block.attn, int(layer == wrong))
        found = conformance.compare_models(gpt2(), ours, tokens)
        if wrong < 0:
            assert found.verdict == "noise", str(found)
        else:
            assert [it.id for it in found.causes] == ["causal.sees-next-key"], str(found)
            assert found.place == "layer 3, transformer.h.3.attn.attn"
        # What the layer blocks, its arguments say, and not the configuration.
        back = conformance.compare_models(ours, gpt2(), tokens)
        assert back.verdict == found.verdict
        assert wrong < 0 or back.wanted.verdict == "noise"


def test_rotary_pairs_behind_a_packed_projection():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.phi3 import modeling_phi3

    def model():
        torch.manual_seed(0)
        config = transformers.Phi3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            pad_token_id=0,
            architectures=["Phi3ForCausalLM"],
        )
        return transformers.Phi3ForCausalLM(config).eval()

    def neighbours(q, k, cos, sin, *others):
        cos, sin = (it[:, None, :, : it.shape[-1] // 2] for it in (cos, sin))
        cos, sin = (it.repeat_interleave(2, -1) for it in (cos, sin))
        turned = (
            torch.stack((-it[..., 1::2], it[..., ::2]), -1).flatten(-2) * sin for it in (q, k)
        )
        return tuple(it * cos + other for it, other in zip((q, k), turned, strict=True))

    tokens, other = torch.arange(24).reshape(2, 12), model()
    assert conformance.compare_models(model(), other, tokens).verdict == "noise"
    own = other.model.layers[3].self_attn
    called = own.forward

    def forward(*x, **told):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_phi3, "apply_rotary_pos_emb", neighbours)
            return called(*x, **told)

    own.forward = forward
    found = conformance.compare_models(model(), other, tokens)
    assert [it.id for it in found.causes] == ["rotary.pairs"], str(found)
    assert found.place == "layer 3, model.layers.3.self_attn"


# σ for tests of one's own


def test_noise_has_the_layout_of_the_query():
    q, k, v = turned(Q, K, V)
    with pytest.raises(Ambiguous, match="layout"):
        conformance.noise(q, k, v)
    found = conformance.noise(q, k, v, layout=LAYOUT)
    assert found.expected["output"].shape == found.sigma["output"].shape == q.shape
    (output,) = turned(attention(Q, K, V))
    error = np.abs(output - found.expected["output"])
    assert (error <= found.limit * found.sigma["output"]).all()
    assert found.sigma["output"].max() < 1e-6
    half = conformance.noise(q, k, v, layout=LAYOUT, dtype="bfloat16")
    assert half.sigma["output"].min() > found.sigma["output"].max()


def test_an_assertion_names_the_mistake():
    conformance.assert_within_noise(attention(Q, K, V), Q, K, V)
    with pytest.raises(AssertionError, match="equals the answer without the scale"):
        conformance.assert_within_noise(attention(Q, K, V, scale=1.0), Q, K, V)


def test_the_noise_of_a_log_sum_exp_covers_what_float32_makes_of_it():
    (reading,) = readings(Given(query=Q, key=K, value=V, output=None, layout="b h n d"))
    want, sigma = of_statistic(LOG_SUM_EXP, reading.problem)
    np.testing.assert_allclose(want, lse(Q, K), rtol=1e-12)
    logits = Q @ K.swapaxes(-1, -2) * np.float32(8**-0.5)
    got = np.log(np.exp(logits).sum(axis=-1, dtype=np.float32))
    assert (np.abs(got - want) < 8 * sigma).all()
    assert sigma.max() < 1e-5


# Bad input: one line, and nothing executed

BAD = {
    "missing": ({"output": None}, "output is missing"),
    "integers": ({"query": np.ones((2, 4, 12, 8), int)}, "query holds int64"),
    "NaN": ({"key": np.full_like(K, np.nan)}, "768 elements that are NaN"),
    "empty": ({"value": V[:, :, :0]}, "value is empty"),
    "batch": ({"key": K[:1], "value": V[:1]}, "different batch sizes"),
    "lengths": ({"value": V[:, :, :5], "layout": "b h n d"}, "different lengths"),
    "heads": ({"key": K[:, :3], "value": V[:, :3], "layout": "b h n d"}, "cannot share 3"),
    "sizes": ({"query": Q[..., :4]}, "heads of different sizes"),
    "output": ({"output": Q[..., :3]}, "not \\[batch heads query head\\]"),
    "axes": ({"query": Q[0]}, "different numbers of axes"),
    "five axes": ({"query": Q[None], "key": K[None], "value": V[None]}, "layout="),
    "mask": ({"mask": np.ones((5, 5), bool)}, "mask has shape"),
    "mask with NaN": ({"mask": np.full((12, 12), np.nan)}, "NaN"),
    "sinks": ({"sinks": SINKS[:2]}, "sinks has shape"),
    "text": ({"query": np.array(["a"])}, "neither numbers nor booleans"),
    "weights": ({"weights": np.ones((2, 4, 3, 3))}, "weights have shape"),
    "log-sum-exp": ({"log_sum_exp": np.ones((2, 3))}, "log_sum_exp has shape"),
    "largest logit": ({"max_logit": np.ones((2, 3))}, "max_logit has shape .*, wanted \\[batch"),
    "largest logit of integers": ({"max_logit": np.ones((2, 4, 12), int)}, "max_logit holds int64"),
    "window": ({"window": 0}, "at least 1"),
    "rotary": ({"rotary": {"bases": 3}}, "rotary takes"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name):
    changed, told = BAD[name]
    with pytest.raises(ConformanceError, match=told) as raised:
        diagnose(**{**of(Q, K, V, attention(Q, K, V)), **changed})
    assert "\n" not in str(raised.value)


def test_unknown_words_are_told():
    for wrong in ({"dtype": "int8"}, {"accuracy": "Z"}, {"causal": "left"}):
        with pytest.raises(UnknownName):
            diagnose(**of(Q, K, V, attention(Q, K, V)), **wrong)


class Trap:
    def __reduce__(self):
        raise AssertionError("executed")


def test_files_that_are_no_dumps(tmp_path, capsys):
    objects = tmp_path / "objects.npz"
    np.savez(objects, query=np.array([{}], dtype=object))
    pickled = tmp_path / "dump.pkl"
    pickled.write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(b"PK\x03\x04 no archive")
    foreign = tmp_path / "foreign.npz"
    np.savez(foreign, a=Q, b=K, c=V)
    cut = tmp_path / "cut.npy"
    np.save(cut, Q)
    cut.write_bytes(cut.read_bytes()[:100])
    unreadable = tmp_path / "cut.safetensors"
    unreadable.write_bytes(b"\x10")
    for path, told in (
        (objects, "Python objects"),
        (pickled, "not opened"),
        (damaged, "cannot be read"),
        (foreign, "a, b"),
        (cut, "cannot be read"),
        (unreadable, "safetensors"),
        (tmp_path / "gone.npz", "cannot be read"),
    ):
        assert main(["diagnose", str(path)]) == ExitCode.USAGE
        error = capsys.readouterr().err
        assert told in error, error
        assert error.count("\n") == 1


def test_a_large_file_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "large.npy"
    with path.open("wb") as file:
        file.truncate(2**31 + 1)
    with pytest.raises(BadArrays, match="one batch entry"):
        files.read([path])


# The command


def test_the_command_has_an_exit_code_for_each_verdict(tmp_path, capsys):
    wrong, right, flat = (tmp_path / f"{name}.npz" for name in ("wrong", "right", "flat"))
    np.savez(wrong, q=Q, k=K, v=V, out=attention(Q, K, V, scale=1.0))
    np.savez(right, q=Q, k=K, v=V, out=attention(Q, K, V))
    np.savez(flat, q=Q, k=K, v=np.ones_like(V), out=np.ones_like(V))
    assert main(["diagnose", str(wrong)]) == ExitCode.DEVIATES
    assert "equals the answer without the scale" in capsys.readouterr().out
    assert main(["diagnose", str(wrong), "--scale", "1"]) == ExitCode.OK
    assert main(["diagnose", str(right)]) == ExitCode.OK
    assert main(["diagnose", str(flat)]) == ExitCode.NOTHING_VERIFIED
    capsys.readouterr()
    assert main(["diagnose", str(right), "--against", str(wrong), "--json"]) == ExitCode.OK
    printed = msgspec.json.decode(capsys.readouterr().out, type=Diagnosis)
    assert printed.wanted is not None
    assert printed.wanted.causes[0].id == "scale.missing"
    assert main(["diagnose"]) == ExitCode.USAGE


@pytest.mark.usefixtures("one_mistake")
def test_the_worst_head_is_drawn(tmp_path):
    dump, plot = tmp_path / "dump.npz", tmp_path / "map.svg"
    output = attention(Q, K, V)
    output[1, 2, 4:7, 3] += 1
    np.savez(dump, **of(Q, K, V, output))
    assert main(["diagnose", str(dump), "--plot", str(plot)]) == ExitCode.DEVIATES
    drawn = ElementTree.fromstring(plot.read_text())
    inks = [it.get("fill") for it in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert (inks.count("#c0392b"), len(inks)) == (3, 1 + 12 * 8)
    # The outline of three cells, one above the other, has eight sides.
    assert plot.read_text().count("M") == 8
    found = diagnose(Q, K, V, output)
    assert (found.map.entry, found.map.head) == (1, 2)
    assert found._repr_html_().startswith("<pre>deviates: 3 of 768")
    assert "<svg" in found._repr_html_()
    assert main(["diagnose", str(dump), "--plot", str(tmp_path / "map.png")]) == ExitCode.USAGE


def test_outputs_alone_are_compared(tmp_path, capsys):
    one, other = tmp_path / "output.npy", tmp_path / "other.npy"
    np.save(one, attention(Q, K, V))
    np.save(other, attention(Q, K, V, scale=1.0))
    assert main(["diagnose", str(one), "--against", str(one)]) == ExitCode.OK
    assert main(["diagnose", str(one), "--against", str(other)]) == ExitCode.DEVIATES
    assert "no known mistake" not in capsys.readouterr().out
    assert main(["diagnose", str(one)]) == ExitCode.USAGE
    assert "--against" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_a_suggested_problem_tells_mistakes_apart(tmp_path, capsys, suffix):
    path = tmp_path / f"problem.{suffix}"
    assert main(["diagnose", "--suggest", str(path), "--causal", "bottom-right"]) == ExitCode.OK
    arrays, _ = files.read([path])
    names = ("query", "key", "value", "wanted")
    q, k, v, wanted = (arrays[name].values.astype(np.float32) for name in names)
    assert diagnose(q, k, v, wanted, causal="bottom-right").verdict == "noise"
    found = diagnose(q, k, v, attention(q, k, v, causal=0), causal="bottom-right")
    assert [it.id for it in found.causes] == ["causal.aligned"]


def test_a_torch_file_holds_tensors_only(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "dump.pt"
    arrays = of(Q, K, V, attention(Q, K, V, scale=1.0))
    torch.save({n: torch.from_numpy(a).to(torch.float32) for n, a in arrays.items()}, path)
    found = diagnose(**files.arguments(*files.read([path])))
    assert found.cause is not None
    assert found.cause.id == "scale.missing"
    half = {n: torch.from_numpy(a).to(torch.bfloat16) for n, a in arrays.items()}
    assert diagnose(**half).dtype == "bfloat16"
    torch.save({"query": Trap}, path)
    with pytest.raises(ConformanceError, match="more than tensors"):
        files.read([path])


# How the search works


def rich():
    """A problem with as much as goes together, on two batch entries and two groups of heads."""
    q, k, v = drawn(batch=2, heads=4, kv_heads=2, queries=6, keys=9)
    random = np.random.default_rng(4)
    options = {
        "query": q,
        "key": k,
        "value": v,
        "output": None,
        "layout": "b h n d",
        "mask": random.random((2, 4, 6, 9)) < 0.8,
        "mask_true": "attends",
        "bias": random.standard_normal((2, 4, 6, 9)).astype(np.float32),
        "causal": "bottom-right",
        "soft_cap": 3.0,
        "sinks": SINKS,
        "slopes": np.float32([0.1, 0.2, 0.3, 0.4]),
        "rotary": Rotary(size=8),
        "norm": Norm(query=np.linspace(0.5, 1.5, 8), key=np.linspace(0.6, 1.4, 8)),
        "key_lengths": [9, 7],
    }
    (one,) = readings(Given(**options))
    (plain,) = readings(Given(query=q, key=k, value=v, output=None, layout="b h n d"))
    options["window"], options["causal"] = (3, 2), None
    (window,) = readings(Given(**options))
    return one.problem, plain.problem, window.problem


@np.errstate(all="ignore")
def test_a_part_shows_every_mistake_that_does_not_join_heads_or_entries():
    for problem in rich():
        part = ports.part(problem, 1, 1)
        small = {
            (one.cause, number): one for number, one in numbered(every_hypothesis(Maker(part)))
        }
        compared = 0
        for number, one in numbered(every_hypothesis(Maker(problem))):
            other = small.get((one.cause, number))
            if other is None or one.cause.id.startswith(ports.ACROSS) or one.breaks:
                continue
            whole = one.make().output
            if whole.shape[-1] != 32:
                continue
            there = merged(separate(whole, 4)[1:, 2:])
            here = other.make().output
            finite = np.isfinite(there) & np.isfinite(here)
            np.testing.assert_allclose(
                here[finite], there[finite], rtol=1e-9, atol=1e-12, err_msg=str(one.cause)
            )
            compared += 1
        assert compared > 60


def test_gradients_make_no_output_short(monkeypatch):
    """Trying every mistake on 16 heads of 512 tokens with gradients took minutes."""
    monkeypatch.setattr(tiles, "MOST_WHOLE", 2**8)
    arrays = {"query": Q, "key": K, "value": V, "output": Q, "layout": "batch heads length head"}
    (whole,) = readings(Given(**arrays, weights=np.zeros((2, 4, 12, 12), np.float32)))
    (long,) = readings(Given(**arrays, gradients={"output": Q, "key": K}))
    assert [tiles.is_long(it) for it in (whole, long)] == [False, True]


@pytest.mark.usefixtures("one_mistake")
def test_what_is_unknown_of_a_long_output_takes_less_memory_than_its_weights(monkeypatch):
    """Attention weights of a dump of 32 heads and 4,096 tokens take 4 GiB in float64."""
    for module in (search, tiles):
        monkeypatch.setattr(module, "MOST_LOGITS", 2**14)
    q, k, v = map(in_bfloat16, drawn(batch=1, heads=16, queries=2048, size=8))
    output = attention(q, k, v, causal=0)
    output[0, 5, 100:300] += 0.1 * np.random.default_rng(5).standard_normal((200, 8))
    output = in_bfloat16(output)
    tracemalloc.start()
    found = diagnose(q, k, v, output, causal=True, layout="batch heads length head")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found.verdict, found.causes) == ("deviates", []), str(found)
    assert most < 16 * 2048**2 * 8, f"{most / 2**20:.0f} MiB"


@np.errstate(all="ignore")
def test_few_rows_show_every_mistake_that_does_not_join_queries():
    q, k, v = drawn(batch=2, heads=4, kv_heads=2, queries=9, keys=9)
    arrays = {"query": q, "key": k, "value": v, "output": None, "layout": "b h n d"}
    seen = np.random.default_rng(1).random((2, 4, 9, 9)) < 0.8
    told = (
        {},
        {"causal": True, "mask": seen, "mask_true": "attends"},
        {"causal": True, "window": (3, 0), "rotary": Rotary(size=8)},
        {"segments": [[0, 0, 0, 0, 1, 1, 1, 2, 2]] * 2, "slopes": np.float32([0.1, 0.2, 0.3, 0.4])},
        {"norm": Norm(query=np.linspace(0.5, 1.5, 8), key=np.linspace(0.6, 1.4, 8))},
    )
    joining, alone, compared = set(), set(), 0
    for options in told:
        (reading,) = readings(Given(**arrays, **options))
        problem, rows = reading.problem, np.array([0, 2, 7, 8])
        maker = Maker(ports.rows_of(problem, rows), chosen=(rows, 9))
        few = {(one.cause, number): one for number, one in numbered(every_hypothesis(maker))}
        every = [it.cause for it in every_hypothesis(Maker(problem))]
        joined = [it.cause for it in joining_queries(Maker(problem))]
        assert joined == [it for it in every if ports.joins_queries(it)]
        for number, one in numbered(every_hypothesis(Maker(problem))):
            other = few.get((one.cause, number))
            if other is None or one.breaks:
                continue
            there, here = one.make().output, other.make().output
            same = there.shape[1] == 9 and np.allclose(there[:, rows], here, equal_nan=True)
            compared += same
            (alone if same else joining).add(one.cause)
            if ports.joins_queries(one.cause) and ports.prepares_otherwise(one.make()):
                of_all = ports.with_rows(one.make(), rows).output
                assert np.allclose(there[:, rows], of_all, equal_nan=True), one.cause
    assert compared > 1000
    assert not [it for it in joining if not ports.joins_queries(it)]
    assert not [it for it in alone - joining if ports.joins_queries(it)]
    ids = [it.id for it in joining]
    assert not [it for it in ports.ACROSS_ROWS if not any(one.startswith(it) for one in ids)]


@pytest.mark.night
def test_a_mistake_that_explains_some_elements_is_placed_in_the_whole():
    """The part that is examined first is one of the second batch entry."""
    q, k, v = drawn(heads=4, queries=70, keys=80)
    seen = np.ones((2, 1, 70, 80), dtype=bool)
    seen[1, ..., 60:] = False
    output = attention(q, k, v)
    output[1, 2, 60] += 0.5
    found = diagnose(q, k, v, output, layout="b h n d", mask=seen, mask_true="attends")
    assert not found.causes
    assert "mask.not-applied" in [it.cause.id for it in found.partial]
    assert all(it.where is not None and "batch entry 1" in it.where.text for it in found.partial)


def test_a_large_problem_is_searched_in_a_part_first():
    q, k, v = drawn(heads=4, kv_heads=2, queries=80, size=4)
    seen = np.tri(80, dtype=bool)
    for output, cause in (
        (attention(q, k, v, scale=1.0), "scale.missing"),
        (attention(q, k, v, scale=0.3), "scale.factor"),
        (attention(q, *(np.tile(x, (1, 2, 1, 1)) for x in (k, v))), "heads.tiled"),
    ):
        found = diagnose(q, k, v, output, layout="b h n d")
        assert [it.id for it in found.causes] == [cause]
    found = diagnose(q, k, v, attention(q, k, v, mask=seen), mask=~seen, mask_true="attends")
    assert "mask.inverted" in [it.id for it in found.causes]


def test_identities_take_no_memory():
    (reading,) = readings(Given(query=Q, key=K, value=V, output=None, layout="b h n d"))
    for weight in (reading.problem.weights.query, reading.problem.weights.output):
        assert is_identity(weight)
        assert np.array_equal(
            weight.reshape(32, 32) if weight.shape[0] == 32 else weight.reshape(-1, 32), np.eye(32)
        )


def attends(query, key, value, seen, scale):
    """Attention in float32 over the keys that are seen."""
    logits = np.where(seen, query @ key.swapaxes(-1, -2) * np.float32(scale), -np.inf)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True) @ value).astype(np.float32)


@pytest.mark.sample(2)
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("keys", [12, 20])
def test_an_output_that_is_right_if_it_is_causal_is_said_to_be_so(
    request, tmp_path, capsys, keys, long
):
    if long:
        request.getfixturevalue("short_is_long")
    q, k, v = drawn(keys=keys)
    right = attention(q, k, v, causal=keys - 12)
    dump = tmp_path / "dump.npz"
    np.savez(dump, query=q, key=k, value=v, output=right)
    assert main(["diagnose", str(dump)]) == ExitCode.DEVIATES
    first, second, *rest = capsys.readouterr().out.splitlines()
    aligned, flag = (", aligned bottom-right", " bottom-right") if keys > 12 else ("", "")
    said = (
        f"deviates unless it is causal{aligned}, which was not told: then all elements are within"
    )
    assert first.startswith(f"{said} noise, ")
    assert first.endswith(f"--causal{flag}, says so")
    assert second.startswith("  else     ")
    assert second.endswith("σ")
    assert ("bottom-right" in " ".join((first, *rest))) == (keys > 12)
    found = diagnose(q, k, v, right)
    assert (found.verdict, found.unless.id) == (
        "deviates",
        found.cause.id.replace("untold", "unless"),
    )
    assert main(["diagnose", str(dump), "--causal", *flag.split()]) == ExitCode.OK
    # A mistake beside it, or a rounding that no dtype explains, is no noise if it is told.
    for wrong in (with_part(right, np.s_[0, 1, 2, 3], 1.001), attention(q, k, v, causal=keys - 11)):
        assert diagnose(q, k, v, wrong, layout="batch heads length head").unless is None
    assert diagnose(q, k, v, attention(q, k, v, scale=1.0)).unless is None


@pytest.mark.sample(2)
@pytest.mark.parametrize("beyond", [1, -1])
def test_a_mistake_in_a_causal_mask_that_is_not_told_is_named(beyond):
    random = np.random.default_rng(7)
    heads = [random.standard_normal((2, 4, 10, 16)).astype(np.float32) for _ in range(3)]
    seen = np.tri(10, k=beyond, dtype=bool)
    seen[0, 0] = True
    found = diagnose(*heads, attends(*heads, seen, 0.25))
    assert found.verdict == "deviates"
    assert "off by one" in found.cause.text
    assert "reading.causal-not-told" in {one.id for one in found.assumed}
    # A right causal answer is not said to be causal by mistake in another way.
    right = diagnose(*heads, attends(*heads, np.tri(10, dtype=bool), 0.25), causal=True)
    assert right.verdict == "noise"


@pytest.mark.parametrize("keys", [5, 12])
def test_a_causal_mask_that_is_not_told_is_one_cause(keys):
    q, k, v = drawn(queries=5, keys=keys)
    for alignment, offset in (("top-left", 0), ("bottom-right", keys - 5)):
        found = diagnose(q, k, v, attention(q, k, v, causal=offset))
        # Of a square, both alignments are the same, and none is named.
        wanted = ("untold.causal-aligned", {"alignment": alignment})
        wanted = wanted if keys != 5 else ("untold.causal", {})
        assert [(it.id, it.arguments) for it in found.causes] == [wanted], str(found)
        assert found.unless.arguments.items() >= wanted[1].items()


def test_advice_is_to_be_followed_on_the_command_line(tmp_path, capsys):
    """With the options that the advice for an output names, the output is right."""
    outputs = {
        "causal": attention(Q, K, V, causal=0),
        "rotary": attention(rotated(Q), rotated(K), V),
        "pairs": attention(rotated(Q, pairs="interleaved"), rotated(K, pairs="interleaved"), V),
        "window": attention(*WIDE, mask=np.tri(20, dtype=bool) & ~np.tri(20, k=-16, dtype=bool)),
    }
    asked = {"pairs": ["--rotary-base", "10000", "--rotary-pairs", "halves"]}
    for name, output in outputs.items():
        path = tmp_path / f"{name}.npz"
        np.savez(path, **of(*(WIDE if name == "window" else (Q, K, V)), output))
        options = asked.get(name, [])
        assert main(["diagnose", str(path), *options]) == ExitCode.DEVIATES
        said = capsys.readouterr().out
        assert "adapter" not in said
        advised = re.search(r"change .*\((--[^)]*)\)", said)
        assert advised, said
        assert main(["diagnose", str(path), *options, *advised[1].split()]) == ExitCode.OK, said
        capsys.readouterr()


@pytest.mark.sample(2)
@pytest.mark.parametrize("size", [1e-5, 1e-4])
def test_an_exponential_that_is_slightly_off_is_no_causal_mask(size):
    q, k, v = drawn(queries=48, size=16)
    logits = q.astype(np.float64) @ k.swapaxes(-1, -2) / 4
    logits -= logits.max(axis=-1, keepdims=True)
    powers = np.exp(logits) * (1 + size * np.sin(7 * logits))
    output = (powers / powers.sum(axis=-1, keepdims=True) @ v).astype(np.float32)
    found = diagnose(q, k, v, output, layout="batch heads length head")
    assert (found.verdict, found.causes) == ("deviates", []), str(found)


@pytest.mark.parametrize("scale", [1e300, float("nan"), float("inf"), 0.0])
def test_a_scale_that_is_none_is_refused(scale):
    random = np.random.default_rng(7)
    heads = [random.standard_normal((1, 2, 5, 8)).astype(np.float32) for _ in range(3)]
    with pytest.raises(BadArrays, match="it is a finite number other than 0"):
        diagnose(*heads, heads[2], scale=scale)


@pytest.mark.parametrize("option", ["--aginst", "--aginst=other.npz"])
def test_an_unknown_option_gets_the_one_that_is_meant(option, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["diagnose", "dump.npz", option, "other.npz"])
    assert raised.value.code == ExitCode.USAGE
    error = capsys.readouterr().err
    assert "did you mean --against? mha-conformance diagnose --help" in error
    assert error.count("\n") == 1
    with pytest.raises(SystemExit):
        main(["diagnose", "dump.npz", "--zzz"])
    assert "did you mean" not in capsys.readouterr().err


def test_a_folder_is_one_dump(tmp_path, capsys):
    for name in ("first", "second"):
        np.savez(tmp_path / f"{name}.npz", **of(Q, K, V, attention(Q, K, V)))
    assert main(["diagnose", str(tmp_path)]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert f"second.npz: query is a second array for query, which {tmp_path / 'first.npz'}" in error
    assert "a folder, or all files that are named, are one dump" in error
    apart = tmp_path / "apart"
    apart.mkdir()
    for name, array in of(Q, K, V, attention(Q, K, V)).items():
        np.save(apart / f"{name}.npy", array)
    assert main(["diagnose", str(apart)]) == ExitCode.OK


def test_no_file_is_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["diagnose", ""])
    assert "it is empty; name a dump, or a folder" in capsys.readouterr().err


# Positions on several axes

MROPE_Q, MROPE_K, MROPE_V = drawn(size=16)
PLACES = np.stack(
    [
        np.sort(np.random.default_rng(11).integers(0, 9, (2, 12))),
        *np.random.default_rng(12).integers(0, 9, (2, 2, 12)),
    ]
)
"""Positions of time, height and width, `[3 batch length]`, which differ everywhere."""


def on_axes(axis, rates=None, places=PLACES, second=None, of_keys=None):
    """The output with the angle of each pair from its axis; `second` is that of its other half."""

    def turn(x, places):
        at = np.moveaxis(places, 0, -1)
        speed = 100.0 ** (-np.arange(8) / 8) if rates is None else rates
        one, other = (at[..., np.array(of)][:, None] * speed for of in (axis, second or axis))
        first, last = x[..., :8], x[..., 8:]
        turned = (
            first * np.cos(one) - last * np.sin(one),
            last * np.cos(other) + first * np.sin(other),
        )
        return np.concatenate(turned, axis=-1).astype(np.float32)

    keys = places if of_keys is None else of_keys
    return attention(turn(MROPE_Q, places), turn(MROPE_K, keys), MROPE_V, causal=0)


def asked_on_axes(output, sections=(2, 3, 3), interleaved=None, **more):
    scaling = {"mrope_section": list(sections)}
    if interleaved is not None:
        scaling["mrope_interleaved"] = interleaved
    rotary = {"base": 100.0, "scaling": scaling}
    told = {"causal": True, "rotary": rotary, "positions": PLACES, "layout": "b h n d", **more}
    return diagnose(MROPE_Q, MROPE_K, MROPE_V, output, **told)


SIDE_BY_SIDE, IN_TURN = [0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2, 0, 0]
TEXT = np.broadcast_to(np.arange(12), (3, 2, 12))
WRONG_AXES = {
    "mrope.not-applied": ("of", on_axes(SIDE_BY_SIDE, places=TEXT)),
    "mrope.one-axis": ("time", on_axes([0] * 8)),
    "mrope.axes-exchanged": ("width, height and time", on_axes([2, 2, 1, 1, 1, 0, 0, 0])),
    "mrope.sections-exchanged": ("3, 2 and 3", on_axes([0, 0, 0, 1, 1, 2, 2, 2])),
    "mrope.interleaved": ("interleaved", on_axes([0, 1, 2, 0, 1, 2, 0, 1])),
    "mrope.frequencies-begin-again": (
        "begin again",
        on_axes(SIDE_BY_SIDE, 100.0 ** (-np.array([0, 1, 0, 1, 2, 0, 1, 2]) / 8)),
    ),
    "mrope.sections-of-components": (
        "components",
        on_axes([0, 0, 0, 0, 1, 1, 1, 1], second=[1, 1, 2, 2, 2, 2, 2, 2]),
    ),
    "mrope.first-half-only": ("first component", on_axes(SIDE_BY_SIDE, second=[0] * 8)),
    "mrope.not-applied-to": ("the key rotated by one", on_axes(SIDE_BY_SIDE, of_keys=TEXT)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("cause", WRONG_AXES)
def test_axes_that_are_taken_wrongly_are_told(cause):
    said, output = WRONG_AXES[cause]
    found = asked_on_axes(output)
    assert [it.id for it in found.causes] == [cause], str(found)
    assert said in str(found)


def test_sections_side_by_side_are_told_from_interleaved_ones():
    for axis, interleaved in ((SIDE_BY_SIDE, None), (IN_TURN, True)):
        sections = (2, 3, 3) if interleaved is None else (4, 2, 2)
        found = asked_on_axes(on_axes(axis), sections, interleaved)
        assert found.verdict == "noise", str(found)
    found = asked_on_axes(on_axes([0, 0, 0, 0, 1, 1, 2, 2]), (4, 2, 2), interleaved=True)
    assert [it.id for it in found.causes] == ["mrope.side-by-side"], str(found)


@pytest.mark.parametrize("model", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_layers_of_transformers_turn_by_the_axes_that_their_configurations_tell(model):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    sections = [4, 2, 2] if model == "qwen3_vl" else [2, 3, 3]
    config = transformers.AutoConfig.for_model(
        f"{model}_text",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "mrope_section": sections},
    )
    if model == "glm4v":
        config.rope_parameters["partial_rotary_factor"] = 1.0
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    kind = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VLText", "glm4v": "Glm4vText"}[model]
    tables = getattr(module, f"{kind}RotaryEmbedding")(config)
    q, k, v = map(torch.from_numpy, (MROPE_Q, MROPE_K, MROPE_V))
    q, k = module.apply_rotary_pos_emb(q, k, *tables(q, torch.from_numpy(PLACES)))
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    told = {"causal": True, "positions": PLACES, "layout": "b h n d", "config": config.to_dict()}
    found = diagnose(MROPE_Q, MROPE_K, MROPE_V, output.numpy(), **told)
    assert found.verdict == "noise", str(found)
    assert "reading.rotated" not in [it.id for it in found.assumed]


@pytest.mark.usefixtures("one_mistake")
def test_positions_of_a_text_may_stand_before_those_on_axes():
    """Four rows, of which the first is that of causal masks and windows, as transformers have."""
    output = on_axes(SIDE_BY_SIDE)
    rows = np.concatenate([TEXT[:1] + 5, PLACES])
    assert asked_on_axes(output, positions=rows).verdict == "noise"
    assert asked_on_axes(output, positions={"query": PLACES, "key": PLACES}).verdict == "noise"
    assert asked_on_axes(output, positions=rows[:, :, ::-1]).verdict == "deviates"


def test_a_text_turns_by_sections_as_without():
    """Where all rows are equal, and where they are left out."""
    output = on_axes([0] * 8, places=TEXT)
    for positions in (None, TEXT):
        assert asked_on_axes(output, positions=positions).verdict == "noise"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sections": (2, 3, 2)}, r"mrope_section is \[2, 3, 2\], 7 pairs together; 8 are rotated"),
        ({"sections": (4, 4)}, r"mrope_section is \[4, 4\]; it is three numbers of pairs, of time"),
        ({"sections": (2.0, 3, 3)}, "it is three numbers of pairs"),
        ({"interleaved": True}, "height and width have at most a third of the pairs each"),
        ({"rotary": {"base": 100.0}}, "positions on 3 axes need the numbers of pairs"),
        ({"positions": PLACES[:2]}, r"positions has shape \[2, 2, 12\], wanted \[batch, 12\], or"),
        ({"positions": (PLACES, TEXT[0])}, "different numbers of axes"),
    ],
)
def test_sections_that_do_not_fit_are_an_error_of_one_line(changes, message):
    with pytest.raises((WrongShape, BadArrays), match=message) as error:
        asked_on_axes(MROPE_Q, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.night
def test_the_rotation_of_another_kind_of_layer_is_named():
    """Gemma 3 turns by another base where it has a window, and scales only the other."""
    config = {
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    }
    rates = 1e4 ** (-np.arange(8) / 8), 1e6 ** (-np.arange(8) / 8) / 8
    for layer, other in ((0, 1), (1, 0)):
        for of, expected in ((layer, "noise"), (other, "deviates")):
            output = on_axes([0] * 8, rates[of], 3 * TEXT)
            found = diagnose(
                *(MROPE_Q, MROPE_K, MROPE_V, output),
                config=config,
                layer=layer,
                layout="b h n d",
                causal=True,
                positions=3 * TEXT[0],
            )
            assert found.verdict == expected, str(found)
        assert [it.id for it in found.causes] == ["rotary.of-other-layers"], str(found)
    wrong = {**config, "layer_types": ["chunked_attention"]}
    message = "for sliding_attention, full_attention, and layer 0 is of the kind chunked_attention"
    with pytest.raises(WrongTensors, match=message):
        diagnose(MROPE_Q, MROPE_K, MROPE_V, MROPE_V, config=wrong)


@pytest.mark.sample(2)
@pytest.mark.parametrize("older", [False, True])
def test_layers_of_transformers_turn_as_their_kind_says(older):
    """Rotations by kinds of layers, as transformers 5 writes them and as files of Gemma 3 do."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5")
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import (
        Gemma3RotaryEmbedding,
        apply_rotary_pos_emb,
    )

    kinds = ["sliding_attention", "full_attention"]
    whole = {"rope_type": "linear", "factor": 8.0}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    turns = {"rope_local_base_freq": 1e4, "rope_theta": 1e6, "rope_scaling": whole}
    config = Gemma3TextConfig(
        **sizes, query_pre_attn_scalar=16, num_hidden_layers=2, layer_types=kinds, **turns
    )
    told = config.to_dict()
    if older:
        del told["rope_parameters"]
        told |= turns
    q, k, v = map(torch.from_numpy, (MROPE_Q, MROPE_K, MROPE_V))
    places = 50 * torch.arange(12)[None]
    tables = Gemma3RotaryEmbedding(config)
    for kind in kinds:
        turned = apply_rotary_pos_emb(q, k, *tables(q, places, kind))
        output = torch.nn.functional.scaled_dot_product_attention(*turned, v, is_causal=True)
        for layer, own in enumerate(kinds):
            found = diagnose(
                *(MROPE_Q, MROPE_K, MROPE_V, output.numpy()),
                **{"config": told, "layer": layer, "positions": places.numpy()},
                layout="b h n d",
            )
            assert (found.verdict == "noise") == (kind == own), str(found)
            causes = [] if kind == own else ["rotary.of-other-layers"]
            assert [it.id for it in found.causes] == causes, str(found)


# Two mistakes at once


def twice_wrong():
    """Arrays, and the ids of the two mistakes that they show."""
    mask = np.random.default_rng(4).random((2, 1, 1, 12)) < 0.5
    masked = {"mask": mask, "mask_true": "attends"}
    turned = [rotated(x, pairs="interleaved") for x in (GQ, GK)]
    tiled = [np.tile(x, (1, 2, 1, 1)) for x in (turned[1], GK, GV)]
    of_tokens = np.ascontiguousarray(V.swapaxes(1, 2)).reshape(V.shape)
    unscaled, next_too = {"scale": 1.0}, attention(Q, K, V, causal=1)

    def made(output, causes, *heads, **told):
        return of(*(heads or (Q, K, V)), output, **told), causes

    return [
        made(attention(Q, K, V, **unscaled, mask=~mask), "scale.missing mask.inverted", **masked),
        made(attention(Q, K, V, **unscaled), "scale.missing mask.not-applied", **masked),
        made(
            next_too.reshape(2, 12, 4, 8).transpose(0, 2, 1, 3),
            "causal.sees-next-key heads.merged-by-reshape",
            causal=True,
        ),
        made(
            next_too[:, [2, 0, 3, 1]],
            "causal.sees-next-key output.permuted",
            causal=True,
        ),
        made(
            attention(turned[0], tiled[0], tiled[2]),
            "rotary.pairs heads.tiled",
            *(GQ, GK, GV),
            rotary={"base": 10000.0, "pairs": "halves"},
        ),
        made(
            attention(GQ, *tiled[1:], causal=1),
            "heads.tiled causal.sees-next-key",
            *(GQ, GK, GV),
            causal=True,
        ),
        made(attention(Q, K, of_tokens, **unscaled), "scale.missing layout.tokens-before-heads"),
        made(
            attention(LQ, LK, LV, causal=0, **unscaled),
            "causal.aligned scale.missing",
            *(LQ, LK, LV),
            causal="bottom-right",
        ),
        made(2 * attention(Q, K, V), "mask.not-applied output.factor", **masked),
        made(attention(Q, K, V, **unscaled), "sinks.not-applied scale.missing", sinks=SINKS),
    ]


TWICE_WRONG = twice_wrong()


@pytest.mark.sample(16)
@pytest.mark.parametrize("number", range(len(TWICE_WRONG)))
def test_two_mistakes_at_once_are_both_named(number):
    arrays, causes = TWICE_WRONG[number]
    found = diagnose(**arrays, layout="batch heads length head")
    assert [it.id for it in found.causes] == ["mistakes.two"], str(found)
    assert {it.id for it in found.cause.arguments["causes"]} == {*causes.split()}, str(found)


@pytest.mark.night
@pytest.mark.parametrize("sizes", [(8, 64), (2, 128)])
def test_two_mistakes_in_a_larger_dump_are_both_named(sizes):
    # They are sought in some rows of the heads that share a key/value head.
    heads, length = sizes
    q, k, v = drawn(batch=1, heads=heads, queries=length, size=32)
    told = {"layout": "batch heads length head", "causal": True}
    found = diagnose(q, k, v, attention(q, k, v, causal=1, scale=1.0), **told)
    named = [it.id for it in found.cause.arguments["causes"]]
    assert named == ["causal.sees-next-key", "scale.missing"], str(found)
    assert len(found.causes) == 1


@pytest.mark.parametrize("most", [2**9, 2**7])
def test_two_mistakes_are_sought_in_a_few_rows_of_one_head(most, monkeypatch):
    # Eight rows of all heads that share a key/value head would be more than the most.
    monkeypatch.setattr(pairs, "MOST_PAIRED", most)
    q, k, v = drawn(batch=1, kv_heads=1, queries=24)
    output = attention(q, *(np.repeat(x, 4, axis=1) for x in (k, v)), causal=1, scale=1.0)
    found = diagnose(q, k, v, output, causal=True, layout="batch heads length head")
    (cause,) = found.causes
    assert {it.id for it in cause.arguments["causes"]} == {"causal.sees-next-key", "scale.missing"}
    # What is wrong in another head is explained by neither.
    output[0, 1, 5] += np.float32(0.3)
    found = diagnose(q, k, v, output, causal=True, layout="batch heads length head")
    assert not found.causes, str(found)


@pytest.mark.night
@pytest.mark.parametrize("third", [False, True])
def test_two_mistakes_are_not_named_beside_something_unknown(third):
    # An error of its own in a few elements, which neither of the two explains.
    output = attention(Q, K, V, scale=1.0, mask=~MASK)
    output[0, 1, 3] += 0.3 * third
    told = {"mask": MASK, "mask_true": "attends", "layout": "batch heads length head"}
    found = diagnose(Q, K, V, output, **told)
    assert [it.id for it in found.causes] == ["mistakes.two"] * (not third), str(found)


@pytest.mark.night
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_mistakes_in_half_precision(dtype):
    rounded = dtype_of(dtype).round
    q, k, v = (rounded(x).astype(np.float32) for x in (Q, K, V))
    told = {"mask": MASK, "mask_true": "attends", "layout": "batch heads length head"}
    for wrong, causes in (
        ({"mask": MASK}, []),
        ({"mask": ~MASK}, ["mask.inverted"]),
        ({"mask": ~MASK, "scale": 1.0}, ["mistakes.two"]),
    ):
        output = rounded(attention(q, k, v, **wrong)).astype(np.float32)
        found = diagnose(q, k, v, output, **told)
        assert found.dtype == dtype
        assert [it.id for it in found.causes] == causes, str(found)


def differentiated(q, k, v, d, *, scale=8**-0.5, mask=True):
    """The output, and the gradients of query, key and value for that of the output, `d`."""
    q, k, v, d = (np.float64(x) for x in (q, k, v, d))
    logits = np.where(mask, scale * (q @ k.swapaxes(-1, -2)), -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_weights = d @ v.swapaxes(-1, -2)
    of_logits = weights * (of_weights - (weights * of_weights).sum(axis=-1, keepdims=True))
    gradients = (
        scale * of_logits @ k,
        scale * of_logits.swapaxes(-1, -2) @ q,
        weights.swapaxes(-1, -2) @ d,
    )
    return [x.astype(np.float32) for x in (weights @ v, *gradients)]


def test_a_mistake_of_the_gradients_beside_one_of_the_output():
    d = np.random.default_rng(6).standard_normal(Q.shape).astype(np.float32)
    output, dq, dk, dv = differentiated(Q, K, V, d, scale=1.0)
    _, *right = differentiated(Q, K, V, d)
    told = {"layout": "batch heads length head"}

    def named(*gradients):
        of_arrays = zip(("query", "key", "value", "output"), [*gradients, d], strict=True)
        found = diagnose(Q, K, V, output, gradients=dict(of_arrays), **told)
        assert found.cause is not None
        return [found.cause.id, *(it.id for it in found.cause.arguments.get("causes", []))]

    assert named(dq, dk, dv) == ["scale.missing"]
    assert named(*right) == ["mistakes.two", "scale.missing", "gradient.of-right-output"]
    assert named(dq, 2 * dk, dv) == ["mistakes.two", "scale.missing", "gradient.doubled"]
    assert named(dq[::-1], dk, dv) == ["mistakes.two", "scale.missing", "gradient.of-neither"]


# Alternatives


@pytest.mark.usefixtures("one_mistake")
def test_names_of_one_thing_are_one_name():
    told = {"layout": "batch heads length head"}
    found = diagnose(Q, K, V, attention(Q, K, V), sinks=SINKS, **told)
    assert [it.id for it in found.causes] == ["sinks.not-applied"], str(found)
    seen = np.tri(12, dtype=bool) & (np.arange(12) >= 3)
    masks = {"causal": True, "mask": (np.arange(12) >= 3)[None], "mask_true": "attends"}
    output = np.nan_to_num(attention(Q, K, V, mask=seen & ~np.tri(12, k=-5, dtype=bool)))
    found = diagnose(Q, K, V, output, window=4, **masks, **told)
    assert [it.id for it in found.causes] == ["window.one-more-before"], str(found)
    output = np.nan_to_num(attention(Q, K, V, mask=seen))
    found = diagnose(Q, K, V, output, window=4, **masks, **told)
    assert [it.id for it in found.causes] == ["window.not-applied", "window.in-blocks"], str(found)
    assert found.causes[1].arguments == {"size": 16, "others": 3}
    assert "a dump of more tokens tells these apart" in str(found)


def test_what_tells_alternatives_apart_is_said():
    told = {"layout": "batch heads length head"}
    found = diagnose(Q, K, V, attention(Q, K, np.roll(V, 1, axis=2)), **told)
    named = [(it.id, it.arguments["of"]) for it in found.causes]
    assert named == [("cache.rows-one-on", ["value"]), ("cache.rows-one-back", ["key"])]
    assert [it.id for it in found.notes] == ["apart.causal"]
    found = diagnose(Q, K, V, attention(Q, K, np.roll(V, 1, axis=2), causal=0), causal=True, **told)
    named = [(it.id, it.arguments["of"]) for it in found.causes]
    assert named == [("cache.rows-one-on", ["value"])]
    assert not found.notes
    found = diagnose(Q, K, V, attention(Q, K, V), sinks=0 * SINKS, **told)
    assert [it.id for it in found.notes] == ["apart.numbers"], str(found)


# Slopes, norms and caches


def of_paper(heads):
    """The slopes of ALiBi as the paper's code makes them, once more."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return np.float64(
        slopes if power == heads else slopes + [*of_paper(2 * power)[::2]][: heads - power]
    )


PAPER_6, GEOMETRIC_6 = of_paper(6), 2.0 ** (-8 * np.arange(1, 7) / 6)
SLOPES = {
    "of more heads": (of_paper(4), of_paper(8)[:4], "alibi.slopes-of-more-heads"),
    "of a second device": (of_paper(8)[4:], of_paper(4), "alibi.slopes-geometric"),
    "of a first device": (of_paper(4), of_paper(32)[4:8], "alibi.slopes-of-more-heads"),
    "of the paper": (GEOMETRIC_6, PAPER_6, "alibi.slopes-of-paper"),
    "geometric": (PAPER_6, GEOMETRIC_6, "alibi.slopes-geometric"),
    "continued": (PAPER_6, 4.0 ** -np.arange(1, 7), "alibi.slopes-continued"),
    "in turn": (
        of_paper(12),
        np.r_[of_paper(8), of_paper(16)[:4]],
        "alibi.slopes-of-twice-in-turn",
    ),
    "a third": (PAPER_6, PAPER_6 / 3, "alibi.factor"),
    "of half the heads": (of_paper(8), np.tile(of_paper(4), 2), "alibi.slopes-of-fewer-heads"),
    "of two of six heads": (PAPER_6, np.tile(of_paper(2), 3), ""),
    "of half the heads, twice each": (of_paper(8), np.repeat(of_paper(4), 2), ""),
    "of the other sign": (-PAPER_6, PAPER_6, "alibi.added"),
}


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_that_are_made_otherwise_are_told(name, one_mistake):
    told, used, cause = SLOPES[name]
    q, k, v = drawn(heads=len(told), queries=14, seed=3)
    far = np.abs(np.arange(14)[:, None] - np.arange(14))

    def found(slopes, rounded=np.float32):
        arrays = [rounded(x) for x in (q, k, v)]
        bias = np.float32(-slopes[:, None, None] * far)
        output = rounded(attention(*map(np.float32, arrays), bias=bias))
        return diagnose(*arrays, output, slopes=told, layout="batch heads length head")

    causes = [it.id for it in found(used).causes]
    assert causes[:1] == [cause] * bool(cause), str(found(used))
    if name != "of the other sign":
        assert len(causes) == bool(cause)
    assert found(told).verdict == "noise"
    assert found(told, np.float16).verdict == "noise"


@pytest.mark.parametrize("used", [np.repeat(of_paper(2), 4), np.tile(of_paper(2), 4)])
def test_slopes_for_key_value_heads_are_told(used, one_mistake):
    q, k, v = drawn(heads=8, kv_heads=2, queries=14, seed=3)
    far = np.abs(np.arange(14)[:, None] - np.arange(14))
    output = attention(q, k, v, bias=np.float32(-used[:, None, None] * far))
    layout = "batch heads length head"
    found = diagnose(q, k, v, output, slopes=of_paper(8), layout=layout)
    repeated = used[0] == used[1]
    cause = "alibi.slopes-made-for-key-heads" if repeated else "alibi.slopes-of-fewer-heads"
    assert [it.id for it in found.causes] == [cause], str(found)


GAINS = 1 + 0.3 * np.random.default_rng(9).standard_normal((2, 8)).astype(np.float32)
NORMS = {
    "no weight of the key": ((GAINS[0], 1), "norm.without-weight-of", "key"),
    "no weight of the query": ((1, GAINS[1]), "norm.without-weight-of", "query"),
    "one more of the key": ((GAINS[0], 1 + GAINS[1]), "norm.weight-plus-1-of", "key"),
    "one more of the query": ((1 + GAINS[0], GAINS[1]), "norm.weight-plus-1-of", "query"),
    "one weight for both": ((GAINS[0], GAINS[0]), "norm.weight-of-other-side", "key"),
    "right": ((GAINS[0], GAINS[1]), "", ""),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_weight_of_a_norm_that_is_wrong_on_one_side_is_told(name, turned):
    gains, cause, side = NORMS[name]
    turn = rotated if turned else (lambda x: x)
    q, k = (
        turn(normed(x) * gain).astype(np.float32) for x, gain in zip((Q, K), gains, strict=True)
    )
    told = {"norm": {"query": GAINS[0], "key": GAINS[1]}, "layout": "batch heads length head"}
    told |= {"rotary": {"base": 10000.0}} if turned else {}
    found = diagnose(Q, K, V, attention(q, k, V), **told)
    named = [(it.id, it.arguments) for it in found.causes]
    assert named == [(cause, {"of": side})] * bool(cause), str(found)


@pytest.mark.sample(4)
@pytest.mark.parametrize("of_both", [False, True])
@pytest.mark.parametrize(("queries", "start"), [(12, 0), (5, 7), (5, 0)])
def test_rows_that_are_written_one_place_late_are_told(queries, start, of_both):
    q, k, v = drawn(queries=queries, keys=12)

    def late(x):
        return np.concatenate([x[:, :, :start], 0 * x[:, :, :1], x[:, :, start:-1]], axis=2)

    output = attention(q, late(k) if of_both else k, late(v), causal=12 - queries)
    found = diagnose(q, k, v, output, causal="bottom-right", layout="batch heads length head")
    keys = {"of": ["key", "value"] if of_both else ["value"]}
    named = [(it.id, it.arguments["of"]) for it in found.causes]
    assert named == [("cache.written-one-late", keys["of"])], str(found)


ROWS = {
    "from 7 on, the one before": ([*range(7), *[6] * 5], "cache.rows-repeat-one", {"first": 7}),
    "from 9 on, the one before": ([*range(9), 8, 8, 8], "", None),
    "the last three, the three before": ([*range(9), 6, 7, 8], "cache.rows-repeat-those-before", 3),
    "the last five, the five before": (
        [*range(7), *range(2, 7)],
        "cache.rows-repeat-those-before",
        5,
    ),
    "the last three, two of those before": ([*range(9), 6, 7, 7], "", None),
    "three in the middle": ([*range(6), 3, 4, 5, 9, 10, 11], "", None),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("of_both", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_repeat_others_are_told(name, of_both, one_mistake):
    rows, cause, which = ROWS[name]
    output = attention(LQ, LK[:, :, rows] if of_both else LK, LV[:, :, rows])
    found = diagnose(LQ, LK, LV, output, layout="batch heads length head")
    assert found.verdict == "deviates"
    assert [it.id for it in found.causes] == [cause] * bool(cause), str(found)
    if cause:
        arguments = found.causes[0].arguments
        assert arguments["of"] == (["key", "value"] if of_both else ["value"])
        told = arguments["keys"].arguments if "keys" in arguments else arguments["count"]
        assert told == which


def with_row(array, row, by):
    changed = array.copy()
    changed[:, :, row] = by
    return changed


@pytest.mark.sample(4)
@pytest.mark.parametrize("causal", [None, 7])
@pytest.mark.parametrize("of_both", [False, True])
@pytest.mark.parametrize(("row", "by"), [(4, 2), (5, 9), (0, 10)])
def test_a_row_that_holds_another_is_told(row, by, of_both, causal, one_mistake):
    k = with_row(LK, row, LK[:, :, by]) if of_both else LK
    output = attention(LQ, k, with_row(LV, row, LV[:, :, by]), causal=causal)
    told = {"layout": "batch heads length head", "causal": causal and "bottom-right"}
    found = diagnose(LQ, LK, LV, output, **told)
    of_rows = ["key", "value"] if of_both else ["value"]
    wanted = Phrase("cache.row-of-another", {"of": of_rows, "row": row, "by": by})
    assert [Phrase(it.id, it.arguments) for it in found.causes] == [wanted], str(found)


def with_old_row(q, k, v, of, causal=None):
    """An output that sees an old row 4."""
    old = dict(zip(("key", "value"), drawn(heads=k.shape[1], keys=1, seed=77)[1:], strict=True))
    new = {"key": k, "value": v}
    read = [with_row(a, 4, old[n][:, :, 0]) if n in of else a for n, a in new.items()]
    return attention(
        q, *(np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in read), causal=causal
    )


OLD_ROWS = {
    "value": ({}, ["value"], True),
    "key": ({}, ["key"], False),
    "key and value": ({}, ["key", "value"], True),
    "key of a group": ({"kv_heads": 1}, ["key"], True),
    "value in bfloat16": ({}, ["value"], True),
    "key and value in bfloat16": ({}, ["key", "value"], True),
    "value of one query": ({"kv_heads": 1, "queries": 1, "keys": 12}, ["value"], True),
    "key and value of one query": (
        {"kv_heads": 1, "queries": 1, "keys": 12},
        ["key", "value"],
        True,
    ),
    "value of one query and one head": ({"queries": 1, "keys": 12}, ["value"], False),
}
"""Sizes, which rows are old, and whether that is certain."""


@pytest.mark.parametrize("name", OLD_ROWS)
def test_a_row_that_was_not_handed_over_is_told_where_that_is_certain(name, one_mistake):
    sizes, of_rows, certain = OLD_ROWS[name]
    q, k, v = drawn(**sizes)
    causal = 0 if q.shape[2] == 12 else None
    options = {"layout": "batch heads length head", "causal": None if causal is None else True}
    if "bfloat16" in name:
        q, k, v, options["dtype"] = *map(in_bfloat16, (q, k, v)), "bfloat16"
    output = with_old_row(q, k, v, of_rows, causal)
    found = diagnose(q, k, v, in_bfloat16(output) if "dtype" in options else output, **options)
    assert found.verdict == "deviates"
    wanted = [Phrase("cache.row-unknown", {"of": of_rows, "row": 4})] * certain
    assert [Phrase(it.id, it.arguments) for it in found.causes] == wanted, str(found)


def biased(query, key, value, by, at=4):
    logits = query @ np.repeat(key, query.shape[1] // key.shape[1], axis=1).swapaxes(-1, -2)
    logits = logits / np.float32(math.sqrt(8))
    logits[..., at] += np.float32(by)
    return softmax(logits) @ np.repeat(value, query.shape[1] // key.shape[1], axis=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("queries", [1, 12])
@pytest.mark.parametrize(
    "case", ["a key hidden", "a bias of a key", "two rows", "one more row", "noise", "a scale"]
)
def test_what_is_no_row_of_a_cache_is_not_told_as_one(case, queries, dtype, one_mistake):
    q, k, v = drawn(kv_heads=1, queries=queries, keys=12)
    _, old, more = drawn(kv_heads=1, queries=queries, keys=13, seed=5)
    if dtype == "bfloat16":
        q, k, v, old, more = map(in_bfloat16, (q, k, v, old, more))
    output = {
        "a key hidden": lambda: biased(q, k, v, -np.inf),
        "a bias of a key": lambda: biased(q, k, v, 1.5),
        "two rows": lambda: with_old_row(q, k, with_row(v, 8, old[:, :, 8]), ["value"]),
        "one more row": lambda: attention(
            q,
            *(
                np.repeat(np.concatenate([x, y[:, :, 12:]], axis=2), 4, axis=1)
                for x, y in ((k, old), (v, more))
            ),
        ),
        "noise": lambda: biased(q, k, v, 0) + np.float32(0.2) * q[::-1],
        "a scale": lambda: biased(q * np.float32(1.3), k, v, 0.4),
    }[case]()
    if dtype == "bfloat16":
        output = in_bfloat16(output)
    found = diagnose(q, k, v, output, dtype=dtype, layout="batch heads length head")
    assert found.verdict == "deviates"
    assert "cache.row-unknown" not in [it.id for it in found.causes], str(found)


@pytest.mark.parametrize("case", ["a mean", "two rows", "one head", "half of it"])
def test_a_row_that_holds_something_else_is_not_taken_for_another(case, one_mistake):
    v = with_row(LV, 4, (LV[:, :, 2] + LV[:, :, 3]) / 2)
    if case == "two rows":
        v = with_row(with_row(LV, 4, LV[:, :, 2]), 8, LV[:, :, 1])
    if case == "one head":
        v = np.where(np.arange(4)[:, None, None] == 1, with_row(LV, 4, LV[:, :, 2]), LV)
    if case == "half of it":
        v = with_row(LV, 4, np.where(np.arange(8) < 4, LV[:, :, 2], LV[:, :, 4]))
    found = diagnose(LQ, LK, LV, attention(LQ, LK, v), layout="batch heads length head")
    assert found.verdict == "deviates"
    told = [Phrase("cache.row-unknown", {"of": ["value"], "row": 4})] * (case != "two rows")
    assert [Phrase(it.id, it.arguments) for it in found.causes] == told, str(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_sequences_under_one_causal_mask_are_told(dtype, one_mistake):
    q, k, v = map(in_bfloat16, drawn(queries=40))
    output = attention(q, k, v, causal=0)
    output = in_bfloat16(output) if dtype == "bfloat16" else output
    segments = [[0] * 10 + [1] * 18 + [2] * 12] * 2
    told = {"segments": segments, "causal": True, "dtype": dtype, "layout": "b h n d"}
    found = diagnose(q, k, v, output, **told)
    assert [it.id for it in found.causes] == ["segments.not-applied"], str(found)


# Tokens of all batch entries in one axis, and names


def packed_into(*starts, length=20):
    """The numbers of packed sequences that begin at these tokens, in both batch entries."""
    return np.tile(np.searchsorted(starts, np.arange(length), side="right"), (2, 1))


def alone(ids, keys=None):
    """The causal mask of packed sequences."""
    keys = ids if keys is None else keys
    return (ids[:, None, :, None] == keys[:, None, None]) & np.tri(ids.shape[1], dtype=bool)


def spun(x, times):
    for _ in range(times):
        x = rotated(x)
    return x


PADDED = np.arange(20) < np.array([11, 17])[:, None]
TURNS = {"causal": True, "rotary": {"base": 10000.0, "pairs": "halves"}}
PACKED = {"causal": True, "segments": packed_into(0, 3, 8, 14)}
PADDING = {"causal": "top-left", "mask": PADDED[:, None, None], "mask_true": "attends"}
MOVED = {
    "queries and keys turned twice": (
        TURNS,
        lambda q, k, v: attention(spun(q, 2), spun(k, 2), v, causal=0),
        "rotary.twice",
    ),
    "queries turned twice": (
        TURNS,
        lambda q, k, v: attention(spun(q, 2), rotated(k), v, causal=0),
        "rotary.queries-twice",
    ),
    "keys turned twice": (
        TURNS,
        lambda q, k, v: attention(rotated(q), spun(k, 2), v, causal=0),
        "rotary.keys-twice",
    ),
    "queries and keys turned three times": (
        TURNS,
        lambda q, k, v: attention(spun(q, 3), spun(k, 3), v, causal=0),
        "",
    ),
    "keys turned three times": (
        TURNS,
        lambda q, k, v: attention(rotated(q), spun(k, 3), v, causal=0),
        "",
    ),
    "sequences late": (
        PACKED,
        lambda q, k, v: attention(q, k, v, mask=alone(packed_into(0, 4, 9, 15))),
        "segments.begin-late",
    ),
    "sequences early": (
        PACKED,
        lambda q, k, v: attention(q, k, v, mask=alone(packed_into(0, 2, 7, 13))),
        "segments.begin-early",
    ),
    "one sequence late": (
        PACKED,
        lambda q, k, v: attention(q, k, v, mask=alone(packed_into(0, 3, 9, 14))),
        "segments.one-begins-late",
    ),
    "one sequence early": (
        PACKED,
        lambda q, k, v: attention(q, k, v, mask=alone(packed_into(0, 3, 8, 13))),
        "segments.one-begins-early",
    ),
    "sequences late by two tokens": (
        PACKED,
        lambda q, k, v: attention(q, k, v, mask=alone(packed_into(0, 5, 10, 16))),
        "",
    ),
    "one sequence late and one early": (
        PACKED,
        lambda q, k, v: attention(q, k, v, mask=alone(packed_into(0, 4, 7, 14))),
        "",
    ),
    "turned sequences late": (
        {**PACKED, "rotary": TURNS["rotary"], "positions": np.tile(np.arange(20), (2, 1))},
        lambda q, k, v: attention(rotated(q), rotated(k), v, mask=alone(packed_into(0, 4, 9, 15))),
        "segments.begin-late",
    ),
    "sinks doubled": (
        {"sinks": SINKS},
        lambda q, k, v: attention(q, k, v, sinks=2 * SINKS),
        "sinks.doubled",
    ),
    "sinks counted twice": (
        {"sinks": SINKS},
        lambda q, k, v: attention(q, k, v, sinks=SINKS + np.float32(np.log(2))),
        "sinks.counted",
    ),
    "sinks tripled": (
        {"sinks": SINKS},
        lambda q, k, v: attention(q, k, v, sinks=3 * SINKS),
        "",
    ),
    "sinks of the next head": (
        {"sinks": SINKS},
        lambda q, k, v: attention(q, k, v, sinks=np.roll(SINKS, 1)),
        "sinks.of-next-head",
    ),
    "padding on the other side": (
        {"key_lengths": PADDED.sum(axis=1)},
        lambda q, k, v: attention(q, k, v, mask=PADDED[:, None, None, ::-1]),
        "lengths.from-the-end",
    ),
    "padding on the other side of a causal mask": (
        PADDING,
        lambda q, k, v: np.nan_to_num(
            attention(q, k, v, mask=PADDED[:, None, None, ::-1] & np.tri(20, dtype=bool))
        ),
        "mask.reversed",
    ),
    "padding in the middle": (
        PADDING,
        lambda q, k, v: np.nan_to_num(
            attention(q, k, v, mask=np.roll(PADDED, 5)[:, None, None] & np.tri(20, dtype=bool))
        ),
        "",
    ),
    "key heads reversed": (
        {},
        lambda q, k, v: attention(q, k[:, ::-1], v),
        "heads.reversed-in",
    ),
    "value heads reversed": (
        {},
        lambda q, k, v: attention(q, k, v[:, ::-1]),
        "heads.reversed-in",
    ),
    "key and value heads reversed": (
        {},
        lambda q, k, v: attention(q, k[:, ::-1], v[:, ::-1]),
        "heads.reversed-in",
    ),
    "key heads one further": (
        {},
        lambda q, k, v: attention(q, np.roll(k, 1, axis=1), v),
        "",
    ),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", MOVED)
def test_what_is_done_twice_reversed_or_moved_by_one_is_told(case, dtype, one_mistake):
    for size in (8, 16):
        assert_told({"size": size}, *MOVED[case], dtype)


def assert_told(sizes, told, made, cause, dtype):
    """Assert that a cause is named: "" stands for none, and None for an output that is right."""
    rounded = in_bfloat16 if dtype == "bfloat16" else np.float32
    heads = [rounded(x) for x in drawn(**{"queries": 20, "size": 16, **sizes})]
    output = rounded(made(*heads))
    found = diagnose(*heads, output, layout="batch heads length head", dtype=dtype, **told)
    assert found.verdict == ("noise" if cause is None else "deviates"), str(found)
    ids = {it.id for it in found.causes}
    assert cause in ids if cause else not ids, str(found)


def tabled(x, pairs, table):
    """Heads in pairs, rotated by cosines and sines that are laid out for other pairs."""
    size = x.shape[-1]
    angles = np.arange(x.shape[-2])[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    repeated = {"halves": lambda: np.tile(angles, 2), "interleaved": lambda: angles.repeat(2, -1)}
    cos, sin = (of(repeated[table]()).astype(np.float32) for of in (np.cos, np.sin))
    if pairs == "halves":
        half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
    else:
        half = np.stack([-x[..., 1::2], x[..., ::2]], axis=-1).reshape(x.shape)
    return x * cos + half * sin


def back(x):
    return rotated(x[:, :, ::-1], start=1 - x.shape[2])[:, :, ::-1]


def packed(q, k, v, *, by_group, causal=0):
    """Heads of one projection that are told apart in the other order."""
    heads, kv_heads = q.shape[1], k.shape[1]
    number = np.arange(heads + 2 * kv_heads)
    sides = np.split(number, [heads, heads + kv_heads])
    groups = np.concatenate([it.reshape(kv_heads, -1) for it in sides], axis=1).ravel()
    taken = np.concatenate([q, k, v], axis=1)[:, groups if by_group else np.argsort(groups)]
    return attention(*np.split(taken, [heads, heads + kv_heads], axis=1), causal=causal)


def merged_splits(q, k, v, count, weigh):
    """The outputs of splits of the keys, each times a function of its log-sum-exp."""
    logits = [q @ x.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1])) for x in split(k, count)]
    each = [softmax(x) @ y for x, y in zip(logits, split(v, count), strict=True)]
    shares = np.stack([weigh(np.log(np.exp(x).sum(axis=-1, keepdims=True))) for x in logits])
    return (np.stack(each) * shares / shares.sum(axis=0)).sum(axis=0)


def of_powers(q, k, v, *, shared=0, step=0, plus=0.0, power=1.0):
    """Weights with something added to their sum, or of splits that have maxima of their own."""
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    peak = logits.max(axis=-1, keepdims=True)
    if shared:
        own = logits.reshape(*logits.shape[:-1], -1, shared).max(axis=-1)
        peak = np.roll(own, step, axis=-1).repeat(shared, axis=-1)
    powers = np.exp(logits - peak)
    return powers / (powers.sum(axis=-1, keepdims=True) + np.float32(plus)) ** np.float32(power) @ v


def split(x, count):
    return np.split(x, count, axis=2)


def padded_with_zeros(q, k, v, count):
    more = [np.concatenate([x, 0 * x[:, :, :count]], axis=2) for x in (k, v)]
    return attention(q, *more)


def of_entries(x, *order):
    return x[list(order)]


LATER = {"causal": "bottom-right", **{"rotary": TURNS["rotary"]}}
FEW_LAST = {"queries": 4, "keys": 20}


def decoded(q, k, v, *, keys):
    """Four queries behind a cache, whose keys are rotated by `keys`."""
    return attention(rotated(q, start=16), keys(rotated(k)), v, causal=16)


def again_but_for(k, first):
    return np.concatenate([rotated(k)[:, :, :first], k[:, :, first:]], axis=2)


def windowed(q, k, v, seen):
    distance = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None] - k.shape[2] + q.shape[2]
    return attention(q, k, v, mask=seen(distance, np.arange(k.shape[2])))


def multiplied(q, k, v, *, keys=1.0, values=1.0):
    by = (np.float32(x)[..., None, None] if np.ndim(x) else np.float32(x) for x in (keys, values))
    return attention(q, k * next(by), v * next(by))


def near(ids):
    """The causal mask of packed sequences that see the one before them, too."""
    before = ids[:, None, :, None] - ids[:, None, None]
    return (before >= 0) & (before < 2) & np.tri(ids.shape[1], dtype=bool)


def inside(first, end, length=20):
    at = (np.arange(length) >= first) & (np.arange(length) < end)
    return at[:, None] & at


def distances(slopes, length=20):
    return np.float32(slopes)[:, None, None] * np.float32(
        np.arange(length) - np.arange(length)[:, None]
    )


def slower(x, factor):
    """Heads whose angles are divided by a factor."""
    size = x.shape[-1]
    angles = np.arange(x.shape[-2])[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size) / factor
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def beginning(k, start, cached=16):
    """Keys of which the new ones are rotated from another position on."""
    new = rotated(k[:, :, cached:], start=start)
    return np.concatenate([rotated(k)[:, :, :cached], new], axis=2)


def with_page(x, at, by, size):
    (entry, row), (other, first) = at, by
    changed = x.copy()
    changed[entry, :, row : row + size] = x[other, :, first : first + size]
    return changed


PORTED = {
    "queries turned back": (
        {},
        TURNS,
        lambda q, k, v: attention(back(q), rotated(k), v, causal=0),
        "rotary.queries-turned-back",
    ),
    "queries and keys turned back": (
        {},
        TURNS,
        lambda q, k, v: attention(back(q), back(k), v, causal=0),
        "rotary.turned-back",
    ),
    "queries turned back twice": (
        {},
        TURNS,
        lambda q, k, v: attention(back(back(q)), rotated(k), v, causal=0),
        "",
    ),
    "halves by an interleaved table": (
        {},
        TURNS,
        lambda q, k, v: attention(
            *(tabled(x, "halves", "interleaved") for x in (q, k)), v, causal=0
        ),
        "rotary.table-of-other-pairs",
    ),
    "interleaved by a table of halves": (
        {},
        TURNS,
        lambda q, k, v: attention(
            *(tabled(x, "interleaved", "halves") for x in (q, k)), v, causal=0
        ),
        "rotary.table-of-other-pairs",
    ),
    "keys by an interleaved table": (
        {},
        TURNS,
        lambda q, k, v: attention(rotated(q), tabled(k, "halves", "interleaved"), v, causal=0),
        "",
    ),
    "cached keys turned twice": (
        FEW_LAST,
        LATER,
        lambda q, k, v: decoded(q, k, v, keys=lambda x: again_but_for(x, 16)),
        "rotary.of-history-twice",
    ),
    "some cached keys turned twice": (
        FEW_LAST,
        LATER,
        lambda q, k, v: decoded(q, k, v, keys=lambda x: again_but_for(x, 11)),
        "",
    ),
    "packed by heads": (
        {},
        {"causal": True},
        lambda q, k, v: packed(q, k, v, by_group=True),
        "heads.packed-otherwise",
    ),
    "packed by groups": (
        {"kv_heads": 2},
        {"causal": True},
        lambda q, k, v: packed(q, k, v, by_group=True),
        "heads.packed-otherwise",
    ),
    "packed by sides": (
        {"kv_heads": 2},
        {"causal": True},
        lambda q, k, v: packed(q, k, v, by_group=False),
        "heads.packed-otherwise",
    ),
    "packed keys and values in pairs": (
        {},
        {"causal": True},
        lambda q, k, v: attention(
            q, *(x[:, [0, 2, 1, 3]] for x in (k, v[:, [1, 0, 3, 2]])), causal=0
        ),
        "",
    ),
    "zeros fill a tile": ({}, {}, lambda *x: padded_with_zeros(*x, 12), "keys.zeros-counted"),
    "five zeros": ({}, {}, lambda *x: padded_with_zeros(*x, 5), ""),
    "a cache of the first entry": (
        {"batch": 3},
        {},
        lambda q, k, v: attention(q, of_entries(k, 0, 0, 0), of_entries(v, 0, 0, 0)),
        "cache.of-first-entry",
    ),
    "keys of the first entry": (
        {"batch": 3},
        {},
        lambda q, k, v: attention(q, of_entries(k, 0, 0, 0), v),
        "inputs.of-first-batch-entry",
    ),
    "a cache of the second entry": (
        {"batch": 3},
        {},
        lambda q, k, v: attention(q, of_entries(k, 1, 1, 1), of_entries(v, 1, 1, 1)),
        "cache.entries-in-order",
    ),
    "last components of keys first": (
        {"size": 48},
        {},
        lambda q, k, v: attention(q, np.roll(k, 16, axis=-1), v),
        "key.last-components-first",
    ),
    "components of keys moved by five": (
        {"size": 48},
        {},
        lambda q, k, v: attention(q, np.roll(k, 5, axis=-1), v),
        "",
    ),
    "last components left out": (
        {"size": 48},
        {},
        lambda q, k, v: attention(q[..., :32], k[..., :32], v, scale=48**-0.5),
        "score.last-components-left-out",
    ),
    "first components left out": (
        {"size": 48},
        {},
        lambda q, k, v: attention(q[..., 16:], k[..., 16:], v, scale=48**-0.5),
        "score.first-components-left-out",
    ),
    "a component in the middle left out": (
        {"size": 48},
        {},
        lambda q, k, v: attention(*(np.delete(x, 7, axis=-1) for x in (q, k)), v, scale=48**-0.5),
        "",
    ),
    "splits averaged": (
        {"kv_heads": 4},
        {},
        lambda *x: merged_splits(*x, 2, np.ones_like),
        "tiles.averaged",
    ),
    "splits added without maxima": (
        {},
        {},
        lambda *x: of_powers(*x, shared=4),
        "tiles.merged-without-maxima",
    ),
    "splits added with maxima of their neighbours": (
        {},
        {},
        lambda *x: of_powers(*x, shared=4, step=1),
        "",
    ),
    "one added": ({}, {}, lambda *x: of_powers(*x, plus=1.0), "softmax.one-added"),
    "less than one added": ({}, {}, lambda *x: of_powers(*x, plus=0.7), ""),
    "divided twice": ({}, {}, lambda *x: of_powers(*x, power=2.0), "softmax.divided-twice"),
    "divided one and a half times": ({}, {}, lambda *x: of_powers(*x, power=1.5), ""),
    "merged by group": (
        {"heads": 6, "kv_heads": 2},
        {},
        lambda *x: attention(*x)[:, [0, 3, 1, 4, 2, 5]],
        "heads.by-group-merged",
    ),
    "split by group": (
        {"heads": 6, "kv_heads": 2},
        {},
        lambda q, k, v: attention(q[:, [0, 2, 4, 1, 3, 5]], k, v),
        "heads.by-group-split",
    ),
    "split and merged by group": (
        {"heads": 6, "kv_heads": 2},
        {},
        lambda q, k, v: attention(q[:, [0, 2, 4, 1, 3, 5]], k, v)[:, [0, 3, 1, 4, 2, 5]],
        "heads.tiled",
    ),
    "splits merged by base 2": (
        {},
        {},
        lambda *x: merged_splits(*x, 2, lambda s: np.exp(s / np.float32(np.log(2)))),
        "tiles.base-2-merged-as-natural",
    ),
    "splits merged by natural sums in base 2": (
        {},
        {},
        lambda *x: merged_splits(*x, 2, np.exp2),
        "tiles.merged-in-base-2",
    ),
    "splits merged by logarithms": (
        {},
        {},
        lambda *x: merged_splits(*x, 2, lambda s: s),
        "",
    ),
    "splits merged rightly": ({}, {}, lambda *x: merged_splits(*x, 2, np.exp), None),
    "the first head of a group": (
        {"kv_heads": 2},
        {},
        lambda q, k, v: attention(q[:, [0, 0, 2, 2]], k, v),
        "heads.first-of-group",
    ),
    "the last head of a group": (
        {"kv_heads": 2},
        {},
        lambda q, k, v: attention(q[:, [1, 1, 3, 3]], k, v),
        "",
    ),
    "the future beside a window": (
        {},
        {"causal": True, "window": 6},
        lambda *x: windowed(*x, lambda d, key: d > -6),
        "window.in-place-of-causal",
    ),
    "a window of the last query": (
        {"queries": 3, "keys": 20},
        {"causal": "bottom-right", "window": 6},
        lambda *x: windowed(*x, lambda d, key: (d <= 0) & (key > 13)),
        "window.of-last-query",
    ),
    "sinks in another order": (
        {},
        {"sinks": SINKS},
        lambda *x: attention(*x, sinks=SINKS[[2, 0, 1, 3]]),
        "sinks.of-other-heads",
    ),
    "sinks of no head": (
        {},
        {"sinks": SINKS},
        lambda *x: attention(*x, sinks=SINKS[[2, 0, 1, 3]] + np.float32(0.3)),
        "",
    ),
    "scales of keys": (
        {"kv_heads": 2},
        {},
        lambda *x: multiplied(*x, keys=[0.6, 1.7]),
        "scale.factors",
    ),
    "scales of values": (
        {"kv_heads": 2},
        {},
        lambda *x: multiplied(*x, values=[0.6, 1.7]),
        "output.factors",
    ),
    "scales of values by entry": (
        {"kv_heads": 2},
        {},
        lambda *x: multiplied(*x, values=[[0.6, 1.7], [1.2, 0.9]]),
        "",
    ),
    "padding that was not told": (
        {},
        {},
        lambda *x: attention(*x, mask=PADDED[:, None, None]),
        "padding.after-first",
    ),
    "padding on the left that was not told": (
        {},
        {"causal": True},
        lambda *x: np.nan_to_num(
            attention(*x, mask=PADDED[:, None, None, ::-1] & np.tri(20, dtype=bool))
        ),
        "padding.before-last",
    ),
    "padding of other lengths": (
        {},
        {"key_lengths": np.array([20, 9])},
        lambda *x: attention(*x, mask=PADDED[:, None, None]),
        "padding.after-first",
    ),
    "packed sequences that were not told": (
        {},
        {"causal": True},
        lambda *x: attention(
            *x, mask=alone(np.array([packed_into(0, 7)[0], packed_into(0, 12)[0]]))
        ),
        "untold.segments",
    ),
    "packed sequences that see the one before": (
        {},
        {"causal": True},
        lambda *x: attention(*x, mask=near(packed_into(0, 5, 11))),
        "",
    ),
    "a prefix that was not told": (
        {},
        {"causal": True},
        lambda *x: attention(*x, mask=np.tri(20, dtype=bool) | (np.arange(20) < 7)),
        "untold.prefix",
    ),
    "a span in the middle": (
        {},
        {"causal": True},
        lambda *x: attention(*x, mask=np.tri(20, dtype=bool) | inside(5, 11)),
        "",
    ),
    "chunks that were not told": (
        {"queries": 40},
        {"causal": True},
        lambda *x: attention(*x, mask=alone(packed_into(0, 16, 32, length=40))),
        "untold.chunk",
    ),
    "ALiBi that was not told": (
        {},
        {"causal": True},
        lambda *x: attention(*x, bias=distances(2.0 ** -np.arange(2, 10, 2)), causal=0),
        "untold.alibi",
    ),
    "ALiBi with slopes of its own": (
        {},
        {"causal": True},
        lambda *x: attention(*x, bias=distances([0.4, 0.3, 0.2, 0.1]), causal=0),
        "",
    ),
    "first keys beside a window": (
        {},
        {"causal": True, "window": 6},
        lambda *x: windowed(*x, lambda d, key: (d <= 0) & ((d > -6) | (key < 4))),
        "window.first-keys-visible",
    ),
    "first and fourth key beside a window": (
        {},
        {"causal": True, "window": 6},
        lambda *x: windowed(*x, lambda d, key: (d <= 0) & ((d > -6) | (key % 4 == 0))),
        "",
    ),
    "frequencies divided by 4": (
        {},
        TURNS,
        lambda q, k, v: attention(slower(q, 4), slower(k, 4), v, causal=0),
        "untold.rotary-scaling",
    ),
    "frequencies divided by 3": (
        {},
        TURNS,
        lambda q, k, v: attention(slower(q, 3), slower(k, 3), v, causal=0),
        "",
    ),
    "new tokens from position 0": (
        FEW_LAST,
        LATER,
        lambda q, k, v: attention(rotated(q), beginning(k, 0), v, causal=16),
        "rotary.new-from-0",
    ),
    "new tokens one late": (
        FEW_LAST,
        LATER,
        lambda q, k, v: attention(rotated(q, start=17), beginning(k, 17), v, causal=16),
        "rotary.new-one-late",
    ),
    "new tokens three late": (
        FEW_LAST,
        LATER,
        lambda q, k, v: attention(rotated(q, start=19), beginning(k, 19), v, causal=16),
        "",
    ),
    "key/value heads of others": (
        {"kv_heads": 4},
        {},
        lambda q, k, v: attention(q, k[:, [1, 2, 3, 0]], v[:, [1, 2, 3, 0]]),
        "heads.use-others",
    ),
    "other key than value heads": (
        {"kv_heads": 4},
        {},
        lambda q, k, v: attention(q, k[:, [1, 2, 3, 0]], v[:, [2, 0, 1, 3]]),
        "",
    ),
    "key/value heads tiled over the batch": (
        {"kv_heads": 2},
        {},
        lambda q, k, v: attention(q, *(np.tile(x, (2, 1, 1, 1)).reshape(q.shape) for x in (k, v))),
        "heads.tiled-over-batch",
    ),
    "entries of a cache in another order": (
        {"batch": 4},
        {},
        lambda q, k, v: attention(q, of_entries(k, 0, 0, 2, 1), of_entries(v, 0, 0, 2, 1)),
        "cache.entries-in-order",
    ),
    "a page of another entry": (
        {"batch": 3, "queries": 2, "keys": 48},
        {},
        lambda q, k, v: attention(q, *(with_page(x, (1, 16), (0, 32), 16) for x in (k, v))),
        "cache.page-of-another",
    ),
    "a page of values of the same entry": (
        {"batch": 3, "queries": 2, "keys": 48},
        {},
        lambda q, k, v: attention(q, k, with_page(v, (1, 16), (1, 32), 16)),
        "cache.page-of-another",
    ),
    "rows that are no page": (
        {"batch": 3, "queries": 2, "keys": 48},
        {},
        lambda q, k, v: attention(q, *(with_page(x, (1, 13), (0, 30), 11) for x in (k, v))),
        "",
    ),
    "a hole of two keys in each entry": (
        {},
        {},
        lambda *x: attention(
            *x, mask=(abs(np.arange(20) - np.array([[5], [9]]) + 0.5) > 1)[:, None, None]
        ),
        "",
    ),
}
"""Sizes, what is told, what a port does, and the cause: "" for none, and None if it is right."""


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", PORTED)
def test_what_ports_and_kernels_do_is_told(case, dtype, one_mistake):
    assert_told(*PORTED[case], dtype)


def test_a_cause_is_no_pair_that_hides_every_key_from_most_wrong_rows():
    q, k, v = drawn(queries=32, heads=8, size=32)
    mask, other = (np.arange(32) < np.array(it)[:, None] for it in ([20, 32], [32, 25]))
    output = attention(q, k, v, mask=other[:, None, None])
    found = diagnose(q, k, v, output, mask=mask, mask_true="attends", layout="b h n d")
    assert [it.id for it in found.causes] == ["padding.after-first"], str(found)
    output = attention(q, k, v, mask=np.roll(other, 3, axis=1)[:, None, None])
    found = diagnose(q, k, v, output, mask=mask, mask_true="attends", layout="b h n d")
    assert not found.causes, str(found)


@pytest.mark.parametrize(("keys", "where"), [(slice(16, None), "last"), (slice(16), "first")])
def test_a_gradient_of_queries_that_lacks_tiles_of_keys_is_told(keys, where):
    torch = pytest.importorskip("torch")
    arrays = dict(zip(("query", "key", "value"), drawn(queries=24), strict=True))
    q, k, v = (torch.tensor(a, requires_grad=True) for a in arrays.values())
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    above = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    output.backward(above)
    with torch.no_grad():
        weights = (q @ k.mT / 8**0.5).softmax(-1)
        slope = weights * (above @ v.mT - (above * output).sum(-1, keepdim=True)) / 8**0.5
        of_query = slope[..., keys] @ k[:, :, keys]
    given = {"output": output.detach().numpy(), "gradient.output": above.numpy()}
    gradients = {"key": k.grad, "value": v.grad, "query": of_query}
    given |= {f"gradient.{n}": a.numpy() for n, a in gradients.items()}
    found = diagnose(**arrays, **given, layout="batch heads length head")
    assert [it.id for it in found.causes] == ["backward.query-of-keys"], str(found)


@pytest.mark.parametrize("what", ["causal", "mask"])
def test_a_mistake_in_some_entries_is_told_before_other_masks(what, one_mistake):
    q, k, v = drawn(queries=20, size=16)
    told = {"causal": True} if what == "causal" else {"mask": PADDED, "mask_true": "attends"}
    right = attention(
        q, k, v, mask=np.tri(20, dtype=bool) if what == "causal" else PADDED[:, None, None]
    )
    output = np.concatenate([right[:1], attention(q, k, v)[1:]])
    found = diagnose(q, k, v, output, layout="batch heads length head", **told)
    assert [it.id for it in found.causes] == [f"{what}.not-applied"], str(found)
    assert "batch entry 1" in found.causes[0].text


SCALED = {
    "components": lambda x, of: (2,),
    "components of keys, tokens of values": lambda x, of: (2,) if of == "key" else (3,),
    "components of all entries": lambda x, of: (0, 2),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_cache_of_8_bits_is_told_with_its_scales(name, one_mistake):
    q, k, v = drawn(queries=20, size=16)
    stored = []
    for x, of in ((k, "key"), (v, "value")):
        unit = np.abs(x).max(axis=SCALED[name](x, of), keepdims=True) / np.float32(127)
        stored.append(np.rint(x / unit) * unit)
    found = diagnose(q, k, v, attention(q, *stored), layout="batch heads length head")
    over = ["scaled.component", "scaled.mixed", ""][[*SCALED].index(name)]
    told = [it.arguments["over"].id for it in found.causes if it.id == "precision.stored-scaled"]
    assert told == [over] * bool(over), str(found)


@pytest.mark.parametrize("bent", [True, False])
def test_bent_rotary_frequencies_are_no_rounding(bent, one_mistake):
    """A port whose frequencies are slightly wrong is not one that computes in bfloat16."""
    q, k, v = drawn(queries=48, size=32)

    def turned(x):
        angles = np.arange(48)[:, None] * 5e5 ** (-np.arange(0, 32, 2) / 32)
        angles = angles / (1 + bent * np.arange(16) ** 2 / 30)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = (rounded(x[..., :16]), rounded(x[..., 16:]))
        return rounded(np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1))

    rounded = np.float32 if bent else in_bfloat16
    output = rounded(attention(turned(q), turned(k), rounded(v), causal=0)).astype(np.float32)
    told = {"causal": True, "rotary": {"base": 5e5, "pairs": "halves"}, "dtype": "float32"}
    found = diagnose(q, k, v, output, layout="b h n d", **told)
    coarse = [it.id for it in found.causes if it.id.startswith(("accuracy.", "precision."))]
    assert bool(coarse) is not bent, str(found)


OF_HEADS = [
    ([1.0, 1.0, 1.3, 1.0], "scale.factor", {"factor": 1.3}),
    ([1.0, 0.76, 1.0, 0.76], "scale.factor", {"factor": 0.76}),
    ([1.0, 4.0, 1.0, 1.0], "scale.missing", {}),
    ([1.0, 0.7, 1.0, 1.3], "scale.factors", {}),
    ([0.7, 1.2, 1.3, 1.1], "scale.factors", {}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("queries", [20, 100])
@pytest.mark.parametrize(("factors", "cause", "about"), OF_HEADS)
def test_a_factor_in_some_heads_only_is_told(factors, cause, about, queries, dtype, one_mistake):
    rounded = in_bfloat16 if dtype == "bfloat16" else np.float32
    q, k, v = (rounded(x) for x in drawn(queries=queries, size=16))
    factors = np.float32(factors)[:, None, None]
    output = rounded(attention(q, k, v, scale=factors / np.float32(4)))
    found = diagnose(q, k, v, output, layout="batch heads length head", dtype=dtype)
    assert found.verdict == "deviates"
    assert [it.id for it in found.causes] == ([cause] if cause else []), str(found)
    for it in found.causes:
        assert "head" in it.text
        told = [float(x) for x in it.arguments.get("factors", [])]
        assert told == pytest.approx(factors.ravel().tolist(), rel=0.05) or not told
        assert (
            it.arguments.items()
            >= {n: pytest.approx(x, rel=0.05) for n, x in about.items()}.items()
        )


def in_one_axis(x, apart=False):
    tokens = x.swapaxes(1, 2).reshape(-1, *x.shape[1::2])
    return tokens if apart else tokens.reshape(len(tokens), -1)


@pytest.mark.night
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("scale", "verdict"), [(None, "noise"), pytest.param(1.0, "deviates", marks=pytest.mark.night)]
)
def test_batch_entries_whose_tokens_follow_each_other(apart, scale, verdict):
    lengths = np.array([12, 8])
    seen = (np.arange(12) < lengths[:, None])[:, None, None]
    own = {} if apart else {"heads": 4}
    output = attention(Q, K, V, scale=scale)
    flat = [in_one_axis(x, apart) for x in (Q, K, V, output)]
    masked = in_one_axis(attention(Q, K, V, scale=scale, mask=seen), apart)
    for found in (
        diagnose(*flat, batch=2, **own),
        diagnose(*flat[:3], output, **own),
        diagnose(*flat[:3], masked, key_lengths=lengths, **own),
        diagnose(*flat[:3], masked, mask=seen, mask_true="attends", **own),
    ):
        assert found.verdict == verdict, str(found)
        assert [it.id for it in found.causes] == ["scale.missing"] * (scale is not None)
        assert "tokens of 2 batch entries, one entry after the other" in str(found)
    with pytest.raises(
        BadArrays, match="not those of 5 batch entries of one length; correct batch="
    ):
        diagnose(*flat, batch=5, **own)
    if not apart:
        found = diagnose(*flat, **own)
        assert "if several entries follow each other, say how many: batch= (--batch)" in str(found)


OTHER_NAMES = (
    "q k v attn_out",
    "q_proj_out k_proj_out v_proj_out attn_output",
    "query_layer key_layer value_layer context_layer",
    "hidden_states q k v out",
)


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", ["npz", "folder", "safetensors"])
@pytest.mark.parametrize("names", OTHER_NAMES)
def test_arrays_of_a_model_have_names_of_their_own(tmp_path, capsys, names, kind):
    arrays = [Q, K, V, attention(Q, K, V, scale=1.0)]
    named = dict(zip(names.split(), [Q[:, 0]] * ("hidden" in names) + arrays, strict=True))
    path = stored(tmp_path, named, kind) if kind != "folder" else tmp_path
    if kind == "folder":
        for name, array in named.items():
            np.save(tmp_path / f"{name}.npy", array)
    assert main(["diagnose", str(path)]) == ExitCode.DEVIATES, capsys.readouterr().err
    assert "equals the answer without the scale" in capsys.readouterr().out


def test_names_that_are_not_known_are_listed(tmp_path, capsys):
    path = tmp_path / "dump.npz"
    np.savez(path, mine=Q, k=K, v=V, out=Q)
    assert main(["diagnose", str(path)]) == ExitCode.USAGE
    assert (
        "query missing; there is key, output, value. Not known: mine; save"
        in capsys.readouterr().err
    )
    np.savez(path, hidden_states=Q[:, 0], attn_out=Q[:, 0])
    assert main(["diagnose", str(path)]) == ExitCode.USAGE
    assert "the input x of a layer, and none of its weights" in capsys.readouterr().err


def test_an_output_that_is_right_beside_one_that_is_not(tmp_path, capsys):
    one, other = tmp_path / "one.npz", tmp_path / "other.npz"
    np.savez(one, query=Q, key=K, value=V, output=attention(Q, K, V))
    np.savez(other, output=attention(Q, K, V, scale=1.0))
    assert main(["diagnose", str(one), "--against", str(other)]) == ExitCode.OK
    said = "the two outputs differ: this one is right, the other one deviates"
    assert said in capsys.readouterr().out.splitlines()[1]
    assert main(["diagnose", str(one), "--against", str(one)]) == ExitCode.OK
    assert said not in capsys.readouterr().out


# Layers whose library is not named


def test_whose_weights_they_are_is_found_out(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    x = torch.from_numpy(X)
    with torch.no_grad():
        output = layer(x, x, x)[0]
    for weights in (layer, layer.state_dict()):
        assert diagnose_layer(X, weights, output, heads=4).verdict == "noise"
    with pytest.raises(ConformanceError, match="do not determine the number of heads"):
        diagnose_layer(X, layer, output)
    with pytest.raises(BadArrays, match="weights is a list, which has no names; pass its arrays"):
        diagnose_layer(X, [*layer.parameters()], output, heads=4)


def test_a_module_of_flax_is_taken():
    pytest.importorskip("flax")
    from flax import linen, nnx

    layer = nnx.MultiHeadAttention(4, 32, qkv_features=32, decode=False, rngs=nnx.Rngs(0))
    output = np.asarray(layer(X, X, X))
    for told in ({}, {"of": "flax-nnx"}):
        assert diagnose_layer(X, layer, output, **told).verdict == "noise"
        assert diagnose_layer(X, layer, 2 * output, **told).cause.id == "output.factor"
    with pytest.raises(BadArrays, match="has no names; pass its arrays by name"):
        diagnose_layer(X, linen.MultiHeadDotProductAttention(4), output)


def test_what_is_stored_in_float64_by_a_factor_of_numpy_is_judged_as_its_inputs(tmp_path, capsys):
    """A number such as `np.sqrt(d)` is a float64, and what it divides becomes one."""
    random = np.random.default_rng(3)
    query, key, value = random.standard_normal((3, 2, 3, 5, 8), dtype=np.float32)

    def answer(scale):
        logits = query @ key.swapaxes(-1, -2) / scale
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True) @ value

    right = answer(np.sqrt(8))
    assert right.dtype == np.float64
    found = diagnose(query=query, key=key, value=value, output=right)
    assert (found.verdict, found.dtype) == ("noise", "float32")
    assert 'dtype="float64"' in str(found)
    wrong = diagnose(query=query, key=key, value=value, output=answer(1.1 * np.sqrt(8)))
    assert wrong.verdict == "deviates"
    told = diagnose(query=query, key=key, value=value, output=right, dtype="float64")
    assert told.causes[0].id == "accuracy.float32"
    # In float64, the same inputs leave no doubt.
    exact = diagnose(*(one.astype(float) for one in (query, key, value)), output=right)
    assert exact.dtype == "float64"
