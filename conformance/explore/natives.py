"""The other half of a reproduction: the library's own call, made of what its adapter declares.

Text only; no framework is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conformance.adapter.base import Adapter
from conformance.adapter.layer import Layer
from conformance.adapter.script import Script
from conformance.definition.problem import Weights
from conformance.errors import Unsupported
from conformance.explore.code import called, enclosed, laid_out, packed, parameter
from conformance.explore.trial import Deviation, Trial


@dataclass(frozen=True)
class Native:
    """Lines that leave what the implementation answered in `got`, and those that come before.

    `standalone` is False if they need this suite, because the implementation does.
    """

    imports: Sequence[str]
    lines: Sequence[str]
    standalone: bool = True


_IMPORT = {"torch": "import torch", "jax": "import jax, jax.numpy as jnp"}
_IMPORT |= {"tensorflow": "import tensorflow as tf", "paddle": "import paddle"}
_IMPORT |= {"mlx": "import mlx.core as mx"}
_ARRAY = {
    "torch": "torch.tensor({}, dtype=torch.{dtype})",
    "jax": 'jnp.asarray({}, "{dtype}")',
    "tensorflow": 'tf.constant({}, "{dtype}")',
    "mlx": "mx.array({}, mx.{dtype})",
    "paddle": 'paddle.to_tensor({}, "{dtype}")',
}
_BOOL = {"torch": "torch.tensor({})", "jax": "jnp.asarray({})", "tensorflow": "tf.constant({})"}
_BOOL |= {"mlx": "mx.array({})", "paddle": "paddle.to_tensor({})"}
_NUMPY = {
    "torch": "{}.detach().double().numpy()",
    "jax": "np.array({}).astype(float)",
    "tensorflow": "{}.numpy().astype(float)",
    "mlx": "np.array({}.astype(mx.float64))",
    "paddle": '{}.astype("float64").numpy()',
}


def native(adapter: Adapter, trial: Trial, deviation: Deviation, spec: str) -> Native:
    """The library's own call if its adapter declares one, else a call through the adapter."""
    if isinstance(adapter, Layer) and adapter.framework in _ARRAY:
        problem = trial.problem
        script = adapter.script(problem.shape, problem.dtype, problem.scale, trial.mode)
        if script is not None:
            try:
                return _own(adapter, script, trial, deviation)
            except Unsupported:
                pass
    return _through_adapter(adapter, trial, deviation, spec)


def _own(adapter: Layer, script: Script, trial: Trial, deviation: Deviation) -> Native:
    problem, framework = trial.problem, adapter.framework
    shape = problem.shape
    imports = ["import numpy as np", *script.imports]
    if not any(_IMPORT[framework].split()[1].strip(",") == line.split()[-1] for line in imports):
        imports.append(_IMPORT[framework])
    if framework == "jax" and problem.dtype == "float64":
        imports.append('jax.config.update("jax_enable_x64", True)')
    if framework == "mlx" and problem.dtype == "float64":
        imports.append("mx.set_default_device(mx.cpu)")
    rows = [f'"{row.native}": {parameter(row, shape)},' for row in adapter.table(shape).rows]
    loaded = enclosed("native = {", rows, "}")
    array = _ARRAY[framework].replace("{dtype}", problem.dtype)
    inputs = [
        f"{' = '.join(names)} = " + array.format(f'n["{names[0]}"]') for names in _shared(trial)
    ]
    spelling = adapter.masks.spell(problem)
    masks = ""
    for name, value in spelling.arguments.items():
        if isinstance(value, bool):
            masks += f", {name}={value}"
        else:
            kind = _BOOL[framework] if value.dtype == np.bool_ else array
            masks += f", {name}={kind.format(laid_out(value, problem))}"
    call = script.call.replace("{masks}", masks)
    shown = script.weights if deviation.array == "weights" else script.output
    if not shown:
        raise Unsupported("the script has no weights")
    result = shown.replace("{}", call)
    at = _at(deviation.index)
    names = [names[0] for names in _shared(trial)]
    ran = f"jax.jit(run)({', '.join(['native', *names])})" if framework == "jax" else result
    if deviation.array.startswith("gradient."):
        end = _gradient(adapter, script, trial, deviation, result)
    elif deviation.kind == "dtype":
        end = [f"got = str({ran}.dtype)"]
    elif deviation.array in ("output", "weights"):
        end = [f"got = {_NUMPY[framework].format(ran)}{at}"]
    else:
        end = [f"got = tuple({ran}.shape)"]
    if framework == "jax":
        wrapped = [f"def run({', '.join(['native', *names])}):"]
        wrapped += [f"    {' = '.join(own[1:])} = {own[0]}" for own in _shared(trial) if own[1:]]
        wrapped += [f"    {line}" for line in (*script.load, f"return {result}")]
        lines = [
            *loaded,
            f"{', '.join(['native', *names])} = jax.tree.map("
            f"lambda a: {array.format('a')}, "
            f"({', '.join(['native', *(_entry(name) for name in names)])}))",
            *script.build,
            *wrapped,
            *end,
        ]
    else:
        if framework == "torch" and not trial.mode.gradients:
            end[0] = f"with torch.no_grad():\n    {end[0]}"
        lines = [*loaded, *inputs, *script.build, *script.load, *end]
    return Native(imports, [part for line in lines for part in line.split("\n")])


