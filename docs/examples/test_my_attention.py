"""The suite in a project's own tests.

pytest docs/examples/test_my_attention.py
"""

from numpy_function import attention

from conformance import parametrize_with_checks


@parametrize_with_checks([attention], level="core")
def test_conforms(check):
    """Check one case of the level in one dtype and mode."""
    check()
