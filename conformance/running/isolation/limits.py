"""How long an isolated implementation may take, and how much memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one process.

    Attributes:
        item: seconds for one item.
        start: seconds to import the implementation and its framework, and to tell its declaration.
        memory: MiB of resident memory, with that of processes it started. Address space would be
            easier to limit, but JAX, TensorFlow and CUDA reserve far more of it than they use.
        deaths: in a row, after which no further item is asked: the run shall end in reasonable
            time.
    """

    item: float = 60.0
    start: float = 120.0
    memory: float = 8192.0
    deaths: int = 10
