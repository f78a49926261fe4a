"""Modules that take `past_key_values`: those of transformers are right, mistakes are noticed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from looped import for_each

from conformance import StatefulLayer, cli
from conformance.errors import ExitCode, UnknownName, WrongDeclaration
from conformance.stateful.checking import examine_stateful
from conformance.stateful.ways import WAYS

torch = pytest.importorskip("torch")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 16,
    "max_position_embeddings": 256,
    # Logits are so large that it matters to which tokens a query attends.
    "initializer_range": 0.2,
}

MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 16},
    "Gemma3Text": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3": {},
}
"""By the name of a model, what its configuration has beside the sizes."""

CAPACITY = 80


def model_of(name, attention="sdpa", **more):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        **(SIZES | MODELS[name] | more), attn_implementation=attention
    )
    torch.manual_seed(0)
    model = getattr(transformers, name.replace("Text", "TextModel")) if "Text" in name else None
    return (model or getattr(transformers, f"{name}Model"))(config).eval()


def layer_of(name, cache, attention="sdpa", **more):
    """The layer of a model with a cache class of transformers, or one derived from it."""
    model = model_of(name, attention)
    declared = {"capacity": CAPACITY} if more else {}
    make = partial(cache, config=model.config, **more)
    return StatefulLayer.from_huggingface(model, make, **declared)


@pytest.mark.sample(9)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_conform(name, kind, attention):
    """In float32 and bfloat16; with a window, a static cache is a ring."""
    cache = getattr(pytest.importorskip("transformers"), kind)
    more = {"max_cache_len": CAPACITY} if kind == "StaticCache" else {}
    done = examine_stateful(layer_of(name, cache, attention, **more))
    assert not done.wrong, str(done)
    # A static cache neither rolls back nor drops rows.
    assert done.counts["conforms"] >= (46 if more else 48), str(done)


def mistakes():
    """By name, a cache class with a mistake, and the requirements that must notice it."""
    from transformers import DynamicCache

    class KeepsRows(DynamicCache):
        def reorder_cache(self, beam_idx):
            pass

    class KeepsTokens(DynamicCache):
        def crop(self, tokens_to_remove):
            pass

    class KeepsValues(DynamicCache):
        def crop(self, tokens_to_remove):
            values = [layer.values[:, :, -tokens_to_remove:] for layer in self.layers]
            super().crop(tokens_to_remove)
            for layer, kept in zip(self.layers, values, strict=True):
                layer.values = kept

    class Restarts(DynamicCache):
        def get_seq_length(self, layer_idx=0):
            return 0

    class NeverResets(DynamicCache):
        def reset(self):
            pass

    class HalfCast(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            new = key_states.shape[-2]
            old = keys[:, :, :-new].bfloat16().to(keys)
            return torch.cat([old, keys[:, :, -new:]], -2), values

    return {
        KeepsRows: {"stateful.rows": "stateful.row-of-another"},
        KeepsTokens: {"stateful.rollback": "stateful.stale"},
        KeepsValues: {"stateful.rollback": "stateful.stale"},
        Restarts: {"stateful.steps": "", "stateful.chunks": ""},
        NeverResets: {"stateful.reset": "stateful.stale"},
        HalfCast: {"stateful.steps": "stateful.fewer-bits"},
    }


def test_mistakes_of_caches_are_noticed():
    pytest.importorskip("transformers")
    for cache, wanted in mistakes().items():
        layer = layer_of("Llama", cache)
        layer.dtypes = ("float32",)
        ways = [way for way in WAYS if way.requirement in wanted]
        done = examine_stateful(layer, ways=ways)
        causes = {finding.requirement: finding.cause.id for _, finding in done.wrong}
        assert causes.keys() == wanted.keys(), cache
        for requirement, cause in wanted.items():
            assert not cause or causes[requirement] == cause, (cache, causes)


def test_positions_that_do_not_go_on_are_told_from_all_else():
    """A model makes positions from the length of its cache, and takes others."""
    model = model_of("Llama")

    class Restarting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.config = model, model.config

        def forward(self, inputs_embeds, position_ids=None, past_key_values=None, use_cache=None):
            if position_ids is None:
                position_ids = torch.arange(inputs_embeds.shape[1])[None]
            return self.inner(
                inputs_embeds=inputs_embeds,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
            )

    cache = pytest.importorskip("transformers").DynamicCache
    layer = StatefulLayer.from_huggingface(Restarting(), partial(cache, config=model.config))
    layer.dtypes = ("float32",)
    ways = [way for way in WAYS if way.name in ("runs", "steps", "chunks-5")]
    done = examine_stateful(layer, ways=ways)
    causes = {finding.requirement: finding.cause.id for _, finding in done.wrong}
    assert causes == dict.fromkeys(("stateful.steps", "stateful.chunks"), "stateful.positions-off")


def test_a_ring_that_refuses_to_roll_back_is_not_wrong():
    cache = pytest.importorskip("transformers").DynamicCache

    class Full(cache):
        def crop(self, tokens_to_remove):
            raise RuntimeError("the window is full")

    layer = layer_of("Llama", Full)
    layer.dtypes = ("float32",)
    done = examine_stateful(layer, ways=[way for way in WAYS if way.name == "after-rollback"])
    assert done.results[0].findings[0].verdict == "unsupported"
    assert "the window is full" in str(done)


class Decoder(torch.nn.Module):
    """A module in the style of Hugging Face, without transformers: its cache is a pair."""

    def __init__(self, width=16):
        super().__init__()
        self.project = torch.nn.Linear(width, 3 * width)

    def forward(self, hidden_states, past_key_values=None, use_cache=False):
        query, key, value = self.project(hidden_states).chunk(3, -1)
        if past_key_values is not None:
            pairs = zip(past_key_values, (key, value), strict=True)
            key, value = (torch.cat(pair, 1) for pair in pairs)
        mask = torch.ones(query.shape[1], key.shape[1]).tril(key.shape[1] - query.shape[1]).bool()
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return (found, (key, value)) if use_cache else (found,)


class Renamed(Decoder):
    """The same with the argument's name of newer versions of transformers."""

    def forward(self, hidden_states, cache=None, use_cache=False):
        return super().forward(hidden_states, cache, use_cache)


