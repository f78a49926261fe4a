"""The sentences of convention cards in records of schema 1, read as phrases.

These are the templates by which the last suite that wrote schema 1 made its texts. They are frozen:
what says something new needs no line here. A text that no template fits stays as it is, in the
phrase "text".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache

from conformance.records.phrase import Argument, Phrase

_FORMS = {
    "bool": "form.bool",
    "{dtype} 0/1": "form.zero-one",
    "{dtype} 0/¼/1": "form.zero-quarter-one",
    "{dtype} 0/1/2": "form.zero-one-two",
    "{dtype} 0/−inf": "form.zero-infinite",
    "{dtype} 0/−{large}": "form.zero-large",
}
_SIZES = {
    "sizes differ": "sizes.differ",
    "sizes coincide": "sizes.coincide",
    "batch = heads, query = key": "sizes.batch-is-heads",
    "batch = query, heads = key": "sizes.batch-is-query",
    "batch = key, heads = query": "sizes.batch-is-key",
}
_LENGTHS = {
    "equal lengths": "lengths.equal",
    "fewer queries than keys": "lengths.fewer-queries",
    "more queries": "lengths.more-queries",
}
_TRIANGLES = {
    "causal": "causal.square",
    "top-left": "causal.top-left",
    "bottom-right": "causal.bottom-right",
}
_WRITTEN = {
    "1 = may attend": "written.one-attends",
    "1 = blocked": "written.one-blocks",
    "0 and −inf, added": "written.added",
}
_NUMBERS = {"NaN": "number.nan", "inf": "number.inf", "−inf": "number.minus-inf"}
_INPUTS = {
    "key": "input.key",
    "value": "input.value",
    "token": "input.token",
    "token (key and value)": "input.memory",
}
_PLACES = {
    "the masked queries": "place.masked-queries",
    "other queries": "place.other-queries",
    "keys": "place.keys",
    "values": "place.values",
    "parameters": "place.parameters",
    "the output": "place.output",
    "the returned weights": "place.weights",
    "gradients of {of}": "place.gradients",
}
_AXES = {
    "batch entries": "axis.batch",
    "heads": "axis.heads",
    "queries": "axis.query",
    "keys": "axis.key",
}
_MEANINGS = {
    "attends": "mask.attends",
    "attends above ½": "mask.attends-above-half",
    "attends where 1": "mask.attends-where-one",
    "blocks": "mask.blocks",
    "blocks where 1": "mask.blocks-where-one",
    "blocks everything": "mask.blocks-everything",
    "added": "mask.added",
    "multiplied": "mask.multiplied",
    "multiplied into the weights": "mask.multiplied-into-weights",
    "ignored": "mask.ignored",
    "rejected": "mask.rejected",
    "unexplained": "mask.unexplained",
}
_RETURNED = {
    "per head": "weights.per-head",
    "averaged": "weights.averaged",
    "none": "weights.none",
    "logits": "weights.logits",
    "{otherwise} unless {option}": "weights.unless",
}
_COMBINED = {
    "both": "combined.both",
    "either": "combined.either",
    "neither": "combined.neither",
    "unexplained": "combined.unexplained",
    "{argument} only": "combined.only",
}
_ROWS = {
    "NaN": "row.nan",
    "zeros": "row.zeros",
    "output bias only": "row.output-bias",
    "mean of the values": "row.mean-of-values",
    "uniform": "row.uniform",
    "as if unmasked": "row.unmasked",
    "something else": "something-else",
}
_DECLARED_ROWS = _ROWS | {
    "nan": "row.nan",
    "output bias": "row.output-bias",
    "mean of values": "row.mean-of-values",
}
_AGAIN = {
    "same bits": "again.same-bits",
    "within noise": "again.within-noise",
    "apart": "again.apart",
    "not examined": "again.not-examined",
    "refused": "refused",
}
_DROPOUT_MEAN = {"the weights": "dropout.unbiased", "not the weights": "dropout.biased"}

SUBJECTS: dict[str, dict[str, str]] = {
    "masks": {
        "{argument}, {form} (inputs {dtype})": "mask.meaning-for-inputs",
        "{argument}, {form}": "mask.meaning",
    },
    "same-mask": {"{argument}, {written}": "same-mask"},
    "masked-rows": {
        "{argument}, {form}: output": "fully-masked.output",
        "{argument}, {form}: returned weights": "fully-masked.weights",
        "{argument}, {form}: gradients": "fully-masked.gradients",
    },
    "causal": {
        "causal flag": "causal.no-flag",
        "{flag} alone, {lengths}": "causal.alone",
        "{flag} with {argument} {triangle}, {lengths}": "causal.with-triangle",
        "{flag} with {needed} and {argument}, {lengths}": "causal.beside-two",
        "{flag} with {argument}, {lengths}": "causal.beside",
    },
    "pairs": {"{one} with {other}, {sizes}": "pair"},
    "shapes": {
        "{argument}: shapes it takes": "shapes.taken",
        "{argument}: shapes it refuses": "shapes.refused",
        "{argument}: takes {shapes}": "shapes.misread",
    },
    "coinciding-sizes": {"{argument}, {sizes}": "shapes.coinciding"},
    "leaks": {"{number} in a blocked {input} ({argument}, {form})": "leak"},
    "weights": {
        "returned weights": "weights.returned",
        "their sum over the keys": "weights.sum",
        "beside those applied": "weights.applied",
    },
    "dropout": {
        "dropout": "dropout.active",
        "kept weights": "dropout.kept",
        "mean over draws": "dropout.mean",
        "a draw is": "dropout.draw",
        "returned weights are those": "dropout.returned",
    },
    "degenerate-sizes": {
        "batch of 0": "size.no-batch",
        "length 0": "size.no-length",
        "no query": "size.no-query",
        "no key": "size.no-key",
        "one key": "size.one-key",
    },
    "input-layouts": {
        "input without a batch axis": "input.unbatched",
        "sequence-first input": "input.sequence-first",
    },
    "repeatability": {
        "asked twice": "again.twice",
        "alone and inside a batch": "again.alone",
        "contiguous and strided": "again.strided",
        "whole and cut out": "again.window",
        "eager and compiled": "again.compiled",
    },
}
"""Experiment to the templates of its subjects, the more particular first."""

VALUES: dict[str, dict[str, str]] = {
    "masks": _MEANINGS,
    "same-mask": {
        "as meant": "same-mask.as-meant",
        "ignored": "mask.ignored",
        "blocks everything": "mask.blocks-everything",
        "something else": "something-else",
        "{percent}% on blocked keys": "same-mask.attends-future",
        "{percent}% on blocked keys, NaN": "same-mask.attends-future-with-nan",
    },
    "masked-rows": _ROWS | {"finite": "gradients.finite", "NaN: {places}": "gradients.nan"},
    "causal": _TRIANGLES | _COMBINED | {"ignored": "causal.ignored", "none": "none"},
    "pairs": _COMBINED,
    "shapes": {
        "none": "shapes.none",
        "at least {shapes}": "shapes.at-least",
        "{shapes}": "shapes",
    },
    "shapes.misread": {
        "taken, but no reading of its axes explains it": "axes.unexplained",
        "{axes}": "axes",
    },
    "coinciding-sizes": {"takes none": "readings.none", "{readings}": "readings"},
    "leaks": {"hidden": "leak.hidden", "reaches {places}": "leak.reaches"},
    "weights": {
        **_RETURNED,
        "1": "weights.sum-one",
        "not 1": "weights.sum-not-one",
        "the same": "weights.same",
        "others": "weights.others",
    },
    "dropout": {
        **_DROPOUT_MEAN,
        "on": "dropout.on",
        "off": "dropout.off",
        "scaled by 1/(1−p)": "dropout.scaled",
        "not scaled": "dropout.not-scaled",
        "something else": "something-else",
        "one for each weight": "dropout.each-weight",
        "the same for all {over}": "dropout.shared",
        "after dropout": "dropout.after",
        "before dropout": "dropout.before",
    },
    "degenerate-sizes": {
        **_ROWS,
        "an empty output": "output.empty",
        "the value": "output.value",
    },
    "input-layouts": {
        "taken": "input.taken",
        "no switch": "input.no-switch",
        "something else": "something-else",
    },
    "repeatability": _AGAIN,
}
"""Experiment, or subject, to the templates of its values and of what is declared of them."""

OBSERVED: dict[str, dict[str, str]] = {
    "observed.returned-weights": _RETURNED,
    "observed.causal-alignment": {
        "top-left": "causal.top-left",
        "bottom-right": "causal.bottom-right",
        "unexplained": "causal.unexplained",
        "refused: {reason}": "refused.because",
    },
    "observed.fully-masked-row": {
        "{row}; {beside}": "fully-masked.query",
        "{row}": "fully-masked.query",
    },
    "mask.polarity-is-as-declared": {"{meanings}": "mask.meanings"},
    "call.memory-layout-does-not-matter": _AGAIN,
    "dropout.is-unbiased": _DROPOUT_MEAN,
}
"""Requirement to the templates of `Finding.value`."""


@cache
def subject(experiment: str, text: str) -> Phrase:
    """Return the subject of an entry, by the name of its experiment."""
    return _phrase(text, SUBJECTS.get(experiment, {}))


@cache
def value(experiment: str, text: str, about: str) -> Phrase:
    """Return the value of an entry, or what is declared of it; `about` is its subject's id."""
    if text == "refused":
        return Phrase("refused")
    return _phrase(text, VALUES.get(about) or VALUES.get(experiment, {}))


