# x_transformers.x_transformers.Attention with flash=True: causal=True as an argument of the call
# does nothing (of the constructor it works, and of the call with flash=False). Query 0 is given the
# mean of two values instead of its own. Found with torch 2.13.0+cpu, x-transformers 2.31.10.
import numpy as np
import torch
from x_transformers.x_transformers import Attention

n = dict(query=[[[1], [0]]], Wq=[[[0]]], Wk=[[[0]]], Wv=[[[1]]], Wo=[[[1]]])
n = {name: np.array(numbers, float) for name, numbers in n.items()}
mask = np.array([[[[1, 0], [1, 1]]]], bool)

def attention(n):  # the definition
    q = np.einsum("bse,ehd->bhsd", n["query"], n["Wq"])
    k = np.einsum("bse,ehd->bhsd", n["query"], n["Wk"])
    v = np.einsum("bse,ehd->bhsd", n["query"], n["Wv"])
    logits = np.einsum("bhqd,bhkd->bhqk", q, k)
    logits = np.where(mask, logits, -np.inf)
    powers = np.exp(logits - logits.real.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)  # the softmax
    return np.einsum("bhqk,bhkd,hde->bqe", weights, v, n["Wo"])

want = attention(n)[0, 0, 0]

native = {
    "to_q.weight": n["Wq"].transpose(1, 2, 0).reshape(1, 1),
    "to_k.weight": n["Wk"].transpose(1, 2, 0).reshape(1, 1),
    "to_v.weight": n["Wv"].transpose(1, 2, 0).reshape(1, 1),
    "to_out.weight": n["Wo"].transpose(2, 0, 1).reshape(1, 1),
}
query = key = value = torch.tensor(n["query"], dtype=torch.float32)
layer = Attention(1, dim_context=1, dim_head=1, value_dim_head=1, heads=1, kv_heads=1, dim_out=1,
    project_out=True, flash=True)
layer = layer.to(torch.float32).train(False)
layer.load_state_dict({name: torch.tensor(a) for name, a in native.items()})
got = layer(query, return_intermediates=False, causal=True).detach().double().numpy()[0, 0, 0]
print(f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}")
assert abs(got - want) <= 9.24e-07, "more than rounding can explain"
