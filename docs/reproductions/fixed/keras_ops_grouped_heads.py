# keras.ops.dot_product_attention on torch and TensorFlow: fewer key/value heads than query heads
# raise before Keras 3.15, though grouped query attention is documented. Found with keras 3.8.0 and
# torch 2.13.0, and with tensorflow-cpu 2.18.0.
import os

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras
import numpy as np

query = np.ones((1, 2, 4, 3), "float32")  # [batch length heads head]
key = np.ones((1, 2, 2, 3), "float32")
value = np.repeat(np.array([1, 3], "float32"), 6).reshape(1, 2, 2, 3)
want, got, told = 2.0, np.nan, ""  # all keys are alike: the mean of the values
try:
    output = keras.ops.dot_product_attention(query, key, value)
    got = keras.ops.convert_to_numpy(output)[0, 0, 0, 0]
except Exception as error:
    told = f"{type(error).__name__}: {str(error)[-130:]}"
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}", told)
assert got == want, "it raised"
