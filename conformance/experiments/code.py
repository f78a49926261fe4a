"""Code that shows a convention without this suite: a handful of lines in the library's own words.

Made of what the adapter says that a user types. The inputs are one array, so that the lines fit
implementations that know self-attention only. Each prints a number whose meaning stands beside it;
tests run the lines and compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES
from conformance.adapter.code import FRAMEWORKS, SMALL, lines
from conformance.requirements.laboratory import Laboratory

SIZES = dict(zip(AXES, SMALL.logits, strict=True))


def hiding(lab: Laboratory, name: str, made: Sequence[str], told: str, *, token: int = 0) -> str:
    """Return code that prints how far the other outputs move when a token is replaced.

    Args:
        lab: whose adapter has an `example` for its mode; "" without one.
        name: the argument, or "" for none.
        made: lines that make the array `mask`; none for a flag.
        told: what the number means.
        token: 0, with the outputs after it looked at, or -1, with those before.
    """
    rows = "1:" if token == 0 else ":-1"
    return _code(
        lab,
        made,
        name,
        [
            "first = {call}",
            f"x = x.copy(); x[:, {token}] += 1  # another token",
            "query = key = value = {x}",
            "second = {call}",
            f"print(abs(first - second)[:, {rows}].max())  # {told}",
        ],
    )


def difference(lab: Laboratory, name: str, made: Sequence[str], told: str) -> str:
    """Return code that prints how far the argument moves the output."""
    shown = ["first = {call}", "second = {plain}", f"print(abs(first - second).max())  # {told}"]
    return _code(lab, made, name, shown)


def output(lab: Laboratory, name: str, made: Sequence[str], shown: str, told: str) -> str:
    """Return code that prints an expression of `output`."""
    return _code(lab, made, name, ["output = {call}", f"print({shown})  # {told}"])


def mask(layout: str, dtype: str, fill: float, mark: float | None, note: str) -> list[str]:
    """Return lines that create the array `mask`: all `fill`, but `mark` at token 0."""
    shape = layouts.shape(layout, SIZES)
    kind = "float32" if dtype == "own" else dtype
    made = f"mask = np.full({shape}, {_written(fill, kind)}, {kind!r})"
    if mark is not None:
        made += f"; mask[..., 0] = {_written(mark, kind)}"
    return [f"{made}  # {note}"]


def _code(lab: Laboratory, made: Sequence[str], name: str, shown: Sequence[str]) -> str:
    """Return the complete program; "" if the adapter does not describe the user's code."""
    example, framework = lab.adapter.small_example(lab.mode), FRAMEWORKS.get(lab.adapter.framework)
    # Without derivatives the call needs a context, which these lines do not have.
    if example is None or framework is None or not lab.mode.gradients:
        return ""
    masks = {name: framework.array("mask") if made else "True"} if name else {}
    replaced = {
        "{call}": framework.numpy.format(example.expression(masks)),
        "{plain}": framework.numpy.format(example.expression({})),
        "{x}": framework.array("x"),
    }
    sizes = SMALL.input_shapes()["query"]
    program = [
        *framework.imports(example),
        f'x = np.random.default_rng(0).normal(size={sizes}).astype("float32")',
        "query = key = value = {x}",
        *lines(example.build),
        *lines(example.fresh),
        *made,
        *shown,
    ]
    for mark, code in replaced.items():
        program = [line.replace(mark, code) for line in program]
    return "\n".join(program)


def _written(value: float, dtype: str) -> str:
    if dtype == "bool":
        return str(bool(value))
    return "-np.inf" if np.isneginf(value) else f"{value:g}"
