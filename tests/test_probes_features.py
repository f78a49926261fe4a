"""Conventions of windows, soft caps, sinks and the like are read off; each double has one answer.

The doubles compute in NumPy and differ in one line each. The right ones agree with what they
declare; each of the others is told by name.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from mutants.fakes import entries, fake, softmax, usual, values
from mutants.miniatures import MASK

from conformance import (
    Alibi,
    CausalFlag,
    Chunk,
    Lengths,
    RotaryConfig,
    RotaryTables,
    Sinks,
    SoftCap,
    Spans,
    Tree,
    Unsupported,
    Window,
    attention_function,
)
from conformance.definition.rotary import RotaryScaling
from conformance.experiments import EXPERIMENTS, experiment
from conformance.words import say


def distances(logits, *, end=False):
    queries, keys = logits.shape[-2:]
    return np.arange(keys) - np.arange(queries)[:, None] - (keys - queries if end else 0)


def windowed(before=0, after=0, *, end=False, causal=True):
    """A window of one number W: W + before keys before the own one, and after it likewise."""

    def logits(found, window):
        far = distances(found, end=end)
        last = 0 if causal else window + after
        return np.where((far >= -window - before) & (far <= last), found, -np.inf)

    return logits


def one_number(form, logits, **declared):
    return fake(logits, masks=(), features=(Window("window", form, none=None, **declared),))


def test_a_negative_limit_of_a_window_may_be_a_number_of_keys():
    def logits(found, window):
        far, (before, after) = distances(found), window
        return np.where((far >= -before) & (far <= after), found, -np.inf)

    adapter = one_number("left right", logits, alignment="top-left")
    found = values(adapter, "windows")
    assert found["window=(-1, 1), equal lengths"] == "only the keys 1 to 1 after the own key"
    assert found["window=(1, -1), equal lengths"] == "only the keys 1 to 1 before the own key"
    assert found["window=(1, 2), equal lengths"] == "the own key, 1 before and 2 after"


WINDOWS = [
    # form, its logits, what W = 2 shows
    ("own and before", windowed(-1), "the own key, 1 before and 0 after"),
    ("before", windowed(), "the own key, 2 before and 0 after"),
    ("each side", windowed(causal=False), "the own key, 2 before and 2 after"),
]


@pytest.mark.parametrize(("form", "logits", "told"), WINDOWS)
def test_a_window_is_what_is_declared_and_nothing_else(form, logits, told):
    for declared, *_ in WINDOWS:
        adapter = one_number(declared, logits, alignment="top-left")
        entry = entries(adapter, "windows")["window=2, equal lengths"]
        assert str(entry.agrees) == str(declared == form)
        assert told in str(values(adapter, "windows")["window=2, equal lengths"])


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("declared", ["top-left", "bottom-right"])
def test_a_window_counts_from_one_end(declared, end):
    adapter = one_number("before", windowed(end=end), alignment=declared)
    found = entries(adapter, "windows")
    told = "bottom-right" if end else "top-left"
    for lengths in ("fewer queries than keys", "more queries"):
        entry = found[f"window=1, {lengths}"]
        assert entry.agrees == (told == declared), lengths
    assert values(adapter, "windows")["window=1, fewer queries than keys"].endswith(told)
    assert (
        values(adapter, "windows")["window=50, equal lengths"]
        == values(adapter, "windows")["window=50, equal lengths"]
    )


def test_a_window_that_is_ignored_shows_every_key():
    adapter = one_number("before", lambda found, window: found, alignment="top-left")
    assert set(values(adapter, "windows").values()) == {"every key"}
    assert not entries(adapter, "windows")["window=1, equal lengths"].agrees


def test_a_window_without_keys_may_give_zeros_or_equal_weights():
    """As where each of two masks is filled with a finite number, and one alone counts as empty."""

    def logits(found, window):
        far = distances(found)
        return np.where((far >= -window) & (far <= 0), found, -1e30)

    def weights(weights, window):
        within = distances(weights) >= -window
        return np.where(within.any(axis=-1, keepdims=True), weights, 0)

    feature = Window("window", "before", none=None, alignment="top-left")
    found = values(fake(logits, weights, masks=(), features=(feature,)), "windows")
    told = "no key; either none or every key has the same weight"
    assert found["window=-1, equal lengths"] == told
    assert found["window=1, equal lengths"] == "the own key, 1 before and 0 after"


def test_a_window_that_a_mode_cannot_have_is_no_deviation():
    def logits(found, window):
        raise Unsupported("no window in this mode")

    found = entries(one_number("before", logits, alignment="top-left"), "windows")
    assert {say(entry.value) for entry in found.values()} == {"cannot be asked"}
    assert all(entry.agrees for entry in found.values())


def test_a_window_may_need_the_causal_flag():
    def logits(found, window=None, is_causal=False):
        far = distances(found)
        found = np.where(far <= 0, found, -np.inf) if is_causal else found
        return np.where(far >= -window, found, -np.inf) if is_causal and window else found

    feature = Window("window", "before", none=0, alignment="top-left", needs_causal=True)
    flag = CausalFlag("is_causal", "top-left")
    adapter = fake(logits, masks=(), features=(feature,), causal_flag=flag)
    found = entries(adapter, "windows")
    assert all(entry.agrees for entry in found.values())
    assert values(adapter, "windows")["window=0, equal lengths"].endswith("all before and 0 after")


def chunked(*, end=False, causal=True):
    """Blocks of positions from the first key on; the last query may have the last position."""

    def logits(found, chunk):
        queries, keys = found.shape[-2:]
        at = np.arange(queries) + (keys - queries if end else 0)
        seen = at[:, None] // chunk == np.arange(keys) // chunk
        seen &= (distances(found, end=end) <= 0) | (not causal)
        return np.where(seen, found, -np.inf)

    return logits


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("declared", [True, False])
def test_chunks_may_be_causal(declared, causal):
    feature = Chunk("chunk", alignment="top-left", causal=declared)
    adapter = fake(chunked(causal=causal), masks=(), features=(feature,))
    entry = entries(adapter, "chunks")["chunk=3, equal lengths"]
    assert entry.agrees == (declared == causal)
    told = f"blocks of 3 keys from the first key on, {'causal' if causal else 'both ways'}"
    assert say(entry.value) == told


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("declared", ["top-left", "bottom-right"])
def test_chunks_count_queries_from_one_end(declared, end):
    feature = Chunk("chunk", alignment=declared, causal=True)
    adapter = fake(chunked(end=end), masks=(), features=(feature,))
    entry = entries(adapter, "chunks")["chunk=3, fewer queries than keys"]
    told = "bottom-right" if end else "top-left"
    assert entry.agrees == (told == declared)
    assert say(entry.value).endswith(told)


def test_chunks_that_are_ignored_show_every_key():
    feature = Chunk("chunk", alignment="top-left")
    adapter = fake(lambda found, chunk: found, masks=(), features=(feature,))
    assert set(values(adapter, "chunks").values()) == {"every key"}
    assert not any(entry.agrees for entry in entries(adapter, "chunks").values())


def dilated(rule=lambda far, step, index: far % step == 0, *, reach=lambda w, step: w, end=False):
    """A window of which a rule leaves some keys; its argument may count steps."""

    def logits(found, window, dilation=1):
        far = distances(found, end=end)
        near = np.abs(far) <= reach(window, dilation)
        index = np.arange(found.shape[-1])
        return np.where(near & rule(far, dilation, index), found, -np.inf)

    return logits


def of_dilation(logits, **declared):
    feature = Window("window", "each side", **{"alignment": "top-left"} | declared)
    return fake(logits, masks=(), features=(feature,))


STEP_2, STEP_3 = (f"dilation={n} beside window={n}, equal lengths" for n in (2, 3))


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("declared", ["steps", "positions"])
def test_a_window_beside_a_dilation_counts_steps_or_positions(declared, steps):
    logits = dilated(reach=lambda w, step: w * step if steps else w)
    found = entries(of_dilation(logits, dilation="dilation", counts=declared), "dilation")
    told = f"in a window of {'steps' if steps else 'positions'}"
    for subject in (STEP_2, STEP_3):
        assert say(found[subject].value) == f"keys whose distance is a multiple of it, {told}"
        assert found[subject].agrees == (declared == ("steps" if steps else "positions"))


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("declared", ["top-left", "bottom-right"])
def test_a_dilation_is_counted_from_the_position(declared, end):
    adapter = of_dilation(dilated(end=end), dilation="dilation", alignment=declared)
    entry = entries(adapter, "dilation")[STEP_2.replace("equal lengths", "fewer queries than keys")]
    told = "bottom-right" if end else "top-left"
    assert say(entry.value).endswith(told)
    assert entry.agrees == (told == declared)


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (lambda far, step, index: far == far, "the keys between, too"),
        (lambda far, step, index: index % step == 0, "keys whose index is a multiple of it"),
        (lambda far, step, index: far % (step + 1) == 0, "as many keys as it says are skipped"),
        (
            lambda far, step, index: (far % step == 0) | (far > 0),
            "keys whose distance is a multiple of it, and all after the query",
        ),
        (
            lambda far, step, index: (far % step == 0) & (far != 0),
            "keys whose distance is a multiple of it, but for the own key",
        ),
        (lambda far, step, index: far % step != 0, "keys whose distance is no multiple of it"),
    ],
)
def test_a_dilation_may_mean_something_else(rule, told):
    entry = entries(of_dilation(dilated(rule), dilation="dilation"), "dilation")[STEP_3]
    assert say(entry.value) == f"{told}, in a window of positions"
    assert not entry.agrees


def test_a_window_without_a_dilation_is_not_asked_for_one():
    adapter = of_dilation(dilated())
    assert not experiment("dilation").modes(adapter)
    assert experiment("dilation").modes(of_dilation(dilated(), dilation="dilation"))


def global_tokens(
    see=lambda near, on, rows, columns, own: (near & on) | rows | columns, *, end=False
):
    """A window beside which tokens see and are seen in some way."""

    def logits(found, window, tokens=None, dilation=1):
        far = distances(found, end=end)
        near, on = np.abs(far) <= window, far % dilation == 0
        if tokens is None:
            return np.where(near & on, found, -np.inf)
        own = (far == 0)[None]
        rows = (own & (tokens != 0)[:, None]).any(axis=2, keepdims=True)
        seen = see(near, on, rows, (tokens != 0)[:, None], own)
        return np.where(seen[:, None], found, -np.inf)

    return logits


BOTH = {"dilation": "dilation", "global_tokens": "tokens"}
TOKENS, TOKENS_DILATED = (
    f"tokens beside window={told}, equal lengths" for told in ("1", "2, dilation=2")
)


@pytest.mark.parametrize("end", [True, False])
def test_global_tokens_see_every_key_and_are_seen_by_every_query(end):
    where = {"alignment": "bottom-right" if end else "top-left"}
    for dtype in ("int32", "bool"):
        adapter = of_dilation(global_tokens(end=end), **BOTH, **where, dtype=dtype)
        found = {n: it for n, it in entries(adapter, "dilation").items() if n.startswith("tokens")}
        assert len(found) == 4
        assert all(entry.agrees for entry in found.values())
        assert say(found[TOKENS].value) == "global tokens see every key, and every query sees them"


@pytest.mark.parametrize(
    ("see", "told", "subject"),
    [
        (
            lambda near, on, rows, columns, own: (near & on) | rows,
            "global tokens see every key, and no other query sees them from afar",
            TOKENS,
        ),
        (
            lambda near, on, rows, columns, own: (near & on) | columns,
            "every query sees global tokens, which see what others see",
            TOKENS,
        ),
        (
            lambda near, on, rows, columns, own: near & on & (own | ~own) & (rows | ~rows),
            "global tokens are like others",
            TOKENS,
        ),
        (
            lambda near, on, rows, columns, own: own | rows | columns,
            "every query sees global tokens and itself only",
            TOKENS,
        ),
        (
            lambda near, on, rows, columns, own: (near & on) | (rows | columns)[:1],
            "the global tokens of the first entry are those of all",
            TOKENS,
        ),
        (
            lambda near, on, rows, columns, own: near & (on | rows | columns),
            "the window holds for global tokens, too",
            TOKENS_DILATED,
        ),
        (
            lambda near, on, rows, columns, own: on & (near | rows | columns),
            "the dilation holds for global tokens, too",
            TOKENS_DILATED,
        ),
        (
            lambda near, on, rows, columns, own: near | rows | columns,
            "there is no dilation beside global tokens",
            TOKENS_DILATED,
        ),
    ],
)
def test_global_tokens_may_be_something_else(see, told, subject):
    entry = entries(of_dilation(global_tokens(see), **BOTH), "dilation")[subject]
    assert say(entry.value) == told
    assert not entry.agrees


def test_a_window_of_which_the_causal_flag_is_needed_is_causal_beside_global_tokens():
    def logits(found, window, tokens=None, is_causal=False):
        far = distances(found)
        whole = global_tokens()(found, window, tokens)
        return np.where((far <= 0) | (not is_causal), whole, -np.inf)

    feature = Window("window", "before", 0, "top-left", needs_causal=True, global_tokens="tokens")
    flag = CausalFlag("is_causal", "top-left")
    found = entries(fake(logits, masks=(), features=(feature,), causal_flag=flag), "dilation")
    assert len(found) == 2
    assert found[TOKENS].agrees


def runs(ids):
    begins = np.diff(ids, axis=1, prepend=0) != 0
    return np.where(ids != 0, begins.cumsum(axis=1), 0)


def spanned(change=lambda ids: ids, *, end=False, text=0, see=None):
    """Keys of one id see each other, after a change to the ids; `see` is (past, inside) to both."""

    def logits(found, spans, window=None):
        queries, keys = found.shape[-2:]
        at, ids = np.arange(queries) + (keys - queries if end else 0), change(spans)
        of_queries = np.where(at < keys, ids[:, np.minimum(at, keys - 1)], text)
        inside = (of_queries[:, :, None] == ids[:, None]) & (ids[:, None] != text)
        past = np.broadcast_to(distances(found, end=end) <= 0, inside.shape)
        seen = past | inside if see is None else see(past, inside, of_queries, window)
        return np.where(seen[:, None], found, -np.inf)

    return logits


def ids_of_spans(form="ids", **declared):
    return Spans("spans", form, **{"alignment": "top-left", "causal": True} | declared)


def of_spans(logits, feature, *more):
    return fake(logits, masks=(), features=(feature, *more))


TWO, TOUCHING, APART = (
    f"spans: {told}, equal lengths"
    for told in ("two spans", "two spans that touch", "keys of one id that do not touch")
)


@pytest.mark.parametrize("end", [True, False])
@pytest.mark.parametrize("none", [0, -1])
def test_spans_are_keys_of_one_id(none, end):
    feature = ids_of_spans(none=none, alignment="bottom-right" if end else "top-left")
    found = entries(of_spans(spanned(text=none, end=end), feature), "spans")
    assert len(found) == 5
    assert all(entry.agrees for entry in found.values())
    assert say(found[APART].value) == "keys of one id see each other, and all keys before"
    told = say(found["spans: a span, fewer queries than keys"].value)
    assert told.endswith("bottom-right" if end else "top-left")


def test_spans_of_the_other_alignment_disagree():
    found = entries(of_spans(spanned(end=True), ids_of_spans()), "spans")
    assert [entry.agrees for entry in found.values()] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("change", "subject", "told"),
    [
        (runs, APART, "consecutive keys of one id see each other"),
        (
            lambda ids: runs(1 * (ids != 0)),
            TOUCHING,
            "consecutive keys of any id see each other",
        ),
        (lambda ids: 1 * (ids != 0), TWO, "all keys of any id see each other"),
        (lambda ids: ids + 1, TWO, "keys of one id see each other, and so do those in no span"),
        (
            lambda ids: np.where(np.roll(ids, -1, 1) == ids, ids, 0),
            TWO,
            "keys of one id see each other, but for the last",
        ),
        (
            lambda ids: np.where(ids == 0, np.roll(ids, 1, 1), ids),
            TWO,
            "keys of one id see each other and the next key",
        ),
        (lambda ids: 0 * ids, TWO, "queries see no later key"),
        (
            lambda ids: np.where((runs(ids) == 1) & (ids[:, :1] != 0), ids, 0),
            TWO,
            "keys of a prefix see each other",
        ),
        (lambda ids: np.where(ids == 1, ids, 0), TOUCHING, "keys of id 1 see each other"),
    ],
)
def test_ids_of_spans_may_mean_something_else(change, subject, told):
    entry = entries(of_spans(spanned(change), ids_of_spans()), "spans")[subject]
    assert say(entry.value) == f"{told}, and all keys before"
    assert not entry.agrees


def test_a_span_may_hide_what_is_before_it_or_be_shown_to_all():
    def alone(past, inside, of_queries, window):
        return np.where((of_queries != 0)[:, :, None], inside, past)

    entry = entries(of_spans(spanned(see=alone), ids_of_spans()), "spans")[TWO]
    assert say(entry.value) == "keys of one id see each other, and in a span no key before it"
    assert not entry.agrees

    def logits(found, spans):
        seen = (distances(found) <= 0) | (spans != 0)[:, None]
        return np.where(seen[:, None], found, -np.inf)

    entry = entries(of_spans(logits, ids_of_spans()), "spans")[TWO]
    assert say(entry.value) == "all queries see the keys of spans, and all keys before"


def test_spans_may_be_runs_or_a_prefix():
    found = entries(of_spans(spanned(runs), ids_of_spans("runs")), "spans")
    assert len(found) == 3
    assert all(entry.agrees for entry in found.values())
    entry = entries(of_spans(spanned(), ids_of_spans("runs")), "spans")[TWO]
    assert not entry.agrees

    def logits(found, spans):
        first = np.arange(found.shape[-1]) < spans[:, None]
        return spanned()(found, 1 * first)

    found = entries(of_spans(logits, ids_of_spans("prefix")), "spans")
    assert list(found) == ["spans: a prefix, equal lengths"]
    assert all(entry.agrees for entry in found.values())


HELD = {
    "holds inside a span": lambda past, inside, near, before: (past | inside) & near,
    "holds before a query inside a span, not after it": (
        lambda past, inside, near, before: (past | inside) & before
    ),
    "does not hold inside a span": lambda past, inside, near, before: (past & near) | inside,
    "is ignored beside spans": lambda past, inside, near, before: past | inside,
    "makes the spans ignored": lambda past, inside, near, before: past & near,
}


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("told", HELD)
def test_a_window_may_hold_inside_a_span(told, limited):
    def see(past, inside, of_queries, window):
        if window is None:
            return past | inside
        far = np.arange(past.shape[2]) - np.arange(past.shape[1])[:, None]
        before = far >= -window
        return HELD[told](past, inside, before & (far <= window), before)

    features = ids_of_spans(limited=limited), Window("window", "each side", none=None)
    entry = entries(of_spans(spanned(see=see), *features), "spans")["spans beside window"]
    assert say(entry.value) == told
    assert entry.agrees == (told == list(HELD)[0 if limited else 2])


def grown(change=lambda line, parent: line, *, start=False, cache=True, root=-1):
    """Each drafted token sees its ancestors; `change` is one to who sees whom."""

    def logits(found, tree):
        queries, keys = found.shape[-2:]
        own = np.tile(np.eye(queries, dtype=bool), (len(tree), 1, 1))
        line = own.copy()
        for entry, token in np.ndindex(tree.shape):
            if tree[entry, token] != (token if root == "own" else -1):
                line[entry, token] |= line[entry, tree[entry, token]]
        parent = (tree[:, :, None] == np.arange(queries)) & ~own
        seen = np.full((len(tree), queries, keys), cache)
        seen[..., slice(queries) if start else slice(keys - queries, keys)] = change(line, parent)
        return np.where(seen[:, None], found, -np.inf)

    return logits


BESIDE_TWO = "tree, fewer queries than keys"


@pytest.mark.parametrize("root", [-1, "own"])
def test_a_drafted_token_sees_its_ancestors(root):
    found = entries(fake(grown(root=root), masks=(), features=(Tree("tree", root=root),)), "trees")
    assert len(found) == 2
    assert all(entry.agrees for entry in found.values())
    told = "the cached keys, a drafted token itself and its ancestors"
    assert say(found[BESIDE_TWO].value) == told


def test_ancestors_may_be_a_mask():
    def logits(found, tree):
        seen = np.ones(found.shape, bool)
        seen[..., found.shape[3] - found.shape[2] :] = tree[:, None]
        return np.where(seen, found, -np.inf)

    found = entries(fake(logits, masks=(), features=(Tree("tree", "ancestors"),)), "trees")
    assert all(entry.agrees for entry in found.values())


def same_parent(line, parent):
    return line | (parent[:, :, None] == parent[:, None]).all(axis=-1)


OTHERS = {
    "all keys before, whatever the tree": lambda line, parent: np.tri(6, dtype=bool),
    "the cached keys, a drafted token itself and its parent": (
        lambda line, parent: parent | np.eye(6, dtype=bool)
    ),
    "the cached keys and a drafted token itself": lambda line, parent: np.eye(6, dtype=bool),
    "the cached keys and the ancestors of a drafted token": (
        lambda line, parent: line & ~np.eye(6, dtype=bool)
    ),
    "the ancestors of a drafted token and those with the same parent": same_parent,
    "the ancestors of a drafted token and its descendants": (
        lambda line, parent: line | line.swapaxes(1, 2)
    ),
    "the descendants of a drafted token": lambda line, parent: line.swapaxes(1, 2),
    "the ancestors of a drafted token and the last one": (
        lambda line, parent: line | (np.arange(6) == 5)
    ),
    "the ancestors of a drafted token and the first one": (
        lambda line, parent: line | (np.arange(6) == 0)
    ),
    "every key": lambda line, parent: True,
}


@pytest.mark.parametrize("told", OTHERS)
def test_a_drafted_token_may_see_others(told):
    entry = entries(fake(grown(OTHERS[told]), masks=(), features=(Tree("tree"),)), "trees")
    assert say(entry[BESIDE_TWO].value) == told
    assert not entry[BESIDE_TWO].agrees


def test_drafted_tokens_may_see_no_cache_or_be_the_first_keys():
    for told, how in (
        ("the ancestors of a drafted token and no cached key", {"cache": False}),
        ("the first keys by the tree, and all keys after these", {"start": True}),
    ):
        found = entries(fake(grown(**how), masks=(), features=(Tree("tree"),)), "trees")
        assert [entry.agrees for entry in found.values()] == [True, False]
        assert say(found[BESIDE_TWO].value) == told


def test_experiments_on_features_are_for_those_who_have_them():
    known = {item.name: item for item in EXPERIMENTS}
    names = (
        "windows",
        "chunks",
        "spans",
        "trees",
        "lengths",
        "soft-cap",
        "sinks",
        "alibi",
        "rotary",
    )
    names += ("rotary-scaling", "position-axes")
    assert all(known[name].needs for name in names)
    plain = fake(usual)
    assert not any(known[name].modes(plain) for name in names)


@pytest.mark.parametrize("declared", ["length", "last index"])
@pytest.mark.parametrize("counts", ["length", "last index"])
def test_a_length_counts_keys_or_names_the_last(counts, declared):
    def logits(found, lengths):
        end = lengths + (counts == "last index")
        return np.where(np.arange(found.shape[-1]) < end[:, None, None, None], found, -np.inf)

    adapter = fake(logits, masks=(), features=(Lengths("lengths", counts=declared),))
    found = entries(adapter, "lengths")["lengths: what it counts of keys"]
    assert found.agrees == (counts == declared)
    told = {"length": "their number", "last index": "the index of the last"}[counts]
    assert values(adapter, "lengths")["lengths: what it counts of keys"] == told


@pytest.mark.parametrize("ignores", [False, True])
def test_a_length_may_need_the_causal_flag(ignores):
    """As in models whose padding is always beside a causal mask."""

    def logits(found, lengths=None, is_causal=False):
        keys = np.arange(found.shape[-1])
        used = found.shape[-1] if lengths is None or ignores else lengths[:, None, None, None]
        causal = distances(found) <= 0 if is_causal or lengths is not None else True
        return np.where((keys < used) & causal, found, -np.inf)

    feature = Lengths("lengths", needs_causal=True)
    adapter = fake(
        logits, masks=(), features=(feature,), causal_flag=CausalFlag("is_causal", "top-left")
    )
    told = values(adapter, "lengths")["lengths: what it counts of keys"]
    assert told == ("ignored" if ignores else "their number")
    assert entries(adapter, "lengths")["lengths: what it counts of keys"].agrees == (not ignores)


class OwnSlopes(Alibi):
    """Slopes that an implementation has without being told, if a flag is set."""

    def own(self, shape):
        return 2.0 ** -np.arange(1, shape.heads + 1)

    def native(self, slopes, problem):
        return True

    def ways(self, problem, said):
        for way in super().ways(problem, said):
            yield replace(way, needs_flag=True)


@pytest.mark.parametrize(
    ("times", "told"),
    [(0, "ignored"), (1, "−slope · distance"), (2, "−2 · slope · distance"), (3, "unexplained")],
)
def test_slopes_of_ones_own_are_asked_beside_what_they_need(times, told):
    def logits(found, alibi=False, is_causal=False):
        far = distances(found)
        slopes = 2.0 ** -np.arange(1, found.shape[1] + 1)[:, None, None]
        added = np.where(far <= 0, found, -np.inf) if is_causal else found
        return added - times * slopes * np.abs(far) * bool(alibi)

    flag = CausalFlag("is_causal", "top-left")
    adapter = fake(logits, masks=(), features=(OwnSlopes("alibi"),), causal_flag=flag)
    assert values(adapter, "alibi") == {"slopes, equal lengths": told}
    assert entries(adapter, "alibi")["slopes, equal lengths"].agrees == (times == 1)


def capped(formula):
    def logits(found, softcap=0.0, mask=None):
        uncapped = softcap <= 0 or softcap == np.inf
        return then_masked(found, mask) if uncapped else formula(found, softcap, mask)

    return logits


def then_masked(found, mask):
    return found if mask is None else usual(found, mask)


CAPS = {
    "cap · tanh(logit / cap)": lambda s, c, m: then_masked(c * np.tanh(s / c), m),
    "cap · tanh(logit / cap), before the scale": lambda s, c, m: then_masked(
        c * np.tanh(s / c * math.sqrt(8)) / math.sqrt(8), m
    ),
    "logits are clipped to ±cap": lambda s, c, m: then_masked(np.clip(s, -c, c), m),
    "tanh(logit / cap), without the factor": lambda s, c, m: then_masked(np.tanh(s / c), m),
    "ignored": lambda s, c, m: then_masked(s, m),
}


@pytest.mark.parametrize("told", CAPS)
def test_a_soft_cap_has_a_formula(told):
    adapter = fake(capped(CAPS[told]), masks=MASK, features=(SoftCap("softcap"),))
    found = entries(adapter, "soft-cap")["softcap: formula"]
    assert values(adapter, "soft-cap")["softcap: formula"] == told
    assert found.agrees == (told == next(iter(CAPS)))


def test_a_negative_soft_cap_may_have_no_sign_and_no_effect():
    formula = CAPS["cap · tanh(logit / cap)"]

    def signless(found, softcap=0.0, mask=None):
        uncapped = softcap in (0, np.inf)
        return then_masked(found, mask) if uncapped else formula(found, softcap, mask)

    for logits, told in ((capped(formula), "no cap"), (signless, "as without the sign")):
        adapter = fake(logits, masks=MASK, features=(SoftCap("softcap"),))
        assert values(adapter, "soft-cap")["softcap=−1"] == told


def test_a_soft_cap_comes_before_masks_and_biases():
    right = fake(
        capped(CAPS["cap · tanh(logit / cap)"]), masks=MASK, features=(SoftCap("softcap"),)
    )
    assert all(entry.agrees for entry in entries(right, "soft-cap").values())
    assert values(right, "soft-cap")["softcap with mask, a key blocked"] == "capped, then masked"
    late = fake(
        capped(lambda s, c, m: c * np.tanh(then_masked(s, m) / c)),
        masks=MASK,
        features=(SoftCap("softcap"),),
    )
    found = values(late, "soft-cap")
    assert found["softcap with mask, a key blocked"].startswith("masked, then capped")
    assert found["softcap with mask, finite numbers"] == "added, then capped"
    assert not entries(late, "soft-cap")["softcap with mask, finite numbers"].agrees


SINKS = {
    "logits, one for each head": lambda s: s,
    "logits of base 2": lambda s: s * np.log(2),
    "scaled as other logits are": lambda s: s / math.sqrt(8),
    "the first head's, for all heads": lambda s: np.full_like(s, s[0]),
    "a logit of 0, whatever is given": lambda s: 0 * s,
    "ignored": lambda s: np.full_like(s, -np.inf),
}


def with_sinks(unit):
    def logits(found, sinks=None, mask=None):
        """Return the logarithm of the weights, of which the double takes the exponential."""
        found = then_masked(found, mask)
        if sinks is None:
            return np.log(softmax(found))
        sink = np.broadcast_to(unit(sinks)[:, None, None], (*found.shape[:-1], 1))
        return np.log(softmax(np.concatenate([found, sink.astype(found.dtype)], axis=-1))[..., :-1])

    return logits


@pytest.mark.parametrize("told", SINKS)
def test_a_sink_has_units(told, monkeypatch):
    # The weights do not sum to one, so the double's own softmax is replaced by an exponential.
    monkeypatch.setattr("mutants.fakes.softmax", np.exp)
    adapter = fake(with_sinks(SINKS[told]), masks=MASK, features=(Sinks("sinks"),))
    found = values(adapter, "sinks")
    assert found["sinks: units"] == told
    assert entries(adapter, "sinks")["sinks: units"].agrees == (told == next(iter(SINKS)))
    if told == next(iter(SINKS)):
        assert found["sinks of −inf"] == "no sinks"
        assert found["sinks with mask, every key blocked"] == "zeros"


SLOPES = {
    "−slope · distance": lambda m, far, keys: -m * np.abs(far),
    "+slope · distance": lambda m, far, keys: m * np.abs(far),
    "slope · (key position − query position)": lambda m, far, keys: m * far,
    "−slope · key position": lambda m, far, keys: -m * keys,
    "ignored": lambda m, far, keys: 0 * far,
}


@pytest.mark.parametrize("told", SLOPES)
@pytest.mark.parametrize("end", [False, True])
def test_slopes_are_subtracted(told, end):
    def logits(found, slopes):
        far = distances(found, end=end)
        return found + SLOPES[told](slopes[:, None, None], far, np.arange(found.shape[-1]))

    declared = "bottom-right" if end else "top-left"
    adapter = fake(logits, masks=(), features=(Alibi("slopes", alignment=declared),))
    found = values(adapter, "alibi")
    assert found["slopes, equal lengths"] == told
    right = told == next(iter(SLOPES))
    assert entries(adapter, "alibi")["slopes, more queries"].agrees == right
    if right:
        assert found["slopes, more queries"] == f"{told}, {declared}"


def turned(values, cos, sin, *, neighbours=False, backwards=False):
    """Rotary embeddings of `[batch heads length head]` with tables `[position pair]`."""
    size = 2 * cos.shape[-1]
    cos, sin = cos[: values.shape[-2]], sin[: values.shape[-2]] * (-1 if backwards else 1)
    first = np.arange(0, size, 2) if neighbours else np.arange(size // 2)
    second = first + (1 if neighbours else size // 2)
    done = values.copy()
    done[..., first] = values[..., first] * cos - values[..., second] * sin
    done[..., second] = values[..., second] * cos + values[..., first] * sin
    return done


TURNS = {
    "halves": {},
    "neighbours": {"neighbours": True},
    "halves, turned the other way": {"backwards": True},
    "neighbours, turned the other way": {"neighbours": True, "backwards": True},
    "ignored": None,
}


@pytest.mark.parametrize("told", TURNS)
def test_rotary_embeddings_turn_pairs(told):
    @attention_function("numpy", features=(RotaryTables(),))
    def attend(query, key, value, cos=None, sin=None):
        if cos is not None and TURNS[told] is not None:
            query, key = (turned(x, cos, sin, **TURNS[told]) for x in (query, key))
        logits = np.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(query.shape[-1])
        return np.einsum("bhqk,bhkd->bhqd", softmax(logits), value).astype(query.dtype)

    attend.name = "rotating"
    for subject, entry in entries(attend, "rotary").items():
        assert values(attend, "rotary")[subject] == told
        assert entry.agrees == (told == "halves")


SCALES = {
    "right": {},
    "not scaled": {"plain": True},
    "all divided": {"kind": "linear"},
    "of the longest": {"length": 24},
    "factor left out": {"factor": 0},
    "factor squared": {"factor": 2},
    "on queries": {"side": "query"},
    "not truncated": {"truncate": False},
}


@pytest.mark.parametrize("name", SCALES)
def test_scaled_frequencies_are_read_off(name):
    """With one mistake each, in the kinds in which it can be made."""
    wrong = SCALES[name]

    @attention_function("numpy", features=(RotaryConfig(),))
    def attend(query, key, value, rope_parameters=None):
        told = RotaryScaling.of(rope_parameters or {})
        if rope_parameters is not None:
            size, tokens = query.shape[-1] // 2 * 2, query.shape[-2]
            plain = rope_parameters["rope_theta"] ** (-np.arange(0, size, 2) / size)
            rates, gain = plain, 1.0
            if told is not None:
                gain = told.gain ** wrong.get("factor", 1)
                if told.rope_type == "yarn" and "truncate" in wrong:
                    told = replace(told, truncate=False)
                length = wrong.get("length", tokens)
                rates = told.scaled(size, rope_parameters["rope_theta"], length).frequencies()
                rates = plain / 4 if wrong.get("kind") else plain if wrong.get("plain") else rates
            cos, sin = (gain * f(np.arange(tokens)[:, None] * rates) for f in (np.cos, np.sin))
            query, key = turned(query, cos, sin), turned(key, cos, sin)
            if "side" in wrong:
                key[..., :size] /= gain
        logits = np.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(query.shape[-1])
        return np.einsum("bhqk,bhkd->bhqd", softmax(logits), value).astype(query.dtype)

    attend.name = "scaling"
    found = values(attend, "rotary-scaling")
    frequencies = {"not scaled": "not scaled", "all divided": "all divided by the factor"}
    factors = {"left out": "none", "squared": "its square on cosine and sine"}
    factors |= {"queries": "on logits, or on one of query and key"}
    assert len(found) == 9
    for subject, value in found.items():
        if subject.startswith("attention factor"):
            assert value == factors.get(name.removeprefix("factor ").removeprefix("on "), value)
            assert (value == "factor on cosine and sine") == (name not in list(SCALES)[4:7])
            continue
        right = frequencies.get(name, "as the configuration says")
        if name == "of the longest" and "dynamic" in subject:
            right = "of the longest text, whatever the length"
        if name == "not truncated" and subject.endswith("YaRN"):
            right = "of a ramp whose ends are not rounded"
        if name == "all divided" and "linear" in subject:
            right = "as the configuration says"
        assert value == right, subject


LAID = {
    "as told": ({}, "{laid}"),
    "side by side": ({"laid": "side by side"}, "side by side"),
    "interleaved": ({"laid": "interleaved"}, "interleaved"),
    "reversed": ({"order": [2, 1, 0]}, "{laid}, in the order width, height and time"),
    "time only": ({"order": [0, 0, 0]}, "not read: all pairs turn by time"),
    "of tokens": ({"tokens": True}, "not read: all pairs turn by the order of tokens"),
    "begin again": (
        {"laid": "side by side", "again": True},
        "side by side, each with frequencies that begin again",
    ),
}


@pytest.mark.parametrize("name", LAID)
def test_the_layout_of_sections_is_read_off(name):
    wrong, told = LAID[name]

    @attention_function("numpy", features=(RotaryConfig(axes="axes"),))
    def attend(query, key, value, rope_parameters=None, axes=None):
        if axes is not None:
            sections, size = rope_parameters["mrope_section"], query.shape[-1] // 2 * 2
            laid = "interleaved" if "mrope_interleaved" in rope_parameters else "side by side"
            pair = np.arange(size // 2)
            of = np.repeat(range(3), sections)
            if wrong.get("laid", laid) == "interleaved":
                of = np.where(pair < 3 * np.array(sections)[pair % 3], pair % 3, 0)
            exponents = pair
            if "again" in wrong:
                exponents = np.concatenate([np.arange(count) for count in sections])
            rates = rope_parameters["rope_theta"] ** (-2 * exponents / size)
            at = np.moveaxis(axes[wrong.get("order", [0, 1, 2])], 0, -1)[..., of]
            if "tokens" in wrong:
                at = np.arange(query.shape[-2])[:, None] + 0 * at
            cos, sin = (f(at * rates)[:, None] for f in (np.cos, np.sin))
            query, key = turned(query, cos, sin), turned(key, cos, sin)
        logits = np.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(query.shape[-1])
        return np.einsum("bhqk,bhkd->bhqd", softmax(logits), value).astype(query.dtype)

    attend.name = "axes"
    found = entries(attend, "position-axes")
    assert len(found) == 2
    for laid in ("side by side", "interleaved"):
        entry = found[f"sections {laid}"]
        assert say(entry.value) == told.format(laid=laid)
        assert entry.agrees == (say(entry.value) == laid)


def test_positions_on_axes_are_asked_of_who_has_an_argument_for_them():
    known = {item.name: item for item in EXPERIMENTS}["position-axes"]
    assert not known.modes(fake(usual, features=(RotaryConfig(),)))
    assert known.modes(fake(usual, features=(RotaryConfig(axes="axes"),)))
