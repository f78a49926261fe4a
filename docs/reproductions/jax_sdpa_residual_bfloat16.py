# jax.nn.dot_product_attention(return_residual=True) rounds the log-sum-exp to the dtype of the
# keys, although it is computed in float32. In bfloat16, numbers from 64 on are half apart, so parts
# that are merged by it get wrong shares, and the output is far off. The option was asked for in
# order to merge: https://github.com/jax-ml/jax/issues/32484. Found with jax 0.10.2.
import jax
import jax.numpy as jnp
import numpy as np

draw = np.random.default_rng(0).standard_normal
query, key, value = (jnp.asarray(draw((1, n, 1, 64)), jnp.bfloat16) for n in (64, 128, 128))
query = 8 * query + 4  # logits of some tens
key = key + jnp.asarray(2.0, jnp.bfloat16)

def part(at):
    return jax.nn.dot_product_attention(query, key[:, at], value[:, at], return_residual=True)

(one, first), (two, second) = part(slice(0, 64)), part(slice(64, 128))
share = jax.nn.sigmoid(first.astype(jnp.float32) - second.astype(jnp.float32))[..., None]
merged = np.asarray(share * one + (1 - share) * two, np.float32)
want = np.asarray(part(slice(0, 128))[0], np.float32)
error = np.abs(merged - want)
at = np.unravel_index(error.argmax(), error.shape)
print(f"got {merged[at]:.4f}, want {want[at]:.4f}, apart {error[at]:.4f}")
assert error.max() < 2**-5, "the log-sum-exp is too coarse to merge by"
