"""What an adapter can declare of a function that is there: by its signature, and by trying.

Names of arguments say which of them are masks, but not what `True` means in them, which axes they
have, nor how heads and lengths are arranged. For each of these questions, a case or two are asked
with every answer, and the answer with which the function conforms is declared. Arguments without a
default get values in a wrapper, whose code is both tried here and written into the adapter.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from conformance.errors import ConformanceError, NotAnAdapter
from conformance.records.findings import without_place

MASKS = ("mask", "attn_mask", "attention_mask")
BIASES = ("bias", "attn_bias", "attention_bias")
CAUSAL = ("is_causal", "causal")
CAPS = ("softcap", "soft_cap", "logit_cap", "logits_soft_cap")
KNOWN = ("scale",)
"""Parameters that need no declaration, because the decorator sees them."""

LAYOUTS = ("batch heads length head", "batch length heads head")
AXES = "batch heads query key"

MASK_AXES = {
    AXES: ("mask/key-padding/cross", "mask/per-head/cross"),
    "batch 1 query key": ("mask/key-padding/cross", "mask/per-batch/cross"),
    "batch query key": ("mask/key-padding/cross", "mask/per-batch/cross"),
    "batch 1 1 key": ("mask/key-padding/cross",),
    "batch key": ("mask/key-padding/cross",),
    "query key": ("mask/shared/cross",),
}
"""The usual axes of a mask, widest first, and the cases that decide whether a mask has them.

The output must be right on the first case. On the second, it only must not raise: a function that
answers, but wrongly, has a mistake that narrower axes would hide.
"""

MEANINGS = ('true="attends"', 'true="blocks"', 'number="added"')

Declaration = Mapping[str, str]
"""Arguments of `attention_function` as code; those of masks and features by their parameter.

The key "case" names the case that decides whether a declaration is right, if one does.
"""


@dataclass(frozen=True)
class Mask:
    """One answer to the question of what a mask argument takes."""

    name: str
    axes: str = AXES
    means: str = MEANINGS[0]
    broadcasts: bool = True

    @property
    def declared(self) -> Declaration:
        """The declaration of this argument."""
        more = ", broadcasts=True" if self.broadcasts else ""
        return {"mask": f'MaskArgument("{self.name}", "{self.named}", {self.means}{more})'}

    @property
    def named(self) -> str:
        """The axes that declarations can name: those of size 1 are inserted by a wrapper."""
        return " ".join(axis for axis in self.axes.split() if axis != "1")

    @property
    def index(self) -> str:
        """The index that inserts the axes of size 1, such as "[:, None]"; "" if there are none."""
        axes = self.axes.rpartition("1")[0].split()
        index = ["None" if axis == "1" else ":" for axis in [*axes, "1"]]
        return f"[{', '.join(index)}]" if "1" in self.axes else ""

    @property
    def told(self) -> str:
        """The axes and the meaning, for people."""
        return f"[{self.axes}] with {self.means}"


@dataclass(frozen=True)
class Attempt:
    """The outcome of one call: whether the output is right, and if not, what is wrong."""

    verdict: str
    detail: str = ""

    @property
    def is_right(self) -> bool:
        """Whether the output equals the definition."""
        return self.verdict == "conforms"

    @property
    def is_wrong(self) -> bool:
        """Whether the function returned an output that is not the definition's."""
        return self.verdict == "deviates"


