"""The adapters of kernels for GPUs, with functions of the documented signatures in their place."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from conformance import CausalFlag, Sinks, Unavailable, Window
from conformance.adapter.loading import load, registered
from conformance.cases.catalogue import find_cases
from conformance.errors import Unsupported
from conformance.experiments import experiment
from conformance.running.session import Inquiry, Item, Session, plan

torch = pytest.importorskip("torch")


def attended(q, k, v, scale, causal, window, softcap, slopes=None, sinks=None, mask=None):
    """One sequence: `[length heads head]`, aligned at the end. A side of None has no limit."""
    (queries, heads, size), keys = q.shape, k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (scale or size**-0.5)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    at = torch.arange(max(queries, keys), device=q.device)
    ahead = at[:keys] - (at[:queries, None] + keys - queries)
    if slopes is not None:
        assert slopes.dtype == torch.float32
        logits = logits - slopes[:, None, None] * ahead.abs()
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    seen &= seen if left is None else ahead >= -left
    seen &= seen if right is None else ahead <= right
    seen &= seen if mask is None else mask
    there = seen.any(dim=1)[:, None]
    logits = logits.masked_fill(~seen & there, -torch.inf)
    if sinks is not None:
        column = sinks.to(logits.dtype)[:, None, None].expand(heads, queries, 1)
        logits = torch.cat((logits, column), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :keys] * there if keys else logits[..., :0]
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)


def unlimited(window):
    """A window in which each negative number means no limit."""
    return [None if side < 0 else side for side in window]


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    given = (softmax_scale, causal, unlimited(window_size), softcap, alibi_slopes)
    return torch.stack([attended(*each, *given) for each in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    given = (softmax_scale, causal, unlimited(window_size), softcap, alibi_slopes)
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
    given = (softmax_scale, causal, unlimited(window_size), softcap, alibi_slopes)
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
                at = length + torch.arange(len(query), device=q.device) * local
                tables = (rotary_cos[at], rotary_sin[at], rotary_interleaved)
                query = torch.cat([turned(query[..., :size], *tables), query[..., size:]], -1)
                at = length + torch.arange(count, device=q.device)
                tables = (rotary_cos[at], rotary_sin[at], rotary_interleaved)
                new = torch.cat([turned(new[..., :size], *tables), new[..., size:]], -1)
            keys[length : length + count], values[length : length + count] = new, v[entry]
            length += count
        rows.append(attended(query, keys[:length], values[:length], *given))
    return torch.stack(rows)


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert isinstance(window_size, tuple)
    offsets = (cu_seq_q, cu_seq_k, max_q, max_k)
    return flash_attn_varlen_func(
        query, key, value, *offsets, softmax_scale=scale, window_size=window_size
    )


def flash_attn_4_func(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, return_lse=False,
):  # fmt: skip
    window = (None, None) if window_size == (-1, -1) else window_size
    given = (softmax_scale, causal, window, softcap, None, learnable_sink)
    return torch.stack([attended(*each, *given) for each in zip(q, k, v, strict=True)]), None


def flash_attn_4_varlen_func(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None,
    softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, return_lse=False,
):  # fmt: skip
    window = (None, None) if window_size == (-1, -1) else window_size
    given = (softmax_scale, causal, window, softcap, None, learnable_sink)
    if page_table is not None:
        assert page_table.dtype == seqused_k.dtype == torch.int32
        k, v = ([x[row.long()].flatten(0, 1) for row in page_table] for x in (k, v))
        each = zip(q, k, v, seqused_k.tolist(), strict=True)
        return torch.stack([attended(x, y[:n], z[:n], *given) for x, y, z, n in each]), None
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    rows = [
        attended(q[a:b], k[c:d], v[c:d], *given)
        for (a, b), (c, d) in zip(
            cu_seqlens_q.unfold(0, 2, 1), cu_seqlens_k.unfold(0, 2, 1), strict=True
        )
    ]
    return torch.cat(rows), None


@torch.no_grad()
def single_prefill_with_kv_cache(
    q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None,
    packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE",
    use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
):  # fmt: skip
    if custom_mask is not None:
        assert (custom_mask.dtype, custom_mask.shape) == (torch.bool, (len(q), len(k)))
        causal = False
    elif causal and len(k) < len(q):
        raise RuntimeError("kv_len must be greater than or equal to qo_len")
    given = (sm_scale, causal, unlimited((window_left, -1)), logits_soft_cap or 0.0)
    return attended(q, k, v, *given, mask=custom_mask)


class Wrapper:
    """What the two wrappers of FlashInfer have in common."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert len(float_workspace_buffer) == 128 * 2**20

    def told(
        self, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
        sm_scale=None, window_left=-1, logits_soft_cap=None, q_data_type="float16",
    ):  # fmt: skip
        self.heads = (num_qo_heads, num_kv_heads, num_kv_heads)
        self.sizes = (head_dim_qk, head_dim_qk, head_dim_vo or head_dim_qk)
        self.dtype = q_data_type
        self.given = (sm_scale, causal, unlimited((window_left, -1)), logits_soft_cap or 0.0)

    @torch.no_grad()
    def attend(self, q, k, v, sequences):
        assert tuple(x.shape[-2] for x in (q, k, v)) == self.heads
        assert tuple(x.shape[-1] for x in (q, k, v)) == self.sizes
        assert len(q) == self.qo_indptr[-1]
        assert self.dtype == q.dtype
        starts = self.qo_indptr.unfold(0, 2, 1)
        rows = [
            attended(q[a:b], *sequence, *self.given)
            for (a, b), sequence in zip(starts, sequences, strict=True)
        ]
        return torch.cat(rows)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    def plan(self, qo_indptr, kv_indptr, *told, **named):
        assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
        self.qo_indptr, self.kv_indptr = qo_indptr, kv_indptr
        self.told(*told, **named)

    def run(self, q, k, v):
        return self.attend(q, k, v, [(k[a:b], v[a:b]) for a, b in self.kv_indptr.unfold(0, 2, 1)])


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *told,
        page_size, **named,
    ):  # fmt: skip
        self.qo_indptr, self.size = qo_indptr, page_size
        self.pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {x.dtype for x in (qo_indptr, *self.pages)} == {torch.int32}
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert 1 <= paged_kv_last_page_len.min() <= paged_kv_last_page_len.max() <= page_size
        self.told(*told, **named)

    def run(self, q, paged_kv_cache):
        offsets, numbers, last = self.pages
        sequences = []
        for (a, b), rest in zip(offsets.unfold(0, 2, 1), last, strict=True):
            count = max((b - a - 1) * self.size + rest, 0)
            held = (x[numbers[a:b].long()].flatten(0, 1)[:count] for x in paged_kv_cache)
            sequences.append((*held,))
        return self.attend(q, *paged_kv_cache, sequences)


