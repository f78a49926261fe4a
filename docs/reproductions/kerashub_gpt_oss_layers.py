# keras_hub.models.GptOssBackbone: layers 1, 3, 5, ... have the window, and layers 0, 2, 4, ... see
# all tokens. In gpt-oss it is the other way round (layer_idx % 2 == 0 in gpt_oss/torch/model.py of
# https://github.com/openai/gpt-oss, and layer_types in transformers), so a model that is converted
# answers otherwise beyond the window. Found with keras-hub 0.32.0; nothing found upstream.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import keras_hub
import numpy as np

keras.utils.set_random_seed(0)
model = keras_hub.models.GptOssBackbone(
    vocabulary_size=32, num_layers=1, num_query_heads=2, num_key_value_heads=2, head_dim=8,
    hidden_dim=16, intermediate_dim=16, num_experts=2, top_k=1, sliding_window=4,
)

def answer(tokens):
    """The output for the last token."""
    whole = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
    return keras.ops.convert_to_numpy(model.predict_on_batch(whole))[0, -1]

tokens = np.arange(1, 13)[None]
other = np.where(tokens == 1, 30, tokens)  # another first token, 11 before the last one
got = float(np.abs(answer(other) - answer(tokens)).max())
print(f"moved by a token beyond the window: got {got:.6f}, want 0, apart {got:.6f}")
assert got < 1e-6, "the first layer has no window"