@dataclass(frozen=True)
class Filled:
    """Values for the arguments that have no default, where a problem says nothing of them.

    Attributes:
        needed: the names of these arguments.
        framework: the framework of an array of a mask.
        masks: what the masks among them take, if they get arrays that block nothing, by name; empty
            if they get None.
        layout: the layout of query, key and value.
        inserted: the index that inserts axes of size 1 into a mask, by the mask's name.
    """

    needed: tuple[str, ...]
    framework: str
    masks: Mapping[str, Mask]
    layout: str
    inserted: dict[str, str] = field(default_factory=dict)

    def having(self, masks: Mapping[str, Mask]) -> Filled:
        """Return the same with other masks: arrays for those that get one, and their axes."""
        indices = {name: mask.index for name, mask in masks.items()}
        return replace(
            self,
            masks={name: masks.get(name, mask) for name, mask in self.masks.items()},
            inserted={n: index for n, index in (self.inserted | indices).items() if index},
        )

    @property
    def does_nothing(self) -> bool:
        """Whether no wrapper is necessary."""
        return not (self.needed or self.inserted)

    @property
    def imports(self) -> list[str]:
        """The import statements of the code."""
        return [_MODULES[self.framework][0]] if self.masks else []

    def lines(self) -> list[str]:
        """Return the body of a wrapper, before its last line, which changes the dict `given`."""
        lines: list[str] = []
        for name in self.needed:
            # Masks of the same axes share the line with their shape.
            shapes = [line for line in lines if line.startswith("shape =")]
            lines += [line for line in self._lines_of(name) if line not in shapes[-1:]]
        for name, index in self.inserted.items():
            lines += [
                f'if given.get("{name}") is not None:',
                f'    given["{name}"] = given["{name}"]{index}',
            ]
        return lines

    def _lines_of(self, name: str) -> list[str]:
        if name in KNOWN:
            return [f'given.setdefault("{name}", query.shape[-1] ** -0.5)']
        if name in CAUSAL:
            return [f'given.setdefault("{name}", False)']
        mask = self.masks.get(name)
        if mask is None:
            return [f'given.setdefault("{name}", None)']
        length = self.layout.split().index("length")
        sizes = {
            "batch": "query.shape[0]",
            "heads": f"query.shape[{3 - length}]",
            "query": f"query.shape[{length}]",
            "key": f"key.shape[{length}]",
        }
        shape = ", ".join(sizes[axis] for axis in mask.named.split())
        filling = "ones" if mask.means == 'true="attends"' else "zeros"
        dtype = "query.dtype" if mask.means == 'number="added"' else "bool"
        code = _MODULES[self.framework][1].format(filling=filling, dtype=dtype)
        return [f"shape = ({shape})", f'given.setdefault("{name}", {code})']

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with these values."""
        names: dict[str, Any] = {}
        body = "".join(f"    {line}\n" for line in self.lines())
        imports = "".join(f"{line}\n" for line in self.imports)
        exec(f"{imports}def fill(query, key, given):\n{body}    return given\n", names)

        # The signature stays that of the function, so its `scale` is seen.
        @wraps(function)
        def filled(query: Any, key: Any, value: Any, **given: Any) -> Any:
            return function(query, key, value, **names["fill"](query, key, given))

        return filled


_MODULES = {
    "numpy": ("import numpy as np", "np.{filling}(shape, {dtype})"),
    "torch": ("import torch", "torch.{filling}(shape, dtype={dtype}, device=query.device)"),
    "jax": ("import jax.numpy as jnp", "jnp.{filling}(shape, {dtype})"),
    "tensorflow": ("import tensorflow as tf", "tf.{filling}(shape, {dtype})"),
}
"""How to import what makes an array, and how to make one, by framework."""


@dataclass(frozen=True)
class Recognised:
    """What was recognised of a function.

    Attributes:
        function: its name.
        origin: the module to import it from.
        source: its file or module, for people.
        framework: the framework of its arrays.
        declared: the further arguments of `attention_function`, as code.
        ignored: the names of parameters that were not recognised.
        plain: the outcome on the case without a mask, with what is declared.
        filled: the values of arguments without a default; None if there are no such arguments.
        refused: the error with None in the masks that have no default, if they get arrays instead;
            "" if they do not.
        guessed: for each mask that was not identified, what came closest, and its error.
    """

    function: str
    origin: str
    source: str
    framework: str
    declared: list[str]
    ignored: list[str]
    plain: Attempt
    filled: Filled | None = None
    refused: str = ""
    guessed: tuple[str, ...] = ()

    @property
    def imports(self) -> list[str]:
        """The names to import from `conformance`, sorted as linters sort them."""
        text = "\n".join(self.declared)
        names = ("CausalFlag", "MaskArgument", "SoftCap")
        return [*(name for name in names if name in text), "attention_function"]

    @property
    def told(self) -> str:
        """What to tell the user before the commands that come next."""
        lines, nextly = [], "Ask for the rest:"
        if self.refused:
            assert self.filled is not None
            names = " and ".join(self.filled.masks)
            lines.append(
                f"With None in {names}, every call raised {self.refused.rstrip('.')}. "
                "Where there is no mask, the adapter passes one that blocks nothing."
            )
        if self.plain.is_right:
            lines.append("With this adapter, its output is right where there is no mask.")
        elif self.plain.is_wrong:
            lines.append(
                "Its output is wrong even without a mask, however heads and lengths are arranged."
            )
            nextly = (
                "Look whether the adapter says what the function takes, then see what deviates:"
            )
        else:
            lines.append(
                "Every call raised, even without a mask, however heads and lengths are arranged: "
                f"{self.plain.detail.rstrip('.')}."
            )
            nextly = "Look whether the adapter says what the function takes, then see what raises:"
        if self.guessed and self.plain.is_right:
            nextly = "Say in the adapter what the mask is, then ask for the rest:"
        lines[-1:] = [" ".join([lines[-1], *([] if self.guessed else [nextly])])]
        if self.guessed:
            lines += [*self.guessed, nextly]
        return "\n".join(lines)


def recognise(spec: str, framework: str | None) -> Recognised:
    """Return what can be recognised of the function that `path/to/file.py:NAME` names.

    Args:
        spec: the function's place.
        framework: the name of its framework; None to recognise it by what the module imports.

    Raises:
        ConformanceError: if it cannot be loaded, is no function, is an adapter already, or needs
            other arguments than query, key and value.
    """
    from conformance.adapter.base import Adapter
    from conformance.adapter.loading import located

    function = located(spec)
    place, _, name = spec.partition(":")
    if isinstance(function, Adapter):
        raise NotAnAdapter(f"{spec} is an adapter already: mha-conformance run {spec}")
    if inspect.isclass(function) or not callable(function):
        raise NotAnAdapter(
            f"{spec} is no function; for a layer, new-adapter NAME --kind layer writes an adapter "
            "to start from"
        )
    stem = Path(place).stem
    if place.endswith(".py") and (not stem.isidentifier() or stem in sys.stdlib_module_names):
        raise NotAnAdapter(f"{place} cannot be imported as {stem!r}; rename the file")
    others = _others(function, spec)
    known = (*MASKS, *BIASES, *CAUSAL, *CAPS, *KNOWN)
    found = _tried(
        function,
        framework or _framework(function),
        [other for other in others if other in known],
        tuple(other for other, has_default in others.items() if not has_default),
    )
    return Recognised(
        function=name,
        origin=stem if place.endswith(".py") else place,
        source=Path(place).name if place.endswith(".py") else place,
        framework=found.framework,
        declared=_lines(found.declared),
        ignored=[other for other in others if other not in known],
        plain=found.plain,
        filled=found.filled,
        refused=found.refused,
        guessed=tuple(found.guessed),
    )


def _others(function: Callable[..., Any], spec: str) -> dict[str, bool]:
    """Return whether each parameter after query, key and value has a default, by name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise NotAnAdapter(f"{spec} has no signature that Python can read; wrap it") from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(parameters) < 3 or any(one.kind not in positional for one in parameters[:3]):
        told = ", ".join(one.name for one in parameters) or "nothing"
        raise NotAnAdapter(
            f"{spec} takes {told}; an attention function takes query, key and value first"
        )
    others = {}
    for one in parameters[3:]:
        if one.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        has_default = one.default is not inspect.Parameter.empty
        if not has_default and one.name not in (*MASKS, *BIASES, *CAUSAL, *CAPS, *KNOWN):
            raise NotAnAdapter(
                f"{spec} needs {one.name}, and nothing is known of it; give it a default, or wrap "
                "the function in one that does"
            )
        others[one.name] = has_default
    return others


