"""The settings of a class or function, read from its source text without importing it.

The keyword-only arguments of a class are its configuration: names, defaults, annotations, and the lines of the
docstring's `Arguments:` section. Importing a model instead would take seconds before a misspelt key is reported.
"""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

from genmodels.core.checkpoint import present_name

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """A setting: its annotation, its default as source text (None: required), its meaning."""

    name: str
    annotation: ast.expr | None
    default: str | None
    module: Module
    meaning: str = ""

    def default_value(self) -> Any:
        """The default as in a configuration, with lists for tuples.

        Raises:
            ValueError: when it must be given, or is no plain value.
        """
        text = "" if self.default is None else self.default
        if text.isidentifier() and (found := self.module.lookup(text)) and isinstance(found[1], ast.expr):
            text = ast.unparse(found[1])
        try:
            value = {"list()": [], "dict()": {}}[text] if text in ("list()", "dict()") else ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise ValueError(f"{self.name} has no plain default") from error
        return _as_lists(value)

    @property
    def type_text(self) -> str:
        """The annotation as written in the source."""
        return "" if self.annotation is None else ast.unparse(self.annotation)


@dataclass(frozen=True)
class Target:
    """A class or function with its settable keys."""

    name: str
    file: str
    summary: str
    keys: dict[str, Key] = field(default_factory=dict)


