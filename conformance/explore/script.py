"""Write a stand-alone reproduction: a short program that contains all numbers of a problem.

The program computes one element twice, by the definition in float64 and by calling the library. It
fails if the two differ by more than rounding explains. If the dtype or the shape of the output is
wrong, or the library raises an exception, the program checks only the dtype or the shape. It is
short enough to paste into an issue of the library. It needs nothing but the library and NumPy,
unless no direct call can be derived from the adapter; then it calls the adapter and needs this
suite too. What was found on a GPU is computed on a GPU, or fails if there is none.
"""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.base import Adapter
from conformance.adapter.code import FRAMEWORKS, Example, lines
from conformance.adapter.native import Layer
from conformance.adapter.parameters import Parameter
from conformance.definition.dtypes import BoolArray
from conformance.definition.features import FEATURES, OF_HEADS, OF_LOGITS, OF_RULES, OF_SOFTMAX
from conformance.definition.problem import INPUT_AXES, Problem, Shape, Weights
from conformance.errors import ConformanceError, Unsupported
from conformance.explore.trial import Trial, TrialDeviation
from conformance.records.findings import INFINITE
from conformance.text import printable

MOST_LINES = 40
STEP = "1e-30j"
WIDTH = 100
"""The maximum length of a line of generated code."""

DEFINED = ("output", "weights")
"""The arrays that a program computes by itself, as it does gradients."""

NAMES = {
    "weights.query": "Wq",
    "weights.key": "Wk",
    "weights.value": "Wv",
    "weights.output": "Wo",
    "weights.query_bias": "bq",
    "weights.key_bias": "bk",
    "weights.value_bias": "bv",
    "weights.output_bias": "bo",
    "weights.score": "u",
    **{name: symbol for entry in FEATURES for name, symbol in entry.symbols.items()},
}
"""The names of weights and gains in a generated script; other arrays keep their own names."""


class TooLong(ConformanceError):
    """The problem has too many numbers for a short program."""


def script(adapter: Adapter, spec: str, trial: Trial, deviation: TrialDeviation, case: str) -> str:
    """Return a program that reproduces the deviation.

    Args:
        spec: the name or location of the adapter, which the program may have to load.
        case: the id of the case, for a comment.

    Raises:
        TooLong: the program would have more than `MOST_LINES` lines, or a line longer than `WIDTH`.
    """
    problem, shape = trial.problem, trial.problem.shape
    gradient = bool(deviation.gradient_of)
    call = _call(adapter, trial, deviation, spec)
    arrays = _written(_numbers(problem, cotangent=gradient))
    text = [*_header(adapter, spec, trial, deviation, case, call), *call.imports, "", *arrays]
    if gradient or deviation.array in DEFINED:
        returned = "output" if gradient else deviation.array
        if returned == "weights" and len(deviation.index) == 3:
            returned = "averaged"
        text += ["", *_definition(problem, returned), "", *_want(deviation)]
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
    adapter: Adapter, spec: str, trial: Trial, deviation: TrialDeviation, case: str, call: _Call
) -> list[str]:
    found = " ".join(printable(deviation.text).split()).replace("{array}", deviation.array)
    if deviation.kind == "off" and (deviation.gradient_of or deviation.array in DEFINED):
        # Whoever reads the script in an issue knows no definition but the one that it holds.
        found = f"{deviation.array} is not that of attention(n)"
    text = [f"{adapter.title}, {trial.problem.dtype}: {found}."]
    if deviation.kind in ("off", "not finite"):
        ratio = "infinitely many" if deviation.ratio >= INFINITE else f"{deviation.ratio:.2g}"
        text.append(
            f"{deviation.array}{_at(deviation.index)} is {ratio} σ off (allowed: 8), σ "
            f"being the rounding error of a correct {trial.problem.dtype} computation."
        )
    versions = ", ".join(f"{name} {version}" for name, version in adapter.versions().items())
    model = "" if trial.device == "cpu" else f" on {adapter.device_model(trial.device)}"
    found = f"Found with {versions or 'no versions known'}{model}"
    text.append(f"{found}; {case}, mode {trial.mode.name}.")
    if not call.standalone:
        text.append(f"Needs mha-conformance, because {printable(spec)} declares itself to it.")
    return [
        f"# {line}" for line in textwrap.wrap(" ".join(text), WIDTH - 2, break_on_hyphens=False)
    ]


