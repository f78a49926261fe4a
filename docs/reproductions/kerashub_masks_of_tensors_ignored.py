# keras_hub.layers.CachedMultiHeadAttention ignores the mask attached to its inputs, as by
# Embedding(mask_zero=True): queries attend to padding. keras.layers.MultiHeadAttention, which it is
# derived from, reads the mask. There is no warning, because supports_masking is inherited. Found
# with keras-hub 0.32.0 and keras 3.15.1; of this layer nothing found upstream. That of
# TransformerEncoder is https://github.com/keras-team/keras-hub/issues/2220.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import keras_hub
import numpy as np

tokens = np.array([[1, 2, 0, 0]])  # 0 is padding
embedded = keras.layers.Embedding(3, 4, mask_zero=True)(tokens)


def weight_of_padding(kind):
    layer = kind(num_heads=1, key_dim=4)
    _, weights = layer(embedded, embedded, return_attention_scores=True)
    return float(keras.ops.convert_to_numpy(weights)[0, 0, 0, 2:].sum())


got = weight_of_padding(keras_hub.layers.CachedMultiHeadAttention)
want = weight_of_padding(keras.layers.MultiHeadAttention)
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert got == want, "the mask of the embedding is ignored"
