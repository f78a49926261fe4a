"""The ways through one text, all of which must give the outputs of the whole text at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance.definition.dtypes import Array, BoolArray, dtype_of
from conformance.errors import Unsupported, WrongAnswer
from conformance.frameworks.base import Framework, Natives, Request
from conformance.records.findings import Phrase
from conformance.stateful.layer import StatefulLayer

BATCH = 3
"""The number of texts in a batch."""

PREFILL = 7
"""The number of tokens of a text that are fed at once before single steps."""

PADS = (0, 3, 6)
"""The number of padding tokens in each row of a padded batch; fewer than `PREFILL`."""


ORDERS = ((2, 0, 1), (1, 1, 0))
"""The rows with which a batch goes on, one order after the other."""

PROBES, SURE = 16, 20.0
"""How many tokens are changed to see which outputs move, and how many must have been expected to
move where none does: by chance, this happens once in exp(`SURE`) times."""

GRADIENT = "gradient"
"""What stands for a text in a `Stretch` with the gradient of a loss with respect to the text."""

SHARED = (1, 9, 17)
"""How many tokens a text has in common with the one that was fed before a reset: fewer than a block
of a prefix cache, one more than a block of 8, and one more than a block of 16."""

BEYOND = 4
"""How many more tokens than a buffer holds are fed."""


@dataclass(frozen=True, eq=False)
class Texts:
    """The embeddings of the tokens that a layer is fed, each `[batch length width]`.

    Attributes:
        text: the text whose outputs are compared.
        other: another text, which is fed before.
        padding: what stands in place of tokens where there is only padding.
        discarded: tokens that are fed, and then rolled back or replaced by an earlier state.
    """

    text: Array
    other: Array
    padding: Array
    discarded: Array

    @property
    def longer(self) -> Array:
        """The text, and `BEYOND` more tokens."""
        return np.concatenate([self.text, self.discarded[:, :BEYOND]], axis=1)

    @classmethod
    def drawn(cls, width: int, length: int, like: Array | None = None) -> Texts:
        """Return random tokens that are exact in every dtype.

        If there are embeddings `like` `[number width]`, each token is a mixture of two of them.
        """
        random = np.random.Generator(np.random.PCG64(7))
        size = (BATCH, length)

        def mixed() -> Array:
            if like is None:
                return random.standard_normal((*size, width))
            one, other = (like[random.integers(len(like), size=size)] for _ in range(2))
            share = random.random((*size, 1))
            return np.asarray(share * one + (1 - share) * other)

        parts = (mixed() for _ in range(4))
        return cls(*map(dtype_of("bfloat16").round, parts))

    def nearly(self, dtype: str, seed: int) -> Texts:
        """Return texts whose tokens differ from these by a few units in the last place of a dtype.

        A layer rounds other numbers then, and computes nearly the same.
        """
        random, form = np.random.Generator(np.random.PCG64(seed)), dtype_of(dtype)
        arrays = (self.text, self.other, self.padding, self.discarded)
        return Texts(
            *(
                form.round(it * (1 + 4 * form.roundoff * random.choice([-1.0, 1.0], it.shape)))
                for it in arrays
            )
        )

    def with_other(self, name: str, rows: Any, tokens: Any) -> Texts:
        """Return the same with other tokens at these rows and places of the array `name`."""
        changed = getattr(self, name).copy()
        changed[rows, tokens] = -2.0 * changed[rows, tokens] + 0.5
        return replace(self, **{name: changed})


@dataclass(frozen=True, eq=False)
class Stretch:
    """Outputs `[row query width]` of one call, for tokens `start` to `start + query` of a text.

    Attributes:
        output: the outputs.
        rows: the rows of the batch, in the order of those of `output`.
        start: the place of the first of these tokens in its text.
        step: the number of the call, counted from 1.
        of: the text, an attribute of `Texts`, or `GRADIENT`.
    """

    output: Array
    rows: tuple[int, ...]
    start: int
    step: int
    of: str = "text"

    @property
    def stop(self) -> int:
        """The place after the last token."""
        return self.start + self.output.shape[1]


@dataclass(frozen=True, eq=False)
class Desk:
    """A layer in one dtype with the texts that it is fed.

    Attributes:
        declared: what is declared of the layer.
        built: the layer, which is never fed itself.
        bridge: the bridge to its framework.
        dtype: the dtype in which it computes.
        device: the kind of device.
        texts: the texts.
        told: whether the layer is told the positions of the text's tokens.
    """

    declared: StatefulLayer
    built: Any
    bridge: Framework
    dtype: str
    device: str
    texts: Texts
    told: bool = False

    @property
    def length(self) -> int:
        """The number of tokens of the text."""
        return self.texts.text.shape[1]

    def start(self) -> FedSession:
        """Return a session with a copy of the layer that has not been fed anything."""
        return FedSession(self, self.declared.fresh(self.built))

    def whole(self, of: str = "text") -> Array:
        """Return the outputs of a whole text at once, or for "gradient", the gradient of it."""
        if of == GRADIENT:
            return self.start().gradient([self.length])
        return self.start().feed(getattr(self.texts, of))

    def with_texts(self, texts: Texts) -> Desk:
        """Return the same with other texts."""
        return replace(self, texts=texts)


class FedSession:
    """A layer that is fed; `steps` counts the calls."""

    def __init__(self, desk: Desk, layer: Any) -> None:
        self.desk, self.layer, self.steps = desk, layer, 0
        self.returned: list[tuple[Any, Array]] = []

    def feed(
        self,
        tokens: Array,
        real: BoolArray | None = None,
        *,
        start: int | None = None,
        cached: bool = True,
        overwritten: bool = False,
        watched: bool = False,
    ) -> Array:
        """Return the outputs of new tokens `[batch query width]`.

        Args:
            tokens: the embeddings.
            real: what is no padding, `[batch length]`, with the tokens that were fed before; None
                if all are real.
            start: the position of the first of the tokens, if it is known.
            cached: False for a whole text without a state.
            overwritten: whether the array that was passed is overwritten after the call.
            watched: whether the array that was passed must be the same after the call, and whether
                what the layer returned is kept in `returned`, beside a copy.

        Raises:
            Refuted: if an array that is watched has changed.
            WrongAnswer: if what the layer returns is no array of the shape of the tokens.
        """
        bridge, declared = self.desk.bridge, self.desk.declared
        given = bridge.array(np.ascontiguousarray(tokens), self.desk.dtype, self.desk.device)
        before = np.array(bridge.numpy(given)) if watched else None
        self.steps += 1
        with (
            bridge.session(self.desk.dtype, self.desk.device),
            bridge.without_gradients(),
            np.errstate(all="ignore"),
        ):
            if not cached:
                found = declared.feed_uncached(self.layer, given)
            elif self.desk.told and start is not None:
                at = np.tile(np.arange(start, start + tokens.shape[1]), (len(tokens), 1))
                positions = bridge.array(at, "int64", self.desk.device)
                found = declared.feed_at(self.layer, given, positions)
            elif real is None:
                found = declared.feed(self.layer, given)
            else:
                native = bridge.array(real, "bool", self.desk.device)
                found = declared.feed_padded(self.layer, given, native)
            if not bridge.is_array(found):
                raise WrongAnswer(f"fed tokens, it returned {type(found).__name__}, no array")
            # A copy, because the array may be a part of the state.
            output = np.array(bridge.numpy(found))
            if watched:
                self.returned.append((found, output))
            if before is not None and not np.array_equal(before, bridge.numpy(given)):
                raise Refuted(Phrase("stateful.input-changed", {"step": self.steps}))
            if overwritten:
                by = bridge.array(0.0 * tokens + 3.0, self.desk.dtype, self.desk.device)
                bridge.overwrite(given, by)
        if output.shape[:2] != tokens.shape[:2] or output.ndim != 3:
            raise WrongAnswer(
                f"fed tokens of shape {list(tokens.shape)}, it returned {list(output.shape)}"
            )
        return output

    def part(self, start: int, stop: int, rows: Sequence[int] = (), **how: Any) -> Stretch:
        """Feed tokens `start` to `stop` of the text, in these rows or in all, and return them."""
        of = how.pop("of", "text")
        text = getattr(self.desk.texts, of)
        rows = tuple(rows) or tuple(range(len(text)))
        output = self.feed(text[list(rows), start:stop], start=start, **how)
        return Stretch(output, rows, start, self.steps, of)

    def parts(
        self,
        sizes: Iterable[int],
        start: int = 0,
        stop: int | None = None,
        rows: Sequence[int] = (),
        **how: Any,
    ) -> Iterator[Stretch]:
        """Feed a text from `start` to `stop` in chunks of these sizes, and yield all parts."""
        stop = getattr(self.desk.texts, how.get("of", "text")).shape[1] if stop is None else stop
        for size in sizes:
            if start >= stop:
                return
            yield self.part(start, min(start + size, stop), rows, **how)
            start += size

    def gradient(self, sizes: Iterable[int]) -> Array:
        """Return the gradient of a loss on all outputs with respect to the text, fed in chunks.

        Raises:
            Unsupported: if the layer declares no gradients.
            WrongAnswer: if the outputs do not depend on the text differentiably.
        """
        desk = self.desk
        if not desk.declared.differentiable:
            raise Unsupported("it declares no gradients through its state")
        bridge, text = desk.bridge, desk.texts.text
        drawn = np.random.Generator(np.random.PCG64(11)).standard_normal(text.shape)
        arrays = (text, dtype_of("bfloat16").round(drawn), np.ones(()))
        tokens, cotangent, one = (bridge.array(it, desk.dtype, desk.device) for it in arrays)

        def loss(own: Natives, constants: Natives) -> tuple[Any, None]:
            total, start = None, 0
            for size in sizes:
                if start >= desk.length:
                    break
                chunk = np.s_[:, start : start + size]
                output = desk.declared.feed(self.layer, own["tokens"][chunk])
                part = (output * constants["cotangent"][chunk]).sum()
                total, start = part if total is None else total + part, start + size
            return total, None

        given = {"tokens": tokens}, {"cotangent": cotangent}
        request = Request(loss, *given, one, gradients=True, program=None, compiled=False)
        with bridge.session(desk.dtype, desk.device), np.errstate(all="ignore"):
            found = bridge.differentiate(request).gradients.get("tokens")
            if found is None:
                raise WrongAnswer("its outputs have no gradient with respect to the tokens")
            return np.array(bridge.numpy(found))

    def change(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the declared layer, such as `reset`, on the layer."""
        with self.desk.bridge.without_gradients():
            return action(self.layer, *arguments)


