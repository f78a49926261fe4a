"""On a mesh of JAX, each device has a part: of a layer's parameters, of a function's result.

Each test asks a process of its own, because JAX makes its devices when it starts.
"""

import json
import os
import subprocess
import sys

import pytest

OUTPUT = {"flax-sharded": "out", "keras-jax-sharded": "attention_output"}
NEEDS = {"flax-sharded": "flax", "keras-jax-sharded": "keras"}

PLACED = """
import json, sys
from conformance import Call
from conformance.adapter.loading import load
from conformance.cases.catalogue import find_cases

adapter = load(sys.argv[1])
problem = find_cases("plain/no-mask/self")[0].problem("float32")
found = {}
for mode in adapter.modes:
    if problem.shape.heads % mode["mesh"][1] == 0:
        with adapter._session(problem, Call(mode)):
            ready = adapter._prepare(problem, Call(mode))
        found[mode.name] = mode["mesh"], {
            name: (len(array.sharding.device_set), array.size // array.addressable_data(0).size)
            for name, array in ready.variables.items()
        }
print("FOUND", json.dumps(found))
"""
RESULTS = """
import json, sys
import jax, numpy as np
from conformance.adapter.loading import load

adapter = load(sys.argv[1])
adapter.prepare()
found = {}
for mode in adapter.modes:
    query = jax.device_put(np.ones((2, 12, 12, 4), "float32"), adapter.lies("query", mode))
    result, pull = jax.vjp(lambda q: adapter.attend(q, query, query, {}, mode=mode), query)
    pull(query)  # A cotangent that is not divided as the result is.
    parts = result.size // result.addressable_data(0).size
    found[mode.name] = len(result.sharding.device_set), parts
print("FOUND", json.dumps(found))
"""
LATE = """
import sys
import jax
jax.numpy.zeros(())
from conformance import Unavailable
from conformance.adapter.loading import load

try:
    load(sys.argv[1]).prepare()
except Unavailable as error:
    print("FOUND", f'"{error}"')
"""


def asked(program, name):
    pytest.importorskip("jax")
    pytest.importorskip(NEEDS.get(name, "jax"))
    done = subprocess.run(
        [sys.executable, "-c", program, name],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "jax"},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("FOUND ")[2])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NEEDS)
def test_each_device_has_a_part_of_the_heads_and_of_the_batch(name):
    found = asked(PLACED, name)
    assert {"mesh-1", "mesh-2", "mesh-4", "mesh-2x2"} <= found.keys()
    for (batch, heads), arrays in found.values():
        by_heads = [
            f"{of}/{kind}" for of in ("query", "key", "value") for kind in ("kernel", "bias")
        ]
        parts = dict.fromkeys([*by_heads, f"{OUTPUT[name]}/kernel"], heads)
        parts[f"{OUTPUT[name]}/bias"] = 1
        wanted = {f"weights.{key}": [batch * heads, part] for key, part in parts.items()}
        assert arrays == wanted | {"query": [batch * heads, batch]}


@pytest.mark.night
@pytest.mark.parametrize("name", ["jax-sharded", "ours-jax-ring"])
def test_each_device_has_a_part_of_the_result(name):
    found = asked(RESULTS, name)
    assert len(found) >= 4
    for mode, parts in found.items():
        divided, _, size = mode.partition("-")
        # Where keys are divided, every device ends up with the whole result.
        assert parts == [int(size), 1 if divided == "keys" else int(size)], mode


@pytest.mark.night
@pytest.mark.parametrize("name", NEEDS)
def test_where_jax_has_started_it_is_said_what_to_do(name):
    told = asked(LATE, name)
    assert "JAX_NUM_CPU_DEVICES=4" in told
