"""Our own ring attention, `ours/ring.py`, on one to four ranks, each of which is a process."""

from __future__ import annotations

from typing import Any

from conformance import CausalFlag, Distributed, MaskArgument, Sinks, Split, Window, World


def on_rank(*tensors: Any, **others: Any) -> Any:
    """Return the result of `ring_attention` for the tensors of one rank; every rank calls this."""
    from conformance.adapters.ours.ring import ring_attention

    return ring_attention(*tensors, **others)


class OursRing(Distributed):
    """The adapter for our ring attention in PyTorch.

    Queries and keys are divided among ranks, in the order of the sequence or in zig-zag order.
    """

    title = "ring attention (ours)"
    world = World(
        sizes=(1, 2, 3, 4),
        splits=(
            Split("ring", queries=True, keys=True),
            Split("zigzag", queries=True, keys=True, zigzag=True),
        ),
    )
    on_rank = staticmethod(on_rank)
    dtypes = ("float32", "bfloat16")
    accuracy = "A"
    grouped = True
    custom_scale = True
    mask_arguments = (
        MaskArgument("mask", "batch heads query key", true="attends", number="added"),
    )
    causal_flag = CausalFlag("causal", alignment="top-left")
    features = (Window("window", alignment="top-left"), Sinks("sinks"))
    fully_masked_row = "zeros"


ADAPTERS = {"ours-ring": "OursRing"}
