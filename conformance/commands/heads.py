"""`mha-conformance heads`: draw the attention weights of one case, as .svg, .png or .html."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.commands.shared import (
    Commands,
    add_device,
    add_implementation,
    be_quiet_and_single_threaded,
    check_writable,
    one_case,
    replace_file,
)
from conformance.errors import (
    ConformanceError,
    ExitCode,
    NothingToShow,
    Unsupported,
    WrongShape,
    check_names,
)

if TYPE_CHECKING:
    import numpy as np

    from conformance.adapter.base import Adapter, Mode
    from conformance.cases.case import Case
    from conformance.reports.figures import Picture
    from conformance.requirements.examination import Examination

SUFFIXES = (".svg", ".png", ".html")


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    heads = commands.add_parser(
        "heads", help="draw the attention pattern of every head beside the reference"
    )
    add_implementation(heads)
    heads.add_argument("--case", required=True, help="id of a case, or a pattern that matches one")
    heads.add_argument("--dtype", default="float32")
    heads.add_argument("--mode", default="", help="default: the first that returns weights")
    add_device(heads)
    heads.add_argument(
        "--entry", default="", help="batch entry, or all; default: the one with the largest error"
    )
    heads.add_argument(
        "-o", "--output", type=Path, required=True, help="a file: .svg, .png or .html"
    )
    heads.set_defaults(action=_heads)


def _heads(options: argparse.Namespace) -> int:
    """Write the figure and print a summary.

    If the figure cannot be made, an existing file is left unchanged.
    """
    be_quiet_and_single_threaded()
    from conformance.adapter.loading import load
    from conformance.cases.case import describe
    from conformance.definition.dtypes import DTYPES
    from conformance.frameworks.base import package_versions
    from conformance.reports.figures import again, page, png, renderer, sentences, svg

    output = options.output
    if output.suffix not in SUFFIXES:
        raise ConformanceError(
            f"{output}: the name says which format, {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    check_writable(output)
    if output.suffix == ".png":
        renderer()
    spec, case, entry = options.implementation, one_case(options.case), options.entry
    if entry not in ("", "all") and not entry.isdecimal():
        raise ConformanceError(f"--entry is {entry!r}; say a number, or all")
    check_names("dtype", [options.dtype], DTYPES)
    adapter = load(spec)
    drawn = ask(adapter, case, options.dtype, options.mode, options.device, entry)
    if output.suffix == ".html":
        versions = package_versions(("mha-conformance", "numpy")) | adapter.versions()
        command = again(drawn, spec, output.name, entry)
        content = page(drawn, describe(case), command, versions).encode()
    else:
        figure = svg(drawn)
        content = png(figure) if output.suffix == ".png" else figure.encode()
    replace_file(output, content)
    for line in sentences(drawn):
        print(line)
    print(f"drawn: {output}")
    return ExitCode.OK


def ask(
    adapter: Adapter,
    case: Case,
    dtype: str = "float32",
    mode: str = "",
    device: str = "cpu",
    entry: str = "",
) -> Picture:
    """Run the case with the implementation, and return a picture of the attention weights.

    Args:
        mode: the name of a mode; "" for the first that returns weights in this dtype.
        device: "cpu" or "gpu".
        entry: the number of a batch entry, "all", or "" for the entry with the largest error.

    Raises:
        UnknownName: if there is no such mode.
        ConformanceError: if there is no such entry.
        NothingToShow: if the implementation returns no weights, does not support the case or the
            dtype, or fails.
        Unavailable: if the framework or the device is missing.
    """
    from conformance.reports.figures import FigureSubject, picture
    from conformance.requirements.examination import Examination

    chosen = _mode(adapter, mode, dtype)
    examination = Examination(adapter, case, dtype, device, chosen)
    got = _weights(examination)
    expectation, problem = examination.suited_expectation, examination.problem
    note = "" if case.defined else "No definition settles this case; the reference has zeros here."
    return picture(
        FigureSubject(adapter.name, case.id, dtype, chosen.name, device, note),
        got=got,
        want=expectation.arrays["weights"],
        noise=expectation.sigma["weights"],
        blocked=problem.blocked_for(got),
        underflow=problem.format.underflow,
        entry=int(entry) if entry.isdecimal() else None,
        every=entry == "all",
    )


def _mode(adapter: Adapter, name: str, dtype: str) -> Mode:
    """Return the mode of this name or, for "", the first that returns weights in this dtype.

    Raises:
        UnknownName: there is no mode of this name.
        NothingToShow: no mode returns weights in this dtype, or the named mode does not.
    """
    check_names("mode", [name] if name else [], (mode.name for mode in adapter.modes))
    with_weights = [mode for mode in adapter.modes if adapter.returns_weights and mode.weights]
    usable = [mode for mode in with_weights if mode.has(dtype)]
    if not usable:
        where = f" in {dtype}" if adapter.returns_weights else ""
        raise NothingToShow(
            f"{adapter.name} returns no attention weights{where}, so there is nothing to draw; if "
            "it does return them, its adapter must declare returns_weights"
        )
    mode = next(mode for mode in adapter.modes if mode.name == (name or usable[0].name))
    if not mode.weights:
        raise NothingToShow(
            f"{adapter.name} returns no attention weights in mode {mode.name}; "
            f"try --mode {usable[0].name}"
        )
    if mode.dtypes is not None and dtype not in mode.dtypes:
        raise NothingToShow(
            f"{adapter.name} has no {dtype} in mode {mode.name}; try --dtype {mode.dtypes[0]}"
        )
    return mode


def _weights(examination: Examination) -> np.ndarray:
    """Return the attention weights that the implementation returns for the case.

    Raises:
        NothingToShow: the implementation does not support the case, raises an exception, or returns
            no weights or an array of a wrong shape.
        Unavailable: the framework or the device is missing.
    """
    import numpy as np

    from conformance.requirements.examination import RaisedInside

    name, case = examination.adapter.name, examination.case.id
    try:
        # Ignore warnings: the figure itself shows their causes, such as a fully masked query.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            weights = examination.answer.weights
    except Unsupported as reason:
        raise NothingToShow(
            f"{name} cannot express {case} in {examination.dtype}: {reason}; try another case, see "
            "mha-conformance list cases"
        ) from reason
    except (RaisedInside, WrongShape) as error:
        why = f" raised {error.told}" if isinstance(error, RaisedInside) else f": {error}"
        raise NothingToShow(f"{name}{why}; mha-conformance run says where") from error
    if weights is None:
        raise NothingToShow(
            f"{name} returned no attention weights for {case}; mha-conformance run says more"
        )
    return weights
