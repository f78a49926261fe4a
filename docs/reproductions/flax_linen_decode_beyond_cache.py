# flax.linen.MultiHeadDotProductAttention(decode=True): a token beyond the length with which the
# cache was made is written over the last one, because `dynamic_update_slice` clamps its start, and
# nothing is raised. It gets another output than in the whole text, with one key too few. Found with
# flax 0.12.8, jax 0.10.2; nothing found upstream.
import flax.linen as nn
import jax
import numpy as np

tokens = np.random.default_rng(0).standard_normal((1, 9, 16), dtype=np.float32)
layer = nn.MultiHeadDotProductAttention(num_heads=2)
params = layer.init(jax.random.key(0), tokens)["params"]
causal = nn.make_causal_mask(tokens[..., 0])
whole = np.asarray(layer.apply({"params": params}, tokens, mask=causal))

decoding = nn.MultiHeadDotProductAttention(num_heads=2, decode=True)
cache = decoding.init(jax.random.key(0), tokens[:, :8])["cache"]  # room for eight tokens
for at in range(9):
    variables = {"params": params, "cache": cache}
    output, state = decoding.apply(variables, tokens[:, at : at + 1], mutable=["cache"])
    cache = state["cache"]
    got, want = output[0, 0, 0].item(), whole[0, at, 0].item()
    print(f"token {at}: got {got:.6f}, want {want:.6f}, apart {abs(got - want):.2g}")
assert abs(got - want) < 1e-5, "a token beyond the cache is neither refused nor right"
