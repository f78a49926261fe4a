# JAX's splash attention for TPUs: a fully masked query in a block that other queries need gets the
# mean of the values, but the gradient of their sum. Blocked logits are -0.7 · the largest float32,
# and the log-sum-exp of a row of them has lost the logarithm of the number of keys to rounding.
# Interpreted here. Found with jax 0.10.2; nothing found upstream.
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

jax.config.update("jax_platforms", "cpu")
length = 128
seen = np.ones((length, length), bool)
seen[5] = False

kernel = splash.make_splash_mha_single_device(
    splash.MultiHeadMask([splash.NumpyMask(seen)]),
    block_sizes=splash.BlockSizes.get_default(),
    interpret=True,
)
query, key, value = jax.random.normal(jax.random.key(0), (3, 1, length, 128))
output, pull = jax.vjp(lambda value: kernel(query, key, value), value)
assert np.allclose(output[0, 5], value[0].mean(axis=0), atol=1e-5), "it gets the mean of the values"
(gradient,) = pull(jnp.zeros_like(output).at[0, 5].set(1))
got, want = float(gradient[0, 0, 0]), 1 / length
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert abs(got - want) < 1e-3, "each of 128 values has a part of 1/128"
