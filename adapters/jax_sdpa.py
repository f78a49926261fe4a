"""jax.nn.dot_product_attention, written out for XLA, and as cuDNN's kernel.

What a port gets wrong: heads come after the length, `[batch length heads head]`, unlike torch's. A
mask is boolean, True attends; numbers are refused there and go into `bias`. The causal flag is
aligned top-left where lengths differ. What is blocked gets a large finite logit, so that a query
that may attend nothing gets the mean of all values, not zeros as from torch. The softmax is in
float32, whatever the dtype. Values have the size of keys.

It came by degrees: fewer key/value heads and `key_value_seq_lengths` in JAX 0.4.33. That argument
is a count for each batch entry, so it spells only masks that let the first keys through. Not
examined are `query_seq_lengths`, which empties the rows of padded queries, and `local_window_size`.

cuDNN's kernel is for GPUs, half precision and some sizes; on a CPU it is unavailable.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from conformance import (
    CausalFlag,
    Example,
    Function,
    MaskArgument,
    Mode,
    Problem,
    Shape,
    Unavailable,
    Unsupported,
)
from conformance.adapter import MaskTable, Spelling, since
from conformance.adapters.lengths import LengthTable


class _WithLengths(LengthTable):
    """The mask arguments, and in second place lengths, so that they are among those examined."""

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        masks = MaskTable.spellings(self, problem)
        yield from itertools.islice(masks, 1)
        yield from self._counted(problem)
        yield from masks


class DotProductAttention(Function):
    """jax.nn.dot_product_attention(implementation="xla"), which is also the default."""

    title = "jax.nn.dot_product_attention"
    documentation = "https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html"
    framework = "jax"
    layout = "batch length heads head"
    custom_scale = True
    fully_masked_row = "mean of values"
    example = Example(
        imports="import jax, jax.numpy as jnp",
        build="split = lambda x: x.reshape(*x.shape[:-1], {heads}, -1)",
        call="jax.nn.dot_product_attention("
        "split(query), split(key), split(value){masks}).reshape(query.shape)",
    )

    mask_arguments = (
        MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True),
        MaskArgument("bias", "batch heads query key", number="added", broadcasts=True),
    )
    causal_flag = CausalFlag("is_causal", alignment="top-left")
    modes = (
        Mode("xla", about='implementation="xla", and the default: written out in operations'),
        Mode(
            "optimised",
            every_case=False,
            dtypes=("float32",),
            optimised=True,
            about="as xla, with XLA's optimisations on; the others are compiled quickly",
        ),
    )
    implementation: ClassVar[str] = "xla"

    def __init__(self) -> None:
        self.grouped = since("jax", "0.4.33")

    @cached_property
    def masks(self) -> MaskTable:
        if not since("jax", "0.4.33"):
            return super().masks
        return _WithLengths(
            tuple(self.mask_arguments), self.causal_flag, lengths="key_value_seq_lengths"
        )

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        if shape.value_head_size != shape.head_size:
            raise Unsupported("no value head size of its own")

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import jax

        return jax.nn.dot_product_attention(
            query, key, value, **masks, **options, implementation=self.implementation
        )


class CudnnAttention(DotProductAttention):
    """jax.nn.dot_product_attention(implementation="cudnn"), without gradients.

    With them lengths must be even, and in no family of the suite are they where heads fit the
    kernel. What it says of a query that may attend nothing, and of causal masks where lengths
    differ, is not declared. Masks may not have one row for all queries.
    """

    title = "jax.nn.dot_product_attention (cuDNN)"
    dtypes = ("bfloat16", "float16")
    fully_masked_row = None
    mask_arguments = tuple(
        replace(argument, broadcasts=False) for argument in DotProductAttention.mask_arguments
    )
    causal_flag = CausalFlag("is_causal")
    modes = (Mode("cudnn", gradients=False, about='implementation="cudnn": one kernel, for GPUs'),)
    implementation = "cudnn"

    def check_device(self, device: str) -> None:
        if device == "cpu":
            raise Unavailable("cuDNN's kernel is for GPUs only; run it with --device gpu")
        super().check_device(device)

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        try:
            return super().attend(query, key, value, masks, **options)
        except NotImplementedError as error:
            # As documented: "supports only a subset of shapes/dtypes", and this is how it says so.
            raise Unsupported(str(error)) from error


ADAPTERS = {"jax-sdpa": "DotProductAttention"}
