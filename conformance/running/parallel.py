"""Experiments in two processes, for frameworks that compile for most of the time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing import get_context

from conformance.adapter.base import Adapter
from conformance.adapter.loading import load
from conformance.errors import ConformanceError
from conformance.experiments import experiment
from conformance.records.findings import CaseResult
from conformance.running.session import Inquiry, Session, inquiries

WORKERS = min(2, os.cpu_count() or 1)
"""What they compile is compiled by each of them, so that more help little."""


def inquired_side_by_side(
    spec: str, asked: Sequence[Inquiry], only: tuple[str, ...], advance: Callable[[], None]
) -> list[CaseResult]:
    """The results in the order of what was asked; `advance` is called after each.

    Raises:
        ConformanceError: if a process dies; `mha-conformance run` gives that a verdict.
    """
    found: dict[int, CaseResult] = {}
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), _settle) as pool:
        places = {
            pool.submit(_inquire, spec, only, own.experiment.name, own.mode.name, own.device): place
            for place, own in enumerate(asked)
        }
        try:
            for future in as_completed(places):
                found[places[future]] = future.result()
                advance()
        except BrokenProcessPool as error:
            told = f"{spec} ended its process; mha-conformance run {spec} --isolate says where"
            raise ConformanceError(told) from error
    return [found[place] for place in range(len(asked))]


def _settle() -> None:
    # What an implementation prints is none of the answer.
    os.dup2(2, 1)


def _inquire(
    spec: str, only: tuple[str, ...], name: str, mode_name: str, device: str
) -> CaseResult:
    adapter, session = _own(spec, only)
    (own,) = (
        inquiry
        for inquiry in inquiries([adapter], [experiment(name)], device)
        if inquiry.mode.name == mode_name
    )
    return session.inquire(own)[0]


@lru_cache(maxsize=1)
def _own(spec: str, only: tuple[str, ...]) -> tuple[Adapter, Session]:
    """Of this process: what it has compiled is kept for the next experiment."""
    return load(spec), Session(only=only)
