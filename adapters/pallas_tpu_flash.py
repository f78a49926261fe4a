"""jax.experimental.pallas.ops.tpu.flash_attention: JAX's flash attention for TPUs, interpreted.

Easy to miss in a port: `sm_scale` is 1 unless it is given. The bias `ab` is added *before* the
multiplication by `sm_scale`, and must have its full shape, `[batch, heads, query, key]`. Segment
ids are integers, and a query attends to the keys with the same id: if the ids of all queries are 1,
those of the keys are a padding mask. Lengths must be multiples of 128, so users have to pad.

Lengths are padded here as users do: with zeros, and with a separate segment id for the padding. A
fully masked query attends to padding and tokens equally, or only to the padding if all its biases
are −∞.

No TPU is needed: the kernel runs in Pallas' interpreter, which does not show that TPUs round
products of float32 to bfloat16 unless `jax.default_matmul_precision` is set otherwise. Pallas'
simulation of a TPU, which is twenty times slower, gives the same results. float64 and float16 are
not run, because Pallas does not support them on TPUs. bfloat16 is run only in self-attention,
because interpreting it is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from conformance import (
    Call,
    CausalFlag,
    Example,
    Function,
    MaskArgument,
    Problem,
    SegmentIds,
    Shape,
    Unsupported,
)
from conformance.adapters.segments import PADDING, UNSEEN, SegmentTable, padded

BLOCK = 128
# The other argument named segment_ids.kv is for padding only.
SEGMENTS = SegmentIds("segment_ids.q", "segment_ids.kv of segments")


class PallasTpuFlash(Function):
    """The adapter for the kernel with its default block sizes, which are 128."""

    title = "jax.experimental.pallas.ops.tpu.flash_attention"
    documentation = (
        "https://github.com/jax-ml/jax/blob/main/jax/experimental/pallas/ops/tpu/flash_attention.py"
    )
    framework = "jax"
    dtypes = ("float32", "bfloat16")
    custom_scale = True
    mask_arguments = (
        # The ids of all queries are 1.
        MaskArgument("segment_ids.kv", "batch key", true="attends", number="attends, 0 or 1 only"),
        MaskArgument("ab", "batch heads query key", number="added"),
    )
    causal_flag = CausalFlag("causal", alignment="top-left")
    features = (SEGMENTS,)

    example = Example(
        imports="from jax.experimental.pallas.ops.tpu.flash_attention import "
        "SegmentIds, flash_attention",
        build="",
        call="flash_attention(query, key, value, sm_scale={head_size}**-0.5{masks})",
    )

    @cached_property
    def masks(self) -> SegmentTable:
        return SegmentTable(self.mask_arguments, self.causal_flag, self.features)

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        if shape.value_head_size != shape.head_size:
            raise Unsupported("V model dimension unequal to KV model dimension unsupported")

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.dtype == "bfloat16" and problem.shape.sharing != "self":
            raise Unsupported("interpreted: in bfloat16 self-attention only")

    @contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        # The context must include the derivative, which is another kernel.
        from jax.experimental.pallas import tpu

        # True means `pallas_call(..., interpret=True)`; InterpretParams would simulate a TPU.
        with tpu.force_tpu_interpret_mode(True):
            yield

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention

        batch, _, length, size = query.shape
        queries, keys = -length % BLOCK, -key.shape[2] % BLOCK
        of_query = masks.pop("segment_ids.q", jnp.ones((batch, length), jnp.int32))
        of_key = masks.pop("segment_ids.kv", jnp.ones((batch, key.shape[2]), jnp.int32))
        if of_key.dtype == bool:
            of_key = of_key.astype(jnp.int32)
        if SEGMENTS.key in masks:
            of_key = jnp.where(of_key == 1, masks.pop(SEGMENTS.key), UNSEEN)
        bias = masks.pop("ab", None)
        context = flash_attention(
            padded(query, {2: queries}),
            padded(key, {2: keys}),
            padded(value, {2: keys}),
            None if bias is None else padded(bias, {2: queries, 3: keys}),
            SegmentIds(padded(of_query, {1: queries}, PADDING), padded(of_key, {1: keys}, PADDING)),
            sm_scale=options.get("scale", size**-0.5),
            **masks,
        )
        return context[:, :, :length]


ADAPTERS = {"pallas-tpu-flash": "PallasTpuFlash"}
