# equinox.nn.RotaryPositionalEmbedding: theta is that of the first one of this size and dtype that
# was called in the process, whatever others say. Tables are kept by (embedding_size, dtype), so a
# model with two bases, as Gemma 3 has for layers with and without a window, rotates all of them by
# one. Found with equinox 0.13.8, jax 0.10.2; nothing found upstream.
import equinox
import jax.numpy as jnp

def rotated(theta):
    """The second token of ones, of which the second pair turns by 1/sqrt(theta)."""
    return equinox.nn.RotaryPositionalEmbedding(4, theta=theta)(jnp.ones((2, 4)))[1, 1].item()

rotated(10000.0)
got, angle = rotated(4.0), 4.0**-0.5
want = (jnp.cos(angle) - jnp.sin(angle)).item()
print(f"got {got:.5f}, want {want:.5f}, apart {abs(got - want):.5f}")
assert abs(got - want) < 1e-5, "the base is that of another embedding"
