"""The shape families: few, because a compiling framework pays for each new shape.

Inside a family all sizes are pairwise different wherever the implementations allow it (batch,
query, key, heads, kv_heads, group, head, value_head), so that a swapped axis changes a shape or
an answer instead of passing. Widths equal heads × head where most layers insist on it; `narrow`,
`value-head`, `gqa` and `mqa` are where they must not.
"""

from __future__ import annotations

from conformance.definition.problem import Score, Shape, Sharing


def _shape(
    batch: int,
    query: int,
    key: int,
    heads: int,
    head: int,
    *,
    kv_heads: int | None = None,
    value_head: int | None = None,
    widths: tuple[int, int, int, int] | None = None,
    bias: bool = True,
    sharing: Sharing = "separate",
    score: Score = "scaled-dot",
) -> Shape:
    query_width, key_width, value_width, output_width = widths or (heads * head,) * 4
    return Shape(
        batch=batch,
        query_length=query,
        key_length=key,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_size=head,
        value_head_size=value_head or head,
        query_width=query_width,
        key_width=key_width,
        value_width=value_width,
        output_width=output_width,
        bias=bias,
        sharing=sharing,
        score=score,
    )


FAMILIES: dict[str, Shape] = {
    # An even number of heads: torch takes its fused path for no other.
    "self": _shape(2, 7, 7, 4, 6, sharing="self"),
    "cross": _shape(3, 4, 6, 2, 5, sharing="memory"),
    "separate": _shape(2, 5, 7, 3, 4, widths=(12, 9, 11, 12)),
    "narrow": _shape(2, 6, 4, 3, 5, widths=(8, 7, 7, 9), sharing="memory"),
    "value-head": _shape(3, 4, 5, 2, 7, value_head=6, widths=(11, 9, 8, 11)),
    "gqa": _shape(4, 5, 7, 6, 8, kv_heads=2, widths=(10, 9, 9, 10), sharing="memory"),
    "mqa": _shape(2, 5, 5, 4, 6, kv_heads=1, widths=(9, 9, 9, 9), bias=False, sharing="self"),
    "one-query": _shape(3, 1, 6, 2, 4, sharing="memory"),
    "one-key": _shape(3, 5, 1, 2, 4),
    "one-head": _shape(2, 4, 6, 1, 5, bias=False),
    "long": _shape(1, 19, 131, 2, 8),
    # One more than a power of two: the last tile of a kernel holds a single query and key.
    "tiles": _shape(1, 129, 129, 2, 33, sharing="self"),
    # More positions than bfloat16 has whole numbers.
    "longer": _shape(1, 300, 300, 1, 4, bias=False, sharing="separate"),
    "decoding": _shape(3, 1, 20, 12, 4, kv_heads=2, widths=(24, 22, 22, 24), sharing="memory"),
    # As many tokens as heads of size 1: a bias [heads 1] can be taken for one along the tokens.
    "size-one": _shape(2, 3, 3, 3, 1, sharing="self"),
    "additive": _shape(2, 4, 6, 3, 5, sharing="memory", score="additive"),
    "additive-self": _shape(3, 6, 6, 2, 5, sharing="self", score="additive"),
}
