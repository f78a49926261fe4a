"""Experiments that tell why a way through a text gives other outputs than the whole text.

The layer is a black box, so an experiment changes a token and looks at which outputs move. Thus it
is known which tokens a query attends to, in the whole text and on the way.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace

import numpy as np

from conformance.definition.comparison import BETWEEN_ANSWERS
from conformance.definition.dtypes import Array
from conformance.errors import Unsupported
from conformance.records.findings import NOTHING, Phrase
from conformance.stateful.ways import GRADIENT, WAYS, Desk, Stretch, Texts, Way

DTYPES = ("float32", "float64")
"""The dtypes in which noise is so small that it hides no token's influence."""

SMALL = 2.0**-6
"""A relative change that is small for a layer, but not for numbers in bfloat16 or fewer bits."""

MANY = 6
"""The most tokens that a cause lists."""


def cause_of(desk: Desk, way: Way, index: int, part: Stretch, noise: Array) -> Phrase:
    """Return the likely cause of a difference; `NOTHING` if the experiments do not tell it.

    Args:
        desk: the layer and its texts.
        way: the way on which the outputs differ.
        index: the index of the first part whose outputs differ.
        part: that part.
        noise: σ of the outputs of the whole text of this part, `[batch length width]`.
    """
    if desk.dtype not in DTYPES or part.of in ("longer", GRADIENT):
        return NOTHING
    try:
        return _Inquiry(desk, way, index, part, noise).cause()
    except Exception:
        # With other tokens, the layer raises an error, of which another finding tells.
        return NOTHING


