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
        """The query, key and value, projected and split into heads."""
        return {name: self.heads(name) for name in ("query", "key", "value")}

    @cached_property
    def scores(self) -> Array:
        """The scores before scaling."""
        return self.score(self.projected["query"], self.repeat(self.projected["key"], "key"))

    @cached_property
    def shown(self) -> Array:
        """The logits before masking."""
        return self.held("logits", self.biased(self.scaled(self.scores)))

    @cached_property
    def logits(self) -> Array:
        """The logits after masking, -inf where blocked."""
        return self.hide(self.shown)

    @cached_property
    def weights(self) -> Array:
        """The attention weights, `[b h q k]`."""
        return self.held("weights", self.softmax(self.logits))

    @cached_property
    def values(self) -> Array:
        """The projected values of all heads, `[b h k d]`."""
        return self.repeat(self.projected["value"], "value")

    @cached_property
    def context(self) -> Array:
        """The context, `[b h q d]`."""
        return self.held("context", self.mix(self.weights, self.values))

    @cached_property
    def output(self) -> Array:
        """The output, `[b q e]`; NaN where a query may attend no key: no answer is agreed on there.

        Infinite where weights are, which stands for anything that is wrong.
        """
        found = self.finished(np.where(np.isinf(self.context), 0.0, self.context))
        broken = np.asarray(np.isinf(self.weights).any(axis=(1, 3)))
        return np.where(broken[..., None], np.inf, found)

    def finished(self, context: Array) -> Array:
        """Return the output computed from a context."""
        output = self.held("output", self.finish(self.merge(context)))
        empty = ~np.any(self.problem.allowed_in_full(), axis=-1).all(axis=1)
        return np.where(empty[..., None], np.nan, output)

    def held(self, what: str, values: Array) -> Array:
        """Return an intermediate as it is stored: see `conformance.causes.precision.STAGES`."""
        return values

    def product(self, axes: str, left: Array, right: Array) -> Array:
        """Return a sum of products."""
        return np.einsum(axes, left, right)

    def input(self, name: str) -> Array:
        """Return the query, key or value by name."""
        found: Array = getattr(self.problem, name)
        return found

    def weight(self, name: str) -> Array:
        """Return the weight of one projection."""
        return self.own[name]

    def heads(self, name: str) -> Array:
        """Return an input projected and split into heads."""
        return self.held("projections", self.split(self.project(name, self.input(name)), name))

    def project(self, name: str, values: Array) -> Array:
        """Return the projection of an input, `[b length h d]`."""
        return self.shifted(name, self.product("ble,ehd->blhd", values, self.weight(name)))

    def shifted(self, name: str, projected: Array) -> Array:
        """Return a projection with its bias added."""
        bias = self.own.get(f"{name}_bias")
        return projected if bias is None else projected + bias

    def split(self, projected: Array, name: str) -> Array:
        """Return a projection split into heads, `[b h length d]`."""
        return projected.transpose(0, 2, 1, 3)

    def repeat(self, heads: Array, name: str) -> Array:
        """Repeat key/value heads so that there are as many as query heads."""
        return np.repeat(heads, self.shape.group, axis=1)

    def score(self, q: Array, k: Array) -> Array:
        """Return the dot-product or additive score."""
        if "score" not in self.own:
            return self.product("bhqd,bhkd->bhqk", q, k)
        return self.product("bhqkd,hd->bhqk", self.tanh(q, k), self.own["score"])

    def tanh(self, q: Array, k: Array) -> Array:
        """Return the tanh term of the additive score."""
        return np.tanh(q[:, :, :, None] + k[:, :, None])

    def scaled(self, scores: Array) -> Array:
        """Return the scores times the scale."""
        return scores * self.problem.logit_scale

    def biased(self, logits: Array) -> Array:
        """Return the logits plus the additive bias."""
        bias = self.problem.attn_bias
        return logits if bias is None else logits + self.held("bias", bias)

    @cached_property
    def allowed(self) -> BoolArray:
        """The combined mask, `[b h q k]`; True = may attend."""
        return self.problem.allowed_in_full()

    def hide(self, logits: Array) -> Array:
        """Return the logits with -inf where they are blocked."""
        return np.where(self.allowed, logits, -np.inf)

    def softmax(self, logits: Array) -> Array:
        """Return the softmax over the keys; 0 in an empty row."""
        peak = logits.max(axis=-1, keepdims=True)
        powers = np.exp(logits - np.where(np.isfinite(peak), peak, 0.0))
        total = powers.sum(axis=-1, keepdims=True)
        return powers / np.where(total > 0, total, 1.0)

    def mix(self, weights: Array, values: Array) -> Array:
        """Return the weights times the values."""
        return self.product("bhqk,bhkd->bhqd", weights, values)

    def merge(self, context: Array) -> Array:
        """Return the heads side by side, `[b q h d]`."""
        return context.transpose(0, 2, 1, 3)

    def finish(self, merged: Array) -> Array:
        """Return the output projection of the merged heads."""
        output = self.product("bqhd,hde->bqe", merged, self.weight("output"))
        bias = self.own.get("output_bias")
        return output if bias is None else output + bias

    # Backward

    @cached_property
    def gradients(self) -> dict[str, Array]:
        """Return the gradients by canonical name, as in an answer."""
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
        """Return the cotangent as the backward pass receives it."""
        return self.problem.cotangent

    def weights_again(self) -> Array:
        """Return the weights as the backward pass uses them."""
        return self.weights

    def d_softmax(self, weights: Array, d_weights: Array) -> Array:
        """Return the derivative of the softmax."""
        return weights * (d_weights - self.row(weights, d_weights))

    def row(self, weights: Array, d_weights: Array) -> Array:
        """Return the row term of the derivative of the softmax, `[b h q 1]`."""
        return (weights * d_weights).sum(axis=-1, keepdims=True)

    def d_bias(self, d_logits: Array, shape: tuple[int, ...]) -> Array:
        """Return the gradient of the bias, summed over the axes along which it was broadcast."""
        axes = tuple(axis for axis, size in enumerate(shape) if size != d_logits.shape[axis])
        return d_logits.sum(axis=axes, keepdims=True)

    def d_scaled(self, d_logits: Array) -> Array:
        """Return the gradient of the scores."""
        return d_logits * self.problem.logit_scale

    def d_score(self, d_scores: Array, found: dict[str, Array]) -> tuple[Array, Array]:
        """Return the gradients of the projected query and key, for all heads."""
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
        """Return the slope of tanh, computed from its value."""
        return 1.0 - hidden**2

    def gather(self, gradient: Array, name: str) -> Array:
        """Sum a gradient over the query heads that share a key/value head."""
        batch, _, length, size = gradient.shape
        grouped = gradient.reshape(batch, self.shape.kv_heads, self.shape.group, length, size)
        return grouped.sum(axis=2)

    def joined(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return one gradient per distinct array; inputs that share an array are added."""
        found = dict(inputs)
        if self.shape.sharing != "separate":
            found["key"] = found["key"] + found.pop("value")
        if self.shape.sharing == "self":
            found["query"] = found["query"] + found.pop("key")
        return found
