"""Configuration by Hydra: overrides in, one plain and checked dictionary out.

A plain override `a.b=v` is passed to Hydra as `++a.b=v`, so that every argument of a class can be set although YAML
does not name it; typing errors are found by the check against the signatures, which is stricter than Hydra's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, OverrideType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from genmodels.cli.schema import Schema
from genmodels.cli.signatures import target
from genmodels.core.checkpoint import name_former, read_header
from genmodels.core.errors import InputError, hint, require_known
from genmodels.core.files import CONFIG_DIR, flat, found_at, groups, in_hydra, quoted
from genmodels.models.build import NETWORKS, TARGET
from genmodels.training.processes import launch


class Composer:
    """Hydra, set up for one command.

    Arguments:
        hydra: Hydra's object, which also launches sweeps.
        command: the name of the primary YAML file and of the module in `genmodels.cli`.
    """

    def __init__(self, hydra: Hydra, command: str):
        self.hydra, self.command = hydra, command
        self.given = "on the command line"  # where overrides come from, for messages
        # Hydra reads its folders again at every call, and its loader copies all that it has.
        self._options = cache(hydra.config_loader.repository.get_group_options)
        self.groups = self._options("", ObjectType.GROUP)

    def parse(self, overrides: list[str]) -> list[Override]:
        """`key=value` words as parsed by Hydra, allowed for keys that YAML does not name.

        Raises:
            InputError: for a word that is not an override.
        """
        parser = OverridesParser.create(config_loader=self.hydra.config_loader)
        try:
            words = [self._open(word) for word in parser.parse_overrides([in_quotes(word) for word in overrides])]
            opened = parser.parse_overrides(words)
            return parser.parse_overrides([*self._trainer_last(opened), *self._with_network(opened)])
        except OverrideParseException as error:
            raise InputError(_unreadable(error.override)) from error

    def _open(self, override: Override) -> str:
        word, key = override.input_line, override.key_or_group
        if not key:
            raise InputError(_unreadable(word))
        plain = override.type in (OverrideType.CHANGE, OverrideType.ADD) and override.package is None
        if not plain or override.is_hydra_override() or "/" in key:
            return word
        if key not in self.groups or isinstance(override.value(), dict):
            return "++" + word.lstrip("+")
        if not override.is_sweep_override():
            # Hydra silently ignores an unknown option of an optional group, such as preset.
            options = self._options(key)
            if override.value() not in options:
                raise InputError(_no_option(key, str(override.value()), options))
        return word

    def _with_network(self, opened: list[Override]) -> list[str]:
        """The words, with the class for `model.net=dit` and the like; a preset's options for another are left out.

        Those of other words stay, before it and after. A sweep over networks starts each of them without a preset's.
        """
        words = [override.input_line for override in opened]
        named = {i: names for i, override in enumerate(opened) if (names := _networks(override))}
        if not named:
            return words
        for i, names in named.items():
            words[i] = f"++model.net._target_={','.join(NETWORKS[name] for name in names)}"
        wanted = [NETWORKS[name] for name in named[max(named)]]
        kept = [word for i, word in enumerate(words) if i > min(named) or word != "~model.net"]
        # Points of a sweep may have other presets.
        chosen = len(wanted) == 1 and kept == words and not any(
            o.is_sweep_override() and o.key_or_group in ("model", "data", "preset", "experiment") for o in opened)
        rest = [o.input_line for o in opened if not f"{o.key_or_group}.".startswith("model.net.")
                and not o.is_sweep_override() and not o.is_hydra_override()]  # fmt: skip
        net = (self.plain(rest).get("model") or {}).get("net") if chosen else None
        if isinstance(net, dict) and wanted == [net.get(TARGET, *wanted)]:
            # Options without a class are of the default one, which alone takes them all.
            if {*net} <= {TARGET, *target(*wanted).keys}:
                return words
        return ["++model.net=null", *kept]

    def _trainer_last(self, opened: list[Override]) -> list[str]:
        """The settings of `trainer=` as words next to an experiment, which is composed later and would win."""
        chosen = {override.key_or_group: override.value() for override in opened}
        if chosen.get("experiment") and any(o.key_or_group == "trainer" and o.is_sweep_override() for o in opened):
            raise InputError("a sweep over trainer= has no effect next to an experiment, whose settings win: sweep "
                             "over single settings, such as trainer.max_steps=60,600")
        if not chosen.get("experiment") or chosen.get("trainer") not in self._options("trainer"):
            return []
        found = self.hydra.config_loader.repository.load_config(f"trainer/{chosen['trainer']}")
        settings = OmegaConf.to_container(found.config)
        settings = settings if found.header.get("package") == "_global_" else {"trainer": settings}
        words = [f"++{key}={in_hydra(value)}" for key, value in flat(settings).items()]
        return [word for word in words if word not in [override.input_line for override in opened]]

    def compose(self, overrides: list[str]) -> dict:
        """The checked configuration of one run.

        Raises:
            InputError: one line, whatever is wrong.
        """
        parsed = self.parse(overrides)
        for override in parsed:
            if override.is_hydra_override():
                raise InputError(f"{override.input_line} is a setting of sweeps, without effect on one run: add -m, or "
                                 "leave it out")
        swept = [o for o in parsed if o.is_sweep_override()]
        if swept:
            key, value = swept[0].key_or_group, swept[0].get_value_string()
            raise InputError(f"{key}={value} holds several values: add -m to run one after the other, "
                             f"write {key}=[{value}] for a list, or \"{key}='{value}'\" for text")
        plain = self._plain(parsed)
        config = self.schema(parsed, plain).check(plain)
        if config.get("seed", 0) < 0:
            # Other programs take -1 for a new seed every time; here it would be like any other.
            raise InputError(f"seed must be at least 0, got {config['seed']}: a seed always gives "
                             "the same, choose one")
        return config

    def plain(self, overrides: list[str]) -> dict:
        """The configuration as Hydra composes it, neither checked nor complete."""
        return self._plain(self.parse(overrides))

    def _plain(self, parsed: list[Override]) -> dict:
        config = self._of_run(parsed)
        if config is None:
            config = self._call(lambda: compose(self.command, [o.input_line for o in parsed]))
        return self._call(lambda: OmegaConf.to_container(config, resolve=True))

    def _of_run(self, parsed: list[Override]) -> DictConfig | None:
        """The settings of the run that is resumed by its path, with those of the command line.

        None for any other command, and where a word chooses a model, data or other group, or leaves a key out. Packages
        that the run trusted are not trusted again: its folder may come from elsewhere.
        """
        resume = next((o.value() for o in parsed if o.key_or_group == "resume"), None)
        groups = self.groups
        if self.command != "train" or not resume or resume in ("last", "auto") or any(
                o.key_or_group in groups or o.is_sweep_override() or o.is_delete() for o in parsed):  # fmt: skip
            return None
        place = Path(str(resume)).expanduser()
        file = (place if place.is_dir() else place.parent) / "config.yaml"
        if file.is_file():
            settings = self._call(lambda: yaml.safe_load(file.read_text(encoding="utf-8")))
        elif place.is_file():
            settings = read_header(place)["config"]
        else:
            return None
        if not isinstance(settings, dict):
            raise InputError(f"{file} holds no settings: give those of the run, model=..., data=... and others")
        name_former(settings)
        if launch() is not None and isinstance(settings.get("trainer"), dict):  # torchrun or srun decides these numbers
            settings["trainer"] = {k: v for k, v in settings["trainer"].items() if k not in ("devices", "num_nodes")}
        config = OmegaConf.create({**settings, "trust": []})
        for override in parsed:
            key, value = override.key_or_group, override.value()
            self._call(lambda key=key, value=value: OmegaConf.update(config, key, value, force_add=True))
        return config

    def schema(self, parsed: list[Override], config: dict) -> Schema:
        """The settings of this command, with the place where each was set and the packages that the user trusts."""
        trust = config.get("trust") or []
        return Schema(f"genmodels.cli.{self.command}.run", lambda path: self._where(path, parsed),
                      trust if isinstance(trust, list) else [trust])

    def points(self, overrides: list[str]) -> list[list[str]]:
        """The overrides of every point of a sweep, each point composed and checked.

        A sweeper other than Hydra's basic one chooses its points one after the other. Then these are examples that
        suffice to find a mistake: they differ from the first in one setting, with every choice and both ends of every
        interval.
        """
        parsed = self.parse(overrides)
        sweeper = self.settings(parsed).sweeper
        params = self.parse([f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()])
        task = [o for o in [*params, *parsed] if not o.is_hydra_override()]
        if sweeper._target_.endswith("BasicSweeper"):
            batches = self._call(lambda: BasicSweeper.split_arguments(task, None))
            points = [point for batch in batches for point in batch]
        else:
            words = [_words(override) for override in task]
            if empty := next((o.input_line for o, one in zip(task, words, strict=True) if not one), None):
                raise InputError(f"{empty.lstrip('+')} has no values: there is nothing to search")
            first = [one[0] for one in words]
            points = [first, *([*first[:i], word, *first[i + 1 :]] for i, one in enumerate(words) for word in one[1:])]
        for point in points:
            self.compose(point)
        return points

    def settings(self, parsed: list[Override]):
        """Hydra's own settings of a sweep: its folder, sweeper and launcher."""
        fixed = [o.input_line for o in parsed if not o.is_sweep_override()]
        return self._call(lambda: compose(self.command, fixed, return_hydra_config=True)).hydra

    def _call(self, function):
        """The result of a call to Hydra, with its errors as an InputError of one line."""
        try:
            return function()
        except MissingConfigException as error:
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            if not group:
                raise InputError(" ".join(str(error).split())) from error
            raise InputError(_no_option(group, name, error.options or [])) from error
        except yaml.YAMLError as error:
            raise InputError(f"a configuration file is not YAML: {' '.join(str(error).split())}") from error
        except OSError as error:
            raise InputError(f"a configuration file cannot be read: {error.filename}: {error.strerror}") from error
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
            text = str(error).split("full_key")[0] + (f" {str(cause).split('full_key')[0]}" if cause else "")
            text = " ".join(text.split())
            if text.startswith("Could not override '"):
                group = text.split("'")[1]
                raise InputError(f"{group}= cannot be chosen in {self.command}: it comes with the checkpoint or is not "
                                 f"used; `genmodels {self.command} --keys` lists what can be set") from error
            raise InputError(text) from error

    def _where(self, path: str, parsed: list[Override]) -> str:
        """Where a dotted key was last set."""
        for override in parsed:
            key = override.key_or_group
            tail = path.removeprefix(key).removeprefix(".")
            if (path == key or path.startswith(f"{key}.")) and found_at(override.value(), tail):
                return self.given
            if key.startswith(f"{path}."):
                return self.given
        words = [o.input_line for o in parsed]
        chosen = self.hydra.config_loader.compute_defaults_list(self.command, words, RunMode.RUN).defaults
        for default in reversed(chosen):
            package = default.package or ""
            inside = path == package or path.startswith(f"{package}.") or not package
            file = self._file(default.config_path) if inside else None
            if file and found_at(yaml.safe_load(file.read_text(encoding="utf-8")), path[len(package) :].strip(".")):
                own = file.is_relative_to(CONFIG_DIR.parent)
                shown = file.relative_to(CONFIG_DIR.parent) if own else file
                of_preset = file.parent.name == "preset"
                return f"in {shown}" + ", which '~preset' leaves out" * of_preset
        return "in the configuration"

    def _file(self, config_path: str) -> Path | None:
        folders = [Path(s.path) for s in self.hydra.config_loader.get_sources() if s.scheme() == "file"]
        return next((f for folder in folders if (f := folder / f"{config_path}.yaml").is_file()), None)


