"""The narrow waist: `run(problem, call) -> Answer`. Everything else here is declaration.

An adapter is meant to be read as documentation of its library. It sees problems, never
expectations. Most adapters are a `Layer` (`conformance.adapter.layer`) or a `Function`
(`conformance.adapter.function`); one that derives from `Adapter` itself takes NumPy in, gives
NumPy out, and may be anything: another process, another language.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from conformance.adapter.arguments import CausalFlag, MaskArgument, MaskTable, Spelling
from conformance.adapter.code import SMALL, Example
from conformance.definition.dtypes import DTYPES
from conformance.definition.problem import Answer, Problem, Score, Shape
from conformance.errors import Unsupported
from conformance.frameworks.base import Strides
from conformance.frameworks.surroundings import PROCESS, Setting, changes, look, put_back

FullyMasked = Literal["nan", "zeros", "output bias", "mean of values"]
ReturnsWeights = Literal["per head", "averaged"]


@dataclass(frozen=True)
class Mode:
    """One way to run an implementation; all its modes must agree.

    Args:
        name: short, such as "eval".
        options: for the adapter's `call`; the suite passes them on.
        gradients: whether this mode has a derivative (torch's fast path has none).
        weights: whether it returns attention weights.
        every_case: False where a mode is expensive to compile: then it is compared on the
            cases without masks and one with, not on the whole catalogue.
        dtypes: the dtypes in which this mode is examined, or None for all of the adapter's.
        optimised: compile as users do. By default programs are compiled quickly, where the
            framework has a choice.
        dropout: probability with which attention weights are dropped; other than 0 only when the
            dropout itself is looked at, in a mode that the adapter names in `dropout_modes`.
        draw: seed of that dropout; equal draws drop the same weights. A layer is built anew for
            each.
        about: for people, how the implementation is called in this mode.
        compiled: False where the implementation cannot be compiled as a whole, though its framework
            compiles: then it is called operation by operation.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    gradients: bool = True
    weights: bool = True
    every_case: bool = True
    dtypes: tuple[str, ...] | None = None
    optimised: bool = False
    dropout: float = 0.0
    draw: int = 0
    about: str = ""
    compiled: bool = True

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


DEFAULT_MODE = Mode("default")


@dataclass(frozen=True, eq=False)
class Call:
    """Options of a call to an implementation; only experiments depart from most defaults.

    Attributes:
        mode, device: in which mode, and on which kind of device.
        spelling: how the masks are encoded; None for the first way that the adapter has.
        compiled: False to call operation by operation, also where the framework compiles.
        unbatched: without the batch axis, for a batch of 1.
        strided: how arrays lie in memory, if not in one piece.
        wanted: what needs a gradient, if not everything does: inputs, "attn_bias", or "weights" for
            all parameters.
        backwards: how often the gradients are asked for.
        projected: inputs are heads side by side and all projections are the identity, so the suite
            leaves out the projections that it supplies.
    """

    mode: Mode = DEFAULT_MODE
    device: str = "cpu"
    spelling: Spelling | None = None
    compiled: bool = True
    unbatched: bool = False
    strided: Strides = ""
    wanted: frozenset[str] | None = None
    backwards: int = 1
    projected: bool = False


@dataclass(frozen=True)
class SideEffects:
    """The results of two identical calls on the same objects.

    Attributes:
        changed: names of inputs whose numbers changed or to which something was attached.
        first, second: the answers, output and weights only.
        surroundings: settings of the whole process that the calls changed, one line each.
    """

    changed: tuple[str, ...]
    first: Answer
    second: Answer
    surroundings: tuple[str, ...] = ()


class Adapter(ABC):
    """The base class of adapters: it wraps one implementation, which class attributes declare.

    Attributes:
        name: as in `--implementation`; set by the loader where it is not declared.
        title: the implementation's own name, such as "torch.nn.MultiheadAttention".
        documentation: a link to what its authors say.
        framework: name of the bridge ("torch", "jax", "tensorflow", "mlx", "paddle", "tinygrad",
            "numpy").
        packages: distributions whose versions belong into the record, beside the framework's.
        dtypes: the dtypes that it has.
        scores: "scaled-dot", "additive" or both.
        custom_scale: whether the factor of the logits can be chosen.
        mask_arguments, causal_flag: see `conformance.adapter.arguments`.
        modes: the first is the one that others are compared with.
        returns_weights: per head, averaged over heads, or None.
        weights_option: what has to be passed to get them per head; the adapter passes it. "" where
            they are per head by themselves.
        weights_otherwise: what comes back without that option.
        fully_masked_row: the output of a fully masked query, in all modes or by mode; None if it is
            not declared.
        implicit_masks: masks that the framework attaches to inputs and hands on by itself, given
            to `call` as mask arguments are; only the probe uses them.
        projections_supplied: whether the suite projects; then a deviation says whether the kernel
            made it.
        dropout_modes: names of the modes in which dropout is active, if `Mode.dropout` asks for it.
        sequence_first: name of the mode that takes `[length batch width]`, or "".
        example: what a user types; see `example_for` where that depends on more than sizes.
    """

    name: str = ""
    title: str = ""
    documentation: ClassVar[str] = ""
    framework: ClassVar[str] = "numpy"
    packages: ClassVar[tuple[str, ...]] = ()
    dtypes: tuple[str, ...] = tuple(DTYPES)
    scores: tuple[str, ...] = ("scaled-dot",)
    custom_scale: bool = False
    differentiable: bool = True
    mask_arguments: tuple[MaskArgument, ...] = ()
    causal_flag: CausalFlag | None = None
    modes: tuple[Mode, ...] = (DEFAULT_MODE,)
    returns_weights: ReturnsWeights | None = None
    weights_option: ClassVar[str] = ""
    weights_otherwise: ClassVar[str] = "averaged"
    fully_masked_row: FullyMasked | Mapping[str, FullyMasked] | None = None
    implicit_masks: tuple[MaskArgument, ...] = ()
    dropout_modes: tuple[str, ...] = ()
    projections_supplied: ClassVar[bool] = False
    sequence_first: str = ""
    example: ClassVar[Example | None] = None

    @abstractmethod
    def run(self, problem: Problem, call: Call) -> Answer:
        """Return the answer; raises `Unsupported` if the problem cannot be expressed."""

    @property
    def compiles(self) -> bool:
        """Whether each new set of arguments costs a compilation.

        Checks that vary the arguments themselves then do so in float32 only.
        """
        return False

    @cached_property
    def masks(self) -> MaskTable:
        """The mask arguments as a table; raises `WrongDeclaration` if they are inconsistent."""
        return MaskTable(tuple(self.mask_arguments), self.causal_flag)

    def example_for(
        self, shape: Shape, dtype: str, scale: float | None, mode: Mode
    ) -> Example | None:
        """Return the user code that calls this implementation in this mode; None if unknown.

        By default it is `example`, with the shape's sizes, in the modes that it knows.
        """
        if self.example is None:
            return None
        first = mode.name == self.modes[0].name
        call = self.example.call if first else self.example.calls.get(mode.name)
        return None if call is None else self.example.formatted(shape, call)

    def small_example(self, mode: Mode) -> Example | None:
        """Return `example_for` the shape `SMALL`, with biases if there can be any."""
        score: Score = "scaled-dot" if "scaled-dot" in self.scores else "additive"
        for bias in (True, False):
            shape = replace(SMALL, bias=bias, score=score)
            with suppress(Unsupported):
                self.check_shape(shape)
                return self.example_for(shape, "float32", None, mode)
        return None

    def masked_row(self, mode: Mode) -> FullyMasked | None:
        """Return the declared output of a fully masked query in this mode."""
        declared = self.fully_masked_row
        return declared.get(mode.name) if isinstance(declared, Mapping) else declared

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages behind this adapter, by name."""
        return {}

    def device_model(self, device: str) -> str:
        """Return the device's own name; raises `Unavailable` if there is no such device."""
        return device

    def prepare(self) -> None:  # noqa: B027 - most have nothing to prepare
        """Import what is needed; raises `Unavailable` if it is not installed."""

    def settings(self) -> tuple[Setting, ...]:
        """Return the settings of the whole process that no call may change."""
        return PROCESS

    def check(self, problem: Problem) -> None:
        """Raise `Unsupported` for what the declaration rules out."""
        if problem.dtype not in self.dtypes:
            raise Unsupported(f"no {problem.dtype}")
        if problem.shape.score not in self.scores:
            raise Unsupported(f"no {problem.shape.score} score")
        if problem.scale is not None and not self.custom_scale:
            raise Unsupported("the scale cannot be chosen")
        self.check_shape(problem.shape)

    def check_shape(self, shape: Shape) -> None:  # noqa: B027 - most shapes are fine for most
        """Raise `Unsupported` for a shape that the implementation cannot have.

        Called before anything is imported, so it must need nothing but the shape.
        """

    def rewritten(self, problem: Problem, earlier: Problem, call: Call) -> Answer:
        """Answer the earlier problem, then this one, whose numbers are written over the earlier's.

        Both have the same shape and kinds of masks. Raises `Unsupported` where arrays cannot be
        written to.
        """
        raise Unsupported("its arrays cannot be written to")

    def side_effects(self, problem: Problem, call: Call) -> SideEffects:
        """Call twice on the same objects, and compare the objects before and after."""
        before = _numbers(problem)
        first, second, surroundings = twice(lambda: self.run(problem, call), self.settings())
        changed = [
            name
            for name, array in _numbers(problem).items()
            if not np.array_equal(array, before[name], equal_nan=True)
        ]
        return SideEffects(tuple(changed), first, second, surroundings)


def twice(
    call: Callable[[], Answer], settings: Sequence[Setting]
) -> tuple[Answer, Answer, tuple[str, ...]]:
    """Call twice; return both answers, and one line for each setting that the calls changed.

    The first call may draw random numbers to initialise itself, but may change no other setting.
    All settings are put back before the second call, or a generator that each call seeds anew would
    look untouched.
    """
    before = look(settings)
    first = call()
    after_first = look(settings)
    put_back(settings, before)
    second = call()
    lines = changes(settings, before, look(settings))
    put_back(settings, before)
    by_first = [
        line
        for setting, one, other in zip(settings, before, after_first, strict=True)
        if setting.shown
        for line in changes([setting], [one], [other])
    ]
    return first, second, tuple(dict.fromkeys(lines + by_first))


def _numbers(problem: Problem) -> dict[str, np.ndarray]:
    arrays = {
        name: getattr(problem, name) for name in ("query", "key", "value", "mask", "attn_bias")
    }
    return {name: array.copy() for name, array in arrays.items() if array is not None}
