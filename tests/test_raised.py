"""Who raised an exception: the library, or a file of ours."""

from __future__ import annotations

import linecache
import sys
import types

import pytest

from conformance.adapter.raised import is_our_own
from conformance.adapter.world import call_ranks
from conformance.errors import RankRaised, WrongShape

SOURCE = """
import numpy as np, einops, msgspec
from packaging.version import Version

class Adapter:
    def attend(self, own):
        decode, decoder = msgspec.json.decode, msgspec.json.Decoder()
        array = np.zeros((2, 3))
        {line}
"""


def made(line, module):
    """Return an adapter in this module with this line."""
    source = SOURCE.format(line=line)
    name = f"/{module}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    its = types.ModuleType(module)
    exec(compile(source, name, "exec"), its.__dict__)
    return its.Adapter()


def raised(line, module, own=None):
    """Who raised what this line of an adapter in this module raises?"""
    adapter = made(line, module)
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


class Refusing:
    """What answers calls on a rank; the library refuses them."""

    def __init__(self, *_):
        pass

    prepare = staticmethod(lambda: None)

    def serve(self, line):
        made(line, "conformance.adapters.made_up").attend(foreign)


@pytest.mark.parametrize(
    ("line", "ours"), [("own()", False), ("array.reshape(4, 5)", True), ("raise OSError()", True)]
)
def test_an_error_of_a_rank_is_whose_it_was_there(line, ours):
    with pytest.raises(RankRaised) as caught:
        call_ranks("test_raised:Refusing", 20.0, ["pass"], [[line]])
    assert is_our_own(caught.value, object()) == ours


def test_what_torch_refuses_without_a_line_of_its_own_is_refused():
    torch = pytest.importorskip("torch")
    line = (
        "own.nn.functional.scaled_dot_product_attention(*3 * [own.ones(1, 2, 3, 4)], "
        "attn_mask=own.ones(1, 7, dtype=own.bool))"
    )
    assert raised(line, "conformance.adapters.made_up", torch) == "the library's"
    assert "conformance.adapters.made_up" not in sys.modules
