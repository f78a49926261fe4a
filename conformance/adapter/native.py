"""The way from a problem to native arrays and back, for layers and functions alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.adapter.base import Adapter, Call, SideEffects, twice
from conformance.definition.dtypes import Array
from conformance.definition.problem import Answer, Problem
from conformance.errors import Unavailable, Unsupported
from conformance.frameworks import LACKS, framework, require
from conformance.frameworks.base import (
    Evaluated,
    Framework,
    Natives,
    Request,
    WrongAnswer,
    package_versions,
)
from conformance.frameworks.surroundings import Setting

_WEIGHT, _MASK = "weights.", "mask."


@dataclass(frozen=True, eq=False)
class Prepared:
    """A problem as native arrays, ready to be called any number of times."""

    function: Callable[[Natives, Natives], tuple[Any, Any]]
    variables: Natives
    constants: Natives
    cotangent: Any
    spelling: Spelling
    program: Hashable

    def arguments(self) -> Natives:
        """Return the native arrays of a call, without the parameters."""
        given = self.variables | self.constants
        return {name: array for name, array in given.items() if not name.startswith(_WEIGHT)}

    def split(self, wanted: frozenset[str] | None) -> tuple[Natives, Natives]:
        """Return the arrays to differentiate by, and the others."""
        if wanted is None:
            return self.variables, self.constants
        variables = {n: a for n, a in self.variables.items() if _kind(n) in wanted}
        return variables, {n: a for n, a in self.variables.items() if n not in variables} | dict(
            self.constants
        )


class NativeAdapter(Adapter):
    """An adapter of something that runs in a framework of `conformance.frameworks`.

    Attributes:
        imports: modules that building or calling imports, beside the framework.
    """

    imports: ClassVar[tuple[str, ...]] = ()
    _prepared = False

    @property
    def bridge(self) -> Framework:
        """The framework's bridge; the framework is imported on first access."""
        return framework(self.framework)

    @property
    def compiles(self) -> bool:
        return self.bridge.compiles

    def prepare(self) -> None:
        _ = self.bridge
        for package in self.packages:
            if not package_versions((package,)):
                raise Unavailable(
                    f"there is no distribution {package!r}, which the adapter's `packages` names; "
                    f"pip install {package}"
                )
        for module in self.imports:
            require(module)

    def versions(self) -> dict[str, str]:
        return self.bridge.versions() | package_versions(self.packages)

    def check_device(self, device: str) -> None:
        """Raise `Unavailable` unless the implementation runs on such a device here."""
        self.bridge.check_device(device)

    @contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        """Whatever the implementation needs around building, calling and going back.

        Raises `Unsupported` for problems that it cannot answer on the call's device.
        """
        yield

    def device_model(self, device: str) -> str:
        self.check_device(device)
        return self.bridge.devices()[device]

    def settings(self) -> tuple[Setting, ...]:
        return super().settings() + self.bridge.settings()

    def check(self, problem: Problem) -> None:
        if problem.dtype in LACKS.get(self.framework, ()):
            raise Unsupported(f"{self.framework} has no {problem.dtype}")
        super().check(problem)
        self.masks.spell(problem)

    def run(self, problem: Problem, call: Call) -> Answer:
        self.check(problem)
        with self._session(problem, call):
            return self._evaluate(problem, call, self._prepare(problem, call))

    def _evaluate(self, problem: Problem, call: Call, ready: Prepared) -> Answer:
        variables, constants = ready.split(call.wanted)
        differentiable = self.bridge.differentiable and self.differentiable
        request = Request(
            ready.function,
            variables,
            constants,
            ready.cotangent,
            gradients=call.mode.gradients and differentiable and bool(variables),
            program=ready.program,
            optimised=call.mode.optimised,
            compiled=call.compiled and call.mode.compiled,
            backwards=call.backwards,
        )
        answer = self._answer(problem, ready, self.bridge.evaluate(request))
        return _batched(answer, problem) if call.unbatched else answer

    def _call_once(self, problem: Problem, call: Call, ready: Prepared) -> Answer:
        output, weights = ready.function(ready.variables, ready.constants)
        return self._answer(problem, ready, Evaluated(output, weights, {}))

    def side_effects(self, problem: Problem, call: Call) -> SideEffects:
        """Call twice on the same objects, and compare the objects before and after."""
        self.check(problem)
        bridge = self.bridge
        with self._session(problem, call):
            ready = self._prepare(problem, call)
            watched = {**ready.variables, **ready.constants}
            numbers = {name: bridge.numpy(array).copy() for name, array in watched.items()}
            attached = {name: bridge.attached(array) for name, array in watched.items()}
            # A compiled program cannot touch its inputs, so what compiles is called as it is.
            evaluate = self._call_once if bridge.compiles else self._evaluate
            first, second, surroundings = twice(
                lambda: evaluate(problem, call, ready), self.settings()
            )
            changed = []
            for name, array in watched.items():
                if not np.array_equal(bridge.numpy(array), numbers[name], equal_nan=True):
                    changed.append(f"{name}: its numbers changed")
                news = set(bridge.attached(array)) - set(attached[name])
                changed += [f"{name}: got an attribute {attribute!r}" for attribute in sorted(news)]
        return SideEffects(tuple(changed), first, second, surroundings)

    def rewritten(self, problem: Problem, earlier: Problem, call: Call) -> Answer:
        """Answer the earlier problem, then this one, whose numbers are written over the earlier's.

        Raises `Unsupported` where arrays cannot be written to, or are not the same in kind.
        """
        self.check(problem)
        with self._session(problem, call):
            ready, next_one = self._prepare(earlier, call), self._prepare(problem, call)
            old, new = ready.arguments(), next_one.arguments()
            if {n: a.shape for n, a in old.items()} != {n: a.shape for n, a in new.items()}:
                raise Unsupported("its masks are spelled in two ways")
            self._evaluate(earlier, call, ready)
            for name, array in old.items():
                self.bridge.overwrite(array, new[name])
            return self._evaluate(problem, call, ready)

    @contextmanager
    def _session(self, problem: Problem, call: Call) -> Iterator[None]:
        """Enter the sessions of bridge and adapter; raises `Unavailable` for a missing module."""
        if not self._prepared:
            self.prepare()
            self._prepared = True
        self.check_device(call.device)
        try:
            with self.bridge.session(problem.dtype, call.device), self.around_call(problem, call):
                yield
        except ModuleNotFoundError as error:
            name = error.name
            raise Unavailable(f"{name} is not installed; pip install {name}") from error

    def _prepare(self, problem: Problem, call: Call) -> Prepared:
        bridge = self.bridge
        spelling = call.spelling or self.masks.spell(problem)
        variables = {
            name: self._input(name, problem, call) for name in problem.shape.distinct_inputs()
        }
        constants: Natives = {}
        flags: dict[str, bool] = {}
        for name, value in spelling.arguments.items():
            if isinstance(value, bool):
                flags[name] = value
                continue
            native = self._lying(bridge.array(value, problem.dtype, call.device), call)
            carries_bias = spelling.bias is not None and spelling.bias[0] == name
            (variables if carries_bias else constants)[_MASK + name] = native
        own, invoke, program = self._bind(problem, call)
        variables |= {_WEIGHT + name: array for name, array in own.items()}

        def function(variables: Natives, constants: Natives) -> tuple[Any, Any]:
            given = constants | variables
            parameters = _strip(given, _WEIGHT)
            query = given["query"]
            key = given.get("key", query)
            value = given.get("value", key)
            arguments = _strip(given, _MASK) | flags
            result = invoke(parameters, query, key, value, arguments)
            if not isinstance(result, tuple):
                return result, None
            if len(result) != 2:
                raise WrongAnswer(
                    f"returned a tuple of {len(result)}; return output or (output, weights)"
                )
            return result

        cotangent = self._input("cotangent", problem, call)
        signature = (self.name, program, tuple(variables), tuple(constants), tuple(flags.items()))
        return Prepared(function, variables, constants, cotangent, spelling, signature)

    def _input(self, name: str, problem: Problem, call: Call) -> Any:
        """Return query, key, value or cotangent as a native array, as the call asks for it."""
        values: Array = getattr(problem, name)
        native = self.bridge.array(
            values[0] if call.unbatched else values, problem.dtype, call.device
        )
        return self._lying(native, call)

    def _lying(self, native: Any, call: Call) -> Any:
        """Return the array, laid out in memory as the call asks for it."""
        if not call.strided:
            return native
        return self.bridge.strided(native, call.strided, call.device)

    @abstractmethod
    def _bind(self, problem: Problem, call: Call) -> tuple[Natives, Callable[..., Any], Hashable]:
        """Return native parameters, how to call with them, and what identifies the program.

        The callable takes (parameters, query, key, value, masks) and returns output or
        (output, weights).
        """

    @abstractmethod
    def _canonical(self, problem: Problem, gradients: Natives) -> dict[str, np.ndarray]:
        """Return gradients of canonical weights for those of native parameters."""

    def _answer(self, problem: Problem, ready: Prepared, result: Evaluated) -> Answer:
        bridge, output, weights = self.bridge, result.output, result.weights
        for what, array in (("output", output), ("weights", weights)):
            if not (bridge.is_array(array) or (what == "weights" and array is None)):
                raise WrongAnswer(
                    f"returned {type(array).__name__} as {what}, not an array of {bridge.name}, "
                    "the adapter's `framework`"
                )
        natives = {"output": output} | ({} if weights is None else {"weights": weights})
        natives |= {f"gradient.{name}": array for name, array in result.gradients.items()}
        arrays = {name: bridge.numpy(array) for name, array in result.gradients.items()}
        inputs = problem.shape.distinct_inputs()
        gradients = {name: arrays[name] for name in inputs if name in arrays}
        own = _strip(arrays, _WEIGHT)
        if own:
            gradients |= {_WEIGHT + k: v for k, v in self._canonical(problem, own).items()}
        if ready.spelling.bias is not None and _MASK + ready.spelling.bias[0] in arrays:
            gradient = arrays[_MASK + ready.spelling.bias[0]]
            gradients["attn_bias"] = ready.spelling.bias_gradient(gradient, problem)
        return Answer(
            bridge.numpy(output),
            None if weights is None else bridge.numpy(weights),
            gradients,
            {name: bridge.dtype(native) for name, native in natives.items()},
        )


def _kind(name: str) -> str:
    """Return the name of a variable, as in `Call.wanted`."""
    if name.startswith(_WEIGHT):
        return "weights"
    return "attn_bias" if name.startswith(_MASK) else name


def _batched(answer: Answer, problem: Problem) -> Answer:
    """Return the answer with the batch axis that the call did without."""
    inputs = problem.shape.distinct_inputs()
    return Answer(
        answer.output[None],
        None if answer.weights is None else answer.weights[None],
        {n: a[None] if n in inputs else a for n, a in answer.gradients.items()},
        answer.dtypes,
    )


def _strip(arrays: Natives, prefix: str) -> Natives:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }
