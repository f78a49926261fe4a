# JAX's splash attention for TPUs: a fully masked query is NaN if all queries of its block of 128
# are fully masked, and the mean of the values if a query of its block sees a key. Blocks without a
# key are skipped, so the sum of exponentials stays 0, and 0 · (1 / 0) is returned. With sinks both
# are 0. Interpreted here. Found with jax 0.10.2; nothing found upstream for JAX, but models work
# around it: https://github.com/AI-Hypercomputer/maxtext/pull/4924
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

jax.config.update("jax_platforms", "cpu")
length, block = 256, 128
seen = np.ones((length, block), bool)
seen[block - 1 :] = False  # the last query of the first block, and all of the second

kernel = splash.make_splash_mha_single_device(
    splash.MultiHeadMask([splash.NumpyMask(seen)]), interpret=True
)
query, key = jnp.ones((1, length, 8)), jnp.ones((1, block, 8))  # [heads length head]
answers = np.asarray(kernel(query, key, key))[0, :, 0]
want, got = answers[block - 1], answers[block]  # neither sees a key
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert got == want, "fully masked queries differ by the block that they are in"
