"""All wording of findings, card entries and causes: what each id of a `Phrase` says in English.

This is the only place where their text is made. Nothing takes it apart again, so every sentence
here may be improved without changing a verdict, a gate or the structure of a page.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

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
    "leak.reaches-gradients": "reaches gradients",
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
    "weights.those": "those {which}",
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

_ANSWERS = {
    # The mask
    "mask.not-applied": "with the mask ignored",
    "mask.not-applied-with-causal": "with the mask and the causal flag ignored",
    "mask.not-applied-beside-causal": "with the mask ignored beside the causal flag",
    "mask.inverted": "with the mask inverted",
    "mask.inverted-beside-causal": "with the mask inverted beside the causal flag",
    "mask.added-where-attended": "with the mask added to the logits as 1 where it may attend",
    "mask.added-where-blocked": "with the mask added to the logits as 1 where it may not",
    "mask.after-softmax": "with the mask applied after the softmax",
    "mask.after-softmax-or-maximum": "with the row's maximum taken before the mask, or the mask "
    "applied after the softmax",
    "mask.multiplied-into-logits": "with blocked logits set to 0, as by multiplying the mask with "
    "the logits",
    "mask.blocked-lowered": "with blocked logits lowered by {by:g} only",
    "mask.blocked-set": "with blocked logits set to {number:g}",
    "mask.of-first-batch-entry": "with the first batch entry's mask for all",
    "mask.of-first-head": "with the first head's mask for all",
    "mask.of-first-query": "with the first query's mask for all",
    "mask.padding-over-queries": "with the padding applied to queries instead of keys",
    "mask.transposed": "with the mask transposed",
    "mask.applied-to-queries-too": "with the mask applied to queries as to keys",
    "mask.reversed": "with the mask reversed along the keys",
    "mask.heads-before-batch": "with the mask read as (heads batch) instead of (batch heads)",
    "mask.groups-split-otherwise": "with the mask's heads split into groups the other way",
    "mask.tiled-over-heads": "with the batch's masks tiled over the heads instead of repeated",
    "mask.joined-by-or": "with mask and causal flag joined by or instead of and",
    "mask.padding-one-too-long": "with the padding one key too long: a key less is seen",
    "mask.padding-one-too-short": "with the padding one key too short: a key more is seen",
    "mask.window-without-first-key": "without the first key of each row's window",
    "mask.window-without-last-key": "without the last key of each row's window",
    # The causal flag
    "causal.not-applied": "with the causal flag ignored",
    "causal.aligned": "with the causal mask aligned {alignment}",
    "causal.without-own-key": "with the causal mask off by one (-1): a query does not see its own "
    "key",
    "causal.sees-next-key": "with the causal mask off by one (+1): a query sees the next",
    "causal.offset-negated": "with the causal mask's offset negated",
    "causal.reversed": "with the causal mask reversed: the upper triangle is kept",
    "causal.positions-rounded": "with positions of the causal mask rounded to {to}",
    "causal.window": "with a causal window of {size} keys",
    "causal.by-tile": "with the causal mask applied to whole tiles of {size}: the tile on the "
    "diagonal sees all of itself",
    # The additive bias
    "bias.not-applied": "with the additive bias ignored",
    "bias.subtracted": "with the additive bias subtracted",
    "bias.added-twice": "with the additive bias added twice",
    "bias.scaled": "with the scale applied to the bias too",
    "bias.divided-by-scale": "with the bias divided by the scale",
    "bias.of-first-head": "with the first head's bias for all",
    "bias.of-first-batch-entry": "with the first batch entry's bias for all",
    "bias.of-first-query": "with the first query's bias for all",
    "bias.transposed": "with the bias transposed",
    "bias.cut": "with the bias cut at ±{limit:g}",
    "bias.undoes-mask": "with the bias added to blocked logits after they were blocked, and the "
    "mask ignored",
    # The scale
    "scale.missing": "without the scale",
    "scale.by-head-size": "with scale 1/d instead of 1/sqrt(d)",
    "scale.default": "with scale 1/sqrt(d) instead of the one asked for",
    "scale.on-additive-score": "with the additive score divided by sqrt(d)",
    "scale.by-root-of-width": "with scale 1/sqrt(width)",
    "scale.by-width": "with scale 1/width",
    "scale.by-value-head-size": "with scale 1/sqrt(d) of the value heads",
    "scale.applied-twice": "with the scale applied twice",
    "scale.default-on-top": "with 1/sqrt(d) on top of the scale asked for",
    "scale.inverted": "with 1/scale instead of the scale",
    "scale.root-of-head-size": "with scale sqrt(d)",
    "scale.rounded": "with the scale rounded to {to}",
    # Projections, their biases, and heads
    "projection.bias-forgotten": "with the {of} bias forgotten",
    "projection.bias-added-twice": "with the {of} bias added twice",
    "projection.all-biases-forgotten": "with all biases forgotten",
    "projection.input-biases-forgotten": "with the biases of query, key and value forgotten",
    "projection.query-scaled-before-bias": "with the query scaled before its bias is added",
    "projection.output-bias-per-head": "with the output bias added once for each head",
    "projection.output-bias-before-projection": "with the output bias added before the output "
    "projection",
    "projection.bias-of-first-head": "with the first head's bias for all heads",
    "projection.bias-along-tokens": "with the biases of heads of size 1 added along the tokens",
    "projection.swapped": "with {one} and {other} weights swapped",
    "projection.swapped-without-biases": "with {one} and {other} weights swapped, but not their "
    "biases",
    "projection.replaced": "with the {other} weight in place of the {one} weight",
    "projection.packed-otherwise": "with weights packed as {order}",
    "projection.transposed": "with the {of} weight transposed",
    "projection.all-transposed": "with all square weights transposed",
    "projection.inputs-transposed": "with query, key and value weights transposed",
    "projection.of-other-input": "with the {of} projected from the {source}'s input",
    "projection.missing": "with the {of} not projected",
    "heads.interleaved": "with heads interleaved: (head heads) in place of (heads head)",
    "heads.interleaved-in": "with heads interleaved in the {of} weight",
    "heads.interleaved-in-all": "with heads interleaved in all weights",
    "heads.split-by-reshape": "with heads split by a reshape to [batch heads length head], without "
    "the transposition",
    "heads.merged-by-reshape": "with heads merged by a reshape, without transposing back",
    "heads.split-and-merged-by-reshape": "with heads split and merged by a reshape, without "
    "transpositions",
    "heads.reversed": "with the heads merged in reverse order",
    "heads.last-left-out": "with the last head left out",
    "heads.last-only": "with the last head only",
    "heads.first-left-out": "with the first head left out",
    "heads.first-only": "with the first head only",
    "heads.averaged": "with the mean over heads in place of the sum",
    "heads.queries-of-first": "with the first head's queries for all heads",
    "heads.keys-of-first": "with the first head's keys for all heads",
    "heads.values-of-first": "with the first head's values for all heads",
    "heads.tiled": "with key/value heads tiled instead of repeated",
    "heads.keys-tiled": "with key heads tiled instead of repeated",
    "heads.values-tiled": "with value heads tiled instead of repeated",
    "heads.first-key-value-for-all": "with the first key/value head for all query heads",
    "inputs.of-first-batch-entry": "with the first batch entry's {of} for all",
    "inputs.batch-mean-subtracted": "with the batch's mean subtracted from the projected values",
    "output.query-added": "with the query added to the output",
    "score.last-component-left-out": "with the last component of each head left out of the scores",
    "score.tanh-missing": "without the tanh of the additive score",
    "score.of-difference": "with tanh(q − k) for tanh(q + k)",
    "score.weight-of-first-head": "with the first head's score weight for all",
    "score.dot-product": "with a dot product in place of the additive score",
    # The softmax, its keys and its tiles
    "softmax.uniform": "with uniform weights",
    "softmax.over-queries": "with the softmax over the queries",
    "softmax.over-heads": "with the softmax over the heads",
    "softmax.over-batch": "with the softmax over the batch",
    "softmax.over-matrix": "with the softmax over queries and keys together",
    "softmax.sigmoid": "with a sigmoid in place of the softmax",
    "softmax.missing": "without the softmax",
    "softmax.nothing-attended": "with nothing attended: the weights are 0",
    "softmax.base-2": "with 2^x for e^x in the softmax",
    "softmax.rational": "with 1/(1 + x²) for e^x in the softmax",
    "softmax.power": "with (1 + x/{power})^{power} for e^x in the softmax",
    "softmax.normaliser-plus": "with 1e-{digits} added to the softmax's normaliser",
    "softmax.small-weights-dropped": "with weights below 1e-{digits} dropped",
    "softmax.normaliser-of-keys": "with the normaliser of {keys} only",
    "keys.ignored": "with {keys} ignored",
    "keys.counted-twice": "with {keys} counted twice",
    "keys.last-of-tiles-counted-twice": "with the last key of each tile of {size} counted twice",
    "keys.last-of-tiles-left-out": "with the last key of each tile of {size} left out",
    "logits.capped-softly": "with the logits capped softly at {cap}: {cap}·tanh(x/{cap})",
    "logits.cut": "with the logits cut at ±{cap}",
    "logits.cut-below-maximum": "with logits cut at {cap} below the row's maximum",
    "logits.cut-below-maximum-if-blocked-too": "with logits, blocked ones too, cut at {cap} below "
    "the row's maximum",
    "tiles.sums-not-rescaled": "with sums not rescaled when the running maximum grows (tiles of "
    "{size} keys)",
    "tiles.sums-rescaled-inversely": "with sums rescaled the wrong way when the running maximum "
    "grows (tiles of {size} keys)",
    "tiles.normaliser-not-rescaled": "with the normaliser not rescaled when the running maximum "
    "grows (tiles of {size} keys)",
    "tiles.values-not-rescaled": "with the sum of values not rescaled when the running maximum "
    "grows (tiles of {size} keys)",
    # Precision
    "precision.products-kept-in-float16": "with the products of query and key kept in float16, and "
    "scaled after that",
    "precision.rounded": "with the {stage} rounded to {format}",
    "precision.factors-rounded": "with the factors of each product rounded to {format}",
    "precision.all-rounded": "with inputs, weights and all factors of products read as {format}",
}
"""Whose answer the output is."""

_BREAKS = {
    "softmax.maximum-not-subtracted": "without the row's maximum subtracted",
    "softmax.maximum-before-mask": "with the maximum taken before the mask",
    "softmax.maximum-from-0": "with the maximum starting at 0",
    "softmax.maximum-of-all": "with the maximum of the whole matrix subtracted instead of the "
    "row's",
    "softmax.maximum-of-head": "with the maximum of each head's matrix subtracted instead of the "
    "row's",
    "softmax.maximum-of-batch-entry": "with the maximum of each entry's matrices subtracted "
    "instead of the row's",
    "softmax.maximum-of-first-row": "with the first row's maximum subtracted for all",
    "softmax.maximum-of-first-tile": "with the maximum of the first tile of {size} keys for all",
}
"""How the exponential leaves the range of its numbers in just the rows that are wrong."""

_RETURNED = {
    "returned.averaged": "averaged over heads",
    "returned.averaged-and-repeated": "the average over heads, repeated for each head",
    "returned.of-first-head": "those of the first head, for all",
    "returned.of-last-head": "those of the last head, for all",
    "returned.heads-reversed": "those of the heads in reverse order",
    "returned.of-one-head-per-group": "those of one head for each head of its group",
    "returned.of-first-batch-entry": "those of the first batch entry, for all",
    "returned.before-mask": "those from before the mask",
    "returned.logits": "the logits",
    "returned.logits-before-mask": "the logits from before the mask",
    "returned.scores": "the scores, before scale and mask",
    "returned.exponentials": "the exponentials, not normalised",
    "returned.logarithms": "the logarithms of the weights",
    "returned.normalised-over-queries": "normalised over the queries",
    "returned.softmax-over-queries": "those of a softmax over the queries",
    "returned.transposed": "transposed: [key query]",
    "returned.one-hot": "1 for the key that is attended most, and 0 for the others",
    "returned.rounded": "rounded to {to}",
    "returned.factor": "{factor:.4g} times those of the softmax",
}
"""What the returned weights are."""

_GRADIENT = {
    "gradient.missing": "missing: 0 throughout",
    "gradient.nan": "NaN where it should be a number",
    "gradient.doubled": "doubled",
    "gradient.negated": "negated",
    "gradient.averaged-over-batch": "averaged over the batch instead of summed",
    "gradient.times-batch": "{batch} times too large, as often as there are batch entries",
    "gradient.factor": "{factor:.9g} times what it should be",
    "gradient.transposed": "transposed",
    "gradient.of-other": "that of {array}",
    "gradient.rounded": "rounded to {to}",
}
"""What the gradient of an array is."""

_BACKWARD = {
    "backward.without-scale": "without the scale",
    "backward.without-scale-in": "without the scale in the {of}'s gradient",
    "backward.scaled-twice": "with the scale applied twice",
    "backward.default-scale": "with the default scale instead of the one asked for",
    "backward.scale-inverted": "with 1/scale for the scale",
    "backward.softmax-detached": "of weights that are constants: nothing goes back through the "
    "softmax",
    "backward.softmax-is-identity": "with the softmax's derivative taken as the identity",
    "backward.softmax-is-identity-without-row-term": "with the softmax's derivative taken as the "
    "identity, and no row term",
    "backward.without-row-term": "without the row term of the softmax's derivative",
    "backward.row-term-of-squares": "with the row term Σ P² for Σ P dP",
    "backward.row-term-of-first-query": "with the first query's row term for all",
    "backward.row-term-of-unnormalised-context": "with the row term of a context that was not "
    "divided by the normaliser",
    "backward.weights-without-mask": "with the weights made again without the mask",
    "backward.weights-without-bias": "with the weights made again without the bias",
    "backward.normaliser-without-maximum": "with weights made again from a normaliser that lacks "
    "the maximum",
    "backward.cotangent-ignored": "of the output's sum: what comes from above is ignored",
    "backward.cotangent-of-first-batch-entry": "with the first batch entry's gradient of the "
    "output for all",
    "backward.tanh-slope-wrong": "with 1 − tanh for the slope 1 − tanh²",
    "backward.tanh-slope-missing": "without the slope of tanh",
    "backward.keys-for-queries": "with the keys in place of the queries in the key's gradient",
    "backward.key-without-last-query": "without the last query in the key's gradient",
    "backward.first-keys-only": "of the first {count} keys only: the backward pass ends after one "
    "tile",
    "backward.first-queries-only": "of the first {count} queries only: the backward pass ends "
    "after one tile",
    "backward.bias-scaled": "with the additive bias scaled as the scores are",
    "backward.bias-of-blocked-is-1": "with a gradient of 1 for what was added to blocked logits",
    "backward.bias-not-summed": "with the gradient of the additive bias not summed over the "
    "{over}: only the first is taken",
    "backward.bias-of-first-batch-entry": "with the first batch entry's gradient of the additive "
    "bias for all",
    "backward.bias-of-queries": "with the gradient of the additive bias of {queries} only",
    "backward.bias-averaged": "with the gradient of the additive bias averaged where it is summed",
    "backward.without-share": "without the {of}'s share of the gradient of their common input",
    "backward.without-key-and-value-shares": "without the shares of key and value in the gradient "
    "of their common input",
    "backward.without-query-and-key-shares": "without the shares of query and key in the gradient "
    "of their common input",
    "backward.group-first-head": "with the {inputs} gradient of the first query head of each group "
    "only",
    "backward.group-last-head": "with the {inputs} gradient of the last query head of each group "
    "only",
    "backward.group-averaged": "with the {inputs} gradient averaged over each group instead of "
    "summed",
    "backward.group-tiled": "with the {inputs} gradient summed over heads as if they had been "
    "tiled",
}
"""Which backward pass gives all the gradients."""

_ARGUMENT = {
    "argument.not-applied": "is ignored",
    "argument.inverted": "is taken the other way round: True {true}",
    "argument.added": "is added, and blocks nothing",
    "argument.as-boolean": "is taken for a boolean: what is not 0 {nonzero}",
}
"""What becomes of a mask argument."""

_AXES = {
    "batch": ("batch entry", "batch entries"),
    "head": ("head", "heads"),
    "query": ("query", "queries"),
    "key": ("key", "keys"),
    "component": ("component", "components"),
    "in": ("input component", "input components"),
    "out": ("output component", "output components"),
}


def _gradients(arrays: Argument, one: str, several: str) -> str:
    """What is said of the gradients of some arrays; of all, if none is named."""
    if not isinstance(arrays, list) or len(arrays) == 1:
        return f"the gradient of {_series(arrays)} {one}"
    return f"the gradients of {_series(arrays)} {several}" if arrays else f"the gradients {several}"


def _of_gradients(predicate: str) -> Wording:
    def wording(arrays: Argument, **about: Argument) -> str:
        own = predicate.format(**{name: _field(value) for name, value in about.items()})
        return _gradients(arrays, f"is {own}", f"are {own}")

    return wording


def _of_series(template: str) -> Wording:
    """A wording whose only argument is a list, written with "and"."""

    def wording(**arguments: Argument) -> str:
        return template.format(**{name: _series(value) for name, value in arguments.items()})

    return wording


CAUSES: dict[str, Wording] = {
    **{name: f"equals the answer {text}" for name, text in _ANSWERS.items()},
    **{
        name: f"is wrong in just the rows in which exp leaves its range {text}"
        for name, text in _BREAKS.items()
    },
    **{name: f"the returned weights are {text}" for name, text in _RETURNED.items()},
    **{name: f"the gradients are those {text}" for name, text in _BACKWARD.items()},
    **{
        name: _of_series(f"the gradients are those {text}")
        for name, text in _BACKWARD.items()
        if "{inputs}" in text or "{over}" in text
    },
    **{name: _of_gradients(text) for name, text in _GRADIENT.items()},
    **{name: f"{{argument}} {{form}} {text}" for name, text in _ARGUMENT.items()},
    "output.factor": "the output is {factor:.4g} times what it should be",
    "output.factor-without-bias": "the output without its bias is {factor:.4g} times what it "
    "should be",
    "scale.factor": "the scale is {factor:.4g} times what it should be",
    "bias.factor": "the additive bias is {factor:.4g} times what it should be",
    "accuracy.float32": "is only as accurate as float32",
    "accuracy.float16": "is only as accurate as float16 or TF32, or as a few roundings to bfloat16 "
    "leave it",
    "accuracy.bfloat16": "is only as accurate as bfloat16",
    "returned.none": "no weights are returned",
    "returned.added": "the returned weights have {amount:.3g} added",
    "returned.small-dropped": "returned weights below {below:.0e} are 0",
    "gradient.without-scale": lambda arrays: _gradients(
        arrays, "lacks the scale", "lack the scale"
    ),
    "gradient.scaled-twice": lambda arrays: _gradients(
        arrays, "has the scale applied twice", "have the scale applied twice"
    ),
    "gradient.heads-interleaved": lambda arrays: _gradients(
        arrays, "has its heads interleaved", "have their heads interleaved"
    ),
    "gradient.several": lambda causes: _text(causes, "; "),
    "gradient.cut": "the gradients are cut at ±{limit:.4g}",
    "gradient.accuracy": "the gradient {accuracy}",
    "argument.several": lambda causes: _text(causes, "; "),
    "causal.alignment": "the causal flag is aligned {alignment}",
    "masked-row.nan": "a softmax over nothing: exp(-inf - -inf), or a division by a sum of 0",
    "masked-row.finite-number": "blocked logits get a large finite number instead of -inf, and "
    "where all are blocked they are equal",
    "masked-row.zeros": "the row's output is set to 0, the output bias included",
    "masked-row.unmasked": "a row that is masked altogether is answered without the mask",
    "dropout.is-on": "dropout is on where it is declared to be off",
    "dropout.is-off": "dropout is off where it is declared to be on",
    "dropout.not-rescaled": "dropout does not divide what it keeps by 1 − p",
    "dropout.of-logits": "dropout acts before the softmax: it drops logits, and no weight becomes "
    "0",
    "dropout.factor": "dropout multiplies what it keeps by {factor:.3g} instead of 1/(1 − p) = 2",
    "dropout.renormalised": "each row is divided by its sum again after dropout",
    "declaration.differs": lambda subjects, more=0: (
        f"the declaration and what was seen differ: {_text(subjects)}"
        + (f"; and {more} more" if more else "")
    ),
}
"""Of a finding that deviates: the known mistake that explains it."""

PLACES: dict[str, Wording] = {
    **{f"where.{axis}.one": f"{one} {{at}}" for axis, (one, _) in _AXES.items()},
    **{f"where.{axis}.last": f"{one} {{at}} (the last)" for axis, (one, _) in _AXES.items()},
    **{f"where.{axis}.from": f"{many} {{first}} and later" for axis, (_, many) in _AXES.items()},
    **{f"where.{axis}.range": f"{many} {{first}} to {{last}}" for axis, (_, many) in _AXES.items()},
    **{
        f"where.{axis}.several": lambda indices, many=many: f"{many} {_series(indices)}"
        for axis, (_, many) in _AXES.items()
    },
    "where": "{parts}",
    "where.head.some": "heads in part",
    "where.rows-with-blocked-keys": "all rows in which a key is blocked, and no other",
    "where.rows-without-blocked-keys": "all rows in which no key is blocked, and no other",
}
"""Where an array is wrong."""

_NAMES: dict[str, Wording] = {
    **{f"array.{name}": f"the {name}" for name in ("query", "key", "value")},
    **{
        f"array.weights.{name}": f"the {name} weight"
        for name in ("query", "key", "value", "output", "score")
    },
    **{
        f"array.weights.{name}_bias": f"the {name} bias"
        for name in ("query", "key", "value", "output")
    },
    "array.attn_bias": "the additive bias",
    "stage.projections": "projections",
    "stage.logits": "logits",
    "stage.weights": "attention weights",
    "stage.context": "context",
    "stage.output": "output",
    "stage.bias": "additive bias",
    "significand.24": "float32",
    "significand.11": "float16 or TF32",
    "significand.8": "bfloat16",
    "significand.4": "8 bits",
    "handed.as-boolean": "as booleans",
    "handed.as-ones": "as numbers 0 and 1",
    "handed.as-infinite": "as numbers 0 and -inf",
}
"""What causes are about."""

WORDS: dict[str, Wording] = {**ENTRIES, **CAUSES, **PLACES, **_NAMES}
"""Id to its wording. A template gets numbers as they are, and every other argument as text; a
function gets each argument as it is."""

AROUND = {
    "others": "{text}, or with another number than that",
    "part": "{text}, in {part} only",
    "given": "with {given}: {text}",
    "mode": "in mode {mode}: {text}",
}
"""Arguments that every cause may have: in how many other ways the same answer can come about, in
which part of the answer, with which masks and in which mode; and what they add to the text."""


class Worded(msgspec.Struct, frozen=True, omit_defaults=True):
    """A phrase with its text, for what commands print: programs compare the former."""

    id: str
    text: str
    arguments: dict[str, Argument] = {}


def worded(phrase: Phrase) -> Worded | None:
    """Return the phrase with its text; None for what says nothing."""
    return Worded(phrase.id, say(phrase), phrase.arguments) if phrase else None


def say(phrase: Phrase) -> str:
    """Return the English text of a phrase; an id of a newer suite stands for itself."""
    if not phrase:
        return ""
    wording = WORDS.get(phrase.id)
    own = {name: value for name, value in phrase.arguments.items() if name not in AROUND}
    try:
        if callable(wording):
            text = wording(**own)
        elif wording is not None:
            text = wording.format(**{name: _field(value) for name, value in own.items()})
        else:
            text = str(Phrase(phrase.id, own))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        # Arguments of another suite: the id with what there is says more than an error.
        text = str(Phrase(phrase.id, own))
    for name, template in AROUND.items():
        if name in phrase.arguments:
            text = template.format(text=text, **{name: _text(phrase.arguments[name])})
    return text


def _field(value: Argument) -> str | int | float:
    return value if isinstance(value, int | float) else _text(value)


def _text(value: Argument, separator: str = ", ") -> str:
    if isinstance(value, Phrase):
        return say(value)
    if isinstance(value, list):
        return separator.join(map(_text, value))
    return str(value)


def _series(values: Argument) -> str:
    """Such as "1, 3 and 5"."""
    texts = [_text(value) for value in values] if isinstance(values, list) else [_text(values)]
    return " and ".join([", ".join(texts[:-1]), *texts[-1:]] if len(texts) > 1 else texts)
