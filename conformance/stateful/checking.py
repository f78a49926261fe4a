"""Take a layer that keeps a state on all ways through a text, and compare the outputs.

There is no definition of the layer. So σ is measured: it is the difference between the layer and
itself in float64, and at least that of an attention of its width on random numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np

from conformance.adapter.base import EQUAL_BITS
from conformance.cases.case import assembled, draw, rounded
from conformance.definition.comparison import Comparison, between
from conformance.definition.dtypes import DTYPES, Array, dtype_of
from conformance.definition.expectation import expect
from conformance.definition.problem import Shape
from conformance.errors import (
    ConformanceError,
    FailsOnImport,
    Unavailable,
    Unsupported,
    WrongAnswer,
    check_names,
)
from conformance.frameworks import framework
from conformance.records.findings import (
    BAD,
    BITS,
    NOTHING,
    RUN,
    STATEFUL,
    WHOLE,
    CaseResult,
    Finding,
    Phrase,
    count,
    gravity,
    verified,
)
from conformance.requirements.requirement import judge
from conformance.stateful.causes import cause_of
from conformance.stateful.layer import PROMISES, StatefulLayer, declared
from conformance.stateful.ways import (
    SENTENCES,
    WAYS,
    Desk,
    Refuted,
    Stretch,
    Texts,
    Way,
)
from conformance.text import message, one_line
from conformance.words import advice, say

USUAL, LONGEST = 97, 1024
"""The number of tokens of a text, and the most if a window or a buffer asks for more."""

MORE = 33
"""How many more tokens than its window a text has."""

PROMISED: dict[str, tuple[str, ...]] = {
    "batch": ("alone",),
    "steps": ("steps", "chunks-1"),
    "chunks": ("chunks-2", "chunks-3", "chunks-5", "chunks-17", "chunks-64", "chunks-mixed"),
    "runs": ("runs",),
    "batch position": ("batch-position",),
    "threads": ("threads",),
}
"""By relation in `PROMISES`, the ways whose bits are compared with those of the whole text."""


@dataclass(frozen=True, eq=False)
class Stateful:
    """What was found of a layer that keeps a state.

    Attributes:
        name: the name of the layer.
        device: the kind of device.
        results: the results by way and dtype, and then those on bits.
    """

    name: str
    device: str
    results: list[CaseResult] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """The number of results by verdict."""
        return count(result.verdict for result in self.results)

    @property
    def wrong(self) -> list[tuple[CaseResult, Finding]]:
        """The findings that deviate, are errors or were lost with a process, with their results."""
        return [
            (result, finding)
            for result in self.results
            for finding in result.findings
            if finding.verdict in BAD
        ]

    @property
    def is_verified(self) -> bool:
        """Whether anything had an answer to judge, which an error has not."""
        return verified(self.counts) > 0

    def __str__(self) -> str:
        """Return a table of verdicts, and below it what deviates, with the likely causes."""
        dtypes = list(dict.fromkeys(result.dtype for result in self.results))
        rows: dict[str, dict[str, str]] = {}
        reasons: dict[str, str] = {}
        for result in self.results:
            for finding in result.findings:
                row = result.case.partition("/")[2]
                if result.case == BITS:
                    row = finding.requirement
                shown = say(finding.value) if finding.verdict == "observed" else finding.verdict
                rows.setdefault(row, {})[result.dtype] = shown
                if finding.verdict == "unsupported":
                    reasons[row] = finding.detail
        width = max(map(len, rows), default=0)
        columns = max((len(text) for row in rows.values() for text in row.values()), default=0)
        lines = [f"{self.name}: {', '.join(f'{n} {v}' for v, n in self.counts.items())}"]
        lines.append("  ".join(["", " " * width, *(dtype.ljust(columns) for dtype in dtypes)]))
        for row, verdicts in rows.items():
            texts = [verdicts.get(dtype, "").ljust(columns) for dtype in dtypes]
            lines.append("  ".join(["", row.ljust(width), *texts, reasons.get(row, "")]))
        lines = [line.rstrip() for line in lines]
        for (verdict, cause), found in self._by_cause().items():
            lines += ["", f"{verdict}: {say(cause) or _TOLD.get(verdict, 'no known cause')}"]
            if cause:
                lines.append(f"  what to change: {advice(cause)}")
            for requirement, ways in found.items():
                sentence = {**SENTENCES, RUN: "A way ends."}.get(requirement, BITS_SENTENCE)
                lines.append(f"  {requirement}: {sentence}")
                lines += [f"    {_told(way, pairs)}" for way, pairs in ways.items()]
        return "\n".join(lines)

    def _by_cause(self) -> dict[tuple[str, Phrase], dict[str, dict[str, list[Finding]]]]:
        """Return what is wrong in each dtype, by verdict and cause, requirement and way."""
        found: dict[tuple[str, Phrase], dict[str, dict[str, list[Finding]]]] = {}
        for result, finding in self.wrong:
            told = finding.verdict, finding.cause
            ways = found.setdefault(told, {}).setdefault(finding.requirement, {})
            ways.setdefault(result.case.partition("/")[2], []).append(finding)
        return found


_TOLD = {
    "error": "an exception is raised",
    "crashed": "the process of the layer ended",
    "timed-out": "the layer gave no answer",
}
"""What is told of a verdict without a cause."""


def _told(way: str, findings: Sequence[Finding]) -> str:
    """Return a line on what is wrong on a way, in the dtype in which it is worst."""
    worst = max(findings, key=gravity)
    texts = [say(worst.value), worst.detail]
    if worst.figures is not None:
        texts.append(f"{worst.figures.max_ratio:.3g}σ, allowed {worst.figures.limit:.3g}σ")
    return ": ".join(filter(None, [way, "; ".join(filter(None, texts))]))


SPOILING = ("stateful.runs", "stateful.causal")
"""The requirements without which the whole text is no measure: the cause is then that of all."""

BITS_SENTENCE = "What is promised has equal bits; −0 equals 0."


def check_stateful(
    layer: Any, *, dtypes: str | Iterable[str] = (), device: str = "cpu"
) -> Stateful:
    """Check a layer that keeps a state, and return what was found; for use in a test.

    Args:
        layer: a `StatefulLayer`, or a class that is one.
        dtypes: the dtypes to use; empty for those that the layer declares.
        device: "cpu" or "gpu".

    Raises:
        AssertionError: if anything deviates or raises an error; the message says what and why.
        ConformanceError: if the layer cannot be built or nothing could be checked.
    """
    __tracebackhide__ = True
    found = examine_stateful(layer, dtypes=dtypes, device=device)
    if found.wrong:
        raise AssertionError(str(found))
    if not found.is_verified:
        raise ConformanceError(str(found))
    return found


def examine_stateful(
    layer: Any,
    *,
    dtypes: str | Iterable[str] = (),
    device: str = "cpu",
    spec: str = "",
    ways: Sequence[Way] = WAYS,
    begins: Callable[[str], None] = lambda name: None,
) -> Stateful:
    """Return what `check_stateful` finds; deviations are findings, not exceptions.

    Args:
        layer: the layer, as for `check_stateful`.
        dtypes: the dtypes to ask in, as for `check_stateful`.
        device: the kind of device, as for `check_stateful`.
        spec: the name of the layer on the command line.
        ways: the ways to take.
        begins: is called with the name of a way and of a dtype before the way is taken.

    Raises:
        ConformanceError: if the layer cannot be built.
    """
    stated = declared(layer, spec or getattr(layer, "__name__", type(layer).__name__))
    found = Stateful(stated.name, device)
    causes: dict[str, Phrase] = {}
    for dtype in chosen(dtypes) or stated.dtypes:
        found.results.extend(walked(stated, dtype, device, ways, causes, begins))
    return found


def chosen(dtypes: str | Iterable[str]) -> list[str]:
    """Return the names of dtypes as a list.

    Raises:
        UnknownName: there is no such dtype.
    """
    names = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    check_names("dtype", names, DTYPES)
    return names


def walked(
    stated: StatefulLayer,
    dtype: str,
    device: str,
    ways: Sequence[Way],
    causes: dict[str, Phrase],
    begins: Callable[[str], None],
    again: Sequence[Way] = (),
) -> Iterator[CaseResult]:
    """Yield a result for each way of a layer in one dtype, and then one on bits.

    `causes` holds what is known of a way from another dtype, by its name, and is extended. `again`
    are ways with a result from a process that was lost; they are taken for their bits. The other
    arguments, and what is raised, are those of `examine_stateful`.
    """
    bridge = framework(stated.framework)
    if device not in bridge.devices():
        raise Unavailable(f"{stated.framework} sees no {device} on this machine")
    texts = Texts.drawn(stated.width, _length(stated), stated.embeddings())
    desk = Desk(stated, _built(stated, dtype, device), bridge, dtype, device, texts)
    yield from _Examination(desk, ways, causes, begins).results(again)


def _length(stated: StatefulLayer) -> int:
    """Return how long texts are: longer than the window, and as long as a buffer allows."""
    length = USUAL
    if stated.window is not None and stated.window + MORE <= LONGEST:
        length = max(length, stated.window + MORE)
    if stated.capacity is not None and stated.capacity <= LONGEST:
        length = stated.capacity
    return length


def _built(stated: StatefulLayer, dtype: str, device: str) -> Any:
    """Return the layer in a dtype on a device; an exception becomes an error of one line."""
    bridge = framework(stated.framework)
    try:
        built = stated.build(dtype)
        if built is None:
            raise WrongAnswer(f"{stated.name}: build({dtype!r}) returns None; return the layer")
        return built if device == "cpu" else bridge.place(built, device)
    except (ConformanceError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise FailsOnImport(
            f"{stated.name}: build({dtype!r}) raises {type(error).__name__}: {message(error)}"
        ) from error


class _Examination:
    """All ways of one layer in one dtype.

    `causes` holds what is known of a way from another dtype, by its name.
    """

    def __init__(
        self,
        desk: Desk,
        ways: Sequence[Way],
        causes: dict[str, Phrase],
        begins: Callable[[str], None],
    ):
        self._desk, self._ways, self._causes, self._begins = desk, ways, causes, begins
        self._whole: dict[str, Array] = {}
        self._noise: dict[str, Array] = {}
        self._taken: dict[str, list[Stretch]] = {}
        self._spoilt = NOTHING

    def results(self, again: Sequence[Way]) -> Iterator[CaseResult]:
        """Yield a result for each way, and one for the relations of bits."""
        self._begins(f"{WHOLE} {self._desk.dtype}")
        try:
            for of in ("text", "other"):
                self._whole[of] = self._desk.whole(of)
                if not np.isfinite(self._whole[of]).all():
                    raise WrongAnswer("the outputs of the whole text are not finite")
        except Exception as error:
            yield self._result(f"{STATEFUL}{WHOLE}", _failed("stateful.runs", error))
            return
        for of, whole in self._whole.items():
            self._noise[of] = noise(self._desk, of, whole)
        for way in self._ways:
            self._begins(f"{way.name} {self._desk.dtype}")
            begin = time.perf_counter()
            finding = self._taken_way(way)
            seconds = round(time.perf_counter() - begin, 3)
            yield self._result(f"{STATEFUL}{way.name}", finding, seconds=seconds)
        promised = {name for names in PROMISED.values() for name in names}
        for way in again:
            if way.name in promised:
                self._begins(f"{way.name} {self._desk.dtype}")
                self._taken_way(way)
        yield self._result(BITS, *(self._bits(relation) for relation in PROMISES))

    def _result(self, case: str, *findings: Finding, seconds: float = 0.0) -> CaseResult:
        desk = self._desk
        about = (desk.declared.name, case, desk.dtype, desk.device, "default")
        return CaseResult(*about, [*findings], seconds=seconds)

    def _taken_way(self, way: Way) -> Finding:
        parts: list[Stretch] = []
        try:
            parts.extend(way.take(self._desk))
        except (Unsupported, NotImplementedError) as reason:
            return Finding(way.requirement, "unsupported", message(reason) or "not implemented")
        except Refuted as error:
            return Finding(way.requirement, "deviates", cause=error.cause)
        except Exception as error:
            return _failed(way.requirement, error)
        for of in {part.of for part in parts} - {*self._whole}:
            self._whole[of] = self._desk.whole(of)
            self._noise[of] = noise(self._desk, of, self._whole[of])
        self._taken[way.name] = parts
        return self._judged(way, parts)

    def _pieces(self, parts: Sequence[Stretch], of: dict[str, Array]) -> list[Array]:
        return [of[it.of][list(it.rows), it.start : it.stop] for it in parts]

    def _judged(self, way: Way, parts: Sequence[Stretch]) -> Finding:
        """Return the finding on whether all parts are those of the whole text."""
        whole, sigma = (self._pieces(parts, of) for of in (self._whole, self._noise))
        got = [part.output for part in parts]
        compared = self._between(*map(_joined, (got, whole, sigma)))
        finding = judge(way.requirement, [compared])
        if compared.fits:
            return finding
        each = [self._between(*one) for one in zip(got, whole, sigma, strict=True)]
        wrong = [index for index, one in enumerate(each) if not one.fits]
        index = wrong[0] if wrong else int(np.argmax([one.excess for one in each]))
        part = parts[index]
        cause = self._cause(way, index, part)
        first = judge(way.requirement, [each[index]]) if wrong else finding
        value = Phrase(
            "stateful.differs",
            {"step": part.step, "start": part.start, "stop": part.stop - 1},
        )
        return msgspec.structs.replace(
            finding, detail="", value=value, cause=cause, worst=first.worst
        )

    def _cause(self, way: Way, index: int, part: Stretch) -> Phrase:
        """Return the cause of a difference, which is looked for in the first dtype that has it."""
        if self._spoilt:
            return self._spoilt
        found = self._causes.get(way.name, NOTHING)
        if not found:
            found = cause_of(self._desk, way, index, part, self._noise[part.of])
            self._causes[way.name] = found
        if way.requirement in SPOILING:
            self._spoilt = found
        return found

    def _between(self, got: Array, whole: Array, sigma: Array) -> Comparison:
        return between("output", got, whole, sigma, dtype_of(self._desk.dtype).underflow)

    def _bits(self, relation: str) -> Finding:
        """Return the finding on whether the ways of a relation give the bits of the whole text."""
        name = f"bits.{relation.replace(' ', '-')}"
        ways = [way for way in PROMISED[relation] if way in self._taken]
        if not ways:
            return Finding(name, "unsupported", "no such way was taken")
        parts = [part for way in ways for part in self._taken[way]]
        whole = self._pieces(parts, self._whole)
        promised = self._desk.declared.promises.get(relation) == EQUAL_BITS
        differ = [
            part
            for part, want in zip(parts, whole, strict=True)
            if not np.array_equal(part.output, want, equal_nan=True)
        ]
        if not differ:
            return Finding(name, "conforms" if promised else "observed", value=Phrase("bits.equal"))
        sigma = self._pieces(parts, self._noise)
        compared = self._between(*map(_joined, ([it.output for it in parts], whole, sigma)))
        value = Phrase("bits.within-noise" if compared.fits else "bits.apart")
        if not promised:
            return Finding(name, "observed", value=value)
        part = differ[0]
        where = {"step": part.step, "start": part.start, "stop": part.stop - 1}
        return Finding(
            name,
            "deviates",
            value=Phrase("bits.differ", {**where, "how": value}),
            figures=compared.figures,
        )


def _failed(requirement: str, error: Exception) -> Finding:
    if isinstance(error, Unsupported):
        return Finding(requirement, "unsupported", str(error))
    return Finding(requirement, "error", one_line(error))


def _joined(pieces: Sequence[Array]) -> Array:
    return np.concatenate([piece.reshape(-1, piece.shape[-1]) for piece in pieces])


# Noise


SAMPLES = 8
"""On how many texts, nearly equal, the rounding of a layer is measured.

