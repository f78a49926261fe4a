"""The definition in stages, in float64, each of which a hypothesis may replace.

What many defects give is the right answer to another problem, and the reference can be asked that.
What the others give is the answer of a computation with one step done otherwise: softmax over
another axis, heads merged in another order, a gradient without its scale. This is the definition of
`conformance.definition.problem` again, cut where such steps are; it decides no verdict.

Axes: b batch, q query, k key, h heads, d head, e width; projected heads are `[b h length d]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import MethodType
from typing import Any

import numpy as np

from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Problem

Change = Callable[..., Any]
"""What stands for a stage: a function of the `Stages` and of what the stage takes."""


class Stages:
    """One computation. Stages are methods; `changes` replaces some of them."""

    def __init__(self, problem: Problem, **changes: Change) -> None:
        self.problem = problem
        self.shape = problem.shape
        self.own = problem.weights.named()
        for name, change in changes.items():
            assert hasattr(Stages, name), name
            setattr(self, name, MethodType(change, self))

    # Forward

    @cached_property
    def projected(self) -> dict[str, Array]:
        """Query, key and value in heads."""
        return {name: self.heads(name) for name in ("query", "key", "value")}

    @cached_property
    def scores(self) -> Array:
        """Before the scale."""
        return self.score(self.projected["query"], self.repeat(self.projected["key"], "key"))

    @cached_property
    def shown(self) -> Array:
        """The logits before the mask."""
        return self.held("logits", self.biased(self.scaled(self.scores)))

    @cached_property
    def logits(self) -> Array:
        """-inf where blocked."""
        return self.hide(self.shown)

    @cached_property
    def weights(self) -> Array:
        """`[b h q k]`."""
        return self.held("weights", self.softmax(self.logits))

    @cached_property
    def values(self) -> Array:
        """`[b h k d]`, for all heads."""
        return self.repeat(self.projected["value"], "value")

    @cached_property
    def context(self) -> Array:
        """`[b h q d]`."""
        return self.held("context", self.mix(self.weights, self.values))

    @cached_property
    def output(self) -> Array:
        """`[b q e]`; NaN where a query may attend no key: there is no one answer there.

        Infinite where weights are, which stands for anything that is wrong.
        """
        found = self.finished(np.where(np.isinf(self.context), 0.0, self.context))
        broken = np.asarray(np.isinf(self.weights).any(axis=(1, 3)))
        return np.where(broken[..., None], np.inf, found)

    def finished(self, context: Array) -> Array:
        """The output of a context."""
        output = self.held("output", self.finish(self.merge(context)))
        empty = ~np.any(self.problem.allowed_in_full(), axis=-1).all(axis=1)
        return np.where(empty[..., None], np.nan, output)

    def held(self, what: str, values: Array) -> Array:
        """An intermediate as it is stored: see `conformance.causes.precision.STAGES`."""
        return values

    def product(self, axes: str, left: Array, right: Array) -> Array:
        """A sum of products."""
        return np.einsum(axes, left, right)

    def input(self, name: str) -> Array:
        """One of the three."""
        found: Array = getattr(self.problem, name)
        return found

    def weight(self, name: str) -> Array:
        """Of one projection."""
        return self.own[name]

    def heads(self, name: str) -> Array:
        """Projected and split."""
        return self.held("projections", self.split(self.project(name, self.input(name)), name))

    def project(self, name: str, values: Array) -> Array:
        """`[b length h d]`."""
        return self.shifted(name, self.product("ble,ehd->blhd", values, self.weight(name)))

    def shifted(self, name: str, projected: Array) -> Array:
        """With its bias."""
        bias = self.own.get(f"{name}_bias")
        return projected if bias is None else projected + bias

    def split(self, projected: Array, name: str) -> Array:
        """`[b h length d]`."""
        return projected.transpose(0, 2, 1, 3)

    def repeat(self, heads: Array, name: str) -> Array:
        """To as many heads as the query has."""
        return np.repeat(heads, self.shape.group, axis=1)

    def score(self, q: Array, k: Array) -> Array:
        """Dot product, or additive."""
        if "score" not in self.own:
            return self.product("bhqd,bhkd->bhqk", q, k)
        return self.product("bhqkd,hd->bhqk", self.tanh(q, k), self.own["score"])

    def tanh(self, q: Array, k: Array) -> Array:
        """Of the additive score."""
        return np.tanh(q[:, :, :, None] + k[:, :, None])

    def scaled(self, scores: Array) -> Array:
        """Times the scale."""
        return scores * self.problem.logit_scale

    def biased(self, logits: Array) -> Array:
        """Plus the bias."""
        bias = self.problem.attn_bias
        return logits if bias is None else logits + self.held("bias", bias)

    @cached_property
    def allowed(self) -> BoolArray:
        """`[b h q k]`."""
        return self.problem.allowed_in_full()

    def hide(self, logits: Array) -> Array:
        """Blocked."""
        return np.where(self.allowed, logits, -np.inf)

    def softmax(self, logits: Array) -> Array:
        """Over the keys; 0 in an empty row."""
        peak = logits.max(axis=-1, keepdims=True)
        powers = np.exp(logits - np.where(np.isfinite(peak), peak, 0.0))
        total = powers.sum(axis=-1, keepdims=True)
        return powers / np.where(total > 0, total, 1.0)

    def mix(self, weights: Array, values: Array) -> Array:
        """Weights times values."""
        return self.product("bhqk,bhkd->bhqd", weights, values)

    def merge(self, context: Array) -> Array:
        """`[b q h d]`."""
        return context.transpose(0, 2, 1, 3)

    def finish(self, merged: Array) -> Array:
        """The output's projection."""
        output = self.product("bqhd,hde->bqe", merged, self.weight("output"))
        bias = self.own.get("output_bias")
        return output if bias is None else output + bias

    # Backward

    @cached_property
    def gradients(self) -> dict[str, Array]:
        """By canonical name, as an answer has them."""
        found: dict[str, Array] = {}
        above = self.received()
        found["weights.output"] = np.einsum("bhqd,bqe->hde", self.context, above)
        found["weights.output_bias"] = above.sum(axis=(0, 1))
        self.d_context = np.einsum("bqe,hde->bhqd", above, self.own["output"])
        weights = self.weights_again()
        d_values = np.einsum("bhqk,bhqd->bhkd", weights, self.d_context)
        d_weights = np.einsum("bhqd,bhkd->bhqk", self.d_context, self.values)
        d_logits = self.d_softmax(weights, d_weights)
        if self.problem.attn_bias is not None:
            found["attn_bias"] = self.d_bias(d_logits, self.problem.attn_bias.shape)
        d_query, d_key = self.d_score(self.d_scaled(d_logits), found)
        parts = {
            "query": d_query,
            "key": self.gather(d_key, "key"),
            "value": self.gather(d_values, "value"),
        }
        inputs: dict[str, Array] = {}
        for name, part in parts.items():
            found[f"weights.{name}"] = np.einsum("ble,bhld->ehd", self.input(name), part)
            found[f"weights.{name}_bias"] = part.sum(axis=(0, 2))
            inputs[name] = np.einsum("bhld,ehd->ble", part, self.own[name])
        found |= self.joined(inputs)
        has = {f"weights.{name}" for name in self.own}
        return {n: a for n, a in found.items() if not n.startswith("weights.") or n in has}

    def received(self) -> Array:
        """The cotangent."""
        return self.problem.cotangent

    def weights_again(self) -> Array:
        """The weights, as the backward pass has them."""
        return self.weights

    def d_softmax(self, weights: Array, d_weights: Array) -> Array:
        """The softmax's derivative."""
        return weights * (d_weights - self.row(weights, d_weights))

    def row(self, weights: Array, d_weights: Array) -> Array:
        """Its row term, `[b h q 1]`."""
        return (weights * d_weights).sum(axis=-1, keepdims=True)

    def d_bias(self, d_logits: Array, shape: tuple[int, ...]) -> Array:
        """Summed over the axes along which it was broadcast."""
        axes = tuple(axis for axis, size in enumerate(shape) if size != d_logits.shape[axis])
        return d_logits.sum(axis=axes, keepdims=True)

    def d_scaled(self, d_logits: Array) -> Array:
        """Of the scores."""
        return d_logits * self.problem.logit_scale

    def d_score(self, d_scores: Array, found: dict[str, Array]) -> tuple[Array, Array]:
        """Of projected query and key, for all heads."""
        q, k = self.projected["query"], self.repeat(self.projected["key"], "key")
        if "score" not in self.own:
            return (
                np.einsum("bhqk,bhkd->bhqd", d_scores, k),
                np.einsum("bhqk,bhqd->bhkd", d_scores, q),
            )
        hidden = self.tanh(q, k)
        found["weights.score"] = np.einsum("bhqk,bhqkd->hd", d_scores, hidden)
        slope = self.d_tanh(hidden) * self.own["score"][:, None, None, :]
        d_hidden = d_scores[..., None] * slope
        return d_hidden.sum(axis=3), d_hidden.sum(axis=2)

    def d_tanh(self, hidden: Array) -> Array:
        """The slope of tanh, from its value."""
        return 1.0 - hidden**2

    def gather(self, gradient: Array, name: str) -> Array:
        """Summed over the query heads that share a key/value head."""
        batch, _, length, size = gradient.shape
        grouped = gradient.reshape(batch, self.shape.kv_heads, self.shape.group, length, size)
        return grouped.sum(axis=2)

    def joined(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Of each array once: those of inputs that share one are added."""
        found = dict(inputs)
        if self.shape.sharing != "separate":
            found["key"] = found["key"] + found.pop("value")
        if self.shape.sharing == "self":
            found["query"] = found["query"] + found.pop("key")
        return found
