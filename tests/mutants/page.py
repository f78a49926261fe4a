"""The kill matrix as a page of Markdown: which requirements notice which mutant, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from conformance.cases.catalogue import catalogue
from conformance.requirements import REQUIREMENTS
from mutants.run import Outcome, count

_HEAD = """# The kill matrix

A check that cannot fail proves nothing. So the suite is examined as well: {total} defective
attentions, each one small change to a correct one, and each must be noticed by a requirement that
was named beforehand. The original survives everything. `python -m mutants`, in `tests/`, repeats
that in less than two minutes.

All are made of one attention in NumPy, forward and backward, in
[tests/mutants](../tests/mutants/attention.py), and are examined through the same
interface as any library. This page is written by

    tox -e selftest

in about ten minutes, from the whole catalogue of {cases} cases, in all modes, and the two
experiments that decide requirements which no case serves. Each mutant is examined in the one dtype
in which it shows, which is float32 unless the table says otherwise. A number counts the items (case
and mode) in which a requirement noticed the mutant; the requirements in bold were expected to.

A mutant that nothing notices is a missing case. Which ones were found that way is told
[below](#survivors).

| chapter | killed | of |
| --- | ---: | ---: |
"""

_SURVIVORS = """
## Survivors

These survived when they were first examined, and the suite was changed:

| mutant | what was missing |
| --- | --- |
| maximum-starts-at-0 | rows far below zero: `bias/far-below-zero` |
| maximum-of-blocked-keys-too | blocked logits so large that the rest of the row underflows: \
`bias/high-on-padding` |
| bias-shifted-in-place | a constant added to the bias in place moves no output: \
`bias/in-full/cross` now serves `call.leaves-inputs-unchanged` |
| dropout-not-rescaled, dropout-rescaled-twice, dropout-on-logits, dropout-renormalised | dropout \
was observed only: the requirement `dropout.is-unbiased` |
| strides-ignored | memory layouts were observed only: the requirement \
`call.memory-layout-does-not-matter` |

Eighteen further defects were written from the adapter guide alone, by somebody who had not seen the
checks. Five were noticed at once. Twelve were noticed after this was added, and are in the zoo:

| mutant | what was missing |
| --- | --- |
| single-key-tile-dropped | a length of one more than a power of two: the family `tiles` |
| bias-gradient-of-last-tile | more queries than a tile under one bias for all of them: \
`bias/over-keys/tiles` |
| padding-dropped-if-first-entry-has-none | a batch sorted by length: `mask/first-entry-unpadded` |
| mask-split-otherwise-for-one-query | a single query with grouped heads: the family `decoding` |
| stops-at-blocked-tile | a tile that is blocked for everybody: `mask/blocked-start/tiles` |
| positions-in-bfloat16 | more than 256 positions, and keys that attract the query before them: \
`causal/next-key-attracts/longer` |
| products-in-float16 | products beyond float16 under a small scale: `logits/from-large-heads` |
| key-gradient-with-query-only, bias-forgotten-in-inference | frozen arguments: the requirement \
`gradient.does-not-depend-on-what-is-frozen` |
| weights-overwritten-by-backward | a second backward pass: the requirement \
`gradient.asked-for-twice-is-the-same` |
| mask-cached-by-identity | buffers that are written to: the requirement \
`call.reads-what-its-arguments-hold-now` |
| batch-stride-assumed | windows of larger arrays, beside gaps between numbers |
| padding-filled-in-place | the same beside a causal flag: `causal/with-left-aligned-padding` now \
serves `call.leaves-inputs-unchanged` |

One is still not noticed: the loss is on the output, so who ignores the gradient that arrives at the
*returned weights* conforms.

`stale-maximum` died by chance only, by a NaN where a window blocked the whole first tile;
`logits/rising` shows the overflow itself, in logits that grow along the keys.

Two were restated, because they are no defects by the definition or by honest rounding: weights of
float16 that are rounded to bfloat16 lie within what a kernel that rounds everything to float16 may
do; and −10,000 or the smallest float for −∞ differ from it only in a row that is masked
altogether, so it is there that they are looked for. A key's bias moves no dot-product attention:
its mutants die in the additive score.

## Beside another suite

The ONNX node cases of the operator Attention (onnx 1.23.2) can be replayed from the installed
package. They know neither gradients nor weights of projections, so only mutants of the function
between projected heads and context are put before them, in float32, and those that ONNX can say:

| chapter | mutants | noticed by 56 ONNX cases | noticed by this suite |
| --- | ---: | ---: | ---: |
| forward | 25 | 22 | 25 |
| masks | 32 | 22 | 32 |
| causal | 12 | 10 | 12 |
| precision | 26 | 7 | 26 |
| all | 95 | 61 | 95 |

    pip install onnx==1.23.2
    python benchmarks/other_suites.py

The mutants come from this suite, so the last column says no more than that they are noticed; what
the other one tells is which mistakes a fixed tolerance and small sizes do not show.

## Requirements

How many mutants each notices, and how many of them no other one does:

| requirement | mutants | alone |
| --- | ---: | ---: |
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """The whole page."""
    chapters = count(outcomes)
    lines = [_HEAD.format(total=len(outcomes), cases=len(catalogue()))]
    lines += [
        f"| [{chapter}](#{chapter}) | {killed} | {total} |\n"
        for chapter, (killed, total) in chapters.items()
    ]
    lines.append(f"| all | {sum(o.killed for o in outcomes)} | {len(outcomes)} |\n")
    lines.append(_SURVIVORS)
    noticed = Counter(name for outcome in outcomes for name in outcome.noticed)
    alone = Counter(next(iter(o.noticed)) for o in outcomes if len(o.noticed) == 1)
    lines += [f"| `{it.id}` | {noticed[it.id]} | {alone[it.id]} |\n" for it in REQUIREMENTS]
    for chapter in chapters:
        lines.append(
            f"\n## {chapter}\n\n| mutant | what was done | noticed by |\n| --- | --- | --- |\n"
        )
        lines += [_row(outcome) for outcome in outcomes if outcome.mutant.chapter == chapter]
    return "".join(lines)


def _row(outcome: Outcome) -> str:
    mutant = outcome.mutant
    dtype = "" if mutant.dtype == "float32" else f" ({mutant.dtype})"
    order = [item.id for item in REQUIREMENTS]
    told = [
        f"**{name}** {outcome.noticed[name]}"
        if name in mutant.killed_by
        else f"{name} {outcome.noticed[name]}"
        for name in sorted(outcome.noticed, key=order.index)
    ]
    return f"| `{mutant.name}`{dtype} | {mutant.did} | {', '.join(told) or 'nothing'} |\n"
