"""Which cause the message should name for each mutant, and whether it does.

The words are looked for in the cause of a finding of a requirement that kills the mutant. Where a
mutant has none here, no cause is to be named: the requirement that notices it says what is wrong
(the dtype, a changed input, a seeded generator), and whoever names one then is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from conformance.requirements.examination import Workbench
from conformance.running.session import Session
from mutants.mutant import Mutant
from mutants.run import Examiner, Row, deviations, examined

KINDS = ("named", "named wrongly", "not named", "none to name")
"""In this order in tables."""


@dataclass(frozen=True)
class Named:
    """What was said of a mutant: the words that were expected, and the cause, both may be ""."""

    mutant: Mutant
    expected: str
    cause: str

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.cause:
            right = self.expected and self.expected in self.cause
            return "named" if right else "named wrongly"
        return "not named" if self.expected else "none to name"


def name(examiner: Examiner, mutant: Mutant) -> Named:
    """The cause that a user would read where an expected requirement notices it first."""
    adapter = mutant.adapter()
    # A search that explains nothing is quicker; the row is then examined again, by a fresh one.
    quick = Session(Workbench(expectations=examiner.expectations), explains=False)
    expected = CAUSES.get(mutant.name, "")
    for row in examiner.likeliest_first(mutant, adapter):
        if set(deviations(quick, row)) & set(mutant.killed_by):
            return Named(mutant, expected, _cause(examiner, mutant, row))
    return Named(mutant, expected, "")


def _cause(examiner: Examiner, mutant: Mutant, row: Row) -> str:
    session = Session(Workbench(expectations=examiner.expectations))
    result = examined(session, replace(row, adapter=mutant.adapter()))
    told = [f for f in result.findings if f.verdict == "deviates" and f.cause]
    told.sort(key=lambda finding: finding.requirement not in mutant.killed_by)
    return told[0].cause if told else ""


def count(named: Iterable[Named]) -> dict[str, Counter[str]]:
    """By chapter, how many of each kind."""
    found: dict[str, Counter[str]] = {}
    for one in named:
        found.setdefault(one.mutant.chapter, Counter())[one.kind] += 1
    return found


CAUSES = {
    # forward
    "scale-by-head-size": "with scale 1/d instead of 1/sqrt(d)",
    "scale-by-width": "with scale 1/width",
    "scale-by-root-of-width": "with scale 1/sqrt(width)",
    "scale-by-value-head-size": "with scale 1/sqrt(d) of the value heads",
    "scale-missing": "without the scale",
    "scale-twice": "with scale 1/d instead of 1/sqrt(d)",
    "scale-one-percent-off": "the scale is 1.01 times what it should be",
    "custom-scale-ignored": "with scale 1/sqrt(d) instead of the one asked for",
    "custom-scale-on-top": "with 1/sqrt(d) on top of the scale asked for",
    "custom-scale-inverted": "with 1/scale instead of the scale",
    "scale-on-additive-score": "with the additive score divided by sqrt(d)",
    "scale-on-bias": "with the scale applied to the bias too",
    "scale-on-number-mask": "with the scale applied to the bias too",
    "scale-before-query-bias": "with the query scaled before its bias is added",
    "softmax-over-queries": "with the softmax over the queries",
    "softmax-over-heads": "with the softmax over the heads",
    "softmax-over-batch": "with the softmax over the batch",
    "softmax-over-matrix": "with the softmax over queries and keys together",
    "sigmoid": "with a sigmoid in place of the softmax",
    "heads-interleaved": "with heads interleaved: (head heads) in place of (heads",
    "heads-split-by-view": "with heads split by a reshape to [batch heads length head],",
    "key-heads-interleaved": "with heads interleaved in the key weight",
    "heads-not-transposed-back": "with heads merged by a reshape, without transposing back",
    "heads-reversed": "with the heads merged in reverse order",
    "last-head-dropped": "with the last head left out",
    "first-head-for-all": "with the first head's keys for all heads",
    "grouped-tiled": "with key/value heads tiled instead of repeated",
    "grouped-values-tiled": "with value heads tiled instead of repeated",
    "grouped-first-head": "with the first key/value head for all query heads",
    "query-and-key-swapped": "with query and key weights swapped",
    "key-and-value-swapped": "with key and value weights swapped",
    "value-reads-key-input": "with the value projected from the key's input",
    "query-weight-transposed": "with the query weight transposed",
    "output-weight-transposed": "with the output weight transposed",
    "value-not-projected": "with the value not projected",
    "query-bias-forgotten": "with the query bias forgotten",
    "query-bias-twice": "with the query bias added twice",
    "key-bias-forgotten": "with the key bias forgotten",
    "key-bias-twice": "with the key bias added twice",
    "value-bias-forgotten": "with the value bias forgotten",
    "value-bias-twice": "with the value bias added twice",
    "output-bias-forgotten": "with the output bias forgotten",
    "output-bias-twice": "with the output bias added twice",
    "output-bias-per-head": "with the output bias added twice",
    "output-bias-before-projection": "with the output bias added before the output projection",
    "bias-of-first-head": "with the first head's bias for all heads",
    "residual-added": "with the query added to the output",
    "tanh-missing": "without the tanh of the additive score",
    "score-of-difference": "with tanh(q − k) for tanh(q + k)",
    "score-weight-of-first-head": "with the first head's score weight for all",
    "odd-head-size": "with the last component of each head left out of the scores",
    "odd-number-of-keys": "with key 6 (the last) ignored",
    "keys-beyond-queries": "with keys 4 and later ignored",
    "keys-beyond-128": "with keys 128 and later ignored",
    "keys-of-first-entry": "with the first batch entry's key for all",
    "one-query-path": "without the scale",
    "bias-over-tokens-for-heads-of-1": "along the tokens",
    # masks
    "padding-ignored": "with the mask ignored",
    "padding-of-numbers-ignored": "with the mask ignored",
    "mask-ignored": "with the mask ignored",
    "number-mask-ignored": "with the mask ignored",
    "bias-ignored": "with the additive bias ignored",
    "heads-mask-ignored": "with the mask ignored, in head 1 (the last) only",
    "mask-ignored-with-bias": "with the mask ignored",
    "padding-ignored-with-mask": "with the mask ignored beside the causal flag",
    "mask-ignored-when-long": "with the mask ignored",
    "padding-inverted": "with the mask inverted",
    "padding-of-numbers-inverted": "with the mask inverted",
    "mask-inverted": "with the mask inverted",
    "number-mask-negated": "with the additive bias subtracted",
    "bias-negated": "with the additive bias subtracted",
    "mask-transposed": "with the mask transposed",
    "bias-transposed": "with the bias transposed",
    "padding-reversed": "with the mask reversed along the keys",
    "mask-multiplies-logits": "with blocked logits set to 0, as by multiplying the mask",
    "mask-added-as-numbers": "with the mask added to the logits as 1 where it may attend",
    "mask-after-softmax": "with the mask applied after the softmax",
    "blocked-minus-5": "with blocked logits lowered by 5 only",
    "blocked-minus-50": "with blocked logits lowered by 50 only",
    "blocked-minus-100": "with blocked logits lowered by 100 only",
    "blocked-becomes-0": "with blocked logits set to 0, as by multiplying the mask",
    "blocked-minus-10000": "blocked logits get a large finite number instead of -inf,",
    "blocked-smallest-float32": "blocked logits get a large finite number instead of -inf,",
    "fully-masked-row-is-nan": "a softmax over nothing: exp(-inf - -inf), or a division by",
    "number-mask-cut": "with blocked logits lowered by 5 only",
    "number-mask-as-boolean": "with the mask inverted",
    "padding-of-numbers-added": "with the mask added to the logits as 1 where it may attend",
    "bias-twice": "with the additive bias added twice",
    "bias-cut": "with the bias cut at ±2",
    "padding-of-first-entry": "with the first batch entry's mask for all",
    "mask-of-first-entry": "with the first batch entry's mask for all",
    "mask-of-first-head": "with the first head's mask for all",
    "mask-of-first-query": "with the first query's mask for all",
    "mask-heads-first": "with the mask read as (heads batch) instead of (batch heads)",
    "mask-tiled-over-heads": "with the batch's masks tiled over the heads instead of",
    "attention-bias-of-first-head": "with the first head's bias for all",
    "bias-of-first-entry": "with the first batch entry's bias for all",
    "padding-over-queries": "with the padding applied to queries instead of keys",
    "padding-on-queries-too": "with the mask applied to queries as to keys",
    "broadcast-mask-for-first-head": "with the mask ignored, in head 1 (the last) only",
    "broadcast-mask-for-first-entry": "with the causal flag ignored, in batch entries 1 and",
    "padding-one-short": "with the padding one key too long: a key less is seen",
    "padding-one-long": "with the padding one key too short: a key more is seen",
    "window-without-first-key": "without the first key of each row's window",
    "window-without-last-key": "without the last key of each row's window",
    "masks-joined-by-or": "with mask and causal flag joined by or instead of and",
    "padding-dropped-if-first-entry-has-none": "with the mask ignored",
    "stops-at-blocked-tile": "with nothing attended: the weights are 0",
    "mask-split-otherwise-for-one-query": "with the mask's heads split into groups the other way",
    # causal
    "causal-ignored": "with the causal flag ignored",
    "causal-sees-the-next": "with the causal mask off by one (+1): a query sees the next",
    "causal-strict": "with the causal mask off by one (-1): a query does not see",
    "causal-reversed": "with the causal mask reversed: the upper triangle is kept",
    "causal-top-left": "with the causal mask aligned top-left",
    "causal-bottom-right-one-off": "with the causal mask off by one (-1): a query does not see",
    "causal-offset-negated": "with the causal mask's offset negated",
    "causal-ignored-with-padding": "with the causal flag ignored",
    "causal-ignored-with-mask": "with the causal flag ignored",
    "causal-ignored-with-bias": "with the causal flag ignored",
    "causal-instead-of-padding": "with the mask ignored beside the causal flag",
    "causal-ignored-where-lengths-differ": "with the causal flag ignored",
    "causal-ignored-when-long": "with the causal flag ignored",
    "causal-on-first-head": "with the causal flag ignored, in heads 1 and later only",
    "causal-on-first-entry": "with the causal flag ignored, in batch entry 1 (the last),",
    "causal-window": "with a causal window of 4 keys",
    "causal-by-tile": "with the causal mask applied to whole tiles of 2: the tile",
    "positions-in-bfloat16": "with positions of the causal mask rounded to bfloat16",
    # precision
    "no-maximum": "exp leaves its range without the row's maximum subtracted",
    "maximum-of-all-rows": "exp leaves its range with the maximum of the whole matrix",
    "maximum-of-first-row": "exp leaves its range with the first row's maximum",
    "maximum-of-blocked-keys-too": "with the row's maximum taken before the mask, or the mask",
    "logits-cut": "with logits cut at 20 below the row's maximum",
    "logits-soft-capped": "with the logits capped softly at 30: 30·tanh(x/30)",
    "normaliser-plus-1e-6": "with 1e-6 added to the softmax's normaliser",
    "normaliser-plus-1e-9": "with 1e-9 added to the softmax's normaliser",
    "weights-cut": "with weights below 1e-4 dropped",
    "exp-by-cubic": "for e^x in the softmax",
    "exp-by-power": "for e^x in the softmax",
    "exp-of-2": "with 2^x for e^x in the softmax",
    "squares-for-exp": "with 1/(1 + x²) for e^x in the softmax",
    "softmax-in-bfloat16": "with the attention weights rounded to bfloat16",
    "products-in-float16": "with the products of query and key kept in float16, and",
    "softmax-in-float16": "with the attention weights rounded to float16 or TF32",
    "weights-in-fp8": "with the attention weights rounded to 8 bits",
    "logits-in-bfloat16": "with the logits rounded to bfloat16",
    "logits-of-float16-in-bfloat16": "rounded to bfloat16",
    "projections-in-bfloat16": "with the projections rounded to bfloat16",
    "output-in-float16": "with the output rounded to float16 or TF32",
    "context-in-bfloat16": "with the context rounded to bfloat16",
    "bias-in-bfloat16": "with the additive bias rounded to bfloat16",
    "products-in-tf32": "with the factors of each product rounded to float16 or TF32",
    "products-in-bfloat16": "with the factors of each product rounded to bfloat16",
    "float64-through-float32": "is only as accurate as float32",
    "bfloat16-without-biases": "with the biases of query, key and value forgotten",
    "float16-scale-missing": "without the scale",
    "last-tile-dropped": "with keys 128 and later ignored",
    "last-tile-read-twice": "with keys 128 and later counted twice",
    "tiles-overlap": "with the last key of each tile of 64 counted twice",
    "tiles-leave-gaps": "with the last key of each tile of 64 left out",
    "sums-not-rescaled": "with sums not rescaled when the running maximum grows",
    "sums-rescaled-the-wrong-way": "with sums rescaled the wrong way when the running maximum",
    "stale-maximum": "exp leaves its range without the row's maximum subtracted,",
    "maximum-starts-at-0": "exp leaves its range without the row's maximum subtracted,",
    "normaliser-of-last-tile": "with the normaliser of keys 128 and later only",
    "single-key-tile-dropped": "with key 128 (the last) ignored",
    # backward
    "gradient-of-query-missing": "the gradient of the query is missing: 0 throughout",
    "gradient-of-query-doubled": "the gradient of the query is doubled",
    "gradient-of-key-missing": "the gradient of the key is missing: 0 throughout",
    "gradient-of-key-doubled": "the gradient of the key is doubled",
    "gradient-of-value-missing": "the gradient of the value is missing: 0 throughout",
    "gradient-of-value-doubled": "the gradient of the value is doubled",
    "gradient-of-query-weight-missing": "the gradient of the query weight is missing: 0",
    "gradient-of-query-weight-doubled": "the gradient of the query weight is doubled",
    "gradient-of-query-weight-transposed": "the gradient of the query weight is transposed",
    "gradient-of-key-weight-missing": "the gradient of the key weight is missing: 0 throughout",
    "gradient-of-key-weight-doubled": "the gradient of the key weight is doubled",
    "gradient-of-key-weight-transposed": "the gradient of the key weight is transposed",
    "gradient-of-value-weight-missing": "the gradient of the value weight is missing: 0",
    "gradient-of-value-weight-doubled": "the gradient of the value weight is doubled",
    "gradient-of-value-weight-transposed": "the gradient of the value weight is transposed",
    "gradient-of-output-weight-missing": "the gradient of the output weight is missing: 0",
    "gradient-of-output-weight-doubled": "the gradient of the output weight is doubled",
    "gradient-of-output-weight-transposed": "the gradient of the output weight is transposed",
    "gradient-of-query-bias-missing": "the gradient of the query bias is missing: 0 throughout",
    "gradient-of-query-bias-doubled": "the gradient of the query bias is doubled",
    "gradient-of-query-bias-averaged": "the gradient of the query bias is averaged over the",
    "gradient-of-key-bias-missing": "the gradient of the key bias is missing: 0 throughout",
    "gradient-of-key-bias-doubled": "the gradient of the key bias is doubled",
    "gradient-of-key-bias-averaged": "the gradient of the key bias is averaged over the batch",
    "gradient-of-value-bias-missing": "the gradient of the value bias is missing: 0 throughout",
    "gradient-of-value-bias-doubled": "the gradient of the value bias is doubled",
    "gradient-of-value-bias-averaged": "the gradient of the value bias is averaged over the",
    "gradient-of-output-bias-missing": "the gradient of the output bias is missing: 0 throughout",
    "gradient-of-output-bias-doubled": "the gradient of the output bias is doubled",
    "gradient-of-output-bias-averaged": "the gradient of the output bias is averaged over the",
    "gradient-of-score-weight-missing": "the gradient of the score weight is missing: 0",
    "gradient-of-score-weight-doubled": "the gradient of the score weight is doubled",
    "gradient-of-score-weight-averaged": "the gradient of the score weight is averaged over the",
    "gradient-of-attention-bias-missing": "the gradient of the additive bias is missing: 0",
    "gradient-of-attention-bias-doubled": "the gradient of the additive bias is doubled",
    "gradient-without-scale": "without the scale",
    "gradient-scaled-twice": "with the scale applied twice",
    "gradient-with-default-scale": "with the default scale instead of the one asked for",
    "softmax-detached": "of weights that are constants: nothing goes back through",
    "softmax-without-row-term": "without the row term of the softmax's derivative",
    "row-term-of-first-query": "with the first query's row term for all",
    "row-term-of-weights-squared": "Σ P²",
    "softmax-straight-through": "with the softmax's derivative taken as the identity",
    "gradient-leaks-through-mask": "with the weights made again without the mask",
    "gradient-without-bias": "with the weights made again without the bias",
    "gradient-of-blocked-bias": "with a gradient of 1 for what was added to blocked logits",
    "gradient-of-bias-not-summed": "with the first batch entry's gradient of the additive bias",
    "gradient-of-bias-scaled": "the gradient of the additive bias is 0.4472 times what it",
    "gradient-of-infinite-bias-is-nan": "with bias=float[batch heads query key]: the gradient of",
    "grouped-gradient-of-first-head": "with the key gradient of the first query head of each",
    "grouped-gradient-averaged": "with the key gradient averaged over each group instead of",
    "grouped-gradient-tiled": "with the key gradient summed over heads as if they had been",
    "grouped-value-gradient-of-last-head": "with the value gradient of the last query head of",
    "memory-gradient-without-values": "without the value's share of the gradient of their common",
    "self-gradient-without-keys": "without the key's share of the gradient of their common",
    "key-gradient-from-keys": "with the keys in place of the queries in the key's gradient",
    "tanh-slope": "with 1 − tanh for the slope 1 − tanh²",
    "cotangent-ignored": "of the output's sum: what comes from above is ignored",
    "cotangent-of-first-entry": "with the first batch entry's gradient of the output for all",
    "gradient-cut": "the gradients are cut at ±1",
    "gradient-in-bfloat16": "the gradients are rounded to bfloat16",
    "gradient-of-last-query-dropped": "without the last query in the key's gradient",
    "fused-gradient-without-maximum": "lacks the maximum",
    "fused-gradient-of-first-tile": "of the first 64 keys only: the backward pass ends after one",
    "fused-row-term-of-output": "with the row term of a context that was not divided by the",
    "bias-gradient-of-last-tile": "with the gradient of the additive bias of queries 128 and",
    # weights
    "weights-averaged": "averaged over heads",
    "weights-averaged-and-repeated": "the average over heads, repeated for each head",
    "weights-not-returned": "no weights are returned",
    "weights-of-first-head": "those of the first head, for all",
    "weights-of-first-entry": "those of the first batch entry, for all",
    "weights-heads-reversed": "those of the heads in reverse order",
    "weights-before-mask": "those from before the mask",
    "weights-are-logits": "the logits",
    "weights-are-scores": "the scores, before scale and mask",
    "weights-not-normalised": "the exponentials, not normalised",
    "weights-sum-over-queries": "normalised over the queries",
    "weights-transposed": "transposed: [key query]",
    "weights-after-dropout": "0.9 times those of the softmax",
    "weights-leak": "the returned weights have 1e-06 added",
    "weights-in-bfloat16": "rounded to bfloat16",
    "returned-weights-cut": "returned weights below 1e-03 are 0",
    "weights-one-hot": "1 for the key that is attended most, and 0 for the others",
    "weights-of-last-call": "of the call before",
    "weights-of-a-group": "those of one head for each head of its group",
    # modes
    "dropout-in-evaluation": "dropout is on where it is declared to be off",
    "dropout-never": "dropout is off where it is declared to be on",
    "dropout-not-rescaled": "dropout does not divide what it keeps by 1 − p",
    "dropout-rescaled-twice": "dropout multiplies what it keeps by 4 instead of 1/(1 − p)",
    "dropout-on-logits": "dropout acts before the softmax: it drops logits, and no",
    "dropout-renormalised": "each row is divided by its sum again after dropout",
    "evaluation-keeps-probability": "the output without its bias is 0.9 times what it should be",
    "evaluation-without-output-bias": "with the output bias forgotten",
    "evaluation-with-other-scale": "the scale is 0.999 times what it should be",
    "fused-ignores-padding": "with the mask ignored",
    "fused-ignores-bias": "with the additive bias ignored",
    "fused-ignores-custom-scale": "with scale 1/sqrt(d) instead of the one asked for",
    "fused-causal-top-left": "with the causal mask aligned top-left",
    "state-drifts": "the output is 1.0",
    "keys-cached": "of an earlier call",
    "mask-cached": "of an earlier call",
    "query-scaled-in-place": "in place",
    "padding-filled-in-place": "in place",
    "values-mixed-over-batch": "with the batch's mean subtracted from the projected values",
    "neighbour-leaks": "of the next batch entry",
    "batch-of-1-only": "without the scale",
    "scaled-for-batch-of-1": "without the scale",
    "gradients-lost-when-fused": "the gradient of the key is missing: 0 throughout",
}
"""Mutant to words that its cause should have."""
