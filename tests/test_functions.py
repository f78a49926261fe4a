"""Functions are given the mode as layers are, and what else an adapter may say of a call."""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import numpy as np
import pytest
from mutants.miniatures import Correct, attention

from conformance import CausalFlag, Mode, Unavailable, Unsupported, attention_function
from conformance.adapter.base import DEFAULT_MODE, Adapter, Call
from conformance.adapter.loading import load
from conformance.cases.catalogue import find_cases
from conformance.errors import DeviceLost
from conformance.experiments import experiment
from conformance.frameworks.base import Request
from conformance.frameworks.numpy_bridge import NumPy
from conformance.records.record import decode_line
from conformance.running.isolation import ProcessLimits, StandIn, supervise
from conformance.running.isolation_child import Declared, Examine, Examined, RequestHandler
from conformance.running.provenance import describe
from conformance.running.session import Inquiry, Item, Session

TRAIN, EVAL = Mode("train", {"train": True}), Mode("eval", {"train": False})
(CASE,) = find_cases("plain/no-mask/self")
PROBLEM = CASE.problem("float32")


def given(function):
    """The modes that a decorated function is given, when called once in each of two."""
    modes = []
    adapter = attention_function("numpy", modes=(TRAIN, EVAL))(function(modes))
    for mode in adapter.modes:
        adapter.run(PROBLEM, Call(mode))
    return modes


def test_a_decorated_function_with_a_parameter_mode_is_given_the_mode():
    def function(modes):
        def attend(query, key, value, mode):
            modes.append(mode)
            return attention(query, key, value)

        return attend

    assert given(function) == [TRAIN, EVAL]


def test_a_default_of_its_own_is_left_alone():
    def function(modes):
        def attend(query, key, value, mode="full"):
            modes.append(mode)
            return attention(query, key, value)

        return attend

    assert given(function) == ["full", "full"]


def test_options_hold_no_mode():
    def function(modes):
        def attend(query, key, value, **options):
            modes.append(options)
            return attention(query, key, value)

        return attend

    assert given(function) == [{}, {}]


class Moded(Correct):
    modes = (TRAIN, EVAL)

    def attend(self, query, key, value, masks, mode, **options):
        self.mode, self.options = mode, options
        return super().attend(query, key, value, masks, **options)


def test_a_subclass_is_given_the_mode_and_its_parent_need_not_be():
    adapter = Moded()
    mode = Mode("train", {"train": True}, dropout=0.5, draw=3)
    adapter.run(PROBLEM, Call(mode))
    assert adapter.mode == mode
    assert adapter.options == {}
    assert adapter.mode["train"]


def test_a_function_may_add_the_biases_itself():
    class Adds(Correct):
        modes = (Mode("suite"), Mode("own"))
        bias_modes = ("own",)

        def attend(self, query, key, value, masks, mode, **options):
            names = ("query_bias", "key_bias", "value_bias")
            self.biases = [options.pop(name) for name in names if name in options]
            heads = [query, key, value]
            for place, bias in enumerate(self.biases):
                assert bias.shape == (heads[place].shape[1], heads[place].shape[3])
                heads[place] = heads[place] + bias[:, None, :]
            return super().attend(*heads, masks, **options)

    adapter, outputs = Adds(), []
    for mode in adapter.modes:
        outputs.append(adapter.run(PROBLEM, Call(mode)).output)
        assert len(adapter.biases) == (3 if mode.name == "own" else 0)
    assert np.allclose(*outputs, rtol=0, atol=1e-6)


def test_what_a_function_needs_is_made_before_it_is_called():
    class Prepares(Correct):
        def attend_for(self, problem, call):
            attend, _ = super().attend_for(problem, call)
            factor = 2.0 if call.mode.name == "default" else 0.0

            def scaled(*arguments, **options):
                context, weights = attend(*arguments, **options)
                return (factor * context).astype(context.dtype), weights

            return scaled, factor

    ready = [adapter._prepare(PROBLEM, Call()) for adapter in (Correct(), Prepares())]
    plain, doubled = (prepared.function(prepared.variables, {})[0] for prepared in ready)
    bias = PROBLEM.weights.output_bias
    assert np.allclose(doubled - bias, 2 * (plain - bias), atol=1e-5)
    assert ready[0].program != ready[1].program


def test_programs_that_drop_with_other_draws_are_others():
    modes = [Mode("train", dropout=0.5, draw=draw) for draw in (0, 1)]
    programs = [Moded()._prepare(PROBLEM, Call(mode)).program for mode in modes]
    assert programs[0] != programs[1]