class _Inquiry:
    """The experiments on the first query of a part whose output differs."""

    def __init__(self, desk: Desk, way: Way, index: int, part: Stretch, noise: Array) -> None:
        self._desk, self._way, self._index, self._part = desk, way, index, part
        self._limit = BETWEEN_ANSWERS * noise.max(axis=-1, keepdims=True)
        whole = desk.whole(part.of)[list(part.rows), part.start : part.stop]
        apart = ~(
            np.abs(part.output - whole) <= self._limit[list(part.rows), part.start : part.stop]
        )
        wrong = [*map(tuple, np.argwhere(apart.any(axis=-1)))] or [(0, 0)]
        # Of a chunk that crosses the end of a window, the last query has lost the most tokens.
        chosen = min if desk.declared.window is None else max
        self._at = chosen(wrong, key=lambda at: (at[1], -at[0]))
        self._row, self._token = part.rows[self._at[0]], part.start + int(self._at[1])

    def _part_of_way(self, texts: Texts) -> Array:
        """Return all outputs of the part on the way through these texts."""
        parts = self._way.take(self._desk.with_texts(texts))
        output: Array = next(itertools.islice(parts, self._index, None)).output
        # The way may have a setting to restore.
        parts.close()  # type: ignore[attr-defined]
        return output

    def _on_the_way(self, texts: Texts) -> Array:
        """Return the output of the query on the way through these texts."""
        output: Array = self._part_of_way(texts)[self._at]
        return output

    def _in_the_whole(self, texts: Texts) -> Array:
        output: Array = self._desk.with_texts(texts).whole(self._part.of)[self._row, self._token]
        return output

    def _apart(self, one: Array, other: Array) -> bool:
        """Return whether two outputs of the query differ by more than noise."""
        limit = self._limit[self._row, self._token]
        return bool((~(np.abs(one - other) <= limit)).any())

    def cause(self) -> Phrase:
        """Return the cause, or `NOTHING`."""
        texts, of, served = self._desk.texts, self._part.of, self._way.requirement
        here = self._part.output[self._at]
        limit = self._limit[list(self._part.rows), self._part.start : self._part.stop]
        if not (np.abs(self._part.output - self._part_of_way(texts)) <= limit).all():
            return Phrase("stateful.not-repeatable")
        if served == "stateful.causal":
            return Phrase("stateful.future-attended")
        if served == "stateful.reach":
            return self._of_reach()
        if served == "stateful.inputs":
            # The same chunks, in arrays that nobody overwrites.
            self._way = next(way for way in WAYS if way.name == "chunks-5")
            here = self._on_the_way(texts)
            if not self._apart(here, self._in_the_whole(texts)):
                return Phrase("stateful.inputs-kept")
        for name, cause in _READ.items():
            changed = texts.with_other(name, slice(None), slice(None))
            if name != of and self._apart(here, self._on_the_way(changed)):
                return Phrase(cause)
        others = [row for row in range(len(texts.text)) if row != self._row]
        beside = texts.with_other(of, others, slice(None))
        pairs = [(here, self._on_the_way(beside))]
        pairs += [(self._in_the_whole(texts), self._in_the_whole(beside))]
        if any(self._apart(one, other) for one, other in pairs):
            return Phrase("stateful.row-of-another")
        if served in ("stateful.runs", "stateful.batch", "stateful.threads"):
            return NOTHING
        seen = [self._seen(token) for token in self._candidates()]
        way = {token for token, on_way, _ in seen if on_way}
        whole = {token for token, _, in_whole in seen if in_whole}
        if way != whole:
            return self._of_tokens({token for token, _, _ in seen}, way, whole)
        return self._of_weights()

    def _candidates(self) -> list[int]:
        """Return tokens whose influence tells the known mistakes apart."""
        start, last, first = self._part.start, self._token, 0
        found = {0, 1, last // 2, last - start, last - start + 1}
        found |= {start - 2, start - 1, start, last - 1, last, last + 1}
        if self._desk.declared.window is not None:
            first = last - self._desk.declared.window
            found |= {first - 2, first - 1, first, first + 1, first + 2, first + 3}
        length = getattr(self._desk.texts, self._part.of).shape[1]
        return sorted(token for token in found if 0 <= token < length)

    def _seen(self, token: int) -> tuple[int, bool, bool]:
        """Return a token, and whether it moves the query's output on the way and in the whole."""
        texts = self._desk.texts
        changed = texts.with_other(self._part.of, self._row, token)
        on_way = self._apart(self._on_the_way(texts), self._on_the_way(changed))
        return token, on_way, self._apart(self._in_the_whole(texts), self._in_the_whole(changed))

    def _of_tokens(self, asked: set[int], way: set[int], whole: set[int]) -> Phrase:
        """Return the cause if other tokens are attended to on the way than in the whole."""
        extra, missing = way - whole, whole - way
        start, token = self._part.start, self._token
        if max(extra, default=-1) > token:
            return Phrase("stateful.future-attended")
        cached = {it for it in asked if it < start}
        if start and way == {it for it in asked if it <= token - start}:
            return Phrase("stateful.mask-top-left")
        if start and cached & whole and not cached & way:
            return Phrase("stateful.cache-not-read")
        if self._desk.declared.window is not None:
            if missing and extra and min(extra) < min(missing):
                return Phrase("stateful.window-from-start")
            if not extra and max(missing) < min(way, default=0):
                return Phrase("stateful.window-shorter", {"tokens": len(missing)})
            if not missing and max(extra) < min(whole):
                if len(extra) > 2 or (0 in extra and token > self._desk.declared.window):
                    return Phrase("stateful.window-ignored")
                return Phrase("stateful.window-longer", {"tokens": len(extra)})
        if missing == {start - 1} and not extra:
            return Phrase("stateful.last-missing")
        if missing:
            return Phrase("stateful.tokens-missing", {"tokens": [*sorted(missing)[:MANY]]})
        return Phrase("stateful.tokens-extra", {"tokens": [*sorted(extra)[:MANY]]})

    def _of_reach(self) -> Phrase:
        """Return the cause if a token before the declared window is attended to."""
        first = self._token - (self._desk.declared.window or 0)
        before = [self._seen(token) for token in range(first, max(first - 3, -1), -1)]
        extra = [token for token, _, in_whole in before if in_whole]
        if len(extra) > 2 or not extra:
            return Phrase("stateful.window-ignored")
        return Phrase("stateful.window-longer", {"tokens": len(extra)})

    def _of_weights(self) -> Phrase:
        """Return the cause if the same tokens are attended to on the way and in the whole.

        If the right positions are passed, and the output is right, those were wrong before.
        If numbers are rounded, a small change of all tokens gives another difference. If all tokens
        are equal, their weights do not matter as long as their sum is 1.
        """
        texts, of = self._desk.texts, self._part.of
        with suppress(Unsupported):
            desk = self._desk
            self._desk = replace(desk, told=True)
            try:
                mended = self._on_the_way(texts)
            finally:
                self._desk = desk
            if not self._apart(mended, self._in_the_whole(texts)):
                return Phrase("stateful.positions-off")
        text = getattr(texts, of)
        signs = np.random.Generator(np.random.PCG64(1)).choice([-1.0, 1.0], text.shape)
        near = replace(texts, **{of: text * (1 + SMALL * signs)})
        apart, later = (self._on_the_way(it) - self._in_the_whole(it) for it in (texts, near))
        if np.linalg.norm(later - apart) > np.linalg.norm(apart) / 2:
            return Phrase("stateful.fewer-bits")
        alike = replace(texts, **{of: np.broadcast_to(text[:, :1], text.shape).copy()})
        if self._apart(self._on_the_way(alike), self._in_the_whole(alike)):
            return Phrase("stateful.values")
        swapped = text.copy()
        swapped[:, [-2, -3]] = text[:, [-3, -2]]
        whole = self._desk.whole(of)[self._row, -1]
        moved = self._desk.with_texts(replace(texts, **{of: swapped})).whole(of)[self._row, -1]
        ordered = self._apart(whole, moved)
        return Phrase("stateful.positions" if ordered else "stateful.logits")


_READ = {
    "padding": "stateful.padding-attended",
    "other": "stateful.stale",
    "text": "stateful.stale",
    "discarded": "stateful.stale",
}
"""By text that must not be read, the cause if it is."""
