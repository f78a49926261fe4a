"""The sizes that an implementation declares: the cases are posed at these, and at no others."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import Function, Geometry, MaskArgument, Sinks, attention_function, examine
from conformance.adapter.handing import Pages
from conformance.cases.case import FAMILIES
from conformance.cases.catalogue import case_of, catalogue, every_case, large_cases, posed
from conformance.cases.patterns import whole_tiles
from conformance.definition.geometry import LARGE, Grid
from conformance.errors import Unsupported, WrongDeclaration
from conformance.requirements import REQUIREMENTS
from conformance.running.examine import SIZES
from conformance.running.selection import Selection
from conformance.running.session import EVERY_MODE, Examiner
from conformance.words import say

MASK = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)
BIAS = MaskArgument("bias", "batch heads query key", number="added", broadcasts=True)
DECLARED = {
    "one head size": Geometry(head_sizes=(128,), tiles=(32, 16)),
    "two": Geometry(head_sizes=(64, 80)),
    "wide values": Geometry(head_sizes=(48, 48), value_head_sizes=(48, 64), tiles=(16, 32)),
    "wide values only": Geometry(head_sizes=(48,), value_head_sizes=(64,), tiles=(16, 32)),
    "multiples": Geometry(head_sizes=(24,), tiles=(16, 32), multiples=(16, 32)),
    "odd multiples": Geometry(head_sizes=(24,), tiles=(16, 24), multiples=(16, 24)),
    "odd heads": Geometry(head_sizes=(16,), tiles=(16, 16), heads=(3,)),
    "short": Geometry(head_sizes=(32,), tiles=(32, 32), greatest_length=80),
    "heads": Geometry(head_sizes=(16,), tiles=(16, 16), heads=(8, 16), groups=(1, 4)),
}


def tiled_attention(query, key, value, mask, bias, scale, tiles, defect=""):
    """Attention by an online softmax over tiles of keys, in float32."""
    q, k, v = (array.astype(np.float32) for array in (query, key, value))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    full = (*q.shape[:3], k.shape[2])
    mask = np.broadcast_to(True if mask is None else mask, full)
    bias = np.broadcast_to(np.float32(0) if bias is None else bias, full)
    output = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    for i in range(0, q.shape[2], tiles[0]):
        rows = slice(i, i + tiles[0])
        peak = np.full(q[:, :, rows].shape[:3], -np.inf, np.float32)
        total, context = np.zeros_like(peak), np.zeros_like(output[:, :, rows])
        for number, j in enumerate(range(0, k.shape[2], tiles[1])):
            columns = slice(j, j + tiles[1])
            if defect == "drops a whole last tile" and number and j + tiles[1] == k.shape[2]:
                continue
            seen = mask[:, :, rows, columns]
            if defect == "mask of head 0":
                seen = np.broadcast_to(seen[:, :1], seen.shape)
            logits = q[:, :, rows] @ k[:, :, columns].swapaxes(2, 3) * np.float32(scale)
            logits = np.where(seen, logits + bias[:, :, rows, columns], -np.inf)
            if defect == "last row of a partial tile" and 1 < logits.shape[2] < tiles[0]:
                logits[:, :, -1] = logits[:, :, -2]
            if defect == "stops at a blocked tile" and number and not seen.any():
                break
            new = np.maximum(peak, logits.max(axis=3))
            base = np.where(np.isinf(new), np.float32(0), new)
            powers, factor = np.exp(logits - base[..., None]), np.exp(peak - base)
            total = total * factor + powers.sum(axis=3)
            if defect == "not rescaled in the third tile" and number == 2:
                factor = np.ones_like(factor)
            context = context * factor[..., None] + powers @ v[:, :, columns]
            peak = new
        output[:, :, rows] = context / np.where(total > 0, total, np.float32(1))[..., None]
    return output.astype(query.dtype)


def kernel(geometry, defect="", **declared):
    def attention(query, key, value, mask=None, bias=None, scale=None):
        assert query.shape[3] in geometry.head_sizes, query.shape
        assert not geometry.heads or query.shape[1] in geometry.heads, query.shape
        for length, multiple in zip(
            (query.shape[2], key.shape[2]), geometry.multiples, strict=True
        ):
            assert length % multiple == 0, (query.shape, key.shape)
            assert not geometry.greatest_length or length <= geometry.greatest_length
        return tiled_attention(query, key, value, mask, bias, scale, geometry.tiles, defect)

    declared = {"dtypes": ("float32",), "differentiable": False, "grouped": True} | declared
    return attention_function("numpy", MASK, BIAS, geometry=geometry, **declared)(attention)


@pytest.mark.parametrize("geometry", DECLARED.values(), ids=DECLARED)
def test_every_case_has_sizes_that_were_declared(geometry):
    for case in every_case():
        if case.shape.score == "additive":
            continue
        for one in posed(case, geometry, layer=False):
            geometry.check(one.shape)
            assert one.shape.sharing == case.shape.sharing


@pytest.mark.parametrize("geometry", DECLARED.values(), ids=DECLARED)
def test_numbers_can_be_drawn_at_sizes_that_were_declared(geometry):
    """Regimes and masks fit lengths of queries and keys that differ, and heads that are shared."""
    for case in every_case():
        if case.tiled or case.regime is not None:
            (one, *_) = posed(case, geometry, layer=False)
            problem = one.problem("float32")
            assert all(np.isfinite(getattr(problem, name)).all() for name in ("query", "key"))


@pytest.mark.parametrize("geometry", DECLARED.values(), ids=DECLARED)
@pytest.mark.parametrize("layer", [False, True])
def test_the_id_of_a_case_tells_its_sizes(geometry, layer):
    for grid in geometry.grids(layer=layer):
        assert Grid.parse(grid.name) == grid
        case = case_of("bias/over-keys/tiles").on(grid)
        again = case_of(case.id)
        assert again.id == case.id
        assert again.problem("float32").digest() == case.problem("float32").digest()


def test_small_cases_stay_as_they_are_where_nothing_is_declared():
    assert [posed(case, None, layer=False) for case in catalogue()] == [(c,) for c in catalogue()]
    tiled = [case for case in every_case() if case.tiled]
    assert tiled
    assert [posed(case, None, layer=True) for case in tiled] == [()] * len(tiled)


@pytest.mark.parametrize("geometry", DECLARED.values(), ids=DECLARED)
def test_the_sizes_of_a_case_do_not_change_what_is_asked_of_it(geometry):
    for case in catalogue():
        served = [item.id for item in REQUIREMENTS if item.serves(case)]
        for one in posed(case, geometry, layer=False):
            assert [item.id for item in REQUIREMENTS if item.serves(one)] == served
            assert (one.off_grid in EVERY_MODE) == (case.id in EVERY_MODE)


def attention_of_tiles(*, detached=False, contiguous=False):
    """Attention in torch at sizes that are declared, right but for the defect that is named."""
    torch = pytest.importorskip("torch")

    def attention(query, key, value, mask=None):
        logits = query @ key.mT * query.shape[-1] ** -0.5
        if mask is not None and contiguous:
            strides = np.empty(mask.shape, bool).strides
            mask = mask.as_strided(mask.shape, strides)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        weights = torch.softmax(logits, dim=-1)
        return weights @ value, weights.detach() if detached else weights

    declared = {"returns_weights": "per head", "geometry": DECLARED["one head size"]}
    return attention_function("torch", MASK, **declared)(attention)


@pytest.mark.parametrize(
    ("requirement", "case", "defect"),
    [
        ("gradient.through-returned-weights", "mask/per-batch/cross", {"detached": True}),
        ("call.memory-layout-does-not-matter", "mask/per-head/separate", {"contiguous": True}),
    ],
)
def test_what_one_case_alone_asks_is_asked_at_declared_sizes(requirement, case, defect):
    chosen = {"cases": case, "dtypes": "float32"}
    assert examine(attention_of_tiles(), **chosen).counts == {"conforms": 1}
    (result,) = examine(attention_of_tiles(**defect), **chosen).results
    found = {finding.requirement: finding.verdict for finding in result.findings}
    assert found.pop(requirement) == "deviates"
    assert "deviates" not in found.values()


def test_lengths_lie_around_the_edges_of_tiles():
    grid = Grid(head_size=64, tiles=(64, 128))
    shapes = [grid.shape(name, small) for name, small in FAMILIES.items()]
    queries = {shape.query_length % 64 for shape in shapes if shape.query_length >= 63}
    keys = {shape.key_length % 128 for shape in shapes if shape.key_length >= 127}
    assert queries >= {63, 0, 1}
    assert keys >= {127, 0, 1}
    assert max(shape.key_length for shape in shapes) > 3 * 128


def test_whole_tiles_are_open_blocked_and_blocked_for_one_head():
    shape = Grid(head_size=64, tiles=(64, 64)).shape("tiles", FAMILIES["tiles"])
    mask = whole_tiles(shape, np.random.default_rng(0), (64, 64))
    first = mask[:, :, :64, :64].reshape(*mask.shape[:2], -1)
    assert mask.any(axis=3).all()
    assert not mask[0, 0, :, :64].any()
    assert mask[0, 1, :, :64].any()
    assert first.all(axis=2).any() or mask[..., 64:128, 64:128].all(axis=(2, 3)).any()


@pytest.mark.parametrize("name", ["one head size", "multiples", "short", "heads"])
def test_a_kernel_for_these_sizes_only_gets_a_full_verdict(name):
    asked = ["mask/shared", "mask/whole-tiles", "causal/top-left", "bias/shared"]
    outcome = examine(kernel(DECLARED[name]), cases=asked, dtypes="float32")
    counted = outcome.counts
    assert counted.get("conforms", 0) >= 12, counted
    assert not set(counted) & {"deviates", "error"}, outcome.failures[:2]
    refused = {r.case for r in outcome.results if r.verdict == "unsupported"}
    assert all(name.endswith("/additive") for name in refused), refused


@pytest.mark.night
@pytest.mark.parametrize(
    ("defect", "cause"),
    [
        ("not rescaled in the third tile", "the tile of keys 32 to 47 raises the running maximum"),
        ("drops a whole last tile", "keys 16 and later ignored"),
        ("mask of head 0", "the first head's mask for all"),
        ("last row of a partial tile", ""),
        ("stops at a blocked tile", ""),
    ],
)
def test_defects_of_tiles_are_noticed_at_level_core(defect, cause):
    broken = kernel(Geometry(head_sizes=(16,), tiles=(16, 16)), defect)
    outcome = examine(broken, level="core", dtypes="float32")
    assert "deviates" in outcome.counts
    findings = [finding for result in outcome.results for finding in result.findings]
    causes = {say(finding.cause) for finding in findings if finding.cause}
    assert any(cause in text for text in causes) or not cause, causes


@pytest.mark.parametrize(
    ("name", "experiment"),
    [("one head size", "masked-rows"), ("multiples", "leaks"), ("heads", "masks")],
)
def test_experiments_use_sizes_that_were_declared(name, experiment):
    declared = DECLARED[name]
    if name == "multiples":
        # A head of the experiments' problems holds a number for each key.
        declared = Geometry(head_sizes=(64,), tiles=(16, 32), multiples=(16, 32))
    outcome = examine(kernel(declared, fully_masked_row=None), cases=f"probe/{experiment}")
    (result,) = outcome.results
    assert result.verdict in ("conforms", "observed"), result.findings
    answered = [entry for entry in result.entries if entry.value.id != "refused"]
    assert len(answered) > len(result.entries) / 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("tiles", [(1, 1), (2, 2), (1, 64), (3, 3)])
def test_every_case_can_be_posed_on_small_tiles(tiles):
    declared = Geometry(head_sizes=(4,), tiles=tiles)
    for case in every_case():
        for one in posed(case, declared, layer=False):
            one.problem("float32")


def test_level_large_poses_cases_at_the_sizes_of_kernels():
    cases = large_cases()
    assert {case.grid for case in cases} == set(LARGE)
    assert all(case.core or case.large for case in cases)
    rows = Selection(level="large").rows([kernel(DECLARED["one head size"])], "cpu")
    assert {row.asked.grid for row in rows} == set(DECLARED["one head size"].grids(layer=False))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"head_sizes": ()}, "head_sizes is empty"),
        ({"head_sizes": (0,)}, "head_sizes is (0,)"),
        ({"head_sizes": [64]}, "must be a tuple"),
        ({"head_sizes": (64,), "tiles": (64,)}, "tiles must be two sizes"),
        ({"head_sizes": (64,), "value_head_sizes": (64, 32)}, "2 value_head_sizes for 1"),
        ({"head_sizes": (64,), "multiples": (128, 128), "greatest_length": 100}, "no length is"),
        (
            {"head_sizes": (64,), "multiples": (16, 24), "greatest_length": 40, "tiles": (8, 8)},
            "48",
        ),
        ({"head_sizes": (64,), "greatest_length": 48}, "longer than the greatest length, 48"),
        ({"head_sizes": (64, 64)}, "one twice"),
        ({"head_sizes": (64,), "heads": (3,), "groups": (2,)}, "groups of 2"),
        ({"head_sizes": (10**9,)}, "head_sizes is (1000000000,); at most 8,192"),
        ({"head_sizes": (64,), "tiles": (64, 10**9)}, "tiles is (64, 1000000000); at most 8,192"),
    ],
)
def test_a_geometry_that_contradicts_itself_is_refused(fields, said):
    with pytest.raises(WrongDeclaration) as raised:
        Geometry(**fields)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_kernel_that_fails_at_most_sizes_is_told_to_declare_them():
    @attention_function("numpy", dtypes=("float32",), differentiable=False)
    def eights(query, key, value):
        if query.shape[3] % 8:
            raise ValueError("head size must be a multiple of 8")
        return tiled_attention(query, key, value, None, None, None, (16, 16))

    outcome = examine(eights, cases="plain/no-mask", dtypes="float32")
    assert len(outcome.counts) > 1, outcome.counts
    assert SIZES in str(outcome)


def test_a_kernel_that_refuses_the_size_that_it_declared_does_not_pass():
    def refuses(query, key, value):
        raise ValueError("head size 96 is not supported")

    adapter = attention_function("numpy", geometry=Geometry(head_sizes=(96,)))(refuses)
    outcome = examine(adapter, cases="plain/no-mask/cross", dtypes="float32")
    assert set(outcome.counts) == {"error"}


TWO = Geometry(head_sizes=(64, 96), tiles=(32, 32))


def refusing(when, error=Unsupported, geometry=TWO, **declared):
    """A correct kernel that raises for some sizes of heads `[batch heads length head]`."""

    def attention(query, key, value, mask=None, bias=None, scale=None):
        if when(query, key):
            raise error("not at these sizes")
        return tiled_attention(query, key, value, mask, bias, scale, geometry.tiles)

    declared = {"dtypes": ("float32",), "differentiable": False, "grouped": True} | declared
    return attention_function("numpy", MASK, BIAS, geometry=geometry, **declared)(attention)


def sizes_found(adapter, cases):
    """The findings on declared sizes, and the verdicts of the cases without any."""
    outcome = examine(adapter, cases=cases, dtypes=adapter.dtypes)
    found, verdicts = [], set()
    for result in outcome.results:
        if "/additive" in result.case:
            continue
        those = [f for f in result.findings if f.requirement == "adapter.declared-sizes-are-taken"]
        found += those
        verdicts |= set() if those else {result.verdict}
    return found, verdicts


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("when", "cases"),
    [
        (lambda query, key: query.shape[3] == 96, "mask/key-padding/cross"),
        (lambda query, key: key.shape[2] % 8, "mask/key-padding"),
        (lambda query, key: query.shape[1] == 16 * key.shape[1], "mask/per-head"),
        (lambda query, key: query.shape[0] > 1, "mask/key-padding"),
    ],
)
@pytest.mark.parametrize("error", [Unsupported, ValueError])
def test_a_size_that_is_declared_and_refused_is_a_deviation(when, cases, error):
    found, verdicts = sizes_found(refusing(when, error), cases)
    assert {finding.verdict for finding in found} == {"deviates"}
    assert all("it refuses them" in say(f.cause) and "\n" not in say(f.cause) for f in found)
    assert all("not at these sizes" in finding.detail for finding in found)
    assert verdicts == {"conforms"}


def test_the_only_size_that_is_declared_and_refused_is_a_deviation():
    adapter = refusing(lambda query, key: True, geometry=Geometry(head_sizes=(96,)))
    outcome = examine(adapter, cases="mask/key-padding/cross", dtypes="float32")
    assert set(outcome.counts) == {"deviates"}


def test_a_kernel_that_always_raises_is_not_said_to_refuse_its_sizes():
    adapter = refusing(lambda query, key: True, RuntimeError, Geometry(head_sizes=(96,)))
    cases = ["plain/no-mask/cross", "mask/key-padding/cross", "causal/top-left/cross"]
    found, verdicts = sizes_found(adapter, cases)
    assert found == []
    assert verdicts == {"error"}
    assert "RuntimeError: not at these sizes" in str(examine(adapter, cases=cases[0]))


def test_a_dtype_that_is_not_declared_is_no_size():
    adapter = refusing(lambda query, key: False, dtypes=("float16",))
    found = examine(adapter, cases="plain/no-mask/cross", dtypes=["float32", "float16"])
    assert {result.dtype: result.verdict for result in found.results} == {
        "float32": "unsupported",
        "float16": "conforms",
    }


@pytest.mark.night
def test_what_is_refused_whatever_the_sizes_is_no_deviation():
    """Shared key/value heads, a mask, and a dtype, of which a geometry says nothing."""

    def shared(query, key):
        return query.shape[1] != key.shape[1]

    for adapter, cases in (
        (refusing(shared), ["plain/no-mask/gqa", "plain/no-mask/cross"]),
        (refusing(lambda query, key: False, grouped=False), ["plain/no-mask/gqa"]),
        (
            refusing(lambda query, key: query.dtype == "float16", dtypes=("float32", "float16")),
            ["plain/no-mask/cross"],
        ),
    ):
        assert sizes_found(adapter, cases)[0] == []


class PagedSink(Function):
    """Goes over pages of keys with an online softmax; a sink begins each row, as it should once."""

    framework, differentiable, custom_scale, dtypes = "numpy", False, True, ("float32",)
    grouped = True
    mask_arguments = (MASK,)
    defect = ""
    features = (Sinks("sinks"), Pages(size=16, only=True))

    def attend(self, query, key, value, masks, scale=None):
        table, lengths, sinks = (masks.get(n) for n in ("block_table", "cache_seqlens", "sinks"))
        mask, size = masks.get("mask", np.ones((1, 1, 1, 1), bool)), 16
        scale = np.float32(query.shape[3] ** -0.5 if scale is None else scale)
        output = np.zeros((*query.shape[:3], value.shape[3]), np.float32)
        full = (*query.shape[:3], int(lengths.max()))
        mask, group = np.broadcast_to(mask, full), query.shape[1] // key.shape[2]
        for entry, length in enumerate(lengths):
            peak = np.full(query.shape[1:3], -np.inf, np.float32)
            total, context = np.zeros_like(peak), np.zeros_like(output[entry])
            for page in range(-(-length // size)):
                if page == 2 and self.defect == "third page lost":
                    continue
                span = slice(page * size, min((page + 1) * size, length))
                keys, values = (
                    np.repeat(pages[table[entry, page]][: span.stop - span.start], group, axis=1)
                    for pages in (key, value)
                )
                logits = np.einsum("hqd,khd->hqk", query[entry], keys) * scale
                logits = np.where(mask[entry, :, :, span], logits, np.float32(-np.inf))
                new = np.maximum(peak, logits.max(axis=2))
                base = np.where(np.isinf(new), np.float32(0), new)
                powers, factor = np.exp(logits - base[..., None]), np.exp(peak - base)
                total = total * factor + powers.sum(axis=2)
                if sinks is not None and (page == 0 or self.defect == "sink in each page"):
                    total += np.exp(sinks[:, None] - base)
                context = context * factor[..., None] + np.einsum("hqk,khd->hqd", powers, values)
                peak = new
            safe = np.where(total > 0, total, np.float32(1))
            output[entry] = context / safe[..., None]
        return output


@pytest.mark.sample(2)
@pytest.mark.parametrize("defect", ["", "sink in each page", "third page lost"])
def test_pages_are_examined_at_lengths_of_several_pages(defect):
    """At level core, which has hardly more than seven keys where every size is taken."""
    adapter, examiner = type("Paged", (PagedSink,), {"defect": defect})(), Examiner({})
    rows = Selection(level="core").rows([adapter], "cpu")
    assert {row.asked.grid.tiles for row in rows if row.asked.grid is not None} == {(16, 16)}
    verdicts: dict[bool, set[str]] = {False: set(), True: set()}
    for row in rows:
        if row.asked.name in ("feature/sinks", "plain/tiles") or row.asked.family == "cross":
            of_pages = row.asked.grid is not None
            if not of_pages and row.asked.shape.key_length > 16:
                continue
            verdicts[of_pages] |= {one.verdict for one in examiner.examine(row)[0].findings}
    assert "deviates" not in verdicts[False]
    assert ("deviates" in verdicts[True]) == bool(defect)


def test_tiles_hold_a_page():
    case = case_of("plain/no-mask/self")
    for limit, tiles in ((0, (64, 256)), (128, (64, 64))):
        geometry = Geometry(head_sizes=(64,), greatest_length=limit)
        (one,) = posed(case, geometry, layer=False, page=256)
        assert one.grid.tiles == tiles