class Surrounded(Correct):
    entered = 0

    @contextmanager
    def around_call(self, problem, call):
        if call.mode.name == "refused":
            raise Unsupported("not in this mode")
        self.entered += 1
        yield
        self.entered -= 1

    def check_device(self, device):
        super().check_device(device)
        if self.modes[0].name == "elsewhere":
            raise Unavailable("its kernel is for other devices")

    def attend(self, query, key, value, masks, **options):
        assert self.entered == 1
        return super().attend(query, key, value, masks, **options)


def test_an_adapter_surrounds_its_calls():
    adapter = Surrounded()
    adapter.run(PROBLEM, Call())
    adapter.side_effects(PROBLEM, Call())
    adapter.rewritten(PROBLEM, PROBLEM, Call())
    assert adapter.entered == 0
    with pytest.raises(Unsupported, match="not in this mode"):
        adapter.run(PROBLEM, Call(Mode("refused")))


class Traced(NumPy):
    """A framework that traces what it compiles, as MLX does: within, arrays have no numbers."""

    compiles_modes = True
    tracing = False

    def call(self, request):
        self.tracing = request.optimised
        try:
            return super().call(request)
        finally:
            self.tracing = False

    def numpy(self, native):
        assert not self.tracing, "an array without numbers"
        return super().numpy(native)


class OfTraced(Correct):
    bridge = Traced()


@pytest.mark.parametrize("mode", [Mode("eager"), Mode("compiled", optimised=True)])
def test_what_a_function_gets_is_not_read_while_it_is_traced(mode):
    assert not OfTraced().side_effects(PROBLEM, Call(mode)).changed


class Overwriting(Correct):
    def attend(self, query, key, value, masks, **options):
        key *= 2
        return super().attend(query, key / 2, value, masks, **options)


@pytest.mark.parametrize("mode", [Mode("eager"), Mode("compiled", optimised=True)])
def test_what_a_function_compiles_itself_is_watched_as_well(mode):
    """Arrays have numbers where the bridge calls a function as it is."""
    (changed,) = Overwriting().side_effects(PROBLEM, Call(mode)).changed
    assert changed == "key, as the function gets it: its numbers changed"


def test_an_adapter_knows_its_devices():
    adapter = Surrounded()
    adapter.modes = (Mode("elsewhere"),)
    for ask in (lambda: adapter.device_model("cpu"), lambda: adapter.run(PROBLEM, Call())):
        with pytest.raises(Unavailable, match="for other devices"):
            ask()


@pytest.mark.parametrize(
    ("mode", "asked", "compiled"),
    [
        (Mode("default"), True, True),
        (Mode("default"), False, False),
        (Mode("dynamic", compiled=False), True, False),
    ],
)
def test_the_bridge_gets_one_request(monkeypatch, mode, asked, compiled):
    requests = []
    evaluate = NumPy.evaluate
    monkeypatch.setattr(
        NumPy, "evaluate", lambda self, request: requests.append(request) or evaluate(self, request)
    )
    Correct().run(PROBLEM, Call(mode, compiled=asked))
    (request,) = requests
    assert request.compiled == compiled
    assert "query" in request.variables
    assert not request.gradients  # NumPy has no derivatives
    assert request.cotangent.shape == PROBLEM.cotangent.shape


class Derivatives(NumPy):
    """Where gradients are functions of their own."""

    differentiable = True


@pytest.mark.parametrize(("bridge", "repeats"), [(NumPy(), True), (Derivatives(), False)])
def test_gradients_are_repeated_where_there_is_a_graph(bridge, repeats):
    request = Request(lambda *_: (np.ones(1), None), {}, {}, None, False, None, backwards=2)
    if repeats:
        assert bridge.evaluate(request).gradients == {}
    else:
        with pytest.raises(Unsupported, match="derivatives of numpy are functions, not graphs"):
            bridge.evaluate(request)


@pytest.mark.night
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_gradients_of_a_compiled_function_are_asked_for_twice():
    """By default, what it compiles gives away the buffers of a graph in the first backward pass."""
    torch = pytest.importorskip("torch")
    from torch._functorch import config

    @torch.compile
    def weighted(logits, value):
        return torch.softmax(logits, dim=-1) @ value

    @attention_function("torch")
    def compiled(query, key, value):
        return weighted(query @ key.mT / math.sqrt(query.shape[-1]), value)

    before = config.donated_buffer
    once = compiled.run(PROBLEM, Call()).arrays()
    twice = compiled.run(PROBLEM, Call(backwards=2)).arrays()
    assert config.donated_buffer == before
    for name, array in once.items():
        np.testing.assert_array_equal(array, twice[name])


