# jax.experimental.pallas.ops.gpu.attention.mha, causal, with more queries than keys: it reads keys
# beyond the last one. The loop over blocks of keys ends at the block of the query's own position,
# `lax.div(block_q * (start_q + 1) + block_k - 1, block_k)`, and not at the last block of keys, so
# with 4 queries and 2 keys there are two blocks of keys, of which one exists. Interpreted, what is
# read there is NaN; on a GPU it is whatever lies behind the keys. Found with jax 0.10.2, jaxlib
# 0.10.2. The mask is top-left: query i sees keys 0 to i, so the last two queries see both keys.
import math

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu.attention import mha

random = np.random.default_rng(0)
query = random.standard_normal((4, 1))
key, value = random.standard_normal((2, 2, 1))

logits = query @ key.T
logits[np.triu_indices(4, 1, 2)] = -math.inf
powers = np.exp(logits)
want = (powers / powers.sum(axis=1, keepdims=True) @ value)[:, 0]

arrays = (jnp.asarray(array, "float32")[None, :, None] for array in (query, key, value))
got = np.array(mha(*arrays, None, causal=True, interpret=True), float)[0, :, 0, 0]
print(f"got {got}, want {want}")
assert np.allclose(got, want, atol=1e-5), "more than rounding can explain"
