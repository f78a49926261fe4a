"""`mha-conformance diagnose`: name the mistake in an attention from its arrays alone."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from conformance.commands.shared import Commands, add_format, print_json, replace_file
from conformance.errors import ConformanceError, ExitCode
from conformance.text import printable


def _named(text: str) -> Path:
    """Return the path of a file, as an argument of a command line names it."""
    if not text:
        # The path would be that of the working directory.
        raise argparse.ArgumentTypeError("it is empty; name a dump, or a folder")
    return Path(text)


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    diagnose = commands.add_parser(
        "diagnose",
        help="name the mistake in an attention from arrays: query, key, value and output",
        description="Say whether an output is attention within rounding noise and, if not, which "
        "known mistake explains every wrong element. Files are .npz, .npy, .safetensors, files of "
        "torch.save, or folders of these; arrays are recognised by name: query, key, value, "
        "output, mask, bias, sinks, weights, log_sum_exp, max_logit, ... (docs/diagnose.md).",
    )
    diagnose.add_argument(
        "files", nargs="*", type=_named, metavar="FILE", help="a dump, or a folder"
    )
    diagnose.add_argument(
        "--against",
        type=_named,
        metavar="FILE",
        help="another output: judged, too, if there are query, key and value; else compared",
    )
    diagnose.add_argument(
        "--layout", help="such as 'batch query heads head' or 'batch length (heads head)'"
    )
    diagnose.add_argument("--heads", type=int, help="how many, if an axis joins them")
    diagnose.add_argument("--kv-heads", type=int, help="how many of keys and values")
    diagnose.add_argument(
        "--batch", type=int, help="how many entries, if their tokens follow each other in one axis"
    )
    diagnose.add_argument(
        "--causal",
        metavar="ALIGNMENT",
        nargs="?",
        const="true",
        help="top-left or bottom-right; without either, both are tried",
    )
    diagnose.add_argument("--scale", type=float, help="factor of the logits (default: 1/sqrt(d))")
    diagnose.add_argument(
        "--window", help="keys that a query sees, its own included; or before,after"
    )
    diagnose.add_argument(
        "--chunk", type=int, help="positions of a block; tokens see each other in the same block"
    )
    diagnose.add_argument(
        "--dilation", type=int, help="a query sees only keys whose distance is a multiple of it"
    )
    diagnose.add_argument("--soft-cap", type=float, help="cap of the logits")
    diagnose.add_argument(
        "--mask-true",
        choices=("attends", "blocks"),
        help="what True means in the mask (default: what fits)",
    )
    diagnose.add_argument(
        "--rotary-base",
        type=float,
        dest="rotary.base",
        help="query and key are not yet rotated; the base of the angles",
    )
    diagnose.add_argument("--rotary-pairs", dest="rotary.pairs", choices=("halves", "interleaved"))
    diagnose.add_argument(
        "--rotary-size", type=int, dest="rotary.size", help="components that turn (default: all)"
    )
    diagnose.add_argument("--dtype", help="in which it was computed (default: that of the output)")
    diagnose.add_argument("--accuracy", help="a class that it promises: A0, A, B, C or TF32")
    diagnose.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the model's config.json, which says what arrays and options do not",
    )
    diagnose.add_argument(
        "--of",
        default="",
        metavar="NAME",
        help="whose names the weights of a layer have, with its input x in place of query, key "
        "and value: an implementation, or a kind of models, such as llama (default: what fits)",
    )
    diagnose.add_argument("--layer", type=int, default=0, help="its number in the configuration")
    diagnose.add_argument(
        "--suggest",
        type=Path,
        metavar="FILE",
        help="write a small problem that tells mistakes apart, .npz or "
        ".safetensors, with the output that is wanted",
    )
    diagnose.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the errors of the worst head over queries and components, as .svg",
    )
    add_format(diagnose, "diagnose")
    diagnose.set_defaults(action=_diagnose)


CODES = {
    "noise": ExitCode.OK,
    "deviates": ExitCode.DEVIATES,
    "cannot-tell": ExitCode.NOTHING_VERIFIED,
}
"""The exit code of each verdict."""


def _diagnose(options: argparse.Namespace) -> int:
    from conformance.arrays import configuration, figure, files
    from conformance.arrays.between import between_outputs
    from conformance.arrays.diagnosis import diagnose
    from conformance.arrays.layers import diagnose_layer
    from conformance.words import say

    if options.plot is not None and options.plot.suffix != ".svg":
        raise ConformanceError(f"{options.plot}: a plot is an .svg file")
    said = {
        name: value for name in files.OPTIONS if (value := getattr(options, name, None)) is not None
    }
    sides = ("output",) if options.against is not None else ("output", "wanted")
    bare = files.bare_outputs(options.files, len(sides))
    named = dict(zip(sides, bare, strict=False))
    arrays, told = (named, {}) if bare else files.read(options.files)
    told |= said
    if options.suggest is not None:
        from conformance.arrays.suggestion import suggest

        print(f"written: {suggest(options.suggest, arrays, told)}")
        if not options.files:
            return ExitCode.OK
    if options.config is not None:
        told |= {"config": options.config, "layer": options.layer}
        if not options.files:
            for phrase in configuration.told(options.config, options.layer)[1]:
                print(say(phrase))
            return ExitCode.OK
    if not options.files:
        raise ConformanceError("name a dump, or --suggest FILE to write one")
    if options.against is not None:
        other = files.output(options.against)
        if not {"query", "key", "value"} & arrays.keys():
            output = arrays.get("output", arrays.get("wanted"))
            if output is None:
                raise ConformanceError(f"{options.files[0]} has no array called output")
            found = between_outputs(output, other, **_kept(told))
        else:
            dump = files.arguments(arrays, told, options.files)
            found = diagnose(**{**dump, "wanted": other})
    elif arrays.keys() == {"output", "wanted"}:
        found = between_outputs(arrays["output"], arrays["wanted"], **_kept(told))
    elif "x" in arrays:
        weights = files.weights(options.files)
        found = diagnose_layer(weights=weights, of=options.of, **files.arguments(arrays, told))
    else:
        found = diagnose(**files.arguments(arrays, told, options.files))
    if options.plot is not None and found.map is not None:
        replace_file(options.plot, figure.svg(found.map).encode())
    if options.format == "json":
        drawn_apart: dict[str, Any] = {"map": None}
        if found.wanted is not None:
            drawn_apart["wanted"] = msgspec.structs.replace(found.wanted, map=None)
        print_json(msgspec.structs.replace(found, **drawn_apart))
    else:
        print(printable(str(found)))
    return CODES[found.verdict]


def _kept(told: dict[str, Any]) -> dict[str, Any]:
    """Return the options that say something of two outputs alone."""
    return {name: told[name] for name in ("dtype", "layout", "heads") if name in told}
