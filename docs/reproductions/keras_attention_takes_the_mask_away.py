# keras.layers.MultiHeadAttention: a call takes the mask away that hangs on its caller's tensors, so
# the same call again, or the next layer that reads them, attends the padding. Found with keras
# 3.15.1 on TensorFlow, JAX and torch: `call` says `backend.set_keras_mask(query, None)`.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import numpy as np

# Embedding makes the mask: the last two tokens are padding.
tokens = keras.layers.Embedding(4, 3, mask_zero=True)(np.array([[1, 2, 3, 0, 0]]))
layer = keras.layers.MultiHeadAttention(2, 2)
first = layer(tokens, tokens, return_attention_scores=True)[1]
again = layer(tokens, tokens, return_attention_scores=True)[1]
# The weight of the padding.
want, got = (keras.ops.convert_to_numpy(item)[0, 0, 0, 3:].sum() for item in (first, again))
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert got == want, "the mask is gone from the tensor"
