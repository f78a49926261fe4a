"""tinygrad.Tensor.scaled_dot_product_attention.

What a port gets wrong: it is a method of the query. True in a mask attends; numbers of any type
are added, whole numbers too, so a mask of 0 and 1 hides nothing. The causal flag is aligned
top-left, and refused beside a mask. Fewer key/value heads are refused unless `enable_gqa=True`.
There is no argument for the scale. A fully masked row is NaN.

Without a compiler tinygrad has one device, PYTHON, which interprets its kernels number by number.
So unless the variable DEV names another (CPU needs clang), only problems of up to 200 attention
weights are run, and of up to 36 in other dtypes than float32: no long sequences, grouped heads
with one key/value head only and in float32, and in the other dtypes one query or one key only.
"""

from __future__ import annotations

import math
import os
from typing import Any

from conformance import CausalFlag, Example, Function, MaskArgument, Problem, Unsupported


class TinygradScaledDotProductAttention(Function):
    """The adapter of tinygrad.Tensor.scaled_dot_product_attention, on projected heads."""

    title = "tinygrad.Tensor.scaled_dot_product_attention"
    documentation = (
        "https://docs.tinygrad.org/tensor/ops/#tinygrad.Tensor.scaled_dot_product_attention"
    )
    framework = "tinygrad"
    grouped = True
    fully_masked_row = "nan"
    mask_arguments = (
        MaskArgument(
            "attn_mask", "batch heads query key", true="attends", number="added", broadcasts=True
        ),
    )
    causal_flag = CausalFlag("is_causal", alignment="top-left", alone=True)
    example = Example(
        imports="from tinygrad import Tensor",
        build="""\
def attention(query, key, value, **masks):
    query, key, value = (
        x.reshape(*x.shape[:2], {heads}, {head_size}).transpose(1, 2) for x in (query, key, value)
    )
    context = query.scaled_dot_product_attention(key, value, **masks)
    return context.transpose(1, 2).flatten(2)""",
        call="attention(query, key, value{masks})",
    )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        most = 200 if problem.dtype == "float32" else 36
        if math.prod(problem.shape.logits) > most and _interpreted():
            raise Unsupported(
                f"interpreted: in {problem.dtype} only up to {most} attention weights are run"
            )

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], **options: Any
    ) -> Any:
        shared = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
        return query.scaled_dot_product_attention(key, value, **masks, **shared)


def _interpreted() -> bool:
    return os.environ.get("DEV", "PYTHON").partition(":")[0].upper() in ("", "PYTHON")


ADAPTERS = {"tinygrad-sdpa": "TinygradScaledDotProductAttention"}
