# flax 0.8.5 asks for jax>=0.4.27 without an upper bound, so pip installs both; but every module of
# flax.linen raises, because jax 0.4.36 took away what flax read of its tracers. Found with flax
# 0.8.5 and jax 0.10.2; flax 0.10.2 has it mended.
import flax.linen as nn
import jax
import jax.numpy as jnp

want, got, told = 2.0, float("nan"), ""
layer = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)
inputs = jnp.ones((1, 2))
try:
    parameters = layer.init(jax.random.key(0), inputs)
    got = float(jax.jit(layer.apply)(parameters, inputs)[0, 0])
except AttributeError as error:
    told = f"AttributeError: {error}"
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}", told)
assert got == want, "it raised"
