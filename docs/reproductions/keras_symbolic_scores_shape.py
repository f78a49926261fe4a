# keras.layers.MultiHeadAttention: a symbolic call has scores [query, query], not [query, key].
# Found with keras 3.15.1: `compute_output_spec` takes the length of the query for both.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import numpy as np

query, value = keras.Input((2, 8)), keras.Input((5, 8))
layer = keras.layers.MultiHeadAttention(3, 4)
_, symbolic = layer(query, value, return_attention_scores=True)
arrays = (np.ones((1, length, 8), "float32") for length in (2, 5))
_, scores = layer(*arrays, return_attention_scores=True)
# What follows in a model, such as a Dense layer, is built for the symbolic shape.
got, want = symbolic.shape[-1], scores.shape[-1]
print(f"got {got}, want {want}, apart {want - got}")
assert got == want, "the symbolic shape is not that of the scores"
