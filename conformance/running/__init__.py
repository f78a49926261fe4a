"""Plan and perform runs: the pytest session, `examine`, and checks for other projects' tests.

This module imports little, because pytest loads it even in runs of other tests.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from conformance.records import LEVELS

WHOLE = ("default", "full")
"""The levels that leave out no case."""


def level_of(level: str | None, *restrictions: Sequence[object]) -> str:
    """Return the level of a run: `level`, or what the other options of the run suggest.

    Without a level, a run that is restricted to some cases, dtypes or modes examines all of these.
    """
    return level or ("full" if any(restrictions) else "default")


def is_isolated(spec: str, isolate: bool | None, *, debugging: bool) -> bool:
    """Return whether an implementation is run in a separate process.

    If `isolate` is not None, it decides. By default, implementations given by path or module are
    isolated, except in a debugger; built-in and installed implementations are not.
    """
    if isolate is not None:
        return isolate
    from conformance.adapter.loading import registered

    return not debugging and (":" in spec or spec.endswith(".py")) and spec not in registered()


DEVICES = ("cpu", "gpu")

LIMITS = {
    "item-timeout": (60.0, "seconds that an isolated implementation has for one item"),
    "start-timeout": (120.0, "seconds that it has to import itself and its framework"),
    "memory-limit": (8192.0, "MiB of memory that it may use"),
}
"""The default and the help text of each option for isolated processes."""


def _repeatable(metavar: str, text: str) -> dict[str, Any]:
    help_text = f"{text}; repeatable"
    return {
        "action": "append",
        "default": [],
        "metavar": metavar,
        "help": help_text,
        "type": _not_empty,
    }


def _not_empty(text: str) -> str:
    """Return the text; an empty one, such as an unset variable of a shell, would select all."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty; leave the option out to select everything")
    return text


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "case": _repeatable("CASE", "only cases with this in their id, or matching it as a pattern"),
    "dtype": _repeatable("DTYPE", "only this dtype"),
    "mode": _repeatable("MODE", "only this mode"),
    "case-file": _repeatable("FILE", "also the case in this file, as explore writes it"),
    "level": {
        "choices": LEVELS,
        "help": "first: 40 items at most; core: a case for each thing that goes wrong often; "
        "default: every case, in a few dtypes and modes; full: everything, which is also the "
        "default with --case, --dtype or --mode; large: head sizes 64 and 128, and lengths of "
        "several tiles",
    },
    "device": {
        "choices": DEVICES,
        "default": "cpu",
        "help": "where to run (default: cpu)",
    },
    "record": {
        "metavar": "FILE",
        "help": "write what was found to this JSON file; if options narrow the run, as --case and "
        "--level core do, NAME.narrowed.json beside NAME.json is written",
    },
    "fresh": {
        "action": "store_true",
        "help": "measure everything again, also what still holds of the record that is there",
    },
    "shard": {
        "default": "1/1",
        "metavar": "K/N",
        "help": "only the K-th of N equal parts; mha-conformance join makes one record of all",
    },
    "isolate": {
        "action": argparse.BooleanOptionalAction,
        "default": None,
        "help": "give each implementation a process of its own (default: those given by path or "
        "module)",
    },
    **{
        name: {"type": float, "default": default, "metavar": "N", "help": text}
        for name, (default, text) in LIMITS.items()
    },
}
"""The `argparse` arguments of each option of a run, for pytest and for the command line."""
