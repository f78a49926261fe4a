"""Features beyond masks: the arguments for windows, soft caps, sinks, lengths and the like.

An adapter declares the arguments that an implementation has for them. From these declarations and
those of the mask arguments, `MaskTable` in `conformance.adapter.arguments` derives every encoding
of a problem: a window, lengths and segments may also be part of a mask, and ALiBi part of an
additive bias. Soft caps, sinks, norms and rotary embeddings have no other encoding.

A declaration includes what differs between implementations: whether a window counts the query's own
position, where positions begin if lengths differ, which number means that there is no limit. An
encoding is offered only if the declared argument means exactly what the problem requires.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np

from conformance.definition.dtypes import DTYPES
from conformance.definition.features import (
    LIMITING,
    ancestors,
    drafted,
    global_queries,
    within_spans,
)
from conformance.definition.geometry import Fixed
from conformance.definition.problem import NO_WINDOW, Causal, Norm, Pairs, Problem, Rotary, Shape
from conformance.definition.problem import Window as Limits
from conformance.definition.rotary import ScalingKind, turning
from conformance.errors import WrongDeclaration


class Parameters(dict[str, Any]):
    """A dictionary of plain values as an argument, which can be a part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


Static = bool | int | float | str | tuple[Any, ...] | None
"""A plain value, which is passed unchanged and is a constant in a compiled program."""
Value = np.ndarray | Static

MASKABLE = (
    *("key lengths", "query lengths", "segments", "tree"),
    *("spans", "global tokens", "dilation", "window", "chunk", "alibi"),
)
"""The parts of a problem that a mask or an additive bias can express."""
PARTS = (
    *("positions", *MASKABLE, "soft cap", "sinks"),
    *("position axes", "rotary scaling", "rotary", "query/key norm"),
)
"""The parts of a problem other than mask, causal mask and bias.

"positions" are explicit positions of the tokens, and "position axes" those on several axes, by
which rotary pairs turn instead."""
MEETING = ("key lengths", "query lengths", "segments", "tree")
"""The rules that decide, regardless of position, whether a query may attend to a key."""

WHOLE = ("int32", "int64", "uint32", "uint64", "int16", "uint16", "int8", "uint8")
"""The integer dtypes that an argument may have."""


