# flax.nnx.MultiHeadAttention, weights sown (or dropout on): is_causal=True beside a mask of one row
# for all queries, [batch 1 1 key], raises ValueError: Incompatible types for broadcasting. The mask
# is documented as broadcastable to [batch heads query key], and broadcast it is without is_causal,
# or where no weights are sown. In `dot_product_attention_weights` the triangle [query key] is
# broadcast to the mask's shape instead of the logits'. Found with flax 0.12.8, jax 0.10.2; there
# since the flag is, https://github.com/google/flax/pull/5093
import jax
import jax.numpy as jnp
from flax import nnx

attention = nnx.MultiHeadAttention(1, 2, decode=False, rngs=nnx.Rngs(0))
tokens = jax.random.normal(jax.random.key(0), (1, 3, 2))
mask = jnp.array([True, True, False]).reshape(1, 1, 1, 3)  # the last key is padding

want = float(attention(tokens, mask=mask, is_causal=True)[0, 0, 0])
try:
    got = float(attention(tokens, mask=mask, is_causal=True, sow_weights=True)[0, 0, 0])
except ValueError as error:
    print(error)
    got = float("nan")
print(f"got {got:.9g}, want {want:.9g}, apart {abs(got - want):.3g}")
assert abs(got - want) <= 1e-5, "it raises where weights are sown"
