"""The definition in float64, computed in stages that a hypothesis may replace.

Some defects give the right answer to another problem. Others do one step of the computation
differently: softmax over another axis, heads merged in another order, a gradient without its scale.
The stages here compute the definition of `conformance.definition.problem`, with one stage for each
such step. They are used only to explain deviations; no verdict depends on them.

Axes: b batch, q query, k key, h heads, d head or value_head, e width; projected heads are
`[b h length d]`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property
from types import MethodType
from typing import Any, NamedTuple

import numpy as np

from conformance.definition.arithmetic import Exact, is_identity
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.problem import Problem, Rotary
from conformance.definition.rotary import turning

Change = Callable[..., Any]
"""A replacement for a stage: a function of the `Stages` and of the arguments of the stage."""


MOST_TURNS = 2
"""The number of rotated heads that are kept for other hypotheses: queries and keys."""

_latest: deque[tuple[Array, Array, Array]] = deque(maxlen=4)
"""Angles with their cosines and sines: those of keys are the same in most hypotheses."""


def cosine_and_sine(angles: Array) -> tuple[Array, Array]:
    """Return the cosine and the sine of angles, which may be known."""
    for known, cosine, sine in _latest:
        if np.array_equal(known, angles):
            return cosine, sine
    _latest.append((angles, np.cos(angles), np.sin(angles)))
    return _latest[-1][1:]


class Turn(NamedTuple):
    """Heads, the angles, pairs and factor by which they are rotated, and what they are then."""

    heads: Array
    angles: Array
    rotary: tuple[Rotary, float]
    turned: Array


class Stages:
    """One computation of attention, whose stages are the methods.

    `changes` maps names of stages to functions that replace them.
    """

    def __init__(self, problem: Problem, **changes: Change) -> None:
        self.problem = problem
        self.shape = problem.shape
        self.own = problem.weights.named()
        self.changes = changes
        self.turns: list[Turn] = []
        for name, change in changes.items():
            assert hasattr(Stages, name), name
            setattr(self, name, MethodType(change, self))

    def forget(self) -> None:
        """Forget what was computed, which the object's references to itself would keep for long."""
        for name in [*vars(self)]:
            if isinstance(getattr(Stages, name, None), cached_property):
                del vars(self)[name]

    # Forward

    @cached_property
    def plain(self) -> dict[str, Array]:
        """The query, key and value, projected and split into heads."""
        return {name: self.heads(name) for name in ("query", "key", "value")}

    @cached_property
    def projected(self) -> dict[str, Array]:
        """The projected heads by name, with queries and keys normed and rotated if required."""
        of_values = self.prepared_values(self.plain["value"])
        sides = {side: self.prepared(side, self.plain[side]) for side in ("query", "key")}
        return {**sides, "value": of_values}

    @cached_property
    def scores(self) -> Array:
        """The scores before scaling, `[b h q k]`."""
        return self.score(self.projected["query"], self.repeat(self.projected["key"], "key"))

    @cached_property
    def shown(self) -> Array:
        """The logits before masking, `[b h q k]`."""
        return self.held("logits", self.added(self.scaled(self.scores)))

    @cached_property
    def logits(self) -> Array:
        """The logits after masking, `[b h q k]`, with -inf for blocked keys."""
        return self.hide(self.shown)

    @cached_property
    def weights(self) -> Array:
        """The attention weights, `[b h q k]`."""
        return self.held("weights", self.softmax(self.logits))

    @cached_property
    def values(self) -> Array:
        """The projected values, repeated so that each query head has its own, `[b h k d]`."""
        return self.repeat(self.projected["value"], "value")

    @cached_property
    def context(self) -> Array:
        """The context: the sums of the values times the weights, `[b h q d]`."""
        return self.held("context", self.mix(self.weights, self.values))

    @cached_property
    def output(self) -> Array:
        """The output, `[b q e]`.

        Some rows hold one of three marks instead of numbers. A row is +∞ if one of its weights is
        infinite, which predicts that the row is wrong in some way. Otherwise, it is −∞ if its
        context contains −∞, which predicts NaN because memory that holds no token is read.
        Otherwise, it is NaN, which predicts nothing, if its query is fully masked in all heads.
        """
        found = self.finished(np.where(np.isinf(self.context), 0.0, self.context))
        lost = np.asarray(np.isneginf(self.context).any(axis=(1, 3)))
        found = np.where(lost[..., None], -np.inf, found)
        broken = np.asarray(np.isinf(self.weights).any(axis=(1, 3)))
        return np.where(broken[..., None], np.inf, found)

    def finished(self, context: Array) -> Array:
        """Return the output `[b q e]` computed from a context `[b h q d]`.

        Rows of queries that are fully masked in all heads are NaN.
        """
        output = self.held("output", self.finish(self.merge(context)))
        empty = np.logical_not(self.problem.sees.all(axis=1))
        return np.where(empty[..., None], np.nan, output)

    def held(self, what: str, values: Array) -> Array:
        """Return an intermediate result unchanged; replacements of this stage round the values.

        `what` names the intermediate result, as in `precision.STAGES`.
        """
        return values

    def product(self, axes: str, left: Array, right: Array) -> Array:
        """Return the einsum of two arrays, with subscripts `axes` such as "bhqk,bhkd->bhqd"."""
        return Exact().contract(axes, left, right, "tensor")

    def input(self, name: str) -> Array:
        """Return the query, key or value by name."""
        found: Array = getattr(self.problem, name)
        return found

    def heads(self, name: str) -> Array:
        """Return an input projected and split into heads, `[b h length d]`."""
        return self.held("projections", self.split(self.project(name, self.input(name)), name))

    def project(self, name: str, values: Array) -> Array:
        """Return the projection of an input, including its bias, `[b length h d]`."""
        weight = self.own[name]
        if self.problem.heads_alone and "product" not in vars(self) and not is_identity(weight):
            # With many heads, products with zeros and ones would take longer than the attention.
            flat = weight.reshape(len(weight), -1)
            count = flat.shape[1]
            if np.count_nonzero(flat) == count:
                rows, columns = np.nonzero(flat)
                at = np.zeros(count, np.int64)
                at[columns] = rows
                if (flat[at, np.arange(count)] == 1).all():
                    taken = np.take(values, at, axis=-1)
                    return self.shifted(name, taken.reshape(*values.shape[:2], *weight.shape[1:]))
        return self.shifted(name, self.product("ble,ehd->blhd", values, weight))

    def shifted(self, name: str, projected: Array) -> Array:
        """Return a projection with its bias added, if the layer has biases."""
        bias = self.own.get(f"{name}_bias")
        return projected if bias is None else projected + bias

    def split(self, projected: Array, name: str) -> Array:
        """Return a projection split into heads, `[b h length d]`."""
        return projected.transpose(0, 2, 1, 3)

    def repeat(self, heads: Array, name: str) -> Array:
        """Return key or value heads, each repeated for all query heads that share it."""
        group = self.shape.group
        return heads if group == 1 else np.repeat(heads, group, axis=1)

    def score(self, q: Array, k: Array) -> Array:
        """Return the dot-product or additive scores, `[b h q k]`."""
        if "score" not in self.own:
            return self.product("bhqd,bhkd->bhqk", q, k)
        return self.product("bhqkd,hd->bhqk", self.tanh(q, k), self.own["score"])

    def tanh(self, q: Array, k: Array) -> Array:
        """Return the tanh term of the additive score, `[b h q k d]`."""
        return np.tanh(q[:, :, :, None] + k[:, :, None])

    def scaled(self, scores: Array) -> Array:
        """Return the scores times the scale."""
        return scores * self.problem.logit_scale

    def added(self, logits: Array) -> Array:
        """Return the scaled scores after the soft cap, ALiBi and the additive bias."""
        return self.biased(self.sloped(self.capped(logits)))

    def capped(self, logits: Array) -> Array:
        """Return the logits after the soft cap, if there is one."""
        cap = self.problem.soft_cap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def sloped(self, logits: Array) -> Array:
        """Return the logits minus slope times absolute distance (ALiBi), if there are slopes."""
        slopes = self.problem.slopes
        return logits if slopes is None else logits - slopes[:, None, None] * self.far()

    def far(self) -> Array:
        """Return the absolute distance of each key from each query, `[b 1 q k]`."""
        return np.abs(self.distances()).astype(np.float64)

    def distances(self) -> Array:
        """Return the position of each key minus that of each query, `[b 1 q k]`."""
        distances = self.positions("key")[:, None] - self.positions("query")[:, :, None]
        return distances[:, None].astype(np.float64)

    def positions(self, side: str) -> IntArray:
        """Return the positions of queries if `side` is "query", else of keys, `[b length]`."""
        problem = self.problem
        return problem.position_of_queries if side == "query" else problem.position_of_keys

    def places(self, side: str) -> IntArray:
        """Return what queries or keys are rotated by: positions, or `[b length axis]` of several.

        `side` is "query" or "key".
        """
        axes = self.problem.axes
        return self.positions(side) if axes is None else getattr(axes, side)

    def prepared(self, side: str, heads: Array) -> Array:
        """Return query or key heads after the norm and rotary embedding, if there are any."""
        return self.rotated(side, self.normed(side, heads))

    def prepared_values(self, heads: Array) -> Array:
        """Return the value heads unchanged; replacements norm or rotate them by mistake."""
        return heads

    def gain(self, side: str) -> Array | None:
        """Return the weight of the norm of queries or keys, `[head]`, or None without a norm."""
        norm = self.problem.norm
        return None if norm is None else getattr(norm, side)

    def root(self, heads: Array) -> Array:
        """Return the norm's divisor of each head vector: √(mean square + epsilon)."""
        assert self.problem.norm is not None
        return np.sqrt((heads**2).mean(axis=-1, keepdims=True) + self.problem.norm.epsilon)

    def normed(self, side: str, heads: Array) -> Array:
        """Return heads after the norm, if any: divided by their `root`, times the norm's weight."""
        gain = self.gain(side)
        return heads if gain is None else heads / self.root(heads) * gain

    def rotated(self, side: str, heads: Array) -> Array:
        """Return heads rotated by the positions of their tokens, if there is a rotary embedding."""
        rotary = self.problem.rotary
        return heads if rotary is None else self.turned(heads, self.angles(self.places(side)))

    def frequencies(self) -> Array:
        """Return the rotary frequencies: the angle per position of each pair of components."""
        return turning(self.problem)[0]

    def attention_factor(self) -> float:
        """Return what multiplies the cosine and sine of rotations."""
        return turning(self.problem)[1]

    def angles(self, positions: Array | IntArray) -> Array:
        """Return the angles `[b 1 length pair]` at positions `[b length]` or `[b length axis]`."""
        scaling = self.problem.rotary_scaling
        if positions.ndim == 3 and scaling is not None:
            return (positions[..., scaling.axis_of_pairs()] * self.frequencies())[:, None]
        return positions[:, None, :, None] * self.frequencies()

    def turned(self, heads: Array, angles: Array) -> Array:
        """Return heads with each pair of components rotated by its angle, times the factor.

        Components beyond the size of the rotary embedding are not rotated.
        """
        rotary, factor = self.problem.rotary, self.attention_factor()
        assert rotary is not None
        for turn in self.turns:
            # The keys of a long problem are rotated alike in most hypotheses.
            known = turn.heads is heads and turn.rotary == (rotary, factor)
            if known and np.array_equal(turn.angles, angles):
                return turn.turned
        size = rotary.size
        turned = np.empty_like(heads) if size == heads.shape[-1] else heads.copy()
        first, second = rotary.places()
        cos, sin = cosine_and_sine(angles)
        cos, sin = (cos, sin) if factor == 1 else (factor * cos, factor * sin)
        turned[..., first] = heads[..., first] * cos - heads[..., second] * sin
        turned[..., second] = heads[..., first] * sin + heads[..., second] * cos
        if len(self.turns) < MOST_TURNS:
            self.turns.append(Turn(heads, angles, (rotary, factor), turned))
        return turned

    def biased(self, logits: Array) -> Array:
        """Return the logits plus the additive bias, if there is one."""
        bias = self.problem.attn_bias
        return logits if bias is None else logits + self.held("bias", bias)

    @cached_property
    def allowed(self) -> BoolArray:
        """The combined mask, `[b h q k]`; True means that the query may attend to the key."""
        return self.problem.allowed_in_full()

    def hide(self, logits: Array) -> Array:
        """Return the logits with -inf where keys are blocked."""
        return np.where(self.allowed, logits, -np.inf)

    def softmax(self, logits: Array) -> Array:
        """Return the weights of the keys: the softmax over the keys and, if there is one, the sink.

        The weight of the sink is not included. The weights are 0 for fully masked queries.
        """
        powers, sink = self.powers(logits)
        total = powers.sum(axis=-1, keepdims=True) + sink
        return powers / np.where(total > 0, total, 1.0)

    def powers(self, logits: Array) -> tuple[Array, Array]:
        """Return the exponentials of the logits, and what the sinks add to their sum.

        Both are divided by the exponential of the largest logit of each row, sinks included.
        """
        peak, sinks = logits.max(axis=-1, keepdims=True), self.sinks()
        peak = peak if sinks is None else np.maximum(peak, sinks)
        peak = np.where(np.isfinite(peak), peak, 0.0)
        return np.exp(logits - peak), self.of_sinks(peak)

    def of_sinks(self, peak: Array) -> Array:
        """Return what the sinks add to the normalising sum of each row, `[b h q 1]`.

        This is the exponential of the sink divided by that of `peak`, or 0 without sinks.
        """
        sinks = self.sinks()
        return np.zeros_like(peak) if sinks is None else np.exp(sinks - peak)

    def sinks(self) -> Array | None:
        """Return the logits of the sinks, `[1 h 1 1]`, or None without sinks."""
        sinks = self.problem.sinks
        return None if sinks is None else sinks[None, :, None, None]

    def mix(self, weights: Array, values: Array) -> Array:
        """Return the context `[b h q d]`: the sums over keys of the weights times the values."""
        return self.product("bhqk,bhkd->bhqd", weights, values)

    def merge(self, context: Array) -> Array:
        """Return the context with its heads side by side, `[b q h d]`."""
        return context.transpose(0, 2, 1, 3)

    def finish(self, merged: Array) -> Array:
        """Return the output projection `[b q e]` of the merged heads, including its bias."""
        output = self.product("bqhd,hde->bqe", merged, self.own["output"])
        bias = self.own.get("output_bias")
        return output if bias is None else output + bias

    # Backward

    @cached_property
    def gradients(self) -> dict[str, Array]:
        """The gradients of inputs, parameters and features, by canonical name, as in an answer."""
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
        if self.problem.sinks is not None:
            found["sinks"] = self.d_sinks(self.row(weights, d_weights))
        d_query, d_key = self.d_score(self.d_scaled(self.d_capped(d_logits)), found)
        parts = {
            "query": self.d_prepared("query", d_query, found),
            "key": self.d_prepared("key", self.gather(d_key, "key"), found),
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
        """Return the cotangent `[b q e]` that the backward pass receives."""
        return self.problem.cotangent

    def weights_again(self) -> Array:
        """Return the weights `[b h q k]` that the backward pass uses: those of the forward pass."""
        return self.weights

    def d_softmax(self, weights: Array, d_weights: Array) -> Array:
        """Return the gradient of the logits, given that of the weights."""
        return weights * (d_weights - self.row(weights, d_weights))

    def row(self, weights: Array, d_weights: Array) -> Array:
        """Return the row term of the softmax derivative, a sum over the keys, `[b h q 1]`."""
        return (weights * d_weights).sum(axis=-1, keepdims=True)

    def d_bias(self, d_logits: Array, shape: tuple[int, ...]) -> Array:
        """Return the gradient of the additive bias, which has the given shape.

        It is summed over the axes along which the bias was broadcast.
        """
        axes = tuple(axis for axis, size in enumerate(shape) if size != d_logits.shape[axis])
        return d_logits.sum(axis=axes, keepdims=True)

    def d_sinks(self, row: Array) -> Array:
        """Return the gradient of the sinks `[h]`, given the row term."""
        return -(self.share_of_sinks() * row).sum(axis=(0, 2, 3))

    def share_of_sinks(self) -> Array:
        """Return the weight that the sink takes for each query, `[b h q 1]`; 0 without sinks."""
        powers, sink = self.powers(self.logits)
        total = powers.sum(axis=-1, keepdims=True) + sink
        return sink / np.where(total > 0, total, 1.0)

    def d_capped(self, d_logits: Array) -> Array:
        """Return the gradient of the logits before the soft cap, given that of capped logits."""
        cap = self.problem.soft_cap
        return d_logits if cap is None else d_logits * self.slope_of_cap(cap)

    def slope_of_cap(self, cap: float) -> Array:
        """Return the derivative of the capped logits with respect to those before the cap."""
        return 1.0 - np.tanh(self.scaled(self.scores) / cap) ** 2

    def d_prepared(self, side: str, gradient: Array, found: dict[str, Array]) -> Array:
        """Return the gradient of heads before norm and rotation, given `gradient` after both.

        If there is a norm, add the gradient of its weight to `found`.
        """
        if self.problem.rotary is not None:
            gradient = self.d_rotated(side, gradient)
        if self.gain(side) is None:
            return gradient
        found[f"norm.{side}"] = self.d_gain(side, gradient)
        return self.d_normed(side, gradient)

    def d_rotated(self, side: str, gradient: Array) -> Array:
        """Return the gradient of heads before the rotation, given that of the rotated heads."""
        return self.turned(gradient, -self.angles(self.places(side)))

    def d_gain(self, side: str, gradient: Array) -> Array:
        """Return the gradient of the weight of a norm `[d]`, given that of the normed heads."""
        heads = self.plain[side]
        return (gradient * heads / self.root(heads)).sum(axis=(0, 1, 2))

    def d_normed(self, side: str, gradient: Array) -> Array:
        """Return the gradient of heads before the norm, given that of the normed heads."""
        gain = self.gain(side)
        heads, scaled = self.plain[side], gradient if gain is None else gradient * gain
        root = self.root(heads)
        return scaled / root - heads * self.d_root(heads, scaled) / root**3

    def d_root(self, heads: Array, scaled: Array) -> Array:
        """Return the mean over components of `heads` times `scaled`, for the derivative of `root`.

        `scaled` is the gradient of the normed heads times the weight of the norm.
        """
        return (heads * scaled).mean(axis=-1, keepdims=True)

    def d_scaled(self, d_logits: Array) -> Array:
        """Return the gradient of the scores before scaling, given that of the scaled scores."""
        return d_logits * self.problem.logit_scale

    def d_score(self, d_scores: Array, found: dict[str, Array]) -> tuple[Array, Array]:
        """Return the gradients of the query heads and of the repeated key heads, `[b h length d]`.

        For the additive score, add the gradient of the score weight to `found`.
        """
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
        """Return the slope of tanh where its value is `hidden`."""
        return 1.0 - hidden**2

    def gather(self, gradient: Array, name: str) -> Array:
        """Return a gradient summed over the query heads that share a key/value head."""
        batch, _, length, size = gradient.shape
        grouped = gradient.reshape(batch, self.shape.kv_heads, self.shape.group, length, size)
        return grouped.sum(axis=2)

    def joined(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the gradients of the distinct input arrays, given those of query, key and value.

        The gradients of inputs that are the same array are added.
        """
        found = dict(inputs)
        for name, before in (("value", "key"), ("key", "query")):
            if self.shape.array_of(name) != name:
                found[before] = found[before] + found.pop(name)
        return found