def test_a_compiled_function_is_compiled_for_every_problem():
    """By default, torch compiles it for eight kinds of arguments, and then calls it as it is."""
    torch, dynamo = (pytest.importorskip(name) for name in ("torch", "torch._dynamo"))

    @partial(torch.compile, backend="eager", dynamic=False)
    def one_if_compiled(x):
        return torch.ones_like(x) * torch.compiler.is_compiling()

    seen = []

    @attention_function("torch")
    def compiled(query, key, value):
        seen.append(one_if_compiled(value.detach()).min().item())
        return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), dim=-1) @ value

    limit = dynamo.config.recompile_limit
    for case in find_cases("plain/no-mask/*"):
        for dtype in ("float32", "float64", "bfloat16"):
            with suppress(Unsupported):
                compiled.run(case.problem(dtype), Call())
    assert len(seen) > 2 * limit
    assert set(seen) == {1.0}
    assert dynamo.config.recompile_limit == limit


@pytest.mark.parametrize("dtype", ["float64", "float16", "bool", "int32"])
@pytest.mark.parametrize("how", ["gaps", "window"])
def test_strides_change_no_number(dtype, how):
    values = np.arange(24).reshape(2, 3, 4).astype(dtype)
    laid = NumPy().strided(values, how, "cpu")
    assert np.array_equal(laid, values)
    assert laid.dtype == values.dtype
    assert not laid.flags.c_contiguous
    assert laid.base.size == (2 * 24 if how == "gaps" else 2 * 6 * 4)
    if how == "window" and laid.dtype.kind == "f":
        assert np.isnan(laid.base).sum() == 2 * 3 * 4


def test_frameworks_without_strides_say_so():
    class Still(NumPy):
        has_strides = False

    with pytest.raises(Unsupported, match="arrays of numpy have no strides"):
        Still().strided(np.ones(3), "gaps", "cpu")


# Processes of their own, as seen from within


@attention_function("numpy")
def leaves(query, key, value):
    """End the process."""
    raise SystemExit(3)


@attention_function("numpy")
def loses_its_device(query, key, value):
    """Fail as a call does whose device is lost."""
    raise DeviceLost("the device is lost")


@pytest.mark.parametrize("beside", [False, True])
def test_an_exit_in_or_beside_the_call_is_the_verdict_of_its_item(monkeypatch, beside):
    leaves.name = "leaves"
    desk = RequestHandler(leaves, "", "cpu", lambda line: None)
    if beside:
        monkeypatch.setattr(desk, "_examine", lambda request: sys.exit(3))
    answer = desk.answer(Examine("plain/no-mask/cross", "float32", "default"))
    assert isinstance(answer, Examined)
    assert decode_line(answer.line)[0].verdict == "error"


def test_a_lost_device_is_noted_by_the_session():
    where = ("float32", "cpu", DEFAULT_MODE)
    for row in (
        Item(loses_its_device, CASE, *where),
        Inquiry(loses_its_device, experiment("sizes"), *where),
    ):
        session = Session()
        assert session.ask(row)[0].verdict == "crashed"
        assert session.lost_device


def test_a_supervisor_is_replaced_if_the_limits_are_others():
    spec = f"{__file__}:leaves"
    first = supervise(spec, "cpu", ProcessLimits())
    assert supervise(spec, "cpu", ProcessLimits()) is first
    other = supervise(spec, "cpu", ProcessLimits(item=1.0))
    assert other is not first
    other.close()


def test_what_is_isolated_and_not_installed_has_no_device():
    described = describe([(leaves, "")], "cpu")[0]
    absent = msgspec.structs.replace(described, unavailable="no such package")
    with pytest.raises(Unavailable, match="no such package"):
        StandIn(Declared(implementation=absent, modes={"default": False})).device_model("cpu")


def test_an_adapter_has_no_versions_unless_it_says_so():
    assert Adapter.versions(leaves) == Adapter.toolkit(leaves) == {}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("ring-attention-pytorch", "batch length heads head"),
        ("deepspeed-ulysses", "batch length heads head"),
        ("onnxruntime-mha", "batch length (heads head)"),
        ("onnxruntime-gqa", "batch length (heads head)"),
        pytest.param("keras-torch-additive", "batch length head", marks=pytest.mark.night),
        ("torch-sdpa", "batch heads length head"),
        ("jax-sdpa", "batch length heads head"),
    ],
)
def test_the_layout_that_is_told_is_that_of_the_library(name, layout):
    (told,) = describe([(load(name), name)], "cpu")
    assert told.layout == layout


