"""Does it compute what the definition says? Output, gradients, dtype."""

from __future__ import annotations

from collections.abc import Callable

from conformance.definition.comparison import accuracy_class, against
from conformance.definition.dtypes import Array
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import Requirement, judge


def output(ex: Examination) -> Finding:
    """Every element of the output lies within the noise of an honest implementation."""
    said = "the output is not the definition's"
    return _judge(OUTPUT.id, ex, {"output": ex.answer.output}, said)


def _judge(requirement: str, ex: Examination, arrays: dict[str, Array], said: str) -> Finding:
    """Compare with the expectation, and name the accuracy class that was reached."""
    compared = against(ex.expectation, arrays)
    accuracy = ""
    if all(comparison.fits for comparison in compared):
        only, *others = ex.expectation.noise
        accuracy = accuracy_class(ex.expectation, arrays) if others else only
    return judge(requirement, compared, accuracy=accuracy, said=said)


def _gradients(
    requirement: str, wanted: Callable[[str], bool]
) -> Callable[[Examination], Finding | None]:
    def check(ex: Examination) -> Finding | None:
        if not ex.mode.gradients:
            return None
        own = ex.problem.shape
        every = [*own.distinct_inputs(), *(f"weights.{name}" for name in own.weight_shapes())]
        every += ["attn_bias"] if ex.problem.attn_bias is not None else []
        names = [f"gradient.{name}" for name in every if wanted(name)]
        if not names:
            return None
        answer = ex.answer
        if not ex.adapter.differentiable or not answer.gradients:
            raise Unsupported("no gradients")
        arrays = answer.arrays()
        missing = [name for name in names if name not in arrays]
        if missing:
            detail = f"there is no {', '.join(missing)}"
            return Finding(requirement, "deviates", detail=detail)
        found = {name: arrays[name] for name in names}
        return _judge(requirement, ex, found, "{array} is not the definition's")

    return check


def dtype(ex: Examination) -> Finding:
    """Output and gradients have the dtype of the inputs."""
    names = {"output"} | {f"gradient.{name}" for name in ("query", "key", "value")}
    other = {
        name: found
        for name, found in ex.answer.dtypes.items()
        if name in names and found != ex.dtype
    }
    if not ex.answer.dtypes:
        raise Unsupported("the adapter does not say which dtypes it returned")
    if other:
        told = ", ".join(f"{name} is {found}" for name, found in other.items())
        return Finding(DTYPE.id, "deviates", detail=f"inputs are {ex.dtype}, but {told}")
    return Finding(DTYPE.id, "conforms")


OUTPUT = Requirement(
    id="output.equals-definition",
    level="must",
    sentence="The output is that of the definition, element by element, within rounding noise.",
    why="Everything else is worth nothing if a port computes something else.",
    check=output,
    every_case=True,
    of_answer=True,
)
INPUTS = Requirement(
    id="gradient.inputs-equal-definition",
    level="must",
    sentence="The gradients of query, key and value are those of the definition.",
    why="A wrong gradient does not show in inference; training just gets worse.",
    check=_gradients(
        "gradient.inputs-equal-definition",
        lambda name: not name.startswith("weights.") and name != "attn_bias",
    ),
    every_case=True,
    of_answer=True,
)
PARAMETERS = Requirement(
    id="gradient.parameters-equal-definition",
    level="must",
    sentence="The gradients of all weights and biases are those of the definition.",
    why="A parameter that is detached, doubled or transposed in the backward pass trains wrongly.",
    check=_gradients(
        "gradient.parameters-equal-definition", lambda name: name.startswith("weights.")
    ),
    every_case=True,
    of_answer=True,
)
BIAS = Requirement(
    id="gradient.bias-equals-definition",
    level="must",
    sentence="The gradient of the additive bias is that of the definition, 0 where it is blocked.",
    why="Learned relative positions train through it; several kernels drop it silently.",
    check=_gradients("gradient.bias-equals-definition", lambda name: name == "attn_bias"),
    every_case=True,
    of_answer=True,
)
DTYPE = Requirement(
    id="dtype.in-is-out",
    level="must",
    sentence="Output and input gradients have the dtype of the inputs.",
    why="A silent float32 doubles the memory; a silent half precision loses the digits.",
    check=dtype,
    every_case=True,
    of_answer=True,
)

REQUIREMENTS = (OUTPUT, INPUTS, PARAMETERS, BIAS, DTYPE)
