"""Mutants of attentions that take tokens packed, in pages or beside a cache, and those they are of.

The six attentions are in torch, one sequence at a time, so gradients need nothing of their own.
Each method is one step that a mutant replaces. The mutants are what kernels of serving get wrong:
where sequences begin, which page is next, what lies behind the last token, where new keys go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from conformance import (
    Cache,
    CausalFlag,
    Function,
    HeadNorm,
    Lengths,
    MaskArgument,
    Packed,
    Pages,
    RotaryBase,
    Sinks,
    Window,
)
from mutants.features import FeatureMutant
from mutants.mutant import INPUTS, KEPT, LAYOUT, MODES, OUTPUT, SPELLINGS, STEPS, UNCHANGED

Tensor = Any
MASK = MaskArgument("mask", "batch heads query key", true="attends")


class Handed(Function):
    """What all six have in common: one sequence, `[heads length head]`."""

    framework = "torch"
    grouped = True
    causal_flag = CausalFlag("causal", "bottom-right")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any], **_: Any
    ) -> Tensor:
        self.given = dict(masks)
        return self.whole(query, key, value, dict(masks))

    def whole(self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any]) -> Tensor:
        """The context of all sequences."""
        raise NotImplementedError

    def repeat(self, heads: Tensor, group: int) -> Tensor:
        return heads.repeat_interleave(group, 0)

    def offset(self, queries: int, keys: int) -> int:
        """Where the first query stands."""
        return keys - queries

    def ahead(self, queries: int, keys: int) -> Tensor:
        """How far each key is ahead of each query, `[query key]`."""
        import torch

        return torch.arange(keys) - torch.arange(queries)[:, None] - self.offset(queries, keys)

    def sees(self, ahead: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
        before, after = (math.inf if side == -1 else side for side in window)
        return (ahead <= (0 if causal else math.inf)) & (ahead >= -before) & (ahead <= after)

    def one(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = False,
        window: tuple[int, int] = (-1, -1),
        mask: Any = True,
        ahead: Tensor = None,
    ) -> Tensor:
        """The context of one sequence."""
        group = query.shape[0] // key.shape[0]
        key, value = self.repeat(key, group), self.repeat(value, group)
        ahead = self.ahead(query.shape[1], key.shape[1]) if ahead is None else ahead
        seen = self.sees(ahead, causal, window) & mask
        logits = (query @ key.mT) * query.shape[-1] ** -0.5
        weights = self.softmax(logits.masked_fill(~seen, -math.inf))
        return weights.nan_to_num(0.0) @ value

    def softmax(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)


class Varlen(Handed):
    """Takes packed sequences only, as `flash_attn_varlen_func` does."""

    layout = "batch length heads head"
    features = (
        Packed("q_at", "k_at", "longest_query", "longest_key", slack=3, only=True),
        Window("window", alignment="bottom-right"),
    )

    def offsets(self, masks: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Where the sequences of queries and of keys begin, and where the last one ends."""
        longest = masks.pop("longest_query"), masks.pop("longest_key")
        at = masks.pop("q_at").tolist(), masks.pop("k_at").tolist()
        assert longest == tuple(max(np.diff(side)) for side in at)
        return at

    def keys_of(self, at: list[int], number: int) -> slice:
        return slice(at[number], at[number + 1])

    def values_of(self, at: list[int], number: int) -> slice:
        return self.keys_of(at, number)

    def loaded(self, tokens: Tensor, at: list[int]) -> Tensor:
        """The tokens of keys or values, `[token heads head]`."""
        return tokens

    def whole(self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any]) -> Tensor:
        import torch

        q_at, k_at = self.offsets(masks)
        key, value = self.loaded(key, k_at), self.loaded(value, k_at)
        context = torch.full((*query.shape[:2], value.shape[-1]), math.nan, dtype=query.dtype)
        context = list(context.split([*np.diff(q_at), len(query) - q_at[-1]]))
        for number, (first, last) in enumerate(pairwise(q_at)):
            self.number, self.at = number, (q_at, k_at)
            parts = (
                query[first:last],
                key[self.keys_of(k_at, number)],
                value[self.values_of(k_at, number)],
            )
            one = self.one(*(part.transpose(0, 1) for part in parts), **masks)
            context[number] = self.stored(one.transpose(0, 1), number, len(q_at) - 1)
        return torch.cat(context)

    def stored(self, context: Tensor, number: int, count: int) -> Tensor:
        """The context of one sequence as it is written."""
        return context


