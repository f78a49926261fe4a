"""The functions of flash_attn 2: of whole sequences, of packed ones, and beside a cache.

What a port gets wrong: axes are `[batch length heads head]`. There is no mask; what a mask says has
to be a causal flag, a window, lengths, or sequences that are packed. Everything is aligned
bottom-right if lengths differ, the causal flag since 2.1, and ALiBi too, which is a distance, so it
needs no causal flag. A window (left, right) counts the keys beside the query's own on both sides,
and -1 is no limit; 0 is the own key only. A cap of 0.0 is none. A fully masked query gets zeros.
Slopes are float32, whatever the queries are.

`flash_attn_varlen_func` takes all tokens in a row, with the offsets of sequences; sequences may be
empty. `flash_attn_with_kvcache` writes keys and values into the cache, in place, before it attends,
at `cache_seqlens`, which counts the tokens before the new ones, and what is beyond is not read. It
rotates queries and new keys, pairs of neighbours unless `rotary_interleaved=False`, with tables
`[position pair]`; keys in the cache are rotated already. Without a causal flag or a window all
queries of an entry get the angle of the first. It has no gradients.

The kernels exist for GPUs only, in float16 and bfloat16, for heads of up to 256.
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
    Unavailable,
    Window,
)
from conformance.adapter import Cache, Packed, Pages

_FEATURES = (
    Window("window_size", alignment="bottom-right"),
    SoftCap("softcap"),
    Alibi("alibi_slopes", alignment="bottom-right", dtype="float32"),
)


class FlashAttention(Function):
    """The adapter of flash_attn_func, and the base class of the others."""

    title = "flash_attn.flash_attn_func"
    documentation = "https://github.com/Dao-AILab/flash-attention"
    framework = "torch"
    packages = ("flash-attn",)
    imports = ("flash_attn",)
    layout = "batch length heads head"
    grouped = True
    custom_scale = True
    dtypes = ("float16", "bfloat16")
    accuracy = "A"
    geometry = Geometry(head_sizes=(64, 128), tiles=(128, 128))
    fully_masked_row = "zeros"
    causal_flag = CausalFlag("causal", alignment="bottom-right")
    features = _FEATURES

    def check_device(self, device: str) -> None:
        if device == "cpu":
            raise Unavailable("flash_attn has kernels for GPUs only; run it with --device gpu")
        super().check_device(device)

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from flash_attn import flash_attn_func

        return flash_attn_func(query, key, value, softmax_scale=options.get("scale"), **masks)


class FlashAttentionVarlen(FlashAttention):
    """The adapter of flash_attn_varlen_func."""

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
    """The adapter of flash_attn_with_kvcache, whose cache has room for the new tokens."""

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
    """The adapter of flash_attn_with_kvcache whose cache is full and in pages."""

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
    """Return an array that may be written to, as the cache is."""
    return given.clone() if hasattr(given, "clone") else given


ADAPTERS = {
    "flash-attn": "FlashAttention",
    "flash-attn-varlen": "FlashAttentionVarlen",
    "flash-attn-kvcache": "FlashAttentionCache",
    "flash-attn-paged": "FlashAttentionPaged",
}