@dataclass(frozen=True)
class Variable:
    """An argument whose gradient, times `factor`, is the gradient of the problem's own array."""

    argument: str
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Said:
    """Which parts of a problem certain arguments express, and the values of these arguments.

    Attributes:
        parts: the parts, from `PARTS`, "causal" and "handing", that the arguments express, so that
            no mask has to.
        arguments: the value of each argument: an array or a plain value.
        variables: the arguments that have gradients, by the canonical name of the gradient.
        parameters: the arguments that are parameters of a layer.
        labels: readable descriptions of the arguments, such as "window=3".
        keys, queries: how many keys, and how many queries, of each batch entry count for alignment,
            `[batch]`; None if all of them do. A bottom-right alignment aligns the last query that
            counts with the last key that counts.
        placed: the parts for which the arguments give the position of every token.
        handing: how queries, keys and values are packed, paged or cached; None if they are not.
        stands: for packed or cached tokens, a function from an alignment to the positions of the
            keys minus those of the queries, `[batch query key]`, or to None if an implementation
            with this alignment rejects the lengths. None if positions follow from `keys` and
            `queries`.
        needs_flag: whether the causal flag has to be set too.
    """

    parts: frozenset[str] = frozenset()
    arguments: Mapping[str, Value] = field(default_factory=lambda: MappingProxyType({}))
    variables: Mapping[str, Variable] = field(default_factory=lambda: MappingProxyType({}))
    parameters: frozenset[str] = frozenset()
    labels: tuple[str, ...] = ()
    keys: np.ndarray | None = None
    queries: np.ndarray | None = None
    placed: frozenset[str] = frozenset()
    handing: Any = None
    stands: Callable[[Causal | None], np.ndarray | None] | None = None
    needs_flag: bool = False

    def saying(self, *parts: str, **arguments: Value) -> Said:
        """Return a copy that also expresses these parts, by these arguments."""
        labels = (f"{name}={_shown(value)}" for name, value in arguments.items())
        return replace(
            self,
            parts=self.parts | set(parts),
            arguments={**self.arguments, **arguments},
            labels=(*self.labels, *labels),
        )

    def differentiated(self, variables: Mapping[str, Variable], *, parameters: bool) -> Said:
        """Return a copy in which further arguments have gradients.

        Args:
            variables: these arguments, by the canonical name of the gradient.
            parameters: whether they are parameters of a layer.
        """
        own = {variable.argument for variable in variables.values() if parameters}
        together = {**self.variables, **variables}
        return replace(self, variables=together, parameters=self.parameters | own)

    def agrees(self, problem: Problem, part: str, alignment: Causal | None) -> bool:
        """Return whether the implementation places keys relative to queries as the problem does.

        What matters is the position of each key minus that of each query. If the arguments give the
        positions for `part`, the result is True. Otherwise, `stands` gives the differences; if it
        is None, positions count the tokens of each entry, aligned at the start or at the end. Pairs
        of a query and a key that the problem's lengths or segments keep apart do not matter.

        The causal mask of a problem with spans is one only for arguments that express the spans,
        and a window, a dilation or chunks beside global tokens for those that express the latter.

        Args:
            problem: the problem.
            part: the part of the problem that depends on positions, such as "window".
            alignment: how the implementation aligns queries and keys if their lengths differ; None
                if it rejects such a call.
        """
        if part == "causal" and problem.spans is not None and "spans" not in self.parts:
            return False
        limited = part in LIMITING and "global tokens" not in self.parts
        if limited and problem.global_tokens is not None:
            return False
        if part in self.placed:
            return True
        meeting = [name for name in problem.rule_names if name in MEETING]
        if self.stands is None:
            in_step = self._in_step(problem, alignment)
            if in_step or not meeting:
                return in_step
        met = [problem.rule(name) for name in meeting]
        counted = self.ahead(problem, alignment) if self.stands is None else self.stands(alignment)
        if counted is None:
            return False
        differs = counted[:, None] != problem.distances()
        return not np.any(reduce(np.logical_and, met, differs))

    def ahead(self, problem: Problem, alignment: Causal | None) -> np.ndarray | None:
        """Return the positions of keys minus those of queries, `[batch query key]`.

        Positions count tokens, and `alignment` tells how queries are aligned with keys. If it is
        None and the lengths differ, return None.
        """
        places = self.places(problem, alignment)
        return None if places is None else places[1][:, None] - places[0][:, :, None]

    def places(
        self, problem: Problem, alignment: Causal | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the positions of queries `[batch query]` and of keys `[1 key]` as in `ahead`."""
        shape = problem.shape
        if alignment is None and shape.query_length != shape.key_length:
            return None
        offset = np.zeros(shape.batch, dtype=np.int64)
        if alignment == "bottom-right":
            keys = shape.key_length if self.keys is None else self.keys
            offset = offset + keys - (shape.query_length if self.queries is None else self.queries)
        return np.arange(shape.query_length) + offset[:, None], np.arange(shape.key_length)[None]

    def _in_step(self, problem: Problem, alignment: Causal | None) -> bool:
        """Return whether all differences of positions within a segment are those of the problem.

        They are if its positions are off by the same number, so that no array of all pairs, which
        may be too large, is needed.
        """
        places, shape = self.places(problem, alignment), problem.shape
        if places is None:
            return False
        if 0 in (shape.batch, shape.query_length, shape.key_length):
            return True
        queries = places[0] - problem.position_of_queries
        keys = places[1] - problem.position_of_keys
        keys = np.broadcast_to(keys, (shape.batch, shape.key_length))
        segments = problem.segments
        for entry, off in enumerate(np.hstack([queries, keys])):
            ids = np.zeros(off.shape, np.int64)
            if segments is not None:
                ids = np.concatenate([segments.query[entry], segments.key[entry]])
            _, begins, index = np.unique(ids, return_index=True, return_inverse=True)
            if (off != off[begins][index]).any():
                return False
        return True


class Feature:
    """The base class of declarations of features; each can express certain parts of a problem.

    Attributes:
        says: the parts for which the feature is declared, from `PARTS`, or "handing" (how tokens
            are passed).
        named_by: the names of the fields that hold names of arguments. Such a field may also hold
            "", for an argument that does not exist, or a fixed number instead of an argument.
    """

    says: ClassVar[tuple[str, ...]] = ()
    named_by: ClassVar[tuple[str, ...]] = ("name",)

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that are fixed instead of an argument, by fields of `Fixed`."""
        return {}

    @property
    def covers(self) -> tuple[str, ...]:
        """The parts that the feature can express: those in `says`, and any expressed with them."""
        return self.says

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the declared arguments."""
        held = (getattr(self, field_name) for field_name in self.named_by)
        return tuple(name for name in held if isinstance(name, str) and name)

    @property
    def holds(self) -> dict[str, str]:
        """The names of the parameters of a layer that hold the feature, each with what it holds.

        That is the canonical name of an array, or another text if it cannot be converted to one.
        """
        return {}

    def held(self, parameters: Mapping[str, np.ndarray], epsilon: float) -> dict[str, Any]:
        """Return the fields of `Problem` for these parameters; {} if `holds` are not among them.

        `epsilon` is that of norms, if the declaration does not fix it.
        """
        return {}

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        """Yield `said` extended by this feature's arguments, once for each way to pass them.

        Yield nothing if the feature can express no part of the problem.
        """
        raise NotImplementedError


WindowForm = Literal["left right", "own and before", "before", "each side"]
WindowCounts = Literal["positions", "steps"]


@dataclass(frozen=True)
class Window(Feature):
    """An argument that limits how far from its own position a query attends to keys.

    Args:
        name: the name of the argument.
        form: what the value is. "left right": a pair, the numbers of keys before and after the
            query's own position. "own and before": the number of keys up to and including the key
            at that position. "before": the number of keys before it. "each side": the number of
            keys before it, and likewise after it. With "own and before" and "before", no query
            attends to a key after its own position, unless the value stands for no limit.
        none: the value that stands for no limit: -1, 0 or None.
        alignment: how queries are aligned with keys if their lengths differ; None if the
            implementation rejects such a call.
        needs_causal: whether the argument takes effect only if the causal flag is set too.
        dilation: the name of an argument for the dilation of the window: a query sees only keys
            whose distance is a multiple of it; "" if there is none.
        counts: what the numbers of a window count beside a dilation: "positions", or "steps" of the
            dilation, so that the window reaches as many times as far.
        global_tokens: the name of an argument `[batch key]`, 1 for tokens from which neither the
            window nor its dilation, nor an argument for chunks, hides a key, and which these
            hide from no query; "" if there is none.
        dtype: the dtype that this array must have: an integer dtype, or "bool".
    """

    name: str
    form: WindowForm = "left right"
    none: int | None = -1
    alignment: Causal | None = None
    needs_causal: bool = False
    dilation: str = ""
    counts: WindowCounts = "positions"
    global_tokens: str = ""
    dtype: str = "int32"
    named_by: ClassVar[tuple[str, ...]] = ("name", "dilation", "global_tokens")

    @property
    def says(self) -> tuple[str, ...]:  # type: ignore[override]
        """The window, and its dilation and global tokens if there are arguments for them."""
        dilation = ("dilation",) if self.dilation else ()
        return ("window", *dilation, *(("global tokens",) if self.global_tokens else ()))

    def __post_init__(self) -> None:
        check_choices(
            self.name,
            form=(self.form, get_args(WindowForm)),
            counts=(self.counts, get_args(WindowCounts)),
            dtype=(self.dtype, (*WHOLE, "bool")),
        )
        check_alignment(self.name, self.alignment)
        if self.none not in (-1, 0, None):
            raise WrongDeclaration(f"{self.name}: none={self.none!r}; say -1, 0 or None")

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        causal = problem.causal is not None and "causal" not in said.parts
        if self.needs_causal and not causal:
            return
        # Beside spans, the causal mask does not hide all keys after the query's own position.
        causal = causal and problem.spans is None
        tokens = problem.global_tokens
        if tokens is not None:
            if not self.global_tokens or not self._finds(problem, tokens, said):
                return
            native = tokens.astype(self.dtype)
            said = said.saying("global tokens", **{self.global_tokens: native})
        if not said.agrees(problem, "window", self.alignment):
            return
        for begun, window in self._dilated(problem, said):
            value = self.value(window, causal=causal)
            if value is not None:
                done = begun.saying("window", **{self.name: value})
                yield replace(done, needs_flag=done.needs_flag or self.needs_causal)
            before, after = window
            includes = self.form == "left right" and tokens is None
            if causal and not self.needs_causal and includes and after != 0:
                value = self.value((before, 0), causal=True)
                if value is not None:
                    yield begun.saying("window", "causal", **{self.name: value})

    def _finds(self, problem: Problem, tokens: np.ndarray, said: Said) -> bool:
        """Return whether the implementation finds the queries that are global tokens.

        It takes the number of a query from the key at its index, which the alignment moves.
        """
        places, keys = said.places(problem, self.alignment), problem.shape.key_length
        if places is None or said.handing is not None:
            return False
        inside = (places[0] >= 0) & (places[0] < keys)
        own = np.where(inside, places[0], 0)
        found = np.where(inside, np.take_along_axis(tokens, own, axis=1) if keys else 0, 0)
        return not np.any(problem.used()[0] & (found != global_queries(problem)))

    def _dilated(self, problem: Problem, said: Said) -> Iterator[tuple[Said, Limits]]:
        """Yield `said` with a dilation, if there is one to express, and as it is.

        Each comes with the window in what the argument counts then.
        """
        step = problem.dilation
        if step is not None and self.dilation:
            unit = step if self.counts == "steps" else 1
            before, after = (None if side is None else side // unit for side in problem.window)
            yield said.saying("dilation", **{self.dilation: int(step)}), (before, after)
        yield said, problem.window

    def limits(self, value: Any, *, causal: bool) -> tuple[int | None, int | None] | None:
        """Return how many keys before and after its own position a query sees with this value.

        Either number is None if there is no limit. Return None in place of both if the declaration
        does not give the value a meaning. If `causal` is true, the causal flag is set too, so that
        the query sees no key after its own position.
        """
        pair = self.form == "left right"
        own = self.form == "own and before"
        numbers = value if pair else (value,)
        if not isinstance(numbers, tuple) or len(numbers) != 1 + pair:
            return None
        for number in numbers:
            whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
            if number != self.none and not (whole and number >= own):
                return None
        before, *others = (None if number == self.none else number - own for number in numbers)
        every_side = before is None or self.form == "each side"
        (after,) = others or [before if every_side else 0]
        return before, 0 if causal else after

    def value(self, window: tuple[int | None, int | None], *, causal: bool) -> Static:
        """Return the value that expresses a window, or None if there is no such value.

        `window` holds the limits before and after a query's own position. If `causal` is true, a
        causal mask hides the keys after that position anyway.
        """
        before, after = window
        if self.form == "left right":
            if self.none == 0 and 0 in window:
                return None
            return tuple(self.none if limit is None else limit for limit in window)
        if before is None or not (causal or after == (before if self.form == "each side" else 0)):
            return None
        value = before + (self.form == "own and before")
        return None if value == self.none else value


@dataclass(frozen=True)
class Chunk(Feature):
    """An argument for the size of chunks: a query attends only to keys in its block of positions.

    Args:
        name: the name of the argument.
        none: the value that stands for no chunks: None or 0.
        alignment: how queries are aligned with keys if their lengths differ; None if the
            implementation rejects such a call. Blocks are counted from the first key.
        causal: whether the argument includes the causal mask.
    """

    name: str
    none: int | None = None
    alignment: Causal | None = None
    causal: bool = False
    says: ClassVar[tuple[str, ...]] = ("chunk",)

    def __post_init__(self) -> None:
        check_alignment(self.name, self.alignment)
        check_choices(self.name, none=(self.none, (None, 0)))

    @property
    def covers(self) -> tuple[str, ...]:
        return (*self.says, *(("causal",) if self.causal else ()))

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        from_first = problem.position_of_keys == np.arange(problem.shape.key_length)
        counted = "chunk" in said.placed or from_first.all()
        if problem.chunk is None or not counted:
            return
        causal = problem.causal is not None and problem.spans is None
        if said.agrees(problem, "chunk", self.alignment) and (causal or not self.causal):
            yield said.saying(*self.covers, **{self.name: int(problem.chunk)})


SpansForm = Literal["ids", "runs", "prefix"]


@dataclass(frozen=True)
class Spans(Feature):
    """An argument for bidirectional spans, whose queries also see the later keys of their span.

    Args:
        name: the name of the argument.
        form: what the array is. "ids": `[batch key]`, the id of the span of each key; keys with
            equal ids are in one span, wherever they stand. "runs": `[batch key]`, 1 for keys in
            spans; consecutive ones are one span. "prefix": `[batch]`, the number of keys of the
            only span, which begins at the first key.
        none: for "ids", the id of keys in no span: 0 or -1.
        alignment: how queries are aligned with keys if their lengths differ, to find the span of a
            query; None if the implementation rejects such a call.
        causal: whether the argument includes the causal mask; if not, it takes effect only if the
            causal flag is set too.
        limited: whether windows and chunks hold inside a span too. If not, the argument is not
            passed beside them.
        dtype: the integer dtype that the array must have.
    """

    name: str
    form: SpansForm = "ids"
    none: int = 0
    alignment: Causal | None = None
    causal: bool = False
    limited: bool = True
    dtype: str = "int32"
    says: ClassVar[tuple[str, ...]] = ("spans",)

    def __post_init__(self) -> None:
        check_choices(
            self.name,
            form=(self.form, get_args(SpansForm)),
            none=(self.none, (0, -1) if self.form == "ids" else (0,)),
            dtype=(self.dtype, WHOLE),
        )
        check_alignment(self.name, self.alignment)

    @property
    def covers(self) -> tuple[str, ...]:
        return (*self.says, *(("causal",) if self.causal else ()))

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        spans = problem.spans
        if spans is None or problem.causal is None or said.handing is not None:
            return
        limits = problem.window != NO_WINDOW or problem.chunk is not None
        values = self.native(spans)
        if (limits and not self.limited) or values is None or not self._agrees(problem, said):
            return
        done = said.saying(*self.covers, **{self.name: values})
        yield replace(done, needs_flag=done.needs_flag or not self.causal)

    def native(self, spans: np.ndarray) -> np.ndarray | None:
        """Return the value of the argument for ids `[batch key]`, or None if there is none."""
        inside = spans > 0
        if self.form == "ids":
            return np.where(inside, spans, self.none).astype(self.dtype)
        begins = inside & np.diff(inside, axis=1, prepend=False)
        runs = np.where(inside, begins.cumsum(axis=1), 0)
        if not _same_spans(runs, spans):
            return None
        if self.form == "runs":
            return inside.astype(self.dtype)
        lengths = inside.sum(axis=1)
        first = np.arange(spans.shape[1]) < lengths[:, None]
        return lengths.astype(self.dtype) if np.array_equal(first, inside) else None

    def _agrees(self, problem: Problem, said: Said) -> bool:
        """Return whether the implementation finds the problem's causal mask and spans.

        It compares indices, which the alignment moves, and takes the ids of a query from the key at
        its index.
        """
        if problem.segments is None and said._in_step(problem, self.alignment):
            # Its key is that at its position, and no array of all pairs is needed.
            return True
        ahead = said.ahead(problem, self.alignment)
        if ahead is None or problem.spans is None:
            return False
        spans = np.broadcast_to(problem.spans[:, None], ahead.shape)
        own = np.where(ahead == 0, spans, 0).sum(axis=2)
        found = (ahead <= 0) | within_spans(own, problem.spans)
        rules = dict(problem.rules())
        met = [rule for name, rule in rules.items() if name in MEETING]
        return not np.any(reduce(np.logical_and, met, found[:, None] != rules["causal"]))


def _same_spans(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether ids `[batch key]` make the same spans; 0 is the id of keys in no span."""
    for ids in zip(one, other, strict=True):
        pairs = np.unique(np.stack(ids), axis=1)
        inside = pairs[:, (pairs > 0).any(axis=0)]
        if (inside == 0).any() or any(len(np.unique(side)) < inside.shape[1] for side in inside):
            return False
    return True


TreeForm = Literal["parents", "ancestors"]


@dataclass(frozen=True)
class Tree(Feature):
    """An argument for a tree of drafted tokens, of which each sees those from which it descends.

    The drafted tokens are the queries, and the last keys. `PositionIds` pass their positions, which
    are depths in the tree; without them, positions count tokens.

    Args:
        name: the name of the argument.
        form: what the array is. "parents": integers `[batch query]`, for each query the index of
            the query from which it descends. "ancestors": booleans `[batch query query]`, True
            where the second is the first or one of its ancestors.
        root: for "parents", the number for a query that descends from none: -1, or "own" if it is
            the index of the query itself.
        aligns: whether the last query and the last key are those of lengths that are passed too,
            not those of the arrays.
        dtype: the integer dtype that parents must have.
    """

    name: str
    form: TreeForm = "parents"
    root: int | Literal["own"] = -1
    aligns: bool = True
    dtype: str = "int32"
    says: ClassVar[tuple[str, ...]] = ("tree",)

    def __post_init__(self) -> None:
        check_choices(
            self.name,
            form=(self.form, get_args(TreeForm)),
            root=(self.root, (-1, "own")),
            dtype=(self.dtype, WHOLE),
        )

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        tree, shape = problem.tree, problem.shape
        if tree is None or said.handing is not None or shape.key_length < shape.query_length:
            return
        counted = (said.keys, said.queries) if self.aligns else (None, None)
        lengths = zip(counted, (shape.key_length, shape.query_length), strict=True)
        keys, queries = (np.reshape(full if own is None else own, (-1, 1)) for own, full in lengths)
        index = np.arange(shape.key_length) - (keys - queries)
        if not (index == drafted(problem)).all():
            return
        yield said.saying("tree", **{self.name: self.native(tree)})

    def native(self, tree: np.ndarray) -> np.ndarray:
        """Return the value of the argument for parents `[batch query]`, -1 for none."""
        if self.form == "ancestors":
            return ancestors(tree)
        own = np.arange(tree.shape[1]) if self.root == "own" else -1
        return np.where(tree < 0, own, tree).astype(self.dtype)


@dataclass(frozen=True)
class SoftCap(Feature):
    """An argument for a cap, with which logits become cap · tanh(logits / cap).

    Args:
        name: the name of the argument.
        none: the value that stands for no cap.
    """

    name: str
    none: float | None = 0.0
    says: ClassVar[tuple[str, ...]] = ("soft cap",)

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        if problem.soft_cap is not None:
            yield said.saying("soft cap", **{self.name: float(problem.soft_cap)})


@dataclass(frozen=True)
class Sinks(Feature):
    """An array `[heads]` of sinks: logits that count only in the denominator of the softmax.

    Args:
        name: the name of the argument.
        units: "natural", or "log2" if the array holds exponents of two instead of e.
        per: "head", or "layer" if all heads have one logit in common, which is passed as a scalar;
            then only problems with one head can be expressed.
        parameter: whether `name` is the name of a parameter of the layer instead of an argument.
    """

    name: str
    units: Literal["natural", "log2"] = "natural"
    per: Literal["head", "layer"] = "head"
    parameter: bool = False
    says: ClassVar[tuple[str, ...]] = ("sinks",)

    def __post_init__(self) -> None:
        units, per = ("natural", "log2"), ("head", "layer")
        check_choices(self.name, units=(self.units, units), per=(self.per, per))

    @property
    def holds(self) -> dict[str, str]:
        # Sinks in other units have another name, since they cannot be converted.
        return {self.name: f"sinks, {self.units}, per {self.per}"} if self.parameter else {}

    def held(self, parameters: Mapping[str, np.ndarray], epsilon: float) -> dict[str, Any]:
        array = parameters.get(self.name) if self.parameter else None
        return {} if array is None else {"sinks": array.reshape(-1)}

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        sinks = problem.sinks
        if sinks is None:
            return
        if self.per == "layer":
            # One argument with several gradients would have to be summed by the definition too.
            if len(sinks) > 1:
                return
            sinks = sinks.reshape(())
        factor = 1.0 if self.units == "natural" else math.log2(math.e)
        # log₂ e has no short binary form: rounding it to a half-precision format moves the sink.
        narrow = self.units == "log2" and problem.format.roundoff > DTYPES["float32"].roundoff
        values = (sinks * factor).astype(np.float32 if narrow else np.float64)
        done = said.saying("sinks", **{self.name: values})
        variables = {"sinks": Variable(self.name, factor)}
        yield done.differentiated(variables, parameters=self.parameter)


@dataclass(frozen=True)
class Alibi(Feature):
    """An array of ALiBi slopes: slope · |distance| is subtracted from the logits.

    For a layer that computes its slopes itself, declare a subclass in which `own` returns these
    slopes and `native` returns the value of the argument that switches ALiBi on.

    Args:
        name: the name of the argument.
        axes: "heads" or "batch heads".
        alignment: how queries are aligned with keys, to count distances, if their lengths differ;
            None if the implementation rejects such a call.
        dtype: the NumPy dtype that the array must have: "float32", or "" for that of the inputs.
    """

    name: str
    axes: Literal["heads", "batch heads"] = "heads"
    alignment: Causal | None = None
    dtype: str = ""
    says: ClassVar[tuple[str, ...]] = ("alibi",)

    def __post_init__(self) -> None:
        check_choices(self.name, axes=(self.axes, ("heads", "batch heads")))
        check_alignment(self.name, self.alignment)
        check_choices(self.name, dtype=(self.dtype, ("", "float32")))

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        slopes = problem.slopes
        if slopes is None or not said.agrees(problem, "alibi", self.alignment):
            return
        own = self.own(problem.shape)
        if own is None or np.array_equal(slopes, problem.format.round(own)):
            yield said.saying("alibi", **{self.name: self.native(slopes, problem)})

    def own(self, shape: Shape) -> np.ndarray | None:
        """Return the only slopes `[heads]` that the implementation supports for this shape.

        Return None, the default, if any slopes can be passed.
        """
        return None

    def native(self, slopes: np.ndarray, problem: Problem) -> Value:
        """Return the value of the argument for slopes `[heads]`: by default, an array of them.

        The array has the layout `axes` and the dtype `dtype`, or float64 if that is "".
        """
        if self.axes == "batch heads":
            slopes = np.ascontiguousarray(np.broadcast_to(slopes, problem.shape.logits[:2]))
        return slopes.astype(self.dtype or np.float64)


@dataclass(frozen=True)
class Lengths(Feature):
    """An array `[batch]` of integers: how many keys, or queries, each entry has.

    Args:
        name: the name of the argument.
        of: "keys" or "queries".
        dtype: the integer dtype that the array must have.
        counts: "length", or "last index" if the array holds the index of the last token, which is
            one less.
        aligns: whether a bottom-right alignment of a causal flag, a window or ALiBi refers to the
            end of these lengths, not to the end of the array.
        needs_causal: whether the argument takes effect only if the causal flag is set too.
    """

    name: str
    of: Literal["keys", "queries"] = "keys"
    dtype: str = "int32"
    counts: Literal["length", "last index"] = "length"
    aligns: bool = True
    needs_causal: bool = False

    @property
    def says(self) -> tuple[str, ...]:  # type: ignore[override]
        """The part for which it is declared: the lengths of keys, or of queries."""
        return ("key lengths",) if self.of == "keys" else ("query lengths",)

    @property
    def covers(self) -> tuple[str, ...]:
        """Both, because a mask can express the other one."""
        return ("key lengths", "query lengths")

    def __post_init__(self) -> None:
        check_choices(
            self.name,
            of=(self.of, ("keys", "queries")),
            counts=(self.counts, ("length", "last index")),
            dtype=(self.dtype, WHOLE),
        )

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        lengths = problem.key_lengths if self.of == "keys" else problem.query_lengths
        if lengths is None or (self.counts == "last index" and not lengths.all()):
            return
        values = lengths - (self.counts == "last index")
        done = said.saying(*self.says, **{self.name: values.astype(self.dtype)})
        done = replace(done, needs_flag=done.needs_flag or self.needs_causal)
        counted: dict[str, Any] = {self.of: lengths} if self.aligns else {}
        yield replace(done, **counted)


class _Ids(Feature):
    """The base class of features that pass an integer for each query and each key."""

    query: str
    key: str
    dtype: str
    named_by: ClassVar[tuple[str, ...]] = ("query", "key")

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or self.query)
        check_choices(self.query, dtype=(self.dtype, WHOLE))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(super().names))

    def passed(self, query: np.ndarray, key: np.ndarray, said: Said) -> Iterator[Said]:
        """Yield `said` with these ids; yield nothing if they differ but share one argument."""
        if self.query != self.key or np.array_equal(query, key):
            ids = {self.query: query.astype(self.dtype), self.key: key.astype(self.dtype)}
            yield said.saying(*self.says, **ids)


