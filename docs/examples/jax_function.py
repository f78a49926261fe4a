"""A kernel-like JAX function with blocks of keys, a running maximum and sum, and never all logits.

    mha-conformance run docs/examples/jax_function.py:blockwise_attention

It takes the layout `[batch length heads head]`, fewer key/value heads than query heads, a boolean
mask, and a causal flag with bottom-right alignment. JAX computes its gradients.
"""

import jax
import jax.numpy as jnp

from conformance import CausalFlag, MaskArgument, attention_function

BLOCK = 16


@attention_function(
    "jax",
    MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True),
    causal_flag=CausalFlag("causal", alignment="bottom-right"),
    layout="batch length heads head",
    grouped=True,
    fully_masked_row="output bias",
)
def blockwise_attention(query, key, value, mask=None, causal=False, scale=None):
    """Online softmax over blocks of keys (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    batch, queries, heads, head = query.shape
    keys, kv_heads, value_head = key.shape[1], key.shape[2], value.shape[3]
    scale = head**-0.5 if scale is None else scale

    allowed = jnp.ones((1, 1, queries, keys), bool) if mask is None else mask
    if causal:
        allowed = allowed & jnp.tri(queries, keys, keys - queries, dtype=bool)
    allowed = jnp.broadcast_to(allowed, (batch, heads, queries, keys))

    # The keys are padded to whole blocks; the padding is masked.
    padding = (0, -keys % BLOCK)
    key, value = (jnp.pad(x, ((0, 0), padding, (0, 0), (0, 0))) for x in (key, value))
    allowed = jnp.pad(allowed, ((0, 0), (0, 0), (0, 0), padding))

    def per_block(array, axis):
        shape = (*array.shape[:axis], -1, BLOCK, *array.shape[axis + 1 :])
        return jnp.moveaxis(array.reshape(shape), axis, 0)

    def step(carried, block):
        peak, total, context = carried
        k, v, seen = block
        k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, k, preferred_element_type=total.dtype)
        logits = jnp.where(seen, scale * logits, -jnp.inf)
        # The maximum cancels in the answer; differentiating through it would only add rounding.
        higher = jax.lax.stop_gradient(jnp.maximum(peak, logits.max(axis=-1)))
        # The maximum of a row that has seen no key yet is -inf, and -inf - -inf would be NaN.
        finite = jnp.where(jnp.isfinite(higher), higher, 0.0)
        powers = jnp.exp(logits - finite[..., None])
        shrink = jnp.exp(peak - finite)
        added = jnp.einsum("bhqk,bkhd->bhqd", powers, v, preferred_element_type=total.dtype)
        total = shrink * total + powers.sum(axis=-1)
        return (higher, total, shrink[..., None] * context + added), None

    wide = jnp.promote_types(query.dtype, jnp.float32)
    start = (
        jnp.full((batch, heads, queries), -jnp.inf, wide),
        jnp.zeros((batch, heads, queries), wide),
        jnp.zeros((batch, heads, queries, value_head), wide),
    )
    blocks = (per_block(key, 1), per_block(value, 1), per_block(allowed, 3))
    (_, total, context), _ = jax.lax.scan(step, start, blocks)
    total = jnp.where(total > 0, total, 1.0)  # without any key: the empty sum, 0
    return jnp.swapaxes(context / total[..., None], 1, 2).astype(query.dtype)
