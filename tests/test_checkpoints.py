"""Weights of trained models by their own names: right on both sides, or refused."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from conformance.adapter.loading import checkpoints, load
from conformance.adapter.native import Layer
from conformance.arrays.configuration import told as told_by
from conformance.cases.casefile import Tensor, look, write
from conformance.cli import main
from conformance.definition.comparison import compare
from conformance.definition.expectation import expect, solve
from conformance.definition.problem import Norm, Problem, Rotary, Shape, Weights
from conformance.errors import ExitCode, Untranslatable, WrongTensors
from conformance.porting.checkpoints import completed, rotation, window_of
from conformance.porting.conversion import convert, convert_file

WIDTH, HEADS, HEAD = 16, 4, 8

LINEAR = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
BERT = {"self.query": "q", "self.key": "k", "self.value": "v", "output.dense": "o"}
VIT = {"attention.query": "q", "attention.key": "k", "attention.value": "v", "output.dense": "o"}
"""What `torch.nn.Linear` of the attention are, by their names in files."""


class Model:
    """A model of two layers as files have it, and its attention written down by hand.

    Args:
        place: where the attentions are, with "{layer}".
        linear: the projections; None for the fused ones of GPT-2, "grouped" for those of Bloom,
            "stacked" for those of Phi-3.
        kv_heads, head: the number of key/value heads, and the size of heads.
        biased: which projections have biases.
        config: what config.json says besides the sizes.
        others: names of tensors that are no attention's, by the kind under which they are listed.
    """

    def __init__(self, place, linear, *, kv_heads=HEADS, head=HEAD, biased="", norm=None,
                 scale=None, rotary=None, cap=None, sinks=False, config=None,
                 others=None):  # fmt: skip
        self.place, self.linear, self.kv_heads, self.head = place, linear, kv_heads, head
        self.biased, self.norm, self.rotary, self.cap = biased, norm, rotary, cap
        self.scale = head**-0.5 if scale is None else scale
        self.sinks, self.others = sinks, others or {}
        self.config = config or {}

    def tensors(self, layer):
        """The tensors of one attention by the rest of their names."""
        random, inner = np.random.default_rng(layer), HEADS * self.head
        shared = self.kv_heads * self.head
        if self.linear is None:
            shapes = {"c_attn.weight": (WIDTH, 3 * inner), "c_attn.bias": (3 * inner,)}
            shapes |= {"c_proj.weight": (inner, WIDTH), "c_proj.bias": (WIDTH,)}
        elif self.linear == "stacked":
            shapes = {
                "qkv_proj.weight": (inner + 2 * shared, WIDTH),
                "o_proj.weight": (WIDTH, inner),
            }
        elif self.linear == "grouped":
            shapes = {"query_key_value.weight": (3 * inner, WIDTH), "dense.bias": (WIDTH,)}
            shapes |= {"query_key_value.bias": (3 * inner,), "dense.weight": (WIDTH, inner)}
        else:
            sizes = {"q": inner, "k": shared, "v": shared, "o": WIDTH}
            shapes = {}
            for name, role in self.linear.items():
                shapes[f"{name}.weight"] = (sizes[role], inner if role == "o" else WIDTH)
                if role in self.biased:
                    shapes[f"{name}.bias"] = (sizes[role],)
        if self.norm is not None:
            shapes |= {"q_norm.weight": (self.head,), "k_norm.weight": (self.head,)}
        shapes |= {"sinks": (HEADS,)} if self.sinks else {}
        return {n: random.standard_normal(s).astype("float32") / 3 for n, s in shapes.items()}

    def save(self, folder, *, shards=0):
        """Write the files: one, or several with an index."""
        folder.mkdir()
        tensors = {}
        for layer in (0, 1):
            place = self.place.replace("{layer}", str(layer))
            tensors |= {place + name: array for name, array in self.tensors(layer).items()}
        for names in self.others.values():
            tensors |= {name: np.ones(3, np.float32) for name in names}
        (folder / "config.json").write_text(json.dumps(self.config))
        made = {name: Tensor.of(name, array) for name, array in tensors.items()}
        if not shards:
            write(folder / "model.safetensors", made, {"format": "pt"})
            return folder
        index = {}
        for number in range(shards):
            name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(made.items())[number::shards])
            write(folder / name, part, {"format": "pt"})
            index |= dict.fromkeys(part, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return folder

    def attend(self, layer, x):
        """The output for inputs `[batch token width]`, from the numbers as files have them."""
        found = {n: a.astype(np.float64) for n, a in self.tensors(layer).items()}
        if self.linear is None:
            q, k, v = np.split(x @ found["c_attn.weight"] + found["c_attn.bias"], 3, axis=-1)
        elif self.linear == "stacked":
            sizes = HEADS * self.head, (HEADS + self.kv_heads) * self.head
            q, k, v = np.split(x @ found["qkv_proj.weight"].T, sizes, axis=-1)
            named = {"o": "o_proj"}
        elif self.linear == "grouped":
            joined = x @ found["query_key_value.weight"].T + found["query_key_value.bias"]
            each = joined.reshape(*x.shape[:2], HEADS, 3, self.head)
            q, k, v = (each[..., at, :] for at in range(3))
        else:
            named = {role: name for name, role in self.linear.items()}
            q, k, v = (
                x @ found[f"{named[role]}.weight"].T + found.get(f"{named[role]}.bias", 0.0)
                for role in "qkv"
            )
        q, k, v = (a.reshape(*x.shape[:2], -1, self.head).swapaxes(1, 2) for a in (q, k, v))
        if self.norm is not None:
            q, k = (
                a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6)
                * (self.norm + found[f"{side}_norm.weight"])
                for side, a in (("q", q), ("k", k))
            )  # fmt: skip
        if self.rotary is not None:
            q, k = self.turned(q), self.turned(k)
        k, v = (a.repeat(HEADS // self.kv_heads, axis=1) for a in (k, v))
        logits = q @ k.swapaxes(-1, -2) * self.scale
        logits = logits if self.cap is None else self.cap * np.tanh(logits / self.cap)
        weights = np.exp(logits)
        more = np.exp(found["sinks"])[:, None, None] if self.sinks else 0.0
        context = weights / (weights.sum(-1, keepdims=True) + more) @ v
        context = context.swapaxes(1, 2).reshape(*x.shape[:2], -1)
        if self.linear is None:
            return context @ found["c_proj.weight"] + found["c_proj.bias"]
        if self.linear == "grouped":
            return context @ found["dense.weight"].T + found["dense.bias"]
        return context @ found[f"{named['o']}.weight"].T + found.get(f"{named['o']}.bias", 0.0)

    def turned(self, heads):
        """Heads turned by their positions, in halves, as `rotate_half` of transformers does."""
        size = self.rotary
        base = self.config["rope_theta"]
        angles = np.arange(heads.shape[2])[:, None] * base ** (-np.arange(0, size, 2) / size)
        cos, sin = (np.concatenate([f(angles), f(angles)], -1) for f in (np.cos, np.sin))
        part, rest = heads[..., :size], heads[..., size:]
        one, other = np.split(part, 2, axis=-1)
        part = part * cos + np.concatenate([-other, one], -1) * sin
        return np.concatenate([part, rest], axis=-1)


def sized(kind, **more):
    return {"model_type": kind, "num_attention_heads": HEADS, "rope_theta": 100.0, **more}


OF_LLAMA = {
    "embeddings": ["model.embed_tokens.weight"],
    "head": ["lm_head.weight"],
    "MLP": ["model.layers.0.mlp.up_proj.weight"],
    "norms": ["model.norm.weight", "model.layers.1.input_layernorm.weight"],
    "buffers": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
    "unknown": ["model.thing.weight"],
}
OF_T5 = {
    "position biases": ["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
}
MODELS = {
    "llama": Model(
        "model.layers.{layer}.self_attn.", LINEAR, kv_heads=2, rotary=HEAD, others=OF_LLAMA,
        config=sized("llama", num_key_value_heads=2),
    ),
    "llama that turns a half": Model(
        "model.layers.{layer}.self_attn.", LINEAR, rotary=HEAD // 2,
        config=sized("llama", partial_rotary_factor=0.5, hidden_size=HEADS * HEAD),
    ),
    "qwen2": Model(
        "model.layers.{layer}.self_attn.", LINEAR, kv_heads=2, biased="qkv", rotary=HEAD,
        config=sized("qwen2", num_key_value_heads=2),
    ),
    "qwen3": Model(
        "model.layers.{layer}.self_attn.", LINEAR, kv_heads=1, norm=0.0, rotary=HEAD,
        config=sized("qwen3", num_key_value_heads=1, rms_norm_eps=1e-6),
    ),
    "gemma": Model("model.layers.{layer}.self_attn.", LINEAR, rotary=HEAD, config=sized("gemma")),
    "gemma2": Model(
        "model.layers.{layer}.self_attn.", LINEAR, kv_heads=2, rotary=HEAD, cap=2.0, scale=0.5,
        config=sized("gemma2", num_key_value_heads=2, query_pre_attn_scalar=4,
                     attn_logit_softcapping=2.0),
    ),
    "gemma2 without a cap": Model(
        "model.layers.{layer}.self_attn.", LINEAR, rotary=HEAD, scale=1 / 3,
        config=sized("gemma2", query_pre_attn_scalar=9, attn_logit_softcapping=None),
    ),
    "gemma3": Model(
        "model.layers.{layer}.self_attn.", LINEAR, kv_heads=2, norm=1.0, rotary=HEAD, scale=0.25,
        config=sized("gemma3_text", num_key_value_heads=2, query_pre_attn_scalar=16,
                     rms_norm_eps=1e-6, rope_local_base_freq=100.0),
    ),
    "gpt_oss": Model(
        "model.layers.{layer}.self_attn.", LINEAR, kv_heads=2, biased="qkvo", rotary=HEAD,
        sinks=True, config=sized("gpt_oss", num_key_value_heads=2),
    ),
    "phi3": Model(
        "model.layers.{layer}.self_attn.", "stacked", kv_heads=2, rotary=HEAD,
        config=sized("phi3", num_key_value_heads=2, sliding_window=None),
    ),
    "roberta": Model(
        "roberta.encoder.layer.{layer}.attention.", BERT, head=4, biased="qkvo",
        config=sized("roberta"),
    ),
    "bloom": Model(
        "transformer.h.{layer}.self_attention.", "grouped", head=4,
        config={"model_type": "bloom", "n_head": HEADS},
    ),
    "gpt2": Model(
        "transformer.h.{layer}.attn.", None, head=4,
        config={"model_type": "gpt2", "n_head": HEADS, "n_embd": WIDTH},
        others={"buffers": ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"],
                "embeddings": ["transformer.wte.weight"], "norms": ["transformer.ln_f.bias"]},
    ),
    "bert": Model(
        "bert.encoder.layer.{layer}.attention.", BERT, head=4, biased="qkvo", config=sized("bert"),
        others={"norms": ["bert.encoder.layer.0.attention.output.LayerNorm.bias"],
                "MLP": ["bert.encoder.layer.0.output.dense.bias"],
                "head": ["cls.predictions.transform.dense.bias"]},
    ),
    "vit": Model(
        "vit.encoder.layer.{layer}.attention.", VIT, head=4, biased="o", config=sized("vit"),
    ),
    "t5": Model(
        "encoder.block.{layer}.layer.0.SelfAttention.", {it: it for it in "qkvo"}, scale=1.0,
        config={"model_type": "t5", "num_heads": HEADS}, others=OF_T5,
    ),
    "t5 with heads of 4": Model(
        "encoder.block.{layer}.layer.0.SelfAttention.", {it: it for it in "qkvo"}, scale=1.0,
        config={"model_type": "t5", "num_heads": HEADS}, others=OF_T5, head=4,
    ),
}  # fmt: skip

NEIGHBOURS = """
from conformance import RotaryBase
from conformance.adapters.ours import Ours

