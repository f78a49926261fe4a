"""JAX's splash attention for TPUs, interpreted: flash attention that skips fully masked blocks.

Easy to miss in a port: logits are not scaled; the query must be multiplied by 1/√head beforehand. A
kernel is made for one mask and has no batch axis, so it is mapped over the batch with the same mask
for all entries. Padding is expressed by segment ids, which are integers: a query attends to the
keys with the same id. "Causal" is a mask too, aligned top-left unless it has an offset. There is no
bias. A window is `LocalMask`, (keys before, keys after) the query's position, also aligned
top-left; None means no limit on a side, but with None on both sides the kernel raises. Chunks are
`ChunkedCausalMask`, which is causal too: blocks of positions from the first key on, as in Llama 4.

With `save_residuals=True` the kernel also returns the log-sum-exp `[heads query]`, natural, with
the sink in it, and cannot be differentiated.

`attn_logits_soft_cap` is applied before the mask; None means no cap, and 0 makes all logits equal.
Sinks are base-e logits, one for each query head, neither scaled nor capped; their gradient is a
sum of products in the inputs' dtype. With sinks, a fully masked query gets zeros. Without sinks, it
gets NaN if its whole block of 128 queries is fully masked, because such blocks are skipped.

A mask may also be a JAX array, which may differ between batch entries, but not under `jax.jit`:
there the kernel's flag for a dynamic mask is a tracer, whose value cannot be tested
(`TracerBoolConversionError`). Therefore the mode "dynamic" is not compiled.

Lengths must be multiples of 128, and are padded here as users do: with zeros, and with a separate
segment id for the padding. A fully masked query attends to padding and tokens equally.

No TPU is needed: the kernel runs in Pallas' interpreter, which does not show that TPUs round
products of float32 to bfloat16 unless `jax.default_matmul_precision` is set otherwise. float64 and
float16 are not run, because Pallas does not support them on TPUs. bfloat16 and dynamic masks are
run only in self-attention, because interpreting them is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import and_
from typing import Any

import numpy as np

from conformance import (
    Call,
    CausalFlag,
    Chunk,
    Example,
    Function,
    LogSumExp,
    MaskArgument,
    Mode,
    Problem,
    SegmentIds,
    Shape,
    Sinks,
    SoftCap,
    Unsupported,
    Window,
)
from conformance.adapter import Natives, Spelling
from conformance.adapters.segments import PADDING, UNSEEN, SegmentTable, padded

BLOCK = 128


IDS = MaskArgument("segment_ids.kv", "batch key", true="attends", number="attends, 0 or 1 only")
FLAG = CausalFlag("CausalMask", alignment="top-left")
# The other argument named segment_ids.kv is for padding only.
SEGMENTS = SegmentIds("segment_ids.q", "segment_ids.kv of segments")
FEATURES = (
    Window("LocalMask", none=None, alignment="top-left"),
    Chunk("ChunkedCausalMask", alignment="top-left", causal=True),
    SoftCap("attn_logits_soft_cap", none=None),
    Sinks("sinks"),
    SEGMENTS,
)


@dataclass(frozen=True, eq=False)
class SplashTable(SegmentTable):
    """A mask table that passes one mask for the whole batch or, if needed, one for each entry."""

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        shared = list(super().spellings(problem))
        mask = MaskArgument("mask", "batch heads query key", true="attends")
        yield from shared or SegmentTable((IDS, mask), FLAG, self.features).spellings(problem)


class PallasTpuSplash(Function):
    """The adapter for the kernel with blocks of 128, and for its variant for one key/value head."""

    title = "jax.experimental.pallas.ops.tpu.splash_attention"
    documentation = (
        "https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention"
    )
    framework = "jax"
    dtypes = ("float32", "bfloat16")
    custom_scale = True
    grouped = True
    # The ids of all queries are 1.
    mask_arguments = (IDS, MaskArgument("mask", "heads query key", true="attends"))
    causal_flag = FLAG
    features = FEATURES
    modes = (
        Mode(
            "static",
            {"static": True},
            about="the mask is known when the kernel is made: NumpyMask, CausalMask, FullMask",
        ),
        Mode(
            "dynamic",
            {"static": False},
            dtypes=("float32",),
            about="the mask is an array of JAX, which may differ between entries of the batch; "
            "not under jax.jit",
            compiled=False,
        ),
        Mode(
            "residuals",
            {"static": True},
            gradients=False,
            every_case=False,
            dtypes=("float32",),
            about="save_residuals=True, which returns the log-sum-exp too",
        ),
    )
    # A row that sees no key attends to padding, or its block is skipped.
    log_sum_exp = LogSumExp(of_no_keys=None, modes=("residuals",))

    example = Example(
        imports="import jax, jax.numpy as jnp\n"
        "from jax.experimental.pallas.ops.tpu.splash_attention import "
        "SegmentIds, make_splash_mha_single_device",
        build="",
        call="jax.vmap(make_splash_mha_single_device(mask))("
        "query * {head_size}**-0.5, key, value{masks})",
    )

    @cached_property
    def masks(self) -> SplashTable:
        return SplashTable(self.mask_arguments, self.causal_flag, self.features)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if problem.dtype == "bfloat16" and problem.shape.sharing != "self":
            raise Unsupported("interpreted: in bfloat16 self-attention only")

    def attend_for(self, problem: Problem, call: Call) -> tuple[Callable[..., Any], Hashable]:
        given = (call.spelling or self.masks.spell(problem)).arguments
        array = given.get("mask")
        if not call.mode["static"]:
            if array is None:
                raise Unsupported("without an array there is no dynamic mask")
            if problem.shape.sharing != "self":
                raise Unsupported("interpreted and not compiled: for self-attention only")
            return self.attend, None
        window, chunk = given.get("LocalMask"), given.get("ChunkedCausalMask")
        fixed: Natives = {
            "mask": _static(problem.shape, array, "CausalMask" in given, window, chunk)
        }

        if call.mode.name in self.log_sum_exp.modes:
            fixed["save_residuals"] = True

        def static(query: Any, key: Any, value: Any, masks: Natives, **options: Any) -> Any:
            return self.attend(query, key, value, masks | fixed, **options)

        mask = None if array is None else np.asarray(array).tobytes()
        return static, (window, chunk, mask, call.mode.name)

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        batch, _, length, size = query.shape
        rows, columns = -length % BLOCK, -key.shape[2] % BLOCK
        of_query = masks.get("segment_ids.q", jnp.ones((batch, length), jnp.int32))
        of_key = masks.get("segment_ids.kv", jnp.ones((batch, key.shape[2]), jnp.int32))
        if of_key.dtype == bool:
            of_key = of_key.astype(jnp.int32)
        if SEGMENTS.key in masks:
            of_key = jnp.where(of_key == 1, masks[SEGMENTS.key], UNSEEN)
        mask = masks.get("mask")
        if not isinstance(mask, splash.MultiHeadMask):
            if "LocalMask" in masks:
                window = masks["LocalMask"]
                mask &= splash.make_local_attention_mask((length, key.shape[2]), window)
            if "ChunkedCausalMask" in masks:
                area, chunk = (length, key.shape[2]), masks["ChunkedCausalMask"]
                mask &= splash.splash_attention_mask.make_chunk_attention_mask(area, chunk)
            if masks.get("CausalMask"):
                mask &= splash.make_causal_mask((length, key.shape[2]))
            # The segment ids alone hide the padding.
            axis = mask.ndim - 2
            mask = padded(mask, {axis: rows, axis + 1: columns}, value=True)
        cap, residuals = masks.get("attn_logits_soft_cap"), masks.get("save_residuals", False)
        sinks = masks.get("sinks")
        single = splash.make_splash_mha_single_device
        if key.shape[1] == 1:
            single = splash.make_splash_mqa_single_device
            key, value = key[:, 0], value[:, 0]
        inputs = (
            padded(query * options.get("scale", size**-0.5), {2: rows}),
            padded(key, {key.ndim - 2: columns}),
            padded(value, {key.ndim - 2: columns}),
            splash.SegmentIds(
                padded(of_query, {1: rows}, PADDING), padded(of_key, {1: columns}, PADDING)
            ),
        )

        def one(mask: Any, *inputs: Any) -> Any:
            kernel = single(
                mask, interpret=True, attn_logits_soft_cap=cap, save_residuals=residuals
            )
            found = kernel(*inputs) if sinks is None else kernel(*inputs, sinks)
            return (found[0], found[1][0]) if residuals else found

        each = getattr(mask, "ndim", 3) == 4
        found = jax.vmap(one)(mask, *inputs) if each else jax.vmap(partial(one, mask))(*inputs)
        return jax.tree.map(lambda part: part[:, :, :length], found)


def _static(shape: Shape, array: Any, causal: bool, window: Any, chunk: Any) -> Any:
    """Return a `MultiHeadMask` for all heads, with lengths padded to multiples of the block size.

    A key is visible only if all of these allow it: `array`, `[heads query key]`, where True
    attends; the causal mask, if `causal` is set; `window`, (keys before, keys after); and `chunk`,
    the size of chunks with a causal mask in each. All but `causal` may be None, which allows all
    keys.

    Raises:
        Unsupported: if `array` has a batch axis.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    rows, columns = -shape.query_length % BLOCK, -shape.key_length % BLOCK
    area = (shape.query_length + rows, shape.key_length + columns)
    rules: list[Any] = [splash.CausalMask(area)] if causal else []
    rules += [] if window is None else [splash.LocalMask(area, window, 0)]
    rules += [] if chunk is None else [splash.splash_attention_mask.ChunkedCausalMask(area, chunk)]
    if array is None:
        whole = reduce(and_, rules) if rules else splash.FullMask(area)
        return splash.MultiHeadMask([whole] * shape.heads)
    if array.ndim == 4:
        raise Unsupported("a mask object is the same for all entries of the batch")
    masks: list[Any] = [
        splash.NumpyMask(np.pad(head, ((0, rows), (0, columns)), constant_values=True))
        for head in array
    ]
    return splash.MultiHeadMask([reduce(and_, rules, mask) for mask in masks])


ADAPTERS = {"pallas-tpu-splash": "PallasTpuSplash"}
