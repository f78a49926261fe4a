# x_transformers.x_transformers.Attention, causal=True with more queries than keys: with flash=False
# the triangle is aligned bottom-right, with flash=True top-left. Of 5 queries and 3 keys the last
# stand side by side, so query 3 may see keys 0 and 1; with flash=True it sees key 2 as well.
# Found with torch 2.13.0+cpu, x-transformers 2.31.10.
import numpy as np
import torch
from x_transformers.x_transformers import Attention

query, key = torch.zeros(1, 5, 3), torch.eye(3)[None]  # all logits are 0, values are unit vectors

def weights(flash):
    layer = Attention(3, dim_head=3, heads=1, causal=True, project_out=True, flash=flash).eval()
    for projection in (layer.to_q, layer.to_k, layer.to_v, layer.to_out):
        torch.nn.init.eye_(projection.weight)
    return layer(query, context=key).detach().double().numpy()[0]

got, want = weights(flash=True), weights(flash=False)
with np.printoptions(formatter={"bool": "{:d}".format}):
    print(f"who sees which key\nflash=True:\n{got > 0}\nflash=False:\n{want > 0}")
got, want = got[3, 2], want[3, 2]
print(f"got {got:.3g}, want {want:.3g}, apart {abs(got - want):.3g}")
assert got == want, "query 3 of 5 sees key 2 of 3 with flash=True"
