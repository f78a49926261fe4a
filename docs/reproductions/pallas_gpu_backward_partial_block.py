# jax.experimental.pallas.ops.gpu.attention.mha: with a length above 32 that is no multiple of 32,
# the gradients are wrong: the backward kernels work in blocks of 32 (block_q_dkv and so on), read
# the last block beyond the end, and mask nothing there. The forward pass is right. In the
# interpreter all of it is NaN; on a GPU it is whatever follows in memory. Found with jax 0.10.2
# by exploration. For the forward pass this was https://github.com/jax-ml/jax/issues/27224; since
# then the length is checked against its block, which is min(128, length).
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.attention import mha

x = jax.random.normal(jax.random.key(0), (1, 33, 1, 16))  # [batch length heads head]


def kernel(query):
    return mha(query, x, x, None, sm_scale=0.25, interpret=jax.default_backend() == "cpu").sum()


def definition(query):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, x) * 0.25)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, x).sum()


assert abs(kernel(x) - definition(x)) < 1e-3, "the forward pass"
got, want = (float(jax.grad(function)(x)[0, 0, 0, 0]) for function in (kernel, definition))
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert abs(got - want) < 1e-4, "the gradient of the query"
