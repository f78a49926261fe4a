"""A torch kernel for serving: keys and values in pages, grouped heads, a window, a cap, sinks.

    mha-conformance run docs/examples/torch_paged.py:paged_attention
    mha-conformance gate docs/examples/torch_paged.py:paged_attention --level core

The signature is that of `flash_attn_with_kvcache`. `only=True` says that keys and values are always
in pages. Memory that no token uses holds NaN, so a kernel that reads beyond a length shows it.
"""

import math

import torch

from conformance import CausalFlag, Pages, Sinks, SoftCap, Window, attention_function


@attention_function(
    "torch",
    layout="batch length heads head",
    causal_flag=CausalFlag("causal", alignment="bottom-right"),
    features=(
        Pages("block_table", "cache_seqlens", size=16, only=True),
        Window("window_size", form="left right", none=-1, alignment="bottom-right"),
        SoftCap("softcap"),
        Sinks("sinks"),
    ),
    grouped=True,
    differentiable=False,
)
@torch.no_grad()
def paged_attention(
    query,
    key,
    value,
    block_table,
    cache_seqlens,
    causal=False,
    window_size=(-1, -1),
    softcap=None,
    sinks=None,
):
    """Attend from `[batch length heads head]` to the pages `[page token heads head]`."""
    length, heads = query.shape[1:3]
    result = query.new_zeros(*query.shape[:-1], value.shape[-1])
    left, right = window_size
    for entry, (pages, count) in enumerate(zip(block_table, cache_seqlens.tolist(), strict=True)):
        used = pages[: math.ceil(count / key.shape[1])]
        keys, values = (
            cache[used].flatten(0, 1)[:count].repeat_interleave(heads // cache.shape[2], dim=1)
            for cache in (key, value)
        )
        logits = torch.einsum("qhc,khc->hqk", query[entry] / math.sqrt(query.shape[-1]), keys)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        # The last query stands at the last key.
        own = torch.arange(count - length, count, device=query.device)
        ahead = torch.arange(count, device=query.device) - own[:, None]
        blocked = (ahead > 0) & causal
        blocked |= (ahead < -left) & (left >= 0)
        blocked |= (ahead > right) & (right >= 0)
        logits = logits.masked_fill(blocked, -math.inf)
        if sinks is not None:
            # A key more, which takes weight and has no value.
            logits = torch.cat([logits, sinks[:, None, None].expand(heads, length, 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :count]
        weights = weights.masked_fill(blocked.all(dim=-1, keepdim=True), 0.0)
        result[entry] = torch.einsum("hqk,khc->qhc", weights, values)
    return result