def _framework(function: Callable[..., Any]) -> str:
    """Return the framework that the module of a function imports, or else "numpy"."""
    values = getattr(inspect.unwrap(function), "__globals__", {}).values()
    modules = {value.__name__ for value in values if isinstance(value, ModuleType)}
    modules |= {getattr(value, "__module__", None) or "" for value in values if callable(value)}
    tops = {name.partition(".")[0] for name in modules}
    return next((name for name in ("torch", "jax", "tensorflow") if name in tops), "numpy")


def _guesses(name: str) -> list[Declaration]:
    """Return what a parameter of this name may be, the most frequent first; [] if nothing is known.

    Masks are not among these parameters: `_masks` lists what they may be.
    """
    if name in BIASES:
        return [Mask(name, means='number="added"').declared]
    if name in CAUSAL:
        flags = [f'CausalFlag("{name}", alignment="{one}")' for one in ("top-left", "bottom-right")]
        cases = ("causal/top-left/cross", "causal/bottom-right/cross")
        return [
            *({"causal_flag": flag, "case": case} for flag, case in zip(flags, cases, strict=True)),
            {"causal_flag": f'CausalFlag("{name}")'},
        ]
    if name in CAPS:
        return [{"feature": f'SoftCap("{name}")'}]
    return []


def _masks(name: str) -> Iterator[Mask]:
    """Yield what a mask argument may take, the most frequent first."""
    for broadcasts in (True, False):
        for axes in MASK_AXES:
            for means in MEANINGS:
                yield Mask(name, axes, means, broadcasts)


