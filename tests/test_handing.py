"""Packed batches, pages and caches: what is handed over so must be what it is padded and whole."""

from __future__ import annotations

import numpy as np
import pytest
from mutants.handed import MUTANTS, SOUND, Buffered, Cached, Paged, Varlen
from mutants.run import Examiner
from problems import SCALED, make, rotations

from conformance import Cache, Call, Packed, Pages
from conformance.adapter.arguments import Spelling
from conformance.adapter.handing import _wrapped, turns_of
from conformance.cases.catalogue import find_cases
from conformance.definition.expectation import solve
from conformance.definition.problem import Norm, Rotary, Segments
from conformance.errors import Unsupported, WrongDeclaration
from conformance.running.session import Item, Session, plan

torch = pytest.importorskip("torch")

CROSS, GROUPED, SELF = (
    find_cases(f"plain/no-mask/{family}")[0].problem("float64")
    for family in ("cross", "gqa", "self")
)
DECODING = CROSS.replace(causal="bottom-right")


def lengths(problem, **given):
    return problem.replace(**{f"{name}_lengths": np.array(at) for name, at in given.items()})


def segments(problem, seed=0):
    random = np.random.default_rng(seed)
    ids = [random.integers(0, 3, (problem.shape.batch, n)) for n in problem.shape.logits[2:]]
    return problem.replace(segments=Segments(query=ids[0], key=ids[1]))


def agree(adapter, problem):
    """Compare every encoding with the reference, gradients included; return their labels."""
    expected, found = solve(problem), []
    for spelling in adapter.masks.spellings(problem):
        answer = adapter.run(problem, Call(adapter.modes[0], spelling=spelling))
        assert answer.gradients.keys() == expected.gradients.keys()
        for name, array in expected.arrays().items():
            if name != "weights":
                got = answer.arrays()[name]
                np.testing.assert_allclose(got, array, rtol=1e-9, atol=1e-11, err_msg=name)
        found.append(spelling.label)
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize(
    "problem",
    [
        SELF,
        GROUPED,
        DECODING,
        SELF.replace(causal="top-left", window=(2, None)),
        lengths(CROSS, query=[4, 0, 2], key=[6, 3, 0]),
        lengths(DECODING, query=[2, 1, 4], key=[6, 3, 4]),
        lengths(SELF, key=[7, 2]),
        segments(SELF),
        segments(SELF.replace(causal="bottom-right")).replace(window=(1, 1)),
        segments(CROSS).replace(causal="bottom-right"),
        lengths(segments(CROSS, 1), query=[4, 3, 0], key=[6, 2, 5]),
    ],
)
def test_packed_is_padded(problem):
    adapter = Varlen()
    for label in agree(adapter, problem):
        assert label.endswith(")") or "longest_key=" in label
        assert "q_at=int32[" in label
    assert adapter.given["q_at"].dtype == torch.int32


def test_packed_has_no_masks():
    with pytest.raises(Unsupported, match="no mask arguments: cannot express mask"):
        Varlen().run(SELF.replace(mask=np.ones((1, 1, 7, 7), bool)), Call())
    aligned = lengths(CROSS.replace(causal="top-left"), query=[4, 1, 2], key=[6, 3, 2])
    with pytest.raises(Unsupported, match="causal"):
        Varlen().run(aligned, Call())


def test_what_takes_packed_batches_only_gets_them_from_experiments_too():
    adapter = Varlen()
    plain = adapter.run(SELF, Call()).output
    again = adapter.run(SELF, Call(spelling=Spelling("as it is", {}))).output
    assert np.array_equal(plain, again)
    with pytest.raises(Unsupported, match="no other way to hand it over than k_cache, v_cache"):
        Buffered().run(CROSS, Call(spelling=Spelling("as it is", {})))


def test_what_is_given_is_not_moved():
    with pytest.raises(Unsupported, match="its inputs are moved, so no others can be given"):
        Varlen().run(SELF, Call(given={"query": SELF.query}))


@pytest.mark.parametrize(
    "problem",
    [
        SELF,
        GROUPED,
        DECODING,
        lengths(CROSS, key=[6, 3, 1]),
        lengths(DECODING, key=[6, 4, 5]).replace(window=(2, None)),
    ],
)
def test_pages_are_contiguous(problem):
    adapter = Paged()
    every = agree(adapter, problem)
    assert sum("block_table=int32[" in label for label in every) >= len(every) // 2 > 0
    paged = [one for one in adapter.masks.spellings(problem) if one.handing is not None]
    adapter.run(problem, Call(spelling=paged[0]))
    table, used = adapter.given["block_table"], adapter.given["cache_seqlens"]
    assert not torch.equal(table, table.sort(1).values) or len(table.unique()) < 3
    assert (
        adapter.unused.sum() // problem.shape.kv_heads == adapter.unused[:, 0].numel() - used.sum()
    )


@pytest.mark.parametrize(
    "problem",
    [
        DECODING,
        DECODING.replace(window=(3, None)),
        DECODING.replace(mask=np.random.default_rng(0).random((3, 1, 4, 6)) < 0.8),
    ],
)
def test_a_cache_is_the_whole(problem):
    problem = (
        problem if problem.mask is None else problem.replace(mask=problem.mask | (np.arange(6) < 1))
    )
    every = agree(Cached(), problem)
    assert [label for label in every if "past_key=[2 places]" in label]
    assert [label for label in every if "past_key" not in label]