class Paged(Handed):
    """Takes keys and values in pages, with lengths."""

    size: ClassVar[int] = 3
    features = (
        Pages(size=3, layout="page heads token head"),
        Window("window", alignment="bottom-right"),
        Lengths("lengths"),
    )

    def lengths(self, given: Tensor) -> Tensor:
        return given

    def table(self, table: Tensor, pages: Tensor) -> Tensor:
        """The numbers of pages, `[entry page]`."""
        return table

    def read(self, pages: Tensor, numbers: Tensor, length: int, kind: str) -> Tensor:
        """The tokens of an entry, `[heads length head]`."""
        return pages[numbers].transpose(0, 1).flatten(1, 2)[:, :length]

    def whole(self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any]) -> Tensor:
        import torch

        self.paged = "block_table" in masks
        if not self.paged:
            lengths = masks.pop("lengths", torch.full((len(query),), key.shape[2]))
            pairs = [(key[i, :, :n], value[i, :, :n]) for i, n in enumerate(lengths)]
        else:
            self.unused = key.isnan().all(-1)
            table = self.table(masks.pop("block_table"), key)
            lengths = self.lengths(masks.pop("cache_seqlens"))
            pairs = [
                tuple(
                    self.read(pages, table[entry], int(length), kind)
                    for kind, pages in (("key", key), ("value", value))
                )
                for entry, length in enumerate(lengths)
            ]
        return torch.stack(
            [self.one(one, *pair, **masks) for one, pair in zip(query, pairs, strict=True)]
        )


class Cached(Handed):
    """Takes the keys and values of earlier calls besides."""

    mask_arguments = (MASK,)
    features = (Cache(), Window("window", alignment="bottom-right"))

    def joined(self, past: Tensor, new: Tensor, kind: str) -> Tensor:
        """All keys or values, `[batch heads length head]`."""
        import torch

        return torch.cat((past, new), 2)

    def mask(self, mask: Tensor, new: int) -> Tensor:
        return mask

    def whole(self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any]) -> Tensor:
        import torch

        self.cached = "past_key" in masks
        mask = masks.pop("mask", torch.ones(len(query), 1, 1, 1, dtype=torch.bool))
        if self.cached:
            mask = self.mask(mask, key.shape[2])
            key = self.joined(masks.pop("past_key"), key, "key")
            value = self.joined(masks.pop("past_value"), value, "value")
        every = zip(query, key, value, mask, strict=True)
        return torch.stack([self.one(*one, mask=its, **masks) for *one, its in every])


class Buffered(Handed):
    """Takes a buffer with room for the new keys, and how much of it is used."""

    layout = "batch length heads head"
    causal_flag = CausalFlag("causal")
    features = (
        Cache("k_cache", "v_cache", lengths="used", counts="total", spare=2, only=True),
        RotaryBase("base", size="turning", flag="interleaved"),
        HeadNorm("q_gain", "k_gain"),
    )

    def used(self, used: Tensor, new: int) -> list[int]:
        """How many keys there are of each entry, the new ones included."""
        return used.tolist()

    def past(self, total: int, new: int) -> int:
        """How many of them are cached."""
        return total - new

    def starts(self, pasts: list[int]) -> list[int]:
        """The position of the first new token of each entry."""
        return pasts

    def first(self, past: int, side: str) -> int:
        """The same, of one entry, for its query or its key."""
        return past

    def history(self, buffer: Tensor, past: int, new: int) -> Tensor:
        """What is read of the buffer, `[length heads head]`."""
        return buffer[:past]

    def again(self, history: Tensor, masks: dict[str, Any]) -> Tensor:
        """The cached keys as they are used: they have been prepared already."""
        return history

    def normed(self, x: Tensor, masks: dict[str, Any], gain: str) -> Tensor:
        return x * (x * x).mean(-1, True).add(masks["epsilon"]).rsqrt() * masks[gain]

    def whole(self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any]) -> Tensor:
        import torch

        new, contexts = query.shape[1], []
        pasts = [self.past(total, new) for total in self.used(masks["used"], new)]
        for entry, (past, start) in enumerate(zip(pasts, self.starts(pasts), strict=True)):
            q, k = query[entry], key[entry]
            if "q_gain" in masks:
                q, k = self.normed(q, masks, "q_gain"), self.normed(k, masks, "k_gain")
            if "base" in masks:
                told = (masks["turning"], masks["base"], masks["interleaved"])
                q = self.turned(q, self.first(start, "query"), *told)
                k = self.turned(k, self.first(start, "key"), *told)
            old = self.again(self.history(masks["k_cache"][entry], past, new), masks)
            keys = torch.cat((old, k))
            values = torch.cat((self.history(masks["v_cache"][entry], past, new), value[entry]))
            parts = (part.transpose(0, 1) for part in (q, keys, values))
            contexts.append(self.one(*parts, causal=True).transpose(0, 1))
        return torch.stack(contexts)

    def turned(
        self, heads: Tensor, first: int, size: int, base: float, interleaved: bool
    ) -> Tensor:
        import torch

        at = (first + torch.arange(len(heads)))[:, None, None].to(heads.dtype)
        angles = at * (base ** (-torch.arange(0, size, 2) / size)).to(heads.dtype)
        cos, sin = angles.cos(), angles.sin()
        components = torch.arange(size).reshape((-1, 2) if interleaved else (2, -1))
        one, other = components.T if interleaved else components
        turned = heads.clone()
        turned[..., one] = heads[..., one] * cos - heads[..., other] * sin
        turned[..., other] = heads[..., other] * cos + heads[..., one] * sin
        return turned


