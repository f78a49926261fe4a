# torch.nn.attention.flex_attention.flex_attention: a call, also one that is not compiled, leaves
# TORCHINDUCTOR_CACHE_DIR in the environment, for whatever this process starts later. To ask for the
# folder is to set it: cache_dir in torch/_inductor/runtime/cache_dir_utils.py. Found with torch
# 2.13.0.
import os
import numpy as np
import torch
from torch.nn.attention.flex_attention import flex_attention

os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
before = dict(os.environ)
x = torch.tensor(np.ones((1, 1, 2, 4), "float32"))
flex_attention(x, x, x)
changed = [name for name, value in os.environ.items() if before.get(name) != value]
print(f"variables set: got {len(changed)}, want 0, apart {len(changed)}")
print(*changed)
assert not changed, "the environment is another after the call"
