# keras_hub.models.LlamaBackbone and Llama3Backbone: rope_position_scaling_factor does nothing. The
# layer of Llama computes frequencies of its own since it knows those of Llama 3.1, and does not
# divide them: https://github.com/keras-team/keras-hub/pull/2132. The generic layer does, as the
# factor was meant: https://github.com/keras-team/keras-hub/pull/1605. Found with keras-hub 0.32.0.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras
import keras_hub
import numpy as np

def answer(factor):
    """The output for the last of 12 tokens."""
    keras.utils.set_random_seed(0)
    model = keras_hub.models.LlamaBackbone(
        vocabulary_size=32, num_layers=1, num_query_heads=2, num_key_value_heads=2,
        hidden_dim=16, intermediate_dim=16, rope_position_scaling_factor=factor,
    )
    tokens = np.arange(12)[None]
    out = model({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    return keras.ops.convert_to_numpy(out)[0, -1]

got = float(np.abs(answer(4.0) - answer(1.0)).max())
print(f"moved by the factor: got {got}, want >0, apart {got}")
assert got > 0, "the factor is ignored"
