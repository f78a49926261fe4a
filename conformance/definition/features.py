"""The features of a problem: a feature is one entry of `FEATURES`, which says all that is its own.

A feature is an optional step of the definition, such as a soft cap or a window. Whatever treats
features alike loops over the entries: checks, hashes, the reference and its noise, case files, the
search for failures, generated scripts. Only what differs in kind stands elsewhere: how
implementations are told of a feature, the experiments on it, its hypotheses, its cases.

The order of `FEATURES` is that of the fields of `Problem`; in `IN_ORDER`, entries stand in the
order in which the definition applies them. `step` is the place of an entry in this order.

The backward passes, in the terms of `conformance.definition.attention`, are:

    soft cap:    dS is multiplied by 1 − tanh²(logits / cap) before the scale
    sink:        dsink_h = −Σ_i P_i,sink D_i, because a sink has no value, so its dP is zero

Before the scores, query and key heads may be normed (RMS norm) and rotated. With x a projected
head, g the gain of the norm, n the head size and p the token's position:

    ρ = √(mean(x²) + ε)        y = x g / ρ        dx = (g dy − x Σ(x g dy) / (n ρ²)) / ρ
    z = rotated(y, p)          dy = rotated(dz, −p)          dg = Σ dy x / ρ

Implementations compute the cosines and sines of the rotation once, as tables for all heads and
batch entries. They compute angles in float32 or better whatever the dtype, because bfloat16 cannot
represent all positions beyond 256. Programs that round every operation round the tables too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from conformance.definition.arithmetic import Exact
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.rotary import (
    POSITION_AXES,
    RotaryAxes,
    RotaryScaling,
    Scaled,
    length_of,
    turning,
)
from conformance.errors import WrongShape
from conformance.text import plural, some

if TYPE_CHECKING:
    from conformance.definition.problem import Problem, Shape

Pairs = Literal["halves", "interleaved"]
Window = tuple[int | None, int | None]

NO_WINDOW: Window = (None, None)


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embedding of the first `size` components of each query and key head.

    Pair t turns by position · base^(−2t/size). It is made of the components t and t + size/2
    ("halves") or 2t and 2t + 1 ("interleaved").
    """

    size: int
    base: float = 10000.0
    pairs: Pairs = "halves"

    def places(self) -> tuple[slice, slice]:
        """Return where in a head the first components of all pairs are, and the second ones."""
        if self.pairs == "halves":
            return slice(self.size // 2), slice(self.size // 2, self.size)
        return slice(0, self.size, 2), slice(1, self.size, 2)


@dataclass(frozen=True, eq=False, kw_only=True)
class Norm:
    """RMS norm of each query and key head, x · g / √(mean(x²) + epsilon), before the rotation.

    The gains `query` and `key` are `[head]`: all heads share them.
    """

    query: Array
    key: Array
    epsilon: float = 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Segments:
    """The ids of the segments (packed sequences) to which the tokens of each batch entry belong.

    A query may attend only to keys with the same id. `query` is `[batch query]`, `key` is
    `[batch key]`.
    """

    query: IntArray
    key: IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Positions:
    """Explicit positions of the tokens, which replace those derived from lengths and segments.

    `query` is `[batch query]`, `key` is `[batch key]`.
    """

    query: IntArray
    key: IntArray


OF_HEADS, OF_LOGITS, OF_RULES, OF_SOFTMAX = 1, 3, 5, 6
"""The first places of the entries that change heads, logits, who sees whom, and the softmax."""


class FeatureEntry:
    """All that is special about a feature.

    Attributes:
        name: its name in records, such as "soft cap".
        step: the place at which the definition applies it; see `OF_HEADS` and the like.
        absent: the fields of `Problem` that hold it, each with its value without the feature.
        arrays: the arrays that it brings, each with the fields of `Shape` that give the sizes of
            its axes; a dot separates a field of `Problem` from a field of its value.
        whole: whether these arrays hold integers instead of numbers in the problem's dtype.
        trained: the arrays that have gradients.
        numbers: what else it brings, by the name in case files, with its type.
        hashed_if_absent: whether the hash of a problem with other features tells that these numbers
            are absent; it must not for features that are added, so that no hash changes.
        value: the class of its value, if it has an array for queries and one for keys.
        drawn: the functions of `conformance.cases.patterns` with which a search draws it.
        needs: the names of the features without which it is nothing; they are drawn with it.
        feels_key_bias: whether the bias of keys, which else adds the same number to all logits of a
            row, affects the answer.
        files: the names of its arrays in files of `conformance.diagnose`, each with others that are
            understood.
        options: what else such a file tells, with its type.
        symbols: the names of its arrays in generated scripts, if they have others there.
        turns: whether it turns heads by angles that grow with positions, and so does their noise.
        placed: whether its lines in generated scripts use the positions of tokens.
        aligned: whether its answer depends on how queries are aligned with keys.
    """

    name: ClassVar[str]
    step: ClassVar[int]
    absent: ClassVar[Mapping[str, Any]]
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    whole: ClassVar[bool] = False
    trained: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    hashed_if_absent: ClassVar[bool] = False
    value: ClassVar[type[Any] | None] = None
    drawn: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    feels_key_bias: ClassVar[bool] = False
    files: ClassVar[Mapping[str, str]] = MappingProxyType({})
    options: ClassVar[Mapping[str, type]] = MappingProxyType({})
    symbols: ClassVar[Mapping[str, str]] = MappingProxyType({})
    turns: ClassVar[bool] = False
    placed: ClassVar[bool] = False
    aligned: ClassVar[bool] = False

    def fields(self, problem: Problem) -> dict[str, Any]:
        """Return the fields of the problem that hold the feature, without those that are absent."""
        found: dict[str, Any] = {}
        for name, absent in self.absent.items():
            value = getattr(problem, name)
            if value is not None and not (isinstance(value, tuple) and value == absent):
                found[name] = value
        return found

    def parts(self, problem: Problem) -> tuple[str, ...]:
        """Return the names under which adapters declare what the problem has of the feature."""
        return (self.name,)

    def conventions(self, problem: Problem) -> dict[str, str]:
        """Return, by name, the conventions of the problem that implementations choose freely.

        An implementation may have another one of each, and no argument for it.
        """
        return {}

    def check(self, problem: Problem) -> None:
        """Raise `WrongShape` if a number of the feature is out of range."""

    def facts(self, problem: Problem) -> Iterator[str]:
        """Yield short texts that describe the feature."""
        raise NotImplementedError

    def told(self, problem: Problem) -> dict[str, Any]:
        """Return what the problem has for `numbers`."""
        return {name: getattr(problem, name) for name in self.numbers}

    def made(self, numbers: Mapping[str, Any], arrays: Mapping[str, Array]) -> dict[str, Any]:
        """Return the fields of `Problem` that hold the feature.

        Args:
            numbers: the values of `numbers`; those of other features are ignored.
            arrays: the arrays of `arrays` that there are.

        Raises:
            WrongShape: if a part of the feature is missing.
        """
        fields = {n: numbers[n] if n in numbers else arrays.get(n) for n in self.absent}
        if self.value is None:
            return fields
        (name,) = fields
        sides = {
            side: arrays[f"{name}.{side}"]
            for side in ("query", "key")
            if f"{name}.{side}" in arrays
        }
        more = {n: value for n, value in numbers.items() if n in self.numbers and value is not None}
        if len(sides) == 1 or (self.numbers and bool(sides) != bool(more)):
            raise WrongShape(f"a part of {name} is missing")
        return {name: self.value(**sides, **more) if sides else None}

    def void(self, problem: Problem) -> dict[str, Any]:
        """Return fields of `Problem` with which the feature is there and has no effect."""
        raise NotImplementedError

    # The definition

    def on_both(self, problem: Problem, kind: np.dtype[Any], hold: Exact) -> tuple[Any, Any]:
        """Return what is computed once, before the heads, for queries and for keys."""
        return None, None

    def on_heads(
        self, problem: Problem, side: str, heads: Array, given: Any, hold: Exact
    ) -> tuple[Array, Any]:
        """Return query or key heads after the feature, and what its backward pass needs.

        `side` is "query" or "key", and `given` the result of `on_both` for this side.
        """
        return heads, None

    def back_to_heads(
        self, problem: Problem, side: str, gradient: Array, kept: Any, hold: Exact
    ) -> tuple[Array, dict[str, Array]]:
        """Return the gradient of the heads before `on_heads`, and those of trained arrays.

        `kept` is the second result of `on_heads`.
        """
        return gradient, {}

    def on_logits(self, problem: Problem, logits: Array, hold: Exact) -> tuple[Array, Any]:
        """Return scaled logits after the feature, and what its backward pass needs."""
        return logits, None

    def back_to_logits(self, problem: Problem, gradient: Array, kept: Any, hold: Exact) -> Array:
        """Return the gradient of the logits before `on_logits`, whose second result is `kept`."""
        return gradient

    def extra(self, problem: Problem) -> Array | None:
        """Return logits `[heads]` that take weight beside the keys' and have no value, if any."""
        return None

    def back_to_extra(self, weight: Array, row: Array, hold: Exact) -> dict[str, Array]:
        """Return the gradient of these logits by its name.

        `weight` is what they take, and `row` the row term, both `[batch heads query]`.
        """
        return {}

    def rules(self, problem: Problem) -> Iterator[tuple[str, BoolArray]]:
        """Yield names and arrays, True where the feature lets a query attend to a key.

        Each array broadcasts to the shape of the logits.
        """
        yield from ()

    def rule_names(self, problem: Problem) -> tuple[str, ...]:
        """Return the names that `rules` yields, without computing any array."""
        return () if type(self).rules is FeatureEntry.rules else self.parts(problem)

    def relaxed(self, problem: Problem, name: str, rule: BoolArray) -> BoolArray:
        """Return a rule with the pairs of a query and a key that the feature adds to it.

        `name` is the name of the rule, such as "causal", and `rule` its array without the feature,
        which broadcasts to the shape of the logits.
        """
        return rule

    # The search for failures, and the scripts that reproduce them

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """Yield fields of `Problem` that make the feature simpler."""
        yield from ()

    def cut(self, arrays: dict[str, Any], kept: Mapping[str, list[int]]) -> None:
        """Adapt the numbers in the feature's arrays to fewer tokens.

        `kept` tells which positions of an axis of `Shape` are kept. The axes of the arrays are cut
        in any case.
        """

    def fitted(self, problem: Problem, shape: Shape) -> dict[str, Any]:
        """Return the fields of `Problem` that hold the feature, made to fit a smaller shape."""
        return {name: getattr(problem, name) for name in self.absent}

    def code(self, problem: Problem) -> list[str]:
        """Return lines of the function of a script that computes the definition, at their step.

        The heads are `q`, `k` and `v`, the dictionary of arrays is `n`, and the logits are
        `logits`.
        """
        return []

    def code_before(self, problem: Problem) -> list[str]:
        """Return lines of code before that function."""
        return []


class _WindowEntry(FeatureEntry):
    name = "window"
    step = OF_RULES
    absent = MappingProxyType({"window": NO_WINDOW})
    numbers = MappingProxyType({"window": Window})
    options = MappingProxyType({"window": str})
    hashed_if_absent = True
    drawn = (
        "window",
        "window_tight",
        "window_before",
        "window_nothing_before",
        "window_nothing_after",
    )
    aligned = True

    def check(self, problem: Problem) -> None:
        for side, count in zip(("before", "after"), problem.window, strict=True):
            if count is not None and count < 0:
                raise WrongShape(f"window has {count} keys {side} the query; None means no limit")

    def facts(self, problem: Problem) -> Iterator[str]:
        sides = zip(problem.window, ("before", "after"), strict=True)
        yield "window of " + ", ".join(f"{n} {side}" for n, side in sides if n is not None)

    def void(self, problem: Problem) -> dict[str, Any]:
        whole = problem.shape.query_length + problem.shape.key_length
        return {"window": (whole, None if problem.window[1] is None else whole)}

    def rules(self, problem: Problem) -> Iterator[tuple[str, BoolArray]]:
        yield "window", within(problem.window, problem.distances())

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        before, after = problem.window
        windows: list[Window] = []
        if before is not None and after is not None:
            windows += [(before, None), (None, after)]
        windows += [(less, after) for less in _fewer(before)]
        windows += [(before, less) for less in _fewer(after)]
        for window in windows:
            yield {"window": window}


def within(window: Window, ahead: IntArray) -> BoolArray:
    """Return an array shaped like `ahead`, True where the window of a query includes a key.

    `ahead` is the position of each key minus that of the query. `window` is how many
    positions before and after the query's own it includes; None means no limit.
    """
    before, after = window
    seen = np.ones(ahead.shape, np.bool_)
    if before is not None:
        seen &= ahead >= -before
    if after is not None:
        seen &= ahead <= after
    return seen


def _fewer(count: int | None) -> list[int]:
    return sorted({0, count // 2, count - 1}) if count else []


class _SoftCapEntry(FeatureEntry):
    name = "soft cap"
    step = OF_LOGITS
    absent = MappingProxyType({"soft_cap": None})
    numbers = MappingProxyType({"soft_cap": float | None})
    options = MappingProxyType({"soft_cap": float})
    hashed_if_absent = True
    drawn = ("soft_cap",)
    feels_key_bias = True

    def check(self, problem: Problem) -> None:
        assert problem.soft_cap is not None
        if not 0 < problem.soft_cap < math.inf:
            raise WrongShape(f"soft_cap is {problem.soft_cap}; it is positive and finite")

    def facts(self, problem: Problem) -> Iterator[str]:
        yield f"soft cap {problem.soft_cap:g}"

    def void(self, problem: Problem) -> dict[str, Any]:
        return {"soft_cap": {"float64": 2.0**30, "float32": 2.0**14}.get(problem.dtype, 2.0**12)}

    def on_logits(self, problem: Problem, logits: Array, hold: Exact) -> tuple[Array, Any]:
        cap = problem.soft_cap
        assert cap is not None
        capped = hold(np.tanh(hold(logits / cap, "logits")), "logits")
        return hold(cap * capped, "logits"), capped

    def back_to_logits(self, problem: Problem, gradient: Array, kept: Any, hold: Exact) -> Array:
        slope = hold(1.0 - kept**2, "logits")
        return hold(gradient * slope, "probability")

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        cap = problem.soft_cap
        if cap is not None and cap != 1:
            for simple in (1.0, 2.0 ** round(math.log2(cap))):
                if simple != cap:
                    yield {"soft_cap": simple}

    def code(self, problem: Problem) -> list[str]:
        return [f"    logits = {problem.soft_cap!r} * np.tanh(logits / {problem.soft_cap!r})"]


class _SinksEntry(FeatureEntry):
    name = "sinks"
    step = OF_SOFTMAX
    absent = MappingProxyType({"sinks": None})
    arrays = MappingProxyType({"sinks": ("heads",)})
    files = MappingProxyType({"sinks": "sink"})
    trained = ("sinks",)
    drawn = ("sinks",)
    feels_key_bias = True

    def facts(self, problem: Problem) -> Iterator[str]:
        yield f"sinks {_listed(problem.sinks)}"

    def void(self, problem: Problem) -> dict[str, Any]:
        assert problem.sinks is not None
        return {"sinks": problem.format.round(0 * problem.sinks - 30000.0)}

    def extra(self, problem: Problem) -> Array | None:
        return problem.sinks

    def back_to_extra(self, weight: Array, row: Array, hold: Exact) -> dict[str, Array]:
        d_sink = hold(-weight * row, "probability")
        return {"sinks": hold.total("...bhq->...h", d_sink, "tensor")}

    def code(self, problem: Problem) -> list[str]:
        return [
            "    peak = logits.real.max(axis=-1, keepdims=True)",
            "    powers = np.exp(logits - peak)",
            "    weights = powers / (powers.sum(-1, keepdims=True) + "
            'np.exp(n["sinks"][:, None, None] - peak))',
        ]


class _AlibiEntry(FeatureEntry):
    name = "alibi"
    step = OF_LOGITS + 1
    absent = MappingProxyType({"slopes": None})
    arrays = MappingProxyType({"slopes": ("heads",)})
    files = MappingProxyType({"slopes": "alibi_slopes"})
    drawn = ("slopes", "slopes_of_alibi")
    placed = True
    aligned = True

    def facts(self, problem: Problem) -> Iterator[str]:
        yield f"ALiBi slopes {_listed(problem.slopes)}"

    def void(self, problem: Problem) -> dict[str, Any]:
        assert problem.slopes is not None
        return {"slopes": 0.0 * problem.slopes}

    def on_logits(self, problem: Problem, logits: Array, hold: Exact) -> tuple[Array, Any]:
        slopes = problem.slopes
        assert slopes is not None
        distance = np.abs(
            problem.position_of_queries[:, :, None] - problem.position_of_keys[:, None]
        )
        distance = distance.astype(slopes.dtype)
        alibi = hold.lift(slopes[:, None, None] * distance[:, None])
        return hold(logits - hold(alibi, "logits"), "logits"), None

    def code(self, problem: Problem) -> list[str]:
        distance = "abs(at_query[:, None, :, None] - at_key[:, None, None])"
        return [f'    logits = logits - n["slopes"][:, None, None] * {distance}']


class _RotaryEntry(FeatureEntry):
    name = "rotary"
    step = OF_HEADS + 1
    absent = MappingProxyType({"rotary": None, "rotary_scaling": None})
    numbers = MappingProxyType({"rotary": Rotary | None, "rotary_scaling": RotaryScaling | None})
    options = MappingProxyType({"rotary.base": float, "rotary.pairs": str, "rotary.size": int})
    hashed_if_absent = True
    drawn = (
        "rotary_halves",
        "rotary_interleaved",
        "rotary_partial",
        "rotary_far",
        "rotary_linear",
        "rotary_dynamic",
        "rotary_yarn",
        "rotary_longrope",
        "rotary_llama3",
    )
    feels_key_bias = True
    turns = True
    placed = True
    aligned = True

    def fields(self, problem: Problem) -> dict[str, Any]:
        """Return the fields that hold it; without a rotation, there is nothing to scale."""
        return super().fields(problem) if problem.rotary is not None else {}

    def parts(self, problem: Problem) -> tuple[str, ...]:
        scaling = problem.rotary_scaling
        # Sections alone scale nothing.
        scaled = scaling is not None and scaling.rope_type != "default"
        return (self.name, "rotary scaling") if scaled else (self.name,)

    def conventions(self, problem: Problem) -> dict[str, str]:
        assert problem.rotary is not None
        return {"rotary pairs": problem.rotary.pairs}

    def told(self, problem: Problem) -> dict[str, Any]:
        """Leave out a scaling that is not there, as in problems that are older than it."""
        told = super().told(problem)
        return told if problem.rotary_scaling is not None else {"rotary": told["rotary"]}

    def check(self, problem: Problem) -> None:
        rotary, head_size = problem.rotary, problem.shape.head_size
        assert rotary is not None
        if rotary.size not in range(2, head_size + 1, 2):
            raise WrongShape(
                f"rotary.size is {rotary.size}; "
                f"it is even, positive and at most the head size, {head_size}"
            )
        if not 0 < rotary.base < math.inf:
            raise WrongShape(f"rotary.base is {rotary.base}; it is positive and finite")
        if problem.rotary_scaling is not None:
            problem.rotary_scaling.check(rotary.size)

    def facts(self, problem: Problem) -> Iterator[str]:
        rotary = problem.rotary
        assert rotary is not None
        scaling = problem.rotary_scaling
        plain = scaling is None or scaling.rope_type == "default"
        more = "" if scaling is None or plain else f", scaled as {scaling.rope_type}"
        yield (
            f"rotary positions, {rotary.size} components, {rotary.pairs}, "
            f"base {rotary.base:g}{more}"
        )

    def on_both(self, problem: Problem, kind: np.dtype[Any], hold: Exact) -> tuple[Any, Any]:
        """Return the rotary tables for the queries and for the keys of a problem.

        Both are taken from one table of all positions, so equal positions share their noise.
        """
        rotary, scaling = problem.rotary, problem.rotary_scaling
        assert rotary is not None
        sides = (problem.position_of_queries, problem.position_of_keys)
        axis = np.zeros(rotary.size // 2, np.int64)
        if problem.axes is not None and scaling is not None:
            # The position of each token on the axis of each pair, `[batch length pair]`.
            axis = scaling.axis_of_pairs()
            sides = (problem.axes.query[..., axis], problem.axes.key[..., axis])
        positions = np.unique(np.concatenate([side.ravel() for side in sides]))
        how = None
        if scaling is not None and scaling.rope_type != "default":
            how = scaling.scaled(rotary.size, rotary.base, length_of(problem))
        base = rotary.base if how is None else how.base
        exponents = hold.lift(-math.log(base) * np.arange(0, rotary.size, 2) / rotary.size)
        frequencies = np.exp(exponents)
        # Errors of angles come from the frequency, shared by all positions, and from the product.
        wrong = hold.error(exponents, "angle") + hold.error(np.ones_like(exponents), "angle")
        if how is not None:
            frequencies, wrong = _scaled(frequencies, wrong, how, hold)
        angles = positions[:, None] * frequencies[..., None, :]
        off = angles * wrong[..., None, :] + hold.error(angles, "angle")
        cosine, sine = np.cos(angles), np.sin(angles)
        # To first order, because float64 has no digits for the noise of a large angle in float64.
        cosine, sine = cosine - off * sine, sine + off * cosine
        if scaling is not None and scaling.gain != 1:
            cosine, sine = (scaling.gain * table for table in (cosine, sine))
            cosine, sine = (table + hold.error(table, "angle") for table in (cosine, sine))
        cosine, sine = (hold(table.astype(kind), "logits") for table in (cosine, sine))

        def of(tokens: IntArray) -> tuple[Array, Array]:
            index = np.searchsorted(positions, tokens)
            # With several axes, each pair has a position of its own.
            at: Any = (index, slice(None)) if index.ndim == 2 else (index, np.arange(len(axis)))
            cosines, sines = (table[..., *at][..., None, :, :] for table in (cosine, sine))
            return cosines, sines

        return of(sides[0]), of(sides[1])

    def on_heads(
        self, problem: Problem, side: str, heads: Array, given: Any, hold: Exact
    ) -> tuple[Array, Any]:
        assert problem.rotary is not None
        cosine, sine = given
        return rotated(heads, problem.rotary, cosine, sine, hold), given

    def back_to_heads(
        self, problem: Problem, side: str, gradient: Array, kept: Any, hold: Exact
    ) -> tuple[Array, dict[str, Array]]:
        assert problem.rotary is not None
        cosine, sine = kept
        return rotated(gradient, problem.rotary, cosine, -sine, hold), {}

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        rotary = problem.rotary
        if rotary is not None and rotary.pairs != "halves":
            yield {"rotary": dataclasses.replace(rotary, pairs="halves")}
        if rotary is not None and rotary.size > 2:
            yield _of_size(problem, 2)

    def fitted(self, problem: Problem, shape: Shape) -> dict[str, Any]:
        """Turn no more components than the head size allows; if it allows none, do not rotate."""
        return _of_rotation(problem, shape)

    def code(self, problem: Problem) -> list[str]:
        if problem.axes is None or problem.rotary_scaling is None:
            return ["    q, k = turned(q, at_query), turned(k, at_key)"]
        axis = problem.rotary_scaling.axis_of_pairs().tolist()
        query, key = (
            f"np.array({of.tolist()})[..., {axis}]" for of in (problem.axes.query, problem.axes.key)
        )
        return [f"    q, k = turned(q, {query}), turned(k, {key})"]

    def code_before(self, problem: Problem) -> list[str]:
        rotary = problem.rotary
        assert rotary is not None
        half = rotary.size // 2
        one, other, axis = f":{half}", f"{half}:{rotary.size}", -2
        if rotary.pairs == "interleaved":
            one, other, axis = f":{rotary.size}:2", f"1:{rotary.size}:2", -1
        rates, gain, kind = f"{float(rotary.base)!r} ** (-np.arange({half}) / {half})", "", ""
        if problem.rotary_scaling is not None:
            scaled, factor = turning(problem)
            rates = f"np.array({scaled.tolist()!r})"
            gain = "" if factor == 1 else f"{factor!r} * "
            kind = f", scaled as {problem.rotary_scaling.rope_type}"
        at = "at[:, None, :, None]" if problem.axes is None else "at[:, None]"
        pairs = f"np.stack([a * c - b * s, b * c + a * s], axis={axis})"
        text = [
            f"def turned(x, at):  # rotary embedding{kind}",
            f"    a, b = x[..., {one}], x[..., {other}]",
            f"    c, s = ({gain}f({at} * {rates}) for f in (np.cos, np.sin))",
        ]
        if rotary.size == problem.shape.head_size:
            return [*text, f"    return {pairs}.reshape(x.shape)"]
        turned = f"pairs.reshape(*x.shape[:-1], {rotary.size})"
        whole = f"np.concatenate([{turned}, x[..., {rotary.size}:]], axis=-1)"
        return [*text, f"    pairs = {pairs}", f"    return {whole}"]


def _scaled(frequencies: Array, wrong: Array, how: Scaled, hold: Exact) -> tuple[Array, Array]:
    """Return scaled frequencies and their relative errors, from those before the scaling.

    An error of the share that is left as it is counts as far as both parts of the sum differ.
    """
    if how.grown:
        exponents = np.arange(frequencies.shape[-1]) / frequencies.shape[-1]
        wrong = wrong + how.grown * exponents * hold.error(hold.lift(np.ones(1)), "angle")
    left, felt = how.share + (1 - how.share) / how.divisor, how.felt()
    of_share = hold.error(hold.lift(how.ramp), "angle") + (how.ramp * wrong if how.follows else 0.0)
    wrong = wrong + felt * of_share + hold.error(np.ones_like(frequencies), "angle")
    return frequencies * left, wrong


def _of_rotation(problem: Problem, shape: Shape) -> dict[str, Any]:
    """Return the fields of a rotation of no more components than the shape has."""
    if problem.rotary is None:
        return {"rotary": None, "rotary_scaling": None}
    return _of_size(problem, min(problem.rotary.size, shape.head_size // 2 * 2))


def _of_size(problem: Problem, size: int) -> dict[str, Any]:
    """Return the fields of a rotation of fewer components; if they are 0, do not rotate."""
    rotary, scaling = problem.rotary, problem.rotary_scaling
    assert rotary is not None
    return {
        "rotary": dataclasses.replace(rotary, size=size) if size else None,
        "rotary_scaling": scaling.fitted(size) if scaling is not None and size else None,
    }


def rotated(heads: Array, rotary: Rotary, cosine: Array, sine: Array, hold: Exact) -> Array:
    """Return heads with their first `rotary.size` components rotated and the others unchanged.

    Tables of cosines and sines are `[batch 1 length size/2]`.
    """
    places = rotary.places()
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


class _NormEntry(FeatureEntry):
    name = "query/key norm"
    step = OF_HEADS
    absent = MappingProxyType({"norm": None})
    arrays = MappingProxyType({"norm.query": ("head_size",), "norm.key": ("head_size",)})
    trained = ("norm.query", "norm.key")
    numbers = MappingProxyType({"epsilon": float | None})
    files = MappingProxyType({"norm.query": "q_norm", "norm.key": "k_norm"})
    options = MappingProxyType({"norm.epsilon": float})
    hashed_if_absent = True
    value = Norm
    drawn = ("norm",)
    feels_key_bias = True
    symbols = MappingProxyType({"norm.query": "gq", "norm.key": "gk"})

    def told(self, problem: Problem) -> dict[str, Any]:
        return {"epsilon": None if problem.norm is None else problem.norm.epsilon}

    def check(self, problem: Problem) -> None:
        assert problem.norm is not None
        if not 0 < problem.norm.epsilon < math.inf:
            raise WrongShape(f"norm.epsilon is {problem.norm.epsilon}; it is positive and finite")

    def facts(self, problem: Problem) -> Iterator[str]:
        assert problem.norm is not None
        yield f"RMS norm of query and key heads, epsilon {problem.norm.epsilon:g}"

    def on_heads(
        self, problem: Problem, side: str, heads: Array, given: Any, hold: Exact
    ) -> tuple[Array, Any]:
        assert problem.norm is not None
        return normed(heads, getattr(problem.norm, side), problem.norm.epsilon, hold)

    def back_to_heads(
        self, problem: Problem, side: str, gradient: Array, kept: Any, hold: Exact
    ) -> tuple[Array, dict[str, Array]]:
        found, d_gain = before_norm(gradient, getattr(problem.norm, side), kept, hold)
        return found, {f"norm.{side}": d_gain}

    def code(self, problem: Problem) -> list[str]:
        assert problem.norm is not None
        text = []
        for x, gain in (("q", "gq"), ("k", "gk")):
            root = f"np.sqrt(({x} * {x}).mean(-1, keepdims=True) + {problem.norm.epsilon!r})"
            text.append(f'    {x} = {x} / {root} * n["{gain}"]  # the RMS norm')
        return text


def normed(
    heads: Array, gain: Array, epsilon: float, hold: Exact
) -> tuple[Array, tuple[Array, Array]]:
    """Return heads x · g / √(mean(x²) + ε), and what `before_norm` needs: quotients and roots.

    Heads are `[... batch heads length head]`, and the roots have a last axis of size 1.
    """
    squares = hold.contract("...bhqd,...bhqd->...bhq", heads, heads, "logits")
    mean = hold(squares / heads.shape[-1], "logits")
    root = hold(np.sqrt(mean + epsilon), "logits")[..., None]
    quotients = hold(heads / root, "tensor")
    return hold(quotients * gain, "tensor"), (quotients, root)


def before_norm(
    gradient: Array, gain: Array, kept: tuple[Array, Array], hold: Exact
) -> tuple[Array, Array]:
    """Return the gradient of the heads before `normed`, and that of the gain `[... head]`.

    `gradient` is that after the norm, and `kept` the second result of `normed`.
    """
    quotients, root = kept
    d_gain = hold.contract("...bhqd,...bhqd->...d", gradient, quotients, "tensor")
    d_quotients = hold(gradient * gain, "tensor")
    along = hold.contract("...bhqd,...bhqd->...bhq", d_quotients, quotients, "logits")
    mean = hold(along / gradient.shape[-1], "logits")[..., None]
    across = hold(d_quotients - hold(quotients * mean, "logits"), "logits")
    return hold(across / root, "tensor"), d_gain


class _LengthsEntry(FeatureEntry):
    name = "lengths"
    step = OF_RULES
    absent = MappingProxyType({"query_lengths": None, "key_lengths": None})
    arrays = MappingProxyType({"query_lengths": ("batch",), "key_lengths": ("batch",)})
    files = MappingProxyType({"query_lengths": "", "key_lengths": "lengths seqlens cache_seqlens"})
    whole = True
    drawn = ("key_lengths", "key_lengths_from_queries")

    def parts(self, problem: Problem) -> tuple[str, ...]:
        return tuple(name.replace("_", " ") for name in self.fields(problem))

    def check(self, problem: Problem) -> None:
        for name, lengths in self.fields(problem).items():
            length = getattr(problem.shape, name.removesuffix("s"))
            if not ((lengths >= 0) & (lengths <= length)).all():
                raise WrongShape(f"{name} are {lengths.tolist()}; they are within 0 and {length}")

    def facts(self, problem: Problem) -> Iterator[str]:
        for of, lengths in (("queries", problem.query_lengths), ("keys", problem.key_lengths)):
            if lengths is not None:
                yield f"lengths of {of} {_listed(lengths)}"

    def rules(self, problem: Problem) -> Iterator[tuple[str, BoolArray]]:
        queries, keys = problem.used()
        if problem.query_lengths is not None:
            yield "query lengths", queries[:, None, :, None]
        if problem.key_lengths is not None:
            yield "key lengths", keys[:, None, None, :]

    def cut(self, arrays: dict[str, Any], kept: Mapping[str, list[int]]) -> None:
        """Count the kept tokens that are within the length."""
        for name in self.arrays:
            axis = name.removesuffix("s")
            if name in arrays and axis in kept:
                arrays[name] = (np.array(kept[axis]) < arrays[name][:, None]).sum(axis=1)


class _SegmentsEntry(FeatureEntry):
    name = "segments"
    step = OF_RULES
    absent = MappingProxyType({"segments": None})
    arrays = MappingProxyType(
        {
            "segments.query": ("batch", "query_length"),
            "segments.key": ("batch", "key_length"),
        }
    )
    files = MappingProxyType({"segments": "segment_ids"})
    whole = True
    value = Segments
    drawn = ("segments", "two_segments")

    def facts(self, problem: Problem) -> Iterator[str]:
        assert problem.segments is not None
        yield f"packed, {plural(len(np.unique(problem.segments.query)), 'segment')}"

    def rules(self, problem: Problem) -> Iterator[tuple[str, BoolArray]]:
        assert problem.segments is not None
        query, key = problem.segments.query, problem.segments.key
        yield "segments", query[:, None, :, None] == key[:, None, None, :]


class _PositionsEntry(FeatureEntry):
    name = "positions"
    step = OF_RULES
    absent = MappingProxyType({"positions": None})
    arrays = MappingProxyType(
        {
            "positions.query": ("batch", "query_length"),
            "positions.key": ("batch", "key_length"),
        }
    )
    files = MappingProxyType({"positions": "position_ids"})
    whole = True
    value = Positions

    def facts(self, problem: Problem) -> Iterator[str]:
        yield "positions of their own"


class _ChunkEntry(FeatureEntry):
    name = "chunk"
    step = OF_RULES
    absent = MappingProxyType({"chunk": None})
    numbers = MappingProxyType({"chunk": int | None})
    drawn = ("chunk",)
    options = MappingProxyType({"chunk": int})
    aligned = True

    def check(self, problem: Problem) -> None:
        assert problem.chunk is not None
        if problem.chunk < 1:
            raise WrongShape(
                f"chunk is {problem.chunk}; it is at least 1, and None means no chunks"
            )

    def facts(self, problem: Problem) -> Iterator[str]:
        yield f"chunks of {plural(problem.chunk or 0, 'position')}"

    def rules(self, problem: Problem) -> Iterator[tuple[str, BoolArray]]:
        queries, keys = problem.position_of_queries, problem.position_of_keys
        yield "chunk", within_chunks(problem.chunk or 1, queries, keys)[:, None]

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        yield from ({"chunk": less} for less in _fewer(problem.chunk) if less)


def within_chunks(size: int, queries: IntArray, keys: IntArray) -> BoolArray:
    """Return `[... query key]`, True where positions are in the same block of `size` positions."""
    return np.asarray(queries[..., :, None] // size == keys[..., None, :] // size)


class _SpansEntry(FeatureEntry):
    name = "spans"
    step = OF_RULES
    absent = MappingProxyType({"spans": None})
    arrays = MappingProxyType({"spans": ("batch", "key_length")})
    files = MappingProxyType({"spans": "span_ids"})
    whole = True
    drawn = ("spans_two", "spans_of_one_id", "spans_adjacent", "spans_long", "spans_prefix")
    aligned = True

    def check(self, problem: Problem) -> None:
        assert problem.spans is not None
        least = problem.spans.min(initial=0)
        if least < 0:
            raise WrongShape(f"spans holds {least}; ids are at least 0, and 0 is in no span")

    def facts(self, problem: Problem) -> Iterator[str]:
        assert problem.spans is not None
        count = sum(len(np.unique(ids[ids > 0])) for ids in problem.spans)
        yield plural(count, "bidirectional span")

    def relaxed(self, problem: Problem, name: str, rule: BoolArray) -> BoolArray:
        if name != "causal" or problem.spans is None:
            return rule
        return rule | within_spans(span_of_queries(problem), problem.spans)[:, None]

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        if problem.spans is not None and problem.spans.max(initial=0) > 1:
            yield {"spans": np.where(problem.spans == problem.spans.max(), 0, problem.spans)}
            yield {"spans": np.minimum(problem.spans, 1)}


def span_of_queries(problem: Problem) -> IntArray:
    """Return the id of the span of each query, `[batch query]`; 0 if it is in no span."""
    assert problem.spans is not None
    return of_own_keys(problem, problem.spans)


def of_own_keys(problem: Problem, of_keys: IntArray) -> IntArray:
    """Return what `of_keys`, `[batch key]`, says of the key of each query, `[batch query]`.

    The key of a query is the first one of the same segment with the query's position. The result is
    0 if there is none.
    """
    sides = [problem.position_of_queries, problem.position_of_keys]
    if problem.segments is not None:
        # One number for each pair of a segment and a position.
        least = min(int(side.min(initial=0)) for side in sides)
        width = max(int(side.max(initial=0)) for side in sides) - least + 1
        ids = problem.segments.query, problem.segments.key
        sides = [width * own + side - least for own, side in zip(ids, sides, strict=True)]
    found = np.zeros(sides[0].shape, of_keys.dtype)
    for entry, (queries, keys) in enumerate(zip(*sides, strict=True)):
        order = np.argsort(keys, kind="stable")
        at = np.searchsorted(keys[order], queries)
        there = at < len(keys)
        first = order[at[there]]
        found[entry, there] = np.where(keys[first] == queries[there], of_keys[entry, first], 0)
    return found


def within_spans(queries: IntArray, keys: IntArray) -> BoolArray:
    """Return `[... query key]`, True where both ids are the same and not 0."""
    same = queries[..., :, None] == keys[..., None, :]
    return np.asarray(same & (keys[..., None, :] != 0))


class _TreeEntry(FeatureEntry):
    name = "tree"
    step = OF_RULES
    absent = MappingProxyType({"tree": None})
    arrays = MappingProxyType({"tree": ("batch", "query_length")})
    files = MappingProxyType({"tree": "parents"})
    whole = True
    drawn = ("tree_of_drafts",)

    def check(self, problem: Problem) -> None:
        assert problem.tree is not None
        before = np.arange(problem.shape.query_length)
        if not ((problem.tree >= -1) & (problem.tree < before)).all():
            raise WrongShape("tree has a parent that is no earlier query; -1 is that of none")

    def facts(self, problem: Problem) -> Iterator[str]:
        assert problem.tree is not None
        leaves = sum(
            problem.shape.query_length - len(np.unique(parents[parents >= 0]))
            for parents in problem.tree
        )
        yield f"a tree of drafted tokens with {plural(leaves, 'leaf', 'leaves')}"

    def rules(self, problem: Problem) -> Iterator[tuple[str, BoolArray]]:
        assert problem.tree is not None
        yield "tree", within_tree(problem.tree, drafted(problem))[:, None]

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        shape = problem.shape
        chain = np.tile(np.arange(shape.query_length) - 1, (shape.batch, 1))
        if problem.tree is not None and not np.array_equal(problem.tree, chain):
            yield {"tree": chain}

    def cut(self, arrays: dict[str, Any], kept: Mapping[str, list[int]]) -> None:
        """Let tokens whose parents are removed descend from the nearest ancestor that is kept."""
        if "tree" in arrays and "query_length" in kept:
            tree, left = arrays["tree"].copy(), kept["query_length"]
            for entry, token in np.ndindex(tree.shape):
                while tree[entry, token] >= 0 and tree[entry, token] not in left:
                    tree[entry, token] = tree[entry, tree[entry, token]]
            places = {token: place for place, token in enumerate(left)}
            arrays["tree"] = np.vectorize(lambda parent: places.get(parent, -1))(tree)


def drafted(problem: Problem) -> IntArray:
    """Return the index of the query that each key is, `[batch key]`; negative for cached keys.

    The last key of an entry, within its length, is its last query.
    """
    keys, queries = np.arange(problem.shape.key_length)[None], problem.shape.query_length
    more = problem.shape.key_length if problem.key_lengths is None else problem.key_lengths[:, None]
    less = queries if problem.query_lengths is None else problem.query_lengths[:, None]
    return np.broadcast_to(keys - (more - less), (problem.shape.batch, keys.shape[1]))


def ancestors(tree: IntArray) -> BoolArray:
    """Return `[batch query query]`, True where the second is the first or one of its ancestors."""
    batch, queries = tree.shape
    found, entries = np.zeros((batch, queries, queries), np.bool_), np.arange(batch)
    for query in range(queries):
        parents = tree[:, query]
        found[:, query] = found[entries, parents] & (parents >= 0)[:, None]
        found[:, query, query] = True
    return found


def within_tree(tree: IntArray, keys: IntArray) -> BoolArray:
    """Return `[batch query key]`, True for cached keys, for a query itself and for its ancestors.

    `keys` is the index of the query that each key is, as `drafted` returns it.
    """
    queries = tree.shape[1]
    if not queries:
        return np.zeros((len(tree), 0, keys.shape[1]), np.bool_)
    at = np.clip(keys, 0, queries - 1)[:, None]
    own = np.take_along_axis(ancestors(tree), at, axis=2)
    return np.where((keys < queries)[:, None], own, False) | (keys < 0)[:, None]


def depths(problem: Problem) -> tuple[IntArray, IntArray]:
    """Return the positions of queries and keys in a tree: a child stands after its parent.

    They are `[batch query]` and `[batch key]`; cached keys stand at their indices.
    """
    assert problem.tree is not None
    keys, queries = drafted(problem), problem.shape.query_length
    cached = np.arange(problem.shape.key_length) - keys
    depth = ancestors(problem.tree).sum(axis=2) - 1
    if not queries or not keys.shape[1]:
        return depth, np.arange(keys.shape[1])[None]
    of_keys = np.take_along_axis(depth, np.clip(keys, 0, queries - 1), axis=1)
    inside = (keys >= 0) & (keys < queries)
    return cached[:, :1] + depth, cached + np.where(inside, of_keys, keys)


class _AxesEntry(FeatureEntry):
    name = "position axes"
    step = OF_HEADS + 1
    absent = MappingProxyType({"axes": None})
    arrays = MappingProxyType(
        {
            "axes.query": ("batch", "query_length", "position_axes"),
            "axes.key": ("batch", "key_length", "position_axes"),
        }
    )
    whole = True
    value = RotaryAxes
    needs = ("rotary",)
    drawn = ("axes_of_image", "axes_of_image_interleaved", "axes_of_video", "axes_of_text")
    feels_key_bias = True

    def fields(self, problem: Problem) -> dict[str, Any]:
        """Return the field that holds it; without a rotation, nothing turns by any position."""
        return super().fields(problem) if problem.rotary is not None else {}

    def conventions(self, problem: Problem) -> dict[str, str]:
        assert problem.rotary_scaling is not None
        interleaved = problem.rotary_scaling.mrope_interleaved
        return {"sections": "interleaved" if interleaved else "side by side"}

    def check(self, problem: Problem) -> None:
        if problem.rotary_scaling is None or problem.rotary_scaling.mrope_section is None:
            raise WrongShape(
                f"positions on {len(POSITION_AXES)} axes need the numbers of pairs that turn by "
                'each; say them in rotary={"scaling": {"mrope_section": [...]}}, or pass the '
                "configuration of the model"
            )

    def facts(self, problem: Problem) -> Iterator[str]:
        assert problem.rotary_scaling is not None
        sections = [*map(str, problem.rotary_scaling.mrope_section or ())]
        how = "interleaved" if problem.rotary_scaling.mrope_interleaved else "side by side"
        yield f"positions on {len(sections)} axes for {some(sections, 3)} pairs, {how}"

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        scaling = problem.rotary_scaling
        if problem.causal is None and problem.axes is not None:
            # Without positions of their own, queries stand where an alignment puts them.
            yield from ({"axes": None, "causal": end} for end in ("top-left", "bottom-right"))
        if scaling is not None and scaling.mrope_interleaved:
            yield {"rotary_scaling": dataclasses.replace(scaling, mrope_interleaved=None)}

    def fitted(self, problem: Problem, shape: Shape) -> dict[str, Any]:
        """Leave the positions out where the sections cannot be made to fit fewer components."""
        held = _of_rotation(problem, shape)["rotary_scaling"]
        return {"axes": None if held is None else problem.axes}


class _DilationEntry(FeatureEntry):
    name = "dilation"
    step = OF_RULES
    absent = MappingProxyType({"dilation": None})
    numbers = MappingProxyType({"dilation": int | None})
    drawn = ("dilation",)
    options = MappingProxyType({"dilation": int})

    def check(self, problem: Problem) -> None:
        assert problem.dilation is not None
        if problem.dilation < 1:
            raise WrongShape(
                f"dilation is {problem.dilation}; it is at least 1, and None means no dilation"
            )

    def facts(self, problem: Problem) -> Iterator[str]:
        yield f"dilation of {problem.dilation}"

    def rules(self, problem: Problem) -> Iterator[tuple[str, BoolArray]]:
        yield "dilation", problem.distances() % (problem.dilation or 1) == 0

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        yield from ({"dilation": less} for less in _fewer(problem.dilation) if less)


LIMITING = ("window", "dilation", "chunk")
"""The rules that do not limit global tokens."""


class _GlobalTokensEntry(FeatureEntry):
    name = "global tokens"
    step = OF_RULES
    absent = MappingProxyType({"global_tokens": None})
    arrays = MappingProxyType({"global_tokens": ("batch", "key_length")})
    files = MappingProxyType({"global_tokens": "global_attention_mask"})
    whole = True
    drawn = ("global_tokens",)

    def check(self, problem: Problem) -> None:
        assert problem.global_tokens is not None
        strange = set(np.unique(problem.global_tokens).tolist()) - {0, 1}
        if strange:
            raise WrongShape(
                f"global_tokens holds {min(strange)}; 1 is a global token, and 0 is another one"
            )

    def facts(self, problem: Problem) -> Iterator[str]:
        assert problem.global_tokens is not None
        yield plural(int(problem.global_tokens.sum()), "global token")

    def relaxed(self, problem: Problem, name: str, rule: BoolArray) -> BoolArray:
        if name not in LIMITING or problem.global_tokens is None:
            return rule
        return rule | to_or_from(global_queries(problem), problem.global_tokens)[:, None]

    def simpler(self, problem: Problem) -> Iterator[dict[str, Any]]:
        tokens = problem.global_tokens
        if tokens is not None and (tokens.sum(axis=1) > 1).any():
            yield {"global_tokens": np.where(tokens.cumsum(axis=1) > 1, 0, tokens)}


def global_queries(problem: Problem) -> IntArray:
    """Return `[batch query]`, 1 for global tokens and 0 for others."""
    assert problem.global_tokens is not None
    return of_own_keys(problem, problem.global_tokens)


def to_or_from(queries: IntArray, keys: IntArray) -> BoolArray:
    """Return `[... query key]`, True where the number of the query or that of the key is not 0."""
    return np.asarray((queries[..., :, None] != 0) | (keys[..., None, :] != 0))


def _listed(values: Array | IntArray | None) -> str:
    return some([f"{value:.3g}" for value in ([] if values is None else values)], 8)


FEATURES: tuple[FeatureEntry, ...] = (
    _WindowEntry(),
    _SoftCapEntry(),
    _SinksEntry(),
    _AlibiEntry(),
    _RotaryEntry(),
    _NormEntry(),
    _LengthsEntry(),
    _SegmentsEntry(),
    _PositionsEntry(),
    _ChunkEntry(),
    _SpansEntry(),
    _TreeEntry(),
    _AxesEntry(),
    _DilationEntry(),
    _GlobalTokensEntry(),
)
"""All features, in the order of the fields of `Problem`."""

IN_ORDER = tuple(sorted(FEATURES, key=lambda entry: entry.step))
"""All features, in the order in which the definition applies them."""

ARRAYS: Mapping[str, tuple[str, ...]] = {
    name: axes for entry in FEATURES for name, axes in entry.arrays.items()
}
"""The arrays of all features, each with the fields of `Shape` that give the sizes of its axes."""

ABSENT: Mapping[str, Any] = {
    name: value for entry in FEATURES for name, value in entry.absent.items()
}
"""The fields of `Problem` that hold features, each with its value without the feature."""

NO_RULES: Mapping[str, Any] = {
    name: value
    for entry in FEATURES
    if entry.step == OF_RULES
    for name, value in entry.absent.items()
}
"""Those of them that decide which keys a query may attend to, or where tokens stand."""


def with_arrays(problem: Problem, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the problem that hold these arrays of features, by new arrays."""
    fields: dict[str, Any] = {}
    for name, array in arrays.items():
        field, _, part = name.partition(".")
        value: Any = array
        if part:
            value = fields.get(field, getattr(problem, field))
            value = dataclasses.replace(value, **{part: array})
        fields[field] = value
    return fields


def rounded(problem: Problem, to: Callable[[Any], Array]) -> dict[str, Any]:
    """Return the fields that hold features with arrays of numbers, each array passed to `to`."""
    numbers = {name for entry in FEATURES if not entry.whole for name in entry.arrays}
    arrays = problem.feature_arrays()
    return with_arrays(problem, {n: to(array) for n, array in arrays.items() if n in numbers})
