"""Causes that are read off an output by least squares: what is there need not be in the arrays.

Another order, a factor, dropout, or a row of a cache that holds another one, handed over or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conformance.arrays.ports import in_few_rows, rows_of, taken, with_rows
from conformance.causes.handing import PARTS
from conformance.causes.hypothesis import About, Evidence, Hypothesis, Maker, rms, significant
from conformance.causes.location import indices
from conformance.causes.logits import best_factor
from conformance.causes.stages import Stages
from conformance.definition.dtypes import Array, BoolArray, IntArray
from conformance.definition.problem import Problem, Shape
from conformance.records.findings import NOTHING, Part, Phrase
from conformance.records.numbers import LIMIT

MOST_LISTED = 16
"""The longest order that is listed index by index."""


def of_output(maker: Maker, evidence: Evidence, *, is_partial: bool) -> Iterator[Phrase]:
    """Yield causes that are read off the output: another order, a factor, a row, dropout.

    Each is worked out only when the caller asks for it, since the last recovers weights row by row.
    If a known mistake `is_partial`, made in some heads or rows, it says more than most of these do.
    """
    if cause := permuted(maker.problem, evidence):
        yield cause
    if cause := factors(maker.problem, evidence):
        yield cause
    if not is_partial:
        yield from _of_others(maker, evidence)
    if cause := overwritten(maker, evidence):
        yield cause
    if cause := unknown(maker.right, evidence):
        yield cause
    if cause := dropped(maker.right, evidence):
        yield cause


def _of_others(maker: Maker, evidence: Evidence) -> Iterator[Phrase]:
    """Yield causes with numbers for each head, batch entry or token, which are read off."""
    if cause := of_each_head(maker.problem, evidence):
        yield cause
    if cause := sinks_of_others(maker, evidence):
        yield cause
    if cause := padded(maker, evidence):
        yield cause
    yield from _of_other_masks(maker, evidence)
    yield from _joining_heads(maker, evidence)
    if cause := of_other_heads(maker, evidence):
        yield cause
    if cause := page(maker, evidence):
        yield cause


def by_head(array: np.ndarray, shape: Shape) -> np.ndarray:
    """Return an array of the output's shape as `[batch head query component]`."""
    sizes = shape.batch, shape.query_length, shape.heads, shape.value_head_size
    return array.reshape(sizes).swapaxes(1, 2)


def permuted(problem: Problem, evidence: Evidence) -> Phrase:
    """Return the cause that heads, batch entries or queries are in another order, if that is all.

    Each slice of the output along the axis must equal an expected slice, up to noise.
    """
    if not np.isfinite(evidence.got).all() or not problem.heads_alone:
        return NOTHING
    got, want = (by_head(it, problem.shape) for it in (evidence.got, evidence.want))
    for name, axis in (("heads", 1), ("batch", 0), ("queries", 2)):
        size = got.shape[axis]
        if size < 2:
            continue
        order = nearest(*(np.moveaxis(it, axis, 0).reshape(size, -1) for it in (got, want)))
        if order is None:
            continue
        found = np.take(want, order, axis=axis).swapaxes(1, 2)
        if evidence.explained(found.reshape(evidence.want.shape)):
            return Phrase("output.permuted", {"axis": name, **listed(order)})
    return NOTHING


def nearest(got: Array, want: Array) -> IntArray | None:
    """Return the order in which slices `[slices elements]` are those of another array.

    It is None if two slices are nearest to the same one, or each is nearest to its own.
    """
    # The nearest slice has the largest product with this one, less half of its own square.
    order: IntArray = (got @ want.T - (want**2).sum(axis=1) / 2).argmax(axis=1)
    unlike = len(set(order.tolist())) < len(order) or (order == np.arange(len(order))).all()
    return None if unlike else order


def factors(problem: Problem, evidence: Evidence) -> Phrase:
    """Return the cause that the output of some heads, or batch entries, is multiplied by a factor.

    All of them have the same factor, and the others are right.
    """
    if not np.isfinite(evidence.got).all() or not problem.heads_alone:
        return NOTHING
    arrays = evidence.got, evidence.want, evidence.wrong
    got, want, wrong = (by_head(it, problem.shape) for it in arrays)
    for name, axis in (("head", 1), ("batch", 0), ("query", 2)):
        others = tuple(other for other in range(4) if other != axis)
        chosen = wrong.any(axis=others)
        if chosen.all():
            continue
        at = np.nonzero(chosen)[0]
        where = indices(name, at, got.shape[axis])
        factor = best_factor(np.take(got, at, axis), np.take(want, at, axis))
        index = [slice(None)] * 4
        index[axis] = chosen  # type: ignore[call-overload]
        found = want.copy()
        found[tuple(index)] *= factor
        if where and evidence.explained(found.swapaxes(1, 2).reshape(evidence.want.shape)):
            about: About = {"factor": significant(factor), "part": where}
            return Phrase("output.factor", {**about})
    return NOTHING


