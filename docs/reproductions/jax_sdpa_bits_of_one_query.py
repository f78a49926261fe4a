# jax.nn.dot_product_attention, compiled, on a CPU gives a query beside its keys other bits than the
# same query among all; in float32, so it does for 2, 5, 8 and 32 queries. With 64 queries, bits do
# not depend on the size of the batch; with one query beside 145 keys, they do, in float32. No
# documentation promises more, and each answer is right to rounding.
# Found with jax 0.10.2, jaxlib 0.10.2, AMD EPYC with AVX-512, also in bfloat16.
import jax
import numpy as np

random = np.random.default_rng(0)
query, key, value = random.standard_normal((3, 4, 64, 4, 64), dtype=np.float32)
attention = jax.jit(jax.nn.dot_product_attention)
whole = np.asarray(attention(query, key, value))
alone = [np.asarray(attention(query[:, [t]], key, value)) for t in range(64)]
steps = np.concatenate(alone, axis=1)
other = (steps != whole).any(axis=-1).mean()
at = abs(steps - whole).argmax()
got, want = steps.flat[at], whole.flat[at]
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of rows differ")
assert got == want, "a query that is computed alone has other bits"