_numbers = itertools.count()
PLAIN, GROUPED = "plain/no-mask/cross", "plain/no-mask/gqa"


@dataclass
class _Recognising:
    """What has been found of a function so far; see the attributes of `Recognised`."""

    function: Callable[..., Any]
    framework: str
    filled: Filled | None
    declared: list[Declaration] = field(default_factory=list)
    plain: Attempt = Attempt("not-run")
    refused: str = ""
    guessed: list[str] = field(default_factory=list)

    def tried(self, case: str, *declared: Declaration, filled: Filled | None = None) -> Attempt:
        """Return the outcome of a case in float32 with these declarations."""
        import conformance
        from conformance import attention_function, examine

        filled = filled or self.filled
        function = filled.around(self.function) if filled else self.function
        words = {it: getattr(conformance, it) for it in ("CausalFlag", "MaskArgument", "SoftCap")}
        code = f"made({self.framework!r}, {', '.join(_lines(declared))})"
        try:
            adapter = eval(code, {**words, "made": attention_function})(function)
            # Compiled programs are shared under a name, so no two trials may have the same.
            adapter.name = f"trial-{next(_numbers)}"
            # Most trials are wrong, so what NumPy warns of says nothing.
            with np.errstate(all="ignore"):
                (result,) = examine(adapter, cases=case, dtypes="float32").results
        except ConformanceError as error:
            return Attempt("error", str(error))
        # Other requirements, such as one on the dtype of the output, decide nothing here.
        outputs = (it for it in result.findings if it.requirement == "output.equals-definition")
        finding = next(outputs, None)
        if finding is None:
            return Attempt(result.verdict)
        return Attempt(finding.verdict, " ".join(without_place(finding.detail).split()))

    def find_layout(self) -> None:
        """Find how heads and lengths are arranged, and what masks without a default get."""
        layouts: list[Declaration] = [
            {"layout": f'"{layout}"', **({"returns_weights": '"per head"'} if weights else {})}
            for layout in LAYOUTS
            for weights in (False, True)
        ]
        tries: list[tuple[Attempt, Declaration, Filled | None]] = []
        for filled in self._fillings():
            # Arrays are only for masks in which None raises.
            if filled and filled.masks and any(it.is_wrong for it, *_ in tries[: len(layouts)]):
                break
            for one in layouts:
                laid = replace(filled, layout=one["layout"].strip('"')) if filled else None
                tries.append((self.tried(PLAIN, one, filled=laid), one, laid))
                if tries[-1][0].is_right:
                    break
            if tries[-1][0].is_right:
                break
        found = (
            next((it for it in tries if it[0].is_right), None)
            or next((it for it in tries if it[0].is_wrong), None)
            or tries[0]
        )
        self.plain, layout, self.filled = found
        self.declared.append(layout)
        if self.filled and self.filled.masks:
            # Of what raised with None, only the error with the right layout tells something.
            self.refused = next(trial.detail for trial, one, _ in tries if one == layout)
        elif not (self.plain.is_right or self.plain.is_wrong):
            errors = dict.fromkeys(trial.detail.rstrip(".") for trial, *_ in tries[: len(layouts)])
            self.plain = Attempt(self.plain.verdict, "; or ".join(errors))

    def _fillings(self) -> Iterator[Filled | None]:
        """Yield what arguments without a default may get: masks first None, and then arrays."""
        yield self.filled
        if self.filled is None:
            return
        names = [name for name in self.filled.needed if name in (*MASKS, *BIASES)]
        for mask in _masks("") if names else ():
            if mask.broadcasts:
                bias = Mask("", means='number="added"')
                masks = {n: replace(mask if n in MASKS else bias, name=n) for n in names}
                yield replace(self.filled, masks=masks).having(masks)

    def _having(self, name: str, mask: Mask) -> Filled | None:
        """Return the values of arguments if a mask takes this, or None if no wrapper is needed."""
        layout = self.declared[0]["layout"].strip('"')
        filled = self.filled or Filled((), self.framework, {}, layout)
        filled = filled.having({name: mask})
        return None if filled.does_nothing else filled

    def find_mask(self, name: str) -> None:
        """Find the axes of a mask, and what its elements mean; if none fits, note a guess."""
        others = [one for one in self.declared if "mask" not in one]
        closest: tuple[Attempt, Mask] | None = None
        for mask in _masks(name):
            filled = self._having(name, mask)
            first, *more = MASK_AXES[mask.axes]
            trial = self.tried(first, *others, mask.declared, filled=filled)
            if trial.is_right:
                later = (self.tried(it, *others, mask.declared, filled=filled) for it in more)
                trial = next((it for it in later if it.verdict == "error"), trial)
            if trial.is_right and filled != self.filled:
                trial = self.tried(PLAIN, *others, mask.declared, filled=filled)
            if trial.is_right:
                self.declared.append(mask.declared)
                self.filled = filled
                return
            if closest is None or (trial.is_wrong and not closest[0].is_wrong):
                closest = trial, mask
        assert closest is not None
        trial, mask = closest
        self.declared.append(mask.declared)
        what = (
            f"raised {trial.detail.rstrip('.')}"
            if not trial.is_wrong
            else "returned a wrong output"
        )
        self.guessed.append(
            f"{name} could not be identified, so its axes are a guess: what came closest, "
            f"{mask.told}, {what}."
        )