def of_each_head(problem: Problem, evidence: Evidence) -> Phrase:
    """Return the cause that the output of each key/value head has a factor of its own, if so.

    Other sinks multiply all rows of a head by nearly the same, so nothing is certain beside sinks.
    """
    shape = problem.shape
    if shape.kv_heads < 2 or not problem.heads_alone or problem.sinks is not None:
        return NOTHING
    if not np.isfinite(evidence.got).all():
        return NOTHING
    got, want = (
        it.reshape(-1, shape.kv_heads, shape.group * shape.value_head_size).swapaxes(0, 1)
        for it in (evidence.got, evidence.want)
    )
    found = [best_factor(*it) for it in zip(got, want, strict=True)]
    predicted = (want * np.reshape(found, (-1, 1, 1))).swapaxes(0, 1)
    if not evidence.explained(predicted.reshape(evidence.want.shape)):
        return NOTHING
    return Phrase("output.factors", {**listed_factors(found)})


def sinks_of_others(maker: Maker, evidence: Evidence) -> Phrase:
    """Return the cause that heads have the sinks of others, if that is all.

    The sum of exponentials alone is another then, so each head is multiplied row by row.
    """
    problem, right, shape = maker.problem, maker.right, maker.problem.shape
    if problem.sinks is None or shape.heads < 2 or not np.isfinite(evidence.got).all():
        return NOTHING
    if not problem.heads_alone:
        return NOTHING
    got = by_head(evidence.got, shape).swapaxes(0, 1)
    context = right.context.swapaxes(0, 1)
    share = right.share_of_sinks().swapaxes(0, 1)
    order = []
    for head, own in enumerate(problem.sinks):
        rows = [1 / (1 + share[head] * np.expm1(other - own)) for other in problem.sinks]
        left = [rms(context[head] * it - got[head]) for it in rows]
        order.append(int(np.argmin(left)))
    if order == [*range(shape.heads)]:
        return NOTHING
    about: About = listed(np.array(order))
    found = maker.asked("sinks.of-other-heads", about, sinks=problem.sinks[order])
    return found.cause if evidence.explained(found.make().output) else NOTHING


def padded(maker: Maker, evidence: Evidence) -> Phrase:
    """Return the cause that each batch entry sees its first keys only, or its last, if so.

    How many these are is read off the rows of each entry with the largest errors.
    """
    problem, shape = maker.problem, maker.problem.shape
    if not problem.heads_alone or not 1 < shape.key_length <= MOST_KEYS:
        return NOTHING
    got = by_head(np.where(np.isfinite(evidence.got), evidence.got, np.inf), shape)
    without = problem.replace(mask=None, key_lengths=None).allowed_in_full()
    seen = np.broadcast_to(without, shape.logits)
    errors = np.abs(got - by_head(evidence.want, shape)).max(axis=-1)
    errors = np.where(np.isfinite(errors) & seen.any(axis=-1), errors, -1.0)
    index = np.arange(shape.key_length)
    for cause, step in (("padding.after-first", 1), ("padding.before-last", -1)):
        lengths: list[int] = []
        least = before = 0.0
        for entry in range(shape.batch):
            left = np.zeros(shape.key_length)
            for flat in np.argsort(-errors[entry], axis=None)[:FEW_ROWS]:
                head, row = np.unravel_index(flat, errors[entry].shape)
                shown = maker.right.shown[entry, head, row]
                logits = np.where(seen[entry, head, row], shown, -np.inf)
                power = np.exp(logits - logits.max())[::step, None]
                values = maker.right.values[entry, head, ::step]
                total = np.cumsum(power, axis=0)
                if problem.sinks is not None:
                    total = total + np.exp(problem.sinks[head] - logits.max())
                total = np.maximum(total, TINY)
                off = np.cumsum(power * values, axis=0) / total - got[entry, head, row]
                left += (off**2).sum(axis=-1)
                before += float(errors[entry, head, row]) ** 2
            lengths.append(1 + int(left.argmin()))
            least += float(left.min())
        if least > LEFT**2 * shape.value_head_size * before:
            continue
        kept = np.array(lengths)[:, None]
        inside = index < kept if step == 1 else index >= shape.key_length - kept
        about: About = {"lengths": listed(kept[:, 0])["order"]}
        asked = maker.asked(cause, about, mask=inside[:, None, None], key_lengths=None)
        stages = asked.make()
        # What a query gets that sees no key is open, but it is not what others see.
        wrong = np.asarray(by_head(evidence.wrong, shape).any(axis=-1))
        lost = problem.sees & ~stages.problem.sees
        if wrong[lost].all() and evidence.explained(stages.output):
            return asked.cause
    return NOTHING


