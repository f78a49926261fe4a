"""jax.nn.dot_product_attention on arrays that are divided over devices by XLA's partitioner.

Easy to miss in a port: a sharding specifies where an array lies, never what is computed, so the
result is that of one device up to rounding, and XLA transfers whatever a device lacks. If heads are
divided (tensor parallelism), nothing needs to be transferred. If queries are divided, each device
has all keys. If keys are divided, the maximum, the sum and the weighted values are combined over
devices. The mask and the bias are divided along the same axis as the inputs, unless that axis has
size 1. The size of a divided axis must be a multiple of the number of devices: JAX does not pad.

Everything else is as on one device; see `jax_sdpa.py`.
"""

from __future__ import annotations

from typing import Any

from conformance import Mode, Unsupported
from conformance.adapters.jax_mesh import FunctionOnMesh, mesh, modes
from conformance.adapters.jax_sdpa import DotProductAttention

AXES = {
    "query": ("batch", "queries", "heads", "head"),
    "key": ("batch", "keys", "heads", "head"),
    "value": ("batch", "keys", "heads", "head"),
    "mask": ("batch", "heads", "queries", "keys"),
    "bias": ("batch", "heads", "queries", "keys"),
}
"""For each argument that may be divided among devices, the names of its axes.

The other arrays, which hold lengths, are whole on every device.
"""


class ShardedAttention(FunctionOnMesh, DotProductAttention):
    """The adapter for jax.nn.dot_product_attention with heads, queries or keys divided."""

    title = "jax.nn.dot_product_attention on divided arrays"
    documentation = "https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html"
    dtypes = ("float32", "bfloat16")
    log_sum_exp = None
    example = None
    modes = modes(
        ("heads-1", "heads-2", "heads-3", "heads-4", "queries-2", "queries-3", "keys-2", "keys-3")
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        attend, divided, size = super().attend, mode["divided"], mode["size"]
        arrays = {"query": query, "key": key, "value": value}
        arrays |= {name: mask for name, mask in masks.items() if self.bridge.is_array(mask)}
        others = {name: mask for name, mask in masks.items() if name not in arrays}
        devices = mesh(size)

        def divided_as(name: str) -> NamedSharding:
            axes = zip(AXES.get(name, ()), arrays[name].shape, strict=False)
            places = [
                "devices" if kind == divided and (length > 1 or name not in masks) else None
                for kind, length in axes
            ]
            for place, length in zip(places, arrays[name].shape, strict=False):
                if place and length % size:
                    raise Unsupported(f"{length} {divided} are no multiple of {size}")
            return NamedSharding(devices, PartitionSpec(*places))

        shardings = {name: divided_as(name) for name in arrays}

        def attention(arrays: dict[str, Any]) -> Any:
            arrays = jax.lax.with_sharding_constraint(arrays, shardings)
            query, key, value = (arrays[name] for name in ("query", "key", "value"))
            rest = {name: arrays[name] for name in masks if name in arrays}
            context = attend(query, key, value, rest | others, mode, **options)
            # As `out_shardings`, it would bind the cotangent too, which may lie otherwise.
            return jax.lax.with_sharding_constraint(context, shardings["query"])

        return jax.jit(attention)(arrays)


ADAPTERS = {"jax-sharded": "ShardedAttention"}
