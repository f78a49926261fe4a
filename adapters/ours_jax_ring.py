"""Our own ring attention in JAX, `ours/jax_ring.py`, on one to four virtual devices of the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

from conformance import CausalFlag, MaskArgument, Mode, Sinks, Window
from conformance.adapters.jax_mesh import FunctionOnMesh, mesh, modes


class OursJaxRing(FunctionOnMesh):
    """The adapter for our ring attention in JAX.

    Queries and keys are divided over the devices in the order of the sequence.
    """

    title = "ring attention in JAX (ours)"
    dtypes = ("float32", "bfloat16")
    accuracy = "A"
    grouped = True
    custom_scale = True
    mask_arguments = (
        MaskArgument("mask", "batch heads query key", true="attends", number="added"),
    )
    causal_flag = CausalFlag("causal", alignment="top-left")
    features = (Window("window", none=None, alignment="top-left"), Sinks("sinks"))
    fully_masked_row = "zeros"
    modes = modes(("ring-1", "ring-2", "ring-3", "ring-4"))

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        return compiled()(query, key, value, mesh=mesh(mode["size"]), **masks, **options)


@cache
def compiled() -> Any:
    """Return the jitted `ring_attention`, cached, so that equal shapes are compiled only once."""
    import jax

    from conformance.adapters.ours.jax_ring import ring_attention

    return jax.jit(ring_attention, static_argnames=("mesh", "causal", "window", "scale"))


ADAPTERS = {"ours-jax-ring": "OursJaxRing"}
