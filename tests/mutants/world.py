"""Mutants of an attention on several ranks, which are threads here: they share one process.

Each replaces a step of the ring attention that users may copy. They are what only two, three or
eight ranks show: what is merged, whose keys are here, where tokens stand, who adds gradients up.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from conformance import Mode, Split, World
from conformance.adapters.ours_ring import OursRing
from mutants.features import FeatureMutant
from mutants.mutant import BIAS, FEATURES, INPUTS, MODES, OUTPUT, PARAMETERS

Tensor = Any
PATIENCE = 5.0
"""Seconds that a rank waits for another."""
HERE = threading.local()


class Links:
    """What the ranks of a world say to each other."""

    def __init__(self, size: int) -> None:
        self.sent: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(size)]
        self.parts: list[Tensor] = [None] * size
        self.all = threading.Barrier(size)

    def share(self, rank: int, part: Tensor) -> Tensor:
        self.parts[rank] = part
        self.all.wait(PATIENCE)
        total = sum(self.parts)
        self.all.wait(PATIENCE)
        return total


@cache
def threaded() -> Any:
    """The ring, as it talks among threads."""
    from conformance.adapters.ours.ring import Ring

    class Threaded(Ring):
        def exchange(self, tensors: list[Tensor], came: list[Tensor]) -> None:
            links = HERE.links
            for mine in tensors:
                links.sent[(self.rank + 1) % self.size].put(mine.clone())
            for theirs in came:
                theirs.copy_(links.sent[self.rank].get(timeout=PATIENCE))

        def share(self, gradient: Tensor) -> Tensor:
            return HERE.links.share(self.rank, gradient)

    return Threaded


class Ranks(OursRing):
    """The ring attention on ranks that are threads."""

    world = World(
        (1, 2, 3, 4, 8),
        (Split("ring", True, True), Split("zigzag", True, True, zigzag=True)),
    )
    changes: dict[str, Any]

    def __init__(self, **changes: Any) -> None:
        self.changes = changes
        self._ranks: dict[int, list[Any]] = {}

    def attend(self, *given: Any, mode: Mode, **options: Any) -> Any:
        ring = type("Mutant", (threaded(),), self.changes)
        return super().attend(*given, mode=mode, ring=ring, **options)

    def ask(self, payloads: Sequence[Any]) -> list[Any]:
        size = len(payloads)
        if size not in self._ranks:
            self._ranks[size] = [made() for made in [_rank] * size]
        links = Links(size)

        def serve(rank: Any, payload: Any) -> Any:
            HERE.links = links
            return rank.serve(*payload)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(serve, self._ranks[size], payloads))


def _rank() -> Any:
    """What serves on a rank, without a process group."""
    from conformance.frameworks.torch_bridge import Rank

    rank = object.__new__(Rank)
    rank._kept = OrderedDict()
    return rank


@dataclass(frozen=True, eq=False)
class WorldMutant(FeatureMutant):
    """A mutant of the ring attention."""

    def adapter(self) -> Any:
        """As an implementation."""
        adapter = Ranks(**self.changes)
        adapter.name = self.name
        return adapter


MUTANTS: list[WorldMutant] = []
FORWARD = (OUTPUT, MODES)
BACKWARD = (INPUTS, PARAMETERS, FEATURES, BIAS)
PLAIN, PADDING, CAUSAL, SINKS, WINDOW, BIASED = (
    "plain/no-mask/gqa",
    "mask/key-padding/cross",
    "causal/square/self",
    "feature/sinks/self",
    "feature/window-causal/self",
    "bias/in-full/cross",
)


def _add(
    name: str,
    did: str,
    *killed_by: str,
    case: str = PLAIN,
    dtype: str = "float32",
    **changes: Any,
) -> None:
    by = killed_by or FORWARD
    MUTANTS.append(WorldMutant(name, "world", did, by, changes, case, dtype))


def _usual(a: Any, stage: str, *given: Any) -> Any:
    """What the ring itself does at a stage."""
    return getattr(threaded(), stage)(a, *given)


# What is merged.


def _block(a: Any, logits: Tensor, value: Tensor) -> list[Tensor]:
    """Maximum, sum and values of one block of keys alone."""
    nothing = _usual(a, "first", logits, None, value.shape[-1])
    return _usual(a, "merge", nothing, logits, value)


def _averaged(a: Any, state: list[Tensor], logits: Tensor, value: Tensor) -> list[Tensor]:
    if not logits.shape[-1]:
        return state
    highest, _, _ = state
    context, *_ = _usual(a, "result", _block(a, logits, value))
    return [0 * highest.nan_to_num(0, 0, 0), state[1] + 1, state[2] + context]


def _each_its_maximum(a: Any, state: list[Tensor], logits: Tensor, value: Tensor) -> list[Tensor]:
    if not logits.shape[-1]:
        return state
    block = _block(a, logits, value)
    return [block[0].maximum(state[0]), state[1] + block[1], state[2] + block[2]]


def _unguarded(a: Any, state: list[Tensor], logits: Tensor, value: Tensor) -> list[Tensor]:
    if not logits.shape[-1]:
        return state
    highest = state[0].maximum(logits.amax(-1))
    factor, powers = (state[0] - highest).exp(), (logits - highest[..., None]).exp()
    total = state[1] * factor + powers.sum(-1)
    return [highest, total, state[2] * factor[..., None] + powers @ value]


def _sink_again(a: Any, state: list[Tensor], logits: Tensor, value: Tensor) -> list[Tensor]:
    state = _usual(a, "merge", state, logits, value)
    a.merged = getattr(a, "merged", 0) + 1
    if a.sinks is None or a.merged == 1:
        return state
    sinks = a.sinks[:, None, None].expand(*state[0].shape, 1)
    return _usual(a, "merge", state, sinks, value[:, :, :0].sum(2, True))


def _remember_sinks(a: Any, query: Tensor, sinks: Tensor, width: int) -> list[Tensor]:
    a.sinks = sinks
    return _usual(a, "first", query, sinks, width)


_add(
    "world-merge-without-weights",
    "averages what the ranks found, without the weights of the log-sum-exp",
    merge=_averaged,
)
_add(
    "world-maximum-not-exchanged",
    "adds up blocks of which each is relative to its own maximum",
    merge=_each_its_maximum,
)
_add(
    "world-not-rescaled",
    "does not rescale what was merged when the maximum grows",
    factor=lambda a, before, now: (before == before).to(before.dtype),
)
_add(
    "world-sum-not-rescaled",
    "rescales the merged values, but not the sum of their weights",
    total=lambda a, total, factor, powers: total + powers.sum(-1),
)
_add(
    "world-first-block-blocked-is-nan",
    "subtracts -inf from -inf where all keys of the first block are blocked",
    case=PADDING,
    merge=_unguarded,
)
_add(
    "world-sent-in-bfloat16",
    "sends keys and values in bfloat16",
    exchange=lambda a, tensors, came: _usual(
        a, "exchange", [t.bfloat16().to(t.dtype) for t in tensors], came
    ),
)
_add(
    "world-keys-and-values-exchanged",
    "takes the keys that came for values, and the values for keys",
    pass_on=lambda a, tensors, hop: [
        *reversed(_usual(a, "pass_on", tensors[:2], hop)),
        *_usual(a, "pass_on", tensors[2:], hop),
    ],
)

# Sinks.

_add(
    "world-sink-at-every-hop",
    "adds the sink once for each block of keys",
    case=SINKS,
    first=_remember_sinks,
    merge=_sink_again,
)
_add(
    "world-sink-on-first-rank",
    "adds the sink on the first rank only",
    case=SINKS,
    first=lambda a, query, sinks, width: _usual(
        a, "first", query, None if a.rank else sinks, width
    ),
)
_add(
    "world-sink-lost",
    "has no sink on the path of several ranks",
    case=SINKS,
    first=lambda a, query, sinks, width: _usual(
        a, "first", query, None if a.size > 1 else sinks, width
    ),
)
_add(
    "world-sink-gradient-local",
    "leaves the gradient of sinks on each rank",
    FEATURES,
    case=SINKS,
    share=lambda a, gradient: gradient,
)
_add(
    "world-sink-gradient-on-first-rank",
    "sums the gradient of sinks up on the first rank only",
    FEATURES,
    case=SINKS,
    share=lambda a, gradient: (_usual(a, "share", gradient), gradient)[a.rank > 0],
)
_add(
    "world-sink-gradient-averaged",
    "averages the gradient of sinks over the ranks",
    FEATURES,
    case=SINKS,
    share=lambda a, gradient: _usual(a, "share", gradient) / a.size,
)
_add(
    "world-sink-gradient-summed-twice",
    "sums the gradient of sinks over the ranks twice",
    FEATURES,
    case=SINKS,
    share=lambda a, gradient: _usual(a, "share", _usual(a, "share", gradient)),
)

# Whose keys are here, and where they stand.


def _other_way(a: Any, source: int) -> Tensor:
    other = (2 * a.rank - source) % a.size
    fits = len(a.keys[other]) == len(a.keys[source])
    return _usual(a, "sees", other if fits else source)


def _consecutive(a: Any, source: int) -> Tensor:
    """The positions of a rank's keys, if ranks had parts in the order of the sequence."""
    import torch

    first = sum(len(keys) for keys in a.keys[:source])
    return first + torch.arange(len(a.keys[source]))