def _of_other_masks(maker: Maker, evidence: Evidence) -> Iterator[Phrase]:
    """Yield the causes that packed sequences or a prefix that sees itself were not told.

    Under a causal mask, the first token of a packed sequence gets its own value, and the queries
    that see later keys are those of the prefix but its last.
    """
    problem, shape = maker.problem, maker.problem.shape
    if problem.causal is None or not problem.heads_alone or maker.chosen:
        return
    if shape.query_length != shape.key_length or shape.key_length < 2:
        return
    arrays = evidence.got, evidence.wrong, evidence.noise
    got, wrong, noise = (by_head(it, shape) for it in arrays)
    index, allowed = np.arange(shape.key_length), maker.right.allowed
    off = np.abs(got - maker.right.values) / np.maximum(noise, evidence.spread)
    begins = np.asarray((off <= LIMIT).all(axis=(1, 3))) & np.asarray(wrong.any(axis=(1, 3)))
    if problem.segments is None and begins.any() and problem.sinks is None:
        ids = begins.cumsum(axis=1)
        alone = (ids[:, :, None] == ids[:, None])[:, None]
        entry = int(begins.any(axis=1).argmax())
        starts = listed(np.nonzero(begins[entry])[0])["order"]
        about: About = {"entry": entry, "starts": starts}
        hypothesis = maker.masked("untold.segments", allowed & alone, about)
        if evidence.explained(hypothesis.make().output):
            yield hypothesis.cause
    rows = np.asarray(wrong.any(axis=(1, 3)))
    lengths = np.where(rows.any(axis=1), shape.key_length + 1 - rows[:, ::-1].argmax(axis=1), 0)
    if problem.spans is None and (lengths <= shape.key_length).all():
        seen = allowed | (np.maximum(index[:, None], index) < lengths[:, None, None])[:, None]
        hypothesis = maker.masked("untold.prefix", seen, {"lengths": listed(lengths)["order"]})
        if evidence.explained(hypothesis.make().output):
            yield hypothesis.cause


def _joining_heads(maker: Maker, evidence: Evidence) -> Iterator[Phrase]:
    """Yield the causes that join heads and explain a few rows, and then everything."""
    problem = maker.problem
    if not problem.heads_alone or problem.tree is not None or problem.axes is not None:
        return
    if not np.isfinite(evidence.got).all():
        return
    for hypothesis in in_few_rows(maker):
        rows = np.sort(
            np.argsort(-np.abs(evidence.got - evidence.want).sum(axis=(0, 2)))[:FEW_ROWS]
        )
        few = with_rows(hypothesis.make(), rows).output
        off, before = (rms(evidence.got[:, rows] - it) for it in (few, evidence.want[:, rows]))
        if off <= LEFT * before and evidence.explained(hypothesis.make().output):
            yield hypothesis.cause


MOST_HEADS = 64
"""The most key/value heads of all batch entries among which those of each query head are sought."""


MOST_REPEATED = 2**27
"""The most numbers of keys that are repeated for query heads in this search."""


