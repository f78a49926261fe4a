# keras.layers.MultiHeadAttention on JAX: heads of the value of another size than those of the key
# raise, unless the scores are asked for. Found with keras 3.15.1 and jax 0.10.2: the layer passes
# them on to jax.nn.dot_product_attention, which refuses them, although value_dim is documented.
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np

tokens = np.ones((1, 2, 3), "float32")  # all are alike: every attention is the mean of the values
layer = keras.layers.MultiHeadAttention(1, key_dim=3, value_dim=4)
want, _ = layer(tokens, tokens, return_attention_scores=True)
want, got, told = float(want[0, 0, 0]), np.nan, ""
try:
    got = float(layer(tokens, tokens)[0, 0, 0])
except Exception as error:
    told = f"{type(error).__name__}: {' '.join(str(error).split())[:130]}"
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}", told)
assert abs(got - want) < 1e-6, "it raised"
