"""All wording of findings, card entries and causes: what each id of a `Phrase` says in English.

This is the only place where their text is made. Nothing takes it apart again, so every sentence
here may be improved without changing a verdict, a gate or the structure of a page.
"""

from __future__ import annotations

from collections.abc import Callable

from conformance.records.phrase import Argument, Phrase

Wording = str | Callable[..., str]
"""A template in the syntax of `str.format`, or a function of the arguments, by name."""


def _list(separator: str, before: str = "") -> Callable[..., str]:
    """A wording that lists the only argument."""

    def wording(**arguments: Argument) -> str:
        (items,) = arguments.values()
        return before + _text(items, separator)

    return wording


def _shape(layout: str) -> str:
    """ "batch 1 key" as "[batch, 1, key]"."""
    return f"[{', '.join(layout.split())}]"


def _shapes(separator: str, before: str = "") -> Callable[..., str]:
    """A wording that lists the only argument, which are shapes."""

    def wording(**arguments: list[str]) -> str:
        (shapes,) = arguments.values()
        return before + separator.join(map(_shape, shapes))

    return wording


def _means(argument: str, form: Phrase, meaning: Phrase) -> str:
    """The form without its dtype, in brackets."""
    forms = {"form.bool": "bool", "form.zero-one": "0/1", "form.zero-infinite": "0/-inf"}
    return f"{argument}[{forms.get(form.id) or say(form)}]={say(meaning)}"


def _fully_masked(row: Phrase, beside: Phrase | None = None) -> str:
    """As adapters declare a row, and what comes with it."""
    words = {
        "row.nan": "nan",
        "row.output-bias": "output bias",
        "row.mean-of-values": "mean of values",
    }
    texts = [words.get(row.id) or say(row), *([say(beside)] if beside else [])]
    return "; ".join(texts)