def declaring(**changes):
    turns = RotaryBase("base", size="size", alignment="top-left", **changes)
    return tuple(turns if isinstance(it, RotaryBase) else it for it in Ours.features)

class Neighbours(Ours):
    features = declaring(pairs="interleaved")

    def build_with(self, shape, dtype, scale, mode, settings):
        if "base" in settings:
            settings = {**settings, "interleaved": True}
        return super().build_with(shape, dtype, scale, mode, settings)

class SaysHalves(Neighbours):
    features = declaring(pairs="halves")
"""


def target_of(tmp_path):
    (tmp_path / "mine.py").write_text(NEIGHBOURS)
    return f"{tmp_path}/mine.py:Neighbours"


def reference_of(model, file, target, x, prefix=""):
    """What the definition says of the weights in a file for a target."""
    stored, adapter = look(file), load(target)
    assert isinstance(adapter, Layer)
    native = {
        name.removeprefix(prefix): stored.read(name).values
        for name in stored.header
        if name.startswith(prefix)
    }
    bias = any("bias" in name for name in native)
    sizes = dict.fromkeys(("query_width", "key_width", "value_width", "output_width"), WIDTH)
    shape = Shape(
        batch=x.shape[0], query_length=x.shape[1], key_length=x.shape[1], heads=HEADS,
        kv_heads=model.kv_heads, head_size=model.head, value_head_size=model.head, bias=bias,
        sharing="self", **sizes,
    )  # fmt: skip
    weights = Weights(**adapter.table(shape).export(native))
    gains = [native.get(f"{side}_norm.weight") for side in ("query", "key")]
    pairs = "halves" if target == "ours" else "interleaved"
    turns = model.rotary and Rotary(size=model.rotary, base=model.config["rope_theta"], pairs=pairs)
    return Problem(
        shape=shape, dtype="float64", weights=weights, query=x, key=x, value=x, rotary=turns,
        cotangent=np.zeros((*x.shape[:2], WIDTH)), soft_cap=model.cap,
        scale=model.scale if adapter.custom_scale else None, sinks=native.get("sinks"),
        norm=None if gains[0] is None else Norm(query=gains[0], key=gains[1]),
    )  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("target", ["ours", "neighbours"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_becomes_ours(name, target, tmp_path, capsys):
    """Both layers, from the command: the output by hand is that of the file that was written."""
    pytest.importorskip("torch")
    model = MODELS[name]
    folder, out = model.save(tmp_path / "in", shards=3), tmp_path / "out.safetensors"
    target = target_of(tmp_path) if target == "neighbours" else target
    command = ["convert", "--to", target, "--all-layers", str(folder), str(out), "--json"]
    assert main([*command, "--out-prefix", "{layer}/"]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    assert [it["read"] for it in told["layers"]] == [
        model.place.replace("{layer}", str(layer)) for layer in (0, 1)
    ]
    assert {k: sorted(names) for k, names in told["left_over"].items()} == {
        kind: sorted(names) for kind, names in model.others.items()
    }
    x = np.random.default_rng(5).standard_normal((2, 6, WIDTH))
    for layer, piece in enumerate(told["layers"]):
        assert piece["target_error"] < 8
        assert piece["target_not_run"] == ""
        problem = reference_of(model, out, target, x, f"{layer}/")
        wanted = model.attend(layer, x)
        assert np.allclose(solve(problem).output, wanted, rtol=1e-6, atol=1e-6)


SIMPLE = ("gpt2", "bert", "vit", "t5 with heads of 4")


@pytest.mark.sample(4)
@pytest.mark.parametrize("target", ["torch-mha", "flax-nnx", "flax-linen", "keras-tensorflow-mha"])
@pytest.mark.parametrize("name", SIMPLE)
def test_a_model_becomes_a_library_s(name, target, tmp_path, capsys):
    """The scale of T5, 1, is made of that of the library, 1/2, by queries that are doubled."""
    model = MODELS[name]
    out = tmp_path / "out.safetensors"
    folder = model.save(tmp_path / "in")
    command = ["--to", target, "--layer", "1", str(folder), str(out)]
    if name.startswith("t5") and target != "torch-mha":
        assert "relative_attention_bias is added to the logits" in refused(capsys, *command)
        return
    assert main(["convert", *command, "--json"]) == ExitCode.OK
    (piece,) = json.loads(capsys.readouterr().out)["layers"]
    x = np.random.default_rng(5).standard_normal((2, 6, WIDTH))
    problem = reference_of(model, out, target, x)
    assert np.allclose(solve(problem).output, model.attend(1, x), rtol=1e-6, atol=1e-6)
    assert piece["target_not_run"] or piece["target_error"] < 8


OLDER = {
    "gemma2": (
        {"sliding_window": 8},
        [(8, 1e4, ""), (None, 1e4, ""), (8, 1e4, "")],
        {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256},
    ),
    "gemma2 without a cap": (
        {"attn_logit_softcapping": None, "query_pre_attn_scalar": 9},
        [(4096, 1e4, ""), (None, 1e4, "")],
        {"attn_logit_softcapping": None, "query_pre_attn_scalar": 9},
    ),
    "gemma3_text": (
        {
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "rope_theta": 1e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        [(8, 2e4, ""), (None, 1e6, "linear"), (8, 2e4, "")],
        {"attn_logit_softcapping": None, "query_pre_attn_scalar": 256},
    ),
    "gemma3_text with a model of images": (
        {},
        [(4096, 1e4, "")] * 5 + [(None, 1e6, "")],
        {"num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256},
    ),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        [(None, 1e4, ""), (8, 1e4, "")],
        {},
    ),
    "qwen2 without windows": ({"sliding_window": 8, "max_window_layers": 1}, [(None, 1e4, "")], {}),
    "qwen3": ({"use_sliding_window": True, "max_window_layers": 0}, [(4096, 1e4, "")], {}),
    "mistral": ({}, [(4096, 1e4, "")], {}),
    "phi3": ({"sliding_window": 8}, [(8, 1e4, ""), (8, 1e4, "")], {}),
    "mistral without windows": ({"sliding_window": None}, [(None, 1e4, "")], {}),
    "gpt_oss": ({}, [(128, 1.5e5, "yarn"), (None, 1.5e5, "yarn")], {}),
    "llama": (
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        [(None, 5e5, "linear")],
        {},
    ),
}
"""What configurations without `layer_types` say of each layer: window, base and scaling."""


@pytest.mark.parametrize("name", OLDER)
def test_what_configurations_leave_out(name):
    """As files in use do, which were saved before `layer_types`: by hand, and by transformers."""
    config, layers, others = OLDER[name]
    model = name.partition(" ")[0]
    found = completed({"model_type": model, **config})
    if "images" in name:
        found = completed({"model_type": "gemma3", "text_config": {"model_type": model, **config}})
    told = [(window_of(found, at), rotation(found, at)) for at in range(len(layers))]
    assert [(window, it.base, it.scaling) for window, it in told] == layers
    assert {key: found.get(key) for key in others} == others
    transformers = pytest.importorskip("transformers", minversion="5")
    theirs = transformers.AutoConfig.for_model(
        model, **config, num_hidden_layers=len(layers)
    ).to_dict()
    told = [(window_of(theirs, at), rotation(theirs, at)) for at in range(len(layers))]
    assert [(window, it.base, it.scaling) for window, it in told] == layers
    assert {key: theirs[key] for key in others} == others


VISION = {
    "qwen2_vl": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        ("mrope", "default", None),
    ),
    "qwen2_5_vl": (
        {"rope_scaling": {"type": "yarn", "mrope_section": [2, 3, 3], "factor": 4.0,
                          "original_max_position_embeddings": 32768}},
        ("yarn with mrope", "yarn", None),
    ),
    "qwen3_vl": (
        {"text_config": {"model_type": "qwen3_vl_text", "rope_scaling": {
            "rope_type": "default", "mrope_section": [4, 2, 2]}}},
        ("mrope", "default", True),
    ),
}  # fmt: skip
"""How files of models with images tell sections, and what is read: kind, scaling, interleaved."""


@pytest.mark.parametrize("name", VISION)
def test_sections_of_axes_are_read_from_configurations(name):
    config, (kind, scaling, interleaved) = VISION[name]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e6}
    found = rotation(completed({"model_type": name, **sizes, **config}), 0)
    assert (found.base, found.scaling) == (1e6, kind)
    assert (found.scaled.rope_type, found.scaled.mrope_interleaved) == (scaling, interleaved)
    assert sum(found.scaled.mrope_section) == 8
    wrong = completed({"model_type": name, **sizes, "hidden_size": 128, **config})
    with pytest.raises(WrongTensors, match=r"^config.json, rope_parameters: .*8 pairs together"):
        rotation(wrong, 0)


@pytest.mark.parametrize("model", ["ernie4_5_vl_moe_text", "hunyuan_vl_text"])
def test_sections_that_mean_something_else_are_not_read(model):
    turns = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [22, 22, 20]}
    found = rotation({"model_type": model, "head_dim": 128, "rope_parameters": turns}, 0)
    assert (found.base, found.scaling, found.scaled) == (1e4, "mrope", None)


def test_a_kind_of_layer_without_a_rotation_of_its_own():
    """None is that of layers that do not turn; a kind that is not named is an error."""
    turns = {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}
    config = {"layer_types": ["sliding_attention", "full_attention", "other"], "rope_theta": 5e5}
    config["rope_parameters"] = turns
    assert [rotation(config, layer).base for layer in (0, 1)] == [1e4, None]
    with pytest.raises(WrongTensors, match="layer 2 is of the kind other; name it there"):
        rotation(config, 2)


def test_what_both_ways_of_attending_are_called(tmp_path, capsys):
    """EmbeddingGemma is a Gemma 3 whose tokens see each other, half a window on each side."""
    model = MODELS["gemma3"]
    config = {**model.config, "use_bidirectional_attention": True, "sliding_window": 8}
    folder = model.save(tmp_path / "in")
    (folder / "config.json").write_text(json.dumps(config))
    command = ["convert", "--to", "ours", "--layer", "0", "--no-run", str(folder)]
    assert main([*command, str(tmp_path / "out")]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "ours needs: no causal mask" in told
    assert "a window of 5 keys, the query's own and those on each side" in told
    assert "causal" not in told_by(config, 0)[0]


def test_every_declared_model_is_tried():
    assert {model.config["model_type"] for model in MODELS.values()} | {"mistral"} == {
        *checkpoints()
    }


MUTANTS = {
    "pairs": "class Mutant(SaysHalves): pass",
    "order of heads": '''
from dataclasses import replace
class Mutant(Ours):
    parameters = tuple(
        replace(it, interleaved="query" in it.sources or it.sources == "output")
        for it in Ours.parameters
    )
''',
    "transposed": '''
from conformance import Parameter
class Mutant(Ours):
    parameters = (
        Parameter("query_projection.weight", "query", "embed heads head -> embed (heads head)"),
        *Ours.parameters[1:],
    )
''',
    "query and key": '''
from dataclasses import replace
class Mutant(Ours):
    parameters = tuple(
        replace(it, sources={"query": "key", "key": "query"}.get(it.sources, it.sources))
        for it in Ours.parameters
    )
''',
    "scale": '''
class Mutant(Ours):
    def build_with(self, shape, dtype, scale, mode, settings):
        return super().build_with(shape, dtype, 1.0, mode, settings)
''',
    "turns and does not say so": '''
class Mutant(Ours):
    features = ()
    def build_with(self, shape, dtype, scale, mode, settings):
        turns = {"base": 10000.0, "size": shape.head_size, "interleaved": False}
        return super().build_with(shape, dtype, scale, mode, turns)
''',
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_declaration_is_found_by_running(name, tmp_path, capsys):
    """No shape tells: the outputs do. Nothing is written, not even half of it."""
    pytest.importorskip("torch")
    target_of(tmp_path)
    (tmp_path / "mutant.py").write_text(f"{NEIGHBOURS}\n{MUTANTS[name]}")
    folder, out = tmp_path / "in", tmp_path / "out.safetensors"
    model = MODELS["bert" if name in ("turns and does not say so", "transposed") else "llama"]
    if name == "query and key":
        model = MODELS["llama that turns a half"]
    model.save(folder)
    before = sorted(tmp_path.glob("[!_]*"))
    command = ["convert", "--all-layers", str(folder), str(out)]
    assert main([*command, "--to", f"{tmp_path}/mutant.py:Mutant"]) == ExitCode.DEVIATES
    told = capsys.readouterr()
    assert re.search(r"Mutant [\d.e+]+σ from the reference \(allowed: 8σ\)", told.err)
    assert "nothing was written" in told.err
    assert sorted(tmp_path.glob("[!_]*")) == before
    assert main([*command, "--to", "ours"]) == ExitCode.OK


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise RuntimeError('no')", "cannot be run with these weights.*RuntimeError: no"),
        ("return layer(query)[:, :2]", r"an output of shape \[2, 2, 16\], not \[2, 7, 16\]"),
    ],
)
def test_a_target_that_fails_is_told_by_its_name(body, told, tmp_path, capsys):
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(
        "from conformance.adapters.ours import Ours\nclass Failing(Ours):\n"
        f"    def call(self, layer, query, *_):\n        {body}\n"
    )
    folder, out = MODELS["bert"].save(tmp_path / "in"), tmp_path / "out"
    found = refused(capsys, "--to", f"{tmp_path}/mine.py:Failing", "--layer", 0, folder, out)
    assert re.search(f"Failing.*{told}.*--no-run", found)
    assert not out.exists()
    asked = ["--to", f"{tmp_path}/mine.py:Failing", "--layer", "0", str(folder), str(out)]
    assert main(["convert", *asked, "--no-run"]) == ExitCode.OK


def refused(capsys, *arguments):
    code = main(["convert", *map(str, arguments)])
    told = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert told.err.count("\n") == 1
    return told.err.removeprefix("mha-conformance: ")


REFUSED = {
    "turns": (
        "llama",
        "flax-nnx",
        r"always rotates .* declares no rotary embeddings: declare them .*, or choose another",
    ),
    "norm": ("qwen3", "llama-model-eager", r"no place for query/key norm"),
    "soft cap": ("gemma2", "llama-model-eager", r"no place for soft cap"),
    "scale": (
        "gemma2 without a cap",
        "llama-model-eager",
        r"would round them; choose a target with a scale of its own",
    ),
    "always more": ("llama", "qwen3-eager", r"it always has query/key norm, with which they were"),
    "turns all": (
        "llama that turns a half",
        "llama-model-eager",
        r"rotates all 8 components, not 4",
    ),
    "always turns": ("gpt2", "llama-model-eager", r"llama-model-eager always rotates"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_meaning_is_refused(name, tmp_path, capsys):
    model, target, told = REFUSED[name]
    folder = MODELS[model].save(tmp_path / "in")
    out = tmp_path / "out.safetensors"
    assert re.search(told, refused(capsys, "--to", target, "--layer", 0, folder, out))
    assert not out.exists()


def test_a_base_that_is_fixed_is_that_of_the_model(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(
        """
