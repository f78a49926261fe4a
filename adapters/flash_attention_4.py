"""The functions of FlashAttention 4, the package flash-attn-4: for batched and packed sequences.

Easy to miss in a port from flash_attn 2: the functions return a tuple, (output, log-sum-exp), and
the log-sum-exp is None unless it is asked for. A window (left, right) has None for no limit; of the
negative numbers, only (-1, -1) means that too. Sinks, one logit for each query head, are
`learnable_sink`. There is no argument for ALiBi and no function for a cache with new tokens. As in
flash_attn 2, axes are `[batch length heads head]`, everything is aligned bottom-right if lengths
differ, a soft cap of 0.0 means none, and a fully masked query gets zeros.

`flash_attn_varlen_func` takes packed sequences, or keys and values in pages, whose order is given
by a table `page_table`, with the number of keys of each entry in `seqused_k`. With pages, it has no
gradients. In pages that hold a whole tile of keys, the places after the last key must hold finite
numbers, because they are multiplied by a weight of 0. The adapter passes smaller pages, in which
these places are not read.

The kernels are compiled on the first call with CuTe. They exist for GPUs only, in float16 and
bfloat16. On Hopper, head sizes are multiples of 8 up to 256; on Blackwell up to 128, or 256. The
sizes of tiles depend on the GPU, the head size, and the mask; 128 is common to most.
"""

from __future__ import annotations

from typing import Any

from conformance import Geometry, Sinks, SoftCap, Window
from conformance.adapter import Packed, Pages
from conformance.adapters.flash_attention import FlashKernel

_FEATURES = (
    Window("window_size", none=None, alignment="bottom-right"),
    SoftCap("softcap"),
    Sinks("learnable_sink"),
)


class FlashAttention4(FlashKernel):
    """The adapter for flash_attn_func, and the base class of the other adapters in this file."""

    title = "flash_attn.cute.flash_attn_func"
    documentation = "https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute"
    packages = ("flash-attn-4",)
    imports = ("flash_attn.cute",)
    geometry = Geometry(head_sizes=(128, 64), tiles=(128, 128))
    features = _FEATURES

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from flash_attn.cute import flash_attn_func

        scale = options.get("scale")
        output, _ = flash_attn_func(query, key, value, softmax_scale=scale, **masks)
        return output


class FlashAttention4Varlen(FlashAttention4):
    """The adapter for flash_attn_varlen_func with packed sequences."""

    title = "flash_attn.cute.flash_attn_varlen_func"
    features = (
        *_FEATURES,
        Packed(longest_query="max_seqlen_q", longest_key="max_seqlen_k", only=True),
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from flash_attn.cute import flash_attn_varlen_func

        scale = options.get("scale")
        output, _ = flash_attn_varlen_func(query, key, value, softmax_scale=scale, **masks)
        return output


class FlashAttention4Paged(FlashAttention4Varlen):
    """The adapter for flash_attn_varlen_func with keys and values in pages."""

    title = "flash_attn.cute.flash_attn_varlen_func (paged)"
    differentiable = False
    features = (*_FEATURES, Pages("page_table", "seqused_k", size=16, only=True))


ADAPTERS = {
    "flash-attn-4": "FlashAttention4",
    "flash-attn-4-varlen": "FlashAttention4Varlen",
    "flash-attn-4-paged": "FlashAttention4Paged",
}
