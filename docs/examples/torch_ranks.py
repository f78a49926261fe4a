"""Attention on several processes: each has a part of the sequence, and gathers all keys and values.

    mha-conformance run docs/examples/torch_ranks.py:Gathering

The suite starts the processes (ranks) and keeps them, gives each its part of query, key, value and
mask, and joins their results and gradients. Worlds of two and three ranks have to agree with one.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import pad, scaled_dot_product_attention

from conformance import Distributed, MaskArgument, Split, World


class Gather(torch.autograd.Function):
    """The tensors of all ranks, `[rank ...]`, which have the same shape."""

    @staticmethod
    def forward(context, tensor):
        """Gather them; shapes must be equal."""
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(context, gradient):
        """Sum what every rank has for the tensor of this one; all take part in all sums."""
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient[dist.get_rank()]


def gathered(tensor, shard):
    """The keys or values of all ranks, in the order of the sequence."""
    longest = max(map(len, shard.keys))
    parts = Gather.apply(pad(tensor, (0, 0, 0, longest - tensor.shape[2])))
    pairs = zip(parts, shard.keys, strict=True)
    whole = torch.cat([part[:, :, : len(keys)] for part, keys in pairs], 2)
    return whole[:, :, torch.from_numpy(np.argsort(np.concatenate(shard.keys)))]


def on_rank(query, key, value, shard, mask=None, scale=None):
    """What every rank calls with its own tokens; a mask has a column for each key of the whole."""
    key, value = gathered(key, shard), gathered(value, shard)
    return scaled_dot_product_attention(query, key, value, mask, scale=scale)


class Gathering(Distributed):
    """Queries and keys are divided; in zig-zag order, a rank has an early and a late part."""

    world = World(
        sizes=(1, 2, 3),
        splits=(
            Split("parts", queries=True, keys=True),
            Split("zigzag", queries=True, keys=True, zigzag=True),
        ),
    )
    on_rank = on_rank
    custom_scale = True
    mask_arguments = (
        MaskArgument("mask", "batch heads query key", true="attends", number="added"),
    )
