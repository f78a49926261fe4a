"""Mask arguments: what they mean, and how to express a problem with them.

An adapter declares its mask arguments. From the declarations, the suite derives every encoding (a
`Spelling`) of a problem: an assignment of its mask, causal mask and bias to arguments. All
encodings mean the same, so all must give the same result; by default, the first one is used. No
adapter inverts a mask by hand.

Features beyond masks (`conformance.adapter.features`) have their own arguments. The preferred
encoding uses an argument for a window, lengths, segments or ALiBi if that argument can express what
the problem requires. Expressing them by a mask, or by an additive bias, is a further encoding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, get_args

import einops
import numpy as np

from conformance.adapter import layouts
from conformance.adapter.features import (
    MASKABLE,
    WHOLE,
    Feature,
    Said,
    Static,
    Unasked,
    Value,
    Variable,
    check_alignment,
    check_choices,
    parts_of,
)
from conformance.adapter.handing import Handing, Moved, Pages
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Causal, Problem
from conformance.errors import Unsupported, WrongDeclaration

FlagEffect = Literal["always", "without a mask", "instead of masks", "none"]
MaskEffect = Literal["always", "none", "refused"]
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
Native = BoolArray | Array | Static

AXES = ("batch", "heads", "query", "key")


@dataclass(frozen=True)
class MaskArgument:
    """One mask argument of an implementation.

    Args:
        name: the name of the argument in the implementation.
        axes: the accepted layouts, preferred first, as einops patterns over batch, heads, query and
            key, such as "batch key" or "(batch heads) query key".
        true: what True means: "attends" (the query may attend to the key) or "blocks"; None if
            booleans are not accepted.
        number: what a number means, or None if numbers are not accepted. "added": added to the
            logits (-inf blocks). "attends if nonzero": 0 blocks, any other number attends. "attends
            if 1": every number other than 1 blocks, as in `mask != 1`. "attends, 0 or 1 only": 1
            attends, 0 blocks, other numbers are undefined. "blocks if nonzero", "blocks if 1" and
            "blocks, 0 or 1 only": likewise, with the roles exchanged.
        whole: what numbers of an integer dtype mean; None if that is what `number` says. Unless
            `dtype` is set, only experiments pass integers.
        dtype: the integer dtype that numbers must have, such as "int32"; "" for the dtype of the
            inputs.
        broadcasts: whether axes that are not joined with others may also have size 1.
        alone: whether the implementation rejects this argument together with another mask argument.
            A causal flag does not count as one.
        effect: "always"; "none", if the argument is accepted and ignored, as old versions may do;
            or "refused", if the implementation has the argument but rejects every call with it. In
            the last two cases, only experiments pass it.
    """

    name: str
    axes: str | tuple[str, ...]
    true: TrueMeans | None = None
    number: NumberMeans | None = None
    broadcasts: bool = False
    alone: bool = False
    whole: NumberMeans | None = None
    dtype: str = ""
    effect: MaskEffect = "always"

    def __post_init__(self) -> None:
        if isinstance(self.axes, str):
            object.__setattr__(self, "axes", (self.axes,))
        if self.true not in ("attends", "blocks", None):
            raise WrongDeclaration(f"{self.name}: true={self.true!r}; say 'attends' or 'blocks'")
        if self.number is not None:
            check_choices(self.name, number=(self.number, get_args(NumberMeans)))
        check_choices(self.name, effect=(self.effect, get_args(MaskEffect)))
        if self.whole is not None:
            check_choices(self.name, whole=(self.whole, get_args(NumberMeans)))
        if self.dtype and (self.number in (None, "added") or self.dtype not in WHOLE):
            raise WrongDeclaration(
                f"{self.name}: dtype={self.dtype!r}; say one of {', '.join(WHOLE)}, for numbers "
                "that are not added"
            )
        if self.true is None and self.number is None:
            raise WrongDeclaration(f"{self.name} accepts neither booleans nor numbers")
        if not self.layouts:
            raise WrongDeclaration(f"{self.name} has no layout")
        for layout in self.layouts:
            axes: layouts.Layout = ()
            with suppress(WrongDeclaration):
                axes = layouts.parse(layout)
            if not axes or not all(names and set(names) <= set(AXES) for names in axes):
                raise WrongDeclaration(f"{self.name}: {layout!r} is no layout of {', '.join(AXES)}")

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts in `axes`, as a tuple."""
        return (self.axes,) if isinstance(self.axes, str) else self.axes

    def layout_over(self, *axes: str) -> str | None:
        """Return the first layout that contains all of these axes, or None."""
        return next((it for it in self.layouts if set(axes) <= set(layouts.axes(it))), None)

    @property
    def one(self) -> TrueMeans | None:
        """What 1 means: "attends" or "blocks"; None if numbers are added or not accepted.

        0 means the opposite.
        """
        if self.number is None or self.number == "added":
            return None
        return "attends" if self.number.startswith("attends") else "blocks"

    def attending(self, numbers: np.ndarray) -> BoolArray | None:
        """Return an array shaped like `numbers`, True where a query may attend to a key.

        Return None if numbers are added to the logits, if numbers are not accepted, or if one of
        `numbers` has no defined meaning.
        """
        if self.number is None or self.one is None:
            return None
        if self.number.endswith("0 or 1 only") and not ((numbers == 0) | (numbers == 1)).all():
            return None
        marked = numbers != 0 if self.number.endswith("nonzero") else numbers == 1
        return np.asarray(marked if self.one == "attends" else ~marked)


