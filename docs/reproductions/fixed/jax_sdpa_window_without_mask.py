# jax.nn.dot_product_attention: local_window_size does nothing unless there is a mask, is_causal or
# lengths too, before JAX 0.8.2. Found with jax and jaxlib 0.4.38; known upstream as
# https://github.com/jax-ml/jax/issues/32300
import jax
import jax.numpy as jnp

zeros = jnp.zeros((1, 3, 1, 1))  # [batch length heads head]
value = jnp.array([1.0, 3.0, 8.0]).reshape(1, 3, 1, 1)
want = 1.0  # the first query sees its own key only

got = float(jax.nn.dot_product_attention(zeros, zeros, value, local_window_size=(0, 0))[0, 0, 0, 0])
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert abs(got - want) < 1e-6, "the window has no effect"
