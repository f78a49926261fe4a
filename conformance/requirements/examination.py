"""One implementation before one case: asks it, remembers its answers, knows what is expected.

One evaluation (output, weights and all gradients) serves every check that looks at it, and an
expectation is computed once per problem and dtype, for all implementations and modes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.adapter.base import Adapter, Call, Mode, SideEffects
from conformance.cases.case import Case
from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation, expect
from conformance.definition.problem import Answer, Problem
from conformance.errors import ConformanceError, Unsupported, WrongShape

T = TypeVar("T")


class Raised(Exception):
    """The implementation raised; the original is the cause.

    It tells an implementation's mistake, which is a finding, from one of the suite, which is not.
    """

    @property
    def original(self) -> BaseException:
        """The exception that the implementation raised."""
        assert self.__cause__ is not None
        return self.__cause__

    @property
    def told(self) -> str:
        """The type of the exception and the first line of its message."""
        lines = str(self.original).strip().splitlines() or [""]
        return f"{type(self.original).__name__}: {lines[0]}"


class Memory:
    """A cache of the most recent results, exceptions included."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` returned for this key, or raise again what it raised."""
        if key in self._known:
            self._known.move_to_end(key)
        else:
            try:
                self._known[key] = (make(), None)
            except Exception as error:
                self._known[key] = (None, error)
            if len(self._known) > self._size:
                self._known.popitem(last=False)
        value, raised = self._known[key]
        if raised is not None:
            raise raised
        return value

    def known(self, key: Hashable) -> Any:
        """Return what was computed for this key, or None."""
        return self._known.get(key, (None, None))[0]


@dataclass(frozen=True)
class Workbench:
    """State that several examinations share."""

    decided: Memory = field(default_factory=lambda: Memory(256))
    answers: Memory = field(default_factory=lambda: Memory(64))
    expectations: Memory = field(default_factory=lambda: Memory(64))
    expect: Callable[[Problem], Expectation] = expect
    """Computes an expectation, or finds it where it was kept."""


@dataclass(frozen=True, eq=False)
class Examination:
    """One implementation, one case, one dtype, one device, one mode."""

    adapter: Adapter
    case: Case
    dtype: str
    device: str
    mode: Mode
    bench: Workbench = field(default_factory=Workbench)
    put_back: Callable[[], None] = lambda: None
    """Makes what belongs to everybody in the process as it was before the examination."""

    @property
    def varies_arguments(self) -> bool:
        """Whether checks that give masks in other forms are worth their cost here.

        Where each form is compiled anew: in float32 and in quickly compiled modes only.
        """
        if not self.adapter.compiles:
            return True
        wanted = "float32" if "float32" in self.adapter.dtypes else self.adapter.dtypes[0]
        return self.dtype == wanted and not self.mode.optimised

    @property
    def calls_eagerly(self) -> bool:
        """Whether to look at calls that are not compiled: in one family only if that is slow."""
        return self.varies_arguments and (not self.adapter.compiles or self.case.family == "cross")

    @cached_property
    def problem(self) -> Problem:
        """The problem of the case in this dtype."""
        return self.case.problem(self.dtype)

    @cached_property
    def expectation(self) -> Expectation:
        """The expectation for the case."""
        return self.expected("", lambda: self.problem)

    def expected(self, variant: str, problem: Callable[[], Problem]) -> Expectation:
        """Return the expectation for a variant of the case, cached under that name."""
        key = (self.case.id, self.dtype, variant)
        return self.bench.expectations.get(key, lambda: self.bench.expect(problem()))

    @cached_property
    def suited_expectation(self) -> Expectation:
        """The expectation, with weights averaged over heads if the implementation averages them."""
        weights = self.answer.weights
        if weights is not None and weights.ndim == 3:
            key = (self.case.id, self.dtype, "averaged")
            return self.bench.expectations.get(key, lambda: averaged_over_heads(self.expectation))
        return self.expectation

    @cached_property
    def answer(self) -> Answer:
        """The implementation's answer to the case, in this mode."""
        return self.answer_in(self.mode)

    def answer_in(self, mode: Mode) -> Answer:
        """Return the implementation's answer in a mode; raises what the implementation raised."""
        return self.bench.answers.get(
            self._answer_key(mode), lambda: self.ask(self.problem, mode=mode)
        )

    def _answer_key(self, mode: Mode) -> Hashable:
        return (id(self.adapter), self.case.id, self.dtype, self.device, mode.name)

    @cached_property
    def answer_identity(self) -> Hashable:
        """A key that is equal for two modes whose answers are equal bit for bit."""
        key = (id(self.adapter), self.case.id, self.dtype, self.device)
        return (*key, self.mode.gradients, self.mode.weights, fingerprint(self.answer))

    def exchanged(self) -> dict[str, Array]:
        """The output, reference and noise for comparing implementations, if computed."""
        answer = self.bench.answers.known(self._answer_key(self.mode))
        if answer is None:
            return {}
        want, noise = self.expectation.arrays["output"], self.expectation.loosest["output"]
        return {"output": answer.output, "want": want, "noise": noise}

    def pictured(self) -> dict[str, Array]:
        """Weights, reference, noise and blocked pairs (1 or 0) to draw, if computed."""
        answer = self.bench.answers.known(self._answer_key(self.mode))
        if answer is None or answer.weights is None:
            return {}
        expectation = self.suited_expectation
        return {
            "weights": answer.weights,
            "weights.want": expectation.arrays["weights"],
            "weights.noise": expectation.loosest["weights"],
            "weights.blocked": self.problem.blocked_for(answer.weights).astype(np.float64),
        }

    def ask(
        self,
        problem: Problem,
        *,
        spelling: Spelling | None = None,
        mode: Mode | None = None,
        **manner: Any,
    ) -> Answer:
        """Put another problem to the implementation, or the same one otherwise.

        `manner` holds further fields of `Call`.
        """
        call = Call(mode or self.mode, self.device, spelling, **manner)
        with _theirs():
            answer = self.adapter.run(problem, call)
        check_answer(answer, problem)
        return answer

    def ask_rewritten(self, earlier: Problem) -> Answer:
        """Return the answer from arrays that held the earlier problem in a previous call."""
        with _theirs():
            answer = self.adapter.rewritten(self.problem, earlier, Call(self.mode, self.device))
        check_answer(answer, self.problem)
        return answer

    def side_effects(self) -> SideEffects:
        """Return the side effects of two calls on the same objects."""
        key = ("side effects", self._answer_key(self.mode))

        def look() -> SideEffects:
            # Who seeded or set something in an earlier call would now change nothing.
            self.put_back()
            with _theirs():
                return self.adapter.side_effects(self.problem, Call(self.mode, self.device))

        return self.bench.answers.get(key, look)