from conformance import RotaryBase
from conformance.adapters.ours import Ours
class Fixed(Ours):
    features = (RotaryBase(500.0),)
"""
    )
    folder, target = MODELS["llama"].save(tmp_path / "in"), f"{tmp_path}/mine.py:Fixed"
    told = refused(capsys, "--to", target, "--layer", 0, folder, tmp_path / "out")
    assert "it always rotates with the base 500, not 100; choose another target" in told


def test_a_scaled_rotation_is_never_taken_for_a_plain_one(tmp_path, capsys):
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(ALWAYS)
    folder, out = MODELS["llama"].save(tmp_path / "in"), tmp_path / "out"
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    command = ["--layer", "0", str(folder), str(out)]
    told = refused(capsys, "--to", f"{tmp_path}/mine.py:Always", *command)
    assert "it always rotates without scaling, not of the kind yarn; choose another" in told
    assert main(["convert", "--to", "ours", *command, "--json"]) == ExitCode.OK
    (piece,) = json.loads(capsys.readouterr().out)["layers"]
    assert piece["target_error"] is None
    kind = "yarn (factor 4, original_max_position_embeddings 8)"
    assert f"rotary embeddings are of the kind {kind}" in piece["needs"]
    # Without a number of the scaling nothing can be compared.
    out.unlink()
    scaling.pop("original_max_position_embeddings")
    unknown = {**config, "rope_scaling": scaling}
    unknown.pop("max_position_embeddings", None)
    (folder / "config.json").write_text(json.dumps(unknown))
    assert main(["convert", "--to", "ours", *command]) == ExitCode.OK
    assert "config.json does not tell all numbers of a rotation" in capsys.readouterr().out


ALWAYS = """
from conformance import Fixed
from conformance.adapters.ours import Ours

