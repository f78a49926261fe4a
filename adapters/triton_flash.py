"""This project's flash attention in Triton; you may copy the kernel in `triton_flash_kernel`.

The docstring of the kernel's module lists what is easy to miss when the kernel is ported. The
module here shows how to test such a kernel with the suite: a `Function` takes projected heads and
declares what its mask and its causal flag mean.

On a CPU, Triton interprets the kernel if TRITON_INTERPRET is set before triton is first imported.
The adapter then refuses problems in bfloat16, for which the interpreter has no arithmetic (see
https://triton-lang.org/main/programming-guide/chapter-3/debugging.html), and large problems in
float64 and float16, which take too long because tiles are interpreted one after another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conformance import (
    Call,
    CausalFlag,
    Example,
    Function,
    LogSumExp,
    MaskArgument,
    Mode,
    Problem,
    Sinks,
    SoftCap,
    Unsupported,
    Window,
)

TILE = 32
MOST_TILES = 8
"""The most query tiles, over all batch entries and heads, to interpret in float64 and float16."""


class TritonFlash(Function):
    """The adapter for the kernel, which is tiled, with an online softmax and a backward pass."""

    title = "flash attention (ours, Triton)"
    documentation = "https://triton-lang.org/main/getting-started/tutorials/06-fused-attention.html"
    framework = "torch"
    packages = ("triton",)
    grouped = True
    custom_scale = True
    mask_arguments = (
        MaskArgument(
            "mask", "batch heads query key", true="attends", number="added", broadcasts=True
        ),
    )
    causal_flag = CausalFlag("causal", alignment="top-left")
    features = (Window("window", alignment="top-left"), SoftCap("softcap"), Sinks("sinks"))
    fully_masked_row = "zeros"
    log_sum_exp = LogSumExp(differentiable=True, modes=("log-sum-exp",))
    modes = (
        Mode("default"),
        Mode(
            "log-sum-exp",
            every_case=False,
            about="return_lse=True, which returns the log-sum-exp too",
        ),
    )

    example = Example(
        imports="from conformance.adapters.triton_flash_kernel import flash_attention",
        build="",
        call="flash_attention(query, key, value{masks})",
    )

    @contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        if call.device == "cpu":
            _check_interpreted(problem)
        before = os.environ.get("TRITON_INTERPRET")
        if call.device == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        try:
            yield
        finally:
            os.environ.pop("TRITON_INTERPRET", None)
            if before is not None:
                os.environ["TRITON_INTERPRET"] = before

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        from conformance.adapters.triton_flash_kernel import flash_attention

        if mode.name in self.log_sum_exp.modes:
            options["return_lse"] = True
        return flash_attention(query, key, value, **masks, **options)


def _check_interpreted(problem: Problem) -> None:
    shape = problem.shape
    if problem.dtype == "bfloat16":
        raise Unsupported("Triton's interpreter has no arithmetic for bfloat16")
    tiles = shape.batch * shape.heads * -(-shape.query_length // TILE)
    if problem.dtype != "float32" and tiles > MOST_TILES:
        raise Unsupported(f"interpreted: in {problem.dtype} up to {MOST_TILES} tiles of queries")


ADAPTERS = {"triton-flash": "TritonFlash"}