class Ring(Handed):
    """Takes a buffer of which a window needs no more: places are used again."""

    features = (
        Cache("k_ring", "v_ring", lengths="past", ring=True, only=True),
        Window("window", alignment="bottom-right"),
    )

    def place(self, position: Tensor, places: int) -> Tensor:
        """Where the key at a position is stored."""
        return position % places

    def positions(self, past: int, new: int, places: int) -> Tensor:
        """The position of the key in each place once the new ones are stored; −1 if it is empty."""
        import torch

        last = past + new - 1
        at = torch.arange(places)
        found = last - (last - at) % places
        return torch.where(found < 0, -1, found)

    def ahead_of(self, positions: Tensor, past: int, new: int) -> Tensor:
        """How far the key in each place is ahead of each query."""
        import torch

        return positions - past - torch.arange(new)[:, None]

    def whole(self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any]) -> Tensor:
        import torch

        rings, pasts = (masks.pop("k_ring"), masks.pop("v_ring")), masks.pop("past").tolist()
        new, places, contexts = query.shape[2], rings[0].shape[2], []
        for entry, past in enumerate(pasts):
            at = self.place(past + torch.arange(new), places)
            stored = [
                ring[entry].index_copy(1, at, tokens[entry])
                for ring, tokens in zip(rings, (key, value), strict=True)
            ]
            positions = self.positions(past, new, places)
            there = positions >= 0
            k, v = (torch.where(there[:, None], x, 0.0) for x in stored)
            ahead = self.ahead_of(positions, past, new)
            contexts.append(self.one(query[entry], k, v, mask=there, ahead=ahead, **masks))
        return torch.stack(contexts)


class Rolling(Ring):
    """The same, if it is given a ring; it rotates new tokens, and has sinks."""

    features = (
        Cache("k_ring", "v_ring", lengths="past", ring=True),
        Window("window", alignment="bottom-right"),
        RotaryBase("base", alignment="bottom-right"),
        Sinks("sinks"),
    )

    def rotates_by(self, position: Tensor, places: int) -> Tensor:
        """The position by which a new key is rotated before it is stored."""
        return position

    def whole(self, query: Tensor, key: Tensor, value: Tensor, masks: dict[str, Any]) -> Tensor:
        import torch

        ring, new = masks.get("k_ring"), query.shape[2]
        more = key.shape[2] - new
        self.sinks, base = masks.pop("sinks", None), masks.pop("base", None)
        if base is not None:
            past = torch.tensor([more] * len(query)) if ring is None else masks["past"].long()
            at = past[:, None] + torch.arange(new)
            of_keys = (at - more)[:, :1] + torch.arange(key.shape[2]) if ring is None else at
            if ring is not None:
                of_keys = self.rotates_by(of_keys, ring.shape[2])
            query, key = self.turned(query, at, base), self.turned(key, of_keys, base)
        if ring is not None:
            return super().whole(query, key, value, masks)
        each = zip(query, key, value, strict=True)
        return torch.stack([self.one(*sequence, **masks) for sequence in each])

    def turned(self, heads: Tensor, at: Tensor, base: float) -> Tensor:
        """Heads `[batch heads length head]`, rotated by halves."""
        import torch

        size = heads.shape[-1]
        angles = at[:, None, :, None] * base ** (-torch.arange(0, size, 2) / size)
        cos, sin = (x.to(heads.dtype) for x in (angles.cos(), angles.sin()))
        one, other = heads.chunk(2, -1)
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)

    def softmax(self, logits: Tensor) -> Tensor:
        import torch

        if self.sinks is None:
            return super().softmax(logits)
        sinks = self.sinks[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]


SOUND: dict[type[Handed], tuple[str, ...]] = {
    Varlen: ("plain/no-mask/cross", "feature/segments/self", "feature/lengths/cross"),
    Paged: ("feature/key-lengths/cross", "feature/key-lengths-causal/gqa"),
    Cached: ("causal/beside-a-cache/gqa", "causal/bottom-right/cross"),
    Buffered: ("feature/cache-rotary/gqa", "feature/cache-norm/gqa", "causal/bottom-right/cross"),
    Ring: ("feature/window-causal/gqa",),
    Rolling: ("feature/gpt-oss/gqa", "feature/window-causal/gqa"),
}
"""The attentions without a defect, and cases in which each is handed tokens in its own way."""