class Always(Ours):
    features, mask_arguments, custom_scale = (), (), False
    fixed = Fixed(
        causal="bottom-right", rotary_base=100.0, rotary_pairs="interleaved", scale=2 * 8**-0.5,
        sharing="self", bias=False,
    )
    turns = {"base": 100.0, "size": 8, "interleaved": True}

    def build_with(self, shape, dtype, scale, mode, settings):
        return super().build_with(shape, dtype, self.fixed.scale, mode, self.turns)

    def call(self, layer, query, key, value, masks, mode):
        import torch
        future = torch.ones(2 * query.shape[1:2], dtype=torch.bool).triu(1)[None, None]
        return super().call(layer, query, key, value, {"block_mask": future}, mode)

class Half(Always):
    fixed = Fixed(rotary_base=100.0, rotary_size=4)

class OtherBase(Always):
    fixed = Fixed(rotary_base=500.0)

class Biased(Always):
    fixed = Fixed(rotary_base=100.0, bias=True)

class SaysHalves(Always):
    fixed = Fixed(causal="bottom-right", rotary_base=100.0, sharing="self", bias=False)

class Qwen(Always):
    fixed = Fixed(rotary_base=100.0, bias=("query", "key", "value"), value_heads="alike")
    turns = {"base": 100.0, "size": 8, "interleaved": False}

    def build_with(self, shape, dtype, scale, mode, settings):
        import torch
        layer = Ours.build_with(self, shape, dtype, None, mode, self.turns)
        sizes = layer.output_projection.weight.T.shape
        layer.output_projection = torch.nn.Linear(*sizes, bias=False)
        return layer

    call = Ours.call
