"""Run attention on several processes (ranks), each of which holds a shard of the tensors.

To the suite, such an implementation is like any other. Its modes are the numbers of ranks and the
ways in which tensors are split, so the requirement `modes.agree` compares worlds of all sizes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from conformance.adapter.base import Call, Mode
from conformance.adapter.function import Function
from conformance.definition.problem import Answer, Problem
from conformance.errors import Unavailable, Unsupported, WrongDeclaration
from conformance.frameworks.base import OnRanks
from conformance.frameworks.processes import call_ranks

QUERIES, KEYS, HEADS, KV_HEADS = "queries", "keys", "heads", "kv heads"


@dataclass(frozen=True)
class Split:
    """A way to divide tensors among the ranks; an axis that is not divided is whole on every rank.

    Args:
        name: the name of this way, which becomes a part of the names of modes.
        queries: whether queries are divided, and the result with them.
        keys: whether keys and values are divided.
        heads: whether heads are divided. Each rank gets whole groups of them.
        zigzag: whether a length is cut into 2n parts, of which rank r of n gets the parts r and
            2n-1-r, instead of being cut into n parts. Causal attention is then the same amount of
            work for every rank. If the length is not a multiple of 2n, the first parts are longer
            by one.
    """

    name: str
    queries: bool = False
    keys: bool = False
    heads: bool = False
    zigzag: bool = False

    def positions(self, length: int, size: int) -> list[np.ndarray]:
        """Return the positions of the tokens on each rank, as one array per rank."""
        if not self.zigzag:
            return np.array_split(np.arange(length), size)
        parts = np.array_split(np.arange(length), 2 * size)
        return [np.concatenate((parts[r], parts[-1 - r])) for r in range(size)]

    def places(
        self, query: Sequence[int], key: Sequence[int], size: int
    ) -> dict[str, list[np.ndarray]]:
        """Return, for each divided axis, the indices that each rank gets.

        Args:
            query: the numbers of heads and of tokens of the query, `[heads length]`.
            key: likewise, of the key.
            size: the number of ranks.

        Raises:
            Unsupported: if the key/value heads cannot be divided among so many ranks.
        """
        places = {}
        if self.queries:
            places[QUERIES] = self.positions(query[1], size)
        if self.keys:
            places[KEYS] = self.positions(key[1], size)
        if self.heads:
            if key[0] % size:
                raise Unsupported(f"{key[0]} key/value heads cannot be divided among {size} ranks")
            for kind, count in ((HEADS, query[0]), (KV_HEADS, key[0])):
                places[kind] = np.split(np.arange(count), size)
        return places


@dataclass(frozen=True)
class Shard:
    """What a rank knows about the parts of the tensors that all ranks hold.

    Attributes:
        rank, size: the number of this rank, and how many ranks there are.
        split: the name of the way in which tensors are divided.
        queries, keys: for each rank, the positions of its queries and of its keys.
    """

    rank: int
    size: int
    split: str
    queries: tuple[np.ndarray, ...]
    keys: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class World:
    """The numbers of ranks and the ways of dividing tensors with which an implementation is run.

    Args:
        sizes: the numbers of ranks.
        splits: the ways in which tensors are divided; each is combined with every size above 1.
        every_case: the sizes with which all cases are run. With other sizes, only the cases of
            level "core" in float32, and a few others, are run (see `Mode.every_case`).
        limit: the number of seconds that one call may take.
    """

    sizes: tuple[int, ...]
    splits: tuple[Split, ...]
    every_case: tuple[int, ...] = (1, 3)
    limit: float = 45.0

    def __post_init__(self) -> None:
        if not self.splits or not self.sizes or min(self.sizes) < 1:
            raise WrongDeclaration("a world has sizes from 1 on, and one way to split at least")

    def modes(self) -> tuple[Mode, ...]:
        """Return a mode for each size and split; a world of one rank has the first split only."""
        return tuple(
            Mode(
                f"{split.name}-{size}",
                {"split": split, "size": size},
                every_case=size in self.every_case,
                core_cases=True,
                about=f"on {size} rank{'s' * (size > 1)}",
            )
            for size in self.sizes
            for split in (self.splits if size > 1 else self.splits[:1])
        )


class Distributed(Function):
    """The base class of adapters of functions that every rank of a world calls with its shard.

    A subclass sets `world` and `on_rank`, and may make the same declarations as any `Function`. Its
    modes are those of the world.

    Attributes:
        on_rank: a function at the top level of a module. Every rank calls it with (query, key,
            value, shard=Shard, **masks), and it returns the rank's part of the result. It uses the
            default process group.
        axes: for each argument other than query, key and value, the names of its axes. Axes named
            "queries", "keys", "heads" or "kv heads" are divided like those of query and key, unless
            they have another size, such as 1; all others are not divided.
    """

    framework = "torch"
    world: ClassVar[World]
    on_rank: ClassVar[Callable[..., Any]]
    axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "mask": ("batch", HEADS, QUERIES, "all keys"),
        "sinks": (HEADS,),
    }

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "world" in vars(cls):
            cls.modes = cls.world.modes()

    def check_device(self, device: str) -> None:
        super().check_device(device)
        if device != "cpu":
            raise Unavailable("ranks run on the CPU")

    @contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        if call.strided or call.around is not None:
            raise Unsupported("each rank gets contiguous parts of its own")
        if call.given is not None:
            raise Unsupported("inputs that contradict each other cannot be divided")
        yield

    def rewritten(self, problem: Problem, earlier: Problem, call: Call) -> Answer:
        raise Unsupported("each rank gets parts of its own")

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        split, size = mode["split"], mode["size"]
        tensors = {"query": query, "key": key, "value": value}
        tensors |= {n: v for n, v in masks.items() if self.bridge.is_array(v)}
        others = {n: v for n, v in masks.items() if n not in tensors} | options
        axes = {name: self.axes.get(name, ()) for name in tensors}
        axes |= {"query": ("batch", HEADS, QUERIES)}
        axes |= dict.fromkeys(("key", "value"), ("batch", KV_HEADS, KEYS))
        places = split.places(query.shape[1:3], key.shape[1:3], size)
        (_, heads, queries, _), (_, kv_heads, keys, _) = query.shape, key.shape
        lengths = {QUERIES: queries, KEYS: keys, HEADS: heads, KV_HEADS: kv_heads}
        divided = {
            name: [
                (axis, places[kind])
                for axis, kind in enumerate(axes[name])
                # An axis of size 1, such as that of a mask for all heads, is not divided.
                if kind in places and tensor.shape[axis] == lengths[kind]
            ]
            for name, tensor in tensors.items()
        }
        everything = [
            places.get(kind, [np.arange(heads.shape[2])] * size)
            for kind, heads in ((QUERIES, query), (KEYS, key))
        ]
        shards = [Shard(rank, size, split.name, *map(tuple, everything)) for rank in range(size)]
        told = OnRanks(
            reference(type(self).on_rank),
            divided,
            divided["query"],
            [{**others, "shard": shard} for shard in shards],
            self.ask,
        )
        return self.bridge.on_ranks(told, tensors)

    def ask(self, payloads: Sequence[Any]) -> list[Any]:
        """Send each rank its payload, and return the results of all ranks."""
        first = ("load", reference(type(self).on_rank))
        return call_ranks(self.bridge.rank, self.world.limit, first, payloads)


def reference(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the module, file and name by which a rank can find a function.

    Raises:
        WrongDeclaration: if the function is a lambda or is defined inside another function.
    """
    name = function.__qualname__
    if "<" in name:
        raise WrongDeclaration(f"{name}: ranks can only import what a module holds by name")
    return function.__module__, inspect.getfile(function), name
