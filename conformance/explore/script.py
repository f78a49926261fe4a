"""A stand-alone reproduction: one short program with the numbers in it.

It computes one element twice, by the definition in float64 and by the library's own call, and fails
while the two are further apart than rounding can explain. It is short enough to be read by whoever
maintains that library, and needs nothing but it and NumPy.
"""

from __future__ import annotations

import textwrap

from conformance.adapter.base import Adapter
from conformance.errors import ConformanceError
from conformance.explore.code import WIDTH, called, definition, numbers, told
from conformance.explore.natives import native
from conformance.explore.trial import Deviation, Trial
from conformance.records.findings import INFINITE
from conformance.text import printable

MOST_LINES = 40
STEP = "1e-30j"


class TooLong(ConformanceError):
    """The problem has more numbers than a short program holds."""


def script(adapter: Adapter, spec: str, trial: Trial, deviation: Deviation, case: str) -> str:
    """The program.

    Raises:
        TooLong: it would have more than `MOST_LINES` lines.
    """
    problem = trial.problem
    gradient = deviation.array.startswith("gradient.")
    own = native(adapter, trial, deviation, spec)
    compared = deviation.array in ("output", "weights") or gradient
    lines = [
        *_header(adapter, spec, trial, deviation, case, own.standalone),
        *own.imports,
        "",
        *told(numbers(problem, cotangent=gradient)),
    ]
    if compared:
        returned = "output" if gradient else deviation.array
        if returned == "weights" and len(deviation.index) == 3:
            returned = "averaged"
        lines += ["", *definition(problem, returned), "", *_want(deviation)]
    lines += ["", *own.lines]
    if compared:
        lines += [
            'print(f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}")',
            f'assert abs(got - want) <= {deviation.allowed:.3g}, "more than rounding can explain"',
        ]
    elif deviation.kind == "dtype":
        lines += ["print(got)", f'assert got.endswith("{problem.dtype}"), "not the inputs\' dtype"']
    else:
        shape = problem.shape
        wanted = (shape.batch, shape.query_length, shape.output_width)
        lines += ["print(got)", f'assert got == {wanted}, "not the shape of the output"']
    lines = _tight([part for line in lines for part in _wrapped(line)])
    if len(lines) > MOST_LINES or any(len(line) > WIDTH for line in lines):
        raise TooLong(
            f"a script for this problem has {len(lines)} lines, more than {MOST_LINES}; a smaller "
            "problem is needed: shrink it, or give that more --seconds"
        )
    return "\n".join(lines) + "\n"


def _header(
    adapter: Adapter, spec: str, trial: Trial, deviation: Deviation, case: str, standalone: bool
) -> list[str]:
    found = " ".join(printable(deviation.told).split()).replace("{array}", deviation.array)
    text = [f"{adapter.title}, {trial.problem.dtype}: {found}."]
    if deviation.kind in ("off", "not finite"):
        ratio = "infinitely many" if deviation.ratio >= INFINITE else f"{deviation.ratio:.2g}"
        where = f"{deviation.array}[{', '.join(map(str, deviation.index))}]"
        text.append(
            f"{where} is {ratio} σ off, and 8 are allowed; σ is the rounding error that "
            f"an honest {trial.problem.dtype} computation has there."
        )
    versions = ", ".join(f"{name} {version}" for name, version in adapter.versions().items())
    text.append(f"Found with {versions or 'no versions known'}; {case}, mode {trial.mode.name}.")
    if not standalone:
        text.append(f"Needs mha-conformance, because {printable(spec)} declares itself to it.")
    return [
        f"# {line}" for line in textwrap.wrap(" ".join(text), WIDTH - 2, break_on_hyphens=False)
    ]


def _want(deviation: Deviation) -> list[str]:
    at = f"[{', '.join(map(str, deviation.index))}]"
    if not deviation.array.startswith("gradient."):
        return [f"want = attention(n){at}"]
    name = called(deviation.array.removeprefix("gradient."))
    return [
        f'moved = {{**n, "{name}": n["{name}"].astype(complex)}}',
        f'moved["{name}"]{at} += {STEP}  # the imaginary part is the derivative, without rounding',
        f'want = (attention(moved) * n["cotangent"]).sum().imag / {STEP[:-1]}',
    ]


def _wrapped(line: str) -> list[str]:
    """A long statement over several lines, broken after commas, which stand within brackets."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    found = []
    while len(line) > WIDTH:
        place = line.rfind(", ", 0, WIDTH)
        if place < len(indent):
            break
        found.append(line[: place + 1])
        line = indent + line[place + 2 :]
    return [*found, line]


def _tight(lines: list[str]) -> list[str]:
    """Without empty lines where there are too many of the others."""
    full = [line for line in lines if line]
    return lines if len(lines) <= MOST_LINES else full
