"""`scaled_dot_product_attention` on DTensors, across processes: tensor-parallel and Ulysses.

In tensor parallelism, each rank has some of the heads. In Ulysses, each rank has a part of the
sequence; `redistribute` exchanges it for some of the heads before attention, and back afterwards.
On a CPU, DTensor has no rule for the backward pass of the fused kernel, and none for `is_causal`
with the kernel `MATH`. Therefore `MATH` is used, and causal masks are passed as arrays.
"""

from __future__ import annotations

from typing import Any, ClassVar

from conformance import Distributed, MaskArgument, Mode, Split, Unsupported, World


def on_rank(
    query: Any, key: Any, value: Any, shard: Any, attn_mask: Any = None, **more: Any
) -> Any:
    """Compute attention on DTensors made from this rank's tensors.

    If there is only one rank, compute it on the tensors themselves.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    attend = sdpa_kernel(SDPBackend.MATH)(scaled_dot_product_attention)
    if shard.size == 1:
        return attend(query, key, value, attn_mask, **more)
    mesh = init_device_mesh("cpu", (shard.size,))
    given = Shard(1 if shard.split == "heads" else 2)

    def by_heads(local: Any) -> Any:
        return DTensor.from_local(local, mesh, [given]).redistribute(mesh, [Shard(1)])

    mask = None if attn_mask is None else by_heads(attn_mask)
    context = attend(*map(by_heads, (query, key, value)), mask, **more)
    return context.redistribute(mesh, [given]).to_local()


class TorchDTensor(Distributed):
    """The adapter for SDPA on DTensors, which divide the heads, or the queries and keys.

    In Ulysses, the numbers of heads, queries and keys must be divisible by the number of ranks.
    """

    title = "scaled_dot_product_attention on DTensors"
    documentation = "https://docs.pytorch.org/docs/stable/distributed.tensor.html"
    world = World(
        sizes=(1, 2, 3),
        splits=(Split("heads", heads=True), Split("ulysses", queries=True, keys=True)),
    )
    on_rank = on_rank
    axes: ClassVar[dict[str, tuple[str, ...]]] = {"attn_mask": Distributed.axes["mask"]}
    dtypes = ("float32", "bfloat16")
    custom_scale = True
    mask_arguments = (
        MaskArgument("attn_mask", "batch heads query key", true="attends", number="added"),
    )
    fully_masked_row = "zeros"

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        size, sizes = mode["size"], (*query.shape[1:3], *key.shape[1:3])
        if mode["split"].queries and any(number % size for number in sizes):
            raise Unsupported(f"lengths and heads are no multiples of {size}")
        return super().attend(query, key, value, masks, mode, **options)


ADAPTERS = {"torch-dtensor": "TorchDTensor"}
