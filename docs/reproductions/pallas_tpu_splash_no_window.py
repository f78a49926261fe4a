# JAX's splash attention for TPUs: LocalMask with (None, None) raises, though None stands for no
# limit on its side ("None identifies no limit for the given side"). Without a limit the function of
# the mask returns an array of ones that it made itself, which a kernel cannot contain: ValueError:
# The kernel function [...] captures constants. One limit, or FullMask, is right. Interpreted here;
# the error comes before anything is compiled. Found with jax 0.10.2; nothing found upstream.
import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

jax.config.update("jax_platforms", "cpu")
length = 128
heads = jnp.ones((1, length, 8))  # [heads length head]; equal values: the answer is 1


def answer(mask):
    kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([mask]), interpret=True)
    return float(kernel(heads, heads, heads)[0, 0, 0])


want = answer(splash.FullMask((length, length)))
try:
    got = answer(splash.LocalMask((length, length), (None, None), 0))
except ValueError as error:
    print(error)
    got = float("nan")
print(f"got {got}, want {want}, apart {abs(got - want)}")
assert got == want, "no limit on either side raises"
