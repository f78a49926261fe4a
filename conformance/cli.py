"""The command line. Each command imports what it needs when it runs, so that --help is quick."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError, ExitCode
from conformance.terminal import printable

LIMITS = {
    "item-timeout": (60.0, "seconds that an isolated implementation has for one item"),
    "start-timeout": (120.0, "seconds that it has to import itself and its framework"),
    "memory-limit": (8192.0, "MiB of memory that it may use"),
}
"""Option to default and meaning."""

EXIT_CODES = {
    ExitCode.OK: "everything that was to be verified was verified (deviations are findings, "
    "not failures)",
    ExitCode.DEVIATES: "run --strict: an implementation deviates from a requirement of level must",
    ExitCode.USAGE: "wrong usage, an unknown name, a file that is no adapter or no record; "
    "convert: refused, and nothing is written",
    ExitCode.NOTHING_VERIFIED: "nothing was verified at all",
    ExitCode.INCOMPLETE: "incomplete: something that was to be verified was not; what was "
    "measured is kept",
    ExitCode.CLOSED: "whoever read the output closed it",
    ExitCode.INTERRUPTED: "interrupted; what was measured is kept",
}
QUICK = ("-q", "--assert=plain", "--capture=sys", "-p", "no:logging", "-p", "no:warnings")
"""What pytest does around a test costs as much as a small attention; this leaves some out."""

EPILOG = "exit codes:\n" + "".join(f"  {code:<4d} {told}\n" for code, told in EXIT_CODES.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return options.action(options, rest)
    except ConformanceError as error:
        print(f"mha-conformance: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read the output has enough; what Python still wants to flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.CLOSED
    except KeyboardInterrupt:
        print("mha-conformance: interrupted; what was measured is kept", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mha-conformance",
        description="Does this attention compute the same as that one, and where do they part?",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="examine implementations and write a record",
        description="Examine implementations. Options that are not listed go to pytest: -k, -x, "
        "-n, --junitxml, -v.",
    )
    run.add_argument(
        "implementation",
        nargs="+",
        help="a built-in name, path/to/file.py:NAME or package.module:NAME",
    )
    for option, told in (
        ("case", "only cases with this in their id, or matching it as a pattern"),
        ("dtype", "only this dtype"),
        ("mode", "only this mode"),
    ):
        run.add_argument(f"--{option}", action="append", default=[], help=f"{told}; repeatable")
    run.add_argument(
        "--case-file",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="also the case in this file, as explore writes it; repeatable",
    )
    run.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    run.add_argument("--record", type=Path, help="write what was found to this JSON file")
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on with the unfinished run beside the record, if there is one",
    )
    run.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="give each implementation a process of its own (default: those given by path or "
        "module)",
    )
    for name, (default, told) in LIMITS.items():
        run.add_argument(f"--{name}", type=float, default=default, metavar="N", help=told)
    run.add_argument(
        "--strict", action="store_true", help="exit with 1 if a requirement of level must fails"
    )
    run.set_defaults(action=_run)

    probe = commands.add_parser(
        "probe",
        help="find an implementation's conventions by experiment and print its card",
        description="Find the conventions of implementations by experiment: what each mask "
        "argument does, what a fully masked row gets, where the causal flag is aligned, what "
        "dropout drops. Nothing that the adapter declares is believed.",
    )
    probe.add_argument(
        "implementation",
        nargs="+",
        help="a built-in name, path/to/file.py:NAME or package.module:NAME",
    )
    for option, told in (
        ("experiment", "only this experiment, such as masks or masked-rows"),
        ("argument", "only this mask argument"),
        ("mode", "only this mode"),
    ):
        probe.add_argument(f"--{option}", action="append", default=[], help=f"{told}; repeatable")
    probe.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    probe.add_argument("--evidence", action="store_true", help="print what was fed and seen")
    probe.add_argument("--code", action="store_true", help="print lines that show it")
    probe.add_argument("--json", action="store_true", help="print all of it as JSON")
    probe.add_argument(
        "--strict",
        action="store_true",
        help="exit with 1 if an adapter declares something else than was seen",
    )
    probe.set_defaults(action=_probe)

    report = commands.add_parser(
        "report", help="join records into a report: JSON, Markdown and HTML"
    )
    report.add_argument("records", nargs="*", type=Path, help="record files or folders of them")
    report.add_argument("--output", type=Path, default=Path("reports/compatibility"))
    report.add_argument(
        "--expect",
        action="append",
        default=[],
        metavar="NAME",
        help="a record that must be there, by its file's name without .json; repeatable",
    )
    report.add_argument(
        "--run-file", type=Path, help="refuse records of other runs than the one named in this file"
    )
    report.set_defaults(action=_report)

    heads = commands.add_parser(
        "heads", help="draw the attention pattern of every head beside the reference"
    )
    heads.add_argument(
        "implementation", help="a built-in name, path/to/file.py:NAME or package.module:NAME"
    )
    heads.add_argument("--case", required=True, help="id of a case, or a pattern that finds one")
    heads.add_argument("--dtype", default="float32")
    heads.add_argument("--mode", default="", help="default: the first that returns weights")
    heads.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    heads.add_argument(
        "--entry", default="", help="batch entry, or all; default: the one that is furthest off"
    )
    heads.add_argument(
        "-o", "--output", type=Path, required=True, help="a file: .svg, .png or .html"
    )
    heads.set_defaults(action=_heads)

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

    selftest = commands.add_parser(
        "selftest",
        help="does the suite notice defective attentions?",
        description="Examine the suite: some hundred attentions with one defect each must be "
        "noticed, and the correct one that they are made of must not.",
    )
    for option, told in (("chapter", "only this chapter"), ("mutant", "only this mutant")):
        selftest.add_argument(
            f"--{option}", action="append", default=[], help=f"{told}; repeatable"
        )
    selftest.add_argument(
        "--matrix",
        type=Path,
        help="examine each in the whole catalogue, and write what noticed it to this file",
    )
    selftest.add_argument("--json", action="store_true", help="print all of it as JSON")
    selftest.set_defaults(action=_selftest)

    search = commands.add_parser(
        "explore",
        help="search for problems that an implementation answers wrongly",
        description="Draw random problems, compare with the reference, and make what deviates as "
        "small as it gets. Two files are written: a case that run --case-file asks again, and a "
        "stand-alone script. Exit code 0: nothing found; 1: a deviation.",
    )
    search.add_argument(
        "implementation", help="a built-in name, path/to/file.py:NAME or package.module:NAME"
    )
    search.add_argument("--seed", type=int, default=0, help="equal seeds draw the same problems")
    search.add_argument("--examples", type=int, help="stop after so many problems")
    search.add_argument(
        "-o", "--output", type=Path, default=Path(), help="a folder for the files (default: here)"
    )
    search.set_defaults(action=_explore)

    again = commands.add_parser(
        "reproduce",
        help="a stand-alone script for a deviation at one case",
        description="Run a case, make its gravest deviation as small as it gets, and write a "
        "script that shows it with NumPy and that library only. Exit code 0: nothing deviates, "
        "nothing is written; 1: the script is written.",
    )
    again.add_argument("case", help="id of a case, a pattern that finds one, or a case file")
    again.add_argument(
        "implementation", help="a built-in name, path/to/file.py:NAME or package.module:NAME"
    )
    again.add_argument("-o", "--output", type=Path, help="the file to write")
    again.set_defaults(action=_reproduce)
    for command in (search, again):
        command.add_argument(
            "--seconds", type=float, default=60.0, help="time to search, and to shrink"
        )
        command.add_argument("--no-shrink", action="store_true", help="keep the problem as it is")
        command.add_argument("--dtype", action="append", default=[], help="only this; repeatable")
        command.add_argument("--mode", action="append", default=[], help="only this; repeatable")
        command.add_argument("--device", choices=("cpu", "gpu"), default="cpu")

    begin = commands.add_parser("begin", help="start a run of several environments")
    begin.add_argument("--run-file", type=Path, required=True)
    begin.set_defaults(action=_begin)

    listing = commands.add_parser(
        "list", help="list implementations, cases, experiments or requirements"
    )
    known = ("implementations", "cases", "experiments", "requirements")
    listing.add_argument("what", choices=known)
    listing.set_defaults(action=_list)

    explain = commands.add_parser("explain", help="explain a case, an experiment or a requirement")
    explain.add_argument("name")
    explain.set_defaults(action=_explain)
    return parser


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    # Arrays are tiny: more threads only wait for each other, seven times as long on a busy machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pytest

    from conformance.explore.casefile import load_case
    from conformance.suite.plugin import SUITE
    from conformance.suite.running import INCOMPLETE, NOTHING_VERIFIED

    _load(options, rest)

    arguments = [str(SUITE), "-c", str(SUITE.with_name("pytest.ini")), "-p", "no:cacheprovider"]
    arguments += ["--rootdir", str(SUITE.parent), *QUICK]
    for name in ("implementation", "case", "dtype", "mode"):
        for value in getattr(options, name):
            arguments += [f"--{name}", value]
    for file in options.case_file:
        load_case(file)
        arguments += ["--case-file", str(file.absolute())]
    arguments += ["--device", options.device]
    for name in LIMITS:
        arguments += [f"--{name}", str(getattr(options, name.replace("-", "_")))]
    if options.isolate is not None:
        arguments.append("--isolate" if options.isolate else "--no-isolate")
    if options.resume:
        arguments.append("--resume")
    if options.record:
        arguments += ["--record", str(options.record.absolute())]
    if not options.strict:
        arguments.append("--survey")
    code = pytest.main([*arguments, *rest])
    return {
        int(pytest.ExitCode.OK): ExitCode.OK,
        # Deviations fail strict runs only; a survey fails where an item got no outcome at all.
        int(pytest.ExitCode.TESTS_FAILED): ExitCode.DEVIATES
        if options.strict
        else ExitCode.INCOMPLETE,
        int(pytest.ExitCode.INTERRUPTED): ExitCode.INTERRUPTED,
        int(pytest.ExitCode.USAGE_ERROR): ExitCode.USAGE,
        int(NOTHING_VERIFIED): ExitCode.NOTHING_VERIFIED,
        INCOMPLETE: ExitCode.INCOMPLETE,
    }.get(int(code), ExitCode.INCOMPLETE)


def _load(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Find every implementation before anything else: what is wrong with a name is one line."""
    from conformance.interface.loading import load
    from conformance.suite.running import isolated

    for spec in options.implementation:
        if not isolated(spec, options.isolate, debugging=bool({"--pdb", "--trace"} & {*rest})):
            load(spec)
            continue
        from conformance.isolation import Limits, hire

        limits = Limits(options.item_timeout, options.start_timeout, options.memory_limit)
        hire(spec, options.device, limits).start()


