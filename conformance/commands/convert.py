"""`mha-conformance convert`: convert weights of one implementation to those of another."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from conformance.commands.shared import (
    Commands,
    add_format,
    be_quiet_and_single_threaded,
    print_json,
)
from conformance.errors import ExitCode
from conformance.text import stdout_to_stderr

if TYPE_CHECKING:
    from conformance.porting.conversion import Piece, Written


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    convert = commands.add_parser(
        "convert",
        help="convert weights of one implementation to those of another, bit for bit",
        description="Convert safetensors from the parameters of one implementation to those of "
        "another, then run both on random inputs, if their frameworks are installed, and print how "
        "much they differ. If tensors are missing, unexpected, misshapen or not finite, or if the "
        "target cannot have them, the reason is printed, the exit code is 2, and nothing is "
        "written. If the two differ by more than 8σ, the exit code is 1, and nothing is written.",
    )
    convert.add_argument(
        "weights",
        type=Path,
        help="the file to read, .safetensors; or the folder of a trained model, with config.json "
        "and one such file, or several and their index",
    )
    convert.add_argument("out", type=Path, help="the file to write")
    for option, dest, whose in (
        ("--from", "source", "implementation to convert from"),
        ("--to", "target", "one to convert to"),
    ):
        text = f"{whose}: a built-in name, a title, or path/to/file.py:NAME"
        needed = dest == "target"
        if not needed:
            text += ", or the model_type of a trained model; left out, it is that in config.json"
        convert.add_argument(
            option, dest=dest, required=needed, default="", metavar="NAME", help=text
        )
    convert.add_argument(
        "--heads", type=int, help="number of heads, if the tensors do not determine it"
    )
    convert.add_argument("--kv-heads", type=int, help="number of key/value heads, likewise")
    convert.add_argument(
        "--rotary-size",
        type=int,
        metavar="N",
        help="components of a head that rotary embeddings turn, if they are not all, or 0 if "
        "neither side turns any; they are reordered if one implementation pairs halves of the head "
        "and the other neighbours",
    )
    convert.add_argument(
        "--rotary-pairs",
        choices=("halves", "interleaved"),
        help="the pairs of the implementation in which an argument selects them",
    )
    convert.add_argument(
        "--scale",
        type=float,
        metavar="X",
        help="the scale of the logits in the weights' own layer, if it is not 1/√head size and "
        "config.json does not tell it",
    )
    layers = convert.add_mutually_exclusive_group()
    layers.add_argument(
        "--layer", type=int, metavar="N", help="convert this layer of a trained model, from 0"
    )
    layers.add_argument(
        "--all-layers", action="store_true", help="convert all layers, into one file"
    )
    convert.add_argument(
        "--prefix",
        default="",
        help="convert only tensors whose names begin with this, such as "
        "encoder.layers.0.self_attn.; all others are left over",
    )
    convert.add_argument(
        "--out-prefix",
        help="prefix for the new names, in which {layer} is the number of the layer",
    )
    convert.add_argument(
        "--no-run", dest="run", action="store_false", help="run neither implementation afterwards"
    )
    convert.add_argument("--force", action="store_true", help="overwrite an existing file")
    add_format(convert, "convert")
    convert.set_defaults(action=_convert)


class ConvertedLayer(msgspec.Struct, frozen=True):
    """One attention in the output of `convert --format json`.

    Attributes:
        read: how the names of its tensors begin in the files that were read.
        written: how they begin in the file that was written.
        heads: the number of query heads.
        kv_heads: the number of key/value heads; equal to `heads` unless query heads share them.
        head_size: the size of query and key heads.
        apart: the largest difference between the outputs of source and target on random inputs, in
            σ; null unless both were run.
        source_error, target_error: the largest error of their outputs relative to the reference, in
            σ; null for one that was not run.
        source_not_run, target_not_run: why it was not run; "" if it was.
        needs: what the target must be built or called with, as text.
    """

    read: str
    written: str
    heads: int
    kv_heads: int
    head_size: int
    apart: float | None
    source_error: float | None
    target_error: float | None
    source_not_run: str
    target_not_run: str
    needs: tuple[str, ...]


class Converted(msgspec.Struct, frozen=True):
    """The output of `convert --format json`.

    Attributes:
        file: the path of the file that was written.
        source, target: the implementations as named by `--from` and `--to`; without `--from`, the
            model_type.
        heads: the number of query heads, in the first layer.
        kv_heads: the number of key/value heads; equal to `heads` unless query heads share them.
        head_size: the size of query and key heads.
        build_with: the argument that builds the target without biases, such as "use_bias=False";
            "" if the weights have biases or no such argument is known.
        layers: the attentions that were written.
        left_over: the names of all tensors that were not, by kind.
    """

    file: str
    source: str
    target: str
    heads: int
    kv_heads: int
    head_size: int
    build_with: str
    layers: tuple[ConvertedLayer, ...]
    left_over: dict[str, tuple[str, ...]]


def _convert(options: argparse.Namespace) -> int:
    from conformance.porting.conversion import built_without_biases, convert_file

    be_quiet_and_single_threaded()
    with stdout_to_stderr():
        done = convert_file(
            options.weights,
            options.out,
            source=options.source,
            target=options.target,
            heads=options.heads,
            kv_heads=options.kv_heads,
            rotary_size=options.rotary_size,
            rotary_pairs=options.rotary_pairs,
            scale=options.scale,
            layer_number=options.layer,
            all_layers=options.all_layers,
            prefix=options.prefix,
            out_prefix=options.out_prefix,
            run=options.run,
            force=options.force,
        )
        option = built_without_biases(options.target, done.shape)
    source = options.source or done.source
    if options.format == "json":
        sizes = (done.shape.heads, done.shape.kv_heads, done.shape.head_size)
        names = (str(options.out), source, options.target)
        layers = tuple(map(_layer, done.pieces))
        print_json(Converted(*names, *sizes, option, layers, dict(done.left_over)))
        return ExitCode.OK
    _print(done, options, source, option)
    return ExitCode.OK


def _layer(piece: Piece) -> ConvertedLayer:
    shape, ran = piece.shape, piece.ran
    return ConvertedLayer(
        read=piece.place,
        written=piece.begin,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        apart=ran.apart if ran else None,
        source_error=ran.source if ran else None,
        target_error=ran.target if ran else None,
        source_not_run=ran.source_not_run if ran else "--no-run",
        target_not_run=ran.target_not_run if ran else "--no-run",
        needs=piece.notes,
    )


def _print(done: Written, options: argparse.Namespace, source: str, option: str) -> None:
    shape = done.shape
    shared = f", {shape.kv_heads} for key and value" if shape.kv_heads < shape.heads else ""
    print(f"{options.out}: {options.target}, {shape.heads} heads of size {shape.head_size}{shared}")
    for piece in done.pieces:
        place = piece.place if len(done.pieces) > 1 else ""
        if piece.ran:
            print(f"run: {place and f'{place}: '}{piece.ran.described(source, options.target)}")
    needs = dict.fromkeys(piece.notes for piece in done.pieces)
    for notes in needs:
        places = [piece.place for piece in done.pieces if piece.notes == notes]
        of = f" in {_listed(places)}" if len(needs) > 1 else ""
        for note in notes:
            print(f"{options.target} needs{of}: {note}")
    if option:
        print(f"no biases: build {options.target} with {option}")
    for kind, names in done.left_over.items():
        if kind in ("unknown", "position biases"):
            print(f"left over: {kind}: {', '.join(names)}")
        else:
            print(f"left over: {kind}: {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    """Return the first of these names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
