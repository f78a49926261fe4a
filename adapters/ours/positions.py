"""Positions of tokens, and what depends on them: visible keys, ALiBi, and rotary embeddings.

Query i has position p_i, and key j has position r_j. Positions count from 0, with these changes:

    packed sequences  (segments)      each begins again at position 0
    "bottom-right"    (causal)        the last query of a sequence has the position of its last key
    a cache of P keys                 new queries and keys begin at P
    drafted tokens    (parents)       each has the position after its parent's, or after the cache

Query i may attend to key j iff all of these hold:

    causal        r_j <= p_i, or query and key are in the same span
    window        p_i - before <= r_j <= p_i + after
    segments      query and key are in the same segment
    lengths       i < query length and j < key length of the entry
    tree          key j is cached, or drafted, and query i descends from it or is the same token

Easy to miss in a port: the query's own key is not one of the window's keys before it; causality
compares positions, because comparing indices would hide the cache; padding does not count, so with
"bottom-right" the last query has the position of the last key that is not padding; angles must not
be computed in half precision, because in bfloat16, for example, many positions beyond 256 are not
exact. A query is in the span of the key at its position, which beside a cache is not the key with
its index; a window holds inside a span too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    Lengths: TypeAlias = Int[Tensor, "batch"]
    OfQueries: TypeAlias = Int[Tensor, "#batch query"]
    OfKeys: TypeAlias = Int[Tensor, "#batch key"]
    Heads: TypeAlias = Float[Tensor, "batch heads length head"]

Causal = Literal["top-left", "bottom-right"]


@dataclass(frozen=True)
class Rotary:
    """Rotation of the first `size` components of each head by angles position / base^(2t/size).

    Pair t (0, 1, ...) consists of components t and t + size/2, or 2t and 2t + 1 if `interleaved`.
    Su et al. 2021, arXiv:2104.09864.
    """

    size: int
    base: float = 10000.0
    interleaved: bool = False

    def __call__(self, heads: Heads, positions: OfQueries | OfKeys) -> Heads:
        """Return rotated heads in their own dtype, computed in float32 or better."""
        dtype = torch.promote_types(heads.dtype, torch.float32)
        pair = torch.arange(0, self.size, 2, device=heads.device, dtype=torch.float64)
        angles = positions[:, None, :, None] * self.base ** (-pair / self.size)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)  # [#batch 1 length pair]
        turning, rest = heads[..., : self.size].to(dtype), heads[..., self.size :]
        # The axis "member" indexes the two components of a pair.
        sizes, member = ((-1, 2), -1) if self.interleaved else ((2, -1), -2)
        one, other = turning.unflatten(-1, sizes).unbind(member)
        turned = torch.stack((one * cos - other * sin, other * cos + one * sin), member)
        return torch.cat((turned.flatten(-2).to(heads.dtype), rest), -1)


@dataclass(frozen=True)
class Tokens:
    """The numbers of queries and keys and, if given, their lengths, segments, spans and tree.

    Lengths are `[batch]`, and segments `[batch query]` and `[batch key]`. Spans are `[batch key]`,
    0 for keys in none. Parents are `[batch query]`: the index of the query from which each one
    descends, or -1; the queries are then the last keys of each entry. `past` is the number of
    keys in the cache; these are the first ones, and `keys` includes them.
    """

    queries: int
    keys: int
    past: int = 0
    query_lengths: Lengths | None = None
    key_lengths: Lengths | None = None
    query_segments: OfQueries | None = None
    key_segments: OfKeys | None = None
    key_spans: OfKeys | None = None
    query_parents: OfQueries | None = None

    def positions(self, causal: Causal | None, device: torch.device) -> tuple[OfQueries, OfKeys]:
        """Return the positions of queries and keys, with a batch axis of full size or 1.

        With "bottom-right", the last query of a sequence has the position of its last key.
        """
        p = self.past + torch.arange(self.queries, device=device)[None]
        r = torch.arange(self.keys, device=device)[None]
        if self.query_segments is not None and self.key_segments is not None:
            p, r = _ranks(self.query_segments), _ranks(self.key_segments)
        if self.query_parents is not None:
            depth = self.ancestors(self.query_parents).sum(-1) - 1
            index = self.drafted(device)
            of_keys = depth.gather(1, index.clamp(0, self.queries - 1)) - index
            return (r - index)[:, :1] + depth, r + of_keys.where(index >= 0, 0)
        if causal != "bottom-right":
            return p, r
        used_queries, used_keys = self.used(device)
        if self.query_segments is None or self.key_segments is None:
            return p + used_keys.sum(-1, True) - used_queries.sum(-1, True) - self.past, r
        mine = self.query_segments[:, :, None]
        keys = (mine == self.key_segments[:, None]) & used_keys[:, None]
        queries = (mine == self.query_segments[:, None]) & used_queries[:, None]
        return p + keys.sum(-1) - queries.sum(-1), r

    def used(self, device: torch.device) -> tuple[Bool[Tensor, ...], Bool[Tensor, ...]]:
        """Return an array for queries and one for keys, True where a token is not padding.

        Both are `[batch length]`; the batch axis has size 1 where there are no lengths.
        """
        found = []
        for number, lengths in ((self.queries, self.query_lengths), (self.keys, self.key_lengths)):
            index = torch.arange(number, device=device)[None]
            found.append(index < (number if lengths is None else lengths[:, None]))
        return found[0], found[1]

    def visible(
        self,
        p: OfQueries,
        r: OfKeys,
        causal: Causal | None,
        window: tuple[int | None, int | None],
    ) -> Bool[Tensor, "#batch 1 query key"]:
        """Return a mask by the rules at the top of this file: True where a query may see a key.

        `p` and `r` are the positions of queries and keys; `window` is (before, after), where None
        means no limit.
        """
        queries, keys = self.used(p.device)
        visible = queries[:, :, None] & keys[:, None]
        ahead = r[:, None] - p[:, :, None]  # [#batch query key]
        before, after = window
        if causal is not None:
            visible = visible & ((ahead <= 0) | self.in_one_span(ahead))
        if before is not None:
            visible = visible & (ahead >= -before)
        if after is not None:
            visible = visible & (ahead <= after)
        if self.query_segments is not None and self.key_segments is not None:
            visible = visible & (self.query_segments[:, :, None] == self.key_segments[:, None])
        if self.query_parents is not None:
            index = self.drafted(p.device)[:, None].expand(-1, self.queries, -1)
            line = self.ancestors(self.query_parents)
            visible = visible & (line.gather(2, index.clamp(0, self.queries - 1)) | (index < 0))
        return visible[:, None]

    def drafted(self, device: torch.device) -> Int[Tensor, "batch key"]:
        """Return the index of the query that each key is; negative for cached keys."""
        assert self.query_parents is not None
        used_queries, used_keys = self.used(device)
        cached = used_keys.sum(-1, True) - used_queries.sum(-1, True)
        index = torch.arange(self.keys, device=device) - cached
        return index.expand(len(self.query_parents), -1)

    @staticmethod
    def ancestors(parents: OfQueries) -> Bool[Tensor, "batch query query"]:
        """Return an array, True where the second query is the first or one of its ancestors."""
        count = parents.shape[1]
        own = torch.eye(count, dtype=torch.bool, device=parents.device)
        line = own.repeat(len(parents), 1, 1)
        for query in range(1, count):  # parents are before their children
            above = parents[:, query].clamp(min=0)[:, None, None].expand(-1, 1, count)
            child = line.gather(1, above)[:, 0] & (parents[:, query, None] >= 0)
            line[:, query] |= child
        return line

    def in_one_span(self, ahead: Int[Tensor, "#batch query key"]) -> Bool[Tensor, ...]:
        """Return an array that broadcasts to `ahead`, True where query and key are in one span.

        `ahead` is the position of each key minus that of each query.
        """
        if self.key_spans is None:
            return torch.zeros((), dtype=torch.bool, device=ahead.device)
        own = ahead == 0
        if self.query_segments is not None and self.key_segments is not None:
            own = own & (self.query_segments[:, :, None] == self.key_segments[:, None])
        # The first key at the query's position; if there is none, the query is in no span.
        spans = self.key_spans[:, None].expand(-1, ahead.shape[1], -1)
        first = own & (own.cumsum(-1) == 1)
        of_queries = torch.where(first, spans, 0).sum(-1, keepdim=True)
        return (of_queries == spans) & (spans > 0)


class Cache:
    """The keys and values of earlier calls, after norms and rotation; None if there were none."""

    key: Heads | None = None
    value: Heads | None = None

    def __len__(self) -> int:
        return 0 if self.key is None else self.key.shape[2]

    def extended(self, key: Heads, value: Heads) -> tuple[Heads, Heads]:
        """Append new keys and values, `[batch kv_heads key head]`, and return all that are kept."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        self.key, self.value = key, value
        return key, value


def _ranks(segments: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
    """Return, for each token, the number of earlier tokens in the same segment."""
    return (segments[:, :, None] == segments[:, None]).tril(-1).sum(-1)
