# flax.nnx.MultiHeadAttention, float64: unless weights are sown, the layer calls
# jax.nn.dot_product_attention, whose softmax is computed in float32. The output has half of its
# digits. Found with jax 0.10.2, jaxlib 0.10.2, flax 0.12.8.
import numpy as np
from flax import nnx
import jax, jax.numpy as jnp
jax.config.update("jax_enable_x64", True)

n = dict(query=[[[1]]], key=[[[1], [0]]], Wq=[[[1]]], Wk=[[[1]]], Wv=[[[1]]], Wo=[[[1]]])
n = {name: np.array(numbers, float) for name, numbers in n.items()}

def attention(n):  # the definition
    q = np.einsum("bse,ehd->bhsd", n["query"], n["Wq"])
    k = np.einsum("bse,ehd->bhsd", n["key"], n["Wk"])
    v = np.einsum("bse,ehd->bhsd", n["key"], n["Wv"])
    logits = np.einsum("bhqd,bhkd->bhqk", q, k)
    powers = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)  # the softmax
    return np.einsum("bhqk,bhkd,hde->bqe", weights, v, n["Wo"])

want = attention(n)[0, 0, 0]

native = {
    "query/kernel": n["Wq"], "key/kernel": n["Wk"], "value/kernel": n["Wv"], "out/kernel": n["Wo"],
}
native, query, key = jax.tree.map(lambda a: jnp.asarray(a, "float64"), (native, n["query"],
    n["key"]))
graph, _ = nnx.split(nnx.MultiHeadAttention(1, 1, qkv_features=1, out_features=1, in_kv_features=1,
    num_kv_heads=1, use_bias=False, dtype="float64", param_dtype="float64", decode=False,
    keep_rngs=False, deterministic=True, rngs=nnx.Rngs(0)))
def run(native, query, key):
    value = key
    leaves = [(tuple(k.split('/')), nnx.Param(a)) for k, a in native.items()]
    layer = nnx.merge(graph, nnx.from_flat_state(leaves))
    return layer(query, key, value, sow_weights=False)
got = np.array(jax.jit(run)(native, query, key)).astype(float)[0, 0, 0]
print(f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}")
assert abs(got - want) <= 1.8e-15, "more than rounding can explain"