@dataclass(frozen=True)
class Way:
    """A way through a text.

    Attributes:
        name: a stable name, the last part of the case's id.
        requirement: the id of the requirement that the way serves.
        take: yields the parts of the way, in order.
    """

    name: str
    requirement: str
    take: Callable[[Desk], Iterator[Stretch]]


SENTENCES = {
    "stateful.runs": "The same text gives the same outputs again.",
    "stateful.causal": "The output of a token depends on no later token.",
    "stateful.reach": "An output depends on the tokens of its window, and on none before it.",
    "stateful.batch": "A text gives the same alone, in a batch, and at another place in it.",
    "stateful.threads": "The number of threads does not matter.",
    "stateful.steps": "Tokens that come one after the other get what they get all at once.",
    "stateful.chunks": "A text in chunks gets what it gets all at once.",
    "stateful.inputs": "Outputs do not depend on what becomes of an array after it was fed.",
    "stateful.leaves-inputs": "An array that is fed is not changed.",
    "stateful.leaves-outputs": "An array that was returned is not changed by later calls.",
    "stateful.left-padding": "A text with padding before it gets what it gets alone.",
    "stateful.right-padding": "A text with padding after it gets what it gets alone.",
    "stateful.cache-off": "A text gets the same with its cache switched off.",
    "stateful.reset": "After a reset, nothing is left of what was fed before.",
    "stateful.rollback": "After a rollback, nothing is left of the tokens that were rolled back.",
    "stateful.rows": "When rows are reordered, repeated or dropped, each keeps its own text.",
    "stateful.restore": "A state that is restored goes on as it did when it was saved.",
    "stateful.window": "Beyond the window, a text gets what it gets all at once.",
    "stateful.gradients": "Gradients flow through the state as they do through the whole text.",
    "stateful.buffer": "A text that is longer than the buffer is refused, or gets what is right.",
}
"""The requirements, by id."""


