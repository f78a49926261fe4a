"""`ring_flash_attn` of ring-attention-pytorch: the version in torch operations, not in Triton.

Easy to miss in a port: with fewer key/value heads, query head h uses key/value head h % kv_heads.
With `causal=True` the mask of keys is silently ignored. With `ring_reduce_col=True` each rank
passes its keys on, but only if it has as many keys as queries; otherwise it treats its keys as all
keys. In the striped layout, rank r of n has tokens r, r + n, and so on. The number of tokens of
each rank must be a multiple of `bucket_size`, which is not checked. With several buckets and more
keys than queries, the causal mask differs from that with a single bucket.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from conformance import (
    CausalFlag,
    Distributed,
    MaskArgument,
    Mode,
    SoftCap,
    Split,
    Unsupported,
    World,
)


class Striped(Split):
    """A split of the sequence in which rank r of n has tokens r, r + n, and so on."""

    def positions(self, length: int, size: int) -> list[np.ndarray]:
        return [np.arange(rank, length, size) for rank in range(size)]


def on_rank(
    query: Any,
    key: Any,
    value: Any,
    shard: Any,
    softclamp_value: float | None = None,
    **options: Any,
) -> Any:
    """Compute attention on one rank, in one or two buckets (blocks of tokens); return its context.

    There are two buckets if the rank's numbers of queries and keys are equal, even and not 0, and
    the split is not striped.
    """
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    if softclamp_value is not None:
        options |= {"softclamp_qk_sim": True, "softclamp_value": softclamp_value}
    striped, length = shard.split == "striped", key.shape[2]
    # With several buckets, the stripes would have a different width.
    if query.shape[2] == length and length and length % 2 == 0 and not striped:
        options["bucket_size"] = length // 2
    heads = (key.shape[1], -1)
    query = query.unflatten(1, heads).transpose(1, 2).flatten(1, 2)
    inputs = (it.transpose(1, 2) for it in (query, key, value))
    context = ring_flash_attn(
        *inputs, ring_reduce_col=shard.size > 1, striped_ring_attn=striped, **options
    )
    return context.transpose(1, 2).unflatten(1, heads[::-1]).transpose(1, 2).flatten(1, 2)


class RingAttentionPytorch(Distributed):
    """The adapter for ring_flash_attn.

    On several ranks, the numbers of queries and keys must be equal and divisible by the number of
    ranks.
    """

    title = "ring_attention_pytorch.ring_flash_attn"
    documentation = "https://github.com/lucidrains/ring-attention-pytorch"
    packages = ("ring-attention-pytorch",)
    world = World(
        sizes=(1, 2, 3, 4),
        splits=(
            Split("ring", queries=True, keys=True),
            Striped("striped", queries=True, keys=True),
        ),
    )
    on_rank = on_rank
    axes: ClassVar[dict[str, tuple[str, ...]]] = {"mask": ("batch", "keys")}
    # Accumulators are in float32 and cannot be combined with other dtypes.
    dtypes = ("float32",)
    native_layout = "batch length heads head"
    grouped = True
    mask_arguments = (MaskArgument("mask", "batch key", true="attends"),)
    causal_flag = CausalFlag("causal", alignment="bottom-right", effect="instead of masks")
    features = (SoftCap("softclamp_value", none=None),)
    fully_masked_row = "zeros"

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        size, queries, keys = mode["size"], query.shape[2], key.shape[2]
        if key.shape[3] != value.shape[3]:
            raise Unsupported("heads of key and value have one size")
        if size > 1 and queries != keys:
            raise Unsupported("keys are passed on only if there are as many as queries")
        if keys % size:
            raise Unsupported(f"lengths are no multiples of {size}")
        return super().attend(query, key, value, masks, mode, **options)


ADAPTERS = {"ring-attention-pytorch": "RingAttentionPytorch"}
