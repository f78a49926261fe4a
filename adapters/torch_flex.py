"""torch.nn.attention.flex_attention.flex_attention, called as it is and compiled.

What a port gets wrong: there is no mask argument. A mask is a function of four indices that says
who attends, of which `create_block_mask` makes a block mask; a bias is a function that changes a
score that is already scaled. Both index arrays here, as most do. A query that may attend nothing
gets zeros. Called as it is, the whole matrix of scores is made, after dynamo has traced the two
functions; only torch.compile makes a kernel of them, which goes tile by tile and skips what is
blocked altogether. Fewer key/value heads need enable_gqa=True. On a CPU there is no derivative.

Tracing takes a fraction of a second for each set of shapes, compiling some seconds. So float16 is
not asked, which goes the way of bfloat16; and the compiled mode is asked in float32 only, on the
cases that every mode is asked on, and in no experiment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

from conformance import (
    Example,
    Function,
    MaskArgument,
    Mode,
    Unavailable,
    Unsupported,
)

_EAGER = {"compile": False}
_ASKED = ("float64", "float32", "bfloat16")


class FlexAttention(Function):
    """flex_attention, with masks and biases as arrays that its two functions index."""

    title = "torch.nn.attention.flex_attention"
    documentation = "https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html"
    framework = "torch"
    grouped = True
    custom_scale = True
    fully_masked_row = "zeros"

    mask_arguments = (
        MaskArgument("block_mask", ("query key", "batch heads query key"), true="attends"),
        MaskArgument("score_mod", "batch heads query key", number="added"),
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
        bias, mask = masks.get("score_mod"), masks.get("block_mask")
        if bias is not None:
            added = _reader(bias, sizes)
            options["score_mod"] = lambda score, *place: score + added(*place)
        if mask is not None:
            # None stands for batch entries and heads that are all alike.
            alike = (None, None) if mask.ndim == 2 else sizes[:2]
            options["block_mask"] = flex.create_block_mask(
                _reader(mask, sizes), *alike, *sizes[2:], device=query.device
            )
        if mode["compile"]:
            return _compiled(query, key, value, options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            try:
                return flex.flex_attention(query, key, value, **options)
            except NotImplementedError as error:
                if "does not support backward" not in str(error):
                    raise
                raise Unsupported(str(error)) from error


def _reader(array: Any, sizes: tuple[int, ...]) -> Callable[..., Any]:
    """A function of four indices that reads an array of two axes or four."""
    if tuple(array.shape) == sizes[2:]:
        return lambda b, h, i, j: array[i, j]
    if tuple(array.shape) == sizes:
        return lambda b, h, i, j: array[b, h, i, j]
    raise Unsupported("the adapter indexes arrays [query key] and [batch heads query key] only")


def _compiled(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    import torch
    from torch._inductor.exc import InvalidCxxCompiler

    with torch._dynamo.utils.disable_cache_limit():
        try:
            return _program()(query, key, value, **options)
        except InvalidCxxCompiler as error:
            raise Unavailable(f"torch.compile needs a C++ compiler: {error}") from error


@cache
def _program() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    # One thread compiles in this process; several would be processes that outlive it for a while.
    return torch.compile(
        flex_attention, fullgraph=True, dynamic=False, options={"compile_threads": 1}
    )


ADAPTERS = {"torch-flex": "FlexAttention"}
