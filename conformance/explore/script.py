"""Write a stand-alone reproduction: a short program that contains all numbers of a problem.

The program computes one element by the definition in float64 and by calling the library, and fails
if the two differ by more than rounding explains. If the dtype or the shape of the output is wrong,
the program checks that instead. It is short enough to paste into an issue of the library, and needs
nothing but the library and NumPy, unless the adapter has no example of a direct call.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conformance.adapter.base import Adapter
from conformance.adapter.code import FRAMEWORKS, Example, lines
from conformance.adapter.native import Layer
from conformance.definition.features import NO_WINDOW
from conformance.definition.problem import Problem, Weights
from conformance.errors import ConformanceError, Unsupported
from conformance.explore.code import (
    WIDTH,
    called,
    definition,
    enclosed,
    laid_out,
    literal,
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
    """The problem has too many numbers for a short program."""


def script(adapter: Adapter, spec: str, trial: Trial, deviation: Deviation, case: str) -> str:
    """Return a program that reproduces the deviation; `spec` names the adapter to load.

    Raises:
        TooLong: the program would have more than `MOST_LINES` lines, or too long a line.
    """
    problem, shape = trial.problem, trial.problem.shape
    gradient = bool(deviation.gradient_of)
    call = _call(adapter, trial, deviation, spec)
    arrays = written(numbers(problem, cotangent=gradient))
    text = [*_header(adapter, spec, trial, deviation, case, call), *call.imports, "", *arrays]
    if gradient or deviation.array in ("output", "weights"):
        returned = "output" if gradient else deviation.array
        if returned == "weights" and len(deviation.index) == 3:
            returned = "averaged"
        text += ["", *definition(problem, returned), "", *_want(deviation)]
        shown = 'f"got {got:.17g}, want {want:.17g}, apart {abs(got - want):.3g}"'
        holds = f"abs(got - want) <= {deviation.allowed:.3g}"
        otherwise = "more than rounding can explain"
    elif deviation.kind == "dtype":
        shown, holds = "got", f'got.endswith("{problem.dtype}")'
        otherwise = "not the inputs' dtype"
    else:
        size = (shape.batch, shape.query_length, shape.output_width)
        shown, holds, otherwise = "got", f"got == {size}", "not the shape of the output"
    text += ["", *call.lines, f"print({shown})", f'assert {holds}, "{otherwise}"']
    text = [part for line in text for part in _wrapped(line)]
    if len(text) > MOST_LINES:
        text = [line for line in text if line]
    if len(text) > MOST_LINES or any(len(line) > WIDTH for line in text):
        raise TooLong(
            f"a script for this problem has {len(text)} lines, more than {MOST_LINES}; a smaller "
            "problem is needed: shrink it, or give that more --seconds"
        )
    return "\n".join(text) + "\n"


def _header(
    adapter: Adapter, spec: str, trial: Trial, deviation: Deviation, case: str, call: _Call
) -> list[str]:
    found = " ".join(printable(deviation.text).split()).replace("{array}", deviation.array)
    text = [f"{adapter.title}, {trial.problem.dtype}: {found}."]
    if deviation.kind in ("off", "not finite"):
        ratio = "infinitely many" if deviation.ratio >= INFINITE else f"{deviation.ratio:.2g}"
        text.append(
            f"{deviation.array}{_at(deviation.index)} is {ratio} σ off, and 8 are allowed; σ is "
            f"the rounding error of a correct {trial.problem.dtype} computation there."
        )
    versions = ", ".join(f"{name} {version}" for name, version in adapter.versions().items())
    text.append(f"Found with {versions or 'no versions known'}; {case}, mode {trial.mode.name}.")
    if not call.standalone:
        text.append(f"Needs mha-conformance, because {printable(spec)} declares itself to it.")
    return [
        f"# {line}" for line in textwrap.wrap(" ".join(text), WIDTH - 2, break_on_hyphens=False)
    ]


def _want(deviation: Deviation) -> list[str]:
    at = _at(deviation.index)
    if not deviation.gradient_of:
        return [f"want = attention(n){at}"]
    name = called(deviation.gradient_of)
    return [
        f'moved = {{**n, "{name}": n["{name}"].astype(complex)}}',
        f'moved["{name}"]{at} += {STEP}  # the imaginary part is the derivative, without rounding',
        f'want = (attention(moved) * n["cotangent"]).sum().imag / {STEP[:-1]}',
    ]


def _wrapped(line: str) -> list[str]:
    """Break a long line of code into several lines after commas, which must be inside brackets."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    found = []
    while len(line) > WIDTH:
        place = line.rfind(", ", 0, WIDTH)
        if place < len(indent):
            break
        found.append(line[: place + 1])
        line = indent + line[place + 2 :]
    return [*found, line]


