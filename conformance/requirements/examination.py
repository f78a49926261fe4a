"""Define `Examination`, which calls one implementation with one case.

Answers and expectations are cached. One call, which computes the output, and weights and gradients
if the mode has them, serves all checks that need the answer to the case in this mode. The
expectation for a problem in a dtype is computed once for all implementations and modes, but
separately for implementations without gradients.
"""

from __future__ import annotations

import hashlib
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.adapter.base import Adapter, Call, Mode, ReturnedStatistic, SideEffects
from conformance.cases.case import Case
from conformance.definition.attention import heads_alone
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.expectation import (
    CAREFUL,
    ROW_SUMS,
    Expectation,
    expect,
    expect_carefully,
    of_function,
    solve,
)
from conformance.definition.problem import Answer, Problem, check_shape
from conformance.errors import ConformanceError, Unsupported, WrongShape
from conformance.text import is_exhausted, text_of

T = TypeVar("T")


class RaisedInside(Exception):
    """A wrapper whose `__cause__` is an exception that the implementation raised.

    It distinguishes errors of the implementation, which are findings, from errors of the suite.
    """

    @property
    def original(self) -> BaseException:
        """The exception that the implementation raised."""
        assert self.__cause__ is not None
        return self.__cause__

    @property
    def told(self) -> str:
        """The name of the exception's type, and the first line of its message."""
        lines = text_of(self.original).strip().splitlines() or [""]
        return f"{type(self.original).__name__}: {lines[0]}"


class ResultMemory:
    """A cache of the `size` most recently used results, some of which may be exceptions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the result of `make()`, cached under the key.

        If `make()` raises an exception, the exception is cached, and raised by later calls too.
        """
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
        """Return the result cached under the key; None if nothing or an exception is cached."""
        return self._known.get(key, (None, None))[0]


NO_ANSWER = (ConformanceError, Unsupported, RaisedInside)
"""The exceptions that a call may raise instead of returning an answer."""


@dataclass(frozen=True)
class Workbench:
    """Caches that several examinations share, and the function that computes expectations.

    Attributes:
        decided: findings that depend only on an answer, see `Requirement.of_answer`.
        answers: answers, and other results that several checks need.
        explained: the known mistakes that explain wrong answers.
        expectations: expectations for problems.
    """

    decided: ResultMemory = field(default_factory=lambda: ResultMemory(256))
    answers: ResultMemory = field(default_factory=lambda: ResultMemory(64))
    explained: ResultMemory = field(default_factory=lambda: ResultMemory(1024))
    expectations: ResultMemory = field(default_factory=lambda: ResultMemory(128))
    expect: Callable[..., Expectation] = expect
    """The function that computes the expectation for a problem, or loads one that was saved
    earlier; its argument `gradients` says whether to include gradients."""


