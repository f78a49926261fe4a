"""A stand-alone reproduction: one short program with the numbers in it.

It computes one element by the definition in float64 and by the library's own call, and fails while
the two are further apart than rounding explains. It is short enough for an issue of that library,
and needs nothing but the library and NumPy.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conformance.adapter.base import Adapter
from conformance.adapter.code import FRAMEWORKS, Example, lines
from conformance.adapter.layer import Layer
from conformance.definition.problem import Weights
from conformance.errors import ConformanceError, Unsupported
from conformance.explore.code import (
    WIDTH,
    called,
    definition,
    enclosed,
    laid_out,
    numbers,
    packed,
    parameter,
    written,
)
from conformance.explore.trial import Deviation, Trial
from conformance.records.findings import INFINITE
from conformance.text import printable

MOST_LINES = 40
STEP = "1e-30j"


class TooLong(ConformanceError):
    """The problem has more numbers than a short program holds."""


def script(adapter: Adapter, spec: str, trial: Trial, deviation: Deviation, case: str) -> str:
    """Return the program.

    Raises:
        TooLong: it would have more than `MOST_LINES` lines.
    """
    problem = trial.problem
    gradient = deviation.array.startswith("gradient.")
    own = _call(adapter, trial, deviation, spec)
    compared = deviation.array in ("output", "weights") or gradient
    text = [
        *_header(adapter, spec, trial, deviation, case, own.standalone),
        *own.imports,
        "",
        *written(numbers(problem, cotangent=gradient)),
    ]
    if compared:
        returned = "output" if gradient else deviation.array
        if returned == "weights" and len(deviation.index) == 3:
            returned = "averaged"
        text += ["", *definition(problem, returned), "", *_want(deviation)]
    text += ["", *own.lines]
    if compared:
        text += [
            'print(f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}")',
            f'assert abs(got - want) <= {deviation.allowed:.3g}, "more than rounding can explain"',
        ]
    elif deviation.kind == "dtype":
        text += ["print(got)", f'assert got.endswith("{problem.dtype}"), "not the inputs\' dtype"']
    else:
        shape = problem.shape
        wanted = (shape.batch, shape.query_length, shape.output_width)
        text += ["print(got)", f'assert got == {wanted}, "not the shape of the output"']
    text = _tight([part for line in text for part in _wrapped(line)])
    if len(text) > MOST_LINES or any(len(line) > WIDTH for line in text):
        raise TooLong(
            f"a script for this problem has {len(text)} lines, more than {MOST_LINES}; a smaller "
            "problem is needed: shrink it, or give that more --seconds"
        )
    return "\n".join(text) + "\n"


def _header(
    adapter: Adapter, spec: str, trial: Trial, deviation: Deviation, case: str, standalone: bool
) -> list[str]:
    found = " ".join(printable(deviation.text).split()).replace("{array}", deviation.array)
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
    """Break a long statement into several lines after commas, which stand within brackets."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    found = []
    while len(line) > WIDTH:
        place = line.rfind(", ", 0, WIDTH)
        if place < len(indent):
            break
        found.append(line[: place + 1])
        line = indent + line[place + 2 :]
    return [*found, line]


def _tight(text: list[str]) -> list[str]:
    """Remove empty lines if there are too many of the others."""
    return text if len(text) <= MOST_LINES else [line for line in text if line]


@dataclass(frozen=True)
class _Call:
    """Lines that assign the implementation's answer to `got`, and the imports that they need.

    `standalone` is False if they need this suite, because the implementation does.
    """

    imports: Sequence[str]
    lines: Sequence[str]
    standalone: bool = True


def _call(adapter: Adapter, trial: Trial, deviation: Deviation, spec: str) -> _Call:
    """Return the library's own call if its adapter has an example, else one through the adapter."""
    if isinstance(adapter, Layer) and adapter.framework in FRAMEWORKS:
        problem = trial.problem
        example = adapter.example_for(problem.shape, problem.dtype, problem.scale, trial.mode)
        if example is not None and example.load:
            try:
                return _own_call(adapter, example, trial, deviation)
            except Unsupported:
                pass
    return _call_through_adapter(adapter, trial, deviation, spec)