"""


def test_what_a_target_does_in_every_call_counts(tmp_path, capsys):
    """It rotates, is causal and has a scale without an argument, as in the example of a Llama."""
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(ALWAYS)
    folder, out = MODELS["llama"].save(tmp_path / "in"), tmp_path / "out"

    def command(target, source=folder):
        return ["--to", f"{tmp_path}/mine.py:{target}", "--layer", "0", str(source), str(out)]

    assert main(["convert", *command("Always"), "--json"]) == ExitCode.OK
    (piece,) = json.loads(capsys.readouterr().out)["layers"]
    assert piece["target_error"] < 8
    assert piece["needs"] == [
        "rotary embeddings, base 100",
        "weights of a causal model, because it always masks later keys",
        "its scale 0.7071067812, for which queries were multiplied by 0.5",
    ]
    own = MODELS["llama"].tensors(0)["q_proj.weight"]
    order = np.arange(HEADS * HEAD).reshape(HEADS, 2, -1).swapaxes(1, 2).ravel()
    assert np.array_equal(look(out).read("query_projection.weight").values, own[order] / 2)
    out.unlink()
    for target, told in {
        "Half": "it always rotates 4 of 8 components, not 8",
        "OtherBase": "it always rotates with the base 500, not 100",
        "Biased": "it always has biases",
    }.items():
        assert told in refused(capsys, *command(target))
    told = refused(capsys, *command("Always"), "--rotary-size", "0")
    assert "Always rotates queries and keys in every call; leave out --rotary-size 0" in told
    for model in ("bert", "gpt2"):
        told = refused(capsys, *command("Biased", MODELS[model].save(tmp_path / model)))
        assert "declares no rotary embeddings, and Biased always rotates" in told
        assert "--rotary-size" not in told
    assert main(["convert", *command("SaysHalves")]) == ExitCode.DEVIATES
    assert not out.exists()
    # Without the bias of the output, no zeros are needed for it.
    folder = MODELS["qwen2"].save(tmp_path / "qwen2")
    assert main(["convert", *command("Qwen", folder), "--json"]) == ExitCode.OK
    (piece,) = json.loads(capsys.readouterr().out)["layers"]
    assert piece["target_error"] < 8
    assert not any("zeros" in it for it in piece["needs"])
    assert "output_projection.bias" not in look(out).header


def test_both_sides_are_run_with_the_mask_that_one_always_has(tmp_path):
    pytest.importorskip("transformers", minversion="5")
    (tmp_path / "mine.py").write_text(
        ALWAYS
        + """
class Causal(Always):
    fixed = Fixed(causal="top-left", scale=0.5, sharing="self")
    turns = {}
"""
    )
    for name in ("gpt2", "bert"):
        folder = MODELS[name].save(tmp_path / name)
        target, out = f"{tmp_path}/mine.py:Causal", tmp_path / f"{name}.out"
        (piece,) = convert_file(folder, out, target=target, layer_number=1).pieces
        assert piece.ran.apart < 8
        assert piece.notes == ("weights of a causal model, because it always masks later keys",)


def test_what_a_source_does_in_every_call_counts(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "mine.py").write_text(ALWAYS)
    mine, file, back = f"{tmp_path}/mine.py:Always", tmp_path / "mine", tmp_path / "back"
    folder = MODELS["llama"].save(tmp_path / "in")
    convert_file(folder, file, target=mine, layer_number=0)
    told = {"source": mine, "heads": HEADS, "kv_heads": 2}
    (piece,) = convert_file(file, back, target="llama-model-eager", **told).pieces
    assert "its scale 0.3535533906, for which queries were multiplied by 2" in piece.notes
    assert "rotary embeddings, base 100" in piece.notes
    for name, array in MODELS["llama"].tensors(0).items():
        assert np.array_equal(look(back).read(f"layers.0.self_attn.{name}").values, array)
    with pytest.raises(Untranslatable, match=r"scale of these weights is 3, and that of .*0.707"):
        convert_file(file, back, target="ours", scale=3.0, force=True, **told)
    with pytest.raises(Untranslatable, match=r"always rotates .* declares no rotary embeddings"):
        convert_file(file, back, target="flax-nnx", force=True, **told)


def test_what_is_added_needs_an_argument_of_its_shape(tmp_path):
    """The bias of T5 differs by head, query and key, which no mask for padding can hold."""
    folder, out = MODELS["t5 with heads of 4"].save(tmp_path / "in"), tmp_path / "out"
    (piece,) = convert_file(folder, out, target="torch-mha", layer_number=0, run=False).pieces
    assert "relative_attention_bias of the model, as attn_mask" in piece.notes
    assert "its scale 0.5, for which queries were multiplied by 2" in piece.notes


def test_pairs_are_declared_or_said(tmp_path):
    """By each side that turns; an undeclared one is refused, with what to do."""
    (tmp_path / "mine.py").write_text(
        NEIGHBOURS
        + """
