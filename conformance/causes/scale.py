"""What becomes of the factor of the logits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from conformance.causes.hypothesis import Hypothesis, Maker
from conformance.definition.dtypes import DTYPES


def hypotheses(maker: Maker) -> Iterator[Hypothesis]:
    """The simplest first."""
    problem, shape = maker.problem, maker.problem.shape
    size, scale = shape.head_size, maker.problem.logit_scale
    width = max(1, shape.query_width)
    additive = shape.score == "additive"
    seen: list[float] = [scale]
    asked_for = problem.scale is not None
    for told, other in (
        ("without the scale", 1.0),
        ("with scale 1/d instead of 1/sqrt(d)", 1.0 / size),
        (
            "with scale 1/sqrt(d) instead of the one asked for"
            if asked_for
            else "with the additive score divided by sqrt(d)"
            if additive
            else "with scale 1/sqrt(d)",
            1.0 / math.sqrt(size),
        ),
        ("with scale 1/sqrt(width)", 1.0 / math.sqrt(width)),
        ("with scale 1/width", 1.0 / width),
        ("with scale 1/sqrt(d) of the value heads", 1.0 / math.sqrt(shape.value_head_size)),
        ("with the scale applied twice", scale * scale),
        ("with 1/sqrt(d) on top of the scale asked for", scale / math.sqrt(size)),
        ("with 1/scale instead of the scale", 1.0 / scale if scale else 0.0),
        ("with scale sqrt(d)", math.sqrt(size)),
        ("with uniform weights", 0.0),
    ):
        if not any(math.isclose(other, known) for known in seen):
            seen.append(other)
            yield maker.asked(told, scale=other)
    for told in ("float32", "float16", "bfloat16"):
        narrow = DTYPES[told]
        other = float(narrow.round(scale))
        if narrow.significand_bits < problem.format.significand_bits and other != scale:
            yield maker.asked(f"with the scale rounded to {told}", scale=other)
