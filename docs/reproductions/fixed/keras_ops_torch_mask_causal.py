# keras.ops.dot_product_attention on torch: beside a mask, is_causal does nothing before Keras 3.15.
# Found with keras 3.8.0 and torch 2.13.0: "Explicit set `is_causal` to `False` when `mask` is not
# `None`", it says there.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

query = key = np.ones((1, 2, 1, 3), "float32")  # [batch length heads head]
value = np.repeat(np.array([1, 3], "float32"), 3).reshape(1, 2, 1, 3)
mask = np.ones((1, 1, 2, 2), bool)  # blocks nothing
output = keras.ops.dot_product_attention(query, key, value, mask=mask, is_causal=True)
want, got = 1.0, keras.ops.convert_to_numpy(output)[0, 0, 0, 0]  # the first key is all it sees
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert got == want, "it attends the future"
