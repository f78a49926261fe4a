"""Make the cases in which every three choices of features, masks and shapes meet, if they can.

    python tests/covering.py > conformance/cases/covering.toml

Defects live in combinations: a window beside lengths, a sink beside a cap where keys are grouped.
All combinations would be some thousands; a covering array has each combination of three choices in
some fifty cases, and each of two in those of level "core". The table is committed and stays as it
is, because ids last. The library `allpairspy` leaves out half of the combinations of three where
choices exclude each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

Row = tuple[str, ...]
Chosen = tuple[tuple[str, str], ...]

CHOICES: dict[str, tuple[str, ...]] = {
    "family": ("gqa", "self", "narrow"),
    "rule": ("mask", "bias", "top-left", "bottom-right"),
    "window": ("", "window_tight", "window_before"),
    "tokens": ("", "key_lengths", "segments"),
    "rotary": ("", "rotary_halves", "rotary_partial"),
    "cap": ("", "soft_cap"),
    "sinks": ("", "sinks"),
    "alibi": ("", "slopes"),
    "norm": ("", "norm"),
}
"""For each field of a case, what it may be; "" is nothing."""

NAMES = {
    "window_tight": "a window",
    "window_before": "a window of keys before",
    "key_lengths": "lengths",
    "segments": "segments",
    "rotary_halves": "rotary positions",
    "rotary_partial": "rotary positions of a part",
    "soft_cap": "a soft cap",
    "sinks": "sinks",
    "slopes": "slopes",
    "norm": "a norm",
}


def possible(row: Sequence[str]) -> bool:
    """Return whether the first fields of a row go together; the others are not chosen yet.

    The alignment matters where there are more keys than queries, and a window to both sides is one
    to the left under a causal flag. There is no row without any feature.
    """
    chosen = dict(zip(CHOICES, row, strict=False))
    if chosen.get("rule") == "bottom-right" and chosen["family"] != "gqa":
        return False
    if len(row) == len(CHOICES) and not any(row[2:]):
        return False
    causal = chosen.get("rule") in ("top-left", "bottom-right")
    return not (causal and chosen.get("window") == "window_tight") and not (
        "window" in chosen and not causal and chosen["window"] == "window_before"
    )


def combinations(rows: Iterable[Row], size: int) -> set[Chosen]:
    """Return the combinations of `size` choices that some row has."""
    return {
        chosen
        for row in rows
        for chosen in itertools.combinations(zip(CHOICES, row, strict=True), size)
    }


def every_combination(size: int) -> set[Chosen]:
    """Return all combinations of `size` choices that some possible row has."""
    return combinations(filter(possible, itertools.product(*CHOICES.values())), size)


def chosen_from(rows: Sequence[Row], size: int) -> list[Row]:
    """Return some of the rows that have every combination of `size` choices that all of them have.

    The next is always the first of those that add the most.
    """
    every = [combinations([row], size) for row in rows]
    left, found = set().union(*every), []
    while left:
        best = max(range(len(rows)), key=lambda number: len(every[number] & left))
        found.append(rows[best])
        left -= every[best]
    return found


def covering() -> tuple[list[Row], list[Row]]:
    """Return rows that have every combination of three choices, and those of them that have every
    combination of two."""
    rows = chosen_from([*filter(possible, itertools.product(*CHOICES.values()))], 3)
    return rows, chosen_from(rows, 2)


def entry(number: int, row: Row, *, core: bool) -> str:
    """Return the entry of the table for a row."""
    chosen = dict(zip(CHOICES, row, strict=True))
    rule, family = chosen["rule"], chosen["family"]
    features = [name for name in row[2:] if name]
    beside = {"mask": "beside a mask", "bias": "beside a bias"}.get(rule, f"causal, {rule}")
    why = ", ".join([*(NAMES[name] for name in features), beside])
    if rule == "bottom-right" and "key_lengths" in features and family != "self":
        features[features.index("key_lengths")] = "key_lengths_from_queries"
    if "segments" in features and chosen["window"]:
        features[features.index("segments")] = "two_segments"
    lines = [
        "[[case]]",
        f'name = "feature/covering-{number:02d}"',
        f'families = "{family}"',
        f'why = "{why[0].upper()}{why[1:]}: what is chosen together here is nowhere else."',
        *(['mask = "near_diagonal"'] if rule == "mask" else []),
        *(['bias = "bias_per_head"'] if rule == "bias" else []),
        *([f'causal = "{rule}"'] if "-" in rule else []),
        f'features = "{" ".join(features)}"',
        *([f'core = "{family}"'] if core else []),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    rows, core = covering()
    print("# Made by tests/covering.py: every three choices of these meet in some case.\n")
    print("\n\n".join(entry(n, row, core=row in core) for n, row in enumerate(rows, start=1)))
