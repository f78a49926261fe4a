# keras.layers.MultiHeadAttention: the argument query_mask does nothing. Found with keras 3.15.1 on
# TensorFlow, JAX and torch: `call` begins with `query_mask = backend.get_keras_mask(query)`.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import numpy as np

query = keras.ops.convert_to_tensor(np.ones((1, 2, 3), "float32"))
value = keras.ops.convert_to_tensor(np.arange(12, dtype="float32").reshape(1, 4, 3))
mask = keras.ops.convert_to_tensor(np.array([[True, False]]))  # the second query attends nothing
layer = keras.layers.MultiHeadAttention(2, 2)
got = layer(query, value, query_mask=mask, return_attention_scores=True)[1]
# The same as an attention_mask.
rows = keras.ops.broadcast_to(mask[:, :, None], (1, 2, 4))
want = layer(query, value, attention_mask=rows, return_attention_scores=True)[1]
# The sum of the second query's weights.
got, want = (keras.ops.convert_to_numpy(item)[0, 0, 1].sum() for item in (got, want))
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert got == want, "query_mask was overwritten"
