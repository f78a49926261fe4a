"""Which cause the message should name for each mutant, and whether it does.

It is looked for in a finding of a requirement that kills the mutant. Where a
mutant has none here, no cause is to be named: the requirement that notices it says what is wrong
(the dtype, a changed input, a seeded generator), and whoever names one then is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from conformance.records.phrase import NOTHING, Phrase
from conformance.requirements.examination import Workbench
from conformance.running.session import Session
from mutants.mutant import Mutant
from mutants.run import Examiner, Row, deviations, examined

KINDS = ("named", "named wrongly", "not named", "none to name")
"""In this order in tables."""


@dataclass(frozen=True)
class Named:
    """The cause that was expected of a mutant, and the one that was named; both may be nothing."""

    mutant: Mutant
    expected: Phrase
    cause: Phrase

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.cause:
            wanted = self.expected.arguments.items()
            right = self.cause.id == self.expected.id and wanted <= self.cause.arguments.items()
            return "named" if right else "named wrongly"
        return "not named" if self.expected else "none to name"


def name(examiner: Examiner, mutant: Mutant) -> Named:
    """The cause that a user would read where an expected requirement notices it first."""
    adapter = mutant.adapter()
    # A search that explains nothing is quicker; the row is then examined again, by a fresh one.
    quick = Session(Workbench(expectations=examiner.expectations), explains=False)
    expected = CAUSES.get(mutant.name, NOTHING)
    for row in examiner.likeliest_first(mutant, adapter):
        if set(deviations(quick, row)) & set(mutant.killed_by):
            return Named(mutant, expected, _cause(examiner, mutant, row))
    return Named(mutant, expected, NOTHING)


def _cause(examiner: Examiner, mutant: Mutant, row: Row) -> Phrase:
    session = Session(Workbench(expectations=examiner.expectations))
    result = examined(session, replace(row, adapter=mutant.adapter()))
    named = [f for f in result.findings if f.verdict == "deviates" and f.cause]
    named.sort(key=lambda finding: finding.requirement not in mutant.killed_by)
    return named[0].cause if named else NOTHING


def count(named: Iterable[Named]) -> dict[str, Counter[str]]:
    """By chapter, how many of each kind."""
    found: dict[str, Counter[str]] = {}
    for one in named:
        found.setdefault(one.mutant.chapter, Counter())[one.kind] += 1
    return found


NO_HYPOTHESIS = Phrase("no-hypothesis")
"""Of mutants whose mistake no hypothesis can name yet."""


def _gradient(what: str, array: str, **about: float) -> Phrase:
    return Phrase(f"gradient.{what}", {"arrays": [Phrase(f"array.{array}")], **about})


def _rounded(stage: str, bits: int) -> Phrase:
    about = {"stage": Phrase(f"stage.{stage}"), "format": Phrase(f"significand.{bits}")}
    return Phrase("precision.rounded", {**about})


def _factors_rounded(bits: int) -> Phrase:
    return Phrase("precision.factors-rounded", {"format": Phrase(f"significand.{bits}")})


def _at(place: str, **indices: int) -> Phrase:
    return Phrase(f"where.{place}", {**indices})


CAUSES: dict[str, Phrase] = {
    # forward
    "scale-by-head-size": Phrase("scale.by-head-size"),
    "scale-by-width": Phrase("scale.by-width"),
    "scale-by-root-of-width": Phrase("scale.by-root-of-width"),
    "scale-by-value-head-size": Phrase("scale.by-value-head-size"),
    "scale-missing": Phrase("scale.missing"),
    "scale-twice": Phrase("scale.by-head-size"),
    "scale-one-percent-off": Phrase("scale.factor", {"factor": 1.01}),
    "custom-scale-ignored": Phrase("scale.default"),
    "custom-scale-on-top": Phrase("scale.default-on-top"),
    "custom-scale-inverted": Phrase("scale.inverted"),
    "scale-on-additive-score": Phrase("scale.on-additive-score"),
    "scale-on-bias": Phrase("bias.scaled"),
    "scale-on-number-mask": Phrase("bias.scaled"),
    "scale-before-query-bias": Phrase("projection.query-scaled-before-bias"),
    "softmax-over-queries": Phrase("softmax.over-queries"),
    "softmax-over-heads": Phrase("softmax.over-heads"),
    "softmax-over-batch": Phrase("softmax.over-batch"),
    "softmax-over-matrix": Phrase("softmax.over-matrix"),
    "sigmoid": Phrase("softmax.sigmoid"),
    "heads-interleaved": Phrase("heads.interleaved"),
    "heads-split-by-view": Phrase("heads.split-by-reshape"),
    "key-heads-interleaved": Phrase("heads.interleaved-in", {"of": "key"}),
    "heads-not-transposed-back": Phrase("heads.merged-by-reshape"),
    "heads-reversed": Phrase("heads.reversed"),
    "last-head-dropped": Phrase("heads.last-left-out"),
    "first-head-for-all": Phrase("heads.keys-of-first"),
    "grouped-tiled": Phrase("heads.tiled"),
    "grouped-values-tiled": Phrase("heads.values-tiled"),
    "grouped-first-head": Phrase("heads.first-key-value-for-all"),
    "query-and-key-swapped": Phrase("projection.swapped", {"one": "query", "other": "key"}),
    "key-and-value-swapped": Phrase("projection.swapped", {"one": "key", "other": "value"}),
    "value-reads-key-input": Phrase("projection.of-other-input", {"of": "value", "source": "key"}),
    "query-weight-transposed": Phrase("projection.transposed", {"of": "query"}),
    "output-weight-transposed": Phrase("projection.transposed", {"of": "output"}),
    "value-not-projected": Phrase("projection.missing", {"of": "value"}),
    "query-bias-forgotten": Phrase("projection.bias-forgotten", {"of": "query"}),
    "query-bias-twice": Phrase("projection.bias-added-twice", {"of": "query"}),
    "key-bias-forgotten": Phrase("projection.bias-forgotten", {"of": "key"}),
    "key-bias-twice": Phrase("projection.bias-added-twice", {"of": "key"}),
    "value-bias-forgotten": Phrase("projection.bias-forgotten", {"of": "value"}),
    "value-bias-twice": Phrase("projection.bias-added-twice", {"of": "value"}),
    "output-bias-forgotten": Phrase("projection.bias-forgotten", {"of": "output"}),
    "output-bias-twice": Phrase("projection.bias-added-twice", {"of": "output"}),
    "output-bias-per-head": Phrase("projection.bias-added-twice", {"of": "output"}),
    "output-bias-before-projection": Phrase("projection.output-bias-before-projection"),
    "bias-of-first-head": Phrase("projection.bias-of-first-head"),
    "residual-added": Phrase("output.query-added"),
    "tanh-missing": Phrase("score.tanh-missing"),
    "score-of-difference": Phrase("score.of-difference"),
    "score-weight-of-first-head": Phrase("score.weight-of-first-head"),
    "odd-head-size": Phrase("score.last-component-left-out"),
    "odd-number-of-keys": Phrase("keys.ignored", {"keys": _at("key.last", at=6)}),
    "keys-beyond-queries": Phrase("keys.ignored", {"keys": _at("key.from", first=4)}),
    "keys-beyond-128": Phrase("keys.ignored", {"keys": _at("key.from", first=128)}),
    "keys-of-first-entry": Phrase("inputs.of-first-batch-entry", {"of": "key"}),
    "one-query-path": Phrase("scale.missing"),
    "bias-over-tokens-for-heads-of-1": Phrase("projection.bias-along-tokens"),
    # masks
    "padding-ignored": Phrase("mask.not-applied"),
    "padding-of-numbers-ignored": Phrase("mask.not-applied"),
    "mask-ignored": Phrase("mask.not-applied"),
    "number-mask-ignored": Phrase("mask.not-applied"),
    "bias-ignored": Phrase("bias.not-applied"),
    "heads-mask-ignored": Phrase("mask.not-applied", {"part": _at("head.last", at=1)}),
    "mask-ignored-with-bias": Phrase("mask.not-applied"),
    "padding-ignored-with-mask": Phrase("mask.not-applied-beside-causal"),
    "mask-ignored-when-long": Phrase("mask.not-applied"),
    "padding-inverted": Phrase("mask.inverted"),
    "padding-of-numbers-inverted": Phrase("mask.inverted"),
    "mask-inverted": Phrase("mask.inverted"),
    "number-mask-negated": Phrase("bias.subtracted"),
    "bias-negated": Phrase("bias.subtracted"),
    "mask-transposed": Phrase("mask.transposed"),
    "bias-transposed": Phrase("bias.transposed"),
    "padding-reversed": Phrase("mask.reversed"),
    "mask-multiplies-logits": Phrase("mask.multiplied-into-logits"),
    "mask-added-as-numbers": Phrase("mask.added-where-attended"),
    "mask-after-softmax": Phrase("mask.after-softmax"),
    "blocked-minus-5": Phrase("mask.blocked-lowered", {"by": 5.0}),
    "blocked-minus-50": Phrase("mask.blocked-lowered", {"by": 50.0}),
    "blocked-minus-100": Phrase("mask.blocked-lowered", {"by": 100.0}),
    "blocked-becomes-0": Phrase("mask.multiplied-into-logits"),
    "blocked-minus-10000": Phrase("masked-row.finite-number"),
    "blocked-smallest-float32": Phrase("masked-row.finite-number"),
    "fully-masked-row-is-nan": Phrase("masked-row.nan"),
    "number-mask-cut": Phrase("mask.blocked-lowered", {"by": 5.0}),
    "number-mask-as-boolean": Phrase("mask.inverted"),
    "padding-of-numbers-added": Phrase("mask.added-where-attended"),
    "bias-twice": Phrase("bias.added-twice"),
    "bias-cut": Phrase("bias.cut", {"limit": 2.0}),
    "padding-of-first-entry": Phrase("mask.of-first-batch-entry"),
    "mask-of-first-entry": Phrase("mask.of-first-batch-entry"),
    "mask-of-first-head": Phrase("mask.of-first-head"),
    "mask-of-first-query": Phrase("mask.of-first-query"),
    "mask-heads-first": Phrase("mask.heads-before-batch"),
    "mask-tiled-over-heads": Phrase("mask.tiled-over-heads"),
    "attention-bias-of-first-head": Phrase("bias.of-first-head"),
    "bias-of-first-entry": Phrase("bias.of-first-batch-entry"),
    "padding-over-queries": Phrase("mask.padding-over-queries"),
    "padding-on-queries-too": Phrase("mask.applied-to-queries-too"),
    "broadcast-mask-for-first-head": Phrase("mask.not-applied", {"part": _at("head.last", at=1)}),
    "broadcast-mask-for-first-entry": Phrase(
        "causal.not-applied", {"part": _at("batch.from", first=1)}
    ),
    "padding-one-short": Phrase("mask.padding-one-too-long"),
    "padding-one-long": Phrase("mask.padding-one-too-short"),
    "window-without-first-key": Phrase("mask.window-without-first-key"),
    "window-without-last-key": Phrase("mask.window-without-last-key"),
    "masks-joined-by-or": Phrase("mask.joined-by-or"),
    "padding-dropped-if-first-entry-has-none": Phrase("mask.not-applied"),
    "stops-at-blocked-tile": Phrase("softmax.nothing-attended"),
    "mask-split-otherwise-for-one-query": Phrase("mask.groups-split-otherwise"),
    # causal
    "causal-ignored": Phrase("causal.not-applied"),
    "causal-sees-the-next": Phrase("causal.sees-next-key"),
    "causal-strict": Phrase("causal.without-own-key"),
    "causal-reversed": Phrase("causal.reversed"),
    "causal-top-left": Phrase("causal.aligned", {"alignment": "top-left"}),
    "causal-bottom-right-one-off": Phrase("causal.without-own-key"),
    "causal-offset-negated": Phrase("causal.offset-negated"),
    "causal-ignored-with-padding": Phrase("causal.not-applied"),
    "causal-ignored-with-mask": Phrase("causal.not-applied"),
    "causal-ignored-with-bias": Phrase("causal.not-applied"),
    "causal-instead-of-padding": Phrase("mask.not-applied-beside-causal"),
    "causal-ignored-where-lengths-differ": Phrase("causal.not-applied"),
    "causal-ignored-when-long": Phrase("causal.not-applied"),
    "causal-on-first-head": Phrase("causal.not-applied", {"part": _at("head.from", first=1)}),
    "causal-on-first-entry": Phrase(
        "causal.not-applied",
        {
            "part": Phrase(
                "where", {"parts": [_at("batch.last", at=1), _at("query.range", first=0, last=5)]}
            )
        },
    ),
    "causal-window": Phrase("causal.window", {"size": 4}),
    "causal-by-tile": Phrase("causal.by-tile", {"size": 2}),
    "positions-in-bfloat16": Phrase("causal.positions-rounded", {"to": "bfloat16"}),
    # precision
    "no-maximum": Phrase("softmax.maximum-not-subtracted"),
    "maximum-of-all-rows": Phrase("softmax.maximum-of-all"),
    "maximum-of-first-row": Phrase("softmax.maximum-of-first-row"),
    "maximum-of-blocked-keys-too": Phrase("mask.after-softmax-or-maximum"),
    "logits-cut": Phrase("logits.cut-below-maximum", {"cap": 20}),
    "logits-soft-capped": Phrase("logits.capped-softly", {"cap": 30}),
    "normaliser-plus-1e-6": Phrase("softmax.normaliser-plus", {"digits": 6}),
    "normaliser-plus-1e-9": Phrase("softmax.normaliser-plus", {"digits": 9}),
    "weights-cut": Phrase("softmax.small-weights-dropped", {"digits": 4}),
    "exp-by-cubic": Phrase("softmax.power"),
    "exp-by-power": Phrase("softmax.power"),
    "exp-of-2": Phrase("softmax.base-2"),
    "squares-for-exp": Phrase("softmax.rational"),
    "softmax-in-bfloat16": _rounded("weights", 8),
    "products-in-float16": Phrase("precision.products-kept-in-float16"),
    "softmax-in-float16": _rounded("weights", 11),
    "weights-in-fp8": _rounded("weights", 4),
    "logits-in-bfloat16": _rounded("logits", 8),
    "logits-of-float16-in-bfloat16": Phrase(
        "precision.rounded", {"format": Phrase("significand.8")}
    ),
    "projections-in-bfloat16": _rounded("projections", 8),
    "output-in-float16": _rounded("output", 11),
    "context-in-bfloat16": _rounded("context", 8),
    "bias-in-bfloat16": _rounded("bias", 8),
    "products-in-tf32": _factors_rounded(11),
    "products-in-bfloat16": _factors_rounded(8),
    "float64-through-float32": Phrase("accuracy.float32"),
    "bfloat16-without-biases": Phrase("projection.input-biases-forgotten"),
    "float16-scale-missing": Phrase("scale.missing"),
    "last-tile-dropped": Phrase("keys.ignored", {"keys": _at("key.from", first=128)}),
    "last-tile-read-twice": Phrase("keys.counted-twice", {"keys": _at("key.from", first=128)}),
    "tiles-overlap": Phrase("keys.last-of-tiles-counted-twice", {"size": 64}),
    "tiles-leave-gaps": Phrase("keys.last-of-tiles-left-out", {"size": 64}),
    "sums-not-rescaled": Phrase("tiles.sums-not-rescaled"),
    "sums-rescaled-the-wrong-way": Phrase("tiles.sums-rescaled-inversely"),
    "stale-maximum": Phrase("softmax.maximum-not-subtracted"),
    "maximum-starts-at-0": Phrase("softmax.maximum-not-subtracted"),
    "normaliser-of-last-tile": Phrase(
        "softmax.normaliser-of-keys", {"keys": _at("key.from", first=128)}
    ),
    "single-key-tile-dropped": Phrase("keys.ignored", {"keys": _at("key.last", at=128)}),
    # backward
    "gradient-of-query-missing": _gradient("missing", "query"),
    "gradient-of-query-doubled": _gradient("doubled", "query"),
    "gradient-of-key-missing": _gradient("missing", "key"),
    "gradient-of-key-doubled": _gradient("doubled", "key"),
    "gradient-of-value-missing": _gradient("missing", "value"),
    "gradient-of-value-doubled": _gradient("doubled", "value"),
    "gradient-of-query-weight-missing": _gradient("missing", "weights.query"),
    "gradient-of-query-weight-doubled": _gradient("doubled", "weights.query"),
    "gradient-of-query-weight-transposed": _gradient("transposed", "weights.query"),
    "gradient-of-key-weight-missing": _gradient("missing", "weights.key"),
    "gradient-of-key-weight-doubled": _gradient("doubled", "weights.key"),
    "gradient-of-key-weight-transposed": _gradient("transposed", "weights.key"),
    "gradient-of-value-weight-missing": _gradient("missing", "weights.value"),
    "gradient-of-value-weight-doubled": _gradient("doubled", "weights.value"),
    "gradient-of-value-weight-transposed": _gradient("transposed", "weights.value"),
    "gradient-of-output-weight-missing": _gradient("missing", "weights.output"),
    "gradient-of-output-weight-doubled": _gradient("doubled", "weights.output"),
    "gradient-of-output-weight-transposed": _gradient("transposed", "weights.output"),
    "gradient-of-query-bias-missing": _gradient("missing", "weights.query_bias"),
    "gradient-of-query-bias-doubled": _gradient("doubled", "weights.query_bias"),
    "gradient-of-query-bias-averaged": _gradient("averaged-over-batch", "weights.query_bias"),
    "gradient-of-key-bias-missing": _gradient("missing", "weights.key_bias"),
    "gradient-of-key-bias-doubled": _gradient("doubled", "weights.key_bias"),
    "gradient-of-key-bias-averaged": _gradient("averaged-over-batch", "weights.key_bias"),
    "gradient-of-value-bias-missing": _gradient("missing", "weights.value_bias"),
    "gradient-of-value-bias-doubled": _gradient("doubled", "weights.value_bias"),
    "gradient-of-value-bias-averaged": _gradient("averaged-over-batch", "weights.value_bias"),
    "gradient-of-output-bias-missing": _gradient("missing", "weights.output_bias"),
    "gradient-of-output-bias-doubled": _gradient("doubled", "weights.output_bias"),
    "gradient-of-output-bias-averaged": _gradient("averaged-over-batch", "weights.output_bias"),
    "gradient-of-score-weight-missing": _gradient("missing", "weights.score"),
    "gradient-of-score-weight-doubled": _gradient("doubled", "weights.score"),
    "gradient-of-score-weight-averaged": _gradient("averaged-over-batch", "weights.score"),
    "gradient-of-attention-bias-missing": _gradient("missing", "attn_bias"),
    "gradient-of-attention-bias-doubled": _gradient("doubled", "attn_bias"),
    "gradient-without-scale": Phrase("backward.without-scale"),
    "gradient-scaled-twice": Phrase("backward.scaled-twice"),
    "gradient-with-default-scale": Phrase("backward.default-scale"),
    "softmax-detached": Phrase("backward.softmax-detached"),
    "softmax-without-row-term": Phrase("backward.without-row-term"),
    "row-term-of-first-query": Phrase("backward.row-term-of-first-query"),
    "row-term-of-weights-squared": Phrase("backward.row-term-of-squares"),
    "softmax-straight-through": Phrase("backward.softmax-is-identity"),
    "gradient-leaks-through-mask": Phrase("backward.weights-without-mask"),
    "gradient-without-bias": Phrase("backward.weights-without-bias"),
    "gradient-of-blocked-bias": Phrase("backward.bias-of-blocked-is-1"),
    "gradient-of-bias-not-summed": Phrase("backward.bias-of-first-batch-entry"),
    "gradient-of-bias-scaled": _gradient("factor", "attn_bias", factor=0.4472),
    "gradient-of-infinite-bias-is-nan": _gradient("nan", "attn_bias"),
    "grouped-gradient-of-first-head": Phrase("backward.group-first-head", {"inputs": ["key"]}),
    "grouped-gradient-averaged": Phrase("backward.group-averaged", {"inputs": ["key"]}),
    "grouped-gradient-tiled": Phrase("backward.group-tiled", {"inputs": ["key"]}),
    "grouped-value-gradient-of-last-head": Phrase(
        "backward.group-last-head", {"inputs": ["value"]}
    ),
    "memory-gradient-without-values": Phrase("backward.without-share", {"of": "value"}),
    "self-gradient-without-keys": Phrase("backward.without-share", {"of": "key"}),
    "key-gradient-from-keys": Phrase("backward.keys-for-queries"),
    "tanh-slope": Phrase("backward.tanh-slope-wrong"),
    "cotangent-ignored": Phrase("backward.cotangent-ignored"),
    "cotangent-of-first-entry": Phrase("backward.cotangent-of-first-batch-entry"),
    "gradient-cut": Phrase("gradient.cut", {"limit": 1.0}),
    "gradient-in-bfloat16": Phrase("gradient.rounded", {"to": "bfloat16", "arrays": []}),
    "gradient-of-last-query-dropped": Phrase("backward.key-without-last-query"),
    "fused-gradient-without-maximum": Phrase("backward.normaliser-without-maximum"),
    "fused-gradient-of-first-tile": Phrase("backward.first-keys-only", {"count": 64}),
    "fused-row-term-of-output": Phrase("backward.row-term-of-unnormalised-context"),
    "bias-gradient-of-last-tile": Phrase(
        "backward.bias-of-queries", {"queries": _at("query.from", first=128)}
    ),
    # weights
    "weights-averaged": Phrase("returned.averaged"),
    "weights-averaged-and-repeated": Phrase("returned.averaged-and-repeated"),
    "weights-not-returned": Phrase("returned.none"),
    "weights-of-first-head": Phrase("returned.of-first-head"),
    "weights-of-first-entry": Phrase("returned.of-first-batch-entry"),
    "weights-heads-reversed": Phrase("returned.heads-reversed"),
    "weights-before-mask": Phrase("returned.before-mask"),
    "weights-are-logits": Phrase("returned.logits"),
    "weights-are-scores": Phrase("returned.scores"),
    "weights-not-normalised": Phrase("returned.exponentials"),
    "weights-sum-over-queries": Phrase("returned.normalised-over-queries"),
    "weights-transposed": Phrase("returned.transposed"),
    "weights-after-dropout": Phrase("returned.factor", {"factor": 0.9}),
    "weights-leak": Phrase("returned.added", {"amount": 1e-06}),
    "weights-in-bfloat16": Phrase("returned.rounded", {"to": "bfloat16"}),
    "returned-weights-cut": Phrase("returned.small-dropped", {"below": 0.001}),
    "weights-one-hot": Phrase("returned.one-hot"),
    "weights-of-last-call": NO_HYPOTHESIS,
    "weights-of-a-group": Phrase("returned.of-one-head-per-group"),
    # modes
    "dropout-in-evaluation": Phrase("dropout.is-on"),
    "dropout-never": Phrase("dropout.is-off"),
    "dropout-not-rescaled": Phrase("dropout.not-rescaled"),
    "dropout-rescaled-twice": Phrase("dropout.factor", {"factor": 4.0}),
    "dropout-on-logits": Phrase("dropout.of-logits"),
    "dropout-renormalised": Phrase("dropout.renormalised"),
    "evaluation-keeps-probability": Phrase("output.factor-without-bias", {"factor": 0.9}),
    "evaluation-without-output-bias": Phrase("projection.bias-forgotten", {"of": "output"}),
    "evaluation-with-other-scale": Phrase("scale.factor", {"factor": 0.999}),
    "fused-ignores-padding": Phrase("mask.not-applied"),
    "fused-ignores-bias": Phrase("bias.not-applied"),
    "fused-ignores-custom-scale": Phrase("scale.default"),
    "fused-causal-top-left": Phrase("causal.aligned", {"alignment": "top-left"}),
    "state-drifts": Phrase("output.factor"),
    "keys-cached": NO_HYPOTHESIS,
    "mask-cached": NO_HYPOTHESIS,
    "query-scaled-in-place": NO_HYPOTHESIS,
    "padding-filled-in-place": NO_HYPOTHESIS,
    "values-mixed-over-batch": Phrase("inputs.batch-mean-subtracted"),
    "neighbour-leaks": NO_HYPOTHESIS,
    "batch-of-1-only": Phrase("scale.missing"),
    "scaled-for-batch-of-1": Phrase("scale.missing"),
    "gradients-lost-when-fused": _gradient("missing", "key"),
}
"""Mutant to the cause that should be named, with those of its arguments that must be so."""
