"""torch.nn.attention.flex_attention.flex_attention, called as it is or compiled.

Easy to miss in a port: there is no mask argument. A mask is a function of four indices that returns
whether a query attends to a key, from which `create_block_mask` makes a block mask; a bias is a
function that changes a score after scaling. Here both read from arrays, as in most uses. A fully
masked query gets zeros. Uncompiled, dynamo traces the two functions and the whole matrix of scores
is computed; only torch.compile makes a tiled kernel, which skips blocked tiles. Fewer key/value
heads need enable_gqa=True. On a CPU there is no derivative.

Windows, lengths, segments, bidirectional spans and trees of drafted tokens are masks too, computed
here from positions, lengths and ids. A mask of spans is causal outside them.
A soft cap and ALiBi are functions of the score. The caller chooses their order; here the cap comes
first, then the slopes, then a bias. The functions capture arrays such as slopes and lengths from
the code around them. A sink cannot be expressed by a function of a single score, because it affects
the whole row.

`return_aux` also returns the log-sum-exp, natural and in float32; −∞ for a query that sees no key.
The largest score, which it can return too, is that of the scores after score_mod and block mask,
natural too. It does not exist on a CPU, and neither exists there if compiled.

Tracing takes a fraction of a second for each set of shapes, and compiling takes some seconds.
Therefore float16, which is handled like bfloat16, is not examined, and the compiled mode is
examined only in float32, on the cases that every mode must run, and not in experiments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from conformance import (
    Alibi,
    Example,
    Function,
    Lengths,
    LogSumExp,
    MaskArgument,
    MaxLogit,
    Mode,
    PositionIds,
    SegmentIds,
    SoftCap,
    Spans,
    Tree,
    Unavailable,
    Unsupported,
    Window,
)

_EAGER = {"compile": False}
_ASKED = ("float64", "float32", "bfloat16")
_BESIDE = {"log-sum-exp": "lse", "max-scores": "max_scores"}
"""By mode, what is asked for beside the output, as `AuxRequest` calls it."""

_LACKED = ("does not support backward", "max scores is not supported")
"""Parts of the messages with which it refuses what it does not do on a CPU."""


class FlexAttention(Function):
    """The adapter for flex_attention, with functions that read masks and biases from arrays."""

    title = "torch.nn.attention.flex_attention"
    documentation = "https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html"
    framework = "torch"
    grouped = True
    custom_scale = True
    fully_masked_row = "zeros"
    log_sum_exp = LogSumExp(modes=("log-sum-exp",))
    max_logit = MaxLogit(modes=("max-scores",))

    mask_arguments = (
        MaskArgument("block_mask", ("query key", "batch heads query key"), true="attends"),
        MaskArgument("score_mod", "batch heads query key", number="added"),
    )
    # Values that the two functions read; the library itself has no such arguments.
    features = (
        SoftCap("soft_cap", none=None),
        Alibi("slopes"),
        Window("window", none=None, alignment="top-left"),
        Lengths("key_lengths", aligns=False),
        Lengths("query_lengths", of="queries", aligns=False),
        SegmentIds("query_segments", "key_segments"),
        PositionIds("query_positions", "key_positions", of=("alibi", "window")),
        Spans("spans", alignment="top-left", causal=True),
        Tree("ancestors", "ancestors", aligns=False),
    )

    modes = (
        Mode(
            "eager",
            _EAGER,
            gradients=False,
            dtypes=_ASKED,
            about="called as it is, under torch.no_grad()",
        ),
        Mode(
            "eager-gradients",
            _EAGER,
            every_case=False,
            dtypes=_ASKED,
            about="called as it is, so that gradients can be asked for; not on a CPU",
        ),
        Mode(
            "log-sum-exp",
            _EAGER,
            gradients=False,
            every_case=False,
            dtypes=_ASKED,
            about="called as it is, with return_aux=AuxRequest(lse=True)",
        ),
        Mode(
            "max-scores",
            _EAGER,
            gradients=False,
            every_case=False,
            dtypes=_ASKED,
            about="called as it is, with return_aux=AuxRequest(max_scores=True); not on a CPU",
        ),
        Mode(
            "compiled",
            {"compile": True},
            gradients=False,
            every_case=False,
            dtypes=("float32",),
            optimised=True,
            about="torch.compile(flex_attention), under torch.no_grad()",
        ),
    )

    example = Example(
        imports="import torch\n"
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention",
        build="""\