@dataclass(frozen=True, eq=False)
class HandedMutant(FeatureMutant):
    """A mutant of one of these attentions, looked for in the chapter "feature".

    Attributes:
        of: which of them.
    """

    of: type[Handed] = Handed

    def adapter(self) -> Any:
        """As an implementation."""
        adapter = type("Mutant", (self.of,), dict(self.changes))()
        adapter.name = self.name
        return adapter


MUTANTS: list[HandedMutant] = []
EVERY = (OUTPUT, INPUTS, SPELLINGS, MODES)


def _chapter(chapter: str, of: type[Handed]) -> Callable[..., None]:
    def add(
        name: str, did: str, *killed_by: str, case: str = "", dtype: str = "float32", **changes: Any
    ) -> None:
        assert all(hasattr(of, stage) for stage in changes), name
        by, at = killed_by or EVERY, case or SOUND[of][0]
        MUTANTS.append(HandedMutant(name, chapter, did, by, changes, at, dtype, of=of))

    return add


def _only(stage: str, present: Callable[..., Any], instead: Callable[..., Any]) -> Any:
    """A step that does something else where something is present."""

    def changed(a: Any, *given: Any) -> Any:
        usual = getattr(super(type(a), a), stage)
        return instead(a, *given) if present(a, *given) else usual(*given)

    return changed


def _tiled(a: Handed, heads: Tensor, group: int) -> Tensor:
    return heads.repeat(group, 1, 1)


def _then_halved(context: Tensor, read: Tensor) -> Tensor:
    read.data.mul_(0.5)
    return context


def _first_head(a: Handed, heads: Tensor, group: int) -> Tensor:
    return heads[:1].expand(heads.shape[0] * group, -1, -1)


def _in_order_of_memory(array: Tensor) -> Tensor:
    """The numbers as they lie in memory, whatever the strides are."""
    sizes = list(array.shape)
    return array.as_strided(sizes, [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))])


# Packed sequences.

_add = _chapter("packed", Varlen)

_add(
    "packed-strides-ignored",
    "reads packed keys and values in order, as if they were not slices of one projection",
    LAYOUT,
    case="feature/key-lengths/cross",
    loaded=lambda a, tokens, at: _in_order_of_memory(tokens),
)


def _one_sequence(a: Varlen, masks: dict[str, Any]) -> tuple[list[int], list[int]]:
    return tuple([0, side[-1]] for side in Varlen.offsets(a, masks))


