"""Conventions by experiment: what an implementation does with what people hand to it.

An experiment asks one implementation, in one mode, and yields entries of its convention card. It
believes no declaration; where an entry has one beside it, the two are compared, and a difference is
a deviation of the adapter. How the attention weights are seen: `conformance.experiments.readout`.
"""

from __future__ import annotations

from conformance.experiments.experiment import (
    EXPERIMENTS,
    Experiment,
    Findings,
    experiment,
    find_experiments,
)

__all__ = ["EXPERIMENTS", "Experiment", "Findings", "experiment", "find_experiments"]
