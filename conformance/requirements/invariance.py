"""Requirements that answers are invariant under changes that must not affect them.

Each check calls the implementation with two or more problems and compares the answers. In some
checks, the problems differ in what must not matter: in blocked keys, the order of keys, other batch
entries, or a shift of logits or positions. In others, they are ways to pose one problem: for
example, a window that includes all keys and no window, or a packed sequence and the same sequence
alone, or decoding in steps with a KV cache and a single pass. The checks use the reference only for
the size of the noise, so an answer that is wrong in the same way for all of these problems is not
reported here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.adapter.handing import Cache
from conformance.cases.patterns import other_mask
from conformance.definition.attention import merge
from conformance.definition.comparison import Comparison, between, compare
from conformance.definition.dtypes import Array, BoolArray
from conformance.definition.problem import Positions, Problem
from conformance.definition.statistics import LOG_SUM_EXP
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import judge, requirement, returns


def _between(ex: Examination, name: str, one: Array, other: Array, noise: Array) -> Comparison:
    return between(name, one, other, noise, ex.expectation.underflow)


def _rows(ex: Examination, name: str, one: Array, other: Array, rows: BoolArray) -> Comparison:
    """Compare the array `name` of two answers only where `rows` `[batch length]` is True."""
    same = np.where(rows[..., None], other, one)
    return _between(ex, name, one, same, ex.expectation.sigma[name])


def with_other_content(problem: Problem, tokens: BoolArray, random: np.random.Generator) -> Problem:
    """Return the problem with new random keys and values where `tokens` `[batch key]` is True.

    In self-attention, the queries at these tokens change too.
    """
    changed = {}
    for name in problem.shape.distinct_inputs():
        if name == "query" and problem.shape.sharing != "self":
            continue
        values = getattr(problem, name).copy()
        fresh = problem.format.round(4.0 * random.standard_normal(values.shape))
        values[tokens] = fresh[tokens]
        changed[name] = values
    return problem.with_inputs(**changed)


def _influenced(problem: Problem, tokens: BoolArray) -> BoolArray:
    """Return True for queries `[batch query]` whose output may depend on `tokens` `[batch key]`."""
    seen: BoolArray = np.any(problem.allowed_in_full() & tokens[:, None, None, :], axis=(1, 3))
    return seen | tokens if problem.shape.sharing == "self" else seen


def _unseen(problem: Problem) -> BoolArray:
    """Return True for keys `[batch key]` that are blocked for all queries in all heads."""
    return np.logical_not(problem.allowed_in_full().any(axis=(1, 2)))


def _blocked_tokens(problem: Problem) -> BoolArray:
    """Return True for keys `[batch key]` that are blocked for all queries in all heads.

    If the whole batch has no such key, return True in each entry for one key: the one that is
    blocked in all heads for the largest number of queries.
    """
    never = _unseen(problem)
    if never.any():
        return never
    hidden_from = (~problem.allowed_in_full().any(axis=1)).sum(axis=1)
    keys = np.arange(problem.shape.key_length)
    return np.asarray(keys == hidden_from.argmax(axis=-1)[:, None])


@requirement(
    "mask.blocked-key-has-no-influence",
    "A blocked key influences nothing: not the output of a query that may not attend to it, "
    "and its own gradient is zero where no query may.",
    why="Padding that leaks makes answers depend on how a batch was padded.",
)
def blocked_key(ex: Examination) -> Finding:
    """Replace blocked keys and their values with random numbers about four times as large. The
    outputs of queries that may not attend to these keys must stay the same. If some keys are
    blocked for all queries, and this is not self-attention, the gradients of those queries must
    stay the same too, and the gradients of these keys and their values must be exactly 0."""
    problem, answer = ex.problem, ex.answer
    tokens = _blocked_tokens(problem)
    again = ex.ask(with_other_content(problem, tokens, ex.case.random("blocked")))
    unmoved = ~_influenced(problem, tokens)
    compared = [_rows(ex, "output", answer.output, again.output, unmoved)]
    unseen = _unseen(problem)
    if problem.shape.sharing != "self" and unseen.any():
        underflow = ex.expectation.underflow
        for name in [name for name in ("key", "value") if name in answer.gradients]:
            gradient = answer.gradients[name]
            zeroed, exact = np.where(unseen[..., None], 0.0, gradient), np.zeros_like(gradient)
            compared.append(compare(f"gradient.{name}", gradient, zeroed, exact, underflow))
        if "query" in answer.gradients:
            one, other = answer.gradients["query"], again.gradients["query"]
            compared.append(_rows(ex, "gradient.query", one, other, unmoved))
    return judge(blocked_key.id, compared, said="a blocked key moves {array}")


@requirement(
    "invariance.key-order",
    "The order of keys does not matter when values, mask and bias move along.",
    why="Attention is a sum over keys; a dropped or repeated tile makes their order matter.",
)
def key_order(ex: Examination) -> Finding:
    """Permute keys, values, mask and bias in the same way. The output must stay the same, and the
    gradients of keys and values must be permuted too. In self-attention, queries and the rows of
    the output are also permuted."""
    problem = ex.problem
    order = ex.case.random("order").permutation(problem.shape.key_length)
    rows_move = problem.shape.sharing == "self"
    masks: dict[str, Any] = {"mask": problem.allowed, "attn_bias": problem.attn_bias}
    for axis in (-1, -2) if rows_move else (-1,):
        for name, array in masks.items():
            if array is not None and array.shape[axis] > 1:
                masks[name] = np.take(array, order, axis=axis)
    permuted = problem.replace(causal=None, **masks)
    if rows_move:
        # Tokens are queries too, so the rows of the output are permuted with them.
        permuted = permuted.replace(cotangent=problem.cotangent[:, order])
        moved = {"query"}
    else:
        moved = {*problem.shape.distinct_inputs()} - {"query"}
    inputs = {name: getattr(problem, name)[:, order] for name in moved}
    again = ex.ask(permuted.with_inputs(**inputs)).arrays()
    again.pop("weights", None)
    of_tokens = {f"gradient.{name}" for name in moved} | ({"output"} if rows_move else set())
    compared = []
    for name, one in ex.answer.arrays().items():
        if name not in again:
            continue
        noise = ex.expectation.sigma[name]
        if name in of_tokens:
            one, noise = one[:, order], noise[:, order]
        elif name == "gradient.attn_bias":
            one, noise = one[..., order], noise[..., order]
        compared.append(_between(ex, name, one, again[name], noise))
    return judge(key_order.id, compared, said="{array} depends on the order of the keys")


@requirement(
    "invariance.batch-entries-are-independent",
    "Entries of a batch do not influence each other.",
    why="A mask or a tile of a neighbouring entry goes unnoticed while entries are equal.",
)
def batch_entries(ex: Examination) -> Finding:
    """Replace the inputs of all batch entries except the last, and also their masks if each entry
    has its own mask. The output and the input gradients of the last entry must stay the same up to
    rounding noise."""
    problem, last = ex.problem, ex.problem.shape.batch - 1
    random = ex.case.random("batch")
    inputs = {}
    for name in problem.shape.distinct_inputs():
        values = problem.format.round(2.0 * random.standard_normal(getattr(problem, name).shape))
        values[last] = getattr(problem, name)[last]
        inputs[name] = values
    changes = {}
    if problem.mask is not None and problem.mask.shape[0] > 1:
        changes["mask"] = other_mask(problem.mask)
        changes["mask"][last] = problem.mask[last]
    again = ex.ask(problem.with_inputs(**inputs).replace(**changes)).arrays()
    names = ["output", *(f"gradient.{name}" for name in inputs)]
    compared = [
        _between(ex, name, one[last], again[name][last], ex.expectation.sigma[name][last])
        for name, one in ex.answer.arrays().items()
        if name in names and name in again
    ]
    said = "{array} of one batch entry depends on the others"
    return judge(batch_entries.id, compared, said=said)


@requirement(
    "invariance.logit-shift",
    "A constant added to a row of logits changes nothing.",
    why="A softmax ignores it; one that does not subtract the row's maximum may not.",
)
def logit_shift(ex: Examination) -> Finding:
    """Add an integer between -3 and 3 to each row of the additive bias. The bias is first clipped
    and rounded so that the sum is exact. The output must stay the same up to rounding noise."""
    problem = ex.problem
    if problem.attn_bias is None:
        raise Unsupported("no additive bias to shift")
    # Multiples of 1/16 below 4, plus integers up to 3, are exact even in bfloat16, so the two
    # problems differ by exactly the integer.
    bias = np.clip(np.rint(problem.attn_bias * 16) / 16, -3.5, 3.5)
    rows = ex.case.random("shift").integers(-3, 4, (*problem.shape.logits[:3], 1))
    shifted = problem.replace(attn_bias=bias + rows)
    noise = ex.expected("shifted", lambda: shifted).sigma["output"]
    one, other = ex.ask(problem.replace(attn_bias=bias)).output, ex.ask(shifted).output
    compared = [_between(ex, "output", other, one, noise)]
    return judge(logit_shift.id, compared, said="a constant added to a row of logits moves {array}")


# Two ways to pose one problem. Most of these checks apply only to implementations that declare an
# argument for the feature, because other implementations would get the same mask twice.

SHIFT = 64
"""The number by which all positions are shifted."""


def _applies(ex: Examination, feature: str) -> bool:
    """Return whether the adapter declares the feature, and `ex.varies_arguments` is True."""
    return ex.varies_arguments and any(feature in each.covers for each in ex.adapter.features)


def _same(
    ex: Examination,
    name: str,
    one: Problem,
    other: Problem,
    variant: str,
    said: str,
    noisy: Problem | None = None,
) -> Finding:
    """Return the finding on whether two problems get equal answers, up to the noise of `other`.

    The expectation for `other` is cached under `variant`. `name` is the id of the requirement.
    `said` describes a deviation; in it, `{array}` stands for the name of the array. If `noisy` is
    given, the noise is that of this problem, whose expectation is cached instead.
    """
    noise = ex.expected(variant, lambda: noisy or other).sigma
    first, second = ex.ask(one).arrays(), ex.ask(other).arrays()
    return _judged(ex, name, {n: a for n, a in first.items() if n in noise}, second, noise, said)


def _void(
    ex: Examination,
    name: str,
    feature: str,
    variant: str,
    said: str,
    noisy: Callable[[Problem, Mapping[str, Any]], Problem] = lambda problem, _: problem,
) -> Finding | None:
    """Return the finding on whether a feature without effect changes the answer.

    Return None if the problem or the implementation does not have the feature. `noisy` returns the
    problem whose noise counts, from the one without the feature and the fields that are void. The
    other arguments are those of `_same`.
    """
    entry = next((entry for entry in ex.problem.entries if entry.name == feature), None)
    if entry is None or not _applies(ex, feature):
        return None
    void, without = entry.void(ex.problem), entry.absent
    one, other = ex.problem.replace(**void), ex.problem.replace(**without)
    return _same(ex, name, one, other, variant, said, noisy(other, void))


def _cap_as_bias(problem: Problem, void: Mapping[str, Any]) -> Problem:
    """Return a problem with a cap as a bias of all keys and sinks, which only adds to its noise.

    In half precision, caps are applied in float32, so the problem is returned as it is.
    """
    if problem.format.roundoff > problem.format.accumulator:
        return problem
    cap, bias = void["soft_cap"], np.zeros(problem.shape.logits)
    if problem.attn_bias is not None:
        bias = bias + problem.attn_bias
    sinks = None if problem.sinks is None else problem.sinks + cap
    return problem.replace(attn_bias=bias + cap, sinks=sinks)


def _judged(
    ex: Examination,
    name: str,
    one: Mapping[str, Array],
    other: Mapping[str, Array],
    noise: Mapping[str, Array],
    said: str,
) -> Finding:
    """Return the finding on whether the arrays that two answers have in common are equal.

    The arrays of `one` and `other` are compared up to `noise`. Arrays of `one` whose shape is not
    that of their noise are left out. `name` is the id of the requirement. `said` describes a
    deviation; in it, `{array}` stands for the name of the array.
    """
    compared = [
        _between(ex, array, values, other[array], noise[array])
        for array, values in one.items()
        if array in other and noise[array].shape == values.shape
    ]
    return judge(name, compared, said=said)


@requirement(
    "window.of-everything-is-none",
    "A window that is wider than the sequence changes nothing.",
    why="It tells a limit that is counted otherwise, or from another end, from one that is right.",
    cases=("feature/window/*", "feature/window-causal/*", "feature/gpt-oss/*"),
)
def wide_window(ex: Examination) -> Finding | None:
    """Call the implementation with a window that includes all keys, and without a window. Both
    answers must be equal up to rounding noise."""
    said = "a window of everything moves {array}"
    return _void(ex, wide_window.id, "window", "no window", said)


@requirement(
    "soft-cap.far-above-is-none",
    "A soft cap far above all logits changes nothing.",
    why="A cap that is applied to something else than the logits, or beside a mask, shows.",
    cases=("feature/soft-cap*",),
)
def high_cap(ex: Examination) -> Finding | None:
    """Call the implementation with a soft cap far above the logits, and without one. Both answers
    must be equal up to rounding noise, as it is if the cap is added to the logits: of a tanh that
    is made of exponentials, each rounding counts as much as one of 1."""
    said = "a soft cap far above the logits moves {array}"
    return _void(ex, high_cap.id, "soft cap", "no soft cap", said, _cap_as_bias)


@requirement(
    "sinks.far-below-are-none",
    "Sinks far below all logits change nothing.",
    why="Sinks that are added as a constant, or that get a value, show.",
    cases=("feature/sinks*", "feature/soft-cap-with-sinks/*", "feature/gpt-oss/*"),
)
def low_sinks(ex: Examination) -> Finding | None:
    """Call the implementation with sinks of −30,000, and without sinks. Both answers must be equal
    up to rounding noise, except for the gradient of the sinks."""
    return _void(ex, low_sinks.id, "sinks", "no sinks", "sinks far below move {array}")


@requirement(
    "alibi.slopes-of-0-are-none",
    "Slopes of 0 change nothing.",
    why="An implementation that makes slopes of its own ignores those that it is given.",
    cases=("feature/alibi*",),
)
def no_slopes(ex: Examination) -> Finding | None:
    """Call the implementation with ALiBi slopes of 0, and without slopes. Both answers must be
    equal up to rounding noise."""
    return _void(ex, no_slopes.id, "alibi", "no slopes", "slopes of 0 move {array}")


@requirement(
    "positions.shift-changes-nothing",
    "Only differences of positions matter: all of them may be shifted.",
    why="Tables that end, positions in few bits and a rotation that is not relative show far out.",
    cases=("feature/rotary/*", "feature/rotary-*", "feature/alibi/*", "feature/segments-with-*"),
)
def shift(ex: Examination) -> Finding | None:
    """Shift the positions of all queries and keys by 64. The answer must be the same up to rounding
    noise. Only implementations that declare an argument for positions are checked."""
    if not _applies(ex, "positions"):
        return None
    problem = ex.problem
    there = Positions(query=problem.position_of_queries, key=problem.position_of_keys)
    far = Positions(query=there.query + SHIFT, key=there.key + SHIFT)
    one, other = (problem.replace(positions=positions) for positions in (there, far))
    return _same(ex, shift.id, one, other, "shifted", "shifted positions move {array}")


def part_of(problem: Problem, entries: slice, queries: BoolArray, keys: BoolArray) -> Problem:
    """Return the problem with only some batch entries, queries and keys.

    `queries` `[query]` and `keys` `[key]` are True for the tokens to keep. The problem must have no
    segments, positions or lengths. If query and key are one array, the same tokens must be kept of
    both, or `Unsupported` is raised.
    """
    shape = problem.shape

    def cut(array: Any, *axes: BoolArray | None) -> Any:
        """Return the kept part of an array, or None for None; axes of size 1 are not cut."""
        if array is None:
            return None
        array = array[entries] if array.shape[0] > 1 else array
        for axis, kept in enumerate(axes, start=1):
            if kept is not None and array.shape[axis] == len(kept):
                array = np.compress(kept, array, axis=axis)
        return array

    if shape.sharing == "self" and not np.array_equal(queries, keys):
        raise Unsupported("its queries are its keys")
    inputs = {
        name: cut(getattr(problem, name), queries if name == "query" else keys)
        for name in shape.distinct_inputs()
    }
    if any(entry.whole for entry in problem.entries):
        raise AssertionError("only what all tokens share can be cut")
    return problem.replace(
        shape=replace(
            shape,
            batch=len(inputs["query"]),
            query_length=int(queries.sum()),
            key_length=int(keys.sum()),
        ),
        **shape.spread(inputs),
        cotangent=cut(problem.cotangent, queries),
        mask=cut(problem.mask, None, queries, keys),
        attn_bias=cut(problem.attn_bias, None, queries, keys),
    )


@requirement(
    "packed.members-are-alone",
    "Each sequence of a packed batch gets the answer that it gets alone.",
    why="Documents that see each other, or positions that go on, train on another text silently.",
    cases=("feature/segments/*", "feature/segments-causal/*", "feature/segments-with-*"),
)
def members(ex: Examination) -> Finding | None:
    """Pass each packed sequence of the last batch entry separately, unless it has no keys. Its
    output and the gradients of its inputs must equal those of the packed batch up to rounding
    noise."""
    segments, answer = ex.problem.segments, ex.answer.arrays()
    if segments is None or not _applies(ex, "segments"):
        return None
    entry = slice(ex.problem.shape.batch - 1, None)
    whole, noise = ex.problem.replace(segments=None), ex.expectation.sigma
    parts: tuple[dict[str, list[Array]], ...] = (
        defaultdict(list),
        defaultdict(list),
        defaultdict(list),
    )
    packed, alone, sigmas = parts
    for number in np.unique(segments.query[-1]):
        queries, keys = segments.query[-1] == number, segments.key[-1] == number
        if not keys.any():
            continue
        again = ex.ask(part_of(whole, entry, queries, keys)).arrays()
        for name, rows in _rows_of_tokens(ex.problem, queries, keys).items():
            if name in again and name in answer:
                packed[name].append(answer[name][-1][rows])
                alone[name].append(again[name][0])
                sigmas[name].append(noise[name][-1][rows])
    joined = [{name: np.concatenate(each) for name, each in found.items()} for found in parts]
    said = "{array} of a packed sequence is not what it is alone"
    return _judged(ex, members.id, joined[0], joined[1], joined[2], said)


def _rows_of_tokens(problem: Problem, queries: BoolArray, keys: BoolArray) -> dict[str, BoolArray]:
    """Return, by array name, booleans `[length]` that are True for the rows of these tokens.

    The arrays are the output and the input gradients; `queries` and `keys` mark the tokens.
    """
    of_inputs = {"query": queries, "key": keys, "value": keys}
    inputs = {f"gradient.{name}": of_inputs[name] for name in problem.shape.distinct_inputs()}
    return {"output": queries, **inputs}


@requirement(
    "cache.steps-equal-the-whole",
    "Queries that come one after the other beside a cache get what they get all at once.",
    why="A causal mask aligned top-left hides the history from every chunk after the first.",
    cases=(
        "causal/bottom-right/cross",
        "feature/*-causal/gqa",
        "feature/*-causal/separate",
        "feature/cache-*",
        "feature/gpt-oss/*",
    ),
    revision=2,
)
def steps(ex: Examination) -> Finding | None:
    """Pass the queries in several steps, as in decoding with a KV cache. The first step has one
    query, and each further step has the next two, or the one that is left; the keys of a step are
    those up to the position of its last query. If a cache is declared, earlier keys are passed in
    it. The outputs must equal those of a single pass, and the gradients must add up to its
    gradients, both up to rounding noise."""
    problem = ex.problem
    if any(entry.whole for entry in problem.entries) or not ex.varies_arguments:
        return None
    if problem.causal != "bottom-right" or problem.shape.sharing == "self":
        return None
    noise, whole = ex.expectation.sigma, ex.answer.arrays()
    found = {name: np.zeros_like(array) for name, array in whole.items() if name != "weights"}
    for queries, keys in _chunks(problem):
        part = part_of(problem, slice(None), queries, keys)
        rows = _rows_of_tokens(problem, queries, keys)
        answer = ex.ask(part, spelling=_beside_cache(ex, part))
        for name, array in answer.arrays().items():
            if name in rows:
                found[name][:, rows[name]] += array
            elif name == "gradient.attn_bias":
                at = np.ix_(*(np.arange(n) for n in array.shape[:2]), queries, keys)
                if found[name].shape[2:] != problem.shape.logits[2:]:
                    continue
                found[name][at] += array
            elif name in found:
                found[name] += array
    said = "{array} in steps beside a cache is not that of the whole pass"
    return _judged(ex, steps.id, whole, found, noise, said)


def _beside_cache(ex: Examination, problem: Problem) -> Spelling | None:
    """Return the encoding of a problem that passes its first keys in a cache; None without one."""
    if not any(isinstance(one, Cache) for one in ex.adapter.features):
        return None
    every = ex.adapter.masks.spellings(problem)
    return next((it for it in every if it.handing and it.handing.held is not None), None)


@requirement(
    "log-sum-exp.merges-parts",
    "The outputs over parts of the keys, merged by their log-sum-exps, are the output over all.",
    why="Ring attention, split keys and cascades do this. A log-sum-exp in another base, or of "
    "another maximum than the output's, is right alone and wrong in the pair.",
    cases=(
        "plain/no-mask/*",
        "mask/shared/*",
        "mask/per-batch/*",
        "mask/blocked-start/*",
        "logits/*",
        "feature/sinks/*",
        "feature/sinks-with-mask/*",
    ),
    where=returns(LOG_SUM_EXP),
)
def merges_parts(ex: Examination) -> Finding | None:
    """Call the function on projected heads with each third of the keys; a sink is passed with the
    last third only. Merge the outputs by the returned log-sum-exps, that of a query without keys
    being −∞. The result must be the output of a call with all keys, up to rounding noise. If calls
    are compiled, only one family of shapes is checked."""
    declared = ex.adapter.log_sum_exp_in(ex.mode)
    if declared is None or not ex.adapter.projections_supplied or not ex.varies_arguments:
        return None
    if ex.adapter.compiles and ex.case.family != "cross":
        return None
    whole, keys = ex.kernel_problem, np.arange(ex.problem.shape.key_length)
    if whole.sinks is not None and not declared.includes_sink:
        return None
    third = -(-len(keys) // 3)
    everyone = np.ones(whole.shape.query_length, np.bool_)
    parts = []
    for number in range(3):
        kept = keys // third == number
        if not kept.any():
            continue
        last = number == (len(keys) - 1) // third
        part = part_of(whole, slice(None), everyone, kept)
        part = part if last else part.replace(sinks=None)
        seen = part.allowed_in_full().any(axis=-1)
        answer = ex.ask(part, projected=True)
        if LOG_SUM_EXP.name not in answer.statistics:
            raise Unsupported("returns no log-sum-exp")
        nothing = np.asarray(~seen & (part.sinks is None))
        sums = np.where(nothing, -np.inf, answer.statistics[LOG_SUM_EXP.name])
        parts.append((np.where(nothing[..., None], 0.0, _by_head(answer.output, part)), sums))
    merged, _ = merge(*parts)
    together = merged.transpose(0, 2, 1, 3).reshape(ex.kernel_answer.output.shape)
    noise = ex.kernel_expectation.sigma["output"]
    compared = [_between(ex, "output", ex.kernel_answer.output, together, noise)]
    return judge(merges_parts.id, compared, said="{array} of merged parts is not that of all keys")


def _by_head(output: Array, problem: Problem) -> Array:
    """Return the output of a problem on heads alone as `[batch heads query value_head]`."""
    batch, queries, _ = output.shape
    return output.reshape(batch, queries, problem.shape.heads, -1).transpose(0, 2, 1, 3)


def _chunks(problem: Problem) -> Iterator[tuple[BoolArray, BoolArray]]:
    """Yield booleans for each step of the check `steps`: its queries `[query]` and keys `[key]`."""
    queries, keys = np.arange(problem.shape.query_length), np.arange(problem.shape.key_length)
    cached, start = len(keys) - len(queries), 0
    while start < len(queries):
        stop = min(start + (2 if start else 1), len(queries))
        yield (queries >= start) & (queries < stop), keys < cached + stop
        start = stop


@requirement(
    "lengths.nothing-beyond-is-read",
    "What lies beyond the length of an entry is never read.",
    level="should",
    why="A buffer of a cache holds anything there: NaN times a weight of 0 is NaN.",
)
def beyond(ex: Examination) -> Finding | None:
    """Put NaN into queries, keys and values beyond the lengths of the batch entries. The output of
    all queries that attend to a key, and the gradients of the inputs, must stay the same up to
    rounding noise."""
    problem = ex.problem
    if not _applies(ex, "key lengths"):
        return None
    of_queries, of_keys = problem.query_lengths, problem.key_lengths
    spoilt = {}
    for name in problem.shape.distinct_inputs():
        used = [of_queries if name == "query" else of_keys]
        if problem.shape.sharing == "self":
            used = [of_queries, of_keys]
        length = problem.shape.input_shapes()[name][1]
        every = np.full(problem.shape.batch, length)
        lengths = [every if own is None else own for own in used]
        past = np.arange(length) >= np.max(lengths, axis=0)[:, None]
        spoilt[name] = np.where(past[..., None], np.nan, getattr(problem, name))
    names = ["output", *(f"gradient.{name}" for name in spoilt)]
    again = ex.ask(problem.with_inputs(**spoilt)).arrays()
    got = {name: array for name, array in again.items() if name in names}
    said = "NaN beyond the lengths reaches {array}"
    return _judged(ex, beyond.id, got, ex.answer.arrays(), ex.expectation.sigma, said)
