"""Is the noise model honest? Real implementations, and arithmetic that is coarser on purpose.

    python benchmarks/calibrate.py ours torch-mha flax-linen
    python benchmarks/calibrate.py --planted
    python benchmarks/calibrate.py --widths
    python benchmarks/calibrate.py --honest 150
    python benchmarks/calibrate.py --tf32
    python benchmarks/calibrate.py --honest 20 --large torch-sdpa
    python benchmarks/calibrate.py --dtype float32 --case plain/ torch-mha

Every implementation answers every case that has an agreed answer, in its first mode and in those
modes that are examined on every case. For each array, the largest |error| / σ and the rms of
error / σ are taken, σ being that of the least accurate class of the dtype, which decides. The
tables have one row for each implementation, mode, dtype and kind of array:

    arrays    how many were compared
    median    of the largest ratio of each array
    max       the largest ratio of any element; beyond 8 the array deviates
    rms       rms over the arrays of their rms ratio; an honest one lies between 0.3 and 2
    bias      the median size of the signed bias Σ(error/σ)/√N: about 0.67 rms if errors have
              no sign and no correlation
    classes   how many arrays fit into each accuracy class, the most accurate first
    outside   how many arrays fit into none; for planted arithmetic, how many cases notice it

With --honest N: correct attentions that round in different places (`tests/mutants/honest.py`)
answer N random problems in every dtype, forward and backward. Those that return weights also answer
with a loss on them. Printed are the largest ratio of any element, the largest rms of an array whose
rms is judged, and how many arrays deviate: every one of them would be a false alarm.
Implementations that are named are taken to be correct, too. With --large, the problems are the
cases of the catalogue at the sizes of `GRIDS`, with N draws of their numbers. All of 20 draws are
146,080 problems, which take some 30 hours of one core. `--minutes 480` takes problems of all draws
at random until eight hours are over, as `tox -e honest` does; `--honest 5 --first 10` makes draws
10 to 14.

With --tf32: some of these attentions, with the operands of matrix products rounded to TF32 or cut
off to it, and then with something coarser or wrong besides, answer all cases in float32 and are
judged by class TF32.

With --widths: how much wider the classes are than the most accurate one, as the median over cases
of the ratio of the rms of σ.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from zlib import crc32

import numpy as np

from conformance.adapter.base import Adapter, Call, Mode
from conformance.adapter.loading import load
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue, every_case, find_cases, matches
from conformance.definition.comparison import FEWEST, accuracy_class, against, compare
from conformance.definition.dtypes import DTYPES
from conformance.definition.expectation import ROW_SUMS, Expectation, expect, expect_carefully
from conformance.definition.geometry import LARGE, Grid
from conformance.definition.problem import Problem
from conformance.errors import Unavailable, Unsupported
from conformance.explore.trial import askable
from conformance.records.findings import INFINITE
from conformance.requirements.examination import Examination, Workbench, averaged_over_heads
from conformance.running.provenance import package_versions

KINDS = ("output", "weights", "gradients")

GRIDS = (
    *LARGE,
    Grid(head_size=128, tiles=(128, 64)),
    Grid(head_size=96, value_head_size=32, tiles=(32, 64)),
)
"""The sizes at which correct algorithms are tried with --large."""

KNOWN = (
    ("torch-sdpa", "*", "scale/negative-with-causal*"),
    ("OperationByOperation", "float16", "logits/from-large-heads*"),
    ("OperationByOperation", "float16", "logits/beyond-float16*"),
    ("StoredNormaliser", "float16", "logits/from-large-heads*"),
    ("StoredNormaliser", "float16", "logits/beyond-float16*"),
)
"""Implementations, dtypes and cases that are known to be wrong: as a baseline says, or because
products that are stored before they are scaled overflow in float16."""


def _is_known(name: str, dtype: str, case: str) -> bool:
    return any(
        name == known and of in ("*", dtype) and matches(case, pattern)
        for known, of, pattern in KNOWN
    )


@dataclass
class Row:
    """What was measured of one implementation, mode, dtype and kind of array."""

    largest: list[float] = field(default_factory=list)
    rms: list[float] = field(default_factory=list)
    bias: list[float] = field(default_factory=list)
    classes: Counter[str] = field(default_factory=Counter)
    noticed: set[str] = field(default_factory=set)
    cases: set[str] = field(default_factory=set)


def main() -> int:
    """Measure and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("implementation", nargs="*")
    parser.add_argument("--planted", action="store_true", help="coarser arithmetic, in torch")
    parser.add_argument("--widths", action="store_true", help="how wide the accuracy classes are")
    parser.add_argument("--honest", type=int, metavar="N", help="random problems for each dtype")
    parser.add_argument("--tf32", action="store_true", help="products of TF32, where promised")
    parser.add_argument("--large", action="store_true", help="with --honest: at real sizes")
    parser.add_argument("--first", type=int, default=0, help="with --honest: its first draw")
    parser.add_argument("--minutes", type=float, help="with --honest: a random part, of this time")
    parser.add_argument("--dtype", action="append", default=[], choices=list(DTYPES))
    parser.add_argument("--case", action="append", default=[])
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    dtypes = options.dtype or list(DTYPES)
    named = {case for pattern in options.case for case in find_cases(pattern)}
    cases = [case for case in catalogue() if case.defined and (not named or case in named)]

    if options.widths:
        _print_widths(cases, dtypes)
        return 0
    if options.tf32:
        _print_tf32(cases)
        return 0
    adapters = [load(name) for name in options.implementation]
    if options.honest:
        seeds = range(options.first, options.first + options.honest)
        problems = _drawn(seeds, dtypes, options.case, large=options.large)
        minutes = math.inf if options.minutes is None else options.minutes
        if options.minutes is not None:
            random.shuffle(problems)
        return _print_honest(problems, dtypes, adapters, minutes, large=options.large)
    if options.planted:
        adapters += planted()
    started = time.perf_counter()
    rows = measure(adapters, cases, dtypes)
    print(f"<!-- python benchmarks/calibrate.py {' '.join(sys.argv[1:])} -->")
    _print(adapters, rows, planted=options.planted)
    packages = package_versions(("numpy", "mha-conformance"))
    for adapter in adapters:
        packages |= adapter.versions()
    told = ", ".join(f"{name} {version}" for name, version in sorted(packages.items()))
    print(f"\n{told}; {len(cases)} cases; {time.perf_counter() - started:.0f} s")
    return 0