def _without_empty(a: Varlen, masks: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Sequences without queries are left out, of the keys none is."""
    q_at, k_at = Varlen.offsets(a, masks)
    kept = [first for first, last in pairwise(q_at) if first < last]
    return [*kept, q_at[-1]], k_at


def _slack_in_gradients(a: Varlen, tokens: Tensor, at: list[int]) -> Tensor:
    spoil = (0.0 * tokens.detach()[at[-1] :]).sum()
    tokens = tokens.clone()
    if tokens.requires_grad:
        tokens.register_hook(lambda gradient: gradient + spoil)
    return tokens


_add("packed-offsets-ignored", "sees one sequence in all", offsets=_one_sequence)
_add(
    "packed-offsets-of-keys-from-queries",
    "begins the keys of each sequence where its queries begin",
    keys_of=lambda a, at, n: slice(*(min(x, at[-1]) for x in a.at[0][n : n + 2])),
    values_of=lambda a, at, n: slice(*(min(x, at[-1]) for x in a.at[0][n : n + 2])),
)
_add(
    "packed-values-from-query-offsets",
    "reads as many values as keys, but from where the queries begin",
    values_of=lambda a, at, n: slice(a.at[0][n], a.at[0][n] + at[n + 1] - at[n]),
)
_add(
    "packed-keys-begin-one-late",
    "leaves out the first key of each sequence but the first",
    keys_of=lambda a, at, n: slice(min(at[n] + (n > 0), at[n + 1]), at[n + 1]),
)
_add(
    "packed-keys-begin-one-early",
    "reads the last key of the sequence before",
    keys_of=lambda a, at, n: slice(max(at[n] - 1, 0), at[n + 1]),
)
_add(
    "packed-keys-end-one-late",
    "reads the first key of the next sequence, or of the slack",
    keys_of=lambda a, at, n: slice(at[n], at[n + 1] + 1),
)
_add(
    "packed-keys-end-one-early",
    "leaves out the last key of the last sequence",
    keys_of=lambda a, at, n: slice(at[n], at[n + 1] - (n == len(at) - 2 and at[n + 1] > at[n])),
)
_add(
    "packed-last-sequence-dropped",
    "leaves out the last sequence: the offsets are counted, not the sequences",
    stored=lambda a, context, n, count: context * (n < count - 1),
)
_add(
    "packed-empty-sequences-left-out-of-queries",
    "leaves out sequences without queries, whose keys go to the next",
    case="feature/lengths/cross",
    offsets=_without_empty,
)
_add(
    "packed-keys-in-tiles",
    "reads keys in tiles of four up to the end of the tile",
    keys_of=lambda a, at, n: slice(at[n], at[n] + -(-(at[n + 1] - at[n]) // 4) * 4),
    values_of=lambda a, at, n: slice(at[n], at[n] + -(-(at[n + 1] - at[n]) // 4) * 4),
)
_add(
    "packed-keys-as-long-as-queries",
    "reads as many keys as there are queries in the longest sequence",
    keys_of=lambda a, at, n: slice(at[n], min(at[n + 1], at[n] + max(np.diff(a.at[0])))),
    values_of=lambda a, at, n: slice(at[n], min(at[n + 1], at[n] + max(np.diff(a.at[0])))),
)
_add(
    "packed-aligned-top-left",
    "aligns the causal mask and the window of each sequence at its first key",
    case="causal/bottom-right/cross",
    offset=lambda a, queries, keys: 0,
)
_add(
    "packed-aligned-over-all",
    "counts the causal mask over all sequences",
    case="feature/segments-causal/self",
    offset=lambda a, queries, keys: a.at[0][a.number],
)
_add(
    "packed-aligned-by-sequence-before",
    "takes the lengths of the sequence before where the causal mask is aligned",
    case="feature/lengths-causal/separate",
    offset=lambda a, queries, keys: (
        keys - queries
        if a.number == 0
        else int(np.diff(a.at[1])[a.number - 1] - np.diff(a.at[0])[a.number - 1])
    ),
)
_add(
    "packed-slack-in-gradients",
    "multiplies slack rows by zero in the backward pass, where they hold NaN",
    loaded=_slack_in_gradients,
)
_add(
    "packed-slack-read",
    "loads the slack with a weight of 0, which NaN ignores",
    loaded=lambda a, tokens, at: tokens + 0.0 * tokens[at[-1] :].sum(),
)
_add(
    "packed-last-sequence-detached",
    "leaves out the gradient of keys of the last sequence",
    INPUTS,
    loaded=lambda a, tokens, at: __import__("torch").cat(
        (tokens[: at[-2]], tokens[at[-2] :].detach())
    ),
)
_add(
    "packed-window-of-first-sequence",
    "applies the window to the first sequence only",
    case="feature/segments-with-window/separate",
    sees=lambda a, ahead, causal, window: Handed.sees(
        a, ahead, causal, window if a.number == 0 else (-1, -1)
    ),
)

# Pages.

_add = _chapter("paged", Paged)


def _in_order(a: Paged, table: Tensor, pages: Tensor) -> Tensor:
    import torch

    return torch.arange(table.numel()).reshape(table.shape) % len(pages)


def _from_first_page(a: Paged, table: Tensor, pages: Tensor) -> Tensor:
    import torch

    return (table[:, :1] + torch.arange(table.shape[1])) % len(pages)


def _with_stale_page(a: Paged, table: Tensor, pages: Tensor) -> Tensor:
    """The last page of each entry is still that of the entry before."""
    import torch

    return torch.cat((table[:, :-1], table[:, -1:].roll(1, 0)), 1)


def _several(a: Any, queries: int, keys: int) -> bool:
    return getattr(a, "paged", True) and queries > 1


_add("pages-in-order", "takes the pages as they lie", table=_in_order)
_add("pages-from-the-first", "takes the pages after the first of the table as they lie",
     table=_from_first_page)  # fmt: skip
_add(
    "pages-of-first-entry",
    "reads the table of the first entry for all",
    table=lambda a, table, pages: table[:1].expand_as(table),
)
_add(
    "pages-of-next-entry",
    "reads the table of the entry before",
    table=lambda a, table, pages: table.roll(1, 0),
)
_add("pages-stale", "reads for the last page what another entry had there", table=_with_stale_page)
_add(
    "pages-table-reversed",
    "reads the table from the end",
    table=lambda a, table, pages: table.flip(1),
)
_add(
    "pages-first-page-only",
    "reads the first page again and again",
    table=lambda a, table, pages: table[:, :1].expand_as(table),
)
_add(
    "pages-of-values-in-order",
    "takes the pages of values as they lie, and those of keys by the table",
    read=lambda a, pages, numbers, length, kind: Paged.read(
        a, pages, numbers.sort().values if kind == "value" else numbers, length, kind
    ),
)
_add(
    "pages-last-one-whole",
    "attends to the whole last page",
    lengths=lambda a, lengths: -(-lengths // a.size) * a.size,
)
_add(
    "pages-last-one-dropped",
    "leaves out a last page that is not full",
    lengths=lambda a, lengths: (lengths // a.size * a.size).clamp(min=1),
)
_add("pages-one-key-less", "takes the length for the index of the last key",
     lengths=lambda a, lengths: (lengths - 1).clamp(min=1))  # fmt: skip
_add("pages-one-key-more", "takes the index of the last key for the length",
     lengths=lambda a, lengths: lengths + 1)  # fmt: skip
_add("pages-lengths-of-entry-before", "takes the lengths of the entry before",
     lengths=lambda a, lengths: lengths.roll(1))  # fmt: skip
_add("pages-length-of-first-entry", "takes the length of the first entry for all",
     lengths=lambda a, lengths: lengths[:1].expand_as(lengths))  # fmt: skip
_add("pages-longest-for-all", "takes the greatest length for all entries",
     lengths=lambda a, lengths: lengths.max().expand_as(lengths))  # fmt: skip
_add(
    "pages-heads-tiled",
    "deals key/value heads out in turn where they are in pages",
    case="feature/key-lengths-causal/gqa",
    repeat=_only("repeat", lambda a, *_: a.paged, _tiled),
)
_add(
    "pages-first-head-for-all",
    "reads the first key/value head of a page for all",
    case="feature/key-lengths-causal/gqa",
    repeat=_only("repeat", lambda a, *_: a.paged, _first_head),
)
_add(
    "pages-chunk-aligned-top-left",
    "aligns several new queries top-left, which hides the pages before them",
    case="feature/key-lengths-causal/gqa",
    offset=_only("offset", _several, lambda a, queries, keys: 0),
)
_add(
    "pages-chunk-not-causal",
    "lets several new queries see all keys",
    case="feature/key-lengths-causal/gqa",
    sees=lambda a, ahead, causal, window: Handed.sees(
        a, ahead, causal and (not a.paged or len(ahead) == 1), window
    ),
)
_add(
    "pages-chunk-sees-last-row",
    "gives every query of a chunk the mask of the last",
    case="feature/key-lengths-causal/gqa",
    sees=lambda a, ahead, causal, window: Handed.sees(
        a, ahead[-1:].expand_as(ahead) if a.paged else ahead, causal, window
    ),
)
_add(
    "pages-window-in-pages",
    "begins the window with a whole page",
    case="feature/key-lengths-with-window/gqa",
    sees=lambda a, ahead, causal, window: Handed.sees(
        a,
        ahead,
        causal,
        (-(-window[0] // a.size) * a.size, window[1]) if a.paged and window[0] > 0 else window,
    ),
)
_add(
    "pages-window-dropped",
    "has no window where keys are in pages",
    case="feature/key-lengths-with-window/gqa",
    sees=lambda a, ahead, causal, window: Handed.sees(
        a, ahead, causal, (-1, -1) if a.paged else window
    ),
)
_add(
    "pages-unused-slots-read",
    "multiplies unused slots of the last page by a weight of 0, which NaN ignores",
    read=lambda a, pages, numbers, length, kind: (
        Paged.read(a, pages, numbers, length, kind)
        + 0.0 * Paged.read(a, pages, numbers, -(-length // a.size) * a.size, kind).sum()
    ),
)
_add(
    "pages-detached",
    "returns no gradient of values in pages after the first",
    INPUTS,
    SPELLINGS,
    read=lambda a, pages, numbers, length, kind: (
        Paged.read(a, pages, numbers, length, kind)
        if kind == "key"
        else __import__("torch").cat(
            (
                Paged.read(a, pages, numbers, length, kind)[:, : a.size],
                Paged.read(a, pages, numbers, length, kind)[:, a.size :].detach(),
            ),
            1,
        )
    ),
)
_add(
    "pages-in-float16",
    "keeps the pages in float16",
    read=lambda a, pages, numbers, length, kind: Paged.read(
        a, pages.half().to(pages.dtype), numbers, length, kind
    ),
)

_add(
    "pages-values-halved-in-place",
    "leaves half of each value in its page",
    UNCHANGED,
    case="plain/no-mask/cross",
    whole=lambda a, q, k, v, m: _then_halved(Paged.whole(a, q, k, v, m), v),
)

# A cache beside the new keys.

_add = _chapter("cached", Cached)
BOTTOM = "causal/bottom-right/cross"

_add(
    "cached-forgotten",
    "attends to the new keys only",
    joined=lambda a, past, new, kind: new,
    mask=lambda a, mask, new: mask[..., -new:],
)
_add(
    "cached-behind",
    "appends the cache to the new keys",
    joined=lambda a, past, new, kind: Cached.joined(a, new, past, kind),
)
_add(
    "cached-detached",
    "loses the gradient of what is cached",
    joined=lambda a, past, new, kind: Cached.joined(a, past.detach(), new, kind),
)
_add(
    "cached-values-behind",
    "appends the cached values to the new ones, and the new keys to the cached ones",
    joined=lambda a, past, new, kind: Cached.joined(
        a, *((past, new) if kind == "key" else (new, past)), kind
    ),
)
_add(
    "cached-of-first-entry",
    "reads the cache of the first entry for all",
    joined=lambda a, past, new, kind: Cached.joined(a, past[:1].expand_as(past), new, kind),
)
_add(
    "cached-last-key-overwritten",
    "writes the first new key over the last cached one",
    joined=lambda a, past, new, kind: Cached.joined(
        a, __import__("torch").cat((past[:, :, :-1], new[:, :, :1]), 2), new, kind
    ),
)
_add(
    "cached-chunk-aligned-top-left",
    "aligns several new queries top-left, which hides the cache",
    case=BOTTOM,
    offset=lambda a, queries, keys: 0 if a.cached and queries > 1 else keys - queries,
)
_add(
    "cached-chunk-one-ahead",
    "lets each new query see one key after its own",
    case=BOTTOM,
    offset=lambda a, queries, keys: keys - queries + a.cached,
)
_add(
    "cached-mask-of-new-keys",
    "applies the mask of the first keys to the new ones",
    mask=lambda a, mask, new: mask.roll(new, -1) if mask.shape[-1] > 1 else mask,
)
_add(
    "cached-heads-tiled",
    "deals key/value heads out in turn beside a cache",
    repeat=_only("repeat", lambda a, *_: a.cached, _tiled),
)
_add(
    "cached-window-from-the-cache",
    "counts the window from the first cached key",
    case="feature/window-causal/gqa",
    sees=lambda a, ahead, causal, window: (
        Handed.sees(a, ahead, causal, (-1, window[1]))
        & Handed.sees(a, ahead + ahead.shape[1] - ahead.shape[0], False, (window[0], -1))
        if a.cached
        else Handed.sees(a, ahead, causal, window)
    ),
)

WORKSPACE: dict[Any, Tensor] = {}


def _in_workspace(context: Tensor) -> Tensor:
    """The context, without gradients in memory that the next call overwrites."""
    if context.requires_grad:
        return context
    return WORKSPACE.setdefault((context.shape, context.dtype), context.clone()).copy_(context)


_add(
    "cached-context-in-a-workspace-of-inference",
    "without gradients, returns the context in memory that the next call overwrites",
    KEPT,
    case="plain/no-mask/cross",
    whole=lambda a, q, k, v, m: _in_workspace(Cached.whole(a, q, k, v, m)),
)
_add(
    "cached-values-halved-in-place",
    "leaves half of each projected value where the value was",
    UNCHANGED,
    case="plain/no-mask/gqa",
    whole=lambda a, q, k, v, m: _then_halved(Cached.whole(a, q, k, v, m), v),
)

# A buffer with room for new keys.

_add = _chapter("buffered", Buffered)

_add(
    "buffer-strides-ignored",
    "reads the buffer of keys in order, whatever its strides are",
    LAYOUT,
    case="causal/bottom-right/cross",
    whole=lambda a, q, k, v, m: Buffered.whole(
        a, q, k, v, m | {"k_cache": _in_order_of_memory(m["k_cache"])}
    ),
)

_add(
    "buffer-forgotten",
    "takes the first new query for the first of all, so that the prompt is forgotten",
    used=lambda a, used, new: [new] * len(used),
)
_add(
    "buffer-one-too-many",
    "reads one place of the buffer that is not used yet",
    used=lambda a, used, new: (used + 1).tolist(),
)
_add(
    "buffer-one-too-few",
    "leaves out the last cached key",
    used=lambda a, used, new: (used - 1).clamp(min=new).tolist(),
)
_add(
    "buffer-lengths-of-entry-before",
    "takes the length of the entry before",
    used=lambda a, used, new: used.roll(1).tolist(),
    case="feature/key-lengths-causal/gqa",
)
_add(
    "buffer-length-of-first-entry",
    "fills all entries as far as the first",
    used=lambda a, used, new: [int(used[0])] * len(used),
    case="feature/key-lengths-causal/gqa",
)
_add(
    "buffer-total-for-cached",
    "takes the number of all keys for that of the cached ones",
    past=lambda a, total, new: total,
)
_add(
    "buffer-whole",
    "reads the whole buffer with weights of 0, which NaN ignores",
    history=lambda a, buffer, past, new: buffer[:past] + 0.0 * buffer[past:].sum(),
)
_add(
    "buffer-appended-one-early",
    "writes the new keys from the last cached one on, and leaves a zero behind them",
    history=lambda a, buffer, past, new: __import__("torch").cat(
        (buffer[: max(past - 1, 0)], 0 * buffer[:1])
    )[:past],
)
_add(
    "buffer-read-one-late",
    "reads the buffer from the second place on",
    history=lambda a, buffer, past, new: buffer[1 : past + 1],
)
_add(
    "buffer-new-from-zero",
    "rotates new keys and queries as if they were the first",
    first=lambda a, past, side: 0,
)
_add(
    "buffer-queries-from-zero",
    "rotates new queries as if they were the first",
    first=lambda a, past, side: 0 if side == "query" else past,
)
_add(
    "buffer-new-one-late",
    "rotates new keys one position too far",
    first=lambda a, past, side: past + (side == "key"),
)
_add(
    "buffer-new-at-first-entry",
    "rotates the new tokens of all entries as if they followed the cache of the first",
    starts=lambda a, pasts: pasts[:1] * len(pasts),
    case="feature/key-lengths-with-rotary/gqa",
)
_add(
    "buffer-new-behind-longest",
    "rotates the new tokens of all entries as if they followed the longest cache",
    starts=lambda a, pasts: [max(pasts)] * len(pasts),
    case="feature/key-lengths-with-rotary/gqa",
)
_add(
    "buffer-keys-halved-in-place",
    "leaves half of each cached key in the buffer",
    UNCHANGED,
    case="causal/bottom-right/decoding",
    whole=lambda a, q, k, v, m: _then_halved(Buffered.whole(a, q, k, v, m), m["k_cache"]),
)
_add(
    "buffer-rotated-again",
    "rotates cached keys again",
    again=lambda a, history, masks: (
        a.turned(history, 0, masks["turning"], masks["base"], masks["interleaved"])
        if "base" in masks
        else history
    ),
)
_add(
    "buffer-normed-again",
    "normalises cached keys again",
    case="feature/cache-norm/gqa",
    again=lambda a, history, masks: (
        a.normed(history, masks, "k_gain") if "k_gain" in masks else history
    ),
)
_add(
    "buffer-chunk-aligned-top-left",
    "aligns several new queries top-left, and one query at the end",
    offset=lambda a, queries, keys: 0 if queries > 1 else keys - queries,
)
_add(
    "buffer-chunk-of-two-only",
    "aligns the causal mask right for one or two new queries, and for more of them after two",
    offset=lambda a, queries, keys: keys - min(queries, 2),
)

# A ring.

_add = _chapter("ring", Ring)

_add(
    "ring-not-wrapped",
    "writes what does not fit into the last place",
    place=lambda a, position, places: position.clamp(max=places - 1),
)
_add(
    "ring-wrapped-one-late",
    "wraps to the second place",
    place=lambda a, position, places: (
        __import__("torch").where(position < places, position, position % places + 1) % places
    ),
)
_add(
    "ring-places-for-positions",
    "counts the causal mask and the window by place, not by position",
    ahead_of=lambda a, positions, past, new: Ring.ahead_of(
        a, __import__("torch").arange(len(positions)), past, new
    ),
)
_add(
    "ring-wrapped-is-all-seen",
    "lets the queries see every place once the ring is full",
    sees=lambda a, ahead, causal, window: (
        Handed.sees(a, ahead, causal, window) | (ahead.shape[1] <= int(ahead.max() - ahead.min()))
    ),
)
_add(
    "ring-not-causal-in-chunk",
    "takes a ring for past keys only, so that queries see what is new after them",
    sees=lambda a, ahead, causal, window: Handed.sees(a, ahead, False, window),
)
_add(
    "ring-without-window",
    "takes the size of the ring for the window",
    sees=lambda a, ahead, causal, window: Handed.sees(a, ahead, causal, (-1, window[1])),
)
_add(
    "ring-positions-of-the-first-query",
    "counts the positions of all queries of a chunk from the first",
    ahead_of=lambda a, positions, past, new: Ring.ahead_of(a, positions, past, new)[:1].repeat(
        new, 1
    ),
)
_add = _chapter("ring", Rolling)
_add(
    "ring-keys-rotated-by-place",
    "rotates a new key by the place where it is stored",
    STEPS,
    rotates_by=lambda a, position, places: position % places,
)