@pytest.mark.parametrize("kind", [Decoder, Renamed])
def test_a_module_of_ones_own_makes_its_cache(kind):
    torch.manual_seed(0)
    layer = StatefulLayer.from_huggingface(kind(), width=16, name="mine")
    done = examine_stateful(layer)
    assert not done.wrong, str(done)
    verdicts = {result.case: result.verdict for result in done.results}
    for way in ("cache-off", "after-reset", "restored", "chunks-17"):
        assert verdicts[f"stateful/{way}"] == "conforms"
    # A pair has no methods, and the module takes no mask.
    for way in ("after-rollback", "rows-reordered", "left-padding"):
        assert verdicts[f"stateful/{way}"] == "unsupported"


class Inside(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder()
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.decoder(x)[0])


def test_a_part_of_a_model_is_named_by_its_path():
    layer = StatefulLayer.from_huggingface(Inside(), width=16, module="decoder")
    assert layer.name == "Decoder"
    with pytest.raises(UnknownName, match=r"unknown module 'decodr'; did you mean decoder"):
        StatefulLayer.from_huggingface(Inside(), width=16, module="decodr")


@for_each(
    case=[
        (Inside, {"width": 16}, "Inside takes no past_key_values or cache"),
        (Decoder, {}, "Decoder has no config.hidden_size; tell width="),
        (Decoder, {"width": 16, "windw": 3}, "declares no 'windw'"),
    ]
)
def test_what_is_no_such_module_is_an_error_of_one_line(case):
    module, declared, told = case
    with pytest.raises(WrongDeclaration, match=told):
        StatefulLayer.from_huggingface(module(), **declared)