def _own_call(adapter: Layer, example: Example, trial: Trial, deviation: Deviation) -> _Call:
    problem, framework = trial.problem, adapter.framework
    words = FRAMEWORKS[framework]
    imports = words.imports(example)
    if problem.dtype == "float64":
        imports += {
            "jax": ['jax.config.update("jax_enable_x64", True)'],
            "mlx": ["mx.set_default_device(mx.cpu)"],
        }.get(framework, [])
    masks = {}
    for name, value in adapter.masks.spell(problem).arguments.items():
        if isinstance(value, bool):
            masks[name] = str(value)
        else:
            dtype = "" if value.dtype == np.bool_ else problem.dtype
            masks[name] = words.array(laid_out(value, problem), dtype)
    if deviation.array == "weights" and not example.weights:
        raise Unsupported("the example has no weights")
    result = example.expression(masks, weights=deviation.array == "weights")
    shared = _shared(trial)
    names = [own[0] for own in shared]
    given = ", ".join(["native", *names])
    ran = f"jax.jit(run)({given})" if framework == "jax" else result
    if deviation.array.startswith("gradient."):
        end = _gradient(adapter, example, trial, deviation, result)
    elif deviation.kind == "dtype":
        end = [f"got = str({ran}.dtype)"]
    elif deviation.array in ("output", "weights"):
        end = [f"got = {words.numpy.format(ran)}{_at(deviation.index)}"]
    else:
        end = [f"got = tuple({ran}.shape)"]
    shape = problem.shape
    rows = [f'"{row.native}": {parameter(row, shape)},' for row in adapter.table(shape).rows]
    made = enclosed("native = {", rows, "}")
    build, load = lines(example.build), lines(example.load)
    if framework == "jax":
        arrays = ", ".join(["native", *(f'n["{name}"]' for name in names)])
        together = [f"    {' = '.join(own[1:])} = {own[0]}" for own in shared if own[1:]]
        every = [
            *made,
            f"{given} = jax.tree.map(lambda a: {words.array('a', problem.dtype)}, ({arrays}))",
            *build,
            f"def run({given}):",
            *together,
            *(f"    {line}" for line in (*load, f"return {result}")),
            *end,
        ]
    else:
        if framework == "torch" and not trial.mode.gradients:
            end[0] = f"with torch.no_grad():\n    {end[0]}"
        inputs = [
            f"{' = '.join(own)} = " + words.array(f'n["{own[0]}"]', problem.dtype) for own in shared
        ]
        every = [*made, *inputs, *build, *load, *end]
    return _Call(imports, [part for line in every for part in line.split("\n")])


def _shared(trial: Trial) -> list[tuple[str, ...]]:
    """Return the names of the inputs, those that are one array together."""
    groups: dict[str, list[tuple[str, ...]]] = {
        "self": [("query", "key", "value")],
        "memory": [("query",), ("key", "value")],
        "separate": [("query",), ("key",), ("value",)],
    }
    return groups[trial.problem.shape.sharing]