def fingerprint(answer: Answer) -> bytes:
    """Return a hash of every bit of an answer."""
    digest = hashlib.blake2b(repr(sorted(answer.dtypes.items())).encode(), digest_size=16)
    for name, array in answer.arrays().items():
        digest.update(name.encode())
        digest.update(array.tobytes())
    return digest.digest()


@contextmanager
def _theirs() -> Iterator[None]:
    """Attribute exceptions that are raised inside the context to the implementation."""
    try:
        yield
    except (Unsupported, ConformanceError):
        raise
    except KeyboardInterrupt:
        # In this process it is the user's.
        raise
    except BaseException as error:
        raise Raised from error


def check_answer(answer: Answer, problem: Problem) -> None:
    """Raise `WrongShape` unless every array has the shape that its name promises."""
    shape = problem.shape
    wanted: dict[str, list[tuple[int, ...]]] = {
        "output": [(shape.batch, shape.query_length, shape.output_width)],
        "weights": [shape.logits, (shape.batch, shape.query_length, shape.key_length)],
    }
    for name in shape.distinct_inputs():
        wanted[f"gradient.{name}"] = [shape.input_shapes()[name]]
    for name, size in shape.weight_shapes().items():
        wanted[f"gradient.weights.{name}"] = [size]
    if problem.attn_bias is not None:
        wanted["gradient.attn_bias"] = [problem.attn_bias.shape]
    for name, array in answer.arrays().items():
        if name not in wanted:
            raise WrongShape(f"answers with {name}, which this problem does not have")
        if not isinstance(array, np.ndarray):
            raise WrongShape(f"{name} is {type(array).__name__}, not a NumPy array")
        if array.shape not in wanted[name]:
            raise WrongShape(
                f"{name} has shape {list(array.shape)}, wanted {list(wanted[name][0])}"
            )


def averaged_over_heads(expectation: Expectation) -> Expectation:
    """Return the same expectation with attention weights `[batch query key]`."""
    arrays = dict(expectation.arrays)
    arrays["weights"] = arrays["weights"].mean(axis=1)
    noise = {}
    for name, sigmas in expectation.noise.items():
        own = sigmas["weights"]
        noise[name] = {**sigmas, "weights": np.sqrt((own**2).sum(axis=1)) / own.shape[1]}
    return Expectation(arrays, noise, expectation.underflow)