@contextmanager
def composer(command: str, config_dir: str | None = None) -> Iterator[Composer]:
    """Hydra over the configuration folder, and the user's folder if there is one, for one command.

    Raises:
        InputError: when the user's folder does not exist.
    """
    version.setbase("1.3")
    search = create_config_search_path(str(CONFIG_DIR))
    if config_dir is not None:
        folder = Path(config_dir).expanduser().absolute()
        if not folder.is_dir():
            raise InputError(f"--config-dir {config_dir}: there is no such folder")
        search.prepend("command-line", f"file://{folder}", anchor=SearchPathQuery(provider="main"))
    GlobalHydra.instance().clear()
    try:
        yield Composer(Hydra.create_main_hydra2(task_name=command, config_search_path=search), command)
    finally:
        GlobalHydra.instance().clear()


def _words(override: Override) -> list[str]:
    """An override with each of its values; of an interval, with its ends and, among numbers, one between."""
    key, value = override.get_key_element(), override.value()
    if isinstance(value, IntervalSweep):
        between = [] if isinstance(value.start, int) else [value.start + 0.618 * (value.end - value.start)]
        return [f"{key}={one}" for one in (value.start, value.end, *between)]
    if override.is_sweep_override():
        return [f"{key}={one}" for one in override.sweep_string_iterator()]
    return [f"{key}={override.get_value_element_as_str()}"]


