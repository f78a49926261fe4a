# keras.layers.MultiHeadAttention (TensorFlow), float64: the factor 1/√d of the logits is rounded to
# float32, so the output has half of its digits. Found with tensorflow-cpu 2.21.0, keras 3.15.1.
import numpy as np
import os; os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import tensorflow as tf

n = dict(query=[[[1]]], key=[[[1], [0]]], Wq=[[[0, 1]]], Wk=[[[0, 1]]], Wv=[[[1]]], Wo=[[[1]]])
n = {name: np.array(numbers, float) for name, numbers in n.items()}

def attention(n):  # the definition
    q = np.einsum("bse,ehd->bhsd", n["query"], n["Wq"])
    k = np.einsum("bse,ehd->bhsd", n["key"], n["Wk"])
    v = np.einsum("bse,ehd->bhsd", n["key"], n["Wv"])
    logits = np.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(2)
    powers = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)  # the softmax
    return np.einsum("bhqk,bhkd,hde->bqe", weights, v, n["Wo"])

want = attention(n)[0, 0, 0]

native = {
    "query/kernel": n["Wq"], "key/kernel": n["Wk"], "value/kernel": n["Wv"],
    "attention_output/kernel": n["Wo"],
}
query = tf.constant(n["query"], "float64")
key = value = tf.constant(n["key"], "float64")
layer = keras.layers.MultiHeadAttention(1, 2, value_dim=1, output_shape=1, use_bias=False,
    dtype="float64")
layer.build((1, 1, 1), (1, 2, 1), (1, 2, 1))
for v in layer.weights: v.assign(native[v.path.split("/", 1)[1]])
got = layer(query, value, key, return_attention_scores=True,
    training=False)[0].numpy().astype(float)[0, 0, 0]
print(f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}")
assert abs(got - want) <= 1.44e-15, "more than rounding can explain"
