# Keras on torch: in the scope of keras.device("cpu:0"), which names the only CPU, no layer with
# dropout can be made; with "cpu" it can. The seed of the dropout is a parameter without gradient;
# torch takes "cpu" and "cpu:0" for two devices, so Keras moves it, and the copy is no parameter.
# Found with keras 3.15.1 and torch 2.13.0; nothing found upstream.
import os

os.environ["KERAS_BACKEND"] = "torch"
import keras

inputs, made = keras.ops.ones((1, 2, 4)), 0
for device in ("cpu", "cpu:0"):
    with keras.device(device):
        try:
            keras.layers.MultiHeadAttention(num_heads=1, key_dim=4, dropout=0.5)(inputs, inputs)
            made += 1
        except RuntimeError as error:
            print(f'keras.device("{device}"): {type(error).__name__}: {error}')
print(f"layers made: got {made}, want 2, apart {2 - made}")
assert made == 2, "a layer could not be made"