def _networks(override: Override) -> list[str]:
    """The names of networks that `model.net=dit`, or a sweep over several, gives; empty for any other word."""
    value = override.value() if override.key_or_group == "model.net" else None
    names = value.list if isinstance(value, ChoiceSweep) else [value]
    return names if all(isinstance(name, str) and name in NETWORKS for name in names) else []


def _no_option(group: str, name: str, options: list[str]) -> str:
    if group == "hydra/launcher":
        return (f"unknown {group} {name!r}:{hint(name, options, '')} (there is {', '.join(options)}; "
                "pip install 'genmodels[scale]' adds joblib, submitit_local and submitit_slurm)")
    has = ", ".join(options) if options else "nothing yet"
    return f"unknown {group} {name!r}{hint(name, options)} ({CONFIG_DIR.name}/{group} has {has})"


def _unreadable(word: str) -> str:
    if "=" not in word.lstrip("~"):
        return f"cannot read {word!r}: write key=value, for example {word}=1"
    key, _, value = word.partition("=")
    if not key:
        return f"cannot read {word!r}: a key is missing before the equals sign"
    return f"cannot read {word!r}: quote the value, as in \"{key}={quoted(value)}\", or write lists as {key}=[1,2]"


_PLACES = ("run_dir", "out", "ckpt", "resume", "init", "path", "data.root")


