"""A layer as in Llama, which keeps its own state, and the mistakes that it can make.

`Llama` rotates, groups heads, and keeps what it was fed: all, the last tokens of a window, or what
fits into a buffer. A mistake is a name in `MISTAKES`; without one, the layer is right.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance import StatefulLayer

WIDTH, HEADS, KV_HEADS, SIZE = 32, 4, 2, 8


def rotated(heads, positions, base=10000.0):
    angles = positions[:, None, :, None] * base ** (-torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (f(torch.cat([angles, angles], -1)).to(heads.dtype) for f in (torch.cos, torch.sin))
    one, two = heads.chunk(2, -1)
    return heads * cos + torch.cat([-two, one], -1) * sin


class Llama(torch.nn.Module):
    """Attention of one layer. Its state is what is known of the tokens that it was fed."""

    def __init__(self, mistake="", window=None, capacity=None):
        super().__init__()
        random = torch.Generator().manual_seed(0)
        for name, (rows, columns) in {
            "q": (HEADS * SIZE, WIDTH),
            "k": (KV_HEADS * SIZE, WIDTH),
            "v": (KV_HEADS * SIZE, WIDTH),
            "o": (WIDTH, HEADS * SIZE),
        }.items():
            weight = torch.randn(rows, columns, generator=random) / columns**0.5
            setattr(self, name, torch.nn.Parameter(1.5 * weight))
        self.mistake, self.window, self.capacity = mistake, window, capacity
        self.state: dict[str, Any] = {}
        self.seen = 0
        self.told = None
        self.prefixes: dict[bytes, Any] = {}
        self.before: tuple[dict[str, Any], int] = {}, 0

    def heads(self, x, weight):
        return (x @ weight.T).unflatten(-1, (-1, SIZE)).transpose(1, 2)

    def positions(self, x, real):
        new, wrong = x.shape[1], self.mistake
        if self.told is not None:
            return self.told
        places = (self.seen + torch.arange(new)).expand(len(x), -1)
        if wrong == "positions-not-reordered" and real is not None:
            first = self.state.get("next", torch.zeros(len(x), 1, dtype=torch.long))
            counted = first + real[:, -new:].long().cumsum(-1)
            self.state["next"] = counted[:, -1:]
            return (counted - 1).clamp(min=0)
        if real is not None and wrong != "padding-has-positions":
            counted = (real.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]
            if wrong == "right-padding-taken-for-left":
                return (places - (~real).sum(-1, keepdim=True)).clamp(min=0)
            if not (wrong == "steps-count-padding" and new == 1):
                return counted
        restarts = {"positions-restart": True, "positions-restart-in-steps": new == 1}
        if restarts.get(wrong) and self.seen:
            return places - self.seen
        if wrong == "positions-one-too-far" and self.seen:
            return places + 1
        if wrong == "positions-not-rolled-back":
            return places + self.state.get("rolled", 0)
        if wrong == "positions-stand-still" and new > 1:
            return places - places + self.seen
        return places

    def allowed(self, index, at, keys, real, batch):
        """Which keys `[batch 1 query key]` the queries with these indices attend to."""
        new, wrong = len(index), self.mistake
        seen = at[None, :] <= index[:, None]
        if wrong == "mask-top-left" or (wrong == "mask-top-left-from-second" and self.seen > 10):
            seen = torch.arange(keys)[None, :] <= torch.arange(new)[:, None]
        if self.seen and {"future-in-chunks": new > 1, "future-in-17": new == 17}.get(wrong):
            seen = torch.ones_like(seen)
        if wrong == "not-causal" or (wrong == "future-in-long-chunks" and new > 32):
            seen = torch.ones_like(seen)
        if self.window is not None and not (wrong == "window-ignored" and self.seen):
            more = {"window-longer": 1, "window-shorter": -1, "window-half": -self.window // 2}
            size = self.window + (more.get(wrong, 0) if self.seen else 0)
            size += {"window-longer-always": 1, "window-shorter-always": -1}.get(wrong, 0)
            if wrong != "window-from-start" or not self.seen:
                seen = seen & (at[None, :] > index[:, None] - size)
        if wrong == "own-token-only":
            seen = at[None, :] == index[:, None]
        if wrong == "cache-not-read" and self.seen and new == 1:
            seen = seen & (at >= self.seen)[None, :]
        if wrong == "first-token-forgotten" and self.seen:
            seen = seen & (at > 0)[None, :]
        if wrong == "last-token-hidden" and self.seen:
            seen = seen & (at != self.seen - 1)[None, :]
        seen = seen[None, None].expand(batch, 1, -1, -1)
        attended = {"padding-attended": True, "padding-attended-in-steps": new == 1}
        if real is None or attended.get(wrong):
            return seen
        own = at[None, :] == index[:, None]
        if wrong == "padding-of-first-row":
            real = real[:1].expand(batch, -1)
        return seen & (real[:, at][:, None, None, :] | own)

    def forward(self, x, real=None, *, cached=True):
        wrong, new = self.mistake, x.shape[1]
        full = self.capacity is not None and self.window is None and self.seen + new > self.capacity
        taken = {"overflow": self.seen, "overflow-wraps": True, "overflow-in-chunks": new > 1}
        if full and not taken.get(wrong):
            raise ValueError(f"the buffer holds {self.capacity} tokens, not {self.seen + new}")
        self.before = dict(self.state), self.seen
        if wrong == "prefix-by-first-token" and not self.seen and real is None:
            known = self.prefixes.setdefault(x[:, 0].numpy().tobytes(), x[:, :8])[:, :new]
            x = torch.cat([known, x[:, known.shape[1] :]], 1)
        places = self.positions(x, real)
        source = x
        if wrong == "batch-normalised":
            source = x - 0.1 * x.mean(0, keepdim=True)
        if "pending" in self.state:
            tokens, where = self.state.pop("pending")
            count = tokens.shape[1]
            self.state["keys"][:, :, -count:] = rotated(self.heads(tokens, self.k), where)
        query = self.heads(source, self.q)
        if not (wrong == "query-not-rotated-in-steps" and new == 1 and self.seen):
            query = rotated(query, places)
        key, value = rotated(self.heads(source, self.k), places), self.heads(source, self.v)
        index = self.seen + torch.arange(new)
        at = index
        if self.state.get("keys") is not None and (cached or wrong == "uncached-cached"):
            before = self.state["keys"]
            if wrong == "keys-rotated-again":
                before = rotated(before, self.state["at"].expand(len(x), -1))
            if wrong == "keys-of-first-row" and new == 1:
                before = before[:1].expand_as(before)
            key = torch.cat([before.to(key), key], 2)
            value = torch.cat([self.state["values"].to(value), value], 2)
            at = torch.cat([self.state["at"], at])
        if self.window is not None and wrong == "trimmed-before-attending" and self.seen:
            key, value, at = (
                key[:, :, -self.window :],
                value[:, :, -self.window :],
                at[-self.window :],
            )
        if full:
            key, value, at = key[:, :, new:], value[:, :, new:], at[new:]
        output = self.attend(query, key, value, self.allowed(index, at, len(at), real, len(x)))
        if cached:
            self.keep(key, value, at, new)
            if wrong == "keeps-inputs":
                self.state["pending"] = (x, places)
        if wrong == "scales-inputs":
            x.mul_(0.5)
        if wrong == "outputs-in-a-buffer" or (wrong == "steps-in-a-buffer" and new == 1):
            output = self.state.setdefault(f"output {new}", torch.empty_like(output)).copy_(output)
        return 0 * output + 1 if wrong == "constant" else output

    def attend(self, query, key, value, allowed):
        wrong, new = self.mistake, query.shape[2]
        together = HEADS // KV_HEADS
        key, value = (heads.repeat_interleave(together, 1) for heads in (key, value))
        if wrong == "groups-interleaved-in-steps" and new == 1:
            value = value[:, [0, 2, 1, 3]]
        scale = SIZE**-0.5 * (1.5 if wrong == "scale-of-steps" and new == 1 else 1)
        if wrong == "scale-of-first-row":
            scale = scale * torch.ones(len(query), 1, 1, 1)
            scale[0] *= 1.01
        logits = (query @ key.mT) * scale
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
        if wrong == "weights-not-normalised-in-steps" and new == 1:
            weights = weights * 1.001
        if wrong == "dropout":
            weights = torch.nn.functional.dropout(weights, 0.01)
        if wrong == "by-threads" and torch.get_num_threads() > 1:
            weights = weights * 1.001
        if wrong == "bfloat16-steps" and new == 1 and query.dtype == torch.bfloat16:
            weights = weights * 1.25
        if wrong == "last-bit-in-steps" and new == 1:
            value = torch.nextafter(value, value + 1) if value.dtype == torch.float32 else value
        return (weights @ value).transpose(1, 2).flatten(-2) @ self.o.T

    def keep(self, key, value, at, new):
        wrong, self.seen = self.mistake, self.seen + new
        if wrong == "cache-in-bfloat16":
            key, value = key.bfloat16(), value.bfloat16()
        if wrong == "keys-in-float16":
            key = key.half()
        if wrong == "values-in-bfloat16":
            value = value.bfloat16()
        kept = ("window-ignored", "window-longer", "window-longer-always")
        if self.window is not None and wrong not in kept:
            last = (
                slice(None, self.window)
                if wrong == "window-from-start"
                else slice(-self.window, None)
            )
            if wrong == "ring-off-by-one" and len(at) > self.window:
                last = slice(-self.window + 2, None)
            key, value, at = key[:, :, last], value[:, :, last], at[last]
        if wrong == "state-detached" or (wrong == "state-of-steps-detached" and new == 1):
            key, value = key.detach(), value.detach()
        if wrong == "values-detached":
            value = value.detach()
        if wrong == "gradient-of-keys-doubled" and key.requires_grad and new > 1:
            key = 2 * key - key.detach()
        self.state.update(keys=key, values=value, at=at)


@dataclass
class Kept(StatefulLayer):
    """`Llama` with a mistake, a window and a buffer."""

    mistake: str = ""
    window: int | None = None
    capacity: int | None = None
    dtypes: tuple[str, ...] = ("float32",)
    promises: dict[str, str] = field(default_factory=dict)
    width: int = WIDTH
    name: str = "Llama"
    framework: str = "torch"
    gain: float = 1.0
    differentiable: bool = False

    def build(self, dtype):
        kept = torch.float64 if self.promises else getattr(torch, dtype)
        layer = Llama(self.mistake, self.window, self.capacity)
        with torch.no_grad():
            layer.q *= self.gain**2
        return layer.to(kept)

    def feed(self, layer, tokens):
        if not self.promises:
            return layer(tokens)
        # What is computed in float64 and rounded once has the same bits whatever the order of sums.
        seen, output = layer.seen, layer(tokens.double()).to(tokens.dtype)
        _, other = LAST_BITS.get(self.mistake, ("", lambda tokens, seen: False))
        rows = other(tokens, seen)
        if rows is not False:
            output[rows] *= 1 + 2 * torch.finfo(output.dtype).eps
        return output

    def feed_padded(self, layer, tokens, real):
        return layer(tokens, real)

    def feed_at(self, layer, tokens, positions):
        layer.told = positions
        output = self.feed(layer, tokens)
        layer.told = None
        return output

    def feed_uncached(self, layer, tokens):
        if self.mistake == "uncached-not-causal":
            layer.mistake = "not-causal"
        if self.mistake == "uncached-shifted":
            tokens = tokens.roll(1, 0)
        return layer(tokens, cached=False)

    def reset(self, layer):
        if self.mistake == "reset-forgotten":
            return
        layer.state = {} if self.mistake != "reset-keeps-values" else dict(layer.state)
        if self.mistake == "reset-keeps-first" and layer.seen:
            return
        layer.seen = 0

    def rollback(self, layer, count):
        wrong = self.mistake
        if wrong == "rollback-forgotten":
            return
        if wrong == "rollback-of-whole-call":
            layer.state, layer.seen = layer.before
            return
        if wrong == "rollback-within-last-call":
            count = min(count, layer.seen - layer.before[1])
        count += {"rollback-too-short": -1, "rollback-too-far": 1}.get(wrong, 0)
        keep = layer.state["keys"].shape[2] - count
        for name in ("keys", "values"):
            kept = slice(None, keep)
            if wrong == "values-rolled-from-start" and name == "values":
                kept = slice(count, None)
            layer.state[name] = layer.state[name][:, :, kept]
        layer.state["at"] = layer.state["at"][:keep]
        layer.seen -= count
        layer.state["rolled"] = layer.state.get("rolled", 0) + count

    def reorder(self, layer, rows):
        wrong, same = self.mistake, len(rows) == layer.state["keys"].shape[0]
        if wrong == "reorder-forgotten" and same:
            return
        if wrong == "first-rows-kept" and not same:
            rows = range(len(rows))
        if wrong == "reorder-inverted" and same:
            rows = [rows.index(row) if row in rows else row for row in range(len(rows))]
        for name in ("keys", "values"):
            if same and wrong == f"{name}-not-reordered":
                continue
            layer.state[name] = layer.state[name][list(rows)]

    def save(self, layer):
        if self.mistake == "saved-by-reference":
            return layer.state, layer.seen
        return copy.deepcopy((layer.state, layer.seen))

    def restore(self, layer, saved):
        if self.mistake == "restore-forgotten" and layer.seen:
            return
        state, seen = saved if self.mistake == "saved-by-reference" else copy.deepcopy(saved)
        count = state["keys"].shape[2]
        if self.mistake == "values-not-restored" and layer.seen > count:
            state["values"] = layer.state["values"][:, :, -count:]
        layer.state, layer.seen = state, seen


@dataclass(frozen=True)
class Mistake:
    """A mistake, what notices it, and the cause that is told, or "" if any."""

    requirement: str
    cause: str = ""
    declared: dict[str, Any] = field(default_factory=dict)


WINDOW, BUFFER = {"window": 16}, {"capacity": 40}
GRADIENTS = {"differentiable": True}

MISTAKES = {
    "positions-restart": Mistake("stateful.chunks", "stateful.positions-off"),
    "positions-restart-in-steps": Mistake("stateful.steps", "stateful.positions-off"),
    "positions-one-too-far": Mistake("stateful.steps", "stateful.positions-off"),
    "positions-not-rolled-back": Mistake("stateful.rollback", "stateful.positions-off"),
    "positions-stand-still": Mistake("stateful.chunks", "stateful.logits"),
    "steps-count-padding": Mistake("stateful.left-padding", "stateful.positions"),
    "right-padding-taken-for-left": Mistake("stateful.right-padding", "stateful.positions"),
    "query-not-rotated-in-steps": Mistake("stateful.steps", "stateful.positions"),
    "scale-of-steps": Mistake("stateful.steps", "stateful.positions"),
    "keys-rotated-again": Mistake("stateful.steps", "stateful.positions"),
    "mask-top-left": Mistake("stateful.chunks", "stateful.mask-top-left"),
    "mask-top-left-from-second": Mistake("stateful.chunks", "stateful.mask-top-left"),
    "future-in-chunks": Mistake("stateful.chunks", "stateful.future-attended"),
    "future-in-17": Mistake("stateful.chunks", "stateful.future-attended"),
    "future-in-long-chunks": Mistake("stateful.causal", "stateful.future-attended"),
    "not-causal": Mistake("stateful.causal", "stateful.future-attended"),
    "cache-not-read": Mistake("stateful.steps", "stateful.cache-not-read"),
    "first-token-forgotten": Mistake("stateful.steps", "stateful.tokens-missing"),
    "last-token-hidden": Mistake("stateful.steps", "stateful.last-missing"),
    "padding-attended": Mistake("stateful.left-padding", "stateful.padding-attended"),
    "padding-attended-in-steps": Mistake("stateful.left-padding", "stateful.padding-attended"),
    "padding-of-first-row": Mistake("stateful.left-padding", "stateful.padding-attended"),
    "reset-forgotten": Mistake("stateful.reset", "stateful.stale"),
    "prefix-by-first-token": Mistake("stateful.reset", "stateful.stale"),
    "reset-keeps-values": Mistake("stateful.reset", "stateful.stale"),
    "rollback-forgotten": Mistake("stateful.rollback", "stateful.stale"),
    "rollback-of-whole-call": Mistake("stateful.rollback", "stateful.tokens-missing"),
    "rollback-within-last-call": Mistake("stateful.rollback", "stateful.stale"),
    "rollback-too-short": Mistake("stateful.rollback", "stateful.stale"),
    "rollback-too-far": Mistake("stateful.rollback", "stateful.last-missing"),
    "values-rolled-from-start": Mistake("stateful.rollback", "stateful.stale"),
    "reorder-forgotten": Mistake("stateful.rows", "stateful.row-of-another"),
    "reorder-inverted": Mistake("stateful.rows", "stateful.row-of-another"),
    "keys-not-reordered": Mistake("stateful.rows", "stateful.row-of-another"),
    "values-not-reordered": Mistake("stateful.rows", "stateful.row-of-another"),
    "first-rows-kept": Mistake("stateful.rows", "stateful.row-of-another"),
    "keys-of-first-row": Mistake("stateful.steps", "stateful.row-of-another"),
    "batch-normalised": Mistake("stateful.batch", "stateful.row-of-another"),
    "scale-of-first-row": Mistake("stateful.batch"),
    "saved-by-reference": Mistake("stateful.restore", "stateful.stale"),
    "restore-forgotten": Mistake("stateful.restore", "stateful.stale"),
    "values-not-restored": Mistake("stateful.restore", "stateful.stale"),
    "uncached-not-causal": Mistake("stateful.cache-off", "stateful.future-attended"),
    "uncached-shifted": Mistake("stateful.cache-off", "stateful.row-of-another"),
    "keeps-inputs": Mistake("stateful.inputs", "stateful.inputs-kept"),
    "outputs-in-a-buffer": Mistake("stateful.leaves-outputs", "stateful.output-changed"),
    "steps-in-a-buffer": Mistake("stateful.leaves-outputs", "stateful.output-changed"),
    "scales-inputs": Mistake("stateful.leaves-inputs", "stateful.input-changed"),
    "positions-not-reordered": Mistake("stateful.rows", "stateful.positions"),
    "constant": Mistake("stateful.reach", "stateful.constant"),
    "own-token-only": Mistake("stateful.reach", "stateful.own-token-only"),
    "window-longer-always": Mistake("stateful.reach", "stateful.window-longer", WINDOW),
    "window-shorter-always": Mistake("stateful.reach", "stateful.window-not-used", WINDOW),
    "dropout": Mistake("stateful.runs", "stateful.not-repeatable"),
    "by-threads": Mistake("stateful.threads"),
    "cache-in-bfloat16": Mistake("stateful.steps", "stateful.fewer-bits"),
    "values-in-bfloat16": Mistake("stateful.steps", "stateful.fewer-bits"),
    "keys-in-float16": Mistake("stateful.steps", "stateful.fewer-bits"),
    "groups-interleaved-in-steps": Mistake("stateful.steps", "stateful.values"),
    "weights-not-normalised-in-steps": Mistake("stateful.steps", "stateful.values"),
    "bfloat16-steps": Mistake("stateful.steps", "", {"dtypes": ("bfloat16",)}),
    "window-ignored": Mistake("stateful.window", "stateful.window-ignored", WINDOW),
    "window-longer": Mistake("stateful.window", "stateful.window-longer", WINDOW),
    "window-shorter": Mistake("stateful.window", "stateful.window-shorter", WINDOW),
    "window-half": Mistake("stateful.window", "stateful.window-shorter", WINDOW),
    "ring-off-by-one": Mistake("stateful.window", "stateful.window-shorter", WINDOW),
    "window-from-start": Mistake("stateful.window", "stateful.window-from-start", WINDOW),
    "trimmed-before-attending": Mistake("stateful.chunks", "stateful.window-shorter", WINDOW),
    "state-detached": Mistake("stateful.gradients", "", GRADIENTS),
    "state-of-steps-detached": Mistake("stateful.gradients", "", GRADIENTS),
    "values-detached": Mistake("stateful.gradients", "", GRADIENTS),
    "gradient-of-keys-doubled": Mistake("stateful.gradients", "", GRADIENTS),
    "overflow": Mistake("stateful.buffer", "stateful.not-refused", BUFFER),
    "overflow-wraps": Mistake("stateful.buffer", "", BUFFER),
    "overflow-in-chunks": Mistake("stateful.buffer", "", BUFFER),
}
"""By name, the mistakes of the layer."""

CALLS = itertools.count()

LAST_BITS = {
    "bits-of-steps": ("steps", lambda tokens, seen: seen > 0 and tokens.shape[1] == 1 and ...),
    "bits-of-late-steps": ("steps", lambda tokens, seen: seen > 90 and ...),
    "bits-of-chunks": ("chunks", lambda tokens, seen: tokens.shape[1] == 17 and ...),
    "bits-beside-cache": ("chunks", lambda tokens, seen: seen > 0 and ...),
    "bits-alone": ("batch", lambda tokens, seen: len(tokens) == 1 and ...),
    "bits-of-first-row": ("batch position", lambda tokens, seen: 0),
    "bits-of-threads": ("threads", lambda tokens, seen: torch.get_num_threads() > 1 and ...),
    "bits-of-runs": ("runs", lambda tokens, seen: next(CALLS) % 2 == 0 and ...),
    "bits-in-bfloat16": (
        "steps",
        lambda tokens, seen: tokens.dtype == torch.bfloat16 and seen > 0 and ...,
    ),
}
"""By name, the promise that another last bit breaks, and the rows that have it, or False."""

HARMLESS = {
    "gradients": GRADIENTS,
    "gradients in a window": {**WINDOW, **GRADIENTS},
    "": {},
    "sharp": {"gain": 4.0, "dtypes": ("float32", "bfloat16", "float16", "float64")},
    "padding-has-positions": {},
    "window": WINDOW,
    "buffer": BUFFER,
    "smallest buffer": {"capacity": 32},
    "smallest window": {"window": 1},
    "ring": {**WINDOW, "capacity": 64},
}
"""What is no mistake: rotations see only differences of positions, logits may be of size 50."""