def _want(deviation: TrialDeviation) -> list[str]:
    at = _at(deviation.index)
    if not deviation.gradient_of:
        return [f"want = attention(n){at}"]
    name = _called(deviation.gradient_of)
    return [
        f'moved = {{**n, "{name}": n["{name}"].astype(complex)}}',
        f'moved["{name}"]{at} += {STEP}  # the imaginary part is the derivative, without rounding',
        f'want = (attention(moved) * n["cotangent"]).sum().imag / {STEP[:-1]}',
    ]


def _wrapped(line: str) -> list[str]:
    """Return a line of code, broken after commas into lines of at most `WIDTH` characters.

    The commas must be inside brackets. A part without a comma at which to break it stays too long.
    """
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
    """Code that assigns the implementation's result to `got`.

    `standalone` tells whether the code works without this suite.
    """

    imports: Sequence[str]
    lines: Sequence[str]
    standalone: bool = True


def _call(adapter: Adapter, trial: Trial, deviation: TrialDeviation, spec: str) -> _Call:
    """Return a direct call to the library or, if none can be derived, a call to the adapter."""
    if isinstance(adapter, Layer) and adapter.framework in FRAMEWORKS:
        problem = trial.problem
        example = adapter.example_for(problem.shape, problem.dtype, problem.scale, trial.mode)
        if example is not None and example.load:
            with suppress(Unsupported):
                return _own_call(adapter, example, trial, deviation)
    return _call_through_adapter(adapter, trial, deviation, spec)


def _own_call(adapter: Layer, example: Example, trial: Trial, deviation: TrialDeviation) -> _Call:
    problem, framework = trial.problem, adapter.framework
    words = FRAMEWORKS[framework].on(trial.device)
    imports = words.imports(example)
    if trial.device != "cpu":
        imports.append(words.on_gpu.format(device=adapter.bridge.device_name(trial.device)))
    elif problem.dtype == "float64":
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
            code = _laid_out(value, problem)
            if value.dtype.kind not in "fb" or value.dtype == np.float32:
                code += f'.astype("{value.dtype}")'
            masks[name] = words.array(code, dtype)
    if deviation.array == "weights" and not example.weights:
        raise Unsupported("the example has no weights")
    result = example.expression(masks, weights=deviation.array == "weights")
    shared, names = _shared(trial), problem.shape.distinct_inputs()
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
    made = _enclosed("native = {", rows, "}")
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
    """Return the names "query", "key" and "value", grouped by the array that they share."""
    shape = trial.problem.shape
    return [
        tuple(name for name in INPUT_AXES if shape.array_of(name) == array)
        for array in shape.distinct_inputs()
    ]


def _gradient(
    adapter: Layer, example: Example, trial: Trial, deviation: TrialDeviation, result: str
) -> list[str]:
    """Return code lines that assign the deviating element of a gradient to `got`.

    `result` is the expression that calls the library.

    Raises:
        Unsupported: the suite cannot write gradient code for this framework, the gradient is that
            of the bias (part of a mask argument), or the example does not name the parameter.
    """
    framework, dtype, index = adapter.framework, trial.problem.dtype, deviation.index
    words, name = FRAMEWORKS[framework].on(trial.device), deviation.gradient_of
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
        names = ["native", *trial.problem.shape.distinct_inputs()]
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
    """Return the parameter of the library that holds an element of a weight, and its index there.

    Args:
        weight: the name of the weight in `Weights`.
        index: the index of the element in this weight.

    Returns:
        The name of the parameter, and the index of the element in it.
    """
    marked = {name: np.zeros_like(array) for name, array in trial.problem.weights.named().items()}
    marked[weight][index] = 1.0
    for name, array in adapter.table(trial.problem.shape).load(Weights(**marked)).items():
        if array.any():
            return name, tuple(int(i[0]) for i in np.nonzero(array))
    raise AssertionError("the table holds every weight")