def _entry(name: str) -> str:
    """An array of `n`."""
    return f'n["{name}"]'


def _shared(trial: Trial) -> list[tuple[str, ...]]:
    """Inputs that are one array, together."""
    groups: dict[str, list[tuple[str, ...]]] = {
        "self": [("query", "key", "value")],
        "memory": [("query",), ("key", "value")],
        "separate": [("query",), ("key",), ("value",)],
    }
    return groups[trial.problem.shape.sharing]


def _gradient(
    adapter: Layer, script: Script, trial: Trial, deviation: Deviation, result: str
) -> list[str]:
    """Lines that leave one element of a gradient in `got`."""
    framework, problem = adapter.framework, trial.problem
    name = deviation.array.removeprefix("gradient.")
    cotangent = _ARRAY[framework].format('n["cotangent"]', dtype=problem.dtype)
    index = deviation.index
    if name == "attn_bias":
        raise Unsupported("the bias is part of a mask argument")
    if name.startswith("weights."):
        own, index = _native_index(adapter, trial, name.removeprefix("weights."), index)
        leaf = script.parameter.replace("{name}", own)
        if not leaf and framework != "jax":
            raise Unsupported("the script names no parameter")
    else:
        own, leaf = "", name
    at = _at(index)
    if framework == "jax":
        names = [names[0] for names in _shared(trial)]
        every = ", ".join(["native", *names])
        number = 0 if own else 1 + names.index(name)
        part = f'["{own}"]' if own else ""
        return [
            f"loss = lambda *given: (run(*given) * {cotangent}).sum()",
            f"gradient = jax.jit(jax.grad(loss, argnums={number}))({every}){part}",
            f"got = {_NUMPY[framework].format('gradient')}{at}",
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
            f"got = {_NUMPY[framework].format('gradient')}{at}",
        ]
    return [
        "with tf.GradientTape() as tape:",
        *([] if own else [f"    tape.watch({leaf})"]),
        f"    result = {result}",
        f"gradient = tape.gradient(result, {leaf}, {cotangent})",
        f"got = {_NUMPY[framework].format('gradient')}{at}",
    ]


def _native_index(
    adapter: Layer, trial: Trial, weight: str, index: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Where an element of a canonical weight lies among the native parameters."""
    marked = {name: np.zeros_like(array) for name, array in trial.problem.weights.named().items()}
    marked[weight][index] = 1.0
    for name, array in adapter.table(trial.problem.shape).load(Weights(**marked)).items():
        if array.any():
            return name, tuple(int(i[0]) for i in np.nonzero(array))
    raise AssertionError("the table holds every weight")


def _through_adapter(adapter: Adapter, trial: Trial, deviation: Deviation, spec: str) -> Native:
    """A call as the suite makes it: for adapters that do not say what their users type."""
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
    return Native(imports, lines, standalone=False)


def _causal(trial: Trial) -> str:
    problem = trial.problem
    flag = f'causal="{problem.causal}",'
    return flag if problem.mask is None else f"mask=mask, {flag}"


def _at(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""