@dataclass(frozen=True)
class CausalFlag:
    """A boolean argument that makes the attention causal.

    Args:
        name: the name of the argument in the implementation.
        alignment: the alignment if query and key lengths differ, or None if the flag is then
            rejected.
        needs: the name of a mask argument that must hold the causal mask even if the flag is set
            (torch's `is_causal` is a hint about `attn_mask`), or None.
        alone: whether the flag is rejected together with a mask argument.
        effect: when the flag has an effect, if it is not rejected: "always"; "without a mask", if a
            mask argument replaces it; "instead of masks", if it replaces mask arguments; or "none",
            if it is accepted and ignored. In the last case, only experiments set it.
    """

    name: str
    alignment: Causal | None = None
    needs: str | None = None
    alone: bool = False
    effect: FlagEffect = "always"

    def __post_init__(self) -> None:
        check_alignment(self.name, self.alignment)
        check_choices(self.name, effect=(self.effect, get_args(FlagEffect)))
        if self.alone and self.needs:
            raise WrongDeclaration(f"{self.name}: it cannot both stand alone and need {self.needs}")

    @property
    def without_masks(self) -> bool:
        """Whether the flag cannot be combined with a mask argument, as `alone` or `effect` say."""
        return self.alone or self.effect in ("without a mask", "instead of masks")

    def expresses(self, problem: Problem) -> bool:
        """Return whether setting the flag means the same as the problem's causal mask.

        Return False if the problem has no causal mask. Features that move this mask, such as
        positions or lengths, are not taken into account.
        """
        square = problem.shape.query_length == problem.shape.key_length
        return problem.causal is not None and (square or self.alignment == problem.causal)


