"""A torch function with a window, a soft cap, sinks, and groups of query heads.

    mha-conformance run docs/examples/torch_features.py:windowed_attention

Each feature has an argument of its own, and a declaration says what that argument means. A mask can
express a window too, so the two are compared. What has neither is `unsupported`, such as ALiBi.
"""

import torch

from conformance import CausalFlag, MaskArgument, Sinks, SoftCap, Window, attention_function


@attention_function(
    "torch",
    MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True),
    causal_flag=CausalFlag("causal", alignment="bottom-right"),
    features=(
        Window("window", form="left right", none=-1, alignment="bottom-right"),
        SoftCap("softcap"),
        Sinks("sinks"),
    ),
    grouped=True,
    fully_masked_row="output bias",
)
def windowed_attention(
    query,
    key,
    value,
    mask=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    sinks=None,
    scale=None,
):
    """Softmax attention over the keys from `window[0]` before to `window[1]` after the query."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.mT
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)  # before anything is masked

    queries, keys = logits.shape[-2:]
    index = torch.arange(max(queries, keys), device=query.device)
    ahead = index[:keys] - index[:queries, None] - (keys - queries)
    before, after = (keys + queries if side < 0 else side for side in window)
    visible = (ahead >= -before) & (ahead <= (min(after, 0) if causal else after))
    visible = visible if mask is None else visible & mask
    logits = logits.masked_fill(~visible, -torch.inf)

    # A sink is a key without a value: it takes part in the maximum and in the sum.
    peak = logits.amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks[:, None, None])
    peak = peak.detach().clamp(min=torch.finfo(logits.dtype).min)
    powers = torch.exp(logits - peak)
    total = powers.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None] - peak)
    return powers / total.masked_fill(total == 0, 1.0) @ value
