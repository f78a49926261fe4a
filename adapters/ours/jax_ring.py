"""Ring attention in JAX: every device keeps its queries, and keys and values travel in a ring.

You may copy this module. Easy to miss in a port, in the order of the code: the maximum and the sum
of weights must be merged along with the values; the maximum is a constant to the derivative, since
it cancels out; whether a key is visible under causality or a window depends on positions in the
whole sequence; a sink belongs to the softmax of a query once, not once per hop; a row without keys
is divided by 1, not by 0; arrays are padded to a multiple of the number of devices, and no query
may see that padding.

JAX derives the backward pass. The derivative of `ppermute` sends in the opposite direction, so
gradients of keys and values return to their devices without further code, and gradients of what all
devices share are summed over the devices. Keys and values travel in float32, or in float64 if that
is the query's dtype, because their gradients are summed on the way. Logits are recomputed in the
backward pass, but each device keeps all keys and values that it has received. Only a backward pass
that is written by hand, as in `ring.py`, needs no memory for them.
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
    """The maximum logit, sum of weights and weighted sum of values of each query, so far."""

    highest: Float[Array, "batch kv_heads group query"]
    total: Float[Array, "batch kv_heads group query"]
    values: Float[Array, "batch kv_heads group query head"]


def merge(
    state: State,
    logits: Float[Array, "batch kv_heads group query key"],
    value: Float[Array, "batch kv_heads key head"],
) -> State:
    """Return the state updated by the logits and values of another block of keys."""
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
    """Return the context of this device's queries over all keys; call under `jax.shard_map`.

    All devices have the same number of queries, and the same number of keys. In the whole sequence,
    only the first `keys` keys are real; the others are padding. `mask` contains only the rows of
    this device's queries. `axis` is the name of the mesh's axis. `causal`, `window` and `scale` are
    as in `ring_attention`, but `scale` has no default.
    """
    size, rank = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
    (batch, heads, queries, _), (_, kv_heads, block, width) = query.shape, value.shape
    before, after = (math.inf if side is None else side for side in window)
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, queries, -1)

    # Without `checkpoint`, the weights of all blocks are kept for the backward pass.
    @jax.checkpoint
    def attend(state: State, key: Array, value: Array, source: Array) -> State:
        """Return the state updated by the keys that the device `source` had at the beginning."""
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
        """Receive the block of keys that the previous device has just used, and attend to it."""
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
    """Compute attention on a ring of devices, among which queries and keys are divided.

    Args:
        query, key, value: whole arrays, of any length; key and value may have fewer heads.
        mesh: the devices, on one axis. Device r of n gets part r of n of queries and of keys.
        mask: boolean, True where a query may attend, or numbers that are added; every axis
            has its full size.
        sinks: one logit per head, whose exponential is only added to the sum of weights.
        causal: whether keys after a query are hidden; positions of both count from 0 (top-left).
        window: how many keys before and after a query's position are visible; None for no limit.
        scale: the factor of logits; by default 1/√head size.

    Returns:
        The context, in the dtype of the query; zeros for fully masked queries.
    """
    (axis,) = mesh.axis_names
    wide = jnp.promote_types(query.dtype, jnp.float32)
    lengths = query.shape[2], key.shape[2]
    whole = (*query.shape[:3], key.shape[2])
    if mask is not None and mask.shape != whole:
        raise ValueError(f"mask has shape {mask.shape}, not {whole}")
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
