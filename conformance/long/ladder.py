"""Pose problems of increasing length to one implementation, within limits of time and memory.

A few queries over all keys, and all queries over a few keys, reach every index at linear cost.
Whole sequences, causal and not, follow as far as time and memory allow. Problems that are not
reached are reported as such.

The cost of a problem is predicted from the cost of the same problem at shorter lengths. Time grows
with the number of pairs and tokens, and memory beyond the estimate of `needed` with the number of
pairs. Thus, if calls at shorter lengths show that a call holds a number for each pair, be it a
logit or an element of the mask that the implementation takes, it is not made at lengths for which
these do not fit into memory.

On a device with its own memory, a problem must fit into that memory and into the host's. The host
holds what is drawn, converted and compared, and the device what the implementation is given and
returns.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from conformance.adapter.base import Adapter, Mode
from conformance.adapter.features import PARTS, HeadNorm, Lengths, RotaryEmbedding, Spans
from conformance.adapter.handing import Handing
from conformance.adapter.native import NativeAdapter
from conformance.definition.dtypes import dtype_of
from conformance.definition.features import Norm, Rotary
from conformance.definition.geometry import Geometry
from conformance.definition.rotary import RotaryScaling
from conformance.errors import ProcessLost, Unavailable, Unsupported
from conformance.frameworks.base import Memory
from conformance.long.calling import AtLength, call
from conformance.long.checking import Tally, check, check_sampled, missed
from conformance.long.noise import UNKNOWN
from conformance.long.problem import (
    EVERYTHING,
    Visibility,
    draw,
    generic,
    retrieval,
    sampled,
    wide_type,
)
from conformance.records.findings import rounded_figure
from conformance.records.long import ArrayStatistics, Outcome, Step, array_title
from conformance.text import message

FEW = 64
"""The length of the shorter side of problems that are long on one side only, unless it is 1 or
`LAST`."""

LAST = 16
"""The number of queries in problems whose queries are the last ones of a causal sequence."""

QUERIES = {"retrieval": FEW, "one query": 1, "last queries": LAST, "few queries": FEW}
"""The number of queries of problems that have few queries but all keys, by name of the problem.

For 1 and for 16 queries, kernels may split the keys and merge the partial results. The 16 queries
are the last ones of a causal sequence, so only the last of them sees every key.
"""

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes to examine by default."""

_ARRAYS_AT_ONCE = 14
"""How many float32 arrays of the size of the queries exist at once: the four inputs, the copies
that the implementation gets, their conversion through float64, and four results."""

_ARRAYS_ON_DEVICE = 8
"""How many arrays of the size of the queries a device holds at once: four inputs, four results."""

WRAP = 2**31
"""The number of elements (batch · heads · length · head) beyond which a signed 32-bit index
wraps."""

BEYOND = "beyond 2^31"
"""The name of the retrieval problem with so many heads that keys have more than `WRAP` elements."""

BEYOND_FROM = 2**20
"""The least length at which `BEYOND` is posed; at shorter lengths, it would need more heads than
models have."""

PROBLEMS = (*QUERIES, "few keys", "causal", "full", "sampled", BEYOND)
"""The names of the problems at one length, in the order in which they are posed.

`BEYOND` is left out at lengths below `BEYOND_FROM`.
"""

STRUCTURED = {"window": ("window",), "packed": ("segments",)}
"""The features of further problems, by name: for implementations that declare them, and for those
that take masks as structure."""

SCALED = ("linear", "yarn", "llama3")
"""The kinds of scaled rotary frequencies that are asked about."""

FACTOR = 8
"""By how much the longest text is longer than those before frequencies were scaled."""