def of_other_heads(maker: Maker, evidence: Evidence) -> Phrase:
    """Return the cause that query heads use other key/value heads, or those of other entries.

    Each query head is compared with the output that it has with each of them, in the worst rows.
    """
    problem, shape = maker.problem, maker.problem.shape
    batch, heads, kv_heads = shape.batch, shape.heads, shape.kv_heads
    if not 1 < batch * kv_heads <= MOST_HEADS or not np.isfinite(evidence.got).all():
        return NOTHING
    if not problem.heads_alone or problem.tree is not None or problem.axes is not None:
        return NOTHING
    if batch**2 * kv_heads * heads * shape.key_length * shape.head_size > MOST_REPEATED:
        return NOTHING
    got, want = (by_head(it, shape) for it in (evidence.got, evidence.want))
    # The rows that see most are those that tell most of the keys.
    rows = np.sort(np.argsort(-np.abs(got - want).sum(axis=(0, 1, 3)))[:FEW_ROWS])
    few = Maker(rows_of(problem, rows), maker.handed, (maker.rows[rows], maker.queries))
    left = np.full((batch, kv_heads, batch, heads), np.inf)
    for by in range(batch):
        for kv_head in range(kv_heads):
            at = (np.arange(batch) + by) % batch

            def one(a: Stages, all_heads: Array, name: str, at: Any = (at, kv_head)) -> Array:
                chosen = all_heads[at[0], at[1]][:, None]
                return np.repeat(chosen, a.shape.heads, axis=1)

            found = by_head(few.staged("", repeat=one).make().output, few.problem.shape)
            left[by, kv_head] = ((found - got[:, :, rows]) ** 2).sum(axis=(2, 3))
    best = np.nan_to_num(left, nan=np.inf).reshape(-1, batch, heads).argmin(axis=0)
    entries = (best // kv_heads + np.arange(batch)[:, None]) % batch
    order = best % kv_heads

    def mapped(a: Stages, all_heads: Array, name: str) -> Array:
        return all_heads[entries, order]

    own, right = np.arange(batch)[:, None], np.arange(heads) // shape.group
    flat = np.arange(batch * heads).reshape(batch, heads) % (batch * kv_heads)
    if (entries == own).all() and (order == order[0]).all():
        named = Phrase("heads.use-others", {**listed(order[0])})
    elif (order == right).all() and not entries.any():
        named = Phrase("cache.of-first-entry")
    elif (order == right).all() and (entries == entries[:, :1]).all():
        named = Phrase("cache.entries-in-order", {**listed(entries[:, 0])})
    elif (entries * kv_heads + order == flat).all():
        named = Phrase("heads.tiled-over-batch")
    else:
        return NOTHING
    return named if evidence.explained(maker.staged("", repeat=mapped).make().output) else NOTHING


PAGES = (8, 16, 32, 64, 128, 256)
"""The numbers of tokens of a page."""

MOST_COMPARED = 2**14
"""The most pairs of a page of one entry and one of any that are compared."""


def page(maker: Maker, evidence: Evidence) -> Phrase:
    """Return the cause that one page of a batch entry is another one, of it or of another entry.

    What a page adds to the sums of exponentials, and of values, is exchanged in the worst rows.
    """
    problem = maker.problem
    if not problem.heads_alone or not np.isfinite(evidence.got).all() or "score" in maker.right.own:
        return NOTHING
    if problem.attn_bias is not None or problem.slopes is not None:
        return NOTHING
    wrong = by_head(evidence.wrong, problem.shape).any(axis=(1, 2, 3))
    if wrong.sum() != 1:
        # Of several entries, each would have a wrong number of its own.
        return NOTHING
    rows = _Rows.worst(maker.right, evidence, int(wrong.argmax()))
    for size in PAGES:
        for of, left in rows.exchanged(size):
            best = int(np.nan_to_num(left, nan=np.inf).argmin())
            if not left.flat[best] <= LEFT**2 * rows.before:
                continue
            place, other, by = (int(it) * size for it in np.unravel_index(best, left.shape))
            found = _with_page(maker, of, size, (rows.entry, place), (other // size, by))
            if evidence.explained(found.make().output):
                return found.cause
    return NOTHING


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of one batch entry, and what each key of each entry would add to their sums.

    Attributes:
        entry: the index of the entry.
        answer: the returned rows, `[row component]`.
        before: the sum of the squares of their errors.
        powers: the exponentials of the logits, `[entry row key]`.
        values: the values, `[entry row key component]`.
        seen: which keys of their own entry the rows see, `[row key]`.
        total: the sums of exponentials over these, `[row]`.
        context: the sums of exponentials times values, `[row component]`.
    """

    entry: int
    answer: Array
    before: float
    powers: Array
    values: Array
    seen: BoolArray
    total: Array
    context: Array

    @classmethod
    def worst(cls, right: Stages, evidence: Evidence, entry: int) -> _Rows:
        """Return the rows of the entry with the largest errors."""
        problem, shape = right.problem, right.shape
        got, want = (by_head(it, shape)[entry] for it in (evidence.got, evidence.want))
        errors = np.abs(got - want).max(axis=-1)
        head, row = np.unravel_index(np.argsort(-errors, axis=None)[:FEW_ROWS], errors.shape)
        query, kv_head = right.projected["query"][entry, head, row], head // shape.group
        scores = np.einsum("rd,erkd->erk", query, right.projected["key"][:, kv_head])
        logits = right.capped(right.scaled(scores))
        seen = np.broadcast_to(right.allowed, shape.logits)[entry, head, row]
        peak = logits[entry].max(axis=-1, keepdims=True)
        powers = np.exp(np.minimum(logits - peak, MOST_LOGIT))
        values = right.projected["value"][:, kv_head]
        own = np.where(seen, powers[entry], 0.0)
        total, context = own.sum(axis=-1), np.einsum("rk,rkd->rd", own, values[entry])
        if problem.sinks is not None:
            total = total + np.exp(problem.sinks[head] - peak[:, 0])
        before = float((errors[head, row] ** 2).sum()) * shape.value_head_size
        return cls(entry, got[head, row], before, powers, values, seen, total, context)

    def exchanged(self, size: int) -> Iterator[tuple[tuple[str, ...], Array]]:
        """Yield the squares that are left if a page is another one, `[page entry page]`.

        This is for keys, values or both, whose names come with it. It is ∞ for a page that some row
        does not see, and for the page itself.
        """
        batch, rows, keys = self.powers.shape
        count = keys // size
        if not count > 1 or count * count * batch > MOST_COMPARED:
            return
        within = slice(count * size)
        p = self.powers[..., within].reshape(batch, rows, count, size)
        v = self.values[:, :, within].reshape(batch, rows, count, size, -1)
        whole = self.seen[:, within].reshape(rows, count, size).all(axis=(0, 2))
        adds, gives = p.sum(axis=-1), np.einsum("erjs,erjsd->erjd", p, v)
        entry = self.entry
        for of in PARTS:
            left = np.full((count, batch, count), np.inf)
            for slot in np.nonzero(whole)[0]:
                lost, without = (it[:, slot, None] for it in (adds[entry], gives[entry]))
                if of == ("key",):
                    new = np.einsum("erjs,rsd->erjd", p, v[entry, :, slot])
                elif of == ("value",):
                    new = np.einsum("rs,erjsd->erjd", p[entry, :, slot], v)
                else:
                    new = gives
                sums = self.total[:, None] - lost + (adds if "key" in of else lost)
                mixed = self.context[:, None] - without + new
                off = mixed / np.maximum(sums, TINY)[..., None] - self.answer[:, None]
                left[slot] = (off**2).sum(axis=(1, 3))
                left[slot, entry, slot] = np.inf
            yield of, left


def _with_page(
    maker: Maker, of: tuple[str, ...], size: int, place: tuple[int, int], by: tuple[int, int]
) -> Hypothesis:
    """Return the hypothesis that keys or values at a place are those at another one.

    Both places are an entry and the first token of the page in it.
    """

    def replaced(a: Stages, heads: Array, name: str) -> Array:
        if name in of:
            taken_from = heads[by[0], :, by[1] : by[1] + size]
            heads = heads.copy()
            heads[place[0], :, place[1] : place[1] + size] = taken_from
        return Stages.repeat(a, heads, name)

    where = {"entry": place[0], "row": place[1], "other": by[0], "by": by[1]}
    about: About = {"of": [*of], "size": size, **where}
    return maker.staged("cache.page-of-another", about, repeat=replaced)


MOST_ROWS = 512
"""The largest number of rows whose weights are recovered."""

UNEVEN = 0.02
"""How much recovered weights may differ, relative to those that they are taken for."""

LEAST_KEPT = 0.5
"""Weights above this share of what is expected were kept, and the others dropped."""

FEWEST_KEPT, FEWEST_DROPPED = 8, 3
"""The fewest weights of each kind by which dropout is told from other mistakes."""


def dropped(right: Stages, evidence: Evidence) -> Phrase:
    """Return the cause that some weights are 0 and all others larger by one factor: dropout is on.

    The weights of a query are recovered where it sees at most half as many keys as a value has
    components; other rows say nothing. The share of zeros must be that of the factor, 1 − 1/factor.
    """
    shape = right.shape
    if not np.isfinite(evidence.got).all() or not right.problem.heads_alone:
        return NOTHING
    got = by_head(evidence.got, shape)
    seen = right.weights > 0
    counts = seen.sum(axis=-1)
    rows = np.argwhere((counts > 0) & (2 * counts <= shape.value_head_size))[:MOST_ROWS]
    found: list[Array] = [np.zeros(0)]
    for at in map(tuple, rows):
        values, weights = right.values[at[:2]][seen[at]], right.weights[at][seen[at]]
        solved, *_ = np.linalg.lstsq(values.T, got[at], rcond=None)
        if rms(solved @ values - got[at]) > UNEVEN * rms(weights @ values):
            return NOTHING
        found.append((solved / weights)[weights > UNEVEN])
    shares = np.concatenate(found)
    kept = shares[shares > LEAST_KEPT]
    if kept.size < FEWEST_KEPT or shares.size - kept.size < FEWEST_DROPPED:
        return NOTHING
    factor = float(np.median(kept))
    even = np.abs(np.where(shares > LEAST_KEPT, shares / factor - 1, shares)) <= UNEVEN
    rate = 1 - 1 / factor
    spread = math.sqrt(max(rate * (1 - rate), 0.0) / shares.size)
    if not even.all() or abs(1 - kept.size / shares.size - rate) > 4 * spread:
        return NOTHING
    return Phrase("softmax.dropout-on", {"rate": significant(rate), "count": len(rows)})


TINY = np.finfo(np.float64).tiny

MOST_KEYS = 512
"""The most keys among which one that holds another is looked for, for each of all pairs."""

FEW_ROWS = 8
"""The number of rows, those with the largest errors, that tell which key holds which."""


def overwritten(maker: Maker, evidence: Evidence) -> Phrase:
    """Return the cause that one row of keys and values, or of values, holds another row.

    If o is a row of the output, and r is what it lacks of the right one without key j, times the
    sum of the other weights, then r is parallel to v − o, whatever the weight of the value v that
    stands at j.
    """
    right, shape, keys = maker.right, maker.problem.shape, maker.problem.shape.key_length
    if not np.isfinite(evidence.got).all() or not right.problem.heads_alone:
        return NOTHING
    if not 2 < keys <= MOST_KEYS:
        return NOTHING
    got, want = (by_head(it, shape) for it in (evidence.got, evidence.want))
    errors = np.abs(got - want).max(axis=-1)
    left = np.zeros((keys, keys))
    for flat in np.argsort(-errors, axis=None)[:FEW_ROWS]:
        at = np.unravel_index(flat, errors.shape)
        weights, values = right.weights[at], right.values[at[:2]]
        lacks = got[at] * (1 - weights)[:, None] - want[at] + weights[:, None] * values
        towards = values - got[at]
        along = (lacks @ towards.T) ** 2 / np.maximum((towards**2).sum(axis=-1), TINY)
        left += ((lacks**2).sum(axis=-1)[:, None] - along) / max(errors[at] ** 2, TINY)
    np.fill_diagonal(left, np.inf)
    row, by = (int(it) for it in np.unravel_index(int(left.argmin()), left.shape))
    index = np.where(np.arange(keys) == row, by, np.arange(keys))
    for of in (("key", "value"), ("value",)):
        about: About = {"of": [*of], "row": row, "by": by}
        found = maker.staged("cache.row-of-another", about, input=taken(of, index))
        if evidence.explained(found.make().output):
            return found.cause
    return NOTHING


def listed(order: np.ndarray) -> dict[str, list[Part]]:
    """Return the order as an argument: a list, or for long ones how it begins."""
    return {"order": [int(at) for at in order[:MOST_LISTED]]}


def listed_factors(factors: Sequence[float]) -> About:
    """Return factors as an argument: a list, or for many how it begins."""
    return {"factors": [f"{it:.4g}" for it in factors[:MOST_LISTED]]}


FEWEST_SEEING = 4
"""The fewest rows of the heads that share a key, by which a row that is unknown is told."""

MOST_SEEING = 32
"""The most of these rows by which the key is found."""

MOST_SLOTS = 4096
"""The most keys among which the one is looked for whose row is unknown."""

AT_ONCE = 2**22
"""The most numbers of which lines are computed at once."""

LEFT = 0.25
"""The largest share of the error, as an rms, that an unknown row leaves."""

ALONE = 2.0
"""How many times more of the error any other key leaves, at least."""

OUTNUMBER = 1.25
"""How many rows there must be for each component of a key that is told from their logits."""

FEWER = 1e-12
"""Weights and shares that are as good as 0."""

ROUNDS = 8
"""How often an unknown row is fitted again, from where the last fit ended."""

MOST_LOGIT = 500.0
"""The largest change of a logit, whose exponential is finite."""


def unknown(right: Stages, evidence: Evidence) -> Phrase:
    """Return the cause that a row of keys, values, or both is none that was handed over.

    If a is a row of the right output without key j, divided by the sum of the other weights, then
    the returned row is (1 − p) a + p v, whatever key stands at j. These rows lie on lines from a
    that meet in the value v. If p is the weight of key j, the key is the one handed over. Where
    more rows see it than a key has components, p must be that of some key.
    """
    problem, shape = right.problem, right.shape
    if not np.isfinite(evidence.got).all() or not problem.heads_alone:
        return NOTHING
    if not 2 < shape.key_length <= MOST_SLOTS or shape.value_head_size < FEWEST_SEEING:
        return NOTHING

    def grouped(array: np.ndarray) -> np.ndarray:
        """Return an array `[batch heads length ...]` as `[batch kv_heads rows ...]`."""
        return array.reshape(shape.batch, shape.kv_heads, -1, array.shape[-1])

    arrays = evidence.got, evidence.want, evidence.noise
    got, want, noise = (grouped(by_head(it, shape)) for it in arrays)
    errors = np.abs(got - want)
    weights, queries = grouped(right.weights), grouped(right.projected["query"])
    # The factor of a soft cap depends on the logit, so that no key follows from p.
    factor = problem.logit_scale if problem.soft_cap is None and "score" not in right.own else 0.0
    wrong = grouped(by_head(evidence.wrong, shape)).any(axis=(2, 3))
    sides = {
        (b, h): _Slots(
            got[b, h],
            want[b, h],
            weights[b, h],
            queries[b, h] * factor,
            right.projected["value"][b, h],
            np.maximum(noise[b, h].mean(axis=-1, keepdims=True), TINY),
        )
        for b, h in map(tuple, np.argwhere(wrong).tolist())
    }
    row = sides[max(sides, key=lambda at: float(errors[at].max()))].unknown()
    if row < 0 or any((side.weights[:, row] > 0).sum() < FEWEST_SEEING for side in sides.values()):
        return NOTHING
    fitting: list[list[Part]] = []
    for of in (["value"], ["key"], ["key", "value"]):
        found = want.copy()
        for at, side in sides.items():
            found[at] = side.of_value(row) if of == ["value"] else side.of_key(row, "value" in of)
        merged = found.reshape(shape.batch, shape.heads, -1, shape.value_head_size).swapaxes(1, 2)
        predicted = merged.reshape(evidence.want.shape)
        left, before = evidence.misfit(predicted), evidence.misfit(evidence.want)
        if left <= LEFT * before and evidence.explained(predicted):
            fitting.append([*of])
    # What the value or the key explains may be a bias of this key, as the key alone may be unless
    # rows outnumber its components.
    alone = all(side.tells_key(row) for side in sides.values())
    if not fitting or fitting[:2] == [["value"], ["key"]] or (fitting[0] == ["key"] and not alone):
        return NOTHING
    return Phrase("cache.row-unknown", {"of": fitting[0], "row": row})


class _Slots:
    """The rows of the heads that share keys and values, and what may stand in place of one key."""

    def __init__(
        self,
        got: Array,
        want: Array,
        weights: Array,
        queries: Array,
        values: Array,
        unit: Array,
    ) -> None:
        """Take arrays of one key/value head.

        Args:
            got: the returned rows, `[row head]`.
            want: the right ones.
            weights: their weights, `[row key]`.
            queries: their queries times the factor of logits, `[row head]`; 0 if it depends on
                the logit.
            values: the values, `[key head]`.
            unit: the noise of each row, `[row 1]`.
        """
        self.got, self.want, self.weights = got, want, weights
        self.queries, self.values, self.unit = queries, values, unit

    def tells_key(self, row: int) -> bool:
        """Return whether so many rows see a key that not every p is that of some key."""
        sees = int((self.weights[:, row] > 0).sum())
        return bool(self.queries.any()) and sees >= OUTNUMBER * self.queries.shape[-1]

    def unknown(self) -> int:
        """Return the key whose row is unknown; -1 if none is, or if several may be."""
        size = np.abs(self.got - self.want).max(axis=-1)
        rows = np.sort(np.argsort(-size, kind="stable")[:MOST_SEEING])
        width = self.want.shape[-1]
        step = max(1, AT_ONCE // (width * max(width, len(rows))))
        spans = np.split(np.arange(len(self.values)), range(step, len(self.values), step))
        left = np.concatenate([self._left(rows, keys) for keys in spans])
        first, second = np.argsort(left, kind="stable")[:2]
        alone = np.isfinite(left[first]) and left[second] > ALONE**2 * left[first]
        return int(first) if alone else -1

    def _left(self, rows: IntArray, keys: IntArray) -> Array:
        """Return the sum of squares that an unknown row of each of some keys leaves, `[key]`.

        It is ∞ if too few rows see the key, or if the output is that without the key.
        """
        start, along, seen = self._lines(rows, keys)
        along = along / self.unit[rows]
        value = _meeting_point(start, along * seen[..., None])
        towards = (value[:, None] - start) / self.unit[rows]
        share, sizes = _shares(along, towards)
        squares = (along**2).sum(axis=-1)
        # Rows that do not see the key are not changed by it.
        left = np.maximum(squares - np.where(seen, share**2 * sizes, 0.0), 0.0).sum(axis=-1)
        none = (seen.sum(axis=-1) < FEWEST_SEEING) | (left > LEFT**2 * squares.sum(axis=-1))
        found: Array = np.where(none, np.inf, left)
        return found

    def _lines(self, rows: IntArray, keys: IntArray) -> tuple[Array, Array, BoolArray]:
        """Return for each of some keys where the lines of rows begin, and their directions.

        The results are `[key row head]`, and which rows see the key, `[key row]`.
        """
        weights = self.weights[np.ix_(rows, keys)].T[..., None]
        lacks = self.want[rows] - weights * self.values[keys][:, None]
        # A row that sees hardly another key is the value itself, from wherever the line begins.
        others = np.where(1.0 - weights > FEWER, 1.0 - weights, np.inf)
        start = lacks / others
        return start, self.got[rows] - start, weights[..., 0] > 0

    def of_value(self, row: int) -> Array:
        """Return the output with the best other value, and the key that was handed over."""
        weight = self.weights[:, row, None]
        scaled = weight / self.unit
        off = (self.got - self.want) / self.unit
        return self.want + weight * (scaled * off).sum(axis=0) / max(float((scaled**2).sum()), TINY)

    def of_key(self, row: int, also_value: bool) -> Array:
        """Return the output with the best other key, and with the best other value if told."""
        start, along, seen = (
            it[0] for it in self._lines(np.arange(len(self.want)), np.array([row]))
        )
        along = np.where(seen[:, None], along, 0.0) / self.unit
        value = self.values[row]
        if also_value:
            value = _meeting_point(start[None], along[None])[0]
        for _ in range(ROUNDS if also_value else 0):
            share = _shares(along, (value - start) / self.unit)[0][:, None]
            ends = (share * (along + share * start / self.unit) / self.unit).sum(axis=0)
            value = ends / max(float(((share / self.unit) ** 2).sum()), TINY)
        towards = (value - start) / self.unit
        share, sizes = _shares(along, towards)
        if self.tells_key(row):
            share = self._of_logits(row, share, np.sqrt(sizes))
        return np.where(seen[:, None], start + share[:, None] * (value - start), self.want)

    def _of_logits(self, row: int, share: Array, sizes: Array) -> Array:
        """Return the shares `[row]` of the key that gives the nearest to these.

        `sizes` are the errors of rows, in units of noise, that an error of 1 of a share makes.
        """
        weight, wanted = self.weights[:, row], share
        seen = weight > 0
        change = np.zeros(self.queries.shape[-1])
        share = np.clip(wanted, FEWER, 1.0 - FEWER)
        odds = np.where(seen, weight / np.maximum(1.0 - weight, FEWER), 1.0)
        logits = np.log(share / (1.0 - share) / odds)
        for _ in range(ROUNDS):
            slope = share * (1.0 - share)
            counts = np.where(seen, slope * sizes, 0.0)
            change, *_ = np.linalg.lstsq(
                self.queries * counts[:, None], logits * counts, rcond=None
            )
            known = odds * np.exp(np.minimum(self.queries @ change, MOST_LOGIT))
            share = known / (1.0 + known)
            slope = np.maximum(share * (1.0 - share), FEWER)
            logits = self.queries @ change + np.clip((wanted - share) / slope, -1.0, 1.0)
        return share


def _meeting_point(start: Array, along: Array) -> Array:
    """Return the points nearest to lines, `[... head]`.

    `start` is a point of each line, `[... line head]`, and `along` its direction, whose size is the
    weight of the line.
    """
    size = start.shape[-1]
    squares = (along**2).sum(axis=-1)
    matrix = -np.matmul(along.swapaxes(-1, -2), along)
    total = squares.sum(axis=-1)[..., None]
    # Lines that are parallel meet nowhere.
    matrix[..., np.arange(size), np.arange(size)] += total * (1.0 + FEWER) + TINY
    inner = (along * start).sum(axis=-1)
    ends = (squares[..., None] * start - along * inner[..., None]).sum(axis=-2)
    found: Array = np.linalg.solve(matrix, ends[..., None])[..., 0]
    return found


def _shares(along: Array, towards: Array) -> tuple[Array, Array]:
    """Return how much of vectors `[... head]` others have, at least 0, and the squares of these."""
    sizes = np.maximum((towards**2).sum(axis=-1), TINY)
    return np.maximum((along * towards).sum(axis=-1) / sizes, 0.0), sizes
