"""Requirements that an answer does not depend on how, when and with what else a call is made.

Equivalent calls must give equal answers, whether or not these are correct. The calls differ in the
mode, in the encoding of the mask, in the memory layout, in the dropout probability of a mode
without dropout, in which arguments need a gradient or are one array, in the number of backward
passes, in what their arguments held before, or in the lengths that a layer has served before. Other
checks repeat one call on the same objects; the call must change neither these objects nor earlier
answers nor the state of the process. Several checks skip frameworks that compile, because there
derivatives are functions and arrays are immutable.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from conformance.adapter.arguments import Spelling
from conformance.cases.patterns import other_mask
from conformance.definition.comparison import Comparison, all_between, compare
from conformance.definition.problem import Answer, Problem
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination, RaisedInside
from conformance.requirements.requirement import judge, requirement

MASKED = ("edge/fully-masked-row/*",)
"""Patterns for the ids of cases with a fully masked query. The definition leaves the output of this
query open, but all calls to one implementation must give the same output."""

LAID_OUT: Mapping[Literal["gaps", "transposed", "window"], str] = {
    "gaps": "laid out with gaps",
    "transposed": "transposed in memory",
    "window": "a view into a larger array",
}


def _equal(name: str, ex: Examination, one: Answer, other: Answer, said: str) -> Finding:
    """Return the finding on whether two answers are equal, up to the noise of both.

    Arrays that only one answer has are left out, as are arrays whose shapes differ from each other
    or from the shape in the expectation, and weights if `ex.answer` has none. If no array remains,
    raise `Unsupported`. `name` is the id of the requirement. `said` describes a deviation; in it,
    `{array}` stands for the name of the array.
    """
    ones, others = one.arrays(), other.arrays()
    if ex.answer.weights is None:
        ones.pop("weights", None)
    noise = ex.suited_expectation.sigma
    common = {
        name: array
        for name, array in ones.items()
        if name in others and array.shape == others[name].shape == noise[name].shape
    }
    if not common:
        raise Unsupported("the two answers have no array in common")
    compared = all_between(common, others, noise, ex.expectation.underflow)
    return judge(name, compared, said=said)


def _alike(
    name: str, ex: Examination, one: Answer, other: Answer, problem: Problem, said: str
) -> Finding:
    """Return the finding on whether output and weights of two answers to `problem` are equal.

    They are compared up to the noise of both, and weights only if they are per head. `said`
    describes a deviation, as in `judge`.
    """
    expected = ex.expected(f"{name} {problem.shape}", problem.replace)
    others = other.arrays()
    common = {
        name: array
        for name, array in one.arrays().items()
        if name in ("output", "weights") and name in others
        if array.shape == expected.arrays[name].shape
    }
    compared = all_between(common, others, expected.sigma, expected.underflow)
    return judge(name, compared, said=said)


@requirement(
    "modes.agree",
    "Modes that mean the same (weights asked for or not, fast and slow path, training and "
    "evaluation without dropout) give the same output, weights and gradients.",
    why="Otherwise asking for the weights, or switching to evaluation, changes the model.",
    every_case=True,
    cases=MASKED,
)
def modes(ex: Examination) -> Finding | None:
    """Compare the answer in this mode, array by array, with that in the adapter's first mode.
    Arrays that only one of the two answers has, or that have different shapes, are left out."""
    first = ex.adapter.modes[0]
    if ex.mode.name == first.name:
        return None
    said = f"{{array}} in mode {ex.mode.name} is not that in mode {first.name}"
    return _equal(modes.id, ex, ex.answer, ex.answer_in(first), said)


@requirement(
    "mask.spellings-agree",
    "Spellings of a mask that mean the same (boolean or additive, one argument or two, "
    "causal flag or explicit mask) give the same output and gradients.",
    why="People switch between them without a second thought.",
    cases=MASKED,
)
def spellings(ex: Examination) -> Finding | None:
    """Compare the answers for different encodings of the mask, the causal mask and the bias. The
    adapter's declarations determine the encodings (boolean or additive, in one argument or two, by
    the causal flag or as an explicit mask). Up to 7 of them, or 3 if calls are compiled, are
    compared with the preferred one, until one deviates."""
    if not ex.varies_arguments:
        return None
    every = _spellings(ex)
    if not every:
        ex.adapter.masks.spell(ex.problem)
    if len(every) < 2:
        return None
    for spelling in every[1:]:
        again = _spelled(ex, spelling)
        said = f"{{array}} with {spelling.label} is not that with {every[0].label}"
        finding = _equal(spellings.id, ex, again, ex.answer, said)
        if finding.verdict != "conforms":
            break
    return finding


def _spellings(ex: Examination) -> list[Spelling]:
    """Return up to 8 encodings of the masks, or 4 if calls are compiled, the preferred one first.

    The list is empty if the adapter cannot express the problem.
    """
    most = 4 if ex.adapter.compiles else 8
    key = ("spellings", id(ex.adapter), ex.case.id, ex.dtype)
    return ex.bench.answers.get(
        key, lambda: list(itertools.islice(ex.adapter.masks.spellings(ex.problem), most))
    )


def _spelled(ex: Examination, spelling: Spelling) -> Answer:
    """Return the answer to the case in an encoding of its masks.

    It is that of a call in which `call.leaves-inputs-unchanged` looks for changes, if it does.
    """
    if _watches_spellings(ex):
        return ex.side_effects(spelling).first
    return ex.ask(ex.problem, spelling=spelling)


def _watches_spellings(ex: Examination) -> bool:
    """Return whether `call.leaves-inputs-unchanged` tries the encodings of the mask, too."""
    both = unchanged.serves(ex.case) and spellings.serves(ex.case)
    return both and ex.calls_eagerly and not ex.adapter.compiles


def _changed(name: str, lines: tuple[str, ...]) -> Finding:
    return Finding(name, "deviates" if lines else "conforms", detail="; ".join(lines))


@requirement(
    "call.leaves-inputs-unchanged",
    "A call changes neither its inputs nor anything attached to them.",
    why="The next layer reads the same tensors.",
    cases=("bias/with-mask/cross", "bias/high-on-padding/cross"),
    revision=5,
)
def unchanged(ex: Examination) -> Finding | None:
    """Call the implementation twice on the same objects, and look for changes in them. Inputs,
    masks, parameters and the gradient of the output must hold the same numbers as before, and must
    not have new attributes. So must the heads, pages and caches that a function is given, except
    for memory that no token uses, and for the places of a ring. If the requirement
    `mask.spellings-agree` is also checked with the case, and calls are not compiled, the encodings
    of the mask that it compares are passed too, until a change is found. An encoding for which the
    implementation raises an exception is skipped."""
    if not ex.calls_eagerly:
        return None
    changed = ex.side_effects().changed
    if not changed and _watches_spellings(ex):
        for spelling in _spellings(ex)[1:]:
            # If an encoding is refused, `mask.spellings-agree` reports it.
            with suppress(RaisedInside):
                effects = ex.side_effects(spelling)
                changed = tuple(f"with {spelling.label}: {line}" for line in effects.changed)
            if changed:
                break
    return _changed(unchanged.id, changed)


@requirement(
    "call.repeats",
    "The same call on the same objects gives the same answer.",
    why="State left behind by the first call makes results depend on history.",
)
def repeats(ex: Examination) -> Finding | None:
    """Call the implementation twice on the same objects, and compare the two answers."""
    if not ex.calls_eagerly:
        return None
    effects = ex.side_effects()
    said = "{array} of the second call is not that of the first"
    return _equal(repeats.id, ex, effects.second, effects.first, said)


@requirement(
    "call.leaves-global-state-alone",
    "A call leaves alone what the whole process shares: random generators, default dtypes, "
    "numbers of threads, precisions, the environment, the current directory.",
    level="should",
    why="Whoever is called next computes something else, and nobody looks for the reason here.",
)
def surroundings(ex: Examination) -> Finding | None:
    """Call the implementation twice, and compare the state of the process before and after. This
    state consists of random generators, the settings of NumPy's error handling and of the
    framework, the environment and the current directory."""
    return _changed(surroundings.id, ex.side_effects().surroundings) if ex.calls_eagerly else None


@requirement(
    "gradient.does-not-depend-on-what-is-frozen",
    "Output and gradients are the same whichever of the arguments need a gradient, and "
    "the output also if none does.",
    why="Fine-tuning, frozen encoders and inference need some gradients or none; a separate code "
    "path for that may compute something else, or leave out a gradient.",
    cases=("feature/soft-cap-with-mask/cross",),
)
def frozen(ex: Examination) -> Finding | None:
    """Compute gradients for one argument at a time, and then for none at all. The arguments are the
    inputs, the bias, and all parameters together. The output and the gradients that are asked for
    must equal those of a call with gradients for all arguments, and none of them may be missing."""
    if ex.adapter.compiles or not ex.answer.gradients:
        return None
    problem = ex.problem
    parts = [*problem.shape.distinct_inputs(), "weights"]
    parts += ["attn_bias"] if problem.attn_bias is not None else []
    for part in (*parts, ""):
        again = ex.ask(problem, wanted=frozenset({part} - {""}))
        when = f"if only {part} needs one" if part else "if nothing needs a gradient"
        lost = ex.answer.gradients.keys() - again.gradients.keys()
        for name in sorted(lost):
            if name.split(".")[0] == part:
                return Finding(frozen.id, "deviates", detail=f"there is no gradient.{name} {when}")
        finding = _equal(frozen.id, ex, again, ex.answer, f"{{array}} is another {when}")
        if finding.verdict != "conforms":
            break
    return finding


@requirement(
    "call.without-gradients-is-the-same",
    "A call for which nothing needs a gradient gives the same output and weights.",
    why="Frameworks take another path for inference, which nobody looks at in training.",
    cases=("plain/no-mask/*", "causal/*", "mask/key-padding/*", "bias/in-full/*", "feature/*"),
)
def inference(ex: Examination) -> Finding | None:
    """Call the implementation without gradients, as in inference, and compare output and weights
    with those of the call that computes them. The check is skipped if calls are compiled, and in
    modes without gradients."""
    if ex.adapter.compiles or not ex.answer.gradients:
        return None
    again = ex.ask(ex.problem, wanted=frozenset())
    return _equal(inference.id, ex, again, ex.answer, "{array} is another without gradients")


@requirement(
    "gradient.asked-for-twice-is-the-same",
    "Gradients asked for twice through the same graph are the same.",
    why="Two losses, or a Jacobian row by row, go back through one forward pass; what the first "
    "backward pass writes over is wrong in the second.",
    cases=(
        "plain/no-mask/cross",
        "feature/sinks-with-mask/cross",
        "feature/soft-cap-with-mask/cross",
    ),
)
def twice(ex: Examination) -> Finding | None:
    """Run the backward pass twice through the graph of one forward pass. The gradients of the
    second pass must equal those of a single backward pass."""
    if ex.adapter.compiles or not ex.answer.gradients:
        return None
    again = ex.ask(ex.problem, backwards=2)
    return _equal(twice.id, ex, again, ex.answer, "{array} of the second backward pass is another")


@requirement(
    "call.reads-what-its-arguments-hold-now",
    "A call reads the numbers that its arguments hold now, not those that they held in an "
    "earlier call.",
    why="Servers write into their buffers, and optimisers into weights; a cache by identity is "
    "then stale.",
    cases=("plain/no-mask/cross",),
    revision=2,
)
def rewritten(ex: Examination) -> Finding | None:
    """Call the implementation again after its arguments have been overwritten in place. The first
    call gets other numbers; the second call gets the numbers of the case in the same arrays. The
    second answer must equal the answer for new arrays, which it does not if the implementation
    caches results by the identity of its arguments. The same is done with other weights only."""
    if ex.adapter.compiles:
        return None
    weights = ex.problem.weights.named()
    earlier = ex.problem.with_weights(**{name: np.flip(w, 0) for name, w in weights.items()})
    for other, what in ((_other(ex), "numbers"), (earlier, "weights")):
        said = f"{{array}} is not that of the {what} it was given last"
        finding = _equal(rewritten.id, ex, ex.ask_rewritten(other), ex.answer, said)
        if finding.verdict != "conforms":
            break
    return finding


@requirement(
    "call.leaves-earlier-answers-alone",
    "A call does not change what earlier calls returned, nor the gradients that are still to come.",
    why="An output in a workspace that is used again changes under whoever still holds it. Where "
    "there are two layers, both are called before the backward pass of the first.",
    cases=("plain/no-mask/cross", "plain/no-mask/self", "mask/key-padding/separate"),
    revision=3,
)
def kept(ex: Examination) -> Finding | None:
    """Call the implementation, and again with other numbers of the same shapes. Output, weights and
    gradients of the first call must then hold the same numbers as before the second. The gradients
    must also be the same if the second call comes between the first call and its backward pass. The
    output is asked for without gradients, too; a function is then given heads that are projected
    already."""
    if ex.adapter.compiles:
        return None
    later = _other(ex)
    before, after = ex.ask_reread(later)
    said = "{array} of an earlier call is changed by the next"
    finding = _equal(kept.id, ex, after, before, said)
    if finding.verdict == "deviates":
        return finding
    with suppress(Unsupported):
        if ex.answer.gradients:
            said = "{array} is another if the next call comes before the backward pass"
            finding = _equal(kept.id, ex, ex.ask_interrupted(later), ex.answer, said)
            if finding.verdict == "deviates":
                return finding
    earlier, now = (answer.arrays() for answer in ex.reread_in_inference(later))
    changed = tuple(
        f"without gradients, {name} of an earlier call is changed by the next"
        for name, array in earlier.items()
        if not np.array_equal(array, now[name], equal_nan=True)
    )
    return _changed(kept.id, changed) if changed else finding


@requirement(
    "call.takes-one-array-twice",
    "Query and key that are one array, beside another value, or key and value that are a view of "
    "the query's first tokens, give the same answer as separate arrays. So do query, key and value "
    "of a function that are one array, whose gradient is the sum of those of all three.",
    why="Code that takes `query is key` for self-attention, or compares addresses, projects the "
    "wrong array: DETR passes (x, x, v).",
    cases=("plain/no-mask/self",),
    revision=2,
)
def shared(ex: Examination) -> Finding | None:
    """Pass one array as query and key with another as value, and then the first tokens of the query
    as key and value. A function gets one array of heads, without projections, as query, key and
    value, and the gradient of this array is compared, too. The check is skipped if calls are
    compiled, where each argument is an array of its own."""
    if ex.adapter.compiles:
        return None
    if ex.adapter.projections_supplied:
        return _shared_heads(ex)
    problem, length = ex.problem, ex.problem.shape.key_length // 2
    if ex.adapter.geometry is not None:
        length -= length % ex.adapter.geometry.multiples[1]
    value = problem.format.round(ex.case.random("value").standard_normal(problem.value.shape))
    separate = dataclasses.replace(problem.shape, sharing="separate")
    first = dataclasses.replace(problem.shape, sharing="separate", key_length=length)
    start = problem.query[:, :length]
    for names, other in (
        (("key",), problem.replace(shape=separate, value=value)),
        (("key", "value"), problem.replace(shape=first, key=start, value=start)),
    ):
        wanted = frozenset({"value", "weights"} - {*names})
        answer = ex.ask(other, shared=names, wanted=wanted)
        said = f"{{array}} is another if the query is also passed as {' and '.join(names)}"
        finding = _alike(shared.id, ex, answer, ex.ask(other), other, said)
        if finding.verdict != "conforms":
            break
    return finding


def _shared_heads(ex: Examination) -> Finding:
    """Return the finding on whether one array of heads as all three inputs is as good as three."""
    heads = ex.kernel_problem
    if heads.shape.group > 1 or heads.query.shape != heads.value.shape:
        raise Unsupported("its queries, keys and values have different shapes")
    apart = heads.replace(key=heads.query, value=heads.query)
    together = apart.replace(shape=dataclasses.replace(heads.shape, sharing="self"))
    one, other = (ex.ask(problem, projected=True) for problem in (together, apart))
    ones, others = {"output": one.output}, {"output": other.output}
    if {"query", "key", "value"} <= other.gradients.keys():
        name = "gradient.query"
        ones[name] = one.gradients["query"]
        every = [other.gradients[each] for each in ("query", "key", "value")]
        others[name] = np.sum(every, axis=0)
    expected = ex.expected("query, key and value in one array", lambda: together)
    said = "{array} is another if query, key and value are one array"
    compared = all_between(ones, others, expected.sigma, expected.underflow)
    return judge(shared.id, compared, said=said)


@requirement(
    "call.memory-layout-does-not-matter",
    "An argument with gaps between its numbers, transposed in memory, or cut out of a larger "
    "array, gets the same answer as a contiguous one, each argument by itself and all together.",
    cases=(
        "mask/per-head/separate",
        "mask/key-padding/separate",
        "mask/key-padding/decoding",
        "mask/shared/self",
        "bias/with-mask/self",
        "causal/bottom-right/cross",
        "feature/sinks-with-mask/cross",
        "feature/alibi/self",
        "feature/norm/self",
        "feature/key-lengths/cross",
        "feature/segments/separate",
        "feature/positions-with-gaps/self",
        "feature/spans/separate",
        "feature/tree/cross",
        "feature/global-tokens/cross",
    ),
    revision=4,
    why="A kernel that ignores strides reads other numbers, and nothing raises.",
)
def memory_layout(ex: Examination) -> Finding | None:
    """Pass one argument at a time with gaps in memory, then with its last two axes swapped in
    memory, and then as a view into a larger array. The arguments are the inputs, the mask arguments
    and the gradient of the output; in cases with features, only what those add, because the others
    are the same as without them. The answer must equal that for contiguous arrays. If tokens can be
    passed packed, in pages or beside a cache, they are laid out so in that encoding, too. The check
    is skipped if calls are compiled. The experiment `repeatability` changes the layout of all
    arguments together, but compares no gradients."""
    if ex.adapter.compiles:
        return None
    usual, *others = _spellings(ex) or [ex.adapter.masks.spell(ex.problem)]
    moved = [each for each in others if each.handing is not None and usual.handing is None][:1]
    finding = None
    for spelling in (usual, *moved):
        answer = ex.answer if spelling is usual else ex.ask(ex.problem, spelling=spelling)
        for name, strided in itertools.product(_laid_out(ex, spelling), LAID_OUT):
            again = ex.ask(ex.problem, spelling=spelling, strided=strided, strided_alone=name)
            said = f"{{array}} is another if {name} is {LAID_OUT[strided]}"
            finding = _equal(memory_layout.id, ex, again, answer, said)
            if finding.verdict != "conforms":
                return finding
    return finding


def _laid_out(ex: Examination, spelling: Spelling) -> list[str]:
    """Return the names of the arguments whose layout is changed, one at a time."""
    arrays, moved = [*spelling.arrays()], spelling.handing
    if moved is None and ex.problem.features and arrays:
        return arrays
    inputs = [*ex.problem.shape.distinct_inputs()]
    gradient = ["cotangent"] if ex.answer.gradients else []
    held = () if moved is None or moved.held is None else moved.names
    return [*inputs, *gradient, *arrays, *(name for name in held if name not in inputs)]


@requirement(
    "dropout.off-is-off",
    "Where a mode turns dropout off, output and gradients are those without dropout, whatever "
    "its probability.",
    cases=("mask/key-padding/cross",),
    why="What is not dropped but still rescaled, or dropped again in the backward pass, trains "
    "and evaluates two models.",
)
def dropout_off(ex: Examination) -> Finding | None:
    """Call the implementation with a dropout probability of 0.5 in a mode without dropout. Output
    and gradients must equal those of a call with a probability of 0. The adapter declares in which
    modes dropout is active."""
    names = ex.adapter.dropout_modes
    if not names or ex.mode.name in names or not ex.calls_eagerly:
        return None
    again = ex.ask(ex.problem, mode=dataclasses.replace(ex.mode, dropout=0.5))
    said = "{array} depends on the probability of dropout"
    return _equal(dropout_off.id, ex, again, ex.answer, said)


@requirement(
    "call.serves-other-lengths",
    "A layer that has been called with other lengths gives the same answer as a new layer.",
    why="A mask, a bias or angles kept in a buffer for the lengths of one call are wrong for the "
    "next, as when single tokens follow a prompt.",
    cases=(
        "causal/square/self",
        "causal/*/separate",
        "feature/alibi-causal/separate",
        "feature/rotary-causal/separate",
        "feature/window-causal/self",
    ),
)
def other_lengths(ex: Examination) -> Finding | None:
    """Call the layer that was built for the case with more tokens, with one query, and with the
    case again. Output and weights must each time equal those of a layer that has served no other
    lengths. The check is skipped for functions, which keep no state of their own, and if calls are
    compiled."""
    if ex.adapter.compiles or ex.adapter.projections_supplied:
        return None
    shape, first = ex.problem.shape, ex.answer
    queries, keys = shape.query_length, shape.key_length
    apart = shape.sharing == "separate"
    declared = ex.adapter.geometry
    rows, columns = (1, 1) if declared is None else declared.multiples
    if not apart:
        rows = math.lcm(rows, columns)
    longer = queries + 2 * rows
    for size in (
        (longer, keys + 5 * columns if apart else longer),
        (rows, keys if apart else rows),
    ):
        other = _resized(ex, *size)
        if declared is not None and not declared.has(other.shape):
            continue
        answer = ex.ask(other, built=shape)
        said = f"{{array}} is another for {size[0]} queries and {size[1]} keys after other lengths"
        finding = _alike(other_lengths.id, ex, answer, ex.ask(other), other, said)
        if finding.verdict != "conforms":
            return finding
    said = "{array} is another after calls with other lengths"
    return _equal(other_lengths.id, ex, ex.ask(ex.problem), first, said)


def _resized(ex: Examination, queries: int, keys: int) -> Problem:
    """Return the problem with other lengths, and with inputs and a cotangent that are drawn anew.

    The problem must have neither a mask nor a bias nor another array whose size is a length.
    """
    problem, random = ex.problem, ex.case.random(f"{queries} {keys}")
    shape = dataclasses.replace(problem.shape, query_length=queries, key_length=keys)
    sizes = {
        **shape.input_shapes(),
        "cotangent": (*problem.cotangent.shape[:1], queries, shape.output_width),
    }
    drawn = {
        name: problem.format.round(random.standard_normal(size)) for name, size in sizes.items()
    }
    return problem.replace(shape=shape, **drawn | shape.spread(drawn))


@requirement(
    "gradient.of-a-sum",
    "The gradients of a sum of the output do not depend on how its constant gradient lies in "
    "memory.",
    why="`output.sum().backward()` passes a gradient whose elements are one number in memory, with "
    "strides of 0; a kernel that takes it for contiguous reads beyond it.",
    cases=("mask/key-padding/separate",),
)
def of_a_sum(ex: Examination) -> Finding | None:
    """Pass a gradient of the output that consists of ones, and one whose rows are constant, with
    strides of 0 along these axes. The gradients of inputs, weights and biases must equal those for
    the same numbers in contiguous memory. The check is skipped if calls are compiled."""
    if ex.adapter.compiles or not ex.answer.gradients:
        return None
    cotangent = ex.problem.cotangent
    rows = np.broadcast_to(cotangent[..., :1], cotangent.shape)
    for constant in (np.ones_like(cotangent), np.ascontiguousarray(rows)):
        problem = ex.problem.replace(cotangent=constant)
        expanded = ex.ask(problem, strided="expanded", strided_alone="cotangent")
        said = "{array} is another if the gradient of the output has strides of 0"
        finding = _equal(of_a_sum.id, ex, expanded, ex.ask(problem), said)
        if finding.verdict != "conforms":
            break
    return finding


@requirement(
    "dropout.backward-drops-the-same",
    "The backward pass drops the same attention weights as the forward pass.",
    why="A kernel that draws again in the backward pass computes gradients of another output; "
    "training still runs, and just gets worse.",
    cases=("mask/key-padding/cross",),
)
def dropout_backward(ex: Examination) -> Finding | None:
    """Call the implementation with a dropout probability of 0.5 in a mode with dropout. Whatever is
    dropped, the output is linear in the value's weight and bias and the output's bias together. By
    Euler's theorem, the sum of these parameters times their gradients must be the sum of the output
    times its gradient. The adapter declares in which modes dropout is active."""
    if ex.mode.name not in ex.adapter.dropout_modes or not ex.calls_eagerly:
        return None
    without = _euler(ex, ex.answer)
    if without is None or not without.fits:
        # A gradient that is wrong without dropout, too, is reported by other requirements.
        return None
    compared = _euler(ex, ex.ask(ex.problem, mode=dataclasses.replace(ex.mode, dropout=0.5)))
    said = "{array} is of another output: the two passes do not drop the same weights"
    return None if compared is None else judge(dropout_backward.id, [compared], said=said)


def _euler(ex: Examination, answer: Answer) -> Comparison | None:
    """Return the comparison of Σ parameter · gradient with Σ output · cotangent.

    The parameters are the value's weight and bias and the output's bias, in all of which together
    the output is linear. Return None if the gradients have no value weight.
    """
    weights = ex.problem.weights.named()
    names = ("value", "value_bias", "output_bias")
    factors = {f"gradient.weights.{name}": weights[name] for name in names if name in weights}
    arrays, sigma = answer.arrays(), ex.expectation.sigma
    factors = {name: factor for name, factor in factors.items() if name in arrays}
    if "gradient.weights.value" not in factors:
        return None
    got = sum(float(np.sum(factor * arrays[name])) for name, factor in factors.items())
    factors["output"] = ex.problem.cotangent
    want = float(np.sum(factors["output"] * arrays["output"]))
    # Errors of one array may have one sign. Dropout of a half doubles what it keeps, and its noise.
    noise = 2.0 * sum(float(np.sum(np.abs(w) * sigma[name])) for name, w in factors.items())
    one, other, tolerated = (np.array([number]) for number in (got, want, noise))
    return compare("gradient.weights.value", one, other, tolerated, ex.expectation.underflow)


def _other(ex: Examination) -> Problem:
    """Return the problem with different numbers in the inputs, the mask and the bias.

    Raise `Unsupported` for a causal problem that has neither a mask nor a bias.
    """
    problem, random = ex.problem, ex.case.random("earlier")
    inputs = {
        name: problem.format.round(random.standard_normal(getattr(problem, name).shape))
        for name in problem.shape.distinct_inputs()
    }
    changes: dict[str, Any] = {}
    if problem.mask is not None:
        changes["mask"] = other_mask(problem.mask)
    if problem.attn_bias is not None:
        changes["attn_bias"] = -problem.attn_bias
    if not changes and problem.causal:
        raise Unsupported("no mask to write to")
    return problem.with_inputs(**inputs).replace(**changes)
