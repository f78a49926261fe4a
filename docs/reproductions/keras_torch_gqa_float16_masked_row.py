# keras.layers.GroupQueryAttention (torch), float16: a query that may attend nothing attends as if
# nothing were masked; in float32 it attends all keys alike. Found with keras 3.15.1 and torch
# 2.13.0: -45856 is added to every logit, and as all are blocked, the softmax takes it away again.
# keras.ops.dot_product_attention does the same.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

numbers = np.random.default_rng(0).normal(size=(1, 4, 3))
blocked = keras.ops.zeros((1, 4, 4), "bool")
told = {}
for dtype in ("float32", "float16"):
    layer = keras.layers.GroupQueryAttention(3, 2, 2, dtype=dtype)
    inputs = keras.ops.convert_to_tensor(numbers.astype(dtype))
    keras.utils.set_random_seed(1)
    layer.build(inputs.shape, inputs.shape, inputs.shape)
    output = keras.ops.convert_to_numpy(layer(inputs, inputs, attention_mask=blocked))
    told[dtype] = np.abs(output - output[:, :1]).max().astype(float)
# How far the outputs of the queries lie apart.
got, want = told["float16"], told["float32"]
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert got <= 1e-3, "the mask was ignored"