def test_a_flag_that_is_ignored_is_told_as_such():
    flag = CausalFlag("is_causal", "top-left", effect="none")

    @attention_function("numpy", causal_flag=flag)
    def attend(query, key, value, is_causal=False):
        return value

    (told,) = describe([(attend, "attend")], "cpu")
    assert told.causal.effect == "none"


def operators(run) -> set[str]:
    """The names of torch's operators that are called."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    return {event.key for event in seen.key_averages()}


@pytest.mark.parametrize(
    ("tiled", "change"),
    [
        (True, {}),
        (True, {"attn_mask": (3, 3)}),
        (True, {"attn_mask": (1, 1, 3, 3)}),
        (False, {"value": (2, 4, 3, 5)}),
        (False, {"attn_mask": (4, 3, 3)}),
        (False, {"query": (4, 3, 8), "key": (4, 3, 8), "value": (4, 3, 8)}),
        (False, {"dropout_p": 0.5}),
    ],
    ids=str,
)
def test_torch_takes_the_kernel_that_the_page_of_sdpa_says(tiled, change):
    torch = pytest.importorskip("torch")
    given = dict.fromkeys(("query", "key", "value"), (2, 4, 3, 8)) | change
    given = {n: torch.zeros(a) if isinstance(a, tuple) else a for n, a in given.items()}
    called = operators(lambda: torch.nn.functional.scaled_dot_product_attention(**given))
    assert any("flash" in name for name in called) == tiled
    if tiled and "attn_mask" in given:
        given["attn_mask"].requires_grad_()
        called = operators(lambda: torch.nn.functional.scaled_dot_product_attention(**given))
        assert not any("flash" in name for name in called)


@pytest.mark.parametrize(
    ("fast", "change"),
    [
        (True, {}),
        (True, {"activation": "gelu"}),
        (False, {"bias": False}),
        (False, {"nhead": 3}),
        (False, {"batch_first": False}),
        (False, {"activation": "silu"}),
    ],
    ids=str,
)
def test_torch_takes_the_path_that_the_page_of_the_encoder_layer_says(fast, change):
    torch = pytest.importorskip("torch")
    change = {"nhead": 2, "batch_first": True} | change
    if change.get("activation") == "silu":
        change["activation"] = torch.nn.functional.silu
    layer = torch.nn.TransformerEncoderLayer(12, dim_feedforward=8, **change).eval()
    tokens = torch.zeros(2, 3, 12)
    with torch.no_grad(), torch.autocast("cpu"):
        assert ("aten::_transformer_encoder_layer_fwd" in operators(lambda: layer(tokens))) == fast
    with torch.no_grad():
        layer.norm2.eps *= 2
        assert "aten::_transformer_encoder_layer_fwd" not in operators(lambda: layer(tokens))
        layer.norm2.eps = layer.norm1.eps
        layer.linear1.register_forward_hook(lambda *given: None)
        assert "aten::_transformer_encoder_layer_fwd" not in operators(lambda: layer(tokens))


KERAS = """
import os
os.environ["KERAS_BACKEND"] = "{backend}"
os.environ["JAX_ENABLE_X64"] = "1"
import numpy as np
import keras
heads = [keras.ops.ones((1, 2, 1, 4), "float64")] * 3
print(keras.backend.standardize_dtype(keras.ops.dot_product_attention(*heads).dtype))
blocked = np.array([[[[0.0, -np.inf], [0.0, 0.0]]]])
for mask in (blocked, keras.ops.convert_to_tensor(blocked)):
    try:
        keras.ops.dot_product_attention(*heads, mask=mask)
        print("taken")
    except Exception:
        print("rejected")
"""


@pytest.mark.night
@pytest.mark.parametrize(
    ("backend", "told"),
    [
        ("jax", "float32 taken taken"),
        ("torch", "float32 taken taken"),
        ("tensorflow", "float64 taken rejected"),
    ],
)
def test_keras_does_to_dtypes_and_masks_what_the_page_of_ops_says(backend, told):
    for package in ("keras", backend):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-c", KERAS.format(backend=backend)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == told.split()