@cache
def observed(requirement: str, text: str) -> Phrase:
    """Return the value of a finding."""
    return _phrase(text, OBSERVED.get(requirement, {}))


def _phrase(text: str, templates: Mapping[str, str]) -> Phrase:
    if not text:
        return Phrase("")
    return _read(text, templates) or Phrase("text", {"text": text})


def _read(text: str, templates: Mapping[str, str]) -> Phrase | None:
    """The text by the first template that fits it."""
    for template, name in templates.items():
        match = _compiled(template).fullmatch(text)
        if match is None:
            continue
        arguments: dict[str, Argument] = {}
        for field, part in match.groupdict().items():
            argument = _FIELDS[field](part) if field in _FIELDS else part
            if argument is None:
                break
            arguments[field] = argument
        else:
            return Phrase(name, arguments)
    return None


@cache
def _compiled(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    for index in range(1, len(parts), 2):
        parts[index] = f"(?P<{parts[index]}>.+?)"
    for index in range(0, len(parts), 2):
        parts[index] = re.escape(parts[index])
    return re.compile("".join(parts), re.DOTALL)


def _one(templates: Mapping[str, str]) -> Callable[[str], Phrase | None]:
    return lambda text: _read(text, templates)


def _several(
    separator: str, read: Callable[[str], Phrase | None]
) -> Callable[[str], Argument | None]:
    """What stands between the separators, each as `read` reads it, or None if it cannot."""

    def several(text: str) -> Argument | None:
        items = [read(part) for part in text.split(separator)]
        return None if None in items else [item for item in items if item is not None]

    return several


def _or_text(templates: Mapping[str, str]) -> Callable[[str], Phrase]:
    return lambda text: _read(text, templates) or Phrase("text", {"text": text})


def _layout(text: str) -> str | None:
    """ "[batch, 1, key]" as "batch 1 key"."""
    match = re.fullmatch(r"\[([^\[\]]+)\]", text)
    return None if match is None else " ".join(match[1].split(", "))


def _layouts(separator: str) -> Callable[[str], Argument | None]:
    def layouts(text: str) -> Argument | None:
        items = re.findall(r"\[[^\[\]]+\]", text)
        return [str(_layout(item)) for item in items] if separator.join(items) == text else None

    return layouts


def _reading(text: str) -> Phrase | None:
    shape, _, axes = text.partition(" is ")
    read = _read(axes, VALUES["shapes.misread"])
    sizes = _layout(shape)
    return (
        None if read is None or sizes is None else Phrase("reading", {"shape": sizes, "axes": read})
    )


def _meaning(text: str) -> Phrase | None:
    """ "attn_mask[0/-inf]=added"."""
    match = re.fullmatch(r"(\S+?)\[([^\]\s]+)\]=(.+)", text)
    forms = {"bool": "form.bool", "0/1": "form.zero-one", "0/-inf": "form.zero-infinite"}
    if match is None or match[2] not in forms:
        return None
    meaning = _or_text(_MEANINGS)(match[3])
    return Phrase(
        "mask.means", {"argument": match[1], "form": Phrase(forms[match[2]]), "meaning": meaning}
    )


_BESIDE = {
    "gradients {value}": "beside.gradients",
    "NaN in gradients of {arrays}": "beside.nan-in-gradients",
    "NaN in other rows": "beside.nan-in-other-rows",
}


def _beside(text: str) -> Phrase:
    read = _or_text(_BESIDE)
    return Phrase("beside", {"parts": [read(part) for part in text.split("; ")]})


_FIELDS: dict[str, Callable[[str], Argument | None]] = {
    "form": _one(_FORMS),
    "sizes": _one(_SIZES),
    "lengths": _one(_LENGTHS),
    "triangle": _one(_TRIANGLES),
    "written": _one(_WRITTEN),
    "number": _one(_NUMBERS),
    "input": _one(_INPUTS),
    "otherwise": _one(_RETURNED),
    "row": _or_text(_DECLARED_ROWS),
    "value": _one({"finite": "gradients.finite"}),
    "percent": lambda text: int(text) if text.isdecimal() else None,
    "places": _several(", ", _one(_PLACES)),
    "over": _several(" and ", _one(_AXES)),
    "arrays": lambda text: [*text.split(", ")],
    "shapes": _layouts(" "),
    "axes": _layouts(" or "),
    "readings": _several("; ", _reading),
    "meanings": _several(" ", _meaning),
    "beside": _beside,
}
"""How a field of a template is read; others are names."""