@dataclass(frozen=True)
class SegmentIds(_Ids):
    """Arrays `[batch query]` and `[batch key]` of ids; a query attends only to keys with its id.

    Args:
        query: the name of the argument for queries.
        key: the name of the argument for keys; "" or the same name if one array serves for both, as
            in self-attention.
        dtype: the integer dtype that the arrays must have.
    """

    query: str
    key: str = ""
    dtype: str = "int32"
    says: ClassVar[tuple[str, ...]] = ("segments",)

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        segments = problem.segments
        if segments is not None:
            yield from self.passed(segments.query, segments.key, said)


@dataclass(frozen=True)
class PositionIds(_Ids):
    """Arrays `[batch query]` and `[batch key]` of integers: the position of each token.

    Args:
        query: the name of the argument for queries.
        key: the name of the argument for keys; "" or the same name if one array serves for both.
        of: the parts that use these positions: some of "rotary", "alibi", "window", "chunk" and
            "causal".
        dtype: the integer dtype that the arrays must have.
    """

    query: str
    key: str = ""
    of: tuple[str, ...] = ("rotary",)
    dtype: str = "int32"
    says: ClassVar[tuple[str, ...]] = ("positions",)

    def __post_init__(self) -> None:
        super().__post_init__()
        known = ("rotary", "alibi", "window", "chunk", "causal")
        if not self.of or not set(self.of) <= set(known):
            raise WrongDeclaration(f"{self.query}: of={self.of!r}; say some of {_list(known)}")

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        if said.handing is not None:
            return
        present = {*parts_of(problem), *(["causal"] if problem.causal else [])}
        present -= {"rotary"} if problem.axes is not None else set()
        p, r = _positions(problem)
        if not present & set(self.of) or min(p.min(initial=0), r.min(initial=0)) < 0:
            return
        for done in self.passed(p, r, said):
            yield replace(done, placed=said.placed | set(self.of))


