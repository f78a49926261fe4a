"""torch.nn.attention.varlen.varlen_attn: torch's flash attention for packed sequences.

Easy to miss in a port: the tokens of all sequences lie in a row, `[token heads head]`, with the
offsets of the sequences in int32. There is no causal flag: `window_size=(-1, 0)` makes attention
causal. A window (left, right) counts the keys on each side of the query's own; -1 means no limit.
Everything is aligned bottom-right, unlike `is_causal` of scaled_dot_product_attention. Fewer
key/value heads need enable_gqa=True since torch 2.12; torch 2.11 takes them without it. A fully
masked query gets zeros. `seqused_k` and `block_table` are for inference, and the second needs a
kernel that torch does not contain, so the adapter declares neither.

The function calls FlashAttention 2, which exists for GPUs only, in float16 and bfloat16, for head
sizes that are multiples of 8 and at most 256.
"""

from __future__ import annotations

from typing import Any

from conformance import Unavailable, Window
from conformance.adapter import Packed, since
from conformance.adapters.flash_attention import FlashKernel


class VarlenAttention(FlashKernel):
    """The adapter for varlen_attn, in which a causal flag stands for `window_size=(-1, 0)`.

    The library itself has no such flag.
    """

    title = "torch.nn.attention.varlen.varlen_attn"
    documentation = "https://docs.pytorch.org/docs/stable/nn.attention.varlen.html"
    imports = ("torch.nn.attention.varlen",)
    features = (
        Window("window_size", alignment="bottom-right"),
        Packed("cu_seq_q", "cu_seq_k", longest_query="max_q", longest_key="max_k", only=True),
    )

    def prepare(self) -> None:
        super().prepare()
        if not since("torch", "2.11"):
            raise Unavailable("varlen_attn has a scale and windows since torch 2.11")

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        left, right = masks.get("window_size", (-1, -1))
        if query.shape[1] != key.shape[1] and since("torch", "2.12"):
            options["enable_gqa"] = True
        return varlen_attn(
            query,
            key,
            value,
            *(masks[name] for name in ("cu_seq_q", "cu_seq_k", "max_q", "max_k")),
            window_size=(left, 0 if masks.get("causal") else right),
            **options,
        )


ADAPTERS = {"torch-varlen": "VarlenAttention"}