def _call_through_adapter(
    adapter: Adapter, trial: Trial, deviation: TrialDeviation, spec: str
) -> _Call:
    problem, shape = trial.problem, trial.problem.shape
    sizes = [
        f"{field.name}={getattr(shape, field.name)!r},"
        for field in dataclasses.fields(shape)
        if getattr(shape, field.name) != field.default
    ]
    weights = [f'{name}=n["{_called(f"weights.{name}")}"],' for name in problem.weights.named()]
    inputs = [f'{name}=n["{group[0]}"],' for group in _shared(trial) for name in group]
    size = (shape.batch, shape.query_length, shape.output_width)
    cotangent = 'n["cotangent"]' if deviation.gradient_of else f"np.zeros({size})"
    inputs += [f'dtype="{problem.dtype}",', f"cotangent={cotangent},"]
    inputs += _optional_arguments(problem)
    place = [mode.name for mode in adapter.modes].index(trial.mode.name)
    device = "" if trial.device == "cpu" else f', "{trial.device}"'
    if deviation.kind == "dtype":
        got = 'dtypes["output"]'
    elif deviation.gradient_of or deviation.array in ("output", "weights"):
        got = f'arrays()["{deviation.array}"]{_at(deviation.index)}'
    else:
        got = "output.shape"
    text = [
        "problem = Problem(",
        *_packed(["shape=Shape(", *sizes, "),", "weights=Weights(", *weights, "),", *inputs]),
        ")",
        f"adapter = load({spec!r})",
        f"got = adapter.run(problem, Call(adapter.modes[{place}]{device})).{got}",
    ]
    values = {kind for line in text for kind in re.findall(r"=([A-Z]\w+)\(", line)}
    parts = sorted(values - {"Shape", "Weights"})
    imports = [
        "import numpy as np",
        "from conformance import Call, Problem, Shape",
        "from conformance.adapter.loading import load",
        f"from conformance.definition.problem import {', '.join([*parts, 'Weights'])}",
    ]
    return _Call(imports, text, standalone=False)


def _optional_arguments(problem: Problem) -> list[str]:
    """Return the keyword arguments of `Problem` for its masks and features, as code."""
    present = {
        "mask=mask,": problem.mask is not None,
        f'causal="{problem.causal}",': problem.causal is not None,
        'attn_bias=n["attn_bias"],': problem.attn_bias is not None,
        f"scale={problem.scale!r},": problem.scale is not None,
    }
    arguments = [argument for argument, there in present.items() if there]
    for entry in FEATURES:
        for name, value in entry.fields(problem).items():
            if name in entry.arrays:
                code = _array(name, value)
            elif entry.value is None:
                code = repr(value)
            else:
                sides = {array.partition(".")[2]: array for array in entry.arrays}
                parts = [f"{side}={_array(a, getattr(value, side))}" for side, a in sides.items()]
                parts += [f"{told}={number!r}" for told, number in entry.told(problem).items()]
                code = f"{entry.value.__name__}({', '.join(parts)})"
            arguments.append(f"{name}={code},")
    return arguments


def _array(name: str, array: np.ndarray) -> str:
    """Return code for an array of a feature: the dictionary of the script holds those of floats."""
    return f'n["{_called(name)}"]' if array.dtype.kind == "f" else f"np.array({literal(array)})"


def _at(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""


# Arrays and the definition as code


def _called(name: str) -> str:
    return NAMES.get(name, name)


def _mask(problem: Problem) -> BoolArray | None:
    """Return the mask that combines all rules; None if there is no rule, or they hide no key."""
    allowed = problem.allowed
    idle = problem.mask is None and allowed is not None and bool(allowed.all())
    return None if idle else allowed


def _numbers(problem: Problem, *, cotangent: bool) -> dict[str, np.ndarray]:
    """Return the arrays with which a generated script begins, by their names in it.

    They are the inputs, weights, bias, arrays of floats that belong to features, the mask that
    combines all rules, if any, and the cotangent, if requested.
    """
    found = {name: getattr(problem, name) for name in problem.shape.distinct_inputs()}
    found |= {_called(f"weights.{k}"): array for k, array in problem.weights.named().items()}
    mask = _mask(problem)
    if mask is not None:
        found["mask"] = mask
    if problem.attn_bias is not None:
        found["attn_bias"] = problem.attn_bias
    for name, array in problem.feature_arrays().items():
        if array.dtype.kind == "f":
            found[_called(name)] = array
    if cotangent:
        found["cotangent"] = problem.cotangent
    return found


def literal(array: np.ndarray) -> str:
    """Return Python code for an array: nested lists of exact numbers, booleans as 0 and 1.

    For more than three zeros and nothing else, return a call to `np.zeros`.
    """
    if not array.any() and array.size > 3:
        return f"np.zeros({tuple(array.shape)})"
    return _nested(array.astype(int).tolist() if array.dtype == np.bool_ else array.tolist())


def _nested(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_nested, value))}]"
    if isinstance(value, int):
        return str(value)
    assert isinstance(value, float)
    if math.isinf(value):
        return "-np.inf" if value < 0 else "np.inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e6 else repr(value)


