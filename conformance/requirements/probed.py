"""Requirements that are decided by the entries of `conformance.experiments`, not by cases.

An entry is a convention that an experiment observed, such as the meaning of a mask. The first
requirement is that the entries agree with the adapter's declaration. For others, a `Rule` derives
the verdict from the entries on certain subjects. The requirements "conventions.*" compare entries
with each other. Only the last requirement of this module is decided by cases: that an
implementation accepts the sizes that it declares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from conformance.adapter.base import Adapter
from conformance.adapter.layouts import axes
from conformance.adapter.raised import is_our_own
from conformance.cases.case import FAMILIES, assembled, draw, rounded
from conformance.definition.attention import heads_alone
from conformance.definition.geometry import Geometry
from conformance.definition.problem import Problem, Shape
from conformance.errors import Unsupported
from conformance.records.findings import Entry, Finding, Phrase, Verdict
from conformance.requirements import agreement
from conformance.requirements.examination import Examination, RaisedInside
from conformance.requirements.requirement import requirement
from conformance.words import say

MOST = 3
"""The most entries that the detail of a finding names; the convention card lists all of them."""


@requirement(
    "adapter.declares-what-is-observed",
    "What the adapter declares of masks, flags, weights and dropout is what experiments show.",
    why="With a wrong declaration, masks are converted wrongly and a card misleads its reader.",
)
def declares(ex: Examination) -> None:
    """Compare what all experiments observe with what the adapter declares. The experiments do this,
    not a case."""


@requirement(
    "dropout.is-unbiased",
    "On average over draws, dropout leaves the attention weights unchanged.",
    level="should",
    why="If weights are dropped without rescaling, rescaled twice, or dropped before the softmax, "
    "the model that is trained is not the one that is evaluated.",
)
def unbiased_dropout(ex: Examination) -> None:
    """Compare the mean of the attention weights over many draws with those without dropout. The
    experiment `dropout` does this, not a case."""


@requirement(
    "call.reads-only-what-it-is-given",
    "If inputs contradict each other, a call raises or answers; it reads no number beyond them and "
    "does not end the process.",
    why="A wrong length then gives an answer made of other numbers in memory, which may be those "
    "of another user, or takes the whole program down.",
)
def reads_only_what_it_is_given(ex: Examination) -> None:
    """Pass inputs that contradict each other, with different numbers beside them in memory. The
    answers must not depend on these numbers, and the call must neither end the process nor hang.
    The experiment `bad-input` does this in a separate process, not a case."""


@requirement(
    "nan.reaches-the-output",
    "A NaN in a query, key or value that is not blocked reaches the output.",
    why="A softmax that replaces NaN hides that training has diverged, and answers plausibly.",
)
def visible_nan(ex: Examination) -> None:
    """Put NaN into a visible element of one input at a time, and look for it in the output. It must
    reach the output of each query that attends to the element. The experiment `leaks` does this,
    not a case."""


@requirement(
    "gradient.of-fully-masked-query",
    "Whatever a fully masked query gets, its gradients are those of that output: 0 for zeros, and "
    "equal shares for the mean of the values.",
    why="A loss on such a query, or on all, trains the values with a multiple of their gradient, "
    "and nothing in the output shows it.",
)
def of_fully_masked_query(ex: Examination) -> None:
    """Block all keys of a query, in each way that a mask can, and ask for the gradients of a loss
    on this query alone, and of one on the others. The weights that the gradient of the values
    shows must be those that the output shows, and no gradient may be NaN beside a finite output. A
    NaN in the output is a convention, which is not judged here. The experiment `masked-rows` does
    this, not a case."""


@requirement(
    "conventions.same-in-every-mode",
    "Conventions do not depend on the mode: what a mask means, how it combines with others, what a "
    "fully masked query or an empty axis gives.",
    why="Asking for the weights, or switching to evaluation, would change what a mask means.",
)
def same_in_modes(ex: Examination) -> None:
    """Compare entries of some experiments in this mode with those in the adapter's first mode. Two
    entries are compared if both have an answer, or if one mode refuses an argument that the other
    ignores. This is decided by experiments, not by cases."""


@requirement(
    "conventions.same-in-every-dtype",
    "What a fully masked query gets does not depend on the dtype.",
    why="A model that is trained in float32 and served in half precision would change there.",
)
def same_in_dtypes(ex: Examination) -> None:
    """Block all keys of a query in every dtype, and compare what the query gets. Keys are blocked
    with booleans, 0 and 1, or −inf. The experiment `masked-rows` does this, not a case."""


@requirement(
    "conventions.same-for-shared-inputs",
    "Conventions are the same whether query, key and value are one array or three.",
    why="Self-attention may take another kernel; its masks should mean the same.",
)
def same_if_shared(ex: Examination) -> None:
    """Repeat experiments with one array as query, key and value, and compare the entries with the
    original ones. This is decided by experiments, not by cases."""


@requirement(
    "conventions.same-for-every-encoding",
    "What a fully masked query gets does not depend on the encoding of the mask: booleans, 0 and "
    "1, or −inf.",
    why="People switch between encodings without a second thought.",
)
def same_in_encodings(ex: Examination) -> None:
    """Block all keys of a query with each encoding of a mask, and compare what the query gets.
    Large finite numbers do not really block, so they may also lead to the mean of the values, or to
    the output without a mask. The experiment `masked-rows` does this, not a case."""


@requirement(
    "conventions.same-in-every-layout",
    "What a fully masked query gets does not depend on the axes that the mask has.",
    why="A mask of one head may be taken for one of all heads, and should mean the same.",
)
def same_in_layouts(ex: Examination) -> None:
    """Block all keys of a query with a mask in each layout, and compare what the query gets. The
    layouts are those of the mask argument. The experiment `masked-rows` does this, not a case."""


@requirement(
    "causal.flag-blocks",
    "The causal flag blocks later keys: it does not merely lower their logits by some number.",
    why="A query attends to its future where the logits there are large, or where nothing else is "
    "left to it.",
)
def flag_blocks(ex: Examination) -> None:
    """Set the causal flag in problems in which later keys are hard to block, and see if it blocks
    them: logits are as large as 15,000, or a mask leaves a query only later keys. The experiment
    `causal` does this, not a case."""


@requirement(
    "mask.arguments-combine",
    "A bias has its effect beside a mask, another bias or the causal flag, and so has a scale.",
    why="Kernels are chosen by what is passed, and one that lacks an argument drops it silently.",
)
def arguments_combine(ex: Examination) -> None:
    """Pass two arguments at once, and compare the attention weights with a prediction. One of the
    arguments is a bias, which is added to the logits, or both are passed with a scale. The
    experiment `pairs` does this, not a case."""


@requirement(
    "bits.are-as-promised",
    "What is promised to have equal bits has them; −0 equals 0.",
    why="A server that batches, or a trainer that scores what a generator wrote, relies on it; a "
    "difference in the last bit then grows from layer to layer.",
)
def as_promised(ex: Examination) -> None:
    """Repeat a call in the ways that the adapter promises to have no effect on its bits: alone and
    in other batches, in steps and chunks, packed, on other threads, from other memory. The
    experiment `repeatability` does this, not a case."""


@dataclass(frozen=True)
class Rule:
    """A rule that decides a requirement by the entries of an experiment.

    Attributes:
        requirement: the id of the requirement.
        experiment: the name of the experiment.
        subjects: the ids of the subjects whose entries count; empty for all entries.
        conforms: the ids of values that mean "conforms".
        deviates: the ids of values that mean "deviates", unless the entry agrees with a
            declaration. Ids in no list mean "unsupported".
        silent: the ids of values that are no evidence either way.
    """

    requirement: str
    experiment: str
    subjects: tuple[str, ...]
    conforms: tuple[str, ...]
    deviates: tuple[str, ...]
    silent: tuple[str, ...] = ()

    def verdict(self, entry: Entry) -> Verdict:
        """Return the verdict on an entry, which never deviates if it agrees with a declaration."""
        if entry.value.id in self.deviates:
            return "conforms" if entry.declared and entry.agrees else "deviates"
        return "conforms" if entry.value.id in self.conforms else "unsupported"


_RULES = (
    Rule(
        unbiased_dropout.id,
        "dropout",
        subjects=("dropout.mean",),
        conforms=("dropout.unbiased",),
        deviates=("dropout.biased",),
    ),
    Rule(
        agreement.memory_layout.id,
        "repeatability",
        subjects=("again.strided", "again.window", "again.mask-strided", "again.mask-window"),
        conforms=("again.same-bits", "again.same-bits-at", "again.within-noise"),
        deviates=("again.apart",),
    ),
    Rule(
        reads_only_what_it_is_given.id,
        "bad-input",
        subjects=(),
        conforms=("refused", "malformed-answer", "bad-input.answers", "bad-input.answers-as"),
        deviates=("bad-input.reads-beyond", "bad-input.dies", "bad-input.hangs"),
    ),
    Rule(
        flag_blocks.id,
        "causal",
        subjects=("causal.large-logits", "causal.later-only"),
        conforms=(
            "causal.blocks",
            *("row.nan", "row.zeros", "row.output-bias", "row.mean-of-values"),
            "row.equal-below-one",
        ),
        deviates=("causal.lowers",),
    ),
    Rule(
        arguments_combine.id,
        "pairs",
        subjects=("pair.with-bias", "pair.with-scale"),
        conforms=("combined.both",),
        deviates=(
            *("combined.only", "combined.neither", "combined.scaled"),
            *("combined.without-scale", "combined.unexplained"),
        ),
    ),
    Rule(
        visible_nan.id,
        "leaks",
        subjects=("leak.visible", "leak.visible-unmasked"),
        conforms=("leak.visible-reaches-all",),
        deviates=("leak.visible-reaches-some", "leak.visible-reaches-none"),
    ),
    Rule(
        of_fully_masked_query.id,
        "masked-rows",
        subjects=("fully-masked.gradients-alone", "fully-masked.gradients-elsewhere"),
        conforms=("gradients.sum", "gradients.of-others"),
        deviates=("gradients.sum-unlike", "gradients.unlike", "gradients.nan-beside-finite"),
        silent=("gradients.nan", "gradients.sum-beside-nan"),
    ),
)
_WORST_FIRST: tuple[Verdict, ...] = ("deviates", "unsupported", "conforms")


def decided(experiment: str, entries: Sequence[Entry]) -> Iterator[Finding]:
    """Yield a finding for each requirement that the entries of an experiment decide.

    `experiment` is the experiment's name. Requirements without applicable entries are left out, as
    are those that `compared` and `between_modes` decide.
    """
    for rule in _RULES:
        about = [
            (rule.verdict(entry), entry)
            for entry in entries
            if rule.experiment == experiment
            if entry.subject.id in rule.subjects or not rule.subjects
            if entry.value.id not in rule.silent
        ]
        # If the suite could not pass the arguments, this is not evidence about the library.
        about = [pair for pair in about if pair[1].value.id != "cannot-be-asked"] or about
        if about:
            verdict, entry = min(about, key=lambda pair: _WORST_FIRST.index(pair[0]))
            detail = f"{say(entry.subject)}: {entry.evidence}" if verdict != "conforms" else ""
            yield Finding(rule.requirement, verdict, detail, entry.value)
    promised = [entry for entry in entries if is_promise(entry)]
    if promised:
        yield _kept(promised)
    if experiment in ONE_FOR_ALL:
        yield from _agreeing(same_if_shared.id, _pairs(entries, "sharing"))
    if experiment == "masked-rows":
        blocking = [entry for entry in entries if not _is_finite(entry.subject)]
        yield from _agreeing(same_in_dtypes.id, _pairs(blocking, "inputs_in"))
        yield from _agreeing(same_in_layouts.id, _pairs(blocking, "laid_out"))
        yield from _agreeing(same_in_encodings.id, _encodings(entries))


SAME_BITS = "again.same-bits"
"""The id of the value that is declared where equal bits are promised."""

OTHER_BITS = ("again.within-noise", "again.apart")
"""The ids of values that say that bits are not equal."""


def is_promise(entry: Entry) -> bool:
    """Return whether equal bits are promised of what an entry is about."""
    return entry.declared.id == SAME_BITS


def _kept(promised: Sequence[Entry]) -> Finding:
    """Return the finding on whether promises of equal bits are kept.

    What could not be examined is not kept, and not broken.
    """
    broken = [entry for entry in promised if entry.value.id in OTHER_BITS]
    left = [entry for entry in promised if not entry.value.id.startswith(SAME_BITS)]
    lines = [f"{say(entry.subject)}: {say(entry.value)}" for entry in broken or left]
    verdict: Verdict = "deviates" if broken else "unsupported" if left else "conforms"
    value = (broken or left or promised)[0].value
    return Finding(as_promised.id, verdict, _listed(lines), value)


# Conventions that must be the same in all calls

_UNANSWERED = ("refused", "cannot-be-asked", "another-shape", "malformed-answer", "mask.rejected")
ONE_FOR_ALL = ("masks", "masked-rows", "causal", "pairs", "leaks", "degenerate-sizes")
"""The names of the experiments whose entries must be the same in all modes, and for shared inputs.
Entries on subjects for which `_is_judged` returns False may differ."""

_FINITE = ("form.zero-large", "form.zero-least")
_MAY_BE = ("row.mean-of-values", "row.equal-below-one", "row.unmasked")

Pairs = Iterator[tuple[Entry, Entry]]


def between_modes(first: Sequence[Entry], entries: Sequence[Entry], mode: str) -> Iterator[Finding]:
    """Yield the finding on whether entries equal those of the first mode, if any are comparable.

    Args:
        first: the entries of an experiment in the first mode.
        entries: the entries of the same experiment in another mode.
        mode: the name of the first mode.
    """
    known = {entry.subject: entry for entry in first}
    pairs = (
        (known[entry.subject], entry)
        for entry in entries
        if entry.subject in known and _is_judged(entry.subject)
    )
    yield from _agreeing(same_in_modes.id, pairs, f" in mode {mode}")


def _pairs(entries: Iterable[Entry], telling: str) -> Pairs:
    """Yield pairs of entries whose subjects are equal, except for an argument of the second one.

    `telling` is the name of this argument, which the first subject lacks. Details that `_about`
    leaves out may also differ.
    """
    known = {_about(entry.subject): entry for entry in entries if not _has(entry, telling)}
    for entry in entries:
        about = _about(entry.subject, telling)
        if _has(entry, telling) and about in known and _is_judged(entry.subject):
            yield known[about], entry


def _has(entry: Entry, argument: str) -> bool:
    return argument in entry.subject.arguments


def _about(subject: Phrase, without: str = "") -> Phrase:
    """Return a subject without the argument `without`, to find entries that can be compared.

    For fully masked queries, all details of the mask's form are left out too if the dtype of the
    mask is that of the inputs or float32.
    """
    form = subject.part("form")
    own = subject.name("inputs_in")
    kept = {name: part for name, part in subject.arguments.items() if name != without}
    if form.name("dtype") in (own, "float32") and subject.id.startswith("fully-masked"):
        kept["form"] = Phrase(form.id)
    return Phrase(subject.id, kept)


def _is_judged(subject: Phrase) -> bool:
    """Return whether an entry on this subject must be the same in other modes or calls."""
    # A log-sum-exp of -1e9 loses the number of keys to rounding, so weights that are recomputed
    # from it are those of another row.
    return not (_is_finite(subject) and subject.id.startswith("fully-masked.gradients"))


def _is_finite(subject: Phrase) -> bool:
    return subject.part("form").id in _FINITE


def _encodings(entries: Iterable[Entry]) -> Pairs:
    """Yield pairs of entries about fully masked queries that must agree across encodings.

    The subjects of a pair differ only in the encoding of the mask; the first entry of a pair is the
    first of all entries with such a subject. Entries without an answer are left out, as are those
    for large finite numbers where these may legitimately differ.
    """
    first: dict[Phrase, Entry] = {}
    for entry in entries:
        if entry.value.id in _UNANSWERED:
            continue
        kept = {n: it for n, it in entry.subject.arguments.items() if n != "form"}
        one = first.setdefault(Phrase(entry.subject.id, kept), entry)
        is_finite = _is_finite(entry.subject)
        # In another dtype, large numbers may be rounded away, and a mean has other gradients.
        is_output = entry.subject.id == "fully-masked.output" and not _has(entry, "inputs_in")
        legit = is_finite and (entry.value.id in _MAY_BE or not is_output)
        if one is not entry and not legit:
            yield one, entry


def _agreeing(requirement: str, pairs: Pairs, where: str = "") -> Iterator[Finding]:
    """Yield the finding on whether the values of paired entries agree, if any can be compared.

    In the message, `where` says from which calls the first entries come; if it is empty, the
    message shows their subjects instead.
    """
    answered = [(one, other) for one, other in pairs if _both_answer(one.value, other.value)]
    wrong = [(one, other) for one, other in answered if _told(one) != _told(other)]
    if not answered:
        return
    if not wrong:
        yield Finding(requirement, "conforms")
        return
    lines = [
        f"{say(other.subject)}: {say(other.value)}, but {say(one.value)}"
        + (where or f" for {say(one.subject)}")
        for one, other in wrong
    ]
    yield Finding(requirement, "deviates", _listed(lines), wrong[0][1].value)


def _listed(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    return "; ".join([*lines[:MOST], *more])


def _both_answer(one: Phrase, other: Phrase) -> bool:
    """Return whether both values are answers, or one is a refusal and the other "ignored"."""
    ids = {one.id, other.id}
    refused, ignored = ids & {"refused", "mask.rejected"}, ids & {"causal.ignored", "mask.ignored"}
    return ids.isdisjoint(_UNANSWERED) or bool(refused and ignored)


def _told(entry: Entry) -> Phrase:
    """Return the value of an entry without details that depend on which arrays a mode returns.

    For example, a NaN that reaches only weights or gradients, not the output, counts as hidden.
    """
    value = entry.value
    if value.id == "leak.reaches" and Phrase("place.output") not in value.parts("places"):
        return Phrase("leak.hidden")
    return Phrase(value.id) if value.id.startswith(("leak.", "gradients.")) else value


def compared(entries: Sequence[Entry]) -> Finding:
    """Return the finding on whether the entries of an experiment agree with the declarations.

    The verdict is "observed" if nothing is declared about any of them.
    """
    entries = [entry for entry in entries if not is_promise(entry)]
    wrong = [entry for entry in entries if not entry.agrees]
    if not wrong:
        declared = any(entry.declared for entry in entries)
        return Finding(declares.id, "conforms" if declared else "observed")
    # Either the declaration or the implementation is wrong, so the cause blames neither.
    cause = Phrase("declaration.differs", {"subjects": [entry.subject for entry in wrong[:MOST]]})
    lines = [
        f"{say(entry.subject)}: declared {say(entry.declared)}, observed {say(entry.value)}"
        for entry in wrong
    ]
    if len(wrong) > MOST:
        cause = cause.having(more=len(wrong) - MOST)
    return Finding(declares.id, "deviates", _listed(lines), cause=cause)


def declared_row(declared: str) -> Phrase:
    """Return a declared `Adapter.fully_masked_row`, such as "zeros", as the value of an entry."""
    return Phrase(f"row.{declared.replace(' ', '-')}")


def returned_weights(adapter: Adapter, returned: str) -> Phrase:
    """Return, as the value of an entry, how the implementation itself returns attention weights.

    `returned` is how the adapter returns them: "per head", "averaged" or "none". If the adapter has
    to set `weights_option` to get them per head, the result names this option, and says how the
    implementation returns weights without it. A library whose arrays have no heads is called once
    for each, and returns those of one.
    """
    native = getattr(adapter, "native_layout", "")
    if returned == "per head" and native and "heads" not in axes(native):
        return Phrase("weights.one-head")
    if returned == "per head" and adapter.weights_option:
        otherwise = Phrase(f"weights.{adapter.weights_otherwise}")
        return Phrase("weights.unless", {"otherwise": otherwise, "option": adapter.weights_option})
    return Phrase(f"weights.{returned.replace(' ', '-')}")


@requirement(
    "adapter.declared-sizes-are-taken",
    "An implementation takes every size that it declares.",
    why="Whoever chooses a model's sizes by the declaration is refused when it runs; and what is "
    "refused has not been checked.",
    every_case=True,
    revision=2,
)
def taken(ex: Examination) -> Finding | None:
    """Check whether a case is refused only because of its sizes, although the adapter declares
    them. If an implementation that declares a `Geometry` refuses a case, it is called again at the
    same sizes, without masks or other arguments. Refusing this call too is a deviation, unless the
    refusal seems to have another reason: in this dtype, the implementation accepts no shape of the
    same kind (for example, with shared key/value heads), although it accepts other shapes or
    dtypes. Nothing is found if declarations rule out such a call at any size, as they do if a cache
    is the only declared way to pass keys."""
    geometry = ex.adapter.geometry
    if geometry is None or ex.case.grid is None or ex.dtype not in ex.adapter.dtypes:
        return None
    try:
        _ = ex.answer
    except Unsupported as error:
        refused = str(error)
    except RaisedInside as error:
        if is_our_own(error.original, ex.adapter):
            raise
        refused = error.told
    else:
        return None
    try:
        geometry.check(ex.case.shape)
        ex.adapter.check_features(_plain(ex, ex.case.shape, ex.dtype))
    except Unsupported:
        return None
    if _takes(ex, ex.case.shape, ex.dtype) or not _is_for_its_size(ex, geometry):
        return None
    fields = ("batch", "heads", "kv_heads", "head_size", "value_head_size")
    sizes = {name: getattr(ex.case.shape, name) for name in fields}
    sizes |= {"queries": ex.case.shape.query_length, "keys": ex.case.shape.key_length}
    cause = Phrase("sizes.refused", sizes)
    return Finding(taken.id, "deviates", detail=refused, cause=cause)


def _is_for_its_size(ex: Examination, geometry: Geometry) -> bool:
    """Return whether the refusal of the case seems to be due to the sizes of its shape.

    That is so if another shape of the same kind is accepted in this dtype, or if no shape of any
    kind is accepted in any dtype. In the latter case, an implementation that raises an exception of
    another class than `Unsupported` is broken, which its other findings say.
    """
    if any(_takes(ex, shape, ex.dtype) for shape in _of_its_kind(ex, geometry)):
        return True
    try:
        ex.ask(_plain(ex, ex.case.shape, ex.dtype))
    except RaisedInside:
        return False
    except Unsupported:
        pass
    every = [shape for each in _families(ex, geometry) for shape in each.values()]
    dtypes = [ex.dtype, *(name for name in ex.adapter.dtypes if name != ex.dtype)]
    return not any(_takes(ex, shape, name) for name in dtypes for shape in every)


def _families(ex: Examination, geometry: Geometry) -> Iterator[dict[str, Shape]]:
    """Yield, for each grid (a set of declared sizes), the shape of each case family, by name.

    The family "far" and families with a score that the adapter does not support are left out.
    """
    for grid in geometry.grids(layer=not ex.adapter.projections_supplied):
        yield {
            name: grid.shape(name, small)
            for name, small in FAMILIES.items()
            if small.score in ex.adapter.scores and name != "far"
        }


def _of_its_kind(ex: Examination, geometry: Geometry) -> Iterator[Shape]:
    """Yield shapes that differ from the shape of the case only in their sizes.

    Sharing, biases and score are the same, and so is whether heads share key/value heads, and
    whether value heads differ in size from key heads.
    """

    def kind(shape: Shape) -> tuple[object, ...]:
        differ = shape.value_head_size != shape.head_size
        return shape.sharing, shape.bias, shape.score, shape.group > 1, differ

    for shapes in _families(ex, geometry):
        yield from (shape for shape in shapes.values() if kind(shape) == kind(ex.case.shape))
        own = shapes.get(ex.case.family, ex.case.shape)
        for other in shapes.values():
            queries, keys = other.query_length, other.key_length
            if queries == keys or own.sharing != "self":
                yield dataclasses.replace(
                    own, batch=other.batch, query_length=queries, key_length=keys
                )
            if ex.adapter.projections_supplied and (other.group > 1) == (own.group > 1):
                # The inputs of a layer have sizes that depend on its heads.
                yield dataclasses.replace(own, heads=other.heads, kv_heads=other.kv_heads)


def _plain(ex: Examination, shape: Shape, dtype: str) -> Problem:
    """Return a problem of this shape without masks or other arguments."""
    problem = rounded(assembled(shape, draw(shape, np.random.default_rng(0))), dtype)
    return heads_alone(problem) if ex.problem.heads_alone else problem


def _takes(ex: Examination, shape: Shape, dtype: str) -> bool:
    def ask() -> bool:
        problem = _plain(ex, shape, dtype)
        try:
            ex.ask(problem, mode=dataclasses.replace(ex.mode, gradients=False))
        except (Unsupported, RaisedInside):
            return False
        return True

    return ex.bench.answers.get(("takes", id(ex.adapter), shape, dtype, ex.mode.name), ask)
