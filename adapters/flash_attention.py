"""The functions of flash_attn 2: for batched sequences, for packed sequences, and with a cache.

Easy to miss in a port: axes are `[batch length heads head]`. There is no mask argument; a mask has
to be expressed as a causal flag, a window, lengths, or packed sequences. Everything is aligned
bottom-right if lengths differ: the causal flag (since 2.1), windows, and ALiBi. ALiBi depends on
the distance between query and key, so it needs no causal flag. A window (left, right) counts the
keys on each side of the query's own; -1 means no limit, and 0 no further key on that side. A soft
cap of 0.0 means none. A fully masked query gets zeros. Slopes are float32, whatever the dtype of
the queries.

`flash_attn_varlen_func` takes the tokens of all sequences in a row, with the offsets of the
sequences; sequences may be empty. `flash_attn_with_kvcache` writes new keys and values into the
cache, in place, before it attends. It writes them at `cache_seqlens`, which counts the tokens that
come before them, and it does not read what lies beyond them. It rotates queries and new keys with
tables `[position pair]`, where neighbours form a pair unless `rotary_interleaved=False`; keys in
the cache must already be rotated. Without a causal flag or a window, all queries of a batch entry
are rotated by the angle of the first. `flash_attn_with_kvcache` has no gradients.

The kernels exist for GPUs only, in float16 and bfloat16, for head sizes of up to 256.
"""

from __future__ import annotations

from typing import Any

from conformance import (
    Alibi,
    CausalFlag,
    Function,
    Geometry,
    RotaryTables,
    SoftCap,
    Window,
)
from conformance.adapter import Cache, Packed, Pages

_FEATURES = (
    Window("window_size", alignment="bottom-right"),
    SoftCap("softcap"),
    Alibi("alibi_slopes", alignment="bottom-right", dtype="float32"),
)


class FlashKernel(Function):
    """The base class of the adapters of flash attention in torch, whoever has written it."""

    framework = "torch"
    gpus_only = True
    layout = "batch length heads head"
    grouped = True
    custom_scale = True
    dtypes = ("float16", "bfloat16")
    accuracy = "A"
    geometry = Geometry(head_sizes=(64, 128), tiles=(128, 128))
    fully_masked_row = "zeros"
    causal_flag = CausalFlag("causal", alignment="bottom-right")


class FlashAttention(FlashKernel):
    """The adapter for flash_attn_func, and the base class of those below."""

    title = "flash_attn.flash_attn_func"
    documentation = "https://github.com/Dao-AILab/flash-attention"
    packages = ("flash-attn",)
    imports = ("flash_attn",)
    features = _FEATURES

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from flash_attn import flash_attn_func

        return flash_attn_func(query, key, value, softmax_scale=options.get("scale"), **masks)


class FlashAttentionVarlen(FlashAttention):
    """The adapter for flash_attn_varlen_func."""

    title = "flash_attn.flash_attn_varlen_func"
    features = (
        *_FEATURES,
        Packed(longest_query="max_seqlen_q", longest_key="max_seqlen_k", only=True),
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from flash_attn import flash_attn_varlen_func

        scale = options.get("scale")
        return flash_attn_varlen_func(query, key, value, softmax_scale=scale, **masks)


class FlashAttentionCache(FlashAttention):
    """The adapter for flash_attn_with_kvcache, with a cache that has room for the new tokens."""

    title = "flash_attn.flash_attn_with_kvcache"
    differentiable = False
    features = (
        *_FEATURES,
        RotaryTables("rotary_cos", "rotary_sin", flag="rotary_interleaved", alignment="top-left"),
        Cache("k_cache", "v_cache", lengths="cache_seqlens", only=True),
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from flash_attn import flash_attn_with_kvcache

        masks = {name: _own(array) for name, array in masks.items()}
        return flash_attn_with_kvcache(
            query, k=key, v=value, softmax_scale=options.get("scale"), **masks
        )


class FlashAttentionPaged(FlashAttention):
    """The adapter for flash_attn_with_kvcache, with a full cache that is divided into pages."""

    title = "flash_attn.flash_attn_with_kvcache (paged)"
    differentiable = False
    features = (*_FEATURES, Pages(size=256, only=True))

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from flash_attn import flash_attn_with_kvcache

        return flash_attn_with_kvcache(
            query, key, value, softmax_scale=options.get("scale"), **masks
        )


def _own(given: Any) -> Any:
    """Return a copy of an array, because calls write to caches; return other values unchanged."""
    return given.clone() if hasattr(given, "clone") else given


ADAPTERS = {
    "flash-attn": "FlashAttention",
    "flash-attn-varlen": "FlashAttentionVarlen",
    "flash-attn-kvcache": "FlashAttentionCache",
    "flash-attn-paged": "FlashAttentionPaged",
}
