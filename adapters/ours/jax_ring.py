"""Ring attention in JAX: every device has some queries and some keys; the keys travel.

You may copy this module. What a port gets wrong, in the order of the code: the maximum and the sum
of weights must be merged along with the values; the maximum is a constant to the derivative, since
it cancels out; what is causal or in a window depends on positions in the whole sequence; a sink
belongs to the softmax of a query once, not once per hop; a row without keys divides by 1, not by 0;
arrays are padded to a multiple of the number of devices, and no query may see that padding.

The derivative is JAX's own: that of `ppermute` is the way back, so gradients of keys and values
come home by themselves, and that of what all devices share is summed over them. Keys travel in
float32, or in float64 if they are, because those gradients are summed on their way. Logits are
computed again in the backward pass, but each device keeps the keys that came by; only a backward
pass of its own, as in `ring.py`, needs no memory for them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    Heads = Float[Array, "batch heads length head"]
    Mask = Bool[Array, "batch heads query all_keys"] | Float[Array, "batch heads query all_keys"]


class State(NamedTuple):
    """The softmax of each query over the keys that it has seen so far."""

    highest: Float[Array, "batch kv_heads group query"]
    total: Float[Array, "batch kv_heads group query"]
    values: Float[Array, "batch kv_heads group query head"]


def merge(
    state: State,
    logits: Float[Array, "batch kv_heads group query key"],
    value: Float[Array, "batch kv_heads key head"],
) -> State:
    """Return the state after another block of keys."""
    highest = jnp.maximum(state.highest, logits.max(-1, initial=-jnp.inf))
    highest = jax.lax.stop_gradient(highest)
    finite = jnp.where(highest == -jnp.inf, 0, highest)
    powers = jnp.exp(logits - finite[..., None])
    shrinks = jnp.exp(state.highest - finite)
    weighted = jnp.einsum("bhgqk,bhkd->bhgqd", powers, value)
    return State(
        highest,
        state.total * shrinks + powers.sum(-1),
        state.values * shrinks[..., None] + weighted,
    )


def on_device(
    query: Float[Array, "batch heads query head"],
    key: Float[Array, "batch kv_heads key head"],
    value: Float[Array, "batch kv_heads key value_head"],
    mask: Mask | None,
    sinks: Float[Array, " heads"] | None,
    *,
    axis: str,
    keys: int,
    causal: bool,
    window: tuple[int | None, int | None],
    scale: float,
) -> Float[Array, "batch heads query value_head"]:
    """Attend with the queries of this device to the keys of all; call it under `jax.shard_map`.

    All devices have equally many queries, and equally many keys, of which in the whole only the
    first `keys` are real. Of the mask, this device has the rows of its queries.
    """
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    (batch, heads, queries, _), (_, kv_heads, block, width) = query.shape, value.shape
    before, after = (math.inf if side is None else side for side in window)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, -1)

    # Without it, the weights of all blocks are kept for the backward pass.
    @jax.checkpoint
    def attend(state: State, key: Array, value: Array, source: Array) -> State:
        """Merge the keys that were those of the device `source` in the beginning."""
        place = source * block + jnp.arange(block)
        ahead = place - (rank * queries + jnp.arange(queries))[:, None]
        seen = (place < keys) & (ahead >= -before) & (ahead <= after)
        if causal:
            seen &= ahead <= 0
        logits = jnp.einsum("bhgqd,bhkd->bhgqk", grouped, key) * scale
        if mask is not None:
            part = jax.lax.dynamic_slice_in_dim(mask, source * block, block, axis=3)
            part = part.reshape(logits.shape)
            if part.dtype == bool:
                seen &= part
            else:
                logits += part
        return merge(state, jnp.where(seen, logits, -jnp.inf), value)

    def hop(carry: tuple[State, Array, Array], number: Array) -> tuple[tuple, None]:
        """Receive the keys of the device before, which has passed on its own or another's."""
        state, *travelling = carry
        to_next = [(one, (one + 1) % size) for one in range(size)]
        key, value = jax.lax.ppermute(travelling, axis, to_next)
        return (attend(state, key, value, (rank - number) % size), key, value), None

    nothing = jnp.zeros(grouped.shape[:-1], query.dtype)
    state = State(nothing - jnp.inf, nothing, jnp.zeros((*nothing.shape, width), query.dtype))
    state = attend(state, key, value, rank)
    (state, _, _), _ = jax.lax.scan(hop, (state, key, value), jnp.arange(1, size))
    if sinks is not None:
        # A sink is one more key, whose value is zero.
        logits = jnp.broadcast_to(sinks.reshape(kv_heads, -1, 1, 1), (*nothing.shape, 1))
        state = merge(state, logits, jnp.zeros((batch, kv_heads, 1, width), query.dtype))
    context = state.values / jnp.where(state.total == 0, 1, state.total)[..., None]
    return context.reshape(batch, heads, queries, width)


def ring_attention(
    query: Float[Array, "batch heads query head"],
    key: Float[Array, "batch kv_heads key head"],
    value: Float[Array, "batch kv_heads key value_head"],
    *,
    mesh: Mesh,
    mask: Mask | None = None,
    sinks: Float[Array, " heads"] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
) -> Float[Array, "batch heads query value_head"]:
    """Attend on a ring of devices; under `jax.jit`, each holds its parts only.

    Args:
        query, key, value: whole arrays, of any length; key and value may have fewer heads.
        mesh: the devices, on one axis. Device r of n gets part r of n of queries and of keys.
        mask: boolean, True where a query may attend, or numbers that are added; no axis is 1.
        sinks: logits that take part in the sum of weights only.
        causal: whether keys behind the place of a query are hidden, counted from the first of both.
        window: how many keys before and behind that place are visible; None for all.
        scale: the factor of logits; by default 1/√head size.

    Returns:
        The context, in the dtype of the query; zeros where all is masked.
    """
    (axis,) = mesh.axis_names
    wide = jnp.promote_types(query.dtype, jnp.float32)
    lengths = query.shape[2], key.shape[2]
    padding_q, padding_k = ((0, -length % mesh.size) for length in lengths)
    padding = {
        "query": ((0, 0), (0, 0), padding_q, (0, 0)),
        "key": ((0, 0), (0, 0), padding_k, (0, 0)),
        "mask": ((0, 0), (0, 0), padding_q, padding_k),
        "sinks": ((0, 0),),
    }

    def prepared(array: Array | None, name: str) -> Array | None:
        if array is None:
            return None
        return jnp.pad(array if array.dtype == bool else array.astype(wide), padding[name])

    parts = P(None, None, axis, None)
    attend = partial(
        on_device,
        axis=axis,
        keys=lengths[1],
        causal=causal,
        window=window,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
    )
    run = jax.shard_map(
        attend, mesh=mesh, in_specs=(parts, parts, parts, parts, P()), out_specs=parts
    )
    context = run(
        prepared(query, "query"),
        prepared(key, "key"),
        prepared(value, "key"),
        prepared(mask, "mask"),
        prepared(sinks, "sinks"),
    )
    return context[:, :, : lengths[0]].astype(query.dtype)
