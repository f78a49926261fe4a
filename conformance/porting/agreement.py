"""Run both sides of a conversion on random inputs, and compare their outputs.

Each side gets its own weights: the source those that were read, the target those that were made of
them. The reference computes what the source's weights mean by its adapter's declarations, and the
noise σ. Both are run in float32, which holds float32, float16 and bfloat16 weights exactly.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from conformance.adapter.base import Call
from conformance.adapter.features import HeadNorm
from conformance.adapter.native import Layer
from conformance.cases.case import assembled, rounded
from conformance.definition.comparison import compare
from conformance.definition.dtypes import Array
from conformance.definition.expectation import expect
from conformance.definition.problem import Problem, Rotary, Shape, Sharing
from conformance.errors import (
    ConformanceError,
    Disagreement,
    Unavailable,
    Unsupported,
    WrongAnswer,
    WrongShape,
    WrongTensors,
)
from conformance.text import message

if TYPE_CHECKING:
    from conformance.porting.conversion import Conversion

TOKENS = 7
"""How many tokens the inputs have, in each of two batch entries."""

LARGEST = 1e9
"""The largest weight with which both sides are run: logits are then below 1e30."""


@dataclass(frozen=True)
class Agreement:
    """How much the outputs of source and target differ, as the largest error in σ.

    Attributes:
        apart: the largest difference of their outputs; None unless both were run.
        source, target: the largest error relative to the reference; None if it was not run.
        source_not_run, target_not_run: why it was not run; "" if it was.
        limit: the largest error that is allowed.
    """

    apart: float | None
    source: float | None
    target: float | None
    source_not_run: str
    target_not_run: str
    limit: float = math.inf

    def described(self, source: str, target: str) -> str:
        """Return the figures as text; the arguments are the names of the implementations."""
        parts = [] if self.apart is None else [f"{self.apart:.3g}σ apart"]
        errors = ((source, self.source), (target, self.target))
        each = [f"{name} {error:.3g}σ" for name, error in errors if error is not None]
        if each:
            parts.append(f"{' and '.join(each)} from the reference (allowed: {self.limit:g}σ)")
        reasons = ((source, self.source_not_run), (target, self.target_not_run))
        parts += [f"{name} was not run: {reason}" for name, reason in reasons if reason]
        return "; ".join(parts)


def agreement(done: Conversion, where: str) -> Agreement:
    """Return how much source and target of a conversion differ on random inputs.

    Args:
        done: the conversion.
        where: the beginning of a message: which weights these are.

    Raises:
        Disagreement: if they differ by more than 8σ, unless both are as close to the reference, or
            if the only one that can be run is further from it.
        ConformanceError: if a side raises an exception.
    """
    try:
        shape = _shape(done)
        posed = _problem(done, shape, ported=False)
        ported = _problem(done, shape, ported=True)
    except (WrongTensors, Unsupported) as reason:
        return Agreement(None, None, None, str(reason), str(reason))
    one, source_not_run = _output(done.source, posed)
    other, target_not_run = _output(done.target, ported)
    expected = expect(posed, gradients=False)
    want, noise = expected.arrays["output"], expected.sigma["output"]

    def error(got: Array | None, of: Array | None) -> float | None:
        if got is None or of is None:
            return None
        return float(compare("output", got, of, noise, expected.underflow).figures.max_ratio)

    limit = compare("output", want, want, noise, expected.underflow).figures.limit
    errors = (error(other, one), error(one, want), error(other, want))
    found = Agreement(*errors, source_not_run, target_not_run, limit)
    sides = ((done.source, found.source), (done.target, found.target))
    far = [layer.name for layer, it in sides if it is not None and not it <= limit]
    if far and (found.apart is None or not found.apart <= limit):
        raise Disagreement(
            f"{where}{done.target.name} with the converted weights does not compute what "
            f"{done.source.name} does: {found.described(done.source.name, done.target.name)}; "
            f"nothing was written. A declaration is wrong: examine {' and '.join(far)} with "
            "mha-conformance run, above all the parameter table, the pairs of rotary embeddings, "
            "the order of heads and the scale"
        )
    return found


def _problem(done: Conversion, shape: Shape, *, ported: bool) -> Problem:
    """Return a problem with random inputs and the weights of the source, or those of the target.

    Raises:
        WrongTensors: if the weights have a dtype in which nothing is computed.
        Unsupported: if they are so large that products would overflow.
    """
    if ported:
        layer, table, tensors = done.target, done.written, done.made
    else:
        layer, table, tensors = done.source, done.read, done.given
    shape = replace(shape, bias=table.shape.bias)
    weights = {
        f"weights.{name}": array
        for row in table.rows
        for name, array in row.to_canonical(tensors[row.native].values, shape).items()
    }
    largest = max(float(np.abs(array).max(initial=0)) for array in weights.values())
    if largest > LARGEST:
        raise Unsupported(f"weights of up to {largest:.3g} are too large for float32")
    random = np.random.default_rng(0)
    sizes = shape.input_shapes()
    drawn = {name: random.standard_normal(sizes[name]) for name in shape.distinct_inputs()}
    drawn["cotangent"] = np.zeros((shape.batch, shape.query_length, shape.output_width))
    fields: dict[str, Any] = {
        "scale": done.scale if ported else done.meaning.scale,
        "soft_cap": done.meaning.soft_cap,
    }
    size = done.turns.size
    if size and size % 2 == 0:
        pairs = done.turns.after if ported else done.turns.before
        fields["rotary"] = Rotary(size=size, base=done.turns.base or 10000.0, pairs=pairs)
        turned = done.meaning.rotation
        if turned.scaling and turned.scaled is None:
            raise Unsupported(
                f"config.json does not tell all numbers of a rotation of the kind {turned.scaling}"
            )
        fields["rotary_scaling"] = turned.scaled
    for side in (done.source, done.target):
        if side.fixed and side.fixed.causal:
            fields["causal"] = side.fixed.causal
    for feature in layer.features:
        values = {name: tensors[name].values for name in feature.holds if name in tensors}
        fields |= feature.held(values, _epsilon(done))
    return rounded(assembled(shape, drawn | weights, **fields), "float32")


def _epsilon(done: Conversion) -> float:
    """Return ε of the query/key norm: a number that a side fixes, or that of the model."""
    for layer in (done.source, done.target):
        for feature in layer.features:
            if isinstance(feature, HeadNorm) and isinstance(feature.epsilon, float):
                return feature.epsilon
    return done.meaning.epsilon or 1e-6


def _shape(done: Conversion) -> Shape:
    """Return a shape with the sizes of the weights, and inputs that both sides take.

    Raises:
        Unsupported: if there are no such inputs.
    """
    reason = Unsupported("there are no inputs that both take")
    for sharing in SHARINGS:
        try:
            shape = replace(
                done.shape, batch=2, query_length=TOKENS, key_length=TOKENS, sharing=sharing
            )
            for layer, table in ((done.source, done.read), (done.target, done.written)):
                layer.check_shape(shape)
                if layer.fixed:
                    layer.fixed.check_shape(replace(shape, bias=table.shape.bias))
        except WrongShape:
            continue
        except Unsupported as error:
            reason = error
            continue
        return shape
    raise reason


SHARINGS: tuple[Sharing, ...] = ("self", "memory", "separate")


def _output(layer: Layer, problem: Problem) -> tuple[Array | None, str]:
    """Return the output of a layer, or None and why it cannot be run."""
    mode = replace(layer.modes[0], gradients=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = layer.run(problem, Call(mode=mode)).output
    except (Unsupported, Unavailable) as error:
        return None, str(error)
    except Exception as error:
        raise ConformanceError(
            f"{layer.name} cannot be run with these weights, so nothing was written: "
            f"{type(error).__name__}: {message(error)}; --no-run leaves this out"
        ) from error
    if output.shape != problem.cotangent.shape:
        raise WrongAnswer(
            f"{layer.name} returned an output of shape {list(output.shape)}, not "
            f"{list(problem.cotangent.shape)}, so nothing was written; --no-run leaves this out"
        )
    return output, ""
