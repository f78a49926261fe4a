"""Mutants of what kernels have today: windows, caps, sinks, ALiBi, rotary, norms, lengths, caches.

Each is one hypothesis of what a convention could mean and does not, or one defect that happened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.cases.catalogue import case_of
from conformance.definition.dtypes import BFLOAT16, FLOAT16
from conformance.definition.problem import ranks, within
from mutants.attention import Attention
from mutants.contestant import Contestant, Featureful
from mutants.featured import Array, Featured
from mutants.mutant import (
    BEYOND_LENGTHS,
    BIAS,
    BLOCKED_KEY,
    BLOCKED_WEIGHTS,
    FEATURES,
    FULLY_MASKED,
    INPUTS,
    LAYOUT,
    MADE,
    MODES,
    OUTPUT,
    PARAMETERS,
    SPELLINGS,
    TWICE,
    WEIGHTS,
    Mutant,
)


@dataclass(frozen=True, eq=False)
class FeatureMutant(Mutant):
    """A mutant of the attention with features, looked for in the chapter "feature" only."""

    @property
    def kind(self) -> type[Attention]:
        return type("Mutant", (Featured,), dict(self.changes))

    def adapter(self) -> Contestant:
        """As an implementation that aligns queries and keys as its case does."""
        problem = case_of(self.case).problem(self.dtype)
        return Featureful.for_problem(self.name, self.kind, problem)


MUTANTS: list[FeatureMutant] = []

FORWARD = (OUTPUT, MODES)
BACKWARD = (INPUTS, PARAMETERS, FEATURES, BIAS)


def _chapter(chapter: str, case: str) -> Callable[..., None]:
    usual = case

    def add(
        name: str,
        did: str,
        *killed_by: str,
        case: str = "",
        dtype: str = "float32",
        **changes: Any,
    ) -> None:
        unknown = [stage for stage in changes if not hasattr(Featured, stage)]
        assert not unknown, f"{name}: the attention has no {unknown}"
        assert all(other.name != name for other in MUTANTS), f"{name}: the name is taken"
        at = case or usual
        at = at if at.count("/") > 1 else f"feature/{at}"
        MUTANTS.append(
            FeatureMutant(name, chapter, did, killed_by or FORWARD, changes, case=at, dtype=dtype)
        )

    return add


def _beside(stage: str, present: Callable[[Featured], Any], instead: Callable[..., Any]) -> Any:
    """A stage that does something else in the presence of something."""

    def changed(a: Featured, *given: Any) -> Any:
        return instead(a, *given) if present(a) else getattr(Featured, stage)(a, *given)

    return changed


def _same(a: Featured, array: Array) -> Array:
    return array


def _has(name: str) -> Callable[[Featured], bool]:
    return lambda a: a.argument(name) is not None


def _causal(a: Featured) -> bool:
    return a.given.causal


def _split(a: Featured) -> bool:
    return a.given.mode["fused"] and len(a.splits()) > 1


def _fused(a: Featured) -> bool:
    return a.given.mode["fused"]


def _cached(a: Featured) -> bool:
    return a.span is not None


def _without(a: Featured, *names: str) -> Featured:
    """The same call without some of what it names."""
    other = object.__new__(type(a))
    other.__dict__ |= a.__dict__
    masks = {name: mask for name, mask in a.given.masks.items() if name not in names}
    other.given = type(a.given)(**{**vars(a.given), "masks": masks})
    return other


def _weights_without(*names: str) -> Callable[[Featured], Array]:
    """Weights that the backward pass makes again without something."""

    def weights_again(a: Featured) -> Array:
        other = _without(a, *names)
        return Featured.softmax(other, other.masked(a.uncapped))

    return weights_again


def _less(count: int) -> int:
    return count - 1


def _more(count: int) -> int:
    return count + 1


def _wider(change: Callable[[int, int], int]) -> Callable[..., Any]:
    """The sides of a window beside a dilation, each changed by it; no limit stays none."""

    def window(a: Featured) -> tuple[int, int]:
        before, after = Featured.window(a)
        step = a.argument("dilation")
        if step is None:
            return before, after
        return tuple(side if side < 0 else change(side, step) for side in (before, after))

    return window


def _padded_with_first(keys: Array) -> Array:
    """Global tokens, and the first one where an entry has fewer than another."""
    count = keys.sum(axis=1, keepdims=True)
    return keys | ((np.arange(keys.shape[1]) == 0) & (count < count.max()))


# Chunks.

_add = _chapter("chunk", "chunk-causal/self")
AFTER_HISTORY = "chunk-after-history/gqa"


def _chunks(change: Callable[[int], int]) -> Callable[..., Any]:
    return lambda a: change(Featured.chunk_size(a))


_add("chunk-ignored", "accepts chunks and drops them", chunk_size=lambda a: 2**20)
_add("chunk-one-less", "makes chunks one position shorter", chunk_size=_chunks(lambda n: n - 1))
_add("chunk-one-more", "makes chunks one position longer", chunk_size=_chunks(lambda n: n + 1))
_add("chunk-twice", "makes chunks twice as long", chunk_size=_chunks(lambda n: 2 * n))
_add(
    "chunk-as-window",
    "slides: sees as many keys as a chunk has, ending with the own key",
    in_chunk=lambda a, p, r: within((a.chunk_size() - 1, 0), r[:, None] - p[:, :, None])[:, None],
)
_add(
    "chunk-in-place-of-causal",
    "leaves the causal mask out beside chunks",
    triangle=_beside("triangle", _has("chunk"), lambda a: np.ones((1, 1, 1, 1), bool)),
)
_add(
    "chunk-always-causal",
    "sees nothing after the query beside chunks, although nothing is causal",
    case="chunk/cross",
    in_chunk=lambda a, p, r: Featured.in_chunk(a, p, r) & (r[:, None] <= p[:, :, None])[:, None],
)
_add(
    "chunk-from-first-query",
    "counts chunks from the first query, not from the first key",
    case=AFTER_HISTORY,
    in_chunk=lambda a, p, r: Featured.in_chunk(a, p - p[:, :1], r - p[:, :1]),
)
_add(
    "chunk-of-rows",
    "takes the row of a query for its position",
    case=AFTER_HISTORY,
    in_chunk=lambda a, p, r: Featured.in_chunk(a, p - p[:, :1], r),
)
_add(
    "chunk-with-one-before",
    "sees the chunk before its own too",
    in_chunk=lambda a, p, r: (
        Featured.in_chunk(a, p, r) | Featured.in_chunk(a, p - a.chunk_size(), r)
    ),
)
_add(
    "chunk-only-in-forward",
    "makes the weights again without the chunks",
    *BACKWARD,
    weights_again=_weights_without("chunk"),
)
_add(
    "chunk-dropped-beside-sinks",
    "drops the chunks beside sinks",
    case="chunk-with-sinks/gqa",
    chunk_size=_beside("chunk_size", _has("sinks"), lambda a: 2**20),
)

# Dilation.

_add = _chapter("dilation", "dilation/self")


def _dilation(change: Callable[[int], int]) -> Callable[..., Any]:
    return lambda a: change(Featured.dilation(a))


_add("dilation-ignored", "accepts a dilation and drops it", dilation=lambda a: 1)
_add(
    "dilation-one-less",
    "takes the dilation for one more than the distance of two keys",
    case="dilation/tiles",
    dilation=_dilation(_less),
)
_add(
    "dilation-one-more",
    "skips as many keys as the dilation says",
    case="dilation/tiles",
    dilation=_dilation(_more),
)
_add(
    "dilation-from-first-key",
    "shows every query the same keys, counted from the first",
    in_steps=lambda a, d: (a.key_positions() % a.dilation() == 0)[:, None, None],
)
_add(
    "dilation-from-block",
    "counts the distances of four queries from the first of them",
    case="dilation/tiles",
    in_steps=lambda a, d: Featured.in_steps(a, d + np.arange(d.shape[2])[:, None] % 4),
)
_add(
    "dilation-of-rows",
    "counts the dilation from the row of a query, not from its position",
    case="dilation-after-history/gqa",
    in_steps=lambda a, d: Featured.in_steps(a, np.arange(a.keys) - np.arange(a.queries)[:, None]),
)
_add(
    "dilation-only-before",
    "skips keys before the query only",
    in_steps=lambda a, d: Featured.in_steps(a, d) | (d > 0),
)
_add(
    "dilation-without-own-key",
    "begins with the first key beyond the own one",
    case="dilation-without-window/cross",
    in_steps=lambda a, d: Featured.in_steps(a, d) & (d != 0),
)
_add(
    "dilation-shifted",
    "begins one key beside the own one",
    in_steps=lambda a, d: Featured.in_steps(a, d - 1),
)
_add(
    "dilation-shows-the-others",
    "shows the keys that it should skip",
    in_steps=lambda a, d: ~Featured.in_steps(a, d) | (d == 0),
)
_add(
    "dilation-with-window-in-steps",
    "counts the window in steps: sees as many times as far as the dilation says",
    case="dilation/tiles",
    window=_wider(lambda side, step: side * step),
)
_add(
    "dilation-with-window-divided",
    "takes a window of positions for one of steps, and divides it again",
    case="dilation/tiles",
    window=_wider(lambda side, step: side // step),
)
_add(
    "dilation-in-place-of-window",
    "drops the window beside a dilation",
    window=_wider(lambda side, step: -1),
)
_add(
    "dilation-in-place-of-causal",
    "leaves the causal mask out beside a dilation",
    case="dilation-causal/self",
    triangle=_beside("triangle", _has("dilation"), lambda a: np.ones((1, 1, 1, 1), bool)),
)
_add(
    "dilation-only-in-forward",
    "makes the weights again without the dilation",
    *BACKWARD,
    weights_again=_weights_without("dilation"),
)
_add(
    "dilation-dropped-beside-sinks",
    "drops the dilation beside sinks",
    case="dilation-with-sinks/gqa",
    dilation=_beside("dilation", _has("sinks"), lambda a: 1),
)

# Global tokens.

_add = _chapter("global", "global-tokens/self")


def _some(of: Callable[[Featured], Array]) -> Any:
    """What a rule shows, and only a part of what it cannot hide."""
    return _beside("or_global", _has("global_tokens"), lambda a, rule, seen: seen | of(a))


def _not_for(*rules: str) -> Callable[..., Any]:
    """Rules that hold for global tokens too."""

    def or_global(a: Featured, rule: str, seen: Array) -> Array:
        return seen if rule in rules else Featured.or_global(a, rule, seen)

    return or_global


def _beyond(stage: str) -> Callable[..., Any]:
    """A rule that does not hold for global tokens, although it should."""

    def changed(a: Featured, *given: Any) -> Array:
        return Featured.or_global(a, stage, getattr(Featured, stage)(a, *given))

    return changed


def _tokens(change: Callable[[Array], Array]) -> Callable[..., Any]:
    return lambda a: change(Featured.global_keys(a))


def _counted_twice(a: Featured, logits: Array) -> Array:
    """Logits to which the logarithm of 2 is added where a global key is near, too."""
    found = Featured.sloped(a, logits)
    if a.argument("global_tokens") is None or a.argument("window") is None:
        return found
    near = a.in_window(a.distance()) & a.global_keys()[:, None, None]
    twice = near & ~a.global_queries()[:, None, :, None]
    return found + np.where(twice, a.wide(np.log(2)), a.wide(0))


_add(
    "global-ignored",
    "accepts global tokens and drops them",
    or_global=lambda a, rule, seen: seen,
)
_add(
    "global-rows-only",
    "lets global tokens see all, and nobody see them",
    or_global=_some(lambda a: a.global_queries()[:, None, :, None]),
)
_add(
    "global-columns-only",
    "shows global tokens to all, and nothing to them",
    or_global=_some(lambda a: a.global_keys()[:, None, None]),
)
_add(
    "global-still-windowed",
    "shows global tokens the keys of the window that a dilation skips, and no more",
    case="global-tokens-with-dilation/self",
    or_global=_not_for("window"),
)
_add(
    "global-still-dilated",
    "skips keys for global tokens too, beyond the window",
    case="global-tokens-with-dilation/self",
    or_global=_not_for("dilation"),
)
_add(
    "global-still-in-chunk",
    "keeps global tokens inside their chunk",
    case="global-tokens-with-chunk/self",
    or_global=_not_for("chunk"),
)
_add(
    "global-of-rows",
    "looks for the global token of a query at its row, not at its position",
    case="global-tokens-after-history/gqa",
    global_queries=lambda a: a.told_at(a.global_keys(), a.index("query")) > 0,
)
_add(
    "global-of-first-entry",
    "reads the global tokens of the first entry of the batch for all",
    global_keys=_tokens(lambda keys: np.broadcast_to(keys[:1], keys.shape)),
)
_add(
    "global-of-every-entry",
    "takes a token that is global in one entry of the batch for global in all",
    global_keys=_tokens(lambda keys: np.broadcast_to(keys.any(axis=0), keys.shape)),
)
_add(
    "global-padded-with-first",
    "fills the list of an entry with fewer global tokens with token 0",
    global_keys=_tokens(_padded_with_first),
)
_add(
    "global-first-only",
    "knows one global token, the first",
    global_keys=_tokens(lambda keys: keys & (keys.cumsum(axis=1) == 1)),
)
_add(
    "global-as-prefix",
    "takes the number of global tokens for that of a prefix of them",
    global_keys=_tokens(lambda keys: np.arange(keys.shape[1]) < keys.sum(axis=1, keepdims=True)),
)
_add(
    "global-in-place-of-window",
    "shows global tokens to the others, and themselves, but not the keys near them",
    case="global-tokens-causal/self",
    in_window=_beside("in_window", _has("global_tokens"), lambda a, d: d == 0),
)
_add(
    "global-beyond-causal",
    "shows global tokens what comes later, and the later ones to all",
    case="global-tokens-causal/self",
    triangle=_beyond("triangle"),
)
_add(
    "global-beyond-lengths",
    "shows global tokens what is beyond the length",
    case="global-tokens-with-key-lengths/gqa",
    within_length=_beyond("within_length"),
    loaded=lambda a, side, heads: heads,
)
_add(
    "global-across-segments",
    "shows global tokens the other segments, and is seen from there",
    case="global-tokens-packed/self",
    same_segment=_beyond("same_segment"),
)
_add(
    "global-counted-twice",
    "counts a global token twice that is in the window too",
    sloped=_counted_twice,
)
_add(
    "global-only-in-forward",
    "makes the weights again without global tokens",
    *BACKWARD,
    weights_again=_weights_without("global_tokens"),
)
_add(
    "global-dropped-beside-sinks",
    "drops global tokens beside sinks",
    case="global-tokens-with-sinks/gqa",
    or_global=_beside("or_global", _has("sinks"), lambda a, rule, seen: seen),
)

# Bidirectional spans.

_add = _chapter("spans", "spans/self")


def _ids(change: Callable[[Array], Array]) -> Callable[..., Any]:
    return lambda a: change(Featured.key_spans(a))


def _shifted(ids: Array, by: int) -> Array:
    """The ids of the keys that stand `by` before, and 0 where there is none."""
    moved = np.zeros_like(ids)
    if by > 0:
        moved[:, by:] = ids[:, :-by]
    else:
        moved[:, :by] = ids[:, -by:]
    return moved


def _runs(ids: Array) -> Array:
    """The number of each run of equal ids, 0 where there is none."""
    return np.where(ids > 0, (ids != _shifted(ids, 1)).cumsum(axis=1), 0)


def _or_in_span(stage: str) -> Callable[..., Any]:
    """A rule that does not hold inside a span."""

    def changed(a: Featured, *given: Any) -> Array:
        seen = getattr(Featured, stage)(a, *given)
        if a.argument("spans") is None:
            return seen
        return seen | a.in_span(a.query_spans(), a.key_spans())[:, None]

    return changed


_add(
    "spans-ignored",
    "accepts spans and drops them",
    relaxed=lambda a, seen: seen,
)
_add(
    "spans-of-any-id",
    "does not compare ids: all spans see each other",
    in_span=lambda a, q, k: (q > 0)[:, :, None] & (k > 0)[:, None],
)
_add(
    "spans-of-none-too",
    "takes id 0, which is that of no span, for a span",
    in_span=lambda a, q, k: q[:, :, None] == k[:, None],
)
_add(
    "spans-without-last-key",
    "ends spans one key early",
    key_spans=_ids(lambda ids: np.where(_shifted(ids, -1) == ids, ids, 0)),
)
_add(
    "spans-with-one-key-more",
    "ends spans one key late",
    key_spans=_ids(lambda ids: np.where(ids == 0, _shifted(ids, 1), ids)),
)
_add(
    "spans-of-id-1-only",
    "compares ids with 1, as if they were types of tokens",
    key_spans=_ids(lambda ids: np.where(ids == 1, ids, 0)),
)
_add(
    "spans-without-causal",
    "leaves the causal mask out beside spans",
    relaxed=lambda a, seen: np.ones((1, 1, 1, 1), bool),
)
_add(
    "spans-see-only-themselves",
    "hides from the queries of a span the keys before it",
    relaxed=lambda a, seen: np.where(
        (a.query_spans() > 0)[:, None, :, None],
        a.in_span(a.query_spans(), a.key_spans())[:, None],
        seen,
    ),
)
_add(
    "spans-shown-to-all",
    "shows the keys of spans to all queries, also to those before",
    relaxed=lambda a, seen: seen | (a.key_spans() > 0)[:, None, None],
)
_add(
    "spans-see-everything",
    "shows all keys to the queries of spans",
    relaxed=lambda a, seen: seen | (a.query_spans() > 0)[:, None, :, None],
)
_add(
    "spans-joined-where-they-touch",
    "takes consecutive keys with ids for one span",
    case="spans-adjacent/self",
    key_spans=_ids(lambda ids: _runs(np.minimum(ids, 1))),
)
_add(
    "spans-parted-where-they-do-not-touch",
    "takes keys of one id that do not touch for two spans",
    case="spans-apart/self",
    key_spans=_ids(_runs),
)
_add(
    "spans-of-rows",
    "looks for the span of a query at its row, not at its position",
    case="spans-after-history/gqa",
    query_spans=lambda a: a.spans_at(a.index("query")),
)
_add(
    "spans-prefix-only",
    "knows no other span than a prefix",
    key_spans=_ids(lambda ids: np.where((ids == ids[:, :1]) & (_runs(ids) == 1), ids, 0)),
)
_add(
    "spans-of-first-entry",
    "reads the ids of the first entry of the batch for all",
    key_spans=_ids(lambda ids: np.broadcast_to(ids[:1], ids.shape)),
)
_add(
    "spans-beyond-window",
    "lets a span see all of itself, whatever the window hides",
    case="spans-with-window/self",
    in_window=_or_in_span("in_window"),
)
_add(
    "spans-beyond-chunk",
    "lets a span see all of itself, although blocks divide it",
    case="spans-with-chunk/self",
    in_chunk=_or_in_span("in_chunk"),
)
_add(
    "spans-beyond-lengths",
    "lets a span see its keys beyond the length",
    case="spans-with-key-lengths/gqa",
    within_length=_or_in_span("within_length"),
    loaded=lambda a, side, heads: heads,
)
_add(
    "spans-across-segments",
    "lets a span see its keys in another segment",
    case="spans-packed/self",
    same_segment=_or_in_span("same_segment"),
)
_add(
    "spans-only-in-forward",
    "makes the weights again without the spans",
    *BACKWARD,
    weights_again=_weights_without("spans"),
)
_add(
    "spans-dropped-beside-sinks",
    "drops the spans beside sinks",
    case="spans-with-sinks/gqa",
    relaxed=_beside("relaxed", _has("sinks"), lambda a, seen: seen),
)
_add(
    "spans-dropped-beside-window",
    "drops the spans beside a window",
    case="spans-with-window/self",
    relaxed=_beside("relaxed", _has("window"), lambda a, seen: seen),
)

# Trees of drafted tokens.

_add = _chapter("tree", "tree/gqa")


def _line(change: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    """A change to who is in the line of whom, given the parents too."""
    return lambda a, parents: change(Featured.line(a, parents), parents)


def _parents(line: Array, parents: Array) -> Array:
    """Which token is the parent of which, `[b q q]`."""
    return parents[:, :, None] == np.arange(parents.shape[1])


def _with(line: Array, token: int) -> Array:
    """The line of each token with one more token in it."""
    return line | (np.arange(line.shape[2]) == token % line.shape[2])


def _own(line: Array) -> Array:
    return np.eye(line.shape[1], dtype=bool)[None]


def _by_index(a: Featured, side: str) -> Array:
    """Where the tokens stood if there were no tree."""
    return a.index(side) + (a.before_queries() if side == "query" else 0)


_add(
    "tree-ignored",
    "accepts a tree and drops it",
    in_tree=lambda a: np.ones((1, 1, 1, 1), bool),
)
_add(
    "tree-as-chain",
    "lets a drafted token see all those before it, as in a text",
    parents=lambda a: np.tile(np.arange(a.queries) - 1, (a.batch, 1)),
)
_add(
    "tree-of-parents-only",
    "shows a drafted token itself and its parent, but not the parent's",
    line=_line(lambda line, parents: _own(line) | _parents(line, parents)),
)
_add(
    "tree-of-two-generations",
    "goes up the tree twice, however deep it is",
    case="tree/long",
    line=_line(
        lambda line, parents: (
            _own(line)
            | _parents(line, parents)
            | (1 * _parents(line, parents) @ (1 * _parents(line, parents)) > 0)
        )
    ),
)
_add(
    "tree-without-ancestors",
    "shows a drafted token no other than itself",
    line=_line(lambda line, parents: np.broadcast_to(_own(line), line.shape)),
)
_add(
    "tree-without-own",
    "hides a drafted token from itself",
    line=_line(lambda line, parents: line & ~_own(line)),
)
_add(
    "tree-root-is-last",
    "takes -1 for the last drafted token, as an index that counts from the end",
    line=_line(lambda line, parents: _with(line, -1)),
)
_add(
    "tree-root-is-first",
    "takes -1 for the first drafted token",
    line=_line(lambda line, parents: _with(line, 0)),
)
_add(
    "tree-with-siblings",
    "shows a drafted token those with the same parent",
    line=_line(lambda line, parents: line | (parents[:, :, None] == parents[:, None])),
)
_add(
    "tree-with-descendants",
    "shows a drafted token those that descend from it, too",
    line=_line(lambda line, parents: line | line.swapaxes(1, 2)),
)
_add(
    "tree-with-descendants-instead",
    "exchanges rows and columns of the tree's mask",
    line=_line(lambda line, parents: line.swapaxes(1, 2)),
)
_add(
    "tree-without-cache",
    "hides the cached keys from drafted tokens",
    cached_keys=lambda a, drafted: drafted < -a.keys,
)
_add(
    "tree-without-last-cached",
    "hides the last cached key, of which it was drafted",
    cached_keys=lambda a, drafted: drafted < -1,
)
_add(
    "tree-begins-a-key-late",
    "takes the first drafted token for a cached key",
    drafted=lambda a: Featured.drafted(a) - 1,
)
_add(
    "tree-of-first-entry",
    "reads the tree of the first entry of the batch for all",
    parents=lambda a: np.broadcast_to(a.argument("tree")[:1], a.argument("tree").shape),
)
_add(
    "tree-at-end-of-array",
    "looks for drafted tokens at the end of the array, beyond the length",
    case="tree-with-key-lengths/gqa",
    drafted=lambda a: np.arange(a.keys)[None] - a.keys + a.queries,
)
_add(
    "tree-turned-by-index",
    "rotates drafted tokens by their indices, not by their depths",
    case="tree-with-rotary/gqa",
    told=_by_index,
)
_add(
    "tree-alibi-by-index",
    "takes distances of drafted tokens from their indices, not from their depths",
    case="tree-with-alibi/separate",
    told=_by_index,
)
_add(
    "tree-window-by-index",
    "counts the window by indices of drafted tokens, not by their depths",
    case="tree-with-window/separate",
    told=_by_index,
)
_add(
    "tree-only-in-forward",
    "makes the weights again without the tree",
    *BACKWARD,
    weights_again=_weights_without("tree"),
)
_add(
    "tree-dropped-beside-sinks",
    "drops the tree beside sinks",
    case="tree-with-sinks/gqa",
    in_tree=_beside("in_tree", _has("sinks"), lambda a: np.ones((1, 1, 1, 1), bool)),
)

# Windows.

_add = _chapter("window", "window/cross")
CAUSAL_WINDOW = "window-causal/gqa"


def _seen_from_end(a: Featured) -> Array:
    """Logits in which the last query stands at the last key for the window only."""
    seen = Featured.in_window(a, a.distance() - (a.keys - a.queries))
    return np.where(seen, Featured.masked(_without(a, "window"), a.uncapped), a.wide(-np.inf))


def _window(change: Callable[[Featured, int, int], tuple[int, int]]) -> Callable[..., Any]:
    return lambda a: change(a, *Featured.window(a))


_add("window-ignored", "accepts a window and drops it", window=_window(lambda a, b, f: (-1, -1)))
_add(
    "window-one-key-less-before",
    "counts the own key among those before",
    window=_window(lambda a, b, f: (max(b - 1, 0), f)),
)
_add(
    "window-one-key-more-before",
    "sees one key more before the query",
    window=_window(lambda a, b, f: (b + 1, f)),
)
_add(
    "window-one-key-less-after",
    "counts the own key among those after",
    window=_window(lambda a, b, f: (b, max(f - 1, 0))),
)
_add(
    "window-one-key-more-after",
    "sees one key more after the query",
    window=_window(lambda a, b, f: (b, f + 1 if f >= 0 else f)),
)
_add(
    "window-one-key-less-before-beside-causal",
    "takes a window of W for the own key and W − 1 before, under a causal flag",
    case=CAUSAL_WINDOW,
    window=_beside("window", _causal, _window(lambda a, b, f: (max(b - 1, 0), f))),
)
_add(
    "window-one-key-more-before-beside-causal",
    "takes a window of the own key and W − 1 before for W before, under a causal flag",
    case=CAUSAL_WINDOW,
    window=_beside("window", _causal, _window(lambda a, b, f: (b + 1, f))),
)
_add(
    "window-without-own-key",
    "sees the neighbours, but not the own key",
    in_window=lambda a, d: Featured.in_window(a, d) & (d != 0),
)
_add(
    "window-sides-exchanged",
    "takes (left, right) for (right, left)",
    window=_window(lambda a, b, f: (f, b)),
)
_add(
    "window-symmetric",
    "sees as many keys after the query as before",
    window=_window(lambda a, b, f: (b, b)),
)
_add(
    "window-symmetric-although-causal",
    "replaces the causal mask with a window to both sides",
    case=CAUSAL_WINDOW,
    window=_beside("window", _causal, _window(lambda a, b, f: (b, b))),
    triangle=_beside("triangle", _has("window"), lambda a: np.ones((1, 1, 1, 1), bool)),
)
_add(
    "window-in-place-of-causal",
    "leaves the causal mask out beside a window, whose right side is open",
    case=CAUSAL_WINDOW,
    triangle=_beside("triangle", _has("window"), lambda a: np.ones((1, 1, 1, 1), bool)),
)
_add(
    "window-without-right-side",
    "ignores how many keys after the query are seen",
    window=_window(lambda a, b, f: (b, -1)),
)
_add(
    "window-each-side-without-right-side",
    "ignores the right side of a window of equal sides",
    case="window-each-side/self",
    window=_window(lambda a, b, f: (b, -1) if b == f else (b, f)),
)
_add(
    "window-each-side-causal",
    "sees nothing after the query if both sides of the window are equal",
    case="window-each-side/self",
    window=_window(lambda a, b, f: (b, 0) if b == f else (b, f)),
)
_add(
    "window-each-side-of-whole-width",
    "takes the number on each side for the width of the whole window",
    case="window-each-side/self",
    window=_window(lambda a, b, f: (b // 2, f // 2) if b == f else (b, f)),
)
_add(
    "window-without-left-side",
    "ignores how many keys before the query are seen",
    window=_window(lambda a, b, f: (-1, f)),
)
_add(
    "window-always-causal",
    "sees nothing after the query, whatever the window",
    window=_window(lambda a, b, f: (b, 0)),
)
_add(
    "window-of-0-is-none",
    "takes 0 keys before for no limit",
    case="window-nothing-before/separate",
    window=_window(lambda a, b, f: (b or -1, f)),
)
_add(
    "window-of-0-after-is-none",
    "takes 0 keys after for no limit",
    case="window-nothing-after/self",
    window=_window(lambda a, b, f: (b, f or -1)),
)
_add(
    "window-at-start-beside-cache",
    "counts the window from query 0 at key 0, although the last query stands at the last key",
    case=CAUSAL_WINDOW,
    in_window=lambda a, d: Featured.in_window(
        a, (a.key_positions()[:, None] - a.index("query")[:, :, None])[:, None]
    ),
)
_add(
    "window-at-end-although-from-start",
    "counts the window from the last key although query 0 stands at key 0",
    in_window=lambda a, d: Featured.in_window(a, d - (a.keys - a.queries)),
)
_add(
    "window-stretched",
    "spreads the queries over the keys where there are fewer",
    in_window=lambda a, d: Featured.in_window(
        a, np.arange(a.keys) - (np.arange(a.queries) * a.keys // a.queries)[:, None]
    ),
)
_add(
    "window-in-blocks",
    "counts blocks of two keys instead of keys",
    in_window=lambda a, d: Featured.in_window(
        a,
        (a.key_positions()[:, None] // 2 - a.query_positions()[:, :, None] // 2)[:, None] * 2,
    ),
)
_add(
    "window-twice-as-wide",
    "takes the whole width for each side",
    window=_window(lambda a, b, f: (b + max(f, 0), b + max(f, 0))),
)
_add(
    "window-only-in-forward",
    "makes the weights again without the window",
    *BACKWARD,
    weights_again=_weights_without("window"),
)
_add(
    "window-in-backward-one-more",
    "sees one key more before the query in the backward pass",
    *BACKWARD,
    weights_again=lambda a: np.where(
        np.roll(a.logits, -1, axis=-1) > -np.inf, Featured.weights_again(a), 0
    ),
)
_add(
    "window-at-end-only-in-backward",
    "counts the window from the last key in the backward pass, although query 0 stands at key 0",
    *BACKWARD,
    weights_again=lambda a: Featured.softmax(a, _seen_from_end(a)),
)
_add(
    "window-not-in-returned-weights",
    "returns weights that are made again without the window",
    WEIGHTS,
    MADE,
    case=CAUSAL_WINDOW,
    returned=lambda a: None if a.weights is None else a.stored(_weights_without("window")(a)),
)
_add(
    "window-of-first-head-only",
    "applies the window to the first head",
    in_window=lambda a, d: Featured.in_window(a, d) | (np.arange(a.shape.heads) > 0)[:, None, None],
)
_add(
    "window-dropped-beside-mask",
    "drops the window where a mask is passed",
    case="window-with-mask/separate",
    window=_beside("window", lambda a: _has("mask")(a) or _has("padding")(a), lambda a: (-1, -1)),
)
_add(
    "window-dropped-beside-bias",
    "drops the window where a bias is passed",
    case="window-with-bias/self",
    window=_beside("window", _has("bias"), lambda a: (-1, -1)),
)
_add(
    "window-dropped-in-split-path",
    "drops the window where the keys are split",
    window=_beside("window", _split, lambda a: (-1, -1)),
)
_add(
    "window-from-start-of-part",
    "drops what a window hides in the second part of the keys only",
    in_window=lambda a, d: (
        Featured.in_window(a, d) | ((np.arange(a.keys) >= a.keys // 2) & _split(a))
    ),
)
_add(
    "window-blocked-by-minus-ten",
    "lowers what is outside the window by 10 instead of hiding it",
    OUTPUT,
    BLOCKED_WEIGHTS,
    hide=lambda a, logits: (
        np.where(a.in_window(a.distance()), *(2 * [Attention.hide(_without(a, "window"), logits)]))
        - 10 * ~a.in_window(a.distance())
        if a.argument("window") is not None
        else Attention.hide(a, logits)
    ),
)
_add(
    "window-counts-visible-keys",
    "counts only keys that the mask leaves",
    case="window-with-mask/separate",
    in_window=lambda a, d: _counted_window(a, d),
)


def _counted_window(a: Featured, distance: Array) -> Array:
    seen = next(iter(Attention.visible(a)), None)
    if seen is None or seen.shape[-1] == 1:
        return Featured.in_window(a, distance)
    rank = np.cumsum(np.broadcast_to(seen, (*seen.shape[:2], a.queries, a.keys)), axis=-1)
    own = np.minimum(np.broadcast_to(a.query_positions()[:, None, :, None], rank[..., :1].shape),
                     a.keys - 1)  # fmt: skip
    return Featured.in_window(a, rank - np.take_along_axis(rank, own, axis=-1))


# Soft caps.

_add = _chapter("cap", "soft-cap-with-mask/cross")
CAP_BIAS = "soft-cap-with-bias/self"


def _limited(cap: float, values: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return cap * np.tanh(values / cap)


_add("cap-ignored", "accepts a soft cap and drops it", cap=lambda a: None)
_add(
    "cap-after-mask",
    "caps after masking, so that −∞ becomes −cap",
    masked=lambda a, s: Featured.capped(a, a.hide(a.biased(a.sloped(s)))),
)


def _capped_after_causal(a: Featured, logits: Array) -> Array:
    there = a.block(a.biased(a.sloped(logits)), a.triangle())
    return a.block(Featured.capped(a, there), a.in_window(a.distance()))


_add(
    "cap-after-causal",
    "caps after the causal mask, and before the window",
    case="window-causal-with-soft-cap/self",
    masked=_capped_after_causal,
)
_add(
    "cap-after-bias",
    "caps after adding the bias",
    case=CAP_BIAS,
    masked=lambda a, s: a.hide(a.sloped(Featured.capped(a, a.biased(s)))),
)
_add(
    "cap-after-alibi",
    "caps after ALiBi",
    case="alibi-with-soft-cap/gqa",
    masked=lambda a, s: a.hide(a.biased(Featured.capped(a, a.sloped(s)))),
)
_add(
    "cap-on-unscaled",
    "caps the scores before they are scaled",
    capped=lambda a, s: (
        s if a.cap() is None else a.wide(a.factor()) * _limited(a.wide(a.cap()), a.scores)
    ),
)
_add(
    "cap-not-multiplied",
    "forgets to multiply with the cap after tanh",
    capped=lambda a, s: s if a.cap() is None else np.tanh(s / a.wide(a.cap())),
)
_add(
    "cap-not-divided",
    "forgets to divide by the cap before tanh",
    capped=lambda a, s: s if a.cap() is None else a.wide(a.cap()) * np.tanh(s),
)
_add(
    "cap-clips",
    "cuts off at the cap instead of approaching it",
    capped=lambda a, s: s if a.cap() is None else np.clip(s, -a.wide(a.cap()), a.wide(a.cap())),
)
_add(
    "cap-from-above-only",
    "cuts off what is above the cap, and leaves what is below −cap",
    capped=lambda a, s: np.where(s > 0, Featured.capped(a, s), s),
)
_add(
    "cap-by-softsign",
    "uses x / (1 + abs(x)) in place of tanh",
    capped=lambda a, s: s if a.cap() is None else s / (1 + np.abs(s / a.wide(a.cap()))),
)
_add(
    "cap-twice",
    "caps the capped logits once more",
    capped=lambda a, s: Featured.capped(a, Featured.capped(a, s)),
)
_add(
    "cap-of-30",
    "uses the cap of a well-known model, not the one that is passed",
    cap=lambda a: None if Featured.cap(a) is None else 30.0,
)
_add(
    "cap-as-whole-number",
    "rounds the cap to a whole number",
    cap=lambda a: None if Featured.cap(a) is None else float(round(Featured.cap(a))),
)
_add(
    "cap-of-first-head-only",
    "caps the first head only",
    capped=lambda a, s: np.where(
        (np.arange(a.shape.heads) == 0)[:, None, None], Featured.capped(a, s), s
    ),
)
_add(
    "cap-dropped-beside-causal",
    "drops the cap on the causal path",
    case="soft-cap-causal/gqa",
    cap=_beside("cap", _causal, lambda a: None),
)
_add(
    "cap-dropped-beside-bias",
    "drops the cap where a bias is passed",
    case=CAP_BIAS,
    cap=_beside("cap", _has("bias"), lambda a: None),
)
_add(
    "cap-dropped-in-split-path",
    "drops the cap where the keys are split",
    cap=_beside("cap", _split, lambda a: None),
)
_add(
    "cap-dropped-beside-window",
    "drops the cap where there is a window",
    case="window-with-soft-cap/self",
    cap=_beside("cap", _has("window"), lambda a: None),
)
_add(
    "cap-dropped-beside-sinks",
    "drops the cap where there are sinks",
    case="soft-cap-with-sinks/cross",
    cap=_beside("cap", _has("sinks"), lambda a: None),
)
_add(
    "cap-derivative-missing",
    "forgets the cap in the backward pass",
    *BACKWARD,
    d_capped=_same,
)
_add(
    "cap-derivative-of-capped",
    "takes tanh of the capped logit for its derivative",
    *BACKWARD,
    slope_of_cap=lambda a, cap: 1 - np.tanh(_limited(cap, a.uncapped) / cap) ** 2,
)
_add(
    "cap-derivative-of-sum",
    "takes the capped logit with the bias added for the derivative of the cap",
    *BACKWARD,
    case="soft-cap-with-bias/self",
    slope_of_cap=lambda a, cap: 1 - (np.where(np.isfinite(a.logits), a.logits, 0) / cap) ** 2,
)
_add(
    "cap-derivative-not-divided",
    "squares the capped logit without dividing it by the cap",
    *BACKWARD,
    slope_of_cap=lambda a, cap: 1 - _limited(cap, a.uncapped) ** 2,
)
_add(
    "cap-derivative-not-squared",
    "uses 1 − tanh(x/cap), not its square, in the derivative of the cap",
    *BACKWARD,
    slope_of_cap=lambda a, cap: 1 - np.tanh(a.uncapped / cap),
)
_add(
    "cap-derivative-twice",
    "multiplies with the derivative of tanh twice",
    *BACKWARD,
    slope_of_cap=lambda a, cap: Featured.slope_of_cap(a, cap) ** 2,
)
_add(
    "cap-derivative-of-unscaled",
    "takes the derivative at the score before it is scaled",
    *BACKWARD,
    slope_of_cap=lambda a, cap: 1 - np.tanh(a.scores / cap) ** 2,
)
_add(
    "cap-derivative-with-bias",
    "takes the derivative at the biased logit",
    *BACKWARD,
    case=CAP_BIAS,
    slope_of_cap=lambda a, cap: 1 - np.tanh(a.biased(a.uncapped) / cap) ** 2,
)
_add(
    "cap-derivative-with-cap-on-top",
    "multiplies the derivative with the cap",
    *BACKWARD,
    slope_of_cap=lambda a, cap: cap * Featured.slope_of_cap(a, cap),
)
_add(
    "cap-derivative-of-a-clip",
    "uses 0 beyond the cap and 1 below",
    *BACKWARD,
    slope_of_cap=lambda a, cap: 1.0 * (np.abs(a.uncapped) < cap),
)
_add(
    "cap-in-gradient-of-bias",
    "multiplies the gradient of the bias with the derivative of the cap",
    BIAS,
    case=CAP_BIAS,
    d_added=lambda a, d, shape: Attention.d_added(a, a.d_capped(d), shape),
)
_add(
    "cap-not-in-weights-again",
    "makes the weights again without the cap",
    *BACKWARD,
    weights_again=_weights_without("soft_cap"),
)

# Sinks.

_add = _chapter("sink", "sinks/self")
MASKED_SINKS = "sinks-with-mask/cross"


def _sinks(change: Callable[[Featured, Array], Array]) -> Callable[[Featured], Array]:
    def sinks(a: Featured) -> Array:
        found = Featured.sinks(a)
        return None if found is None else change(a, found)

    return sinks


_add("sink-ignored", "accepts sinks and drops them", sink_power=lambda a, peak: 0 * peak)
_add(
    "sink-of-the-layer",
    "uses the sink of the first head for all",
    sinks=_sinks(lambda a, s: 0 * s + s[:, :1]),
)
_add(
    "sink-averaged-over-heads",
    "uses the mean of the sinks for all heads",
    sinks=_sinks(lambda a, s: 0 * s + s.mean(dtype=a.wide)),
)
_add(
    "sink-fixed-at-0",
    "adds exp(0) to the normaliser, whatever the sinks",
    sinks=_sinks(lambda a, s: 0 * s),
)
_add(
    "sink-of-1-not-shifted",
    "adds 1 to the normaliser, not relative to the row's maximum",
    sink_power=lambda a, peak: 0 * peak + (a.sinks() is not None),
)
_add(
    "sink-scaled",
    "multiplies the sinks with the scale, as other logits",
    sinks=_sinks(lambda a, s: s * a.wide(a.factor())),
)
_add(
    "sink-capped",
    "caps the sinks, as other logits",
    case="soft-cap-with-sinks/cross",
    sinks=_sinks(lambda a, s: s if a.cap() is None else _limited(a.wide(a.cap()), s)),
)
_add(
    "sink-counted-in-every-split",
    "adds the sinks in every part of the keys",
    case=MASKED_SINKS,
    merged_sink=lambda a, peak, parts: parts * a.sink_power(peak),
)
_add(
    "sink-lost-when-split",
    "forgets the sinks where parts of the keys are merged",
    case=MASKED_SINKS,
    merged_sink=lambda a, peak, parts: a.sink_power(peak) * (parts == 1),
)
_add(
    "sink-lost-in-fused-path",
    "has no sinks on the fused path",
    merged_sink=lambda a, peak, parts: 0 * peak,
)
_add(
    "sink-not-shifted",
    "adds exp(sink) to a normaliser that is relative to the row's maximum",
    sink_power=lambda a, peak: 0 * peak + (0 if a.sinks() is None else np.exp(a.sinks())),
)
_add(
    "sink-heads-reversed",
    "takes the sinks in the reverse order of heads",
    sinks=_sinks(lambda a, s: s[:, ::-1]),
)
_add(
    "sink-heads-off-by-one",
    "takes the sink of the next head",
    sinks=_sinks(lambda a, s: np.roll(s, 1, axis=1)),
)
_add(
    "sink-of-key-head",
    "takes the sink with the number of the key/value head",
    case="sinks-causal/gqa",
    sinks=_sinks(lambda a, s: s[:, np.arange(a.shape.heads) // a.group]),
)
_add(
    "sink-of-other-groups",
    "takes the sinks as (group heads), the heads being those of keys",
    case="sinks-causal/gqa",
    sinks=_sinks(lambda a, s: s[:, np.arange(a.shape.heads).reshape(a.group, -1).T.ravel()]),
)
_add(
    "sink-in-powers-of-two",
    "takes 2^sink for exp(sink)",
    sinks=_sinks(lambda a, s: s * a.wide(np.log(2))),
)
_add(
    "sink-in-bfloat16",
    "keeps sinks in bfloat16",
    sinks=_sinks(lambda a, s: BFLOAT16.round(s)),
)
_add(
    "sink-times-log2-e",
    "converts the sinks to powers of two, but not the logits",
    sinks=_sinks(lambda a, s: s * a.wide(np.log2(np.e))),
)
_add("sink-doubled", "adds the logit of the sink to itself", sinks=_sinks(lambda a, s: 2 * s))
_add("sink-negated", "uses exp(−sink)", sinks=_sinks(lambda a, s: -s))
_add(
    "sink-without-exponential",
    "adds the sink itself to the normaliser",
    sink_power=lambda a, peak: 0 * peak + (0 if a.sinks() is None else a.sinks()),
)
_add(
    "sink-twice",
    "adds the sinks twice",
    sink_power=lambda a, peak: 2 * Featured.sink_power(a, peak),
)
_add(
    "sink-takes-first-value",
    "gives what the sink attends to the first value",
    mix=lambda a, w, v: Attention.mix(a, w, v) + a.sink_share * v[:, :, :1],
)
_add(
    "sink-takes-mean-value",
    "gives what the sink attends to the mean of the values",
    mix=lambda a, w, v: (
        Attention.mix(a, w, v) + a.sink_share * v.mean(axis=2, keepdims=True, dtype=a.wide)
    ),
)
_add(
    "sink-in-place-of-first-key",
    "replaces the logit of the first key with the sink",
    sink_power=lambda a, peak: 0 * peak,
    hide=lambda a, logits: Attention.hide(
        a, logits if a.sinks() is None else np.where(np.arange(a.keys) == 0, a.sinks(), logits)
    ),
)
_add(
    "sink-biased",
    "lowers the sinks by the slopes, as a key before the first",
    case="alibi-with-sinks/gqa",
    sinks=_sinks(lambda a, s: s if a.slopes() is None else s - a.slopes()),
)
_add(
    "sink-dropped-beside-causal",
    "drops the sinks on the causal path",
    case="sinks-causal/gqa",
    sink_power=_beside("sink_power", _causal, lambda a, peak: 0 * peak),
)
_add(
    "sink-dropped-beside-mask",
    "drops the sinks where a mask is passed",
    case=MASKED_SINKS,
    sink_power=_beside(
        "sink_power", lambda a: _has("mask")(a) or _has("padding")(a), lambda a, peak: 0 * peak
    ),
)
_add(
    "sink-gradient-missing",
    "returns a gradient of 0 for the sinks",
    FEATURES,
    FULLY_MASKED,
    d_sinks=lambda a, row: 0 * Featured.d_sinks(a, row),
)
_add(
    "sink-gradient-negated",
    "forgets the sign of the gradient of the sinks",
    FEATURES,
    FULLY_MASKED,
    d_sinks=lambda a, row: -Featured.d_sinks(a, row),
)
_add(
    "sink-gradient-of-first-entry",
    "does not sum the gradient of the sinks over the batch",
    FEATURES,
    FULLY_MASKED,
    d_sinks=lambda a, row: -(a.sink_share * row)[:1].sum(axis=(0, 2, 3)),
)
_add(
    "sink-gradient-averaged",
    "averages the gradient of the sinks over the batch",
    FEATURES,
    FULLY_MASKED,
    d_sinks=lambda a, row: Featured.d_sinks(a, row) / a.wide(a.batch),
)
_add(
    "sink-gradient-of-last-query",
    "does not sum the gradient of the sinks over the queries",
    FEATURES,
    FULLY_MASKED,
    d_sinks=lambda a, row: -(a.sink_share * row)[:, :, -1:].sum(axis=(0, 2, 3)),
)
_add(
    "sink-gradient-summed-over-heads",
    "gives every sink the sum of all gradients",
    FEATURES,
    FULLY_MASKED,
    d_sinks=lambda a, row: 0 * Featured.d_sinks(a, row) + Featured.d_sinks(a, row).sum(),
)
_add(
    "sink-gradient-without-its-share",
    "sums the row terms without the weight of the sink",
    FEATURES,
    FULLY_MASKED,
    d_sinks=lambda a, row: -row.sum(axis=(0, 2, 3)),
)
_add(
    "sink-gradient-scaled",
    "multiplies the gradient of the sinks with the scale",
    FEATURES,
    FULLY_MASKED,
    d_sinks=lambda a, row: Featured.d_sinks(a, row) * a.wide(a.factor()),
)
_add(
    "sink-not-in-weights-again",
    "makes the weights again without the sinks",
    *BACKWARD,
    weights_again=_weights_without("sinks"),
)
_add(
    "sink-in-row-term",
    "divides the row term by what the keys attend without the sink",
    *BACKWARD,
    row=lambda a, w, d: Featured.row(a, w, d) / (1 - getattr(a, "sink_share", 0)),
)


def _without_saved_sinks(a: Featured, of_weights: Array, found: dict[str, Array]) -> Any:
    """As flash attention does, with weights and a share of the sinks made from one saved number."""
    peak = a.logits.max(axis=-1, keepdims=True, initial=-np.inf)
    a.largest = np.where(np.isfinite(peak), peak, a.wide(0))
    total = a.powers(a.logits - a.largest).sum(axis=-1, keepdims=True)
    a.log_total, a.weights = np.log(np.where(total > 0, total, a.wide(1))), None
    a.sink_share = a.sink_power(a.largest + a.log_total)
    return Featured.d_attention(a, of_weights, found)


_add(
    "sink-missing-in-log-sum-exp",
    "keeps a log-sum-exp without the sinks for the backward pass",
    *BACKWARD,
    d_attention=_without_saved_sinks,
)

# ALiBi.

_add = _chapter("alibi", "alibi/gqa")


def _slopes(change: Callable[[Featured, Array], Array]) -> Callable[[Featured], Array]:
    def slopes(a: Featured) -> Array:
        found = Featured.slopes(a)
        return None if found is None else change(a, found).astype(a.wide)

    return slopes


def _geometric(a: Featured, exponent: Callable[[Array], Array]) -> Array:
    return (2.0 ** exponent(np.arange(a.shape.heads)))[None, :, None, None]


_add("alibi-ignored", "accepts slopes and drops them", sloped=_same)
_add(
    "alibi-sign",
    "adds the distance, so that far keys gain",
    slopes=_slopes(lambda a, s: -s),
)
_add(
    "alibi-by-key-position",
    "adds slope · position of the key, which is the same under a causal mask only",
    far=lambda a: -a.key_positions()[:, None, None].astype(a.wide),
)
_add(
    "alibi-signed-distance",
    "subtracts the signed distance: keys after the query gain",
    far=lambda a: -a.distance().astype(a.wide),
)
_add(
    "alibi-only-before",
    "has no distance to keys after the query",
    far=lambda a: np.maximum(-a.distance(), 0).astype(a.wide),
)
_add(
    "alibi-slopes-geometric",
    "makes slopes as for a power of two of heads, and ignores what is passed",
    slopes=_slopes(lambda a, s: _geometric(a, lambda h: -8.0 * (h + 1) / a.shape.heads)),
)
_add(
    "alibi-slopes-from-exponent-0",
    "makes its own slopes, beginning with 1",
    slopes=_slopes(lambda a, s: _geometric(a, lambda h: -8.0 * h / a.shape.heads)),
)
_add(
    "alibi-slopes-of-next-power-of-two",
    "makes slopes for the next power of two of heads, and takes the first of them",
    slopes=_slopes(
        lambda a, s: _geometric(a, lambda h: -8.0 * (h + 1) / 2 ** np.ceil(np.log2(a.shape.heads)))
    ),
)
_add(
    "alibi-heads-reversed",
    "takes the slopes in the reverse order of heads",
    slopes=_slopes(lambda a, s: s[:, ::-1]),
)
_add(
    "alibi-slopes-sorted",
    "sorts the slopes, which are in two sequences for 6 heads",
    slopes=_slopes(lambda a, s: -np.sort(-s, axis=1)),
)
_add(
    "alibi-slope-of-first-head",
    "uses the slope of the first head for all",
    slopes=_slopes(lambda a, s: 0 * s + s[:, :1]),
)
_add(
    "alibi-slope-of-key-head",
    "takes the slope with the number of the key/value head",
    slopes=_slopes(lambda a, s: s[:, np.arange(a.shape.heads) // a.group]),
)
_add(
    "alibi-scaled",
    "multiplies the slopes with the scale",
    slopes=_slopes(lambda a, s: s * a.wide(a.factor())),
)
_add(
    "alibi-in-powers-of-two",
    "forgets log2 e in the slopes where exponentials are powers of two",
    slopes=_slopes(lambda a, s: s * a.wide(np.log(2))),
)
_add(
    "alibi-twice",
    "subtracts the distance twice",
    slopes=_slopes(lambda a, s: 2 * s),
)
_add(
    "alibi-twice-where-causal",
    "adds the slopes twice in causal self-attention, once with the mask",
    case="alibi-in-models/self",
    slopes=_slopes(lambda a, s: 2 * s if a.given.causal else s),
)
_add(
    "alibi-squared",
    "squares the distance",
    far=lambda a: Featured.far(a) ** 2,
)
_add(
    "alibi-from-start-beside-cache",
    "counts the distance from query 0 at key 0, although the last query stands at the last key",
    case="alibi-causal/separate",
    far=lambda a: np.abs(a.key_positions()[:, None] - a.index("query")[:, :, None])[:, None].astype(
        a.wide
    ),
)
_add(
    "alibi-from-end-although-from-start",
    "counts the distance from the last key although query 0 stands at key 0",
    far=lambda a: np.abs(a.distance() - (a.keys - a.queries)).astype(a.wide),
)
_add(
    "alibi-dropped-beside-causal",
    "drops the slopes on the causal path",
    case="alibi-causal/separate",
    slopes=_beside("slopes", _causal, lambda a: None),
)
_add(
    "alibi-dropped-beside-bias",
    "drops the slopes where a bias is passed",
    case="alibi-with-bias/cross",
    slopes=_beside("slopes", _has("bias"), lambda a: None),
)
_add(
    "alibi-dropped-beside-window",
    "drops the slopes where there is a window",
    case="window-with-alibi/separate",
    slopes=_beside("slopes", _has("window"), lambda a: None),
)
_add(
    "alibi-not-in-weights-again",
    "makes the weights again without the slopes",
    *BACKWARD,
    weights_again=_weights_without("slopes"),
)
_add(
    "alibi-distance-in-bfloat16",
    "takes distances from positions in bfloat16",
    case="alibi-far/longer",
    far=lambda a: np.abs(
        BFLOAT16.round(a.key_positions()[:, None].astype(float))
        - BFLOAT16.round(a.query_positions()[:, :, None].astype(float))
    )[:, None].astype(a.wide),
)

_add(
    "alibi-slopes-in-bfloat16",
    "keeps the slopes in bfloat16",
    case="window-causal-with-alibi/self",
    slopes=lambda a: (
        None
        if (slopes := Featured.slopes(a)) is None
        else BFLOAT16.round(slopes).astype(slopes.dtype)
    ),
)

# Rotary positions.

_add = _chapter("rotary", "rotary/self")
PARTIAL = "rotary-partial/gqa"
ROTARY_CACHE = "rotary-causal/separate"


def _positions(change: Callable[..., Array]) -> Callable[..., Array]:
    return lambda a, side: change(a, side, Featured.rotary_positions(a, side))


def _only(side: str, stage: str) -> Callable[..., Array]:
    """A stage that does nothing to one side."""
    return lambda a, name, heads, *more: (
        heads if name == side else getattr(Featured, stage)(a, name, heads, *more)
    )


def _reflected(a: Featured, heads: Array) -> Array:
    second = np.isin(np.arange(heads.shape[-1]), a.pairs()[1])
    return np.where(second, -heads, heads)


_add("rotary-ignored", "accepts rotary positions and drops them",
     rotated=lambda a, side, heads, positions: heads)  # fmt: skip
_add(
    "rotary-pairs-swapped",
    "rotates halves where pairs are interleaved, and the other way round",
    interleaved=lambda a: not Featured.interleaved(a),
)


def _keys_in_other_pairs(a: Featured, side: str, heads: Array, positions: Array) -> Array:
    if side == "query" or not a.turns():
        return Featured.rotated(a, side, heads, positions)
    size, order = a.rotary_size(), np.arange(heads.shape[-1])
    halves, neighbours = np.arange(size).reshape(2, -1), np.arange(size).reshape(-1, 2).T
    own, other = (neighbours, halves) if a.interleaved() else (halves, neighbours)
    order[own.ravel()] = other.ravel()
    return Featured.rotated(a, side, heads[..., order], positions)[..., np.argsort(order)]


_add(
    "rotary-pairs-of-keys-swapped",
    "reads the flag for pairs for queries only: keys have the other pairs",
    rotated=_keys_in_other_pairs,
)
_add(
    "rotary-flag-ignored",
    "rotates halves whatever the flag says",
    case=PARTIAL,
    interleaved=lambda a: False,
)


def _again(*sides: str) -> Callable[..., Array]:
    """A stage that rotates the heads of some sides twice."""

    def rotated(a: Featured, side: str, heads: Array, positions: Array) -> Array:
        once = Featured.rotated(a, side, heads, positions)
        return Featured.rotated(a, side, once, positions) if side in sides else once

    return rotated


_add("rotary-twice", "rotates queries and keys twice", rotated=_again("query", "key"))
_add("rotary-of-queries-twice", "rotates queries twice", rotated=_again("query"))
_add("rotary-of-keys-twice", "rotates keys twice", rotated=_again("key"))
_add(
    "rotary-turned-back",
    "rotates keys the other way round",
    rotated=lambda a, side, heads, p: Featured.rotated(a, side, heads, -p if side == "key" else p),
)
_add(
    "rotary-of-queries-turned-back",
    "rotates queries the other way round",
    rotated=lambda a, s, heads, p: Featured.rotated(a, s, heads, -p if s == "query" else p),
)
_add(
    "rotary-sign-of-sine",
    "rotates queries and keys the other way round",
    rotated=lambda a, side, heads, p: Featured.rotated(a, side, heads, -p),
)


def _by_interleaved_table(a: Featured, side: str, heads: Array, positions: Array) -> Array:
    """Components that are half a head apart, by angles that are repeated for neighbours."""
    angles = np.repeat(a.angles(positions), 2, axis=-1)
    cos, sin, half = np.cos(angles), np.sin(angles), angles.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    turned = heads * cos + np.concatenate([-second, first], axis=-1) * sin
    return a.hold(turned.astype(a.wide))


_add(
    "rotary-table-interleaved",
    "rotates halves by a table of angles that is laid out for neighbours",
    interleaved=lambda a: False,
    rotated=_by_interleaved_table,
)
_add(
    "rotary-both-turned-back",
    "rotates by the negative angle, which is another attention where pairs are not symmetric",
    rotated=lambda a, side, heads, p: Featured.rotated(
        a, side, heads, p if side == "key" else p[:, ::-1]
    ),
)
_add(
    "rotary-base-of-10000",
    "uses the usual base, not the one that is passed",
    base=lambda a: 10000.0,
)
_add(
    "rotary-base-rounded",
    "keeps the base in float16, where it is 1 % off",
    base=lambda a: Featured.base(a) * 1.01,
)
_add(
    "rotary-whole-head",
    "rotates the whole head although only its first components are to be rotated",
    case=PARTIAL,
    rotary_size=lambda a: a.shape.head_size,
)
_add(
    "rotary-half-of-the-size",
    "rotates half as many components",
    case=PARTIAL,
    rotary_size=lambda a: max(2, Featured.rotary_size(a) // 2),
)
_add(
    "rotary-last-components",
    "rotates the last components of the head instead of the first",
    case=PARTIAL,
    pairs=lambda a: tuple(x + a.shape.head_size - a.rotary_size() for x in Featured.pairs(a)),
)
_add(
    "rotary-rest-dropped",
    "leaves out the components that are not rotated",
    case=PARTIAL,
    rotated=lambda a, side, heads, p: (
        Featured.rotated(a, side, heads, p)
        if a.argument("rotary_base") is None
        else np.where(
            np.arange(heads.shape[-1]) < a.rotary_size(), Featured.rotated(a, side, heads, p), 0
        ).astype(a.wide)
    ),
)
_add(
    "rotary-frequencies-by-head-size",
    "divides the exponents by the head size, not by the rotated size",
    case=PARTIAL,
    frequencies=lambda a: a.base() ** (-2.0 * np.arange(a.rotary_size() // 2) / a.shape.head_size),
)
_add(
    "rotary-exponents-halved",
    "uses base^(−t/size) as the frequency of pair t",
    frequencies=lambda a: Featured.frequencies(a) ** 0.5,
)
_add(
    "rotary-exponents-doubled",
    "uses base^(−4t/size) as the frequency of pair t",
    frequencies=lambda a: Featured.frequencies(a) ** 2,
)
_add(
    "rotary-exponents-from-1",
    "begins with the frequency of pair 1",
    frequencies=lambda a: Featured.frequencies(a) * a.base() ** (-2.0 / a.rotary_size()),
)
_add(
    "rotary-frequencies-reversed",
    "gives the first pair the frequency of the last",
    frequencies=lambda a: Featured.frequencies(a)[::-1],
)
_add(
    "rotary-one-frequency",
    "rotates all pairs with the same frequency",
    frequencies=lambda a: 0 * Featured.frequencies(a) + 1,
)
_add(
    "rotary-second-sign",
    "adds where the first component of a pair of the keys subtracts",
    rotated=lambda a, side, heads, p: (
        Featured.rotated(a, side, heads, p)
        if side == "query" or a.argument("rotary_base") is None
        else _reflected(a, Featured.rotated(a, side, heads, -p))
    ),
)
_add(
    "rotary-sine-and-cosine-exchanged",
    "takes the sine for the cosine of keys",
    rotated=lambda a, side, heads, p: (
        Featured.rotated(a, side, heads, p)
        if side == "query" or a.argument("rotary_base") is None
        else a.turn(heads, np.pi / 2 - a.angles(p))
    ),
)
_add(
    "rotary-keys-not-rotated",
    "rotates queries only",
    rotated=_only("key", "rotated"),
)
_add(
    "rotary-queries-not-rotated",
    "rotates keys only",
    rotated=_only("query", "rotated"),
)
_add(
    "rotary-values-too",
    "rotates values too",
    case=PARTIAL,
    prepared_values=lambda a, v: (
        v if v.shape[-1] != a.shape.head_size else a.rotated("key", v, a.rotary_positions("key"))
    ),
)
_add(
    "rotary-query-positions-from-1",
    "counts the positions of queries from 1 and those of keys from 0",
    rotary_positions=_positions(lambda a, side, p: p + (side == "query")),
)
_add(
    "rotary-positions-reversed",
    "counts positions from the end",
    rotary_positions=_positions(lambda a, side, p: p[:, ::-1]),
)
_add(
    "rotary-from-0-beside-cache",
    "rotates queries by 0, 1, … although they follow the keys of a cache",
    case=ROTARY_CACHE,
    rotary_positions=lambda a, side: a.index(side),
)
_add(
    "rotary-at-end-although-from-start",
    "rotates queries as if they followed a cache although query 0 stands at key 0",
    case="rotary/separate",
    rotary_positions=_positions(
        lambda a, side, p: p + (a.keys - a.queries) * (side == "query" and not a.at_end())
    ),
)
_add(
    "rotary-same-position-for-all-queries",
    "rotates all queries of a chunk by the position of the first",
    case=ROTARY_CACHE,
    rotary_positions=_positions(lambda a, side, p: 0 * p + p[:, :1] if side == "query" else p),
)
_add(
    "rotary-angles-in-bfloat16",
    "keeps angles in bfloat16, which has three digits",
    case="rotary-far/longer",
    angles=lambda a, p: BFLOAT16.round(Featured.angles(a, p)),
)
_add(
    "rotary-angles-in-float16",
    "keeps angles in float16",
    case="rotary-far/longer",
    angles=lambda a, p: FLOAT16.round(Featured.angles(a, p)),
)
_add(
    "rotary-angles-in-float32",
    "computes frequencies and angles in float32 beside heads of float64",
    dtype="float64",
    angles=lambda a, p: Featured.angles(a, p).astype(np.float32).astype(a.wide),
    turning=lambda a: np.float32(Featured.turning(a)).astype(a.wide),
)


def _by_narrow_table(a: Featured, heads: Array, angles: Array) -> Array:
    first, second = a.pairs()
    cos, sin = (BFLOAT16.round(a.attention_factor() * f(angles)) for f in (np.cos, np.sin))
    turned = heads.copy()
    turned[..., first] = heads[..., first] * cos - heads[..., second] * sin
    turned[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return turned


def _narrow_throughout(a: Featured, side: str, heads: Array, positions: Array) -> Array:
    at = BFLOAT16.round(positions.astype(float))[:, None, :, None]
    angles = BFLOAT16.round(at * BFLOAT16.round(a.turning()))
    return a.hold(_by_narrow_table(a, heads, angles)) if a.turns() else heads


_add(
    "rotary-table-in-bfloat16",
    "keeps cosines and sines in bfloat16",
    turn=_by_narrow_table,
)
_add(
    "rotary-frequencies-rounded",
    "keeps frequencies in bfloat16, as a layer does whose buffers are converted",
    turning=lambda a: BFLOAT16.round(Featured.turning(a)),
)
_add(
    "rotary-made-in-bfloat16",
    "computes the table of cosines and sines in bfloat16 throughout",
    rotated=_narrow_throughout,
)
_add(
    "rotary-positions-in-bfloat16",
    "keeps positions in bfloat16, which has no odd number above 256",
    case="rotary-far/longer",
    angles=lambda a, p: Featured.angles(a, BFLOAT16.round(p.astype(float))),
)
_add(
    "rotary-positions-in-8-bits",
    "counts positions in 8 bits",
    case="rotary-far/longer",
    angles=lambda a, p: Featured.angles(a, p % 256),
)
_add(
    "rotary-table-of-256",
    "takes the last row of a table for all positions beyond it",
    case="rotary-far/longer",
    angles=lambda a, p: Featured.angles(a, np.minimum(p, 255)),
)
_add(
    "rotary-positions-in-float16",
    "keeps positions in float16, which has no odd number above 2,048",
    case="positions-far/self",
    angles=lambda a, p: Featured.angles(a, FLOAT16.round(p.astype(float))),
)
_add(
    "rotary-table-of-4096",
    "takes the last row of a table of 4,096 positions for all beyond it",
    case="positions-far/self",
    angles=lambda a, p: Featured.angles(a, np.minimum(p, 4095)),
)
_add(
    "rotary-before-norm",
    "rotates before normalising, whose weights then meet other components",
    case="norm-with-rotary/gqa",
    prepared=lambda a, side, heads, p: a.normed(side, a.rotated(side, heads, p)),
)
_add(
    "rotary-backward-turned-on",
    "rotates gradients the same way as heads",
    *BACKWARD,
    d_rotated=lambda a, side, g: a.turn(g, a.angles(a.rotary_positions(side))),
)
_add(
    "rotary-backward-missing",
    "does not rotate gradients back",
    *BACKWARD,
    d_rotated=lambda a, side, g: g,
)
_add(
    "rotary-backward-missing-for-keys",
    "does not rotate the gradient of keys back",
    *BACKWARD,
    d_rotated=_only("key", "d_rotated"),
)
_add(
    "rotary-backward-from-0",
    "rotates the gradient of queries back by 0, 1, … beside a cache",
    *BACKWARD,
    case=ROTARY_CACHE,
    d_rotated=lambda a, side, g: a.turn(g, -a.angles(a.index(side))),
)

# Scaled rotary frequencies.

_add = _chapter("scaling", "scaled-llama3/full-tiles")
LINEAR, YARN = "scaled-linear/self", "scaled-yarn/full-tiles"
UNTRUNCATED, MSCALE = "scaled-yarn-untruncated/full-tiles", "scaled-yarn-mscale/gqa"
DYNAMIC, DYNAMIC_CACHE = "scaled-dynamic/self", "scaled-dynamic-after-history/separate"
LONGROPE, SHORT = "scaled-longrope/self", "scaled-longrope-short/self"
FACTOR = "scaled-attention-factor/gqa"


def _plainly(a: Featured) -> Array:
    return a.frequencies()


def _all_divided(a: Featured) -> Array:
    return a.frequencies() / a.stretch()


def _amplified(change: Callable[[float], float]) -> Callable[[Featured], float]:
    return lambda a: change(Featured.attention_factor(a))


def _on_one(side: str) -> Callable[..., Array]:
    """Rotated, with the attention factor on one side only."""
    return lambda a, name, heads, p: (
        Featured.rotated(a, name, heads, p)
        / np.where(
            (name != side) & (np.arange(heads.shape[-1]) < a.rotary_size())
            if a.turns()
            else np.zeros(heads.shape[-1], bool),
            a.attention_factor(),
            1.0,
        )
    ).astype(heads.dtype)


_add("scaling-ignored-in-llama3", "does not scale by wavelengths", turning=_plainly)
_add("scaling-ignored-in-yarn", "does not scale along a ramp", case=YARN, turning=_plainly)
_add(
    "scaling-ignored-if-linear",
    "does not divide frequencies by a factor",
    case=LINEAR,
    turning=_plainly,
)
_add("scaling-ignored-in-longrope", "does not divide frequencies by factors", case=LONGROPE,
     turning=_plainly)  # fmt: skip
_add("llama3-as-linear", "divides all frequencies, of short waves too", turning=_all_divided)
_add(
    "yarn-as-linear",
    "divides all frequencies, also before the ramp",
    case=YARN,
    turning=_all_divided,
)
_add(
    "linear-multiplied",
    "multiplies frequencies by the factor",
    case=LINEAR,
    turning=lambda a: a.frequencies() * a.stretch(),
)
_add(
    "linear-twice",
    "divides positions by the factor, and frequencies too",
    case=LINEAR,
    turning=lambda a: a.frequencies() / a.stretch() ** 2,
)
_add(
    "linear-on-base",
    "multiplies the base by the factor instead",
    case=LINEAR,
    base=lambda a: Featured.base(a) * a.stretch(),
    turning=_plainly,
)
_add(
    "linear-without-first-pair",
    "leaves out the first pair, which turns fastest",
    case=LINEAR,
    turning=lambda a: np.where(
        np.arange(a.rotary_size() // 2) == 0, a.frequencies(), _all_divided(a)
    ),
)
_add(
    "llama3-factors-swapped",
    "takes the low for the high frequency factor",
    thresholds=lambda a: Featured.thresholds(a)[::-1],
)
_add(
    "llama3-new-length",
    "takes the length of the longer texts for that of before",
    before=lambda a: Featured.before(a) * int(a.stretch()),
)
_add(
    "llama3-without-2-pi",
    "takes 1/frequency for the wavelength",
    turns_before=lambda a: Featured.turns_before(a) * 2 * np.pi,
)
_add(
    "llama3-not-smoothed",
    "scales in full all that is not left alone",
    ramp=lambda a: np.floor(Featured.ramp(a)),
)
_add(
    "llama3-length-of-the-model",
    "takes 8,192 for the length of before, whatever is told",
    before=lambda a: 8192,
)
_add(
    "llama3-usual-factor",
    "divides by 8, whatever is told",
    stretch=lambda a: 8.0,
)
_add(
    "llama3-wavelengths-smoothed",
    "takes the mean of wavelengths, not of frequencies",
    turning=lambda a: a.frequencies() / (a.stretch() * (1 - Featured.ramp(a)) + Featured.ramp(a)),
)
_add(
    "yarn-not-truncated",
    "begins and ends the ramp between pairs",
    case=YARN,
    truncates=lambda a: False,
)
_add(
    "yarn-truncated-although-not-asked",
    "rounds the ends of the ramp, whatever is told",
    case=UNTRUNCATED,
    truncates=lambda a: True,
)
_add(
    "yarn-truncated-inwards",
    "rounds the ends of the ramp to the pairs within",
    case=YARN,
    ends=lambda a: (
        Featured.ends(a)[0] + 1,
        Featured.ends(a)[1] - 1,
    ),
)
_add("yarn-ramp-backwards", "scales what turns fast", case=YARN,
     ramp=lambda a: 1 - Featured.ramp(a))  # fmt: skip
_add(
    "yarn-usual-betas",
    "takes 32 and 1, whatever is told",
    case=YARN,
    thresholds=lambda a: (1.0, 32.0),
)
_add(
    "yarn-new-length",
    "ends the ramp by the length of the longer texts",
    case=YARN,
    before=lambda a: Featured.before(a) * int(a.stretch()),
)
_add(
    "yarn-ramp-over-components",
    "counts components along the ramp, not pairs",
    case=YARN,
    ends=lambda a: tuple(end / 2 for end in Featured.ends(a)),
)
_add(
    "yarn-rotations-without-2-pi",
    "takes radians for rotations",
    case=YARN,
    before=lambda a: Featured.before(a) * 2 * np.pi,
)
_add(
    "yarn-without-attention-factor",
    "leaves out the attention factor of YaRN",
    case=YARN,
    attention_factor=lambda a: 1.0,
)
_add(
    "attention-factor-squared",
    "multiplies cosine and sine by what logits are to get",
    case=YARN,
    attention_factor=_amplified(lambda factor: factor**2),
)
_add(
    "attention-factor-divides",
    "divides cosine and sine by the factor",
    case=YARN,
    attention_factor=_amplified(lambda factor: 1 / factor),
)
_add("attention-factor-of-queries-only", "multiplies queries only", case=YARN,
     rotated=_on_one("query"))  # fmt: skip
_add(
    "attention-factor-of-whole-head",
    "multiplies the logits, and so the components that are not rotated",
    case=FACTOR,
    rotated=lambda a, side, heads, p: (
        Featured.rotated(a, side, heads, p)
        * np.where(
            np.arange(heads.shape[-1]) < (a.rotary_size() if a.turns() else 0),
            1.0,
            a.attention_factor(),
        )
    ).astype(heads.dtype),
)
_add(
    "attention-factor-not-read",
    "computes the factor itself although it is told",
    case=FACTOR,
    attention_factor=lambda a: (
        float(np.sqrt(1 + np.log(a.stretch()) / np.log(a.before()))) if a.config() else 1.0
    ),
)
_add(
    "attention-factor-in-decibels",
    "takes the decimal logarithm",
    case=YARN,
    grown=lambda a, by: float(0.1 * by * np.log10(a.stretch()) + 1),
)
_add("mscale-not-read", "has the factor of YaRN without mscale", case=MSCALE,
     amplitude=lambda a: a.grown(1.0))  # fmt: skip
_add(
    "mscale-not-divided",
    "does not divide by what mscale_all_dim gives",
    case=MSCALE,
    amplitude=lambda a: a.grown(a.told_number("mscale", 1.0)),
)
_add(
    "mscale-upside-down",
    "divides the other way round",
    case=MSCALE,
    attention_factor=_amplified(lambda factor: 1 / factor),
)
_add("dynamic-never-grows", "keeps the base", case=DYNAMIC, grown_base=lambda a: a.base())
_add(
    "dynamic-always-grown",
    "has the base of the longest texts for all",
    case=DYNAMIC,
    length=lambda a: a.before() * int(a.stretch()),
)
_add(
    "dynamic-grown-for-short-texts",
    "has the base of the longest texts for short ones too",
    case="scaled-dynamic-short/self",
    length=lambda a: a.before() * int(a.stretch()),
)
_add(
    "dynamic-to-the-power-of-1",
    "does not raise the growth to size/(size − 2)",
    case=DYNAMIC,
    power=lambda a: 1.0,
)
_add(
    "dynamic-length-of-queries",
    "counts the queries only, not the cache",
    case=DYNAMIC_CACHE,
    length=lambda a: a.queries,
)
_add(
    "dynamic-length-one-less",
    "takes the last position for the length",
    case=DYNAMIC,
    length=lambda a: Featured.length(a) - 1,
)
_add(
    "dynamic-by-factor-of-lengths",
    "multiplies the growth of the text by the factor and subtracts nothing",
    case=DYNAMIC,
    grown_base=lambda a: a.base() * (a.stretch() * a.length() / a.before()) ** a.power(),
)
_add("longrope-short-for-long", "has the short factors for all texts", case=LONGROPE,
     is_long=lambda a: False)  # fmt: skip
_add("longrope-long-for-short", "has the long factors for all texts", case=SHORT,
     is_long=lambda a: True)  # fmt: skip
_add(
    "longrope-multiplied",
    "multiplies frequencies by the factors",
    case=LONGROPE,
    listed=lambda a: 1 / Featured.listed(a),
)
_add("longrope-reversed", "gives the first pair the last factor", case=LONGROPE,
     listed=lambda a: Featured.listed(a)[::-1])  # fmt: skip
_add(
    "longrope-attention-factor-of-yarn",
    "has the attention factor of YaRN",
    case=LONGROPE,
    attention_factor=lambda a: a.grown(1.0),
)
_add(
    "longrope-without-attention-factor",
    "leaves out the attention factor of LongRoPE",
    case=LONGROPE,
    attention_factor=lambda a: 1.0,
)
_add(
    "longrope-attention-factor-for-long-only",
    "multiplies cosine and sine of long texts only",
    case=SHORT,
    attention_factor=lambda a: 1.0 if not a.is_long() else Featured.attention_factor(a),
)
_add(
    "scaling-of-keys-only",
    "scales the frequencies of keys only",
    rotated=lambda a, side, heads, p: (
        Featured.rotated(a, side, heads, p)
        if side == "key" or not a.turns()
        else a.turn(heads, p[:, None, :, None] * a.frequencies())
    ),
)
_add(
    "scaling-not-in-backward",
    "rotates gradients back by unscaled angles",
    *BACKWARD,
    d_rotated=lambda a, side, g: a.turn(
        g, -a.rotary_positions(side)[:, None, :, None] * a.frequencies()
    ),
)
_add(
    "attention-factor-not-in-backward",
    "rotates gradients back without the attention factor",
    *BACKWARD,
    case=YARN,
    d_rotated=lambda a, side, g: Featured.d_rotated(a, side, g) / a.wide(a.attention_factor()),
)

# Positions on several axes.

_add = _chapter("mrope", "position-axes/full-tiles")
IN_TURN = "position-axes-interleaved/full-tiles"
VIDEO, HISTORY = "position-axes-video/full-tiles", "position-axes-after-history/gqa"


def _plain_positions(a: Featured, side: str) -> Array:
    return a.query_positions() if side == "query" else a.key_positions()


def _axes_of(change: Callable[[Array], Array]) -> Callable[..., Array]:
    """Positions of time, height and width, changed by it."""

    def axes(a: Featured, side: str) -> Array:
        found = Featured.axes(a, side)
        return found if found is None else change(found)

    return axes


def _sections(change: Callable[[Array], Array]) -> Callable[..., Any]:
    return lambda a: tuple(int(count) for count in change(np.array(Featured.counts(a))))


def _of_axis(axis: int) -> Callable[[Featured], Array]:
    return lambda a: 0 * Featured.axis_of_pairs(a) + axis


def _begun_again(a: Featured) -> Array:
    """Frequencies that begin anew in each section, as those of an embedding of its own size."""
    plain, counts = Featured.frequencies(a), a.told_number("mrope_section")
    return plain if counts is None else np.concatenate([plain[:count] for count in counts])


def _of_own_size(a: Featured) -> Array:
    """Frequencies of as many embeddings as there are axes, each from 1 to the base."""
    counts = a.told_number("mrope_section")
    if counts is None:
        return Featured.frequencies(a)
    return np.concatenate([a.base() ** (-np.arange(count) / max(count, 1)) for count in counts])


def _by_component(of: Callable[[Featured], Array]) -> Callable[..., Array]:
    """A rotation in which each component has an axis, `[component]`, not each pair."""

    def rotated(a: Featured, side: str, heads: Array, positions: Array) -> Array:
        if not a.turns() or positions.ndim == 2:
            return Featured.rotated(a, side, heads, positions)
        (first, second), axis, turned = a.pairs(), of(a), heads.copy()
        for components in (first, second):
            angles = (positions[..., axis[components]] * a.turning())[:, None]
            turned[..., components] = a.turn(heads, angles)[..., components]
        return a.hold(turned)

    return rotated


def _by_plain(side: str) -> Callable[..., Array]:
    """What one side is rotated by: the positions of its tokens."""
    return lambda a, of: _plain_positions(a, of) if of == side else Featured.rotary_positions(a, of)


_add(
    "mrope-ignored",
    "turns all pairs by the one position of a token",
    rotary_positions=_plain_positions,
)
_add("mrope-by-time-only", "reads the first row of positions only", axis_of_pairs=_of_axis(0))
_add(
    "mrope-by-width-only",
    "reads the last row of positions only",
    axis_of_pairs=_of_axis(2),
)
_add(
    "mrope-height-and-width-exchanged",
    "reads width where height is",
    axes=_axes_of(lambda axes: axes[..., [0, 2, 1]]),
)
_add(
    "mrope-rows-reversed",
    "reads width, height and time",
    axes=_axes_of(lambda axes: axes[..., ::-1]),
)
_add(
    "mrope-rows-shifted",
    "takes the row of text positions, which is not there, off again",
    axes=_axes_of(lambda axes: axes[..., [1, 2, 2]]),
)
_add(
    "mrope-sections-reversed",
    "counts pairs of width as those of time, and the other way round",
    counts=_sections(lambda counts: counts[::-1]),
)
_add(
    "mrope-time-one-pair-more",
    "ends the section of time one pair late",
    counts=_sections(lambda counts: counts + np.array([1, -1, 0])),
)
_add(
    "mrope-height-one-pair-more",
    "ends the section of height one pair late",
    counts=_sections(lambda counts: counts + np.array([0, 1, -1])),
)
_add(
    "mrope-side-by-side-as-interleaved",
    "lets axes take turns whatever the configuration says",
    axis_of_pairs=lambda a: a.in_turn(),
)
_add(
    "mrope-interleaved-as-side-by-side",
    "lays sections side by side whatever the configuration says",
    case=IN_TURN,
    axis_of_pairs=lambda a: np.repeat(np.arange(3), a.counts()),
)
_add(
    "mrope-interleaved-to-the-end",
    "lets axes take turns beyond their sections",
    case=IN_TURN,
    in_turn=lambda a: np.arange(sum(a.counts())) % 3,
)
_add(
    "mrope-interleaved-from-height",
    "begins the turns with height",
    case=IN_TURN,
    in_turn=lambda a: np.roll(Featured.in_turn(a), -1),
)
_add(
    "mrope-sections-of-components",
    "counts components over the whole head where pairs are counted",
    rotated=_by_component(lambda a: np.repeat(np.arange(3), 2 * np.array(a.counts()))),
)
_add(
    "mrope-sections-not-doubled",
    "lays sections over the first half of a head, and turns the second by time",
    rotated=_by_component(lambda a: np.r_[a.axis_of_pairs(), 0 * a.axis_of_pairs()]),
)
_add(
    "mrope-frequencies-begin-again",
    "begins with the first frequency in each section",
    frequencies=_begun_again,
)
_add(
    "mrope-frequencies-of-own-size",
    "takes each section for a rotary embedding of its own, from 1 to the base",
    frequencies=_of_own_size,
)
_add(
    "mrope-keys-by-tokens",
    "turns keys by the one position of a token",
    rotary_positions=_by_plain("key"),
)
_add(
    "mrope-queries-by-tokens",
    "turns queries by the one position of a token",
    case=HISTORY,
    rotary_positions=_by_plain("query"),
)
_add(
    "mrope-time-of-tokens",
    "counts time by tokens, and height and width as told",
    rotary_positions=lambda a, side: (
        Featured.rotary_positions(a, side)
        if a.axes(side) is None
        else np.concatenate([_plain_positions(a, side)[..., None], a.axes(side)[..., 1:]], axis=-1)
    ),
)
_add(
    "mrope-of-first-entry",
    "reads the positions of the first entry of the batch for all",
    case="position-axes/gqa",
    axes=_axes_of(lambda axes: np.broadcast_to(axes[:1], axes.shape)),
)
_add(
    "mrope-queries-from-0",
    "counts the positions of a chunk from its first token",
    case=HISTORY,
    rotary_positions=lambda a, side: (
        Featured.rotary_positions(a, side) - a.axes(side)[:, :1]
        if a.axes(side) is not None and side == "query"
        else Featured.rotary_positions(a, side)
    ),
)
_add(
    "mrope-keys-by-rows-of-queries",
    "turns the first keys by the positions of the queries, and the others by the last of them",
    case=HISTORY,
    rotary_positions=lambda a, side: (
        Featured.rotary_positions(a, side)
        if a.axes(side) is None or side == "query"
        else a.axes("query")[:, np.minimum(np.arange(a.keys), a.queries - 1)]
    ),
)
_add(
    "mrope-cache-by-tokens",
    "turns what comes after a cache by the index of a token in it",
    MODES,
    case=HISTORY,
    new_positions=lambda a, start, stop: np.broadcast_to(
        np.arange(start, stop), (a.batch, stop - start)
    ),
)
_add(
    "mrope-frames-side-by-side",
    "counts frames without the time between them",
    case=VIDEO,
    axes=_axes_of(
        lambda axes: np.stack(
            [
                np.unique(axes[..., 0], return_inverse=True)[1].reshape(axes.shape[:-1]),
                axes[..., 1],
                axes[..., 2],
            ],
            axis=-1,
        )
    ),
)
_add(
    "mrope-causal-by-time",
    "hides keys of a later time, not those that come later",
    case="position-axes-causal/full-tiles",
    triangle=lambda a: (a.axes("key")[:, None, :, 0] <= a.axes("query")[:, :, None, 0])[:, None],
)
_add(
    "mrope-window-by-time",
    "counts a window in positions of time, in which an image is one moment",
    case="position-axes-with-window/self",
    in_window=lambda a, distance: Featured.in_window(
        a, (a.axes("key")[:, None, :, 0] - a.axes("query")[:, :, None, 0])[:, None]
    ),
)
_add(
    "mrope-right-aligned-under-padding",
    "gives a padded text the positions of the last tokens, as if padded on the left",
    case="position-axes-with-key-lengths/self",
    axes=lambda a, side: (
        None
        if Featured.axes(a, side) is None
        else np.stack(
            [
                np.roll(entry, length, axis=0)
                for entry, length in zip(Featured.axes(a, side), a.used("key"), strict=True)
            ]
        )
    ),
)
_add(
    "mrope-dropped-in-part-of-heads",
    "turns by one position where a part of each head is rotated",
    case="position-axes-partial/full-tiles",
    rotary_positions=lambda a, side: (
        _plain_positions(a, side)
        if a.turns() and a.rotary_size() < a.shape.head_size
        else Featured.rotary_positions(a, side)
    ),
)
_add(
    "mrope-not-scaled",
    "leaves frequencies unscaled beside sections",
    case="position-axes-yarn/full-tiles",
    turning=lambda a: a.frequencies(),
)
_add(
    "mrope-length-of-tokens",
    "grows the base with the number of tokens, not with positions on axes",
    case="position-axes-dynamic-short/full-tiles",
    length=lambda a: max(a.queries, a.keys),
)
_add(
    "mrope-not-in-backward",
    "rotates gradients back by the one position of a token",
    *BACKWARD,
    d_rotated=lambda a, side, g: a.turn(g, -a.angles(_plain_positions(a, side))),
)

# Query/key norm.

_add = _chapter("norm", "norm/self")


def _rms_of(axes: tuple[int, ...]) -> Callable[[Featured, Array], Array]:
    return lambda a, x: np.sqrt((x**2).mean(axis=axes, keepdims=True) + a.wide(a.epsilon()))


_add("norm-ignored", "accepts weights of a norm and drops them", gain=lambda a, side: None)
_add("norm-without-epsilon", "adds no epsilon", epsilon=lambda a: 0.0)
_add("norm-epsilon-of-a-millionth", "adds the usual 10⁻⁶ instead", epsilon=lambda a: 1e-6)
_add("norm-epsilon-squared", "squares epsilon", epsilon=lambda a: Featured.epsilon(a) ** 2)
_add(
    "norm-epsilon-outside-root",
    "adds epsilon to the root",
    size_of=lambda a, x: np.sqrt((x**2).mean(axis=-1, keepdims=True)) + a.wide(a.epsilon()),
)
_add(
    "norm-centred",
    "subtracts the mean first, as a layer norm",
    normed=lambda a, side, x: (
        x if a.gain(side) is None else Featured.normed(a, side, x - x.mean(axis=-1, keepdims=True))
    ),
)
_add(
    "norm-by-mean-of-absolutes",
    "divides by the mean of absolute values",
    size_of=lambda a, x: np.abs(x).mean(axis=-1, keepdims=True) + a.wide(a.epsilon()),
)
_add("norm-over-all-heads", "normalises all heads of a token together", size_of=_rms_of((1, 3)))
_add("norm-over-tokens", "normalises over the tokens", size_of=_rms_of((2,)))
_add(
    "norm-by-sum",
    "divides by the root of the sum of squares, not of their mean",
    size_of=lambda a, x: np.sqrt((x**2).sum(axis=-1, keepdims=True) + a.wide(a.epsilon())),
)
_add(
    "norm-weight-missing",
    "normalises without weights",
    normed=lambda a, side, x: x if a.gain(side) is None else a.hold(x / a.size_of(x)),
)
_add(
    "norm-weight-plus-1",
    "multiplies with 1 + weight",
    normed=lambda a, side, x: (
        x if a.gain(side) is None else a.hold(x / a.size_of(x) * (1 + a.read(a.gain(side))))
    ),
)
_add(
    "norm-weights-exchanged",
    "uses the weights of the other norm, which shows in their gradients",
    FEATURES,
    FULLY_MASKED,
    gain=lambda a, side: Featured.gain(a, {"query": "key", "key": "query"}[side]),
)
_add("norm-of-keys-missing", "normalises queries only", normed=_only("key", "normed"))
_add("norm-of-queries-missing", "normalises keys only", normed=_only("query", "normed"))
_add(
    "norm-of-values-too",
    "normalises values too",
    prepared_values=lambda a, v: v if a.gain("key") is None else a.hold(v / a.size_of(v)),
)
_add(
    "norm-in-float16",
    "computes the mean of squares in float16",
    size_of=lambda a, x: FLOAT16.round(Featured.size_of(a, x)).astype(a.wide),
)
_add(
    "norm-after-rotary",
    "multiplies with the weights of the norm after rotating",
    case="norm-with-rotary/gqa",
    prepared=lambda a, side, x, p: (
        Featured.prepared(a, side, x, p)
        if a.gain(side) is None
        else a.hold(a.rotated(side, a.hold(x / a.size_of(x)), p) * a.read(a.gain(side)))
    ),
)
_add(
    "norm-backward-without-second-term",
    "takes the root for a constant in the backward pass",
    *BACKWARD,
    d_size=lambda a, plain, scaled: 0 * plain[..., :1],
)
_add(
    "norm-backward-sum-not-mean",
    "forgets to divide by the head size in the backward pass",
    *BACKWARD,
    d_size=lambda a, plain, scaled: (plain * scaled).sum(axis=-1, keepdims=True),
)
_add(
    "norm-backward-without-weight",
    "forgets the weight of the norm in the backward pass",
    *BACKWARD,
    d_normed=lambda a, side, g: (
        g / a.size_of(a.plain[side])
        - a.plain[side] * a.d_size(a.plain[side], g) / a.size_of(a.plain[side]) ** 3
    ),
)
_add(
    "norm-backward-straight-through",
    "passes the gradient of the norm on",
    *BACKWARD,
    d_normed=lambda a, side, g: g,
)
_add(
    "norm-backward-square-not-cube",
    "divides the second term by the square of the root",
    *BACKWARD,
    d_normed=lambda a, side, g: (
        g * a.read(a.gain(side)) / a.size_of(a.plain[side])
        - a.plain[side]
        * a.d_size(a.plain[side], g * a.read(a.gain(side)))
        / a.size_of(a.plain[side]) ** 2
    ),
)
_add(
    "norm-gradient-of-weight-missing",
    "returns a gradient of 0 for the weights of the norm",
    FEATURES,
    FULLY_MASKED,
    d_gain=lambda a, side, g: 0 * Featured.d_gain(a, side, g),
)
_add(
    "norm-gradient-of-weight-not-normalised",
    "multiplies with the heads as they were before the norm",
    FEATURES,
    FULLY_MASKED,
    d_gain=lambda a, side, g: (g * a.plain[side]).sum(axis=(0, 1, 2)),
)
_add(
    "norm-gradient-of-weight-of-first-head",
    "does not sum the gradient of the weights over the heads",
    FEATURES,
    FULLY_MASKED,
    d_gain=lambda a, side, g: (g * a.plain[side] / a.size_of(a.plain[side]))[:, :1].sum(
        axis=(0, 1, 2)
    ),
)
_add(
    "norm-gradient-of-weight-of-first-entry",
    "does not sum the gradient of the weights over the batch",
    FEATURES,
    FULLY_MASKED,
    d_gain=lambda a, side, g: (g * a.plain[side] / a.size_of(a.plain[side]))[:1].sum(
        axis=(0, 1, 2)
    ),
)
_add(
    "norm-gradient-of-weight-of-other-side",
    "returns the gradient of one norm for both",
    FEATURES,
    FULLY_MASKED,
    d_gain=lambda a, side, g: (
        Featured.d_gain(a, side, g) if side == "query" else 0 * g[0, 0, 0] + 1
    ),
)

# Lengths.

_add = _chapter("lengths", "key-lengths/cross")
BOTH = "lengths/self"
ENDS = "key-lengths-causal/gqa"


def _lengths(change: Callable[[Featured, Array], Array]) -> Callable[[Featured], Array]:
    """Another number of keys to be seen."""
    return lambda a: (np.arange(a.keys) < change(a, a.used("key"))[:, None])[:, None, None]


_add(
    "lengths-ignored",
    "accepts lengths of keys and drops them",
    keys_in_use=_lengths(lambda a, n: 0 * n + a.keys),
)
_add("lengths-one-key-more", "sees one key beyond the length",
     keys_in_use=_lengths(lambda a, n: n + 1))  # fmt: skip
_add(
    "lengths-as-last-index",
    "takes the length for the index of the last key, and hides it",
    keys_in_use=_lengths(lambda a, n: np.maximum(n - 1, 1)),
)
_add("lengths-of-entry-0", "uses the length of the first entry for all",
     keys_in_use=_lengths(lambda a, n: 0 * n + n[0]))  # fmt: skip
_add("lengths-of-next-entry", "uses the length of the next entry",
     keys_in_use=_lengths(lambda a, n: np.roll(n, 1)))  # fmt: skip
_add("lengths-longest", "uses the greatest length for all entries",
     keys_in_use=_lengths(lambda a, n: 0 * n + n.max()))  # fmt: skip
_add("lengths-shortest", "uses the least length for all entries",
     keys_in_use=_lengths(lambda a, n: 0 * n + max(1, n.min())))  # fmt: skip
_add(
    "lengths-from-the-end",
    "takes the last keys of an entry for those that are there",
    keys_in_use=lambda a: Featured.keys_in_use(a)[..., ::-1],
)
_add(
    "lengths-of-first-head-only",
    "applies the lengths to the first head",
    keys_in_use=lambda a: Featured.keys_in_use(a) | (np.arange(a.shape.heads) > 0)[:, None, None],
)
_add(
    "lengths-dropped-beside-causal",
    "drops the lengths on the causal path, but for where the last query stands",
    case="key-lengths-top-left/gqa",
    keys_in_use=_beside(
        "keys_in_use", lambda a: _has("mask")(a), lambda a: np.ones((1, 1, 1, 1), bool)
    ),
)
_add(
    "lengths-dropped-in-second-split",
    "forgets the lengths in the second part of the keys",
    keys_in_use=lambda a: (
        Featured.keys_in_use(a) | ((np.arange(a.keys) >= a.keys // 2) & _split(a))
    ),
)
_add(
    "lengths-in-tiles",
    "rounds the lengths up to whole tiles of keys",
    keys_in_use=_lengths(lambda a, n: -(-n // a.tile) * a.tile),
)
_add(
    "lengths-not-in-alignment",
    "aligns the causal mask at the end of the padded keys, not at that of the entry",
    case=ENDS,
    before_queries=_beside(
        "before_queries",
        _has("key_lengths"),
        lambda a: np.full((a.batch, 1), a.keys - a.queries),
    ),
)
_add(
    "lengths-alignment-of-first-entry",
    "aligns the causal mask of all entries as that of the first",
    case=ENDS,
    before_queries=_beside(
        "before_queries",
        _has("key_lengths"),
        lambda a: 0 * Featured.before_queries(a) + Featured.before_queries(a)[:1],
    ),
)
_add(
    "lengths-alignment-one-off",
    "lets the last query of an entry see all but its last key",
    case=ENDS,
    before_queries=_beside(
        "before_queries", _has("key_lengths"), lambda a: Featured.before_queries(a) - 1
    ),
)
_add(
    "lengths-of-queries-not-in-alignment",
    "aligns the causal mask as if no entry had fewer queries",
    case="lengths-causal/separate",
    before_queries=_beside(
        "before_queries",
        _has("query_lengths"),
        lambda a: (a.used("key") - a.queries)[:, None],
    ),
)
_add(
    "lengths-of-queries-for-keys",
    "uses the lengths of queries for the keys",
    case="lengths-causal/separate",
    keys_in_use=_lengths(lambda a, n: a.used("query")),
)
_add(
    "lengths-not-in-weights-again",
    "makes the weights again without the lengths",
    *BACKWARD,
    weights_again=_weights_without("key_lengths"),
)
_add(
    "lengths-padding-in-gradient-of-values",
    "gives keys beyond the length a small gradient",
    *BACKWARD,
    BLOCKED_KEY,
    gather_values=lambda a, g: (
        Attention.gather_values(a, g)
        + (
            0
            if a.argument("key_lengths") is None
            else 1e-3 * ~a.keys_in_use()[:, 0, 0, :, None][:, None]
        )
    ).astype(a.wide),
)
_add(
    "lengths-rows-beyond-are-nan-in-gradients",
    "computes 0 · ∞ in rows of queries beyond the length, and adds them to the keys",
    *BACKWARD,
    case=BOTH,
    d_softmax=lambda a, w, d: (
        Attention.d_softmax(a, w, d)
        if a.argument("query_lengths") is None
        else np.where(a.queries_in_use(), Attention.d_softmax(a, w, d), a.wide(np.nan))
    ),
)
_add(
    "lengths-empty-entry-is-nan-in-gradients",
    "divides by 0 in the backward pass of an entry without keys",
    *BACKWARD,
    case="key-lengths-empty/cross",
    d_softmax=lambda a, w, d: np.where(
        np.isfinite(a.logits).any(axis=-1, keepdims=True), Attention.d_softmax(a, w, d), np.nan
    ).astype(a.wide),
)
_add(
    "lengths-empty-entry-spoils-the-next",
    "does not advance the output where an entry has no keys",
    case="key-lengths-empty/cross",
    mix=lambda a, w, v: (
        Attention.mix(a, w, v)
        if a.argument("key_lengths") is None
        else Attention.mix(a, w, v)[np.maximum(np.cumsum(a.used("key") > 0) - 1, 0)]
    ),
)
_add(
    "lengths-empty-entry-gets-the-one-before",
    "does not write the output of an entry without keys, and leaves that of the one before there",
    FULLY_MASKED,
    case="key-lengths-empty/cross",
    mix=lambda a, w, v: (
        Attention.mix(a, w, v)
        if a.argument("key_lengths") is None
        else Attention.mix(a, w, v)[
            np.maximum.accumulate(np.where(a.used("key") > 0, np.arange(a.batch), 0))
        ]
    ),
)
_add(
    "lengths-empty-entry-is-nan",
    "divides by the sum of no keys in an entry without any",
    FULLY_MASKED,
    case="key-lengths-empty/cross",
    mix=lambda a, w, v: (
        Attention.mix(a, w, v)
        if a.argument("key_lengths") is None
        else Attention.mix(a, w, v) + np.where(a.used("key") > 0, 0, np.nan)[:, None, None, None]
    ).astype(a.wide),
)
_add(
    "lengths-values-beyond-are-read",
    "multiplies values beyond the length with a weight of 0, and 0 · NaN is NaN",
    BEYOND_LENGTHS,
    loaded=lambda a, name, x: x if name == "value" else Featured.loaded(a, name, x),
)
_add(
    "lengths-keys-beyond-are-read",
    "adds −∞ to logits of keys beyond the length, and NaN − ∞ is NaN",
    BEYOND_LENGTHS,
    loaded=lambda a, name, x: x if name == "key" else Featured.loaded(a, name, x),
    hide=lambda a, logits: logits + np.where(np.isneginf(Attention.hide(a, logits)), -np.inf, 0),
)
_add(
    "lengths-queries-beyond-are-read-in-backward",
    "adds rows of queries beyond the length to the gradients of keys with a weight of 0",
    BEYOND_LENGTHS,
    case=BOTH,
    loaded=lambda a, name, x: x if name == "query" else Featured.loaded(a, name, x),
)

# Packed batches.

_add = _chapter("segments", "segments/self")
UNEQUAL = "segments-causal/separate"


_add(
    "segments-ignored",
    "accepts segments and drops them",
    same_segment=lambda a: np.ones((1, 1, 1, 1), bool),
)
_add(
    "segments-of-first-entry",
    "uses the segments of the first entry for all",
    same_segment=lambda a: Featured.same_segment(a)[:1],
)
_add(
    "segments-shifted-by-a-token",
    "reads the segments of keys one token late",
    same_segment=lambda a: np.roll(Featured.same_segment(a), 1, axis=-1),
)


def _begun(late: bool, first: bool = False) -> Callable[..., Array]:
    """Segments that begin a token late or early, or the second one of each entry only."""

    def segments(a: Featured, side: str) -> Array:
        ids = Featured.segments(a, side)
        if ids is None:
            return ids
        by = 1 if late else -1
        moved = np.roll(ids, by, axis=1)
        moved[:, 0 if late else -1] = ids[:, 0 if late else -1]
        begins = (np.diff(ids, axis=1) != 0).any(axis=0).argmax() + 1
        at = np.arange(ids.shape[1]) == begins - (not late)
        return np.where(at, moved, ids) if first else moved

    return segments


_add(
    "segments-begin-late",
    "lets the first token of each packed sequence belong to the one before",
    segments=_begun(True),
)
_add(
    "segments-begin-early",
    "lets the last token of each packed sequence belong to the next one",
    segments=_begun(False),
)
_add(
    "segments-second-begins-late",
    "lets the first token of the second packed sequence belong to the first one",
    segments=_begun(True, first=True),
)
_add(
    "segments-second-begins-early",
    "lets the last token of the first packed sequence belong to the second one",
    segments=_begun(False, first=True),
)
_add(
    "segments-see-the-one-before",
    "lets a member see those before it",
    same_segment=lambda a: (a.segments("query")[:, :, None] >= a.segments("key")[:, None])[:, None],
)
_add(
    "segments-see-neighbours",
    "lets a member see its neighbours",
    same_segment=lambda a: (
        np.abs(a.segments("query")[:, :, None] - a.segments("key")[:, None]) <= 1
    )[:, None],
)
_add(
    "segments-by-parity",
    "keeps one bit of a segment's number",
    same_segment=lambda a: (
        (a.segments("query")[:, :, None] - a.segments("key")[:, None]) % 2 == 0
    )[:, None],
)
_add(
    "segments-in-bfloat16",
    "compares the numbers of segments in bfloat16",
    case="segments-large-numbers/self",
    same_segment=lambda a: (
        BFLOAT16.round(a.segments("query").astype(float))[:, :, None]
        == BFLOAT16.round(a.segments("key").astype(float))[:, None]
    )[:, None],
)
_add(
    "segments-of-keys-for-queries",
    "uses the segments of the keys for the queries too",
    case=UNEQUAL,
    same_segment=lambda a: (a.segments("key")[:, : a.queries, None] == a.segments("key")[:, None])[
        :, None
    ],
)
_add(
    "segments-last-member-joined",
    "takes the last two members for one",
    same_segment=lambda a: _last_joined(a),
)
_add(
    "segments-ignored-beside-causal",
    "drops the segments on the causal path",
    OUTPUT,
    SPELLINGS,
    case=UNEQUAL,
    same_segment=_beside("same_segment", _causal, lambda a: np.ones((1, 1, 1, 1), bool)),
)
_add(
    "segments-aligned-as-a-whole",
    "aligns the causal mask at the end of all keys, not at that of each member",
    OUTPUT,
    SPELLINGS,
    case=UNEQUAL,
    triangle=_beside(
        "triangle",
        _has("query_segments"),
        lambda a: np.tri(a.queries, a.keys, a.keys - a.queries, dtype=bool),
    ),
)
_add(
    "segments-aligned-at-start",
    "aligns the causal mask of each member at its first key",
    OUTPUT,
    SPELLINGS,
    case=UNEQUAL,
    triangle=_beside(
        "triangle",
        _has("query_segments"),
        lambda a: (ranks(a.segments("key"))[:, None] <= ranks(a.segments("query"))[:, :, None])[
            :, None
        ],
    ),
)
_add(
    "segments-positions-go-on",
    "does not begin positions again in each member",
    case="segments-with-rotary/separate",
    rotary_positions=lambda a, side: np.broadcast_to(
        np.arange(a.queries if side == "query" else a.keys),
        (a.batch, a.queries if side == "query" else a.keys),
    ),
)
_add(
    "segments-distance-goes-on",
    "counts the distances of ALiBi over all members",
    case="segments-with-alibi/separate",
    far=_beside(
        "far",
        _has("query_segments"),
        lambda a: np.abs(np.arange(a.keys) - np.arange(a.queries)[:, None]).astype(a.wide),
    ),
)
_add(
    "segments-window-goes-on",
    "counts the window over all members",
    case="segments-with-window/separate",
    in_window=_beside(
        "in_window",
        _has("query_segments"),
        lambda a, d: Featured.in_window(a, np.arange(a.keys) - np.arange(a.queries)[:, None]),
    ),
)
_add(
    "segments-not-in-weights-again",
    "makes the weights again without the segments",
    *BACKWARD,
    weights_again=_weights_without("query_segments", "key_segments"),
)
_add(
    "segments-ignored-when-split",
    "drops the segments where the keys are split",
    case="segments/separate",
    same_segment=_beside("same_segment", _split, lambda a: np.ones((1, 1, 1, 1), bool)),
)
_add(
    "segments-single-token-member-dropped",
    "gives members of one token nothing to see",
    same_segment=lambda a: Featured.same_segment(a) & ~_alone(a),
)
_add(
    "segments-gradient-of-keys-across-members",
    "lets the gradient of keys flow between members",
    *BACKWARD,
    d_softmax=lambda a, w, d: (
        Attention.d_softmax(a, w, d)
        if a.segments("query") is None
        else Attention.d_softmax(a, w, d) + a.wide(0.01) * ~a.same_segment()
    ),
)


def _last_joined(a: Featured) -> Array:
    queries, keys = a.segments("query"), a.segments("key")
    last = np.maximum(queries.max(axis=1), keys.max(axis=1))[:, None]
    joined = [np.where(ids == last, last - 1, ids) for ids in (queries, keys)]
    return (joined[0][:, :, None] == joined[1][:, None])[:, None]


def _alone(a: Featured) -> Array:
    queries, keys = a.segments("query"), a.segments("key")
    count = (queries[:, :, None] == keys[:, None]).sum(axis=-1)
    return (count == 1)[:, None, :, None]


# A cache.

_add = _chapter("cache", "causal/bottom-right/separate")

_add(
    "cache-aligned-top-left",
    "aligns the causal mask of each chunk top-left, which hides the history",
    at_end=_beside("at_end", _cached, lambda a: False),
)
_add(
    "cache-forgotten-after-first-chunk",
    "sees the history in the first chunk only",
    hide=lambda a, logits: (
        Attention.hide(a, logits)
        if a.span is None or a.span[0].start == 0
        else np.where(np.arange(a.keys) < a.keys - a.queries, -np.inf, Attention.hide(a, logits))
    ).astype(a.wide),
)
_add("cache-written-one-late", "stores the keys of a chunk one place late",
     written_at=lambda a, start: start + 1)  # fmt: skip
_add("cache-written-one-early", "stores the keys of a chunk one place early",
     written_at=lambda a, start: start - 1)  # fmt: skip
_add(
    "cache-overwritten",
    "stores every chunk where the first one was",
    written_at=lambda a, start: a.buffers[0].shape[2] - a.spare - len(a.plain["query"][0, 0]),
)
_add("cache-last-key-unread", "reads one key too few",
     length_after=lambda a, stop: stop - 1)  # fmt: skip
_add(
    "cache-read-beyond",
    "reads one key beyond the content, which is not initialised",
    length_after=lambda a, stop: stop + 1,
    at_end=_beside("at_end", _cached, lambda a: True),
)
_add(
    "cache-whole-buffer",
    "reads the whole buffer, and counts on the causal mask to hide the rest",
    length_after=lambda a, stop: a.buffers[0].shape[2],
)
_add(
    "cache-without-mask-in-chunk",
    "lets the queries of a chunk see all keys of the chunk",
    triangle=_beside("triangle", _cached, lambda a: np.ones((1, 1, 1, 1), bool)),
)
_add(
    "cache-chunk-sees-own-key-only",
    "lets the queries of a chunk see the history and their own key",
    triangle=_beside(
        "triangle",
        _cached,
        lambda a: (a.distance() < -np.arange(a.queries)[:, None]) | (a.distance() == 0),
    ),
)
_add(
    "cache-of-first-entry",
    "reads the history of the first entry for all",
    history=lambda a: [
        np.concatenate(
            [np.broadcast_to(x[:1, :, :-new], (*x[:, :, :-new].shape,)), x[:, :, -new:]], 2
        )
        for new in [a.span[0].stop - a.span[0].start]
        for x in Featured.history(a)
    ],
)
_add(
    "cache-values-of-the-chunk-before",
    "stores the values of a chunk one place late",
    append=lambda a, k, v, start: Featured.append(a, k, np.roll(v, start > 0, axis=2), start),
)
_add(
    "cache-in-float16",
    "stores the history in float16",
    history=lambda a: [FLOAT16.round(x).astype(a.wide) for x in Featured.history(a)],
)


def _in_int8(values: Array) -> Array:
    """Numbers of 8 bits times a scale, the largest of each head of a token being 127."""
    unit = np.abs(values).max(axis=-1, keepdims=True) / 127
    return np.rint(values / np.where(unit > 0, unit, 1)) * unit


_add(
    "cache-in-int8",
    "stores the history in 8 bits, with a scale for each head of a token",
    history=lambda a: [_in_int8(x).astype(a.wide) for x in Featured.history(a)],
)
_add(
    "cache-rotary-one-late",
    "counts the positions of new tokens from one behind the cache",
    case="cache-rotary/gqa",
    new_positions=lambda a, start, stop: (
        Featured.new_positions(a, start, stop) + (a.span is not None)
    ),
)
_add(
    "cache-rotary-from-0",
    "counts the positions of every chunk from 0",
    case="cache-rotary/gqa",
    new_positions=lambda a, start, stop: (
        Featured.new_positions(a, start, stop)
        if a.span is None
        else Featured.new_positions(a, 0, stop - start)
    ),
)
_add(
    "cache-rotary-of-queries-from-0",
    "counts the positions of the queries of a chunk from 0, of keys over all",
    case="cache-rotary/gqa",
    prepared=lambda a, side, heads, p: Featured.prepared(
        a, side, heads, p - p[:, :1] if side == "query" and a.span is not None else p
    ),
)
_add(
    "cache-rotary-of-history-missing",
    "does not rotate the keys that are stored first",
    case="cache-rotary/gqa",
    stored_positions=lambda a, start, stop: a.new_positions(start, stop) * (a.span is not None),
)
_add(
    "cache-rotary-of-history-twice",
    "rotates the keys that are stored first by twice their angles",
    case="cache-rotary/gqa",
    stored_positions=lambda a, start, stop: a.new_positions(start, stop) * (1 + (a.span is None)),
)
_add(
    "cache-rotated-twice",
    "rotates the history again whenever it is read",
    case="cache-rotary/gqa",
    history=lambda a: [
        a.rotated("key", x, a.new_positions(0, x.shape[2])) if n == 0 else x
        for n, x in enumerate(Featured.history(a))
    ],
)
_add(
    "cache-norm-of-history-missing",
    "does not normalise the keys that are stored first",
    case="cache-norm/gqa",
    prepared=lambda a, side, heads, p: (
        a.rotated(side, heads, p)
        if side == "key" and a.span is None and a.given.mode.options.get("cached")
        else Featured.prepared(a, side, heads, p)
    ),
)
_add(
    "cache-window-of-last-query",
    "counts the window of all queries of a chunk from the last",
    case=CAUSAL_WINDOW,
    in_window=lambda a, d: Featured.in_window(
        a, d if a.span is None else d + np.arange(1 - a.queries, 1)[:, None]
    ),
)
_add(
    "cache-window-of-the-chunk",
    "counts the window of all queries of a chunk from the first",
    case=CAUSAL_WINDOW,
    in_window=lambda a, d: Featured.in_window(
        a, d if a.span is None else d + np.arange(a.queries)[:, None]
    ),
)
_add(
    "cache-window-keeps-one-key-less",
    "drops a key from the history one step early",
    case="window-causal/gqa",
    window=_beside("window", _cached, _window(lambda a, b, f: (b - 1, f))),
)
_add(
    "cache-alibi-of-the-chunk",
    "counts the distances of ALiBi from the first query of a chunk",
    case="alibi-causal/separate",
    far=_beside(
        "far",
        _cached,
        lambda a: np.abs(np.arange(a.keys) - np.arange(a.queries)[:, None]).astype(a.wide),
    ),
)
_add(
    "cache-without-sinks",
    "has no sinks beside a cache",
    case="sinks-causal/gqa",
    sink_power=_beside("sink_power", _cached, lambda a, peak: 0 * peak),
)
_add(
    "cache-without-cap",
    "has no soft cap beside a cache",
    case="soft-cap-causal/gqa",
    cap=_beside("cap", _cached, lambda a: None),
)
_add(
    "cache-mask-of-first-rows",
    "applies the first rows of the bias to every chunk",
    case="cache-with-bias/gqa",
    cut=lambda a, x: (
        x
        if a.span is None or x.shape[-2] == 1
        else x[..., : a.queries, : x.shape[-1] if x.shape[-1] == 1 else a.keys]
    ),
)
_add(
    "cache-groups-interleaved",
    "deals the key/value heads of the history out in turn",
    case="cache-rotary/gqa",
    repeat=_beside("repeat", _cached, lambda a, x: np.concatenate([x] * a.group, axis=1)),
)

# Combinations, in which each part alone is right.

_add = _chapter("combined", "gpt-oss/gqa")

_add(
    "window-of-grouped-heads-only-for-first-beside-cache",
    "applies the window to the first head of each group, beside a cache",
    case="window-causal/gqa",
    in_window=lambda a, d: (
        Featured.in_window(a, d)
        | ((np.arange(a.shape.heads) % a.group > 0)[:, None, None] & _causal(a) & (a.group > 1))
    ),
)
_add(
    "sink-capped-when-split",
    "caps the sinks where parts of the keys are merged",
    case="soft-cap-with-sinks/cross",
    merged_sink=lambda a, peak, parts: (
        a.sink_power(peak)
        if a.cap() is None or a.sinks() is None or parts == 1
        else np.exp(_limited(a.wide(a.cap()), a.sinks()) - peak)
    ),
)
_add(
    "sink-dropped-beside-window",
    "drops the sinks where there is a window",
    case="gpt-oss/gqa",
    sink_power=_beside("sink_power", _has("window"), lambda a, peak: 0 * peak),
)
_add(
    "sink-dropped-beside-alibi",
    "drops the sinks where there are slopes",
    case="alibi-with-sinks/gqa",
    sink_power=_beside("sink_power", _has("slopes"), lambda a, peak: 0 * peak),
)
_add(
    "window-dropped-beside-sinks",
    "drops the window where there are sinks",
    case="gpt-oss/gqa",
    window=_beside("window", _has("sinks"), lambda a: (-1, -1)),
)
_add(
    "window-dropped-beside-segments",
    "drops the window in a packed batch",
    case="segments-with-window/separate",
    window=_beside("window", _has("query_segments"), lambda a: (-1, -1)),
)
_add(
    "window-dropped-beside-lengths",
    "drops the window where there are lengths",
    case="key-lengths-with-window/gqa",
    window=_beside("window", _has("key_lengths"), lambda a: (-1, -1)),
)
_add(
    "window-aligned-at-padded-end",
    "counts the window from the end of the padded keys",
    case="key-lengths-with-window/gqa",
    in_window=_beside(
        "in_window",
        _has("key_lengths"),
        lambda a, d: Featured.in_window(
            a, np.arange(a.keys) - (np.arange(a.queries) + a.keys - a.queries)[:, None]
        ),
    ),
)
_add(
    "rotary-at-padded-end",
    "rotates queries as if every entry had all keys",
    case="key-lengths-with-rotary/gqa",
    rotary_positions=_positions(
        lambda a, side, p: (
            p
            if side == "key" or a.argument("key_lengths") is None or not a.at_end()
            else a.index("query") + a.keys - a.queries
        )
    ),
)
_add(
    "alibi-from-start-beside-lengths",
    "counts the distances of ALiBi from query 0 at key 0 where there are lengths",
    case="key-lengths-with-alibi/gqa",
    far=_beside(
        "far",
        _has("key_lengths"),
        lambda a: np.abs(np.arange(a.keys) - np.arange(a.queries)[:, None]).astype(a.wide),
    ),
)
_add(
    "lengths-dropped-beside-sinks",
    "drops the lengths where there are sinks",
    case="key-lengths-with-sinks/cross",
    keys_in_use=_beside("keys_in_use", _has("sinks"), lambda a: np.ones((1, 1, 1, 1), bool)),
)
_add(
    "cap-dropped-beside-rotary",
    "drops the cap where heads are rotated",
    case="gemma/mqa",
    cap=_beside("cap", _has("rotary_base"), lambda a: None),
)
_add(
    "norm-dropped-beside-window",
    "drops the norm where there is a window",
    case="gemma/mqa",
    normed=_beside("normed", _has("window"), lambda a, side, x: x),
)
_add(
    "sink-gradient-without-cap",
    "computes the weight of the sink from logits that are not capped",
    FEATURES,
    FULLY_MASKED,
    case="soft-cap-with-sinks/cross",
    d_sinks=lambda a, row: Featured.d_sinks(_shared_without_cap(a), row),
)
_add(
    "cap-derivative-missing-when-fused",
    "forgets the derivative of the cap on the fused path",
    *BACKWARD,
    MODES,
    case="soft-cap-with-sinks/cross",
    d_capped=_beside("d_capped", _fused, _same),
)


def _shared_without_cap(a: Featured) -> Featured:
    other = _without(a, "soft_cap")
    Featured.softmax(other, other.masked(a.uncapped))
    return other


# What kernels that take no mask have together.

_PRESENT = {
    "window": "window",
    "cap": "soft_cap",
    "sinks": "sinks",
    "alibi": "slopes",
    "lengths": "key_lengths",
    "segments": "query_segments",
}

_SAID = {"alibi": "slopes", "sink": "sinks"}


def _dropped_beside(part: str, other: str, case: str, **changes: Any) -> None:
    """Add a mutant that drops one thing where there is another."""
    (stage, instead), *_ = changes.items()
    there = f"is a {other}" if other in ("window", "cap") else f"are {_SAID.get(other, other)}"
    _add(
        f"{part}-dropped-beside-{other}",
        f"drops the {_SAID.get(part, part)} where there {there}",
        case=case,
        **{stage: _beside(stage, _has(_PRESENT[other]), instead)},
    )


for _other, _case in {
    "window": "window-causal-with-scale/gqa",
    "cap": "soft-cap-with-scale/cross",
    "alibi": "alibi-causal-with-scale/separate",
    "lengths": "key-lengths-causal-with-soft-cap/gqa",
    "sinks": "sinks-with-scale/gqa",
}.items():
    _dropped_beside("scale", _other, _case, factor=lambda a: a.default_factor())
for _other, _case in {
    "lengths": "key-lengths-causal-with-soft-cap/gqa",
    "segments": "segments-with-soft-cap/separate",
}.items():
    _dropped_beside("cap", _other, _case, cap=lambda a: None)
for _other, _case in {
    "lengths": "key-lengths-causal-with-sinks/gqa",
    "segments": "segments-with-sinks/separate",
    "cap": "soft-cap-causal-with-sinks/self",
}.items():
    _dropped_beside("sink", _other, _case, sink_power=lambda a, peak: 0 * peak)
_dropped_beside(
    "alibi", "segments", "segments-with-alibi/separate", sloped=lambda a, logits: logits
)
_add(
    "causal-dropped-beside-keys-after",
    "takes a window with keys after the own one in place of the causal mask",
    case="window-beyond-causal/separate",
    triangle=_beside(
        "triangle",
        lambda a: _has("window")(a) and a.window()[1] > 0,
        lambda a: np.ones_like(Featured.triangle(a)),
    ),
)
_add(
    "window-after-dropped-if-open-before",
    "drops the limit after the own key where there is none before it",
    case="window-only-after/cross",
    window=_window(lambda a, b, f: (b, f if b >= 0 else -1)),
)
_add(
    "sink-not-in-maximum",
    "leaves the sinks out of the row's maximum, so that exp of a large one overflows",
    *BACKWARD,
    OUTPUT,
    case="sinks-far-apart/self",
    peak=Attention.peak,
)
_add(
    "positions-not-read",
    "counts tokens although their positions are passed",
    case="positions-with-gaps/self",
    told=lambda a, side: None,
)
_add(
    "positions-of-first-entry",
    "rotates all entries by the positions of the first",
    case="positions-with-gaps/self",
    told=lambda a, side: _told(a, side, lambda at: np.broadcast_to(at[:1], at.shape)),
)
_add(
    "positions-counted-from-first",
    "counts on from the position of the first token",
    case="positions-with-gaps-interleaved/separate",
    told=lambda a, side: _told(a, side, lambda at: at[:, :1] + np.arange(at.shape[1])),
)
_add(
    "segments-keys-at-offsets-of-queries",
    "reads the keys of each sequence where its queries lie, if there are as many in all",
    case="segments-unequal/square",
    segments=lambda a, side: Featured.segments(a, "query" if a.queries == a.keys else side),
)
_add(
    "segments-17th-query-dropped",
    "forgets the single query of a sequence that is left for the second tile of 16",
    case="segments-of-many-queries/long",
    finish=lambda a, merged: Attention.finish(a, merged * _in_whole_tiles(a)),
)


def _told(a: Featured, side: str, changed: Callable[[Array], Array]) -> Array | None:
    told = Featured.told(a, side)
    return None if told is None else changed(told)


def _in_whole_tiles(a: Featured) -> Array:
    """0 for the 17th query of a segment if that is its last, else 1; `[b q 1 1]`."""
    segments = a.segments("query")
    if segments is None:
        return a.wide(1)
    alone = (ranks(segments) == 16) & (ranks(segments[:, ::-1])[:, ::-1] == 0)
    return np.where(alone, a.wide(0), a.wide(1))[:, :, None, None]


# What two problems that must agree tell, whatever the definition says.

_add = _chapter("equalities", "window/cross")

_add(
    "window-of-4-at-most",
    "cuts a window off at 4 keys",
    "window.of-everything-is-none",
    case=CAUSAL_WINDOW,
    window=_window(lambda a, b, f: (min(b, 4), f)),
)
_add(
    "cap-of-50-at-most",
    "replaces a soft cap above 50 with 50",
    "soft-cap.far-above-is-none",
    cap=lambda a: None if Featured.cap(a) is None else min(Featured.cap(a), 50.0),
    case="soft-cap-with-mask/cross",
)
_add(
    "sink-of-minus-8-at-least",
    "raises sinks below −8, lest their exponential vanishes",
    "sinks.far-below-are-none",
    sinks=_sinks(lambda a, s: np.maximum(s, a.wide(-8))),
    case="sinks/self",
)
_add(
    "alibi-slope-of-0-is-default",
    "takes a slope of 0 for one that is missing, and uses 2⁻⁸",
    "alibi.slopes-of-0-are-none",
    slopes=_slopes(lambda a, s: np.where(s == 0, 2.0**-8, s)),
    case="alibi/gqa",
)
_add(
    "rotary-table-of-64",
    "has a table of 64 positions, and begins again after them, for queries only",
    "positions.shift-changes-nothing",
    rotary_positions=_positions(lambda a, side, p: p % 64 if side == "query" else p),
    case="segments-with-rotary/separate",
)
_add(
    "single-token-sequence-dropped",
    "takes a sequence of one token for padding",
    "packed.members-are-alone",
    finish=lambda a, merged: Attention.finish(a, merged) * (0 if a.queries == a.keys == 1 else 1),
    case="segments/self",
)
_add(
    "causal-top-left-for-two-queries",
    "aligns the causal mask of two queries top-left",
    "cache.steps-equal-the-whole",
    at_end=lambda a: Featured.at_end(a) and a.queries != 2,
    case="causal/bottom-right/cross",
)

# What few queries and short entries meet.

_add = _chapter("serving", "window-causal/decoding")


def _only_in_the_last_block(a: Featured) -> Array:
    last = (a.keys - 1) // 16 * 16
    return Featured.keys_in_use(a) | (np.arange(a.keys) < last)


def _saved_for_once(a: Featured, weights: Array, d_weights: Array) -> Array:
    found = Featured.d_softmax(a, weights, d_weights)
    if a.argument("sinks") is not None and a.weights is None:
        a.log_total = a.log_total / a.wide(np.log(2))
    return found


_add(
    "window-forgotten-for-one-query",
    "drops the window along with the causal flag where there is one query",
    in_window=lambda a, distance: (
        np.ones(distance.shape, bool) if a.queries == 1 else Featured.in_window(a, distance)
    ),
)
_add(
    "lengths-in-the-last-block-only",
    "looks at lengths only in the last block of 16 keys",
    keys_in_use=_only_in_the_last_block,
    case="key-lengths-apart/decoding",
)
_add(
    "normaliser-converted-in-place-with-sinks",
    "converts the saved normaliser to base 2 in the backward pass if there are sinks",
    TWICE,
    d_softmax=_saved_for_once,
    case="sinks-with-mask/cross",
)

# Arguments of features that lie in memory otherwise than in order.

_add = _chapter("layouts", "sinks-with-mask/cross")


def _in_order_of_memory(name: str) -> Callable[[Featured], None]:
    def begin(a: Featured) -> None:
        Featured.begin(a)
        array = a.given.masks.get(name)
        if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
            whole = array if array.base is None else array.base
            a.given.masks[name] = np.resize(whole.ravel(order="K"), array.shape)

    return begin


for _name, _things, _case in (
    ("sinks", "sinks", "sinks-with-mask/cross"),
    ("slopes", "slopes", "alibi/self"),
    ("key_norm", "weights of the key's norm", "norm/self"),
    ("key_lengths", "lengths of keys", "key-lengths/cross"),
    ("key_segments", "segments of keys", "segments/separate"),
    ("query_positions", "positions of queries", "positions-with-gaps/self"),
    ("spans", "spans", "spans/separate"),
    ("tree", "parents of a tree", "tree/cross"),
    ("global_tokens", "global tokens", "global-tokens/cross"),
):
    _add(
        f"strides-of-the-{_name.replace('_', '-')}-ignored",
        f"reads the {_things} as they lie in memory, whatever the strides are",
        LAYOUT,
        begin=_in_order_of_memory(_name),
        case=_case,
    )