@dataclass(frozen=True, eq=False)
class Examination:
    """An examination of one implementation with one case, in one dtype and mode on one device."""

    adapter: Adapter
    case: Case
    dtype: str
    device: str
    mode: Mode
    bench: Workbench = field(default_factory=Workbench)
    put_back: Callable[[], None] = lambda: None
    """A function that restores the process-wide state (random generators, settings) that the
    examination started with."""

    @property
    def varies_arguments(self) -> bool:
        """Whether checks that pass the mask in several forms are worth their cost here.

        They always are, unless each form has to be compiled. In that case, they are worth it only
        in modes that are not optimised, and in one dtype: float32 if the adapter supports it, or
        else the adapter's first dtype.
        """
        if not self.adapter.compiles:
            return True
        wanted = "float32" if "float32" in self.adapter.dtypes else self.adapter.dtypes[0]
        return self.dtype == wanted and not self.mode.optimised

    @property
    def calls_eagerly(self) -> bool:
        """Whether checks that call the implementation eagerly are worth their cost.

        They always are, unless the implementation is normally compiled. Eager calls, operation by
        operation, are slow then, so they are made only for cases of one family of shapes, and only
        if `varies_arguments` is true.
        """
        return self.varies_arguments and (not self.adapter.compiles or self.case.family == "cross")

    @cached_property
    def problem(self) -> Problem:
        """The problem of the case in this dtype."""
        return self.case.problem(self.dtype)

    @cached_property
    def expectation(self) -> Expectation:
        """The expected answer to the case, with its rounding noise."""
        adapter, problem = self.adapter, partial(self.case.problem, self.dtype)
        promise = (adapter.promised(self.dtype), adapter.projections_supplied)
        key = (self.case.id, self.dtype, adapter.has_gradients, *promise)
        return self.bench.expectations.get(key, lambda: self.expected("", problem))

    def expected(self, variant: str, problem: Callable[[], Problem]) -> Expectation:
        """Return the expectation for `problem()`, a variant of the case's problem.

        The expectation is cached under `variant`, the name of the variant, which is "" for the
        problem of the case itself; `problem` is called only if nothing is cached. The expectation
        has the σ of the accuracy class that the adapter promises, or else of the least accurate
        class.
        """
        bench, gradients = self.bench, self.adapter.has_gradients
        promised = self.adapter.promised(self.dtype)
        key = (self.case.id, self.dtype, variant, gradients, promised)
        found = bench.expectations.get(
            key, lambda: bench.expect(problem(), gradients=gradients, promised=promised)
        )

        def careful() -> Expectation:
            again = bench.expectations.get(
                (*key, "careful"),
                lambda: expect_carefully(problem(), gradients=gradients, promised=promised),
            )
            return self._as_promised(again, problem, key, CAREFUL)

        return replace(self._as_promised(found, problem, key), careful=careful)

    def _as_promised(
        self,
        found: Expectation,
        problem: Callable[[], Problem],
        key: tuple[Hashable, ...],
        times: int = 1,
    ) -> Expectation:
        """Return an expectation in which the σ of class A0 is that of functions if one promises it.

        `key` is that of the problem's expectations in the cache, and `times` says how often noisy
        evaluations are repeated.
        """
        adapter = self.adapter
        if not (adapter.promised(self.dtype) == "A0" and adapter.projections_supplied):
            return found
        sigma = self.bench.expectations.get(
            (*key, "of a function", times),
            lambda: of_function(problem(), times, gradients=adapter.has_gradients),
        )
        return found if sigma is None else replace(found, noise={**found.noise, "A0": sigma})

    @property
    def kernel_expectation(self) -> Expectation:
        """The expectation for attention on projected heads, without projections by the suite."""
        return self.expected("kernel", lambda: self.kernel_problem)

    @property
    def kernel_answer(self) -> Answer:
        """The implementation's answer for projected heads; exceptions are those of `ask`."""
        key = ("kernel", self._answer_key(self.mode))
        return self.bench.answers.get(key, lambda: self.ask(self.kernel_problem, projected=True))

    @property
    def kernel_problem(self) -> Problem:
        """The problem of attention on projected heads, which are rounded to the dtype."""
        key = ("heads alone", self.case.id, self.dtype)
        return self.bench.answers.get(key, lambda: heads_alone(self.problem))

    @cached_property
    def suited_expectation(self) -> Expectation:
        """The expectation; its weights are averaged over heads if those of the answer are."""
        weights = self.answer.weights
        if weights is None or weights.ndim != 3:
            return self.expectation
        adapter = self.adapter
        promise = (adapter.promised(self.dtype), adapter.projections_supplied)
        key = (self.case.id, self.dtype, "averaged", adapter.has_gradients, *promise)
        return self.bench.expectations.get(key, lambda: averaged_over_heads(self.expectation))

    @cached_property
    def answer(self) -> Answer:
        """The implementation's answer to the case, in this mode."""
        return self.answer_in(self.mode)

    def answer_in(self, mode: Mode) -> Answer:
        """Return the implementation's answer to the case in a mode, cached; raise as `ask` does."""
        key = self._answer_key(mode)
        return self.bench.answers.get(key, lambda: self.ask(self.problem, mode=mode))

    def answer_as_returned(self) -> Answer:
        """Return the answer to the case with what fully masked queries really get.

        `answer` has predetermined rows for them if the case has a defined answer.
        """
        if not self.case.defined or seen_rows(self.problem) is None:
            return self.answer
        with _theirs():
            answer = self.adapter.run(self.problem, Call(self.mode, self.device))
        check_answer(answer, self.problem)
        return answer

    def _answer_key(self, mode: Mode) -> tuple[Hashable, ...]:
        return (id(self.adapter), self.case.id, self.dtype, self.device, mode.name)

    @cached_property
    def answer_identity(self) -> Hashable:
        """A key that two modes share only if their answers are equal bit for bit.

        The two modes must also agree in the dtypes of their answers, in whether they have
        gradients, and in whether they return weights.
        """
        arrays = self.answer.arrays()
        names = repr([*arrays, *sorted(self.answer.dtypes.items())]).encode()
        digest = hashlib.blake2b(names)
        for array in (*arrays.values(), *self.answer.statistics.values()):
            digest.update(array.tobytes())
        *key, _ = self._answer_key(self.mode)
        return (*key, self.mode.gradients, self.mode.weights, digest.digest())

    def with_statistics(self, declared: ReturnedStatistic) -> tuple[Problem, Expectation]:
        """Return the problem of which a declared statistic is, and what is expected of it, cached.

        The problem has a loss on the log-sum-exp of every query that sees a key, too. It has no
        sink if none counts in the statistic.
        """
        problem, variant = self.problem, "log-sum-exp"
        loss = self.case.random("loss on log-sum-exp").standard_normal(problem.shape.logits[:-1])
        seen = problem.allowed_in_full().any(axis=-1)
        if problem.sinks is not None and not declared.includes_sink:
            problem, variant = problem.replace(sinks=None), "log-sum-exp without sinks"
        loss = problem.format.round(np.where(seen, loss, 0.0))
        problem = problem.replace(log_sum_exp_cotangent=loss)
        return problem, self.expected(variant, lambda: problem)

    def exchanged(self) -> dict[str, Array]:
        """Return the output, its reference and its noise, for comparing implementations.

        Return {} if no answer to the case is cached, for example because the call failed.
        """
        answer = self.bench.answers.known(self._answer_key(self.mode))
        if answer is None:
            return {}
        want, noise = self.expectation.arrays["output"], self.expectation.sigma["output"]
        return {"output": answer.output, "want": want, "noise": noise}

    def pictured(self) -> dict[str, Array]:
        """Return the attention weights, their reference, their noise and a mask, for drawing.

        The mask is 1 where a key is blocked. Return {} if no answer with weights is cached.
        """
        answer = self.bench.answers.known(self._answer_key(self.mode))
        if answer is None or answer.weights is None:
            return {}
        expectation = self.suited_expectation
        return {
            "weights": answer.weights,
            "weights.want": expectation.arrays["weights"],
            "weights.noise": expectation.sigma["weights"],
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
        """Call the implementation with a problem, and return its answer.

        Args:
            problem: the problem.
            spelling: the encoding of the problem's mask; None for the adapter's preferred encoding.
            mode: the mode; None for that of the examination.
            manner: further fields of `Call`, such as `strided`.

        Raises:
            Raised: if the implementation raised an exception.
            Unsupported: if the adapter cannot express the problem.
            ConformanceError: if the suite raised an error, such as `WrongShape` for an answer that
                does not fit the problem.
        """
        call = Call(mode or self.mode, self.device, spelling, **manner)
        with _theirs():
            # An adapter that reads problems itself may not know that there are features.
            self.adapter.check_features(problem)
            answer = self.adapter.run(problem, call)
        return self._checked(answer, problem)

    def _checked(self, answer: Answer, problem: Problem) -> Answer:
        """Return the answer, or raise `WrongShape` if it does not fit the problem.

        Gradients are removed if the implementation has none. If the case has a defined answer, and
        the problem has features, the rows of fully masked queries get predetermined values.
        """
        check_answer(answer, problem)
        if self.case.defined:
            answer = without_masked_rows(answer, problem)
        return answer if self.adapter.has_gradients else replace(answer, gradients={})

    def ask_rewritten(self, earlier: Problem) -> Answer:
        """Return the answer to the case in a call with arrays that have been overwritten in place.

        Before they are overwritten, the arrays hold the numbers of the problem `earlier`, and are
        passed to a first call. An implementation that caches results by array gives a stale answer.
        """
        with _theirs():
            answer = self.adapter.rewritten(self.problem, earlier, Call(self.mode, self.device))
        return self._checked(answer, self.problem)

    def ask_reread(self, later: Problem) -> tuple[Answer, Answer]:
        """Return the answer to the case, read before and after a call with the problem `later`."""
        with _theirs():
            before, after = self.adapter.reread(self.problem, later, Call(self.mode, self.device))
        return self._checked(before, self.problem), self._checked(after, self.problem)

    def ask_interrupted(self, later: Problem) -> Answer:
        """Return the answer to the case if the problem `later` is run before its backward pass."""
        with _theirs():
            answer = self.adapter.interrupted(self.problem, later, Call(self.mode, self.device))
        return self._checked(answer, self.problem)

    def reread_in_inference(self, later: Problem) -> tuple[Answer, Answer]:
        """Do the same as `ask_reread` without gradients, and leave the answers as they are.

        A function is asked for attention on projected heads, because the suite's projections would
        copy what it returned.
        """
        alone = self.adapter.projections_supplied
        problem, next_one = self.problem, later
        if alone:
            problem, next_one = self.kernel_problem, heads_alone(later)
        mode = replace(self.mode, gradients=False)
        with _theirs():
            return self.adapter.reread(problem, next_one, Call(mode, self.device, projected=alone))

    def side_effects(self, spelling: Spelling | None = None) -> SideEffects:
        """Return the side effects and the answers of two calls on the same objects, cached.

        `spelling` is the encoding of the mask; None for the adapter's preferred encoding.
        """
        key = ("side effects", self._answer_key(self.mode), spelling and spelling.label)

        def look() -> SideEffects:
            # A change that an earlier call made would not be noticed a second time.
            self.put_back()
            with _theirs():
                effects = self.adapter.side_effects(
                    self.problem, Call(self.mode, self.device, spelling)
                )
            return replace(
                effects,
                first=self._checked(effects.first, self.problem),
                second=self._checked(effects.second, self.problem),
            )

        return self.bench.answers.get(key, look)


@contextmanager
def _theirs() -> Iterator[None]:
    """Convert exceptions that the implementation raises inside the context to `RaisedInside`.

    `Unsupported`, errors of the suite and `KeyboardInterrupt` are raised unchanged.
    """
    try:
        yield
    except (Unsupported, ConformanceError, KeyboardInterrupt):
        # They come from the adapter, the suite or the user, not from the implementation.
        raise
    except BaseException as error:
        if is_exhausted(error):
            # The exception is cached, and the arrays in its frames would fill the memory.
            traceback.clear_frames(error.__traceback__)
        raise RaisedInside from error


def check_answer(answer: Answer, problem: Problem) -> None:
    """Raise `WrongShape` unless the names and shapes of the answer's arrays fit the problem.

    The answer must be an `Answer` with NumPy arrays of real numbers, integers or booleans. Weights
    and gradients may be missing.
    """
    if not isinstance(answer, Answer):
        raise WrongShape(f"returned {type(answer).__name__}, not an Answer")
    for name in ("gradients", "dtypes"):
        if not isinstance(getattr(answer, name), Mapping):
            raise WrongShape(f"answers with {name} that are no mapping of names")
    wanted = _shapes(problem, getattr(answer.weights, "ndim", 4) == 3)
    for name, array in answer.arrays().items():
        if name not in wanted:
            raise WrongShape(f"answers with {name}, which this problem does not have")
        if not isinstance(array, np.ndarray):
            raise WrongShape(f"{name} is {type(array).__name__}, not a NumPy array")
        if array.dtype.kind not in "fiub":
            raise WrongShape(f"{name} is of {array.dtype}, not of real numbers")
        check_shape(name, array.shape, wanted[name])
    for name, array in answer.statistics.items():
        check_shape(name, array.shape, problem.shape.logits[:-1])


@lru_cache(maxsize=64)
def _shapes(problem: Problem, averaged: bool) -> Mapping[str, tuple[int, ...]]:
    """Return, by name, the shapes of all arrays that an answer to the problem may have.

    `averaged` is whether weights are averaged over heads, so that they have no axis of heads.
    """
    shape, inputs = problem.shape, problem.shape.input_shapes()
    per_head, mean = shape.logits, (shape.batch, shape.query_length, shape.key_length)
    shapes: dict[str, tuple[int, ...]] = {
        "output": problem.cotangent.shape,
        "weights": mean if averaged else per_head,
        **{f"gradient.weights.{name}": size for name, size in shape.weight_shapes().items()},
        **{f"gradient.{name}": inputs[name] for name in shape.distinct_inputs()},
        **{f"gradient.{name}": values.shape for name, values in problem.trained().items()},
    }
    if problem.attn_bias is not None:
        shapes["gradient.attn_bias"] = problem.attn_bias.shape
    return shapes


@lru_cache(maxsize=64)
def seen_rows(problem: Problem) -> BoolArray | None:
    """Return whether each query has a visible key, `[batch heads query]`; None if all do."""
    if problem.allowed is None:
        return None
    seen = np.any(problem.allowed_in_full(), axis=-1)
    return None if np.all(seen) else seen


def without_masked_rows(answer: Answer, problem: Problem) -> Answer:
    """Return the answer with predetermined rows for queries that are fully masked in some head.

    The output of such a query becomes the output bias, or 0 without one. Its weights become 0 in
    the heads that mask it, and in all heads if they are averaged. Lengths and segments may leave a
    query without keys. Its output is a matter of convention, and must not hide what others get. If
    it is NaN, NaN in a gradient may come of it, since 0 · NaN is NaN: such elements become those of
    the definition.
    """
    seen = seen_rows(problem)
    if seen is None:
        return answer
    bias, weights = problem.weights.output_bias, answer.weights
    masked = 0.0 if bias is None else bias
    whole = np.all(seen, axis=1)[..., None]
    output = np.where(whole, answer.output, masked)
    gradients = answer.gradients
    if np.isnan(np.where(whole, 0.0, answer.output)).any():
        lost = [name for name, array in gradients.items() if np.isnan(array).any()]
        right = solve(problem).gradients if lost else {}
        gradients = {**gradients} | {
            name: np.where(np.isnan(gradients[name]), right[name], gradients[name])
            for name in lost
            if name in right
        }
    if weights is not None:
        rows = np.all(seen, axis=1) if weights.ndim == 3 else seen
        weights = np.where(rows[..., None], weights, 0.0)
    return replace(answer, output=output, weights=weights, gradients=gradients)


def averaged_over_heads(expectation: Expectation) -> Expectation:
    """Return the expectation with weights averaged over heads, `[batch query key]`, and their σ."""

    def averaged(per_head: Array) -> Array:
        return np.sqrt((per_head**2).sum(axis=1)) / per_head.shape[1]

    names = ("weights", ROW_SUMS)
    means = {name: expectation.arrays[name].mean(axis=1) for name in names}
    noise = {
        accuracy: {**sigmas, **{name: averaged(sigmas[name]) for name in names}}
        for accuracy, sigmas in expectation.noise.items()
    }

    def careful() -> Expectation | None:
        again = expectation.careful()
        return None if again is None else averaged_over_heads(again)

    return replace(
        expectation,
        arrays={**expectation.arrays, **means},
        noise=noise,
        careful=careful,
    )
