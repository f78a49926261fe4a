"""The attention of the mutants with what kernels have today, in stages that a mutant replaces.

A window, a dilation, global tokens, a soft cap, sinks, ALiBi, rotary positions, also on several
axes, query/key norm, lengths, segments and a cache, forward and backward. Whatever a call does not
name is not there, and the rest is `Attention`.

Besides the two paths of that attention there is a third: with the option "cached", the keys before
the queries are stored in a buffer that is longer than they are, and the queries come in chunks that
read it. The fused path splits the keys of few queries into parts, which are merged at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mutants.attention import INPUTS, Array, Attention


class Featured(Attention):
    """One call; see `Attention`.

    Attributes:
        end: whether queries stand at the end of the keys if lengths differ, or at the start.
        tile: keys of a tile of the fused path.
        few: up to how many queries the keys are split into two parts.
        chunk: how many queries at once are answered beside a cache.
        spare: how many tokens the buffer of the cache has beyond its content.
    """

    end = True
    tile = 3
    few = 5
    chunk = 2
    spare = 3

    def argument(self, name: str) -> Array:
        """What the call names, or None."""
        return self.given.masks.get(name)

    # Positions.

    def at_end(self) -> bool:
        """Whether the last query stands at the last key, as beside a cache."""
        return self.end

    def used(self, side: str) -> Array:
        """How many queries or keys of each entry there are, `[b]`."""
        whole = {"query": self.queries, "key": self.keys}[side]
        lengths = self.argument(f"{side}_lengths")
        return np.full(self.batch, whole) if lengths is None else np.asarray(lengths, int)

    def segments(self, side: str) -> Array:
        """The segment of each token, `[b length]`, or None."""
        return self.argument(f"{side}_segments")

    def index(self, side: str) -> Array:
        """The number of each token, `[b length]`."""
        length = {"query": self.queries, "key": self.keys}[side]
        return np.broadcast_to(np.arange(length), (self.batch, length))

    def told(self, side: str) -> Array:
        """The positions that the call names, `[b length]`, or None."""
        return self.argument(f"{side}_positions")

    def key_positions(self) -> Array:
        """`[b k]`."""
        told = self.told("key")
        return self.index("key") if told is None else told

    def query_positions(self) -> Array:
        """`[b q]`: beside a cache, after the keys that are not among the queries."""
        told = self.told("query")
        if told is not None:
            return told
        return self.index("query") + (self.before_queries() if self.at_end() else 0)

    def before_queries(self) -> Array:
        """How many keys of each entry are before its first query, `[b 1]`."""
        return (self.used("key") - self.used("query"))[:, None]

    def distance(self) -> Array:
        """Of each key from each query, `[b 1 q k]`; negative before the query."""
        return (self.key_positions()[:, None] - self.query_positions()[:, :, None])[:, None]

    # Forward: what is done with heads before they are multiplied.

    def attend(self) -> None:
        self.q, self.k, self.v = (
            self.loaded(name, heads)
            for name, heads in zip(INPUTS, (self.q, self.k, self.v), strict=True)
        )
        self.plain = {"query": self.q, "key": self.k}
        if self.given.mode.options.get("cached") and self.can_be_cached():
            self.weights = None
            self.context = self.dialogue()
            return
        self.q = self.prepared("query", self.q, self.rotary_positions("query"))
        self.k = self.prepared("key", self.k, self.rotary_positions("key"))
        self.v = self.prepared_values(self.v)
        self.all_k, self.all_v = self.repeat(self.k), self.repeat(self.v)
        self.one_pass()

    def loaded(self, name: str, heads: Array) -> Array:
        """Heads with zeros beyond the lengths, where anything may lie."""
        side = "query" if name == "query" else "key"
        if self.argument(f"{side}_lengths") is None:
            return heads
        used = self.queries_in_use() if side == "query" else self.keys_in_use().swapaxes(-1, -2)
        there = used.any(axis=1, keepdims=True)
        return np.where(there, heads, self.wide(0))

    def one_pass(self) -> None:
        """The context of prepared heads."""
        self.scores = self.score(self.q, self.all_k)
        self.uncapped = self.scaled(self.scores)
        self.logits = self.masked(self.uncapped)
        if self.given.mode["fused"]:
            self.context, self.log_total = self.fused(self.logits, self.all_v)
            self.weights = None
        else:
            self.weights = self.hold(self.softmax(self.logits))
            self.context = self.mix(self.dropped(self.weights), self.all_v)

    def masked(self, logits: Array) -> Array:
        """From scaled scores to what the softmax gets."""
        return self.hide(self.biased(self.sloped(self.capped(logits))))

    def rotary_positions(self, side: str) -> Array:
        """What heads are rotated by, `[b length]`, or `[b length 3]` on several axes."""
        axes = self.axes(side)
        if axes is not None:
            return axes
        return self.query_positions() if side == "query" else self.key_positions()

    def axes(self, side: str) -> Array:
        """Positions of time, height and width, `[b length 3]`, or None."""
        told = self.argument(f"{side}_axes")
        return None if told is None else np.moveaxis(told, 0, -1)

    def counts(self) -> tuple[int, ...]:
        """How many pairs turn by each of the three."""
        return tuple(self.told_number("mrope_section"))

    def axis_of_pairs(self) -> Array:
        """The axis by which each pair turns, `[pair]`."""
        if self.told_number("mrope_interleaved"):
            return self.in_turn()
        return np.repeat(np.arange(3), self.counts())

    def in_turn(self) -> Array:
        """The same if axes take turns, as long as they have pairs; time has the rest."""
        pair, counts = np.arange(sum(self.counts())), self.counts()
        axis = pair % 3
        return np.where(pair < 3 * np.array(counts)[axis], axis, 0)

    def prepared(self, side: str, heads: Array, positions: Array) -> Array:
        """Normalised, then rotated."""
        return self.rotated(side, self.normed(side, heads), positions)

    def prepared_values(self, heads: Array) -> Array:
        """Nothing is done with values."""
        return heads

    def gain(self, side: str) -> Array:
        """The weight of a norm, `[head]`."""
        return self.argument(f"{side}_norm")

    def epsilon(self) -> float:
        return float(self.argument("epsilon"))

    def size_of(self, heads: Array) -> Array:
        """The root of the mean square, `[b h length 1]`."""
        return np.sqrt((heads**2).mean(axis=-1, keepdims=True) + self.wide(self.epsilon()))

    def normed(self, side: str, heads: Array) -> Array:
        gain = self.gain(side)
        if gain is None:
            return heads
        return self.hold(heads / self.size_of(heads) * self.read(gain))

    def config(self) -> dict[str, Any]:
        """A rotation with scaled frequencies, or nothing."""
        return self.argument("rope_parameters") or {}

    def turns(self) -> bool:
        """Whether heads are rotated."""
        return self.argument("rotary_base") is not None or bool(self.config())

    def rotary_size(self) -> int:
        if self.config():
            part = self.config().get("partial_rotary_factor", 1.0)
            return round(part * self.shape.head_size)
        return int(self.argument("rotary_size"))

    def base(self) -> float:
        return float(self.config().get("rope_theta", self.argument("rotary_base")))

    def frequencies(self) -> Array:
        """Of each pair, `[pair]`, in float64."""
        size = self.rotary_size()
        return self.base() ** (-2.0 * np.arange(size // 2) / size)

    def kind(self) -> str:
        """How frequencies are scaled."""
        return self.config().get("rope_type", "default")

    def told_number(self, name: str, usual: Any = None) -> Any:
        """A number of the configuration."""
        return self.config().get(name, usual)

    def stretch(self) -> float:
        """By how much texts are longer than before."""
        return float(self.told_number("factor", 1.0))

    def before(self) -> int:
        """How long texts were."""
        return int(self.told_number("original_max_position_embeddings", 1))

    def length(self) -> int:
        """How long this text is."""
        return 1 + int(max(self.rotary_positions(side).max() for side in ("query", "key")))

    def grown_base(self) -> float:
        """The base for longer texts."""
        length = max(self.length(), self.before())
        grown = self.stretch() * length / self.before() - (self.stretch() - 1)
        return self.base() * grown ** self.power()

    def power(self) -> float:
        """To which the growth of a text is raised to get that of the base."""
        size = self.rotary_size()
        return size / (size - 2)

    def is_long(self) -> bool:
        """Whether this text is longer than those before."""
        return self.length() > self.before()

    def listed(self) -> Array:
        """The divisors of all pairs."""
        return np.array(self.told_number("long_factor" if self.is_long() else "short_factor"))

    def thresholds(self) -> tuple[float, float]:
        """How often pairs turn within texts of before that are scaled in full, or not at all."""
        if self.kind() == "llama3":
            return self.told_number("low_freq_factor"), self.told_number("high_freq_factor")
        return self.told_number("beta_slow", 1.0), self.told_number("beta_fast", 32.0)

    def truncates(self) -> bool:
        """Whether the ends of the ramp are whole numbers."""
        return bool(self.told_number("truncate", True))

    def ends(self) -> tuple[float, float]:
        """The pairs where the ramp begins and ends."""
        size, (slow, fast) = self.rotary_size(), self.thresholds()
        begin, end = (
            size * np.log(self.before() / (2 * np.pi * turns)) / (2 * np.log(self.base()))
            for turns in (fast, slow)
        )
        if self.truncates():
            begin, end = np.floor(begin), np.ceil(end)
        return max(begin, 0), min(end, size - 1)

    def ramp(self) -> Array:
        """0 where a pair is scaled in full, 1 where it is not, `[pair]`."""
        if self.kind() == "yarn":
            begin, end = self.ends()
            return 1 - np.clip((np.arange(self.rotary_size() // 2) - begin) / (end - begin), 0, 1)
        low, high = self.thresholds()
        return np.clip((self.turns_before() - low) / (high - low), 0, 1)

    def turns_before(self) -> Array:
        """How often each pair turned within a text of before."""
        return self.before() * self.frequencies() / (2 * np.pi)

    def turning(self) -> Array:
        """The angles per position after scaling, `[pair]`."""
        plain, kind = self.frequencies(), self.kind()
        if kind == "linear":
            return plain / self.stretch()
        if kind == "dynamic":
            size = self.rotary_size()
            return self.grown_base() ** (-2.0 * np.arange(size // 2) / size)
        if kind == "longrope":
            return plain / self.listed()
        if kind in ("yarn", "llama3"):
            return plain / self.stretch() * (1 - self.ramp()) + plain * self.ramp()
        return plain

    def attention_factor(self) -> float:
        """What multiplies cosine and sine."""
        told, kind = self.told_number("attention_factor"), self.kind()
        if told:
            return float(told)
        if kind == "longrope":
            return float(np.sqrt(1 + np.log(self.stretch()) / np.log(self.before())))
        return self.amplitude() if kind == "yarn" else 1.0

    def amplitude(self) -> float:
        """The same by YaRN."""
        over = self.told_number("mscale"), self.told_number("mscale_all_dim")
        return self.grown(over[0]) / self.grown(over[1]) if all(over) else self.grown(1.0)

    def grown(self, by: float) -> float:
        return float(0.1 * by * np.log(self.stretch()) + 1)

    def angles(self, positions: Array) -> Array:
        """`[b 1 length pair]`, from positions `[b length]`, or `[b length 3]`."""
        if positions.ndim == 3:
            return self.on_axes(positions)[:, None] * self.turning()
        return positions[:, None, :, None] * self.turning()

    def on_axes(self, positions: Array) -> Array:
        """The position by which each pair turns, `[b length pair]`, from `[b length 3]`."""
        return positions[..., self.axis_of_pairs()]

    def interleaved(self) -> bool:
        return bool(self.argument("neighbours" if self.config() else "interleaved"))

    def pairs(self) -> tuple[Array, Array]:
        """The components that are rotated together."""
        size = self.rotary_size()
        if self.interleaved():
            return np.arange(0, size, 2), np.arange(1, size, 2)
        return np.arange(size // 2), np.arange(size // 2, size)

    def turn(self, heads: Array, angles: Array) -> Array:
        first, second = self.pairs()
        factor = self.attention_factor()
        cos, sin = ((factor * f(angles)).astype(self.wide) for f in (np.cos, np.sin))
        turned = heads.copy()
        turned[..., first] = heads[..., first] * cos - heads[..., second] * sin
        turned[..., second] = heads[..., first] * sin + heads[..., second] * cos
        return turned

    def rotated(self, side: str, heads: Array, positions: Array) -> Array:
        if not self.turns():
            return heads
        return self.hold(self.turn(heads, self.angles(positions)))

    # Forward: what is done with logits.

    def cap(self) -> Array:
        return self.argument("soft_cap")

    def capped(self, logits: Array) -> Array:
        cap = self.cap()
        return logits if cap is None else self.wide(cap) * np.tanh(logits / self.wide(cap))

    def slopes(self) -> Array:
        """`[1 h 1 1]`, or None."""
        slopes = self.argument("slopes")
        return None if slopes is None else self.read(slopes)[None, :, None, None]

    def far(self) -> Array:
        """How far each key is from each query, `[b 1 q k]`."""
        return np.abs(self.distance()).astype(self.wide)

    def sloped(self, logits: Array) -> Array:
        slopes = self.slopes()
        return logits if slopes is None else logits - slopes * self.far()

    # Masks.

    def visible(self) -> Iterator[Array]:
        yield from super().visible()
        if self.argument("window") is not None:
            yield self.or_global("window", self.in_window(self.distance()))
        if self.argument("dilation") is not None:
            yield self.or_global("dilation", self.in_steps(self.distance()))
        if self.argument("chunk") is not None:
            seen = self.in_chunk(self.query_positions(), self.key_positions())
            yield self.or_global("chunk", seen)
        if self.argument("tree") is not None:
            yield self.in_tree()
        if self.argument("key_lengths") is not None:
            yield self.within_length()
        if self.argument("query_lengths") is not None:
            yield self.queries_in_use()
        if self.segments("query") is not None:
            yield self.same_segment()

    def triangle(self) -> Array:
        seen = self.distance() <= self.diagonal
        return seen if self.argument("spans") is None else self.relaxed(seen)

    def relaxed(self, seen: Array) -> Array:
        """What is causal, and the later keys of a query's span, `[b 1 q k]`."""
        return seen | self.in_span(self.query_spans(), self.key_spans())[:, None]

    def key_spans(self) -> Array:
        """The span of each key, `[b k]`; 0 for none."""
        return self.argument("spans")

    def query_spans(self) -> Array:
        """The span of each query, `[b q]`: that of the key at its position."""
        return self.spans_at(self.query_positions())

    def spans_at(self, positions: Array) -> Array:
        """The spans of the keys at some positions, `[b q]`; 0 where there is no key."""
        return self.told_at(self.key_spans(), positions)

    def told_at(self, of_keys: Array, positions: Array) -> Array:
        """What is told of the keys at some positions, `[b q]`; 0 where there is no key."""
        there = (positions >= 0) & (positions < self.keys)
        at = np.clip(positions, 0, self.keys - 1)
        return np.where(there, np.take_along_axis(of_keys, at, axis=1), 0)

    def in_span(self, queries: Array, keys: Array) -> Array:
        """Whether a query and a key are in the same span, `[b q k]`."""
        return (queries[:, :, None] == keys[:, None]) & (keys[:, None] > 0)

    def window(self) -> tuple[int, int]:
        """How many keys before and after are seen; -1 for all."""
        before, after = self.argument("window")
        return before, after

    def in_window(self, distance: Array) -> Array:
        before, after = self.window()
        seen = np.ones(distance.shape, bool)
        if before >= 0:
            seen &= distance >= -before
        return seen & (distance <= after) if after >= 0 else seen

    def dilation(self) -> int:
        """How many positions are between keys that are seen, the last included."""
        return self.argument("dilation")

    def in_steps(self, distance: Array) -> Array:
        return distance % self.dilation() == 0

    def or_global(self, rule: str, seen: Array) -> Array:
        """What a rule shows, and what it cannot hide: to and from global tokens, `[b 1 q k]`."""
        if self.argument("global_tokens") is None:
            return seen
        rows, columns = self.global_queries(), self.global_keys()
        return seen | rows[:, None, :, None] | columns[:, None, None]

    def global_keys(self) -> Array:
        """Which keys are global, `[b k]`."""
        return self.argument("global_tokens") > 0

    def global_queries(self) -> Array:
        """Which queries are, `[b q]`: those at the indices of such keys, wherever they stand."""
        own = self.index("query") + (self.before_queries() if self.at_end() else 0)
        return self.told_at(self.global_keys(), own) > 0

    def chunk_size(self) -> int:
        return self.argument("chunk")

    def in_chunk(self, queries: Array, keys: Array) -> Array:
        size = self.chunk_size()
        return (queries[:, :, None] // size == keys[:, None] // size)[:, None]

    def in_tree(self) -> Array:
        """Whether a key is cached, or drafted and in the line of the query, `[b 1 q k]`."""
        at = np.broadcast_to(self.drafted(), (self.batch, self.keys))
        there = (at >= 0) & (at < self.queries)
        index = np.where(there, at, 0)[:, None]
        line = np.take_along_axis(self.line(self.parents()), index, axis=2) & there[:, None]
        return (line | self.cached_keys(at)[:, None])[:, None]

    def parents(self) -> Array:
        """The parent of each drafted token, `[b q]`; -1 for none."""
        return self.argument("tree")

    def drafted(self) -> Array:
        """Which query each key is, `[b k]`; negative for cached keys."""
        return np.arange(self.keys) - self.before_queries()

    def cached_keys(self, drafted: Array) -> Array:
        """Which keys all drafted tokens see, `[b k]`."""
        return drafted < 0

    def line(self, parents: Array) -> Array:
        """Each drafted token and its ancestors, `[b q q]`."""
        line = np.broadcast_to(
            np.eye(self.queries, dtype=bool), (self.batch,) + 2 * (self.queries,)
        )
        line = line.copy()
        for entry, token in np.ndindex(parents.shape):
            if parents[entry, token] >= 0:
                line[entry, token] |= line[entry, parents[entry, token]]
        return line

    def keys_in_use(self) -> Array:
        return (np.arange(self.keys) < self.used("key")[:, None])[:, None, None]

    def within_length(self) -> Array:
        """What the lengths of keys leave visible."""
        return self.keys_in_use()

    def queries_in_use(self) -> Array:
        return (np.arange(self.queries) < self.used("query")[:, None])[:, None, :, None]

    def same_segment(self) -> Array:
        queries, keys = self.segments("query"), self.segments("key")
        return (queries[:, :, None] == keys[:, None, :])[:, None]

    # Softmax.

    def sinks(self) -> Array:
        """The logits of the sinks, `[1 h 1 1]`, or None."""
        sinks = self.argument("sinks")
        return None if sinks is None else self.read(sinks)[None, :, None, None]

    def sink_power(self, peak: Array) -> Array:
        """What the sinks add to the normaliser, `[b h q 1]`."""
        sinks = self.sinks()
        if sinks is None:
            return np.zeros_like(peak)
        return np.broadcast_to(self.powers(sinks - peak), peak.shape)

    def peak(self, logits: Array) -> Array:
        peak, sinks = logits.max(axis=-1, keepdims=True, initial=-np.inf), self.sinks()
        peak = peak if sinks is None else np.maximum(peak, sinks)
        return np.where(np.isfinite(peak), peak, self.wide(0))

    def softmax(self, logits: Array) -> Array:
        peak = self.peak(logits)
        powers, sink = self.powers(logits - peak), self.sink_power(peak)
        total = self.total(powers) + sink
        self.sink_share = sink / np.where(total > 0, total, self.wide(1))
        return self.normalised(powers, total)

    def splits(self) -> list[tuple[int, int]]:
        """The parts into which the keys are split."""
        if self.queries > self.few or self.keys < 2:
            return [(0, self.keys)]
        return [(0, self.keys // 2), (self.keys // 2, self.keys)]

    def part(self, logits: Array, v: Array) -> tuple[Array, Array, Array]:
        """Context, normaliser and maximum over a part of the keys, not divided yet."""
        highest = np.full((*logits.shape[:-1], 1), -np.inf, self.wide)
        total = np.zeros_like(highest)
        context = np.zeros((*logits.shape[:-1], v.shape[-1]), self.wide)
        for start in range(0, logits.shape[-1], self.tile):
            tile = logits[..., start : start + self.tile]
            before, highest = highest, np.maximum(highest, self.highest(tile))
            peak = np.where(np.isfinite(highest), highest, self.wide(0))
            powers, shrink = self.powers(tile - peak), self.shrink(before, peak)
            total = total * shrink + powers.sum(axis=-1, keepdims=True)
            values = v[:, :, start : start + self.tile]
            context = context * shrink + self.product("bhqk,bhkd->bhqd", powers, values)
        return context, total, highest

    def fused(self, logits: Array, v: Array) -> tuple[Array, Array]:
        parts = [self.part(logits[..., a:b], v[:, :, a:b]) for a, b in self.splits()]
        highest = np.maximum.reduce([highest for _, _, highest in parts])
        sinks = self.sinks()
        highest = highest if sinks is None else np.maximum(highest, sinks)
        peak = np.where(np.isfinite(highest), highest, self.wide(0))
        shares = [self.shrink(highest, peak) for _, _, highest in parts]
        total = sum(s * total for s, (_, total, _) in zip(shares, parts, strict=True))
        context = sum(s * context for s, (context, _, _) in zip(shares, parts, strict=True))
        sink = self.merged_sink(peak, len(parts))
        total = total + sink
        safe = np.where(total > 0, total, self.wide(1))
        self.sink_share = sink / safe
        self.largest = peak
        return self.rescaled(context, safe), self.log_normaliser(peak, safe)

    def merged_sink(self, peak: Array, parts: int) -> Array:
        """The sinks count once, however many parts there are."""
        return self.sink_power(peak)

    # A cache.

    def can_be_cached(self) -> bool:
        """Whether the keys before the queries can be a cache: the flag says where they end.

        Frequencies that depend on the length turn keys that are stored anew with each query.
        """
        ragged = ("key_lengths", "query_lengths", "query_segments", "query_positions")
        aligned = self.at_end() and self.given.causal
        aligned = aligned and self.kind() not in ("dynamic", "longrope")
        return aligned and all(
            self.argument(n) is None for n in (*ragged, "spans", "tree", "global_tokens")
        )

    def dialogue(self) -> Array:
        """The context where the first keys were stored before, and queries come in chunks."""
        whole, past = (self.queries, self.keys), self.keys - self.queries
        q, k, v = self.q, self.k, self.v
        size = (self.batch, k.shape[1], self.keys + self.spare)
        self.buffers = [np.full((*size, x.shape[-1]), np.nan, self.wide) for x in (k, v)]
        self.append(k[:, :, :past], v[:, :, :past], 0)
        context = []
        for start in range(past, whole[1], self.chunk):
            stop = min(start + self.chunk, whole[1])
            self.span = slice(start - past, stop - past), slice(0, self.length_after(stop))
            self.append(k[:, :, start:stop], v[:, :, start:stop], self.written_at(start))
            keys, values = self.history()
            self.queries, self.keys = stop - start, keys.shape[2]
            new = self.new_positions(start, stop)
            self.q = self.prepared("query", q[:, :, start - past : stop - past], new)
            self.all_k, self.all_v = self.repeat(keys), self.repeat(values)
            self.one_pass()
            self.weights = None
            context.append(self.context)
        self.queries, self.keys = whole
        return np.concatenate(context, axis=2)

    span: tuple[slice, slice] | None = None

    def append(self, k: Array, v: Array, start: int) -> None:
        """Store new keys, which are rotated once, and values."""
        stop = start + k.shape[2]
        keys = self.prepared("key", k, self.stored_positions(start, stop))
        self.buffers[0][:, :, start:stop] = keys
        self.buffers[1][:, :, start:stop] = v

    def written_at(self, start: int) -> int:
        """Where the keys of a chunk are stored."""
        return start

    def length_after(self, stop: int) -> int:
        """How many keys of the buffer are read."""
        return stop

    def history(self) -> list[Array]:
        """The keys and values that a chunk sees."""
        assert self.span is not None
        return [buffer[:, :, self.span[1]] for buffer in self.buffers]

    def new_positions(self, start: int, stop: int) -> Array:
        """Of the queries of a chunk, `[b length]`, or `[b length 3]`."""
        axes = self.axes("key")
        if axes is not None:
            return axes[:, start:stop]
        return np.broadcast_to(np.arange(start, stop), (self.batch, stop - start))

    def stored_positions(self, start: int, stop: int) -> Array:
        """Of keys that are stored."""
        return self.new_positions(start, stop)

    def cut(self, array: Array) -> Array:
        """The part of a mask that is about the present chunk."""
        if self.span is None:
            return array
        rows, columns = self.span
        array = array if array.shape[-2] == 1 else array[..., rows, :]
        return array if array.shape[-1] == 1 else array[..., columns]

    def padding(self, mask: Array) -> Array:
        return self.cut(super().padding(mask))

    def mask(self, mask: Array) -> Array:
        return self.cut(mask)

    def additive(self, mask: Array) -> Array:
        return self.cut(mask)

    def bias(self, bias: Array) -> Array:
        return self.cut(bias)

    # Backward.

    def d_attention(self, of_weights: Array, found: dict[str, Array]) -> tuple[Array, Array, Array]:
        weights = self.weights_again()
        d_v = self.product("bhqk,bhqd->bhkd", weights * self.kept, self.d_context)
        d_weights = self.product("bhqd,bhkd->bhqk", self.d_context, self.all_v) * self.kept
        if of_weights is not None:
            d_weights = self.d_returned(d_weights, self.read(of_weights))
        d_logits = self.d_softmax(weights, d_weights)
        if self.sinks() is not None:
            found["mask.sinks"] = self.d_sinks(self.row(weights, d_weights))
        for name in ("mask", "bias"):
            array = self.argument(name)
            if array is not None and array.dtype != np.bool_:
                found[f"mask.{name}"] = self.d_added(d_logits, array.shape)
        d_scores = self.d_scaled(self.d_capped(d_logits))
        d_q, d_k = self.d_score(d_scores, found)
        d_k, d_v = self.gather(self.hold(d_k)), self.gather_values(self.hold(d_v))
        d_q = self.d_prepared("query", self.hold(d_q), found)
        return d_q, self.d_prepared("key", d_k, found), self.hold(d_v)

    def d_sinks(self, row: Array) -> Array:
        """Of the sinks, `[h]`, from the row term."""
        return -(self.sink_share * row).sum(axis=(0, 2, 3))

    def d_capped(self, d_logits: Array) -> Array:
        """Of the logits before the cap."""
        cap = self.cap()
        return d_logits if cap is None else d_logits * self.slope_of_cap(self.wide(cap))

    def slope_of_cap(self, cap: Array) -> Array:
        return 1 - np.tanh(self.uncapped / cap) ** 2

    def d_prepared(self, side: str, gradient: Array, found: dict[str, Array]) -> Array:
        """Of projected heads, from that of prepared ones."""
        if self.turns():
            gradient = self.hold(self.d_rotated(side, gradient))
        if self.gain(side) is None:
            return gradient
        found[f"mask.{side}_norm"] = self.d_gain(side, gradient)
        return self.hold(self.d_normed(side, gradient))

    def d_rotated(self, side: str, gradient: Array) -> Array:
        """The inverse rotation."""
        return self.turn(gradient, -self.angles(self.rotary_positions(side)))

    def d_gain(self, side: str, gradient: Array) -> Array:
        plain = self.plain[side]
        return (gradient * plain / self.size_of(plain)).sum(axis=(0, 1, 2))

    def d_normed(self, side: str, gradient: Array) -> Array:
        plain, scaled = self.plain[side], gradient * self.read(self.gain(side))
        size = self.size_of(plain)
        return scaled / size - plain * self.d_size(plain, scaled) / size**3

    def d_size(self, plain: Array, scaled: Array) -> Array:
        return (plain * scaled).mean(axis=-1, keepdims=True)