from conformance import PositionIds
class Undeclared(Ours):
    features = (PositionIds("query_positions", "key_positions", dtype="int64"),)
"""
    )
    place = f"{tmp_path}/mine.py"
    tensors = MODELS["bert"].save(tmp_path / "bert")
    out = tmp_path / "out"
    with pytest.raises(Untranslatable, match="does not declare their pairs; declare RotaryBase"):
        convert_file(tensors, out, target=f"{place}:Undeclared", layer_number=0)
    convert_file(tensors, out, target="ours", layer_number=0, run=False)
    asked = {"source": "ours", "target": f"{place}:Neighbours", "heads": HEADS, "run": False}
    with pytest.raises(Untranslatable, match=r"interleaved selects the pairs.*--rotary-pairs"):
        convert_file(out, tmp_path / "other", **asked)
    kept, turned = (tmp_path / pairs for pairs in ("interleaved", "halves"))
    for file in (kept, turned):
        convert_file(out, file, rotary_pairs=file.name, **asked)
    query = "query_projection.weight"
    assert look(kept).read(query).bits.tobytes() == look(out).read(query).bits.tobytes()
    assert look(turned).read(query).bits.tobytes() != look(out).read(query).bits.tobytes()


def test_layers_of_llama_may_be_taken_by_any_adapter_of_it(tmp_path, capsys):
    """One by its prefix, or by its number: the pairs are in another order in neighbours."""
    folder, target = MODELS["llama"].save(tmp_path / "in"), target_of(tmp_path)
    outs = []
    for source in ("llama-eager", "llama-model-eager"):
        for way in (("--prefix", "model.layers.1."), ("--layer", "1")):
            outs.append(tmp_path / f"{source}{way[0]}")
            command = ["--from", source, "--to", target, *way, "--no-run", folder, outs[-1]]
            assert main(["convert", *map(str, command)]) == ExitCode.OK
    assert "left over: unknown: model.thing.weight" in capsys.readouterr().out
    bits = [look(out).read("query_projection.weight").bits for out in outs]
    assert all(np.array_equal(it, bits[0]) for it in bits)
    own = Tensor.of("", MODELS["llama"].tensors(1)["q_proj.weight"]).bits
    order = np.arange(HEADS * HEAD).reshape(HEADS, 2, -1).swapaxes(1, 2).ravel()
    assert np.array_equal(bits[0], own[order])
    assert not np.array_equal(bits[0], own)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["qwen3-eager", "gemma3"])
def test_a_norm_takes_the_scale_of_queries(target, dtype, tmp_path):
    """It would remove it from the weights; and 1 is added before."""
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    model = MODELS["gemma3"]
    tensors = {name: array.astype(kind) for name, array in model.tensors(0).items()}
    place = model.place.replace("{layer}", "0")
    config = {**model.config, "query_pre_attn_scalar": 4 * HEAD}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = {place + name: Tensor.of(name, array) for name, array in tensors.items()}
    write(tmp_path / "model.safetensors", made, {})
    kept = target == "gemma3"
    if kept:
        target = "conformance.adapters.transformers_checkpoints:Gemma3"
    out = tmp_path / "out"
    convert_file(tmp_path, out, target=target, layer_number=0)
    for side, factor in (("q", 0.5), ("k", 1.0)):
        name = f"{side}_norm.weight"
        found = look(out).read(f"layers.0.self_attn.{name}")
        own = tensors[name].astype(np.float64)
        # Gemma itself has a scale of its own, so that nothing has to be changed.
        wanted = own if kept else (factor * (1 + own)).astype(np.float32)
        assert np.array_equal(found.values, wanted)
        assert found.dtype == (Tensor.of("", tensors[name]).dtype if kept else "F32")


def test_names_alone_are_no_model(tmp_path, capsys):
    """Gemma 2 has the names of Llama, and another scale and a cap."""
    folder = MODELS["gemma2"].save(tmp_path / "in")
    command = ("--from", "llama-eager", "--to", "ours", "--layer", 0, folder, tmp_path / "out")
    assert "says that these are weights of gemma2, and llama-eager is of llama" in refused(
        capsys, *command
    )


def test_a_model_that_is_not_declared_is_not_sent_in_circles(tmp_path, capsys):
    """Nobody is told to leave out --from where that is refused, or to give one that is."""
    folder = MODELS["llama"].save(tmp_path / "in")
    (folder / "config.json").write_text(json.dumps(sized("mixtral")))
    command = ("--to", "ours", folder, tmp_path / "out")
    told = refused(capsys, *command, "--layer", 0)
    assert "or, if it computes what one of these does, move the weights away from their" in told
    place = ("--prefix", "model.layers.0.self_attn.")
    told = refused(capsys, *command, "--from", "llama-eager", *place)
    assert "leave out --from" not in told
    assert "; move the weights away from their config.json if they mean the same" in told
    (folder / "config.json").unlink()
    done = ("convert", *command, "--from", "llama-eager", *place, "--heads", HEADS, "--no-run")
    assert main([*map(str, done)]) == ExitCode.OK


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5 with heads of 4"])
def test_a_model_type_says_whose_weights_a_file_has(name, tmp_path, capsys):
    """Without config.json; also those of one attention alone, by the rest of their names."""
    model, heads = MODELS[name], ("--heads", HEADS, "--no-run")
    folder = model.save(tmp_path / "in")
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    (folder / "config.json").unlink()
    alone = tmp_path / "alone.safetensors"
    write(alone, {n: Tensor.of(n, array) for n, array in model.tensors(1).items()}, {})
    outs = tmp_path / "whole", tmp_path / "one"
    command = ["convert", "--from", kind, "--to", "ours", *heads]
    if kind == "gpt2":
        assert "differ in the scale" in refused(capsys, *command[1:], alone, outs[1])
        command += ["--scale", 0.5]
    assert main([*map(str, [*command, "--layer", 1, folder, outs[0]])]) == ExitCode.OK
    assert main([*map(str, [*command, alone, outs[1]])]) == ExitCode.OK
    whole, one = map(look, outs)
    assert whole.header.keys() == one.header.keys()
    assert all(np.array_equal(whole.read(it).bits, one.read(it).bits) for it in one.header)


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit"])
def test_the_weights_of_a_module_are_those_of_its_model(name, tmp_path):
    """As `layers[0].self_attn.state_dict()` names them, in Python."""
    model = MODELS[name]
    sizes = {"heads": HEADS, "kv_heads": model.kv_heads}
    tensors = model.tensors(0)
    if name == "vit":
        tensors = {n: it for n, it in tensors.items() if "bias" not in n}
    pairs = {"rotary_pairs": "halves"} if model.rotary else {}
    found = convert(tensors, source=name, target="ours", **sizes, **pairs)
    place = model.place.replace("{layer}", "0")
    file, out = tmp_path / "in.safetensors", tmp_path / "out"
    write(file, {place + n: Tensor.of(n, it) for n, it in tensors.items()}, {})
    convert_file(file, out, source=name, target="ours", layer_number=0, run=False, **sizes, **pairs)
    wanted = {n: look(out).read(n).values for n in look(out).header}
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[n], wanted[n]) for n in wanted)


def test_an_error_has_the_names_of_the_layer(tmp_path, capsys):
    """Not those of layer 0, as which adapters declare them, nor a prefix that is no better."""
    folder = MODELS["llama"].save(tmp_path / "in")
    file = folder / "model.safetensors"
    tensors = {name: look(file).read(name) for name in look(file).header}
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = Tensor.of(name, tensors[name].values * np.nan)
    tensors[f"{name}_scale"] = Tensor.of(name, np.ones(1, np.float32))
    write(file, tensors, {})
    told = refused(capsys, "--to", "ours", "--layer", 1, folder, tmp_path / "out")
    assert told.endswith(
        "model.layers.1.self_attn.: these are not the weights of llama: unexpected "
        "q_proj.weight_scale; NaN or infinity in q_proj.weight\n"
    )


def test_what_a_model_has_by_default_is_told(tmp_path):
    """A Gemma 2 is built with a cap, windows and another scale unless it is told."""
    folder, out = MODELS["llama"].save(tmp_path / "in"), tmp_path / "out"
    (piece,) = convert_file(folder, out, target="gemma2-eager", layer_number=0, run=False).pieces
    assert {"no soft cap", "no window", "the scale 0.3535533906"} <= {*piece.notes}
    folder = MODELS["qwen2"].save(tmp_path / "qwen2")
    (piece,) = convert_file(folder, tmp_path / "2", target="ours", layer_number=0, run=False).pieces
    assert "zeros as the bias of output, where the model has none" in piece.notes


def test_models_and_adapters_name_each_other():
    for kind, point in checkpoints().items():
        declared = load(point.value).checkpoint
        assert declared is not None
        assert kind in declared.models


def broken(folder, name):
    """Do something to the files of a model, and return what is told of it."""
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    places = json.loads(index.read_text())["weight_map"]
    first = next(iter(places))

    def store(changed):
        index.write_text(json.dumps({"weight_map": changed}))

    if name == "no shard":
        (folder / places[first]).unlink()
        return f"lacks {places[first]}, which its index names"
    if name == "beyond":
        store({**places, first: "../other.safetensors"})
        return "names files that are not beside it: ../other.safetensors"
    if name == "not in its file":
        store({**places, "more": places[first]})
        return "and its files differ in more"
    if name == "not in the index":
        store({key: place for key, place in places.items() if key != first})
        return f"and its files differ in {first}"
    if name == "no index":
        index.write_text("[]")
        return "is no JSON object"
    if name == "no config":
        config.unlink()
        return "no config.json beside it names a model_type; say with --from"
    if name == "unknown":
        config.write_text(json.dumps(sized("mamba")))
        return "no adapter is declared for the model_type 'mamba', only for bert, "
    if name == "another number":
        config.write_text(json.dumps({**sized("llama"), "num_attention_heads": 3}))
        return "cannot have weights of these shapes with heads=3"
    assert name == "twice"
    index.with_name("other.safetensors.index.json").write_text("{}")
    return "has several indexes; name one of them"


BROKEN = ("no shard", "beyond", "not in its file", "not in the index", "no index", "no config",
          "unknown", "another number", "twice")  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folders(name, tmp_path, capsys):
    folder = MODELS["llama"].save(tmp_path / "in", shards=4)
    told = broken(folder, name)
    assert told in refused(capsys, "--to", "ours", "--layer", 0, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_asked_for_is_clear(tmp_path, capsys):
    folder, out = MODELS["llama"].save(tmp_path / "in"), tmp_path / "out"
    command = ("--to", "ours", folder, out)
    for more, told in (
        ((), "there are 2 attentions, in layers 0 to 1 of model.layers.{layer}.self_attn.; give"),
        (("--layer", 7), "no layer 7; there are 0 to 1"),
        (("--layer", 1, "--prefix", "text."), "no attention that begins with 'text.'; there is"),
        (("--layer", 1, "--heads", 2), "config.json says heads=4, and --heads 2"),
        (("--layer", 1, "--from", "torch-mha"), "torch-mha does not declare how models name"),
        (("--layer", 1, "--from", "bert-eager"), "no tensor named as in encoder.layer.{layer}."),
        (("--all-layers", "--out-prefix", "a."), "would be written twice; use {layer} in"),
    ):
        assert told in refused(capsys, *command, *more)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "added", "told"),
    [
        ("llama", "q_norm.weight", "unexpected q_norm.weight"),
        ("llama", "q_proj.bias", "missing k_proj.bias, v_proj.bias"),
        ("bert", "self.distance_embedding.weight", "unexpected self.distance_embedding.weight"),
    ],
)
def test_nothing_inside_an_attention_is_ignored(name, added, told, tmp_path, capsys):
    model = MODELS[name]
    folder = model.save(tmp_path / "in")
    file = folder / "model.safetensors"
    tensors = {each: look(file).read(each) for each in look(file).header}
    more = np.ones(HEADS * model.head, np.float32)
    tensors[model.place.replace("{layer}", "0") + added] = Tensor.of("", more)
    write(file, tensors, {})
    assert told in refused(capsys, "--to", "ours", "--layer", 0, folder, tmp_path / "out")


def test_attentions_of_several_stacks(tmp_path, capsys):
    """As of T5: an encoder's, a decoder's, and those between them."""
    names = ("encoder.block.0.layer.0.SelfAttention.", "decoder.block.0.layer.0.SelfAttention.",
             "decoder.block.0.layer.1.EncDecAttention.")  # fmt: skip
    model, tensors = MODELS["t5 with heads of 4"], {}
    for number, place in enumerate(names):
        tensors |= {place + name: array for name, array in model.tensors(number).items()}
    tensors[f"{names[1]}relative_attention_bias.weight"] = np.ones((32, HEADS), np.float32)
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    made = {name: Tensor.of(name, array) for name, array in tensors.items()}
    write(folder / "model.safetensors", made, {})
    told = refused(capsys, "--to", "ours", "--layer", 0, folder, out)
    assert all(place in told for place in names)
    done = convert_file(folder, out, target="ours", all_layers=True, run=False)
    assert {piece.begin for piece in done.pieces} == {*names}
    added = {piece.place for piece in done.pieces if "relative_attention_bias" in str(piece.notes)}
    assert added == {names[1]}
    one = convert_file(folder, tmp_path / "one", target="flax-nnx", prefix=names[2], run=False)
    assert [piece.place for piece in one.pieces] == [names[2]]
    doubled = look(tmp_path / "one").read("query/kernel").values.reshape(WIDTH, -1)
    assert np.array_equal(doubled, 2 * model.tensors(2)["q.weight"].T)


def test_a_bias_that_is_not_used_is_not_told(tmp_path):
    """The first models of T5 hold one for the attention to the encoder, which adds none."""
    folder = MODELS["t5 with heads of 4"].save(tmp_path / "in")
    file = folder / "model.safetensors"
    tensors = {name: look(file).read(name) for name in look(file).header}
    place = "decoder.block.0.layer.1.EncDecAttention."
    linear = {it: it for it in "qkvo"}
    for name, array in Model("", linear, head=4).tensors(0).items():
        tensors[place + name] = Tensor.of(name, array)
    unused = f"{place}relative_attention_bias.weight"
    write(file, tensors | {unused: Tensor.of("", np.ones((32, HEADS), np.float32))}, {})
    done = convert_file(folder, tmp_path / "out", target="flax-nnx", prefix=place, run=False)
    assert done.left_over["unused"] == (unused,)
    assert not any("relative" in note for note in done.pieces[0].notes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_doubled_queries_are_exact_or_refused(dtype, tmp_path):
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    place = "decoder.block.0.layer.1.EncDecAttention."
    tensors = MODELS["t5 with heads of 4"].tensors(0)
    tensors = {name: array.astype(kind) for name, array in tensors.items()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "num_heads": HEADS}))
    file, out = tmp_path / "model.safetensors", tmp_path / "out"

    def made():
        write(file, {place + n: Tensor.of(n, array) for n, array in tensors.items()}, {})
        convert_file(tmp_path, out, target="flax-nnx", run=False, force=True)
        return look(out).read("query/kernel")

    found = made()
    wide = tensors["q.weight"].astype(np.float64)
    assert np.array_equal(found.values.reshape(WIDTH, -1), 2 * wide.T)
    tensors["q.weight"][0, 0] = {"float16": 6e4, "bfloat16": 3e38, "float64": 1.5e308}[dtype]
    with pytest.raises(Untranslatable, match=r"query times 2 would be rounded in"):
        made()


# In transformers itself


def tiny(name):
    """A model with random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    text = {**sizes, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shared = {**text, "num_key_value_heads": 2}
    wide = {**shared, "head_dim": 16}
    made = {
        "llama": ("LlamaForCausalLM", "LlamaConfig", shared),
        "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", shared),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", wide),
        "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**wide, "query_pre_attn_scalar": 9}),
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**text, "n_positions": 32}),
        "bert": ("BertForMaskedLM", "BertConfig", text),
        "t5": ("T5ForConditionalGeneration", "T5Config",
               {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2,
                "num_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 0}),
        "vit": ("ViTForImageClassification", "ViTConfig",
                {**sizes, "image_size": 8, "patch_size": 4}),
    }  # fmt: skip
    model, config, options = made[name]
    if not hasattr(transformers, config):
        pytest.skip("this version of transformers does not have the model")
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    built = getattr(transformers, model)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return built


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("llama", "ours"), ("llama", "neighbours"), ("qwen2", "neighbours"),
        ("qwen3", "neighbours"), ("gemma3", "ours"), ("gpt2", "torch-mha"), ("gpt2", "flax-nnx"),
        ("bert", "torch-mha"), ("bert", "flax-linen"), ("bert", "keras-tensorflow-mha"),
        ("vit", "torch-mha"), ("vit", "flax-nnx"), ("t5", "ours"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", ["5GB", "8KB"])
def test_models_that_transformers_saves(name, target, size, tmp_path, capsys):
    """Both sides are run by the command, in one file and in many."""
    tiny(name).save_pretrained(tmp_path / "in", max_shard_size=size)
    assert (tmp_path / "in" / "model.safetensors").exists() is (size == "5GB")
    target = target_of(tmp_path) if target == "neighbours" else target
    command = ["convert", "--to", target, "--all-layers", "--json", tmp_path / "in"]
    capsys.readouterr()
    assert main([*map(str, command), str(tmp_path / "out")]) == ExitCode.OK
    for piece in json.loads(capsys.readouterr().out)["layers"]:
        assert piece["source_not_run"] == ""
        assert piece["source_error"] < 8
        assert piece["target_not_run"] or piece["apart"] < 8


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "gpt2", "bert"])
def test_a_whole_model_attends_as_what_was_made_of_it(name, tmp_path):
    """Inputs and outputs of an attention inside the model, as its own loader reads the files."""
    torch = pytest.importorskip("torch")
    tiny(name).save_pretrained(tmp_path / "in", max_shard_size="8KB")
    import transformers

    model = transformers.AutoModel.from_pretrained(
        tmp_path / "in", attn_implementation="eager"
    ).eval()
    done = convert_file(tmp_path / "in", tmp_path / "out", target="ours", layer_number=1)
    place = done.pieces[0].place.rstrip(".").removeprefix("model.")
    place = place.removeprefix("transformer.").removeprefix("bert.")
    seen = {}

    def look_on(module, inputs, options, outputs):
        seen["input"] = (inputs or (options["hidden_states"],))[0]
        seen["output"] = outputs[0]

    module = model.get_submodule(place + (".self" if name == "bert" else ""))
    module.register_forward_hook(look_on, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.arange(1, 9)[None])
        output = seen["output"]
        if name == "bert":
            output = model.get_submodule(place).output.dense(output)
    stored, adapter = look(tmp_path / "out"), load("ours")
    native = {each: stored.read(each).values for each in stored.header}
    shape = dataclasses.replace(done.shape, batch=1, query_length=8, key_length=8, sharing="self")
    x = seen["input"].double().numpy()
    gains = [native.get(f"{side}_norm.weight") for side in ("query", "key")]
    turns = name not in ("gpt2", "bert")
    problem = Problem(
        shape=shape, dtype="float32", weights=Weights(**adapter.table(shape).export(native)),
        query=x, key=x, value=x, cotangent=np.zeros_like(x),
        causal=None if name == "bert" else "top-left",
        rotary=Rotary(size=shape.head_size, base=10000.0) if turns else None,
        norm=None if gains[0] is None else Norm(query=gains[0], key=gains[1]),
        scale=1 / 3 if name == "gemma3" else None,
    )  # fmt: skip
    expected = expect(problem, gradients=False)
    want, noise = expected.arrays["output"], expected.sigma["output"]
    found = compare("output", output.double().numpy(), want, noise, expected.underflow)
    assert found.figures.max_ratio < 8
