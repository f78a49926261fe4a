"""Conditions of entries: `torch_version >= "2.9" and dtype in ("float16", "bfloat16")`.

They look like environment markers (PEP 508), and versions are compared by `packaging`. The markers
of `packaging` itself are not used, because they accept only variables of an installation, and their
`in` is a substring search, which finds "float16" in "bfloat16". The syntax is therefore a subset of
Python's: comparisons of a variable with text, joined by `and`, `or` and `not`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from conformance.errors import BrokenBaseline
from conformance.records.numbers import UNDERFLOW

CHOICES = {"dtype": tuple(UNDERFLOW), "device": ("cpu", "gpu")}
"""The possible values of these variables; a comparison with any other value is rejected."""

_OPERATORS: dict[type, str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_MIRRORED = str.maketrans("<>", "><")

Test = Callable[[Mapping[str, str]], bool]
"""A function that returns whether a condition holds for the values of variables."""


@dataclass(frozen=True)
class Condition:
    """A condition that restricts the findings to which an entry applies.

    Attributes:
        names: the variables that occur in the condition.
        holds: function that returns whether the condition is true, given a value for each variable
            in `names`.
    """

    text: str
    names: frozenset[str]
    holds: Test = field(compare=False)


def parse(text: str) -> Condition:
    """Parse a condition; raises `BrokenBaseline` with a message of one line if it is invalid."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenBaseline(f"the condition {text!r} cannot be read") from error
    try:
        holds = _read(tree)
    except _Refused as error:
        raise BrokenBaseline(f"the condition {text!r}: {error}") from error
    except RecursionError as error:
        raise BrokenBaseline("the condition cannot be read: it is too long") from error
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return Condition(text, names, holds)


class _Refused(Exception):
    pass


def _read(node: ast.expr) -> Test:
    match node:
        case ast.BoolOp(op, values):
            join = all if isinstance(op, ast.And) else any
            tests = [_read(value) for value in values]
            return lambda variables: join(test(variables) for test in tests)
        case ast.UnaryOp(ast.Not(), operand):
            test = _read(operand)
            return lambda variables: not test(variables)
        case ast.Compare(left, operators, rights):
            triples = zip([left, *rights], operators, rights, strict=False)
            comparisons = [_compared(*triple) for triple in triples]
            return lambda variables: all(test(variables) for test in comparisons)
        case _:
            raise _Refused('it must compare, as in dtype == "float64"')


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Test:
    if isinstance(operator, ast.In | ast.NotIn):
        if not isinstance(left, ast.Name) or not isinstance(right, ast.Tuple | ast.List):
            raise _Refused('"in" asks for a list, as in dtype in ("float16", "bfloat16")')
        name = left.id
        values = [_checked(name, "==", element) for element in right.elts]
        expected = isinstance(operator, ast.In)
        return lambda known: (
            expected == any(_holds(name, known[name], "==", value) for value in values)
        )
    symbol = _OPERATORS.get(type(operator), "")
    if not symbol:
        raise _Refused("only ==, !=, <, <=, >, >=, in and not in compare")
    if not isinstance(left, ast.Name):
        left, right, symbol = right, left, symbol.translate(_MIRRORED)
    if not isinstance(left, ast.Name):
        raise _Refused("it must compare a variable with text")
    name, value = left.id, _checked(left.id, symbol, right)
    return lambda known: _holds(name, known[name], symbol, value)


def _holds(name: str, actual: str, operator: str, value: str) -> bool:
    if _is_version(name):
        return SpecifierSet(operator + value).contains(actual, prereleases=True)
    return (actual == value) == (operator == "==")


def _is_version(name: str) -> bool:
    return name.endswith("_version")


def _checked(name: str, operator: str, node: ast.expr) -> str:
    """Return the text that a variable is compared with; raises `_Refused` if it is invalid."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise _Refused("a variable is compared with text in quotation marks")
    value = node.value
    if _is_version(name):
        try:
            if not re.search(r"\d", value):
                raise InvalidSpecifier(value)
            SpecifierSet(operator + value)
        except InvalidSpecifier as error:
            raise _Refused(f"{value!r} is no version that {operator} can compare") from error
    elif operator not in ("==", "!="):
        raise _Refused(f"{name} is no version: compare with ==, != or in")
    choices = CHOICES.get(name, (value,))
    if value not in choices:
        raise _Refused(f"no {name} is {value!r}; it is one of {', '.join(choices)}")
    return value