WITH_FEATURES = {
    "sinks": ("sinks",),
    "soft cap": ("soft cap",),
    "last queries with features": ("sinks", "soft cap"),
    "rotary": ("rotary",),
    "last queries with rotary": ("rotary",),
    "chunk": ("chunk",),
    "last queries with chunk": ("chunk",),
    "alibi": ("alibi",),
    "last queries with alibi": ("alibi",),
    "dilation": ("dilation",),
    "last queries with dilation": ("dilation",),
    "global tokens": ("global tokens",),
    "norm": ("query/key norm",),
    "last queries with norm": ("query/key norm",),
    "spans": ("spans",),
    "last queries with spans": ("spans",),
    "key lengths": ("key lengths",),
    "last queries with key lengths": ("key lengths",),
    **{f"last queries with {kind}": ("rotary scaling",) for kind in SCALED},
}
"""The features of further problems, by the name of the problem.

A problem is posed to implementations that declare at least one of its features, and has only those
that they declare.
"""

_FEW_QUERIES = {
    **QUERIES,
    BEYOND: FEW,
    **{name: LAST for name in WITH_FEATURES if name.startswith("last queries")},
}

ROTARY_BASE = 10_000.0
"""The base of rotary frequencies, unless the implementation has a fixed one."""

_DIRECT = (
    *("rotary", "rotary scaling", "alibi", "dilation", "global tokens"),
    *("query/key norm", "spans"),
)
"""The features with which sampled rows are computed directly."""

SAMPLED = ("sampled", *(name for name, of in WITH_FEATURES.items() if {*of} & {*_DIRECT}))
"""The names of the problems of which sampled rows are computed directly."""

REACH = 1000
"""The positions of a window, and of a chunk: no multiple of a tile."""

ENTRIES = 4
"""The batch entries of problems with lengths of keys."""

EPSILON = 0.25
"""The number that norms add to mean squares, unless the implementation has a fixed one.

Beside mean squares of about 1, it is not negligible."""

DILATION = 4
"""The dilation."""

CAP = 8.0
"""The soft cap, which is less than the logits of the rarest keys."""


@dataclass(frozen=True)
class LongLimits:
    """The limits of a run: bytes of memory, and seconds for all problems.

    None for the memory means all that is available; None for the seconds means no limit.
    """

    memory: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class LongSizes:
    """The head size, and the number of keys that are summed up at once (a tile), or `UNKNOWN`."""

    head_size: int = 64
    tile: int = UNKNOWN

    @classmethod
    def of(cls, geometry: Geometry | None, head_size: int | None, tile: int | None) -> LongSizes:
        """Return the given sizes, with each that is None or 0 replaced by that of the geometry.

        A geometry provides its first head size and its tile of keys. Without a geometry, the head
        size 64 and an `UNKNOWN` tile are used instead.
        """
        head, keys = (geometry.head_sizes[0], geometry.tiles[1]) if geometry else (64, UNKNOWN)
        return cls(head_size or head, tile or keys)


def lengths(first: int, last: int) -> list[int]:
    """Return lengths from first to last in steps of a factor of 4; the last step may be smaller.

    If `last` does not exceed `first`, return only `last`.
    """
    count = max(0, math.ceil(math.log(last / first, 4) - 1e-9))
    return [*(first * 4**step for step in range(count)), last]


def needed(queries: int, keys: int, head_size: int, dtype: str, batch: int = 1) -> int:
    """Return an estimate of the bytes that a problem takes, including the implementation's arrays.

    Any further memory that an implementation needs, such as for all logits, is measured in calls.
    """
    tokens = batch * (queries + keys)
    return 2**28 + _ARRAYS_AT_ONCE * tokens // 2 * (head_size + 4) * _wide(dtype)


def needed_on_device(queries: int, keys: int, head_size: int, dtype: str, batch: int = 1) -> int:
    """Return an estimate of the bytes that a problem takes on a device with its own memory.

    As in `needed`, any further memory is measured in calls.
    """
    return _ARRAYS_ON_DEVICE * batch * (queries + keys) // 2 * head_size * _stored(dtype)


