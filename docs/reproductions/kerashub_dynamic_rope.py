# keras_hub.layers.RotaryEmbedding(rope_type="dynamic") divides every frequency by
# scaling_factor^(d/(d-2)), whatever the length. NTK scaling multiplies the base by it, so that the
# first pair keeps its frequency and the last one is divided by the factor; the dynamic form does so
# only beyond the original length. Found with keras-hub 0.32.0; nothing found upstream.
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
import keras_hub
import numpy as np

size, factor = 64, 4.0
layer = keras_hub.layers.RotaryEmbedding(
    rope_type="dynamic", scaling_factor=factor, original_max_position_embeddings=4096
)
pair = np.zeros((1, 2, size), "float32")  # [batch length components], two tokens of 4096
pair[:, :, 0] = 1.0  # the first pair turns by 1 from one token to the next, scaled or not
want = np.cos(1.0)
got = float(layer(pair)[0, 1, 0])
print(f"got {got:.5f}, want {want:.5f}, apart {abs(got - want):.5f}")
assert abs(got - want) < 1e-5, "the first frequency is divided"