class RotaryEmbedding(Feature):
    """The base class of features that rotate queries and keys."""

    pairs: Pairs
    flag: str
    alignment: Causal | None
    says: ClassVar[tuple[str, ...]] = ("rotary",)

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        rotary = problem.rotary
        if rotary is None or (not self.flag and self.pairs != rotary.pairs):
            return
        if not self.finds(problem, said):
            return
        arguments = self.arguments(problem, rotary)
        if arguments is not None:
            flag = {self.flag: rotary.pairs == "interleaved"} if self.flag else {}
            yield said.saying(*self.says, **arguments, **flag)

    def finds(self, problem: Problem, said: Said) -> bool:
        """Return whether the implementation turns tokens by the positions of the problem."""
        if problem.axes is not None or min(at.min(initial=0) for at in _positions(problem)) < 0:
            return False
        return said.agrees(problem, "rotary", self.alignment)

    def arguments(self, problem: Problem, rotary: Rotary) -> dict[str, Value] | None:
        """Return the arguments that describe the rotation, by name, without `flag`.

        Return None if the arguments cannot express this rotation.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RotaryTables(RotaryEmbedding):
    """Tables `[position pair]` of the cosine and sine of the angles of rotary embeddings.

    Scaled frequencies and an attention factor are in the tables.

    Args:
        cos: the name of the argument for cosines.
        sin: the name of the argument for sines.
        pairs: which of the rotated components form pair t: t and t + size/2 ("halves"), or 2t and
            2t + 1 ("interleaved"), where `size` is their number. It has no effect with a `flag`.
        flag: the name of a boolean argument that is true for interleaved pairs; "" if there is
            none, so that only `pairs` is possible.
        alignment: how queries are aligned with keys if their lengths differ, which determines the
            row of the first query; None if the implementation rejects such a call.
    """

    cos: str = "cos"
    sin: str = "sin"
    pairs: Pairs = "halves"
    flag: str = ""
    alignment: Causal | None = None
    says: ClassVar[tuple[str, ...]] = ("rotary", "rotary scaling")
    named_by: ClassVar[tuple[str, ...]] = ("cos", "sin", "flag")

    def __post_init__(self) -> None:
        check_choices(self.cos, pairs=(self.pairs, get_args(Pairs)))
        check_alignment(self.cos, self.alignment)

    def arguments(self, problem: Problem, rotary: Rotary) -> dict[str, Value]:
        # Even if positions begin again in each segment, the tables have a row for every token.
        shape = problem.shape
        last = max(shape.query_length, shape.key_length, 1) - 1
        last = max(last, *(int(at.max(initial=0)) for at in _positions(problem)))
        rates, factor = turning(problem)
        angles = np.arange(last + 1)[:, None] * rates
        return {self.cos: factor * np.cos(angles), self.sin: factor * np.sin(angles)}


@dataclass(frozen=True)
class RotaryBase(RotaryEmbedding):
    """Numbers from which an implementation computes rotary embeddings itself.

    Args:
        base: the name of the argument for the base, or the base itself if it is fixed.
        size: the name of the argument for the number of rotated components of a head; "" if all of
            them are rotated.
        pairs: which components form a pair, "halves" or "interleaved", as in `RotaryTables`.
        flag: the name of a boolean argument for interleaved pairs, or "", as in `RotaryTables`.
        alignment: how queries are aligned with keys if their lengths differ; None if the
            implementation rejects such a call.
    """

    base: str | float = "rope_base"
    size: str = ""
    pairs: Pairs = "halves"
    flag: str = ""
    alignment: Causal | None = None
    named_by: ClassVar[tuple[str, ...]] = ("base", "size", "flag")

    @property
    def numbers(self) -> dict[str, float]:
        return {} if isinstance(self.base, str) else {"base": self.base}

    def __post_init__(self) -> None:
        check_choices("rotary", pairs=(self.pairs, get_args(Pairs)))
        check_alignment("rotary", self.alignment)

    def arguments(self, problem: Problem, rotary: Rotary) -> dict[str, Value] | None:
        arguments: dict[str, Value] = {}
        if isinstance(self.base, str):
            arguments[self.base] = float(rotary.base)
        elif self.base != rotary.base:
            return None
        if self.size:
            arguments[self.size] = int(rotary.size)
        elif rotary.size != problem.shape.head_size:
            return None
        return arguments


Sections = Literal["side by side", "interleaved"]


@dataclass(frozen=True)
class RotaryConfig(RotaryEmbedding):
    """A dictionary from which an implementation computes rotary embeddings, scaled or not.

    It is the entry `rope_parameters` of a configuration of transformers: "rope_type", "rope_theta"
    (the base), "partial_rotary_factor" if only a part of each head is rotated, and what the kind of
    scaling needs.

    Args:
        name: the name of the argument.
        kinds: the values of "rope_type" that the implementation knows: some of "default", "linear",
            "dynamic", "yarn", "longrope" and "llama3".
        partial: whether it knows "partial_rotary_factor".
        pairs: which components form a pair, "halves" or "interleaved", as in `RotaryTables`.
        flag: the name of a boolean argument for interleaved pairs, or "", as in `RotaryTables`.
        alignment: how queries are aligned with keys if their lengths differ; None if the
            implementation rejects such a call.
        axes: the name of an argument `[3 batch query]` for positions of time, height and width
            (mrope), which replace those of the tokens; "" if there is none. The dictionary then
            has "mrope_section", also with "rope_type" "default", and "mrope_interleaved" if the
            sections are interleaved.
        key_axes: the name of an argument `[3 batch key]` for those of keys; "" or the same name if
            one array serves for both, as in self-attention.
        sections: how the implementation lays out the sections: "side by side", "interleaved", or
            both if "mrope_interleaved" selects one.
        dtype: the integer dtype that positions on axes must have.
    """

    name: str = "rope_parameters"
    kinds: tuple[str, ...] = ("default", *get_args(ScalingKind))
    partial: bool = True
    pairs: Pairs = "halves"
    flag: str = ""
    alignment: Causal | None = None
    axes: str = ""
    key_axes: str = ""
    sections: tuple[Sections, ...] = get_args(Sections)
    dtype: str = "int32"
    named_by: ClassVar[tuple[str, ...]] = ("name", "flag", "axes", "key_axes")

    def __post_init__(self) -> None:
        known = ("default", *get_args(ScalingKind))
        if not self.kinds or not set(self.kinds) <= set(known):
            raise WrongDeclaration(f"{self.name}: kinds={self.kinds!r}; say some of {_list(known)}")
        if not self.sections or not set(self.sections) <= set(get_args(Sections)):
            raise WrongDeclaration(
                f"{self.name}: sections={self.sections!r}; say some of {_list(get_args(Sections))}"
            )
        if self.key_axes and not self.axes:
            raise WrongDeclaration(
                f"{self.name}: key_axes={self.key_axes!r} without axes; say the argument for "
                "queries as axes"
            )
        check_choices(self.name, pairs=(self.pairs, get_args(Pairs)), dtype=(self.dtype, WHOLE))
        check_alignment(self.name, self.alignment)

    @property
    def says(self) -> tuple[str, ...]:  # type: ignore[override]
        """The rotation and its scaling, and positions on axes if there is an argument for them."""
        return ("rotary", "rotary scaling", *(("position axes",) if self.axes else ()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(super().names))

    def finds(self, problem: Problem, said: Said) -> bool:
        if problem.axes is None:
            return super().finds(problem, said)
        least = min(of.min(initial=0) for of in (problem.axes.query, problem.axes.key))
        met = said.ahead(problem, self.alignment) is not None
        return bool(self.axes) and met and said.handing is None and least >= 0

    def _axes(self, problem: Problem) -> dict[str, Value] | None:
        """Return the arguments for positions on axes; None if one array cannot serve for both."""
        axes = problem.axes
        if axes is None:
            return {}
        if self.key_axes in ("", self.axes) and not np.array_equal(axes.query, axes.key):
            return None
        of_keys = {self.key_axes: axes.key} if self.key_axes else {}
        return {
            name: np.moveaxis(array, -1, 0).astype(self.dtype)
            for name, array in {**of_keys, self.axes: axes.query}.items()
        }

    def arguments(self, problem: Problem, rotary: Rotary) -> dict[str, Value] | None:
        scaling, head_size = problem.rotary_scaling, problem.shape.head_size
        axes = self._axes(problem)
        if problem.axes is not None and scaling is not None:
            laid: Sections = "interleaved" if scaling.mrope_interleaved else "side by side"
            if laid not in self.sections:
                return None
        elif scaling is not None:
            # Without positions on axes, all pairs turn alike, whatever their sections are.
            scaling = replace(scaling, mrope_section=None, mrope_interleaved=None)
        told = Parameters(rope_type="default", rope_theta=float(rotary.base))
        if rotary.size != head_size:
            told["partial_rotary_factor"] = rotary.size / head_size
        told |= {} if scaling is None else scaling.parameters()
        whole = "partial_rotary_factor" not in told or self.partial
        known = told["rope_type"] in (*self.kinds, *([] if problem.axes is None else ["default"]))
        if axes is None or not known or not whole:
            return None
        return {self.name: cast("Static", told), **axes}


@dataclass(frozen=True)
class HeadNorm(Feature):
    """Arrays `[head]` of the gains of an RMS norm of each query and key head, before any rotation.

    Args:
        query: the name of the argument for queries.
        key: the name of the argument for keys.
        epsilon: the name of the argument for ε, or ε itself if it is fixed.
        parameters: whether `query` and `key` are names of parameters of the layer, not of
            arguments.
        offset: the number that the implementation adds to both arrays to get the gains, such as 1.
    """

    query: str
    key: str
    epsilon: str | float = "epsilon"
    parameters: bool = False
    offset: float = 0.0
    says: ClassVar[tuple[str, ...]] = ("query/key norm",)
    named_by: ClassVar[tuple[str, ...]] = ("query", "key", "epsilon")

    @property
    def numbers(self) -> dict[str, float]:
        return {} if isinstance(self.epsilon, str) else {"norm_epsilon": self.epsilon}

    def __post_init__(self) -> None:
        if self.query == self.key:
            raise WrongDeclaration(f"{self.query}: queries and keys have norms of their own")

    @property
    def holds(self) -> dict[str, str]:
        return {self.query: "norm.query", self.key: "norm.key"} if self.parameters else {}

    def held(self, parameters: Mapping[str, np.ndarray], epsilon: float) -> dict[str, Any]:
        if not self.holds or not self.holds.keys() <= parameters.keys():
            return {}
        query, key = (parameters[name] + self.offset for name in (self.query, self.key))
        fixed = self.epsilon if isinstance(self.epsilon, float) else epsilon
        return {"norm": Norm(query=query, key=key, epsilon=fixed)}

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        norm = problem.norm
        if norm is None:
            return
        arguments: dict[str, Value] = {}
        if isinstance(self.epsilon, str):
            arguments[self.epsilon] = float(norm.epsilon)
        elif self.epsilon != norm.epsilon:
            return
        gains = {self.query: norm.query - self.offset, self.key: norm.key - self.offset}
        done = said.saying("query/key norm", **gains, **arguments)
        variables = {"norm.query": Variable(self.query), "norm.key": Variable(self.key)}
        yield done.differentiated(variables, parameters=self.parameters)


@dataclass(frozen=True)
class Unasked(Feature):
    """What an implementation does in every call, without an argument; see `Adapter.fixed`.

    Args:
        fixed: the declaration.
    """

    fixed: Fixed
    named_by: ClassVar[tuple[str, ...]] = ()

    @property
    def says(self) -> tuple[str, ...]:  # type: ignore[override]
        """The parts that are done without being asked for."""
        rotary = ("rotary",) if self.fixed.rotary_base else ()
        return (*(("causal",) if self.fixed.causal else ()), *rotary)

    def ways(self, problem: Problem, said: Said) -> Iterator[Said]:
        agreed = (said.agrees(problem, part, self.fixed.causal) for part in self.says)
        same = problem.rotary == self.fixed.rotary(problem.shape) and problem.axes is None
        if same and all(agreed):
            yield replace(said, parts=said.parts | {*self.says})


DECLARATIONS: tuple[type[Feature], ...] = (
    Window,
    Chunk,
    Spans,
    Tree,
    SoftCap,
    Sinks,
    Alibi,
    Lengths,
    SegmentIds,
    PositionIds,
    RotaryTables,
    RotaryBase,
    RotaryConfig,
    HeadNorm,
)
"""The classes with which an adapter declares arguments."""


def parts_of(problem: Problem) -> tuple[str, ...]:
    """Return the parts that a problem has, in the order of `PARTS`."""
    present = {part for entry in problem.entries for part in entry.parts(problem)}
    return tuple(part for part in PARTS if part in present)


def _positions(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    return problem.position_of_queries, problem.position_of_keys


def _shown(value: Value) -> str:
    """Return a plain value as text; for an array, its dtype and shape, such as "int32[2, 5]"."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    kind = "float" if value.dtype.kind == "f" else str(value.dtype)
    return f"{kind}{list(value.shape)}"


def check_choices(name: str, **fields: tuple[Any, tuple[Any, ...]]) -> None:
    """Raise `WrongDeclaration` if a field has a value that is not one of its choices.

    Args:
        name: the name of the argument that is declared, for the message.
        fields: for each field by name, its value and its choices.
    """
    for field_name, (value, choices) in fields.items():
        if value not in choices:
            raise WrongDeclaration(f"{name}: {field_name}={value!r}; say one of {_list(choices)}")


def check_alignment(name: str, alignment: Any) -> None:
    """Raise `WrongDeclaration` if a value is neither an alignment nor None."""
    if alignment not in (*get_args(Causal), None):
        raise WrongDeclaration(
            f"{name}: alignment={alignment!r}; say 'top-left' or 'bottom-right', or None where "
            "lengths must be equal"
        )


def _list(values: tuple[Any, ...]) -> str:
    return ", ".join(map(repr, values))