@dataclass(frozen=True, eq=False)
class Spelling:
    """One encoding of a problem's mask, causal mask, bias and features as arguments.

    Attributes:
        label: a readable name, such as "attn_mask=float[query key], is_causal".
        arguments: the value of each argument: an array, a flag or, for features, another plain
            value.
        bias: the name and layout of the argument that holds the bias; None if the problem has none.
        variables: the arguments of features that have gradients, by the canonical name of the
            gradient, such as "sinks".
        parameters: the names of those arguments that are parameters of a layer.
        handing: how queries, keys and values are packed, paged or cached; None if they are not.
    """

    label: str
    arguments: Mapping[str, Value]
    bias: tuple[str, str] | None = None
    variables: Mapping[str, Variable] = field(default_factory=lambda: MappingProxyType({}))
    parameters: frozenset[str] = frozenset()
    handing: Moved | None = None

    def arrays(self, *, parameters: bool = False) -> dict[str, np.ndarray]:
        """Return the arguments that are arrays, by name, except parameters of a layer.

        If `parameters` is true, return only these parameters.
        """
        arrays = ((n, a) for n, a in self.arguments.items() if isinstance(a, np.ndarray))
        return {name: array for name, array in arrays if (name in self.parameters) == parameters}

    def plain(self) -> dict[str, Static]:
        """Return the arguments that are plain values, such as flags."""
        return {n: a for n, a in self.arguments.items() if not isinstance(a, np.ndarray)}

    def gradients(self) -> dict[str, str]:
        """Return, for each argument with a gradient, the canonical name of that gradient."""
        named = {variable.argument: name for name, variable in self.variables.items()}
        return named if self.bias is None else named | {self.bias[0]: "attn_bias"}

    def bias_gradient(self, gradient: Array, problem: Problem) -> Array:
        """Return the gradient of the problem's bias, given that of the argument that holds it.

        The gradient is summed over the axes along which the bias has size 1.
        """
        assert self.bias is not None
        assert problem.attn_bias is not None
        sizes = dict(zip(AXES, problem.shape.logits, strict=True))
        full = from_layout(gradient, self.bias[1], sizes)
        wanted = problem.attn_bias.shape
        axes = tuple(i for i in range(4) if wanted[i] == 1 and full.shape[i] != 1)
        return full.sum(axis=axes, keepdims=True)


NO_MASK = Spelling("no mask", MappingProxyType({}))


def to_layout(
    array: np.ndarray, layout: str, full: Sequence[int], *, broadcast: bool
) -> np.ndarray | None:
    """Return a canonical array `[batch heads query key]` in a layout; None if it does not fit.

    Axes missing from the layout must have size 1. The others are expanded to their size in the
    logits (`full`). If `broadcast` is true, axes that are not joined with others are not expanded.
    """
    named = layouts.axes(layout)
    sizes = dict(zip(AXES, full, strict=True))
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
    """Return an array with the axes of `layout`, rearranged to `[batch heads query key]`.

    Axes that are missing from the layout get size 1. `sizes` gives the sizes of axes by name; only
    those of axes that are joined with others are used.
    """
    named = layouts.axes(layout)
    right = " ".join(axis if axis in named else "()" for axis in AXES)
    known = {axis: sizes[axis] for axis in layouts.joined(layout)}
    return einops.rearrange(array, f"{layout} -> {right}", **known)