def needed_beyond(keys: int, head_size: int, dtype: str) -> int:
    """Return an estimate of the bytes that keys and values with more than `WRAP` elements take.

    Keys and values exist as they are drawn, as arrays of the implementation, and as its gradients.
    In addition, one array at a time is converted through float64.
    """
    drawn = heads_beyond(keys, head_size) * keys * head_size * (2 * _wide(dtype) + 8)
    return drawn + needed_beyond_on_device(keys, head_size, dtype)


def needed_beyond_on_device(keys: int, head_size: int, dtype: str) -> int:
    """Return an estimate of the part of `needed_beyond` that a device holds, if not the host."""
    return heads_beyond(keys, head_size) * keys * head_size * 4 * _stored(dtype)


def heads_beyond(keys: int, head_size: int) -> int:
    """Return how many heads it takes for the keys to have more than `WRAP` elements."""
    return WRAP // (keys * head_size) + 1


def largest(memory: int, head_size: int, dtype: str) -> int:
    """Return the length of the longest whole sequence for which `memory` bytes suffice.

    This inverts the estimate of `needed`. The result is 0 if the memory is too small for any.
    """
    return max(0, int((memory - 2**28) / (_ARRAYS_AT_ONCE * (head_size + 4) * _wide(dtype))))


def _stored(dtype: str) -> int:
    """Return the size in bytes of a number of this dtype in the implementation's arrays."""
    return 2 if dtype in ("bfloat16", "float16") else _wide(dtype)


def _wide(dtype: str) -> int:
    """Return the size in bytes of a number of this dtype in the suite's NumPy arrays."""
    return np.dtype(wide_type(dtype)).itemsize


def mode_of(adapter: Adapter, dtype: str) -> Mode:
    """Return the mode in which an implementation is called on long sequences.

    Among the modes for this dtype, or all modes if there is none, prefer one that is compiled as
    users would compile it; among equals, one that computes gradients; and then one that returns no
    attention weights, because these would be an array of all pairs.
    """

    def merit(mode: Mode) -> tuple[bool, bool, bool]:
        alone = adapter.returns_weights is None or not mode.weights
        return mode.optimised, mode.gradients, alone

    fit = [mode for mode in adapter.modes if mode.has(dtype)]
    return max(fit or adapter.modes, key=merit)


class _Room:
    """The memory of the host, in which problems must fit, and how much of it was used.

    Args:
        limit: the bytes that may be used, or None for all that are available.
    """

    where = ""

    def __init__(self, limit: int | None) -> None:
        available = self.available()
        self.free = min(available, limit or available)

    def available(self) -> int:
        return int(psutil.virtual_memory().available)

    def needed(self, step: Step, head_size: int) -> int:
        """Return an estimate of the bytes that a problem takes."""
        if step.problem == BEYOND:
            return needed_beyond(step.keys, head_size, step.dtype)
        found = needed(step.queries, step.keys, head_size, step.dtype, _batch(step))
        # Keys, values and their gradients with variances are held in float64 at once.
        direct = 6 * 8 * step.keys * head_size if step.problem in SAMPLED else 0
        return found + direct

    def largest(self, head_size: int, dtype: str) -> int:
        """Return the length of the longest whole sequence that fits."""
        return largest(self.free, head_size, dtype)

    def forget_peak(self) -> int:
        """Reset the peak, if possible, and return the bytes that are used now."""
        return _forget_peak()

    def peak(self) -> int:
        """Return the most bytes that were used."""
        return _peak()


class _RoomBesideDevice(_Room):
    """The memory of the host of a device that holds the implementation's arrays itself."""

    def needed(self, step: Step, head_size: int) -> int:
        found = super().needed(step, head_size)
        if step.problem == BEYOND:
            # One array at a time is converted on its way to the device.
            on_device = needed_beyond_on_device(step.keys, head_size, step.dtype)
            found -= on_device - on_device // 4
        return found