class Module:
    """A source file and the names it binds: definitions, assignments and imports (also under TYPE_CHECKING)."""

    def __init__(self, name: str, path: Path):
        self.name, self.path = name, path
        self.names: dict[str, ast.stmt | ast.expr | str] = {}
        for node in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
            self._bind(node)

    def _bind(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            self.names[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
            with suppress(ImportError):  # beyond the top-level package, where nothing can be imported either
                source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                self.names.update({a.asname or a.name: f"{source}.{a.name}" for a in node.names})
        elif isinstance(node, ast.Import):
            self.names.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self.names[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            self.names[node.target.id] = node.value

    @property
    def file(self) -> str:
        """The path relative to the folder of the package."""
        top = self.name.split(".")[0]
        parts = self.path.parts
        return "/".join(parts[len(parts) - 1 - parts[::-1].index(top) :]) if top in parts else str(self.path)

    def lookup(self, name: str) -> tuple[Module, ast.AST] | None:
        """The definition of a name in its defining module, through any chain of imports."""
        bound = self.names.get(name)
        if isinstance(bound, str):
            return find(bound)
        return None if bound is None else (self, bound)


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _statements(body: list[ast.stmt]):
    """The statements of a module, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)


def _remembered(function: Callable[[str], T]) -> Callable[[str], T]:
    """Caches answers about this package; a user's module may appear or change during the process."""
    known = cache(function)

    @wraps(function)
    def answer(name: str) -> T:
        return (known if name.split(".")[0] == ROOT.name else function)(name)

    return answer


@_remembered
def load(name: str) -> Module | None:
    """The module of that dotted name, or None if there is no such source file."""
    first, *rest = name.split(".")
    if first == ROOT.name:
        folder = ROOT
    else:
        # A top-level name is only located; asking for a submodule would import its parents.
        spec = importlib.util.find_spec(first) if first.isidentifier() else None
        if spec is None or spec.origin in (None, "built-in", "frozen"):
            return None
        if Path(spec.origin).name != "__init__.py":
            return Module(name, Path(spec.origin)) if not rest and spec.origin.endswith(".py") else None
        folder = Path(spec.origin).parent
    place = folder.joinpath(*rest)
    paths = [place / "__init__.py", *([place.with_suffix(".py")] if rest else [])]
    return next((Module(name, path) for path in paths if path.is_file()), None)


@_remembered
def find(dotted: str) -> tuple[Module, ast.AST] | None:
    """The definition that a dotted name leads to, or None.

    Example:
        >>> module, node = find("genmodels.core.errors.InputError")
        >>> node.name, module.file
        ('InputError', 'genmodels/core/errors.py')
    """
    place, _, name = present_name(dotted).rpartition(".")
    module = load(place) if place else None
    return module.lookup(name) if module else None


@_remembered
def target(dotted: str) -> Target | None:
    """The settable keys of the class or function of that name, or None if there is none.

    Example:
        >>> sorted(target("genmodels.cli.info.run").keys)
        ['ckpt', 'full', 'open']
    """
    found = find(dotted)
    if found is None or not isinstance(found[1], ast.ClassDef | ast.FunctionDef):
        return None
    module, node = found
    summary = (ast.get_docstring(node) or "").strip().split("\n\n")[0].replace("\n", " ")
    is_class = isinstance(node, ast.ClassDef)
    keys = _class_keys(module, node) if is_class else _function_keys(module, node, _meanings(module, node))
    return Target(node.name, module.file, summary, keys)


def _function_keys(module: Module, node: ast.FunctionDef, meanings: dict[str, str]) -> dict[str, Key]:
    """Its keyword-only arguments, then the fields of the dataclass that annotates its `**options`."""
    further, kwarg = {}, node.args.kwarg
    named = kwarg is not None and isinstance(kwarg.annotation, ast.Name) and module.lookup(kwarg.annotation.id)
    if named and isinstance(named[1], ast.ClassDef):
        further = _class_keys(*named)
    own = {
        argument.arg: Key(argument.arg, argument.annotation, None if default is None else ast.unparse(default), module,
                          meanings.get(argument.arg, ""))
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    }
    return own | {name: key for name, key in further.items() if name not in own}


def _class_keys(module: Module, node: ast.ClassDef) -> dict[str, Key]:
    """The arguments of `__init__` or keyword-only fields of a dataclass, with those of the bases if passed on."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            own = _function_keys(module, statement, _meanings(module, node))
            return own if statement.args.kwarg is None else {**_inherited(module, node), **own}
    own = _field_keys(module, node) if _is_keyword_dataclass(node) else {}
    return own | {name: key for name, key in _inherited(module, node).items() if name not in own}


def _bases(module: Module, node: ast.AST) -> list[tuple[Module, ast.ClassDef]]:
    """The base classes whose source can be found, the last one first (so that earlier ones override it)."""
    found = [module.lookup(base.id) for base in reversed(getattr(node, "bases", [])) if isinstance(base, ast.Name)]
    return [pair for pair in found if pair and isinstance(pair[1], ast.ClassDef)]


def _inherited(module: Module, node: ast.ClassDef) -> dict[str, Key]:
    return {name: key for base in _bases(module, node) for name, key in _class_keys(*base).items()}


def _meanings(module: Module, node: ast.AST) -> dict[str, str]:
    """The description of each argument in the docstrings; "see `Base`" refers to the base class."""
    inherited = {name: text for base in _bases(module, node) for name, text in _meanings(*base).items()}
    own = argument_lines(ast.get_docstring(node) or "")
    return {**inherited, **{name: text for name, text in own.items() if not text.startswith("see ")}}


def _is_keyword_dataclass(node: ast.ClassDef) -> bool:
    calls = [d for d in node.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func).endswith("dataclass")]
    return any(k.arg == "kw_only" and ast.unparse(k.value) == "True" for call in calls for k in call.keywords)


def _field_keys(module: Module, node: ast.ClassDef) -> dict[str, Key]:
    meanings = _meanings(module, node)
    fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    return {
        s.target.id: Key(s.target.id, s.annotation, _field_default(s.value), module, meanings.get(s.target.id, ""))
        for s in fields
        if "ClassVar" not in ast.unparse(s.annotation) and not _is_internal(s.value)
    }


def _is_internal(value: ast.expr | None) -> bool:
    """Whether a field is `field(..., metadata={"configurable": False})`, no setting of a configuration."""
    return isinstance(value, ast.Call) and any(
        k.arg == "metadata" and "'configurable': False" in ast.unparse(k.value) for k in value.keywords)


def _field_default(value: ast.expr | None) -> str | None:
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        given = {k.arg: ast.unparse(k.value) for k in value.keywords}
        return given.get("default", f"{given['default_factory']}()" if "default_factory" in given else None)
    return None if value is None else ast.unparse(value)


def argument_lines(docstring: str) -> dict[str, str]:
    """The entries of a docstring's `Arguments:` section, each joined to one line.

    Example:
        >>> argument_lines("Adds.\\n\\nArguments:\\n    a: the first\\n        number.\\n    b: the second.\\n\\nMore.")
        {'a': 'the first number.', 'b': 'the second.'}
    """
    _, _, section = docstring.partition("Arguments:\n")
    lines = section.split("\n")
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    meanings: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent("\n".join(lines[:end])).split("\n"):
        head, colon, text = line.partition(":")
        if line and not line.startswith(" ") and colon:
            for name in (n.strip() for n in head.split(",")):
                meanings[name] = text.strip()
        elif line.strip() and name:
            meanings[name] += " " + line.strip()
    return meanings
