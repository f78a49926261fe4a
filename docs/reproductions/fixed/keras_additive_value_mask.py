# keras.layers.AdditiveAttention: a value_mask [batch key] raises before Keras 3.12, or where there
# are as many queries as entries in the batch, blocks keys of another entry. Found with keras 3.8.0.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import numpy as np

query = keras.ops.ones((2, 2, 3))
value = keras.ops.convert_to_tensor(np.array([[[1], [3]]] * 2, "float32") * np.ones(3, "float32"))
mask = keras.ops.convert_to_tensor(np.array([[True, True], [True, False]]))
layer = keras.layers.AdditiveAttention(use_scale=False)
output = layer([query, value], mask=[None, mask])
# In the second entry all queries attend the first key alone.
want, got = 1.0, keras.ops.convert_to_numpy(output)[1, 0, 0]
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert got == want, "the mask was taken for one of queries"
