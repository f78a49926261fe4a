"""What runs graphs has a product of two matrices; the rest of a projection is moving axes."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.frameworks.numpy_bridge import Runtime


class Products(Runtime):
    name = "products"

    def matmul(self, left, right):
        assert left.flags.c_contiguous
        assert right.flags.c_contiguous
        return (left.astype(float) @ right.astype(float)).astype(left.dtype)


RUNTIME = Products()
SIZES = {"b": 2, "h": 3, "q": 4, "d": 5, "e": 7}


@pytest.mark.parametrize(
    "axes", ["bqe,ehd->bhqd", "bqe,ehd->bqhd", "bhqd,hde->bqe", "bqhd,hde->bqe"]
)
def test_projections_are_products(axes):
    random = np.random.default_rng(0)
    given = axes.partition("->")[0].split(",")
    operands = [random.normal(size=[SIZES[axis] for axis in names]) for names in given]
    found = RUNTIME.einsum(axes, *operands)
    assert np.allclose(found, np.einsum(axes, *operands))
    assert found.flags.c_contiguous


def test_bfloat16_goes_in_and_out():
    native = RUNTIME.array(np.array([1.0, 1.0 + 2.0**-9]), "bfloat16", "cpu")
    assert RUNTIME.dtype(native) == "bfloat16"
    assert RUNTIME.numpy(native).tolist() == [1.0, 1.0]
    assert RUNTIME.array(np.array([True]), "bfloat16", "cpu").dtype == bool


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("how", ["gaps", "window"])
def test_arrays_in_several_pieces_hold_the_same(dtype, how):
    native = RUNTIME.array(np.arange(24.0).reshape(2, 3, 4), dtype, "cpu")
    laid = RUNTIME.strided(native, how, "cpu")
    assert not laid.flags.c_contiguous
    assert RUNTIME.dtype(laid) == dtype
    assert np.array_equal(RUNTIME.numpy(laid), RUNTIME.numpy(native))