def _probe(options: argparse.Namespace, rest: Sequence[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from conformance.probing import Wanted, probe

    wanted = Wanted(options.experiment, options.argument, options.mode, options.device)
    return probe(
        options.implementation,
        wanted,
        as_json=options.json,
        evidence=options.evidence,
        code=options.code,
        strict=options.strict,
    )


def _report(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from conformance.report import write

    return write(options.records, options.output, options.expect, options.run_file)


def _heads(options: argparse.Namespace, rest: Sequence[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from conformance.heads.ask import Question
    from conformance.heads.write import draw

    asked = ("implementation", "case", "dtype", "mode", "device", "entry")
    question = Question(**{name: getattr(options, name) for name in asked})
    return draw(question, options.output)


def _convert(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from conformance.conversion import convert_file

    names = ("source", "target", "heads", "kv_heads", "prefix", "out_prefix", "force")
    asked = {name: getattr(options, name) for name in names}
    shape = convert_file(options.weights, options.out, **asked)
    shared = f", {shape.kv_heads} for key and value" if shape.kv_heads < shape.heads else ""
    print(f"{options.out}: {options.target}, {shape.heads} heads of size {shape.head_size}{shared}")
    return ExitCode.OK


def _selftest(options: argparse.Namespace, rest: Sequence[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from conformance.selftest.command import selftest

    return selftest(options.chapter, options.mutant, matrix=options.matrix, as_json=options.json)


def _explore(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from conformance.explore.command import explore

    return explore(options.implementation, _searched(options), options.output)


def _reproduce(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from conformance.explore.command import reproduce

    return reproduce(options.case, options.implementation, _searched(options), options.output)


def _searched(options: argparse.Namespace) -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from conformance.explore.command import Options

    given = {name: getattr(options, name, None) for name in ("seed", "examples")}
    return Options(
        dtypes=options.dtype,
        modes=options.mode,
        device=options.device,
        seconds=options.seconds,
        shrink=not options.no_shrink,
        **{name: value for name, value in given.items() if value is not None},
    )


def _begin(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from conformance.provenance import new_run_id

    options.run_file.parent.mkdir(parents=True, exist_ok=True)
    run = new_run_id()
    options.run_file.write_text(run + "\n", encoding="utf-8")
    print(f"run {run}")
    return ExitCode.OK


def _list(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from conformance import listing

    return listing.show(options.what)


def _explain(options: argparse.Namespace, rest: Sequence[str]) -> int:
    from conformance import listing

    return listing.explain(options.name)


if __name__ == "__main__":
    raise SystemExit(main())