def measure(
    adapters: Iterable[Adapter], cases: Iterable[Case], dtypes: Iterable[str]
) -> dict[tuple[str, str, str, str], Row]:
    """Rows by (implementation, mode, dtype, kind)."""
    rows: dict[tuple[str, str, str, str], Row] = defaultdict(Row)
    bench = Workbench()
    for case in cases:
        for dtype in filter(case.posed_in, dtypes):
            for adapter in adapters:
                for mode in adapter.modes:
                    if mode.every_case:
                        _measure(adapter, case, dtype, mode, bench, rows)
    return rows


def _measure(
    adapter: Adapter,
    case: Case,
    dtype: str,
    mode: Mode,
    bench: Workbench,
    rows: dict[tuple[str, str, str, str], Row],
) -> None:
    examination = Examination(adapter, case, dtype, "cpu", mode, bench)
    try:
        answer = examination.answer
    except (Unsupported, Unavailable):
        return
    except Exception as error:  # an implementation may raise whatever it likes
        print(f"{adapter.name} {mode.name} {case.id} {dtype}: {error!r}", file=sys.stderr)
        return
    expectation = examination.expectation
    if answer.weights is not None and answer.weights.ndim == 3:
        expectation = averaged_over_heads(expectation)
    for name, got in answer.arrays().items():
        want, noise = expectation.arrays[name], expectation.sigma[name]
        figures = compare(name, got, want, noise, expectation.underflow).figures
        kind = name if name in KINDS else "gradients"
        row = rows[adapter.name, mode.name, dtype, kind]
        row.largest.append(figures.max_ratio)
        row.rms.append(figures.rms_ratio)
        row.bias.append(abs(figures.bias))
        row.classes[accuracy_class(expectation, {name: got})] += 1
        row.cases.add(case.id)
        if figures.max_ratio > figures.limit:
            row.noticed.add(case.id)


