"""Mask arguments: what they mean, and how a problem is expressed by them.

An adapter declares its mask arguments. From the declarations the suite derives every *spelling* of
a problem: an assignment of its mask, causal flag and bias to arguments. The first spelling is used
to ask the problem; all of them mean the same, so all must give the same answer. No adapter inverts
a mask by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, get_args

import einops
import numpy as np

from conformance.adapter import layouts
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Causal, Problem, Shape, causal_mask
from conformance.errors import Unsupported, WrongDeclaration

TrueMeans = Literal["attends", "blocks"]
NumberMeans = Literal[
    "added",
    "attends if nonzero",
    "blocks if nonzero",
    "attends if 1",
    "blocks if 1",
    "attends, 0 or 1 only",
    "blocks, 0 or 1 only",
]
Native = BoolArray | Array | bool

AXES = ("batch", "heads", "query", "key")


@dataclass(frozen=True)
class MaskArgument:
    """One mask argument of an implementation.

    Args:
        name: the argument's own name.
        axes: the layouts it accepts as einops patterns over batch, heads, query, key, preferred
            first: "batch key", "(batch heads) query key", "batch heads query key".
        true: what True means, or None if booleans are not accepted.
        number: what a number means, or None if numbers are not accepted. "added": added to the
            logits (-inf blocks). "attends if nonzero": 0 blocks, any other number attends. "attends
            if 1": any other number than 1 blocks, as in `mask != 1`. "attends, 0 or 1 only": 1
            attends, 0 blocks, and nothing is said of other numbers. "blocks if nonzero", "blocks if
            1" and "blocks, 0 or 1 only": likewise, the other way round.
        whole: what numbers of an integer type mean, where that is something else. Problems are put
            in floating-point numbers; only the probe feeds others.
        broadcasts: axes that stand alone in a layout may also have size 1.
        alone: whether it is refused beside another mask argument; a causal flag may be there.
    """

    name: str
    axes: str | tuple[str, ...]
    true: TrueMeans | None = None
    number: NumberMeans | None = None
    broadcasts: bool = False
    alone: bool = False
    whole: NumberMeans | None = None

    def __post_init__(self) -> None:
        if isinstance(self.axes, str):
            object.__setattr__(self, "axes", (self.axes,))
        if self.true not in ("attends", "blocks", None):
            raise WrongDeclaration(f"{self.name}: true={self.true!r}; say 'attends' or 'blocks'")
        for field_name in ("number", "whole"):
            meant = getattr(self, field_name)
            if meant is not None and meant not in get_args(NumberMeans):
                said = ", ".join(map(repr, get_args(NumberMeans)))
                raise WrongDeclaration(f"{self.name}: {field_name}={meant!r}; say one of {said}")
        if self.true is None and self.number is None:
            raise WrongDeclaration(f"{self.name} accepts neither booleans nor numbers")
        if not self.layouts:
            raise WrongDeclaration(f"{self.name} has no layout")
        for layout in self.layouts:
            try:
                known = all(names and set(names) <= set(AXES) for names in layouts.parse(layout))
            except WrongDeclaration:
                known = False
            if not layout.strip() or not known:
                raise WrongDeclaration(f"{self.name}: {layout!r} is no layout of {', '.join(AXES)}")

    @property
    def layouts(self) -> tuple[str, ...]:
        """Return `axes` as a tuple of axis names."""
        return (self.axes,) if isinstance(self.axes, str) else self.axes

    def layout_over(self, *axes: str) -> str | None:
        """Return the first layout that has these axes, or None."""
        return next((it for it in self.layouts if set(axes) <= set(layouts.axes(it))), None)

    @property
    def one(self) -> TrueMeans | None:
        """Return what 1 means, 0 being the opposite; None if numbers are added or refused."""
        return one_means(self.number)

    def attending(self, numbers: np.ndarray) -> BoolArray | None:
        """Return True where a query may attend, in the shape of the numbers.

        None if the numbers are added, refused, or not all defined.
        """
        if self.number is None or self.one is None:
            return None
        if self.number.endswith("0 or 1 only") and not ((numbers == 0) | (numbers == 1)).all():
            return None
        marked = numbers != 0 if self.number.endswith("nonzero") else numbers == 1
        return np.asarray(marked if self.one == "attends" else ~marked)


def one_means(number: str | None) -> TrueMeans | None:
    """Return what 1 means if numbers have this meaning; None if they are added or refused."""
    if number is None or number == "added":
        return None
    return "attends" if number.startswith("attends") else "blocks"


@dataclass(frozen=True)
class CausalFlag:
    """A boolean argument that makes the attention causal.

    Args:
        name: the argument's own name.
        alignment: what it means where lengths differ, or None if it is refused there.
        needs: a mask argument that must hold the causal mask all the same (torch's `is_causal`
            is a hint about `attn_mask`).
        alone: whether it is refused beside a mask argument.
    """

    name: str
    alignment: Causal | None = None
    needs: str | None = None
    alone: bool = False

    def __post_init__(self) -> None:
        if self.alignment not in ("top-left", "bottom-right", None):
            raise WrongDeclaration(
                f"{self.name}: alignment={self.alignment!r}; say 'top-left' or 'bottom-right', "
                "or None where lengths must be equal"
            )
        if self.alone and self.needs:
            raise WrongDeclaration(f"{self.name}: it cannot both stand alone and need {self.needs}")

    def expresses(self, problem: Problem) -> bool:
        """Return whether the flag alone expresses the causal mask of the problem."""
        square = problem.shape.query_length == problem.shape.key_length
        return problem.causal is not None and (square or self.alignment == problem.causal)


@dataclass(frozen=True, eq=False)
class Spelling:
    """One way to express a problem's mask, causal flag and bias.

    Attributes:
        label: for people, such as "attn_mask=float[query key], is_causal".
        arguments: native argument to boolean array, float array or flag.
        bias: the argument whose gradient is that of the problem's bias, and its layout.
    """

    label: str
    arguments: Mapping[str, Native]
    bias: tuple[str, str] | None = None

    def bias_gradient(self, gradient: Array, problem: Problem) -> Array:
        """Return the gradient of the native argument in the shape of `problem.attn_bias`."""
        assert self.bias is not None
        assert problem.attn_bias is not None
        sizes = dict(zip(AXES, problem.shape.logits, strict=True))
        full = from_layout(gradient, self.bias[1], sizes)
        wanted = problem.attn_bias.shape
        axes = tuple(i for i in range(4) if wanted[i] == 1 and full.shape[i] != 1)
        return full.sum(axis=axes, keepdims=True)


NO_MASK = Spelling("no mask", MappingProxyType({}))


def to_layout(
    array: np.ndarray, layout: str, shape: Shape, *, broadcast: bool
) -> np.ndarray | None:
    """Return a canonical array `[batch heads query key]` in a layout; None if it does not fit.

    Axes that the layout lacks must have size 1. Those that it has are expanded, or with
    `broadcast` left at 1 where they stand alone.
    """
    named = layouts.axes(layout)
    sizes = dict(zip(AXES, shape.logits, strict=True))
    if any(array.shape[i] != 1 for i, axis in enumerate(AXES) if axis not in named):
        return None
    joined = layouts.joined(layout)
    target = tuple(
        array.shape[i] if axis not in named or (broadcast and axis not in joined) else sizes[axis]
        for i, axis in enumerate(AXES)
    )
    expanded = np.broadcast_to(array, target)
    left = " ".join(axis if axis in named else "()" for axis in AXES)
    return np.ascontiguousarray(einops.rearrange(expanded, f"{left} -> {layout}"))


def from_layout(array: np.ndarray, layout: str, sizes: Mapping[str, int]) -> np.ndarray:
    """Return the inverse of `to_layout`: `[batch heads query key]`, 1 for axes that are missing."""
    named = layouts.axes(layout)
    right = " ".join(axis if axis in named else "()" for axis in AXES)
    known = {axis: sizes[axis] for axis in layouts.joined(layout)}
    return einops.rearrange(array, f"{layout} -> {right}", **known)


@dataclass(frozen=True, eq=False)
class MaskTable:
    """All mask arguments of an implementation."""

    arguments: tuple[MaskArgument, ...] = ()
    causal: CausalFlag | None = None
    by_name: Mapping[str, MaskArgument] = field(init=False)

    def __post_init__(self) -> None:
        by_name = {argument.name: argument for argument in self.arguments}
        if len(by_name) < len(self.arguments):
            raise WrongDeclaration("two mask arguments have the same name")
        if self.causal is not None:
            self._check_flag(self.causal, by_name)
        object.__setattr__(self, "by_name", by_name)

    @staticmethod
    def _check_flag(flag: CausalFlag, by_name: Mapping[str, MaskArgument]) -> None:
        if flag.name in by_name:
            raise WrongDeclaration(f"{flag.name!r} is both the causal flag and a mask argument")
        if flag.needs is None:
            return
        if flag.needs not in by_name:
            raise WrongDeclaration(f"causal flag needs {flag.needs!r}, which is not declared")
        if by_name[flag.needs].layout_over("query", "key") is None:
            raise WrongDeclaration(
                f"causal flag needs {flag.needs!r}, which no layout lets hold a causal mask"
            )

    def spell(self, problem: Problem) -> Spelling:
        """Return the preferred spelling; raises `Unsupported` if there is none."""
        spelling = _preferred(self, problem)
        if spelling is None:
            raise Unsupported(self._why_not(problem))
        return spelling

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        """Yield every spelling of the problem once, the preferred one first."""
        parts = _Parts.of(problem)
        if not parts.kinds:
            yield NO_MASK
            return
        seen: set[str] = set()
        for flagged in self._flag_choices(problem):
            alone = flagged and self.causal is not None and self.causal.needs is None
            kinds = [kind for kind in parts.kinds if not (kind == "causal" and alone)]
            for broadcast in (False, True):
                for numbers in (False, True):
                    for targets in self._assignments(kinds):
                        spelling = self._spell(parts, targets, flagged, numbers, broadcast)
                        if spelling is not None and spelling.label not in seen:
                            seen.add(spelling.label)
                            yield spelling

    def _flag_choices(self, problem: Problem) -> tuple[bool, ...]:
        if self.causal is None or not self.causal.expresses(problem):
            return (False,)
        return (True, False) if self.causal.needs is None else (False, True)

    def _assignments(self, kinds: Sequence[str]) -> list[tuple[tuple[str, MaskArgument], ...]]:
        """Return assignments of parts to arguments, those to separate arguments first."""
        every = [
            tuple(zip(kinds, chosen, strict=True))
            for chosen in itertools.product(self.arguments, repeat=len(kinds))
        ]
        return sorted(every, key=lambda targets: -len({argument.name for _, argument in targets}))

    def _spell(
        self,
        parts: _Parts,
        targets: tuple[tuple[str, MaskArgument], ...],
        flagged: bool,
        numbers: bool,
        broadcast: bool,
    ) -> Spelling | None:
        """Return one spelling, or None if a part does not fit its argument."""
        if flagged and targets and self.causal and self.causal.alone:
            return None
        several = len({argument.name for _, argument in targets}) > 1
        if several and any(argument.alone for _, argument in targets):
            return None
        if broadcast and not any(argument.broadcasts for _, argument in targets):
            return None
        arguments: dict[str, Native] = {}
        labels: list[str] = []
        bias: tuple[str, str] | None = None
        flagged_mask = not (flagged and self.causal and self.causal.needs)
        for argument in self.arguments:
            kinds = [kind for kind, target in targets if target is argument]
            if not kinds:
                continue
            said = _say(parts, kinds, argument, numbers, broadcast and argument.broadcasts)
            if said is None:
                return None
            arguments[argument.name], layout, label = said
            labels.append(f"{argument.name}={label}")
            if "bias" in kinds:
                bias = (argument.name, layout)
            if flagged and self.causal and self.causal.needs == argument.name:
                flagged_mask = kinds == ["causal"]
        if not flagged_mask:
            return None
        if flagged:
            assert self.causal is not None
            arguments[self.causal.name] = True
            labels.append(self.causal.name)
        return Spelling(", ".join(labels), arguments, bias)

    def _why_not(self, problem: Problem) -> str:
        if not self.arguments:
            parts = " and ".join(_Parts.of(problem).kinds)
            return f"no mask arguments: cannot express {parts}"
        if problem.attn_bias is not None and not any(a.number == "added" for a in self.arguments):
            return "no argument adds a bias to the logits"
        arguments = ", ".join(f"{a.name}[{' | '.join(a.layouts)}]" for a in self.arguments)
        varies = [axis for axis, size in zip(AXES, _Parts.of(problem).extent, strict=True) if size]
        return f"a mask that varies over {', '.join(varies)} fits none of {arguments}"


@lru_cache(maxsize=256)
def _preferred(table: MaskTable, problem: Problem) -> Spelling | None:
    """Return the first spelling; cached, because every mode and every check needs it."""
    return next(table.spellings(problem), None)


@dataclass(frozen=True, eq=False)
class _Parts:
    """The mask, causal mask and bias of a problem, as far as it has them; each with four axes."""

    problem: Problem
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, problem: Problem) -> _Parts:
        arrays: dict[str, np.ndarray] = {}
        if problem.mask is not None:
            arrays["mask"] = problem.mask
        if problem.causal is not None:
            arrays["causal"] = causal_mask(problem.shape, problem.causal)
        if problem.attn_bias is not None:
            arrays["bias"] = problem.attn_bias
        return cls(problem, arrays)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.arrays)

    @property
    def extent(self) -> tuple[bool, ...]:
        return tuple(any(a.shape[i] != 1 for a in self.arrays.values()) for i in range(4))


def _say(
    parts: _Parts, kinds: Sequence[str], argument: MaskArgument, numbers: bool, broadcast: bool
) -> tuple[Native, str, str] | None:
    """Return the parts as one array of this argument: (array, layout, label).

    In the label, "~" marks a layout of which an axis was left at size 1.
    """
    allowed: BoolArray | None = None
    for kind in kinds:
        if kind != "bias":
            array = parts.arrays[kind]
            allowed = array if allowed is None else allowed & array
    merged: np.ndarray
    if "bias" in kinds:
        if argument.number != "added":
            return None
        bias = parts.arrays["bias"]
        merged = bias if allowed is None else np.where(allowed, bias, -np.inf)
    elif not numbers:
        if argument.true is None:
            return None
        assert allowed is not None
        merged = allowed if argument.true == "attends" else ~allowed
    elif argument.number == "added":
        assert allowed is not None
        merged = np.where(allowed, 0.0, -np.inf)
    elif argument.number is not None:
        assert allowed is not None
        marked = allowed if argument.one == "attends" else ~allowed
        merged = np.where(marked, 1.0, 0.0)
    else:
        return None
    for layout in argument.layouts:
        laid = to_layout(merged, layout, parts.problem.shape, broadcast=broadcast)
        if laid is not None:
            kind = "bool" if laid.dtype == np.bool_ else "float"
            sizes = dict(zip(AXES, parts.problem.shape.logits, strict=True))
            whole = math.prod(sizes[axis] for axis in layouts.axes(layout))
            return laid, layout, f"{kind}[{'~' if laid.size < whole else ''}{layout}]"
    return None
