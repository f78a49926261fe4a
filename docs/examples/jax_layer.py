"""A JAX layer whose parameters are a nested dictionary, and the adapter that declares it.

    mha-conformance run docs/examples/jax_layer.py:SelfAttention

It declares that query, key and value lie side by side for each head, and that True in the mask
*blocks*. Parameters are arguments of the call, so `bind` nests them as the library expects them.
"""

import jax
import jax.numpy as jnp

from conformance import Layer, MaskArgument, Parameter, Unsupported


def attention(params, x, blocked=None):
    """The user's code. `x` `[batch length width]`, `blocked` `[batch query key]`."""
    projected = jnp.einsum("ble,ehpd->pbhld", x, params["in"]["w"])
    query, key, value = projected + params["in"]["b"][:, None, :, None]
    logits = jnp.einsum("bhqd,bhkd->bhqk", query * query.shape[-1] ** -0.5, key)
    if blocked is not None:
        logits = jnp.where(blocked[:, None], -jnp.inf, logits)
    context = jnp.einsum("bhqk,bhkd->bqhd", jax.nn.softmax(logits), value)
    return jnp.einsum("bqhd,hde->bqe", context, params["out"]["w"]) + params["out"]["b"]


class SelfAttention(Layer):
    """The adapter: everything that a caller has to know about the function above, as data."""

    title = "attention"
    framework = "jax"
    mask_arguments = (MaskArgument("blocked", "batch query key", true="blocks"),)
    parameters = (
        Parameter("in/w", "query key value", "embed heads head -> embed heads 1 head", stack=2),
        Parameter("in/b", "query_bias key_bias value_bias", "heads head -> 1 heads head", stack=0),
        Parameter("out/w", "output", "heads head embed -> heads head embed"),
        Parameter("out/b", "output_bias", "embed -> embed"),
    )

    def check_shape(self, shape):
        """Refuse shapes that it cannot have."""
        if shape.sharing != "self":
            raise Unsupported("self-attention only")
        if shape.kv_heads != shape.heads:
            raise Unsupported("no fewer key/value heads than query heads")
        if not shape.bias:
            raise Unsupported("projections always have a bias")

    def build(self, shape, dtype, scale, mode):
        """Return nothing, because the layer consists of its parameters."""
        return None

    def bind(self, layer, parameters):
        """Nest the parameters as the library expects them."""
        return {
            place: {name: parameters[f"{place}/{name}"] for name in ("w", "b")}
            for place in ("in", "out")
        }

    def call(self, layer, query, key, value, masks, mode):
        """Call the function; `layer` is what `bind` returned."""
        return attention(layer, query, **masks)
