"""`mha-conformance heads`: attention patterns as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.shared import (
    Commands,
    add_device,
    add_implementation,
    be_quiet_and_single_threaded,
)


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    heads = commands.add_parser(
        "heads", help="draw the attention pattern of every head beside the reference"
    )
    add_implementation(heads)
    heads.add_argument("--case", required=True, help="id of a case, or a pattern that finds one")
    heads.add_argument("--dtype", default="float32")
    heads.add_argument("--mode", default="", help="default: the first that returns weights")
    add_device(heads)
    heads.add_argument(
        "--entry", default="", help="batch entry, or all; default: the one that is furthest off"
    )
    heads.add_argument(
        "-o", "--output", type=Path, required=True, help="a file: .svg, .png or .html"
    )
    heads.set_defaults(action=_heads)


def _heads(options: argparse.Namespace) -> int:
    be_quiet_and_single_threaded()
    from conformance.commands.drawing import Question, draw

    asked = ("implementation", "case", "dtype", "mode", "device", "entry")
    question = Question(**{name: getattr(options, name) for name in asked})
    return draw(question, options.output)
