"""A flash attention of ours in Triton: the kernel is in `triton_flash_kernel`, for you to copy.

What a port gets wrong: the list is in the kernel's own docstring, in the order of the code that
gets it right. Here is how such a kernel is put to the suite: a `Function` is given projected heads,
and declares what its mask and its flag mean.

On a CPU Triton interprets the kernel, which is to be said before triton is first imported. Not run
then: bfloat16, for which the interpreter has no arithmetic, as Triton's documentation says
(https://triton-lang.org/main/programming-guide/chapter-3/debugging.html); and in float64 and
float16 what takes long, because tiles are interpreted one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from conformance import Call, CausalFlag, Example, Function, MaskArgument, Problem, Unsupported

TILE = 32
MOST_TILES = 8
"""Of the queries of all heads, if interpreted in another dtype than float32."""


class TritonFlash(Function):
    """Tiled, with an online softmax, and two kernels for the gradients."""

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
    fully_masked_row = "zeros"

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
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        from conformance.adapters.triton_flash_kernel import flash_attention

        return flash_attention(query, key, value, **masks, **options)


def _check_interpreted(problem: Problem) -> None:
    shape = problem.shape
    if problem.dtype == "bfloat16":
        raise Unsupported("Triton's interpreter has no arithmetic for bfloat16")
    tiles = shape.batch * shape.heads * -(-shape.query_length // TILE)
    if problem.dtype != "float32" and tiles > MOST_TILES:
        raise Unsupported(f"interpreted: in {problem.dtype} up to {MOST_TILES} tiles of queries")


ADAPTERS = {"triton-flash": "TritonFlash"}
