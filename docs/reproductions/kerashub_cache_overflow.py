# keras_hub.layers.CachedMultiHeadAttention: new tokens that do not fit behind cache_update_index
# are written further to the front, over tokens that are there already, instead of raising. The
# update is keras.ops.slice_update, which moves such a start on TensorFlow and JAX. Found with
# keras-hub 0.32.0 and keras 3.15.1 on TensorFlow; nothing found upstream.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import keras_hub

layer = keras_hub.layers.CachedMultiHeadAttention(num_heads=1, key_dim=2)
cache = keras.ops.zeros((1, 2, 3, 1, 2))  # [batch, key and value, length, heads, head]
tokens = keras.ops.ones((1, 2, 2))
_, full = layer(tokens, tokens, cache=cache, cache_update_index=0)
try:
    # One place is left, for two tokens.
    _, after = layer(tokens * 5, tokens * 5, cache=full, cache_update_index=2)
except Exception as error:
    print(f"raises {type(error).__name__}, as it should")
else:
    want, got = (keras.ops.convert_to_numpy(x)[0, 0, 1, 0, 0] for x in (full, after))
    print(f"the second token's key: got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
    assert got == want, "the second token was overwritten"
