"""A configuration checked against the signatures of what it configures, before anything of it is imported.

A mapping is checked against the class its `_target_` names, or against the classes in the annotation of the argument
that takes it; the top level against the keyword arguments of the command's `run`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from genmodels.cli.signatures import ROOT, Key, Module, Target, target
from genmodels.core.errors import InputError, hint, nearest
from genmodels.models.build import NETWORKS, TARGET

#: Names with a fixed meaning, from whatever module they are imported.
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
        kinds_of_items = [names[i.name] for i in self.items if isinstance(i, Scalar) and i.name in names]
        kinds_of_items += [f"any of {', '.join(map(str, i.values))}" for i in self.items if isinstance(i, Choice)]
        what = " or ".join(kinds_of_items) or "values"
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
    """A kind without restriction, because the annotation cannot be resolved."""

    def __str__(self) -> str:
        return "anything"


Kind = Scalar | Choice | Several | Table | Node | Anything


def show(value: Any) -> str:
    """A value as one would type it.

    Example:
        >>> show(None), show(True), show("abc"), show([1, 2])
        ('null', 'true', 'abc', '[1, 2]')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def kinds(annotation: ast.expr | None, module: Module) -> tuple[Kind, ...]:
    """The alternatives of an annotation; an annotation that cannot be read allows anything.

    Example:
        >>> from genmodels.cli.signatures import load
        >>> module = load("genmodels.core.errors")
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
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return _subscript(_last(node.value), parts, module)
    if isinstance(node, ast.Name | ast.Attribute):
        return _name(_last(node), module)
    return [Anything()]


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


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
        # A class of another package, such as torch, cannot be written in YAML: it is no alternative.
        own = place.name.split(".")[0] in ("genmodels", module.name.split(".")[0])
        return [Node(f"{place.name}.{node.name}")] if own else []
    return _kinds(node, place) if isinstance(node, ast.expr) else [Anything()]


def accept(value: Any, kind: Kind) -> tuple[bool, Any]:
    """Whether a plain value (no mapping) is of a kind, and the value converted to it.

    1e4 is an integer where an integer is expected, 3 is text where text is expected.

    Example:
        >>> accept(1e4, Scalar("int")), accept("abc", Scalar("int")), accept(7, Scalar("str"))
        ((True, 10000), (False, 'abc'), (True, '7'))
    """
    if isinstance(kind, Anything):
        return True, value
    if isinstance(kind, Choice):
        return any(value == v and type(value) is type(v) for v in kind.values), value
    if isinstance(kind, Several):
        if not isinstance(value, list) or kind.length not in (None, len(value)):
            return False, value
        results = [fit(item, kind.items) for item in value]
        return all(ok for ok, _ in results), [converted for _, converted in results]
    if isinstance(kind, Scalar):
        return _accept_scalar(value, kind.name)
    return False, value


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
    if name == "str" and isinstance(value, int | str):
        return True, str(value)
    return False, value


def usable(value: float) -> bool:
    """Whether a number is usable: finite, and within 64 bits if it is an integer."""
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


def fit(value: Any, alternatives: tuple) -> tuple[bool, Any]:
    """`accept` for the first alternative that holds; those of the value's type come before those that convert it."""
    def converts(kind: Kind) -> bool:
        return not (isinstance(kind, Choice) or getattr(kind, "name", "") == type(value).__name__)

    for kind in sorted(alternatives, key=converts):
        ok, converted = accept(value, kind)
        if ok:
            return True, converted
    return False, value


MISSING = "???"  # OmegaConf's mark for a value that must be given
SHOWN = 14  # keys listed in an error; more would hide the point
EXAMPLES = {"ckpt": "runs/ddpm-digits/<time>/best.ckpt", "file": "data/items.npz", "root": "data/items"}