def test_gradients_flow_through_a_cache():
    transformers = pytest.importorskip("transformers")

    class Detached(transformers.DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            new = key_states.shape[-2]
            return torch.cat([keys[:, :, :-new].detach(), keys[:, :, -new:]], -2), values

    for cache, verdict in ((transformers.DynamicCache, "conforms"), (Detached, "deviates")):
        layer = layer_of("Llama", cache)
        layer.differentiable = True
        _, verdicts = through(layer, ("runs", "causal", "gradients-steps", "gradients-chunks"))
        assert verdicts["gradients-steps"] == verdicts["gradients-chunks"] == verdict, cache
        assert verdicts["runs"] == "conforms"


# A layer inside a model


def inside(model, module, **declared):
    """A layer inside a model, in float32 unless it is declared otherwise."""
    cache = partial(pytest.importorskip("transformers").DynamicCache, config=model.config)
    declared = {"dtypes": ("float32",), **declared}
    return StatefulLayer.from_huggingface(model, cache, module=module, **declared)


WITHIN = ("runs", "causal", "alone", "steps", "chunks-5", "chunks-mixed", "left-padding")
WITHIN += ("after-rollback", "rows-reordered", "restored", "cache-off", "beyond-window")


def through(layer, ways=WITHIN):
    done = examine_stateful(layer, ways=[way for way in WAYS if way.name in ways])
    return done, {result.case.partition("/")[2]: result.verdict for result in done.results}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", MODELS)
def test_an_attention_inside_a_model_conforms(name):
    """A model makes positions, masks and caches, which the attention itself cannot."""
    for module in ("layers.0.self_attn", "layers.1"):
        done, verdicts = through(inside(model_of(name), module, dtypes=("float32", "bfloat16")))
        assert not done.wrong, str(done)
        assert verdicts["steps"] == verdicts["left-padding"] == verdicts["restored"] == "conforms"


class Planted(torch.nn.Module):
    """An attention of a model with a mistake; `given` changes the arguments of a call."""

    def __init__(self, inner, given=lambda it: it, output=lambda it, hidden: it):
        super().__init__()
        self.inner, self.given, self.output = inner, given, output

    def forward(self, hidden_states, **given):
        found, *rest = self.inner(hidden_states, **self.given(given))
        return (self.output(found, hidden_states), *rest)


def _restarting(given):
    cos, sin = given["position_embeddings"]
    first = [table[:, :1] * 0 + value for table, value in ((cos, 1.0), (sin, 0.0))]
    if cos.shape[1] > 1:
        return given
    return given | {"position_embeddings": tuple(first)}


def _to_half(given):
    cache = given.get("cache", given.get("past_key_values"))
    if cache is not None and len(cache.layers) > 1 and cache.layers[1].is_initialized:
        cache.layers[1].keys = cache.layers[1].keys.half().to(cache.layers[1].keys)
    return given


PLANTED = {
    "positions of single tokens restart": ({"given": _restarting}, {"steps"}),
    "padding is attended to": (
        {"given": lambda it: it | {"attention_mask": None}},
        {"left-padding"},
    ),
    "single tokens take a path of fewer bits": (
        {"output": lambda it, hidden: it if hidden.shape[1] > 1 else it.half().to(it)},
        {"steps"},
    ),
    "the cache holds float16": ({"given": _to_half}, {"steps", "chunks-5"}),
}
"""Mistakes of one layer, and the ways that must notice them."""


@for_each(name=PLANTED)
def test_a_mistake_is_noticed_in_the_layer_that_makes_it_and_in_no_other(name):
    how, wanted = PLANTED[name]
    model = model_of("Llama", num_hidden_layers=3)
    model.layers[1].self_attn = Planted(model.layers[1].self_attn, **how)
    ways = {*wanted, "runs", "causal"}
    _, verdicts = through(inside(model, "layers.1.self_attn"), ways)
    assert {way for way, verdict in verdicts.items() if verdict == "deviates"} == wanted
    for other in ("layers.0.self_attn", "layers.2.self_attn"):
        done, _ = through(inside(model, other), ways)
        assert not done.wrong, str(done)


def test_a_layer_is_fed_what_it_gets_in_the_model():
    """Random numbers of size 1 would be too small for this mistake."""
    model = model_of("Llama")
    size = 40.0
    torch.nn.init.constant_(model.layers[1].input_layernorm.weight, size)
    clipped = Planted(
        model.layers[1].self_attn, output=lambda it, hidden: it + hidden.clamp(min=10) - 10
    )
    model.layers[1].self_attn = clipped
    ids = torch.arange(12).reshape(2, 6)
    layer = inside(model, "layers.1.self_attn", batch={"input_ids": ids})
    found = layer.embeddings()
    assert found.shape == (12, 32)
    assert np.abs(found).max() > size
    done, verdicts = through(layer, ("runs", "steps"))
    assert verdicts["steps"] == "conforms", str(done)
    assert layer.embeddings() is not None
    assert inside(model, "layers.0.self_attn").embeddings() is None


def test_a_layer_inside_a_model_is_checked_under_autocast():
    layer = inside(
        model_of("Llama"),
        "layers.1.self_attn",
        within=partial(torch.autocast, "cpu", torch.bfloat16),
    )
    done, verdicts = through(layer)
    assert not done.wrong, str(done)
    assert verdicts["steps"] == "conforms"


@pytest.mark.night
def test_a_part_that_is_compiled_is_checked():
    model = model_of("Llama")
    half, _ = PLANTED["single tokens take a path of fewer bits"]
    part = Planted(model.layers[1].self_attn, **half)
    model.layers[1].self_attn = torch.compile(part, backend="eager")
    _, verdicts = through(inside(model, "layers.1.self_attn"), ("runs", "steps", "chunks-5"))
    assert verdicts["steps"] == "deviates"
    assert verdicts["chunks-5"] == "conforms"


@for_each(
    case=[
        ("layers.9.self_attn", UnknownName, r"unknown module 'layers.9.self_attn'; did you mean"),
        ("norm.weight", UnknownName, "unknown module 'norm.weight'"),
        ("layers.0.mlp.down_proj", WrongDeclaration, "takes numbers of another shape"),
        ("rotary_emb", WrongDeclaration, "gives no output for each token"),
    ]
)
def test_a_part_that_cannot_be_fed_is_an_error_of_one_line(case):
    module, kind, told = case
    with pytest.raises(kind, match=told) as raised:
        inside(model_of("Llama"), module)
    assert "\n" not in str(raised.value)


def test_a_part_that_is_not_called_or_called_often_is_an_error():
    model = model_of("Llama")
    model.spare = torch.nn.Linear(32, 32)
    with pytest.raises(WrongDeclaration, match="is called 0 times in a forward pass"):
        inside(model, "spare")
    model.layers[1].self_attn = model.layers[0].self_attn
    with pytest.raises(WrongDeclaration, match="is called 2 times in a forward pass"):
        inside(model, "layers.0.self_attn")


# On the command line

FILE = """
from types import SimpleNamespace

import torch
from test_stateful_transformers import Decoder, Inside, model_of

from conformance import StatefulLayer


class Stateful(StatefulLayer):
    pass


class Wrong(Decoder):
    def forward(self, hidden_states, past_key_values=None, use_cache=False):
        found = super().forward(hidden_states, past_key_values, use_cache)
        return (found[0] * (1 if past_key_values is None else 1.5), *found[1:])


def build(part=Decoder):
    torch.manual_seed(0)
    model = Inside()
    model.decoder = part()
    model.decoder.config = SimpleNamespace(hidden_size=16)
    return model


def wrong():
    return build(Wrong)


def raises():
    raise ValueError("no\\nmodel")


def llama():
    return model_of("Llama")


model, number = build(), 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(FILE)
    return path


def test_the_command_checks_a_part_of_a_model(file, capsys):
    asked = ["--module", "decoder", "--dtype", "float32", "--strict"]
    for name in ("build", "model"):
        assert cli.main(["run", f"{file}:{name}", *asked]) == ExitCode.OK
        assert "  steps                conforms" in capsys.readouterr().out
    assert cli.main(["run", f"{file}:wrong", *asked]) == ExitCode.DEVIATES
    assert "differs first in call 2, tokens 7 to 7" in capsys.readouterr().out


def test_the_command_checks_an_attention_inside_a_model_of_transformers(file, capsys):
    pytest.importorskip("transformers")
    asked = ["--module", "layers.1.self_attn", "--dtype", "float32", "--strict"]
    assert cli.main(["run", f"{file}:llama", *asked]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert printed.startswith("LlamaModel.layers.1.self_attn: ")
    assert "  left-padding         conforms" in printed


@pytest.mark.night
def test_a_record_of_a_part_says_how_to_run_it_again(file, capsys):
    record, baseline = file.with_name("mine.json"), file.with_name("known.toml")
    baseline.write_text("")
    asked = ["--module", "decoder", "--dtype", "float32", "--record", str(record)]
    assert cli.main(["run", f"{file}:wrong", *asked]) == ExitCode.OK
    assert cli.main(["gate", "--from-record", str(record), "--baseline", str(baseline)]) == 1
    printed = capsys.readouterr().out
    (again,) = {line.partition("again: ")[2] for line in printed.splitlines() if "again:" in line}
    assert again == f"mha-conformance run {file}:wrong:decoder --dtype float32 --strict"
    assert cli.main(again.split()[1:]) == ExitCode.DEVIATES


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("name", "module", "told"),
    [
        (":build", "decodr", "unknown module 'decodr'; did you mean decoder"),
        (":biuld", "decoder", "has no 'biuld'; did you mean build?"),
        ("", "decoder", "name the function that makes the model, FILE.py:NAME"),
        (":raises", "decoder", "raises() fails: ValueError: no model"),
        (":print", "decoder", "has no 'print'"),
        (":number", "decoder", "number is int, no model of PyTorch"),
        (":SimpleNamespace", "decoder", "returns SimpleNamespace, no model of PyTorch"),
        (":Stateful", "decoder", "is a StatefulLayer, which has no parts; leave out --module"),
        (":build", "norm", "Inside takes no past_key_values or cache"),
    ],
)
def test_a_part_that_is_not_there_is_an_error_of_one_line(file, capsys, name, module, told):
    assert cli.main(["run", f"{file}{name}", "--module", module]) == ExitCode.USAGE
    printed = capsys.readouterr().err
    assert told in printed
    assert len(printed.splitlines()) == 1