class _RoomOnDevice(_Room):
    """The memory of a device, which its framework knows."""

    where = " on the device"

    def __init__(self, limit: int | None, ask: Callable[[bool], Memory]) -> None:
        self._ask, self._earlier = ask, 0
        super().__init__(limit)

    def available(self) -> int:
        return self._ask(False).free

    def needed(self, step: Step, head_size: int) -> int:
        if step.problem == BEYOND:
            return needed_beyond_on_device(step.keys, head_size, step.dtype)
        return needed_on_device(step.queries, step.keys, head_size, step.dtype, _batch(step))

    def largest(self, head_size: int, dtype: str) -> int:
        return self.free // needed_on_device(1, 1, head_size, dtype)

    def forget_peak(self) -> int:
        now = self._ask(True)
        self._earlier = now.peak
        return now.used

    def peak(self) -> int:
        # Where the peak cannot be reset, one that has not risen is that of an earlier call.
        now = self._ask(False)
        return now.peak if now.peak > self._earlier else now.used


def _rooms(adapter: Adapter, device: str, limit: int | None) -> list[_Room]:
    """Return the memories in which the problems of an implementation must fit."""
    if isinstance(adapter, AtLength) or not isinstance(adapter, NativeAdapter):
        return [_Room(limit)]
    bridge = adapter.bridge
    if bridge.memory(device) is None:
        return [_Room(limit)]

    def ask(anew: bool) -> Memory:
        found = bridge.memory(device, anew=anew)
        assert found is not None
        return found

    return [_RoomBesideDevice(limit), _RoomOnDevice(limit, ask)]


@dataclass
class _Cost:
    """The measured costs of one problem in one dtype and mode, for each length so far.

    Attributes:
        pairs: the number of pairs of a query and a key.
        seconds: the seconds per unit of work; see `_work`.
        extra: the bytes beyond the estimate that `needed` of each memory returns.
        fixed: the extra seconds, such as for compiling, of the first call at the latest length.
    """

    pairs: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    extra: list[list[float]] = field(default_factory=list)
    fixed: float = 0.0

    def foreseen(self, step: Step, rate: float) -> float:
        """Return the predicted seconds of a problem.

        If nothing has been measured yet, `rate` is taken as the seconds per unit of work.
        """
        if not self.pairs:
            return rate * _work(step)
        return self.fixed + self.seconds[-1] * _work(step)

    def foreseen_extra(self, step: Step, room: int) -> float:
        """Return the predicted bytes of a problem beyond the estimate, in the memory `room`."""
        if not self.pairs:
            return 0.0
        pairs, last, extra = float(step.queries) * step.keys, self.pairs[-1], self.extra[-1][room]
        if len(self.pairs) > 1 and last > self.pairs[-2]:
            growth = max(0.0, extra - self.extra[-2][room]) / (last - self.pairs[-2])
            return extra + growth * max(0.0, pairs - last)
        return extra * max(1.0, pairs / last)


def _work(step: Step) -> float:
    """Return the work of a problem in arbitrary units, roughly proportional to its time."""
    each = float(step.queries) * step.keys + 300.0 * (step.queries + step.keys)
    return _batch(step) * each


def _batch(step: Step) -> int:
    """Return the number of batch entries of a problem."""
    return ENTRIES if "key lengths" in WITH_FEATURES.get(step.problem, ()) else 1


