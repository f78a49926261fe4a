# haiku.MultiHeadAttention in float16: a query that may attend nothing makes the gradients of the
# query, key and value projections NaN, even if the loss does not use that query. Blocked logits
# become -1e30, which float16 turns into -inf, so the softmax is 0/0. In float32 and bfloat16 the
# query gets the mean of the values, and all gradients are finite. Found with dm-haiku 0.0.17 on
# jax 0.10.2; nothing found upstream. Flax had the same:
# https://github.com/google/flax/issues/982.
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np


def attend(tokens, mask):
    return hk.MultiHeadAttention(1, 2, w_init=hk.initializers.Constant(0.5))(*[tokens] * 3, mask)


layer = hk.without_apply_rng(hk.transform(attend))
tokens = jnp.asarray(np.arange(6).reshape(1, 3, 2) / 6, "float16")
mask = np.ones((1, 1, 3, 3), bool)
mask[0, 0, 0] = False  # such as a query that is padding
parameters = jax.tree.map(lambda x: x.astype("float16"), layer.init(None, tokens, mask))


def loss(parameters):
    return layer.apply(parameters, tokens, mask)[:, 1:].sum()  # without the first query


gradients = jax.grad(loss)(parameters)
got = sum(int(np.isnan(own["w"]).sum()) for own in gradients.values())
print(f"NaN in gradients of weights: got {got}, want 0, apart {got}")
assert got == 0, "a query that is not used makes gradients NaN"
