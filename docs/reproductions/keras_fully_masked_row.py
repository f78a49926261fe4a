# keras.layers.MultiHeadAttention: a query that may attend nothing gets the output bias if attention
# scores are asked for, and a mean of the values if not. Found with keras 3.15.1 and tensorflow
# 2.21.0; torch does the same, and jax does not.
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np

keras.utils.set_random_seed(1)
layer = keras.layers.MultiHeadAttention(2, 4)
x = np.random.default_rng(0).normal(size=(1, 3, 8)).astype("float32")
visible = np.ones((1, 3, 3), bool)
visible[0, 1] = False
with_scores, _ = layer(x, x, attention_mask=visible, return_attention_scores=True)
without = layer(x, x, attention_mask=visible)
got, want = (float(np.abs(np.asarray(output)[0, 1]).max()) for output in (without, with_scores))
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert abs(got - want) <= 1e-3, "another output if scores are asked for"