def in_quotes(word: str) -> str:
    """A word whose value is a path from `~/` on, has letters outside ASCII, or is a name of digits, quoted.

    Hydra cannot read the first two, and reads 2024_01_31 as a number.

    Example:
        >>> [in_quotes(word) for word in ("n=3", "data.root=~/data", "run_dir=Übung/a b", "out=1_2", "cond=[ä,ö]")]
        ['n=3', "data.root='~/data'", "run_dir='Übung/a b'", "out='1_2'", 'cond=[ä,ö]']
    """
    key, equals, value = word.partition("=")
    foreign = not value.isascii() and not set(value) & set("'\"[]{}(),$\\")
    foreign |= key in _PLACES and re.fullmatch(r"\d+(_\d+)+", value) is not None
    # Shells do not expand ~ after a key with a dot.
    return f"{key}{equals}{quoted(value)}" if foreign or value.startswith("~/") else word


def words_by_name(hydra: Composer, chosen: list[str], settings: dict[str, Any]) -> list[str]:
    """Settings of a training as words of the command line, after those chosen; a name alone is given its full path.

    Raises:
        InputError: for a name that no class, or more than one, has.

    Example:
        >>> with composer("train") as hydra:
        ...     words_by_name(hydra, ["model=nsf"], {"data": "toy", "max_steps": 9, "trainer": {"precision": "32"}})
        ['model=nsf', 'data=toy', 'trainer.max_steps=9', "trainer.precision='32'"]
    """
    for key, value in flat(settings).items():
        parts = value if isinstance(value, list | tuple) else [value]
        if any(hasattr(part, "__array__") and getattr(part, "shape", ()) for part in parts):
            raise InputError(f"{key} takes no array: " + (
                "write it to a file by numpy.savez('items.npz', x=...), and give data='arrays', file='items.npz'"
                if key.rpartition(".")[2] in ("data", "file") else "give a list, by its tolist()"))
    choices = (*groups(), "preset", "resume")
    named = {key: value for key, value in settings.items() if key in choices and not isinstance(value, dict)}
    first = [f"{key}={in_hydra(value)}" for key, value in named.items()]
    if isinstance(net := settings.get("net"), str):  # it decides which options there are
        named["net"] = net
        first.append(f"model.net={in_hydra(net)}")
    composed = hydra.plain([*chosen, *first])
    paths = [path for path, _, _ in hydra.schema([], composed).walk(composed)]
    found = []
    for key, value in settings.items():
        if key in named:
            continue
        if key in choices or key in paths or "." in key:
            full = key
        else:
            fitting = [path for path in dict.fromkeys(paths) if path.rpartition(".")[2] == key]
            depth = min((path.count(".") for path in fitting), default=0)
            fitting = [path for path in fitting if path.count(".") == depth]
            if len(fitting) > 1:
                raise InputError(f"{key} may be any of {', '.join(fitting)}: give one of these, as in "
                                 f"train(..., \"{fitting[0]}={value}\")")
            require_known("train", [] if fitting else [key], [path.rpartition(".")[2] for path in paths])
            full = fitting[0]
        found += [f"{name}={in_hydra(leaf)}" for name, leaf in flat({full: value}).items()]
    return [*chosen, *first, *found]
