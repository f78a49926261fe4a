# jax.nn.dot_product_attention between projections, bfloat16 on a CPU: with one key, the gradients do
# not compile ("Dot with multiple contracting dimensions is not implemented"). Found with jax 0.6.0.
import jax
import jax.numpy as jnp

bf16 = {"dtype": "bfloat16"}
query, key = jnp.ones((3, 5, 8), **bf16), jnp.ones((3, 1, 8), **bf16)
weights = [jnp.ones((8, 2, 4), **bf16)] * 3

def attention(query, key, weights):
    inputs = (query, key, key)
    heads = (jnp.einsum("bqe,ehd->bqhd", x, w) for x, w in zip(inputs, weights))
    return jax.nn.dot_product_attention(*heads)

def gradients(*arguments):
    output, pull = jax.vjp(attention, *arguments)
    return pull(jnp.ones_like(output))

want, got, told = 0.0, float("nan"), ""  # of one key the weight is 1, whatever the query
try:
    got = float(abs(jax.jit(gradients)(query, key, weights)[0]).max())
except Exception as error:
    told = f"{type(error).__name__}: {error}"
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}", told)
assert got == want, "it raised"
