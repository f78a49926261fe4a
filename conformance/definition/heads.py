"""The steps between projection and scores for query and key heads: RMS norm and rotation.

With x a projected head, g the gain of the norm, n the head size and p the token's position:

    ρ = √(mean(x²) + ε)        y = x g / ρ        dx = (g dy − x Σ(x g dy) / (n ρ²)) / ρ
    z = rotated(y, p)          dy = rotated(dz, −p)          dg = Σ dy x / ρ

Implementations compute the cosines and sines of the rotation once, as tables for all heads and
batch entries. They compute angles in float32 or better whatever the dtype, because bfloat16 cannot
represent all positions beyond 256. Programs that round every operation round the tables too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.definition.arithmetic import Exact
from conformance.definition.dtypes import Array, IntArray
from conformance.definition.features import Rotary
from conformance.definition.problem import Problem


@dataclass(frozen=True, eq=False)
class Normed:
    """Heads divided by `root`, which is √(mean(x²) + ε) of each head, `[batch heads length 1]`."""

    heads: Array
    root: Array


@dataclass(frozen=True, eq=False)
class Tables:
    """The cosine and sine of the rotary angle of each token and pair of components.

    The axes are `[batch 1 length size/2]`, where `size` components of each head are rotated.
    """

    cosine: Array
    sine: Array


@dataclass(frozen=True, eq=False)
class Prepared:
    """Query or key heads after norm and rotation, with what the backward pass needs.

    `normed` and `tables` are None if the problem has no norm or no rotation.
    """

    heads: Array
    normed: Normed | None = None
    tables: Tables | None = None


def prepared(problem: Problem, query: Array, key: Array, hold: Exact) -> tuple[Prepared, Prepared]:
    """Return the projected queries and keys after any norm and rotation that the problem has."""
    tables = (
        (None, None)
        if problem.rotary is None
        else _tables(problem, problem.rotary, query.dtype, hold)
    )
    norm = problem.norm
    gains = (None, None) if norm is None else (norm.query, norm.key)
    found = []
    for heads, gain, table in zip((query, key), gains, tables, strict=True):
        normed = None
        if norm is not None and gain is not None:
            normed = _normed(heads, norm.epsilon, hold)
            heads = hold(normed.heads * gain, "tensor")
        if problem.rotary is not None and table is not None:
            heads = _rotated(heads, problem.rotary, table.cosine, table.sine, hold)
        found.append(Prepared(heads, normed, table))
    return found[0], found[1]


def gradients_of_prepared(
    problem: Problem, role: str, gradient: Array, after: Prepared, hold: Exact
) -> tuple[Array, dict[str, Array]]:
    """Return the gradient of the projected heads, and a dictionary with that of the norm's gain.

    The dictionary is empty if the problem has no norm.

    Args:
        problem: the problem.
        role: "query" or "key".
        gradient: the gradient of the prepared heads.
        after: the prepared heads.
        hold: the arithmetic.
    """
    if problem.rotary is not None and after.tables is not None:
        back = -after.tables.sine
        gradient = _rotated(gradient, problem.rotary, after.tables.cosine, back, hold)
    if problem.norm is None or after.normed is None:
        return gradient, {}
    gain, normed = getattr(problem.norm, role), after.normed
    d_gain = hold.contract("...bhqd,...bhqd->...d", gradient, normed.heads, "tensor")
    d_normed = hold(gradient * gain, "tensor")
    along = hold.contract("...bhqd,...bhqd->...bhq", d_normed, normed.heads, "logits")
    mean = hold(along / problem.shape.head_size, "logits")[..., None]
    across = hold(d_normed - hold(normed.heads * mean, "logits"), "logits")
    return hold(across / normed.root, "tensor"), {f"norm.{role}": d_gain}


def _normed(heads: Array, epsilon: float, hold: Exact) -> Normed:
    squares = hold.contract("...bhqd,...bhqd->...bhq", heads, heads, "logits")
    mean = hold(squares / heads.shape[-1], "logits")
    root = hold(np.sqrt(mean + epsilon), "logits")[..., None]
    return Normed(hold(heads / root, "tensor"), root)


def _tables(
    problem: Problem, rotary: Rotary, kind: np.dtype[Any], hold: Exact
) -> tuple[Tables, Tables]:
    """Return the tables of queries and of keys, both taken from one table for all positions."""
    sides = (problem.position_of_queries, problem.position_of_keys)
    positions = np.unique(np.concatenate([side.ravel() for side in sides]))
    exponents = hold.lift(-math.log(rotary.base) * np.arange(0, rotary.size, 2) / rotary.size)
    frequencies = np.exp(exponents)
    angles = positions[:, None] * frequencies[..., None, :]
    # Errors of angles come from the frequency, shared by all positions, and from the product.
    wrong = hold.error(exponents, "angle") + hold.error(np.ones_like(exponents), "angle")
    off = angles * wrong[..., None, :] + hold.error(angles, "angle")
    cosine, sine = np.cos(angles), np.sin(angles)
    # To first order, because float64 has no digits for the noise of a large angle in float64.
    cosine, sine = cosine - off * sine, sine + off * cosine
    cosine, sine = (hold(table.astype(kind), "logits") for table in (cosine, sine))

    def of(tokens: IntArray) -> Tables:
        index = np.searchsorted(positions, tokens)
        return Tables(*(table[..., index, :][..., None, :, :] for table in (cosine, sine)))

    return of(sides[0]), of(sides[1])


def _rotated(heads: Array, rotary: Rotary, cosine: Array, sine: Array, hold: Exact) -> Array:
    """Return heads with their first `rotary.size` components rotated and the others unchanged."""
    half = rotary.size // 2
    if rotary.pairs == "halves":
        places = slice(half), slice(half, rotary.size)
    else:
        places = slice(0, rotary.size, 2), slice(1, rotary.size, 2)
    first, second = (heads[..., place] for place in places)
    halves = (
        hold(hold(first * cosine, "logits") - hold(second * sine, "logits"), "tensor"),
        hold(hold(second * cosine, "logits") + hold(first * sine, "logits"), "tensor"),
    )
    # Heads that are given, not projected, have one sample, but rounded tables have several.
    turned = np.empty((*halves[0].shape[:-1], heads.shape[-1]), heads.dtype)
    turned[..., rotary.size :] = heads[..., rotary.size :]
    for place, half_turned in zip(places, halves, strict=True):
        turned[..., place] = half_turned
    return turned
