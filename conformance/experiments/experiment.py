"""An `Experiment` determines a convention of an implementation by calling it.

Some entries, which are observed conventions, come with a short program that shows the convention by
calling the library without this suite. Such a program is assembled from the user code in the
adapter's example. Its query, key and value are one array, so that it also suits implementations
that support only self-attention. The program prints a number, or a few elements of the output, and
a comment says what that means; tests run the program, and compare its output with the comment.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
from msgspec.structs import replace

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES
from conformance.adapter.base import Adapter, Mode
from conformance.adapter.code import FRAMEWORKS, SMALL, lines
from conformance.adapter.features import Feature
from conformance.definition.dtypes import Array
from conformance.errors import Unsupported
from conformance.records.findings import NOTHING, Argument, Entry, Phrase, Topic
from conformance.requirements.laboratory import CANNOT_BE_ASKED, REFUSED, Laboratory, NoAnswer
from conformance.words import tables


class Question(NamedTuple):
    """A question of an experiment whose calls may crash the process.

    Attributes:
        subject: what the question is about: the subject of the entry that answers it.
        value_of: a function that calls the implementation, and returns the value and the evidence
            of that entry.
    """

    subject: Phrase
    value_of: Callable[[], tuple[Phrase, str]]

    def ask(self) -> Entry:
        """Call the implementation, and return the entry that answers the question."""
        value, evidence = self.value_of()
        return Entry(self.subject, value, evidence)


Made = Iterator[Entry] | Iterator[tuple[Entry, Array | None]] | Iterator[Question]


@dataclass
class Findings:
    """The entries of an experiment, and the arrays to show with some of them.

    The key of an array is the text of its entry's subject.
    """

    entries: list[Entry] = field(default_factory=list)
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """A question about implementations, and the function that answers it by calling one.

    Attributes:
        topic: the description of the experiment, with its name and the question.
        make: a function that calls an implementation through a `Laboratory`, and yields entries
            (observed conventions) for its convention card, some with an array to show.
        place: the position on a card; smaller numbers come first.
        every_mode: whether modes may differ; if not, only the first is examined.
        shared: whether to repeat the experiment with query, key and value in one array, for which
            a library may use other code; entries that differ are added to the card.
        every_dtype: whether to repeat the experiment in the other dtypes, unless the framework
            compiles every operation; entries that differ are added, too.
        costly: whether many shapes are needed, each of which takes seconds if the framework
            compiles every operation. With such a framework, only the first mode is examined, and
            inputs are not shared.
        apart: whether a call may crash the process. If so, `make` yields instances of `Question`,
            and a run answers them one by one in a separate process.
        plain: whether an answer at the usual sizes, without a mask, is needed for comparison. It is
            always needed with `apart`.
        needs: types of features; the experiment is run only if the adapter declares a feature of
            one of these types. If there are none, it is always run.
        where: whether an adapter's mode has what is examined.
    """

    topic: Topic
    make: Callable[[Laboratory], Made]
    place: int
    every_mode: bool = False
    shared: bool = False
    every_dtype: bool = False
    costly: bool = False
    apart: bool = False
    plain: bool = True
    needs: tuple[type[Feature], ...] = ()
    where: Callable[[Adapter, Mode], bool] = lambda adapter, mode: True

    @property
    def name(self) -> str:
        """The name, as in `--case probe/NAME`."""
        return self.topic.name

    @property
    def id(self) -> str:
        """The case id under which the experiment is recorded."""
        return self.topic.id

    def modes(self, adapter: Adapter) -> tuple[Mode, ...]:
        """Return the modes of the adapter in which the experiment is worth running.

        There are none if the adapter declares no feature of the types in `needs`, and only those
        that have what is examined.
        """
        if self.needs and not any(isinstance(each, self.needs) for each in adapter.features):
            return ()
        modes = tuple(mode for mode in adapter.modes if self.where(adapter, mode))
        if not self.every_mode or (self.costly and adapter.compiles):
            return modes[:1]
        # Experiments do not compile whole calls, so optimised modes would repeat other modes.
        return tuple(mode for mode in modes if not mode.optimised)

    def run(self, lab: Laboratory) -> Findings:
        """Run the experiment and return its findings.

        With `apart`, the questions are asked in this process, which a call may crash.

        Raises:
            Unsupported: if the adapter does not support what is examined.
            NoAnswer: if the implementation fails even without a mask.
        """
        if self.apart:
            entries = settled([question.ask() for question in self.questions(lab)])
            return Findings([*declared(entries, lab.adapter)])
        if self.plain:
            lab.plain()
        found = Findings()
        for entry, array in self._made(lab):
            found.entries.append(entry)
            if array is not None:
                found.arrays[str(entry.subject)] = array
        values = {_comparable(entry, lab) for entry in found.entries}
        for about, other in self._asked_again(lab):
            for entry in self._entries(other):
                if _comparable(entry, other) not in values:
                    subject = entry.subject.having(**about)
                    found.entries.append(replace(entry, subject=subject, code=""))
        found.entries = [*declared(found.entries, lab.adapter)]
        return found

    def _made(self, lab: Laboratory) -> Iterator[tuple[Entry, Array | None]]:
        for made in cast("Iterator[Entry | tuple[Entry, Array | None]]", self.make(lab)):
            yield (made, None) if isinstance(made, Entry) else made

    def questions(self, lab: Laboratory) -> list[Question]:
        """Return the questions of an experiment with `apart`; raise the same errors as `run`."""
        lab.plain()
        questions = [*cast("Iterator[Question]", self.make(lab))]
        for about, other in self._asked_again(lab):
            with suppress(Unsupported, NoAnswer):
                other.plain()
                for one in cast("Iterator[Question]", self.make(other)):
                    questions.append(one._replace(subject=one.subject.having(**about)))
        return questions

    def _asked_again(self, lab: Laboratory) -> Iterator[tuple[dict[str, Argument], Laboratory]]:
        """Yield the laboratories in which to repeat the experiment, for `shared` and `every_dtype`.

        Each is preceded by the arguments to add to the subjects of its entries, to tell them apart.
        """
        worth_it = not (self.costly and lab.adapter.compiles)
        if self.shared and worth_it and lab.with_shared_inputs is not None:
            yield {"sharing": Phrase("inputs.shared")}, lab.with_shared_inputs
        if self.every_dtype and not lab.adapter.compiles:
            for other in lab.in_other_dtypes():
                yield {"inputs_in": other.dtype}, other

    def _entries(self, lab: Laboratory) -> Iterator[Entry]:
        """Yield the entries of a laboratory in which the experiment is repeated.

        If a call without a mask fails there, yield one entry that says so; if the adapter does not
        support such a call, yield nothing.
        """
        try:
            lab.plain()
        except Unsupported:
            return
        except NoAnswer as error:
            yield Entry(Phrase("answer.without-mask"), REFUSED, str(error))
            return
        yield from (entry for entry, _ in self._made(lab))


def agreeing(
    subject: Phrase, value: Phrase, evidence: str, declared: Phrase, code: str = ""
) -> Entry:
    """Return an entry that agrees unless a value other than the observed `value` is declared.

    `declared` is the declared value, or `NOTHING`. If `value` is `CANNOT_BE_ASKED`, the declaration
    is ignored.
    """
    declared = NOTHING if value == CANNOT_BE_ASKED else declared
    return Entry(subject, value, evidence, declared, declared in (NOTHING, value), code)


def declared(entries: Iterable[Entry], adapter: Adapter) -> Iterator[Entry]:
    """Yield the entries, completed with what the adapter declares in `conventions`.

    The first pattern in `conventions` that matches the subject of an entry counts.
    """
    for entry in entries:
        subject, value = str(entry.subject), str(entry.value)
        wanted = next((v for p, v in adapter.conventions.items() if _matches(subject, p)), "")
        if wanted:
            agrees = _matches(value, wanted) or _matches(entry.value.id, wanted)
            is_plain = "{" not in tables()["entries"].get(wanted, "{")
            said = Phrase(wanted) if is_plain else Phrase("text", {"text": wanted})
            entry = replace(entry, declared=said, agrees=agrees)
        yield entry


def _matches(text: str, pattern: str) -> bool:
    """Return whether a glob pattern, in which brackets are literal, matches a phrase's text."""
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def settled(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without those about shared inputs that repeat one about separate inputs.

    Entries repeat each other even if the shapes of the answers differ.
    """

    def told(entry: Entry) -> list[Phrase]:
        # Lengths are equal in shared inputs, so the shape of an answer differs.
        return [
            Phrase(it.id, {n: a for n, a in it.arguments.items() if n not in ("sharing", "shape")})
            for it in (entry.subject, entry.value)
        ]

    separate = [told(entry) for entry in entries if not entry.subject.part("sharing")]
    return [it for it in entries if not (it.subject.part("sharing") and told(it) in separate)]


def _comparable(entry: Entry, lab: Laboratory) -> tuple[Phrase, Phrase]:
    """Return subject and value of an entry in a form that can be compared between laboratories.

    This leaves out the dtype of the mask if the inputs have the same one, the name of the input
    that the entry is about, and places other than `_PLACES`.
    """
    subject, value = entry.subject, entry.value
    form = subject.part("form")
    if form.name("dtype") == lab.dtype:
        subject = subject.having(form=Phrase(form.id))
    if subject.part("input"):
        subject = subject.having(input="")
    places = value.parts("places")
    if places:
        value = Phrase(value.id, {"places": [it for it in places if it in _PLACES]})
    return subject, value


_PLACES = (
    *(Phrase(f"place.{name}") for name in ("output", "weights", "parameters")),
    Phrase("place.gradients", {"of": "parameters"}),
)
"""The places to which NaN may spread that are compared between laboratories. Other places are named
after inputs, which may be shared."""


def topic(
    name: str, title: str, question: str, **fields: Any
) -> Callable[[Callable[[Laboratory], Made]], Experiment]:
    """Return a decorator that turns a function into the experiment that runs it.

    Args:
        name, title, question: the id without "probe/", a heading, and what is to be answered.
        fields: other attributes of the `Experiment`, such as `place`, and `revision` of the topic.
    """
    about = Topic(name, title, question, fields.pop("revision", 1))
    return lambda make: Experiment(about, make, **fields)


_SIZES = dict(zip(AXES, SMALL.logits, strict=True))


def hiding_code(
    lab: Laboratory, name: str, made: Sequence[str], told: str, *, token: int = 0
) -> str:
    """Return code that prints how much other outputs change if the first or last token changes.

    Args:
        lab: the laboratory; the result is "" if its adapter has no example for its mode, if no code
            is known for its framework, or if the mode has no gradients.
        name: the mask argument or flag to pass, or "" for none.
        made: lines that create the array `mask`; empty for a flag.
        told: what the printed number means, as a comment.
        token: the token to replace: 0 to look at later outputs, -1 to look at earlier ones.
    """
    rows = "1:" if token == 0 else ":-1"
    return _code(
        lab,
        made,
        name,
        [
            "first = {call}",
            f"x = x.copy(); x[:, {token}] += 1  # another token",
            "query = key = value = {x}",
            "second = {call}",
            f"print(abs(first - second)[:, {rows}].max())  # {told}",
        ],
    )


def difference_code(lab: Laboratory, name: str, made: Sequence[str], told: str) -> str:
    """Return code that prints how much a mask argument changes the output.

    The arguments, and the cases in which the result is "", are those of `hiding_code`.
    """
    shown = ["first = {call}", "second = {plain}", f"print(abs(first - second).max())  # {told}"]
    return _code(lab, made, name, shown)


def output_code(lab: Laboratory, name: str, made: Sequence[str], shown: str, told: str) -> str:
    """Return code that prints `shown`, an expression of the variable `output`.

    The other arguments, and the cases in which the result is "", are those of `hiding_code`.
    """
    return _code(lab, made, name, ["output = {call}", f"print({shown})  # {told}"])


def mask_lines(layout: str, dtype: str, fill: float, mark: float | None, note: str) -> list[str]:
    """Return code lines that create the array `mask`: all `fill`, but `mark` at token 0.

    Token 0 is the first along the last axis of the layout. If `mark` is None, all elements are
    `fill`. The dtype "own" stands for float32. `note` becomes a comment.
    """
    shape = layouts.shape(layout, _SIZES)
    kind = "float32" if dtype == "own" else dtype

    def written(value: float) -> str:
        if kind == "bool":
            return str(bool(value))
        return "-np.inf" if np.isneginf(value) else f"{value:g}"

    made = f"mask = np.full({shape}, {written(fill)}, {kind!r})"
    if mark is not None:
        made += f"; mask[..., 0] = {written(mark)}"
    return [f"{made}  # {note}"]


def _code(lab: Laboratory, made: Sequence[str], name: str, shown: Sequence[str]) -> str:
    """Return the complete program, or "" in the cases that `hiding_code` names.

    In the lines `shown`, "{call}" and "{plain}" stand for calls with and without the argument.
    """
    example, framework = lab.adapter.small_example(lab.mode), FRAMEWORKS.get(lab.adapter.framework)
    # A call without derivatives needs a context such as `no_grad`, which the program lacks.
    if example is None or framework is None or not lab.mode.gradients:
        return ""
    masks = {name: framework.array("mask") if made else "True"} if name else {}
    replaced = {
        "{call}": framework.numpy.format(example.expression(masks)),
        "{plain}": framework.numpy.format(example.expression({})),
        "{x}": framework.array("x"),
    }
    sizes = SMALL.input_shapes()["query"]
    program = [
        *framework.imports(example),
        f'x = np.random.default_rng(0).normal(size={sizes}).astype("float32")',
        "query = key = value = {x}",
        *lines(example.build),
        *lines(example.fresh),
        *made,
        *shown,
    ]
    for mark, code in replaced.items():
        program = [line.replace(mark, code) for line in program]
    return "\n".join(program)
