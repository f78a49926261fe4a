"""Compare two outputs without the heads that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from conformance.arrays import figure
from conformance.arrays.diagnosis import Diagnosis, Difference, told
from conformance.arrays.given import (
    AXES_IN_ORDER,
    FEWEST,
    LAYOUTS,
    MERGED,
    Numbers,
    laid_out,
    split,
)
from conformance.arrays.likeness import (
    Measure,
    in_one_shape,
    multiplied,
    related,
    rounded,
    transposed,
)
from conformance.causes.hypothesis import rms
from conformance.causes.location import where_wrong
from conformance.definition import comparison
from conformance.definition.comparison import BETWEEN_ANSWERS, element
from conformance.definition.dtypes import Array, dtype_of
from conformance.definition.expectation import expect
from conformance.definition.problem import Problem, Shape, identities
from conformance.errors import BadArrays
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

    If the shapes differ, axes are put into the order, and those that are joined are divided, by
    which the outputs have most in common. What is said of outputs that deviate from each other is
    how one comes from the other, such as by a factor or another order of heads.

    Raises:
        BadArrays: if no order of axes brings the outputs into one shape, or they are no numbers.
    """
    one, two = Numbers.of("output", output), Numbers.of("the other output", other)
    for name, numbers in (("output", one), ("the other output", two)):
        if numbers.values.dtype != np.float64 or not numbers.values.size:
            raise BadArrays(f"{name} holds no floating-point numbers, but {numbers.dtype}")
    this, that = np.atleast_1d(one.values), np.atleast_1d(two.values)
    sides: Sequence[Array] = (this, that)
    read: list[Phrase] = []
    if this.shape != that.shape:
        first, second, order = in_one_shape(this, that)
        sides = (first, second)
        read = [order.phrase("reading.axes-of-other")]
        if layout and len(split(layout)) != sides[0].ndim:
            layout = ""
    if not layout and sides[0].ndim not in LAYOUTS:
        sizes = [size for size in sides[0].shape if size > 1]
        # Whatever the other axes are, the last one holds the components.
        kept = sizes if len(sizes) in LAYOUTS else [-1, *(sizes[-1:] or [1])]
        sides = [it.reshape(kept) for it in sides]
    count = sides[0].ndim
    listed = [MERGED[count]] if heads and count in MERGED else [*LAYOUTS.get(count, ())]
    if not layout and len(listed) > 1:
        read.append(Phrase("reading.layout", {"layout": listed[0]}))
    layout = layout or listed[0]
    got, want = (laid_out("output", it, layout, heads) for it in sides)
    name = dtype or max(
        (one.dtype, two.dtype, _narrowest(one), _narrowest(two)),
        key=lambda it: dtype_of(it).roundoff,
    )
    underflow = dtype_of(name).underflow
    measure = Measure(_relative_noise(name, got.shape), underflow)
    sigma = measure.sigma(want)
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
    causes: list[Phrase] = []
    if not compared.fits:
        causes = [*transposed(this, that, measure)]
        causes = causes or [*related(got, want, wrong, measure)]
        causes = causes or [*multiplied(this, that, measure)]
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
        causes=[*map(told, causes)],
        assumed=[*map(told, read)],
        notes=[*map(told, _notes(got, want))],
        map=figure.of_ratios(ratio, BETWEEN_ANSWERS),
    )


def between_outputs(output: Any, other: Any, **options: Any) -> Diagnosis:
    """Return what `against` says of two outputs, and if they differ, how to learn the mistake.

    The options are those of `against`.

    Raises:
        BadArrays: as `against` does.
    """
    found = against(output, other, **options)
    if found.verdict == "noise":
        return found
    note = told(Phrase("outputs.alone"))
    return msgspec.structs.replace(found, notes=[*found.notes, note])


def _notes(got: Array, want: Array) -> Iterator[Phrase]:
    """Yield how far two outputs are apart, whether one is rounded, and by what they are judged."""
    known = np.isfinite(got) & np.isfinite(want)
    size = rms(want[known])
    if (got != want).any() and size > 0:
        percent = float(f"{100 * rms((got - want)[known]) / size:.2g}")
        yield Phrase("outputs.apart", {"percent": percent})
    yield from rounded(got, want)
    yield Phrase("arrays.noise-of-random-heads")


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