def _equally_long(a: Any, source: int) -> Tensor:
    """The positions of a rank's keys, if all ranks had as many as the first."""
    import torch

    return source * len(a.keys[0]) + torch.arange(len(a.keys[source]))


def _local_window(a: Any, source: int) -> Tensor:
    import torch

    queries, keys = torch.arange(len(a.queries))[:, None], torch.arange(len(a.keys[source]))
    before, after = ((10**9 if side == -1 else side) for side in a.window)
    near = (keys - queries >= -before) & (keys - queries <= after)
    causal = a.keys[source] <= a.queries[:, None]
    return near & causal if a.causal else near


def _one_rank_back(a: Any, source: int) -> Tensor:
    """Where ranks are in the order of the sequence, so that the first has no one before it."""
    in_order = all(bool((_consecutive(a, rank) == keys).all()) for rank, keys in enumerate(a.keys))
    far = in_order and a.window[0] >= 0 and source < a.rank - 1
    return _usual(a, "sees", source) & (not far)


def _without_remainder(a: Any, source: int) -> Tensor:
    import torch

    shortest = min(map(len, a.keys))
    return _usual(a, "sees", source) & (torch.arange(len(a.keys[source])) < shortest)


def _second_half_reversed(a: Any, source: int) -> Tensor:
    keys = a.keys[source]
    half = -(-len(keys) // 2) if a.size > 1 else len(keys)
    return __import__("torch").cat((keys[:half], keys[half:].flip(0)))


_add(
    "world-one-hop-too-few",
    "does not wait for the keys of the last rank",
    hops=lambda a: max(a.size - 1, 1),
)
_add(
    "world-one-hop-too-few-of-three",
    "does not wait for the keys of the last of three ranks",
    hops=lambda a: a.size - (a.size == 3),
)
_add(
    "world-own-keys-again",
    "sees its own keys at every hop",
    pass_on=lambda a, tensors, hop: (
        [tensors[0][:, :, :1].expand_as(t) for t in _usual(a, "pass_on", tensors, hop)]
        if len(tensors) == 2
        else _usual(a, "pass_on", tensors, hop)
    ),
)
_add(
    "world-source-the-other-way",
    "takes keys for those of the rank behind, which for two ranks is the same",
    case=CAUSAL,
    sees=_other_way,
)
_add(
    "world-mask-in-order-of-sequence",
    "reads the columns of the mask one after another in zig-zag order",
    case="mask/per-batch/gqa",
    mask_columns=_consecutive,
)
_add(
    "world-mask-one-rank-off",
    "reads the columns of the mask for the first keys at every hop",
    case="mask/per-batch/gqa",
    mask_columns=lambda a, source: __import__("torch").arange(len(a.keys[source])),
)
_add(
    "world-zigzag-read-as-consecutive",
    "takes keys in zig-zag order for consecutive ones",
    case=CAUSAL,
    key_positions=_consecutive,
)
_add(
    "world-zigzag-second-half-reversed",
    "reverses the second part of what a rank has in zig-zag order",
    case=CAUSAL,
    key_positions=_second_half_reversed,
)
_add(
    "world-causal-by-local-positions",
    "counts the causal mask from the first query and the first key of each block",
    case=CAUSAL,
    query_positions=lambda a: __import__("torch").arange(len(a.queries)),
    key_positions=lambda a, source: __import__("torch").arange(len(a.keys[source])),
)
_add(
    "world-causal-as-on-first-rank",
    "gives every rank the causal mask of the first",
    case=CAUSAL,
    query_positions=lambda a: a.queries - a.queries.min() if len(a.queries) else a.queries,
)
_add(
    "world-causal-skips-later-ranks",
    "skips the keys of all later ranks under a causal flag, also in zig-zag order",
    case=CAUSAL,
    sees=lambda a, source: _usual(a, "sees", source) & (source <= a.rank or not a.causal),
)
_add(
    "world-last-rank-strictly-causal",
    "hides a query's own key from it on the last rank",
    case=CAUSAL,
    query_positions=lambda a: a.queries - int(0 < a.rank == a.size - 1),
)
_add(
    "world-remainder-shifts-positions",
    "takes all ranks to have as many keys as the first, so that positions are off by the remainder",
    case=CAUSAL,
    key_positions=_equally_long,
)
_add(
    "world-remainder-dropped",
    "leaves out keys beyond the length that all ranks have",
    sees=_without_remainder,
)
_add(
    "world-window-by-local-positions",
    "counts the window within each block",
    case=WINDOW,
    sees=_local_window,
)
_add(
    "world-window-of-one-rank-back",
    "lets a window reach back no farther than to the rank before",
    case="feature/window/narrow",
    sees=_one_rank_back,
)
_add(
    "world-window-of-own-rank",
    "does not look beyond the own keys if there is a window",
    case=WINDOW,
    sees=lambda a, source: _usual(a, "sees", source) & (a.window == (-1, -1) or source == a.rank),
)

# Gradients.


def _left_behind(a: Any, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    """Gradients of keys go on with them, but for the last hop, which would bring them home."""
    *gradients, hop = given
    came = _usual(a, "travel", key, value, *gradients, hop)
    if hop < a.size - 1 or any(
        g.shape != c.shape for g, c in zip(gradients, came[2:], strict=True)
    ):
        return came
    return [*came[:2], *gradients]


def _stays(a: Any, key: Tensor, value: Tensor, by_key: Tensor, by_value: Tensor, hop: int) -> Any:
    """What another rank's keys got is added to the gradient of the own keys."""
    came = _usual(a, "travel", key, value, by_key, by_value, hop)
    fits = came[2].shape == by_key.shape
    return [*came[:2], by_key, by_value] if fits else came


def _local_sum(a: Any, state: list[Tensor], logits: Tensor, value: Tensor) -> list[Tensor]:
    a.local = _block(a, logits, value) if logits.shape[-1] else state
    return _usual(a, "merge", state, logits, value)


_add(
    "world-key-gradients-left-behind",
    "leaves gradients of keys and values on the rank of the last hop",
    *BACKWARD,
    travel=_left_behind,
)
_add(
    "world-key-gradients-stay",
    "does not send gradients of keys and values on with them",
    *BACKWARD,
    travel=_stays,
)
_add(
    "world-value-gradient-left-behind",
    "brings the gradient of keys home, but not that of values",
    *BACKWARD,
    travel=lambda a, *given: [*_usual(a, "travel", *given)[:3], _left_behind(a, *given)[3]],
)
_add(
    "world-key-gradient-of-last-hop",
    "overwrites the gradient of keys at each hop",
    *BACKWARD,
    travel=lambda a, key, value, by_key, by_value, hop: _usual(
        a, "travel", key, value, by_key * (hop == a.size - 1), by_value, hop
    ),
)
_add(
    "world-key-gradients-added-twice",
    "adds what the own queries give to gradients of keys and values twice",
    *BACKWARD,
    travel=lambda a, key, value, by_key, by_value, hop: _usual(
        a,
        "travel",
        key,
        value,
        *(g * (1 + (hop == 0 and a.size > 1)) for g in (by_key, by_value)),
        hop,
    ),
)
_add(
    "world-key-gradients-averaged",
    "divides gradients of keys and values by the number of ranks",
    *BACKWARD,
    ungroup=lambda a, *given: _usual(a, "ungroup", *given) / a.size,
)
_add(
    "world-key-gradients-in-bfloat16",
    "sends gradients of keys and values in bfloat16",
    *BACKWARD,
    exchange=lambda a, tensors, came: _usual(
        a, "exchange", [*tensors[:2], *(t.bfloat16().to(t.dtype) for t in tensors[2:])], came
    ),
)
_add(
    "world-query-gradient-of-own-keys",
    "leaves out of the gradient of queries what other ranks' keys give",
    *BACKWARD,
    of_query=lambda a, gradient, hop: gradient * (hop == 0),
)
_add(
    "world-query-gradient-averaged",
    "divides the gradient of queries by the number of ranks",
    *BACKWARD,
    of_query=lambda a, gradient, hop: gradient / a.size,
)
_add(
    "world-query-gradient-lost-on-last-of-three",
    "loses the gradient of queries on the last of three ranks at the last hop",
    *BACKWARD,
    of_query=lambda a, gradient, hop: gradient * (not a.size - 1 == a.rank == hop == 2),
)
_add(
    "world-bias-gradient-of-own-keys",
    "returns the gradient of a bias in the columns of the own keys only",
    *BACKWARD,
    case=BIASED,
    of_mask=lambda a, gradient, hop: gradient * (hop == 0),
)
_add(
    "world-row-term-forgotten",
    "leaves the row term of the softmax out on several ranks",
    *BACKWARD,
    delta=lambda a, *given: _usual(a, "delta", *given) * (a.size == 1),
)
_add(
    "world-normaliser-of-last-hop",
    "keeps the log-sum-exp of the last block for the gradients",
    *BACKWARD,
    merge=_local_sum,
    result=lambda a, state: (_usual(a, "result", state)[0], *_usual(a, "result", a.local)[1:]),
)
