"""A configuration checked against the signatures of what it configures, before anything of it is imported.

A mapping is checked against the class its `_target_` names, or against the classes in the annotation of the argument
that takes it; the top level against the keyword arguments of the command's `run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from genmodels.cli.kinds import Anything, Choice, Kind, Node, Several, Table, fit, kinds, show, usable
from genmodels.cli.signatures import ROOT, Key, Target, target
from genmodels.errors import InputError, nearest

TARGET = "_target_"
MISSING = "???"  # OmegaConf's mark for a value that must be given
SHOWN = 14  # keys listed in an error; more would hide the point
EXAMPLES = {"ckpt": "runs/ddpm-digits/<time>/best.ckpt"}


class Schema:
    """The keys that a command takes, at every depth.

    Arguments:
        run: dotted name of the command's function.
        where: says of a dotted key where it was set ("on the command line", "in configs/model/ddpm.yaml").
        trust: packages besides genmodels whose classes may be named.
    """

    def __init__(self, run: str, where: Callable[[str], str] = lambda path: "given", trust: Iterable[str] = ()):
        self.top, self.where = target(run), where
        self.packages = {ROOT.name, *trust}

    def check(self, config: dict) -> dict:
        """The configuration with every value as its annotation has it.

        Raises:
            InputError: one line for the first unknown key, wrong type or missing value.

        Example:
            >>> Schema("genmodels.cli.info.run").check({"ckpt": ["a.ckpt"], "ful": True})
            Traceback (most recent call last):
            ...
            genmodels.errors.InputError: unknown key 'ful' (given): did you mean 'full'? this command takes ckpt, full
        """
        self.config = config
        self.missing: list[str] = []
        checked = self._keys(config, [self.top], "")
        # Last, because a misspelt key also leaves the right one missing.
        if self.missing:
            raise InputError(self.missing[0])
        return checked

    def walk(self, config: dict) -> Iterator[tuple[str, Target, Key]]:
        """Every key that can be set for this choice of classes: its dotted path, its class, itself."""
        yield from self._walk(config, [self.top], "")

    def _walk(self, config: dict, takers: list[Target], path: str) -> Iterator[tuple[str, Target, Key]]:
        for taker in takers:
            for key in taker.keys.values():
                yield _join(path, key.name), taker, key
        for taker in takers:
            for key in taker.keys.values():
                value = config.get(key.name)
                inner = self._takers(value if isinstance(value, dict) else {}, kinds(key.annotation, key.module))
                yield from self._walk(value if isinstance(value, dict) else {}, inner, _join(path, key.name))

    def _takers(self, value: dict, alternatives: tuple[Kind, ...]) -> list[Target]:
        """The classes that a mapping may configure: the one it names, else those of the annotation."""
        names = [value[TARGET]] if TARGET in value else [k.dotted for k in alternatives if isinstance(k, Node)]
        return [found for name in names if (found := target(str(name)))]

    def complete(self, config: dict, built: Iterable[type] = ()) -> dict:
        """The configuration with the defaults of all that nobody gave, so that it keeps its meaning when they change.

        Arguments:
            config: what was given, checked; top-level keys that it lacks stay away.
            built: the classes that were made of it; they tell which of several a group of options was for, where
                its keys do not. A group that neither tells is left as it was given.

        Example:
            >>> Schema("genmodels.cli.train.run").complete({"checkpoint": {"keep_best": False}})
            {'checkpoint': {'keep_best': False, 'every_n_steps': 500}}
        """
        names = {f"{one.__module__}.{one.__qualname__}" for one in built}
        keys = {name: key for name, key in self.top.keys.items() if name in config}
        return self._completed(config, Target(self.top.name, self.top.file, self.top.summary, keys), names)

    def _completed(self, config: dict, taker: Target, built: set[str]) -> dict:
        whole = dict(config)
        for key in taker.keys.values():
            if key.name not in config:
                try:
                    whole[key.name] = key.default_value()
                except ValueError:  # no plain value: it can only change with the class itself
                    continue
            alternatives = kinds(key.annotation, key.module)
            value = whole[key.name]
            if value is None and any(isinstance(kind, Table) for kind in alternatives):
                value = {}  # options of a class of which nobody gave any
            if not isinstance(value, dict):
                continue
            inner = self._meant(value, alternatives, built)
            if inner is not None:
                whole[key.name] = self._completed(value, inner, built)
        return whole

    def defaults(self, config: dict) -> dict:
        """The default of every key that its classes take, by dotted path, where it is a plain value."""
        return dict(self._defaults(config, self.top, ""))

    def _defaults(self, config: dict, taker: Target, path: str) -> Iterator[tuple[str, Any]]:
        for key in taker.keys.values():
            with suppress(ValueError):
                yield _join(path, key.name), key.default_value()
            value = config.get(key.name)
            inner = self._meant(value, kinds(key.annotation, key.module), set()) if isinstance(value, dict) else None
            if inner is not None:
                yield from self._defaults(value, inner, _join(path, key.name))

    def _meant(self, value: dict, alternatives: tuple[Kind, ...], built: set[str]) -> Target | None:
        """The one class whose options these are, or None where that is open."""
        names = [str(value[TARGET])] if TARGET in value else [k.dotted for k in alternatives if isinstance(k, Node)]
        if len(names) > 1:
            names = [name for name in names if name in built] or names
        fitting = [found for name in names if (found := target(name)) and value.keys() <= {TARGET, *found.keys}]
        return fitting[0] if len(fitting) == 1 else None

    def _keys(self, config: dict, takers: list[Target], path: str) -> dict:
        checked = {}
        for name, value in config.items():
            full = _join(path, name)
            keys = [taker.keys[name] for taker in takers if name in taker.keys]
            if name == TARGET:
                checked[name] = value
            elif keys and value != MISSING:
                alternatives = tuple(dict.fromkeys(kind for key in keys for kind in kinds(key.annotation, key.module)))
                checked[name] = self._value(value, alternatives, full)
            elif not keys:
                raise InputError(self._unknown(full, takers))
        for key in takers[0].keys.values() if len(takers) == 1 else ():
            if key.name not in checked and (key.default is None or key.name in config):
                self.missing.append(_missing(_join(path, key.name), key))
        return checked

    def _value(self, value: Any, alternatives: tuple[Kind, ...], path: str) -> Any:
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
            raise InputError(
                f"{path} = {dotted} ({self.where(path)}) is not a class of genmodels; "
                f"to allow it add its package: trust=[{package}]"
            )
        if target(dotted) is None:
            raise InputError(f"{path} = {dotted} ({self.where(path)}): there is no such class")

    def _unknown(self, path: str, takers: list[Target]) -> str:
        name = path.rpartition(".")[2]
        known = {key.name: (place, taker) for place, taker, key in reversed(list(self.walk(self.config)))}
        near = nearest(name, [key for taker in takers for key in taker.keys], cutoff=0.6)
        hint = f" did you mean {near!r}?" if near else ""
        elsewhere = known.get(name) or (None if near else known.get(nearest(name, list(known), cutoff=0.7)))
        if elsewhere is not None:  # a key of another part; which classes have it depends on what is chosen
            near, taker = elsewhere
            hint = f" did you mean {near!r}? ({taker.name} has it)"
        meant = [taker for taker in takers if near in taker.keys] or takers
        return f"unknown key {path!r} ({self.where(path)}):{hint} {'; '.join(map(_takes, meant))}"

    def _wrong(self, value: Any, alternatives: tuple[Kind, ...], path: str) -> str:
        # "an integer or null" reads better than "null or an integer", whatever the annotation's order; and beside a
        # class, `dict` in an annotation only says in which form its keys arrive.
        named = any(isinstance(kind, Node) for kind in alternatives)
        told = [kind for kind in alternatives if not (named and isinstance(kind, Table))]
        expected = " or ".join(dict.fromkeys(str(k) for k in sorted(told, key=lambda k: str(k) == "null")))
        choices = [v for kind in alternatives if isinstance(kind, Choice) for v in kind.values]
        near = nearest(value, choices) if isinstance(value, str) else None
        hint = f": did you mean {near!r}?" if near else ""
        if isinstance(value, int | float) and not usable(value):
            hint = ": numbers are finite, and integers have at most 64 bits"
        return f"{path} must be {expected}, got {show(value)!r} ({self.where(path)}){hint}"


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _takes(taker: Target) -> str:
    names = list(taker.keys)
    shown = ", ".join(names[:SHOWN]) or "no keys"
    if len(names) > SHOWN:
        shown += f", ... (--keys lists all {len(names)})"
    return f"this command takes {shown}" if taker.name == "run" else f"{taker.name} takes {shown} ({taker.file})"


def _missing(path: str, key: Key) -> str:
    meaning = f", {key.meaning.rstrip('.')}" if key.meaning else ""
    return f"{path} is missing{meaning}: add for example {path}={EXAMPLES.get(key.name, '...')}"