def _tried(
    function: Callable[..., Any], framework: str, known: Sequence[str], needed: tuple[str, ...]
) -> _Recognising:
    """Return what is found of a function by trying.

    Where it is right with none of several declarations, the first is returned, but for masks that
    with which it comes closest.

    Args:
        function: the function.
        framework: the framework of its arrays.
        known: its parameters of which something is known.
        needed: those among them that have no default.
    """
    filled = Filled(needed, framework, {}, LAYOUTS[0]) if needed else None
    found = _Recognising(function, framework, filled)
    found.find_layout()
    if found.plain.is_right:
        grouped = {"grouped": "True"}
        if found.tried(GROUPED, *found.declared, grouped).is_right:
            found.declared.append(grouped)
    for name in known:
        if name in MASKS and found.plain.is_right:
            found.find_mask(name)
        elif name in MASKS:
            got = found.filled.masks.get(name) if found.filled else None
            found.declared.append((got or Mask(name)).declared)
        elif own := _guesses(name):
            fits = (
                one
                for one in own
                if "case" not in one or found.tried(one["case"], *found.declared, one).is_right
            )
            found.declared.append(next(fits, own[0]) if found.plain.is_right else own[0])
    return found


def _lines(declared: Iterable[Declaration]) -> list[str]:
    """Return declarations as arguments of `attention_function`, positional ones first."""
    declared = list(declared)
    lines = [one["mask"] for one in declared if "mask" in one]
    features = [one["feature"] for one in declared if "feature" in one]
    for one in declared:
        lines += [f"{key}={text}" for key, text in one.items() if key not in _PLACED]
    return lines + ([f"features=({', '.join(features)},)"] if features else [])


_PLACED = ("mask", "feature", "case")