@dataclass(frozen=True, eq=False)
class MaskTable:
    """The mask arguments of an implementation, its causal flag if it has one, and its features.

    Those in `by_name` can express masks; the other arguments have no effect.

    Raises:
        WrongDeclaration: if the declarations contradict each other.
    """

    arguments: tuple[MaskArgument, ...] = ()
    causal: CausalFlag | None = None
    features: tuple[Feature, ...] = ()
    by_name: Mapping[str, MaskArgument] = field(init=False)

    def __post_init__(self) -> None:
        every = {argument.name: argument for argument in self.arguments}
        if len(every) < len(self.arguments):
            raise WrongDeclaration("two mask arguments have the same name")
        by_name = {name: it for name, it in every.items() if it.effect == "always"}
        object.__setattr__(self, "by_name", by_name)
        flag = self.causal
        names = [*every, *([] if flag is None else [flag.name])]
        for declared in self.features:
            if not isinstance(declared, Feature):
                raise WrongDeclaration(f"features: {declared!r} declares no feature")
            names += declared.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if self.features and twice is not None:
            raise WrongDeclaration(f"two declarations have an argument {twice!r}")
        if flag is None:
            return
        if flag.name in every:
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
        """Return the preferred encoding of the problem; raise `Unsupported` if there is none."""
        queries, keys = problem.shape.logits[2:]
        small = queries * keys <= _REMEMBERED
        spelling = _preferred(self, problem) if small else next(self.spellings(problem), None)
        if spelling is None:
            raise Unsupported(self._why_not(problem))
        return spelling

    def spellings(self, problem: Problem) -> Iterator[Spelling]:
        """Yield each possible encoding of the problem once, the preferred one first."""
        parts = _Parts(problem)
        if not parts and not problem.features and not self._handings:
            yield NO_MASK
            return
        labels: set[str] = set()
        for spelling in _in_turn(self._with(problem, parts, said) for said in self._said(problem)):
            if spelling.label not in labels:
                labels.add(spelling.label)
                yield spelling

    @property
    def _handings(self) -> tuple[Handing, ...]:
        return tuple(declared for declared in self.features if isinstance(declared, Handing))

    def _said(self, problem: Problem) -> list[Said]:
        """Return all ways to pass features by arguments; masks have to express the remaining parts.

        The first way passes keys in pages if they fill more than one page and if that is possible.
        Apart from that, it expresses as many parts by arguments as possible, and it passes
        positions only if arguments can then express more parts. The second way expresses as few
        parts by arguments as possible. The list is empty if there is a part that neither arguments
        nor masks can express.
        """
        begun = Said()
        for one in self.features:
            if isinstance(one, Unasked):
                done = next(one.ways(problem, begun), None)
                if done is None:
                    return []
                begun = done
        if not problem.features and not self._handings:
            return [begun]
        # How tokens are passed, and their positions, decide what other arguments mean.
        first = ("handing", "positions") if problem.features else ("handing",)
        wanted = (*first, *(part for part in parts_of(problem) if part not in first))
        every = list(self._saying(problem, begun, wanted))
        counted = {*parts_of(problem)} - {"positions"}
        paged = [one for one in self._handings if isinstance(one, Pages)]
        filled = [one for one in paged if one.size < problem.shape.key_length]
        tables = {name for one in filled for name in one.names}
        most = max(
            every,
            key=lambda said: (not tables.isdisjoint(said.arguments), len(said.parts & counted)),
            default=None,
        )
        least = min(every, key=lambda said: len(said.parts), default=None)
        return sorted(every, key=lambda said: (said is not most, said is not least))

    def _saying(self, problem: Problem, said: Said, parts: Sequence[str]) -> Iterator[Said]:
        if not parts:
            yield said
            return
        part, *others = parts
        if part in said.parts:
            yield from self._saying(problem, said, others)
            return
        only = part == "handing" and any(one.only for one in self._handings)
        if part in ("handing", "positions") and not only:
            yield from self._saying(problem, said, others)
        for declared in self.features:
            if part in declared.says:
                for way in declared.ways(problem, said):
                    if part in way.parts:
                        yield from self._saying(problem, way, others)
        if part in MASKABLE:
            yield from self._saying(problem, said, others)

    def _with(
        self, problem: Problem, parts: Mapping[str, np.ndarray], said: Said
    ) -> Iterator[Spelling]:
        """Yield the encodings that include the arguments in `said`.

        Masks, or the causal flag, express those of `parts` that these arguments do not express.
        """
        for flag in self._flags(problem, said):
            if said.needs_flag and flag is None:
                continue
            said_by_flag = "causal" if flag and flag.needs is None else ""
            kinds = [kind for kind in parts if kind not in (said_by_flag, *said.parts)]
            for broadcast, numbers in itertools.product((False, True), repeat=2):
                if kinds and said.handing is not None and not said.handing.masks:
                    continue
                for held in self._assignments(kinds):
                    spelling = self._spell(problem, parts, held, flag, numbers, broadcast)
                    if spelling is not None:
                        yield _joined(spelling, said)

    def handed(self, spelling: Spelling, problem: Problem) -> Spelling:
        """Return `spelling`, extended to pack, page or cache tokens if no other way is declared.

        An encoding that already packs, pages or caches tokens is returned unchanged, as is every
        encoding if tokens can also be passed in another way.

        Raises:
            Unsupported: if the only declared way to pass tokens cannot express the problem.
        """
        only = next((declared for declared in self._handings if declared.only), None)
        if only is None or spelling.handing is not None:
            return spelling
        way = next(only.ways(problem, Said()), None)
        if way is None:
            raise Unsupported(f"no other way to hand it over than {', '.join(only.names)}")
        return _joined(spelling, way)

    def _flags(self, problem: Problem, said: Said) -> tuple[CausalFlag | None, ...]:
        """Return the flags to try: the causal flag if it fits the problem, and None for no flag."""
        if self.causal is None or problem.causal is None or "causal" in said.parts:
            return (None,)
        if self.causal.effect == "none":
            return (None,)
        fits = self.causal.expresses(problem)
        if problem.features or said.handing is not None:
            fits = said.agrees(problem, "causal", self.causal.alignment)
        if not fits:
            return (None,)
        return (self.causal, None) if self.causal.needs is None else (None, self.causal)

    def _assignments(self, kinds: Sequence[str]) -> list[dict[str, list[str]]]:
        """Return all ways to assign the parts named `kinds` to mask arguments.

        Each way is a dictionary from the names of the arguments that it uses to the names of the
        parts that they hold. Ways that use more arguments come first.
        """
        every = [
            {
                name: [kind for kind, holder in zip(kinds, chosen, strict=True) if holder == name]
                for name in self.by_name
                if name in chosen
            }
            for chosen in itertools.product(self.by_name, repeat=len(kinds))
        ]
        return sorted(every, key=len, reverse=True)

    def _spell(
        self,
        problem: Problem,
        parts: Mapping[str, np.ndarray],
        held: Mapping[str, list[str]],
        flag: CausalFlag | None,
        numbers: bool,
        broadcast: bool,
    ) -> Spelling | None:
        """Return the encoding with these choices, or None if the declarations rule it out.

        `held` names the `parts` in each argument; `flag` is the causal flag, or None if it is not
        set. Masks are numbers if `numbers` is true, or else booleans. If `broadcast` is true, axes
        keep size 1 where an argument allows it; the result is None if no argument does.
        """
        used = [self.by_name[name] for name in held]
        if flag and flag.without_masks and used:
            return None
        if flag and flag.needs and held.get(flag.needs) != ["causal"]:
            return None
        if len(used) > 1 and any(argument.alone for argument in used):
            return None
        if broadcast and not any(argument.broadcasts for argument in used):
            return None
        arguments: dict[str, Native] = {}
        labels: list[str] = []
        bias: tuple[str, str] | None = None
        full = problem.shape.logits
        sizes = dict(zip(AXES, full, strict=True))
        for argument in used:
            values = _encoded(parts, held[argument.name], argument, numbers, problem)
            if values is None:
                return None
            for layout in argument.layouts:
                array = to_layout(values, layout, full, broadcast=broadcast and argument.broadcasts)
                if array is not None:
                    break
            else:
                return None
            arguments[argument.name] = array
            kind = "bool" if array.dtype == np.bool_ else "int" if argument.dtype else "float"
            broadcasts = array.size < math.prod(layouts.shape(layout, sizes))
            labels.append(f"{argument.name}={kind}[{'~' if broadcasts else ''}{layout}]")
            if "bias" in held[argument.name]:
                bias = (argument.name, layout)
        if flag:
            arguments[flag.name] = True
            labels.append(flag.name)
        return Spelling(", ".join(labels), arguments, bias)

    def _why_not(self, problem: Problem) -> str:
        parts = _Parts(problem)
        if unsaid := self._unsaid(problem):
            return unsaid
        if not parts:
            names = ", ".join(name for declared in self._handings for name in declared.names)
            return f"no other way to hand it over than {names}"
        if not self.by_name:
            return f"no mask arguments: cannot express {' and '.join(parts)}"
        every = self.by_name.values()
        if problem.attn_bias is not None and not any(a.number == "added" for a in every):
            return "no argument adds a bias to the logits"
        arguments = ", ".join(f"{a.name}[{' | '.join(a.layouts)}]" for a in every)
        shape = np.broadcast_shapes(*(array.shape for array in parts.values()))
        varies = [axis for axis, size in zip(AXES, shape, strict=True) if size != 1]
        return f"a mask that varies over {', '.join(varies)} fits none of {arguments}"

    def _unsaid(self, problem: Problem) -> str:
        """Return why one of the problem's features cannot be encoded.

        Return "" if each of them can be encoded when it is regarded alone.
        """
        for part in parts_of(problem):
            declared = [one for one in self.features if part in one.says]
            if part == "alibi":
                maskable = any(argument.number == "added" for argument in self.by_name.values())
            else:
                maskable = part in MASKABLE and bool(self.by_name)
            if part == "positions" or maskable:
                continue
            if any(part in way.parts for one in self.features for way in one.ways(problem, Said())):
                continue
            if not declared:
                return f"no {part}"
            listed = ", ".join(argument for one in declared for argument in one.names)
            aligned = [getattr(one, "alignment", problem.causal) for one in declared]
            if not any(Said().agrees(problem, part, alignment) for alignment in aligned):
                where = " or ".join(alignment or "equal lengths only" for alignment in aligned)
                return f"no {part} with this alignment: {listed or 'it'} is declared for {where}"
            return f"no such {part}: {listed or 'a fixed value'} cannot express it"
        return ""


