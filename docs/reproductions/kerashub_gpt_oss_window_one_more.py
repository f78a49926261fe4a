# keras_hub.models.GptOssBackbone: a layer with sliding_window=4 sees five keys, its own and four
# before it. In gpt-oss (gpt_oss/torch/model.py of https://github.com/openai/gpt-oss), and in other
# models of keras_hub, it is its own and three: here the mask keeps keys j >= i - window. Found
# with keras-hub 0.32.0; nothing found upstream.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import keras_hub
import numpy as np

window = 4
keras.utils.set_random_seed(0)
model = keras_hub.models.GptOssBackbone(
    vocabulary_size=32, num_layers=2, num_query_heads=2, num_key_value_heads=2, head_dim=8,
    hidden_dim=16, intermediate_dim=16, num_experts=2, top_k=1, sliding_window=window,
)
layer = model.transformer_layers[1]  # layer 0 has no window
tokens = np.random.default_rng(0).standard_normal((1, 12, 16), "float32")
other = tokens.copy()
other[:, 0] += 1.0  # another first token
one, two = (keras.ops.convert_to_numpy(layer(x)) for x in (tokens, other))
got, want = int((np.abs(one - two).max(axis=-1) > 1e-6).sum()), window
print(f"tokens that see the first one: got {got}, want {want}, apart {got - want}")
assert got == want, "a window counts one key more"
