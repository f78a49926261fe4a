"""Base classes of adapters that run in a framework: convert problems to native arrays and back.

A `Layer` holds its weights. For a function (`conformance.adapter.function`), the suite supplies the
projections.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from conformance.adapter.arguments import NO_MASK, Spelling
from conformance.adapter.base import (
    Adapter,
    Call,
    LogSumExp,
    Mode,
    ReturnedStatistic,
    SideEffects,
    twice,
)
from conformance.adapter.features import RotaryBase, RotaryConfig, RotaryTables, Static
from conformance.adapter.parameters import Checkpoint, Parameter, ParameterTable
from conformance.definition.dtypes import Wide
from conformance.definition.problem import Answer, Problem, Shape, Weights
from conformance.errors import (
    Unavailable,
    UnknownName,
    Unsupported,
    WrongAnswer,
    WrongDeclaration,
)
from conformance.frameworks import BRIDGES, LACKS, framework, require
from conformance.frameworks.base import (
    Evaluated,
    Framework,
    Natives,
    Request,
    Setting,
    package_versions,
)

_WEIGHT, MASK, _LATER = "weights.", "mask.", "later."


def output_and_weights(result: Any) -> tuple[Any, Any]:
    """Return the output, and the weights or None, that an implementation returned.

    Raises:
        WrongAnswer: it returned a tuple of another length.
    """
    if not isinstance(result, tuple):
        return result, None
    if len(result) != 2:
        raise WrongAnswer(f"returned a tuple of {len(result)}; return output or (output, weights)")
    return result


@dataclass(frozen=True, eq=False)
class Prepared:
    """A problem as native arrays, with a function that can be called on them repeatedly.

    Attributes:
        function: maps (variables, constants) to (output, weights, statistic or None).
        variables, constants: the arrays that have gradients, and the others, by name. Names of
            parameters begin with "weights.", those of masks with "mask.".
        cotangent, weights_cotangent: the cotangents of the output and of what is returned beside
            it; the latter is None if the loss does not depend on that.
        spelling: how masks and features are encoded.
        program: a key; functions with equal keys can share one compiled program.
        statistic: the declaration of what is returned beside the output; None if that is weights.
    """

    function: Callable[[Natives, Natives], tuple[Any, Any]]
    variables: Natives
    constants: Natives
    cotangent: Any
    spelling: Spelling
    program: Hashable
    weights_cotangent: Any = None
    statistic: ReturnedStatistic | None = None

    def split(self, wanted: frozenset[str] | None) -> tuple[Natives, Natives]:
        """Return the arrays whose gradients are wanted (see `Call.wanted`), and the others."""
        if wanted is None:
            return self.variables, self.constants
        named = {MASK + name: kind for name, kind in self.spelling.gradients().items()}
        named |= {n: "weights" for n in self.variables if n.startswith(_WEIGHT)}
        named |= {_WEIGHT + n: self.spelling.gradients()[n] for n in self.spelling.parameters}
        kinds = {n: named.get(n, n) for n in self.variables}
        variables = {n: a for n, a in self.variables.items() if kinds[n] in wanted}
        others = {n: a for n, a in self.variables.items() if n not in variables}
        return variables, others | self.constants


class NativeAdapter(Adapter):
    """The base class of adapters that run in a framework of `conformance.frameworks`.

    Attributes:
        imports: the modules, in addition to the framework, that the implementation needs.
        gpus_only: whether the implementation exists for GPUs only.
    """

    imports: ClassVar[tuple[str, ...]] = ()
    gpus_only: ClassVar[bool] = False
    _prepared = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.framework not in BRIDGES:
            raise UnknownName("framework", cls.framework, BRIDGES)

    @property
    def bridge(self) -> Framework:
        """The framework's bridge; the framework is imported on first access."""
        return framework(self.framework)

    @property
    def compiles(self) -> bool:
        return self.bridge.compiles

    @property
    def has_gradients(self) -> bool:
        return self.bridge.differentiable and self.differentiable

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
        return package_versions((*self.bridge.packages, *self.packages))

    def toolkit(self) -> dict[str, str]:
        return self.bridge.toolkit()

    def check_device(self, device: str) -> None:
        """Raise `Unavailable` if the implementation cannot run on this kind of device here."""
        if self.gpus_only and device == "cpu":
            raise Unavailable(f"{self.title} is for GPUs only; run it with --device gpu")
        devices = self.bridge.devices()
        if device not in devices:
            raise Unavailable(
                f"{self.bridge.name} sees no {device} on this machine (it has {', '.join(devices)})"
            )

    @contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        """Enter the context in which the implementation is built, called and differentiated.

        By default, the context does nothing. An override may raise `Unsupported` for a problem or a
        call that the implementation cannot handle.
        """
        yield

    def device_model(self, device: str) -> str:
        self.check_device(device)
        return self.bridge.devices()[device]

    def settings(self) -> tuple[Setting, ...]:
        return super().settings() + self.bridge.settings

    def check(self, problem: Problem) -> None:
        if problem.dtype in LACKS.get(self.framework, ()):
            raise Unsupported(f"{self.framework} has no {problem.dtype}")
        super().check(problem)

    def check_features(self, problem: Problem) -> None:
        self.masks.spell(problem)

    def run(self, problem: Problem, call: Call) -> Answer:
        self.check(problem)
        with self._session(problem, call):
            return self._evaluate(problem, call, self._prepare(problem, call))

    def _evaluate(self, problem: Problem, call: Call, ready: Prepared) -> Answer:
        answer = self._answer(problem, ready, self._native(call, ready))
        return _batched(answer, problem) if call.unbatched else answer

    def _native(self, call: Call, ready: Prepared) -> Evaluated:
        """Call the implementation, and return its native results."""
        request = self._request(call, ready)
        self.bridge.poison(request.arrays())
        return self.bridge.evaluate(request)

    @contextmanager
    def requested(self, problem: Problem, call: Call) -> Iterator[Request]:
        """Enter the contexts of a call; yield what the bridge has to evaluate, not evaluated yet.

        Whether the declarations rule out the problem is not checked.
        """
        with self._session(problem, call):
            yield self._request(call, self._prepare(problem, call))

    def _request(self, call: Call, ready: Prepared) -> Request:
        variables, constants = ready.split(call.wanted)
        return Request(
            ready.function,
            variables,
            constants,
            ready.cotangent,
            gradients=call.mode.gradients and self.has_gradients and bool(variables),
            program=ready.program,
            optimised=call.mode.optimised,
            compiled=call.compiled and call.mode.compiled,
            backwards=call.backwards,
            weights_cotangent=ready.weights_cotangent,
        )

    def _call_once(self, problem: Problem, call: Call, ready: Prepared) -> Answer:
        output, weights = ready.function(ready.variables, ready.constants)
        return self._answer(problem, ready, Evaluated(output, weights, {}))

    def side_effects(self, problem: Problem, call: Call) -> SideEffects:
        self.check(problem)
        bridge = self.bridge
        with self._session(problem, call):
            ready = self._prepare(problem, call)
            watched = {**ready.variables, **ready.constants, "cotangent": ready.cotangent}
            numbers = {name: bridge.numpy(array).copy() for name, array in watched.items()}
            attached = {name: bridge.attached(array) for name, array in watched.items()}
            # A compiled program cannot change its inputs, so the function is called uncompiled.
            evaluate = self._call_once if bridge.compiles else self._evaluate
            first, second, surroundings = twice(
                lambda: evaluate(problem, call, ready), self.settings()
            )
            changed = []
            for name, array in watched.items():
                now, before = bridge.numpy(array), numbers[name]
                # Comparing bytes is ten times as fast, and decides nearly always.
                same = now.tobytes() == before.tobytes()
                if not same and not np.array_equal(now, before, equal_nan=True):
                    changed.append(f"{name}: its numbers changed")
                news = set(bridge.attached(array)) - set(attached[name])
                changed += [f"{name}: got an attribute {attribute!r}" for attribute in sorted(news)]
        return SideEffects(tuple(changed), first, second, surroundings)

    def rewritten(self, problem: Problem, earlier: Problem, call: Call) -> Answer:
        self.check(problem)
        with self._session(problem, call):
            ready = self._prepare(earlier, call)
            self._evaluate(earlier, call, ready)
            # This also loads the weights into a layer that holds its weights.
            next_one = self._prepare(problem, call)
            old, new = (one.variables | one.constants for one in (ready, next_one))
            shapes = [{n: a.shape for n, a in arrays.items()} for arrays in (old, new)]
            if shapes[0] != shapes[1] or ready.spelling.plain() != next_one.spelling.plain():
                raise Unsupported("its masks are spelled in two ways")
            for name, array in old.items():
                # Writing the same numbers again would hide a cache that forgets the weights.
                if array is not new[name] and not np.array_equal(
                    self.bridge.numpy(array), self.bridge.numpy(new[name])
                ):
                    self.bridge.overwrite(array, new[name])
            return self._evaluate(problem, call, ready)

    def reread(self, problem: Problem, later: Problem, call: Call) -> tuple[Answer, Answer]:
        self.check(later)
        with self._session(problem, call):
            ready, next_one = self._prepare(problem, call), self._prepare(later, call)
            result = self._native(call, ready)
            first = self._answer(problem, ready, result)
            # Some arrays of the answer may be views of native ones.
            first = replace(
                first,
                output=first.output.copy(),
                weights=None if first.weights is None else first.weights.copy(),
                statistics={name: array.copy() for name, array in first.statistics.items()},
                gradients={name: array.copy() for name, array in first.gradients.items()},
            )
            self._native(call, next_one)
            return first, self._answer(problem, ready, result)

    def interrupted(self, problem: Problem, later: Problem, call: Call) -> Answer:
        self.check(later)
        if not self.bridge.records_graphs:
            raise Unsupported(f"derivatives of {self.bridge.name} are functions, not graphs")
        with self._session(problem, call):
            ready, next_one = self._prepare(problem, call), self._prepare(later, call)
            # The later call records a graph, too, if its arrays are differentiated as well.
            # Both calls have the weights of one layer, which are no two variables.
            own = {id(array): name for name, array in ready.variables.items()}
            names = {n: own.get(id(it), _LATER + n) for n, it in next_one.variables.items()}
            of_later = {names[n]: array for n, array in next_one.variables.items()}

            def function(variables: Natives, constants: Natives) -> tuple[Any, Any]:
                result = ready.function({n: variables[n] for n in ready.variables}, constants)
                next_one.function({n: variables[names[n]] for n in names}, next_one.constants)
                return result

            both = replace(ready, function=function, variables=ready.variables | of_later)
            result = self._native(call, both)
            gradients = {n: a for n, a in result.gradients.items() if n in ready.variables}
            return self._answer(problem, ready, replace(result, gradients=gradients))

    @contextmanager
    def _session(self, problem: Problem, call: Call) -> Iterator[None]:
        """Enter the contexts of the bridge and the adapter for a call.

        Raises:
            Unavailable: if a module or the device is missing.
        """
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
        spelling = self.masks.handed(spelling, problem)
        inputs = problem.shape.distinct_inputs()
        variables = {name: self._input(name, problem, call) for name in inputs}
        for name in call.shared:
            query, length = variables["query"], getattr(problem, name).shape[1]
            variables[name] = query if length == query.shape[1] else query[:, :length]
        constants: Natives = {}
        plain = self._passed(spelling.plain())
        for name, value in spelling.arrays().items():
            native = self._lying(self._array(value, problem, call), call, name)
            differentiated = name in spelling.gradients()
            (variables if differentiated else constants)[MASK + name] = native
        parameters, invoke, program = self._bind(problem, call.spelled(spelling))
        variables |= {_WEIGHT + name: array for name, array in parameters.items()}

        def function(variables: Natives, constants: Natives) -> tuple[Any, Any]:
            given = constants | variables
            query = given["query"]
            key = given.get("key", query)
            value = given.get("value", key)
            masks = _named(given, MASK) | plain
            result = invoke(_named(given, _WEIGHT), query, key, value, masks)
            result = output_and_weights(result)
            for what, array in zip(("output", "weights"), result, strict=True):
                check_device_of(bridge, array, query, f"returned {what}")
            # Without a batch axis, a statistic has another layout than the declared one.
            return (result[0], None) if call.unbatched and declared is not None else result

        declared = next(iter(self.statistics_in(call.mode).values()), None)
        cotangent = self._input("cotangent", problem, call)
        signature = (self.name, program, tuple(variables), tuple(constants), tuple(plain.items()))
        returned = problem.weights_cotangent
        if isinstance(declared, LogSumExp) and problem.log_sum_exp_cotangent is not None:
            returned = declared.cotangent(problem.log_sum_exp_cotangent)
        if returned is not None:
            returned = bridge.array(returned, problem.dtype, call.device)
        ready = Prepared(
            *(function, variables, constants, cotangent, spelling, signature, returned, declared)
        )
        return self.placed(ready, problem, call)

    def placed(self, ready: Prepared, problem: Problem, call: Call) -> Prepared:
        """Return `ready` with its arrays placed where the implementation needs them.

        An override may place them on a mesh of devices. By default, return `ready` unchanged.
        """
        return ready

    def _passed(self, plain: dict[str, Static]) -> dict[str, Static]:
        """Return the plain values that are passed with each call; by default, all of `plain`."""
        return plain

    def _input(self, name: str, problem: Problem, call: Call) -> Any:
        """Return the input `name` (or the cotangent) as a native array, in the form of `call`."""
        if call.given and name in call.given:
            values = call.given[name]
        else:
            values = getattr(problem, name)
            values = values[0] if call.unbatched else values
        return self._lying(self._array(values, problem, call), call, name)

    def _array(self, values: np.ndarray, problem: Problem, call: Call) -> Any:
        """Return a native array, in the dtype of the problem if `values` is float64 but not `Wide`.

        Raise `Unsupported` if the framework cannot have an array of float64 beside the others.
        """
        if not isinstance(values, Wide):
            return self.bridge.array(values, problem.dtype, call.device)
        native = self.bridge.array(np.asarray(values), "float64", call.device)
        if self.bridge.dtype(native) != "float64":
            raise Unsupported(f"{self.bridge.name} makes no float64 beside {problem.dtype}")
        return native

    def _lying(self, native: Any, call: Call, name: str) -> Any:
        """Return the array `native`, called `name`, with the strides or surroundings of `call`."""
        if call.around is not None:
            return self.bridge.surrounded(native, call.around, call.device)
        if not call.strided or call.strided_alone not in ("", name):
            return native
        return self.bridge.strided(native, call.strided, call.device)

    @abstractmethod
    def _bind(self, problem: Problem, call: Call) -> tuple[Natives, Callable[..., Any], Hashable]:
        """Return native parameters, a callable, and a key that identifies the compiled program.

        The callable takes (parameters, query, key, value, masks) and returns output or
        (output, weights).
        """

    @abstractmethod
    def _canonical(self, problem: Problem, gradients: Natives) -> dict[str, np.ndarray]:
        """Return the gradients of canonical weights, given those of native parameters, by name."""

    def _answer(self, problem: Problem, ready: Prepared, result: Evaluated) -> Answer:
        bridge, output, weights = self.bridge, result.output, result.weights
        beside = "weights" if ready.statistic is None else ready.statistic.of.name
        for what, array in (("output", output), (beside, weights)):
            if not (bridge.is_array(array) or (what == beside and array is None)):
                raise WrongAnswer(
                    f"returned {type(array).__name__} as {what}, not an array of {bridge.name}, "
                    "the adapter's `framework`"
                )
        returned = {"output": output} | ({} if weights is None else {beside: weights})
        returned |= {f"gradient.{name}": array for name, array in result.gradients.items()}
        arrays = {name: bridge.numpy(array) for name, array in result.gradients.items()}
        inputs = problem.shape.distinct_inputs()
        gradients = {name: arrays[name] for name in inputs if name in arrays}
        natives = _named(arrays, _WEIGHT)
        if natives:
            gradients |= {_WEIGHT + k: v for k, v in self._canonical(problem, natives).items()}
        if ready.spelling.bias is not None and MASK + ready.spelling.bias[0] in arrays:
            gradient = arrays[MASK + ready.spelling.bias[0]]
            gradients["attn_bias"] = ready.spelling.bias_gradient(gradient, problem)
        for name, variable in ready.spelling.variables.items():
            kind = _WEIGHT if variable.argument in ready.spelling.parameters else MASK
            if kind + variable.argument in arrays:
                gradients[name] = variable.factor * arrays[kind + variable.argument]
        dtypes = {name: bridge.dtype(native) for name, native in returned.items()}
        found = None if weights is None else bridge.numpy(weights)
        if ready.statistic is None or found is None:
            return Answer(bridge.numpy(output), found, gradients, dtypes)
        statistics = {beside: ready.statistic.canonical(found, problem.shape)}
        return Answer(bridge.numpy(output), None, gradients, dtypes, statistics=statistics)


