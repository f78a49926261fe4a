"""`mha-conformance convert`: convert weights of one implementation to those of another."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from conformance.commands.shared import Commands, add_format, print_json
from conformance.errors import ExitCode


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    convert = commands.add_parser(
        "convert",
        help="convert weights of one implementation to those of another, bit for bit",
        description="Convert a safetensors file from the parameters of one implementation to "
        "those of another. No framework is needed. If tensors are missing, unexpected, misshapen "
        "or not finite, or if the target cannot have them, the reason is printed, the exit code "
        "is 2, and nothing is written.",
    )
    convert.add_argument("weights", type=Path, help="the file to read: .safetensors")
    convert.add_argument("out", type=Path, help="the file to write")
    for option, dest, whose in (
        ("--from", "source", "implementation to convert from"),
        ("--to", "target", "one to convert to"),
    ):
        text = f"{whose}: a built-in name, a title, or path/to/file.py:NAME"
        convert.add_argument(option, dest=dest, required=True, metavar="NAME", help=text)
    convert.add_argument(
        "--heads", type=int, help="number of heads, if the tensors do not determine it"
    )
    convert.add_argument("--kv-heads", type=int, help="number of key/value heads, likewise")
    convert.add_argument(
        "--rotary-size",
        type=int,
        metavar="N",
        help="components of a head that rotary embeddings turn, if they are not all; they are "
        "reordered if one implementation pairs halves of the head and the other neighbours",
    )
    convert.add_argument(
        "--prefix",
        default="",
        help="convert only tensors whose names begin with this, such as "
        "encoder.layers.0.self_attn.; all others are ignored",
    )
    convert.add_argument("--out-prefix", default="", help="prefix for the new names")
    convert.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_format(convert, "convert")
    convert.set_defaults(action=_convert)


class Converted(msgspec.Struct, frozen=True):
    """The output of `convert --format json`.

    Attributes:
        file: the path of the file that was written.
        source, target: the implementations as named by `--from` and `--to`.
        heads: the number of query heads.
        kv_heads: the number of key/value heads; equal to `heads` unless query heads share them.
        head_size: the size of query and key heads.
        build_with: the argument that builds the target without biases, such as "use_bias=False";
            "" if the weights have biases or no such argument is known.
    """

    file: str
    source: str
    target: str
    heads: int
    kv_heads: int
    head_size: int
    build_with: str


def _convert(options: argparse.Namespace) -> int:
    from conformance.porting.conversion import built_without_biases, convert_file

    shape = convert_file(
        options.weights,
        options.out,
        source=options.source,
        target=options.target,
        heads=options.heads,
        kv_heads=options.kv_heads,
        rotary_size=options.rotary_size,
        prefix=options.prefix,
        out_prefix=options.out_prefix,
        force=options.force,
    )
    option = built_without_biases(options.target, shape)
    if options.format == "json":
        sizes = (shape.heads, shape.kv_heads, shape.head_size)
        names = (str(options.out), options.source, options.target)
        print_json(Converted(*names, *sizes, build_with=option or ""))
        return ExitCode.OK
    shared = f", {shape.kv_heads} for key and value" if shape.kv_heads < shape.heads else ""
    print(f"{options.out}: {options.target}, {shape.heads} heads of size {shape.head_size}{shared}")
    if option:
        print(f"no biases: build {options.target} with {option}")
    return ExitCode.OK