split = lambda x: x.unflatten(-1, ({heads}, -1)).transpose(1, 2)
def attention(query, key, value, block_mask=None, score_mod=None):
    mask, bias, lengths = block_mask, score_mod, (query.shape[2], key.shape[2])
    if mask is not None:
        block_mask = create_block_mask(lambda b, h, i, j: mask[i, j], None, None, *lengths, "cpu")
    if bias is not None:
        score_mod = lambda score, b, h, i, j: score + bias[b, h, i, j]
    return flex_attention(query, key, value, block_mask=block_mask, score_mod=score_mod)""",
        call="attention(split(query), split(key), split(value){masks}).transpose(1, 2).flatten(2)",
    )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        from torch.nn.attention import flex_attention as flex

        sizes = (*query.shape[:3], key.shape[2])
        options["enable_gqa"] = query.shape[1] != key.shape[1]
        added = _score_mod(masks, sizes)
        if added is not None:
            options["score_mod"] = added
        rules = list(_mask_mods(masks, sizes))
        if rules:
            # None means that the mask is the same for all batch entries or heads.
            alike = len(rules) == 1 and "block_mask" in masks and masks["block_mask"].ndim == 2
            options["block_mask"] = flex.create_block_mask(
                rules[0] if len(rules) == 1 else flex.and_masks(*rules),
                *((None, None) if alike else sizes[:2]),
                *sizes[2:],
                device=query.device,
            )
        beside = _BESIDE.get(mode.name)
        if beside is not None:
            if not hasattr(flex, "AuxRequest"):
                raise Unsupported("the installed torch has no AuxRequest")
            options["return_aux"] = flex.AuxRequest(**{beside: True})
        if mode["compile"]:
            return _compiled(query, key, value, options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            try:
                found = flex.flex_attention(query, key, value, **options)
                return found if beside is None else (found[0], getattr(found[1], beside))
            except NotImplementedError as error:
                if not any(each in str(error) for each in _LACKED):
                    raise
                raise Unsupported(str(error)) from error


def _score_mod(masks: dict[str, Any], sizes: tuple[int, ...]) -> Callable[..., Any] | None:
    """Return a `score_mod` for the soft cap, ALiBi and bias in `masks`; None if none is there."""
    cap, slopes, bias = (masks.get(name) for name in ("soft_cap", "slopes", "score_mod"))
    if cap is None and slopes is None and bias is None:
        return None
    added = None if bias is None else _reader(bias, sizes)
    ahead = _ahead(masks)

    def changed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cap is not None:
            score = cap * (score / cap).tanh()
        if slopes is not None:
            score = score - slopes[h] * ahead(b, i, j).abs()
        return score if added is None else score + added(b, h, i, j)

    return changed


def _ahead(masks: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that computes how many positions a key is ahead of a query.

    Its arguments are the indices of a batch entry, a query and a key. These indices are also the
    positions unless `masks` contains position ids.
    """
    if "query_positions" not in masks:
        return lambda b, i, j: j - i
    p, r = masks["query_positions"], masks["key_positions"]
    return lambda b, i, j: r[b, j] - p[b, i]


def _mask_mods(masks: dict[str, Any], sizes: tuple[int, ...]) -> Iterator[Callable[..., Any]]:
    """Yield a function for each restriction in `masks`: mask, window side, lengths and the like.

    Each is a function of four indices (batch, head, query, key). A query attends to a key if all
    functions return True.
    """
    if "block_mask" in masks:
        yield _reader(masks["block_mask"], sizes)
    if "window" in masks:
        before, after = masks["window"]
        ahead = _ahead(masks)
        if before is not None:
            yield lambda b, h, i, j: ahead(b, i, j) >= -before
        if after is not None:
            yield lambda b, h, i, j: ahead(b, i, j) <= after
    if "key_lengths" in masks:
        keys = masks["key_lengths"]
        yield lambda b, h, i, j: j < keys[b]
    if "query_lengths" in masks:
        queries = masks["query_lengths"]
        yield lambda b, h, i, j: i < queries[b]
    if "query_segments" in masks:
        one, other = masks["query_segments"], masks["key_segments"]
        yield lambda b, h, i, j: one[b, i] == other[b, j]
    if "spans" in masks:
        spans, last = masks["spans"], sizes[3] - 1
        yield (
            lambda b, h, i, j: (
                (j <= i)
                | ((spans[b, i.clamp(max=last)] == spans[b, j]) & (spans[b, j] > 0) & (i <= last))
            )
        )
    if "ancestors" in masks:
        line, cached = masks["ancestors"], sizes[3] - sizes[2]
        yield lambda b, h, i, j: (j < cached) | line[b, i, (j - cached).clamp(min=0)]


def _reader(array: Any, sizes: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function of the indices (batch, head, query, key) that reads from an array.

    `sizes` is (batch, heads, queries, keys); the array has all these axes, or the last two.

    Raises:
        Unsupported: if the array is neither `[query key]` nor `[batch heads query key]`, or has an
            axis of size 1 instead of its full size.
    """
    if tuple(array.shape) == sizes[2:]:
        return lambda b, h, i, j: array[i, j]
    if tuple(array.shape) == sizes:
        return lambda b, h, i, j: array[b, h, i, j]
    raise Unsupported("the adapter indexes arrays [query key] and [batch heads query key] only")


def _compiled(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return _program()(query, key, value, **options)
    except InvalidCxxCompiler as error:
        raise Unavailable(f"torch.compile needs a C++ compiler: {error}") from error


@cache
def _program() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    # Compile in this process: several threads would start processes that outlive it for a while.
    return torch.compile(
        flex_attention, fullgraph=True, dynamic=False, options={"compile_threads": 1}
    )


ADAPTERS = {"torch-flex": "FlexAttention"}
