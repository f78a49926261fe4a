# jax.nn.dot_product_attention, float16, on CPUs: compiled, it raises ValueError: The precision
# 'F16_F16_F32' is not supported by dot_general on CPU. Called eagerly it is right: there the same
# error is caught, and the product is made again without that precision ("Use the default precision
# as a fallback in these cases"). Under jax.jit the error comes when the program is lowered, and the
# `try` around the product is over by then. Since jax 0.5.1; found with jax and jaxlib 0.10.2. Known
# downstream as https://github.com/keras-team/keras-hub/pull/2354
import jax
import jax.numpy as jnp

jax.config.update("jax_platforms", "cpu")
ones = jnp.ones((1, 1, 1, 1), "float16")  # one query, one key: the answer is the value, 1

want = float(jax.nn.dot_product_attention(ones, ones, ones)[0, 0, 0, 0])
try:
    got = float(jax.jit(jax.nn.dot_product_attention)(ones, ones, ones)[0, 0, 0, 0])
except ValueError as error:
    print(error)
    got = float("nan")
print(f"got {got:.9g}, want {want:.9g}, apart {abs(got - want):.3g}")
assert got == want, "compiled it raises"