class Ladder:
    """All problems for one implementation, posed from the shortest length to the longest.

    Args:
        adapter: the implementation.
        steps: the lengths, shortest first.
        dtypes: the dtypes.
        limits: the memory and time that it may take.
        sizes: the sizes of heads and tiles; None for those that the adapter declares.
        modes: the names of the modes; if the adapter has none of them, `mode_of` chooses one.
        device: "cpu" or "gpu".
        threads: how many threads the suite's own comparison may use.

    Attributes:
        lacks: the names of the features that the implementation declares and that none of the
            problems has.
    """

    def __init__(
        self,
        adapter: Adapter,
        steps: Sequence[int],
        dtypes: Sequence[str],
        limits: LongLimits,
        *,
        sizes: LongSizes | None = None,
        modes: Sequence[str] = (),
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        self._adapter, self._limits = adapter, limits
        self._sizes = sizes or LongSizes.of(adapter.geometry, None, None)
        self._device, self._threads = device, threads
        self._costs: dict[tuple[str, str, str], _Cost] = {}
        self._rate = 0.0
        self._started = 0.0
        self._rooms = _rooms(adapter, device, limits.memory)
        self._lost = ""
        # Where tokens are passed in pages, say, it is with their lengths.
        self._declared = {
            part
            for feature in adapter.features
            for part in (feature.covers if isinstance(feature, Handing) else feature.says)
        }
        declared_only = {**STRUCTURED, **WITH_FEATURES}
        names = [*PROBLEMS]
        for name, parts in declared_only.items():
            structured = name in STRUCTURED and isinstance(adapter, AtLength)
            if structured or self._declared & {*parts}:
                names.append(name)
        posed = {part for parts in declared_only.values() for part in parts}
        self.lacks = tuple(part for part in PARTS if part in self._declared - posed)
        self._plan: list[tuple[Step, Mode]] = []
        for length in steps:
            for dtype in dtypes:
                chosen = [mode for mode in adapter.modes if mode.name in modes]
                for mode in chosen or [mode_of(adapter, dtype)]:
                    for name in names:
                        if name == BEYOND and length < BEYOND_FROM:
                            continue
                        few = min(_FEW_QUERIES.get(name, length), length)
                        keys = FEW if name == "few keys" else length
                        step = Step(name, dtype, mode.name, few, keys, "not reached")
                        self._plan.append((step, mode))

    def __len__(self) -> int:
        return len(self._plan)

    def climb(
        self, begin: Callable[[Step, float], None] = lambda step, left: None
    ) -> Iterator[Step]:
        """Yield the result of each problem, shorter problems first.

        Problems beyond the limits are not run; their results say why.

        Args:
            begin: a function that is called before each problem that is run, with the problem and
                the predicted seconds for it and all remaining problems.
        """
        self._warm_up()
        for number, (step, mode) in enumerate(self._plan):
            why = self._beyond(step)
            if why:
                yield msgspec.structs.replace(step, why=why)
                continue
            begin(step, self._left(number))
            yield self._measured(step, mode)

    def _warm_up(self) -> None:
        """Call the implementation on a few tokens, so that start-up is not charged to a length.

        The second call measures the rate from which the time of the shortest length is predicted.
        """
        first, mode = self._plan[0]
        few = msgspec.structs.replace(first, problem="full", queries=4 * FEW, keys=4 * FEW)
        for _ in range(2):
            result = self._asked(few, mode)
            self._rate = result.called / _work(few)
        self._started = time.perf_counter()

    def _cost(self, step: Step) -> _Cost:
        return self._costs.setdefault((step.problem, step.dtype, step.mode), _Cost())

    def _beyond(self, step: Step) -> str:
        """Return why a problem is beyond the limits, or "" if it can be run."""
        if self._lost:
            return self._lost
        head, by_elements = self._sizes.head_size, step.problem == BEYOND
        for place, room in enumerate(self._rooms):
            own = room.needed(step, head)
            if own > room.free:
                have = f"{room.free / 2**30:.1f} GiB"
                most = f"hold {room.largest(head, step.dtype):,} tokens"
                usual = step.problem not in (BEYOND, *SAMPLED) and _batch(step) == 1
                have = f"{have} {most}" if usual else f"there are {have}"
                return f"needs {own / 2**30:.1f} GiB{room.where}; {have}"
            extra = 0.0 if by_elements else self._cost(step).foreseen_extra(step, place)
            if own + extra > room.free:
                needs = f"{(own + extra) / 2**30:,.0f} GiB{room.where}"
                return f"needs about {needs}, for its memory grows as queries × keys"
        if by_elements:
            seconds = self._rate * _work(step) * self._heads(step)
        else:
            seconds = self._cost(step).foreseen(step, self._rate)
            if self._time_left() <= 0:
                return "takes longer than the time that is left"
        return f"takes about {seconds:,.0f} s" if seconds > self._time_left() else ""

    def needs(self, step: Step) -> str:
        """Return text with the memory that a problem takes, as far as it is known beforehand."""
        found = []
        for place, room in enumerate(self._rooms):
            own = room.needed(step, self._sizes.head_size)
            extra = self._cost(step).foreseen_extra(step, place)
            found.append(f"{(own + extra) / 2**30:.1f} GiB{room.where}")
        return " and ".join(found)

    def _time_left(self) -> float:
        if self._limits.seconds is None:
            return math.inf
        return self._limits.seconds - (time.perf_counter() - self._started)

    def _left(self, number: int) -> float:
        """Return the predicted seconds for a problem and those after it, at most the time left.

        `number` is the index of the problem in the plan. Problems beyond the limits take no time.
        """
        found = sum(
            self._cost(step).foreseen(step, self._rate) * self._heads(step)
            for step, _ in self._plan[number:]
            if not self._beyond(step)
        )
        return min(found, self._time_left())

    def _heads(self, step: Step) -> int:
        """Return the number of heads of a problem."""
        return heads_beyond(step.keys, self._sizes.head_size) if step.problem == BEYOND else 1

    def _measured(self, step: Step, mode: Mode) -> Step:
        began, before = time.perf_counter(), [room.forget_peak() for room in self._rooms]
        cost = self._cost(step)
        result = self._asked(step, mode)
        took = time.perf_counter() - began
        if result.verdict in ("conforms", "deviates"):
            cost.fixed = result.first
            cost.pairs.append(float(step.queries) * step.keys)
            cost.seconds.append(max(0.0, took - result.first) / _work(step))
            cost.extra.append(
                [
                    max(0.0, room.peak() - then - room.needed(step, self._sizes.head_size))
                    for room, then in zip(self._rooms, before, strict=True)
                ]
            )
        return result

    def _rotary(self) -> Rotary:
        """Return a rotation of whole heads, of the kind that the implementation declares."""
        size = self._sizes.head_size // 2 * 2
        for declared in self._adapter.features:
            if isinstance(declared, RotaryEmbedding) and size:
                base = declared.numbers.get("base", ROTARY_BASE)
                return Rotary(size=size, base=base, pairs=declared.pairs)
        raise Unsupported(f"no rotation of heads of size {self._sizes.head_size}")

    def _norm(self, dtype: str) -> Norm:
        """Return a norm with random gains, and the fixed epsilon of the implementation if any."""
        fixed = (one.numbers for one in self._adapter.features if isinstance(one, HeadNorm))
        epsilon = next(fixed).get("norm_epsilon", EPSILON)
        gains = 1.25 + 0.375 * np.random.default_rng(0).standard_normal((2, self._sizes.head_size))
        query, key = dtype_of(dtype).round(gains)
        return Norm(query=query, key=key, epsilon=epsilon)

    def _sees(self, step: Step, mode: Mode) -> Visibility:
        """Return the mask of a problem, with lengths of keys if it has any."""
        sees = _sees(step)
        if _batch(step) == 1:
            return sees
        if step.problem == "key lengths" and not any(
            isinstance(one, Lengths) and one.needs_causal for one in self._adapter.features
        ):
            # Kernels for serving align a causal mask with the end of each length.
            sees = EVERYTHING
        tile = self._sizes.tile or 2 ** int(math.log2(max(2, step.keys)) - 1)
        whole = max(1, step.keys // 2 // tile) * tile
        found = [whole + 1, step.keys, 0, whole]
        if self._adapter.masked_row(mode) not in ("zeros", "output bias"):
            # What a query gets that sees no key is not defined.
            few = step.queries if sees.causal == "bottom-right" else 1
            found = [max(few, length) for length in found]
        return replace(sees, key_lengths=tuple(min(length, step.keys) for length in found))

    def _features(self, step: Step) -> dict[str, Any]:
        """Return the features of a problem of samples, as fields of `Heads`."""
        (feature,) = WITH_FEATURES.get(step.problem, ("",))
        if feature == "rotary":
            return {"rotary": self._rotary()}
        if feature == "query/key norm":
            turns = step.problem != "norm" and "rotary" in self._declared
            rotary = {"rotary": self._rotary()} if turns else {}
            return {"norm": self._norm(step.dtype), **rotary}
        if feature == "rotary scaling":
            kind = step.problem.split()[-1]
            told: dict[str, Any] = {"rope_type": kind, "factor": float(FACTOR)}
            if kind != "linear":
                told["original_max_position_embeddings"] = max(1, step.keys // FACTOR)
            if kind == "llama3":
                told |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            return {"rotary": self._rotary(), "rotary_scaling": RotaryScaling.of(told)}
        if feature == "alibi":
            # The slope of the last head of usual models, or one with which the first key counts.
            steep = -8.0 if step.problem == "alibi" else 2.0 - math.ceil(math.log2(step.keys))
            return {"slopes": np.array([2.0**steep])}
        if feature == "dilation":
            return {"dilation": DILATION}
        if feature == "spans":
            forms = [one.form for one in self._adapter.features if isinstance(one, Spans)]
            return {"spans": _spans(step, prefix={*forms} == {"prefix"})}
        if feature == "global tokens":
            tokens = np.zeros((1, step.keys), np.int64)
            # The first ones, one within a tile, and one at the end of a tile.
            tokens[:, [0, 1, step.keys // 3, step.keys // 128 * 64 - 1]] = 1
            return {"global_tokens": tokens}
        return {}

    def _asked(self, step: Step, mode: Mode) -> Step:
        began = time.perf_counter()
        try:
            with np.errstate(all="ignore"):
                return self._compared(step, mode)
        except (Unsupported, Unavailable) as reason:
            return msgspec.structs.replace(step, verdict="unsupported", why=str(reason)[:200])
        except Exception as error:
            why = f"{type(error).__name__}: {message(error)}"[:200]
            if isinstance(error, ProcessLost):
                self._lost = f"not asked, because earlier {message(error)}"[:200]
            own = time.perf_counter() - began
            return msgspec.structs.replace(step, verdict="error", why=why, own=own)

    def _compared(self, step: Step, mode: Mode) -> Step:
        began = time.perf_counter()
        promised = self._adapter.promised(step.dtype)
        if promised == "TF32" and step.dtype == "float32":
            raise Unsupported("no σ of class TF32 for long sequences")
        head, tile = self._sizes.head_size, self._sizes.tile
        seen: list[ArrayStatistics] = []
        detail = reached = ""
        if step.problem in ("retrieval", BEYOND):
            count = self._heads(step)
            given = retrieval(
                step.dtype, step.queries, step.keys, head_size=head, heads=count, kv_heads=count
            )
            answered = call(self._adapter, given.heads, self._device, mode)
            wrong = missed(given, answered)
            detail = ", ".join(
                f"{count:,} rows of {array_title(array)} are not those looked for"
                for array, count in wrong.items()
            )
            verdict: Outcome = "deviates" if wrong else "conforms"
        else:
            if step.problem in SAMPLED:
                chosen = sampled(step.queries, tile)
                drawn = generic(
                    step.dtype,
                    step.queries,
                    step.keys,
                    chosen,
                    head_size=head,
                    sees=self._sees(step, mode),
                    **self._features(step),
                )
                answered = call(self._adapter, drawn, self._device, mode)
                found = check_sampled(drawn, chosen, answered, tile)
            else:
                features = self._declared & {*WITH_FEATURES.get(step.problem, ())}
                problem = draw(
                    step.dtype,
                    step.queries,
                    step.keys,
                    batch=_batch(step),
                    head_size=head,
                    sees=self._sees(step, mode),
                    sinks="sinks" in features,
                    soft_cap=CAP if "soft cap" in features else None,
                )
                answered = call(self._adapter, problem, self._device, mode)
                found = check(problem, answered, tile=tile, threads=self._threads)
            tallies = found.decisive(promised).values()
            verdict = "conforms" if found.conforms(promised) else "deviates"
            seen, reached = [_seen(tally) for tally in tallies], found.reached
            if verdict == "deviates":
                detail = _place(max(tallies, key=lambda tally: tally.excess))
        own = time.perf_counter() - began - answered.seconds - answered.first
        return msgspec.structs.replace(
            step,
            verdict=verdict,
            detail=detail,
            seen=seen,
            reached=reached,
            called=_rounded(answered.seconds),
            own=_rounded(own),
            first=_rounded(answered.first),
        )


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), 4)


def _seen(tally: Tally) -> ArrayStatistics:
    numbers = (tally.largest, tally.rms, tally.bias, tally.gain, tally.excess)
    return ArrayStatistics(tally.array, *map(rounded_figure, numbers))


def _place(tally: Tally) -> str:
    """Return text about the worst element of an array: its place, its value and the expected one.

    The text is "" if no element has an error.
    """
    if tally.worst is None:
        return ""
    worst = tally.worst
    text = f"worst in position {worst.position:,}, component {worst.component}: "
    text += f"{worst.got:.6g} for {worst.want:.6g}"
    if tally.tiles:
        text += f"; {tally.beyond:,} elements in {len(tally.tiles):,} blocks of 128 rows"
    return text


def _sees(step: Step) -> Visibility:
    """Return the mask of a problem; packed sequences have random lengths, the same every time."""
    if step.problem.startswith("last queries"):
        chunk = _reach(step) if step.problem.endswith("chunk") else None
        return Visibility(causal="bottom-right", chunk=chunk)
    if step.problem == "chunk":
        return Visibility(causal="top-left", chunk=_reach(step))
    if step.problem in ("dilation", "global tokens"):
        return Visibility(causal="top-left", window=(_reach(step), None))
    if step.problem == "window":
        return Visibility(causal="top-left", window=(REACH, None))
    if step.problem == "causal" or step.problem in WITH_FEATURES:
        return Visibility(causal="top-left")
    if step.problem == "packed":
        cuts = np.unique(np.random.default_rng(0).integers(step.queries, size=15))
        members = tuple(np.diff([0, *cuts, cuts[-1] + 1, step.queries]).tolist())
        return Visibility(causal="top-left", members=(members, members))
    return EVERYTHING


def _spans(step: Step, *, prefix: bool) -> np.ndarray:
    """Return the ids of spans `[1 key]`: one from the first key on, or many with text between.

    The last of many ends a few tokens before the end, so that some of the last queries are in it.
    Its id is a multiple of 256, of which 8 bits keep nothing.
    """
    at, every = np.arange(step.keys), _reach(step) + 1
    if prefix:
        return (at < step.keys // 3 + 1).astype(np.int64)[None]
    found = np.where(at % every < 2 * every // 3, at // every + 1, 0)
    last = max(1, step.keys - 2 * LAST)
    found[last - 1] = 0
    found[last:] = np.where(at[last:] < step.keys - LAST // 2, (found.max() // 256 + 1) * 256, 0)
    return found[None]


def _reach(step: Step) -> int:
    """Return `REACH`, or less for a text that is hardly longer."""
    return max(1, min(REACH, 2 * step.keys // 5))


def _forget_peak() -> int:
    """Reset the peak of resident memory if possible, and return the bytes resident now.

    Both the peak and the bytes are those of this process and all processes that it started.
    """
    for pid in _processes():
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
    return sum(_resident(pid) for pid in _processes())


def _peak() -> int:
    """Return the sum of the peaks of resident memory of this process and its descendants, in bytes.

    If the peak of a process is unknown, its present memory counts.
    """
    return sum(_resident(pid, peak=True) for pid in _processes())


def _processes() -> list[int]:
    """Return the ids of this process and of those that it started, such as ranks."""
    own = psutil.Process()
    return [process.pid for process in (own, *own.children(recursive=True))]


def _resident(pid: int, *, peak: bool = False) -> int:
    if peak and sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
            return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    with suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0
