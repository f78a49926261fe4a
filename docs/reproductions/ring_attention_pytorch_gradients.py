# ring_flash_attn with ring_reduce_col=True, which RingAttention calls without CUDA: on several
# ranks, the gradient of the keys is the sum of those of keys and values, and that of the values is
# such a sum of another rank. The backward pass takes the pair (received, sent), which ring_pass
# returns, for (dk, dv), and autograd sums over the axis that is too many. Found with
# ring-attention-pytorch 0.5.20.
import os
import subprocess
import sys
import tempfile

if "RING" not in os.environ:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "RING": f"file://{folder}/ring?rank={rank}&world_size=2"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        print(*(rank.communicate()[0] for rank in ranks), sep="")
    assert not any(rank.returncode for rank in ranks), "the gradients are others"
    sys.exit()

import torch
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from torch.nn.functional import scaled_dot_product_attention

torch.distributed.init_process_group("gloo", init_method=os.environ["RING"])
torch.manual_seed(0)
whole = [torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3)]
output = scaled_dot_product_attention(*(it.transpose(1, 2) for it in whole))
wants = torch.autograd.grad(output.sum(), whole[1:])
parts = [it.chunk(2, 1)[torch.distributed.get_rank()] for it in whole]
gots = torch.autograd.grad(ring_flash_attn(*parts, ring_reduce_col=True).sum(), parts[1:])
wants = [want.chunk(2, 1)[torch.distributed.get_rank()] for want in wants]
apart = max(float((got - want).abs().max()) for got, want in zip(gots, wants))
print(f"got {float(gots[0].norm()):.6g}, want {float(wants[0].norm()):.6g}, apart {apart:.2g}")
sys.exit(apart > 1e-5)