STAND_INS = {
    "flash_attn": (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache),
    "flash_attn.cute": (flash_attn_4_func, flash_attn_4_varlen_func),
    "flashinfer": (
        single_prefill_with_kv_cache,
        BatchPrefillWithRaggedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
    ),
}


@pytest.fixture
def stand_in(monkeypatch):
    from torch.nn.attention import varlen

    for module, made in STAND_INS.items():
        named = {one.__name__.replace("_4_", "_"): one for one in made}
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**named))
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


NAMES = (
    "flash-attn",
    "flash-attn-varlen",
    "flash-attn-kvcache",
    "flash-attn-paged",
    "flash-attn-4",
    "flash-attn-4-varlen",
    "flash-attn-4-paged",
    "flashinfer-single",
    "flashinfer-ragged",
    "flashinfer-paged",
    "torch-varlen",
)


def without_gpu(name, **declared):
    """The adapter, as if its kernels ran here and in float32, at the sizes of the catalogue."""
    kind = type(load(name))
    here = type(kind.__name__, (kind,), {
        "packages": (), "imports": (), "dtypes": ("float32",), "geometry": None,
        "gpus_only": False, **declared,
    })()  # fmt: skip
    here.name = name
    return here


CASES = [
    "plain/no-mask/cross",
    "plain/custom-scale/*",
    "mask/per-batch/gqa",
    "causal/bottom-right/cross",
    "feature/window/*",
    "feature/window-nothing-before/*",
    "feature/window-causal/gqa",
    "feature/window-nothing-after/*",
    "feature/window-only-after/*",
    "feature/soft-cap-causal/*",
    "feature/sinks/*",
    "feature/sinks-causal/*",
    "feature/window-causal-with-sinks/*",
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


@pytest.mark.sample(12)
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
        "flash-attn-4": {"feature/window-causal-with-sinks/self", "feature/window-only-after/self"},
        "flash-attn-4-varlen": {*causal, "feature/sinks-causal/gqa"},
        "flash-attn-4-paged": {"feature/key-lengths-causal/decoding", "feature/sinks-causal/gqa"},
        "flashinfer-single": {"feature/window-causal/gqa", "mask/per-batch/gqa"},
        "flashinfer-ragged": {*causal, "feature/window-causal/gqa"},
        "flashinfer-paged": {"feature/key-lengths-causal/decoding", "feature/window-causal/gqa"},
        "torch-varlen": {*causal, "feature/window-only-after/self", "feature/window-causal/gqa"},
    }
    assert expected[name] <= supported


