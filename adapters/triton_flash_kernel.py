"""Flash attention in Triton with a backward pass, written to be read and copied.

It supports masks, a causal flag, a window, a soft cap, sinks, and grouped-query attention.

Easy to miss in a port, in the order of the code below:

- A tile may extend beyond the last key. Zeros loaded there have weight exp(0), so block them.
- Before its first allowed key, a row has the maximum −∞, and exp(−∞ − (−∞)) is NaN.
- A causal row ends at its diagonal or at the last key, whichever comes first. With a window, a row
  also begins later, and the column of queries that see a key ends earlier.
- A soft cap is applied before logits are masked; after masking, it would turn −∞ into −cap.
- 1 − 2 / (exp(2x) + 1) is an accurate tanh(x) only for large x: for small x all digits cancel.
- A sink is counted once, not once for each tile; it is the initial maximum, before the first key.
- `tl.dot` rounds float32 to TensorFloat-32 unless `input_precision` is set.
- A Python float that is passed to a kernel becomes a float32; a constexpr keeps its precision.
- A fully masked row has no softmax. Here its context is 0, and so are its gradients.
- A row that is filled with −1e9 does have one, whose sum of weights the log-sum-exp loses to
  rounding: the gradient would then be that of the values' sum, where the context is their mean.
- The gradients of a key/value head are sums over the query heads that share it.
- The gradient of an additive mask is that of the final logits, without scale and soft cap.

The algorithm is from Dao et al. 2022 (arXiv:2205.14135) and Dao 2023 (arXiv:2307.08691): logits are
never stored; the backward pass recomputes them, and the weights from each row's maximum and sum.

Without a GPU the kernels run in Triton's interpreter, if TRITON_INTERPRET=1 is set before triton is
first imported. The interpreter multiplies the bits of bfloat16 as if they were integers, so
bfloat16 is rejected there.
"""

# ruff: noqa: N803 - Triton's custom: what is constant when a kernel is compiled is in capitals.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

INFINITY = tl.constexpr(math.inf)
TILE = 32
"""The size of a tile, small for the interpreter; on a GPU, 64 or 128 are faster."""


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, accurate to the last digits for small arguments too."""
    # (u − 1) / log(u) has no cancellation although u − 1 has: its error is that of the logarithm.
    y = -2 * tl.abs(x)
    u = tl.exp(y)
    lost = (u == 1) | (u == 0)
    less = tl.where(u == 1, y, (u - 1) * y / tl.log(tl.where(lost, 0.5, u)))
    less = tl.where(u == 0, -1.0, less)  # exp(y) − 1
    return tl.where(x < 0, less, -less) / (less + 2)


@triton.jit
def logits_of(
    query, key, rows, columns, query_length, key_length, mask, mask_row, mask_column,
    SCALE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, MASK: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Return a tile of logits, and a tile of derivatives of the soft cap (1 without a soft cap).

    A logit is −∞ where a query (row) may not attend to a key (column).
    """
    logits = tl.dot(query, tl.trans(key), input_precision="ieee", out_dtype=SUM) * SCALE
    slope = tl.full(logits.shape, 1.0, SUM)
    if CAP > 0:
        bounded = tanh(logits / CAP)
        logits, slope = CAP * bounded, 1 - bounded * bounded
    allowed = (rows[:, None] < query_length) & (columns[None, :] < key_length)
    if CAUSAL:
        allowed &= columns[None, :] <= rows[:, None]
    if BEFORE >= 0:
        allowed &= columns[None, :] >= rows[:, None] - BEFORE
    if AFTER >= 0:
        allowed &= columns[None, :] <= rows[:, None] + AFTER
    if MASK != "none":
        at = mask + rows[:, None] * mask_row + columns[None, :] * mask_column
        given = tl.load(at, mask=allowed, other=0)
        if MASK == "boolean":
            allowed &= given != 0
        else:
            logits += given.to(SUM)
    return tl.where(allowed, logits, -INFINITY), slope