All components of an output may share the error of one logit, so one text does not suffice.
"""


def noise(desk: Desk, of: str, whole: Array) -> Array:
    """Return σ of each output of a whole text, `[batch length width]`.

    It is the rms of what rounding does to the layer itself, as far as this can be measured, and at
    least that of an attention on random numbers, relative to the output's rms.
    """
    share = relative_noise(desk.dtype, min(desk.length, USUAL), desk.declared.width)
    square = share**2 * (whole**2).mean(axis=-1, keepdims=True)
    own = _own_square(desk, of, whole)
    if own is not None:
        square = np.maximum(square, (own + own.mean(axis=-1, keepdims=True)) / 2)
    return np.broadcast_to(np.sqrt(square), whole.shape).copy()


def _own_square(desk: Desk, of: str, whole: Array) -> Array | None:
    """Return the mean square of the layer's rounding errors, `[batch length width]`, or None.

    Without a layer in float64, they are taken to be as large as the effect of a few units in the
    last place of the tokens. It is None if the layer computes something else each time, which is no
    rounding.
    """
    if not np.array_equal(whole, desk.whole(of), equal_nan=True):
        return None
    try:
        errors = _errors(desk, of, whole)
    except Exception:
        near = (desk.texts.nearly(desk.dtype, sample) for sample in range(SAMPLES))
        errors = [desk.with_texts(texts).whole(of) - whole for texts in near]
    square: Array = np.mean([error**2 for error in errors], axis=0)
    return square if np.isfinite(square).all() else None


def _errors(desk: Desk, of: str, whole: Array) -> list[Array]:
    """Return the differences between the layer and itself in float64, for several texts.

    For float64, it is the difference to float32, by the ratio of the roundoffs.
    """
    other, scale = "float64", 1.0
    if desk.dtype == other:
        other = "float32"
        scale = dtype_of(desk.dtype).roundoff / dtype_of(other).roundoff
        layer = _built(desk.declared, other, desk.device)
    else:
        layer = desk.declared.wide(desk.built)
    elsewhere = replace(desk, built=layer, dtype=other)
    errors = [whole - elsewhere.whole(of)]
    # Both must represent the tokens.
    coarse = max(desk.dtype, other, key=lambda name: dtype_of(name).roundoff)
    for sample in range(1, SAMPLES):
        near = desk.texts.nearly(coarse, sample)
        errors.append(desk.with_texts(near).whole(of) - elsewhere.with_texts(near).whole(of))
    return [scale * error for error in errors]


@cache
def relative_noise(dtype: str, length: int, width: int) -> float:
    """Return σ of a causal self-attention on random numbers, relative to the rms of its output."""
    heads = 4 if width % 8 == 0 else 1
    sizes = (1, heads, length, width // heads)
    shape = replace(Shape.of_heads(sizes, sizes), sharing="self")
    drawn = draw(shape, np.random.Generator(np.random.PCG64(0)))
    problem = rounded(assembled(shape, drawn, causal="top-left"), dtype)
    found = expect(problem, gradients=False, weights=False)
    want, sigma = found.arrays["output"], found.sigma["output"]
    return float(np.sqrt((sigma**2).mean() / (want**2).mean()))
