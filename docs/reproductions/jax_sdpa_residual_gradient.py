# jax.nn.dot_product_attention(return_residual=True) returns the log-sum-exp beside the output, but
# a loss on it has a gradient of zeros, without an error: the residual is put through stop_gradient,
# which the documentation does not say. So parts that are merged by it, for which the option was
# asked for (https://github.com/jax-ml/jax/issues/32484), train wrongly. Found with jax 0.10.2.
import jax
import jax.numpy as jnp
import numpy as np

draw = np.random.default_rng(0).standard_normal
query, key, value = (jnp.asarray(draw((1, n, 1, 8)), jnp.float32) for n in (3, 5, 5))

def returned(query):
    return jax.nn.dot_product_attention(query, key, value, return_residual=True)[1].sum()

def by_hand(query):
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5
    return jax.nn.logsumexp(logits, axis=-1).sum()

assert abs(returned(query) - by_hand(query)) < 1e-5
got, want = (float(abs(jax.grad(loss)(query)).max()) for loss in (returned, by_hand))
print(f"largest gradient: got {got:.5f}, want {want:.5f}, apart {abs(got - want):.5f}")
assert abs(got - want) < 1e-5, "the gradient of the residual is lost"