@triton.jit
def columns_of(
    first_row, key_length,
    CAUSAL: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (start, end): all columns that some row of a tile may attend to; `end` is excluded.

    Only causality and the window are considered, not the mask.
    """
    start, end = 0, key_length
    if CAUSAL:
        end = tl.minimum(end, first_row + TILE)
    if BEFORE >= 0:
        start = tl.maximum(start, first_row - BEFORE)
    if AFTER >= 0:
        end = tl.minimum(end, first_row + TILE + AFTER)
    return start, end


@triton.jit
def rows_of(
    first_column, query_length,
    CAUSAL: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return (start, end): all rows that may attend to some column of a tile; `end` is excluded.

    Only causality and the window are considered, not the mask.
    """
    start, end = 0, query_length
    if CAUSAL:
        start = tl.maximum(start, first_column)
    if AFTER >= 0:
        start = tl.maximum(start, first_column - AFTER)
    if BEFORE >= 0:
        end = tl.minimum(end, first_column + TILE + BEFORE)
    return start, end


@triton.jit
def forward_kernel(
    query, key, value, mask, sinks, context, maxima, totals,
    heads, group, query_length, key_length, head_size, value_size,
    mask_batch, mask_head, mask_row, mask_column,
    SCALE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, MASK: tl.constexpr, SUM: tl.constexpr,
    TILE: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Compute the context of one tile of queries of one head, over all keys.

    Also store each row's maximum, and the sum of its exponentials relative to it.
    """
    first_row = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)  # Counted over the batch; offsets may exceed 32 bits.
    tile = tl.arange(0, TILE).to(tl.int64)
    query_at, key_at = head * query_length, head // group * key_length
    query += query_at * head_size
    key += key_at * head_size
    value += key_at * value_size
    context += query_at * value_size
    if MASK != "none":
        mask += head // heads * mask_batch + head % heads * mask_head

    rows = first_row + tile
    q_axis, v_axis = tl.arange(0, HEAD)[None, :], tl.arange(0, VALUE)[None, :]
    row, in_rows = rows[:, None], rows[:, None] < query_length
    q = tl.load(query + row * head_size + q_axis, in_rows & (q_axis < head_size), 0.0)
    maximum = tl.full([TILE], -INFINITY, SUM)
    total = tl.full([TILE], 0.0, SUM)
    result = tl.full([TILE, VALUE], 0.0, SUM)
    if SINK:
        sink = tl.load(sinks + head % heads).to(SUM)
        maximum = tl.full([TILE], 0.0, SUM) + sink
        total = tl.where(maximum == -INFINITY, 0.0, 1.0).to(SUM)
    start, end = columns_of(first_row, key_length, CAUSAL, BEFORE, AFTER, TILE)
    for first_column in range(start, end, TILE):
        columns = first_column + tile
        column, in_columns = columns[:, None], columns[:, None] < key_length
        k = tl.load(key + column * head_size + q_axis, in_columns & (q_axis < head_size), 0.0)
        v = tl.load(value + column * value_size + v_axis, in_columns & (v_axis < value_size), 0.0)
        logits, _ = logits_of(
            q, k, rows, columns, query_length, key_length, mask, mask_row, mask_column,
            SCALE, CAP, CAUSAL, BEFORE, AFTER, MASK, SUM,
        )  # fmt: skip
        larger = tl.maximum(maximum, tl.max(logits, 1))
        # If no key was allowed so far, use any finite number.
        base = tl.where(larger == -INFINITY, 0.0, larger)
        powers = tl.exp(logits - base[:, None])
        earlier = tl.exp(maximum - base)
        total = total * earlier + tl.sum(powers, 1)
        product = tl.dot(powers.to(v.dtype), v, input_precision="ieee", out_dtype=SUM)
        result = result * earlier[:, None] + product
        maximum = larger

    empty = total == 0
    total = tl.where(empty, 1.0, total)
    result = (result / total[:, None]).to(context.dtype.element_ty)
    tl.store(context + row * value_size + v_axis, result, in_rows & (v_axis < value_size))
    # 0 and +∞ make every weight 0 when the backward pass subtracts the former and divides by the
    # latter.
    tl.store(maxima + query_at + rows, tl.where(empty, 0.0, maximum), rows < query_length)
    tl.store(totals + query_at + rows, tl.where(empty, INFINITY, total), rows < query_length)


@triton.jit
def backward_query_kernel(
    query, key, value, mask, cotangent, maxima, totals, inner, query_gradient, mask_gradient,
    heads, group, query_length, key_length, head_size, value_size,
    mask_batch, mask_head, mask_row, mask_column,
    SCALE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, MASK: tl.constexpr, SUM: tl.constexpr,
    TILE: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of queries of one head and, if BIAS, of their mask rows."""
    first_row = tl.program_id(0) * TILE
    head = tl.program_id(1).to(tl.int64)
    tile = tl.arange(0, TILE).to(tl.int64)
    query_at, key_at = head * query_length, head // group * key_length
    query += query_at * head_size
    key += key_at * head_size
    value += key_at * value_size
    cotangent += query_at * value_size
    query_gradient += query_at * head_size
    if MASK != "none":
        mask += head // heads * mask_batch + head % heads * mask_head
    if BIAS:
        mask_gradient += query_at * key_length

    rows = first_row + tile
    q_axis, v_axis = tl.arange(0, HEAD)[None, :], tl.arange(0, VALUE)[None, :]
    row, in_rows = rows[:, None], rows[:, None] < query_length
    q = tl.load(query + row * head_size + q_axis, in_rows & (q_axis < head_size), 0.0)
    dout = tl.load(cotangent + row * value_size + v_axis, in_rows & (v_axis < value_size), 0.0)
    maximum = tl.load(maxima + query_at + row, in_rows, 0.0)
    total = tl.load(totals + query_at + row, in_rows, 1.0)
    inners = tl.load(inner + query_at + row, in_rows, 0.0)
    dq = tl.full([TILE, HEAD], 0.0, SUM)
    start, end = columns_of(first_row, key_length, CAUSAL, BEFORE, AFTER, TILE)
    for first_column in range(start, end, TILE):
        columns = first_column + tile
        column, in_columns = columns[:, None], columns[:, None] < key_length
        k = tl.load(key + column * head_size + q_axis, in_columns & (q_axis < head_size), 0.0)
        v = tl.load(value + column * value_size + v_axis, in_columns & (v_axis < value_size), 0.0)
        logits, slope = logits_of(
            q, k, rows, columns, query_length, key_length, mask, mask_row, mask_column,
            SCALE, CAP, CAUSAL, BEFORE, AFTER, MASK, SUM,
        )  # fmt: skip
        weights = tl.exp(logits - maximum) / total
        dweights = tl.dot(dout, tl.trans(v), input_precision="ieee", out_dtype=SUM)
        dlogits = weights * (dweights - inners)
        if BIAS:
            inside = in_rows & (columns[None, :] < key_length)
            tl.store(mask_gradient + row * key_length + columns[None, :], dlogits, inside)
        dlogits *= slope
        dq += tl.dot(dlogits.to(k.dtype), k, input_precision="ieee", out_dtype=SUM)
    dq = (dq * SCALE).to(query_gradient.dtype.element_ty)
    tl.store(query_gradient + row * head_size + q_axis, dq, in_rows & (q_axis < head_size))


@triton.jit
def backward_key_kernel(
    query, key, value, mask, cotangent, maxima, totals, inner, key_gradient, value_gradient,
    heads, group, query_length, key_length, head_size, value_size,
    mask_batch, mask_head, mask_row, mask_column,
    SCALE: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, MASK: tl.constexpr, SUM: tl.constexpr,
    TILE: tl.constexpr, HEAD: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of keys and values, over all heads that share them."""
    first_column = tl.program_id(0) * TILE
    shared = tl.program_id(1).to(tl.int64)
    tile = tl.arange(0, TILE).to(tl.int64)
    key_at = shared * key_length
    key += key_at * head_size
    value += key_at * value_size
    key_gradient += key_at * head_size
    value_gradient += key_at * value_size

    columns = first_column + tile
    q_axis, v_axis = tl.arange(0, HEAD)[None, :], tl.arange(0, VALUE)[None, :]
    column, in_columns = columns[:, None], columns[:, None] < key_length
    k = tl.load(key + column * head_size + q_axis, in_columns & (q_axis < head_size), 0.0)
    v = tl.load(value + column * value_size + v_axis, in_columns & (v_axis < value_size), 0.0)
    dk = tl.full([TILE, HEAD], 0.0, SUM)
    dv = tl.full([TILE, VALUE], 0.0, SUM)
    start, end = rows_of(first_column, query_length, CAUSAL, BEFORE, AFTER, TILE)
    for member in range(0, group):
        head = shared * group + member
        query_at = head * query_length
        its_query = query + query_at * head_size
        its_cotangent = cotangent + query_at * value_size
        its_mask = mask
        if MASK != "none":
            its_mask += head // heads * mask_batch + head % heads * mask_head
        for first_row in range(start, end, TILE):
            rows = first_row + tile
            row, in_rows = rows[:, None], rows[:, None] < query_length
            q = tl.load(its_query + row * head_size + q_axis, in_rows & (q_axis < head_size), 0.0)
            at = its_cotangent + row * value_size + v_axis
            dout = tl.load(at, in_rows & (v_axis < value_size), 0.0)
            maximum = tl.load(maxima + query_at + row, in_rows, 0.0)
            total = tl.load(totals + query_at + row, in_rows, 1.0)
            inners = tl.load(inner + query_at + row, in_rows, 0.0)
            logits, slope = logits_of(
                q, k, rows, columns, query_length, key_length, its_mask, mask_row, mask_column,
                SCALE, CAP, CAUSAL, BEFORE, AFTER, MASK, SUM,
            )  # fmt: skip
            weights = tl.exp(logits - maximum) / total
            dweights = tl.dot(dout, tl.trans(v), input_precision="ieee", out_dtype=SUM)
            dlogits = weights * (dweights - inners) * slope
            of_value, of_key = tl.trans(weights).to(dout.dtype), tl.trans(dlogits).to(q.dtype)
            dv += tl.dot(of_value, dout, input_precision="ieee", out_dtype=SUM)
            dk += tl.dot(of_key, q, input_precision="ieee", out_dtype=SUM)
    dk = (dk * SCALE).to(key_gradient.dtype.element_ty)
    dv = dv.to(value_gradient.dtype.element_ty)
    tl.store(key_gradient + column * head_size + q_axis, dk, in_columns & (q_axis < head_size))
    at = value_gradient + column * value_size + v_axis
    tl.store(at, dv, in_columns & (v_axis < value_size))


INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)
"""Whether the kernels are interpreted: TRITON_INTERPRET was set when this module was imported."""


@dataclass(frozen=True)
class Options:
    """The options that are compile-time constants of the kernels; see `flash_attention`."""

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float


class FlashAttention(torch.autograd.Function):
    """The differentiable function that runs the three kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sinks: torch.Tensor | None,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the context and the log-sum-exp, and save what the backward pass needs.

        Apart from the mask, the size of what is saved is linear in the sequence length.
        """
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        batch, heads, length, _ = query.shape
        context = query.new_empty(batch, heads, length, value.shape[-1])
        sums = torch.float64 if query.dtype == torch.float64 else torch.float32
        maxima, totals = query.new_empty(2, batch, heads, length, dtype=sums)
        arguments, constants = _described(query, key, value, mask, options)
        grid = (triton.cdiv(length, TILE), batch * heads)
        # The kernel reads one sink after the other, and is not told their stride.
        sink = query if sinks is None else sinks.contiguous()
        given = (query, key, value, _pointed(mask, query), sink)
        forward_kernel[grid](
            *given, context, maxima, totals, *arguments, **constants, SINK=sinks is not None
        )
        ctx.save_for_backward(query, key, value, mask, sinks, context, maxima, totals)
        ctx.options = options
        # For a query that sees nothing, the kernel stores a sum of +∞.
        total = torch.where(totals.isinf(), 0.0, totals)
        return context, maxima + total.log()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Return the gradients of query, key, value, mask, sinks and options.

        The gradient is None for options, for missing sinks, and for a mask that is missing or needs
        no gradient.
        """
        query, key, value, mask, sinks, context, maxima, totals = ctx.saved_tensors
        cotangent, of_log_sum_exp = cotangents
        # This is Σ weights · gradient of weights, which equals Σ context · gradient of context. The
        # derivative of the log-sum-exp with respect to a logit is the weight of its key.
        inner = (context.to(totals.dtype) * cotangent.to(totals.dtype)).sum(-1) - of_log_sum_exp
        cotangent = cotangent.contiguous()
        arguments, constants = _described(query, key, value, mask, ctx.options)
        given = (query, key, value, _pointed(mask, query), cotangent, maxima, totals, inner)
        batch, heads, length, _ = query.shape
        bias = ctx.needs_input_grad[3]
        dquery, dkey, dvalue = (torch.empty_like(array) for array in (query, key, value))
        dmask = totals.new_zeros(batch, heads, length, key.shape[2]) if bias else dquery
        grid = (triton.cdiv(length, TILE), batch * heads)
        backward_query_kernel[grid](*given, dquery, dmask, *arguments, **constants, BIAS=bias)
        grid = (triton.cdiv(key.shape[2], TILE), batch * key.shape[1])
        backward_key_kernel[grid](*given, dkey, dvalue, *arguments, **constants)
        summed = dmask.sum_to_size(mask.shape).to(mask.dtype) if bias else None
        dsinks = None
        if sinks is not None:
            # A sink has no value, so the gradient of its weight is 0, less the row's inner product.
            of_sink = torch.exp(sinks.to(totals.dtype)[:, None] - maxima) / totals
            dsinks = -(of_sink * inner).sum((0, 2)).to(sinks.dtype)
        return dquery, dkey, dvalue, summed, dsinks, None


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention without storing its weights.

    Args:
        query: `[batch heads query head]`.
        key: `[batch kv_heads key head]`; heads is a multiple of kv_heads.
        value: `[batch kv_heads key value_head]`.
        mask: broadcastable to `[batch heads query key]`. Boolean: True attends. Numbers: added to
            the logits, so −∞ blocks; they get a gradient.
        causal: whether query i may attend only to keys 0 to i, whatever the number of keys.
        scale: the factor of the logits, 1/√head by default.
        window: the numbers of keys before and after key i that query i may attend to; −1 for no
            limit.
        softcap: c > 0 replaces logits by c · tanh(logits / c) before a mask is added; 0 for none.
        sinks: `[heads]`, the logit of each head's sink, which receives weight but has no value.
        return_lse: whether to return the log-sum-exp of the logits too, by which attentions over
            parts of the keys can be merged.

    Returns:
        The context, `[batch heads query value_head]`; 0 for a fully masked query. With
        `return_lse`, also the natural logarithm of the sum of exponentials of each query's logits,
        the sink's included, `[batch heads query]`, in float64 for float64 and in float32 otherwise;
        −∞ for a query that sees neither a key nor a sink. Both have gradients.

    Raises:
        ValueError: if the shapes of query, key, value and sinks do not fit together.
        RuntimeError: if the mask cannot be broadcast.
        TypeError: if the mask is neither boolean nor floating-point, or for a bfloat16 query in
            Triton's interpreter.
    """
    fits = key.shape[:3] == value.shape[:3] and query.shape[0] == key.shape[0]
    if not fits or query.shape[3] != key.shape[3]:
        shapes = ", ".join(str(list(array.shape)) for array in (query, key, value))
        raise ValueError(f"query, key and value do not fit together: {shapes}")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} heads cannot share {key.shape[1]} key/value heads")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"the mask is {mask.dtype}; it must be boolean, or floats to be added")
    if INTERPRETED and query.dtype == torch.bfloat16:
        raise TypeError("Triton's interpreter has no arithmetic for bfloat16")
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ValueError(f"sinks have the shape {list(sinks.shape)}, not [{query.shape[1]}]")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options = Options(scale, causal, tuple(window), softcap)
    context, log_sum_exp = FlashAttention.apply(query, key, value, mask, sinks, options)
    return (context, log_sum_exp) if return_lse else context


def _pointed(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """Return the tensor to pass to the kernels as the mask: `mask`, with booleans viewed as bytes.

    If `mask` is None, return `query` as a placeholder.
    """
    if mask is None:
        return query
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _described(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: Options,
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the positional and keyword arguments common to all three kernels."""
    batch, heads, query_length, head_size = query.shape
    kv_heads, key_length, value_size = key.shape[1], key.shape[2], value.shape[3]
    strides = (0, 0, 0, 0)
    kind = "none"
    if mask is not None:
        # Axes of size 1 get the stride 0, so that nothing is copied.
        strides = mask.expand(batch, heads, query_length, key_length).stride()
        kind = "boolean" if mask.dtype == torch.bool else "added"
    sizes = (heads, heads // kv_heads, query_length, key_length, head_size, value_size)
    constants = {
        "SCALE": options.scale,
        "CAP": options.softcap,
        "CAUSAL": options.causal,
        "BEFORE": options.window[0],
        "AFTER": options.window[1],
        "MASK": kind,
        "SUM": tl.float64 if query.dtype == torch.float64 else tl.float32,
        "TILE": TILE,
        # Sizes of tiles are powers of two, and tl.dot takes no fewer than 16.
        "HEAD": max(16, triton.next_power_of_2(head_size)),
        "VALUE": max(16, triton.next_power_of_2(value_size)),
    }
    return (*sizes, *strides), constants
