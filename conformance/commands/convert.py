"""`mha-conformance convert`: weights from one implementation to another."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.shared import Commands
from conformance.errors import ExitCode


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    convert = commands.add_parser(
        "convert",
        help="weights of one implementation as those of another, bit for bit",
        description="Convert a file of safetensors, whose names are those of one implementation's "
        "parameters, to those of another. No framework is needed. Where tensors are missing, too "
        "many, misshapen or not finite, or the target cannot have them, the reason is told, the "
        "exit code is 2, and nothing is written.",
    )
    convert.add_argument("weights", type=Path, help="the file to read: .safetensors")
    convert.add_argument("out", type=Path, help="the file to write")
    for option, whose in (("from", "whose weights they are"), ("to", "whose they shall be")):
        convert.add_argument(
            f"--{option}",
            dest={"from": "source", "to": "target"}[option],
            required=True,
            metavar="NAME",
            help=f"{whose}: a built-in name, a title, or path/to/file.py:NAME",
        )
    convert.add_argument(
        "--heads", type=int, help="number of heads, where the tensors do not tell it"
    )
    convert.add_argument("--kv-heads", type=int, help="number of key/value heads, likewise")
    convert.add_argument(
        "--prefix",
        default="",
        help="only tensors whose names begin with this, such as encoder.layers.0.self_attn.; all "
        "others are ignored",
    )
    convert.add_argument("--out-prefix", default="", help="what the new names begin with")
    convert.add_argument("--force", action="store_true", help="overwrite a file that is there")
    convert.set_defaults(action=_convert)


def _convert(options: argparse.Namespace) -> int:
    from conformance.porting.conversion import built_without_biases, convert_file

    names = ("source", "target", "heads", "kv_heads", "prefix", "out_prefix", "force")
    asked = {name: getattr(options, name) for name in names}
    shape = convert_file(options.weights, options.out, **asked)
    shared = f", {shape.kv_heads} for key and value" if shape.kv_heads < shape.heads else ""
    print(f"{options.out}: {options.target}, {shape.heads} heads of size {shape.head_size}{shared}")
    if option := built_without_biases(options.target, shape):
        print(f"no biases: build {options.target} with {option}")
    return ExitCode.OK