def test_there_is_no_cache_without_earlier_keys():
    for problem in (SELF, SELF.replace(causal="bottom-right"), CROSS):
        assert all("past_key" not in s.label for s in Cached().masks.spellings(problem))
    with pytest.raises(Unsupported):
        Buffered().run(CROSS, Call())


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
@pytest.mark.parametrize(
    "problem", [DECODING, lengths(DECODING, key=[6, 4, 5])], ids=["equal", "lengths"]
)
def test_a_buffer_holds_keys_that_are_rotated_and_free_places(problem, pairs):
    size = problem.shape.head_size
    gains = np.random.default_rng(0).standard_normal((2, size))
    problem = problem.replace(
        rotary=Rotary(size=2 * (size // 4), base=100.0, pairs=pairs),
        norm=Norm(query=gains[0], key=gains[1], epsilon=1e-5),
    )
    for one in (problem, problem.replace(norm=None), problem.replace(rotary=None)):
        assert agree(Buffered(), one)


# An adapter is not told positions on several axes.
@pytest.mark.parametrize(
    "name", ["rotary", "interleaved", *(name for name in SCALED if not name.startswith("mrope"))]
)
def test_cached_keys_are_turned_as_the_others(name):
    problem = make(modern=(name, "positions"), head_size=7)
    wanted = rotations(problem, "key").swapaxes(-1, -2)
    np.testing.assert_allclose(turns_of(problem), wanted, atol=1e-12)


@pytest.mark.night
def test_jax_moves_tokens_too():
    jax = pytest.importorskip("jax")

    class Whole(Varlen):
        framework = "jax"
        causal_flag = None
        features = (Packed("q_at", "k_at", slack=2, only=True),)

        def attend(self, query, key, value, masks, **options):
            tokens = jax.numpy.arange(len(query)), jax.numpy.arange(len(key))
            of = [jax.numpy.searchsorted(masks[at], one, side="right")
                  for at, one in zip(("q_at", "k_at"), tokens, strict=True)]  # fmt: skip
            key, value = (x.repeat(query.shape[1] // x.shape[1], 1) for x in (key, value))
            within = [(one < len(masks["k_at"]))[:, None, None] for one in of]
            query, key, value = (
                jax.numpy.where(within[one], x, 0) for one, x in ((0, query), (1, key), (1, value))
            )
            logits = jax.numpy.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
            seen = of[0][:, None] == of[1]
            logits = jax.numpy.where(seen, logits, -jax.numpy.inf)
            peak = jax.numpy.where(seen.any(-1, keepdims=True), logits.max(-1, keepdims=True), 0)
            powers = jax.numpy.where(seen, jax.numpy.exp(logits - peak), 0)
            weights = powers / jax.numpy.maximum(powers.sum(-1, keepdims=True), 1e-300)
            return jax.numpy.einsum("hqk,khd->qhd", weights, value)

    assert agree(Whole(), lengths(CROSS, query=[4, 1, 2], key=[6, 3, 1]))
    # Another length is another program.
    assert agree(Whole(), lengths(CROSS, query=[4, 2, 1], key=[6, 1, 3]))


@pytest.mark.parametrize(
    ("declare", "told"),
    [
        (lambda: Packed(dtype="float32"), "cu_seqlens_q: dtype='float32'; say one of 'int32'"),
        (lambda: Packed(slack=-1), "packed: slack=-1 is no number of tokens"),
        (lambda: Pages(size=0), "block_table: a page of 0 tokens"),
        (lambda: Pages(layout="page head"), "block_table: layout='page head'; say one of"),
        (lambda: Cache(ring=True), "past_key: a ring needs lengths"),
        (lambda: Cache(counts="new"), "past_key: counts='new'; say one of 'cached'"),
    ],
)
def test_declarations_that_contradict_themselves(declare, told):
    with pytest.raises(WrongDeclaration, match=told):
        declare()


def verdict(kind, case_id):
    """What the suite says of an implementation in float32."""
    adapter = kind()
    adapter.name = kind.__name__
    (case,) = find_cases(case_id)
    with np.errstate(all="ignore"):
        item = Item(adapter, case, "float32", "cpu", adapter.modes[0])
        return Session().examine(item).verdict


@pytest.mark.parametrize(
    ("kind", "case_id"), [(kind, case_id) for kind in SOUND for case_id in SOUND[kind]]
)
def test_what_is_right_conforms(kind, case_id):
    assert verdict(kind, case_id) == "conforms"


def test_what_takes_packed_batches_only_is_asked_for_lengths_and_segments():
    """Its offsets say both, though it declares neither."""
    for case_id in ("feature/lengths/cross", "feature/segments/self"):
        assert [*plan([Varlen()], find_cases(case_id), ["float32"], "cpu")]


def test_a_sequence_without_tokens_is_among_packed_ones():
    first, second = Varlen().masks.spellings(CROSS)
    assert first.arguments["q_at"].tolist() == [0, 4, 8, 12]
    assert second.arguments["q_at"].tolist() == [0, 4, 4, 8, 12]
    assert second.arguments["k_at"].tolist() == [0, 6, 6, 12, 18]


@pytest.mark.parametrize("past", [0, 2, 5, 11])
def test_a_ring_holds_the_last_keys_where_they_belong(past):
    held = _wrapped(np.array([past]), 5)[0]
    assert sorted(held[held >= 0]) == list(range(max(past - 5, 0), past))
    assert all(at == -1 or at % 5 == place for place, at in enumerate(held))


@pytest.mark.sample(4)
@pytest.mark.parametrize("mutant", MUTANTS[::4], ids=lambda mutant: mutant.name)
def test_what_is_wrong_is_noticed(mutant):
    """All of these mutants are examined by `python -m mutants`; here a part is."""
    assert Examiner().kill(mutant).killed
