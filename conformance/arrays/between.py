"""Compare two outputs without the heads that they come from, or two callables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.arrays import figure
from conformance.arrays.diagnosis import Diagnosis, Difference, diagnose, told, where_wrong
from conformance.arrays.given import (
    AXES_IN_ORDER,
    FEWEST,
    LAYOUTS,
    MERGED,
    Numbers,
    identities,
    laid_out,
)
from conformance.definition import comparison
from conformance.definition.comparison import BETWEEN_ANSWERS, element
from conformance.definition.dtypes import Array, dtype_of
from conformance.definition.expectation import expect
from conformance.definition.problem import Problem, Shape
from conformance.errors import BadArrays
from conformance.frameworks import BRIDGES, framework
from conformance.frameworks.base import Natives, Request
from conformance.records.findings import NOTHING, Phrase
from conformance.records.numbers import ratios

MOST = 128
"""The most tokens of the random problem whose noise is the measure."""


@np.errstate(all="ignore")
def against(
    output: Any,
    other: Any,
    *,
    dtype: str = "",
    layout: str = "",
    heads: int | None = None,
) -> Diagnosis:
    """Say which differences of two outputs are noise, and what the others have in common.

    Without query, key and value, σ cannot be that of this problem. It is that of attention on
    random heads of the same size and as many tokens, up to 128, relative to the rms of each row.

    Args:
        output: one of the outputs.
        other: the other one.
        dtype: the dtype in which they were computed; "" for the narrowest of their own.
        layout: as for `conformance.diagnose`.
        heads: as for `conformance.diagnose`.

    Raises:
        BadArrays: if the shapes differ.
    """
    one, two = Numbers.of("output", output), Numbers.of("the other output", other)
    for name, numbers in (("output", one), ("the other output", two)):
        if numbers.values.dtype != np.float64 or not numbers.values.size:
            raise BadArrays(f"{name} holds no floating-point numbers, but {numbers.dtype}")
    if one.values.shape != two.values.shape:
        raise BadArrays(
            f"the outputs have different shapes, {list(one.values.shape)} and "
            f"{list(two.values.shape)}; bring them into one layout"
        )
    count = one.values.ndim
    listed = [MERGED[count]] if heads and count in MERGED else [*LAYOUTS.get(count, ())]
    if not layout and not listed:
        raise BadArrays(f"the outputs have {count} axes; say what they are: layout= (--layout)")
    assumed = (
        [] if layout or len(listed) == 1 else [Phrase("reading.layout", {"layout": listed[0]})]
    )
    layout = layout or listed[0]
    got, want = (laid_out("output", it.values, layout, heads) for it in (one, two))
    name = dtype or max(
        (one.dtype, two.dtype, _narrowest(one), _narrowest(two)),
        key=lambda it: dtype_of(it).roundoff,
    )
    share = _relative_noise(name, got.shape)
    size = np.sqrt(np.nanmean(np.where(np.isfinite(want), want, np.nan) ** 2, -1, keepdims=True))
    sigma = np.broadcast_to(share * np.nan_to_num(size), got.shape)
    underflow = dtype_of(name).underflow
    both = np.isnan(got) & np.isnan(want)
    got, want = np.where(both, 0.0, got), np.where(both, 0.0, want)
    compared = comparison.compare("output", got, want, sigma, underflow, BETWEEN_ANSWERS)
    ratio = np.abs(ratios(got, want, sigma, underflow))
    wrong = ratio > BETWEEN_ANSWERS
    worst, where = None, NOTHING
    if not compared.fits:
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        worst = element("output", at, got[at], want[at], sigma[at])
        where = where_wrong(np.asarray(wrong.any(axis=-1)))
    difference = Difference(
        array="output",
        fits=compared.fits,
        max_ratio=compared.figures.max_ratio,
        rms_ratio=compared.figures.rms_ratio,
        limit=BETWEEN_ANSWERS,
        wrong=int(wrong.sum()),
        size=got.size,
        worst=worst,
        where=told(where) if where else None,
    )
    return Diagnosis(
        verdict="noise" if compared.fits else "deviates",
        dtype=name,
        accuracy="",
        layout=layout,
        differences=[difference],
        assumed=[*map(told, assumed)],
        notes=[told(Phrase("arrays.noise-of-random-heads"))],
        map=figure.of_ratios(ratio, BETWEEN_ANSWERS),
    )


def compare(
    old: Callable[..., Any],
    new: Callable[..., Any],
    *inputs: Any,
    frameworks: tuple[str, str] | None = None,
    heads: bool | None = None,
    gradients: bool = True,
    **told: Any,
) -> Diagnosis:
    """Call two implementations with the same inputs, and diagnose the second beside the first.

    If the inputs are query, key and value as heads, both outputs and the gradients of the second
    are compared with the definition, and the mistake is named. Otherwise, such as for layers with
    weights of their own, the second output is compared with the first, as `against` does.

    Args:
        old: a function or layer that takes the inputs and returns the output, or a tuple that
            begins with it.
        new: another one, which is diagnosed.
        inputs: arrays, which each side gets in its framework.
        frameworks: the frameworks of both, such as ("torch", "jax"); None for that of the inputs.
        heads: whether the inputs are query, key and value as heads; None if there are three of
            them, with at least three axes each.
        gradients: whether to differentiate the second, if its framework does.
        told: the other arguments of `diagnose`, or of `against`.

    Raises:
        ConformanceError: as `diagnose` or `against` does, or if a framework is not installed.
    """
    numbers = [Numbers.of(f"input {n}", array) for n, array in enumerate(inputs)]
    own = _framework_of(inputs)
    names = frameworks or (own, own)
    if heads is None:
        heads = len(inputs) == 3 and all(it.values.ndim >= 3 for it in numbers)
    first, _ = _called(old, names[0], numbers, None)
    if not heads:
        second, _ = _called(new, names[1], numbers, None)
        return against(second, first, **told)
    cotangent = None
    if gradients and framework(names[1]).differentiable:
        random = np.random.Generator(np.random.PCG64(0))
        rounded = dtype_of(first.dtype).round
        cotangent = rounded(random.standard_normal(first.values.shape))
    second, derived = _called(new, names[1], numbers, cotangent)
    if derived:
        told["gradients"] = {"output": cotangent, **derived}
    query, key, value = numbers
    return diagnose(query, key, value, second, wanted=first, **told)


def _framework_of(inputs: Sequence[Any]) -> str:
    module = type(inputs[0]).__module__.partition(".")[0] if inputs else "numpy"
    module = {"jaxlib": "jax"}.get(module, module)
    return module if module in BRIDGES else "numpy"


def _called(
    function: Callable[..., Any], name: str, numbers: Sequence[Numbers], cotangent: Array | None
) -> tuple[Numbers, dict[str, Numbers]]:
    """Return the output for these inputs, and the gradients of the first three, if asked for."""
    bridge = framework(name)
    dtype = next((it.dtype for it in numbers if it.values.dtype == np.float64), "float32")
    with bridge.session(dtype, "cpu"):
        natives = {str(n): bridge.array(it.values, it.dtype, "cpu") for n, it in enumerate(numbers)}
        variables = natives if cotangent is not None else {}
        constants = {} if cotangent is not None else natives

        def called(variables: Natives, constants: Natives) -> tuple[Any, Any]:
            given = {**constants, **variables}
            found = function(*(given[str(n)] for n in range(len(numbers))))
            return (found[0] if isinstance(found, tuple | list) else found), None

        if cotangent is None:
            output, _ = called(variables, constants)
            return Numbers(np.asarray(bridge.numpy(output)), bridge.dtype(output)), {}
        request = Request(
            function=called,
            variables=variables,
            constants=constants,
            cotangent=bridge.array(cotangent, dtype, "cpu"),
            gradients=True,
            program=("compare", id(function)),
        )
        result = bridge.evaluate(request)
        derived = {
            side: Numbers(np.asarray(bridge.numpy(result.gradients[str(n)])), dtype)
            for n, side in enumerate(("query", "key", "value"))
            if str(n) in result.gradients
        }
        output = result.output
        return Numbers(np.asarray(bridge.numpy(output)), bridge.dtype(output)), derived


def _narrowest(numbers: Numbers) -> str:
    """Return the narrowest dtype that holds all the numbers."""
    finite = numbers.values[np.isfinite(numbers.values)]
    if finite.size < FEWEST or not finite.any():
        return numbers.dtype
    for name in ("bfloat16", "float16", "float32"):
        if np.array_equal(dtype_of(name).round(finite), finite):
            return name
    return numbers.dtype


def _relative_noise(dtype: str, sizes: tuple[int, ...]) -> float:
    """Return σ of attention on random heads, relative to the rms of the output."""
    tokens, size = min(MOST, sizes[AXES_IN_ORDER.index("length")]), sizes[-1]
    shape = Shape.of_heads((1, 1, tokens, size), (1, 1, tokens, size))
    random = np.random.Generator(np.random.PCG64(0))

    def drawn() -> Array:
        return dtype_of(dtype).round(random.standard_normal((1, tokens, size)))

    problem = Problem(
        shape=shape,
        dtype=dtype,
        weights=identities(shape),
        heads_alone=True,
        query=drawn(),
        key=drawn(),
        value=drawn(),
        cotangent=drawn(),
    )
    found = expect(problem, gradients=False)
    want, sigma = found.arrays["output"], found.sigma["output"]
    return float(np.sqrt((sigma**2).mean() / (want**2).mean()))
