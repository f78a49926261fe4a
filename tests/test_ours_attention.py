"""Our own PyTorch module against its definition, written out as scalar loops."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from conformance.adapter.base import Call  # noqa: E402
from conformance.adapters.ours import Ours, attention, positions  # noqa: E402
from conformance.adapters.ours.attention import MultiHeadAttention  # noqa: E402
from conformance.adapters.ours.invariant import InvariantAttention  # noqa: E402
from conformance.cases.catalogue import find_cases  # noqa: E402
from conformance.definition.expectation import solve  # noqa: E402
from conformance.definition.problem import Norm, Rotary, Segments  # noqa: E402

# Sizes are pairwise different, so that no axis can be taken for another.
BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 3, 8, 2, 5, 6
SIZES = {"head_size": 7, "value_head_size": 9, "kv_heads": KV_HEADS, "key_width": 11}
SIZES |= {"value_width": 12, "output_width": 13}
WIDTH = 10
EMPTY = (2, slice(None), 3)  # batch entry 2, all heads, query 3: no visible key
SCORES = ["scaled-dot", "additive"]
MASKS = ["attend_mask", "block_mask", "attn_bias"]
X, Y = (2, 3, 4), (2, 5, 4)  # shapes of query and key in the tests of errors
LENGTHS = "wanted one batch size, and as many values as keys"


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def module(width=WIDTH, heads=HEADS, *, dtype=torch.float64, **options):
    """A module with fixed weights, large enough to matter; biases too."""
    built = MultiHeadAttention(width, heads, dtype=dtype, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(built.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=100 + seed) / 2)
    return built.eval()


def inputs(dtype=torch.float64):
    shapes = [(BATCH, QUERIES, WIDTH), (BATCH, KEYS, 11), (BATCH, KEYS, 12)]
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def visible():
    """Differs in every batch entry, head and row; one row is empty in all heads, one in one."""
    mask = normal(BATCH, HEADS, QUERIES, KEYS, seed=7) > -0.5
    mask[EMPTY] = False
    mask[0, 1, 1] = False
    return mask


def gradients(built, answer, *arrays):
    cotangent = normal(*answer.shape, seed=9, dtype=answer.dtype)
    return torch.autograd.grad(answer, [*built.parameters(), *arrays], cotangent)


def loops(built, x, y, z, bias, mask, *, score, kv_heads, scale):
    """Output and weights straight from the definition: one number at a time, in float64."""
    state = {name: array.detach().numpy() for name, array in built.state_dict().items()}

    def project(name, row):
        return state[f"{name}_projection.weight"] @ row + state[f"{name}_projection.bias"]

    weights = np.zeros(mask.shape)
    output = np.zeros((BATCH, QUERIES, 13))
    for b, i in np.ndindex(BATCH, QUERIES):
        contexts = np.zeros((HEADS, 9))
        q = project("query", x[b, i]).reshape(HEADS, 7)
        for h in range(HEADS):
            g = h // (HEADS // kv_heads)
            exps = {}
            for j in range(KEYS):
                k = project("key", y[b, j]).reshape(kv_heads, 7)[g]
                if score == "scaled-dot":
                    s = sum(q[h][d] * k[d] for d in range(7))
                else:
                    u = state["score_vector"][h]
                    s = sum(u[d] * math.tanh(q[h][d] + k[d]) for d in range(7))
                if mask[b, h, i, j]:
                    exps[j] = math.exp(scale * s + bias[b, h, i, j])
            for j, e in exps.items():
                weights[b, h, i, j] = e / sum(exps.values())
                v = project("value", z[b, j]).reshape(kv_heads, 9)[g]
                contexts[h] += weights[b, h, i, j] * v
        output[b, i] = project("output", contexts.reshape(-1))
    return output, weights


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kv_heads", [1, KV_HEADS, HEADS])
@pytest.mark.parametrize(
    ("scale", "causal", "diagonal"),
    [(None, None, KEYS), (0.7, "top-left", 0), (0.0, "bottom-right", KEYS - QUERIES)],
)
def test_equals_the_definition_in_scalar_loops(score, kv_heads, scale, causal, diagonal):
    built = module(**(SIZES | {"kv_heads": kv_heads}), score=score, scale=scale)
    x, y, z = inputs()
    bias = normal(BATCH, HEADS, QUERIES, KEYS, seed=8)
    output, weights = built(
        x, y, z, attend_mask=visible(), attn_bias=bias, causal=causal, need_weights=True
    )
    mask = visible().numpy() & np.tri(QUERIES, KEYS, diagonal, dtype=bool)
    if scale is None:
        scale = 1 / math.sqrt(7) if score == "scaled-dot" else 1
    arrays = [array.numpy() for array in (x, y, z, bias)]
    expected = loops(built, *arrays, mask, score=score, kv_heads=kv_heads, scale=scale)
    np.testing.assert_allclose(output.detach(), expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(weights.detach(), expected[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_are_the_derivatives(score, kv_heads):
    built = module(3, 2, head_size=2, value_head_size=3, kv_heads=kv_heads, score=score)
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]]).bool()
    names, parameters = zip(*built.named_parameters(), strict=True)
    arrays = [normal(2, 3, 3, seed=1), normal(2, 4, 3, seed=2), normal(2, 4, 3, seed=3)]
    arrays.append(normal(2, 1, 3, 4, seed=4))

    def call(query, key, value, bias, *values):
        state = dict(zip(names, values, strict=True))
        options = {"attend_mask": mask, "attn_bias": bias, "need_weights": True}
        return torch.func.functional_call(built, state, (query, key, value), options)

    leaves = [array.detach().requires_grad_() for array in (*arrays, *parameters)]
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


def test_equals_torch_multihead_attention():
    ours, theirs = module(12, 3), torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    projections = [getattr(ours, f"{name}_projection") for name in ("query", "key", "value")]
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
        theirs.out_proj.load_state_dict(ours.output_projection.state_dict())
    x, y = normal(2, 4, 12, seed=1), normal(2, 5, 12, seed=2)
    padding = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]).bool()
    block = ~torch.ones(4, 5).tril(1).bool()
    options = {"attn_mask": block, "key_padding_mask": padding, "average_attn_weights": False}
    expected = theirs(x, y, y, **options)
    block = block | padding[:, None, None, :]
    torch.testing.assert_close(ours(x, y, block_mask=block, need_weights=True), expected)


@pytest.mark.parametrize("score", SCORES)
def test_every_way_of_blocking_agrees(score):
    built = module(**SIZES, score=score)
    arrays = [array.requires_grad_() for array in inputs()]
    mask = visible() & torch.ones(QUERIES, KEYS).tril(1).bool()
    half = visible() | (normal(KEYS, seed=5) > 0)
    infinite = torch.zeros(mask.shape).double().masked_fill(~mask, -math.inf).requires_grad_()
    ways = [
        {"attend_mask": mask},
        {"block_mask": ~mask},
        {"attn_bias": infinite},
        {"attend_mask": visible(), "causal": "bottom-right"},
        {"attend_mask": half, "block_mask": ~mask},
        {"attend_mask": mask, "attn_bias": infinite},
    ]
    answers = []
    for way in ways:
        output, weights = built(*arrays, need_weights=True, **way)
        answers.append((output, weights, *gradients(built, output, *arrays)))
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0])
    (gradient,) = gradients(built, built(*arrays, attn_bias=infinite), infinite)[-1:]
    assert gradient.isfinite().all()
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask] != 0).any()


@pytest.mark.parametrize("score", SCORES)
def test_what_a_blocked_key_holds_is_replaced(score):
    built, (x, y, z), block = module(**SIZES, score=score), inputs(), torch.zeros(1, KEYS).bool()
    block[0, 2] = True
    bias = torch.zeros(1, KEYS).double().masked_fill(block, -math.inf)
    expected = built(x, y, z, block_mask=block)
    for content in (1e300, math.inf, math.nan):
        y[:, 2] = content
        for way in ({"block_mask": block}, {"attend_mask": ~block}, {"attn_bias": bias}):
            torch.testing.assert_close(built(x, y, z, **way), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("causal", "offset"), [("top-left", 0), ("bottom-right", 1)])
def test_causal_alignment(causal, offset):
    for x, y, shift in [(0, 1, offset), (1, 0, -offset)]:  # more keys, then more queries
        arrays = [normal(1, QUERIES, 4), normal(1, KEYS, 4)]
        _, weights = module(4, 2)(arrays[x], arrays[y], causal=causal, need_weights=True)
        rows, columns = weights.shape[2:]
        expected = [[j <= i + shift for j in range(columns)] for i in range(rows)]
        assert ((weights[0, 0] > 0) == torch.tensor(expected)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", SCORES)
def test_empty_row_is_the_output_bias_and_harms_nobody(score, dtype):
    built = module(**SIZES, score=score, dtype=dtype)
    x, y, z = (array.requires_grad_() for array in inputs(dtype))
    masks = {"attend_mask": visible(), "attn_bias": torch.zeros(QUERIES, KEYS)}
    output, weights = built(x, y, z, **masks, need_weights=True)
    assert (output[2, 3] == built.output_projection.bias).all()
    assert (weights[EMPTY] == 0).all()
    assert output.dtype == weights.dtype == dtype
    with torch.autograd.set_detect_anomaly(True):  # a NaN on the way is an error too
        found = gradients(built, output, x, y, z)
    assert all(gradient.isfinite().all() for gradient in found)
    assert (found[-3][2, 3] == 0).all()
    # The other batch entries do not notice it; half types stay near float64.
    exact = module(**SIZES, score=score).requires_grad_(False)
    exact.load_state_dict(built.state_dict())
    doubles = [array.detach().double().requires_grad_() for array in (x, y, z)]
    reference = exact(*doubles, attend_mask=visible())
    expected = torch.autograd.grad(reference, doubles, normal(*reference.shape, seed=9))
    for got, want in zip([output, *found[-3:]], [reference, *expected], strict=True):
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < 16 * torch.finfo(dtype).eps


def test_no_keys_at_all_is_the_output_bias():
    built, (x, y, z) = module(**SIZES), inputs()
    output, weights = built(x, y[:, :0], z[:, :0], need_weights=True)
    assert (output == built.output_projection.bias).all()
    assert weights.shape == (BATCH, HEADS, QUERIES, 0)
    assert all(gradient.isfinite().all() for gradient in gradients(built, output))


def test_defaults_and_mask_shapes():
    built, x = module(12, 3), normal(2, 4, 12)
    y = normal(2, 5, 12, seed=1)
    assert built.query_projection.out_features == built.value_projection.out_features == 12
    torch.testing.assert_close(built(x), built(x, x, x))
    torch.testing.assert_close(built(x, y), built(x, y, y))
    assert module(12, 3, key_width=5).value_projection.in_features == 5
    full = normal(2, 3, 4, 5, seed=2) > -0.5
    views = [full[0, 0], full[0, 0, :1], full[:, 0], full[:1, 0], full[:, 0, :, :1]]
    for view in [*views, full, full[:, :1], full[:, :, :1], full[:1]]:
        four = view[None, None] if view.dim() == 2 else view[:, None] if view.dim() == 3 else view
        wide = four.expand(2, 3, 4, 5)
        expected = built(x, y, attend_mask=wide)
        assert torch.equal(built(x, y, attend_mask=view), expected)
        assert torch.equal(built(x, y, block_mask=~view), expected)
        infinite = torch.zeros(view.shape).double().masked_fill(~view, -math.inf)
        torch.testing.assert_close(built(x, y, attn_bias=infinite), expected)


def test_dropout_only_in_training_and_rescaled():
    built, x = module(4, 1, dropout=0.75), torch.eye(4).double()[None]
    for projection in (built.value_projection, built.output_projection):
        projection.weight.data.copy_(torch.eye(4))  # the output is the weights that were used
        projection.bias.data.zero_()
    output, weights = built(x, need_weights=True)
    torch.testing.assert_close(output, weights[:, 0])
    torch.manual_seed(0)
    output, in_training = built.train()(x, need_weights=True)
    assert torch.equal(in_training, weights)
    kept = output != 0
    assert 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(output[kept], (weights[:, 0] / 0.25)[kept])


def test_state_dict_names_and_light_imports():
    projections = ["query", "key", "value", "output"]
    names = [f"{name}_projection.{part}" for name in projections for part in ("weight", "bias")]
    assert sorted(module(4, 2).state_dict()) == sorted(names)
    assert sorted(module(4, 2, bias=False).state_dict()) == sorted(n for n in names if "w" in n)
    additive = module(4, 2, score="additive").state_dict()
    assert sorted(additive) == sorted([*names, "score_vector"])
    assert additive["score_vector"].shape == (2, 2)
    assert not hasattr(attention, "Float")  # jaxtyping is for readers and type checkers only


@pytest.mark.parametrize("score", SCORES)
def test_compiles_as_one_graph_and_modifies_no_input(score):
    built = module(**SIZES, score=score)
    bias = normal(BATCH, 1, QUERIES, KEYS).masked_fill(~visible()[:, :1], -math.inf)
    arguments = [*inputs(), visible(), ~visible(), bias]
    before = [array.clone() for array in arguments]

    def call(x, y, z, attend, block, bias):
        masks = {"attend_mask": attend, "block_mask": ~block, "attn_bias": bias}
        return built(x, y, z, **masks, causal="top-left")

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), call(*arguments))
    assert all(torch.equal(*pair) for pair in zip(arguments, before, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "width 10 is not divisible by 3 heads: pass head_size"),
        ({"kv_heads": 3}, "heads (2) must be a multiple of kv_heads (3)"),
        ({"kv_heads": 4}, "heads (2) must be a multiple of kv_heads (4)"),
        ({"score": "cosine"}, "score must be 'scaled-dot' or 'additive', got 'cosine'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1, got 1.0"),
        ({"dropout": -0.1}, "dropout must be at least 0 and less than 1, got -0.1"),
        *(
            ({name: 0}, f"{name} must be positive, got 0")
            for name in ("width", "heads", "value_head_size", "output_width", *SIZES)
        ),
    ],
)
def test_constructor_errors(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        MultiHeadAttention(**({"width": 10, "heads": 2} | options))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 4)], "query has shape (3, 4); wanted (batch, length, query width = 4)"),
        ([(2, 3, 6)], "query has shape (2, 3, 6); wanted (batch, length, query width = 4)"),
        ([X, (2, 5, 6)], "key has shape (2, 5, 6); wanted (batch, length, key width = 4)"),
        ([X, Y, (2, 5, 6)], "value has shape (2, 5, 6); wanted (batch, length, value width = 4)"),
        ([X, Y, (2, 6, 4)], f"got query {X}, key {Y}, value (2, 6, 4); {LENGTHS}"),
        ([X, (1, 5, 4)], f"got query {X}, key (1, 5, 4), value (1, 5, 4); {LENGTHS}"),
        ([X, Y, (1, 5, 4)], f"got query {X}, key {Y}, value (1, 5, 4); {LENGTHS}"),
    ],
)
def test_input_shape_errors(shapes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(4, 2)(*(normal(*shape) for shape in shapes))


@pytest.mark.parametrize("causal", [True, False, "left"])
def test_causal_errors(causal):
    message = (
        f"causal must be None, 'top-left' (query i sees keys j <= i) or 'bottom-right' (j <= i + "
        f"key_length - query_length), got {causal!r}: for different lengths they differ"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        module(4, 2)(normal(*X), causal=causal)


@pytest.mark.parametrize("name", MASKS)
def test_mask_type_errors(name):
    polarity = "the polarity of numbers is never guessed; pass mask.bool() if nonzero means True, "
    polarity += "or attn_bias if it is added to the logits"
    booleans = "pass booleans as attend_mask (True = may attend) or block_mask (True = must not)"
    kind, hint = ("floating", booleans) if name == "attn_bias" else ("bool", polarity)
    wrong = [torch.uint8, torch.int64, torch.bool if name == "attn_bias" else torch.float32]
    cases = [(torch.ones(3, 5).to(d), f"{name} must be {kind}, got {d}: {hint}") for d in wrong]
    for mask, message in [*cases, ([[True]], f"{name} must be a torch.Tensor, got list")]:
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            module(4, 2)(normal(*X), normal(*Y), **{name: mask})


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "shape", [(5,), (5, 3), (3, 3, 5), (2, 4, 3, 5), (2, 2, 3, 6), (1, 1, 1, 3, 5), (2, 5)]
)
def test_mask_shape_errors(name, shape):
    message = f"{name} has shape {shape}; wanted [query key] (3, 5), [batch query key] (2, 3, 5) "
    message += "or [batch heads query key] (2, 2, 3, 5), each axis of that size or 1"
    if shape == (2, 5):
        message += f"; pass a [batch key] padding mask as {name}[:, None, None, :]"
    mask = torch.zeros(shape) if name == "attn_bias" else torch.ones(shape).bool()
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        module(4, 2)(normal(*X), normal(*Y), **{name: mask})


# Features of language models: against the reference, which knows of no torch


def featured(problem, *names):
    """The problem with features, by the names of them that `Problem.features` has."""
    batch, heads, queries, keys = problem.shape.logits
    random = np.random.default_rng(3)
    size = problem.shape.head_size
    segments = [np.sort(random.integers(0, 3, (batch, length))) for length in (queries, keys)]
    fields = {
        "window": {"window": (2, 1)},
        "soft cap": {"soft_cap": 1.5},
        "sinks": {"sinks": random.standard_normal(heads)},
        "alibi": {"slopes": 2.0 ** -np.arange(heads)},
        "rotary": {"rotary": Rotary(size=2, base=100.0, pairs="interleaved")},
        "query/key norm": {
            "norm": Norm(query=random.standard_normal(size), key=random.standard_normal(size))
        },
        "lengths": {
            "key_lengths": random.integers(queries, keys + 1, batch),
            "query_lengths": random.integers(0, queries + 1, batch),
        },
        "segments": {"segments": Segments(query=segments[0], key=segments[1])},
        "tree": {
            "tree": np.minimum(
                np.resize([-1, 0, 0, 1, 3], (batch, queries)), np.arange(-1, queries - 1)
            )
        },
        "spans": {
            "spans": np.resize([1, 1, 0, 2, 2, 1, 2], (batch, keys)),
            "causal": "top-left",
        },
    }
    chosen = {name: value for feature in names for name, value in fields[feature].items()}
    return problem.replace(**chosen)


FEATURES = ("query/key norm", "rotary", "soft cap", "alibi", "window", "lengths", "sinks")
COMBINED = [
    *((name,) for name in (*FEATURES, "segments", "spans", "tree")),
    ("tree", "lengths", "rotary"),
    ("tree", "alibi", "window", "sinks"),
    ("spans", "segments", "alibi"),
    ("spans", "lengths", "rotary"),
    FEATURES,
    ("rotary", "alibi", "window", "segments", "sinks"),
]


@pytest.mark.parametrize("case", ["plain/no-mask/gqa", "causal/square/self"])
@pytest.mark.parametrize("names", COMBINED, ids=" + ".join)
def test_features_are_those_of_the_reference(case, names):
    (case,) = find_cases(case)
    problem = featured(case.problem("float64"), *names)
    if problem.shape.query_length > problem.shape.key_length:
        problem = problem.replace(query_lengths=None, key_lengths=None)
    expected, adapter = solve(problem), Ours()
    spellings = list(itertools.islice(adapter.masks.spellings(problem), 4))
    for spelling in spellings:
        answer = adapter.run(problem, Call(adapter.modes[0], spelling=spelling))
        assert answer.gradients.keys() == expected.gradients.keys()
        for name, array in expected.arrays().items():
            found = answer.arrays()[name]
            np.testing.assert_allclose(found, array, rtol=1e-9, atol=1e-12, err_msg=spelling.label)


def language_model(**options):
    features = {
        "norm_epsilon": 1e-6,
        "rotary": positions.Rotary(4),
        "soft_cap": 2.0,
        "slopes": [2.0**-head for head in range(HEADS)],
        "window": (4, None),
        "sinks": True,
    }
    return module(head_size=6, kv_heads=2, **(features | options))


@pytest.mark.parametrize("chunks", [(1,) * 10, (2, 3, 5), (9, 1), (10,)])
def test_a_cache_gives_what_the_whole_gives(chunks):
    built, x = language_model(), normal(BATCH, 10, WIDTH).requires_grad_()
    whole = built(x, causal="bottom-right")
    cache = positions.Cache()
    parts = [built(part, causal="bottom-right", cache=cache) for part in x.split(chunks, 1)]
    assert len(cache) == 10
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    for one, other in zip(
        gradients(built, torch.cat(parts, 1), x), gradients(built, whole, x), strict=True
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-10)


def test_packed_sequences_are_what_they_are_alone():
    built, x = language_model(), normal(1, 9, WIDTH)
    ids = torch.tensor([[5, 5, 5, 1, 2, 2, 2, 2, 2]])
    packed = built(x, causal="top-left", query_segments=ids, key_segments=ids)
    alone = [built(part, causal="top-left") for part in x.split((3, 1, 5), 1)]
    assert torch.allclose(packed, torch.cat(alone, 1), rtol=0, atol=1e-12)


def test_drafted_tokens_beside_a_cache_are_each_the_text_before_them():
    built, x = language_model(), normal(BATCH, 9, WIDTH)
    parents = torch.tensor([[-1, 0, 0, 2, -1]]).expand(BATCH, -1)
    cache = positions.Cache()
    built(x[:, :4], causal="bottom-right", cache=cache)
    drafted = built(x[:, 4:], cache=cache, query_parents=parents)
    for token, line in enumerate(([0], [0, 1], [0, 2], [0, 2, 3], [4])):
        text = torch.cat([x[:, :4], *(x[:, 4 + at : 5 + at] for at in line)], 1)
        alone = built(text, causal="bottom-right")[:, -1]
        assert torch.allclose(drafted[:, token], alone, rtol=0, atol=1e-12)


def test_a_span_beside_a_cache_is_that_of_the_whole():
    built, x = language_model(), normal(BATCH, 10, WIDTH)
    spans = torch.tensor([[0, 1, 1, 1, 0, 2, 2, 2, 2, 0]]).expand(BATCH, -1)
    whole = built(x, causal="bottom-right", key_spans=spans)
    cache, parts = positions.Cache(), []
    for part in x.split((4, 6), 1):
        known = spans[:, : len(cache) + part.shape[1]]
        parts.append(built(part, causal="bottom-right", cache=cache, key_spans=known))
    assert torch.allclose(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    assert not torch.allclose(built(x, causal="bottom-right"), whole)


def test_the_end_of_an_entry_is_the_end_of_its_lengths():
    built, x = language_model(), inputs()[0]
    keys, queries = torch.tensor([5, 3, 4]), torch.tensor([2, 3, 1])
    padded = built(x, causal="bottom-right", key_lengths=keys, query_lengths=queries)
    for entry, (key, query) in enumerate(zip(keys, queries, strict=True)):
        row = x[entry : entry + 1]
        alone = built(row[:, :query], row[:, :key], causal="bottom-right")
        assert torch.allclose(padded[entry, :query], alone[0], rtol=0, atol=1e-12)


def test_a_shift_of_all_positions_changes_nothing():
    built, x = language_model(), inputs()[0]
    at = torch.arange(QUERIES).expand(BATCH, -1)
    first, shifted = (
        built(x, causal="top-left", query_positions=at + by, key_positions=at + by)
        for by in (0, 300)
    )
    assert torch.allclose(first, shifted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"soft_cap": 0.0}, "soft_cap must be positive, got 0.0"),
        ({"slopes": [1.0]}, "there are 1 slopes for 8 heads"),
        ({"window": (-1, 0)}, "window counts keys, got (-1, 0)"),
        ({"rotary": positions.Rotary(8)}, "rotary.size must be even and at most 6, got 8"),
        ({"rotary": positions.Rotary(3)}, "rotary.size must be even and at most 6, got 3"),
    ],
)
def test_features_that_cannot_be(options, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        language_model(**options)


def test_arguments_that_cannot_be_beside_each_other():
    built, x, cache = language_model(), inputs()[0], positions.Cache()
    built(x, causal="bottom-right", cache=cache)
    with pytest.raises(ValueError, match="a cache has neither lengths nor segments"):
        built(x, cache=cache, key_lengths=torch.ones(BATCH, dtype=torch.int64))
    with pytest.raises(ValueError, match="a parent is the index of an earlier query, or -1"):
        built(x, query_parents=torch.ones(BATCH, QUERIES, dtype=torch.int64))
    with pytest.raises(ValueError, match="spans add keys to a causal mask: pass causal too"):
        built(x, key_spans=torch.ones(BATCH, QUERIES, dtype=torch.int64))
    with pytest.raises(ValueError, match="pass segments of both queries and keys"):
        built(x, key_segments=torch.ones(BATCH, QUERIES, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_invariant_attention_has_the_same_bits_in_any_batch_and_in_steps(dtype):
    for length, grouped, size in ((3, 4, 8), (40, 2, 8), (70, 4, 8), (40, 1, 16)):
        layer = InvariantAttention(32, 4, kv_heads=grouped, head_size=size, sinks=True, dtype=dtype)
        tokens = normal(5, length, 32, seed=length, dtype=dtype)
        with torch.no_grad():
            whole = layer(tokens, causal="top-left")
            for entry in (0, 4):
                alone = layer(tokens[entry : entry + 1], causal="top-left")
                assert torch.equal(alone, whole[entry : entry + 1])
            for at in (0, 1, length // 2, length - 1):
                query, keys = tokens[:, at : at + 1], tokens[:, : at + 1]
                assert torch.equal(layer(query, keys), whole[:, at : at + 1])


def test_a_sum_over_a_whole_row_is_not_invariant():
    class Whole(InvariantAttention):
        """Adds as many numbers as there are keys, in an order that depends on their number."""

        def _softmax(self, logits):
            powers = (logits - logits.amax(-1, keepdim=True)).exp()
            half = powers.shape[-1] // 2
            return powers / (powers[..., :half].sum(-1) + powers[..., half:].sum(-1))[..., None]

    layer, tokens = Whole(32, 4, dtype=torch.float32), normal(5, 70, 32, dtype=torch.float32)
    whole = layer(tokens, causal="top-left")
    steps = [layer(tokens[:, at : at + 1], tokens[:, : at + 1]) for at in range(70)]
    assert not torch.equal(torch.cat(steps, 1), whole)


def test_invariant_attention_is_attention():
    options = {**SIZES, "norm_epsilon": 1e-6, "soft_cap": 5.0, "sinks": True}
    layer, usual = (
        kind(WIDTH, HEADS, dtype=torch.float64, **options)
        for kind in (InvariantAttention, MultiHeadAttention)
    )
    usual.load_state_dict(layer.state_dict())
    inputs = normal(BATCH, 70, WIDTH), normal(BATCH, 40, 11), normal(BATCH, 40, 12)
    found = [each(*inputs, causal="bottom-right", need_weights=True) for each in (layer, usual)]
    for ours, other in zip(*found, strict=True):
        torch.testing.assert_close(ours, other)
    gradients = [
        torch.autograd.grad(output.square().sum(), each.query_projection.weight)
        for (output, _), each in zip(found, (layer, usual), strict=True)
    ]
    torch.testing.assert_close(*gradients)


def test_invariant_attention_takes_empty_batches_and_sequences():
    layer = InvariantAttention(WIDTH, 2)
    assert layer(torch.zeros(0, 3, WIDTH)).shape == (0, 3, WIDTH)
    assert layer(torch.zeros(2, 0, WIDTH)).shape == (2, 0, WIDTH)
    bias = layer.output_projection.bias.expand(2, 3, WIDTH)
    assert torch.equal(layer(torch.zeros(2, 3, WIDTH), torch.zeros(2, 0, WIDTH)), bias)