ENTRIES: dict[str, Wording] = {
    "text": "{text}",
    "none": "none",
    "refused": "refused",
    "refused.because": "refused: {reason}",
    "something-else": "something else",
    # Forms in which an array is handed to a mask argument.
    "form.bool": "bool",
    "form.zero-one": "{dtype} 0/1",
    "form.zero-quarter-one": "{dtype} 0/¼/1",
    "form.zero-one-two": "{dtype} 0/1/2",
    "form.zero-infinite": "{dtype} 0/−inf",
    "form.zero-large": "{dtype} 0/−{large}",
    # What a mask argument means.
    "mask.meaning": "{argument}, {form}",
    "mask.meaning-for-inputs": "{argument}, {form} (inputs {dtype})",
    "mask.meanings": _list(" "),
    "mask.means": _means,
    "mask.attends": "attends",
    "mask.attends-above-half": "attends above ½",
    "mask.attends-where-one": "attends where 1",
    "mask.blocks": "blocks",
    "mask.blocks-where-one": "blocks where 1",
    "mask.blocks-everything": "blocks everything",
    "mask.added": "added",
    "mask.multiplied": "multiplied",
    "mask.multiplied-into-weights": "multiplied into the weights",
    "mask.ignored": "ignored",
    "mask.rejected": "rejected",
    "mask.unexplained": "unexplained",
    # One causal mask, handed over as it is.
    "same-mask": "{argument}, {written}",
    "written.one-attends": "1 = may attend",
    "written.one-blocks": "1 = blocked",
    "written.added": "0 and −inf, added",
    "same-mask.as-meant": "as meant",
    "same-mask.attends-future": "{percent}% on blocked keys",
    "same-mask.attends-future-with-nan": "{percent}% on blocked keys, NaN",
    # A fully masked query.
    "fully-masked.output": "{argument}, {form}: output",
    "fully-masked.weights": "{argument}, {form}: returned weights",
    "fully-masked.gradients": "{argument}, {form}: gradients",
    "fully-masked.query": _fully_masked,
    "row.nan": "NaN",
    "row.zeros": "zeros",
    "row.output-bias": "output bias only",
    "row.mean-of-values": "mean of the values",
    "row.uniform": "uniform",
    "row.unmasked": "as if unmasked",
    "beside": _list("; "),
    "beside.gradients": "gradients {value}",
    "beside.nan-in-gradients": "NaN in gradients of {arrays}",
    "beside.nan-in-other-rows": "NaN in other rows",
    "gradients.finite": "finite",
    "gradients.nan": "NaN: {places}",
    "place.masked-queries": "the masked queries",
    "place.other-queries": "other queries",
    "place.keys": "keys",
    "place.values": "values",
    "place.parameters": "parameters",
    # The causal flag, and two masks at once.
    "causal.no-flag": "causal flag",
    "causal.alone": "{flag} alone, {lengths}",
    "causal.beside": "{flag} with {argument}, {lengths}",
    "causal.beside-two": "{flag} with {needed} and {argument}, {lengths}",
    "causal.with-triangle": "{flag} with {argument} {triangle}, {lengths}",
    "lengths.equal": "equal lengths",
    "lengths.fewer-queries": "fewer queries than keys",
    "lengths.more-queries": "more queries",
    "causal.square": "causal",
    "causal.top-left": "top-left",
    "causal.bottom-right": "bottom-right",
    "causal.ignored": "ignored",
    "causal.unexplained": "unexplained",
    "pair": "{one} with {other}, {sizes}",
    "sizes.differ": "sizes differ",
    "sizes.coincide": "sizes coincide",
    "combined.both": "both",
    "combined.only": "{argument} only",
    "combined.either": "either",
    "combined.neither": "neither",
    "combined.unexplained": "unexplained",
    # Shapes.
    "shapes.taken": "{argument}: shapes it takes",
    "shapes.refused": "{argument}: shapes it refuses",
    "shapes.misread": lambda argument, shapes: f"{argument}: takes {' '.join(map(_shape, shapes))}",
    "shapes.coinciding": "{argument}, {sizes}",
    "sizes.batch-is-heads": "batch = heads, query = key",
    "sizes.batch-is-query": "batch = query, heads = key",
    "sizes.batch-is-key": "batch = key, heads = query",
    "shapes": _shapes(" "),
    "shapes.at-least": _shapes(" ", "at least "),
    "shapes.none": "none",
    "axes": _shapes(" or "),
    "axes.unexplained": "taken, but no reading of its axes explains it",
    "readings": _list("; "),
    "readings.none": "takes none",
    "reading": lambda shape, axes: f"{_shape(shape)} is {say(axes)}",
    # NaN and infinities behind a mask.
    "leak": "{number} in a blocked {input} ({argument}, {form})",
    "number.nan": "NaN",
    "number.inf": "inf",
    "number.minus-inf": "−inf",
    "input.key": "key",
    "input.value": "value",
    "input.token": "token",
    "input.memory": "token (key and value)",
    "leak.hidden": "hidden",
    "leak.reaches": "reaches {places}",
    "place.output": "the output",
    "place.weights": "the returned weights",
    "place.gradients": "gradients of {of}",
    # Returned weights.
    "weights.returned": "returned weights",
    "weights.sum": "their sum over the keys",
    "weights.applied": "beside those applied",
    "weights.per-head": "per head",
    "weights.averaged": "averaged",
    "weights.none": "none",
    "weights.logits": "logits",
    "weights.unless": "{otherwise} unless {option}",
    "weights.sum-one": "1",
    "weights.sum-not-one": "not 1",
    "weights.same": "the same",
    "weights.others": "others",
    # Dropout.
    "dropout.active": "dropout",
    "dropout.on": "on",
    "dropout.off": "off",
    "dropout.kept": "kept weights",
    "dropout.scaled": "scaled by 1/(1−p)",
    "dropout.not-scaled": "not scaled",
    "dropout.drops-no-weight": "something else",
    "dropout.scaled-by": "something else",
    "dropout.scaled-unevenly": "something else",
    "dropout.mean": "mean over draws",
    "dropout.unbiased": "the weights",
    "dropout.biased": "not the weights",
    "dropout.draw": "a draw is",
    "dropout.each-weight": "one for each weight",
    "dropout.shared": _list(" and ", "the same for all "),
    "axis.batch": "batch entries",
    "axis.heads": "heads",
    "axis.query": "queries",
    "axis.key": "keys",
    "dropout.returned": "returned weights are those",
    "dropout.after": "after dropout",
    "dropout.before": "before dropout",
    # Axes of size 0 and 1.
    "size.no-batch": "batch of 0",
    "size.no-length": "length 0",
    "size.no-query": "no query",
    "size.no-key": "no key",
    "size.one-key": "one key",
    "output.empty": "an empty output",
    "output.value": "the value",
    # Layouts of the input.
    "input.unbatched": "input without a batch axis",
    "input.sequence-first": "sequence-first input",
    "input.taken": "taken",
    "input.no-switch": "no switch",
    # The same again.
    "again.twice": "asked twice",
    "again.alone": "alone and inside a batch",
    "again.strided": "contiguous and strided",
    "again.window": "whole and cut out",
    "again.compiled": "eager and compiled",
    "again.same-bits": "same bits",
    "again.within-noise": "within noise",
    "again.apart": "apart",
    "again.not-examined": "not examined",
}
"""Subjects and values of convention cards, and observed characteristics."""

WORDS: dict[str, Wording] = {**ENTRIES}
"""Id to its wording. A template gets each argument as text, a function as it is."""


def say(phrase: Phrase) -> str:
    """Return the English text of a phrase; an id of a newer suite stands for itself."""
    if not phrase:
        return ""
    wording = WORDS.get(phrase.id)
    try:
        if callable(wording):
            return wording(**phrase.arguments)
        if wording is not None:
            return wording.format(**{name: _text(it) for name, it in phrase.arguments.items()})
    except (KeyError, TypeError, AttributeError):
        # Arguments of another suite: the id with what there is says more than an error.
        pass
    return str(phrase)


def _text(value: Argument | Phrase | str, separator: str = ", ") -> str:
    if isinstance(value, Phrase):
        return say(value)
    if isinstance(value, list):
        return separator.join(map(_text, value))
    return str(value)
