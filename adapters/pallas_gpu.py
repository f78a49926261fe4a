"""jax.experimental.pallas.ops.gpu.attention.mha: JAX's own flash attention for NVIDIA GPUs.

Easy to miss in a port: `sm_scale` is 1 unless it is given, not 1/√head. The layout is
`[batch, length, heads, head]`. There is no mask argument: `segment_ids`, one array for queries and
keys, say which tokens belong together. They express packed sequences, but not padding. A length
above the block size of 128 must be a multiple of it. The backward pass has blocks of 32, and
no such check: with 33 to 127 tokens, except 64 and 96, it reads beyond the end.

On a CPU the kernel is interpreted (`interpret=True`). On a GPU Triton compiles it, and accepts
only powers of two: most of the lengths that are interpreted here are rejected there.

Masks other than packed sequences, and biases, are not run, because there are no arguments for them.
float64 is not run either, because the kernel accumulates in float32, and a float64 product does not
fit its loop. Interpreting takes long, so half precision is interpreted only in self-attention. If
queries and keys have the same length above 128, both are padded to a multiple of 128, as users do,
with a separate segment id for the padding. Keys whose length differs from that of the queries (131
in the family `long`) cannot be padded, because the backward pass needs as many blocks of keys as of
queries.
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
    Problem,
    SegmentIds,
    Shape,
    Unsupported,
)
from conformance.adapters.segments import PADDING, SegmentTable, padded

BLOCK = 128


class PallasGpuAttention(Function):
    """The adapter for the kernel with its default block sizes: 128 forward, 32 backward."""

    title = "jax.experimental.pallas.ops.gpu.attention.mha"
    documentation = (
        "https://github.com/jax-ml/jax/blob/main/jax/experimental/pallas/ops/gpu/attention.py"
    )
    framework = "jax"
    layout = "batch length heads head"
    dtypes = ("float32", "bfloat16", "float16")
    custom_scale = True
    causal_flag = CausalFlag("causal", alignment="top-left")
    features = (SegmentIds("segment_ids"),)

    example = Example(
        imports="from jax.experimental.pallas.ops.gpu.attention import mha",
        build="",
        call="mha(query, key, value, None, sm_scale={head_size}**-0.5{masks})",
    )

    @cached_property
    def masks(self) -> SegmentTable:
        return SegmentTable((), self.causal_flag, self.features, shared=True)

    def check_shape(self, shape: Shape) -> None:
        super().check_shape(shape)
        if shape.value_head_size != shape.head_size:
            raise Unsupported("query, key and value must have the same head size")
        if shape.key_length != shape.query_length:
            for length in (shape.query_length, shape.key_length):
                if length > BLOCK and length % BLOCK:
                    raise Unsupported(f"{length} is no multiple of the block size {BLOCK}")
            if max(shape.query_length, shape.key_length) > BLOCK:
                raise Unsupported("no gradient where queries and keys have not as many blocks")

    @contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        if call.device == "cpu" and problem.dtype != "float32" and problem.shape.sharing != "self":
            raise Unsupported(f"interpreted: in {problem.dtype} self-attention only")
        yield

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.gpu.attention import mha

        length, size = query.shape[1], query.shape[-1]
        ids = masks.pop("segment_ids", None)
        missing = -length % BLOCK if length > BLOCK else 0
        if missing:
            query, key, value = (padded(array, {1: missing}) for array in (query, key, value))
            if ids is None:
                ids = jnp.zeros((len(query), length), jnp.int32)
            ids = padded(ids, {1: missing}, PADDING)
        context = mha(
            query,
            key,
            value,
            ids,
            sm_scale=options.get("scale", size**-0.5),
            interpret=jax.config.jax_default_device.platform == "cpu",
            **masks,
        )
        return context[:, :length]


ADAPTERS = {"pallas-gpu": "PallasGpuAttention"}