@dataclass(frozen=True)
class _Call:
    """Code lines that assign the implementation's result to `got`, and the imports they need.

    `standalone` is False if the lines need this suite because the implementation does.
    """

    imports: Sequence[str]
    lines: Sequence[str]
    standalone: bool = True


def _call(adapter: Adapter, trial: Trial, deviation: Deviation, spec: str) -> _Call:
    """Return a direct call of the library if the adapter has an example that allows it.

    Otherwise, return a call through the adapter.
    """
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
        if not isinstance(value, np.ndarray):
            masks[name] = repr(value)
        else:
            dtype = problem.dtype if value.dtype == np.float64 else ""
            code = laid_out(value, problem)
            if value.dtype.kind not in "fb" or value.dtype == np.float32:
                code += f'.astype("{value.dtype}")'
            masks[name] = words.array(code, dtype)
    if deviation.array == "weights" and not example.weights:
        raise Unsupported("the example has no weights")
    result = example.expression(masks, weights=deviation.array == "weights")
    shared = _shared(trial)
    names = [group[0] for group in shared]
    given = ", ".join(["native", *names])
    ran = f"jax.jit(run)({given})" if framework == "jax" else result
    if deviation.gradient_of:
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
        together = [f"    {' = '.join(same)} = {first}" for first, *same in shared if same]
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
            f"{' = '.join(group)} = " + words.array(f'n["{group[0]}"]', problem.dtype)
            for group in shared
        ]
        every = [*made, *inputs, *build, *load, *end]
    return _Call(imports, [part for line in every for part in line.split("\n")])


def _shared(trial: Trial) -> list[tuple[str, ...]]:
    """Return the names of the inputs, grouped by which of them are the same array."""
    groups: dict[str, list[tuple[str, ...]]] = {
        "self": [("query", "key", "value")],
        "memory": [("query",), ("key", "value")],
        "separate": [("query",), ("key",), ("value",)],
    }
    return groups[trial.problem.shape.sharing]


def _gradient(
    adapter: Layer, example: Example, trial: Trial, deviation: Deviation, result: str
) -> list[str]:
    """Return code lines that assign one element of a gradient to `got`.

    Raises:
        Unsupported: the example or the framework gives no access to this gradient.
    """
    framework, dtype, index = adapter.framework, trial.problem.dtype, deviation.index
    words, name = FRAMEWORKS[framework], deviation.gradient_of
    cotangent = words.array('n["cotangent"]', dtype)
    if name == "attn_bias":
        raise Unsupported("the bias is part of a mask argument")
    native, leaf = "", name
    if name.startswith("weights."):
        native, index = _native_index(adapter, trial, name.removeprefix("weights."), index)
        leaf = example.parameter.replace("{name}", native)
        if not leaf and framework != "jax":
            raise Unsupported("the example names no parameter")
    got = f"got = {words.numpy.format('gradient')}{_at(index)}"
    if framework == "jax":
        names = ["native", *(group[0] for group in _shared(trial))]
        number, part = (0, f'["{native}"]') if native else (names.index(name), "")
        return [
            f"loss = lambda *given: (run(*given) * {cotangent}).sum()",
            f"gradient = jax.jit(jax.grad(loss, argnums={number}))({', '.join(names)}){part}",
            got,
        ]
    if framework == "tensorflow":
        return [
            "with tf.GradientTape() as tape:",
            *([] if native else [f"    tape.watch({leaf})"]),
            f"    result = {result}",
            f"gradient = tape.gradient(result, {leaf}, {cotangent})",
            got,
        ]
    marked, grad = {
        "torch": (f"{leaf}.requires_grad_()", "torch.autograd.grad"),
        "paddle": (f"{leaf}.stop_gradient = False", "paddle.grad"),
    }.get(framework, ("", ""))
    if not grad:
        raise Unsupported(f"derivatives of {framework} are functions")
    return [
        *([] if native else [marked]),
        f"result = {result}",
        f"gradient = {grad}(result, {leaf}, {cotangent})[0]",
        got,
    ]


