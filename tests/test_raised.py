"""Who raised an exception: the library, or a file of ours."""

from __future__ import annotations

import linecache
import sys
import types

import pytest

from conformance.errors import WrongShape
from conformance.requirements.raised import is_our_own

SOURCE = """
import numpy as np, einops, msgspec
from packaging.version import Version

class Adapter:
    def attend(self, own):
        decode, decoder = msgspec.json.decode, msgspec.json.Decoder()
        array = np.zeros((2, 3))
        {line}
"""


def raised(line, module, own=None):
    """Who raised what this line of an adapter in this module raises?"""
    source = SOURCE.format(line=line)
    name = f"/{module}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    made = types.ModuleType(module)
    exec(compile(source, name, "exec"), made.__dict__)
    adapter = made.Adapter()
    try:
        adapter.attend(own)
    except Exception as error:
        return "ours" if is_our_own(error, adapter) else "the library's"
    raise AssertionError(f"{line} raises nothing")


def foreign(*_):
    raise ValueError("not with these")


@pytest.mark.parametrize(
    ("line", "who"),
    [
        ("array[np.ones((4, 5), bool)]", "ours"),
        ("array[..., 7]", "ours"),
        ("array + np.zeros((4, 5))", "ours"),
        ("array.reshape(4, 5)", "ours"),
        ("np.broadcast_to(array, (4, 5))", "ours"),
        ("einops.rearrange(array, 'a b c -> c b a')", "ours"),
        ("raise ValueError('no such mode')", "ours"),
        ("{}['mode']", "ours"),
        ("self.forgotten()", "ours"),
        ("Version('x')", "the library's"),
        ("msgspec.json.decode(b'{')", "the library's"),
        ("decode(b'{')", "the library's"),
        ("decoder.decode(b'{')", "the library's"),
        ("own()", "the library's"),
        ("[own() for _ in range(2)]", "the library's"),
    ],
)
def test_what_is_raised_in_a_file_of_ours_is_ours(line, who):
    assert raised(line, "conformance.adapters.made_up", foreign) == who


@pytest.mark.parametrize(
    ("line", "who"),
    [
        ("array.reshape(4, 5)", "ours"),
        ("array[..., 7]", "the library's"),
        ("raise ValueError('no float mask')", "the library's"),
    ],
)
def test_the_file_of_somebody_else_may_hold_the_implementation(line, who):
    assert raised(line, "mine") == who


def test_an_error_of_the_suite_is_ours():
    assert is_our_own(WrongShape("no"), object())


def test_what_torch_refuses_without_a_line_of_its_own_is_refused():
    torch = pytest.importorskip("torch")
    line = (
        "own.nn.functional.scaled_dot_product_attention(*3 * [own.ones(1, 2, 3, 4)], "
        "attn_mask=own.ones(1, 7, dtype=own.bool))"
    )
    assert raised(line, "conformance.adapters.made_up", torch) == "the library's"
    assert "conformance.adapters.made_up" not in sys.modules