def _gradient(
    adapter: Layer, example: Example, trial: Trial, deviation: Deviation, result: str
) -> list[str]:
    """Return lines that assign one element of a gradient to `got`."""
    framework, problem = adapter.framework, trial.problem
    words = FRAMEWORKS[framework]
    name = deviation.array.removeprefix("gradient.")
    cotangent = words.array('n["cotangent"]', problem.dtype)
    index = deviation.index
    if name == "attn_bias":
        raise Unsupported("the bias is part of a mask argument")
    if name.startswith("weights."):
        own, index = _native_index(adapter, trial, name.removeprefix("weights."), index)
        leaf = example.parameter.replace("{name}", own)
        if not leaf and framework != "jax":
            raise Unsupported("the example names no parameter")
    else:
        own, leaf = "", name
    got = f"got = {words.numpy.format('gradient')}{_at(index)}"
    if framework == "jax":
        names = [names[0] for names in _shared(trial)]
        every = ", ".join(["native", *names])
        number = 0 if own else 1 + names.index(name)
        part = f'["{own}"]' if own else ""
        return [
            f"loss = lambda *given: (run(*given) * {cotangent}).sum()",
            f"gradient = jax.jit(jax.grad(loss, argnums={number}))({every}){part}",
            got,
        ]
    if framework == "mlx":
        raise Unsupported("derivatives of mlx are functions")
    if framework in ("torch", "paddle"):
        wanted, grad = {
            "torch": (f"{leaf}.requires_grad_()", "torch.autograd.grad"),
            "paddle": (f"{leaf}.stop_gradient = False", "paddle.grad"),
        }[framework]
        return [
            *([] if own else [wanted]),
            f"result = {result}",
            f"gradient = {grad}(result, {leaf}, {cotangent})[0]",
            got,
        ]
    return [
        "with tf.GradientTape() as tape:",
        *([] if own else [f"    tape.watch({leaf})"]),
        f"    result = {result}",
        f"gradient = tape.gradient(result, {leaf}, {cotangent})",
        got,
    ]


def _native_index(
    adapter: Layer, trial: Trial, weight: str, index: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Return the native parameter and the index there of an element of a canonical weight."""
    marked = {name: np.zeros_like(array) for name, array in trial.problem.weights.named().items()}
    marked[weight][index] = 1.0
    for name, array in adapter.table(trial.problem.shape).load(Weights(**marked)).items():
        if array.any():
            return name, tuple(int(i[0]) for i in np.nonzero(array))
    raise AssertionError("the table holds every weight")


def _call_through_adapter(adapter: Adapter, trial: Trial, deviation: Deviation, spec: str) -> _Call:
    """Return a call as the suite makes it, for adapters without an example."""
    problem, shape = trial.problem, trial.problem.shape
    sizes = [f"{name}={getattr(shape, name)!r}," for name in type(shape).__dataclass_fields__]
    weights = [f'{name}=n["{called(f"weights.{name}")}"],' for name in problem.weights.named()]
    inputs = [f'{own}=n["{names[0]}"],' for names in _shared(trial) for own in names]
    cotangent = (
        'n["cotangent"]'
        if deviation.array.startswith("gradient.")
        else (f"np.zeros({(shape.batch, shape.query_length, shape.output_width)})")
    )
    more = [f'dtype="{problem.dtype}",', f"cotangent={cotangent},"]
    if problem.allowed is not None:
        more.append("mask=mask," if problem.causal is None else _causal(trial))
    if problem.attn_bias is not None:
        more.append('attn_bias=n["attn_bias"],')
    if problem.scale is not None:
        more.append(f"scale={problem.scale!r},")
    place = [mode.name for mode in adapter.modes].index(trial.mode.name)
    lines = [
        "problem = Problem(",
        *packed(["shape=Shape(", *sizes, "),", "weights=Weights(", *weights, "),"], "    "),
        *packed([*inputs, *more], "    "),
        ")",
        f"adapter = load({spec!r})",
        f"answer = adapter.run(problem, Call(adapter.modes[{place}]))",
    ]
    if deviation.kind == "dtype":
        lines.append('got = answer.dtypes["output"]')
    elif deviation.array in ("output", "weights") or deviation.array.startswith("gradient."):
        lines.append(f'got = answer.arrays()["{deviation.array}"]{_at(deviation.index)}')
    else:
        lines.append("got = answer.output.shape")
    imports = [
        "import numpy as np",
        "from conformance import Call, Problem, Shape",
        "from conformance.adapter.loading import load",
        "from conformance.definition.problem import Weights",
    ]
    return _Call(imports, lines, standalone=False)


def _causal(trial: Trial) -> str:
    problem = trial.problem
    flag = f'causal="{problem.causal}",'
    return flag if problem.mask is None else f"mask=mask, {flag}"


def _at(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""