def at_declared_sizes(name, *cases):
    """The verdicts by dtype of these cases, at the sizes and in the dtypes that are declared."""
    declared, session = load(name), Session()
    adapter = without_gpu(name, dtypes=declared.dtypes, geometry=declared.geometry)
    cases = [one for case in cases for one in find_cases(case)]
    items = [*plan([adapter], cases, ("bfloat16", "float32"), "cpu")]
    sizes = {item.asked.problem("bfloat16").shape.head_size for item in items}
    assert sizes == {*declared.geometry.head_sizes}
    told = defaultdict(set)
    for item in items:
        told[item.dtype].add(session.examine(item).verdict)
    return told


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", ["plain/no-mask/cross", "causal/bottom-right/gqa"])
def test_cases_are_posed_at_the_declared_sizes(case, name, stand_in):
    told = at_declared_sizes(name, case)
    # A call with a cache needs queries that follow the cached keys.
    cached = {"unsupported"} if name == "flash-attn-kvcache" else set()
    assert told == {"bfloat16": {"conforms"} | cached, "float32": {"unsupported"}}


USUAL = ("mask/key-padding/cross", "causal/square/self", "plain/no-mask/gqa")


@pytest.mark.night
@pytest.mark.parametrize(("name", "single"), [("efficient", "conforms"), ("cudnn", "unsupported")])
def test_the_kernels_that_torch_has_for_gpus_only(name, single, monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", nullcontext)
    told = at_declared_sizes(f"torch-sdpa-{name}", *USUAL)
    assert told == {"bfloat16": {"conforms"}, "float32": {single}}


@pytest.mark.night
def test_the_kernel_that_jax_has_for_gpus_only(monkeypatch):
    jax = pytest.importorskip("jax")
    written_out = jax.nn.dot_product_attention

    def cudnn(query, *inputs, implementation, **given):
        assert implementation == "cudnn"
        if query.shape[-1] % 8:
            raise NotImplementedError("the head dim must be a multiple of 8")
        return written_out(query, *inputs, **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    told = at_declared_sizes("jax-sdpa-cudnn", *USUAL)
    assert told == {"bfloat16": {"conforms"}, "float32": {"unsupported"}}
    heads = jax.numpy.zeros((1, 3, 2, 4))
    with pytest.raises(Unsupported, match="multiple of 8"):
        without_gpu("jax-sdpa-cudnn").attend(heads, heads, heads, {})


ASKED = ("causal", "windows", "soft-cap", "sinks", "alibi", "masks", "masked-rows")


def experiments(adapter):
    """The findings of the experiments that concern declarations."""
    for name in ASKED:
        inquiry = Inquiry(adapter, experiment(name), "float32", "cpu", adapter.modes[0])
        if experiment(name).modes(adapter):
            yield from Session().inquire(inquiry)[0].findings


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", NAMES)
def test_experiments_see_what_is_declared(name, stand_in):
    told = {finding.verdict for finding in experiments(without_gpu(name))}
    # Experiments have no cache to pass.
    cached = name == "flash-attn-kvcache"
    assert told <= ({"unsupported"} if cached else {"conforms", "observed"})


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("torch-varlen", {"causal_flag": CausalFlag("causal", alignment="top-left")}),
        ("torch-varlen", {"features": Window("window_size", alignment="top-left")}),
        ("flash-attn-4", {"features": Window("window_size", none=-1, alignment="bottom-right")}),
        ("flash-attn-4", {"features": Sinks("learnable_sink", units="log2")}),
        ("flashinfer-single", {"features": Window("window_left", "before", -1, "bottom-right")}),
        ("flashinfer-ragged", {"features": Window("window_left", "own and before", -1)}),
        ("flashinfer-single", {"fully_masked_row": "nan"}),
    ],
)
def test_a_wrong_declaration_is_seen(name, declared, stand_in):
    if "features" in declared:
        wrong = declared["features"]
        kept = (one for one in load(name).features if one.names != wrong.names)
        declared = {"features": (wrong, *kept)}
    assert "deviates" in {one.verdict for one in experiments(without_gpu(name, **declared))}


