"""A correct attention in small stages, each of which a mutant replaces.

NumPy, forward and a backward pass by hand: a contestant, which knows nothing of the reference. It
has two paths, as libraries do: one that makes the whole matrix of weights, and a fused one that
goes over the keys in tiles and keeps a running maximum.

One instance is one call. Axes: b batch, q query, k key, h heads, d head, e width; projected heads
are `[b h length d]`. Sums are made in float32 (float64 for float64), tensors are rounded to the
dtype where they would be stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.adapter.base import Mode
from conformance.definition.dtypes import DType
from conformance.definition.problem import Shape

Array = Any
"""A NumPy array of any kind; stages are replaced at will, so they promise no more."""

INPUTS = ("query", "key", "value")


@dataclass(frozen=True, eq=False)
class Given:
    """What a call was given.

    Attributes:
        inputs: query, key and value; the same object twice where they are one array.
        weights: by canonical name, in the canonical layout.
        masks: the mask arguments that were passed: padding, mask, bias.
        causal: the flag.
        scale: factor of the logits, or None for the default.
        memory: survives the call; a correct attention has no use for it.
        wanted: what a gradient is wanted for: inputs, "weights.query", "mask.bias" and so on.
    """

    shape: Shape
    dtype: DType
    inputs: dict[str, Array]
    weights: dict[str, Array]
    masks: dict[str, Array]
    causal: bool
    scale: float | None
    mode: Mode
    memory: dict[str, Any]
    wanted: frozenset[str] = frozenset()


class Attention:
    """One call. `forward`, then `backward`; the other methods are the stages."""

    tile = 64
    diagonal = 0
    blocked = -np.inf

    def __init__(self, given: Given) -> None:
        self.given = given
        self.shape = given.shape
        self.wide = np.float64 if given.dtype.name == "float64" else np.float32
        self.own = {name: self.read(array) for name, array in given.weights.items()}
        self.batch, self.queries = given.inputs["query"].shape[:2]
        self.keys = given.inputs["key"].shape[1]
        self.group = given.shape.group
        self.kept: Array = 1.0

    # Numbers.

    def read(self, array: Array) -> Array:
        """A tensor, in the precision in which sums are made."""
        return array.astype(self.wide)

    def hold(self, values: Array) -> Array:
        """As it would be stored."""
        if self.given.dtype.name in ("float32", "float64"):
            return values.astype(self.wide)
        return self.given.dtype.round(values).astype(self.wide)

    def product(self, axes: str, left: Array, right: Array) -> Array:
        """A sum of products, by matrix products where there is much to sum."""
        return np.einsum(axes, left, right, optimize=left.size + right.size > 2**14)

    # Forward.

    def forward(self) -> tuple[Array, Array | None]:
        """Output `[b q e]`, and weights `[b h q k]` where this mode returns them."""
        self.begin()
        self.q, self.k, self.v = (self.heads(name) for name in INPUTS)
        self.attend()
        self.output = self.finish(self.merge(self.hold(self.context)))
        return self.stored(self.output), self.returned()

    def attend(self) -> None:
        """The context of projected heads `[b h q d]`, and the weights where they are wanted."""
        self.all_k, self.all_v = self.repeat(self.k), self.repeat(self.v)
        self.scores = self.score(self.q, self.all_k)
        self.logits = self.hide(self.biased(self.scaled(self.scores)))
        if self.given.mode["fused"]:
            self.context, self.log_total = self.fused(self.logits, self.all_v)
            self.weights = None
        else:
            self.weights = self.hold(self.softmax(self.logits))
            self.context = self.mix(self.dropped(self.weights), self.all_v)

    def begin(self) -> None:
        """Nothing is left to do before the first stage."""

    def input(self, name: str) -> Array:
        """One of the three inputs."""
        return self.read(self.given.inputs[name])

    def heads(self, name: str) -> Array:
        """One input, projected and split into heads."""
        return self.hold(self.split(self.project(name, self.input(name)), name))

    def project(self, name: str, values: Array) -> Array:
        """`[b length e]` to `[b length h d]`."""
        return self.shifted(name, self.product("ble,ehd->blhd", values, self.weight(name)))

    def weight(self, name: str) -> Array:
        """The weight of a projection."""
        return self.own[name]

    def shifted(self, name: str, projected: Array) -> Array:
        """Add the projection's bias, if there is one."""
        bias = self.own.get(f"{name}_bias")
        return projected if bias is None else projected + bias

    def split(self, projected: Array, name: str) -> Array:
        """`[b length h d]` to `[b h length d]`."""
        return projected.transpose(0, 2, 1, 3)

    def repeat(self, heads: Array) -> Array:
        """A key/value head for every query head."""
        return np.repeat(heads, self.group, axis=1)

    def factor(self) -> float:
        """The factor of the logits."""
        if self.given.scale is not None:
            return self.given.scale
        return 1.0 if "score" in self.own else self.default_factor()

    def default_factor(self) -> float:
        """1/√head."""
        return float(self.shape.head_size**-0.5)

    def score(self, q: Array, k: Array) -> Array:
        """`[b h q k]`: the dot product, or the additive score."""
        if "score" not in self.own:
            return self.product("bhqd,bhkd->bhqk", q, k)
        self.hidden = np.tanh(q[:, :, :, None] + k[:, :, None])
        return self.product("bhqkd,hd->bhqk", self.hidden, self.own["score"])

    def scaled(self, scores: Array) -> Array:
        """Scores times the factor."""
        return scores * self.wide(self.factor())

    def biased(self, logits: Array) -> Array:
        """Add what is to be added: a mask of numbers, and the bias."""
        mask, bias = self.given.masks.get("mask"), self.given.masks.get("bias")
        if mask is not None and mask.dtype != np.bool_:
            logits = logits + self.additive(self.read(mask))
        return logits if bias is None else logits + self.bias(self.read(bias))

    def additive(self, mask: Array) -> Array:
        """The mask of numbers, to be added."""
        return mask

    def bias(self, bias: Array) -> Array:
        """The bias, to be added."""
        return bias

    # Masks.

    def hide(self, logits: Array) -> Array:
        """Block what a query may not attend, for one mask after the other."""
        for visible in self.visible():
            logits = self.block(logits, visible)
        return logits

    def visible(self) -> Iterator[Array]:
        """The masks that were passed: True where a query may attend."""
        masks = self.given.masks
        if "padding" in masks:
            yield self.padding(masks["padding"])
        if "mask" in masks and masks["mask"].dtype == np.bool_:
            yield self.mask(masks["mask"])
        if self.given.causal:
            yield self.triangle()

    def padding(self, mask: Array) -> Array:
        """`[b k]`: True or a number other than 0 attends."""
        return (mask if mask.dtype == np.bool_ else mask != 0)[:, None, None, :]

    def mask(self, mask: Array) -> Array:
        """`[b h q k]`, or 1 along an axis: True attends."""
        return mask

    def triangle(self) -> Array:
        """The causal flag: a query sees its own key, and those before it."""
        offset = self.offset() + self.diagonal
        return np.tri(self.queries, self.keys, offset, dtype=np.bool_)

    def offset(self) -> int:
        """The first query's own key: bottom-right, so that the last query's is the last key."""
        return self.keys - self.queries

    def block(self, logits: Array, visible: Array) -> Array:
        """The logits, blocked where nothing is visible."""
        return np.where(visible, logits, self.wide(self.blocked))

    # Softmax.

    def softmax(self, logits: Array) -> Array:
        """Over the keys; a row without any visible key is 0."""
        powers = self.powers(logits - self.peak(logits))
        return self.normalised(powers, self.total(powers))

    def peak(self, logits: Array) -> Array:
        """The largest logit of each row."""
        peak = logits.max(axis=-1, keepdims=True, initial=-np.inf)
        return np.where(np.isfinite(peak), peak, self.wide(0))

    def powers(self, exponents: Array) -> Array:
        """The exponentials."""
        return np.exp(exponents)

    def total(self, powers: Array) -> Array:
        """Their sum over the keys."""
        return powers.sum(axis=-1, keepdims=True)

    def normalised(self, powers: Array, total: Array) -> Array:
        """The weights."""
        return powers / np.where(total > 0, total, self.wide(1))

    def fused(self, logits: Array, v: Array) -> tuple[Array, Array]:
        """The context and the logarithm of the normaliser, tile by tile.

        The logarithm is that of powers relative to the largest logit of the row, which is kept too:
        the sum of the two loses the former where the latter is as large as −1e9.
        """
        highest = np.full((*logits.shape[:-1], 1), -np.inf, self.wide)
        total = np.zeros_like(highest)
        context = np.zeros((*logits.shape[:-1], v.shape[-1]), self.wide)
        for start, stop in self.tiles():
            part = logits[..., start:stop]
            before, highest = highest, np.maximum(highest, self.highest(part))
            peak = np.where(np.isfinite(highest), highest, self.wide(0))
            powers = self.powers(part - peak)
            shrink = self.shrink(before, peak)
            total = total * shrink + powers.sum(axis=-1, keepdims=True)
            context = context * shrink + self.product(
                "bhqk,bhkd->bhqd", powers, v[:, :, start:stop]
            )
        peak = np.where(np.isfinite(highest), highest, self.wide(0))
        safe = np.where(total > 0, total, self.wide(1))
        self.largest = peak
        return self.rescaled(context, safe), self.log_normaliser(peak, safe)

    def log_normaliser(self, peak: Array, total: Array) -> Array:
        """The logarithm of the normaliser, which is kept for the gradients."""
        return np.log(total)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """First key and the one behind the last, for each tile."""
        for start in range(0, self.keys, self.tile):
            yield start, min(start + self.tile, self.keys)

    def highest(self, part: Array) -> Array:
        """The largest logit of each row of a tile."""
        return part.max(axis=-1, keepdims=True)

    def shrink(self, before: Array, now: Array) -> Array:
        """What the sums so far are multiplied with, since the maximum grew."""
        return np.exp(before - now)

    def rescaled(self, context: Array, total: Array) -> Array:
        """The normaliser, at the end."""
        return context / total

    # After the softmax.

    def drops(self) -> bool:
        """Whether dropout is active in this mode."""
        return bool(self.given.mode["train"])

    def dropped(self, weights: Array) -> Array:
        """Weights after dropout."""
        if self.given.mode.dropout and self.drops():
            random = np.random.default_rng(self.given.mode.draw)
            kept = random.random(weights.shape) >= self.given.mode.dropout
            self.kept = self.compensated(kept.astype(self.wide))
        return weights * self.kept

    def compensated(self, kept: Array) -> Array:
        """What is kept grows, so that the mean stays."""
        return kept / self.wide(1 - self.given.mode.dropout)

    def mix(self, weights: Array, v: Array) -> Array:
        """Weights times values."""
        return self.product("bhqk,bhkd->bhqd", weights, v)

    def merge(self, context: Array) -> Array:
        """`[b h q d]` to `[b q h d]`."""
        return context.transpose(0, 2, 1, 3)

    def finish(self, merged: Array) -> Array:
        """The output projection."""
        output = self.product("bqhd,hde->bqe", merged, self.weight("output"))
        bias = self.own.get("output_bias")
        return output if bias is None else output + bias

    def stored(self, values: Array) -> Array:
        """What the caller gets."""
        kept = "float32" if self.given.dtype.name == "bfloat16" else self.given.dtype.name
        return self.hold(values).astype(kept)

    def returned(self) -> Array | None:
        """The weights for the caller: those of the softmax, before dropout."""
        return None if self.weights is None else self.stored(self.weights)

    # Backward.

    def backward(self, cotangent: Array, of_weights: Array = None) -> dict[str, Array]:
        """Gradients by name: "query", "weights.query", ..., "mask.bias".

        `of_weights` is the gradient of the returned weights, if the loss depends on them.
        """
        found: dict[str, Array] = {}
        d_output = self.received(cotangent)
        context = self.hold(self.context)
        found["weights.output"] = self.product("bhqd,bqe->hde", context, d_output)
        found["weights.output_bias"] = d_output.sum(axis=(0, 1))
        self.d_context = self.hold(self.product("bqe,hde->bhqd", d_output, self.own["output"]))
        d_q, d_k, d_v = self.d_attention(of_weights, found)
        self.d_heads("query", d_q, found)
        self.d_heads("key", d_k, found)
        self.d_heads("value", d_v, found)
        return {name: self.gradient(name, array) for name, array in self.joined(found).items()}

    def d_attention(self, of_weights: Array, found: dict[str, Array]) -> tuple[Array, Array, Array]:
        """Of projected query, key and value; those of masks are added to what was found."""
        weights = self.weights_again()
        d_v = self.product("bhqk,bhqd->bhkd", weights * self.kept, self.d_context)
        d_weights = self.product("bhqd,bhkd->bhqk", self.d_context, self.all_v) * self.kept
        if of_weights is not None:
            d_weights = self.d_returned(d_weights, self.read(of_weights))
        d_logits = self.d_softmax(weights, d_weights)
        for name in ("mask", "bias"):
            if name in self.given.masks and self.given.masks[name].dtype != np.bool_:
                shape = self.given.masks[name].shape
                found[f"mask.{name}"] = self.d_added(d_logits, shape)
        d_scores = self.d_scaled(d_logits)
        d_q, d_k = self.d_score(d_scores, found)
        d_k, d_v = self.gather(self.hold(d_k)), self.gather_values(self.hold(d_v))
        return self.hold(d_q), self.hold(d_k), self.hold(d_v)

    def received(self, cotangent: Array) -> Array:
        """The gradient of the output."""
        return self.read(cotangent)

    def weights_again(self) -> Array:
        """The weights: kept, or made again from the logarithm of the normaliser."""
        if self.weights is not None:
            return self.weights
        return np.exp(self.logits - self.largest - self.log_total)

    def d_returned(self, d_weights: Array, of_weights: Array) -> Array:
        """Of the weights: what comes from the output, and what from those that are returned."""
        return d_weights + of_weights

    def d_softmax(self, weights: Array, d_weights: Array) -> Array:
        """The softmax's derivative."""
        return weights * (d_weights - self.row(weights, d_weights))

    def row(self, weights: Array, d_weights: Array) -> Array:
        """Its row term, `[b h q 1]`; from the context, where weights were made again."""
        if self.weights is None:
            return (self.d_context * self.context).sum(axis=-1, keepdims=True)
        return (weights * d_weights).sum(axis=-1, keepdims=True)

    def d_added(self, d_logits: Array, shape: tuple[int, ...]) -> Array:
        """Of what was added: summed along the axes over which it was broadcast."""
        axes = tuple(axis for axis, size in enumerate(shape) if size != d_logits.shape[axis])
        return d_logits.sum(axis=axes, keepdims=True)

    def d_scaled(self, d_logits: Array) -> Array:
        """Of the scores."""
        return d_logits * self.wide(self.factor())

    def d_score(self, d_scores: Array, found: dict[str, Array]) -> tuple[Array, Array]:
        """Of projected query and key."""
        if "score" not in self.own:
            return (
                self.product("bhqk,bhkd->bhqd", d_scores, self.all_k),
                self.product("bhqk,bhqd->bhkd", d_scores, self.q),
            )
        found["weights.score"] = self.product("bhqk,bhqkd->hd", d_scores, self.hidden)
        slope = self.d_tanh(self.hidden) * self.own["score"][:, None, None, :]
        d_hidden = d_scores[..., None] * slope
        return d_hidden.sum(axis=3), d_hidden.sum(axis=2)

    def d_tanh(self, hidden: Array) -> Array:
        """The slope of tanh, from its value."""
        return 1 - hidden**2

    def gather(self, gradient: Array) -> Array:
        """Sum over the query heads that share a key head."""
        batch, heads, length, size = gradient.shape
        return gradient.reshape(batch, heads // self.group, self.group, length, size).sum(axis=2)

    def gather_values(self, gradient: Array) -> Array:
        """The same for the values."""
        return Attention.gather(self, gradient)

    def d_heads(self, name: str, d_projected: Array, found: dict[str, Array]) -> None:
        """Of weight, bias and input of one projection."""
        values = self.input(name)
        found[f"weights.{name}"] = self.product("ble,bhld->ehd", values, d_projected)
        found[f"weights.{name}_bias"] = d_projected.sum(axis=(0, 2))
        found[name] = self.hold(self.product("bhld,ehd->ble", d_projected, self.own[name]))

    def joined(self, found: dict[str, Array]) -> dict[str, Array]:
        """Of each array once: inputs that share one add up, biases that are not there go."""
        sharing = self.shape.sharing
        if sharing != "separate":
            found["key"] = found["key"] + found.pop("value")
        if sharing == "self":
            found["query"] = found["query"] + found.pop("key")
        has = {f"weights.{name}" for name in self.own}
        return {n: a for n, a in found.items() if not n.startswith("weights.") or n in has}

    def gradient(self, name: str, array: Array) -> Array:
        """One gradient, as the caller gets it."""
        return self.stored(array)
