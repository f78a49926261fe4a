"""Hypothesis strategies for recipes within what an implementation can express.

What it can express is found out first, by asking its adapter about one small problem for each
feature, so that few of the problems that are drawn have to be thrown away.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from conformance.adapter.base import Adapter, Mode
from conformance.definition.problem import Causal, Sharing
from conformance.errors import ConformanceError, Unsupported
from conformance.explore.recipe import (
    BIASES,
    MASKS,
    REGIMES,
    SCALES,
    Frame,
    Recipe,
    Widths,
)

SHARINGS: tuple[Sharing, ...] = ("self", "memory", "separate")
WIDTHS: tuple[Widths, ...] = ("equal", "memory", "free")
CAUSAL: tuple[Causal | None, ...] = (None, "top-left", "bottom-right")
MOST_SEEDS = 2**16


@dataclass(frozen=True)
class Limits:
    """What an implementation can express."""

    frames: tuple[Frame, ...]
    grouped: bool
    value_heads: bool
    scales: bool
    masks: tuple[tuple[str, str, Causal | None], ...]
    """Which mask, additive bias and causal flag go together."""


@dataclass(frozen=True)
class Drawn:
    """One problem, and how to put it."""

    recipe: Recipe
    dtype: str
    mode: str


def learn(adapter: Adapter, dtype: str) -> Limits:
    """What the adapter can express, asked with one small problem for each feature.

    Raises:
        Unsupported: not even the plainest problem.
    """
    frames = [
        Frame(score=score, sharing=sharing, widths=widths, bias=bias)  # type: ignore[arg-type]
        for score, sharing, widths, bias in itertools.product(
            ("scaled-dot", "additive"), SHARINGS, WIDTHS, (True, False)
        )
    ]
    known = [frame for frame in frames if _takes(adapter, Recipe(frame=frame), dtype)]
    if not known:
        raise Unsupported("it takes none of the plainest problems")

    def any_frame(**changes: object) -> bool:
        return any(
            _takes(adapter, Recipe(frame=frame, **changes), dtype)  # type: ignore[arg-type]
            for frame in known
        )

    masks = [
        (mask, bias, causal)
        for mask, bias, causal in itertools.product(MASKS, BIASES, CAUSAL)
        if any_frame(mask=mask, bias=bias, causal=causal)
    ]
    return Limits(
        tuple(known),
        any_frame(group=2),
        any_frame(value_size=2),
        any_frame(scale=0.75),
        tuple(masks),
    )


def _takes(adapter: Adapter, recipe: Recipe, dtype: str) -> bool:
    try:
        adapter.check(recipe.problem(dtype))
    except (Unsupported, ConformanceError):
        return False
    except Exception:
        # A mistake in the adapter's own check is a finding, so it must come up.
        return True
    return True


def modes_of(adapter: Adapter, dtype: str, wanted: Sequence[str]) -> Iterator[Mode]:
    """The modes that are searched in this dtype."""
    for mode in adapter.modes:
        if (not wanted or mode.name in wanted) and (mode.dtypes is None or dtype in mode.dtypes):
            yield mode


@st.composite
def drawings(
    draw: DrawFn,
    limits: Limits,
    asked: Sequence[tuple[str, str]],
    few_shapes: bool,
) -> Drawn:
    """Recipes with dtype and mode; `few_shapes` where each new one is compiled.

    Simple things come first in every choice, because that is where hypothesis shrinks to.
    """
    dtype, mode = draw(st.sampled_from(asked))
    frame = draw(st.sampled_from(limits.frames))
    lengths = st.sampled_from((1, 2, 5, 9)) if few_shapes else _lengths()
    query = draw(lengths)
    key = query if frame.sharing == "self" else draw(lengths)
    kinds = [kind for kind in limits.masks if _fits(kind, query, key)]
    mask, bias, causal = draw(st.sampled_from(kinds or [("none", "none", None)]))
    sizes = st.sampled_from((1, 2, 3)) if few_shapes else st.integers(1, 6)
    regimes = [
        name
        for name in REGIMES
        if (frame.score == "scaled-dot" or not name.endswith("-logits"))
        and (frame.sharing != "self" or name != "huge-logits")
    ]
    recipe = Recipe(
        frame=frame,
        batch=draw(st.integers(1, 2 if few_shapes else 3)),
        query=query,
        key=key,
        kv_heads=draw(st.integers(1, 2 if few_shapes else 4)),
        group=draw(st.integers(1, 3)) if limits.grouped else 1,
        size=draw(sizes),
        value_size=draw(st.integers(0, 4)) if limits.value_heads else 0,
        extra=draw(st.integers(1, 3)) if frame.widths != "equal" else 1,
        mask=mask,
        bias=bias,
        causal=causal,
        scale=draw(st.sampled_from(SCALES)) if limits.scales else None,
        regime=draw(st.sampled_from(regimes)),
        seed=draw(st.integers(0, MOST_SEEDS)),
    )
    if recipe.scale is not None and recipe.regime == "huge-logits":
        return Drawn(dataclasses.replace(recipe, scale=None), dtype, mode)
    return Drawn(recipe, dtype, mode)


def _lengths() -> SearchStrategy[int]:
    return st.one_of(st.integers(1, 6), st.integers(1, 12), st.integers(1, 40))


def _fits(kind: tuple[str, str, Causal | None], query: int, key: int) -> bool:
    """Whether these lengths leave something to block, and every query a key."""
    mask, _, causal = kind
    return (mask == "none" or key > 1) and (causal != "bottom-right" or key >= query)
