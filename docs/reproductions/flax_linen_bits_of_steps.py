# flax.linen.MultiHeadDotProductAttention, compiled, on a CPU: decode=True, one token at a time,
# gives other bits than the causal call on the whole text; the cache has keys for the longest text,
# so that all steps have one shape. No documentation promises more, and each answer is right to
# rounding. Found with flax 0.12.8, jax 0.10.2, Intel Xeon with AVX-512; nothing found upstream.
import flax.linen as nn
import jax
import numpy as np

tokens = np.random.default_rng(0).standard_normal((2, 64, 64), dtype=np.float32)
layer = nn.MultiHeadDotProductAttention(num_heads=4)
params = layer.init(jax.random.key(0), tokens)["params"]
causal = nn.make_causal_mask(tokens[..., 0])
whole = np.asarray(jax.jit(lambda x: layer.apply({"params": params}, x, mask=causal))(tokens))

decoding = nn.MultiHeadDotProductAttention(num_heads=4, decode=True)
cache, rows = decoding.init(jax.random.key(0), tokens)["cache"], []
step = jax.jit(lambda cache, x: decoding.apply({"params": params, **cache}, x, mutable=["cache"]))
cache = {"cache": cache}
for at in range(64):
    row, cache = step(cache, tokens[:, at : at + 1])
    rows.append(row)
steps = np.concatenate(rows, 1)
other = (steps != whole).any(-1).mean()
at = np.unravel_index(abs(steps - whole).argmax(), whole.shape)
got, want = steps[at], whole[at]
print(f"got {got:.9f}, want {want:.9f}, apart {abs(got - want):.2g}; {other:.0%} of tokens differ")
assert got == want, "a token that is decoded has other bits"
