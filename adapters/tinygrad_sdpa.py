"""tinygrad.Tensor.scaled_dot_product_attention.

Easy to miss in a port: the function is a method of the query. True in a mask attends. Numbers of
any type are added to the logits, integers too, so that a mask of 0 and 1 hides nothing. The causal
flag is aligned top-left, and is rejected together with a mask. Fewer key/value heads are rejected
unless `enable_gqa=True`. There is no argument for the scale. The output of a fully masked query is
NaN.

Without a compiler, tinygrad has only the device PYTHON, which interprets its kernels number by
number. Unless the environment variable DEV names another device (CPU needs clang), only problems of
up to 200 attention weights are run in float32, and of up to 36 in other dtypes. This excludes long
sequences. Grouped-query attention is run only in float32 with one key/value head, and dtypes other
than float32 only with one query or one key.
"""

from __future__ import annotations

import math
import os
from typing import Any

from conformance import CausalFlag, Example, Function, MaskArgument, Problem, Unsupported


class TinygradScaledDotProductAttention(Function):
    """The adapter for tinygrad.Tensor.scaled_dot_product_attention, on projected heads."""

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
