"""Ring attention in PyTorch: every rank keeps its queries, and keys and values travel in a ring.

You may copy this module. Easy to miss in a port, in the order of the code: the maximum and the sum
of weights must be merged along with the values; a sink belongs to the softmax of a query once, not
once per hop; the maximum and the sum are both kept for the backward pass, because the log-sum-exp
of a row that is filled with −1e9 loses the sum to rounding; whether a key is visible under
causality or a window depends on positions in the whole sequence, which are not consecutive in
zig-zag order; gradients of keys and values travel on with them until they are back on their own
rank; the gradient of a tensor that all ranks share is summed over the ranks, once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


class Ring:
    """The steps of ring attention on one rank, for one call; a subclass may replace them.

    In each hop, the rank attends to the keys of one rank. Query, key, value and their gradients are
    `[batch heads length head]`. All positions are those in the whole sequence.
    """

    def __init__(self, shard: Any, causal: bool, window: Any, scale: float) -> None:
        self.rank, self.size = shard.rank, shard.size
        self.queries = torch.from_numpy(shard.queries[shard.rank])
        self.keys = [torch.from_numpy(keys) for keys in shard.keys]
        self.causal, self.window, self.scale = causal, window, scale

    def hops(self) -> int:
        return self.size

    def source(self, hop: int) -> int:
        """Return the rank whose keys are on this rank during a hop."""
        return (self.rank - hop) % self.size

    def query_positions(self) -> Tensor:
        return self.queries

    def key_positions(self, source: int) -> Tensor:
        return self.keys[source]

    def sees(self, source: int) -> Tensor:
        """Return `[query key]`: True where this rank's queries may see keys of the rank `source`.

        Only causality and the window are considered, not the mask.
        """
        ahead = self.key_positions(source) - self.query_positions()[:, None]
        before, after = (math.inf if side == -1 else side for side in self.window)
        return (ahead <= (0 if self.causal else after)) & (ahead >= -before) & (ahead <= after)

    def mask_columns(self, source: int) -> Tensor:
        return self.keys[source]

    def logits(self, query: Tensor, key: Tensor, mask: Tensor | None, source: int) -> Tensor:
        logits = query @ key.mT * self.scale
        if mask is not None:
            part = mask[..., self.mask_columns(source)]
            logits = (
                logits.masked_fill(~part, -math.inf) if part.dtype == torch.bool else logits + part
            )
        return logits.masked_fill(~self.sees(source), -math.inf)

    def first(self, query: Tensor, sinks: Tensor | None, width: int) -> list[Tensor]:
        """Return the initial maximum, sum of weights and weighted sum of values, before any key.

        The first two include the sink, if there is one. `width` is the head size of the values.
        """
        rows = query.shape[:-1]
        if sinks is None:
            start = [query.new_full(rows, -math.inf), query.new_zeros(rows)]
        else:
            start = [sinks[:, None].expand(rows).clone(), query.new_ones(rows)]
        return [*start, query.new_zeros(*rows, width)]

    def merge(self, state: list[Tensor], logits: Tensor, value: Tensor) -> list[Tensor]:
        """Return `state` updated by the logits and values of another block of keys.

        Before the first block, the state is the result of `first`.
        """
        before, total, values = state
        highest = torch.maximum(before, logits.amax(-1)) if logits.shape[-1] else before
        finite = highest.masked_fill(highest == -math.inf, 0.0)
        powers = (logits - finite[..., None]).exp()
        factor = self.factor(before, finite)
        return [
            highest,
            self.total(total, factor, powers),
            values * factor[..., None] + powers @ value,
        ]

    def factor(self, before: Tensor, now: Tensor) -> Tensor:
        """Return the factor for earlier sums when the maximum rises from `before` to `now`."""
        return (before - now).exp()

    def total(self, total: Tensor, factor: Tensor, powers: Tensor) -> Tensor:
        return total * factor + powers.sum(-1)

    def result(self, state: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the context of each query, the maximum of its logits, and its sum of weights.

        They are 0, 0 and 1 for a query that has neither a visible key nor a sink.
        """
        highest, total, values = state
        seen = total > 0
        total = total.masked_fill(~seen, 1.0)
        return values / total[..., None], highest.masked_fill(~seen, 0.0), total

    def pass_on(self, tensors: list[Tensor], hop: int) -> list[Tensor]:
        """Send tensors to the next rank, and return those that the previous rank has sent.

        The received tensors belong to the source of the next hop. A single rank keeps its tensors.
        """
        if self.size == 1:
            return tensors
        source = self.source(hop + 1)
        came = [t.new_empty(*t.shape[:2], len(self.keys[source]), t.shape[3]) for t in tensors]
        self.exchange(tensors, came)
        return came

    def exchange(self, tensors: list[Tensor], came: list[Tensor]) -> None:
        """Send tensors to the next rank, and fill `came` with those of the previous rank."""
        sent = torch.cat([tensor.flatten() for tensor in tensors])
        received = sent.new_empty(sum(tensor.numel() for tensor in came))
        # A send may block until the other rank receives, so start both before waiting for either.
        work = dist.isend(sent, (self.rank + 1) % self.size)
        dist.irecv(received, (self.rank - 1) % self.size).wait()
        work.wait()
        sizes = [tensor.numel() for tensor in came]
        for tensor, part in zip(came, received.split(sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, sinks: Any) -> Any:
        state = self.first(query, sinks, value.shape[-1])
        for hop in range(self.hops()):
            source = self.source(hop)
            logits = self.logits(query, self.group(query, key), mask, source)
            state = self.merge(state, logits, self.group(query, value))
            if hop < self.hops() - 1:
                key, value = self.pass_on([key, value], hop)
        return self.result(state)

    def group(self, query: Tensor, shared: Tensor) -> Tensor:
        """Return key or value heads, repeated for the query heads that share them."""
        return shared.repeat_interleave(query.shape[1] // shared.shape[1], 1)

    def ungroup(self, shared: Tensor, gradient: Tensor) -> Tensor:
        return gradient.unflatten(1, (shared.shape[1], -1)).sum(2)

    def delta(self, cotangent: Tensor, context: Tensor) -> Tensor:
        return (cotangent * context).sum(-1)

    def backward(
        self,
        cotangent: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        sinks: Any,
        context: Tensor,
        highest: Tensor,
        total: Tensor,
    ) -> tuple[Any, ...]:
        delta = self.delta(cotangent, context)
        by_query, by_key, by_value = (torch.zeros_like(t) for t in (query, key, value))
        added = mask is not None and mask.dtype != torch.bool
        by_mask = torch.zeros_like(mask) if added else None
        for hop in range(self.hops()):
            source = self.source(hop)
            grouped_key, grouped_value = self.group(query, key), self.group(query, value)
            logits = self.logits(query, grouped_key, mask, source)
            weights = (logits - highest[..., None]).exp() / total[..., None]
            by_logits = weights * (cotangent @ grouped_value.mT - delta[..., None])
            by_query += self.of_query(by_logits @ grouped_key * self.scale, hop)
            by_key += self.ungroup(key, by_logits.mT @ query * self.scale)
            by_value += self.ungroup(value, weights.mT @ cotangent)
            if by_mask is not None:
                by_mask[..., self.mask_columns(source)] = self.of_mask(by_logits, hop)
            key, value, by_key, by_value = self.travel(key, value, by_key, by_value, hop)
        by_sinks = None
        if sinks is not None:
            of_sinks = (sinks[:, None] - highest).exp() / total
            by_sinks = -(of_sinks * delta).sum((0, 2))
            by_sinks = self.share(by_sinks)
        return by_query, by_key, by_value, by_mask, by_sinks

    def of_query(self, gradient: Tensor, hop: int) -> Tensor:
        """Return what a hop adds to the gradient of the queries: by default, `gradient` itself."""
        return gradient

    def of_mask(self, gradient: Tensor, hop: int) -> Tensor:
        """Return the mask's gradient for the keys of a hop: by default, `gradient` itself."""
        return gradient

    def travel(
        self, key: Tensor, value: Tensor, by_key: Tensor, by_value: Tensor, hop: int
    ) -> list[Tensor]:
        """Send keys, values and their gradients to the next rank, and return those received.

        After the last hop, they are back on their own rank.
        """
        return self.pass_on([key, value, by_key, by_value], hop)

    def share(self, gradient: Tensor) -> Tensor:
        """Return the sum of a gradient over all ranks, on every rank."""
        if self.size > 1:
            dist.all_reduce(gradient)
        return gradient


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, ring: Ring, query: Any, *others: Any) -> Any:
        wide = torch.promote_types(query.dtype, torch.float32)
        tensors = [query, *others]
        widened = [t if t is None or t.dtype == torch.bool else t.to(wide) for t in tensors]
        output, highest, total = ring.forward(*widened)
        context.ring, context.dtype = ring, query.dtype
        context.save_for_backward(*widened, output, highest, total)
        return output.to(query.dtype)

    @staticmethod
    def backward(context: Any, cotangent: Any) -> Any:
        saved = context.saved_tensors
        gradients = context.ring.backward(cotangent.to(saved[0].dtype), *saved)
        return None, *(g if g is None else g.to(context.dtype) for g in gradients)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shard: Any,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    ring: type[Ring] = Ring,
) -> Tensor:
    """Attend from this rank's queries to the keys of all ranks in the default process group.

    Args:
        query, key, value: this rank's parts, `[batch heads length head]`; key and value may have
            fewer heads. Lengths may differ between ranks, and may be 0.
        shard: the attributes `rank`, `size` (the number of ranks), and `queries` and `keys`: for
            each rank, their positions in the whole sequence.
        mask: the rows of this rank's queries, `[batch heads query all-keys]`: boolean, True where
            a query may attend, or numbers that are added.
        sinks: `[heads]`, logits whose exponentials are only added to the sums of weights; equal on
            all ranks.
        causal: whether keys after a query's position are hidden.
        window: how many keys before and after a query's position are visible; -1 for no limit.
        scale: the factor of logits; by default 1/√head size.
        ring: the class whose methods compute the attention and its gradients.

    Returns:
        The context of this rank's queries, `[batch heads length head]`, which is zero for queries
        that are fully masked.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(ring(shard, causal, window, scale), query, key, value, mask, sinks)
