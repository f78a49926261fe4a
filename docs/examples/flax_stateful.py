"""Attentions of Flax that decode with a cache, as layers that keep a state.

Flax decodes one token at a time. A whole text is computed with a causal mask, and fed to the cache
besides, so that later tokens go on from it.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from conformance import StatefulLayer

HEADS, ROOM = 4, 64


class Linen(StatefulLayer):
    """flax.linen.MultiHeadDotProductAttention with `decode=True`."""

    framework = "jax"
    width = 32
    dtypes = ("float32",)
    capacity = ROOM

    def build(self, dtype):
        """Return the compiled functions of one layer, and the cache."""
        layer = partial(nn.MultiHeadDotProductAttention, HEADS, param_dtype=jnp.dtype(dtype))
        params = layer().init(jax.random.key(0), jnp.zeros((1, ROOM, self.width)))["params"]

        @jax.jit
        def step(cache, token):
            variables = {"params": params, "cache": cache}
            output, state = layer(decode=True).apply(variables, token, mutable=["cache"])
            return output, state["cache"]

        @jax.jit
        def whole(tokens):
            mask = nn.make_causal_mask(tokens[..., 0])
            return layer().apply({"params": params}, tokens, mask=mask)

        def cache(rows):
            tokens = jnp.zeros((rows, ROOM, self.width), dtype)
            return layer(decode=True).init(jax.random.key(0), tokens)["cache"]

        return {"step": step, "whole": whole, "new": cache, "cache": None}

    def feed(self, state, tokens):
        """Return the outputs of new tokens."""
        first = state["cache"] is None
        if first:
            state["cache"] = state["new"](len(tokens))
        outputs = []
        for at in range(tokens.shape[1]):
            output, state["cache"] = state["step"](state["cache"], tokens[:, at : at + 1])
            outputs.append(output)
        return state["whole"](tokens) if first else jnp.concatenate(outputs, 1)

    def fresh(self, state):
        """Return the layer without a cache."""
        return dict(state, cache=None)

    def reset(self, state):
        """Forget all tokens."""
        state["cache"] = None


class Nnx(Linen):
    """flax.nnx.MultiHeadAttention with `decode=True`."""

    def build(self, dtype):
        """Return the same of the other class."""
        kind = jnp.dtype(dtype)
        options = {"dtype": kind, "param_dtype": kind, "decode": False}
        layer = nnx.MultiHeadAttention(HEADS, self.width, rngs=nnx.Rngs(0), **options)
        layer.init_cache((1, ROOM, self.width), kind)
        graph, params, _ = nnx.split(layer, nnx.Param, ...)

        @jax.jit
        def step(cache, token):
            layer = nnx.merge(graph, params, cache)
            return layer(token, decode=True), nnx.split(layer, nnx.Param, ...)[2]

        @jax.jit
        def whole(tokens):
            return layer(tokens, mask=nnx.make_causal_mask(tokens[..., 0]))

        def cache(rows):
            layer.init_cache((rows, ROOM, self.width), kind)
            return nnx.split(layer, nnx.Param, ...)[2]

        return {"step": step, "whole": whole, "new": cache, "cache": None}
