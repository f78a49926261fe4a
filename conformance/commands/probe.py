"""`mha-conformance probe`: conventions by experiment."""

from __future__ import annotations

import argparse
import os

from conformance.commands.shared import (
    Commands,
    add_device,
    add_format,
    add_implementation,
    add_quiet,
    add_repeatable,
)


def add_parser(commands: Commands) -> None:
    """How it is called."""
    probe = commands.add_parser(
        "probe",
        help="find an implementation's conventions by experiment and print its card",
        description="Find the conventions of implementations by experiment: what each mask "
        "argument does, what a fully masked row gets, where the causal flag is aligned, what "
        "dropout drops. Nothing that the adapter declares is believed.",
    )
    add_implementation(probe, several=True)
    add_repeatable(
        probe,
        experiment="only this experiment, such as masks or masked-rows",
        argument="only this mask argument",
        mode="only this mode",
    )
    add_device(probe)
    probe.add_argument("--evidence", action="store_true", help="print what was fed and seen")
    probe.add_argument("--code", action="store_true", help="print lines that show it")
    add_format(probe, "probe")
    add_quiet(probe)
    probe.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if an adapter declares something else than was seen",
    )
    probe.set_defaults(action=_probe)


def _probe(options: argparse.Namespace) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from conformance.commands.probing import Wanted, probe

    wanted = Wanted(options.experiment, options.argument, options.mode, options.device)
    return probe(
        options.implementation,
        wanted,
        as_json=options.format == "json",
        evidence=options.evidence,
        code=options.code,
        strict=options.strict,
    )