class Schema:
    """The settings of a command, at every depth.

    Arguments:
        run: dotted name of the command's function.
        where: maps a dotted key to the place where it was set ("on the command line", "in configs/model/ddpm.yaml").
        trust: packages besides genmodels whose classes may be named.
    """

    def __init__(self, run: str, where: Callable[[str], str] = lambda path: "given", trust: Iterable[str] = ()):
        self.top, self.where = target(run), where
        self.packages = {ROOT.name, *trust}

    def check(self, config: dict) -> dict:
        """The configuration with every value converted to its annotation.

        Raises:
            InputError: one line for the first unknown key, wrong type or missing value.

        Example:
            >>> Schema("genmodels.cli.info.run").check({"ckpt": ["a.ckpt"], "ful": True})
            Traceback (most recent call last):
            ...
            genmodels.core.errors.InputError: unknown key 'ful' (given): did you mean 'full'? ...
        """
        self.config = config
        self.missing: list[str] = []
        checked = self._keys(config, [self.top], "")
        # Last, because a misspelt key also leaves the right one missing.
        if self.missing:
            raise InputError(self.missing[0])
        return checked

    def walk(self, config: dict) -> Iterator[tuple[str, Target, Key]]:
        """Every setting of the chosen classes: its dotted path, its class, itself."""
        yield from self._walk(config, [self.top], "")

    def _walk(self, config: dict, takers: list[Target], path: str) -> Iterator[tuple[str, Target, Key]]:
        found = [(_join(path, key.name), taker, key) for taker in takers for key in taker.keys.values()]
        yield from found
        for place, _, key in found:
            value = config.get(key.name)
            value = value if isinstance(value, dict) else {}
            yield from self._walk(value, self._takers(value, kinds_of(key)), place)

    def complete(self, config: dict, built: Iterable[type] = ()) -> dict:
        """The configuration completed with all defaults, so that it keeps its meaning when they change.

        Arguments:
            config: what was given, checked; top-level keys that it lacks stay away.
            built: the classes that were built from it; they decide between several classes that a group of options
                fits. A group that remains ambiguous is left as it was given.

        Example:
            >>> Schema("genmodels.cli.train.run").complete({"checkpoint": {"keep_best": False}})
            {'checkpoint': {'keep_best': False, 'every_n_steps': 500}}
        """
        names = {f"{one.__module__}.{one.__qualname__}" for one in built}
        keys = {name: key for name, key in self.top.keys.items() if name in config}
        return self._completed(config, replace(self.top, keys=keys), names)

    def _completed(self, config: dict, taker: Target, built: set[str]) -> dict:
        whole = dict(config)
        for key in taker.keys.values():
            if key.name not in config:
                try:
                    whole[key.name] = key.default_value()
                except ValueError:  # no plain value: it can only change with the class itself
                    continue
            value = whole[key.name]
            if value is None and any(isinstance(kind, Table) for kind in kinds_of(key)):
                value = {}  # options of a class, none of them given
            inner = self._only_taker(value, kinds_of(key), built)
            if inner is not None:
                whole[key.name] = self._completed(value, inner, built)
        return whole

    def defaults(self, config: dict) -> dict:
        """The default of every setting of the chosen classes, by dotted path, if it is a plain value."""
        return dict(self._defaults(config, self.top, ""))

    def _defaults(self, config: dict, taker: Target, path: str) -> Iterator[tuple[str, Any]]:
        for key in taker.keys.values():
            with suppress(ValueError):
                yield _join(path, key.name), key.default_value()
            value = config.get(key.name)
            inner = self._only_taker(value, kinds_of(key), set())
            if inner is not None:
                yield from self._defaults(value, inner, _join(path, key.name))

    def _takers(self, value: dict, alternatives: tuple[Kind, ...]) -> list[Target]:
        """The classes that a mapping may configure: the one it names, else those of the annotation."""
        names = [str(value[TARGET])] if TARGET in value else _classes(alternatives)
        return [found for name in names if (found := target(name))]

    def _only_taker(self, value: Any, alternatives: tuple[Kind, ...], built: set[str]) -> Target | None:
        """The class whose options `value` holds; None if it is no mapping, or may be for several classes."""
        if not isinstance(value, dict):
            return None
        if TARGET not in value:
            nodes = [kind for kind in alternatives if isinstance(kind, Node)]
            alternatives = tuple(kind for kind in nodes if kind.dotted in built) or tuple(nodes)
        fitting = [found for found in self._takers(value, alternatives) if value.keys() <= {TARGET, *found.keys}]
        return fitting[0] if len(fitting) == 1 else None

    def _keys(self, config: dict, takers: list[Target], path: str) -> dict:
        checked = {}
        for name, value in config.items():
            full = _join(path, name)
            keys = [taker.keys[name] for taker in takers if name in taker.keys]
            if name == TARGET:
                checked[name] = value
            elif keys and value != MISSING:
                alternatives = tuple(dict.fromkeys(kind for key in keys for kind in kinds_of(key)))
                checked[name] = self._value(value, alternatives, full)
            elif not keys:
                raise InputError(self._unknown(full, takers))
        for key in takers[0].keys.values() if len(takers) == 1 else ():
            if key.name not in checked and (key.default is None or key.name in config):
                self.missing.append(_missing(_join(path, key.name), key))
        return checked

    def _value(self, value: Any, alternatives: tuple[Kind, ...], path: str) -> Any:
        if isinstance(value, str) and NETWORKS.get(value) in _classes(alternatives):
            value = {TARGET: NETWORKS[value]}
        if isinstance(value, dict):
            return self._mapping(value, alternatives, path)
        if isinstance(value, list) and any(isinstance(item, dict) for item in value):
            items = tuple(k for several in alternatives if isinstance(several, Several) for k in several.items)
            return [self._value(item, items or (Anything(),), f"{path}.{i}") for i, item in enumerate(value)]
        if value == "":
            raise InputError(f"{path}= is empty ({self.where(path)}): give a value, or leave {path} out")
        ok, converted = fit(value, alternatives)
        if not ok:
            raise InputError(self._wrong(value, alternatives, path))
        return converted

    def _mapping(self, value: dict, alternatives: tuple[Kind, ...], path: str) -> dict:
        if TARGET in value:
            self._check_target(str(value[TARGET]), _join(path, TARGET))
        takers = self._takers(value, alternatives)
        if takers:
            return self._keys(value, takers, path)
        tables = [kind for kind in alternatives if isinstance(kind, Table | Anything)]
        if not tables:
            raise InputError(self._wrong(value, alternatives, path))
        inner = tuple(kind for table in tables for kind in getattr(table, "items", ())) or (Anything(),)
        return {name: self._value(item, inner, _join(path, name)) for name, item in value.items()}

    def _check_target(self, dotted: str, path: str) -> None:
        package = dotted.split(".")[0]
        if package not in self.packages:
            raise InputError(f"{path} = {dotted} ({self.where(path)}) is not a class of genmodels; "
                             f"to allow it add its package: trust=[{package}]")
        if target(dotted) is None:
            raise InputError(f"{path} = {dotted} ({self.where(path)}): there is no such class")

    def _unknown(self, path: str, takers: list[Target]) -> str:
        name = path.rpartition(".")[2]
        known = {key.name: (place, taker) for place, taker, key in reversed(list(self.walk(self.config)))}
        near = nearest(name, [key for taker in takers for key in taker.keys], cutoff=0.6)
        question = f" did you mean {near!r}?" if near else ""
        elsewhere = known.get(name) or (None if near else known.get(nearest(name, list(known), cutoff=0.7)))
        if elsewhere is not None:  # a key of another part of the configuration, as it is chosen
            near, taker = elsewhere
            question = f" did you mean {near!r}? ({taker.name} has it)"
        shown = [taker for taker in takers if near in taker.keys] or takers
        return f"unknown key {path!r} ({self.where(path)}):{question} {'; '.join(map(_takes, shown))}"

    def _wrong(self, value: Any, alternatives: tuple[Kind, ...], path: str) -> str:
        # null comes last, whatever the annotation's order; `dict` next to a class is only the form of its keys.
        named = any(isinstance(kind, Node) for kind in alternatives)
        shown_kinds = [kind for kind in alternatives if not (named and isinstance(kind, Table))]
        expected = " or ".join(dict.fromkeys(str(k) for k in sorted(shown_kinds, key=lambda k: str(k) == "null")))
        within = [i for kind in alternatives if isinstance(kind, Several) for i in kind.items]
        choices = [v for kind in (*alternatives, *within) if isinstance(kind, Choice) for v in kind.values]
        others = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str) and v not in choices]
        note = hint(others[0], choices) if others else ""
        if any(isinstance(v, int | float) and not usable(v) for v in (value if isinstance(value, list) else [value])):
            note = ": numbers are finite, and integers have at most 64 bits"
        got = value if isinstance(value, list) else repr(show(value))
        return f"{path} must be {expected}, got {got} ({self.where(path)}){note}"


def kinds_of(key: Key) -> tuple[Kind, ...]:
    """The alternatives of a setting."""
    return kinds(key.annotation, key.module)


def _classes(alternatives: tuple[Kind, ...]) -> list[str]:
    return [kind.dotted for kind in alternatives if isinstance(kind, Node)]


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _takes(taker: Target) -> str:
    names = list(taker.keys)
    shown = ", ".join(names[:SHOWN]) or "no keys"
    if len(names) > SHOWN:
        shown += f", ... (--keys lists all {len(names)})"
    return f"this command takes {shown}" if taker.name == "run" else f"{taker.name} takes {shown} ({taker.file})"


def _missing(path: str, key: Key) -> str:
    meaning = f", {key.meaning.split(': ')[0].split('; ')[0].split('. ')[0].rstrip('.')}" if key.meaning else ""
    return f"{path} is missing{meaning}: add for example {path}={EXAMPLES.get(key.name, '...')}"
