"""The kinds of value that an annotation allows, and whether a value from YAML or the command line is one of them."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

from genmodels.cli.signatures import Module

#: Names that need no lookup, whatever they were imported from.
SCALARS = {"int": "an integer", "float": "a number", "str": "text", "bool": "true or false", "None": "null"}
SEQUENCES = {"list", "tuple", "set", "frozenset", "Sequence", "Iterable", "Collection"}
MAPPINGS = {"dict", "Mapping", "MutableMapping"}
ANYTHING = {"Any", "object"}
PATHS = {"Path", "PathLike"}


@dataclass(frozen=True)
class Scalar:
    """int, float, str, bool or None."""

    name: str

    def __str__(self) -> str:
        return SCALARS[self.name]


@dataclass(frozen=True)
class Choice:
    """One of the values of a `Literal`."""

    values: tuple

    def __str__(self) -> str:
        return ("one of " if len(self.values) > 1 else "") + ", ".join(show(v) for v in self.values)


@dataclass(frozen=True)
class Several:
    """A list; `length` is None for any."""

    items: tuple
    length: int | None = None

    def __str__(self) -> str:
        names = {"int": "integers", "float": "numbers", "str": "texts", "bool": "true/false values"}
        told = [names[i.name] for i in self.items if isinstance(i, Scalar) and i.name in names]
        told += [f"any of {', '.join(map(str, i.values))}" for i in self.items if isinstance(i, Choice)]
        what = " or ".join(told) or "values"
        return f"a list of {'' if self.length is None else f'{self.length} '}{what}"


@dataclass(frozen=True)
class Table:
    """A mapping with free keys; no `items` means values of any kind."""

    items: tuple = ()

    def __str__(self) -> str:
        return "a group of key: value"


@dataclass(frozen=True)
class Node:
    """A mapping whose keys are the keyword arguments of a class."""

    dotted: str

    def __str__(self) -> str:
        return f"keys of {self.dotted.rpartition('.')[2]}"


@dataclass(frozen=True)
class Anything:
    """No restriction that a source file could tell."""

    def __str__(self) -> str:
        return "anything"


Kind = Scalar | Choice | Several | Table | Node | Anything


def show(value: Any) -> str:
    """A value as one would type it.

    Example:
        >>> show(None), show(True), show("abc"), show([1, 2])
        ('null', 'true', 'abc', '[1, 2]')
    """
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def kinds(annotation: ast.expr | None, module: Module) -> tuple[Kind, ...]:
    """The alternatives of an annotation; an annotation that cannot be read allows anything.

    Example:
        >>> from genmodels.cli.signatures import load
        >>> module = load("genmodels.errors")
        >>> [str(k) for k in kinds(ast.parse("int | list[int] | None", mode="eval").body, module)]
        ['an integer', 'a list of integers', 'null']
    """
    found = tuple(dict.fromkeys(_kinds(annotation, module)))
    return found if found and Anything() not in found else (Anything(),)


def _kinds(node: ast.expr | None, module: Module) -> list[Kind]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_kinds(node.left, module), *_kinds(node.right, module)]
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            return _kinds(ast.parse(node.value, mode="eval").body, module)
        return [Scalar("None")] if node.value is None else [Anything()]
    if isinstance(node, ast.Subscript):
        return _subscript(_last(node.value), _elements(node.slice), module)
    if isinstance(node, ast.Name | ast.Attribute):
        return _name(_last(node), module)
    return [Anything()]


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _subscript(name: str, parts: list[ast.expr], module: Module) -> list[Kind]:
    if name == "Literal":
        return [Choice(tuple(ast.literal_eval(p) for p in parts))]
    if name in ("Optional", "Union"):
        inner = [kind for part in parts for kind in _kinds(part, module)]
        return [*inner, Scalar("None")] if name == "Optional" else inner
    if name == "Annotated":
        return _kinds(parts[0], module)
    if name in MAPPINGS:
        return [Table(kinds(parts[-1], module))]
    if name in SEQUENCES:
        free = name != "tuple" or (len(parts) == 2 and ast.unparse(parts[1]) == "...")
        used = parts[:1] if free else parts
        items = tuple(dict.fromkeys(kind for part in used for kind in kinds(part, module)))
        return [Several(items, None if free else len(parts))]
    return [Anything()]


def _name(name: str, module: Module) -> list[Kind]:
    if name in SCALARS:
        return [Scalar(name)]
    if name in PATHS:
        return [Scalar("str")]
    if name in SEQUENCES:
        return [Several((Anything(),))]
    if name in MAPPINGS:
        return [Table()]
    if name in ANYTHING:
        return [Anything()]
    found = module.lookup(name)
    if found is None:
        return []
    place, node = found
    if isinstance(node, ast.ClassDef):
        # A class of torch cannot be written in YAML: it is no alternative at all.
        own = place.name.split(".")[0] == module.name.split(".")[0]
        return [Node(f"{place.name}.{node.name}")] if own else []
    return _kinds(node, place) if isinstance(node, ast.expr) else [Anything()]


def accept(value: Any, kind: Kind) -> tuple[bool, Any]:
    """Whether a plain value (no mapping) is of a kind, and the value as that kind has it.

    Numbers follow what people type: 1e4 is an integer where an integer is asked, 3 is text where text is asked.

    Example:
        >>> accept(1e4, Scalar("int")), accept("abc", Scalar("int")), accept(7, Scalar("str"))
        ((True, 10000), (False, 'abc'), (True, '7'))
    """
    if isinstance(kind, Anything):
        return True, value
    if isinstance(kind, Choice):
        return any(value == v and type(value) is type(v) for v in kind.values), value
    if isinstance(kind, Several):
        return _accept_list(value, kind)
    if isinstance(kind, Scalar):
        return _accept_scalar(value, kind.name)
    return False, value


def _accept_list(value: Any, kind: Several) -> tuple[bool, Any]:
    if not isinstance(value, list) or kind.length not in (None, len(value)):
        return False, value
    results = [fit(item, kind.items) for item in value]
    return all(ok for ok, _ in results), [v for _, v in results]


def _accept_scalar(value: Any, name: str) -> tuple[bool, Any]:
    if name == "None":
        return value is None, value
    if value is None or isinstance(value, bool):
        return name == "bool" and value is not None, value
    if name in ("int", "float") and isinstance(value, int | float) and not usable(value):
        return False, value
    if name == "int":
        whole = isinstance(value, float) and value.is_integer()
        ok = isinstance(value, int) or (whole and usable(int(value)))
        return ok, int(value) if whole else value
    if name == "float":
        return isinstance(value, int | float), value
    if name == "str":
        number = isinstance(value, int)
        return isinstance(value, str) or number, str(value) if number else value
    return False, value


def usable(value: float) -> bool:
    """Whether a number means something to whoever takes it: finite, and an integer of 64 bits if it is one."""
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def _exact_first(value: Any, alternatives: tuple) -> list[Kind]:
    """The alternatives, those of the value's own type before those that would convert it."""
    own = type(value).__name__
    return sorted(alternatives, key=lambda kind: not (isinstance(kind, Choice) or getattr(kind, "name", "") == own))


def fit(value: Any, alternatives: tuple) -> tuple[bool, Any]:
    """`accept` over all alternatives."""
    for kind in _exact_first(value, alternatives):
        ok, converted = accept(value, kind)
        if ok:
            return True, converted
    return False, value
