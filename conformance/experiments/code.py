"""Generate short programs that show a convention by calling the library without this suite.

They are assembled from the user code in the adapter's example. Query, key and value are one array,
so that the programs also suit implementations that support only self-attention. Each program prints
a number, or a few elements of the output, and explains it in a comment; tests run the programs and
compare the two.
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
    """Return code that prints how much the other outputs change when a token is replaced.

    Args:
        lab: the laboratory; the result is "" if its adapter has no example for its mode, or if the
            mode has no gradients.
        name: the mask argument or flag to pass, or "" for none.
        made: lines that create the array `mask`; empty for a flag.
        told: what the printed number means.
        token: the token to replace: 0 to look at later outputs, -1 to look at earlier ones.
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
    """Return code that prints how much the mask argument changes the output; see `hiding`."""
    shown = ["first = {call}", "second = {plain}", f"print(abs(first - second).max())  # {told}"]
    return _code(lab, made, name, shown)


def output(lab: Laboratory, name: str, made: Sequence[str], shown: str, told: str) -> str:
    """Return code that prints the expression `shown` of the variable `output`; see `hiding`."""
    return _code(lab, made, name, ["output = {call}", f"print({shown})  # {told}"])


def mask(layout: str, dtype: str, fill: float, mark: float | None, note: str) -> list[str]:
    """Return code lines that create the array `mask`: all `fill`, but `mark` at token 0.

    If `mark` is None, token 0 is not marked. `note` becomes a comment.
    """
    shape = layouts.shape(layout, SIZES)
    kind = "float32" if dtype == "own" else dtype

    def written(value: float) -> str:
        if kind == "bool":
            return str(bool(value))
        return "-np.inf" if np.isneginf(value) else f"{value:g}"

    made = f"mask = np.full({shape}, {written(fill)}, {kind!r})"
    if mark is not None:
        made += f"; mask[..., 0] = {written(mark)}"
    return [f"{made}  # {note}"]


def _code(lab: Laboratory, made: Sequence[str], name: str, shown: Sequence[str]) -> str:
    """Return the complete program, or "" in the cases that `hiding` names."""
    example, framework = lab.adapter.small_example(lab.mode), FRAMEWORKS.get(lab.adapter.framework)
    # A call without derivatives needs a context such as `no_grad`, which the program lacks.
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