_REMEMBERED = 2**20
"""The most pairs of a query and a key for which an encoding is kept; it may have such arrays."""


@lru_cache(maxsize=2048)
def _preferred(table: MaskTable, problem: Problem) -> Spelling | None:
    """Return the first encoding, or None if there is none; cached, because it is needed often."""
    return next(table.spellings(problem), None)


def _in_turn(groups: Iterable[Iterator[Spelling]]) -> Iterator[Spelling]:
    """Yield the first encoding of each group, then the second of each, and so on."""
    left = list(groups)
    while left:
        started, left = left, []
        for group in started:
            spelling = next(group, None)
            if spelling is not None:
                yield spelling
                left.append(group)


def _joined(spelling: Spelling, said: Said) -> Spelling:
    """Return the encoding of the masks, `spelling`, extended by the arguments in `said`."""
    if not said.labels:
        return replace(spelling, label=spelling.label or NO_MASK.label)
    labels = ([spelling.label] if spelling.label else []) + list(said.labels)
    arguments = {**spelling.arguments, **said.arguments}
    return replace(
        spelling,
        label=", ".join(labels),
        arguments=arguments,
        variables=said.variables,
        parameters=said.parameters,
        handing=said.handing,
    )


class _Parts(Mapping[str, np.ndarray]):
    """The parts of a problem that masks can hold, by name, as arrays with four axes.

    These are, if the problem has them, its "mask", its rules such as "causal" and "window", its
    "bias" and its "alibi". The last two are numbers to be added to the logits. All other arrays are
    True where a query may attend to a key. An array is computed when it is first used, because
    those of long sequences, which flags and features express, do not fit into memory.
    """

    def __init__(self, problem: Problem) -> None:
        held = {"mask": problem.mask, "bias": problem.attn_bias}
        self._problem, self._arrays = problem, {n: a for n, a in held.items() if a is not None}
        alibi = ["alibi"] if problem.slopes is not None else []
        names = ("mask", *problem.rule_names, "bias", *alibi)
        self._names = [name for name in names if name not in held or name in self._arrays]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._arrays:
            self._arrays[name] = self._computed(name)
        return self._arrays[name]

    def _computed(self, name: str) -> np.ndarray:
        if name != "alibi" or self._problem.slopes is None:
            return self._problem.rule(name)
        return -self._problem.slopes[:, None, None] * np.abs(self._problem.distances())

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _encoded(
    parts: Mapping[str, np.ndarray],
    kinds: Sequence[str],
    argument: MaskArgument,
    numbers: bool,
    problem: Problem,
) -> np.ndarray | None:
    """Return the parts in `kinds` as one array for the argument.

    The array holds numbers if `numbers` is true or if `kinds` contains "bias" or "alibi", or else
    booleans. Each of its four axes may have size 1. Return None if the argument does not accept
    such an array, or if ALiBi, with any bias added to it, is not exact in the problem's dtype.
    """
    allowed: BoolArray = np.ones((1, 1, 1, 1), np.bool_)
    added: list[np.ndarray] = []
    for kind in kinds:
        if kind in ("bias", "alibi"):
            added.append(parts[kind])
        else:
            allowed = allowed & parts[kind]
    if added:
        total = sum(added[1:], added[0])
        if "alibi" in kinds and not np.array_equal(problem.format.round(total), total):
            return None
        return np.where(allowed, total, -np.inf) if argument.number == "added" else None
    if not numbers:
        return None if argument.true is None else allowed == (argument.true == "attends")
    if argument.number == "added":
        return np.where(allowed, 0.0, -np.inf)
    if argument.number is None:
        return None
    attends = argument.one == "attends"
    return np.where(allowed == attends, 1.0, 0.0).astype(argument.dtype or np.float64)
