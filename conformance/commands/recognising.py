"""What an adapter can declare of a function that is there: by its signature, and by trying.

Names of arguments say which of them are masks, but not what `True` means in them, nor how heads and
lengths are arranged. One case for each of these questions is asked with every answer, and the
answer with which the function conforms is declared.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.errors import ConformanceError, NotAnAdapter

MASKS = ("mask", "attn_mask", "attention_mask")
BIASES = ("bias", "attn_bias", "attention_bias")
CAUSAL = ("is_causal", "causal")
CAPS = ("softcap", "soft_cap", "logit_cap", "logits_soft_cap")
KNOWN = ("scale",)
"""Parameters that need no declaration, because the decorator sees them."""

LAYOUTS = ("batch heads length head", "batch length heads head")
AXES = "batch heads query key"

Declaration = Mapping[str, str]
"""Arguments of `attention_function` as code; those of masks and features by their parameter."""


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
        is_right: whether its output is right on the case without a mask.
    """

    function: str
    origin: str
    source: str
    framework: str
    declared: list[str]
    ignored: list[str]
    is_right: bool

    @property
    def imports(self) -> list[str]:
        """The names to import from `conformance`, sorted as linters sort them."""
        text = "\n".join(self.declared)
        names = ("CausalFlag", "MaskArgument", "SoftCap")
        return [*(name for name in names if name in text), "attention_function"]

    @property
    def told(self) -> str:
        """What to tell the user before the commands that come next."""
        if self.is_right:
            return (
                "With this adapter, its output is right where there is no mask. Ask for the rest:"
            )
        return (
            "Its output is wrong even without a mask, however heads and lengths are arranged. Look "
            "whether the adapter says what the function takes, then see what deviates:"
        )


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
    framework = framework or _framework(function)
    guesses: dict[str, list[Declaration]] = {}
    ignored = []
    for other in others:
        if own := _guesses(other):
            guesses[other] = own
        elif other not in KNOWN:
            ignored.append(other)
    declared, is_right = _tried(function, framework, guesses)
    return Recognised(
        function=name,
        origin=stem if place.endswith(".py") else place,
        source=Path(place).name if place.endswith(".py") else place,
        framework=framework,
        declared=_lines(declared),
        ignored=ignored,
        is_right=is_right,
    )


def _others(function: Callable[..., Any], spec: str) -> list[str]:
    """Return the names of the parameters after the first three, which are query, key and value."""
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
    others = []
    for one in parameters[3:]:
        if one.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if one.default is inspect.Parameter.empty and one.name not in (*MASKS, *BIASES, *KNOWN):
            raise NotAnAdapter(
                f"{spec} needs {one.name}, and nothing is known of it; give it a default, or wrap "
                "the function in one that does"
            )
        others.append(one.name)
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

    The key "case" names the case that decides; without one, there is nothing to decide.
    """
    if name in MASKS:
        means = ('true="attends"', 'true="blocks"', 'number="added"')
        return [
            {"mask": f'MaskArgument("{name}", "{AXES}", {one}, broadcasts=True)',
             "case": "mask/key-padding/cross"}
            for one in means
        ]  # fmt: skip
    if name in BIASES:
        return [{"mask": f'MaskArgument("{name}", "{AXES}", number="added", broadcasts=True)'}]
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


def _tried(
    function: Callable[..., Any], framework: str, guesses: Mapping[str, list[Declaration]]
) -> tuple[list[Declaration], bool]:
    """Return the declarations with which the output is right, and whether there is such a layout.

    Where it is right with none of several declarations, the first is returned.
    """
    plain = [
        {"layout": f'"{layout}"', **({"returns_weights": '"per head"'} if weights else {})}
        for layout in LAYOUTS
        for weights in (False, True)
    ]
    first = next((one for one in plain if _conforms(function, framework, [one], PLAIN)), None)
    declared: list[Declaration] = [first or plain[0]]
    if first is None:
        return [*declared, *(own[0] for own in guesses.values())], False
    if _conforms(function, framework, [*declared, {"grouped": "True"}], GROUPED):
        declared.append({"grouped": "True"})
    for own in guesses.values():
        fits = (
            one
            for one in own
            if "case" not in one or _conforms(function, framework, [*declared, one], one["case"])
        )
        declared.append(next(fits, own[0]))
    return declared, True


PLAIN, GROUPED = "plain/no-mask/cross", "plain/no-mask/gqa"


def _conforms(
    function: Callable[..., Any], framework: str, declared: Iterable[Declaration], case: str
) -> bool:
    """Return whether the output on a case in float32 is right with these declarations."""
    import conformance
    from conformance import attention_function, examine

    words = {name: getattr(conformance, name) for name in ("CausalFlag", "MaskArgument", "SoftCap")}
    code = f"made({framework!r}, {', '.join(_lines(declared))})"
    with suppress(ConformanceError):
        adapter = eval(code, {**words, "made": attention_function})(function)
        (result,) = examine(adapter, cases=case, dtypes="float32").results
        # Other requirements, such as one on the dtype of the output, decide nothing here.
        return any(
            finding.requirement == "output.equals-definition" and finding.verdict == "conforms"
            for finding in result.findings
        )
    return False


def _lines(declared: Iterable[Declaration]) -> list[str]:
    """Return declarations as arguments of `attention_function`, positional ones first."""
    declared = list(declared)
    lines = [one["mask"] for one in declared if "mask" in one]
    features = [one["feature"] for one in declared if "feature" in one]
    for one in declared:
        lines += [f"{key}={text}" for key, text in one.items() if key not in _PLACED]
    return lines + ([f"features=({', '.join(features)},)"] if features else [])


_PLACED = ("mask", "feature", "case")
