"""Records of runs, explorations and long problems: their formats, and reading and writing them."""

LEVELS = ("first", "core", "default", "full", "large")
"""The levels of a run, from which `--level` chooses one.

"first" runs at most 40 items, on which most mistakes show. "core" runs the cases marked `core`, and
"default" all cases and most experiments, each case in a few dtypes and modes. "full" runs all cases
and experiments in all dtypes and modes. "large" runs the cases marked `core` or `large` at the
sizes for which kernels are written.
"""
