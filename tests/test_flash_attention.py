"""The adapters of flash_attn, with functions of the documented signatures in its place."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest

from conformance import Unavailable
from conformance.adapter.loading import load
from conformance.cases.catalogue import find_cases
from conformance.errors import Unsupported
from conformance.running.session import Item, Session, plan

torch = pytest.importorskip("torch")


def attended(q, k, v, scale, causal, window, softcap, slopes):
    """One sequence: `[length heads head]`, aligned at the end."""
    (queries, heads, size), keys = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (scale or size**-0.5)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    ahead = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    if slopes is not None:
        assert slopes.dtype == torch.float32
        logits = logits - slopes[:, None, None] * ahead.abs()
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    seen &= ahead >= -left if left >= 0 else seen
    seen &= ahead <= right if right >= 0 else seen
    there = seen.any(dim=1)[:, None]
    logits = logits.masked_fill(~seen & there, -torch.inf)
    weights = torch.softmax(logits, dim=-1) * there if keys else logits
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    given = (softmax_scale, causal, window_size, softcap, alibi_slopes)
    return torch.stack([attended(*each, *given) for each in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    given = (softmax_scale, causal, window_size, softcap, alibi_slopes)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    rows = [
        attended(q[a:b], k[c:d], v[c:d], *given)
        for (a, b), (c, d) in zip(
            cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True
        )
    ]
    return torch.cat(rows)


def turned(x, cos, sin, interleaved):
    pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    one, other = pairs.unbind(-1 if interleaved else -2)
    cos, sin = cos[:, None], sin[:, None]
    both = (one * cos - other * sin, one * sin + other * cos)
    return torch.stack(both, dim=-1 if interleaved else -2).flatten(-2)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    given = (softmax_scale, causal, window_size, softcap, alibi_slopes)
    rows = []
    for entry, length in enumerate(cache_seqlens.tolist()):
        query, keys, values = q[entry], k_cache, v_cache
        if block_table is not None:
            keys, values = (x[block_table[entry].long()].flatten(0, 1) for x in (keys, values))
        else:
            keys, values = keys[entry], values[entry]
        if k is not None:
            new, count = k[entry], k.shape[1]
            if rotary_cos is not None:
                size = 2 * rotary_cos.shape[1]
                local = causal or tuple(window_size) != (-1, -1)
                at = length + torch.arange(len(query)) * local
                tables = (rotary_cos[at], rotary_sin[at], rotary_interleaved)
                query = torch.cat([turned(query[..., :size], *tables), query[..., size:]], -1)
                at = length + torch.arange(count)
                tables = (rotary_cos[at], rotary_sin[at], rotary_interleaved)
                new = torch.cat([turned(new[..., :size], *tables), new[..., size:]], -1)
            keys[length : length + count], values[length : length + count] = new, v[entry]
            length += count
        rows.append(attended(query, keys[:length], values[:length], *given))
    return torch.stack(rows)


@pytest.fixture
def stand_in(monkeypatch):
    functions = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
    monkeypatch.setitem(
        sys.modules, "flash_attn", SimpleNamespace(**{one.__name__: one for one in functions})
    )


NAMES = ("flash-attn", "flash-attn-varlen", "flash-attn-kvcache", "flash-attn-paged")


def without_gpu(name, **declared):
    """The adapter, as if its kernels ran here and in float32, at the sizes of the catalogue."""
    kind = type(load(name))
    here = type(kind.__name__, (kind,), {
        "packages": (), "imports": (), "dtypes": ("float32",), "geometry": None,
        "check_device": lambda self, device: None, **declared,
    })()  # fmt: skip
    here.name = name
    return here


CASES = [
    "plain/no-mask/cross",
    "causal/bottom-right/cross",
    "feature/window/*",
    "feature/window-nothing-before/*",
    "feature/window-causal/gqa",
    "feature/soft-cap-causal/*",
    "feature/alibi/gqa",
    "feature/alibi-causal/*",
    "feature/window-with-alibi/*",
    "feature/key-lengths-causal/*",
    "feature/key-lengths-with-rotary/*",
    "feature/lengths-causal/*",
    "feature/segments/self",
    "feature/segments-causal/*",
    "feature/rotary-causal/*",
    "feature/cache-rotary/*",
]


@pytest.mark.parametrize("name", NAMES)
def test_the_functions_are_called_as_they_are_documented(name, stand_in):
    adapter, session, told = without_gpu(name), Session(), {}
    for case in (case for wanted in CASES for case in find_cases(wanted)):
        item = Item(adapter, case, "float32", "cpu", adapter.modes[0])
        told[case.id] = session.examine(item).verdict
    assert set(told.values()) <= {"conforms", "unsupported"}, told
    supported = {case for case, verdict in told.items() if verdict == "conforms"}
    causal = "feature/segments-causal/separate", "feature/lengths-causal/separate"
    expected = {
        "flash-attn": {"feature/window-causal/gqa", "feature/alibi-causal/decoding"},
        "flash-attn-varlen": {*causal, "feature/key-lengths-causal/gqa"},
        "flash-attn-kvcache": {"feature/cache-rotary/gqa", "feature/key-lengths-with-rotary/gqa"},
        "flash-attn-paged": {"feature/key-lengths-causal/decoding", "plain/no-mask/cross"},
    }
    assert expected[name] <= supported


@pytest.mark.parametrize("name", NAMES)
def test_cases_are_posed_at_the_declared_sizes(name, stand_in):
    declared = load(name)
    adapter = without_gpu(name, dtypes=declared.dtypes, geometry=declared.geometry)
    cases = [*find_cases("causal/bottom-right/gqa"), *find_cases("plain/no-mask/cross")]
    items = [*plan([adapter], cases, ("bfloat16", "float32"), "cpu")]
    sizes = {item.asked.problem("bfloat16").shape.head_size for item in items}
    assert sizes == {*declared.geometry.head_sizes}
    session = Session()
    told = defaultdict(set)
    for item in items:
        told[item.dtype].add(session.examine(item).verdict)
    # A call with a cache needs queries that follow the cached keys.
    cached = {"unsupported"} if name == "flash-attn-kvcache" else set()
    assert told == {"bfloat16": {"conforms"} | cached, "float32": {"unsupported"}}


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_it_is_unavailable(name):
    adapter = load(name)
    with pytest.raises(Unavailable, match="GPUs only"):
        adapter.check_device("cpu")
    (case,) = find_cases("causal/bottom-right/gqa")
    adapter.geometry = None
    result = Session().examine(Item(adapter, case, "float16", "cpu", adapter.modes[0]))
    assert result.verdict == "unavailable"


def test_a_mask_has_no_argument(stand_in):
    (case,) = find_cases("mask/key-padding/cross")
    with pytest.raises(Unsupported, match="no mask arguments"):
        without_gpu("flash-attn").check(case.problem("float32"))
