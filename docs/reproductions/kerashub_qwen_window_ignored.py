# keras_hub.models.QwenBackbone, Qwen3Backbone and Qwen3MoeBackbone: the sliding window is ignored
# on JAX and torch, where a fused attention is available: its mask is added only on the other path.
# The same was corrected for Gemma: https://github.com/keras-team/keras-hub/issues/2186. Found with
# keras-hub 0.32.0, keras 3.15.1, torch 2.13.0, jax 0.10.2; not found upstream for Qwen.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(0)
model = keras_hub.models.Qwen3Backbone(
    vocabulary_size=32, num_layers=1, num_query_heads=2, num_key_value_heads=2, head_dim=8,
    hidden_dim=16, intermediate_dim=16, sliding_window_size=4,
)

def answer(tokens):
    """The output for the last token."""
    whole = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return keras.ops.convert_to_numpy(model.predict_on_batch(whole))[0, -1]

tokens = np.arange(1, 13)[None]
other = np.where(tokens == 1, 30, tokens)  # another first token, 11 before the last one
got, want = float(np.abs(answer(other) - answer(tokens)).max()), 0.0
print(f"moved by a token beyond the window: got {got:.5f}, want {want}, apart {got:.5f}")
assert got < 1e-6, "a token beyond the window is seen"
