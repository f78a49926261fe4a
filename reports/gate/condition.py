"""Conditions of entries: `torch_version >= "2.9" and dtype in ("float16", "bfloat16")`.

They read like the markers of requirements (PEP 508), and versions are compared by `packaging`. Its
own markers know no variables but those of an installation, and `in` is there a search in text, by
which "float16" is in "bfloat16"; so the syntax is Python's, of which only comparisons of a variable
with text are understood.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from conformance.errors import BrokenBaseline
from conformance.records.numbers import UNDERFLOW

CHOICES = {"dtype": tuple(UNDERFLOW), "device": ("cpu", "gpu")}
"""The values of these variables; a comparison with any other would never hold."""

_ORDER: dict[type, str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_OPERATORS: dict[type, str] = {**_ORDER, ast.Eq: "==", ast.NotEq: "!="}
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


@dataclass(frozen=True)
class Comparison:
    """A variable, an operator, and texts: one, or several for `in` and `not in`."""

    name: str
    operator: str
    values: tuple[str, ...]

    def holds(self, variables: Mapping[str, str]) -> bool:
        """Return whether the comparison is true for these values of variables."""
        actual = variables[self.name]
        if self.operator in ("in", "not in"):
            is_one = any(self._compare(actual, "==", value) for value in self.values)
            return is_one == (self.operator == "in")
        return self._compare(actual, self.operator, self.values[0])

    def _compare(self, actual: str, operator: str, value: str) -> bool:
        if is_version(self.name):
            return SpecifierSet(operator + value).contains(actual, prereleases=True)
        return (actual == value) == (operator == "==")


@dataclass(frozen=True)
class Condition:
    """A condition on which findings an entry applies to."""

    text: str
    tree: Comparison | Combined

    @property
    def names(self) -> frozenset[str]:
        """The names of the variables that occur in the condition."""
        return frozenset(part.name for part in _comparisons(self.tree))

    def holds(self, variables: Mapping[str, str]) -> bool:
        """Return whether the condition is true; a value must be given for each of `names`."""
        return self.tree.holds(variables)


@dataclass(frozen=True)
class Combined:
    """Parts joined by "and" or "or", or one part that must "not" hold."""

    word: str
    parts: tuple[Comparison | Combined, ...]

    def holds(self, variables: Mapping[str, str]) -> bool:
        """Return whether the condition is true for these values of variables."""
        parts = (part.holds(variables) for part in self.parts)
        if self.word == "not":
            return not next(parts)
        return all(parts) if self.word == "and" else any(parts)


def is_version(name: str) -> bool:
    """Return whether a variable is compared as a version."""
    return name.endswith("_version")


def parse(text: str) -> Condition:
    """Read a condition; raises `BrokenBaseline` in one line."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenBaseline(f"the condition {text!r} cannot be read") from error
    try:
        return Condition(text, _read(tree))
    except _Refused as error:
        raise BrokenBaseline(f"the condition {text!r}: {error}") from error
    except RecursionError as error:
        raise BrokenBaseline("the condition cannot be read: it is too long") from error


class _Refused(Exception):
    pass


def _comparisons(tree: Comparison | Combined) -> Iterator[Comparison]:
    if isinstance(tree, Comparison):
        yield tree
    else:
        for part in tree.parts:
            yield from _comparisons(part)


def _read(node: ast.expr) -> Comparison | Combined:
    match node:
        case ast.BoolOp(op, values):
            word = "and" if isinstance(op, ast.And) else "or"
            return Combined(word, tuple(_read(value) for value in values))
        case ast.UnaryOp(ast.Not(), operand):
            return Combined("not", (_read(operand),))
        case ast.Compare(left, [operator], [right]):
            return _compared(left, operator, right)
        case ast.Compare(left, operators, rights):
            pairs = zip([left, *rights], operators, rights, strict=False)
            return Combined("and", tuple(_compared(*pair) for pair in pairs))
        case _:
            raise _Refused('it must compare, as in dtype == "float64"')


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Comparison:
    if isinstance(operator, ast.In | ast.NotIn):
        if not isinstance(left, ast.Name) or not isinstance(right, ast.Tuple | ast.List):
            raise _Refused('"in" asks for a list, as in dtype in ("float16", "bfloat16")')
        word = "in" if isinstance(operator, ast.In) else "not in"
        values = tuple(_text(element) for element in right.elts)
        return _checked(Comparison(left.id, word, values))
    word = _OPERATORS.get(type(operator), "")
    if not word:
        raise _Refused("only ==, !=, <, <=, >, >=, in and not in compare")
    if isinstance(left, ast.Name):
        return _checked(Comparison(left.id, word, (_text(right),)))
    if isinstance(right, ast.Name):
        return _checked(Comparison(right.id, _MIRRORED[word], (_text(left),)))
    raise _Refused("it must compare a variable with text")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _Refused("a variable is compared with text in quotation marks")


def _checked(comparison: Comparison) -> Comparison:
    if is_version(comparison.name):
        for value in comparison.values:
            _check_version(comparison.operator, value)
    elif comparison.operator in _ORDER.values():
        raise _Refused(f"{comparison.name} is no version: compare with ==, != or in")
    for value in comparison.values:
        choices = CHOICES.get(comparison.name, (value,))
        if value not in choices:
            raise _Refused(f"no {comparison.name} is {value!r}; it is one of {', '.join(choices)}")
    return comparison


def _check_version(operator: str, value: str) -> None:
    operator = "==" if operator.endswith("in") else operator
    try:
        if not re.search(r"\d", value):
            raise InvalidSpecifier(value)
        SpecifierSet(operator + value)
    except InvalidSpecifier as error:
        raise _Refused(f"{value!r} is no version that {operator} can compare") from error