def _written(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return code lines that assign a mask, if any, to `mask`, and a dict of the rest to `n`."""
    entries = [f"{name}={literal(array)}," for name, array in arrays.items() if name != "mask"]
    text = _enclosed("n = dict(", entries, ")")
    text.append("n = {name: np.array(numbers, float) for name, numbers in n.items()}")
    if "mask" in arrays:
        text += _enclosed("mask = np.array(", [f"{literal(arrays['mask'])},", "bool"], ")")
    return text


def _enclosed(before: str, entries: Sequence[str], after: str) -> list[str]:
    """Return code lines with the entries between two brackets, on a single line if they fit."""
    whole = before + " ".join(entries).rstrip(",") + after
    return [whole] if len(whole) <= WIDTH else [before, *_packed(entries), after]


def _packed(entries: Sequence[str]) -> list[str]:
    """Return indented lines filled with entries; an entry that is too long is broken at commas."""
    indent = "    "
    packed: list[str] = []
    for entry in entries:
        for place, piece in enumerate(_pieces(entry, WIDTH - len(indent))):
            if place == 0 and packed and len(packed[-1]) + 1 + len(piece) <= WIDTH:
                packed[-1] += f" {piece}"
            else:
                packed.append(indent + piece)
    return packed


def _pieces(entry: str, room: int) -> list[str]:
    if len(entry) <= room:
        return [entry]
    pieces = [""]
    for word in re.split(r"(?<=,) ", entry):
        if pieces[-1] and len(pieces[-1]) + 1 + len(word) > room:
            pieces.append(word)
        else:
            pieces[-1] = f"{pieces[-1]} {word}".lstrip()
    return pieces


def _definition(problem: Problem, returned: str) -> list[str]:
    """Return code lines of a function `attention(n)`, where `n` is the dict of the script's arrays.

    The positions and the rotary function that it uses are defined before it; the script must define
    `mask` if the problem has one. The function also accepts complex numbers, so that a small
    imaginary step yields derivatives.

    Args:
        returned: what the function returns: "output", "weights", or "averaged" for weights averaged
            over heads.
    """
    shape = problem.shape
    text = []
    for letter, named in (("q", "query"), ("k", "key"), ("v", "value")):
        source = f'n["{shape.array_of(named)}"]'
        line = f'    {letter} = np.einsum("bse,ehd->bhsd", {source}, n["W{letter}"])'
        text.append(line + (f' + n["b{letter}"][:, None]' if shape.has_bias(named) else ""))
    text += _code(problem, OF_HEADS, OF_LOGITS)
    if shape.group > 1:
        text.append(f"    k, v = k.repeat({shape.group}, axis=1), v.repeat({shape.group}, axis=1)")
    if shape.score == "additive":
        inner = "np.tanh(q[:, :, :, None] + k[:, :, None])"
        logits = f'np.einsum("bhqkd,hd->bhqk", {inner}, n["u"])'
    else:
        logits = 'np.einsum("bhqd,bhkd->bhqk", q, k)'
    if problem.scale is not None:
        logits += f" * {problem.scale!r}"
    elif shape.score != "additive" and shape.head_size != 1:
        logits += f" / np.sqrt({shape.head_size})"
    text.append(f"    logits = {logits}")
    text += _code(problem, OF_LOGITS, OF_RULES)
    if problem.attn_bias is not None:
        text.append('    logits = logits + n["attn_bias"]')
    if _mask(problem) is not None:
        text.append("    logits = np.where(mask, logits, -np.inf)")
    text += _code(problem, OF_SOFTMAX) or [
        "    powers = np.exp(logits - logits.real.max(axis=-1, keepdims=True))",
        "    weights = powers / powers.sum(axis=-1, keepdims=True)  # the softmax",
    ]
    bias = ' + n["bo"]' if shape.has_bias("output") else ""
    end = {
        "output": f'np.einsum("bhqk,bhkd,hde->bqe", weights, v, n["Wo"]){bias}',
        "weights": "weights",
        "averaged": "weights.mean(axis=1)",
    }[returned]
    if returned != "output":
        text = [line for line in text if not line.startswith("    v = ")]
        text = [line.replace("k, v = ", "k = ").split(", v.repeat")[0] for line in text]
    before = _placed(problem)
    return [*before, "def attention(n):  # the definition", *text, f"    return {end}"]


def _code(problem: Problem, first: float, end: float = math.inf) -> list[str]:
    """Return the code lines of the features from one step of the definition to before another."""
    entries = (entry for entry in problem.entries if first <= entry.step < end)
    return [line for entry in entries for line in entry.code(problem)]


def _placed(problem: Problem) -> list[str]:
    """Return code lines that assign positions and define what uses them; [] if nothing does."""
    if not any(entry.placed for entry in problem.entries):
        return []
    sides = (problem.position_of_queries, problem.position_of_keys)
    at = ", ".join(f"np.array({literal(np.ascontiguousarray(side))})" for side in sides)
    before = [line for entry in problem.entries for line in entry.code_before(problem)]
    return [f"at_query, at_key = {at}", *before]


def parameter(row: Parameter, shape: Shape) -> str:
    """Return a Python expression that makes a library's parameter from the script's dict `n`.

    `row` describes which weights the parameter holds, and in which layout.
    """
    canonical, native = layouts.sides(row.pattern)
    left, right = layouts.axes(canonical), layouts.axes(native)
    parts, stack = [], row.stack
    for name in row.names:
        sizes = dict(zip(left, shape.weight_shapes()[name], strict=True))
        code = f'n["{_called(f"weights.{name}")}"]'
        if row.interleaved and shape.group > 1:
            before = ":, " * left.index("heads")
            code += f"[{before}{row.order(shape).tolist()}]"
        order = [left.index(axis) for axis in right]
        if order != sorted(order):
            code += f".transpose({', '.join(map(str, order))})"
        reshaped = layouts.shape(native, sizes)
        if row.grouped and stack is not None:
            each = reshaped[stack] // shape.kv_heads
            reshaped = (*reshaped[:stack], shape.kv_heads, each, *reshaped[stack + 1 :])
        if reshaped != tuple(sizes[axis] for axis in right):
            code += f".reshape({', '.join(map(str, reshaped))})"
        parts.append(code)
    if stack is None:
        return parts[0]
    axis = stack + row.grouped
    joined = f"np.concatenate([{', '.join(parts)}]{f', axis={axis}' if axis else ''})"
    if not row.grouped:
        return joined
    # Merge the axis of the groups with the next one; `reshaped` is the shape of the last part.
    whole = (*reshaped[:stack], -1, *reshaped[stack + 2 :])
    return f"{joined}.reshape({', '.join(map(str, whole))})"


def _laid_out(array: np.ndarray, problem: Problem) -> str:
    """Return code for the array of a mask argument.

    If the script's mask, the negated mask or the script's bias has the same numbers and dtype, the
    code refers to it; otherwise, it contains all numbers of the array.
    """
    known: list[tuple[str, np.ndarray]] = []
    mask = _mask(problem)
    if mask is not None:
        known = [("mask", mask), ("~mask", ~mask)]
    if problem.attn_bias is not None:
        known.append(('n["attn_bias"]', problem.attn_bias))
    for code, canonical in known:
        if canonical.dtype == array.dtype and canonical.size == array.size:
            if canonical.shape == array.shape and (canonical == array).all():
                return code
            if (canonical.reshape(array.shape) == array).all():
                shaped = f"({code})" if code.startswith("~") else code
                return f"{shaped}.reshape({', '.join(map(str, array.shape))})"
    return f"np.array({literal(array)}{', bool' if array.dtype == np.bool_ else ''})"
