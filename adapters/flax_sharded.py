"""flax.linen.MultiHeadDotProductAttention with its heads divided among devices: tensor-parallel.

Easy to miss in a port: the kernels of query, key and value are `[embed heads head]`, but that of
the output is `[heads head embed]`, so its first axis is divided, not its second. The biases of
query, key and value are divided by heads as well. The bias of the output is not, because it is
added once, to the sum over all devices. Only parameters and arguments are placed; XLA's partitioner
places the results.
"""

from __future__ import annotations

from dataclasses import replace

from conformance import Example, Mode, Shape
from conformance.adapters.flax_linen import FlaxLinen
from conformance.adapters.jax_mesh import AXES, PARAMETER, STARTED, LayerOnMesh, mesh_modes

DIVIDED: dict[str, tuple[str | None, ...]] = {
    "query/kernel": (None, "heads"),
    "query/bias": ("heads",),
    "key/kernel": (None, "heads"),
    "key/bias": ("heads",),
    "value/kernel": (None, "heads"),
    "value/bias": ("heads",),
    "out/kernel": ("heads",),
    "out/bias": (),
}
"""For each parameter, the mesh axes that divide its first axes; None for an undivided axis.

Further axes of the parameter are not divided.
"""


class FlaxSharded(LayerOnMesh, FlaxLinen):
    """The adapter for flax.linen.MultiHeadDotProductAttention with its parameters on a mesh."""

    title = "flax.linen.MultiHeadDotProductAttention on a mesh"
    modes = mesh_modes({"sow": True})

    def divided(self, name: str) -> tuple[str | None, ...] | None:
        if name.startswith(PARAMETER):
            return DIVIDED[name.removeprefix(PARAMETER)]
        return super().divided(name)

    def example_for(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Example:
        example = super().example_for(shape, dtype, scale, mode)
        sizes = mode["mesh"]
        return replace(
            example,
            imports=(
                *STARTED,
                "from jax.sharding import Mesh, NamedSharding, PartitionSpec as P",
                str(example.imports),
            ),
            build=(
                str(example.build),
                f"devices = np.array(jax.devices()[:{sizes[0] * sizes[1]}]).reshape({sizes})",
                f"mesh = Mesh(devices, {AXES})",
                "put = lambda a, *axes: "
                "jax.lax.with_sharding_constraint(a, NamedSharding(mesh, P(*axes)))",
                f"axes = {DIVIDED}",
            ),
            load=(
                "native = {k: put(a, *axes[k]) for k, a in native.items()}",
                'query, key, value = (put(a, "batch") for a in (query, key, value))',
                str(example.load),
            ),
        )


ADAPTERS = {"flax-sharded": "FlaxSharded"}
