"""What several implementations ask of the shape of a layer, and what is said if it is another."""

from collections.abc import Callable

from conformance import Shape, Unsupported

_ASKED: dict[str, tuple[Callable[[Shape], bool], str]] = {
    "self": (lambda it: it.sharing == "self", "self-attention only"),
    "memory": (lambda it: it.sharing != "separate", "key and value are projected from one input"),
    "heads": (lambda it: it.kv_heads == it.heads, "no fewer key/value heads than query heads"),
    "values": (lambda it: it.value_head_size == it.head_size, "no value head size of its own"),
    "query": (
        lambda it: it.heads * it.head_size == it.query_width,
        "heads x head size must be the query's width",
    ),
    "width": (
        lambda it: it.heads * it.head_size == it.query_width,
        "heads x head size must be the width",
    ),
    "output": (lambda it: it.output_width == it.query_width, "the output is as wide as the query"),
    "biases": (lambda it: it.bias, "the projections always have biases"),
    "even": (lambda it: it.head_size % 2 == 0, "no odd head size"),
}
"""By name, what a shape must be, and what is said of one that is not."""


def ask(shape: Shape, *names: str) -> None:
    """Raise `Unsupported` for the first of the named conditions that the shape does not meet."""
    for name in names:
        fits, otherwise = _ASKED[name]
        if not fits(shape):
            raise Unsupported(otherwise)