def check_device_of(bridge: Framework, array: Any, given: Any, did: str) -> None:
    """Raise `WrongAnswer` if an implementation made an array on another device than it was given.

    Otherwise, an implementation that falls back to the CPU would be taken for one that runs on the
    device. What is no array of the framework is not looked at. `did` begins the message.
    """
    if not bridge.is_array(array):
        return
    device, wanted = bridge.device_of(array), bridge.device_of(given)
    if device != wanted and device and wanted:
        raise WrongAnswer(f"{did} on another device than the inputs': {device}, not {wanted}")


def _batched(answer: Answer, problem: Problem) -> Answer:
    """Return the answer of a call without a batch axis, with a batch axis of size 1 added."""
    inputs = problem.shape.distinct_inputs()
    return replace(
        answer,
        output=answer.output[None],
        weights=None if answer.weights is None else answer.weights[None],
        gradients={n: a[None] if n in inputs else a for n, a in answer.gradients.items()},
    )


def _named(arrays: Natives, prefix: str) -> Natives:
    """Return the arrays whose names start with the prefix, by their names without the prefix."""
    return {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}


class Layer(NativeAdapter):
    """The base class of adapters for layers that hold their weights.

    A subclass declares `parameters` (or overrides `parameters_for`, if the table depends on the
    shape) and the mask arguments, and implements `call` and `build` (or `build_with`).

    Attributes:
        parameters: the rows of the parameter table.
        always: the features that the implementation cannot omit, such as "query/key norm"; problems
            without them are not supported.
        rotary: the rotary embeddings that the implementation always applies, with their pairs, even
            if the adapter replaces them by none for problems without; None if they are an option,
            which `features` declare, or if there are none.
        checkpoint: how files of weights name the parameters; None if they use the native names.
    """

    parameters: tuple[Parameter, ...] = ()
    always: ClassVar[tuple[str, ...]] = ()
    rotary: ClassVar[RotaryBase | RotaryConfig | RotaryTables | None] = None
    checkpoint: ClassVar[Checkpoint | None] = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "build_with" in cls.__dict__ and "build" not in cls.__dict__:
            cls.build = _build_plainly  # type: ignore[assignment, method-assign]

    def __init__(self) -> None:
        self._built: dict[Hashable, Any] = {}
        self._tables: dict[Shape, ParameterTable] = {}
        self._loaded: tuple[Weights, Shape, Mapping[str, np.ndarray]] | None = None

    def check(self, problem: Problem) -> None:
        super().check(problem)
        for name in self.always:
            if name not in problem.features:
                raise Unsupported(f"it always has {name}")

    def parameters_for(self, shape: Shape) -> tuple[Parameter, ...]:
        """Return the rows of the parameter table for this shape; by default, `parameters`."""
        return self.parameters

    @abstractmethod
    def build(self, shape: Shape, dtype: str, scale: float | None, mode: Mode) -> Any:
        """Return a new layer in the given dtype; raise `Unsupported` for an unsupported shape.

        `scale` is None unless the adapter declares `custom_scale` and the problem sets one.
        """

    def build_with(
        self,
        shape: Shape,
        dtype: str,
        scale: float | None,
        mode: Mode,
        settings: Mapping[str, Static],
    ) -> Any:
        """Return a new layer with these `settings`, keyed by the names that features declare.

        The settings are plain values, such as a window or a soft cap, and True for each parameter
        of the layer that a feature declares, such as sinks. Override this method if the plain
        values are arguments of the layer's constructor; `build` then needs no definition. By
        default, the settings are ignored, and `call` receives the plain values.
        """
        return self.build(shape, dtype, scale, mode)

    @abstractmethod
    def call(
        self, layer: Any, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode
    ) -> Any:
        """Call the layer and return its output, or (output, attention weights).

        `masks` holds the declared arguments for masks and features by name, as native arrays and
        plain values. It lacks those that the problem does not need, those that are parameters, and
        the plain values that an override of `build_with` receives.
        """

    def bind(self, layer: Any, parameters: Natives) -> Any:
        """Return the layer with these parameters.

        By default, return the layer itself, because the parameters have been loaded into it. An
        override serves frameworks in which parameters are arguments, such as JAX.
        """
        return layer

    def own_parameters(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        """Return the parameters by name, as native arrays with respect to which to differentiate.

        By default, `Framework.load` does this. Override this method if the framework's bridge does
        not know the variables in which the layer keeps its parameters: load the numbers into these
        variables and return them. `bind` is then not needed.
        """
        return self.bridge.load(layer, parameters, dtype, device)

    def table(self, shape: Shape) -> ParameterTable:
        """Return the parameter table, checked against the shape; it is cached."""
        if shape not in self._tables:
            self._tables[shape] = ParameterTable(self.parameters_for(shape), shape)
        return self._tables[shape]

    def _bind(self, problem: Problem, call: Call) -> tuple[Natives, Callable[..., Any], Hashable]:
        mode = (call.mode.name, call.mode.dropout, call.mode.draw)
        spelling = call.spelling or NO_MASK
        if spelling.handing is not None:
            raise WrongDeclaration("Cache, Packed and Pages are for functions, not for layers")
        settings = self._built_in(spelling.plain()) | dict.fromkeys(spelling.parameters, True)
        parts = tuple(sorted(settings.items()))
        sizes = (call.built or problem.shape, problem.dtype, problem.scale)
        key = (*sizes, mode, call.device, *parts)
        if key not in self._built:
            built = self.build_with(*sizes, call.mode, settings)
            self._built[key] = self.bridge.place(built, call.device)
        layer = self._built[key]
        kind = type(self)
        handed_on = kind.bind is not Layer.bind or kind.own_parameters is not Layer.own_parameters
        if not (self.bridge.loads_in_place or handed_on):
            raise WrongDeclaration(
                f"parameters are arguments in {self.bridge.name}: {kind.__name__} needs "
                "bind(layer, parameters), which returns the layer with these parameters"
            )
        numbers = {**self._parameters_of(problem), **spelling.arrays(parameters=True)}
        natives = self.own_parameters(layer, numbers, problem.dtype, call.device)

        def invoke(parameters: Natives, query: Any, key: Any, value: Any, masks: Natives) -> Any:
            return self.call(self.bind(layer, parameters), query, key, value, masks, call.mode)

        return natives, invoke, key

    def _built_in(self, plain: dict[str, Static]) -> dict[str, Static]:
        """Return the plain values of features that an override of `build_with` takes.

        Return {} if the method is not overridden.
        """
        if type(self).build_with is Layer.build_with:
            return {}
        of_features = {name for declared in self.features for name in declared.names}
        return {name: value for name, value in plain.items() if name in of_features}

    def _passed(self, plain: dict[str, Static]) -> dict[str, Static]:
        built_in = self._built_in(plain)
        return {name: value for name, value in plain.items() if name not in built_in}

    def _parameters_of(self, problem: Problem) -> Mapping[str, np.ndarray]:
        """Return the native parameters as NumPy arrays by name; the last result is cached."""
        weights, shape, parameters = self._loaded or (None, None, {})
        if weights is not problem.weights or shape != problem.shape:
            parameters = self.table(problem.shape).load(problem.weights)
            self._loaded = (problem.weights, problem.shape, parameters)
        return parameters

    def _canonical(self, problem: Problem, gradients: Natives) -> dict[str, np.ndarray]:
        # A parameter that is detached from the output has no gradient.
        return self.table(problem.shape).export(gradients, every=False)


def _build_plainly(
    adapter: Layer, shape: Shape, dtype: str, scale: float | None, mode: Mode
) -> Any:
    """Return a new layer without features: the `build` of classes that define only `build_with`."""
    return adapter.build_with(shape, dtype, scale, mode, {})
