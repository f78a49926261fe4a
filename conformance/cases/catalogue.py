"""The catalogue: the problems that every implementation is given.

Its cases are those that `_build` lists. What a case is meant to catch is tested in
`tests/test_cases_bind.py`.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType

from conformance.cases import patterns, regimes
from conformance.cases.case import FAMILIES, Case
from conformance.definition.dtypes import DTYPES
from conformance.errors import UnknownName

BLOCKED = "mask.blocked-key-has-no-influence"
SPELLINGS = "mask.spellings-agree"
POLARITY = "mask.polarity-is-as-declared"
KEY_ORDER = "invariance.key-order"
BATCH = "invariance.batch-entries-are-independent"
SHIFT = "invariance.logit-shift"
UNCHANGED = "call.leaves-inputs-unchanged"
SURROUNDINGS = "call.leaves-global-state-alone"
FROZEN = "gradient.does-not-depend-on-what-is-frozen"
TWICE = "gradient.asked-for-twice-is-the-same"
REWRITTEN = "call.reads-what-its-arguments-hold-now"
HYGIENE = (UNCHANGED, "call.repeats", SURROUNDINGS)
USAGE = (FROZEN, TWICE, REWRITTEN)
FULLY_MASKED = "observed.fully-masked-row"
ALIGNMENT = "observed.causal-alignment"
RETURNED = "observed.returned-weights"

ONE_KEY_IDLE = dict.fromkeys(
    ("query", "weights.query", "weights.query_bias", "weights.key", "key", "scale"),
    "with one key, every weight is 1 whatever query and key are",
)
KEY_BIAS_IDLE = {
    "weights.key_bias": "adds the same number to all logits of a row, which the softmax removes"
}


def _cases(
    families: str,
    name: str,
    why: str,
    *serves: str,
    also: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    core: str = "",
    exchanged: str = "",
    **fields: object,
) -> list[Case]:
    """Return the same case in several families, which are given by names with blanks between.

    Args:
        serves: the requirements that the case serves in all families.
        also: families to the requirements that it serves in these as well.
        core, exchanged: the families in which the case has this mark.
        fields: of `Case`.
    """
    return [
        Case(
            name=name,
            family=family,
            why=why,
            serves=frozenset(serves).union(
                *(own for f, own in also.items() if family in f.split())
            ),
            idle=_idle(family),
            core=family in core.split(),
            exchanged=family in exchanged.split(),
            **fields,  # type: ignore[arg-type]
        )
        for family in families.split()
    ]


def _idle(family: str) -> dict[str, str]:
    if family == "one-key":
        return ONE_KEY_IDLE | KEY_BIAS_IDLE
    shape = FAMILIES[family]
    return KEY_BIAS_IDLE if shape.bias and shape.score == "scaled-dot" else {}


def _build() -> list[Case]:
    make: Callable[..., list[Case]] = _cases
    most = "self cross separate narrow value-head gqa mqa one-query one-head long additive"
    return [
        # No mask: the arithmetic of every family.
        *make(
            "self cross gqa additive one-query one-key long tiles size-one",
            "plain/no-mask",
            "Nothing is masked: projections, scores, softmax, output, and all their gradients.",
            also={
                "self cross gqa additive": (KEY_ORDER, BATCH, RETURNED, *HYGIENE),
                "cross gqa additive": (POLARITY, ALIGNMENT),
            },
            exchanged="self cross gqa additive",
            core="self cross gqa additive one-query long tiles",
        ),
        *make(
            "self cross gqa",
            "plain/custom-scale",
            "The logits' factor is 0.75 instead of 1/sqrt(head size).",
            scale=0.75,
            core="cross",
        ),
        # Boolean masks.
        *make(
            f"{most} decoding",
            "mask/key-padding",
            "A ragged batch: every entry has its own number of keys.",
            also={
                "self cross gqa one-query long additive decoding": (BLOCKED,),
                "cross": (KEY_ORDER, SPELLINGS, *HYGIENE),
                "self separate": USAGE,
            },
            mask=patterns.key_padding,
            exchanged="cross",
            core="cross self",
        ),
        *make(
            "cross",
            "mask/first-entry-unpadded",
            "A batch sorted by length: nothing of the first entry is padding, of the others some.",
            mask=patterns.first_unpadded,
        ),
        *make(
            "tiles",
            "mask/blocked-start",
            "Nobody sees the first half of the keys: whole tiles are skipped, others not.",
            mask=patterns.blocked_start,
            core="tiles",
        ),
        *make(
            "self one-query",
            "mask/left-padding",
            "A ragged batch padded on the left, as generation uses it.",
            mask=patterns.left_padding,
        ),
        *make(
            "self cross narrow gqa one-head additive",
            "mask/shared",
            "One arbitrary mask for all batch entries and heads.",
            mask=patterns.shared,
            core="self",
        ),
        *make(
            most,
            "mask/per-batch",
            "An arbitrary mask for each batch entry, the same for all heads.",
            mask=patterns.per_batch,
            exchanged="self",
            core="cross narrow",
        ),
        *make(
            "self cross separate value-head gqa mqa additive decoding",
            "mask/per-head",
            "An arbitrary mask for each batch entry and head.",
            BATCH,
            mask=patterns.per_head,
            core="cross separate",
        ),
        *make(
            "self cross gqa long tiles",
            "mask/block-diagonal",
            "Two packed sequences per entry, which must not see each other.",
            BLOCKED,
            mask=patterns.block_diagonal,
        ),
        *make(
            "self cross separate long",
            "mask/sliding-window",
            "A window of two keys before and one after: off-by-one shows at both edges.",
            mask=patterns.sliding_window,
            core="cross",
        ),
        *make(
            "self mqa cross",
            "mask/prefix-lm",
            "Everybody sees the prefix, the rest is causal.",
            mask=patterns.prefix_lm,
        ),
        *make(
            "self cross",
            "mask/one-allowed-key",
            "Every other query may attend exactly one key: its output is that value.",
            mask=patterns.one_allowed_key,
        ),
        # The causal flag; alignment matters where lengths differ.
        *make(
            "self mqa tiles",
            "causal/square",
            "Each query sees itself and what came before.",
            BLOCKED,
            also={"self mqa": (SPELLINGS, *HYGIENE)},
            causal="top-left",
            exchanged="self",
            core="self",
        ),
        *make(
            "longer",
            "causal/next-key-attracts",
            "Each query is like the key after its own: seen once, that key would outweigh others.",
            causal="top-left",
            regime=regimes.next_key_attracts,
        ),
        *make(
            "cross separate narrow gqa additive",
            "causal/top-left",
            "Lengths differ; query i sees keys 0 to i.",
            SPELLINGS,
            causal="top-left",
            exchanged="cross",
            core="cross",
        ),
        *make(
            "cross separate gqa long additive",
            "causal/bottom-right",
            "The last query sees everything, as when decoding with a cache.",
            SPELLINGS,
            causal="bottom-right",
            core="cross long",
        ),
        *make(
            "self cross mqa",
            "causal/with-left-aligned-padding",
            "Causal and a ragged batch together.",
            BLOCKED,
            SPELLINGS,
            UNCHANGED,
            causal="top-left",
            mask=patterns.key_padding,
            core="self",
        ),
        # Additive biases.
        *make(
            "cross self gqa one-query one-head long additive",
            "bias/in-full",
            "A bias for every logit; its gradient is one of the answers.",
            SHIFT,
            also={"cross": (UNCHANGED, *USAGE)},
            bias=patterns.bias_in_full,
            core="cross",
        ),
        *make(
            "cross",
            "bias/far-below-zero",
            "Rows of logits of about -100: exp underflows unless their own maximum is subtracted.",
            bias=patterns.bias_far_below_zero,
        ),
        *make(
            "cross",
            "bias/high-on-padding",
            "Blocked logits of 200: subtracted as the row's maximum, they leave nothing of it.",
            bias=patterns.bias_high_on_padding,
            mask=patterns.key_padding,
        ),
        *make(
            "self separate mqa decoding",
            "bias/per-head",
            "A bias per head, shared by the batch, as relative position biases are.",
            bias=patterns.bias_per_head,
            core="self",
        ),
        *make(
            "cross tiles",
            "bias/over-keys",
            "A bias for each key, the same for all queries: its gradient is a sum over them.",
            SPELLINGS,
            bias=patterns.bias_over_keys,
        ),
        *make(
            "self cross narrow",
            "bias/shared",
            "One bias for all batch entries and heads.",
            SPELLINGS,
            bias=patterns.bias_shared,
        ),
        *make(
            "self gqa long",
            "bias/alibi",
            "Linear in the distance with a slope per head.",
            bias=patterns.alibi,
        ),
        *make(
            "self cross additive",
            "bias/with-mask",
            "A bias and an arbitrary mask together.",
            SPELLINGS,
            bias=patterns.bias_in_full,
            mask=patterns.per_batch,
            core="self",
        ),
        *make(
            "self",
            "bias/with-causal",
            "A bias per head under a causal flag.",
            SPELLINGS,
            bias=patterns.bias_per_head,
            causal="top-left",
        ),
        # Numbers away from the ordinary.
        *make(
            "self cross gqa",
            "logits/large",
            "Logits 8 times as wide: rounding a logit to half precision shows.",
            regime=regimes.large_logits,
            exchanged="cross",
        ),
        *make(
            "cross",
            "logits/large-with-mask",
            "The blocked logits are often the largest: the row's maximum must not be theirs alone.",
            regime=regimes.large_logits,
            mask=patterns.per_batch,
        ),
        *make(
            "cross one-query",
            "logits/huge",
            "Logits of some hundred: exp overflows unless the row's maximum is subtracted.",
            regime=regimes.huge_logits,
            core="cross",
        ),
        *make(
            "cross",
            "logits/from-large-heads",
            "Heads 128 times as large and a scale that undoes it: products overflow float16 if the "
            "scale comes after them.",
            scale=FAMILIES["cross"].default_scale / 128**2,
            regime=regimes.large_heads,
        ),
        *make(
            "long",
            "logits/rising",
            "The largest logits come last: a running maximum must follow, and sums be rescaled.",
            regime=regimes.rising_logits,
            core="long",
        ),
        *make(
            "additive",
            "logits/large",
            "A score weight 6 times as large.",
            regime=regimes.large_scores,
        ),
        *make(
            "cross",
            "logits/constant-rows",
            "All keys of one entry are equal: uniform weights, and no gradient to the queries.",
            regime=regimes.constant_rows,
        ),
        *make(
            "separate",
            "logits/constant-rows",
            "All keys of one entry are equal: the same weight for each that may be attended.",
            regime=regimes.constant_rows,
            mask=patterns.per_batch,
        ),
        *make(
            "cross self",
            "logits/repeated-maxima",
            "The largest logit of a row appears twice, exactly.",
            regime=regimes.repeated_maxima,
        ),
        *make(
            "self cross",
            "values/outliers",
            "A few inputs are ten times as large.",
            regime=regimes.outliers,
            core="cross",
        ),
        *make(
            "self",
            "values/all-positive",
            "Inputs share an offset, so sums do not cancel and biased rounding shows.",
            regime=regimes.all_positive,
        ),
        *make(
            "separate",
            "values/all-positive",
            "Inputs share an offset, so sums do not cancel and biased rounding shows.",
            regime=regimes.all_positive,
            mask=patterns.key_padding,
        ),
        *make(
            "cross long",
            "values/small",
            "Values a thousand times smaller: a fixed absolute tolerance would be empty.",
            regime=regimes.small_values,
        ),
        # The three attentions of the Transformer (Vaswani et al. 2017, section 3.2.3), with either
        # score.
        *make(
            "self additive-self",
            "transformer/encoder-self-attention",
            "Encoder: bidirectional, padding on the right.",
            BATCH,
            mask=patterns.key_padding,
        ),
        *make(
            "self additive-self",
            "transformer/decoder-self-attention",
            "Decoder: causal, padding on the right.",
            BATCH,
            causal="top-left",
            mask=patterns.key_padding,
        ),
        *make(
            "cross additive",
            "transformer/decoder-cross-attention",
            "Decoder: queries attend the encoder's memory with the memory's padding.",
            BATCH,
            mask=patterns.key_padding,
        ),
        # Where no definition settles the answer: observed, not asserted.
        *make(
            "self cross additive",
            "edge/fully-masked-row",
            "One query may attend no key at all.",
            FULLY_MASKED,
            mask=patterns.with_fully_masked_row,
            defined=False,
            exchanged="cross",
        ),
    ]


@lru_cache(maxsize=1)
def catalogue() -> tuple[Case, ...]:
    """Return every case, those of one family together, so that each shape is compiled once."""
    order = list(FAMILIES)
    cases = sorted(_build(), key=lambda case: order.index(case.family))
    ids = [case.id for case in cases]
    assert len(set(ids)) == len(ids), "case ids must be unique"
    return tuple(cases)


def find_cases(pattern: str) -> tuple[Case, ...]:
    """Return the cases whose id is, or contains, or matches the pattern.

    Raises:
        UnknownName: there is none.
    """
    cases = [case for case in catalogue() if case.id == pattern]
    cases = cases or [case for case in catalogue() if matches(case.id, pattern)]
    if not cases:
        raise UnknownName("case", pattern, (case.id for case in catalogue()))
    return tuple(cases)


def matches(name: str, pattern: str) -> bool:
    """Return whether a case's id contains the pattern, or matches it."""
    return pattern in name or fnmatch.fnmatchcase(name, pattern)


@lru_cache(maxsize=1)
def catalogue_hash() -> str:
    """Return a hash of every number of every case."""
    digest = hashlib.sha256()
    for case in catalogue():
        for dtype in DTYPES:
            problem = case.problem(dtype)
            digest.update(f"{case.id} {dtype} {problem.shape} {problem.scale}".encode())
            arrays = {
                **problem.weights.named(),
                "query": problem.query,
                "key": problem.key,
                "value": problem.value,
                "cotangent": problem.cotangent,
                "mask": problem.allowed,
                "attn_bias": problem.attn_bias,
            }
            for name, array in arrays.items():
                if array is not None:
                    digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()[:16]
