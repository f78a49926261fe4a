"""DeepSpeed's `DistributedAttention` (Ulysses) over `scaled_dot_product_attention`.

Each rank holds a part of the sequence. One exchange gives it some of the heads for all tokens, to
which any local attention function can be applied. A second exchange returns its own tokens with all
heads.

Easy to miss in a port: masks are passed on to the local function unchanged. So each rank must pass
the rows and columns of all tokens and, if a mask has a head axis, only the rank's own heads; and
the gradient of an additive mask has to be summed over ranks. The batch axis is specified twice: by
`batch_dim_idx` in the call, and indirectly by `gather_idx`, the axis of the sequence, in the
constructor. The default of `gather_idx`, 0, means that the sequence comes first. The number of
heads need not be a multiple of the number of ranks. But heads are assigned according to the rank in
`deepspeed.utils.groups`, not the rank in the process group that is passed, and without a mesh,
every process has rank 0 there.
"""

from __future__ import annotations

from typing import Any, ClassVar

from conformance import CausalFlag, Distributed, MaskArgument, Mode, Split, Unsupported, World


def local(query: Any, key: Any, value: Any, sequence: int, **options: Any) -> Any:
    """Return the context of the heads of this rank, which attend to all tokens.

    Tensors are `[batch length heads head]` if `sequence`, the index of the axis of tokens, is 1, or
    `[length batch heads head]` if it is 0.
    """
    from torch.nn.functional import scaled_dot_product_attention

    inputs = (it.movedim((1 - sequence, sequence), (0, 2)) for it in (query, key, value))
    grouped = query.shape[2] != key.shape[2]
    context = scaled_dot_product_attention(*inputs, enable_gqa=grouped, **options)
    return context.movedim((0, 2), (1 - sequence, sequence))


def of_this_rank(mask: Any, kv_heads: int, rank: int, size: int) -> Any:
    """Return the part of a mask for this rank's heads; its gradient is summed over all ranks.

    The mask is `[batch heads query key]`; if it has one head, all of it is returned.
    """
    import torch.distributed

    def summed(gradient: Any) -> Any:
        gradient = gradient.clone()
        torch.distributed.all_reduce(gradient)
        return gradient

    mask = mask.view_as(mask)
    if mask.requires_grad:
        mask.register_hook(summed)
    if mask.shape[1] == 1:
        return mask
    heads = mask.unflatten(1, (kv_heads, -1)).tensor_split(size, 1)
    return heads[rank].flatten(1, 2)


def on_rank(
    query: Any, key: Any, value: Any, shard: Any, attn_mask: Any = None, **options: Any
) -> Any:
    """Return the context of `DistributedAttention` for the tensors of this rank.

    Tensors and context are `[batch heads length head]`. `shard.split`, "batch-first" or
    "sequence-first", decides in which order `DistributedAttention` gets the axes.
    """
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from deepspeed.utils import groups

    if not deepspeed.comm.is_initialized():
        # Otherwise, an op that sums small tensors in shared memory is compiled now, but never used.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        # As deepspeed.initialize(mesh_param=...) does.
        groups.mesh_device = deepspeed.comm.initialize_mesh_device(
            (1, shard.size), ("data_parallel", "sequence_parallel")
        )
    if attn_mask is not None:
        options["attn_mask"] = of_this_rank(attn_mask, key.shape[1], shard.rank, shard.size)
    batch, sequence = (0, 1) if shard.split == "batch-first" else (1, 0)
    group = groups.mesh_device.get_group("sequence_parallel")
    attend = DistributedAttention(local, group, scatter_idx=2, gather_idx=sequence)
    inputs = (it.movedim((0, 2), (batch, sequence)) for it in (query, key, value))
    return attend(*inputs, batch, sequence=sequence, **options).movedim((batch, sequence), (0, 2))


class DeepSpeedUlysses(Distributed):
    """The adapter for DeepSpeed's DistributedAttention, on one to four ranks.

    Lengths must be multiples of the number of ranks, and each rank needs at least one key/value
    head.
    """

    title = "deepspeed.sequence.layer.DistributedAttention"
    documentation = "https://www.deepspeed.ai/tutorials/ds-sequence/"
    packages = ("deepspeed",)
    world = World(
        sizes=(1, 2, 3, 4),
        splits=(
            Split("batch-first", queries=True, keys=True),
            Split("sequence-first", queries=True, keys=True),
        ),
    )
    on_rank = on_rank
    axes: ClassVar[dict[str, tuple[str, ...]]] = {}
    dtypes = ("float32", "bfloat16")
    native_layout = "batch length heads head"
    grouped = True
    custom_scale = True
    mask_arguments = (
        MaskArgument(
            "attn_mask",
            "batch heads query key",
            true="attends",
            number="added",
            broadcasts=True,
        ),
    )
    causal_flag = CausalFlag("is_causal", alignment="top-left", alone=True)
    fully_masked_row = "zeros"

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        size = mode["size"]
        if any(length % size for length in (query.shape[2], key.shape[2])):
            raise Unsupported(f"lengths are no multiples of {size}")
        if key.shape[1] < size:
            raise Unsupported(f"{key.shape[1]} key/value heads are fewer than {size} ranks")
        return super().attend(query, key, value, masks, mode, **options)


ADAPTERS = {"deepspeed-ulysses": "DeepSpeedUlysses"}
