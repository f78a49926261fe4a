"""Problems of `test_long`, by name: each shows another kind of defect, in about a second."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from conformance.adapter.base import Adapter
from conformance.definition.problem import Norm, Rotary, RotaryScaling
from conformance.long.calling import call
from conformance.long.checking import CheckedAnswer, check, check_sampled
from conformance.long.problem import Heads, LongProblem, Visibility, draw, generic, sampled

_PACKED = (300, 1, 0, 500, 64, 135)


def norm(size: int) -> Norm:
    """A norm with gains and an epsilon that bfloat16 can represent."""
    gains = 1.25 + np.resize([0.5, -0.25, 0.375, -0.5, 0.0], (2, size))
    return Norm(query=gains[0], key=gains[1][::-1], epsilon=0.25)


def _spans(length: int, *spans: tuple[int, int, int]) -> np.ndarray:
    """The ids of spans, each given by its begin, its end and its id."""
    ids = np.zeros((1, length), np.int64)
    for begin, end, number in spans:
        ids[0, begin:end] = number
    return ids


PROBLEMS = {
    "full": {"queries": 2048, "keys": 2048},
    "full-bfloat16": {"dtype": "bfloat16", "queries": 2048, "keys": 2048},
    "full-float16": {"dtype": "float16", "queries": 1024, "keys": 1024},
    "full-float64": {"dtype": "float64", "queries": 1024, "keys": 1024},
    "causal": {"queries": 3000, "keys": 3000, "sees": Visibility(causal="top-left")},
    "window": {"queries": 2048, "keys": 2048, "sees": Visibility(window=(200, 60))},
    "ragged": {"queries": 1000, "keys": 1100, "head_size": 72},
    "padded": {
        "batch": 2,
        "queries": 700,
        "keys": 1024,
        "sees": Visibility(key_lengths=(1024, 700)),
    },
    "lengths": {
        "batch": 5,
        "queries": 300,
        "keys": 700,
        "sees": Visibility(key_lengths=(385, 700, 0, 384, 600)),
    },
    "lengths-causal": {
        "batch": 4,
        "queries": 600,
        "keys": 600,
        "sees": Visibility(causal="top-left", key_lengths=(257, 600, 0, 256)),
    },
    "lengths-bfloat16": {
        "dtype": "bfloat16",
        "batch": 3,
        "queries": 500,
        "keys": 600,
        "sees": Visibility(key_lengths=(513, 600, 384)),
        "sinks": True,
    },
    "lengths-decoding": {
        "batch": 4,
        "queries": 12,
        "keys": 3000,
        "sees": Visibility(causal="bottom-right", key_lengths=(1025, 2999, 0, 1024)),
    },
    "lengths-far": {
        "batch": 3,
        "queries": 12,
        "keys": 70_000,
        "sees": Visibility(causal="bottom-right", key_lengths=(65_537, 70_000, 32_769)),
        "head_size": 16,
    },
    "packed": {"queries": 1050, "keys": 1000, "sees": Visibility(members=(_PACKED, _PACKED))},
    "packed-causal": {
        "queries": 1000,
        "keys": 1000,
        "sees": Visibility(members=(_PACKED, _PACKED[::-1]), causal="bottom-right"),
    },
    "grouped": {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 400, "keys": 512},
    "decoding": {"queries": 5, "keys": 4000, "sees": Visibility(causal="bottom-right")},
    "decoding-short": {"queries": 3, "keys": 300},
    "sinks": {
        "heads": 4,
        "kv_heads": 2,
        "queries": 600,
        "keys": 600,
        "sees": Visibility(causal="top-left"),
        "sinks": True,
    },
    "capped": {
        "heads": 2,
        "queries": 600,
        "keys": 700,
        "sees": Visibility(causal="bottom-right", window=(300, None)),
        "soft_cap": 5.0,
    },
    "packed-with-sinks-and-cap": {
        "queries": 1050,
        "keys": 1000,
        "sees": Visibility(members=(_PACKED, _PACKED)),
        "sinks": True,
        "soft_cap": 5.0,
    },
    "decoding-with-sinks-and-cap": {
        "heads": 2,
        "queries": 5,
        "keys": 4000,
        "sees": Visibility(causal="bottom-right"),
        "sinks": True,
        "soft_cap": 8.0,
    },
    "sinks-and-cap-bfloat16": {
        "dtype": "bfloat16",
        "heads": 2,
        "queries": 700,
        "keys": 600,
        "sinks": True,
        "soft_cap": 5.0,
    },
    "rotary": {
        "queries": 1500,
        "keys": 1500,
        "sees": Visibility(causal="top-left"),
        "rotary": Rotary(size=32),
    },
    "rotary-packed": {
        "heads": 4,
        "kv_heads": 2,
        "queries": 1050,
        "keys": 1000,
        "sees": Visibility(members=(_PACKED, _PACKED[::-1]), causal="bottom-right"),
        "rotary": Rotary(size=32, pairs="interleaved", base=500_000.0),
    },
    "rotary-far": {
        "queries": 12,
        "keys": 140_000,
        "sees": Visibility(causal="bottom-right"),
        "head_size": 16,
        "rotary": Rotary(size=16),
    },
    "rotary-bfloat16": {
        "dtype": "bfloat16",
        "queries": 900,
        "keys": 1000,
        "rotary": Rotary(size=16),
    },
    "chunk": {
        "queries": 1500,
        "keys": 1500,
        "sees": Visibility(causal="top-left", chunk=400),
    },
    "chunk-packed": {
        "queries": 1000,
        "keys": 1000,
        "sees": Visibility(members=(_PACKED, _PACKED[::-1]), causal="bottom-right", chunk=90),
    },
    "chunk-decoding": {
        "queries": 12,
        "keys": 70_000,
        "sees": Visibility(causal="bottom-right", chunk=3000),
        "head_size": 16,
    },
    "alibi": {
        "heads": 4,
        "kv_heads": 2,
        "queries": 1500,
        "keys": 1500,
        "sees": Visibility(causal="top-left"),
        "slopes": 2.0 ** np.array([-2, -4, -6, -8]),
    },
    "alibi-both-ways": {
        "queries": 1000,
        "keys": 1000,
        "sees": Visibility(members=(_PACKED, _PACKED)),
        "slopes": np.array([2.0**-6]),
    },
    "alibi-packed": {
        "queries": 1000,
        "keys": 1000,
        "sees": Visibility(members=(_PACKED, _PACKED[::-1])),
        "slopes": np.array([2.0**-4]),
    },
    "alibi-far": {
        "queries": 12,
        "keys": 140_000,
        "sees": Visibility(causal="bottom-right"),
        "head_size": 16,
        "slopes": np.array([2.0**-15]),
    },
    "alibi-bfloat16": {
        "dtype": "bfloat16",
        "queries": 900,
        "keys": 1000,
        "slopes": np.array([2.0**-5]),
    },
    "dilation": {
        "queries": 1500,
        "keys": 1500,
        "sees": Visibility(causal="top-left", window=(900, None)),
        "dilation": 7,
    },
    "dilation-decoding": {
        "queries": 12,
        "keys": 70_000,
        "sees": Visibility(causal="bottom-right"),
        "head_size": 16,
        "dilation": 5,
    },
    "global-tokens": {
        "queries": 1500,
        "keys": 1500,
        "sees": Visibility(causal="top-left", window=(200, None)),
        "global_tokens": np.isin(np.arange(1500), (0, 1, 700, 1151))[None].astype(np.int64),
    },
    "global-tokens-both-ways": {
        "queries": 1100,
        "keys": 1100,
        "sees": Visibility(window=(100, 50), chunk=400),
        "global_tokens": np.isin(np.arange(1100), (0, 127, 1099))[None].astype(np.int64),
    },
    "spans": {
        "queries": 1500,
        "keys": 1500,
        "sees": Visibility(causal="top-left"),
        "spans": _spans(1500, (100, 400, 1), (400, 520, 2), (900, 1300, 3), (1301, 1400, 4)),
    },
    "spans-in-window": {
        "heads": 2,
        "queries": 1100,
        "keys": 1100,
        "sees": Visibility(causal="top-left", window=(150, None)),
        "spans": _spans(1100, (0, 310, 1), (500, 900, 2), (1000, 1100, 1)),
    },
    "spans-decoding": {
        "queries": 12,
        "keys": 70_000,
        "sees": Visibility(causal="bottom-right"),
        "head_size": 16,
        "spans": _spans(
            70_000,
            *((200 * i, 200 * i + 150, i + 1) for i in range(340)),
            (69_900, 69_996, 512),
        ),
    },
    "scaling-linear": {
        "queries": 12,
        "keys": 70_000,
        "sees": Visibility(causal="bottom-right"),
        "head_size": 16,
        "rotary": Rotary(size=16),
        "rotary_scaling": RotaryScaling(rope_type="linear", factor=8.0),
    },
    "scaling-yarn": {
        "queries": 12,
        "keys": 70_000,
        "sees": Visibility(causal="bottom-right"),
        "rotary": Rotary(size=32),
        "rotary_scaling": RotaryScaling(
            rope_type="yarn", factor=16.0, original_max_position_embeddings=4096
        ),
    },
    "scaling-llama3": {
        "heads": 4,
        "kv_heads": 2,
        "queries": 1000,
        "keys": 1000,
        "sees": Visibility(causal="top-left"),
        "rotary": Rotary(size=32),
        "rotary_scaling": RotaryScaling(
            rope_type="llama3",
            factor=8.0,
            original_max_position_embeddings=300,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    },
    "norm": {
        "heads": 4,
        "kv_heads": 2,
        "queries": 900,
        "keys": 1000,
        "norm": norm(32),
    },
    "norm-bfloat16": {
        "dtype": "bfloat16",
        "queries": 900,
        "keys": 1000,
        "sees": Visibility(causal="bottom-right"),
        "norm": norm(32),
    },
    "norm-decoding": {
        "queries": 12,
        "keys": 70_000,
        "sees": Visibility(causal="bottom-right"),
        "head_size": 16,
        "norm": norm(16),
        "rotary": Rotary(size=16),
    },
    "norm-far-bfloat16": {
        "dtype": "bfloat16",
        "queries": 40,
        "keys": 2**14,
        "head_size": 16,
        "norm": norm(16),
    },
    "few-queries": {"queries": 40, "keys": 70_000, "head_size": 16},
    "few-keys": {"queries": 70_000, "keys": 100, "head_size": 16},
    "few-queries-bfloat16": {"dtype": "bfloat16", "queries": 40, "keys": 2**15, "head_size": 16},
    "few-keys-bfloat16": {"dtype": "bfloat16", "queries": 2**14, "keys": 40, "head_size": 16},
}

DIRECT = {"norm", "rotary", "slopes", "dilation", "global_tokens", "spans"}
"""The features with which sampled rows are computed directly."""

TILES = {"few-queries-bfloat16": (64, 16), "few-keys-bfloat16": (16, 64)}
"""Queries and keys of a tile, where thousands of tiles are wanted; 64 and 128 elsewhere."""


@cache
def problem(name: str) -> LongProblem | Heads:
    """The problem of this name; float32 and head size 32 unless it says otherwise."""
    given = {"dtype": "float32", "head_size": 32, **PROBLEMS[name]}
    return generic(**given, chosen=rows(name)) if DIRECT & given.keys() else draw(**given)


def rows(name: str) -> np.ndarray:
    """The rows with a cotangent in a problem of samples."""
    return sampled(PROBLEMS[name]["queries"], TILES.get(name, (64, 128))[0])


def compared(name: str, adapter: Adapter, accuracy: str = "A") -> CheckedAnswer:
    """The answer of an implementation to the problem of this name, beside what is expected."""
    given, tile = problem(name), TILES.get(name, (64, 128))[1]
    answered = call(adapter, given)
    if isinstance(given, Heads):
        found = check_sampled(given, rows(name), answered, tile)
        return replace(found, tallies={accuracy: found.decisive(accuracy)})
    return check(given, answered, tile=tile, accuracy=accuracy)
