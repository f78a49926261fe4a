# keras.layers.MultiHeadAttention (TensorFlow): with as many tokens as heads, of size 1, the biases
# of the projections are added along the tokens instead of the heads, because keras.ops.add takes a
# bias [heads 1] for one in the channels-first layout. Found with tensorflow-cpu 2.21.0, keras
# 3.15.1, in float32, float64 and float16.
import numpy as np
import os; os.environ["KERAS_BACKEND"] = "tensorflow"
import keras
import tensorflow as tf

n = dict(
    query=[[[1], [0]]], Wq=[[[0], [0]]], Wk=[[[0], [1]]], Wv=[[[0], [1]]], Wo=[[[0]], [[1]]],
    bq=[[1], [0]], bk=[[0], [0]], bv=[[0], [0]], bo=[0],
)
n = {name: np.array(numbers, float) for name, numbers in n.items()}

def attention(n):  # the definition
    q = np.einsum("bse,ehd->bhsd", n["query"], n["Wq"]) + n["bq"][:, None]
    k = np.einsum("bse,ehd->bhsd", n["query"], n["Wk"]) + n["bk"][:, None]
    v = np.einsum("bse,ehd->bhsd", n["query"], n["Wv"]) + n["bv"][:, None]
    logits = np.einsum("bhqd,bhkd->bhqk", q, k)
    powers = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)  # the softmax
    return np.einsum("bhqk,bhkd,hde->bqe", weights, v, n["Wo"]) + n["bo"]

want = attention(n)[0, 0, 0]

native = {
    "query/kernel": n["Wq"], "query/bias": n["bq"], "key/kernel": n["Wk"], "key/bias": n["bk"],
    "value/kernel": n["Wv"], "value/bias": n["bv"], "attention_output/kernel": n["Wo"],
    "attention_output/bias": n["bo"],
}
query = key = value = tf.constant(n["query"], "float32")
layer = keras.layers.MultiHeadAttention(2, 1, value_dim=1, output_shape=1, use_bias=True,
    dtype="float32")
layer.build((1, 2, 1), (1, 2, 1), (1, 2, 1))
for v in layer.weights: v.assign(native[v.path.split("/", 1)[1]])
got = layer(query, value, key, return_attention_scores=True,
    training=False)[0].numpy().astype(float)[0, 0, 0]
print(f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}")
assert abs(got - want) <= 5.18e-07, "more than rounding can explain"
