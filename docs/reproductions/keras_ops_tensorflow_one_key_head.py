# keras.ops.dot_product_attention on TensorFlow: one key/value head for several query heads raises,
# which is documented to be multi-query attention ("a special case of GQA"). Found with keras 3.15.1
# and tensorflow-cpu 2.21.0: heads are repeated if there are more than one, and tf.einsum does not
# broadcast the one.
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import numpy as np

query = np.ones((1, 2, 4, 3), "float32")  # [batch length heads head]
key = np.ones((1, 2, 1, 3), "float32")
value = np.array([1, 1, 1, 3, 3, 3], "float32").reshape(1, 2, 1, 3)
want, got, told = 2.0, np.nan, ""  # all keys are alike: the mean of the values
try:
    output = keras.ops.dot_product_attention(query, key, value)
    got = keras.ops.convert_to_numpy(output)[0, 0, 0, 0]
except Exception as error:
    told = f"{type(error).__name__}: {str(error)[-130:]}"
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}", told)
assert got == want, "it raised"