def _print(
    adapters: Iterable[Adapter], rows: dict[tuple[str, str, str, str], Row], *, planted: bool
) -> None:
    last = "noticed by" if planted else "outside"
    heading = ("implementation", "dtype", "array", "arrays", "median", "max", "rms", "bias")
    print(f"| {' | '.join(heading)} | classes | {last} |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    for adapter in adapters:
        for dtype in DTYPES:
            for kind in KINDS:
                alike: dict[str, list[str]] = defaultdict(list)
                for mode in adapter.modes:
                    row = rows.get((adapter.name, mode.name, dtype, kind))
                    if row is not None:
                        alike[_cells(row, planted=planted)].append(mode.name)
                for cells, modes in alike.items():
                    label = adapter.name if len(alike) == 1 else f"{adapter.name}: "
                    label += "" if len(alike) == 1 else ", ".join(modes)
                    print(f"| {label} | {dtype} | {kind} | {cells} |")


def _cells(row: Row, *, planted: bool) -> str:
    reached = [
        f"{label} {row.classes[label]}" for label in ("A0", "A", "B", "C") if row.classes[label]
    ]
    figures = (
        statistics.median(row.largest),
        max(row.largest),
        _rms(row.rms),
        statistics.median(row.bias),
    )
    noticed = f"{len(row.noticed)} of {len(row.cases)} cases"
    return " | ".join(
        (
            str(len(row.largest)),
            *(_ratio(figure) for figure in figures),
            ", ".join(reached) or "none",
            noticed if planted else str(row.classes[""]),
        )
    )


def _print_widths(cases: Iterable[Case], dtypes: Iterable[str]) -> None:
    wider: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for case in cases:
        for dtype in filter(case.posed_in, dtypes):
            noise = expect(case.problem(dtype)).noise
            first = next(iter(noise.values()))
            for label, sigmas in noise.items():
                for name, sigma in sigmas.items():
                    size = float(np.sqrt(np.mean(first[name] ** 2)))
                    if size > 0:
                        kind = name if name in KINDS else "gradients"
                        ratio = float(np.sqrt(np.mean(sigma**2))) / size
                        wider[dtype, label, kind].append(ratio)
    print("| dtype | class | output | weights | gradients |")
    print("| --- | --- | ---: | ---: | ---: |")
    for dtype, label in dict.fromkeys(key[:2] for key in wider):
        cells = [f"{statistics.median(wider[dtype, label, kind]):.2g}" for kind in KINDS]
        print(f"| {dtype} | {label} | {' | '.join(cells)} |")


def _drawn(
    seeds: range, dtypes: Sequence[str], patterns: Sequence[str], *, large: bool
) -> list[tuple[str, Callable[[], Problem]]]:
    """Return what makes problems for correct algorithms, each with a name.

    They are random ones, or, if `large` is true, those of the catalogue whose names match one of
    the patterns, with the sizes of `GRIDS`. Each is drawn once for each seed, in every dtype.
    """
    from mutants.honest import drawn_recipe

    drawn: list[tuple[str, Callable[[], Problem]]] = []
    if not large:
        for seed, dtype in itertools.product(seeds, dtypes):
            drawn.append((f"{seed} {dtype}", partial(drawn_recipe(seed).problem, dtype)))
        return drawn
    for seed, case, grid in itertools.product(seeds, every_case(), GRIDS):
        wanted = not patterns or any(matches(case.on(grid).id, pattern) for pattern in patterns)
        if wanted and case.defined and case.shape.score == "scaled-dot":
            # The numbers of a case are drawn from its name.
            other = replace(case, name=f"{case.name}-{seed}" if seed else case.name).on(grid)
            for dtype in filter(case.posed_in, dtypes):
                drawn.append((f"{other.id} {dtype}", partial(other.problem, dtype)))
    return drawn


def _print_honest(
    problems: Sequence[tuple[str, Callable[[], Problem]]],
    dtypes: Sequence[str],
    others: Sequence[Adapter],
    minutes: float,
    *,
    large: bool,
) -> int:
    """Print the largest ratio and rms of each honest algorithm; return 1 if one deviates."""
    from mutants.honest import algorithms

    tried = [*algorithms(slow=not large), *others]
    started, elements, drawn = time.perf_counter(), 0, 0
    largest: dict[tuple[str, str], float] = defaultdict(float)
    rms: dict[tuple[str, str], float] = defaultdict(float)
    alarms: Counter[str] = Counter()
    for label, make in problems:
        if time.perf_counter() - started > 60 * minutes:
            break
        with np.errstate(all="ignore"):
            problem = make()
        if not large and not askable(problem):
            continue
        drawn += 1
        loss = np.random.default_rng(crc32(label.encode())).standard_normal(problem.shape.logits)
        of_weights = problem.replace(weights_cotangent=problem.format.round(loss))
        expected = {False: _expected(problem)}
        if not large:
            expected[True] = _expected(of_weights)
        for adapter, on_weights in itertools.product(tried, expected):
            if on_weights and not adapter.modes[0].weights:
                continue
            if _is_known(adapter.name, problem.dtype, label.split()[0]):
                continue
            asked = of_weights if on_weights else problem
            try:
                adapter.check_features(asked)
                arrays = adapter.run(asked, Call(mode=adapter.modes[0])).arrays()
            except Unsupported:
                continue
            key = adapter.name, problem.dtype
            if "weights" in arrays:
                arrays[ROW_SUMS] = arrays["weights"].sum(axis=-1)
            for comparison in against(expected[on_weights], arrays):
                figures = comparison.figures
                largest[key] = max(largest[key], figures.max_ratio)
                if arrays[figures.array].size >= FEWEST:
                    rms[key] = max(rms[key], figures.rms_ratio)
                alarms[adapter.name] += not comparison.fits
                if not comparison.fits:
                    print(label, adapter.name, figures, comparison.worst, file=sys.stderr)
            elements += sum(array.size for array in arrays.values())
    print(f"| algorithm | {' | '.join(dtypes)} | deviating arrays |")
    print(f"| --- |{' ---: |' * len(dtypes)} ---: |")
    for adapter in tried:
        keys = [(adapter.name, dtype) for dtype in dtypes]
        cells = " | ".join(f"{_ratio(largest[key])}, {_ratio(rms[key])}" for key in keys)
        print(f"| {adapter.name} | {cells} | {alarms[adapter.name]} |")
    seconds = time.perf_counter() - started
    print(f"\n{drawn} of {len(problems)} problems, {elements:,} elements, {seconds:.0f} s")
    return int(alarms.total() > 0)


def _print_tf32(cases: Iterable[Case]) -> None:
    """Print the errors of products in TF32 in σ of class TF32, and how many cases deviate."""
    from mutants.honest import (
        Divided,
        Honest,
        Online,
        ScaledQuery,
        cut_tf32,
        nearest_tf32,
        reading,
    )

    def bfloat16(values: np.ndarray) -> np.ndarray:
        return DTYPES["bfloat16"].round(values).astype(np.float32)

    def off(factor: float) -> type:
        own = reading(Divided, nearest_tf32)
        change = {"scaled": lambda self, s: own.scaled(self, s) * self.wide(factor)}
        return type("Scaled", (own,), change)

    kinds = {
        f"{kind.__name__}, {told}": reading(kind, rounding)
        for told, rounding in (("rounded", nearest_tf32), ("cut off", cut_tf32))
        for kind in (Divided, Online, ScaledQuery)
    }
    kinds["sums in float16"] = reading(Divided, nearest_tf32, np.float16)
    kinds["operands in bfloat16"] = reading(Divided, bfloat16)
    kinds |= {f"scale {percent} % off": off(1 + percent / 100) for percent in (0.3, 1, 3)}
    rows: dict[str, Row] = defaultdict(Row)
    outputs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for case in cases:
        problem = case.problem("float32")
        try:
            Honest(Divided).check(problem)
        except Unsupported:
            continue
        expectation = expect(problem, promised="TF32")
        for name, kind in kinds.items():
            adapter, row = Honest(kind), rows[name]
            with np.errstate(all="ignore"):
                arrays = adapter.run(problem, Call(mode=adapter.modes[0])).arrays()
            row.cases.add(case.id)
            for comparison in against(expectation, arrays):
                figures = comparison.figures
                row.largest.append(figures.max_ratio)
                outputs[name, figures.array.partition(".")[0]].append(figures.rms_ratio)
                if not comparison.fits:
                    row.noticed.add(case.id)
    print("| products | max | rms, output | rms, gradients | cases that deviate |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, row in rows.items():
        figures = (_rms(outputs[name, part]) for part in ("output", "gradient"))
        cells = [_ratio(max(row.largest)), *(_ratio(x if x < 1e9 else INFINITE) for x in figures)]
        print(f"| {name} | {' | '.join(cells)} | {len(row.noticed)} of {len(row.cases)} |")


def _expected(problem: Problem) -> Expectation:
    """Return the expectation of a problem, with a better estimate of σ for small deviations."""
    return replace(expect(problem), careful=cache(lambda: expect_carefully(problem)))


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(min(value, 1e100) ** 2 for value in values) / len(values))


def _ratio(value: float) -> str:
    if value >= INFINITE:
        return "∞"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def planted() -> list[Adapter]:
    """An explicit attention in torch, clean and with coarser arithmetic in one place."""
    import torch

    from conformance import MaskArgument, attention_function

    class Rounded(torch.autograd.Function):
        """A product of operands rounded to 11 significand bits, forward and backward (TF32)."""

        @staticmethod
        def forward(ctx, left, right):
            left, right = _to_bits(left, 11), _to_bits(right, 11)
            ctx.save_for_backward(left, right)
            return left @ right

        @staticmethod
        def backward(ctx, gradient):
            left, right = ctx.saved_tensors
            gradient = _to_bits(gradient, 11)
            return gradient @ right.mT, left.mT @ gradient

    class CubicExp(torch.autograd.Function):
        """2^whole times a cubic in the fraction, as kernels do where exp is slow."""

        @staticmethod
        def forward(ctx, x):
            scaled = (x * math.log2(math.e)).clamp_min(-126.0)
            whole = scaled.floor()
            fraction = scaled - whole
            # Interpolates 2^x at the Chebyshev points of [0, 1]: at most 1.0e-4 off, relatively.
            cubic = 0.99990029 + fraction * (
                0.69632477 + fraction * (0.22469316 + fraction * 0.07896726)
            )
            powers = torch.where(scaled > -126.0, torch.ldexp(cubic, whole.int()), 0.0)
            ctx.save_for_backward(powers)
            return powers

        @staticmethod
        def backward(ctx, gradient):
            (powers,) = ctx.saved_tensors
            return gradient * powers

    def softmax(logits, exp=torch.exp, epsilon=0.0):
        powers = exp(logits - logits.amax(-1, keepdim=True).detach())
        return powers / (powers.sum(-1, keepdim=True) + epsilon)

    def in_bfloat16(logits):
        return logits.bfloat16().softmax(-1).to(logits.dtype)

    def make(
        name: str,
        *,
        product: Callable = torch.matmul,
        soft: Callable = softmax,
        factor: float = 1.0,
    ) -> Adapter:
        @attention_function(
            "torch",
            (
                MaskArgument("mask", "batch heads query key", true="attends"),
                MaskArgument("bias", "batch heads query key", number="added"),
            ),
            grouped=True,
            returns_weights="per head",
        )
        def attend(query, key, value, mask=None, bias=None, scale=None):
            """Explicit: all logits, in float32 or wider inside."""
            wide = torch.promote_types(query.dtype, torch.float32)
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, 1).to(wide) for x in (key, value))
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            logits = product(query.to(wide), key.mT) * (scale * factor)
            if bias is not None:
                logits = logits + bias
            if mask is not None:
                logits = logits.masked_fill(~mask, -math.inf)
            weights = soft(logits)
            return product(weights, value).to(query.dtype), weights.to(query.dtype)

        attend.name = attend.title = name
        return attend

    return [
        make("clean"),
        make("TF32 products", product=Rounded.apply),
        make("bfloat16 softmax", soft=in_bfloat16),
        make("cubic exp", soft=lambda logits: softmax(logits, CubicExp.apply)),
        make("scale 1% off", factor=1.01),
        make("normaliser + 1e-6", soft=lambda logits: softmax(logits, epsilon=1e-6)),
    ]


def _to_bits(values, bits: int):
    """Round to this many significand bits."""
    import torch

    significand, exponent = torch.frexp(values)
    return torch.ldexp(torch.round(significand * 2.0**bits) / 2.0**bits, exponent)


if __name__ == "__main__":
    raise SystemExit(main())