def _causal(desk: Desk) -> Iterator[Stretch]:
    half = desk.length // 2
    tokens = desk.texts.text.copy()
    tokens[:, half:] = desk.texts.discarded[:, half : desk.length]
    yield Stretch(desk.start().feed(tokens)[:, :half], tuple(range(len(tokens))), 0, 1)


def _reaches(desk: Desk) -> Iterator[Stretch]:
    """Change single tokens, and see whether the outputs of later tokens move, in any bit."""
    whole, length, window = desk.whole(), desk.length, desk.declared.window
    moved, asked = np.zeros(length, int), np.zeros(length, int)
    for token in range(0, length, max(1, length // PROBES)):
        changed = desk.texts.with_other("text", slice(None), token)
        moves = (desk.with_texts(changed).whole() != whole).any(-1)[:, token:]
        moved[: length - token] += moves.sum(0)
        asked[: length - token] += BATCH
    if not moved.any():
        raise Refuted(Phrase("stateful.constant"))
    if window != 1 and not moved[1:].any():
        raise Refuted(Phrase("stateful.own-token-only"))
    if window is not None and 1 < window <= length and not desk.declared.stacked:
        reached = 1 + int(np.flatnonzero(moved)[-1])
        # As likely as the last token that moves anything, would those before it be seen?
        likely = moved[reached - 1] / asked[reached - 1] * asked[reached:window].sum()
        if reached < window and likely >= SURE:
            raise Refuted(
                Phrase("stateful.window-not-used", {"window": window, "before": reached - 1})
            )
    yield Stretch(whole, tuple(range(BATCH)), 0, 1)


def _before_window(desk: Desk) -> Iterator[Stretch]:
    """Feed a text that is another one before the window."""
    window = _window_of(desk)
    if desk.declared.stacked:
        raise Unsupported("its attentions reach further together than a window")
    other = min(desk.length // 2, desk.length - window)
    tokens = desk.texts.text.copy()
    tokens[:, :other] = desk.texts.discarded[:, :other]
    start = other + window - 1
    yield Stretch(desk.start().feed(tokens)[:, start:], tuple(range(BATCH)), start, 1)


def _again(desk: Desk) -> Iterator[Stretch]:
    for _ in range(3):
        yield desk.start().part(0, desk.length)


def _alone(desk: Desk) -> Iterator[Stretch]:
    for row in range(BATCH):
        yield desk.start().part(0, desk.length, [row])


def _at_another_place(desk: Desk) -> Iterator[Stretch]:
    yield desk.start().part(0, desk.length, [*reversed(range(BATCH))])


def _on_threads(desk: Desk) -> Iterator[Stretch]:
    with desk.bridge.on_threads():
        yield desk.start().part(0, desk.length)


def _single() -> Iterator[int]:
    """Return the sizes of a prefill and single steps."""
    return itertools.chain([PREFILL], itertools.repeat(1))


def _mixed() -> Iterator[int]:
    """Return sizes of chunks that change."""
    return itertools.cycle([PREFILL, 4, 1, 9])


def _steps(desk: Desk) -> Iterator[Stretch]:
    yield from desk.start().parts(_single())


def _in_chunks(size: int) -> Callable[[Desk], Iterator[Stretch]]:
    def take(desk: Desk) -> Iterator[Stretch]:
        if desk.length <= size:
            raise Unsupported(f"the text has only {desk.length} tokens")
        yield from desk.start().parts(itertools.repeat(size))

    return take


def _beside_a_cache(desk: Desk) -> Iterator[Stretch]:
    yield from desk.start().parts(_mixed())


def _overwritten(desk: Desk) -> Iterator[Stretch]:
    yield from desk.start().parts(itertools.repeat(5), overwritten=True)


def _watched(desk: Desk) -> Iterator[Stretch]:
    """Feed a text in chunks of many sizes; what becomes of the outputs is for other ways."""
    for _ in desk.start().parts(_mixed(), watched=True):
        pass
    yield desk.start().part(0, desk.length, watched=True)


def _returned(desk: Desk) -> Iterator[Stretch]:
    """Feed a text in chunks of many sizes, and in steps; look at all outputs when it ends."""
    for sizes in (_mixed(), _single()):
        session = desk.start()
        parts = [*session.parts(sizes, watched=True)]
        for step, (found, output) in enumerate(session.returned, start=1):
            if not np.array_equal(desk.bridge.numpy(found), output, equal_nan=True):
                raise Refuted(Phrase("stateful.output-changed", {"step": step}))
        yield from parts


def _padded(desk: Desk, *, before: bool, sizes: Iterable[int]) -> Iterator[Stretch]:
    """Feed a batch with `PADS` before or after the texts, in chunks of these sizes."""
    length = desk.length
    tokens, real = _with_padding(desk, before=before)
    shift = [pads if before else 0 for pads in PADS]
    session, start = desk.start(), 0
    for size in sizes:
        stop = min(start + size, length)
        output = session.feed(tokens[:, start:stop], real[:, :stop])
        for row in range(BATCH):
            mine = real[row, start:stop]
            first = max(start - shift[row], 0)
            yield Stretch(output[row : row + 1, mine], (row,), first, session.steps)
        start = stop
        if start >= length:
            return


def _with_padding(desk: Desk, *, before: bool) -> tuple[Array, BoolArray]:
    """Return a batch with `PADS` before or after the texts, and what is no padding in it."""
    texts, length = desk.texts, desk.length
    tokens = texts.padding[:, :length].copy()
    real = np.zeros(tokens.shape[:2], np.bool_)
    for row, pads in enumerate(PADS):
        place = slice(pads, None) if before else slice(0, length - pads)
        tokens[row, place] = texts.text[row, : length - pads]
        real[row, place] = True
    return tokens, real


def _left_padded(desk: Desk) -> Iterator[Stretch]:
    yield from _padded(desk, before=True, sizes=itertools.chain([PREFILL, 5], itertools.repeat(1)))


def _left_padded_at_once(desk: Desk) -> Iterator[Stretch]:
    yield from _padded(desk, before=True, sizes=[desk.length])


def _right_padded(desk: Desk) -> Iterator[Stretch]:
    yield from _padded(desk, before=False, sizes=[desk.length])


def _uncached(desk: Desk) -> Iterator[Stretch]:
    for stop in (desk.length // 2, desk.length):
        yield desk.start().part(0, stop, cached=False)


def _after_reset(desk: Desk) -> Iterator[Stretch]:
    """Feed the text after another one, and after texts that begin as it does."""
    session = desk.start()
    session.feed(desk.texts.other[:, : desk.length])
    session.change(desk.declared.reset)
    yield from session.parts(itertools.chain([PREFILL], itertools.repeat(1)))
    for count in SHARED:
        session = desk.start()
        tokens = desk.texts.discarded[:, : desk.length].copy()
        tokens[:, :count] = desk.texts.text[:, :count]
        session.feed(tokens)
        session.change(desk.declared.reset)
        yield session.part(0, desk.length)


def _after_each_other(desk: Desk) -> Iterator[Stretch]:
    """Feed the text, a shorter one, and the text again, each in another way."""
    session, short = desk.start(), max(PREFILL + 1, desk.length // 3)
    yield from session.parts(itertools.repeat(5))
    session.change(desk.declared.reset)
    steps = itertools.chain([PREFILL], itertools.repeat(1))
    yield from session.parts(steps, stop=short, of="other")
    session.change(desk.declared.reset)
    yield session.part(0, desk.length)


def _after_rollback(desk: Desk) -> Iterator[Stretch]:
    """Roll back 1 token and then several, and go on; with a window, before it is full.

    Tokens are rolled back whole calls at a time; then, as if those after the first of a draft were
    rejected, a part of one call; and then the tokens of two calls at once.
    """
    session, fed = desk.start(), 0
    if desk.declared.window is None:
        places = [(9, 1, 0, 1), (13, 5, 2, 1), (desk.length // 2, 3, 0, 2)]
    else:
        limit = min(desk.declared.window, desk.length)
        half, count = max(1, limit // 2), max(1, limit // 4)
        # Nothing of a draft is accepted where the window would be full with it.
        accepted = int(half + 2 + count < limit)
        places = [(half, 1, 0, 1), (half + 1, count, accepted, min(2, count))]
    for stop, count, accepted, calls in places:
        yield from session.parts([stop - fed], fed, stop)
        rejected, first = desk.texts.discarded[:, :count], count // calls
        draft = np.concatenate(
            [desk.texts.text[:, stop : stop + accepted], rejected[:, :first]], axis=1
        )
        found = session.feed(draft)[:, :accepted]
        if accepted:
            yield Stretch(found, tuple(range(BATCH)), stop, session.steps)
        if calls > 1:
            session.feed(rejected[:, first:])
        fed = stop + accepted
        session.change(desk.declared.rollback, count)
        yield from session.parts([1], fed, fed + 1)
        fed += 1
    yield from session.parts(itertools.chain([4], itertools.repeat(1)), fed)


def _reordered(desk: Desk) -> Iterator[Stretch]:
    yield from _with_rows(desk, ORDERS)


def _dropped(desk: Desk) -> Iterator[Stretch]:
    yield from _with_rows(desk, [(0, 2), (1,)])


def _with_rows(desk: Desk, orders: Iterable[Sequence[int]]) -> Iterator[Stretch]:
    """Reorder the rows of the batch after every few tokens, and go on with the text of each."""
    session, rows = desk.start(), tuple(range(BATCH))
    yield session.part(0, PREFILL)
    start = PREFILL
    for order in orders:
        session.change(desk.declared.reorder, list(order))
        rows = tuple(rows[row] for row in order)
        yield from session.parts([1, 3, 1], start, start + 5, rows)
        start += 5


def _padded_reordered(desk: Desk) -> Iterator[Stretch]:
    """Reorder the rows of a batch with padding before the texts, and go on with each."""
    tokens, real = _with_padding(desk, before=True)
    session, start = desk.start(), PREFILL + 5
    session.feed(tokens[:, :start], real[:, :start])
    rows = list(range(BATCH))
    for order in ORDERS:
        session.change(desk.declared.reorder, list(order))
        rows = [rows[row] for row in order]
        for size in (1, 3, 1):
            stop = start + size
            output = session.feed(tokens[rows, start:stop], real[rows, :stop])
            for place, row in enumerate(rows):
                yield Stretch(output[[place]], (row,), start - PADS[row], session.steps)
            start = stop


def _restored(desk: Desk) -> Iterator[Stretch]:
    """Go on from a saved state: in the layer that has gone on otherwise since, and in a new one."""
    session, declared = desk.start(), desk.declared
    yield session.part(0, PREFILL)
    saved = session.change(declared.save)
    for going_on in (session, desk.start()):
        going_on.feed(desk.texts.discarded[:, :5])
        going_on.change(declared.restore, saved)
        yield from going_on.parts([1, 4, 1, 1], PREFILL, PREFILL + 7)


def _window_of(desk: Desk) -> int:
    window = desk.declared.window
    if window is None:
        raise Unsupported("it declares no window")
    if desk.length <= window:
        raise Unsupported(f"the text of {desk.length} tokens is not longer than its window")
    return window


def _beyond_window(desk: Desk) -> Iterator[Stretch]:
    sizes = itertools.chain([_window_of(desk) + 2], itertools.repeat(1))
    yield from desk.start().parts(sizes)


def _across_window(desk: Desk) -> Iterator[Stretch]:
    window = _window_of(desk)
    sizes = itertools.chain([max(1, window - 2), 5, window + 3], itertools.repeat(2))
    yield from desk.start().parts(sizes)


def _full_buffer(desk: Desk) -> Iterator[Stretch]:
    """Fill the buffer to its last place, and feed one more token, or several of which some fit.

    A ring that drops what is before the window may take them.
    """
    if desk.declared.capacity != desk.length:
        raise Unsupported("it declares no capacity")
    for first, more in ((desk.length, 1), (desk.length - 2, BEYOND)):
        session = desk.start()
        yield session.part(0, first)
        try:
            beyond = session.part(first, first + more, of="longer")
        except WrongAnswer:
            raise
        except Exception:
            continue
        try:
            whole = desk.whole("longer")
        except Exception as error:
            raise Refuted(
                Phrase("stateful.not-refused", {"capacity": desk.length, "fed": first + more})
            ) from error
        yield Stretch(whole[:, : desk.length], beyond.rows, 0, 1)
        yield beyond


def _gradients(sizes: Callable[[], Iterable[int]]) -> Callable[[Desk], Iterator[Stretch]]:
    def take(desk: Desk) -> Iterator[Stretch]:
        gradient, start = desk.start().gradient(sizes()), 0
        for step, size in enumerate(sizes(), start=1):
            if start >= desk.length:
                return
            own = gradient[:, start : start + size]
            yield Stretch(own, tuple(range(BATCH)), start, step, GRADIENT)
            start += size

    return take


class Refuted(Exception):
    """A way shows that a requirement is not met, without outputs to compare.

    Attributes:
        cause: what is wrong.
    """

    def __init__(self, cause: Phrase) -> None:
        super().__init__(cause.id)
        self.cause = cause


WAYS = (
    Way("runs", "stateful.runs", _again),
    Way("causal", "stateful.causal", _causal),
    Way("reach", "stateful.reach", _reaches),
    Way("before-window", "stateful.reach", _before_window),
    Way("alone", "stateful.batch", _alone),
    Way("batch-position", "stateful.batch", _at_another_place),
    Way("threads", "stateful.threads", _on_threads),
    Way("steps", "stateful.steps", _steps),
    *(Way(f"chunks-{n}", "stateful.chunks", _in_chunks(n)) for n in (1, 2, 3, 5, 17, 64)),
    Way("chunks-mixed", "stateful.chunks", _beside_a_cache),
    Way("inputs-overwritten", "stateful.inputs", _overwritten),
    Way("inputs-unchanged", "stateful.leaves-inputs", _watched),
    Way("outputs-unchanged", "stateful.leaves-outputs", _returned),
    Way("left-padding", "stateful.left-padding", _left_padded),
    Way("left-padding-whole", "stateful.left-padding", _left_padded_at_once),
    Way("right-padding", "stateful.right-padding", _right_padded),
    Way("cache-off", "stateful.cache-off", _uncached),
    Way("after-reset", "stateful.reset", _after_reset),
    Way("after-each-other", "stateful.reset", _after_each_other),
    Way("after-rollback", "stateful.rollback", _after_rollback),
    Way("rows-reordered", "stateful.rows", _reordered),
    Way("reordered-padded", "stateful.rows", _padded_reordered),
    Way("rows-dropped", "stateful.rows", _dropped),
    Way("restored", "stateful.restore", _restored),
    Way("beyond-window", "stateful.window", _beyond_window),
    Way("across-window", "stateful.window", _across_window),
    Way("gradients-steps", "stateful.gradients", _gradients(_single)),
    Way("gradients-chunks", "stateful.gradients", _gradients(_mixed)),
    Way("full-buffer", "stateful.buffer", _full_buffer),
)
"""All ways, in the order in which they are taken."""