def test_flashinfer_refuses_more_queries_than_keys_and_a_flag_beside_a_mask(stand_in):
    adapter = without_gpu("flashinfer-single")
    heads, mask = torch.zeros(1, 3, 2, 4), torch.ones(1, 3, 3, dtype=torch.bool)
    with pytest.raises(Unsupported, match="more queries than keys"):
        adapter.attend(heads, heads[:, 1:], heads[:, 1:], {"causal": True})
    with pytest.raises(Unsupported, match="ignored beside custom_mask"):
        adapter.attend(heads, heads, heads, {"causal": True, "custom_mask": mask})


def test_torch_takes_fewer_key_heads_without_a_flag_before_2_12(monkeypatch, stand_in):
    from torch.nn.attention import varlen

    from conformance.adapters import torch_varlen

    monkeypatch.setattr(torch_varlen, "since", lambda package, version: version <= "2.11")
    passed = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *inputs, **named: passed.append(named))
    offsets = dict.fromkeys(("cu_seq_q", "cu_seq_k", "max_q", "max_k"))
    without_gpu("torch-varlen").attend(torch.zeros(3, 4, 8), *[torch.zeros(3, 2, 8)] * 2, offsets)
    assert passed == [{"window_size": (-1, -1)}]


def test_varlen_attn_of_torch_2_10_is_another_function(monkeypatch):
    from conformance.adapters import torch_varlen

    monkeypatch.setattr(torch_varlen, "since", lambda package, version: False)
    with pytest.raises(Unavailable, match=r"since torch 2\.11"):
        load("torch-varlen").prepare()


FOR_GPUS = [name for name in registered() if getattr(load(name), "gpus_only", False)]


@pytest.mark.parametrize("name", FOR_GPUS)
def test_without_a_gpu_it_is_unavailable(name):
    assert {*NAMES, "torch-sdpa-efficient", "torch-sdpa-cudnn", "jax-sdpa-cudnn"} == {*FOR_GPUS}
    adapter = load(name)
    with pytest.raises(Unavailable, match="GPUs only"):
        adapter.check_device("cpu")
    pytest.importorskip(adapter.framework)
    if not torch.cuda.is_available():
        with pytest.raises(Unavailable, match="sees no gpu"):
            adapter.check_device("gpu")
    (case,) = find_cases("causal/bottom-right/gqa")
    adapter.geometry = None
    result = Session().examine(Item(adapter, case, "float16", "cpu", adapter.modes[0]))
    assert result.verdict == "unavailable"


def test_a_mask_has_no_argument(stand_in):
    (case,) = find_cases("mask/key-padding/cross")
    with pytest.raises(Unsupported, match="no mask arguments"):
        without_gpu("flash-attn").check(case.problem("float32"))