def _native_index(
    adapter: Layer, trial: Trial, weight: str, index: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Return the native parameter that contains an element of a canonical weight, and its index."""
    marked = {name: np.zeros_like(array) for name, array in trial.problem.weights.named().items()}
    marked[weight][index] = 1.0
    for name, array in adapter.table(trial.problem.shape).load(Weights(**marked)).items():
        if array.any():
            return name, tuple(int(i[0]) for i in np.nonzero(array))
    raise AssertionError("the table holds every weight")


def _call_through_adapter(adapter: Adapter, trial: Trial, deviation: Deviation, spec: str) -> _Call:
    """Return code that calls the implementation through its adapter."""
    problem, shape = trial.problem, trial.problem.shape
    sizes = [
        f"{field.name}={getattr(shape, field.name)!r},"
        for field in dataclasses.fields(shape)
        if getattr(shape, field.name) != field.default
    ]
    weights = [f'{name}=n["{called(f"weights.{name}")}"],' for name in problem.weights.named()]
    inputs = [f'{name}=n["{group[0]}"],' for group in _shared(trial) for name in group]
    size = (shape.batch, shape.query_length, shape.output_width)
    cotangent = 'n["cotangent"]' if deviation.gradient_of else f"np.zeros({size})"
    inputs += [f'dtype="{problem.dtype}",', f"cotangent={cotangent},"]
    if problem.mask is not None:
        inputs.append("mask=mask,")
    if problem.causal is not None:
        inputs.append(f'causal="{problem.causal}",')
    if problem.attn_bias is not None:
        inputs.append('attn_bias=n["attn_bias"],')
    if problem.scale is not None:
        inputs.append(f"scale={problem.scale!r},")
    inputs += _features(problem)
    place = [mode.name for mode in adapter.modes].index(trial.mode.name)
    if deviation.kind == "dtype":
        got = 'dtypes["output"]'
    elif deviation.gradient_of or deviation.array in ("output", "weights"):
        got = f'arrays()["{deviation.array}"]{_at(deviation.index)}'
    else:
        got = "output.shape"
    lines = [
        "problem = Problem(",
        *packed(
            ["shape=Shape(", *sizes, "),", "weights=Weights(", *weights, "),", *inputs], "    "
        ),
        ")",
        f"adapter = load({spec!r})",
        f"got = adapter.run(problem, Call(adapter.modes[{place}])).{got}",
    ]
    imports = [
        "import numpy as np",
        "from conformance import Call, Problem, Shape",
        "from conformance.adapter.loading import load",
        "from conformance.definition.problem import Weights",
    ]
    if any("=features." in line for line in lines):
        imports.insert(3, "from conformance.definition import features")
    return _Call(imports, lines, standalone=False)


def _features(problem: Problem) -> list[str]:
    """Return the keyword arguments of `Problem` that define its features, as code."""
    arguments = []
    if problem.window != NO_WINDOW:
        arguments.append(f"window={problem.window!r},")
    if problem.soft_cap is not None:
        arguments.append(f"soft_cap={problem.soft_cap!r},")
    arguments += [
        f'{name}=n["{name}"],' for name in ("sinks", "slopes") if getattr(problem, name) is not None
    ]
    if problem.rotary is not None:
        arguments.append(f"rotary=features.{problem.rotary!r},")
    if problem.norm is not None:
        gains = 'query=n["gq"], key=n["gk"]'
        arguments.append(f"norm=features.Norm({gains}, epsilon={problem.norm.epsilon!r}),")
    for name in ("query_lengths", "key_lengths"):
        if (lengths := getattr(problem, name)) is not None:
            arguments.append(f"{name}=np.array({literal(lengths)}),")
    for name in ("segments", "positions"):
        if (both := getattr(problem, name)) is not None:
            sides = (
                f"{side}=np.array({literal(getattr(both, side))})" for side in ("query", "key")
            )
            arguments.append(f"{name}=features.{name.capitalize()}({', '.join(sides)}),")
    return arguments


def _at(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""
